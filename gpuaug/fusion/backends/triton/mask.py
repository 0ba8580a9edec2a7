"""Triton kernel that moves the pixels of masks, as ``gather_kernel`` in ``gather.py`` moves the pixels of images."""

import triton.language as tl

from gpuaug.fusion.backends.triton.launch import kernel
from gpuaug.fusion.backends.triton.pixel_math import tile_pixels
from gpuaug.fusion.backends.triton.taps import map_index, nearest_index, source_coordinates, tap_axis


@kernel
def mask_kernel(
    source, out, param_table, owners, mask_layouts, first_mask, before_fill, warp_fill, after_fill, out_height, out_width,
    tiles_across, row_stride,
    source_b, source_c, source_h, out_b, out_c, out_h,
    RAGGED: tl.constexpr, FRAMES: tl.constexpr, SOURCE_W: tl.constexpr, INTERPOLATION: tl.constexpr, HALF_PIXEL: tl.constexpr,
    ZEROS: tl.constexpr, MAP_AFTER: tl.constexpr, WARP_COLUMN: tl.constexpr, MAP_BEFORE: tl.constexpr,
    OUT_SIZE_COLUMN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy the nearest pixel of masks to each output pixel, bit for bit.

    Tensors, by their address:
        source: Masks, (N, C, height, width), as integers of the item size of their dtype.
        out: Output masks, (N, C, ``out_height``, ``out_width``), of the same dtype.
        param_table: Parameter table, one row of ``row_stride`` elements per sample.
        owners: With ``RAGGED``, index of the sample, that is, the row of the table, of each mask.
        mask_layouts: With ``RAGGED``, (offset from ``source``, height, width) of each mask, which is contiguous.

    Integers, in addition to sizes and strides:
        first_mask: Index of the first mask of this launch.
        before_fill, after_fill: Bits of the fill of the index maps before and after the interpolation.
        warp_fill: Bits of the fill outside the source in a warp.
        tiles_across: Number of tiles of an output mask along x.

    Constants, in addition to the constants of ``gather_kernel``:
        RAGGED: Whether masks differ in size.
        FRAMES: Masks per row of the table, without ``RAGGED``.

    Grid: (tiles per image, masks from ``first_mask`` on, planes).
    """
    tile = tl.program_id(0)
    mask = first_mask + tl.program_id(1)
    plane = tl.program_id(2)
    sample = tl.load(owners + mask) if RAGGED else mask // FRAMES
    row = param_table + sample * row_stride
    map_before = row + MAP_BEFORE[1]
    out_x, out_y = tile_pixels((tile % tiles_across) * TILE[1], (tile // tiles_across) * TILE[0], TILE[0], TILE[1], False)
    height = tl.load(row + OUT_SIZE_COLUMN).to(tl.int32) if OUT_SIZE_COLUMN >= 0 else out_height
    width = tl.load(row + OUT_SIZE_COLUMN + 1).to(tl.int32) if OUT_SIZE_COLUMN >= 0 else out_width
    in_bounds = (out_x < width) & (out_y < height)
    x = tl.minimum(out_x, width - 1)
    y = tl.minimum(out_y, height - 1)
    inside_x = x == x  # true, in the shape of x
    inside_y = y == y
    if MAP_AFTER[0] > 0:
        x, inside_x = map_index(x, row + MAP_AFTER[1], 0, MAP_AFTER[0])
        y, inside_y = map_index(y, row + MAP_AFTER[1], 1, MAP_AFTER[0])
    # The window without an interpolation: all pixels that an output pixel may copy.
    start_x = 0
    start_y = 0
    count_x = 2**30
    count_y = 2**30
    if INTERPOLATION > 0:
        source_x, source_y, start_x, count_x, start_y, count_y = source_coordinates(
            x, y, row + WARP_COLUMN, INTERPOLATION, HALF_PIXEL, True
        )
        x = nearest_index(source_x, INTERPOLATION)
        y = nearest_index(source_y, INTERPOLATION)
    x, in_window_x, not_padding_x = tap_axis(x, start_x, count_x, map_before, 0, ZEROS, MAP_BEFORE[0])
    y, in_window_y, not_padding_y = tap_axis(y, start_y, count_y, map_before, 1, ZEROS, MAP_BEFORE[0])
    in_window = in_window_x & in_window_y
    not_padding = not_padding_x & not_padding_y
    if RAGGED:
        mask_layout = mask_layouts + mask * 3
        source_pixel = source + tl.load(mask_layout) + y * tl.load(mask_layout + 2) + x
    else:
        source_pixel = source + mask.to(tl.int64) * source_b + plane * source_c + y * source_h + x * SOURCE_W
    value = tl.load(source_pixel, mask=in_bounds & in_window, other=0)
    value = tl.where(in_window, value, warp_fill.to(value.dtype))
    if MAP_BEFORE[0] == 2:
        value = tl.where(in_window & (not_padding == 0), before_fill.to(value.dtype), value)
    if MAP_AFTER[0] == 2:
        value = tl.where(inside_x & inside_y, value, after_fill.to(value.dtype))
    out_pixel = out + mask.to(tl.int64) * out_b + plane * out_c + out_y * out_h + out_x
    tl.store(out_pixel, value, mask=in_bounds)
