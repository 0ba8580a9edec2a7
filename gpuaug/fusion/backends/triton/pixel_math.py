"""Arithmetic that kernels share, without loads and stores.

Coordinates of a tile's pixels, conversions of bytes and of 16 bits a value, clamps, levels and their tiles, weights of a
Gaussian, colours, noise.
"""

import os

import triton
import triton.language as tl

from gpuaug.fusion.ops import channel as channels
from gpuaug.fusion.ops import color_jitter, filters, positional

CLEAN = tl.constexpr(color_jitter.CLEAN)
COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"""Triton's interpreter knows no assembly, and does not fuse products with sums."""

MULTIPLIER_0 = tl.constexpr(positional.MULTIPLIERS[0])
MULTIPLIER_1 = tl.constexpr(positional.MULTIPLIERS[1])
INCREMENT_0 = tl.constexpr(positional.INCREMENTS[0])
INCREMENT_1 = tl.constexpr(positional.INCREMENTS[1])
RED = tl.constexpr(channels.GREY[0])
TORCHVISION_RED = tl.constexpr(channels.TORCHVISION_RED)
TORCHVISION_GREY = tl.constexpr(color_jitter.TORCHVISION_GREY)
GREEN = tl.constexpr(channels.GREY[1])
BLUE = tl.constexpr(channels.GREY[2])
LEVELS = tl.constexpr(filters.LEVELS)


@triton.jit
def tile_pixels(left, top, TILE_H: tl.constexpr, TILE_W: tl.constexpr, PAIRED: tl.constexpr):
    """The coordinates of a tile's pixels, (TILE_H · TILE_W,), row after row.

    One axis, not two: Triton's versions differ in the axis that a warp lies along, and it has to be a row of the image.
    ``PAIRED``: pixels i and i + N / 2 of the N are neighbours in x. A thread makes both, if its block has up to N / 2 threads.
    """
    index = tl.arange(0, TILE_H * TILE_W)
    if PAIRED:
        pair = index % (TILE_H * TILE_W // 2)
        return left + pair % (TILE_W // 2) * 2 + index // (TILE_H * TILE_W // 2), top + pair // (TILE_W // 2)
    return left + index % TILE_W, top + index // TILE_W


@triton.jit
def as_pairs(pixels):
    """Values of ``PAIRED`` pixels as pairs of neighbours, (N / 2, 2)."""
    return tl.trans(tl.reshape(pixels, 2, pixels.shape[0] // 2))


@triton.jit
def as_16_bits(value):
    """A number in [0, 1] as a share of 65535, rounded to the nearest. A byte's share of 255 is exact."""
    # Above 2²³ a float's last bits are a whole number.
    return (value * 65535.0 + 8388608.0).to(tl.int32, bitcast=True).to(tl.uint16)


@triton.jit
def words_of_16_bits(values):
    """Numbers in [0, 1] of ``PAIRED`` pixels, (N,), as 16 bits each: pairs in words of 32, (N / 2,)."""
    low, high = tl.split(as_pairs(as_16_bits(values).to(tl.int32)))
    return low | (high << 16)


@triton.jit
def from_16_bits(bits):
    """The number in [0, 1] that ``as_16_bits`` rounded. A byte's share of 255 comes back bit for bit."""
    above = (bits.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)  # 2²³ and the bits
    return share_of_65535(above * (1 / 65536) - 128.0)


@triton.jit
def share_of_65535(value):
    """A share of 65536 as the same number of 65535ths: 65536 / 65535 times the value."""
    # 1 / 65535 = 1 / 65536 · (1 + 1 / 65536 + …); further terms are below the precision of float32.
    return value * (65537 / 2**32) + value


@triton.jit
def stored_as(value, TYPE: tl.constexpr):
    """A pixel in the type of its image: floating, or a share of the largest value of a type of whole numbers."""
    if tl.uint16 == TYPE:
        return as_16_bits(value)
    if tl.uint8 == TYPE:
        # Above 2²³ a float's last bits are a whole number.
        return (tl.minimum(tl.maximum(value * 255.0, 0.0), 255.0) + 8388608.0).to(tl.int32, bitcast=True).to(tl.uint8)
    if tl.int16 == TYPE:
        # The same above 1.5 · 2²³, for numbers of either sign.
        value = tl.minimum(tl.maximum(value * 32767.0, -32768.0), 32767.0)
        return (value + 12582912.0).to(tl.int32, bitcast=True).to(tl.int16)
    return value.to(TYPE)


@triton.jit
def centred(bits):
    """8 or 16 bits as the nearest float16 in [-1, 1): black is -1. Float16 is most exact around 0, which is middle grey."""
    half: tl.constexpr = 2 ** (bits.dtype.primitive_bitwidth - 1)
    if COMPILED and half > 128:
        # Two values at once. Declared impure, or the compiler repeats the conversion in each warp that multiplies with them.
        asm: tl.constexpr = """{ .reg .b32 a, b; .reg .f32 c, d; prmt.b32 a, $1, 0x4B00, 0x5410; prmt.b32 b, $1, 0x4B00, 0x5432;
        mov.b32 c, a; mov.b32 d, b; fma.rn.f32 c, c, 0f38000000, 0fC3808000; fma.rn.f32 d, d, 0f38000000, 0fC3808000;
        cvt.rn.f16x2.f32 $0, d, c; }"""
        return tl.inline_asm_elementwise(asm, "=r,r", [bits], tl.float16, False, 2)
    # Above 2²³ a float's last bits are a whole number.
    value = (bits.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    return (value * (1 / half) - (8388608 / half + 1)).to(tl.float16)


@triton.jit
def word(low, high, KIND: tl.constexpr):
    """Two numbers of 16 bits in one of 32, rounded to their type."""
    if COMPILED:
        # One instruction for both; each by itself is converted at an eighth of its speed.
        asm: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if tl.bfloat16 == KIND else "cvt.rn.f16x2.f32 $0, $2, $1;"
        return tl.inline_asm_elementwise(asm, "=r,f,f", [low, high], tl.int32, True, 1)
    low = low.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def words(r, g, b, TYPE: tl.constexpr):
    """Two pixels of three channels, (…, 2), as three words of 32 bits and a fourth that is not to be stored: (…, 2, 2).

    With four places for three words, neighbouring threads store neighbouring words, and whole cache lines are written.
    """
    first_r, second_r = tl.split(r)
    first_g, second_g = tl.split(g)
    first_b, second_b = tl.split(b)
    third = word(second_g, second_b, TYPE)
    return tl.join(tl.join(word(first_r, first_g, TYPE), third), tl.join(word(first_b, second_r, TYPE), third))


@triton.jit
def as_float(value, SCALE: tl.constexpr):
    """A pixel as float32: with ``SCALE`` the whole number that is stored, else in image units."""
    if value.dtype == tl.uint16 and not SCALE:
        return from_16_bits(value)
    if value.dtype == tl.int16:
        return value.to(tl.float32) * (1 / 32767)
    if SCALE and COMPILED:
        # From 32 bits: 8 or 16, which the compiler would choose, are converted at a quarter of the speed.
        return tl.inline_asm_elementwise("cvt.rn.f32.s32 $0, $1;", "=f,r", [value.to(tl.int32)], tl.float32, True, 1)
    return value.to(tl.float32)


@triton.jit
def byte_share(value):
    """A byte's value / 255, correctly rounded: a product, and one step of Newton's in fused arithmetic."""
    share = value * (1 / 255)
    return tl.fma(tl.fma(share, -255.0, value), 1 / 255, share)


@triton.jit
def unit(v):
    """Clamp to [0, 1]; NaN stays NaN, as in torch."""
    v = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(v, 1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def level_of(value, FACTOR: tl.constexpr, OFFSET: tl.constexpr):
    """The level of a byte for a number in [0, 1]; 0 of one that is no number."""
    return (tl.where(value == value, value, 0.0) * FACTOR + OFFSET).to(tl.int32)


@triton.jit
def spread(counts, pixels, KEEPS: tl.constexpr):
    """What the levels of a channel become, (LEVELS,) float32, from the pixels that have each; -1 where values stay."""
    at = tl.arange(0, LEVELS)
    last = tl.max(tl.where(counts > 0, at, 0), 0)
    step = (pixels - tl.sum(tl.where(at == last, counts, 0), 0)) // 255
    levels = (tl.cumsum(counts, 0) - counts + step // 2) // tl.maximum(step, 1)
    levels = tl.where(step == 0, at, tl.minimum(levels, 255)).to(tl.float32)
    share = tl.div_rn(levels, 255.0 + 0.0 * levels)
    return tl.where(step == 0, -1.0, share) if KEEPS else share


@triton.jit
def tile_side(length, COUNT: tl.constexpr):
    """Pixels along one side of a tile, for ``COUNT`` tiles along an axis."""
    return (length + COUNT - 1) // COUNT


@triton.jit
def tiles_between(at, length, COUNT: tl.constexpr):
    """The two tiles whose centres pixels of an axis lie between, or twice the outermost, and the share of the first.

    Pixels of a block that lie behind the image have the tiles of its last one.
    """
    at = tl.minimum(at, length - 1)
    double = 2 * tile_side(length, COUNT)
    place = 2 * at + 1 + double // 2
    second = place // double
    share = tl.div_rn((double - place % double).to(tl.float32), double + 0.0 * at)
    return tl.maximum(second - 1, 0), tl.minimum(second, COUNT - 1), share


@triton.jit
def unit_sum(v, factor, base, FLAGS: tl.constexpr):
    """V · factor + base, clamped to [0, 1]; in one instruction where ``FLAGS`` has ``CLEAN``: no pixel is NaN."""
    if COMPILED and CLEAN & FLAGS:
        return tl.inline_asm_elementwise("fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [v, factor, base], tl.float32, True, 1)
    return unit(v * factor + base)


@triton.jit
def unit_sums(r, g, b, factor, base, FLAGS: tl.constexpr):
    """``unit_sum`` of three channels."""
    return unit_sum(r, factor, base, FLAGS), unit_sum(g, factor, base, FLAGS), unit_sum(b, factor, base, FLAGS)


@triton.jit
def grey_of(r, g, b, FLAGS: tl.constexpr):
    """The grey of a pixel: the weighted sum of its channels, by torchvision's weights where ``FLAGS`` says so."""
    red: tl.constexpr = TORCHVISION_RED if TORCHVISION_GREY & FLAGS else RED
    return r * red + g * GREEN + b * BLUE


@triton.jit
def falling(sigma):
    """The factor of a squared distance in the exponent of a Gaussian: -1 / (2 sigma²)."""
    # A square too small for a float has all its weight in the middle.
    return -tl.div_rn(tl.full((), 1.0, tl.float32), tl.maximum(2 * sigma * sigma, 1.2e-38))


@triton.jit
def share(fall, TAPS: tl.constexpr):
    """The factor that makes the weights of all taps sum to 1."""
    total = fall * 0
    for tap in tl.static_range(TAPS):
        total += tl.exp((tap - TAPS // 2) * (tap - TAPS // 2) * fall)
    return tl.div_rn(tl.full((), 1.0, tl.float32), total)


@triton.jit
def gaussian(distance, fall, part, TAPS: tl.constexpr):
    """The weights of pixels at these distances, float16; 0 beyond the kernel."""
    distance = distance.to(tl.float32)
    return tl.where(tl.abs(distance) <= TAPS // 2, tl.exp(distance * distance * fall) * part, 0.0).to(tl.float16)


@triton.jit
def most_of(r, g, b):
    """The largest channel, or NaN where one is NaN, as in torch: all three that are made of it are NaN then."""
    return tl.maximum(tl.maximum(r, g, propagate_nan=tl.PropagateNan.ALL), b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def saturated(r, g, b, factor):
    """Colours whose saturation in HSV is multiplied by ``factor`` and clamped to [0, 1]."""
    most = most_of(r, g, b)
    least = tl.minimum(tl.minimum(r, g), b)
    spread = most - least
    share = spread / tl.where(most == 0, 1.0, most + 1e-8)
    wanted = most * unit(share * factor)
    scale = wanted / tl.where(spread == 0, 1.0, spread)
    base = most - wanted
    return (r - least) * scale + base, (g - least) * scale + base, (b - least) * scale + base


@triton.jit
def snowed(r, g, b, threshold, factor):
    """Colours whose lightness in HLS is multiplied by ``factor`` where it is below ``threshold``."""
    most = most_of(r, g, b)
    least = tl.minimum(tl.minimum(r, g), b)
    doubled = most + least
    light = doubled * 0.5
    room = tl.where(doubled < 1, doubled, 2 - doubled)
    lit = tl.where(light < threshold, unit(light * factor), light)
    scale = 2 * tl.minimum(lit, 1 - lit) / tl.where(room == 0, 1.0, room + 1e-8)
    return lit + (r - light) * scale, lit + (g - light) * scale, lit + (b - light) * scale


@triton.jit
def hue_channel(at, most, low, falling, rising):
    """A channel in sixth ``at`` of the circle of hues: it rises, stays for two sixths, falls, and stays low for two."""
    at = tl.where(at >= 6, at - 6, at)
    return tl.where(at == 0, rising, tl.where(at <= 2, most, tl.where(at == 3, falling, low)))


@triton.jit
def hue_turned(r, g, b, turns):
    """Colours whose hue in HSV is turned by ``turns`` of the circle."""
    most = most_of(r, g, b)
    least = tl.minimum(tl.minimum(r, g), b)
    spread = most - least
    share = spread / tl.where(most == 0, 1.0, most + 1e-8)
    inverse = 1.0 / tl.where(spread == 0, 1.0, spread)
    sector = tl.where(
        (r >= g) & (r >= b),
        (g - b) * inverse,
        tl.where(g >= b, (b - r) * inverse + 2.0, (r - g) * inverse + 4.0),
    )
    # In sixths of the circle; Kornia counts in radians, and comes to the same within rounding.
    sector = sector + turns * 6.0
    sector = sector - 6.0 * tl.floor(sector * (1 / 6))
    sector = tl.where(sector >= 6.0, 0.0, sector)
    whole = tl.floor(sector)
    part = sector - whole
    low = most * (1 - share)
    falling = most * (1 - part * share)
    rising = most * (1 - (1 - part) * share)
    r = hue_channel(whole + 2, most, low, falling, rising)
    g = hue_channel(whole, most, low, falling, rising)
    b = hue_channel(whole + 4, most, low, falling, rising)
    return r, g, b


@triton.jit
def normalized(v, mean, std):
    """(v - mean) / std, as one product and sum a pixel: within a unit in the last place of v and of the mean, over std."""
    inverse = 1.0 / std
    return v * inverse - mean * inverse


@triton.jit
def raised(v, gamma):
    """V to the power of gamma, for v in [0, 1]."""
    power = tl.exp2(gamma * tl.log2(tl.where(v > 0, v, 1.0)))
    return tl.where(v > 0, power, tl.where(v == 0, tl.where(gamma == 0, 1.0, 0.0), v))


@triton.jit
def posterized(v, step, offset):
    """The bits of a byte above ``step``; ``offset`` is added to a value before it is rounded down to a byte."""
    v = unit(v)
    levels = tl.floor(tl.div_rn(tl.div_rn(tl.floor(v * 255 + offset), step + 0.0 * v), 255.0 + 0.0 * v) * 255)
    kept = tl.where(step == 256, 0.0, tl.div_rn(levels * step, 255.0 + 0.0 * v))
    return tl.where(step == 1, v, kept)


@triton.jit
def normal(x, y, channel, field, width, seed):
    """Standard normal numbers of one channel, from Philox with the counter (pixel index, channel, field, 0)."""
    c0 = (y * width + x).to(tl.uint32)
    c1 = (c0 * 0 + channel.to(tl.uint32)).to(tl.uint32)
    c2 = (c0 * 0 + field.to(tl.uint32)).to(tl.uint32)
    c3 = c0 * 0
    k0 = seed.to(tl.uint32)
    k1 = k0 * 0
    m0 = tl.full((), MULTIPLIER_0, tl.uint32)
    m1 = tl.full((), MULTIPLIER_1, tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(m0, c0)
        high1 = tl.umulhi(m1, c2)
        low0 = m0 * c0
        low1 = m1 * c2
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + tl.full((), INCREMENT_0, tl.uint32)
        k1 = k1 + tl.full((), INCREMENT_1, tl.uint32)
    first = (c0 >> 8).to(tl.int32).to(tl.float32)
    second = (c1 >> 8).to(tl.int32).to(tl.float32)
    radius = tl.sqrt(-2.0 * tl.log((first + 1.0) * 5.9604644775390625e-08))
    return radius * tl.cos(3.7450704e-07 * second)
