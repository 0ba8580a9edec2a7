"""Inputs in one tensor for all images, each named by a *data key*, such as ``"input"`` for images or ``"mask"``.

Data keys are Kornia's names, and three names of gpuaug: ``"targets"`` for target dicts (one dict of annotations per image),
``"tv_tensors"`` for containers of torchvision's tensors, and ``"valid"`` for the mask of the boxes that are not padding.

Of clips, (B, T, C, H, W), the passes read the frames as images: the frame axis is merged with another axis, and restored.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from kornia.constants import DataKey
from kornia.geometry.boxes import Boxes
from kornia.geometry.keypoints import Keypoints
from torch import Tensor

from gpuaug.core.encoded import Encoded
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, shown
from gpuaug.core.ragged import Ragged
from gpuaug.core.targets import BOXES, DATA_KEYS, MASKS, VALID, type_name, with_class_of
from gpuaug.fusion.forms.kinds import Masks, Points, check_device
from gpuaug.fusion.forms.slots import check_canvas
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.boxes import KORNIA_FORMATS, axes_per_box, check_form, floating_dtype
from gpuaug.fusion.pixels import IMAGE_DTYPES

if TYPE_CHECKING:
    from gpuaug.fusion.forms.record import Record

_NAMES: dict[Any, str] = {DataKey.IMAGE: "input", DataKey.LABEL: "class"}
"""gpuaug's names of data keys for which Kornia has several names."""

_GPUAUG_KEYS = ("targets", "tv_tensors", "valid")
"""Data keys that Kornia does not have."""


class Input(ABC):
    """Input of a call: an adapter from the user's form to the record, and back.

    Args:
        key: Data key.
        record: Record of the call.
    """

    targets: Sequence[Points | Masks] = ()
    """The targets in one form."""

    def __init__(self, key: str, record: "Record") -> None:
        self.key, self._record = key, record

    @property
    def all_keys(self) -> list[str]:
        """Data key of the input, then of the targets that are recognized in it by class."""
        return [self.key]

    @abstractmethod
    def output(self) -> Any:
        """Return the result in the form of the input."""


class Dense(Input):
    """Images, masks, boxes, keypoints or ``valid`` in one tensor.

    Args:
        key: Data key.
        value: The tensor, or ragged images.
        record: Record of the call, which has read the images.

    Raises:
        ArgumentTypeError: If the input does not have the type that its key requires.
        ArgumentError: If its shape does not fit its key, or the images.
        DeviceError: If it is not on the device of the images.
    """

    def __init__(self, key: str, value: Any, record: "Record") -> None:
        super().__init__(key, record)
        check_input(key, value)
        self._source = value
        self._kind = DATA_KEYS.get(key)
        box_format = KORNIA_FORMATS.get(key)
        # Axes of a tensor for all images: (B, C, H, W), (B, N, …).
        axes = 4 if self._kind in (None, MASKS) else 2 if box_format is None else 2 + axes_per_box(box_format)
        if key == "input" and value is not record.images:
            check_same_size(record.size, record.size_of(value))
        is_tensor = isinstance(value, Tensor)
        self._has_frames = bool(record.frames) and (self._kind in (None, MASKS) or value.ndim == axes + 1)
        value = self._frames_merged(value) if self._has_frames and is_tensor else value
        self._axis: int | None = None
        """Axis that was added: the batch axis of a single sample, or the channel axis of masks."""
        if is_tensor and value.ndim == axes - 1:
            # As in Kornia, an image without a batch axis is a batch of one, and masks without a channel axis have one channel.
            if self._kind is MASKS or key == "input":
                self._axis = 0 if key == "input" or record.is_unbatched else 1
            elif record.size.batch == 1:
                self._axis = 0
        self.value: Any = value if self._axis is None else value.unsqueeze(self._axis)
        self.place: tuple[Any, str] = self, "value"
        """Object and name of its attribute that holds the values in their current state."""
        self.types = [type(value) if type_name(value) else Tensor] * record.size.batch if key == "input" else []
        """Class per image or clip that a module of torchvision would get."""
        if key != "input":
            self._check_fit()
        if self._kind is MASKS:
            self.targets = [Masks(self.value)]
        elif box_format is not None:
            self.targets = [Points(self.value, box_format, floating_dtype(value.dtype))]
        if self.targets:
            self.place = self.targets[0], "values"

    def _frames_merged(self, value: Tensor) -> Tensor:
        """Merge the frame axis with another axis.

        Images and masks (B, T, …) become (B · T, …), boxes and keypoints (B, T, n, …) become (B, T · n, …).
        """
        layout = self._record.clip_layout
        if self.key == "input":
            plain = value.as_subclass(Tensor)
            return layout.images(plain[None] if self._record.is_single_clip else plain)
        if self._kind is MASKS:
            return layout.images(value) if value.ndim == 5 else value.flatten(0, 1)
        return value.flatten(0, 1) if layout.draws_per_frame else value.flatten(1, 2)

    def _frames_restored(self, result: Tensor) -> Tensor:
        """Invert ``_frames_merged``, for the frames of the output."""
        source, frames = self._source, len(self._record.frame_indices)
        if self.key == "input" or (self._kind is MASKS and source.ndim == 5):
            return self._record.clip_layout.clips(result, frames)
        if self._kind is MASKS:
            return result.unflatten(0, (-1, frames))
        return result.reshape(len(source), -1, source.shape[2], *result.shape[2:])

    def select_frames(self, indices: Tensor, frames: int) -> None:
        """Select frames of masks, boxes, keypoints or ``valid``. The kernels select the images.

        Args:
            indices: Indices of the selected frames.
            frames: Number of frames per clip.
        """
        if not self._has_frames or self.key == "input":
            return
        axis = 0 if self._kind is MASKS else 1
        values = self.current
        per_frame = values.unflatten(axis, (frames, -1) if axis else (-1, frames))
        self.current = torch.index_select(per_frame, 1, indices).flatten(axis, axis + 1)

    @property
    def current(self) -> Any:
        """The values in their current state, between the passes."""
        return getattr(*self.place)

    @current.setter
    def current(self, value: Any) -> None:
        setattr(*self.place, value)

    def _check_fit(self) -> None:
        """Raise an error if the input does not fit the images."""
        key, value, source, size = self.key, self.value, self._source, self._record.size
        if key in KORNIA_FORMATS:
            check_form(value, key)
            sample = size.sample(0)
            check_canvas(key, getattr(source, "canvas_size", None), (sample.height, sample.width))
        check_device(key, value, self._record.device)
        if len(value) != (size.images if self._kind is MASKS else size.batch):
            raise ArgumentError(
                f"{key} must hold one entry for each of the {size.batch} images, got {tuple(source.shape)}. "
                "Pass one entry per image."
            )
        if self._kind is not MASKS:
            return
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

    def output(self) -> Any:
        """Return the result in the form of the input."""
        record, source, result = self._record, self._source, self.current
        keepdim, views = record.keepdim, record.views
        # As in Kornia, boxes and keypoints keep the shape of the input. Several views need the batch axis.
        keeps = keepdim or self._kind not in (None, MASKS)
        if self._axis is not None and (views == 1 or self._axis) and keeps:
            result = result.squeeze(self._axis)
        if self._has_frames:
            result = self._frames_restored(result)
        if self.key == "input" and record.is_single_clip and views == 1 and keepdim:
            result = result[0]
        if self._kind is MASKS and record.conversions.masks is not None:
            result = result.to(record.conversions.masks)
        is_typed = self._kind in (None, MASKS) and isinstance(source, Tensor) and not record.conversions.is_pure
        return with_class_of(result, source) if is_typed else result

class Labels(Input):
    """Labels of all images, of any type unless they are mixed or converted."""

    def __init__(self, key: str, value: Any, record: "Record") -> None:
        super().__init__(key, record)
        self.value = value
        size = record.size
        if isinstance(value, Tensor) and value.ndim > 2 and tuple(value.shape[-2:]) == size.shape[2:]:
            raise ArgumentError(
                f"class must be one index for each image or class probabilities, got {tuple(value.shape)}, one value for "
                "each pixel. Name the map 'mask': data_keys=['input', 'mask'], or in a stage on={0: 'input', 1: 'mask'}."
            )

    def check(self) -> None:
        """Raise an error if labels are not a tensor on the device of the images."""
        if not isinstance(self.value, Tensor):
            raise ArgumentTypeError(f"class must be a tensor, got {type(self.value).__name__}. Pass one index for each image.")
        check_device(self.key, self.value, self._record.device)

    def output(self) -> Any:
        """Return the labels."""
        return self.value


def checked_keys(data_keys: Sequence[Any]) -> tuple[Any, ...]:
    """Check the types of the data keys of a call, and return the keys as a tuple.

    Raises:
        ArgumentTypeError: If ``data_keys`` is not a sequence of names.
    """
    is_sequence = isinstance(data_keys, Sequence) and not isinstance(data_keys, str | bytes)
    if is_sequence and all(isinstance(key, str | int | Enum) for key in data_keys):
        return tuple(data_keys)
    advice = "Name each input in a list: data_keys=['input', 'mask']."
    raise ArgumentTypeError(f"data_keys must be a list of names, got {shown(data_keys)}. {advice}")


@functools.cache
def name_of(key: Any) -> str:
    """Return the name of a data key: one string for all names that Kornia has for the key.

    Raises:
        ArgumentError: If ``key`` is not a data key.
    """
    if key in _GPUAUG_KEYS:
        return str(key)
    try:
        data_key = DataKey.get(key)
    except Exception as error:
        names = sorted({*_GPUAUG_KEYS, *(_NAMES.get(data_key, data_key.name.lower()) for data_key in DataKey)})
        raise ArgumentError(
            f"data_keys must be among {', '.join(names)}, got {shown(key)}. Use Kornia's names, 'targets' for target dicts, "
            "'tv_tensors' for torchvision's tensors, or 'valid' beside boxes."
        ) from error
    return str(_NAMES.get(data_key, data_key.name.lower()))


def _advice_for_samples(key: str, value: Any) -> str:
    """Return the advice of the error for an input that is not one tensor for the whole batch."""
    if key == "input" and isinstance(value, Mapping):
        return (
            "Pass its values with their data keys: augment(batch['image'], batch['mask'], data_keys=['input', 'mask']), or in "
            "a stage on={'image': 'input', 'mask': 'mask'}."
        )
    if key == "input":
        return "Convert images to tensors in the dataset, as v2.ToImage() does, and pass one tensor (B, C, H, W)."
    if isinstance(value, Boxes | Keypoints):  # torch cannot convert them
        return f"Pass its attribute data with the data key '{'bbox' if isinstance(value, Boxes) else 'keypoints'}'."
    if isinstance(value, Ragged):
        return _advice_for_ragged(key, value)
    if not isinstance(value, list | tuple) or not all(isinstance(sample, Tensor) for sample in value):
        try:
            torch.as_tensor(value)
        except Exception:
            return "Pass one tensor for the whole batch."
        return "Pass one tensor for the whole batch: torch.as_tensor(…)."
    padded = "Pad the samples to one length: torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)"
    dicts = ", or pass a dict for each image, {'boxes': …}, with the data key 'targets'" if key in BOXES.layouts else ""
    return f"{padded}{dicts}."


def _advice_for_ragged(key: str, value: Ragged) -> str:
    """Return the advice of the error for ragged images with another data key than ``"input"``."""
    if key != "mask":
        return "Name images 'input'."
    if value.shapes.frames:
        return "Pass a dict per frame, with the data key 'targets': [{'masks': mask} for mask in masks]."
    return (
        "Pass one mask per image: list(masks), in a loader by gpuaug.TransformStage(lambda masks: list(masks), on=…) before "
        "this stage."
    )


def _advice_for(dtype: torch.dtype) -> str:
    """Return the advice of the error for images of an unsupported dtype."""
    if dtype.is_complex:
        return "Pass their magnitudes, scaled to [0, 1]: images.abs()."
    # torchvision scales uint32 and uint64 by 1.
    unsigned = "images.float() / torch.iinfo(images.dtype).max"
    conversion = (
        unsigned if dtype in (torch.uint32, torch.uint64) else "v2.functional.to_dtype(images, torch.float32, scale=True)"
    )
    return f"Scale them to [0, 1] first, by the largest value of their type: {conversion}."


def _advice_for_list(values: Sequence[Any]) -> str:
    """Return the advice of the error for a list of images, or of batches, such as several clips per video."""
    if values and all(isinstance(value, Ragged) or getattr(value, "ndim", 0) == 5 for value in values):
        return (
            "Augment each batch of clips separately: lambda clips: [f(clip) for clip in clips], where f is this pipeline, in a "
            "loader by gpuaug.TransformStage(lambda clips: [f(clip) for clip in clips], on=…)."
        )
    return (
        "Stack images of one size: torch.stack(…); pack images of several sizes: gpuaug.collate_ragged(…), for "
        "gpuaug.fuse(…, ragged=True)."
    )


def check_input(key: str, value: Any) -> None:
    """Raise an error if images, masks, boxes, keypoints or ``valid`` do not have the type or shape that ``key`` requires.

    Ragged images, lists of masks, and inputs with other data keys are checked elsewhere.

    Raises:
        ArgumentTypeError: If ``value`` has another type.
        ArgumentError: If ``value`` has another shape, or requires gradients.
    """
    may_differ_in_size = isinstance(value, Ragged) if key == "input" else key == "mask" and isinstance(value, list | tuple)
    if may_differ_in_size or key in ("class", "targets", "tv_tensors"):
        return
    if key == "input" and isinstance(value, list | tuple):
        raise ArgumentTypeError(
            f"input must be a tensor or a gpuaug.Ragged, got {type(value).__name__}. {_advice_for_list(value)}"
        )
    if isinstance(value, Encoded):
        raise ArgumentTypeError(
            f"{key} must be decoded, got {value}. Put a gpuaug.DecodeStage() before this stage. It returns a gpuaug.Ragged."
        )
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(f"{key} must be a tensor, got {type(value).__name__}. {_advice_for_samples(key, value)}")
    if key in ("input", "mask") and value.ndim not in (3, 4, 5):
        merge_axes = "Merge the leading axes into one batch axis: x.flatten(0, -5)."
        advice = merge_axes if value.ndim > 5 else "In a stage, select the images with on=. Or add axes: x[None]."
        raise ArgumentError(
            f"{key} must be (B, C, H, W), one image (C, H, W), or clips (B, T, C, H, W), got {tuple(value.shape)}. {advice}"
        )
    if key == "input" and value.dtype not in IMAGE_DTYPES:
        raise ArgumentTypeError(
            f"images must be uint8, uint16, int16 or floating of 16 bits or more, got {value.dtype}. {_advice_for(value.dtype)}"
        )
    if key == "input" and value.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "images must not require gradients, got images that do: fused augmentations are not differentiable. "
            "Pass images.detach(), or use Kornia itself."
        )


def check_same_size(first: Size, size: Size) -> None:
    """Raise an error if further images do not have the size of the first images, because all inputs share the random numbers.

    Raises:
        ArgumentError: If ``size`` is not the size ``first``.
    """
    if size == first:
        return
    expected, received = str(first.shape), str(size.shape)
    if expected == received:  # the sides differ in some samples of two ragged batches
        heights_or_widths_differ = (np.asarray(first.height) != size.height) | (np.asarray(first.width) != size.width)
        sample = int(np.flatnonzero(heights_or_widths_differ)[0])
        expected, received = (f"{side.height}x{side.width}" for side in (first.sample(sample), size.sample(sample)))
        expected += f" in sample {sample}"
    raise ArgumentError(
        f"input must be of the same size as the first input, {expected}, got {received}. Use a separate stage for images of "
        "each size."
    )


def check_valid(inputs: Sequence[Input]) -> None:
    """Connect the input ``valid`` with the boxes of a call.

    Raises:
        ArgumentError: If ``valid`` is not one bool per box, or if there is not exactly one tensor of boxes.
    """
    keys = [key for source in inputs for key in source.all_keys]
    masks = [source for source in inputs if DATA_KEYS.get(source.key) is VALID]
    boxes = [source for source in inputs if DATA_KEYS.get(source.key) is BOXES]
    if not masks:
        return
    if len(masks) > 1 or len(boxes) != 1:
        raise ArgumentError(
            f"data_keys must hold one of {', '.join(BOXES.layouts)} together with 'valid', got {keys}. "
            "Name 'valid' once, for one tensor of boxes."
        )
    (valid,), (target,) = (source.value for source in masks), boxes[0].targets
    if valid.dtype != torch.bool or valid.shape != target.values.shape[:2]:
        raise ArgumentError(
            f"valid must be one bool for each box, torch.bool {tuple(target.values.shape[:2])}, got {valid.dtype} "
            f"{tuple(valid.shape)}. Mark the boxes that are not padding: arange(N) < counts[:, None]."
        )
    target.valid, target.clip = valid, True
    masks[0].place = target, "valid"
