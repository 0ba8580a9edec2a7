"""Crops by boxes: transforms, draws and boxes, and whether two programs choose the same windows."""

import numpy as np
import torch
from torchvision.transforms import v2

from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.iou_crop import IoUCrop

TRANSFORMS = {
    "defaults": v2.RandomIoUCrop,
    "narrow": lambda: v2.RandomIoUCrop(0.1, 0.8, 0.3, 0.9, [0.2, 1.0], trials=7),
    "two options": lambda: v2.RandomIoUCrop(sampler_options=[2.0, 0.5]),
    "hardly valid": lambda: v2.RandomIoUCrop(0.8, 1.0, sampler_options=[0.6], trials=9),
}


def op_of(transform):
    """Return the op of a ``RandomIoUCrop``."""
    return IoUCrop("RandomIoUCrop", transform, "floats")


def numbers_of(op, samples, seed):
    """Return the draws of the samples of a batch, (samples, op.columns)."""
    return torch.tensor(op.draw(Sampler((seed,), samples, op.columns), Size(samples, 3, 48, 64))["numbers"])


def boxes_in(width, height, count, seed, least=3):
    """Return random boxes inside an image, (count, 4) XYXY, with sides of at least ``least`` pixels."""
    rng = np.random.default_rng(seed)
    first = rng.random((count, 2)) * (np.array([width, height]) - least)
    last = first + least + rng.random((count, 2)) * (np.array([width, height]) - first - least)
    return torch.tensor(np.concatenate((first, last), 1).reshape(-1, 4), dtype=torch.float32)


def inputs_of(op, samples):
    """Return the arguments of ``op.windows``: images with up to four boxes, some large, invalid or outside of the image."""
    rng = np.random.default_rng(samples)
    sides = torch.tensor(rng.integers(12, 300, (samples, 2)), dtype=torch.float32)
    numbers = numbers_of(op, samples, seed=3)
    numbers[-1] = 1
    boxes = [boxes_in(*side.tolist(), count=index % 5, seed=index) for index, side in enumerate(sides)]
    owners = torch.arange(samples).repeat_interleave(torch.tensor([len(own) for own in boxes]))
    boxes = torch.cat(boxes)
    boxes[::2] = torch.cat((sides, sides), 1)[owners[::2]] * torch.tensor([0.1, 0.2, 0.8, 0.9])
    boxes[1::8] += 60
    boxes[3::8] -= 40
    boxes[9::19, 1] = torch.nan
    boxes[11::23, 2:] = boxes[11::23, :2]
    return numbers, sides, boxes, owners


def difference(name, choose, device, samples):
    """Return how ``choose(op, numbers, sides, boxes, owners)`` differs from ``op.windows``, or an empty string."""
    op = op_of(TRANSFORMS[name]())
    numbers, sides, boxes, owners = inputs_of(op, samples)
    # The draws and the sides of a batch are columns of a table.
    table = torch.cat((sides, numbers), 1)
    numbers, sides = table[:, 2:], table[:, :2]
    order = torch.randperm(len(owners), generator=torch.Generator().manual_seed(0))
    cropped = 0
    for rows in (slice(None), order, slice(0)):
        arguments = numbers, sides, boxes[rows], owners[rows]
        expected = op.windows(*arguments)
        windows, valid = choose(op, *(argument.to(device) for argument in arguments))
        if not torch.equal(windows.cpu(), expected[0]):
            return f"windows of {name}"
        if not torch.equal(valid.cpu(), expected[1]):
            return f"valid boxes of {name}"
        cropped += (expected[0][:, 2:] < sides).any(1).sum()
    return "" if cropped else f"no crop of {name}"
