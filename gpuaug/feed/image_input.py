"""Images and clips in samples: checks and conversion of PIL images, arrays and tensors.

A parameter ``position`` is the position of a value in the samples as text, for error messages: ``sample 3 at ['image']``.
"""

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.batch import is_pil_image
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, add_note
from gpuaug.core.targets import type_name
from gpuaug.feed.collate_members import position_text

Channels = Literal[1, 3]
"""Number of channels of every image of a batch: 1 for grey, 3 for RGB."""

_UNCONVERTED_DTYPES = ("uint8", "uint16", "int16")
"""dtypes of images that are packed without conversion if ``channels=None``."""

_CHANNEL_NAMES = {1: "grey", 3: "RGB"}
_PIL_MODES = {1: "L", 3: "RGB"}
_STORED_MODES = ("L", "LA", "RGB", "RGBA", "I;16", "I;16L", "I;16N")
"""Modes of PIL images that are packed without conversion if ``channels=None``."""

_DEEP_MODES = ("I", "F")
"""First letters of PIL's modes with more than 8 bits, such as ``I;16``. PIL's conversion to 8 bits clamps values to 255."""

_LUMA = (19595, 38470, 7471)
"""PIL's weights of ITU-R 601 in 16-bit fixed point, so that arrays are converted to the same grey as PIL images."""


def is_image(value: Any, *, allow_16_bits: bool = False) -> bool:
    """Return whether ``value`` is an image: a PIL image, a uint8 array (H, W[, C]) or a uint8 tensor (C, H, W).

    Of torchvision's tensor classes, only ``tv_tensors.Image`` is an image.

    Args:
        value: A member of a sample.
        allow_16_bits: Whether uint16 and int16 arrays and tensors are images, too.
    """
    if isinstance(value, Tensor):
        return value.ndim == 3 and _dtype_fits(value, allow_16_bits=allow_16_bits) and type_name(value) in ("", "Image")
    if isinstance(value, np.ndarray):
        return value.ndim in (2, 3) and _dtype_fits(value, allow_16_bits=allow_16_bits)
    return is_pil_image(value)


def is_clip(value: Any, *, allow_16_bits: bool = False) -> bool:
    """Return whether ``value`` is a clip: a uint8 array (T, H, W, C), or a uint8 tensor or ``tv_tensors.Video`` (T, C, H, W).

    Args:
        value: A member of a sample.
        allow_16_bits: Whether uint16 and int16 arrays and tensors are clips, too.
    """
    if not isinstance(value, Tensor | np.ndarray) or value.ndim != 4 or not _dtype_fits(value, allow_16_bits=allow_16_bits):
        return False
    return type_name(value) in ("", "Video")


def frames_of(clips: Sequence[Any], path: str) -> list[Any]:
    """Return the frames of clips, clip by clip.

    Args:
        clips: Values of a member, one per sample. The first is a clip.
        path: Path of the member, for error messages.

    Raises:
        ArgumentError: If a value is an image, or a clip has no frames or another number of frames than the first clip.
        ArgumentTypeError: If a value is neither an image nor a clip.
    """
    frames: list[Any] = []
    for number, clip in enumerate(clips):
        if not is_clip(clip, allow_16_bits=True):
            if is_image(clip, allow_16_bits=True):
                _refuse_mixture(clip, position_text(number, path))
            refuse(clip, position_text(number, path))
        if not len(clip):
            _refuse_empty(clip, position_text(number, path))
        if len(clip) != len(clips[0]):
            raise ArgumentError(
                f"Clips of a batch must have as many frames as the first, {len(clips[0])}, got {len(clip)} in "
                f"{position_text(number, path)}. Return the same number of frames from the dataset."
            )
        frames.extend(clip)
    return frames


def as_stored(image: Any, like: NDArray[Any] | None, position: str) -> NDArray[Any]:
    """Return an image as an array (H, W, C) without conversion of channels and dtype.

    Args:
        image: A PIL image, or an array or tensor of uint8, uint16 or int16.
        like: First image of the batch, whose number of channels and dtype ``image`` must have; ``None`` for the first image.
        position: Position of the image in the batch, for error messages.

    Raises:
        ArgumentError: If ``image`` has another number of channels or dtype than ``like``, or no pixels.
        ArgumentTypeError: If ``image`` is not an image.
    """
    if not is_image(image, allow_16_bits=True):
        refuse(image, position)
    array = _channels_last(image, position)
    if str(array.dtype) not in _UNCONVERTED_DTYPES or (is_pil_image(image) and image.mode not in _STORED_MODES):
        raise ArgumentError(
            f"Images must be grey or RGB, of 8 or 16 bits, with channels=None, got {_image_text(image)} in {position}. Return "
            "image.convert('RGB') from the dataset."
        )
    if not array.size:
        _refuse_empty(image, position)
    if like is not None and (array.dtype, array.shape[2]) != (like.dtype, like.shape[2]):
        raise ArgumentError(
            f"Images of a batch must have the type and number of channels of the first, {like.dtype} and {like.shape[2]}, got "
            f"{array.dtype} and {array.shape[2]} in {position}. Convert images to the same format in the dataset."
        )
    return array


def refuse(value: Any, position: str) -> NoReturn:
    """Raise the error about ``value``, which is not an image.

    Raises:
        ArgumentTypeError: If ``value`` is no array or tensor, or has another dtype than uint8.
        ArgumentError: If ``value`` is a uint8 array or tensor with a wrong number of dimensions.
    """
    if isinstance(value, Tensor | np.ndarray):
        if value.dtype not in (torch.uint8, np.uint8):
            floating = value.is_floating_point() if isinstance(value, Tensor) else value.dtype.kind == "f"
            if floating:
                way_out = "Remove the conversion to float, such as ToTensor, from the dataset, and convert in gpuaug.fuse."
            else:
                way_out = _depth_advice(str(value.dtype).removeprefix("torch.") in ("uint16", "int16"))
            raise ArgumentTypeError(f"Images must be uint8, got {value.dtype} in {position}. {way_out}")
        if is_clip(value):
            _refuse_mixture(value, position)
        raise ArgumentError(
            "Images must be (H, W) or (H, W, C) in arrays and (C, H, W) in tensors, and clips (T, H, W, C) and (T, C, H, W), "
            f"got {_image_text(value)} in {position}. For a grey tensor (H, W), return image[None]."
        )
    raise ArgumentTypeError(
        "Images must be PIL images, uint8 arrays (H, W, C) or uint8 tensors (C, H, W), "
        f"got {type(value).__name__} in {position}. Decode the image in the dataset: PIL.Image.open(…) or cv2.imread(…)."
    )


def _depth_advice(has_16_bits: bool) -> str:
    """Return the advice for an image of more than 8 bits."""
    if has_16_bits:
        return "Pack such images without conversion: functools.partial(gpuaug.collate_ragged, channels=None)."
    return "Scale the image to 8 bits in the dataset."


def with_channels(image: Any, channels: Channels, *, convert: bool, position: str) -> Any:
    """Return an image with ``channels`` channels: a PIL image for a PIL image, otherwise an array (H, W, C).

    Raises:
        ArgumentError: If ``image`` has no pixels, or has another number of channels and ``convert`` is false or impossible.
        ArgumentTypeError: If ``image`` is not an image.
    """
    if not is_image(image):
        refuse(image, position)
    if is_pil_image(image):
        return _pil_with_channels(image, channels, convert=convert, position=position)
    array = _channels_last(image, position)
    if not 1 <= array.shape[2] <= 4:
        raise ArgumentError(
            "Images must have 1 to 4 channels, which come first in tensors and last in arrays, "
            f"got {_image_text(image)} in {position}. Permute the axes: image.permute(2, 0, 1) of a tensor, "
            "image.transpose(1, 2, 0) of an array. If the value is not an image, put it into a dict of targets."
        )
    if not array.size:
        _refuse_empty(image, position)
    image_channels = array.shape[2]
    if image_channels == channels:
        return array
    if not convert:
        _refuse_channels(image, channels, position)
    if image_channels <= 2:  # grey, perhaps with an alpha channel
        return np.broadcast_to(array[..., :1], (*array.shape[:2], channels))
    return array[..., :3] if channels == 3 else _grey(array)


def sizes_of(images: Sequence[Any]) -> NDArray[np.int64]:
    """Return (B, 2) heights and widths of images that ``with_channels`` or ``as_stored`` returned."""
    return np.array([image.size[::-1] if is_pil_image(image) else image.shape[:2] for image in images], dtype=np.int64)


def as_array(image: Any) -> NDArray[np.uint8]:
    """Return a PIL image or an array (H, W[, C]) as an array (H, W, C)."""
    array: NDArray[np.uint8] = np.asarray(image)
    return array if array.ndim == 3 else array[..., None]


def copy_pixels(image: Any, target: NDArray[Any]) -> None:
    """Copy a PIL image, or an array (H, W[, C]) of any strides, to ``target``, (H, W, C)."""
    pixels = as_array(image)
    if pixels.strides[1:] == target.strides[1:]:  # whole rows
        target[:] = pixels
    else:  # by channel, because NumPy's inner loop would run over 3 channels: 674x450 pixels take 0.3 ms, and would take 1.3
        for channel in range(target.shape[2]):
            target[..., channel] = pixels[..., channel]


def stored_values(image: Any, label_max: int) -> NDArray[np.uint8]:
    """Return a grey or palette PIL image as an array (H, W, 1) of the values in its file, without alpha.

    Args:
        image: PIL image of mode ``1``, ``L``, ``LA``, ``P`` or ``PA``.
        label_max: Stored value that PIL decodes to 255. PIL scales grey of less than 8 bits to 0 … 255.
    """
    values = as_array(image.convert("L") if image.mode == "1" else image)[..., :1]
    return values if label_max == 255 else ((values.astype(np.uint16) * label_max + 127) // 255).astype(np.uint8)


def _pil_with_channels(image: Any, channels: Channels, *, convert: bool, position: str) -> Any:
    if 0 in image.size:
        _refuse_empty(image, position)
    if image.mode.startswith(_DEEP_MODES):
        raise ArgumentError(
            f"Images must have 8 bits per channel, got {_image_text(image)} in {position}. "
            f"{_depth_advice(image.mode in _STORED_MODES)}"
        )
    mode = _PIL_MODES[channels]
    if image.mode != mode and not convert:
        _refuse_channels(image, channels, position)
    try:
        image.load()  # PIL decodes an image when it is first used
        return image if image.mode == mode else image.convert(mode)
    except Exception as error:
        add_note(error, f"gpuaug: raised by PIL for the image in {position}.")
        raise


def _channels_last(image: Any, position: str) -> NDArray[Any]:
    """View an image as an array (H, W, C)."""
    if not isinstance(image, Tensor):
        return as_array(image)
    if not image.is_cpu:
        raise ArgumentError(f"Images must be on the host, got one on {image.device} in {position}. Return image.cpu().")
    return image.numpy().transpose(1, 2, 0)


def _grey(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Convert RGB (H, W, 3 or 4) to grey (H, W, 1)."""
    red, green, blue = (array[..., channel].astype(np.uint32) * weight for channel, weight in enumerate(_LUMA))
    return ((red + green + blue + 0x8000) >> 16).astype(np.uint8)[..., None]


def _refuse_mixture(value: Any, position: str) -> NoReturn:
    raise ArgumentError(
        f"A member must be an image in all samples or a clip in all samples, got {_image_text(value)} in {position}. "
        "Return either images or clips from the dataset."
    )


def _refuse_channels(image: Any, channels: Channels, position: str) -> NoReturn:
    raise ArgumentError(
        f"Images must be {_CHANNEL_NAMES[channels]}, got {_image_text(image)} in {position}. "
        f"Return image.convert({_PIL_MODES[channels]!r}) from the dataset, or let the collate function convert such images: "
        "functools.partial(gpuaug.collate_ragged, convert=True). If the value is a mask, return "
        "torchvision.tv_tensors.Mask(mask) from the dataset."
    )


def _refuse_empty(image: Any, position: str) -> NoReturn:
    raise ArgumentError(f"Images must have pixels, got {_image_text(image)} in {position}. Leave the image out of the dataset.")


def _image_text(image: Any) -> str:
    """Return the mode and size, or the shape, of an image as text."""
    if is_pil_image(image):
        return f"a PIL image of mode {image.mode!r} and size {image.size}"
    return f"{'a tensor' if isinstance(image, Tensor) else 'an array'} of shape {tuple(image.shape)}"


def _dtype_fits(value: Tensor | NDArray[Any], *, allow_16_bits: bool) -> bool:
    """Return whether ``value`` is uint8, or with ``allow_16_bits`` uint16 or int16."""
    return str(value.dtype).removeprefix("torch.") in (_UNCONVERTED_DTYPES if allow_16_bits else ("uint8",))
