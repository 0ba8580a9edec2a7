"""``weights.transforms()``, the preprocessing that a pretrained classifier of torchvision's brings along."""

import pytest
import torch
from support.comparison.replay import photographs
from support.comparison.values import assert_values
from torchvision import models
from torchvision.transforms import v2
from torchvision.transforms._presets import ImageClassification, ObjectDetection, SemanticSegmentation

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


OF_IMAGES = {
    "segmentation": (models.segmentation.FCN_ResNet50_Weights.DEFAULT, []),
    "detection": (models.detection.FasterRCNN_ResNet50_FPN_Weights.DEFAULT, [v2.RandomHorizontalFlip(1.0)]),
}


@pytest.mark.parametrize("name", OF_IMAGES)
def test_preprocessing_of_other_models_equals_theirs(name):
    weights, before = OF_IMAGES[name]
    theirs = v2.Compose([*before, weights.transforms()])
    images = photographs(2, 3, 241, 260)
    augment = gpuaug.fuse(theirs)
    torch.testing.assert_close(augment(images / 255), theirs(images / 255), atol=5e-5, rtol=0)
    assert [line.reason for line in augment.explain(images.shape).lines] == [""]


def presets():
    """The distinct presets for images of all weights of torchvision, and those with settings that no weights have."""
    of_weights = [weights.transforms() for name in models.list_models() for weights in models.get_model_weights(name)]
    unusual = [
        SemanticSegmentation(resize_size=None),
        SemanticSegmentation(resize_size=None, interpolation=v2.InterpolationMode.NEAREST),
        ImageClassification(crop_size=30, resize_size=40, antialias=False),
        v2.Compose([ObjectDetection()]),
    ]
    classes = (ImageClassification, ObjectDetection, SemanticSegmentation)
    distinct = {str(vars(preset)): preset for preset in of_weights if isinstance(preset, classes)}
    return [*distinct.values(), *unusual]


@pytest.mark.parametrize("theirs", presets(), ids=lambda preset: " ".join(repr(preset).split()))
@pytest.mark.every(3)
def test_every_preset_for_images_equals_torchvision(theirs):
    images = photographs(1, 3, 30, 41) / 255
    got = gpuaug.fuse(theirs)(images)
    torch.testing.assert_close(got, theirs(images), atol=2e-4, rtol=0)
    assert got.dtype == gpuaug.fuse(theirs)(photographs(1, 3, 30, 41)).dtype == torch.float32


def test_preprocessing_of_weights_takes_images_of_every_size():
    theirs = models.ResNet50_Weights.IMAGENET1K_V2.transforms()
    images = [photographs(1, 3, height, width)[0] for height, width in [(240, 250), (300, 233), (232, 400)]]
    got = gpuaug.fuse(theirs, ragged=True)(gpuaug.collate_ragged(images))
    expected = torch.stack([theirs(image / 255) for image in images])
    torch.testing.assert_close(got, expected, atol=5e-6, rtol=0)
