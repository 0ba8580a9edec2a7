"""Ops that move pixels, as two kinds of maps from an output pixel to an input position.

An ``IndexMap`` permutes: flips, crops and padding, an axis at a time and in whole pixels, so any number of them compose
exactly. A warp interpolates, so a pass holds at most one (two would not be what Kornia does twice). Coordinates are pixels,
x, y = (column, row), and maps go from *output index* to *input index*.
"""

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from gpuaug.fusion.ops.base import ANY_SIDES, Array, Op, OpDraws, Size

Edge = Literal["", "constant", "replicate", "reflect"]
"""Values of output pixels outside an index map's range; ``""``: there are none."""

Filter = Literal["", "triangle", "cubic"]

Rows = Array | float


@dataclass(frozen=True, slots=True)
class Axis:
    """Output index ``i`` → input index ``sign * i + offset``. What is not in ``low <= index < high`` is padding.

    Each is an array (B,), or one number for the batch. The bounds are those of the image that is padded, in input indices;
    an axis without padding has none.
    """

    sign: Rows = 1.0
    offset: Rows = 0.0
    low: Rows = -np.inf
    high: Rows = np.inf

    def read(self, count: Any, length: Any) -> tuple[Array, Array]:
        """First input index and number of input indices that ``count`` output pixels read in images of ``length`` pixels.

        Indices outside the image are clamped to it.
        """
        ends = self.offset, self.sign * (count - 1) + self.offset
        first, last = (np.clip(end, 0, length - 1) for end in (np.minimum(*ends), np.maximum(*ends)))
        return first, last - first + 1

    def padding(self, length: Any) -> "Axis":
        """This axis of an op that pads, given images of ``length`` pixels: an integer, or an array (B,)."""
        return Axis(self.sign, self.offset, 0.0, length_of(length))

    def after(self, first: "Axis") -> "Axis":
        """The axis that applies ``first`` to the image, then this one."""
        sign = np.asarray(first.sign)
        low = np.where(sign > 0, self.low + first.offset, first.offset - self.high + 1)
        high = np.where(sign > 0, self.high + first.offset, first.offset - self.low + 1)
        # Two that pad with a constant: inside is what neither has padded.
        low, high = np.maximum(first.low, low), np.minimum(first.high, high)
        # Executors clamp an index to the bounds. Where nothing is inside they would clamp it to a pixel that the image lacks.
        empty = low >= high
        return Axis(
            first.sign * self.sign,
            first.sign * self.offset + first.offset,
            np.where(empty, 1.0, low)[()],
            np.where(empty, 1.0, high)[()],
        )


@dataclass(frozen=True, slots=True)
class IndexMap:
    """A permutation of pixels, an axis at a time."""

    x: Axis = field(default_factory=Axis)
    y: Axis = field(default_factory=Axis)

    def padding(self, size: Size) -> "IndexMap":
        """This map of an op that pads images of this size."""
        return IndexMap(self.x.padding(size.width), self.y.padding(size.height))

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
    """An op that moves pixels and changes values only by interpolation."""

    counts_pixels = True

    def matrix(self, drawn: OpDraws, size: Size) -> Array:
        """Input pixel coordinates → output pixel coordinates: (3, 3) or (B, 3, 3) float64.

        The identity for samples that the op does not apply to. Boxes and keypoints follow it; Kornia's ``transform_matrix``.
        """
        return np.eye(3)

    def window(self, drawn: OpDraws, size: Size) -> Array | None:
        """Window of each input image that holds all pixels which influence a pass that begins with the op, whatever ops follow.

        Triton's kernels read nothing outside the window. The torch executor reads pixel (0, 0) too, where it writes padding.

        Shape:
            - returns: (B, 4) int64: top, left, height and width. ``None``: the whole images.
        """
        return None


class IndexOp(GatherOp):
    """An op that takes each output pixel from one input pixel, or from padding."""

    edge: Edge = ""
    fill: Any = 0.0
    """Fill value of the images: a number, or one per channel."""

    def per_channel(self, channels: int) -> dict[str, Any]:
        """The fill."""
        return {"fill": self.fill}

    @property
    def mask_fill(self) -> float:
        """Fill value of masks. As in Kornia, a value per channel is for images only, and masks are padded with 0."""
        return float(self.fill) if isinstance(self.fill, int | float) else 0.0

    @abstractmethod
    def map(self, drawn: OpDraws, size: Size) -> IndexMap:
        """The map from output pixels to input positions, without bounds: an op with an ``edge`` pads the images it is given."""

    def window(self, drawn: OpDraws, size: Size) -> Array | None:
        """Positions of the map within the image; where all are padding, the nearest pixels of the image."""
        if self.edge == "reflect":
            return None
        map_ = self.map(drawn, size)
        out = self.out_drawn(drawn, size)
        left, width = map_.x.read(out.width, size.width)
        top, height = map_.y.read(out.height, size.height)
        return window_table(size, top, left, height, width)


class FrameOp(IndexOp):
    """An op that chooses frames of clips, and leaves their pixels where they are.

    Args:
        name: The module's name in its container.
        module: The user's module.
    """

    count: int
    """Number of frames of the clips that come out."""

    @abstractmethod
    def frames(self, count: int) -> Array:
        """Index of the source of each frame, int64, (``self.count``,), in clips of ``count`` frames."""

    def out(self, size: Size) -> Size:
        """Clips of other numbers of frames."""
        return replace(size, frames=self.count) if size.frames else size

    def map(self, drawn: OpDraws, size: Size) -> IndexMap:
        """The identity."""
        return IndexMap()

    def unsupported_size(self, size: Size) -> str | None:
        """Images have no frames, and clips of a batch have one number of them."""
        if not size.frames:
            return "it takes clips, (B, T, C, H, W)"
        return "some clips may keep their frames" if self.is_random else None


class BoxCropOp(IndexOp):
    """A crop that the device chooses by the boxes of each image.

    A resize to two sides stands behind it, and flips may stand between the two. On the host it leaves images whole. The window
    that is chosen becomes that of the resize, in the parameter table. Draws hold ``"numbers"``, (B, columns) float32, from
    which it is chosen. A row of ones leaves the image whole.
    """

    draws_size = True
    columns: ClassVar[int]
    """How many numbers each sample draws."""
    least: tuple[float, float] = (0.0, 0.0)
    """Least side in pixels, and least area, of the part of a box that lies within the crop. Other boxes are not kept."""

    def out(self, size: Size) -> Size:
        """One of each sample's own."""
        return size.to(*ANY_SIDES)

    def out_drawn(self, drawn: OpDraws, size: Size) -> Size:
        """The whole image, as far as the host knows."""
        return size

    def out_bounds(self, size: Size) -> tuple[Size, ...]:
        """A pixel, and the image."""
        return size.to(np.ones_like(size.height), np.ones_like(size.width)) if size.ragged else size.to(1, 1), size

    def map(self, drawn: OpDraws, size: Size) -> IndexMap:
        """Every pixel stays where it is."""
        return IndexMap()

    def numbers(self, drawn: OpDraws, sample: int) -> dict[str, float]:
        """Empty: which window they lead to depends on boxes."""
        return {}

    @abstractmethod
    def windows(self, numbers: Tensor, sides: Tensor, boxes: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the window of each image, and the boxes that stay.

        Shape:
            - numbers: (B, columns) float32, as drawn
            - sides: (B, 2) float32: width and height of the images
            - boxes: (n, 4) float32, corners of pixel edges; what is not a number is no box
            - owners: (n,) int64: the sample of each
            - returns: (B, 4) float32: left, top, width and height; (n,) bool
        """


class WarpOp(GatherOp):
    """A matrix warp: interpolates once."""

    kind: ClassVar[Literal["affine", "perspective"]] = "affine"
    edge: Literal["zeros", "border", "fill"] = "zeros"
    """Values outside the frame: 0, the border pixel, or 0 blended with ``fill`` by the share outside."""
    fill: Any = 0.0
    """Fill value outside the frame if ``edge`` is ``"fill"``: a number, or one per channel."""
    mask_fill: float = 0.0
    """``edge`` for masks, whose only fill value is 0."""
    nearest: bool = False

    def per_channel(self, channels: int) -> dict[str, Any]:
        """The fill."""
        return {"fill": self.fill}

    @abstractmethod
    def warp(self, drawn: OpDraws, size: Size) -> Warp:
        """The map from output pixels to input positions."""


class ResampleOp(GatherOp):
    """A resize, of the whole image or of a window: interpolates once, along the axes."""

    nearest: bool = False
    half_pixel_centers: bool = False
    """True if images are resampled at pixel centres (``align_corners=False``)."""
    mask_half_pixel_centers: bool = True
    """``half_pixel_centers`` for masks, which take the nearest pixel."""
    clamps: bool = False
    """True if images are bytes to the user's library here, which no cubic filter takes out of their range."""
    filter: Filter = ""
    """Antialiasing filter when downscaling; ``""``: four-tap bilinear or nearest, like Kornia."""

    def set_antialias(self, *, cubic: bool) -> None:
        """Antialias when downscaling, like torchvision, which always uses half-pixel centres."""
        if not self.nearest:
            self.filter = "cubic" if cubic else "triangle"
            self.half_pixel_centers = True

    @abstractmethod
    def shrinks(self, size: Size) -> float:
        """Largest scale: input pixels per output pixel, along one side."""

    @abstractmethod
    def resampling(self, drawn: OpDraws, size: Size, half_pixel_centers: bool) -> Resampling:
        """The map from output pixels to input positions."""


def changes_size_by_chance(op: Op, *, size: Size) -> str | None:
    """Why an op that may be skipped cannot be lowered, or ``None``. A skipped sample keeps its input size.

    An op that draws a size for each sample may be skipped.
    """
    if op.is_random and not op.draws_size and (size.ragged or op.out(size) != size):
        return f"with p={op.p * op.p_batch} the size of the output depends on the draw"
    return None


def scale_of(source: Rows, target: Rows, half_pixel_centers: bool) -> Rows:
    """Input pixels per output pixel, as PyTorch's ``interpolate`` computes them."""
    if half_pixel_centers:
        return source / target
    if isinstance(target, np.ndarray):
        return np.where(target > 1, (source - 1) / np.maximum(target - 1, 1), 0.0)
    return (source - 1) / (target - 1) if target > 1 else np.zeros_like(source, dtype=np.float64)


def window_table(size: Size, *columns: Rows) -> Array:
    """Windows, (B, 4) int64, from their columns: arrays (B,), or one number for the batch."""
    return np.stack([np.broadcast_to(column, size.batch) for column in columns], 1).astype(np.int64)


def length_of(side: Any) -> Rows:
    """A side of the images as float, or as an array of floats, (B,)."""
    return side.astype(np.float64) if isinstance(side, np.ndarray) else float(side)
