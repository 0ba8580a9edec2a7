"""The Triton kernel for gathers of images: one thread block makes a tile of one sample, from reading to storing.

Everything that differs between pipelines is a compile-time constant, everything that differs between batches is not: sizes are
not specialised on, so that the last batch of an epoch, or images of another size, compile nothing.
"""

import triton
import triton.language as tl

from gpuaug.fusion.backends.triton.pixel_math import (
    as_16_bits,
    as_pairs,
    byte_share,
    grey_of,
    share_of_65535,
    stored_as,
    tile_pixels,
    words,
    words_of_16_bits,
)
from gpuaug.fusion.backends.triton.points import points
from gpuaug.fusion.backends.triton.second_pass import mean_of
from gpuaug.fusion.backends.triton.taps import (
    between,
    blended,
    buffers,
    filled,
    half_to_even,
    located,
    mapped,
    paired,
    read,
    resampled,
    share_inside,
    tap_axis,
    weighed_row,
    weight_sum,
    window,
)

SIZES = ("images", "out_height", "out_width", "tiles_x", "row_stride", "tiles", "blocks")
STRIDES = ("source_b", "source_c", "source_h", "out_b", "out_c", "out_h")


@triton.jit
def constant(fill, plane, RGB: tl.constexpr):
    """What padding holds: in three channels from ``fill`` on, or in one and two copies of it."""
    r = tl.load(fill + plane)
    if RGB:
        return r, tl.load(fill + 1), tl.load(fill + 2)
    return r, r, r


@triton.jit
def scaled(r, g, b, SCALE: tl.constexpr, EXACT: tl.constexpr):
    """Numbers up to ``SCALE``, 255 or 65535, as shares of it."""
    if SCALE == 65535:
        return share_of_65535(r * (1 / 65536)), share_of_65535(g * (1 / 65536)), share_of_65535(b * (1 / 65536))
    if EXACT:
        # A sample that is skipped has to come out as it went in.
        return byte_share(r), byte_share(g), byte_share(b)
    return r * (1 / 255), g * (1 / 255), b * (1 / 255)


@triton.jit
def padded(r, g, b, inside, fill, plane, RGB: tl.constexpr):
    """Pixels, or what padding holds where they are not ``inside``."""
    fill_r, fill_g, fill_b = constant(fill, plane, RGB)
    return tl.where(inside, r, fill_r), tl.where(inside, g, fill_g), tl.where(inside, b, fill_b)


@triton.jit
def gathered(
    pointer, x, y, row, to_plane, to_row, plane, fill_r, fill_g, fill_b, SOURCE_W: tl.constexpr, PAIRS: tl.constexpr,
    SCALE: tl.constexpr, EXACT: tl.constexpr, RGB: tl.constexpr, KIND: tl.constexpr,
    HALF_PIXEL: tl.constexpr, NEAREST: tl.constexpr, ZEROS: tl.constexpr, WARP_AT: tl.constexpr, WARP_FILL: tl.constexpr,
    BEFORE: tl.constexpr,
):  # fmt: skip
    """The pixels of a tile: three channels, or one and two copies of it."""
    before = row + BEFORE[1]
    within = x == x
    green = pointer + to_plane
    blue = green + to_plane
    if KIND == 0:
        within_x = x == x
        within_y = y == y
        if BEFORE[0] > 0:
            x, within_x = mapped(x, before, 0, BEFORE[0])
            y, within_y = mapped(y, before, 1, BEFORE[0])
        offset = (y * to_row + x * SOURCE_W).to(tl.uint32)
        within = within_x & within_y
        r = read(pointer, offset, within, within, fill_r, SCALE, False, BEFORE[0])
        g = read(green, offset, within, within, fill_g, SCALE, False, BEFORE[0]) if RGB else r
        b = read(blue, offset, within, within, fill_b, SCALE, False, BEFORE[0]) if RGB else r
    else:
        at_x, at_y, start_x, count_x, start_y, count_y = located(x, y, row + WARP_AT, KIND, HALF_PIXEL, NEAREST)
        if NEAREST:
            if KIND == 1:
                left = tl.floor(at_x).to(tl.int32)
                top = tl.floor(at_y).to(tl.int32)
            else:
                left = half_to_even(at_x)
                top = half_to_even(at_y)
            px, framed_x, within_x = tap_axis(left, start_x, count_x, before, 0, ZEROS, BEFORE[0])
            py, framed_y, within_y = tap_axis(top, start_y, count_y, before, 1, ZEROS, BEFORE[0])
            offset = (py * to_row + px * SOURCE_W).to(tl.uint32)
            framed = framed_x & framed_y
            within = within_x & within_y
            r = read(pointer, offset, framed, within, fill_r, SCALE, ZEROS, BEFORE[0])
            g = read(green, offset, framed, within, fill_g, SCALE, ZEROS, BEFORE[0]) if RGB else r
            b = read(blue, offset, framed, within, fill_b, SCALE, ZEROS, BEFORE[0]) if RGB else r
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
            x0, framed_x0, within_x0 = tap_axis(left, start_x, count_x, before, 0, ZEROS, BEFORE[0])
            x1, framed_x1, within_x1 = tap_axis(left + 1, start_x, count_x, before, 0, ZEROS, BEFORE[0])
            y0, framed_y0, within_y0 = tap_axis(top, start_y, count_y, before, 1, ZEROS, BEFORE[0])
            y1, framed_y1, within_y1 = tap_axis(top + 1, start_y, count_y, before, 1, ZEROS, BEFORE[0])
            x0 *= SOURCE_W
            x1 *= SOURCE_W
            y0 *= to_row
            y1 *= to_row
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
                SCALE, ZEROS, BEFORE[0],
            )  # fmt: skip
            g = r
            b = r
            if RGB:
                g = blended(
                    green, o00, o10, o01, o11, f00, f10, f01, f11, w00, w10, w01, w11, right, lower, fill_g,
                    SCALE, ZEROS, BEFORE[0],
                )  # fmt: skip
                b = blended(
                    blue, o00, o10, o01, o11, f00, f10, f01, f11, w00, w10, w01, w11, right, lower, fill_b,
                    SCALE, ZEROS, BEFORE[0],
                )  # fmt: skip
    if SCALE:
        r, g, b = scaled(r, g, b, SCALE, EXACT)
    if WARP_FILL >= 0:
        share = share_inside(at_x, count_x, NEAREST) * share_inside(at_y, count_y, NEAREST)
        warp_r, warp_g, warp_b = constant(row + WARP_FILL, plane, RGB)
        r, g, b = filled(r, share, warp_r), filled(g, share, warp_g), filled(b, share, warp_b)
    if KIND == 0 and BEFORE[0] == 2:
        r, g, b = tl.where(within, r, fill_r), tl.where(within, g, fill_g), tl.where(within, b, fill_b)
    return r, g, b


@triton.jit
def finished(
    r, g, b, left, top, x, y, sample, plane, height, width, row, mean, kept, out, out_c, out_h,
    PROGRAM: tl.constexpr, COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr,
    REDUCE: tl.constexpr, KEEP: tl.constexpr, WIDTH: tl.constexpr, PIXELS: tl.constexpr, WHOLE: tl.constexpr,
    WORDS: tl.constexpr, OUT_W: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
):  # fmt: skip
    """Run the pointwise ops on the pixels of a tile, which begins at ``left`` and ``top``, and store them.

    With ``REDUCE`` the program ends before the contrast: return the grey of each pixel, and with ``KEEP`` store the pixels.
    ``WORDS``: pixels are ``PAIRED``, and stored in words of 32 bits, of kept ones two of a channel, of others three a pair.
    """
    live = (x < width) & (y < height)
    if WHOLE:
        live = x == x
    r, g, b = points(r, g, b, x, y, sample, plane, height, width, row, mean, PROGRAM, COUNT, CHANNELS, RGB)
    grey = tl.zeros(live.shape, tl.float32)
    if REDUCE:
        # The last op is the jitter, whose flags say how greys are weighed.
        grey = tl.where(live, grey_of(r, g, b, PROGRAM[COUNT - 1][2]) if RGB else r, 0.0)
        if KEEP:
            line = WIDTH if WIDTH > 0 else width
            pixels = PIXELS if PIXELS > 0 else height * width
            if WORDS:  # from here on in pairs
                x, y = tile_pixels(left // 2, top, TILE_H, TILE_W // 2, False)
                live = (x == x) if WHOLE else (2 * x < width) & (y < height)
                line = line // 2
                pixels = pixels // 2
                kept = kept.to(tl.pointer_type(tl.int32))
                r, g, b = words_of_16_bits(r), words_of_16_bits(g), words_of_16_bits(b)
            else:
                r, g, b = as_16_bits(r), as_16_bits(g), as_16_bits(b)
            at = kept + (y * line + x).to(tl.uint32)
            tl.store(at, r, mask=live)
            tl.store(at + pixels, g, mask=live)
            tl.store(at + 2 * pixels, b, mask=live)
    elif WORDS:
        filled = words(as_pairs(r), as_pairs(g), as_pairs(b), out.dtype.element_ty)
        # Three words a pair, and a fourth that is not stored, so that neighbouring threads store neighbouring words.
        place, line = tile_pixels(left // 2 * 4, top, TILE_H, TILE_W * 2, False)
        to = place // 4 * 3 + place % 4
        inside = place % 4 < 3
        if not WHOLE:
            inside = inside & (place < width * 2) & (line < height)
        target = out.to(tl.pointer_type(tl.int32)) + line * (out_h // 2) + to
        tl.store(target, tl.ravel(filled), mask=inside)
    else:
        pixel = out + y * out_h + x * OUT_W
        tl.store(pixel, stored_as(r, out.dtype.element_ty), mask=live)
        if RGB:
            tl.store(pixel + out_c, stored_as(g, out.dtype.element_ty), mask=live)
            tl.store(pixel + 2 * out_c, stored_as(b, out.dtype.element_ty), mask=live)
    return grey


# Were it known how the places to keep pixels at are aligned, a thread would get several of a row, and taps would be far apart.
@triton.jit(
    do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=["source", "places", "out", "rows", "partial", "kept"]
)
def gather_kernel(
    source, places, out, rows, partial, kept, images, out_height, out_width, tiles_x, row_stride, tiles, blocks,
    source_b, source_c, source_h, out_b, out_c, out_h,
    RAGGED: tl.constexpr, REPEATS: tl.constexpr,
    SOURCE: tl.constexpr, SOURCE_W: tl.constexpr, PAIRS: tl.constexpr, ANTIALIAS: tl.constexpr,
    WIDTH: tl.constexpr, PIXELS: tl.constexpr, WHOLE: tl.constexpr, WORDS: tl.constexpr, OUT_W: tl.constexpr,
    PROGRAM: tl.constexpr, COUNT: tl.constexpr,
    CHANNELS: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr, SIDES: tl.constexpr, KIND: tl.constexpr,
    HALF_PIXEL: tl.constexpr, NEAREST: tl.constexpr, ZEROS: tl.constexpr,
    AFTER: tl.constexpr, WARP_AT: tl.constexpr, WARP_FILL: tl.constexpr, BEFORE: tl.constexpr, TILE: tl.constexpr,
    REDUCE: tl.constexpr, KEEP: tl.constexpr, PARTIALS: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """Make the tiles of a gather pass; with ``REDUCE``, the column of a contrast's apply mask, only the sums of grey for it.

    With ``KEEP`` the reduction leaves the pixels that the contrast works on to ``rest_kernel``, in 16 bits a channel.
    ``SOURCE`` (of channels, of rows), ``WIDTH`` and ``PIXELS`` are strides and sizes that are compiled in, or 0; ``WHOLE``,
    that tiles of ``TILE`` (height, width) cover the output with nothing left over. ``SCALE``: 255 for a source of bytes, 65535
    for 16 bits a value, 0 for floats. ``BEFORE`` and ``AFTER``: how pixels are mapped before and after a resampling, (edge mode
    or 0, first column, column of the fill). ``WARP_FILL``: column of a warp's fill, or -1. ``PARTIALS``: sums to add, or 0.

    With ``ANTIALIAS`` a block is one warp and makes its rows one after another, so that each line is weighed once for all rows.
    It is (filter or 0, largest value of the source, to which weighed values are clamped, or 0 for no clamp).

    ``REPEATS``: whether there are more samples than ``images``, each of which is the source of one in every view; how many
    samples, the frames of a clip, a row of the table serves; the first of the columns that choose the frames, or -1, and of how
    many. ``RAGGED``: 0, all images have one size; else each lies where
    ``places`` says, in planes (1) or with the channels of a pixel together (2), or so with its window alone (3). ``SIDES``:
    column of height and width of the output image, where images differ in size behind the pass and lie at the top left of
    (``out_height``, ``out_width``); or -1.

    The sums of a sample's blocks lie together, those of its planes behind one another: ``blocks`` of them.

    Grid: (tiles of an image, samples, planes; one plane where a block makes all three).
    """
    RGB: tl.constexpr = CHANNELS == 3
    tile = tl.program_id(0)
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample // REPEATS[1] * row_stride
    if WAY >= 0:
        skipped, source, out = buffers(row + WAY, source, source_b, out, out_b, tl.num_programs(1))
        if skipped:
            return
    image = sample
    if REPEATS[2] >= 0:
        image = sample // REPEATS[1] * REPEATS[3] + tl.load(row + REPEATS[2] + sample % REPEATS[1]).to(tl.int32)
    if REPEATS[0]:
        image = image % images
    if RAGGED > 0:
        place = places + (4 if RAGGED == 3 else 3) * image.to(tl.int64)
        line = tl.load(place + (3 if RAGGED == 3 else 2)).to(tl.int32)
        source_h = line * SOURCE_W
        source_c = 1
        if RAGGED == 1:
            source_c = tl.load(place + 1).to(tl.int32) * line
        pointer = source + tl.load(place) + plane * source_c
    else:
        pointer = source + image.to(tl.int64) * source_b + plane * source_c
    # What is compiled in is part of the instruction that reads, which saves additions of 64 bits.
    to_plane = SOURCE[0] if SOURCE[0] > 0 else source_c
    to_row = SOURCE[1] if SOURCE[1] > 0 else source_h
    fill_r = 0.0
    fill_g = 0.0
    fill_b = 0.0
    if BEFORE[0] == 2:
        fill_r, fill_g, fill_b = constant(row + BEFORE[2], plane, RGB)
        if SCALE and KIND > 0:
            fill_r, fill_g, fill_b = fill_r * SCALE, fill_g * SCALE, fill_b * SCALE
    SUMS: tl.constexpr = REDUCE >= 0
    if SUMS and not KEEP:
        if tl.load(row + REDUCE) == 0:
            tl.store(partial + sample * blocks + plane * tiles + tile, 0.0)  # nothing uses it, but all of it is read
            return
    height = out_height
    width = out_width
    if SIDES >= 0:
        height = tl.load(row + SIDES).to(tl.int32)
        width = tl.load(row + SIDES + 1).to(tl.int32)
    mean = 0.0
    if PARTIALS > 0:
        mean = mean_of(partial, sample, blocks, height * width * (1 if RGB else CHANNELS), PARTIALS)
    if KEEP:
        kept += sample.to(tl.int64) * (3 * (PIXELS if PIXELS > 0 else out_height * out_width))
    out += sample.to(tl.int64) * out_b + plane * out_c
    first = (tile // tiles_x) * TILE[0]
    left = (tile % tiles_x) * TILE[1]
    if SIDES >= 0:
        if (left >= width) | (first >= height):
            if SUMS:
                tl.store(partial + sample * blocks + plane * tiles + tile, 0.0)
            return
    x, y = tile_pixels(left, first, TILE[0] if ANTIALIAS[0] == 0 else 1, TILE[1], WORDS)
    read_x = x if WHOLE else tl.minimum(x, width - 1)
    inside_x = x == x
    if AFTER[0] > 0:
        read_x, inside_x = mapped(read_x, row + AFTER[1], 0, AFTER[0])
    if ANTIALIAS[0] == 0:
        read_y = y if WHOLE else tl.minimum(y, height - 1)
        inside_y = y == y
        if AFTER[0] > 0:
            read_y, inside_y = mapped(read_y, row + AFTER[1], 1, AFTER[0])
        r, g, b = gathered(
            pointer, read_x, read_y, row, to_plane, to_row, plane, fill_r, fill_g, fill_b, SOURCE_W, PAIRS,
            SCALE, EXACT, RGB, KIND, HALF_PIXEL, NEAREST, ZEROS, WARP_AT, WARP_FILL, BEFORE,
        )  # fmt: skip
        if AFTER[0] == 2:
            r, g, b = padded(r, g, b, inside_x & inside_y, row + AFTER[2], plane, RGB)
        total = finished(
            r, g, b, left, first, x, y, sample, plane, height, width, row, mean, kept, out, out_c, out_h,
            PROGRAM, COUNT, CHANNELS, RGB, SUMS, KEEP, WIDTH, PIXELS, WHOLE, WORDS, OUT_W, TILE[0], TILE[1],
        )  # fmt: skip
    else:
        end = tl.minimum(first + TILE[0], height)
        scale_x, start_x, count_x = window(row + WARP_AT)
        at_x = resampled(read_x, scale_x, HALF_PIXEL, False)
        columns = at_x, scale_x, start_x, count_x, tl.div_rn(1.0, weight_sum(at_x, scale_x, count_x, ANTIALIAS[0]))
        lines = window(row + WARP_AT + 3)
        none = at_x * 0.0
        total = none
        state = (-1, 0, 0.0, none, none, none)
        while first < end:
            y = first
            inside_y = y == y
            if AFTER[0] > 0:
                y, inside_y = mapped(y, row + AFTER[1], 1, AFTER[0])
            r, g, b, state = weighed_row(
                pointer, y, state, columns, lines, row + BEFORE[1], to_row, to_plane, fill_r, fill_g, fill_b,
                HALF_PIXEL, SOURCE_W, RGB, SCALE, BEFORE[0], ANTIALIAS[0], ANTIALIAS[1],
            )  # fmt: skip
            if SCALE:
                r, g, b = scaled(r, g, b, SCALE, EXACT)
            if AFTER[0] == 2:
                r, g, b = padded(r, g, b, (inside_x & inside_y) != 0, row + AFTER[2], plane, RGB)
            y = first + tl.zeros(x.shape, tl.int32)
            total += finished(
                r, g, b, left, first, x, y, sample, plane, height, width, row, mean, kept, out, out_c, out_h,
                PROGRAM, COUNT, CHANNELS, RGB, SUMS, KEEP, WIDTH, PIXELS, WHOLE, WORDS, OUT_W, 1, TILE[1],
            )  # fmt: skip
            first += 1
    if SUMS:
        tl.store(partial + sample * blocks + plane * tiles + tile, tl.sum(total))
