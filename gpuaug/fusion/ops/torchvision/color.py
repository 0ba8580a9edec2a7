"""torchvision's ops on a pixel's colour: jitter, greys, inversion, solarising, levels, channels, normalisation."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops import channel, color, color_jitter
from gpuaug.fusion.ops.base import Array, OpDraws, Size
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp, Units

_ADJUSTMENTS = ("brightness", "contrast", "saturation", "hue")


class ColorJitter(TorchvisionOp, color_jitter.ColorJitter):
    """ColorJitter: four adjustments in an order that each sample draws."""

    red_share = channel.TORCHVISION_RED
    left_types = (torch.int16,)

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        given = [getattr(transform, adjustment) for adjustment in _ADJUSTMENTS]
        self._fixed = None
        self._active = [between is not None for between in given]
        self._drawn = np.flatnonzero(self._active)
        self.bounds = [
            between or (0.0 if adjustment == "hue" else 1.0,) * 2
            for adjustment, between in zip(_ADJUSTMENTS, given, strict=True)
        ]
        self._low, self._high = np.array(self.bounds, dtype=np.float32).T[..., None]

    @property
    def flags(self) -> int:  # type: ignore[override]
        """A bit for each adjustment that can take part, and that of torchvision's greys."""
        return super().flags | color_jitter.TORCHVISION_GREY

    def channels_taken(self, channels: int) -> tuple[str, str] | None:
        """Saturation and hue leave grey images as they are."""
        return None if channels in (1, 3) else ("1 or 3", self.name)

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Four factors a sample, and an order."""
        return {"factors": sampler.between(self._low, self._high), "order": sampler.uniform(4).T.argsort(axis=1)}

    def of_sample(self, drawn: OpDraws, index: int) -> OpDraws:
        """Factors are in columns, and orders in rows."""
        return {**super().of_sample(drawn, index), "order": drawn["order"][index : index + 1]}

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The adjustments in the sample's order."""
        return self._adjustments(drawn, sample)

    def _adjustments(self, drawn: OpDraws, sample: int) -> list[Call]:
        taken = [index for index in drawn["order"][sample].tolist() if index != color_jitter.NONE and self._active[index]]
        names = [_ADJUSTMENTS[index] for index in taken]
        return [
            (f"adjust_{name}", {f"{name}_factor": float(drawn["factors"][index, sample])})
            for index, name in zip(taken, names, strict=True)
        ]


class PhotometricDistort(ColorJitter):
    """RandomPhotometricDistort: a jitter whose adjustments each have a chance, contrast before the last two or behind them.

    Its channels, put into another order by a chance of their own, are the last of it.
    """

    width = 12

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        super().__init__(name, transform, units)
        # The chance is that of each adjustment, and not of all of them.
        self._chance = self.p
        self.p = 1.0

    @property
    def flags(self) -> int:  # type: ignore[override]
        """Those of a jitter, and that of the channels."""
        return super().flags | color_jitter.PERMUTES

    @property
    def is_random(self) -> bool:
        """A sample may draw none of them."""
        return True

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """The parameters; the op applies to samples that drew any."""
        drawn = super().draw(sampler, size)
        changes = (drawn["order"] != color_jitter.NONE).any(1) | (drawn["channels"] != np.arange(size.channels)).any(1)
        return {**drawn, "apply_mask": drawn["apply_mask"] & changes}

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Four factors a sample, an order without the adjustments that it leaves out, and where its channels come from."""
        taken = sampler.uniform(5) < self._chance
        factors = sampler.between(self._low, self._high)
        order = np.where(sampler.uniform()[:, None] < 0.5, (0, 1, 2, 3), (0, 2, 3, 1))
        order = np.where(np.take_along_axis(taken[:4].T, order, 1), order, color_jitter.NONE)
        channels = np.where(taken[4][:, None], sampler.uniform(size.channels).T.argsort(axis=1), np.arange(size.channels))
        return {"factors": factors, "order": order, "channels": channels}

    def of_sample(self, drawn: OpDraws, index: int) -> OpDraws:
        """Channels are in rows, as orders are."""
        return {**super().of_sample(drawn, index), "channels": drawn["channels"][index : index + 1]}

    def numbers(self, drawn: OpDraws, sample: int) -> dict[str, float]:
        """The factors of the adjustments that are made, in their order, and where the channels come from."""
        factors = {name: factor for _, arguments in self._adjustments(drawn, sample) for name, factor in arguments.items()}
        return factors | {f"channels_{index}": float(each) for index, each in enumerate(drawn["channels"][sample])}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Factors, order and channels as they are."""
        out[:, 1:5] = drawn["factors"].T
        out[:, 5:9] = drawn["order"]
        out[:, 9:12] = drawn["channels"]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """The jitter, then the channels."""
        made = super().apply(images, rows)
        return channel.reordered(made, rows[:, 9:12]) if images.shape[1] == 3 else made

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The adjustments that are made, in their order, and where each channel comes from."""
        return [*self._adjustments(drawn, sample), ("permute_channels", {"permutation": drawn["channels"][sample].tolist()})]


class Grayscale(TorchvisionOp, channel.Grayscale):
    """RandomGrayscale, and Grayscale to three channels; to one, or of one to three, it only tells what shape comes out."""

    @property
    def _to_one(self) -> bool:
        return isinstance(self.module, v2.Grayscale) and self.module.num_output_channels == 1

    @property
    def _weights(self) -> None:
        """``None``: torchvision's."""

    def unsupported(self) -> str | None:
        """Why the transform is left to torchvision, or ``None``."""
        return "num_output_channels=1" if self._to_one else None

    def out(self, size: Size) -> Size:
        """As many channels as are asked for."""
        channels: Any = self.module.num_output_channels if isinstance(self.module, v2.Grayscale) else size.channels
        return replace(size, channels=channels)

    def unsupported_size(self, size: Size) -> str | None:
        """A fused pass has as many channels as its source."""
        channels = self.out(size).channels
        return None if channels == size.channels else f"makes {channels} channels of {size.channels}"

    def channels_taken(self, channels: int) -> tuple[str, str] | None:
        """RGB, and grey images, which stay as they are."""
        return None if channels in (1, 3) else ("1 or 3", self.name)

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The channels' weights."""
        out[:, 1:] = (channel.TORCHVISION_RED, *channel.GREY[1:]) if size.channels == 3 else 1

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The grey, in as many channels."""
        return [("rgb_to_grayscale", {"num_output_channels": size.channels})]


class Invert(TorchvisionOp, color.Invert):
    """RandomInvert."""

    left_types = (torch.int16,)

    def __init__(self, name: str, transform: nn.Module, units: Units) -> None:
        super().__init__(name, transform, units)
        self.settings = {"max_val": 1.0}

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The inversion."""
        return [("invert", {})]


class Solarize(TorchvisionOp, color.Solarize):
    """RandomSolarize: by one threshold. Images have values in [0, 1].

    Raises:
        ArgumentError: If the threshold is larger than any value of the images.
    """

    left_types = (torch.uint16, torch.int16)
    fixed = True

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        at = float(below_byte(transform.threshold)) if units == torch.uint8 else transform.threshold
        self._threshold = self.share(at)
        if self._threshold > 1:
            raise ArgumentError(
                f"threshold of {name} must be at most the largest value of the images, got {transform.threshold}. Give it in "
                "[0, 255] before v2.ToDtype(torch.float32, scale=True), and in [0, 1] behind it."
            )

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Nothing: the threshold is given."""
        return {}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The threshold, and nothing to add."""
        out[:, 1] = self._threshold
        out[:, 2] = 0

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The threshold as it was given."""
        return [("solarize", {"threshold": self.module.threshold})]


class Posterize(TorchvisionOp, color.Posterize):
    """RandomPosterize of bytes: keeps the upper bits."""

    left_types = (torch.uint16, torch.int16)
    fixed = True

    def __init__(self, name: str, transform: nn.Module, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)

    def unsupported(self) -> str | None:
        """Why the transform is left to torchvision, or ``None``."""
        if self.units.is_floating_point:
            return "its levels of floats are others than of bytes, as before v2.ToDtype(scale=True)"
        return super().unsupported()

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Nothing: the number of bits is given."""
        return {}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The step between the levels that are kept, and half a level, so that values are rounded to one."""
        out[:, 1] = 2.0 ** (8 - self.module.bits)  # type: ignore[operator]
        out[:, 2] = 0.5

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The number of bits."""
        return [("posterize", {"bits": self.module.bits})]


class ChannelPermutation(TorchvisionOp, channel.ChannelShuffle):
    """RandomChannelPermutation."""

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """Where each channel comes from."""
        return [("permute_channels", {"permutation": drawn["channels"][sample].tolist()})]


class Normalize(TorchvisionOp, channel.Normalize):
    """Normalize: less the mean, over the deviation. ``ImageTypes.normalize`` refuses bytes."""

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        self.mean, self.std = channel.values_of(transform.mean), channel.values_of(transform.std)

    def per_channel(self, channels: int) -> dict[str, Any]:
        """Mean and std. torchvision broadcasts images of one channel to as many channels as there are values."""
        return {} if channels == 1 else super().per_channel(channels)

    def unsupported_size(self, size: Size) -> str | None:
        """With torchvision images of one channel have as many as there are values."""
        counts = {len(self.mean), len(self.std)} - {1, size.channels}
        return f"holds {max(counts)} values for {size.channels} channels" if counts else None

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """Mean and deviation."""
        transform: Any = self.module
        return [("normalize", {"mean": transform.mean, "std": transform.std})]


def below_byte(threshold: Any) -> Any:
    """What tells the least byte that reaches a threshold from the one before, at half of their distance, as if rounded.

    torchvision compares bytes with the threshold in float32.
    """
    return np.ceil(np.float32(threshold)) - 0.5


LOWERED: dict[type[nn.Module], type[TorchvisionOp]] = {
    v2.ColorJitter: ColorJitter,
    v2.RandomPhotometricDistort: PhotometricDistort,
    v2.Grayscale: Grayscale,
    v2.RandomGrayscale: Grayscale,
    v2.RandomInvert: Invert,
    v2.RandomSolarize: Solarize,
    v2.RandomPosterize: Posterize,
    v2.RandomChannelPermutation: ChannelPermutation,
    v2.Normalize: Normalize,
}
