"""Training and validation of classifiers, and of CLIP: torchvision's references, timm, open_clip, Ultralytics."""

import pytest
import torch
from support.batches.ragged import images_of, pack
from support.comparison.values import assert_values
from support.ops.recipes import SIZES, Recipe, assert_equals_torchvision, cases
from torchvision.transforms import functional

import gpuaug
from bench.data.pipelines import heavy_as_published
from bench.data.recipes.classification import (
    OPEN_CLIP,
    OPENAI_STD,
    REFERENCES,
    TIMM,
    YOLO,
    ResizeKeepRatio,
    open_clip,
    open_clip_validation,
    references,
    references_validation,
    timm,
    ultralytics,
    ultralytics_validation,
)

RECIPES = {
    "references": Recipe(REFERENCES, lambda: references(32), 1, 2),
    "references, erased": Recipe(REFERENCES, lambda: references(32, erase=0.1), 1, 2),
    "references, validation": Recipe(REFERENCES, lambda: references_validation(36, 32), 1, 1),
    "published classifier": Recipe("bench/data/pipelines.py", lambda: heavy_as_published(32), 3, 3, share=2e-3),
    "timm": Recipe(TIMM, lambda: timm(32, is_training=True, color_jitter=0.4), 2, 3),
    "timm, validation": Recipe(TIMM, lambda: timm(32), 1, 1),
    "open_clip": Recipe(OPEN_CLIP, lambda: open_clip(32), 1, 2),
    "open_clip, jitter and grey": Recipe(OPEN_CLIP, lambda: open_clip(32, jitter=True), 2, 3),
    "open_clip, validation": Recipe(OPEN_CLIP, lambda: open_clip_validation(32), 1, 1),
    "open_clip, squashed": Recipe(OPEN_CLIP, lambda: open_clip_validation(32, resize_mode="squash"), 1, 1),
    "open_clip, longest side": Recipe(OPEN_CLIP, lambda: open_clip_validation(32, resize_mode="longest", fill_color=114), 1, 1),
    "Ultralytics, validation": Recipe(YOLO, lambda: ultralytics_validation(32), 1, 1),
}


@pytest.mark.parametrize(("recipe", "ragged"), cases(RECIPES))
def test_recipe_is_fused_entirely_and_equals_torchvision(recipe, ragged):
    assert_equals_torchvision(recipe, ragged)


def test_open_clip_jitters_and_greys_as_often_as_it_says():
    augment = gpuaug.fuse(RECIPES["open_clip, jitter and grey"].make())
    calls = [{name for name, _ in each} for each in augment.draw((4000, 3, 64, 80), seed=0).as_torchvision()]
    for name, p in {"adjust_hue": 0.8, "rgb_to_grayscale": 0.2}.items():
        assert abs(sum(name in each for each in calls) - 4000 * p) < 4 * (4000 * p * (1 - p)) ** 0.5


def test_open_clip_letterboxes_as_it_does_images_of_pil():
    """Its own code takes no tensors."""
    recipe = open_clip_validation(32, resize_mode="longest", fill_color=114)
    images = images_of([*SIZES, (64, 77), (77, 64)])  # these leave an odd number of rows or columns to pad
    expected = torch.stack([recipe(functional.to_pil_image(image)) for image in images])
    # PIL rounds to bytes, behind each direction of its resize.
    assert_values(gpuaug.fuse(recipe, ragged=True)(pack(images)), expected, atol=2.1 / 255 / min(OPENAI_STD))


@pytest.mark.parametrize("drawn", [{"scale_prob": 0.5}, {"aspect_prob": 0.5}], ids=str)
def test_sizes_that_open_clip_draws_are_refused(drawn):
    with pytest.raises(gpuaug.ArgumentTypeError, match="got random scales or ratios of open_clip's"):
        gpuaug.fuse([ResizeKeepRatio(32, **drawn)], ragged=True)


POLICIES = {
    "references, ra": Recipe(REFERENCES, lambda: references(32, "ra"), 11, 12, seeds=(2,)),
    "references, ta_wide": Recipe(REFERENCES, lambda: references(32, "ta_wide", erase=0.1), 6, 7, seeds=(2,)),
    "references, augmix": Recipe(REFERENCES, lambda: references(32, "augmix"), 29, 30, seeds=(2,)),
    "references, imagenet": Recipe(REFERENCES, lambda: references(32, "imagenet"), 10, 11, seeds=(2,)),
    "Ultralytics": Recipe(YOLO, lambda: ultralytics(32), 11, 12, seeds=(2,)),
}


@pytest.mark.parametrize(("recipe", "ragged"), cases(POLICIES))
def test_recipe_with_a_policy_is_fused_entirely_and_equals_torchvision(recipe, ragged):
    assert_equals_torchvision(recipe, ragged)
