"""Padded boxes with a mask of those that there are, beside Kornia's keys."""

import re

import kornia.augmentation as K
import pytest
import torch
from support.batches.pairwise import sweep
from support.comparison.replay import left_to_kornia, photographs
from support.comparison.values import assert_values
from support.targets.detection import PIPELINES, annotations

import gpuaug
from gpuaug.core.targets import BOXES


def as_pixels(boxes, key):
    """The first and the last pixel, (B, N, 4), of upright boxes in a form of Kornia's."""
    if key == "bbox_xyxy":
        return boxes
    if key == "bbox_xywh":
        return torch.cat((boxes[..., :2], boxes[..., :2] + boxes[..., 2:] - 1), -1)
    return torch.cat((boxes[..., 0, :], boxes[..., 2, :]), -1)


def drawn_valid(seed=0):
    return torch.rand(5, 4, generator=torch.Generator().manual_seed(seed)) < 0.7


@pytest.mark.parametrize(("name", "key"), sweep([*PIPELINES, "another pipeline's module between"], BOXES.data_keys))
@pytest.mark.parametrize("p", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
@left_to_kornia
def test_boxes_with_valid_are_clamped_kornia_boxes(name, key, p):
    own = {
        "another pipeline's module between": [
            K.RandomRotation(20.0),
            K.RandomAffine(0.0, resample="bicubic", p=1.0),
            K.RandomCrop((20, 30)),
        ]
    }
    modules = own[name] if name in own else PIPELINES[name](p)
    augment, images, valid = gpuaug.fuse(K.AugmentationSequential(*modules)), photographs(5), drawn_valid()
    boxes, before = annotations(key), valid.clone()
    draws = augment.draw(images.shape, seed=3)
    made, free = augment(images, boxes, data_keys=["input", key], draws=draws)
    for keys, inputs in ((["input", key, "valid"], [images, boxes, valid]), (["valid", key, "input"], [valid, boxes, images])):
        got = dict(zip(keys, augment(*inputs, data_keys=keys, draws=draws), strict=True))
        frame = torch.tensor([made.shape[3], made.shape[2]] * 2)
        whole = as_pixels(free, key)
        torch.testing.assert_close(as_pixels(got[key], key), whole.clamp(min=0).minimum(frame - 1), atol=1e-4, rtol=0)
        sides = (whole[..., 2:] + 1).clamp(min=0).minimum(frame[:2]) - whole[..., :2].clamp(min=0).minimum(frame[:2])
        sure = ((sides - 1).abs() > 1e-3).all(-1)
        assert_values(got["valid"] & sure, (sides >= 1).all(-1) & valid & sure)
        assert got["valid"].any()
        assert not got["valid"].all()
    assert_values(valid, before)


@pytest.mark.parametrize(
    "between",
    [[], [K.RandomAffine(0.0, resample="bicubic", p=1.0)], [K.RandomMedianBlur(7, p=1.0)]],
    ids=["", "moves", "colours"],
)
@pytest.mark.parametrize("key", ["bbox_xyxy", "bbox_xywh"])
@left_to_kornia
def test_nan_and_empty_boxes_are_not_valid(key, between):
    nan = torch.nan
    rows = [[5, 5, 9, 9], [5, 5, 4, 9], [5, 5, 9, 3], [nan, 5, 9, 9]]
    if key == "bbox_xywh":
        rows = [[5, 5, 5, 5], [5, 5, 0, 5], [5, 5, 5, -1], [5, nan, 5, 5]]
    valid = torch.ones(1, 4, dtype=torch.bool)
    augment = gpuaug.fuse([K.RandomHorizontalFlip(p=1.0), *between])
    _, _, got = augment(photographs(1), torch.tensor([rows]), valid, data_keys=["input", key, "valid"])
    assert got[0].tolist() == [True, False, False, False]


def test_boxes_and_valid_of_one_image_without_a_batch_axis():
    boxes, valid = torch.tensor([[4.0, 4.0, 9.0, 9.0]] * 2), torch.tensor([True, False])
    for images in (photographs(1), photographs(1)[0]):
        _, made, got = gpuaug.fuse(K.RandomInvert())(images, boxes, valid, data_keys=["input", "bbox_xyxy", "valid"])
        assert got.tolist() == [True, False]
        assert_values(made, boxes)


TRUE = torch.ones(2, 3, dtype=torch.bool)
ONE_OF = "data_keys must hold one of bbox, bbox_xyxy, bbox_xywh together with 'valid', got ['input', {}]. Name 'valid' once"
BAD = [
    (["valid"], TRUE, ONE_OF.format("'valid'")),
    (["bbox_xyxy", "bbox_xyxy", "valid"], TRUE, ONE_OF.format("'bbox_xyxy', 'bbox_xyxy', 'valid'")),
    (["bbox_xyxy", "valid", "valid"], TRUE, ONE_OF.format("'bbox_xyxy', 'valid', 'valid'")),
    (
        ["bbox_xyxy", "valid"],
        TRUE[:, :2],
        "valid must be one bool for each box, torch.bool (2, 3), got torch.bool (2, 2). Mark",
    ),
    (["bbox_xyxy", "valid"], TRUE.float(), "valid must be one bool for each box, torch.bool (2, 3), got torch.float32 (2, 3)."),
    (["bbox_xyxy", "valid"], TRUE[[0, 1, 1]], "valid must hold one entry for each of the 2 images, got (3, 3). Pass one entry"),
]


@pytest.mark.parametrize(("keys", "valid", "text"), BAD)
def test_bad_valid_is_refused(keys, valid, text):
    values = [valid if key == "valid" else torch.ones(2, 3, 4) for key in keys]
    with pytest.raises(gpuaug.ArgumentError, match=re.escape(text)):
        gpuaug.fuse(K.RandomInvert())(photographs(2), *values, data_keys=["input", *keys])
