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


@pytest.mark.parametrize(("name", "key"), sweep([*PIPELINES, "another pipeline's module between"], BOXES.layouts))
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
    "between", [[], [K.RandomAffine(0.0, resample="bicubic", p=1.0)], [K.RandomMedianBlur(p=1.0)]], ids=["", "moves", "colours"]
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


INTEGERS = [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.int64]
REAL = [torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", INTEGERS + REAL, ids=str)
@pytest.mark.parametrize("key", BOXES.layouts)
@left_to_kornia
def test_boxes_of_every_type_are_those_of_float32(key, dtype):
    rows = {"bbox_xywh": [[5, 6, 15, 20], [5, 6, 0, 20], [30, 6, 1, 20]]}.get(
        key, [[5, 6, 20, 25], [20, 6, 5, 25], [30, 6, 30, 25]]
    )
    boxes, valid = torch.tensor([rows]).float(), torch.ones(1, 3, dtype=torch.bool)
    if key == "bbox":
        boxes = boxes[..., [0, 1, 2, 1, 2, 3, 0, 3]].unflatten(-1, (4, 2))
    for resample in ("bilinear", "bicubic"):  # Kornia runs the second
        augment = gpuaug.fuse([K.RandomHorizontalFlip(p=0.0), K.RandomAffine(0.0, p=1.0, resample=resample)])
        _, expected, expected_valid = augment(photographs(1), boxes, valid, data_keys=["input", key, "valid"])
        _, got, got_valid = augment(photographs(1), boxes.to(dtype), valid, data_keys=["input", key, "valid"])
        assert_values(got_valid, expected_valid)
        torch.testing.assert_close(got.float(), expected, atol=0.2 if dtype in REAL[:2] else 1e-4, rtol=0)
        assert key == "bbox" or expected_valid.tolist() == [[True, False, True]]


def test_boxes_outside_the_image_are_not_valid():
    boxes = torch.tensor([[[-10, 4, -1, 9], [-10, 4, 0, 9], [48, 4, 60, 9], [47, 4, 60, 9]]])
    valid = torch.ones(1, 4, dtype=torch.bool)
    _, made, got = gpuaug.fuse(K.RandomInvert())(photographs(1), boxes, valid, data_keys=["input", "bbox_xyxy", "valid"])
    assert got[0].tolist() == [False, True, False, True]
    assert_values(made[0, got[0]], torch.tensor([[0.0, 4.0, 0.0, 9.0], [47.0, 4.0, 47.0, 9.0]]))


def test_boxes_and_valid_of_one_image_without_a_batch_axis():
    boxes, valid = torch.tensor([[4.0, 4.0, 9.0, 9.0]] * 2), torch.tensor([True, False])
    for images in (photographs(1), photographs(1)[0]):
        _, made, got = gpuaug.fuse(K.RandomInvert())(images, boxes, valid, data_keys=["input", "bbox_xyxy", "valid"])
        assert got.tolist() == [True, False]
        assert_values(made, boxes)


def test_masks_and_keypoints_beside_valid_boxes():
    augment, images, valid = gpuaug.fuse(PIPELINES["rotation"](1.0)), photographs(5), drawn_valid()
    masks, points = torch.ones(5, 4, 32, 48), annotations("keypoints")
    draws = augment.draw(images.shape, seed=1)
    keys = ["input", "mask", "keypoints", "bbox_xyxy", "valid"]
    got = augment(images, masks, points, annotations("bbox_xyxy"), valid, data_keys=keys, draws=draws)
    expected = augment(images, masks, points, data_keys=keys[:3], draws=draws)
    for one, other in zip(got[:3], expected, strict=True):
        assert_values(one, other)


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
