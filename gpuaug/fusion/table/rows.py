"""Parameter table of a batch: one float32 row per sample, computed from the draws and copied to the device of the images."""

from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size
from gpuaug.fusion.ops.geometry import BoxCropOp, ResampleOp
from gpuaug.fusion.program.plan import Pass, Plan

MATRIX = 9
"""Number of elements of a 3x3 matrix. With boxes or keypoints, rows end with one or more; see ``points_width``."""

BY_COLUMN_FROM = 1024
"""Number of samples from which a table for a GPU is written by column, and transposed on the GPU in one launch."""


def of_all_parts(ops: Sequence[Op], drawn: Sequence[OpDraws]) -> dict[Op, OpDraws]:
    """Return the draws of the parts of several ops, by part."""
    return {part: draws for op, all_draws in zip(ops, drawn, strict=True) for part, draws in op.draws_by_op(all_draws).items()}


def make_table(planned: Plan, size: Size, drawn: dict[Op, OpDraws], device: torch.device, *, points: bool) -> Tensor:
    """Return the parameter table of a batch, float32: (B, ``planned.width``), plus ``points_width`` columns with ``points``.

    Cost:
        One asynchronous copy from pinned memory; on a GPU from ``BY_COLUMN_FROM`` samples, one launch in addition.
    """

    def fill(table: Array) -> None:
        fill_table(planned, size, drawn, table)
        if points:
            fill_matrix(planned, size, drawn, table[:, planned.width :])

    return send(size.batch, planned.width + points_width(planned) * points, fill, device)


def send(samples: int, width: int, fill: Callable[[Array], None], device: torch.device) -> Tensor:
    """Return a table (``samples``, ``width``) float32 that ``fill`` writes on the host, copied to ``device``."""
    # Ops write one column at a time, which takes half the time if columns are contiguous.
    by_column = device.type == "cuda" and samples >= BY_COLUMN_FROM
    shape = (width, samples) if by_column else (samples, width)
    numbers = torch.empty(shape, dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda")
    fill(numbers.numpy().T if by_column else numbers.numpy())
    sent = numbers.to(device, non_blocking=True)
    return sent.T.contiguous() if by_column else sent


def points_width(planned: Plan) -> int:
    """Return the number of extra columns for boxes or keypoints, which ``fill_matrix`` writes."""
    return MATRIX if planned.box_crop is None else 2 * MATRIX + planned.box_crop.op.columns + 2


def fill_matrix(planned: Plan, size: Size, drawn: dict[Op, OpDraws], out: Array) -> None:
    """Write the matrix of all ops that move pixels, (B, 9) float32: input → output pixel coordinates.

    With a crop by boxes, the columns are: the matrix of the ops before the crop, the matrix of the ops after it, the uniform
    numbers of the crop, and for x and y the sign -1 if flips between the crop and its resize mirror the image, else 1.
    """
    matrix = np.eye(3)[None]
    flips: Array | None = None
    for pass_ in planned.passes:
        for op in pass_.moves:
            if isinstance(op, BoxCropOp):
                out[:, :MATRIX] = matrix.reshape(-1, MATRIX)
                out[:, 2 * MATRIX : -2] = np.where(drawn[op]["apply_mask"][:, None], drawn[op]["numbers"], 1)
                out, flips = out[:, MATRIX : 2 * MATRIX], out[:, -2:]
                matrix = np.eye(3)[None]
            elif flips is not None and isinstance(op, ResampleOp):
                flips[:] = np.sign(matrix[:, (0, 1), (0, 1)])
                flips = None
            matrix = op.matrix(drawn[op], size) @ matrix
            size = op.out_drawn(drawn[op], size)
    out[:] = matrix.reshape(-1, MATRIX)


def fill_table(planned: Plan, size: Size, drawn: dict[Op, OpDraws], table: Array, *, fronts: int = 0) -> None:
    """Write the columns of all passes, (B, at least ``planned.width``) float32.

    ``fronts``: number of leading passes whose fronts are not written, and keep the values of the template.
    """
    # Columns that do not depend on draws are written once per plan, into its template, and copied from it.
    writes_template = planned.template is None
    if not writes_template:
        table[:, : planned.width] = planned.template
    current_size = size
    for pass_index, pass_ in enumerate(planned.passes):
        out_size = pass_.out_drawn(drawn.__getitem__, current_size)
        rows = pass_.rows_of(table)
        for op, (_, column, _) in zip(pass_.points, pass_.program, strict=True):
            if writes_template or op.is_random or not op.has_fixed_row:
                # The template has the apply mask of an op that applies to all samples.
                write = op.rows if writes_template or op.is_random else op.write
                write(drawn[op], out_size, rows[:, column : column + op.row_width(size.channels)])
        if pass_index >= fronts:
            pass_.fill_front(drawn.__getitem__, current_size, rows, fixed=writes_template)
        current_size = out_size
    if planned.passes[-1].route_column >= 0:
        _fill_routes(planned.passes, drawn, table)
    if writes_template and size.batch:
        planned.template = table[0, : planned.width].copy()


def _fill_routes(passes: Sequence[Pass], drawn: dict[Op, OpDraws], table: Array) -> None:
    """Write the buffer route of each sample, for each pass but the first, which writes all samples to the first of two buffers.

    A route is 0 if no op of the pass applies to the sample, which then stays in its buffer. Otherwise it is 1, plus 1 if the
    sample is read from the second buffer, plus 2 if it is written to the second buffer. A pass writes to the other buffer,
    unless it works in place.
    """
    in_second = np.zeros(len(table), dtype=np.uint8)
    for pass_ in passes[1:-1]:
        applies = reduce(np.logical_or, [drawn[op]["apply_mask"] for op in pass_.ops])
        to_second = in_second if pass_.works_in_place else in_second ^ applies
        pass_.rows_of(table)[:, pass_.route_column] = applies * (1 + in_second + 2 * to_second)
        in_second = to_second
    passes[-1].rows_of(table)[:, passes[-1].route_column] = 1 + in_second
