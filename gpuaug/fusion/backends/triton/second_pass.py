"""Triton kernel that finishes the pixels that a gather kept in 16 bits, once the mean for their contrast is known."""

import triton
import triton.language as tl

from gpuaug.fusion.backends.triton.pixel_math import from_16_bits, pack_words, stored_as
from gpuaug.fusion.backends.triton.points import points


@triton.jit
def mean_of(partial, sample, blocks, pixels, PARTIALS: tl.constexpr):
    """Return the mean grey of a sample, from ``partial``, the sums of its blocks."""
    index = tl.arange(0, PARTIALS)
    return tl.sum(tl.load(partial + sample * blocks + index, mask=index < blocks, other=0.0)) / pixels


@triton.jit(
    do_not_specialize=["row_stride", "blocks", "height", "width", "out_b", "out_c"],
    do_not_specialize_on_alignment=["rows", "partial"],
)
def rest_kernel(
    kept, out, rows, partial, height, width, row_stride, blocks, out_b, out_c,
    FRAMES: tl.constexpr, PIXELS: tl.constexpr, WHOLE: tl.constexpr, WORDS: tl.constexpr, OUT_W: tl.constexpr,
    PROGRAM: tl.constexpr, COUNT: tl.constexpr, PARTIALS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Run the contrast and the pointwise ops after it, on the pixels that ``gather_kernel`` kept, with the mean of its sums.

    The output is contiguous per image, as planes (``OUT_W`` is 1) or with the channels of a pixel adjacent. ``PIXELS``: pixels
    per image if compiled in, else 0. ``WHOLE``: blocks cover the image exactly. ``WORDS``: two pixels are stored as three words
    of 32 bits. ``FRAMES``: images per row of the table.

    Grid: (blocks of pixels, samples).
    """
    sample = tl.program_id(1)
    row = rows + sample // FRAMES * row_stride
    pixels = PIXELS if PIXELS > 0 else height * width
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WORDS:
        # Two neighbouring pixels per thread, which are three words. By default, a thread would get eight.
        index = tl.program_id(0) * BLOCK + 2 * tl.arange(0, BLOCK // 2)[:, None] + tl.arange(0, 2)[None, :]
    address = kept + sample.to(tl.int64) * (3 * pixels) + index
    in_bounds = index < pixels
    if WHOLE:
        in_bounds = index == index
    r = from_16_bits(tl.load(address, mask=in_bounds, other=0))
    g = from_16_bits(tl.load(address + pixels, mask=in_bounds, other=0))
    b = from_16_bits(tl.load(address + 2 * pixels, mask=in_bounds, other=0))
    mean = mean_of(partial, sample, blocks, pixels, PARTIALS)
    x = index % width
    y = index // width
    r, g, b = points(r, g, b, x, y, sample, 0, height, width, row, mean, PROGRAM, COUNT, 3, True)
    if WORDS:
        target = out.to(tl.pointer_type(tl.int32)) + sample.to(tl.int64) * (3 * PIXELS // 2)
        packed = tl.reshape(pack_words(r, g, b, out.dtype.element_ty), (2 * BLOCK,))
        word = tl.arange(0, 2 * BLOCK)
        offset = tl.program_id(0) * (3 * BLOCK // 2) + word // 4 * 3 + word % 4
        tl.store(target + offset, packed, mask=(word % 4 < 3) & (offset < 3 * PIXELS // 2))
        return
    if PIXELS > 0 and OUT_W == 1:
        pixel = out + sample.to(tl.int64) * (3 * PIXELS) + index
        plane_stride = PIXELS
    else:
        pixel = out + sample.to(tl.int64) * out_b + index * OUT_W
        plane_stride = out_c
    tl.store(pixel, stored_as(r, out.dtype.element_ty), mask=in_bounds)
    tl.store(pixel + plane_stride, stored_as(g, out.dtype.element_ty), mask=in_bounds)
    tl.store(pixel + 2 * plane_stride, stored_as(b, out.dtype.element_ty), mask=in_bounds)
