"""Search for the best settings of a row, so that no row is slow because of bad settings."""

from collections.abc import Callable, Sequence
from typing import Any

from bench.harness.optional_rows import MissingError

Settings = dict[str, Any]


def max_trials(axes: Sequence[Sequence[Settings]]) -> int:
    """Return the largest number of settings that ``rank_settings`` tries."""
    count = 1 + sum(len(axis) - 1 for axis in axes)
    return count if count > 1 else 0


def rank_settings(axes: Sequence[Sequence[Settings]], rate: Callable[[Settings], float]) -> list[Settings]:
    """Search for the settings with the highest rate. Returns the settings that were tried, the best first.

    Coordinate search: axes are searched one after another, each with the best values of the axes before it. For three axes of
    three values, seven settings are tried instead of 27. Settings for which ``rate`` raises are left out, unless all raise.

    Args:
        axes: Values of each axis; the search starts at the first value of each. Settings that depend on each other belong in
            one axis.
        rate: Measures the rate with the given settings. Not called if there is only one combination.

    Raises:
        MissingError: If ``rate`` raises it.
        Exception: The error of the first settings, if all settings raise.
    """
    best: Settings = {}
    for axis in axes:
        best |= axis[0]
    if all(len(axis) == 1 for axis in axes):
        return [best]
    rates_and_settings: list[tuple[float, Settings]] = []
    errors: list[Exception] = []
    tried_settings: list[Settings] = []
    for axis in axes:
        for values in axis:
            settings = best | values
            if settings in tried_settings:
                continue
            tried_settings.append(settings)
            try:
                rates_and_settings.append((rate(settings), settings))
            except MissingError:
                raise
            except Exception as error:
                errors.append(error.with_traceback(None))  # frames of the traceback would keep loaders alive
        if rates_and_settings:
            best = max(rates_and_settings, key=lambda trial: trial[0])[1]
    if not rates_and_settings:
        raise errors[0]
    return [settings for _, settings in sorted(rates_and_settings, key=lambda trial: trial[0], reverse=True)]
