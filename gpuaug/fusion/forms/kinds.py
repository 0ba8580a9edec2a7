"""Targets in the form that passes transform, ``Points`` and ``Masks``: the values of all images in one tensor, with *owners*.

The owner of a box, point or mask is the index of its sample, an image or a clip. A *target dict* holds the annotations of one
image, such as ``{"boxes": …}``. A ``Slot`` checks the values under one key of all target dicts, packs them into ``Points`` or
``Masks``, and afterwards unpacks the results. ``valid`` is the mask of the boxes that are inside the image and large enough.
A *pass* is one kernel that reads and writes all images. A *plan* is a list of passes. The *parameter table*, (B, columns), has
the parameters of the ops of a plan per sample.
"""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.core.errors import ArgumentError, ArgumentTypeError
from gpuaug.core.targets import BOXES, MASKS, Column, FlatColumn, Kind, owners_of, split, with_class_of
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.readers import MaskLayout
from gpuaug.fusion.forms.call import Call
from gpuaug.fusion.forms.data_keys import advice_for_masks, check_canvas, check_device, refuse_boxes
from gpuaug.fusion.ops.base import Array, Size
from gpuaug.fusion.ops.boxes import (
    POINTS,
    TARGET_DICT_FORMATS,
    BoxFormat,
    BoxMapping,
    apply_matrices,
    are_large,
    floating_dtype,
    has_positive_area,
    vertices,
)
from gpuaug.fusion.ops.geometry import FieldOp
from gpuaug.fusion.ops.torchvision.target_conversions import TargetConversions
from gpuaug.fusion.program.plan import Canvases, Plan


@dataclass(eq=False)
class Points:
    """Boxes or keypoints."""

    values: Tensor
    """Boxes or points: (n, …) with ``owners``, any number per image; or (B, N, …), N per image."""
    format: BoxFormat
    """Format of ``values``, which the methods may change."""
    owners: InitVar[Array | None] = None
    """Owner of each box or point, (n,) on the host; ``None`` for (B, N, …)."""
    valid: Tensor | None = None
    """Mask of the boxes that are valid, (n,) or (B, N); ``None`` if all are."""
    clip: bool = False
    """Whether ``transform`` clips boxes to the output image, and computes ``valid``."""
    device_arrays: Sequence[Tensor] = ()
    """Copies of ``host_arrays`` on the device. The caller sets them before any other method is called."""
    min_visible: float = 0.0
    """With ``clip``, a box is valid only if at least this share of its area is inside the output image."""
    valid_after_crop: Tensor | None = None
    """Mask of the boxes that are valid after a crop by boxes, (n,) bool; ``None`` without such a crop."""

    def __post_init__(self, owners: Array | None) -> None:
        self.host_arrays = [] if owners is None else [owners]
        """``owners``, if there are owners."""
        self._dtype = floating_dtype(self.values.dtype)
        self._output_format = self.format  # of the user: methods change ``format``

    def _mapping(
        self, target: BoxFormat, matrix: Tensor, input_sizes: Any, out: tuple[int, int], *, clip: bool = False
    ) -> BoxMapping:
        """Return the arguments of ``map_boxes`` that map the values to format ``target``. See ``transform`` for the others."""
        if self.device_arrays:
            return BoxMapping(self.format, target, matrix, input_sizes, out, self.device_arrays[0], clip, self.min_visible)
        # The size of input images is not read: (B, N, …) are in pixels, not in shares of the image.
        return BoxMapping(self.format, target, matrix, (1, 1), out, clip=clip)

    def corners(self, matrix: Tensor, input_sizes: Any) -> tuple[Tensor, Tensor]:
        """Return (boxes mapped by ``matrix``, (n, 4) XYXY float32; owners, (n,) on the device). Invalid boxes are NaN.

        See ``transform`` for the arguments.
        """
        # (1, 1) stands for the output size, which is not read without ``clip`` for boxes in pixels. So in the next methods.
        mapping = self._mapping(TARGET_DICT_FORMATS["xyxy"], matrix, input_sizes, (1, 1))
        corners, _ = dispatch.map_boxes(self.values, None, mapping, torch.float32)
        if self.valid is not None:
            corners = corners.masked_fill(~self.valid[:, None], torch.nan)
        return corners, self.device_arrays[0]

    def replace_corners(self, matrix: Tensor, input_sizes: Any, box_rows: Tensor, corners: Tensor, valid: Tensor) -> None:
        """Transform the boxes by ``matrix``, except for m boxes whose corners in the output images are known.

        Args:
            matrix: See ``transform``, which is called with the identity after this method.
            input_sizes: See ``transform``.
            box_rows: (m,) indices of the m boxes in ``values``.
            corners: (m, 4) XYXY float32, corners of the m boxes.
            valid: (m,) bool, whether each of the m boxes is valid.
        """
        mapping = self._mapping(TARGET_DICT_FORMATS["xyxy"], matrix, input_sizes, (1, 1))
        mapped, _ = dispatch.map_boxes(self.values, None, mapping, torch.float32)
        valid_before = torch.ones(len(mapped), dtype=torch.bool, device=mapped.device) if self.valid is None else self.valid
        self.valid = valid_before.index_copy(0, box_rows, valid_before[box_rows] & valid)
        self.values = mapped.index_copy_(0, box_rows, corners)
        self.format = TARGET_DICT_FORMATS["xyxy"]

    def transform(self, matrix: Tensor, input_sizes: Any, out: tuple[int, int], conversions: TargetConversions) -> None:
        """Transform the values by the matrices of all passes, and with ``clip`` compute ``valid``.

        Args:
            matrix: Matrices that map input to output coordinates of pixel centres, (B, 3, 3) float32.
            input_sizes: (height, width) of the input images; or, if they differ in size, (B, 3 or 4): offset, height, width, ….
            out: (height, width) of the output images.
            conversions: Output format, and smallest width, height and area of a valid box. Read for boxes with owners only.
        """
        target = self._output_format
        has_owners = bool(self.device_arrays)
        if has_owners and self.clip and conversions.boxes is not None:
            target = TARGET_DICT_FORMATS[conversions.boxes]
        mapping = self._mapping(target, matrix, input_sizes, out, clip=self.clip)
        values, valid = dispatch.map_boxes(self.values, self.valid, mapping, self._dtype)
        if valid is not None and self.valid_after_crop is not None:
            values = values * self.valid_after_crop[:, None]  # boxes that are not valid become zeros
            valid = valid & self.valid_after_crop
        if valid is not None and has_owners and (conversions.min_size > 1 or conversions.min_area > 1):
            sides = values[:, 2:] - values[:, :2] if target.layout == "corners" else values[:, 2:]
            sides = torch.stack((sides[:, 0] * out[1], sides[:, 1] * out[0]), 1) if target.share else sides
            valid = valid & are_large(sides, conversions.min_size, conversions.min_area)
        self.values, self.valid = values, valid

    def displace(self, op: FieldOp, rows: Tensor, size: Size, matrix: Tensor, input_sizes: Any) -> None:
        """Transform the values by the matrices of the preceding plans, then by the displacement field of an op.

        Args:
            op: Op that moves each pixel by a field, such as an elastic transform.
            rows: Columns of the op in the parameter table, (B, row_width).
            size: Size of the images that the op reads.
            matrix: Matrices of the preceding plans. See ``transform``.
            input_sizes: See ``transform``.
        """
        are_boxes = self.format.layout != "points"
        if are_boxes and self.clip:
            has_area = has_positive_area(self.values, self.format)
            self.valid = has_area if self.valid is None else self.valid & has_area
        target = BoxFormat("vertices" if are_boxes else "points")
        values, _ = dispatch.map_boxes(self.values, None, self._mapping(target, matrix, input_sizes, (1, 1)), self._dtype)
        owners = self.device_arrays[0] if self.device_arrays else torch.arange(size.batch, device=rows.device)[:, None]
        moved = op.apply_to_points(values[..., :2], owners, rows, size, edges=self._output_format.edges)
        self.values = torch.cat((moved.to(self._dtype), values[..., 2:]), -1)
        self.format = target

    def apply(self, matrix: Tensor | None) -> None:
        """Transform the values by the matrices of the preceding plans, before a module of Kornia transforms them.

        ``matrix``: (B, 3, 3); ``None`` for the identity.
        """
        points = vertices(self.values, self.format)
        if self.format.layout != "points":
            if self.valid is not None:
                self.valid = self.valid & has_positive_area(self.values, self.format)
            self.format = BoxFormat("vertices")
        self.values = points if matrix is None else apply_matrices(points, matrix)


class Masks:
    """Masks of all images: one per image or frame, (B · T, C, H, W), or n masks with owners, any number per image.

    Args:
        values: (B · T, C, H, W); with ``owners`` (n, 1, H, W); or, if masks differ in size, a flat tensor.
        owners: Owner of each mask, (n,) on the host; ``None`` if there is one mask per image or frame.
        layouts: (offset in elements from the start of ``values``, height, width) of each mask, (n, 3); ``None`` if all masks
            have one size.
    """

    def __init__(self, values: Tensor, owners: Array | None = None, layouts: Array | None = None) -> None:
        self.values = values
        self.host_arrays = [array for array in (owners, layouts) if array is not None]
        """``owners`` and ``layouts``, as far as they are not ``None``."""
        self.device_arrays: Sequence[Tensor] = ()
        """Copies of ``host_arrays`` on the device. The caller sets them before it calls ``run``."""
        self._differ_in_size = layouts is not None

    def run(self, plan: Plan, table: Tensor, canvases: Canvases) -> None:
        """Run all masks through the passes of a plan.

        Args:
            plan: Plan for the images.
            table: Parameter table of the plan, (B, columns).
            canvases: Result of ``Plan.canvases``: if images differ in size, (height, width) of the output of each pass but the
                last.

        Cost:
            One launch per pass, and some for erasing. For masks with owners, one more launch copies the row of the parameter
            table for each mask, unless the plan has a single pass and images differ in size.
        """
        mask_rows: Tensor | None = None if self.device_arrays else table
        for index, pass_ in enumerate(plan.passes):
            canvas = canvases[index] if pass_.out.ragged else None
            if self._differ_in_size:
                if canvas is None or pass_.gather_ops:  # otherwise the pass moves no pixels
                    owners, layouts = self.device_arrays
                    self.values = dispatch.run_mask(pass_, self.values, table, MaskLayout(owners, layouts), canvas)
                    self._differ_in_size = False  # the output of a pass has one size for all masks
                continue
            mask_rows = table.index_select(0, self.device_arrays[0]) if mask_rows is None else mask_rows
            self.values = dispatch.run_mask(pass_, self.values, mask_rows, canvas=canvas)


def layouts_of_masks(counts: Sequence[int], sides: Sequence[tuple[int, int]]) -> Array:
    """Return (offset, height, width) of each mask, (n, 3), for masks that are consecutive in memory.

    Args:
        counts: Number of masks of each image.
        sides: (height, width) of these masks.
    """
    sides_of_masks = np.repeat(np.array(sides, np.int64).reshape(-1, 2), counts, 0)
    areas = sides_of_masks.prod(1)
    return np.column_stack((areas.cumsum() - areas, sides_of_masks))


@dataclass(eq=False)
class Slot:
    """Targets of one kind at one path of a container, such as the boxes of all target dicts.

    Raises:
        ArgumentTypeError: If a value is not a tensor.
        ArgumentError, DeviceError: If a tensor does not fit the images, or is on another device.
    """

    kind: Kind
    path: tuple[Any, ...]
    """Keys, field names and indices that lead to the targets in the container, without the index of the image."""
    column: Column
    """One value per image or frame that has such targets, and ``samples``, the indices of these images or frames."""
    call: Call
    per_frame: bool = False
    """Whether the samples of ``column`` are frames of clips."""
    valid_samples: Sequence[int] = ()
    """Samples, ascending, whose dict gets the key ``valid`` for these boxes. ``set_valid`` sets it."""

    def __post_init__(self) -> None:
        column, device = self.column, self.call.device
        if self.kind is not MASKS:  # masks are concatenated only after they are checked (``_masks``)
            column.join(device)
        for sample, value in zip(column.samples, column.values, strict=True) if not column.are_on(device) else ():
            if not isinstance(value, Tensor):
                advice = advice_for_masks(value) if self.kind is MASKS else "Convert it: torch.as_tensor(…)."
                raise ArgumentTypeError(f"{self._name(sample)} must be a tensor, got {type(value).__name__}. {advice}")
            check_device(self._name(sample), value, device)
        self.target: Points | Masks = self._masks() if self.kind is MASKS else self._points()
        """The targets in the form that passes transform."""

    @property
    def key(self) -> str:
        """Key of the targets in their dict if it is a key of the kind, else the usual key, such as ``boxes``; for messages."""
        return self.path[-1] if self.path and self.path[-1] in self.kind.keys else self.kind.name

    @property
    def valid(self) -> Tensor | None:
        """Mask of the boxes of all samples that are valid, (n,) bool; ``None`` for other kinds."""
        return getattr(self.target, "valid", None)

    def set_valid(self, flags: Column | None, samples: Sequence[int]) -> None:
        """Set the mask of the input boxes that are valid.

        Args:
            flags: Column of the input masks ``valid``; ``None`` if all boxes are valid.
            samples: Samples, ascending, whose ``valid`` belongs to these boxes, and not to other boxes in the same dict.
        """
        self.valid_samples = samples
        column, device = self.column, self.call.device
        if flags is None or set(flags.samples).isdisjoint(samples):
            return
        if flags.samples != column.samples or len(samples) < len(column.samples):
            # One mask per value of ``column``. All boxes are valid in samples that lack a mask, or are not in ``samples``.
            masks = {sample: mask for sample, mask in zip(flags.samples, flags.values, strict=True) if sample in samples}
            ones = torch.ones(max(self.counts), dtype=torch.bool, device=device)
            counts = zip(column.samples, self.counts, strict=True)
            flags = Column(column.samples, [masks[sample] if sample in masks else ones[:count] for sample, count in counts])
        if not flags.are_on(device) or flags.dtypes != {torch.bool} or flags.row_shape != () or flags.lengths != self.counts:
            self._check_flags(flags)
        assert isinstance(self.target, Points)
        self.target.valid = flags.joined

    def valid_parts(self) -> Sequence[Tensor]:
        """Return the mask of the valid boxes of each sample in ``valid_samples``."""
        assert self.valid is not None
        samples_and_masks = zip(self.column.samples, split(self.valid, self.counts), strict=True)
        samples = set(self.valid_samples)
        return [mask for sample, mask in samples_and_masks if sample in samples]

    def parts(self) -> Sequence[Tensor]:
        """Return the result for each value of ``column``, with its axes, dtype and class unless ``conversions`` change them."""
        column = self.column
        result = self.result()
        if len(column.types) == len(column.dtypes) == 1:
            return result.values
        parts = result.packed.parts(result.joined)
        if self.kind is not MASKS:
            parts = [part.to(floating_dtype(value.dtype)) for part, value in zip(parts, column.values, strict=True)]
        pairs = zip(parts, column.values, strict=True)
        return [with_class_of(part, value, **self._attributes(vars(value))) for part, value in pairs]

    def result(self) -> FlatColumn:
        """Return the results as a packed column."""
        column = self.column
        packed, values = column.packed, self.target.values
        if self.kind is MASKS:
            values = values[:, 0]
            packed = packed._replace(lengths=self.counts, shapes=None)
            if 2 in map(len, column.shapes):
                shapes = [torch.Size((*shape[:-2], *self.call.out)) for shape in column.shapes]
                packed = packed._replace(lengths=[shape.numel() for shape in shapes], shapes=shapes)
        elif column.row_shape is not None:
            values = values.view(sum(packed.lengths), *column.row_shape)
        values = values if packed.shapes is None else values.flatten()
        return FlatColumn(packed._replace(attributes=list(map(self._attributes, packed.attributes))), values)

    def _attributes(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Return the attributes of a result, such as ``canvas_size``. ``attributes``: of the input; empty if it is plain."""
        changes: dict[str, Any] = {"canvas_size": self.call.out}
        box_format = self.call.conversions.boxes
        if box_format is not None and "format" in attributes:
            changes["format"] = type(attributes["format"])[box_format.upper()]
        return {name: changes.get(name, value) for name, value in attributes.items()}

    def _name(self, sample: int, key: str = "") -> str:
        """Return the name of the targets of an image or frame for messages, such as "masks of sample 3"."""
        return f"{key or self.key} of {self.call.image_name(sample, per_frame=self.per_frame)}"

    def _owners(self) -> Array:
        """Return the index of the image or clip of each box, point or mask, (n,)."""
        owners = owners_of(self.column.samples, self.counts)
        return owners // self.call.size.images_per_sample if self.per_frame else owners

    def _points(self) -> Points:
        """Check boxes or keypoints, and return them as ``Points``."""
        box_format = self._checked_format() if self.kind is BOXES else self._checked_points()
        self.counts = self.column.lengths if self.kind is BOXES else [shape[:-1].numel() for shape in self.column.shapes]
        """Number of boxes, points or masks in each value of ``column``. Masks: see ``_masks``."""
        return Points(self.column.rows(), box_format, self._owners(), clip=self.kind is BOXES)

    def _checked_format(self) -> BoxFormat:
        """Check boxes, and return their format, which must be one for all boxes.

        It is torchvision's attribute ``format``; without it COCO's XYWH under the key ``bbox``, else ``boxes`` of ``fuse``.
        """
        column = self.column
        default = "xywh" if BOXES.keys.get(self.key) == "bbox_xywh" else self.call.boxes
        first_samples = self._checked_attributes(default)
        if column.row_shape != (4,):
            wrong = (pair for pair in zip(column.samples, column.shapes, strict=True) if len(pair[1]) != 2 or pair[1][1] != 4)
            sample, shape = next(wrong)
            raise ArgumentError(
                f"{self._name(sample)} must be (n, 4), got {tuple(shape)}. For an image without boxes, pass torch.zeros(0, 4)."
            )
        (name, first_sample), *other_formats = first_samples.items() or [(default, 0)]
        for other_name, sample in other_formats:
            raise ArgumentError(
                f"{self._name(sample)} must have the format of {self._name(first_sample)}, got {other_name}. "
                "Convert all boxes to one format in the dataset."
            )
        return TARGET_DICT_FORMATS[name]

    def _checked_points(self) -> BoxFormat:
        """Check that keypoints are (…, 2) or (…, 3), with one length of the last axis, and return their format."""
        self._checked_attributes()
        last_axis: int | None = None
        for sample, shape in zip(self.column.samples, self.column.shapes, strict=True):
            if len(shape) < 2 or shape[-1] not in (2, 3) or last_axis not in (None, shape[-1]):
                expected = "(n, K, 2) or (n, K, 3)" if last_axis is None else f"(n, K, {last_axis}), as in the samples before"
                raise ArgumentError(
                    f"{self._name(sample)} must be {expected}, got {tuple(shape)}. "
                    "For an image without keypoints, pass torch.zeros(0, K, 3)."
                )
            last_axis = shape[-1]
        return POINTS

    def _checked_attributes(self, default: str = "") -> dict[str, int]:
        """Check the attributes of torchvision's boxes or keypoints. If all tensors are alike, only up to the first with boxes.

        Returns:
            Name of each format of boxes → index of the first sample with boxes of this format. ``default``: name of the format
            of boxes without the attribute. Empty if all tensors are plain.
        """
        column = self.column
        if column.types <= {Tensor}:
            return {}
        first_samples: dict[tuple[Any, ...], int] = {}
        all_sides = self.call.sides(column.samples, per_frame=self.per_frame)
        are_alike = len(column.types) == len(column.packed.attributes) == len(set(all_sides)) == 1
        count = next((count for count, length in enumerate(column.lengths, 1) if are_alike and length), len(all_sides))
        entries = zip(column.samples, column.lengths, column.attributes, all_sides, strict=True)
        for sample, length, attributes, sides in islice(entries, count):
            if attributes.get("canvas_size", sides) != sides:
                check_canvas(self._name(sample), attributes["canvas_size"], sides)
            properties = attributes.get("format"), attributes.get("clamping_mode", "soft"), length != 0
            first_samples.setdefault(properties, sample)
        names: dict[str, int] = {}
        for (box_format, clamping_mode, has_boxes), sample in first_samples.items():
            name = default if box_format is None else str(getattr(box_format, "value", box_format)).lower()
            if box_format is not None and (clamping_mode is None or name not in TARGET_DICT_FORMATS):
                refuse_boxes(self._name(sample), clamping_mode, name)
            if has_boxes:
                names.setdefault(name, sample)
        return names

    def _check_flags(self, flags: Column) -> None:
        """Raise an error if a mask of valid boxes is not one bool for each box, on the device of the images."""
        for sample, count, value in zip(self.column.samples, self.counts, flags.values, strict=True):
            if not isinstance(value, Tensor) or value.dtype != torch.bool or tuple(value.shape) != (count,):
                got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ArgumentError(
                    f"{self._name(sample, 'valid')} must be one bool for each of its {count} boxes, got {got}. Leave valid out "
                    "if all boxes are valid."
                )
            check_device(self._name(sample, "valid"), value, self.call.device)

    def _masks(self) -> Masks:
        """Check masks, and return them as ``Masks``."""
        column = self.column
        sides = self.call.sides(column.samples, per_frame=self.per_frame)
        for sample, shape, image_sides in zip(column.samples, column.shapes, sides, strict=True):
            if len(shape) not in (2, 3):
                raise ArgumentError(
                    f"{self._name(sample)} must be (n, H, W) or (H, W), got {tuple(shape)}. "
                    "For an image without masks, pass torch.zeros(0, H, W)."
                )
            if (shape[-2], shape[-1]) != image_sides:
                raise ArgumentError(
                    f"{self._name(sample)} must have the size of their image, {image_sides[0]}x{image_sides[1]}, got "
                    f"{tuple(shape)}. Resize the masks to that size."
                )
        if len(column.dtypes) > 1:
            column = Column(column.samples, self._of_one_dtype())
        self.counts = [shape[0] if len(shape) == 3 else 1 for shape in column.shapes]
        owners = self._owners()
        if self.call.size.ragged:
            return Masks(column.elements, owners, layouts_of_masks(self.counts, sides))
        return Masks(column.elements.view(len(owners), 1, *sides[0]), owners)

    def _of_one_dtype(self) -> Sequence[Tensor]:
        """Return the tensors of masks with one dtype. Tensors without pixels may have another dtype, and are converted."""
        tensors = self.column.values
        first_filled = next((index for index, mask in enumerate(tensors) if mask.numel()), 0)
        dtype = tensors[first_filled].dtype
        for sample, mask in zip(self.column.samples, tensors, strict=True):
            if mask.dtype is not dtype and mask.numel():
                raise ArgumentTypeError(
                    f"{self._name(sample)} must be {dtype}, as {self._name(self.column.samples[first_filled])}, got "
                    f"{mask.dtype}. Convert all masks of a batch to one dtype."
                )
        return [mask.to(dtype) for mask in tensors]
