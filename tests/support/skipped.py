"""Every op that may skip a sample, and images on whose values a weight of zero leaves a trace."""

import itertools

import kornia.augmentation as K
import torch
from kornia.augmentation import auto
from support.replay import photographs

import gpuaug

SIZE = (16, 24)


def half_the_samples(module):
    """The module, skipped for each sample by chance, where ``p=`` of its own is for the batch."""
    module.p, module.p_batch, module.same_on_batch = 0.5, 1.0, False
    return module


MOVING = {
    "flips": lambda: [K.RandomHorizontalFlip(), K.RandomVerticalFlip()],
    "rotation": lambda: [K.RandomRotation(30.0, p=0.5)],
    "quarters": lambda: [K.RandomRotation90((1, 3), p=0.5)],
    "affine": lambda: [K.RandomAffine(20.0, (0.1, 0.1), (0.8, 1.2), 10.0, p=0.5)],
    "affine, border": lambda: [K.RandomAffine(20.0, padding_mode="border", p=0.5)],
    "affine, nearest": lambda: [K.RandomAffine(20.0, resample="nearest", p=0.5)],
    "shear": lambda: [K.RandomShear(15.0, p=0.5)],
    "shift": lambda: [K.RandomTranslate((0.1, 0.2), (0.1, 0.2), p=0.5)],
    "perspective": lambda: [K.RandomPerspective(0.4, p=0.5)],
    "one of several warps": lambda: [auto.AutoAugment([[("rotate", 0.5, 1), ("shear_x", 0.4, 3)], [("invert", 0.3, None)]])],
    "resized crop": lambda: [half_the_samples(K.RandomResizedCrop(SIZE))],
    "resized crop, squares": lambda: [half_the_samples(K.RandomResizedCrop(SIZE, align_corners=False))],
    "resized crop, nearest": lambda: [half_the_samples(K.RandomResizedCrop(SIZE, resample="nearest"))],
    "crop, padded": lambda: [half_the_samples(K.RandomCrop(SIZE, padding=5, fill=0.25))],
    "middle": lambda: [half_the_samples(K.CenterCrop(SIZE))],
    "resize": lambda: [half_the_samples(K.Resize(SIZE))],
    "blur": lambda: [K.RandomGaussianBlur((5, 5), (0.5, 2.0), p=0.5)],
    "wide blur": lambda: [K.RandomGaussianBlur((11, 11), (0.5, 2.0), p=0.5)],
    "sharpness": lambda: [K.RandomSharpness(2.0, p=0.5)],
}
"""What moves pixels or looks at their neighbours, which takes a kernel for each."""

SKIPPING = {
    **MOVING,
    "jitter": lambda: [K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.5)],
    "jiggle": lambda: [K.ColorJiggle(0.4, 0.4, 0.4, 0.1, p=0.5)],
    "brightness": lambda: [K.RandomBrightness((0.6, 1.5), p=0.5)],
    "contrast": lambda: [K.RandomContrast((0.6, 1.5), p=0.5)],
    "saturation": lambda: [K.RandomSaturation((0.2, 1.8), p=0.5)],
    "hue": lambda: [K.RandomHue((-0.5, 0.5), p=0.5)],
    "gamma": lambda: [K.RandomGamma((0.4, 2.2), p=0.5)],
    "grey": lambda: [K.RandomGrayscale(p=0.5)],
    "invert": lambda: [K.RandomInvert(p=0.5)],
    "solarize": lambda: [K.RandomSolarize(p=0.5)],
    "snow": lambda: [K.RandomSnow(p=0.5)],
    "posterize": lambda: [K.RandomPosterize((0.0, 8.0), p=0.5)],
    "CLAHE": lambda: [K.RandomClahe(p=0.5)],
    "equalize": lambda: [K.RandomEqualize(p=0.5)],
    "auto contrast": lambda: [K.RandomAutoContrast(p=0.5)],
    "normalize": lambda: [half_the_samples(K.Normalize(0.5, 0.25))],
    "denormalize": lambda: [half_the_samples(K.Denormalize(0.5, 0.25))],
    "shuffle": lambda: [K.RandomChannelShuffle(p=0.5)],
    "dropout": lambda: [K.RandomChannelDropout(p=0.5)],
    "noise": lambda: [K.RandomGaussianNoise(0.1, 0.3, p=0.5)],
    "erasing": lambda: [K.RandomErasing(p=0.5)],
    "mixup": lambda: [K.RandomMixUpV2(p=0.5)],
    "cutmix": lambda: [K.RandomCutMixV2(p=0.5, use_correct_lambda=True)],
}
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
