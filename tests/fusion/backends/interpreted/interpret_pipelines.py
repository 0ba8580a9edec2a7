"""Gather, mix and filter kernels on whole pipelines, images and masks, against the torch executor."""

import torch
from support import pipelines
from support.executors import disagreement
from support.replay import photographs

UINT8, FLOAT = photographs(3, 3, 21, 37), photographs(2, 3, 21, 37, dtype=torch.float32)
BATCHES = [
    (UINT8, torch.float32, torch.contiguous_format),
    (FLOAT, torch.float16, torch.channels_last),
    (UINT8[:2].to(memory_format=torch.channels_last), torch.float16, torch.contiguous_format),
    (UINT8[:2], torch.float16, torch.channels_last),
]
TWO_CHANNELS = (photographs(2, 2, 21, 37), torch.float32, torch.contiguous_format)
SMALL = (photographs(2, 1, 9, 19), torch.float32, torch.contiguous_format)
"""For blurs: every line of every tap takes the interpreter its time."""


def batches_of(number, group, name, *, every):
    """The batches a pipeline is compared on: one of them by turns, or all."""
    if "blur" in name:
        return BATCHES[:1] if every else [SMALL]
    batches = BATCHES + ([] if group.startswith("RGB") else [TWO_CHANNELS])
    return batches if every else batches[number % len(batches) :][:1]


def failures(*, every):
    """Names of the pipelines whose kernels differ from torch, and how."""
    groups = ("EXACT", "RGB_EXACT", "CLOSE", "RGB_CLOSE", "TIES")
    made = [(group, name, make) for group in groups for name, make in getattr(pipelines, group).items()]
    for number, (group, name, make) in enumerate(made):
        for images, dtype, memory_format in batches_of(number, group, name, every=every):
            # The interpreter does not fuse products and sums, so a byte's share of 255 may be one unit off.
            exact = group.endswith("EXACT") and images.dtype == torch.uint8
            text = disagreement("" if exact else name, make(), images, dtype, memory_format, 1e-6 if exact else 2e-5)
            if text:
                yield f"{name}, {tuple(images.shape)} {images.dtype} to {dtype}: {text}"
