"""How a run of ops that move pixels becomes one gather, and the numbers per sample that it takes.

A gather takes an output pixel through three maps: ``after`` (permutations after the interpolation), the interpolation, and
``before`` (permutations before it). Without an interpolation there is ``before`` alone.
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
    ResampleOp,
    Resampling,
    Rows,
    WarpOp,
)

Kind = Literal["", "resample", "affine", "perspective"]

_WARP_COLUMNS: dict[Kind, int] = {"": 0, "resample": 6, "affine": 8, "perspective": 11}


@dataclass(frozen=True, slots=True)
class Part:
    """Permutations on one side of the interpolation, composed."""

    ops: tuple[IndexOp, ...] = ()

    @property
    def edge(self) -> Edge:
        """What lies outside; ``""``: nothing can."""
        return next((op.edge for op in self.ops if op.edge), "")

    @property
    def fill(self) -> Any:
        """What padding with a constant holds."""
        return next((op.fill for op in self.ops if op.edge == "constant"), 0.0)

    @property
    def mask_fill(self) -> float:
        """The same for masks."""
        return next((op.mask_fill for op in self.ops if op.edge == "constant"), 0.0)

    def accepts(self, op: IndexOp) -> bool:
        """Whether ``op`` composes with these: padding does with padding alone that holds the same constants."""
        if not op.edge or not self.edge:
            return True
        return op.edge == self.edge == "constant" and (op.fill, op.mask_fill) == (self.fill, self.mask_fill)

    @property
    def width(self) -> int:
        """How many numbers a sample takes."""
        return (8 if self.edge else 4) if self.ops else 0


@dataclass(frozen=True, slots=True)
class Columns:
    """First column in a sample's row of each group of numbers of a gather; -1 for a group that the gather does not have."""

    after: int
    warp: int
    mask_warp: int
    before: int
    warp_fill: int
    after_fill: int
    before_fill: int
    sides: int
    """Height and width of the output image, where images differ in size behind the pass."""
    frames: int
    """Index of the source of each frame, where frames of clips are chosen."""
    end: int


@dataclass(frozen=True, slots=True)
class Gather:
    """Moves pixels: permutations, at most one interpolation, permutations."""

    before: Part = field(default_factory=Part)
    warp: WarpOp | ResampleOp | None = None
    after: Part = field(default_factory=Part)
    order: tuple[GatherOp, ...] = ()

    def accepts(self, op: GatherOp) -> bool:
        """Whether ``op`` can be added without a pixel changing."""
        # Of what draws sizes, the pass also takes the ops up to the one that gives one size, which may interpolate.
        if isinstance(op, IndexOp) and not (op.draws_size and self.warp is not None):
            return (self.before if self.warp is None else self.after).accepts(op)
        return self.warp is None

    def adding(self, op: GatherOp) -> "Gather":
        """This gather, and ``op`` after it."""
        order = (*self.order, op)
        if isinstance(op, IndexOp):
            if self.warp is None:
                return Gather(Part((*self.before.ops, op)), None, self.after, order)
            return Gather(self.before, self.warp, Part((*self.after.ops, op)), order)
        assert isinstance(op, WarpOp | ResampleOp)
        return Gather(self.before, op, self.after, order)

    @property
    def kind(self) -> Kind:
        """What the interpolation is."""
        if self.warp is None:
            return ""
        return self.warp.kind if isinstance(self.warp, WarpOp) else "resample"

    @property
    def nearest(self) -> bool:
        """Whether images take their nearest pixel. Masks always do."""
        return self.warp is not None and self.warp.nearest

    @property
    def half_pixel_centers(self) -> bool:
        """Whether pixels are squares to a resize, for images."""
        return isinstance(self.warp, ResampleOp) and (self.warp.half_pixel_centers or self.warp.nearest)

    @property
    def mask_half_pixel_centers(self) -> bool:
        """The same for masks."""
        return isinstance(self.warp, ResampleOp) and self.warp.mask_half_pixel_centers

    @property
    def filter(self) -> Filter:
        """What pixels of images are weighed by that fall on one, if they are."""
        return self.warp.filter if isinstance(self.warp, ResampleOp) else ""

    @property
    def clamps(self) -> bool:
        """Whether values that an antialiasing filter takes out of the range of bytes are clamped to it."""
        return isinstance(self.warp, ResampleOp) and bool(self.warp.filter) and self.warp.clamps

    @property
    def exact(self) -> bool:
        """Whether bytes have to become floats without a rounding error.

        Where nothing is interpolated and where an interpolating op skips samples, since these come out as they went in; and
        where padding is interpolated, since a fill may lie half way between two numbers of the output's type.
        """
        skips = self.warp is not None and self.warp.is_random
        return self.kind != "resample" or self.nearest or skips or self.before.edge == "constant"

    @property
    def zeros(self) -> bool:
        """Whether what a warp takes from outside the frame is black, rather than the border."""
        return isinstance(self.warp, WarpOp) and self.warp.edge != "border"

    @property
    def fills(self) -> bool:
        """Whether a fill is blended in by the share that a pixel takes from outside the frame, as torchvision does."""
        return isinstance(self.warp, WarpOp) and self.warp.edge == "fill"

    def columns(self, channels: int, masks: bool, *, sides: bool = False) -> Columns:
        """Lay out the numbers.

        Args:
            channels: Number of channels of the images.
            masks: Whether masks follow.
            sides: Whether images differ in size behind the pass.
        """
        at = 0
        places = {}
        own_mask_warp = masks and isinstance(self.warp, ResampleOp) and not self.half_pixel_centers
        for name, width in (
            ("after", self.after.width),
            ("warp", _WARP_COLUMNS[self.kind]),
            ("mask_warp", _WARP_COLUMNS[self.kind] if own_mask_warp else 0),
            ("before", self.before.width),
            ("warp_fill", channels if self.fills else 0),
            ("after_fill", channels if self.after.edge == "constant" else 0),
            ("before_fill", channels if self.before.edge == "constant" else 0),
            ("sides", 2 if sides else 0),
            ("frames", next((op.count for op in reversed(self.order) if isinstance(op, FrameOp)), 0)),
        ):
            places[name] = at if width else -1
            at += width
        if not own_mask_warp:
            places["mask_warp"] = places["warp"]
        return Columns(**places, end=at)

    def rows(
        self, drawn_of: Callable[[GatherOp], OpDraws], size: Size, columns: Columns, table: Array, *, fixed: bool = True
    ) -> None:
        """Write every sample's numbers into ``table``, (B, K) float32; only those that are drawn where not ``fixed``."""
        at = size
        before: IndexMap | None = None
        after: IndexMap | None = None
        for op in self.order:
            if isinstance(op, IndexOp):
                map_ = op.map(drawn_of(op), at)
                # Padding is counted from the image that is padded, whatever flips or crops the result behind it.
                map_ = map_.padding(at) if op.edge else map_
                if op in self.before.ops:
                    before = map_ if before is None else map_.after(before)
                else:
                    after = map_ if after is None else map_.after(after)
            else:
                self._write_warp(op, drawn_of(op), at, columns, table, fixed)
            at = op.out_drawn(drawn_of(op), at)
        if columns.frames >= 0 and fixed:
            chosen = frames_of(self.order, size.frames)
            assert chosen is not None
            table[:, columns.frames : columns.frames + len(chosen)] = chosen
        if columns.sides >= 0:
            _write((at.height, at.width), table, columns.sides, fixed)
        for map_at, part, column, fill_column in (
            (before, self.before, columns.before, columns.before_fill),
            (after, self.after, columns.after, columns.after_fill),
        ):
            if map_at is not None:
                _write_map(map_at, bool(part.edge), table, column, fixed)
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
        """In a few words."""
        return ", ".join(op.describe() for op in self.order) or "read"


def frames_of(ops: Iterable[Op], count: int) -> Array | None:
    """Index of the source of each frame that a run of ops gives of clips of ``count`` frames; ``None``: all stay."""
    chosen: Array | None = None
    for op in ops:
        if isinstance(op, FrameOp):
            own = op.frames(count if chosen is None else len(chosen))
            chosen = own if chosen is None else chosen[own]
    return chosen


def _write_map(map_: IndexMap, bounded: bool, table: Array, column: int, fixed: bool) -> None:
    values: tuple[Rows, ...] = (map_.x.sign, map_.x.offset, map_.y.sign, map_.y.offset)
    if bounded:
        values = (*values, map_.x.low, map_.x.high, map_.y.low, map_.y.high)
    _write(values, table, column, fixed)


def _write_resampling(made: Resampling, table: Array, column: int, fixed: bool) -> None:
    values = (made.scale_x, made.start_x, made.count_x, made.scale_y, made.start_y, made.count_y)
    _write(values, table, column, fixed)


def _write(values: Sequence[Rows], table: Array, column: int, fixed: bool) -> None:
    for k, value in enumerate(values):
        # What is a plain number is so for every batch of this size.
        if fixed or isinstance(value, np.ndarray):
            table[:, column + k] = value


@dataclass(frozen=True, slots=True)
class DeviceCropColumns:
    """Where in a row, behind what the passes read, the parts begin that a crop is fitted from; -1 for those it has not."""

    matrix: int
    """That of all ops, to be written."""
    numbers: int
    """Those in [0, 1) that the crop is drawn from."""
    rest: int
    """The matrix of the ops behind the crop."""
    width: int
