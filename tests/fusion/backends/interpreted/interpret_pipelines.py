"""Gather, mix and filter kernels on whole pipelines, images and masks, against the torch executor."""

import zlib

import torch
from support.comparison.executors import disagreement
from support.comparison.replay import photographs
from support.ops import pipelines

UINT8, FLOAT = photographs(2, 3, 21, 31), photographs(2, 3, 16, 37, dtype=torch.float32)
"""Two tiles above each other, and two side by side."""

BATCHES = [
    (UINT8, torch.float32, torch.contiguous_format),
    (FLOAT, torch.float16, torch.channels_last),
    (UINT8.to(memory_format=torch.channels_last), torch.float16, torch.contiguous_format),
    (UINT8, torch.float16, torch.channels_last),
    (photographs(2, 2, 21, 37), torch.float32, torch.contiguous_format),
]
BYTES = (photographs(2, 3, 21, 37), torch.uint8, torch.channels_last)
"""Two tiles by two."""

AS_BYTES = (
    *("auto contrast", "crop, reflected", "crop, resize, pad", "cutmix", "equalize", "jitter between filters", "mixup, alone"),
    *("orders of samples", "resized crop, flip", "rotation", "sharpness", "torchvision's mixes", "two passes"),
)
"""Pipelines whose results are also compared as bytes: at least one for each kernel that stores pixels."""

SMALL = (photographs(2, 1, 9, 19), torch.float32, torch.contiguous_format)
"""For blurs: the interpreter takes its time for every line and tap."""

MANY = (photographs(2, 5, 21, 37), torch.float16, torch.contiguous_format)
"""For ops that mix any number of channels."""

HOLES = pipelines.with_holes(FLOAT)

ALSO = {
    "apply masks": (2, 4),
    "channels": (3, 4),
    "colour": (1, 2, 3),
    "crop, padded": (1,),
    "crop, reflected": (1, 4),
    "crop, replicated": (1, 4),
    "crop, resize, pad": (1, 4),
    "cutmix": (2,),
    "floats of bytes": (0, 3),
    "jiggle": (1,),
    "jitter between filters": (2, 3),
    "jitter of normalised images": (3,),
    "mixup, alone": (3,),
    "mixup, never": (2,),
    "noise": (3,),
    "noise behind a filter": (0,),
    "one of, then jitter": (3,),
    "orders of samples": (0,),
    "perspective": (1, 4),
    "resized crop, nearest": (1,),
    "self-supervised": (3,),
    "sharpness": (1, 4),
    "tone": (0,),
    "two passes": (3,),
    "two passes, exact": (3,),
}
"""Extra batches of a pipeline, as indices into ``BATCHES``.

Each pipeline runs on one batch, chosen by a hash of its name. These are added so that every branch of a kernel and every
combination of compile-time constants is covered.
"""


def batches_of(group, name, *, every):
    """The batches that a pipeline is compared on: all that it takes, or one chosen by its name and its ``ALSO``."""
    if "blur" in name:
        return BATCHES[:1] if every else [SMALL, (*SMALL[:1], torch.uint8, *SMALL[2:])]
    batches = BATCHES[:4] if group.startswith("RGB") else BATCHES
    turn = (zlib.crc32(name.encode()) + 6) % len(batches)
    chosen = batches if every else [batches[index] for index in sorted({turn, *ALSO.get(name, ())})]
    chosen = [*chosen, BYTES] if every or name in AS_BYTES else chosen
    chosen = [*chosen, MANY] if name in ("channels", "jitter, then jitter", "shuffle") else chosen
    chosen = [batch for batch in chosen if name != "jpeg" or not batch[0].is_floating_point()] or [BYTES]
    return [*chosen, (HOLES, torch.float32, torch.contiguous_format)] if name in pipelines.OF_ALL_CHANNELS else chosen


def failures(*, every):
    """Names of the pipelines whose kernels differ from torch, and how."""
    for group in pipelines.GROUPS:
        for name, make in getattr(pipelines, group).items():
            for images, dtype, memory_format in batches_of(group, name, every=every):
                # The interpreter does not fuse products and sums, so a byte's share of 255 may be one unit off.
                exact = group.endswith("EXACT") and images.dtype == torch.uint8
                text = disagreement("" if exact else name, make(), images, dtype, memory_format, 1e-6 if exact else 2e-5)
                if text:
                    yield f"{name}, {tuple(images.shape)} {images.dtype} to {dtype}: {text}"
