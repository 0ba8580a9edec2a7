"""Boxes and keypoints under the geometry of a pipeline, in the forms that Kornia takes them.

As in Kornia, the four corners of a box are mapped, through all modules, and what comes out is the upright box around them: it
is neither clipped nor dropped. Coordinates are those of pixel centres, so that a box of one pixel ends where it begins. Unlike
Kornia, nothing looks at the values, which would have the host wait for the device: boxes without an extent are mapped too.
"""

from typing import Any

import torch
from torch import Tensor

from gpuaug.errors import ArgumentError

FORMS: dict[str, tuple[int, ...]] = {"bbox": (4, 2), "bbox_xyxy": (4,), "bbox_xywh": (4,), "keypoints": (2,)}
"""What follows (B, N) in the shape, by Kornia's name: four corners, the first and the last pixel, the first pixel and the
sides, or points (x, y)."""


def vertices(values: Any, form: str) -> Tensor:
    """What is mapped: the corners of boxes, clockwise from the top left, or points as they are; float32 at least.

    Shape:
        - values: (B, N) and what :data:`FORMS` says
        - returns: (B, N, 4, 2), or (B, N, 2) for keypoints

    Raises:
        ArgumentError: If ``values`` have another shape.

    Cost:
        At most four launches.
    """
    tail = FORMS[form]
    if values.ndim != 2 + len(tail) or tuple(values.shape[2:]) != tail:
        raise ArgumentError(
            f"{form} must be (B, N, {', '.join(map(str, tail))}), got {tuple(values.shape)}. Pad the samples to one N."
        )
    if values.dtype != torch.float64:
        values = values.float()
    if form == "bbox_xyxy":
        return _corners(values[..., :2], values[..., 2:])
    if form == "bbox_xywh":
        return _corners(values[..., :2], values[..., :2] + values[..., 2:] - 1)
    return values  # type: ignore[no-any-return]


def move(points: Tensor, matrix: Tensor) -> Tensor:
    """Map points, (B, …, 2) as (x, y), by matrices, (B, 3, 3) float32.

    Cost:
        Three launches.
    """
    m = matrix.to(points.dtype)[:, None]
    flat = points.flatten(1, -2)
    # Not a matrix product: on a GPU it may be computed in TF32, which is whole pixels off.
    mapped = torch.addcmul(torch.addcmul(m[..., 2], m[..., 0], flat[..., :1]), m[..., 1], flat[..., 1:])
    return (mapped[..., :2] / mapped[..., 2:]).reshape(points.shape)


def from_vertices(points: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """Boxes or keypoints in the form in which they came, of ``dtype``; float where that is a type of whole numbers.

    Shape:
        - points: (B, N, 4, 2), or (B, N, 2) for keypoints
        - returns: (B, N) and what :data:`FORMS` says

    Cost:
        At most five launches.
    """
    if form == "keypoints":
        made = points
    else:
        least, most = torch.aminmax(points, dim=2)
        if form == "bbox":
            made = _corners(least, most)
        else:
            made = torch.cat((least, most if form == "bbox_xyxy" else most - least + 1), -1)
    return made.to(dtype if dtype.is_floating_point else torch.get_default_dtype())


def _corners(first: Tensor, last: Tensor) -> Tensor:
    """(B, N, 4, 2) clockwise from two opposite corners, (B, N, 2) each."""
    left, top, right, bottom = first[..., 0], first[..., 1], last[..., 0], last[..., 1]
    return torch.stack((left, top, right, top, right, bottom, left, bottom), -1).view(*left.shape, 4, 2)
