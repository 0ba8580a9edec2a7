"""Order of a batch's stages on their lanes (CUDA streams): in sequence, or concurrently if no stage writes another's input."""

from typing import Any

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.streams import Event, Lane
from gpuaug.stages.base import BoundStage


class Branches:
    """Lanes that work on one batch, and the events that later stages wait for.

    Consecutive stages run concurrently, one *branch* each, if they write to none of their inputs (``reads_only``), and all
    inputs were in the batch before the first of these stages. Any other stage waits for all stages before it.

    Args:
        ready: Event after the copy of the batch.
        concurrent: Whether stages may run concurrently. If not, each waits for the stage before it.
    """

    __slots__ = ("_concurrent", "_leaves", "_open_branches", "_start")

    def __init__(self, ready: Event, *, concurrent: bool) -> None:
        self._concurrent = concurrent
        self._start = ready
        """Event after all work that precedes the open branches."""
        self._leaves: list[Any] = []
        """Leaves (tensors and other values) of the batch at the event ``_start``; empty if no branch may be opened.

        They are referenced, because the ``id`` of a freed leaf may be reused.
        """
        self._open_branches: list[tuple[Lane, Event]] = []
        """(lane, event after the stage) of each branch that no later stage has waited for."""

    def wait(self, bound: BoundStage, batch: Batch, values: tuple[Any, ...]) -> Event:
        """Make the lane of a stage wait until ``values``, its inputs, are written. Return an event after the last write.

        Call ``record_stage`` after the stage.
        """
        if not self._open_branches:  # the stage may open the first branch
            self._leaves = batches.leaves(batch) if self._concurrent and bound.reads_only else []
        elif not (bound.reads_only and self._were_present_at_start(values)):
            self._join(bound.lane)  # the stage may open the first of the next branches
            self._leaves = batches.leaves(batch) if bound.reads_only else []
            return self._start
        bound.lane.wait(self._start)
        return self._start

    def record_stage(self, lane: Lane) -> None:
        """Record that the work of a stage was queued on its lane."""
        event = lane.record_event()
        if self._leaves:
            self._open_branches.append((lane, event))
        else:
            self._start = event

    def join(self, lane: Lane, *, new_event: bool = False) -> Event:
        """Make the lane of the last stage wait for all branches. Return an event after all work on the batch.

        Args:
            lane: Lane of the last stage.
            new_event: Whether work was queued on ``lane`` after the last call of ``record_stage``.
        """
        if len(self._open_branches) == 1 and not new_event:
            return self._open_branches[0][1]
        if self._open_branches:
            self._join(lane)
        return lane.record_event() if new_event else self._start

    def _join(self, lane: Lane) -> None:
        """Make a lane wait for all open branches, and end them."""
        for branch_lane, event in self._open_branches:
            if branch_lane is not lane:
                lane.wait(event)
        self._open_branches = []
        self._start = lane.record_event()

    def _were_present_at_start(self, values: tuple[Any, ...]) -> bool:
        """Return whether all leaves of ``values`` were in the batch when the first open branch began."""
        leaf_ids = set(map(id, self._leaves))
        return all(id(leaf) in leaf_ids for leaf in batches.leaves(values))
