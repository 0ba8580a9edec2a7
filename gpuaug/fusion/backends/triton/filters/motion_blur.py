"""Triton function of motion blurs: a pixel is the weighted sum of pixels along a line, which differs between samples."""

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
