"""The kernel of ops that mix other numbers of channels than three, in front of the pointwise ops of a pass."""

import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.launch import Launch, prepared, storing
from gpuaug.fusion.backends.triton.mix import SIZES, STRIDES, TILE, unit_pixel
from gpuaug.fusion.backends.triton.pixel_math import stored_as
from gpuaug.fusion.backends.triton.points import points
from gpuaug.fusion.backends.triton.taps import buffers
from gpuaug.fusion.ops.base import FrontOp
from gpuaug.fusion.ops.channel import Grayscale
from gpuaug.fusion.program.plan import OpPass


@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=["source", "out", "rows"])
def channels_kernel(
    source, out, rows, height, width, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, SCALE: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr,
    COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr, WEIGHS: tl.constexpr, TILE: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """Make every channel of a tile: from the channel that the row names, or with ``WEIGHS`` the sum of all by its weights.

    Grid: (tiles of an image, samples).
    """
    sample = tl.program_id(1)
    row = rows + sample // FRAMES * row_stride
    if WAY >= 0:
        skipped, source, out = buffers(row + WAY, source, source_b, out, out_b, tl.num_programs(1))
        if skipped:
            return
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = place < height * width
    x = place % width
    y = place // width
    pixel = source + sample.to(tl.int64) * source_b + y * source_h + x * SOURCE_W
    applies = tl.load(row) != 0
    total = tl.zeros((TILE,), tl.float32)
    if WEIGHS and applies:
        for channel in range(CHANNELS):
            total += unit_pixel(pixel + channel * source_c, live, SCALE) * tl.load(row + 1 + channel)
    for channel in range(CHANNELS):
        plane = tl.full((), 0, tl.int32) + channel
        if WEIGHS and applies:
            value = total
        else:
            origin = plane
            if applies:
                origin = tl.load(row + 1 + plane).to(tl.int32)
            value = unit_pixel(pixel + origin * source_c, live, SCALE)
        value, _, _ = points(
            value, value, value, x, y, sample, plane, height, width, row, 0.0, PROGRAM, COUNT, CHANNELS, RGB
        )  # fmt: skip
        target = out + sample.to(tl.int64) * out_b + plane * out_c + y * out_h + x * OUT_W
        tl.store(target, stored_as(value, out.dtype.element_ty), mask=live)


def mix_channels(step: OpPass[FrontOp], source: Tensor, rows: Tensor, out: Tensor) -> None:
    """Launch a pass with a channel shuffle or a grey in front on the current stream, in one launch.

    Arguments and shapes are those of ``gpuaug.fusion.backends.triton.filters.blur.blur``.
    """
    prepared(step, source, rows, out, _mixing)((source, out, rows))


def _mixing(step: OpPass[FrontOp], source: Tensor, rows: Tensor, out: Tensor) -> Launch:
    batch, _, height, width = source.shape
    constants, _ = storing(step, source, out)
    constants |= {"RGB": False, "WEIGHS": isinstance(step.front, Grayscale), "TILE": TILE, "WAY": step.way}
    numbers = (height, width, rows.stride(0), *source.stride()[:3], *out.stride()[:3])
    return Launch(channels_kernel, (triton.cdiv(height * width, TILE), batch, 1), numbers, constants)
