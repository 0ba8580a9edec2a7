"""From what was drawn to the numbers that the passes read, one row a sample, where the images are."""

from collections.abc import Callable

import torch
from torch import Tensor

from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size
from gpuaug.fusion.plan import Plan, matrix_of

MATRIX = 9
"""Numbers of a matrix, which a row ends with where boxes or keypoints follow."""


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
    """Have ``fill`` write a row for each sample, (B, ``width``) float32, and send them to ``device``."""
    pinned = torch.empty((samples, width), dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda")
    fill(pinned.numpy())
    return pinned.to(device, non_blocking=True)


def fill_matrix(planned: Plan, size: Size, drawn: dict[Op, OpDraws], out: Array) -> None:
    """Write how the ops that move pixels move them, (B, 9) float32: a matrix from the pixels that go in to those that come."""
    out[:] = matrix_of(planned, size, drawn).reshape(-1, MATRIX)


def fill_table(planned: Plan, size: Size, drawn: dict[Op, OpDraws], table: Array, *, fronts: int = 0) -> None:
    """Write each sample's numbers for all passes, (B, at least ``planned.width``) float32.

    The fronts of the first so many passes are left as the template has them.
    """
    # What no draw changes is written once for a plan, and copied from then on.
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
