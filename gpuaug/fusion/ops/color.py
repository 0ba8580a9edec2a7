"""Ops on a pixel's colour: brightness, contrast, saturation, hue, gamma, inversion, solarising, levels, snow.

Each follows Kornia's own arithmetic, clamps included: they come between the steps, so the steps cannot be merged into one.
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
    """An op whose parameters are uniform numbers, each drawn between the bounds in the module's own generator."""

    names: tuple[str, ...]
    """Kornia's names of the parameters, in the order of the row."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        samplers: Any = module._param_generator.sampler_dict  # type: ignore[union-attr]
        self.bounds = [bounds(samplers[parameter]) for parameter in self.names]

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """One uniform number per sample for each parameter, (B,)."""
        return {name: sampler.within(*between) for name, between in zip(self.names, self.bounds, strict=True)}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The drawn numbers, in the order of ``names``."""
        for index, name in enumerate(self.names):
            out[:, 1 + index] = drawn[name]


class Brightness(UniformOp):
    """RandomBrightness: adds a number."""

    code = 1
    width = 3
    names = ("brightness_factor",)
    words = "brightness"

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True if the result is clamped."""
        return bool(self.module.clip_output)

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The summand, and 1 if the sum is clamped."""
        out[:, 1] = drawn["brightness_factor"] - 1
        out[:, 2] = self.module.clip_output  # type: ignore[assignment]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, add, clamp."""
        return _clipped(images, rows, lambda values: values + column(rows, 1))


class Contrast(UniformOp):
    """RandomContrast: multiplies by a factor."""

    code = 2
    width = 3
    names = ("contrast_factor",)
    words = "contrast"

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True if the result is clamped."""
        return bool(self.module.clip_output)

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The factor, and 1 if the product is clamped."""
        out[:, 1] = drawn["contrast_factor"]
        out[:, 2] = self.module.clip_output  # type: ignore[assignment]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, multiply, clamp."""
        return _clipped(images, rows, lambda values: values * column(rows, 1))


class Saturation(UniformOp):
    """RandomSaturation: multiplies the saturation of HSV."""

    code = 3
    width = 2
    names = ("saturation_factor",)
    rgb_only = True
    words = "saturation"
    keeps_unit_range = True

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, saturate, clamp."""
        return saturated(images.clamp(0, 1), column(rows, 1)).clamp(0, 1)


class Hue(UniformOp):
    """RandomHue: turns the hue of HSV."""

    code = 4
    width = 2
    names = ("hue_factor",)
    rgb_only = True
    words = "hue"
    keeps_unit_range = True

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, turn, clamp."""
        return hue_turned(images.clamp(0, 1), column(rows, 1)).clamp(0, 1)


class Gamma(UniformOp):
    """RandomGamma: gain · value ** gamma."""

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
    """RandomInvert: max_val - value."""

    code = 7
    width = 2
    words = "invert"

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True if values are subtracted from 1."""
        return bool(self.settings["max_val"] == 1)

    @classmethod
    def unsupported_module(cls, module: nn.Module) -> str | None:
        """Why this module is left to Kornia, or ``None``."""
        largest = module.flags["max_val"]  # type: ignore[index]
        one = isinstance(largest, int | float) or (isinstance(largest, Tensor) and largest.numel() == 1)
        return None if one else "max_val has a value for each channel"

    def out(self, size: Size) -> Size:
        """With Kornia, ``max_val`` of several channels broadcasts images of one channel to as many."""
        largest = self.settings["max_val"]
        channels = largest.shape[-3] if isinstance(largest, Tensor) and largest.ndim > 2 and size.channels == 1 else 1
        return size if channels == 1 else replace(size, channels=channels)

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """``max_val``, from which values are subtracted."""
        out[:, 1] = float(self.settings["max_val"])

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Subtract from ``max_val``."""
        return column(rows, 1) - images


class Solarize(UniformOp):
    """RandomSolarize: adds, then inverts values at or above a threshold."""

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
    """RandomSnow: multiplies the lightness of HLS where it is below a threshold."""

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
    """RandomPosterize: keeps the upper bits of a byte."""

    code = 9
    width = 3
    words = "posterize"
    keeps_unit_range = True

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self._bounds = bounds(module._param_generator.bit_sampler)  # type: ignore[union-attr, index]
        self._offset = 0.0

    def expect_rounding(self) -> None:
        """Round down to levels with a tolerance: an op before may make pixels that differ by rounding errors of equal ones."""
        self._offset = SLACK

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Number of bits per sample, rounded."""
        return {"bits_factor": np.rint(sampler.within(*self._bounds))}

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """The number of bits as int32."""
        return {"bits_factor": torch.from_numpy(drawn["bits_factor"].astype(np.int32))}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The distance between kept levels, and the summand before rounding down to a level."""
        out[:, 1] = np.exp2(8 - drawn["bits_factor"])
        out[:, 2] = self._offset

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """In bytes: floor(byte / step) · step."""
        values = images.clamp(0, 1)
        step = column(rows, 1)
        most = torch.full(
            (), 255.0, dtype=torch.float32, device=images.device
        )  # a tensor, so that a GPU divides and does not multiply
        levels = torch.floor(torch.floor(values * 255 + column(rows, 2)) / step / most * 255)
        kept = torch.where(step == 256, 0.0, levels * step / most)
        return torch.where(step == 1, values, kept)


def saturated(images: Tensor, factor: Tensor) -> Tensor:
    """RGB with the saturation of HSV multiplied by ``factor`` and clamped."""
    most, least = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    spread = most - least
    share = spread / torch.where(most == 0, 1.0, most + 1e-8)
    wanted = most * (share * factor).clamp(0, 1)
    return (images - least) * (wanted / torch.where(spread == 0, 1.0, spread)) + (most - wanted)


def snowed(images: Tensor, threshold: Tensor, factor: Tensor) -> Tensor:
    """RGB in [0, 1] with lightness of HLS below ``threshold`` multiplied by ``factor``; hue and saturation are unchanged."""
    most, least = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    doubled = most + least
    light = doubled / 2
    # A channel's distance from the lightness scales with the room that the lightness leaves on either side of it.
    room = torch.where(doubled < 1, doubled, 2 - doubled)
    lit = torch.where(light < threshold, (light * factor).clamp(0, 1), light)
    scale = 2 * torch.minimum(lit, 1 - lit) / torch.where(room == 0, 1.0, room + 1e-8)
    return lit + (images - light) * scale


def hue_turned(images: Tensor, turns: Tensor) -> Tensor:
    """RGB with the hue of HSV turned by ``turns`` of a full circle."""
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
        # Each channel rises, stays high for two sixths, falls and stays low for two; channels differ only in the phase.
        at = torch.remainder(whole + peak_from, 6)
        return torch.where(at == 0, rising, torch.where(at <= 2, most, torch.where(at == 3, falling, low)))

    return torch.stack((channel(2), channel(0), channel(4)), 1)


def _clipped(images: Tensor, rows: Tensor, change: Any) -> Tensor:
    """Apply ``change``, between two clamps where column 2 of the row is not 0."""
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
