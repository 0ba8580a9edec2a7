"""Transformation of boxes and keypoints, in Kornia's formats and in the formats of target dicts.

As in Kornia, the four corners of a box are mapped through all modules, and the output is the axis-aligned box around them.
Coordinates of Kornia's formats refer to pixel centres, so both corners of a box of one pixel are equal. Coordinates of target
dicts refer to pixel edges, as in torchvision: the first pixel extends from 0 to 1.

Kornia reads the values to reject empty boxes, which makes the host wait for the device. Here empty boxes are mapped as well,
and are not valid where the mask of valid boxes is requested.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gpuaug.core.errors import ArgumentError

Layout = Literal["vertices", "corners", "sides", "centre", "points"]


@dataclass(frozen=True, slots=True)
class Form:
    """Format of boxes or points: the layout and the convention of their coordinates."""

    layout: Layout
    """``"vertices"``: four corners; ``"corners"``: XYXY; ``"sides"``: XYWH; ``"centre"``: CXCYWH; ``"points"``: (x, y)."""

    edges: bool = False
    """True for coordinates of pixel edges; False for pixel centres, with the last pixel included."""

    share: bool = False
    """True if coordinates are fractions of the image size."""


FORMS: dict[str, Form] = {
    "bbox": Form("vertices"),
    "bbox_xyxy": Form("corners"),
    "bbox_xywh": Form("sides"),
    "keypoints": Form("points"),
}
"""Formats by Kornia's data key."""

_TAILS: dict[Layout, tuple[int, ...]] = {"vertices": (4, 2), "corners": (4,), "sides": (4,), "centre": (4,), "points": (2,)}


@dataclass(frozen=True, slots=True)
class BoxMapping:
    """Map of boxes or points from format ``form`` to format ``to``.

    ``matrix``, (B, 3, 3) float32, maps pixel centres. The sample of a box is its index along the first axis, or, with
    ``owners``, (n,) int64, the index ``owners`` holds for it. ``source`` is the (height, width) of the input images, or
    ``Ragged.places``. With ``clip`` boxes are clipped to the output size ``out``, (height, width), and a mask of the valid
    boxes is returned.
    """

    form: Form
    to: Form
    matrix: Tensor
    source: tuple[int, int] | Tensor
    out: tuple[int, int]
    owners: Tensor | None = None
    clip: bool = False


def check_form(values: Tensor, key: str) -> None:
    """Reject a tensor without the shape of Kornia's format ``key``.

    Raises:
        ArgumentError: If the shape differs.
    """
    tail = _TAILS[FORMS[key].layout]
    if values.ndim != 2 + len(tail) or tuple(values.shape[2:]) != tail:
        raise ArgumentError(
            f"{key} must be (B, N, {', '.join(map(str, tail))}), got {tuple(values.shape)}. Pad the samples to one N."
        )


def rank(form: Form) -> int:
    """Number of axes of one box or point."""
    return len(_TAILS[form.layout])


def floating(dtype: torch.dtype) -> torch.dtype:
    """Output dtype for values of ``dtype``: float32 for integers, else ``dtype``."""
    return dtype if dtype.is_floating_point else torch.float32


def map_boxes(values: Tensor, valid: Tensor | None, mapping: BoxMapping, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Map boxes or points by ``mapping``, in float32 at least. Columns after a point's (x, y) are unchanged.

    Shape:
        - values: (B, N, …), or (n, …) with owners; trailing axes as in the format ``mapping.form``
        - valid: (B, N) or (n,) bool: mask of the boxes to consider, or ``None`` for all
        - returns: values in the format ``mapping.to``, of ``dtype``; and the mask of valid boxes, ``None`` without ``clip``

    Cost:
        About ten launches.
    """
    matrix = mapping.matrix
    sides = mapping.source
    if values.dtype != torch.float64:
        values = values.float()
    if mapping.owners is not None:
        # Every box becomes a sample of one box.
        values = values[:, None]
        matrix = matrix.index_select(0, mapping.owners)
        valid = None if valid is None else valid[:, None]
        sides = sides.index_select(0, mapping.owners) if isinstance(sides, Tensor) else sides
    source = (sides[:, None, 1], sides[:, None, 2]) if isinstance(sides, Tensor) else sides
    points = move(vertices(values, mapping.form, source), matrix)
    kept: Tensor | None = None
    if mapping.to.layout == "points":
        mapped = points + 0.5 if mapping.to.edges else points
        mapped = torch.cat((mapped, values[..., 2:]), -1) if values.shape[-1] > 2 else mapped
    else:
        first, last = torch.aminmax(points, dim=-2)
        if mapping.to.edges:
            first, last = first + 0.5, last + 0.5
        if mapping.clip:
            kept = has_extent(values, mapping.form) & _is_seen(first, last, mapping)
            kept = kept if valid is None else kept & valid
            margin = 0 if mapping.to.edges else 1
            first, last = (_clamped(corner, mapping.out[0] - margin, mapping.out[1] - margin) for corner in (first, last))
        mapped = _packed(first, last, mapping)
    mapped = mapped.to(dtype)
    if mapping.owners is not None:
        return mapped[:, 0], None if kept is None else kept[:, 0]
    return mapped, kept


def vertices(values: Tensor, form: Form, source: tuple[int | Tensor, int | Tensor] = (1, 1)) -> Tensor:
    """Corners of boxes, clockwise from the top left, or points, in coordinates of pixel centres, in float32 at least.

    Shape:
        - values: (…), with trailing axes as in the format ``form``
        - returns: (…, 4, 2), or (…, 2) for points

    Cost:
        At most eight launches.
    """
    if values.dtype != torch.float64:
        values = values.float()
    if form.share:
        height, width = source
        x, y, across, down = values.unbind(-1)
        values = torch.stack((x * width, y * height, across * width, down * height), -1)
    shift = 0.5 if form.edges else 0.0
    if form.layout == "vertices":
        return values
    if form.layout == "points":
        return values[..., :2] - shift if form.edges else values[..., :2]
    first, last = values[..., :2], values[..., 2:]
    if form.layout == "centre":
        first = first - last / 2
    if form.layout != "corners":
        last = first + last if form.edges else first + last - 1
    return _corners(first - shift, last - shift) if form.edges else _corners(first, last)


def move(points: Tensor, matrix: Tensor) -> Tensor:
    """Map points, (B, …, 2) as (x, y), by matrices, (B, 3, 3) float32.

    Cost:
        Three launches.
    """
    m = matrix.to(points.dtype)[:, None]
    flat = points.flatten(1, -2)
    # Not a matrix product, which may be computed in TF32 on a GPU, with errors of whole pixels.
    mapped = torch.addcmul(torch.addcmul(m[..., 2], m[..., 0], flat[..., :1]), m[..., 1], flat[..., 1:])
    return (mapped[..., :2] / mapped[..., 2:]).reshape(points.shape)


def composed(first: Tensor | None, then: Tensor) -> Tensor:
    """Compose matrices, (B, 3, 3): ``first`` is applied before ``then``."""
    return then if first is None else (then[..., None] * first[:, None]).sum(2)


def _packed(first: Tensor, last: Tensor, mapping: BoxMapping) -> Tensor:
    """Axis-aligned boxes in the format ``mapping.to``, from two opposite corners, (…, 2) each."""
    layout = mapping.to.layout
    if layout == "vertices":
        return _corners(first, last)
    if layout == "corners":
        return torch.cat((first, last), -1)
    sides = last - first if mapping.to.edges else last - first + 1
    packed = torch.cat((first if layout == "sides" else (first + last) / 2, sides), -1)
    if not mapping.to.share:
        return packed
    height, width = mapping.out
    x, y, across, down = packed.unbind(-1)
    return torch.stack((x / width, y / height, across / width, down / height), -1)


def has_extent(values: Tensor, form: Form) -> Tensor:
    """Mask of the input boxes with a positive area, (B, N) bool."""
    if form.layout == "vertices":
        return torch.ones_like(values[..., 0, 0], dtype=torch.bool)
    sides = values[..., 2:] if form.layout != "corners" else values[..., 2:] - values[..., :2]
    return (sides > (0 if form.edges or form.layout != "corners" else -1)).all(-1)


def _is_seen(first: Tensor, last: Tensor, mapping: BoxMapping) -> Tensor:
    """Mask of the boxes that overlap the output image by at least one pixel along x and y, (B, N) bool."""
    end = last if mapping.to.edges else last + 1
    sides = _clamped(end, *mapping.out) - _clamped(first, *mapping.out)
    return (sides >= 1).all(-1)


def _clamped(points: Tensor, height: int, width: int) -> Tensor:
    return torch.stack((points[..., 0].clamp(0, width), points[..., 1].clamp(0, height)), -1)


def _corners(first: Tensor, last: Tensor) -> Tensor:
    """Four corners, (…, 4, 2), clockwise from the top left, from two opposite corners, (…, 2) each."""
    left, top, right, bottom = first[..., 0], first[..., 1], last[..., 0], last[..., 1]
    return torch.stack((left, top, right, top, right, bottom, left, bottom), -1).view(*left.shape, 4, 2)
