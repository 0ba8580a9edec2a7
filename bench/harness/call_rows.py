"""Rows that repeat one call on a prepared batch: in windows, and one call at a time."""

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
"""Augments a batch, or a part of it, and returns the result."""

FEW_LAUNCHES, MANY_LAUNCHES = 8, 400
"""Approximate numbers of kernels per call. They bound how many calls can be queued before the host waits."""

_CALLS, _SECONDS = 30, 0.15


@dataclass(frozen=True)
class QueuedCall:
    """A call that takes the next batch of a loader, which may have ``queued`` of them ready when a window begins."""

    take: AugmentCall
    queued: int

    def __call__(self) -> Any:
        return self.take()


@dataclass(frozen=True, kw_only=True)
class CallRow(Variant):
    """A row that does the same call over and over.

    Args:
        call: The call that a step makes.
        share: Share of a batch that a call works on.
        launches: ``FEW_LAUNCHES``, ``MANY_LAUNCHES``, or ``None`` for a call that works on streams and threads of its own.
    """

    call: AugmentCall
    share: float
    launches: int | None


def call_row(
    name: str, call: AugmentCall, batch_size: int, *, images: int = 0, launches: int | None = MANY_LAUNCHES, discard: int = 0
) -> CallRow:
    """The row of ``call``, which works on ``images`` images of a batch. 0: on the whole batch."""
    images = min(images or batch_size, batch_size)

    def steps() -> Iterator[int]:
        while True:
            call()
            yield images

    return CallRow(name, steps, discard, call=call, share=images / batch_size, launches=launches)


def batch_figures(row: Variant, device: torch.device) -> dict[str, float]:
    """``call_figures``, scaled to a whole batch. Empty for rows other than ``CallRow``, which use other threads too."""
    if not isinstance(row, CallRow):
        return {}
    return {
        key: value / row.share if isinstance(value, float) else value
        for key, value in call_figures(row.call, device, launches=row.launches).items()
    }


def call_figures(call: AugmentCall, device: torch.device, *, launches: int | None) -> dict[str, Any]:
    """Time of one call: on the host with an idle device, and on a GPU.

    Args:
        call: Works on the current stream, unless ``launches`` is ``None``.
        device: The device that it works on.
        launches: Approximate number of kernels that it launches; ``None`` if it works on streams of its own, ahead of the call.
    """
    settle()
    taken: list[float] = []
    end = perf_counter() + _SECONDS
    while len(taken) < 3 or (perf_counter() < end and len(taken) < _CALLS):
        synchronize(device)
        start = perf_counter()
        call()
        taken.append(1e3 * (perf_counter() - start))
    synchronize(device)
    found: dict[str, Any] = {"host_ms": median(taken)}
    if device.type == "cuda" and launches is not None:
        on_gpu = timing.gpu_ms(call, launches=launches, host_ms=found["host_ms"])
        found |= {} if on_gpu is None else {"gpu_ms": on_gpu, "timed_by": "events"}
    return found
