"""Random images of the sizes of COCO's photographs, with targets of random objects."""

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors

from bench.data import random_images

Target = dict[str, Tensor]

POOL_IMAGES = 64
"""Number of images."""


class Scenes(Dataset):
    """Random images (3, H, W) uint8 with boxes (n, 4), labels (n,) and masks (n, H, W) of n objects.

    Args:
        side: Longer side of the images in pixels. The shorter side is about 70 % of it.
        keys: Keys of the target dicts.
        count: Number of images.
    """

    def __init__(self, side: int, keys: Sequence[str], *, count: int = POOL_IMAGES) -> None:
        generator = torch.Generator().manual_seed(0)
        self.transform: Callable[[Tensor, Target], tuple[Tensor, Target]] | None = None
        self.items = [_scene(side, index % 2 == 0, keys, generator) for index in range(count)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        image, target = self.items[index]
        return (image, target) if self.transform is None else self.transform(image, target)

    def transformed(self, transform: Callable[[Tensor, Target], tuple[Tensor, Target]]) -> "Scenes":
        """Copy of the dataset that applies ``transform`` to each image and target in the worker."""
        dataset = copy(self)
        dataset.transform = transform
        return dataset


def _scene(side: int, wide: bool, keys: Sequence[str], generator: torch.Generator) -> tuple[Tensor, Target]:
    def random_integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    # In COCO, the longer side of photographs is mostly the same, and the shorter one differs a little.
    sides = (random_integer(side * 2 // 3, side * 3 // 4), side)
    height, width = sides if wide else sides[::-1]
    target = random_images.random_objects(height, width, generator)
    if "masks" in keys:
        masks = torch.zeros(len(target["boxes"]), height, width, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, target["boxes"].int().tolist(), strict=True):
            mask[top:bottom, left:right] = 1
        target["masks"] = masks
    image = torch.randint(256, (3, height, width), dtype=torch.uint8, generator=generator)
    return image, {key: target[key] for key in keys}


def to_tv_tensors(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """Return an item as torchvision's tensor classes, by which its transforms recognise images, boxes and masks."""
    wrapped = dict(target)
    if "boxes" in target:
        wrapped["boxes"] = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=image.shape[-2:])
    if "masks" in target:
        wrapped["masks"] = tv_tensors.Mask(target["masks"])
    return tv_tensors.Image(image), wrapped
