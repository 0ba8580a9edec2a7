"""Satellite images and robots: torchgeo's data modules and trainers, which call Kornia, and LeRobot's transforms."""

import kornia.augmentation as K
import pytest
import torch
from support.comparison.values import assert_values
from support.ops.recipes import (
    Recipe,
    assert_equals_kornia,
    drawn,
    left_to_the_library,
)
from torch import nn

import gpuaug
from bench.data.recipes import torchgeo

FLOATS = {"dtype": torch.float32}
RECIPES = {
    "torchgeo, EuroSAT": Recipe(
        torchgeo.MODULES + "eurosat.py",
        lambda: torchgeo.module([1100.0] * 13, [700.0] * 13),
        1,
        channels=13,
        largest=9000.0,
        **FLOATS,
    ),
    "torchgeo, LandCover.ai": Recipe(
        torchgeo.MODULES + "landcoverai.py",
        lambda: torchgeo.module(
            0,
            255,
            K.RandomRotation(p=0.5, degrees=90),
            *torchgeo.flips(),
            K.RandomSharpness(p=0.5),
            K.ColorJitter(p=0.5, brightness=0.1, contrast=0.1, saturation=0.1, hue=0.1),
        ),
        5,
        largest=255.0,
        atol=5e-5,
        **FLOATS,
    ),
    "torchgeo, Fields of The World": Recipe(
        torchgeo.MODULES + "ftw.py",
        lambda: torchgeo.module([0], [3000], K.RandomRotation(p=0.5, degrees=90), *torchgeo.flips(), K.RandomSharpness(p=0.5)),
        3,
        channels=4,
        largest=3000.0,
        atol=5e-5,
        **FLOATS,
    ),
    "torchgeo, L8 Biome": Recipe(
        torchgeo.MODULES + "l8biome.py",
        lambda: torchgeo.l8_biome(32),
        2,
        channels=11,
        largest=10000.0,
        **FLOATS,
    ),
    "torchgeo, Inria": Recipe(
        torchgeo.MODULES + "inria.py",
        lambda: torchgeo.module(0, 255, *torchgeo.flips(), K.RandomCrop((72, 72), pad_if_needed=True)),
        2,
        largest=255.0,
        **FLOATS,
    ),
    "torchgeo, BYOL": Recipe(
        torchgeo.TRAINERS + "byol.py",
        lambda: nn.Sequential(
            K.Resize(size=(32, 32), align_corners=False),
            K.RandomHorizontalFlip(),
            K.RandomGaussianBlur((3, 3), (1.5, 1.5), p=0.1),
            K.RandomResizedCrop(size=(32, 32)),
        ),
        3,
        channels=13,
        **FLOATS,
    ),
    "torchgeo, SimCLR but for its grey": Recipe(
        torchgeo.TRAINERS + "simclr.py",
        lambda: torchgeo.trainer(
            K.RandomResizedCrop(size=(32, 32), ratio=(0.75, 1.33)),
            *torchgeo.flips(),
            K.RandomBrightness(brightness=(0.2, 1.8), p=0.8),
            K.RandomContrast(contrast=(0.2, 1.8), p=0.8),
            K.RandomGaussianBlur(kernel_size=(3, 3), sigma=(0.1, 2)),
        ),
        2,
        channels=4,
        **FLOATS,
    ),
    "torchgeo, MoCo 3 but for its grey": Recipe(
        torchgeo.TRAINERS + "moco.py",
        lambda: torchgeo.trainer(
            K.RandomResizedCrop(size=(32, 32), scale=(0.08, 1)),
            K.RandomBrightness(brightness=(0.6, 1.4), p=0.8),
            K.RandomContrast(contrast=(0.6, 1.4), p=0.8),
            K.RandomGaussianBlur(kernel_size=(3, 3), sigma=(0.1, 2), p=0.1),
            K.RandomSolarize(p=0.2),
            *torchgeo.flips(),
        ),
        3,
        channels=4,
        share=1e-3,
        **FLOATS,
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_fused_entirely_and_equals_kornia(name):
    assert_equals_kornia(RECIPES[name])


def test_mask_of_a_tile_follows_as_kornia_takes_it():
    recipe = RECIPES["torchgeo, L8 Biome"]
    images, _, draws = drawn(gpuaug.fuse(recipe.make()), recipe, False, seed=1)
    mask = torch.randint(0, 5, (len(images), 1, *images.shape[2:]), generator=torch.Generator().manual_seed(0)).float()
    _, got = gpuaug.fuse(recipe.make())(images, mask, data_keys=["input", "mask"], draws=draws)
    expected = recipe.make()({"image": images, "mask": mask}, params=draws.as_kornia())["mask"]
    assert_values(got, expected, share=4e-3)


@left_to_the_library
def test_grey_of_torchgeo_is_left_to_kornia():
    """The other modules of the recipes of SimCLR and MoCo are fused."""
    augment = gpuaug.fuse(torchgeo.trainer(*torchgeo.flips(), torchgeo.RandomGrayscale(torch.ones(4), p=0.2)))
    explanation = augment.explain((4, 4, 64, 80), dtype=torch.float32)
    assert [line.modules for line in explanation.lines if line.reason] == [("RandomGrayscale_2",)]
