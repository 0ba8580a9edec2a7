"""Errors and warnings, in words a user can act on.

A text about an argument that the user passed is ``<what> must be <rule>, got <value>. <way out>.`` A text about an event, such
as an iterator that ended or a setup that is slow, is ``<what happened>, because <why>. <way out>.``
"""

import contextlib
import operator
from collections.abc import Sequence
from reprlib import Repr
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")

DOCUMENTATION = "https://gpuaug.readthedocs.io/en/stable/"
"""URL of the documentation, to which links in texts lead."""

_REPR = Repr()
_REPR.maxstring, _REPR.maxother = 200, 80  # characters: a path is shown whole


class GpuAugError(Exception):
    """Base of the errors that gpuaug raises itself. Errors of the user's own code keep their type."""


class ArgumentError(GpuAugError, ValueError):
    """An argument has a value that cannot work."""


class ArgumentTypeError(GpuAugError, TypeError):
    """An argument is of a type that cannot work."""


def add_note(error: BaseException, note: str, *, replaces: str | None = None) -> None:
    """Add a note to an error, whatever its class, in place of one that begins with ``replaces``, or of the same one.

    One object may be raised many times, and its class may refuse attributes, as a frozen dataclass does.
    """
    with contextlib.suppress(Exception):  # the error is what matters
        notes = vars(error).setdefault("__notes__", [])
        notes[:] = [*(other for other in notes if not other.startswith(replaces or note)), note]


def shown(value: object) -> str:
    """A value for an error text: on one line, tensors and arrays by their shape."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__name__} of shape {tuple(shape)}"
    return " ".join(_REPR.repr(value).split())


def whole_number(name: str, value: object, way_out: str, *, least: int | None = 0, most: int | None = None) -> int:
    """A whole number from ``least`` to ``most``, given as an int, a NumPy scalar or a tensor of one value.

    Raises:
        ArgumentTypeError: If ``value`` is no whole number.
        ArgumentError: If it is less or more.
    """
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool:
            raise TypeError  # True would be 1
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise ArgumentTypeError(f"{name} must be a whole number, got {shown(value)}. {way_out}") from error
    if least is not None and number < least:
        raise ArgumentError(f"{name} must be {least} or more, got {shown(value)}. {way_out}")
    if most is not None and number > most:
        raise ArgumentError(f"{name} must be {most} or less, got {shown(value)}. {way_out}")
    return number


def flag(name: str, value: object, way_out: str) -> bool:
    """``True`` or ``False``.

    Raises:
        ArgumentTypeError: If ``value`` is neither.
    """
    if not isinstance(value, bool | np.bool_):
        raise ArgumentTypeError(f"{name} must be True or False, got {shown(value)}. {way_out}")
    return bool(value)


def one_of(name: str, value: object, choices: Sequence[T], way_out: str) -> T:
    """``value`` as one of ``choices``.

    Raises:
        ArgumentError: If it is none of them.
    """
    plain: Any = value.item() if isinstance(value, np.generic) else value
    for choice in choices:
        # Of its type first: 1.0 and True equal 1, and an array has no one answer.
        if isinstance(plain, type(choice)) and not isinstance(plain, bool) and plain == choice:
            return choice
    *first, last = (repr(choice) for choice in choices)
    raise ArgumentError(f"{name} must be {', '.join(first)} or {last}, got {shown(value)}. {way_out}")


class SelectionError(GpuAugError, LookupError):
    """``on`` or ``into`` of a stage does not fit the batch."""


class DeviceError(GpuAugError, RuntimeError):
    """A device cannot be used: it is missing, or not that of a tensor or a module; or Triton is required and cannot run."""


class DecodeError(GpuAugError, ValueError):
    """An encoded image cannot be decoded."""


class IteratorEndedError(GpuAugError, RuntimeError):
    """An iterator was asked for a batch after its loader was closed or its workers were taken over by a newer one."""


class GpuAugWarning(UserWarning):
    """A setup that works, but slower than, or not as, the user will expect."""
