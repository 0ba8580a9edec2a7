"""Parameter tables of several ragged batches, whose crop windows the device computes.

*Ragged* images differ in size. A *sample* is an image or a clip. A table has one row per sample, with the parameters of all ops
of a *plan*, a list of *passes*, which read and write all images once. The window of a ``RandomResizedCrop`` depends on the size
of its image, which is known only when the batch arrives. So the random numbers from which the windows follow, uniform in [0,
1), are copied to the device ahead, with all other columns, for several batches at once. When a batch arrives, one small launch,
"the launch" below, computes its windows from these numbers. This takes less host time than drawing for one batch.

First column of each group of columns of a *full table* (``DeviceCropColumns``). The passes read only the first two groups:

    0                        columns of the passes; the launch writes the columns of the crop
    ``Plan.width``           with boxes or keypoints: matrix of all ops, which the launch writes
    ``uniforms``             uniform numbers of the crop, which the launch reads
    ``matrix_after``         with boxes or keypoints: matrix of the ops after the crop, which the launch reads
"""

from torch import Tensor

from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size
from gpuaug.fusion.ops.resize import ResizedCrop
from gpuaug.fusion.program.gather import DeviceCropColumns
from gpuaug.fusion.program.plan import GatherPass, Plan, draw_in_order
from gpuaug.fusion.table.rows import MATRIX_WIDTH, UpcomingBatches, fill_matrix, fill_table, table_on_device


def device_crop(plan: Plan) -> ResizedCrop | None:
    """Return the first op of a plan for ragged images if it is a crop whose windows the device can compute; else ``None``.

    The device computes one window per sample, so a crop with one window per batch (``same_on_batch``), or in a container that
    picks modules at random (``gates``), is not supported.
    """
    if not plan.source.ragged or plan.draws_one_batch_at_a_time or plan.box_crop:
        return None
    op = next(iter(plan.passes[0].gather_ops), None)
    return op if isinstance(op, ResizedCrop) and not (op.same_on_batch or op.gates) else None


class DeviceCropTables:
    """Parameter tables of several batches, on the device. A launch writes the crop windows into a table when its batch arrives.

    Args:
        upcoming: Batches to draw for.
        crop: ``device_crop`` of their plan.
    """

    def __init__(self, upcoming: UpcomingBatches, crop: ResizedCrop) -> None:
        plan, has_points = upcoming.plan, upcoming.has_points
        pass_ = plan.passes[0]
        assert isinstance(pass_, GatherPass)
        self._pass, self._crop = pass_, crop
        uniform_count = plan.uniforms_per_op[0]
        self._width = plan.width + MATRIX_WIDTH * has_points
        """Number of columns that the passes read. The launch reads the later columns."""
        self._columns = DeviceCropColumns(
            matrix=plan.width if has_points else -1,
            uniforms=self._width,
            matrix_after=self._width + uniform_count if has_points else -1,
            width=self._width + uniform_count + MATRIX_WIDTH * has_points,
        )
        total_size = upcoming.total_size
        crop_draws, *other_draws = draw_in_order(plan.ops, upcoming.sampler(), total_size, deferred={crop: uniform_count})
        # The columns of the other ops are computed with the identity in place of the crop.
        draws_by_op: dict[Op, OpDraws] = {crop: crop.identity_draws(total_size.batch)}
        for op, draws, _, _ in other_draws:
            draws_by_op |= op.draws_by_op(draws)

        def fill(table: Array) -> None:
            """Write all columns except the columns that the launch writes."""
            fill_table(plan, total_size, draws_by_op, table)
            table[:, self._columns.uniforms : self._columns.uniforms + uniform_count] = crop_draws.draws["numbers"].T
            if has_points:
                fill_matrix(plan, total_size, draws_by_op, table[:, self._columns.matrix_after :])

        tables = upcoming.by_batch(table_on_device(total_size.batch, self._columns.width, fill, upcoming.device))
        # Views of ``tables``, one per batch, which share its memory. One unbind is faster than one indexing per batch.
        self._full_tables = tables.unbind()
        self._tables = tables[..., : self._width].unbind()
        self._unused = dict.fromkeys(range(len(self._full_tables)), True)
        """Indices of the batches whose table no call has used yet, as keys: ``dict.pop`` tests and removes an index at once."""

    def table(self, index: int, size: Size, image_layouts: Tensor | None) -> Tensor:
        """Return the complete table of a batch, (V · B, K) for V views of B images and K columns.

        Args:
            index: Index of the batch.
            size: Not used, because the sizes of the images are in ``image_layouts``.
            image_layouts: (B, 3) int64 on the device: offset, height and width per image.

        Cost:
            One launch; for a repeated ``index``, also one copy.
        """
        from gpuaug.fusion.backends.triton.crops import write_crop_windows

        assert image_layouts is not None
        full_table = self._full_tables[index]
        table = self._tables[index]
        if not self._unused.pop(index, False):
            # Another thread may still use the table of the first call.
            full_table = full_table.clone()
            table = full_table[:, : self._width]
        write_crop_windows(self._pass, self._crop, full_table, image_layouts, self._columns)
        return table
