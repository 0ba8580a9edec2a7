"""Splitting of a pipeline into segments, for images of one size: consecutive ops with one plan, or a single separate op.

A plan groups ops into passes (``plan.py``). Each pass reads and writes all images once. An op is *separate*, that is, without a
plan, if Kornia or torchvision runs its module: for images of any size, or only of sizes that the op does not support. A
container of Kornia with ``random_apply`` is separate, too, because it picks modules anew for every batch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.base import ANY_SIDES, Op, OpDraws, Size, draw_in_order
from gpuaug.fusion.ops.fallback import EagerOp, fallback_of
from gpuaug.fusion.ops.geometry import IdentityOp
from gpuaug.fusion.ops.mix import MixOp
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.policies.picking import Picking
from gpuaug.fusion.policies.random_apply import PickedOp, RandomApply
from gpuaug.fusion.program.plan import Plan, count_uniforms, plan

_CACHE_SIZE = 256
"""Maximum number of cached segments."""

_IDENTITY = IdentityOp("", nn.Identity())


class Segment(NamedTuple):
    """Consecutive ops and their plan, or one separate op."""

    stop: int
    """Index of the first op after the segment."""
    ops: tuple[Op, ...] = ()
    """Ops of the plan; empty for a separate op."""
    plan: Plan | None = None
    separate_op: EagerOp | RandomApply | None = None

    @property
    def all_ops(self) -> tuple[Op | EagerOp, ...]:
        """All ops of the segment."""
        return self.ops if self.separate_op is None else (self.separate_op,)


class Segments:
    """Segments of one pipeline, with a cache by image size.

    Args:
        ops: All ops of the pipeline, in order.
    """

    def __init__(self, ops: tuple[Op | EagerOp, ...]) -> None:
        self._ops = ops
        self.has_random_apply = any(isinstance(op, RandomApply) for op in ops)
        """Whether a container with ``random_apply`` picks the ops of every batch."""
        self._has_mix = any(isinstance(op, MixOp) for op in ops)
        self._cached: dict[Any, Segment] = {}
        """Segments by index of the first op and image size.

        Without the cache, the plan of a crop, a flip, a jitter and a normalization takes 106 µs of host time (one core).
        """

    def at(self, start: int, size: Size, *, masks: bool, ops: tuple[Op | EagerOp, ...] | None = None) -> Segment:
        """Return the segment that begins with a given op.

        Args:
            start: Index of the op.
            size: Size of the input images of the op.
            masks: Whether there are masks.
            ops: Ops that run for the batch, from ``picked_ops``. Default: all ops of the pipeline.
        """
        # The parameter table has one row per image, so a plan is valid for any batch size, and for images that differ in size.
        size = Size(1, size.channels, *ANY_SIDES, size.frames) if size.ragged else size
        key = (start, size.frames, size.channels, *((0, 0) if size.ragged else (size.height, size.width)), masks, ops)
        segment = self._cached.get(key)
        if segment is None:
            segment = self._create_segment(self._ops if ops is None else ops, start, size, masks)
            if len(self._cached) >= _CACHE_SIZE:
                self._cached.clear()
            self._cached[key] = segment
        return segment

    def whole_plan(self, size: Size, *, masks: bool, views: int) -> Plan | None:
        """Return the plan that runs the whole pipeline for all views at once; ``None`` if there is no such plan.

        A view is one of several random outputs per image.

        Args:
            size: Size of the images.
            masks: Whether there are masks.
            views: Number of views.
        """
        # ``random_apply`` picks other ops for every batch. With a mix, views run one by one, so that an image is mixed with an
        # image of the same view.
        if self.has_random_apply or (self._has_mix and views > 1):
            return None
        segment = self.at(0, size, masks=masks)
        return segment.plan if segment.stop == len(self._ops) else None

    def all_segments(self, size: Size) -> list[Segment]:
        """Return all segments of the pipeline, for images of one size without masks."""
        segments: list[Segment] = []
        start = 0
        while start < len(self._ops):
            segment = self.at(start, size, masks=False)
            segments.append(segment)
            if segment.plan is not None:
                size = segment.plan.out
            elif segment.separate_op is not None:
                # The output size may depend on draws. The draws of seed 0 are enough for a description of the pipeline.
                (drawn_op,) = draw_in_order(segment.all_ops, Sampler((0,), size.batch), size)
                size = drawn_op.out
            start = segment.stop
        return segments

    def picked_ops(self, all_draws: Sequence[OpDraws]) -> list[tuple[tuple[Op | EagerOp, ...], Sequence[OpDraws]]]:
        """Return the ops that run for these draws, in groups (ops, draws of the ops). A new plan begins at each group.

        Args:
            all_draws: Draws of each op of the pipeline.
        """
        if not self.has_random_apply:
            return [(self._ops, all_draws)]
        groups: list[tuple[list[Op | EagerOp], list[OpDraws]]] = [([], [])]
        for op, draws in zip(self._ops, all_draws, strict=True):
            # A container with ``random_apply`` has draws without "layers" if Kornia runs it, because of the image size.
            op_itself = (PickedOp(op, draws, starts_plan=False),)
            for picked_op in op.picked_ops(draws) if isinstance(op, RandomApply) and "layers" in draws else op_itself:
                if picked_op.starts_plan and groups[-1][0]:
                    groups.append(([], []))
                groups[-1][0].append(picked_op.op)
                groups[-1][1].append(picked_op.draws)
        if not groups[-1][0]:
            # No op was picked, but the images must still be converted to the output type.
            groups[-1][0].append(_IDENTITY)
            groups[-1][1].append({})
        return [(tuple(ops), group_draws) for ops, group_draws in groups]

    def _create_segment(self, ops: Sequence[Op | EagerOp], start: int, size: Size, masks: bool) -> Segment:
        """Create the segment that begins with ``ops[start]``. ``size``, ``masks``: as for ``at``."""
        separate_op, plan_ops = _split(ops[start:], size)
        if separate_op is not None:
            return Segment(start + 1, separate_op=separate_op)
        new_plan = plan(plan_ops, size, masks=masks)
        if not self.has_random_apply:  # otherwise no caller reads these counts, because ``whole_plan`` returns ``None``
            new_plan.uniforms_per_op = count_uniforms(plan_ops, size)
            new_plan.uniform_count = max(sum(new_plan.uniforms_per_op), 1)
        return Segment(start + len(plan_ops), plan_ops, new_plan)


def check_channels(op: Op | None, channels: int) -> None:
    """Check that an op supports images of ``channels`` channels. With ``op=None``, nothing is checked.

    Raises:
        ArgumentError: If the op does not support this number of channels, or a setting has neither one value nor one value per
            channel.
    """
    for part in op.ops if isinstance(op, Picking) else (op,):
        requirement = part.unsupported_channels(channels) if isinstance(part, Op) else None
        if requirement is not None:
            counts, operation = requirement
            picks = f", from which {op.name} picks" if isinstance(op, Picking) else ""
            raise ArgumentError(
                f"images must have {counts} channels for {operation}{picks}, got {channels}. Leave it out, or give them three "
                "channels: images[:, :3], or images.expand(-1, 3, -1, -1) of grey ones."
            )
    possible_ops = op.ops if isinstance(op, RandomApply) else (op,)
    for part in (part for possible_op in possible_ops if isinstance(possible_op, Op) for part in possible_op.plan_ops):
        for name, values in part.per_channel(channels).items():
            count = np.size(np.asarray(values))
            if count not in (1, channels):
                raise ArgumentError(
                    f"{name} of {part.name} must have one value, or one per channel of the images, got {count} for {channels} "
                    "channels. Pass one value."
                )


def _split(ops: Sequence[Op | EagerOp], size: Size) -> tuple[EagerOp | RandomApply | None, tuple[Op, ...]]:
    """Return (op, ()) if the first op is separate, else (``None``, ops of one plan), for images of this size."""
    plan_ops: list[Op] = []
    for op in ops:
        check_channels(op.lowered if isinstance(op, EagerOp) else op, size.channels)
        reason = op.reason if isinstance(op, EagerOp) else op.unsupported_size(size)
        if isinstance(op, EagerOp) or (isinstance(op, RandomApply) and reason is None):
            separate_op: EagerOp | RandomApply = op
        elif reason is None or op.draws_size:
            # An op that draws a size per image has no fallback: a library must return images of one size. For an unsupported
            # input size, ``plan`` raises the error.
            plan_ops.append(op)
            size = op.out(size)
            continue
        else:
            separate_op = fallback_of(op, reason)
        return (None, tuple(plan_ops)) if plan_ops else (separate_op, ())
    return None, tuple(plan_ops)
