"""What gather kernels read: ragged images, views and antialiased pixels, against the torch executor."""

import torch
from support.ragged import images_of, pack
from support.readers import DENSE, RAGGED, SAME, SIZES, crop, disagreement

FORMS = {torch.float32: torch.contiguous_format, torch.float16: torch.channels_last}


def cases(*, every):
    """(name, modules, images, output dtype, options of fuse)."""
    layouts = [("chw", torch.float32), ("hwc", torch.float16)]
    for number, (name, (modules, sizes, options)) in enumerate(RAGGED.items()):
        for layout, dtype in layouts if every else layouts[number % 2 :][:1]:
            yield f"{name}, ragged, {layout}", modules, pack(images_of(sizes), layout), dtype, options
    yield "one channel", [crop()], pack(images_of(SIZES, 1), "hwc"), torch.float32, {"antialias": True}
    for name, (modules, options) in SAME.items():
        yield f"{name}, dense", modules, DENSE, torch.float32, options
    yield "two channels", SAME["smooth, padded"][0], DENSE[:, :2].float() / 255, torch.float16, {"antialias": True}


def failures(*, every):
    """Names of the pipelines whose kernels differ, and how."""
    for name, modules, images, dtype, options in cases(every=every):
        if text := disagreement(modules, images, dtype, FORMS[dtype], **options):
            yield f"{name} to {dtype}: {text}"
