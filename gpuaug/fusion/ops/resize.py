"""Kornia's modules that resize whole images or random crops.

Each module is *lowered* to an op, or run by Kornia. An op describes its movement by ``resampling``, from output to input
pixels. A *window* is the crop, in pixels of the input image. A *sample* is an image or a clip. Samples outside the *apply mask*
skip the op. Class attributes without a comment are explained in ``base.py``.
"""

import math
from typing import Any, ClassVar

import numpy as np
from kornia import augmentation as K
from kornia.constants import Resample
from torch import Tensor

from gpuaug.fusion.ops.base import Array, OpDraws, Size
from gpuaug.fusion.ops.crop import corners
from gpuaug.fusion.ops.geometry import PerSample, ResampleOp, as_float64, stack_windows
from gpuaug.fusion.ops.kornia_private import generator_of
from gpuaug.fusion.ops.sampler import Sampler, extra_uniforms

CROP_CANDIDATES = 10
"""Number of candidate windows per sample of a resized crop. The first window that fits into the image is used."""


class _Resampling(ResampleOp):
    """Base class of both ops."""

    def _read(self, module: Any) -> None:
        self.nearest = self.settings["resample"] == Resample.NEAREST
        self.half_pixel_centers = not self.settings["align_corners"]

    def unsupported_size(self, size: Size) -> str | None:
        """Reason if the op is bicubic without antialiasing, or samples that skip it would have another size; else ``None``."""
        is_cubic = self.settings.get("resample") == Resample.BICUBIC and not self.filter
        return "resample='bicubic'" if is_cubic else super().unsupported_size(size)


class ResizedCrop(_Resampling):
    """``RandomResizedCrop`` with ``cropping_mode="slice"``."""

    lowers = (K.RandomResizedCrop,)
    description = "crop and resize to {_height}x{_width}"
    centred: ClassVar[bool] = False
    """Whether the crop is centred if no candidate window fits into the image; otherwise its position is random."""

    def _read(self, module: Any) -> None:
        super()._read(module)
        self._height, self._width = (int(side) for side in self.settings["size"])
        generator = generator_of(module)
        ratios = [float(bound) for bound in generator.ratio]
        self._set_bounds(generator.scale, ratios, [*map(math.log, ratios)])

    def _set_bounds(self, scale: Any, ratios: Any, log_ratios: Any) -> None:
        """Set the bounds of area and aspect ratio. ``log_ratios``: logarithms of ``ratios``."""
        smallest_area, self._largest_area = (float(bound) for bound in scale)
        self.areas = smallest_area, self._largest_area - smallest_area
        """(smallest area, largest minus smallest area) of a crop, as fractions of the area of the image."""
        first_bound, second_bound = log_ratios
        self.log_aspect = first_bound / 2, (second_bound - first_bound) / 2
        """(first bound, second minus first bound) of log(sqrt(width / height)) of a crop."""
        self.ratios = float(min(ratios)), float(max(ratios))
        """(smallest, largest) width / height of a crop."""

    def unsupported(self) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        return None if self.settings["cropping_mode"] == "slice" else f"cropping_mode={self.settings['cropping_mode']!r}"

    def max_downscaling(self, size: Size) -> float:
        """Side of the largest crop divided by the output side, for the axis on which the quotient is larger."""
        area = self._largest_area * size.height * size.width
        min_ratio, max_ratio = self.ratios
        x_scale = np.minimum(np.sqrt(area * max_ratio), size.width) / self._width
        y_scale = np.minimum(np.sqrt(area / min_ratio), size.height) / self._height
        return float(np.max(np.maximum(x_scale, y_scale)))

    def out_applied(self, size: Size) -> Size:
        """Output size: the setting ``size``."""
        return size.to(self._height, self._width)

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw a window per sample, in pixels: ``"x"``, ``"y"``, ``"width"`` and ``"height"``, (B,) each.

        The window is the first of ten candidates that fits into the image, or without one the largest window within ``ratios``.
        """
        if size.full is not None:
            return _scaled(self.draw_parameters(sampler, size.to(*size.full)), size)
        uniforms = sampler.uniform(4)
        area_number, aspect_number, x, y = uniforms
        width, height = self._sides(*self._candidates(area_number, aspect_number), size)
        # Indices of the samples for which no candidate has fitted yet.
        open_samples = np.flatnonzero((width > size.width) | (height > size.height) | (np.minimum(width, height) < 1))
        # For most samples the first candidate fits, and for most others one of the next four.
        for start, end in ((0, 4), (4, CROP_CANDIDATES - 1)):
            if open_samples.size:
                candidates = self._candidates(*extra_uniforms(uniforms.take(open_samples, 1), end - start, start))
                width[open_samples], height[open_samples], fits = self._first_fitting(*candidates, size.select(open_samples))
                open_samples = open_samples[~fits]
        if open_samples.size:
            width[open_samples], height[open_samples] = self._largest_window(size.select(open_samples))
        left = np.floor(x * (np.float32(size.width + 1) - width))
        top = np.floor(y * (np.float32(size.height + 1) - height))
        if self.centred and open_samples.size:
            open_size = size.select(open_samples)
            left[open_samples] = (open_size.width - width[open_samples]) // 2
            top[open_samples] = (open_size.height - height[open_samples]) // 2
        return {"x": left, "y": top, "width": width, "height": height}

    def _candidates(self, numbers: Array, ratios: Array) -> tuple[Array, Array]:
        """(sqrt(area / area of the image), sqrt(width / height)) of candidate windows, from uniform numbers in [0, 1)."""
        (min_area, area_range), (first, log_range) = self.areas, self.log_aspect
        area_root = np.sqrt(numbers * np.float32(area_range) + np.float32(min_area))
        # In float64, because the last digits of exp differ between machines. Rounding to float32 removes the difference.
        return area_root, np.exp((ratios * np.float32(log_range) + np.float32(first)).astype(np.float64)).astype(np.float32)

    def _sides(self, area_root: Array, ratio_root: Array, size: Size) -> tuple[Array, Array]:
        """(widths, heights) of candidate windows, in whole pixels. Arguments as ``_candidates`` returns them."""
        side = area_root * np.sqrt(np.float32(size.height * size.width))
        return np.rint(side * ratio_root), np.rint(side / ratio_root)

    def _first_fitting(self, area_roots: Array, ratio_roots: Array, size: Size) -> tuple[Array, Array, Array]:
        """(widths, heights, mask), (B,) each, of the first window that fits into the image, among K candidates, (K, B).

        The mask is False for samples for which no window fits.
        """
        widths, heights = self._sides(area_roots, ratio_roots, size)
        fits = (widths > 0) & (widths <= size.width) & (heights > 0) & (heights <= size.height)
        # Index in the flattened (K, B) arrays. ``argmax`` returns the first candidate that fits, or candidate 0 if none does.
        flat_indices = fits.argmax(0) * fits.shape[1] + np.arange(fits.shape[1])
        return widths.take(flat_indices), heights.take(flat_indices), fits.take(flat_indices)

    def _largest_window(self, size: Size) -> tuple[Array, Array]:
        """(widths, heights) in pixels of the largest windows whose width / height is within ``ratios``."""
        height, width = np.float32(size.height), np.float32(size.width)
        min_ratio, max_ratio = np.float32(self.ratios[0]), np.float32(self.ratios[1])
        ratio = width / height
        window_width = np.where(ratio > max_ratio, np.rint(height * max_ratio), width)
        window_height = np.where(ratio < min_ratio, np.rint(width / min_ratio), height)
        return np.maximum(window_width, 1), np.maximum(window_height, 1)

    def identity_draws(self, batch: int) -> OpDraws:
        """Draws with which the op returns images of the output size unchanged."""
        zeros, ones = np.zeros(batch, dtype=np.float32), np.ones(batch, dtype=np.float32)
        return {
            "x": zeros,
            "y": zeros,
            "width": self._width * ones,
            "height": self._height * ones,
            "apply_mask": np.ones(batch, dtype=bool),
        }

    def resized_window(self, draws: OpDraws, size: Size) -> tuple[PerSample, ...]:
        """(left, width, top, height) of the crop; the whole image for samples that skip the op."""
        whole: dict[str, Any] = {"x": 0.0, "width": np.float32(size.width), "y": 0.0, "height": np.float32(size.height)}
        if not self.is_random:
            return tuple(draws[name] for name in whole)
        return tuple(np.where(draws["apply_mask"], draws[name], side) for name, side in whole.items())

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Parameters of Kornia's crop: the result of ``corners``."""
        return corners(draws["x"], draws["y"], draws["width"], draws["height"], self._width, self._height, size)

    def window(self, draws: OpDraws, size: Size) -> Array:
        """Window of the crop, at least two pixels wide and high if the image is."""
        left, width, top, height = self.resized_window(draws, size)
        left, width = _at_least_two_pixels(left, width, size.width)
        top, height = _at_least_two_pixels(top, height, size.height)
        return stack_windows(size, top, left, height, width)


class Resize(_Resampling):
    """``Resize`` without antialiasing."""

    lowers = (K.Resize,)
    description = "resize to {settings[size]}"

    def unsupported(self) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        return "antialias=True, which in Kornia is a blur" if self.settings["antialias"] else None

    def unsupported_size(self, size: Size) -> str | None:
        """Reason why images of ``size`` cannot be resized in a fused pass, or ``None``.

        The libraries raise an error for an empty output. A sample that skips the op must have the output size.
        """
        if any(np.any(np.less(side, 1)) for out in self.out_bounds(size) for side in (out.height, out.width)):
            return "comes out without pixels"
        return super().unsupported_size(size)

    def max_downscaling(self, size: Size) -> float:
        """Input side divided by output side, for the axis and the output size with the largest quotient."""
        out_sizes = self.out_bounds(size)
        return max(float(np.max(np.maximum(size.width / out.width, size.height / out.height))) for out in out_sizes)

    def out_applied(self, size: Size) -> Size:
        """Output size: the setting ``size`` if it has two sides; if it is one side, with the aspect ratio of the input."""
        target, side = self.settings["size"], self.settings["side"]
        if not isinstance(target, int):
            return size.to(int(target[0]), int(target[1]))
        ratio = np.maximum(size.width, 1) / np.maximum(size.height, 1)  # an error about empty images is raised later
        # True if ``target`` is the height, False if it is the width.
        sets_height = np.logical_xor(side == "short", ratio < 1.0) if side not in ("vert", "horz") else side == "vert"
        return size.rounded_down(np.where(sets_height, target, target / ratio), np.where(sets_height, target * ratio, target))

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Parameters of Kornia's resize: the result of ``corners`` for a window that is the whole image."""
        out = self.out(size)
        zeros = np.zeros(size.batch, dtype=np.float32)
        return corners(zeros, zeros, np.float32(size.width), np.float32(size.height), out.width, out.height, size)

    def resized_window(self, draws: OpDraws, size: Size) -> tuple[PerSample, ...]:
        """(left, width, top, height) of the whole image."""
        return 0.0, as_float64(size.width), 0.0, as_float64(size.height)


def _scaled(draws: OpDraws, size: Size) -> OpDraws:
    """Convert windows from pixels of the full images (``size.full``) to pixels of the downsampled images (``size``)."""
    assert size.full is not None
    result = dict(draws)
    for start, count, length, full in (("y", "height", size.height, size.full[0]), ("x", "width", size.width, size.full[1])):
        scale = 2.0 ** np.ceil(np.log2(full / length))  # 1, 2, 4 or 8: sides of downsampled images are rounded up
        result[count] = np.maximum(np.rint(draws[count] / scale), 1).astype(np.float32)
        result[start] = np.minimum(np.rint(draws[start] / scale), length - result[count]).astype(np.float32)
    return result


def _at_least_two_pixels(start: PerSample, count: PerSample, length: Any) -> tuple[Array, Array]:
    """(start, count) of a window along one axis of ``length`` pixels, with a window of one pixel extended to two.

    Kernels load pairs of neighbouring pixels.
    """
    is_single = (count == 1) & np.greater(length, 1)
    return np.where(is_single, np.maximum(start - 1, 0), start), np.where(is_single, 2, count)
