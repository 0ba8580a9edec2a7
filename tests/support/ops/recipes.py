"""Pipelines that programs have published, and the assertions that hold for each."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import kornia.augmentation as K
import pytest
import torch
from support.batches.ragged import images_of, pack
from support.comparison.replay import as_kornia_takes_them, photographs
from support.comparison.torchvision_replay import BYTES_OFF, replayed
from support.comparison.values import assert_values

import gpuaug

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = [(64, 80), (50, 90), (80, 60), (48, 48)]
"""Sizes of photographs. Images of one size have the first."""

left_to_the_library = pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")


@dataclass(frozen=True)
class Recipe:
    """One pipeline with its own settings, but for sizes, which are small."""

    source: str
    """Project, commit and file."""
    make: Callable[[], Any]
    launches: int
    """Kernels for a batch of images of one size; the most where samples pick operations."""
    of_every_size: int | None = None
    """Kernels for photographs of every size; ``None`` where the program gives the pipeline images of one size."""
    dtype: torch.dtype = torch.uint8
    channels: int = 3
    largest: float = 1.0
    """Largest value of floating images."""
    atol: float = 1e-5
    """Largest difference from the library's functions."""
    share: float = 0.0
    """Share of the values that may differ by more: pixels at a threshold, or where torchvision rounds."""
    seeds: tuple[int, ...] = (0, 1)
    """Seeds of the draws. Images have the type of the recipe with the first, and are floats with the second."""
    units_of_bytes: bool = False
    """Whether the recipe is for bytes only: it has settings in [0, 255] or operations that are not fused for floats."""


def cases(recipes):
    """(recipe, whether photographs have every size), for pytest to parametrize over."""
    return [
        pytest.param(recipe, ragged, id=f"{name}, {size}")
        for name, recipe in recipes.items()
        for size, ragged in (("one size", False), ("every size", True))
        if not ragged or recipe.of_every_size is not None
    ]


def batch_for(recipe, ragged):
    """(the batch, the images in it)."""
    if ragged:
        images = images_of(SIZES, recipe.channels)
        return pack(images), images
    images = photographs(len(SIZES), recipe.channels, *SIZES[0], dtype=recipe.dtype)
    images = images * recipe.largest if recipe.dtype.is_floating_point else images
    return images, images


def assert_fused(augment, recipe, ragged):
    """Assert that no library runs any of it, and the number of launches."""
    __tracebackhide__ = True
    batch, _ = batch_for(recipe, ragged)
    explanation = augment.explain(batch) if ragged else augment.explain(batch.shape, dtype=recipe.dtype)
    assert [line.reason for line in explanation.lines if line.reason] == []
    assert explanation.launches == (recipe.of_every_size if ragged else recipe.launches)


def drawn(augment, recipe, ragged, seed):
    """(the batch, the images in it, the draws for it)."""
    batch, images = batch_for(recipe, ragged)
    draws = augment.draw(batch, seed=seed) if ragged else augment.draw(batch.shape, seed=seed, dtype=recipe.dtype)
    return batch, images, draws


def assert_equals_torchvision(recipe, ragged):
    """Assert that a recipe is fused, and equals torchvision's functions called with its draws."""
    __tracebackhide__ = True
    augment = gpuaug.fuse(recipe.make(), ragged=ragged)
    assert_fused(augment, recipe, ragged)
    of_floats = recipe if ragged or recipe.units_of_bytes else replace(recipe, dtype=torch.float32)
    for seed, own in zip(recipe.seeds, (recipe, of_floats), strict=False):
        batch, images, draws = drawn(augment, own, ragged, seed)
        share = max(own.share, BYTES_OFF) if own.dtype == torch.uint8 else own.share
        assert_values(augment(batch, draws=draws), replayed(draws, images), atol=own.atol, share=share, draws=draws)


def through_kornia(pipeline, images, params):
    """What Kornia makes of images with what they drew."""
    if isinstance(pipeline, K.AugmentationSequential):
        takes_dicts = pipeline.data_keys is None
        return pipeline({"image": images}, params=params)["image"] if takes_dicts else pipeline(images, params=params)
    for module, its in zip(pipeline, params, strict=True):
        images = module(images, params=its)
    return images


def assert_equals_kornia(recipe):
    """Assert that a recipe is fused, and equals Kornia's modules called with its draws."""
    __tracebackhide__ = True
    pipeline = recipe.make()
    augment = gpuaug.fuse(pipeline)
    assert_fused(augment, recipe, ragged=False)
    for seed in recipe.seeds:
        batch, images, draws = drawn(augment, recipe, False, seed)
        expected = through_kornia(pipeline, as_kornia_takes_them(images), draws.as_kornia())
        assert_values(augment(batch, draws=draws), expected, atol=recipe.atol, share=recipe.share, draws=draws)
