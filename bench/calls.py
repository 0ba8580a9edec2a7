"""Rows that are one call over a batch that is there already: in windows, and each call by itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bench import kernels
from bench.rows import Call
from gpuaug.benchkit.windows import Variant, synchronize

FEW, MANY = 8, 400
"""About as many launches as a call makes: so many calls are queued at once as a stream takes in without the host waiting."""

_CALLS, _SECONDS = 30, 0.15


@dataclass(frozen=True, kw_only=True)
class Called(Variant):
    """A row that does the same call over and over.

    Args:
        call: What a step does.
        share: Of a batch, that a call does.
        launches: ``FEW`` or ``MANY``, or none where a call works on streams and threads of its own.
    """

    call: Call
    share: float
    launches: int | None


def called(name: str, call: Call, batch_size: int, *, images: int = 0, launches: int | None = MANY, discard: int = 0) -> Called:
    """The row of ``call``, which does so many ``images`` of a batch, or all of them."""
    images = min(images or batch_size, batch_size)

    def steps() -> Iterator[int]:
        while True:
            call()
            yield images

    return Called(name, steps, discard, call=call, share=images / batch_size, launches=launches)


def of_a_batch(row: Variant, device: torch.device) -> dict[str, float]:
    """What a batch costs in a row that is called: see ``one_call``. Nothing of rows where other threads take part."""
    if not isinstance(row, Called):
        return {}
    return {
        key: value / row.share if isinstance(value, float) else value
        for key, value in one_call(row.call, device, launches=row.launches).items()
    }


def one_call(call: Call, device: torch.device, *, launches: int | None) -> dict[str, Any]:
    """What one call costs: the host's time with an idle device, and its time on a GPU.

    Args:
        call: Works on the current stream, unless ``launches`` is none.
        device: What it works on.
        launches: About how many kernels it launches; none where it works on streams of its own, ahead of the call.
    """
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
        on_gpu = kernels.gpu_ms(call, launches=launches, host_ms=found["host_ms"])
        found |= {} if on_gpu is None else {"gpu_ms": on_gpu, "timed_by": "events"}
    return found
