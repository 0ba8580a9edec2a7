"""Compares kernels under Triton's interpreter with the torch executor.

Started by test_triton.py. By hand, from the root of the repository, where PART is the name of an ``interpret_PART.py``::

    PYTHONPATH=tests:. TRITON_INTERPRET=1 python tests/fusion/backends/interpreted [--all] PART...

Without ``--all`` every kernel, op code and branch runs at least once; with it, every type and layout with every pipeline.
"""

import importlib
import sys

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, InterpreterOptions, interpreter_builder

from gpuaug.fusion.backends.triton import backend, boxes
from gpuaug.fusion.backends.triton.filters import levels, small_blur, tiles
from gpuaug.fusion.backends.triton.launch import Launch


def shrink_blocks():
    """Make blocks small, so that small images have several. The interpreter takes its time for each, and for a blur's rows."""
    backend.TILES = dict.fromkeys(backend.TILES, (16, 32))
    backend.MEAN_TILE = (16, 32)
    backend.CONTRAST_BLOCK = 256
    tiles.ALONG = small_blur.ALONG = 8
    tiles.TILES = small_blur.TILES = 2
    boxes.BLOCK = 32
    levels.BLOCK = 256
    levels.TILE_BLOCK = 64
    levels.SPLIT_PIXELS = 110


def leave_out_overflow_checks():
    """Leave out the interpreter's checks that integers stay within 32 bits: a third of the time."""
    interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)


def patch_language_once():
    """Patch Triton's language once per launch, and not again for each function that a kernel calls: half of the time.

    Modules of Triton's own see the language under other names. These stay patched after the first call of such a function.
    """
    patched, modules = InterpretedFunction.__call__, set()

    def call(self, *args, **kwargs):
        module = self.fn.__module__
        if module in modules or module.startswith("gpuaug."):
            return self.rewrite()(*args, **kwargs)
        modules.add(module)
        return patched(self, *args, **kwargs)

    InterpretedFunction.__call__ = call


def look_types_up_once():
    """Keep what follows from a type of Triton's alone, which the interpreter makes at each operation: a third of the time."""
    dtype_of, begin, of_block = interpreter._get_np_dtype, tl.tensor.__init__, tl.block_type.with_element_ty
    dtypes, attributes, blocks = {}, {}, {}

    def kept_dtype(kind):
        scalar = kind.scalar
        if scalar.name not in dtypes:
            dtypes[scalar.name] = dtype_of(scalar)
        return dtypes[scalar.name]

    def begun(self, handle, kind):
        if kind.name not in attributes:
            begin(self, handle, kind)
            attributes[kind.name] = {name: value for name, value in vars(self).items() if name not in ("handle", "type")}
        vars(self).update(attributes[kind.name], handle=handle, type=kind)

    def kept_block(self, scalar):
        key = self.name, scalar.name
        if key not in blocks:
            blocks[key] = of_block(self, scalar)
        return blocks[key]

    interpreter._get_np_dtype, tl.tensor.__init__, tl.block_type.with_element_ty = kept_dtype, begun, kept_block


def convert_operands_once():
    """Return operands of one type as they are, and build the block of a constant once: a quarter of the time.

    A division converts its operands each time, since Triton divides half precision in single precision.
    """
    convert = TritonSemantic.binary_op_type_checking_impl
    blocks = {}

    def converted(self, lhs, rhs, left_pointer=False, right_pointer=False, arithmetic=True, division=False):
        left_is_tensor, right_is_tensor = isinstance(lhs, tl.tensor), isinstance(rhs, tl.tensor)
        if left_is_tensor and right_is_tensor and not division:
            scalar = lhs.type.scalar
            if scalar.name == rhs.type.scalar.name and not scalar.is_ptr():
                return (lhs, rhs) if lhs.type.name == rhs.type.name else self.broadcast_impl_value(lhs, rhs)
        if left_is_tensor == right_is_tensor:
            return convert(self, lhs, rhs, left_pointer, right_pointer, arithmetic, division)
        tensor, constant = (lhs, rhs) if left_is_tensor else (rhs, lhs)
        key = left_is_tensor, repr(constant), tensor.type.name, arithmetic, division
        if key not in blocks:
            both = convert(self, lhs, rhs, left_pointer, right_pointer, arithmetic, division)
            if both[not left_is_tensor] is not tensor:
                return both
            blocks[key] = both[left_is_tensor]
        return (lhs, blocks[key]) if left_is_tensor else (blocks[key], rhs)

    TritonSemantic.binary_op_type_checking_impl = converted


def check_addresses():
    """Have kernels fail that read or write past the ends of a tensor.

    A block whose addresses lie in none of those that a kernel was given has them from a table, as that of masks.
    """
    ranges = []
    launch, load, store = Launch.__call__, InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def launched(self, tensors, *args, **kwargs):
        storages = [tensor.untyped_storage() for tensor in tensors]
        ranges[:] = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
        launch(self, tensors, *args, **kwargs)

    def check(pointers, mask):
        size = pointers.get_element_ty().primitive_bitwidth // 8
        least, most = pointers.data.min(), pointers.data.max() + size
        if any(first <= least and most <= last for first, last in ranges):
            return
        used = pointers.data[mask.data]
        inside = np.zeros(used.shape, bool)
        for first, last in ranges:
            inside |= (used >= first) & (used + size <= last)
        if inside.any() and not inside.all():
            raise IndexError(f"{(~inside).sum()} of {inside.size} addresses lie in no tensor")

    def checked_load(self, pointers, mask, *args):
        check(pointers, mask)
        return load(self, pointers, mask, *args)

    def checked_store(self, pointers, value, mask, *args):
        check(pointers, mask)
        return store(self, pointers, value, mask, *args)

    Launch.__call__ = launched
    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = checked_load, checked_store


def main(arguments):
    """Names of the comparisons that failed, and how."""
    every = "--all" in arguments
    names = [argument for argument in arguments if argument != "--all"]
    shrink_blocks()
    leave_out_overflow_checks()
    patch_language_once()
    look_types_up_once()
    convert_operands_once()
    check_addresses()
    for name in names:
        module = importlib.import_module(f"fusion.backends.interpreted.interpret_{name}")
        yield from (f"{name}: {text}" for text in module.failures(every=every))


if __name__ == "__main__":
    sys.exit("\n".join(main(sys.argv[1:])) or 0)
