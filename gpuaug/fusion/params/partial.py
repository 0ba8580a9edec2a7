"""Rows of ragged batches, of which the host makes all ahead that does not depend on the sizes of the images.

Where images differ in size, nobody knows those of the batches to come, and crops are drawn within them. So the ops of the
first pass that move pixels are given their numbers ahead, and turn them into draws when their batch is there: those that the
device does not fit (``gpuaug.fusion.params.device_crops``), because something else comes first, or because it runs no
kernels of ours.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size
from gpuaug.fusion.ops.sampler import GivenUniforms
from gpuaug.fusion.params.table import MATRIX, fill_matrix, fill_table, send
from gpuaug.fusion.params.upcoming import UpcomingBatches
from gpuaug.fusion.plan import Plan


def size_dependent_ops(planned: Plan, ops: Sequence[Op]) -> tuple[Op, ...]:
    """The ops that wait for the sizes; none where that cannot be, and rows are made whole."""
    waits = planned.passes[0].moves
    if planned.template is None or any(op.same_on_batch or op.p_batch < 1 or op.gates for op in waits):
        return ()  # nothing has been written yet, or draws come from more than the numbers of the samples
    return tuple(op for op in ops if op in waits)


class PartialTables:
    """The rows of some batches, but for what depends on sizes.

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
                self._drawn[op] = op.draw(sampler, at)
                at = op.out_drawn(self._drawn[op], at)
        rows = np.empty((sampler.batch, planned.width), dtype=np.float32)
        fill_table(planned, whole, self._drawn, rows, fronts=1)
        self._rows = upcoming.by_batch(rows)

    def table(self, place: int, size: Size) -> Tensor:
        """The whole rows of a batch, (V · B, K), now that its sizes are there.

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
            drawn[op] = {name: value[part] if isinstance(value, np.ndarray) else value for name, value in each.items()}

        def fill(table: Array) -> None:
            table[:, : planned.width] = self._rows[place]
            planned.passes[0].fill_front(drawn.__getitem__, whole, table, fixed=False)
            if points:
                fill_matrix(planned, whole, drawn, table[:, planned.width :])

        return send(whole.batch, planned.width + MATRIX * points, fill, self._coming.device)
