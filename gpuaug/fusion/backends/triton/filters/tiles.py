"""What the kernels of filters share: the tile of a block, reading beyond the border, storing, and a launch's arguments.

A block is one warp, with a tile whose last axis is the one filtered along and lies in one thread's registers. So every line of
the source is read once a tile, and added to the outputs that it reaches with weights that are the same in all threads: a
neighbourhood takes one multiplication a tap and no shuffle. Loops over lines are unrolled for the compiler to see this. What
does not tell it that addresses follow one another along the first axis is read and stored through one axis (``flat``).

Where samples are skipped, a block is several warps with a tile each, one behind the other along the first axis. A warp of a
small blur may have four tiles (``small_blur.py``).
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.launch import Launch, storing
from gpuaug.fusion.backends.triton.pixel_math import LEVELS, as_float, byte_share, level_of, stored_as, unit, words
from gpuaug.fusion.backends.triton.points import points
from gpuaug.fusion.ops.base import FrontOp
from gpuaug.fusion.program.plan import OpPass

ALONG = 16
"""Outputs of a tile along the axis that is filtered along."""

ACROSS = 32
"""Outputs of a tile side by side: a multiple of the threads in a warp."""

TILES = 8
"""Most warps of a block of a pass that skips samples, a power of two: blocks that find nothing to do are fewer by that."""

LINES = tl.constexpr(8)
"""Lines that one load reads. Triton's time to compile grows with the number of loads, and faster with what depends on each."""

BORDERS = {"constant": 0, "reflect": 1, "replicate": 2, "circular": 3}

SIZES = ("height", "width", "tiles", "row_stride")
STRIDES = ("source_b", "source_c", "source_h", "out_b", "out_c", "out_h")
POINTERS = ("source", "made", "out", "rows")


@triton.jit
def tile_of(tiles, ALONG: tl.constexpr, ACROSS: tl.constexpr, TILES: tl.constexpr):
    """The outputs of this block's tiles: the first ones along, all along (ACROSS or 1, ALONG), and all across (ACROSS, 1).

    ``tiles``: how many tiles lie side by side. ``ACROSS`` is that of all ``TILES`` of the block.
    """
    at = tl.arange(0, ACROSS)[:, None]
    each: tl.constexpr = ACROSS // TILES
    tile = tl.program_id(0)
    if TILES > 1:
        tile = tile * TILES + at // each
    first = tile // tiles * ALONG
    return first, first + tl.arange(0, ALONG)[None, :], tile % tiles * each + at % each


@triton.jit
def bordered(index, size, BORDER: tl.constexpr):
    """Where an index outside the image is read; any pixel inside where a constant is meant."""
    if BORDER == 1:
        index = tl.abs(index)
        index = size - 1 - tl.abs(size - 1 - index)
    if BORDER == 3:
        index = tl.where(index < 0, index + size, index)
        index = tl.where(index >= size, index - size, index)
    return tl.minimum(tl.maximum(index, 0), size - 1)


@triton.jit
def read(pointer, inside, BORDER: tl.constexpr, SCALE: tl.constexpr):
    """Pixels, in [0, 255] of bytes; zeros outside where that is the border."""
    if BORDER == 0:
        # In the interpreter of Triton 3.9 a truth is a whole number where a scalar was joined with a block.
        return as_float(tl.load(pointer, mask=inside != 0, other=0), SCALE)
    return as_float(tl.load(pointer), SCALE)


@triton.jit
def flat(values):
    """(ACROSS, ALONG) on one axis, neighbours along the first one side by side.

    Where Triton sees consecutive addresses along neither of two axes, it puts the threads of a warp along the first one, from
    version 3.7 on along the last. One axis leaves no choice.
    """
    return tl.ravel(tl.trans(values))


@triton.jit
def unflat(values, like):
    """What ``flat`` made of values of the shape of ``like``."""
    return tl.trans(tl.reshape(values, like.shape[1], like.shape[0]))


@triton.jit
def read_flat(pointer):
    """The values at (ACROSS, ALONG) addresses, read by warps that lie along the first axis."""
    return unflat(tl.load(flat(pointer)), pointer)


@triton.jit
def read_lines(pointer, inside, BORDER: tl.constexpr, SCALE: tl.constexpr):
    """``read`` of (ACROSS, LINES), each thread the pixels of all lines."""
    return unflat(read(flat(pointer), flat(inside), BORDER, SCALE), pointer)


@triton.jit
def read_aligned(pointer, offsets, live, REACH: tl.constexpr):
    """``REACH`` pixels of each line, the first at an aligned address; 0 where not live. Offsets are (columns, lines)."""
    at = pointer + offsets
    return tl.load(tl.max_contiguous(tl.multiple_of(at, (REACH, 1)), (REACH, 1)), mask=live, other=0)


@triton.jit
def added(total, lines, start, fall, part, TAPS: tl.constexpr, ALONG: tl.constexpr):
    """Outputs with each line added to those that it reaches, and to no others: 0 · NaN would be NaN.

    ``lines``: some of them from the one at ``start`` on, (ACROSS, their number).
    """
    count: tl.constexpr = lines.shape[1]
    bits = lines.to(tl.int32, bitcast=True)
    for number in tl.static_range(count):
        # One of the lines in a thread's registers: a sum of its bits and zeros, for no instruction.
        line = tl.sum(tl.where(tl.arange(0, count)[None, :] == number, bits, 0), axis=1, keep_dims=True)
        tap = start + number - tl.arange(0, ALONG)[None, :]
        distance = (tap - TAPS // 2).to(tl.float32)
        weight = tl.exp(distance * distance * fall) * part
        reached = total + weight * line.to(tl.float32, bitcast=True)
        total = tl.where((tap >= 0) & (tap < TAPS), reached, total)
    return total


@triton.jit
def untouched(pointer, SCALE: tl.constexpr, live=None):
    """One channel of a sample that is skipped: in [0, 1] as torch divides bytes, bit for bit; anything where not ``live``."""
    value = as_float(tl.load(pointer, mask=live), SCALE)
    return byte_share(value) if SCALE else value


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


@triton.jit
def untouched_tile(pointer, live, SCALE: tl.constexpr):
    """``untouched`` of (ACROSS, ALONG) pixels, read by warps that lie along the first axis."""
    return unflat(untouched(flat(pointer), SCALE, flat(tl.broadcast_to(live, pointer.shape))), pointer)


@triton.jit
def untouched_pixels(pointer, live, source_c, SCALE: tl.constexpr, RGB: tl.constexpr, X_LAST: tl.constexpr = False):
    """``untouched`` of three channels; or one channel and two copies. The tile's first axis is x, or with ``X_LAST`` the last.

    ``live``: which pixels lie inside along x. Were they clamped, the compiler would not see that they follow one another.
    """
    r = untouched(pointer, SCALE, live) if X_LAST else untouched_tile(pointer, live, SCALE)
    g = r
    b = r
    if RGB:
        green = pointer + source_c
        blue = green + source_c
        g = untouched(green, SCALE, live) if X_LAST else untouched_tile(green, live, SCALE)
        b = untouched(blue, SCALE, live) if X_LAST else untouched_tile(blue, live, SCALE)
    return r, g, b


@triton.jit
def placed(value, channel, r, g, b, RGB: tl.constexpr):
    """Three channels, one of them new; or one channel and two copies.

    What makes a channel stands once, in a loop at run time: Triton takes nine times as long to compile three of them.
    """
    if RGB:
        return tl.where(channel == 0, value, r), tl.where(channel == 1, value, g), tl.where(channel == 2, value, b)
    return value, value, value


@triton.jit
def stored(
    r, g, b, x, y, sample, plane, height, width, row, out, out_b, out_c, out_h,
    OUT_W: tl.constexpr, PROGRAM: tl.constexpr, COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr,
    first=0, WORDS: tl.constexpr = False, GROUP: tl.constexpr = 1, X_LAST: tl.constexpr = False,
):  # fmt: skip
    """Take a tile through the pointwise ops and store it. Its first axis is x, or with ``X_LAST`` the last.

    ``WORDS``: store two neighbouring pixels as three words of 32 bits, where the last axis is x and begins at ``first``.
    ``GROUP``: so many neighbours along x begin at an aligned address, and lie inside or all outside.
    """
    r, g, b = points(r, g, b, x, y, sample, plane, height, width, row, 0.0, PROGRAM, COUNT, CHANNELS, RGB)
    if WORDS:
        r = tl.reshape(r, r.shape[0], r.shape[1] // 2, 2)
        g = tl.reshape(g, r.shape)
        b = tl.reshape(b, r.shape)
        filled = tl.reshape(words(r, g, b, out.dtype.element_ty), r.shape[0], 4 * r.shape[1])
        place = tl.arange(0, 4 * r.shape[1])[None, :]
        to = first // 2 * 3 + place // 4 * 3 + place % 4
        target = out.to(tl.pointer_type(tl.int32)) + sample.to(tl.int64) * (out_b // 2) + y * (out_h // 2) + to
        tl.store(target, filled, mask=(y < height) & (to < width // 2 * 3) & (place % 4 < 3))
    else:
        live = (x < width) & (y < height)
        pixel = out + sample.to(tl.int64) * out_b + plane * out_c + y * out_h + x * OUT_W
        if GROUP > 1:
            pixel_bytes: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
            pixel = tl.max_contiguous(tl.multiple_of(pixel, (GROUP * pixel_bytes, pixel_bytes)), (GROUP, 1))
            live = tl.max_constancy(live, (GROUP, 1))
        elif not X_LAST:
            pixel, live, r, g, b = flat(pixel), flat(live), flat(r), flat(g), flat(b)
        tl.store(pixel, stored_as(r, out.dtype.element_ty), mask=live)
        if RGB:
            tl.store(pixel + out_c, stored_as(g, out.dtype.element_ty), mask=live)
            tl.store(pixel + 2 * out_c, stored_as(b, out.dtype.element_ty), mask=live)


def tiles_of(step: OpPass[FrontOp], along: int, across: int) -> tuple[int, int, dict[str, int]]:
    """Tiles side by side, blocks, and a block's constants, for planes with this many outputs along and across."""
    wide = triton.cdiv(across, ACROSS)
    tiles = wide * triton.cdiv(along, ALONG)
    each = min(TILES, triton.next_power_of_2(tiles)) if step.way >= 0 else 1
    return wide, triton.cdiv(tiles, each), {"ALONG": ALONG, "ACROSS": ACROSS * each, "TILES": each}


def storing_launch(
    kernel: Any,
    step: OpPass[FrontOp],
    source: Tensor,
    rows: Tensor,
    out: Tensor,
    constants: dict[str, Any],
    *,
    along_x: bool = False,
) -> Launch:
    """A launch of a filter's kernel that stores finished pixels.

    Args:
        kernel: Takes the sizes, the tiles side by side, and the strides of the rows, the source and the output.
        step: The pass.
        source: Of a type in ``PIXELS`` or ``KEPT``, (B, C, H, W).
        rows: The parameter table, (B, K).
        out: Of such a type, (B, C, H, W).
        constants: The kernel's own.
        along_x: Whether tiles lie along x, not along y.
    """
    batch, _, height, width = source.shape
    wide, blocks, tile = tiles_of(step, width, height) if along_x else tiles_of(step, height, width)
    shared, planes = storing(step, source, out)
    numbers = (height, width, wide, rows.stride(0), *source.stride()[:3], *out.stride()[:3])
    constants = {**shared, "WAY": step.way, **tile, **constants}
    return Launch(kernel, (blocks, batch, planes), numbers, constants, warps=tile["TILES"])
