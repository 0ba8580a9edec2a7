"""Parameter tables that the host computes for several batches at once.

A table has one row per sample, with the parameters of all ops. With V *views*, random augmentations of the same images, a batch
of B images has V · B samples. A *pass* is one reading and writing of all images, and a *plan* is a list of passes. The *gather
ops* of a pass move pixels, such as crops; its *front* is the gather, filter or mix that it begins with.

*Ragged* images differ in size. Before a ragged batch arrives, only random numbers in [0, 1), called uniform numbers, are drawn
for the gather ops of the first pass. The columns of these *size-dependent* ops follow from the uniform numbers and the image
sizes, and are computed when the batch arrives. The later passes read images of one size, because plans with passes that write
ragged images are not prefetched (``Plan.draws_one_batch_at_a_time``).

*Points* are boxes and keypoints. For them, a row ends with the matrices that map input to output pixel coordinates.

With prefetching, the table of 256 ragged images takes 0.14 to 0.18 ms of the training thread for a crop, a flip and a jitter,
and 0.15 ms with a RandAugment. Without prefetching, these are 0.26 to 0.35 ms and 0.91 ms (two CPU cores, 2026-11-26).
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size, select_samples
from gpuaug.fusion.ops.geometry import IndexOp
from gpuaug.fusion.ops.sampler import ArraySampler
from gpuaug.fusion.program.plan import Plan, draw_in_order
from gpuaug.fusion.table.rows import UpcomingBatches, fill_matrix, fill_table, make_table, points_width, table_on_device


def size_dependent_ops(plan: Plan) -> tuple[Op, ...]:
    """Return the ops whose draws depend on the image sizes of a ragged batch; empty if its table cannot be prefetched."""
    gather_ops = plan.passes[0].gather_ops
    # Uniform numbers per sample do not suffice for an op that draws numbers per batch (``same_on_batch``, ``p_batch``), that is
    # in a container that picks modules at random (``gates``), or whose draws depend on the index of the view (``views``).
    if any(op.same_on_batch or op.p_batch < 1 or op.gates or (isinstance(op, IndexOp) and op.views > 1) for op in gather_ops):
        return ()
    return tuple(op for op in plan.ops if op in gather_ops)


class HostTables:
    """Parameter tables of several batches.

    Args:
        upcoming: Batches to draw for.
        size_dependent: ``size_dependent_ops`` of the plan, for ragged batches; empty for images of one size.
    """

    def __init__(self, upcoming: UpcomingBatches, size_dependent: Sequence[Op] = ()) -> None:
        plan = upcoming.plan
        uniforms_per_op = dict(zip(plan.ops, plan.uniforms_per_op, strict=True)) if size_dependent else {}
        # Size-dependent op → number of uniform numbers per sample. Only these numbers are drawn now, as ``draws["numbers"]``.
        deferred = {op: uniforms_per_op[op] for op in size_dependent}
        self._upcoming = upcoming
        self._uniforms: dict[Op, Array] = {}
        """Size-dependent op → its uniform numbers for the samples of all batches, (numbers per sample, samples)."""
        self._draws_by_op: dict[Op, OpDraws] = {}
        """Op → draws for the samples of all batches, of all other ops."""
        for op, draws, _, _ in draw_in_order(plan.ops, upcoming.sampler(), upcoming.total_size, deferred=deferred):
            if op in deferred:
                self._uniforms[op] = draws["numbers"]
            else:
                self._draws_by_op |= op.draws_by_op(draws)
        self._tables: tuple[Tensor, ...] = ()
        """Complete table of each batch, on the device; empty with size-dependent ops."""
        if size_dependent:
            # *Fixed columns* do not depend on the sizes of images.
            fixed_columns = np.empty((upcoming.total_size.batch, plan.width), dtype=np.float32)
            # The columns of the first pass's front depend on the sizes. The method ``table`` writes them.
            fill_table(plan, upcoming.total_size, self._draws_by_op, fixed_columns, skipped_fronts=1)
            self._fixed_columns = upcoming.by_batch(fixed_columns)
        else:
            table = make_table(plan, upcoming.total_size, self._draws_by_op, upcoming.device, has_points=upcoming.has_points)
            self._tables = upcoming.by_batch(table).unbind()

    def draws(self, index: int, ops: Sequence[Op]) -> tuple[OpDraws, ...]:
        """Return the draws of ``ops``, which are not size-dependent, for the first view of the batch ``index``."""
        start = index * self._upcoming.views * self._upcoming.size.batch
        return tuple(select_samples(self._draws_by_op[op], slice(start, start + self._upcoming.size.batch)) for op in ops)

    def table(self, index: int, size: Size, image_layouts: Tensor | None = None) -> Tensor:
        """Return the complete table of a batch, (V · B, K) float32, for V views of B samples and K columns.

        Args:
            index: Index of the batch.
            size: Size of the images of the batch.
            image_layouts: Not used. ``DeviceCropTables.table`` uses it.

        Cost:
            With size-dependent ops, as ``make_table``: one asynchronous copy from pinned memory, and for many samples a launch.
        """
        if self._tables:
            return self._tables[index]
        plan = self._upcoming.plan
        has_points = self._upcoming.has_points
        size_of_views = size.repeat(self._upcoming.views)
        samples = slice(index * size_of_views.batch, (index + 1) * size_of_views.batch)
        draws_by_op: dict[Op, OpDraws] = {}
        current_size = size_of_views
        for op, uniforms in self._uniforms.items():
            (drawn_op,) = draw_in_order([op], ArraySampler(uniforms[:, samples]), current_size)
            draws_by_op[op] = drawn_op.draws
            current_size = drawn_op.out
        # The front of the first pass needs the draws of all its gather ops. Ops that are not size-dependent, such as parts of a
        # RandAugment, were drawn ahead. The matrix of boxes and keypoints needs the draws of all ops.
        for op, draws in self._draws_by_op.items():
            if has_points or op in plan.passes[0].gather_ops:
                draws_by_op[op] = select_samples(draws, samples)

        def fill(table: Array) -> None:
            """Copy the fixed columns, and write the columns of the first front and the matrices."""
            table[:, : plan.width] = self._fixed_columns[index]
            plan.passes[0].fill_front(draws_by_op.__getitem__, size_of_views, table)
            if has_points:
                fill_matrix(plan, size_of_views, draws_by_op, table[:, plan.width :])

        return table_on_device(size_of_views.batch, plan.width + points_width(plan) * has_points, fill, self._upcoming.device)
