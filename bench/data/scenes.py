"""Random images of the sizes of COCO's photographs, with targets."""

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors

from bench.data import random_images

Target = dict[str, Tensor]

POOL = 64
"""Number of images."""


class Scenes(Dataset):
    """Random images (3, H, W) uint8 with boxes (n, 4), labels (n,) and masks (n, H, W) of n objects.

    Args:
        side: Approximate longer side of an image in pixels; the other is three quarters of it.
        keys: Keys of the target dicts.
        count: Number of images.
    """

    def __init__(self, side: int, keys: Sequence[str], *, count: int = POOL) -> None:
        draw = torch.Generator().manual_seed(0)
        self.transform: Callable[[Tensor, Target], tuple[Tensor, Target]] | None = None
        self.items = [_scene(side, index % 2 == 0, keys, draw) for index in range(count)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        image, target = self.items[index]
        return (image, target) if self.transform is None else self.transform(image, target)

    def transformed(self, transform: Callable[[Tensor, Target], tuple[Tensor, Target]]) -> "Scenes":
        """Copy of the dataset that applies ``transform`` to each image and target in the worker."""
        other = copy(self)
        other.transform = transform
        return other


def _scene(side: int, wide: bool, keys: Sequence[str], draw: torch.Generator) -> tuple[Tensor, Target]:
    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    # COCO's photographs have one side in common and differ a little in the other.
    sides = (whole(side * 2 // 3, side * 3 // 4), side)
    height, width = sides if wide else sides[::-1]
    target = random_images.random_objects(height, width, draw)
    if "masks" in keys:
        masks = torch.zeros(len(target["boxes"]), height, width, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, target["boxes"].int().tolist(), strict=True):
            mask[top:bottom, left:right] = 1
        target["masks"] = masks
    image = torch.randint(256, (3, height, width), dtype=torch.uint8, generator=draw)
    return image, {key: target[key] for key in keys}


def wrapped(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """An item in torchvision's types, by which its transforms tell an image, boxes and masks."""
    found = dict(target)
    if "boxes" in target:
        found["boxes"] = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=image.shape[-2:])
    if "masks" in target:
        found["masks"] = tv_tensors.Mask(target["masks"])
    return tv_tensors.Image(image), found
