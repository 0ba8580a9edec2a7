"""Errors of ``Mosaic``, ``MixUpBoxes`` and ``CopyPaste`` about images, targets, draws and settings."""

import math

import numpy as np
import pytest
import torch
from support.files.encoded import encoded
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug import CopyPaste, GpuAugError, MixUpBoxes, Mosaic

KEYS = ["input", "targets"]


def paired(*, ragged=False, boxes="xyxy", **targets):
    """Run a ``CopyPaste`` on two samples of two images. ``targets``: keys of all target dicts."""
    images = FOUR[:2]
    if ragged:
        images = [gpuaug.collate_ragged([torch.zeros(3, size, 8, dtype=torch.uint8) for size in (8, 9)]) for _ in range(2)]
    sizes = [(9 if ragged and sample else 8, 8) for sample in range(2)]
    records = [[{"boxes": torch.zeros(0, 4), "masks": torch.zeros(0, *size), **targets} for _ in range(2)] for size in sizes]
    augment = gpuaug.fuse([CopyPaste(), *([v2.Resize((8, 8))] if ragged else [])], ragged=ragged, boxes=boxes)
    return augment(images, records, data_keys=KEYS)


FOUR = [torch.zeros(2, 3, 8, 8) for _ in range(4)]
MOSAIC = gpuaug.fuse([Mosaic(8)])
RECORD = {"boxes": torch.zeros(0, 4)}


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda: MOSAIC(FOUR[:3]), "images must be a list of 4 batches for Mosaic_0, got 3 per sample. Return"),
        (
            lambda: gpuaug.fuse([Mosaic(8), MixUpBoxes()])(FOUR),
            "list of 8 batches for Mosaic_0, MixUpBoxes_1, got 4",
        ),
        (
            lambda: MOSAIC([*FOUR[:3], FOUR[3].clone().requires_grad_()]),
            "images must not require gradients, got images that do",
        ),
        (lambda: MOSAIC(FOUR[0]), "4 batches for Mosaic_0, one per image of a sample, got Tensor"),
        (
            lambda: MOSAIC(FOUR, [[RECORD] * 4, [RECORD] * 3], data_keys=KEYS),
            "targets of sample 1 must be 4 dicts, one per image, got 3. Return as many dicts as images from the data set.",
        ),
        (
            lambda: MOSAIC(FOUR, [[RECORD] * 4], data_keys=KEYS),
            "data set, with one dict per image.",
        ),
        (
            lambda: MOSAIC(FOUR, [RECORD, [RECORD] * 4], data_keys=KEYS),
            "Return one list of dicts per sample from the data set.",
        ),
        (
            lambda: MOSAIC(FOUR, FOUR[0], data_keys=["input", "mask"]),
            "Target dicts have room for masks, keypoints and labels.",
        ),
        (
            lambda: MOSAIC(*FOUR),
            "inputs must be one list of batches of images, and target dicts if there are any, for",
        ),
        (lambda: MOSAIC([*FOUR[:3], FOUR[0][:, :1]]), "images of a sample must have one type"),
        (lambda: gpuaug.fuse([v2.RandomInvert(), Mosaic(8)]), "got it after RandomInvert_0"),
        (lambda: gpuaug.fuse([v2.RandomApply([Mosaic(8)])]), "outside of containers"),
        (lambda: gpuaug.fuse([Mosaic(8)], views=2), "views must be 1"),
        (lambda: gpuaug.fuse([CopyPaste()])(FOUR[:2]), "must hold 'targets' for CopyPaste_0"),
        (lambda: gpuaug.fuse([CopyPaste()])(FOUR[:2], [[RECORD] * 2] * 2, data_keys=KEYS), "must have masks"),
        (lambda: Mosaic(8)([FOUR[0][0]] * 3), "a multiple, for Mosaic, got 3. Pass all images of a sample."),
        (lambda: MOSAIC([FOUR[0][None]] * 4), "batches (B, C, H, W) or ragged images for Mosaic_0"),
        (lambda: Mosaic(8, p="x"), "p must be a number, got 'x'. Pass the probability of the transform."),
        (lambda: Mosaic(8, fill=256), "fill must be in [0, 255], got 256. Pass a grey value of bytes."),
        (
            lambda: paired(masks=torch.zeros(8, 8)),
            "masks must be (n, H, W), one mask per object, for CopyPaste_0, got a mask (H, W)",
        ),
        (lambda: paired(map=tv_tensors.Mask(torch.zeros(8, 8))), "map must be (n, H, W), one mask per object"),
        (
            lambda: paired(ragged=True, boxes="cxcywh_share"),
            "must be in pixels for CopyPaste_0 where images differ",
        ),
        (
            lambda: paired(labels=torch.tensor(1)),
            "labels of image 0 of sample 0 must have one entry per box, 0, got a single value. Return boxes and labels of "
            "all objects from the data set.",
        ),
    ],
)
def test_errors(run, text):
    with pytest.raises(GpuAugError) as error:
        run()
    assert text in str(error.value)


@pytest.mark.parametrize(
    "transforms", [[Mosaic(8)], [Mosaic(8), MixUpBoxes()], [MixUpBoxes()], [CopyPaste(), Mosaic(8)]], ids=str
)
@pytest.mark.parametrize("difference", [-1, 1, 4])
def test_another_number_of_files_is_an_error_behind_a_decoder(transforms, difference):
    count = math.prod(4 if isinstance(transform, Mosaic) else 2 for transform in transforms)
    batch = {"image": gpuaug.collate_encoded([[encoded()] * (count + difference)] * 3)}
    augment = gpuaug.fuse([*transforms, v2.Resize((8, 8))], ragged=True)
    stages = [gpuaug.DecodeStage(), gpuaug.TransformStage(augment, on="image")]
    with pytest.raises(GpuAugError, match=rf"a list of {count} batches for .*, got {count + difference} per sample"):
        list(gpuaug.StreamedLoader([batch], stages, device="cpu"))


@pytest.mark.parametrize(("transform", "count"), [(Mosaic(8), 4), (MixUpBoxes(), 2), (CopyPaste(), 2)], ids=str)
def test_images_without_pixels_are_errors_at_every_position(transform, count):
    for position in range(count):
        for size in ("0x8", "8x0", "0x0"):
            sides = map(int, size.split("x"))
            images = [torch.zeros(2, 3, *(sides if index == position else (8, 8))) for index in range(count)]
            with pytest.raises(GpuAugError) as error:
                gpuaug.fuse(transform)(images)
            text = f"images must have pixels, got {size} for image {position} of sample 0. Leave it out of the dataset."
            assert str(error.value) == text


WRONG_DRAWS = [7, [1], {"Mosaic": 7}, *({"Mosaic": {"applies": 1.0, "y": 4.0, "x": x}} for x in (-1, 9, np.nan, "a", None))]


@pytest.mark.parametrize("draws", WRONG_DRAWS, ids=str)
def test_draws_that_the_module_does_not_draw_are_errors(draws):
    with pytest.raises(GpuAugError, match="draws must be "):
        Mosaic(8)([FOUR[0][0]] * 4, draws=draws)


def test_draws_of_a_larger_mosaic_are_an_error():
    numbers = gpuaug.fuse(Mosaic(64)).draw((1, 3, 8, 8)).of(0)
    with pytest.raises(GpuAugError, match="draws must be numbers from 0 to 8 for Mosaic, got "):
        Mosaic(8)([FOUR[0][0]] * 4, draws=numbers)


@pytest.mark.parametrize("targets", [7, "abcd", RECORD, [7] * 4, [[RECORD]] * 4], ids=str)
def test_targets_of_a_sample_that_are_no_list_of_dicts_are_errors(targets):
    with pytest.raises(GpuAugError, match=r"targets of sample 0 must be a list of 4 dicts, one per image, got"):
        Mosaic(8)([FOUR[0][0]] * 4, targets)
