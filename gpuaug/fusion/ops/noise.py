"""Gaussian noise, from a seed and a pixel's position: Philox 4x32-10 in whole numbers, equal on every device, then Box-Muller.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Box-Muller takes logarithms and sines, which
differ by some units in the last place from device to device.
"""

import math
from typing import Any

import numpy as np
import torch
from kornia import augmentation as K
from torch import Tensor, nn

from gpuaug.fusion.ops.base import Array, OpDraws, PointOp, Size, column
from gpuaug.fusion.ops.sampler import Sampler

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
FIELDS = 2**24
"""Number of fields of a seed: all that a float32 tells apart."""
_MASK = 0xFFFFFFFF


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
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + INCREMENTS[0]) & _MASK, (k1 + INCREMENTS[1]) & _MASK
    return c0, c1, c2, c3


def normal(seed: int | Tensor, fields: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Standard normal numbers, each by its place.

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
    # 24 bits each; the logarithm takes no zero.
    radius = torch.sqrt(-2.0 * torch.log(((first >> 8).float() + 1.0) * 2.0**-24))
    return radius * torch.cos((2.0 * math.pi * 2.0**-24) * (second >> 8).float())


def _product(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    # Of 64 bits, by halves: int64 has no room for the sign.
    low, high = word & 0xFFFF, word >> 16
    lower = multiplier * low
    upper = multiplier * high + (lower >> 16)
    return upper >> 16, ((upper & 0xFFFF) << 16) | (lower & 0xFFFF)


class GaussianNoise(PointOp):
    """RandomGaussianNoise: the field is computed where the images are, from a seed and each pixel's place."""

    code, width, positional = 12, 6, True
    needs_own_batch = True
    words = "noise"

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """A seed for the batch, and which field each sample takes: one after the other, from a random one on.

        Seeds have 31 bits and the first field 24, since batches of a long run would meet the seeds of others.
        """
        seed, first = divmod(sampler.key() >> 8, FIELDS)
        fields = np.full(size.batch, first) if self.same_on_batch else (first + np.arange(size.batch)) % FIELDS
        return {"seed": seed, "field": fields.astype(np.float32)}

    def numbers(self, drawn: OpDraws, sample: int) -> dict[str, float]:
        """Nothing that says anything: the field has a number for each pixel."""
        return {}

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """The field itself."""
        generator: Any = self.module._param_generator
        fields = torch.from_numpy(drawn["field"][:1] if self.same_on_batch else drawn["field"]).float()
        field = normal(drawn["seed"], fields, size.channels, size.height, size.width)
        return {"gaussian_noise": generator.mean + field * generator.std}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Mean, deviation, the seed in two halves (a float32 holds no more than 24 bits exactly), and the field."""
        generator: Any = self.module._param_generator
        out[:, 1], out[:, 2] = generator.mean, generator.std
        out[:, 3], out[:, 4] = drawn["seed"] >> 16, drawn["seed"] & 0xFFFF
        out[:, 5] = drawn["field"]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Add the field."""
        seed = (rows[:, 3].long() << 16) + rows[:, 4].long()
        field = normal(seed, rows[:, 5], *images.shape[1:])
        return images + (column(rows, 1) + field * column(rows, 2))


LOWERED: dict[type[nn.Module], type[PointOp]] = {K.RandomGaussianNoise: GaussianNoise}
