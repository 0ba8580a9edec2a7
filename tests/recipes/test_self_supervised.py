"""Pretraining without labels: DINOv2, DINOv3, MAE, SimMIM, SimCLR and BYOL, one recipe for each kind of crop."""

import pytest
import torch
from support.ops.recipes import MEAN, STD, Recipe, assert_equals_torchvision, cases, left_to_the_library
from torch import nn
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

import gpuaug

BICUBIC = InterpolationMode.BICUBIC

DINO_2 = "facebookresearch/dinov2@b8931f7b dinov2/data/augmentations.py, dinov2/data/transforms.py"
DINO_3 = "facebookresearch/dinov3@6876159a dinov3/data/augmentations.py, dinov3/data/transforms.py"
MAE = "facebookresearch/mae@efb2a806 main_pretrain.py, main_finetune.py"
SIM_MIM = "microsoft/SimMIM@d3e29bca data/data_simmim.py"
SIM_CLR = "sthalles/SimCLR@1848fc93 data_aug/contrastive_learning_dataset.py"
BYOL = "lucidrains/byol-pytorch@29931261 byol_pytorch/byol_pytorch.py"


def blur_of(transforms):
    """DINO's blur: a RandomApply with a constructor of its own, which takes the chance to skip it."""

    class GaussianBlur(transforms.RandomApply):
        def __init__(self, *, p=0.5, radius_min=0.1, radius_max=2.0):
            super().__init__(transforms=[transforms.GaussianBlur(9, sigma=(radius_min, radius_max))], p=1 - p)

    return GaussianBlur


class MaybeToTensor(v1.ToTensor):
    def __call__(self, pic):
        return pic if isinstance(pic, torch.Tensor) else super().__call__(pic)


MaybeToTensor.__module__ = "dinov2.data.transforms"


def dino(transforms, size, scale, blur, *, solarize=False):
    """DINOv2's crops with ``transforms`` of v1, DINOv3's with those of v2."""
    geometric = [transforms.RandomResizedCrop(size, scale=scale, interpolation=BICUBIC), transforms.RandomHorizontalFlip(p=0.5)]
    jitter = transforms.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1)
    colours = [transforms.RandomApply([jitter], p=0.8), transforms.RandomGrayscale(p=0.2)]
    extra = blur_of(transforms)(p=blur)
    if solarize:
        extra = transforms.Compose([extra, transforms.RandomSolarize(threshold=128, p=0.2)])
    to_float = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)] if transforms is v2 else [v1.ToTensor()]
    normalize = transforms.Compose([*to_float, transforms.Normalize(mean=MEAN, std=STD)])
    return transforms.Compose([*geometric, transforms.Compose([transforms.Compose(colours), extra, normalize])])


def crops(source, transforms):
    """The recipes of both global crops and of a local one, which are pipelines of their own."""
    large, small = (0.32, 1.0), (0.05, 0.32)
    return {
        "global 1": Recipe(source, lambda: dino(transforms, 32, large, 1.0), 3, 4),
        # A pixel at the threshold may fall on either side of it.
        "global 2": Recipe(source, lambda: dino(transforms, 32, large, 0.1, solarize=True), 3, 4, share=1e-3),
        "local": Recipe(source, lambda: dino(transforms, 16, small, 0.5), 3, 4),
    }


def flipped_crop(end, **settings):
    return v1.Compose([v1.RandomResizedCrop(32, **settings), v1.RandomHorizontalFlip(), *end])


RECIPES = {
    **{f"DINOv2, {name}": recipe for name, recipe in crops(DINO_2, v1).items()},
    **{f"DINOv3, {name}": recipe for name, recipe in crops(DINO_3, v2).items()},
    "DINOv2, linear": Recipe(
        DINO_2, lambda: flipped_crop([MaybeToTensor(), v1.Normalize(mean=MEAN, std=STD)], interpolation=BICUBIC), 1, 2
    ),
    "DINOv3, validation": Recipe(
        DINO_3,
        lambda: v2.Compose(
            [
                v2.ToImage(),
                v2.Resize(36, interpolation=BICUBIC),
                v2.CenterCrop(32),
                v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean=MEAN, std=STD)]),
            ]
        ),
        1,
        1,
    ),
    "MAE": Recipe(
        MAE,
        lambda: flipped_crop([v1.ToTensor(), v1.Normalize(mean=MEAN, std=STD)], scale=(0.2, 1.0), interpolation=3),
        1,
        2,
    ),
    # Less its Lambda, which converts PIL images to RGB.
    "SimMIM": Recipe(
        SIM_MIM,
        lambda: flipped_crop(
            [v1.ToTensor(), v1.Normalize(mean=torch.tensor(MEAN), std=torch.tensor(STD))],
            scale=(0.67, 1.0),
            ratio=(3.0 / 4.0, 4.0 / 3.0),
        ),
        1,
        2,
    ),
    # With torchvision's blur in place of a class of its own, which has the same kernel, deviations and border.
    "SimCLR": Recipe(
        SIM_CLR,
        lambda: flipped_crop(
            [
                v1.RandomApply([v1.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
                v1.RandomGrayscale(p=0.2),
                v1.GaussianBlur(3, (0.1, 2.0)),
                v1.ToTensor(),
            ]
        ),
        3,
        4,
    ),
    # It calls the pipeline on a batch, with torchvision's RandomApply in place of a class of its own.
    "BYOL": Recipe(
        BYOL,
        lambda: nn.Sequential(
            v1.RandomApply([v1.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.3),
            v1.RandomGrayscale(p=0.2),
            v1.RandomHorizontalFlip(),
            v1.RandomApply([v1.GaussianBlur((3, 3), (1.0, 2.0))], p=0.2),
            v1.RandomResizedCrop((32, 32)),
            v1.Normalize(mean=torch.tensor(MEAN), std=torch.tensor(STD)),
        ),
        4,
        dtype=torch.float32,
    ),
}


@pytest.mark.parametrize(("recipe", "ragged"), cases(RECIPES))
def test_recipe_is_fused_entirely_and_equals_torchvision(recipe, ragged):
    assert_equals_torchvision(recipe, ragged)


def test_views_of_global_crops_cost_no_launch_more():
    """Each of the two pipelines of SimCLR, and all local crops of DINO, are one call."""
    augment = gpuaug.fuse(RECIPES["SimCLR"].make(), views=2)
    assert augment.explain((4, 3, 64, 80)).launches == RECIPES["SimCLR"].launches


class GaussianBlur:
    """A blur of SimCLR's own, as any class with code of its own."""

    def __call__(self, image):
        return v2.functional.gaussian_blur(image, [3, 3])


@left_to_the_library
def test_class_of_their_own_is_left_to_torchvision():
    explanation = gpuaug.fuse(v1.Compose([v1.RandomHorizontalFlip(), GaussianBlur(), v1.ToTensor()])).explain((4, 3, 64, 80))
    assert [(line.modules, line.reason) for line in explanation.lines if line.reason] == [
        (("GaussianBlur_1",), "it may do anything")
    ]
