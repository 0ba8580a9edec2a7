"""Transformation of boxes and keypoints, in Kornia's formats and in the formats of target dicts.

A *target dict* holds the annotations of one image, such as ``{"boxes": …, "labels": …}``. A *sample* is an image or a clip.
*Points* are keypoints or other single points. *Ragged* images differ in size. In shapes, B is the number of samples, N the
number of boxes or points per sample, and n the number of boxes or points of all samples.

As in Kornia, the four corners of a box are mapped, and the output is the axis-aligned box around the mapped corners.
Coordinates of Kornia's formats refer to pixel centres, so both corners of a box of one pixel are equal. Coordinates of target
dicts refer to pixel edges, as in torchvision: the first pixel extends from 0 to 1.

Unlike in Kornia, empty boxes are no error, because the host would wait for the device to find them. They are mapped like all
others. If boxes are clipped, empty boxes are not *valid*: their entries in the mask of the valid boxes are False.
"""

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from gpuaug.core.errors import ArgumentError
from gpuaug.core.targets import BOXES, KEYPOINTS

BoxLayout = Literal["vertices", "corners", "sides", "centre", "points"]


@dataclass(frozen=True, slots=True)
class BoxFormat:
    """Format of boxes or points: order and meaning of their numbers."""

    layout: BoxLayout
    """Numbers of a box or point.

    ``"vertices"``: (x, y) of four corners; ``"corners"``: left, top, right, bottom; ``"sides"``: left, top, width, height;
    ``"centre"``: x and y of the centre, width, height; ``"points"``: (x, y).
    """

    edges: bool = False
    """True if coordinates refer to pixel edges; False for pixel centres: right and bottom are the centre of the last pixel."""

    share: bool = False
    """True if coordinates and sides are fractions of the width and height of the image."""


KORNIA_FORMATS: dict[str, BoxFormat] = {
    key: BoxFormat(cast(BoxLayout, layout)) for kind in (BOXES, KEYPOINTS) for key, layout in kind.data_keys.items()
}
"""Format by data key of boxes or keypoints. A data key is Kornia's name for the type of an input, such as ``bbox``."""

TARGET_DICT_FORMATS: dict[str, BoxFormat] = {
    "xyxy": BoxFormat("corners", edges=True),
    "xywh": BoxFormat("sides", edges=True),
    "cxcywh": BoxFormat("centre", edges=True),
    "cxcywh_share": BoxFormat("centre", edges=True, share=True),
}
"""Format of boxes by value of ``fuse(…, boxes=…)``. The first three values are torchvision's names in lower case."""

POINTS = BoxFormat("points", edges=True)
"""Format of keypoints in target dicts."""

TRAILING_SHAPES: dict[BoxLayout, tuple[int, ...]] = {
    "vertices": (4, 2),
    "corners": (4,),
    "sides": (4,),
    "centre": (4,),
    "points": (2,),
}
"""Shape of one box or point in each layout."""


@dataclass(frozen=True, slots=True)
class BoxMapping:
    """Matrices, formats and image sizes with which ``map_boxes`` maps boxes or points."""

    source_format: BoxFormat
    target_format: BoxFormat
    matrix: Tensor
    """Matrices that map (x, y, 1) of input pixel centres to output pixel centres, (B, 3, 3) float32."""
    source: tuple[int, int] | Tensor
    """(height, width) of the input images; for ragged images ``Ragged.places``, (B, 3) int64: offset, height, width."""
    out: tuple[int, int]
    """(height, width) of the output images."""
    owners: Tensor | None = None
    """Index of the sample that each box belongs to, (n,) int64, for boxes (n, …); ``None`` for boxes (B, N, …)."""
    clip: bool = False
    """Whether to clip boxes to the output image, and return the mask of the valid boxes."""
    min_visible: float = 0.0
    """With ``clip``, a mapped box is valid only if at least this share of its area lies inside the output image."""


def check_form(values: Tensor, key: str) -> None:
    """Check the shape of boxes or keypoints that a call passes with the data key ``key``.

    Raises:
        ArgumentError: If the shape is not (B, N, …), with the trailing axes of the format of ``key``.
    """
    trailing_shape = TRAILING_SHAPES[KORNIA_FORMATS[key].layout]
    if values.ndim != 2 + len(trailing_shape) or tuple(values.shape[2:]) != trailing_shape:
        raise ArgumentError(
            f"{key} must be (B, N, {', '.join(map(str, trailing_shape))}), got {tuple(values.shape)}. Pad the samples to one N."
        )


def axes_per_box(box_format: BoxFormat) -> int:
    """Number of axes of one box or point: 2 for four corners, else 1."""
    return len(TRAILING_SHAPES[box_format.layout])


def floating_dtype(dtype: torch.dtype) -> torch.dtype:
    """Output dtype for boxes or points of ``dtype``: float32 for integers, else ``dtype``."""
    return dtype if dtype.is_floating_point else torch.float32


def map_boxes(values: Tensor, valid: Tensor | None, mapping: BoxMapping, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Map boxes or points as ``mapping`` describes. Computed in float32, or in float64 for float64 values.

    Further numbers of a point, such as the visibility of a keypoint, are returned unchanged.

    Shape:
        - values: (B, N, …), or (n, …) with ``mapping.owners``; trailing axes as in ``mapping.source_format``
        - valid: (B, N) or (n,) bool, mask of the input boxes that are valid; ``None`` for all
        - returns: values in ``mapping.target_format``, of ``dtype``; and the mask of the output boxes that are valid, ``None``
          without ``mapping.clip``

    Cost:
        About ten launches.
    """
    matrix = mapping.matrix
    source_size = mapping.source
    if mapping.owners is not None:
        # Boxes of all samples, (n, …), are handled as n samples of one box, (n, 1, …).
        values = values[:, None]
        matrix = matrix.index_select(0, mapping.owners)
        valid = None if valid is None else valid[:, None]
        if isinstance(source_size, Tensor):
            source_size = source_size.index_select(0, mapping.owners)
    image_sides = (source_size[:, None, 1], source_size[:, None, 2]) if isinstance(source_size, Tensor) else source_size
    points = apply_matrices(vertices(values, mapping.source_format, image_sides), matrix)
    out_valid: Tensor | None = None
    if mapping.target_format.layout == "points":
        mapped = points + 0.5 if mapping.target_format.edges else points
        mapped = torch.cat((mapped, values[..., 2:]), -1) if values.shape[-1] > 2 else mapped
    else:
        top_left, bottom_right = torch.aminmax(points, dim=-2)
        if mapping.target_format.edges:
            top_left, bottom_right = top_left + 0.5, bottom_right + 0.5
        if mapping.clip:
            out_valid = has_positive_area(values, mapping.source_format) & _overlaps_image(top_left, bottom_right, mapping)
            out_valid = out_valid if valid is None else out_valid & valid
            area = (bottom_right.float() - top_left.float()).prod(-1) if mapping.min_visible else None
            margin = 0 if mapping.target_format.edges else 1  # the centre of the last pixel is at side - 1
            top_left = _clamped(top_left, mapping.out[0] - margin, mapping.out[1] - margin)
            bottom_right = _clamped(bottom_right, mapping.out[0] - margin, mapping.out[1] - margin)
            if area is not None:
                out_valid = out_valid & ((bottom_right.float() - top_left.float()).prod(-1) >= mapping.min_visible * area)
        mapped = _from_corners(top_left, bottom_right, mapping)
    mapped = mapped.to(dtype)
    if mapping.owners is not None:
        return mapped[:, 0], None if out_valid is None else out_valid[:, 0]
    return mapped, out_valid


def vertices(values: Tensor, box_format: BoxFormat, source: tuple[int | Tensor, int | Tensor] = (1, 1)) -> Tensor:
    """Convert boxes to corners, clockwise from the top left, and points to (x, y), in coordinates of pixel centres.

    ``source``: (height, width) of the images, numbers or tensors that broadcast to (…). Read only if ``box_format.share``.

    Shape:
        - values: (…), with trailing axes as in ``box_format``
        - returns: (…, 4, 2), or (…, 2) for points; float32, or float64 for float64 values

    Cost:
        At most eight launches.
    """
    if values.dtype != torch.float64:
        values = values.float()
    if box_format.share:
        height, width = source
        x, y, box_width, box_height = values.unbind(-1)
        values = torch.stack((x * width, y * height, box_width * width, box_height * height), -1)
    points = values
    if box_format.layout == "points":
        points = values[..., :2]
    elif box_format.layout != "vertices":
        # For the layout "corners" these are the two corners; for others, (left, top) or the centre, and (width, height), which
        # are converted to the corners here.
        top_left, bottom_right = values[..., :2], values[..., 2:]
        if box_format.layout == "centre":
            top_left = top_left - bottom_right / 2
        if box_format.layout != "corners":
            bottom_right = top_left + bottom_right if box_format.edges else top_left + bottom_right - 1
        points = _corners(top_left, bottom_right)
    return points - 0.5 if box_format.edges else points


def apply_matrices(points: Tensor, matrix: Tensor) -> Tensor:
    """Return points, (B, …, 2) as (x, y), mapped by one matrix per sample, (B, 3, 3) float32.

    Cost:
        Three launches.
    """
    elements = matrix.to(points.dtype)[:, None]
    flat = points.flatten(1, -2)
    # No matrix product, because a GPU may compute it in TF32, with errors of whole pixels.
    mapped = torch.addcmul(torch.addcmul(elements[..., 2], elements[..., 0], flat[..., :1]), elements[..., 1], flat[..., 1:])
    return (mapped[..., :2] / mapped[..., 2:]).reshape(points.shape)


def composed(first: Tensor | None, second: Tensor) -> Tensor:
    """Return matrices, (B, 3, 3), that map by ``first``, then by ``second``. ``None`` as ``first`` stands for the identity."""
    return second if first is None else (second[..., None] * first[:, None]).sum(2)


def _from_corners(top_left: Tensor, bottom_right: Tensor, mapping: BoxMapping) -> Tensor:
    """Return boxes in ``mapping.target_format``, from their top left and bottom right corners, (…, 2) each."""
    layout = mapping.target_format.layout
    if layout == "vertices":
        return _corners(top_left, bottom_right)
    if layout == "corners":
        return torch.cat((top_left, bottom_right), -1)
    sides = bottom_right - top_left if mapping.target_format.edges else bottom_right - top_left + 1
    boxes = torch.cat((top_left if layout == "sides" else (top_left + bottom_right) / 2, sides), -1)
    if not mapping.target_format.share:
        return boxes
    height, width = mapping.out
    x, y, box_width, box_height = boxes.unbind(-1)
    return torch.stack((x / width, y / height, box_width / width, box_height / height), -1)


def has_positive_area(values: Tensor, box_format: BoxFormat) -> Tensor:
    """Mask of the input boxes with a positive area, (B, N) bool. Boxes in the layout ``"vertices"`` are not checked."""
    if box_format.layout == "vertices":
        return torch.ones_like(values[..., 0, 0], dtype=torch.bool)
    if values.dtype != torch.float64:
        values = values.float()  # differences of unsigned integers wrap around
    sides = values[..., 2:] if box_format.layout != "corners" else values[..., 2:] - values[..., :2]
    # Coordinates of pixel centres: right - left is 0 for a box of one pixel, and -1 for an empty box.
    return (sides > (0 if box_format.edges or box_format.layout != "corners" else -1)).all(-1)


def are_large(sides: Tensor, min_side: float, min_area: float) -> Tensor:
    """Return the mask of the boxes that are large enough to be valid, (n,) bool. ``sides``: width and height, (n, 2)."""
    return (sides >= min_side).all(1) & (sides.prod(1) >= min_area)


def _overlaps_image(top_left: Tensor, bottom_right: Tensor, mapping: BoxMapping) -> Tensor:
    """Mask of the output boxes whose part inside the output image is at least one pixel wide and high, (B, N) bool."""
    end = bottom_right if mapping.target_format.edges else bottom_right + 1
    sides = _clamped(end, *mapping.out) - _clamped(top_left, *mapping.out)
    return (sides >= 1).all(-1)


def _clamped(points: Tensor, height: int, width: int) -> Tensor:
    """Return points, (…, 2), with x clamped to [0, width] and y to [0, height]."""
    return torch.stack((points[..., 0].clamp(0, width), points[..., 1].clamp(0, height)), -1)


def _corners(top_left: Tensor, bottom_right: Tensor) -> Tensor:
    """Return the four corners of boxes, (…, 4, 2), clockwise from the top left, from two of them, (…, 2) each."""
    left, top, right, bottom = top_left[..., 0], top_left[..., 1], bottom_right[..., 0], bottom_right[..., 1]
    return torch.stack((left, top, right, top, right, bottom, left, bottom), -1).view(*left.shape, 4, 2)
