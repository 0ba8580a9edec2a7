"""From what was drawn to the numbers that the passes read, one row a sample, where the images are."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gpuaug.fuse import executors
from gpuaug.fuse.ops import Array, Drawn, Op, Size
from gpuaug.fuse.plan import Plan
from gpuaug.fuse.targets import matrix_of


def make_table(planned: Plan, size: Size, drawn: dict[Op, Drawn], device: torch.device, *, points: bool) -> Tensor:
    """The rows of a batch, (B, at least ``planned.width``) float32; with ``points`` each ends with its matrix.

    Cost:
        One pinned copy, which nothing waits for.
    """
    return send(planned, size, partial(fill_table, planned, size, drawn), drawn if points else None, device)


def send(
    planned: Plan, size: Size, fill: Callable[[Array], None], moving: dict[Op, Drawn] | None, device: torch.device
) -> Tensor:
    """Have ``fill`` write the rows of a batch, and send them; behind them each sample's matrix for the ops that move pixels.

    Args:
        planned: What reads the rows.
        size: Of the images.
        fill: Writes (B, at least ``planned.width``) float32.
        moving: What those ops drew, where boxes or keypoints follow.
        device: Where the rows go.
    """
    width = planned.width + (9 if moving is not None else 0)
    pinned = torch.empty((size.batch, width), dtype=torch.float32, pin_memory=device.type == "cuda")
    fill(pinned.numpy())
    if moving is not None:
        pinned.numpy()[:, planned.width :] = matrix_of(planned, size, moving).reshape(-1, 9)
    return pinned.to(device, non_blocking=True)


def fill_table(planned: Plan, size: Size, drawn: dict[Op, Drawn], table: Array, *, fronts: int = 0) -> None:
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
            if first or op.gated or not op.fixed:
                op.rows(drawn[op], after, table[:, column : column + op.row_width(size.channels)])
        if number >= fronts:
            executors.fill_front(step, drawn.__getitem__, at, table, fixed=first)
        at = after
    if first and size.batch:
        planned.template = table[0, : planned.width].copy()
