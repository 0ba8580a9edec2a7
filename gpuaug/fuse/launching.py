"""Launching Triton kernels with less of the training thread's time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, int, int], args: Sequence[Any], constants: dict[str, Any], *, warps: int = 4) -> None:
    """Launch ``kernel`` on the current stream of the current device.

    Triton works out anew at each launch which compiled form of a kernel its arguments need, from every argument's value. Our
    kernels are specialised on no value but their constants, so the constants and the tensors' types decide alone.

    Args:
        kernel: A ``triton.jit`` function whose constants come last.
        grid: Three numbers of blocks.
        args: Everything but the constants, in order.
        constants: The constants by name.
        warps: Warps in a block.
    """
    types = tuple(arg.dtype for arg in args if isinstance(arg, Tensor))
    device = args[0].device.index
    # 32 bits hold every other argument; a stride may need more, and then Triton has to see it.
    wide = any(arg.__class__ is int and arg > 0x7FFFFFFF for arg in args)
    key = (kernel, device, types, wide, warps, *constants.values())
    found = _compiled.get(key)
    if found is not None:
        found[0][grid](*args, *found[1])
        return
    # Fused products and sums are what makes a byte's share of 255 exact; the compiler's default differs between versions.
    made = kernel[grid](*args, **constants, num_warps=warps, enable_fp_fusion=True)
    if made is not None:  # the interpreter compiles nothing
        _compiled[key] = made, tuple(constants[name] for name in kernel.arg_names[len(args) :])


def on_device(device: torch.device) -> Any:
    """A block in which launches go to ``device``: Triton uses the current one, whatever the tensors are on."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
