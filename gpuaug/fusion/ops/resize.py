"""Resizes of whole images, and of windows in them."""

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
"""Number of windows drawn for a resized crop. The first that fits the image is taken."""


class ResizedCrop(ResampleOp):
    """RandomResizedCrop with ``cropping_mode="slice"``."""

    centred: ClassVar[bool] = False
    """True: if no window fits, the crop is centred. False: it is anywhere, as in Kornia."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self._height, self._width = (int(side) for side in self.settings["size"])
        self.nearest = self.settings["resample"] == Resample.NEAREST
        self.half_pixel_centers = not self.settings["align_corners"]
        generator: Any = module._param_generator
        self._scale = tuple(float(bound) for bound in generator.scale)
        ratios = [float(bound) for bound in generator.ratio]
        self.areas = self._scale[0], self._scale[1] - self._scale[0]
        """Smallest share of the image's area, and the width of the range."""
        first, last = math.log(ratios[0]), math.log(ratios[1])
        self.log_aspect = first / 2, (last - first) / 2
        """log(sqrt(ratio)) of the first bound of the ratio, and the width of the range."""
        self.ratios = min(ratios), max(ratios)
        """Smallest and largest width / height."""

    @classmethod
    def unsupported_module(cls, module: nn.Module) -> str | None:
        """Why this module is left to Kornia, or ``None``."""
        flags: dict[str, Any] = module.flags  # type: ignore[assignment]
        return None if flags["cropping_mode"] == "slice" else f"cropping_mode={flags['cropping_mode']!r}"

    def unsupported_size(self, size: Size) -> str | None:
        """A sample may be skipped only if images have the output size; bicubic without antialiasing is left to Kornia."""
        return _plain_cubic(self) or changes_size_by_chance(self, size=size)

    def shrinks(self, size: Size) -> float:
        """The largest crop that may be drawn, by the output."""
        area = self._scale[1] * size.height * size.width
        narrowest, widest = self.ratios
        across = np.minimum(np.sqrt(area * widest), size.width) / self._width
        down = np.minimum(np.sqrt(area / narrowest), size.height) / self._height
        return float(np.max(np.maximum(across, down)))

    def out(self, size: Size) -> Size:
        """The size resized to."""
        return size.to(self._height, self._width)

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """The first of ten windows that fits the image, or the largest window within the ratios."""
        numbers = sampler.uniform(4)
        area, log_aspect, x, y = numbers
        across, down = self._sides(*self._candidates(area, log_aspect), size)
        lost = np.flatnonzero((across > size.width) | (down > size.height) | (np.minimum(across, down) < 1))
        # Most first windows fit, and for most of the other samples one of the next four.
        for used, until in ((0, 4), (4, CROP_CANDIDATES - 1)):
            if lost.size:
                others = self._candidates(*extra_uniforms(numbers.take(lost, 1), until - used, used))
                across[lost], down[lost], fits = self._fitting(*others, size.taking(lost))
                lost = lost[~fits]
        if lost.size:
            across[lost], down[lost] = self._fallback(size.taking(lost))
        left = np.floor(x * (np.float32(size.width + 1) - across))
        top = np.floor(y * (np.float32(size.height + 1) - down))
        if self.centred and lost.size:
            of_lost = size.taking(lost)
            left[lost], top[lost] = (of_lost.width - across[lost]) // 2, (of_lost.height - down[lost]) // 2
        return {"x": left, "y": top, "width": across, "height": down}

    def _candidates(self, area: Array, log_aspect: Array) -> tuple[Array, Array]:
        """sqrt(area share) and sqrt(ratio) of windows, from uniform numbers in [0, 1)."""
        (least, by), (first, upto) = self.areas, self.log_aspect
        length = np.sqrt(area * np.float32(by) + np.float32(least))
        # In float64: its last digits differ between machines, but are rounded off in float32.
        return length, np.exp((log_aspect * np.float32(upto) + np.float32(first)).astype(np.float64)).astype(np.float32)

    def _sides(self, length: Array, root: Array, size: Size) -> tuple[Array, Array]:
        """Sides of windows in pixels, rounded."""
        side = length * np.sqrt(np.float32(size.height * size.width))
        return np.rint(side * root), np.rint(side / root)

    def _fitting(self, lengths: Array, roots: Array, size: Size) -> tuple[Array, Array, Array]:
        """Sides of each sample's first fitting window, given K windows, (K, B), and the mask of samples that have one."""
        wide, high = self._sides(lengths, roots, size)
        fits = (wide > 0) & (wide <= size.width) & (high > 0) & (high <= size.height)
        first = fits.argmax(0) * fits.shape[1] + np.arange(fits.shape[1])
        return wide.take(first), high.take(first), fits.take(first)

    def _fallback(self, size: Size) -> tuple[Array, Array]:
        """Sides of the largest window within the ratios."""
        height, width = np.float32(size.height), np.float32(size.width)
        narrowest, widest = np.float32(self.ratios[0]), np.float32(self.ratios[1])
        ratio = width / height
        across = np.where(ratio > widest, np.rint(height * widest), width)
        down = np.where(ratio < narrowest, np.rint(width / narrowest), height)
        return np.maximum(across, 1), np.maximum(down, 1)

    def unmoved(self, batch: int) -> OpDraws:
        """Draws under which images of the output size are unchanged."""
        zeros, ones = np.zeros(batch, dtype=np.float32), np.ones(batch, dtype=np.float32)
        return {"x": zeros, "y": zeros, "width": self._width * ones, "height": self._height * ones, "apply_mask": always(batch)}

    def _applied(self, drawn: OpDraws) -> OpDraws:
        """The windows; the whole image for samples that the op does not apply to."""
        if not self.is_random:
            return drawn
        apply_mask = drawn["apply_mask"]
        unmoved = self.unmoved(len(drawn["apply_mask"]))
        return {name: np.where(apply_mask, drawn[name], unmoved[name]) for name in ("x", "y", "width", "height")}

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """Corners in the image, and in the output."""
        return corners(drawn["x"], drawn["y"], drawn["width"], drawn["height"], self._width, self._height, size)

    def resampling(self, drawn: OpDraws, size: Size, half_pixel_centers: bool) -> Resampling:
        """The resampling of the window to the output."""
        window = self._applied(drawn)
        return Resampling(
            scale_of(window["width"], self._width, half_pixel_centers),
            window["x"],
            window["width"],
            scale_of(window["height"], self._height, half_pixel_centers),
            window["y"],
            window["height"],
        )

    def window(self, drawn: OpDraws, size: Size) -> Array:
        """The crop, at least two pixels wide and high where the image is."""
        window = self._applied(drawn)
        left, width = _two_pixels(window["x"], window["width"], size.width)
        top, height = _two_pixels(window["y"], window["height"], size.height)
        return window_table(size, top, left, height, width)

    def matrix(self, drawn: OpDraws, size: Size) -> Array:
        """Onto the output's corners, or its edges, as the module is set."""
        matrix = np.tile(np.eye(3), (size.batch, 1, 1))
        half_pixel_centers = self.half_pixel_centers or self.nearest
        window = self._applied(drawn)
        for k, start, count, target in ((0, "x", "width", self._width), (1, "y", "height", self._height)):
            set_resize(
                matrix, k, window[start].astype(np.float64), window[count].astype(np.float64), target, half_pixel_centers
            )
        return matrix

    def describe(self) -> str:
        """In a few words."""
        return f"crop and resize to {self._height}x{self._width}"


class Resize(ResampleOp):
    """Resize without antialiasing."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.nearest = self.settings["resample"] == Resample.NEAREST
        self.half_pixel_centers = not self.settings["align_corners"]

    @classmethod
    def unsupported_module(cls, module: nn.Module) -> str | None:
        """Why this module is left to Kornia, or ``None``."""
        flags: dict[str, Any] = module.flags  # type: ignore[assignment]
        return "antialias=True, which in Kornia is a blur" if flags["antialias"] else None

    def unsupported_size(self, size: Size) -> str | None:
        """A skipped sample would have another size; Kornia raises for an output without pixels."""
        out = self.out(size)
        if np.any(np.equal(out.height, 0)) or np.any(np.equal(out.width, 0)):
            return "comes out without pixels"
        return _plain_cubic(self) or changes_size_by_chance(self, size=size)

    def shrinks(self, size: Size) -> float:
        """The image, by the output."""
        outs = self.out_bounds(size)
        return max(float(np.max(np.maximum(size.width / out.width, size.height / out.height))) for out in outs)

    def out(self, size: Size) -> Size:
        """The size given, or one side of it with the other in proportion."""
        wanted, side = self.settings["size"], self.settings["side"]
        if not isinstance(wanted, int):
            return size.to(int(wanted[0]), int(wanted[1]))
        ratio = size.width / size.height
        # One side is as given: the height, or the width.
        high = np.logical_xor(side == "short", ratio < 1.0) if side not in ("vert", "horz") else side == "vert"
        if size.ragged:
            inverse = (wanted / ratio).astype(np.int64)
            return size.to(np.where(high, wanted, inverse), np.where(high, (wanted * ratio).astype(np.int64), wanted))
        return size.to(wanted, int(wanted * ratio)) if high else size.to(int(wanted / ratio), wanted)

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """Corners of the image, and of the output."""
        out = self.out(size)
        zeros = np.zeros(size.batch, dtype=np.float32)
        return corners(zeros, zeros, np.float32(size.width), np.float32(size.height), out.width, out.height, size)

    def resampling(self, drawn: OpDraws, size: Size, half_pixel_centers: bool) -> Resampling:
        """The resampling of the whole image to the output."""
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
        """Onto the output's corners, or its edges, as the module is set."""
        out = self.out_drawn(drawn, size)
        half_pixel_centers = self.half_pixel_centers or self.nearest
        matrix = identities(size if size.ragged else out)
        set_resize(matrix, 0, np.zeros(1), np.atleast_1d(size.width), out.width, half_pixel_centers)
        set_resize(matrix, 1, np.zeros(1), np.atleast_1d(size.height), out.height, half_pixel_centers)
        return matrix

    def describe(self) -> str:
        """In a few words."""
        return f"resize to {self.settings['size']}"


def _two_pixels(start: Array, count: Array, length: Any) -> tuple[Array, Array]:
    """One axis of a window, with the neighbour that a kernel loads beside a single pixel (``paired`` in ``triton/taps.py``)."""
    widened = (count == 1) & np.greater(length, 1)
    return np.where(widened, np.maximum(start - 1, 0), start), np.where(widened, 2, count)


def _plain_cubic(op: ResampleOp) -> str | None:
    """Why a bicubic crop or resize without antialiasing is left to Kornia."""
    return "resample='bicubic'" if op.settings["resample"] == Resample.BICUBIC and not op.filter else None


def set_resize(matrix: Array, k: int, start: Array, count: Array, target: Any, half_pixel_centers: bool) -> None:
    """Write the scale and shift of axis ``k`` that take a window onto ``target`` pixels."""
    if half_pixel_centers:
        scale = target / count
        matrix[:, k, k] = scale
        matrix[:, k, 2] = (0.5 - start) * scale - 0.5
    else:
        # A single pixel is shifted: with corners aligned its extent is 0.
        scale = np.where((count > 1) & np.greater(target, 1), (target - 1) / np.maximum(count - 1, 1), 1.0)
        matrix[:, k, k] = scale
        matrix[:, k, 2] = -start * scale


LOWERED: dict[type[nn.Module], type[GatherOp]] = {K.RandomResizedCrop: ResizedCrop, K.Resize: Resize}
