"""Padding before and behind other ops that move pixels: images and masks of the kernels against those of torch."""

import kornia.augmentation as K
import torch
from support.comparison.executors import composition_difference, through_both
from support.comparison.values import difference
from support.ops.compositions import COMPOSITIONS, SOME, bytes_of

FILLS = [0.1, *(step / 2048 + 2**-12 for step in (1118, 1583, 1862))]
"""Among them numbers half way between two of float16."""


def difference_of_fills(fill):
    """How what is padded, and resized behind it, differs between the kernels and torch, in 16 and in 32 bits."""
    images = bytes_of(batch=2, channels=1)
    for source, dtype in ((images, torch.float16), ((images.float() / 255).bfloat16(), torch.float32)):
        for modules in (
            [K.RandomCrop((20, 22), padding=9, fill=fill)],
            [K.RandomCrop((30, 32), padding=12, fill=fill), K.Resize(20)],
        ):
            expected, got, _, _ = through_both(modules, source, dtype, torch.contiguous_format)
            atol = 0 if dtype == torch.float16 else 1.2e-7
            if text := difference(got[..., :2, :2], expected[..., :2, :2], atol=atol):
                return text
    return ""


def failures(*, every):
    """Compositions for which the kernels differ from torch."""
    for name in COMPOSITIONS if every else SOME:
        if text := composition_difference(name, bytes_of(batch=2 if every else 1, channels=1)):
            yield text
    yield from (f"a fill of {fill}: {text}" for fill in FILLS if (text := difference_of_fills(fill)))
