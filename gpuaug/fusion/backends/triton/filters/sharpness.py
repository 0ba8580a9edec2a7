"""Triton function of sharpness: a pixel is blended with its 3x3 blur."""

import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.frame import filter_launch
from gpuaug.fusion.backends.triton.filters.tiles import BORDERS, border_index, load_pixels
from gpuaug.fusion.backends.triton.launch import FilterLaunch
from gpuaug.fusion.backends.triton.pixel_math import ROUNDED, clamp01, div_by_255, to_bytes
from gpuaug.fusion.ops.filters import SharpnessOp
from gpuaug.fusion.program.plan import OpPass

REPLICATE = tl.constexpr(BORDERS["replicate"])


@triton.jit
def sharpen(
    plane_address, intermediate, row, tile_start, y, x, height, width, stride_y,
    SOURCE_W: tl.constexpr, BYTES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, SETTINGS: tl.constexpr,
):  # fmt: skip
    """Return blur + (pixel - blur) · factor, where the blur is a 3x3 mean in which the centre has five times the weight.

    Border pixels of the image are not blurred. A row of the parameter table has two columns: apply mask (0 to skip the op), and
    factor. ``SETTINGS``: (whether the blur is rounded to multiples of 1/255,). See ``FILTER`` in ``filter_kernel``
    (``frame.py``) for the other arguments, and ``tiles.py`` for tiles.
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
