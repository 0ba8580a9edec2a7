"""Rows of ragged batches: the host makes ahead all columns that do not depend on the sizes of the images.

The sizes of ragged images are known only when their batch arrives, and crops are drawn within them. So the ops of the first
pass that move pixels get their uniform numbers ahead, and turn them into draws when the batch is there. This is for ops that
``gpuaug.fusion.table.on_device`` does not fit: another op comes first, or the device does not run Triton kernels.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size, cut
from gpuaug.fusion.ops.sampler import GivenUniforms
from gpuaug.fusion.program.plan import Plan
from gpuaug.fusion.table.rows import fill_matrix, fill_table, points_width, send
from gpuaug.fusion.table.upcoming import UpcomingBatches


def size_dependent_ops(planned: Plan, ops: Sequence[Op]) -> tuple[Op, ...]:
    """The ops that wait for the sizes; empty if rows have to be made whole."""
    waits = planned.passes[0].moves
    if planned.template is None or any(op.same_on_batch or op.p_batch < 1 or op.gates for op in waits):
        return ()  # nothing has been written yet, or draws come from more than the numbers of the samples
    return tuple(op for op in ops if op in waits)


class PartialTables:
    """The rows of several batches, without the columns that depend on sizes.

    Args:
        upcoming: For a plan with its template.
        size_dependent: The ops that wait.
    """

    def __init__(self, upcoming: UpcomingBatches, size_dependent: Sequence[Op]) -> None:
        self._coming, planned = upcoming, upcoming.planned
        sampler, whole = upcoming.sampler(), upcoming.size
        at = whole
        self._numbers: dict[Op, Array] = {}
        self._drawn: dict[Op, OpDraws] = {}
        for op, columns in zip(upcoming.ops, planned.columns, strict=True):
            if op in size_dependent:
                self._numbers[op] = sampler.uniform(columns) if columns else np.empty((0, sampler.batch))
                at = op.out(at)
            else:
                own = op.draw(sampler, at)
                self._drawn |= op.of_parts(own)
                at = op.out_drawn(own, at)
        rows = np.empty((sampler.batch, planned.width), dtype=np.float32)
        fill_table(planned, whole, self._drawn, rows, fronts=1)
        self._rows = upcoming.by_batch(rows)

    def table(self, place: int, size: Size) -> Tensor:
        """The complete rows of a batch, (V · B, K), for its sizes.

        Cost:
            One pinned copy, which nothing waits for.
        """
        planned, points, whole = self._coming.planned, self._coming.points, size.times(self._coming.views)
        part = slice(place * whole.batch, (place + 1) * whole.batch)
        at, drawn = whole, {}
        for op in self._coming.ops:
            if op in self._numbers:
                drawn[op] = op.draw(GivenUniforms(self._numbers[op][:, part]), at)
                at = op.out_drawn(drawn[op], at)
        for op, each in self._drawn.items() if points else ():
            drawn[op] = cut(each, part)

        def fill(table: Array) -> None:
            table[:, : planned.width] = self._rows[place]
            planned.passes[0].fill_front(drawn.__getitem__, whole, table, fixed=False)
            if points:
                fill_matrix(planned, whole, drawn, table[:, planned.width :])

        return send(whole.batch, planned.width + points_width(planned) * points, fill, self._coming.device)
