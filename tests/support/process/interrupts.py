"""Ctrl-C at a chosen place within gpuaug's own code, instead of at whatever place a signal happens to meet."""

import dis
import os
import sys
import weakref
from functools import cache
from itertools import pairwise
from pathlib import Path

import gpuaug

ROOT = Path(gpuaug.__file__).parent
HEARS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME"}
"""Instructions after which the interpreter looks for signals. It also does at ``JUMP_BACKWARD``, before it jumps."""


@cache
def places(code):
    """Offsets of the instructions of ``code`` before which an interrupt may be raised."""
    instructions = list(dis.get_instructions(code))
    jumps = {instruction.offset for instruction in instructions if instruction.opname == "JUMP_BACKWARD"}
    return jumps | {after.offset for before, after in pairwise(instructions) if before.opname in HEARS}


class Error(KeyboardInterrupt):
    """An interrupt that may be referenced weakly."""


class Interrupt:
    """Raises ``KeyboardInterrupt`` on this thread at the ``at``-th place, counted from 1, where a signal may be heard.

    At 0 it raises nothing, and counts the places.

    With ``within``, the places are those of one folder or file of gpuaug.
    """

    def __init__(self, at, within=""):
        self._at, self._process = at, os.getpid()
        self.count = 0
        """Number of places so far."""
        self._within = str(ROOT / within)
        self.place = None
        """The function that it was raised in, or ``None`` if there were fewer places."""
        self.error = None
        """Weak reference to the error that was raised."""

    def __enter__(self):
        self._outer = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # or Python 3.12 does not trace instructions, whatever later frames say
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc):
        sys.settrace(self._outer)

    def _trace(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(self._within):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._opcode

    def _opcode(self, frame, event, arg):
        if event == "opcode" and frame.f_lasti in places(frame.f_code) and os.getpid() == self._process:
            self.count += 1
            if self.count == self._at:
                self.place = frame.f_code.co_qualname
                raise self._new_error()
        return self._opcode

    def _new_error(self):
        error = Error()
        self.error = weakref.ref(error)
        return error
