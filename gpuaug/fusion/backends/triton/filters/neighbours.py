"""Triton functions of filters whose output pixel depends on few pixels around it: median blur, motion blur, sharpness."""

import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.frame import BORDERS, border_index, filter_launch, load_lines, load_pixels
from gpuaug.fusion.backends.triton.launch import FilterLaunch
from gpuaug.fusion.backends.triton.pixel_math import ROUNDED, clamp01, div_by_255, to_bytes
from gpuaug.fusion.ops.filters import MedianBlur, MotionBlurOp, SharpnessOp
from gpuaug.fusion.program.plan import OpPass

REPLICATE = tl.constexpr(BORDERS["replicate"])


@triton.jit
def without_extremes(values):
    """Return a tuple of at least three values, of any shape, without the smallest and the largest."""
    smallest = tl.minimum(values[0], values[1])
    largest = tl.maximum(values[0], values[1])
    others = ()
    for index in tl.static_range(2, len(values)):
        value = values[index]
        others += (tl.maximum(smallest, tl.minimum(value, largest)),)
        smallest = tl.minimum(smallest, value)
        largest = tl.maximum(largest, value)
    return others


@triton.jit
def median_blur(
    plane_address, intermediate, row, tile_start, y, x, height, width, stride_y,
    SOURCE_W: tl.constexpr, BYTES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, SETTINGS: tl.constexpr,
):  # fmt: skip
    """Return the median of a square of pixels; NaN if one of them is not finite.

    Of more than half of the pixels, neither the smallest nor the largest can be the median of all. Both are discarded, and the
    next pixel is added, until one pixel is left. ``SETTINGS``: (side of the square, padding mode). See ``filter_kernel`` for
    the other arguments.
    """
    SIDE: tl.constexpr = SETTINGS[0]
    medians = tl.zeros((ACROSS, ALONG), tl.float32)
    # Line by line, because a thread has registers for the candidates of one pixel.
    for line in range(ALONG):
        candidates = ()
        zero = tl.zeros((ACROSS, 1), tl.float32)
        for tap in tl.static_range(SIDE * SIDE):
            tap_y = border_index(tile_start + line + (tap // SIDE - SIDE // 2), height, SETTINGS[1])
            tap_x = border_index(x + (tap % SIDE - SIDE // 2), width, SETTINGS[1])
            pixel = load_pixels(plane_address + tap_y * stride_y + tap_x * SOURCE_W, True, SETTINGS[1], BYTES)
            zero += 0 * pixel  # NaN if the pixel is not finite
            candidates += (pixel,)
            if tap > SIDE * SIDE // 2:
                candidates = without_extremes(candidates)
        medians = tl.where(tl.arange(0, ALONG)[None, :] == line, candidates[0] + zero, medians)
    return div_by_255(medians) if BYTES else medians


def median_launch(pass_: OpPass[MedianBlur], source: Tensor, param_table: Tensor, out: Tensor) -> FilterLaunch:
    """Prepare the launch of a pass that begins with a median blur."""
    settings = pass_.front.kernel_size[0], BORDERS[pass_.front.border]
    return filter_launch(median_blur, settings, pass_, source, param_table, out)


@triton.jit
def motion_blur(
    plane_address, intermediate, row, tile_start, y, x, height, width, stride_y,
    SOURCE_W: tl.constexpr, BYTES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, SETTINGS: tl.constexpr,
):  # fmt: skip
    """Return the weighted sum of the *taps* of a motion blur, the pixels that have a weight. The weights sum to 1.

    A row of the parameter table has the columns: apply mask; number of taps; per tap its offsets from the pixel along y and x,
    and its weight. ``SETTINGS``: (padding mode,). ``intermediate`` and ``tile_start`` are not read. See ``FILTER`` in
    ``filter_kernel`` (``frame.py``) for the other arguments.
    """
    blurred = tl.zeros((ACROSS, ALONG), tl.float32)
    for tap in range(tl.load(row + 1).to(tl.int32)):
        tap_columns = row + 2 + 3 * tap
        tap_y = y + tl.load(tap_columns).to(tl.int32)
        tap_x = x + tl.load(tap_columns + 1).to(tl.int32)
        weight = tl.load(tap_columns + 2) * (1 / 255 if BYTES else 1)
        in_image = (tap_y >= 0) & (tap_y < height) & (tap_x >= 0) & (tap_x < width)
        source_y, source_x = border_index(tap_y, height, SETTINGS[0]), border_index(tap_x, width, SETTINGS[0])
        blurred += weight * load_lines(plane_address + source_y * stride_y + source_x * SOURCE_W, in_image, SETTINGS[0], BYTES)
    return blurred


def motion_blur_launch(pass_: OpPass[MotionBlurOp], source: Tensor, param_table: Tensor, out: Tensor) -> FilterLaunch:
    """Prepare the launch of a pass that begins with a motion blur."""
    return filter_launch(motion_blur, (BORDERS[pass_.front.border],), pass_, source, param_table, out)


@triton.jit
def sharpen(
    plane_address, intermediate, row, tile_start, y, x, height, width, stride_y,
    SOURCE_W: tl.constexpr, BYTES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, SETTINGS: tl.constexpr,
):  # fmt: skip
    """Return blur + (pixel - blur) · factor, where the blur is a 3x3 mean in which the centre has five times the weight.

    Border pixels of the image are not blurred. A row of the parameter table has two columns: apply mask (0 to skip the op), and
    factor. ``SETTINGS``: (whether the blur is rounded to multiples of 1/255,). See ``FILTER`` in ``filter_kernel``
    (``frame.py``) for the other arguments.
    """
    output_line = tl.arange(0, ALONG)[None, :]
    sum_3x3 = tl.zeros((ACROSS, ALONG), tl.float32)
    centre = tl.zeros((ACROSS, ALONG), tl.float32)
    # Line 0 is the line above the tile, so output line i depends on the lines i, i + 1 (its centre) and i + 2.
    for line_index in tl.static_range(ALONG + 2):
        line_pointer = plane_address + border_index(tile_start + (line_index - 1), height, REPLICATE) * stride_y
        left = load_pixels(line_pointer + border_index(x - 1, width, REPLICATE) * SOURCE_W, True, REPLICATE, BYTES)
        middle = load_pixels(line_pointer + border_index(x, width, REPLICATE) * SOURCE_W, True, REPLICATE, BYTES)
        right = load_pixels(line_pointer + border_index(x + 1, width, REPLICATE) * SOURCE_W, True, REPLICATE, BYTES)
        if not BYTES:
            left, middle, right = clamp01(left), clamp01(middle), clamp01(right)
        tap_y = line_index - output_line
        sum_3x3 = tl.where((tap_y >= 0) & (tap_y < 3), sum_3x3 + (left + middle + right), sum_3x3)
        centre = tl.where(tap_y == 1, middle, centre)
    # The sum of the nine weights is 8 · 1 + 5.
    smoothed = (sum_3x3 + 4 * centre) * (1 / (13 * 255) if BYTES else 1 / 13)
    if SETTINGS[0]:
        smoothed = to_bytes(smoothed, ROUNDED[0], ROUNDED[1])
    if BYTES:
        centre = div_by_255(centre)
    has_neighbours = (y > 0) & (y < height - 1) & (x > 0) & (x < width - 1)
    smoothed = tl.where(has_neighbours, clamp01(smoothed), centre)
    return clamp01(smoothed + (centre - smoothed) * tl.load(row + 1))


def sharpness_launch(pass_: OpPass[SharpnessOp], source: Tensor, param_table: Tensor, out: Tensor) -> FilterLaunch:
    """Prepare the launch of a pass that begins with a sharpness op."""
    return filter_launch(sharpen, (pass_.front.to_bytes is not None,), pass_, source, param_table, out)
