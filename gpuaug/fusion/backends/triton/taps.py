"""Reading the source of a gather: where the taps of an output pixel lie, and one channel at them or between them."""

import triton
import triton.language as tl

from gpuaug.fusion.backends.triton.pixel_math import CLEAN, as_float, unit_sum


@triton.jit
def buffers(way, source, source_b, out, out_b, samples):
    """Whether a sample is left as it is, and the buffers that it is read from and written to, of two behind one another.

    ``way``: where its way stands in its row (``_fill_ways`` in ``table/rows.py``).
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
def window(axis):
    """A resize along one axis, from the parameter table: its scale, the first pixel that it reads, and their number."""
    return tl.load(axis), tl.load(axis + 1).to(tl.int32), tl.load(axis + 2).to(tl.int32)


@triton.jit
def resampled(index, scale, HALF_PIXEL: tl.constexpr, NEAREST: tl.constexpr):
    """Where output pixels lie along one axis of a resize's input."""
    at = index.to(tl.float32)
    if HALF_PIXEL:
        at = (at + 0.5) * scale
        return at if NEAREST else at - 0.5
    return at * scale


@triton.jit
def located(x, y, row, KIND: tl.constexpr, HALF_PIXEL: tl.constexpr, NEAREST: tl.constexpr):
    """Where output pixels lie in the interpolation's input, and the window that its taps are taken from."""
    if KIND == 1:
        scale_x, start_x, count_x = window(row)
        scale_y, start_y, count_y = window(row + 3)
        at_x = resampled(x, scale_x, HALF_PIXEL, NEAREST)
        at_y = resampled(y, scale_y, HALF_PIXEL, NEAREST)
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
    first = tl.minimum(tl.floor(at).to(tl.int32), tl.maximum(count - 2, -start))
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
def weight(distance, ANTIALIAS: tl.constexpr):
    """What a pixel weighs in an output pixel, by their distance: a triangle (1) or a cubic (2)."""
    distance = tl.abs(distance)
    if ANTIALIAS == 1:
        return tl.maximum(1.0 - distance, 0.0)
    near = (1.5 * distance - 2.5) * distance * distance + 1.0
    far = -0.5 * (((distance - 5.0) * distance + 8.0) * distance - 4.0)
    return tl.where(distance < 1, near, tl.where(distance < 2, far, 0.0))


@triton.jit
def reach(at, scale, count, ANTIALIAS: tl.constexpr):
    """For each output pixel the first pixel that has a weight and the one after the last; and the factor of distances."""
    support = tl.maximum(scale, 1.0) * ANTIALIAS
    first = tl.maximum((at - support + 1.0).to(tl.int32), 0)
    end = tl.minimum((at + support + 1.0).to(tl.int32), count)
    return first, end, tl.minimum(tl.div_rn(1.0, scale), 1.0)


@triton.jit
def reached(at, scale, count, ANTIALIAS: tl.constexpr):
    """The pixels to weigh, the same number for every output pixel: the first, its scaled distance, their spacing, their number.

    They include every pixel with a weight above 0, and none outside the window.
    """
    first, _, shrink = reach(at, scale, count, ANTIALIAS)
    most = tl.minimum(tl.ceil(2 * ANTIALIAS * tl.maximum(scale, 1.0)).to(tl.int32), count)
    first = tl.minimum(first, count - most)
    return first, (first.to(tl.float32) - at) * shrink, shrink, most


@triton.jit
def weight_sum(at, scale, count, ANTIALIAS: tl.constexpr):
    """The sum of the weights of all pixels in each output pixel, along one axis."""
    _, distance, shrink, most = reached(at, scale, count, ANTIALIAS)
    total = at * 0.0
    # Not ranges: the interpreter cannot count up to a number that it has loaded.
    tap = 0
    while tap < most:
        total += weight(tap * shrink + distance, ANTIALIAS)
        tap += 1
    return total


@triton.jit
def plus(total, share, value, SCALE: tl.constexpr):
    """A sum with ``share`` of one more value, or without where that is 0: 0 · NaN would be NaN."""
    if SCALE:
        return total + share * value
    return tl.where(share == 0, total, total + share * value)


@triton.jit
def minus_zeros(like):
    """Zeros of negative sign, with which sums begin: -0 + x is x, bit for bit. Triton turns a constant of -0 into 0."""
    return tl.zeros(like.shape, tl.float32) * -1.0


@triton.jit
def line_sums(
    line, at, scale, start, count, before, within_y, to_plane, fill_r, fill_g, fill_b,
    SOURCE_W: tl.constexpr, RGB: tl.constexpr, SCALE: tl.constexpr, BEFORE: tl.constexpr, ANTIALIAS: tl.constexpr,
):  # fmt: skip
    """The sums of a line's pixels by their weights along x, (W,): three channels, or one and two copies of it."""
    first, distance, shrink, most = reached(at, scale, count, ANTIALIAS)
    r = minus_zeros(at)
    g = r
    b = r
    tap = 0
    while tap < most:
        share = weight(tap * shrink + distance, ANTIALIAS)
        x = start + first + tap
        framed = share == share
        within = framed
        if BEFORE > 0:
            x, within = mapped(x, before, 0, BEFORE)
            # In the interpreter of Triton 3.9 a truth is a whole number where a scalar was joined with a block.
            within = (within & within_y) != 0
        offset = (x * SOURCE_W).to(tl.uint32)
        r = plus(r, share, read(line, offset, framed, within, fill_r, SCALE, False, BEFORE), SCALE)
        if RGB:
            value_g = read(line + to_plane, offset, framed, within, fill_g, SCALE, False, BEFORE)
            value_b = read(line + 2 * to_plane, offset, framed, within, fill_b, SCALE, False, BEFORE)
            g, b = plus(g, share, value_g, SCALE), plus(b, share, value_b, SCALE)
        tap += 1
    return r, g, b


@triton.jit
def weighed_row(
    pointer, y, state, columns, lines, before, to_row, to_plane, fill_r, fill_g, fill_b, HALF_PIXEL: tl.constexpr,
    SOURCE_W: tl.constexpr, RGB: tl.constexpr, SCALE: tl.constexpr, BEFORE: tl.constexpr, ANTIALIAS: tl.constexpr,
    CLAMP: tl.constexpr,
):  # fmt: skip
    """The weighted means of the pixels that fall on each of output row ``y``, (W,), and the ``state`` that the next takes.

    A triangle that shrinks the image gives each source line a weight in two output rows. So a line's sums along x are made once
    and added to both rows. A state is (output row, next source line, sum of weights, sums of r, g and b so far).
    """
    held, line, total, r, g, b = state
    at_x, scale_x, start_x, count_x, inverse_x = columns
    scale_y, start_y, count_y = lines
    at = resampled(y, scale_y, HALF_PIXEL, False)
    first, end, shrink = reach(at, scale_y, count_y, ANTIALIAS)
    following = resampled(y + 1, scale_y, HALF_PIXEL, False)
    none = minus_zeros(at_x)
    if y != held:
        line = first
        total = 0.0
        r, g, b = none, none, none
    next_total = 0.0
    next_r = none
    next_g = none
    next_b = none
    while line < end:
        at_line = start_y + line
        within = at_line == at_line
        if BEFORE > 0:
            at_line, within = mapped(at_line, before, 1, BEFORE)
        line_r, line_g, line_b = line_sums(
            pointer + at_line * to_row, at_x, scale_x, start_x, count_x, before, within, to_plane, fill_r, fill_g, fill_b,
            SOURCE_W, RGB, SCALE, BEFORE, ANTIALIAS,
        )  # fmt: skip
        share = weight((line.to(tl.float32) - at) * shrink, ANTIALIAS)
        total += share
        r, g, b = plus(r, share, line_r, SCALE), plus(g, share, line_g, SCALE), plus(b, share, line_b, SCALE)
        if ANTIALIAS == 1:
            share = weight((line.to(tl.float32) - following) * shrink, ANTIALIAS)
            next_total += share
            next_r, next_g = plus(next_r, share, line_r, SCALE), plus(next_g, share, line_g, SCALE)
            next_b = plus(next_b, share, line_b, SCALE)
        line += 1
    inverse = inverse_x * tl.div_rn(1.0, total)
    r, g, b = r * inverse, g * inverse, b * inverse
    if CLAMP > 0:
        # A cubic swings beyond what it weighs; bytes do not.
        most: tl.constexpr = CLAMP * 1.0
        r = tl.minimum(tl.maximum(r, 0.0), most)
        g = tl.minimum(tl.maximum(g, 0.0), most)
        b = tl.minimum(tl.maximum(b, 0.0), most)
    held = -1
    if ANTIALIAS == 1:
        if scale_y >= 1:
            held = y + 1
    return r, g, b, (held, line, next_total, next_r, next_g, next_b)


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
