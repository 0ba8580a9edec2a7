"""Equalize, CLAHE and auto contrast in Triton.

The ops run in two launches. The first computes a *table* per channel: for equalize the new value per level, for CLAHE such
values per tile of the channel, for auto contrast minimum and maximum. The second launch maps the pixels by the tables. A
*level* is a byte, 0 to 255.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.frame import filter_launch
from gpuaug.fusion.backends.triton.filters.tiles import count_levels, load_exact, load_exact_tile, load_flattened
from gpuaug.fusion.backends.triton.launch import FilterLaunch, FirstLaunch, Launch, kernel, source_constants
from gpuaug.fusion.backends.triton.pixel_math import (
    LEVELS,
    as_float,
    clamp01,
    div_by_255,
    equalize_table,
    nearest_tiles,
    tile_side,
    to_level,
)
from gpuaug.fusion.backends.triton.taps import select_sample
from gpuaug.fusion.ops import filters
from gpuaug.fusion.ops.filters import AutoContrast, Clahe, Equalize, EqualizeOrContrast, LevelsOp
from gpuaug.fusion.program.plan import OpPass

EQUALIZE, CONSTANT_RANGE = tl.constexpr(filters.EQUALIZE), tl.constexpr(filters.CONSTANT_RANGE)

BLOCK = 2048
"""Pixels that a thread block of ``table_kernel`` reads at once."""

TILE_BLOCK = 512
"""Pixels that a thread block of ``table_kernel`` reads at once for CLAHE. A tile of CLAHE has some hundreds of pixels."""

SPLIT_PIXELS, MOST_SPLITS = 8192, 8
"""Pixels per split, and maximum number of splits of a channel, in a pass that skips the samples that have picked other ops.

Such a pass reads few channels, so several thread blocks compute the table of a channel, each from one split of it. Without
splits, RandAugment and TrivialAugment take 1.23 to 1.36 times as long (256 x 3 x 224 x 224, H200, 2026-11-29).
"""


@kernel
def table_kernel(
    source, tables, rows, height, width, row_stride, source_b, source_c, source_h,
    SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, BYTES: tl.constexpr, CHANNELS: tl.constexpr, ENTRIES: tl.constexpr,
    FACTOR: tl.constexpr, OFFSET: tl.constexpr, KEEPS_VALUES: tl.constexpr, PICKS_OP: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, GRID_H: tl.constexpr, GRID_W: tl.constexpr, ROUTE_COLUMN: tl.constexpr,
):  # fmt: skip
    """Compute the table of a channel (equalize) or of a tile (CLAHE), or minimum and maximum of a channel (auto contrast).

    Constants:
        PICKS_OP: Whether the op differs by sample: equalize if the first column of the row is ``EQUALIZE``, else auto contrast.
        ENTRIES: Number of elements of a table; ``LEVELS`` for equalize.
        SPLITS: Number of blocks per channel. For CLAHE, each computes the table of a tile, (LEVELS,) uint8. For other ops, if
            greater than 1, each block writes the int32 pixel counts per level of its split of the channel, or its minimum and
            maximum, and ``map_levels`` combines them.
        GRID_H, GRID_W: Number of tiles of CLAHE along y and x; 0 for other ops.
        KEEPS_VALUES: Whether the table has -1 for a channel that must not change (``equalize_table``).
        FACTOR, OFFSET: Map from values in [0, 1] to levels (``to_level``).
        BYTES: Whether the source is uint8.
        ROUTE_COLUMN: Column of the buffer route (``BasePass.route_column``), which says which samples are skipped; or -1.

    Grid: (splits or tiles of a channel, samples, planes).
    """
    skipped, sample, plane, row, pointer, _ = select_sample(
        source, tables, rows, row_stride, source_b, source_c, 0, FRAMES, ROUTE_COLUMN
    )
    if skipped:
        return
    split = tl.program_id(0)
    table = tables + ((sample.to(tl.int64) * CHANNELS + plane) * SPLITS + split) * ENTRIES
    if SPLITS > 1 and GRID_H == 0:
        lines = (height + SPLITS - 1) // SPLITS
        pointer += split * lines * source_h
        height = tl.maximum(tl.minimum(height - split * lines, lines), 0)
    pixels = height * width
    applied_op = tl.load(row)
    if applied_op != 0:
        if GRID_H > 0:
            down = tile_side(height, GRID_H)
            across = tile_side(width, GRID_W)
            top = split // GRID_W * down
            left = split % GRID_W * across
            counts = count_levels(
                pointer, top, left, down, across, height, width, source_h, SOURCE_W, BYTES, FACTOR, OFFSET, True, BLOCK
            )
            counts = tl.minimum(counts, tl.load(row + 1).to(tl.int32))
            tile_pixels = down * across
            excess = tile_pixels - tl.sum(counts, 0)
            remainder = excess % LEVELS
            spacing = LEVELS // tl.maximum(remainder, 1)
            level = tl.arange(0, LEVELS)
            counts += excess // LEVELS + tl.where((level % spacing == 0) & (level // spacing < remainder), 1, 0)
            scale = tl.div_rn(255.0 + 0.0 * level, tile_pixels + 0.0 * level)
            # Rounds half to even: float32 has no fractions above 2²³.
            mapped = tl.cumsum(counts, 0).to(tl.float32) * scale + 8388608.0 - 8388608.0
            tl.store(table + level, tl.minimum(mapped, 255.0).to(tl.uint8))
        elif (applied_op == EQUALIZE) if PICKS_OP else (ENTRIES == LEVELS):
            entries = count_levels(
                pointer, 0, 0, height, width, height, width, source_h, SOURCE_W, BYTES, FACTOR, OFFSET, False, BLOCK
            )
            if SPLITS == 1:
                entries = equalize_table(entries, pixels, KEEPS_VALUES)
            tl.store(table + tl.arange(0, ENTRIES), entries)
        else:
            minimum = tl.full((BLOCK,), float("inf"), tl.float32)
            maximum = tl.full((BLOCK,), float("-inf"), tl.float32)
            has_nan = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, pixels, BLOCK):
                index = tl.minimum(start + tl.arange(0, BLOCK), pixels - 1)
                value = load_exact(pointer + index // width * source_h + index % width * SOURCE_W, BYTES)
                minimum = tl.minimum(minimum, value)
                maximum = tl.maximum(maximum, value)
                has_nan = tl.where(value == value, has_nan, 1)
            range_pointer = table.to(tl.pointer_type(tl.float32))
            tl.store(range_pointer, tl.where(tl.max(has_nan, 0) == 0, tl.min(minimum, 0), float("nan")))
            tl.store(range_pointer + 1, tl.max(maximum, 0))


@triton.jit
def map_by_table(
    value, table, pixels, FACTOR: tl.constexpr, OFFSET: tl.constexpr, KEEPS_VALUES: tl.constexpr, SPLITS: tl.constexpr
):
    """Map the pixels of a channel through its table.

    With several ``SPLITS``, compute the table from the sum of the pixel counts of all splits. ``pixels``: number of pixels.
    """
    clamped = clamp01(value)
    level = to_level(clamped, FACTOR, OFFSET)
    if SPLITS == 1:
        result = load_flattened(table + level)
    else:
        levels = tl.arange(0, LEVELS)
        counts = tl.load(table + levels)
        for split in tl.static_range(1, SPLITS):
            counts += tl.load(table + split * LEVELS + levels)
        result = tl.reshape(tl.gather(equalize_table(counts, pixels, KEEPS_VALUES), tl.ravel(level), 0), level.shape)
    if KEEPS_VALUES:
        result = tl.where(result < 0, tl.div_rn(clamped * 255.0, 255.0 + 0.0 * clamped), result)
    return tl.where(value == value, result, value)


@triton.jit
def stretch(value, table, ENTRIES: tl.constexpr, EPSILON: tl.constexpr, SPLITS: tl.constexpr):
    """Map the pixels of a channel from [minimum, maximum] to [0, 1].

    ``EPSILON`` is added to the divisor. The pixels of a constant channel become 0, or are clamped if ``EPSILON`` is 0.
    """
    table = table.to(tl.pointer_type(tl.float32))
    minimum = tl.load(table)
    maximum = tl.load(table + 1)
    for split in tl.static_range(1, SPLITS):
        minimum = tl.minimum(minimum, tl.load(table + split * ENTRIES), propagate_nan=tl.PropagateNan.ALL)
        maximum = tl.maximum(maximum, tl.load(table + split * ENTRIES + 1))
    is_constant = (minimum == maximum) | (maximum - minimum <= CONSTANT_RANGE)
    if EPSILON == 0:
        minimum = tl.where(is_constant, 0.0, minimum)
        maximum = tl.where(is_constant, 1.0, maximum)
    result = tl.div_rn(value - minimum, (maximum - minimum + EPSILON) + 0.0 * value)
    return tl.where(is_constant, 0.0, result) if EPSILON > 0 else clamp01(result)


@triton.jit
def interpolate_tables(
    value, table, top, bottom, upper_weight, left, right, left_weight,
    GRID_W: tl.constexpr, FACTOR: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Map the pixels of a channel through the tables of the four nearest tiles, interpolated bilinearly."""
    entry = table + to_level(clamp01(value), FACTOR, OFFSET)
    top_left = as_float(load_flattened(entry + (top * GRID_W + left) * LEVELS), True)
    top_right = as_float(load_flattened(entry + (top * GRID_W + right) * LEVELS), True)
    bottom_left = as_float(load_flattened(entry + (bottom * GRID_W + left) * LEVELS), True)
    bottom_right = as_float(load_flattened(entry + (bottom * GRID_W + right) * LEVELS), True)
    upper = top_right + (top_left - top_right) * left_weight
    lower = bottom_right + (bottom_left - bottom_right) * left_weight
    return tl.where(value == value, div_by_255(lower + (upper - lower) * upper_weight), value)


@triton.jit
def map_levels(
    plane, between, row, first, y, x, height, width, stride_y,
    SOURCE_W: tl.constexpr, BYTES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, SETTINGS: tl.constexpr,
):  # fmt: skip
    """Map pixels through the table, or minimum and maximum, that ``table_kernel`` wrote.

    ``SETTINGS``: (``PICKS_OP``, ``ENTRIES``, ``FACTOR``, ``OFFSET``, ``KEEPS_VALUES``, ``SPLITS``, ``GRID_H``, ``GRID_W``) of
    ``table_kernel``, (``EPSILON``,) of ``stretch``.
    """
    PICKS_OP: tl.constexpr = SETTINGS[0]
    ENTRIES: tl.constexpr = SETTINGS[1]
    FACTOR: tl.constexpr = SETTINGS[2]
    OFFSET: tl.constexpr = SETTINGS[3]
    SPLITS: tl.constexpr = SETTINGS[5]
    GRID_H: tl.constexpr = SETTINGS[6]
    GRID_W: tl.constexpr = SETTINGS[7]
    pixel = plane + tl.minimum(y, height - 1) * stride_y + x * SOURCE_W
    value = load_exact_tile(pixel, x < width, BYTES)
    if GRID_H > 0:
        top, bottom, upper_weight = nearest_tiles(y, height, GRID_H)
        left, right, left_weight = nearest_tiles(x, width, GRID_W)
        value = interpolate_tables(value, between, top, bottom, upper_weight, left, right, left_weight, GRID_W, FACTOR, OFFSET)
    elif (tl.load(row) == EQUALIZE) if PICKS_OP else (ENTRIES == LEVELS):
        value = map_by_table(value, between, height * width, FACTOR, OFFSET, SETTINGS[4], SPLITS)
    else:
        value = stretch(value, between, ENTRIES, SETTINGS[8], SPLITS)
    return value


def levels_launches(pass_: OpPass[LevelsOp], source: Tensor, rows: Tensor, out: Tensor) -> FilterLaunch:
    """Prepare both launches of a pass whose front is equalize, CLAHE or auto contrast."""
    op = pass_.front
    batch, channels, height, width = source.shape
    common = source_constants(pass_, source)
    integers = (height, width, rows.stride(0), *source.stride()[:3])
    # Bytes are levels already, so they need no setting of the op.
    factor, offset = (255.0, 0.5) if common["BYTES"] else op.to_levels
    grid_h, grid_w = op.grid if isinstance(op, Clahe) else (0, 0)
    splits = min(triton.cdiv(height * width, SPLIT_PIXELS), MOST_SPLITS) if pass_.route_column >= 0 else 1
    splits = grid_h * grid_w or splits
    equalize_op, contrast_op = op.picks if isinstance(op, EqualizeOrContrast) else (op, op)
    settings: dict[str, Any] = {
        "PICKS_OP": equalize_op is not contrast_op,
        "ENTRIES": op.entries,
        "FACTOR": factor,
        "OFFSET": offset,
        "KEEPS_VALUES": isinstance(equalize_op, Equalize) and equalize_op.keeps_values,
        "SPLITS": splits,
        "GRID_H": grid_h,
        "GRID_W": grid_w,
    }
    constants = {**common, **settings, "BLOCK": TILE_BLOCK if grid_h else BLOCK}
    # Products and sums of CLAHE are not fused: the sum rounds a product that is rounded already to a whole number.
    tables = Launch(
        table_kernel, (splits, batch, channels), integers, constants, warps=4 if grid_h else 8, fp_fusion=not grid_h
    )
    epsilon = contrast_op.epsilon if isinstance(contrast_op, AutoContrast) else 0.0
    counts_dtype = torch.int32 if splits > 1 and isinstance(equalize_op, Equalize) else torch.float32
    first = FirstLaunch(tables, (batch, channels, splits * op.entries), torch.uint8 if grid_h else counts_dtype)
    return filter_launch(map_levels, (*settings.values(), epsilon), pass_, source, rows, out, first)
