"""Triton kernel of the filters, and its launch. The kernel calls the function of a filter for each plane of an output tile.

The kernel does what is common to all filters: it skips samples, copies the samples that the filter does not apply to, runs the
pointwise ops of the pass, and stores the pixels. Only a blur in strips (``blur.py``) has a separate kernel. ``tiles.py``
describes the tiles of thread blocks.
"""

import math
from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.tiles import (
    MOST_TILES,
    TILE_ACROSS,
    TILE_ALONG,
    load_exact_pixels,
    store_tile,
    tile_indices,
    with_channel,
)
from gpuaug.fusion.backends.triton.launch import FilterLaunch, FirstLaunch, Launch, kernel, output_constants
from gpuaug.fusion.backends.triton.taps import select_sample
from gpuaug.fusion.ops.base import FrontOp
from gpuaug.fusion.program.plan import OpPass


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
    return FilterLaunch(first, Launch(filter_kernel, (blocks, batch, planes), integers, constants, warps=tiling["TILES"]))
