"""Slots: targets at one place of a container, such as the boxes of all target dicts, as a column of tensors.

A slot checks the tensors, packs them into a target of the record (``kinds.py``), and restores their form in the results. The
*owner* of a row is the index of its sample, an image or a clip. A mask *valid* says which boxes are inside the image and large
enough.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.core.errors import ArgumentError, ArgumentTypeError
from gpuaug.core.targets import (
    BOXES,
    MASKS,
    Kind,
    PackedColumn,
    TensorColumn,
    as_plain_tensors,
    common_row_shape,
    split,
    type_name,
    with_class_of,
)
from gpuaug.fusion.forms.kinds import POINTS, TARGET_DICT_FORMATS, Masks, Points, check_device, owners_of, spans_of
from gpuaug.fusion.ops.boxes import BoxFormat, floating_dtype

if TYPE_CHECKING:
    from gpuaug.fusion.forms.record import Record


class Slot:
    """Targets of one kind at one place of a container.

    Args:
        kind: Kind of the targets.
        key: Key of target dicts that the targets have, or would have, for messages.
        path: Place of the targets: keys, field names and indices, without the index of the image.
        column: The targets, with the index of the image or frame of each.
        record: Record of the call.
        per_frame: Whether the samples of ``column`` are frames of clips.
    """

    def __init__(
        self,
        kind: Kind,
        key: str,
        path: tuple[Any, ...],
        column: TensorColumn,
        record: "Record",
        *,
        per_frame: bool = False,
    ) -> None:
        self.kind, self.key, self.path, self.column, self.per_frame = kind, key, path, column, per_frame
        self._record = record
        self.flags: TensorColumn | None = None
        """Column of the masks of the input boxes that are valid; ``None`` without."""
        self.valid_samples: Sequence[int] = ()
        """Samples whose dict gets a mask of the boxes that are valid."""
        self.target: Points | Masks
        """The targets in one form, after ``pack``."""

    def pack(self) -> Points | Masks:
        """Check the targets, and return them in one form."""
        self._check_tensors(self.column, self.key)
        if self.kind is MASKS:
            self.target = self._masks()
            return self.target
        shapes = self.column.shapes
        box_format = self._checked_format() if self.kind is BOXES else self._checked_points()
        self._check_canvases()
        self._row_shape = common_row_shape(shapes)
        self._counts = [shape[0] if len(shape) == 2 else shape[:-1].numel() for shape in shapes]
        values = self._rows()
        owners = self._owners()
        self.target = Points(
            values, box_format, floating_dtype(values.dtype), owners, self._joined_valid(), clip=self.kind is BOXES
        )
        return self.target

    def parts(self) -> Sequence[Tensor]:
        """Return the results, with the axes, dtype and class of the inputs unless ``conversions`` change them."""
        column, values = self.column, self._result()
        if self.kind is MASKS:
            parts = split(values, self._counts)
            if any(axes == 2 for axes in map(len, column.shapes)):
                parts = [part[0] if len(shape) == 2 else part for part, shape in zip(parts, column.shapes, strict=True)]
        elif self._row_shape is not None:
            lengths = [shape[0] for shape in column.shapes]
            parts = split(values.view(sum(lengths), *self._row_shape), lengths)
        else:
            parts = [part.view(shape) for part, shape in zip(split(values, self._counts), column.shapes, strict=True)]
        if len(column.dtypes) > 1 and self.kind is not MASKS:
            parts = [part.to(floating_dtype(value.dtype)) for part, value in zip(parts, column.tensors, strict=True)]
        if column.types <= {Tensor}:
            return parts
        is_pure = self._record.conversions.is_pure
        return [
            part if is_pure and type_name(value) else with_class_of(part, value, **self._changes(vars(value)))
            for part, value in zip(parts, column.tensors, strict=True)
        ]

    def valid_parts(self) -> Sequence[Tensor]:
        """Return the mask of the valid boxes of each input tensor."""
        assert isinstance(self.target, Points)
        assert self.target.valid is not None
        return split(self.target.valid, self._counts)

    def packed(self) -> tuple[PackedColumn, Tensor]:
        """Return (description, concatenation) of the results. The inputs must be packed."""
        column, values = self.column.packed, self._result()
        assert column is not None
        if self.kind is MASKS:
            column = column._replace(lengths=self._counts, shapes=None)
        else:
            values = values.view(self.column.joined.shape)
        if column.tensor_type is Tensor or self._record.conversions.is_pure:
            return column.plain(), values
        attributes = [
            {**own, **{name: value for name, value in self._changes(own).items() if name in own}} for own in column.attributes
        ]
        return column._replace(attributes=attributes), values

    def _result(self) -> Tensor:
        """Return the rows of all results."""
        if self.kind is not MASKS:
            return self.target.values
        values, dtype = self.target.values[:, 0], self._record.conversions.masks
        return values if dtype is None else values.to(dtype)

    def _changes(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the new attributes of a tensor of torchvision's. ``attributes``: attributes of the input."""
        changes: dict[str, Any] = {"canvas_size": self._record.out}
        box_format, name = attributes.get("format"), self._record.conversions.boxes
        if name is not None and box_format is not None:
            changes["format"] = type(box_format)[name.upper()]
        return changes

    def _owners(self) -> Any:
        frames = self._record.size.frames if self.per_frame else 0
        owners = owners_of(self.column.samples, self._counts)
        return owners // frames if frames else owners

    def _rows(self) -> Tensor:
        """Return the boxes or points of all images, (n, 4), or (n, 2 or 3)."""
        dtypes = self.column.dtypes
        if self._row_shape is not None and len(dtypes) == 1:
            return self.column.joined.flatten(0, -2)
        # torch.cat would convert int64 beside float16 to float16, in which large coordinates are rounded.
        dtype = next(iter(dtypes)) if len(dtypes) == 1 else torch.float64 if torch.float64 in dtypes else torch.float32
        with as_plain_tensors():
            return torch.cat([value.to(dtype).flatten(0, -2) for value in self.column.tensors])

    def _check_tensors(self, column: TensorColumn, key: str) -> None:
        """Raise an error if a value is not a tensor on the device of the images."""
        device = self._record.device
        if column.are_on(device):
            return
        for sample, value in zip(column.samples, column.tensors, strict=True):
            if not isinstance(value, Tensor):
                advice = _way_to_masks(value) if self.kind is MASKS else "Convert it: torch.as_tensor(…)."
                raise ArgumentTypeError(f"{key} of sample {sample} must be a tensor, got {type(value).__name__}. {advice}")
            check_device(f"{key} of sample {sample}", value, device)

    def _checked_format(self) -> BoxFormat:
        """Check boxes, and return the format, which all boxes must share.

        torchvision's boxes have an attribute with the format. Other boxes have COCO's format under the key ``bbox``, else
        the format of ``fuse(…, boxes=…)``.
        """
        column, default = self.column, "xywh" if BOXES.keys.get(self.key) == "bbox_xywh" else self._record.boxes
        name, first = "", -1  # format, and index of the first sample with boxes
        for sample, shape, attributes in zip(column.samples, column.shapes, column.attributes, strict=True):
            own_name = _torchvision_format(attributes, sample) or default
            if len(shape) != 2 or shape[1] != 4:
                raise ArgumentError(
                    f"{self.key} of sample {sample} must be (n, 4), got {tuple(shape)}. For an image without boxes, pass "
                    "torch.zeros(0, 4)."
                )
            if shape[0] and not name:
                name, first = own_name, sample
            elif shape[0] and own_name != name:
                raise ArgumentError(
                    f"{self.key} of sample {sample} must have the box format of sample {first}, got {own_name}. "
                    "Convert all boxes to one format in the dataset."
                )
        return TARGET_DICT_FORMATS[name or default]

    def _checked_points(self) -> BoxFormat:
        """Check that keypoints are (…, 2) or (…, 3), with one length of the last axis, and return their format."""
        last_axis: int | None = None
        for sample, shape in zip(self.column.samples, self.column.shapes, strict=True):
            if len(shape) < 2 or shape[-1] not in (2, 3) or last_axis not in (None, shape[-1]):
                expected = "(n, K, 2) or (n, K, 3)" if last_axis is None else f"(n, K, {last_axis}), as in the samples before"
                raise ArgumentError(
                    f"{self.key} of sample {sample} must be {expected}, got {tuple(shape)}. "
                    "For an image without keypoints, pass torch.zeros(0, K, 3)."
                )
            last_axis = shape[-1]
        return POINTS

    def _check_canvases(self) -> None:
        """Raise an error if the ``canvas_size`` of torchvision's boxes or keypoints is not the size of their image."""
        if self.column.types <= {Tensor}:
            return
        sides = self._record.sides(per_frame=self.per_frame)
        for sample, attributes in zip(self.column.samples, self.column.attributes, strict=True):
            check_canvas(f"{self.key} of sample {sample}", attributes.get("canvas_size"), sides[sample])

    def _joined_valid(self) -> Tensor | None:
        """Return the mask of the input boxes that are valid, (n,) bool; ``None`` if no dict has one."""
        if self.flags is None:
            return None
        flags = dict(zip(self.flags.samples, self.flags.tensors, strict=True))
        if flags.keys().isdisjoint(self.column.samples):
            return None
        device, parts = self._record.device, []
        for sample, count in zip(self.column.samples, self._counts, strict=True):
            value = flags[sample] if sample in flags else torch.ones(count, dtype=torch.bool, device=device)
            if not isinstance(value, Tensor) or value.dtype != torch.bool or tuple(value.shape) != (count,):
                got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ArgumentError(
                    f"valid of sample {sample} must be one bool for each of its {count} boxes, got {got}. Leave valid out if "
                    "all boxes are valid."
                )
            check_device(f"valid of sample {sample}", value, device)
            parts.append(value)
        with as_plain_tensors():
            return torch.cat(parts)

    def _masks(self) -> Masks:
        """Check masks, and return them in one form."""
        column, sides = self.column, self._record.sides(per_frame=self.per_frame)
        shapes = column.shapes
        for sample, shape in zip(column.samples, shapes, strict=True):
            if len(shape) not in (2, 3):
                raise ArgumentError(
                    f"{self.key} of sample {sample} must be (n, H, W) or (H, W), got {tuple(shape)}. "
                    "For an image without masks, pass torch.zeros(0, H, W)."
                )
            if shape[-2:] != sides[sample]:
                height, width = sides[sample]
                raise ArgumentError(
                    f"{self.key} of sample {sample} must have the size of their image, {height}x{width}, got {tuple(shape)}. "
                    "Resize the masks to that size."
                )
        if len(column.dtypes) > 1:
            column = TensorColumn(column.samples, self._of_one_dtype())
        self._counts = [shape[0] if len(shape) == 3 else 1 for shape in shapes]
        owners = self._owners()
        if self._record.size.ragged:
            return Masks(column.elements, owners, spans_of(column.samples, self._counts, sides, self._record.size.batch))
        if all(len(shape) == 3 for shape in shapes) and (column.packed is None or column.packed.shapes is None):
            return Masks(column.joined[:, None], owners)
        height, width = sides[0]
        return Masks(column.elements.view(len(owners), 1, height, width), owners)

    def _of_one_dtype(self) -> Sequence[Tensor]:
        """Return masks of one dtype. Tensors without masks may have another dtype, and are converted."""
        tensors = self.column.tensors
        first = next((index for index, mask in enumerate(tensors) if mask.numel()), 0)
        dtype = tensors[first].dtype
        for sample, mask in zip(self.column.samples, tensors, strict=True):
            if mask.dtype is not dtype and mask.numel():
                raise ArgumentTypeError(
                    f"{self.key} of sample {sample} must be {dtype}, as in sample {self.column.samples[first]}, got "
                    f"{mask.dtype}. Convert all masks of a batch to one dtype."
                )
        return [mask.to(dtype) for mask in tensors]


def check_canvas(name: str, canvas: Any, sides: tuple[int, int]) -> None:
    """Raise an error if the ``canvas_size`` of torchvision's boxes or keypoints is not the size of their image.

    Raises:
        ArgumentError: If ``canvas``, unless it is ``None``, is not ``sides``, (height, width).
    """
    if canvas is not None and tuple(canvas) != sides:
        raise ArgumentError(
            f"canvas_size of {name} must be the size of the image, {sides}, got {tuple(canvas)}. Resize "
            "boxes with their image: pass both to the transform that resizes in the dataset."
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


def _way_to_masks(masks: Any) -> str:
    """Return the advice for masks of one image that are no tensor."""
    first = masks[0] if isinstance(masks, list | tuple) and masks else masks
    if isinstance(first, Tensor):
        return "Stack the masks of one image: torch.stack(masks)."
    if isinstance(first, np.ndarray):
        code = "masks" if first is masks else "np.stack(masks)"
        return f"Convert the masks in the dataset: torch.from_numpy({code})."
    if isinstance(first, Mapping | list | tuple):  # COCO's run lengths or polygons
        code = "[masks]" if first is masks else "masks"
        if not isinstance(first, Mapping) or not isinstance(first.get("counts"), str | bytes):
            code = f"mask.frPyObjects({code}, height, width)"
        return (
            "Decode run lengths and polygons in the dataset, with pycocotools.mask as mask: "
            f"torch.from_numpy(mask.decode({code})).movedim(2, 0)."
        )
    return "Return a tensor (n, H, W) from the dataset."
