"""Target dicts: one dict of annotations per image, as detection models take them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.columns import Column, TensorColumn, columns, joined, plainly, split
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, DeviceError
from gpuaug.core.packed_targets import FlatColumn, PackedColumn, PackedTargets
from gpuaug.core.torchvision_types import HOLDS_NOTHING, type_name
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.boxes import BoxMapping, Form, floating
from gpuaug.fusion.ops.torchvision.ending import AS_THEY_CAME, Ending
from gpuaug.fusion.options import BoxForm
from gpuaug.fusion.targets.data_keys import check_canvas
from gpuaug.fusion.targets.masks import MaskList, like, owners_of, sides_of, to_device

TARGET_DICT_FORMS: dict[str, Form] = {
    "xyxy": Form("corners", edges=True),
    "xywh": Form("sides", edges=True),
    "cxcywh": Form("centre", edges=True),
    "cxcywh_share": Form("centre", edges=True, share=True),
}
"""Form of boxes for each name that ``fuse`` accepts. The first three are torchvision's format names in lower case."""

_POINTS = Form("points", edges=True)

_NO_LISTS = (str, Mapping, Tensor)


class _Annotations(NamedTuple):
    """Boxes or keypoints of a batch, in the order of the samples that have them."""

    samples: Sequence[int]
    keys: Sequence[str]
    tensors: TensorColumn
    """Column of the values. Only its ``types`` can be read unless all values are tensors."""

    def items(self) -> "zip[tuple[int, str, Any]]":
        """Return an iterator of (sample index, key, value)."""
        return zip(self.samples, self.keys, self.tensors.tensors, strict=True)


class _Rows:
    """Boxes or keypoints as one tensor of rows, and the number of rows per sample."""

    def __init__(self, annotations: _Annotations) -> None:
        self.samples, self.keys, self._tensors = annotations
        column = self._tensors
        if isinstance(column, FlatColumn):
            self.counts = [length * column.rows_per_entry for length in column.packed.lengths]
        else:
            self.counts = [shape[0] if len(shape) == 2 else shape[:-1].numel() for shape in column.shapes]

    def joined(self) -> Tensor:
        if self._tensors.entry is not None:
            return self._tensors.joined.flatten(0, -2)
        with plainly():
            return torch.cat([value.flatten(0, -2) for value in self._tensors.tensors])

    def split(self, joined_rows: Tensor, frame: tuple[int, int], ending: Ending, form: str | None = None) -> Sequence[Tensor]:
        """Split rows by sample, and restore the shape, dtype and subclass of the inputs. Integer inputs become floating-point.

        Args:
            joined_rows: Rows of all samples.
            frame: Height and width of the images, in pixels.
            ending: Output types; torchvision's tensors become plain tensors if ``ending.is_pure``.
            form: Name of the output form of boxes; ``None``: the form of the inputs.
        """
        shapes, entry = self._tensors.shapes, self._tensors.entry
        if entry is not None:
            lengths = [shape[0] for shape in shapes]
            parts = split(joined_rows.view(sum(lengths), *entry), lengths)
        else:
            rows = split(joined_rows, self.counts)
            parts = [part.view(shape) for part, shape in zip(rows, shapes, strict=True)]
        values = self._tensors.tensors
        if len(self._tensors.dtypes) > 1:
            parts = [part.to(floating(value.dtype)) for part, value in zip(parts, values, strict=True)]
        if self._tensors.types <= {Tensor} or (ending.is_pure and all(map(type_name, values))):
            return parts
        return [
            like(part, value, canvas_size=frame, **_named_format(vars(value), form))
            for part, value in zip(parts, values, strict=True)
        ]

    def packed(
        self, rows: Tensor, frame: tuple[int, int], ending: Ending, form: str | None = None
    ) -> tuple[PackedColumn, Tensor]:
        """Return rows as a packed column, in the shape and class of the packed inputs. Arguments: as of ``split``."""
        column = self._tensors
        assert isinstance(column, FlatColumn)
        flat = rows.view(column.joined.shape)
        if column.packed.tensor_type is Tensor or ending.is_pure:
            return column.packed.plain(), flat
        attributes = [{**of_tensor, "canvas_size": frame, **_named_format(of_tensor, form)} for of_tensor in column.attributes]
        return column.packed._replace(attributes=attributes), flat


class TargetDicts:
    """Target dicts of a batch while the images run through the passes.

    Args:
        records: One mapping per image, or these as ``PackedTargets`` for which ``stay_packed`` returns true.
        size: Size of the images.
        places: ``Ragged.places`` of images, or of the first frame of each clip, if they differ in size; else ``None``.
        device: Device of the images.
        boxes: Form of plain tensors under the key ``boxes``. ``bbox`` always has COCO's form: corner, width, height.
        ending: Output types and thresholds.
        frames: Number of mappings per row of the parameter table: the frames of a clip, or 1.

    Raises:
        ArgumentTypeError: If ``records`` is not one mapping per image, or a value does not have the type that its key requires.
        ArgumentError: If a value does not have the shape that its key requires.
        DeviceError: If a value is not on ``device``.
    """

    def __init__(
        self,
        records: Any,
        size: Size,
        places: Tensor | None,
        device: torch.device,
        boxes: BoxForm,
        ending: Ending = AS_THEY_CAME,
        frames: int = 1,
    ) -> None:
        self._ending = ending
        self._frames = frames
        self._packed = records if isinstance(records, PackedTargets) else None
        self._records: Sequence[Mapping[str, Any]] = records if self._packed is None else self._packed.layout.records
        _check_sequence(self._records, size.batch)
        self._size, self._device = size, device
        self._source = (size.height, size.width) if places is None else places
        of_keys = columns(records) if self._packed is None else {}
        boxes_column = _packed_annotations(self._packed, "boxes", "bbox") or _annotations(of_keys, "boxes", "bbox")
        points_column = _packed_annotations(self._packed, "keypoints") or _annotations(of_keys, "keypoints")
        self._form = _checked_form(boxes_column, device, boxes)
        _check_points(points_column, device)
        sides = sides_of(size)
        for annotations in (boxes_column, points_column):
            _check_canvases(annotations, size, sides)
        self._boxes, self._points = _Rows(boxes_column), _Rows(points_column)
        self._valid = _checked_flags(of_keys.get("valid"), self._boxes, device)
        masks = of_keys.get("masks") if self._packed is None else self._packed.values("masks")
        self.masks = MaskList(masks.values, list(masks.samples), size, device, sides, frames) if masks else None
        """Masks of all samples; ``None`` if there are none."""
        self.kept: Tensor | None = None
        """(n,) mask of the boxes that a crop by boxes keeps."""
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
        """Return the sample index of each box and each keypoint, on the device. The same copy sets the indices of ``masks``."""
        rows, points, masks = self._boxes, self._points, self.masks
        arrays = [
            owners_of(rows.samples, rows.counts) // self._frames,
            owners_of(points.samples, points.counts) // self._frames,
        ]
        if masks is None:
            of_boxes, of_points = to_device(arrays, self._device)
            return of_boxes, of_points
        # Usually every object has a box and a mask.
        alike = masks.samples == rows.samples and masks.counts == rows.counts
        arrays += [masks.spans] if alike else [masks.spans, owners_of(masks.samples, masks.counts) // self._frames]
        of_boxes, of_points, spans, *of_masks = to_device(arrays, self._device)
        masks.take(of_boxes if alike else of_masks[0], spans)
        return of_boxes, of_points

    def boxes_at(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Transform all boxes by a matrix. ``matrix``: as for ``results``.

        Returns:
            (n, 4) float32 corners, NaN for boxes that are not valid, and (n,) sample index of each box.
        """
        if not self._boxes.samples:
            return matrix.new_empty(0, 4), self._box_owners
        mapping = BoxMapping(self._form, TARGET_DICT_FORMS["xyxy"], matrix, self._source, (1, 1), self._box_owners)
        corners, _ = dispatch.map_boxes(self._boxes.joined(), None, mapping, torch.float32)
        valid = self._joined_valid()
        return corners if valid is None else corners.masked_fill(~valid[:, None], torch.nan), self._box_owners

    def results(self, matrix: Tensor, out: tuple[int, int]) -> Any:
        """Return the dicts with boxes, keypoints and masks replaced by their transformed versions.

        Args:
            matrix: (B, 3, 3) float32, maps input to output pixel centres.
            out: Height and width of the output images.

        Cost:
            Two launches for boxes, and two for keypoints, for any number of images.
        """
        form = self._form if self._ending.boxes is None else TARGET_DICT_FORMS[self._ending.boxes]
        boxes = self._transformed_boxes(matrix, out, form) if self._boxes.samples else None
        points = None
        if self._points.samples:
            values = self._points.joined()
            mapping = BoxMapping(_POINTS, _POINTS, matrix, self._source, out, self._point_owners)
            points, _ = dispatch.map_boxes(values, None, mapping, floating(values.dtype))
        if self._packed is not None:
            return self._packed_results(self._packed, boxes, points, out)
        # For a dict: a copy, which is changed. For another mapping: only the changes.
        changes: list[dict[str, Any]] = [record.copy() if type(record) is dict else {} for record in self._records]
        if boxes is not None:
            rows = self._boxes
            parts = rows.split(boxes[0], out, self._ending, self._ending.boxes), split(boxes[1], rows.counts)
            for sample, key, part, valid_part in zip(rows.samples, rows.keys, *parts, strict=True):
                change = changes[sample]
                change[key] = part
                change["valid"] = valid_part
        if points is not None:
            for sample, part in zip(self._points.samples, self._points.split(points, out, self._ending), strict=True):
                changes[sample]["keypoints"] = part
        if self.masks is not None:
            for sample, part in zip(self.masks.samples, self.masks.results(self._ending), strict=True):
                changes[sample]["masks"] = part
        if self._ending.is_pure:
            for record, change in zip(self._records, changes, strict=True):
                for name, value in (change if type(record) is dict else {**record, **change}).items():
                    if type(value) not in HOLDS_NOTHING and type_name(value):
                        change[name] = value.as_subclass(Tensor)
        records = [
            change if type(record) is dict else batches.replace(record, change)
            for record, change in zip(self._records, changes, strict=True)
        ]
        return tuple(records) if isinstance(self._records, tuple) else records

    def _transformed_boxes(self, matrix: Tensor, out: tuple[int, int], form: Form) -> tuple[Tensor, Tensor]:
        """Return (n, 4) boxes in ``form``, and the (n,) mask of the valid ones. Arguments: as of ``results``."""
        values = self._boxes.joined()
        mapping = BoxMapping(self._form, form, matrix, self._source, out, self._box_owners, clip=True)
        result, valid = dispatch.map_boxes(values, self._joined_valid(), mapping, floating(values.dtype))
        assert valid is not None
        if self.kept is not None:
            result = result * self.kept[:, None]
            valid = valid & self.kept
        if self._ending.min_size > 1 or self._ending.min_area > 1:
            valid = valid & _is_large(result, form, out, self._ending)
        return result, valid

    def _packed_results(
        self, packed: PackedTargets, boxes: tuple[Tensor, Tensor] | None, points: Tensor | None, out: tuple[int, int]
    ) -> PackedTargets:
        """Return the dicts as ``PackedTargets``.

        Args:
            packed: The input.
            boxes: Boxes and the mask of the valid ones; ``None`` without boxes.
            points: Keypoints; ``None`` without keypoints.
            out: Height and width of the output images.
        """
        changed: dict[Any, tuple[PackedColumn, Tensor]] = {}
        if boxes is not None:
            rows = self._boxes
            changed[rows.keys[0]] = rows.packed(boxes[0], out, self._ending, self._ending.boxes)
            changed["valid"] = PackedColumn("valid", rows.samples, rows.counts, None, Tensor, [{}]), boxes[1]
        if points is not None:
            changed["keypoints"] = self._points.packed(points, out, self._ending)
        if self.masks is not None:
            changed["masks"] = self.masks.packed(self._ending)
        if self._ending.is_pure:
            for column, flat in zip(packed.layout.packed, packed.flat, strict=True):
                if column.tensor_type is not Tensor and column.name not in changed:
                    changed[column.name] = column.plain(), flat
        return packed.with_columns(changed)

    def _joined_valid(self) -> Tensor | None:
        """Return the (n,) mask of the valid input boxes; ``None`` if no sample has ``valid``."""
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


def _named_format(attributes: Mapping[str, Any], form: str | None) -> dict[str, Any]:
    """Return the attribute ``format`` for ``form``, if a tensor has this attribute and ``form`` is not ``None``."""
    box_format = attributes.get("format")
    return {} if form is None or box_format is None else {"format": type(box_format)[form.upper()]}


def _is_large(boxes: Tensor, form: Form, frame: tuple[int, int], ending: Ending) -> Tensor:
    """Return the (n,) mask of the boxes that are large enough to be valid. ``frame``: height and width of the images."""
    widths, heights = (boxes[:, 2:] - boxes[:, :2] if form.layout == "corners" else boxes[:, 2:]).unbind(1)
    if form.share:
        widths, heights = widths * frame[1], heights * frame[0]
    return (torch.minimum(widths, heights) >= ending.min_size) & (widths * heights >= ending.min_area)


def _check_sequence(records: Any, batch: int) -> None:
    if isinstance(records, _NO_LISTS) or not isinstance(records, Sequence):
        raise ArgumentTypeError(
            f"targets must be a list of one dict for each image, got {type(records).__name__}. Where boxes are padded to one "
            "number, name each of their tensors by a data key: bbox_xyxy, valid."
        )
    if len(records) != batch:
        raise ArgumentError(
            f"targets must hold one dict for each of the {batch} images, got {len(records)}. Pass a batch of them."
        )
    for sample, record in enumerate(records):
        if type(record) is not dict and not isinstance(record, Mapping):
            raise ArgumentTypeError(
                f"targets of sample {sample} must be a dict, got {type(record).__name__}. "
                "Put all annotations of an image into one: {'boxes': …, 'labels': …}."
            )


def _annotations(of_keys: Mapping[str, Column], *keys: str) -> _Annotations:
    """Return the values under ``keys``, which all name boxes, or all keypoints."""
    named = [(key, of_keys[key]) for key in keys if key in of_keys]
    if len(named) == 1:
        ((key, column),) = named
        return _Annotations(list(column.samples), [key] * len(column.values), TensorColumn(column.values))
    # Sorted by sample alone: the sort is stable, so the keys of a sample keep their order.
    rows = sorted(
        ((sample, key, value) for key, column in named for sample, value in zip(*column, strict=True)), key=lambda row: row[0]
    )
    return _Annotations([row[0] for row in rows], [row[1] for row in rows], TensorColumn([row[2] for row in rows]))


def _packed_annotations(packed: PackedTargets | None, *keys: str) -> _Annotations | None:
    """Return the packed values under the key of ``keys`` that there is; ``None`` without such a key."""
    columns_of = [] if packed is None else [(key, packed.column(key)) for key in keys]
    annotations = [_Annotations(of.packed.samples, [key] * len(of.packed.lengths), of) for key, of in columns_of if of]
    return annotations[0] if annotations else None


def _are_on(tensors: TensorColumn, device: torch.device) -> bool:
    """Return whether all values of a column are tensors on the device."""
    return all(issubclass(cls, Tensor) for cls in tensors.types) and tensors.devices <= {device}


def _checked_form(annotations: _Annotations, device: torch.device, default: str) -> Form:
    """Return the form of all boxes: given by their type, else by their key, else ``default``."""
    if not annotations.samples:
        return TARGET_DICT_FORMS[default]
    if _are_alike(annotations, device):  # otherwise the loop finds the sample to report
        attributes = {} if annotations.tensors.types == {Tensor} else annotations.tensors.attributes[0]
        return TARGET_DICT_FORMS[_form_named(annotations.samples[0], annotations.keys[0], attributes, default)]
    form: Form | None = None
    first = last = -1
    for sample, key, value in annotations.items():
        _check_tensor(sample, key, value, device)
        named = _form_named(sample, key, vars(value), default)
        shape = value.shape
        if len(shape) != 2 or shape[1] != 4:
            raise ArgumentError(
                f"{key} of sample {sample} must be (n, 4), got {tuple(shape)}. Where an image has none: torch.zeros(0, 4)."
            )
        if sample == last:
            raise ArgumentError(f"targets of sample {sample} must hold boxes or bbox, got both. Leave one of them out.")
        last = sample
        if not shape[0]:  # an empty tensor fits every form
            continue
        if form is None:
            form = TARGET_DICT_FORMS[named]
            first = sample
        elif form is not TARGET_DICT_FORMS[named]:
            raise ArgumentError(
                f"{key} of sample {sample} must be of the form of those of sample {first}, got {named}. "
                "Convert them before they are put into a batch."
            )
    return form or TARGET_DICT_FORMS[default]


def _are_alike(annotations: _Annotations, device: torch.device) -> bool:
    """Return whether all boxes are (n, 4) on the device, under one key and with the same ``format`` and ``clamping_mode``."""
    if not _are_on(annotations.tensors, device) or len(set(annotations.keys)) > 1:
        return False
    if annotations.tensors.entry != (4,):
        return False
    if annotations.tensors.types == {Tensor}:
        return True
    attributes = annotations.tensors.attributes
    first = [attributes[0].get(name) for name in ("format", "clamping_mode")]
    return all([of_value.get("format"), of_value.get("clamping_mode")] == first for of_value in attributes)


def _form_named(sample: int, key: str, attributes: Mapping[str, Any], default: str) -> str:
    """Return the name of the form of the boxes of one sample. ``attributes``: those of their tensor."""
    return _form_of(attributes, sample) or ("xywh" if key == "bbox" else default)


def _check_points(annotations: _Annotations, device: torch.device) -> None:
    if _are_on(annotations.tensors, device):
        known_shapes = annotations.tensors.shapes
        if all(len(shape) > 1 and shape[-1] in (2, 3) for shape in known_shapes) and len({s[-1] for s in known_shapes}) < 2:
            return
    last_axis: int | None = None
    for sample, key, value in annotations.items():
        _check_tensor(sample, key, value, device)
        if value.ndim < 2 or value.shape[-1] not in (2, 3) or last_axis not in (None, value.shape[-1]):
            wanted = "(n, K, 2) or (n, K, 3)" if last_axis is None else f"(n, K, {last_axis}), as those before it"
            raise ArgumentError(
                f"{key} of sample {sample} must be {wanted}, got {tuple(value.shape)}. "
                "Where an image has none: torch.zeros(0, K, 3)."
            )
        last_axis = value.shape[-1]


def _check_canvases(annotations: _Annotations, size: Size, sides: Sequence[tuple[int, int]]) -> None:
    types = annotations.tensors.types
    if types <= {Tensor} or not all(issubclass(cls, Tensor) for cls in types):
        return
    canvases = [attributes.get("canvas_size") for attributes in annotations.tensors.attributes]
    canvases = canvases * len(annotations.samples) if len(canvases) == 1 else canvases
    if canvases == sides:
        return
    for (sample, key, value), canvas in zip(annotations.items(), canvases, strict=True):
        if canvas is not None and canvas != sides[sample]:
            check_canvas(f"{key} of sample {sample}", value, size.of(sample))


def _check_tensor(sample: int, key: str, value: Any, device: torch.device) -> None:
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(
            f"{key} of sample {sample} must be a tensor, got {type(value).__name__}. Make one of it: torch.as_tensor(…)."
        )
    if value.device != device:
        raise DeviceError(
            f"{key} of sample {sample} must be on {device}, where the images are, got {value.device}. Move it there first."
        )


def _form_of(attributes: Mapping[str, Any], sample: int) -> str | None:
    """Return the name of the form of a torchvision ``BoundingBoxes`` with these attributes; ``None`` for other tensors."""
    box_format = attributes.get("format")
    if box_format is None:
        return None
    if attributes.get("clamping_mode", "soft") is None:
        raise ArgumentError(
            f"clamping_mode of boxes of sample {sample} must be 'soft' or 'hard', got None. Boxes end at the frame here: "
            "leave it out."
        )
    name = str(getattr(box_format, "value", box_format)).lower()
    if name not in TARGET_DICT_FORMS:
        raise ArgumentError(
            f"boxes of sample {sample} must be upright, got {name.upper()}. Pass the boxes around their corners, (n, 4, 2): "
            "torch.cat((corners.amin(1), corners.amax(1)), 1)."
        )
    return name


def _checked_flags(column: Column | None, boxes: _Rows, device: torch.device) -> dict[int, Tensor]:
    """Check ``valid`` of the samples that have boxes, and return it by sample index."""
    if column is None:
        return {}
    flags = dict(zip(*column, strict=True))
    counts = {sample: count for sample, count in zip(boxes.samples, boxes.counts, strict=True) if sample in flags}
    values = [flags[sample] for sample in counts]
    tensors = TensorColumn(values)
    fit = _are_on(tensors, device) and tensors.dtypes <= {torch.bool}
    if not fit or tensors.shapes != [(count,) for count in counts.values()]:
        for sample, count in counts.items():
            _check_valid(flags[sample], sample, count, device)
    return dict(zip(counts, values, strict=True))


def _check_valid(value: Any, sample: int, count: int, device: torch.device) -> None:
    if not isinstance(value, Tensor) or value.dtype != torch.bool or tuple(value.shape) != (count,):
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(
            f"valid of sample {sample} must be one bool for each of its {count} boxes, got {got}. Leave it out if all are."
        )
    if value.device != device:
        raise DeviceError(f"valid of sample {sample} must be on {device}, got {value.device}. Move it there first.")
