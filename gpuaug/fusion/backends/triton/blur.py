"""The Triton kernels of blurs, along one axis or both at once, and their launches. Tiles: ``filter_tiles.py``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filter_tiles import (
    BORDERS,
    POINTERS,
    SIZES,
    STRIDES,
    bordered,
    placed,
    read,
    stored,
    storing_launch,
    tile_of,
    tiles_of,
    untouched_pixels,
)
from gpuaug.fusion.backends.triton.launch import Launch, prepared, reading
from gpuaug.fusion.backends.triton.pixel_math import stored_as
from gpuaug.fusion.backends.triton.taps import buffers
from gpuaug.fusion.intermediates import KEPT, is_clean
from gpuaug.fusion.ops.filters import BlurOp
from gpuaug.fusion.plan import OpPass

LINES = tl.constexpr(8)
"""Lines that one load reads: what Triton takes to compile grows with loads times the square of what depends on them."""


@triton.jit
def falling(sigma):
    """The factor of a squared distance in the exponent of a Gaussian: -1 / (2 sigma²)."""
    # A square too small for a float has all its weight in the middle.
    return -tl.div_rn(tl.full((), 1.0, tl.float32), tl.maximum(2 * sigma * sigma, 1.2e-38))


@triton.jit
def share(fall, TAPS: tl.constexpr):
    """The factor that makes the weights of all taps sum to 1."""
    total = fall * 0
    for tap in tl.static_range(TAPS):
        total += tl.exp((tap - TAPS // 2) * (tap - TAPS // 2) * fall)
    return tl.div_rn(tl.full((), 1.0, tl.float32), total)


@triton.jit
def read_lines(pointer, inside, BORDER: tl.constexpr, SCALE: tl.constexpr):
    """``read`` of (ACROSS, LINES), each thread the pixels of all lines."""
    # Flat: of two axes that it sees no order of, Triton 3.6 spreads a warp along the first one, and 3.7 along the last.
    pixels = read(tl.ravel(tl.trans(pointer)), tl.ravel(tl.trans(inside)), BORDER, SCALE)
    return tl.trans(tl.reshape(pixels, pointer.shape[1], pointer.shape[0]))


@triton.jit
def added(total, lines, start, fall, part, TAPS: tl.constexpr, ALONG: tl.constexpr):
    """Outputs with each line added to those that it reaches, and to no others: 0 · NaN would be NaN.

    ``lines``: ``LINES`` of them from the one at ``start`` on, (ACROSS, LINES).
    """
    bits = lines.to(tl.int32, bitcast=True)
    for number in tl.static_range(LINES):
        # One of the lines in a thread's registers: a sum of its bits and zeros, for no instruction.
        line = tl.sum(tl.where(tl.arange(0, LINES)[None, :] == number, bits, 0), axis=1, keep_dims=True)
        tap = start + number - tl.arange(0, ALONG)[None, :]
        distance = (tap - TAPS // 2).to(tl.float32)
        weight = tl.exp(distance * distance * fall) * part
        reached = total + weight * line.to(tl.float32, bitcast=True)
        total = tl.where((tap >= 0) & (tap < TAPS), reached, total)
    return total


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


@triton.jit
def blurred_both(
    pointer, first, x, height, width, step, sigma_y, sigma_x, TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr,
    BORDER: tl.constexpr, SOURCE_W: tl.constexpr, SCALE: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """A tile of one plane, blurred: lines along x by shifted reads, which the first-level cache serves, then along y."""
    fall_y, fall_x = falling(sigma_y), falling(sigma_x)
    part_y, part_x = share(fall_y, TAPS_Y), share(fall_x, TAPS_X)
    total = tl.zeros((ACROSS, ALONG), tl.float32)
    for start in tl.static_range(0, ALONG + TAPS_Y - 1, LINES):
        index = first + (start - TAPS_Y // 2) + tl.arange(0, LINES)[None, :]
        inside = (index >= 0) & (index < height)
        before = pointer + bordered(index, height, BORDER) * step
        lines = tl.zeros((ACROSS, LINES), tl.float32)
        for tap in tl.static_range(TAPS_X):
            at = x + (tap - TAPS_X // 2)
            pixel = before + bordered(at, width, BORDER) * SOURCE_W
            weight = tl.exp((tap - TAPS_X // 2) * (tap - TAPS_X // 2) * fall_x) * part_x
            lines += weight * read_lines(pixel, inside & (at >= 0) & (at < width), BORDER, SCALE)
        total = added(total, lines, start, fall_y, part_y, TAPS_Y, ALONG)
    return total


@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=[*POINTERS])
def blur_columns_kernel(
    source, made, rows, height, width, tiles, row_stride, source_b, source_c, source_h,
    TAPS: tl.constexpr, BORDER: tl.constexpr, SOURCE_W: tl.constexpr, SCALE: tl.constexpr,
    CHANNELS: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, TILES: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """Blur along y, into planes of W x H: what is blurred next is then again the axis that is not contiguous.

    Grid: (tiles of an image, samples, channels).
    """
    sample = tl.program_id(1)
    row = rows + sample * row_stride
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
    TAPS: tl.constexpr, BORDER: tl.constexpr, SOURCE_W: tl.constexpr, SCALE: tl.constexpr,
    OUT_W: tl.constexpr, PROGRAM: tl.constexpr, COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr,
    ALONG: tl.constexpr, ACROSS: tl.constexpr, TILES: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """Blur what ``blur_columns_kernel`` made along x; of a sample that is skipped, read the source.

    Grid: (tiles of an image, samples, planes; one plane where a block makes all three).
    """
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample * row_stride
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
        r, g, b = untouched_pixels(pixel, x < width, source_c, SCALE, RGB)
    # A warp stores along x, also where the three channels of a pixel lie between.
    x, y, r, g, b = tl.trans(x), tl.trans(y), tl.trans(r), tl.trans(g), tl.trans(b)
    stored(r, g, b, x, y, sample, plane, height, width, row, out, out_b, out_c, out_h, OUT_W, PROGRAM, COUNT, CHANNELS, RGB)


@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=[*POINTERS])
def blur_kernel(
    source, out, rows, height, width, tiles, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, BORDER: tl.constexpr, SOURCE_W: tl.constexpr,
    SCALE: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr, COUNT: tl.constexpr, CHANNELS: tl.constexpr,
    RGB: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, TILES: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """Blur along both axes at once.

    Grid: (tiles of an image, samples, planes; one plane where a block makes all three).
    """
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample * row_stride
    if WAY >= 0:
        skipped, source, out = buffers(row + WAY, source, source_b, out, out_b, tl.num_programs(1))
        if skipped:
            return
    first, y, x = tile_of(tiles, ALONG, ACROSS, TILES)
    pointer = source + sample.to(tl.int64) * source_b + plane * source_c
    if tl.load(row) != 0:
        sigma_y = tl.load(row + 1)
        sigma_x = tl.load(row + 2)
        r = tl.zeros((ACROSS, ALONG), tl.float32)
        g = r
        b = r
        for channel in range(3 if RGB else 1):
            value = blurred_both(
                pointer + channel * source_c, first, x, height, width, source_h, sigma_y, sigma_x,
                TAPS_Y, TAPS_X, BORDER, SOURCE_W, SCALE, ALONG, ACROSS,
            )  # fmt: skip
            r, g, b = placed(value, channel, r, g, b, RGB)
        if SCALE:
            r, g, b = r * (1 / 255), g * (1 / 255), b * (1 / 255)
    else:
        pixel = pointer + tl.minimum(y, height - 1) * source_h + x * SOURCE_W
        r, g, b = untouched_pixels(pixel, x < width, source_c, SCALE, RGB)
    stored(r, g, b, x, y, sample, plane, height, width, row, out, out_b, out_c, out_h, OUT_W, PROGRAM, COUNT, CHANNELS, RGB)


def blur(step: OpPass[BlurOp], source: Tensor, rows: Tensor, out: Tensor) -> int:
    """Launch a pass with a blur in front on the current stream.

    Args:
        step: The pass.
        source: uint8 or floating, any strides.
        rows: The parameter table.
        out: Floating, any strides.

    Shape:
        - source, out: (B, C, H, W)
        - rows: (B, K), float32

    Returns:
        The number of launches.

    Cost:
        With two launches, a copy of the images between them: float32, or 16 bits a value as between passes.
    """
    if step.front.launches == 1:
        prepared(step, source, rows, out, _blurring)((source, out, rows))
        return 1
    batch, channels, height, width = source.shape
    columns, last = prepared(step, source, rows, out, _blurring_twice)
    kept = is_clean(step.front, source.dtype) and out.dtype.itemsize == 2
    made = torch.empty((batch, channels, width, height), dtype=KEPT if kept else torch.float32, device=source.device)
    columns((source, made, rows))
    last((source, made, out, rows))
    return 2


def _blurring(step: OpPass[BlurOp], source: Tensor, rows: Tensor, out: Tensor) -> Launch:
    op = step.front
    down, across = op.kernel_size
    constants = {"TAPS_Y": down, "TAPS_X": across, "BORDER": BORDERS[op.border]}
    return storing_launch(blur_kernel, step, source, rows, out, constants)


def _blurring_twice(step: OpPass[BlurOp], source: Tensor, rows: Tensor, out: Tensor) -> tuple[Launch, Launch]:
    op = step.front
    batch, channels, height, width = source.shape
    down, across = op.kernel_size
    border = BORDERS[op.border]
    wide, blocks, tile = tiles_of(step, height, width)
    columns = Launch(
        blur_columns_kernel,
        (blocks, batch, channels),
        (height, width, wide, rows.stride(0), *source.stride()[:3]),
        {**reading(step, source), "WAY": step.way, **tile, "BORDER": border, "TAPS": down},
        warps=tile["TILES"],
    )
    constants = {"TAPS": across, "BORDER": border}
    return columns, storing_launch(blur_rows_kernel, step, source, rows, out, constants, along_x=True)
