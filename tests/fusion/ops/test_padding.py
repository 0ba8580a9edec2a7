"""Padding, crops, flips, resizes and quarter turns in any order: each counts from the image that the op before it made."""

import kornia.augmentation as K
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from support import internals
from support.batches.ragged import images_of, pack
from support.comparison.torchvision_replay import replayed, scaled
from support.comparison.values import assert_values
from support.ops.compositions import (
    FLIPS_AND_PADS,
    KORNIA_COMPOSITIONS,
    RAGGED_CROP,
    TORCHVISION,
    TORCHVISION_COMPOSITIONS,
    bytes_of,
)
from support.public.fuzzing import cases, outcome
from torchvision.transforms import v2

import gpuaug
from gpuaug.fusion.backends import readers

TO_FLOAT = v2.ToDtype(torch.float32, scale=True)

pytestmark = pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")


@pytest.fixture(autouse=True)
def within_the_image(monkeypatch):
    """Have reads fail that leave the image, also where they come upon another of its pixels."""
    planes, places = readers.DenseReader.__call__, readers.RaggedReader.__call__

    def checked(self, x, y):
        height = self._flat.shape[2] // self._width
        assert all((at >= 0).all() and (at < side).all() for at, side in ((x, self._width), (y, height)))
        return planes(self, x, y)

    def checked_places(self, x, y):
        width = self._line_stride // self._pixel_stride
        height = self._channel_stride[:, 0] // width
        assert all((at >= 0).all() and (at < side).all() for at, side in ((x, width), (y, height)))
        return places(self, x, y)

    monkeypatch.setattr(readers.DenseReader, "__call__", checked)
    monkeypatch.setattr(readers.RaggedReader, "__call__", checked_places)


def is_smooth(module):
    """Whether a module may interpolate."""
    return isinstance(module, v2.Resize | v2.RandomRotation | K.Resize | K.RandomRotation90)


def same(got, expected, modules):
    """Whether pixels are equal; within the tolerance of an interpolation where there is one."""
    torch.testing.assert_close(got, scaled(expected), atol=5e-5 if any(map(is_smooth, modules)) else 0, rtol=0)


def drawn(pipeline, images, seed):
    """(the pipeline fused, draws for the images); ``None`` if an op refuses the images, or is left to its library."""
    augment = gpuaug.fuse(pipeline)
    explained = outcome(augment.explain, images.shape)
    if isinstance(explained, Exception) or any(line.reason for line in explained.lines):
        event("left")
        return None
    event(f"{len(internals.program(augment).ops)} steps")
    return augment, augment.draw(images.shape, seed=seed)


@cases(40)
@given(TORCHVISION_COMPOSITIONS, st.booleans(), st.integers(0, 9))
def test_any_composition_equals_torchvision_step_by_step(modules, floats, seed):
    images = bytes_of().float() / 255 if floats else bytes_of()
    if (found := drawn([TO_FLOAT, *modules], images, seed)) is not None:
        augment, draws = found
        same(augment(images, draws=draws), replayed(draws, images.float() / (1 if floats else 255)), modules)


@cases(40)
@given(KORNIA_COMPOSITIONS, st.integers(0, 9))
def test_any_composition_equals_kornia_step_by_step(modules, seed):
    images, pipeline = bytes_of(), K.AugmentationSequential(*modules)
    if (found := drawn(pipeline, images, seed)) is not None:
        augment, draws = found
        expected = pipeline(images.float() / 255, params=draws.as_kornia())
        same(augment(images, draws=draws), expected, modules)


@cases(35)
@given(TORCHVISION_COMPOSITIONS | KORNIA_COMPOSITIONS, st.integers(0, 9))
def test_masks_take_the_pixels_that_images_take(modules, seed):
    images = bytes_of().float()
    exact = [v2.RandomHorizontalFlip(), *(module for module in modules if not is_smooth(module))]
    if (found := drawn(exact, images, seed)) is not None:
        augment, draws = found
        got, masks = augment(images, images.clone(), data_keys=["input", "mask"], draws=draws)
        assert_values(got, masks)


@cases(40)
@given(st.lists(FLIPS_AND_PADS, max_size=2), RAGGED_CROP, st.lists(TORCHVISION, max_size=3), st.integers(0, 9))
def test_images_of_every_size_are_padded_by_their_own(modules, crop, behind, seed):
    images = images_of([(12, 13), (9, 20), (17, 8)])
    augment = outcome(gpuaug.fuse, [TO_FLOAT, *modules, crop, *behind], ragged=True)
    batch = pack(images)
    draws = augment if isinstance(augment, Exception) else outcome(augment.draw, batch, seed=seed)
    explained = draws if isinstance(draws, Exception) else outcome(augment.explain, batch)
    if isinstance(explained, Exception) or any(line.reason for line in explained.lines):
        event("refused or left")
        return
    got = augment(batch, draws=draws)
    same(got, replayed(draws, [image.float() / 255 for image in images]), behind)
    event("equal")


def test_symmetric_padding_is_torchvisions_among_others():
    flip, pad = v2.RandomHorizontalFlip(1.0), v2.Pad(5, padding_mode="symmetric")
    images = bytes_of()
    for modules in ([pad, flip], [flip, v2.Pad(3, padding_mode="edge"), pad, v2.CenterCrop(9)], [pad, v2.Pad(2), flip, pad]):
        assert_values(gpuaug.fuse(modules)(images), v2.Compose(modules)(images))
