"""Rows that repeat one call on a prepared batch, and the time of single calls."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bench.harness import timing
from bench.harness.processes import settle
from gpuaug.benchkit.windows import Variant, synchronize

AugmentCall = Callable[[], Any]
"""Function that augments a batch, or some of its images, and returns the result."""

FEW_LAUNCHES, MANY_LAUNCHES = 8, 400
"""Approximate numbers of kernels per call, which limit the number of calls that can be queued before the host waits."""

_MAX_CALLS, _MAX_SECONDS = 30, 0.15


@dataclass(frozen=True)
class QueuedCall:
    """A call that returns the next batch of a loader, in which ``queue_length`` batches may be ready when a window begins."""

    call: AugmentCall
    queue_length: int

    def __call__(self) -> Any:
        return self.call()


@dataclass(frozen=True, kw_only=True)
class CallRow(Variant):
    """A row that repeats one call.

    Args:
        call: Function that is called once per step.
        share: Share of the batch that a call processes, in (0, 1].
        launches: ``FEW_LAUNCHES``, ``MANY_LAUNCHES``, or ``None`` for a call that works on other streams and threads.
    """

    call: AugmentCall
    share: float
    launches: int | None


def call_row(
    name: str, call: AugmentCall, batch_size: int, *, images: int = 0, launches: int | None = MANY_LAUNCHES, discard: int = 0
) -> CallRow:
    """Return the row of ``call``, which processes ``images`` images of a batch. 0: the whole batch."""
    images = min(images or batch_size, batch_size)

    def steps() -> Iterator[int]:
        while True:
            call()
            yield images

    return CallRow(name, steps, discard, call=call, share=images / batch_size, launches=launches)


def batch_figures(row: Variant, device: torch.device) -> dict[str, float]:
    """Return ``call_figures``, scaled to a whole batch. Empty for rows other than ``CallRow``, which use other threads too."""
    if not isinstance(row, CallRow):
        return {}
    return {
        key: value / row.share if isinstance(value, float) else value
        for key, value in call_figures(row.call, device, launches=row.launches).items()
    }


def call_figures(call: AugmentCall, device: torch.device, *, launches: int | None) -> dict[str, Any]:
    """Measure the time of one call, on the host with an idle device, and on a GPU.

    Args:
        call: Function that works on the current stream, unless ``launches`` is ``None``.
        device: Device of the call.
        launches: Approximate number of kernels of the call; ``None`` if it works ahead, on other streams.
    """
    settle()
    times_ms: list[float] = []
    end = perf_counter() + _MAX_SECONDS
    while len(times_ms) < 3 or (perf_counter() < end and len(times_ms) < _MAX_CALLS):
        synchronize(device)
        start = perf_counter()
        call()
        times_ms.append(1e3 * (perf_counter() - start))
    synchronize(device)
    figures: dict[str, Any] = {"host_ms": median(times_ms)}
    if device.type == "cuda" and launches is not None:
        call_gpu_ms = timing.gpu_ms(call, launches=launches, host_ms=figures["host_ms"])
        figures |= {} if call_gpu_ms is None else {"gpu_ms": call_gpu_ms, "timed_by": "events"}
    return figures
