"""The pointwise ops as Triton functions, to be called by the kernels of passes between reading and storing a pixel.

A program is a compile-time list of (op, column of its row, flags), so that a pass holds the code of its own ops and no other.
What differs between samples is read from the sample's row. The torch form of each op stands in its file in
``gpuaug.fusion.ops``, or in ``one_of.py`` in ``gpuaug.fusion.policies``.
"""

import os

import triton
import triton.language as tl

from gpuaug.fusion.ops import channel as channels
from gpuaug.fusion.ops import color, erasing, noise
from gpuaug.fusion.ops import color_jitter as j
from gpuaug.fusion.policies.one_of import OneOf

BRIGHTNESS = tl.constexpr(color.Brightness.code)
CONTRAST = tl.constexpr(color.Contrast.code)
SATURATION = tl.constexpr(color.Saturation.code)
HUE = tl.constexpr(color.Hue.code)
GAMMA = tl.constexpr(color.Gamma.code)
GRAYSCALE = tl.constexpr(channels.Grayscale.code)
INVERT = tl.constexpr(color.Invert.code)
SOLARIZE = tl.constexpr(color.Solarize.code)
POSTERIZE = tl.constexpr(color.Posterize.code)
SHUFFLE = tl.constexpr(channels.ChannelShuffle.code)
DROPOUT = tl.constexpr(channels.ChannelDropout.code)
NOISE = tl.constexpr(noise.GaussianNoise.code)
ERASING = tl.constexpr(erasing.Erasing.code)
NORMALIZE = tl.constexpr(channels.Normalize.code)
DENORMALIZE = tl.constexpr(channels.Denormalize.code)
JITTER = tl.constexpr(j.ColorJitter.code)
JIGGLE = tl.constexpr(j.ColorJiggle.code)
ONE_OF = tl.constexpr(OneOf.code)

CLEAN = tl.constexpr(j.CLEAN)
ALL_BUT_CONTRAST = tl.constexpr(j.CLEAN | 13)
COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"""Triton's interpreter knows no assembly, and does not fuse products with sums."""

MULTIPLIER_0 = tl.constexpr(noise.MULTIPLIERS[0])
MULTIPLIER_1 = tl.constexpr(noise.MULTIPLIERS[1])
INCREMENT_0 = tl.constexpr(noise.INCREMENTS[0])
INCREMENT_1 = tl.constexpr(noise.INCREMENTS[1])
RED = tl.constexpr(channels.GREY[0])
GREEN = tl.constexpr(channels.GREY[1])
BLUE = tl.constexpr(channels.GREY[2])


@triton.jit
def unit(v):
    """Clamped to [0, 1]; what is not a number stays so, as in torch."""
    v = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(v, 1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def unit_sum(v, factor, base, FLAGS: tl.constexpr):
    """V · factor + base, clamped; in one instruction where the flags say that all are numbers."""
    if COMPILED and CLEAN & FLAGS:
        return tl.inline_asm_elementwise("fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [v, factor, base], tl.float32, True, 1)
    return unit(v * factor + base)


@triton.jit
def unit_sums(r, g, b, factor, base, FLAGS: tl.constexpr):
    """The same for three channels."""
    return unit_sum(r, factor, base, FLAGS), unit_sum(g, factor, base, FLAGS), unit_sum(b, factor, base, FLAGS)


@triton.jit
def grey_of(r, g, b):
    """What the channels weigh together."""
    return r * RED + g * GREEN + b * BLUE


@triton.jit
def saturated(r, g, b, factor):
    """The saturation of HSV, multiplied and clamped."""
    most = tl.maximum(tl.maximum(r, g), b)
    least = tl.minimum(tl.minimum(r, g), b)
    spread = most - least
    share = spread / tl.where(most == 0, 1.0, most + 1e-8)
    wanted = most * unit(share * factor)
    scale = wanted / tl.where(spread == 0, 1.0, spread)
    base = most - wanted
    return (r - least) * scale + base, (g - least) * scale + base, (b - least) * scale + base


@triton.jit
def course(at, most, low, falling, rising):
    """A channel around the circle of hues: it rises, stays for two sixths, falls, and stays low for two."""
    at = tl.where(at >= 6, at - 6, at)
    return tl.where(at == 0, rising, tl.where(at <= 2, most, tl.where(at == 3, falling, low)))


@triton.jit
def hue_turned(r, g, b, turns):
    """The hue of HSV, turned by a share of the circle."""
    most = tl.maximum(tl.maximum(r, g), b)
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
    r = course(whole + 2, most, low, falling, rising)
    g = course(whole, most, low, falling, rising)
    b = course(whole + 4, most, low, falling, rising)
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
def posterized(v, step):
    """The bits of a byte above ``step``."""
    v = unit(v)
    levels = tl.floor(tl.div_rn(tl.div_rn(tl.floor(v * 255), step + 0.0 * v), 255.0 + 0.0 * v) * 255)
    kept = tl.where(step == 256, 0.0, tl.div_rn(levels * step, 255.0 + 0.0 * v))
    return tl.where(step == 1, v, kept)


@triton.jit
def normal(x, y, channel, field, width, seed):
    """Standard normal numbers of a channel, by place: the counter is (pixel, channel, field, 0)."""
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


@triton.jit
def jittered(r, g, b, row, mean, step, AROUND_MEAN: tl.constexpr, ACTIVE: tl.constexpr):
    """One adjustment: 0 brightness, 1 contrast, 2 saturation, 3 hue, 4 none.

    ``ACTIVE`` has a bit for each that there is, and one (``CLEAN``) that says that all pixels are numbers.
    """
    if ACTIVE & 1:
        if step == 0:
            factor = tl.load(row + 1)
            if AROUND_MEAN:
                r, g, b = unit_sums(r, g, b, factor, 0.0, ACTIVE)
            else:
                base = factor - 1
                r, g, b = unit_sums(r, g, b, 1.0, base, ACTIVE)
    if ACTIVE & 2:
        if step == 1:
            factor = tl.load(row + 2)
            if AROUND_MEAN:
                base = mean * (1 - factor)
                r, g, b = unit_sums(r, g, b, factor, base, ACTIVE)
            else:
                r, g, b = unit_sums(r, g, b, factor, 0.0, ACTIVE)
    if ACTIVE & 4:
        if step == 2:
            factor = tl.load(row + 3)
            if AROUND_MEAN:
                grey = (1 - factor) * grey_of(r, g, b)
                r, g, b = unit_sums(r, g, b, factor, grey, ACTIVE)
            else:
                r, g, b = saturated(r, g, b, factor)
    if ACTIVE & 8:
        if step == 3:
            r, g, b = hue_turned(r, g, b, tl.load(row + 4))
    return r, g, b


@triton.jit
def point(
    r, g, b, x, y, plane, width, row, mean, CODE: tl.constexpr, FLAGS: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr
):  # fmt: skip
    """One op on the pixels of a sample that the op applies to. ``row`` begins with the apply mask."""
    second: tl.constexpr = 1 if RGB else 0
    third: tl.constexpr = 2 if RGB else 0
    if CODE == BRIGHTNESS:
        change = tl.load(row + 1)
        if tl.load(row + 2) != 0:
            r, g, b = unit(unit(r) + change), unit(unit(g) + change), unit(unit(b) + change)
        else:
            r, g, b = r + change, g + change, b + change
    elif CODE == CONTRAST:
        change = tl.load(row + 1)
        if tl.load(row + 2) != 0:
            r, g, b = unit(unit(r) * change), unit(unit(g) * change), unit(unit(b) * change)
        else:
            r, g, b = r * change, g * change, b * change
    elif CODE == SATURATION:
        r, g, b = saturated(unit(r), unit(g), unit(b), tl.load(row + 1))
        r, g, b = unit(r), unit(g), unit(b)
    elif CODE == HUE:
        r, g, b = hue_turned(unit(r), unit(g), unit(b), tl.load(row + 1))
        r, g, b = unit(r), unit(g), unit(b)
    elif CODE == GAMMA:
        gamma = tl.load(row + 1)
        gain = tl.load(row + 2)
        r = unit(gain * raised(unit(r), gamma))
        g = unit(gain * raised(unit(g), gamma))
        b = unit(gain * raised(unit(b), gamma))
    elif CODE == GRAYSCALE:
        grey = r * tl.load(row + 1) + g * tl.load(row + 2) + b * tl.load(row + 3)
        r, g, b = grey, grey, grey
    elif CODE == INVERT:
        most = tl.load(row + 1)
        r, g, b = most - r, most - g, most - b
    elif CODE == SOLARIZE:
        threshold = tl.load(row + 1)
        change = tl.load(row + 2)
        r, g, b = unit(unit(r) + change), unit(unit(g) + change), unit(unit(b) + change)
        r = tl.where(r < threshold, r, 1 - r)
        g = tl.where(g < threshold, g, 1 - g)
        b = tl.where(b < threshold, b, 1 - b)
    elif CODE == POSTERIZE:
        step = tl.load(row + 1)
        r, g, b = posterized(r, step), posterized(g, step), posterized(b, step)
    elif CODE == SHUFFLE:
        from_r = tl.load(row + 1)
        from_g = tl.load(row + 2)
        from_b = tl.load(row + 3)
        new_r = tl.where(from_r == 0, r, tl.where(from_r == 1, g, b))
        new_g = tl.where(from_g == 0, r, tl.where(from_g == 1, g, b))
        new_b = tl.where(from_b == 0, r, tl.where(from_b == 1, g, b))
        r, g, b = new_r, new_g, new_b
    elif CODE == DROPOUT:
        value = tl.load(row + 1)
        r = tl.where(tl.load(row + 2 + plane) != 0, value, r)
        g = tl.where(tl.load(row + 2 + plane + second) != 0, value, g)
        b = tl.where(tl.load(row + 2 + plane + third) != 0, value, b)
    elif CODE == NOISE:
        mean_ = tl.load(row + 1)
        deviation = tl.load(row + 2)
        seed = tl.load(row + 3).to(tl.int32) * 65536 + tl.load(row + 4).to(tl.int32)
        field = tl.load(row + 5).to(tl.int32)
        r += mean_ + deviation * normal(x, y, plane, field, width, seed)
        if RGB:
            g += mean_ + deviation * normal(x, y, plane + 1, field, width, seed)
            b += mean_ + deviation * normal(x, y, plane + 2, field, width, seed)
    elif CODE == ERASING:
        value = tl.load(row + 5)
        covered = (x >= tl.load(row + 1)) & (x < tl.load(row + 2)) & (y >= tl.load(row + 3)) & (y < tl.load(row + 4))
        r, g, b = tl.where(covered, value, r), tl.where(covered, value, g), tl.where(covered, value, b)
    elif CODE == NORMALIZE or CODE == DENORMALIZE:
        means = row + 1 + plane
        stds = means + CHANNELS
        if CODE == NORMALIZE:
            r = normalized(r, tl.load(means), tl.load(stds))
            g = normalized(g, tl.load(means + second), tl.load(stds + second))
            b = normalized(b, tl.load(means + third), tl.load(stds + third))
        else:
            r = r * tl.load(stds) + tl.load(means)
            g = g * tl.load(stds + second) + tl.load(means + second)
            b = b * tl.load(stds + third) + tl.load(means + third)
    elif CODE == JITTER or CODE == JIGGLE:
        if not CLEAN & FLAGS:
            r, g, b = unit(r), unit(g), unit(b)
        # A loop, not four copies: those would not fit into the instruction cache.
        for position in range(4):
            r, g, b = jittered(r, g, b, row, mean, tl.load(row + 5 + position).to(tl.int32), CODE == JITTER, FLAGS)
        if FLAGS & 8 or (FLAGS & 4 and CODE == JIGGLE):
            # All others end with a clamp of their own.
            r, g, b = unit(r), unit(g), unit(b)
    return r, g, b


@triton.jit
def picked(
    r, g, b, x, y, plane, width, row, mean, CODE: tl.constexpr, FLAGS: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr
):  # fmt: skip
    """One op, or the one of several that the row names: ``FLAGS`` has a bit for the code of each that there is."""
    if CODE == ONE_OF:
        chosen = tl.load(row + 1).to(tl.int32)
        for code in tl.static_range(1, ONE_OF):
            if (FLAGS >> code) & 1:
                if chosen == code:
                    r, g, b = point(r, g, b, x, y, plane, width, row + 2, mean, code, 0, CHANNELS, RGB)
    else:
        r, g, b = point(r, g, b, x, y, plane, width, row, mean, CODE, FLAGS, CHANNELS, RGB)
    return r, g, b


@triton.jit
def points(
    r, g, b, x, y, sample, plane, height, width, row, mean,
    PROGRAM: tl.constexpr, COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr,
):  # fmt: skip
    """Run a program on a tile of one sample.

    With ``RGB``, r, g and b are the channels. Without, r is channel ``plane``, and g and b are copies of it that are computed
    along and never stored, so that the compiler drops them.
    """
    for index in tl.static_range(COUNT):
        own = row + PROGRAM[index][1]
        if tl.load(own) != 0:
            r, g, b = picked(r, g, b, x, y, plane, width, own, mean, PROGRAM[index][0], PROGRAM[index][2], CHANNELS, RGB)
    return r, g, b


@triton.jit
def grey_before_contrast(
    r, g, b, x, y, sample, plane, height, width, row,
    PROGRAM: tl.constexpr, COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr,
):  # fmt: skip
    """The grey that the contrast of the program's jitter takes the mean of."""
    grey = grey_of(r, g, b)
    for index in tl.static_range(COUNT):
        own = row + PROGRAM[index][1]
        if PROGRAM[index][0] == JITTER:
            flags: tl.constexpr = PROGRAM[index][2]
            if not CLEAN & flags:
                r, g, b = unit(r), unit(g), unit(b)
            waiting = 1
            for position in range(4):
                step = tl.load(own + 5 + position).to(tl.int32)
                waiting = tl.where(step == 1, 0, waiting)
                # What comes after the contrast is of no interest.
                r, g, b = jittered(r, g, b, own, 0.0, tl.where(waiting == 1, step, 4), True, ALL_BUT_CONTRAST & flags)
            grey = grey_of(r, g, b)
        elif tl.load(own) != 0:
            r, g, b = picked(r, g, b, x, y, plane, width, own, 0.0, PROGRAM[index][0], PROGRAM[index][2], CHANNELS, RGB)
    return grey
