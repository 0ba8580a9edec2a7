"""Prefetched tables of ragged batches whose crop windows the device computes.

A crop depends on the size of its image, which is known only when the batch arrives. So the uniform numbers of the crop are sent
ahead with all other columns, for several batches at once, and the device computes the crop windows from them. A batch then
costs the host one small launch, which is less than drawing on the host for one batch.
"""

from typing import NamedTuple

from torch import Tensor

from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size, draw_in_order
from gpuaug.fusion.ops.resize import ResizedCrop
from gpuaug.fusion.program.gather import DeviceCropColumns
from gpuaug.fusion.program.plan import GatherPass, Plan
from gpuaug.fusion.table.rows import MATRIX, fill_matrix, fill_table, send
from gpuaug.fusion.table.upcoming import UpcomingBatches


class DeviceCrop(NamedTuple):
    """Crop whose windows the device can compute from the sizes of ragged images."""

    pass_: GatherPass
    """Pass that begins with the crop."""
    op: ResizedCrop


def device_crop(planned: Plan) -> DeviceCrop | None:
    """Return the crop at the start of a plan for ragged batches, if its tables can be prefetched; else ``None``."""
    pass_ = planned.passes[0]
    if not planned.source.ragged or planned.needs_own_batch or planned.box_crop or not isinstance(pass_, GatherPass):
        return None
    op = pass_.moves[0]
    return DeviceCrop(pass_, op) if isinstance(op, ResizedCrop) and not (op.same_on_batch or op.gates) else None


class DeviceCropTables:
    """Tables of several batches on the device, without the columns of the crop windows.

    Args:
        upcoming: Batches to draw for.
        crop: ``device_crop`` of their plan.
    """

    def __init__(self, upcoming: UpcomingBatches, crop: DeviceCrop) -> None:
        planned, points = upcoming.planned, upcoming.points
        self._crop = crop
        columns = planned.columns[0]
        self._end = planned.width + MATRIX * points
        self._layout = DeviceCropColumns(
            matrix=planned.width if points else -1,
            numbers=self._end,
            rest=self._end + columns if points else -1,
            width=self._end + columns + MATRIX * points,
        )
        total_size = upcoming.whole
        crop_draws, *other_draws = draw_in_order(upcoming.ops, upcoming.sampler(), total_size, deferred={crop.op: columns})
        # All other columns are computed as if the crop changed nothing.
        drawn: dict[Op, OpDraws] = {crop.op: crop.op.identity_draws(total_size.batch)}
        for op, draws, _, _ in other_draws:
            drawn |= op.draws_by_op(draws)

        def fill(table: Array) -> None:
            fill_table(planned, total_size, drawn, table)
            table[:, self._layout.numbers : self._layout.numbers + columns] = crop_draws.draws["numbers"].T
            if points:
                fill_matrix(planned, total_size, drawn, table[:, self._layout.rest :])

        tables = upcoming.by_batch(send(total_size.batch, self._layout.width, fill, upcoming.device))
        # One unbind for all batches is faster than one indexing per batch.
        self._rows = tables.unbind()
        self._read = tables[..., : self._end].unbind()
        self._unused = dict.fromkeys(range(len(self._rows)), True)

    def table(self, index: int, size: Size, layout: Tensor | None) -> Tensor:
        """Return the complete table of a batch, (V · B, K).

        Args:
            index: Index of the batch.
            size: Not used: the sizes of the images are in ``layout``.
            layout: (B, 3) int64 on the device: offset, height and width per image.

        Cost:
            One launch; for a repeated ``index``, one copy in addition.
        """
        from gpuaug.fusion.backends.triton.crops import fit

        assert layout is not None
        full_table = self._rows[index]
        table_read = self._read[index]
        if not self._unused.pop(index, False):
            # Another thread may still use the table of the first call.
            full_table = full_table.clone()
            table_read = full_table[:, : self._end]
        fit(*self._crop, full_table, layout, self._layout)
        return table_read
