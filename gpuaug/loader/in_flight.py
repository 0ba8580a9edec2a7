"""A batch between the wrapped loader and the training loop, with what is known of it at each point.

    wrapped loader
      next()    ──▶ Pulled       batch on the host, an error or the end
      _submit() ──▶ Submitted    with the work of other threads on it, such as decoding
      _launch() ──▶ Launched     batch on the device and its event, or the error in its place
      pop()     ──▶ training loop

``Pulled`` is in ``gpuaug.feed.mailbox``, because the thread that pulls makes it and ``feed`` does not import ``loader``.
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
    """A batch whose work has been queued, or the error that stands in its place."""

    batch: Batch = None
    ready: Event | None = None
    resident: Sequence[torch.Tensor] = ()
    source: Lane | None = None
    """The stream on which objects were made that were on the device already and hide their tensors."""
    error: BaseException | None = None
    state: Any = None
    """The wrapped loader's state after this batch."""


@dataclass(slots=True)
class Submitted:
    """A batch that was pulled, and the work of other threads on it before it can be launched."""

    pulled: Pulled
    pending: list[tuple[str, Pending]] = field(default_factory=list)
    error: BaseException | None = None

    def done(self) -> bool:
        """Whether launching it would not wait for other threads."""
        return all(work.done() for _, work in self.pending)

    def abandon(self) -> None:
        """Wait for other threads, which may be reading the batch."""
        for _, work in self.pending:
            work.abandon()
