"""Data keys: names that say what each input of a call holds, such as ``"input"`` for images or ``"mask"``.

They are Kornia's names, and three names of gpuaug: ``"targets"`` for target dicts (one dict of annotations per image),
``"tv_tensors"`` for containers of torchvision's tensors, and ``"valid"`` for the mask of the boxes that are not padding.
"""

import functools
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from kornia.constants import DataKey
from kornia.geometry.boxes import Boxes
from kornia.geometry.keypoints import Keypoints
from torch import Tensor

from gpuaug.core.encoded import Encoded
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, shown
from gpuaug.core.ragged import Ragged
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.pixels import IMAGE_DTYPES

_NAMES: dict[Any, str] = {DataKey.IMAGE: "input", DataKey.LABEL: "class"}
"""gpuaug's names of data keys for which Kornia has several names."""

_GPUAUG_KEYS = ("targets", "tv_tensors", "valid")
"""Data keys that Kornia does not have."""

BOXES = ("bbox", "bbox_xyxy", "bbox_xywh")
"""Data keys of boxes: (B, N, 4), or (B, N, 4, 2) for ``"bbox"``, padded to N boxes per image."""


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
    dicts = ", or pass a dict for each image, {'boxes': …}, with the data key 'targets'" if key in BOXES else ""
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


def check_canvas(name: str, value: Tensor, size: Size) -> None:
    """Raise an error if the ``canvas_size`` of torchvision's boxes or keypoints is not the size of the images.

    Raises:
        ArgumentError: If ``canvas_size`` of ``value`` is not (height, width) of ``size``.
    """
    canvas = getattr(value, "canvas_size", None)
    if canvas is not None and tuple(canvas) != (size.height, size.width):
        raise ArgumentError(
            f"canvas_size of {name} must be the size of the image, {(size.height, size.width)}, got {tuple(canvas)}. Resize "
            "boxes with their image: pass both to the transform that resizes in the dataset."
        )


def check_not_segmentation_map(labels: Any, size: Size) -> None:
    """Raise an error if labels have the size of the images, because they are then a segmentation map, not classes.

    Raises:
        ArgumentError: If the labels have the size of the images.
    """
    if isinstance(labels, Tensor) and labels.ndim > 2 and tuple(labels.shape[-2:]) == size.shape[2:]:
        raise ArgumentError(
            f"class must be one index for each image or class probabilities, got {tuple(labels.shape)}, one value for "
            "each pixel. Name the map 'mask': data_keys=['input', 'mask'], or in a stage on={0: 'input', 1: 'mask'}."
        )


def check_valid(keys: Sequence[str], values: Sequence[Any]) -> None:
    """Check the input ``valid``. ``keys``: data key of each of ``values``.

    Raises:
        ArgumentError: If ``valid`` is not one bool per box, or if there is not exactly one tensor of boxes.
    """
    if "valid" not in keys:
        return
    if keys.count("valid") > 1 or sum(key in BOXES for key in keys) != 1:
        raise ArgumentError(
            f"data_keys must hold one of {', '.join(BOXES)} together with 'valid', got {keys}. "
            "Name 'valid' once, for one tensor of boxes."
        )
    valid = values[keys.index("valid")]
    boxes = next(value for key, value in zip(keys, values, strict=True) if key in BOXES)
    if valid.dtype != torch.bool or valid.shape != boxes.shape[:2]:
        raise ArgumentError(
            f"valid must be one bool for each box, torch.bool {tuple(boxes.shape[:2])}, got {valid.dtype} "
            f"{tuple(valid.shape)}. Mark the boxes that are not padding: arange(N) < counts[:, None]."
        )
