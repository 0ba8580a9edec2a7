"""Grouping of ops into passes. The ops of a pass share one reading and one writing of the images.

A pass is one front (a gather, a filter or a mix, which computes an output pixel from source pixels) and any number of pointwise
ops on that pixel, in order. The first pass reads the user's images, and the last pass writes the result. The types of the
images between passes are in ``intermediates.py``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from torch import Tensor

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.base import Array, ChannelOp, FrontOp, Op, OpDraws, PointOp, Size, draw_in_order
from gpuaug.fusion.ops.crop import HorizontalFlip, VerticalFlip
from gpuaug.fusion.ops.geometry import BoxCropOp, FrameOp, GatherOp, WarpOp
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.program.gather import Columns, Gather, frames_of
from gpuaug.fusion.program.sizes import check_counted, check_mixed_channels, check_sizes

F = TypeVar("F", bound=FrontOp, covariant=True)
Rows = TypeVar("Rows", Array, Tensor)


@dataclass(frozen=True, slots=True)
class BasePass(ABC):
    """One reading and writing of the images.

    ``program`` has (code, first column, flags) per pointwise op. Columns are relative to ``first``, so that equal passes are
    compiled once.
    """

    front: Gather | FrontOp
    points: tuple[PointOp, ...]
    source: Size
    out: Size
    program: tuple[tuple[int, int, int], ...]
    first: int = 0
    """First column of the pass in the parameter table."""
    route_column: int = -1
    """Column of the buffer route of each sample (``_fill_routes`` in ``table/rows.py``).

    -1 if the pass reads every sample from its source and writes it to its output.
    """
    prepared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Cache of prepared launches, keyed by dtype, shape and strides."""

    def rows_of(self, table: Rows) -> Rows:
        """Return the table (B, K) from the first column of the pass."""
        return table[:, self.first :] if self.first else table

    @property
    def mean(self) -> bool:
        """Whether a pointwise op needs the mean grey of its input image, and therefore a reduction before the pass."""
        return any(op.needs_mean for op in self.points)

    @property
    def moves(self) -> tuple[GatherOp, ...]:
        """Ops that move pixels, in order."""
        return ()

    @property
    def works_in_place(self) -> bool:
        """Whether an output pixel depends only on the same pixel of the source, and on tables or means computed before."""
        return not self.moves

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops of the pass, in the order of execution."""
        return (*self.moves, *self.points)

    @property
    def launches(self) -> int:
        """Number of kernel launches of the Triton executor."""
        return max((op.launches for op in self.ops), default=1)

    @abstractmethod
    def fill_front(self, drawn_of: Callable[[Any], OpDraws], size: Size, table: Array, *, fixed: bool) -> None:
        """Write the columns of the front, (B, K) float32; without ``fixed``, only columns that depend on draws."""

    def out_drawn(self, drawn_of: Callable[[Any], OpDraws], size: Size) -> Size:
        """Return the size of the output images. ``drawn_of`` returns the draws of an op; ``size``: of the source images."""
        if not self.out.ragged:
            return size.to(self.out.height, self.out.width)
        for op in self.moves:
            size = op.out_drawn(drawn_of(op), size)
        return size

    def describe(self) -> str:
        """Return a short description for ``explain()``."""
        return ", ".join([self.front.describe(), *(op.describe() for op in self.points)])


@dataclass(frozen=True, slots=True)
class GatherPass(BasePass):
    """Pass whose front is a gather."""

    front: Gather
    columns: Columns = field(kw_only=True)

    @property
    def moves(self) -> tuple[GatherOp, ...]:
        """Ops of the gather, in order."""
        return self.front.order

    def fill_front(self, drawn_of: Callable[[Any], OpDraws], size: Size, table: Array, *, fixed: bool) -> None:
        """Write the source coordinates of each sample into its row."""
        self.front.rows(drawn_of, size, self.columns, table, fixed=fixed)


@dataclass(frozen=True, slots=True)
class OpPass(BasePass, Generic[F]):
    """Pass whose front is an op with a separate kernel: a filter or a mix."""

    front: F

    @property
    def ops(self) -> tuple[Op, ...]:
        """Front op, then the pointwise ops."""
        return (self.front, *self.points)

    @property
    def works_in_place(self) -> bool:
        """Whether the front maps levels to levels."""
        return self.front.kernel == "levels"

    def fill_front(self, drawn_of: Callable[[Any], OpDraws], size: Size, table: Array, *, fixed: bool) -> None:
        """Write the columns of the front op."""
        self.front.rows(drawn_of(self.front), size, table[:, : self.front.row_width(size.channels)])


Pass = GatherPass | OpPass[FrontOp]

Canvases: TypeAlias = tuple[tuple[int, int], ...]
"""(height, width) of the output buffer per image, for each pass but the last; empty if all images always have one size."""


class BoxCrop(NamedTuple):
    """Crop whose window the device chooses by the boxes of each image, and its pass."""

    pass_: GatherPass
    op: BoxCropOp


@dataclass(slots=True)
class Plan:
    """Passes of consecutive ops for images of one size, and the width of the parameter table."""

    passes: tuple[Pass, ...]
    width: int
    source: Size
    out: Size
    masks: bool = False
    template: Array | None = None
    """(width,) float32 row with the columns that depend neither on draws nor on the batch, written once."""
    numbers: int = 8
    """Number of uniform numbers per sample that the first call of the sampler draws."""
    columns: tuple[int, ...] = ()
    """Number of these uniform numbers per op."""
    needs_own_batch: bool = False
    """Whether tables cannot be prefetched for several batches."""
    rereading: tuple[Op, ...] = ()
    """Ops whose settings are read at every draw."""
    box_crop: BoxCrop | None = None

    @property
    def frames(self) -> Array | None:
        """Index of the input frame per output frame of a clip; ``None`` if all frames are kept."""
        return frames_of((op for pass_ in self.passes for op in pass_.moves), self.source.frames)

    def canvases(self, size: Size, views: Sequence[Mapping[Op, OpDraws]]) -> Canvases:
        """Return (height, width) of the output buffer per image, for each pass but the last; empty if images have one size.

        A smaller image lies in the top left corner of its buffer.

        Args:
            size: Size of the images that the first pass reads.
            views: Draws by op, per view.
        """
        if not any(pass_.out.ragged for pass_ in self.passes):
            return ()
        sides = np.zeros((len(self.passes) - 1, 2), np.int64)
        for drawn in views:
            current_size = size
            for index, pass_ in enumerate(self.passes[:-1]):
                current_size = pass_.out_drawn(drawn.__getitem__, current_size)
                sides[index] = np.maximum(
                    sides[index], (np.max(current_size.height, initial=0), np.max(current_size.width, initial=0))
                )
        return tuple((height, width) for height, width in sides.tolist())


@dataclass(slots=True)
class _Open:
    """Pass under construction."""

    front: Gather | FrontOp = field(default_factory=Gather)
    points: list[PointOp] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return isinstance(self.front, Gather) and not self.front.order and not self.points

    def take(self, op: Op, channels: int) -> bool:
        """Add ``op`` to the pass if it fits. Return whether it does."""
        if isinstance(op, FrontOp) and (not isinstance(op, ChannelOp) or ChannelOp.begins_pass(op, channels)):
            if self.empty:
                self.front = op
                return True
            return False
        if isinstance(op, GatherOp):
            if not isinstance(self.front, Gather) or not self.front.accepts(op):
                return False
            if self.points and not (
                isinstance(op, HorizontalFlip | VerticalFlip | FrameOp) and not any(point.positional for point in self.points)
            ):
                return False
            self.front = self.front.adding(op)
            return True
        mean_is_free = isinstance(self.front, Gather) and not any(point.needs_mean for point in self.points)
        if not isinstance(op, PointOp) or (op.needs_mean and not mean_is_free):
            return False
        self.points.append(op)
        return True


def plan(ops: Sequence[Op], size: Size, *, masks: bool = False) -> Plan:
    """Split consecutive ops into as few passes as possible.

    Args:
        ops: Ops in order. Each must support the size of its input images.
        size: Size of the input images of the first op.
        masks: Whether there are masks, for which some ops need more columns.

    Raises:
        ArgumentError: If images are too large for an op, or have no pixels.
    """
    open_passes = [_Open()]
    current_size = size
    for index, op in enumerate(ops):
        check_counted(op, current_size)
        check_mixed_channels(op, current_size)
        if op.draws_size and not current_size.ragged:
            check_sizes(ops[index:], current_size.sample(0))
        current_size = op.out(current_size)
        for part in op.plan_ops:
            if not open_passes[-1].take(part, size.channels):
                open_passes.append(_Open())
                fits = open_passes[-1].take(part, size.channels)
                assert fits, f"{part.name} fits no pass"
    passes: list[Pass] = []
    widths: list[int] = []
    current_size, channels = size, size.channels
    for open_pass in open_passes:
        front = open_pass.front
        points = tuple(open_pass.points)
        source = current_size
        if isinstance(front, Gather):
            if masks:
                _check_mask_fill(front)
            for op in front.order:
                current_size = op.out(current_size)
            columns = front.columns(channels, masks, sides=current_size.ragged)
            program, width = _program(points, columns.end, channels, current_size.images_per_sample)
            passes.append(GatherPass(front, points, source, current_size, program, columns=columns))
        else:
            program, width = _program(points, front.row_width(channels), channels, current_size.images_per_sample)
            passes.append(OpPass(front, points, source, current_size, program))
        widths.append(width)
    if _leaves_samples(passes):
        passes[1:] = [replace(pass_, route_column=width) for pass_, width in zip(passes[1:], widths[1:], strict=True)]
        widths[1:] = [width + 1 for width in widths[1:]]
    first_columns = accumulate(widths, initial=0)
    passes = [replace(pass_, first=first) for pass_, first in zip(passes, first_columns, strict=False)]
    gathers = [pass_ for pass_ in passes if isinstance(pass_, GatherPass)]
    box_crop = next((BoxCrop(pass_, op) for pass_ in gathers for op in pass_.moves if isinstance(op, BoxCropOp)), None)
    return Plan(
        tuple(passes),
        max(sum(widths), 1),
        size,
        current_size,
        masks,
        needs_own_batch=any(op.needs_own_batch for op in ops) or any(pass_.out.ragged for pass_ in passes),
        rereading=tuple(op for op in ops if op.settings_of_draw),
        box_crop=box_crop,
    )


def _leaves_samples(passes: Sequence[Pass]) -> bool:
    """Return whether passes between the first and the last can skip samples to which none of their ops applies."""
    between = passes[1:-1]
    supported = all(isinstance(pass_, GatherPass) or pass_.front.kernel != "mix" for pass_ in passes[1:])
    supported = supported and all(pass_.source.frames == pass_.out.frames for pass_ in passes[1:])
    keeps_size = all(not pass_.source.ragged and pass_.source == pass_.out for pass_ in between)
    return supported and keeps_size and any(all(op.is_random for op in pass_.ops) for pass_ in between)


def _program(
    points: Sequence[PointOp], column: int, channels: int, frames: int
) -> tuple[tuple[tuple[int, int, int], ...], int]:
    """Return (code, first column, flags) per pointwise op, with columns from ``column`` on, and the column after the last."""
    program = []
    for point in points:
        program.append((point.code, column, point.flags_for(channels, frames)))
        column += point.row_width(channels)
    return tuple(program), column


def _check_mask_fill(front: Gather) -> None:
    """Raise an error for a warp with a nonzero fill for masks."""
    if front.warp is not None and isinstance(front.warp, WarpOp) and front.warp.mask_fill:
        raise ArgumentError(
            f"fill of {front.warp.name} must be 0 for masks, got {front.warp.mask_fill:g}. "
            "Pass fill={tv_tensors.Image: …, tv_tensors.Mask: 0}."
        )


def columns_of(ops: Sequence[Op], size: Size) -> tuple[int, ...]:
    """Return the number of uniform numbers per sample that each op draws, for images of this size."""
    # separate_generators=True, because a plan may be computed in the middle of a draw.
    sampler = Sampler((0,), 1, separate_generators=True)
    sample_size = size if size.ragged else replace(size, batch=1)
    used = [sampler.columns_drawn for _ in draw_in_order(ops, sampler, sample_size)]
    return tuple(after - before for before, after in pairwise([0, *used]))
