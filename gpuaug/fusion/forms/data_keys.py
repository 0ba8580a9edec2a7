"""Names and checks of inputs. A *data key* says what an input of a call holds, such as ``"input"`` for images or ``"mask"``.

Data keys are Kornia's names, and three names of gpuaug: ``"targets"`` for target dicts (one dict of annotations per image),
``"tv_tensors"`` for containers of torchvision's tensors, and ``"valid"`` for the (B, N) mask of the boxes that are not padding.

Error messages end with *advice*: a sentence that says how to change the call. Functions ``_advice_…`` return it.
"""

import functools
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NoReturn

import numpy as np
import torch
from kornia.constants import DataKey
from kornia.geometry.boxes import Boxes
from kornia.geometry.keypoints import Keypoints
from torch import Tensor

from gpuaug.core.encoded import Encoded
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, DeviceError, shown
from gpuaug.core.ragged import Ragged
from gpuaug.core.targets import BOXES, MASKS, TARGET_KEYS, holds_targets
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.boxes import KORNIA_FORMATS, check_form
from gpuaug.fusion.pixels import IMAGE_DTYPES

_NAMES: dict[Any, str] = {DataKey.IMAGE: "input", DataKey.LABEL: "class"}
"""Member of Kornia's ``DataKey`` → its name in gpuaug, for members with several names in Kornia.

Other members have their own name in lower case.
"""

_GPUAUG_KEYS = ("targets", "tv_tensors", "valid")
"""Data keys that Kornia does not have."""


def names_of(data_keys: Sequence[Any]) -> list[str]:
    """Return the names of the data keys of a call, which may be strings or members of Kornia's ``DataKey``.

    Raises:
        ArgumentTypeError: If ``data_keys`` is not a sequence of names.
        ArgumentError: If a name is not a data key.
    """
    is_sequence = isinstance(data_keys, Sequence) and not isinstance(data_keys, str | bytes)
    if is_sequence and all(isinstance(key, str | int | Enum) for key in data_keys):
        return list(map(_name_of, data_keys))
    advice = "Name each input in a list: data_keys=['input', 'mask']."
    raise ArgumentTypeError(f"data_keys must be a list of names, got {shown(data_keys)}. {advice}")


@functools.cache
def _name_of(key: Any) -> str:
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


_ADVICE_FOR_DICTS = "Name a list of one dict for each image 'targets', and pass the values of one dict with their data keys."
"""Advice if target dicts are passed with another data key than ``"targets"``."""


def _advice_for_samples(key: str, value: Any) -> str:
    """Return the advice for an input with data key ``key`` that is not one tensor for the whole batch."""
    if key == "input" and isinstance(value, Mapping):
        return (
            "Pass its values with their data keys: augment(batch['image'], batch['mask'], data_keys=['input', 'mask']), or in "
            "a stage on={'image': 'input', 'mask': 'mask'}."
        )
    if key == "input":
        return "Convert images to tensors in the dataset, as v2.ToImage() does, and pass one tensor (B, C, H, W)."
    if isinstance(value, Boxes | Keypoints):  # ``torch.as_tensor`` cannot convert Kornia's objects
        return f"Pass its attribute data with the data key '{'bbox' if isinstance(value, Boxes) else 'keypoints'}'."
    if isinstance(value, Ragged):
        return _advice_for_ragged(key, value)
    if isinstance(value, Mapping) or (isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value)):
        return _ADVICE_FOR_DICTS
    if not isinstance(value, list | tuple) or not all(isinstance(sample, Tensor) for sample in value):
        try:
            torch.as_tensor(value, device="cpu")
        except Exception:
            return "Pass one tensor for the whole batch."
        return "Pass one tensor for the whole batch: torch.as_tensor(…)."
    padded = "Pad the samples to one length: torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)"
    dicts = ", or pass a dict for each image, {'boxes': …}, with the data key 'targets'" if key in BOXES.data_keys else ""
    return f"{padded}{dicts}."


def _advice_for_ragged(key: str, value: Ragged) -> str:
    """Return the advice for ragged images, which differ in size, with another data key than ``"input"``."""
    if key != "mask":
        return "Name images 'input'."
    if value.shapes.frames:
        return "Pass a dict per frame, with the data key 'targets': [{'masks': mask} for mask in masks]."
    return (
        "Pass one mask per image: list(masks), in a loader by gpuaug.TransformStage(lambda masks: list(masks), on=…) before "
        "this stage."
    )


def _advice_for(dtype: torch.dtype) -> str:
    """Return the advice for images of an unsupported dtype."""
    if dtype.is_complex:
        return "Pass their magnitudes, scaled to [0, 1]: images.abs()."
    # torchvision's to_dtype does not scale uint32 and uint64.
    unsigned = "images.float() / torch.iinfo(images.dtype).max"
    conversion = (
        unsigned if dtype in (torch.uint32, torch.uint64) else "v2.functional.to_dtype(images, torch.float32, scale=True)"
    )
    return f"Scale them to [0, 1] first, by the largest value of their type: {conversion}."


def _advice_for_list(values: Sequence[Any]) -> str:
    """Return the advice for a list of images, or of batches of clips, as for several clips per video."""
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
    """Raise an error if the type, dtype or number of axes of an input does not fit its data key ``key``.

    ``check_fit`` checks the shape against the images. Ragged images are checked by ``size_of`` instead.

    Raises:
        ArgumentTypeError: If ``value`` is not a tensor, or images have an unsupported dtype.
        ArgumentError: If images or masks have another number of axes, or images require gradients.
    """
    if key == "input" and isinstance(value, Ragged):
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
    """Raise an error if a second input of images does not have the size of the first: both share the random parameters.

    Raises:
        ArgumentError: If ``size``, of the second input, is not ``first``, of the first input.
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


def check_device(name: str, value: Tensor, device: torch.device) -> None:
    """Raise an error if a tensor is not on the device of the images. ``name``: name of the tensor for the message.

    Raises:
        DeviceError: If ``value`` is not on ``device``.
    """
    if value.device != device:
        raise DeviceError(f"{name} must be on {device}, where the images are, got {value.device}. Move it to that device.")


def check_canvas(name: str, canvas: Any, sides: tuple[int, int]) -> None:
    """Raise an error if the attribute ``canvas_size`` of torchvision's boxes or keypoints is not the size of their image.

    Args:
        name: Name of the boxes or keypoints for the message.
        canvas: The attribute, (height, width); ``None`` if they do not have it.
        sides: (height, width) of the image.

    Raises:
        ArgumentError: If ``canvas`` is not ``None`` and differs from ``sides``.
    """
    if canvas is not None and tuple(canvas) != sides:
        raise ArgumentError(
            f"canvas_size of {name} must be the size of the image, {sides}, got {tuple(canvas)}. Resize "
            "boxes with their image: pass both to the transform that resizes in the dataset."
        )


def refuse_boxes(boxes: str, clamping_mode: Any, box_format: str) -> NoReturn:
    """Raise the error for ``tv_tensors.BoundingBoxes`` with unsupported attributes.

    Args:
        boxes: Name of the boxes for the message.
        clamping_mode: Their attribute ``clamping_mode``; unsupported if ``None``.
        box_format: Name of their format; unsupported if the boxes are rotated.

    Raises:
        ArgumentError: Always.
    """
    if clamping_mode is None:
        raise ArgumentError(
            f"clamping_mode of {boxes} must be 'soft' or 'hard', got None. Boxes are always clipped to the image: leave "
            "clamping_mode out."
        )
    raise ArgumentError(
        f"{boxes} must be axis-aligned, got {box_format.upper()}. Pass the boxes around their corners, (n, 4, 2): "
        "torch.cat((corners.amin(1), corners.amax(1)), 1)."
    )


def advice_for_masks(masks: Any) -> str:
    """Return the advice for masks of one image that are not a tensor, such as a list, NumPy arrays or COCO's annotations."""
    first = masks[0] if isinstance(masks, list | tuple) and masks else masks
    if isinstance(first, Tensor):
        return "Stack the masks of one image: torch.stack(masks)."
    if isinstance(first, np.ndarray):
        code = "masks" if first is masks else "np.stack(masks)"
        return f"Convert the masks in the dataset: torch.from_numpy({code})."
    if isinstance(first, Mapping) and "counts" not in first:
        return _ADVICE_FOR_DICTS
    if isinstance(first, Mapping | list | tuple):  # COCO's run lengths, a dict with "counts", or polygons, lists of numbers
        code = "[masks]" if first is masks else "masks"
        if not isinstance(first, Mapping) or not isinstance(first.get("counts"), str | bytes):
            code = f"mask.frPyObjects({code}, height, width)"
        return (
            "Decode run lengths and polygons in the dataset, with pycocotools.mask as mask: "
            f"torch.from_numpy(mask.decode({code})).movedim(2, 0)."
        )
    return "Return a tensor (n, H, W) from the dataset."


def check_fit(key: str, value: Tensor, user_value: Tensor, size: Size, device: torch.device) -> None:
    """Raise an error if masks, boxes, keypoints or ``valid`` do not fit the images.

    Args:
        key: Data key of the input.
        value: The input with a batch axis, and with the frame axis of clips merged (``Dense``).
        user_value: The input as the user passed it.
        size: Size of the images.
        device: Device of the images.

    Raises:
        ArgumentError: If the shape does not fit the key or the images.
        DeviceError: If the input is on another device.
    """
    if key in KORNIA_FORMATS:
        check_form(value, key)
        sample = size.sample(0)
        check_canvas(key, getattr(user_value, "canvas_size", None), (sample.height, sample.width))
    check_device(key, value, device)
    are_masks = key in MASKS.data_keys
    if len(value) != (size.images if are_masks else size.batch):
        raise ArgumentError(
            f"{key} must hold one entry for each of the {size.batch} images, got {tuple(user_value.shape)}. "
            "Pass one entry per image."
        )
    if not are_masks:
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


def check_labels(labels: Any, size: Size) -> None:
    """Raise an error if the input ``class`` holds masks, boxes or keypoints, which would not be transformed with the images.

    Raises:
        ArgumentError: If the last two axes of ``labels`` are the height and width of the images (``size``), or ``labels``
            contains target dicts or torchvision's tensors.
    """
    if isinstance(labels, Tensor) and labels.ndim > 2 and tuple(labels.shape[-2:]) == size.shape[2:]:
        raise ArgumentError(
            f"class must be one index for each image or class probabilities, got {tuple(labels.shape)}, one value for "
            "each pixel. Name the map 'mask': data_keys=['input', 'mask'], or in a stage on={0: 'input', 1: 'mask'}."
        )
    records = [record for record in (labels if isinstance(labels, list | tuple) else [labels]) if isinstance(record, Mapping)]
    if holds_targets(labels) or any(not TARGET_KEYS.keys().isdisjoint(record) for record in records):
        raise ArgumentError(
            f"class must be one index for each image or class probabilities, got {shown(labels)}, which has masks, boxes or "
            "keypoints. Name target dicts 'targets': data_keys=['input', 'targets'], and other containers 'tv_tensors'."
        )
