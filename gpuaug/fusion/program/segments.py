"""Splitting of a pipeline into segments, for images of one size: consecutive ops with one plan, or a single fallback module.

A *plan* groups ops into passes (``plan.py``). Each pass reads and writes all images once. A *fallback module* is a module that
its library, Kornia or torchvision, runs: for images of all sizes if gpuaug has no op for the module, or else only for images of
sizes that the op does not support. *Ragged* images differ in size. A *view* is one of several random augmentations of an image.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from gpuaug.fusion.ops.base import ANY_SIDES, Op, Size
from gpuaug.fusion.ops.fallback import EagerOp, fallback_of
from gpuaug.fusion.ops.geometry import FieldOp, GatherOp
from gpuaug.fusion.ops.mix import MixOp
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.program.plan import Plan, count_uniforms, draw_in_order, plan
from gpuaug.fusion.program.sizes import check_channels, check_output

_CACHE_SIZE = 256
"""Maximum number of cached segments."""


class Segment(NamedTuple):
    """Consecutive ops and their plan, or one fallback module."""

    stop: int
    """Index, in the pipeline, of the first op after the segment."""
    plan: Plan | None = None
    fallback: EagerOp | None = None

    @property
    def all_ops(self) -> tuple[Op | EagerOp, ...]:
        """All ops of the segment."""
        plan_ops = () if self.plan is None else self.plan.ops
        return plan_ops if self.fallback is None else (self.fallback,)


class Segments:
    """Segments of one pipeline, with a cache by image size.

    Args:
        ops: All ops of the pipeline, in order.
    """

    def __init__(self, ops: tuple[Op | EagerOp, ...]) -> None:
        self._ops = ops
        self._has_mix = any(isinstance(op, MixOp) for op in ops)
        self._cached: dict[Any, Segment] = {}
        """Segments by index of the first op and image size.

        Without the cache, the plan of a crop, a flip, a jitter and a normalization takes 106 µs of host time (one core).
        """

    def at(self, start: int, size: Size, *, masks: bool, points: bool = False) -> Segment:
        """Return the segment that begins with the op at index ``start``.

        Args:
            start: Index of the op in the pipeline.
            size: Size of the input images of the op.
            masks: Whether there are masks.
            points: Whether there are boxes or keypoints. If so, ops that move pixels by a field of displacements, one per
                pixel, and ops that move pixels by a matrix, are in separate segments.
        """
        # A plan does not depend on the number of images, nor on the sizes of ragged images: these only affect the parameter
        # table, which has one row of op parameters per image. So one plan serves all ragged batches.
        size = Size(1, size.channels, *ANY_SIDES, size.frames) if size.ragged else size
        key = (start, size.frames, size.channels, *((0, 0) if size.ragged else (size.height, size.width)), masks, points)
        segment = self._cached.get(key)
        if segment is None:
            segment = self._create_segment(start, size, masks, points)
            if len(self._cached) >= _CACHE_SIZE:
                self._cached.clear()
            self._cached[key] = segment
        return segment

    def whole_plan(self, size: Size, *, masks: bool, views: int, points: bool = False) -> Plan | None:
        """Return the plan that runs the whole pipeline for all views at once; ``None`` if there is no such plan.

        Args:
            size: Size of the images.
            masks: Whether there are masks.
            views: Number of views.
            points: Whether there are boxes or keypoints.
        """
        # With a mix, views run one by one, so that an image is mixed with an image of the same view.
        if self._has_mix and views > 1:
            return None
        segment = self.at(0, size, masks=masks, points=points)
        return segment.plan if segment.stop == len(self._ops) else None

    def all_segments(self, size: Size) -> list[Segment]:
        """Return all segments of the pipeline, for images of one size without masks.

        If the output size of a fallback module depends on random draws, it is the size for seed 0.
        """
        segments: list[Segment] = []
        start = 0
        while start < len(self._ops):
            segment = self.at(start, size, masks=False)
            segments.append(segment)
            if segment.plan is not None:
                size = segment.plan.out
            else:
                # The output size may depend on draws. One seed is enough, because the result only describes the pipeline.
                (drawn_op,) = draw_in_order(segment.all_ops, Sampler((0,), size.batch), size)
                size = drawn_op.out
            start = segment.stop
        return segments

    def _create_segment(self, start: int, size: Size, masks: bool, points: bool) -> Segment:
        """Create the segment that begins with the op at index ``start``. Arguments: see ``at``."""
        ops: list[Op] = []
        current_size = size
        for op in self._ops[start:]:
            lowered = op.lowered if isinstance(op, EagerOp) else op
            if lowered is not None:
                check_channels(lowered, current_size.channels)
                check_output(lowered, lowered.out(current_size))
            reason = op.reason if isinstance(op, EagerOp) else op.unsupported_size(current_size)
            # Output images of a fallback module must have one size, so there is none for an op that draws a size per image. If
            # such an op does not support the input size, ``plan`` raises the error.
            if isinstance(op, Op) and (reason is None or op.draws_size) and not (points and _use_field_and_matrix([*ops, op])):
                ops.append(op)
                current_size = op.out(current_size)
            elif ops:
                break
            else:
                return Segment(start + 1, fallback=op if isinstance(op, EagerOp) else fallback_of(op, reason or ""))
        new_plan = plan(ops, size, masks=masks)
        new_plan.uniforms_per_op = count_uniforms(ops, size)
        new_plan.uniform_count = max(sum(new_plan.uniforms_per_op), 1)
        return Segment(start + len(ops), new_plan)


def _use_field_and_matrix(ops: Sequence[Op]) -> bool:
    """Return whether some of the ops move pixels by a field of displacements, and others by a matrix."""
    parts = [part for op in ops for part in op.ops]
    by_field = any(isinstance(part, FieldOp) for part in parts)
    return by_field and any(isinstance(part, GatherOp) for part in parts)
