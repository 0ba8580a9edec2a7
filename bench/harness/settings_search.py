"""The best of a row's settings, so that it is not slow for want of the right ones."""

from collections.abc import Callable, Sequence
from typing import Any

from bench.harness.optional_rows import MissingError

Settings = dict[str, Any]


def ranked(axes: Sequence[Sequence[Settings]], rate: Callable[[Settings], float]) -> list[Settings]:
    """The settings that were tried, the best first.

    Axes are gone through one after another, each with the best of those before it: of three axes of three values seven are
    tried, not 27. Settings that raise are left out, unless all do.

    Args:
        axes: The values of each; the search starts at the first ones. What depends on each other belongs into one axis.
        rate: Measures some settings. Not called where there is nothing to choose.

    Raises:
        MissingError: If ``rate`` does.
        Exception: What the first settings raised, if all of them do.
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
                errors.append(error.with_traceback(None))  # whose frames would keep what was opened
        if found:
            best = max(found, key=lambda one: one[0])[1]
    if not found:
        raise errors[0]
    return [settings for _, settings in sorted(found, key=lambda one: one[0], reverse=True)]
