"""Base classes of geometric ops, and their maps from output pixels to input positions.

An ``IndexMap`` (flips, crops, padding) maps whole pixels per axis, so any number of index maps compose exactly. A warp
interpolates, so a *pass*, one kernel that reads and writes all images, runs at most one warp: two composed warps would not
equal two warps of Kornia. Coordinates are in pixels, (x, y) = (column, row). Maps of images go from *output index* to *input
index*; the matrices for boxes and keypoints (``GatherOp.matrix``) go from input to output. Class attributes without a comment
are explained in ``base.py``.
"""

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from gpuaug.fusion.ops.base import Array, FrontOp, Op, OpDraws, PointOp, Size

Edge = Literal["", "constant", "replicate", "reflect"]
"""Padding mode of an index map; ``""`` without padding."""

Filter = Literal["", "triangle", "cubic"]
"""Antialiasing filter: ``"triangle"`` for bilinear, ``"cubic"`` for bicubic interpolation; ``""`` without antialiasing."""

PerSample = Array | float
"""One number per sample, (B,), or one number for the batch."""


@dataclass(frozen=True, slots=True)
class AxisMap:
    """Map of one axis: output pixel ``i`` is a copy of the input pixel with index ``sign * i + offset``.

    The output pixel is padding unless ``low <= index < high``. Both bounds are infinite for an axis without padding.
    """

    sign: PerSample = 1.0
    offset: PerSample = 0.0
    low: PerSample = -np.inf
    high: PerSample = np.inf

    def read_range(self, count: Any, length: Any) -> tuple[Array, Array]:
        """Return (first index, number) of the input pixels that the first ``count`` output pixels copy.

        Indices are clamped to the image, which has ``length`` pixels along the axis. ``count``, ``length``: integer, or (B,).
        """
        ends = self.offset, self.sign * (count - 1) + self.offset
        first, last = (np.clip(end, 0, length - 1) for end in (np.minimum(*ends), np.maximum(*ends)))
        return first, last - first + 1

    def with_bounds(self, length: Any) -> "AxisMap":
        """Return a copy in which input indices outside [0, ``length``) are padding. ``length``: integer, or array (B,)."""
        return AxisMap(self.sign, self.offset, 0.0, as_float64(length))

    def after(self, first: "AxisMap") -> "AxisMap":
        """Return the composition that applies ``first`` to the image, then this map."""
        # Bounds of this map, as indices of the input of ``first``. A negative sign exchanges lower and upper bound.
        sign = np.asarray(first.sign)
        low = np.where(sign > 0, self.low + first.offset, first.offset - self.high + 1)
        high = np.where(sign > 0, self.high + first.offset, first.offset - self.low + 1)
        # An index is inside the bounds of the composition if neither map pads it.
        low, high = np.maximum(first.low, low), np.minimum(first.high, high)
        # Kernels clamp indices to [low, high - 1], also of padding. Empty bounds become (1, 1), so that a kernel reads pixel 0.
        empty = low >= high
        return AxisMap(
            first.sign * self.sign,
            first.sign * self.offset + first.offset,
            np.where(empty, 1.0, low)[()],
            np.where(empty, 1.0, high)[()],
        )


@dataclass(frozen=True, slots=True)
class IndexMap:
    """Map of whole pixels, per axis."""

    x: AxisMap = field(default_factory=AxisMap)
    y: AxisMap = field(default_factory=AxisMap)

    def with_bounds(self, size: Size) -> "IndexMap":
        """Return a copy in which input indices outside images of ``size`` are padding."""
        return IndexMap(self.x.with_bounds(size.width), self.y.with_bounds(size.height))

    def after(self, first: "IndexMap") -> "IndexMap":
        """Return the composition that applies ``first`` to the image, then this map."""
        return IndexMap(self.x.after(first.x), self.y.after(first.y))


class GatherOp(Op):
    """Base class of geometric ops, which move pixels and change values by interpolation only.

    Pass type: geometric, with interpolation.
    """

    takes_any_range = True

    stores_coordinates = True

    fill: Any = 0.0
    """Fill value of the images, in units of the largest pixel value: a number, or one per channel.

    Of constant padding; in a warp, outside the image if its ``edge`` is ``"fill"``.
    """

    def per_channel(self, channels: int) -> dict[str, Any]:
        """Settings that may have one value per channel: the fill value."""
        return {"fill": self.fill}

    @abstractmethod
    def matrix(self, draws: OpDraws, size: Size) -> Array:
        """Matrices that map input to output pixel coordinates, (1, 3, 3) or (B, 3, 3) float64; for boxes and keypoints.

        They are Kornia's ``transform_matrix``. For samples that skip the op they are the identity.
        """

    def window(self, draws: OpDraws, size: Size) -> Array | None:
        """Window of each input image that a pass reads if it begins with this op. The decoder may decode this window only.

        Triton kernels read no pixel outside the window. The implementation in torch also reads pixel (0, 0) where it pads.

        Shape:
            - returns: (B, 4) int64 (top, left, height, width), or ``None`` for whole images
        """
        return None


class IndexOp(GatherOp):
    """Base class of ops whose output pixels are copies of input pixels, or padding.

    Pass type: geometric, without interpolation.
    """

    views: int = 1
    """Number of views that the op makes, each with other pixels of the image."""
    edge: Edge = ""
    """Padding mode; ``""`` without padding."""

    @property
    def mask_fill(self) -> float:
        """Fill value of segmentation masks. As in Kornia, it is 0 if ``fill`` has a value per channel."""
        return self.fill if isinstance(self.fill, int | float) else 0.0

    def map(self, draws: OpDraws, size: Size) -> IndexMap:
        """Map from output to input pixels; by default the identity.

        The caller adds the bounds of the image if ``edge`` is a padding mode.
        """
        return IndexMap()

    def matrix(self, draws: OpDraws, size: Size) -> Array:
        """Matrices of the inverse of the map, from input to output pixels."""
        map_ = self.map(draws, size)
        return _axis_matrices(*((axis.sign, -axis.sign * axis.offset) for axis in (map_.x, map_.y)))

    def window(self, draws: OpDraws, size: Size) -> Array | None:
        """Window of the pixels that the map reads. If all output pixels are padding, the window is the nearest pixel."""
        if self.edge == "reflect":
            return None
        map_ = self.map(draws, size)
        out = self.out_drawn(draws, size)
        left, width = map_.x.read_range(out.width, size.width)
        top, height = map_.y.read_range(out.height, size.height)
        return stack_windows(size, top, left, height, width)


class IdentityOp(IndexOp):
    """Op that copies the images, for passes that only convert them to the output type."""

    description = "copy"


class FrameOp(IndexOp):
    """Base class of ops that select frames of clips and do not change pixels.

    Args:
        name: Name of the module in its container.
        module: Module of the user.
    """

    count: int
    """Number of frames per output clip."""

    @abstractmethod
    def frames(self, input_count: int) -> Array:
        """Indices of the selected frames, (``self.count``,) int64, in input clips of ``input_count`` frames."""

    def out_applied(self, size: Size) -> Size:
        """Output size, with ``self.count`` frames."""
        return replace(size, frames=self.count) if size.frames else size

    def unsupported_size(self, size: Size) -> str | None:
        """Reason if the batch is images, or if samples may skip the op and keep another number of frames; else ``None``."""
        if not size.frames:
            return "it takes clips, (B, T, C, H, W)"
        return "some clips may keep their frames" if self.is_random else None


class BoxCropOp(IndexOp):
    """Base class of crops whose window is chosen on the device, by the boxes of the image.

    A resize to a fixed (height, width) must follow, with only flips in between. On the host the op is the identity. The device
    chooses the window by the boxes and by the random ``draws["numbers"]``, (B, columns) float32 in [0, 1), and writes it to the
    parameter table as the window that the resize reads. A sample whose numbers are all 1 is not cropped.
    """

    draws_size = True
    columns: ClassVar[int]
    """Number of random numbers per sample in ``draws["numbers"]``."""
    min_side_and_area: tuple[float, float] = (0.0, 0.0)
    """(side, area) in pixels: a box stays valid if its part inside the crop has at least this side and this area."""

    def out_drawn(self, draws: OpDraws, size: Size) -> Size:
        """Return the input size: on the host, the op is the identity for every draw."""
        return size

    def out_bounds(self, size: Size) -> tuple[Size, ...]:
        """Sizes of the smallest crop, one pixel, and of the largest, the whole image."""
        return size.to(np.ones_like(size.height), np.ones_like(size.width)) if size.ragged else size.to(1, 1), size

    @abstractmethod
    def windows(self, numbers: Tensor, sides: Tensor, boxes: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the window of every image, and the boxes that stay valid in it.

        Shape:
            - numbers: (B, columns) float32, ``draws["numbers"]`` on the device, or 1 for samples that skip the op
            - sides: (B, 2) float32: width and height of the images
            - boxes: (n, 4) float32, XYXY in coordinates of pixel edges, also outside of the image; NaN for a missing box
            - owners: (n,) int64: sample index of each box
            - returns: (B, 4) float32: left, top, width and height; (n,) bool: True for boxes that stay valid
        """


class WarpOp(GatherOp):
    """Base class of warps by a matrix, with one interpolation."""

    matrix_type: ClassVar[Literal["affine", "perspective"]] = "affine"
    """Type of the matrices: the last row of an affine matrix is (0, 0, 1)."""
    edge: Literal["zeros", "border", "fill"] = "zeros"
    """Values outside the image: 0, the nearest border pixel, or ``fill``.

    With ``"fill"``, a pixel is interpolated with 0 for the source pixels outside the image, then blended with ``fill`` by the
    weight of these source pixels.
    """
    mask_fill: float = 0.0
    """Fill value of segmentation masks outside the image."""
    nearest: bool = False
    """True for nearest-neighbour interpolation, False for bilinear."""

    @abstractmethod
    def inverse(self, draws: OpDraws, size: Size) -> Array:
        """Matrices that map output pixels to input positions, (B, 3, 3) float64."""


class ResampleOp(GatherOp):
    """Base class of resizes of the whole image or of a window, with one interpolation per axis."""

    nearest: bool = False
    """True for nearest-neighbour interpolation."""
    half_pixel_centers: bool = False
    """True if images are resampled at pixel centres (``align_corners=False``)."""
    mask_half_pixel_centers: bool = True
    """True if segmentation masks are resampled at pixel centres, by nearest neighbour."""
    clamps: bool = False
    """True to clamp the result of a cubic filter to [0, 1], as the user's library does for uint8 images."""
    filter: Filter = ""
    """Antialiasing filter for downscaling; ``""`` for bilinear or nearest without antialiasing, as in Kornia."""

    def set_antialias(self, *, cubic: bool) -> None:
        """Enable antialiasing for downscaling, and thereby half-pixel centres, as in torchvision."""
        if not self.nearest:
            self.filter = "cubic" if cubic else "triangle"
            self.half_pixel_centers = True

    @abstractmethod
    def max_downscaling(self, size: Size) -> float:
        """Largest factor by which an axis may be downscaled, in input pixels per output pixel."""

    @abstractmethod
    def resized_window(self, draws: OpDraws, size: Size) -> tuple[PerSample, ...]:
        """(left, width, top, height) of the window of the input image that is resized, in pixels."""

    def resampling(self, draws: OpDraws, size: Size, half_pixel_centers: bool) -> tuple[PerSample, ...]:
        """Map from output pixels to input positions in a window: (scale, start, count) along x, then along y.

        The window has ``count`` input pixels, from input index ``start`` on. Output index ``u`` is mapped to input position
        ``start + (u + c) * scale - c``, where ``c`` is 0 for ``align_corners=True``, else 0.5. Interpolation reads the border
        pixels of the window in place of pixels outside it.
        """
        left, width, top, height = self.resized_window(draws, size)
        out = self.out_drawn(draws, size)
        scale_x = scale_of(width, out.width, half_pixel_centers)
        scale_y = scale_of(height, out.height, half_pixel_centers)
        return scale_x, left, width, scale_y, top, height

    def matrix(self, draws: OpDraws, size: Size) -> Array:
        """Matrices that map the edges of the window to the output; with ``align_corners``, the centres of its corner pixels."""
        half_pixel_centers = self.half_pixel_centers or self.nearest
        left, width, top, height = self.resized_window(draws, size)
        out = self.out_drawn(draws, size)
        return _axis_matrices(
            _resize_of(left, width, out.width, half_pixel_centers),
            _resize_of(top, height, out.height, half_pixel_centers),
        )


class FieldOp(FrontOp):
    """Base class of ops that move pixels by a field, which is a displacement per pixel.

    Pass type: filter.
    """

    @abstractmethod
    def apply_to_masks(self, masks: Tensor, rows: Tensor) -> Tensor:
        """Move the pixels of masks, (B, C, H, W) of any dtype, by the rows of the samples, (B, row_width)."""

    @abstractmethod
    def apply_to_points(self, points: Tensor, owners: Tensor, rows: Tensor, size: Size, *, edges: bool) -> Tensor:
        """Move keypoints, or the corners of boxes.

        Args:
            points: Keypoints, or the four corners of boxes, in coordinates of pixel centres.
            owners: Sample index of each box or keypoint.
            rows: Row of each sample.
            size: Size of the images.
            edges: Whether the user's coordinates refer to pixel edges, not to pixel centres.

        Shape:
            - points: (n, 2) or (n, 4, 2), or (B, N, …)
            - owners: (n,), or (B, 1)
            - rows: (B, row_width)
            - returns: as ``points``
        """


def moves_pixels(op: Any) -> bool:
    """Return whether ``op`` is an op, not a module that its library runs, and may move pixels within an image."""
    return isinstance(op, FieldOp) or (isinstance(op, GatherOp) and not isinstance(op, FrameOp | IdentityOp))


def only_moves_and_recolours(op: Op) -> bool:
    """Return whether all ops that run for ``op`` move pixels, or change values independently of the pixel coordinates."""
    return all(isinstance(part, GatherOp) or (isinstance(part, PointOp) and not part.positional) for part in op.plan_ops)


def scale_of(source: PerSample, target: PerSample, half_pixel_centers: bool) -> PerSample:
    """Scale of a resize from ``source`` to ``target`` pixels, in input pixels per output pixel, as in ``F.interpolate``."""
    if half_pixel_centers:
        return source / target
    if isinstance(target, np.ndarray):
        return np.where(target > 1, (source - 1) / np.maximum(target - 1, 1), 0.0)
    return (source - 1) / (target - 1) if target > 1 else np.zeros_like(source, dtype=np.float64)


def _resize_of(start: PerSample, count: PerSample, target: PerSample, half_pixel_centers: bool) -> tuple[PerSample, PerSample]:
    """(scale, shift) that map ``count`` input pixels from ``start`` on to ``target`` output pixels, along one axis."""
    start, count = as_float64(start), as_float64(count)
    if half_pixel_centers:
        scale = target / count
        return scale, (0.5 - start) * scale - 0.5
    # With aligned corners a single pixel has an extent of 0, so it is only shifted.
    scale = np.where((count > 1) & np.greater(target, 1), (target - 1) / np.maximum(count - 1, 1), 1.0)
    return scale, -start * scale


def _axis_matrices(x: tuple[PerSample, PerSample], y: tuple[PerSample, PerSample]) -> Array:
    """Matrices, (1, 3, 3) or (B, 3, 3), with (scale, shift) of x and of y."""
    # np.broadcast_arrays and np.tile take five times as long.
    matrix = np.zeros((np.broadcast(*x, *y).size, 3, 3))
    matrix[:, 0, 0], matrix[:, 0, 2] = x
    matrix[:, 1, 1], matrix[:, 1, 2] = y
    matrix[:, 2, 2] = 1
    return matrix


def stack_windows(size: Size, *columns: PerSample) -> Array:
    """Create an array of windows, (B, 4) int64, from its columns top, left, height and width."""
    return np.stack([np.broadcast_to(column, size.batch) for column in columns], 1).astype(np.int64)


def as_float64(pixels: Any) -> PerSample:
    """Convert pixels, an integer or an array (B,), to float64."""
    return pixels.astype(np.float64) if isinstance(pixels, np.ndarray) else float(pixels)
