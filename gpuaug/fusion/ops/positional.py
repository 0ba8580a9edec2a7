"""Ops on a pixel and its coordinates: erasing and Gaussian noise.

Noise comes from a seed and the pixel's position: Philox 4x32-10 in integers, equal on every device, then Box-Muller, whose
logarithms and sines differ by some units in the last place from device to device.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import math
from typing import Any, ClassVar

import numpy as np
import torch
from kornia import augmentation as K
from torch import Tensor, nn

from gpuaug.fusion.ops.base import Array, OpDraws, PointOp, Size, bounds, column, host_tensor
from gpuaug.fusion.ops.sampler import Sampler

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
FIELDS = 2**24
"""Number of noise fields per seed: the integers that float32 represents exactly."""
_MASK = 0xFFFFFFFF


class Erasing(PointOp):
    """RandomErasing: fills a rectangle with a value."""

    code = 13
    width = 6
    positional = True
    counts_pixels = True
    words = "erase"
    erases_masks: ClassVar[bool] = True
    """True if masks become 0 in the rectangle, as in Kornia."""

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True if the fill value lies in [0, 1]."""
        return 0 <= self._value <= 1

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

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Sides in pixels from a drawn area and ratio, and a first pixel from which the rectangle fits."""
        area = sampler.within(*self._scale) * np.float32(size.height * size.width)
        ratio = sampler.within(*self._ratios[0])
        if self._around_one:
            ratio = np.where(sampler.uniform() > 0.5, ratio, sampler.within(*self._ratios[1]))
        heights = np.rint(np.sqrt(area * ratio)).clip(1, size.height)
        widths = np.rint(np.sqrt(area / ratio)).clip(1, size.width)
        across, down = sampler.uniform(2)
        return {
            "widths": widths,
            "heights": heights,
            "xs": np.floor(across * (size.width - widths + 1)),
            "ys": np.floor(down * (size.height - heights + 1)),
        }

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """The rectangles, and the fill value."""
        made = {name: torch.from_numpy(drawn[name]) for name in ("widths", "heights", "xs", "ys")}
        return {**made, "values": host_tensor(np.full(size.batch, self._value), np.float32)}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The rectangle, as first pixel inside and first pixel outside along x and y, and the fill value."""
        out[:, 1] = drawn["xs"]
        out[:, 2] = drawn["xs"] + drawn["widths"]
        out[:, 3] = drawn["ys"]
        out[:, 4] = drawn["ys"] + drawn["heights"]
        out[:, 5] = self._value

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Fill the rectangle."""
        return torch.where(self.covers(images, rows), column(rows, 5), images)

    def covers(self, images: Tensor, rows: Tensor) -> Tensor:
        """Mask of the pixels in the rectangle, (B, 1, H, W) bool, for images (B, C, H, W)."""
        x = torch.arange(images.shape[3], device=images.device)
        y = torch.arange(images.shape[2], device=images.device)[:, None]
        left, right, top, bottom = (column(rows, index) for index in range(1, 5))
        return (x >= left) & (x < right) & (y >= top) & (y < bottom)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for each counter of four words.

    Shape:
        Any that broadcast; int64 that hold words of 32 bits.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(MULTIPLIERS[0], c0)
        high1, low1 = _product(MULTIPLIERS[1], c2)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0, k1 = (k0 + INCREMENTS[0]) & _MASK, (k1 + INCREMENTS[1]) & _MASK
    return c0, c1, c2, c3


def normal(seed: int | Tensor, fields: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Standard normal numbers, one per pixel, from its coordinates.

    Args:
        seed: 31 bits, for the batch or for each sample.
        fields: Which field each sample takes.
        channels: C of the field.
        height: H of the field.
        width: W of the field.

    Shape:
        - fields: (B,)
        - returns: (B, C, H, W) float32
    """
    device = fields.device
    keys = torch.as_tensor(seed, device=device).long().reshape(-1, 1, 1, 1)
    place = torch.arange(height * width, device=device).reshape(1, 1, height, width)
    field = fields.long()[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    zero = torch.zeros_like(place)
    first, second, _, _ = philox((place, channel, field, zero), (keys, torch.zeros_like(keys)))
    # 24 bits each. Not 0, of which there is no logarithm.
    radius = torch.sqrt(-2.0 * torch.log(((first >> 8).float() + 1.0) * 2.0**-24))
    return radius * torch.cos((2.0 * math.pi * 2.0**-24) * (second >> 8).float())


def _product(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    # The 64-bit product in halves, since int64 is signed.
    low, high = word & 0xFFFF, word >> 16
    lower = multiplier * low
    upper = multiplier * high + (lower >> 16)
    return upper >> 16, ((upper & 0xFFFF) << 16) | (lower & 0xFFFF)


class GaussianNoise(PointOp):
    """RandomGaussianNoise: the noise is computed on the images' device, from a seed and the pixel's coordinates."""

    code = 12
    width = 6
    positional = True
    needs_own_batch = True
    words = "noise"

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """A seed for the batch, and which field each sample takes: one after the other, from a random one on.

        Seeds have 31 bits and the first field 24, since batches of a long run would meet the seeds of others.
        """
        seed, first = divmod(sampler.key() >> 8, FIELDS)
        # Frame t of a clip takes the field t behind the clip's: noise that stands still is a pattern.
        fields = np.full(size.batch, first) if self.same_on_batch else (first + size.each * np.arange(size.batch)) % FIELDS
        return {"seed": seed, "field": fields.astype(np.float32)}

    def flags_for(self, channels: int, frames: int = 1) -> int:
        """The number of frames of a clip: each has noise of its own."""
        return frames

    def numbers(self, drawn: OpDraws, sample: int) -> dict[str, float]:
        """Empty: noise is one number per pixel."""
        return {}

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """The noise itself, (B, C, H, W); of clips that of every frame, (B · T, C, H, W)."""
        generator: Any = self.module._param_generator
        fields = torch.from_numpy(drawn["field"][:1] if self.same_on_batch else drawn["field"]).float()
        if size.frames:
            fields = ((fields.expand(size.batch)[:, None] + torch.arange(size.frames, device="cpu")) % FIELDS).flatten()
        field = normal(drawn["seed"], fields, size.channels, size.height, size.width)
        return {"gaussian_noise": generator.mean + field * generator.std}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Mean, std, the seed in two 16-bit halves (float32 holds 24 bits exactly), and the index of the field."""
        generator: Any = self.module._param_generator
        out[:, 1], out[:, 2] = generator.mean, generator.std
        out[:, 3], out[:, 4] = drawn["seed"] >> 16, drawn["seed"] & 0xFFFF
        out[:, 5] = drawn["field"]

    def spread(self, rows: Tensor, frame: Tensor, frames: int) -> None:
        """Name the field of each frame."""
        rows[:, 5] = (rows[:, 5] + frame) % FIELDS

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Add the noise."""
        seed = (rows[:, 3].long() << 16) + rows[:, 4].long()
        field = normal(seed, rows[:, 5], *images.shape[1:])
        return images + (column(rows, 1) + field * column(rows, 2))


LOWERED: dict[type[nn.Module], type[PointOp]] = {K.RandomErasing: Erasing, K.RandomGaussianNoise: GaussianNoise}
