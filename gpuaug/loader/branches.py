"""Order of the stages of one batch on their lanes: in sequence, or concurrently if none writes what another reads."""

from typing import Any

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.streams import Event, Lane
from gpuaug.stages.base import BoundStage


class Branches:
    """Lanes that work on one batch, and the events for which later stages wait.

    Consecutive stages that only read members of the batch, all present before the first of these stages, run concurrently, one
    branch each. Any other stage waits for all stages before it.

    Args:
        ready: Event after the copy of the batch.
        side_by_side: Whether stages may run concurrently. If not, each waits for the stage before it.
    """

    __slots__ = ("_begin", "_leaves", "_open", "_side_by_side")

    def __init__(self, ready: Event, *, side_by_side: bool) -> None:
        self._side_by_side = side_by_side
        self._begin = ready
        """Event after all work before the open branches."""
        self._leaves: list[Any] = []
        """Leaves of the batch at that event. Referenced, because ``id`` of a freed leaf may be reused."""
        self._open: list[tuple[Lane, Event]] = []

    def wait(self, bound: BoundStage, batch: Batch, values: tuple[Any, ...]) -> Event:
        """Make the lane of a stage wait for the work that its values need. Return an event after that work."""
        if not self._open:
            self._leaves = batches.leaves(batch) if self._side_by_side and bound.reads_only else []
        elif not (bound.reads_only and self._were_present(values)):
            self._join(bound.lane)
            self._leaves = batches.leaves(batch) if bound.reads_only else []
            return self._begin
        bound.lane.wait(self._begin)
        return self._begin

    def ran(self, lane: Lane) -> None:
        """Record that the work of a stage was queued on its lane."""
        event = lane.record_event()
        if self._leaves:
            self._open.append((lane, event))
        else:
            self._begin = event

    def join(self, lane: Lane, *, again: bool = False) -> Event:
        """Make ``lane``, the lane of the last stage, wait for all branches. Return an event after all work on the batch.

        ``again``: record a new event, because work was queued on the lane since the last call of ``ran``.
        """
        if len(self._open) == 1 and not again:
            return self._open[0][1]
        if self._open:
            self._join(lane)
        return lane.record_event() if again else self._begin

    def _join(self, lane: Lane) -> None:
        for branch_lane, event in self._open:
            if branch_lane is not lane:
                lane.wait(event)
        self._open = []
        self._begin = lane.record_event()

    def _were_present(self, values: tuple[Any, ...]) -> bool:
        leaf_ids = set(map(id, self._leaves))
        return all(id(leaf) in leaf_ids for leaf in batches.leaves(values))
