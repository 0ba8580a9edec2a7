"""The kernels that combine images and masks, against torch."""

from functools import partial

import torch
from support.batches.samples import batch_of
from torchvision.transforms import v2

import gpuaug
from gpuaug import CopyPaste, MixUpBoxes, Mosaic
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.triton import backend as triton

PIPELINES = {
    "mosaic": [Mosaic(64, p=0.7)],
    "mosaic, copy-paste, mixup": [Mosaic(50, p=0.8), CopyPaste(), MixUpBoxes(p=0.7)],
    "mixup": [MixUpBoxes()],
    "copy-paste": [CopyPaste(p=0.7)],
    "mixup, mosaic": [MixUpBoxes(p=0.5), Mosaic(31)],
}
FORMS = [("chw", torch.uint8), ("hwc", torch.uint8), ("tensors", torch.uint8), ("tensors", torch.float16)]
FORMS_OF_EVERY = [*FORMS, ("tensors", torch.uint16), ("tensors", torch.int16), ("tensors", torch.float32)]
MASKS = torch.bool, torch.uint8, torch.int32, torch.int64


def results_of_both(call, seed):
    """Results of a call with the same draws: from torch, and from the kernels."""
    in_torch = dispatch._tiles_backend
    results = []
    for backend in (in_torch, lambda device: triton):
        dispatch._tiles_backend = backend
        torch.manual_seed(seed)
        results.append(call())
    dispatch._tiles_backend = in_torch
    return results


def failures(*, every):
    """Pipelines, layouts and dtypes for which the kernels differ from torch."""
    rows = [torch.randint(0, 256, (3, 3, 1, 40), dtype=torch.uint8) for _ in range(4)]
    wanted, got = results_of_both(lambda: gpuaug.fuse(Mosaic(48))(rows).int(), seed=0)
    if (got - wanted).abs().max() > 1:
        yield "images of one row differ, which only become narrower"
    for number, (name, transforms) in enumerate(PIPELINES.items()):
        for layout, dtype in FORMS_OF_EVERY if every else [FORMS[(number + 1) % 4]]:
            count = 1
            for transform in transforms:
                count *= transform.op_class.count
            images, targets = batch_of(number, 3, count, layout, dtype, masks=MASKS[number % 4])
            resize = [] if "mosaic" in name or layout == "tensors" else [v2.Resize((40, 40))]
            augment = gpuaug.fuse(
                [*transforms, v2.RandomHorizontalFlip(0.0), *resize], ragged=bool(resize), dtype=torch.float32
            )
            (wanted, wanted_targets), (got, got_targets) = results_of_both(
                partial(augment, images, targets, data_keys=["input", "targets"]), seed=number
            )
            if not torch.allclose(got, wanted, atol=1.1 / 255 if dtype is torch.uint8 else 1e-3):
                yield f"{name}, {layout}, {dtype}: images differ by {(got - wanted).abs().max()}"
            for sample, (record, other) in enumerate(zip(got_targets, wanted_targets, strict=True)):
                for key, value in record.items():
                    if isinstance(value, torch.Tensor) and not torch.equal(value, other[key]):
                        yield f"{name}, {layout}, {dtype}: {key} of sample {sample} differ"
