"""``ResizeKeepRatio`` of timm and open_clip, and timm's ``CenterCropOrPad``, as transforms of torchvision pipelines.

A transform is *lowered* to an op, or run by its library.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuaug.fusion.ops.base import OpDraws, Size
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision import crop, resize
from gpuaug.fusion.ops.torchvision.base import interpolation_of


class ResizeKeepRatio(resize.WholeResize):
    """timm's ``ResizeKeepRatio``: resizes to ``size`` and keeps the aspect ratio.

    With ``longest=0`` the output covers ``size``; with ``longest=1`` it fits within ``size``; between 0 and 1 the scale is
    interpolated. Scale and aspect ratio may be random per sample.
    """

    def _read(self, transform: Any) -> None:
        mode = interpolation_of(transform)
        self.nearest = self.mask_half_pixel_centers = mode == "nearest-exact"
        self.set_antialias(cubic=mode == "bicubic")
        self.settings = {"size": f"{'x'.join(map(str, transform.size))}, in proportion"}
        self.draws_size = transform.random_scale_prob > 0 or transform.random_aspect_prob > 0

    def _resized(self, size: Size, factors: Sequence[Any]) -> Size:
        """Output size of a resize that keeps the ratio, with (height, width) multiplied by ``factors``, numbers or (B,)."""
        transform: Any = self.module
        ratios = [np.maximum(side, 1) / target for side, target in zip((size.height, size.width), transform.size, strict=True)]
        ratio = np.maximum(*ratios) * transform.longest + np.minimum(*ratios) * (1.0 - transform.longest)
        sides = (side * factor / ratio for side, factor in zip((size.height, size.width), factors, strict=True))
        return size.rounded_down(*map(np.rint, sides))

    def out_applied(self, size: Size) -> Size:
        """Output size, with the aspect ratio of the input."""
        return self._resized(size, (1.0, 1.0))

    def _factors(self, scales: Any, aspects: Any) -> tuple[Any, Any]:
        """(factor of the height, factor of the width) for scales and aspect ratios."""
        scale = 1.0 / np.sqrt(scales) if self.module.random_scale_area else scales
        ratio_root = np.sqrt(aspects)
        return scale / ratio_root, scale * ratio_root

    def drawn_size(self, draws: OpDraws, size: Size) -> Size:
        """Output size for the drawn factors of each sample."""
        return self._resized(size, (draws["scale_height"], draws["scale_width"]))

    def out_bounds(self, size: Size) -> tuple[Size, ...]:
        """Output sizes for the smallest and the largest scale, each with the smallest and the largest aspect ratio."""
        if not self.draws_size:
            return super().out_bounds(size)
        transform: Any = self.module
        scales = [1.0, *(transform.random_scale_range if transform.random_scale_prob > 0 else ())]
        aspects = [1.0, *(transform.random_aspect_range if transform.random_aspect_prob > 0 else ())]
        return tuple(
            self._resized(size, self._factors(scale, aspect))
            for scale in (min(scales), max(scales))
            for aspect in (min(aspects), max(aspects))
        )

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw a scale and an aspect ratio per sample, as factors ``"scale_height"`` and ``"scale_width"``, (B,) float64."""
        if not self.draws_size:
            return {}
        transform: Any = self.module
        is_scaled, scales, is_stretched, aspects = sampler.uniform(4).astype(np.float64)
        low, high = transform.random_scale_range
        scales = np.where(is_scaled < transform.random_scale_prob, low + scales * (high - low), 1.0)
        low, high = map(math.log, transform.random_aspect_range)
        aspects = np.where(is_stretched < transform.random_aspect_prob, np.exp(low + aspects * (high - low)), 1.0)
        # A scale of 1 means no scaling, also where scales refer to the area.
        height, width = self._factors(scales, aspects)
        return {"scale_height": height, "scale_width": width}

    def _options(self) -> dict[str, Any]:
        return {"interpolation": self.module.interpolation, "antialias": True}


class OpenClipResizeKeepRatio(ResizeKeepRatio):
    """open_clip's ``ResizeKeepRatio``. Not lowered with random scales or ratios, because their distributions are not timm's."""

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        return "random scales or ratios of open_clip's" if self.draws_size else super().unsupported()


class CenterCropOrPad(crop.PaddingCrop):
    """timm's ``CenterCropOrPad``: crops the centre. An axis shorter than the crop is first padded equally at both ends."""

    description = "centre crop or pad {_height}x{_width}"

    def _padding(self, size: Size) -> Sequence[Any]:
        """Padding in pixels (left, right, top, bottom)."""
        columns = np.maximum(self._width - size.width, 0)
        rows = np.maximum(self._height - size.height, 0)
        return columns // 2, (columns + 1) // 2, rows // 2, (rows + 1) // 2

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Compute the first column ``"x"`` and row ``"y"`` of the centred crop, (B,) each. Halves are rounded to even."""
        canvas = self._canvas(size)
        margins = (canvas.width - self._width, canvas.height - self._height)
        left, top = (np.broadcast_to(np.rint(np.asarray(margin) / 2.0), size.batch).astype(np.float32) for margin in margins)
        return {"x": left, "y": top}
