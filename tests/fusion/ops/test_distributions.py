"""Draws against Kornia's own generators: each parameter by itself, pairs of them, and what samples share.

Two samples of one distribution fail a single comparison once in a million times (``ALPHA``), and there are some thousands of
comparisons: a fresh set of seeds would fail about once in several hundred. All seeds are fixed, so a test either always passes
or never does. What a comparison can see is tested as well, on distributions that are a little off.
"""

import itertools

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from kornia.augmentation.random_generator.base import UniformDistribution
from scipy.special import ndtr
from support.batches.pairwise import sweep
from support.comparison.kornia_draws import CONSTANT, COUNT, DISTRIBUTION_CASES, PARTNERS, SHAPE, columns, kornias, made, ours
from support.comparison.statistics import ALPHA, apart, distance, related, together_apart
from support.comparison.values import assert_values
from support.ops.op_cases import CASES

import gpuaug


def same(mine, its, batch, masks=True):
    """Assert that two sets of parameters have the same names, shapes and types, and that their values have one distribution."""
    assert {key: (value.shape, value.dtype) for key, value in mine.items()} == {
        key: (value.shape, value.dtype) for key, value in its.items()
    }
    for key in CONSTANT & set(mine):
        assert_values(mine[key], its[key], about=key)
    one, other = columns(mine, batch), columns(its, batch)
    if not masks:
        one.pop("batch_prob"), other.pop("batch_prob")
    for name in one:
        assert apart(one[name], other[name]) < 1, name
    assert len(one) < 2 or together_apart(one, other) < 1


@pytest.mark.parametrize(("name", "p"), sweep(DISTRIBUTION_CASES, [0.3, 1.0]))
def test_draws_have_kornia_distribution(name, p):
    module, shape = made(name, p=p), SHAPE
    if p < 1 and DISTRIBUTION_CASES[name][1].get("size") == (12, 40):
        shape = (COUNT, 3, 12, 40)  # a crop that may be skipped must not change the size
    # An apply mask drawn once for the batch is compared over batches, below.
    same(ours(module, shape, 0), kornias(module, shape, 1), COUNT, masks=module.p_batch == 1)


@pytest.mark.parametrize(
    ("name", "size"),
    sweep(["resized crop", "resized crop, misses", "crop", "erasing", "cutmix"], [(37, 11), (3, 200), (5, 4), (1, 6)]),
)
def test_integer_draws_have_kornia_distribution_at_other_sizes(name, size):
    kind, settings = DISTRIBUTION_CASES[name]
    module = kind(**{**settings, **({"size": (min(3, size[0]), 3)} if "size" in settings else {})}, p=1.0)
    shape = (COUNT, 3, *size)
    same(ours(module, shape, 2), kornias(module, shape, 3), COUNT)


def test_settings_reach_missed_crops_and_clipped_erasing():
    """That candidates of a resized crop miss, also all ten of them; and that an erased rectangle is cut to the image."""
    whole = {}
    for name in ("resized crop", "resized crop, misses", "resized crop, narrow", "resized crop, wide"):
        module = made(name)
        drawn = columns(kornias(module, SHAPE, 0), COUNT)
        limits = {"resized crop, narrow": (24 * 0.9, 24), "resized crop, wide": (40, 20)}.get(name, (40, 24))
        whole[name] = ((drawn["width"] == np.rint(limits[0])) & (drawn["height"] == limits[1])).mean()
    assert whole["resized crop"] < 0.1
    assert min(whole["resized crop, narrow"], whole["resized crop, wide"]) > 0.1
    erased = columns(kornias(made("erasing, all"), SHAPE, 0), COUNT)
    assert (erased["heights"] == 24).mean() > 0.5


INDEPENDENT = [
    ("crop, padded", ["x", "y"]),
    ("rotation", ["degrees", "batch_prob"]),
    ("translate", ["translate_x", "translate_y", "batch_prob"]),
    ("affine", ["angle", "scale 0", "translations 0", "translations 1", "shear_x", "shear_y", "batch_prob"]),
    ("affine, two scales", ["scale 0", "scale 1"]),
    ("shear, both", ["shear_x", "shear_y"]),
    ("perspective", [*(f"end_points {index}" for index in range(8)), "batch_prob"]),
    *((name, None) for name, (kind, _) in DISTRIBUTION_CASES.items() if CASES[kind].pointwise and kind is not K.RandomErasing),
]


"""Names of settings, and of the drawn numbers that do not depend on each other; ``None``: all."""


@pytest.mark.parametrize(("name", "names"), INDEPENDENT, ids=[name for name, _ in INDEPENDENT])
def test_parameters_of_one_op_are_independent(name, names):
    module = made(name, p=1.0 if "crop" in name else 0.5)
    drawn = columns(ours(module, (COUNT, 3, 300, 400), 4), COUNT)
    names = [key for key in names or drawn if len(np.unique(drawn[key])) > 1]
    for pair in itertools.combinations(names, 2):
        assert related(drawn[pair[0]], drawn[pair[1]]) < 1, pair


@pytest.mark.parametrize("name", {kind: name for name, (kind, _) in DISTRIBUTION_CASES.items()}.values())
def test_samples_and_seeds_are_independent(name):
    module = made(name, p=1.0 if "crop" in name else 0.5)
    drawn, after = (columns(ours(module, SHAPE, seed), COUNT) for seed in (5, 6))
    for key, values in drawn.items():
        if len(np.unique(values)) > 1:
            for apart_by in (1, 2):
                assert related(values[apart_by:], values[:-apart_by]) < 1, key
            assert related(values, after[key]) < 1, key


def test_ops_of_one_pipeline_share_no_random_numbers():
    pipeline = K.AugmentationSequential(
        K.RandomHorizontalFlip(),
        K.RandomRotation(10.0, p=0.5),
        K.RandomResizedCrop((24, 40), scale=(0.5, 1.0)),
        K.RandomBrightness((0.5, 1.5), p=0.5),
        K.RandomErasing(p=0.5),
        K.RandomRotation(10.0, p=0.5),
    )
    mine, its = ours(pipeline, SHAPE, 7), kornias(pipeline, SHAPE, 8)
    assert [item.name for item in mine] == [item.name for item in its]
    one, other = (
        {(item.name, key): values for item in items for key, values in columns(item.data, COUNT).items()}
        for items in (mine, its)
    )
    for key in one:
        assert apart(one[key], other[key]) < 1, key
    assert together_apart(one, other) < 1


def batches(draw, count):
    """What ``draw(seed)`` gives for each of ``count`` seeds."""
    return [draw(seed) for seed in range(count)]


@pytest.mark.parametrize("name", [name for name in DISTRIBUTION_CASES if name != "horizontal flip"])
def test_same_on_batch_draws_once_for_all_samples(name):
    module = made(name, p=1.0 if "crop" in name else 0.5, same_on_batch=True)
    drawn = batches(lambda seed: columns(ours(module, (7, 3, 24, 40), seed), 7), 12)
    for each in drawn:
        for key, values in each.items():
            assert key in PARTNERS or len(np.unique(values)) == 1, key
    assert any(len({float(each[key][0]) for each in drawn}) > 1 for key in drawn[0])


@pytest.mark.parametrize("name", ["resized crop, misses", "erasing", "affine"])
def test_same_on_batch_draws_have_kornia_distribution(name):
    module = made(name, p=1.0 if "crop" in name else 0.3, same_on_batch=True)
    augment, shape, count = gpuaug.fuse(module), (2, 3, 24, 40), 200
    mine = batches(lambda seed: columns(augment.draw(shape, seed).as_kornia(), 2), count)
    torch.manual_seed(0)
    its = batches(lambda _: columns(module.forward_parameters(torch.Size(shape)), 2), count)
    for key in mine[0]:
        assert apart(*(np.array([each[key][0] for each in drawn]) for drawn in (mine, its))) < 1, key


@pytest.mark.parametrize(
    "module",
    [
        K.RandomCrop((24, 40), padding=2, p=0.3),
        K.RandomResizedCrop((24, 40), p=0.3),
        K.CenterCrop((24, 40), p=0.3),
        K.RandomMixUpV2(p=0.3),
        K.RandomInvert(p=0.3, same_on_batch=True),
    ],
    ids=lambda module: type(module).__name__,
)
def test_p_batch_masks_have_kornia_distribution(module):
    augment, shape, count = gpuaug.fuse(module), (3, 3, 24, 40), 200
    mine = batches(lambda seed: augment.draw(shape, seed).as_kornia()["batch_prob"].numpy(), count)
    torch.manual_seed(0)
    its = batches(lambda _: module.forward_parameters(torch.Size(shape))["batch_prob"].numpy(), count)
    assert all(len(np.unique(mask)) == 1 for mask in (*mine, *its))
    assert apart(np.array(mine)[:, 0], np.array(its)[:, 0]) < 1
    # Five standard deviations of a share.
    assert abs(np.array(mine)[:, 0].mean() - 0.3) < 5 * (0.21 / count) ** 0.5


@pytest.mark.parametrize(
    ("module", "key", "different"),
    [
        (K.ColorJitter(0.4, 0.4, 0.4, 0.1), "order", 24),
        (K.ColorJiggle(0.4, 0.4, 0.4, 0.1), "order", 24),
        (K.RandomMotionBlur((4, 20), 35.0, 0.5), "ksize_factor", 8),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.nn.Module) else "",
)
def test_draws_per_batch_have_kornia_distribution(module, key, different):
    augment, shape, count = gpuaug.fuse(module), (4, 3, 24, 24), 600
    mine = batches(lambda seed: augment.draw(shape, seed).as_kornia()[key].numpy(), count)
    torch.manual_seed(0)
    its = batches(lambda _: module.forward_parameters(torch.Size(shape))[key].numpy(), count)
    places = 100 ** np.arange(4)
    assert apart(np.array(mine) @ places, np.array(its) @ places) < 1
    assert len(np.unique(np.array(mine) @ places)) == different


@pytest.mark.parametrize("shared", [False, True])
def test_gaussian_noise_has_kornia_distribution(shared):
    module = K.RandomGaussianNoise(0.5, 2.0, p=1.0, same_on_batch=shared)
    shape = (1, 3, 200, 100) if shared else (60, 3, 20, 17)
    mine, its = (draw(module, shape, 9)["gaussian_noise"].numpy() for draw in (ours, kornias))
    assert mine.shape == its.shape
    assert distance(mine.ravel(), its.ravel()) < 1
    ordered = ndtr((np.sort(mine.ravel()) - 0.5) / 2)
    steps = np.arange(ordered.size + 1) / ordered.size
    # One sample against the normal distribution itself.
    assert max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()) < np.sqrt(-np.log(ALPHA / 2) / 2 / ordered.size)


def test_gaussian_noise_is_independent_between_pixels():
    module = K.RandomGaussianNoise(p=1.0)
    field, other = (ours(module, (20, 3, 32, 33), seed)["gaussian_noise"].numpy() for seed in (10, 11))
    for axis, by in ((3, 1), (3, 2), (3, 32), (2, 1), (1, 1), (0, 1), (0, 2)):
        length = field.shape[axis]
        first, second = (np.take(field, range(*ends), axis).ravel() for ends in ((0, length - by), (by, length)))
        assert related(first, second) < 1
        assert related(abs(first), abs(second)) < 1
    assert related(field.ravel(), other.ravel()) < 1


@pytest.mark.parametrize("shared", [False, True])
def test_salt_and_pepper_have_kornia_distribution(shared):
    module = K.RandomSaltAndPepperNoise((0.1, 0.9), (0.2, 0.7), p=1.0, same_on_batch=shared)
    shape, count = ((2, 3, 8, 9), 150) if shared else ((2000, 3, 8, 9), 1)
    found = []
    for draw in (ours, kornias):
        drawn = batches(lambda seed, draw=draw: draw(module, shape, seed), count)
        pixels = {key: torch.cat([each[key] for each in drawn]) for key in drawn[0] if key != "forward_input_shape"}
        assert {key: (value.shape, value.dtype) for key, value in drawn[0].items()} == {
            key: (value.shape, value.dtype) for key, value in kornias(module, shape, 0).items()
        }
        for key in ("mask_salt", "mask_pepper"):
            assert (pixels[key] == pixels[key][:, :1]).all(), "all channels alike"
            pixels[key] = pixels[key][:, 0].sum((1, 2))
        found.append({key: values.numpy()[:: 2 if shared else 1] for key, values in pixels.items()})
        if shared:
            assert all((values[::2] == values[1::2]).all() for values in pixels.values())
    for key in found[0]:
        assert apart(*(each[key] for each in found)) < 1, key
    assert together_apart(*found) < 1


def test_salt_and_pepper_are_independent_between_pixels():
    module = K.RandomSaltAndPepperNoise(0.5, 0.5, p=1.0)
    masks, other = (ours(module, (40, 1, 32, 33), seed) for seed in (10, 11))
    levels = {key: masks[key].float().numpy() for key in ("mask_salt", "mask_pepper")}
    for values in levels.values():
        for axis, by in ((3, 1), (3, 2), (3, 32), (2, 1), (0, 1), (0, 2)):
            length = values.shape[axis]
            first, second = (np.take(values, range(*ends), axis).ravel() for ends in ((0, length - by), (by, length)))
            assert related(first, second) < 1
    assert related(levels["mask_salt"].ravel(), other["mask_salt"].float().numpy().ravel()) < 1
    assert abs(np.array([values.mean() for values in levels.values()]) - 0.25).max() < 5 * (0.1875 / values.size) ** 0.5


LIGHTS = {
    "side": K.RandomLinearIllumination((0.1, 0.9), p=1.0),
    "side, mostly dark": K.RandomLinearIllumination((0.1, 0.9), (-0.9, 0.2), p=1.0),
    "corner": K.RandomLinearCornerIllumination((0.1, 0.9), (-0.5, 0.9), p=1.0),
    "point": K.RandomGaussianIllumination((0.1, 0.9), (0.2, 0.7), (0.1, 0.6), (-0.5, 0.9), p=1.0),
}


@pytest.mark.parametrize("name", LIGHTS)
def test_light_has_kornia_distribution(name):
    shape, found = (COUNT, 1, 7, 10), []
    for draw, seed in ((ours, 0), (kornias, 1)):
        light = draw(LIGHTS[name], shape, seed)["gradient"]
        assert light.shape == shape
        # Rounded, because a 0 of Kornia's may be a little more or less.
        points = {f"{x}, {y}": light[:, 0, y, x].numpy().round(5) for x, y in ((0, 0), (9, 0), (0, 6), (9, 6), (4, 3), (2, 5))}
        assert related(points["4, 3"][1:], points["4, 3"][:-1]) < 1
        found.append(points)
    for point in found[0]:
        assert apart(*(points[point] for points in found)) < 1, point
    assert together_apart(*found) < 1


@pytest.mark.parametrize("kind", [K.RandomLinearIllumination, K.RandomLinearCornerIllumination, K.RandomGaussianIllumination])
def test_same_light_on_a_batch(kind):
    first, second = (ours(kind(p=1.0, same_on_batch=True), (5, 3, 7, 10), seed)["gradient"] for seed in (0, 1))
    assert (first == first[:1, :1]).all()
    assert not torch.equal(first, second)


SIDES = [(7, 10), (10, 7), (224, 225), (1, 9), (9, 1), (1, 1), (2, 2)]


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("kind", [K.RandomLinearIllumination, K.RandomLinearCornerIllumination])
def test_linear_light_equals_kornia(kind, sign):
    for direction, sides in itertools.product(range(4), SIDES):
        module = kind(0.7, sign, p=1.0)
        module._param_generator.directions_sampler = UniformDistribution(
            *torch.tensor(2 * [float(direction)]), validate_args=False
        )
        mine, its = (draw(module, (2, 3, *sides), 0)["gradient"] for draw in (ours, kornias))
        assert_values(mine, its, atol=2e-7, about=(direction, sides))


@pytest.mark.parametrize(
    ("center", "sigma", "sign"),
    [
        (0.5, 0.5, 1.0),
        (0.3, 0.2, -1.0),
        (0.9, 1.0, 1.0),
        (0.0, 0.05, 1.0),
        (1.0, 0.05, -1.0),
        (0.5, 0.0, 1.0),
        (0.37, 1e-3, 1.0),
    ],
)
def test_gaussian_light_equals_kornia(center, sigma, sign):
    module = K.RandomGaussianIllumination(0.7, center, sigma, sign, p=1.0)
    for sides in SIDES:
        mine, its = (draw(module, (2, 3, *sides), 0)["gradient"] for draw in (ours, kornias))
        assert_values(mine, its, atol=2e-6, about=sides)
