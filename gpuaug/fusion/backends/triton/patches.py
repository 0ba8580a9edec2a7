"""Triton kernel that resizes ragged images with an antialiasing filter, and writes them as patches.

A block computes a tile of a region, the part of a resized image that is written. For each source line of the tile it sums the
pixels of the line along x, and adds the sums to the lines of the tile, with the weights of the source line along y.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.core.ragged import Ragged
from gpuaug.fusion.backends.patches import Arrangement, Resampling
from gpuaug.fusion.backends.readers import send
from gpuaug.fusion.backends.triton.launch import kernel, launch_for, on_device
from gpuaug.fusion.backends.triton.taps import filter_weight, half_to_even

TILE = (8, 32)
"""(height, width) of the tile of a block, which is one warp: a thread computes a column.

Higher tiles need more registers: with 16 lines a batch takes 1.8 times as long (64 photographs, Qwen2-VL, H200, 2026-11-29).
"""

COLUMN_COUNT = tl.constexpr(10)
"""Columns of ``Arrangement.rows``."""


@triton.jit
def source_range(pixel, resized, count, FILTER: tl.constexpr):
    """Return (first source pixel, first after the last, distance, shrink) of pixels of the resized image, along one axis.

    The weight of source pixel ``first + i`` is ``filter_weight((i + distance + 0.5) * shrink)``, as in PyTorch's
    ``upsample_gen2d_aa_out_frame``, rounding by rounding. ``resized``, ``count``: sides of the resized image and the source.
    """
    scale = tl.div_rn(count.to(tl.float32), resized.to(tl.float32))
    # A product that is rounded before it is subtracted below: the compiler fuses other products and sums.
    centre = tl.fma(scale, pixel.to(tl.float32) + 0.5, 0.0)
    support = tl.maximum(scale, 1.0) * FILTER
    first = tl.maximum((centre - support + 0.5).to(tl.int32), 0)
    end = tl.minimum((centre + support + 0.5).to(tl.int32), count)
    return first, end, first.to(tl.float32) - centre, tl.minimum(tl.div_rn(1.0, scale), 1.0)


@triton.jit
def tap_weight(tap, first, end, distance, shrink, FILTER: tl.constexpr):
    """Return whether source pixel ``first + tap`` is in ``source_range``, and its weight."""
    is_tap = first + tap < end
    return is_tap, tl.where(is_tap, filter_weight((tap + distance + 0.5) * shrink, FILTER), 0.0)


@triton.jit
def store_channel(total, channel, inverse, is_inside, levels, out, mask, strides, ROUNDS: tl.constexpr, REPEATS: tl.constexpr):
    """Store one channel of a tile, with the mask ``mask``.

    ``total``: weighted sums. ``inverse``: inverse sums of the weights. ``is_inside``: mask of the pixels in the resized image.
    ``strides``: distances between channels, and between copies of a channel.
    """
    channel_stride, repeat_stride = strides
    level = tl.where(is_inside, total * inverse, 0.0)
    table = levels + channel * 256
    if ROUNDS:
        level = half_to_even(tl.minimum(tl.maximum(level, 0.0), 255.0))
        value = tl.load(table + level)
    else:
        first = tl.load(table)
        value = first + level * tl.div_rn(tl.load(table + 255) - first, 255.0)
    for repeat in tl.static_range(REPEATS):
        address = out + channel * channel_stride + repeat * repeat_stride
        tl.store(address, value.to(out.dtype.element_ty), mask=mask)


@kernel
def patches_kernel(
    source, rows, levels, out, patch_h, patch_w, merge, patch_stride, y_stride, x_stride, channel_stride, repeat_stride,
    PLANAR: tl.constexpr, CUBIC: tl.constexpr, ROUNDS: tl.constexpr, REPEATS: tl.constexpr,
    TILE_H: tl.constexpr, TILE_W: tl.constexpr,
):  # fmt: skip
    """Write a tile of one image.

    ``source``: bytes of the images. ``rows``: ``Arrangement.rows``. ``levels``: ``Resampling.levels``. The integers are the
    fields of ``PatchOrder``.

    Constants:
        PLANAR: Whether each channel of an image is a plane; otherwise the channels of a pixel are adjacent.
        CUBIC, ROUNDS: Fields of ``Resampling``.
        REPEATS: ``PatchOrder.repeats``.

    Grid: (tiles of the largest region, images, 1).
    """
    row = rows + tl.program_id(1) * COLUMN_COUNT
    region_h = tl.load(row + 8).to(tl.int32)
    region_w = tl.load(row + 9).to(tl.int32)
    tiles_x = tl.cdiv(region_w, TILE_W)
    tile_y = tl.program_id(0) // tiles_x
    if tile_y * TILE_H >= region_h:
        return
    height = tl.load(row + 1).to(tl.int32)
    width = tl.load(row + 2).to(tl.int32)
    resized_h = tl.load(row + 4).to(tl.int32)
    resized_w = tl.load(row + 5).to(tl.int32)
    y = tile_y * TILE_H + tl.arange(0, TILE_H)
    x = (tl.program_id(0) - tile_y * tiles_x) * TILE_W + tl.arange(0, TILE_W)
    resized_y = tl.minimum(y, region_h - 1) + tl.load(row + 6).to(tl.int32)
    resized_x = tl.minimum(x, region_w - 1) + tl.load(row + 7).to(tl.int32)
    is_inside = ((resized_y >= 0) & (resized_y < resized_h))[:, None] & ((resized_x >= 0) & (resized_x < resized_w))[None, :]
    resized_y = tl.minimum(tl.maximum(resized_y, 0), resized_h - 1)
    resized_x = tl.minimum(tl.maximum(resized_x, 0), resized_w - 1)
    FILTER: tl.constexpr = 2 if CUBIC else 1  # radius of the filter
    first_y, end_y, distance_y, shrink_y = source_range(resized_y, resized_h, height, FILTER)
    first_x, end_x, distance_x, shrink_x = source_range(resized_x, resized_w, width, FILTER)
    line = tl.min(first_y, 0)
    end = tl.max(end_y, 0)
    taps = tl.max(end_x - first_x, 0)
    pixel_stride = 1 if PLANAR else 3
    plane_stride = height * width if PLANAR else 1
    pixels = source + tl.load(row)
    r = tl.zeros((TILE_H, TILE_W), tl.float32)
    g = tl.zeros((TILE_H, TILE_W), tl.float32)
    b = tl.zeros((TILE_H, TILE_W), tl.float32)
    total_y = tl.zeros((TILE_H,), tl.float32)
    total_x = tl.zeros((TILE_W,), tl.float32)
    tap = 0
    while tap < taps:
        _, weight_x = tap_weight(tap, first_x, end_x, distance_x, shrink_x, FILTER)
        total_x += weight_x
        tap += 1
    while line < end:
        weight_y = filter_weight(((line - first_y).to(tl.float32) + distance_y + 0.5) * shrink_y, FILTER)
        total_y += weight_y
        address = pixels + (line * width + first_x) * pixel_stride
        line_r = tl.zeros((TILE_W,), tl.float32)
        line_g = tl.zeros((TILE_W,), tl.float32)
        line_b = tl.zeros((TILE_W,), tl.float32)
        tap = 0
        while tap < taps:
            is_tap, weight = tap_weight(tap, first_x, end_x, distance_x, shrink_x, FILTER)
            line_r += weight * tl.load(address, mask=is_tap, other=0).to(tl.float32)
            line_g += weight * tl.load(address + plane_stride, mask=is_tap, other=0).to(tl.float32)
            line_b += weight * tl.load(address + 2 * plane_stride, mask=is_tap, other=0).to(tl.float32)
            address += pixel_stride
            tap += 1
        r += weight_y[:, None] * line_r[None, :]
        g += weight_y[:, None] * line_g[None, :]
        b += weight_y[:, None] * line_b[None, :]
        line += 1
    inverse = tl.div_rn(1.0, total_y)[:, None] * tl.div_rn(1.0, total_x)[None, :]
    mask = (y < region_h)[:, None] & (x < region_w)[None, :]
    patch_y = y // patch_h
    patch_x = x // patch_w
    group_row = region_w // patch_w * merge * patch_stride
    position_y = patch_y // merge * group_row + patch_y % merge * merge * patch_stride + (y - patch_y * patch_h) * y_stride
    position_x = (patch_x // merge * merge * merge + patch_x % merge) * patch_stride + (x - patch_x * patch_w) * x_stride
    address = out + tl.load(row + 3) + position_y[:, None] + position_x[None, :]
    strides = channel_stride, repeat_stride
    store_channel(r, 0, inverse, is_inside, levels, address, mask, strides, ROUNDS, REPEATS)
    store_channel(g, 1, inverse, is_inside, levels, address, mask, strides, ROUNDS, REPEATS)
    store_channel(b, 2, inverse, is_inside, levels, address, mask, strides, ROUNDS, REPEATS)


def write_patches(images: Ragged, arrangement: Arrangement, resampling: Resampling, dtype: torch.dtype) -> list[Tensor]:
    """Resize images and write them as patches on the current stream. See ``gpuaug.fusion.backends.patches.write_patches``.

    Cost:
        One launch, and one asynchronous copy from pinned memory. A fill with zeros if the output is padded.
    """
    with on_device(images.device):
        rows, *others = send((arrangement.rows, *arrangement.others), images.device)
        out = arrangement.allocate(dtype, images.device)
        tiles = int((-(-arrangement.rows[:, 8:10] // TILE)).prod(1).max())
        *strides, repeats = arrangement.order
        constants = images.shapes.layout == "chw", resampling.cubic, resampling.rounds, repeats, *TILE
        launch = launch_for(patches_kernel, (dtype,), constants, warps=1)
        launch((images.data, rows, resampling.levels_on(images.device, dtype), out), (tiles, len(rows), 1), strides)
    return [out, *others]
