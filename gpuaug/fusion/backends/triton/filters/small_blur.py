"""The Triton kernel of small blurs, along both axes at once, and its launch."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.tiles import (
    ACROSS,
    ALONG,
    LINES,
    POINTERS,
    SIZES,
    STRIDES,
    TILES,
    added,
    bordered,
    placed,
    read,
    stored,
    untouched_pixels,
)
from gpuaug.fusion.backends.triton.launch import Launch, storing
from gpuaug.fusion.backends.triton.pixel_math import falling, share
from gpuaug.fusion.backends.triton.taps import buffers
from gpuaug.fusion.ops.filters import BlurOp
from gpuaug.fusion.program.plan import OpPass

GROUP = 4
"""Neighbours along x that a thread reads with one load and blurs together, where they lie at aligned addresses.

What neighbours share is then read from the first-level cache less often. More than four take registers from other threads.
"""

GROUP_ALONG, GROUP_LINES = 4, 2
"""Lines of a tile of groups, and how many of them one load reads."""


@triton.jit
def read_groups(line, offsets, inside, BORDER: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr):
    """``read`` of (ACROSS, lines), a thread's ``GROUP`` neighbours side by side: (lines · ACROSS / GROUP, GROUP).

    ``ALIGNED``: each group begins at a multiple of its size in bytes.
    """
    line, offsets = tl.broadcast(line, offsets)
    # Flat, so that the compiler sees which pixels follow one another.
    pointer = tl.ravel(tl.trans(line)) + tl.ravel(tl.trans(offsets))
    if ALIGNED:
        pixel_bytes: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
        pointer = tl.max_contiguous(tl.multiple_of(pointer, GROUP * pixel_bytes), GROUP)
    pixels = read(pointer, tl.ravel(tl.trans(inside)), BORDER, SCALE)
    return tl.reshape(pixels, pixels.shape[0] // GROUP, GROUP)


@triton.jit
def lines_along_x(
    pointer, first, x, height, width, step, fall, part, TAPS: tl.constexpr, BORDER: tl.constexpr, SOURCE_W: tl.constexpr,
    SCALE: tl.constexpr, GROUP: tl.constexpr, INSIDE: tl.constexpr, LINES: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Lines of one plane from ``first`` on, blurred along x from the groups around each group: (ACROSS, LINES).

    ``INSIDE``: these groups lie in the image.
    """
    beside: tl.constexpr = (TAPS // 2 + GROUP - 1) // GROUP
    y = first + tl.arange(0, LINES)[None, :]
    line = pointer + bordered(y, height, BORDER) * step
    lines = tl.zeros((LINES * ACROSS // GROUP, GROUP), tl.float32)
    for group in tl.static_range(-beside, beside + 1):
        at = x + group * GROUP
        inside = (y >= 0) & (y < height)
        if not INSIDE:
            inside = inside & (at >= 0) & (at < width)
            at = bordered(at, width, BORDER)
        pixels = read_groups(line, at * SOURCE_W, inside, BORDER, SCALE, GROUP, INSIDE)
        lines = added(lines, pixels, group * GROUP + TAPS // 2, fall, part, TAPS, GROUP)
    return tl.trans(tl.reshape(lines, LINES, ACROSS))


@triton.jit
def blurred_both(
    pointer, first, x, height, width, step, sigma_y, sigma_x, TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr,
    BORDER: tl.constexpr, SOURCE_W: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, INSIDE: tl.constexpr,
    LINES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """A tile of one plane, blurred: each line along x, and then along y. ``INSIDE``: as in ``lines_along_x``."""
    fall_y, fall_x = falling(sigma_y), falling(sigma_x)
    part_y, part_x = share(fall_y, TAPS_Y), share(fall_x, TAPS_X)
    total = tl.zeros((ACROSS, ALONG), tl.float32)
    if INSIDE or GROUP == 1:
        for start in tl.static_range(0, ALONG + TAPS_Y - 1, LINES):
            lines = lines_along_x(
                pointer, first + (start - TAPS_Y // 2), x, height, width, step, fall_x, part_x,
                TAPS_X, BORDER, SOURCE_W, SCALE, GROUP, INSIDE, LINES, ACROSS,
            )  # fmt: skip
            total = added(total, lines, start, fall_y, part_y, TAPS_Y, ALONG)
    else:
        # Few tiles are at the border, and Triton takes twice as long to compile both loops if this one is unrolled, too.
        for start in range(0, ALONG + TAPS_Y - 1, LINES):
            lines = lines_along_x(
                pointer, first + (start - TAPS_Y // 2), x, height, width, step, fall_x, part_x,
                TAPS_X, BORDER, SOURCE_W, SCALE, GROUP, INSIDE, LINES, ACROSS,
            )  # fmt: skip
            total = added(total, lines, start, fall_y, part_y, TAPS_Y, ALONG)
    return total


@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=[*POINTERS])
def blur_kernel(
    source, out, rows, height, width, tiles, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, BORDER: tl.constexpr, SOURCE_W: tl.constexpr, FRAMES: tl.constexpr,
    SCALE: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr, COUNT: tl.constexpr, CHANNELS: tl.constexpr,
    RGB: tl.constexpr, GROUP: tl.constexpr, LINES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
    TILES: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """Blur along both axes at once. The tiles of a block follow one another down the image, in columns of ``tiles``.

    Grid: (blocks of an image, samples, planes; one plane where a block makes all three).
    """
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample // FRAMES * row_stride
    if WAY >= 0:
        skipped, source, out = buffers(row + WAY, source, source_b, out, out_b, tl.num_programs(1))
        if skipped:
            return
    side: tl.constexpr = ACROSS // TILES
    at = tl.arange(0, ACROSS)[:, None]
    tile = tl.program_id(0) * TILES + at // side
    first = tile % tiles * ALONG
    x = tile // tiles * side + at % side
    y = first + tl.arange(0, ALONG)[None, :]
    pointer = source + sample.to(tl.int64) * source_b + plane * source_c
    if tl.load(row) != 0:
        sigma_y = tl.load(row + 1)
        sigma_x = tl.load(row + 2)
        reach: tl.constexpr = (TAPS_X // 2 + GROUP - 1) // GROUP * GROUP
        # The pixels along x that the tiles of the block cover.
        left = tl.program_id(0) * TILES // tiles * side
        right = (tl.program_id(0) * TILES + TILES - 1) // tiles * side + side
        inside = (left >= reach) & (right + reach <= width)
        r = tl.zeros((ACROSS, ALONG), tl.float32)
        g = r
        b = r
        for channel in range(3 if RGB else 1):
            plane_pointer = pointer + channel * source_c
            if GROUP > 1 and inside:
                value = blurred_both(
                    plane_pointer, first, x, height, width, source_h, sigma_y, sigma_x,
                    TAPS_Y, TAPS_X, BORDER, SOURCE_W, SCALE, GROUP, True, LINES, ALONG, ACROSS,
                )  # fmt: skip
            else:
                value = blurred_both(
                    plane_pointer, first, x, height, width, source_h, sigma_y, sigma_x,
                    TAPS_Y, TAPS_X, BORDER, SOURCE_W, SCALE, GROUP, False, LINES, ALONG, ACROSS,
                )  # fmt: skip
            r, g, b = placed(value, channel, r, g, b, RGB)
        if SCALE:
            r, g, b = r * (1 / 255), g * (1 / 255), b * (1 / 255)
    else:
        pixel = pointer + tl.minimum(y, height - 1) * source_h + x * SOURCE_W
        r, g, b = untouched_pixels(pixel, x < width, source_c, SCALE, RGB)
    stored(
        r, g, b, x, y, sample, plane, height, width, row, out, out_b, out_c, out_h,
        OUT_W, PROGRAM, COUNT, CHANNELS, RGB, GROUP=GROUP,
    )  # fmt: skip


def small_blur(step: OpPass[BlurOp], source: Tensor, rows: Tensor, out: Tensor, own: dict[str, Any]) -> Launch:
    """The launch of a blur along both axes at once, whose ``own`` constants are its taps and its border."""
    batch, _, height, width = source.shape
    shared, planes = storing(step, source, out)
    strides = (*source.stride()[:3], *out.stride()[:3])
    # Images between passes begin at aligned addresses, users' may not. Groups of three planes would take too many registers.
    planar = source.stride(3) == out.stride(3) == 1 and not shared["RGB"]
    grouped = planar and step.first > 0 and not any(each % GROUP for each in (width, *strides))
    group, along, lines = (GROUP, GROUP_ALONG, GROUP_LINES) if grouped else (1, ALONG, LINES.value)
    tall, wide = triton.cdiv(height, along), triton.cdiv(width, ACROSS)
    warps = min(TILES, triton.next_power_of_2(triton.cdiv(tall * wide, group))) if step.way >= 0 else 1
    blocks = triton.cdiv(tall * wide, group * warps)
    constants = {"GROUP": group, "LINES": lines, "ALONG": along, "ACROSS": ACROSS * group * warps, "TILES": group * warps}
    numbers = (height, width, tall, rows.stride(0), *strides)
    return Launch(blur_kernel, (blocks, batch, planes), numbers, {**shared, **own, **constants, "WAY": step.way}, warps=warps)
