"""Mixes and soft labels on a GPU: equal to torch, in the launches that are promised, without a synchronisation."""

import kornia.augmentation as K
import pytest
import torch
from support.comparison.replay import photographs
from support.gpu.launches import kernels_of

import gpuaug
from gpuaug.fusion.backends.triton.mix import soft_labels
from gpuaug.fusion.ops.mix import SoftLabels

pytestmark = pytest.mark.gpu

KEYS = ["input", "class"]


def pipeline():
    mixes = K.RandomMixUpV2(), K.RandomCutMixV2(use_correct_lambda=True)
    return K.AugmentationSequential(
        K.RandomHorizontalFlip(), K.AugmentationSequential(*mixes, random_apply=1), K.Normalize(0.5, 0.25)
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("classes", [2, 1000, 21841])
def test_labels_kernel_equals_torch(classes, dtype):
    generator = torch.Generator().manual_seed(0)
    table = torch.zeros(64, 12)
    table[:, 3] = torch.randperm(64, generator=generator)
    table[:, 4] = torch.rand(64, generator=generator) * (torch.rand(64, generator=generator) < 0.8)
    # Some are no class: what is written for them must stay in their rows.
    values = torch.randint(-100, classes + 100, (64,), generator=generator).to(dtype).cuda()
    soft = SoftLabels(classes, 0.1)
    for rows in (None, table[:, 2:].cuda()):
        torch.testing.assert_close(soft_labels(soft, values, rows), soft.convert(values, rows), atol=1e-6, rtol=0)
        shares = torch.rand(64, classes, generator=generator)
        shares = (shares if dtype.is_floating_point else shares > 0.9).to(dtype).cuda()
        tolerance = 1e-3 if dtype is torch.float16 else 1e-6
        torch.testing.assert_close(soft_labels(soft, shares, rows), soft.convert(shares, rows), atol=tolerance, rtol=0)


@pytest.mark.parametrize("pick", ["batch", "sample"])
def test_mixed_images_and_labels_equal_the_cpu(pick):
    augment, images, labels = gpuaug.fuse(pipeline(), pick=pick, num_classes=10), photographs(16), torch.arange(16) % 10
    for seed in range(6):
        draws = augment.draw(images.shape, seed=seed)
        expected = augment(images, labels, data_keys=KEYS, draws=draws)
        got = augment(images.cuda(), labels.cuda(), data_keys=KEYS, draws=draws)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=0)


def test_mix_call_is_three_launches_without_synchronisation():
    augment = gpuaug.fuse(pipeline(), pick="sample", num_classes=1000, label_smoothing=0.1)
    images, labels = photographs(16).cuda(), torch.full((16,), -100, device="cuda")
    augment(images, labels, data_keys=KEYS)
    kernels = kernels_of(lambda: augment(images, labels, data_keys=KEYS))
    assert kernels == ["gather_kernel", "labels_kernel", "mix_kernel"]
