"""Kornia's resizing modules, of whole images and of random crops."""

import math
from typing import Any, ClassVar

import numpy as np
from kornia import augmentation as K
from kornia.constants import Resample
from torch import Tensor, nn

from gpuaug.fusion.ops.base import Array, OpDraws, Size
from gpuaug.fusion.ops.crop import corners, identities
from gpuaug.fusion.ops.geometry import (
    GatherOp,
    ResampleOp,
    Resampling,
    changes_size_by_chance,
    length_of,
    scale_of,
    window_table,
)
from gpuaug.fusion.ops.sampler import Sampler, always, extra_uniforms

CROP_CANDIDATES = 10
"""Number of candidate windows per sample of a resized crop. The first that fits the image is used."""


class ResizedCrop(ResampleOp):
    """``RandomResizedCrop`` with ``cropping_mode="slice"``."""

    centred: ClassVar[bool] = False
    """If no window fits: True to centre the fallback crop; False for a random position, as in Kornia."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self._height, self._width = (int(side) for side in self.settings["size"])
        self.nearest = self.settings["resample"] == Resample.NEAREST
        self.half_pixel_centers = not self.settings["align_corners"]
        generator: Any = module._param_generator
        self._scale = tuple(float(bound) for bound in generator.scale)
        ratios = [float(bound) for bound in generator.ratio]
        self.areas = self._scale[0], self._scale[1] - self._scale[0]
        """(smallest area as a fraction of the image, largest minus smallest fraction)."""
        first, last = math.log(ratios[0]), math.log(ratios[1])
        self.log_aspect = first / 2, (last - first) / 2
        """(log(sqrt(ratio)) at the first bound of the ratio, difference to the second bound)."""
        self.ratios = min(ratios), max(ratios)
        """(smallest, largest) width / height."""

    @classmethod
    def unsupported_module(cls, module: nn.Module) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        flags: dict[str, Any] = module.flags  # type: ignore[assignment]
        return None if flags["cropping_mode"] == "slice" else f"cropping_mode={flags['cropping_mode']!r}"

    def unsupported_size(self, size: Size) -> str | None:
        """Reject bicubic without antialiasing, and a change of size with a probability below 1."""
        return _plain_cubic(self) or changes_size_by_chance(self, size=size)

    def shrinks(self, size: Size) -> float:
        """Largest drawn crop divided by the output size."""
        area = self._scale[1] * size.height * size.width
        min_ratio, max_ratio = self.ratios
        across = np.minimum(np.sqrt(area * max_ratio), size.width) / self._width
        down = np.minimum(np.sqrt(area / min_ratio), size.height) / self._height
        return float(np.max(np.maximum(across, down)))

    def out_applied(self, size: Size) -> Size:
        """Output size."""
        return size.to(self._height, self._width)

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw windows in pixels, (B,) each: the first of ten candidates that fits, else the largest within the ratios."""
        numbers = sampler.uniform(4)
        area, log_aspect, x, y = numbers
        across, down = self._sides(*self._candidates(area, log_aspect), size)
        misses = np.flatnonzero((across > size.width) | (down > size.height) | (np.minimum(across, down) < 1))
        # The first window fits for most samples, and one of the next four for most others.
        for used, until in ((0, 4), (4, CROP_CANDIDATES - 1)):
            if misses.size:
                candidates = self._candidates(*extra_uniforms(numbers.take(misses, 1), until - used, used))
                across[misses], down[misses], fits = self._fitting(*candidates, size.taking(misses))
                misses = misses[~fits]
        if misses.size:
            across[misses], down[misses] = self._fallback(size.taking(misses))
        left = np.floor(x * (np.float32(size.width + 1) - across))
        top = np.floor(y * (np.float32(size.height + 1) - down))
        if self.centred and misses.size:
            missed = size.taking(misses)
            left[misses], top[misses] = (missed.width - across[misses]) // 2, (missed.height - down[misses]) // 2
        return {"x": left, "y": top, "width": across, "height": down}

    def _candidates(self, area: Array, log_aspect: Array) -> tuple[Array, Array]:
        """(sqrt(area fraction), sqrt(ratio)) of windows, from uniform numbers in [0, 1)."""
        (min_area, area_range), (first, log_range) = self.areas, self.log_aspect
        length = np.sqrt(area * np.float32(area_range) + np.float32(min_area))
        # float64, because the last digits of exp differ between machines; rounding to float32 removes the difference.
        return length, np.exp((log_aspect * np.float32(log_range) + np.float32(first)).astype(np.float64)).astype(np.float32)

    def _sides(self, length: Array, root: Array, size: Size) -> tuple[Array, Array]:
        """(widths, heights) of windows, rounded to whole pixels."""
        side = length * np.sqrt(np.float32(size.height * size.width))
        return np.rint(side * root), np.rint(side / root)

    def _fitting(self, lengths: Array, roots: Array, size: Size) -> tuple[Array, Array, Array]:
        """(widths, heights, mask) of the first window that fits, (B,) each, among K windows, (K, B).

        The mask is False for samples without a window that fits.
        """
        wide, high = self._sides(lengths, roots, size)
        fits = (wide > 0) & (wide <= size.width) & (high > 0) & (high <= size.height)
        first = fits.argmax(0) * fits.shape[1] + np.arange(fits.shape[1])
        return wide.take(first), high.take(first), fits.take(first)

    def _fallback(self, size: Size) -> tuple[Array, Array]:
        """(widths, heights) of the largest window within the ratios, in pixels."""
        height, width = np.float32(size.height), np.float32(size.width)
        min_ratio, max_ratio = np.float32(self.ratios[0]), np.float32(self.ratios[1])
        ratio = width / height
        across = np.where(ratio > max_ratio, np.rint(height * max_ratio), width)
        down = np.where(ratio < min_ratio, np.rint(width / min_ratio), height)
        return np.maximum(across, 1), np.maximum(down, 1)

    def unmoved(self, batch: int) -> OpDraws:
        """Draws that leave images of the output size unchanged."""
        zeros, ones = np.zeros(batch, dtype=np.float32), np.ones(batch, dtype=np.float32)
        return {"x": zeros, "y": zeros, "width": self._width * ones, "height": self._height * ones, "apply_mask": always(batch)}

    def _applied(self, drawn: OpDraws, size: Size) -> OpDraws:
        """Drawn windows; the whole image for skipped samples."""
        if not self.is_random:
            return drawn
        apply_mask = drawn["apply_mask"]
        unmoved: dict[str, Any] = {"x": 0.0, "y": 0.0, "width": np.float32(size.width), "height": np.float32(size.height)}
        return {name: np.where(apply_mask, drawn[name], unmoved[name]) for name in ("x", "y", "width", "height")}

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """Corners of the window in the image and in the output."""
        return corners(drawn["x"], drawn["y"], drawn["width"], drawn["height"], self._width, self._height, size)

    def resampling(self, drawn: OpDraws, size: Size, half_pixel_centers: bool) -> Resampling:
        """Resampling of the window to the output size."""
        window = self._applied(drawn, size)
        out = self.out_drawn(drawn, size)
        return Resampling(
            scale_of(window["width"], out.width, half_pixel_centers),
            window["x"],
            window["width"],
            scale_of(window["height"], out.height, half_pixel_centers),
            window["y"],
            window["height"],
        )

    def window(self, drawn: OpDraws, size: Size) -> Array:
        """Window of the crop, widened to two pixels per axis if the image has them."""
        window = self._applied(drawn, size)
        left, width = _two_pixels(window["x"], window["width"], size.width)
        top, height = _two_pixels(window["y"], window["height"], size.height)
        return window_table(size, top, left, height, width)

    def matrix(self, drawn: OpDraws, size: Size) -> Array:
        """Matrices from the window to the output, by pixel edges or, with ``align_corners``, by centres of corner pixels."""
        matrix = np.tile(np.eye(3), (size.batch, 1, 1))
        half_pixel_centers = self.half_pixel_centers or self.nearest
        window = self._applied(drawn, size)
        out = self.out_drawn(drawn, size)
        for k, start, count, target in ((0, "x", "width", out.width), (1, "y", "height", out.height)):
            set_resize(
                matrix, k, window[start].astype(np.float64), window[count].astype(np.float64), target, half_pixel_centers
            )
        return matrix

    def describe(self) -> str:
        """Short description for ``explain()``."""
        return f"crop and resize to {self._height}x{self._width}"


class Resize(ResampleOp):
    """``Resize`` without antialiasing."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.nearest = self.settings["resample"] == Resample.NEAREST
        self.half_pixel_centers = not self.settings["align_corners"]

    @classmethod
    def unsupported_module(cls, module: nn.Module) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        flags: dict[str, Any] = module.flags  # type: ignore[assignment]
        return "antialias=True, which in Kornia is a blur" if flags["antialias"] else None

    def unsupported_size(self, size: Size) -> str | None:
        """Reject an empty output, for which Kornia raises an error, and a change of size with a probability below 1."""
        out = self.out(size)
        if np.any(np.equal(out.height, 0)) or np.any(np.equal(out.width, 0)):
            return "comes out without pixels"
        return _plain_cubic(self) or changes_size_by_chance(self, size=size)

    def shrinks(self, size: Size) -> float:
        """Input size divided by output size."""
        outs = self.out_bounds(size)
        return max(float(np.max(np.maximum(size.width / out.width, size.height / out.height))) for out in outs)

    def out_applied(self, size: Size) -> Size:
        """Output size: (height, width) if set, else one side is set and the aspect ratio is kept."""
        target, side = self.settings["size"], self.settings["side"]
        if not isinstance(target, int):
            return size.to(int(target[0]), int(target[1]))
        ratio = size.width / size.height
        # True if ``target`` is the height, False if it is the width.
        sets_height = np.logical_xor(side == "short", ratio < 1.0) if side not in ("vert", "horz") else side == "vert"
        if size.ragged:
            height = (target / ratio).astype(np.int64)
            return size.to(
                np.where(sets_height, target, height), np.where(sets_height, (target * ratio).astype(np.int64), target)
            )
        return size.to(target, int(target * ratio)) if sets_height else size.to(int(target / ratio), target)

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """Corners of the image and of the output."""
        out = self.out(size)
        zeros = np.zeros(size.batch, dtype=np.float32)
        return corners(zeros, zeros, np.float32(size.width), np.float32(size.height), out.width, out.height, size)

    def resampling(self, drawn: OpDraws, size: Size, half_pixel_centers: bool) -> Resampling:
        """Resampling of the whole image to the output size."""
        out = self.out_drawn(drawn, size)
        width, height = length_of(size.width), length_of(size.height)
        return Resampling(
            scale_of(width, out.width, half_pixel_centers),
            0.0,
            width,
            scale_of(height, out.height, half_pixel_centers),
            0.0,
            height,
        )

    def matrix(self, drawn: OpDraws, size: Size) -> Array:
        """Matrices from the window to the output, by pixel edges or, with ``align_corners``, by centres of corner pixels."""
        out = self.out_drawn(drawn, size)
        half_pixel_centers = self.half_pixel_centers or self.nearest
        matrix = identities(size if size.ragged else out)
        set_resize(matrix, 0, np.zeros(1), np.atleast_1d(size.width), out.width, half_pixel_centers)
        set_resize(matrix, 1, np.zeros(1), np.atleast_1d(size.height), out.height, half_pixel_centers)
        return matrix

    def describe(self) -> str:
        """Short description for ``explain()``."""
        return f"resize to {self.settings['size']}"


def _two_pixels(start: Array, count: Array, length: Any) -> tuple[Array, Array]:
    """(start, count) of a window along one axis, at least two pixels, because kernels load pairs (see ``triton/taps.py``)."""
    widened = (count == 1) & np.greater(length, 1)
    return np.where(widened, np.maximum(start - 1, 0), start), np.where(widened, 2, count)


def _plain_cubic(op: ResampleOp) -> str | None:
    """Reason why Kornia runs the op: bicubic without antialiasing; else ``None``."""
    return "resample='bicubic'" if op.settings["resample"] == Resample.BICUBIC and not op.filter else None


def set_resize(matrix: Array, k: int, start: Array, count: Array, target: Any, half_pixel_centers: bool) -> None:
    """Write the scale and shift of axis ``k`` that map a window, ``count`` pixels from ``start``, to ``target`` pixels."""
    if half_pixel_centers:
        scale = target / count
        matrix[:, k, k] = scale
        matrix[:, k, 2] = (0.5 - start) * scale - 0.5
    else:
        # With aligned corners a single pixel has an extent of 0, so it is only shifted.
        scale = np.where((count > 1) & np.greater(target, 1), (target - 1) / np.maximum(count - 1, 1), 1.0)
        matrix[:, k, k] = scale
        matrix[:, k, 2] = -start * scale


LOWERED: dict[type[nn.Module], type[GatherOp]] = {K.RandomResizedCrop: ResizedCrop, K.Resize: Resize}
