"""Augmentation pipelines of the suites, as users write them for torchvision and for Kornia.

Pipelines for workers take uint8 images, and convert them to float late, as torchvision advises. Kornia's pipelines take uint8
images through ``gpuaug.fuse``, and otherwise floats, through ``ScaleAndTransform``.
"""

from typing import Any

import kornia.augmentation as K
import torch
from kornia.augmentation.auto import RandAugment
from torch import Tensor, nn
from torchvision.transforms import v2

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


class ScaleAndTransform(nn.Module):
    """Module that scales uint8 images to floats in [0, 1], and calls ``transform``."""

    def __init__(self, transform: nn.Module) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, images: Tensor, *annotations: Tensor) -> Any:
        return self.transform(images.float() / 255, *annotations)


def heavy_worker(size: int) -> nn.Module:
    """Return the heavy pipeline in torchvision, for one uint8 image in a worker."""
    return v2.Compose(
        [
            v2.RandomCrop(size // 2),
            v2.Resize(size, antialias=True),
            v2.RandomRotation(45),
            v2.GaussianBlur(7),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


def heavy_as_published(size: int) -> v2.Compose:
    """Return the heavy pipeline in torchvision for the card: floats in [0, 255], and the mean and std of bytes."""
    geometry = [v2.RandomCrop(size // 2), v2.Resize(size, antialias=True), v2.RandomRotation(45)]
    normalize = v2.Normalize([255 * value for value in MEAN], [255 * value for value in STD])
    return v2.Compose([v2.ToDtype(torch.float32), *geometry, v2.GaussianBlur(7), normalize])


class HeavyPublished(nn.Module):
    """The heavy pipeline in torchvision on the card, as published: one draw per batch, except for one rotation per image."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.before = v2.Compose([v2.RandomCrop(size // 2), v2.Resize(size, antialias=True)])
        self.rotate = v2.RandomRotation(45)
        self.after = v2.Compose([v2.GaussianBlur(7), v2.Normalize(MEAN, STD)])

    def forward(self, images: Tensor) -> Tensor:
        images = self.before(images)
        return self.after(torch.stack([self.rotate(image) for image in images]))


def heavy_kornia(size: int, *, cropping: str = "resample", **container: Any) -> nn.Module:
    """Return the heavy pipeline in Kornia, with separate draws for every image.

    Args:
        size: Side of the images in pixels.
        cropping: Crop mode. ``"resample"`` crops by a warp, without a loop over the images; ``"slice"`` is Kornia's default.
        container: Further arguments of ``AugmentationSequential``, as in the functions below.
    """
    return K.AugmentationSequential(
        K.RandomCrop((size // 2, size // 2), cropping_mode=cropping),
        K.Resize((size, size)),
        K.RandomRotation(45.0, p=1.0),
        K.RandomGaussianBlur((7, 7), (0.1, 2.0), p=1.0),
        K.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
        **container,
    )


def classification_kornia(size: int, *, cropping: str = "resample", **container: Any) -> nn.Module:
    """Return the usual pipeline of ImageNet training in Kornia, to ``size`` pixels per side."""
    return K.AugmentationSequential(
        K.RandomResizedCrop((size, size), cropping_mode=cropping),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.4, 0.4, 0.4, 0.0, p=1.0),
        K.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
        **container,
    )


def contrastive_kornia(size: int, *, cropping: str = "resample", **container: Any) -> nn.Module:
    """Return the pipeline of one view of contrastive learning in Kornia, to ``size`` pixels per side."""
    return K.AugmentationSequential(
        K.RandomResizedCrop((size, size), cropping_mode=cropping),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        K.RandomGrayscale(p=0.2),
        K.RandomGaussianBlur((23, 23), (0.1, 2.0), p=0.5),
        K.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
        **container,
    )


def view_kornia(size: int, area: tuple[float, float], *, cropping: str = "resample") -> nn.Module:
    """Return the pipeline of one view of DINO in Kornia, to ``size`` pixels per side. ``area``: range of the crop's share."""
    return K.AugmentationSequential(
        K.RandomResizedCrop((size, size), scale=area, cropping_mode=cropping),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.4, 0.4, 0.2, 0.1, p=0.8),
        K.RandomGrayscale(p=0.2),
        K.RandomGaussianBlur((23, 23), (0.1, 2.0), p=0.5),
        K.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
    )


def randaugment_kornia(*, cropping: str = "resample", **container: Any) -> nn.Module:
    """Return RandAugment without a crop in Kornia, which draws its ops once per batch."""
    del cropping  # there is no crop
    return K.AugmentationSequential(RandAugment(n=2, m=10), K.Normalize(torch.tensor(MEAN), torch.tensor(STD)), **container)


def classification_torchvision(size: int) -> nn.Module:
    """Return the usual pipeline of ImageNet training in torchvision, with one draw per call."""
    return v2.Compose(
        [
            v2.RandomResizedCrop(size, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


def contrastive_torchvision(size: int) -> nn.Module:
    """Return the pipeline of one view of contrastive learning in torchvision, with one draw per call."""
    return v2.Compose(
        [
            v2.RandomResizedCrop(size, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            v2.RandomGrayscale(p=0.2),
            v2.RandomApply([v2.GaussianBlur(23, (0.1, 2.0))], p=0.5),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


def randaugment_torchvision() -> nn.Module:
    """Return RandAugment without a crop in torchvision, with one draw per call."""
    return v2.Compose([v2.RandAugment(num_ops=2, magnitude=10), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def hflip_kornia(*, cropping: str = "resample", **container: Any) -> nn.Module:
    """Return torchvision's preset ``hflip`` in Kornia."""
    del cropping  # there is no crop
    return K.AugmentationSequential(K.RandomHorizontalFlip(), **container)
