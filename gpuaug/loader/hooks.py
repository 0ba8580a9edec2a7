"""Hooks that an iterator calls as it works on a batch. They open named ranges for profilers; subclasses record."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

from gpuaug.core.streams import Lane

# Environment variables that Nsight Systems and other readers of NVTX set in the profiled process.
_NVTX_IS_READ = torch.backends.cuda.is_built() and any(
    name in os.environ for name in ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
)
_NOTHING: AbstractContextManager[None] = nullcontext()


class Hooks:
    """Hooks that open named ranges for profilers. Install a subclass with ``Inspection(loader).watched_by(hooks)``."""

    def span(self, name: str, batch: int, lane: Lane | None = None, *, waits: bool = False) -> AbstractContextManager[Any]:
        """Context manager around work on a batch: a named range in traces of ``torch.profiler`` and for readers of NVTX.

        Args:
            name: Name of the range.
            batch: Index of the batch.
            lane: Lane on which the work is queued, if any.
            waits: Whether the training thread waits in the context instead of working.
        """
        if profiler._is_profiler_enabled:
            return torch.profiler.record_function(name)  # within emit_nvtx() also an NVTX range
        if _NVTX_IS_READ:
            return torch.cuda.nvtx.range(name)
        return _NOTHING

    def pulled(self, batch: int, began_s: float, ended_s: float) -> None:
        """The wrapped loader returned ``batch``; its ``next`` ran between the two times of ``time.perf_counter``."""

    def held_back(self, batch: int, waited_s: float) -> None:
        """The training thread has waited ``waited_s`` seconds for the device, which was ``depth + 2`` batches behind."""

    def asked(self, consumer: Lane) -> None:
        """The training loop calls ``next``: all work of its training step is queued."""

    def handed_over(self, batch: int, consumer: Lane) -> None:
        """``next`` is about to return ``batch``."""
