"""Triton kernel of a gather pass: it moves or interpolates pixels, and runs pointwise ops on them.

One thread block computes a tile of one sample, from reading to storing. Coordinates go from the output to the source:

    output pixel (x, y) ──► index map after ──► interpolation: a resize or a warp ──► index map before ──► taps in the source
                            (``MAP_AFTER``)     (``INTERPOLATION``)                   (``MAP_BEFORE``)

Values go the other way: ``interpolate`` returns the interpolated pixels, ``finish_tile`` runs the pointwise ops and stores the
result. *After* and *before* are in the order of the pipeline. A *warp* is an affine or perspective interpolation. ``taps.py``
defines index map, tap, window and padding.

Properties of the pipeline are compile-time constants. The size of the batch is an argument, so that the last batch of an epoch
compiles nothing. Sizes of images are arguments, too, except in the cases in which ``SOURCE_STRIDES``, ``WIDTH`` and ``PIXELS``
are compiled in.

Names:

- ``sample``: index of an output image; frames of clips are images. ``image``: index of its source image.
- ``row``: address of the row of the parameter table for the sample, or for the clip that the frame belongs to.
- ``plane``: index of the channel that the block computes. With ``RGB``, images have three channels, a block computes all of
  them, and ``plane`` is 0.
- ``r``, ``g``, ``b``: three channels with ``RGB``; otherwise ``r`` is channel ``plane``, and ``g`` and ``b`` are not stored.
- suffixes ``_b``, ``_c``, ``_h`` and ``_W``: strides, in elements, of the axes batch, channel, line (row of pixels) and x.
"""

import triton
import triton.language as tl

from gpuaug.fusion.backends.triton.contrast import load_mean
from gpuaug.fusion.backends.triton.launch import kernel
from gpuaug.fusion.backends.triton.pixel_math import (
    as_16_bits,
    as_float,
    as_pairs,
    div_by_255,
    fixed_point,
    grey_of,
    pack_words,
    store_channels,
    tile_pixels,
    to_units_of_65535,
    words_of_16_bits,
)
from gpuaug.fusion.backends.triton.points import apply_point_ops, load_channels
from gpuaug.fusion.backends.triton.taps import (
    antialiased_line,
    bilinear,
    blend_fill,
    first_neighbour,
    load_resize,
    load_tap,
    map_index,
    nearest_index,
    resize_coordinates,
    select_buffers,
    source_coordinates,
    tap_at,
    tap_axis,
    weight_inside,
    weight_sum,
)


@triton.jit
def to_unit_range(r, g, b, MAX_VALUE: tl.constexpr, EXACT_DIVISION: tl.constexpr):
    """Divide by ``MAX_VALUE``, 255 or 65535. ``EXACT_DIVISION``: round the quotients of bytes correctly."""
    if MAX_VALUE == 65535:
        # The quotients by 65536 are exact; ``to_units_of_65535`` multiplies them by 65536 / 65535.
        return to_units_of_65535(r * (1 / 65536)), to_units_of_65535(g * (1 / 65536)), to_units_of_65535(b * (1 / 65536))
    if EXACT_DIVISION:
        # Bytes that are only copied must be equal to the quotients of torch, bit for bit.
        return div_by_255(r), div_by_255(g), div_by_255(b)
    return r * (1 / 255), g * (1 / 255), b * (1 / 255)


@triton.jit
def fill_padding(r, g, b, inside, fill_address, plane, RGB: tl.constexpr):
    """Return the pixels where ``inside`` is true, and elsewhere the fill values, from ``fill_address`` on."""
    fill_r, fill_g, fill_b = load_channels(fill_address, plane, RGB)
    return tl.where(inside, r, fill_r), tl.where(inside, g, fill_g), tl.where(inside, b, fill_b)


@triton.jit
def interpolate(
    plane_address, x, y, row, plane_stride, line_stride, plane, fill_r, fill_g, fill_b, SOURCE_W: tl.constexpr,
    ADJACENT_TAPS: tl.constexpr, MAX_VALUE: tl.constexpr, EXACT_DIVISION: tl.constexpr, RGB: tl.constexpr,
    INTERPOLATION: tl.constexpr, HALF_PIXEL: tl.constexpr, NEAREST: tl.constexpr, ZEROS: tl.constexpr,
    WARP_COLUMN: tl.constexpr, WARP_FILL_COLUMN: tl.constexpr, MAP_BEFORE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Return the interpolated pixels of a tile, (r, g, b) in [0, 1]; without ``RGB``, one channel three times.

    The loop over channels first reads and interpolates in the unit of the source. ``to_unit_range`` then converts integers.

    ``plane_address``: address of channel ``plane`` of the source image. ``x``, ``y``: coordinates of the output pixels of the
    interpolation, (tile pixels,) int32. ``plane_stride``, ``line_stride``: elements between channels and between lines.
    ``fill_r``, ``fill_g``, ``fill_b``: fill of the padding of ``MAP_BEFORE``, in the unit of the source: 0 to ``MAX_VALUE``.
    Constants: see ``gather_kernel``; ``ROUNDS`` is ``RESIZE[2]``.

    The four taps of a pixel and their values, where the first digit is x and the second is y:

        t00 ── t10      (left_index, top_index) is t00. ``weight_x``, from 0 at t00 to 1 at t10, and ``weight_y``, from 0 at
         │      │       t00 to 1 at t01, are the position of the pixel between the taps. The nearest pixel is t00, without
        t01 ── t11      weights.
    """
    map_before = row + MAP_BEFORE[1]
    if INTERPOLATION == 0:
        not_padding_x = x == x  # true, in the shape of x
        not_padding_y = y == y
        if MAP_BEFORE[0] > 0:
            x, not_padding_x = map_index(x, map_before, 0, MAP_BEFORE[0])
            y, not_padding_y = map_index(y, map_before, 1, MAP_BEFORE[0])
        # Arguments of ``tap_at`` are (index, in the window, not padding). Without interpolation there is no window. Constant
        # padding is passed as outside of the window, so that it is not read. It is filled below, after ``to_unit_range``.
        t00 = tap_at((x, not_padding_x, not_padding_x), (y, not_padding_y, not_padding_y), line_stride, SOURCE_W)
    else:
        source_x, source_y, start_x, count_x, start_y, count_y = source_coordinates(
            x, y, row + WARP_COLUMN, INTERPOLATION, HALF_PIXEL, NEAREST
        )
        if NEAREST:
            left_index = nearest_index(source_x, INTERPOLATION)
            top_index = nearest_index(source_y, INTERPOLATION)
        elif ADJACENT_TAPS:
            left_index, weight_x = first_neighbour(source_x, start_x, count_x, HALF_PIXEL)
            top_index, weight_y = first_neighbour(source_y, start_y, count_y, HALF_PIXEL)
            # Unsigned, so that adding the offset to a pointer needs no sign extension.
            top_left_offset = ((start_y + top_index) * line_stride + (start_x + left_index) * SOURCE_W).to(tl.uint32)
        else:
            floor_x = tl.floor(source_x)
            floor_y = tl.floor(source_y)
            weight_x = source_x - floor_x
            weight_y = source_y - floor_y
            left_index = floor_x.to(tl.int32)
            top_index = floor_y.to(tl.int32)
        if ROUNDS:
            weight_x = fixed_point(weight_x, tl.load(row + WARP_COLUMN))
            weight_y = fixed_point(weight_y, tl.load(row + WARP_COLUMN + 3))
        if not ADJACENT_TAPS:
            x0 = tap_axis(left_index, start_x, count_x, map_before, 0, ZEROS, MAP_BEFORE[0])
            y0 = tap_axis(top_index, start_y, count_y, map_before, 1, ZEROS, MAP_BEFORE[0])
            t00 = tap_at(x0, y0, line_stride, SOURCE_W)
            if not NEAREST:
                x1 = tap_axis(left_index + 1, start_x, count_x, map_before, 0, ZEROS, MAP_BEFORE[0])
                y1 = tap_axis(top_index + 1, start_y, count_y, map_before, 1, ZEROS, MAP_BEFORE[0])
                t10 = tap_at(x1, y0, line_stride, SOURCE_W)
                t01, t11 = tap_at(x0, y1, line_stride, SOURCE_W), tap_at(x1, y1, line_stride, SOURCE_W)
    for channel in tl.static_range(3 if RGB else 1):
        fill = fill_r if channel == 0 else (fill_g if channel == 1 else fill_b)
        if INTERPOLATION == 0 or NEAREST:
            value = load_tap(plane_address, t00, fill, MAX_VALUE, ZEROS, MAP_BEFORE[0])
        else:
            if ADJACENT_TAPS:
                v00 = as_float(tl.load(plane_address + top_left_offset), MAX_VALUE)
                v10 = as_float(tl.load(plane_address + SOURCE_W + top_left_offset), MAX_VALUE)
                v01 = as_float(tl.load(plane_address + line_stride + top_left_offset), MAX_VALUE)
                v11 = as_float(tl.load(plane_address + line_stride + SOURCE_W + top_left_offset), MAX_VALUE)
            else:
                v00 = load_tap(plane_address, t00, fill, MAX_VALUE, ZEROS, MAP_BEFORE[0])
                v10 = load_tap(plane_address, t10, fill, MAX_VALUE, ZEROS, MAP_BEFORE[0])
                v01 = load_tap(plane_address, t01, fill, MAX_VALUE, ZEROS, MAP_BEFORE[0])
                v11 = load_tap(plane_address, t11, fill, MAX_VALUE, ZEROS, MAP_BEFORE[0])
            value = bilinear(v00, v10, v01, v11, weight_x, weight_y, MAX_VALUE, ROUNDS)
        if channel == 0:
            r = value
            g = value
        elif channel == 1:
            g = value
        b = value
        plane_address += plane_stride
    if MAX_VALUE:
        r, g, b = to_unit_range(r, g, b, MAX_VALUE, EXACT_DIVISION)
    if WARP_FILL_COLUMN >= 0:
        inside_weight = weight_inside(source_x, count_x, NEAREST) * weight_inside(source_y, count_y, NEAREST)
        warp_r, warp_g, warp_b = load_channels(row + WARP_FILL_COLUMN, plane, RGB)
        r = blend_fill(r, inside_weight, warp_r)
        g = blend_fill(g, inside_weight, warp_g)
        b = blend_fill(b, inside_weight, warp_b)
    if INTERPOLATION == 0 and MAP_BEFORE[0] == 2:
        not_padding = t00[2]
        r, g, b = tl.where(not_padding, r, fill_r), tl.where(not_padding, g, fill_g), tl.where(not_padding, b, fill_b)
    return r, g, b


@triton.jit
def finish_tile(
    r, g, b, left, top, x, y, sample, plane, height, width, row, mean, saved_pixels, out, out_c, out_h,
    PROGRAM: tl.constexpr, OP_COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr,
    SUMS_GREY: tl.constexpr, SAVE_PIXELS: tl.constexpr, WIDTH: tl.constexpr, PIXELS: tl.constexpr, FULL_TILES: tl.constexpr,
    WORDS: tl.constexpr, OUT_W: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
):  # fmt: skip
    """Run the pointwise ops on the pixels of a tile, and store the pixels in ``out``. Return 0, or grey with ``SUMS_GREY``.

    ``r``, ``g``, ``b``: pixels in [0, 1], (tile pixels,). ``left``, ``top``: position of the tile in the output image. ``x``,
    ``y``: coordinates of the pixels in the output image. ``height``, ``width``: size of the output image. ``mean``: mean grey
    of the sample, for a contrast. ``saved_pixels``, ``out``: addresses of the sample's pixels.

    With ``SUMS_GREY``, the last op of ``PROGRAM`` is a color jitter. Only its adjustments before the contrast run, because the
    contrast needs the mean of their result: a second launch, with ``SUM_COUNT``, continues from there. The grey value of each
    pixel is returned, nothing is stored in ``out``, and with ``SAVE_PIXELS`` the pixels are stored in ``saved_pixels``, three
    planes of 16-bit values.

    With ``WORDS``, pixels are ``PAIRED`` (``tile_pixels``), and stored in words of 32 bits, each with two values of 16 bits:

        pair of output pixels, channels adjacent    [r0 g0] [b0 r1] [g1 b1]
        pair of saved pixels, channels in planes    [r0 r1] … [g0 g1] … [b0 b1]
    """
    in_bounds = (x < width) & (y < height)
    if FULL_TILES:
        in_bounds = x == x  # true, in the shape of x
    r, g, b = apply_point_ops(r, g, b, x, y, sample, plane, width, row, mean, PROGRAM, OP_COUNT, CHANNELS, RGB)
    grey = tl.zeros(in_bounds.shape, tl.float32)
    if SUMS_GREY:
        # The flags of the color jitter, the last op, select the weights of grey.
        grey = tl.where(in_bounds, grey_of(r, g, b, PROGRAM[OP_COUNT - 1][2]) if RGB else r, 0.0)
        if SAVE_PIXELS:
            line_stride = WIDTH if WIDTH > 0 else width
            plane_stride = PIXELS if PIXELS > 0 else height * width
            if WORDS:  # from here on, x, y and the mask are per pair of pixels
                x, y = tile_pixels(left // 2, top, TILE_H, TILE_W // 2, False)
                in_bounds = (x == x) if FULL_TILES else (2 * x < width) & (y < height)
                line_stride = line_stride // 2
                plane_stride = plane_stride // 2
                saved_pixels = saved_pixels.to(tl.pointer_type(tl.int32))
                r, g, b = words_of_16_bits(r), words_of_16_bits(g), words_of_16_bits(b)
            else:
                r, g, b = as_16_bits(r), as_16_bits(g), as_16_bits(b)
            address = saved_pixels + (y * line_stride + x).to(tl.uint32)
            tl.store(address, r, mask=in_bounds)
            tl.store(address + plane_stride, g, mask=in_bounds)
            tl.store(address + 2 * plane_stride, b, mask=in_bounds)
    elif WORDS:
        packed = pack_words(as_pairs(r), as_pairs(g), as_pairs(b), out.dtype.element_ty)
        # ``pack_words`` returns three words per pair, and a fourth that is not stored, so that neighbouring threads store
        # neighbouring words. ``word`` counts all four from the left side of the image.
        word, line = tile_pixels(left // 2 * 4, top, TILE_H, TILE_W * 2, False)
        word_offset = word // 4 * 3 + word % 4
        is_stored = word % 4 < 3
        if not FULL_TILES:
            is_stored = is_stored & (word < width * 2) & (line < height)
        # ``out_h`` counts values of 16 bits.
        address_of_words = out.to(tl.pointer_type(tl.int32)) + line * (out_h // 2) + word_offset
        tl.store(address_of_words, tl.ravel(packed), mask=is_stored)
    else:
        pixel = out + y * out_h + x * OUT_W
        store_channels(pixel, out_c, r, g, b, in_bounds, RGB)
    return grey


# Unlike ``triton.jit``, ``kernel`` compiles no separate version for aligned addresses, in which Triton would assign several
# pixels of a line to a thread, which slows reads.
@kernel
def gather_kernel(
    source, image_layouts, out, param_table, block_sums, saved_pixels, image_count, out_height, out_width, tiles_across,
    row_stride, tiles, blocks, source_b, source_c, source_h, out_b, out_c, out_h,
    RAGGED_LAYOUT: tl.constexpr, VIEWS_AND_FRAMES: tl.constexpr,
    SOURCE_STRIDES: tl.constexpr, SOURCE_W: tl.constexpr, ADJACENT_TAPS: tl.constexpr, RESIZE: tl.constexpr,
    WIDTH: tl.constexpr, PIXELS: tl.constexpr, FULL_TILES: tl.constexpr, WORDS: tl.constexpr, OUT_W: tl.constexpr,
    PROGRAM: tl.constexpr, OP_COUNT: tl.constexpr, CHANNELS: tl.constexpr, MAX_VALUE: tl.constexpr,
    EXACT_DIVISION: tl.constexpr, OUT_SIZE_COLUMN: tl.constexpr, INTERPOLATION: tl.constexpr,
    HALF_PIXEL: tl.constexpr, NEAREST: tl.constexpr, ZEROS: tl.constexpr,
    MAP_AFTER: tl.constexpr, WARP_COLUMN: tl.constexpr, WARP_FILL_COLUMN: tl.constexpr, MAP_BEFORE: tl.constexpr,
    TILE: tl.constexpr, CONTRAST_COLUMN: tl.constexpr, SAVE_PIXELS: tl.constexpr, SUM_COUNT: tl.constexpr,
    ROUTE_COLUMN: tl.constexpr,
):  # fmt: skip
    """Compute the tiles of a gather pass; with ``CONTRAST_COLUMN``, only the sums of grey for the mean of a contrast.

    Tensors, by their address:
        source: Source images.
        image_layouts: Layout of images of different sizes, see ``RAGGED_LAYOUT``.
        out: Output images, (samples, ``CHANNELS``, ``out_height``, ``out_width``).
        param_table: Parameter table, one row of ``row_stride`` elements per sample or clip.
        block_sums: Sums of grey values, (samples, ``blocks``), one per tile of each plane.
        saved_pixels: Pixels before a contrast, (samples, 3, ``out_height``, ``out_width``), see ``SAVE_PIXELS``.

    Integers, in addition to sizes and strides:
        image_count: Number of source images.
        tiles_across, tiles: Number of tiles of an output image along x, and in all.
        blocks: Number of thread blocks per sample, and of its sums of grey; 0 without a mean.

    Constants, in addition to ``output_constants`` of ``launch.py``:
        RAGGED_LAYOUT: 0 if all images have one size. Otherwise ``image_layouts`` (``Ragged.places``) has the offset, height,
            width and, for 3, row pitch of each image. 1: channels are planes; 2: the channels of a pixel are adjacent; 3: they
            are adjacent, and only a window of each image is in memory.
        VIEWS_AND_FRAMES: (``HAS_VIEWS``, whether an image is the source of several samples, its views; ``FRAMES``, number of
            frames per output clip, which share a row of the table, or 1 for images; ``FRAMES_COLUMN``, first column of the
            indices of the selected frames, or -1; ``SOURCE_FRAMES``, number of frames per source clip, or 1 for images).
        SOURCE_STRIDES, WIDTH, PIXELS: Strides (of channels, of lines) of the source, and width and number of pixels of the
            output, if they are compiled in; else 0.
        TILE: (height, width) of a tile.
        FULL_TILES: Whether tiles cover the output exactly, so that no pixel of a tile is outside.
        WORDS: Whether pixels are stored in words of 32 bits (``finish_tile``).
        MAX_VALUE: 255 for bytes, 65535 for 16-bit values, 0 for floats.
        EXACT_DIVISION: Whether the quotients of bytes by 255 are rounded correctly.
        INTERPOLATION, HALF_PIXEL, NEAREST: Type of the interpolation (0, none; 1, resize; 2, affine; 3, perspective), and its
            options.
        ADJACENT_TAPS: Whether the four taps are adjacent in the source, and read through one address (``first_neighbour``).
        ZEROS: Whether pixels outside the source are 0 in a warp; otherwise they repeat the border pixel.
        WARP_COLUMN, WARP_FILL_COLUMN: First column of the interpolation, and of the fill of a warp, or -1.
        MAP_BEFORE, MAP_AFTER: Index map before and after the interpolation: (padding mode of ``map_index``, such as 2 for a
            constant fill, or 0 without a map; first column; first column of the fill).
        RESIZE: (``FILTER``, antialiasing filter of ``filter_weight``, or 0; largest value of the source, to which results of
            the filter are clamped, or 0 without a clamp; whether a resize of bytes rounds to bytes after each axis). With a
            filter, a block is 32 threads and computes its lines one after another (``antialiased_line``).
        OUT_SIZE_COLUMN: First column of height and width of the output image, if images differ in size after the pass; or -1.
            The images then lie at the top left of buffers of (``out_height``, ``out_width``).
        CONTRAST_COLUMN: Column that is 0 for samples without the contrast whose mean is computed; -1 to store output pixels.
        SAVE_PIXELS: Whether the pixels before the contrast are also stored, in ``saved_pixels``, in 16 bits per value.
        SUM_COUNT: Number of sums per sample to add for the mean, rounded up to a power of two; 0 without a mean.
        ROUTE_COLUMN: Column that tells from which buffer to which a sample is moved, or that it is skipped
            (``select_buffers``); -1 if no sample is skipped.

    Grid: (tiles per image, samples, planes; with ``RGB`` one plane).
    """
    RGB: tl.constexpr = CHANNELS == 3
    HAS_VIEWS: tl.constexpr = VIEWS_AND_FRAMES[0]
    FRAMES: tl.constexpr = VIEWS_AND_FRAMES[1]
    FRAMES_COLUMN: tl.constexpr = VIEWS_AND_FRAMES[2]
    SOURCE_FRAMES: tl.constexpr = VIEWS_AND_FRAMES[3]
    FILTER: tl.constexpr = RESIZE[0]
    tile = tl.program_id(0)
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = param_table + sample // FRAMES * row_stride
    if ROUTE_COLUMN >= 0:
        skipped, source, out = select_buffers(row + ROUTE_COLUMN, source, source_b, out, out_b, tl.num_programs(1))
        if skipped:
            return
    image = sample
    if FRAMES_COLUMN >= 0:
        selected_frame = tl.load(row + FRAMES_COLUMN + sample % FRAMES).to(tl.int32)
        image = sample // FRAMES * SOURCE_FRAMES + selected_frame
    if HAS_VIEWS:
        image = image % image_count
    if RAGGED_LAYOUT > 0:
        layout_address = image_layouts + (4 if RAGGED_LAYOUT == 3 else 3) * image.to(tl.int64)
        pitch = tl.load(layout_address + (3 if RAGGED_LAYOUT == 3 else 2)).to(tl.int32)  # without windows, the width
        source_h = pitch * SOURCE_W
        if RAGGED_LAYOUT == 1:
            source_c = tl.load(layout_address + 1).to(tl.int32) * pitch
        pointer = source + tl.load(layout_address) + plane * source_c
    else:
        pointer = source + image.to(tl.int64) * source_b + plane * source_c
    # Compiled-in strides are part of the load instruction, which saves 64-bit additions.
    plane_stride = SOURCE_STRIDES[0] if SOURCE_STRIDES[0] > 0 else source_c
    line_stride = SOURCE_STRIDES[1] if SOURCE_STRIDES[1] > 0 else source_h
    fill_r = 0.0
    fill_g = 0.0
    fill_b = 0.0
    if MAP_BEFORE[0] == 2:
        fill_r, fill_g, fill_b = load_channels(row + MAP_BEFORE[2], plane, RGB)
        if MAX_VALUE and INTERPOLATION > 0:  # in the unit of the source
            fill_r, fill_g, fill_b = fill_r * MAX_VALUE, fill_g * MAX_VALUE, fill_b * MAX_VALUE
    SUMS_GREY: tl.constexpr = CONTRAST_COLUMN >= 0
    if SUMS_GREY and not SAVE_PIXELS:
        if tl.load(row + CONTRAST_COLUMN) == 0:
            # The sample has no contrast. Its sums are not used, but a mean is computed from them for all samples.
            tl.store(block_sums + sample * blocks + plane * tiles + tile, 0.0)
            return
    height = out_height
    width = out_width
    if OUT_SIZE_COLUMN >= 0:
        height = tl.load(row + OUT_SIZE_COLUMN).to(tl.int32)
        width = tl.load(row + OUT_SIZE_COLUMN + 1).to(tl.int32)
    mean = 0.0
    if SUM_COUNT > 0:
        mean = load_mean(block_sums, sample, blocks, height * width * (1 if RGB else CHANNELS), SUM_COUNT)
    if SAVE_PIXELS:
        saved_pixels += sample.to(tl.int64) * (3 * (PIXELS if PIXELS > 0 else out_height * out_width))
    out += sample.to(tl.int64) * out_b + plane * out_c
    top = (tile // tiles_across) * TILE[0]
    left = (tile % tiles_across) * TILE[1]
    if OUT_SIZE_COLUMN >= 0:
        # The grid covers the buffer. Blocks outside of the image have nothing to compute.
        if (left >= width) | (top >= height):
            if SUMS_GREY:
                tl.store(block_sums + sample * blocks + plane * tiles + tile, 0.0)
            return
    x, y = tile_pixels(left, top, TILE[0] if FILTER == 0 else 1, TILE[1], WORDS)
    # Coordinates before the index map are clamped, because the pixels outside of the image are computed, too, but not stored.
    gather_x = x if FULL_TILES else tl.minimum(x, width - 1)
    inside_x = x == x  # true, in the shape of x
    if MAP_AFTER[0] > 0:
        gather_x, inside_x = map_index(gather_x, row + MAP_AFTER[1], 0, MAP_AFTER[0])
    if FILTER == 0:
        gather_y = y if FULL_TILES else tl.minimum(y, height - 1)
        inside_y = y == y
        if MAP_AFTER[0] > 0:
            gather_y, inside_y = map_index(gather_y, row + MAP_AFTER[1], 1, MAP_AFTER[0])
        r, g, b = interpolate(
            pointer, gather_x, gather_y, row, plane_stride, line_stride, plane, fill_r, fill_g, fill_b, SOURCE_W, ADJACENT_TAPS,
            MAX_VALUE, EXACT_DIVISION, RGB, INTERPOLATION, HALF_PIXEL, NEAREST, ZEROS, WARP_COLUMN, WARP_FILL_COLUMN,
            MAP_BEFORE, RESIZE[2],
        )  # fmt: skip
        if MAP_AFTER[0] == 2:
            r, g, b = fill_padding(r, g, b, inside_x & inside_y, row + MAP_AFTER[2], plane, RGB)
        grey = finish_tile(
            r, g, b, left, top, x, y, sample, plane, height, width, row, mean, saved_pixels, out, out_c, out_h,
            PROGRAM, OP_COUNT, CHANNELS, RGB, SUMS_GREY, SAVE_PIXELS, WIDTH, PIXELS, FULL_TILES, WORDS, OUT_W, TILE[0], TILE[1],
        )  # fmt: skip
    else:
        end_line = tl.minimum(top + TILE[0], height)
        scale_x, start_x, count_x = load_resize(row + WARP_COLUMN)
        source_x = resize_coordinates(gather_x, scale_x, HALF_PIXEL, False)
        # Arguments of ``antialiased_line``, which describes their parts. The line state begins without sums.
        resize_x = source_x, scale_x, start_x, count_x, tl.div_rn(1.0, weight_sum(source_x, scale_x, count_x, FILTER))
        resize_y = load_resize(row + WARP_COLUMN + 3)
        zeros = source_x * 0.0
        grey = zeros
        line_state = (-1, 0, 0.0, zeros, zeros, zeros)
        while top < end_line:
            y = top  # from here on a line of the resize's output
            inside_y = y == y
            if MAP_AFTER[0] > 0:
                y, inside_y = map_index(y, row + MAP_AFTER[1], 1, MAP_AFTER[0])
            r, g, b, line_state = antialiased_line(
                pointer, y, line_state, resize_x, resize_y, row + MAP_BEFORE[1], line_stride, plane_stride,
                fill_r, fill_g, fill_b, HALF_PIXEL, SOURCE_W, RGB, MAX_VALUE, MAP_BEFORE[0], FILTER, RESIZE[1], RESIZE[2],
            )  # fmt: skip
            if MAX_VALUE:
                r, g, b = to_unit_range(r, g, b, MAX_VALUE, EXACT_DIVISION)
            if MAP_AFTER[0] == 2:  # != 0 as in ``line_sums``
                r, g, b = fill_padding(r, g, b, (inside_x & inside_y) != 0, row + MAP_AFTER[2], plane, RGB)
            y = top + tl.zeros(x.shape, tl.int32)  # again of the output image, in the shape of x
            grey += finish_tile(
                r, g, b, left, top, x, y, sample, plane, height, width, row, mean, saved_pixels, out, out_c, out_h,
                PROGRAM, OP_COUNT, CHANNELS, RGB, SUMS_GREY, SAVE_PIXELS, WIDTH, PIXELS, FULL_TILES, WORDS, OUT_W, 1, TILE[1],
            )  # fmt: skip
            top += 1
    if SUMS_GREY:
        tl.store(block_sums + sample * blocks + plane * tiles + tile, tl.sum(grey))
