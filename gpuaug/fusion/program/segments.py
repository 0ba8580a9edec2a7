"""How a pipeline is split for images of one size: into runs of ops that one plan holds, and the ops between them.

An op stands alone where its library runs it, always or for images of this size, or where it is a container with
``random_apply``, which picks the modules that run anew for every batch.
Which ops of a run share a pass is decided in ``gpuaug.fusion.program.plan``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.base import ANY_SIDES, Op, OpDraws, Size, draw_each
from gpuaug.fusion.ops.fallback import EagerOp, left
from gpuaug.fusion.ops.mix import MixOp
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.policies.picking import Picking
from gpuaug.fusion.policies.random_apply import Nothing, RandomApply, Step
from gpuaug.fusion.program.plan import Plan, columns_of, plan

_MOST_KEPT = 256
_NOTHING = Nothing("", nn.Identity())


class Segment(NamedTuple):
    """Ops that follow one another and their plan, or one op that stands alone."""

    stop: int
    """Index of the first op after it."""
    ops: tuple[Op, ...] = ()
    plan: Plan | None = None
    eager: EagerOp | RandomApply | None = None
    """The op that stands alone."""

    @property
    def run(self) -> tuple[Op | EagerOp, ...]:
        """All ops of the segment."""
        return self.ops if self.eager is None else (self.eager,)


class Segments:
    """The segments of one pipeline, with their plans kept by image size.

    Args:
        ops: All of the pipeline's, in order.
    """

    def __init__(self, ops: tuple[Op | EagerOp, ...]) -> None:
        self._ops = ops
        self.chooses = any(isinstance(op, RandomApply) for op in ops)
        """Whether a container with ``random_apply`` decides for every batch which ops run."""
        self._mixes = any(isinstance(op, MixOp) for op in ops)
        self._kept: dict[Any, Segment] = {}
        """Segments by first op and image size. To plan a crop, a flip, a jitter and a normalisation takes 106 µs (one core)."""

    def at(self, start: int, size: Size, *, masks: bool, ops: tuple[Op | EagerOp, ...] | None = None) -> Segment:
        """The segment that begins at one op.

        Args:
            start: Index of the op.
            size: Of the images that the op is given.
            masks: Whether masks follow.
            ops: What ``picked`` gave. Left out: the pipeline's.
        """
        # The parameter table has a row for each image, so a plan serves any batch size, and images that differ in size.
        size = Size(1, size.channels, *ANY_SIDES, size.frames) if size.ragged else size
        key = (start, size.frames, size.channels, *((0, 0) if size.ragged else (size.height, size.width)), masks, ops)
        found = self._kept.get(key)
        if found is None:
            found = self._made(self._ops if ops is None else ops, start, size, masks)
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = found
        return found

    def whole(self, size: Size, *, masks: bool, views: int) -> Plan | None:
        """The plan that runs everything, all views at once; ``None`` where there is none, and each view is taken by itself.

        Args:
            size: Of the images.
            masks: Whether masks follow.
            views: How many there are. Where the pipeline mixes, an image must not meet one of another view.
        """
        if self.chooses or (self._mixes and views > 1):
            return None
        segment = self.at(0, size, masks=masks)
        return segment.plan if segment.stop == len(self._ops) else None

    def all(self, size: Size) -> list[Segment]:
        """The whole pipeline's segments, for images of one size without masks."""
        segments: list[Segment] = []
        start = 0
        while start < len(self._ops):
            segment = self.at(start, size, masks=False)
            segments.append(segment)
            if segment.plan is not None:
                size = segment.plan.out
            elif segment.eager is not None:
                (drawn,) = draw_each(segment.run, Sampler((0,), size.batch), size)
                size = drawn.out
            start = segment.stop
        return segments

    def picked(self, drawn: Sequence[OpDraws]) -> list[tuple[tuple[Op | EagerOp, ...], Sequence[OpDraws]]]:
        """The ops that run for these draws and what each drew, split where a plan has to begin.

        Args:
            drawn: What each op of the pipeline drew.
        """
        if not self.chooses:
            return [(self._ops, drawn)]
        parts: list[tuple[list[Op | EagerOp], list[OpDraws]]] = [([], [])]
        for op, each in zip(self._ops, drawn, strict=True):
            # What a choice refuses by the images' size is drawn for by its library.
            for step in op.steps(each) if isinstance(op, RandomApply) and "layers" in each else (Step(op, each, begins=False),):
                if step.begins and parts[-1][0]:
                    parts.append(([], []))
                parts[-1][0].append(step.op)
                parts[-1][1].append(step.drawn)
        if not parts[-1][0]:
            # No op was picked: the images still change their type.
            parts[-1][0].append(_NOTHING)
            parts[-1][1].append({})
        return [(tuple(ops), all_drawn) for ops, all_drawn in parts]

    def _made(self, ops: Sequence[Op | EagerOp], start: int, size: Size, masks: bool) -> Segment:
        alone, taken = _split(ops[start:], size)
        if alone is not None:
            return Segment(start + 1, eager=alone)
        planned = plan(taken, size, masks=masks)
        if not self.chooses:
            planned.columns = columns_of(taken, size)
            planned.numbers = max(sum(planned.columns), 1)
        return Segment(start + len(taken), taken, planned)


def check_channels(op: Op | None, channels: int) -> None:
    """Refuse images of other channels than the op takes, and settings that hold neither one value nor one per channel.

    Raises:
        ArgumentError: If there are any.
    """
    for part in op.ops if isinstance(op, Picking) else (op,):
        taken = part.channels_taken(channels) if isinstance(part, Op) else None
        if taken is not None:
            counts, what = taken
            picks = f", from which {op.name} picks" if isinstance(op, Picking) else ""
            raise ArgumentError(
                f"images must have {counts} channels for {what}{picks}, got {channels}. Leave it out, or give them three "
                "channels: images[:, :3], or images.expand(-1, 3, -1, -1) of grey ones."
            )
    run = op.ops if isinstance(op, RandomApply) else (op,)
    for part in (part for each in run if isinstance(each, Op) for part in each.parts):
        for name, values in part.per_channel(channels).items():
            count = np.size(np.asarray(values))
            if count not in (1, channels):
                raise ArgumentError(
                    f"{name} of {part.name} must have one value, or one per channel of the images, got {count} for {channels} "
                    "channels. Pass one value."
                )


def _split(ops: Sequence[Op | EagerOp], size: Size) -> tuple[EagerOp | RandomApply | None, tuple[Op, ...]]:
    """The first op if it stands alone, else as many as one plan can hold for images of this size."""
    taken: list[Op] = []
    for op in ops:
        check_channels(op.lowered if isinstance(op, EagerOp) else op, size.channels)
        reason = op.reason if isinstance(op, EagerOp) else op.unsupported_size(size)
        if isinstance(op, EagerOp) or (isinstance(op, RandomApply) and reason is None):
            alone: EagerOp | RandomApply = op
        elif reason is None or op.draws_size:  # which no library runs on a batch: the plan says what is wrong
            taken.append(op)
            size = op.out(size)
            continue
        else:
            alone = left(op, reason)
        return (None, tuple(taken)) if taken else (alone, ())
    return None, tuple(taken)
