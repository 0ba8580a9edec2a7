"""torchvision's presets for detection and segmentation: what runs fused as it is, and what is said of the rest."""

import pytest
import torch
from support.comparison.replay import photographs
from support.comparison.values import assert_values
from torchvision import models, tv_tensors
from torchvision.transforms import v2
from torchvision.transforms._presets import ImageClassification, ObjectDetection, SemanticSegmentation

import gpuaug

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
KEYS = ["input", "targets"]
GREY = {tv_tensors.Image: (123.0, 117.0, 104.0), "others": 0}
ENDING = [
    v2.ToDtype(torch.float32, scale=True),
    v2.ConvertBoundingBoxFormat("XYXY"),
    v2.SanitizeBoundingBoxes(),
    v2.ToPureTensor(),
]
"""Of all presets for detection."""


def sample(index):
    """An image and its target, as a dataset of torchvision's gives them."""
    height, width = 40 + 7 * index, 70 - 5 * index
    boxes = torch.tensor([[4.0, 5.0, 20.0, 18.0], [10.0, 12.0, 16.0, 20.0]])
    target = {
        "boxes": tv_tensors.BoundingBoxes(boxes, format="XYWH", canvas_size=(height, width)),
        "labels": torch.tensor([1, 2]),
        "masks": tv_tensors.Mask(torch.ones(2, height, width, dtype=torch.uint8)),
    }
    return tv_tensors.Image(photographs(1, 3, height, width, seed=index)[0]), target


def from_dataset(transforms):
    """A ragged batch of samples that the dataset has transformed, and their targets."""
    torch.manual_seed(0)
    images, targets = zip(*(v2.Compose(transforms)(*sample(index)) for index in range(4)), strict=True)
    return gpuaug.collate_ragged([image.as_subclass(torch.Tensor) for image in images]), list(targets)


@pytest.mark.parametrize(
    ("before", "side"),
    [([v2.RandomPhotometricDistort(), v2.RandomZoomOut(fill=GREY), v2.RandomIoUCrop()], 30), ([v2.RandomIoUCrop()], 32)],
    ids=["ssd", "ssdlite"],
)
def test_rest_of_a_preset_runs_fused_behind_the_dataset(before, side):
    """``before``: what of the preset is for the dataset."""
    augment = gpuaug.fuse([v2.Resize((side, side)), v2.RandomHorizontalFlip(0.5), *ENDING], ragged=True)
    images, targets = augment(*from_dataset(before), data_keys=KEYS)
    assert type(images) is torch.Tensor
    assert images.dtype is torch.float32
    assert images.shape == (4, 3, side, side)
    assert images.max() < 1 + 1e-6  # weights of a resize sum to 1 but for rounding
    for target in targets:
        assert {type(value) for value in target.values()} == {torch.Tensor}
        assert (target["boxes"][:, 2:] >= target["boxes"][:, :2]).all()  # corners
        assert target["masks"].shape == (len(target["labels"]), side, side)
    kept = gpuaug.sanitize(targets)
    assert sum(len(each["labels"]) for each in kept) > 2


# Transforms of weights


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
    # They resize bytes as floats, and round once.
    rounded = torch.stack([theirs(image) for image in images])
    assert_values(augment(images), rounded, atol=5e-6, share=1e-4)
    assert [line.launches for line in augment.explain(images.shape).lines] == [1]


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
    augment = gpuaug.fuse(theirs)
    got = augment(images)
    torch.testing.assert_close(got, theirs(images), atol=2e-4, rtol=0)
    assert got.dtype == augment(photographs(1, 3, 30, 41)).dtype == torch.float32
    assert [line.reason for line in augment.explain(images.shape).lines] == [""]


def test_preprocessing_of_weights_takes_images_of_every_size():
    theirs = models.ResNet50_Weights.IMAGENET1K_V2.transforms()
    images = [photographs(1, 3, height, width)[0] for height, width in [(240, 250), (300, 233), (232, 400)]]
    got = gpuaug.fuse(theirs, ragged=True)(gpuaug.collate_ragged(images))
    assert_values(got, torch.stack([theirs(image) for image in images]), atol=5e-6, share=1e-4)
