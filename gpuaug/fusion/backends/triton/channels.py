"""Triton kernel of channel shuffles and conversions to grey, for images whose number of channels is not three."""

import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.tiles import load_exact
from gpuaug.fusion.backends.triton.launch import Launch, kernel, output_constants
from gpuaug.fusion.backends.triton.mix import TILE
from gpuaug.fusion.backends.triton.pixel_math import to_output_type
from gpuaug.fusion.backends.triton.points import apply_point_ops
from gpuaug.fusion.backends.triton.taps import select_sample
from gpuaug.fusion.ops.base import FrontOp
from gpuaug.fusion.ops.channel import Grayscale
from gpuaug.fusion.program.plan import OpPass


@kernel
def channels_kernel(
    source, out, param_table, height, width, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, BYTES: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr,
    OP_COUNT: tl.constexpr, CHANNELS: tl.constexpr, OUT_CHANNELS: tl.constexpr, RGB: tl.constexpr, TO_GREY: tl.constexpr,
    TILE: tl.constexpr, ROUTE_COLUMN: tl.constexpr,
):  # fmt: skip
    """Compute all output channels of a tile of ``TILE`` consecutive pixels.

    With ``TO_GREY``, each output channel is the weighted sum of the source channels; without, it is one of the source channels.
    Columns of a row: apply mask (0 to skip the op); then per source channel its weight with ``TO_GREY``, else per output
    channel the index of its source channel.

    ``OUT_CHANNELS``, the number of output channels, differs from ``CHANNELS`` only if the op applies to all samples. ``RGB`` is
    false: each channel is computed on its own. Other constants: see ``output_constants`` in ``launch.py``.

    Grid: (tiles per image, samples, 1).
    """
    skipped, sample, first_plane, row, pointer, out = select_sample(
        source, out, param_table, row_stride, source_b, source_c, out_b, FRAMES, ROUTE_COLUMN
    )
    if skipped:
        return
    pixel_index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    in_bounds = pixel_index < height * width
    x = pixel_index % width
    y = pixel_index // width
    source_pixel = pointer + y * source_h + x * SOURCE_W
    applies = tl.load(row) != 0
    grey = tl.zeros((TILE,), tl.float32)
    if TO_GREY and applies:
        for channel in range(CHANNELS):
            grey += load_exact(source_pixel + channel * source_c, BYTES, in_bounds) * tl.load(row + 1 + channel)
    for channel in range(OUT_CHANNELS):
        plane = first_plane + channel
        if TO_GREY and applies:
            pixels = grey
        else:
            source_plane = plane
            if applies:
                source_plane = tl.load(row + 1 + plane).to(tl.int32)
            pixels = load_exact(source_pixel + source_plane * source_c, BYTES, in_bounds)
        # 0.0: mean of the image, which no op of this pass uses.
        pixels, _, _ = apply_point_ops(
            pixels, pixels, pixels, x, y, sample, plane, width, row, 0.0, PROGRAM, OP_COUNT, OUT_CHANNELS, RGB
        )  # fmt: skip
        out_pixel = out + plane * out_c + y * out_h + x * OUT_W
        tl.store(out_pixel, to_output_type(pixels, out.dtype.element_ty), mask=in_bounds)


def channels_launch(pass_: OpPass[FrontOp], source: Tensor, param_table: Tensor, out: Tensor) -> Launch:
    """Prepare the launch of a pass that begins with a channel shuffle or a conversion to grey."""
    batch, _, height, width = source.shape
    constants, _ = output_constants(pass_, source, out)
    constants |= {"OUT_CHANNELS": out.shape[1], "RGB": False, "TO_GREY": isinstance(pass_.front, Grayscale), "TILE": TILE}
    integers = (height, width, param_table.stride(0), *source.stride()[:3], *out.stride()[:3])
    return Launch(channels_kernel, (triton.cdiv(height * width, TILE), batch, 1), integers, constants)
