"""Triton kernels for filters, and their launches.

A block is one warp, with a tile whose first axis is the one blurred along and lies in one thread's registers. So every line of
the source is read once a tile, and added to the outputs that it reaches with weights that are the same in all threads: a
neighbourhood takes one multiplication a tap and no shuffle. Loops over lines are unrolled for the compiler to see this.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.launch import Launch, prepared
from gpuaug.fusion.backends.triton.pixel_math import as_float, byte_share, unit
from gpuaug.fusion.backends.triton.points import points
from gpuaug.fusion.ops.filters import BlurOp
from gpuaug.fusion.plan import Pass

ALONG = 16
"""How many outputs of a tile lie along the axis that is blurred."""

ACROSS = 32
"""How many lie side by side in a tile: a multiple of the threads in a warp."""

BORDERS = {"constant": 0, "reflect": 1, "replicate": 2, "circular": 3}

SIZES = ("height", "width", "tiles", "row_stride")
STRIDES = ("source_b", "source_c", "source_h", "out_b", "out_c", "out_h")
POINTERS = ("source", "made", "out", "rows")


@triton.jit
def bordered(index, size, BORDER: tl.constexpr):
    """Where an index outside the image is read; any place inside where a constant is meant."""
    if BORDER == 1:
        index = tl.abs(index)
        index = size - 1 - tl.abs(size - 1 - index)
    if BORDER == 3:
        index = tl.where(index < 0, index + size, index)
        index = tl.where(index >= size, index - size, index)
    return tl.minimum(tl.maximum(index, 0), size - 1)


@triton.jit
def read(pointer, inside, BORDER: tl.constexpr, SCALE: tl.constexpr):
    """Pixels, of 0 to 255 in bytes; zeros outside where that is the border."""
    if BORDER == 0:
        # In the interpreter of Triton 3.9 a truth is a whole number where a scalar was joined with a block.
        return as_float(tl.load(pointer, mask=inside != 0, other=0), SCALE)
    return as_float(tl.load(pointer), SCALE)


@triton.jit
def untouched(pointer, SCALE: tl.constexpr):
    """Pixels of a sample that is skipped: in [0, 1] as torch divides bytes, bit for bit."""
    value = as_float(tl.load(pointer), SCALE)
    return byte_share(value) if SCALE else value


@triton.jit
def falling(sigma):
    """What a squared distance is multiplied by in the exponent of a Gaussian."""
    # A square too small for a float has all its weight in the middle.
    return -tl.div_rn(tl.full((), 1.0, tl.float32), tl.maximum(2 * sigma * sigma, 1.2e-38))


@triton.jit
def share(fall, TAPS: tl.constexpr):
    """What weights are multiplied by to sum to 1."""
    total = fall * 0
    for tap in tl.static_range(TAPS):
        total += tl.exp((tap - TAPS // 2) * (tap - TAPS // 2) * fall)
    return tl.div_rn(tl.full((), 1.0, tl.float32), total)


@triton.jit
def added(total, line, position, fall, part, TAPS: tl.constexpr, ALONG: tl.constexpr):
    """Outputs with one line added: those that it reaches, for what is not a number must not get further either."""
    tap = position - tl.arange(0, ALONG)[:, None]
    distance = (tap - TAPS // 2).to(tl.float32)
    weight = tl.exp(distance * distance * fall) * part
    return tl.where((tap >= 0) & (tap < TAPS), total + weight * line, total)


@triton.jit
def blurred_along(
    pointer, first, size, step, across, sigma,
    TAPS: tl.constexpr, BORDER: tl.constexpr, SCALE: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """A tile of one plane, blurred along its first axis.

    ``first`` is the place of its first output on that axis, of ``size`` pixels ``step`` apart; ``across`` the offsets of its
    pixels on the other, (1, ACROSS).
    """
    fall = falling(sigma)
    part = share(fall, TAPS)
    total = tl.zeros((ALONG, ACROSS), tl.float32)
    for position in tl.static_range(ALONG + TAPS - 1):
        index = first + (position - TAPS // 2)
        inside = (index >= 0) & (index < size) & (across >= 0)
        line = read(pointer + bordered(index, size, BORDER) * step + across, inside, BORDER, SCALE)
        total = added(total, line, position, fall, part, TAPS, ALONG)
    return total


@triton.jit
def blurred_both(
    pointer, first, x, height, width, step, sigma_y, sigma_x, TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr,
    BORDER: tl.constexpr, SOURCE_W: tl.constexpr, SCALE: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """A tile of one plane, blurred: each line along x by shifted reads, which the first-level cache serves, then along y."""
    fall_y, fall_x = falling(sigma_y), falling(sigma_x)
    part_y, part_x = share(fall_y, TAPS_Y), share(fall_x, TAPS_X)
    total = tl.zeros((ALONG, ACROSS), tl.float32)
    for position in tl.static_range(ALONG + TAPS_Y - 1):
        index = first + (position - TAPS_Y // 2)
        inside = (index >= 0) & (index < height)
        start = pointer + bordered(index, height, BORDER) * step
        line = tl.zeros((1, ACROSS), tl.float32)
        for tap in tl.static_range(TAPS_X):
            at = x + (tap - TAPS_X // 2)
            pixel = start + bordered(at, width, BORDER) * SOURCE_W
            weight = tl.exp((tap - TAPS_X // 2) * (tap - TAPS_X // 2) * fall_x) * part_x
            line += weight * read(pixel, inside & (at >= 0) & (at < width), BORDER, SCALE)
        total = added(total, line, position, fall_y, part_y, TAPS_Y, ALONG)
    return total


@triton.jit
def sharpened(
    pointer, first, x, height, width, step, factor,
    SOURCE_W: tl.constexpr, SCALE: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """A tile of one plane: clamped, smoothed inside the border, mixed."""
    place = tl.arange(0, ALONG)[:, None]
    total = tl.zeros((ALONG, ACROSS), tl.float32)
    centre = tl.zeros((ALONG, ACROSS), tl.float32)
    for position in tl.static_range(ALONG + 2):
        start = pointer + bordered(first + (position - 1), height, 2) * step
        left = read(start + bordered(x - 1, width, 2) * SOURCE_W, True, 2, SCALE)
        middle = read(start + bordered(x, width, 2) * SOURCE_W, True, 2, SCALE)
        right = read(start + bordered(x + 1, width, 2) * SOURCE_W, True, 2, SCALE)
        if not SCALE:
            left, middle, right = unit(left), unit(middle), unit(right)
        tap = position - place
        total = tl.where((tap >= 0) & (tap < 3), total + (left + middle + right), total)
        centre = tl.where(tap == 1, middle, centre)
    smooth = (total + 4 * centre) * (1 / (13 * 255) if SCALE else 1 / 13)
    if SCALE:
        centre = byte_share(centre)
    y = first + place
    within = (y > 0) & (y < height - 1) & (x > 0) & (x < width - 1)
    smooth = tl.where(within, unit(smooth), centre)
    return unit(smooth + (centre - smooth) * factor)


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
):  # fmt: skip
    """Take a tile through the pointwise ops and store it."""
    r, g, b = points(r, g, b, x, y, sample, plane, height, width, row, 0.0, PROGRAM, COUNT, CHANNELS, RGB)
    live = (x < width) & (y < height)
    pixel = out + sample.to(tl.int64) * out_b + plane * out_c + y * out_h + x * OUT_W
    tl.store(pixel, r.to(out.dtype.element_ty), mask=live)
    if RGB:
        tl.store(pixel + out_c, g.to(out.dtype.element_ty), mask=live)
        tl.store(pixel + 2 * out_c, b.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=[*POINTERS])
def blur_columns_kernel(
    source, made, rows, height, width, tiles, row_stride, source_b, source_c, source_h,
    COLUMN: tl.constexpr, TAPS: tl.constexpr, BORDER: tl.constexpr, SOURCE_W: tl.constexpr, SCALE: tl.constexpr,
    CHANNELS: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Blur along y, into planes of W x H: what is blurred next is then again the axis that is not contiguous.

    Grid: (tiles of an image, samples, channels).
    """
    sample = tl.program_id(1)
    row = rows + sample * row_stride + COLUMN
    if tl.load(row) != 0:
        plane = tl.program_id(2)
        first = tl.program_id(0) // tiles * ALONG
        y = first + tl.arange(0, ALONG)[:, None]
        x = tl.program_id(0) % tiles * ACROSS + tl.arange(0, ACROSS)[None, :]
        pointer = source + sample.to(tl.int64) * source_b + plane * source_c
        across = tl.minimum(x, width - 1) * SOURCE_W
        value = blurred_along(
            pointer, first, height, source_h, across, tl.load(row + 1), TAPS, BORDER, SCALE, ALONG, ACROSS
        )  # fmt: skip
        start = made + (sample.to(tl.int64) * CHANNELS + plane) * height * width
        tl.store(start + x * height + y, value, mask=(x < width) & (y < height))


@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=[*POINTERS])
def blur_rows_kernel(
    source, made, out, rows, height, width, tiles, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    COLUMN: tl.constexpr, TAPS: tl.constexpr, BORDER: tl.constexpr, SOURCE_W: tl.constexpr, SCALE: tl.constexpr,
    OUT_W: tl.constexpr, PROGRAM: tl.constexpr, COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr,
    ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Blur what :func:`blur_columns_kernel` made along x; of a sample that is skipped, read the source.

    Grid: (tiles of an image, samples, planes; one plane where a block makes all three).
    """
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample * row_stride
    first = tl.program_id(0) // tiles * ALONG
    x = first + tl.arange(0, ALONG)[:, None]
    y = tl.program_id(0) % tiles * ACROSS + tl.arange(0, ACROSS)[None, :]
    across = tl.minimum(y, height - 1)
    if tl.load(row + COLUMN) != 0:
        sigma = tl.load(row + COLUMN + 2)
        start = made + (sample.to(tl.int64) * CHANNELS + plane) * height * width
        r = tl.zeros((ALONG, ACROSS), tl.float32)
        g = r
        b = r
        for channel in range(3 if RGB else 1):
            at = start + channel * height * width
            value = blurred_along(at, first, width, height, across, sigma, TAPS, BORDER, False, ALONG, ACROSS)
            r, g, b = placed(value, channel, r, g, b, RGB)
        if SCALE:
            r, g, b = r * (1 / 255), g * (1 / 255), b * (1 / 255)
    else:
        pixel = source + sample.to(tl.int64) * source_b + plane * source_c
        pixel += across * source_h + tl.minimum(x, width - 1) * SOURCE_W
        r = untouched(pixel, SCALE)
        g = untouched(pixel + source_c, SCALE) if RGB else r
        b = untouched(pixel + 2 * source_c, SCALE) if RGB else r
    stored(r, g, b, x, y, sample, plane, height, width, row, out, out_b, out_c, out_h, OUT_W, PROGRAM, COUNT, CHANNELS, RGB)


@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=[*POINTERS])
def blur_kernel(
    source, out, rows, height, width, tiles, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    COLUMN: tl.constexpr, TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, BORDER: tl.constexpr, SOURCE_W: tl.constexpr,
    SCALE: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr, COUNT: tl.constexpr, CHANNELS: tl.constexpr,
    RGB: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Blur along both axes at once.

    Grid: (tiles of an image, samples, planes; one plane where a block makes all three).
    """
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample * row_stride
    first = tl.program_id(0) // tiles * ALONG
    y = first + tl.arange(0, ALONG)[:, None]
    x = tl.program_id(0) % tiles * ACROSS + tl.arange(0, ACROSS)[None, :]
    pointer = source + sample.to(tl.int64) * source_b + plane * source_c
    if tl.load(row + COLUMN) != 0:
        sigma_y = tl.load(row + COLUMN + 1)
        sigma_x = tl.load(row + COLUMN + 2)
        r = tl.zeros((ALONG, ACROSS), tl.float32)
        g = r
        b = r
        for channel in range(3 if RGB else 1):
            value = blurred_both(
                pointer + channel * source_c, first, x, height, width, source_h, sigma_y, sigma_x,
                TAPS_Y, TAPS_X, BORDER, SOURCE_W, SCALE, ALONG, ACROSS,
            )  # fmt: skip
            r, g, b = placed(value, channel, r, g, b, RGB)
        if SCALE:
            r, g, b = r * (1 / 255), g * (1 / 255), b * (1 / 255)
    else:
        pixel = pointer + tl.minimum(y, height - 1) * source_h + tl.minimum(x, width - 1) * SOURCE_W
        r = untouched(pixel, SCALE)
        g = untouched(pixel + source_c, SCALE) if RGB else r
        b = untouched(pixel + 2 * source_c, SCALE) if RGB else r
    stored(r, g, b, x, y, sample, plane, height, width, row, out, out_b, out_c, out_h, OUT_W, PROGRAM, COUNT, CHANNELS, RGB)


@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=[*POINTERS])
def sharpness_kernel(
    source, out, rows, height, width, tiles, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    COLUMN: tl.constexpr, SOURCE_W: tl.constexpr, SCALE: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr,
    COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Sharpen.

    Grid: (tiles of an image, samples, planes; one plane where a block makes all three).
    """
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample * row_stride
    first = tl.program_id(0) // tiles * ALONG
    y = first + tl.arange(0, ALONG)[:, None]
    x = tl.program_id(0) % tiles * ACROSS + tl.arange(0, ACROSS)[None, :]
    pointer = source + sample.to(tl.int64) * source_b + plane * source_c
    if tl.load(row + COLUMN) != 0:
        factor = tl.load(row + COLUMN + 1)
        r = tl.zeros((ALONG, ACROSS), tl.float32)
        g = r
        b = r
        for channel in range(3 if RGB else 1):
            at = pointer + channel * source_c
            value = sharpened(at, first, x, height, width, source_h, factor, SOURCE_W, SCALE, ALONG, ACROSS)
            r, g, b = placed(value, channel, r, g, b, RGB)
    else:
        pixel = pointer + tl.minimum(y, height - 1) * source_h + tl.minimum(x, width - 1) * SOURCE_W
        r = untouched(pixel, SCALE)
        g = untouched(pixel + source_c, SCALE) if RGB else r
        b = untouched(pixel + 2 * source_c, SCALE) if RGB else r
    stored(r, g, b, x, y, sample, plane, height, width, row, out, out_b, out_c, out_h, OUT_W, PROGRAM, COUNT, CHANNELS, RGB)


def blur(step: Pass, source: Tensor, rows: Tensor, out: Tensor) -> int:
    """Launch a pass with a blur in front on the current stream.

    Args:
        step: The pass.
        source: uint8 or floating, any strides.
        rows: The samples' numbers.
        out: Floating, any strides.

    Shape:
        - source, out: (B, C, H, W)
        - rows: (B, K), float32

    Returns:
        The number of launches.

    Cost:
        With two launches, a float32 copy of the images between them.
    """
    op = step.front
    assert isinstance(op, BlurOp)
    if op.launches == 1:
        prepared(step, source, rows, out, _blurring)((source, out, rows))
        return 1
    batch, channels, height, width = source.shape
    columns, last = prepared(step, source, rows, out, _blurring_twice)
    made = torch.empty((batch, channels, width, height), dtype=torch.float32, device=source.device)
    columns((source, made, rows))
    last((source, made, out, rows))
    return 2


def sharpen(step: Pass, source: Tensor, rows: Tensor, out: Tensor) -> int:
    """Launch a pass with a sharpness in front on the current stream; as :func:`blur`, in one launch."""
    prepared(step, source, rows, out, _sharpening)((source, out, rows))
    return 1


def _blurring(step: Pass, source: Tensor, rows: Tensor, out: Tensor) -> Launch:
    op = step.front
    assert isinstance(op, BlurOp)
    batch, _, height, width = source.shape
    down, across = op.kernel_size
    common, last, planes = _arguments(step, source, rows, out)
    wide, high = triton.cdiv(width, ACROSS), triton.cdiv(height, ALONG)
    constants = {**common, **last[1], "TAPS_Y": down, "TAPS_X": across, "BORDER": BORDERS[op.border]}
    return Launch(blur_kernel, (wide * high, batch, planes), (height, width, wide, *last[0]), constants, warps=1)


def _blurring_twice(step: Pass, source: Tensor, rows: Tensor, out: Tensor) -> tuple[Launch, Launch]:
    op = step.front
    assert isinstance(op, BlurOp)
    batch, channels, height, width = source.shape
    down, across = op.kernel_size
    common, last, planes = _arguments(step, source, rows, out)
    common["BORDER"] = BORDERS[op.border]
    wide, high = triton.cdiv(width, ACROSS), triton.cdiv(height, ALONG)
    columns = Launch(
        blur_columns_kernel,
        (wide * high, batch, channels),
        (height, width, wide, rows.stride(0), *source.stride()[:3]),
        {**common, "TAPS": down, "CHANNELS": channels},
        warps=1,
    )
    wide, high = triton.cdiv(width, ALONG), triton.cdiv(height, ACROSS)
    lines = Launch(
        blur_rows_kernel,
        (wide * high, batch, planes),
        (height, width, high, *last[0]),
        {**common, **last[1], "TAPS": across},
        warps=1,
    )
    return columns, lines


def _sharpening(step: Pass, source: Tensor, rows: Tensor, out: Tensor) -> Launch:
    batch, _, height, width = source.shape
    common, last, planes = _arguments(step, source, rows, out)
    wide, high = triton.cdiv(width, ACROSS), triton.cdiv(height, ALONG)
    return Launch(
        sharpness_kernel, (wide * high, batch, planes), (height, width, wide, *last[0]), {**common, **last[1]}, warps=1
    )


def _arguments(
    step: Pass, source: Tensor, rows: Tensor, out: Tensor
) -> tuple[dict[str, Any], tuple[tuple[int, ...], dict[str, Any]], int]:
    """What all launches take, what the last takes besides, and how many planes its grid has."""
    channels = source.shape[1]
    common = {
        "COLUMN": step.columns,
        "SOURCE_W": source.stride(3),
        "SCALE": source.dtype == torch.uint8,
        "ALONG": ALONG,
        "ACROSS": ACROSS,
    }
    # A block of three planes stores whole pixels where those lie together.
    rgb = channels == 3 and (out.stride(1) == 1 or any(op.rgb_only for op in step.points))
    constants = {
        "OUT_W": out.stride(3),
        "PROGRAM": step.program,
        "COUNT": len(step.program),
        "CHANNELS": channels,
        "RGB": rgb,
    }
    strides = (rows.stride(0), *source.stride()[:3], *out.stride()[:3])
    return common, (strides, constants), 1 if rgb else channels
