"""Who looks on while batches are made: nobody but profilers, unless somebody takes this one's place."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from gpuaug.core.streams import Lane

# What Nsight Systems and other readers of NVTX put into the environment of the process that they watch.
_NVTX_LISTENS = torch.backends.cuda.is_built() and any(
    name in os.environ for name in ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
)
_NOTHING: AbstractContextManager[None] = nullcontext()


def span(name: str) -> AbstractContextManager[Any]:
    """A range of that name in traces of ``torch.profiler`` and for tools that read NVTX.

    Costs a fraction of a microsecond when nobody listens.
    """
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return torch.profiler.record_function(name)  # which also is an NVTX range within emit_nvtx()
    if _NVTX_LISTENS:
        return torch.cuda.nvtx.range(name)
    return _NOTHING


class Hooks:
    """Names ranges for profilers, which cost nothing while none listens."""

    def span(self, name: str, batch: int, lane: Lane | None = None, *, waits: bool = False) -> AbstractContextManager[Any]:
        """A block of work on ``batch``: on the training thread, and on ``lane`` if it queues something there."""
        return span(name)

    def pulled(self, batch: int, began_s: float, ended_s: float) -> None:
        """The wrapped loader made ``batch`` between two times of ``time.perf_counter``."""

    def held_back(self, batch: int, waited_s: float) -> None:
        """The training thread has just waited so long for the device, to which it was too far ahead."""

    def asked(self, consumer: Lane) -> None:
        """The training loop asks for its next batch, so it has queued all of its step."""

    def handed_over(self, batch: int, consumer: Lane) -> None:
        """The training loop is given ``batch``."""
