"""Objects that hold a batch between the wrapped loader and the training loop.

    wrapped loader
      next()    ──▶ Pulled       batch on the host, an error or the end
      _submit() ──▶ Submitted    with the work of other threads, such as decoding
      _launch() ──▶ Launched     batch on the device and its event, or an error
      pop()     ──▶ training loop

``Pulled`` is in ``gpuaug.feed.mailbox``, because the thread that pulls creates it and ``feed`` does not import ``loader``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpuaug.core.batch import Batch
from gpuaug.core.streams import Event, Lane
from gpuaug.feed.mailbox import Pulled
from gpuaug.stages.base import Pending


@dataclass(slots=True)
class Launched:
    """A batch whose work has been queued on the device, or the error that is raised instead of it."""

    batch: Batch = None
    """The batch on the device."""
    ready: Event | None = None
    """Event after all work on the batch; ``None`` with an error."""
    packed: bool = False
    """Whether the tensors of target dicts are concatenated per key, as ``PackedTargets``."""
    resident: Sequence[torch.Tensor] = ()
    """Tensors of the batch that were on the device before the copy."""
    source_lane: Lane | None = None
    """Stream on which the wrapped loader wrote objects of the batch whose tensors cannot be listed; else ``None``."""
    error: BaseException | None = None
    state: Any = None
    """State of the wrapped loader after this batch."""


@dataclass(slots=True)
class Submitted:
    """A batch that was pulled, and the work of other threads that must end before the batch is launched."""

    pulled: Pulled
    pending: list[tuple[str, Pending]] = field(default_factory=list)
    error: BaseException | None = None

    def done(self) -> bool:
        """Whether the batch can be launched without waiting for other threads."""
        return all(work.done() for _, work in self.pending)

    def abandon(self) -> None:
        """Cancel the work of other threads, and wait until they no longer read the batch."""
        for _, work in self.pending:
            work.abandon()
