"""Crops drawn on the device, against those that the host draws: pipelines, sizes and both parameter tables."""

import kornia.augmentation as K
import numpy as np
import torch
from support.comparison.replay import photographs
from torchvision.transforms import v2

import gpuaug
from gpuaug.fusion.backends.triton import backend
from gpuaug.fusion.ops.base import ANY_SIDES, Size
from gpuaug.fusion.table.on_device import DeviceCropTables, device_crop
from gpuaug.fusion.table.rows import UpcomingBatches, draws_of_plan_ops, make_table

CROPS = {
    "as they come": K.RandomResizedCrop((12, 14)),
    "pixels as squares": K.RandomResizedCrop((12, 14), align_corners=False),
    "nearest": K.RandomResizedCrop((12, 14), resample="nearest"),
    "larger than most": K.RandomResizedCrop((12, 14), scale=(0.6, 1.6)),
    "none fits": K.RandomResizedCrop((12, 14), scale=(1.5, 2.0)),
    "long": K.RandomResizedCrop((12, 14), scale=(0.5, 1.0), ratio=(0.2, 7.0)),
    "wide": K.RandomResizedCrop((12, 14), ratio=(3.0, 5.0)),
    "high": K.RandomResizedCrop((12, 14), ratio=(0.2, 0.3)),
    "one pixel": K.RandomResizedCrop((1, 14)),
    "torchvision's": v2.RandomResizedCrop((12, 14)),
    "torchvision's, long": v2.RandomResizedCrop((12, 14), scale=(0.5, 1.0), ratio=(0.2, 7.0)),
    "torchvision's, wide": v2.RandomResizedCrop((12, 14), ratio=(3.0, 5.0), antialias=False),
}
SIZE = (12, 14)
BEHIND = {
    "a skipped crop in a pass of its own": lambda: K.RandomResizedCrop(SIZE, p=0.5),
    "a skipped crop in the same pass": lambda: K.RandomCrop(SIZE, padding=3, fill=0.5, p=0.5),
    "policies": lambda: v2.Compose([v2.RandAugment(), v2.AutoAugment(), v2.ToDtype(torch.float32, scale=True)]),
    "drawn sizes in a pass of their own": lambda: v2.Compose([v2.RandomResize(9, 30), v2.RandomCrop(SIZE, pad_if_needed=True)]),
}
"""What may stand behind a crop that the device fits."""

SKIPPED = {
    "as they come": {},
    "pixels as squares": {"align_corners": False},
    "nearest": {"resample": "nearest"},
    "smooth": {"antialias": True},
    "smooth, cubic": {"resample": "bicubic", "antialias": True},
}
SAMPLES = 100


def some_sizes(samples=SAMPLES):
    """Heights and widths, usual and extreme, (samples, 2)."""
    rng = np.random.default_rng(0)
    sides = rng.integers(100, 800, (samples, 2))
    sides[: samples // 4] = 2 ** rng.uniform(0, 14, (samples // 4, 2))
    sides[0], sides[1], sides[2] = 1, (1, 5000), (5000, 1)
    return sides


SEEDS = (3, 2**63, 5, 6)
"""Seeds of two batches of two views."""


def planned_crop(crop, sizes, *, masks, behind=()):
    """(pipeline that begins with the crop, size of its batches, plan)."""
    others = [*behind, K.RandomHorizontalFlip(), K.ColorJitter(0.4, 0.4, 0.4), K.RandomRotation(30.0)]
    height, _ = crop.size if isinstance(crop, v2.Transform) else crop.flags["size"]
    augment = gpuaug.fuse([crop, *others[: None if height > 1 else -1]], ragged=True)
    size = Size(len(sizes), 3, sizes[:, 0], sizes[:, 1])
    return augment, size, augment._program().segments.at(0, size, masks=masks).plan


def rows_made_ahead(plan, samples, device, *, points=True):
    """The rows of two batches of two views, but for where their crops lie."""
    size = Size(samples, 3, *ANY_SIDES)
    return DeviceCropTables(UpcomingBatches(plan, size, SEEDS, 2, device, points), device_crop(plan))


def device_tables(crop, sizes, device, *, points=False, masks=False, behind=()):
    """Parameter tables of both batches, made on the device. The second is asked for first, and twice."""
    _, size, plan = planned_crop(crop, sizes, masks=masks, behind=behind)
    tables = rows_made_ahead(plan, len(sizes), device, points=points)
    places = torch.from_numpy(np.column_stack([np.zeros(len(sizes)), sizes]).astype(np.int64)).to(device)
    return torch.cat([tables.table(index, size, places) for index in (1, 0, 1)])[2 * len(sizes) :]


def fault_of_shared_tables(device):
    """What is wrong with a table asked for twice, as by two threads, for images of other sizes, or with that of no images."""
    sizes = some_sizes(8)
    _, size, plan = planned_crop(CROPS["as they come"], sizes, masks=False)
    tables = rows_made_ahead(plan, 8, device)
    columns = np.column_stack([np.zeros(8), sizes]).astype(np.int64)
    places, others = torch.from_numpy(columns).to(device), torch.from_numpy(columns[::-1].copy()).to(device)
    first = tables.table(0, size, places)
    kept = first.clone()
    second = tables.table(0, size, others)
    if not torch.equal(first, kept):
        return "a table changed after it was handed out"
    none = rows_made_ahead(plan, 0, device).table(1, size, places[:0])
    if none.shape != (0, plan.width + 9):
        return f"no rows of shape {tuple(none.shape)}"
    return (
        ""
        if torch.equal(tables.table(0, size, places), kept) and not torch.equal(second, kept)
        else "other rows the second time"
    )


def disagreement(crop, sizes, device, *, points=False, masks=False, behind=()):
    """How the device's tables differ from the host's, or an empty string. Numbers must be equal; matrices may be rounded."""
    augment, size, plan = planned_crop(crop, sizes, masks=masks, behind=behind)
    drawn = [draws_of_plan_ops(augment._program().ops, augment._program()._draw_view(size, seed)._drawn) for seed in SEEDS]
    expected = torch.cat([make_table(plan, size, each, device, has_points=points) for each in drawn])
    got = device_tables(crop, sizes, device, points=points, masks=masks, behind=behind)
    if got.shape != expected.shape:
        return f"shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    off = got[:, : plan.width] != expected[:, : plan.width]
    if off.any():
        return f"{int(off.any(1).sum())} of {len(off)} rows, columns {off.any(0).nonzero().flatten().tolist()}"
    by = ((got - expected).abs() / expected.abs().clamp(min=1)).max().item()
    return "" if by < 2e-6 else f"matrices by {by:.1e}"


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
