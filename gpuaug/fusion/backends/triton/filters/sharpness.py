"""Sharpness in Triton."""

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
    plane, between, row, first, y, x, height, width, stride_y,
    SOURCE_W: tl.constexpr, BYTES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, SETTINGS: tl.constexpr,
):  # fmt: skip
    """Blend the plane with its 3x3 blur, by a factor. Row: apply mask, factor. Border pixels of the image are not blurred.

    ``SETTINGS``: (whether the blur is rounded to bytes,).
    """
    along = tl.arange(0, ALONG)[None, :]
    sum_3x3 = tl.zeros((ACROSS, ALONG), tl.float32)
    centre = tl.zeros((ACROSS, ALONG), tl.float32)
    for line in tl.static_range(ALONG + 2):
        line_pointer = plane + border_index(first + (line - 1), height, 2) * stride_y
        left = load_pixels(line_pointer + border_index(x - 1, width, 2) * SOURCE_W, True, 2, BYTES)
        middle = load_pixels(line_pointer + border_index(x, width, 2) * SOURCE_W, True, 2, BYTES)
        right = load_pixels(line_pointer + border_index(x + 1, width, 2) * SOURCE_W, True, 2, BYTES)
        if not BYTES:
            left, middle, right = clamp01(left), clamp01(middle), clamp01(right)
        tap_y = line - along
        sum_3x3 = tl.where((tap_y >= 0) & (tap_y < 3), sum_3x3 + (left + middle + right), sum_3x3)
        centre = tl.where(tap_y == 1, middle, centre)
    smooth = (sum_3x3 + 4 * centre) * (1 / (13 * 255) if BYTES else 1 / 13)
    if SETTINGS[0]:
        smooth = to_bytes(smooth, ROUNDED[0], ROUNDED[1])
    if BYTES:
        centre = div_by_255(centre)
    inside = (y > 0) & (y < height - 1) & (x > 0) & (x < width - 1)
    smooth = tl.where(inside, clamp01(smooth), centre)
    return clamp01(smooth + (centre - smooth) * tl.load(row + 1))


def sharpness_launch(pass_: OpPass[SharpnessOp], source: Tensor, rows: Tensor, out: Tensor) -> FilterLaunch:
    """Prepare the launch of a pass whose front is a sharpness op."""
    return filter_launch(sharpen, (pass_.front.to_bytes is not None,), pass_, source, rows, out)
