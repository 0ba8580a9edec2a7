"""The same draws through torchvision's own functions and through fuse."""

import torch
from support.values import assert_values
from torchvision.transforms.v2 import functional

import gpuaug
from gpuaug.fusion.pixels import LARGEST


def replayed(draws, images):
    """What torchvision's functions make of each image with what it drew, as it gives them: (B, C, H, W)."""
    made = []
    for image, calls in zip(images, draws.as_torchvision(), strict=True):
        for name, arguments in calls:
            image = getattr(functional, name)(image, **arguments)
        made.append(image)
    return torch.stack(made)


def both(pipeline, images, seed=0, **options):
    """(what torchvision makes of the draws, what fuse makes of them)."""
    augment = gpuaug.fuse(pipeline, **options)
    draws = augment.draw(images.shape, seed=seed, dtype=images.dtype)
    return replayed(draws, images), augment(images, draws=draws)


def assert_replays(pipeline, images, seed=0, *, atol=0.0, share=0.0, equal_nan=False, **options):
    """Assert that fuse makes of the draws of ``seed`` what torchvision makes of them, and return what fuse makes."""
    __tracebackhide__ = True
    expected, got = both(pipeline, images, seed, **options)
    draws = gpuaug.fuse(pipeline, **options).draw(images.shape, seed=seed, dtype=images.dtype)
    assert_values(got, expected, atol=atol, share=share, equal_nan=equal_nan, draws=draws)
    return got


def scaled(images):
    """Whole numbers as shares of the largest of their type."""
    return images.float() / LARGEST[images.dtype] if images.dtype in LARGEST else images
