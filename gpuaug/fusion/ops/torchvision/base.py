"""Base class of ops lowered from torchvision's transforms: units of settings, fills, and functional calls per sample.

Most ops inherit their arithmetic from the op that Kornia's equivalent module is lowered to, and add torchvision's settings
and draws. They read public attributes of the transform only.
"""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms.v2 import InterpolationMode

from gpuaug.core.torchvision_types import names_used, torchvision_class
from gpuaug.fusion.ops.base import Op, OpDraws, Size
from gpuaug.fusion.pixels import LARGEST

Call = tuple[str, dict[str, Any]]
"""(name of a function in ``torchvision.transforms.v2.functional``, its keyword arguments without the image)."""

Units = torch.dtype
"""dtype of a transform's input images. Fills and thresholds of the transform refer to its value range."""

_PIL_MODES = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Names of Pillow's resampling modes, in the order of their integer codes."""

UNIFORM_BOUNDS = np.float32(0), np.float32(1 - 2**-24)
"""Smallest and largest float32 that ``Sampler.uniform`` returns."""


class TorchvisionOp(Op):
    """Op lowered from a transform of ``torchvision.transforms.v2``.

    Args:
        name: Name of the transform in its container, such as ``RandomHorizontalFlip_1``.
        transform: Transform of the user. It is not modified, moved or called.
        units: dtype of the transform's input images, whose value range its settings refer to.
    """

    package = "torchvision"
    unfused_dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    """dtypes for which torchvision runs the transform, because its results differ from those for uint8 and floats."""
    image_dtype: torch.dtype = torch.float32
    """dtype of the images that torchvision would pass to the transform at this position of the pipeline."""

    def __init__(self, name: str, transform: nn.Module, units: Units) -> None:
        # Skip the constructor of the second base class of a subclass, which reads a module of Kornia.
        Op.__init__(self, name, transform)
        self.units = units

    def _read(self, module: Any) -> None:
        """Read ``p`` if torchvision's methods read it. A subclass of the user may have an unrelated attribute ``p``."""
        if "p" in names_used(torchvision_class(module) or nn.Module):
            self.p = float(module.p)

    @property
    def keepdim(self) -> bool:
        """True: torchvision's transforms return a single image (C, H, W) without a batch dimension."""
        return True

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        return f"torchvision computes it differently for {self.units}" if self.units in self.unfused_dtypes else None

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """Functional calls that repeat the op on image ``sample``.

        Args:
            drawn: Draws of the batch.
            sample: Index of a sample that the op is applied to.
            size: Size of the input images of the batch.
        """
        raise NotImplementedError

    def to_unit_range(self, value: float) -> float:
        """Convert a pixel value from the units of the input images to [0, 1]."""
        return float(value) / LARGEST.get(self.units, 1)

    def unit_fill(self, fill: Any, *, truncates: bool = False) -> float | list[float]:
        """Convert a fill to [0, 1]: one number, or a list with one number per channel.

        Args:
            fill: Fill of the transform.
            truncates: Whether torchvision truncates the fill of integer images, as in transforms that do not interpolate.
        """
        value = image_fill(fill)
        truncated = truncates and self.units in LARGEST
        fills = [self.to_unit_range(int(number) if truncated else number) for number in np.atleast_1d(value)]
        return fills[0] if len(fills) == 1 else fills


def size_rounded_down(size: Size, height: Any, width: Any) -> Size:
    """Return ``size`` with ``height`` and ``width`` rounded down to whole pixels: numbers, or arrays (B,)."""
    sides = (np.asarray(side).astype(np.int64) for side in (height, width))
    return size.to(*(side if side.ndim else int(side) for side in sides))


def image_fill(fill: Any) -> float | list[float]:
    """Fill for images: a number, or a list with one number per channel.

    Args:
        fill: Fill of a transform: a number, a sequence, ``None``, or a dict of these by input type.
    """
    fill = _fill_of(fill, tv_tensors.Image, torch.Tensor, "others")
    if fill is None:
        return 0
    return fill if isinstance(fill, int | float) else [float(number) for number in fill]


def mask_fill(fill: Any) -> float:
    """Fill for masks: a number. 0 for a fill with one number per channel, which torchvision supports for images only."""
    fill = _fill_of(fill, tv_tensors.Mask, "others")
    return float(fill) if isinstance(fill, int | float) else 0.0


def _fill_of(fill: Any, *keys: Any) -> Any:
    return next((fill[key] for key in keys if key in fill), None) if isinstance(fill, dict) else fill


def interpolation_of(transform: Any) -> str:
    """Name of the interpolation mode of a transform, such as ``"bilinear"``, from a name, an enum member or Pillow's code."""
    mode = transform.interpolation
    if isinstance(mode, int):
        return _PIL_MODES[mode]
    return mode.value if isinstance(mode, InterpolationMode) else str(mode)
