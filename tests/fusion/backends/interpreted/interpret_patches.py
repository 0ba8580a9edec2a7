"""The kernel that writes patches of image processors, against torch."""

import itertools

import torch
from support.batches.ragged import images_of, pack
from support.processors.comparison import beyond_thresholds
from support.processors.stand_ins import NAMES, read_stand_in

from gpuaug.fusion.backends import patches as in_torch
from gpuaug.fusion.backends.triton import patches

SIZES = [(28, 33), (61, 40), (30, 130)]
"""Enlarged, reduced, and long images. Some tiles have lines or columns of no image."""


def failures(*, every):
    """Processors, layouts and dtypes for which the kernel differs from torch."""
    forms = list(itertools.product(("chw", "hwc"), (torch.float32, torch.bfloat16, torch.float16)))
    cases = itertools.product(NAMES, forms) if every else zip(NAMES, itertools.cycle(forms))  # by turns
    for name, (layout, dtype) in cases:
        family, resampling = read_stand_in(name)[1:]
        batch = pack(images_of(SIZES), layout)
        arrangement = family.arrangement(batch.shapes.sizes)
        got, *_ = patches.write_patches(batch, arrangement, resampling, dtype)
        wanted, *_ = in_torch.write_patches(batch, arrangement, resampling, dtype)
        text = beyond_thresholds(got, wanted, batch, arrangement, resampling)
        if text:
            yield f"{name}, {layout}, {dtype}: {text}"
