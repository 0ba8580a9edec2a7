"""Motion blur in Triton."""

import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.frame import filter_launch
from gpuaug.fusion.backends.triton.filters.tiles import BORDERS, border_index, load_lines
from gpuaug.fusion.backends.triton.launch import FilterLaunch
from gpuaug.fusion.ops.filters import MotionBlurOp
from gpuaug.fusion.program.plan import OpPass


@triton.jit
def motion_blur(
    plane, between, row, first, y, x, height, width, stride_y,
    SOURCE_W: tl.constexpr, BYTES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, SETTINGS: tl.constexpr,
):  # fmt: skip
    """Sum the weighted taps. Row: apply mask, number of taps; y, x and weight per tap. ``SETTINGS``: (padding mode,)."""
    total = tl.zeros((ACROSS, ALONG), tl.float32)
    for tap in range(tl.load(row + 1).to(tl.int32)):
        tap_row = row + 2 + 3 * tap
        tap_y = y + tl.load(tap_row).to(tl.int32)
        tap_x = x + tl.load(tap_row + 1).to(tl.int32)
        weight = tl.load(tap_row + 2) * (1 / 255 if BYTES else 1)
        inside = (tap_y >= 0) & (tap_y < height) & (tap_x >= 0) & (tap_x < width)
        source_y, source_x = border_index(tap_y, height, SETTINGS[0]), border_index(tap_x, width, SETTINGS[0])
        total += weight * load_lines(plane + source_y * stride_y + source_x * SOURCE_W, inside, SETTINGS[0], BYTES)
    return total


def motion_blur_launch(pass_: OpPass[MotionBlurOp], source: Tensor, rows: Tensor, out: Tensor) -> FilterLaunch:
    """Prepare the launch of a pass whose front is a motion blur."""
    return filter_launch(motion_blur, (BORDERS[pass_.front.border],), pass_, source, rows, out)
