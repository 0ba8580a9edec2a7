"""What gather kernels read: ragged images, views and antialiased pixels, against the torch executor."""

import torch
from support.ragged import images_of, pack
from support.readers import DENSE, RAGGED, SAME, SIZES, crop, disagreement

FORMS = {torch.float32: torch.contiguous_format, torch.float16: torch.channels_last}


def cases(*, every):
    """(name, modules, images, output dtype, options of fuse). Without ``every``, small images where many pixels are read."""
    for name, (modules, sizes, options) in RAGGED.items():
        if "cubic" in name and not every:
            sizes = [(height // 2, width // 2) for height, width in sizes]
        for layout, dtype in (("chw", torch.float32), ("hwc", torch.float16)):
            yield f"{name}, ragged, {layout}", modules, pack(images_of(sizes), layout), dtype, options
    yield "one channel", [crop()], pack(images_of(SIZES, 1), "hwc"), torch.float32, {"antialias": True}
    for name, (modules, options) in SAME.items():
        images = DENSE[:, :1, :15, :20] if "blur" in name and not every else DENSE
        yield f"{name}, dense", modules, images, torch.float32, options
    yield "two channels", SAME["smooth, padded"][0], DENSE[:, :2].float() / 255, torch.float16, {"antialias": True}


def failures(*, every):
    """Names of the pipelines whose kernels differ, and how."""
    for name, modules, images, dtype, options in cases(every=every):
        if text := disagreement(modules, images, dtype, FORMS[dtype], **options):
            yield f"{name} to {dtype}: {text}"
