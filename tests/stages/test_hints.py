"""What a user is told whose transform does not fit the batches."""

import re
import warnings

import kornia.augmentation as K
import pytest
import torch
from contract.sources import failure, streamed
from torch import nn
from torchvision.transforms import v2

from gpuaug import ArgumentTypeError, GpuAugWarning, TransformStage, collate_ragged, fuse

IMAGES = torch.rand(2, 3, 8, 8)
FLIP = K.RandomHorizontalFlip(p=1.0)


def target():
    return {"boxes": torch.tensor([[1.0, 1, 4, 4]]), "masks": torch.ones(1, 8, 8), "labels": torch.tensor([1])}


def told(batch, *stages):
    """What is said of the first two batches of two epochs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = streamed([batch] * 2, *stages)
        for _ in range(2):
            list(loader)
    return [str(warning.message) for warning in caught if warning.category is GpuAugWarning]


MOVING = {
    "Kornia": (FLIP, "RandomHorizontalFlip", "gpuaug.fuse(transform)"),
    "Kornia's container": (K.AugmentationSequential(K.ColorJitter(), FLIP), "RandomHorizontalFlip", "gpuaug.fuse(transform)"),
    "nn.Sequential": (nn.Sequential(K.CenterCrop(4), nn.Identity()), "CenterCrop", "gpuaug.fuse(transform)"),
    "fused": (fuse([K.RandomRotation(9.0), FLIP]), "RandomHorizontalFlip, RandomRotation", "transform"),
    "torchvision": (v2.Compose([v2.ToDtype(torch.float32), v2.Resize(4)]), "Resize", "gpuaug.fuse(transform)"),
    "fused torchvision": (fuse(v2.RandomHorizontalFlip()), "RandomHorizontalFlip", "transform"),
}


@pytest.mark.parametrize(("transform", "names", "line"), MOVING.values(), ids=MOVING)
def test_targets_that_a_transform_leaves_behind_are_told_once(transform, names, line):
    assert told((IMAGES, [target(), target()]), transform) == [
        f"boxes, masks beside images must be handed to the transform that moves these, got {names} with images alone: the "
        f"others stay where they were. Pass gpuaug.TransformStage({line}, on={{0: 'input', 1: 'targets'}}). If that is meant, "
        "pass lambda images: transform(images)."
    ]


BESIDE = {
    "dicts in a mapping": (
        {"image": IMAGES, "labels": (target(), target())},
        "image",
        {"image": "input", "labels": "targets"},
    ),
    "a mask in a mapping": ({"image": IMAGES, "mask": torch.ones(2, 1, 8, 8)}, "image", {"image": "input", "mask": "mask"}),
    "one of two": (
        {"image": IMAGES, "mask": torch.ones(2, 1, 8, 8), "keypoints": torch.rand(2, 5, 2)},
        {"image": "input", "mask": "mask"},
        {"image": "input", "mask": "mask", "keypoints": "keypoints"},
    ),
}


@pytest.mark.parametrize(("batch", "on", "wanted"), BESIDE.values(), ids=BESIDE)
def test_line_to_type_names_the_members_of_the_batch(batch, on, wanted):
    [text] = told(batch, TransformStage(fuse(FLIP), on=on))
    assert f"Pass gpuaug.TransformStage(transform, on={wanted})." in text
    assert not told(batch, TransformStage(fuse(FLIP), on=wanted)), "the line is wrong"


PAIR = (IMAGES, [target(), target()])
RIGHT = {
    "handed over": (PAIR, TransformStage(fuse(FLIP), on={0: "input", 1: "targets"})),
    "colours alone": (PAIR, K.AugmentationSequential(K.ColorJitter(0.2), K.Normalize(torch.zeros(3), torch.ones(3)))),
    "a function, as the text says": (PAIR, lambda images: FLIP(images)),
    "the source is kept": (PAIR, TransformStage(FLIP, into=2)),
    "the whole batch": (PAIR, TransformStage(v2.Resize(4), on=None)),
    "labels": ((IMAGES, torch.arange(2)), FLIP),
    "a mask of patches": ({"image": IMAGES, "mask": torch.ones(2, 16)}, TransformStage(FLIP, on="image")),
    "a tensor": (IMAGES, FLIP),
}


@pytest.mark.parametrize(("batch", "stage"), RIGHT.values(), ids=RIGHT)
def test_batches_without_targets_left_behind_are_not_told_of(batch, stage):
    assert told(batch, stage) == []


# Images of different sizes

SIZES = collate_ragged([torch.zeros(3, 5, 6, dtype=torch.uint8), torch.zeros(3, 7, 6, dtype=torch.uint8)])


@pytest.mark.parametrize(
    "transform", [K.Resize((4, 4)), K.AugmentationSequential(K.Resize(4)), v2.Resize(4), v2.Compose([v2.Resize(4)])]
)
def test_transforms_of_libraries_refuse_images_of_different_sizes(transform):
    loader = streamed([SIZES] * 2, transform)
    for _ in range(2):
        arrived, error = failure(loader)
        assert not arrived
        assert type(error) is ArgumentTypeError
        assert str(error) == (
            f"transform must take images of different sizes, which the batch has, got {type(transform).__name__}, which takes "
            "a tensor (B, C, H, W). Pass gpuaug.fuse(transform, ragged=True), whose first crop or resize gives them one size."
        )
    assert next(iter(streamed([SIZES], fuse(K.Resize((4, 4)), ragged=True)))).shape == (2, 3, 4, 4)


def test_first_module_of_a_sequence_refuses_images_of_different_sizes():
    with pytest.raises(ArgumentTypeError, match=r"got Resize, which takes a tensor \(B, C, H, W\)"):
        list(streamed([SIZES], nn.Sequential(v2.Resize(4))))


NOTE = "The transform was given a gpuaug.Ragged, images of different sizes. gpuaug.fuse(…, ragged=True) gives them one: put it"


@pytest.mark.parametrize("transform", [nn.Conv2d(3, 1, 1), lambda images: images / 255])
def test_errors_about_images_of_different_sizes_say_what_to_do(transform):
    _, error = failure(streamed([SIZES], transform))
    assert any(re.match(re.escape(NOTE), note) for note in error.__notes__)


def test_transforms_that_take_images_of_different_sizes_are_called():
    assert [len(batch) for batch in streamed([SIZES], lambda images: list(images))] == [2]
