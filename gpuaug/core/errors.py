"""What can go wrong, in words a user can act on.

Every text has one shape: ``<what> must be <rule>, got <value>. <way out>.``
"""

import contextlib
import operator


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


def whole_number(name: str, value: object, way_out: str, *, least: int = 0) -> int:
    """A whole number of at least ``least``, whatever stands for it: an int, a NumPy scalar, a tensor of one.

    Raises:
        ArgumentTypeError: If ``value`` is no whole number.
        ArgumentError: If it is less.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise ArgumentTypeError(f"{name} must be a whole number, got {value!r}. {way_out}") from error
    if number < least:
        raise ArgumentError(f"{name} must be {least} or more, got {value!r}. {way_out}")
    return number


class SelectionError(GpuAugError, LookupError):
    """``on`` or ``into`` of a stage does not fit the batch."""


class DeviceError(GpuAugError, RuntimeError):
    """A tensor or a module is on a device where the loader cannot use it."""


class DecodeError(GpuAugError, ValueError):
    """An encoded image cannot be decoded."""


class IteratorEndedError(GpuAugError, RuntimeError):
    """An iterator was asked for a batch after its loader was closed or its workers were taken over by a newer one."""


class GpuAugWarning(UserWarning):
    """Something works, but slower or otherwise than the user will expect."""
