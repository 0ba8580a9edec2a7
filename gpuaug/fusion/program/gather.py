"""Composition of consecutive ops that move pixels to one gather, and its columns in the parameter table.

The *parameter table* has one float32 row per *sample*, an image or a clip, with the parameters of all ops. An *index map* maps
integer coordinates of pixels to integer coordinates, as a flip, a crop or padding does. A *gather* applies to images the index
maps ``before``, one interpolation (a *resize* or a *warp*), and the index maps ``after``. It computes an output pixel in the
reverse order: from its coordinates to the coordinates of the source pixels. A gather without an interpolation has only the
index maps ``before``. A *pass*, one reading and writing of the images, runs a gather and then pointwise ops.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size
from gpuaug.fusion.ops.geometry import Edge, Filter, FrameOp, GatherOp, IndexMap, IndexOp, PerSample, ResampleOp, WarpOp
from gpuaug.fusion.pixels import UNCHANGED, ByteRule

Interpolation = Literal["", "resample", "affine", "perspective"]
"""None, a resize, or a warp by an affine or a perspective matrix."""

_WARP_COLUMNS: dict[Interpolation, int] = {"": 0, "resample": 6, "affine": 8, "perspective": 11}
"""Number of columns in the parameter table, by type of the interpolation: ``resampling``, or matrix, width and height."""


@dataclass(frozen=True, slots=True)
class IndexMaps:
    """Index maps before or after the interpolation, which compose to one index map."""

    ops: tuple[IndexOp, ...] = ()
    """Op of each index map, in order."""

    @property
    def edge(self) -> Edge:
        """Padding mode of all ops that pad (``accepts`` allows only one); ``""`` if no pixel can lie outside the image."""
        return next((op.edge for op in self.ops if op.edge), "")

    @property
    def padding(self) -> IndexOp | None:
        """First op with constant padding; ``None`` without one."""
        return next((op for op in self.ops if op.edge == "constant"), None)

    @property
    def fill(self) -> Any:
        """Fill value of constant padding of images; 0 without constant padding."""
        return 0.0 if self.padding is None else self.padding.fill

    def accepts(self, op: IndexOp) -> bool:
        """Return whether ``op`` composes with the index maps. Two paddings do only if both are constant, with equal fills."""
        if not op.edge or not self.edge:
            return True
        padding = self.padding
        if padding is None or op.edge != "constant":
            return False
        return (op.fill, op.mask_fill) == (padding.fill, padding.mask_fill)

    @property
    def width(self) -> int:
        """Number of columns in the parameter table: sign and offset per axis; with padding also two bounds per axis."""
        return (8 if self.edge else 4) if self.ops else 0


@dataclass(frozen=True, slots=True)
class Columns:
    """First column of each group of columns of a gather in the parameter table, from the first column of the gather on.

    -1 for a group that is missing.
    """

    after: int
    """Index map after the interpolation."""
    warp: int
    """Interpolation of images."""
    mask_warp: int
    """Interpolation of masks; equal to ``warp`` if masks are interpolated at the same coordinates."""
    before: int
    """Index map before the interpolation."""
    warp_fill: int
    """Fill of a warp, per channel, if pixels are blended with it."""
    after_fill: int
    """Fill of constant padding after the interpolation, per channel."""
    before_fill: int
    """Fill of constant padding before the interpolation, per channel."""
    out_size: int
    """Height and width of the output image, if images differ in size after the pass."""
    frames: int
    """Index of the input frame per output frame, if an op selects frames of clips."""
    end: int
    """First column after the gather."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Composition of ops that move pixels: index maps, at most one interpolation, index maps."""

    before: IndexMaps = field(default_factory=IndexMaps)
    warp: WarpOp | ResampleOp | None = None
    after: IndexMaps = field(default_factory=IndexMaps)
    ops: tuple[GatherOp, ...] = ()
    """All ops, in order."""

    def accepts(self, op: GatherOp) -> bool:
        """Return whether the gather with ``op`` added at the end gives the same pixels as ``op`` after the gather."""
        # After an interpolation, an op that draws sizes begins the next gather, because a resize to one size follows it.
        if isinstance(op, IndexOp) and not (op.draws_size and self.warp is not None):
            return (self.before if self.warp is None else self.after).accepts(op)
        return self.warp is None

    def with_op(self, op: GatherOp) -> "Gather":
        """Return this gather with ``op`` added at the end."""
        ops = (*self.ops, op)
        if isinstance(op, IndexOp):
            if self.warp is None:
                return replace(self, before=IndexMaps((*self.before.ops, op)), ops=ops)
            return replace(self, after=IndexMaps((*self.after.ops, op)), ops=ops)
        assert isinstance(op, WarpOp | ResampleOp)
        return replace(self, warp=op, ops=ops)

    @property
    def interpolation(self) -> Interpolation:
        """Type of the interpolation; empty if there is none."""
        if self.warp is None:
            return ""
        return self.warp.matrix_type if isinstance(self.warp, WarpOp) else "resample"

    @property
    def nearest(self) -> bool:
        """Whether the interpolation of images is nearest-neighbour. The interpolation of masks always is."""
        return self.warp is not None and self.warp.nearest

    @property
    def half_pixel_centers(self) -> bool:
        """Whether a resize of images has half-pixel centres: the centre of pixel k is at k + 0.5."""
        return isinstance(self.warp, ResampleOp) and (self.warp.half_pixel_centers or self.warp.nearest)

    @property
    def mask_half_pixel_centers(self) -> bool:
        """Whether masks are resized with half-pixel centres."""
        return isinstance(self.warp, ResampleOp) and self.warp.mask_half_pixel_centers

    @property
    def filter(self) -> Filter:
        """Antialiasing filter of a resize of images; empty without antialiasing."""
        return self.warp.filter if isinstance(self.warp, ResampleOp) else ""

    @property
    def clamps(self) -> bool:
        """Whether the result of an antialiasing filter is clamped to [0, 1], or, for bytes, to [0, 255]."""
        return isinstance(self.warp, ResampleOp) and bool(self.warp.filter) and self.warp.clamps

    @property
    def to_bytes(self) -> ByteRule | None:
        """Conversion of interpolated pixels to bytes, as ``Op.to_bytes``. Nearest pixels are bytes already."""
        return None if self.warp is None or self.nearest else self.warp.to_bytes

    @property
    def rounds_axes(self) -> bool:
        """Whether a resize of bytes rounds to bytes after each axis, as PyTorch's resize of uint8 images does."""
        return isinstance(self.warp, ResampleOp) and self.to_bytes == UNCHANGED

    @property
    def exact_division(self) -> bool:
        """Whether the kernel must round the quotient of a byte and 255 correctly, which takes two more instructions.

        True unless a resize interpolates the pixels of all samples, because pixels that are only copied must not change. Also
        True if padding is interpolated, because a fill may lie halfway between two values of the output type.
        """
        may_skip = self.warp is not None and self.warp.is_random
        return self.interpolation != "resample" or self.nearest or may_skip or self.before.edge == "constant"

    @property
    def zero_outside(self) -> bool:
        """Whether a warp reads 0 outside the image, instead of the border pixel."""
        return isinstance(self.warp, WarpOp) and self.warp.edge != "border"

    @property
    def blends_fill(self) -> bool:
        """Whether a warp blends pixels with a fill, by the weight of source pixels outside the image, as torchvision does."""
        return isinstance(self.warp, WarpOp) and self.warp.edge == "fill"

    def columns(self, channels: int, masks: bool, *, sides: bool = False) -> Columns:
        """Return the first column of each group of columns.

        Args:
            channels: Number of channels of the images.
            masks: Whether there are masks, which may need separate columns of a resize.
            sides: Whether there are the columns ``out_size``, because images differ in size after the pass.
        """
        column = 0
        first_columns = {}
        has_mask_warp = masks and isinstance(self.warp, ResampleOp) and not self.half_pixel_centers
        for name, width in (
            ("after", self.after.width),
            ("warp", _WARP_COLUMNS[self.interpolation]),
            ("mask_warp", _WARP_COLUMNS[self.interpolation] if has_mask_warp else 0),
            ("before", self.before.width),
            ("warp_fill", channels if self.blends_fill else 0),
            ("after_fill", channels if self.after.edge == "constant" else 0),
            ("before_fill", channels if self.before.edge == "constant" else 0),
            ("out_size", 2 if sides else 0),
            ("frames", next((op.count for op in reversed(self.ops) if isinstance(op, FrameOp)), 0)),
        ):
            first_columns[name] = column if width else -1
            column += width
        if not has_mask_warp:
            first_columns["mask_warp"] = first_columns["warp"]
        return Columns(**first_columns, end=column)

    def write_rows(self, draws_of: Callable[[GatherOp], OpDraws], size: Size, columns: Columns, table: Array) -> None:
        """Write the columns of the gather into a table, (B, K) float32.

        Args:
            draws_of: Function that returns the draws of an op.
            size: Size of the input images.
            columns: First column of each group of columns.
            table: Parameter table from the first column of the gather on.
        """
        current_size = size
        before: IndexMap | None = None
        after: IndexMap | None = None
        for op in self.ops:
            if isinstance(op, IndexOp):
                map_ = op.map(draws_of(op), current_size)
                # Bounds outside of which pixels are padding: the borders of the image that this op pads.
                map_ = map_.with_bounds(current_size) if op.edge else map_
                if op in self.before.ops:
                    before = map_ if before is None else map_.after(before)
                else:
                    after = map_ if after is None else map_.after(after)
            else:
                self._write_warp(op, draws_of(op), current_size, columns, table)
            current_size = op.out_drawn(draws_of(op), current_size)
        if columns.frames >= 0:
            frame_indices = frames_of(self.ops, size.frames)
            assert frame_indices is not None
            table[:, columns.frames : columns.frames + len(frame_indices)] = frame_indices
        if columns.out_size >= 0:
            _write((current_size.height, current_size.width), table, columns.out_size)
        for composed_map, maps, column, fill_column in (
            (before, self.before, columns.before, columns.before_fill),
            (after, self.after, columns.after, columns.after_fill),
        ):
            if composed_map is not None:
                x, y = composed_map.x, composed_map.y
                _write((x.sign, x.offset, y.sign, y.offset), table, column)
                if maps.edge:
                    _write((x.low, x.high, y.low, y.high), table, column + 4)
            if fill_column >= 0:
                table[:, fill_column : fill_column + current_size.channels] = maps.fill
        if self.blends_fill:
            assert isinstance(self.warp, WarpOp)
            table[:, columns.warp_fill : columns.warp_fill + current_size.channels] = self.warp.fill

    def _write_warp(self, op: GatherOp, draws: OpDraws, size: Size, columns: Columns, table: Array) -> None:
        """Write the columns of the interpolation ``op``. ``size``: size of its input images."""
        start = columns.warp
        if isinstance(op, ResampleOp):
            _write(op.resampling(draws, size, self.half_pixel_centers), table, start)
            if columns.mask_warp not in (-1, start):
                _write(op.resampling(draws, size, True), table, columns.mask_warp)
            return
        assert isinstance(op, WarpOp)
        inverse = op.inverse(draws, size)
        elements = 6 if op.matrix_type == "affine" else 9
        for element in range(elements):
            table[:, start + element] = inverse[:, element // 3, element % 3]
        _write((size.width, size.height), table, start + elements)

    def describe(self) -> str:
        """Return a short description for ``explain()``."""
        return ", ".join(filter(None, (op.describe() for op in self.ops))) or "read"


def frames_of(ops: Iterable[Op], count: int) -> Array | None:
    """Return the index of the input frame per output frame, for clips of ``count`` frames; ``None`` if no op selects frames."""
    frames: Array | None = None
    for op in ops:
        if isinstance(op, FrameOp):
            indices = op.frames(count if frames is None else len(frames))
            frames = indices if frames is None else frames[indices]
    return frames


def _write(values: Sequence[PerSample], table: Array, column: int) -> None:
    """Write one value per column, from ``column`` on."""
    for index, value in enumerate(values):
        table[:, column + index] = value


@dataclass(frozen=True, slots=True)
class DeviceCropColumns:
    """First column of each group of columns that follow the columns of all passes, if the device computes windows of a crop.

    -1 for a group that is missing.
    """

    matrix: int
    """Matrix of all ops, for boxes and keypoints. Written by the device."""
    uniforms: int
    """Uniform numbers in [0, 1) from which the device draws the crop."""
    matrix_after: int
    """Matrix of the ops after the crop."""
    width: int
    """Number of columns of the whole table."""
