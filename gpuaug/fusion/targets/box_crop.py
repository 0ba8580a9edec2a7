"""Crops by boxes: chosen on the device, and written into the parameter table before the images are cropped."""

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
    """The target dicts with the boxes that a crop is chosen by.

    Args:
        op: The crop.
        values: Inputs of a call.
        keys: Their data keys.

    Raises:
        ArgumentError: If there are no target dicts, or several inputs have boxes.
    """
    dicts = [value for value in values if isinstance(value, TargetDicts)]
    found = [each for each in dicts if each.has_boxes] or dicts[:1]
    if len(found) != 1:
        raise ArgumentError(
            f"data_keys must hold 'targets' once for {op.name}, which looks at boxes, got {list(keys)}. Pass target dicts with "
            "the images: data_keys=['input', 'targets']."
        )
    return found[0]


def crop_by_boxes(
    plan: Plan, crop: BoxCrop, table: Tensor, records: TargetDicts, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Choose the window of each image, and tell the targets which boxes are within it.

    Args:
        plan: With the crop.
        crop: The plan's.
        table: Its rows, which are left as they are.
        records: The boxes, as they came.
        before: The matrix of what ran before the plan, (B, 3, 3).

    Returns:
        The rows with these windows, and the matrix of the plan and what ran before it, (B, 3, 3).

    Cost:
        Some twenty launches besides those that choose the windows.
    """
    # Six columns of the resize behind the crop, scale, start and count of each axis, are those of the whole image.
    at = crop.step.first + crop.step.columns.warp
    scale = table[:, at : at + 4 : 3]
    sides = table[:, at + 2 : at + 6 : 3]
    up_to, behind, numbers, flips = table[:, plan.width :].split((3 * 3, 3 * 3, crop.op.columns, 2), 1)
    up_to = composed(before, up_to.view(-1, 3, 3))
    boxes, owners = records.boxes_at(up_to)
    boxes = torch.minimum(boxes.clamp(min=0), sides.repeat(1, 2)[owners])
    windows, kept = crop.op.windows(numbers, sides, boxes, owners)
    start, count = windows[:, :2], windows[:, 2:]
    records.kept = (
        kept & _is_large(boxes, start[owners], (start + count)[owners], crop.op.least) if any(crop.op.least) else kept
    )
    # A nearest pixel depends on the last digit of the scale, so it is divided once, by what the whole image is resized to.
    target = (sides / scale).round()
    first = torch.where(flips < 0, sides - start - count, start)
    columns = torch.stack((count / target, first, count), 2).flatten(1)
    zoom = sides / count
    matrix = torch.nn.functional.pad(zoom, (0, 1), value=1.0).diag_embed()
    matrix[:, :2, 2] = (0.5 - start) * zoom - 0.5
    rows = torch.cat((table[:, :at], columns, table[:, at + 6 :]), 1)
    return rows, composed(composed(up_to, matrix), behind.view(-1, 3, 3))


def _is_large(boxes: Tensor, first: Tensor, last: Tensor, least: tuple[float, float]) -> Tensor:
    """Mask of the boxes, (n,), whose part between two corners, (n, 2) each, has the least side and area."""
    sides = (torch.minimum(boxes[:, 2:], last) - torch.maximum(boxes[:, :2], first)).clamp(min=0)
    return (sides >= least[0]).all(1) & (sides.prod(1) >= least[1])
