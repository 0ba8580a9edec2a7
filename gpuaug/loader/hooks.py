"""Hooks that an iterator calls as it works on a batch. They open named ranges for external profilers.

``gpuaug.profile`` overrides them to record the ranges.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

from gpuaug.core.streams import Lane

# Nsight Systems and other readers of NVTX ranges set these environment variables in the profiled process.
_HAS_NVTX_READER = torch.backends.cuda.is_built() and any(
    name in os.environ for name in ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
)
_NO_SPAN: AbstractContextManager[None] = nullcontext()


class Hooks:
    """Hooks of one loader. Install a subclass with ``Inspection(loader).with_hooks(hooks)``."""

    def span(self, name: str, batch: int, lane: Lane | None = None, *, waits: bool = False) -> AbstractContextManager[Any]:
        """Context manager around work on a batch: a named range in traces of ``torch.profiler`` and for readers of NVTX.

        Args:
            name: Name of the range.
            batch: Index of the batch.
            lane: Lane (CUDA stream) on which the work is queued, if any.
            waits: Whether the training thread waits in the context instead of working.
        """
        if profiler._is_profiler_enabled:
            return torch.profiler.record_function(name)  # within emit_nvtx() also an NVTX range
        if _HAS_NVTX_READER:
            return torch.cuda.nvtx.range(name)
        return _NO_SPAN

    def on_pull(self, batch: int, began_s: float, ended_s: float) -> None:
        """Called when the wrapped loader has returned ``batch``. The loader's ``next`` ran from ``began_s`` to ``ended_s``."""

    def on_hold_back(self, batch: int, waited_s: float) -> None:
        """Called when the training thread has waited for the device, on which ``depth + 2`` batches were queued."""

    def on_next(self, consumer: Lane) -> None:
        """Called when the loop calls ``next``: the training step is queued on ``consumer``, the stream that trains."""

    def on_hand_over(self, batch: int, consumer: Lane) -> None:
        """Called before ``next`` returns ``batch``."""
