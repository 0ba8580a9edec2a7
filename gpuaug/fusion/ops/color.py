"""Kornia's pointwise color modules: brightness, contrast, saturation, hue, gamma, invert, solarize, posterize, snow.

Ops repeat Kornia's arithmetic, including the clamps between operations, so operations cannot be merged.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from kornia import augmentation as K
from torch import Tensor, nn

from gpuaug.fusion.ops.base import Array, OpDraws, PointOp, Size, bounds, column
from gpuaug.fusion.ops.filters import SLACK
from gpuaug.fusion.ops.sampler import Sampler


class UniformOp(PointOp):
    """Op whose parameters are uniform numbers, with bounds read from the module's parameter generator."""

    names: tuple[str, ...]
    """Kornia's names of the parameters, in the order of the columns of a row."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        samplers: Any = module._param_generator.sampler_dict  # type: ignore[union-attr]
        self.bounds = [bounds(samplers[parameter]) for parameter in self.names]

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw one uniform number per parameter and sample, (B,) each."""
        return {name: sampler.within(*between) for name, between in zip(self.names, self.bounds, strict=True)}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Write the drawn numbers, in the order of ``names``."""
        for index, name in enumerate(self.names):
            out[:, 1 + index] = drawn[name]


class Brightness(UniformOp):
    """``RandomBrightness``: adds ``brightness_factor - 1``."""

    code = 1
    width = 3
    names = ("brightness_factor",)
    words = "brightness"

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True if the result is clamped."""
        return bool(self.module.clip_output)

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Write the number to add, and 1 if values are clamped."""
        out[:, 1] = drawn["brightness_factor"] - 1
        out[:, 2] = self.module.clip_output  # type: ignore[assignment]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, add, clamp."""
        return _clipped(images, rows, lambda values: values + column(rows, 1))


class Contrast(UniformOp):
    """``RandomContrast``: multiplies by ``contrast_factor``."""

    code = 2
    width = 3
    names = ("contrast_factor",)
    words = "contrast"

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True if the result is clamped."""
        return bool(self.module.clip_output)

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Write the factor, and 1 if values are clamped."""
        out[:, 1] = drawn["contrast_factor"]
        out[:, 2] = self.module.clip_output  # type: ignore[assignment]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, multiply, clamp."""
        return _clipped(images, rows, lambda values: values * column(rows, 1))


class Saturation(UniformOp):
    """``RandomSaturation``: multiplies the HSV saturation."""

    code = 3
    width = 2
    names = ("saturation_factor",)
    rgb_only = True
    words = "saturation"
    keeps_unit_range = True

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, multiply the saturation, clamp."""
        return saturated(images.clamp(0, 1), column(rows, 1)).clamp(0, 1)


class Hue(UniformOp):
    """``RandomHue``: rotates the HSV hue."""

    code = 4
    width = 2
    names = ("hue_factor",)
    rgb_only = True
    words = "hue"
    keeps_unit_range = True

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, rotate the hue, clamp."""
        return hue_turned(images.clamp(0, 1), column(rows, 1)).clamp(0, 1)


class Gamma(UniformOp):
    """``RandomGamma``: ``gain * value ** gamma``."""

    code = 5
    width = 3
    names = ("gamma_factor", "gain_factor")
    words = "gamma"

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True unless a drawn number may be negative: 0 to a negative power is infinite."""
        return all(low >= 0 for low, _ in self.bounds)

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, raise to a power, multiply, clamp."""
        return (column(rows, 2) * images.clamp(0, 1).pow(column(rows, 1))).clamp(0, 1)


class Invert(PointOp):
    """``RandomInvert``: ``max_val - value``."""

    code = 7
    width = 2
    words = "invert"

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True if values are subtracted from 1."""
        return bool(self.settings["max_val"] == 1)

    @classmethod
    def unsupported_module(cls, module: nn.Module) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        largest = module.flags["max_val"]  # type: ignore[index]
        one = isinstance(largest, int | float) or (isinstance(largest, Tensor) and largest.numel() == 1)
        return None if one else "max_val has a value for each channel"

    def out_applied(self, size: Size) -> Size:
        """Output size. In Kornia, a ``max_val`` with several channels broadcasts images of one channel."""
        largest = self.settings["max_val"]
        channels = largest.shape[-3] if isinstance(largest, Tensor) and largest.ndim > 2 and size.channels == 1 else 1
        return size if channels == 1 else replace(size, channels=channels)

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
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
    words = "solarize"
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
    words = "snow"
    keeps_unit_range = True

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, brighten, clamp."""
        return snowed(images.clamp(0, 1), column(rows, 1), column(rows, 2)).clamp(0, 1)


class Posterize(PointOp):
    """``RandomPosterize``: keeps the highest bits of 8-bit values."""

    code = 9
    width = 3
    words = "posterize"
    keeps_unit_range = True

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self._bounds = bounds(module._param_generator.bit_sampler)  # type: ignore[union-attr, index]
        self._offset = 0.0

    def expect_rounding(self) -> None:
        """Round down to levels with a tolerance, for images whose values have rounding errors of a preceding op."""
        self._offset = SLACK

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the number of bits per sample, rounded to an integer, (B,)."""
        return {"bits_factor": np.rint(sampler.within(*self._bounds))}

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """Number of bits as int32."""
        return {"bits_factor": torch.from_numpy(drawn["bits_factor"].astype(np.int32))}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Write the distance between kept levels, and the offset that is added before rounding down to a level."""
        out[:, 1] = np.exp2(8 - drawn["bits_factor"])
        out[:, 2] = self._offset

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Compute floor(value / step) · step in 8-bit values."""
        values = images.clamp(0, 1)
        step = column(rows, 1)
        # A tensor, because torch on a GPU multiplies by the reciprocal of a Python number.
        most = torch.full((), 255.0, dtype=torch.float32, device=images.device)
        levels = torch.floor(torch.floor(values * 255 + column(rows, 2)) / step / most * 255)
        kept = torch.where(step == 256, 0.0, levels * step / most)
        return torch.where(step == 1, values, kept)


def saturated(images: Tensor, factor: Tensor) -> Tensor:
    """RGB images with the HSV saturation multiplied by ``factor`` and clamped."""
    most, least = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    spread = most - least
    share = spread / torch.where(most == 0, 1.0, most + 1e-8)
    chroma = most * (share * factor).clamp(0, 1)
    return (images - least) * (chroma / torch.where(spread == 0, 1.0, spread)) + (most - chroma)


def snowed(images: Tensor, threshold: Tensor, factor: Tensor) -> Tensor:
    """RGB images in [0, 1] with HLS lightness below ``threshold`` multiplied by ``factor``; hue and saturation are kept."""
    most, least = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    doubled = most + least
    light = doubled / 2
    # For constant saturation, the distance of a channel from the lightness is proportional to min(lightness, 1 - lightness).
    room = torch.where(doubled < 1, doubled, 2 - doubled)
    lit = torch.where(light < threshold, (light * factor).clamp(0, 1), light)
    scale = 2 * torch.minimum(lit, 1 - lit) / torch.where(room == 0, 1.0, room + 1e-8)
    return lit + (images - light) * scale


def hue_turned(images: Tensor, turns: Tensor) -> Tensor:
    """RGB images with the HSV hue rotated by ``turns``, (B, 1, 1, 1), in full turns."""
    red, green, blue = images.unbind(1)
    most, least = images.amax(1), images.amin(1)
    spread = most - least
    share = spread / torch.where(most == 0, 1.0, most + 1e-8)
    safe = torch.where(spread == 0, 1.0, spread)
    sector = torch.where(
        (red >= green) & (red >= blue),
        (green - blue) / safe,
        torch.where(green >= blue, (blue - red) / safe + 2.0, (red - green) / safe + 4.0),
    )
    circle = 2 * math.pi
    angle = circle * torch.remainder(sector / 6.0, 1.0)
    angle = torch.where(angle >= circle, 0.0, angle)
    angle = torch.remainder(angle + turns[:, 0] * 2 * math.pi, circle)
    angle = torch.where(angle >= circle, 0.0, angle)
    sixths = angle / circle * 6
    whole = torch.floor(sixths) % 6
    part = sixths % 6 - whole
    low = most * (1 - share)
    falling = most * (1 - part * share)
    rising = most * (1 - (1 - part) * share)
    whole = whole.clamp(0, 5)

    def channel(peak_from: int) -> Tensor:
        # Over the six sectors of the hue a channel rises, is high twice, falls and is low twice. Channels differ in phase.
        phase = torch.remainder(whole + peak_from, 6)
        return torch.where(phase == 0, rising, torch.where(phase <= 2, most, torch.where(phase == 3, falling, low)))

    return torch.stack((channel(2), channel(0), channel(4)), 1)


def _clipped(images: Tensor, rows: Tensor, change: Any) -> Tensor:
    """Apply ``change``. Clamp before and after if column 2 of the row is not 0."""
    clips = column(rows, 2) != 0
    changed = change(torch.where(clips, images.clamp(0, 1), images))
    return torch.where(clips, changed.clamp(0, 1), changed)


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
