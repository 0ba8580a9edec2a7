"""Composition of consecutive ops that move pixels to one gather, and its columns in the parameter table.

A gather maps an output pixel to source pixels by three maps: ``after`` (permutations after the interpolation), the
interpolation, and ``before`` (permutations before the interpolation). Without an interpolation there is only ``before``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size
from gpuaug.fusion.ops.geometry import (
    Edge,
    Filter,
    FrameOp,
    GatherOp,
    IndexMap,
    IndexOp,
    PerSample,
    ResampleOp,
    Resampling,
    WarpOp,
)

Kind = Literal["", "resample", "affine", "perspective"]

_WARP_COLUMNS: dict[Kind, int] = {"": 0, "resample": 6, "affine": 8, "perspective": 11}


@dataclass(frozen=True, slots=True)
class Part:
    """Composed permutations on one side of the interpolation."""

    ops: tuple[IndexOp, ...] = ()

    @property
    def edge(self) -> Edge:
        """Mode of padding; ``""`` if no pixel can lie outside the image."""
        return next((op.edge for op in self.ops if op.edge), "")

    @property
    def fill(self) -> Any:
        """Value of constant padding of images."""
        return next((op.fill for op in self.ops if op.edge == "constant"), 0.0)

    @property
    def mask_fill(self) -> float:
        """Value of constant padding of masks."""
        return next((op.mask_fill for op in self.ops if op.edge == "constant"), 0.0)

    def accepts(self, op: IndexOp) -> bool:
        """Return whether ``op`` composes with the permutations. Two paddings compose only if both have the same constants."""
        if not op.edge or not self.edge:
            return True
        return op.edge == self.edge == "constant" and (op.fill, op.mask_fill) == (self.fill, self.mask_fill)

    @property
    def width(self) -> int:
        """Number of columns."""
        return (8 if self.edge else 4) if self.ops else 0


@dataclass(frozen=True, slots=True)
class Columns:
    """First column of each group of columns of a gather; -1 for a group that the gather does not have."""

    after: int
    warp: int
    mask_warp: int
    before: int
    warp_fill: int
    after_fill: int
    before_fill: int
    sides: int
    """Height and width of the output image, if images differ in size after the pass."""
    frames: int
    """Index of the input frame per output frame, if an op selects frames of clips."""
    end: int


@dataclass(frozen=True, slots=True)
class Gather:
    """Composition of ops that move pixels: permutations, at most one interpolation, permutations."""

    before: Part = field(default_factory=Part)
    warp: WarpOp | ResampleOp | None = None
    after: Part = field(default_factory=Part)
    order: tuple[GatherOp, ...] = ()

    def accepts(self, op: GatherOp) -> bool:
        """Return whether ``op`` can be added without a change of the output pixels."""
        # After an op that draws sizes, the gather must also take the ops up to the resize to one size, which interpolates.
        if isinstance(op, IndexOp) and not (op.draws_size and self.warp is not None):
            return (self.before if self.warp is None else self.after).accepts(op)
        return self.warp is None

    def adding(self, op: GatherOp) -> "Gather":
        """Return this gather composed with ``op`` after it."""
        order = (*self.order, op)
        if isinstance(op, IndexOp):
            if self.warp is None:
                return Gather(Part((*self.before.ops, op)), None, self.after, order)
            return Gather(self.before, self.warp, Part((*self.after.ops, op)), order)
        assert isinstance(op, WarpOp | ResampleOp)
        return Gather(self.before, op, self.after, order)

    @property
    def kind(self) -> Kind:
        """Type of the interpolation; empty if there is none."""
        if self.warp is None:
            return ""
        return self.warp.kind if isinstance(self.warp, WarpOp) else "resample"

    @property
    def nearest(self) -> bool:
        """Whether the interpolation of images is nearest-neighbour. For masks it always is."""
        return self.warp is not None and self.warp.nearest

    @property
    def half_pixel_centers(self) -> bool:
        """Whether a resize of images has half-pixel centres."""
        return isinstance(self.warp, ResampleOp) and (self.warp.half_pixel_centers or self.warp.nearest)

    @property
    def mask_half_pixel_centers(self) -> bool:
        """Whether a resize of masks has half-pixel centres."""
        return isinstance(self.warp, ResampleOp) and self.warp.mask_half_pixel_centers

    @property
    def filter(self) -> Filter:
        """Antialiasing filter of a resize of images; empty without antialiasing."""
        return self.warp.filter if isinstance(self.warp, ResampleOp) else ""

    @property
    def clamps(self) -> bool:
        """Whether the result of an antialiasing filter is clamped to the range of bytes."""
        return isinstance(self.warp, ResampleOp) and bool(self.warp.filter) and self.warp.clamps

    @property
    def exact(self) -> bool:
        """Whether bytes must be converted to floats without a rounding error.

        True if nothing is interpolated, or the interpolating op skips samples, because these pixels must not change; and if
        padding is interpolated, because a fill may lie halfway between two values of the output type.
        """
        skips = self.warp is not None and self.warp.is_random
        return self.kind != "resample" or self.nearest or skips or self.before.edge == "constant"

    @property
    def zeros(self) -> bool:
        """Whether pixels outside the image are 0 in a warp, instead of the border pixel."""
        return isinstance(self.warp, WarpOp) and self.warp.edge != "border"

    @property
    def fills(self) -> bool:
        """Whether a warp blends in a fill, weighted by the share of a pixel outside the image, as torchvision does."""
        return isinstance(self.warp, WarpOp) and self.warp.edge == "fill"

    def columns(self, channels: int, masks: bool, *, sides: bool = False) -> Columns:
        """Assign columns to the groups.

        Args:
            channels: Number of channels of the images.
            masks: Whether there are masks.
            sides: Whether images differ in size after the pass.
        """
        column = 0
        first_columns = {}
        has_mask_warp = masks and isinstance(self.warp, ResampleOp) and not self.half_pixel_centers
        for name, width in (
            ("after", self.after.width),
            ("warp", _WARP_COLUMNS[self.kind]),
            ("mask_warp", _WARP_COLUMNS[self.kind] if has_mask_warp else 0),
            ("before", self.before.width),
            ("warp_fill", channels if self.fills else 0),
            ("after_fill", channels if self.after.edge == "constant" else 0),
            ("before_fill", channels if self.before.edge == "constant" else 0),
            ("sides", 2 if sides else 0),
            ("frames", next((op.count for op in reversed(self.order) if isinstance(op, FrameOp)), 0)),
        ):
            first_columns[name] = column if width else -1
            column += width
        if not has_mask_warp:
            first_columns["mask_warp"] = first_columns["warp"]
        return Columns(**first_columns, end=column)

    def rows(
        self, drawn_of: Callable[[GatherOp], OpDraws], size: Size, columns: Columns, table: Array, *, fixed: bool = True
    ) -> None:
        """Write the columns of the gather, (B, K) float32; without ``fixed``, only columns that depend on draws."""
        current_size = size
        before: IndexMap | None = None
        after: IndexMap | None = None
        for op in self.order:
            if isinstance(op, IndexOp):
                map_ = op.map(drawn_of(op), current_size)
                # Bounds of padding refer to the padded image, regardless of flips or crops after it.
                map_ = map_.with_bounds(current_size) if op.edge else map_
                if op in self.before.ops:
                    before = map_ if before is None else map_.after(before)
                else:
                    after = map_ if after is None else map_.after(after)
            else:
                self._write_warp(op, drawn_of(op), current_size, columns, table, fixed)
            current_size = op.out_drawn(drawn_of(op), current_size)
        if columns.frames >= 0 and fixed:
            chosen = frames_of(self.order, size.frames)
            assert chosen is not None
            table[:, columns.frames : columns.frames + len(chosen)] = chosen
        if columns.sides >= 0:
            _write((current_size.height, current_size.width), table, columns.sides, fixed)
        for composed_map, part, column, fill_column in (
            (before, self.before, columns.before, columns.before_fill),
            (after, self.after, columns.after, columns.after_fill),
        ):
            if composed_map is not None:
                _write_map(composed_map, bool(part.edge), table, column, fixed)
            if fill_column >= 0 and fixed:
                table[:, fill_column : fill_column + size.channels] = part.fill

    def _write_warp(self, op: GatherOp, drawn: OpDraws, size: Size, columns: Columns, table: Array, fixed: bool) -> None:
        start = columns.warp
        if isinstance(op, ResampleOp):
            _write_resampling(op.resampling(drawn, size, self.half_pixel_centers), table, start, fixed)
            if columns.mask_warp not in (-1, start):
                _write_resampling(op.resampling(drawn, size, True), table, columns.mask_warp, fixed)
            return
        assert isinstance(op, WarpOp)
        inverse = op.warp(drawn, size).inverse
        numbers = 6 if op.kind == "affine" else 9
        for k in range(numbers):
            table[:, start + k] = inverse[:, k // 3, k % 3]
        _write((size.width, size.height), table, start + numbers, fixed)
        if self.fills and fixed:
            table[:, columns.warp_fill : columns.warp_fill + size.channels] = op.fill

    def describe(self) -> str:
        """Return a short description for ``explain()``."""
        return ", ".join(op.describe() for op in self.order) or "read"


def frames_of(ops: Iterable[Op], count: int) -> Array | None:
    """Return the index of the input frame per output frame, for clips of ``count`` frames; ``None`` if all frames are kept."""
    frames: Array | None = None
    for op in ops:
        if isinstance(op, FrameOp):
            indices = op.frames(count if frames is None else len(frames))
            frames = indices if frames is None else frames[indices]
    return frames


def _write_map(map_: IndexMap, bounded: bool, table: Array, column: int, fixed: bool) -> None:
    values: tuple[PerSample, ...] = (map_.x.sign, map_.x.offset, map_.y.sign, map_.y.offset)
    if bounded:
        values = (*values, map_.x.low, map_.x.high, map_.y.low, map_.y.high)
    _write(values, table, column, fixed)


def _write_resampling(resampling: Resampling, table: Array, column: int, fixed: bool) -> None:
    values = (
        resampling.scale_x,
        resampling.start_x,
        resampling.count_x,
        resampling.scale_y,
        resampling.start_y,
        resampling.count_y,
    )
    _write(values, table, column, fixed)


def _write(values: Sequence[PerSample], table: Array, column: int, fixed: bool) -> None:
    for k, value in enumerate(values):
        # A Python number is equal for all batches of this size.
        if fixed or isinstance(value, np.ndarray):
            table[:, column + k] = value


@dataclass(frozen=True, slots=True)
class DeviceCropColumns:
    """First column of each group from which the device computes crop windows, after the columns of the passes; -1: no group."""

    matrix: int
    """Matrix of all ops. The device writes it."""
    numbers: int
    """Uniform numbers in [0, 1) of the crop."""
    rest: int
    """Matrix of the ops after the crop."""
    width: int
    """Number of columns of the table."""
