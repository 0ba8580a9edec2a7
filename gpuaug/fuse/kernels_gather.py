"""Triton kernels for gathers: one thread block makes a tile of one sample, from reading to storing.

Everything that differs between pipelines is a compile-time constant, everything that differs between batches is not: sizes are
not specialised on, so that the last batch of an epoch, or images of another size, compile nothing.
"""

import triton
import triton.language as tl

from gpuaug.fuse.kernels_points import CLEAN, COMPILED, grey_before_contrast, points, unit_sum

SIZES = ("source_height", "source_width", "out_height", "out_width", "tiles_x", "row_stride", "tiles", "blocks")
STRIDES = ("source_b", "source_c", "source_h", "out_b", "out_c", "out_h")


@triton.jit
def edged(index, low, high, EDGE: tl.constexpr):
    """An index brought back into [low, high): by reflection (3), or to the border."""
    if EDGE == 3:
        index = low + tl.abs(index - low)
        index = high - 1 - tl.abs(high - 1 - index)
    return tl.minimum(tl.maximum(index, low), high - 1)


@triton.jit
def mapped(index, row, AXIS: tl.constexpr, MAP: tl.constexpr):
    """An index through one axis of a map: the index before it, and whether it is inside.

    ``MAP``: 1, nothing is outside; 2, a constant is; 3, a reflection; 4, the border.
    """
    sign = tl.load(row + 2 * AXIS).to(tl.int32)
    offset = tl.load(row + 2 * AXIS + 1).to(tl.int32)
    index = sign * index + offset
    inside = index == index
    if MAP >= 2:
        low = tl.load(row + 4 + 2 * AXIS).to(tl.int32)
        high = tl.load(row + 5 + 2 * AXIS).to(tl.int32)
        if MAP == 2:
            inside = (index >= low) & (index < high)
            index = tl.minimum(tl.maximum(index, low), high - 1)
        else:
            index = edged(index, low, high, MAP)
    return index, inside


@triton.jit
def tap_axis(index, start, count, row, AXIS: tl.constexpr, ZEROS: tl.constexpr, BEFORE: tl.constexpr):
    """A tap's index in the source along one axis, whether it is in the frame, and whether it is not padding."""
    framed = index == index
    if ZEROS:
        framed = (index >= 0) & (index < count)
    index = start + tl.minimum(tl.maximum(index, 0), count - 1)
    within = framed
    if BEFORE > 0:
        index, within = mapped(index, row, AXIS, BEFORE)
    return index, framed, within


@triton.jit
def as_float(value, SCALE: tl.constexpr):
    """Float32 of a pixel."""
    if SCALE and COMPILED:
        # From 32 bits, at four times the speed that a GPU converts bytes at, which the compiler would choose.
        return tl.inline_asm_elementwise("cvt.rn.f32.s32 $0, $1;", "=f,r", [value.to(tl.int32)], tl.float32, True, 1)
    return value.to(tl.float32)


@triton.jit
def byte_share(value):
    """A byte's value / 255, correctly rounded: a product, and one step of Newton's in fused arithmetic."""
    share = value * (1 / 255)
    return tl.fma(tl.fma(share, -255.0, value), 1 / 255, share)


@triton.jit
def read(pointer, offset, framed, within, fill, SCALE: tl.constexpr, ZEROS: tl.constexpr, BEFORE: tl.constexpr):
    """One channel at one tap; where padding is a constant, that."""
    if BEFORE == 2:
        value = as_float(tl.load(pointer + offset, mask=framed & within, other=0), SCALE)
        return tl.where(framed & (within == 0), fill, value)
    if ZEROS:
        return as_float(tl.load(pointer + offset, mask=framed, other=0), SCALE)
    return as_float(tl.load(pointer + offset), SCALE)


@triton.jit
def located(x, y, row, KIND: tl.constexpr, HALF: tl.constexpr, NEAREST: tl.constexpr):
    """Where output pixels lie in the interpolation's input, and the window that its taps are taken from."""
    if KIND == 1:
        at_x = x.to(tl.float32)
        at_y = y.to(tl.float32)
        scale_x = tl.load(row)
        scale_y = tl.load(row + 3)
        if HALF:
            at_x = (at_x + 0.5) * scale_x
            at_y = (at_y + 0.5) * scale_y
            if not NEAREST:
                at_x -= 0.5
                at_y -= 0.5
        else:
            at_x = at_x * scale_x
            at_y = at_y * scale_y
        start_x = tl.load(row + 1).to(tl.int32)
        count_x = tl.load(row + 2).to(tl.int32)
        start_y = tl.load(row + 4).to(tl.int32)
        count_y = tl.load(row + 5).to(tl.int32)
    else:
        fx = x.to(tl.float32)
        fy = y.to(tl.float32)
        at_x = tl.load(row) * fx + (tl.load(row + 1) * fy + tl.load(row + 2))
        at_y = tl.load(row + 3) * fx + (tl.load(row + 4) * fy + tl.load(row + 5))
        sizes = row + 6
        if KIND == 3:
            depth = tl.load(row + 6) * fx + (tl.load(row + 7) * fy + tl.load(row + 8))
            at_x = tl.div_rn(at_x, depth)
            at_y = tl.div_rn(at_y, depth)
            sizes = row + 9
        # Far outside is outside; a float beyond the whole numbers would not convert to one.
        far = 1048576.0
        at_x = tl.minimum(tl.maximum(tl.where(at_x == at_x, at_x, -far), -far), far)
        at_y = tl.minimum(tl.maximum(tl.where(at_y == at_y, at_y, -far), -far), far)
        start_x = 0
        start_y = 0
        count_x = tl.load(sizes).to(tl.int32)
        count_y = tl.load(sizes + 1).to(tl.int32)
    return at_x, at_y, start_x, count_x, start_y, count_y


@triton.jit
def paired(at, start, count, HALF: tl.constexpr):
    """The first of two neighbours that a place lies between, and the share of the second.

    Two neighbours take one address for both. So at the end of the window they are its last two, and where it is one pixel wide
    that and another, with no share.
    """
    if HALF:
        at = tl.minimum(tl.maximum(at, 0.0), (count - 1).to(tl.float32))
    last = tl.maximum(count - 2, -start)
    first = tl.maximum(tl.minimum(tl.floor(at).to(tl.int32), last), tl.minimum(last, 0))
    # Clamped, since the last place may be rounded to one beyond the window.
    return first, unit_sum(at, 1.0, -first.to(tl.float32), CLEAN)


@triton.jit
def half_to_even(at):
    """The nearest whole number, halves to the even one, as ``grid_sample`` rounds."""
    down = tl.floor(at)
    part = at - down
    odd = (down.to(tl.int32) & 1) != 0
    up = (part > 0.5) | ((part == 0.5) & odd)
    return down.to(tl.int32) + up.to(tl.int32)


@triton.jit
def gathered(
    pointer, x, y, row, source_c, source_h, SOURCE_C: tl.constexpr, SOURCE_H: tl.constexpr, SOURCE_W: tl.constexpr,
    PAIRS: tl.constexpr, first_channel,
    SCALE: tl.constexpr, RGB: tl.constexpr, CHANNELS: tl.constexpr, KIND: tl.constexpr, HALF: tl.constexpr,
    NEAREST: tl.constexpr, ZEROS: tl.constexpr, AFTER: tl.constexpr, AFTER_AT: tl.constexpr, AFTER_FILL: tl.constexpr,
    WARP_AT: tl.constexpr, BEFORE: tl.constexpr, BEFORE_AT: tl.constexpr, BEFORE_FILL: tl.constexpr,
    source_height, source_width,
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
        at_x, at_y, start_x, count_x, start_y, count_y = located(x, y, row + WARP_AT, KIND, HALF, NEAREST)
        if NEAREST:
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
            left, right = paired(at_x, start_x, count_x, HALF)
            top, lower = paired(at_y, start_y, count_y, HALF)
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
        if KIND == 1 and not NEAREST:
            r, g, b = r * (1 / 255), g * (1 / 255), b * (1 / 255)
        else:
            # Exactly: a sample that is skipped has to come out as it went in.
            r, g, b = byte_share(r), byte_share(g), byte_share(b)
    if KIND == 0 and BEFORE == 2:
        r, g, b = tl.where(within, r, fill_r), tl.where(within, g, fill_g), tl.where(within, b, fill_b)
    if AFTER == 2:
        inside = inside_x & inside_y
        r = tl.where(inside, r, tl.load(row + AFTER_FILL + first_channel))
        g = tl.where(inside, g, tl.load(row + AFTER_FILL + first_channel + second))
        b = tl.where(inside, b, tl.load(row + AFTER_FILL + first_channel + third))
    return r, g, b


@triton.jit
def blended(
    pointer, o00, o10, o01, o11, f00, f10, f01, f11, w00, w10, w01, w11, right, lower, fill,
    SCALE: tl.constexpr, ZEROS: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """One channel, bilinearly."""
    v00 = read(pointer, o00, f00, w00, fill, SCALE, ZEROS, BEFORE)
    v10 = read(pointer, o10, f10, w10, fill, SCALE, ZEROS, BEFORE)
    v01 = read(pointer, o01, f01, w01, fill, SCALE, ZEROS, BEFORE)
    v11 = read(pointer, o11, f11, w11, fill, SCALE, ZEROS, BEFORE)
    upper = v00 + right * (v10 - v00)
    below = v01 + right * (v11 - v01)
    return upper + lower * (below - upper)


@triton.jit
def between(pointer, at, right, lower, to_row, SOURCE_W: tl.constexpr, SCALE: tl.constexpr):
    """One channel between four neighbours, of which ``at`` is the first."""
    v00 = as_float(tl.load(pointer + at), SCALE)
    v10 = as_float(tl.load(pointer + SOURCE_W + at), SCALE)
    v01 = as_float(tl.load(pointer + to_row + at), SCALE)
    v11 = as_float(tl.load(pointer + to_row + SOURCE_W + at), SCALE)
    upper = v00 + right * (v10 - v00)
    below = v01 + right * (v11 - v01)
    return upper + lower * (below - upper)


@triton.jit
def at_rest(value):
    """A number in [0, 1] in 16 bits, the nearest: a byte's share of 255 exactly."""
    # Above 2²³ a float's last bits are a whole number.
    return (value * 65535.0 + 8388608.0).to(tl.int32, bitcast=True).to(tl.uint16)


@triton.jit
def rested(bits):
    """What :func:`at_rest` made of a number, as a number."""
    value = (bits.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    if COMPILED:
        # The same to the last bit, since 2²³ / 65535 is as exact as 1 / 65535: a product of both, and one rounding.
        return tl.fma(value, 1 / 65535, -8388608 / 65535)
    return (value - 8388608.0) * (1 / 65535)


@triton.jit
def mean_of(partial, sample, blocks, pixels, PARTIALS: tl.constexpr):
    """The mean grey of a sample, from the sums of its blocks."""
    at = tl.arange(0, PARTIALS)
    return tl.sum(tl.load(partial + sample * blocks + at, mask=at < blocks, other=0.0)) / pixels


# Were it known how the places to keep pixels at are aligned, a thread would get several of a row, and taps would be far apart.
@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=["source", "out", "rows", "partial", "kept"])
def gather_kernel(
    source, out, rows, partial, kept, source_height, source_width, out_height, out_width, tiles_x, row_stride, tiles, blocks,
    source_b, source_c, source_h, out_b, out_c, out_h,
    SOURCE_C: tl.constexpr, SOURCE_H: tl.constexpr, SOURCE_W: tl.constexpr, PAIRS: tl.constexpr,
    WIDTH: tl.constexpr, PIXELS: tl.constexpr, WHOLE: tl.constexpr, OUT_W: tl.constexpr,
    PROGRAM: tl.constexpr, COUNT: tl.constexpr,
    CHANNELS: tl.constexpr, RGB: tl.constexpr, SCALE: tl.constexpr, KIND: tl.constexpr, HALF: tl.constexpr,
    NEAREST: tl.constexpr, ZEROS: tl.constexpr,
    AFTER: tl.constexpr, AFTER_AT: tl.constexpr, AFTER_FILL: tl.constexpr, WARP_AT: tl.constexpr,
    BEFORE: tl.constexpr, BEFORE_AT: tl.constexpr, BEFORE_FILL: tl.constexpr,
    REDUCE: tl.constexpr, GATE_AT: tl.constexpr, KEEP: tl.constexpr, MEAN: tl.constexpr, PARTIALS: tl.constexpr,
    TILE_H: tl.constexpr, TILE_W: tl.constexpr,
):  # fmt: skip
    """Make the tiles of a gather pass; with ``REDUCE`` only the sums of grey that its contrast needs.

    With ``KEEP`` the reduction leaves what it gathered, in 16 bits a channel, to :func:`rest_kernel`. ``SOURCE_C``,
    ``SOURCE_H``, ``WIDTH`` and ``PIXELS`` are strides and sizes that are compiled in, or 0; ``WHOLE``, that tiles cover the
    output with nothing left over.

    Grid: (tiles of an image, samples, planes; one plane where a block makes all three).
    """
    tile = tl.program_id(0)
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample * row_stride
    if REDUCE and not KEEP:
        if tl.load(row + GATE_AT) == 0:
            return
    # A tile has x first. Where the compiler cannot see in which order places follow one another, as with taps, it spreads a
    # warp along the first axis; that has to be a row of the image.
    x = (tile % tiles_x) * TILE_W + tl.arange(0, TILE_W)[:, None]
    y = (tile // tiles_x) * TILE_H + tl.arange(0, TILE_H)[None, :]
    pointer = source + sample.to(tl.int64) * source_b + plane * source_c
    live = (x < out_width) & (y < out_height)
    if WHOLE:
        live = (x == x) & (y == y)
        read_x = x
        read_y = y
    else:
        read_x = tl.minimum(x, out_width - 1)
        read_y = tl.minimum(y, out_height - 1)
    r, g, b = gathered(
        pointer, read_x, read_y, row, source_c, source_h, SOURCE_C, SOURCE_H, SOURCE_W, PAIRS,
        plane, SCALE, RGB, CHANNELS, KIND, HALF, NEAREST, ZEROS, AFTER, AFTER_AT, AFTER_FILL, WARP_AT,
        BEFORE, BEFORE_AT, BEFORE_FILL, source_height, source_width,
    )  # fmt: skip
    if REDUCE:
        if KEEP:
            width = WIDTH if WIDTH > 0 else out_width
            pixels = PIXELS if PIXELS > 0 else out_height * out_width
            at = kept + sample.to(tl.int64) * (3 * pixels) + (y * width + x).to(tl.uint32)
            tl.store(at, at_rest(r), mask=live)
            tl.store(at + pixels, at_rest(g), mask=live)
            tl.store(at + 2 * pixels, at_rest(b), mask=live)
            if tl.load(row + GATE_AT) == 0:
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


@triton.jit
def word(low, high, KIND: tl.constexpr):
    """Two numbers of 16 bits in one of 32, rounded to their type."""
    if COMPILED:
        # One instruction for both; each by itself is converted at an eighth of its speed.
        asm: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if tl.bfloat16 == KIND else "cvt.rn.f16x2.f32 $0, $2, $1;"
        return tl.inline_asm_elementwise(asm, "=r,f,f", [low, high], tl.int32, True, 1)
    low = low.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit(
    do_not_specialize=["row_stride", "blocks", "height", "width", "out_b", "out_c"],
    do_not_specialize_on_alignment=["rows", "partial"],
)
def rest_kernel(
    kept, out, rows, partial, height, width, row_stride, blocks, out_b, out_c,
    PIXELS: tl.constexpr, WHOLE: tl.constexpr, WORDS: tl.constexpr, OUT_W: tl.constexpr,
    PROGRAM: tl.constexpr, COUNT: tl.constexpr, PARTIALS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The pointwise ops on what :func:`gather_kernel` kept, with the mean of its sums.

    The result lies as it was kept, pixel after pixel, with planes apart (``OUT_W`` is 1) or together. ``PIXELS``: how many an
    image has where that is compiled in, else 0; ``WHOLE``, that blocks cover them with none left over; ``WORDS``, that two
    pixels are three words, which are stored as such.

    Grid: (blocks of pixels, samples).
    """
    sample = tl.program_id(1)
    row = rows + sample * row_stride
    pixels = PIXELS if PIXELS > 0 else height * width
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WORDS:
        # A thread takes as many pixels in a row as it can store at once: two, where it would take eight of a plane.
        index = tl.program_id(0) * BLOCK + 2 * tl.arange(0, BLOCK // 2)[:, None] + tl.arange(0, 2)[None, :]
    at = kept + sample.to(tl.int64) * (3 * pixels) + index
    live = index < pixels
    if WHOLE:
        live = index == index
    r = rested(tl.load(at, mask=live, other=0))
    g = rested(tl.load(at + pixels, mask=live, other=0))
    b = rested(tl.load(at + 2 * pixels, mask=live, other=0))
    mean = mean_of(partial, sample, blocks, pixels, PARTIALS)
    x = index % width
    y = index // width
    r, g, b = points(r, g, b, x, y, sample, 0, height, width, row, mean, PROGRAM, COUNT, 3, True)
    if WORDS:
        target = out.to(tl.pointer_type(tl.int32)) + sample.to(tl.int64) * (3 * PIXELS // 2)
        first_r, second_r = tl.split(r)
        first_g, second_g = tl.split(g)
        first_b, second_b = tl.split(b)
        first = word(first_r, first_g, out.dtype.element_ty)
        second = word(first_b, second_r, out.dtype.element_ty)
        third = word(second_g, second_b, out.dtype.element_ty)
        # Four places for three words, so that neighbours are stored by neighbours, and whole lines of memory are written.
        words = tl.reshape(tl.join(tl.join(first, third), tl.join(second, third)), (2 * BLOCK,))
        place = tl.arange(0, 2 * BLOCK)
        to = tl.program_id(0) * (3 * BLOCK // 2) + place // 4 * 3 + place % 4
        tl.store(target + to, words, mask=(place % 4 < 3) & (to < 3 * PIXELS // 2))
        return
    if PIXELS > 0 and OUT_W == 1:
        pixel = out + sample.to(tl.int64) * (3 * PIXELS) + index
        to_plane = PIXELS
    else:
        pixel = out + sample.to(tl.int64) * out_b + index * OUT_W
        to_plane = out_c
    tl.store(pixel, r.to(out.dtype.element_ty), mask=live)
    tl.store(pixel + to_plane, g.to(out.dtype.element_ty), mask=live)
    tl.store(pixel + 2 * to_plane, b.to(out.dtype.element_ty), mask=live)


@triton.jit(
    do_not_specialize=[*SIZES, *STRIDES, "before_fill", "after_fill"], do_not_specialize_on_alignment=["source", "out", "rows"]
)
def mask_kernel(
    source, out, rows, before_fill, after_fill, source_height, source_width, out_height, out_width, tiles_x, row_stride,
    source_b, source_c, source_h, out_b, out_c, out_h,
    SOURCE_W: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr, AFTER: tl.constexpr, AFTER_AT: tl.constexpr,
    WARP_AT: tl.constexpr, BEFORE: tl.constexpr, BEFORE_AT: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
):  # fmt: skip
    """The nearest pixel of a mask, its bits unread. Grid: (tiles of an image, samples, planes)."""
    tile = tl.program_id(0)
    sample = tl.program_id(1)
    plane = tl.program_id(2)
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
        at_x, at_y, start_x, count_x, start_y, count_y = located(x, y, row + WARP_AT, KIND, True, True)
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
    pointer = source + sample.to(tl.int64) * source_b + plane * source_c
    value = tl.load(pointer + y * source_h + x * SOURCE_W, mask=live & framed, other=0)
    if BEFORE == 2:
        value = tl.where(framed & (within == 0), before_fill.to(value.dtype), value)
    if AFTER == 2:
        value = tl.where(inside_x & inside_y, value, after_fill.to(value.dtype))
    target = out + sample.to(tl.int64) * out_b + plane * out_c + target_y * out_h + target_x
    tl.store(target, value, mask=live)
