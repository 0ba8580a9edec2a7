"""Training and validation of classifiers, and of CLIP: torchvision's references, timm, open_clip, Ultralytics."""

import random

import numpy as np
import pytest
import torch
from support.comparison.torchvision_replay import replayed
from support.ops.recipes import MEAN, STD, Recipe, assert_equals_torchvision, cases, left_to_the_library
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

import gpuaug

FRAMEWORKS = (pytest.mark.frameworks,)
BILINEAR, BICUBIC = InterpolationMode.BILINEAR, InterpolationMode.BICUBIC

REFERENCES = "pytorch/vision@080836e5 references/classification/presets.py"
TIMM = "timm 1.0.31 timm/data/transforms_factory.py"
OPEN_CLIP = "mlfoundations/open_clip@89fb801f src/open_clip/transform.py"
YOLO = "ultralytics/ultralytics@0005af52 ultralytics/data/augment.py"
OPENAI_MEAN, OPENAI_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def references(*policy, erase=0.0):
    return v1.Compose(
        [
            v1.RandomResizedCrop(32, interpolation=BILINEAR),
            v1.RandomHorizontalFlip(0.5),
            *policy,
            v1.PILToTensor(),
            v1.ConvertImageDtype(torch.float),
            v1.Normalize(mean=MEAN, std=STD),
            *([v1.RandomErasing(p=erase)] if erase else []),
        ]
    )


def of_timm(**settings):
    data = pytest.importorskip("timm.data")
    return data.create_transform(32, interpolation="bicubic", **settings)


class MaybeConvertMode:
    """Converts PIL images to RGB, and leaves tensors as they are."""

    def __init__(self, mode="RGB"):
        self.mode = mode

    def __call__(self, pic):
        return pic if isinstance(pic, np.ndarray | torch.Tensor) else pic.convert(self.mode)


class MaybeToTensor(v1.ToTensor):
    def __call__(self, pic):
        return pic if isinstance(pic, torch.Tensor) else super().__call__(pic)


class color_jitter:
    """A jitter by chance."""

    def __init__(self, brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0, p=0.8):
        self.p = p
        self.transf = v1.ColorJitter(brightness, contrast, saturation, hue)

    def __call__(self, img):
        return self.transf(img) if random.random() < self.p else img


class gray_scale(color_jitter):
    """Grey by chance."""

    def __init__(self, p=0.2):
        self.p = p
        self.transf = v1.Grayscale(num_output_channels=3)

    def __call__(self, img):
        return self.transf(img) if random.random() < self.p else img


for _kind in (MaybeConvertMode, MaybeToTensor, color_jitter, gray_scale):
    _kind.__module__ = "open_clip.transform"


def open_clip(*head, behind=()):
    end = [MaybeToTensor(), v1.Normalize(mean=OPENAI_MEAN, std=OPENAI_STD)]
    return v1.Compose([*head, MaybeConvertMode(), *behind, *end])


RECIPES = {
    "references": Recipe(REFERENCES, references, 1, 2),
    "references, erased": Recipe(REFERENCES, lambda: references(erase=0.1), 1, 2),
    "references, validation": Recipe(
        REFERENCES,
        lambda: v1.Compose(
            [
                v1.Resize(36, interpolation=BILINEAR),
                v1.CenterCrop(32),
                v1.PILToTensor(),
                v1.ConvertImageDtype(torch.float),
                v1.Normalize(mean=MEAN, std=STD),
            ]
        ),
        1,
        1,
    ),
    "timm": Recipe(TIMM, lambda: of_timm(is_training=True, color_jitter=0.4), 2, 3, marks=FRAMEWORKS),
    "timm, validation": Recipe(TIMM, of_timm, 1, 1, marks=FRAMEWORKS),
    "open_clip": Recipe(OPEN_CLIP, lambda: open_clip(v1.RandomResizedCrop(32, scale=(0.9, 1.0), interpolation=BICUBIC)), 1, 2),
    "open_clip, jitter and grey": Recipe(
        OPEN_CLIP,
        lambda: open_clip(
            v1.RandomResizedCrop(32, scale=(0.9, 1.0), interpolation=BICUBIC),
            behind=[color_jitter(0.32, 0.32, 0.32, 0.08, p=0.8), gray_scale(0.2)],
        ),
        2,
        3,
    ),
    "open_clip, validation": Recipe(
        OPEN_CLIP, lambda: open_clip(v1.Resize(32, interpolation=BICUBIC), v1.CenterCrop((32, 32))), 1, 1
    ),
    "open_clip, squashed": Recipe(OPEN_CLIP, lambda: open_clip(v1.Resize((32, 32), interpolation=BICUBIC)), 1, 1),
    "Ultralytics, validation": Recipe(
        YOLO,
        lambda: v1.Compose(
            [
                v1.Resize(32, interpolation=BILINEAR),
                v1.CenterCrop(32),
                v1.ToTensor(),
                v1.Normalize(mean=torch.zeros(3), std=torch.ones(3)),
            ]
        ),
        1,
        1,
    ),
}


@pytest.mark.parametrize(("recipe", "ragged"), cases(RECIPES))
def test_recipe_is_fused_entirely_and_equals_torchvision(recipe, ragged):
    assert_equals_torchvision(recipe, ragged)


def test_open_clip_jitters_and_greys_as_often_as_it_says():
    augment = gpuaug.fuse(RECIPES["open_clip, jitter and grey"].make())
    calls = [{name for name, _ in each} for each in augment.draw((4000, 3, 64, 80), seed=0).as_torchvision()]
    for name, p in {"adjust_hue": 0.8, "rgb_to_grayscale": 0.2}.items():
        assert abs(sum(name in each for each in calls) - 4000 * p) < 4 * (4000 * p * (1 - p)) ** 0.5


ROUNDED = {"atol": 3 / 255 / min(STD), "share": 0.025, "seeds": (2,)}
"""torchvision rounds to bytes behind the crop and each operation, and a level that is off by one may be spread, or jump."""
POLICIES = {
    "references, ra": Recipe(
        REFERENCES, lambda: references(v1.RandAugment(interpolation=BILINEAR, magnitude=9)), 11, 12, **ROUNDED
    ),
    "references, ta_wide": Recipe(
        REFERENCES, lambda: references(v1.TrivialAugmentWide(interpolation=BILINEAR), erase=0.1), 6, 7, **ROUNDED
    ),
    "references, imagenet": Recipe(REFERENCES, lambda: references(v1.AutoAugment(interpolation=BILINEAR)), 10, 11, **ROUNDED),
    "Ultralytics": Recipe(
        YOLO,
        lambda: v1.Compose(
            [
                v1.RandomResizedCrop(32, scale=(0.5, 1.0), ratio=(3 / 4, 4 / 3), interpolation=BILINEAR),
                v1.RandomHorizontalFlip(p=0.5),
                v1.RandAugment(interpolation=BILINEAR),
                v1.ToTensor(),
                v1.Normalize(mean=torch.zeros(3), std=torch.ones(3)),
                v1.RandomErasing(p=0.4, inplace=True),
            ]
        ),
        11,
        12,
        atol=3 / 255,
        share=0.025,
        seeds=(2,),
    ),
}


@pytest.mark.parametrize(("recipe", "ragged"), cases(POLICIES))
def test_recipe_with_a_policy_is_fused_entirely_and_equals_torchvision_but_for_its_rounding(recipe, ragged):
    assert_equals_torchvision(recipe, ragged, replayed)


@left_to_the_library
def test_augmix_of_the_references_is_left_to_torchvision():
    augment = gpuaug.fuse(references(v2.AugMix(interpolation=BILINEAR, severity=3)))
    (line,) = (line for line in augment.explain((4, 3, 64, 80)).lines if line.reason)
    assert (line.modules, line.package, line.reason) == (("AugMix_2",), "torchvision", "no lowering for this type")
