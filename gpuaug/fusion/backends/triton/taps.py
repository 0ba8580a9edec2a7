"""Device functions that read the source of a gather: source coordinates of an output pixel, and the pixels (taps) around them.

Values r, g and b are three channels with ``RGB``; without, one channel three times. A *line* is a row of pixels; ``row`` is the
row of the sample in the parameter table. The *window* of a resize is the part of the source that it reads; of a warp, all.
"""

import triton
import triton.language as tl

from gpuaug.fusion.backends.triton.pixel_math import CLEAN, as_float, unit_sum


@triton.jit
def buffers(route, source, source_b, out, out_b, samples):
    """Return whether a pass skips the sample, and the sample's source and output in the two buffers, adjacent in memory.

    ``route``: address of the buffer route (``_fill_routes`` in ``table/rows.py``). ``samples``: number of samples of a buffer.
    """
    route = tl.load(route).to(tl.int32) - 1
    source += (route & 1).to(tl.int64) * samples * source_b
    out += (route >> 1).to(tl.int64) * samples * out_b
    return route < 0, source, out


@triton.jit
def apply_edge(index, low, high, EDGE: tl.constexpr):
    """Return an index not_padding [low, high): by reflection if ``EDGE`` is 3, else by clamping."""
    if EDGE == 3:
        index = low + tl.abs(index - low)
        index = high - 1 - tl.abs(high - 1 - index)
    return tl.minimum(tl.maximum(index, low), high - 1)


@triton.jit
def map_index(index, row, AXIS: tl.constexpr, MAP: tl.constexpr):
    """Map an index along one axis through a composed permutation. Return the source index, and whether it is not padding.

    ``MAP``: padding mode (``_MAPS`` in ``backend.py``): 1, no padding; 2, constant; 3, reflection; 4, the border pixel.
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
            index = apply_edge(index, low, high, MAP)
    return index, inside


@triton.jit
def tap_axis(index, start, count, row, AXIS: tl.constexpr, ZEROS: tl.constexpr, BEFORE: tl.constexpr):
    """Return the source index of a tap along one axis, whether it is in the window, and whether it is not padding.

    ``start``, ``count``: window. ``ZEROS``: pixels outside are 0. ``BEFORE``: padding mode of the permutations before the
    interpolation, or 0 without permutations.
    """
    in_window = index == index
    if ZEROS:
        in_window = (index >= 0) & (index < count)
    index = start + tl.minimum(tl.maximum(index, 0), count - 1)
    not_padding = in_window
    if BEFORE > 0:
        index, not_padding = map_index(index, row, AXIS, BEFORE)
    return index, in_window, not_padding


@triton.jit
def load_tap(pointer, offset, in_window, not_padding, fill, SCALE: tl.constexpr, ZEROS: tl.constexpr, BEFORE: tl.constexpr):
    """Load one channel at one tap. Outside the window it is 0 with ``ZEROS``; in constant padding (``BEFORE`` 2), ``fill``."""
    if BEFORE == 2:
        value = as_float(tl.load(pointer + offset, mask=in_window & not_padding, other=0), SCALE)
        return tl.where(in_window & (not_padding == 0), fill, value)
    if ZEROS:
        return as_float(tl.load(pointer + offset, mask=in_window, other=0), SCALE)
    return as_float(tl.load(pointer + offset), SCALE)


@triton.jit
def load_resize(axis):
    """Load the resize along one axis from the parameter table: scale, first pixel of the window, number of pixels."""
    return tl.load(axis), tl.load(axis + 1).to(tl.int32), tl.load(axis + 2).to(tl.int32)


@triton.jit
def resize_coordinates(index, scale, HALF_PIXEL: tl.constexpr, NEAREST: tl.constexpr):
    """Return the input coordinates of output pixels along one axis of a resize."""
    centre = index.to(tl.float32)
    if HALF_PIXEL:
        centre = (centre + 0.5) * scale
        return centre if NEAREST else centre - 0.5
    return centre * scale


@triton.jit
def source_coordinates(x, y, row, KIND: tl.constexpr, HALF_PIXEL: tl.constexpr, NEAREST: tl.constexpr):
    """Return the input coordinates of output pixels, and the window of the taps: (x, y, start_x, count_x, start_y, count_y).

    ``KIND``: 1, resize; 2, affine; 3, perspective (``_KINDS`` in ``backend.py``).
    """
    if KIND == 1:
        scale_x, start_x, count_x = load_resize(row)
        scale_y, start_y, count_y = load_resize(row + 3)
        at_x = resize_coordinates(x, scale_x, HALF_PIXEL, NEAREST)
        at_y = resize_coordinates(y, scale_y, HALF_PIXEL, NEAREST)
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
        # Clamped, because a larger float would not convert to an integer. All such pixels are outside.
        limit = 1048576.0
        at_x = tl.minimum(tl.maximum(tl.where(at_x == at_x, at_x, -limit), -limit), limit)
        at_y = tl.minimum(tl.maximum(tl.where(at_y == at_y, at_y, -limit), -limit), limit)
        start_x = 0
        start_y = 0
        count_x = tl.load(sizes).to(tl.int32)
        count_y = tl.load(sizes + 1).to(tl.int32)
    return at_x, at_y, start_x, count_x, start_y, count_y


@triton.jit
def first_neighbour(at, start, count, HALF_PIXEL: tl.constexpr):
    """Return the first of the two neighbours of coordinate ``at``, and the weight of the second.

    Both neighbours are read through one address, so they lie in the window: at its end, they are its last two pixels. In a
    window of one pixel, they are this pixel and a neighbour in the image, with weight 0 for the latter.
    """
    if HALF_PIXEL:
        at = tl.minimum(tl.maximum(at, 0.0), (count - 1).to(tl.float32))
    first = tl.minimum(tl.floor(at).to(tl.int32), tl.maximum(count - 2, -start))
    # Clamped, because rounding may move the last coordinate beyond the window.
    return first, unit_sum(at, 1.0, -first.to(tl.float32), CLEAN)


@triton.jit
def half_to_even(at):
    """Round to the nearest integer, halves to the even one, as ``grid_sample`` does."""
    floor = tl.floor(at)
    fraction = at - floor
    odd = (floor.to(tl.int32) & 1) != 0
    rounds_up = (fraction > 0.5) | ((fraction == 0.5) & odd)
    return floor.to(tl.int32) + rounds_up.to(tl.int32)


@triton.jit
def interpolate_taps(
    pointer, o00, o10, o01, o11, f00, f10, f01, f11, w00, w10, w01, w11, right, lower, fill,
    SCALE: tl.constexpr, ZEROS: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """Interpolate one channel bilinearly between four taps.

    ``o``: offsets, ``f``: in the window, ``w``: not padding; indexed by (x, y) of the tap. ``right``, ``lower``: weights of the
    right and lower taps.
    """
    v00 = load_tap(pointer, o00, f00, w00, fill, SCALE, ZEROS, BEFORE)
    v10 = load_tap(pointer, o10, f10, w10, fill, SCALE, ZEROS, BEFORE)
    v01 = load_tap(pointer, o01, f01, w01, fill, SCALE, ZEROS, BEFORE)
    v11 = load_tap(pointer, o11, f11, w11, fill, SCALE, ZEROS, BEFORE)
    return lerp(lerp(v00, v10, right, SCALE), lerp(v01, v11, right, SCALE), lower, SCALE)


@triton.jit
def weight_inside(at, count, NEAREST: tl.constexpr):
    """Return the weight of the taps inside the window, along one axis."""
    if NEAREST:
        index = half_to_even(at)
        return tl.where((index >= 0) & (index < count), 1.0, 0.0)
    first = tl.floor(at)
    second_weight = at - first
    first_weight = tl.where((first >= 0) & (first < count), 1 - second_weight, 0.0)
    return first_weight + tl.where((first >= -1) & (first < count - 1), second_weight, 0.0)


@triton.jit
def blend_fill(value, share, fill):
    """Blend a pixel with a fill, which has the weight of the taps outside the window. ``share``: weight inside."""
    return tl.where(share == 1, value, share * (value - fill) + fill)


@triton.jit
def lerp(first, second, share, SCALE: tl.constexpr):
    """Interpolate linearly between two values. ``share``: weight of the second."""
    if SCALE:
        return first + share * (second - first)
    # No difference, which is NaN for infinities. With a share of 0, the first stays bit for bit: 0 · NaN would be NaN.
    return tl.where(share == 0, first, first * (1 - share) + second * share)


@triton.jit
def filter_weight(distance, ANTIALIAS: tl.constexpr):
    """Return the antialiasing weight of a pixel by its distance from the output pixel: triangle (1) or cubic (2)."""
    distance = tl.abs(distance)
    if ANTIALIAS == 1:
        return tl.maximum(1.0 - distance, 0.0)
    near = (1.5 * distance - 2.5) * distance * distance + 1.0
    far = -0.5 * (((distance - 5.0) * distance + 8.0) * distance - 4.0)
    return tl.where(distance < 1, near, tl.where(distance < 2, far, 0.0))


@triton.jit
def support_range(at, scale, count, ANTIALIAS: tl.constexpr):
    """Return the first and end index of the pixels with a nonzero weight, per output pixel, and the factor of distances."""
    support = tl.maximum(scale, 1.0) * ANTIALIAS
    first = tl.maximum((at - support + 1.0).to(tl.int32), 0)
    end = tl.minimum((at + support + 1.0).to(tl.int32), count)
    return first, end, tl.minimum(tl.div_rn(1.0, scale), 1.0)


@triton.jit
def padded_range(at, scale, count, ANTIALIAS: tl.constexpr):
    """Return a range of pixels per output pixel, equally long for all: first index, its scaled distance, spacing, length.

    The range contains all pixels with a nonzero weight, and lies in the window.
    """
    first, _, shrink = support_range(at, scale, count, ANTIALIAS)
    length = tl.minimum(tl.ceil(2 * ANTIALIAS * tl.maximum(scale, 1.0)).to(tl.int32), count)
    first = tl.minimum(first, count - length)
    return first, (first.to(tl.float32) - at) * shrink, shrink, length


@triton.jit
def weight_sum(at, scale, count, ANTIALIAS: tl.constexpr):
    """Return the sum of the weights of all pixels, per output pixel, along one axis."""
    _, distance, shrink, length = padded_range(at, scale, count, ANTIALIAS)
    sum_of_weights = at * 0.0
    # No range: the interpreter does not support ranges up to a loaded number.
    tap = 0
    while tap < length:
        sum_of_weights += filter_weight(tap * shrink + distance, ANTIALIAS)
        tap += 1
    return sum_of_weights


@triton.jit
def add_weighted(total, share, value, SCALE: tl.constexpr):
    """Return ``total + share * value``; ``total`` if the share is 0, because 0 · NaN would be NaN."""
    if SCALE:
        return total + share * value
    return tl.where(share == 0, total, total + share * value)


@triton.jit
def negative_zeros(like):
    """Return -0.0, to which sums add their first term without a change of bits. Triton replaces a constant -0 by 0."""
    return tl.zeros(like.shape, tl.float32) * -1.0


@triton.jit
def line_sums(
    line, at, scale, start, count, before, not_padding_y, plane_stride, fill_r, fill_g, fill_b,
    SOURCE_W: tl.constexpr, RGB: tl.constexpr, SCALE: tl.constexpr, BEFORE: tl.constexpr, ANTIALIAS: tl.constexpr,
):  # fmt: skip
    """Return the weighted sums of a line's pixels along x, (W,) per channel."""
    first, distance, shrink, length = padded_range(at, scale, count, ANTIALIAS)
    r = negative_zeros(at)
    g = r
    b = r
    tap = 0
    while tap < length:
        share = filter_weight(tap * shrink + distance, ANTIALIAS)
        x = start + first + tap
        in_window = share == share
        not_padding = in_window
        if BEFORE > 0:
            x, not_padding = map_index(x, before, 0, BEFORE)
            # != 0, because in the interpreter of Triton 3.9 a mask of a scalar and a block is an integer.
            not_padding = (not_padding & not_padding_y) != 0
        offset = (x * SOURCE_W).to(tl.uint32)
        r = add_weighted(r, share, load_tap(line, offset, in_window, not_padding, fill_r, SCALE, False, BEFORE), SCALE)
        if RGB:
            value_g = load_tap(line + plane_stride, offset, in_window, not_padding, fill_g, SCALE, False, BEFORE)
            value_b = load_tap(line + 2 * plane_stride, offset, in_window, not_padding, fill_b, SCALE, False, BEFORE)
            g, b = add_weighted(g, share, value_g, SCALE), add_weighted(b, share, value_b, SCALE)
        tap += 1
    return r, g, b


@triton.jit
def antialiased_line(
    pointer, y, state, columns, lines, before, line_stride, plane_stride, fill_r, fill_g, fill_b, HALF_PIXEL: tl.constexpr,
    SOURCE_W: tl.constexpr, RGB: tl.constexpr, SCALE: tl.constexpr, BEFORE: tl.constexpr, ANTIALIAS: tl.constexpr,
    CLAMP: tl.constexpr,
):  # fmt: skip
    """Return the weighted means for the pixels of output line ``y``, (W,) per channel, and the next ``state``.

    If a triangle shrinks the image, each source line has weights in two output lines. So the sums of a source line along x are
    computed once, and added to both. A state is (output line, next source line, sum of weights, sums of r, g and b).
    """
    state_line, line, total, r, g, b = state
    at_x, scale_x, start_x, count_x, inverse_x = columns
    scale_y, start_y, count_y = lines
    at = resize_coordinates(y, scale_y, HALF_PIXEL, False)
    first, end, shrink = support_range(at, scale_y, count_y, ANTIALIAS)
    next_at = resize_coordinates(y + 1, scale_y, HALF_PIXEL, False)
    zeros = negative_zeros(at_x)
    if y != state_line:
        line = first
        total = 0.0
        r, g, b = zeros, zeros, zeros
    next_total = 0.0
    next_r = zeros
    next_g = zeros
    next_b = zeros
    while line < end:
        at_line = start_y + line
        not_padding = at_line == at_line
        if BEFORE > 0:
            at_line, not_padding = map_index(at_line, before, 1, BEFORE)
        line_r, line_g, line_b = line_sums(
            pointer + at_line * line_stride, at_x, scale_x, start_x, count_x, before, not_padding, plane_stride,
            fill_r, fill_g, fill_b, SOURCE_W, RGB, SCALE, BEFORE, ANTIALIAS,
        )  # fmt: skip
        share = filter_weight((line.to(tl.float32) - at) * shrink, ANTIALIAS)
        total += share
        r, g, b = (
            add_weighted(r, share, line_r, SCALE),
            add_weighted(g, share, line_g, SCALE),
            add_weighted(b, share, line_b, SCALE),
        )
        if ANTIALIAS == 1:
            share = filter_weight((line.to(tl.float32) - next_at) * shrink, ANTIALIAS)
            next_total += share
            next_r, next_g = add_weighted(next_r, share, line_r, SCALE), add_weighted(next_g, share, line_g, SCALE)
            next_b = add_weighted(next_b, share, line_b, SCALE)
        line += 1
    inverse = inverse_x * tl.div_rn(1.0, total)
    r, g, b = r * inverse, g * inverse, b * inverse
    if CLAMP > 0:
        # A cubic may exceed the range of its input.
        largest: tl.constexpr = CLAMP * 1.0
        r = tl.minimum(tl.maximum(r, 0.0), largest)
        g = tl.minimum(tl.maximum(g, 0.0), largest)
        b = tl.minimum(tl.maximum(b, 0.0), largest)
    state_line = -1
    if ANTIALIAS == 1:
        if scale_y >= 1:
            state_line = y + 1
    return r, g, b, (state_line, line, next_total, next_r, next_g, next_b)


@triton.jit
def interpolate_neighbours(pointer, offset, right, lower, line_stride, SOURCE_W: tl.constexpr, SCALE: tl.constexpr):
    """Interpolate one channel bilinearly between four neighbours. ``offset``: offset of the upper left neighbour."""
    v00 = as_float(tl.load(pointer + offset), SCALE)
    v10 = as_float(tl.load(pointer + SOURCE_W + offset), SCALE)
    v01 = as_float(tl.load(pointer + line_stride + offset), SCALE)
    v11 = as_float(tl.load(pointer + line_stride + SOURCE_W + offset), SCALE)
    upper_mean = v00 + right * (v10 - v00)
    lower_mean = v01 + right * (v11 - v01)
    return upper_mean + lower * (lower_mean - upper_mean)
