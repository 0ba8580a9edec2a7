"""Kernels on images of uint16 and int16, read and written, against the torch executor."""

import torch
from support.batches.ragged import images_of, pack
from support.comparison.executors import disagreement
from support.comparison.readers import disagreement as ragged_disagreement
from support.comparison.replay import photographs
from support.ops import pipelines
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
PLANES, PIXELS = torch.contiguous_format, torch.channels_last


def images(dtype, channels=3, height=15, width=20):
    """Values over the whole range of the type, those below 0 too."""
    made = photographs(2, channels, height, width, dtype=torch.float32)
    limits = torch.iinfo(dtype)
    return (made * (limits.max - limits.min) + limits.min).round().to(dtype)


def only_images(fill):
    return {torch.Tensor: fill, tv_tensors.Mask: 0}


def moved():
    return [v2.Pad(2, fill=77), v2.RandomCrop((14, 16)), v2.RandomHorizontalFlip(), v2.RandomErasing(0.5, value=3000)]


def resized():
    return [v2.RandomResizedCrop((10, 12), scale=(0.5, 1.0), interpolation=InterpolationMode.BICUBIC), v2.RandomInvert()]


def turned():
    return [v2.RandomRotation(40, InterpolationMode.BILINEAR, fill=only_images(900)), v2.RandomVerticalFlip(), TO_FLOAT]


UINT16 = [
    (moved, torch.uint16, PIXELS),
    (resized, torch.uint16, PLANES),
    (lambda: [v2.ColorJitter(0.4, 0.9, 0.4)], torch.uint16, PIXELS),
    (lambda: [v2.GaussianBlur((3, 11)), v2.ColorJitter(0.4, 0.9)], torch.float16, PIXELS),
    (lambda: [v2.RandomAutocontrast(1.0), TO_FLOAT, v2.Normalize([0.5], [0.25])], torch.float32, PLANES),
    (pipelines.EXACT["equalize"], torch.float32, PLANES),
    (lambda: [v2.RandomPerspective(0.5, 0.8, fill=only_images(9000)), v2.CenterCrop((9, 11))], torch.uint16, PLANES),
    (turned, torch.float16, PLANES),
    (pipelines.CLOSE["mixup, alone"], torch.float32, PLANES),
]
INT16 = [
    (moved, torch.int16, PIXELS),
    (lambda: [v2.GaussianBlur(3), TO_FLOAT, v2.Normalize([0.1], [0.25])], torch.float16, PIXELS),
    (turned, torch.float32, PLANES),
    (pipelines.CLOSE["sharpness"], torch.float16, PLANES),
]


def failures(*, every):
    """Names of the pipelines whose kernels differ, and how."""
    if text := disagreement("", [v2.ColorJitter(0.4, (3.0, 4.0))], images(torch.uint16, 1), torch.uint16, PLANES):
        yield f"jitter of one channel: {text}"
    for source, cases in ((torch.uint16, UINT16), (torch.int16, INT16)):
        for number, (make, dtype, memory_format) in enumerate(cases):
            if text := disagreement("", make(), images(source), dtype, memory_format):
                yield f"{source}, pipeline {number} to {dtype}: {text}"
        for layout, options in (("chw", {}), ("hwc", {"antialias": True})):
            batch = pack(images_of([(17, 22), (20, 9)], dtype=source), layout)
            crop = [v2.RandomResizedCrop((8, 10), antialias=bool(options))]
            if text := ragged_disagreement(crop, batch, torch.float32, PLANES, **options):
                yield f"{source}, ragged, {layout}: {text}"
