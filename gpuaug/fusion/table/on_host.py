"""Rows that the host makes for several batches at once, complete or, for ragged batches, up to the columns that need sizes.

The sizes of ragged images are known only when their batch arrives, and crops are drawn within them. So the ops of the first
pass that move pixels get their uniform numbers ahead, and draw when the batch is there. On two CPU cores the rows of 256 ragged
images then take 0.14 to 0.18 ms of the training thread for a crop, a flip and a jitter, and 0.15 ms with a RandAugment, where
drawing for each batch alone takes 0.26 to 0.35 ms and 0.91 ms (2026-11-26).
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size, cut, draw_each
from gpuaug.fusion.ops.sampler import GivenUniforms
from gpuaug.fusion.program.plan import Plan
from gpuaug.fusion.table.rows import fill_matrix, fill_table, make_table, points_width, send
from gpuaug.fusion.table.upcoming import UpcomingBatches


def size_dependent_ops(planned: Plan, ops: Sequence[Op]) -> tuple[Op, ...]:
    """Ops of a plan for ragged batches that can draw when sizes are known; empty if all rows have to be made then."""
    moves = planned.passes[0].moves
    if planned.template is None or any(op.same_on_batch or op.p_batch < 1 or op.gates for op in moves):
        return ()  # nothing has been written yet, or draws come from more than the numbers of the samples
    return tuple(op for op in ops if op in moves)


class HostTables:
    """The rows of several batches.

    Args:
        upcoming: The batches.
        size_dependent: Ops that draw when the sizes of a batch are known. Empty: all sizes are known already.
    """

    def __init__(self, upcoming: UpcomingBatches, size_dependent: Sequence[Op] = ()) -> None:
        planned = upcoming.planned
        columns = dict(zip(upcoming.ops, planned.columns, strict=True)) if size_dependent else {}
        later = {op: columns[op] for op in size_dependent}
        self._upcoming = upcoming
        self._numbers: dict[Op, Array] = {}
        self._drawn: dict[Op, OpDraws] = {}
        for op, draws, _, _ in draw_each(upcoming.ops, upcoming.sampler(), upcoming.whole, later=later):
            if op in later:
                self._numbers[op] = draws["numbers"]
            else:
                self._drawn |= op.of_parts(draws)
        self._sent: tuple[Tensor, ...] = ()
        if size_dependent:
            rows = np.empty((upcoming.whole.batch, planned.width), dtype=np.float32)
            fill_table(planned, upcoming.whole, self._drawn, rows, fronts=1)
            self._rows = upcoming.by_batch(rows)
        else:
            table = make_table(planned, upcoming.whole, self._drawn, upcoming.device, points=upcoming.points)
            self._sent = upcoming.by_batch(table).unbind()

    def table(self, index: int, size: Size, layout: Tensor | None = None) -> Tensor:
        """The complete rows of a batch, (V · B, K).

        Args:
            index: Index of the batch.
            size: Size of its images.
            layout: Not used.

        Cost:
            Where ops draw by the sizes, one pinned copy, which nothing waits for.
        """
        if self._sent:
            return self._sent[index]
        planned = self._upcoming.planned
        points = self._upcoming.points
        whole = size.times(self._upcoming.views)
        samples = slice(index * whole.batch, (index + 1) * whole.batch)
        drawn: dict[Op, OpDraws] = {}
        at = whole
        for op, numbers in self._numbers.items():
            (each,) = draw_each([op], GivenUniforms(numbers[:, samples]), at)
            drawn[op] = each.draws
            at = each.out
        for op, draws in self._drawn.items():
            if points or op in planned.passes[0].moves:
                drawn[op] = cut(draws, samples)

        def fill(table: Array) -> None:
            table[:, : planned.width] = self._rows[index]
            planned.passes[0].fill_front(drawn.__getitem__, whole, table, fixed=False)
            if points:
                fill_matrix(planned, whole, drawn, table[:, planned.width :])

        return send(whole.batch, planned.width + points_width(planned) * points, fill, self._upcoming.device)
