"""From an image processor of transformers to its family and arithmetic. transformers is not imported."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, shown
from gpuaug.fusion.backends.patches import Resampling
from gpuaug.fusion.processors.families import Family, OneFloatSize, OneSize, PixtralFamily, QwenFamily, Siglip2Family

TESTED = ("5.24.0",)
"""Versions of transformers whose processors the tests compare."""

_CUBIC = {2: False, 3: True, "bilinear": False, "bicubic": True, None: False}
"""Interpolation of PIL or torchvision → whether it is bicubic."""


class Definition(NamedTuple):
    """Everything that determines the result for a batch."""

    name: str
    """Class of the processor."""
    family: Family
    resampling: Resampling


class ImageProcessor(Protocol):
    """Attributes by which an image processor of transformers is recognized, for type checkers."""

    image_mean: Any
    do_resize: Any


def is_image_processor(value: Any) -> bool:
    """Return whether ``value`` looks like an image processor of transformers."""
    return hasattr(value, "image_mean") and hasattr(value, "do_resize")


def read(processor: Any) -> Definition:
    """Read the settings of an image processor.

    Raises:
        ArgumentTypeError: If the exact type of the processor is not supported.
        ArgumentError: If a setting is not supported.
    """
    kind = type(processor)
    module, read_family = _READERS.get(kind.__name__, ("", None))
    if read_family is None or kind.__module__ != f"transformers.models.{module}":
        raise ArgumentTypeError(
            f"An image processor must be one of {', '.join(_READERS)} of transformers, got {kind.__name__}. "
            "Write out what it does: v2.Resize, K.CenterCrop, v2.ToDtype and v2.Normalize(processor.image_mean, …)."
        )
    settings = _Settings(processor)
    settings.require("do_resize", True)
    settings.require("do_pad", True if kind.__name__ == "PixtralImageProcessor" else None, False)
    cubic = _CUBIC.get(getattr(processor.resample, "value", processor.resample))
    if cubic is None:
        settings.refuse("resample", "bilinear or bicubic")
    family = read_family(settings)
    return Definition(kind.__name__, family, Resampling(bool(cubic), family.rounds, _levels(processor)))


def version_of_transformers() -> str:
    """Return the version of the imported package."""
    return str(getattr(sys.modules.get("transformers"), "__version__", "an unknown version"))


class _Settings:
    """Settings of a processor, and errors about them."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._name = type(processor).__name__

    def get(self, name: str) -> Any:
        return getattr(self._processor, name, None)

    def require(self, name: str, *values: Any) -> None:
        """Raise an error if a setting has none of ``values``. ``None``, unset, is False."""
        if bool(self.get(name)) not in map(bool, values):
            self.refuse(name, " or ".join(map(repr, values)))

    def refuse(self, name: str, rule: str) -> None:
        """Raise the error about a setting."""
        raise ArgumentError(
            f"{name} of {self._name} must be {rule}, got {shown(self.get(name))}. Call the processor itself, in the dataset."
        )

    def sides(self, name: str, *choices: tuple[str, ...]) -> tuple[int, ...]:
        """Return the numbers of a size. ``choices``: possible keys of the size, such as height and width."""
        value = self.get(name)
        value = {} if value is None else {"height": value, "width": value} if isinstance(value, int) else dict(value)
        sides: Mapping[str, int] = {key: side for key, side in value.items() if side is not None}
        for keys in choices:
            if set(keys) == set(sides):
                return tuple(int(sides[key]) for key in keys)
        self.refuse(name, " or ".join(" and ".join(keys) for keys in choices))
        raise AssertionError


_SQUARE = ("height", "width")


def _one_size(settings: _Settings, family: type[OneSize] = OneSize) -> OneSize:
    crop = settings.sides("crop_size", _SQUARE) if settings.get("do_center_crop") else None
    shapes = (_SQUARE,) if crop is None else (_SQUARE, ("shortest_edge",))
    return family(settings.sides("size", *shapes), crop and (crop[0], crop[1]))


def _float_size(settings: _Settings) -> OneSize:
    settings.require("do_rescale", True)
    return _one_size(settings, OneFloatSize)


def _pixtral(settings: _Settings) -> Family:
    settings.require("do_center_crop", None)
    size, patch = settings.sides("size", ("longest_edge",), _SQUARE), settings.sides("patch_size", _SQUARE)
    return PixtralFamily((size[0], size[-1]), (patch[0], patch[1]))


def _qwen(settings: _Settings) -> Family:
    smallest, largest = settings.sides("size", ("shortest_edge", "longest_edge"))
    return QwenFamily(*map(settings.get, ("patch_size", "merge_size", "temporal_patch_size")), smallest, largest)


def _siglip2(settings: _Settings) -> Family:
    return Siglip2Family(settings.get("patch_size"), settings.get("max_num_patches"))


_READERS: dict[str, tuple[str, Callable[[_Settings], Family]]] = {
    "Qwen2VLImageProcessor": ("qwen2_vl.image_processing_qwen2_vl", _qwen),
    "Siglip2ImageProcessor": ("siglip2.image_processing_siglip2", _siglip2),
    "SiglipImageProcessor": ("siglip.image_processing_siglip", _one_size),
    "CLIPImageProcessor": ("clip.image_processing_clip", _one_size),
    "ViTImageProcessor": ("vit.image_processing_vit", _one_size),
    "DINOv3ViTImageProcessor": ("dinov3_vit.image_processing_dinov3_vit", _float_size),
    "PixtralImageProcessor": ("pixtral.image_processing_pixtral", _pixtral),
}
"""Class of transformers → its module and the function that reads its settings."""


def _levels(processor: Any) -> Tensor:
    """Return the value of each byte of each channel, (3, 256) float32, with the roundings of the processor."""
    levels = torch.arange(256, dtype=torch.uint8, device="cpu").expand(3, 256)
    rescale = processor.rescale_factor if processor.do_rescale else 1.0
    if not processor.do_normalize:
        return (levels * rescale).float()
    mean, std = (
        (torch.tensor(numbers, device="cpu") * (1.0 / rescale)).expand(3)[:, None]
        for numbers in (processor.image_mean, processor.image_std)
    )
    return (levels.float() - mean) / std
