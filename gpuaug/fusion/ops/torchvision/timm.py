"""The resize of timm and open_clip that keeps the ratio of the sides, and their crop that pads."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuaug.fusion.ops.base import ANY_SIDES, OpDraws, Size
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision import crop, resize
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp, Units, interpolation_of, whole_sides


class ResizeKeepRatio(resize._WholeResize):
    """ResizeKeepRatio: until the image covers a size (``longest=0``), lies in it (1), or between."""

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        mode = interpolation_of(transform)
        self.nearest = self.mask_half_pixel_centers = mode == "nearest-exact"
        self.set_antialias(cubic=mode == "bicubic")
        self.settings = {"size": f"{'x'.join(map(str, transform.size))}, in proportion"}

    def _sides(self, size: Size, factors: Sequence[Any]) -> Size:
        transform: Any = self.module
        ratios = [side / target for side, target in zip((size.height, size.width), transform.size, strict=True)]
        ratio = np.maximum(*ratios) * transform.longest + np.minimum(*ratios) * (1.0 - transform.longest)
        sides = (side * factor / ratio for side, factor in zip((size.height, size.width), factors, strict=True))
        return whole_sides(size, *map(np.rint, sides))

    def out(self, size: Size) -> Size:
        """The image in proportion."""
        return self._sides(size, (1.0, 1.0))

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The resize."""
        out = self.out_drawn(self.of_sample(drawn, sample), size.of(sample)).of(0)
        how = {"interpolation": self.module.interpolation, "antialias": True}
        return [("resize", {"size": [out.height, out.width], **how})]


class OpenClipResizeKeepRatio(ResizeKeepRatio):
    """open_clip's ResizeKeepRatio without draws, which would have other distributions than timm's."""

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        ResizeKeepRatio.__init__(self, name, transform, units)
        self.draws_size = transform.random_scale_prob > 0 or transform.random_aspect_prob > 0

    def unsupported(self) -> str | None:
        """Why the transform is left to torchvision, or ``None``."""
        return "random scales or ratios of open_clip's" if self.draws_size else super().unsupported()


class RandomResizeKeepRatio(ResizeKeepRatio):
    """ResizeKeepRatio of which some samples are scaled, or their sides, by what they draw."""

    draws_size = True

    def _factors(self, scales: Any, aspects: Any) -> tuple[Any, Any]:
        """What the height and the width are scaled by."""
        scale = 1.0 / np.sqrt(scales) if self.module.random_scale_area else scales
        root = np.sqrt(aspects)
        return scale / root, scale * root

    def out(self, size: Size) -> Size:
        """One of each sample's own."""
        return size.to(*ANY_SIDES)

    def out_drawn(self, drawn: OpDraws, size: Size) -> Size:
        """The size that each sample drew."""
        return self._sides(size, (drawn["scale_height"], drawn["scale_width"]))

    def out_bounds(self, size: Size) -> tuple[Size, ...]:
        """The sizes for the smallest and largest scales and ratios."""
        transform: Any = self.module
        scales = [1.0, *(transform.random_scale_range if transform.random_scale_prob > 0 else ())]
        aspects = [1.0, *(transform.random_aspect_range if transform.random_aspect_prob > 0 else ())]
        return tuple(
            self._sides(size, self._factors(scale, aspect))
            for scale in (min(scales), max(scales))
            for aspect in (min(aspects), max(aspects))
        )

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """A scale and a ratio, each for some samples, (B,) float64."""
        transform: Any = self.module
        is_scaled, scales, is_stretched, aspects = sampler.uniform(4).astype(np.float64)
        low, high = transform.random_scale_range
        scales = np.where(is_scaled < transform.random_scale_prob, low + scales * (high - low), 1.0)
        low, high = map(math.log, transform.random_aspect_range)
        aspects = np.where(is_stretched < transform.random_aspect_prob, np.exp(low + aspects * (high - low)), 1.0)
        # A scale of 1, as of a sample that is not scaled, is 1 as an area too.
        height, width = self._factors(scales, aspects)
        return {"scale_height": height, "scale_width": width}


def resize_keep_ratio(name: str, transform: Any, units: Units) -> ResizeKeepRatio:
    """The op for timm's ``ResizeKeepRatio``, which draws or does not."""
    draws = transform.random_scale_prob > 0 or transform.random_aspect_prob > 0
    return (RandomResizeKeepRatio if draws else ResizeKeepRatio)(name, transform, units)


class CenterCropOrPad(crop.RandomCrop):
    """CenterCropOrPad: the middle of the image, with half of what it lacks before it and half behind."""

    def __init__(self, name: str, transform: Any, units: Units, mode: str = "") -> None:
        crop._Padded.__init__(self, name, transform, units, mode)
        self._height, self._width = transform.size

    def _padding(self, size: Size) -> Sequence[Any]:
        across = np.maximum(self._width - size.width, 0)
        down = np.maximum(self._height - size.height, 0)
        return across // 2, (across + 1) // 2, down // 2, (down + 1) // 2

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Nothing: the first column and row of the middle, (B,), half to even."""
        canvas = self._canvas(size)
        spare = (canvas.width - self._width, canvas.height - self._height)
        left, top = (np.broadcast_to(np.rint(np.asarray(each) / 2.0), size.batch).astype(np.float32) for each in spare)
        return {"x": left, "y": top}

    def describe(self) -> str:
        """In a few words."""
        return f"centre crop or pad {self._height}x{self._width}"
