"""The same draws through torchvision's own functions and through fuse."""

import functools

import torch
from support.comparison import replay
from torchvision.transforms.v2 import functional

from gpuaug.fusion.pixels import LARGEST

BYTES_OFF = 1e-2
"""Share of the values of bytes that may differ: values next to the border of two bytes, and what later steps make of them."""


def called(image, calls):
    """What the calls make of an image."""
    for name, arguments in calls:
        image = mixed(image, **arguments) if name == "augmix" else getattr(functional, name)(image, **arguments)
    return image


def mixed(image, chains, weights):
    """The weighted mean of an image and of the results of chains, as ``v2.AugMix`` computes it."""
    first, *others = torch.tensor(weights)
    mean = first * image
    for weight, calls in zip(others, chains, strict=True):
        mean.add_(weight * called(image, calls))
    return mean.to(image.dtype)


def replayed(draws, images):
    """What torchvision's functions make of each image with what it drew, as it gives them: (B, C, H, W)."""
    return torch.stack([called(image, calls) for image, calls in zip(images, draws.as_torchvision(), strict=True)])


def by_torchvision(pipeline, images, draws):
    return replayed(draws, images)


both = functools.partial(replay.both, by=by_torchvision)
assert_replays = functools.partial(replay.assert_replays, by=by_torchvision)


def scaled(images):
    """Whole numbers as shares of the largest of their type."""
    return images.float() / LARGEST[images.dtype] if images.dtype in LARGEST else images


def followed(draws, values, **others):
    """What torchvision's functions make of each sample's tensor with what the sample drew, and ``others`` for padding."""
    made = []
    for value, calls in zip(values, draws.as_torchvision(), strict=True):
        for name, arguments in calls:
            if name not in ("to_dtype", "normalize") and not name.startswith("adjust_"):
                filled = others if arguments.get("fill") is not None or name == "pad" else {}
                value = getattr(functional, name)(value, **{**arguments, **filled})
        made.append(value)
    return made
