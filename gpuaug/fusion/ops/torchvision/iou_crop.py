"""torchvision's RandomIoUCrop, chosen on the device among trials that follow from few numbers of the host's."""

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
"""Rounds of trials, each with an option of its own. The last leaves the image whole; torchvision's rounds have no end.

With torchvision's options an image reaches the last once in 30,000 times, where only the least overlap can be had.
"""

_SEED = 2
"""Uniform numbers that are the seed of a sample's trials."""


class IoUCrop(TorchvisionOp, BoxCropOp):
    """RandomIoUCrop."""

    columns = _SEED + ROUNDS
    words = "crop by boxes"

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        self._options = [float(option) for option in transform.options]
        self._trial_count = int(transform.trials)
        self._least = float(transform.min_scale)
        self._range = float(transform.max_scale) - float(transform.min_scale)
        # A crop without pixels has a ratio of 0, or none.
        self._narrowest = max(float(transform.min_aspect_ratio), 2**-24)
        self._widest = float(transform.max_aspect_ratio)

    def unsupported(self) -> str | None:
        """Why the transform cannot be lowered, or ``None``."""
        if self._least + self._range > 1:
            return f"max_scale={self._least + self._range:g}, with which crops are larger than the image"
        return None if self._trial_count > 0 and self._options else "no trials, or no options"

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """The seed of the trials, and the option of each round."""
        uniform = sampler.uniform(self.columns)
        options = np.array(self._options, np.float32)[(uniform[_SEED:] * np.float32(len(self._options))).astype(np.int64)]
        options[-1] = 1
        return {"numbers": np.concatenate((uniform[:_SEED], options)).T}

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """None.

        Raises:
            ArgumentError: Always.
        """
        raise ArgumentError(
            f"draws must not depend on boxes to be told as calls, got those of {self.name}. Replay them with the same boxes: "
            "augment(images, targets, draws=draws)."
        )

    def windows(self, numbers: Tensor, sides: Tensor, boxes: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
        """The crop of each image that torchvision would take first, and the boxes that it would leave.

        Cost:
            Some eighty launches; 50 bytes for each trial of each round and each box.
        """
        shares, places = self._trials(numbers)
        side = torch.floor(sides[..., None] * shares.mul_(self._range).add_(self._least))
        start = torch.floor((sides[..., None] - side) * places)
        ratio = side[:, 0] / side[:, 1]
        fits = (ratio >= self._narrowest) & (ratio <= self._widest)
        option = numbers[:, _SEED:, None].expand(-1, -1, self._trial_count).flatten(1)
        trials = torch.cat((start, start + side, option[:, None]), 1)
        # From here on for each box and each trial of its image.
        first, last = boxes[:, :2, None], boxes[:, 2:, None]
        left, right, least = trials[owners].split((2, 2, 1), 1)
        centre = 0.5 * (first + last)
        within = ((left < centre) & (centre < right)).all(1)
        shared = (torch.minimum(last, right) - torch.maximum(first, left)).clamp(min=0).prod(1)
        overlap = shared / ((last - first).prod(1) + (right - left).prod(1) - shared)
        enough = (within & (overlap >= least[:, 0])).float()
        # And for each trial of an image again.
        whole = option >= 1
        place = (whole | fits & (torch.zeros_like(ratio).index_add_(0, owners, enough) > 0)).int().argmax(1, keepdim=True)
        whole = whole.gather(1, place)
        window = torch.cat((start, side), 1).gather(2, place[:, None].expand(-1, 4, 1))[..., 0]
        kept = (whole[owners] | within.gather(1, place[owners]))[:, 0]
        return torch.where(whole, torch.cat((torch.zeros_like(sides), sides), 1), window), kept

    def _trials(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """For each trial uniform numbers for the sides and for the place, (B, 2, rounds · trials) each, from SplitMix64."""
        words = (numbers[:, :_SEED] * 2**24).long()
        count = ROUNDS * self._trial_count
        steps = torch.arange(1, 2 * count + 1, device=numbers.device) * _signed(INCREMENT)
        made = _mix((words[:, :1] << 24 | words[:, 1:]) + steps)
        halves = torch.stack((made >> 40 & 0xFFFFFF, made & 0xFFFFFF), 1).float().mul_(2**-24)
        return halves[..., :count], halves[..., count:]


def _mix(words: Tensor) -> Tensor:
    """The output function of SplitMix64, on each 64-bit word."""
    words = (words ^ ((words >> 30) & (2**34 - 1))) * _signed(FIRST)
    words = (words ^ ((words >> 27) & (2**37 - 1))) * _signed(SECOND)
    return words ^ ((words >> 31) & (2**33 - 1))


def _signed(word: int) -> int:
    """A 64-bit word as the int64 of the same bits."""
    return word - 2**64 if word >= 2**63 else word


LOWERED: dict[type[nn.Module], type[TorchvisionOp]] = {v2.RandomIoUCrop: IoUCrop}
