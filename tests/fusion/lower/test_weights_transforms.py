"""``weights.transforms()``, the preprocessing that a pretrained classifier of torchvision's brings along."""

import pytest
import torch
from support.replay import photographs
from support.values import assert_values
from torchvision import models

import gpuaug

WEIGHTS = {
    "bilinear": models.ResNet50_Weights.IMAGENET1K_V2,
    "bicubic": models.Swin_T_Weights.IMAGENET1K_V1,
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_preprocessing_of_weights_equals_theirs(name):
    theirs = WEIGHTS[name].transforms()
    augment = gpuaug.fuse(theirs)
    images = photographs(2, 3, 241, 260)
    expected = torch.stack([theirs(image / 255) for image in images])
    torch.testing.assert_close(augment(images / 255), expected, atol=5e-6, rtol=0)
    # Of bytes they round what the resize makes to bytes, and a value is a few hundredths of a deviation.
    rounded = torch.stack([theirs(image) for image in images])
    assert_values(augment(images), rounded, atol=0.5 / 255 / 0.224 + 1e-5)
    assert [line.launches for line in augment.explain(images.shape).lines] == [1]


def test_preprocessing_of_weights_takes_images_of_every_size():
    theirs = models.ResNet50_Weights.IMAGENET1K_V2.transforms()
    images = [photographs(1, 3, height, width)[0] for height, width in [(240, 250), (300, 233), (232, 400)]]
    got = gpuaug.fuse(theirs, ragged=True)(gpuaug.collate_ragged(images))
    expected = torch.stack([theirs(image / 255) for image in images])
    torch.testing.assert_close(got, expected, atol=5e-6, rtol=0)
