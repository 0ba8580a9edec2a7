"""Arithmetic of several kernels, without loads and stores.

Coordinates of the pixels of a *tile* (the output pixels of a thread block; for CLAHE, a cell of the grid of its histograms),
conversions of bytes and 16-bit values, clamping, byte levels (0 to 255) and tables, Gaussian weights, colours, noise.

With ``RGB``, a function computes three channels; otherwise ``r`` is the only one.

Two idioms recur. A divisor such as ``255.0 + 0.0 * x`` is the number 255 in the shape of ``x``, which ``tl.div_rn``, the
correctly rounded division, requires. A float in [2²³, 2²⁴) has no fraction, and its last 23 bits are its integer minus 2²³. So
to add 2²³ (8388608.0, bits 0x4B000000) rounds a number to an integer, and to read the bits of the sum converts the number to an
integer, at the cost of one addition. For numbers of either sign, 1.5 · 2²³ (12582912.0) is added.
"""

import os
from types import FunctionType

import triton
import triton.language as tl

from gpuaug.fusion import pixels
from gpuaug.fusion.ops import channel as channels
from gpuaug.fusion.ops import color, color_jitter, filters

NO_NAN = tl.constexpr(color_jitter.NO_NAN)
COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"""False in Triton's interpreter, which supports no inline assembly and does not fuse products with sums."""

# Weights of the channels in grey values; flags of color jitters, bits of ``FLAGS``; byte rules, (scale, offset) of a conversion
# to bytes; and the number of byte levels.
RED = tl.constexpr(channels.GREY[0])
TORCHVISION_RED = tl.constexpr(channels.TORCHVISION_RED)
TORCHVISION_GREY = tl.constexpr(color_jitter.TORCHVISION_GREY)
IN_BYTES = tl.constexpr(color_jitter.IN_BYTES)
ROUNDED = tl.constexpr(pixels.ROUNDED)
TRUNCATED = tl.constexpr(pixels.TRUNCATED)
TRUNCATED_256 = tl.constexpr(pixels.TRUNCATED_256)
GREEN = tl.constexpr(channels.GREY[1])
BLUE = tl.constexpr(channels.GREY[2])
LEVELS = tl.constexpr(filters.LEVELS)


@triton.jit
def tile_pixels(left, top, TILE_H: tl.constexpr, TILE_W: tl.constexpr, PAIRED: tl.constexpr):
    """Return the coordinates (x, y) in the image of a tile's pixels, (TILE_H · TILE_W,) each, line by line.

    ``left``, ``top``: position of the tile in the image. ``PAIRED``: whether neighbours in x are half an array apart: of N
    pixels, i is the left and i + N / 2 the right one of a pair. One thread computes both in a block of at most N / 2 threads.

    Both arrays have one axis, so that neighbouring threads of a warp have neighbouring x. With two axes, the axis along which
    the threads lie would depend on the version of Triton.
    """
    pixel_index = tl.arange(0, TILE_H * TILE_W)
    if PAIRED:
        pair = pixel_index % (TILE_H * TILE_W // 2)
        return left + pair % (TILE_W // 2) * 2 + pixel_index // (TILE_H * TILE_W // 2), top + pair // (TILE_W // 2)
    return left + pixel_index % TILE_W, top + pixel_index // TILE_W


@triton.jit
def as_pairs(pixels):
    """Reshape ``PAIRED`` pixels, (N,), to pairs of neighbours, (N / 2, 2)."""
    return tl.trans(tl.reshape(pixels, 2, pixels.shape[0] // 2))


@triton.jit
def as_16_bits(value):
    """Round values in [0, 1] to uint16, in units of 1/65535. Multiples of 1/255 are exact."""
    return (value * 65535.0 + 8388608.0).to(tl.int32, bitcast=True).to(tl.uint16)


@triton.jit
def words_of_16_bits(values):
    """Round values in [0, 1] of ``PAIRED`` pixels, (N,), to 16 bits, and pack neighbours into words of 32 bits, (N / 2,)."""
    low, high = tl.split(as_pairs(as_16_bits(values).to(tl.int32)))
    return low | (high << 16)


@triton.jit
def from_16_bits(bits):
    """Convert uint16, in units of 1/65535, to values in [0, 1]. Multiples of 1/255 are restored bit for bit."""
    above = (bits.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)  # 2²³ + the integer
    return to_units_of_65535(above * (1 / 65536) - 128.0)  # 2²³ / 65536 is 128


@triton.jit
def to_units_of_65535(value):
    """Multiply by 65536 / 65535: n / 65536 becomes n / 65535."""
    # 65536 / 65535 = 1 + 65537 / 2³² + …; further terms are below the precision of float32.
    return value * (65537 / 2**32) + value


@triton.jit
def to_output_type(value, TYPE: tl.constexpr):
    """Convert pixels to the dtype of the output: floats, or integers in units of the largest value of their dtype."""
    if tl.uint16 == TYPE:
        return as_16_bits(value)
    if tl.uint8 == TYPE:
        return (tl.minimum(tl.maximum(value * 255.0, 0.0), 255.0) + 8388608.0).to(tl.int32, bitcast=True).to(tl.uint8)
    if tl.int16 == TYPE:
        value = tl.minimum(tl.maximum(value * 32767.0, -32768.0), 32767.0)
        return (value + 12582912.0).to(tl.int32, bitcast=True).to(tl.int16)
    return value.to(TYPE)


@triton.jit
def store_channels(pixel, plane_stride, r, g, b, in_bounds, RGB: tl.constexpr):
    """Store pixels in the dtype of the output: three channels, or, without ``RGB``, the channel ``r``.

    ``plane_stride``: elements between channels of the output. ``pixel``: addresses of the pixels in the first channel, in the
    shape of ``r``. ``in_bounds``: mask of the pixels to store.
    """
    tl.store(pixel, to_output_type(r, pixel.dtype.element_ty), mask=in_bounds)
    if RGB:
        tl.store(pixel + plane_stride, to_output_type(g, pixel.dtype.element_ty), mask=in_bounds)
        tl.store(pixel + 2 * plane_stride, to_output_type(b, pixel.dtype.element_ty), mask=in_bounds)


@triton.jit
def to_centred(bits):
    """Map uint8 or uint16 to float16 in [-1, 1), with black at -1 and middle grey at 0, where float16 is most precise."""
    half: tl.constexpr = 2 ** (bits.dtype.primitive_bitwidth - 1)
    if COMPILED and half > 128:
        # The same arithmetic as below, for two values per instruction. Declared impure (False), so that the compiler does not
        # repeat the conversion in each warp.
        asm: tl.constexpr = """{ .reg .b32 a, b; .reg .f32 c, d; prmt.b32 a, $1, 0x4B00, 0x5410; prmt.b32 b, $1, 0x4B00, 0x5432;
        mov.b32 c, a; mov.b32 d, b; fma.rn.f32 c, c, 0f38000000, 0fC3808000; fma.rn.f32 d, d, 0f38000000, 0fC3808000;
        cvt.rn.f16x2.f32 $0, d, c; }"""
        return tl.inline_asm_elementwise(asm, "=r,r", [bits], tl.float16, False, 2)
    value = (bits.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    return (value * (1 / half) - (8388608 / half + 1)).to(tl.float16)


@triton.jit
def pack_word(low, high, TYPE: tl.constexpr):
    """Round two numbers to a 16-bit dtype, and pack them into a word of 32 bits."""
    if COMPILED:
        # One instruction for both numbers; one per number runs at an eighth of the speed.
        asm: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if tl.bfloat16 == TYPE else "cvt.rn.f16x2.f32 $0, $2, $1;"
        return tl.inline_asm_elementwise(asm, "=r,f,f", [low, high], tl.int32, True, 1)
    # & 0xFFFF, because a negative int16 has its sign in all upper bits of the int32.
    low = low.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def pack_words(r, g, b, TYPE: tl.constexpr):
    """Pack pairs of pixels of three channels, (…, 2) each, into words of 32 bits with two 16-bit values: (…, 2, 2).

    In the order of the last two axes, the words of a pair are r0 g0, b0 r1, g1 b1, and a fourth that the caller does not store.
    With a fourth word, neighbouring threads store neighbouring words, and whole cache lines are written. ``TYPE``: dtype of the
    values.
    """
    first_r, second_r = tl.split(r)
    first_g, second_g = tl.split(g)
    first_b, second_b = tl.split(b)
    third = pack_word(second_g, second_b, TYPE)
    return tl.join(tl.join(pack_word(first_r, first_g, TYPE), third), tl.join(pack_word(first_b, second_r, TYPE), third))


@triton.jit
def as_float(value, INTEGERS: tl.constexpr):
    """Convert pixels to float32. int16 is mapped to [-1, 1], and uint16 to [0, 1] unless ``INTEGERS``.

    ``INTEGERS``: whether uint8 and uint16 keep their value. It is always true for uint8.
    """
    if value.dtype == tl.uint16 and not INTEGERS:
        return from_16_bits(value)
    if value.dtype == tl.int16:
        return value.to(tl.float32) * (1 / 32767)
    if INTEGERS and COMPILED:
        # From 32 bits: the compiler would convert from 8 or 16 bits, at a quarter of the speed.
        return tl.inline_asm_elementwise("cvt.rn.f32.s32 $0, $1;", "=f,r", [value.to(tl.int32)], tl.float32, True, 1)
    return value.to(tl.float32)


@triton.jit
def div_by_255(value):
    """Divide bytes by 255, correctly rounded, by one Newton iteration with fused products and sums."""
    # The inner fma is the remainder of the quotient, without rounding; a 255th of it is the correction.
    quotient = value * (1 / 255)
    return tl.fma(tl.fma(quotient, -255.0, value), 1 / 255, quotient)


@triton.jit
def nearest_integer(value):
    """Round to the nearest integer, and halves to the nearest even integer, for absolute values below 2²²."""
    return value + 12582912.0 - 12582912.0


@triton.jit
def to_bytes(value, scale, offset):
    """Convert values in [0, 1] to bytes by a ``ByteRule``, (scale, offset), and return the bytes divided by 255."""
    return div_by_255(nearest_integer(value * scale + offset))


@triton.jit
def round_half_up(value):
    """Round to the nearest integer, halves up, and clamp to [0, 255]."""
    return tl.minimum(tl.maximum(tl.floor(value + 0.5), 0.0), 255.0)


@triton.jit
def fixed_point(weights, scale):
    """Round the weights of a resize of bytes to fixed point, as PyTorch does (``fixed_point`` of ``pixels.py``).

    ``scale``: source pixels per output pixel. The larger it is, the smaller are the weights, and the more bits they get.
    """
    # The mask clears the fraction of the float, which rounds it down to a power of two.
    units_per_one = (tl.maximum(scale, 0.5).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 32768.0
    return nearest_integer(weights * units_per_one) * tl.div_rn(1.0, units_per_one)


@triton.jit
def clamp01(value):
    """Clamp to [0, 1]. NaN stays NaN, as in torch."""
    value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(value, 1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def floor(value):
    """Round down."""
    return tl.floor(value)


@triton.jit
def maximum(first, second):
    """Return the larger value, or NaN if a value is NaN."""
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(first, second):
    """Return the smaller value. A NaN may get lost: ``maximum`` of the same channels keeps it."""
    return tl.minimum(first, second)


@triton.jit
def where(condition, value, other):
    """Return ``value`` where ``condition`` is true, else ``other``."""
    return tl.where(condition, value, other)


@triton.jit
def quotient(value, divisor):
    """Return value / divisor, by the inverse of the divisor."""
    return value * (1.0 / divisor)


@triton.jit
def exact_quotient(value, divisor):
    """Return value / divisor, correctly rounded."""
    return tl.div_rn(value, divisor)


@triton.jit
def power(value, exponent):
    """Return value ** exponent, for value in [0, 1]."""
    result = tl.exp2(exponent * tl.log2(tl.where(value > 0, value, 1.0)))
    # 0 ** 0 is 1. NaN is returned unchanged.
    return tl.where(value > 0, result, tl.where(value == 0, tl.where(exponent == 0, 1.0, 0.0), value))


@triton.jit
def turned(sector, turns):
    """Return a hue in sixths of a turn, in [0, 6), after a rotation by ``turns``. ``sector``: hue in sixths of a turn."""
    # Kornia computes in radians, with the same result within rounding.
    sector = sector + turns * 6.0
    sector = sector - 6.0 * tl.floor(sector * (1 / 6))
    return tl.where(sector >= 6.0, 0.0, sector)


Tensor = tl.tensor
"""Annotation of the arguments of formulas, which Triton evaluates."""


def compiled(formula):
    """Compile a formula of an op, written once for both backends, as a function of Triton.

    The formula calls functions such as ``maximum`` by name. Triton looks names up in the ``__globals__`` of the function whose
    source it compiles. So the copy gets the globals of this file, whose functions replace torch's of the same name.
    """
    function = FunctionType(formula.__code__, globals(), formula.__name__)
    function.__module__ = formula.__module__
    return triton.jit(function)


largest_channel = compiled(color.largest_channel)
smallest_channel = compiled(color.smallest_channel)
scale_saturation = compiled(color.scale_saturation)
scale_lightness = compiled(color.scale_lightness)
hue_channel = compiled(color.hue_channel)
rotate_hue = compiled(color.rotate_hue)
clamped = compiled(color.clamped)
tile_side = compiled(filters.tile_side)


@triton.jit
def to_level(value, FACTOR: tl.constexpr, OFFSET: tl.constexpr):
    """Map values in [0, 1] to byte levels; NaN to 0."""
    return (tl.where(value == value, value, 0.0) * FACTOR + OFFSET).to(tl.int32)


@triton.jit
def equalize_table(level_counts, channel_pixels, KEEPS_VALUES: tl.constexpr):
    """Return the equalized value in [0, 1] per byte level, (LEVELS,) float32.

    ``level_counts``: number of pixels of a channel per level, (LEVELS,) int32. ``channel_pixels``: their sum. The formula and
    its ``step`` are in ``Equalize.apply``. With ``KEEPS_VALUES``, return -1 for all levels of a channel that cannot be
    equalized, because its step is 0: such a channel must not change.
    """
    levels = tl.arange(0, LEVELS)
    last_level = tl.max(tl.where(level_counts > 0, levels, 0), 0)
    step = (channel_pixels - tl.sum(tl.where(levels == last_level, level_counts, 0), 0)) // 255
    new_levels = (tl.cumsum(level_counts, 0) - level_counts + step // 2) // tl.maximum(step, 1)
    new_levels = tl.where(step == 0, levels, tl.minimum(new_levels, 255)).to(tl.float32)
    fractions = tl.div_rn(new_levels, 255.0 + 0.0 * new_levels)
    return tl.where(step == 0, -1.0, fractions) if KEEPS_VALUES else fractions


@triton.jit
def nearest_tiles(index, length, TILE_COUNT: tl.constexpr):
    """Return (index of the first, index of the second, weight of the first) of the two nearest tiles of CLAHE along an axis.

    Nearest are the tiles whose centres are next to the pixel. Before the first centre and after the last centre, both are the
    outermost tile. ``index``: indices of the pixels. Indices after the image are clamped to its last pixel.
    """
    index = tl.minimum(index, length - 1)
    # In half pixels: length of a tile, and ``position``, the distance of the pixel from the centre of an imaginary tile before
    # the first tile.
    double_side = 2 * tile_side(length, TILE_COUNT)
    position = 2 * index + 1 + double_side // 2
    second = position // double_side
    weight = tl.div_rn((double_side - position % double_side).to(tl.float32), double_side + 0.0 * index)
    return tl.maximum(second - 1, 0), tl.minimum(second, TILE_COUNT - 1), weight


@triton.jit
def clamped_sum(value, factor, base, FLAGS: tl.constexpr):
    """Return value · factor + base, clamped to [0, 1]. The flag ``NO_NAN``: no value is NaN, so one instruction is enough."""
    if COMPILED and NO_NAN & FLAGS:
        return tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [value, factor, base], tl.float32, True, 1
        )
    return clamp01(value * factor + base)


@triton.jit
def clamped_sums(r, g, b, factor, base, FLAGS: tl.constexpr):
    """Apply ``clamped_sum`` to three channels."""
    return clamped_sum(r, factor, base, FLAGS), clamped_sum(g, factor, base, FLAGS), clamped_sum(b, factor, base, FLAGS)


@triton.jit
def grey_of(r, g, b, FLAGS: tl.constexpr):
    """Return the weighted sum of the channels of a pixel.

    ``FLAGS``: flags of a color jitter. With ``TORCHVISION_GREY``, the weights are torchvision's; with ``IN_BYTES``, the sum is
    truncated to a byte.
    """
    red: tl.constexpr = TORCHVISION_RED if TORCHVISION_GREY & FLAGS else RED
    grey = r * red + g * GREEN + b * BLUE
    return to_bytes(grey, TRUNCATED[0], TRUNCATED[1]) if IN_BYTES & FLAGS else grey


@triton.jit
def gaussian_exponent(sigma):
    """Return -1 / (2 sigma²), the factor of a squared distance in the exponent of a Gaussian."""
    # The lower bound replaces a sigma² that underflows to 0. All weight is then at the centre.
    return -tl.div_rn(tl.full((), 1.0, tl.float32), tl.maximum(2 * sigma * sigma, 1.2e-38))


@triton.jit
def gaussian_norm(exponent, TAPS: tl.constexpr):
    """Return 1 / sum of exp(distance² · ``exponent``) over all ``TAPS``, so that weights times the result sum to 1.

    ``exponent``: result of ``gaussian_exponent``. ``TAPS``: number of taps, odd.
    """
    total = exponent * 0
    for tap in tl.static_range(TAPS):
        total += tl.exp((tap - TAPS // 2) * (tap - TAPS // 2) * exponent)
    return tl.div_rn(tl.full((), 1.0, tl.float32), total)


@triton.jit
def gaussian_weights(distance, exponent, norm, TAPS: tl.constexpr):
    """Return the Gaussian weights of pixels at integer distances, float16; 0 for pixels outside the ``TAPS`` of the filter.

    ``exponent``, ``norm``: results of ``gaussian_exponent`` and ``gaussian_norm``.
    """
    distance = distance.to(tl.float32)
    return tl.where(tl.abs(distance) <= TAPS // 2, tl.exp(distance * distance * exponent) * norm, 0.0).to(tl.float16)


@triton.jit
def normalize(value, mean, std):
    """Return (value - mean) / std, as one fused product and sum per pixel.

    The error is at most one unit in the last place of value and one unit in the last place of mean, both divided by std.
    """
    inverse = 1.0 / std
    return value * inverse - mean * inverse


@triton.jit
def uniform_pair(x, y, channel, field, width, seed):
    """Return two uniform numbers in [0, 1), of 24 bits each, for pixels (``x``, ``y``) of one channel.

    They are from the random number generator Philox. Its key is ``seed``, and its counter (index of the pixel in an image of
    ``width`` columns, channel, field, 0), so that a pixel has the same numbers in every executor. ``field``: number of the
    field that is drawn for a sample.
    """
    first, second, _, _ = tl.philox(seed, y * width + x, channel, field, 0)
    step: tl.constexpr = 2**-24
    return (first >> 8).to(tl.int32).to(tl.float32) * step, (second >> 8).to(tl.int32).to(tl.float32) * step


@triton.jit
def normal(x, y, channel, field, width, seed):
    """Return standard normal numbers for pixels of one channel, from ``uniform_pair`` by the transform of Box and Muller."""
    first, second = uniform_pair(x, y, channel, field, width, seed)
    radius = tl.sqrt(-2.0 * tl.log(first + 2**-24))
    return radius * tl.cos(6.2831855 * second)  # 2 pi
