"""What the comparisons of test_distributions.py can tell apart: distributions that are a little off."""

import kornia.augmentation as K
import numpy as np
import pytest
from support.comparison.kornia_draws import COUNT, SHAPE, columns, kornias, made, ours
from support.comparison.statistics import apart, distance, ranks, related, together_apart

OFF = {
    "rotation": (K.RandomRotation(45.0 * 1.1), "degrees"),
    "affine": (K.RandomAffine(30.0, (0.2, 0.1), (0.7, 1.3), (5.0, 21.5, -8.0, 3.0)), "shear_x"),
    "translate": (K.RandomTranslate((-0.2, 0.35), (-0.1, 0.1)), "translate_x"),
    "perspective": (K.RandomPerspective(0.55), "end_points 7"),
    "crop, padded": (K.RandomCrop((24, 40), padding=(3, 6, 2, 7)), "y"),
    "resized crop": (K.RandomResizedCrop((24, 40), scale=(0.17, 1.0)), "area"),
    "resized crop, misses": (K.RandomResizedCrop((24, 40), scale=(0.56, 1.0), ratio=(0.5, 3.0)), "width"),
    "erasing": (K.RandomErasing(scale=(0.02, 0.36)), "widths"),
    "jitter": (K.ColorJitter(0.44, (0.2, 3.0), 0.7, 0.1), "brightness_factor"),
    "blur": (K.RandomGaussianBlur((5, 3), (0.1, 2.2)), "sigma"),
    "posterize": (K.RandomPosterize(2.5), "bits_factor"),
    "hue": (K.RandomHue((-0.5, 0.38)), "hue_factor"),
    "cutmix": (K.RandomCutMixV2(cut_size=(0.1, 0.8), beta=0.85, use_correct_lambda=True), "width"),
}
"""Settings a tenth or so off those of the same name, and the parameter that tells."""


@pytest.mark.parametrize("name", OFF)
def test_parameters_a_tenth_off_are_told_apart(name):
    module, key = OFF[name]
    right = columns(kornias(made(name), SHAPE, 0), COUNT)[key]
    assert apart(right, columns(ours(made(name), SHAPE, 1), COUNT)[key]) < 1
    assert apart(right, columns(ours(module, SHAPE, 1), COUNT)[key]) > 1


def test_reused_numbers_and_wrong_apply_masks_are_told_apart():
    generator = np.random.default_rng(0)
    x, y, its_x, its_y = generator.random((4, COUNT))
    right = {"x": x, "y": y}
    assert together_apart(right, {"x": its_x, "y": its_y}) < 1
    for wrong in (its_x, 1 - its_x, ranks(its_x + 3 * its_y) / COUNT):
        assert distance(y, wrong) < 1  # nothing is wrong with it by itself
        assert together_apart(right, {"x": its_x, "y": wrong}) > 1
        assert related(its_x, wrong) > 1
    assert related(x, y) < 1
    masked = {"x": x, "apply_mask": y < 0.3}
    assert together_apart(masked, {"x": its_x, "apply_mask": its_y < 0.3}) < 1
    assert together_apart(masked, {"x": its_x, "apply_mask": its_x < 0.3}) > 1
    assert apart(x < 0.3, its_x < 0.3) < 1
    assert apart(x < 0.3, its_x < 0.35) > 1


def test_off_by_one_crops_and_missing_retries_are_told_apart():
    """A last start that is never drawn, a start that is rounded, and a second try that is not made."""
    module = made("crop, padded")
    right = columns(kornias(module, SHAPE, 0), COUNT)["x"]
    numbers = np.random.default_rng(1).random(COUNT)
    starts = right.max() + 1
    assert apart(right, np.floor(numbers * starts)) < 1
    assert apart(right, np.floor(numbers * (starts - 1))) > 1
    assert apart(right, np.rint(numbers * (starts - 1))) > 1
    drawn = columns(kornias(made("resized crop, misses"), SHAPE, 0), COUNT)
    area = 960 * (0.6 + 0.4 * numbers)
    ratio = np.exp(np.log(0.5) + np.log(6.0) * np.random.default_rng(2).random(COUNT))
    width, height = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (width <= 40) & (height <= 24)
    assert 0.2 < fits.mean() < 0.8
    assert apart(drawn["width"], np.where(fits, width, 40)) > 1
    assert apart(drawn["width"][: fits.sum()], width[fits]) < 1
