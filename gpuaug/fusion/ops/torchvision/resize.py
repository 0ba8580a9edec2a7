"""torchvision's resizes, of whole images and of windows in them."""

import math
from typing import Any

import numpy as np
from torch import nn
from torchvision.transforms import v2

from gpuaug.fusion.ops import resize
from gpuaug.fusion.ops.base import OpDraws, Size
from gpuaug.fusion.ops.geometry import ResampleOp, changes_size_by_chance
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp, Units, interpolation_of


class _Resampling(TorchvisionOp, ResampleOp):
    """What is common to a resize of the image and of a window: pixels are squares, and antialiasing is the transform's.

    Masks are resized by torch's ``"nearest"``, which takes the pixel at the first corner.
    """

    half_pixel_centers = True
    mask_half_pixel_centers = False

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        mode = interpolation_of(transform)
        self.nearest = mode == "nearest-exact"
        if transform.antialias:
            self.set_antialias(cubic=mode == "bicubic")

    def unsupported(self) -> str | None:
        """Why the transform is left to torchvision, or ``None``."""
        mode = interpolation_of(self.module)
        if mode == "bicubic" and not self.filter:
            return "interpolation='bicubic' without antialias"
        return None if mode in ("nearest-exact", "bilinear", "bicubic") else f"interpolation={mode!r}"

    def _how(self) -> dict[str, Any]:
        transform: Any = self.module
        return {"interpolation": transform.interpolation, "antialias": transform.antialias}


class ResizedCrop(_Resampling, resize.ResizedCrop):
    """RandomResizedCrop: where none of ten windows fits, as much of the image's middle as the ratios allow."""

    centred = True

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        _Resampling.__init__(self, name, transform, units)
        self._height, self._width = transform.size
        self._scale = tuple(float(bound) for bound in transform.scale)
        self.areas = self._scale[0], self._scale[1] - self._scale[0]
        ratios = [float(bound) for bound in transform.ratio]
        first, last = math.log(ratios[0]), math.log(ratios[1])
        self.log_aspect = first / 2, (last - first) / 2
        self.ratios = min(ratios), max(ratios)

    def unsupported_size(self, size: Size) -> str | None:
        """A skipped sample keeps the size that it came with."""
        return changes_size_by_chance(self, size=size)

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The window, and the size it is resized to."""
        names = {"top": "y", "left": "x", "height": "height", "width": "width"}
        window = {name: int(drawn[own][sample]) for name, own in names.items()}
        return [("resized_crop", {**window, "size": [self._height, self._width], **self._how()})]


class Resize(_Resampling, resize.Resize):
    """Resize: to two sides, or the shorter side to one with a bound for the longer."""

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        _Resampling.__init__(self, name, transform, units)
        self.mask_half_pixel_centers = self.nearest
        self.settings = {"size": transform.size if transform.size is not None else f"at most {transform.max_size}"}

    def unsupported_size(self, size: Size) -> str | None:
        """A skipped sample keeps the size that it came with, and an image has pixels."""
        out = self.out(size)
        if np.any(np.equal(out.height, 0)) or np.any(np.equal(out.width, 0)):
            return "comes out without pixels"
        return changes_size_by_chance(self, size=size)

    def out(self, size: Size) -> Size:
        """The size given, or one side of it with the other in proportion, rounded down."""
        transform: Any = self.module
        wanted, most = transform.size, transform.max_size
        if wanted is not None and len(wanted) == 2:
            return size.to(int(wanted[0]), int(wanted[1]))
        short, long = np.minimum(size.height, size.width), np.maximum(size.height, size.width)
        if wanted is None:
            new_short, new_long = (most * short / long).astype(np.int64), np.full_like(long, most)
        else:
            new_short, new_long = np.full_like(short, wanted[0]), (wanted[0] * long / short).astype(np.int64)
            if most is not None:
                over = new_long > most
                new_short = np.where(over, (most * new_short / np.maximum(new_long, 1)).astype(np.int64), new_short)
                new_long = np.minimum(new_long, most)
        upright = np.less_equal(size.width, size.height)
        height, width = np.where(upright, new_long, new_short), np.where(upright, new_short, new_long)
        return size.to(height, width) if size.ragged else size.to(int(height), int(width))

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The resize."""
        transform: Any = self.module
        return [("resize", {"size": transform.size, "max_size": transform.max_size, **self._how()})]


LOWERED: dict[type[nn.Module], type[TorchvisionOp]] = {v2.RandomResizedCrop: ResizedCrop, v2.Resize: Resize}
