"""Images and targets of the examples and mistakes in ``tests/messages``."""

import warnings

import torch
from torchvision.transforms import v2

import gpuaug

IMAGES = torch.arange(2 * 3 * 8 * 8, dtype=torch.uint8).view(2, 3, 8, 8)
LABELS = torch.tensor([0, 2])
MASK = torch.arange(2 * 64).view(2, 1, 8, 8)
BOXES = torch.tensor([[[1.0, 2, 4, 5]], [[2.0, 1, 6, 6]]])
FLIPPED = torch.tensor([[[4.0, 2, 7, 5]], [[2.0, 1, 6, 6]]])
"""``BOXES`` after torchvision's horizontal flip."""
FLIP = v2.RandomHorizontalFlip(1.0)
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)


def targets(**others):
    return [{"boxes": boxes, "labels": torch.tensor([1]), **others} for boxes in BOXES]


def run(batch, *stages):
    """The batch after the stages of a loader."""
    (result,) = gpuaug.StreamedLoader([batch], stages, device="cpu")
    return result


def fuse_some(*arguments, **options):
    """A fused pipeline without the warning about modules that are not fused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gpuaug.GpuAugWarning)
        return gpuaug.fuse(*arguments, **options)
