"""Timed windows over endless training loops.

Windows are measured in *rounds* of one window per loop, so that drift of the machine's speed affects all loops equally.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from gpuaug import ArgumentError
from gpuaug.core.devices import synchronize


@dataclass(frozen=True)
class Variant:
    """One of the loops to compare.

    Args:
        name: Name of the loop, and of its row in the results.
        steps: Function that returns an endless iterator. Each ``next`` runs one training step, without waiting for the device,
            and returns its number of images.
        discard: Number of steps at the start of each window that are not counted: at least the number of batches that workers
            load while other variants run.
        notes: Function that returns further entries for the variant's row in the results. Called after all measurements.
        context: Function that returns a context manager for the steps of a window, such as ``gpuaug.step_first``.
    """

    name: str
    steps: Callable[[], Iterator[int]]
    discard: int = 0
    notes: Callable[[], dict[str, Any]] = dict
    context: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Window:
    """Counts and times of one window."""

    steps: int
    images: int
    seconds: float
    """Time until the device has finished all steps."""
    host_seconds: float
    """Time until the host has queued all steps."""


@dataclass(frozen=True)
class Row:
    """Medians over the windows of one variant. A ratio is the variant's rate divided by the baseline's in the same round."""

    name: str
    steps_per_s: float
    images_per_s: float
    host_ms: float
    """Time of the host per step."""
    ratio: float | None
    """Median of the ratios; ``None`` without a baseline."""
    ratio_low: float | None
    """Smallest ratio."""
    ratio_high: float | None
    """Largest ratio."""
    rounds: list[float]
    """Steps per second in each round."""

    def record(self, **labels: Any) -> dict[str, Any]:
        """Return the row as a dict for a result file, with further ``labels`` such as ``case`` and ``batch_size``."""
        return labels | asdict(self)


def interleave(
    variants: Sequence[Variant],
    *,
    device: torch.device,
    seconds: float = 2.0,
    repeats: int = 5,
    warmup: int = 3,
    settle: Callable[[], object] = lambda: None,
    until: float = math.inf,
    on_round: Callable[[int], object] = lambda _: None,
) -> dict[str, list[Window]]:
    """Measure ``variants`` in rounds of one window per variant, every other round in reverse order.

    The device is synchronised only at the beginning and end of a window: synchronising in each step would prevent overlap.

    Args:
        variants: Variants to compare. A variant's iterator is created once and stays open, with its workers and CUDA graphs.
        device: Device of the training steps.
        seconds: Time during which the host starts new steps in a window.
        repeats: Number of rounds, fewer if ``until`` leaves no time for them.
        warmup: Number of steps of each variant before the first round.
        settle: Function that is called before each window. It waits until workers of the previous variant have filled their
            queues.
        until: Time of ``time.perf_counter`` by which to finish. After the first round, a round is measured only if a round
            as long as the longest one would end before ``until``.
        on_round: Function that is called after each round with the number of the round, from 1.

    Returns:
        Name → windows in the order of the rounds.

    Raises:
        ArgumentError: If two variants share a name, a number is out of range, or a variant's iterator ends.
    """
    names = [variant.name for variant in variants]
    if len(set(names)) != len(names):
        raise ArgumentError(f"names of variants must be distinct, got {names}. Rename one of them.")
    if repeats < 1:
        raise ArgumentError(f"repeats must be at least 1, got {repeats}. Five rounds are the default.")
    if not seconds > 0:
        raise ArgumentError(f"seconds must be positive, got {seconds}. Two seconds are the default length of a window.")
    windows: dict[str, list[Window]] = {name: [] for name in names}
    with ExitStack() as stack:
        open_variants: list[_OpenVariant] = []
        for variant in variants:
            open_variant = _OpenVariant(variant)
            stack.callback(open_variant.close)
            open_variants.append(open_variant)
        for open_variant in open_variants:
            with open_variant.variant.context():
                for _ in range(warmup):
                    open_variant.step()
            synchronize(device)
        longest_round = -math.inf
        for round_index in range(repeats):
            start = perf_counter()
            if start + longest_round > until:
                break
            for open_variant in open_variants if round_index % 2 == 0 else reversed(open_variants):
                settle()
                with open_variant.variant.context():
                    windows[open_variant.variant.name].append(_window(open_variant, device, seconds))
            longest_round = max(longest_round, perf_counter() - start)
            on_round(round_index + 1)
    return windows


def summarise(windows: dict[str, list[Window]], *, baseline: str | None) -> list[Row]:
    """Return one row per variant, in the order of ``windows``.

    Args:
        windows: Result of ``interleave``.
        baseline: Name of the variant to which ratios of steps per second refer; ``None``: no ratios.

    Raises:
        ArgumentError: If ``baseline`` is not among ``windows``.
    """
    if baseline is not None and baseline not in windows:
        raise ArgumentError(f"baseline must be one of {list(windows)}, got {baseline!r}. Pass None for no ratios.")
    baseline_rates = _rates(windows[baseline]) if baseline is not None else None
    rows = []
    for name, variant_windows in windows.items():
        rates = _rates(variant_windows)
        ratios = [rate / other for rate, other in zip(rates, baseline_rates, strict=True)] if baseline_rates else None
        rows.append(
            Row(
                name=name,
                steps_per_s=median(rates),
                images_per_s=median(window.images / window.seconds for window in variant_windows),
                host_ms=median(1e3 * window.host_seconds / window.steps for window in variant_windows),
                ratio=median(ratios) if ratios else None,
                ratio_low=min(ratios) if ratios else None,
                ratio_high=max(ratios) if ratios else None,
                rounds=rates,
            )
        )
    return rows


class _OpenVariant:
    """A variant with its iterator. Errors of the iterator get a note with the name of the variant."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.num_steps = 0
        self._iterator: Iterator[int] | None = None

    def step(self) -> int:
        """Run one step, and return its number of images. The first call creates the iterator."""
        try:
            if self._iterator is None:
                self._iterator = iter(self.variant.steps())
            images = next(self._iterator)
        except StopIteration:
            raise ArgumentError(
                f"steps of variant {self.variant.name!r} must be endless, got an end after {self.num_steps}. "
                "Restart the data at its end, in the function steps."
            ) from None
        except Exception as error:
            error.add_note(f"raised in step {self.num_steps} of variant {self.variant.name!r}")
            raise
        self.num_steps += 1
        return images

    def close(self) -> None:
        """Close the iterator, if it is a generator that has begun."""
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()


def _window(open_variant: _OpenVariant, device: torch.device, seconds: float) -> Window:
    """Discard the first steps of a variant, and then measure a window of ``seconds``."""
    for _ in range(open_variant.variant.discard):
        open_variant.step()
    synchronize(device)
    steps = images = 0
    start = now = perf_counter()
    end = start + seconds
    while now < end:
        images += open_variant.step()
        steps += 1
        now = perf_counter()
    synchronize(device)
    return Window(steps=steps, images=images, seconds=perf_counter() - start, host_seconds=now - start)


def _rates(windows: list[Window]) -> list[float]:
    """Return the steps per second of each window."""
    return [window.steps / window.seconds for window in windows]
