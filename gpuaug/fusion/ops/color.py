"""Kornia's pointwise color modules: brightness, contrast, saturation, hue, gamma, invert, solarize, posterize, snow.

Each module is *lowered* to an op, or run by Kornia. A *row* holds an op's parameters for one *sample*, an image or a clip, in
float32. Its first column is the apply mask: 1 to apply the op, 0 to skip it. Each op clamps values as Kornia's module does, so
two ops cannot be merged into one. The functions are formulas (``PointOp.formula``), which torch and Triton run. Class
attributes without a comment are explained in ``base.py``.
"""

from dataclasses import replace

import numpy as np
import torch
from kornia import augmentation as K
from torch import Tensor

from gpuaug.fusion.ops.base import Array, OpDraws, PointOp, Size, column
from gpuaug.fusion.ops.filters import LEVEL_TOLERANCE
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.pixels import RGB, clamp01, exact_quotient, floor, maximum, minimum, power, quotient, turned, where


def brightness(value: Tensor, factor: Tensor, unclipped: int) -> Tensor:
    """Add factor - 1. Clamp to [0, 1] before and after unless ``unclipped``."""
    addend = factor - 1
    return value + addend if unclipped else clamp01(clamp01(value) + addend)


def contrast(value: Tensor, factor: Tensor, unclipped: int) -> Tensor:
    """Multiply by ``factor``. Clamp to [0, 1] before and after unless ``unclipped``."""
    return value * factor if unclipped else clamp01(clamp01(value) * factor)


def gamma(value: Tensor, exponent: Tensor, gain: Tensor) -> Tensor:
    """Clamp, raise to a power, multiply, clamp."""
    return clamp01(gain * power(clamp01(value), exponent))


def invert(value: Tensor, largest: Tensor) -> Tensor:
    """Subtract from the largest value."""
    return largest - value


def solarize(value: Tensor, threshold: Tensor, addend: Tensor) -> Tensor:
    """Clamp, add, clamp, invert values at or above the threshold."""
    value = clamp01(clamp01(value) + addend)
    return where(value < threshold, value, 1.0 - value)


def posterize(value: Tensor, step: Tensor, offset: Tensor) -> Tensor:
    """Round value · 255 + offset down to a byte, and the byte down to a multiple of ``step``."""
    value = clamp01(value)
    # Divided by 255 and multiplied again, as in Kornia, so that rounding errors are equal.
    levels = floor(exact_quotient(exact_quotient(floor(value * 255 + offset), step), 255.0) * 255)
    # A step of 256 keeps no bits, and a step of 1 all bits.
    rounded = where(step == 256, 0.0, exact_quotient(levels * step, 255.0))
    return where(step == 1, value, rounded)


def largest_channel(r: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """Return the largest channel, or NaN if a channel is NaN, so that all three output channels become NaN."""
    return maximum(maximum(r, g), b)


def smallest_channel(r: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """Return the smallest channel."""
    return minimum(minimum(r, g), b)


def scale_saturation(r: Tensor, g: Tensor, b: Tensor, factor: Tensor) -> RGB:
    """Multiply the saturation in HSV by ``factor``, and clamp it to [0, 1]."""
    largest, smallest = largest_channel(r, g, b), smallest_channel(r, g, b)
    chroma = largest - smallest
    saturation = chroma / where(largest == 0, 1.0, largest + 1e-8)
    new_chroma = largest * clamp01(saturation * factor)
    scale = new_chroma / where(chroma == 0, 1.0, chroma)
    base = largest - new_chroma
    return (r - smallest) * scale + base, (g - smallest) * scale + base, (b - smallest) * scale + base


def scale_lightness(r: Tensor, g: Tensor, b: Tensor, threshold: Tensor, factor: Tensor) -> RGB:
    """Multiply the lightness in HLS by ``factor`` where it is below ``threshold``. Hue and saturation do not change."""
    double_lightness = largest_channel(r, g, b) + smallest_channel(r, g, b)
    lightness = double_lightness * 0.5
    # For constant saturation, the distance of a channel from the lightness is proportional to the largest chroma that is
    # possible at this lightness.
    largest_chroma = where(double_lightness < 1, double_lightness, 2 - double_lightness)
    new_lightness = where(lightness < threshold, clamp01(lightness * factor), lightness)
    new_largest_chroma = 2 * minimum(new_lightness, 1 - new_lightness)
    scale = new_largest_chroma / where(largest_chroma == 0, 1.0, largest_chroma + 1e-8)
    r, g, b = (r - lightness) * scale, (g - lightness) * scale, (b - lightness) * scale
    return new_lightness + r, new_lightness + g, new_lightness + b


def hue_channel(sector: Tensor, largest: Tensor, smallest: Tensor, falling: Tensor, rising: Tensor) -> Tensor:
    """Return the value of a channel by sector of the hue circle, 0 to 5: rising, largest twice, falling, smallest twice."""
    sector = where(sector >= 6, sector - 6, sector)
    return where(sector == 0, rising, where(sector <= 2, largest, where(sector == 3, falling, smallest)))


def rotate_hue(r: Tensor, g: Tensor, b: Tensor, turns: Tensor) -> RGB:
    """Rotate the hue in HSV by ``turns`` full turns."""
    largest, smallest = largest_channel(r, g, b), smallest_channel(r, g, b)
    chroma = largest - smallest
    saturation = chroma / where(largest == 0, 1.0, largest + 1e-8)
    divisor = where(chroma == 0, 1.0, chroma)
    red_sector = quotient(g - b, divisor)
    sector = where(g >= b, quotient(b - r, divisor) + 2.0, quotient(r - g, divisor) + 4.0)
    sector = turned(where((r >= g) & (r >= b), red_sector, sector), turns)
    index = floor(sector)
    fraction = sector - index
    low = largest * (1 - saturation)
    falling = largest * (1 - fraction * saturation)
    rising = largest * (1 - (1 - fraction) * saturation)
    # Over the six sectors a channel rises, is high twice, falls and is low twice. Channels differ in phase.
    r = hue_channel(index + 2, largest, low, falling, rising)
    g = hue_channel(index, largest, low, falling, rising)
    b = hue_channel(index + 4, largest, low, falling, rising)
    return r, g, b


def clamped(r: Tensor, g: Tensor, b: Tensor) -> RGB:
    """Clamp the channels to [0, 1]."""
    return clamp01(r), clamp01(g), clamp01(b)


def saturation(r: Tensor, g: Tensor, b: Tensor, factor: Tensor) -> RGB:
    """Clamp, multiply the saturation, clamp."""
    r, g, b = clamped(r, g, b)
    r, g, b = scale_saturation(r, g, b, factor)
    return clamped(r, g, b)


def hue(r: Tensor, g: Tensor, b: Tensor, turns: Tensor) -> RGB:
    """Clamp, rotate the hue, clamp."""
    r, g, b = clamped(r, g, b)
    r, g, b = rotate_hue(r, g, b, turns)
    return clamped(r, g, b)


def snow(r: Tensor, g: Tensor, b: Tensor, threshold: Tensor, factor: Tensor) -> RGB:
    """Clamp, multiply low lightness, clamp."""
    r, g, b = clamped(r, g, b)
    r, g, b = scale_lightness(r, g, b, threshold, factor)
    return clamped(r, g, b)


class _ClampingOp(PointOp):
    """Base class of ops that clamp values to [0, 1] before and after, unless the user sets ``clip_output=False``."""

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True if the result is clamped."""
        return bool(self.module.clip_output)

    @property
    def flags(self) -> int:  # type: ignore[override]
        """1 if values are not clamped."""
        return int(not self.keeps_unit_range)

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Apply the formula, whose last argument is ``flags``."""
        return self.formula(images, column(rows, 1), self.flags)  # type: ignore[no-any-return]


class Brightness(_ClampingOp):
    """``RandomBrightness``: adds ``brightness_factor - 1``."""

    lowers = (K.RandomBrightness,)
    code = 1
    names = ("brightness_factor",)
    description = "brightness"
    formula = staticmethod(brightness)


class Contrast(_ClampingOp):
    """``RandomContrast``: multiplies by ``contrast_factor``."""

    lowers = (K.RandomContrast,)
    code = 2
    names = ("contrast_factor",)
    description = "contrast"
    formula = staticmethod(contrast)


class _RgbOp(PointOp):
    """Base class of ops whose formula clamps and mixes the three channels of a pixel."""

    rgb_only = True
    channel_counts = (3,)
    keeps_unit_range = True


class Saturation(_RgbOp):
    """``RandomSaturation``: multiplies the HSV saturation."""

    lowers = (K.RandomSaturation,)
    code = 3
    names = ("saturation_factor",)
    description = "saturation"
    formula = staticmethod(saturation)


class Hue(_RgbOp):
    """``RandomHue``: rotates the HSV hue."""

    lowers = (K.RandomHue,)
    code = 4
    names = ("hue_factor",)
    description = "hue"
    formula = staticmethod(hue)


class Gamma(PointOp):
    """``RandomGamma``: ``gain * value ** gamma``."""

    lowers = (K.RandomGamma,)
    code = 5
    names = ("gamma_factor", "gain_factor")
    description = "gamma"
    formula = staticmethod(gamma)

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True if the bounds of exponent and gain are not negative: 0 to a negative power is infinite."""
        return all(low >= 0 for low, _ in self.bounds.values())


class Invert(PointOp):
    """``RandomInvert``: ``max_val - value``."""

    lowers = (K.RandomInvert,)
    code = 7
    column_count = 2
    description = "invert"
    formula = staticmethod(invert)

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True if ``max_val`` is 1."""
        return bool(self.settings["max_val"] == 1)

    def unsupported(self) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        max_val = self.settings["max_val"]
        is_single = isinstance(max_val, int | float) or (isinstance(max_val, Tensor) and max_val.numel() == 1)
        return None if is_single else "max_val has a value for each channel"

    def out_applied(self, size: Size) -> Size:
        """Output size. As in Kornia, images of one channel are broadcast to as many channels as ``max_val`` has."""
        max_val = self.settings["max_val"]
        channels = max_val.shape[-3] if isinstance(max_val, Tensor) and max_val.ndim > 2 and size.channels == 1 else 1
        return size if channels == 1 else replace(size, channels=channels)

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write ``max_val``."""
        out[:, 1] = float(self.settings["max_val"])


class Solarize(PointOp):
    """``RandomSolarize``: adds a number, then inverts values at or above a threshold."""

    lowers = (K.RandomSolarize,)
    code = 8
    names = ("thresholds", "additions")
    description = "solarize"
    keeps_unit_range = True
    formula = staticmethod(solarize)


class Snow(_RgbOp):
    """``RandomSnow``: multiplies HLS lightness below a threshold."""

    lowers = (K.RandomSnow,)
    code = 18
    names = ("snow_coefficient", "brightness")
    description = "snow"
    formula = staticmethod(snow)


class Posterize(PointOp):
    """``RandomPosterize``: sets the lowest bits of 8-bit values to 0. The results, called levels, are multiples of a step."""

    lowers = (K.RandomPosterize,)
    code = 9
    names = ("bit",)
    column_count = 3
    description = "posterize"
    keeps_unit_range = True
    formula = staticmethod(posterize)
    _offset = 0.0

    def expect_rounding(self) -> None:
        """Allow for rounding errors in the input, by a tolerance before rounding down. Called if a preceding op causes them."""
        self._offset = LEVEL_TOLERANCE

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the number of bits per sample, rounded to an integer, (B,)."""
        return {"bits_factor": np.rint(sampler.within(*self.bounds["bit"]))}

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Number of bits as int32."""
        return {"bits_factor": torch.from_numpy(draws["bits_factor"].astype(np.int32))}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the step between two levels, and the offset that is added before rounding down to a level."""
        out[:, 1] = np.exp2(8 - draws["bits_factor"])
        out[:, 2] = self._offset
