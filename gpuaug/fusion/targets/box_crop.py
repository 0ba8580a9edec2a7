"""Crop windows chosen by boxes: computed on the device, and written into the parameter table before the images are cropped."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.boxes import composed
from gpuaug.fusion.ops.geometry import BoxCropOp
from gpuaug.fusion.program.plan import BoxCrop, Plan
from gpuaug.fusion.targets.target_dicts import TargetDicts


def records_of(op: BoxCropOp, values: Sequence[Any], keys: Sequence[str]) -> TargetDicts:
    """Return the input whose boxes the crop windows are chosen by.

    Args:
        op: Crop op.
        values: Inputs of a call.
        keys: Data key of each input.

    Raises:
        ArgumentError: If there are no target dicts, or several inputs have boxes.
    """
    dicts = [value for value in values if isinstance(value, TargetDicts)]
    candidates = [record for record in dicts if record.has_boxes] or dicts[:1]
    if len(candidates) != 1:
        raise ArgumentError(
            f"data_keys must hold 'targets' once for {op.name}, which looks at boxes, got {list(keys)}. Pass target dicts with "
            "the images: data_keys=['input', 'targets']."
        )
    return candidates[0]


def crop_by_boxes(
    plan: Plan, crop: BoxCrop, table: Tensor, records: TargetDicts, previous: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Choose the crop window of each image. Set ``records.kept`` to the mask of the boxes that the windows keep.

    Args:
        plan: Plan that contains the crop.
        crop: Crop by boxes of the plan.
        table: (B, columns) parameter table of the plan. Not modified.
        records: Target dicts with the input boxes.
        previous: (B, 3, 3) matrix of the segments before the plan; ``None`` for the identity.

    Returns:
        (B, columns) parameter table with the windows, and (B, 3, 3) matrix of the plan and the segments before it.

    Cost:
        About twenty launches, in addition to the launches of ``BoxCropOp.windows``.
    """
    # The resize after the crop has six columns: scale, start and count per axis. Until here they describe the whole image.
    column = crop.pass_.first_column + crop.pass_.columns.warp
    scale = table[:, column : column + 4 : 3]
    sides = table[:, column + 2 : column + 6 : 3]
    prefix, suffix, draws, flip_signs = table[:, plan.width :].split((3 * 3, 3 * 3, crop.op.columns, 2), 1)
    prefix = composed(previous, prefix.view(-1, 3, 3))
    boxes, owners = records.boxes_at(prefix)
    boxes = torch.minimum(boxes.clamp(min=0), sides.repeat(1, 2)[owners])
    windows, kept = crop.op.windows(draws, sides, boxes, owners)
    start, count = windows[:, :2], windows[:, 2:]
    records.kept = (
        kept & _is_large(boxes, start[owners], (start + count)[owners], crop.op.least) if any(crop.op.least) else kept
    )
    # The nearest pixel depends on the last digit of the scale, so the count is divided once, by the size after the resize.
    resized = (sides / scale).round()
    out_start = torch.where(flip_signs < 0, sides - start - count, start)
    warp = torch.stack((count / resized, out_start, count), 2).flatten(1)
    factors = sides / count
    crop_matrix = torch.nn.functional.pad(factors, (0, 1), value=1.0).diag_embed()
    crop_matrix[:, :2, 2] = (0.5 - start) * factors - 0.5
    new_table = torch.cat((table[:, :column], warp, table[:, column + 6 :]), 1)
    return new_table, composed(composed(prefix, crop_matrix), suffix.view(-1, 3, 3))


def _is_large(boxes: Tensor, start: Tensor, end: Tensor, least: tuple[float, float]) -> Tensor:
    """Return the (n,) mask of the boxes whose part within a window has the minimum side and area.

    ``start`` and ``end`` are the (n, 2) corners of the window of each box, in pixels.
    """
    sides = (torch.minimum(boxes[:, 2:], end) - torch.maximum(boxes[:, :2], start)).clamp(min=0)
    return (sides >= least[0]).all(1) & (sides.prod(1) >= least[1])
