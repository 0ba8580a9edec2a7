"""Triton kernels of Gaussian blurs.

A blur of up to ``ONE_LAUNCH_SIDE`` pixels runs in one launch, with all taps of both axes. A larger blur runs in two launches,
one per axis, or, for bfloat16 output, in one launch with a thread block per *strip*, that is, ``STRIP`` lines of the image.
``tiles.py`` describes the tiles of thread blocks.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.frame import filter_launch, tiles_of
from gpuaug.fusion.backends.triton.filters.tiles import (
    BORDERS,
    LINES,
    add_lines,
    border_index,
    load_aligned,
    load_exact_pixels,
    load_lines,
    store_tile,
    tile_indices,
)
from gpuaug.fusion.backends.triton.launch import (
    FilterLaunch,
    FirstLaunch,
    Launch,
    kernel,
    output_constants,
    source_constants,
)
from gpuaug.fusion.backends.triton.pixel_math import (
    gaussian_exponent,
    gaussian_norm,
    gaussian_weights,
    to_centred,
    to_output_type,
)
from gpuaug.fusion.backends.triton.taps import select_sample
from gpuaug.fusion.ops.filters import BlurOp
from gpuaug.fusion.program.intermediates import UINT16_UNIT, blurs_in_strips, gives_unit_range, may_store_16_bits
from gpuaug.fusion.program.plan import OpPass

STRIP, REACH = 32, 16
"""Height of a strip, and number of lines that are read above and below it, in pixels."""


@triton.jit
def blur_tile_along(
    pointer, first, size, stride, offsets_across, sigma,
    TAPS: tl.constexpr, BORDER: tl.constexpr, BYTES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Blur a tile of one plane along its last axis.

    ``first``: index of the first output along the axis. ``size``, ``stride``: number of pixels of the image along the axis, and
    elements between them. ``offsets_across``: (ACROSS, 1) offsets of the tile's pixels along the other axis.
    """
    exponent = gaussian_exponent(sigma)
    norm = gaussian_norm(exponent, TAPS)
    total = tl.zeros((ACROSS, ALONG), tl.float32)
    for start in tl.static_range(0, ALONG + TAPS - 1, LINES):
        index = first + (start - TAPS // 2) + tl.arange(0, LINES)[None, :]
        inside = (index >= 0) & (index < size) & (offsets_across >= 0)
        lines = load_lines(pointer + border_index(index, size, BORDER) * stride + offsets_across, inside, BORDER, BYTES)
        total = add_lines(total, lines, start, exponent, norm, TAPS, ALONG)
    return total


@kernel
def blur_columns_kernel(
    source, blurred_y, rows, height, width, tiles_across, row_stride, source_b, source_c, source_h,
    TAPS: tl.constexpr, BORDER: tl.constexpr, SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, BYTES: tl.constexpr,
    CHANNELS: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, TILES: tl.constexpr, ROUTE_COLUMN: tl.constexpr,
):  # fmt: skip
    """Blur along y into transposed planes, (W, H), so that ``blur_rows`` also works along a non-contiguous axis.

    Grid: (blocks per image, samples, channels).
    """
    skipped, sample, plane, row, pointer, _ = select_sample(
        source, blurred_y, rows, row_stride, source_b, source_c, 0, FRAMES, ROUTE_COLUMN
    )
    if skipped:
        return
    first, y, x = tile_indices(tiles_across, ALONG, ACROSS, TILES)
    if tl.load(row) != 0:
        across = tl.minimum(x, width - 1) * SOURCE_W
        value = blur_tile_along(
            pointer, first, height, source_h, across, tl.load(row + 1), TAPS, BORDER, BYTES, ALONG, ACROSS
        )  # fmt: skip
        if BYTES and blurred_y.dtype.element_ty == tl.uint16:
            value *= 1 / 255
        start = blurred_y + (sample.to(tl.int64) * CHANNELS + plane) * height * width
        tl.store(start + x * height + y, to_output_type(value, blurred_y.dtype.element_ty), mask=(x < width) & (y < height))


@triton.jit
def blur_rows(
    plane, blurred_y, row, first, y, x, height, width, stride_y,
    SOURCE_W: tl.constexpr, BYTES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, SETTINGS: tl.constexpr,
):  # fmt: skip
    """Blur the output of ``blur_columns_kernel`` along x. Row: apply mask, sigma of y and x. ``SETTINGS``: (taps, border)."""
    across = tl.minimum(y, height - 1)
    sigma = tl.load(row + 2)
    value = blur_tile_along(blurred_y, first, width, height, across, sigma, SETTINGS[0], SETTINGS[1], False, ALONG, ACROSS)
    return value * (1 / 255) if BYTES and blurred_y.dtype.element_ty == tl.float32 else value


@triton.jit
def blur_down(bits, weights_y):
    """Blur columns of a strip, (columns, lines), along y: (lines, columns) float16 in [-1, 1)."""
    return tl.dot(weights_y, tl.trans(to_centred(bits))).to(tl.float16)


@triton.jit
def blur_across(previous, current, following, weights, SCALE: tl.constexpr):
    """Blur the columns ``current`` of a strip along x, and map them to [0, 1]. ``weights``: of columns left, centre, right."""
    return tl.dot(following, weights[2], tl.dot(current, weights[1], tl.dot(previous, weights[0]))) * SCALE + SCALE


@kernel
def blur_strips_kernel(
    source, out, rows, height, width, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, BORDER: tl.constexpr, SOURCE_W: tl.constexpr, FRAMES: tl.constexpr,
    BYTES: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr, OP_COUNT: tl.constexpr, CHANNELS: tl.constexpr,
    RGB: tl.constexpr, WORDS: tl.constexpr, STRIP: tl.constexpr, REACH: tl.constexpr, ALIGNED: tl.constexpr,
    ROUTE_COLUMN: tl.constexpr,
):  # fmt: skip
    """Blur images in [0, 1] along both axes, by products of float16 matrices of pixels and weights.

    A block moves along a strip by ``REACH`` columns per iteration. It blurs the next ``REACH`` columns along y, for which it
    reads the lines above and below the strip, too. Then it blurs the preceding ``REACH`` columns along x, for which it needs
    the columns on both sides.

    ``STRIP``: height of a strip. ``ALIGNED``: whether lines begin and end at aligned addresses. ``WORDS``: see ``store_tile``.

    Grid: (strips per image, samples, planes; with ``RGB`` one plane).
    """
    skipped, sample, plane, row, pointer, out = select_sample(
        source, out, rows, row_stride, source_b, source_c, out_b, FRAMES, ROUTE_COLUMN
    )
    if skipped:
        return
    top = tl.program_id(0) * STRIP
    y = top + tl.arange(0, STRIP)[:, None]
    index = tl.arange(0, REACH)
    if tl.load(row) != 0:
        exponent_y, exponent_x = gaussian_exponent(tl.load(row + 1)), gaussian_exponent(tl.load(row + 2))
        norm_y, norm_x = gaussian_norm(exponent_y, TAPS_Y), gaussian_norm(exponent_x, TAPS_X)
        lines = top - REACH + tl.arange(0, STRIP + 2 * REACH)[None, :]
        weights_y = gaussian_weights(lines - y, exponent_y, norm_y, TAPS_Y)
        weights_left = gaussian_weights(index[:, None] - index[None, :] - REACH, exponent_x, norm_x, TAPS_X)
        weights_centre = gaussian_weights(index[:, None] - index[None, :], exponent_x, norm_x, TAPS_X)
        weights_right = gaussian_weights(index[:, None] - index[None, :] + REACH, exponent_x, norm_x, TAPS_X)
        weights_x = weights_left, weights_centre, weights_right
        lines_inside = (lines >= 0) & (lines < height) | (BORDER > 0)
        lines = border_index(lines, height, BORDER) * source_h
        green_pointer = pointer + (source_c if RGB else 0)
        blue_pointer = green_pointer + (source_c if RGB else 0)
        scale: tl.constexpr = 0.5 + 0.5 / (2**source.dtype.element_ty.primitive_bitwidth - 1)
        # Three separate tensors per channel: with one tensor, the compiler would not infer that the loop rotates its parts.
        previous_r = tl.zeros((STRIP, REACH), tl.float16)
        current_r = tl.zeros((STRIP, REACH), tl.float16)
        next_r = tl.zeros((STRIP, REACH), tl.float16)
        previous_g, current_g, next_g = previous_r, current_r, next_r
        previous_b, current_b, next_b = previous_r, current_r, next_r
        # Before the first column is finished, three iterations only read.
        for first in range(-3 * REACH, width, REACH):
            # The next columns are read before the finished columns are stored, so that the reads overlap the arithmetic.
            x = first + 2 * REACH + index[:, None]
            aligned_inside = (first >= -2 * REACH) & (first + 3 * REACH <= width)
            if ALIGNED:
                mask = lines_inside & (x == x) & aligned_inside
                r = load_aligned(pointer, lines + x, mask, REACH)
                g = load_aligned(green_pointer, lines + x, mask, REACH)
                b = load_aligned(blue_pointer, lines + x, mask, REACH)
            if first >= 0:
                red = blur_across(previous_r, current_r, next_r, weights_x, scale)
                green = blur_across(previous_g, current_g, next_g, weights_x, scale) if RGB else red
                blue = blur_across(previous_b, current_b, next_b, weights_x, scale) if RGB else red
                store_tile(
                    red, green, blue, first + index[None, :], y, sample, plane, height, width, row, out, out_c, out_h,
                    OUT_W, PROGRAM, OP_COUNT, CHANNELS, RGB, first, WORDS, X_LAST=True,
                )  # fmt: skip
            previous_r, previous_g, previous_b = current_r, current_g, current_b
            current_r, current_g, current_b = next_r, next_g, next_b
            if ALIGNED and aligned_inside:
                next_r = blur_down(r, weights_y)
                next_g = blur_down(g, weights_y) if RGB else next_r
                next_b = blur_down(b, weights_y) if RGB else next_r
            else:
                offsets = lines + border_index(x, width, BORDER) * SOURCE_W
                mask = lines_inside & (((x >= 0) & (x < width)) | (BORDER > 0))
                next_r = blur_down(tl.load(pointer + offsets, mask=mask, other=0), weights_y)
                next_g = blur_down(tl.load(green_pointer + offsets, mask=mask, other=0), weights_y) if RGB else next_r
                next_b = blur_down(tl.load(blue_pointer + offsets, mask=mask, other=0), weights_y) if RGB else next_r
    else:
        for first in range(0, width, REACH):
            x = first + index[None, :]
            pixel = pointer + tl.minimum(y, height - 1) * source_h + x * SOURCE_W
            if ALIGNED:
                pixel = tl.max_contiguous(tl.multiple_of(pixel, (1, REACH)), (1, REACH))
                source_c = source_c // REACH * REACH
            r, g, b = load_exact_pixels(pixel, (x < width) | ALIGNED, source_c, BYTES, RGB, X_LAST=True)
            store_tile(
                r, g, b, x, y, sample, plane, height, width, row, out, out_c, out_h,
                OUT_W, PROGRAM, OP_COUNT, CHANNELS, RGB, first, WORDS, X_LAST=True,
            )  # fmt: skip


@triton.jit
def small_blur(
    plane, between, row, first, y, x, height, width, stride_y,
    SOURCE_W: tl.constexpr, BYTES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, SETTINGS: tl.constexpr,
):  # fmt: skip
    """Blur each line along x, then along y. Row: apply mask, sigma of y and x. ``SETTINGS``: (taps of y, taps of x, border)."""
    TAPS_Y: tl.constexpr = SETTINGS[0]
    TAPS_X: tl.constexpr = SETTINGS[1]
    exponent_y, exponent_x = gaussian_exponent(tl.load(row + 1)), gaussian_exponent(tl.load(row + 2))
    norm_y, norm_x = gaussian_norm(exponent_y, TAPS_Y), gaussian_norm(exponent_x, TAPS_X)
    total = tl.zeros((ACROSS, ALONG), tl.float32)
    for start in tl.static_range(0, ALONG + TAPS_Y - 1, LINES):
        line_y = first + (start - TAPS_Y // 2) + tl.arange(0, LINES)[None, :]
        line = plane + border_index(line_y, height, SETTINGS[2]) * stride_y
        lines = tl.zeros((ACROSS, LINES), tl.float32)
        for tap in tl.static_range(TAPS_X):
            tap_x = x + (tap - TAPS_X // 2)
            inside = (line_y >= 0) & (line_y < height) & (tap_x >= 0) & (tap_x < width)
            pixels = load_lines(line + border_index(tap_x, width, SETTINGS[2]) * SOURCE_W, inside, SETTINGS[2], BYTES)
            distance = tl.full((), tap - TAPS_X // 2, tl.float32)
            lines += tl.exp(distance * distance * exponent_x) * norm_x * pixels
        total = add_lines(total, lines, start, exponent_y, norm_y, TAPS_Y, ALONG)
    return total * (1 / 255) if BYTES else total


def blur_launches(pass_: OpPass[BlurOp], source: Tensor, rows: Tensor, out: Tensor) -> Launch | FilterLaunch:
    """Prepare the launches of a pass whose front is a blur.

    Cost:
        With two launches, a copy of the images between them: float32, or 16 bits per value, as between passes.
    """
    (down, across) = pass_.front.kernel_size
    border = BORDERS[pass_.front.border]
    constants = {"TAPS_Y": down, "TAPS_X": across, "BORDER": border}
    if blurs_in_strips(pass_.front, source.dtype, out.dtype):
        return _strips_launch(pass_, source, rows, out, constants)
    if pass_.front.launches == 1:
        return filter_launch(small_blur, (down, across, border), pass_, source, rows, out)
    batch, channels, height, width = source.shape
    tiles_across, blocks, tile = tiles_of(pass_, height, width)
    columns_launch = Launch(
        blur_columns_kernel,
        (blocks, batch, channels),
        (height, width, tiles_across, rows.stride(0), *source.stride()[:3]),
        {**source_constants(pass_, source), **tile, "BORDER": border, "TAPS": down},
        warps=tile["TILES"],
    )
    rounds = gives_unit_range(pass_.front, source.dtype) and may_store_16_bits(pass_, source.dtype, out.dtype)
    first = FirstLaunch(columns_launch, (batch, channels, width, height), UINT16_UNIT if rounds else torch.float32)
    return filter_launch(blur_rows, (across, border), pass_, source, rows, out, first, along_x=True)


def _strips_launch(pass_: OpPass[BlurOp], source: Tensor, rows: Tensor, out: Tensor, blur_constants: dict[str, Any]) -> Launch:
    """Prepare the launch of ``blur_strips_kernel``."""
    batch, _, height, width = source.shape
    constants, planes = output_constants(pass_, source, out)
    constants |= {**blur_constants, "STRIP": STRIP, "REACH": REACH}
    # Images between passes begin at aligned addresses; images of users may not.
    aligned = pass_.first_column > 0 and source.dtype == UINT16_UNIT
    constants["ALIGNED"] = aligned and not any(size % REACH for size in (*source.stride()[:3], width))
    constants["WORDS"] = constants["RGB"] and out.stride(1) == 1 and width % 2 == 0
    integers = (height, width, rows.stride(0), *source.stride()[:3], *out.stride()[:3])
    return Launch(blur_strips_kernel, (triton.cdiv(height, STRIP), batch, planes), integers, constants, warps=2, registers=160)
