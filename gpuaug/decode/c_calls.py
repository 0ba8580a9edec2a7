"""Calls of C functions by their addresses, in loops over the images of a batch.

Numba compiles the loops if it is installed; compiled loops do not hold the interpreter's lock. Otherwise Python runs the loops,
and ctypes calls the functions.
"""

import ctypes
import importlib
import logging
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, wraps
from typing import Any, TypeVar

_log = logging.getLogger("gpuaug")

_MACHINES = ("x86_64", "aarch64", "arm64")
"""Machines on which, except on Windows, C functions take a structure of up to 16 bytes in integer registers.

So a structure can be passed as one or two 64-bit integers.
"""

LOW = 0xFFFF_FFFF
"""Mask for a 32-bit result of a C function: the upper half of the returned 64-bit register is undefined."""

Loop = TypeVar("Loop")
"""Type of the loops that a function defines: a function, or a named tuple of functions."""


def compile_once(function: Callable[[], Loop]) -> Callable[[], Loop]:
    """Decorator: call a function that compiles once per process; other threads wait for its result.

    With ``functools.cache`` alone, each thread that calls the function before the first call has returned would compile.
    """
    lock = threading.Lock()
    cached = cache(function)

    @wraps(function)
    def locked() -> Loop:
        with lock:
            return cached()

    return locked


def _is_supported() -> bool:
    """Return whether the machine is supported: C functions take structures in integer registers (``_MACHINES``)."""
    return sys.platform != "win32" and platform.machine() in _MACHINES


def compiled_or_python(purpose: str, define: Callable[[Any, Any, Any], Loop]) -> Loop | None:
    """Return the loops of ``define``, compiled by Numba if it is installed; ``None`` if the machine is not supported.

    Args:
        purpose: Purpose of the loops, a verb with its object, for the log message if Numba is installed and fails.
        define: Function of (call, call_unlocked, compile) that returns the loops. ``call(address, arguments)`` calls a C
            function with a tuple of 64-bit integers, and returns a 64-bit integer. ``call_unlocked`` does the same. The two
            differ only if the loops are not compiled: then ``call`` keeps the interpreter's lock, for functions that take less
            time than acquiring the lock again, and ``call_unlocked`` releases the lock. ``compile`` is the decorator for each
            function that ``define`` returns or that such a function calls.
    """
    if not _is_supported():
        return None
    try:
        from numba import njit

        call = c_call()
        return define(call, call, njit(nogil=True))
    except ImportError:
        pass
    except Exception as error:  # Numba raises errors of other types for versions of NumPy or SciPy that it does not support
        _log.warning("Numba is not used to %s, because it failed: %r", purpose, error)
    return in_python(define)


def in_python(define: Callable[[Any, Any, Any], Loop]) -> Loop:
    """Return the loops of ``compiled_or_python`` as Python functions."""
    return define(_python_call(ctypes.PYFUNCTYPE), _python_call(ctypes.CFUNCTYPE), lambda function: function)


def _python_call(function_type: Any) -> Callable[[int, Sequence[int]], int]:
    """Return ``call`` or ``call_unlocked`` for Python. ``function_type``: ``PYFUNCTYPE`` or ``CFUNCTYPE`` of ctypes."""

    @cache
    def prototype(count: int) -> Any:
        """Return the ctypes type of functions that take ``count`` 64-bit integers and return one."""
        return function_type(ctypes.c_int64, *[ctypes.c_int64] * count)

    return lambda address, arguments: prototype(len(arguments))(int(address))(*arguments)


def load_library(paths: Iterable[str], names: Sequence[str]) -> ctypes.CDLL | None:
    """Return the first library that can be loaded and has all functions ``names``.

    Returns ``None`` if there is no such library, or ``compiled_or_python`` does not support the machine.
    """
    for path in paths if _is_supported() else ():
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(path)
            for name in names:
                getattr(library, name)
            return library
    return None


def addresses(library: ctypes.CDLL | None, names: Sequence[str]) -> list[int]:
    """Return the addresses of functions of a library; zeros if ``library`` is ``None``."""
    return [0 if library is None else ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]


@cache
def addresses_in_module(module: str, names: tuple[str, ...]) -> list[int]:
    """Return the addresses of C functions in the library file of a Python module of another package.

    The library also finds functions of the libraries that the module is linked to. Returns zeros if the module cannot be
    imported, or one of the functions is missing.
    """
    try:
        path = str(importlib.import_module(module).__file__)
    except ImportError:
        return addresses(None, names)
    return addresses(load_library([path], names), names)


def c_call() -> Any:
    """Return ``call(address, arguments)`` for code that Numba compiles: ``arguments`` is a tuple of 64-bit integers."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    @intrinsic  # type: ignore[untyped-decorator]
    def call(_typing_context: Any, _address: Any, arguments: Any) -> Any:
        # Numba calls this function to generate the machine code of one call.
        def generate(_context: Any, builder: Any, signature: Any, values: Any) -> Any:
            word = ir.IntType(64)  # type of all arguments and of the result
            count = len(signature.args[1])
            function = builder.inttoptr(values[0], ir.FunctionType(word, [word] * count).as_pointer())
            return builder.call(function, [builder.extract_value(values[1], position) for position in range(count)])

        return types.int64(types.int64, types.UniTuple(types.int64, len(arguments))), generate  # type: ignore[no-untyped-call]

    return call
