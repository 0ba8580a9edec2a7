"""Device functions that read the source of a *gather*. A gather is the op that moves pixels in a pass.

They compute the source coordinates of an output pixel, and read the source pixels around these coordinates, the *taps* of the
output pixel. Values r, g and b are three channels with ``RGB``; without ``RGB``, all three are one channel. A *line* is a row
of pixels; ``row`` is the address of the sample's row in the parameter table. The *window* of a resize is the part of the source
that the resize reads; the window of a warp is the whole source. An *index map* maps integer coordinates of pixels to integer
coordinates, such as a flip, a crop or padding.

``MAX_VALUE``: 255 for bytes and 65535 for 16-bit values, which are returned as floats in [0, ``MAX_VALUE``]; 0 for values in
[0, 1].
"""

import triton
import triton.language as tl

from gpuaug.fusion.backends.triton.pixel_math import NO_NAN, as_float, clamped_sum, fixed_point, round_half_up


@triton.jit
def select_buffers(route, source, source_b, out, out_b, samples):
    """Return whether a pass skips the sample, and the buffers that the sample is read from and written to.

    There are two buffers, 0 and 1, which are adjacent in memory; ``source`` and ``out`` are both the address of buffer 0.
    ``route``: address of the sample's buffer route, which is 0 to skip the sample, else 1 + number of the source buffer + 2 ·
    number of the output buffer. ``samples``: number of samples per buffer.
    """
    route = tl.load(route).to(tl.int32) - 1
    source += (route & 1).to(tl.int64) * samples * source_b
    out += (route >> 1).to(tl.int64) * samples * out_b
    return route < 0, source, out


@triton.jit
def select_sample(
    source, out, rows, row_stride, source_b, source_c, out_b, FRAMES: tl.constexpr, ROUTE_COLUMN: tl.constexpr,
):  # fmt: skip
    """Return the sample and the plane that the block computes, and addresses.

    ``FRAMES``: images per row of the table ``rows``. ``ROUTE_COLUMN``: column of the buffer route, or -1 if the pass skips no
    samples.

    Returns:
        (whether the pass skips the sample; sample, the index of the block along the second axis of the grid; plane, its index
        along the third axis; addresses of the row of the sample, of the plane in the source, and of the sample in the output).
    """
    sample = tl.program_id(1)
    row = rows + sample // FRAMES * row_stride
    skipped = False
    if ROUTE_COLUMN >= 0:
        skipped, source, out = select_buffers(row + ROUTE_COLUMN, source, source_b, out, out_b, tl.num_programs(1))
    plane = tl.program_id(2)
    pointer = source + sample.to(tl.int64) * source_b + plane * source_c
    return skipped, sample, plane, row, pointer, out + sample.to(tl.int64) * out_b


@triton.jit
def map_index(index, map_columns, AXIS: tl.constexpr, PADDING: tl.constexpr):
    """Map an index along one axis through an index map. Return the source index, and whether it is not in constant padding.

    The source index is sign · index + offset. If it is not in [low, high), the pixel is padding.

    ``map_columns``: address of the columns of the map: (sign, offset) of x and of y; then, with padding, (low, high) of x and
    of y. ``AXIS``: 0 for x, 1 for y. ``PADDING``: 1, no padding; 2, constant; 3, reflection; 4, the border pixel.
    """
    sign = tl.load(map_columns + 2 * AXIS).to(tl.int32)
    offset = tl.load(map_columns + 2 * AXIS + 1).to(tl.int32)
    index = sign * index + offset
    not_padding = index == index  # true, in the shape of the index
    if PADDING >= 2:
        low = tl.load(map_columns + 4 + 2 * AXIS).to(tl.int32)
        high = tl.load(map_columns + 5 + 2 * AXIS).to(tl.int32)
        if PADDING == 2:
            not_padding = (index >= low) & (index < high)
        if PADDING == 3:
            index = low + tl.abs(index - low)
            index = high - 1 - tl.abs(high - 1 - index)
        index = tl.minimum(tl.maximum(index, low), high - 1)
    return index, not_padding


@triton.jit
def tap_axis(index, start, count, map_columns, AXIS: tl.constexpr, ZEROS: tl.constexpr, PADDING: tl.constexpr):
    """Return (source index of a tap along one axis, whether it is in the window, whether it is not in constant padding).

    ``start``, ``count``: first pixel and number of pixels of the window. ``ZEROS``: pixels outside the window are 0.
    ``map_columns``, ``PADDING``: index map before the interpolation (``map_index``); ``PADDING`` is 0 without a map.
    """
    in_window = index == index  # true, in the shape of the index
    if ZEROS:
        in_window = (index >= 0) & (index < count)
    index = start + tl.minimum(tl.maximum(index, 0), count - 1)
    not_padding = in_window
    if PADDING > 0:
        index, not_padding = map_index(index, map_columns, AXIS, PADDING)
    return index, in_window, not_padding


@triton.jit
def tap_at(x, y, line_stride, SOURCE_W: tl.constexpr):
    """Return the offset of a tap, whether it is in the window, whether not in padding, from results of ``tap_axis``."""
    return (y[0] * line_stride + x[0] * SOURCE_W).to(tl.uint32), x[1] & y[1], x[2] & y[2]


@triton.jit
def load_tap(pointer, tap, fill, MAX_VALUE: tl.constexpr, ZEROS: tl.constexpr, PADDING: tl.constexpr):
    """Load one channel at one tap: with ``ZEROS`` 0 outside the window, and ``fill`` in constant padding (``PADDING`` 2)."""
    offset, in_window, not_padding = tap
    if PADDING == 2:
        value = as_float(tl.load(pointer + offset, mask=in_window & not_padding, other=0), MAX_VALUE)
        return tl.where(in_window & (not_padding == 0), fill, value)
    if ZEROS:
        return as_float(tl.load(pointer + offset, mask=in_window, other=0), MAX_VALUE)
    return as_float(tl.load(pointer + offset), MAX_VALUE)


@triton.jit
def load_resize(columns):
    """Load the columns of a resize along one axis: scale, first pixel of the window, number of pixels."""
    return tl.load(columns), tl.load(columns + 1).to(tl.int32), tl.load(columns + 2).to(tl.int32)


@triton.jit
def resize_coordinates(index, scale, HALF_PIXEL: tl.constexpr, NEAREST: tl.constexpr):
    """Return the coordinates of output pixels along one axis, relative to the first pixel of the window of a resize."""
    coordinate = index.to(tl.float32)
    if HALF_PIXEL:
        coordinate = (coordinate + 0.5) * scale
        return coordinate if NEAREST else coordinate - 0.5
    return coordinate * scale


@triton.jit
def source_coordinates(x, y, columns, INTERPOLATION: tl.constexpr, HALF_PIXEL: tl.constexpr, NEAREST: tl.constexpr):
    """Return the coordinates of output pixels, and the window of the taps: (x, y, start_x, count_x, start_y, count_y).

    For a resize, coordinates are relative to the first pixel of the window; for a warp, to the first pixel of the input.
    ``columns``: address of the columns of the interpolation. ``INTERPOLATION``: 1, resize; 2, affine; 3, perspective.
    """
    if INTERPOLATION == 1:
        scale_x, start_x, count_x = load_resize(columns)
        scale_y, start_y, count_y = load_resize(columns + 3)
        source_x = resize_coordinates(x, scale_x, HALF_PIXEL, NEAREST)
        source_y = resize_coordinates(y, scale_y, HALF_PIXEL, NEAREST)
    else:
        x_float = x.to(tl.float32)
        y_float = y.to(tl.float32)
        source_x = tl.load(columns) * x_float + (tl.load(columns + 1) * y_float + tl.load(columns + 2))
        source_y = tl.load(columns + 3) * x_float + (tl.load(columns + 4) * y_float + tl.load(columns + 5))
        sizes = columns + 6
        if INTERPOLATION == 3:
            depth = tl.load(columns + 6) * x_float + (tl.load(columns + 7) * y_float + tl.load(columns + 8))
            source_x = tl.div_rn(source_x, depth)
            source_y = tl.div_rn(source_y, depth)
            sizes = columns + 9
        # Clamped, because a larger float would not convert to an integer; NaN becomes -limit. All such pixels are outside.
        limit = 1048576.0
        source_x = tl.minimum(tl.maximum(tl.where(source_x == source_x, source_x, -limit), -limit), limit)
        source_y = tl.minimum(tl.maximum(tl.where(source_y == source_y, source_y, -limit), -limit), limit)
        start_x = 0
        start_y = 0
        count_x = tl.load(sizes).to(tl.int32)
        count_y = tl.load(sizes + 1).to(tl.int32)
    return source_x, source_y, start_x, count_x, start_y, count_y


@triton.jit
def first_neighbour(coordinate, start, count, HALF_PIXEL: tl.constexpr):
    """Return the first of the two pixels next to a coordinate along one axis, and the weight of the second.

    Both pixels are read through one address, so both must lie in the image. At the end of the window they are its last two
    pixels. For a window of one pixel, they are this pixel and a neighbour in the image, which has weight 0.
    """
    if HALF_PIXEL:
        coordinate = tl.minimum(tl.maximum(coordinate, 0.0), (count - 1).to(tl.float32))
    first = tl.minimum(tl.floor(coordinate).to(tl.int32), tl.maximum(count - 2, -start))
    # The weight is clamped to [0, 1], because rounding may move the last coordinate beyond the window.
    return first, clamped_sum(coordinate, 1.0, -first.to(tl.float32), NO_NAN)


@triton.jit
def half_to_even(coordinate):
    """Round to the nearest integer, and halves to the nearest even integer, as ``grid_sample`` does."""
    floor = tl.floor(coordinate)
    fraction = coordinate - floor
    odd = (floor.to(tl.int32) & 1) != 0
    rounds_up = (fraction > 0.5) | ((fraction == 0.5) & odd)
    return floor.to(tl.int32) + rounds_up.to(tl.int32)


@triton.jit
def nearest_index(coordinate, INTERPOLATION: tl.constexpr):
    """Return the index of the nearest pixel along one axis.

    A resize (``INTERPOLATION`` 1) reads the pixel whose square contains the coordinate, and a warp rounds.
    """
    return tl.floor(coordinate).to(tl.int32) if INTERPOLATION == 1 else half_to_even(coordinate)


@triton.jit
def bilinear(v00, v10, v01, v11, weight_x, weight_y, MAX_VALUE: tl.constexpr, ROUNDS: tl.constexpr):
    """Interpolate between four values, whose digits are their x and y. ``ROUNDS``: round to bytes after each axis."""
    upper = lerp(v00, v10, weight_x, MAX_VALUE)
    lower = lerp(v01, v11, weight_x, MAX_VALUE)
    if ROUNDS:
        upper, lower = round_half_up(upper), round_half_up(lower)
    value = lerp(upper, lower, weight_y, MAX_VALUE)
    return round_half_up(value) if ROUNDS else value


@triton.jit
def weight_inside(coordinate, count, NEAREST: tl.constexpr):
    """Return the weight of the taps inside the window, along one axis."""
    if NEAREST:
        index = half_to_even(coordinate)
        return tl.where((index >= 0) & (index < count), 1.0, 0.0)
    first = tl.floor(coordinate)
    second_weight = coordinate - first
    first_weight = tl.where((first >= 0) & (first < count), 1 - second_weight, 0.0)
    return first_weight + tl.where((first >= -1) & (first < count - 1), second_weight, 0.0)


@triton.jit
def blend_fill(value, weight, fill):
    """Blend a pixel with a fill. ``weight``: weight of the taps inside the window, from ``weight_inside``."""
    return tl.where(weight == 1, value, weight * (value - fill) + fill)


@triton.jit
def lerp(first, second, weight, MAX_VALUE: tl.constexpr):
    """Interpolate linearly between two values. ``weight``: weight of the second."""
    if MAX_VALUE:
        return first + weight * (second - first)
    # Not ``second - first``, which is NaN for infinities. With weight 0, ``first`` stays bit for bit: 0 · NaN would be NaN.
    return tl.where(weight == 0, first, first * (1 - weight) + second * weight)


@triton.jit
def filter_weight(distance, FILTER: tl.constexpr):
    """Return the antialiasing weight of a pixel at a distance from the output pixel, in pixels of the smaller image.

    ``FILTER``: 1, triangle; 2, cubic. The number is also the radius of the filter.
    """
    distance = tl.abs(distance)
    if FILTER == 1:
        return tl.maximum(1.0 - distance, 0.0)
    near = (1.5 * distance - 2.5) * distance * distance + 1.0
    far = -0.5 * (((distance - 5.0) * distance + 8.0) * distance - 4.0)
    return tl.where(distance < 1, near, tl.where(distance < 2, far, 0.0))


@triton.jit
def support_range(coordinate, scale, count, FILTER: tl.constexpr):
    """Return (first, end, shrink) per output pixel. Only source pixels in [first, end) have a nonzero weight.

    ``shrink``: factor that converts distances in source pixels to distances for ``filter_weight``.
    """
    support = tl.maximum(scale, 1.0) * FILTER
    first = tl.maximum((coordinate - support + 1.0).to(tl.int32), 0)
    end = tl.minimum((coordinate + support + 1.0).to(tl.int32), count)
    return first, end, tl.minimum(tl.div_rn(1.0, scale), 1.0)


@triton.jit
def padded_range(coordinate, scale, count, FILTER: tl.constexpr):
    """Return a range of source pixels in the window that contains all pixels with a nonzero weight, per output pixel.

    All ranges have one length. Returns (first index, its distance from the output pixel, distance between neighbours, length),
    with distances in the unit of ``filter_weight``.
    """
    first, _, shrink = support_range(coordinate, scale, count, FILTER)
    length = tl.minimum(tl.ceil(2 * FILTER * tl.maximum(scale, 1.0)).to(tl.int32), count)
    first = tl.minimum(first, count - length)
    return first, (first.to(tl.float32) - coordinate) * shrink, shrink, length


@triton.jit
def weight_sum(coordinate, scale, count, FILTER: tl.constexpr):
    """Return the sum of the weights of all pixels, per output pixel, along one axis."""
    _, distance, shrink, length = padded_range(coordinate, scale, count, FILTER)
    sum_of_weights = coordinate * 0.0  # zeros in the shape of the coordinate
    # Not a for loop, because the interpreter does not support ranges up to a loaded number.
    tap = 0
    while tap < length:
        sum_of_weights += filter_weight(tap * shrink + distance, FILTER)
        tap += 1
    return sum_of_weights


@triton.jit
def add_weighted(total, weight, value, MAX_VALUE: tl.constexpr):
    """Return ``total + weight * value``. If the weight is 0, return ``total``, because 0 · NaN would be NaN."""
    if MAX_VALUE:
        return total + weight * value
    return tl.where(weight == 0, total, total + weight * value)


@triton.jit
def negative_zeros(like):
    """Return -0.0 in the shape of ``like``, as the start of sums: -0.0 + x is x bit for bit, but 0.0 + -0.0 is 0.0.

    It is computed, because Triton replaces a constant -0.0 by 0.0.
    """
    return tl.zeros(like.shape, tl.float32) * -1.0


@triton.jit
def line_sums(
    line, coordinate, scale, start, count, inverse, map_columns, not_padding_y, plane_stride, fill_r, fill_g, fill_b,
    SOURCE_W: tl.constexpr, RGB: tl.constexpr, MAX_VALUE: tl.constexpr, PADDING: tl.constexpr, FILTER: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Return the weighted sums of a line's pixels along x, (W,) per channel.

    ``line``: address of the line. ``not_padding_y``: whether the line is not in constant padding. ``ROUNDS``: return weighted
    means rounded to bytes, with the inverse sums of weights ``inverse``.
    """
    first, distance, shrink, length = padded_range(coordinate, scale, count, FILTER)
    r = negative_zeros(coordinate)
    g = r
    b = r
    tap = 0
    while tap < length:
        weight = filter_weight(tap * shrink + distance, FILTER)
        if ROUNDS:
            weight = fixed_point(weight * inverse, scale)
        x = start + first + tap
        in_window = weight == weight  # true, in the shape of the weight
        not_padding = in_window
        if PADDING > 0:
            x, not_padding = map_index(x, map_columns, 0, PADDING)
            # != 0, because in the interpreter of Triton 3.9 the & of a scalar mask and a block mask is a block of integers.
            not_padding = (not_padding & not_padding_y) != 0
        source_tap = (x * SOURCE_W).to(tl.uint32), in_window, not_padding
        r = add_weighted(r, weight, load_tap(line, source_tap, fill_r, MAX_VALUE, False, PADDING), MAX_VALUE)
        if RGB:
            value_g = load_tap(line + plane_stride, source_tap, fill_g, MAX_VALUE, False, PADDING)
            value_b = load_tap(line + 2 * plane_stride, source_tap, fill_b, MAX_VALUE, False, PADDING)
            g, b = add_weighted(g, weight, value_g, MAX_VALUE), add_weighted(b, weight, value_b, MAX_VALUE)
        tap += 1
    if ROUNDS:
        r, g, b = round_half_up(r), round_half_up(g), round_half_up(b)
    return r, g, b


@triton.jit
def antialiased_line(
    pointer, y, state, resize_x, resize_y, map_columns, line_stride, plane_stride, fill_r, fill_g, fill_b,
    HALF_PIXEL: tl.constexpr, SOURCE_W: tl.constexpr, RGB: tl.constexpr, MAX_VALUE: tl.constexpr, PADDING: tl.constexpr,
    FILTER: tl.constexpr, CLAMP: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Return the weighted means for the pixels of output line ``y``, (W,) per channel, and the state for the next line.

    If a triangle filter shrinks the image, each source line has weights in two output lines. So the sums of a source line along
    x are computed once, and added to both output lines.

    ``state``: (output line to which the sums belong, or -1 without sums; next source line; sum of weights; sums of r, g and b).
    ``resize_x``: source coordinates of the columns, scale, window, and inverse sums of weights. ``resize_y``: scale and window.
    A window is its first pixel and its number of pixels. ``CLAMP``: largest value of the result; 0 for no clamping.
    ``ROUNDS``: round to bytes after each axis. The sums are then weighted means.
    """
    state_line, line, total, r, g, b = state
    source_x, scale_x, start_x, count_x, inverse_x = resize_x
    scale_y, start_y, count_y = resize_y
    coordinate = resize_coordinates(y, scale_y, HALF_PIXEL, False)
    first, end, shrink = support_range(coordinate, scale_y, count_y, FILTER)
    next_coordinate = resize_coordinates(y + 1, scale_y, HALF_PIXEL, False)
    zeros = negative_zeros(source_x)
    if y != state_line:
        line = first
        total = 0.0
        r, g, b = zeros, zeros, zeros
    next_total = 0.0
    next_r = zeros
    next_g = zeros
    next_b = zeros
    inverse_y = 1.0
    next_inverse_y = 1.0
    if ROUNDS:
        inverse_y = tl.div_rn(1.0, weight_sum(coordinate, scale_y, count_y, FILTER))
        if FILTER == 1:
            next_inverse_y = tl.div_rn(1.0, weight_sum(next_coordinate, scale_y, count_y, FILTER))
    while line < end:
        source_line = start_y + line
        not_padding = source_line == source_line  # true, in the shape of the index
        if PADDING > 0:
            source_line, not_padding = map_index(source_line, map_columns, 1, PADDING)
        line_r, line_g, line_b = line_sums(
            pointer + source_line * line_stride, source_x, scale_x, start_x, count_x, inverse_x, map_columns, not_padding,
            plane_stride, fill_r, fill_g, fill_b, SOURCE_W, RGB, MAX_VALUE, PADDING, FILTER, ROUNDS,
        )  # fmt: skip
        weight = filter_weight((line.to(tl.float32) - coordinate) * shrink, FILTER)
        if ROUNDS:
            weight = fixed_point(weight * inverse_y, scale_y)
        total += weight
        r, g = add_weighted(r, weight, line_r, MAX_VALUE), add_weighted(g, weight, line_g, MAX_VALUE)
        b = add_weighted(b, weight, line_b, MAX_VALUE)
        if FILTER == 1:
            weight = filter_weight((line.to(tl.float32) - next_coordinate) * shrink, FILTER)
            if ROUNDS:
                weight = fixed_point(weight * next_inverse_y, scale_y)
            next_total += weight
            next_r, next_g = add_weighted(next_r, weight, line_r, MAX_VALUE), add_weighted(next_g, weight, line_g, MAX_VALUE)
            next_b = add_weighted(next_b, weight, line_b, MAX_VALUE)
        line += 1
    if ROUNDS:
        r, g, b = round_half_up(r), round_half_up(g), round_half_up(b)
    else:
        inverse = inverse_x * tl.div_rn(1.0, total)
        r, g, b = r * inverse, g * inverse, b * inverse
    if CLAMP > 0:
        # A cubic filter may exceed the range of its input.
        largest: tl.constexpr = CLAMP * 1.0
        r = tl.minimum(tl.maximum(r, 0.0), largest)
        g = tl.minimum(tl.maximum(g, 0.0), largest)
        b = tl.minimum(tl.maximum(b, 0.0), largest)
    state_line = -1
    if FILTER == 1:
        if scale_y >= 1:
            state_line = y + 1
    return r, g, b, (state_line, line, next_total, next_r, next_g, next_b)
