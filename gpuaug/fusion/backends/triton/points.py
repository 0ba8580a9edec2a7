"""Pointwise ops as device functions, which kernels call between reading and storing a pixel.

A *program* is a compile-time list with one entry per op, so that a kernel contains only the code of these ops. An entry is
(code of the op, first column of the op in the row, flags, scale, offset). Scale and offset convert the result of the op to
bytes (``to_bytes``); a scale of 0 means no conversion. The first entry may have code 0: it only converts the result of the
gather or filter that precedes the ops (``PointProgram``).

Parameters that differ between samples are loaded from the sample's row of the parameter table. The first column of an op is its
apply mask: 0 for a sample that the op does not change. The other columns are described in the class of the op. In functions of
one op, ``row`` is the address of the op's first column. Arithmetic is in ``pixel_math.py``. The method ``apply`` of an op
computes the same in torch.
"""

import triton
import triton.language as tl

from gpuaug.fusion.backends.triton.pixel_math import (
    IN_BYTES,
    NO_NAN,
    TRUNCATED,
    TRUNCATED_256,
    clamped,
    clamped_sums,
    compiled,
    grey_of,
    normal,
    normalize,
    rotate_hue,
    scale_saturation,
    to_bytes,
    uniform_pair,
)
from gpuaug.fusion.ops import channel, color, color_jitter, positional
from gpuaug.fusion.ops.base import LARGEST_CODE

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
FIELDS = tl.constexpr(positional.NOISE_FIELDS)
FRAMES = tl.constexpr(positional.FRAMES)
TRUNCATES_NOISE = tl.constexpr(positional.IN_BYTES)
CLAMPS_NOISE = tl.constexpr(positional.CLAMPS)
ERASES_WITH_NOISE = tl.constexpr(positional.ERASES_WITH_NOISE)
ERASING = tl.constexpr(positional.Erasing.code)
NORMALIZE = tl.constexpr(channel.Normalize.code)
DENORMALIZE = tl.constexpr(channel.Denormalize.code)
JITTER = tl.constexpr(color_jitter.ColorJitter.code)
JIGGLE = tl.constexpr(color_jitter.ColorJiggle.code)
SNOW = tl.constexpr(color.Snow.code)
RGB_SHIFT = tl.constexpr(channel.RGBShift.code)
PLANCKIAN = tl.constexpr(channel.PlanckianJitter.code)
SALT_AND_PEPPER = tl.constexpr(positional.SaltAndPepperNoise.code)
ILLUMINATION = tl.constexpr(positional.LinearIllumination.code)
ONE_OF = tl.constexpr(LARGEST_CODE)

brightness, contrast, gamma, invert = map(compiled, (color.brightness, color.contrast, color.gamma, color.invert))
solarize, posterize = map(compiled, (color.solarize, color.posterize))
saturation, hue, snow = map(compiled, (color.saturation, color.hue, color.snow))
noisy, falloff = map(compiled, (positional.noisy, positional.falloff))
denormalize, drop = map(compiled, (channel.denormalize, channel.drop))
shift, rescale = map(compiled, (channel.shift, channel.rescale))
PERMUTES = tl.constexpr(color_jitter.PERMUTES)

BEFORE_CONTRAST = tl.constexpr(color_jitter.BEFORE_CONTRAST)
FROM_CONTRAST = tl.constexpr(color_jitter.FROM_CONTRAST)


@triton.jit
def load_channels(address, plane, RGB: tl.constexpr):
    """Load one number per channel, from ``address`` on. Without ``RGB``, return the number of ``plane`` three times."""
    r = tl.load(address + plane)
    if RGB:
        return r, tl.load(address + 1), tl.load(address + 2)
    return r, r, r


@triton.jit
def normals(x, y, plane, field, width, seed, RGB: tl.constexpr):
    """Return the noise field of each channel (``normal``); without ``RGB``, of channel ``plane`` three times."""
    r = normal(x, y, plane, field, width, seed)
    if RGB:
        return r, normal(x, y, plane + 1, field, width, seed), normal(x, y, plane + 2, field, width, seed)
    return r, r, r


@triton.jit
def per_channel(FORMULA: tl.constexpr, r, g, b, first, second):
    """Return ``FORMULA(channel, first, second)`` of each of three channels. ``first``, ``second``: parameters or flags."""
    return FORMULA(r, first, second), FORMULA(g, first, second), FORMULA(b, first, second)


@triton.jit
def adjust(r, g, b, row, mean, adjustment, IS_JITTER: tl.constexpr, FLAGS: tl.constexpr):
    """Apply one adjustment of a jitter.

    ``adjustment``: 0 brightness, 1 contrast, 2 saturation, 3 hue, 4 none. ``row``: address of the apply mask of the jitter; the
    factors of the adjustments 0 to 3 follow. ``mean``: mean grey of the image. ``IS_JITTER``: adjust as Kornia's
    ``ColorJitter``, whose contrast scales differences from ``mean``; else as ``ColorJiggle``. ``FLAGS``: flags of
    ``color_jitter.py``: bit n if adjustment n is active, ``NO_NAN``, ``TORCHVISION_GREY`` and ``IN_BYTES``.
    """
    if FLAGS & 1:
        if adjustment == 0:
            factor = tl.load(row + 1)
            if IS_JITTER:
                r, g, b = clamped_sums(r, g, b, factor, 0.0, FLAGS)
            else:
                offset = factor - 1
                r, g, b = clamped_sums(r, g, b, 1.0, offset, FLAGS)
    if FLAGS & 2:
        if adjustment == 1:
            factor = tl.load(row + 2)
            if IS_JITTER:
                offset = mean * (1 - factor)
                r, g, b = clamped_sums(r, g, b, factor, offset, FLAGS)
            else:
                r, g, b = clamped_sums(r, g, b, factor, 0.0, FLAGS)
    if FLAGS & 4:
        if adjustment == 2:
            factor = tl.load(row + 3)
            if IS_JITTER:
                grey = (1 - factor) * grey_of(r, g, b, FLAGS)
                r, g, b = clamped_sums(r, g, b, factor, grey, FLAGS)
            else:
                r, g, b = scale_saturation(r, g, b, factor)
    if FLAGS & 8:
        if adjustment == 3:
            r, g, b = rotate_hue(r, g, b, tl.load(row + 4))
    if IN_BYTES & FLAGS:
        if adjustment < 4:
            # Hue has another ``ByteRule`` than the other adjustments, with the same offset.
            scale = tl.where(adjustment == 3, TRUNCATED_256[0], TRUNCATED[0])
            r, g, b = per_channel(to_bytes, r, g, b, scale, TRUNCATED[1])
    return r, g, b


@triton.jit
def permute_channels(r, g, b, channels):
    """Permute channels. ``channels``: address of the indices of the source channels of r, g and b."""
    from_r = tl.load(channels)
    from_g = tl.load(channels + 1)
    from_b = tl.load(channels + 2)
    new_r = tl.where(from_r == 0, r, tl.where(from_r == 1, g, b))
    new_g = tl.where(from_g == 0, r, tl.where(from_g == 1, g, b))
    new_b = tl.where(from_b == 0, r, tl.where(from_b == 1, g, b))
    return new_r, new_g, new_b


@triton.jit
def apply_op(
    r, g, b, x, y, sample, plane, width, row, mean,
    CODE: tl.constexpr, FLAGS: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr,
):  # fmt: skip
    """Apply the op of code ``CODE`` to the pixels of a sample. See ``apply_point_ops`` for the channels.

    ``x``, ``y``: coordinates of the pixels in the image, of ``width`` columns. ``row``: address of the apply mask of the op,
    which is not 0; the parameters of the op follow. ``sample``: index of the image, or of the frame of a clip, in the batch.
    """
    if CODE == BRIGHTNESS:
        r, g, b = per_channel(brightness, r, g, b, tl.load(row + 1), FLAGS)
    elif CODE == CONTRAST:
        r, g, b = per_channel(contrast, r, g, b, tl.load(row + 1), FLAGS)
    elif CODE == SATURATION:
        r, g, b = saturation(r, g, b, tl.load(row + 1))
    elif CODE == HUE:
        r, g, b = hue(r, g, b, tl.load(row + 1))
    elif CODE == GAMMA:
        r, g, b = per_channel(gamma, r, g, b, tl.load(row + 1), tl.load(row + 2))
    elif CODE == GRAYSCALE:
        grey = r * tl.load(row + 1) + g * tl.load(row + 2) + b * tl.load(row + 3)
        r, g, b = grey, grey, grey
    elif CODE == INVERT:
        largest = tl.load(row + 1)
        r, g, b = invert(r, largest), invert(g, largest), invert(b, largest)
    elif CODE == SOLARIZE:
        r, g, b = per_channel(solarize, r, g, b, tl.load(row + 1), tl.load(row + 2))
    elif CODE == POSTERIZE:
        r, g, b = per_channel(posterize, r, g, b, tl.load(row + 1), tl.load(row + 2))
    elif CODE == SNOW:
        r, g, b = snow(r, g, b, tl.load(row + 1), tl.load(row + 2))
    elif CODE == SHUFFLE:
        r, g, b = permute_channels(r, g, b, row + 1)
    elif CODE == DROPOUT:  # columns: fill value; per channel, whether it is dropped
        value = tl.load(row + 1)
        drops_r, drops_g, drops_b = load_channels(row + 2, plane, RGB)
        r, g, b = drop(r, value, drops_r), drop(g, value, drops_g), drop(b, value, drops_b)
    elif CODE == NOISE or CODE == SALT_AND_PEPPER:
        # Columns: mean and standard deviation, or share of noise and of salt; high and low 16 bits of the seed, noise field.
        first = tl.load(row + 1)
        second = tl.load(row + 2)
        seed = tl.load(row + 3).to(tl.int32) * 65536 + tl.load(row + 4).to(tl.int32)
        # The row has the noise field of a clip's first frame, and each later frame has the next field. The bits FRAMES of the
        # flags are the number of frames per clip.
        field = (tl.load(row + 5).to(tl.int32) + sample % (FRAMES & FLAGS)) % FIELDS
        if CODE == SALT_AND_PEPPER:  # noise of channel 0 for all channels
            noise, salt = uniform_pair(x, y, 0, field, width, seed)
            covered = noise < first
            fill = tl.where(salt < second, 1.0, 0.0)
            r, g, b = tl.where(covered, fill, r), tl.where(covered, fill, g), tl.where(covered, fill, b)
        else:
            in_bytes: tl.constexpr = TRUNCATES_NOISE & FLAGS
            clamps: tl.constexpr = CLAMPS_NOISE & FLAGS
            noise_r, noise_g, noise_b = normals(x, y, plane, field, width, seed, RGB)
            r = noisy(r, first + second * noise_r, in_bytes, clamps)
            g = noisy(g, first + second * noise_g, in_bytes, clamps)
            b = noisy(b, first + second * noise_b, in_bytes, clamps)
    elif CODE == ERASING:  # columns: left, right, top, bottom of the rectangle; seed and noise field, or a value per channel
        covered = (x >= tl.load(row + 1)) & (x < tl.load(row + 2)) & (y >= tl.load(row + 3)) & (y < tl.load(row + 4))
        if ERASES_WITH_NOISE & FLAGS:
            seed = tl.load(row + 5).to(tl.int32)
            field = tl.load(row + 6).to(tl.int32)
            in_bytes: tl.constexpr = TRUNCATES_NOISE & FLAGS
            noise_r, noise_g, noise_b = normals(x, y, plane, field, width, seed, RGB)
            fill_r = noisy(0.0, noise_r, in_bytes, 0)
            fill_g = noisy(0.0, noise_g, in_bytes, 0)
            fill_b = noisy(0.0, noise_b, in_bytes, 0)
        else:
            fill_r, fill_g, fill_b = load_channels(row + 5, plane, RGB)
        r, g, b = tl.where(covered, fill_r, r), tl.where(covered, fill_g, g), tl.where(covered, fill_b, b)
    elif CODE == NORMALIZE or CODE == DENORMALIZE:  # columns: mean per channel, standard deviation per channel
        mean_r, mean_g, mean_b = load_channels(row + 1, plane, RGB)
        std_r, std_g, std_b = load_channels(row + 1 + CHANNELS, plane, RGB)
        FORMULA: tl.constexpr = normalize if CODE == NORMALIZE else denormalize
        r, g, b = FORMULA(r, mean_r, std_r), FORMULA(g, mean_g, std_g), FORMULA(b, mean_b, std_b)
    elif CODE == RGB_SHIFT or CODE == PLANCKIAN:  # columns: addend or factor per channel
        number_r, number_g, number_b = load_channels(row + 1, plane, RGB)
        PER_CHANNEL: tl.constexpr = shift if CODE == RGB_SHIFT else rescale
        r, g, b = PER_CHANNEL(r, number_r), PER_CHANNEL(g, number_g), PER_CHANNEL(b, number_b)
    elif CODE == ILLUMINATION:  # columns: slopes, offset, scale; arguments of ``falloff``, each for x and for y
        exponent_x = falloff(x, tl.load(row + 5), tl.load(row + 7), tl.load(row + 9))
        exponent_y = falloff(y, tl.load(row + 6), tl.load(row + 8), tl.load(row + 10))
        ramp = x * tl.load(row + 1) + y * tl.load(row + 2)
        light = ramp + tl.load(row + 3) + tl.exp(exponent_x + exponent_y) * tl.load(row + 4)
        r, g, b = shift(r, light), shift(g, light), shift(b, light)
    elif CODE == JITTER or CODE == JIGGLE:
        # Columns: 1 to 4, factors of the adjustments; 5 to 8, order of the adjustments; 9 to 11, permutation of the channels.
        if not NO_NAN & FLAGS:  # with this flag, the input is in [0, 1]
            r, g, b = clamped(r, g, b)
        from_contrast = 0  # 1 at contrast and at the adjustments after it
        # A loop at run time, because four copies of its code would not fit into the instruction cache.
        for position in range(4):
            adjustment = tl.load(row + 5 + position).to(tl.int32)
            if (BEFORE_CONTRAST | FROM_CONTRAST) & FLAGS:
                from_contrast = tl.where(adjustment == 1, 1, from_contrast)
                # A contrast around a mean takes two kernels. The first, with BEFORE_CONTRAST, skips contrast and the
                # adjustments after it (``from_contrast`` 1). The second skips the adjustments before contrast
                # (``from_contrast`` 0).
                skipped = 1 if BEFORE_CONTRAST & FLAGS else 0
                adjustment = tl.where(from_contrast == skipped, 4, adjustment)
            r, g, b = adjust(r, g, b, row, mean, adjustment, CODE == JITTER, FLAGS)
        if not BEFORE_CONTRAST & FLAGS:
            if FLAGS & 8 or (FLAGS & 4 and CODE == JIGGLE):
                # After hue, and after saturation of ColorJiggle. The other adjustments end with a clamp.
                r, g, b = clamped(r, g, b)
            if PERMUTES & FLAGS:
                r, g, b = permute_channels(r, g, b, row + 9)
    return r, g, b


@triton.jit
def apply_point_ops(
    r, g, b, x, y, sample, plane, width, row, mean,
    PROGRAM: tl.constexpr, OP_COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr,
):  # fmt: skip
    """Run a program of ``OP_COUNT`` entries on a tile of one sample. Return the pixels (r, g, b).

    With ``RGB``, r, g and b are the three channels. Without, r is channel ``plane``, and g and b are copies of it, which are
    never stored, so that the compiler removes their computation.

    ``x``, ``y``: coordinates of the pixels in the image, of ``width`` columns, in the shape of r, or shapes that broadcast to
    it. ``sample``: index of the image in the batch. ``row``: address of the sample's row of the parameter table, from the first
    column of the pass on. ``mean``: mean grey of the image, for a contrast. ``CHANNELS``: number of channels of the image.

    The columns of an op with the code ``ONE_OF`` are its apply mask, the code of the op that was picked for the sample, and the
    columns of the picked op. Its flags have bit n if the op of code n can be picked. Ops that can be picked have no flags.
    """
    # An entry of the program is (code, first column, flags, scale, offset).
    for index in tl.static_range(OP_COUNT):
        if PROGRAM[index][1] < 0:  # converts the result of a gather, which has no apply mask
            r, g, b = per_channel(to_bytes, r, g, b, PROGRAM[index][3], PROGRAM[index][4])
        else:
            op_row = row + PROGRAM[index][1]
            if tl.load(op_row) != 0:
                if PROGRAM[index][0] == ONE_OF:
                    picked_code = tl.load(op_row + 1).to(tl.int32)
                    for code in tl.static_range(1, ONE_OF):
                        if (PROGRAM[index][2] >> code) & 1:
                            if picked_code == code:
                                r, g, b = apply_op(
                                    r, g, b, x, y, sample, plane, width, op_row + 2, mean, code, 0, CHANNELS, RGB
                                )
                else:
                    r, g, b = apply_op(
                        r, g, b, x, y, sample, plane, width, op_row, mean, PROGRAM[index][0], PROGRAM[index][2], CHANNELS, RGB
                    )
                if PROGRAM[index][3] > 0:
                    r, g, b = per_channel(to_bytes, r, g, b, PROGRAM[index][3], PROGRAM[index][4])
    return r, g, b
