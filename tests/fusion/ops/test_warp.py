"""Rotations, affine and perspective maps: matrices and large images. ``test_random_pipelines`` compares their pixels."""

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support import internals
from support.comparison.replay import assert_replays, both, left_to_kornia, photographs
from support.comparison.values import assert_values
from support.ops.op_cases import table

import gpuaug
from gpuaug.fusion.lower.image_types import ImageTypes
from gpuaug.fusion.lower.kornia import LOWERED
from gpuaug.fusion.lower.pipeline import lower
from gpuaug.fusion.lower.tree import leaves
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.geometry import WarpOp

WARPS = table(lambda case: case.settings if issubclass(LOWERED[case.kind], WarpOp) else {})


def made(name, **options):
    case, settings = WARPS[name]
    return case.kind(**settings, **options)


LARGE = ("rotation", "quarters", "affine, two scales", "shear", "translate", "perspective")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in LARGE)) for name in WARPS])
def test_warps_of_large_images_are_close_to_kornia_in_float64(name):
    images = photographs(1, 1, 256, 200)
    pipeline = K.AugmentationSequential(made(name, p=1.0)).double()
    augment = gpuaug.fuse(K.AugmentationSequential(made(name, p=1.0)))
    draws = augment.draw(images.shape, seed=1)
    expected = pipeline(images.double() / 255, params=draws.as_kornia())
    torch.testing.assert_close(augment(images, draws=draws).double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", WARPS)
def test_warp_matrices_equal_kornia(name):
    module = made(name, p=0.7)
    (leaf,) = leaves(lower(module, ImageTypes(torch.uint8)))
    size = Size(6, 3, 40, 56)
    drawn = internals.drawn(gpuaug.fuse(module).draw((6, 3, 40, 56), seed=3))[0]
    images = torch.zeros(6, 3, 40, 56, dtype=torch.float64)
    params = {key: value.double() if value.is_floating_point() else value for key, value in leaf.op.params(drawn, size).items()}
    expected = module.generate_transformation_matrix(images, params, module.flags)
    np.testing.assert_allclose(leaf.op.matrix(drawn, size), expected.numpy(), atol=1e-5)
    product = leaf.op.matrix(drawn, size) @ leaf.op.inverse(drawn, size)
    np.testing.assert_allclose(product, np.tile(np.eye(3), (6, 1, 1)), atol=1e-9)


def test_each_warp_takes_one_pass_with_the_flips_and_crops_around_it():
    one = gpuaug.fuse([K.RandomHorizontalFlip(), K.RandomRotation(30.0, p=1.0), K.RandomVerticalFlip(), K.CenterCrop(20)])
    assert [line.launches for line in one.explain((2, 3, 32, 48)).lines] == [1]
    images = photographs(4)
    two = K.AugmentationSequential(K.RandomAffine(20.0, p=1.0), K.RandomHorizontalFlip(), K.RandomPerspective(0.3, p=1.0))
    assert_replays(two, images, atol=1e-4)
    assert len(gpuaug.fuse(two).explain(images.shape).lines) == 2
    flipped = K.AugmentationSequential(
        K.RandomHorizontalFlip(), K.RandomRotation(30.0, p=1.0), K.RandomVerticalFlip(), K.CenterCrop(20)
    )
    assert_replays(flipped, images, atol=5e-5)


@pytest.mark.parametrize("name", WARPS)
@left_to_kornia
def test_warps_of_images_one_pixel_wide_are_left_to_kornia(name):
    augment = gpuaug.fuse(made(name, p=1.0))
    assert "one pixel wide or high" in str(augment.explain((2, 3, 1, 8)))
    expected, got = both(K.AugmentationSequential(made(name, p=1.0)), photographs(2, 3, 1, 8))
    assert_values(got.isnan(), expected.isnan())
    assert_values(got.nan_to_num(), expected.nan_to_num())
