"""Device functions that read the source of a *gather*, the op of a pass that moves or interpolates pixels.

They compute the source coordinates of an output pixel, and read the source pixels around these coordinates, the *taps* of the
output pixel. A bilinear interpolation has four taps, an antialiased resize has as many as its filter covers.

Terms and arguments:

- *index map*: map from integer coordinates of pixels to integer coordinates, such as a flip, a crop or padding. A gather has an
  index map before and one after its interpolation; either may be missing.
- *warp*: affine or perspective interpolation.
- *window*: the part of the source that a resize reads, along each axis ``count`` pixels from pixel ``start`` on. The window of
  a warp is the whole source.
- *constant padding*: pixels that an index map adds around the image, with a constant fill.
- ``sample``: index of an output image. ``row``: address of the sample's row of the parameter table. *Line*: row of pixels.
- ``r``, ``g``, ``b``: the three channels with ``RGB``; without ``RGB``, all three are the same channel.
- suffixes ``_b``, ``_c``, ``_h`` and ``_W``: strides, in elements, of the axes batch, channel, line and x.

``MAX_VALUE``: 255 for bytes and 65535 for 16-bit values, which are returned as floats in [0, ``MAX_VALUE``]; 0 for values in
[0, 1].
"""

import triton
import triton.language as tl

from gpuaug.fusion.backends.triton.pixel_math import NO_NAN, as_float, clamped_sum, fixed_point, nearest_integer, round_half_up


@triton.jit
def select_buffers(route, source, source_b, out, out_b, samples):
    """Return (whether a pass skips the sample, address of its source buffer, address of its output buffer).

    There are two buffers, 0 and 1, which are adjacent in memory; ``source`` and ``out`` are both the address of buffer 0.
    ``route``: address of the sample's buffer route, which is 0 to skip the sample, else 1 + number of the source buffer + 2 ·
    number of the output buffer. ``samples``: number of samples per buffer. ``source_b``, ``out_b``: strides between samples.
    """
    route = tl.load(route).to(tl.int32) - 1
    source += (route & 1).to(tl.int64) * samples * source_b
    out += (route >> 1).to(tl.int64) * samples * out_b
    return route < 0, source, out


@triton.jit
def select_sample(
    source, out, param_table, row_stride, source_b, source_c, out_b, FRAMES: tl.constexpr, ROUTE_COLUMN: tl.constexpr,
):  # fmt: skip
    """Return the sample and the plane that the thread block computes, and their addresses.

    ``FRAMES``: images per row of the table ``param_table``. ``ROUTE_COLUMN``: column of the buffer route, or -1 if the pass
    skips no samples.

    Returns:
        (whether the pass skips the sample; sample, the index of the block along the second axis of the grid; plane, its index
        along the third axis; addresses of the row of the sample, of the plane in the source, and of the sample in the output).
    """
    sample = tl.program_id(1)
    row = param_table + sample // FRAMES * row_stride
    skipped = False
    if ROUTE_COLUMN >= 0:
        skipped, source, out = select_buffers(row + ROUTE_COLUMN, source, source_b, out, out_b, tl.num_programs(1))
    plane = tl.program_id(2)
    pointer = source + sample.to(tl.int64) * source_b + plane * source_c
    return skipped, sample, plane, row, pointer, out + sample.to(tl.int64) * out_b


@triton.jit
def map_index(index, map_columns, AXIS: tl.constexpr, PADDING: tl.constexpr):
    """Map an index along one axis through an index map. Return (source index, whether it is not in constant padding).

    The source index is sign · index + offset, with sign -1 for a flip. If it is outside of the image, [low, high), the pixel is
    padding, and the source index is moved into the image by the padding mode.

    ``map_columns``: address of the columns of the map: sign and offset of x, sign and offset of y; with padding, low and high
    of x, low and high of y. ``AXIS``: 0 for x, 1 for y. ``PADDING``: 1, no padding; 2, constant; 3, reflection; 4, the border
    pixel.
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
    """Combine the results of ``tap_axis`` for both axes to a *tap*, the argument of ``load_tap``.

    Returns:
        (offset of the pixel from the address of its plane, whether it is in the window, whether it is not in constant padding).
    """
    return (y[0] * line_stride + x[0] * SOURCE_W).to(tl.uint32), x[1] & y[1], x[2] & y[2]


@triton.jit
def load_tap(pointer, tap, fill, MAX_VALUE: tl.constexpr, ZEROS: tl.constexpr, PADDING: tl.constexpr):
    """Load one channel of a tap. With ``ZEROS``, it is 0 outside the window; in constant padding (``PADDING`` 2), ``fill``.

    ``pointer``: address of the plane. ``tap``: result of ``tap_at``.
    """
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
    """Return the source coordinates of output pixels, and the window: (x, y, start_x, count_x, start_y, count_y).

    For a resize, coordinates are relative to the first pixel of the window; for a warp, to the first pixel of the input.

    ``columns``: address of the columns of the interpolation. ``INTERPOLATION``: type of the interpolation, with these columns:

    - 1, resize: (scale, start, count) of x, then of y
    - 2, affine: 2x3 matrix from output to source coordinates, line by line; then width and height of the source
    - 3, perspective: 3x3 matrix in homogeneous coordinates; then width and height of the source
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
        size_columns = columns + 6
        if INTERPOLATION == 3:
            depth = tl.load(columns + 6) * x_float + (tl.load(columns + 7) * y_float + tl.load(columns + 8))
            source_x = tl.div_rn(source_x, depth)
            source_y = tl.div_rn(source_y, depth)
            size_columns = columns + 9
        # Clamped, because a larger float would not convert to an integer; NaN becomes -limit. All such pixels are outside,
        # because the sides of images are at most ``limit`` (``MAX_WARPED_SIDE``).
        limit = 1048576.0
        source_x = tl.minimum(tl.maximum(tl.where(source_x == source_x, source_x, -limit), -limit), limit)
        source_y = tl.minimum(tl.maximum(tl.where(source_y == source_y, source_y, -limit), -limit), limit)
        start_x = 0
        start_y = 0
        count_x = tl.load(size_columns).to(tl.int32)
        count_y = tl.load(size_columns + 1).to(tl.int32)
    return source_x, source_y, start_x, count_x, start_y, count_y


@triton.jit
def first_neighbour(coordinate, start, count, HALF_PIXEL: tl.constexpr):
    """Return the first of the two pixels next to a coordinate along one axis, and the weight of the second.

    The index is relative to the first pixel of the window, ``start``. Both pixels are read through one address, so both must
    lie in the image. At the end of the window they are its last two pixels. For a window of one pixel, they are this pixel and
    a neighbour in the image, which has weight 0: the next pixel if the window begins at pixel 0, else the preceding pixel.
    """
    if HALF_PIXEL:
        coordinate = tl.minimum(tl.maximum(coordinate, 0.0), (count - 1).to(tl.float32))
    first = tl.minimum(tl.floor(coordinate).to(tl.int32), tl.maximum(count - 2, -start))
    # The weight is clamped to [0, 1], because rounding may move the last coordinate beyond the window.
    return first, clamped_sum(coordinate, 1.0, -first.to(tl.float32), NO_NAN)


@triton.jit
def nearest_index(coordinate, INTERPOLATION: tl.constexpr):
    """Return the index of the nearest pixel along one axis.

    A resize (``INTERPOLATION`` 1) reads the pixel whose square contains the coordinate, and a warp rounds as ``grid_sample``.
    """
    return (tl.floor(coordinate) if INTERPOLATION == 1 else nearest_integer(coordinate)).to(tl.int32)


@triton.jit
def bilinear(v00, v10, v01, v11, weight_x, weight_y, MAX_VALUE: tl.constexpr, ROUNDS: tl.constexpr):
    """Interpolate between four taps: ``v10`` is the value at x = 1 and y = 0 of a unit square, in which the pixel lies.

    ``weight_x``, ``weight_y``: coordinates of the pixel in the square. ``ROUNDS``: round to bytes after each axis.
    """
    upper = lerp(v00, v10, weight_x, MAX_VALUE)
    lower = lerp(v01, v11, weight_x, MAX_VALUE)
    if ROUNDS:
        upper, lower = round_half_up(upper), round_half_up(lower)
    value = lerp(upper, lower, weight_y, MAX_VALUE)
    return round_half_up(value) if ROUNDS else value


@triton.jit
def weight_inside(coordinate, count, NEAREST: tl.constexpr):
    """Return the sum of the weights of the taps inside the window, along one axis. Taps outside have the fill of the warp."""
    if NEAREST:
        index = nearest_integer(coordinate)
        return tl.where((index >= 0) & (index < count), 1.0, 0.0)
    first = tl.floor(coordinate)
    second_weight = coordinate - first
    # The second tap is at first + 1.
    first_weight = tl.where((first >= 0) & (first < count), 1 - second_weight, 0.0)
    return first_weight + tl.where((first >= -1) & (first < count - 1), second_weight, 0.0)


@triton.jit
def blend_fill(value, weight, fill):
    """Blend a pixel with a fill. ``weight``: weight of its taps in the window, the product of ``weight_inside`` of x and y."""
    return tl.where(weight == 1, value, weight * (value - fill) + fill)


@triton.jit
def lerp(first, second, weight, MAX_VALUE: tl.constexpr):
    """Interpolate linearly between two values. ``weight``: weight of the second."""
    if MAX_VALUE:  # the values were integers, and are finite
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

    Args:
        coordinate: Source coordinates of the output pixels along one axis, relative to the window.
        scale: Source pixels per output pixel.
        count: Number of pixels of the window.
        FILTER: Radius of the filter (``filter_weight``).

    ``shrink`` is the factor that converts distances in source pixels to distances for ``filter_weight``.
    """
    support = tl.maximum(scale, 1.0) * FILTER
    first = tl.maximum((coordinate - support + 1.0).to(tl.int32), 0)
    end = tl.minimum((coordinate + support + 1.0).to(tl.int32), count)
    return first, end, tl.minimum(tl.div_rn(1.0, scale), 1.0)


@triton.jit
def padded_range(coordinate, scale, count, FILTER: tl.constexpr):
    """Return, per output pixel, a range of source pixels that contains all pixels with a nonzero weight (``support_range``).

    The ranges of all output pixels have the same length, so that one loop over taps serves all. They lie in the window.

    Returns:
        (index of the first pixel of the range, distance of this pixel from the output pixel, distance between neighbours,
        length of the range). Distances are in the unit of ``filter_weight``.
    """
    first_tap, _, shrink = support_range(coordinate, scale, count, FILTER)
    length = tl.minimum(tl.ceil(2 * FILTER * tl.maximum(scale, 1.0)).to(tl.int32), count)
    first_tap = tl.minimum(first_tap, count - length)
    return first_tap, (first_tap.to(tl.float32) - coordinate) * shrink, shrink, length


@triton.jit
def weight_sum(coordinate, scale, count, FILTER: tl.constexpr):
    """Return the sum of the weights of all taps, per output pixel, along one axis. Arguments as in ``support_range``."""
    _, distance, shrink, length = padded_range(coordinate, scale, count, FILTER)
    sum_of_weights = coordinate * 0.0  # zeros in the shape of the coordinate
    # Not a for loop, because the interpreter does not support ranges up to a loaded number.
    tap_index = 0
    while tap_index < length:
        sum_of_weights += filter_weight(tap_index * shrink + distance, FILTER)
        tap_index += 1
    return sum_of_weights


@triton.jit
def add_weighted(total, weight, value, MAX_VALUE: tl.constexpr):
    """Return ``total + weight * value``. If the weight is 0, return ``total``, because 0 · NaN would be NaN."""
    if MAX_VALUE:  # the values were integers, and are finite
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
    line_address, coordinate, scale, start, count, inverse_weight_sum, map_columns, not_padding_y, plane_stride,
    fill_r, fill_g, fill_b, SOURCE_W: tl.constexpr, RGB: tl.constexpr, MAX_VALUE: tl.constexpr, PADDING: tl.constexpr,
    FILTER: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Return the weighted sums of one source line along x: (r, g, b), (W,) each, for the W columns of the output.

    ``line_address``: address of the source line. ``coordinate``: source coordinates of the columns, (W,). ``scale``: source
    pixels per column. ``start``, ``count``: window along x. ``not_padding_y``: whether the line is not in constant padding.

    ``ROUNDS``: return weighted means rounded to bytes instead of sums. ``inverse_weight_sum``: 1 / sum of the weights of a
    column, (W,), which is used with ``ROUNDS`` only.
    """
    first_tap, distance, shrink, length = padded_range(coordinate, scale, count, FILTER)
    r = negative_zeros(coordinate)
    g = r
    b = r
    tap_index = 0
    while tap_index < length:
        weight = filter_weight(tap_index * shrink + distance, FILTER)
        if ROUNDS:
            weight = fixed_point(weight * inverse_weight_sum, scale)
        x = start + first_tap + tap_index
        in_window = weight == weight  # true, in the shape of the weight
        not_padding = in_window
        if PADDING > 0:
            x, not_padding = map_index(x, map_columns, 0, PADDING)
            # != 0, because in the interpreter of Triton 3.9 the & of a scalar mask and a block mask is a block of integers.
            not_padding = (not_padding & not_padding_y) != 0
        tap = (x * SOURCE_W).to(tl.uint32), in_window, not_padding
        r = add_weighted(r, weight, load_tap(line_address, tap, fill_r, MAX_VALUE, False, PADDING), MAX_VALUE)
        if RGB:
            value_g = load_tap(line_address + plane_stride, tap, fill_g, MAX_VALUE, False, PADDING)
            value_b = load_tap(line_address + 2 * plane_stride, tap, fill_b, MAX_VALUE, False, PADDING)
            g, b = add_weighted(g, weight, value_g, MAX_VALUE), add_weighted(b, weight, value_b, MAX_VALUE)
        tap_index += 1
    if ROUNDS:
        r, g, b = round_half_up(r), round_half_up(g), round_half_up(b)
    return r, g, b


@triton.jit
def antialiased_line(
    pointer, y, state, resize_x, resize_y, map_columns, line_stride, plane_stride, fill_r, fill_g, fill_b,
    HALF_PIXEL: tl.constexpr, SOURCE_W: tl.constexpr, RGB: tl.constexpr, MAX_VALUE: tl.constexpr, PADDING: tl.constexpr,
    FILTER: tl.constexpr, CLAMP: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Return the pixels of output line ``y`` of an antialiased resize, (W,) per channel, and the state for the next line.

    A pixel is the mean of the source pixels in the reach of the filter, weighted by distance. The function sums each source
    line along x (``line_sums``), and adds the sums, times the weight of the line, to the sums of the output line.

    If a triangle filter shrinks the image, each source line has weights in at most two output lines, ``y`` and ``y`` + 1. For
    three source lines per output line:

        source lines    0  1  2  3  4  5  6  7  8
        output line 0   ──────────
        output line 1         ─────────────
        output line 2                  ──────────

    The sums of a source line along x are then computed once, and added to the sums of both output lines (``next_…``). The sums
    of line ``y`` + 1 are the state that the next call begins with.

    Args:
        pointer: Address of the first plane of the source.
        y: Index of the output line.
        state: (output line that the sums belong to, or -1 without sums; next source line to add; sum of the weights so far;
            weighted sums of r, g and b, (W,) each).
        resize_x: (source coordinates of the columns, (W,); scale; start and count of the window; 1 / sum of weights, (W,)).
        resize_y: (scale; start and count of the window).
        map_columns: Columns of the index map before the resize (``map_index``).
        line_stride: Elements between lines of the source.
        plane_stride: Elements between channels of the source.
        fill_r: Fill of constant padding, as ``fill_g`` and ``fill_b``.
        fill_g: See ``fill_r``.
        fill_b: See ``fill_r``.
        HALF_PIXEL: Whether pixel i covers [i, i + 1], with its centre at i + 0.5 (``resize_coordinates``).
        SOURCE_W: Elements between the pixels of a line.
        RGB: Whether there are three channels.
        MAX_VALUE: See the head of this file.
        PADDING: Padding mode of the index map (``map_index``); 0 without an index map.
        FILTER: See ``filter_weight``.
        CLAMP: Largest value of the result; 0 for no clamping.
        ROUNDS: Whether to round to bytes after each axis. The sums of a line along x are then weighted means.
    """
    summed_for, line_index, weight_sum_y, r, g, b = state
    source_x, scale_x, start_x, count_x, inverse_sum_x = resize_x
    scale_y, start_y, count_y = resize_y
    source_y = resize_coordinates(y, scale_y, HALF_PIXEL, False)
    first, end, shrink = support_range(source_y, scale_y, count_y, FILTER)
    next_source_y = resize_coordinates(y + 1, scale_y, HALF_PIXEL, False)
    no_sum = negative_zeros(source_x)
    if y != summed_for:
        line_index = first
        weight_sum_y = 0.0
        r, g, b = no_sum, no_sum, no_sum
    next_weight_sum_y = 0.0
    next_r = no_sum
    next_g = no_sum
    next_b = no_sum
    inverse_sum_y = 1.0
    next_inverse_sum_y = 1.0
    if ROUNDS:
        inverse_sum_y = tl.div_rn(1.0, weight_sum(source_y, scale_y, count_y, FILTER))
        if FILTER == 1:
            next_inverse_sum_y = tl.div_rn(1.0, weight_sum(next_source_y, scale_y, count_y, FILTER))
    while line_index < end:
        source_line_index = start_y + line_index
        not_padding = source_line_index == source_line_index  # true, in the shape of the index
        if PADDING > 0:
            source_line_index, not_padding = map_index(source_line_index, map_columns, 1, PADDING)
        line_r, line_g, line_b = line_sums(
            pointer + source_line_index * line_stride, source_x, scale_x, start_x, count_x, inverse_sum_x, map_columns,
            not_padding, plane_stride, fill_r, fill_g, fill_b, SOURCE_W, RGB, MAX_VALUE, PADDING, FILTER, ROUNDS,
        )  # fmt: skip
        weight = filter_weight((line_index.to(tl.float32) - source_y) * shrink, FILTER)
        if ROUNDS:
            weight = fixed_point(weight * inverse_sum_y, scale_y)
        weight_sum_y += weight
        r, g = add_weighted(r, weight, line_r, MAX_VALUE), add_weighted(g, weight, line_g, MAX_VALUE)
        b = add_weighted(b, weight, line_b, MAX_VALUE)
        if FILTER == 1:
            weight = filter_weight((line_index.to(tl.float32) - next_source_y) * shrink, FILTER)
            if ROUNDS:
                weight = fixed_point(weight * next_inverse_sum_y, scale_y)
            next_weight_sum_y += weight
            next_r, next_g = add_weighted(next_r, weight, line_r, MAX_VALUE), add_weighted(next_g, weight, line_g, MAX_VALUE)
            next_b = add_weighted(next_b, weight, line_b, MAX_VALUE)
        line_index += 1
    if ROUNDS:
        r, g, b = round_half_up(r), round_half_up(g), round_half_up(b)
    else:
        inverse_sum_xy = inverse_sum_x * tl.div_rn(1.0, weight_sum_y)
        r, g, b = r * inverse_sum_xy, g * inverse_sum_xy, b * inverse_sum_xy
    if CLAMP > 0:
        # A cubic filter may exceed the range of its input.
        largest: tl.constexpr = CLAMP * 1.0
        r = tl.minimum(tl.maximum(r, 0.0), largest)
        g = tl.minimum(tl.maximum(g, 0.0), largest)
        b = tl.minimum(tl.maximum(b, 0.0), largest)
    summed_for = -1
    if FILTER == 1:
        if scale_y >= 1:  # the resize shrinks the image
            summed_for = y + 1
    return r, g, b, (summed_for, line_index, next_weight_sum_y, next_r, next_g, next_b)
