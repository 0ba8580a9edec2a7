"""Calls of C functions in loops that Numba compiles: the loops do not hold the interpreter's lock."""

import logging
import platform
import sys
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

_log = logging.getLogger("gpuaug")

_MACHINES = ("x86_64", "aarch64", "arm64")
"""Machines on which, except on Windows, C functions take a structure of up to 16 bytes in integer registers."""

LOW = 0xFFFF_FFFF
"""Mask of the bits of a 32-bit result in a 64-bit register."""

Loop = TypeVar("Loop")


def compile_once(function: Callable[[], Loop]) -> Callable[[], Loop]:
    """Decorate a function that compiles: it is called once per process, and other threads wait for its result.

    With ``functools.cache`` alone, each thread that calls it before the first result would compile.
    """
    lock, cached = threading.Lock(), cache(function)

    @wraps(function)
    def locked() -> Loop:
        with lock:
            return cached()

    return locked


def compiled_or_none(purpose: str, compile_loop: Callable[[], Loop]) -> Loop | None:
    """Return the result of ``compile_loop``, or ``None`` if Numba is not installed or cannot be used on this machine.

    Args:
        purpose: What the loop does, for the message if Numba is installed and fails.
        compile_loop: Function that imports Numba and returns compiled functions.
    """
    if sys.platform == "win32" or platform.machine() not in _MACHINES:
        return None
    try:
        return compile_loop()
    except ImportError:
        return None
    except Exception as error:  # Numba raises errors of other types for versions of NumPy or SciPy that it does not support
        _log.warning("Numba is not used to %s, because it failed: %r", purpose, error)
        return None


def c_call() -> Any:
    """Return a function for Numba code that calls a C function. Arguments: its address, and a tuple of 64-bit integers."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    @intrinsic  # type: ignore[untyped-decorator]
    def call(_typing_context: Any, _address: Any, arguments: Any) -> Any:
        def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
            word = ir.IntType(64)
            count = len(signature.args[1])
            function = builder.inttoptr(values[0], ir.FunctionType(word, [word] * count).as_pointer())
            return builder.call(function, [builder.extract_value(values[1], position) for position in range(count)])

        return types.int64(types.int64, types.UniTuple(types.int64, len(arguments))), generate  # type: ignore[no-untyped-call]

    return call
