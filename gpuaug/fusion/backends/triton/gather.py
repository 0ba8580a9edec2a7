"""Triton kernel of a gather of images. One thread block computes a tile of one sample, from reading to storing.

Properties of the pipeline are compile-time constants. Sizes of batches and images are not, so that the last batch of an epoch,
or images of another size, compile nothing.
"""

import triton
import triton.language as tl

from gpuaug.fusion.backends.triton.pixel_math import (
    as_16_bits,
    as_pairs,
    byte_share,
    grey_of,
    pack_words,
    share_of_65535,
    stored_as,
    tile_pixels,
    words_of_16_bits,
)
from gpuaug.fusion.backends.triton.points import points
from gpuaug.fusion.backends.triton.second_pass import mean_of
from gpuaug.fusion.backends.triton.taps import (
    antialiased_line,
    blend_fill,
    buffers,
    first_neighbour,
    half_to_even,
    interpolate_neighbours,
    interpolate_taps,
    load_resize,
    load_tap,
    map_index,
    resize_coordinates,
    source_coordinates,
    tap_axis,
    weight_inside,
    weight_sum,
)

SIZES = ("images", "out_height", "out_width", "tiles_x", "row_stride", "tiles", "blocks")
STRIDES = ("source_b", "source_c", "source_h", "out_b", "out_c", "out_h")


@triton.jit
def load_fill(fill, plane, RGB: tl.constexpr):
    """Load the fill of each channel from ``fill`` on; without ``RGB``, the fill of ``plane`` three times."""
    r = tl.load(fill + plane)
    if RGB:
        return r, tl.load(fill + 1), tl.load(fill + 2)
    return r, r, r


@triton.jit
def to_unit_range(r, g, b, SCALE: tl.constexpr, EXACT: tl.constexpr):
    """Divide integers up to ``SCALE``, 255 or 65535, by ``SCALE``. ``EXACT``: without a rounding error."""
    if SCALE == 65535:
        return share_of_65535(r * (1 / 65536)), share_of_65535(g * (1 / 65536)), share_of_65535(b * (1 / 65536))
    if EXACT:
        # Skipped samples must not change.
        return byte_share(r), byte_share(g), byte_share(b)
    return r * (1 / 255), g * (1 / 255), b * (1 / 255)


@triton.jit
def fill_padding(r, g, b, inside, fill, plane, RGB: tl.constexpr):
    """Return the pixels that are ``inside``, and the fill elsewhere."""
    fill_r, fill_g, fill_b = load_fill(fill, plane, RGB)
    return tl.where(inside, r, fill_r), tl.where(inside, g, fill_g), tl.where(inside, b, fill_b)


@triton.jit
def interpolated(
    pointer, x, y, row, plane_stride, line_stride, plane, fill_r, fill_g, fill_b, SOURCE_W: tl.constexpr, PAIRS: tl.constexpr,
    SCALE: tl.constexpr, EXACT: tl.constexpr, RGB: tl.constexpr, KIND: tl.constexpr,
    HALF_PIXEL: tl.constexpr, NEAREST: tl.constexpr, ZEROS: tl.constexpr, WARP_AT: tl.constexpr, WARP_FILL: tl.constexpr,
    BEFORE: tl.constexpr,
):  # fmt: skip
    """Return the interpolated pixels of a tile, (r, g, b); without ``RGB``, one channel three times.

    ``x``, ``y``: coordinates in the output of the interpolation. Constants: see ``gather_kernel``.
    """
    before = row + BEFORE[1]
    not_padding = x == x
    green = pointer + plane_stride
    blue = green + plane_stride
    if KIND == 0:
        not_padding_x = x == x
        not_padding_y = y == y
        if BEFORE[0] > 0:
            x, not_padding_x = map_index(x, before, 0, BEFORE[0])
            y, not_padding_y = map_index(y, before, 1, BEFORE[0])
        offset = (y * line_stride + x * SOURCE_W).to(tl.uint32)
        not_padding = not_padding_x & not_padding_y
        r = load_tap(pointer, offset, not_padding, not_padding, fill_r, SCALE, False, BEFORE[0])
        g = load_tap(green, offset, not_padding, not_padding, fill_g, SCALE, False, BEFORE[0]) if RGB else r
        b = load_tap(blue, offset, not_padding, not_padding, fill_b, SCALE, False, BEFORE[0]) if RGB else r
    else:
        at_x, at_y, start_x, count_x, start_y, count_y = source_coordinates(x, y, row + WARP_AT, KIND, HALF_PIXEL, NEAREST)
        if NEAREST:
            if KIND == 1:
                left = tl.floor(at_x).to(tl.int32)
                top = tl.floor(at_y).to(tl.int32)
            else:
                left = half_to_even(at_x)
                top = half_to_even(at_y)
            px, in_window_x, not_padding_x = tap_axis(left, start_x, count_x, before, 0, ZEROS, BEFORE[0])
            py, in_window_y, not_padding_y = tap_axis(top, start_y, count_y, before, 1, ZEROS, BEFORE[0])
            offset = (py * line_stride + px * SOURCE_W).to(tl.uint32)
            in_window = in_window_x & in_window_y
            not_padding = not_padding_x & not_padding_y
            r = load_tap(pointer, offset, in_window, not_padding, fill_r, SCALE, ZEROS, BEFORE[0])
            g = load_tap(green, offset, in_window, not_padding, fill_g, SCALE, ZEROS, BEFORE[0]) if RGB else r
            b = load_tap(blue, offset, in_window, not_padding, fill_b, SCALE, ZEROS, BEFORE[0]) if RGB else r
        elif PAIRS:
            left, right = first_neighbour(at_x, start_x, count_x, HALF_PIXEL)
            top, lower = first_neighbour(at_y, start_y, count_y, HALF_PIXEL)
            # Unsigned, so that adding the offset to a pointer needs no sign extension.
            offset = ((start_y + top) * line_stride + (start_x + left) * SOURCE_W).to(tl.uint32)
            r = interpolate_neighbours(pointer, offset, right, lower, line_stride, SOURCE_W, SCALE)
            g = interpolate_neighbours(green, offset, right, lower, line_stride, SOURCE_W, SCALE) if RGB else r
            b = interpolate_neighbours(blue, offset, right, lower, line_stride, SOURCE_W, SCALE) if RGB else r
        else:
            floor_x = tl.floor(at_x)
            floor_y = tl.floor(at_y)
            right = at_x - floor_x
            lower = at_y - floor_y
            left = floor_x.to(tl.int32)
            top = floor_y.to(tl.int32)
            x0, in_window_x0, not_padding_x0 = tap_axis(left, start_x, count_x, before, 0, ZEROS, BEFORE[0])
            x1, in_window_x1, not_padding_x1 = tap_axis(left + 1, start_x, count_x, before, 0, ZEROS, BEFORE[0])
            y0, in_window_y0, not_padding_y0 = tap_axis(top, start_y, count_y, before, 1, ZEROS, BEFORE[0])
            y1, in_window_y1, not_padding_y1 = tap_axis(top + 1, start_y, count_y, before, 1, ZEROS, BEFORE[0])
            x0 *= SOURCE_W
            x1 *= SOURCE_W
            y0 *= line_stride
            y1 *= line_stride
            o00 = (y0 + x0).to(tl.uint32)
            o10 = (y0 + x1).to(tl.uint32)
            o01 = (y1 + x0).to(tl.uint32)
            o11 = (y1 + x1).to(tl.uint32)
            f00 = in_window_x0 & in_window_y0
            f10 = in_window_x1 & in_window_y0
            f01 = in_window_x0 & in_window_y1
            f11 = in_window_x1 & in_window_y1
            w00 = not_padding_x0 & not_padding_y0
            w10 = not_padding_x1 & not_padding_y0
            w01 = not_padding_x0 & not_padding_y1
            w11 = not_padding_x1 & not_padding_y1
            r = interpolate_taps(
                pointer, o00, o10, o01, o11, f00, f10, f01, f11, w00, w10, w01, w11, right, lower, fill_r,
                SCALE, ZEROS, BEFORE[0],
            )  # fmt: skip
            g = r
            b = r
            if RGB:
                g = interpolate_taps(
                    green, o00, o10, o01, o11, f00, f10, f01, f11, w00, w10, w01, w11, right, lower, fill_g,
                    SCALE, ZEROS, BEFORE[0],
                )  # fmt: skip
                b = interpolate_taps(
                    blue, o00, o10, o01, o11, f00, f10, f01, f11, w00, w10, w01, w11, right, lower, fill_b,
                    SCALE, ZEROS, BEFORE[0],
                )  # fmt: skip
    if SCALE:
        r, g, b = to_unit_range(r, g, b, SCALE, EXACT)
    if WARP_FILL >= 0:
        inside_share = weight_inside(at_x, count_x, NEAREST) * weight_inside(at_y, count_y, NEAREST)
        warp_r, warp_g, warp_b = load_fill(row + WARP_FILL, plane, RGB)
        r, g, b = blend_fill(r, inside_share, warp_r), blend_fill(g, inside_share, warp_g), blend_fill(b, inside_share, warp_b)
    if KIND == 0 and BEFORE[0] == 2:
        r, g, b = tl.where(not_padding, r, fill_r), tl.where(not_padding, g, fill_g), tl.where(not_padding, b, fill_b)
    return r, g, b


@triton.jit
def finish_tile(
    r, g, b, left, top, x, y, sample, plane, height, width, row, mean, kept, out, out_c, out_h,
    PROGRAM: tl.constexpr, COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr,
    REDUCE: tl.constexpr, KEEP: tl.constexpr, WIDTH: tl.constexpr, PIXELS: tl.constexpr, WHOLE: tl.constexpr,
    WORDS: tl.constexpr, OUT_W: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
):  # fmt: skip
    """Run the pointwise ops on the pixels of a tile, which begins at (``left``, ``top``), and store them.

    With ``REDUCE`` the program ends before the contrast: return the grey of each pixel, and with ``KEEP`` store the pixels in
    ``kept``. With ``WORDS`` pixels are ``PAIRED``, and stored in words of 32 bits: kept pixels as two values of one channel per
    word, output pixels as three words per pair.
    """
    in_bounds = (x < width) & (y < height)
    if WHOLE:
        in_bounds = x == x
    r, g, b = points(r, g, b, x, y, sample, plane, height, width, row, mean, PROGRAM, COUNT, CHANNELS, RGB)
    grey = tl.zeros(in_bounds.shape, tl.float32)
    if REDUCE:
        # The last op is the jitter, whose flags select the weights of grey.
        grey = tl.where(in_bounds, grey_of(r, g, b, PROGRAM[COUNT - 1][2]) if RGB else r, 0.0)
        if KEEP:
            line = WIDTH if WIDTH > 0 else width
            pixels = PIXELS if PIXELS > 0 else height * width
            if WORDS:  # x, y and the mask of pairs
                x, y = tile_pixels(left // 2, top, TILE_H, TILE_W // 2, False)
                in_bounds = (x == x) if WHOLE else (2 * x < width) & (y < height)
                line = line // 2
                pixels = pixels // 2
                kept = kept.to(tl.pointer_type(tl.int32))
                r, g, b = words_of_16_bits(r), words_of_16_bits(g), words_of_16_bits(b)
            else:
                r, g, b = as_16_bits(r), as_16_bits(g), as_16_bits(b)
            address = kept + (y * line + x).to(tl.uint32)
            tl.store(address, r, mask=in_bounds)
            tl.store(address + pixels, g, mask=in_bounds)
            tl.store(address + 2 * pixels, b, mask=in_bounds)
    elif WORDS:
        packed = pack_words(as_pairs(r), as_pairs(g), as_pairs(b), out.dtype.element_ty)
        # Three words per pair, and a fourth that is not stored, so that neighbouring threads store neighbouring words.
        word, line = tile_pixels(left // 2 * 4, top, TILE_H, TILE_W * 2, False)
        offset = word // 4 * 3 + word % 4
        inside = word % 4 < 3
        if not WHOLE:
            inside = inside & (word < width * 2) & (line < height)
        target = out.to(tl.pointer_type(tl.int32)) + line * (out_h // 2) + offset
        tl.store(target, tl.ravel(packed), mask=inside)
    else:
        pixel = out + y * out_h + x * OUT_W
        tl.store(pixel, stored_as(r, out.dtype.element_ty), mask=in_bounds)
        if RGB:
            tl.store(pixel + out_c, stored_as(g, out.dtype.element_ty), mask=in_bounds)
            tl.store(pixel + 2 * out_c, stored_as(b, out.dtype.element_ty), mask=in_bounds)
    return grey


# If Triton knew the alignment of ``kept``, it would assign several pixels of a line to a thread, which slows reads.
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
    """Compute the tiles of a gather pass; with ``REDUCE``, only the sums of grey for the mean of a contrast.

    Constants, in addition to the constants of ``launch.py``:
        RAGGED: 0 if all images have one size. Otherwise ``places`` (``Ragged.places``) has the offset and size of each. The
            images are planes (1), have adjacent channels (2), or have adjacent channels and only a window in memory (3).
        REPEATS: Whether there are more samples than ``images``, because each image is the source of one sample per view;
            samples per row of the table (frames of a clip); first column of the indices of the selected frames, or -1; frames
            per source clip.
        SOURCE, WIDTH, PIXELS: Strides (of channels, of lines) of the source, and width and number of pixels of the output, if
            they are compiled in; else 0.
        WHOLE: Whether tiles of ``TILE`` (height, width) cover the output exactly.
        SCALE: 255 for bytes, 65535 for 16-bit values, 0 for floats.
        EXACT: Whether bytes are divided without a rounding error.
        KIND, HALF_PIXEL, NEAREST: Type of the interpolation (``_KINDS`` in ``backend.py``), and its options.
        PAIRS: Whether both neighbours along x are read through one address (``first_neighbour``).
        ZEROS: Whether pixels outside the image are 0 in a warp.
        WARP_AT, WARP_FILL: First column of the interpolation, and of the fill of a warp, or -1.
        BEFORE, AFTER: Permutations before and after the interpolation: padding mode or 0, first column, column of the fill.
        ANTIALIAS: Filter or 0; and largest value of the source, to which results are clamped, or 0. With a filter, a block is
            one warp and computes its lines one after another, so that each source line is weighted once for all of them.
        SIDES: First column of height and width of the output image, if images differ in size after the pass, and lie at the top
            left of (``out_height``, ``out_width``); or -1.
        REDUCE: Column of the apply mask of the contrast; -1 to store output pixels.
        WAY: Column of the buffer route (``buffers`` in ``taps.py``), or -1.
        KEEP: Whether a reduction also stores the pixels before the contrast in ``kept``, in 16 bits per value.
        PARTIALS: Number of sums per sample to add, rounded up to a power of two; or 0.

    ``partial`` holds ``blocks`` sums per sample, plane by plane.

    Grid: (tiles per image, samples, planes; with ``RGB`` one plane).
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
        layout = places + (4 if RAGGED == 3 else 3) * image.to(tl.int64)
        pitch = tl.load(layout + (3 if RAGGED == 3 else 2)).to(tl.int32)
        source_h = pitch * SOURCE_W
        source_c = 1
        if RAGGED == 1:
            source_c = tl.load(layout + 1).to(tl.int32) * pitch
        pointer = source + tl.load(layout) + plane * source_c
    else:
        pointer = source + image.to(tl.int64) * source_b + plane * source_c
    # Compiled-in strides are part of the load instruction, which saves 64-bit additions.
    plane_stride = SOURCE[0] if SOURCE[0] > 0 else source_c
    line_stride = SOURCE[1] if SOURCE[1] > 0 else source_h
    fill_r = 0.0
    fill_g = 0.0
    fill_b = 0.0
    if BEFORE[0] == 2:
        fill_r, fill_g, fill_b = load_fill(row + BEFORE[2], plane, RGB)
        if SCALE and KIND > 0:
            fill_r, fill_g, fill_b = fill_r * SCALE, fill_g * SCALE, fill_b * SCALE
    SUMS: tl.constexpr = REDUCE >= 0
    if SUMS and not KEEP:
        if tl.load(row + REDUCE) == 0:
            tl.store(partial + sample * blocks + plane * tiles + tile, 0.0)  # unused, but all sums are read
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
    top = (tile // tiles_x) * TILE[0]
    left = (tile % tiles_x) * TILE[1]
    if SIDES >= 0:
        if (left >= width) | (top >= height):
            if SUMS:
                tl.store(partial + sample * blocks + plane * tiles + tile, 0.0)
            return
    x, y = tile_pixels(left, top, TILE[0] if ANTIALIAS[0] == 0 else 1, TILE[1], WORDS)
    read_x = x if WHOLE else tl.minimum(x, width - 1)
    inside_x = x == x
    if AFTER[0] > 0:
        read_x, inside_x = map_index(read_x, row + AFTER[1], 0, AFTER[0])
    if ANTIALIAS[0] == 0:
        read_y = y if WHOLE else tl.minimum(y, height - 1)
        inside_y = y == y
        if AFTER[0] > 0:
            read_y, inside_y = map_index(read_y, row + AFTER[1], 1, AFTER[0])
        r, g, b = interpolated(
            pointer, read_x, read_y, row, plane_stride, line_stride, plane, fill_r, fill_g, fill_b, SOURCE_W, PAIRS,
            SCALE, EXACT, RGB, KIND, HALF_PIXEL, NEAREST, ZEROS, WARP_AT, WARP_FILL, BEFORE,
        )  # fmt: skip
        if AFTER[0] == 2:
            r, g, b = fill_padding(r, g, b, inside_x & inside_y, row + AFTER[2], plane, RGB)
        total = finish_tile(
            r, g, b, left, top, x, y, sample, plane, height, width, row, mean, kept, out, out_c, out_h,
            PROGRAM, COUNT, CHANNELS, RGB, SUMS, KEEP, WIDTH, PIXELS, WHOLE, WORDS, OUT_W, TILE[0], TILE[1],
        )  # fmt: skip
    else:
        end = tl.minimum(top + TILE[0], height)
        scale_x, start_x, count_x = load_resize(row + WARP_AT)
        at_x = resize_coordinates(read_x, scale_x, HALF_PIXEL, False)
        columns = at_x, scale_x, start_x, count_x, tl.div_rn(1.0, weight_sum(at_x, scale_x, count_x, ANTIALIAS[0]))
        lines = load_resize(row + WARP_AT + 3)
        zeros = at_x * 0.0
        total = zeros
        state = (-1, 0, 0.0, zeros, zeros, zeros)
        while top < end:
            y = top
            inside_y = y == y
            if AFTER[0] > 0:
                y, inside_y = map_index(y, row + AFTER[1], 1, AFTER[0])
            r, g, b, state = antialiased_line(
                pointer, y, state, columns, lines, row + BEFORE[1], line_stride, plane_stride, fill_r, fill_g, fill_b,
                HALF_PIXEL, SOURCE_W, RGB, SCALE, BEFORE[0], ANTIALIAS[0], ANTIALIAS[1],
            )  # fmt: skip
            if SCALE:
                r, g, b = to_unit_range(r, g, b, SCALE, EXACT)
            if AFTER[0] == 2:
                r, g, b = fill_padding(r, g, b, (inside_x & inside_y) != 0, row + AFTER[2], plane, RGB)
            y = top + tl.zeros(x.shape, tl.int32)
            total += finish_tile(
                r, g, b, left, top, x, y, sample, plane, height, width, row, mean, kept, out, out_c, out_h,
                PROGRAM, COUNT, CHANNELS, RGB, SUMS, KEEP, WIDTH, PIXELS, WHOLE, WORDS, OUT_W, 1, TILE[1],
            )  # fmt: skip
            top += 1
    if SUMS:
        tl.store(partial + sample * blocks + plane * tiles + tile, tl.sum(total))
