"""Triton kernel of the filters, its launch, and the device functions that filter kernels share.

``filter_kernel`` calls the function of a filter for each plane of an output tile. It does what is common to all filters: it
skips samples, copies the samples that the filter does not apply to, runs the pointwise ops of the pass, and stores the pixels.
Only a blur in strips (``blur.py``) has a separate kernel.

A *tile* is the output pixels that one warp computes, (``TILE_ACROSS``, ``TILE_ALONG``). The filter works along the last axis of
the tile, *along*; the first axis is *across*. A thread has the pixels of one index across, in its registers:

                        axis of the filter (along) ──►
        thread 0        pixel   pixel   pixel   …       ``TILE_ALONG`` pixels
        thread 1        pixel   pixel   pixel   …
        …                                               ``TILE_ACROSS`` threads, the axis across

A *line* is the pixels of one index along, one per thread. A warp reads each line of the source once per tile, and adds the
line, times its weight, to all outputs that depend on it. As a thread has all pixels along, and all threads use the same
weights, a tap takes one multiplication, and no exchange between threads. Loops over lines are unrolled, so that the compiler
can keep a tile in registers. Where the compiler cannot infer that addresses are contiguous across, tiles are flattened to one
axis before they are loaded or stored (``flatten``).

A thread block is one warp with one tile; in a pass that skips samples, it is ``TILES`` warps with one tile each, adjacent
across. Kernels compute all tiles of a block as one array, (``ACROSS``, ``ALONG``), with ``ALONG`` = ``TILE_ALONG`` and
``ACROSS`` = ``TILES`` · ``TILE_ACROSS``.

A *row* is a row of the parameter table. The suffixes ``_b``, ``_c``, ``_h`` and ``_W`` denote strides, in elements, of the axes
batch, channel, y and x. ``BYTES``: whether pixels are bytes.
"""

import math
from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.launch import FilterLaunch, FirstLaunch, Launch, kernel, output_constants
from gpuaug.fusion.backends.triton.pixel_math import LEVELS, as_float, clamp01, div_by_255, pack_words, store_channels, to_level
from gpuaug.fusion.backends.triton.points import apply_point_ops
from gpuaug.fusion.backends.triton.taps import select_sample
from gpuaug.fusion.ops.base import FrontOp
from gpuaug.fusion.program.plan import OpPass

TILE_ALONG = 16
"""Output pixels of a tile along its last axis, the axis of the filter."""

TILE_ACROSS = 32
"""Output pixels of a tile along its first axis: a multiple of the 32 threads in a warp."""

MOST_TILES = 8
"""Maximum number of tiles, and of warps, per thread block in a pass that skips samples; a power of two.

A thread block of a skipped sample starts and ends without work, which takes time. Larger blocks are fewer.
"""

LINES = tl.constexpr(8)
"""Number of lines that are loaded at once. A compromise: fewer lines mean more loads, more lines mean more code per load.

Triton's compile time grows with both.
"""

BORDERS = {"constant": 0, "reflect": 1, "replicate": 2, "circular": 3}
"""Value of the constant ``BORDER`` by padding mode."""


@triton.jit
def tile_indices(tiles_across, ALONG: tl.constexpr, ACROSS: tl.constexpr, TILES: tl.constexpr):
    """Return the pixel indices of the outputs of the block's tiles.

    Args:
        tiles_across: Number of tiles of the image along the first axis. Tiles are numbered along the first axis first.
        ALONG: Outputs of the block along the last axis.
        ACROSS: Outputs of the block along the first axis, in all of its tiles.
        TILES: Number of tiles of the block.

    Returns:
        - Index in the image of the tile's first output along: a scalar, or (ACROSS, 1) if the block has several tiles.
        - Indices in the image along: (1, ALONG), or (ACROSS, ALONG) if the block has several tiles.
        - Indices in the image across: (ACROSS, 1).
    """
    index = tl.arange(0, ACROSS)[:, None]
    TILE_SIDE: tl.constexpr = ACROSS // TILES  # along the first axis
    tile = tl.program_id(0)
    if TILES > 1:
        tile = tile * TILES + index // TILE_SIDE
    first = tile // tiles_across * ALONG
    return first, first + tl.arange(0, ALONG)[None, :], tile % tiles_across * TILE_SIDE + index % TILE_SIDE


@triton.jit
def border_index(index, size, BORDER: tl.constexpr):
    """Return the source index for an index that may be beyond the border of an axis of ``size`` pixels.

    ``BORDER``: see ``BORDERS``. For a constant border, the result is the border pixel, and the caller masks the pixel.
    """
    if BORDER == 1:  # reflect
        index = tl.abs(index)
        index = size - 1 - tl.abs(size - 1 - index)
    if BORDER == 3:  # circular
        index = tl.where(index < 0, index + size, index)
        index = tl.where(index >= size, index - size, index)
    return tl.minimum(tl.maximum(index, 0), size - 1)


@triton.jit
def load_pixels(pointer, inside, BORDER: tl.constexpr, BYTES: tl.constexpr):
    """Load pixels: bytes as 0 to 255, other types in [0, 1]. With a constant border, pixels that are not ``inside`` are 0."""
    if BORDER == 0:
        # != 0, because ``inside`` may be integers: the & of a scalar and a block mask in the interpreter of Triton 3.9.
        return as_float(tl.load(pointer, mask=inside != 0, other=0), BYTES)
    return as_float(tl.load(pointer), BYTES)


@triton.jit
def flatten(values):
    """Flatten (ACROSS, ALONG) to one axis, with neighbours along the first axis adjacent.

    If Triton infers contiguous addresses along neither of two axes, it puts the threads of a warp along the first axis before
    version 3.7, and along the last axis from 3.7 on. With one axis, all versions behave equally.
    """
    return tl.ravel(tl.trans(values))


@triton.jit
def unflatten(values, like):
    """Invert ``flatten``. ``like`` has the shape of the result."""
    return tl.trans(tl.reshape(values, like.shape[1], like.shape[0]))


@triton.jit
def load_flattened(pointer):
    """Load the values at (ACROSS, ALONG) addresses. The threads of a warp lie along the first axis."""
    return unflatten(tl.load(flatten(pointer)), pointer)


@triton.jit
def load_lines(pointer, inside, BORDER: tl.constexpr, BYTES: tl.constexpr):
    """Apply ``load_pixels`` to (ACROSS, LINES) addresses. A thread loads the pixels of all lines."""
    return unflatten(load_pixels(flatten(pointer), flatten(inside), BORDER, BYTES), pointer)


@triton.jit
def load_aligned(pointer, offsets, in_bounds, REACH: tl.constexpr):
    """Load ``REACH`` adjacent pixels per line, (REACH, lines), the first at an aligned address; 0 where ``in_bounds`` is false.

    ``offsets``: (REACH, lines) offsets from ``pointer``, in elements.
    """
    address = pointer + offsets
    return tl.load(tl.max_contiguous(tl.multiple_of(address, (REACH, 1)), (REACH, 1)), mask=in_bounds, other=0)


@triton.jit
def add_lines(total, lines, start, exponent, norm, TAPS: tl.constexpr, ALONG: tl.constexpr):
    """Return the outputs ``total``, (ACROSS, ALONG), plus ``lines``, (ACROSS, N), weighted by a Gaussian.

    Output i depends on the lines i to i + ``TAPS`` - 1 of all lines that the tile depends on; ``start`` is the index of
    ``lines[:, 0]`` among them. A line is added only to the outputs that depend on it, because a weight of 0 would not remove
    NaN. ``exponent``, ``norm``: results of ``gaussian_exponent`` and ``gaussian_norm``. ``TAPS``: size of the Gaussian in
    lines.
    """
    count: tl.constexpr = lines.shape[1]
    bits = lines.to(tl.int32, bitcast=True)
    for index in tl.static_range(count):
        # Selects one line, as a sum of its bits and zeros. This compiles to no instruction, because a thread has all lines. The
        # sum is of integers, because a compiler may not omit the addition of 0.0 to a float.
        line = tl.sum(tl.where(tl.arange(0, count)[None, :] == index, bits, 0), axis=1, keep_dims=True)
        tap = start + index - tl.arange(0, ALONG)[None, :]
        distance = (tap - TAPS // 2).to(tl.float32)
        weight = tl.exp(distance * distance * exponent) * norm
        with_line = total + weight * line.to(tl.float32, bitcast=True)
        total = tl.where((tap >= 0) & (tap < TAPS), with_line, total)
    return total


@triton.jit
def load_exact(pointer, BYTES: tl.constexpr, in_bounds=None):
    """Load pixels of one channel in [0, 1]. Bytes are divided by 255 with the same rounding as in torch.

    ``pointer``: addresses of the pixels, of any shape. The result is undefined where ``in_bounds`` is false.
    """
    value = as_float(tl.load(pointer, mask=in_bounds), BYTES)
    return div_by_255(value) if BYTES else value


@triton.jit
def count_levels(
    pointer, top, left, rect_height, rect_width, height, width, source_h, SOURCE_W: tl.constexpr, BYTES: tl.constexpr,
    FACTOR: tl.constexpr, OFFSET: tl.constexpr, REFLECTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the number of pixels per byte level in a rectangle of one channel, (LEVELS,) int32.

    ``pointer``: address of the channel. ``top``, ``left``: position of the rectangle in the image, of ``height`` x ``width``
    pixels. ``source_h``, ``SOURCE_W``: strides along y and x, in elements. ``REFLECTS``: whether the
    rectangle may extend beyond the image, which is reflected there. ``BLOCK``: number of pixels that are read at once.
    ``FACTOR``, ``OFFSET``: map from values in [0, 1] to levels (``to_level``).
    """
    pixels = rect_height * rect_width
    counts = tl.zeros((LEVELS,), tl.int32)
    for start in range(0, pixels, BLOCK):
        index = start + tl.arange(0, BLOCK)
        clamped_index = tl.minimum(index, pixels - 1)
        y = top + clamped_index // rect_width
        x = left + clamped_index % rect_width
        if REFLECTS:
            y = border_index(y, height, 1)
            x = border_index(x, width, 1)
        value = clamp01(load_exact(pointer + y * source_h + x * SOURCE_W, BYTES))
        # Indices beyond the rectangle are counted as black, and subtracted below.
        counts += tl.histogram(tl.where(index < pixels, to_level(value, FACTOR, OFFSET), 0), LEVELS)
    return counts - tl.where(tl.arange(0, LEVELS) == 0, (pixels + BLOCK - 1) // BLOCK * BLOCK - pixels, 0)


@triton.jit
def load_exact_tile(pointer, in_bounds, BYTES: tl.constexpr):
    """Apply ``load_exact`` to (ACROSS, ALONG) pixels. The threads of a warp lie along the first axis."""
    return unflatten(load_exact(flatten(pointer), BYTES, flatten(tl.broadcast_to(in_bounds, pointer.shape))), pointer)


@triton.jit
def load_exact_pixels(pointer, in_bounds, source_c, BYTES: tl.constexpr, RGB: tl.constexpr, X_LAST: tl.constexpr = False):
    """Load (r, g, b) of a tile by ``load_exact``; without ``RGB``, one channel three times.

    The first axis of the tile is x; with ``X_LAST``, the last axis is x. ``in_bounds``: mask of the columns inside the image.
    Columns outside are masked, not clamped, because with clamped column indices the compiler could not infer that addresses are
    contiguous.
    """
    r = load_exact(pointer, BYTES, in_bounds) if X_LAST else load_exact_tile(pointer, in_bounds, BYTES)
    g = r
    b = r
    if RGB:
        green = pointer + source_c
        blue = green + source_c
        g = load_exact(green, BYTES, in_bounds) if X_LAST else load_exact_tile(green, in_bounds, BYTES)
        b = load_exact(blue, BYTES, in_bounds) if X_LAST else load_exact_tile(blue, in_bounds, BYTES)
    return r, g, b


@triton.jit
def with_channel(value, channel, r, g, b, RGB: tl.constexpr):
    """Return (r, g, b) with ``value`` in place of the channel with index ``channel``; without ``RGB``, ``value`` three times.

    For kernels that compute channels in a loop at run time, because three copies of the code take nine times as long to
    compile.
    """
    if RGB:
        return tl.where(channel == 0, value, r), tl.where(channel == 1, value, g), tl.where(channel == 2, value, b)
    return value, value, value


@triton.jit
def store_tile(
    r, g, b, x, y, sample, plane, height, width, row, out, out_c, out_h,
    OUT_W: tl.constexpr, PROGRAM: tl.constexpr, OP_COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr,
    first_x=0, WORDS: tl.constexpr = False, X_LAST: tl.constexpr = False,
):  # fmt: skip
    """Run the pointwise ops on a tile and store it. The first axis of the tile is x; with ``X_LAST``, the last axis is x.

    ``r``, ``g``, ``b``: pixels in [0, 1]. ``x``, ``y``: their coordinates in the image, of ``height`` x ``width`` pixels.
    ``sample``: index of the image, or frame of a clip. ``plane``: index of the channel; 0 with ``RGB``. ``row``, ``out``:
    addresses of the sample's table row and output image.
    ``out_c``, ``out_h``, ``OUT_W``: strides of the output.

    ``WORDS``: store two adjacent pixels of a 16-bit dtype, channels last, as three words of 32 bits: r0 g0, b0 r1, g1 b1. Needs
    ``RGB`` and ``X_LAST``, and ``first_x``, the even coordinate x of the first column.
    """
    # 0.0: mean of the image, which no op of this pass uses.
    r, g, b = apply_point_ops(r, g, b, x, y, sample, plane, width, row, 0.0, PROGRAM, OP_COUNT, CHANNELS, RGB)
    if WORDS:  # from here on, the last axis is pairs of pixels, and 4 words per pair
        r = tl.reshape(r, r.shape[0], r.shape[1] // 2, 2)
        g = tl.reshape(g, r.shape)
        b = tl.reshape(b, r.shape)
        packed = tl.reshape(pack_words(r, g, b, out.dtype.element_ty), r.shape[0], 4 * r.shape[1])
        # Of the four words of a pair, the last is not stored (``pack_words``). Strides are halved: a word has two elements.
        word = tl.arange(0, 4 * r.shape[1])[None, :]
        offset = first_x // 2 * 3 + word // 4 * 3 + word % 4
        target = out.to(tl.pointer_type(tl.int32)) + y * (out_h // 2) + offset
        tl.store(target, packed, mask=(y < height) & (offset < width // 2 * 3) & (word % 4 < 3))
    else:
        in_bounds = (x < width) & (y < height)
        pixel = out + plane * out_c + y * out_h + x * OUT_W
        if not X_LAST:
            pixel, in_bounds, r, g, b = flatten(pixel), flatten(in_bounds), flatten(r), flatten(g), flatten(b)
        store_channels(pixel, out_c, r, g, b, in_bounds, RGB)


@partial(kernel, name=lambda form: form.constants["FILTER"].__name__)
def filter_kernel(
    source, intermediate, out, param_table, height, width, tiles_across, row_stride, source_b, source_c, source_h, out_b, out_c,
    out_h, intermediate_c, SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, BYTES: tl.constexpr, OUT_W: tl.constexpr,
    PROGRAM: tl.constexpr, OP_COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr, ALONG: tl.constexpr,
    ACROSS: tl.constexpr, TILES: tl.constexpr, ROUTE_COLUMN: tl.constexpr, ALONG_X: tl.constexpr, FILTER: tl.constexpr,
    SETTINGS: tl.constexpr,
):  # fmt: skip
    """Filter the samples whose apply mask is not 0, run the pointwise ops of the pass, and store all samples.

    Tensors, by their address, and their strides in elements:
        source, out: Input and output images, (B, C, ``height``, ``width``), with the strides ``source_b`` to ``SOURCE_W`` and
            ``out_b`` to ``OUT_W``.
        intermediate: Result of the first launch (``FirstLaunch``), (B, C, …), with ``intermediate_c`` elements per plane; not
            read without a first launch.
        param_table: Parameter table, (B, K), with the stride ``row_stride``. Column 0 is the apply mask of the filter.

    Constants, in addition to the constants of ``output_constants`` and ``tile_indices``:
        ALONG_X: Whether the filter works along x, not along y. x is then the last axis of a tile.
        FILTER: Function that returns the output pixels of one plane of a tile in [0, 1], (ACROSS, ALONG) float32::

                FILTER(
                    plane_address, intermediate, row, tile_start, y, x, height, width, stride_y,
                    SOURCE_W, BYTES, ALONG, ACROSS, SETTINGS,
                )

            ``plane_address``, ``intermediate``: addresses of the plane in ``source`` and in the result of the first launch.
            ``row``: address of the sample's row of the parameter table. ``tile_start``: index of the tile's first pixel along
            the axis of the filter; ``y``, ``x``: indices of the tile's lines and columns (``tile_indices``). ``stride_y``:
            stride between lines of ``source``.
        SETTINGS: Constants of ``FILTER``.

    Grid: (blocks per image, samples, planes; with ``RGB`` one plane).
    """
    skipped, sample, plane, row, pointer, out = select_sample(
        source, out, param_table, row_stride, source_b, source_c, out_b, FRAMES, ROUTE_COLUMN
    )
    if skipped:
        return
    tile_start, y, x = tile_indices(tiles_across, ALONG, ACROSS, TILES)
    if ALONG_X:
        x, y = y, x
    if tl.load(row) != 0:
        intermediate += (sample.to(tl.int64) * CHANNELS + plane) * intermediate_c
        r = tl.zeros((ACROSS, ALONG), tl.float32)
        g = r
        b = r
        for channel in range(3 if RGB else 1):
            value = FILTER(
                pointer + channel * source_c, intermediate + channel * intermediate_c, row, tile_start, y, x, height, width,
                source_h, SOURCE_W, BYTES, ALONG, ACROSS, SETTINGS,
            )  # fmt: skip
            r, g, b = with_channel(value, channel, r, g, b, RGB)
    else:
        pixel = pointer + tl.minimum(y, height - 1) * source_h + x * SOURCE_W
        r, g, b = load_exact_pixels(pixel, x < width, source_c, BYTES, RGB, X_LAST=ALONG_X)
    if ALONG_X:  # a warp stores along x, even if the three channels of a pixel are adjacent
        x, y, r, g, b = tl.trans(x), tl.trans(y), tl.trans(r), tl.trans(g), tl.trans(b)
    store_tile(r, g, b, x, y, sample, plane, height, width, row, out, out_c, out_h, OUT_W, PROGRAM, OP_COUNT, CHANNELS, RGB)


def tiles_of(pass_: OpPass[FrontOp], along: int, across: int) -> tuple[int, int, dict[str, int]]:
    """Return (tiles of an image along the axis across the filter, thread blocks per image, constants of ``tile_indices``).

    Args:
        pass_: Pass that the kernel runs.
        along: Size of the image in pixels along the axis that the filter works along.
        across: Size of the image in pixels along the other axis.
    """
    tiles_across = triton.cdiv(across, TILE_ACROSS)
    tiles = tiles_across * triton.cdiv(along, TILE_ALONG)
    # Only a pass with a column of buffer routes skips samples.
    block_tiles = min(MOST_TILES, triton.next_power_of_2(tiles)) if pass_.route_column >= 0 else 1
    constants = {"ALONG": TILE_ALONG, "ACROSS": TILE_ACROSS * block_tiles, "TILES": block_tiles}
    return tiles_across, triton.cdiv(tiles, block_tiles), constants


def filter_launch(
    filter_function: Any,
    settings: tuple[Any, ...],
    pass_: OpPass[FrontOp],
    source: Tensor,
    param_table: Tensor,
    out: Tensor,
    first: FirstLaunch | None = None,
    *,
    along_x: bool = False,
) -> FilterLaunch:
    """Return the launch of ``filter_kernel``.

    Args:
        filter_function: Constant ``FILTER`` of the kernel.
        settings: Constant ``SETTINGS`` of the kernel.
        pass_: Pass that the kernel runs.
        source: (B, C, H, W) input, of a type in ``IMAGE_DTYPES`` or ``UINT16_UNIT``.
        param_table: (B, K) parameter table.
        out: (B, C, H, W) output, of a type in ``IMAGE_DTYPES`` or ``UINT16_UNIT``.
        first: Launch before this launch, whose output ``filter_function`` reads.
        along_x: Whether the filter works along x, not along y.
    """
    batch, _, height, width = source.shape
    tiles_across, blocks, tiling = tiles_of(pass_, width, height) if along_x else tiles_of(pass_, height, width)
    common, planes = output_constants(pass_, source, out)
    intermediate_c = 0 if first is None else math.prod(first.shape[2:])
    integers = (height, width, tiles_across, param_table.stride(0), *source.stride()[:3], *out.stride()[:3], intermediate_c)
    constants = {**common, **tiling, "ALONG_X": along_x, "FILTER": filter_function, "SETTINGS": settings}
    return FilterLaunch(first, Launch(filter_kernel, (blocks, batch, planes), integers, constants, num_warps=tiling["TILES"]))
