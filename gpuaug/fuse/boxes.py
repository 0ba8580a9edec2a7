"""Boxes and keypoints under the geometry of a pipeline, in the forms that Kornia takes them.

Kornia maps the four corners of a box and returns the upright box around them, whatever form it was given in; it neither clips
nor drops. Coordinates are those of pixel centres, so that a box of one pixel ends where it begins.
"""

import torch
from torch import Tensor

from gpuaug.errors import ArgumentError


def move_boxes(boxes: Tensor, matrix: Tensor, form: str) -> Tensor:
    """Map boxes.

    Args:
        boxes: In the form that ``form`` names.
        matrix: Input → output pixels.
        form: ``"bbox"``: four corners; ``"bbox_xyxy"``: the first and the last pixel; ``"bbox_xywh"``: the first pixel and the
            sides.

    Shape:
        - boxes: (B, N, 4, 2) for ``"bbox"``, else (B, N, 4)
        - matrix: (B, 3, 3) float32
        - returns: as boxes, floating
    """
    wanted = (4, 2) if form == "bbox" else (4,)
    if boxes.ndim != 2 + len(wanted) or tuple(boxes.shape[2:]) != wanted:
        raise ArgumentError(
            f"{form} must be (B, N, {', '.join(map(str, wanted))}), got {tuple(boxes.shape)}. Pad the samples to one N."
        )
    if not boxes.is_floating_point():
        boxes = boxes.float()
    if form == "bbox":
        corners = boxes
    else:
        first, second = boxes[..., :2], boxes[..., 2:]
        last = second if form == "bbox_xyxy" else first + second - 1
        corners = _corners(first, last)
    moved = _moved(corners.flatten(1, 2), matrix).unflatten(1, corners.shape[1:3])
    least, most = moved.amin(2), moved.amax(2)
    if form == "bbox_xyxy":
        return torch.cat((least, most), -1)
    if form == "bbox_xywh":
        return torch.cat((least, most - least + 1), -1)
    return _corners(least, most)


def move_keypoints(points: Tensor, matrix: Tensor) -> Tensor:
    """Map points, (B, N, 2) in (x, y), by (B, 3, 3) matrices."""
    if points.ndim != 3 or points.shape[2] != 2:
        raise ArgumentError(f"keypoints must be (B, N, 2), got {tuple(points.shape)}. Pad the samples to one N.")
    if points.is_floating_point():
        return _moved(points, matrix)
    return _moved(points.float(), matrix).to(points.dtype)


def _moved(points: Tensor, matrix: Tensor) -> Tensor:
    matrix = matrix.to(points.dtype)
    # Not a matrix product: on a GPU it may be computed in TF32, which is whole pixels off.
    x, y = points[..., 0:1], points[..., 1:2]
    mapped = matrix[:, None, :, 0] * x + matrix[:, None, :, 1] * y + matrix[:, None, :, 2]
    return mapped[..., :2] / mapped[..., 2:]


def _corners(first: Tensor, last: Tensor) -> Tensor:
    """(B, N, 4, 2) clockwise from two opposite corners, (B, N, 2) each."""
    left, top, right, bottom = first[..., 0], first[..., 1], last[..., 0], last[..., 1]
    return torch.stack((left, top, right, top, right, bottom, left, bottom), -1).unflatten(-1, (4, 2))
