"""The Triton kernels of equalize and auto contrast, and their launches. Tiles: ``filter_tiles.py``."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filter_tiles import (
    POINTERS,
    SIZES,
    STRIDES,
    reading,
    stored,
    storing_launch,
    tile_of,
    untouched,
    untouched_pixels,
)
from gpuaug.fusion.backends.triton.launch import Launch, prepared
from gpuaug.fusion.backends.triton.pixel_math import unit
from gpuaug.fusion.ops import filters
from gpuaug.fusion.ops.filters import AutoContrast, Equalize, LevelsOp
from gpuaug.fusion.plan import Pass

EQUALIZE = tl.constexpr(filters.LEVELS)

BLOCK = 2048
"""Pixels that a block reads at once."""


@triton.jit
def level_of(value, FACTOR: tl.constexpr, OFFSET: tl.constexpr):
    """The level of a byte for a number in [0, 1]; 0 of one that is no number."""
    return (tl.where(value == value, value, 0.0) * FACTOR + OFFSET).to(tl.int32)


@triton.jit(
    do_not_specialize=["height", "width", "row_stride", "source_b", "source_c", "source_h"],
    do_not_specialize_on_alignment=["source", "tables", "rows"],
)
def table_kernel(
    source, tables, rows, height, width, row_stride, source_b, source_c, source_h,
    COLUMN: tl.constexpr, SOURCE_W: tl.constexpr, SCALE: tl.constexpr, CHANNELS: tl.constexpr, ENTRIES: tl.constexpr,
    FACTOR: tl.constexpr, OFFSET: tl.constexpr, KEEPS: tl.constexpr, EPSILON: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make the table of a channel: what its levels become, -1 where values stay; or its least and its most.

    Grid: (samples, planes).
    """
    sample = tl.program_id(0)
    plane = tl.program_id(1)
    table = tables + (sample * CHANNELS + plane) * ENTRIES
    pointer = source + sample.to(tl.int64) * source_b + plane * source_c
    pixels = height * width
    if tl.load(rows + sample * row_stride + COLUMN) != 0:
        if ENTRIES == EQUALIZE:
            at = tl.arange(0, ENTRIES)
            counts = tl.zeros((ENTRIES,), tl.int32)
            for start in range(0, pixels, BLOCK):
                index = start + tl.arange(0, BLOCK)
                inside = tl.minimum(index, pixels - 1)
                value = unit(untouched(pointer + inside // width * source_h + inside % width * SOURCE_W, SCALE))
                # What lies beyond the image is counted as black, and taken off again.
                counts += tl.histogram(tl.where(index < pixels, level_of(value, FACTOR, OFFSET), 0), ENTRIES)
            counts -= tl.where(at == 0, (pixels + BLOCK - 1) // BLOCK * BLOCK - pixels, 0)
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
def levelled(
    value, table, ENTRIES: tl.constexpr, FACTOR: tl.constexpr, OFFSET: tl.constexpr, KEEPS: tl.constexpr,
    EPSILON: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """A channel's pixels through its table."""
    if ENTRIES == EQUALIZE:
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
    COLUMN: tl.constexpr, SOURCE_W: tl.constexpr, SCALE: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr,
    COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
    ENTRIES: tl.constexpr, FACTOR: tl.constexpr, OFFSET: tl.constexpr, KEEPS: tl.constexpr, EPSILON: tl.constexpr,
    CLIP: tl.constexpr,
):  # fmt: skip
    """Take pixels through the tables that ``table_kernel`` made.

    Grid: (tiles of an image, samples, planes; one plane where a block makes all three).
    """
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample * row_stride
    _, y, x = tile_of(tiles, ALONG, ACROSS)
    pointer = source + sample.to(tl.int64) * source_b + plane * source_c
    pixel = pointer + tl.minimum(y, height - 1) * source_h + tl.minimum(x, width - 1) * SOURCE_W
    r, g, b = untouched_pixels(pixel, source_c, SCALE, RGB)
    if tl.load(row + COLUMN) != 0:
        table = made + (sample * CHANNELS + plane) * ENTRIES
        r = levelled(r, table, ENTRIES, FACTOR, OFFSET, KEEPS, EPSILON, CLIP)
        if RGB:
            g = levelled(g, table + ENTRIES, ENTRIES, FACTOR, OFFSET, KEEPS, EPSILON, CLIP)
            b = levelled(b, table + 2 * ENTRIES, ENTRIES, FACTOR, OFFSET, KEEPS, EPSILON, CLIP)
    stored(r, g, b, x, y, sample, plane, height, width, row, out, out_b, out_c, out_h, OUT_W, PROGRAM, COUNT, CHANNELS, RGB)


class _Levelling(NamedTuple):
    tables: Launch
    pixels: Launch


def level(step: Pass, source: Tensor, rows: Tensor, out: Tensor) -> int:
    """Launch a pass with equalize or auto contrast in front on the current stream, in two launches.

    Arguments, shapes and the number returned are those of ``gpuaug.fusion.backends.triton.blur.blur``.
    """
    assert isinstance(step.front, LevelsOp)
    found = prepared(step, source, rows, out, _levelling)
    tables = torch.empty((*source.shape[:2], step.front.entries), dtype=torch.float32, device=source.device)
    found.tables((source, tables, rows))
    found.pixels((source, tables, out, rows))
    return 2


def _levelling(step: Pass, source: Tensor, rows: Tensor, out: Tensor) -> _Levelling:
    op = step.front
    assert isinstance(op, LevelsOp)
    batch, channels, height, width = source.shape
    own = {name: reading(step, source)[name] for name in ("COLUMN", "SOURCE_W", "SCALE")}
    numbers = (height, width, rows.stride(0), *source.stride()[:3])
    settings = {"ENTRIES": op.entries, "FACTOR": 255.0, "OFFSET": 0.5, "KEEPS": True, "EPSILON": 0.0}
    if isinstance(op, Equalize):
        settings["KEEPS"] = op.keeps_values
        if not own["SCALE"]:  # a byte is its own level, whatever the op makes of its share of 255
            settings["FACTOR"], settings["OFFSET"] = op.to_levels
    elif isinstance(op, AutoContrast):
        settings["EPSILON"] = op.epsilon
    clips = isinstance(op, AutoContrast) and op.clips
    tables = Launch(
        table_kernel, (batch, channels, 1), numbers, {**own, "CHANNELS": channels, **settings, "BLOCK": BLOCK}, warps=8
    )
    return _Levelling(tables, storing_launch(levels_kernel, step, source, rows, out, {**settings, "CLIP": clips}))
