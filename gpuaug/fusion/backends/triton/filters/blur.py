"""The Triton kernels of large blurs, and ``blur``, which launches those of every size. Tiles: ``tiles.py``."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.small_blur import small_blur
from gpuaug.fusion.backends.triton.filters.tiles import (
    BORDERS,
    LINES,
    POINTERS,
    SIZES,
    STRIDES,
    added,
    bordered,
    placed,
    read_aligned,
    read_lines,
    stored,
    storing_launch,
    tile_of,
    tiles_of,
    untouched_pixels,
)
from gpuaug.fusion.backends.triton.launch import Launch, prepared, reading, storing
from gpuaug.fusion.backends.triton.pixel_math import centred, falling, gaussian, share, stored_as
from gpuaug.fusion.backends.triton.taps import buffers
from gpuaug.fusion.ops.filters import BlurOp
from gpuaug.fusion.program.intermediates import KEPT, in_strips, is_clean, may_round
from gpuaug.fusion.program.plan import OpPass

STRIP, REACH = 32, 16
"""Height of a strip, and the number of lines read above it and below it, all in pixels."""


@triton.jit
def blurred_along(
    pointer, first, size, step, across, sigma,
    TAPS: tl.constexpr, BORDER: tl.constexpr, SCALE: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """A tile of one plane, blurred along its last axis.

    ``first`` is the index of its first output on that axis, which has ``size`` pixels ``step`` apart; ``across`` holds the
    offsets of its pixels on the other axis, (ACROSS, 1).
    """
    fall = falling(sigma)
    part = share(fall, TAPS)
    total = tl.zeros((ACROSS, ALONG), tl.float32)
    for start in tl.static_range(0, ALONG + TAPS - 1, LINES):
        index = first + (start - TAPS // 2) + tl.arange(0, LINES)[None, :]
        inside = (index >= 0) & (index < size) & (across >= 0)
        lines = read_lines(pointer + bordered(index, size, BORDER) * step + across, inside, BORDER, SCALE)
        total = added(total, lines, start, fall, part, TAPS, ALONG)
    return total


@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=[*POINTERS])
def blur_columns_kernel(
    source, made, rows, height, width, tiles, row_stride, source_b, source_c, source_h,
    TAPS: tl.constexpr, BORDER: tl.constexpr, SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, SCALE: tl.constexpr,
    CHANNELS: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, TILES: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """Blur along y, into planes of W x H: what is blurred next is then again the axis that is not contiguous.

    Grid: (tiles of an image, samples, channels).
    """
    sample = tl.program_id(1)
    row = rows + sample // FRAMES * row_stride
    if WAY >= 0:
        skipped, source, _ = buffers(row + WAY, source, source_b, made, 0, tl.num_programs(1))
        if skipped:
            return
    if tl.load(row) != 0:
        plane = tl.program_id(2)
        first, y, x = tile_of(tiles, ALONG, ACROSS, TILES)
        pointer = source + sample.to(tl.int64) * source_b + plane * source_c
        across = tl.minimum(x, width - 1) * SOURCE_W
        value = blurred_along(
            pointer, first, height, source_h, across, tl.load(row + 1), TAPS, BORDER, SCALE, ALONG, ACROSS
        )  # fmt: skip
        if SCALE and made.dtype.element_ty == tl.uint16:
            value *= 1 / 255
        start = made + (sample.to(tl.int64) * CHANNELS + plane) * height * width
        tl.store(start + x * height + y, stored_as(value, made.dtype.element_ty), mask=(x < width) & (y < height))


@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=[*POINTERS])
def blur_rows_kernel(
    source, made, out, rows, height, width, tiles, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    TAPS: tl.constexpr, BORDER: tl.constexpr, SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, SCALE: tl.constexpr,
    OUT_W: tl.constexpr, PROGRAM: tl.constexpr, COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr,
    ALONG: tl.constexpr, ACROSS: tl.constexpr, TILES: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """Blur what ``blur_columns_kernel`` made along x; of a sample that is skipped, read the source.

    Grid: (tiles of an image, samples, planes; one plane where a block makes all three).
    """
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample // FRAMES * row_stride
    if WAY >= 0:
        skipped, source, out = buffers(row + WAY, source, source_b, out, out_b, tl.num_programs(1))
        if skipped:
            return
    first, x, y = tile_of(tiles, ALONG, ACROSS, TILES)
    across = tl.minimum(y, height - 1)
    if tl.load(row) != 0:
        sigma = tl.load(row + 2)
        start = made + (sample.to(tl.int64) * CHANNELS + plane) * height * width
        r = tl.zeros((ACROSS, ALONG), tl.float32)
        g = r
        b = r
        for channel in range(3 if RGB else 1):
            at = start + channel * height * width
            value = blurred_along(at, first, width, height, across, sigma, TAPS, BORDER, False, ALONG, ACROSS)
            r, g, b = placed(value, channel, r, g, b, RGB)
        if SCALE and made.dtype.element_ty == tl.float32:
            r, g, b = r * (1 / 255), g * (1 / 255), b * (1 / 255)
    else:
        pixel = source + sample.to(tl.int64) * source_b + plane * source_c
        pixel += across * source_h + x * SOURCE_W
        r, g, b = untouched_pixels(pixel, x < width, source_c, SCALE, RGB, X_LAST=True)
    # A warp stores along x, also where the three channels of a pixel lie between.
    x, y, r, g, b = tl.trans(x), tl.trans(y), tl.trans(r), tl.trans(g), tl.trans(b)
    stored(r, g, b, x, y, sample, plane, height, width, row, out, out_b, out_c, out_h, OUT_W, PROGRAM, COUNT, CHANNELS, RGB)


@triton.jit
def blurred_down(bits, down):
    """Columns of a strip, (columns, lines), blurred along y: (lines, columns), float16 in [-1, 1)."""
    return tl.dot(down, tl.trans(centred(bits))).to(tl.float16)


@triton.jit(
    do_not_specialize=["height", "width", "row_stride", *STRIDES], do_not_specialize_on_alignment=["source", "out", "rows"]
)
def blur_strips_kernel(
    source, out, rows, height, width, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, BORDER: tl.constexpr, SOURCE_W: tl.constexpr, FRAMES: tl.constexpr,
    SCALE: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr, COUNT: tl.constexpr, CHANNELS: tl.constexpr,
    RGB: tl.constexpr, WORDS: tl.constexpr, STRIP: tl.constexpr, REACH: tl.constexpr, ALIGNED: tl.constexpr,
    WAY: tl.constexpr,
):  # fmt: skip
    """Blur clean images along both axes, by products of float16 matrices with the weights of all distances.

    A block goes along a strip by ``REACH`` columns: it blurs these along y, with the lines above and below the strip, and then
    the columns before them along x, which takes both neighbours. ``ALIGNED``: lines begin and end at aligned addresses.

    Grid: (strips of an image, samples, planes; one plane where a block makes all three).
    """
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample // FRAMES * row_stride
    if WAY >= 0:
        skipped, source, out = buffers(row + WAY, source, source_b, out, out_b, tl.num_programs(1))
        if skipped:
            return
    pointer = source + sample.to(tl.int64) * source_b + plane * source_c
    top = tl.program_id(0) * STRIP
    y = top + tl.arange(0, STRIP)[:, None]
    at = tl.arange(0, REACH)
    if tl.load(row) != 0:
        fall_y, fall_x = falling(tl.load(row + 1)), falling(tl.load(row + 2))
        part_y, part_x = share(fall_y, TAPS_Y), share(fall_x, TAPS_X)
        lines = top - REACH + tl.arange(0, STRIP + 2 * REACH)[None, :]
        down = gaussian(lines - y, fall_y, part_y, TAPS_Y)
        left = gaussian(at[:, None] - at[None, :] - REACH, fall_x, part_x, TAPS_X)
        centre = gaussian(at[:, None] - at[None, :], fall_x, part_x, TAPS_X)
        right = gaussian(at[:, None] - at[None, :] + REACH, fall_x, part_x, TAPS_X)
        inside = (lines >= 0) & (lines < height) | (BORDER > 0)
        lines = bordered(lines, height, BORDER) * source_h
        second = pointer + (source_c if RGB else 0)
        third = second + (source_c if RGB else 0)
        scale: tl.constexpr = 0.5 + 0.5 / (2**source.dtype.element_ty.primitive_bitwidth - 1)
        # Three separate tensors: with one for all, the compiler does not see that they change places.
        last_r = tl.zeros((STRIP, REACH), tl.float16)
        this_r = tl.zeros((STRIP, REACH), tl.float16)
        next_r = tl.zeros((STRIP, REACH), tl.float16)
        last_g, this_g, next_g = last_r, this_r, next_r
        last_b, this_b, next_b = last_r, this_r, next_r
        for first in range(-3 * REACH, width, REACH):
            # The next columns are read before finished ones are stored, so that the reads overlap the arithmetic.
            x = first + 2 * REACH + at[:, None]
            within = (first >= -2 * REACH) & (first + 3 * REACH <= width)
            if ALIGNED:
                here = inside & (x == x) & within
                r = read_aligned(pointer, lines + x, here, REACH)
                g = read_aligned(second, lines + x, here, REACH)
                b = read_aligned(third, lines + x, here, REACH)
            if first >= 0:
                red = tl.dot(next_r, right, tl.dot(this_r, centre, tl.dot(last_r, left))) * scale + scale
                green = tl.dot(next_g, right, tl.dot(this_g, centre, tl.dot(last_g, left))) * scale + scale if RGB else red
                blue = tl.dot(next_b, right, tl.dot(this_b, centre, tl.dot(last_b, left))) * scale + scale if RGB else red
                stored(
                    red, green, blue, first + at[None, :], y, sample, plane, height, width, row, out, out_b, out_c, out_h,
                    OUT_W, PROGRAM, COUNT, CHANNELS, RGB, first, WORDS, X_LAST=True,
                )  # fmt: skip
            last_r, last_g, last_b = this_r, this_g, this_b
            this_r, this_g, this_b = next_r, next_g, next_b
            if ALIGNED and within:
                next_r = blurred_down(r, down)
                next_g = blurred_down(g, down) if RGB else next_r
                next_b = blurred_down(b, down) if RGB else next_r
            else:
                offsets = lines + bordered(x, width, BORDER) * SOURCE_W
                here = inside & (((x >= 0) & (x < width)) | (BORDER > 0))
                next_r = blurred_down(tl.load(pointer + offsets, mask=here, other=0), down)
                next_g = blurred_down(tl.load(second + offsets, mask=here, other=0), down) if RGB else next_r
                next_b = blurred_down(tl.load(third + offsets, mask=here, other=0), down) if RGB else next_r
    else:
        for first in range(0, width, REACH):
            x = first + at[None, :]
            pixel = pointer + tl.minimum(y, height - 1) * source_h + x * SOURCE_W
            if ALIGNED:
                pixel = tl.max_contiguous(tl.multiple_of(pixel, (1, REACH)), (1, REACH))
                source_c = source_c // REACH * REACH
            r, g, b = untouched_pixels(pixel, (x < width) | ALIGNED, source_c, SCALE, RGB, X_LAST=True)
            stored(
                r, g, b, x, y, sample, plane, height, width, row, out, out_b, out_c, out_h,
                OUT_W, PROGRAM, COUNT, CHANNELS, RGB, first, WORDS, X_LAST=True,
            )  # fmt: skip


def blur(step: OpPass[BlurOp], source: Tensor, rows: Tensor, out: Tensor) -> int:
    """Launch a pass with a blur in front on the current stream.

    Args:
        step: The pass.
        source: Of a type in ``PIXELS`` or ``KEPT``, any strides.
        rows: The parameter table.
        out: Of such a type, any strides.

    Shape:
        - source, out: (B, C, H, W)
        - rows: (B, K), float32

    Returns:
        The number of launches.

    Cost:
        With two launches, a copy of the images between them: float32, or 16 bits a value as between passes.
    """
    found = prepared(step, source, rows, out, _blurring)
    if isinstance(found, Launch):
        found((source, out, rows))
        return 1
    columns, last, dtype = found
    batch, channels, height, width = source.shape
    made = torch.empty((batch, channels, width, height), dtype=dtype, device=source.device)
    columns((source, made, rows))
    last((source, made, out, rows))
    return 2


def _blurring(step: OpPass[BlurOp], source: Tensor, rows: Tensor, out: Tensor) -> Launch | tuple[Launch, Launch, torch.dtype]:
    """The launch of a blur; or two, and the type of the images between them."""
    (down, across) = step.front.kernel_size
    border = BORDERS[step.front.border]
    constants = {"TAPS_Y": down, "TAPS_X": across, "BORDER": border}
    if in_strips(step.front, source.dtype, out.dtype):
        return _in_strips(step, source, rows, out, constants)
    if step.front.launches == 1:
        return small_blur(step, source, rows, out, constants)
    batch, channels, height, width = source.shape
    wide, blocks, tile = tiles_of(step, height, width)
    columns = Launch(
        blur_columns_kernel,
        (blocks, batch, channels),
        (height, width, wide, rows.stride(0), *source.stride()[:3]),
        {**reading(step, source), "WAY": step.way, **tile, "BORDER": border, "TAPS": down},
        warps=tile["TILES"],
    )
    last = storing_launch(blur_rows_kernel, step, source, rows, out, {"TAPS": across, "BORDER": border}, along_x=True)
    rounds = is_clean(step.front, source.dtype) and may_round(step, source.dtype, out.dtype)
    return columns, last, KEPT if rounds else torch.float32


def _in_strips(step: OpPass[BlurOp], source: Tensor, rows: Tensor, out: Tensor, own: dict[str, Any]) -> Launch:
    batch, _, height, width = source.shape
    constants, planes = storing(step, source, out)
    constants |= {**own, "STRIP": STRIP, "REACH": REACH, "WAY": step.way}
    # Images between passes begin where memory is aligned, and users' may not.
    aligned = step.first > 0 and source.dtype == KEPT
    constants["ALIGNED"] = aligned and not any(each % REACH for each in (*source.stride()[:3], width))
    constants["WORDS"] = constants["RGB"] and out.stride(1) == 1 and width % 2 == 0
    numbers = (height, width, rows.stride(0), *source.stride()[:3], *out.stride()[:3])
    return Launch(blur_strips_kernel, (triton.cdiv(height, STRIP), batch, planes), numbers, constants, warps=2, registers=160)
