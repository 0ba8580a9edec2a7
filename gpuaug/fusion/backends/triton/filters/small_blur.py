"""Triton kernel of small Gaussian blurs, along both axes at once, and its launch. ``tiles.py`` describes the tiles."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.tiles import (
    ACROSS,
    ALONG,
    LINES,
    TILES,
    add_lines,
    border_index,
    load_exact_pixels,
    load_pixels,
    store_tile,
    with_channel,
)
from gpuaug.fusion.backends.triton.launch import Launch, kernel, output_constants
from gpuaug.fusion.backends.triton.pixel_math import gaussian_exponent, gaussian_norm
from gpuaug.fusion.backends.triton.taps import select_sample
from gpuaug.fusion.ops.filters import BlurOp
from gpuaug.fusion.program.plan import OpPass

GROUP = 4
"""Number of neighbours along x, a *group*, that a thread loads at once and blurs together, if groups have aligned addresses.

Pixels that several neighbours depend on are then loaded from the first-level cache less often. With more than four neighbours,
fewer threads would run at once, because a thread would need more registers.
"""

GROUP_ALONG, GROUP_LINES = 4, 2
"""Lines of a tile of groups, and lines per load."""


@triton.jit
def load_groups(line, offsets, inside, BORDER: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr):
    """Load (ACROSS, N) pixels of N lines by ``load_pixels``, as groups of neighbours: (N · ACROSS / GROUP, GROUP).

    ``line``: addresses of the lines. ``offsets``: offsets along x. ``ALIGNED``: the address of each group is a multiple of its
    size in bytes.
    """
    line, offsets = tl.broadcast(line, offsets)
    # On one axis, so that the compiler can infer which addresses are contiguous.
    pointer = tl.ravel(tl.trans(line)) + tl.ravel(tl.trans(offsets))
    if ALIGNED:
        pixel_bytes: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
        pointer = tl.max_contiguous(tl.multiple_of(pointer, GROUP * pixel_bytes), GROUP)
    pixels = load_pixels(pointer, tl.ravel(tl.trans(inside)), BORDER, BYTES)
    return tl.reshape(pixels, pixels.shape[0] // GROUP, GROUP)


@triton.jit
def lines_along_x(
    pointer, first_y, x, height, width, stride_y, exponent, norm,
    TAPS: tl.constexpr, BORDER: tl.constexpr, SOURCE_W: tl.constexpr, BYTES: tl.constexpr,
    GROUP: tl.constexpr, INSIDE: tl.constexpr, LINES: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Load lines of one plane from ``first_y`` on, and blur them along x: (ACROSS, LINES).

    ``INSIDE``: all groups that the blur reads lie in the image.
    """
    groups_beside: tl.constexpr = (TAPS // 2 + GROUP - 1) // GROUP
    y = first_y + tl.arange(0, LINES)[None, :]
    line = pointer + border_index(y, height, BORDER) * stride_y
    lines = tl.zeros((LINES * ACROSS // GROUP, GROUP), tl.float32)
    for group in tl.static_range(-groups_beside, groups_beside + 1):
        group_x = x + group * GROUP
        inside = (y >= 0) & (y < height)
        if not INSIDE:
            inside = inside & (group_x >= 0) & (group_x < width)
            group_x = border_index(group_x, width, BORDER)
        pixels = load_groups(line, group_x * SOURCE_W, inside, BORDER, BYTES, GROUP, INSIDE)
        lines = add_lines(lines, pixels, group * GROUP + TAPS // 2, exponent, norm, TAPS, GROUP)
    return tl.trans(tl.reshape(lines, LINES, ACROSS))


@triton.jit
def blur_tile(
    pointer, first_y, x, height, width, stride_y, sigma_y, sigma_x, TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr,
    BORDER: tl.constexpr, SOURCE_W: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr, INSIDE: tl.constexpr,
    LINES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Blur a tile of one plane: each line along x, then along y. ``INSIDE``: see ``lines_along_x``."""
    exponent_y, exponent_x = gaussian_exponent(sigma_y), gaussian_exponent(sigma_x)
    norm_y, norm_x = gaussian_norm(exponent_y, TAPS_Y), gaussian_norm(exponent_x, TAPS_X)
    total = tl.zeros((ACROSS, ALONG), tl.float32)
    if INSIDE or GROUP == 1:
        for start in tl.static_range(0, ALONG + TAPS_Y - 1, LINES):
            lines = lines_along_x(
                pointer, first_y + (start - TAPS_Y // 2), x, height, width, stride_y, exponent_x, norm_x,
                TAPS_X, BORDER, SOURCE_W, BYTES, GROUP, INSIDE, LINES, ACROSS,
            )  # fmt: skip
            total = add_lines(total, lines, start, exponent_y, norm_y, TAPS_Y, ALONG)
    else:
        # Not unrolled, because few tiles are at the border, and unrolling would double the compile time.
        for start in range(0, ALONG + TAPS_Y - 1, LINES):
            lines = lines_along_x(
                pointer, first_y + (start - TAPS_Y // 2), x, height, width, stride_y, exponent_x, norm_x,
                TAPS_X, BORDER, SOURCE_W, BYTES, GROUP, INSIDE, LINES, ACROSS,
            )  # fmt: skip
            total = add_lines(total, lines, start, exponent_y, norm_y, TAPS_Y, ALONG)
    return total


@kernel
def blur_kernel(
    source, out, rows, height, width, tiles, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, BORDER: tl.constexpr, SOURCE_W: tl.constexpr, FRAMES: tl.constexpr,
    BYTES: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr, OP_COUNT: tl.constexpr, CHANNELS: tl.constexpr,
    RGB: tl.constexpr, GROUP: tl.constexpr, LINES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
    TILES: tl.constexpr, ROUTE_COLUMN: tl.constexpr,
):  # fmt: skip
    """Blur along both axes. A block has consecutive tiles, counted down the image, in columns of ``tiles`` tiles.

    Grid: (blocks per image, samples, planes; with ``RGB`` one plane).
    """
    skipped, sample, plane, row, pointer, out = select_sample(
        source, out, rows, row_stride, source_b, source_c, out_b, FRAMES, ROUTE_COLUMN
    )
    if skipped:
        return
    tile_across: tl.constexpr = ACROSS // TILES
    index = tl.arange(0, ACROSS)[:, None]
    tile = tl.program_id(0) * TILES + index // tile_across
    first_y = tile % tiles * ALONG
    x = tile // tiles * tile_across + index % tile_across
    y = first_y + tl.arange(0, ALONG)[None, :]
    if tl.load(row) != 0:
        sigma_y = tl.load(row + 1)
        sigma_x = tl.load(row + 2)
        reach: tl.constexpr = (TAPS_X // 2 + GROUP - 1) // GROUP * GROUP
        # Columns [left, right) of the tiles of the block.
        left = tl.program_id(0) * TILES // tiles * tile_across
        right = (tl.program_id(0) * TILES + TILES - 1) // tiles * tile_across + tile_across
        inside = (left >= reach) & (right + reach <= width)
        r = tl.zeros((ACROSS, ALONG), tl.float32)
        g = r
        b = r
        for channel in range(3 if RGB else 1):
            plane_pointer = pointer + channel * source_c
            if GROUP > 1 and inside:
                value = blur_tile(
                    plane_pointer, first_y, x, height, width, source_h, sigma_y, sigma_x,
                    TAPS_Y, TAPS_X, BORDER, SOURCE_W, BYTES, GROUP, True, LINES, ALONG, ACROSS,
                )  # fmt: skip
            else:
                value = blur_tile(
                    plane_pointer, first_y, x, height, width, source_h, sigma_y, sigma_x,
                    TAPS_Y, TAPS_X, BORDER, SOURCE_W, BYTES, GROUP, False, LINES, ALONG, ACROSS,
                )  # fmt: skip
            r, g, b = with_channel(value, channel, r, g, b, RGB)
        if BYTES:
            r, g, b = r * (1 / 255), g * (1 / 255), b * (1 / 255)
    else:
        pixel = pointer + tl.minimum(y, height - 1) * source_h + x * SOURCE_W
        r, g, b = load_exact_pixels(pixel, x < width, source_c, BYTES, RGB)
    store_tile(
        r, g, b, x, y, sample, plane, height, width, row, out, out_c, out_h,
        OUT_W, PROGRAM, OP_COUNT, CHANNELS, RGB, GROUP=GROUP,
    )  # fmt: skip


def small_blur(pass_: OpPass[BlurOp], source: Tensor, rows: Tensor, out: Tensor, blur_constants: dict[str, Any]) -> Launch:
    """Return the launch of a blur along both axes at once. ``blur_constants``: numbers of taps, and border mode."""
    batch, _, height, width = source.shape
    common, planes = output_constants(pass_, source, out)
    strides = (*source.stride()[:3], *out.stride()[:3])
    # Images between passes begin at aligned addresses; images of users may not. Three planes at once need too many registers.
    planar = source.stride(3) == out.stride(3) == 1 and not common["RGB"]
    grouped = planar and pass_.first_column > 0 and not any(size % GROUP for size in (width, *strides))
    group, along, lines = (GROUP, GROUP_ALONG, GROUP_LINES) if grouped else (1, ALONG, LINES.value)
    tiles_down, tiles_across = triton.cdiv(height, along), triton.cdiv(width, ACROSS)
    warps = min(TILES, triton.next_power_of_2(triton.cdiv(tiles_down * tiles_across, group))) if pass_.route_column >= 0 else 1
    blocks = triton.cdiv(tiles_down * tiles_across, group * warps)
    constants = {"GROUP": group, "LINES": lines, "ALONG": along, "ACROSS": ACROSS * group * warps, "TILES": group * warps}
    integers = (height, width, tiles_down, rows.stride(0), *strides)
    return Launch(blur_kernel, (blocks, batch, planes), integers, {**common, **blur_constants, **constants}, warps=warps)
