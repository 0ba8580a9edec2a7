"""Triton kernel of a gather of masks."""

import triton
import triton.language as tl

from gpuaug.fusion.backends.triton.gather import STRIDES
from gpuaug.fusion.backends.triton.pixel_math import tile_pixels
from gpuaug.fusion.backends.triton.taps import half_to_even, map_index, source_coordinates, tap_axis

TENSORS = ("source", "out", "rows", "owners", "samples")
SIZES = ("first", "before_fill", "after_fill", "out_height", "out_width", "tiles_x", "row_stride")


@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=TENSORS)
def mask_kernel(
    source, out, rows, owners, samples, first, before_fill, after_fill, out_height, out_width, tiles_x, row_stride,
    source_b, source_c, source_h, out_b, out_c, out_h,
    FLAT: tl.constexpr, FRAMES: tl.constexpr, SOURCE_W: tl.constexpr, KIND: tl.constexpr, HALF_PIXEL: tl.constexpr,
    ZEROS: tl.constexpr, AFTER: tl.constexpr, WARP_AT: tl.constexpr, BEFORE: tl.constexpr, SIDES: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Gather the nearest pixel of masks, bit for bit.

    Constants, in addition to the constants of ``gather_kernel``:
        FLAT: Whether masks differ in size. They then lie where ``owners`` and ``samples`` say, from ``source`` on: see
            ``MaskLayout``. Otherwise a row of the table serves the masks of ``FRAMES`` frames.

    Grid: (tiles per image, masks from ``first`` on, planes).
    """
    tile = tl.program_id(0)
    mask = first + tl.program_id(1)
    plane = tl.program_id(2)
    sample = tl.load(owners + mask) if FLAT else mask // FRAMES
    layout = samples + sample * 3
    row = rows + sample * row_stride
    before = row + BEFORE[1]
    target_x, target_y = tile_pixels((tile % tiles_x) * TILE[1], (tile // tiles_x) * TILE[0], TILE[0], TILE[1], False)
    height = tl.load(row + SIDES).to(tl.int32) if SIDES >= 0 else out_height
    width = tl.load(row + SIDES + 1).to(tl.int32) if SIDES >= 0 else out_width
    in_bounds = (target_x < width) & (target_y < height)
    x = tl.minimum(target_x, width - 1)
    y = tl.minimum(target_y, height - 1)
    inside_x = x == x
    inside_y = y == y
    if AFTER[0] > 0:
        x, inside_x = map_index(x, row + AFTER[1], 0, AFTER[0])
        y, inside_y = map_index(y, row + AFTER[1], 1, AFTER[0])
    if KIND == 0:
        in_window = (x == x) & (y == y)
        not_padding = in_window
        if BEFORE[0] > 0:
            x, not_padding_x = map_index(x, before, 0, BEFORE[0])
            y, not_padding_y = map_index(y, before, 1, BEFORE[0])
            not_padding = not_padding_x & not_padding_y
    else:
        at_x, at_y, start_x, count_x, start_y, count_y = source_coordinates(x, y, row + WARP_AT, KIND, HALF_PIXEL, True)
        if KIND == 1:
            left = tl.floor(at_x).to(tl.int32)
            top = tl.floor(at_y).to(tl.int32)
        else:
            left = half_to_even(at_x)
            top = half_to_even(at_y)
        x, in_window_x, not_padding_x = tap_axis(left, start_x, count_x, before, 0, ZEROS, BEFORE[0])
        y, in_window_y, not_padding_y = tap_axis(top, start_y, count_y, before, 1, ZEROS, BEFORE[0])
        in_window = in_window_x & in_window_y
        not_padding = not_padding_x & not_padding_y
    if FLAT:
        source_width = tl.load(layout + 2)
        pointer = source + tl.load(layout) + mask * tl.load(layout + 1) * source_width + y * source_width + x
    else:
        pointer = source + mask.to(tl.int64) * source_b + plane * source_c + y * source_h + x * SOURCE_W
    value = tl.load(pointer, mask=in_bounds & in_window, other=0)
    if BEFORE[0] == 2:
        value = tl.where(in_window & (not_padding == 0), before_fill.to(value.dtype), value)
    if AFTER[0] == 2:
        value = tl.where(inside_x & inside_y, value, after_fill.to(value.dtype))
    target = out + mask.to(tl.int64) * out_b + plane * out_c + target_y * out_h + target_x
    tl.store(target, value, mask=in_bounds)
