"""From an image processor of transformers to its family and arithmetic. transformers is not imported."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, shown, whole_number
from gpuaug.fusion.backends.patches import Resampling
from gpuaug.fusion.processors.families import Family, OneSize, PixtralFamily, QwenFamily, Siglip2Family

TESTED = ("5.24.0",)
"""Versions of transformers whose processors the tests compare."""

_IS_CUBIC = {2: False, 3: True, "bilinear": False, "bicubic": True, None: False}
"""Interpolation of PIL or torchvision → whether it is bicubic. ``None`` is the default, bilinear."""


class Definition(NamedTuple):
    """Everything that determines the result for a batch."""

    name: str
    """Class of the processor."""
    family: Family
    resampling: Resampling


def is_image_processor(value: Any) -> bool:
    """Return whether ``value`` looks like an image processor of transformers, or like a processor that has one."""
    return all(hasattr(getattr(value, "image_processor", value), name) for name in ("image_mean", "do_resize"))


def read(processor: Any) -> Definition:
    """Read the settings of an image processor.

    Raises:
        ArgumentTypeError: If the exact type of the processor is not supported.
        ArgumentError: If a setting is not supported.
    """
    class_ = type(processor)
    module, read_family = _READERS.get(class_.__name__, ("", None))
    if read_family is None or class_.__module__ != f"transformers.models.{module}":
        torchvision_class = class_.__name__.removesuffix("Pil")
        if hasattr(processor, "image_processor"):
            way_out = "Pass processor.image_processor."
        elif isinstance(processor, type):
            way_out = f"Pass an object: {processor.__name__}()."
        elif torchvision_class in _READERS:
            way_out = f"Load the processor as {torchvision_class}."
        else:
            way_out = "Write out what it does: v2.Resize, K.CenterCrop, v2.ToDtype and v2.Normalize(processor.image_mean, …)."
        raise ArgumentTypeError(
            f"An image processor must be one of {', '.join(_READERS)} of transformers, got {class_.__name__}. {way_out}"
        )
    refuse = partial(_refuse, processor)
    if not processor.do_resize:
        refuse("do_resize", "True")
    if not (processor.do_rescale or processor.do_normalize):
        refuse("do_normalize", "True if do_rescale is False")
    rounds = class_.__name__ != "DINOv3ViTImageProcessor"  # which rescales bytes to floats before it resizes them
    if not (rounds or processor.do_rescale):
        refuse("do_rescale", "True")
    must_pad = class_.__name__ == "PixtralImageProcessor"
    padding = getattr(processor, "do_pad", None)
    # Before transformers 5.24 Pixtral's class has no do_pad, and always pads. Since then, do_pad=None of a processor turns the
    # padding off, although the class has True.
    lacks_do_pad = padding is None and getattr(class_, "do_pad", None) is None
    if bool(padding) != must_pad and not lacks_do_pad:
        refuse("do_pad", str(must_pad))
    resample = getattr(processor.resample, "value", processor.resample)
    is_cubic = _IS_CUBIC.get(resample) if isinstance(resample, int | str | None) else None
    if is_cubic is None:
        refuse("resample", "bilinear or bicubic")
    family = read_family(processor)
    resampling = Resampling(cubic=bool(is_cubic), rounds=rounds, levels=_levels(processor))
    return Definition(class_.__name__, family, resampling)


def _refuse(processor: Any, name: str, rule: str) -> NoReturn:
    """Raise the error about a setting."""
    value = getattr(processor, name, None)
    value = dict(value or {}) if type(value).__name__ == "SizeDict" else value  # whose repr has all keys, also without values
    raise ArgumentError(
        f"{name} of {type(processor).__name__} must be {rule}, got {shown(value)}. Call the processor itself, in the dataset."
    )


def _size_values(processor: Any, name: str, *choices: tuple[str, ...]) -> tuple[int, ...]:
    """Return the values of the setting ``name``. ``choices``: accepted sets of keys, such as height and width.

    As in transformers, two numbers are height and width. One number is both, or the shorter side if the processor's
    ``default_to_square`` is false.
    """
    value = getattr(processor, name)
    if isinstance(value, int):
        is_square = name != "size" or getattr(processor, "default_to_square", True)
        value = dict.fromkeys(_HEIGHT_WIDTH if is_square else ("shortest_edge",), value)
    elif isinstance(value, list | tuple) and len(value) == 2:
        value = dict(zip(_HEIGHT_WIDTH, value, strict=True))
    try:
        sides = {key: side for key, side in dict(value or {}).items() if side is not None}
    except (TypeError, ValueError):  # neither a dict nor transformers' SizeDict
        sides = {}
    for keys in choices:
        if set(keys) == set(sides):
            return tuple(_count(processor, f"{key} of {name}", sides[key]) for key in keys)
    _refuse(processor, name, " or ".join(" and ".join(keys) for keys in choices))


def _count(processor: Any, name: str, value: Any = None) -> int:
    """Return a whole number of at least 1: the setting ``name``, or ``value`` of the setting that ``name`` describes."""
    value = getattr(processor, name) if value is None else value
    value = int(value) if isinstance(value, float) and value.is_integer() else value  # such as max_pixels=1e6
    return whole_number(f"{name} of {type(processor).__name__}", value, "Set a number of pixels or patches.", least=1)


_HEIGHT_WIDTH = ("height", "width")


def _one_size(processor: Any) -> OneSize:
    if not getattr(processor, "do_center_crop", False):
        return OneSize(_size_values(processor, "size", _HEIGHT_WIDTH), None)
    return OneSize(
        _size_values(processor, "size", _HEIGHT_WIDTH, ("shortest_edge",)), _size_values(processor, "crop_size", _HEIGHT_WIDTH)
    )


def _pixtral(processor: Any) -> PixtralFamily:
    if getattr(processor, "do_center_crop", False):
        _refuse(processor, "do_center_crop", "False")
    size = _size_values(processor, "size", ("longest_edge",), _HEIGHT_WIDTH)
    return PixtralFamily((size[0], size[-1]), _size_values(processor, "patch_size", _HEIGHT_WIDTH))


def _qwen(processor: Any) -> QwenFamily:
    # Under these keys the processor has numbers of pixels of an image.
    limits = _size_values(processor, "size", ("shortest_edge", "longest_edge"))
    # Attributes that are set after construction have priority over the size.
    min_pixels, max_pixels = (
        limit if getattr(processor, name, None) is None else _count(processor, name)
        for name, limit in zip(("min_pixels", "max_pixels"), limits, strict=True)
    )
    patch, merge, temporal = (_count(processor, name) for name in ("patch_size", "merge_size", "temporal_patch_size"))
    return QwenFamily(patch, merge, temporal, min_pixels, max_pixels)


def _siglip2(processor: Any) -> Siglip2Family:
    return Siglip2Family(_count(processor, "patch_size"), _count(processor, "max_num_patches"))


_READERS: dict[str, tuple[str, Callable[[Any], Family]]] = {
    "Qwen2VLImageProcessor": ("qwen2_vl.image_processing_qwen2_vl", _qwen),
    "Siglip2ImageProcessor": ("siglip2.image_processing_siglip2", _siglip2),
    "SiglipImageProcessor": ("siglip.image_processing_siglip", _one_size),
    "CLIPImageProcessor": ("clip.image_processing_clip", _one_size),
    "ViTImageProcessor": ("vit.image_processing_vit", _one_size),
    "DINOv3ViTImageProcessor": ("dinov3_vit.image_processing_dinov3_vit", _one_size),
    "PixtralImageProcessor": ("pixtral.image_processing_pixtral", _pixtral),
}
"""Class of transformers → its module and the function that reads its settings."""


def _levels(processor: Any) -> Tensor:
    """Return the values to which the processor converts the bytes 0 to 255 of each channel, (3, 256) float32.

    The processor multiplies mean and standard deviation by 1 / rescale, and leaves the bytes as they are. So does this
    function, because the roundings differ otherwise.
    """
    levels = torch.arange(256, dtype=torch.uint8, device="cpu").expand(3, 256)
    rescale = processor.rescale_factor if processor.do_rescale else 1.0
    if not isinstance(rescale, int | float) or not rescale:
        _refuse(processor, "rescale_factor", "an int or float other than 0")
    if not processor.do_normalize:
        if isinstance(rescale, int):  # the processor returns bytes, and wraps around above 255
            _refuse(processor, "rescale_factor", "a float if do_normalize is False")
        return (levels * rescale).float()
    mean, std = ((_per_channel(processor, name) * (1.0 / rescale))[:, None] for name in ("image_mean", "image_std"))
    if not std.all():
        _refuse(processor, "image_std", "other than 0")
    return (levels.float() - mean) / std


def _per_channel(processor: Any, name: str) -> Tensor:
    """Return the setting ``name``, one number or one per channel, as a tensor (3,)."""
    try:
        return torch.as_tensor(getattr(processor, name), dtype=torch.float32, device="cpu").expand(3)
    except (TypeError, ValueError, RuntimeError):
        _refuse(processor, name, "a number, or one number per channel of RGB images")
