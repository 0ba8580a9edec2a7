"""The pointwise ops as Triton functions, to be called by the kernels of passes between reading and storing a pixel.

A program is a compile-time list of (op code, column of its row, flags), so that a pass holds the code of its own ops and no
other. What differs between samples is read from the sample's row. The arithmetic stands in ``pixel_math.py``, the torch form of
each op in its file in ``gpuaug.fusion.ops``, or in ``one_of.py`` in ``gpuaug.fusion.policies``.
"""

import triton
import triton.language as tl

from gpuaug.fusion.backends.triton.pixel_math import (
    CLEAN,
    grey_of,
    hue_turned,
    normal,
    normalized,
    posterized,
    raised,
    saturated,
    snowed,
    unit,
    unit_sums,
)
from gpuaug.fusion.ops import channel, color, positional
from gpuaug.fusion.ops import color_jitter as j
from gpuaug.fusion.ops.base import MOST_CODES

BRIGHTNESS = tl.constexpr(color.Brightness.code)
CONTRAST = tl.constexpr(color.Contrast.code)
SATURATION = tl.constexpr(color.Saturation.code)
HUE = tl.constexpr(color.Hue.code)
GAMMA = tl.constexpr(color.Gamma.code)
GRAYSCALE = tl.constexpr(channel.Grayscale.code)
INVERT = tl.constexpr(color.Invert.code)
SOLARIZE = tl.constexpr(color.Solarize.code)
POSTERIZE = tl.constexpr(color.Posterize.code)
SHUFFLE = tl.constexpr(channel.ChannelShuffle.code)
DROPOUT = tl.constexpr(channel.ChannelDropout.code)
NOISE = tl.constexpr(positional.GaussianNoise.code)
FIELDS = tl.constexpr(positional.FIELDS)
ERASING = tl.constexpr(positional.Erasing.code)
NORMALIZE = tl.constexpr(channel.Normalize.code)
DENORMALIZE = tl.constexpr(channel.Denormalize.code)
JITTER = tl.constexpr(j.ColorJitter.code)
JIGGLE = tl.constexpr(j.ColorJiggle.code)
SNOW = tl.constexpr(color.Snow.code)
ONE_OF = tl.constexpr(MOST_CODES)
PERMUTES = tl.constexpr(j.PERMUTES)

BEFORE_CONTRAST = tl.constexpr(j.BEFORE_CONTRAST)
FROM_CONTRAST = tl.constexpr(j.FROM_CONTRAST)


@triton.jit
def jittered(r, g, b, row, mean, step, AROUND_MEAN: tl.constexpr, ACTIVE: tl.constexpr):
    """One adjustment of a jitter: 0 brightness, 1 contrast, 2 saturation, 3 hue, 4 none.

    ``ACTIVE`` has a bit for each adjustment that the jitter may make, ``CLEAN`` where no pixel is NaN, and
    ``TORCHVISION_GREY`` where greys are torchvision's.
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
                grey = (1 - factor) * grey_of(r, g, b, ACTIVE)
                r, g, b = unit_sums(r, g, b, factor, grey, ACTIVE)
            else:
                r, g, b = saturated(r, g, b, factor)
    if ACTIVE & 8:
        if step == 3:
            r, g, b = hue_turned(r, g, b, tl.load(row + 4))
    return r, g, b


@triton.jit
def reordered(r, g, b, channels):
    """Channels that come from where three numbers in memory say."""
    from_r = tl.load(channels)
    from_g = tl.load(channels + 1)
    from_b = tl.load(channels + 2)
    new_r = tl.where(from_r == 0, r, tl.where(from_r == 1, g, b))
    new_g = tl.where(from_g == 0, r, tl.where(from_g == 1, g, b))
    new_b = tl.where(from_b == 0, r, tl.where(from_b == 1, g, b))
    return new_r, new_g, new_b


@triton.jit
def point(
    r, g, b, x, y, sample, plane, width, row, mean,
    CODE: tl.constexpr, FLAGS: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr,
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
        offset = tl.load(row + 2)
        r, g, b = posterized(r, step, offset), posterized(g, step, offset), posterized(b, step, offset)
    elif CODE == SNOW:
        r, g, b = snowed(unit(r), unit(g), unit(b), tl.load(row + 1), tl.load(row + 2))
        r, g, b = unit(r), unit(g), unit(b)
    elif CODE == SHUFFLE:
        r, g, b = reordered(r, g, b, row + 1)
    elif CODE == DROPOUT:
        value = tl.load(row + 1)
        r = tl.where(tl.load(row + 2 + plane) != 0, value, r)
        g = tl.where(tl.load(row + 2 + plane + second) != 0, value, g)
        b = tl.where(tl.load(row + 2 + plane + third) != 0, value, b)
    elif CODE == NOISE:
        mean_ = tl.load(row + 1)
        deviation = tl.load(row + 2)
        seed = tl.load(row + 3).to(tl.int32) * 65536 + tl.load(row + 4).to(tl.int32)
        # The flags are the number of frames of a clip, each of which takes a field of its own.
        field = (tl.load(row + 5).to(tl.int32) + sample % FLAGS) % FIELDS
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
        reached = 0  # 1 from the contrast on
        # A loop, not four copies: those would not fit into the instruction cache.
        for position in range(4):
            step = tl.load(row + 5 + position).to(tl.int32)
            if (BEFORE_CONTRAST | FROM_CONTRAST) & FLAGS:
                reached = tl.where(step == 1, 1, reached)
                # What the other kernel makes is left out.
                left_out = 1 if BEFORE_CONTRAST & FLAGS else 0
                step = tl.where(reached == left_out, 4, step)
            r, g, b = jittered(r, g, b, row, mean, step, CODE == JITTER, FLAGS)
        if not BEFORE_CONTRAST & FLAGS:
            if FLAGS & 8 or (FLAGS & 4 and CODE == JIGGLE):
                # All others end with a clamp of their own.
                r, g, b = unit(r), unit(g), unit(b)
            if PERMUTES & FLAGS:
                r, g, b = reordered(r, g, b, row + 9)
    return r, g, b


@triton.jit
def picked(
    r, g, b, x, y, sample, plane, width, row, mean,
    CODE: tl.constexpr, FLAGS: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr,
):  # fmt: skip
    """One op, or the one of several that the row names: ``FLAGS`` has a bit for the code of each that there is."""
    if CODE == ONE_OF:
        chosen = tl.load(row + 1).to(tl.int32)
        for code in tl.static_range(1, ONE_OF):
            if (FLAGS >> code) & 1:
                if chosen == code:
                    r, g, b = point(r, g, b, x, y, sample, plane, width, row + 2, mean, code, 0, CHANNELS, RGB)
    else:
        r, g, b = point(r, g, b, x, y, sample, plane, width, row, mean, CODE, FLAGS, CHANNELS, RGB)
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
            r, g, b = picked(
                r, g, b, x, y, sample, plane, width, own, mean, PROGRAM[index][0], PROGRAM[index][2], CHANNELS, RGB
            )
    return r, g, b
