"""Grouping of ops into passes. The ops of a *pass* run in one reading and one writing of the images.

A pass begins with its *front*, which computes an output pixel from source pixels: a gather, which moves pixels, or a filter, or
a mix. Then it runs any number of pointwise ops on the output pixel, in order. The first pass reads the user's images, and the
last pass writes the result. A *plan* is the passes of consecutive ops. The parameters of all ops are columns of the *parameter
table*, (B, K) float32, with one row per *sample*, an image or a clip. An op's part of a row is the op's own *row*. A *view* is
one of several random augmentations of an image. *Ragged* images differ in size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from torch import Tensor

from gpuaug.fusion.ops.base import Array, ChannelOp, FrontOp, Op, OpDraws, PointOp, Size
from gpuaug.fusion.ops.crop import HorizontalFlip, VerticalFlip
from gpuaug.fusion.ops.geometry import BoxCropOp, FrameOp, GatherOp
from gpuaug.fusion.ops.mix import ChainMix
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.pixels import UNCHANGED
from gpuaug.fusion.program.gather import Columns, Gather, frames_of
from gpuaug.fusion.program.sizes import check_canvases, check_limits, check_mixed_channels, check_sizes

F = TypeVar("F", bound=FrontOp, covariant=True)
Rows = TypeVar("Rows", Array, Tensor)

PointProgram: TypeAlias = tuple[tuple[int, int, int, float, float], ...]
"""Pointwise ops of a pass as constants for a kernel: (code, first column, flags, scale, offset) per op, in order.

``code`` and ``flags`` are attributes of ``PointOp``. ``scale`` and ``offset`` are the rule by which the result is rounded to
bytes (``ByteRule`` in ``fusion/pixels.py``); a scale of 0 stands for no rounding. If the result of the front is also rounded to
bytes, an entry with code 0 for this rounding comes first. Its column is the apply mask of the front; for a gather it is -1,
because pixels of samples that skip the interpolation are bytes already.
"""


class DrawnOp(NamedTuple):
    """One op or fallback module of a sequence, with its draws and sizes."""

    op: Any
    draws: OpDraws
    size: Size
    """Size of the input images of the op."""
    out: Size
    """Size of the output images of the op."""


def draw_in_order(
    ops: Iterable[Any], sampler: Sampler, size: Size, *, deferred: Mapping[Any, int] | None = None
) -> Iterator[DrawnOp]:
    """Draw for a sequence of ops, and yield them one by one. The input size of an op is the output size of the preceding op.

    Args:
        ops: Ops, and *fallback modules*, which their library runs.
        sampler: Source of random numbers.
        size: Size of the input images of the first op.
        deferred: Ops whose parameters are computed later, when the sizes of the images are known → number of uniform numbers
            per sample. The draws of such an op are only these numbers: ``{"numbers": …}``, (count, B), in [0, 1).
    """
    for op in ops:
        if deferred and op in deferred:
            drawn_op = DrawnOp(op, {"numbers": sampler.uniform(deferred[op])}, size, op.out(size))
        else:
            draws = op.draw(sampler, size)
            drawn_op = DrawnOp(op, draws, size, op.out_drawn(draws, size))
        yield drawn_op
        size = drawn_op.out


@dataclass(frozen=True, slots=True)
class BasePass(ABC):
    """One reading and writing of the images."""

    front: Gather | FrontOp
    point_ops: tuple[PointOp, ...]
    source: Size
    """Size of the images that the pass reads."""
    out: Size
    """Size of the images that the pass writes."""
    point_program: PointProgram
    """``point_ops`` as constants for a kernel. Columns count from ``first_column``, so that passes with equal ops share it."""
    first_column: int = 0
    """First column of the pass in the parameter table."""
    route_column: int = -1
    """Column of the *buffer route* of each sample: the buffer, of two, to read it from, and to write it to (``table/rows.py``).

    A sample to which no op of the pass applies stays in its buffer. -1 without such a column: the pass reads all samples from
    one buffer and writes them to another.
    """
    launch_cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Results of the functions that prepare kernel launches, keyed by the function, and dtypes and layouts of its arguments."""

    def columns_of(self, table: Rows) -> Rows:
        """Return the columns of a table, (B, K), from the first column of the pass on."""
        return table[:, self.first_column :] if self.first_column else table

    @property
    def point_columns(self) -> Iterator[tuple[PointOp, int]]:
        """(op, its first column) of each pointwise op, in order. ``point_program`` may begin with an entry for the front."""
        conversions = len(self.point_program) - len(self.point_ops)
        return zip(self.point_ops, (column for _, column, *_ in self.point_program[conversions:]), strict=True)

    @property
    def needs_mean(self) -> bool:
        """Whether a pointwise op needs the mean grey of its input image, which another launch computes before the pass."""
        return any(op.needs_mean for op in self.point_ops)

    @property
    def gather_ops(self) -> tuple[GatherOp, ...]:
        """Ops of the gather, in order; empty if the front is not a gather."""
        return ()

    @property
    def works_in_place(self) -> bool:
        """Whether the output may overwrite the source, because a pixel depends only on its source pixel and on statistics."""
        return not self.gather_ops

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops of the pass, in the order of execution."""
        return (*self.gather_ops, *self.point_ops)

    @property
    def launches(self) -> int:
        """Number of kernel launches of the Triton backend. ``Op.launches`` of each op counts all launches of the pass."""
        return max((op.launches for op in self.ops), default=1)

    @abstractmethod
    def fill_front(self, draws_of: Callable[[Any], OpDraws], size: Size, table: Array) -> None:
        """Write the columns of the front into a table, (B, K) float32.

        Args:
            draws_of: Function that returns the draws of an op.
            size: Size of the images that the pass reads.
            table: Parameter table from the first column of the pass on.
        """

    def out_drawn(self, draws_of: Callable[[Any], OpDraws], size: Size) -> Size:
        """Return the size of the output images, for input images of ``size``, with all frames. ``draws_of``: op → its draws."""
        if not self.out.ragged:
            return Size(size.batch, self.out.channels, self.out.height, self.out.width, size.frames)
        for op in self.gather_ops:
            size = op.out_drawn(draws_of(op), size)
        return size

    def describe(self) -> str:
        """Return a short description for ``explain()``."""
        return ", ".join([self.front.describe(), *(op.describe() for op in self.point_ops)])


@dataclass(frozen=True, slots=True)
class GatherPass(BasePass):
    """Pass whose front is a gather."""

    front: Gather
    columns: Columns = field(kw_only=True)
    """Columns of the gather, from the first column of the pass on."""

    @property
    def gather_ops(self) -> tuple[GatherOp, ...]:
        """Ops of the gather, in order."""
        return self.front.ops

    def fill_front(self, draws_of: Callable[[Any], OpDraws], size: Size, table: Array) -> None:
        """Write the parameters of the gather. Arguments as in ``BasePass``."""
        self.front.write_rows(draws_of, size, self.columns, table)


@dataclass(frozen=True, slots=True)
class OpPass(BasePass, Generic[F]):
    """Pass whose front is an op with a separate kernel: a filter or a mix."""

    front: F

    @property
    def ops(self) -> tuple[Op, ...]:
        """Front op, then the pointwise ops."""
        return (self.front, *self.point_ops)

    @property
    def works_in_place(self) -> bool:
        """Whether the front maps each value by a lookup table, as equalization does."""
        return self.front.kernel == "levels"

    def fill_front(self, draws_of: Callable[[Any], OpDraws], size: Size, table: Array) -> None:
        """Write the columns of the front op. Arguments as in ``BasePass``."""
        self.front.write_rows(draws_of(self.front), size, table[:, : self.front.row_width(size.channels)])


@dataclass(frozen=True, slots=True)
class ChainsPass(OpPass[ChainMix]):
    """Pass whose front mixes the results of *chains*: ops that each process a copy of the images.

    All chains have the same plan. It runs once, on as many copies of the images as there are chains.
    """

    chain_plan: "Plan" = field(kw_only=True, compare=False)
    """Plan of one chain, for which each frame of a clip is an image."""

    @property
    def launches(self) -> int:
        """Number of launches of ``chain_plan``, which runs once, plus 5 + 2 per chain for the mix in torch."""
        return sum(pass_.launches for pass_ in self.chain_plan.passes) + 5 + 2 * len(self.front.chains)

    def chain_tables(self, table: Rows) -> list[Rows]:
        """Return the columns of each chain, (B, ``chain_plan.width``). ``table``: from the first column of the pass on."""
        width = self.chain_plan.width
        first_column = self.front.row_width(self.source.channels)
        starts = [first_column + index * width for index in range(len(self.front.chains))]
        return [table[:, start : start + width] for start in starts]


Pass = GatherPass | OpPass[FrontOp]

Canvas: TypeAlias = tuple[int, int]
"""(height, width) of a *canvas*: the part of a buffer between passes that holds one image, in its top left corner."""

Canvases: TypeAlias = tuple[Canvas, ...]
"""Canvas of the output images of each pass but the last, large enough for all images of a batch; empty if all have one size."""


class BoxCrop(NamedTuple):
    """Crop whose windows, one per image, the device chooses by the boxes of the image; and the pass that runs the crop."""

    pass_: GatherPass
    op: BoxCropOp


@dataclass(slots=True)
class Plan:
    """Passes of consecutive ops, for images of one size, or for ragged images of any sizes."""

    ops: tuple[Op, ...]
    passes: tuple[Pass, ...]
    width: int
    """Number of columns of the parameter table."""
    source: Size
    """Size of the images that the first pass reads."""
    out: Size
    """Size of the images that the last pass writes."""
    uniform_count: int = 8
    """Number of uniform numbers per sample that the ``Sampler`` draws in one call of NumPy."""
    uniforms_per_op: tuple[int, ...] = ()
    """Number of uniform numbers per sample that each op uses."""
    draws_one_batch_at_a_time: bool = False
    """Whether the draws of several batches cannot be computed together."""
    box_crop: BoxCrop | None = None
    """Crop by boxes; ``None`` if there is none."""

    @property
    def frames(self) -> Array | None:
        """Index of the input frame per output frame of a clip; ``None`` if all frames are kept."""
        return frames_of((op for pass_ in self.passes for op in pass_.gather_ops), self.source.frames)

    def canvases(self, size: Size, views: Sequence[Mapping[Op, OpDraws]]) -> Canvases:
        """Return the canvas of each pass but the last, as (height, width); empty if images have one size.

        A canvas has the largest height and the largest width of the images. A smaller image lies in its top left corner.

        Args:
            size: Size of the images that the first pass reads.
            views: Draws by op, one mapping per view.

        Raises:
            ArgumentError: If the canvases would be too large (``check_canvases``).
        """
        if not any(pass_.out.ragged for pass_ in self.passes):
            return ()
        sides = np.zeros((len(self.passes) - 1, len(views), size.batch, 2), np.int64)
        for view, draws_by_op in enumerate(views):
            current_size = size
            for index, pass_ in enumerate(self.passes[:-1]):
                current_size = pass_.out_drawn(draws_by_op.__getitem__, current_size)
                sides[index, view, :, 0] = current_size.height
                sides[index, view, :, 1] = current_size.width
        for pass_, sides_of_pass in zip(self.passes, sides, strict=False):
            # Each frame of a clip has a canvas of its own.
            check_canvases(sides_of_pass.reshape(-1, 2).repeat(pass_.out.images_per_sample, 0), pass_.out.channels)
        return tuple((height, width) for height, width in sides.max((1, 2), initial=0).tolist())


@dataclass(slots=True)
class _PassBuilder:
    """Pass under construction. Ops are added in order, until one does not fit."""

    front: Gather | FrontOp = field(default_factory=Gather)
    point_ops: list[PointOp] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether no op was added."""
        return isinstance(self.front, Gather) and not self.front.ops and not self.point_ops

    def add_if_fits(self, op: Op, size: Size) -> bool:
        """Add ``op``, whose input images are of ``size``, if the pass can run it, too. Return whether it was added."""
        # A ``ChannelOp`` with three input and three output channels is pointwise; any other is the front of its pass.
        if isinstance(op, FrontOp) and (not isinstance(op, ChannelOp) or ChannelOp.begins_pass(op, size)):
            if self.is_empty:
                self.front = op
                return True
            return False
        if isinstance(self.front, FrontOp) and self.front.kernel == "torch":  # torch runs the front in a pass of its own
            return False
        if isinstance(op, GatherOp):
            # After pointwise ops, only a flip or a selection of frames fits, and only if no pointwise op depends on
            # coordinates: then the op can be moved before the pointwise ops.
            is_movable = isinstance(op, HorizontalFlip | VerticalFlip | FrameOp)
            if self.point_ops and not (is_movable and not any(point_op.positional for point_op in self.point_ops)):
                return False
            if not isinstance(self.front, Gather) or not self.front.accepts(op):
                return False
            self.front = self.front.with_op(op)
            return True
        can_take_mean = isinstance(self.front, Gather) and not any(point_op.needs_mean for point_op in self.point_ops)
        if not isinstance(op, PointOp) or (op.needs_mean and not can_take_mean):
            return False
        # A front ``ChannelOp`` with three output channels has another number of input channels. Its kernel computes one channel
        # at a time. Without three channels, ``op`` begins its own pass, or runs on a single channel.
        if op.rgb_only and isinstance(self.front, ChannelOp) and size.channels == 3:
            return False
        self.point_ops.append(op)
        return True


def plan(ops: Sequence[Op], size: Size, *, masks: bool = False) -> Plan:
    """Group consecutive ops into as few passes as possible.

    Args:
        ops: Ops in order. Each must support the size of its input images.
        size: Size of the input images of the first op.
        masks: Whether there are masks, for which a resize has more columns.

    Raises:
        ArgumentError: If images are too large for an op, or have no pixels.
    """
    builders = [_PassBuilder()]
    current_size = size
    for index, op in enumerate(ops):
        check_limits(op, current_size)
        check_mixed_channels(op, current_size)
        if op.draws_size and not current_size.ragged:  # sizes of ragged images are checked per batch
            check_sizes(ops[index:], current_size.sample(0))
        for part in op.plan_ops:
            if not builders[-1].add_if_fits(part, current_size):
                builders.append(_PassBuilder())
                fits = builders[-1].add_if_fits(part, current_size)
                assert fits, f"{part.name} fits no pass"
        current_size = op.out(current_size)
    passes: list[Pass] = []
    widths: list[int] = []
    current_size = size
    for builder in builders:
        front = builder.front
        source = current_size
        for op in front.ops if isinstance(front, Gather) else (front,):
            current_size = op.out(current_size)
        if isinstance(front, Gather):
            columns = front.columns(current_size.channels, masks, sides=current_size.ragged)
            point_program, width = _point_program(builder, columns.end, current_size)
            point_ops = tuple(builder.point_ops)
            passes.append(GatherPass(front, point_ops, source, current_size, point_program, columns=columns))
        elif isinstance(front, ChainMix):
            chain_plan = plan(front.chains[:1], source.per_frame())
            passes.append(ChainsPass(front, (), source, current_size, (), chain_plan=chain_plan))
            width = front.row_width(source.channels) + len(front.chains) * chain_plan.width
        else:
            point_program, width = _point_program(builder, front.row_width(source.channels), current_size)
            passes.append(OpPass(front, tuple(builder.point_ops), source, current_size, point_program))
        widths.append(width)
    if _can_skip_samples(passes):  # then the last column of each pass but the first is the buffer route
        passes[1:] = [replace(pass_, route_column=width) for pass_, width in zip(passes[1:], widths[1:], strict=True)]
        widths[1:] = [width + 1 for width in widths[1:]]
    first_columns = accumulate(widths, initial=0)
    passes = [replace(pass_, first_column=column) for pass_, column in zip(passes, first_columns, strict=False)]
    gathers = [pass_ for pass_ in passes if isinstance(pass_, GatherPass)]
    box_crop = next((BoxCrop(pass_, op) for pass_ in gathers for op in pass_.gather_ops if isinstance(op, BoxCropOp)), None)
    return Plan(
        tuple(ops),
        tuple(passes),
        max(sum(widths), 1),
        size,
        current_size,
        draws_one_batch_at_a_time=any(op.draws_one_batch_at_a_time for op in ops) or any(pass_.out.ragged for pass_ in passes),
        box_crop=box_crop,
    )


def _can_skip_samples(passes: Sequence[Pass]) -> bool:
    """Return whether a pass other than the first and the last can skip samples to which none of its ops applies."""
    inner_passes = passes[1:-1]
    # The kernel of mixes, and ops in torch, read from one buffer only. A selection of frames changes the number of images.
    supported = all(isinstance(pass_, GatherPass) or pass_.front.kernel not in ("mix", "torch") for pass_ in passes[1:])
    supported = supported and all(pass_.source.frames == pass_.out.frames for pass_ in passes[1:])
    keeps_size = all(not pass_.source.ragged and pass_.source == pass_.out for pass_ in inner_passes)
    return supported and keeps_size and any(all(op.is_random for op in pass_.ops) for pass_ in inner_passes)


def _point_program(builder: _PassBuilder, column: int, size: Size) -> tuple[PointProgram, int]:
    """Return the ``PointProgram`` of a pass, and its number of columns.

    Args:
        builder: Complete pass.
        column: First column of the pointwise ops, counted from the first column of the pass.
        size: Size of the output images of the front.
    """
    point_program = []
    if builder.front.to_bytes not in (None, UNCHANGED):
        mask_column = -1 if isinstance(builder.front, Gather) else 0
        point_program.append((0, mask_column, 0, *builder.front.to_bytes))
    for point_op in builder.point_ops:
        flags = point_op.flags_for(size.channels, size.images_per_sample)
        point_program.append((point_op.code, column, flags, *(point_op.to_bytes or UNCHANGED)))
        column += point_op.row_width(size.channels)
    return tuple(point_program), column


def count_uniforms(ops: Sequence[Op], size: Size) -> tuple[int, ...]:
    """Return the number of uniform numbers per sample that each op draws. ``size``: input size of the first op."""
    # Separate generators, because a plan may be computed while another sampler of the thread draws.
    sampler = Sampler((0,), 1, separate_generators=True)
    sample_size = size if size.ragged else replace(size, batch=1)
    counts_after_op = [sampler.columns_drawn for _ in draw_in_order(ops, sampler, sample_size)]
    return tuple(after - before for before, after in pairwise([0, *counts_after_op]))
