"""Triton kernels of equalize, CLAHE and auto contrast.

Each op runs in two launches. The first, ``table_kernel``, computes *tables* from all pixels of a channel. The second,
``filter_kernel`` with the function ``map_levels``, maps each pixel by the tables of its channel.

    op             tables of a channel                                      a pixel becomes
    equalize       one: new value in [0, 1] of each level, float32          the entry of its level
    CLAHE          one per tile of the channel: new level, uint8            a blend of the entries in the four nearest tiles
    auto contrast  one: minimum and maximum of the channel, float32         (value - minimum) / (maximum - minimum)

A *level* is a byte, 0 to 255, to which ``to_level`` maps a value in [0, 1]. In this file a *tile* is a tile of CLAHE: one cell
of a regular grid over the image. Only in ``tile_start`` and in names of ``frame.py`` it is the output pixels of one warp.

``x + 0.0 * y`` gives the number ``x`` the shape of ``y``, because ``tl.div_rn`` does not broadcast.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.frame import count_levels, filter_launch, load_exact, load_exact_tile, load_flattened
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
"""Pixels per split of a channel, and maximum number of splits. A *split* is a range of lines, read by one thread block.

A channel is split only in a pass that skips samples, because policies such as RandAugment have picked other ops for them. Such
a pass reads few channels, and one thread block per channel would not fill the GPU: without splits, RandAugment and
TrivialAugment take 1.23 to 1.36 times as long (256 x 3 x 224 x 224, H200, 2026-11-29).
"""


@kernel
def table_kernel(
    source, tables, param_table, height, width, row_stride, source_b, source_c, source_h,
    SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, BYTES: tl.constexpr, CHANNELS: tl.constexpr, ENTRIES: tl.constexpr,
    FACTOR: tl.constexpr, OFFSET: tl.constexpr, KEEPS_VALUES: tl.constexpr, PICKS_OP: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, GRID_H: tl.constexpr, GRID_W: tl.constexpr, ROUTE_COLUMN: tl.constexpr,
):  # fmt: skip
    """Compute one table: of a channel, of a tile of a channel (CLAHE), or, with several ``SPLITS``, of a split of a channel.

    The table of a split is not final: it has the number of pixels per level, int32, or the minimum and maximum of the split.
    ``map_levels`` combines the tables of all splits.

    Tensors, by their address, and their strides in elements:
        source: Images, (B, C, ``height``, ``width``). A block reads one plane, that is, one channel of a sample.
        tables: Output, (B, C, ``SPLITS``, ``ENTRIES``).
        param_table: Parameter table, (B, K). Columns of a row: apply mask (with ``PICKS_OP``: code of the op, 0 for
            neither); with CLAHE also the clip limit, the maximum number of pixels that count for one level.
        row_stride: Stride between rows of ``param_table``.
        source_b, source_c, source_h, SOURCE_W: Strides of ``source`` along its four axes (not its sizes).

    Constants:
        FRAMES: Images per row of ``param_table``.
        BYTES: Whether the source is uint8, not in [0, 1].
        CHANNELS: C.
        ENTRIES: Number of elements of a table: ``LEVELS``; 2 for auto contrast.
        FACTOR, OFFSET: Map from values in [0, 1] to levels (``to_level``).
        KEEPS_VALUES: Whether the table of equalize is -1 for a channel that must not change (``equalize_table``).
        PICKS_OP: Whether the op differs by sample: equalize if its code is ``EQUALIZE``, else auto contrast.
        BLOCK: Number of pixels that are read at once.
        SPLITS: Number of tables per channel: tiles with CLAHE, else splits.
        GRID_H, GRID_W: Number of tiles of CLAHE along y and x; 0 for other ops.
        ROUTE_COLUMN: Column of ``param_table`` that says from which of two buffers a sample is read, or that the pass skips
            the sample (``BasePass.route_column``); -1: no sample is skipped.

    Grid: (``SPLITS``, B, C).
    """
    # The address of the output, the last result, is not used: ``tables`` and the stride 0 stand in for the output.
    skipped, sample, plane, row, pointer, _ = select_sample(
        source, tables, param_table, row_stride, source_b, source_c, 0, FRAMES, ROUTE_COLUMN
    )
    if skipped:
        return
    table_index = tl.program_id(0)
    table = tables + ((sample.to(tl.int64) * CHANNELS + plane) * SPLITS + table_index) * ENTRIES
    if SPLITS > 1 and GRID_H == 0:
        # From here on, the channel is the split: ``pointer`` is its first line, and ``height`` its number of lines.
        lines_per_split = (height + SPLITS - 1) // SPLITS
        pointer += table_index * lines_per_split * source_h
        height = tl.maximum(tl.minimum(height - table_index * lines_per_split, lines_per_split), 0)
    channel_pixels = height * width
    applied_op = tl.load(row)
    if applied_op != 0:
        if GRID_H > 0:
            tile_h = tile_side(height, GRID_H)
            tile_w = tile_side(width, GRID_W)
            top = table_index // GRID_W * tile_h
            left = table_index % GRID_W * tile_w
            level_counts = count_levels(
                pointer, top, left, tile_h, tile_w, height, width, source_h, SOURCE_W, BYTES, FACTOR, OFFSET, True, BLOCK
            )
            # Pixels above the clip limit are distributed equally over all levels. The remainder, fewer pixels than levels, goes
            # to every ``spacing``-th level, one pixel each.
            level_counts = tl.minimum(level_counts, tl.load(row + 1).to(tl.int32))
            tile_pixels = tile_h * tile_w
            excess = tile_pixels - tl.sum(level_counts, 0)
            remainder = excess % LEVELS
            spacing = LEVELS // tl.maximum(remainder, 1)
            level = tl.arange(0, LEVELS)
            level_counts += excess // LEVELS + tl.where((level % spacing == 0) & (level // spacing < remainder), 1, 0)
            scale = tl.div_rn(255.0 + 0.0 * level, tile_pixels + 0.0 * level)
            # Adding and subtracting 2²³ rounds half to even, because float32 has no fractions above 2²³.
            new_levels = tl.cumsum(level_counts, 0).to(tl.float32) * scale + 8388608.0 - 8388608.0
            tl.store(table + level, tl.minimum(new_levels, 255.0).to(tl.uint8))
        elif (applied_op == EQUALIZE) if PICKS_OP else (ENTRIES == LEVELS):
            entries = count_levels(
                pointer, 0, 0, height, width, height, width, source_h, SOURCE_W, BYTES, FACTOR, OFFSET, False, BLOCK
            )
            if SPLITS == 1:
                entries = equalize_table(entries, channel_pixels, KEEPS_VALUES)
            tl.store(table + tl.arange(0, ENTRIES), entries)
        else:
            minimum = tl.full((BLOCK,), float("inf"), tl.float32)
            maximum = tl.full((BLOCK,), float("-inf"), tl.float32)
            has_nan = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, channel_pixels, BLOCK):
                # In the last block, the last pixel is repeated, which changes neither minimum nor maximum.
                pixel_index = tl.minimum(start + tl.arange(0, BLOCK), channel_pixels - 1)
                value = load_exact(pointer + pixel_index // width * source_h + pixel_index % width * SOURCE_W, BYTES)
                minimum = tl.minimum(minimum, value)
                maximum = tl.maximum(maximum, value)
                has_nan = tl.where(value == value, has_nan, 1)
            # float32 also where the dtype of the tables is int32, because equalize stores counts in tables of other samples.
            channel_range = table.to(tl.pointer_type(tl.float32))
            tl.store(channel_range, tl.where(tl.max(has_nan, 0) == 0, tl.min(minimum, 0), float("nan")))
            tl.store(channel_range + 1, tl.max(maximum, 0))


@triton.jit
def map_by_table(
    value, table, channel_pixels, FACTOR: tl.constexpr, OFFSET: tl.constexpr, KEEPS_VALUES: tl.constexpr, SPLITS: tl.constexpr
):
    """Equalize pixels: return the entry of the channel's table for the level of each pixel, in [0, 1]. NaN stays NaN.

    ``value``: pixels of one channel, float32, of any shape. ``table``: address of the table, (LEVELS,) float32; with several
    ``SPLITS``, of the pixel counts per level of each split, (``SPLITS``, LEVELS) int32, from which the function computes the
    table. ``channel_pixels``: number of pixels of the channel. The constants are described in ``table_kernel``.
    """
    clamped = clamp01(value)
    level = to_level(clamped, FACTOR, OFFSET)
    if SPLITS == 1:
        result = load_flattened(table + level)
    else:
        all_levels = tl.arange(0, LEVELS)
        counts = tl.load(table + all_levels)
        for split in tl.static_range(1, SPLITS):
            counts += tl.load(table + split * LEVELS + all_levels)
        result = tl.reshape(tl.gather(equalize_table(counts, channel_pixels, KEEPS_VALUES), tl.ravel(level), 0), level.shape)
    if KEEPS_VALUES:
        # Entries of -1 keep the value, with the roundings of a conversion to [0, 255] and back, as in Kornia's equalize.
        result = tl.where(result < 0, tl.div_rn(clamped * 255.0, 255.0 + 0.0 * clamped), result)
    return tl.where(value == value, result, value)


@triton.jit
def stretch(value, table, ENTRIES: tl.constexpr, EPSILON: tl.constexpr, SPLITS: tl.constexpr):
    """Stretch the pixels ``value`` of a channel from [minimum, maximum] of the channel to [0, 1].

    ``table``: address of minimum and maximum, once per split, the splits ``ENTRIES`` elements apart. ``EPSILON`` is added to
    the divisor. The pixels of a constant channel become 0, or are clamped if ``EPSILON`` is 0.
    """
    # Minimum and maximum are float32 also where the dtype of the tables is int32 (``table_kernel``).
    table = table.to(tl.pointer_type(tl.float32))
    minimum = tl.load(table)
    maximum = tl.load(table + 1)
    for split in tl.static_range(1, SPLITS):
        minimum = tl.minimum(minimum, tl.load(table + split * ENTRIES), propagate_nan=tl.PropagateNan.ALL)
        maximum = tl.maximum(maximum, tl.load(table + split * ENTRIES + 1))
    # ``==`` is for two equal infinities. A range up to CONSTANT_RANGE (ops/filters.py) comes from rounding errors.
    is_constant = (minimum == maximum) | (maximum - minimum <= CONSTANT_RANGE)
    if EPSILON == 0:
        minimum = tl.where(is_constant, 0.0, minimum)
        maximum = tl.where(is_constant, 1.0, maximum)
    result = tl.div_rn(value - minimum, (maximum - minimum + EPSILON) + 0.0 * value)
    return tl.where(is_constant, 0.0, result) if EPSILON > 0 else clamp01(result)


@triton.jit
def blend_tables(
    value, table, above, below, weight_above, left, right, weight_left,
    GRID_W: tl.constexpr, FACTOR: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Apply CLAHE: return the bilinear mean of the entries for the level of a pixel in the tables of the four nearest tiles.

    ``value``: pixels of one channel, float32, of any two-dimensional shape. ``table``: address of the tables of the channel,
    (``GRID_H``, ``GRID_W``, LEVELS) uint8. ``above``, ``below``, ``left``, ``right``: indices of the tiles along y and along x.
    ``weight_above``, ``weight_left``: weights of ``above`` and ``left`` (``nearest_tiles``). ``FACTOR``, ``OFFSET``: map from
    values in [0, 1] to levels (``to_level``).
    """
    # ``as_float(…, True)`` converts the bytes to float32, still from 0 to 255. ``div_by_255`` scales their mean at the end.
    level_entry = table + to_level(clamp01(value), FACTOR, OFFSET)
    top_left = as_float(load_flattened(level_entry + (above * GRID_W + left) * LEVELS), True)
    top_right = as_float(load_flattened(level_entry + (above * GRID_W + right) * LEVELS), True)
    bottom_left = as_float(load_flattened(level_entry + (below * GRID_W + left) * LEVELS), True)
    bottom_right = as_float(load_flattened(level_entry + (below * GRID_W + right) * LEVELS), True)
    upper = top_right + (top_left - top_right) * weight_left
    lower = bottom_right + (bottom_left - bottom_right) * weight_left
    return tl.where(value == value, div_by_255(lower + (upper - lower) * weight_above), value)


@triton.jit
def map_levels(
    plane_address, intermediate, row, tile_start, y, x, height, width, stride_y,
    SOURCE_W: tl.constexpr, BYTES: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, SETTINGS: tl.constexpr,
):  # fmt: skip
    """Map pixels by the tables that ``table_kernel`` wrote for their channel. A function of ``filter_kernel``.

    ``filter_kernel`` describes the arguments; ``tile_start``, ``ALONG`` and ``ACROSS`` are not used here. ``plane_address``:
    address of the channel. ``row``: address of the sample's row of the parameter table. ``intermediate``: address of the tables
    of the channel. ``SETTINGS``: (``PICKS_OP``, ``ENTRIES``, ``FACTOR``, ``OFFSET``, ``KEEPS_VALUES``, ``SPLITS``, ``GRID_H``,
    ``GRID_W``, ``EPSILON``): constants of ``table_kernel``, and ``EPSILON`` of ``stretch``.
    """
    PICKS_OP: tl.constexpr = SETTINGS[0]
    ENTRIES: tl.constexpr = SETTINGS[1]
    FACTOR: tl.constexpr = SETTINGS[2]
    OFFSET: tl.constexpr = SETTINGS[3]
    KEEPS_VALUES: tl.constexpr = SETTINGS[4]
    SPLITS: tl.constexpr = SETTINGS[5]
    GRID_H: tl.constexpr = SETTINGS[6]
    GRID_W: tl.constexpr = SETTINGS[7]
    EPSILON: tl.constexpr = SETTINGS[8]
    address = plane_address + tl.minimum(y, height - 1) * stride_y + x * SOURCE_W
    value = load_exact_tile(address, x < width, BYTES)
    if GRID_H > 0:
        # Indices of tiles of CLAHE, and the weights of ``above`` and ``left``, per pixel.
        above, below, weight_above = nearest_tiles(y, height, GRID_H)
        left, right, weight_left = nearest_tiles(x, width, GRID_W)
        value = blend_tables(value, intermediate, above, below, weight_above, left, right, weight_left, GRID_W, FACTOR, OFFSET)
    elif (tl.load(row) == EQUALIZE) if PICKS_OP else (ENTRIES == LEVELS):
        value = map_by_table(value, intermediate, height * width, FACTOR, OFFSET, KEEPS_VALUES, SPLITS)
    else:
        value = stretch(value, intermediate, ENTRIES, EPSILON, SPLITS)
    return value


def levels_launches(pass_: OpPass[LevelsOp], source: Tensor, param_table: Tensor, out: Tensor) -> FilterLaunch:
    """Prepare both launches of a pass that begins with equalize, CLAHE or auto contrast.

    Args:
        pass_: Pass that the launches run.
        source: (B, C, H, W) input, of a dtype in ``IMAGE_DTYPES``.
        param_table: (B, K) parameter table.
        out: (B, C, H, W) output, of a dtype in ``IMAGE_DTYPES``.
    """
    op = pass_.front
    batch, channels, height, width = source.shape
    common = source_constants(pass_, source)
    integers = (height, width, param_table.stride(0), *source.stride()[:3])
    # Bytes are read as values in [0, 1]. Times 255 they are levels again; 0.5 rounds to the nearest integer.
    factor, offset = (255.0, 0.5) if common["BYTES"] else op.to_levels
    grid_h, grid_w = op.grid if isinstance(op, Clahe) else (0, 0)
    splits = min(triton.cdiv(height * width, SPLIT_PIXELS), MOST_SPLITS) if pass_.route_column >= 0 else 1
    splits = grid_h * grid_w or splits
    # If all samples have the same op, both names stand for this op.
    equalize_op, contrast_op = op.picks if isinstance(op, EqualizeOrContrast) else (op, op)
    # In the order of ``SETTINGS`` of ``map_levels``.
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
    # Products and sums of CLAHE are not fused: the product must be rounded to float32 before the addition of 2²³.
    tables_launch = Launch(
        table_kernel, (splits, batch, channels), integers, constants, num_warps=4 if grid_h else 8, enable_fp_fusion=not grid_h
    )
    epsilon = contrast_op.epsilon if isinstance(contrast_op, AutoContrast) else 0.0
    table_dtype = torch.int32 if splits > 1 and isinstance(equalize_op, Equalize) else torch.float32
    first_launch = FirstLaunch(tables_launch, (batch, channels, splits * op.entries), torch.uint8 if grid_h else table_dtype)
    return filter_launch(map_levels, (*settings.values(), epsilon), pass_, source, param_table, out, first_launch)
