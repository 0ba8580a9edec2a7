"""Calls of C functions in loops that Numba compiles: the loops do not hold the interpreter's lock."""

import ctypes
import logging
import platform
import sys
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

_log = logging.getLogger("gpuaug")

_MACHINES = ("x86_64", "aarch64", "arm64")
"""Machines on which, except on Windows, C functions take a structure of up to 16 bytes in integer registers."""

LOW = 0xFFFF_FFFF
"""Mask of the bits of a 32-bit result in a 64-bit register."""

Loop = TypeVar("Loop")
Arguments = TypeVarTuple("Arguments")


def compile_once(function: Callable[[*Arguments], Loop]) -> Callable[[*Arguments], Loop]:
    """Decorate a function that compiles: it is called once per process and arguments, and other threads wait for its result.

    With ``functools.cache`` alone, each thread that calls it before the first result would compile.
    """
    lock = threading.Lock()
    cached = cache(function)

    @wraps(function)
    def locked(*arguments: *Arguments) -> Loop:
        with lock:
            return cached(*arguments)

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


def call_each(function: Any, arguments: NDArray[np.int64]) -> NDArray[np.int64]:
    """Call a C function once per row of arguments.

    Args:
        function: Function of ctypes, whose arguments and result are integers of at most 64 bits, or addresses.
        arguments: (n, k) arguments of the n calls.

    Returns:
        (n,) results of 32 bits.
    """
    loop = _loop_over_calls(arguments.shape[1])
    if loop is None:
        return np.array([function(*row) & LOW for row in arguments.tolist()], np.int64)
    return loop(ctypes.cast(function, ctypes.c_void_p).value or 0, arguments)


@compile_once
def _loop_over_calls(count: int) -> Callable[[int, NDArray[np.int64]], NDArray[np.int64]] | None:
    """Return the compiled loop of ``call_each`` for functions of ``count`` arguments, or ``None`` without Numba."""
    return compiled_or_none("call C functions", lambda: _compile_loop(count))


def _compile_loop(count: int) -> Callable[[int, NDArray[np.int64]], NDArray[np.int64]]:
    """Compile the loop of ``call_each``.

    Raises:
        ImportError: If Numba is not installed.
    """
    from numba import njit
    from numba.np.unsafe.ndarray import to_fixed_tuple

    call = c_call()
    as_tuple: Any = to_fixed_tuple

    @njit(nogil=True)  # type: ignore[untyped-decorator]
    def loop(address: int, arguments: NDArray[np.int64]) -> NDArray[np.int64]:
        results = np.empty(len(arguments), np.int64)
        for index in range(len(arguments)):
            results[index] = call(address, as_tuple(arguments[index], count)) & LOW
        return results

    loop(0, np.empty((0, count), np.int64))
    return loop  # type: ignore[no-any-return]
