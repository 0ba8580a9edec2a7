"""Validity of the objects of combined images, at the limit of one tenth."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import gpuaug
from gpuaug import CopyPaste, Mosaic

KEYS = ["input", "targets"]

JUST_BELOW, JUST_ABOVE = [0, 1.9, 40, 22], [0, 2.1, 40, 22]
"""XYXY boxes with 0.0995 and 0.1005 of their area below row 20."""


def mosaic(run):
    """Target dict of a mosaic of which the first image has lost its 20 upper rows."""
    images = [torch.zeros(3, 40, 40, dtype=torch.uint8)] * 4
    targets = [{"boxes": torch.tensor(boxes).view(-1, 4)} for boxes in ([JUST_BELOW, JUST_ABOVE], [], [], [])]
    numbers = {"applies": True, "y": 20.0, "x": 40.0}
    if run == "eager":
        return Mosaic(80)(images, targets, draws={"Mosaic": numbers})[1]
    augment = gpuaug.fuse(Mosaic(80))
    draws = augment.draw((1, 3, 40, 40))
    draws = replace(draws, _drawn=({name: np.array([[number]]) for name, number in numbers.items()} | {"apply_mask": [True]},))
    return augment([image[None] for image in images], [targets], data_keys=KEYS, draws=draws)[1][0]


@pytest.mark.parametrize("run", ["eager", "fused"])
def test_boxes_of_a_mosaic_are_valid_from_one_tenth_of_their_area_on(run):
    target = mosaic(run)
    assert target["boxes"].tolist() == [[0, 0, 40, 2]] * 2
    assert target["valid"].tolist() == [False, True]


@pytest.mark.parametrize("run", ["eager", "fused"])
@pytest.mark.parametrize(("seen", "valid"), [(98, False), (99, False), (100, True), (101, True)])
def test_objects_under_pasted_ones_are_valid_from_one_tenth_of_their_pixels_on(run, seen, valid):
    images = torch.zeros(2, 1, 1, 1000, dtype=torch.uint8)
    masks = torch.ones(2, 1, 1, 1000, dtype=torch.bool)
    masks[1, :, :, :seen] = False
    targets = [{"boxes": torch.zeros(1, 4), "masks": mask} for mask in masks]
    if run == "eager":
        records = [CopyPaste()([*images], targets)[1] for _ in range(20)]
    else:
        batch = [image.expand(20, 1, 1, 1000) for image in images]
        records = gpuaug.fuse(CopyPaste())(batch, [targets] * 20, data_keys=KEYS)[1]
    pasted = [record for record in records if record["masks"][1].any()]
    assert 0 < len(pasted) < 20
    for record in pasted:
        assert record["masks"].sum((1, 2)).tolist() == [seen, 1000 - seen]
        assert record["valid"].tolist() == [valid, True]
        assert record["boxes"].tolist() == [[0, 0, seen * valid, valid], [seen, 0, 1000, 1]]
    assert all(record["valid"].tolist() == [True, False] for record in records if not record["masks"][1].any())
