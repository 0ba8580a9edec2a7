"""Order of the stages of one batch on their lanes: one after another, or side by side where none writes what another reads."""

from collections.abc import Sequence
from typing import Any

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.streams import Event, Lane
from gpuaug.stages.base import BoundStage


class Branches:
    """The lanes that work on one batch, and the events that later stages wait for.

    Stages in a row that only read, on members that were there before the first of them, run side by side. Any other
    stage waits for all before it.

    Args:
        stages: The stages of the loader.
        ready: Event after the copy of the batch.
    """

    def __init__(self, stages: Sequence[BoundStage], ready: Event) -> None:
        self._several = sum(stage.reads_only for stage in stages) > 1
        self._begin = ready
        """Event after all work that comes before the open branches."""
        self._there: list[Any] = []
        """Leaves of the batch at that event. Held, because the identity of a freed one may come back as another's."""
        self._open: list[tuple[Lane, Event]] = []

    def wait(self, bound: BoundStage, batch: Batch, values: tuple[Any, ...]) -> Event:
        """Make the lane of a stage wait for the work that its values need. Returns an event after that work."""
        if not self._open:
            self._there = batches.leaves(batch) if self._several and bound.reads_only else []
        elif not (bound.reads_only and self._were_there(values)):
            self._join(bound.lane)
            self._there = batches.leaves(batch) if bound.reads_only else []
            return self._begin
        bound.lane.wait(self._begin)
        return self._begin

    def ran(self, lane: Lane) -> None:
        """Note that the work of a stage was queued on its lane."""
        event = lane.record_event()
        if self._there:
            self._open.append((lane, event))
        else:
            self._begin = event

    def join(self, lane: Lane, *, again: bool = False) -> Event:
        """Make ``lane``, that of the last stage, wait for all. Returns an event after all work on the batch.

        ``again`` records the event anew, after work of which none has been noted.
        """
        if len(self._open) == 1 and not again:
            return self._open[0][1]
        if self._open:
            self._join(lane)
        return lane.record_event() if again else self._begin

    def _join(self, lane: Lane) -> None:
        for other, event in self._open:
            if other is not lane:
                lane.wait(event)
        self._open = []
        self._begin = lane.record_event()

    def _were_there(self, values: tuple[Any, ...]) -> bool:
        there = set(map(id, self._there))
        return all(id(leaf) in there for leaf in batches.leaves(values))
