"""The augmentation pipelines of the experiments, as their users write them for torchvision and for Kornia.

Every pipeline takes uint8 images. On the GPU they become float on the card first; on a worker, late, as torchvision
advises.
"""

import kornia.augmentation as K
import torch
from torch import Tensor, nn
from torchvision.transforms import v2

_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)


class Scaled(nn.Module):
    """uint8 images as floats in [0, 1], then ``transform``."""

    def __init__(self, transform: nn.Module) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, images: Tensor) -> Tensor:
        return self.transform(images.float() / 255)


def heavy_worker(size: int) -> nn.Module:
    """The heavy pipeline for one uint8 image on a worker."""
    return v2.Compose(
        [
            v2.RandomCrop(size // 2),
            v2.Resize(size, antialias=True),
            v2.RandomRotation(45),
            v2.GaussianBlur(7),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(_MEAN, _STD),
        ]
    )


class HeavyPublished(nn.Module):
    """The heavy pipeline on the card as published: one draw for the whole batch, except a rotation called once an image."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.before = v2.Compose([v2.RandomCrop(size // 2), v2.Resize(size, antialias=True)])
        self.rotate = v2.RandomRotation(45)
        self.after = v2.Compose([v2.GaussianBlur(7), v2.Normalize(_MEAN, _STD)])

    def forward(self, images: Tensor) -> Tensor:
        images = self.before(images)
        return self.after(torch.stack([self.rotate(image) for image in images]))


def heavy_kornia(size: int) -> nn.Module:
    """The heavy pipeline in Kornia, every image with its own draws. Cropping by a warp is its form without a loop."""
    return K.AugmentationSequential(
        K.RandomCrop((size // 2, size // 2), cropping_mode="resample"),
        K.Resize((size, size)),
        K.RandomRotation(45.0, p=1.0),
        K.RandomGaussianBlur((7, 7), (0.1, 2.0), p=1.0),
        K.Normalize(torch.tensor(_MEAN), torch.tensor(_STD)),
    )


def classification_kornia(size: int) -> nn.Module:
    """The usual pipeline of ImageNet training in Kornia, to ``size`` pixels."""
    return K.AugmentationSequential(
        K.RandomResizedCrop((size, size), cropping_mode="resample"),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.4, 0.4, 0.4, 0.0, p=1.0),
        K.Normalize(torch.tensor(_MEAN), torch.tensor(_STD)),
    )
