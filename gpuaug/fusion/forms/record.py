"""``Record``: images and targets of one call of a fused pipeline, in the form that passes transform.

*Targets* are masks, boxes, keypoints and labels, which are transformed together with the images. An *input* is one argument of
the call, and its *data key* says what it holds, such as ``"mask"``. An *adapter*, ``Dense`` for one tensor or ``Container`` for
target dicts and other containers, reads an input, and returns its result in the form of the input. ``valid`` is the mask of the
boxes that are not padding.

An *op* is one operation on images. A *plan* is a list of *passes*: kernels that each read and write all images, and run several
ops. The *parameter table* has one row of numbers per sample, from which passes read the parameters of ops. *Ragged* images
differ in size. A *mix* (MixUp, CutMix) blends images of a batch. A sample is an image or a clip of frames.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpuaug.core.errors import ArgumentError, ArgumentTypeError
from gpuaug.core.targets import BOXES, DATA_KEYS, LABELS, MASKS, VALID
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.readers import send
from gpuaug.fusion.clips import ClipLayout
from gpuaug.fusion.forms.call import Call
from gpuaug.fusion.forms.containers import Container
from gpuaug.fusion.forms.data_keys import check_device, check_labels, names_of
from gpuaug.fusion.forms.dense import Dense
from gpuaug.fusion.forms.kinds import Masks, Points
from gpuaug.fusion.ops.base import Op, OpDraws, Size
from gpuaug.fusion.ops.boxes import are_large, composed
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.geometry import BoxCropOp, FieldOp
from gpuaug.fusion.ops.mix import MixOp, SoftLabels
from gpuaug.fusion.ops.torchvision.target_conversions import TargetConversions
from gpuaug.fusion.options import BoxFormatName
from gpuaug.fusion.pixels import converted
from gpuaug.fusion.program.plan import BoxCrop, Canvases, OpPass, Plan


class Record:
    """Images and targets of one call. Each part of the pipeline replaces them by its results.

    Call ``run_plan`` for each plan of the pipeline and ``run_eager`` for each module that is not fused, in order, then
    ``results``.

    Args:
        inputs: Inputs as the user passed them.
        keys: Data key of each input: Kornia's names, ``targets`` for target dicts, ``valid`` for the (B, N) mask of the boxes
            that are not padding, ``tv_tensors`` for containers of torchvision's tensors.
        boxes: Format of the boxes in target dicts, such as ``"xyxy"``.
        conversions: Conversions of the output targets, and minimum width, height and area of a valid box.
        clip_layout: Order of the axes of clips that the pipeline accepts.

    Raises:
        ArgumentTypeError: If an input does not have the type that its key requires.
        DeviceError: If an input is not on the device of the images.
        ArgumentError: If the shape of an input does not fit its key, or the other inputs.
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        keys: Sequence[Any],
        boxes: BoxFormatName,
        conversions: TargetConversions,
        clip_layout: ClipLayout,
    ) -> None:
        self.keys = names_of(keys)
        """Data key of each input."""
        if len(inputs) != len(self.keys):
            raise ArgumentError(
                f"data_keys must name each input, got {len(self.keys)} for {len(inputs)} inputs. "
                "Name all: data_keys=['input', 'mask'], or in a stage on={0: 'input', 1: 'mask'}. Name a list of one dict for "
                "each image 'targets'."
            )
        if "input" not in self.keys:
            raise ArgumentError(f"data_keys must contain 'input', got {self.keys}. Pass the images with the other inputs.")
        self.call = call = Call(inputs[self.keys.index("input")], boxes, conversions, clip_layout)
        """Images and settings of the call. ``call.images`` is the first input with the key ``input``."""
        self.adapters: list[Dense | Container] = []
        """Adapters of all inputs except labels, in order."""
        self._labels: dict[int, Any] = {}
        """Index of the input → labels of all images: tensors if they are mixed or converted, else of any type."""
        for index, (key, value) in enumerate(zip(self.keys, inputs, strict=True)):
            if DATA_KEYS.get(key) is LABELS:
                check_labels(value, call.size)
                self._labels[index] = value
            elif key == "input" or (key in DATA_KEYS and not (key in MASKS.data_keys and isinstance(value, list | tuple))):
                self.adapters.append(Dense(key, value, call))
            else:
                self.adapters.append(Container(key, value, call))
        maps = [mask for adapter in self.adapters if type(adapter) is Container for mask in adapter.maps]
        self._dense = [adapter for adapter in (*self.adapters, *maps) if type(adapter) is Dense]
        """Adapters of one tensor: of inputs, and of segmentation maps, (B, …), in containers."""
        if any(key in VALID.data_keys for key in self.keys):
            self._connect_valid()
        self.targets: list[Points | Masks] = [target for adapter in (*self.adapters, *maps) for target in adapter.targets]
        """Masks, boxes and keypoints of all inputs, in the form that passes transform."""
        self._points = [target for target in self.targets if isinstance(target, Points)]
        self._masks = [target for target in self.targets if isinstance(target, Masks)]
        arrays = [array for target in self.targets for array in target.host_arrays]
        if arrays:
            device_arrays = iter(send(arrays, call.device))
            for target in self.targets:
                target.device_arrays = [next(device_arrays) for _ in target.host_arrays]
        self._images = next(adapter for adapter in self._dense if adapter.key == "input")
        """Adapter of the first input with the key ``input``."""
        self.has_masks = bool(self._masks)
        """True if there are masks."""
        self.has_points = bool(self._points)
        """True if there are boxes or keypoints."""
        self.plan_key = (call.images.shape, call.device, self.has_masks, self.has_points) if call.is_usual else None
        """Key under which ``Program.cached`` finds the plan for these inputs; ``None`` if such plans are not cached."""
        self._soft_labels: SoftLabels | None = None
        """Conversion of labels to class probabilities, which mixes run with; ``None`` to leave labels as they are."""
        self._matrix: Tensor | None = None
        """Product of the matrices of the plans that have run, (B, 3, 3) float32; ``None`` for the identity.

        Boxes and keypoints are not transformed by each plan, but once by the product.
        """

    @property
    def _matrix_or_identity(self) -> Tensor:
        """``_matrix``, with identity matrices in place of ``None``."""
        if self._matrix is not None:
            return self._matrix
        return torch.eye(3, dtype=torch.float32, device=self.call.device).expand(self.call.size.batch, 3, 3)

    def _connect_valid(self) -> None:
        """Store the input ``valid`` in the ``Points`` of the boxes, and let its adapter read the result from there.

        Raises:
            ArgumentError: If ``valid`` is not one bool per box, if it is passed twice, or if there is not exactly one input of
                boxes in one tensor.
        """
        valid_adapters = [adapter for adapter in self._dense if adapter.kind is VALID]
        boxes = [target for adapter in self._dense if adapter.kind is BOXES for target in adapter.targets]
        if len(valid_adapters) > 1 or len(boxes) != 1:
            raise ArgumentError(
                f"data_keys must hold one of {', '.join(BOXES.data_keys)} together with 'valid', got {self.all_keys}. "
                "Name 'valid' once, for one tensor of boxes."
            )
        valid = valid_adapters[0].value
        target = boxes[0]
        if valid.dtype != torch.bool or valid.shape != target.values.shape[:2]:
            raise ArgumentError(
                f"valid must be one bool for each box, torch.bool {tuple(target.values.shape[:2])}, got {valid.dtype} "
                f"{tuple(valid.shape)}. Mark the boxes that are not padding: arange(N) < counts[:, None]."
            )
        assert isinstance(target, Points)
        target.valid = valid
        target.clip = True
        valid_adapters[0].storage = target, "valid"  # the adapter reads ``target.valid``

    @property
    def all_keys(self) -> list[str]:
        """Data keys of the inputs, then of the targets inside containers (``Container.inner_keys``)."""
        return [*self.keys, *(key for adapter in self.adapters if type(adapter) is Container for key in adapter.inner_keys)]

    def boxes_for_crop(self, op: BoxCropOp) -> Points | None:
        """Return the boxes in target dicts, by which ``op`` chooses its crop windows; ``None`` if the dicts have no boxes.

        Raises:
            ArgumentError: If no input holds target dicts, or if boxes are under several keys.
        """
        containers = (adapter for adapter in self.adapters if type(adapter) is Container)
        boxes = [slot for adapter in containers for slot in adapter.slots if slot.kind is BOXES]
        if len(boxes) > 1:
            names = " and ".join(".".join(map(str, slot.path)) or slot.key for slot in boxes)
            raise ArgumentError(
                f"targets must hold one set of boxes for {op.name}, which crops by boxes, got {names}. Leave all but one of "
                "them out."
            )
        if "targets" not in self.all_keys:
            raise ArgumentError(
                f"data_keys must hold 'targets' once for {op.name}, which crops by boxes, got {self.keys}. Pass target dicts "
                "with the images: data_keys=['input', 'targets']."
            )
        return boxes[0].target if boxes else None  # type: ignore[return-value]

    def check_keys(self, op: Op) -> None:
        """Raise an error if ``op`` does not support an input, or is a mix and cannot mix the labels. Call before any pass.

        Raises:
            ArgumentError: If an input is not in ``op.supported_keys``.
            ArgumentTypeError: If labels to be mixed are not a tensor.
            DeviceError: If labels to be mixed are not on the device of the images.
        """
        unsupported_keys = [key for key in self.all_keys if key not in op.supported_keys]
        if unsupported_keys:
            raise ArgumentError(
                f"data_keys must be among {', '.join(op.supported_keys)} with {op.name}, got {', '.join(unsupported_keys)}. "
                f"Leave {op.name} out of the pipeline."
            )
        if isinstance(op, MixOp):
            self._check_labels()

    def _check_labels(self) -> None:
        """Raise an error if labels are not a tensor on the device of the images."""
        for labels in self._labels.values():
            if not isinstance(labels, Tensor):
                raise ArgumentTypeError(f"class must be a tensor, got {type(labels).__name__}. Pass one index for each image.")
            check_device("class", labels, self.call.device)

    def convert_labels(self, soft_labels: SoftLabels, mixes: Sequence[MixOp]) -> None:
        """Convert labels to class probabilities, now or when the first mix of the pipeline runs.

        Args:
            soft_labels: Conversion: number of classes and smoothing.
            mixes: Mixes of the pipeline, in order. If empty, labels are converted now.

        Raises:
            ArgumentError: If labels are neither class indices nor class probabilities.
            ArgumentTypeError: If labels are not a tensor.
            DeviceError: If labels are not on the device of the images.
        """
        self._check_labels()
        batch = self.call.size.batch
        # With parameters per frame, every frame is a sample. There may still be one label per clip, unless frames are mixed.
        label_count = batch // self.call.frames if self.call.clip_layout.draws_per_frame and not mixes else batch
        for index, labels in self._labels.items():
            soft_labels.check(labels, batch if labels.shape[:1] == (batch,) else label_count)
            if not mixes:
                self._labels[index] = dispatch.run_labels(soft_labels, labels, None)
        self._soft_labels = soft_labels

    def _mix_labels(self, op: MixOp, table: Tensor) -> None:
        """Mix the labels by ``op``. ``table``: parameter table from the first column of the mix's pass on."""
        soft = self._soft_labels
        for index, labels in self._labels.items():
            self._labels[index] = op.labels(labels, table) if soft is None else dispatch.run_labels(soft, labels, table)
        if soft is not None:  # later mixes get class probabilities, which must not be smoothed again
            self._soft_labels = replace(soft, smoothing=0.0)

    def run_plan(
        self,
        plan: Plan,
        table: Tensor,
        canvases: Canvases = (),
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        """Run images, masks and labels through the passes of a plan.

        Boxes and keypoints are only prepared: the plan's matrices, the last columns of ``table``, are multiplied to
        ``_matrix``. They are transformed now only if an op of the plan moves pixels by a field, which is no matrix.

        Args:
            plan: Plan for images of the current size.
            table: Parameter table of the plan, (V · B, columns) for V views. If there are boxes or keypoints, the last columns
                are for them.
            canvases: Result of ``Plan.canvases``: if images differ in size, (height, width) of the output of each pass but the
                last.
            dtype: dtype of the output images.
            memory_format: Memory format of the output images.
        """
        field_passes = [
            (pass_.front, pass_.columns_of(table), pass_.source) for pass_ in plan.passes if isinstance(pass_.front, FieldOp)
        ]
        if self.has_points and field_passes:  # a plan with such an op has no matrices
            for op, pass_table, size in field_passes:
                matrix = self._matrix_or_identity
                for points in self._points:
                    points.displace(op, pass_table, size, matrix, self.call.input_sizes)
                self._matrix = None
        elif self.has_points and plan.box_crop is not None:
            boxes = self.boxes_for_crop(plan.box_crop.op)
            table, self._matrix = crop_by_boxes(plan, plan.box_crop, table, boxes, self.call.input_sizes, self._matrix)
        elif self.has_points:
            matrix = table[:, plan.width :].view(-1, 3, 3)
            self._matrix = matrix if self._matrix is None else composed(self._matrix, matrix)
        if self.call.frames:
            self._select_frames(plan)
        for adapter in self._dense:
            if adapter.key == "input":
                adapter.value = dispatch.run(plan, adapter.value, table, dtype, memory_format, canvases)
        for masks in self._masks:
            masks.run(plan, table, canvases)
        for pass_ in plan.passes if self._labels else ():
            if isinstance(pass_, OpPass) and isinstance(pass_.front, MixOp):
                self._mix_labels(pass_.front, pass_.columns_of(table))

    def _select_frames(self, plan: Plan) -> None:
        """Select the frames of masks, boxes, keypoints and ``valid`` in one tensor, if ``plan`` selects frames of clips.

        The kernels of the plan select the frames of images. ``Container`` selects the frames of lists by the numbers
        ``call.frame_indices``.
        """
        indices = plan.frames
        if indices is None:
            return
        (device_indices,) = send([indices], self.call.device)
        for adapter in self._dense:
            adapter.select_frames(device_indices, len(self.call.frame_indices))
        self.call.frame_indices = [self.call.frame_indices[frame] for frame in indices.tolist()]

    def run_eager(
        self,
        op: EagerOp,
        draws: OpDraws,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        """Run the inputs through a module of Kornia or torchvision that is not fused.

        A module of torchvision, or one that moves no pixels, gets only the images; the targets remain unchanged.

        Args:
            op: The module.
            draws: Random parameters of the module.
            dtype: dtype of the output images; ``None`` for the dtype that the module returns.
            memory_format: Memory format of the output images.

        Raises:
            ArgumentError: If its library cannot transform an input in the same way as the images, or cannot mix the labels.
            OutputDtypeChange: If the module returns images of another dtype than the pipeline was lowered for.
        """
        images_only = op.moves_nothing or op.package == "torchvision"
        # Data keys of inputs that are lists of masks: other containers have the keys ``targets`` and ``tv_tensors``.
        listed_keys = [adapter.key for adapter in self.adapters if type(adapter) is Container and adapter.key in DATA_KEYS]
        op.check_keys(self.all_keys, ["targets", *listed_keys])
        # Labels are not passed, because Kornia's containers return them unchanged, or raise an error.
        module_inputs = [
            adapter for adapter in self._dense if adapter.key == "input" or not (images_only or DATA_KEYS[adapter.key] is VALID)
        ]
        if not images_only:
            for points in self._points:
                points.apply(self._matrix)
            self._matrix = None
        values, keys = [adapter.current for adapter in module_inputs], [adapter.key for adapter in module_inputs]
        types = {position: adapter.types for position, adapter in enumerate(module_inputs) if adapter.key == "input"}
        results = op.run(values, keys, draws, self.call.device, types)
        for adapter, value in zip(module_inputs, results, strict=True):
            if adapter.key == "input":
                # Two calls, because to(dtype, memory_format) does not change the strides of a tensor that has the dtype.
                value = converted(value, dtype or value.dtype).contiguous(memory_format=memory_format)
            adapter.current = value

    def check_size(self, op: EagerOp, size: Size) -> None:
        """Raise an error if ``op``, which has run, returned images of another size than ``size``.

        ``size`` was predicted when all draws were made, and the draws of the modules after ``op`` depend on it.

        Raises:
            ArgumentError: If the images do not have ``size``.
        """
        shape = tuple(self._images.value.shape)
        if shape != (size.images, size.channels, size.height, size.width):
            raise ArgumentError(
                f"{op.name} must return images of {(size.images, size.channels, size.height, size.width)}, the size that was "
                f"drawn, got {shape}. Put the module into a separate stage, and the modules after it into another."
            )

    def results(self, *, keepdim: bool, views: int = 1) -> Any:
        """Return the outputs of the call: a list in the order of the inputs; the images alone if they were the only input.

        Args:
            keepdim: Whether a single image without a batch axis is returned without a batch axis.
            views: Number of views of the call, that is, random augmentations of each image. The record may hold only one.
        """
        call = self.call
        call.keepdim, call.views = keepdim, views
        height, width = self._images.value.shape[-2:]
        call.out = int(height), int(width)
        if self.has_points:
            matrix = self._matrix_or_identity
            for points in self._points:
                points.transform(matrix, self.call.input_sizes, self.call.out, self.call.conversions)
        for masks in self._masks if call.conversions.masks is not None else ():
            masks.values = masks.values.to(call.conversions.masks)
        values = [adapter.output() for adapter in self.adapters]
        for index, labels in self._labels.items():
            values.insert(index, labels)
        return values[0] if len(values) == 1 else values


def crop_by_boxes(
    plan: Plan, crop: BoxCrop, table: Tensor, points: Points | None, input_sizes: Any, matrix_to_plan: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Choose the crop window of each image, and set ``points.valid_after_crop``, the mask of the boxes that the crops keep.

    The windows depend on the boxes of the images, so the device chooses them, before the images are cropped.

    Args:
        plan: Plan that contains the crop.
        crop: The crop, ``crop.op``, and the pass that runs it, ``crop.pass_``.
        table: Parameter table of the plan, (B, columns). Not modified.
        points: Boxes of all images, in pixels of the input images; ``None`` if there are none.
        input_sizes: (height, width) of the input images; or, if they differ in size, ``Ragged.places``, (B, 3 or 4): offset,
            height and width per image.
        matrix_to_plan: Matrices that map pixels of the input images to pixels of the images that the plan reads, (B, 3, 3);
            ``None`` for the identity.

    Returns:
        (parameter table with the windows, (B, columns); matrices that map pixels of the input images to pixels of the images
        that the plan writes, (B, 3, 3)).

    Cost:
        About twenty launches, in addition to the launches of ``dispatch.box_windows``.
    """
    # The crop is run by the resize after it, which reads a window of its source. The resize has three columns per axis, x then
    # y: number of source pixels per output pixel, first pixel of the window, number of pixels of the window. In the argument
    # ``table``, the window is the whole image. Columns from ``plan.width`` on: matrix of the ops before the crop, matrix of the
    # ops after the crop, random numbers of the crop, and for x and for y -1 if flips between crop and resize mirror it, else 1.
    column = crop.pass_.first_column + crop.pass_.columns.warp
    scale = table[:, column : column + 4 : 3]
    sides = table[:, column + 2 : column + 6 : 3]
    matrix_before, matrix_after, numbers, flip_signs = table[:, plan.width :].split((3 * 3, 3 * 3, crop.op.columns, 2), 1)
    matrix_before = composed(matrix_to_plan, matrix_before.view(-1, 3, 3))
    # ``owners``: index of the image of each box.
    no_boxes = table.new_empty(0, 4), table.new_empty(0, dtype=torch.int64)
    boxes, owners = no_boxes if points is None else points.corners(matrix_before, input_sizes)
    # ``windows``: (B, 4), first pixel in x and y, then width and height.
    windows, is_valid = dispatch.box_windows(crop.op, numbers, sides, boxes, owners)
    start, window_sides = windows[:, :2], windows[:, 2:]
    min_side_and_area = crop.op.min_side_and_area
    if any(min_side_and_area):
        visible_sides = torch.minimum(boxes[:, 2:], (start + window_sides)[owners]) - torch.maximum(boxes[:, :2], start[owners])
        is_valid = is_valid & are_large(visible_sides.clamp(min=0), *min_side_and_area)
    if points is not None:
        points.valid_after_crop = is_valid
    # The new scale is one division of integers, not a product with the old scale: nearest-neighbour interpolation depends on
    # the last digit.
    out_sides = (sides / scale).round()
    flipped_start = torch.where(flip_signs < 0, sides - start - window_sides, start)
    warp = torch.stack((window_sides / out_sides, flipped_start, window_sides), 2).flatten(1)
    # The matrix of crop and resize is composed of a matrix that stretches the window to the size of the image, and
    # ``matrix_after``, whose resize reads the whole image. A pixel x of the image becomes (x + 0.5 - start) * factor - 0.5,
    # because pixel centres lie half a pixel from the edges.
    factors = sides / window_sides
    crop_matrix = torch.nn.functional.pad(factors, (0, 1), value=1.0).diag_embed()
    crop_matrix[:, :2, 2] = (0.5 - start) * factors - 0.5
    new_table = torch.cat((table[:, :column], warp, table[:, column + 6 :]), 1)
    return new_table, composed(composed(matrix_before, crop_matrix), matrix_after.view(-1, 3, 3))
