"""Triton kernel that resizes images of bytes, of different sizes, with an antialiasing filter, and writes them as patches.

A *region* is the part of a resized image that is written. A thread block computes tiles of a region, one after another. For
each source line that a tile depends on, it sums the pixels of the line along x, weighted by the filter, and adds the sums to
the lines of the tile, with the weights of the source line along y. The resized pixels, *levels* in [0, 255], are mapped to
values, such as normalized numbers (``Resampling.levels``), and stored in the order of patches (``PatchOrder``).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.core.ragged import Ragged
from gpuaug.fusion.backends.patches import Arrangement, Resampling
from gpuaug.fusion.backends.readers import send
from gpuaug.fusion.backends.triton.launch import kernel, launch_for, on_device
from gpuaug.fusion.backends.triton.pixel_math import nearest_integer
from gpuaug.fusion.backends.triton.taps import filter_weight

TILE = (4, 32)
"""(height, width) of a tile. A block is one warp, and a thread computes a column of the tile.

Larger tiles read fewer lines twice, but need more registers, so that fewer blocks run at once. With (8, 32) a batch takes 1.1
to 1.4 times as long, with (2, 64) 1.1 to 1.5 times (64 photographs; Qwen2-VL, SigLIP2 and CLIP; H200, 2026-12-01).
"""

COLUMN_COUNT = tl.constexpr(10)
"""Number of columns of ``Arrangement.regions``."""


@triton.jit
def source_range(pixel, resized_length, source_length, FILTER: tl.constexpr):
    """Return the source pixels that pixels of the resized image depend on, along one axis: (first, end, distance, shrink).

    The pixels are [first, end). The weight of source pixel ``first + i`` is ``filter_weight((i + distance + 0.5) * shrink)``,
    as in PyTorch's ``upsample_gen2d_aa_out_frame``, rounding by rounding.

    ``pixel``: indices in the resized image. ``resized_length``, ``source_length``: number of pixels of the resized image and of
    the source along the axis.
    """
    scale = tl.div_rn(source_length.to(tl.float32), resized_length.to(tl.float32))
    # ``fma`` with 0 is a product that is rounded before the subtraction below: the compiler fuses other products and sums.
    centre = tl.fma(scale, pixel.to(tl.float32) + 0.5, 0.0)
    support = tl.maximum(scale, 1.0) * FILTER
    first = tl.maximum((centre - support + 0.5).to(tl.int32), 0)
    end = tl.minimum((centre + support + 0.5).to(tl.int32), source_length)
    return first, end, first.to(tl.float32) - centre, tl.minimum(tl.div_rn(1.0, scale), 1.0)


@triton.jit
def tap_weight(tap, first, end, distance, shrink, FILTER: tl.constexpr):
    """Return the weight of source pixel ``first + tap``, which is 0 outside of the range of ``source_range``."""
    return tl.where(first + tap < end, filter_weight((tap + distance + 0.5) * shrink, FILTER), 0.0)


@triton.jit
def quotient(index, divisor):
    """Return ``index // divisor`` for 0 <= ``index`` < 2²² and ``divisor`` > 0, faster than by a division of integers."""
    # The quotient of ``index + 0.5`` is at least 0.5 / divisor away from an integer. Its rounding error is smaller.
    return ((index.to(tl.float32) + 0.5) * tl.div_rn(1.0, divisor.to(tl.float32))).to(tl.int32)


@triton.jit
def store_channel(total, channel, inverse, levels, out, offset, mask, strides, ROUNDS: tl.constexpr, REPEATS: tl.constexpr):
    """Convert one channel of a tile to values, and store ``REPEATS`` copies of it.

    ``total``: weighted sums of bytes, (``TILE_H``, ``TILE_W``). ``inverse``: 1 / sum of the weights, and 0 for pixels outside
    of the resized image, which are black. ``levels``: address of ``Resampling.levels``. ``out``: address of the first value of
    the image. ``offset``: offsets of the values of channel 0, in elements. ``mask``: mask of the pixels to store. ``strides``:
    (elements between channels, elements between copies of a channel).
    """
    channel_stride, repeat_stride = strides
    pixel_level = total * inverse
    channel_levels = levels + channel * 256
    if ROUNDS:
        pixel_level = nearest_integer(tl.minimum(tl.maximum(pixel_level, 0.0), 255.0)).to(tl.int32)
        value = tl.load(channel_levels + (pixel_level & 255))  # & 255: shows the compiler that the offset is not negative
    else:
        black = tl.load(channel_levels)
        value = black + pixel_level * tl.div_rn(tl.load(channel_levels + 255) - black, 255.0)
    for copy_index in tl.static_range(REPEATS):
        copy = out + (channel * channel_stride + copy_index * repeat_stride)
        tl.store(copy + offset, value.to(out.dtype.element_ty), mask=mask)


@kernel
def patches_kernel(
    source, regions, levels, out, patch_h, patch_w, merge, patch_stride, y_stride, x_stride, channel_stride, repeat_stride,
    PLANAR: tl.constexpr, CUBIC: tl.constexpr, ROUNDS: tl.constexpr, REPEATS: tl.constexpr,
    TILE_H: tl.constexpr, TILE_W: tl.constexpr,
):  # fmt: skip
    """Write every n-th tile of the region of one image, where n is the number of blocks per image.

    ``source``: bytes of the images. ``regions``: ``Arrangement.regions``, whose columns are

        0 offset of the image in ``source``    1, 2 height and width of the image
        3 offset of its first value in ``out``  4, 5 height and width of the resized image
        6, 7 top and left of the region         8, 9 height and width of the region

    ``levels``: ``Resampling.levels``. ``out``: values in the order of patches. The integers are fields of ``PatchOrder``:
    ``patch_h`` and ``patch_w`` are the size of a patch in pixels, ``merge`` is the number of patches per side of a group, and
    the strides are distances between values in ``out``.

    Constants:
        PLANAR: Whether each channel of an image is a plane; otherwise the channels of a pixel are adjacent.
        CUBIC, ROUNDS: Fields of ``Resampling``.
        REPEATS: ``PatchOrder.repeats``.

    Grid: (mean number of tiles of a region, images, 1). With a block for each tile of the largest region, many blocks would
    have no tile, and the start of a block takes time.
    """
    row = regions + tl.program_id(1) * COLUMN_COUNT
    height = tl.load(row + 1).to(tl.int32)
    width = tl.load(row + 2).to(tl.int32)
    resized_h = tl.load(row + 4).to(tl.int32)
    resized_w = tl.load(row + 5).to(tl.int32)
    top = tl.load(row + 6).to(tl.int32)
    left = tl.load(row + 7).to(tl.int32)
    region_h = tl.load(row + 8).to(tl.int32)
    region_w = tl.load(row + 9).to(tl.int32)
    image_start = source + tl.load(row)
    out += tl.load(row + 3)
    FILTER: tl.constexpr = 2 if CUBIC else 1  # radius of the filter
    pixel_stride = 1 if PLANAR else 3
    plane_stride = height * width if PLANAR else 1
    strides = channel_stride, repeat_stride
    tiles_x = tl.cdiv(region_w, TILE_W)
    tile_count = tl.cdiv(region_h, TILE_H) * tiles_x
    tile = tl.program_id(0)
    while tile < tile_count:
        tile_y = tile // tiles_x
        # (x, y): pixels in the region; (resized_x, resized_y): the nearest pixels in the resized image.
        y = tile_y * TILE_H + tl.arange(0, TILE_H)
        x = (tile - tile_y * tiles_x) * TILE_W + tl.arange(0, TILE_W)
        resized_y = tl.minimum(tl.maximum(tl.minimum(y, region_h - 1) + top, 0), resized_h - 1)
        resized_x = tl.minimum(tl.maximum(tl.minimum(x, region_w - 1) + left, 0), resized_w - 1)
        in_resized = (y + top == resized_y)[:, None] & (x + left == resized_x)[None, :]
        first_y, end_y, distance_y, shrink_y = source_range(resized_y, resized_h, height, FILTER)
        first_x, end_x, distance_x, shrink_x = source_range(resized_x, resized_w, width, FILTER)
        # Lines and taps of the whole tile: weights of pixels that do not depend on them are 0.
        line_index = tl.min(first_y, 0)
        end_line = tl.max(end_y, 0)
        tap_count = tl.max(end_x - first_x, 0)
        r = tl.zeros((TILE_H, TILE_W), tl.float32)
        g = tl.zeros((TILE_H, TILE_W), tl.float32)
        b = tl.zeros((TILE_H, TILE_W), tl.float32)
        weight_sum_y = tl.zeros((TILE_H,), tl.float32)
        weight_sum_x = tl.zeros((TILE_W,), tl.float32)
        tap = 0
        while tap < tap_count:
            weight_sum_x += tap_weight(tap, first_x, end_x, distance_x, shrink_x, FILTER)
            tap += 1
        while line_index < end_line:
            weight_y = filter_weight(((line_index - first_y).to(tl.float32) + distance_y + 0.5) * shrink_y, FILTER)
            weight_sum_y += weight_y
            line_start = image_start + line_index * width * pixel_stride
            line_r = tl.zeros((TILE_W,), tl.float32)
            line_g = tl.zeros((TILE_W,), tl.float32)
            line_b = tl.zeros((TILE_W,), tl.float32)
            tap = 0
            while tap < tap_count:
                weight = tap_weight(tap, first_x, end_x, distance_x, shrink_x, FILTER)
                # Pixels after the range are read, with weight 0, because loads with a mask take more instructions.
                address = line_start + tl.minimum(first_x + tap, width - 1) * pixel_stride
                line_r += weight * tl.load(address).to(tl.float32)
                line_g += weight * tl.load(address + plane_stride).to(tl.float32)
                line_b += weight * tl.load(address + 2 * plane_stride).to(tl.float32)
                tap += 1
            r += weight_y[:, None] * line_r[None, :]
            g += weight_y[:, None] * line_g[None, :]
            b += weight_y[:, None] * line_b[None, :]
            line_index += 1
        inverse = tl.where(in_resized, tl.div_rn(1.0, weight_sum_y)[:, None] * tl.div_rn(1.0, weight_sum_x)[None, :], 0.0)
        in_region = (y < region_h)[:, None] & (x < region_w)[None, :]
        # Patches are in row-major order of groups of ``merge`` · ``merge`` patches, and within a group in row-major order.
        patch_y = quotient(y, patch_h)
        patch_x = quotient(x, patch_w)
        group_y = quotient(patch_y, merge)
        group_x = quotient(patch_x, merge)
        preceding_y = (group_y * (region_w // patch_w) + patch_y - group_y * merge) * merge  # patches
        preceding_x = group_x * merge * merge + patch_x - group_x * merge
        offset_y = preceding_y * patch_stride + (y - patch_y * patch_h) * y_stride
        offset_x = preceding_x * patch_stride + (x - patch_x * patch_w) * x_stride
        offset = offset_y[:, None] + offset_x[None, :]
        store_channel(r, 0, inverse, levels, out, offset, in_region, strides, ROUNDS, REPEATS)
        store_channel(g, 1, inverse, levels, out, offset, in_region, strides, ROUNDS, REPEATS)
        store_channel(b, 2, inverse, levels, out, offset, in_region, strides, ROUNDS, REPEATS)
        tile += tl.num_programs(0)


def write_patches(images: Ragged, arrangement: Arrangement, resampling: Resampling, dtype: torch.dtype) -> list[Tensor]:
    """Resize images and write them as patches on the current stream. See ``gpuaug.fusion.backends.patches.write_patches``.

    Cost:
        One launch, and one asynchronous copy from pinned memory. A fill with zeros if the output is padded.
    """
    with on_device(images.device):
        regions, *others = send((arrangement.regions, *arrangement.others), images.device)
        out = arrangement.allocate(dtype, images.device)
        tile_counts = -(-arrangement.regions[:, 8] // TILE[0]) * -(-arrangement.regions[:, 9] // TILE[1])
        *strides, repeats = arrangement.order
        constants = images.shapes.layout == "chw", resampling.cubic, resampling.rounds, repeats, *TILE
        launch = launch_for(patches_kernel, (dtype,), constants, num_warps=1)
        grid = -(-int(tile_counts.sum()) // len(regions)), len(regions), 1
        launch((images.data, regions, resampling.levels_on(images.device, dtype), out), grid, strides)
    return [out, *others]
