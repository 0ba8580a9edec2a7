"""The Triton kernels of equalize, CLAHE and auto contrast, and their launches. Tiles of blocks: ``tiles.py``."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.tiles import (
    POINTERS,
    SIZES,
    STRIDES,
    counted,
    placed,
    read_flat,
    stored,
    storing_launch,
    tile_of,
    untouched,
    untouched_pixels,
    untouched_tile,
)
from gpuaug.fusion.backends.triton.launch import Launch, prepared, reading
from gpuaug.fusion.backends.triton.pixel_math import (
    LEVELS,
    as_float,
    byte_share,
    level_of,
    spread,
    tile_side,
    tiles_between,
    unit,
)
from gpuaug.fusion.backends.triton.taps import buffers
from gpuaug.fusion.ops import filters
from gpuaug.fusion.ops.filters import AutoContrast, Clahe, Equalize, EqualizeOrContrast, LevelsOp
from gpuaug.fusion.program.plan import OpPass

EQUALIZE, FLAT = tl.constexpr(filters.EQUALIZE), tl.constexpr(filters.FLAT)

BLOCK = 2048
"""Pixels that a block reads at once."""

TILE_BLOCK = 512
"""The same of one tile, which has some hundreds."""

PART, MOST_PARTS = 8192, 8
"""Pixels that a block counts, and most blocks of a channel, in a pass that skips samples: it has few channels to count."""

NUMBERS = ("height", "width", "row_stride", "source_b", "source_c", "source_h")
TABLES = ("source", "tables", "rows")


@triton.jit
def rounded(value, FACTOR: tl.constexpr, OFFSET: tl.constexpr):
    """The level of a byte for a number, as a share of 255; NaN of what is none."""
    level = tl.floor(unit(value) * FACTOR + OFFSET)
    return tl.div_rn(level, 255.0 + 0.0 * level)


@triton.jit(do_not_specialize=[*NUMBERS], do_not_specialize_on_alignment=[*TABLES])
def table_kernel(
    source, tables, rows, height, width, row_stride, source_b, source_c, source_h,
    SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, SCALE: tl.constexpr, CHANNELS: tl.constexpr, ENTRIES: tl.constexpr,
    FACTOR: tl.constexpr, OFFSET: tl.constexpr, KEEPS: tl.constexpr, ROUNDS: tl.constexpr, EITHER: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """Make the table of a channel: what its levels become; or its least and its most. ``EITHER``: as the sample picked.

    With several ``PARTS`` the table of each: how many pixels have which level, int32; or the least and the most.

    Grid: (samples, planes, parts).
    """
    sample = tl.program_id(0)
    plane = tl.program_id(1)
    if WAY >= 0:
        skipped, source, _ = buffers(
            rows + sample // FRAMES * row_stride + WAY, source, source_b, tables, 0, tl.num_programs(0)
        )
        if skipped:
            return
    part = tl.program_id(2)
    table = tables + ((sample.to(tl.int64) * CHANNELS + plane) * PARTS + part) * ENTRIES
    pointer = source + sample.to(tl.int64) * source_b + plane * source_c
    if PARTS > 1:
        lines = (height + PARTS - 1) // PARTS
        pointer += part * lines * source_h
        height = tl.maximum(tl.minimum(height - part * lines, lines), 0)
    pixels = height * width
    picked = tl.load(rows + sample // FRAMES * row_stride)
    if picked != 0:
        if picked == EQUALIZE if EITHER else ENTRIES == LEVELS:
            made = counted(pointer, 0, 0, height, width, height, width, source_h, SOURCE_W, SCALE, FACTOR, OFFSET, False, BLOCK)
            if PARTS == 1:
                made = spread(made, pixels, KEEPS)
            tl.store(table + tl.arange(0, ENTRIES), made)
        else:
            least = tl.full((BLOCK,), float("inf"), tl.float32)
            most = tl.full((BLOCK,), float("-inf"), tl.float32)
            holes = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, pixels, BLOCK):
                index = tl.minimum(start + tl.arange(0, BLOCK), pixels - 1)
                value = untouched(pointer + index // width * source_h + index % width * SOURCE_W, SCALE)
                value = rounded(value, FACTOR, OFFSET) if ROUNDS else value
                least = tl.minimum(least, value)
                most = tl.maximum(most, value)
                holes = tl.where(value == value, holes, 1)
            range_of = table.to(tl.pointer_type(tl.float32))
            tl.store(range_of, tl.where(tl.max(holes, 0) == 0, tl.min(least, 0), float("nan")))
            tl.store(range_of + 1, tl.max(most, 0))


@triton.jit(do_not_specialize=[*NUMBERS], do_not_specialize_on_alignment=[*TABLES])
def tile_table_kernel(
    source, tables, rows, height, width, row_stride, source_b, source_c, source_h,
    SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, SCALE: tl.constexpr, CHANNELS: tl.constexpr, FACTOR: tl.constexpr,
    OFFSET: tl.constexpr, GRID_H: tl.constexpr, GRID_W: tl.constexpr, BLOCK: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """Make the table of a tile of a channel, (LEVELS,) uint8.

    Grid: (tiles, samples, planes).
    """
    tile = tl.program_id(0)
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample // FRAMES * row_stride
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
def equalized(value, table, pixels, FACTOR: tl.constexpr, OFFSET: tl.constexpr, KEEPS: tl.constexpr, PARTS: tl.constexpr):
    """A channel's pixels through its table, or through that of its parts."""
    clamped = unit(value)
    level = level_of(clamped, FACTOR, OFFSET)
    if PARTS == 1:
        made = read_flat(table + level)
    else:
        at = tl.arange(0, LEVELS)
        counts = tl.load(table + at)
        for part in tl.static_range(1, PARTS):
            counts += tl.load(table + part * LEVELS + at)
        made = tl.reshape(tl.gather(spread(counts, pixels, KEEPS), tl.ravel(level), 0), level.shape)
    if KEEPS:
        made = tl.where(made < 0, tl.div_rn(clamped * 255.0, 255.0 + 0.0 * clamped), made)
    return tl.where(value == value, made, value)


@triton.jit
def stretched(value, table, ENTRIES: tl.constexpr, EPSILON: tl.constexpr, CLIP: tl.constexpr, PARTS: tl.constexpr):
    """A channel's pixels from between its least and its most to between 0 and 1; as they are or 0 if these are one value."""
    table = table.to(tl.pointer_type(tl.float32))
    least = tl.load(table)
    most = tl.load(table + 1)
    for part in tl.static_range(1, PARTS):
        least = tl.minimum(least, tl.load(table + part * ENTRIES), propagate_nan=tl.PropagateNan.ALL)
        most = tl.maximum(most, tl.load(table + part * ENTRIES + 1))
    flat = (least == most) | (most - least <= FLAT)
    if EPSILON == 0:
        least = tl.where(flat, 0.0, least)
        most = tl.where(flat, 1.0, most)
    made = tl.div_rn(value - least, (most - least + EPSILON) + 0.0 * value)
    if EPSILON > 0:
        made = tl.where(flat, 0.0, made)
    if CLIP:
        made = unit(made)
    return made


@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=[*POINTERS])
def levels_kernel(
    source, made, out, rows, height, width, tiles, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, SCALE: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr,
    COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
    TILES: tl.constexpr, ENTRIES: tl.constexpr, FACTOR: tl.constexpr, OFFSET: tl.constexpr, KEEPS: tl.constexpr,
    ROUNDS: tl.constexpr, EPSILON: tl.constexpr, CLIP: tl.constexpr, EITHER: tl.constexpr, PARTS: tl.constexpr,
    WAY: tl.constexpr,
):  # fmt: skip
    """Take pixels through the tables that ``table_kernel`` made, or through those of the counts of ``PARTS``.

    Grid: (tiles of an image, samples, planes; one plane where a block makes all three).
    """
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample // FRAMES * row_stride
    if WAY >= 0:
        skipped, source, out = buffers(row + WAY, source, source_b, out, out_b, tl.num_programs(1))
        if skipped:
            return
    _, y, x = tile_of(tiles, ALONG, ACROSS, TILES)
    pointer = source + sample.to(tl.int64) * source_b + plane * source_c
    pixel = pointer + tl.minimum(y, height - 1) * source_h + x * SOURCE_W
    r, g, b = untouched_pixels(pixel, x < width, source_c, SCALE, RGB)
    picked = tl.load(row)
    if picked != 0:
        for channel in range(3 if RGB else 1):
            table = made + (sample.to(tl.int64) * CHANNELS + plane + channel) * (PARTS * ENTRIES)
            value = tl.where(channel == 0, r, tl.where(channel == 1, g, b)) if RGB else r
            if picked == EQUALIZE if EITHER else ENTRIES == LEVELS:
                value = equalized(value, table, height * width, FACTOR, OFFSET, KEEPS, PARTS)
            else:
                value = rounded(value, FACTOR, OFFSET) if ROUNDS else value
                value = stretched(value, table, ENTRIES, EPSILON, CLIP, PARTS)
            r, g, b = placed(value, channel, r, g, b, RGB)
    stored(r, g, b, x, y, sample, plane, height, width, row, out, out_b, out_c, out_h, OUT_W, PROGRAM, COUNT, CHANNELS, RGB)


@triton.jit
def tiled(
    value, table, top, bottom, upper_share, left, right, left_share,
    GRID_W: tl.constexpr, FACTOR: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """A channel's pixels through the tables of the four nearest tiles, blended."""
    entry = table + level_of(unit(value), FACTOR, OFFSET)
    a = as_float(read_flat(entry + (top * GRID_W + left) * LEVELS), True)
    b = as_float(read_flat(entry + (top * GRID_W + right) * LEVELS), True)
    c = as_float(read_flat(entry + (bottom * GRID_W + left) * LEVELS), True)
    d = as_float(read_flat(entry + (bottom * GRID_W + right) * LEVELS), True)
    upper = b + (a - b) * left_share
    lower = d + (c - d) * left_share
    return tl.where(value == value, byte_share(lower + (upper - lower) * upper_share), value)


@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=[*POINTERS])
def clahe_kernel(
    source, made, out, rows, height, width, tiles, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, SCALE: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr,
    COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
    TILES: tl.constexpr, FACTOR: tl.constexpr, OFFSET: tl.constexpr, GRID_H: tl.constexpr, GRID_W: tl.constexpr,
    WAY: tl.constexpr,
):  # fmt: skip
    """Take pixels through the tables that ``tile_table_kernel`` made.

    Grid: (tiles of an image, samples, planes; one plane where a block makes all three).
    """
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample // FRAMES * row_stride
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
            value = untouched_tile(pixel + channel * source_c, x < width, SCALE)
            own = table + channel * entries
            value = tiled(value, own, top, bottom, upper_share, left, right, left_share, GRID_W, FACTOR, OFFSET)
            r, g, b = placed(value, channel, r, g, b, RGB)
    else:
        r, g, b = untouched_pixels(pixel, x < width, source_c, SCALE, RGB)
    stored(r, g, b, x, y, sample, plane, height, width, row, out, out_b, out_c, out_h, OUT_W, PROGRAM, COUNT, CHANNELS, RGB)


class _Levelling(NamedTuple):
    tables: Launch
    pixels: Launch
    entries: int
    """Length of a channel's tables, with those of its parts."""
    dtype: torch.dtype
    """Of the tables."""


def level(step: OpPass[LevelsOp], source: Tensor, rows: Tensor, out: Tensor) -> int:
    """Launch a pass with equalize, CLAHE or auto contrast in front on the current stream, in two launches.

    Arguments, shapes and the number returned are those of ``gpuaug.fusion.backends.triton.filters.blur.blur``.
    """
    found = prepared(step, source, rows, out, _levelling)
    tables = torch.empty((*source.shape[:2], found.entries), dtype=found.dtype, device=source.device)
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
        return _Levelling(tables, storing_launch(clahe_kernel, step, source, rows, out, settings), op.entries, torch.uint8)
    parts = min(triton.cdiv(height * width, PART), MOST_PARTS) if step.way >= 0 else 1
    equalize, contrast = op.picks if isinstance(op, EqualizeOrContrast) else (op, op)
    keeps = isinstance(equalize, Equalize) and equalize.keeps_values
    settings |= {"ENTRIES": op.entries, "KEEPS": keeps, "PARTS": parts, "EITHER": equalize is not contrast}
    settings["ROUNDS"] = contrast.rounds and not own["SCALE"]
    constants = {**own, **settings, "WAY": step.way, "BLOCK": BLOCK}
    tables = Launch(table_kernel, (batch, channels, parts), numbers, constants, warps=8)
    epsilon, clip = (contrast.epsilon, contrast.clips) if isinstance(contrast, AutoContrast) else (0.0, False)
    settings |= {"EPSILON": epsilon, "CLIP": clip}
    dtype = torch.int32 if parts > 1 and isinstance(equalize, Equalize) else torch.float32
    return _Levelling(tables, storing_launch(levels_kernel, step, source, rows, out, settings), parts * op.entries, dtype)
