"""Pipelines drawn at random, out of all ops that are lowered, against Kornia on the same draws."""

import pickle

import kornia.augmentation as K
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.comparison.replay import as_kornia_takes_them, left_to_kornia, photographs
from support.comparison.values import assert_values, difference
from support.ops.random_pipelines import FEW, FRACTION, cases, cases_of

import gpuaug
from gpuaug.fusion.lower.kornia import LOWERED

# Pipelines are made by chance, and images of all sizes.
pytestmark = left_to_kornia


def check(case, *, pickled=True):
    """Compare the results of one case. ``pickled``: compare the results of the pickled pipeline and draws, too."""
    pipeline = K.AugmentationSequential(*(each.make() for each in case.steps))
    images = case.images()
    before = images.clone()
    augment = gpuaug.fuse(pipeline, memory_format=case.out)
    try:
        draws = augment.draw(images.shape, seed=case.seed)
    except Exception as refused:  # what is left to Kornia is drawn by Kornia, which takes not every size
        event(f"not drawn: {type(refused).__name__}")
        with pytest.raises(type(refused)):
            pipeline.forward_parameters(images.shape)
        return
    try:
        expected = pipeline(as_kornia_takes_them(images), params=draws.as_kornia())
    except Exception as refused:
        event(f"refused: {type(refused).__name__}")
        if len(images):  # some of Kornia's modules take no empty batch
            with pytest.raises(type(refused)):
                augment(images, draws=draws)
        return
    got = augment(images, draws=draws)
    assert (got.shape, got.dtype) == (expected.shape, torch.float32)
    assert got.is_contiguous(memory_format=case.out)
    assert_values(images, before)
    assert_values(augment(images, draws=draws), got)
    if pickled:
        again = pickle.loads(pickle.dumps(augment))
        assert_values(again(images, draws=pickle.loads(pickle.dumps(draws))), got)
    error, jumped = case.tolerance()
    event(f"left to Kornia: {'left to Kornia' in str(augment.explain(images.shape))}")
    event(f"jumped: {jumped}, wrong: {bool(difference(got, expected, atol=error, equal_nan=True))}")
    share = max(FEW / max(got.numel(), 1), FRACTION) if jumped else 0
    # NaN never jumps.
    assert_values(got.isnan(), expected.isnan(), draws=draws)
    assert_values(got, expected, atol=error, share=share, equal_nan=True, draws=draws)


@pytest.mark.parametrize("kind", LOWERED, ids=lambda kind: kind.__name__)
@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_each_op_equals_kornia_alone_and_behind_an_interpolation(kind, data):
    for number, case in enumerate(data.draw(cases_of(kind))):
        check(case, pickled=number == 0)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cases())
def test_random_pipelines_equal_kornia(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, derandomize=True)
@given(cases())
def test_many_random_pipelines_equal_kornia(case):
    check(case)


@pytest.mark.parametrize("size", [(8, 8), (7, 11), (6, 2)])
def test_rotation90_with_nearest_equals_kornia(size):
    pipeline = K.AugmentationSequential(K.RandomRotation90((-3, 3), resample="nearest"))
    augment, images = gpuaug.fuse(pipeline), photographs(16, 3, *size)
    draws = augment.draw(images.shape, seed=0)
    assert_values(augment(images, draws=draws), pipeline(as_kornia_takes_them(images), params=draws.as_kornia()))
