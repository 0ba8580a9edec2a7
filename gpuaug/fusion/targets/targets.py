"""Inputs of one call: images, and the masks, boxes, keypoints and labels that follow the images."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from kornia.constants import DataKey, Resample
from torch import Tensor

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, DeviceError
from gpuaug.core.packed_targets import PackedTargets
from gpuaug.core.ragged import Ragged
from gpuaug.core.torchvision_types import type_name
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.readers import dtype_of, size_of
from gpuaug.fusion.clips import ClipForm
from gpuaug.fusion.ops.base import OpDraws, Size
from gpuaug.fusion.ops.boxes import FORMS, BoxMapping, check_form, composed, floating, has_extent, move, rank, vertices
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.mix import MixOp, SoftLabels
from gpuaug.fusion.ops.torchvision.ending import AS_THEY_CAME, Ending
from gpuaug.fusion.options import BoxForm
from gpuaug.fusion.pixels import converted
from gpuaug.fusion.program.plan import Canvases, OpPass, Plan
from gpuaug.fusion.targets.box_crop import crop_by_boxes, records_of
from gpuaug.fusion.targets.clips import ClipInputs
from gpuaug.fusion.targets.data_keys import BOXES, check, check_canvas, name_of
from gpuaug.fusion.targets.masks import MaskList, like, owners_of, to_device
from gpuaug.fusion.targets.packed import stay_packed
from gpuaug.fusion.targets.target_dicts import TargetDicts
from gpuaug.fusion.targets.typed import TypedTargets, holds_unnamed, joined_views


class Targets:
    """Inputs of one call while they run through the passes.

    Args:
        inputs: Inputs as the user passed them.
        keys: Data key per input: Kornia's names, ``targets`` for target dicts, ``valid`` for the (B, N) mask of padded boxes.
        extra_args: ``extra_args`` of Kornia's container, which may set the resampling of masks.
        boxes: Form of the boxes of target dicts.
        ending: Output types and thresholds of targets.
        form: Form in which the pipeline takes clips.

    Raises:
        ArgumentTypeError, DeviceError: If an input does not have the type that its key requires, or the device of the images.
        ArgumentError: If the inputs do not fit their keys or one another.
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        keys: Sequence[Any],
        extra_args: Any,
        boxes: BoxForm = "xyxy",
        ending: Ending = AS_THEY_CAME,
        form: ClipForm = ClipForm(),  # noqa: B008
    ) -> None:
        self._ending = ending
        self.keys = [name_of(key) for key in keys]
        self.passed_keys = self.keys
        """Data keys of the inputs as the user passed them. ``keys`` also has the data keys of targets recognized by type."""
        if len(inputs) != len(self.keys):
            raise ArgumentError(
                f"data_keys must name each input, got {len(self.keys)} for {len(inputs)} inputs. "
                "Name all: data_keys=['input', 'mask'], or in a stage on={0: 'input', 1: 'mask'}."
            )
        if "input" not in self.keys:
            raise ArgumentError(f"data_keys must contain 'input', got {self.keys}. Pass the images along.")
        for key, value in zip(self.keys, inputs, strict=True):
            check(key, value)
        images = inputs[self.keys.index("input")]
        self._clips = ClipInputs(form, images)
        inputs = [self._packed_or_unpacked(index, value) for index, value in enumerate(inputs)]
        self._unbatched = isinstance(images, Tensor) and images.ndim == 3
        images = images[None] if self._unbatched or self._clips.is_single else images
        self.device: torch.device = images.device
        self.size = form.size(images.shape) if isinstance(images, Tensor) and self._clips.frames else size_of(images)
        self.dtype = dtype_of(images)
        self.places = images.places[:: self.size.each] if isinstance(images, Ragged) else None
        """``Ragged.places`` of ragged images, or of the first frame of each clip."""
        self._typed: dict[int, TypedTargets] = {}
        """Targets recognized by type, by index of the input that contains them."""
        inputs = [self._clips.dicts(key, *item) for key, item in zip(self.keys, enumerate(inputs), strict=True)]
        inputs = self._spread(inputs)
        self._inputs = inputs
        for key, value in zip(self.keys, inputs, strict=True):
            self._check_size(key, value)
        inputs = [self._clips.flat(key, value) for key, value in zip(self.keys, inputs, strict=True)]
        images = inputs[self.keys.index("input")]
        self._missing: list[int | None] = []
        self._soft: SoftLabels | None = None
        self._softened_by: MixOp | None = None
        self.values: list[Any] = []
        self.has_masks = False
        """True if there are masks."""
        self.has_points = False
        """True if there are boxes or keypoints."""
        for key, value in zip(self.keys, inputs, strict=True):
            axis = self._missing_axis(key, value)
            converted_input = self._taken(key, value, boxes) if axis is None else value.unsqueeze(axis)
            if value is not images:
                self._check_fit(key, converted_input, value)
            self._missing.append(axis)
            self.values.append(converted_input)
            in_dicts = isinstance(converted_input, TargetDicts)
            self.has_masks |= key == "mask" or (in_dicts and converted_input.masks is not None)
            self.has_points |= key in FORMS or (in_dicts and converted_input.has_points)
        self._check_valid()
        self._forms = [FORMS.get(key) for key in self.keys]
        self._matrix: Tensor | None = None
        if (
            self.has_masks
            and extra_args
            and extra_args.get(DataKey.MASK, {}).get("resample", Resample.NEAREST) != Resample.NEAREST
        ):
            raise ArgumentError("extra_args must resample masks by nearest-neighbour, got another mode. Leave extra_args out.")

    def _packed_or_unpacked(self, index: int, value: Any) -> Any:
        """Return an input that ``TargetDicts`` takes packed, with the data key ``targets``; unpack other packed targets."""
        if not isinstance(value, PackedTargets):
            return value
        key = self.keys[index]
        if self._clips.frames or key not in ("targets", "tv_tensors") or not stay_packed(value, typed=key == "tv_tensors"):
            return value.unpacked()
        self.keys = [*self.keys[:index], "targets", *self.keys[index + 1 :]]
        return value

    def _spread(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs followed by the targets recognized in them by type. Appends the data keys of these to ``keys``."""
        spread = list(inputs)
        for index, (key, value) in enumerate(zip(self.keys, inputs, strict=True)):
            if key == "tv_tensors" or (key == "targets" and holds_unnamed(value)):
                batch = self.size.images if self._clips.is_per_frame(index) else self.size.batch
                self._typed[index] = typed = TypedTargets(value, batch, in_dicts=key == "targets")
                self.keys = [*self.keys, *(name for name, _ in typed.inputs)]
                spread += [values for _, values in typed.inputs]
        return spread

    def _gathered(self, values: list[Any]) -> list[Any]:
        """Return the results of the inputs as the user passed them. ``values``: results of the inputs of ``_spread``."""
        start = len(self.passed_keys)
        results = values[:start]
        for index, typed in self._typed.items():
            end = start + len(typed.inputs)
            dicts = results[index] if self.passed_keys[index] == "targets" else None
            results[index] = typed.results(values[start:end], dicts)
            start = end
        return results

    def _check_size(self, key: str, value: Any) -> None:
        """Raise an error if images differ in size from the first images, because all images share the draws."""
        if key != "input":
            return
        value = value[None] if isinstance(value, Tensor) and (self._unbatched or self._clips.is_single) else value
        form = self._clips.form
        size = form.size(value.shape) if isinstance(value, Tensor) and form.frames_of(value) else size_of(value)
        if size != self.size:
            raise ArgumentError(
                f"input must be of the same size as the first input, {self.size.shape}, got {size.shape}. Put images of "
                "each size through a stage of their own."
            )

    def _taken(self, key: str, value: Any, boxes: BoxForm) -> Any:
        if key == "targets":
            size = self.size
            per_frame = size.frames > 1 and isinstance(value, Sequence) and len(value) == size.images
            return TargetDicts(
                value,
                size.per_frame() if per_frame else size,
                self.places,
                self.device,
                boxes,
                self._ending,
                size.frames if per_frame else 1,
            )
        if key == "mask" and isinstance(value, list | tuple):
            if len(value) != self.size.batch:
                raise ArgumentError(
                    f"mask must hold masks for each of the {self.size.batch} images, got {len(value)}. Pass a batch of them."
                )
            masks = MaskList(value, range(len(value)), self.size, self.device)
            masks.take(*to_device([owners_of(masks.samples, masks.counts), masks.spans], self.device))
            return masks
        return value

    def _missing_axis(self, key: str, value: Any) -> int | None:
        # As in Kornia, a single image is a batch of one, and a mask without channels has one.
        if key in ("input", "mask") and isinstance(value, Tensor) and value.ndim == 3:
            return 0 if key == "input" or self._unbatched else 1
        if key in FORMS and value.ndim == 1 + rank(FORMS[key]) and self.size.batch == 1:
            return 0
        return 0 if key == "valid" and value.ndim == 1 and self.size.batch == 1 else None

    def _check_fit(self, key: str, value: Any, source: Any) -> None:
        if key == "class":
            self._check_no_map(value)
        if key in ("class", "targets", "tv_tensors") or isinstance(value, MaskList):
            return
        if key in FORMS:
            check_form(value, key)
            check_canvas(key, source, self.size.of(0))
        if value.device != self.device:
            raise DeviceError(f"{key} must be on {self.device}, where the images are, got {value.device}. Move it there first.")
        if len(value) != (self.size.images if key in ("input", "mask") else self.size.batch):
            raise ArgumentError(
                f"{key} must hold one entry for each of the {self.size.batch} images, got {tuple(source.shape)}. "
                "Pass a batch of them."
            )
        if key != "mask":
            return
        size = self.size
        fits = value.ndim == 4 and bool(np.all(size.height == value.shape[2]) and np.all(size.width == value.shape[3]))
        if size.ragged and not fits:
            raise ArgumentError(
                f"mask must be a list of one tensor for each image where these differ in size, got {tuple(value.shape)}. "
                "Leave them as they come: list(masks)."
            )
        if not fits:
            raise ArgumentError(
                f"mask must be of the images' size {size.shape}, got {tuple(value.shape)}. Resize it to theirs first."
            )

    def _check_no_map(self, labels: Any) -> None:
        if isinstance(labels, Tensor) and labels.ndim > 2 and tuple(labels.shape[-2:]) == self.size.shape[2:]:
            raise ArgumentError(
                f"class must be one index for each image or shares of the classes, got {tuple(labels.shape)}, one value for "
                "each pixel. Name the map 'mask': data_keys=['input', 'mask'], or in a stage on={0: 'input', 1: 'mask'}."
            )

    def _check_valid(self) -> None:
        if "valid" not in self.keys:
            return
        if self.keys.count("valid") > 1 or sum(key in BOXES for key in self.keys) != 1:
            raise ArgumentError(
                f"data_keys must hold one of {', '.join(BOXES)} where they hold 'valid', got {self.keys}. "
                "Name 'valid' once, for one tensor of boxes."
            )
        valid = self.values[self.keys.index("valid")]
        boxes = next(value for key, value in zip(self.keys, self.values, strict=True) if key in BOXES)
        if valid.dtype != torch.bool or valid.shape != boxes.shape[:2]:
            raise ArgumentError(
                f"valid must be one bool for each box, torch.bool {tuple(boxes.shape[:2])}, got {valid.dtype} "
                f"{tuple(valid.shape)}. Mark the boxes that are not padding: arange(N) < counts[:, None]."
            )

    def check_mix(self, op: MixOp) -> None:
        """Raise an error for inputs that cannot be mixed. Called before any pass.

        Raises:
            ArgumentError: If there are inputs other than images and labels.
            ArgumentTypeError: If labels are not a tensor.
            DeviceError: If labels are not on the device of the images.
        """
        others = [key for key in self.keys if key not in op.targets]
        if others:
            raise ArgumentError(
                f"data_keys must be among {', '.join(op.targets)} where {op.name} mixes images, got {', '.join(others)}. "
                "Mixing is not supported beside these: mix in the dataset, or leave the mix out."
            )
        self._check_labels()

    def soften(self, soft: SoftLabels, mixes: Sequence[MixOp]) -> None:
        """Convert labels to class probabilities: at once, or in the first of ``mixes``.

        Raises:
            ArgumentError: If labels are neither class indices nor class probabilities.
            ArgumentTypeError: If labels are not a tensor.
            DeviceError: If labels are not on the device of the images.
        """
        self._check_labels()
        for index, key in enumerate(self.keys):
            if key == "class":
                soft.check(self.values[index], self.size.batch)
                if not mixes:
                    self.values[index] = dispatch.run_labels(soft, self.values[index], None)
        self._soft = soft
        self._softened_by = mixes[0] if mixes else None

    def _check_labels(self) -> None:
        for key, value in zip(self.keys, self.values, strict=True):
            if key == "class" and not isinstance(value, Tensor):
                raise ArgumentTypeError(f"class must be a tensor, got {type(value).__name__}. Pass one index for each image.")
            if key == "class" and value.device != self.device:
                raise DeviceError(
                    f"class must be on {self.device}, where the images are, got {value.device}. Move it there first."
                )

    def _mixed(self, labels: Tensor, op: MixOp, rows: Tensor) -> Tensor:
        if self._soft is None:
            return op.labels(labels, rows)
        # After the first mix, labels are class probabilities, with smoothing applied.
        soft = self._soft if op is self._softened_by else replace(self._soft, smoothing=0.0)
        return dispatch.run_labels(soft, labels, rows)

    def run_plan(
        self,
        plan: Plan,
        table: Tensor,
        canvases: Canvases = (),
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        """Run all inputs through the passes of a plan. Boxes and keypoints are transformed once, in ``results``."""
        if self.has_points and plan.box_crop is not None:
            records = records_of(plan.box_crop.op, self.values, self.keys)
            table, self._matrix = crop_by_boxes(plan, plan.box_crop, table, records, self._matrix)
        elif self.has_points:
            self._matrix = composed(self._matrix, table[:, plan.width :].view(-1, 3, 3))
        self._clips.choose(plan.frames, self.values, self.keys, self._inputs)
        for index, key in enumerate(self.keys):
            value = self.values[index]
            if key == "input":
                self.values[index] = dispatch.run(plan, value, table, dtype, memory_format, canvases)
            elif isinstance(value, MaskList):
                value.run(plan, table, canvases)
            elif key == "mask":
                for position, step in enumerate(plan.passes):
                    value = dispatch.run_mask(step, value, table, canvas=canvases[position] if step.out.ragged else None)
                self.values[index] = value
            elif key == "targets":
                if value.masks is not None:
                    value.masks.run(plan, table, canvases)
            elif key == "class":
                for step in plan.passes:
                    if isinstance(step, OpPass) and isinstance(step.front, MixOp):
                        value = self._mixed(value, step.front, step.rows_of(table))
                self.values[index] = value

    def run_eager(
        self,
        op: EagerOp,
        drawn: OpDraws,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        """Run all inputs through a module that is not fused. ``dtype`` of output images; ``None``: the dtype that it returns.

        Raises:
            ArgumentError: If the module may move pixels, and an input has a type that its library does not support.
            Retyped: If the module returns images of another dtype than the pipeline was lowered for.
        """
        images_only = op.moves_nothing or op.package == "torchvision"  # torchvision gets only the images
        unsupported = [
            key
            for key, value in zip(self.keys, self.values, strict=True)
            if isinstance(value, TargetDicts | MaskList) or not op.moves(key)
        ]
        if unsupported and not op.moves_nothing:
            raise ArgumentError(
                f"{op.name} must be a module that fuse runs, or leave pixels where they are, for {unsupported[0]} to follow, "
                f"got one that is left to {op.package}: {op.reason}. Replace it, or keep it in the dataset."
            )
        indices = [
            index
            for index, key in enumerate(self.keys)
            if key == "input" or not (images_only or key in ("valid", "tv_tensors"))
        ]
        if not images_only:
            self._meet_images()
        results = op.run([self.values[index] for index in indices], [self.keys[index] for index in indices], drawn, self.device)
        for index, value in zip(indices, results, strict=True):
            if (
                self.keys[index] == "input"
            ):  # two calls, because to(dtype, memory_format) keeps the strides of a tensor that has the dtype already
                value = converted(value, dtype or value.dtype).contiguous(memory_format=memory_format)
            self.values[index] = value

    def _meet_images(self) -> None:
        """Apply the pending matrix to boxes and keypoints, so that Kornia can transform them further."""
        for index, form in enumerate(self._forms):
            if form is None:
                continue
            values = self.values[index]
            if self.keys[index] in BOXES:
                if "valid" in self.keys:
                    valid_index = self.keys.index("valid")
                    self.values[valid_index] = self.values[valid_index] & has_extent(values, form)
                self._forms[index] = FORMS["bbox"]
            points = vertices(values, form)
            self.values[index] = points if self._matrix is None else move(points, self._matrix)
        self._matrix = None

    def check_size(self, op: EagerOp, size: Size) -> None:
        """Raise an error if images do not have the size that the draws of the following modules assume.

        Raises:
            ArgumentError: If the images do not have ``size``.
        """
        shape = tuple(self.values[self.keys.index("input")].shape)
        if shape != (size.images, size.channels, size.height, size.width):
            raise ArgumentError(
                f"{op.name} must leave images of {(size.images, size.channels, size.height, size.width)}, as its draws say, "
                f"got {shape}. Put it into a stage of its own, and what follows it into another."
            )

    def results(self, *, keepdim: bool, views: int = 1) -> Any:
        """Return the outputs of a call, or of one of its views: the images alone if they were the only input, or a list."""
        values = list(self.values)
        if self.has_points or "targets" in self.keys:
            self._follow(values)
        for index, (key, axis, source) in enumerate(zip(self.keys, self._missing, self._inputs, strict=True)):
            result = values[index]
            if isinstance(result, MaskList):
                result = type(source)(result.results(self._ending))
            # As in Kornia, boxes and keypoints keep the shape of the input. Several views need the batch axis.
            elif axis is not None and (views == 1 or axis) and (keepdim or key in FORMS or key == "valid"):
                result = result.squeeze(axis)
            result = self._clips.deep(key, result, source)
            if self._clips.is_single and key == "input" and views == 1 and keepdim:
                result = result[0]
            values[index] = self._ended(key, result, source)
        values = self._gathered(values) if self._typed else values
        self._clips.lists(values)
        return values[0] if len(values) == 1 else values

    def _ended(self, key: str, result: Any, source: Any) -> Any:
        """Return images or masks in the torchvision type of the input, and masks in the dtype that ``ending`` requires."""
        if key not in ("input", "mask") or not isinstance(result, Tensor):
            return result
        result = result if key == "input" or self._ending.masks is None else result.to(self._ending.masks)
        return like(result, source) if type_name(source) and not self._ending.is_pure else result

    def _follow(self, values: list[Any]) -> None:
        """Transform boxes and keypoints by the matrix of the images, in place in ``values``."""
        matrix = self._matrix
        if matrix is None:
            matrix = torch.eye(3, dtype=torch.float32, device=self.device).expand(self.size.batch, 3, 3)
        height, width = values[self.keys.index("input")].shape[2:]
        out = int(height), int(width)
        for index, (key, form) in enumerate(zip(self.keys, self._forms, strict=True)):
            if key == "targets":
                values[index] = values[index].results(matrix, out)
            elif form is not None:
                valid_index = self.keys.index("valid") if "valid" in self.keys and key in BOXES else None
                way = BoxMapping(form, FORMS[key], matrix, (1, 1), out, clip=valid_index is not None)
                valid = None if valid_index is None else values[valid_index]
                transformed, kept = dispatch.map_boxes(values[index], valid, way, floating(self._inputs[index].dtype))
                values[index] = transformed
                if valid_index is not None:
                    values[valid_index] = kept


def joined(views: Sequence[Any], keys: Sequence[str], *, cut: bool) -> Any:
    """Concatenate the results of all views: the images, or a list in the order of the inputs.

    Args:
        views: Results per view.
        keys: Data key of each input.
        cut: Concatenate labels along axis 1 instead of axis 0.

    Raises:
        ArgumentError: If views differ in size, because different modules were picked for them.
    """
    images = views if len(keys) == 1 else [view[keys.index("input")] for view in views]
    sizes = list(dict.fromkeys("{}x{}".format(*image.shape[-2:]) for image in images))
    if len(sizes) > 1:
        raise ArgumentError(
            f"pipeline must give all views one size, got {' and '.join(sizes)}. Have every module that may be picked give one "
            "size, or resize behind them."
        )
    if len(keys) == 1:
        return like(torch.cat(tuple(views)), views[0])
    results: list[Any] = []
    for key, parts in zip(keys, zip(*views, strict=True), strict=True):
        if key == "tv_tensors":
            results.append(joined_views(parts, len(images[0])))
        elif isinstance(parts[0], Tensor):
            results.append(like(torch.cat(parts, 1 if cut and key == "class" else 0), parts[0]))
        else:
            results.append(type(parts[0])(element for part in parts for element in part))
    return results
