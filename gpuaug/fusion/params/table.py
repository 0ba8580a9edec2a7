"""The parameter table of a batch: one float32 row per sample, made from the draws and sent to the images' device."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size
from gpuaug.fusion.plan import Plan, matrix_of

MATRIX = 9
"""Length of a matrix. With boxes or keypoints each row ends with one."""


def of_all_parts(ops: Sequence[Op], drawn: Sequence[OpDraws]) -> dict[Op, OpDraws]:
    """The draws of the parts of several ops."""
    return {part: own for op, each in zip(ops, drawn, strict=True) for part, own in op.of_parts(each).items()}


def make_table(planned: Plan, size: Size, drawn: dict[Op, OpDraws], device: torch.device, *, points: bool) -> Tensor:
    """The rows of a batch, (B, at least ``planned.width``) float32; with ``points`` each ends with its matrix.

    Cost:
        One pinned copy, which nothing waits for.
    """

    def fill(table: Array) -> None:
        fill_table(planned, size, drawn, table)
        if points:
            fill_matrix(planned, size, drawn, table[:, planned.width :])

    return send(size.batch, planned.width + MATRIX * points, fill, device)


def send(samples: int, width: int, fill: Callable[[Array], None], device: torch.device) -> Tensor:
    """Rows written by ``fill``, (B, ``width``) float32, sent to ``device``."""
    pinned = torch.empty((samples, width), dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda")
    fill(pinned.numpy())
    return pinned.to(device, non_blocking=True)


def fill_matrix(planned: Plan, size: Size, drawn: dict[Op, OpDraws], out: Array) -> None:
    """Write the matrix of all ops that move pixels, (B, 9) float32: input → output pixel coordinates."""
    out[:] = matrix_of(planned, size, drawn).reshape(-1, MATRIX)


def fill_table(planned: Plan, size: Size, drawn: dict[Op, OpDraws], table: Array, *, fronts: int = 0) -> None:
    """Write the row of each sample for all passes, (B, at least ``planned.width``) float32.

    The fronts of the first so many passes are left as the template has them.
    """
    # Columns that no draw changes are written once for a plan, into its template, and copied.
    first = planned.template is None
    if not first:
        table[:, : planned.width] = planned.template
    at = size
    for number, step in enumerate(planned.passes):
        after = at.to(step.out.height, step.out.width)
        for op, (_, column, _) in zip(step.points, step.program, strict=True):
            if first or op.is_random or not op.fixed:
                op.rows(drawn[op], after, table[:, column : column + op.row_width(size.channels)])
        if number >= fronts:
            step.fill_front(drawn.__getitem__, at, table, fixed=first)
        at = after
    if first and size.batch:
        planned.template = table[0, : planned.width].copy()
