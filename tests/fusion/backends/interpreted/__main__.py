"""Compares kernels under Triton's interpreter with the torch executor.

Started by test_triton.py, with ``TRITON_INTERPRET=1``::

    python tests/fusion/backends/interpreted [--all] FILE...

Without ``--all`` every kernel, op code and branch runs at least once; with it, every type and layout with every pipeline.
"""

import importlib
import sys

from triton.runtime.interpreter import InterpretedFunction, InterpreterOptions, interpreter_builder

from gpuaug.fusion.backends.triton import backend, boxes, filter_tiles, levels


def shrink_blocks():
    """Make blocks small, so that small images have several. The interpreter takes its time for each, and for a blur's rows."""
    backend.TILES = dict.fromkeys(backend.TILES, (16, 32))
    backend.COLOUR_TILE = (16, 32)
    backend.REST_BLOCK = 256
    filter_tiles.ACROSS = 64
    boxes.BLOCK = 32
    levels.BLOCK = 256
    levels.TILE_BLOCK = 64


def leave_out_overflow_checks():
    """Leave out the interpreter's checks that integers stay within 32 bits: a third of the time."""
    interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)


def patch_language_once():
    """Patch Triton's language for each kernel, and not again for each of our functions that it calls: a third of the time."""
    patched = InterpretedFunction.__call__

    def call(self, *args, **kwargs):
        if self.fn.__module__.startswith("gpuaug."):
            return self.rewrite()(*args, **kwargs)
        return patched(self, *args, **kwargs)  # Triton's own functions see the language under other names

    InterpretedFunction.__call__ = call


def main(arguments):
    """Names of the comparisons that failed, and how."""
    every = "--all" in arguments
    names = [argument for argument in arguments if argument != "--all"]
    shrink_blocks()
    leave_out_overflow_checks()
    patch_language_once()
    for name in names:
        module = importlib.import_module(f"fusion.backends.interpreted.interpret_{name}")
        yield from (f"{name}: {text}" for text in module.failures(every=every))


if __name__ == "__main__":
    sys.exit("\n".join(main(sys.argv[1:])) or 0)
