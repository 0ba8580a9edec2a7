"""torchvision's ``v2.RandomIoUCrop``: crops a window that overlaps a box by at least a random minimum.

The host draws a seed per *sample*, an image or a clip. From the seed the device generates many random windows, the *trials*,
and uses the first one that is valid for the boxes of the image. Trials are divided into *rounds*. Each round has a minimum
overlap, its *option*. With an option of 1 or more, the image is not cropped.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.base import OpDraws, Size
from gpuaug.fusion.ops.geometry import BoxCropOp
from gpuaug.fusion.ops.sampler import SPLITMIX_INCREMENT, Sampler, as_int64, splitmix64_mix
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp

ROUNDS = 32
"""Number of rounds. In the last round the image is not cropped.

In torchvision the number of rounds is unlimited. With the default options, an image in which only the smallest option has valid
windows reaches the last round with a probability of 1 in 30,000.
"""

SEED_LENGTH = 2
"""Number of uniform numbers, of 24 bits each, that form the seed of a sample."""


class IoUCrop(TorchvisionOp, BoxCropOp):
    """``v2.RandomIoUCrop``.

    Support: fused together with a following `Resize` to two sides: [Crops by boxes](detection.md#crops-by-boxes).
    """

    lowers = (v2.RandomIoUCrop,)
    columns = SEED_LENGTH + ROUNDS
    description = "crop by boxes"

    def _read(self, transform: Any) -> None:
        self._options = [float(option) for option in transform.options]
        self.trial_count = int(transform.trials)
        self.min_scale = float(transform.min_scale)
        self.scale_range = float(transform.max_scale) - float(transform.min_scale)
        # Above 0, so that an empty window, whose ratio is 0 or NaN, is not valid.
        self.min_ratio = max(float(transform.min_aspect_ratio), 2**-24)
        self.max_ratio = float(transform.max_aspect_ratio)

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        if self.min_scale + self.scale_range > 1:
            return f"max_scale={self.min_scale + self.scale_range:g}, with which crops are larger than the image"
        return None if self.trial_count > 0 and self._options else "no trials, or no options"

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"numbers"``, (B, columns): the seed, then the option of every round."""
        uniform = sampler.uniform(self.columns)
        options = np.array(self._options, np.float32)[(uniform[SEED_LENGTH:] * np.float32(len(self._options))).astype(np.int64)]
        options[-1] = 1
        return {"numbers": np.concatenate((uniform[:SEED_LENGTH], options)).T}

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """Not supported, because the crop depends on the boxes.

        Raises:
            ArgumentError: Always.
        """
        raise ArgumentError(
            f"draws must not depend on boxes for as_torchvision(), got the draws of {self.name}. Replay them with the same "
            "boxes: augment(images, targets, draws=draws)."
        )

    def windows(self, numbers: Tensor, sides: Tensor, boxes: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the first valid trial of every image. A box stays valid if its centre is inside the window.

        Shape:
            - numbers: (B, columns), as drawn
            - sides: (B, 2), width and height of the images
            - boxes: (n, 4), XYXY in pixels; parts outside of the image are ignored
            - owners: (n,), sample index of each box
            - returns: windows (B, 4) as (x, y, width, height) in pixels, and the mask of the boxes that stay valid, (n,) bool

        Cost:
            About 80 launches, and 50 bytes per trial, round and box. On a GPU with Triton, ``dispatch.box_windows`` chooses the
            same windows in one launch.
        """
        boxes = torch.minimum(boxes.clamp(min=0), sides.repeat(1, 2)[owners])
        scales, offsets = self._trials(numbers)
        side = torch.floor(sides[..., None] * scales.mul_(self.scale_range).add_(self.min_scale))
        start = torch.floor((sides[..., None] - side) * offsets)
        ratio = side[:, 0] / side[:, 1]
        has_valid_ratio = (ratio >= self.min_ratio) & (ratio <= self.max_ratio)
        option = numbers[:, SEED_LENGTH:, None].expand(-1, -1, self.trial_count).flatten(1)
        trials = torch.cat((start, start + side, option[:, None]), 1)
        # Dimensions from here on: (box, coordinate, trial of the image of the box).
        box_start, box_end = boxes[:, :2, None], boxes[:, 2:, None]
        trial_start, trial_end, min_overlap = trials[owners].split((2, 2, 1), 1)
        centre = 0.5 * (box_start + box_end)
        has_centre = ((trial_start < centre) & (centre < trial_end)).all(1)
        intersection = (torch.minimum(box_end, trial_end) - torch.maximum(box_start, trial_start)).clamp(min=0).prod(1)
        overlap = intersection / ((box_end - box_start).prod(1) + (trial_end - trial_start).prod(1) - intersection)
        accepts = (has_centre & (overlap >= min_overlap[:, 0])).float()
        # Dimensions from here on: (image, trial).
        is_whole = option >= 1
        is_valid = is_whole | has_valid_ratio & (torch.zeros_like(ratio).index_add_(0, owners, accepts) > 0)
        chosen = is_valid.int().argmax(1, keepdim=True)
        is_whole = is_whole.gather(1, chosen)
        window = torch.cat((start, side), 1).gather(2, chosen[:, None].expand(-1, 4, 1))[..., 0]
        stays_valid = (is_whole[owners] | has_centre.gather(1, chosen[owners]))[:, 0]
        return torch.where(is_whole, torch.cat((torch.zeros_like(sides), sides), 1), window), stays_valid

    def _trials(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Uniform numbers for the sides and for the offsets of all trials, (B, 2, rounds · trials) each, from SplitMix64."""
        seeds = (numbers[:, :SEED_LENGTH] * 2**24).long()
        count = ROUNDS * self.trial_count
        increments = torch.arange(1, 2 * count + 1, device=numbers.device) * as_int64(SPLITMIX_INCREMENT)
        bits = splitmix64_mix((seeds[:, :1] << 24 | seeds[:, 1:]) + increments)
        halves = torch.stack((bits >> 40 & 0xFFFFFF, bits & 0xFFFFFF), 1).float().mul_(2**-24)
        return halves[..., :count], halves[..., count:]
