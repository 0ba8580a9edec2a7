"""Ops with numbers for each channel: grayscale, channel shuffle, channel dropout, normalisation."""

from typing import Any, ClassVar

import numpy as np
import torch
from kornia import augmentation as K
from torch import Tensor, nn

from gpuaug.fusion.ops.base import Array, ChannelOp, OpDraws, PointOp, Size, column, host_tensor
from gpuaug.fusion.ops.sampler import Sampler

GREY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in Kornia's grey."""


TORCHVISION_RED = 0.2989
"""Weight of red in torchvision's grey."""


def grey_of(images: Tensor, red_share: float = GREY[0]) -> Tensor:
    """(B, 1, H, W) grey of (B, 3, H, W)."""
    red, green, blue = images.unbind(1)
    return (red * red_share + green * GREY[1] + blue * GREY[2])[:, None]


class Grayscale(ChannelOp):
    """RandomGrayscale: the weighted sum of the channels; of other numbers than three, their mean."""

    code = 6
    width = 0
    words = "grey"
    weights_name: ClassVar[str] = "rgb_weights"
    """Name of the weights in messages."""

    @property
    def _weights(self) -> Tensor | None:
        return self.module.rgb_weights  # type: ignore[return-value]

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True unless a weight is negative or their sum exceeds 1."""
        weights = self._weights
        shares = GREY if weights is None else weights.reshape(-1).tolist()
        return min(shares) >= 0 and sum(shares) <= 1 + 1e-6

    def per_channel(self, channels: int) -> dict[str, Any]:
        """The weights, where they are given."""
        weights = self._weights
        return {} if weights is None else {self.weights_name: weights}

    def unsupported_size(self, size: Size) -> str | None:
        """Kornia raises for one weight of several channels."""
        one = size.channels > 1 and any(weights.numel() == 1 for weights in self.per_channel(size.channels).values())
        return f"{self.weights_name} holds one value" if one else None

    def row_width(self, channels: int) -> int:
        """The apply mask, and the weight of each channel."""
        return 1 + channels

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The weights of the channels."""
        equal = GREY if size.channels == 3 else 1 / size.channels
        out[:, 1:] = equal if self._weights is None else self._weights.reshape(-1).tolist()

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """The weighted sum of the channels, in every channel."""
        grey = images[:, :1] * column(rows, 1)
        for channel in range(1, images.shape[1]):
            grey = grey + images[:, channel : channel + 1] * column(rows, 1 + channel)
        return grey.expand_as(images)


class TorchgeoGrayscale(Grayscale):
    """torchgeo's RandomGrayscale, whose weights have a sum of 1."""

    weights_name = "weights"

    @property
    def _weights(self) -> Tensor:
        return self.settings["weights"]  # type: ignore[no-any-return]


class ChannelShuffle(ChannelOp):
    """RandomChannelShuffle."""

    code = 10
    width = 0
    words = "shuffle channels"
    keeps_unit_range = True

    def row_width(self, channels: int) -> int:
        """The apply mask, and the source of each channel."""
        return 1 + channels

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """A permutation of the channels per sample, (B, C)."""
        return {"channels": sampler.uniform(size.channels).T.argsort(axis=1)}

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """The permutations, as int64."""
        return {"channels": torch.from_numpy(np.ascontiguousarray(drawn["channels"]))}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Index of the source channel of each output channel."""
        out[:, 1:] = drawn["channels"]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Reorder the channels of each sample."""
        return reordered(images, rows[:, 1 : 1 + images.shape[1]])


class ChannelDropout(PointOp):
    """RandomChannelDropout."""

    code = 11
    width = 0
    words = "drop channels"

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True if the fill value lies in [0, 1]."""
        return 0 <= float(self.module.fill_value) <= 1  # type: ignore[arg-type]

    def unsupported_size(self, size: Size) -> str | None:
        """Kornia raises if more channels are to be dropped than images have."""
        dropped: Any = self.module.num_drop_channels
        return f"drops {dropped} of {size.channels} channels" if dropped > size.channels else None

    def row_width(self, channels: int) -> int:
        """The apply mask, the fill value, and one number per channel."""
        return 2 + channels

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Indices of the channels with the smallest uniform numbers."""
        dropped: Any = self.module.num_drop_channels
        return {"channel_idx": sampler.uniform(size.channels).T.argsort(axis=1)[:, :dropped]}

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """Indices of the dropped channels."""
        return {
            "batch_idx": host_tensor(np.arange(size.batch)[:, None], np.int64),
            "channel_idx": torch.from_numpy(np.ascontiguousarray(drawn["channel_idx"])),
        }

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The fill value, and 1 for each channel that is dropped."""
        out[:, 1] = float(self.module.fill_value)  # type: ignore[arg-type]
        out[:, 2:] = 0
        np.put_along_axis(out[:, 2:], drawn["channel_idx"], 1.0, axis=1)

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Fill the channels that are dropped."""
        dropped = rows[:, 2 : 2 + images.shape[1], None, None] != 0
        return torch.where(dropped, column(rows, 1), images)


class Normalize(PointOp):
    """Normalize: (value - mean) / std."""

    code = 14
    width = 0
    fixed = True
    words = "normalise"

    @classmethod
    def unsupported_module(cls, module: nn.Module) -> str | None:
        """Why this module is left to Kornia, or ``None``."""
        flags: dict[str, Any] = module.flags  # type: ignore[assignment]
        if any(np.ndim(flags[name]) > 1 for name in ("mean", "std")):
            return "mean or std has a value for each sample"
        return None

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.mean = values_of(self.settings["mean"])
        self.std = values_of(self.settings["std"])

    def per_channel(self, channels: int) -> dict[str, Any]:
        """Mean and std."""
        return {"mean": self.mean, "std": self.std}

    def row_width(self, channels: int) -> int:
        """The apply mask, and the mean and the std of each channel."""
        return 1 + 2 * channels

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The means of all channels, then the stds."""
        out[:, 1 : 1 + size.channels] = self.mean
        out[:, 1 + size.channels :] = self.std

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Subtract the mean, divide by the std."""
        mean, deviation = self._of(images, rows)
        return (images - mean) / deviation

    def _of(self, images: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        channels = images.shape[1]
        return rows[:, 1 : 1 + channels, None, None], rows[:, 1 + channels : 1 + 2 * channels, None, None]


class Denormalize(Normalize):
    """Denormalize: value · std + mean."""

    code = 15
    words = "denormalise"

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Multiply by the std, add the mean."""
        mean, deviation = self._of(images, rows)
        return torch.addcmul(mean.expand_as(images), images, deviation)


def reordered(images: Tensor, channels: Tensor) -> Tensor:
    """Images with reordered channels: output channel k of sample b is input channel ``channels[b, k]``."""
    return images.gather(1, channels.long()[:, :, None, None].expand_as(images))


def values_of(given: Any) -> Array:
    """A scalar or a value per channel as (K,) float32; K is 1 for a scalar."""
    values: Array = torch.as_tensor(given, dtype=torch.float32, device="cpu").reshape(-1).numpy()
    return values


LOWERED: dict[type[nn.Module], type[PointOp]] = {
    K.RandomGrayscale: Grayscale,
    K.RandomChannelShuffle: ChannelShuffle,
    K.RandomChannelDropout: ChannelDropout,
    K.Normalize: Normalize,
    K.Denormalize: Denormalize,
}
