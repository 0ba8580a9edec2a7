"""Triton kernels of Gaussian blurs.

A blur is separable: it runs along y and along x, with one weight per tap of an axis. There are three implementations:

- a kernel size of up to ``ONE_LAUNCH_SIDE`` pixels (``ops/filters.py``): one launch, both axes at once (``small_blur``)
- larger: two launches, ``blur_columns_kernel`` along y, and ``blur_rows`` along x
- larger, with bfloat16 output, for which products of float16 matrices are precise enough (``blurs_in_strips``): one launch,
  ``blur_strips_kernel``, in which a thread block computes a *strip*, that is, ``STRIP`` lines of the image

A row of the parameter table has three columns: apply mask (0 to skip the blur), sigma along y, and sigma along x, in pixels.
``frame.py`` describes the tiles of thread blocks.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.frame import (
    BORDERS,
    LINES,
    add_lines,
    border_index,
    filter_launch,
    load_aligned,
    load_exact_pixels,
    load_lines,
    store_tile,
    tile_indices,
    tiles_of,
)
from gpuaug.fusion.backends.triton.launch import FilterLaunch, FirstLaunch, Launch, kernel, output_constants, source_constants
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
"""Number of lines of a strip; and number of lines that are read above and below it, and of columns that are read at a time."""


@triton.jit
def blur_tile_along(
    pointer, tile_start, size, stride, offsets_across, sigma,
    TAPS: tl.constexpr, BORDER: tl.constexpr, BYTES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Blur a tile of one plane along its last axis. Return (ACROSS, ALONG) float32, in the unit of the source.

    A *line* is the pixels of the tile with one index along this axis: of a filter along x, a column of the image.
    ``pointer``: address of the plane. ``tile_start``: index of the first output along the axis. ``size``, ``stride``: number of
    pixels of the image along the axis, and elements between them. ``offsets_across``: (ACROSS, 1) offsets of the tile's pixels
    along the other axis, in elements. ``sigma``: standard deviation of the Gaussian, in pixels. ``TAPS``: size of the Gaussian.
    """
    exponent = gaussian_exponent(sigma)
    norm = gaussian_norm(exponent, TAPS)
    blurred = tl.zeros((ACROSS, ALONG), tl.float32)
    for first_line in tl.static_range(0, ALONG + TAPS - 1, LINES):
        line_index = tile_start + (first_line - TAPS // 2) + tl.arange(0, LINES)[None, :]
        # The last condition is true. It gives the mask its shape.
        inside = (line_index >= 0) & (line_index < size) & (offsets_across >= 0)
        pixels = load_lines(pointer + border_index(line_index, size, BORDER) * stride + offsets_across, inside, BORDER, BYTES)
        blurred = add_lines(blurred, pixels, first_line, exponent, norm, TAPS, ALONG)
    return blurred


@kernel
def blur_columns_kernel(
    source, blurred_y, param_table, height, width, tiles_across, row_stride, source_b, source_c, source_h,
    TAPS: tl.constexpr, BORDER: tl.constexpr, SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, BYTES: tl.constexpr,
    CHANNELS: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, TILES: tl.constexpr, ROUTE_COLUMN: tl.constexpr,
):  # fmt: skip
    """Blur ``source`` along y into ``blurred_y``, (B, C, W, H).

    ``blurred_y`` has the values as uint16 in [0, 1], or as float32 in the unit of ``source``. Its planes are transposed,
    because the threads of a warp lie across the axis of the filter: this kernel reads ``source`` along x, and ``blur_rows``
    reads ``blurred_y`` along y. For the other arguments see ``filter_kernel`` and ``tile_indices`` (``frame.py``).

    Grid: (blocks per image, samples, channels).
    """
    skipped, sample, plane, row, pointer, _ = select_sample(
        source, blurred_y, param_table, row_stride, source_b, source_c, 0, FRAMES, ROUTE_COLUMN
    )
    if skipped:
        return
    tile_start, y, x = tile_indices(tiles_across, ALONG, ACROSS, TILES)
    if tl.load(row) != 0:  # for other samples, ``blur_rows`` reads ``source``
        offsets_across = tl.minimum(x, width - 1) * SOURCE_W
        value = blur_tile_along(
            pointer, tile_start, height, source_h, offsets_across, tl.load(row + 1), TAPS, BORDER, BYTES, ALONG, ACROSS
        )  # fmt: skip
        if BYTES and blurred_y.dtype.element_ty == tl.uint16:
            value *= 1 / 255
        plane_start = blurred_y + (sample.to(tl.int64) * CHANNELS + plane) * height * width
        tl.store(
            plane_start + x * height + y, to_output_type(value, blurred_y.dtype.element_ty), mask=(x < width) & (y < height)
        )


@triton.jit
def blur_rows(
    plane_address, blurred_y, row, tile_start, y, x, height, width, stride_y,
    SOURCE_W: tl.constexpr, BYTES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, SETTINGS: tl.constexpr,
):  # fmt: skip
    """Blur the output of ``blur_columns_kernel``, at address ``blurred_y``, along x, and convert it to [0, 1].

    ``SETTINGS``: (size of the Gaussian along x, padding mode). See ``filter_kernel`` for the other arguments.
    """
    across = tl.minimum(y, height - 1)
    sigma = tl.load(row + 2)
    # The stride along x is the height, because the planes are transposed.
    value = blur_tile_along(blurred_y, tile_start, width, height, across, sigma, SETTINGS[0], SETTINGS[1], False, ALONG, ACROSS)
    return value * (1 / 255) if BYTES and blurred_y.dtype.element_ty == tl.float32 else value


@triton.jit
def blur_down(bits, weights_y):
    """Blur columns of a strip along y. Return (STRIP, REACH) float16 in [-1, 1).

    ``bits``: uint8 or uint16 pixels, (REACH columns, STRIP + 2 · REACH lines). ``weights_y``: (STRIP, STRIP + 2 · REACH).
    """
    return tl.dot(weights_y, tl.trans(to_centred(bits))).to(tl.float16)


@triton.jit
def blur_across(previous, current, following, weights, SCALE: tl.constexpr):
    """Blur the columns ``current`` of a strip along x, and map them to [0, 1]. Return (STRIP, REACH) float32.

    ``previous``, ``current``, ``following``: (STRIP, REACH) adjacent groups of columns, in [-1, 1). ``weights``: three
    matrices, (REACH, REACH): weights of the columns of each group for the columns of the result. ``SCALE`` maps [-1, 1) to [0,
    1].
    """
    return tl.dot(following, weights[2], tl.dot(current, weights[1], tl.dot(previous, weights[0]))) * SCALE + SCALE


@kernel
def blur_strips_kernel(
    source, out, param_table, height, width, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, BORDER: tl.constexpr, SOURCE_W: tl.constexpr, FRAMES: tl.constexpr,
    BYTES: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr, OP_COUNT: tl.constexpr, CHANNELS: tl.constexpr,
    RGB: tl.constexpr, WORDS: tl.constexpr, STRIP: tl.constexpr, REACH: tl.constexpr, ALIGNED: tl.constexpr,
    ROUTE_COLUMN: tl.constexpr,
):  # fmt: skip
    """Blur images in [0, 1] along both axes, by products of float16 matrices of pixels and weights.

    A block moves along a strip by ``REACH`` columns per iteration. ``first_column`` is the first column of the group that the
    iteration stores:

        columns from     first_column - REACH   first_column   first_column + REACH   first_column + 2 · REACH
        at the start     previous               current        next                   read from the source
        stored                                  blurred along x, with ``previous`` and ``next`` as neighbours
        at the end                              previous       current                next: blurred along y

    To blur along y, the block also reads ``REACH`` lines above and below the strip.

    ``ALIGNED``: whether lines begin and end at aligned addresses. ``WORDS``: see ``store_tile``. Other constants: see
    ``output_constants``, and the constants of this file.

    Grid: (strips per image, samples, planes; with ``RGB`` one plane).
    """
    skipped, sample, plane, row, pointer, out = select_sample(
        source, out, param_table, row_stride, source_b, source_c, out_b, FRAMES, ROUTE_COLUMN
    )
    if skipped:
        return
    top = tl.program_id(0) * STRIP
    y = top + tl.arange(0, STRIP)[:, None]
    column_index = tl.arange(0, REACH)
    if tl.load(row) != 0:
        exponent_y, exponent_x = gaussian_exponent(tl.load(row + 1)), gaussian_exponent(tl.load(row + 2))
        norm_y, norm_x = gaussian_norm(exponent_y, TAPS_Y), gaussian_norm(exponent_x, TAPS_X)
        line_index = top - REACH + tl.arange(0, STRIP + 2 * REACH)[None, :]
        weights_y = gaussian_weights(line_index - y, exponent_y, norm_y, TAPS_Y)
        weights_left = gaussian_weights(column_index[:, None] - column_index[None, :] - REACH, exponent_x, norm_x, TAPS_X)
        weights_centre = gaussian_weights(column_index[:, None] - column_index[None, :], exponent_x, norm_x, TAPS_X)
        weights_right = gaussian_weights(column_index[:, None] - column_index[None, :] + REACH, exponent_x, norm_x, TAPS_X)
        weights_x = weights_left, weights_centre, weights_right
        lines_inside = (line_index >= 0) & (line_index < height) | (BORDER > 0)
        line_offsets = border_index(line_index, height, BORDER) * source_h
        green_pointer = pointer + (source_c if RGB else 0)
        blue_pointer = green_pointer + (source_c if RGB else 0)
        # ``to_centred`` maps an integer n of b bits to n / 2**(b - 1) - 1. Times ``scale``, plus ``scale``, n becomes
        # n / (2**b - 1), which is in [0, 1].
        scale: tl.constexpr = 0.5 + 0.5 / (2**source.dtype.element_ty.primitive_bitwidth - 1)
        # Three separate tensors per channel: with one tensor, the compiler would not infer that the loop rotates its parts.
        previous_r = tl.zeros((STRIP, REACH), tl.float16)
        current_r = tl.zeros((STRIP, REACH), tl.float16)
        next_r = tl.zeros((STRIP, REACH), tl.float16)
        previous_g, current_g, next_g = previous_r, current_r, next_r
        previous_b, current_b, next_b = previous_r, current_r, next_r
        # The first three iterations only read: the first group of the image becomes ``current`` after them.
        for first_column in range(-3 * REACH, width, REACH):
            # Columns are read before the arithmetic and the stores of the iteration, so that the GPU does both at once.
            x = first_column + 2 * REACH + column_index[:, None]
            aligned_inside = (first_column >= -2 * REACH) & (first_column + 3 * REACH <= width)
            if ALIGNED:
                mask = lines_inside & (x == x) & aligned_inside
                pixels_r = load_aligned(pointer, line_offsets + x, mask, REACH)
                pixels_g = load_aligned(green_pointer, line_offsets + x, mask, REACH)
                pixels_b = load_aligned(blue_pointer, line_offsets + x, mask, REACH)
            if first_column >= 0:
                blurred_r = blur_across(previous_r, current_r, next_r, weights_x, scale)
                blurred_g = blur_across(previous_g, current_g, next_g, weights_x, scale) if RGB else blurred_r
                blurred_b = blur_across(previous_b, current_b, next_b, weights_x, scale) if RGB else blurred_r
                store_tile(
                    blurred_r, blurred_g, blurred_b, first_column + column_index[None, :], y, sample, plane, height, width,
                    row, out, out_c, out_h, OUT_W, PROGRAM, OP_COUNT, CHANNELS, RGB, first_column, WORDS, X_LAST=True,
                )  # fmt: skip
            previous_r, previous_g, previous_b = current_r, current_g, current_b
            current_r, current_g, current_b = next_r, next_g, next_b
            if ALIGNED and aligned_inside:
                next_r = blur_down(pixels_r, weights_y)
                next_g = blur_down(pixels_g, weights_y) if RGB else next_r
                next_b = blur_down(pixels_b, weights_y) if RGB else next_r
            else:
                offsets = line_offsets + border_index(x, width, BORDER) * SOURCE_W
                mask = lines_inside & (((x >= 0) & (x < width)) | (BORDER > 0))
                next_r = blur_down(tl.load(pointer + offsets, mask=mask, other=0), weights_y)
                next_g = blur_down(tl.load(green_pointer + offsets, mask=mask, other=0), weights_y) if RGB else next_r
                next_b = blur_down(tl.load(blue_pointer + offsets, mask=mask, other=0), weights_y) if RGB else next_r
    else:
        for first_column in range(0, width, REACH):
            x = first_column + column_index[None, :]
            pixel = pointer + tl.minimum(y, height - 1) * source_h + x * SOURCE_W
            if ALIGNED:
                pixel = tl.max_contiguous(tl.multiple_of(pixel, (1, REACH)), (1, REACH))
                source_c = source_c // REACH * REACH  # the same number: tells the compiler that it is a multiple of REACH
            pixels_r, pixels_g, pixels_b = load_exact_pixels(pixel, (x < width) | ALIGNED, source_c, BYTES, RGB, X_LAST=True)
            store_tile(
                pixels_r, pixels_g, pixels_b, x, y, sample, plane, height, width, row, out, out_c, out_h,
                OUT_W, PROGRAM, OP_COUNT, CHANNELS, RGB, first_column, WORDS, X_LAST=True,
            )  # fmt: skip


@triton.jit
def small_blur(
    plane_address, intermediate, row, tile_start, y, x, height, width, stride_y,
    SOURCE_W: tl.constexpr, BYTES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, SETTINGS: tl.constexpr,
):  # fmt: skip
    """Blur a tile along x, then along y: each line that the tile depends on is blurred along x, and added to its outputs.

    ``SETTINGS``: (size of the Gaussian along y, size along x, padding mode). See ``filter_kernel`` for the other arguments.
    """
    TAPS_Y: tl.constexpr = SETTINGS[0]
    TAPS_X: tl.constexpr = SETTINGS[1]
    exponent_y, exponent_x = gaussian_exponent(tl.load(row + 1)), gaussian_exponent(tl.load(row + 2))
    norm_y, norm_x = gaussian_norm(exponent_y, TAPS_Y), gaussian_norm(exponent_x, TAPS_X)
    blurred = tl.zeros((ACROSS, ALONG), tl.float32)
    for first_line in tl.static_range(0, ALONG + TAPS_Y - 1, LINES):
        line_y = tile_start + (first_line - TAPS_Y // 2) + tl.arange(0, LINES)[None, :]
        line = plane_address + border_index(line_y, height, SETTINGS[2]) * stride_y
        blurred_x = tl.zeros((ACROSS, LINES), tl.float32)
        for tap in tl.static_range(TAPS_X):
            tap_x = x + (tap - TAPS_X // 2)
            inside = (line_y >= 0) & (line_y < height) & (tap_x >= 0) & (tap_x < width)
            pixels = load_lines(line + border_index(tap_x, width, SETTINGS[2]) * SOURCE_W, inside, SETTINGS[2], BYTES)
            distance = tl.full((), tap - TAPS_X // 2, tl.float32)
            blurred_x += tl.exp(distance * distance * exponent_x) * norm_x * pixels
        blurred = add_lines(blurred, blurred_x, first_line, exponent_y, norm_y, TAPS_Y, ALONG)
    return blurred * (1 / 255) if BYTES else blurred


def blur_launches(pass_: OpPass[BlurOp], source: Tensor, param_table: Tensor, out: Tensor) -> Launch | FilterLaunch:
    """Prepare the launches of a pass that begins with a blur. The arguments are described in ``filter_launch``.

    Cost:
        With two launches, memory for the images that are blurred along y: float32, or 16 bits per value where images between
        two passes may have them (``may_store_16_bits``).
    """
    (size_y, size_x) = pass_.front.kernel_size
    border = BORDERS[pass_.front.border]
    constants = {"TAPS_Y": size_y, "TAPS_X": size_x, "BORDER": border}
    if blurs_in_strips(pass_.front, source.dtype, out.dtype):
        return _strips_launch(pass_, source, param_table, out, constants)
    if pass_.front.launches == 1:
        return filter_launch(small_blur, (size_y, size_x, border), pass_, source, param_table, out)
    batch, channels, height, width = source.shape
    tiles_across, blocks, tile_constants = tiles_of(pass_, height, width)
    columns_launch = Launch(
        blur_columns_kernel,
        (blocks, batch, channels),
        (height, width, tiles_across, param_table.stride(0), *source.stride()[:3]),
        {**source_constants(pass_, source), **tile_constants, "BORDER": border, "TAPS": size_y},
        num_warps=tile_constants["TILES"],
    )
    in_16_bits = gives_unit_range(pass_.front, source.dtype) and may_store_16_bits(pass_, source.dtype, out.dtype)
    first = FirstLaunch(columns_launch, (batch, channels, width, height), UINT16_UNIT if in_16_bits else torch.float32)
    return filter_launch(blur_rows, (size_x, border), pass_, source, param_table, out, first, along_x=True)


def _strips_launch(pass_: OpPass[BlurOp], source: Tensor, param_table: Tensor, out: Tensor, blur: dict[str, Any]) -> Launch:
    """Prepare the launch of ``blur_strips_kernel``. ``blur``: constants for the sizes of the Gaussian and the padding mode."""
    batch, _, height, width = source.shape
    constants, planes = output_constants(pass_, source, out)
    constants |= {**blur, "STRIP": STRIP, "REACH": REACH}
    # The first pass, whose columns begin at 0, reads images of the user, whose addresses may not be aligned. Images between
    # passes are aligned.
    aligned = pass_.first_column > 0 and source.dtype == UINT16_UNIT
    constants["ALIGNED"] = aligned and not any(size % REACH for size in (*source.stride()[:3], width))
    constants["WORDS"] = constants["RGB"] and out.stride(1) == 1 and width % 2 == 0
    integers = (height, width, param_table.stride(0), *source.stride()[:3], *out.stride()[:3])
    grid = triton.cdiv(height, STRIP), batch, planes
    return Launch(blur_strips_kernel, grid, integers, constants, num_warps=2, maxnreg=160)
