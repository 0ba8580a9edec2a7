"""The kernel of a pass with a mix in front: each pixel and its partner's, then the pointwise ops of the pass."""

import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.launch import Launch, prepared, storing
from gpuaug.fusion.backends.triton.pixel_math import as_float, byte_share
from gpuaug.fusion.backends.triton.points import points
from gpuaug.fusion.ops.mix import MixOp
from gpuaug.fusion.plan import OpPass

TILE = 1024
"""Pixels of a block, which lie one after another."""

SIZES = ("height", "width", "row_stride")
STRIDES = ("source_b", "source_c", "source_h", "out_b", "out_c", "out_h")


@triton.jit
def unit_pixel(pointer, live, SCALE: tl.constexpr):
    """A pixel in [0, 1], as torch divides bytes, bit for bit."""
    value = as_float(tl.load(pointer, mask=live, other=0), SCALE)
    return byte_share(value) if SCALE else value


@triton.jit
def mixed(own, pointer, live, inside, weight, SCALE: tl.constexpr):
    """One channel of a pixel, and of its partner's at ``pointer``: the partner's inside, elsewhere a mean."""
    partner = unit_pixel(pointer, tl.where(weight != 0, live, inside), SCALE)
    # A weight of nothing leaves every bit.
    return tl.where(inside, partner, tl.where(weight != 0, own * (1 - weight) + partner * weight, own))


@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=["source", "out", "rows"])
def mix_kernel(
    source, out, rows, height, width, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    SOURCE_W: tl.constexpr, SCALE: tl.constexpr, OUT_W: tl.constexpr,
    PROGRAM: tl.constexpr, COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Mix each image with its partner.

    Grid: (tiles of an image, samples, planes; one plane where a block makes all three).
    """
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample * row_stride
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = place < height * width
    x = place % width
    y = place // width
    first = source + plane * source_c + y * source_h + x * SOURCE_W
    pixel = first + sample.to(tl.int64) * source_b
    r = unit_pixel(pixel, live, SCALE)
    g = unit_pixel(pixel + source_c, live, SCALE) if RGB else r
    b = unit_pixel(pixel + 2 * source_c, live, SCALE) if RGB else r
    if tl.load(row) != 0:
        other = first + tl.load(row + 1).to(tl.int64) * source_b
        weight = tl.load(row + 3)
        inside = live & (x >= tl.load(row + 4)) & (x < tl.load(row + 6)) & (y >= tl.load(row + 5)) & (y < tl.load(row + 7))
        r = mixed(r, other, live, inside, weight, SCALE)
        if RGB:
            g = mixed(g, other + source_c, live, inside, weight, SCALE)
            b = mixed(b, other + 2 * source_c, live, inside, weight, SCALE)
    r, g, b = points(r, g, b, x, y, sample, plane, height, width, row, 0.0, PROGRAM, COUNT, CHANNELS, RGB)
    target = out + sample.to(tl.int64) * out_b + plane * out_c + y * out_h + x * OUT_W
    tl.store(target, r.to(out.dtype.element_ty), mask=live)
    if RGB:
        tl.store(target + out_c, g.to(out.dtype.element_ty), mask=live)
        tl.store(target + 2 * out_c, b.to(out.dtype.element_ty), mask=live)


def mix(step: OpPass[MixOp], source: Tensor, rows: Tensor, out: Tensor) -> None:
    """Launch a pass with a mix in front on the current stream, in one launch.

    Arguments and shapes are those of ``gpuaug.fusion.backends.triton.blur.blur``.
    """
    prepared(step, source, rows, out, _mixing)((source, out, rows))


def _mixing(step: OpPass[MixOp], source: Tensor, rows: Tensor, out: Tensor) -> Launch:
    batch, _, height, width = source.shape
    constants, planes = storing(step, source, out)
    numbers = (height, width, rows.stride(0), *source.stride()[:3], *out.stride()[:3])
    return Launch(mix_kernel, (triton.cdiv(height * width, TILE), batch, planes), numbers, {**constants, "TILE": TILE})
