"""Images and clips in samples: checks and conversion of PIL images, arrays and tensors."""

import sys
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, add_note
from gpuaug.feed.collate_members import where

Channels = Literal[1, 3]
"""Number of channels of every image of a batch: 1 for grey, 3 for RGB."""

_STORED = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.int16))
"""dtypes of images that are packed without conversion."""

_CHANNEL_NAMES = {1: "grey", 3: "RGB"}
_PIL_MODES = {1: "L", 3: "RGB"}
_STORED_MODES = ("L", "LA", "RGB", "RGBA", "I;16", "I;16L", "I;16N")
"""Modes of PIL in which pixels are stored as in the file."""

_DEEP_MODES = ("I", "F")
"""First letters of the modes of more than 8 bits, such as ``I;16``. PIL converts them by clamping values to 255."""

_LUMA = (19595, 38470, 7471)
"""PIL's weights of ITU-R 601 in 16-bit fixed point, so that arrays are converted to the same grey as PIL images."""


def is_image(value: Any, *, deep: bool = False) -> bool:
    """Whether ``value`` is an image: a PIL image, a uint8 array (H, W[, C]) or a uint8 tensor (C, H, W).

    Tensors of torchvision's other classes, such as masks, are not images.

    Args:
        value: A member of a sample.
        deep: Whether arrays and tensors of uint16 and int16 are images too.
    """
    if isinstance(value, Tensor):
        return value.ndim == 3 and _dtype_fits(value, deep=deep) and not _is_other_tv_tensor(value, "Image")
    if isinstance(value, np.ndarray):
        return value.ndim in (2, 3) and _dtype_fits(value, deep=deep)
    return _is_pil(value)


def is_clip(value: Any, *, deep: bool = False) -> bool:
    """Whether ``value`` is a clip: a uint8 array (T, H, W, C), or a uint8 tensor or ``tv_tensors.Video`` (T, C, H, W).

    Args:
        value: A member of a sample.
        deep: Whether arrays and tensors of uint16 and int16 are clips too.
    """
    if not isinstance(value, Tensor | np.ndarray) or value.ndim != 4 or not _dtype_fits(value, deep=deep):
        return False
    return not (isinstance(value, Tensor) and _is_other_tv_tensor(value, "Video"))


def frames_of(clips: Sequence[Any], path: str) -> list[Any]:
    """Return the frames of clips, clip by clip.

    Args:
        clips: Values of a member, one per sample. The first is a clip.
        path: Path of the member, for error messages.

    Raises:
        ArgumentError: If another value is an image, or a clip has no frames or another number of frames than the first.
        ArgumentTypeError: If another value is neither.
    """
    frames: list[Any] = []
    for number, clip in enumerate(clips):
        if not is_clip(clip, deep=True):
            if is_image(clip, deep=True):
                _refuse_mixture(clip, where(number, path))
            refuse(clip, where(number, path))
        if not len(clip):
            _refuse_empty(clip, where(number, path))
        if len(clip) != len(clips[0]):
            raise ArgumentError(
                f"Clips of a batch must have as many frames as the first, {len(clips[0])}, got {len(clip)} in "
                f"{where(number, path)}. Return the same number of frames from the dataset."
            )
        frames.extend(clip)
    return frames


def as_stored(image: Any, like: NDArray[Any] | None, where: str) -> NDArray[Any]:
    """Return an image as an array (H, W, C) without conversion of channels and dtype.

    Args:
        image: A PIL image, or an array or tensor of uint8, uint16 or int16.
        like: First image of the batch, whose number of channels and dtype ``image`` must have; ``None`` for the first image.
        where: Position of the image in the batch, for error messages.

    Raises:
        ArgumentError: If ``image`` has another number of channels or dtype than ``like``, or no pixels.
        ArgumentTypeError: If ``image`` is not an image.
    """
    if not is_image(image, deep=True):
        refuse(image, where)
    array = unpacked(image) if _is_pil(image) else _channels_last(image, where)
    if array.dtype not in _STORED or (_is_pil(image) and image.mode not in _STORED_MODES):
        raise ArgumentError(
            f"Images must be grey or RGB, of 8 or 16 bits, with channels=None, got {_described(image)} in {where}. Return "
            ".convert('RGB') of it from the dataset."
        )
    if not array.size:
        _refuse_empty(image, where)
    if like is not None and (array.dtype, array.shape[2]) != (like.dtype, like.shape[2]):
        raise ArgumentError(
            f"Images must have one type and number of channels in a batch, got {array.dtype} and {array.shape[2]} in {where} "
            f"behind {like.dtype} and {like.shape[2]}. Convert them in the dataset."
        )
    return array


def refuse(value: Any, where: str) -> NoReturn:
    """Raise the error about ``value``, which should be an image and is not.

    Raises:
        ArgumentTypeError: If ``value`` is an array or tensor of another dtype, or of any other type.
        ArgumentError: If ``value`` is a uint8 array or tensor with a wrong number of dimensions.
    """
    if isinstance(value, Tensor | np.ndarray):
        if value.dtype not in (torch.uint8, np.uint8):
            floating = value.is_floating_point() if isinstance(value, Tensor) else value.dtype.kind == "f"
            way_out = "Leave out what makes them floating, such as ToTensor, and convert in gpuaug.fuse."
            raise ArgumentTypeError(
                f"Images must be uint8, got {value.dtype} in {where}. "
                f"{way_out if floating else _way_out_of_depth(str(value.dtype).removeprefix('torch.') in ('uint16', 'int16'))}"
            )
        if is_clip(value):
            _refuse_mixture(value, where)
        raise ArgumentError(
            "Images must be (H, W) or (H, W, C) in arrays and (C, H, W) in tensors, and clips (T, H, W, C) and (T, C, H, W), "
            f"got {_described(value)} in {where}. A grey tensor (H, W) is image[None]."
        )
    raise ArgumentTypeError(
        "Images must be PIL images, uint8 arrays (H, W, C) or uint8 tensors (C, H, W), "
        f"got {type(value).__name__} in {where}. Decode it in the dataset: PIL.Image.open(…) or cv2.imread(…)."
    )


def _way_out_of_depth(has_16_bits: bool) -> str:
    """Advice for images of more than 8 bits."""
    if has_16_bits:
        return "Pack such images as they are: functools.partial(gpuaug.collate_ragged, channels=None)."
    return "Scale it to 8 bits in the dataset."


def prepared(image: Any, channels: Channels, *, convert: bool, where: str) -> Any:
    """Return an image with ``channels`` channels: a PIL image for a PIL image, otherwise an array (H, W, C).

    Raises:
        ArgumentError: If ``image`` has another number of channels and ``convert`` is false or impossible, or has no pixels.
        ArgumentTypeError: If ``image`` is not an image.
    """
    if not is_image(image):
        refuse(image, where)
    if _is_pil(image):
        return _prepared_pil(image, channels, convert=convert, where=where)
    array = _pixels(image, where)
    if not array.size:
        _refuse_empty(image, where)
    image_channels = array.shape[2]
    if image_channels == channels:
        return array
    if not convert:
        _refuse_channels(image, channels, where)
    if image_channels <= 2:  # grey, perhaps with an alpha channel
        return np.broadcast_to(array[..., :1], (*array.shape[:2], channels))
    return array[..., :3] if channels == 3 else _grey(array)


def sizes_of(images: Sequence[Any]) -> NDArray[np.int64]:
    """(B, 2) heights and widths of images that ``prepared`` or ``as_stored`` returned."""
    return np.array([image.size[::-1] if _is_pil(image) else image.shape[:2] for image in images], dtype=np.int64)


def unpacked(image: Any) -> NDArray[np.uint8]:
    """Convert a PIL image or an array to an array (H, W, C)."""
    array: NDArray[np.uint8] = np.asarray(image)
    return array if array.ndim == 3 else array[..., None]


def _prepared_pil(image: Any, channels: Channels, *, convert: bool, where: str) -> Any:
    if 0 in image.size:
        _refuse_empty(image, where)
    if image.mode.startswith(_DEEP_MODES):
        raise ArgumentError(
            f"Images must have 8 bits a channel, got {_described(image)} in {where}. "
            f"{_way_out_of_depth(image.mode in _STORED_MODES)}"
        )
    mode = _PIL_MODES[channels]
    if image.mode != mode and not convert:
        _refuse_channels(image, channels, where)
    try:
        image.load()  # decodes an image that was only opened
        return image if image.mode == mode else image.convert(mode)
    except Exception as error:
        add_note(error, f"gpuaug: raised by PIL for the image in {where}.")
        raise


def _channels_last(image: Any, where: str) -> NDArray[Any]:
    """View an array or tensor as an array (H, W, C)."""
    if not isinstance(image, Tensor):
        array: NDArray[Any] = image if image.ndim == 3 else image[..., None]
        return array
    if not image.is_cpu:
        raise ArgumentError(f"Images must be on the host, got one on {image.device} in {where}. Give .cpu() of it.")
    return image.numpy().transpose(1, 2, 0)


def _pixels(image: Any, where: str) -> NDArray[np.uint8]:
    """View an array or tensor of one to four channels as an array (H, W, C)."""
    array = _channels_last(image, where)
    if not 1 <= array.shape[2] <= 4:
        raise ArgumentError(
            "Images must have 1 to 4 channels, which come first in tensors and last in arrays, "
            f"got {_described(image)} in {where}. Turn it: image.permute(2, 0, 1) is a tensor's, "
            "image.transpose(1, 2, 0) an array's. What is no image belongs into a dict of targets."
        )
    return array


def _grey(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    red, green, blue = (array[..., channel].astype(np.uint32) * weight for channel, weight in enumerate(_LUMA))
    return ((red + green + blue + 0x8000) >> 16).astype(np.uint8)[..., None]


def _refuse_mixture(value: Any, where: str) -> NoReturn:
    raise ArgumentError(
        f"A member must be an image in all samples or a clip in all samples, got {_described(value)} in {where}. "
        "Return samples of one form from the dataset."
    )


def _refuse_channels(image: Any, channels: Channels, where: str) -> NoReturn:
    raise ArgumentError(
        f"Images must be {_CHANNEL_NAMES[channels]}, got {_described(image)} in {where}. "
        f"Return .convert({_PIL_MODES[channels]!r}) of it from the dataset, or have such images converted: "
        "functools.partial(gpuaug.collate_ragged, convert=True). A mask belongs into a dict of targets."
    )


def _refuse_empty(image: Any, where: str) -> NoReturn:
    raise ArgumentError(f"Images must have pixels, got {_described(image)} in {where}. Leave it out of the dataset.")


def _described(image: Any) -> str:
    if _is_pil(image):
        return f"a PIL image of mode {image.mode!r} and size {image.size}"
    return f"{'a tensor' if isinstance(image, Tensor) else 'an array'} of shape {tuple(image.shape)}"


def _is_pil(value: Any) -> bool:
    return _is_a(value, "PIL.Image", "Image")


def _dtype_fits(value: Tensor | NDArray[Any], *, deep: bool) -> bool:
    if isinstance(value, Tensor):
        return value.dtype is torch.uint8 or (deep and value.dtype in (torch.uint16, torch.int16))
    return value.dtype == np.uint8 or (deep and value.dtype in _STORED)


def _is_other_tv_tensor(value: Tensor, name: str) -> bool:
    """Whether ``value`` is of one of torchvision's tensor classes other than ``name``."""
    module = "torchvision.tv_tensors"
    return type(value) is not Tensor and _is_a(value, module, "TVTensor") and not _is_a(value, module, name)


def _is_a(value: Any, module: str, name: str) -> bool:
    """Whether ``value`` is an instance of class ``name`` of ``module``. False if the module has not been imported."""
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(value, cls)
