"""What gather kernels read: ragged images, views and antialiased pixels, against the torch executor."""

import kornia.augmentation as K
import torch
from support.batches.ragged import images_of, pack
from support.comparison.readers import DENSE, RAGGED, SAME, SIZES, crop, disagreement
from torchvision.transforms import v2

FORMS = {torch.float32: torch.contiguous_format, torch.float16: torch.channels_last}


def cases(*, every):
    """(name, modules, images, output dtype, options of fuse). Without ``every``, small images where many pixels are read."""
    for number, (name, (modules, sizes, options)) in enumerate(RAGGED.items()):
        layouts = [("chw", torch.float32), ("hwc", torch.float16)]
        if "smooth" in name and not every:
            # A line and a pixel at a time, which the interpreter is slow at.
            part = 3 if "cubic" in name else 2
            sizes = [(-(-height // part), -(-width // part)) for height, width in sizes]
            layouts = layouts["cubic" in name :][:1]
        elif number > 2 and not every:
            layouts = layouts[number % 2 :][:1]
        for layout, dtype in layouts:
            yield f"{name}, ragged, {layout}", modules, pack(images_of(sizes), layout), dtype, options
    yield "one channel", [crop()], pack(images_of(SIZES, 1), "hwc"), torch.float32, {"antialias": True}
    to_rgb = [v2.RandomRotation(30), v2.RGB(), v2.RandomCrop(12, pad_if_needed=True, fill=(9, 99, 255))]
    for layout in ("chw", "hwc"):
        yield f"three of one channel, {layout}", to_rgb, pack(images_of(SIZES, 1), layout), torch.float32, {}
    bands = pack(images_of(SIZES, 4), "hwc")
    yield "contrast of four channels first", [K.ColorJitter(0.4, 0.4), crop()], bands, torch.float32, {}
    for name, (modules, options) in SAME.items():
        images = DENSE
        if not every and "smooth" in name:
            images = images[:, :1]
        if not every and ("blur" in name or "cubic" in name):
            images = images[:, :1, :15, :20]
        yield f"{name}, dense", modules, images, torch.float32, options
    yield "smooth, of 16 bits", SAME["blur first, views"][0], DENSE[:, :1, :15, :20], torch.float16, {"antialias": True}
    yield "two channels", SAME["smooth, padded"][0], DENSE[:, :2, :23, :29].float() / 255, torch.float16, {"antialias": True}


def failures(*, every):
    """Names of the pipelines whose kernels differ, and how."""
    for name, modules, images, dtype, options in cases(every=every):
        if text := disagreement(modules, images, dtype, FORMS[dtype], **options):
            yield f"{name} to {dtype}: {text}"
