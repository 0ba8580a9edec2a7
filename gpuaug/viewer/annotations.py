"""Annotations of one sample: boxes, masks and keypoints. Coordinates are of pixel edges: the first pixel covers [0, 1].

Kornia's coordinates are of pixel centres, and its boxes include their last pixel: a side is one pixel longer than the
difference of its corners. *Target dicts* (annotations, one dict per image) have torchvision's coordinates, of pixel edges.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.errors import ArgumentError
from gpuaug.core.targets import BOXES
from gpuaug.fusion.ops.boxes import KORNIA_FORMATS, TARGET_DICT_FORMATS, vertices
from gpuaug.viewer.follow import Row

Array = NDArray[Any]

_IGNORED = 255
"""Mask value of pixels to ignore, a convention of datasets and losses."""

_NO_NUMBERS = np.zeros(0)
"""Array of a target that is missing or cannot be drawn."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box and its label."""

    corners: Array
    """(4, 2) corners as (x, y), clockwise from the top left."""
    text: str
    """Label; empty if there is none."""
    number: int
    """Index of the object, which selects the colour; less than 0 for an object to ignore."""


@dataclass(frozen=True, slots=True)
class Mask:
    """Mask of one object."""

    covers: Array
    """(H, W) bool, true for the pixels of the object."""
    number: int
    """Index of the object, which selects the colour."""


@dataclass(frozen=True, slots=True)
class Points:
    """Keypoints of one object."""

    xy: Array
    """(K, 2) positions as (x, y)."""
    number: int
    """Index of the object, which selects the colour."""


@dataclass
class Annotations:
    """All annotations of one sample."""

    boxes: list[Box] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    points: list[Points] = field(default_factory=list)


def joined_horizontally(parts: Sequence[Annotations], width: int) -> Annotations:
    """Return the annotations of images of one size that are drawn side by side, each ``width`` pixels wide."""
    annotations = Annotations()
    for index, part in enumerate(parts):
        offset = np.array([index * width, 0])
        annotations.boxes += [replace(box, corners=box.corners + offset) for box in part.boxes]
        annotations.points += [replace(points, xy=points.xy + offset) for points in part.points]
        margins = ((0, 0), (index * width, (len(parts) - 1 - index) * width))
        annotations.masks += [replace(mask, covers=np.pad(mask.covers, margins)) for mask in part.masks]
    return annotations


def overlay(
    row: Row, sample: int, shape: tuple[int, int], box_format: str, name_of: Callable[[Any], str], frame: int | None = None
) -> Annotations:
    """Return the annotations of one image of a row, or of one frame of a clip.

    Args:
        row: Images in one member of the batch, with their targets.
        sample: Index of the image. Views (random augmentations) of a sample share annotations if there is one entry per sample.
        shape: Height and width of the image.
        box_format: Format of the boxes in target dicts, a value of ``gpuaug.fusion.options.Options.boxes``.
        name_of: Function that returns the name of a class.
        frame: Index of the frame in its clip; ``None`` for an image.

    Raises:
        ArgumentError: If the format of boxes cannot be drawn.
    """
    annotations = Annotations()
    # ``valid``: bool per box, false for padding and for boxes outside of a crop.
    valid = next((_entry(value, sample, frame, 1) for value in row.targets_with("valid")), _NO_NUMBERS)
    tensors = [value for value in row.targets_with("class") if isinstance(value, Tensor)]
    # Classes of boxes are whole numbers (B, N). Other labels belong to the whole image.
    box_classes = (_entry(value, sample) for value in tensors if value.ndim == 2 and not value.is_floating_point())
    classes = next(box_classes, _NO_NUMBERS)
    for key in BOXES.data_keys:
        for value in row.targets_with(key):
            corners = _kornia_corners(_entry(value, sample, frame, 3 if key == "bbox" else 2), key)
            names = list(map(name_of, classes)) if len(classes) == len(corners) else []
            annotations.boxes += _boxes(corners, names, valid)
    for value in row.targets_with("keypoints"):
        points = _entry(value, sample, frame, 2)
        annotations.points += [Points(point[None, :2] + 0.5, number) for number, point in enumerate(points)]
    for value in row.targets_with("mask"):
        # Label maps of a clip are (T, H, W); masks of objects are (N, H, W), or (T, N, H, W) for a clip.
        masks = _entry(value, sample, frame, 2 if frame is not None and value[0].ndim == 3 else 3)
        annotations.masks += _masks(masks) if masks.shape[-2:] == shape else ()
    for value in row.targets_with("targets"):
        target = value[sample % len(value)]  # a dict, or for a clip a list of dicts, one per frame
        _add_target(annotations, target if isinstance(target, Mapping) else target[frame or 0], shape, box_format, name_of)
    return annotations


def _entry(value: Any, sample: int, frame: int | None = None, axes: int = 0) -> Array:
    """Return the entry of ``value`` for image ``sample``. If there are fewer entries than images, views share an entry.

    For a ``frame`` of a clip, return ``entry[frame]`` if the entry has more than ``axes`` axes.
    """
    entry = _numbers(value[sample % len(value)])
    return entry if frame is None or entry.ndim <= axes else entry[frame]


def _add_target(
    annotations: Annotations,
    target: Mapping[str, Any],
    shape: tuple[int, int],
    default_format: str,
    name_of: Callable[[Any], str],
) -> None:
    """Add the boxes, keypoints and masks of a target dict to ``annotations``. Parameters: see ``overlay``."""
    valid = _numbers(target.get("valid"))
    names = list(map(name_of, _labels(target.get("labels", target.get("class_labels")))))
    for key in BOXES.keys:
        boxes = target.get(key)
        # Boxes of torchvision have a format. The key bbox means COCO's format: the top left corner and the sides.
        box_format = getattr(boxes, "format", None) or ("xywh" if key == "bbox" else default_format)
        corners = _upright_corners(_numbers(boxes), str(getattr(box_format, "value", box_format)).lower(), shape)
        annotations.boxes += _boxes(corners, names, valid)
    for number, points in enumerate(_numbers(target.get("keypoints"))):
        points = np.atleast_2d(points)
        visible = points[:, 2] > 0 if points.shape[1] > 2 else np.ones(len(points), bool)
        annotations.points.append(Points(points[visible, :2], number))
    masks = _numbers(target.get("masks"))
    masks = masks.reshape(-1, *shape) if masks.shape[-2:] == shape else masks[:0]  # of another size: not of pixels
    is_drawn = valid if len(valid) == len(masks) else np.ones(len(masks), bool)
    annotations.masks += [Mask(mask > 0.5, number) for number, mask in enumerate(masks) if is_drawn[number]]


def _labels(value: Any) -> list[Any]:
    """Return class indices or names, one per box; an empty list if ``value`` is neither."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, list | tuple) and any(isinstance(item, str) for item in value):
        return list(value)
    numbers = _numbers(value)
    return list(numbers) if numbers.ndim == 1 else []


def _numbers(value: Any) -> Array:
    """Return a tensor, an array, an image of PIL, or lists of these or of numbers as one array.

    Anything else, such as ``None``, polygons or the run lengths of a mask, gives an empty array, which is not drawn.
    """
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(np.array(value), device="cpu")
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    except (TypeError, ValueError, RuntimeError):
        return _NO_NUMBERS


def _boxes(corners: Array, names: Sequence[str], valid: Array) -> Iterator[Box]:
    """Yield the boxes that are valid. ``names`` and ``valid`` may be empty: the boxes then have no label, and all are valid."""
    has_valid = len(valid) == len(corners)
    for number, box_corners in enumerate(corners):
        if not has_valid or valid[number]:
            yield Box(box_corners, names[number] if number < len(names) else "", number)


def _kornia_corners(boxes: Array, key: str) -> Array:
    """Return (N, 4, 2) corners in coordinates of pixel edges, from Kornia's boxes in coordinates of pixel centres."""
    boxes = boxes.reshape(-1, 4, 2) if key == "bbox" else boxes.reshape(-1, 4)  # a sample without boxes may have shape (0,)
    corners: Array = vertices(torch.from_numpy(boxes), KORNIA_FORMATS[key]).numpy()
    if key == "bbox":  # may be rotated
        return corners + 0.5 + 0.5 * np.sign(corners - corners.mean(1, keepdims=True))  # type: ignore[no-any-return]
    corners += np.array([(0, 0), (1, 0), (1, 1), (0, 1)])
    return corners


def _upright_corners(boxes: Array, box_format: str, shape: tuple[int, int]) -> Array:
    """Return (N, 4, 2) corners in coordinates of pixel edges, from the axis-aligned boxes of a target dict."""
    if box_format not in TARGET_DICT_FORMATS:
        raise ArgumentError(
            f"boxes must be axis-aligned to be drawn, got {box_format.upper()}. Pass the enclosing boxes, computed from the "
            "corners (n, 4, 2): torch.cat((corners.amin(1), corners.amax(1)), 1)."
        )
    boxes = boxes.reshape(-1, 4)  # a sample without boxes may have shape (0,)
    # ``vertices`` returns coordinates of pixel centres, which differ by 0.5.
    corners: Array = vertices(torch.from_numpy(boxes), TARGET_DICT_FORMATS[box_format], shape).numpy() + 0.5
    return corners


def _masks(masks: Array) -> Iterator[Mask]:
    """Yield the masks of a sample. An array (H, W) or (1, H, W) is a label map: one mask per value other than 0."""
    if masks.ndim == 3 and len(masks) != 1:
        yield from (Mask(mask > 0.5, number) for number, mask in enumerate(masks))
        return
    values = np.rint(masks.reshape(masks.shape[-2:])).astype(np.int64)
    for value in np.unique(values[values != 0]).tolist():
        yield Mask(values == value, -1 if value in (-1, _IGNORED) else value - 1)
