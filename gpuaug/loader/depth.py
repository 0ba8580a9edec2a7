"""The number of batches launched ahead: the user's, or with ``depth="auto"`` the faster of 0 and 2.

Overlap can hurt: stages that run beside a training step share the card's memory and its caches with it. ``depth="auto"`` times
the loop both ways on its first batches, in turns, and goes on with the faster. In line is an immediate wait on the same
lanes and graphs, so batches are the same bit for bit whatever it decides, and whenever.
"""

import weakref
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal, Protocol

import torch
from torch import distributed

from gpuaug.core.streams import Event, Lane, Lanes, ms_between
from gpuaug.decode.stage import DecodeStage
from gpuaug.stages.base import Stage, TransformStage
from gpuaug.stages.feature import FeatureStage

AHEAD = 2
"""Batches ahead with ``depth="auto"``, if streaming is faster."""

WARM, SETTLE, COUNT, ROUNDS = 10, 4, 10, 4
"""Batches before the first window; in each window, batches to settle and batches that are timed; windows of either depth."""

WORTH_IT = 0.98
"""Ratio of times, in line over streamed, below which in line is chosen. Each of its windows must also be faster than all
streamed ones: by chance that happens once in seventy times, and in line has no slack for a batch that comes late."""


class Depth(Protocol):
    """The number of batches that a loader launches ahead."""

    def record_event(self, consumer: Lane, iterator: object) -> Event:
        """Record an event after the consumer's work before it is given its next batch, by an iterator."""
        ...

    @property
    def now(self) -> int:
        """Batches to launch ahead of the one that is handed over."""
        ...

    @property
    def most(self) -> int:
        """The largest number that ``now`` may become."""
        ...


class FixedDepth:
    """The user's depth."""

    def __init__(self, depth: int) -> None:
        self.now = depth

    def __repr__(self) -> str:
        return str(self.now)

    @property
    def most(self) -> int:
        """The user's depth."""
        return self.now

    def record_event(self, consumer: Lane, iterator: object) -> Event:
        """An event without a timestamp."""
        return consumer.record_event()


class DepthTuner:
    """Chooses the faster depth by measuring: ``AHEAD`` or 0.

    Windows are streamed, in line, in line, streamed, and so again, so that what drifts or comes back every few batches falls on
    both ways alike. They are timed on the device, between events of the stream that trains: nothing waits. A window that an
    epoch's end cuts short is begun again.
    """

    def __init__(self) -> None:
        self.now = self.most = AHEAD
        self.reason = "still measuring"
        self.streamed_ms: list[float] = []
        self.in_line_ms: list[float] = []
        self._whose: weakref.ref[object] | None = None  # an iterator, which holds this object: neither may keep the other
        self._warm = 0
        self._seen = 0
        self._began: Event | None = None
        self._windows: list[tuple[int, Event, Event]] = []
        self._done = False

    def __repr__(self) -> str:
        return f"'auto' ({self.reason})"

    def consider(self, lanes: Lanes, stages: Sequence[Stage]) -> None:
        """Stream without measuring, if the device has no lanes or other ranks would have to choose the same."""
        if self._done:
            return
        if lanes.in_line:
            self.reason = f"a {lanes.device.type} runs everything in line"
        elif ranks() > 1 and may_communicate(stages):
            self.reason = "streamed on all ranks, because stages may wait for those of others"
        else:
            return
        self.now, self._done = AHEAD, True

    def record_event(self, consumer: Lane, iterator: object) -> Event:
        """An event, with a timestamp while measuring goes on."""
        if self._done:
            return consumer.record_event()
        event = consumer.record_event(timed=True)
        if self._whose is None or self._whose() is not iterator:
            # A new epoch fills its queue first. Two iterators at once measure neither way.
            self._whose, self._seen, self._began = weakref.ref(iterator), 0, None
        if self._warm < WARM:
            self._warm += 1
        elif len(self._windows) < 2 * ROUNDS:
            self._window(event)
        elif self._windows[-1][2].query():
            self._decide()
        return event

    def _window(self, event: Event) -> None:
        self._seen += 1
        if self._seen == SETTLE:
            self._began = event
        elif self._seen >= SETTLE + COUNT:
            self._seen = 0
            if self._began is None:
                return  # another thread's iterator came between
            self._windows.append((self.now, self._began, event))
            if len(self._windows) % 2:
                self.now = AHEAD - self.now

    def _decide(self) -> None:
        for depth, first, last in self._windows:
            (self.streamed_ms if depth else self.in_line_ms).append(ms_between(first, last) / COUNT)
        self._windows.clear()
        streamed, in_line = median(self.streamed_ms), median(self.in_line_ms)
        faster = max(self.in_line_ms) < min(self.streamed_ms) and in_line < WORTH_IT * streamed
        self.now, self._done, self._whose = 0 if faster else AHEAD, True, None
        self.reason = f"{'in line' if faster else 'streamed'}: {in_line:.3g} ms a batch in line, {streamed:.3g} streamed"


def may_communicate(stages: Sequence[Stage]) -> bool:
    """Whether stages may wait for other ranks, so that no rank may choose its own depth.

    A collective that one rank launches before a training step and another after it waits for ever. Modules are known by what
    they hold; what a function does cannot be seen.
    """
    for stage in stages:
        if isinstance(stage, DecodeStage):
            continue
        if isinstance(stage, FeatureStage):
            parts: Sequence[Any] = list(stage.branches.values())
        else:
            parts = [stage.transform] if isinstance(stage, TransformStage) else [stage]
        for part in parts:
            if not isinstance(part, torch.nn.Module) or any(map(_communicates, part.modules())):
                return True
    return False


def _communicates(module: torch.nn.Module) -> bool:
    kinds = (torch.nn.SyncBatchNorm, torch.nn.parallel.DistributedDataParallel)
    # Fully sharded ones, in either of torch's forms, without importing them.
    names = {kind.__name__ for kind in type(module).__mro__}
    return isinstance(module, kinds) or bool(names & {"FullyShardedDataParallel", "FSDPModule"})


def ranks() -> int:
    """Number of processes that train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


Setting = int | Literal["auto"]
"""Values of the argument ``depth``."""
