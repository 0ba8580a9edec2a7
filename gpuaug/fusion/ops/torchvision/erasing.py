"""torchvision's random erasing."""

import math
from typing import Any

import numpy as np
from torch import nn
from torchvision.transforms import v2

from gpuaug.fusion.ops import positional
from gpuaug.fusion.ops.base import Array, OpDraws, Size, host_tensor
from gpuaug.fusion.ops.sampler import Sampler, extra_uniforms
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp, Units
from gpuaug.fusion.pixels import LARGEST

CANDIDATES = 10
"""Rectangles that are drawn, of which the first that is smaller than the image is taken, and none if none is."""


class Erasing(TorchvisionOp, positional.Erasing):
    """RandomErasing: one value in a rectangle. Masks stay as they are."""

    erases_masks = False

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        value = transform.value[0] if transform.value else 0
        self._value = self.share(int(value) if units in LARGEST else value)
        self._least, most = (float(bound) for bound in transform.scale)
        self._by = most - self._least
        self._log_least, log_most = (math.log(bound) for bound in transform.ratio)
        self._log_by = log_most - self._log_least

    def unsupported(self) -> str | None:
        """Why the transform is left to torchvision, or ``None``."""
        values: Any = self.module.value
        if values is None:
            return "value='random'"
        return None if len(values) == 1 else "value has a number for each channel"

    def per_channel(self, channels: int) -> dict[str, Any]:
        """The values, where they are given."""
        return {} if self.module.value is None else {"value": self.module.value}

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Whole sides of an area and ratio, and a start where the rectangle fits; no sides where none is small enough."""
        numbers = sampler.uniform(4)
        heights, widths = self._sides(numbers[0], numbers[1], size)
        misses = np.flatnonzero((heights >= size.height) | (widths >= size.width))
        if misses.size:
            missed = size.to(size.height[misses], size.width[misses]) if size.ragged else size
            shares, aspects = extra_uniforms(numbers[:, misses], CANDIDATES - 1)
            high, wide = self._sides(shares, aspects, missed)
            fits = (high < missed.height) & (wide < missed.width)
            first = fits.argmax(0)[None]
            found = fits.any(0)
            for sides, others in ((heights, high), (widths, wide)):
                sides[misses] = np.where(found, np.take_along_axis(others, first, 0)[0], 0)
        return {
            "widths": widths,
            "heights": heights,
            "xs": np.floor(numbers[2] * (np.float32(size.width + 1) - widths)),
            "ys": np.floor(numbers[3] * (np.float32(size.height + 1) - heights)),
        }

    def _sides(self, share: Array, aspect: Array, size: Size) -> tuple[Array, Array]:
        """Whole heights and widths of rectangles, from numbers in [0, 1)."""
        area = (share * np.float32(self._by) + np.float32(self._least)) * np.float32(size.height * size.width)
        ratio = np.exp((aspect * np.float32(self._log_by) + np.float32(self._log_least)).astype(np.float64)).astype(np.float32)
        return np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The rectangle, unless there is none, and its value."""
        names = {"i": "ys", "j": "xs", "h": "heights", "w": "widths"}
        rectangle = {name: int(drawn[own][sample]) for name, own in names.items()}
        if not rectangle["h"] or not rectangle["w"]:
            return []
        return [("erase", {**rectangle, "v": host_tensor(self.module.value, np.float32)[:, None, None]})]


LOWERED: dict[type[nn.Module], type[TorchvisionOp]] = {v2.RandomErasing: Erasing}
