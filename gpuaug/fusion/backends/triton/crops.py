"""Triton kernel that computes the windows of resized crops, for images whose sizes only the device knows."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.launch import Launch, on_device
from gpuaug.fusion.backends.triton.taps import half_to_even
from gpuaug.fusion.ops.resize import CROP_CANDIDATES, ResizedCrop
from gpuaug.fusion.ops.sampler import SPLITMIX_INCREMENT, SPLITMIX_MULTIPLIER_1, SPLITMIX_MULTIPLIER_2
from gpuaug.fusion.program.gather import DeviceCropColumns
from gpuaug.fusion.program.plan import GatherPass

BLOCK = 32
"""Samples per block, which is one warp."""

_INCREMENT, _FIRST, _SECOND = (
    tl.constexpr(SPLITMIX_INCREMENT),
    tl.constexpr(SPLITMIX_MULTIPLIER_1),
    tl.constexpr(SPLITMIX_MULTIPLIER_2),
)


@triton.jit
def splitmix64_mix(words):
    """Return the output of SplitMix64 for a state."""
    words = (words ^ (words >> 30)) * _FIRST
    words = (words ^ (words >> 27)) * _SECOND
    return words ^ (words >> 31)


@triton.jit
def bits24_of(number):
    """Return the 24 bits of a multiple of 2**-24 in [0, 1)."""
    return (number * 16777216.0).to(tl.int32).to(tl.uint64)


@triton.jit
def number_of(bits):
    """Invert ``bits_of``."""
    return bits.to(tl.int32).to(tl.float32) * (1 / 16777216)


@triton.jit
def write_resize(row, start, count, in_bounds, TARGET: tl.constexpr, HALF_PIXEL: tl.constexpr):
    """Write the columns of the resize along one axis: scale, first pixel of the window, number of pixels."""
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
    """Return the scale and shift that map coordinates of the input along one axis to the output, in float64."""
    start = start.to(tl.float64)
    count = count.to(tl.float64)
    if HALF_PIXEL:
        scale = TARGET / count
        shift = (0.5 - start) * scale - 0.5
    else:
        scale = tl.where((count > 1) & (TARGET > 1), (TARGET - 1) / tl.maximum(count - 1, 1), 1)
        shift = -start * scale
    return scale, shift


@triton.jit(do_not_specialize=["samples", "images", "row_stride"], do_not_specialize_on_alignment=["rows", "places"])
def crops_kernel(
    rows, places, samples, images, row_stride,
    CROP_CANDIDATES: tl.constexpr, NUMBERS_AT: tl.constexpr, WARP_AT: tl.constexpr, MASK_WARP_AT: tl.constexpr,
    MATRIX_AT: tl.constexpr, REST_AT: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr, HALF_PIXEL: tl.constexpr,
    LEAST_AREA: tl.constexpr, BY_AREA: tl.constexpr, LEAST_LOG_ASPECT: tl.constexpr, BY_LOG_ASPECT: tl.constexpr,
    NARROWEST: tl.constexpr, WIDEST: tl.constexpr, CENTRED: tl.constexpr, PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the windows of ``gpuaug.fusion.ops.resize.ResizedCrop.draw_parameters`` into the rows, bit for bit.

    ``places`` is ``Ragged.places``, with ``PLACE`` numbers per row. Each view has one sample per image.

    Constants:
        NUMBERS_AT, WARP_AT, MASK_WARP_AT, MATRIX_AT, REST_AT: First columns of the uniform numbers, of the resize of images and
            of masks, and of the matrices of all ops and of the ops after the crop (``DeviceCropColumns``).
        WIDTH, HEIGHT, HALF_PIXEL: Output size and convention of the resize.
        LEAST_AREA, BY_AREA, LEAST_LOG_ASPECT, BY_LOG_ASPECT: Lower bounds and ranges of area and log ratio.
        NARROWEST, WIDEST: Bounds of the ratio if no candidate fits. CENTRED: whether the window is then centred.

    Grid: (blocks of samples, 1, 1).
    """
    sample = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = sample < samples
    row = rows + sample.to(tl.int64) * row_stride
    layout = places + (sample % images).to(tl.int64) * PLACE
    height = tl.load(layout + 1, mask=in_bounds, other=1)
    width = tl.load(layout + 2, mask=in_bounds, other=1)
    length = tl.sqrt_rn((height * width).to(tl.float32))
    height = height.to(tl.float32)
    width = width.to(tl.float32)
    # Window if no candidate fits: the image, or as much of it as the ratios allow.
    ratio = tl.div_rn(width, height)
    across = tl.where(ratio > WIDEST, half_to_even(height * WIDEST).to(tl.float32), width)
    down = tl.where(ratio < NARROWEST, half_to_even(tl.div_rn(width, width * 0 + NARROWEST)).to(tl.float32), height)
    across = tl.maximum(across, 1)
    down = tl.maximum(down, 1)
    area = tl.load(row + NUMBERS_AT, mask=in_bounds, other=0)
    shape = tl.load(row + NUMBERS_AT + 1, mask=in_bounds, other=0)
    x = tl.load(row + NUMBERS_AT + 2, mask=in_bounds, other=0)
    y = tl.load(row + NUMBERS_AT + 3, mask=in_bounds, other=0)
    state = splitmix64_mix((bits24_of(area) << 24) | bits24_of(shape)) ^ ((bits24_of(x) << 24) | bits24_of(y))
    misses = width > 0
    for _ in tl.static_range(CROP_CANDIDATES):
        side = tl.sqrt_rn(area * BY_AREA + LEAST_AREA) * length
        root = tl.exp((shape * BY_LOG_ASPECT + LEAST_LOG_ASPECT).to(tl.float64)).to(tl.float32)
        wide = half_to_even(side * root).to(tl.float32)
        high = half_to_even(tl.div_rn(side, root)).to(tl.float32)
        fits = misses & (wide > 0) & (wide <= width) & (high > 0) & (high <= height)
        across = tl.where(fits, wide, across)
        down = tl.where(fits, high, down)
        misses = misses & (fits == 0)
        state += _INCREMENT
        random_bits = splitmix64_mix(state)
        area = number_of(random_bits >> 40)
        shape = number_of(random_bits & 0xFFFFFF)
    x = tl.floor(x * (width + 1 - across))
    y = tl.floor(y * (height + 1 - down))
    if CENTRED:
        x = tl.where(misses, tl.floor((width - across) * 0.5), x)
        y = tl.where(misses, tl.floor((height - down) * 0.5), y)
    write_resize(row + WARP_AT, x, across, in_bounds, WIDTH, HALF_PIXEL)
    write_resize(row + WARP_AT + 3, y, down, in_bounds, HEIGHT, HALF_PIXEL)
    if MASK_WARP_AT != WARP_AT:
        write_resize(row + MASK_WARP_AT, x, across, in_bounds, WIDTH, True)
        write_resize(row + MASK_WARP_AT + 3, y, down, in_bounds, HEIGHT, True)
    if MATRIX_AT >= 0:
        scale_x, shift_x = input_to_output(x, across, WIDTH, HALF_PIXEL)
        scale_y, shift_y = input_to_output(y, down, HEIGHT, HALF_PIXEL)
        for k in tl.static_range(3):
            rest = row + REST_AT + 3 * k
            matrix = row + MATRIX_AT + 3 * k
            by_x = tl.load(rest, mask=in_bounds, other=0).to(tl.float64)
            by_y = tl.load(rest + 1, mask=in_bounds, other=0).to(tl.float64)
            shift = tl.load(rest + 2, mask=in_bounds, other=0).to(tl.float64)
            tl.store(matrix, (by_x * scale_x).to(tl.float32), mask=in_bounds)
            tl.store(matrix + 1, (by_y * scale_y).to(tl.float32), mask=in_bounds)
            tl.store(matrix + 2, (by_x * shift_x + by_y * shift_y + shift).to(tl.float32), mask=in_bounds)


def fit(pass_: GatherPass, crop: ResizedCrop, rows: Tensor, places: Tensor, layout: DeviceCropColumns) -> None:
    """Write the window of each sample's crop into its row, in one launch on the current stream.

    Shape:
        - rows: (V · B, ``layout.width``) float32, for V views
        - places: (B, 3 or 4) int64: ``Ragged.places``
    """
    samples, images = rows.shape[0], places.shape[0]
    if not samples:
        return
    key = crops_kernel, layout, samples, images, places.stride(0)
    launch = pass_.prepared.get(key)
    if launch is None:
        launch = pass_.prepared[key] = _launch(pass_, crop, layout, samples, images, places.stride(0))
    with on_device(rows.device):
        launch((rows, places))


def _launch(
    pass_: GatherPass, crop: ResizedCrop, layout: DeviceCropColumns, samples: int, images: int, layout_columns: int
) -> Launch:
    out = crop.out(pass_.source)
    constants: dict[str, Any] = {
        "CROP_CANDIDATES": CROP_CANDIDATES,
        "NUMBERS_AT": layout.numbers,
        "WARP_AT": pass_.columns.warp,
        "MASK_WARP_AT": pass_.columns.mask_warp,
        "MATRIX_AT": layout.matrix,
        "REST_AT": layout.rest,
        "WIDTH": out.width,
        "HEIGHT": out.height,
        "HALF_PIXEL": pass_.front.half_pixel_centers,
        "LEAST_AREA": crop.areas[0],
        "BY_AREA": crop.areas[1],
        "LEAST_LOG_ASPECT": crop.log_aspect[0],
        "BY_LOG_ASPECT": crop.log_aspect[1],
        "NARROWEST": crop.ratios[0],
        "WIDEST": crop.ratios[1],
        "CENTRED": crop.centred,
        "PLACE": layout_columns,
        "BLOCK": BLOCK,
    }
    grid = (triton.cdiv(samples, BLOCK), 1, 1)
    # Not fused: products that are not rounded before a sum could give another window than on the host.
    return Launch(crops_kernel, grid, (samples, images, layout.width), constants, warps=1, fused=False)
