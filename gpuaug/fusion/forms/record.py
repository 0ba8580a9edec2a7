"""Record of one call: images, and their *targets* in one form, whatever the form of the inputs.

Targets are masks, boxes, keypoints and labels, which are transformed together with the images. An *input* adapts a form in
which people have targets to the record, and back (``data_keys.py``, ``containers.py``). A *data key* says what an input holds.
A *plan* is a list of *passes*, that is, kernels that read and write all images. The *parameter table* holds one row of numbers
per sample, from which the passes read the parameters of the ops. *Ragged* images differ in size. A *mix* blends images of a
batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpuaug.core.errors import ArgumentError
from gpuaug.core.ragged import Ragged
from gpuaug.core.targets import DATA_KEYS, LABELS, MASKS, VALID, type_name
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.readers import dtype_of, size_of
from gpuaug.fusion.clips import ClipLayout
from gpuaug.fusion.forms.box_crop import boxes_for_crop, crop_by_boxes
from gpuaug.fusion.forms.containers import Container
from gpuaug.fusion.forms.data_keys import Dense, Input, Labels, check_input, check_valid, name_of
from gpuaug.fusion.forms.kinds import Masks, Points, sides_of, to_device
from gpuaug.fusion.ops.base import OpDraws, Size
from gpuaug.fusion.ops.boxes import composed
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.mix import MixOp, SoftLabels
from gpuaug.fusion.ops.torchvision.target_conversions import NO_CONVERSIONS, TargetConversions
from gpuaug.fusion.options import BoxFormatName
from gpuaug.fusion.pixels import converted
from gpuaug.fusion.program.plan import Canvases, OpPass, Plan


class Record:
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
        self.keys = [key if key in _SIMPLE_KEYS else name_of(key) for key in keys]
        """Data key of each input."""
        self.boxes, self.conversions, self.clip_layout = boxes, conversions, clip_layout
        if len(inputs) != len(self.keys):
            raise ArgumentError(
                f"data_keys must name each input, got {len(self.keys)} for {len(inputs)} inputs. "
                "Name all: data_keys=['input', 'mask'], or in a stage on={0: 'input', 1: 'mask'}."
            )
        if "input" not in self.keys:
            raise ArgumentError(f"data_keys must contain 'input', got {self.keys}. Pass the images with the other inputs.")
        self.images: Any = inputs[self.keys.index("input")]
        """The first images, as the user passed them."""
        check_input("input", self.images)
        self._sides: dict[bool, list[tuple[int, int]]] = {}
        """Cache of ``sides``."""
        self._read_images()
        self.inputs: list[Input] = [self._input(key, value) for key, value in zip(self.keys, inputs, strict=True)]
        check_valid(self.inputs)
        maps = [mask for source in self.inputs if isinstance(source, Container) for mask in source.maps]
        self._dense = [source for source in (*self.inputs, *maps) if isinstance(source, Dense)]
        """Inputs in one tensor, and segmentation maps in containers."""
        self.targets: list[Points | Masks] = [target for source in (*self.inputs, *maps) for target in source.targets]
        """Masks, boxes and keypoints in one form."""
        arrays = [array for target in self.targets for array in target.host_arrays]
        if arrays:
            device_arrays = iter(to_device(arrays, self.device))
            for target in self.targets:
                target.device_arrays = [next(device_arrays) for _ in target.host_arrays]
        self.has_masks = any(type(target) is Masks for target in self.targets)
        """True if there are masks."""
        self.has_points = any(type(target) is Points for target in self.targets)
        """True if there are boxes or keypoints."""
        self._soft_labels: SoftLabels | None = None
        """Conversion of labels to class probabilities; ``None`` to leave labels as they are."""
        self._converting_mix: MixOp | None = None
        """Mix during which the labels are converted; ``None`` if they are converted before all passes."""
        self._matrix: Tensor | None = None
        """Matrices that boxes and keypoints still have to be transformed by, (B, 3, 3); ``None`` for the identity."""

    def _read_images(self) -> None:
        """Read size, dtype and device of the images."""
        images, layout = self.images, self.clip_layout
        is_tensor = isinstance(images, Tensor)
        self.is_unbatched = is_tensor and images.ndim == 3
        """True for a single image (C, H, W), without a batch axis."""
        self.is_single_clip = type(images) is not Tensor and type_name(images) == "Video" and images.ndim == 4
        """True for a single clip (T, C, H, W), without a batch axis."""
        images = images[None] if self.is_unbatched or self.is_single_clip else images
        may_be_clips = not is_tensor or images.ndim == 5 or layout.is_required
        self.frames = layout.frames_of(images) if may_be_clips else 0
        """Number of frames per input clip; 0 for images."""
        if self.frames and is_tensor and not self.is_single_clip:
            layout.warn_if_channels_first(images)
        self.frame_indices: Sequence[int] = range(self.frames)
        """Index of the input frame per output frame."""
        self.size: Size = layout.size(images.shape) if is_tensor and self.frames else size_of(images)
        self.dtype, self.device = dtype_of(images), images.device
        self.layouts = images.places[:: self.size.images_per_sample] if isinstance(images, Ragged) else None
        """(offset, height, width) per ragged image, or of the first frame per clip, (B, 3) int64; ``None`` if not ragged."""

    def size_of(self, images: Any) -> Size:
        """Return the size of further images, or clips."""
        if isinstance(images, Tensor):
            images = images[None] if self.is_unbatched or self.is_single_clip else images
            if self.clip_layout.frames_of(images):
                return self.clip_layout.size(images.shape)
        return size_of(images)

    def sides(self, *, per_frame: bool) -> list[tuple[int, int]]:
        """Return (height, width) of each image or clip; with ``per_frame`` of each frame."""
        if per_frame not in self._sides:
            self._sides[per_frame] = sides_of(self.size.per_frame() if per_frame else self.size)
        return self._sides[per_frame]

    def _input(self, key: str, value: Any) -> Input:
        """Create the adapter of an input."""
        kind = DATA_KEYS.get(key)
        if kind is LABELS:
            return Labels(key, value, self)
        if key != "input" and (kind is None or (kind is MASKS and isinstance(value, list | tuple))):
            return Container(key, value, self)
        return Dense(key, value, self)

    @property
    def all_keys(self) -> list[str]:
        """Data keys of the inputs, then of the targets in them that are recognized by class."""
        return [*self.keys, *(key for source in self.inputs for key in source.all_keys[1:])]

    def check_mix(self, op: MixOp) -> None:
        """Raise an error for inputs that cannot be mixed. Call before any pass.

        Raises:
            ArgumentError: If there are inputs other than images and labels.
            ArgumentTypeError: If labels are not a tensor.
            DeviceError: If labels are not on the device of the images.
        """
        unsupported_keys = [key for key in self.all_keys if key not in op.supported_keys]
        if unsupported_keys:
            raise ArgumentError(
                f"data_keys must be among {', '.join(op.supported_keys)} where {op.name} mixes images, got "
                f"{', '.join(unsupported_keys)}. Mixing is not supported beside these: mix in the dataset, or leave the mix "
                "out."
            )
        for labels in self._labels:
            labels.check()

    @property
    def _labels(self) -> list[Labels]:
        return [source for source in self.inputs if isinstance(source, Labels)]

    def convert_labels(self, soft_labels: SoftLabels, mixes: Sequence[MixOp]) -> None:
        """Convert labels to class probabilities: at once without ``mixes``, otherwise when the first mix runs.

        Raises:
            ArgumentError: If labels are neither class indices nor class probabilities.
            ArgumentTypeError: If labels are not a tensor.
            DeviceError: If labels are not on the device of the images.
        """
        batch = self.size.batch
        # If every frame counts as an image of the batch, there may still be one label per clip, unless frames are mixed.
        clips = batch // self.frames if self.clip_layout.draws_per_frame and not mixes else batch
        for labels in self._labels:
            labels.check()
            soft_labels.check(labels.value, batch if labels.value.shape[:1] == (batch,) else clips)
            if not mixes:
                labels.value = dispatch.run_labels(soft_labels, labels.value, None)
        self._soft_labels = soft_labels
        self._converting_mix = mixes[0] if mixes else None

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
            boxes = boxes_for_crop(plan.box_crop.op, self.inputs)
            table, self._matrix = crop_by_boxes(plan, plan.box_crop, table, boxes, self._source, self._matrix)
        elif self.has_points:
            self._matrix = composed(self._matrix, table[:, plan.width :].view(-1, 3, 3))
        if self.frames:
            self._select_frames(plan)
        for source in self._dense:
            if source.key == "input":
                source.value = dispatch.run(plan, source.value, table, dtype, memory_format, canvases)
        for target in self.targets:
            target.run(plan, table, canvases)
        for labels in self._labels:
            for pass_ in plan.passes:
                if isinstance(pass_, OpPass) and isinstance(pass_.front, MixOp):
                    labels.value = self._mixed_labels(labels.value, pass_.front, pass_.rows_of(table))

    def _select_frames(self, plan: Plan) -> None:
        """Select the frames that a plan selects. The kernels select the images; containers select elements of lists."""
        indices = plan.frames
        if indices is None:
            return
        (device_indices,) = to_device([indices], self.device)
        for source in self._dense:
            source.select_frames(device_indices, len(self.frame_indices))
        self.frame_indices = [self.frame_indices[frame] for frame in indices.tolist()]

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
        listed_keys = [source.all_keys for source in self.inputs if isinstance(source, Container)]
        op.check_keys(self.all_keys, ["targets", *(keys[0] for keys in listed_keys if keys[0] in DATA_KEYS)])
        # Kornia's containers return labels unchanged, or raise an error.
        selected = [
            source for source in self._dense if source.key == "input" or not (images_only or DATA_KEYS[source.key] is VALID)
        ]
        if not images_only:
            for target in self.targets:
                if isinstance(target, Points):
                    target.apply(self._matrix)
            self._matrix = None
        values, keys = [source.current for source in selected], [source.key for source in selected]
        types = {position: source.types for position, source in enumerate(selected) if source.key == "input"}
        results = op.run(values, keys, draws, self.device, types)
        for source, value in zip(selected, results, strict=True):
            if source.key == "input":
                # Two calls, because to(dtype, memory_format) does not change the strides of a tensor that has the dtype.
                value = converted(value, dtype or value.dtype).contiguous(memory_format=memory_format)
            source.current = value

    def check_size(self, op: EagerOp, size: Size) -> None:
        """Raise an error if ``op``, which has run, returned images of another size than ``size``.

        The draws of the following modules assume this size.

        Raises:
            ArgumentError: If the images do not have ``size``.
        """
        shape = tuple(self._first_images.value.shape)
        if shape != (size.images, size.channels, size.height, size.width):
            raise ArgumentError(
                f"{op.name} must return images of {(size.images, size.channels, size.height, size.width)}, the size that was "
                f"drawn, got {shape}. Put the module into a separate stage, and the modules after it into another."
            )

    @property
    def _first_images(self) -> Dense:
        return next(source for source in self._dense if source.key == "input")

    @property
    def _source(self) -> Any:
        """(height, width) of the images, or ``layouts``."""
        return (self.size.height, self.size.width) if self.layouts is None else self.layouts

    def results(self, *, keepdim: bool, views: int = 1) -> Any:
        """Return the outputs of the call: a list in the order of the inputs; the images alone if they were the only input.

        Args:
            keepdim: Whether a single image without a batch axis is returned without a batch axis.
            views: Number of views, that is, random augmentations of each image. The outputs are those of one view.
        """
        self.keepdim, self.views = keepdim, views
        height, width = self._first_images.value.shape[2:]
        self.out = int(height), int(width)
        """Height and width of the output images."""
        if self.has_points:
            matrix = self._matrix
            if matrix is None:
                matrix = torch.eye(3, dtype=torch.float32, device=self.device).expand(self.size.batch, 3, 3)
            for target in self.targets:
                if isinstance(target, Points):
                    target.transform(matrix, self._source, self.out, self.conversions)
        values = [source.output() for source in self.inputs]
        return values[0] if len(values) == 1 else values


_SIMPLE_KEYS = frozenset({"input", "targets", "tv_tensors", *DATA_KEYS})
"""Data keys whose name is in lower case already."""
