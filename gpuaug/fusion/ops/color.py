"""Kornia's pointwise color modules: brightness, contrast, saturation, hue, gamma, invert, solarize, posterize, snow.

Each module is *lowered* to an op, or run by Kornia. A *row* holds an op's parameters for one sample, in float32. Its first
column is the apply mask: 1 to apply the op, 0 to skip it. Each op clamps values as Kornia's module does, so two ops cannot be
merged into one.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from kornia import augmentation as K
from torch import Tensor, nn

from gpuaug.fusion.ops.base import Array, OpDraws, PointOp, Size, column
from gpuaug.fusion.ops.filters import LEVEL_TOLERANCE
from gpuaug.fusion.ops.kornia_private import bounds, generator_of, sampler_bounds
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.pixels import divided_by_largest


class UniformOp(PointOp):
    """Base class of ops whose parameters are uniform numbers, with bounds read from the module's parameter generator."""

    names: tuple[str, ...]
    """Kornia's names of the parameters, in the order of the columns of a row."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.bounds = [sampler_bounds(module, parameter) for parameter in self.names]

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw one uniform number per parameter and sample, (B,) each."""
        return {name: sampler.within(low, high) for name, (low, high) in zip(self.names, self.bounds, strict=True)}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the drawn numbers, in the order of ``names``."""
        for index, name in enumerate(self.names):
            out[:, 1 + index] = draws[name]


class _ClampingOp(UniformOp):
    """Base class of ops that clamp values to [0, 1] before and after, unless the user sets ``clip_output=False``."""

    width = 3

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True if the result is clamped."""
        return bool(self.module.clip_output)

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the drawn factor, then 1 to clamp values, else 0."""
        super().write(draws, size, out)
        out[:, 2] = self.module.clip_output  # type: ignore[assignment]


class Brightness(_ClampingOp):
    """``RandomBrightness``: adds ``brightness_factor - 1``."""

    code = 1
    names = ("brightness_factor",)
    description = "brightness"

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the number to add, then 1 to clamp values, else 0."""
        super().write(draws, size, out)
        out[:, 1] -= 1

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Add a number; with ``clip_output``, clamp to [0, 1] before and after."""
        return _with_clamps(images, rows, lambda values: values + column(rows, 1))


class Contrast(_ClampingOp):
    """``RandomContrast``: multiplies by ``contrast_factor``."""

    code = 2
    names = ("contrast_factor",)
    description = "contrast"

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Multiply by a factor; with ``clip_output``, clamp to [0, 1] before and after."""
        return _with_clamps(images, rows, lambda values: values * column(rows, 1))


class Saturation(UniformOp):
    """``RandomSaturation``: multiplies the HSV saturation."""

    code = 3
    width = 2
    names = ("saturation_factor",)
    rgb_only = True
    description = "saturation"
    keeps_unit_range = True

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, multiply the saturation, clamp."""
        return scale_saturation(images.clamp(0, 1), column(rows, 1)).clamp(0, 1)


class Hue(UniformOp):
    """``RandomHue``: rotates the HSV hue."""

    code = 4
    width = 2
    names = ("hue_factor",)
    rgb_only = True
    description = "hue"
    keeps_unit_range = True

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, rotate the hue, clamp."""
        return rotate_hue(images.clamp(0, 1), column(rows, 1)).clamp(0, 1)


class Gamma(UniformOp):
    """``RandomGamma``: ``gain * value ** gamma``."""

    code = 5
    width = 3
    names = ("gamma_factor", "gain_factor")
    description = "gamma"

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True if the bounds of exponent and gain are not negative: 0 to a negative power is infinite."""
        return all(low >= 0 for low, _ in self.bounds)

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, raise to a power, multiply, clamp."""
        return (column(rows, 2) * images.clamp(0, 1).pow(column(rows, 1))).clamp(0, 1)


class Invert(PointOp):
    """``RandomInvert``: ``max_val - value``."""

    code = 7
    width = 2
    description = "invert"

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True if ``max_val`` is 1."""
        return bool(self.settings["max_val"] == 1)

    @classmethod
    def unsupported_module(cls, module: nn.Module) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        max_val = module.flags["max_val"]  # type: ignore[index]
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

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Subtract from ``max_val``."""
        return column(rows, 1) - images


class Solarize(UniformOp):
    """``RandomSolarize``: adds a number, then inverts values at or above a threshold."""

    code = 8
    width = 3
    names = ("thresholds", "additions")
    description = "solarize"
    keeps_unit_range = True

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, add, clamp, invert values at or above the threshold."""
        values = (images.clamp(0, 1) + column(rows, 2)).clamp(0, 1)
        return torch.where(values < column(rows, 1), values, 1.0 - values)


class Snow(UniformOp):
    """``RandomSnow``: multiplies HLS lightness below a threshold."""

    code = 18
    width = 3
    names = ("snow_coefficient", "brightness")
    rgb_only = True
    description = "snow"
    keeps_unit_range = True

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp to [0, 1], multiply low lightness, clamp."""
        return add_snow(images.clamp(0, 1), column(rows, 1), column(rows, 2)).clamp(0, 1)


class Posterize(PointOp):
    """``RandomPosterize``: sets the lowest bits of 8-bit values to 0. The results, called levels, are multiples of a step."""

    code = 9
    width = 3
    description = "posterize"
    keeps_unit_range = True

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self._bounds = bounds(generator_of(module).bit_sampler)
        self._offset = 0.0

    def expect_rounding(self) -> None:
        """Allow for rounding errors in the input, by a tolerance before rounding down. Called if a preceding op causes them."""
        self._offset = LEVEL_TOLERANCE

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the number of bits per sample, rounded to an integer, (B,)."""
        return {"bits_factor": np.rint(sampler.within(*self._bounds))}

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Number of bits as int32."""
        return {"bits_factor": torch.from_numpy(draws["bits_factor"].astype(np.int32))}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the step between two levels, and the offset that is added before rounding down to a level."""
        out[:, 1] = np.exp2(8 - draws["bits_factor"])
        out[:, 2] = self._offset

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Round 8-bit values down to multiples of the step."""
        values = images.clamp(0, 1)
        step = column(rows, 1)
        # Divided by 255 and multiplied again, as in Kornia, so that rounding errors are equal.
        fractions = divided_by_largest(torch.floor(values * 255 + column(rows, 2)) / step, torch.uint8)
        levels = torch.floor(fractions * 255)
        posterized = torch.where(step == 256, 0.0, divided_by_largest(levels * step, torch.uint8))
        return torch.where(step == 1, values, posterized)


def scale_saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Multiply the HSV saturation of RGB images by ``factor``, (B, 1, 1, 1), and clamp it to [0, 1]."""
    maximum, minimum = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    chroma = maximum - minimum
    saturation = chroma / torch.where(maximum == 0, 1.0, maximum + 1e-8)
    new_chroma = maximum * (saturation * factor).clamp(0, 1)
    return (images - minimum) * (new_chroma / torch.where(chroma == 0, 1.0, chroma)) + (maximum - new_chroma)


def add_snow(images: Tensor, threshold: Tensor, factor: Tensor) -> Tensor:
    """Multiply HLS lightness below ``threshold`` by ``factor``, in RGB images in [0, 1]. Hue and saturation do not change."""
    maximum, minimum = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    double_lightness = maximum + minimum
    lightness = double_lightness / 2
    # For constant saturation, the distance of a channel from the lightness is proportional to the largest chroma that is
    # possible at this lightness.
    largest_chroma = torch.where(double_lightness < 1, double_lightness, 2 - double_lightness)
    new_lightness = torch.where(lightness < threshold, (lightness * factor).clamp(0, 1), lightness)
    new_largest_chroma = 2 * torch.minimum(new_lightness, 1 - new_lightness)
    scale = new_largest_chroma / torch.where(largest_chroma == 0, 1.0, largest_chroma + 1e-8)
    return new_lightness + (images - lightness) * scale


def rotate_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Rotate the HSV hue of RGB images by ``turns``, (B, 1, 1, 1), in full turns."""
    red, green, blue = images.unbind(1)
    maximum, minimum = images.amax(1), images.amin(1)
    chroma = maximum - minimum
    saturation = chroma / torch.where(maximum == 0, 1.0, maximum + 1e-8)
    divisor = torch.where(chroma == 0, 1.0, chroma)
    sector = torch.where(
        (red >= green) & (red >= blue),
        (green - blue) / divisor,
        torch.where(green >= blue, (blue - red) / divisor + 2.0, (red - green) / divisor + 4.0),
    )
    circle = 2 * math.pi
    angle = circle * torch.remainder(sector / 6.0, 1.0)
    angle = torch.where(angle >= circle, 0.0, angle)
    angle = torch.remainder(angle + turns[:, 0] * 2 * math.pi, circle)
    angle = torch.where(angle >= circle, 0.0, angle)
    sixths = angle / circle * 6
    sector_index = torch.floor(sixths) % 6
    fraction = sixths % 6 - sector_index
    low = maximum * (1 - saturation)
    falling = maximum * (1 - fraction * saturation)
    rising = maximum * (1 - (1 - fraction) * saturation)
    sector_index = sector_index.clamp(0, 5)

    def channel(phase_shift: int) -> Tensor:
        # Over the six sectors of the hue a channel rises, is high twice, falls and is low twice. Channels differ in phase.
        phase = torch.remainder(sector_index + phase_shift, 6)
        return torch.where(phase == 0, rising, torch.where(phase <= 2, maximum, torch.where(phase == 3, falling, low)))

    return torch.stack((channel(2), channel(0), channel(4)), 1)


def _with_clamps(images: Tensor, rows: Tensor, function: Any) -> Tensor:
    """Apply ``function`` to the images, with its input and output clamped to [0, 1] if column 2 of the row is not 0."""
    clamps = column(rows, 2) != 0
    output = function(torch.where(clamps, images.clamp(0, 1), images))
    return torch.where(clamps, output.clamp(0, 1), output)


LOWERED: dict[type[nn.Module], type[PointOp]] = {
    K.RandomBrightness: Brightness,
    K.RandomContrast: Contrast,
    K.RandomSaturation: Saturation,
    K.RandomHue: Hue,
    K.RandomGamma: Gamma,
    K.RandomInvert: Invert,
    K.RandomSolarize: Solarize,
    K.RandomPosterize: Posterize,
    K.RandomSnow: Snow,
}
