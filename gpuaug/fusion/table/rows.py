"""Parameter table of a batch: one float32 row per sample, computed from the draws and copied to the device of the images.

*Draws* are the random parameters of an op for a batch. A *sample* is an image or a clip, and B is the number of samples. A
*pass* reads and writes all images once. It begins with its *front*: a gather, which moves pixels, a filter or a mix. Then it
runs *pointwise* ops. A *plan* is a list of passes, and says which columns of the table their ops have.

First column of each group of columns, and the parameters in the group:

    0                       the first pass: its front, then its pointwise ops
    ``Pass.first_column``   a later pass: its front, its pointwise ops, and its buffer route (``_fill_routes``)
                            a mix of the results of several *chains* of ops (``ChainsPass``): its front, then for each chain
                            all columns of the plan of the chain
    ``Plan.width``          with boxes or keypoints: the ``points_width`` columns that ``fill_matrix`` writes
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from gpuaug.fusion.ops.base import ANY_SIDES, Array, Op, OpDraws, Size
from gpuaug.fusion.ops.geometry import BoxCropOp, ResampleOp
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.program.plan import ChainsPass, Pass, Plan, Rows

MATRIX_WIDTH = 9
"""Number of columns of a 3x3 matrix."""

BY_COLUMN_FROM = 1024
"""Tables of at least this many samples are written on the host as (columns, B), and transposed on the GPU in one launch."""


@dataclass(frozen=True, slots=True)
class UpcomingBatches:
    """Batches of one pipeline that are expected next. Their tables are computed together, before the batches arrive.

    *Views* are several random augmentations of the same images.
    """

    plan: Plan
    """Plan that reads the tables."""
    size: Size
    """Size of one batch. *Ragged* images differ in size, and their sizes are not known yet: they have ``ANY_SIDES``."""
    seeds: Sequence[int]
    """Seed of each view, (batches · V,): all views of the first batch, then of the second, and so on."""
    views: int
    """Number V of views per image."""
    device: torch.device
    """Device of the tables."""
    has_points: bool
    """Whether there are boxes or keypoints."""

    @property
    def total_size(self) -> Size:
        """Size of the samples of all batches and views, as one batch."""
        if self.size.height is ANY_SIDES[0]:  # there are no sides of single images to repeat
            return replace(self.size, batch=len(self.seeds) * self.size.batch)
        return self.size.repeat(len(self.seeds))

    def sampler(self) -> Sampler:
        """Return the source of random numbers for all batches, in the order of ``seeds``."""
        batches = len(self.seeds) // self.views
        return Sampler(self.seeds, self.size.batch, self.plan.uniform_count, [*range(self.views)] * batches)

    def by_batch(self, table: Rows) -> Rows:
        """Reshape a table of the samples of all batches, (batches · V · B, K), to one table per batch, (batches, V · B, K)."""
        return table.reshape(len(self.seeds) // self.views, self.views * self.size.batch, table.shape[1])


def draws_of_plan_ops(ops: Sequence[Op], all_draws: Sequence[OpDraws]) -> dict[Op, OpDraws]:
    """Return op → draws for the ops that run in the passes.

    An op that is drawn as a whole, such as a RandAugment, may consist of several ops that run in the passes (``Op.plan_ops``).

    Args:
        ops: Ops that are drawn, in order.
        all_draws: Draws of each of ``ops``.
    """
    return {
        plan_op: draws
        for op, op_draws in zip(ops, all_draws, strict=True)
        for plan_op, draws in op.draws_by_op(op_draws).items()
    }


def make_table(plan: Plan, size: Size, draws_by_op: dict[Op, OpDraws], device: torch.device, *, has_points: bool) -> Tensor:
    """Return the parameter table of a batch, float32: (B, ``plan.width``), plus ``points_width`` columns with ``has_points``.

    Args:
        plan: Plan that reads the table.
        size: Size of the images that the first pass reads.
        draws_by_op: Draws of all ops of the passes (``draws_of_plan_ops``).
        device: Device of the table.
        has_points: Whether there are boxes or keypoints.

    Cost:
        One asynchronous copy from pinned memory; on a GPU, from ``BY_COLUMN_FROM`` samples on, also one launch.
    """

    def fill(table: Array) -> None:
        fill_table(plan, size, draws_by_op, table)
        if has_points:
            fill_matrix(plan, size, draws_by_op, table[:, plan.width :])

    return table_on_device(size.batch, plan.width + points_width(plan) * has_points, fill, device)


def table_on_device(samples: int, width: int, fill: Callable[[Array], None], device: torch.device) -> Tensor:
    """Return a table, (``samples``, ``width``) float32, on ``device``.

    ``fill``: function that writes all values of a host array of this shape.
    """
    # Ops write column by column, which takes half the time if columns are contiguous.
    by_column = device.type == "cuda" and samples >= BY_COLUMN_FROM
    shape = (width, samples) if by_column else (samples, width)
    host_table = torch.empty(shape, dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda")
    fill(host_table.numpy().T if by_column else host_table.numpy())
    table = host_table.to(device, non_blocking=True)
    return table.T.contiguous() if by_column else table


def points_width(plan: Plan) -> int:
    """Return the number of columns for boxes or keypoints, which ``fill_matrix`` writes after the columns of the passes."""
    return MATRIX_WIDTH if plan.box_crop is None else 2 * MATRIX_WIDTH + plan.box_crop.op.columns + 2


def fill_matrix(plan: Plan, size: Size, draws_by_op: dict[Op, OpDraws], out: Array) -> None:
    """Write the columns for boxes and keypoints into ``out``, (B, ``points_width``) float32.

    These are the 9 elements of one matrix, the product of the matrices of all ops that move pixels. It maps input to output
    coordinates in pixels. If the plan has a crop by boxes (``BoxCropOp``), the device chooses its window, and so its matrix is
    not known on the host. The columns then are:

        0 to 8     matrix of the ops before the crop
        9 to 17    matrix of the ops after the crop
        18 to -3   drawn numbers of the crop; 1 for a sample that is not cropped
        -2, -1     for x and for y: -1 if the flips between the crop and the resize after it mirror the image, else 1

    ``size``: size of the images that the first pass reads.
    """
    matrix_so_far = np.eye(3)[None]
    flip_signs: Array | None = None
    for pass_ in plan.passes:
        for op in pass_.gather_ops:
            if isinstance(op, BoxCropOp):
                # The matrix of the ops before the crop is complete. ``out`` becomes the columns of the matrix after the crop.
                out[:, :MATRIX_WIDTH] = matrix_so_far.reshape(-1, MATRIX_WIDTH)
                out[:, 2 * MATRIX_WIDTH : -2] = np.where(draws_by_op[op]["apply_mask"][:, None], draws_by_op[op]["numbers"], 1)
                out, flip_signs = out[:, MATRIX_WIDTH : 2 * MATRIX_WIDTH], out[:, -2:]
                matrix_so_far = np.eye(3)[None]
            elif flip_signs is not None and isinstance(op, ResampleOp):  # the resize after the crop
                flip_signs[:] = np.sign(matrix_so_far[:, (0, 1), (0, 1)])
                flip_signs = None
            matrix_so_far = op.matrix(draws_by_op[op], size) @ matrix_so_far
            size = op.out_drawn(draws_by_op[op], size)
    out[:] = matrix_so_far.reshape(-1, MATRIX_WIDTH)


def fill_table(plan: Plan, size: Size, draws_by_op: dict[Op, OpDraws], table: Array, *, skipped_fronts: int = 0) -> None:
    """Write the columns of all passes into ``table``, (B, at least ``plan.width``) float32.

    Args:
        plan: Plan that reads the table.
        size: Size of the images that the first pass reads.
        draws_by_op: Draws of the ops of the passes, except of skipped fronts.
        table: The table.
        skipped_fronts: Number of leading passes whose front is not written.
    """
    current_size = size
    for pass_index, pass_ in enumerate(plan.passes):
        out_size = pass_.out_drawn(draws_by_op.__getitem__, current_size)
        pass_table = pass_.columns_of(table)
        for op, column in pass_.point_columns:
            op.write_rows(draws_by_op[op], out_size, pass_table[:, column : column + op.row_width(out_size.channels)])
        if pass_index >= skipped_fronts:
            pass_.fill_front(draws_by_op.__getitem__, current_size, pass_table)
        if isinstance(pass_, ChainsPass):
            (chain_draws,) = draws_by_op[pass_.front]["layers"]  # the draws of each chain
            for index, chain_table in enumerate(pass_.chain_tables(pass_table)):
                draws_of_chain = draws_of_plan_ops(pass_.chain_plan.ops, [chain_draws[index]])
                fill_table(pass_.chain_plan, current_size, draws_of_chain, chain_table)
        current_size = out_size
    if plan.passes[-1].route_column >= 0:
        _fill_routes(plan.passes, draws_by_op, table)


def _fill_routes(passes: Sequence[Pass], draws_by_op: dict[Op, OpDraws], table: Array) -> None:
    """Write the *buffer routes* of the samples: one column for each pass but the first.

    A route says from which buffer a pass reads a sample, and to which buffer it writes the sample. Passes read and write
    samples in two buffers, 0 and 1. The first pass writes all samples to buffer 0. If no op of a pass applies to a sample, the
    sample stays in its buffer, and its route is 0. Otherwise its route is 1 + source buffer + 2 · output buffer. The output
    buffer is the source buffer if the pass works in place, and else the other buffer. The last pass writes all samples to the
    result, so its route is 1 + source buffer.
    """
    source_buffer = np.zeros(len(table), dtype=np.uint8)
    for pass_ in passes[1:-1]:
        runs_pass = reduce(np.logical_or, [draws_by_op[op]["apply_mask"] for op in pass_.ops])
        out_buffer = source_buffer if pass_.works_in_place else source_buffer ^ runs_pass
        pass_.columns_of(table)[:, pass_.route_column] = runs_pass * (1 + source_buffer + 2 * out_buffer)
        source_buffer = out_buffer
    passes[-1].columns_of(table)[:, passes[-1].route_column] = 1 + source_buffer
