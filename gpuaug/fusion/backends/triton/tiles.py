"""Triton kernels that compose images: one writes tiles to canvases, two cut pasted objects out of the masks below them.

A *tile* places one resized image on a *canvas*, an image that consists of tiles, or that objects are pasted on. The *region* of
the tile is the rectangle of the canvas that the image is written to. Regions are divided into *blocks*. A thread block writes
several of them.

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

BLOCK = (4, 32)
"""(height, width) of a block in pixels. A thread block is one warp, and a thread computes a column of the block."""

BLOCKS_PER_THREAD_BLOCK = 4
"""Mean number of blocks that a thread block writes.

With 1, mosaics take 1.15 times as long, because the start of a thread block takes time, and with 8 as long (64 mosaics of 640
pixels, uint8, float16 and ragged; H200, 2026-12-01).
"""

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
def source_lines(pixel, resized_length, source_length, NEAREST: tl.constexpr):
    """Return which source lines (rows, or columns) output pixels are computed from, along one axis.

    ``pixel``: indices of the output pixels, counted from the start of the resized image. ``resized_length``,
    ``source_length``: number of pixels of the resized image and of the source along the axis. ``NEAREST``: whether the first
    line is the nearest one; otherwise it is the first one to interpolate.

    Returns:
        (mask of the pixels inside the resized image, first line, second line to interpolate, weight of the second line). Lines
        are indices in the source image.
    """
    clamped = tl.minimum(tl.maximum(pixel, 0), resized_length - 1)
    scale = tl.div_rn(source_length.to(tl.float32), resized_length.to(tl.float32))
    centre = (clamped.to(tl.float32) + 0.5) * scale - 0.5
    centre = tl.minimum(tl.maximum(centre, 0.0), (source_length - 1).to(tl.float32))
    if NEAREST:
        first = ((2 * clamped + 1).to(tl.int64) * source_length // (2 * resized_length)).to(tl.int32)
    else:
        first = centre.to(tl.int32)
    return pixel == clamped, (first, tl.minimum(first + 1, source_length - 1), centre - first.to(tl.float32))


@triton.jit
def write_block(
    image, strides, lines_y, lines_x, inside, canvas, plane_stride, in_region, canvas_weight,
    CHANNELS: tl.constexpr, INTERPOLATES: tl.constexpr, BLENDS: tl.constexpr, ROUNDS: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Write the pixels of a block.

    ``image``: address of the first element of the image. ``strides``: strides of its rows, pixels and channels. ``lines_y``,
    ``lines_x``: (first line, second line, weight of the second line). ``inside``: mask of the pixels inside the resized image;
    the others become ``FILL``. ``canvas``: addresses of the pixels in the first channel of the canvas. ``plane_stride``: stride
    of the channels of the canvas. ``in_region``: mask of the pixels to write. ``canvas_weight``: weight of the canvas if
    ``BLENDS``. ``INTERPOLATES``: whether to interpolate lines; otherwise the pixels of the first lines are copied.
    """
    row_stride, pixel_stride, channel_stride = strides
    y_0, y_1, weight_y = lines_y
    x_0, x_1, weight_x = lines_x
    # For pixels outside of the resized image, the nearest pixel is read, because loads with a mask take more instructions. The
    # nearest pixel is in memory, also if only a window is: it lies in the region, which overlaps the resized image.
    address_00 = image + x_0[:, None] * pixel_stride + y_0[None, :] * row_stride
    address_01 = image + x_1[:, None] * pixel_stride + y_0[None, :] * row_stride
    address_10 = image + x_0[:, None] * pixel_stride + y_1[None, :] * row_stride
    address_11 = image + x_1[:, None] * pixel_stride + y_1[None, :] * row_stride
    values = ()
    for channel in tl.static_range(CHANNELS):
        offset = channel * channel_stride
        value = tl.load(address_00 + offset)
        if INTERPOLATES:
            v_00 = value.to(tl.float32)
            v_10 = tl.load(address_10 + offset).to(tl.float32)
            v_0 = v_00 + (tl.load(address_01 + offset).to(tl.float32) - v_00) * weight_x[:, None]
            v_1 = v_10 + (tl.load(address_11 + offset).to(tl.float32) - v_10) * weight_x[:, None]
            value = v_0 + (v_1 - v_0) * weight_y[None, :]
        values += (tl.where(inside, value, tl.cast(FILL, value.dtype)),)
    # The loads of a channel would wait for the stores of the preceding channel if these came first.
    for channel in tl.static_range(CHANNELS):
        value = values[channel]
        if BLENDS:
            value = canvas_weight * tl.load(canvas, mask=in_region, other=0).to(tl.float32) + (1.0 - canvas_weight) * value
        if ROUNDS and (INTERPOLATES or BLENDS):
            value = nearest_integer(value).to(tl.int32)
        tl.store(canvas, value.to(canvas.dtype.element_ty), mask=in_region)
        canvas += plane_stride


@kernel
def tiles_kernel(
    source, tile_table, weights_or_cover, out, thread_blocks, CHANNELS: tl.constexpr, NEAREST: tl.constexpr, MODE: tl.constexpr,
    ROUNDS: tl.constexpr, FILL: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write every n-th block of the region of one tile, where n is ``thread_blocks``.

    ``source``: first tensor of ``Pixels``; the offsets in ``tile_table`` also reach the other tensors. ``weights_or_cover``:
    see ``MODE``. ``out``: canvases, (C, H, W) each. ``thread_blocks``: number of thread blocks per tile.

    Constants:
        NEAREST: Whether to read the nearest pixel instead of interpolating.
        MODE: 0 to replace the canvas; 1 to blend the canvas with the tile, with ``weights_or_cover`` as the weights of the
            canvas, (T,) float32; 2 to replace the pixels of the canvas that are 1 in ``weights_or_cover``, the cover, which has
            one plane, (H, W) uint8, per canvas, one after another.
        CHANNELS: Number of channels.
        ROUNDS: Whether to round interpolated values to integers.
        FILL: Value outside of the resized image.

    Grid: (tiles · ``thread_blocks``, 1, 1).
    """
    tile = tl.program_id(0) // thread_blocks
    block = tl.program_id(0) - tile * thread_blocks
    row = tile_table + tile * COLUMN_COUNT
    resized_top = tl.load(row + 6).to(tl.int32)
    resized_left = tl.load(row + 7).to(tl.int32)
    resized_h = tl.load(row + 8).to(tl.int32)
    resized_w = tl.load(row + 9).to(tl.int32)
    region_top = tl.load(row + 10).to(tl.int32)
    region_left = tl.load(row + 11).to(tl.int32)
    region_h = tl.load(row + 12).to(tl.int32)
    region_w = tl.load(row + 13).to(tl.int32)
    height = tl.load(row + 1).to(tl.int32)
    width = tl.load(row + 2).to(tl.int32)
    strides = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32)
    image = source + tl.load(row)
    canvas_w = tl.load(row + 15).to(tl.int32)
    plane_stride = tl.load(row + 14) * canvas_w
    canvas_start = tl.load(row + 16)
    canvas = out + canvas_start * CHANNELS
    canvas_weight = tl.load(weights_or_cover + tile) if MODE == 1 else 0.0
    blocks_x = tl.cdiv(region_w, BLOCK_W)
    block_count = tl.cdiv(region_h, BLOCK_H) * blocks_x
    while block < block_count:
        block_y = block // blocks_x
        y = block_y * BLOCK_H + tl.arange(0, BLOCK_H)
        x = (block - block_y * blocks_x) * BLOCK_W + tl.arange(0, BLOCK_W)
        in_region = (x < region_w)[:, None] & (y < region_h)[None, :]
        # From here on, x and y count from the top left of the canvas.
        y = tl.minimum(y, region_h - 1) + region_top
        x = tl.minimum(x, region_w - 1) + region_left
        # x is the first axis, because the compiler gives neighbouring elements along it to neighbouring threads.
        canvas_offset = x[:, None] + y[None, :] * canvas_w
        if MODE == 2:
            in_region = in_region & (tl.load(weights_or_cover + canvas_start + canvas_offset) != 0)
        inside_y, lines_y = source_lines(y - resized_top, resized_h, height, NEAREST)
        inside_x, lines_x = source_lines(x - resized_left, resized_w, width, NEAREST)
        inside = inside_x[:, None] & inside_y[None, :]
        copies = NEAREST or (resized_h == height and resized_w == width)
        if copies:
            write_block(
                image, strides, lines_y, lines_x, inside, canvas + canvas_offset, plane_stride, in_region, canvas_weight,
                CHANNELS, False, MODE == 1, ROUNDS, FILL,
            )  # fmt: skip
        else:
            write_block(
                image, strides, lines_y, lines_x, inside, canvas + canvas_offset, plane_stride, in_region, canvas_weight,
                CHANNELS, True, MODE == 1, ROUNDS, FILL,
            )  # fmt: skip
        block += thread_blocks


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
    mean_area = int(tiles[:, 6] @ tiles[:, 7]) // len(tiles)  # of regions, in pixels
    thread_blocks = mean_area // (BLOCKS_PER_THREAD_BLOCK * BLOCK[0] * BLOCK[1]) + 1
    write_mode = 2 if cover is not None else int(weights is not None)
    constants = pixels.channels, nearest, write_mode, not out.dtype.is_floating_point, fill, *BLOCK
    with on_device(out.device):
        device_table, *device_weights = send((tile_table,) if weights is None else (tile_table, weights), out.device)
        launch = launch_for(tiles_kernel, (out.dtype,), constants, num_warps=1)
        # The table stands in for weights or a cover that the kernel does not read.
        weights_or_cover = cover if cover is not None else (*device_weights, device_table)[0]
        launch((first_tensor, device_table, weights_or_cover, out), (thread_blocks * len(tile_table), 1, 1), (thread_blocks,))


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
