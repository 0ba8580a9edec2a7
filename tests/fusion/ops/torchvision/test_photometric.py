"""What RandomPhotometricDistort draws, against torchvision's own parameters."""

import numpy as np
import pytest
import torch
from support.comparison.statistics import apart, together_apart
from torchvision.transforms import v2

import gpuaug

COUNT = 2000
FACTORS = ("brightness", "contrast", "saturation", "hue")
LEFT_OUT = -1.0
"""A factor that no adjustment takes, in the place of one that is not made."""


def columns(calls_of_samples):
    """Factors, the place of contrast among the adjustments, and where channels come from, {name: (N,)}."""
    rows = []
    for calls in calls_of_samples:
        adjustments = {name.removeprefix("adjust_"): next(iter(given.values())) for name, given in calls[:-1]}
        row = {name: adjustments.get(name, LEFT_OUT) for name in FACTORS}
        row["contrast's place"] = list(adjustments).index("contrast") if "contrast" in adjustments else LEFT_OUT
        row["channels"] = np.dot(calls[-1][1]["permutation"], (9, 3, 1)[-len(calls[-1][1]["permutation"]) :])
        rows.append(row)
    return {name: np.array([row[name] for row in rows], dtype=float) for name in rows[0]}


def torchvisions(transform, channels=3):
    """The calls that torchvision's own parameters lead to."""
    for _ in range(COUNT):
        drawn = transform.make_params([torch.zeros(channels, 2, 2)])
        order = ("brightness", "contrast", "saturation", "hue", "contrast behind")
        place = "contrast behind" if drawn["contrast_before"] else "contrast"
        names = [name.removesuffix(" behind") for name in order if name != place]
        calls = [(f"adjust_{name}", {name: drawn[f"{name}_factor"]}) for name in names if drawn[f"{name}_factor"] is not None]
        permutation = drawn["channel_permutation"]
        yield [
            *calls,
            ("permute_channels", {"permutation": list(range(channels)) if permutation is None else permutation.tolist()}),
        ]


def ours(transform, channels=3):
    """The calls of what fuse draws; a sample that draws nothing has none."""
    nothing = [("permute_channels", {"permutation": list(range(channels))})]
    draws = gpuaug.fuse(transform).draw((COUNT, channels, 8, 8), seed=0)
    return [calls or nothing for calls in draws.as_torchvision()]


@pytest.mark.parametrize(("p", "channels"), [(0.5, 3), (1.0, 3), (0.5, 1)])
def test_draws_have_torchvisions_distribution(p, channels):
    transform = v2.RandomPhotometricDistort(hue=(-0.1, 0.3), p=p)
    torch.manual_seed(0)
    one, other = columns(ours(transform, channels)), columns(torchvisions(transform, channels))
    assert set(one["channels"]) == {0} or channels == 3
    assert all(apart(one[name], other[name]) < 1 for name in one)
    assert together_apart(one, other) < 1


def test_the_place_of_contrast_and_a_chance_that_is_a_little_off_are_seen():
    torch.manual_seed(0)
    one, other = columns(ours(v2.RandomPhotometricDistort(p=0.6))), columns(torchvisions(v2.RandomPhotometricDistort()))
    assert apart(one["contrast's place"], other["contrast's place"]) > 1
    assert apart(one["hue"], other["hue"]) > 1


def test_what_a_sample_drew_is_told_by_the_adjustments_that_it_makes():
    draws = gpuaug.fuse(v2.RandomPhotometricDistort()).draw((64, 3, 8, 8), seed=0)
    for sample, calls in enumerate(draws.as_torchvision()):
        numbers = draws.of(sample).get("RandomPhotometricDistort", {})
        expected = [(name, value) for _, given in calls[:-1] for name, value in given.items()]
        if calls:
            expected += [(f"channels_{index}", each) for index, each in enumerate(calls[-1][1]["permutation"])]
        assert list(numbers.items()) == expected
    assert any(not calls for calls in draws.as_torchvision())
