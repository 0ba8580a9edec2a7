"""Pipelines of torchvision's reference training and of the papers, as their users write them: nothing of them is left."""

import pytest
import torch
from support.comparison.replay import photographs
from support.comparison.torchvision_replay import assert_replays
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode

import gpuaug

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TO_FLOAT = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
END = [v2.Normalize(MEAN, STD), v2.ToPureTensor()]


def one_view_of_dino(side, area, blurred, solarized):
    return [
        v2.RandomResizedCrop(side, area, interpolation=InterpolationMode.BICUBIC),
        v2.RandomHorizontalFlip(),
        v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
        v2.RandomGrayscale(p=0.2),
        v2.RandomApply([v2.GaussianBlur(9, (0.1, 2.0))], p=blurred),
        v2.RandomSolarize(128, p=solarized),
        *TO_FLOAT,
        *END,
    ]


PRESETS = {
    "classification": ([v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), *TO_FLOAT, *END, v2.RandomErasing(0.1)], [1]),
    "classification, evaluated": ([v2.Resize(36), v2.CenterCrop(32), *TO_FLOAT, *END], [1]),
    "CIFAR": ([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), *TO_FLOAT, *END], [1]),
    "SimCLR": (
        [
            v2.RandomResizedCrop(32),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
            v2.RandomGrayscale(p=0.2),
            v2.GaussianBlur(9, (0.1, 2.0)),
            *TO_FLOAT,
        ],
        [2, 1],
    ),
    "DINO, first": (one_view_of_dino(32, (0.4, 1.0), 1.0, 0.0), [2, 1]),
    "DINO, second": (one_view_of_dino(32, (0.4, 1.0), 0.1, 0.2), [2, 1]),
    "DINO, small": (one_view_of_dino(16, (0.05, 0.4), 0.5, 0.0), [2, 1]),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_fused_whole_and_equal_torchvision(name, recwarn):
    transforms, launches = PRESETS[name]
    augment = gpuaug.fuse(v2.Compose(transforms))
    images = photographs(6, 3, 40, 56)
    augment(images)
    assert not recwarn
    assert [line.launches for line in augment.explain(images.shape).lines] == launches
    # As floats, which torchvision rounds nowhere; then the thresholds of bytes are floats, too.
    if not any(isinstance(each, v2.RandomSolarize) for each in transforms):
        assert_replays([each for each in transforms if each not in TO_FLOAT], images / 255, atol=2e-4)


@pytest.mark.parametrize("name", ["SimCLR", "DINO, first"])
def test_each_sample_and_each_view_draws_for_itself(name):
    image = photographs(1, 3, 40, 56)
    got = gpuaug.fuse(v2.Compose(PRESETS[name][0]), views=2)(image.expand(8, -1, -1, -1))
    assert got.shape == (16, 3, 32, 32)
    assert len({tuple(view.flatten().tolist()) for view in got}) == 16
