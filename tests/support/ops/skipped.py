"""Every op that may skip a sample, and images on whose values a weight of zero leaves a trace."""

import itertools

import kornia.augmentation as K
import torch
from kornia.augmentation import auto
from support.comparison.replay import photographs
from support.ops import op_cases
from support.ops.op_cases import CASES

import gpuaug

SIZE = (16, 24)


def half_the_samples(module):
    """The module, skipped for each sample by chance, where ``p=`` of its own is for the batch."""
    module.p, module.p_batch, module.same_on_batch = 0.5, 1.0, False
    return module


def skipped_by_chance(case):
    """(B,) samples go through the op by chance, each for itself, and keep their size."""
    module = case.first(p=0.5, **({"size": SIZE} if "size" in case.parameters.split() else {}))
    return module if module.p < 1 or case in op_cases.MIXES else half_the_samples(module)


SKIPPED = {case.name: lambda case=case: [skipped_by_chance(case)] for case in CASES.values() if case.kind is not K.PadTo}

MOVING = {
    **{case.name: SKIPPED[case.name] for case in CASES.values() if case.moves and case.kind is not K.PadTo},
    "affine, border": lambda: [K.RandomAffine(20.0, padding_mode="border", p=0.5)],
    "affine, nearest": lambda: [K.RandomAffine(20.0, resample="nearest", p=0.5)],
    "one of several warps": lambda: [auto.AutoAugment([[("rotate", 0.5, 1), ("shear_x", 0.4, 3)], [("invert", 0.3, None)]])],
    "resized crop, squares": lambda: [half_the_samples(K.RandomResizedCrop(SIZE, align_corners=False))],
    "resized crop, nearest": lambda: [half_the_samples(K.RandomResizedCrop(SIZE, resample="nearest"))],
    "crop, padded": lambda: [half_the_samples(K.RandomCrop(SIZE, padding=5, fill=0.25))],
    "wide blur": lambda: [K.RandomGaussianBlur((11, 11), (0.5, 2.0), p=0.5)],
}
"""What moves pixels or looks at their neighbours, which takes a kernel for each."""

SKIPPING = {**SKIPPED, **MOVING}
"""One pipeline an op that may skip a sample: its own ``p``, or a draw for each sample where Kornia draws for the batch."""

ANTIALIASED = {
    "crop": lambda: [half_the_samples(K.RandomResizedCrop(SIZE))],
    "cubic crop": lambda: [half_the_samples(K.RandomResizedCrop(SIZE, resample="bicubic"))],
    "resize": lambda: [half_the_samples(K.Resize(SIZE))],
}


VALUES = (torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 3e38, -3e38, 2e-38)
"""Pixels that are no numbers, have no difference that is one, or differ from what they equal."""


def strewn(images, values=VALUES, share=0.05):
    """Images with such values in some places, corners among them."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(values), images.shape, generator=generator)
    places = torch.rand(images.shape, generator=generator) < share
    places[..., [0, 0, -1, -1], [0, -1, 0, -1]] = True
    return torch.where(places, torch.tensor(values)[chosen], images)


def differing(first, second, *, any_nan=False):
    """The number of values whose bits differ; with ``any_nan``, besides those that are no numbers in both."""
    differ = first.contiguous().view(torch.int32) != second.contiguous().view(torch.int32)
    return int((differ & ~(any_nan & first.isnan() & second.isnan())).sum())


def same_bits(first, second):
    return not differing(first, second)


def fault(make, device="cpu", *, batch=6, calls=3, **options):
    """What is wrong with samples that ``make()`` skips, or an empty string: they must come out bit for bit as they went in."""
    images = strewn(photographs(batch, 3, *SIZE, dtype=torch.float32))
    augment = gpuaug.fuse(make(), **options)
    drawn = (augment.draw(images.shape, seed=seed) for seed in range(100))
    skipping = ((draws, [index for index in range(batch) if not draws.of(index)]) for draws in drawn)
    for draws, skipped in itertools.islice(((draws, skipped) for draws, skipped in skipping if skipped), calls):
        got = augment(images.to(device), draws=draws).cpu()
        for index in skipped:
            # A sum with NaN is NaN, but a GPU has one of its own.
            if differ := differing(got[index], images[index], any_nan=device == "cuda" and "antialias" in options):
                return f"{differ} values of sample {index} differ"
        calls -= 1
    return f"samples were skipped in {calls} calls too few" if calls else ""
