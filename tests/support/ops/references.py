"""Transforms of torchvision's reference scripts that no package has, with the names that they use, and copies of them."""

from typing import Any

import torch
from torch import nn
from torchvision.transforms import functional as F
from torchvision.transforms import v2


class PadIfSmaller(v2.Transform):
    """pytorch/vision@4acc5f12 references/segmentation/v2_extras.py."""

    def __init__(self, size, fill=0):
        super().__init__()
        self.size = size
        self.fill = v2._utils._setup_fill_arg(fill)

    def make_params(self, sample):
        _, height, width = v2._utils.query_chw(sample)
        padding = [0, 0, max(self.size - width, 0), max(self.size - height, 0)]
        return dict(padding=padding, needs_padding=any(padding))  # noqa: C408

    def transform(self, inpt, params):
        if not params["needs_padding"]:
            return inpt
        fill = v2._utils._convert_fill_arg(v2._utils._get_fill(self.fill, type(inpt)))
        return v2.functional.pad(inpt, padding=params["padding"], fill=fill)


class FixedSizeCrop(nn.Module):
    """pytorch/vision@0055d83c references/detection/transforms.py."""

    def __init__(self, size, fill: Any = 0, padding_mode="constant"):
        super().__init__()
        self.crop_height, self.crop_width = size
        self.fill = fill
        self.padding_mode = padding_mode

    def _pad(self, img, target, padding):
        img = F.pad(img, padding, self.fill, self.padding_mode)
        if target is not None and "masks" in target:
            target["masks"] = F.pad(target["masks"], padding, 0, "constant")
        return img, target

    def _crop(self, img, target, top, left, height, width):
        img = F.crop(img, top, left, height, width)
        if target is not None:
            boxes = target["boxes"]
            boxes[:, 0::2] -= left
            boxes[:, 1::2] -= top
            boxes[:, 0::2].clamp_(min=0, max=width)
            boxes[:, 1::2].clamp_(min=0, max=height)
            is_valid = (boxes[:, 0] < boxes[:, 2]) & (boxes[:, 1] < boxes[:, 3])
            target["boxes"], target["labels"] = boxes[is_valid], target["labels"][is_valid]
            if "masks" in target:
                target["masks"] = F.crop(target["masks"][is_valid], top, left, height, width)
        return img, target

    def forward(self, img, target=None):
        _, height, width = F.get_dimensions(img)
        new_height, new_width = min(height, self.crop_height), min(width, self.crop_width)
        if new_height != height or new_width != width:
            r = torch.rand(1)
            top = int(max(height - self.crop_height, 0) * r)
            left = int(max(width - self.crop_width, 0) * r)
            img, target = self._crop(img, target, top, left, new_height, new_width)
        padding = [0, 0, max(self.crop_width - new_width, 0), max(self.crop_height - new_height, 0)]
        return self._pad(img, target, padding) if any(padding) else (img, target)
