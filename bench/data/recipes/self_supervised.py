"""Pretraining without labels: DINOv2, DINOv3, MAE, SimMIM, SimCLR and BYOL."""

from typing import Any

import torch
from torch import nn
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

from bench.data.pipelines import MEAN, STD

BICUBIC = InterpolationMode.BICUBIC

DINO_2 = "facebookresearch/dinov2@b8931f7b dinov2/data/augmentations.py, dinov2/data/transforms.py"
DINO_3 = "facebookresearch/dinov3@6876159a dinov3/data/augmentations.py, dinov3/data/transforms.py"
MAE = "facebookresearch/mae@efb2a806 main_pretrain.py, main_finetune.py"
SIM_MIM = "microsoft/SimMIM@d3e29bca data/data_simmim.py"
SIM_CLR = "sthalles/SimCLR@1848fc93 data_aug/contrastive_learning_dataset.py"
BYOL = "lucidrains/byol-pytorch@29931261 byol_pytorch/byol_pytorch.py"


def _to_float(transforms: Any) -> list[Any]:
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)] if transforms is v2 else [v1.ToTensor()]


class MaybeToTensor(v1.ToTensor):
    """Converts PIL images to tensors, and leaves tensors as they are."""

    def __call__(self, pic: Any) -> Any:
        return pic if isinstance(pic, torch.Tensor) else super().__call__(pic)


MaybeToTensor.__module__ = "dinov2.data.transforms"


def _blur_of(transforms: Any) -> type:
    """DINO's blur: a RandomApply with a constructor of its own, which takes the chance to skip it."""

    class GaussianBlur(transforms.RandomApply):
        def __init__(self, *, p: float = 0.5, radius_min: float = 0.1, radius_max: float = 2.0) -> None:
            super().__init__(transforms=[transforms.GaussianBlur(9, sigma=(radius_min, radius_max))], p=1 - p)

    return GaussianBlur


def _dino(transforms: Any, size: int, scale: tuple[float, float], blur: float, *, solarize: bool = False) -> Any:
    geometric = [transforms.RandomResizedCrop(size, scale=scale, interpolation=BICUBIC), transforms.RandomHorizontalFlip(p=0.5)]
    jitter = transforms.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1)
    colours = [transforms.RandomApply([jitter], p=0.8), transforms.RandomGrayscale(p=0.2)]
    extra = _blur_of(transforms)(p=blur)
    if solarize:
        extra = transforms.Compose([extra, transforms.RandomSolarize(threshold=128, p=0.2)])
    normalize = transforms.Compose([*_to_float(transforms), transforms.Normalize(mean=MEAN, std=STD)])
    return transforms.Compose([*geometric, transforms.Compose([transforms.Compose(colours), extra, normalize])])


def dino_global_1(size: int, *, transforms: Any = v1) -> Any:
    """The first global crop: of DINOv2 with v1's classes, of DINOv3 with v2's, as the other crops."""
    return _dino(transforms, size, (0.32, 1.0), 1.0)


def dino_global_2(size: int, *, transforms: Any = v1) -> Any:
    """The second global crop."""
    return _dino(transforms, size, (0.32, 1.0), 0.1, solarize=True)


def dino_local(size: int, *, transforms: Any = v1) -> Any:
    """A local crop. Each image has eight local crops."""
    return _dino(transforms, size, (0.05, 0.32), 0.5)


def dino_2_linear(size: int) -> Any:
    """DINOv2's pipeline for training a linear classifier."""
    return _flipped_crop(v1, size, [MaybeToTensor(), v1.Normalize(mean=MEAN, std=STD)], interpolation=BICUBIC)


def dino_3_validation(resized: int, size: int) -> Any:
    """DINOv3's pipeline for validation."""
    end = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean=MEAN, std=STD)])
    return v2.Compose([v2.ToImage(), v2.Resize(resized, interpolation=BICUBIC), v2.CenterCrop(size), end])


def _flipped_crop(transforms: Any, size: int, end: list[Any], **settings: Any) -> Any:
    return transforms.Compose([transforms.RandomResizedCrop(size, **settings), transforms.RandomHorizontalFlip(), *end])


def mae(size: int, *, transforms: Any = v1) -> Any:
    """MAE's pipeline for pretraining."""
    end = [*_to_float(transforms), transforms.Normalize(mean=MEAN, std=STD)]
    return _flipped_crop(transforms, size, end, scale=(0.2, 1.0), interpolation=3)


def sim_mim(size: int, *, transforms: Any = v1) -> Any:
    """SimMIM's pipeline, less its Lambda, which converts PIL images to RGB."""
    # transforms.Normalize of v2 takes no tensors.
    mean, std = (torch.tensor(MEAN), torch.tensor(STD)) if transforms is v1 else (MEAN, STD)
    end = [*_to_float(transforms), transforms.Normalize(mean=mean, std=std)]
    return _flipped_crop(transforms, size, end, scale=(0.67, 1.0), ratio=(3.0 / 4.0, 4.0 / 3.0))


def sim_clr(size: int, *, transforms: Any = v1) -> Any:
    """SimCLR's pipeline, with torchvision's blur in place of a class of its own.

    Kernel size, standard deviations and border mode equal the class's.
    """
    return _flipped_crop(
        transforms,
        size,
        [
            transforms.RandomApply([transforms.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
            transforms.RandomGrayscale(p=0.2),
            transforms.GaussianBlur(3, (0.1, 2.0)),
            *_to_float(transforms),
        ],
    )


def byol(size: int) -> Any:
    """BYOL's pipeline for a batch of floats in [0, 1], with torchvision's RandomApply in place of a class of its own."""
    return nn.Sequential(
        v1.RandomApply([v1.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.3),
        v1.RandomGrayscale(p=0.2),
        v1.RandomHorizontalFlip(),
        v1.RandomApply([v1.GaussianBlur((3, 3), (1.0, 2.0))], p=0.2),
        v1.RandomResizedCrop((size, size)),
        v1.Normalize(mean=torch.tensor(MEAN), std=torch.tensor(STD)),
    )
