"""The types of the images between passes, float32 or 16 bits a value, and where values are certain to lie in [0, 1].

16 bits are enough where the result is in half precision and all values are certain to lie in [0, 1].
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from gpuaug.fusion.ops.base import ChannelOp, FrontOp
from gpuaug.fusion.ops.color_jitter import CLEAN, ColorJiggle, ColorJitter
from gpuaug.fusion.ops.filters import BlurOp
from gpuaug.fusion.ops.geometry import WarpOp
from gpuaug.fusion.program.gather import Gather
from gpuaug.fusion.program.plan import Pass

IN_STRIPS = range(5, 34)
"""Sides of the kernel of a blur in strips, in pixels: 16 lines above a strip and 16 below it are read for any of them."""

KEPT = torch.uint16
"""Type of images with 16 bits a value: shares of 65535."""


def types_written(passes: Sequence[Pass], given: torch.dtype, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The type of the images that each pass writes.

    Args:
        passes: All passes of a plan, at least one.
        given: Type of the images that the first pass reads.
        dtype: Type of the images that the last pass writes.
    """
    found: list[torch.dtype] = []
    for step, reader in pairwise(passes):
        clean = is_clean(step.front, given) and all(op.keeps_unit_range for op in step.points)
        # Rounding takes some values to another level, and an equalisation may put levels far apart.
        counts = isinstance(reader.front, FrontOp) and reader.front.kernel == "levels"
        given = KEPT if clean and not counts and dtype.is_floating_point and dtype.itemsize == 2 else torch.float32
        found.append(given)
    if passes[-1].way >= 0 and torch.float32 in found:  # two buffers of one type are used in turn
        found = [torch.float32] * len(found)
    return (*found, dtype)


def is_clean(front: Gather | FrontOp, given: torch.dtype) -> bool:
    """Whether the front of a pass, given images of this type, makes values that are certain to lie in [0, 1]."""
    if given.is_floating_point or given.is_signed:
        return False
    if not isinstance(front, Gather):
        # The user may choose the weights of a mix, and those of a grey.
        return front.keeps_unit_range if isinstance(front, ChannelOp) else front.kernel != "mix"
    fills = (*np.atleast_1d(front.warp.fill), 0.0) if isinstance(front.warp, WarpOp) else (0.0,)
    bounded = bool(min(fills) >= 0 and max(fills) <= 1)  # the user may fill with any value; Triton compiles no bool of NumPy's
    swings = front.filter == "cubic" and not front.clamps
    return bounded and not swings and "constant" not in (front.before.edge, front.after.edge)


def may_round(step: Pass, given: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a pass may round values in [0, 1] to 16 bits before it is done: it writes no more.

    Whole numbers of 16 bits that the user passes, and gets back, are rounded once, where they are written.
    """
    return dtype.itemsize == 2 and not (step.first == 0 and given == dtype == KEPT)


def in_strips(front: Gather | FrontOp, given: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a pass blurs by products of float16 matrices, in one launch."""
    # Their 11 bits are eight times as exact as bfloat16.
    blurs = isinstance(front, BlurOp) and max(front.kernel_size) in IN_STRIPS
    return blurs and dtype == torch.bfloat16 and is_clean(front, given)


def marked_program(step: Pass, *, clean: bool) -> tuple[tuple[int, int, int], ...]:
    """A pass's program, with ``CLEAN`` set for jitters that see numbers in [0, 1] and no NaN, which cost less to clamp."""
    marked = []
    for op, (code, column, flags) in zip(step.points, step.program, strict=True):
        jitter = isinstance(op, ColorJitter | ColorJiggle)
        marked.append((code, column, flags | CLEAN if jitter and clean else flags))
        clean = clean and op.keeps_unit_range
    return tuple(marked)
