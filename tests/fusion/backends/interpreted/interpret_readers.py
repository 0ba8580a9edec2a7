"""Run by test_triton.py in a process of its own: what gather kernels read, under Triton's interpreter, against torch."""

import sys

import kornia.augmentation as K
import torch
from support.ragged import images_of, pack
from support.replay import photographs

import gpuaug
from gpuaug.fusion.backends.readers import size_of
from gpuaug.fusion.backends.torch_backend import run
from gpuaug.fusion.backends.triton import backend
from gpuaug.fusion.params.table import make_table

SIZES = [(37, 52), (64, 40), (21, 48)]
NARROW = [(1, 30), (37, 1), (1, 1), (20, 20)]
DENSE = photographs(2, 3, 41, 53)


def crop(**options):
    return K.RandomResizedCrop((12, 14), **options)


RAGGED = {
    "crop": ([crop()], SIZES, {}),
    "crop, narrow": ([crop()], NARROW, {}),
    "crop, views": ([crop(), K.RandomHorizontalFlip()], SIZES, {"views": 2}),
    "nearest": ([crop(resample="nearest")], SIZES, {}),
    "flips, pad and a slice": ([K.RandomVerticalFlip(), K.PadTo((70, 60)), K.RandomCrop((14, 15))], SIZES, {}),
    "padded grey": ([K.RandomCrop((40, 45), padding=5, pad_if_needed=True, fill=0.3)], SIZES, {}),
    "rotated": ([K.RandomRotation(30.0), K.CenterCrop(14)], SIZES, {}),
    "short side": ([K.Resize(18), K.CenterCrop(14)], SIZES, {}),
    "jittered": ([crop(), K.ColorJitter(0.4, 0.4, 0.4, 0.1), K.RandomGrayscale(p=0.5)], SIZES, {"views": 2}),
    "smooth": ([crop(align_corners=False)], SIZES, {"antialias": True}),
    "smooth, cubic": ([crop(resample="bicubic")], SIZES, {"antialias": True, "views": 2}),
    "smooth, narrow": ([crop()], NARROW, {"antialias": True}),
    "smooth, jittered": ([crop(), K.ColorJitter(0.4, 0.4, 0.4)], SIZES, {"antialias": True}),
}
SAME = {
    "crop, views": ([crop(), K.RandomVerticalFlip()], {"views": 3}),
    "colours, views": ([K.RandomSolarize()], {"views": 2}),
    "blur first, views": ([K.RandomGaussianBlur((3, 3), (0.5, 1.5)), crop()], {"views": 2}),
    "jitter, views": ([crop(), K.ColorJitter(0.4, 0.4, 0.4)], {"views": 2}),
    "smooth": ([crop()], {"antialias": True}),
    "smooth, cubic": ([crop(resample="bicubic")], {"antialias": True}),
    "smooth, padded": ([K.PadTo((60, 70), pad_value=0.25), K.Resize((15, 12)), K.CenterCrop((9, 9))], {"antialias": True}),
    "smooth, reflected": ([K.RandomCrop((40, 50), padding=6, padding_mode="reflect"), K.Resize((15, 12))], {"antialias": True}),
}


def through_both(modules, images, dtype, memory_format, **options):
    """What torch makes of the images, and what the kernels do."""
    augment = gpuaug.fuse(modules, ragged=not isinstance(images, torch.Tensor), **options)
    size = size_of(images)
    segment = augment._segments.at(0, size, masks=False)
    assert segment.stop == len(augment._ops), f"left to Kornia: {segment.eager}"
    plan = segment.plan
    table = torch.cat(
        [
            make_table(plan, size, dict(zip(segment.ops, view._drawn, strict=True)), images.device, points=False)
            for view in augment._draw(size, 3).views
        ]
    )
    return run(plan, images, table), backend.run(plan, images, table, dtype, memory_format)


def disagreement(modules, images, dtype, memory_format, **options):
    """How far they are from one another, in words, or an empty string."""
    expected, got = through_both(modules, images, dtype, memory_format, **options)
    if got.shape != expected.shape or not got.is_contiguous(memory_format=memory_format):
        return f"shape {tuple(got.shape)}, strides {got.stride()}"
    off = (got.float() - expected).abs().max().item()
    return "" if off < (2e-5 if dtype == torch.float32 else 2e-3) else f"off by {off:.1e}"


def main(chosen):
    failed = []

    def check(name, modules, images, kind, dtype, **options):
        if not chosen or name in chosen:
            form = torch.contiguous_format if dtype == torch.float32 else torch.channels_last
            said = disagreement(modules, images, dtype, form, **options)
            if said:
                failed.append(f"{name}, {kind} to {dtype}: {said}")

    for name, (modules, sizes, options) in RAGGED.items():
        for layout, dtype in (("chw", torch.float32), ("hwc", torch.float16)):
            check(name, modules, pack(images_of(sizes), layout), f"ragged, {layout}", dtype, **options)
    check("one channel", [crop()], pack(images_of(SIZES, 1), "hwc"), "ragged", torch.float32, antialias=True)
    for name, (modules, options) in SAME.items():
        check(name, modules, DENSE, "bytes", torch.float32, **options)
    check("two channels", SAME["smooth, padded"][0], DENSE[:, :2].float() / 255, "floats", torch.float16, antialias=True)
    return failed


if __name__ == "__main__":
    # The interpreter takes its time for every block.
    backend.TILES = dict.fromkeys(backend.TILES, (16, 16))
    backend.COLOUR_TILE = (16, 16)
    backend.REST_BLOCK = 256
    failed = main(sys.argv[1:])
    sys.exit("\n".join(failed) or 0)
