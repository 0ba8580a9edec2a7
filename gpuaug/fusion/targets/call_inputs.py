"""Inputs of one call: images, and *targets*: masks, boxes, keypoints and labels that are transformed together with the images.

A *data key* says what an input holds, such as ``"input"`` for images. A *plan* is a list of *passes*, that is, kernels that
read and write all images. The *parameter table* holds one row of numbers per sample, from which the passes read the parameters
of the ops. A *target dict* holds the annotations of one image, such as ``{"boxes": …}``; target dicts are *packed* if the
values of all images under one key are one tensor. *Ragged* images differ in size. A *mix* blends images of a batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, DeviceError
from gpuaug.core.packed_targets import PackedTargets
from gpuaug.core.ragged import Ragged
from gpuaug.core.torchvision_types import type_name, type_name_of
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.readers import dtype_of, size_of
from gpuaug.fusion.clips import ClipLayout
from gpuaug.fusion.ops.base import OpDraws, Size
from gpuaug.fusion.ops.boxes import (
    KORNIA_FORMATS,
    BoxMapping,
    apply_matrices,
    axes_per_box,
    check_form,
    composed,
    floating_dtype,
    has_positive_area,
    vertices,
)
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.mix import MixOp, SoftLabels
from gpuaug.fusion.ops.torchvision.target_conversions import NO_CONVERSIONS, TargetConversions
from gpuaug.fusion.options import BoxFormatName
from gpuaug.fusion.pixels import converted
from gpuaug.fusion.program.plan import Canvases, OpPass, Plan
from gpuaug.fusion.targets.box_crop import crop_by_boxes, target_dicts_for_crop
from gpuaug.fusion.targets.clips import ClipInputs
from gpuaug.fusion.targets.data_keys import (
    BOXES,
    check_canvas,
    check_input,
    check_not_segmentation_map,
    check_same_size,
    check_valid,
    name_of,
)
from gpuaug.fusion.targets.masks import MaskList, owners_of, to_device, with_class_of
from gpuaug.fusion.targets.packed import can_stay_packed
from gpuaug.fusion.targets.target_dicts import TargetDicts
from gpuaug.fusion.targets.typed import TypedTargets, has_targets_under_other_keys


class CallInputs:
    """Images and targets of one call, which are replaced pass by pass.

    Call ``run_plan`` or ``run_eager`` for the parts of the pipeline, in order, then ``results``.

    Args:
        inputs: Inputs as the user passed them.
        keys: Data key of each input: Kornia's names, ``targets`` for target dicts, ``valid`` for the (B, N) mask of the boxes
            that are not padding, ``tv_tensors`` for containers of torchvision's tensors.
        boxes: Format of boxes in target dicts.
        conversions: Conversions of the output, and size of the smallest valid box.
        clip_layout: Layout of clips that the pipeline accepts.

    Raises:
        ArgumentTypeError: If an input does not have the type that its key requires.
        DeviceError: If an input is not on the device of the images.
        ArgumentError: If the shape of an input does not fit its key, or the other inputs.
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        keys: Sequence[Any],
        boxes: BoxFormatName = "xyxy",
        conversions: TargetConversions = NO_CONVERSIONS,
        clip_layout: ClipLayout = ClipLayout(),  # noqa: B008
    ) -> None:
        self._conversions = conversions
        self.keys = [name_of(key) for key in keys]
        self.passed_keys = self.keys
        """Data keys of the inputs as the user passed them. ``keys`` also has a key for each of the targets in ``_typed``."""
        if len(inputs) != len(self.keys):
            raise ArgumentError(
                f"data_keys must name each input, got {len(self.keys)} for {len(inputs)} inputs. "
                "Name all: data_keys=['input', 'mask'], or in a stage on={0: 'input', 1: 'mask'}."
            )
        if "input" not in self.keys:
            raise ArgumentError(f"data_keys must contain 'input', got {self.keys}. Pass the images with the other inputs.")
        for key, value in zip(self.keys, inputs, strict=True):
            check_input(key, value)
        images = inputs[self.keys.index("input")]
        self._clips = ClipInputs(clip_layout, images)
        inputs = [self._packed_or_unpacked(index, value) for index, value in enumerate(inputs)]
        self._unbatched = isinstance(images, Tensor) and images.ndim == 3
        images = images[None] if self._unbatched or self._clips.is_single else images
        self.device: torch.device = images.device
        """Device of the images."""
        self.image_size = (
            clip_layout.size(images.shape) if isinstance(images, Tensor) and self._clips.frames else size_of(images)
        )
        self.image_dtype = dtype_of(images)
        self.image_layouts = images.places[:: self.image_size.images_per_sample] if isinstance(images, Ragged) else None
        """(offset, height, width) per ragged image, or of the first frame per clip, (B, 3) int64; ``None`` if not ragged."""
        self._typed: dict[int, TypedTargets] = {}
        """Targets recognized by class, such as ``tv_tensors.Mask``, by index of the input that contains them."""
        self.typed_boxes: list[str] = []
        """Names of the boxes in ``_typed``, for errors."""
        images_of_batch = self.image_size.images
        inputs = [
            self._clips.flatten_dicts(self.keys[index], index, value, images_of_batch) for index, value in enumerate(inputs)
        ]
        inputs = self._with_typed_targets(inputs)
        self._inputs = inputs
        for key, value in zip(self.keys, inputs, strict=True):
            self._check_size(key, value)
        inputs = [self._clips.flatten(key, value) for key, value in zip(self.keys, inputs, strict=True)]
        images = inputs[self.keys.index("input")]
        self._added_axes: list[int | None] = []
        """Index of the axis that was added to each input that lacks one (``_missing_axis``); ``None`` for other inputs."""
        self._soft_labels: SoftLabels | None = None
        """Conversion of labels to class probabilities; ``None`` to leave labels as they are."""
        self._converting_mix: MixOp | None = None
        """Mix during which the labels are converted; ``None`` if they are converted before all passes."""
        self.values: list[Any] = []
        """Inputs in their current state, between the passes."""
        self.image_types: dict[int, list[type[Tensor]]] = {}
        """Class per image or clip that a module of torchvision would get, by index of the images in ``values``."""
        self.has_masks = False
        """True if there are masks."""
        self.has_points = False
        """True if there are boxes or keypoints."""
        for key, value in zip(self.keys, inputs, strict=True):
            axis = self._missing_axis(key, value)
            converted_input = self._converted_input(key, value, boxes) if axis is None else value.unsqueeze(axis)
            if value is not images:
                self._check_fit(key, converted_input, value)
            if key == "input":
                class_: Any = type(self._inputs[len(self.values)])
                self.image_types[len(self.values)] = [class_ if type_name_of(class_) else Tensor] * self.image_size.batch
            self._added_axes.append(axis)
            self.values.append(converted_input)
            in_dicts = isinstance(converted_input, TargetDicts)
            self.has_masks |= key == "mask" or (in_dicts and converted_input.masks is not None)
            self.has_points |= key in KORNIA_FORMATS or (in_dicts and converted_input.has_points)
        check_valid(self.keys, self.values)
        self._formats = [KORNIA_FORMATS.get(key) for key in self.keys]
        """Format of the boxes or keypoints in each of ``values``; ``None`` for other inputs."""
        self._matrix: Tensor | None = None
        """Matrices that boxes and keypoints still have to be transformed by, (B, 3, 3); ``None`` for the identity."""

    def _packed_or_unpacked(self, index: int, value: Any) -> Any:
        """Return an input, with packed target dicts unpacked unless ``TargetDicts`` accepts them packed."""
        if not isinstance(value, PackedTargets):
            return value
        key = self.keys[index]
        if self._clips.frames or key not in ("targets", "tv_tensors") or not can_stay_packed(value, typed=key == "tv_tensors"):
            return value.unpacked()
        self.keys = [*self.keys[:index], "targets", *self.keys[index + 1 :]]
        return value

    def _with_typed_targets(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs, then the targets in them that are recognized by class, whose data keys are added to ``keys``."""
        all_inputs = list(inputs)
        for index, (key, value) in enumerate(zip(self.keys, inputs, strict=True)):
            if key == "tv_tensors" or (key == "targets" and has_targets_under_other_keys(value)):
                batch = self.image_size.images if self._clips.is_per_frame(index) else self.image_size.batch
                frames = 0 if key == "targets" else self._clips.frames
                self._typed[index] = typed = TypedTargets(
                    value, batch, in_dicts=key == "targets", frames=frames, images=self.image_size.images
                )
                self.typed_boxes += typed.box_names
                self.keys = [*self.keys, *(name for name, _ in typed.inputs)]
                all_inputs += [values for _, values in typed.inputs]
        return all_inputs

    def _without_typed_targets(self, values: list[Any]) -> list[Any]:
        """Invert ``_with_typed_targets``: return one result per input, with the targets put back into their containers."""
        start = len(self.passed_keys)
        results = values[:start]
        for index, typed in self._typed.items():
            end = start + len(typed.inputs)
            dicts = results[index] if self.passed_keys[index] == "targets" else None
            results[index] = typed.results(values[start:end], dicts, self._clips.frame_indices)
            start = end
        return results

    def _check_size(self, key: str, value: Any) -> None:
        """Check that further images have the size of the first images, because all inputs share the random parameters."""
        if key != "input":
            return
        value = value[None] if isinstance(value, Tensor) and (self._unbatched or self._clips.is_single) else value
        clip_layout = self._clips.clip_layout
        size = clip_layout.size(value.shape) if isinstance(value, Tensor) and clip_layout.frames_of(value) else size_of(value)
        check_same_size(self.image_size, size)

    def _converted_input(self, key: str, value: Any, boxes: BoxFormatName) -> Any:
        """Return target dicts as ``TargetDicts``, lists of masks as ``MaskList``, and other inputs unchanged."""
        if key == "targets":
            size = self.image_size
            per_frame = size.frames > 1 and isinstance(value, Sequence) and len(value) == size.images
            return TargetDicts(
                value,
                size.per_frame() if per_frame else size,
                self.image_layouts,
                self.device,
                boxes,
                self._conversions,
                size.frames if per_frame else 1,
            )
        if key == "mask" and isinstance(value, list | tuple):
            if len(value) != self.image_size.batch:
                raise ArgumentError(
                    f"mask must hold masks for each of the {self.image_size.batch} images, got {len(value)}. Pass one tensor "
                    "per image."
                )
            masks = MaskList(value, range(len(value)), self.image_size, self.device)
            masks.set_device_arrays(*to_device([owners_of(masks.samples, masks.counts), masks.spans], self.device))
            return masks
        return value

    def _missing_axis(self, key: str, value: Any) -> int | None:
        """Return the axis that an input lacks: the batch axis of a single sample, or the channel axis of masks."""
        # As in Kornia, an image without a batch axis is a batch of one, and masks without a channel axis have one channel.
        if key in ("input", "mask") and isinstance(value, Tensor) and value.ndim == 3:
            return 0 if key == "input" or self._unbatched else 1
        if key in KORNIA_FORMATS and value.ndim == 1 + axes_per_box(KORNIA_FORMATS[key]) and self.image_size.batch == 1:
            return 0
        return 0 if key == "valid" and value.ndim == 1 and self.image_size.batch == 1 else None

    def _check_fit(self, key: str, value: Any, source: Any) -> None:
        """Raise an error if an input does not fit the images. ``source``: the input before axes were added."""
        if key == "class":
            check_not_segmentation_map(value, self.image_size)
        if key in ("class", "targets", "tv_tensors") or isinstance(value, MaskList):
            return
        if key in KORNIA_FORMATS:
            check_form(value, key)
            check_canvas(key, source, self.image_size.sample(0))
        if value.device != self.device:
            raise DeviceError(
                f"{key} must be on {self.device}, where the images are, got {value.device}. Move it to that device."
            )
        if len(value) != (self.image_size.images if key in ("input", "mask") else self.image_size.batch):
            raise ArgumentError(
                f"{key} must hold one entry for each of the {self.image_size.batch} images, got {tuple(source.shape)}. "
                "Pass one entry per image."
            )
        if key != "mask":
            return
        size = self.image_size
        fits = value.ndim == 4 and bool(np.all(size.height == value.shape[2]) and np.all(size.width == value.shape[3]))
        if size.ragged and not fits:
            raise ArgumentError(
                f"mask must be a list of one tensor for each image where images differ in size, got {tuple(value.shape)}. "
                "Pass the masks as a list: list(masks)."
            )
        if not fits:
            raise ArgumentError(
                f"mask must have the size of the images, {size.shape}, got {tuple(value.shape)}. Resize the mask to that size."
            )

    def check_mix(self, op: MixOp) -> None:
        """Raise an error for inputs that cannot be mixed. Call before any pass.

        Raises:
            ArgumentError: If there are inputs other than images and labels.
            ArgumentTypeError: If labels are not a tensor.
            DeviceError: If labels are not on the device of the images.
        """
        unsupported_keys = [key for key in self.keys if key not in op.supported_keys]
        if unsupported_keys:
            raise ArgumentError(
                f"data_keys must be among {', '.join(op.supported_keys)} where {op.name} mixes images, got "
                f"{', '.join(unsupported_keys)}. Mixing is not supported beside these: mix in the dataset, or leave the mix "
                "out."
            )
        self._check_labels()

    def convert_labels(self, soft_labels: SoftLabels, mixes: Sequence[MixOp]) -> None:
        """Convert labels to class probabilities: at once without ``mixes``, otherwise when the first mix runs.

        Raises:
            ArgumentError: If labels are neither class indices nor class probabilities.
            ArgumentTypeError: If labels are not a tensor.
            DeviceError: If labels are not on the device of the images.
        """
        self._check_labels()
        batch = self.image_size.batch
        # If every frame counts as an image of the batch, there may still be one label per clip, unless frames are mixed.
        clips = batch // self._clips.frames if self._clips.clip_layout.draws_per_frame and not mixes else batch
        for index, key in enumerate(self.keys):
            if key == "class":
                soft_labels.check(self.values[index], batch if self.values[index].shape[:1] == (batch,) else clips)
                if not mixes:
                    self.values[index] = dispatch.run_labels(soft_labels, self.values[index], None)
        self._soft_labels = soft_labels
        self._converting_mix = mixes[0] if mixes else None

    def _check_labels(self) -> None:
        """Raise an error if labels are not a tensor on the device of the images."""
        for key, value in zip(self.keys, self.values, strict=True):
            if key == "class" and not isinstance(value, Tensor):
                raise ArgumentTypeError(f"class must be a tensor, got {type(value).__name__}. Pass one index for each image.")
            if key == "class" and value.device != self.device:
                raise DeviceError(
                    f"class must be on {self.device}, where the images are, got {value.device}. Move it to that device."
                )

    def _mixed_labels(self, labels: Tensor, op: MixOp, rows: Tensor) -> Tensor:
        """Return the labels after a mix. ``rows``: rows of the mix in the parameter table."""
        if self._soft_labels is None:
            return op.labels(labels, rows)
        # Only the first mix converts labels. Later mixes get class probabilities, which must not be smoothed again.
        is_first = op is self._converting_mix
        soft_labels = self._soft_labels if is_first else replace(self._soft_labels, smoothing=0.0)
        return dispatch.run_labels(soft_labels, labels, rows)

    def run_plan(
        self,
        plan: Plan,
        table: Tensor,
        canvases: Canvases = (),
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        """Run all inputs through the passes of a plan. Boxes and keypoints are transformed later, once for all plans.

        Args:
            plan: Plan for images of the current size.
            table: Parameter table of the plan, (B, columns).
            canvases: Result of ``Plan.canvases``: size of the output of each pass but the last, if images differ in size.
            dtype: dtype of the output images.
            memory_format: Memory format of the output images.
        """
        if self.has_points and plan.box_crop is not None:
            target_dicts = target_dicts_for_crop(plan.box_crop.op, self.values, self.passed_keys, self.typed_boxes)
            table, self._matrix = crop_by_boxes(plan, plan.box_crop, table, target_dicts, self._matrix)
        elif self.has_points:
            self._matrix = composed(self._matrix, table[:, plan.width :].view(-1, 3, 3))
        self._clips.select_frames(plan.frames, self.values, self.keys, self._inputs)
        for index, key in enumerate(self.keys):
            value = self.values[index]
            if key == "input":
                self.values[index] = dispatch.run(plan, value, table, dtype, memory_format, canvases)
            elif isinstance(value, MaskList):
                value.run(plan, table, canvases)
            elif key == "mask":
                for position, pass_ in enumerate(plan.passes):
                    canvas = canvases[position] if pass_.out.ragged else None
                    value = dispatch.run_mask(pass_, value, table, canvas=canvas)
                self.values[index] = value
            elif key == "targets":
                if value.masks is not None:
                    value.masks.run(plan, table, canvases)
            elif key == "class":
                for pass_ in plan.passes:
                    if isinstance(pass_, OpPass) and isinstance(pass_.front, MixOp):
                        value = self._mixed_labels(value, pass_.front, pass_.rows_of(table))
                self.values[index] = value

    def run_eager(
        self,
        op: EagerOp,
        draws: OpDraws,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        """Run all inputs through a module that is not fused, in Kornia or torchvision.

        Args:
            op: The module.
            draws: Draws of the module.
            dtype: dtype of the output images; ``None`` for the dtype that the module returns.
            memory_format: Memory format of the output images.

        Raises:
            ArgumentError: If its library cannot move the pixels or boxes of an input equally, or cannot mix the labels.
            OutputDtypeChange: If the module returns images of another dtype than the pipeline was lowered for.
        """
        images_only = op.moves_nothing or op.package == "torchvision"  # whether the module gets the images only
        named_values = zip(self.keys, self.values, strict=True)
        op.check_keys(self.keys, [key for key, value in named_values if isinstance(value, TargetDicts | MaskList)])
        indices = [
            index
            for index, key in enumerate(self.keys)
            # Kornia's containers return labels unchanged, or raise an error.
            if key == "input" or not (images_only or key in ("class", "valid", "tv_tensors"))
        ]
        if not images_only:
            self._apply_matrix()
        values, keys = [self.values[index] for index in indices], [self.keys[index] for index in indices]
        types = {position: self.image_types[index] for position, index in enumerate(indices) if index in self.image_types}
        results = op.run(values, keys, draws, self.device, types)
        for index, value in zip(indices, results, strict=True):
            if self.keys[index] == "input":
                # Two calls, because to(dtype, memory_format) does not change the strides of a tensor that has the dtype.
                value = converted(value, dtype or value.dtype).contiguous(memory_format=memory_format)
            self.values[index] = value

    def _apply_matrix(self) -> None:
        """Transform boxes and keypoints by the matrices of the preceding plans, because Kornia transforms them next."""
        for index, box_format in enumerate(self._formats):
            if box_format is None:
                continue
            values = self.values[index]
            if self.keys[index] in BOXES:
                if "valid" in self.keys:
                    valid_index = self.keys.index("valid")
                    self.values[valid_index] = self.values[valid_index] & has_positive_area(values, box_format)
                self._formats[index] = KORNIA_FORMATS["bbox"]
            points = vertices(values, box_format)
            self.values[index] = points if self._matrix is None else apply_matrices(points, self._matrix)
        self._matrix = None

    def check_size(self, op: EagerOp, size: Size) -> None:
        """Raise an error if ``op``, which has run, returned images of another size than ``size``.

        The draws of the following modules assume this size.

        Raises:
            ArgumentError: If the images do not have ``size``.
        """
        shape = tuple(self.values[self.keys.index("input")].shape)
        if shape != (size.images, size.channels, size.height, size.width):
            raise ArgumentError(
                f"{op.name} must return images of {(size.images, size.channels, size.height, size.width)}, the size that was "
                f"drawn, got {shape}. Put the module into a separate stage, and the modules after it into another."
            )

    def results(self, *, keepdim: bool, views: int = 1) -> Any:
        """Return the outputs of the call: a list in the order of the inputs; the images alone if they were the only input.

        Args:
            keepdim: Whether a single image without a batch axis is returned without a batch axis.
            views: Number of views, that is, random augmentations of each image. The outputs are those of one view.
        """
        values = list(self.values)
        if self.has_points or "targets" in self.keys:
            self._transform_boxes(values)
        for index, (key, axis, source) in enumerate(zip(self.keys, self._added_axes, self._inputs, strict=True)):
            result = values[index]
            if isinstance(result, MaskList):
                result = type(source)(result.results(self._conversions))
            # As in Kornia, boxes and keypoints keep the shape of the input. Several views need the batch axis.
            elif axis is not None and (views == 1 or axis) and (keepdim or key in KORNIA_FORMATS or key == "valid"):
                result = result.squeeze(axis)
            result = self._clips.unflatten(key, result, source)
            if self._clips.is_single and key == "input" and views == 1 and keepdim:
                result = result[0]
            values[index] = self._output(key, result, source)
        values = self._without_typed_targets(values) if self._typed else values
        self._clips.unflatten_dicts(values)
        return values[0] if len(values) == 1 else values

    def _output(self, key: str, result: Any, source: Any) -> Any:
        """Restore torchvision's class of images and masks, and convert masks to the output dtype.

        Other results are returned unchanged. ``source``: the input.
        """
        if key not in ("input", "mask") or not isinstance(result, Tensor):
            return result
        result = result if key == "input" or self._conversions.masks is None else result.to(self._conversions.masks)
        return with_class_of(result, source) if type_name(source) and not self._conversions.is_pure else result

    def _transform_boxes(self, values: list[Any]) -> None:
        """Transform boxes, keypoints and target dicts by the matrices of the passes, in place in ``values``."""
        matrix = self._matrix
        if matrix is None:
            matrix = torch.eye(3, dtype=torch.float32, device=self.device).expand(self.image_size.batch, 3, 3)
        height, width = values[self.keys.index("input")].shape[2:]
        out = int(height), int(width)
        for index, (key, box_format) in enumerate(zip(self.keys, self._formats, strict=True)):
            if key == "targets":
                values[index] = values[index].results(matrix, out)
            elif box_format is not None:
                valid_index = self.keys.index("valid") if "valid" in self.keys and key in BOXES else None
                clip = valid_index is not None
                mapping = BoxMapping(box_format, KORNIA_FORMATS[key], matrix, (1, 1), out, clip=clip)
                valid = None if valid_index is None else values[valid_index]
                dtype = floating_dtype(self._inputs[index].dtype)
                values[index], out_valid = dispatch.map_boxes(values[index], valid, mapping, dtype)
                if valid_index is not None:
                    values[valid_index] = out_valid
