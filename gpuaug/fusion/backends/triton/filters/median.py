"""Triton functions of median blurs."""

import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.frame import filter_launch
from gpuaug.fusion.backends.triton.filters.tiles import BORDERS, border_index, load_pixels
from gpuaug.fusion.backends.triton.launch import FilterLaunch
from gpuaug.fusion.backends.triton.pixel_math import div_by_255
from gpuaug.fusion.ops.filters import MedianBlur
from gpuaug.fusion.program.plan import OpPass


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
