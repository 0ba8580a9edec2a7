"""Ops on each pixel by itself: brightness, contrast, colour, noise, erasing, normalisation.

Each follows Kornia's own arithmetic, clamps included: they come between the steps, so the steps cannot be merged into one.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from kornia import augmentation as K
from torch import Tensor, nn

from gpuaug.fuse import noise
from gpuaug.fuse.draws import Source
from gpuaug.fuse.ops import Array, Drawn, PointOp, Size

GREY = (0.299, 0.587, 0.114)
"""What red, green and blue weigh in a grey."""


def column(rows: Tensor, index: int) -> Tensor:
    """One number a sample, (B, 1, 1, 1)."""
    return rows[:, index, None, None, None]


def grey_of(images: Tensor) -> Tensor:
    """(B, 1, H, W) grey of (B, 3, H, W)."""
    red, green, blue = images.unbind(1)
    return (red * GREY[0] + green * GREY[1] + blue * GREY[2])[:, None]


def bounds(sampler: Any) -> tuple[float, float]:
    """What one of Kornia's uniform distributions draws between."""
    return float(sampler.low), float(sampler.high)


class UniformOp(PointOp):
    """An op whose parameters are uniform numbers, each drawn between the bounds in the module's own generator."""

    names: tuple[str, ...]
    """Kornia's names of the parameters, in the order of the row."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        samplers: Any = module._param_generator.sampler_dict  # type: ignore[union-attr]
        self.bounds = [bounds(samplers[parameter]) for parameter in self.names]

    def draw_parameters(self, source: Source, size: Size) -> Drawn:
        """A number a sample for each parameter."""
        return {name: source.within(*between) for name, between in zip(self.names, self.bounds, strict=True)}

    def kornia_parameters(self, drawn: Drawn, size: Size) -> dict[str, Tensor]:
        """The same numbers."""
        return {name: torch.from_numpy(drawn[name]) for name in self.names}

    def write(self, drawn: Drawn, size: Size, out: Array) -> None:
        """The numbers as they are."""
        for index, name in enumerate(self.names):
            out[:, 1 + index] = drawn[name]

    def describe(self) -> str:
        """The parameters' names."""
        return self.names[0].removesuffix("_factor")


class Brightness(UniformOp):
    """RandomBrightness: adds."""

    code, width, names = 1, 3, ("brightness_factor",)

    def write(self, drawn: Drawn, size: Size, out: Array) -> None:
        """What is added, and whether the sum is clamped."""
        out[:, 1] = drawn["brightness_factor"] - 1
        out[:, 2] = self.module.clip_output  # type: ignore[assignment]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, add, clamp."""
        return _clipped(images, rows, lambda values: values + column(rows, 1))


class Contrast(UniformOp):
    """RandomContrast: multiplies."""

    code, width, names = 2, 3, ("contrast_factor",)

    def write(self, drawn: Drawn, size: Size, out: Array) -> None:
        """The factor, and whether the product is clamped."""
        out[:, 1] = drawn["contrast_factor"]
        out[:, 2] = self.module.clip_output  # type: ignore[assignment]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, multiply, clamp."""
        return _clipped(images, rows, lambda values: values * column(rows, 1))


class Saturation(UniformOp):
    """RandomSaturation: in HSV."""

    code, width, names, rgb_only = 3, 2, ("saturation_factor",), True

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, saturate, clamp."""
        return saturated(images.clamp(0, 1), column(rows, 1)).clamp(0, 1)


class Hue(UniformOp):
    """RandomHue: turns the hue."""

    code, width, names, rgb_only = 4, 2, ("hue_factor",), True

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, turn, clamp."""
        return hue_turned(images.clamp(0, 1), column(rows, 1)).clamp(0, 1)


class Gamma(UniformOp):
    """RandomGamma."""

    code, width, names = 5, 3, ("gamma_factor", "gain_factor")

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, raise to a power, multiply, clamp."""
        return (column(rows, 2) * images.clamp(0, 1).pow(column(rows, 1))).clamp(0, 1)


class Grayscale(PointOp):
    """RandomGrayscale of three channels."""

    code, width, rgb_only = 6, 4, True

    def write(self, drawn: Drawn, size: Size, out: Array) -> None:
        """The channels' weights."""
        weights = self.module.rgb_weights
        out[:, 1:4] = GREY if weights is None else weights.reshape(-1).tolist()  # type: ignore[operator]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """The weighted sum, three times."""
        red, green, blue = images.unbind(1)
        weights = [rows[:, 1 + channel, None, None] for channel in range(3)]
        grey = red * weights[0] + green * weights[1] + blue * weights[2]
        return grey[:, None].expand_as(images)

    def describe(self) -> str:
        """In a word."""
        return "grey"


class Invert(PointOp):
    """RandomInvert."""

    code, width = 7, 2

    @classmethod
    def cannot(cls, module: nn.Module) -> str | None:
        """Why this module is left to Kornia, or ``None``."""
        largest = module.flags["max_val"]  # type: ignore[index]
        one = isinstance(largest, int | float) or (isinstance(largest, Tensor) and largest.numel() == 1)
        return None if one else "max_val has a value for each channel"

    def write(self, drawn: Drawn, size: Size, out: Array) -> None:
        """What is subtracted from."""
        out[:, 1] = float(self.settings["max_val"])

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Subtract."""
        return column(rows, 1) - images

    def describe(self) -> str:
        """In a word."""
        return "invert"


class Solarize(UniformOp):
    """RandomSolarize."""

    code, width, names = 8, 3, ("thresholds", "additions")

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, add, clamp, invert what reaches the threshold."""
        values = (images.clamp(0, 1) + column(rows, 2)).clamp(0, 1)
        return torch.where(values < column(rows, 1), values, 1.0 - values)

    def describe(self) -> str:
        """In a word."""
        return "solarize"


class Posterize(PointOp):
    """RandomPosterize: keeps the upper bits."""

    code, width = 9, 2

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self._bounds = bounds(module._param_generator.bit_sampler)  # type: ignore[union-attr, index]

    def draw_parameters(self, source: Source, size: Size) -> Drawn:
        """A rounded number of bits a sample."""
        return {"bits_factor": np.rint(source.within(*self._bounds))}

    def kornia_parameters(self, drawn: Drawn, size: Size) -> dict[str, Tensor]:
        """The same, as whole numbers."""
        return {"bits_factor": torch.from_numpy(drawn["bits_factor"].astype(np.int32))}

    def write(self, drawn: Drawn, size: Size, out: Array) -> None:
        """The step between the levels that are kept."""
        out[:, 1] = np.exp2(8 - drawn["bits_factor"])

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """As bytes: what remains of a byte after a division by the step, times the step."""
        values, step = images.clamp(0, 1), column(rows, 1)
        most = torch.full((), 255.0, device=images.device)  # a tensor, so that a GPU divides and does not multiply
        levels = torch.floor(torch.floor(values * 255) / step / most * 255)
        kept = torch.where(step == 256, 0.0, levels * step / most)
        return torch.where(step == 1, values, kept)

    def describe(self) -> str:
        """In a word."""
        return "posterize"


class ChannelShuffle(PointOp):
    """RandomChannelShuffle of three channels."""

    code, width, rgb_only = 10, 4, True

    def draw_parameters(self, source: Source, size: Size) -> Drawn:
        """An order of the channels a sample."""
        return {"channels": source.uniform(size.channels).T.argsort(axis=1)}

    def kornia_parameters(self, drawn: Drawn, size: Size) -> dict[str, Tensor]:
        """The same order."""
        return {"channels": torch.from_numpy(np.ascontiguousarray(drawn["channels"]))}

    def write(self, drawn: Drawn, size: Size, out: Array) -> None:
        """Where each channel comes from."""
        out[:, 1:4] = drawn["channels"]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Take the channels in the sample's order."""
        order = rows[:, 1:4].long()[:, :, None, None]
        return images.gather(1, order.expand_as(images))

    def describe(self) -> str:
        """In a few words."""
        return "shuffle channels"


class ChannelDropout(PointOp):
    """RandomChannelDropout."""

    code, width = 11, 0

    def refuses(self, size: Size) -> str | None:
        """More channels than there are cannot be dropped, which is Kornia's to say."""
        dropped: Any = self.module.num_drop_channels
        return f"drops {dropped} of {size.channels} channels" if dropped > size.channels else None

    def row_width(self, channels: int) -> int:
        """The gate, the value, and for each channel whether it is dropped."""
        return 2 + channels

    def draw_parameters(self, source: Source, size: Size) -> Drawn:
        """The channels that drew the smallest numbers."""
        dropped: Any = self.module.num_drop_channels
        return {"channel_idx": source.uniform(size.channels).T.argsort(axis=1)[:, :dropped]}

    def kornia_parameters(self, drawn: Drawn, size: Size) -> dict[str, Tensor]:
        """The same channels."""
        return {
            "batch_idx": torch.arange(size.batch).reshape(-1, 1),
            "channel_idx": torch.from_numpy(np.ascontiguousarray(drawn["channel_idx"])),
        }

    def write(self, drawn: Drawn, size: Size, out: Array) -> None:
        """The value, and 1 for each channel that is dropped."""
        out[:, 1] = float(self.module.fill_value)  # type: ignore[arg-type]
        out[:, 2:] = 0
        np.put_along_axis(out[:, 2:], drawn["channel_idx"], 1.0, axis=1)

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Put the value into the channels that are dropped."""
        dropped = rows[:, 2 : 2 + images.shape[1], None, None] != 0
        return torch.where(dropped, column(rows, 1), images)

    def describe(self) -> str:
        """In a few words."""
        return "drop channels"


class GaussianNoise(PointOp):
    """RandomGaussianNoise: the field is computed where the images are, from a seed and each pixel's place."""

    code, width, positional = 12, 6, True
    alone = True

    def draw_parameters(self, source: Source, size: Size) -> Drawn:
        """A seed for the batch, and which field each sample takes."""
        shared = self.same_on_batch
        return {"seed": source.key(), "field": np.zeros(size.batch) if shared else np.arange(size.batch, dtype=np.float32)}

    def kornia_parameters(self, drawn: Drawn, size: Size) -> dict[str, Tensor]:
        """The field itself."""
        generator: Any = self.module._param_generator
        fields = torch.from_numpy(drawn["field"][:1] if self.same_on_batch else drawn["field"]).float()
        field = noise.normal(drawn["seed"], fields, size.channels, size.height, size.width)
        return {"gaussian_noise": generator.mean + field * generator.std}

    def write(self, drawn: Drawn, size: Size, out: Array) -> None:
        """Mean, deviation, the seed in two halves (a float32 holds no more than 24 bits exactly), and the field."""
        generator: Any = self.module._param_generator
        out[:, 1], out[:, 2] = generator.mean, generator.std
        out[:, 3], out[:, 4] = drawn["seed"] >> 16, drawn["seed"] & 0xFFFF
        out[:, 5] = drawn["field"]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Add the field."""
        seed = (rows[:, 3].long() << 16) + rows[:, 4].long()
        field = noise.normal(seed, rows[:, 5], *images.shape[1:])
        return images + (column(rows, 1) + field * column(rows, 2))

    def describe(self) -> str:
        """In a word."""
        return "noise"


class Erasing(PointOp):
    """RandomErasing: a value in a rectangle."""

    code, width, positional = 13, 6, True

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        generator: Any = module._param_generator
        self._scale = bounds(generator.scale_sampler)
        self._around_one = hasattr(generator, "index_sampler")
        if self._around_one:
            self._ratios = [bounds(generator.ratio_sampler1), bounds(generator.ratio_sampler2)]
        else:
            self._ratios = [bounds(generator.ratio_sampler)]
        self._value = float(generator.value)

    def draw_parameters(self, source: Source, size: Size) -> Drawn:
        """Whole sides of an area and ratio, and a start where the rectangle fits."""
        area = source.within(*self._scale) * np.float32(size.height * size.width)
        ratio = source.within(*self._ratios[0])
        if self._around_one:
            ratio = np.where(source.uniform() > 0.5, ratio, source.within(*self._ratios[1]))
        heights = np.rint(np.sqrt(area * ratio)).clip(1, size.height)
        widths = np.rint(np.sqrt(area / ratio)).clip(1, size.width)
        across, down = source.uniform(2)
        return {
            "widths": widths,
            "heights": heights,
            "xs": np.floor(across * (size.width - widths + 1)),
            "ys": np.floor(down * (size.height - heights + 1)),
        }

    def kornia_parameters(self, drawn: Drawn, size: Size) -> dict[str, Tensor]:
        """The same rectangles, and the value."""
        made = {name: torch.from_numpy(drawn[name]) for name in ("widths", "heights", "xs", "ys")}
        return {**made, "values": torch.full((size.batch,), self._value)}

    def write(self, drawn: Drawn, size: Size, out: Array) -> None:
        """The rectangle, first pixel in and first pixel out, and the value."""
        out[:, 1], out[:, 2] = drawn["xs"], drawn["xs"] + drawn["widths"]
        out[:, 3], out[:, 4] = drawn["ys"], drawn["ys"] + drawn["heights"]
        out[:, 5] = self._value

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Put the value into the rectangle."""
        return torch.where(self.covers(images, rows), column(rows, 5), images)

    def covers(self, images: Tensor, rows: Tensor) -> Tensor:
        """(B, 1, H, W): which pixels of (B, C, H, W) lie in the rectangle."""
        x = torch.arange(images.shape[3], device=images.device)
        y = torch.arange(images.shape[2], device=images.device)[:, None]
        left, right, top, bottom = (column(rows, index) for index in range(1, 5))
        return (x >= left) & (x < right) & (y >= top) & (y < bottom)

    def describe(self) -> str:
        """In a word."""
        return "erase"


class Normalize(PointOp):
    """Normalize: less the mean, over the deviation."""

    code, width, fixed = 14, 0, True

    @classmethod
    def cannot(cls, module: nn.Module) -> str | None:
        """Why this module is left to Kornia, or ``None``."""
        flags: dict[str, Any] = module.flags  # type: ignore[assignment]
        if any(torch.as_tensor(flags[name]).dim() > 1 for name in ("mean", "std")):
            return "mean or std has a value for each sample"
        return None

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self._mean = np.asarray(torch.as_tensor(self.settings["mean"]).float().reshape(-1))
        self._std = np.asarray(torch.as_tensor(self.settings["std"]).float().reshape(-1))

    def refuses(self, size: Size) -> str | None:
        """A mean for other channels than the images have is Kornia's to complain about."""
        for values in (self._mean, self._std):
            if len(values) not in (1, size.channels):
                return f"holds {len(values)} values for {size.channels} channels"
        return None

    def row_width(self, channels: int) -> int:
        """The gate, and for each channel mean and deviation."""
        return 1 + 2 * channels

    def write(self, drawn: Drawn, size: Size, out: Array) -> None:
        """Mean and deviation of each channel."""
        out[:, 1 : 1 + size.channels] = self._mean
        out[:, 1 + size.channels :] = self._std

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Subtract and divide."""
        mean, deviation = self._of(images, rows)
        return (images - mean) / deviation

    def _of(self, images: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        channels = images.shape[1]
        return rows[:, 1 : 1 + channels, None, None], rows[:, 1 + channels : 1 + 2 * channels, None, None]

    def describe(self) -> str:
        """In a word."""
        return "normalise"


class Denormalize(Normalize):
    """Denormalize: times the deviation, and the mean."""

    code = 15

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Multiply and add."""
        mean, deviation = self._of(images, rows)
        return torch.addcmul(mean.expand_as(images), images, deviation)

    def describe(self) -> str:
        """In a word."""
        return "denormalise"


class OneOf(PointOp):
    """One of several ops, picked for each sample or for all: what policies pick from, in a form that is compiled once.

    A row holds the gate, the code of the op that was picked, and that op's own row.

    Args:
        name: Of the module that picks.
        ops: All that can be picked, each of a kind that it ``takes``.
    """

    code, width = 18, 0

    def __init__(self, name: str, ops: Sequence[PointOp]) -> None:
        super().__init__(name, ops[0].module)
        self._kinds = {op.code: op for op in ops}
        self._ops = tuple(ops)
        self.flags = sum(1 << code for code in self._kinds)
        self.rgb_only = any(op.rgb_only for op in ops)  # type: ignore[misc]

    @staticmethod
    def takes(op: PointOp) -> bool:
        """Whether all that ``op`` needs is the pixel and its row."""
        return not (op.positional or op.flags or getattr(op, "needs_mean", False))

    @property
    def gated(self) -> bool:
        """A sample may have picked nothing."""
        return True

    def refuses(self, size: Size) -> str | None:
        """Nothing: an op that refuses images of this size is not picked for them."""
        return None

    def row_width(self, channels: int) -> int:
        """The gate, the code, and the widest row."""
        return 2 + max(op.row_width(channels) for op in self._ops)

    def write(self, drawn: Drawn, size: Size, out: Array) -> None:
        """Codes and rows of what was picked: ``"parts"``, each an op, its draws, and the samples (``None``: all)."""
        for op, own, where in drawn["parts"]:
            width = op.row_width(size.channels)
            if where is None:
                out[:, 0], out[:, 1] = own["gate"], op.code
                op.rows(own, size, out[:, 2 : 2 + width])
                continue
            rows = np.zeros((size.batch, width), dtype=np.float32)
            op.rows(own, size, rows)
            out[where, 0], out[where, 1] = own["gate"][where], op.code
            out[where, 2 : 2 + width] = rows[where]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Each op on the samples that picked it."""
        made = images
        for code, op in self._kinds.items():
            picked = rows[:, 1] == code
            # On a GPU the host does not know, and all ops run on all samples.
            if picked.is_cuda or bool(picked.any()):
                # Another op's numbers would not do as, say, channels.
                own = rows[:, 2:].masked_fill(~picked[:, None], 0)
                made = torch.where(picked[:, None, None, None], op.apply(images, own), made)
        return made

    def describe(self) -> str:
        """In a few words."""
        return "one of " + ", ".join(op.describe() for op in self._kinds.values())


def saturated(images: Tensor, factor: Tensor) -> Tensor:
    """RGB with the saturation of HSV multiplied by ``factor`` and clamped."""
    most, least = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    spread = most - least
    share = spread / torch.where(most == 0, 1.0, most + 1e-8)
    wanted = most * (share * factor).clamp(0, 1)
    return (images - least) * (wanted / torch.where(spread == 0, 1.0, spread)) + (most - wanted)


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
    low, falling, rising = most * (1 - share), most * (1 - part * share), most * (1 - (1 - part) * share)
    whole = whole.clamp(0, 5)

    def channel(peak_from: int) -> Tensor:
        # A channel rises, stays for two sixths, falls and stays low for two: the same course, starting elsewhere.
        at = torch.remainder(whole + peak_from, 6)
        return torch.where(at == 0, rising, torch.where(at <= 2, most, torch.where(at == 3, falling, low)))

    return torch.stack((channel(2), channel(0), channel(4)), 1)


def _clipped(images: Tensor, rows: Tensor, change: Any) -> Tensor:
    """``change`` between clamps, where the row says so."""
    clips = column(rows, 2) != 0
    changed = change(torch.where(clips, images.clamp(0, 1), images))
    return torch.where(clips, changed.clamp(0, 1), changed)


LOWERED: dict[type[nn.Module], type[PointOp]] = {
    K.RandomBrightness: Brightness,
    K.RandomContrast: Contrast,
    K.RandomSaturation: Saturation,
    K.RandomHue: Hue,
    K.RandomGamma: Gamma,
    K.RandomGrayscale: Grayscale,
    K.RandomInvert: Invert,
    K.RandomSolarize: Solarize,
    K.RandomPosterize: Posterize,
    K.RandomChannelShuffle: ChannelShuffle,
    K.RandomChannelDropout: ChannelDropout,
    K.RandomGaussianNoise: GaussianNoise,
    K.RandomErasing: Erasing,
    K.Normalize: Normalize,
    K.Denormalize: Denormalize,
}
