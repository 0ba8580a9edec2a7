"""Calls at each part of the work on a batch: names ranges for profilers, or records in a subclass."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

from gpuaug.core.streams import Lane

# Variables that Nsight Systems and other readers of NVTX set in the process that they watch.
_NVTX_LISTENS = torch.backends.cuda.is_built() and any(
    name in os.environ for name in ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
)
_NOTHING: AbstractContextManager[None] = nullcontext()


class Hooks:
    """Names ranges for profilers. Subclasses record: ``Inspection(loader).watched_by(hooks)``."""

    def span(self, name: str, batch: int, lane: Lane | None = None, *, waits: bool = False) -> AbstractContextManager[Any]:
        """A block of work on ``batch``: on the training thread, and on ``lane`` if it queues work there. ``waits``: a wait.

        A named range in traces of ``torch.profiler`` and for tools that read NVTX.
        """
        if profiler._is_profiler_enabled:
            return torch.profiler.record_function(name)  # which also is an NVTX range within emit_nvtx()
        if _NVTX_LISTENS:
            return torch.cuda.nvtx.range(name)
        return _NOTHING

    def pulled(self, batch: int, began_s: float, ended_s: float) -> None:
        """The wrapped loader made ``batch`` between two times of ``time.perf_counter``."""

    def held_back(self, batch: int, waited_s: float) -> None:
        """The training thread has just waited for the device, which is ``depth + 2`` batches behind."""

    def asked(self, consumer: Lane) -> None:
        """The training loop asks for its next batch: its step has been queued."""

    def handed_over(self, batch: int, consumer: Lane) -> None:
        """The training loop is given ``batch``."""
