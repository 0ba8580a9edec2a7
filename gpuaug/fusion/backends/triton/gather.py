"""Triton kernels for gathers of images and of masks: one thread block makes a tile of one sample, from reading to storing.

Everything that differs between pipelines is a compile-time constant, everything that differs between batches is not: sizes are
not specialised on, so that the last batch of an epoch, or images of another size, compile nothing.
"""

import triton
import triton.language as tl

from gpuaug.fusion.backends.triton.pixel_math import byte_share
from gpuaug.fusion.backends.triton.points import grey_before_contrast, points
from gpuaug.fusion.backends.triton.second_pass import at_rest, mean_of
from gpuaug.fusion.backends.triton.taps import (
    antialiased,
    between,
    blended,
    buffers,
    filled,
    half_to_even,
    located,
    mapped,
    paired,
    read,
    share_inside,
    tap_axis,
)

SIZES = ("images", "out_height", "out_width", "tiles_x", "row_stride", "tiles", "blocks")
STRIDES = ("source_b", "source_c", "source_h", "out_b", "out_c", "out_h")


@triton.jit
def gathered(
    pointer, x, y, row, source_c, source_h, SOURCE_C: tl.constexpr, SOURCE_H: tl.constexpr, SOURCE_W: tl.constexpr,
    PAIRS: tl.constexpr, ANTIALIAS: tl.constexpr, first_channel,
    SCALE: tl.constexpr, EXACT: tl.constexpr, RGB: tl.constexpr, CHANNELS: tl.constexpr, KIND: tl.constexpr,
    HALF_PIXEL: tl.constexpr, NEAREST: tl.constexpr, ZEROS: tl.constexpr, AFTER: tl.constexpr, AFTER_AT: tl.constexpr,
    AFTER_FILL: tl.constexpr, WARP_AT: tl.constexpr, BEFORE: tl.constexpr, BEFORE_AT: tl.constexpr, BEFORE_FILL: tl.constexpr,
    FILLS: tl.constexpr, WARP_FILL: tl.constexpr,
):  # fmt: skip
    """The pixels of a tile: three channels, or one and two copies of it."""
    inside_x = x == x
    inside_y = y == y
    if AFTER > 0:
        x, inside_x = mapped(x, row + AFTER_AT, 0, AFTER)
        y, inside_y = mapped(y, row + AFTER_AT, 1, AFTER)
    before = row + BEFORE_AT
    within = x == x
    second: tl.constexpr = 1 if RGB else 0
    third: tl.constexpr = 2 if RGB else 0
    fill_r = 0.0
    fill_g = 0.0
    fill_b = 0.0
    if BEFORE == 2:
        fill_r = tl.load(row + BEFORE_FILL + first_channel)
        fill_g = tl.load(row + BEFORE_FILL + first_channel + second)
        fill_b = tl.load(row + BEFORE_FILL + first_channel + third)
        if SCALE and KIND > 0:
            fill_r, fill_g, fill_b = fill_r * 255, fill_g * 255, fill_b * 255
    # What is compiled in is part of the instruction that reads, which saves additions of 64 bits.
    to_plane = SOURCE_C if SOURCE_C > 0 else source_c
    to_row = SOURCE_H if SOURCE_H > 0 else source_h
    green = pointer + second * to_plane
    blue = pointer + third * to_plane
    if KIND == 0:
        within_x = inside_x
        within_y = inside_y
        if BEFORE > 0:
            x, within_x = mapped(x, before, 0, BEFORE)
            y, within_y = mapped(y, before, 1, BEFORE)
        offset = (y * source_h + x * SOURCE_W).to(tl.uint32)
        within = within_x & within_y
        r = read(pointer, offset, within, within, fill_r, SCALE, False, BEFORE)
        g = read(green, offset, within, within, fill_g, SCALE, False, BEFORE) if RGB else r
        b = read(blue, offset, within, within, fill_b, SCALE, False, BEFORE) if RGB else r
    else:
        at_x, at_y, start_x, count_x, start_y, count_y = located(x, y, row + WARP_AT, KIND, HALF_PIXEL, NEAREST)
        if ANTIALIAS > 0:
            r, g, b = antialiased(
                pointer, at_x, at_y, tl.load(row + WARP_AT), tl.load(row + WARP_AT + 3), start_x, count_x, start_y, count_y,
                before, to_row, to_plane, fill_r, fill_g, fill_b, SOURCE_W, RGB, SCALE, BEFORE, ANTIALIAS,
            )  # fmt: skip
        elif NEAREST:
            if KIND == 1:
                left = tl.floor(at_x).to(tl.int32)
                top = tl.floor(at_y).to(tl.int32)
            else:
                left = half_to_even(at_x)
                top = half_to_even(at_y)
            px, framed_x, within_x = tap_axis(left, start_x, count_x, before, 0, ZEROS, BEFORE)
            py, framed_y, within_y = tap_axis(top, start_y, count_y, before, 1, ZEROS, BEFORE)
            offset = (py * source_h + px * SOURCE_W).to(tl.uint32)
            framed = framed_x & framed_y
            within = within_x & within_y
            r = read(pointer, offset, framed, within, fill_r, SCALE, ZEROS, BEFORE)
            g = read(green, offset, framed, within, fill_g, SCALE, ZEROS, BEFORE) if RGB else r
            b = read(blue, offset, framed, within, fill_b, SCALE, ZEROS, BEFORE) if RGB else r
        elif PAIRS:
            left, right = paired(at_x, start_x, count_x, HALF_PIXEL)
            top, lower = paired(at_y, start_y, count_y, HALF_PIXEL)
            # Without a sign, so that adding one to a pointer extends nothing.
            at = ((start_y + top) * to_row + (start_x + left) * SOURCE_W).to(tl.uint32)
            r = between(pointer, at, right, lower, to_row, SOURCE_W, SCALE)
            g = between(green, at, right, lower, to_row, SOURCE_W, SCALE) if RGB else r
            b = between(blue, at, right, lower, to_row, SOURCE_W, SCALE) if RGB else r
        else:
            floor_x = tl.floor(at_x)
            floor_y = tl.floor(at_y)
            right = at_x - floor_x
            lower = at_y - floor_y
            left = floor_x.to(tl.int32)
            top = floor_y.to(tl.int32)
            x0, framed_x0, within_x0 = tap_axis(left, start_x, count_x, before, 0, ZEROS, BEFORE)
            x1, framed_x1, within_x1 = tap_axis(left + 1, start_x, count_x, before, 0, ZEROS, BEFORE)
            y0, framed_y0, within_y0 = tap_axis(top, start_y, count_y, before, 1, ZEROS, BEFORE)
            y1, framed_y1, within_y1 = tap_axis(top + 1, start_y, count_y, before, 1, ZEROS, BEFORE)
            x0 *= SOURCE_W
            x1 *= SOURCE_W
            y0 *= source_h
            y1 *= source_h
            o00 = (y0 + x0).to(tl.uint32)
            o10 = (y0 + x1).to(tl.uint32)
            o01 = (y1 + x0).to(tl.uint32)
            o11 = (y1 + x1).to(tl.uint32)
            f00 = framed_x0 & framed_y0
            f10 = framed_x1 & framed_y0
            f01 = framed_x0 & framed_y1
            f11 = framed_x1 & framed_y1
            w00 = within_x0 & within_y0
            w10 = within_x1 & within_y0
            w01 = within_x0 & within_y1
            w11 = within_x1 & within_y1
            r = blended(
                pointer, o00, o10, o01, o11, f00, f10, f01, f11, w00, w10, w01, w11, right, lower, fill_r,
                SCALE, ZEROS, BEFORE,
            )  # fmt: skip
            g = r
            b = r
            if RGB:
                g = blended(
                    green, o00, o10, o01, o11, f00, f10, f01, f11, w00, w10, w01, w11, right, lower, fill_g,
                    SCALE, ZEROS, BEFORE,
                )  # fmt: skip
                b = blended(
                    blue, o00, o10, o01, o11, f00, f10, f01, f11, w00, w10, w01, w11, right, lower, fill_b,
                    SCALE, ZEROS, BEFORE,
                )  # fmt: skip
    if SCALE:
        if EXACT:
            # A sample that is skipped has to come out as it went in.
            r, g, b = byte_share(r), byte_share(g), byte_share(b)
        else:
            r, g, b = r * (1 / 255), g * (1 / 255), b * (1 / 255)
    if FILLS:
        share = share_inside(at_x, count_x, NEAREST) * share_inside(at_y, count_y, NEAREST)
        r = filled(r, share, tl.load(row + WARP_FILL + first_channel))
        g = filled(g, share, tl.load(row + WARP_FILL + first_channel + second))
        b = filled(b, share, tl.load(row + WARP_FILL + first_channel + third))
    if KIND == 0 and BEFORE == 2:
        r, g, b = tl.where(within, r, fill_r), tl.where(within, g, fill_g), tl.where(within, b, fill_b)
    if AFTER == 2:
        inside = inside_x & inside_y
        r = tl.where(inside, r, tl.load(row + AFTER_FILL + first_channel))
        g = tl.where(inside, g, tl.load(row + AFTER_FILL + first_channel + second))
        b = tl.where(inside, b, tl.load(row + AFTER_FILL + first_channel + third))
    return r, g, b


# Were it known how the places to keep pixels at are aligned, a thread would get several of a row, and taps would be far apart.
@triton.jit(
    do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=["source", "places", "out", "rows", "partial", "kept"]
)
def gather_kernel(
    source, places, out, rows, partial, kept, images, out_height, out_width, tiles_x, row_stride, tiles, blocks,
    source_b, source_c, source_h, out_b, out_c, out_h,
    RAGGED: tl.constexpr, VIEWS: tl.constexpr,
    SOURCE_C: tl.constexpr, SOURCE_H: tl.constexpr, SOURCE_W: tl.constexpr, PAIRS: tl.constexpr, ANTIALIAS: tl.constexpr,
    WIDTH: tl.constexpr, PIXELS: tl.constexpr, WHOLE: tl.constexpr, OUT_W: tl.constexpr,
    PROGRAM: tl.constexpr, COUNT: tl.constexpr,
    CHANNELS: tl.constexpr, RGB: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr, KIND: tl.constexpr,
    HALF_PIXEL: tl.constexpr, NEAREST: tl.constexpr, ZEROS: tl.constexpr,
    AFTER: tl.constexpr, AFTER_AT: tl.constexpr, AFTER_FILL: tl.constexpr, WARP_AT: tl.constexpr,
    BEFORE: tl.constexpr, BEFORE_AT: tl.constexpr, BEFORE_FILL: tl.constexpr, FILLS: tl.constexpr, WARP_FILL: tl.constexpr,
    REDUCE: tl.constexpr, APPLY_AT: tl.constexpr, KEEP: tl.constexpr, MEAN: tl.constexpr, PARTIALS: tl.constexpr,
    TILE_H: tl.constexpr, TILE_W: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """Make the tiles of a gather pass; with ``REDUCE`` only the sums of grey that its contrast needs.

    With ``KEEP`` the reduction leaves what it gathered, in 16 bits a channel, to ``rest_kernel``. ``SOURCE_C``,
    ``SOURCE_H``, ``WIDTH`` and ``PIXELS`` are strides and sizes that are compiled in, or 0; ``WHOLE``, that tiles cover the
    output with nothing left over.

    With ``VIEWS`` there are more samples than ``images``, and each image is the source of one in every view. ``RAGGED``: 0, all
    images have one size; else each lies where ``places`` says, in planes (1) or with the channels of a pixel together (2).

    Grid: (tiles of an image, samples, planes; one plane where a block makes all three).
    """
    tile = tl.program_id(0)
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample * row_stride
    if WAY >= 0:
        skipped, source, out = buffers(row + WAY, source, source_b, out, out_b, tl.num_programs(1))
        if skipped:
            return
    image = sample
    if VIEWS:
        image = sample % images
    if RAGGED > 0:
        place = places + 3 * image.to(tl.int64)
        width = tl.load(place + 2).to(tl.int32)
        source_h = width * SOURCE_W
        source_c = 1
        if RAGGED == 1:
            source_c = tl.load(place + 1).to(tl.int32) * width
        pointer = source + tl.load(place) + plane * source_c
    else:
        pointer = source + image.to(tl.int64) * source_b + plane * source_c
    if REDUCE and not KEEP:
        if tl.load(row + APPLY_AT) == 0:
            tl.store(partial + sample * tiles + tile, 0.0)  # nothing uses it, but all of it is read
            return
    # A tile has x first. Where the compiler cannot see in which order places follow one another, as with taps, it spreads a
    # warp along the first axis; that has to be a row of the image.
    x = (tile % tiles_x) * TILE_W + tl.arange(0, TILE_W)[:, None]
    y = (tile // tiles_x) * TILE_H + tl.arange(0, TILE_H)[None, :]
    live = (x < out_width) & (y < out_height)
    if WHOLE:
        live = (x == x) & (y == y)
        read_x = x
        read_y = y
    else:
        read_x = tl.minimum(x, out_width - 1)
        read_y = tl.minimum(y, out_height - 1)
    r, g, b = gathered(
        pointer, read_x, read_y, row, source_c, source_h, SOURCE_C, SOURCE_H, SOURCE_W, PAIRS, ANTIALIAS,
        plane, SCALE, EXACT, RGB, CHANNELS, KIND, HALF_PIXEL, NEAREST, ZEROS, AFTER, AFTER_AT, AFTER_FILL, WARP_AT,
        BEFORE, BEFORE_AT, BEFORE_FILL, FILLS, WARP_FILL,
    )  # fmt: skip
    if REDUCE:
        if KEEP:
            across = WIDTH if WIDTH > 0 else out_width
            pixels = PIXELS if PIXELS > 0 else out_height * out_width
            at = kept + sample.to(tl.int64) * (3 * pixels) + (y * across + x).to(tl.uint32)
            tl.store(at, at_rest(r), mask=live)
            tl.store(at + pixels, at_rest(g), mask=live)
            tl.store(at + 2 * pixels, at_rest(b), mask=live)
            if tl.load(row + APPLY_AT) == 0:
                tl.store(partial + sample * tiles + tile, 0.0)
                return
        grey = grey_before_contrast(r, g, b, x, y, sample, plane, out_height, out_width, row, PROGRAM, COUNT, CHANNELS, RGB)
        tl.store(partial + sample * tiles + tile, tl.sum(tl.where(live, grey, 0.0)))
    else:
        mean = 0.0
        if MEAN:
            mean = mean_of(partial, sample, blocks, out_height * out_width, PARTIALS)
        r, g, b = points(r, g, b, x, y, sample, plane, out_height, out_width, row, mean, PROGRAM, COUNT, CHANNELS, RGB)
        pixel = out + sample.to(tl.int64) * out_b + plane * out_c + y * out_h + x * OUT_W
        tl.store(pixel, r.to(out.dtype.element_ty), mask=live)
        if RGB:
            tl.store(pixel + out_c, g.to(out.dtype.element_ty), mask=live)
            tl.store(pixel + 2 * out_c, b.to(out.dtype.element_ty), mask=live)


MASK_TENSORS = ("source", "out", "rows", "owners", "samples")
MASK_SIZES = ("first", "before_fill", "after_fill", "out_height", "out_width", "tiles_x", "row_stride")


@triton.jit(do_not_specialize=[*MASK_SIZES, *STRIDES], do_not_specialize_on_alignment=MASK_TENSORS)
def mask_kernel(
    source, out, rows, owners, samples, first, before_fill, after_fill, out_height, out_width, tiles_x, row_stride,
    source_b, source_c, source_h, out_b, out_c, out_h,
    FLAT: tl.constexpr, SOURCE_W: tl.constexpr, KIND: tl.constexpr, HALF_PIXEL: tl.constexpr, ZEROS: tl.constexpr,
    AFTER: tl.constexpr, AFTER_AT: tl.constexpr, WARP_AT: tl.constexpr, BEFORE: tl.constexpr, BEFORE_AT: tl.constexpr,
    TILE_H: tl.constexpr, TILE_W: tl.constexpr,
):  # fmt: skip
    """The nearest pixel of a mask, its bits unread.

    With ``FLAT`` masks have sizes of their own, and lie where their ``owners`` and the ``samples`` of these say, counted from
    ``source``: see ``MaskPlaces``.

    Grid: (tiles of an image, masks from the ``first`` of this launch on, planes).
    """
    tile = tl.program_id(0)
    mask = first + tl.program_id(1)
    plane = tl.program_id(2)
    sample = tl.load(owners + mask) if FLAT else mask
    place = samples + sample * 3
    row = rows + sample * row_stride
    before = row + BEFORE_AT
    target_x = (tile % tiles_x) * TILE_W + tl.arange(0, TILE_W)[:, None]
    target_y = (tile // tiles_x) * TILE_H + tl.arange(0, TILE_H)[None, :]
    live = (target_x < out_width) & (target_y < out_height)
    x = tl.minimum(target_x, out_width - 1)
    y = tl.minimum(target_y, out_height - 1)
    inside_x = x == x
    inside_y = y == y
    if AFTER > 0:
        x, inside_x = mapped(x, row + AFTER_AT, 0, AFTER)
        y, inside_y = mapped(y, row + AFTER_AT, 1, AFTER)
    if KIND == 0:
        framed = (x == x) & (y == y)
        within = framed
        if BEFORE > 0:
            x, within_x = mapped(x, before, 0, BEFORE)
            y, within_y = mapped(y, before, 1, BEFORE)
            within = within_x & within_y
    else:
        at_x, at_y, start_x, count_x, start_y, count_y = located(x, y, row + WARP_AT, KIND, HALF_PIXEL, True)
        if KIND == 1:
            left = tl.floor(at_x).to(tl.int32)
            top = tl.floor(at_y).to(tl.int32)
        else:
            left = half_to_even(at_x)
            top = half_to_even(at_y)
        x, framed_x, within_x = tap_axis(left, start_x, count_x, before, 0, ZEROS, BEFORE)
        y, framed_y, within_y = tap_axis(top, start_y, count_y, before, 1, ZEROS, BEFORE)
        framed = framed_x & framed_y
        within = within_x & within_y
    if FLAT:
        width = tl.load(place + 2)
        pointer = source + tl.load(place) + mask * tl.load(place + 1) * width + y * width + x
    else:
        pointer = source + mask.to(tl.int64) * source_b + plane * source_c + y * source_h + x * SOURCE_W
    value = tl.load(pointer, mask=live & framed, other=0)
    if BEFORE == 2:
        value = tl.where(framed & (within == 0), before_fill.to(value.dtype), value)
    if AFTER == 2:
        value = tl.where(inside_x & inside_y, value, after_fill.to(value.dtype))
    target = out + mask.to(tl.int64) * out_b + plane * out_c + target_y * out_h + target_x
    tl.store(target, value, mask=live)
