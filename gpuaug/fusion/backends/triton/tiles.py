"""Triton kernels that compose images: one writes tiles to canvases, two cut pasted objects out of the masks below them.

A *tile* places one resized image on a *canvas*, an image that consists of tiles, or that objects are pasted on. The *region* of
the tile is the rectangle of the canvas that the image is written to. A *block* is a part of a region that one thread block
writes.

For copy-paste, each object has a mask, a plane of the size of its canvas, and a role: below the pasted objects, pasted (above),
or absent. The first kernel computes the *cover* of each canvas: 1 where an object is pasted. The second sets masks of objects
below to 0 under the cover, sets masks of absent objects to 0, and computes statistics of the masks. ``backends/tiles.py`` has
the torch forms.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.fusion.backends.readers import send
from gpuaug.fusion.backends.tiles import ABOVE, BELOW, Pixels
from gpuaug.fusion.backends.triton.launch import kernel, launch_for, on_device
from gpuaug.fusion.backends.triton.pixel_math import nearest_integer

BLOCK = (8, 64)
"""(height, width) of a block in pixels."""

MASK_BLOCK = 1024
"""Pixels of masks per thread block."""

BELOW_ROLE, ABOVE_ROLE = tl.constexpr(BELOW), tl.constexpr(ABOVE)

MOST_PIXELS = tl.constexpr(2**30)
"""Initial value of the smallest row and column in the statistics, greater than every row and column."""

COLUMN_COUNT = tl.constexpr(17)
"""Number of columns of the table of tiles, (T, 17). Sides and positions are in pixels, other offsets and strides in elements.

    0 to 5     image in memory: offset, height, width, strides of rows, pixels and channels (``Pixels.layouts``)
    6 to 9     resized image on its canvas: top, left, height, width
    10 to 13   region on the canvas: top, left, height, width
    14, 15     canvas: height, width
    16         offset of the canvas in the output, in pixels
"""


@triton.jit
def source_lines(pixel, resized_length, source_length):
    """Return which source lines (rows, or columns) output pixels are computed from, along one axis.

    ``pixel``: indices of the output pixels, counted from the start of the resized image. ``resized_length``,
    ``source_length``: number of pixels of the resized image and of the source along the axis.

    Returns:
        (mask of the pixels inside the resized image, nearest line, first line to interpolate, second line to interpolate,
        weight of the second line). Lines are indices in the source image.
    """
    in_resized = (pixel >= 0) & (pixel < resized_length)
    pixel = tl.minimum(tl.maximum(pixel, 0), resized_length - 1)
    nearest = ((2 * pixel + 1).to(tl.int64) * source_length // (2 * resized_length)).to(tl.int32)
    scale = tl.div_rn(source_length.to(tl.float32), resized_length.to(tl.float32))
    centre = (pixel.to(tl.float32) + 0.5) * scale - 0.5
    centre = tl.minimum(tl.maximum(centre, 0.0), (source_length - 1).to(tl.float32))
    first = centre.to(tl.int32)
    return in_resized, nearest, first, tl.minimum(first + 1, source_length - 1), centre - first.to(tl.float32)


@kernel
def tiles_kernel(
    source, tile_table, weights_or_cover, out, blocks, CHANNELS: tl.constexpr, NEAREST: tl.constexpr, MODE: tl.constexpr,
    ROUNDS: tl.constexpr, FILL: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write a block, ``BLOCK_H`` x ``BLOCK_W`` pixels, of the region of one tile.

    ``source``: first tensor of ``Pixels``; the offsets in ``tile_table`` also reach the other tensors. ``weights_or_cover``:
    see ``MODE``. ``out``: canvases, (C, H, W) each. ``blocks``: number of blocks of the largest region.

    Constants:
        NEAREST: Whether to read the nearest pixel instead of interpolating.
        MODE: 0 to replace the canvas; 1 to blend the canvas with the tile, with ``weights_or_cover`` as the weights of the
            canvas, (T,) float32; 2 to replace the pixels of the canvas that are 1 in ``weights_or_cover``, the cover, which has
            one plane, (H, W) uint8, per canvas, one after another.
        CHANNELS: Number of channels.
        ROUNDS: Whether to round interpolated values to integers.
        FILL: Value outside of the resized image. With ``NEAREST``, the value is 0.

    Grid: (tiles · ``blocks``, 1, 1).
    """
    tile = tl.program_id(0) // blocks
    block = tl.program_id(0) - tile * blocks
    row = tile_table + tile * COLUMN_COUNT
    region_h = tl.load(row + 12).to(tl.int32)
    region_w = tl.load(row + 13).to(tl.int32)
    blocks_x = tl.maximum(tl.cdiv(region_w, BLOCK_W), 1)
    block_y = block // blocks_x
    if block_y * BLOCK_H >= region_h:
        return
    y = block_y * BLOCK_H + tl.arange(0, BLOCK_H)
    x = (block - block_y * blocks_x) * BLOCK_W + tl.arange(0, BLOCK_W)
    in_region = (y < region_h)[:, None] & (x < region_w)[None, :]
    # From here on, x and y count from the top left of the canvas.
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
    inside = in_region & inside_y[:, None] & inside_x[None, :]
    row_stride = tl.load(row + 3).to(tl.int32)
    pixel_stride = tl.load(row + 4).to(tl.int32)
    channel_stride = tl.load(row + 5).to(tl.int32)
    image_start = source + tl.load(row)
    canvas_w = tl.load(row + 15).to(tl.int32)
    plane_stride = tl.load(row + 14) * canvas_w
    canvas_offset = y[:, None] * canvas_w + x[None, :]
    canvas_pixel = out + tl.load(row + 16) * CHANNELS + canvas_offset
    if MODE == 2:
        cover = weights_or_cover + tl.load(row + 16) + canvas_offset
        in_region = in_region & (tl.load(cover, mask=in_region, other=0) != 0)
    if NEAREST:
        offset = nearest_y[:, None] * row_stride + nearest_x[None, :] * pixel_stride
    else:
        line_0 = y_0[:, None] * row_stride
        line_1 = y_1[:, None] * row_stride
        column_0 = x_0[None, :] * pixel_stride
        column_1 = x_1[None, :] * pixel_stride
        offset_00, offset_01 = line_0 + column_0, line_0 + column_1
        offset_10, offset_11 = line_1 + column_0, line_1 + column_1
    for channel in tl.static_range(CHANNELS):
        address = image_start + channel * channel_stride
        if NEAREST:
            value = tl.load(address + offset, mask=inside, other=0)
        else:
            v_00 = tl.load(address + offset_00, mask=inside).to(tl.float32)
            v_01 = tl.load(address + offset_01, mask=inside).to(tl.float32)
            v_10 = tl.load(address + offset_10, mask=inside).to(tl.float32)
            v_11 = tl.load(address + offset_11, mask=inside).to(tl.float32)
            v_0 = v_00 + (v_01 - v_00) * weight_x[None, :]
            v_1 = v_10 + (v_11 - v_10) * weight_x[None, :]
            value = tl.where(inside, v_0 + (v_1 - v_0) * weight_y[:, None], FILL)
            if MODE == 1:
                weight = tl.load(weights_or_cover + tile)
                value = weight * tl.load(canvas_pixel, mask=in_region, other=0).to(tl.float32) + (1.0 - weight) * value
            if ROUNDS:
                value = nearest_integer(value).to(tl.int32)
        tl.store(canvas_pixel, value.to(out.dtype.element_ty), mask=in_region)
        canvas_pixel += plane_stride


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
    """Write tiles to canvases, on the current stream. See ``gpuaug.fusion.backends.tiles.write_tiles`` for the arguments."""
    # Columns of ``tiles``, (T, 12): resized image, region (6 and 7: height and width), canvas, 11: index of the image.
    layouts = pixels.layouts.take(tiles[:, 11], 0)
    first_tensor = pixels.tensors[0]
    # The kernel has the address of the first tensor only, and reads the others by their distance from it, in elements.
    distances = np.array([(tensor.data_ptr() - first_tensor.data_ptr()) // first_tensor.itemsize for tensor in pixels.tensors])
    layouts[:, 0] += distances[layouts[:, -1]]  # the last column is the index of the tensor
    tile_table = np.concatenate((layouts[:, :6], tiles[:, :11]), 1)
    blocks_y, blocks_x = (-(-tiles[:, 6 + axis] // BLOCK[axis]) for axis in (0, 1))
    most_blocks = int((blocks_y * blocks_x).max())
    write_mode = 2 if cover is not None else int(weights is not None)
    constants = pixels.channels, nearest, write_mode, not out.dtype.is_floating_point, fill, *BLOCK
    with on_device(out.device):
        device_table, *device_weights = send((tile_table,) if weights is None else (tile_table, weights), out.device)
        launch = launch_for(tiles_kernel, (out.dtype,), constants)
        # The table stands in for weights or a cover that the kernel does not read.
        weights_or_cover = cover if cover is not None else (*device_weights, device_table)[0]
        launch((first_tensor, device_table, weights_or_cover, out), (most_blocks * len(tile_table), 1, 1), (most_blocks,))


@kernel
def cover_kernel(masks, mask_table, canvas_table, cover, blocks, BLOCK: tl.constexpr):
    """Write ``BLOCK`` pixels of the cover of one canvas.

    ``masks``: masks of all objects, one after another. ``mask_table``: one row per mask, (n, 5) int64: offset in ``masks``,
    offset of its canvas in ``cover``, number of pixels, width, role. ``canvas_table``: one row per canvas, (M, 4) int64: index
    of its first mask, index after its last mask, number of pixels, offset in ``cover``. ``cover``: covers of all canvases, flat
    uint8. ``blocks``: number of thread blocks of the largest canvas.

    Grid: (canvases · ``blocks``, 1, 1).
    """
    canvas_index = tl.program_id(0) // blocks
    canvas_row = canvas_table + canvas_index * 4
    mask_index = tl.load(canvas_row).to(tl.int32)
    end_mask = tl.load(canvas_row + 1).to(tl.int32)
    pixel_index = (tl.program_id(0) - canvas_index * blocks) * BLOCK + tl.arange(0, BLOCK)
    in_canvas = pixel_index < tl.load(canvas_row + 2)
    covered = tl.zeros((BLOCK,), tl.int32)
    while mask_index < end_mask:
        mask_row = mask_table + mask_index * 5
        is_above = tl.load(mask_row + 4) == ABOVE_ROLE
        pixels = tl.load(masks + tl.load(mask_row) + pixel_index, mask=in_canvas & is_above, other=0)
        covered = covered | (pixels != 0).to(tl.int32)
        mask_index += 1
    tl.store(cover + tl.load(canvas_row + 3) + pixel_index, covered.to(tl.uint8), mask=in_canvas)


@kernel
def cut_kernel(masks, mask_table, cover, statistics, blocks, BLOCK: tl.constexpr):
    """Cut the pasted objects out of ``BLOCK`` pixels of one mask, and add these pixels to the statistics of the mask.

    ``masks``, ``mask_table``, ``cover``, ``blocks``: as in ``cover_kernel``. ``statistics``: (n, 6) int32: per mask the pixels
    before the cut, the pixels after it, their smallest row and column, and their largest row and column.

    Grid: (masks · ``blocks``, 1, 1).
    """
    mask_index = tl.program_id(0) // blocks
    mask_row = mask_table + mask_index * 5
    pixel_index = (tl.program_id(0) - mask_index * blocks) * BLOCK + tl.arange(0, BLOCK)
    in_mask = pixel_index < tl.load(mask_row + 2)
    width = tl.load(mask_row + 3).to(tl.int32)
    role = tl.load(mask_row + 4).to(tl.int32)
    address = masks + tl.load(mask_row) + pixel_index
    pixels = tl.load(address, mask=in_mask, other=0)
    before = (pixels != 0).to(tl.int32)
    covered = tl.load(cover + tl.load(mask_row + 1) + pixel_index, mask=in_mask, other=0).to(tl.int32)
    after = tl.where(role == ABOVE_ROLE, before, tl.where((role == BELOW_ROLE) & (covered == 0), before, 0))
    tl.store(address, tl.where(after != 0, pixels, 0).to(masks.dtype.element_ty), mask=in_mask)
    y = pixel_index // width
    x = pixel_index - y * width
    mask_statistics = statistics + mask_index * 6
    tl.atomic_add(mask_statistics, tl.sum(before.to(tl.float32), 0).to(tl.int32))
    tl.atomic_add(mask_statistics + 1, tl.sum(after.to(tl.float32), 0).to(tl.int32))
    tl.atomic_min(mask_statistics + 2, tl.min(tl.where(after != 0, y, MOST_PIXELS), 0))
    tl.atomic_min(mask_statistics + 3, tl.min(tl.where(after != 0, x, MOST_PIXELS), 0))
    tl.atomic_max(mask_statistics + 4, tl.max(tl.where(after != 0, y, -1), 0))
    tl.atomic_max(mask_statistics + 5, tl.max(tl.where(after != 0, x, -1), 0))


def paste_objects(
    masks: Tensor, canvases: NDArray[np.int64], roles: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    """Cut pasted objects out of the masks below them, as ``gpuaug.fusion.backends.tiles.paste_objects`` does."""
    areas = sizes.prod(1)
    offsets = areas.cumsum() - areas
    mask_areas = areas[canvases]
    mask_table = np.column_stack((mask_areas.cumsum() - mask_areas, offsets[canvases], mask_areas, sizes[canvases, 1], roles))
    mask_ranges = (np.searchsorted(canvases, np.arange(len(areas)), side) for side in ("left", "right"))
    most_blocks = -(-int(areas.max()) // MASK_BLOCK)
    with on_device(masks.device):
        mask_rows, canvas_rows = send((mask_table, np.column_stack((*mask_ranges, areas, offsets))), masks.device)
        cover = torch.empty(int(areas.sum()), dtype=torch.uint8, device=masks.device)
        statistics = torch.zeros(len(roles), 6, dtype=torch.int32, device=masks.device)
        statistics[:, 2:4] = MOST_PIXELS.value
        cover_launch = launch_for(cover_kernel, (masks.dtype,), (MASK_BLOCK,))
        cover_launch((masks, mask_rows, canvas_rows, cover), (most_blocks * len(areas), 1, 1), (most_blocks,))
        cut_launch = launch_for(cut_kernel, (masks.dtype,), (MASK_BLOCK,))
        cut_launch((masks, mask_rows, cover, statistics), (most_blocks * len(roles), 1, 1), (most_blocks,))
    return cover, statistics
