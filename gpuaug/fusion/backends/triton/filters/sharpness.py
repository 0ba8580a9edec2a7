"""Triton kernel of sharpness, and its launch. ``tiles.py`` describes the tiles of thread blocks."""

import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.tiles import (
    border_index,
    load_exact_pixels,
    load_pixels,
    store_tile,
    storing_launch,
    tile_indices,
    with_channel,
)
from gpuaug.fusion.backends.triton.launch import Launch, kernel
from gpuaug.fusion.backends.triton.pixel_math import ROUNDED, clamp01, div_by_255, to_bytes
from gpuaug.fusion.backends.triton.taps import select_sample
from gpuaug.fusion.ops.filters import SharpnessOp
from gpuaug.fusion.program.plan import OpPass


@triton.jit
def sharpen_tile(
    pointer, first_y, x, height, width, stride_y, factor,
    SOURCE_W: tl.constexpr, BYTES: tl.constexpr, ROUNDS: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Sharpen a tile of one plane, (ACROSS, ALONG), starting at line ``first_y``: blend it with its 3x3 blur, by ``factor``.

    ``x``: (ACROSS, 1) columns. ``stride_y``: elements between lines. Border pixels of the image are not blurred. ``ROUNDS``:
    whether the blur is rounded to bytes.
    """
    along = tl.arange(0, ALONG)[None, :]
    sum_3x3 = tl.zeros((ACROSS, ALONG), tl.float32)
    centre = tl.zeros((ACROSS, ALONG), tl.float32)
    for line in tl.static_range(ALONG + 2):
        line_pointer = pointer + border_index(first_y + (line - 1), height, 2) * stride_y
        left = load_pixels(line_pointer + border_index(x - 1, width, 2) * SOURCE_W, True, 2, BYTES)
        middle = load_pixels(line_pointer + border_index(x, width, 2) * SOURCE_W, True, 2, BYTES)
        right = load_pixels(line_pointer + border_index(x + 1, width, 2) * SOURCE_W, True, 2, BYTES)
        if not BYTES:
            left, middle, right = clamp01(left), clamp01(middle), clamp01(right)
        tap_y = line - along
        sum_3x3 = tl.where((tap_y >= 0) & (tap_y < 3), sum_3x3 + (left + middle + right), sum_3x3)
        centre = tl.where(tap_y == 1, middle, centre)
    smooth = (sum_3x3 + 4 * centre) * (1 / (13 * 255) if BYTES else 1 / 13)
    if ROUNDS:
        smooth = to_bytes(smooth, ROUNDED[0], ROUNDED[1])
    if BYTES:
        centre = div_by_255(centre)
    y = first_y + along
    inside = (y > 0) & (y < height - 1) & (x > 0) & (x < width - 1)
    smooth = tl.where(inside, clamp01(smooth), centre)
    return clamp01(smooth + (centre - smooth) * factor)


@kernel
def sharpness_kernel(
    source, out, rows, height, width, tiles, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, BYTES: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr,
    OP_COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
    TILES: tl.constexpr, ROUNDS: tl.constexpr, ROUTE_COLUMN: tl.constexpr,
):  # fmt: skip
    """Sharpen the samples whose apply mask is set. Row: apply mask, factor.

    Grid: (blocks per image, samples, planes; with ``RGB`` one plane).
    """
    skipped, sample, plane, row, pointer, out = select_sample(
        source, out, rows, row_stride, source_b, source_c, out_b, FRAMES, ROUTE_COLUMN
    )
    if skipped:
        return
    first_y, y, x = tile_indices(tiles, ALONG, ACROSS, TILES)
    if tl.load(row) != 0:
        factor = tl.load(row + 1)
        r = tl.zeros((ACROSS, ALONG), tl.float32)
        g = r
        b = r
        for channel in range(3 if RGB else 1):
            plane_pointer = pointer + channel * source_c
            value = sharpen_tile(
                plane_pointer, first_y, x, height, width, source_h, factor, SOURCE_W, BYTES, ROUNDS, ALONG, ACROSS
            )
            r, g, b = with_channel(value, channel, r, g, b, RGB)
    else:
        pixel = pointer + tl.minimum(y, height - 1) * source_h + x * SOURCE_W
        r, g, b = load_exact_pixels(pixel, x < width, source_c, BYTES, RGB)
    store_tile(r, g, b, x, y, sample, plane, height, width, row, out, out_c, out_h, OUT_W, PROGRAM, OP_COUNT, CHANNELS, RGB)


def sharpness_launch(pass_: OpPass[SharpnessOp], source: Tensor, rows: Tensor, out: Tensor) -> Launch:
    """Prepare the launch of a pass whose front is a sharpness op."""
    return storing_launch(sharpness_kernel, pass_, source, rows, out, {"ROUNDS": pass_.front.to_bytes is not None})
