"""Objects that hold a batch between the wrapped loader and the training loop.

    wrapped loader
      next()    ──▶ Pulled       batch on the host, an error or the end
      _submit() ──▶ Submitted    batch and the work of other threads on it, such as decoding
      _launch() ──▶ Launched     batch on the device and its event, or an error
      pop()     ──▶ training loop

``Pulled`` is in ``gpuaug.feed.mailbox``, because the thread that pulls creates it and ``feed`` does not import ``loader``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpuaug.cache.cached_stages import CachedBatch
from gpuaug.core.batch import Batch
from gpuaug.core.streams import Event, Lane
from gpuaug.decode.decoding import Decoding
from gpuaug.feed.mailbox import Pulled
from gpuaug.stages.base import DecodedSamples


@dataclass(slots=True)
class Launched:
    """A batch whose work has been queued on the device, or the error that is raised instead of it."""

    batch: Batch = None
    """The batch on the device."""
    ready: Event | None = None
    """Event after all work on the batch; ``None`` with an error."""
    packed: bool = False
    """Whether target dicts (annotations, one dict per image) are ``PackedTargets``: one tensor per key."""
    resident: Sequence[torch.Tensor] = ()
    """Tensors of the batch that were on the device before the copy."""
    source_lane: Lane | None = None
    """Stream on which the wrapped loader wrote the batch, if it has objects whose tensors cannot be listed; else ``None``."""
    error: BaseException | None = None
    """Error to raise instead of returning the batch."""
    state: Any = None
    """State of the wrapped loader after this batch."""
    decoded: Sequence[DecodedSamples] = ()
    """Samples that each ``DecodeStage`` has decoded."""


@dataclass(slots=True)
class Submitted:
    """A batch that was pulled, and the work of other threads that must end before the batch is launched."""

    pulled: Pulled
    work: list[tuple[str, Decoding]] = field(default_factory=list)
    """(name of the stage, work) of each stage that works on other threads."""
    error: BaseException | None = None
    """Error to raise instead of launching the batch."""
    cached_batch: CachedBatch | None = None
    """Batch on which stages run whose results a feature cache records; ``None`` without a cache, or if stages are skipped."""
    skipped_stages: int = 0
    """Number of the first stages that do not run, because their results were read from a feature cache."""

    def done(self) -> bool:
        """Return whether the batch can be launched without waiting for other threads."""
        return all(work.done() for _, work in self.work)

    def abandon(self) -> None:
        """Cancel the work of other threads, and wait until they no longer read the batch."""
        for _, work in self.work:
            work.abandon()
