"""What the comparisons of test_distributions.py can tell apart: distributions that are a little off."""

import numpy as np
from support.comparison.kornia_draws import COUNT, SHAPE, columns, kornias, made
from support.comparison.statistics import apart, distance, ranks, related, together_apart


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
