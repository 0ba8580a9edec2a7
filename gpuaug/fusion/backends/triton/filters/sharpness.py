"""The Triton kernel of sharpness, and its launch. Tiles: ``tiles.py``."""

import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.tiles import (
    POINTERS,
    SIZES,
    STRIDES,
    bordered,
    placed,
    read,
    stored,
    storing_launch,
    tile_of,
    untouched_pixels,
)
from gpuaug.fusion.backends.triton.launch import Launch, prepared
from gpuaug.fusion.backends.triton.pixel_math import byte_share, unit
from gpuaug.fusion.backends.triton.taps import buffers
from gpuaug.fusion.ops.filters import SharpnessOp
from gpuaug.fusion.program.plan import OpPass


@triton.jit
def sharpened(
    pointer, first, x, height, width, step, factor,
    SOURCE_W: tl.constexpr, SCALE: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """A tile of one plane: clamped, smoothed inside the border, mixed."""
    place = tl.arange(0, ALONG)[None, :]
    total = tl.zeros((ACROSS, ALONG), tl.float32)
    centre = tl.zeros((ACROSS, ALONG), tl.float32)
    for position in tl.static_range(ALONG + 2):
        start = pointer + bordered(first + (position - 1), height, 2) * step
        left = read(start + bordered(x - 1, width, 2) * SOURCE_W, True, 2, SCALE)
        middle = read(start + bordered(x, width, 2) * SOURCE_W, True, 2, SCALE)
        right = read(start + bordered(x + 1, width, 2) * SOURCE_W, True, 2, SCALE)
        if not SCALE:
            left, middle, right = unit(left), unit(middle), unit(right)
        tap = position - place
        total = tl.where((tap >= 0) & (tap < 3), total + (left + middle + right), total)
        centre = tl.where(tap == 1, middle, centre)
    smooth = (total + 4 * centre) * (1 / (13 * 255) if SCALE else 1 / 13)
    if SCALE:
        centre = byte_share(centre)
    y = first + place
    within = (y > 0) & (y < height - 1) & (x > 0) & (x < width - 1)
    smooth = tl.where(within, unit(smooth), centre)
    return unit(smooth + (centre - smooth) * factor)


@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=[*POINTERS])
def sharpness_kernel(
    source, out, rows, height, width, tiles, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, SCALE: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr,
    COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
    TILES: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """Sharpen.

    Grid: (tiles of an image, samples, planes; one plane where a block makes all three).
    """
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample // FRAMES * row_stride
    if WAY >= 0:
        skipped, source, out = buffers(row + WAY, source, source_b, out, out_b, tl.num_programs(1))
        if skipped:
            return
    first, y, x = tile_of(tiles, ALONG, ACROSS, TILES)
    pointer = source + sample.to(tl.int64) * source_b + plane * source_c
    if tl.load(row) != 0:
        factor = tl.load(row + 1)
        r = tl.zeros((ACROSS, ALONG), tl.float32)
        g = r
        b = r
        for channel in range(3 if RGB else 1):
            at = pointer + channel * source_c
            value = sharpened(at, first, x, height, width, source_h, factor, SOURCE_W, SCALE, ALONG, ACROSS)
            r, g, b = placed(value, channel, r, g, b, RGB)
    else:
        pixel = pointer + tl.minimum(y, height - 1) * source_h + x * SOURCE_W
        r, g, b = untouched_pixels(pixel, x < width, source_c, SCALE, RGB)
    stored(r, g, b, x, y, sample, plane, height, width, row, out, out_b, out_c, out_h, OUT_W, PROGRAM, COUNT, CHANNELS, RGB)


def sharpen(step: OpPass[SharpnessOp], source: Tensor, rows: Tensor, out: Tensor) -> int:
    """Launch a pass with a sharpness in front on the current stream, in one launch.

    Arguments, shapes and the number returned are those of ``gpuaug.fusion.backends.triton.filters.blur.blur``.
    """
    prepared(step, source, rows, out, _sharpening)((source, out, rows))
    return 1


def _sharpening(step: OpPass[SharpnessOp], source: Tensor, rows: Tensor, out: Tensor) -> Launch:
    return storing_launch(sharpness_kernel, step, source, rows, out, {})
