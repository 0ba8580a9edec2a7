"""Compiles kernels for a GPU on a machine that has none: what the interpreter forgives, the compiler does not."""

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.uint16: "*u16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def depth(constant):
    """Return how many tuples are nested in one another."""
    return 1 + max(map(depth, constant), default=0) if isinstance(constant, tuple) else 0


class CompileOnly:
    """Stands in for a kernel: a launch compiles it for the arguments, and runs nothing."""

    def __init__(self, kernel, made, compiler=triton.compile):
        self.kernel, self.made, self.arg_names, self.compiler = kernel, made, kernel.arg_names, compiler

    def __getitem__(self, grid):
        return self.launch

    def warmup(self, *args, grid, **constants):
        self.launch(*args, **constants)

    def launch(self, *args, num_warps=4, enable_fp_fusion, maxnreg=None, **constants):
        names = self.kernel.arg_names
        signature, values = {}, {}
        for name, value in zip(names, [*args, *(None,) * (len(names) - len(args))], strict=True):
            if name in constants:
                assert depth(constants[name]) <= 2, f"{name}: Triton 3.6 cannot read a tuple in a tuple in a tuple"
                signature[name], values[(names.index(name),)] = "constexpr", constants[name]
            else:
                signature[name] = TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
        key = (self.kernel.__name__, tuple(signature.items()), tuple(values.items()), num_warps)
        if key not in self.made:
            source = ASTSource(self.kernel, signature, values, {})
            self.made[key] = self.compiler(
                source,
                target=HOPPER,
                options={"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion, "maxnreg": maxnreg},
            )
