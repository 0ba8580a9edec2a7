"""Crops that run for some of the samples, through the kernels."""

import kornia.augmentation as K
import torch
from support.comparison.replay import photographs

import gpuaug
from gpuaug.fusion.backends.triton import backend
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.table.rows import make_table

SIZE = (12, 14)
SKIPPED = {
    "as they come": {},
    "pixels as squares": {"align_corners": False},
    "nearest": {"resample": "nearest"},
    "smooth": {"antialias": True},
    "smooth, cubic": {"resample": "bicubic", "antialias": True},
}


def through_kernels(module, images, masks, antialias):
    """(images, masks, apply mask) of a module that runs for some of the samples."""
    augment, size = gpuaug.fuse(module, antialias=antialias), Size(*images.shape)
    plan = augment._program().segments.at(0, size, masks=True).plan
    (drawn,) = augment._program()._draw_view(size, 1)._drawn
    table = make_table(plan, size, {augment._program().ops[0]: drawn}, images.device, has_points=False)
    made = backend.run(plan, images, table, torch.float32, torch.contiguous_format)
    return made, backend.run_mask(plan.passes[0], masks, table), torch.tensor(drawn["apply_mask"], device=images.device)


def fault_of_skipped_crops(name, dtype, device):
    """What is wrong with samples that a crop skips: they must be what kernels read that move nothing, to the last bit."""
    options = dict(SKIPPED[name])
    antialias = options.pop("antialias", False)
    images = photographs(4, 3, *SIZE, dtype=dtype).to(device)
    crop = K.RandomResizedCrop(SIZE, **options)
    crop.p = 0.5
    masks = (images[:, :1] * 100).to(torch.int16)
    made, made_masks, gate = through_kernels(crop, images, masks, antialias)
    whole, whole_masks, _ = through_kernels(K.CenterCrop(SIZE), images, masks, antialias)
    same = (made == whole).flatten(1).all(1), (made_masks == whole_masks).flatten(1).all(1)
    if not all(torch.equal(each, ~gate) for each in same) or gate.all() or not gate.any():
        return f"skipped {(~gate).tolist()}, images left alone {same[0].tolist()}, masks {same[1].tolist()}"
    return ""
