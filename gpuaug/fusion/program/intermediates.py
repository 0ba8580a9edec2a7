"""Types of the images between passes: float32, or 16 bits per value.

16 bits are enough if the result has half precision, and all values are certain to lie in [0, 1].
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from gpuaug.fusion.ops.base import ChannelOp, FrontOp
from gpuaug.fusion.ops.color_jitter import NO_NAN, ColorJiggle, ColorJitter
from gpuaug.fusion.ops.filters import BlurOp
from gpuaug.fusion.ops.geometry import WarpOp
from gpuaug.fusion.program.gather import Gather
from gpuaug.fusion.program.plan import Pass

IN_STRIPS = range(5, 34)
"""Kernel sizes of a blur in strips, in pixels. For all sizes, 16 lines above and 16 lines below a strip are read."""

UINT16_UNIT = torch.uint16
"""Type of intermediate images with 16 bits per value, in units of 1/65535."""


def types_written(passes: Sequence[Pass], source_dtype: torch.dtype, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the type of the images that each pass writes.

    Args:
        passes: All passes of a plan, at least one.
        source_dtype: Type of the images that the first pass reads.
        dtype: Type of the images that the last pass writes.
    """
    dtypes: list[torch.dtype] = []
    for pass_, reader in pairwise(passes):
        clean = is_clean(pass_.front, source_dtype) and all(op.keeps_unit_range for op in pass_.points)
        # Rounding moves some values to another level, and equalization may move neighbouring levels far apart.
        counts = isinstance(reader.front, FrontOp) and reader.front.kernel == "levels"
        source_dtype = (
            UINT16_UNIT if clean and not counts and dtype.is_floating_point and dtype.itemsize == 2 else torch.float32
        )
        dtypes.append(source_dtype)
    if passes[-1].route_column >= 0 and torch.float32 in dtypes:  # both buffers have one type
        dtypes = [torch.float32] * len(dtypes)
    return (*dtypes, dtype)


def is_clean(front: Gather | FrontOp, source_dtype: torch.dtype) -> bool:
    """Return whether the output of the front of a pass is certain to lie in [0, 1], for images of ``source_dtype``."""
    if source_dtype.is_floating_point or source_dtype.is_signed:
        return False
    if not isinstance(front, Gather):
        # The user sets the weights of mixes and of conversions to grey.
        return front.keeps_unit_range if isinstance(front, ChannelOp) else front.kernel != "mix"
    fills = (*np.atleast_1d(front.warp.fill), 0.0) if isinstance(front.warp, WarpOp) else (0.0,)
    bounded = bool(min(fills) >= 0 and max(fills) <= 1)  # users set any fill; bool(), as Triton compiles no NumPy bool
    swings = front.filter == "cubic" and not front.clamps
    return bounded and not swings and "constant" not in (front.before.edge, front.after.edge)


def may_round(pass_: Pass, source_dtype: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether a pass may round values in [0, 1] to 16 bits internally, because its output has 16 bits.

    16-bit integers that the user passes, and gets back, are rounded only once, in the output.
    """
    return dtype.itemsize == 2 and not (pass_.first == 0 and source_dtype == dtype == UINT16_UNIT)


def in_strips(front: Gather | FrontOp, source_dtype: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether a pass computes its blur by products of float16 matrices, in one launch."""
    # float16 has 11 bits of precision, eight times as exact as bfloat16.
    blurs = isinstance(front, BlurOp) and max(front.kernel_size) in IN_STRIPS
    return blurs and dtype == torch.bfloat16 and is_clean(front, source_dtype)


def marked_program(pass_: Pass, *, clean: bool) -> tuple[tuple[int, int, int], ...]:
    """Return the program of a pass, with the flag ``NO_NAN`` for jitters with input in [0, 1] and no NaN: faster to clamp."""
    marked = []
    for op, (code, column, flags) in zip(pass_.points, pass_.program, strict=True):
        jitter = isinstance(op, ColorJitter | ColorJiggle)
        marked.append((code, column, flags | NO_NAN if jitter and clean else flags))
        clean = clean and op.keeps_unit_range
    return tuple(marked)
