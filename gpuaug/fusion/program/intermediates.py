"""Types of the images between passes: float32, 16 bits per value, or bytes.

A *pass* is one reading and writing of all images. It begins with its *front*, a gather, filter or mix, and goes on with
pointwise ops. 16 bits per value are enough between passes if the last pass writes float16 or bfloat16, and all values are
certain to lie in [0, 1]. Bytes are enough where the user's library, such as torchvision, stores the images as uint8 between the
same ops (``Op.to_bytes``).

Some passes take two kernel launches: a blur may take one per axis, and an op that needs the mean grey of an image takes one for
the mean. The first launch may store intermediate images, too.
"""

import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from gpuaug.fusion.ops.base import FrontOp
from gpuaug.fusion.ops.color_jitter import NO_NAN, ColorJiggle, ColorJitter
from gpuaug.fusion.ops.filters import BlurOp
from gpuaug.fusion.ops.geometry import WarpOp
from gpuaug.fusion.program.gather import Gather
from gpuaug.fusion.program.plan import Pass, PointProgram

STRIP_KERNEL_SIZES = range(5, 34)
"""Larger side, in pixels, of blur kernels with which one launch can blur, strip by strip (``blur_strips_kernel``).

At most 33, because the launch reads 16 lines above and 16 lines below a strip.
"""

UINT16_UNIT = torch.uint16
"""Type of intermediate images with 16 bits per value, in units of 1/65535."""


def types_written(passes: Sequence[Pass], source_dtype: torch.dtype, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the type of the images that each pass writes.

    Args:
        passes: All passes that run one after another, at least one.
        source_dtype: Type of the images that the first pass reads.
        dtype: Type of the images that the last pass writes.
    """
    dtypes: list[torch.dtype] = []
    for (pass_, next_pass), are_bytes in zip(pairwise(passes), bytes_between(passes, source_dtype), strict=True):
        dtype_read = dtypes[-1] if dtypes else source_dtype
        in_unit_range = gives_unit_range(pass_.front, dtype_read) and all(op.keeps_unit_range for op in pass_.point_ops)
        # Fronts with the kernel "levels", such as equalization, count the pixels of each of 256 levels. Rounding to 16 bits
        # moves some values to the next level, and equalization may move neighbouring levels far apart.
        counts_levels = isinstance(next_pass.front, FrontOp) and next_pass.front.kernel == "levels"
        fits_16_bits = in_unit_range and not counts_levels and dtype.is_floating_point and dtype.itemsize == 2
        dtypes.append(torch.uint8 if are_bytes else UINT16_UNIT if fits_16_bits else torch.float32)
    # If samples can skip passes, all passes share two buffers, and a sample that skips a pass stays in its buffer. The column
    # ``route_column`` says from which buffer a sample is read. Both have the largest type that the passes before the last
    # write.
    if passes[-1].route_column >= 0:
        dtypes = [max(dtypes, key=lambda written: written.itemsize)] * len(dtypes)
    return (*dtypes, dtype)


def bytes_between(passes: Sequence[Pass], source_dtype: torch.dtype) -> list[bool]:
    """Return, for each pass but the last, whether its images can be stored as bytes.

    They can if, in the user's library, all ops of the pass and of the passes before return uint8 images. ``source_dtype``:
    type of the images that the first pass reads.
    """
    in_bytes = (source_dtype == torch.uint8 and all(op.to_bytes is not None for op in pass_.ops) for pass_ in passes[:-1])
    return list(accumulate(in_bytes, operator.and_))


def gives_unit_range(front: Gather | FrontOp, source_dtype: torch.dtype) -> bool:
    """Return whether the output of the front of a pass is certain to lie in [0, 1], for images of ``source_dtype``.

    Unsigned integers are read as values in [0, 1]. For floats and signed integers, which may be outside, the result is False.
    """
    if source_dtype.is_floating_point or source_dtype.is_signed:
        return False
    if not isinstance(front, Gather):
        return front.keeps_unit_range
    fills = (*np.atleast_1d(front.warp.fill), 0.0) if isinstance(front.warp, WarpOp) else (0.0,)
    fills_in_range = bool(min(fills) >= 0 and max(fills) <= 1)  # bool(), because Triton accepts no NumPy bool
    overshoots = front.filter == "cubic" and not front.clamps
    # The fill of constant padding, unlike the fill of a warp, is not examined. It may lie outside of [0, 1].
    return fills_in_range and not overshoots and "constant" not in (front.before.edge, front.after.edge)


def may_store_16_bits(pass_: Pass, source_dtype: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether a pass with two launches may store values in [0, 1] between the launches in 16 bits per value.

    ``source_dtype``, ``dtype``: types of the images that the pass reads and writes. True if the pass writes 16 bits per value.
    Exception: a first pass that reads and writes images of 16-bit integers must round only once. Later passes read images that
    are rounded already.
    """
    # The first pass is the one with ``first_column`` 0.
    return dtype.itemsize == 2 and not (pass_.first_column == 0 and source_dtype == dtype == UINT16_UNIT)


def blurs_in_strips(front: Gather | FrontOp, source_dtype: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether a pass computes its blur strip by strip in one launch, by products of float16 matrices."""
    # float16 is precise enough: it has 11 bits of precision, three more than the output in bfloat16.
    is_supported = isinstance(front, BlurOp) and max(front.kernel_size) in STRIP_KERNEL_SIZES
    return is_supported and dtype == torch.bfloat16 and gives_unit_range(front, source_dtype)


def point_program_with_flags(pass_: Pass, *, in_unit_range: bool) -> PointProgram:
    """Return the ``point_program`` of a pass, with the flag ``NO_NAN``, for faster clamps, for jitters whose input has no NaN.

    ``in_unit_range``: whether the input of the first pointwise op is certain to lie in [0, 1], and so has no NaN.
    """
    # The program begins with the conversion of the front's result to bytes, if there is one (``PointProgram``).
    conversions = len(pass_.point_program) - len(pass_.point_ops)
    program = [*pass_.point_program[:conversions]]
    for op, (code, column, flags, scale, offset) in zip(pass_.point_ops, pass_.point_program[conversions:], strict=True):
        is_jitter = isinstance(op, ColorJitter | ColorJiggle)
        program.append((code, column, flags | NO_NAN if is_jitter and in_unit_range else flags, scale, offset))
        in_unit_range = in_unit_range and op.keeps_unit_range
    return tuple(program)
