"""``v2.RandomIoUCrop``. The crop is chosen on the device among trials generated from a seed drawn on the host."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.base import OpDraws, Size
from gpuaug.fusion.ops.geometry import BoxCropOp
from gpuaug.fusion.ops.sampler import FIRST, INCREMENT, SECOND, Sampler
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp, Units

ROUNDS = 32
"""Number of rounds of trials. Every round draws one option. The last round keeps the whole image.

The number of rounds is unlimited in torchvision. With torchvision's default options, an image in which only the smallest
overlap is possible reaches the last round with a probability of 1 in 30,000.
"""

_SEED_LENGTH = 2
"""Number of uniform numbers that form the seed of a sample's trials."""


class IoUCrop(TorchvisionOp, BoxCropOp):
    """``v2.RandomIoUCrop``."""

    columns = _SEED_LENGTH + ROUNDS
    words = "crop by boxes"

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        self._options = [float(option) for option in transform.options]
        self._trial_count = int(transform.trials)
        self._min_scale = float(transform.min_scale)
        self._scale_range = float(transform.max_scale) - float(transform.min_scale)
        # An empty crop has a ratio of 0 or NaN, and must not fit.
        self._min_ratio = max(float(transform.min_aspect_ratio), 2**-24)
        self._max_ratio = float(transform.max_aspect_ratio)

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        if self._min_scale + self._scale_range > 1:
            return f"max_scale={self._min_scale + self._scale_range:g}, with which crops are larger than the image"
        return None if self._trial_count > 0 and self._options else "no trials, or no options"

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"numbers"``, (B, columns): the seed of the trials, then the option of every round."""
        uniform = sampler.uniform(self.columns)
        options = np.array(self._options, np.float32)[
            (uniform[_SEED_LENGTH:] * np.float32(len(self._options))).astype(np.int64)
        ]
        options[-1] = 1
        return {"numbers": np.concatenate((uniform[:_SEED_LENGTH], options)).T}

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """Not supported, because the crop depends on the boxes.

        Raises:
            ArgumentError: Always.
        """
        raise ArgumentError(
            f"draws must not depend on boxes for as_torchvision(), got those of {self.name}. Replay them with the same boxes: "
            "augment(images, targets, draws=draws)."
        )

    def windows(self, numbers: Tensor, sides: Tensor, boxes: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
        """First valid crop of every image, and the mask of the boxes that the crop keeps.

        Shape:
            - numbers: (B, columns), the draws
            - sides: (B, 2), width and height of the images
            - boxes: (n, 4), XYXY in pixels
            - owners: (n,), index of the image of each box
            - returns: crops (B, 4) as (x, y, width, height) in pixels, and the mask, (n,) bool

        Cost:
            About 80 launches, and 50 bytes per trial, round and box.
        """
        scales, offsets = self._trials(numbers)
        side = torch.floor(sides[..., None] * scales.mul_(self._scale_range).add_(self._min_scale))
        start = torch.floor((sides[..., None] - side) * offsets)
        ratio = side[:, 0] / side[:, 1]
        fits = (ratio >= self._min_ratio) & (ratio <= self._max_ratio)
        option = numbers[:, _SEED_LENGTH:, None].expand(-1, -1, self._trial_count).flatten(1)
        trials = torch.cat((start, start + side, option[:, None]), 1)
        # Dimensions from here on: (box, coordinate, trial of the image of the box).
        first, last = boxes[:, :2, None], boxes[:, 2:, None]
        left, right, min_overlap = trials[owners].split((2, 2, 1), 1)
        centre = 0.5 * (first + last)
        within = ((left < centre) & (centre < right)).all(1)
        shared = (torch.minimum(last, right) - torch.maximum(first, left)).clamp(min=0).prod(1)
        overlap = shared / ((last - first).prod(1) + (right - left).prod(1) - shared)
        enough = (within & (overlap >= min_overlap[:, 0])).float()
        # Dimensions from here on: (image, trial).
        whole = option >= 1
        chosen = (whole | fits & (torch.zeros_like(ratio).index_add_(0, owners, enough) > 0)).int().argmax(1, keepdim=True)
        whole = whole.gather(1, chosen)
        window = torch.cat((start, side), 1).gather(2, chosen[:, None].expand(-1, 4, 1))[..., 0]
        kept = (whole[owners] | within.gather(1, chosen[owners]))[:, 0]
        return torch.where(whole, torch.cat((torch.zeros_like(sides), sides), 1), window), kept

    def _trials(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Uniform numbers per trial for the sides and for the offsets, (B, 2, rounds · trials) each, from SplitMix64."""
        seeds = (numbers[:, :_SEED_LENGTH] * 2**24).long()
        count = ROUNDS * self._trial_count
        steps = torch.arange(1, 2 * count + 1, device=numbers.device) * _signed(INCREMENT)
        bits = _mix((seeds[:, :1] << 24 | seeds[:, 1:]) + steps)
        halves = torch.stack((bits >> 40 & 0xFFFFFF, bits & 0xFFFFFF), 1).float().mul_(2**-24)
        return halves[..., :count], halves[..., count:]


def _mix(words: Tensor) -> Tensor:
    """Output function of SplitMix64, applied to 64-bit words."""
    words = (words ^ ((words >> 30) & (2**34 - 1))) * _signed(FIRST)
    words = (words ^ ((words >> 27) & (2**37 - 1))) * _signed(SECOND)
    return words ^ ((words >> 31) & (2**33 - 1))


def _signed(word: int) -> int:
    """Reinterpret an unsigned 64-bit word as int64."""
    return word - 2**64 if word >= 2**63 else word


LOWERED: dict[type[nn.Module], type[TorchvisionOp]] = {v2.RandomIoUCrop: IoUCrop}
