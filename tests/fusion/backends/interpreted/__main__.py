"""Compares kernels under Triton's interpreter with the torch executor.

Started by test_triton.py. By hand, from the root of the repository, where PART is the name of an ``interpret_PART.py``::

    PYTHONPATH=tests:. TRITON_INTERPRET=1 python tests/fusion/backends/interpreted [--all] PART...

Without ``--all`` every kernel, op code and branch runs at least once; with it, every type and layout with every pipeline.
"""

import importlib
import sys

import numpy as np
from fusion.backends.interpreted.acceleration import (
    leave_out_overflow_checks,
    look_types_up_once,
    patch_language_once,
    replay_operations,
)
from triton.runtime.interpreter import InterpreterBuilder

from gpuaug.fusion.backends.triton import backend, boxes, patches, tiles
from gpuaug.fusion.backends.triton.filters import frame, levels
from gpuaug.fusion.backends.triton.launch import Launch


def shrink_blocks():
    """Make blocks small, so that small images have several, but not many: the interpreter takes its time for each.

    A blur's rows take time as well. Blocks of patches and of tiles are larger than on a GPU, and images have two to nine.
    """
    backend.TILES = dict.fromkeys(backend.TILES, (16, 32))
    backend.MEAN_TILE = (16, 32)
    backend.CONTRAST_BLOCK = 256
    frame.TILE_ALONG = 8
    frame.MOST_TILES = 2
    boxes.BLOCK = 32
    levels.BLOCK = 256
    levels.TILE_BLOCK = 64
    levels.SPLIT_PIXELS = 110
    patches.TILE = (16, 64)
    tiles.BLOCK = (32, 32)


def check_addresses():
    """Have kernels fail that read or write past the ends of a tensor.

    A block whose addresses lie in none of those that a kernel was given has them from a table, as that of tiles.
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
    replay_operations()
    check_addresses()
    for name in names:
        module = importlib.import_module(f"fusion.backends.interpreted.interpret_{name}")
        yield from (f"{name}: {text}" for text in module.failures(every=every))


if __name__ == "__main__":
    sys.exit("\n".join(main(sys.argv[1:])) or 0)
