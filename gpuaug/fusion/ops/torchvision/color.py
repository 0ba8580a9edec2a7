"""torchvision's pointwise color transforms: jitter, grayscale, invert, solarize, posterize, channel order, normalize.

A transform is *lowered* to an op, or run by torchvision. The ops inherit their arithmetic from the ops of Kornia's modules. A
*row* holds an op's parameters for one *sample*, an image or a clip, in float32. Column 0 is the apply mask: 1 to apply the op.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops import channel, color, color_jitter
from gpuaug.fusion.ops.base import Array, OpDraws, Size
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp
from gpuaug.fusion.pixels import TRUNCATED

_ADJUSTMENTS = ("brightness", "contrast", "saturation", "hue")
"""Adjustments of a color jitter, by index. An adjustment is active if the user has set its bounds."""


class ColorJitter(TorchvisionOp, color_jitter.ColorJitter):
    """``v2.ColorJitter``: up to four adjustments, in a random order per sample.

    Support: fused for one or three channels; an error for other numbers of channels, as in torchvision; the order is drawn
    per sample; contrast needs an additional launch, for the mean.
    """

    lowers = (v2.ColorJitter,)
    red_weight = channel.TORCHVISION_RED
    unfused_dtypes = (torch.int16,)

    def _read(self, transform: Any) -> None:
        settings = [getattr(transform, adjustment) for adjustment in _ADJUSTMENTS]
        limits = [setting or (neutral, neutral) for setting, neutral in zip(settings, (1.0, 1.0, 1.0, 0.0), strict=True)]
        self._set_up(limits, [setting is not None for setting in settings], None)

    @property
    def flags(self) -> int:  # type: ignore[override]
        """One bit per active adjustment, ``TORCHVISION_GREY``, and for bytes ``IN_BYTES``."""
        return super().flags | color_jitter.TORCHVISION_GREY | (0 if self.to_bytes is None else color_jitter.IN_BYTES)

    def unsupported_channels(self, channels: int) -> tuple[str, str] | None:
        """Require one or three channels. Saturation and hue do not change images of one channel."""
        return None if channels in (1, 3) else ("1 or 3", self.name)

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"factors"``, (4, B), and ``"order"``, (B, 4) indices of adjustments."""
        return {"factors": sampler.within_bounds(self._low, self._high), "order": sampler.uniform(4).T.argsort(axis=1)}

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """``adjust_brightness``, ``adjust_contrast``, ``adjust_saturation`` and ``adjust_hue``, in the sample's order."""
        return self._adjustments(draws, sample)

    def _adjustments(self, draws: OpDraws, sample: int) -> list[Call]:
        """Functional calls of the adjustments that run for one sample, in order."""
        order = [index for index in draws["order"][sample].tolist() if index != color_jitter.OMITTED and self._active[index]]
        names = [_ADJUSTMENTS[index] for index in order]
        return [
            (f"adjust_{name}", {f"{name}_factor": float(draws["factors"][index, sample])})
            for index, name in zip(order, names, strict=True)
        ]


class PhotometricDistort(ColorJitter):
    """``v2.RandomPhotometricDistort``: brightness, contrast, saturation and hue, each with probability ``p``.

    Contrast comes before or after saturation and hue, at random. The channels are permuted last, also with probability ``p``.
    """

    lowers = (v2.RandomPhotometricDistort,)
    column_count = 12
    is_random = True  # type: ignore[assignment]  # a sample may draw no adjustment

    def _read(self, transform: Any) -> None:
        super()._read(transform)
        # In torchvision p is the probability of each adjustment and of the permutation, not of the whole transform.
        self._adjustment_p = self.p
        self.p = 1.0

    @property
    def flags(self) -> int:  # type: ignore[override]
        """Flags of a color jitter, and ``PERMUTES``."""
        return super().flags | color_jitter.PERMUTES

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the parameters. The apply mask is False for samples that drew neither an adjustment nor a permutation."""
        draws = super().draw(sampler, size)
        changes = (draws["order"] != color_jitter.OMITTED).any(1) | (draws["channels"] != np.arange(size.channels)).any(1)
        return {**draws, "apply_mask": draws["apply_mask"] & changes}

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the adjustments and the permutation of the channels.

        Returns:
            ``"factors"``, (4, B); ``"order"``, (B, 4) indices of adjustments, or ``OMITTED``; and ``"channels"``, (B, C) source
            index of each channel.
        """
        applies = sampler.uniform(5) < self._adjustment_p  # four adjustments, and the permutation
        factors = sampler.within_bounds(self._low, self._high)
        order = np.where(sampler.uniform()[:, None] < 0.5, (0, 1, 2, 3), (0, 2, 3, 1))
        order = np.where(np.take_along_axis(applies[:4].T, order, 1), order, color_jitter.OMITTED)
        channels = np.where(applies[4][:, None], sampler.uniform(size.channels).T.argsort(axis=1), np.arange(size.channels))
        return {"factors": factors, "order": order, "channels": channels}

    def numbers(self, draws: OpDraws, sample: int) -> dict[str, float]:
        """Factors of the adjustments that run, in order, and indices of the source channels."""
        factors = {name: factor for _, arguments in self._adjustments(draws, sample) for name, factor in arguments.items()}
        return factors | {f"channels_{index}": float(channel) for index, channel in enumerate(draws["channels"][sample])}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write factors, order and source channels."""
        out[:, 1:5] = draws["factors"].T
        out[:, 5:9] = draws["order"]
        out[:, 9:12] = draws["channels"]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Run the adjustments, then permute the channels."""
        jittered = super().apply(images, rows)
        return channel.permute_channels(jittered, rows[:, 9:12]) if images.shape[1] == 3 else jittered

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """Calls of the adjustments that run, in order, and ``permute_channels``."""
        return [*self._adjustments(draws, sample), ("permute_channels", {"permutation": draws["channels"][sample].tolist()})]


class Grayscale(TorchvisionOp, channel.Grayscale):
    """``v2.RandomGrayscale``, and ``v2.Grayscale`` with one or three output channels.

    Support: fused; begins a pass if it changes the number of channels; an error for images without one or three channels.
    """

    channel_counts = (1, 3)
    byte_rule = TRUNCATED
    lowers = (v2.Grayscale, v2.RandomGrayscale)  # type: ignore[assignment]
    _weights = None  # torchvision has no setting for the weights

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, which raises an error for other numbers of channels; else ``None``."""
        channels: Any = getattr(self.module, "num_output_channels", 1)
        return None if isinstance(channels, int | np.integer) and channels in (1, 3) else f"num_output_channels is {channels!r}"

    def out_applied(self, size: Size) -> Size:
        """Output size, with ``num_output_channels`` channels."""
        channels: Any = self.module.num_output_channels if isinstance(self.module, v2.Grayscale) else size.channels
        return replace(size, channels=channels)

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the weights of the channels."""
        out[:, 1:] = (channel.TORCHVISION_RED, *channel.GREY[1:]) if size.channels == 3 else 1

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """``rgb_to_grayscale`` with ``num_output_channels``."""
        return [("rgb_to_grayscale", {"num_output_channels": self.out(size).channels})]


class Invert(TorchvisionOp, color.Invert):
    """``v2.RandomInvert``."""

    lowers = (v2.RandomInvert,)
    call = ("invert",)
    unfused_dtypes = (torch.int16,)

    def _read(self, transform: Any) -> None:
        self.settings = {"max_val": 1.0}


class Solarize(TorchvisionOp, color.Solarize):
    """``v2.RandomSolarize``, for images in [0, 1].

    Raises:
        ArgumentError: If the threshold exceeds the largest value of the images.
    """

    lowers = (v2.RandomSolarize,)
    call = ("solarize", "threshold")
    unfused_dtypes = (torch.uint16, torch.int16)

    def _read(self, transform: Any) -> None:
        threshold = float(transform.threshold)
        threshold = float(float_threshold(threshold)) if self.units == torch.uint8 else threshold
        self._threshold = self.to_unit_range(threshold)
        if self._threshold > 1:
            raise ArgumentError(
                f"threshold of {self.name} must be at most the largest value of the images, got {transform.threshold}. Give it "
                "in [0, 255] before v2.ToDtype(torch.float32, scale=True), and in [0, 1] after it."
            )

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the threshold in [0, 1], and 0 for the number that only Kornia's transform adds to the pixels."""
        out[:, 1:] = self._threshold, 0


class Posterize(TorchvisionOp, color.Posterize):
    """``v2.RandomPosterize`` for uint8 images: sets all but the highest ``bits`` bits to 0. The results are called levels.

    Support: fused for uint8 images; not for other types.
    """

    lowers = (v2.RandomPosterize,)
    call = ("posterize", "bits")
    unfused_dtypes = (torch.uint16, torch.int16)

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        if self.units.is_floating_point:
            return "it gives floats other levels than bytes: place it before v2.ToDtype(torch.float32, scale=True)"
        return super().unsupported()

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Return no draws: the number of bits is a setting."""
        return {}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the step between two levels, and 0.5, with which values are rounded to the nearest byte."""
        out[:, 1:] = 2.0 ** (8 - self.module.bits), 0.5  # type: ignore[operator]


class ChannelPermutation(TorchvisionOp, channel.ChannelShuffle):
    """``v2.RandomChannelPermutation``."""

    lowers = (v2.RandomChannelPermutation,)

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """``permute_channels`` with the indices of the source channels."""
        return [("permute_channels", {"permutation": draws["channels"][sample].tolist()})]


class Normalize(TorchvisionOp, channel.Normalize):
    """``v2.Normalize``: ``(image - mean) / std`` per channel.

    Support: fused; an error for bytes, as in torchvision, and for the mean and std of bytes if images are in [0, 1].
    """

    lowers = (v2.Normalize,)
    call = ("normalize", "mean", "std")

    def _read(self, transform: Any) -> None:
        self.mean, self.std = channel.channel_values(transform.mean), channel.channel_values(transform.std)

    def multiply_input(self, factor: int) -> None:
        """Change the settings so that the result is that for images multiplied by ``factor``."""
        self.mean = self.mean / factor
        self.std = self.std / factor

    def per_channel(self, channels: int) -> dict[str, Any]:
        """Mean and std. Empty for images of one channel, which ``unsupported_size`` checks instead."""
        return {} if channels == 1 else super().per_channel(channels)

    def unsupported_size(self, size: Size) -> str | None:
        """Reason if mean or std has several values for images of one channel; else ``None``.

        torchvision broadcasts such images to several channels, but a fused pass cannot change the number of channels.
        """
        counts = {len(self.mean), len(self.std)} - {1, size.channels}
        return f"holds {max(counts)} values for {size.channels} channels" if counts else None


class Multiplication(TorchvisionOp, channel.Denormalize):
    """Multiplication of images in [0, 1] by the largest value of their integers, for a ``v2.ToDtype`` without ``scale``."""

    description = "multiply by {std[0]:g}"

    def __init__(self, name: str, factor: int) -> None:
        super().__init__(name, v2.Identity(), torch.float32)
        self.mean = channel.channel_values(0)
        self.std = channel.channel_values(factor)

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """No calls, because the call of the conversion includes the multiplication."""
        return []


def float_threshold(threshold: Any) -> Any:
    """Return a threshold that separates byte levels like ``threshold``, also if pixels have rounding errors.

    The result is ``threshold``, rounded to float32 as in torchvision, then rounded up to an integer, minus 0.5.
    """
    return np.ceil(np.float32(threshold)) - 0.5
