"""Triton kernel that computes the crop windows of a ``RandomResizedCrop``, when ragged images and their sizes arrive."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.launch import Launch, kernel, on_device
from gpuaug.fusion.backends.triton.taps import half_to_even
from gpuaug.fusion.ops.resize import CROP_CANDIDATES, ResizedCrop
from gpuaug.fusion.ops.sampler import SPLITMIX_INCREMENT, SPLITMIX_MULTIPLIER_1, SPLITMIX_MULTIPLIER_2
from gpuaug.fusion.program.gather import DeviceCropColumns
from gpuaug.fusion.program.plan import GatherPass

BLOCK = 32
"""Samples per block, which is one warp."""

_INCREMENT, _MULTIPLIER_1, _MULTIPLIER_2 = (
    tl.constexpr(SPLITMIX_INCREMENT),
    tl.constexpr(SPLITMIX_MULTIPLIER_1),
    tl.constexpr(SPLITMIX_MULTIPLIER_2),
)


@triton.jit
def splitmix64_mix(words):
    """Return the output of the random number generator SplitMix64 for a state."""
    words = (words ^ (words >> 30)) * _MULTIPLIER_1
    words = (words ^ (words >> 27)) * _MULTIPLIER_2
    return words ^ (words >> 31)


@triton.jit
def bits24_of(number):
    """Return the 24 bits of a multiple of 2**-24 in [0, 1)."""
    return (number * 16777216.0).to(tl.int32).to(tl.uint64)


@triton.jit
def uniform_of(bits):
    """Invert ``bits24_of``."""
    return bits.to(tl.int32).to(tl.float32) * (1 / 16777216)


@triton.jit
def write_resize(row, start, count, in_bounds, TARGET: tl.constexpr, HALF_PIXEL: tl.constexpr):
    """Write the columns of a resize along one axis to ``row``: scale, first pixel of the window, number of pixels.

    ``TARGET``: number of output pixels.
    """
    if HALF_PIXEL:
        scale = tl.div_rn(count, count * 0 + TARGET)
    elif TARGET > 1:
        scale = tl.div_rn(count - 1, count * 0 + (TARGET - 1))
    else:
        scale = count * 0
    tl.store(row, scale, mask=in_bounds)
    tl.store(row + 1, start, mask=in_bounds)
    tl.store(row + 2, count, mask=in_bounds)


@triton.jit
def input_to_output(start, count, TARGET: tl.constexpr, HALF_PIXEL: tl.constexpr):
    """Return the scale and shift from input to output coordinates along one axis, in float64, as for ``write_resize``."""
    start = start.to(tl.float64)
    count = count.to(tl.float64)
    if HALF_PIXEL:
        scale = TARGET / count
        shift = (0.5 - start) * scale - 0.5
    else:
        scale = tl.where((count > 1) & (TARGET > 1), (TARGET - 1) / tl.maximum(count - 1, 1), 1)
        shift = -start * scale
    return scale, shift


@kernel
def crops_kernel(
    param_table, image_layouts, samples, images, row_stride,
    CROP_CANDIDATES: tl.constexpr, UNIFORMS_COLUMN: tl.constexpr, WARP_COLUMN: tl.constexpr, MASK_WARP_COLUMN: tl.constexpr,
    MATRIX_COLUMN: tl.constexpr, MATRIX_AFTER_COLUMN: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr,
    HALF_PIXEL: tl.constexpr, MIN_AREA: tl.constexpr, AREA_RANGE: tl.constexpr, MIN_LOG_ASPECT: tl.constexpr,
    LOG_ASPECT_RANGE: tl.constexpr, MIN_RATIO: tl.constexpr, MAX_RATIO: tl.constexpr, CENTRED: tl.constexpr,
    LAYOUT_COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the same windows into the rows as ``gpuaug.fusion.ops.resize.ResizedCrop.draw_parameters`` draws, bit for bit.

    ``image_layouts``: offset, height and width of each ragged image, in rows of ``LAYOUT_COLUMNS`` numbers. Samples are in the
    order of the views, with one sample per image and view.

    Constants:
        CROP_CANDIDATES: Number of candidate windows per sample. The first candidate that fits into the image is used.
        UNIFORMS_COLUMN: First column of the uniform numbers in [0, 1) of the crop.
        WARP_COLUMN, MASK_WARP_COLUMN: First column of the resize of images, and of masks.
        MATRIX_COLUMN: First column of the matrix of the whole pipeline for boxes and keypoints, which the kernel writes; -1
            without boxes and keypoints.
        MATRIX_AFTER_COLUMN: First column of the matrix of the ops after the crop, which the kernel reads.
        WIDTH, HEIGHT, HALF_PIXEL: Output size, and whether the resize has half-pixel centres.
        MIN_AREA, AREA_RANGE: Lower bound and range of the window's share of the area of the image.
        MIN_LOG_ASPECT, LOG_ASPECT_RANGE: Lower bound and range of the logarithm of sqrt(width / height) of the window.
        MIN_RATIO, MAX_RATIO: Bounds of the aspect ratio if no candidate fits. CENTRED: whether the window is then centred.

    Grid: (blocks of samples, 1, 1).
    """
    sample = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = sample < samples
    row = param_table + sample.to(tl.int64) * row_stride
    layout = image_layouts + (sample % images).to(tl.int64) * LAYOUT_COLUMNS
    height = tl.load(layout + 1, mask=in_bounds, other=1)
    width = tl.load(layout + 2, mask=in_bounds, other=1)
    image_side = tl.sqrt_rn((height * width).to(tl.float32))
    height = height.to(tl.float32)
    width = width.to(tl.float32)
    # Window if no candidate fits: the image, or as much of it as the ratios allow.
    ratio = tl.div_rn(width, height)
    crop_width = tl.where(ratio > MAX_RATIO, half_to_even(height * MAX_RATIO).to(tl.float32), width)
    crop_height = tl.where(ratio < MIN_RATIO, half_to_even(tl.div_rn(width, width * 0 + MIN_RATIO)).to(tl.float32), height)
    crop_width = tl.maximum(crop_width, 1)
    crop_height = tl.maximum(crop_height, 1)
    area = tl.load(row + UNIFORMS_COLUMN, mask=in_bounds, other=0)
    aspect = tl.load(row + UNIFORMS_COLUMN + 1, mask=in_bounds, other=0)
    x = tl.load(row + UNIFORMS_COLUMN + 2, mask=in_bounds, other=0)
    y = tl.load(row + UNIFORMS_COLUMN + 3, mask=in_bounds, other=0)
    state = splitmix64_mix((bits24_of(area) << 24) | bits24_of(aspect)) ^ ((bits24_of(x) << 24) | bits24_of(y))
    lacks_window = width > 0
    for _ in tl.static_range(CROP_CANDIDATES):
        side = tl.sqrt_rn(area * AREA_RANGE + MIN_AREA) * image_side
        ratio_root = tl.exp((aspect * LOG_ASPECT_RANGE + MIN_LOG_ASPECT).to(tl.float64)).to(tl.float32)
        candidate_width = half_to_even(side * ratio_root).to(tl.float32)
        candidate_height = half_to_even(tl.div_rn(side, ratio_root)).to(tl.float32)
        fits = (
            lacks_window
            & (candidate_width > 0)
            & (candidate_width <= width)
            & (candidate_height > 0)
            & (candidate_height <= height)
        )
        crop_width = tl.where(fits, candidate_width, crop_width)
        crop_height = tl.where(fits, candidate_height, crop_height)
        lacks_window = lacks_window & (fits == 0)
        state += _INCREMENT
        random_bits = splitmix64_mix(state)
        area = uniform_of(random_bits >> 40)
        aspect = uniform_of(random_bits & 0xFFFFFF)
    x = tl.floor(x * (width + 1 - crop_width))
    y = tl.floor(y * (height + 1 - crop_height))
    if CENTRED:
        x = tl.where(lacks_window, tl.floor((width - crop_width) * 0.5), x)
        y = tl.where(lacks_window, tl.floor((height - crop_height) * 0.5), y)
    write_resize(row + WARP_COLUMN, x, crop_width, in_bounds, WIDTH, HALF_PIXEL)
    write_resize(row + WARP_COLUMN + 3, y, crop_height, in_bounds, HEIGHT, HALF_PIXEL)
    if MASK_WARP_COLUMN != WARP_COLUMN:
        write_resize(row + MASK_WARP_COLUMN, x, crop_width, in_bounds, WIDTH, True)
        write_resize(row + MASK_WARP_COLUMN + 3, y, crop_height, in_bounds, HEIGHT, True)
    if MATRIX_COLUMN >= 0:
        scale_x, shift_x = input_to_output(x, crop_width, WIDTH, HALF_PIXEL)
        scale_y, shift_y = input_to_output(y, crop_height, HEIGHT, HALF_PIXEL)
        for k in tl.static_range(3):
            matrix_after = row + MATRIX_AFTER_COLUMN + 3 * k
            matrix = row + MATRIX_COLUMN + 3 * k
            from_x = tl.load(matrix_after, mask=in_bounds, other=0).to(tl.float64)
            from_y = tl.load(matrix_after + 1, mask=in_bounds, other=0).to(tl.float64)
            shift = tl.load(matrix_after + 2, mask=in_bounds, other=0).to(tl.float64)
            tl.store(matrix, (from_x * scale_x).to(tl.float32), mask=in_bounds)
            tl.store(matrix + 1, (from_y * scale_y).to(tl.float32), mask=in_bounds)
            tl.store(matrix + 2, (from_x * shift_x + from_y * shift_y + shift).to(tl.float32), mask=in_bounds)


def write_crop_windows(
    pass_: GatherPass, crop: ResizedCrop, param_table: Tensor, image_layouts: Tensor, columns: DeviceCropColumns
) -> None:
    """Write the window of each sample's crop into its row, in one launch on the current stream.

    Shape:
        - rows: (V · B, ``columns.width``) float32, for V views
        - image_layouts: (B, 3 or 4) int64: ``Ragged.places``
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
    """Prepare the launch of ``write_crop_windows``."""
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
    return Launch(crops_kernel, grid, (samples, images, columns.width), constants, warps=1, fp_fusion=False)
