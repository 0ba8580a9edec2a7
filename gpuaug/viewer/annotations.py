"""Annotations of one sample: boxes, masks and keypoints, in coordinates of pixel edges, where the first pixel is [0, 1].

Kornia's coordinates are those of pixel centres, and its boxes include their last pixel, so a side is one pixel longer than
the difference of its corners. Target dicts have torchvision's coordinates, which are those of pixel edges.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.errors import ArgumentError
from gpuaug.viewer.follow import Row

Array = NDArray[Any]

_IGNORED = 255
"""Mask value for pixels to ignore, by the convention of data sets and losses."""


@dataclass(frozen=True, slots=True)
class Box:
    """Corners (4, 2), (x, y) clockwise from the top left, and a label."""

    corners: Array
    text: str
    number: int
    """Index of its colour; less than 0 for an object to ignore."""


@dataclass(frozen=True, slots=True)
class Mask:
    """(H, W) bool mask of the pixels that the object covers."""

    covers: Array
    number: int


@dataclass(frozen=True, slots=True)
class Points:
    """Keypoints (K, 2), as (x, y)."""

    places: Array
    number: int


@dataclass
class Annotations:
    """All annotations of one sample."""

    boxes: list[Box] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    points: list[Points] = field(default_factory=list)


def beside(parts: Sequence[Annotations], width: int) -> Annotations:
    """The annotations of images of one size side by side, ``width`` pixels wide each."""
    made = Annotations()
    for place, part in enumerate(parts):
        offset = np.array([place * width, 0])
        made.boxes += [replace(box, corners=box.corners + offset) for box in part.boxes]
        made.points += [replace(points, places=points.places + offset) for points in part.points]
        margins = ((0, 0), (place * width, (len(parts) - 1 - place) * width))
        made.masks += [replace(mask, covers=np.pad(mask.covers, margins)) for mask in part.masks]
    return made


def overlay(
    row: Row, sample: int, shape: tuple[int, int], form: str, name: Callable[[Any], str], frame: int | None = None
) -> Annotations:
    """The annotations of one image of a row, or of one frame of a clip.

    Args:
        row: The row.
        sample: Index of the image. Views of a sample share its annotations where there is one entry for all of them.
        shape: Height and width of the image.
        form: Form of the boxes in target dicts, as in ``gpuaug.fusion.options.Options``.
        name: Gives a class its name.
        frame: Index of the frame in its clip.

    Raises:
        ArgumentError: If boxes have a form that cannot be drawn.
    """
    made = Annotations()
    valid = next((_of(value, sample, frame, 1).astype(bool) for value in row.under("valid")), None)
    tensors = [value for value in row.under("class") if isinstance(value, Tensor)]
    classes = next((_of(value, sample) for value in tensors if value.ndim == 2 and not value.is_floating_point()), None)
    for key in ("bbox", "bbox_xyxy", "bbox_xywh"):
        for value in row.under(key):
            corners = _of_kornia(_of(value, sample, frame, 3 if key == "bbox" else 2), key)
            said = [name(each) for each in classes] if classes is not None and len(classes) == len(corners) else None
            made.boxes += _boxes(corners, said, valid)
    for value in row.under("keypoints"):
        points = _of(value, sample, frame, 2)
        made.points += [Points(point[None, :2] + 0.5, number) for number, point in enumerate(points)]
    for value in row.under("mask"):
        made.masks += _masks(_of(value, sample, frame, 2 if frame is not None and value[0].ndim == 3 else 3))
    for value in row.under("targets"):
        target = value[sample % len(value)]
        _add_target(made, target if isinstance(target, Mapping) else target[frame or 0], shape, form, name)
    return made


def _of(value: Any, sample: int, frame: int | None = None, axes: int = 0) -> Array:
    """The entry of image ``sample``; views of a sample share one where there are fewer entries than images.

    ``frame``: of an entry of a clip with more than ``axes`` axes, that of the frame.
    """
    found = torch.as_tensor(value[sample % len(value)])
    found = found if frame is None or found.ndim <= axes else found[frame]
    return (found.float() if found.is_floating_point() else found).numpy()


def _add_target(
    made: Annotations, target: Mapping[str, Any], shape: tuple[int, int], form: str, name: Callable[[Any], str]
) -> None:
    valid = _whole(target.get("valid"))
    labels = _labels(target.get("labels", target.get("class_labels")))
    said = None if labels is None else [name(each) for each in labels]
    for key in ("boxes", "bbox"):
        if key in target:
            # As in COCO, a bbox is a corner and the sides.
            named = getattr(target[key], "format", None) or ("xywh" if key == "bbox" else form)
            corners = _upright(_array(target[key]), str(getattr(named, "value", named)).lower(), shape)
            made.boxes += _boxes(corners, said, valid)
    if "keypoints" in target:
        for number, points in enumerate(_array(target["keypoints"])):
            points = np.atleast_2d(points)
            seen = points[:, 2] > 0 if points.shape[1] > 2 else np.ones(len(points), bool)
            made.points.append(Points(points[seen, :2], number))
    if "masks" in target:
        masks = _array(target["masks"])
        masks = masks[None] if masks.ndim == 2 else masks
        shown = valid if valid is not None and len(valid) == len(masks) else np.ones(len(masks), bool)
        made.masks += [Mask(mask > 0.5, number) for number, mask in enumerate(masks) if shown[number]]


def _labels(value: Any) -> list[Any] | None:
    """Class numbers or names, one for each box; ``None`` for any other value."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, str):
        return None
    if isinstance(value, list | tuple) and any(isinstance(each, str) for each in value):
        return list(value)
    numbers = _whole(value)
    return None if numbers is None or numbers.ndim != 1 else list(numbers)


def _whole(value: Any) -> Array | None:
    return None if value is None else _array(value)


def _array(value: Any) -> Array:
    found = torch.as_tensor(value)
    return (found.float() if found.is_floating_point() else found).numpy()


def _boxes(corners: Array, said: Sequence[str] | None, valid: Array | None) -> Iterator[Box]:
    fits = valid is not None and len(valid) == len(corners)
    for number, each in enumerate(corners):
        if not fits or valid[number]:  # type: ignore[index]
            yield Box(each, said[number] if said is not None and number < len(said) else "", number)


def _of_kornia(boxes: Array, key: str) -> Array:
    """(N, 4, 2) corners in pixel edges, from Kornia's boxes in pixel centres."""
    if key == "bbox":
        centre = boxes.mean(1, keepdims=True)
        return boxes + 0.5 + 0.5 * np.sign(boxes - centre)  # type: ignore[no-any-return]
    first = boxes[:, :2]
    return _corners(first, boxes[:, 2:] + 1 if key == "bbox_xyxy" else first + boxes[:, 2:])


def _upright(boxes: Array, form: str, shape: tuple[int, int]) -> Array:
    """(N, 4, 2) corners in pixel edges, from boxes of a target dict."""
    if form == "cxcywh_share":
        boxes = boxes * np.array([shape[1], shape[0]] * 2)
        form = "cxcywh"
    first, last = boxes[:, :2], boxes[:, 2:]
    if form == "xyxy":
        return _corners(first, last)
    if form == "xywh":
        return _corners(first, first + last)
    if form == "cxcywh":
        return _corners(first - last / 2, first + last / 2)
    raise ArgumentError(
        f"boxes must be upright to be drawn, got {form.upper()}. Pass the boxes around their corners, (n, 4, 2): "
        "torch.cat((corners.amin(1), corners.amax(1)), 1)."
    )


def _corners(first: Array, last: Array) -> Array:
    (left, top), (right, bottom) = first.T, last.T
    return np.stack((left, top, right, top, right, bottom, left, bottom), -1).reshape(-1, 4, 2)


def _masks(masks: Array) -> Iterator[Mask]:
    """The masks of a sample. One (H, W) is a label map with a mask for each value but 0; several (N, H, W) are masks."""
    if masks.ndim == 3 and len(masks) != 1:
        yield from (Mask(mask > 0.5, number) for number, mask in enumerate(masks))
        return
    values = np.rint(masks.reshape(masks.shape[-2:])).astype(np.int64)
    for value in np.unique(values[values != 0]).tolist():
        yield Mask(values == value, -1 if value in (-1, _IGNORED) else value - 1)
