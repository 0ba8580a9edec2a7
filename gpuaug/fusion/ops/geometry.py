"""Ops that move pixels, as two kinds of maps from an output pixel to where it comes from.

An ``IndexMap`` permutes: flips, crops and padding, an axis at a time and in whole pixels, so any number of them compose
exactly. A warp interpolates, so a pass holds at most one (two would not be what Kornia does twice). Coordinates are pixels,
(x, y) = (column, row), and a fixed point of view: *output index → input index*.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size

Edge = Literal["", "constant", "replicate", "reflect"]
"""What lies outside an index map's range; ``""``: nothing can."""

Filter = Literal["", "triangle", "cubic"]

Rows = Array | float


@dataclass(frozen=True, slots=True)
class Axis:
    """Output index ``i`` → input index ``sign * i + offset``, inside where ``low <= index < high``.

    Each is one number a sample, (B,), or one for the batch.
    """

    sign: Rows
    offset: Rows
    low: Rows
    high: Rows

    def after(self, first: "Axis") -> "Axis":
        """The axis that applies ``first`` to the image, then this one."""
        sign = np.asarray(first.sign)
        low = np.where(sign > 0, self.low + first.offset, first.offset - self.high + 1)
        high = np.where(sign > 0, self.high + first.offset, first.offset - self.low + 1)
        return Axis(
            first.sign * self.sign,
            first.sign * self.offset + first.offset,
            np.maximum(first.low, low),
            np.minimum(first.high, high),
        )


@dataclass(frozen=True, slots=True)
class IndexMap:
    """A permutation of pixels, an axis at a time."""

    x: Axis
    y: Axis

    def after(self, first: "IndexMap") -> "IndexMap":
        """The map that applies ``first`` to the image, then this one."""
        return IndexMap(self.x.after(first.x), self.y.after(first.y))


@dataclass(frozen=True, slots=True)
class Resampling:
    """An axis-aligned warp of a window: output ``u`` → ``(u + c) * scale - c`` within ``count`` pixels from ``start``.

    ``c`` is 0.5 where pixels are squares (``align_corners=False``, and nearest) and 0 where they are points. Taps outside
    the window take its border.
    """

    scale_x: Rows
    start_x: Rows
    count_x: Rows
    scale_y: Rows
    start_y: Rows
    count_y: Rows


@dataclass(frozen=True, slots=True)
class Warp:
    """A general warp: output pixel → input pixel by a matrix, (B, 3, 3) float64, over the whole input frame."""

    inverse: Array


class GatherOp(Op):
    """An op that moves pixels and leaves their values alone, but for interpolation."""

    counts_pixels = True

    def matrix(self, drawn: OpDraws, size: Size) -> Array:
        """Input pixel coordinates → output pixel coordinates: (3, 3) or (B, 3, 3) float64.

        The identity where the op does not apply.

        What boxes and keypoints follow, and what Kornia calls ``transform_matrix``.
        """
        return np.eye(3)


class IndexOp(GatherOp):
    """A permutation with, perhaps, padding."""

    edge: Edge = ""
    fill: Any = 0.0
    """What padding holds in the images: a number, or one per channel."""

    @property
    def mask_fill(self) -> float:
        """What padding holds in masks. As in Kornia, a value per channel is for images alone, and masks are padded with 0."""
        return float(self.fill) if isinstance(self.fill, int | float) else 0.0

    @abstractmethod
    def map(self, drawn: OpDraws, size: Size) -> IndexMap:
        """Where each output pixel comes from."""


class WarpOp(GatherOp):
    """A matrix warp: interpolates once."""

    kind: ClassVar[Literal["affine", "perspective"]] = "affine"
    edge: Literal["zeros", "border", "fill"] = "zeros"
    """What lies outside the frame: nothing, the border, or nothing that a fill is then blended with once more."""
    fill: Any = 0.0
    """A number, or one per channel, for what a warp takes from outside the frame where ``edge`` is ``"fill"``."""
    mask_fill: float = 0.0
    """The same for masks, which can be filled with nothing else than 0."""
    nearest: bool = False

    @abstractmethod
    def warp(self, drawn: OpDraws, size: Size) -> Warp:
        """Where each output pixel comes from."""


class ResampleOp(GatherOp):
    """A resize, of the whole image or of a window: interpolates once, along the axes."""

    nearest: bool = False
    half_pixel_centers: bool = False
    """Whether a pixel's centre lies half a pixel from its edge, for images."""
    mask_half_pixel_centers: bool = True
    """The same for masks, which take the nearest pixel: that at a pixel's centre, or where its first corner is."""
    filter: Filter = ""
    """What pixels are weighed by that fall on one, where images shrink; ``""``: the nearest four count."""

    def set_antialias(self, *, cubic: bool) -> None:
        """Weigh all pixels that fall on one, on the grid that torchvision resizes on, which knows pixels as squares alone."""
        if not self.nearest:
            self.filter, self.half_pixel_centers = "cubic" if cubic else "triangle", True

    @abstractmethod
    def shrinks(self, size: Size) -> float:
        """How many pixels along a side may become one, at most."""

    @abstractmethod
    def resampling(self, drawn: OpDraws, size: Size, half_pixel_centers: bool) -> Resampling:
        """Where each output pixel comes from."""


def changes_size_by_chance(op: Op, *, size: Size) -> str | None:
    """Why an op that may be skipped cannot be lowered, or ``None``. A skipped sample keeps the size that it came with."""
    if op.is_random and (size.ragged or op.out(size) != size):
        return f"with p={op.p * op.p_batch} the size of the output depends on the draw"
    return None


def scale_of(source: Rows, target: Rows, half_pixel_centers: bool) -> Rows:
    """How many input pixels an output pixel advances by, as PyTorch's ``interpolate`` computes it."""
    if half_pixel_centers:
        return source / target
    if isinstance(target, np.ndarray):
        return np.where(target > 1, (source - 1) / np.maximum(target - 1, 1), 0.0)
    return (source - 1) / (target - 1) if target > 1 else np.zeros_like(source, dtype=np.float64)


def length_of(side: Any) -> Rows:
    """A side of the images as a floating number, or as one for each of them."""
    return side.astype(np.float64) if isinstance(side, np.ndarray) else float(side)
