"""Searches a row's best settings, so that no row is slow because of bad ones."""

from collections.abc import Callable, Sequence
from typing import Any

from bench.harness.optional_rows import MissingError

Settings = dict[str, Any]


def most(axes: Sequence[Sequence[Settings]]) -> int:
    """Largest number of settings that ``ranked`` tries."""
    count = 1 + sum(len(axis) - 1 for axis in axes)
    return count if count > 1 else 0


def ranked(axes: Sequence[Sequence[Settings]], rate: Callable[[Settings], float]) -> list[Settings]:
    """The settings that were tried, the best first.

    Coordinate search: axes are searched one after another, each with the best values of the axes before it. Of three axes with
    three values seven settings are tried, not 27. Settings that raise are left out, unless all raise.

    Args:
        axes: The values of each axis; the search starts at the first value of each. Settings that depend on each other belong
            in one axis.
        rate: Measures the rate with some settings. Not called where there is only one choice.

    Raises:
        MissingError: If ``rate`` raises it.
        Exception: The error of the first settings, if all settings raise.
    """
    best: Settings = {}
    for axis in axes:
        best |= axis[0]
    if all(len(axis) == 1 for axis in axes):
        return [best]
    found: list[tuple[float, Settings]] = []
    errors: list[Exception] = []
    seen: list[Settings] = []
    for axis in axes:
        for values in axis:
            settings = best | values
            if settings in seen:
                continue
            seen.append(settings)
            try:
                found.append((rate(settings), settings))
            except MissingError:
                raise
            except Exception as error:
                errors.append(error.with_traceback(None))  # its frames would keep opened loaders alive
        if found:
            best = max(found, key=lambda one: one[0])[1]
    if not found:
        raise errors[0]
    return [settings for _, settings in sorted(found, key=lambda one: one[0], reverse=True)]
