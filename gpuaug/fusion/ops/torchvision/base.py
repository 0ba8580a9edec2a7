"""What ops lowered from torchvision's transforms share: units of settings, and the call that repeats a sample's draws.

An op here has the arithmetic of the op that it inherits from, which Kornia's module is lowered to, with torchvision's
settings and draws. It is made from a transform's public attributes.
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms.v2 import InterpolationMode

from gpuaug.core.torchvision_types import names_used, torchvision_class
from gpuaug.fusion.ops.base import Op, OpDraws, Size

Call = tuple[str, dict[str, Any]]
"""A function of ``torchvision.transforms.v2.functional``, and its arguments but for the image."""

Units = Literal["bytes", "floats"]
"""Unit of a transform's fills and thresholds: values in [0, 255] or in [0, 1]."""

_PIL_MODES = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""By the numbers that stand for them in Pillow."""

LEAST_AND_LARGEST = np.float32(0), np.float32(1 - 2**-24)
"""Of the numbers that samples draw from."""


class TorchvisionOp(Op):
    """An op lowered from a transform of torchvision's.

    Args:
        name: The transform's name in its container, such as ``RandomHorizontalFlip_1``.
        transform: The user's. It is read, never changed, moved or called.
        units: Of the images that it is given.
    """

    package = "torchvision"
    image_dtype: torch.dtype = torch.float32
    """Type of the images that torchvision would give the transform at its place in the pipeline."""

    def __init__(self, name: str, transform: nn.Module, units: Units) -> None:
        # Not the op's that a subclass inherits from besides, which reads a module of Kornia's.
        Op.__init__(self, name, transform)
        self.units: Units = units

    def _read(self, module: Any) -> None:
        """The probability, where torchvision's methods read one: a user's subclass may have an attribute of that name."""
        if "p" in names_used(torchvision_class(module) or nn.Module):
            self.p = float(module.p)

    @property
    def keepdim(self) -> bool:
        """True: torchvision's transforms take a single image, (C, H, W)."""
        return True

    def unsupported(self) -> str | None:
        """Why the transform is left to torchvision, or ``None``."""
        return None

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """What repeats the op on one sample that it applies to; ``size`` is of the batch that the op is given."""
        raise NotImplementedError

    def share(self, value: float) -> float:
        """A value of the images that the transform is given, as a value of images in [0, 1]."""
        return float(value) / 255 if self.units == "bytes" else float(value)

    def fill_share(self, fill: Any, *, whole: bool = False) -> float | list[float]:
        """A fill for images in [0, 1]: one number, or one for each channel.

        Args:
            fill: As the transform was given it.
            whole: Whether torchvision cuts a fill of bytes off to a whole number: where it writes pixels, and blends none.
        """
        value = image_fill(fill)
        shares = [self.share(int(each) if whole and self.units == "bytes" else each) for each in np.atleast_1d(value)]
        return shares[0] if len(shares) == 1 else shares


def whole_sides(size: Size, height: Any, width: Any) -> Size:
    """Images of these sides, rounded down to whole pixels: of one size, or each of its own where they are arrays."""
    sides = (np.asarray(side).astype(np.int64) for side in (height, width))
    return size.to(*(side if side.ndim else int(side) for side in sides))


def image_fill(fill: Any) -> float | list[float]:
    """The fill for images in what a transform was given: a number, one for each channel, or either by the type of the input."""
    fill = _fill_of(fill, tv_tensors.Image, torch.Tensor, "others")
    if fill is None:
        return 0
    return fill if isinstance(fill, int | float) else [float(each) for each in fill]


def mask_fill(fill: Any) -> float:
    """The same for masks; 0 where it is one for each channel, which torchvision has for images alone."""
    fill = _fill_of(fill, tv_tensors.Mask, "others")
    return float(fill) if isinstance(fill, int | float) else 0.0


def _fill_of(fill: Any, *kinds: Any) -> Any:
    return next((fill[kind] for kind in kinds if kind in fill), None) if isinstance(fill, dict) else fill


def interpolation_of(transform: Any) -> str:
    """``"nearest"``, ``"nearest-exact"``, ``"bilinear"``, ``"bicubic"`` or another mode, in whatever form it was given."""
    mode = transform.interpolation
    if isinstance(mode, int):
        return _PIL_MODES[mode]
    return mode.value if isinstance(mode, InterpolationMode) else str(mode)
