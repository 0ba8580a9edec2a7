"""LeRobot's transforms, as the project writes them and, where it is installed (pip install --no-deps lerobot), its own."""

from collections import Counter
from itertools import permutations

import pytest
import torch
from support import internals
from support.comparison.replay import overriding, photographs
from support.comparison.torchvision_replay import assert_replays
from support.comparison.values import assert_values
from torchvision.transforms import v2

import gpuaug
from bench.data.recipes import lerobot as written
from gpuaug.stages.definition import definition

TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
left = pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")


@pytest.fixture(params=["as written", "installed"])
def package(request):
    module = written if request.param == "as written" else written.installed()
    if module is None:
        pytest.skip("pip install --no-deps lerobot")
    return module


@pytest.mark.parametrize("in_order", [True, False], ids=["in order", "any order"])
def test_the_default_transforms_are_fused_entirely_and_replay(package, in_order):
    images = photographs(12, height=16, width=24, dtype=torch.float32)
    transforms = package.ImageTransforms(package.ImageTransformsConfig(enable=True, random_order=not in_order))
    assert_replays(transforms, images, atol=2e-5, share=2e-4)  # the nearest pixel of an affine map may be another
    augment = gpuaug.fuse(transforms)
    assert augment.explain(images.shape).launches == (4 if in_order else 10)
    assert {len(calls) for calls in augment.draw(images.shape, seed=1).as_torchvision()} == {3}
    assert "SharpnessJitter" in str(definition(gpuaug.TransformStage(augment)))


MARKS = [
    v2.RandomInvert(1.0),
    v2.RandomHorizontalFlip(1.0),
    v2.RandomVerticalFlip(1.0),
    v2.RandomSolarize(0.5, 1.0),
]
NAMES = ["invert", "horizontal_flip", "vertical_flip", "solarize"]
PICKED = {
    "two of four": (2, [1.0, 2.0, 3.0, 6.0]),
    "three, one never": (3, [1.0, 3.0, 0.0, 2.0]),
    "one": (1, [1.0, 1.0, 2.0, 4.0]),
}


def law(weights, count, in_order):
    """The probability of each tuple of picks: each is drawn by its share of what is left."""
    found = Counter()
    for order in permutations(range(len(weights)), count):
        probability, rest = 1.0, sum(weights)
        for member in order:
            probability *= weights[member] / rest
            rest -= weights[member]
        found[tuple(sorted(order)) if in_order else order] += probability
    return {order: probability for order, probability in found.items() if probability > 0}


def assert_follows(counts, expected):
    """Pearson's statistic within four deviations of its mean."""
    assert set(counts) == set(expected)
    total, free = sum(counts.values()), len(expected) - 1
    statistic = sum((counts[each] - total * share) ** 2 / (total * share) for each, share in expected.items())
    assert statistic < free + 4 * (2 * free) ** 0.5 + 4


@pytest.mark.parametrize("in_order", [True, False], ids=["in order", "any order"])
@pytest.mark.parametrize("name", PICKED)
def test_subsets_are_picked_as_often_as_by_lerobot(package, name, in_order):
    count, weights = PICKED[name]
    made = package.RandomSubsetApply(MARKS, weights, count, random_order=not in_order)
    expected = law(weights, count, in_order)
    calls = gpuaug.fuse(made).draw((5_000, 3, 4, 4), seed=0).as_torchvision()
    assert_follows(Counter(tuple(NAMES.index(call) for call, _ in each) for each in calls), expected)
    torch.manual_seed(0)
    theirs = Counter()
    for _ in range(800):
        made(torch.zeros(3, 1, 1))
        theirs[tuple(MARKS.index(each) for each in made.selected_transforms)] += 1
    assert_follows(theirs, expected)


def test_the_sharpness_is_drawn_from_its_range(package):
    made = package.SharpnessJitter((0.5, 1.5))
    calls = gpuaug.fuse(made).draw((4000, 3, 4, 4), seed=0).as_torchvision()
    ours = torch.tensor([arguments["sharpness_factor"] for ((_, arguments),) in calls]).sort().values
    uniform = torch.linspace(0.5, 1.5, len(ours))
    assert_values(ours, uniform, atol=0.04)
    assert_replays(v2.Compose([made]), photographs(8, dtype=torch.float32), atol=2e-6)


def test_transforms_that_are_not_enabled_are_nothing(package):
    with pytest.raises(gpuaug.ArgumentError, match="at least one augmentation or conversion, got none in ImageTransforms"):
        gpuaug.fuse(package.ImageTransforms(package.ImageTransformsConfig()))


class Other(written.RandomSubsetApply):
    """As another version of LeRobot might have it."""

    __module__ = "lerobot.datasets.transforms"

    def forward(self, *inputs):
        return self.transforms[int(torch.randint(self.n_subset, ()))](*inputs)


Other.__name__ = "RandomSubsetApply"

LEFT = {
    "another version": (
        lambda: Other(MARKS, n_subset=2),
        "returns other images than in the tested versions",
    ),
    "a subclass": (
        lambda: overriding(written.RandomSubsetApply, "forward")(MARKS, n_subset=2),
        "a subclass of RandomSubsetApply that overrides forward",
    ),
    "a subclass of the sharpness": (
        lambda: overriding(written.SharpnessJitter)(0.5),
        "a subclass of SharpnessJitter that overrides check_inputs",
    ),
    "more picks than weights": (
        lambda: written.RandomSubsetApply(MARKS, [1.0, 0.0, 0.0, 1.0], 3),
        "torch.multinomial does not accept its weights",
    ),
    "a weight below 0": (
        lambda: written.RandomSubsetApply(MARKS, [1.0, 2.0, 3.0, -1.0], 2),
        "torch.multinomial does not accept its weights",
    ),
    "many places": (
        lambda: written.RandomSubsetApply(MARKS * 2, n_subset=4, random_order=True),
        "its random order needs 32 ops, more than 24",
    ),
    "many subsets": (lambda: written.RandomSubsetApply(MARKS * 5, n_subset=10), "more than 10000 subsets"),
    "a size by chance": (
        lambda: written.RandomSubsetApply([*MARKS, v2.Resize((8, 8))], n_subset=2),
        "Resize_4 in it may change the size of some images",
    ),
}


@left
@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_known_of_lerobots_is_left_and_named(name):
    make, reason = LEFT[name]
    assert reason in str(gpuaug.fuse([make(), TO_FLOAT]).explain((4, 3, 16, 16)))


def test_a_subclass_that_overrides_nothing_is_lowered(package):
    kind = type("Own", (package.RandomSubsetApply,), {})
    assert "left to" not in repr(gpuaug.fuse(kind(MARKS, n_subset=2)))


def test_a_transform_of_no_weight_has_no_op():
    assert len(internals.program(gpuaug.fuse(written.RandomSubsetApply(MARKS, PICKED["three, one never"][1], 2))).ops) == 3


def test_all_of_many_are_picked_in_their_own_order():
    made = written.RandomSubsetApply(MARKS * 3, n_subset=12)
    (calls,) = gpuaug.fuse(made).draw((1, 3, 4, 4), seed=0).as_torchvision()
    assert [name for name, _ in calls] == NAMES * 3


def test_conversions_and_mixes_stay_out_of_a_subset():
    with pytest.raises(gpuaug.ArgumentError, match="got a conversion"):
        gpuaug.fuse(written.RandomSubsetApply([TO_FLOAT, *MARKS], n_subset=2))
    with pytest.raises(gpuaug.ArgumentTypeError, match="must hold a single mix"):
        gpuaug.fuse([TO_FLOAT, written.RandomSubsetApply([v2.MixUp(num_classes=3), *MARKS], n_subset=2)])
