"""Triton function of sharpness: a pixel is blended with its 3x3 blur."""

import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.frame import filter_launch
from gpuaug.fusion.backends.triton.filters.tiles import border_index, load_pixels
from gpuaug.fusion.backends.triton.launch import FilterLaunch
from gpuaug.fusion.backends.triton.pixel_math import ROUNDED, clamp01, div_by_255, to_bytes
from gpuaug.fusion.ops.filters import SharpnessOp
from gpuaug.fusion.program.plan import OpPass


@triton.jit
def sharpen(
    plane_address, intermediate, row, tile_start, y, x, height, width, stride_y,
    SOURCE_W: tl.constexpr, BYTES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, SETTINGS: tl.constexpr,
):  # fmt: skip
    """Return blur + (pixel - blur) · factor, where the blur is a 3x3 mean in which the centre has five times the weight.

    Border pixels of the image are not blurred. Columns of a row: apply mask, factor. ``SETTINGS``: (whether the blur is rounded
    to bytes,). See ``filter_kernel`` for the other arguments.
    """
    output_line = tl.arange(0, ALONG)[None, :]
    sum_3x3 = tl.zeros((ACROSS, ALONG), tl.float32)
    centre = tl.zeros((ACROSS, ALONG), tl.float32)
    # Lines from one above the tile to one below it. Output line i depends on the lines i, i + 1 (its centre) and i + 2.
    for line_index in tl.static_range(ALONG + 2):
        line_pointer = plane_address + border_index(tile_start + (line_index - 1), height, 2) * stride_y
        left = load_pixels(line_pointer + border_index(x - 1, width, 2) * SOURCE_W, True, 2, BYTES)
        middle = load_pixels(line_pointer + border_index(x, width, 2) * SOURCE_W, True, 2, BYTES)
        right = load_pixels(line_pointer + border_index(x + 1, width, 2) * SOURCE_W, True, 2, BYTES)
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
