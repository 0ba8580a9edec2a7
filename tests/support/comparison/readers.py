"""Ragged batches, views and antialiasing through the torch executor and through the kernels."""

from dataclasses import replace

import kornia.augmentation as K
import torch
from support.batches.ragged import cut, overwritten
from support.comparison.replay import photographs
from torchvision.transforms import v2

import gpuaug
from gpuaug import FixedSizeCrop
from gpuaug.fusion.backends.readers import size_of
from gpuaug.fusion.backends.torch_backend import run
from gpuaug.fusion.backends.triton import backend
from gpuaug.fusion.table.rows import draws_of_plan_ops, make_table

SIZES = [(37, 52), (64, 40), (21, 48)]
NARROW = [(1, 30), (37, 1), (1, 1), (20, 20)]
DENSE = photographs(2, 3, 41, 53)


def crop(**options):
    return K.RandomResizedCrop((12, 14), **options)


RESIZE = v2.Resize((12, 17), antialias=False)
RESIZED = v2.RandomResizedCrop(20, antialias=False)

RAGGED = {
    "crop": ([crop()], SIZES, {}),
    "crop, narrow": ([crop()], NARROW, {}),
    "crop, views": ([crop(), K.RandomHorizontalFlip()], SIZES, {"views": 2}),
    "nearest": ([crop(resample="nearest")], SIZES, {}),
    "flips, pad and a slice": ([K.RandomVerticalFlip(), K.PadTo((70, 60)), K.RandomCrop((14, 15))], SIZES, {}),
    "padded grey": ([K.RandomCrop((40, 45), padding=5, pad_if_needed=True, fill=0.3)], SIZES, {}),
    "rotated": ([K.RandomRotation(30.0), K.CenterCrop(14)], SIZES, {}),
    "short side": ([K.Resize(18), K.CenterCrop(14)], SIZES, {}),
    "drawn size": ([v2.RandomResize(12, 40), v2.RandomCrop(20, pad_if_needed=True, fill=0.25)], SIZES, {"views": 2}),
    "fixed size": ([v2.RandomResize(12, 40, antialias=False), FixedSizeCrop((20, 30), fill=64)], SIZES, {}),
    "one of two crops": ([v2.RandomChoice([RESIZED, v2.RandomCrop(20, pad_if_needed=True, fill=64)])], SIZES, {"views": 2}),
    "a resize or a crop of one, narrow": ([v2.RandomChoice([RESIZE, v2.Compose([RESIZED, RESIZE])])], NARROW, {}),
    "jittered": ([crop(), K.ColorJitter(0.4, 0.4, 0.4, 0.1), K.RandomGrayscale(p=0.5)], SIZES, {"views": 2}),
    "colours first": ([v2.RandomPhotometricDistort(p=1.0), v2.RandomHorizontalFlip(), crop()], SIZES, {"views": 2}),
    "contrast first, narrow": ([v2.ColorJitter(contrast=0.5), v2.RandomInvert(), crop()], NARROW, {}),
    "two contrasts first": ([v2.ColorJitter(contrast=0.5), v2.ColorJitter(0.5, 0.5), v2.CenterCrop((30, 60))], SIZES, {}),
    "turned first": ([K.RandomRotation(30.0), K.RandomInvert(), crop()], SIZES, {}),
    "two drawn sizes": ([v2.RandomResize(12, 30), v2.RandomZoomOut(0.5, (1.0, 1.5)), v2.CenterCrop(20)], SIZES, {}),
    "smooth": ([crop(align_corners=False)], SIZES, {"antialias": True}),
    "smooth, cubic": ([crop(resample="bicubic")], SIZES, {"antialias": True, "views": 2}),
    "smooth, turned": ([crop(), K.RandomVerticalFlip(p=0.5)], SIZES, {"antialias": True}),
    "smooth, narrow": ([crop()], NARROW, {"antialias": True}),
    "smooth, jittered": ([crop(), K.ColorJitter(0.4, 0.4, 0.4)], SIZES, {"antialias": True}),
}
SAME = {
    "crop, views": ([crop(), K.RandomVerticalFlip()], {"views": 3}),
    "colours, views": ([K.RandomSolarize()], {"views": 2}),
    "blur first, views": ([K.RandomGaussianBlur((3, 3), (0.5, 1.5)), crop()], {"views": 2}),
    "jitter, views": ([crop(), K.ColorJitter(0.4, 0.4, 0.4)], {"views": 2}),
    "ten crops": ([v2.TenCrop((9, 12)), v2.RandomInvert()], {}),
    "smooth": ([crop()], {"antialias": True}),
    "smooth, larger": ([K.CenterCrop(9), K.Resize((14, 13))], {"antialias": True}),
    "smooth, much smaller": ([K.CenterCrop((20, 12)), K.Resize((3, 4))], {"antialias": True}),
    "smooth, cubic": ([crop(resample="bicubic")], {"antialias": True}),
    "smooth, padded": ([K.PadTo((60, 70), pad_value=0.25), K.Resize((30, 28)), K.CenterCrop((9, 9))], {"antialias": True}),
    "smooth, reflected": ([K.RandomCrop((40, 50), padding=6, padding_mode="reflect"), K.Resize((15, 12))], {"antialias": True}),
}


def through_both(modules, images, dtype, memory_format, frames=0, **options):
    """(torch executor's output, kernels' output) for the same draws. ``frames``: number of frames of a clip.

    Outside the windows of crops, kernels get no pixels, or others.
    """
    ragged = not isinstance(images, torch.Tensor)
    program = gpuaug.fuse(modules, ragged=ragged, **options)._program(images.data.dtype if ragged else torch.uint8)
    size = size_of(images)
    if frames:
        size = replace(size, batch=size.batch // frames, frames=frames)
    segment = program.segments.at(0, size, masks=False)
    plan = segment.plan
    assert segment.stop == len(program.ops), f"left to Kornia: {segment.fallback}"
    drawn = [draws_of_plan_ops(segment.all_ops, view._drawn) for view in program.draw(size, 3).views]
    table = torch.cat([make_table(plan, size, each, images.device, has_points=False) for each in drawn])
    canvases = plan.canvases(size, drawn)
    expected = run(plan, images, table, canvases)
    if size.ragged and (windows := program.windows(size, 3)) is not None:
        images = cut(images, windows.table) if images.shapes.layout == "hwc" else overwritten(images, windows.table)
    return expected, backend.run(plan, images, table, dtype, memory_format, canvases)


def disagreement(modules, images, dtype, memory_format, **options):
    """How the kernels' output differs from torch's, or an empty string."""
    expected, got = through_both(modules, images, dtype, memory_format, **options)
    if got.shape != expected.shape or not got.is_contiguous(memory_format=memory_format):
        return f"shape {tuple(got.shape)}, strides {got.stride()}"
    off = (got.float() - expected).abs().max().item()
    return "" if off < (2e-5 if dtype == torch.float32 else 2e-3) else f"off by {off:.1e}"
