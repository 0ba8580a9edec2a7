"""The second pass over images that wait for a mean: the Triton kernel that finishes pixels kept in 16 bits."""

import triton
import triton.language as tl

from gpuaug.fusion.backends.triton.pixel_math import from_16_bits, stored_as, words
from gpuaug.fusion.backends.triton.points import points


@triton.jit
def mean_of(partial, sample, blocks, pixels, PARTIALS: tl.constexpr):
    """The mean grey of a sample, from the sums of its blocks."""
    at = tl.arange(0, PARTIALS)
    return tl.sum(tl.load(partial + sample * blocks + at, mask=at < blocks, other=0.0)) / pixels


@triton.jit(
    do_not_specialize=["row_stride", "blocks", "height", "width", "out_b", "out_c"],
    do_not_specialize_on_alignment=["rows", "partial"],
)
def rest_kernel(
    kept, out, rows, partial, height, width, row_stride, blocks, out_b, out_c,
    FRAMES: tl.constexpr, PIXELS: tl.constexpr, WHOLE: tl.constexpr, WORDS: tl.constexpr, OUT_W: tl.constexpr,
    PROGRAM: tl.constexpr, COUNT: tl.constexpr, PARTIALS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The contrast and the pointwise ops after it, on what ``gather_kernel`` kept, with the mean of its sums.

    The result lies as it was kept, pixel after pixel, with planes apart (``OUT_W`` is 1) or together. ``PIXELS``: how many an
    image has where that is compiled in, else 0; ``WHOLE``, that blocks cover them with none left over; ``WORDS``, that two
    pixels are three words, which are stored as such. ``FRAMES``: images that one row serves.

    Grid: (blocks of pixels, samples).
    """
    sample = tl.program_id(1)
    row = rows + sample // FRAMES * row_stride
    pixels = PIXELS if PIXELS > 0 else height * width
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WORDS:
        # A thread takes as many pixels in a row as it can store at once: two, where it would take eight of a plane.
        index = tl.program_id(0) * BLOCK + 2 * tl.arange(0, BLOCK // 2)[:, None] + tl.arange(0, 2)[None, :]
    at = kept + sample.to(tl.int64) * (3 * pixels) + index
    live = index < pixels
    if WHOLE:
        live = index == index
    r = from_16_bits(tl.load(at, mask=live, other=0))
    g = from_16_bits(tl.load(at + pixels, mask=live, other=0))
    b = from_16_bits(tl.load(at + 2 * pixels, mask=live, other=0))
    mean = mean_of(partial, sample, blocks, pixels, PARTIALS)
    x = index % width
    y = index // width
    r, g, b = points(r, g, b, x, y, sample, 0, height, width, row, mean, PROGRAM, COUNT, 3, True)
    if WORDS:
        target = out.to(tl.pointer_type(tl.int32)) + sample.to(tl.int64) * (3 * PIXELS // 2)
        filled = tl.reshape(words(r, g, b, out.dtype.element_ty), (2 * BLOCK,))
        place = tl.arange(0, 2 * BLOCK)
        to = tl.program_id(0) * (3 * BLOCK // 2) + place // 4 * 3 + place % 4
        tl.store(target + to, filled, mask=(place % 4 < 3) & (to < 3 * PIXELS // 2))
        return
    if PIXELS > 0 and OUT_W == 1:
        pixel = out + sample.to(tl.int64) * (3 * PIXELS) + index
        to_plane = PIXELS
    else:
        pixel = out + sample.to(tl.int64) * out_b + index * OUT_W
        to_plane = out_c
    tl.store(pixel, stored_as(r, out.dtype.element_ty), mask=live)
    tl.store(pixel + to_plane, stored_as(g, out.dtype.element_ty), mask=live)
    tl.store(pixel + 2 * to_plane, stored_as(b, out.dtype.element_ty), mask=live)
