"""Blurs, sharpness, equalize, CLAHE, auto contrast and JPEG, against Kornia on the same draws."""

import kornia.augmentation as K
import pytest
import torch
from support.comparison.replay import assert_replays, both, left_to_kornia, photographs
from support.comparison.values import assert_values

import gpuaug

FILTERS = {
    "blur": K.RandomGaussianBlur((7, 7), (0.1, 2.0), p=1.0),
    "blur, wide": K.RandomGaussianBlur((23, 23), (0.1, 2.0), p=1.0),
    "blur, constant": K.RandomGaussianBlur(5, (0.5, 3.0), border_type="constant", p=1.0),
    "box blur": K.RandomBoxBlur((3, 11), p=1.0),
    "box blur, one pass": K.RandomBoxBlur((5, 7), "constant", normalized=False, p=1.0),
    "median, wide": K.RandomMedianBlur(5, same_on_batch=True, p=1.0),
    "motion blur, ties": K.RandomMotionBlur(9, (-30.0, -30.0), 1.0, border_type="reflect", p=1.0),
    "sharpness": K.RandomSharpness((0.0, 3.0), p=1.0),
}


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (K.RandomGaussianBlur(5, (0.0, 3.0)), "sigma may be 0"),
        (K.RandomBoxBlur((4, 3)), "kernel_size=(4, 3) has an even side"),
        (K.RandomBoxBlur((3, 3, 3)), "RandomBoxBlur with other attributes"),
        (K.RandomGaussianBlur((3, 3, 5), (0.1, 1.0)), "RandomGaussianBlur with other attributes"),
        (K.RandomMedianBlur((3, 5)), "kernel_size=(3, 5) is neither 3x3 nor 5x5"),
        (K.RandomMotionBlur((1, 5), 9.0, 0.5), "a drawn kernel_size may be below 3"),
        (K.RandomMotionBlur(3, 9.0, 0.5, resample="bicubic"), 'resample="bicubic"'),
        (K.RandomClahe(slow_and_differentiable=True), "slow_and_differentiable=True"),
        (K.RandomClahe(grid_size=[8, 8]), "grid_size=[8, 8] is no pair of counts"),
        (K.RandomClahe(grid_size=(8, 0)), "grid_size=(8, 0) is no pair of counts"),
    ],
)
@left_to_kornia
def test_filter_settings_left_to_kornia(module, reason):
    assert f"left to Kornia: {reason}" in str(gpuaug.fuse(module).explain())


@pytest.mark.parametrize("name", ["blur, wide", "box blur", "median, wide", "motion blur, ties", "sharpness"])
@left_to_kornia
def test_images_too_small_to_filter_raise_kornias_error(name):
    with pytest.raises(ValueError, match="cannot filter an image this small"):
        gpuaug.fuse(FILTERS[name])(photographs(2, 3, 2, 2))


@pytest.mark.parametrize("size", [(8, 32), (32, 8)])
@left_to_kornia
def test_images_with_no_more_pixels_than_clahe_has_tiles_raise_kornias_error(size):
    augment = gpuaug.fuse(K.RandomClahe(p=1.0))
    assert "left to Kornia: grid_size=(8, 8) needs more pixels than tiles on both axes" in str(augment.explain((2, 3, *size)))
    with pytest.raises(ValueError, match="The smallest image this grid admits is \\(9, 9\\)"):
        augment(photographs(2, 3, *size))


@pytest.mark.parametrize("name", ["blur", "blur, wide", "blur, constant", "box blur, one pass", "median, wide", "sharpness"])
def test_filters_of_nan_and_out_of_range_values_equal_kornia(name):
    images = photographs(3, dtype=torch.float32) * 2 - 0.5
    images[0, 1, 9, 20] = images[1, 2, 0, 0] = torch.nan
    assert_replays(K.AugmentationSequential(FILTERS[name]), images, atol=5e-6, equal_nan=True)


def test_motion_blur_ignores_nan_with_a_weight_of_0():
    """Kornia multiplies NaN by 0."""
    images = photographs(3, dtype=torch.float32)
    images[:, :, 8] = torch.nan
    augment = gpuaug.fuse(K.RandomMotionBlur(5, (0.0, 0.0), 1.0, p=1.0))
    draws = augment.draw(images.shape, seed=0)
    got, clean = augment(images, draws=draws), augment(images.nan_to_num(0), draws=draws)
    assert_values(got.nan_to_num(9), torch.where(images.isnan(), 9, clean))


@pytest.mark.parametrize("same_on_batch", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_jpeg_equals_kornia(p, same_on_batch):
    pipeline = K.AugmentationSequential(K.RandomJPEG((1.0, 100.0), same_on_batch, p))
    for seed, shape in enumerate([(5, 3, 32, 48), (2, 3, 37, 21), (1, 3, 1, 1), (0, 3, 32, 32)]):
        images = photographs(*shape, dtype=torch.float32 if seed else torch.uint8)
        assert_replays(pipeline, images * 3 - 1 if seed else images, seed)


LEVELS = {
    "equalize": lambda p: K.RandomEqualize(p=p),
    "equalize, same": lambda p: K.RandomEqualize(p=p, same_on_batch=True),
    "auto contrast": lambda p: K.RandomAutoContrast(p=p),
    "auto contrast, unclipped": lambda p: K.RandomAutoContrast(clip_output=False, p=p),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", LEVELS)
def test_equalize_and_auto_contrast_equal_kornia(name, p, dtype):
    # The second has fewer pixels than it takes for a step, so its levels stay.
    for seed, shape in enumerate([(5, 3, 32, 48), (2, 1, 15, 16), (0, 3, 32, 32)]):
        images = photographs(*shape, dtype=dtype)
        if len(images):
            images[0, 0] = images[0, 0, 0, 0]  # a channel of one level
        assert_replays(K.AugmentationSequential(LEVELS[name](p)), images, seed)


@pytest.mark.parametrize("limit", [0.0, 0.02, 1.0, 3.0, 40.0])
@pytest.mark.parametrize("size", [(9, 10), (61, 64)])
def test_tables_of_clahe_equal_kornia_bit_for_bit(size, limit):
    """One tile has nothing to interpolate. A limit shares out few pixels or many, evenly or with a rest."""
    images = photographs(4, 3, *size, dtype=torch.float32)
    images[0, 0], images[1] = 0.3, images[1] * 3 - 1
    assert_replays(K.AugmentationSequential(K.RandomClahe((limit, limit), grid_size=(1, 1), p=1.0)), images)


@pytest.mark.parametrize("name", LEVELS)
def test_values_out_of_range_equal_kornia(name):
    images = photographs(3, dtype=torch.float32) * 2 - 0.5
    assert_replays(K.AugmentationSequential(LEVELS[name](1.0)), images)


def test_nan_makes_its_channel_nan_under_auto_contrast_as_in_kornia():
    images = photographs(3, dtype=torch.float32)
    images[1, 2, 3, 4] = torch.nan
    expected, got = both(K.AugmentationSequential(K.RandomAutoContrast(p=1.0)), images)
    assert_values(got.nan_to_num(9), expected.nan_to_num(9))
    assert got.isnan().sum() == got[1, 2].numel()


@pytest.mark.parametrize("module", [K.RandomEqualize(p=1.0), K.RandomClahe(p=1.0)])
def test_nan_stays_where_it_is_under_equalize_and_clahe(module):
    """Kornia stops with an error."""
    images = photographs(3, dtype=torch.float32)
    images[1, 2, 3, 4] = torch.nan
    got, clean = gpuaug.fuse(module)(images), gpuaug.fuse(module)(images.nan_to_num(0))
    assert got[1, 2, 3, 4].isnan()
    assert_values(got.nan_to_num(9), torch.where(images.isnan(), 9, clean))
