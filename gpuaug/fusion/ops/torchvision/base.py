"""Base class of the ops of torchvision's transforms: units of settings, fill values, and functional calls per sample.

A transform is *lowered* to an op, or run by torchvision. Most ops inherit their arithmetic from the op of Kornia's equivalent
module, and add torchvision's settings and random parameters. They read the attributes that a call of the transform reads: where
torchvision's constructor derives an attribute from a setting, such as ``_fill`` from ``fill``, the derived attribute. Class
attributes without a comment, here and in the other files of the folder, are explained in ``ops/base.py``.

A *sample* is an image or a clip. This file reads private names of torchvision's transforms; ``policies/torchvision.py`` reads
private names of its policies. Both were tried with torchvision 0.29.1.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms.v2 import InterpolationMode

from gpuaug.core.errors import ArgumentError
from gpuaug.core.torchvision_types import UNCHANGED_TYPE, TypeChange, names_used, torchvision_class
from gpuaug.fusion.ops.base import Op, OpDraws, Size
from gpuaug.fusion.pixels import LARGEST, UNCHANGED, ByteRule

Call = tuple[str, dict[str, Any]]
"""Call that repeats an op on one image: (name of a function in ``torchvision.transforms.v2.functional``, keyword arguments)."""

Units = torch.dtype
"""dtype of a transform's input images. Fill values and thresholds refer to its value range, such as 0 to 255 for uint8."""

_PIL_MODES = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Names of Pillow's resampling modes, in the order of their integer codes."""

_RANGES = frozenset(("degrees", "ratio", "scale", "shear"))
"""Names of settings that torchvision draws between, (low, high), or for shears (low, high, low, high)."""

UNIFORM_BOUNDS = np.float32(0), np.float32(1 - 2**-24)
"""Smallest and largest float32 that ``Sampler.uniform`` returns."""


class TorchvisionOp(Op):
    """Base class of the ops of torchvision's transforms.

    Args:
        name: Name of the transform in its container, such as ``RandomHorizontalFlip_1``.
        transform: Transform of the user. It is not modified, moved or called.
        units: dtype of the transform's input images, whose value range fill values and thresholds refer to.

    Support: fused.
    """

    package = "torchvision"
    call: ClassVar[tuple[str, ...]]
    """Function that repeats the op, and the draws and settings that are its arguments.

    Not set by classes that override ``calls``.
    """

    unfused_dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    """dtypes of images for which torchvision runs the transform, because it computes them differently than uint8 images."""

    byte_rule: ClassVar[ByteRule] = UNCHANGED
    """Conversion of results to bytes by torchvision. ``UNCHANGED`` also if it converts within the op."""

    image_dtype: torch.dtype = torch.float32
    """dtype that images would have at this position of the pipeline without gpuaug."""

    type_change: TypeChange = UNCHANGED_TYPE
    """Change of the class of images by ``v2.ToPureTensor`` and ``v2.ToImage``, after the last module that torchvision runs."""

    def __init__(self, name: str, transform: nn.Module, units: Units) -> None:
        self.units = units
        self.to_bytes = self.byte_rule if units == torch.uint8 else None
        super().__init__(name, transform)

    def _read_common(self, module: Any) -> None:
        """Read ``p`` if torchvision's class has it, and check ranges. A subclass of the user may have unrelated attributes.

        Raises:
            ArgumentError: If the first number of a range is larger than the second, with which torchvision cannot draw.
        """
        names = names_used(torchvision_class(module) or nn.Module)
        if "p" in names:
            self.p = float(module.p)
        for name in names & _RANGES:
            numbers = getattr(module, name, None)
            if isinstance(numbers, list | tuple) and any(
                low > high for low, high in zip(numbers[::2], numbers[1::2], strict=False)
            ):
                raise ArgumentError(
                    f"{name} of {self.name} must have the smaller number of a range first, got {tuple(numbers)}. Swap them."
                )

    def _read(self, transform: Any) -> None:
        """Do nothing. The methods of this name that subclasses inherit from ops of Kornia's modules read modules of Kornia."""

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        return f"torchvision computes it differently for {self.units}" if self.units in self.unfused_dtypes else None

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """Functional calls that repeat the op on one image.

        Args:
            draws: Draws of the batch.
            sample: Index of the image, in the apply mask.
            size: Size of the input images of the batch.
        """
        function, *names = self.call
        drawn = {name: float(draws[name][sample]) for name in names if name in draws}
        return [(function, {name: drawn[name] if name in drawn else getattr(self.module, name) for name in names})]

    def to_unit_range(self, value: float) -> float:
        """Convert a pixel value from the units of the input images to [0, 1]."""
        return float(value) / LARGEST.get(self.units, 1)

    def unit_fill(self, transform: Any, to_integer: Callable[[float], int] | None = None) -> float | list[float]:
        """Fill value of images in [0, 1]: one number, or a list with one number per channel.

        Args:
            transform: Transform of the user.
            to_integer: Function by which torchvision converts the fill value of integer images, where it does not interpolate.
        """
        value = image_fill(transform)
        numbers = np.atleast_1d(0 if value is None else value).tolist()
        if to_integer is not None and self.units in LARGEST:
            numbers = map(to_integer, numbers)
        fills = [self.to_unit_range(number) for number in numbers]
        return fills[0] if len(fills) == 1 else fills


def image_fill(transform: Any) -> float | list[float] | None:
    """Fill value of images: a number, or a list with one number per channel. ``None`` fills with 0."""
    fill = _fill_of(transform, tv_tensors.Image, torch.Tensor, "others")
    return fill if fill is None or isinstance(fill, int | float) else [float(number) for number in fill]


def mask_fill(transform: Any) -> float:
    """Fill value of segmentation masks. 0 if ``fill`` has one number per channel, which applies to images only."""
    fill = _fill_of(transform, tv_tensors.Mask, "others")
    return fill if isinstance(fill, int | float) else 0.0  # not as float, which does not hold all integers


def fill_setting(transform: Any) -> Any:
    """Setting ``fill`` that calls of a transform read: a number, a sequence, ``None``, or a dict of these by input type."""
    is_derived = "_fill" in names_used(torchvision_class(transform) or nn.Module)
    return dict(transform._fill) if is_derived else transform.fill


def _fill_of(transform: Any, *keys: Any) -> Any:
    """Fill value for an input type: the entry of the first of ``keys`` in a dict, else the setting itself."""
    fill = fill_setting(transform)
    return next((fill[key] for key in keys if key in fill), None) if isinstance(fill, dict) else fill


def pair(sides: Any) -> tuple[int, int]:
    """Both sides of a window, from a setting that torchvision's functions accept: one number, or a sequence of one or two."""
    first, *others = [sides] if isinstance(sides, int) else sides
    (second,) = others or (first,)
    return int(first), int(second)


def log_ratios(name: str, transform: Any) -> list[float]:
    """Logarithms of the smallest and the largest aspect ratio, which a crop or an erasing draws between.

    Raises:
        ArgumentError: If an aspect ratio is not positive and finite.
    """
    logarithms: list[float] = transform._log_ratio.tolist()
    if not all(map(math.isfinite, logarithms)):
        raise ArgumentError(
            f"ratio of {name} must hold two finite numbers above 0, got {tuple(transform.ratio)}. Create it with "
            "another ratio, such as ratio=(0.75, 1.33)."
        )
    return logarithms


def beta_concentration(transform: Any) -> float:
    """Parameter of the beta distribution that a mix draws its weight from. ``_dist`` is what calls read, not ``alpha``."""
    return float(transform._dist.concentration1)


def interpolation_of(transform: Any) -> str:
    """Name of the interpolation mode of a transform, such as ``"bilinear"``, from a name, an enum member or Pillow's code."""
    mode = transform.interpolation
    if isinstance(mode, int):
        return _PIL_MODES[mode]
    return mode.value if isinstance(mode, InterpolationMode) else str(mode)
