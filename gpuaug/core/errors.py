"""Classes of errors and warnings, and checks of arguments.

A message about an argument has the form ``<what> must be <rule>, got <value>. <way out>.`` A message about an event, such as an
iterator that ended or a setup that is slow, has the form ``<what happened>, because <why>. <way out>.``
"""

import contextlib
import operator
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from reprlib import Repr
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")

DOCUMENTATION = "https://gpuaug.readthedocs.io/en/stable/"
"""URL of the documentation, for links in messages."""

_PACKAGES = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))
LIBRARY_FILES = (*_PACKAGES, warnings.__file__, contextlib.__file__, "<string>", "<eval_with_key>", "<frozen ")
"""Prefixes of the file names of torch, this package, modules that both call, and code that they generate.

Not every name that begins with ``<``, because code that a user types into a shell has one: ``<stdin>``, ``<ipython-input-…>``.
"""

_REPR = Repr()
_REPR.maxstring, _REPR.maxother = 200, 80  # characters; long enough for a path


class GpuAugError(Exception):
    """Base class of the errors that gpuaug raises. Errors raised by the user's code keep their type."""


class ArgumentError(GpuAugError, ValueError):
    """An argument has an invalid value."""


class ArgumentTypeError(GpuAugError, TypeError):
    """An argument has an invalid type."""


def add_note(error: BaseException, note: str, *, replaces: str | None = None) -> None:
    """Add a note to an error. Does nothing for an error without settable attributes, such as a frozen dataclass.

    Args:
        error: Error. The same object may be raised several times.
        note: Text of the note.
        replaces: Prefix. Older notes of the error that begin with it are removed. Default: ``note``, so that a note is not
            added twice.
    """
    with contextlib.suppress(Exception):  # a note that cannot be added must not hide the error
        notes = vars(error).setdefault("__notes__", [])
        notes[:] = [*(old_note for old_note in notes if not old_note.startswith(replaces or note)), note]


def shown(value: object) -> str:
    """Return one line of text for an error message: type and shape of a tensor or array; of others the ``repr``, shortened."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__name__} of shape {tuple(shape)}"
    return " ".join(_REPR.repr(value).split())


def without_addresses(text: str) -> str:
    """Return the ``repr`` of an object without memory addresses, which differ between equal objects."""
    return _ADDRESS.sub("", text)


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # PIL writes upper-case digits


def whole_number(name: str, value: object, way_out: str, *, least: int | None = 0, most: int | None = None) -> int:
    """Return an argument (an int, a NumPy scalar or a tensor of one value) as an int.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        way_out: Advice, the last sentence of the error message.
        least: Minimum, or ``None``.
        most: Maximum, or ``None``.

    Raises:
        ArgumentTypeError: If ``value`` is not a whole number.
        ArgumentError: If ``value`` is less than ``least`` or more than ``most``.
    """
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool:
            raise TypeError  # operator.index would convert True to 1
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise ArgumentTypeError(f"{name} must be a whole number, got {shown(value)}. {way_out}") from error
    if least is not None and number < least:
        raise ArgumentError(f"{name} must be {least} or more, got {shown(value)}. {way_out}")
    if most is not None and number > most:
        raise ArgumentError(f"{name} must be {most} or less, got {shown(value)}. {way_out}")
    return number


def fraction(name: str, value: Any, way_out: str) -> float:
    """Return an argument from 0 to 1 as a float.

    Args:
        name: Name of the argument.
        value: Value of the argument: a number, a NumPy scalar or a tensor of one value.
        way_out: Advice, the last sentence of the error message.

    Raises:
        ArgumentTypeError: If ``value`` is not a number.
        ArgumentError: If ``value`` is not from 0 to 1.
    """
    try:
        if isinstance(value, str | bytes | bool) or str(getattr(value, "dtype", "")).endswith("bool"):
            raise TypeError  # float() accepts values of these types
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several values
        raise ArgumentTypeError(f"{name} must be a number, got {shown(value)}. {way_out}") from None
    if not 0 <= number <= 1:
        raise ArgumentError(f"{name} must be from 0 to 1, got {shown(value)}. {way_out}")
    return number


def flag(name: str, value: object, way_out: str) -> bool:
    """Return an argument as a bool.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        way_out: Advice, the last sentence of the error message.

    Raises:
        ArgumentTypeError: If ``value`` is neither ``True`` nor ``False``.
    """
    if not isinstance(value, bool | np.bool_):
        raise ArgumentTypeError(f"{name} must be True or False, got {shown(value)}. {way_out}")
    return bool(value)


def one_of(name: str, value: object, choices: Sequence[T], way_out: str) -> T:
    """Return the element of ``choices`` that equals an argument.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        choices: Allowed values.
        way_out: Advice, the last sentence of the error message.

    Raises:
        ArgumentError: If no choice equals ``value``.
    """
    plain: Any = value.item() if isinstance(value, np.generic) else value
    for choice in choices:
        # Not ``==`` alone: 1.0 and True equal 1, and the result of comparing an array is an array.
        if isinstance(plain, type(choice)) and not isinstance(plain, bool) and plain == choice:
            return choice
    *first, last = (repr(choice) for choice in choices)
    raise ArgumentError(f"{name} must be {', '.join(first)} or {last}, got {shown(value)}. {way_out}")


class SelectionError(GpuAugError, LookupError):
    """The argument ``on``, ``into`` or ``output`` of a stage selects no member, or a member that the stage cannot use."""


class DeviceError(GpuAugError, RuntimeError):
    """A device cannot be used: it is missing, a tensor or module is on another device, or Triton is required and cannot run.

    Also raised if the ``backend`` of a ``DecodeStage`` names a decoder that cannot be used on the device.
    """


class DecodeError(GpuAugError, ValueError):
    """An encoded image or clip cannot be decoded, or the sample with it cannot be replaced."""


class IteratorEndedError(GpuAugError, RuntimeError):
    """``next`` of an iterator was called after the end of the iterator.

    An iterator ends when its loader is closed or loads a state, or when a newer iterator takes over its workers or its data
    set. A process that was forked after the iterator began cannot continue the iterator.
    """


class GpuAugWarning(UserWarning):
    """A setup works, but is slower than the user may expect, or behaves differently."""


def warn(text: str) -> None:
    """Raise a ``GpuAugWarning`` about the line of the user's code that runs, or on a thread of this package about its start."""
    frame = sys._getframe(1)
    stacklevel = 2  # of ``frame``: this function is 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARY_FILES):
        frame = frame.f_back
        stacklevel += 1
    warnings.warn(text, GpuAugWarning, stacklevel=stacklevel)
