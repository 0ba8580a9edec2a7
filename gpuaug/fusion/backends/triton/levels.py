"""The Triton kernels of equalize, CLAHE and auto contrast, and their launches. Tiles of blocks: ``filter_tiles.py``."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filter_tiles import (
    POINTERS,
    SIZES,
    STRIDES,
    bordered,
    placed,
    stored,
    storing_launch,
    tile_of,
    untouched,
    untouched_pixels,
)
from gpuaug.fusion.backends.triton.launch import Launch, prepared, reading
from gpuaug.fusion.backends.triton.pixel_math import as_float, byte_share, unit
from gpuaug.fusion.backends.triton.taps import buffers
from gpuaug.fusion.ops import filters
from gpuaug.fusion.ops.filters import AutoContrast, Clahe, Equalize, LevelsOp
from gpuaug.fusion.plan import OpPass

LEVELS = tl.constexpr(filters.LEVELS)

BLOCK = 2048
"""Pixels that a block reads at once."""

TILE_BLOCK = 512
"""The same of one tile, which has some hundreds."""

NUMBERS = ("height", "width", "row_stride", "source_b", "source_c", "source_h")
TABLES = ("source", "tables", "rows")


@triton.jit
def level_of(value, FACTOR: tl.constexpr, OFFSET: tl.constexpr):
    """The level of a byte for a number in [0, 1]; 0 of one that is no number."""
    return (tl.where(value == value, value, 0.0) * FACTOR + OFFSET).to(tl.int32)


@triton.jit
def counted(
    pointer, top, left, down, across, height, width, source_h, SOURCE_W: tl.constexpr, SCALE: tl.constexpr,
    FACTOR: tl.constexpr, OFFSET: tl.constexpr, REFLECTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many pixels of a rectangle of a channel have each level, (LEVELS,) int32.

    ``REFLECTS``: the rectangle may reach beyond the image, which is reflected there.
    """
    pixels = down * across
    counts = tl.zeros((LEVELS,), tl.int32)
    for start in range(0, pixels, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = tl.minimum(index, pixels - 1)
        y = top + inside // across
        x = left + inside % across
        if REFLECTS:
            y = bordered(y, height, 1)
            x = bordered(x, width, 1)
        value = unit(untouched(pointer + y * source_h + x * SOURCE_W, SCALE))
        # What lies beyond the rectangle is counted as black, and taken off again.
        counts += tl.histogram(tl.where(index < pixels, level_of(value, FACTOR, OFFSET), 0), LEVELS)
    return counts - tl.where(tl.arange(0, LEVELS) == 0, (pixels + BLOCK - 1) // BLOCK * BLOCK - pixels, 0)


@triton.jit(do_not_specialize=[*NUMBERS], do_not_specialize_on_alignment=[*TABLES])
def table_kernel(
    source, tables, rows, height, width, row_stride, source_b, source_c, source_h,
    SOURCE_W: tl.constexpr, SCALE: tl.constexpr, CHANNELS: tl.constexpr, ENTRIES: tl.constexpr,
    FACTOR: tl.constexpr, OFFSET: tl.constexpr, KEEPS: tl.constexpr, EPSILON: tl.constexpr, BLOCK: tl.constexpr,
    WAY: tl.constexpr,
):  # fmt: skip
    """Make the table of a channel: what its levels become, -1 where values stay; or its least and its most.

    Grid: (samples, planes).
    """
    sample = tl.program_id(0)
    plane = tl.program_id(1)
    if WAY >= 0:
        skipped, source, _ = buffers(rows + sample * row_stride + WAY, source, source_b, tables, 0, tl.num_programs(0))
        if skipped:
            return
    table = tables + (sample * CHANNELS + plane) * ENTRIES
    pointer = source + sample.to(tl.int64) * source_b + plane * source_c
    pixels = height * width
    if tl.load(rows + sample * row_stride) != 0:
        if ENTRIES == LEVELS:
            at = tl.arange(0, ENTRIES)
            counts = counted(
                pointer, 0, 0, height, width, height, width, source_h, SOURCE_W, SCALE, FACTOR, OFFSET, False, BLOCK
            )
            last = tl.max(tl.where(counts > 0, at, 0), 0)
            step = (pixels - tl.sum(tl.where(at == last, counts, 0), 0)) // 255
            spread = (tl.cumsum(counts, 0) - counts + step // 2) // tl.maximum(step, 1)
            spread = tl.where(step == 0, at, tl.minimum(spread, 255)).to(tl.float32)
            share = tl.div_rn(spread, 255.0 + 0.0 * spread)
            if KEEPS:
                share = tl.where(step == 0, -1.0, share)
            tl.store(table + at, share)
        else:
            least = tl.full((BLOCK,), float("inf"), tl.float32)
            most = tl.full((BLOCK,), float("-inf"), tl.float32)
            holes = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, pixels, BLOCK):
                index = tl.minimum(start + tl.arange(0, BLOCK), pixels - 1)
                value = untouched(pointer + index // width * source_h + index % width * SOURCE_W, SCALE)
                least = tl.minimum(least, value)
                most = tl.maximum(most, value)
                holes = tl.where(value == value, holes, 1)
            low = tl.min(least, 0)
            high = tl.max(most, 0)
            if EPSILON == 0:
                flat = low == high
                low = tl.where(flat, 0.0, low)
                high = tl.where(flat, 1.0, high)
            tl.store(table, tl.where(tl.max(holes, 0) == 0, low, float("nan")))
            tl.store(table + 1, high)


@triton.jit
def tile_side(length, COUNT: tl.constexpr):
    """Pixels along one side of a tile, for ``COUNT`` tiles along an axis."""
    return (length + COUNT - 1) // COUNT


@triton.jit(do_not_specialize=[*NUMBERS], do_not_specialize_on_alignment=[*TABLES])
def tile_table_kernel(
    source, tables, rows, height, width, row_stride, source_b, source_c, source_h,
    SOURCE_W: tl.constexpr, SCALE: tl.constexpr, CHANNELS: tl.constexpr, FACTOR: tl.constexpr,
    OFFSET: tl.constexpr, GRID_H: tl.constexpr, GRID_W: tl.constexpr, BLOCK: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """Make the table of a tile of a channel, (LEVELS,) uint8.

    Grid: (tiles, samples, planes).
    """
    tile = tl.program_id(0)
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample * row_stride
    if WAY >= 0:
        skipped, source, _ = buffers(row + WAY, source, source_b, tables, 0, tl.num_programs(1))
        if skipped:
            return
    if tl.load(row) != 0:
        down = tile_side(height, GRID_H)
        across = tile_side(width, GRID_W)
        top = tile // GRID_W * down
        left = tile % GRID_W * across
        pointer = source + sample.to(tl.int64) * source_b + plane * source_c
        counts = counted(
            pointer, top, left, down, across, height, width, source_h, SOURCE_W, SCALE, FACTOR, OFFSET, True, BLOCK
        )
        counts = tl.minimum(counts, tl.load(row + 1).to(tl.int32))
        pixels = down * across
        clipped = pixels - tl.sum(counts, 0)
        rest = clipped % LEVELS
        spacing = LEVELS // tl.maximum(rest, 1)
        at = tl.arange(0, LEVELS)
        counts += clipped // LEVELS + tl.where((at % spacing == 0) & (at // spacing < rest), 1, 0)
        scale = tl.div_rn(255.0 + 0.0 * at, pixels + 0.0 * at)
        # To the nearest whole number, half to even, as above 2²³ there are no others.
        made = tl.cumsum(counts, 0).to(tl.float32) * scale + 8388608.0 - 8388608.0
        table = tables + ((sample.to(tl.int64) * CHANNELS + plane) * (GRID_H * GRID_W) + tile) * LEVELS
        tl.store(table + at, tl.minimum(made, 255.0).to(tl.uint8))


@triton.jit
def levelled(
    value, table, ENTRIES: tl.constexpr, FACTOR: tl.constexpr, OFFSET: tl.constexpr, KEEPS: tl.constexpr,
    EPSILON: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """A channel's pixels through its table."""
    if ENTRIES == LEVELS:
        clamped = unit(value)
        made = tl.load(table + level_of(clamped, FACTOR, OFFSET))
        if KEEPS:
            made = tl.where(made < 0, tl.div_rn(clamped * 255.0, 255.0 + 0.0 * clamped), made)
        return tl.where(value == value, made, value)
    least = tl.load(table)
    made = tl.div_rn(value - least, (tl.load(table + 1) - least + EPSILON) + 0.0 * value)
    if CLIP:
        made = unit(made)
    return made


@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=[*POINTERS])
def levels_kernel(
    source, made, out, rows, height, width, tiles, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    SOURCE_W: tl.constexpr, SCALE: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr,
    COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
    TILES: tl.constexpr, ENTRIES: tl.constexpr, FACTOR: tl.constexpr, OFFSET: tl.constexpr, KEEPS: tl.constexpr,
    EPSILON: tl.constexpr, CLIP: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """Take pixels through the tables that ``table_kernel`` made.

    Grid: (tiles of an image, samples, planes; one plane where a block makes all three).
    """
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample * row_stride
    if WAY >= 0:
        skipped, source, out = buffers(row + WAY, source, source_b, out, out_b, tl.num_programs(1))
        if skipped:
            return
    _, y, x = tile_of(tiles, ALONG, ACROSS, TILES)
    pointer = source + sample.to(tl.int64) * source_b + plane * source_c
    pixel = pointer + tl.minimum(y, height - 1) * source_h + x * SOURCE_W
    r, g, b = untouched_pixels(pixel, x < width, source_c, SCALE, RGB)
    if tl.load(row) != 0:
        table = made + (sample * CHANNELS + plane) * ENTRIES
        r = levelled(r, table, ENTRIES, FACTOR, OFFSET, KEEPS, EPSILON, CLIP)
        if RGB:
            g = levelled(g, table + ENTRIES, ENTRIES, FACTOR, OFFSET, KEEPS, EPSILON, CLIP)
            b = levelled(b, table + 2 * ENTRIES, ENTRIES, FACTOR, OFFSET, KEEPS, EPSILON, CLIP)
    stored(r, g, b, x, y, sample, plane, height, width, row, out, out_b, out_c, out_h, OUT_W, PROGRAM, COUNT, CHANNELS, RGB)


@triton.jit
def tiles_between(at, length, COUNT: tl.constexpr):
    """The two tiles whose centres pixels of an axis lie between, or twice the outermost, and the share of the first.

    Pixels of a block that lie behind the image have the tiles of its last one.
    """
    at = tl.minimum(at, length - 1)
    double = 2 * tile_side(length, COUNT)
    place = 2 * at + 1 + double // 2
    second = place // double
    share = tl.div_rn((double - place % double).to(tl.float32), double + 0.0 * at)
    return tl.maximum(second - 1, 0), tl.minimum(second, COUNT - 1), share


@triton.jit
def tiled(
    value, table, top, bottom, upper_share, left, right, left_share,
    GRID_W: tl.constexpr, FACTOR: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """A channel's pixels through the tables of the four nearest tiles, blended."""
    entry = table + level_of(unit(value), FACTOR, OFFSET)
    a = as_float(tl.load(entry + (top * GRID_W + left) * LEVELS), True)
    b = as_float(tl.load(entry + (top * GRID_W + right) * LEVELS), True)
    c = as_float(tl.load(entry + (bottom * GRID_W + left) * LEVELS), True)
    d = as_float(tl.load(entry + (bottom * GRID_W + right) * LEVELS), True)
    upper = b + (a - b) * left_share
    lower = d + (c - d) * left_share
    return tl.where(value == value, byte_share(lower + (upper - lower) * upper_share), value)


@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=[*POINTERS])
def clahe_kernel(
    source, made, out, rows, height, width, tiles, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    SOURCE_W: tl.constexpr, SCALE: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr,
    COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
    TILES: tl.constexpr, FACTOR: tl.constexpr, OFFSET: tl.constexpr, GRID_H: tl.constexpr, GRID_W: tl.constexpr,
    WAY: tl.constexpr,
):  # fmt: skip
    """Take pixels through the tables that ``tile_table_kernel`` made.

    Grid: (tiles of an image, samples, planes; one plane where a block makes all three).
    """
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample * row_stride
    if WAY >= 0:
        skipped, source, out = buffers(row + WAY, source, source_b, out, out_b, tl.num_programs(1))
        if skipped:
            return
    _, y, x = tile_of(tiles, ALONG, ACROSS, TILES)
    pointer = source + sample.to(tl.int64) * source_b + plane * source_c
    pixel = pointer + tl.minimum(y, height - 1) * source_h + x * SOURCE_W
    if tl.load(row) != 0:
        entries: tl.constexpr = GRID_H * GRID_W * LEVELS
        table = made + (sample.to(tl.int64) * CHANNELS + plane) * entries
        top, bottom, upper_share = tiles_between(y, height, GRID_H)
        left, right, left_share = tiles_between(x, width, GRID_W)
        r = tl.zeros((ACROSS, ALONG), tl.float32)
        g = r
        b = r
        for channel in range(3 if RGB else 1):
            value = untouched(pixel + channel * source_c, SCALE, x < width)
            own = table + channel * entries
            value = tiled(value, own, top, bottom, upper_share, left, right, left_share, GRID_W, FACTOR, OFFSET)
            r, g, b = placed(value, channel, r, g, b, RGB)
    else:
        r, g, b = untouched_pixels(pixel, x < width, source_c, SCALE, RGB)
    stored(r, g, b, x, y, sample, plane, height, width, row, out, out_b, out_c, out_h, OUT_W, PROGRAM, COUNT, CHANNELS, RGB)


class _Levelling(NamedTuple):
    tables: Launch
    pixels: Launch
    dtype: torch.dtype
    """Of the tables."""


def level(step: OpPass[LevelsOp], source: Tensor, rows: Tensor, out: Tensor) -> int:
    """Launch a pass with equalize, CLAHE or auto contrast in front on the current stream, in two launches.

    Arguments, shapes and the number returned are those of ``gpuaug.fusion.backends.triton.blur.blur``.
    """
    found = prepared(step, source, rows, out, _levelling)
    tables = torch.empty((*source.shape[:2], step.front.entries), dtype=found.dtype, device=source.device)
    found.tables((source, tables, rows))
    found.pixels((source, tables, out, rows))
    return 2


def _levelling(step: OpPass[LevelsOp], source: Tensor, rows: Tensor, out: Tensor) -> _Levelling:
    op = step.front
    batch, channels, height, width = source.shape
    own = reading(step, source)
    numbers = (height, width, rows.stride(0), *source.stride()[:3])
    # A byte is its own level, whatever the op makes of its share of 255.
    factor, offset = (255.0, 0.5) if own["SCALE"] else op.to_levels
    settings: dict[str, Any] = {"FACTOR": factor, "OFFSET": offset}
    if isinstance(op, Clahe):
        settings |= {"GRID_H": op.grid[0], "GRID_W": op.grid[1]}
        grid = op.grid[0] * op.grid[1], batch, channels
        tables = Launch(
            tile_table_kernel, grid, numbers, {**own, **settings, "WAY": step.way, "BLOCK": TILE_BLOCK}, fused=False
        )
        return _Levelling(tables, storing_launch(clahe_kernel, step, source, rows, out, settings), torch.uint8)
    settings |= {
        "ENTRIES": op.entries,
        "KEEPS": op.keeps_values if isinstance(op, Equalize) else True,
        "EPSILON": op.epsilon if isinstance(op, AutoContrast) else 0.0,
    }
    tables = Launch(table_kernel, (batch, channels, 1), numbers, {**own, **settings, "WAY": step.way, "BLOCK": BLOCK}, warps=8)
    clips = {"CLIP": isinstance(op, AutoContrast) and op.clips}
    return _Levelling(tables, storing_launch(levels_kernel, step, source, rows, out, {**settings, **clips}), torch.float32)
