"""Rows of ragged batches whose crops are fitted to the images by the device.

A crop is drawn within its image's own size, which only its batch brings. So the numbers that it is drawn from are sent ahead
with everything else, for several batches at once, and the device goes on from there. A batch then costs the host one small
launch, where drawing for it alone would cost it more than all launches together.
"""

from typing import NamedTuple

from torch import Tensor

from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size, draw_each
from gpuaug.fusion.ops.resize import ResizedCrop
from gpuaug.fusion.program.gather import DeviceCropColumns
from gpuaug.fusion.program.plan import GatherPass, Plan
from gpuaug.fusion.table.rows import MATRIX, fill_matrix, fill_table, send
from gpuaug.fusion.table.upcoming import UpcomingBatches


class DeviceCrop(NamedTuple):
    """A crop that a device can fit to the sizes of ragged images."""

    step: GatherPass
    """The pass that begins with the crop."""
    op: ResizedCrop


def device_crop(planned: Plan) -> DeviceCrop | None:
    """The crop that a plan for ragged batches begins with, if its rows can be made ahead; else ``None``."""
    step = planned.passes[0]
    if not planned.source.ragged or planned.needs_own_batch or planned.box_crop or not isinstance(step, GatherPass):
        return None
    first = step.moves[0]
    return DeviceCrop(step, first) if isinstance(first, ResizedCrop) and not first.same_on_batch else None


class DeviceCropTables:
    """The rows of several batches, on the device, without the positions of crops.

    Args:
        upcoming: Of the plan.
        crop: The plan's ``device_crop``.
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
        whole = upcoming.whole
        first, *rest = draw_each(upcoming.ops, upcoming.sampler(), whole, later={crop.op: columns})
        # All other columns are written for crops that change nothing.
        drawn: dict[Op, OpDraws] = {crop.op: crop.op.unmoved(whole.batch)}
        for op, draws, _, _ in rest:
            drawn |= op.of_parts(draws)

        def fill(table: Array) -> None:
            fill_table(planned, whole, drawn, table)
            table[:, self._layout.numbers : self._layout.numbers + columns] = first.draws["numbers"].T
            if points:
                fill_matrix(planned, whole, drawn, table[:, self._layout.rest :])

        rows = upcoming.by_batch(send(whole.batch, self._layout.width, fill, upcoming.device))
        # Taken apart together, which takes less than to do so batch by batch.
        self._rows = rows.unbind()
        self._read = rows[..., : self._end].unbind()
        self._unused = dict.fromkeys(range(len(self._rows)), True)

    def table(self, index: int, size: Size, layout: Tensor | None) -> Tensor:
        """The complete rows of a batch, (V · B, K).

        Args:
            index: Index of the batch.
            size: Not used: the sizes of the images are in ``layout``.
            layout: (B, 3) int64 on the device, offset, height and width of each image.

        Cost:
            One launch; a copy before it where they are asked for again.
        """
        from gpuaug.fusion.backends.triton.crops import fit

        assert layout is not None
        rows = self._rows[index]
        read = self._read[index]
        if not self._unused.pop(index, False):
            # Another thread may still use the rows that were made of them.
            rows = rows.clone()
            read = rows[:, : self._end]
        fit(*self._crop, rows, layout, self._layout)
        return read
