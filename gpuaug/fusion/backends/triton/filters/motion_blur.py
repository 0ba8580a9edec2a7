"""Triton kernel of motion blur, and its launch. ``tiles.py`` describes the tiles of thread blocks."""

import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.tiles import (
    BORDERS,
    border_index,
    load_exact_pixels,
    load_lines,
    store_tile,
    storing_launch,
    tile_indices,
)
from gpuaug.fusion.backends.triton.launch import Launch, kernel
from gpuaug.fusion.backends.triton.taps import select_sample
from gpuaug.fusion.ops.filters import MotionBlurOp
from gpuaug.fusion.program.plan import OpPass


@kernel
def motion_blur_kernel(
    source, out, rows, height, width, tiles, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, BYTES: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr,
    OP_COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
    TILES: tl.constexpr, BORDER: tl.constexpr, ROUTE_COLUMN: tl.constexpr,
):  # fmt: skip
    """Sum the weighted taps of the samples whose apply mask is set. Row: apply mask, number of taps; y, x and weight per tap.

    Grid: (blocks per image, samples, planes; with ``RGB`` one plane).
    """
    skipped, sample, plane, row, pointer, out = select_sample(
        source, out, rows, row_stride, source_b, source_c, out_b, FRAMES, ROUTE_COLUMN
    )
    if skipped:
        return
    _, y, x = tile_indices(tiles, ALONG, ACROSS, TILES)
    if tl.load(row) != 0:
        r = tl.zeros((ACROSS, ALONG), tl.float32)
        g = r
        b = r
        for tap in range(tl.load(row + 1).to(tl.int32)):
            tap_row = row + 2 + 3 * tap
            tap_y = y + tl.load(tap_row).to(tl.int32)
            tap_x = x + tl.load(tap_row + 1).to(tl.int32)
            weight = tl.load(tap_row + 2) * (1 / 255 if BYTES else 1)
            inside = (tap_y >= 0) & (tap_y < height) & (tap_x >= 0) & (tap_x < width)
            pixel = pointer + border_index(tap_y, height, BORDER) * source_h + border_index(tap_x, width, BORDER) * SOURCE_W
            r += weight * load_lines(pixel, inside, BORDER, BYTES)
            if RGB:
                g += weight * load_lines(pixel + source_c, inside, BORDER, BYTES)
                b += weight * load_lines(pixel + 2 * source_c, inside, BORDER, BYTES)
        if not RGB:
            g = r
            b = r
    else:
        pixel = pointer + tl.minimum(y, height - 1) * source_h + x * SOURCE_W
        r, g, b = load_exact_pixels(pixel, x < width, source_c, BYTES, RGB)
    store_tile(r, g, b, x, y, sample, plane, height, width, row, out, out_c, out_h, OUT_W, PROGRAM, OP_COUNT, CHANNELS, RGB)


def motion_blur_launch(pass_: OpPass[MotionBlurOp], source: Tensor, rows: Tensor, out: Tensor) -> Launch:
    """Prepare the launch of a pass whose front is a motion blur."""
    return storing_launch(motion_blur_kernel, pass_, source, rows, out, {"BORDER": BORDERS[pass_.front.border]})
