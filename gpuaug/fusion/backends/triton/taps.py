"""Reading the source of a gather: where the taps of an output pixel lie, and one channel at them or between them."""

import triton
import triton.language as tl

from gpuaug.fusion.backends.triton.pixel_math import CLEAN, as_float, unit_sum


@triton.jit
def buffers(way, source, source_b, out, out_b, samples):
    """Whether a sample is left as it is, and the buffers that it is read from and written to, of two behind one another.

    ``way``: where its way stands in its row (``_fill_ways`` in ``params/table.py``).
    """
    way = tl.load(way).to(tl.int32) - 1
    source += (way & 1).to(tl.int64) * samples * source_b
    out += (way >> 1).to(tl.int64) * samples * out_b
    return way < 0, source, out


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
def read(pointer, offset, framed, within, fill, SCALE: tl.constexpr, ZEROS: tl.constexpr, BEFORE: tl.constexpr):
    """One channel at one tap; where padding is a constant, that."""
    if BEFORE == 2:
        value = as_float(tl.load(pointer + offset, mask=framed & within, other=0), SCALE)
        return tl.where(framed & (within == 0), fill, value)
    if ZEROS:
        return as_float(tl.load(pointer + offset, mask=framed, other=0), SCALE)
    return as_float(tl.load(pointer + offset), SCALE)


@triton.jit
def located(x, y, row, KIND: tl.constexpr, HALF_PIXEL: tl.constexpr, NEAREST: tl.constexpr):
    """Where output pixels lie in the interpolation's input, and the window that its taps are taken from."""
    if KIND == 1:
        at_x = x.to(tl.float32)
        at_y = y.to(tl.float32)
        scale_x = tl.load(row)
        scale_y = tl.load(row + 3)
        if HALF_PIXEL:
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
def paired(at, start, count, HALF_PIXEL: tl.constexpr):
    """The first of two neighbours that a place lies between, and the share of the second.

    Two neighbours take one address for both. So at the end of the window they are its last two, and where it is one pixel wide
    that and another, with no share.
    """
    if HALF_PIXEL:
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
def blended(
    pointer, o00, o10, o01, o11, f00, f10, f01, f11, w00, w10, w01, w11, right, lower, fill,
    SCALE: tl.constexpr, ZEROS: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """One channel, bilinearly."""
    v00 = read(pointer, o00, f00, w00, fill, SCALE, ZEROS, BEFORE)
    v10 = read(pointer, o10, f10, w10, fill, SCALE, ZEROS, BEFORE)
    v01 = read(pointer, o01, f01, w01, fill, SCALE, ZEROS, BEFORE)
    v11 = read(pointer, o11, f11, w11, fill, SCALE, ZEROS, BEFORE)
    return mean_of_two(mean_of_two(v00, v10, right, SCALE), mean_of_two(v01, v11, right, SCALE), lower, SCALE)


@triton.jit
def share_inside(at, count, NEAREST: tl.constexpr):
    """Which share of a pixel lies inside the frame along one axis."""
    if NEAREST:
        index = half_to_even(at)
        return tl.where((index >= 0) & (index < count), 1.0, 0.0)
    first = tl.floor(at)
    second = at - first
    share = tl.where((first >= 0) & (first < count), 1 - second, 0.0)
    return share + tl.where((first >= -1) & (first < count - 1), second, 0.0)


@triton.jit
def filled(value, share, fill):
    """A pixel blended with a fill by the share that lies outside the frame."""
    return tl.where(share == 1, value, share * (value - fill) + fill)


@triton.jit
def mean_of_two(first, second, share, SCALE: tl.constexpr):
    """Between two values: ``share`` of the second."""
    if SCALE:
        return first + share * (second - first)
    # Floats may be infinite, and then have no difference. A share of 0 leaves every bit of the first: 0 · NaN would be NaN.
    return tl.where(share == 0, first, first * (1 - share) + second * share)


@triton.jit
def weight(tap, centre, shrink, ANTIALIAS: tl.constexpr):
    """What a pixel weighs in an output pixel around ``centre``, by their distance: a triangle (1) or a cubic (2)."""
    distance = tl.abs((tap.to(tl.float32) + 0.5 - centre) * shrink)
    if ANTIALIAS == 1:
        return tl.maximum(1.0 - distance, 0.0)
    near = (1.5 * distance - 2.5) * distance * distance + 1.0
    far = -0.5 * (((distance - 5.0) * distance + 8.0) * distance - 4.0)
    return tl.where(distance < 1, near, tl.where(distance < 2, far, 0.0))


@triton.jit
def reach(centre, count, scale, ANTIALIAS: tl.constexpr):
    """The first pixel that weighs something and the one after the last, for each output pixel, and the most that can be."""
    support = tl.maximum(scale, 1.0) * ANTIALIAS
    first = tl.maximum((centre - support + 0.5).to(tl.int32), 0)
    end = tl.minimum((centre + support + 0.5).to(tl.int32), count)
    return first, end, 2 * tl.ceil(support).to(tl.int32) + 1


@triton.jit
def plus(total, share, value, SCALE: tl.constexpr):
    """A sum with ``share`` of one more value, or without where that is 0: 0 · NaN would be NaN."""
    if SCALE:
        return total + share * value
    return tl.where(share == 0, total, total + share * value)


@triton.jit
def antialiased(
    pointer, at_x, at_y, scale_x, scale_y, start_x, count_x, start_y, count_y, before, source_h, to_plane,
    fill_r, fill_g, fill_b,
    SOURCE_W: tl.constexpr, RGB: tl.constexpr, SCALE: tl.constexpr, BEFORE: tl.constexpr, ANTIALIAS: tl.constexpr,
):  # fmt: skip
    """The weighted mean of all pixels that fall on an output pixel: three channels, or one and two copies of it."""
    centre_x = at_x + 0.5
    centre_y = at_y + 0.5
    shrink_x = tl.minimum(tl.div_rn(1.0, scale_x), 1.0)
    shrink_y = tl.minimum(tl.div_rn(1.0, scale_y), 1.0)
    first_x, end_x, most_x = reach(centre_x, count_x, scale_x, ANTIALIAS)
    first_y, end_y, most_y = reach(centre_y, count_y, scale_y, ANTIALIAS)
    total = centre_x * 0.0 + centre_y * 0.0
    # Sums begin at -0, to which adding changes no bit.
    r = total * -1.0
    g = r
    b = r
    # Not ranges: the interpreter cannot count up to a number that it has loaded.
    j = 0
    while j < most_y:
        tap_y = first_y + j
        share_y = tl.where(tap_y < end_y, weight(tap_y, centre_y, shrink_y, ANTIALIAS), 0.0)
        y, framed_y, within_y = tap_axis(tap_y, start_y, count_y, before, 1, False, BEFORE)
        i = 0
        while i < most_x:
            tap_x = first_x + i
            share = share_y * tl.where(tap_x < end_x, weight(tap_x, centre_x, shrink_x, ANTIALIAS), 0.0)
            x, framed_x, within_x = tap_axis(tap_x, start_x, count_x, before, 0, False, BEFORE)
            offset = (y * source_h + x * SOURCE_W).to(tl.uint32)
            framed = framed_x & framed_y
            within = within_x & within_y
            total += share
            r = plus(r, share, read(pointer, offset, framed, within, fill_r, SCALE, False, BEFORE), SCALE)
            if RGB:
                value_g = read(pointer + to_plane, offset, framed, within, fill_g, SCALE, False, BEFORE)
                value_b = read(pointer + 2 * to_plane, offset, framed, within, fill_b, SCALE, False, BEFORE)
                g, b = plus(g, share, value_g, SCALE), plus(b, share, value_b, SCALE)
            i += 1
        j += 1
    r = tl.div_rn(r, total)
    if RGB:
        g = tl.div_rn(g, total)
        b = tl.div_rn(b, total)
    else:
        g = r
        b = r
    if SCALE:
        # A cubic swings beyond what it weighs; bytes do not.
        r = tl.minimum(tl.maximum(r, 0.0), 255.0)
        g = tl.minimum(tl.maximum(g, 0.0), 255.0)
        b = tl.minimum(tl.maximum(b, 0.0), 255.0)
    return r, g, b


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
