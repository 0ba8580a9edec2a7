"""Target dicts: one dict of annotations per image, as detection models take them.

While the images run through the passes, the boxes of all images are one tensor of *rows*, one row per box, and so are the
keypoints. The *owner* of a row is the index of its image. A *column* is the values of all dicts under one key. Target dicts are
*packed* if each column is stored as one tensor. A mask ``valid`` says which boxes are inside the image and large enough.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.columns import Column, TensorColumn, columns, joined, split
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, DeviceError
from gpuaug.core.packed_targets import PackedColumn, PackedTargets
from gpuaug.core.torchvision_types import HOLDS_NOTHING, type_name
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.boxes import BoxFormat, BoxMapping, floating_dtype
from gpuaug.fusion.ops.torchvision.target_conversions import NO_CONVERSIONS, TargetConversions
from gpuaug.fusion.options import BoxFormatName
from gpuaug.fusion.targets.annotations import Annotations, Rows, annotations_of, packed_annotations_of
from gpuaug.fusion.targets.data_keys import check_canvas
from gpuaug.fusion.targets.masks import MaskList, owners_of, sides_of, to_device

TARGET_DICT_FORMATS: dict[str, BoxFormat] = {
    "xyxy": BoxFormat("corners", edges=True),
    "xywh": BoxFormat("sides", edges=True),
    "cxcywh": BoxFormat("centre", edges=True),
    "cxcywh_share": BoxFormat("centre", edges=True, share=True),
}
"""Format of boxes for each value of ``fuse(…, boxes=…)``. The first three are torchvision's names in lower case."""

_POINTS = BoxFormat("points", edges=True)
"""Format of keypoints."""

_NO_LISTS = (str, Mapping, Tensor)
"""Types that are not accepted as a list of target dicts, although some of them are sequences."""


class TargetDicts:
    """Target dicts of a batch while the images run through the passes.

    Args:
        records: One mapping per image, or ``PackedTargets`` for which ``can_stay_packed`` returns true.
        size: Size of the images.
        image_layouts: ``Ragged.places``, (B, 3) int64 (offset, height, width), of images or of the first frame per clip;
            ``None`` if images have one size.
        device: Device of the images.
        boxes: Format of plain tensors under the key ``boxes``. Under ``bbox`` boxes have COCO's format: corner, width, height.
        conversions: Conversions of the output, and size of the smallest valid box.
        frames: Number of consecutive mappings that are transformed equally: the frames of a clip, or 1 for images.

    Raises:
        ArgumentTypeError: If ``records`` is not one mapping per image, or a value does not have the type that its key requires.
        ArgumentError: If a value does not have the shape that its key requires.
        DeviceError: If a value is not on ``device``.
    """

    def __init__(
        self,
        records: Any,
        size: Size,
        image_layouts: Tensor | None,
        device: torch.device,
        boxes: BoxFormatName,
        conversions: TargetConversions = NO_CONVERSIONS,
        frames: int = 1,
    ) -> None:
        self._conversions = conversions
        self._frames = frames
        self._packed = records if isinstance(records, PackedTargets) else None
        self._records: Sequence[Mapping[str, Any]] = records if self._packed is None else self._packed.layout.records
        _check_sequence(self._records, size.batch)
        self._size, self._device = size, device
        self._source = (size.height, size.width) if image_layouts is None else image_layouts
        columns_by_key = columns(records) if self._packed is None else {}
        boxes_column = packed_annotations_of(self._packed, "boxes", "bbox") or annotations_of(columns_by_key, "boxes", "bbox")
        points_column = packed_annotations_of(self._packed, "keypoints") or annotations_of(columns_by_key, "keypoints")
        self._format = _checked_format(boxes_column, device, boxes)
        """Format of all input boxes."""
        _check_points(points_column, device)
        sides = sides_of(size)
        for annotations in (boxes_column, points_column):
            _check_canvases(annotations, size, sides)
        self._boxes, self._points = Rows(boxes_column), Rows(points_column)
        self._valid = _checked_flags(columns_by_key.get("valid"), self._boxes, device)
        """Values under the key ``valid`` by index of the image; empty if the dicts are packed."""
        masks = columns_by_key.get("masks") if self._packed is None else self._packed.values("masks")
        self.masks = MaskList(masks.values, list(masks.samples), size, device, sides, frames) if masks else None
        """Masks of all images; ``None`` if there are none."""
        self.valid_after_crop: Tensor | None = None
        """Mask of the boxes that are valid after a crop by boxes, (n,) bool; ``None`` without such a crop."""
        self._box_owners, self._point_owners = self._owners_on_device()

    @property
    def has_boxes(self) -> bool:
        """True if there are boxes."""
        return bool(self._boxes.samples)

    @property
    def has_points(self) -> bool:
        """True if there are boxes or keypoints."""
        return bool(self._boxes.samples or self._points.samples)

    def _owners_on_device(self) -> tuple[Tensor, Tensor]:
        """Return the owner of each box and of each keypoint, on the device.

        The same copy to the device also sets the owners of masks.
        """
        rows, points, masks = self._boxes, self._points, self.masks
        arrays = [
            owners_of(rows.samples, rows.counts) // self._frames,
            owners_of(points.samples, points.counts) // self._frames,
        ]
        if masks is None:
            box_owners, point_owners = to_device(arrays, self._device)
            return box_owners, point_owners
        # Usually every object has a box and a mask, so that boxes and masks have the same owners.
        are_equal = masks.samples == rows.samples and masks.counts == rows.counts
        arrays += [masks.spans] if are_equal else [masks.spans, owners_of(masks.samples, masks.counts) // self._frames]
        box_owners, point_owners, spans, *mask_owners = to_device(arrays, self._device)
        masks.set_device_arrays(box_owners if are_equal else mask_owners[0], spans)
        return box_owners, point_owners

    def boxes_at(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Transform all boxes by ``matrix``, (B, 3, 3) float32, which maps input to output pixel centres.

        Returns:
            (boxes, (n, 4) XYXY float32, with NaN for boxes that are not valid; owners, (n,)).
        """
        if not self._boxes.samples:
            return matrix.new_empty(0, 4), self._box_owners
        mapping = BoxMapping(self._format, TARGET_DICT_FORMATS["xyxy"], matrix, self._source, (1, 1), self._box_owners)
        corners, _ = dispatch.map_boxes(self._boxes.joined(), None, mapping, torch.float32)
        valid = self._joined_valid()
        return corners if valid is None else corners.masked_fill(~valid[:, None], torch.nan), self._box_owners

    def results(self, matrix: Tensor, out: tuple[int, int]) -> Any:
        """Return the dicts with transformed boxes, keypoints and masks.

        Args:
            matrix: Matrices that map input to output pixel centres, (B, 3, 3) float32.
            out: Height and width of the output images.

        Cost:
            Two launches for boxes, and two for keypoints, for any number of images.
        """
        box_format = self._format if self._conversions.boxes is None else TARGET_DICT_FORMATS[self._conversions.boxes]
        boxes = self._transformed_boxes(matrix, out, box_format) if self._boxes.samples else None
        points = None
        if self._points.samples:
            values = self._points.joined()
            mapping = BoxMapping(_POINTS, _POINTS, matrix, self._source, out, self._point_owners)
            points, _ = dispatch.map_boxes(values, None, mapping, floating_dtype(values.dtype))
        if self._packed is not None:
            return self._packed_results(self._packed, boxes, points, out)
        # For a dict: a copy, which is changed. For another mapping: only the changes.
        changes: list[dict[str, Any]] = [record.copy() if type(record) is dict else {} for record in self._records]
        if boxes is not None:
            rows = self._boxes
            box_parts = rows.split(boxes[0], out, self._conversions, self._conversions.boxes)
            valid_parts = split(boxes[1], rows.counts)
            for sample, key, part, valid_part in zip(rows.samples, rows.keys, box_parts, valid_parts, strict=True):
                change = changes[sample]
                change[key] = part
                change["valid"] = valid_part
        if points is not None:
            for sample, part in zip(self._points.samples, self._points.split(points, out, self._conversions), strict=True):
                changes[sample]["keypoints"] = part
        if self.masks is not None:
            for sample, part in zip(self.masks.samples, self.masks.results(self._conversions), strict=True):
                changes[sample]["masks"] = part
        if self._conversions.is_pure:
            for record, change in zip(self._records, changes, strict=True):
                for name, value in (change if type(record) is dict else {**record, **change}).items():
                    if type(value) not in HOLDS_NOTHING and type_name(value):
                        change[name] = value.as_subclass(Tensor)
        records = [
            change if type(record) is dict else batches.replace(record, change)
            for record, change in zip(self._records, changes, strict=True)
        ]
        return tuple(records) if isinstance(self._records, tuple) else records

    def _transformed_boxes(self, matrix: Tensor, out: tuple[int, int], box_format: BoxFormat) -> tuple[Tensor, Tensor]:
        """Return the transformed boxes, (n, 4) in ``box_format``, and the mask of the valid boxes, (n,) bool.

        Arguments as of ``results``.
        """
        values = self._boxes.joined()
        mapping = BoxMapping(self._format, box_format, matrix, self._source, out, self._box_owners, clip=True)
        result, valid = dispatch.map_boxes(values, self._joined_valid(), mapping, floating_dtype(values.dtype))
        assert valid is not None
        if self.valid_after_crop is not None:
            result = result * self.valid_after_crop[:, None]
            valid = valid & self.valid_after_crop
        if self._conversions.min_size > 1 or self._conversions.min_area > 1:
            valid = valid & _is_large(result, box_format, out, self._conversions)
        return result, valid

    def _packed_results(
        self, packed: PackedTargets, boxes: tuple[Tensor, Tensor] | None, points: Tensor | None, out: tuple[int, int]
    ) -> PackedTargets:
        """Return the dicts as ``PackedTargets``.

        Args:
            packed: The input.
            boxes: Transformed boxes and their mask ``valid``; ``None`` without boxes.
            points: Transformed keypoints; ``None`` without keypoints.
            out: Height and width of the output images.
        """
        changes: dict[Any, tuple[PackedColumn, Tensor]] = {}
        if boxes is not None:
            rows = self._boxes
            changes[rows.keys[0]] = rows.packed(boxes[0], out, self._conversions, self._conversions.boxes)
            changes["valid"] = PackedColumn("valid", rows.samples, rows.counts, None, Tensor, [{}]), boxes[1]
        if points is not None:
            changes["keypoints"] = self._points.packed(points, out, self._conversions)
        if self.masks is not None:
            changes["masks"] = self.masks.packed(self._conversions)
        if self._conversions.is_pure:
            for column, flat in zip(packed.layout.packed, packed.flat, strict=True):
                if column.tensor_type is not Tensor and column.name not in changes:
                    changes[column.name] = column.plain(), flat
        return packed.with_columns(changes)

    def _joined_valid(self) -> Tensor | None:
        """Return the mask of the input boxes that are valid, (n,) bool; ``None`` if no dict has ``valid``."""
        packed_valid = None if self._packed is None else self._packed.column("valid")
        if packed_valid is not None:
            return packed_valid.joined
        if not self._valid:
            return None
        if len(self._valid) == len(self._boxes.samples):
            return joined(list(self._valid.values()))
        parts = zip(self._boxes.samples, self._boxes.counts, strict=True)
        return torch.cat(
            [
                self._valid[sample] if sample in self._valid else torch.ones(count, dtype=torch.bool, device=self._device)
                for sample, count in parts
            ]
        )


def _is_large(boxes: Tensor, box_format: BoxFormat, frame: tuple[int, int], conversions: TargetConversions) -> Tensor:
    """Return the mask of the boxes that are large enough to be valid, (n,). ``frame``: height and width of the images."""
    widths, heights = (boxes[:, 2:] - boxes[:, :2] if box_format.layout == "corners" else boxes[:, 2:]).unbind(1)
    if box_format.share:
        widths, heights = widths * frame[1], heights * frame[0]
    return (torch.minimum(widths, heights) >= conversions.min_size) & (widths * heights >= conversions.min_area)


def _check_sequence(records: Any, batch: int) -> None:
    """Raise an error if ``records`` is not a list of ``batch`` dicts."""
    if isinstance(records, _NO_LISTS) or not isinstance(records, Sequence):
        raise ArgumentTypeError(
            f"targets must be a list of one dict for each image, got {type(records).__name__}. If boxes are padded to one "
            "number per image, pass the padded tensors as inputs with data keys: bbox_xyxy, valid."
        )
    if len(records) != batch:
        raise ArgumentError(
            f"targets must hold one dict for each of the {batch} images, got {len(records)}. Pass one dict per image."
        )
    for sample, record in enumerate(records):
        if type(record) is not dict and not isinstance(record, Mapping):
            raise ArgumentTypeError(
                f"targets of sample {sample} must be a dict, got {type(record).__name__}. "
                "Put all annotations of an image into one dict: {'boxes': …, 'labels': …}."
            )


def _are_on(tensors: TensorColumn, device: torch.device) -> bool:
    """Return whether all values of a column are tensors on the device."""
    return all(issubclass(cls, Tensor) for cls in tensors.types) and tensors.devices <= {device}


def _checked_format(annotations: Annotations, device: torch.device, default: str) -> BoxFormat:
    """Check boxes, and return the format, which all boxes must share.

    torchvision's boxes have an attribute with the format. Other boxes have COCO's format under the key ``bbox``, else
    ``default``.
    """
    if not annotations.samples:
        return TARGET_DICT_FORMATS[default]
    if _are_uniform(annotations, device):  # otherwise the loop below finds the sample with the error
        attributes = {} if annotations.tensors.types == {Tensor} else annotations.tensors.attributes[0]
        return TARGET_DICT_FORMATS[_format_name(annotations.samples[0], annotations.keys[0], attributes, default)]
    twice = next((sample for sample, following in pairwise(annotations.samples) if sample == following), None)
    if twice is not None:
        raise ArgumentError(f"targets of sample {twice} must hold boxes or bbox, got both. Leave one of them out.")
    box_format: BoxFormat | None = None
    first = -1  # index of the first sample with boxes
    for sample, key, value in annotations.items():
        _check_tensor(sample, key, value, device)
        name = _format_name(sample, key, vars(value), default)
        shape = value.shape
        if len(shape) != 2 or shape[1] != 4:
            raise ArgumentError(
                f"{key} of sample {sample} must be (n, 4), got {tuple(shape)}. For an image without boxes, pass "
                "torch.zeros(0, 4)."
            )
        if not shape[0]:  # without boxes the format does not matter
            continue
        if box_format is None:
            box_format = TARGET_DICT_FORMATS[name]
            first = sample
        elif box_format is not TARGET_DICT_FORMATS[name]:
            raise ArgumentError(
                f"{key} of sample {sample} must have the box format of sample {first}, got {name}. "
                "Convert all boxes to one format in the dataset."
            )
    return box_format or TARGET_DICT_FORMATS[default]


def _are_uniform(annotations: Annotations, device: torch.device) -> bool:
    """Return whether all boxes are (n, 4) on the device, under one key and with the same ``format`` and ``clamping_mode``."""
    if not _are_on(annotations.tensors, device) or len(set(annotations.keys)) > 1:
        return False
    if annotations.tensors.entry != (4,):
        return False
    if annotations.tensors.types == {Tensor}:
        return True
    attributes = annotations.tensors.attributes
    first = [attributes[0].get(name) for name in ("format", "clamping_mode")]
    return all([values.get("format"), values.get("clamping_mode")] == first for values in attributes)


def _format_name(sample: int, key: str, attributes: Mapping[str, Any], default: str) -> str:
    """Return the name of the format of the boxes of one image. ``attributes``: attributes of their tensor."""
    return _torchvision_format(attributes, sample) or ("xywh" if key == "bbox" else default)


def _check_points(annotations: Annotations, device: torch.device) -> None:
    """Raise an error if keypoints are not tensors (…, 2) or (…, 3) on the device, with one length of the last axis."""
    if _are_on(annotations.tensors, device):
        shapes = annotations.tensors.shapes
        if all(len(shape) > 1 and shape[-1] in (2, 3) for shape in shapes) and len({shape[-1] for shape in shapes}) < 2:
            return
    last_axis: int | None = None
    for sample, key, value in annotations.items():
        _check_tensor(sample, key, value, device)
        if value.ndim < 2 or value.shape[-1] not in (2, 3) or last_axis not in (None, value.shape[-1]):
            shape_text = "(n, K, 2) or (n, K, 3)" if last_axis is None else f"(n, K, {last_axis}), as in the samples before"
            raise ArgumentError(
                f"{key} of sample {sample} must be {shape_text}, got {tuple(value.shape)}. "
                "For an image without keypoints, pass torch.zeros(0, K, 3)."
            )
        last_axis = value.shape[-1]


def _check_canvases(annotations: Annotations, size: Size, sides: Sequence[tuple[int, int]]) -> None:
    """Raise an error if the ``canvas_size`` of torchvision's boxes or keypoints is not the size of their image."""
    types = annotations.tensors.types
    if types <= {Tensor} or not all(issubclass(cls, Tensor) for cls in types):
        return
    canvases = [attributes.get("canvas_size") for attributes in annotations.tensors.attributes]
    canvases = canvases * len(annotations.samples) if len(canvases) == 1 else canvases
    if canvases == sides:
        return
    for (sample, key, value), canvas in zip(annotations.items(), canvases, strict=True):
        if canvas is not None and canvas != sides[sample]:
            check_canvas(f"{key} of sample {sample}", value, size.sample(sample))


def _check_tensor(sample: int, key: str, value: Any, device: torch.device) -> None:
    """Raise an error if a value is not a tensor on the device."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(
            f"{key} of sample {sample} must be a tensor, got {type(value).__name__}. Convert it: torch.as_tensor(…)."
        )
    if value.device != device:
        raise DeviceError(
            f"{key} of sample {sample} must be on {device}, where the images are, got {value.device}. Move it to that device."
        )


def _torchvision_format(attributes: Mapping[str, Any], sample: int) -> str | None:
    """Return the name of the format of a ``tv_tensors.BoundingBoxes`` with these attributes; ``None`` for other tensors."""
    box_format = attributes.get("format")
    if box_format is None:
        return None
    if attributes.get("clamping_mode", "soft") is None:
        raise ArgumentError(
            f"clamping_mode of boxes of sample {sample} must be 'soft' or 'hard', got None. Boxes are always clipped to the "
            "image: leave clamping_mode out."
        )
    name = str(getattr(box_format, "value", box_format)).lower()
    if name not in TARGET_DICT_FORMATS:
        raise ArgumentError(
            f"boxes of sample {sample} must be axis-aligned, got {name.upper()}. Pass the boxes around their corners, "
            "(n, 4, 2): torch.cat((corners.amin(1), corners.amax(1)), 1)."
        )
    return name


def _checked_flags(column: Column | None, boxes: Rows, device: torch.device) -> dict[int, Tensor]:
    """Check the values under the key ``valid`` of the dicts that have boxes, and return the values by sample index."""
    if column is None:
        return {}
    flags = dict(zip(*column, strict=True))
    counts = {sample: count for sample, count in zip(boxes.samples, boxes.counts, strict=True) if sample in flags}
    values = [flags[sample] for sample in counts]
    tensors = TensorColumn(values)
    are_flags = _are_on(tensors, device) and tensors.dtypes <= {torch.bool}
    if not are_flags or tensors.shapes != [(count,) for count in counts.values()]:
        for sample, count in counts.items():
            _check_valid(flags[sample], sample, count, device)
    return dict(zip(counts, values, strict=True))


def _check_valid(value: Any, sample: int, count: int, device: torch.device) -> None:
    """Raise an error if ``valid`` of one dict is not (count,) bool on the device."""
    if not isinstance(value, Tensor) or value.dtype != torch.bool or tuple(value.shape) != (count,):
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(
            f"valid of sample {sample} must be one bool for each of its {count} boxes, got {got}. Leave valid out if "
            "all boxes are valid."
        )
    if value.device != device:
        raise DeviceError(f"valid of sample {sample} must be on {device}, got {value.device}. Move it to that device.")
