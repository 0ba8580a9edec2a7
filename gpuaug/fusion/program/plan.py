"""Ops → passes: what can share one reading and one writing of the images.

A pass is one front (a gather, a filter or a mix: what an output pixel is made from) and any number of pointwise ops on that
pixel, in order. The first pass reads the user's images, the last one writes the result; the types of the images
between passes are in ``intermediates.py``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from torch import Tensor

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.base import Array, ChannelOp, FrontOp, Op, OpDraws, PointOp, Size, draw_each
from gpuaug.fusion.ops.crop import HorizontalFlip, VerticalFlip
from gpuaug.fusion.ops.geometry import BoxCropOp, FrameOp, GatherOp, WarpOp
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.program.gather import Columns, Gather, frames_of
from gpuaug.fusion.program.sizes import check_counted, check_mixed_channels, check_sizes

F = TypeVar("F", bound=FrontOp, covariant=True)
Rows = TypeVar("Rows", Array, Tensor)


@dataclass(frozen=True, slots=True)
class BasePass(ABC):
    """What one reading of the images does.

    ``program`` holds the pointwise ops' codes, the columns in which their rows begin, and their flags. Columns are counted from
    the ``first`` of the pass, so that passes that do the same are compiled once.
    """

    front: Gather | FrontOp
    points: tuple[PointOp, ...]
    source: Size
    out: Size
    program: tuple[tuple[int, int, int], ...]
    first: int = 0
    """The first of its columns in the parameter table."""
    way: int = -1
    """Column that says, for each sample, from which of two buffers to which it goes (``_fill_ways`` in ``table/rows.py``).

    -1 where the pass takes every sample from its source to its output.
    """
    prepared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What an executor has worked out for batches of one kind, by that kind."""

    def rows_of(self, table: Rows) -> Rows:
        """The rows of the table, (B, K), from its own columns on."""
        return table[:, self.first :] if self.first else table

    @property
    def mean(self) -> bool:
        """Whether a pointwise op needs the mean grey of the image before it, and so a reduction first."""
        return any(op.needs_mean for op in self.points)

    @property
    def moves(self) -> tuple[GatherOp, ...]:
        """The ops that move pixels, in order."""
        return ()

    @property
    def works_in_place(self) -> bool:
        """Whether an output pixel depends on no other pixel of the source, but by a table or a mean made before."""
        return not self.moves

    @property
    def ops(self) -> tuple[Op, ...]:
        """Everything the pass does, in the order of its execution."""
        return (*self.moves, *self.points)

    @property
    def launches(self) -> int:
        """Kernels of the Triton executor."""
        return max((op.launches for op in self.ops), default=1)

    @abstractmethod
    def fill_front(self, drawn_of: Callable[[Any], OpDraws], size: Size, table: Array, *, fixed: bool) -> None:
        """Write the front's numbers of each sample into its rows, (B, K) float32; without ``fixed``, the drawn ones."""

    def out_drawn(self, drawn_of: Callable[[Any], OpDraws], size: Size) -> Size:
        """Size of the output images, given the draws of each op and the size of the images that the pass reads."""
        if not self.out.ragged:
            return size.to(self.out.height, self.out.width)
        for op in self.moves:
            size = op.out_drawn(drawn_of(op), size)
        return size

    def describe(self) -> str:
        """In a few words."""
        return ", ".join([self.front.describe(), *(op.describe() for op in self.points)])


@dataclass(frozen=True, slots=True)
class GatherPass(BasePass):
    """A pass that begins with a gather."""

    front: Gather
    columns: Columns = field(kw_only=True)

    @property
    def moves(self) -> tuple[GatherOp, ...]:
        """Those of the gather."""
        return self.front.order

    def fill_front(self, drawn_of: Callable[[Any], OpDraws], size: Size, table: Array, *, fixed: bool) -> None:
        """Where pixels come from."""
        self.front.rows(drawn_of, size, self.columns, table, fixed=fixed)


@dataclass(frozen=True, slots=True)
class OpPass(BasePass, Generic[F]):
    """A pass that begins with an op of its own kernel: a filter or a mix."""

    front: F

    @property
    def ops(self) -> tuple[Op, ...]:
        """The front, and the pointwise ones."""
        return (self.front, *self.points)

    @property
    def works_in_place(self) -> bool:
        """True of the ops that take levels to others."""
        return self.front.kernel == "levels"

    def fill_front(self, drawn_of: Callable[[Any], OpDraws], size: Size, table: Array, *, fixed: bool) -> None:
        """The op's row."""
        self.front.rows(drawn_of(self.front), size, table[:, : self.front.row_width(size.channels)])


Pass = GatherPass | OpPass[FrontOp]

Canvases: TypeAlias = tuple[tuple[int, int], ...]
"""Height and width of the memory for an image behind each pass but the last; empty if images never differ in size there."""


class BoxCrop(NamedTuple):
    """A crop that the device chooses by the boxes of each image, and the pass that holds it."""

    step: GatherPass
    op: BoxCropOp


@dataclass(slots=True)
class Plan:
    """The passes of a run of ops for images of one size, and the width of a sample's row of numbers."""

    passes: tuple[Pass, ...]
    width: int
    source: Size
    out: Size
    masks: bool = False
    template: Array | None = None
    """float32 (width,): the columns that depend neither on draws nor on the batch, filled in once."""
    numbers: int = 8
    """Number of uniform numbers per sample that the first call of the sampler draws."""
    columns: tuple[int, ...] = ()
    """How many of them each op takes."""
    needs_own_batch: bool = False
    """Whether the rows of a batch are made for it alone."""
    rereading: tuple[Op, ...] = ()
    """Ops with settings that every draw reads."""
    box_crop: BoxCrop | None = None

    @property
    def frames(self) -> Array | None:
        """Index of the source of each frame of a clip; ``None``: all stay."""
        return frames_of((op for step in self.passes for op in step.moves), self.source.frames)

    def canvases(self, size: Size, views: Sequence[Mapping[Op, OpDraws]]) -> Canvases:
        """Height and width of the memory for an image behind each pass but the last; empty if images have one size everywhere.

        An image that is smaller lies at the top left.

        Args:
            size: Size of the images that the first pass reads.
            views: Draws of each op, for each view.
        """
        if not any(step.out.ragged for step in self.passes):
            return ()
        sides = np.zeros((len(self.passes) - 1, 2), np.int64)
        for drawn in views:
            at = size
            for index, step in enumerate(self.passes[:-1]):
                at = step.out_drawn(drawn.__getitem__, at)
                sides[index] = np.maximum(sides[index], (np.max(at.height, initial=0), np.max(at.width, initial=0)))
        return tuple((height, width) for height, width in sides.tolist())


@dataclass(slots=True)
class _Open:
    """A pass that may still take ops."""

    front: Gather | FrontOp = field(default_factory=Gather)
    points: list[PointOp] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return isinstance(self.front, Gather) and not self.front.order and not self.points

    def take(self, op: Op, channels: int) -> bool:
        """Add ``op`` if it fits."""
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
    """Split a run of ops into passes, each taking as many as it can.

    Args:
        ops: In order; each has accepted the size it will see.
        size: Of the images that the first one sees.
        masks: Whether masks follow, which takes numbers of their own for some ops.

    Raises:
        ArgumentError: If images are larger than an op can count, or have no pixels.
    """
    opened = [_Open()]
    at = size
    for index, op in enumerate(ops):
        check_counted(op, at)
        check_mixed_channels(op, at)
        if op.draws_size and not at.ragged:
            check_sizes(ops[index:], at.of(0))
        at = op.out(at)
        for part in op.parts:
            if not opened[-1].take(part, size.channels):
                opened.append(_Open())
                taken = opened[-1].take(part, size.channels)
                assert taken, f"{part.name} fits no pass"
    passes: list[Pass] = []
    widths: list[int] = []
    at, channels = size, size.channels
    for each in opened:
        front = each.front
        points = tuple(each.points)
        source = at
        if isinstance(front, Gather):
            if masks:
                _check_mask_fill(front)
            for op in front.order:
                at = op.out(at)
            columns = front.columns(channels, masks, sides=at.ragged)
            program, width = _program(points, columns.end, channels, at.each)
            passes.append(GatherPass(front, points, source, at, program, columns=columns))
        else:
            program, width = _program(points, front.row_width(channels), channels, at.each)
            passes.append(OpPass(front, points, source, at, program))
        widths.append(width)
    if _leaves_samples(passes):
        passes[1:] = [replace(step, way=width) for step, width in zip(passes[1:], widths[1:], strict=True)]
        widths[1:] = [width + 1 for width in widths[1:]]
    firsts = accumulate(widths, initial=0)
    passes = [replace(step, first=first) for step, first in zip(passes, firsts, strict=False)]
    gathers = [step for step in passes if isinstance(step, GatherPass)]
    box_crop = next((BoxCrop(step, op) for step in gathers for op in step.moves if isinstance(op, BoxCropOp)), None)
    return Plan(
        tuple(passes),
        max(sum(widths), 1),
        size,
        at,
        masks,
        needs_own_batch=any(op.needs_own_batch for op in ops) or any(step.out.ragged for step in passes),
        rereading=tuple(op for op in ops if op.read_at_draw),
        box_crop=box_crop,
    )


def _leaves_samples(passes: Sequence[Pass]) -> bool:
    """Whether passes between the first and the last can leave samples where they are, to which none of their ops applies."""
    between = passes[1:-1]
    can = all(isinstance(step, GatherPass) or step.front.kernel != "mix" for step in passes[1:])
    can = can and all(step.source.frames == step.out.frames for step in passes[1:])
    same = all(not step.source.ragged and step.source == step.out for step in between)
    return can and same and any(all(op.is_random for op in step.ops) for step in between)


def _program(
    points: Sequence[PointOp], column: int, channels: int, frames: int
) -> tuple[tuple[tuple[int, int, int], ...], int]:
    """The pointwise ops' codes, first columns and flags, with rows from ``column`` on; and the column after the last row."""
    program = []
    for point in points:
        program.append((point.code, column, point.flags_for(channels, frames)))
        column += point.row_width(channels)
    return tuple(program), column


def _check_mask_fill(front: Gather) -> None:
    """Refuse a warp that would fill masks with something."""
    if front.warp is not None and isinstance(front.warp, WarpOp) and front.warp.mask_fill:
        raise ArgumentError(
            f"fill of {front.warp.name} must be 0 for masks, got {front.warp.mask_fill:g}. "
            "Pass fill={tv_tensors.Image: …, tv_tensors.Mask: 0}."
        )


def columns_of(ops: Sequence[Op], size: Size) -> tuple[int, ...]:
    """Number of uniform numbers per sample that each op of a run draws for images of this size."""
    # Apart: a plan may be made in the middle of a draw.
    sampler = Sampler((0,), 1, apart=True)
    one = size if size.ragged else replace(size, batch=1)
    used = [sampler.used for _ in draw_each(ops, sampler, one)]
    return tuple(after - before for before, after in pairwise([0, *used]))
