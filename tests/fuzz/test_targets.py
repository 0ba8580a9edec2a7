"""Targets of any values in every form stay in their sample, or are an error of gpuaug."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from support.comparison.replay import left_to_kornia
from support.ops.fuzzed_pipelines import COORDINATES, batches, fused
from support.ops.random_pipelines import MIXES
from support.ops.skipped import same_bits
from support.public.fuzzing import cases, outcome
from torchvision import tv_tensors

pytestmark = [pytest.mark.timeout(1800), left_to_kornia]

SHAPES = {"bbox": (2, 4, 2), "bbox_xyxy": (2, 4), "bbox_xywh": (2, 4), "keypoints": (2, 2), "mask": (1, None), "class": ()}
"""Data key → shape per image; ``None``: the size of the image."""


def tensors(draw, key, images):
    """Values of one target for all images, by which no two cases differ but in numbers."""
    shape = [part for each in SHAPES[key] for part in (images.shape[2:] if each is None else [each])]
    values = np.resize(draw(st.lists(COORDINATES, min_size=1, max_size=8)), (len(images), *shape)).astype(np.float32)
    made = torch.from_numpy(values)
    return made.nan_to_num(0, 0, 0).clamp(0, 9).long() if key == "class" else made


def records(key, values, form):
    """Targets in a form: one tensor, a list of dicts per image, or dicts with torchvision's classes."""
    if form == "tensor":
        return [key], [values]
    boxes = "bbox" if key == "bbox_xywh" else "boxes"
    name = {"keypoints": "keypoints", "mask": "masks", "class": "labels"}.get(key, boxes)
    dicts = [{name: each} for each in values]
    if form == "torchvision" and name in ("boxes", "bbox"):
        options = {"format": "XYWH" if name == "bbox" else "XYXY", "canvas_size": (9, 9)}
        dicts = [{name: tv_tensors.BoundingBoxes(each.view(-1, 4), **options)} for each in values]
    if form == "torchvision" and name == "masks":
        dicts = [{name: tv_tensors.Mask(each)} for each in values]
    return ["targets"], [dicts]


def leaves(value, sample):
    """The tensors of one sample in the results."""
    if isinstance(value, torch.Tensor):
        yield value[sample]
    elif isinstance(value, list):
        yield from value[sample].values() if isinstance(value[sample], dict) else [value[sample]]


@cases(25)
@given(batches(), st.sampled_from(sorted(SHAPES)), st.sampled_from(["tensor", "dicts", "torchvision"]), st.data())
def test_targets_of_any_values_stay_in_their_sample(batch, key, form, data):
    case, hostile = batch
    case = replace(case, steps=tuple(step for step in case.steps if step.kind not in MIXES) or case.steps)
    augment, images = fused(case), case.images()
    draws = outcome(augment.draw, images.shape, seed=case.seed)
    if isinstance(draws, Exception) or any(step.kind in MIXES for step in case.steps):
        return
    values = tensors(data.draw, key, images)
    others = values.clone()
    others[hostile] = tensors(data.draw, key, images[:1])[0]
    made = []
    for each in (values, others):
        keys, targets = records(key, each, form)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made.append(outcome(augment, images, *targets, data_keys=["input", *keys], draws=draws))
    event(f"{form}: {type(made[0]).__name__}")
    if any(isinstance(each, Exception) for each in made):
        return
    assert same_bits(made[0][0], made[1][0])
    for sample in set(range(len(images))) - {hostile}:
        for one, other in zip(leaves(made[0][1], sample), leaves(made[1][1], sample), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
