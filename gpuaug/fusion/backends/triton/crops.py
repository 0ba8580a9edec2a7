"""Triton kernel that computes the crop windows of a ``RandomResizedCrop`` on the device, from the sizes of ragged images.

*Ragged* images differ in size. A *sample* is one view of an image. The parameter table, with one row per sample, is drawn ahead
on the host, when sizes of the images are not known yet. So it has only the uniform numbers of the crop. As soon as the images
are on the device, the kernel computes the windows, and writes the columns that depend on them: the resize of the images and
masks, and the matrix for boxes and keypoints. ``ResizedCrop.draw_parameters`` in ``gpuaug.fusion.ops.resize`` computes the same
on the host.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.launch import Launch, kernel, on_device
from gpuaug.fusion.backends.triton.pixel_math import nearest_integer
from gpuaug.fusion.ops.resize import CROP_CANDIDATES, ResizedCrop
from gpuaug.fusion.ops.sampler import SPLITMIX_INCREMENT, SPLITMIX_MULTIPLIER_1, SPLITMIX_MULTIPLIER_2
from gpuaug.fusion.program.gather import DeviceCropColumns
from gpuaug.fusion.program.plan import GatherPass

BLOCK = 32
"""Samples per thread block, which is one warp."""

_INCREMENT, _MULTIPLIER_1, _MULTIPLIER_2 = (
    tl.constexpr(SPLITMIX_INCREMENT),
    tl.constexpr(SPLITMIX_MULTIPLIER_1),
    tl.constexpr(SPLITMIX_MULTIPLIER_2),
)


@triton.jit
def splitmix64_mix(state_words):
    """Return the output of the random number generator SplitMix64 for a state, uint64 of any shape."""
    state_words = (state_words ^ (state_words >> 30)) * _MULTIPLIER_1
    state_words = (state_words ^ (state_words >> 27)) * _MULTIPLIER_2
    return state_words ^ (state_words >> 31)


@triton.jit
def bits24_of(number):
    """Return the bits of a uniform number in [0, 1) that is a multiple of 2**-24, as uint64 in [0, 2**24)."""
    return (number * 16777216.0).to(tl.int32).to(tl.uint64)


@triton.jit
def uniform_of(bits):
    """Return the uniform number, float32 in [0, 1), of 24 bits: the inverse of ``bits24_of``."""
    return bits.to(tl.int32).to(tl.float32) * (1 / 16777216)


@triton.jit
def write_resize(columns, start, count, in_bounds, OUT_COUNT: tl.constexpr, HALF_PIXEL: tl.constexpr):
    """Write the columns of a resize along one axis (``load_resize``): scale, first pixel of the window, number of pixels.

    ``columns``: addresses of the first column, (BLOCK,). ``start``, ``count``: first pixel and number of pixels of the window,
    float32. ``OUT_COUNT``: number of output pixels. ``HALF_PIXEL``: whether the resize aligns the edges of the window and of
    the output, not the centres of their outermost pixels.
    """
    if HALF_PIXEL:
        scale = tl.div_rn(count, count * 0 + OUT_COUNT)
    elif OUT_COUNT > 1:
        scale = tl.div_rn(count - 1, count * 0 + (OUT_COUNT - 1))
    else:
        scale = count * 0
    tl.store(columns, scale, mask=in_bounds)
    tl.store(columns + 1, start, mask=in_bounds)
    tl.store(columns + 2, count, mask=in_bounds)


@triton.jit
def input_to_output(start, count, OUT_COUNT: tl.constexpr, HALF_PIXEL: tl.constexpr):
    """Return (scale, shift) per sample, float64: output coordinate = input coordinate · scale + shift, along one axis.

    Arguments as in ``write_resize``. Coordinates are of pixel centres.
    """
    start = start.to(tl.float64)
    count = count.to(tl.float64)
    if HALF_PIXEL:
        scale = OUT_COUNT / count
        shift = (0.5 - start) * scale - 0.5
    else:
        scale = tl.where((count > 1) & (OUT_COUNT > 1), (OUT_COUNT - 1) / tl.maximum(count - 1, 1), 1)
        shift = -start * scale
    return scale, shift


@kernel
def crops_kernel(
    param_table, image_layouts, sample_count, image_count, row_stride,
    CROP_CANDIDATES: tl.constexpr, UNIFORMS_COLUMN: tl.constexpr, WARP_COLUMN: tl.constexpr, MASK_WARP_COLUMN: tl.constexpr,
    MATRIX_COLUMN: tl.constexpr, MATRIX_AFTER_COLUMN: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr,
    HALF_PIXEL: tl.constexpr, MIN_AREA: tl.constexpr, AREA_RANGE: tl.constexpr, MIN_LOG_ASPECT: tl.constexpr,
    LOG_ASPECT_RANGE: tl.constexpr, MIN_RATIO: tl.constexpr, MAX_RATIO: tl.constexpr, CENTRED: tl.constexpr,
    LAYOUT_COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the windows of the samples into their rows, bit for bit as ``ResizedCrop.draw_parameters`` draws them.

    Tensors, by their address:
        param_table: Parameter table, (``sample_count``, ``row_stride``) float32. Samples are in the order of the views, with
            one sample per image and view.
        image_layouts: (offset, height, width) of each of the ``image_count`` ragged images, ``LAYOUT_COLUMNS`` int64 numbers
            per image.

    Constants:
        CROP_CANDIDATES: Number of candidate windows per sample. The first candidate that fits into the image is used.
        UNIFORMS_COLUMN: First column of the four uniform numbers of the crop, in [0, 1): area, aspect ratio, x and y of the
            window.
        WARP_COLUMN, MASK_WARP_COLUMN: First column of the resize of images, and of masks.
        MATRIX_COLUMN: First column of the matrix of the whole pipeline for boxes and keypoints, which the kernel writes; -1
            without boxes and keypoints.
        MATRIX_AFTER_COLUMN: First column of the matrix of the ops after the crop, which the kernel reads.
        WIDTH, HEIGHT, HALF_PIXEL: Output size, and whether the resize has half-pixel centres.
        MIN_AREA, AREA_RANGE: Lower bound and range of the window's share of the area of the image.
        MIN_LOG_ASPECT, LOG_ASPECT_RANGE: Lower bound and range of the logarithm of sqrt(width / height) of the window.
        MIN_RATIO, MAX_RATIO: Bounds of the aspect ratio of the window if no candidate fits.
        CENTRED: Whether the window is centred if no candidate fits.
        LAYOUT_COLUMNS: Numbers per image in ``image_layouts``.

    Grid: (blocks of samples, 1, 1).
    """
    sample = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = sample < sample_count
    row = param_table + sample.to(tl.int64) * row_stride
    layout_address = image_layouts + (sample % image_count).to(tl.int64) * LAYOUT_COLUMNS
    height = tl.load(layout_address + 1, mask=in_bounds, other=1)
    width = tl.load(layout_address + 2, mask=in_bounds, other=1)
    root_of_image_area = tl.sqrt_rn((height * width).to(tl.float32))
    height = height.to(tl.float32)
    width = width.to(tl.float32)
    # Window if no candidate fits: the image, or as much of it as the bounds of the aspect ratio allow.
    ratio = tl.div_rn(width, height)
    crop_width = tl.where(ratio > MAX_RATIO, nearest_integer(height * MAX_RATIO), width)
    crop_height = tl.where(ratio < MIN_RATIO, nearest_integer(tl.div_rn(width, width * 0 + MIN_RATIO)), height)
    crop_width = tl.maximum(crop_width, 1)
    crop_height = tl.maximum(crop_height, 1)
    # Four uniform numbers in [0, 1), from which the area, the aspect ratio and the position of the window follow.
    area = tl.load(row + UNIFORMS_COLUMN, mask=in_bounds, other=0)
    aspect = tl.load(row + UNIFORMS_COLUMN + 1, mask=in_bounds, other=0)
    left = tl.load(row + UNIFORMS_COLUMN + 2, mask=in_bounds, other=0)
    top = tl.load(row + UNIFORMS_COLUMN + 3, mask=in_bounds, other=0)
    # The four uniform numbers are the first candidate, and the seed of the others.
    state = splitmix64_mix((bits24_of(area) << 24) | bits24_of(aspect)) ^ ((bits24_of(left) << 24) | bits24_of(top))
    still_searching = width > 0  # true, in the shape of the width
    # The window is the first candidate that fits. All candidates are computed, because samples of a warp differ in it.
    for _ in tl.static_range(CROP_CANDIDATES):
        root_of_area = tl.sqrt_rn(area * AREA_RANGE + MIN_AREA) * root_of_image_area
        root_of_aspect = tl.exp((aspect * LOG_ASPECT_RANGE + MIN_LOG_ASPECT).to(tl.float64)).to(tl.float32)
        candidate_width = nearest_integer(root_of_area * root_of_aspect)
        candidate_height = nearest_integer(tl.div_rn(root_of_area, root_of_aspect))
        fits = (
            still_searching
            & (candidate_width > 0)
            & (candidate_width <= width)
            & (candidate_height > 0)
            & (candidate_height <= height)
        )
        crop_width = tl.where(fits, candidate_width, crop_width)
        crop_height = tl.where(fits, candidate_height, crop_height)
        still_searching = still_searching & (fits == 0)
        state += _INCREMENT
        random_bits = splitmix64_mix(state)
        area = uniform_of(random_bits >> 40)
        aspect = uniform_of(random_bits & 0xFFFFFF)
    left = tl.floor(left * (width + 1 - crop_width))
    top = tl.floor(top * (height + 1 - crop_height))
    if CENTRED:
        left = tl.where(still_searching, tl.floor((width - crop_width) * 0.5), left)
        top = tl.where(still_searching, tl.floor((height - crop_height) * 0.5), top)
    write_resize(row + WARP_COLUMN, left, crop_width, in_bounds, WIDTH, HALF_PIXEL)
    write_resize(row + WARP_COLUMN + 3, top, crop_height, in_bounds, HEIGHT, HALF_PIXEL)
    if MASK_WARP_COLUMN != WARP_COLUMN:
        write_resize(row + MASK_WARP_COLUMN, left, crop_width, in_bounds, WIDTH, True)
        write_resize(row + MASK_WARP_COLUMN + 3, top, crop_height, in_bounds, HEIGHT, True)
    if MATRIX_COLUMN >= 0:
        scale_x, shift_x = input_to_output(left, crop_width, WIDTH, HALF_PIXEL)
        scale_y, shift_y = input_to_output(top, crop_height, HEIGHT, HALF_PIXEL)
        # matrix = matrix after · ((scale_x, 0, shift_x), (0, scale_y, shift_y), (0, 0, 1)), line by line
        for matrix_line in tl.static_range(3):
            matrix_after = row + MATRIX_AFTER_COLUMN + 3 * matrix_line
            matrix = row + MATRIX_COLUMN + 3 * matrix_line
            after_x = tl.load(matrix_after, mask=in_bounds, other=0).to(tl.float64)
            after_y = tl.load(matrix_after + 1, mask=in_bounds, other=0).to(tl.float64)
            after_shift = tl.load(matrix_after + 2, mask=in_bounds, other=0).to(tl.float64)
            tl.store(matrix, (after_x * scale_x).to(tl.float32), mask=in_bounds)
            tl.store(matrix + 1, (after_y * scale_y).to(tl.float32), mask=in_bounds)
            tl.store(matrix + 2, (after_x * shift_x + after_y * shift_y + after_shift).to(tl.float32), mask=in_bounds)


def write_crop_windows(
    pass_: GatherPass, crop: ResizedCrop, param_table: Tensor, image_layouts: Tensor, columns: DeviceCropColumns
) -> None:
    """Write the window of each sample's crop into its row of the parameter table, in one launch on the current stream.

    Args:
        pass_: Pass of the crop, the first of the plan.
        crop: Crop whose windows are computed.
        param_table: Parameter table, which has the uniform numbers of the crop.
        image_layouts: ``Ragged.places`` of the images.
        columns: Columns of the table that the kernel reads and writes.

    Shape:
        - param_table: (V · B, ``columns.width``) float32, for V views
        - image_layouts: (B, 3 or 4) int64
    """
    samples, images = param_table.shape[0], image_layouts.shape[0]
    if not samples:
        return
    key = crops_kernel, columns, samples, images, image_layouts.stride(0)
    launch = pass_.launch_cache.get(key)
    if launch is None:
        launch = pass_.launch_cache[key] = _launch(pass_, crop, columns, samples, images, image_layouts.stride(0))
    with on_device(param_table.device):
        launch((param_table, image_layouts))


def _launch(
    pass_: GatherPass, crop: ResizedCrop, columns: DeviceCropColumns, samples: int, images: int, layout_columns: int
) -> Launch:
    """Prepare the launch of ``write_crop_windows``. ``layout_columns``: number of columns of ``image_layouts``."""
    out = crop.out(pass_.source)
    constants: dict[str, Any] = {
        "CROP_CANDIDATES": CROP_CANDIDATES,
        "UNIFORMS_COLUMN": columns.uniforms,
        "WARP_COLUMN": pass_.columns.warp,
        "MASK_WARP_COLUMN": pass_.columns.mask_warp,
        "MATRIX_COLUMN": columns.matrix,
        "MATRIX_AFTER_COLUMN": columns.matrix_after,
        "WIDTH": out.width,
        "HEIGHT": out.height,
        "HALF_PIXEL": pass_.front.half_pixel_centers,
        "MIN_AREA": crop.areas[0],
        "AREA_RANGE": crop.areas[1],
        "MIN_LOG_ASPECT": crop.log_aspect[0],
        "LOG_ASPECT_RANGE": crop.log_aspect[1],
        "MIN_RATIO": crop.ratios[0],
        "MAX_RATIO": crop.ratios[1],
        "CENTRED": crop.centred,
        "LAYOUT_COLUMNS": layout_columns,
        "BLOCK": BLOCK,
    }
    grid = (triton.cdiv(samples, BLOCK), 1, 1)
    # Products and sums are not fused: a product that is not rounded before the sum could give another window than on the host.
    return Launch(crops_kernel, grid, (samples, images, columns.width), constants, num_warps=1, enable_fp_fusion=False)
