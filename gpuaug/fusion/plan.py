"""Ops → passes: what can share one reading and one writing of the images.

A pass is one front (a gather, a filter or a mix: what an output pixel is made from) and any number of pointwise ops on that
pixel, in order. The first pass reads the user's images, the last one writes the result; between passes are float32 images.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpuaug.core.errors import ArgumentError
from gpuaug.core.limits import MOST_ELEMENTS, MOST_SIDE, MOST_WARPED
from gpuaug.fusion.gather import Columns, Gather
from gpuaug.fusion.ops.base import Array, Op, OpDraws, PointOp, Size
from gpuaug.fusion.ops.crop import HorizontalFlip, VerticalFlip
from gpuaug.fusion.ops.filters import FilterOp
from gpuaug.fusion.ops.geometry import GatherOp, WarpOp
from gpuaug.fusion.ops.mix import MixOp
from gpuaug.fusion.ops.sampler import Sampler

Front = Gather | FilterOp | MixOp


@dataclass(frozen=True, slots=True)
class Pass:
    """What one reading of the images does.

    ``program`` holds the pointwise ops' codes, the columns in which their rows begin, and their flags.
    """

    front: Front
    points: tuple[PointOp, ...]
    source: Size
    out: Size
    columns: Columns | int
    program: tuple[tuple[int, int, int], ...]
    prepared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What an executor has worked out for batches of one kind, by that kind."""

    @property
    def mean(self) -> bool:
        """Whether a pointwise op needs the mean grey of the image before it, and so a reduction first."""
        return any(needs_mean(op) for op in self.points)

    @property
    def ops(self) -> Iterator[Op]:
        """Everything the pass does, in the order of its execution."""
        yield from self.front.order if isinstance(self.front, Gather) else (self.front,)
        yield from self.points

    def describe(self) -> str:
        """In a few words."""
        return ", ".join([self.front.describe(), *(op.describe() for op in self.points)])


@dataclass(slots=True)
class Plan:
    """The passes of a run of ops for images of one size, and the width of a sample's row of numbers."""

    passes: tuple[Pass, ...]
    width: int
    source: Size
    out: Size
    masks: bool = False
    template: Array | None = None
    """A row of which the numbers that are the same for all samples and batches hold."""
    numbers: int = 8
    """How many columns of uniform numbers are drawn at first."""
    columns: tuple[int, ...] = ()
    """How many of them each op takes."""
    needs_own_batch: bool = False
    """Whether the rows of a batch are made for it alone."""


@dataclass(slots=True)
class _Open:
    """A pass that may still take ops."""

    front: Front = field(default_factory=Gather)
    points: list[PointOp] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return isinstance(self.front, Gather) and not self.front.order and not self.points

    def take(self, op: Op) -> bool:
        """Add ``op`` if it fits."""
        if isinstance(op, FilterOp | MixOp):
            if self.empty:
                self.front = op
                return True
            return False
        if isinstance(op, GatherOp):
            if not isinstance(self.front, Gather) or not self.front.accepts(op):
                return False
            if self.points and not (
                isinstance(op, HorizontalFlip | VerticalFlip) and not any(point.positional for point in self.points)
            ):
                return False
            self.front = self.front.adding(op)
            return True
        assert isinstance(op, PointOp)
        if needs_mean(op) and (not isinstance(self.front, Gather) or any(map(needs_mean, self.points))):
            return False
        self.points.append(op)
        return True


def needs_mean(op: PointOp) -> bool:
    """Whether ``op`` uses the mean grey of the image that it is given."""
    return bool(getattr(op, "needs_mean", False))


def plan(ops: Sequence[Op], size: Size, *, masks: bool = False) -> Plan:
    """Split a run of ops into passes, each taking as many as it can.

    Args:
        ops: In order; each has accepted the size it will see.
        size: Of the images that the first one sees.
        masks: Whether masks follow, which takes numbers of their own for some ops.

    Raises:
        ArgumentError: If images are larger than an op can count.
    """
    opened, at = [_Open()], size
    for index, op in enumerate(ops):
        _check_counted(op, at)
        if op.draws_size and not at.ragged:
            check_sizes(ops[index:], at.of(0))
        at = op.out(at)
        if not opened[-1].take(op):
            opened.append(_Open())
            taken = opened[-1].take(op)
            assert taken, f"{op.name} fits no pass"
    passes, at, column = [], size, 0
    for each in opened:
        source = at
        columns: Columns | int
        if isinstance(each.front, Gather):
            if masks:
                _check_mask_fill(each.front)
            columns = each.front.columns(column, size.channels, masks)
            column, at = columns.end, _after(each.front.order, at)
        else:
            columns = column
            column += each.front.row_width(size.channels)
        program = []
        for point in each.points:
            program.append((point.code, column, point.flags))
            column += point.row_width(size.channels)
        passes.append(Pass(each.front, tuple(each.points), source, at, columns, tuple(program)))
    return Plan(tuple(passes), max(column, 1), size, at, masks, needs_own_batch=any(op.needs_own_batch for op in ops))


def _check_mask_fill(front: Gather) -> None:
    """Refuse a warp that would fill masks with something."""
    if front.warp is not None and isinstance(front.warp, WarpOp) and front.warp.mask_fill:
        raise ArgumentError(
            f"fill of {front.warp.name} must be 0 for masks, got {front.warp.mask_fill:g}. "
            "Pass fill={tv_tensors.Image: …, tv_tensors.Mask: 0}."
        )


def _check_counted(op: Op, size: Size) -> None:
    """Refuse images that are larger than ``op`` can count, before it or after."""
    for each in (size, *op.out_bounds(size)):
        if each.ragged:  # which is looked at batch by batch
            continue
        if op.counts_pixels:
            check_sides(op, each)
        if each.channels * each.height * each.width >= MOST_ELEMENTS:
            raise ArgumentError(
                f"An image must have fewer than 2**31 values, got {each.channels * each.height * each.width} at {op.name}. "
                f"{_CUT_UP}"
            )


def check_sizes(ops: Sequence[Op], size: Size, given: Size | None = None) -> None:
    """Refuse images that ops could not take to their one size, whatever is drawn.

    Args:
        ops: The first take images of different sizes, or draw them; a later one gives them one.
        size: Of the images that the first one sees.
        given: Of the images themselves, where ``size`` has been drawn for them.

    Raises:
        ArgumentError: If there is one, named by its place in the batch where images differ in size.
    """
    at = size
    given = size if given is None else given
    for index, op in enumerate(ops):
        if op.unsupported_size(at):
            place, reason = next((place, why) for place in range(at.batch) if (why := op.unsupported_size(at.of(place))))
            where = f" at {place} of the batch" if given.ragged else ""
            raise ArgumentError(
                f"images must fit {op.name}, got {given.of(place).height}x{given.of(place).width}{where}, "
                f"which {reason}. Pad or resize before it."
            )
        if isinstance(op, WarpOp) and at.ragged and max(np.max(at.height), np.max(at.width)) > MOST_WARPED:
            longest = int(np.argmax(np.maximum(at.height, at.width)))
            check_sides(op, at.of(longest), f" at {longest} of the batch")
        if op.draws_size:
            for end in op.out_bounds(at):
                check_sizes(ops[index + 1 :], end, given)
            return
        at = op.out(at)


def check_sides(op: Op, size: Size, where: str = "") -> None:
    """Refuse images with sides that float32 cannot count, or as far as a warp counts them.

    Args:
        op: What counts their pixels.
        size: Of one image, or of all.
        where: Which image it is, for the text.

    Raises:
        ArgumentError: If a side is longer.
    """
    most, words = (MOST_WARPED, "2**20") if isinstance(op, WarpOp) else (MOST_SIDE - 1, "2**24 - 1")
    if max(size.height, size.width) > most:
        raise ArgumentError(
            f"images must have sides of at most {words} pixels for {op.name}, got {size.height}x{size.width}{where}. {_CUT_UP}"
        )


_CUT_UP = "Cut them up, or shrink them, in the dataset."


def columns_of(ops: Sequence[Op], size: Size) -> tuple[int, ...]:
    """How many columns of uniform numbers each op of a run draws for a batch of images of this size."""
    # Apart: a plan may be made in the middle of a draw.
    sampler, at = Sampler((0,), 1, apart=True), size if size.ragged else Size(1, size.channels, size.height, size.width)
    columns = []
    for op in ops:
        before = sampler.used
        drawn = op.draw(sampler, at)
        columns.append(sampler.used - before)
        at = op.out_drawn(drawn, at)
    return tuple(columns)


def _after(ops: Iterable[Op], size: Size) -> Size:
    for op in ops:
        size = op.out(size)
    return size


def matrix_of(plan: Plan, size: Size, drawn: dict[Op, OpDraws]) -> Array:
    """Input pixel coordinates → output pixel coordinates over all passes, (B, 3, 3) or (1, 3, 3) float64."""
    total = np.eye(3)[None]
    for step in plan.passes:
        for op in step.front.order if isinstance(step.front, Gather) else ():
            assert isinstance(op, GatherOp)
            total = op.matrix(drawn[op], size) @ total
            size = op.out_drawn(drawn[op], size)
    return total
