"""Triton kernel of a contrast around the mean grey of an image, launched after ``gather_kernel`` (``gather.py``).

``gather_kernel`` has stored the pixels before the contrast, in 16 bits per value, and the sum of their grey per thread block.
A second gather instead, which reads the source again, takes 1.37 times as long in all for a crop with ``ColorJitter`` in half
precision (256 x 3 x 224 x 224, H200, 2026-11-29).
"""

import triton
import triton.language as tl

from gpuaug.fusion.backends.triton.pixel_math import from_16_bits, pack_words, store_channels
from gpuaug.fusion.backends.triton.points import apply_point_ops


@triton.jit
def load_mean(block_sums, sample, blocks, pixels, SUM_COUNT: tl.constexpr):
    """Return the mean grey of a sample.

    ``sample``: index of the image, or frame of a clip. ``block_sums``: address of the sums of grey per thread block, (samples,
    ``blocks``). ``pixels``: number of summed values. ``SUM_COUNT``: ``blocks``, rounded up to a power of two.
    """
    index = tl.arange(0, SUM_COUNT)
    return tl.sum(tl.load(block_sums + sample * blocks + index, mask=index < blocks, other=0.0)) / pixels


# Unlike a ``kernel``, compiled for aligned addresses of ``saved_pixels`` and ``out``, which are new tensors and always aligned.
@triton.jit(
    do_not_specialize=["row_stride", "blocks", "height", "width", "out_b", "out_c"],
    do_not_specialize_on_alignment=["param_table", "block_sums"],
)
def contrast_kernel(
    saved_pixels, out, param_table, block_sums, height, width, row_stride, blocks, out_b, out_c,
    FRAMES: tl.constexpr, PIXELS: tl.constexpr, FULL_BLOCKS: tl.constexpr, WORDS: tl.constexpr, OUT_W: tl.constexpr,
    PROGRAM: tl.constexpr, OP_COUNT: tl.constexpr, SUM_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Run the contrast and the pointwise ops after it on ``saved_pixels``, and store the result in ``out``.

    Tensors, by their address:
        saved_pixels: (samples, 3, ``height``, ``width``) uint16, in units of 1/65535, contiguous.
        out: Output images. Each is contiguous, as planes (``OUT_W`` is 1) or with the channels of a pixel adjacent.
        param_table: Parameter table, one row of ``row_stride`` elements per sample or clip.
        block_sums: See ``load_mean``.

    Constants:
        PROGRAM, OP_COUNT: Pointwise ops (``points.py``) and their number.
        PIXELS: Pixels per image if compiled in, else 0.
        FULL_BLOCKS: Whether blocks cover the image exactly.
        WORDS: Whether two pixels are stored as three words of 32 bits.
        FRAMES: Images per row of the table.
        SUM_COUNT: See ``load_mean``.

    Grid: (blocks of pixels, samples).
    """
    sample = tl.program_id(1)
    row = param_table + sample // FRAMES * row_stride
    pixels = PIXELS if PIXELS > 0 else height * width
    pixel_index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WORDS:
        # Two neighbouring pixels per thread, which are three words (``pack_words``). With one axis of pixels, Triton would
        # assign eight pixels to a thread.
        pixel_index = tl.program_id(0) * BLOCK + 2 * tl.arange(0, BLOCK // 2)[:, None] + tl.arange(0, 2)[None, :]
    address = saved_pixels + sample.to(tl.int64) * (3 * pixels) + pixel_index
    in_bounds = pixel_index < pixels
    if FULL_BLOCKS:
        in_bounds = pixel_index == pixel_index  # true, in the shape of the index
    r = from_16_bits(tl.load(address, mask=in_bounds, other=0))
    g = from_16_bits(tl.load(address + pixels, mask=in_bounds, other=0))
    b = from_16_bits(tl.load(address + 2 * pixels, mask=in_bounds, other=0))
    mean = load_mean(block_sums, sample, blocks, pixels, SUM_COUNT)
    x = pixel_index % width
    y = pixel_index // width
    r, g, b = apply_point_ops(r, g, b, x, y, sample, 0, width, row, mean, PROGRAM, OP_COUNT, 3, True)
    if WORDS:
        out_words = out.to(tl.pointer_type(tl.int32)) + sample.to(tl.int64) * (3 * PIXELS // 2)
        word_values = tl.reshape(pack_words(r, g, b, out.dtype.element_ty), (2 * BLOCK,))
        word = tl.arange(0, 2 * BLOCK)
        word_offset = tl.program_id(0) * (3 * BLOCK // 2) + word // 4 * 3 + word % 4
        tl.store(out_words + word_offset, word_values, mask=(word % 4 < 3) & (word_offset < 3 * PIXELS // 2))
        return
    if PIXELS > 0 and OUT_W == 1:
        pixel = out + sample.to(tl.int64) * (3 * PIXELS) + pixel_index
        plane_stride = PIXELS
    else:
        pixel = out + sample.to(tl.int64) * out_b + pixel_index * OUT_W
        plane_stride = out_c
    store_channels(pixel, plane_stride, r, g, b, in_bounds, True)
