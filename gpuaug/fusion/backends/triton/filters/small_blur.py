"""Small Gaussian blurs in Triton, along both axes at once."""

import triton
import triton.language as tl

from gpuaug.fusion.backends.triton.filters.tiles import LINES, add_lines, border_index, load_lines
from gpuaug.fusion.backends.triton.pixel_math import gaussian_exponent, gaussian_norm


@triton.jit
def lines_along_x(
    plane, y, x, height, width, stride_y, exponent, norm,
    TAPS: tl.constexpr, BORDER: tl.constexpr, SOURCE_W: tl.constexpr, BYTES: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Load the lines ``y`` of one plane, (1, LINES), and blur them along x: (ACROSS, LINES)."""
    line = plane + border_index(y, height, BORDER) * stride_y
    lines = tl.zeros((ACROSS, LINES), tl.float32)
    for tap in tl.static_range(TAPS):
        tap_x = x + (tap - TAPS // 2)
        inside = (y >= 0) & (y < height) & (tap_x >= 0) & (tap_x < width)
        pixels = load_lines(line + border_index(tap_x, width, BORDER) * SOURCE_W, inside, BORDER, BYTES)
        distance = tl.full((), tap - TAPS // 2, tl.float32)
        lines += tl.exp(distance * distance * exponent) * norm * pixels
    return lines


@triton.jit
def small_blur(
    plane, between, row, first, y, x, height, width, stride_y,
    SOURCE_W: tl.constexpr, BYTES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, SETTINGS: tl.constexpr,
):  # fmt: skip
    """Blur each line along x, then along y. Row: apply mask, sigma of y and x. ``SETTINGS``: (taps of y, taps of x, border)."""
    TAPS_Y: tl.constexpr = SETTINGS[0]
    TAPS_X: tl.constexpr = SETTINGS[1]
    exponent_y, exponent_x = gaussian_exponent(tl.load(row + 1)), gaussian_exponent(tl.load(row + 2))
    norm_y, norm_x = gaussian_norm(exponent_y, TAPS_Y), gaussian_norm(exponent_x, TAPS_X)
    total = tl.zeros((ACROSS, ALONG), tl.float32)
    for start in tl.static_range(0, ALONG + TAPS_Y - 1, LINES):
        line_y = first + (start - TAPS_Y // 2) + tl.arange(0, LINES)[None, :]
        lines = lines_along_x(
            plane, line_y, x, height, width, stride_y, exponent_x, norm_x, TAPS_X, SETTINGS[2], SOURCE_W, BYTES, ACROSS
        )
        total = add_lines(total, lines, start, exponent_y, norm_y, TAPS_Y, ALONG)
    return total * (1 / 255) if BYTES else total
