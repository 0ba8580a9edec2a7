"""Kornia's modules with parameters per channel: grayscale, channel shuffle, dropout and shift, color temperature, normalize.

Each module is *lowered* to an op, or run by Kornia. A *sample* is an image or a clip. A *row* holds an op's parameters for one
sample, in float32. Its first column is the apply mask: 1 to apply the op, 0 to skip it. Class attributes without a comment are
explained in ``base.py``. The functions ``drop`` to ``rescale`` are formulas of ops, which torch and Triton run.
"""

from typing import Any

import numpy as np
import torch
from kornia import augmentation as K
from torch import Tensor

from gpuaug.fusion.ops.base import Array, ChannelOp, OpDraws, PointOp, Size, column, host_tensor
from gpuaug.fusion.ops.kornia_private import bounds, generator_of
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.pixels import clamp01, where

GREY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in Kornia's grey values."""

TORCHVISION_RED = 0.2989
"""Weight of red in torchvision's grey values. The weights of green and blue are those of ``GREY``."""


def grayscale(images: Tensor, red_weight: float = GREY[0]) -> Tensor:
    """Return grey values, (B, 1, H, W), of RGB images, (B, 3, H, W), for ops that need them."""
    red, green, blue = images.unbind(1)
    return (red * red_weight + green * GREY[1] + blue * GREY[2])[:, None]


def drop(value: Tensor, fill: Tensor, is_dropped: Tensor) -> Tensor:
    """Return ``value``, or ``fill`` where ``is_dropped`` is not 0. The shapes broadcast to the shape of ``value``."""
    return where(is_dropped != 0, fill, value)


def normalize(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Subtract the mean, divide by the standard deviation. The Triton kernel computes ``value / std - mean / std`` instead."""
    return (value - mean) / std


def denormalize(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Multiply by the standard deviation, add the mean."""
    return value * std + mean


def shift(value: Tensor, addend: Tensor) -> Tensor:
    """Clamp to [0, 1], add ``addend``, clamp."""
    return clamp01(clamp01(value) + addend)


def rescale(value: Tensor, factor: Tensor) -> Tensor:
    """Clamp to [0, 1], multiply by ``factor``, clamp."""
    return clamp01(clamp01(value) * factor)


class Grayscale(ChannelOp):
    """``RandomGrayscale``: weighted sum of the channels. By default the weights are ``GREY``, or equal unless C is 3."""

    lowers = (K.RandomGrayscale,)
    takes_any_range = True
    code = 6
    columns_per_channel = 1
    description = "grey"

    @property
    def _weights(self) -> Tensor | None:
        """Setting ``rgb_weights`` of the module, or ``None`` for the default."""
        weights: Any = self.module.rgb_weights
        return None if weights is None else weights.detach()  # type: ignore[no-any-return]

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True unless a weight is negative or the sum of the weights exceeds 1."""
        weights = self._weights
        values = GREY if weights is None else weights.reshape(-1).tolist()
        return min(values) >= 0 and sum(values) <= 1 + 1e-6

    def per_channel(self, channels: int) -> dict[str, Any]:
        """The user's weights, whose number the caller compares with ``channels``; empty for the default weights."""
        weights = self._weights
        return {} if weights is None else {"rgb_weights": weights}

    def unsupported_size(self, size: Size) -> str | None:
        """Reason if there is one weight for several channels, for which Kornia raises an error; else ``None``."""
        is_single = size.channels > 1 and self._weights is not None and self._weights.numel() == 1
        return "rgb_weights holds one value" if is_single else super().unsupported_size(size)

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the weights of the channels."""
        default = GREY if size.channels == 3 else 1 / size.channels
        out[:, 1:] = default if self._weights is None else self._weights.reshape(-1).tolist()

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return the weighted sum of the channels, repeated for each output channel."""
        grey = images[:, :1] * column(rows, 1)
        for channel in range(1, images.shape[1]):
            grey = grey + images[:, channel : channel + 1] * column(rows, 1 + channel)
        return grey.expand(-1, self.out(Size(*images.shape)).channels, -1, -1)


class ChannelShuffle(ChannelOp):
    """``RandomChannelShuffle``: permutes the channels."""

    lowers = (K.RandomChannelShuffle,)
    takes_any_range = True
    code = 10
    columns_per_channel = 1
    description = "shuffle channels"
    keeps_unit_range = True

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the index of the input channel per output channel, (B, C): a permutation per sample."""
        return {"channels": sampler.uniform(size.channels).T.argsort(axis=1)}

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Permutations as a tensor, (B, C) int64."""
        return {"channels": torch.from_numpy(np.ascontiguousarray(draws["channels"]))}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the index of the input channel per output channel."""
        out[:, 1:] = draws["channels"]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return the images with permuted channels."""
        return permute_channels(images, rows[:, 1 : 1 + images.shape[1]])


class ChannelDropout(PointOp):
    """``RandomChannelDropout``: fills some channels with the setting ``fill_value``."""

    lowers = (K.RandomChannelDropout,)
    code = 11
    column_count = 2
    columns_per_channel = 1
    description = "drop channels"
    formula = staticmethod(drop)

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True if the fill value lies in [0, 1]."""
        return 0 <= float(self.module.fill_value) <= 1  # type: ignore[arg-type]

    def unsupported_size(self, size: Size) -> str | None:
        """Reason if there are fewer channels than are dropped, for which Kornia raises an error; else ``None``."""
        count: Any = self.module.num_drop_channels
        return f"drops {count} of {size.channels} channels" if count > size.channels else None

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the indices of the dropped channels, (B, num_drop_channels)."""
        count: Any = self.module.num_drop_channels
        return {"channel_idx": sampler.uniform(size.channels).T.argsort(axis=1)[:, :count]}

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Indices of the dropped channels, (B, num_drop_channels), and of the samples, (B, 1)."""
        return {
            "batch_idx": host_tensor(np.arange(size.batch)[:, None], np.int64),
            "channel_idx": torch.from_numpy(np.ascontiguousarray(draws["channel_idx"])),
        }

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the fill value, then per channel 1 if it is dropped, else 0."""
        out[:, 1] = float(self.module.fill_value)  # type: ignore[arg-type]
        out[:, 2:] = 0
        np.put_along_axis(out[:, 2:], draws["channel_idx"], 1.0, axis=1)


class Normalize(PointOp):
    """``Normalize``: ``(value - mean) / std``."""

    lowers = (K.Normalize,)
    takes_any_range = True
    code = 14
    columns_per_channel = 2
    description = "normalise"
    formula = staticmethod(normalize)

    def unsupported(self) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        if any(np.ndim(self.settings[name]) > 1 for name in ("mean", "std")):
            return "mean or std has a value for each sample"
        return None

    def _read(self, module: Any) -> None:
        self.mean = channel_values(self.settings["mean"])
        self.std = channel_values(self.settings["std"])

    def per_channel(self, channels: int) -> dict[str, Any]:
        """Mean and standard deviation, arrays of shape (1,) or (C,)."""
        return {"mean": self.mean, "std": self.std}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the means of all channels, then the standard deviations."""
        out[:, 1 : 1 + size.channels] = self.mean
        out[:, 1 + size.channels :] = self.std


class Denormalize(Normalize):
    """``Denormalize``: ``value * std + mean``."""

    lowers = (K.Denormalize,)
    code = 15
    description = "denormalise"
    formula = staticmethod(denormalize)


class _ClampedChannels(PointOp):
    """Base class of ops that combine each of three channels with one number, and clamp to [0, 1] before and after."""

    column_count = 1
    columns_per_channel = 1
    channel_counts = (3,)
    keeps_unit_range = True


class RGBShift(_ClampedChannels):
    """``RandomRGBShift``: adds a number per channel."""

    lowers = (K.RandomRGBShift,)
    code = 19
    names = ("r_shift", "g_shift", "b_shift")
    description = "shift channels"
    formula = staticmethod(shift)


class PlanckianJitter(_ClampedChannels):
    """``RandomPlanckianJitter``: multiplies red and blue by the factors of a random color temperature."""

    lowers = (K.RandomPlanckianJitter,)
    code = 20
    description = "color temperature"
    formula = staticmethod(rescale)

    def _read(self, module: Any) -> None:
        self.bounds = {"idx": bounds(generator_of(module).pl_idx_dist)}
        # Kornia's table has factors of red and blue per color temperature. A factor of 1 for green is inserted.
        self._factors = np.insert(module.pl.detach().float().cpu().numpy(), 1, 1, axis=1)

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"idx"``, the index of a color temperature per sample, (B,) int64."""
        return {"idx": np.floor(sampler.within(*self.bounds["idx"])).astype(np.int64)}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the factors of red, green and blue."""
        out[:, 1:] = self._factors[draws["idx"]]


def permute_channels(images: Tensor, channels: Tensor) -> Tensor:
    """Return images, (B, C, H, W), whose channel k of sample b is input channel ``channels[b, k]``. ``channels``: (B, C)."""
    return images.gather(1, channels.long()[:, :, None, None].expand_as(images))


def channel_values(setting: Any) -> Array:
    """Convert a setting, one value or one per channel, to a float32 array, (1,) or (C,)."""
    values: Array = torch.as_tensor(setting, dtype=torch.float32, device="cpu").detach().reshape(-1).numpy()
    return values
