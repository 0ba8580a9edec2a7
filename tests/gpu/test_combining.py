"""Several images in one on a GPU: as on a CPU, in few launches, and without a synchronisation."""

import pytest
import torch
from support.batches.samples import batch_of
from support.comparison.values import assert_values
from support.gpu.launches import kernels_of, synchronisation_is_error
from torchvision.transforms import v2

import gpuaug
from gpuaug import CopyPaste, MixUpBoxes, Mosaic

pytestmark = pytest.mark.gpu

KEYS = ["input", "targets"]
PIPELINES = {
    "mosaic": [Mosaic(640, p=0.7)],
    "mosaic, copy-paste, mixup": [Mosaic(320, p=0.8), CopyPaste(), MixUpBoxes(p=0.7)],
    "mixup": [MixUpBoxes()],
    "copy-paste": [CopyPaste(p=0.7)],
    "mixup, mosaic": [MixUpBoxes(p=0.5), Mosaic(99)],
}
FORMS = [("chw", torch.uint8), ("hwc", torch.uint8), ("tensors", torch.uint8), ("tensors", torch.float16)]


def batch_for(transforms, layout, dtype, batch=5, masks=torch.bool):
    count = 1
    for transform in transforms:
        count *= transform.op_class.count
    return batch_of(1, batch, count, layout, dtype, masks=masks)


def on_gpu(images, targets):
    records = [
        [
            {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in record.items()}
            for record in records
        ]
        for records in targets
    ]
    return [member.to("cuda") for member in images], records


@pytest.mark.parametrize(("layout", "dtype"), FORMS)
@pytest.mark.parametrize("name", PIPELINES)
def test_kernels_equal_the_cpu(name, layout, dtype):
    transforms = PIPELINES[name]
    images, targets = batch_for(transforms, layout, dtype)
    resize = [] if "mosaic" in name or layout == "tensors" else [v2.Resize((40, 40))]
    augment = gpuaug.fuse([*transforms, *resize, v2.RandomHorizontalFlip(0.0)], ragged=bool(resize), dtype=torch.float32)
    torch.manual_seed(3)
    wanted, wanted_targets = augment(images, targets, data_keys=KEYS)
    torch.manual_seed(3)
    got, got_targets = augment(*on_gpu(images, targets), data_keys=KEYS)
    assert_values(got.cpu(), wanted, atol=1.1 / 255 if dtype is torch.uint8 else 2e-3)
    for record, other in zip(got_targets, wanted_targets, strict=True):
        assert record.keys() == other.keys()
        for key, value in other.items():
            if isinstance(value, torch.Tensor):
                assert_values(record[key].cpu().float(), value.float(), atol=1e-3 if value.is_floating_point() else 0)


@pytest.mark.parametrize("masks", [torch.uint8, torch.int32, torch.int64, torch.bool])
def test_masks_of_every_dtype_equal_the_cpu(masks):
    transforms = PIPELINES["mosaic, copy-paste, mixup"]
    images, targets = batch_for(transforms, "chw", torch.uint8, masks=masks)
    augment = gpuaug.fuse(transforms)
    torch.manual_seed(3)
    _, wanted = augment(images, targets, data_keys=KEYS)
    torch.manual_seed(3)
    _, got = augment(*on_gpu(images, targets), data_keys=KEYS)
    for record, other in zip(got, wanted, strict=True):
        assert_values(record["masks"].cpu().int(), other["masks"].int())


def test_a_mosaic_is_one_launch_without_a_wait():
    transforms = PIPELINES["mosaic"]
    images, targets = on_gpu(*batch_for(transforms, "hwc", torch.uint8, masks=None))
    augment = gpuaug.fuse([*transforms, v2.RandomHorizontalFlip()])
    augment(images, targets, data_keys=KEYS)
    with synchronisation_is_error():
        augment(images, targets, data_keys=KEYS)
    names = kernels_of(lambda: augment(images, targets, data_keys=KEYS))
    assert names.count("tiles_kernel") == 1
