"""Triton kernel that resizes images and writes each to a region of a canvas."""

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.fusion.backends.readers import send
from gpuaug.fusion.backends.tiles import Pixels
from gpuaug.fusion.backends.triton.launch import kernel, launch_for, on_device
from gpuaug.fusion.backends.triton.taps import half_to_even

TILE = (8, 64)
"""(height, width) of the pixels of a block."""

COLUMN_COUNT = tl.constexpr(17)
"""Columns of the table of tiles, (T, 17): the first six of ``Pixels.layouts``, then all columns of the tiles but the last."""


@triton.jit
def source_lines(position, resized, length):
    """Return, for pixels along one axis, (mask of the pixels inside the resized image, nearest line, two lines to interpolate).

    The result ends with the weight of the second of the two lines. Lines are indices in the source image.

    ``position``: index of the pixel, counted from the start of the resized image. ``resized``, ``length``: side of the resized
    image, and of the source.
    """
    inside = (position >= 0) & (position < resized)
    position = tl.minimum(tl.maximum(position, 0), resized - 1)
    nearest = ((2 * position + 1).to(tl.int64) * length // (2 * resized)).to(tl.int32)
    scale = tl.div_rn(length.to(tl.float32), resized.to(tl.float32))
    centre = (position.to(tl.float32) + 0.5) * scale - 0.5
    centre = tl.minimum(tl.maximum(centre, 0.0), (length - 1).to(tl.float32))
    first = centre.to(tl.int32)
    return inside, nearest, first, tl.minimum(first + 1, length - 1), centre - first.to(tl.float32)


@kernel
def tiles_kernel(
    source, rows, blend, out, blocks, CHANNELS: tl.constexpr, NEAREST: tl.constexpr, MODE: tl.constexpr, ROUNDS: tl.constexpr,
    FILL: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
):  # fmt: skip
    """Write a block of the region of one tile.

    ``source``: first tensor of ``Pixels``; offsets in ``rows``, the table of tiles, also reach the other tensors. ``blocks``:
    number of blocks of the largest region.

    Constants:
        NEAREST: Whether to read the nearest pixel instead of interpolating.
        MODE: 0 to replace the canvas; 1 to blend the canvas with the tile, with ``blend`` as the weights of the canvas, (T,)
            float32; 2 to replace the pixels of the canvas that are 1 in ``blend``, the cover.
        ROUNDS: Whether to round to integers.
        FILL: Value outside of the resized image.

    Grid: (tiles · ``blocks``, 1, 1).
    """
    tile = tl.program_id(0) // blocks
    block = tl.program_id(0) - tile * blocks
    row = rows + tile * COLUMN_COUNT
    region_h = tl.load(row + 12).to(tl.int32)
    region_w = tl.load(row + 13).to(tl.int32)
    blocks_x = tl.maximum(tl.cdiv(region_w, TILE_W), 1)
    block_y = block // blocks_x
    if block_y * TILE_H >= region_h:
        return
    y = block_y * TILE_H + tl.arange(0, TILE_H)
    x = (block - block_y * blocks_x) * TILE_W + tl.arange(0, TILE_W)
    mask = (y < region_h)[:, None] & (x < region_w)[None, :]
    y += tl.load(row + 10).to(tl.int32)
    x += tl.load(row + 11).to(tl.int32)
    resized_top = tl.load(row + 6).to(tl.int32)
    resized_left = tl.load(row + 7).to(tl.int32)
    resized_h = tl.load(row + 8).to(tl.int32)
    resized_w = tl.load(row + 9).to(tl.int32)
    height = tl.load(row + 1).to(tl.int32)
    width = tl.load(row + 2).to(tl.int32)
    inside_y, nearest_y, y_0, y_1, weight_y = source_lines(y - resized_top, resized_h, height)
    inside_x, nearest_x, x_0, x_1, weight_x = source_lines(x - resized_left, resized_w, width)
    inside = mask & inside_y[:, None] & inside_x[None, :]
    row_stride = tl.load(row + 3).to(tl.int32)
    pixel_stride = tl.load(row + 4).to(tl.int32)
    channel_stride = tl.load(row + 5).to(tl.int32)
    pixels = source + tl.load(row)
    canvas_w = tl.load(row + 15).to(tl.int32)
    plane = tl.load(row + 14) * canvas_w
    pixel = y[:, None] * canvas_w + x[None, :]
    target = out + tl.load(row + 16) * CHANNELS + pixel
    if MODE == 2:
        cover = blend + tl.load(row + 16) + pixel
        mask = mask & (tl.load(cover, mask=mask, other=0) != 0)
    for channel in tl.static_range(CHANNELS):
        address = pixels + channel * channel_stride
        if NEAREST:
            value = tl.load(address + nearest_y[:, None] * row_stride + nearest_x[None, :] * pixel_stride, mask=inside, other=0)
        else:
            line_0 = address + y_0[:, None] * row_stride
            line_1 = address + y_1[:, None] * row_stride
            column_0 = x_0[None, :] * pixel_stride
            column_1 = x_1[None, :] * pixel_stride
            v_00 = tl.load(line_0 + column_0, mask=inside, other=0).to(tl.float32)
            v_01 = tl.load(line_0 + column_1, mask=inside, other=0).to(tl.float32)
            v_10 = tl.load(line_1 + column_0, mask=inside, other=0).to(tl.float32)
            v_11 = tl.load(line_1 + column_1, mask=inside, other=0).to(tl.float32)
            v_0 = v_00 + (v_01 - v_00) * weight_x[None, :]
            v_1 = v_10 + (v_11 - v_10) * weight_x[None, :]
            value = tl.where(inside, v_0 + (v_1 - v_0) * weight_y[:, None], FILL)
            if MODE == 1:
                weight = tl.load(blend + tile)
                value = weight * tl.load(target, mask=mask, other=0).to(tl.float32) + (1.0 - weight) * value
            if ROUNDS:
                value = half_to_even(value)
        tl.store(target, value.to(out.dtype.element_ty), mask=mask)
        target += plane


def write_tiles(
    out: Tensor,
    pixels: Pixels,
    tiles: NDArray[np.int64],
    fill: float,
    *,
    nearest: bool = False,
    weights: NDArray[np.float32] | None = None,
    cover: Tensor | None = None,
) -> None:
    """Write tiles to canvases. See ``gpuaug.fusion.backends.tiles.write_tiles``."""
    layouts = pixels.layouts.take(tiles[:, 11], 0)
    base = pixels.tensors[0]
    # The kernel reads all tensors by their distance from the first.
    distances = np.array([(tensor.data_ptr() - base.data_ptr()) // base.itemsize for tensor in pixels.tensors])
    layouts[:, 0] += distances[layouts[:, -1]]
    rows = np.concatenate((layouts[:, :6], tiles[:, :11]), 1)
    blocks_y, blocks_x = (-(-tiles[:, 6 + axis] // TILE[axis]) for axis in (0, 1))
    blocks = int((blocks_y * blocks_x).max())
    mode = 2 if cover is not None else int(weights is not None)
    constants = pixels.channels, nearest, mode, not out.dtype.is_floating_point, fill, *TILE
    with on_device(out.device):
        sent, *blend = send((rows,) if weights is None else (rows, weights), out.device)
        launch = launch_for(tiles_kernel, (out.dtype,), constants)
        launch((base, sent, (cover if cover is not None else (*blend, sent)[0]), out), (blocks * len(rows), 1, 1), (blocks,))
