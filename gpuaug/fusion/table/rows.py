"""The parameter table of a batch: one float32 row per sample, made from the draws and sent to the images' device."""

from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size
from gpuaug.fusion.ops.geometry import BoxCropOp, ResampleOp
from gpuaug.fusion.program.plan import Pass, Plan

MATRIX = 9
"""Length of a matrix. With boxes or keypoints each row ends with one, or as ``points_width`` says."""

BY_COLUMN_FROM = 1024
"""Samples from which a table for a GPU is written by column, and turned to rows there. Fewer are not worth the launch."""


def of_all_parts(ops: Sequence[Op], drawn: Sequence[OpDraws]) -> dict[Op, OpDraws]:
    """The draws of the parts of several ops."""
    return {part: own for op, each in zip(ops, drawn, strict=True) for part, own in op.of_parts(each).items()}


def make_table(planned: Plan, size: Size, drawn: dict[Op, OpDraws], device: torch.device, *, points: bool) -> Tensor:
    """The rows of a batch, (B, at least ``planned.width``) float32; with ``points`` each ends with its matrix.

    Cost:
        One pinned copy, which nothing waits for, and on a GPU one launch from ``BY_COLUMN_FROM`` samples on.
    """

    def fill(table: Array) -> None:
        fill_table(planned, size, drawn, table)
        if points:
            fill_matrix(planned, size, drawn, table[:, planned.width :])

    return send(size.batch, planned.width + points_width(planned) * points, fill, device)


def send(samples: int, width: int, fill: Callable[[Array], None], device: torch.device) -> Tensor:
    """Rows written by ``fill``, (B, ``width``) float32, sent to ``device``."""
    # Ops write a column at a time, in half the time where its numbers lie side by side.
    by_column = device.type == "cuda" and samples >= BY_COLUMN_FROM
    shape = (width, samples) if by_column else (samples, width)
    numbers = torch.empty(shape, dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda")
    fill(numbers.numpy().T if by_column else numbers.numpy())
    sent = numbers.to(device, non_blocking=True)
    return sent.T.contiguous() if by_column else sent


def points_width(planned: Plan) -> int:
    """Columns that a row ends with where boxes or keypoints follow: a matrix, or what a crop by boxes is chosen from."""
    return MATRIX if planned.box_crop is None else 2 * MATRIX + planned.box_crop.op.columns + 2


def fill_matrix(planned: Plan, size: Size, drawn: dict[Op, OpDraws], out: Array) -> None:
    """Write the matrix of all ops that move pixels, (B, 9) float32: input → output pixel coordinates.

    With a crop by boxes: the matrix of the ops before it, that of the ops behind it, the numbers that it is drawn from, and for
    x and y -1 where flips between the crop and its resize turn the image, else 1.
    """
    total = np.eye(3)[None]
    flips: Array | None = None
    for step in planned.passes:
        for op in step.moves:
            if isinstance(op, BoxCropOp):
                out[:, :MATRIX] = total.reshape(-1, MATRIX)
                out[:, 2 * MATRIX : -2] = np.where(drawn[op]["apply_mask"][:, None], drawn[op]["numbers"], 1)
                out, flips = out[:, MATRIX : 2 * MATRIX], out[:, -2:]
                total = np.eye(3)[None]
            elif flips is not None and isinstance(op, ResampleOp):
                flips[:] = np.sign(total[:, (0, 1), (0, 1)])
                flips = None
            total = op.matrix(drawn[op], size) @ total
            size = op.out_drawn(drawn[op], size)
    out[:] = total.reshape(-1, MATRIX)


def fill_table(planned: Plan, size: Size, drawn: dict[Op, OpDraws], table: Array, *, fronts: int = 0) -> None:
    """Write the row of each sample for all passes, (B, at least ``planned.width``) float32.

    ``fronts``: Number of leading passes whose fronts keep the numbers of the template.
    """
    # Columns that no draw changes are written once for a plan, into its template, and copied.
    first = planned.template is None
    if not first:
        table[:, : planned.width] = planned.template
    at = size
    for number, step in enumerate(planned.passes):
        after = step.out_drawn(drawn.__getitem__, at)
        rows = step.rows_of(table)
        for op, (_, column, _) in zip(step.points, step.program, strict=True):
            if first or op.is_random or not op.fixed:
                # The template has the apply mask of an op that applies to all samples.
                write = op.rows if first or op.is_random else op.write
                write(drawn[op], after, rows[:, column : column + op.row_width(size.channels)])
        if number >= fronts:
            step.fill_front(drawn.__getitem__, at, rows, fixed=first)
        at = after
    if planned.passes[-1].way >= 0:
        _fill_ways(planned.passes, drawn, table)
    if first and size.batch:
        planned.template = table[0, : planned.width].copy()


def _fill_ways(passes: Sequence[Pass], drawn: dict[Op, OpDraws], table: Array) -> None:
    """Write where each pass but the first, which writes all samples to the first of two buffers, finds and leaves a sample.

    A way is 0 if no op of the pass applies to the sample, which stays where it is. Else it is 1, and 1 more if the sample is in
    the second buffer, and 2 more if it goes to the second buffer: to that which it is not in, unless the pass works in place.
    """
    second = np.zeros(len(table), dtype=np.uint8)
    for step in passes[1:-1]:
        applies = reduce(np.logical_or, [drawn[op]["apply_mask"] for op in step.ops])
        after = second if step.works_in_place else second ^ applies
        step.rows_of(table)[:, step.way] = applies * (1 + second + 2 * after)
        second = after
    passes[-1].rows_of(table)[:, passes[-1].way] = 1 + second
