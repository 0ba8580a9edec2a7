"""Recipes for satellite images: torchgeo's data modules and trainers, which call Kornia on floats with many channels."""

from typing import Any

import kornia.augmentation as K
import torch
from torch import nn

MODULES = "microsoft/torchgeo@7ea0616d torchgeo/datamodules/"
TRAINERS = "microsoft/torchgeo@7ea0616d torchgeo/trainers/"


def flips() -> list[nn.Module]:
    """Return a horizontal and a vertical flip."""
    return [K.RandomHorizontalFlip(p=0.5), K.RandomVerticalFlip(p=0.5)]


def module(mean: Any, std: Any, *augmentations: nn.Module) -> nn.Module:
    """Return the ``train_aug`` of a data module."""
    normalize = K.Normalize(mean=torch.tensor(mean), std=torch.tensor(std))
    return K.AugmentationSequential(normalize, *augmentations, data_keys=None, keepdim=True)


def trainer(*augmentations: nn.Module) -> nn.Module:
    """Return the augmentation of the views of a trainer."""
    return K.AugmentationSequential(*augmentations, data_keys=["input"])


class RandomGrayscale(K.IntensityAugmentationBase2D):
    """Replace every band by the weighted sum of the bands."""

    def __init__(self, weights: torch.Tensor, p: float = 0.1) -> None:
        super().__init__(p=p)
        self.flags = {"weights": weights / weights.sum()}

    def apply_transform(self, images: torch.Tensor, params: Any, flags: Any, transform: Any = None) -> torch.Tensor:
        weighted = images * flags["weights"][:, None, None].to(images.device)
        return weighted.sum(dim=-3).unsqueeze(-3).expand(images.shape)


RandomGrayscale.__module__ = "torchgeo.transforms.color"


def l8_biome(size: int) -> nn.Module:
    """Return the augmentation of the data module L8 Biome: 11 bands with values up to 10 000."""
    return module(0, 10000, K.RandomResizedCrop((size, size), scale=(0.6, 1.0)), *flips())
