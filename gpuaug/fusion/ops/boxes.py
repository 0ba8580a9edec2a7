"""Boxes and keypoints under the geometry of a pipeline, in Kornia's forms and in those of target dicts.

As in Kornia, the four corners of a box are mapped, through all modules, and what comes out is the upright box around them.
What a form's coordinates mean differs. Kornia's are those of pixel centres, so that a box of one pixel ends where it begins.
Those of target dicts are torchvision's: of pixel edges, half a pixel before the first centre and half a pixel behind the last.

Kornia looks at the values to refuse boxes without an extent, for which the host would wait for the device. Here they are
mapped, and where it is asked which boxes are valid, they are not.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gpuaug.core.errors import ArgumentError

Layout = Literal["vertices", "corners", "sides", "centre", "points"]


@dataclass(frozen=True, slots=True)
class Form:
    """The layout and convention of the coordinates of a box or a point."""

    layout: Layout
    """Four points, two opposite corners, a corner and the sides, the centre and the sides, or a point (x, y)."""

    edges: bool = False
    """True: coordinates of pixel edges. False: of pixel centres, the last pixel included."""

    share: bool = False
    """True if coordinates are fractions of the image's sides."""


FORMS: dict[str, Form] = {
    "bbox": Form("vertices"),
    "bbox_xyxy": Form("corners"),
    "bbox_xywh": Form("sides"),
    "keypoints": Form("points"),
}
"""By Kornia's name: four corners, the first and the last pixel, the first pixel and the sides, or points (x, y)."""

_TAILS: dict[Layout, tuple[int, ...]] = {"vertices": (4, 2), "corners": (4,), "sides": (4,), "centre": (4,), "points": (2,)}


@dataclass(frozen=True, slots=True)
class Way:
    """The map that boxes or points of one form are taken through, and the form of the output.

    ``matrix``, (B, 3, 3) float32, maps pixel centres. An element belongs to the sample of its row, or, with ``owners``, (n,)
    int64, to the one that is named there. ``source`` is the height and width of the images before, or ``Ragged.places``. With
    ``clip`` boxes end at the frame ``out``, and it is said which have something left.
    """

    form: Form
    to: Form
    matrix: Tensor
    source: tuple[int, int] | Tensor
    out: tuple[int, int]
    owners: Tensor | None = None
    clip: bool = False


def check_form(values: Tensor, key: str) -> None:
    """Refuse a tensor that does not have the shape of a form of Kornia's.

    Raises:
        ArgumentError: If it has another.
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
    """The output type of values of ``dtype``: float32 for integers."""
    return dtype if dtype.is_floating_point else torch.float32


def follow(values: Tensor, valid: Tensor | None, way: Way, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Map boxes or points by ``way``, in float32 at least. Columns after a point's (x, y) are unchanged.

    Shape:
        - values: (B, N, …), or with owners (n, …), and what the form says
        - valid: (B, N) or (n,) bool: which are to be asked for at all
        - returns: the same in the form ``way.to``, of ``dtype``; and which are valid, where boxes are clipped

    Cost:
        Some ten launches.
    """
    matrix = way.matrix
    sides = way.source
    if values.dtype != torch.float64:
        values = values.float()
    if way.owners is not None:
        # Each box is then a sample of one box.
        values = values[:, None]
        matrix = matrix.index_select(0, way.owners)
        valid = None if valid is None else valid[:, None]
        sides = sides.index_select(0, way.owners) if isinstance(sides, Tensor) else sides
    source = (sides[:, None, 1], sides[:, None, 2]) if isinstance(sides, Tensor) else sides
    points = move(vertices(values, way.form, source), matrix)
    kept: Tensor | None = None
    if way.to.layout == "points":
        made = points + 0.5 if way.to.edges else points
        made = torch.cat((made, values[..., 2:]), -1) if values.shape[-1] > 2 else made
    else:
        first, last = torch.aminmax(points, dim=-2)
        if way.to.edges:
            first, last = first + 0.5, last + 0.5
        if way.clip:
            kept = has_extent(values, way.form) & _is_seen(first, last, way)
            kept = kept if valid is None else kept & valid
            least = 0 if way.to.edges else 1
            first, last = (_clamped(each, way.out[0] - least, way.out[1] - least) for each in (first, last))
        made = _packed(first, last, way)
    made = made.to(dtype)
    if way.owners is not None:
        return made[:, 0], None if kept is None else kept[:, 0]
    return made, kept


def vertices(values: Tensor, form: Form, source: tuple[int | Tensor, int | Tensor] = (1, 1)) -> Tensor:
    """What is mapped, as pixel centres: the corners of boxes, clockwise from the top left, or points; float32 at least.

    Shape:
        - values: (…) and what the form says
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
    # Not a matrix product: on a GPU it may be computed in TF32, which is whole pixels off.
    mapped = torch.addcmul(torch.addcmul(m[..., 2], m[..., 0], flat[..., :1]), m[..., 1], flat[..., 1:])
    return (mapped[..., :2] / mapped[..., 2:]).reshape(points.shape)


def composed(first: Tensor | None, then: Tensor) -> Tensor:
    """Composed matrices, (B, 3, 3): ``first``, then ``then``."""
    return then if first is None else (then[..., None] * first[:, None]).sum(2)


def _packed(first: Tensor, last: Tensor, way: Way) -> Tensor:
    """Axis-aligned boxes in the output form, from two opposite corners, (…, 2) each."""
    layout = way.to.layout
    if layout == "vertices":
        return _corners(first, last)
    if layout == "corners":
        return torch.cat((first, last), -1)
    sides = last - first if way.to.edges else last - first + 1
    made = torch.cat((first if layout == "sides" else (first + last) / 2, sides), -1)
    if not way.to.share:
        return made
    height, width = way.out
    x, y, across, down = made.unbind(-1)
    return torch.stack((x / width, y / height, across / width, down / height), -1)


def has_extent(values: Tensor, form: Form) -> Tensor:
    """Mask of the input boxes that have an area, (B, N)."""
    if form.layout == "vertices":
        return torch.ones_like(values[..., 0, 0], dtype=torch.bool)
    sides = values[..., 2:] if form.layout != "corners" else values[..., 2:] - values[..., :2]
    return (sides > (0 if form.edges or form.layout != "corners" else -1)).all(-1)


def _is_seen(first: Tensor, last: Tensor, way: Way) -> Tensor:
    """Mask of boxes with at least one pixel along x and y within the frame, (B, N)."""
    end = last if way.to.edges else last + 1
    sides = _clamped(end, *way.out) - _clamped(first, *way.out)
    return (sides >= 1).all(-1)


def _clamped(points: Tensor, height: int, width: int) -> Tensor:
    return torch.stack((points[..., 0].clamp(0, width), points[..., 1].clamp(0, height)), -1)


def _corners(first: Tensor, last: Tensor) -> Tensor:
    """(…, 4, 2) clockwise from two opposite corners, (…, 2) each."""
    left, top, right, bottom = first[..., 0], first[..., 1], last[..., 0], last[..., 1]
    return torch.stack((left, top, right, top, right, bottom, left, bottom), -1).view(*left.shape, 4, 2)
