"""Masks of images of several sizes: the sizes, pipelines, and a parameter table for each."""

import kornia.augmentation as K
import numpy as np
import torch
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug.core.targets import Column, owners_of
from gpuaug.fusion.backends.readers import MaskLayout
from gpuaug.fusion.forms.kinds import layouts_of_masks
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.table.rows import fill_table

SIDES = [(21, 37), (30, 18), (40, 52)]
COUNTS = [2, 0, 3]

PIPELINES = {
    "resized crop": lambda: [K.RandomHorizontalFlip(), K.RandomResizedCrop((20, 24)), K.RandomVerticalFlip()],
    "crop, padded": lambda: [K.RandomCrop((17, 30), padding=14, fill=1.0), K.RandomRotation(30.0, p=1.0)],
    "crop, reflected": lambda: [K.RandomCrop((17, 18), padding=9, padding_mode="reflect"), K.RandomErasing((0.1, 0.4), p=1.0)],
    "torchvision's resized crop": lambda: [v2.RandomHorizontalFlip(), v2.RandomResizedCrop((20, 24))],
    "torchvision's crop, padded": lambda: [
        v2.RandomCrop((17, 30), padding=14, fill={tv_tensors.Mask: 255, "others": 0.5}),
        v2.RandomRotation(30),
    ],
    "resize": lambda: [K.Resize((16, 23)), K.RandomGaussianBlur((3, 3), (0.5, 1.0)), K.RandomAffine(20.0, p=1.0)],
}


def rows_of(modules):
    """A plan, and the rows of images of these sizes: each drawn for alone."""
    augment, tables = gpuaug.fuse(modules()), []
    for seed, (height, width) in enumerate(SIDES):
        size = Size(1, 3, height, width)
        draws = augment.draw((1, 3, height, width), seed=seed)
        segment = augment._program().segments.at(0, size, masks=True)
        plan = segment.plan
        table = np.zeros((1, plan.width), np.float32)
        fill_table(plan, size, dict(zip(segment.all_ops, draws._drawn, strict=True)), table)
        tables.append(torch.from_numpy(table))
    return plan, tables


def laid_out(given, samples):
    """Return (flat tensor, layout) of masks: ``given[i]`` holds the masks of image ``samples[i]``."""
    counts = [len(mask) for mask in given]
    layouts = layouts_of_masks(counts, [mask.shape[-2:] for mask in given])
    layout = MaskLayout(torch.from_numpy(owners_of(samples, counts)), torch.from_numpy(layouts))
    return Column(samples, given).elements, layout
