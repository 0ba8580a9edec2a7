"""Base classes of geometric ops, and their maps from output pixels to input positions.

An ``IndexMap`` (flips, crops, padding) maps whole pixels per axis, so any number of index maps compose exactly. A warp
interpolates, so a pass holds at most one: two composed warps would not equal two warps of Kornia. Coordinates are in pixels,
(x, y) = (column, row), and maps go from *output index* to *input index*.
"""

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from gpuaug.fusion.ops.base import Array, Op, OpDraws, PointOp, Size

Edge = Literal["", "constant", "replicate", "reflect"]
"""Padding mode of an index map; ``""`` without padding."""

Filter = Literal["", "triangle", "cubic"]

Rows = Array | float


@dataclass(frozen=True, slots=True)
class Axis:
    """Map of one axis: output index ``i`` to input index ``sign * i + offset``. Padding unless ``low <= index < high``.

    Attributes are arrays (B,), or one number for the batch. ``low`` and ``high`` are the bounds of the padded image in input
    indices; they are infinite for an axis without padding.
    """

    sign: Rows = 1.0
    offset: Rows = 0.0
    low: Rows = -np.inf
    high: Rows = np.inf

    def read(self, count: Any, length: Any) -> tuple[Array, Array]:
        """(first input index, number of input indices) that ``count`` output pixels read in images of ``length`` pixels.

        Indices outside the image are clamped to it.
        """
        ends = self.offset, self.sign * (count - 1) + self.offset
        first, last = (np.clip(end, 0, length - 1) for end in (np.minimum(*ends), np.maximum(*ends)))
        return first, last - first + 1

    def padding(self, length: Any) -> "Axis":
        """Axis with the bounds of images of ``length`` pixels, an integer or an array (B,), outside which is padding."""
        return Axis(self.sign, self.offset, 0.0, length_of(length))

    def after(self, first: "Axis") -> "Axis":
        """Composition: the axis that applies ``first`` to the image, then this axis."""
        sign = np.asarray(first.sign)
        low = np.where(sign > 0, self.low + first.offset, first.offset - self.high + 1)
        high = np.where(sign > 0, self.high + first.offset, first.offset - self.low + 1)
        # Pixels inside the bounds are those that neither of the two axes pads.
        low, high = np.maximum(first.low, low), np.minimum(first.high, high)
        # Executors clamp an index to the bounds. Empty bounds would clamp it to a pixel outside the image.
        empty = low >= high
        return Axis(
            first.sign * self.sign,
            first.sign * self.offset + first.offset,
            np.where(empty, 1.0, low)[()],
            np.where(empty, 1.0, high)[()],
        )


@dataclass(frozen=True, slots=True)
class IndexMap:
    """Map of whole pixels, per axis."""

    x: Axis = field(default_factory=Axis)
    y: Axis = field(default_factory=Axis)

    def padding(self, size: Size) -> "IndexMap":
        """Map with the bounds of images of ``size``, outside which is padding."""
        return IndexMap(self.x.padding(size.width), self.y.padding(size.height))

    def after(self, first: "IndexMap") -> "IndexMap":
        """Composition: the map that applies ``first`` to the image, then this map."""
        return IndexMap(self.x.after(first.x), self.y.after(first.y))


@dataclass(frozen=True, slots=True)
class Resampling:
    """Resampling of a window: output ``u`` to input ``start + (u + c) * scale - c``, for ``count`` input pixels from ``start``.

    ``c`` is 0.5 for ``align_corners=False`` and for nearest, 0 for ``align_corners=True``. Taps outside the window read its
    border pixels.
    """

    scale_x: Rows
    start_x: Rows
    count_x: Rows
    scale_y: Rows
    start_y: Rows
    count_y: Rows


@dataclass(frozen=True, slots=True)
class Warp:
    """Warp of the whole image by matrices, (B, 3, 3) float64, that map output pixels to input pixels."""

    inverse: Array


class GatherOp(Op):
    """Geometric op: moves pixels, and changes values by interpolation only."""

    counts_pixels = True

    def matrix(self, drawn: OpDraws, size: Size) -> Array:
        """Matrices that map input to output pixel coordinates, (3, 3) or (B, 3, 3) float64.

        The identity for skipped samples. Boxes and keypoints are mapped by these matrices, Kornia's ``transform_matrix``.
        """
        return np.eye(3)

    def window(self, drawn: OpDraws, size: Size) -> Array | None:
        """Window per input image that contains all pixels read by a pass that begins with the op.

        Triton kernels read no pixel outside the window. The torch executor also reads pixel (0, 0) where it writes padding.

        Shape:
            - returns: (B, 4) int64 (top, left, height, width), or ``None`` for whole images
        """
        return None


class IndexOp(GatherOp):
    """Op whose output pixels are copies of input pixels, or padding."""

    edge: Edge = ""
    fill: Any = 0.0
    """Fill value of the images: a number, or one per channel."""

    def per_channel(self, channels: int) -> dict[str, Any]:
        """Fill value."""
        return {"fill": self.fill}

    @property
    def mask_fill(self) -> float:
        """Fill value of masks. As in Kornia, masks are padded with 0 if ``fill`` has a value per channel."""
        return float(self.fill) if isinstance(self.fill, int | float) else 0.0

    @abstractmethod
    def map(self, drawn: OpDraws, size: Size) -> IndexMap:
        """Map from output to input pixels. The caller adds bounds if ``edge`` is a padding mode."""

    def window(self, drawn: OpDraws, size: Size) -> Array | None:
        """Window of the pixels that the map reads; the nearest pixel of the image if all are padding."""
        if self.edge == "reflect":
            return None
        map_ = self.map(drawn, size)
        out = self.out_drawn(drawn, size)
        left, width = map_.x.read(out.width, size.width)
        top, height = map_.y.read(out.height, size.height)
        return window_table(size, top, left, height, width)


class FrameOp(IndexOp):
    """Op that selects frames of clips and does not change pixels.

    Args:
        name: Name of the module in its container.
        module: Module of the user.
    """

    count: int
    """Number of frames per output clip."""

    @abstractmethod
    def frames(self, count: int) -> Array:
        """Indices of the selected frames, (``self.count``,) int64, in clips of ``count`` frames."""

    def out_applied(self, size: Size) -> Size:
        """Output size, with ``self.count`` frames."""
        return replace(size, frames=self.count) if size.frames else size

    def map(self, drawn: OpDraws, size: Size) -> IndexMap:
        """Return the identity map."""
        return IndexMap()

    def unsupported_size(self, size: Size) -> str | None:
        """Reject images, and a probability below 1, with which clips of a batch would differ in their number of frames."""
        if not size.frames:
            return "it takes clips, (B, T, C, H, W)"
        return "some clips may keep their frames" if self.is_random else None


class BoxCropOp(IndexOp):
    """Crop whose window is chosen on the device, by the boxes of the image.

    A resize to (height, width) must follow, with only flips in between. On the host the op keeps the whole image; on the device
    the chosen window replaces the window of the resize in the parameter table. Draws hold ``"numbers"``, (B, columns) float32,
    from which the window is chosen. A row of ones keeps the whole image.
    """

    draws_size = True
    columns: ClassVar[int]
    """Number of drawn numbers per sample."""
    least: tuple[float, float] = (0.0, 0.0)
    """(smallest side, smallest area) in pixels of the part of a box inside the crop. Boxes with less are dropped."""

    def out_drawn(self, drawn: OpDraws, size: Size) -> Size:
        """Size of the whole image: the host does not know the window."""
        return size

    def out_bounds(self, size: Size) -> tuple[Size, ...]:
        """Sizes of one pixel and of the whole image."""
        return size.to(np.ones_like(size.height), np.ones_like(size.width)) if size.ragged else size.to(1, 1), size

    def map(self, drawn: OpDraws, size: Size) -> IndexMap:
        """Return the identity map."""
        return IndexMap()

    def numbers(self, drawn: OpDraws, sample: int) -> dict[str, float]:
        """Empty, because the window also depends on the boxes."""
        return {}

    @abstractmethod
    def windows(self, numbers: Tensor, sides: Tensor, boxes: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the window of every image, and the boxes that are kept.

        Shape:
            - numbers: (B, columns) float32, as drawn
            - sides: (B, 2) float32: width and height of the images
            - boxes: (n, 4) float32, XYXY in coordinates of pixel edges; NaN for a missing box
            - owners: (n,) int64: index of the sample of the box
            - returns: (B, 4) float32: left, top, width and height; (n,) bool: True for boxes that are kept
        """


class WarpOp(GatherOp):
    """Warp by a matrix, with one interpolation."""

    kind: ClassVar[Literal["affine", "perspective"]] = "affine"
    edge: Literal["zeros", "border", "fill"] = "zeros"
    """Values outside the image: 0, the border pixel, or ``fill``, blended in by the interpolation weight outside the image."""
    fill: Any = 0.0
    """Fill value outside the image if ``edge`` is ``"fill"``: a number, or one per channel."""
    mask_fill: float = 0.0
    """Fill value of masks outside the image."""
    nearest: bool = False

    def per_channel(self, channels: int) -> dict[str, Any]:
        """Fill value."""
        return {"fill": self.fill}

    @abstractmethod
    def warp(self, drawn: OpDraws, size: Size) -> Warp:
        """Map from output pixels to input positions."""


class ResampleOp(GatherOp):
    """Resize of the whole image or of a window, with one interpolation per axis."""

    nearest: bool = False
    half_pixel_centers: bool = False
    """True if images are resampled at pixel centres (``align_corners=False``)."""
    mask_half_pixel_centers: bool = True
    """``half_pixel_centers`` for masks, which take the nearest pixel."""
    clamps: bool = False
    """True if images are uint8 in the user's library at this position, so that a cubic filter is clamped to their range."""
    filter: Filter = ""
    """Antialiasing filter for downscaling; ``""`` for bilinear or nearest without antialiasing, as in Kornia."""

    def set_antialias(self, *, cubic: bool) -> None:
        """Enable antialiasing for downscaling, as in torchvision, where it implies half-pixel centres."""
        if not self.nearest:
            self.filter = "cubic" if cubic else "triangle"
            self.half_pixel_centers = True

    @abstractmethod
    def shrinks(self, size: Size) -> float:
        """Largest downscaling factor along one axis, in input pixels per output pixel."""

    @abstractmethod
    def resampling(self, drawn: OpDraws, size: Size, half_pixel_centers: bool) -> Resampling:
        """Map from output pixels to input positions."""


def only_moves_and_recolours(op: Op) -> bool:
    """Return whether an output pixel depends on input pixels at mapped positions, their values, and the mean of the image."""
    return all(isinstance(part, GatherOp) or (isinstance(part, PointOp) and not part.positional) for part in op.parts)


def changes_size_by_chance(op: Op, *, size: Size) -> str | None:
    """Reason why an op that may be skipped cannot be fused, or ``None``. A skipped sample keeps its input size.

    An op that draws an output size per sample may be skipped, and the last sizing op of a container with a random choice.
    """
    if op.is_random and not op.draws_size and op.choice_end is None and (size.ragged or op.out(size) != size):
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
    """Stack columns of windows, arrays (B,) or one number for the batch, to (B, 4) int64."""
    return np.stack([np.broadcast_to(column, size.batch) for column in columns], 1).astype(np.int64)


def length_of(side: Any) -> Rows:
    """Convert a side of the images to float, or to an array (B,) of floats."""
    return side.astype(np.float64) if isinstance(side, np.ndarray) else float(side)
