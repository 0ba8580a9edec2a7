"""Recipes for self-supervised pretraining: DINOv2, DINOv3, MAE, SimMIM, SimCLR and BYOL."""

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


def _blur_class(transforms: Any) -> type:
    """Return the class of DINO's blur: a RandomApply whose constructor takes the probability to skip the blur."""

    class GaussianBlur(transforms.RandomApply):
        def __init__(self, *, p: float = 0.5, radius_min: float = 0.1, radius_max: float = 2.0) -> None:
            super().__init__(transforms=[transforms.GaussianBlur(9, sigma=(radius_min, radius_max))], p=1 - p)

    return GaussianBlur


def _dino(transforms: Any, size: int, scale: tuple[float, float], blur: float, *, solarize: bool = False) -> Any:
    geometric = [transforms.RandomResizedCrop(size, scale=scale, interpolation=BICUBIC), transforms.RandomHorizontalFlip(p=0.5)]
    jitter = transforms.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1)
    colour_transforms = [transforms.RandomApply([jitter], p=0.8), transforms.RandomGrayscale(p=0.2)]
    blur_and_solarize = _blur_class(transforms)(p=blur)
    if solarize:
        blur_and_solarize = transforms.Compose([blur_and_solarize, transforms.RandomSolarize(threshold=128, p=0.2)])
    normalize = transforms.Compose([*_to_float(transforms), transforms.Normalize(mean=MEAN, std=STD)])
    return transforms.Compose(
        [*geometric, transforms.Compose([transforms.Compose(colour_transforms), blur_and_solarize, normalize])]
    )


def dino_global_1(size: int, *, transforms: Any = v1) -> Any:
    """Return the pipeline of the first global crop, of DINOv2 with v1's classes, of DINOv3 with v2's."""
    return _dino(transforms, size, (0.32, 1.0), 1.0)


def dino_global_2(size: int, *, transforms: Any = v1) -> Any:
    """Return the pipeline of the second global crop."""
    return _dino(transforms, size, (0.32, 1.0), 0.1, solarize=True)


def dino_local(size: int, *, transforms: Any = v1) -> Any:
    """Return the pipeline of a local crop. Each image has eight local crops."""
    return _dino(transforms, size, (0.05, 0.32), 0.5)


def dino_2_linear(size: int) -> Any:
    """Return DINOv2's pipeline for training a linear classifier."""
    return _flipped_crop(v1, size, [MaybeToTensor(), v1.Normalize(mean=MEAN, std=STD)], interpolation=BICUBIC)


def dino_3_validation(resize_size: int, size: int) -> Any:
    """Return DINOv3's pipeline for validation."""
    end = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean=MEAN, std=STD)])
    return v2.Compose([v2.ToImage(), v2.Resize(resize_size, interpolation=BICUBIC), v2.CenterCrop(size), end])


def _flipped_crop(transforms: Any, size: int, end: list[Any], **settings: Any) -> Any:
    return transforms.Compose([transforms.RandomResizedCrop(size, **settings), transforms.RandomHorizontalFlip(), *end])


def mae(size: int, *, transforms: Any = v1) -> Any:
    """Return MAE's pipeline for pretraining."""
    end = [*_to_float(transforms), transforms.Normalize(mean=MEAN, std=STD)]
    return _flipped_crop(transforms, size, end, scale=(0.2, 1.0), interpolation=3)


def sim_mim(size: int, *, transforms: Any = v1) -> Any:
    """Return SimMIM's pipeline without its Lambda, which converts PIL images to RGB."""
    # v2.Normalize takes no tensors as mean and std.
    mean, std = (torch.tensor(MEAN), torch.tensor(STD)) if transforms is v1 else (MEAN, STD)
    end = [*_to_float(transforms), transforms.Normalize(mean=mean, std=std)]
    return _flipped_crop(transforms, size, end, scale=(0.67, 1.0), ratio=(3.0 / 4.0, 4.0 / 3.0))


def sim_clr(size: int, *, transforms: Any = v1) -> Any:
    """Return SimCLR's pipeline, with torchvision's blur in place of its blur class.

    Kernel size, standard deviations and border mode are set by the class.
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
    """Return BYOL's pipeline for a batch of floats in [0, 1], with torchvision's RandomApply in place of its class."""
    return nn.Sequential(
        v1.RandomApply([v1.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.3),
        v1.RandomGrayscale(p=0.2),
        v1.RandomHorizontalFlip(),
        v1.RandomApply([v1.GaussianBlur((3, 3), (1.0, 2.0))], p=0.2),
        v1.RandomResizedCrop((size, size)),
        v1.Normalize(mean=torch.tensor(MEAN), std=torch.tensor(STD)),
    )
