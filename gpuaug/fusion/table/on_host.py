"""Tables that the host computes for several batches at once; for ragged batches, without the columns that depend on sizes.

The sizes of ragged images are known only when their batch arrives, and crops depend on them. So the uniform numbers of the
pixel-moving ops of the first pass are drawn ahead, and the crops are computed when the batch arrives. On two CPU cores the
table of 256 ragged images then takes 0.14 to 0.18 ms of the training thread for a crop, a flip and a jitter, and 0.15 ms with a
RandAugment. Drawing per batch takes 0.26 to 0.35 ms and 0.91 ms (2026-11-26).
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size, draw_in_order, select_samples
from gpuaug.fusion.ops.sampler import ArraySampler
from gpuaug.fusion.program.plan import Plan
from gpuaug.fusion.table.rows import fill_matrix, fill_table, make_table, points_width, send
from gpuaug.fusion.table.upcoming import UpcomingBatches


def size_dependent_ops(planned: Plan, ops: Sequence[Op]) -> tuple[Op, ...]:
    """Return the ops of a plan for ragged batches that draw when sizes are known; empty if the plan cannot be prefetched."""
    moves = planned.passes[0].moves
    if planned.template is None or any(op.same_on_batch or op.p_batch < 1 or op.gates for op in moves):
        return ()  # no template yet, or draws depend on more than the uniform numbers per sample
    return tuple(op for op in ops if op in moves)


class HostTables:
    """Tables of several batches.

    Args:
        upcoming: Batches to draw for.
        size_dependent: Ops that draw when the sizes of a batch are known. Empty if all sizes are known.
    """

    def __init__(self, upcoming: UpcomingBatches, size_dependent: Sequence[Op] = ()) -> None:
        planned = upcoming.planned
        columns = dict(zip(upcoming.ops, planned.columns, strict=True)) if size_dependent else {}
        deferred = {op: columns[op] for op in size_dependent}
        self._upcoming = upcoming
        self._numbers: dict[Op, Array] = {}
        self._drawn: dict[Op, OpDraws] = {}
        for op, draws, _, _ in draw_in_order(upcoming.ops, upcoming.sampler(), upcoming.whole, deferred=deferred):
            if op in deferred:
                self._numbers[op] = draws["numbers"]
            else:
                self._drawn |= op.draws_by_op(draws)
        self._sent: tuple[Tensor, ...] = ()
        if size_dependent:
            rows = np.empty((upcoming.whole.batch, planned.width), dtype=np.float32)
            fill_table(planned, upcoming.whole, self._drawn, rows, fronts=1)
            self._rows = upcoming.by_batch(rows)
        else:
            table = make_table(planned, upcoming.whole, self._drawn, upcoming.device, points=upcoming.points)
            self._sent = upcoming.by_batch(table).unbind()

    def table(self, index: int, size: Size, layout: Tensor | None = None) -> Tensor:
        """Return the complete table of a batch, (V · B, K).

        Args:
            index: Index of the batch.
            size: Size of the images of the batch.
            layout: Not used.

        Cost:
            With size-dependent ops, one asynchronous copy from pinned memory.
        """
        if self._sent:
            return self._sent[index]
        planned = self._upcoming.planned
        points = self._upcoming.points
        size_of_views = size.repeat(self._upcoming.views)
        samples = slice(index * size_of_views.batch, (index + 1) * size_of_views.batch)
        drawn: dict[Op, OpDraws] = {}
        current_size = size_of_views
        for op, numbers in self._numbers.items():
            (entry,) = draw_in_order([op], ArraySampler(numbers[:, samples]), current_size)
            drawn[op] = entry.draws
            current_size = entry.out
        for op, draws in self._drawn.items():
            if points or op in planned.passes[0].moves:
                drawn[op] = select_samples(draws, samples)

        def fill(table: Array) -> None:
            table[:, : planned.width] = self._rows[index]
            planned.passes[0].fill_front(drawn.__getitem__, size_of_views, table, fixed=False)
            if points:
                fill_matrix(planned, size_of_views, drawn, table[:, planned.width :])

        return send(size_of_views.batch, planned.width + points_width(planned) * points, fill, self._upcoming.device)
