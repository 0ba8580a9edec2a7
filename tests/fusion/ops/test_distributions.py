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
from scipy.special import chdtri, ndtr, ndtri

import gpuaug
from gpuaug.fusion.lower.kornia import LOWERED

ALPHA = 1e-6
COUNT = 12_000
FEW = 64
"""Parameters of so many values are compared by their frequencies, others by their distribution functions."""

CONSTANT = {
    "batch_idx",
    "center",
    "dst",
    "forward_input_shape",
    "image_shape",
    "input_size",
    "output_size",
    "start_points",
    "values",
}
"""Parameters that are not drawn: they must be equal."""

ONE_A_BATCH = {"order", "gaussian_noise"}
"""Drawn for the batch, and so not compared from sample to sample."""

PARTNERS = {"mixup_pairs", "mix_pairs"}
"""Permutations of the batch: not shared by the samples even under ``same_on_batch``."""

SETTINGS = {
    "horizontal flip": (K.RandomHorizontalFlip, {}),
    "vertical flip": (K.RandomVerticalFlip, {}),
    "crop": (K.RandomCrop, {"size": (12, 40)}),
    "crop, padded": (K.RandomCrop, {"size": (24, 40), "padding": (3, 5, 2, 7)}),
    "crop, padded if needed": (
        K.RandomCrop,
        {"size": (24, 40), "padding": 1, "pad_if_needed": True, "padding_mode": "reflect"},
    ),
    "resized crop": (K.RandomResizedCrop, {"size": (24, 40)}),
    "resized crop, misses": (K.RandomResizedCrop, {"size": (24, 40), "scale": (0.6, 1.0), "ratio": (0.5, 3.0)}),
    "resized crop, narrow": (K.RandomResizedCrop, {"size": (24, 40), "scale": (0.5, 1.0), "ratio": (0.4, 0.9)}),
    "resized crop, wide": (K.RandomResizedCrop, {"size": (24, 40), "scale": (0.7, 1.0), "ratio": (2.0, 5.0)}),
    "rotation": (K.RandomRotation, {"degrees": 45.0}),
    "rotation, one way": (K.RandomRotation, {"degrees": (10.0, 80.0)}),
    "quarters": (K.RandomRotation90, {"times": (-3, 3)}),
    "affine": (
        K.RandomAffine,
        {"degrees": 30.0, "translate": (0.2, 0.1), "scale": (0.7, 1.3), "shear": (5.0, 20.0, -8.0, 3.0)},
    ),
    "affine, two scales": (K.RandomAffine, {"degrees": (-10.0, 40.0), "scale": (0.5, 0.8, 1.1, 1.4)}),
    "affine, four shears": (K.RandomAffine, {"degrees": 5.0, "shear": (-5.0, 5.0, 10.0, 20.0)}),
    "shear": (K.RandomShear, {"shear": (-10.0, 20.0)}),
    "shear, both": (K.RandomShear, {"shear": (-10.0, 20.0, 5.0, 15.0)}),
    "translate": (K.RandomTranslate, {"translate_x": (-0.2, 0.3), "translate_y": (-0.1, 0.1)}),
    "translate, down": (K.RandomTranslate, {"translate_y": (-0.3, 0.1)}),
    "perspective": (K.RandomPerspective, {"distortion_scale": 0.5}),
    "perspective, outwards": (K.RandomPerspective, {"distortion_scale": 0.6, "sampling_method": "area_preserving"}),
    "erasing": (K.RandomErasing, {}),
    "erasing, wide": (K.RandomErasing, {"scale": (0.1, 0.9), "ratio": (2.0, 4.0), "value": 0.5}),
    "erasing, all": (K.RandomErasing, {"scale": (0.9, 1.5), "ratio": (0.9, 1.5)}),
    "jitter": (K.ColorJitter, {"brightness": 0.4, "contrast": (0.2, 3.0), "saturation": 0.7, "hue": 0.1}),
    "jitter, hue alone": (K.ColorJitter, {"hue": (-0.1, 0.4)}),
    "jiggle": (K.ColorJiggle, {"brightness": 0.4, "contrast": 0.6, "saturation": (0.1, 2.0), "hue": 0.5}),
    "brightness": (K.RandomBrightness, {"brightness": (0.5, 1.5)}),
    "contrast": (K.RandomContrast, {"contrast": (0.5, 1.7)}),
    "saturation": (K.RandomSaturation, {"saturation": (0.2, 1.8)}),
    "hue": (K.RandomHue, {"hue": (-0.5, 0.3)}),
    "gamma": (K.RandomGamma, {"gamma": (0.3, 2.5), "gain": (0.5, 1.5)}),
    "solarize": (K.RandomSolarize, {"thresholds": 0.3, "additions": 0.2}),
    "solarize, bounds": (K.RandomSolarize, {"thresholds": (0.2, 0.9), "additions": (-0.4, 0.1)}),
    "posterize": (K.RandomPosterize, {"bits": 3}),
    "posterize, all": (K.RandomPosterize, {"bits": (0.0, 8.0)}),
    "invert": (K.RandomInvert, {}),
    "grey": (K.RandomGrayscale, {}),
    "shuffle": (K.RandomChannelShuffle, {}),
    "dropout": (K.RandomChannelDropout, {}),
    "dropout of two": (K.RandomChannelDropout, {"num_drop_channels": 2}),
    "blur": (K.RandomGaussianBlur, {"kernel_size": (5, 3), "sigma": (0.1, 2.0)}),
    "sharpness": (K.RandomSharpness, {"sharpness": (0.5, 4.0)}),
    "sharpness, one number": (K.RandomSharpness, {"sharpness": 0.7}),
    "mixup": (K.RandomMixUpV2, {"lambda_val": (0.2, 0.7)}),
    "cutmix": (K.RandomCutMixV2, {"cut_size": (0.1, 0.8), "beta": 0.7, "use_correct_lambda": True}),
    "cutmix, plain": (K.RandomCutMixV2, {"use_correct_lambda": True}),
}
NOT_DRAWN = {K.CenterCrop, K.PadTo, K.Resize, K.Normalize, K.Denormalize}
"""Nothing but a gate, where there is one."""

SHAPE = (COUNT, 3, 24, 40)


def made(name, **options):
    kind, settings = SETTINGS[name]
    return kind(**settings, **options)


def ours(module, shape, seed):
    augment = gpuaug.fuse(module)
    assert "left to Kornia" not in str(augment.explain(shape))  # whose draws would be its own
    return augment.draw(shape, seed=seed).as_kornia()


def kornias(module, shape, seed):
    torch.manual_seed(seed)
    return module.forward_parameters(torch.Size(shape))


def columns(params, batch):
    """Each drawn number of a sample, by a name: {name: (B,)}."""
    found = {}
    for key, value in params.items():
        if key in CONSTANT or key in ONE_A_BATCH:
            continue
        numbers = value.numpy()
        if key in ("src", "crop_src"):
            corners = numbers.reshape(batch, 4, 2)
            (left, top), (right, bottom) = corners[:, 0].T, corners[:, 2].T
            width, height = right - left + 1, bottom - top + 1
            found.update({"x": left, "y": top, "width": width, "height": height, "area": width * height})
            rectangle = np.stack((left, top, right, top, right, bottom, left, bottom), -1).reshape(batch, 4, 2)
            np.testing.assert_array_equal(corners, rectangle)
        elif key in ("channels", "channel_idx"):
            found[key] = numbers @ 10 ** np.arange(numbers.shape[1])
        else:
            flat = numbers.reshape(batch, -1) if key not in PARTNERS else numbers.reshape(batch, 1)
            found.update({f"{key} {index}" if flat.shape[1] > 1 else key: flat[:, index] for index in range(flat.shape[1])})
    return found


def distance(one, other):
    """How far two samples' distribution functions are apart at most, by Kolmogorov and Smirnov, over what ALPHA allows."""
    places = np.sort(np.concatenate((one, other)))
    below = [np.searchsorted(np.sort(sample), places, "right") / len(sample) for sample in (one, other)]
    allowed = np.sqrt(-np.log(ALPHA / 2) / 2 * (1 / len(one) + 1 / len(other)))
    return np.abs(below[0] - below[1]).max() / allowed


def frequencies_apart(one, other):
    """Chi-squared of two samples' frequencies, over what ALPHA allows; rare values are counted together."""
    values, index = np.unique(np.concatenate((one, other)), return_inverse=True)
    counts = np.stack([np.bincount(part, minlength=len(values)) for part in np.split(index, [len(one)])])
    rare = counts.sum(0) < 40
    counts = np.concatenate((counts[:, ~rare], counts[:, rare].sum(1, keepdims=True)), 1)
    counts = counts[:, counts.sum(0) > 0]
    if counts.shape[1] < 2:
        return 0.0
    weight = np.sqrt(len(other) / len(one))
    chi_squared = ((counts[0] * weight - counts[1] / weight) ** 2 / counts.sum(0)).sum()
    return chi_squared / chdtri(counts.shape[1] - 1, ALPHA)


def apart(one, other):
    """Over 1: two samples are of different distributions."""
    few = len(np.unique(np.concatenate((one, other)))) <= FEW
    return max(frequencies_apart(one, other) if few else 0.0, distance(one, other))


def ranks(values):
    """How many of the values are smaller than each."""
    return np.searchsorted(np.sort(values), values).astype(np.int32)


def together_apart(one, other):
    """Over 1: some columns do not hang together in one sample as they do in the other; both are {name: (N,)}.

    Two columns' ranks among all values of both samples are added and subtracted, and what comes out is compared: under one
    joint distribution it has one distribution, too.
    """
    count = len(next(iter(one.values())))
    both = {name: ranks(np.concatenate((one[name], other[name]))) for name in one}
    pairs = itertools.combinations(both.values(), 2)
    return max(distance(mixed[:count], mixed[count:]) for x, y in pairs for mixed in (x + y, x - y))


def related(one, other):
    """The rank correlation of two columns of one sample, over what ALPHA allows for independent ones."""
    return abs(np.corrcoef(ranks(one), ranks(other))[0, 1]) * np.sqrt(len(one)) / -ndtri(ALPHA / 2)


def same(mine, its, batch, gates=True):
    """Assert that what two sets of parameters hold has one distribution."""
    assert set(mine) == set(its)
    for key in CONSTANT & set(mine):
        assert torch.equal(mine[key], its[key]), key
    one, other = columns(mine, batch), columns(its, batch)
    if not gates:
        one.pop("batch_prob"), other.pop("batch_prob")
    for name in one:
        assert apart(one[name], other[name]) < 1, name
    assert len(one) < 2 or together_apart(one, other) < 1


def test_every_op_that_draws_is_compared():
    assert {kind for kind, _ in SETTINGS.values()} | NOT_DRAWN | {K.RandomGaussianNoise} == set(LOWERED)


@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("name", SETTINGS)
def test_draws_are_kornias(name, p):
    module, shape = made(name, p=p), SHAPE
    if p < 1 and SETTINGS[name][1].get("size") == (12, 40):
        shape = (COUNT, 3, 12, 40)  # a crop that may be skipped must not change the size
    # A gate that is thrown once for the batch is compared over batches, below.
    same(ours(module, shape, 0), kornias(module, shape, 1), COUNT, gates=module.p_batch == 1)


@pytest.mark.parametrize("name", ["resized crop", "resized crop, misses", "crop", "erasing", "cutmix"])
@pytest.mark.parametrize("size", [(37, 11), (3, 200), (5, 4), (1, 6)])
def test_whole_numbers_are_kornias_at_other_sizes(name, size):
    kind, settings = SETTINGS[name]
    module = kind(**{**settings, **({"size": (min(3, size[0]), 3)} if "size" in settings else {})}, p=1.0)
    shape = (COUNT, 3, *size)
    same(ours(module, shape, 2), kornias(module, shape, 3), COUNT)


def test_the_settings_reach_what_they_are_meant_to():
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
    ("jitter", ["brightness_factor", "contrast_factor", "saturation_factor", "hue_factor", "batch_prob"]),
    ("gamma", ["gamma_factor", "gain_factor", "batch_prob"]),
    ("solarize, bounds", ["thresholds", "additions"]),
    ("dropout", ["channel_idx", "batch_prob"]),
]


@pytest.mark.parametrize(("name", "names"), INDEPENDENT, ids=[name for name, _ in INDEPENDENT])
def test_what_is_drawn_apart_is_independent(name, names):
    module = made(name, p=1.0 if "crop" in name else 0.5)
    drawn = columns(ours(module, (COUNT, 3, 300, 400), 4), COUNT)
    for pair in itertools.combinations(names, 2):
        assert related(drawn[pair[0]], drawn[pair[1]]) < 1, pair


@pytest.mark.parametrize("name", SETTINGS)
def test_samples_and_seeds_are_independent(name):
    module = made(name, p=1.0 if "crop" in name else 0.5)
    drawn, after = (columns(ours(module, SHAPE, seed), COUNT) for seed in (5, 6))
    for key, values in drawn.items():
        if len(np.unique(values)) > 1:
            for apart_by in (1, 2):
                assert related(values[apart_by:], values[:-apart_by]) < 1, key
            assert related(values, after[key]) < 1, key


def test_ops_of_one_pipeline_share_no_numbers():
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


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "horizontal flip"])
def test_one_draw_for_all_where_asked(name):
    module = made(name, p=1.0 if "crop" in name else 0.5, same_on_batch=True)
    drawn = batches(lambda seed: columns(ours(module, (7, 3, 24, 40), seed), 7), 12)
    for each in drawn:
        for key, values in each.items():
            assert key in PARTNERS or len(np.unique(values)) == 1, key
    assert any(len({float(each[key][0]) for each in drawn}) > 1 for key in drawn[0])


@pytest.mark.parametrize("name", ["resized crop, misses", "erasing", "affine"])
def test_one_draw_for_all_is_kornias(name):
    module = made(name, p=1.0 if "crop" in name else 0.3, same_on_batch=True)
    augment, shape, count = gpuaug.fuse(module), (2, 3, 24, 40), 1500
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
def test_gates_of_batches_are_kornias(module):
    augment, shape, count = gpuaug.fuse(module), (3, 3, 24, 40), 1500
    mine = batches(lambda seed: augment.draw(shape, seed).as_kornia()["batch_prob"].numpy(), count)
    torch.manual_seed(0)
    its = batches(lambda _: module.forward_parameters(torch.Size(shape))["batch_prob"].numpy(), count)
    assert all(len(np.unique(gate)) == 1 for gate in (*mine, *its))
    assert apart(np.array(mine)[:, 0], np.array(its)[:, 0]) < 1


@pytest.mark.parametrize("kind", [K.ColorJitter, K.ColorJiggle])
def test_orders_are_kornias(kind):
    module = kind(0.4, 0.4, 0.4, 0.1)
    augment, shape, count = gpuaug.fuse(module), (1, 3, 4, 4), 2400
    mine = batches(lambda seed: augment.draw(shape, seed).as_kornia()["order"].numpy(), count)
    torch.manual_seed(0)
    its = batches(lambda _: module.forward_parameters(torch.Size(shape))["order"].numpy(), count)
    places = 10 ** np.arange(4)
    assert apart(np.array(mine) @ places, np.array(its) @ places) < 1
    assert len(np.unique(np.array(mine) @ places)) == 24


def test_modules_picked_at_random_are_picked_as_kornia_picks_them():
    pipeline = K.AugmentationSequential(
        K.RandomHorizontalFlip(), K.RandomVerticalFlip(), K.RandomInvert(), K.RandomGamma(), random_apply=2
    )
    augment, shape, count = gpuaug.fuse(pipeline), (1, 3, 4, 4), 600

    def picked(params):
        names = [item.name for item in params]
        return sum((1 + int(name.rsplit("_", 1)[1])) * 10**index for index, name in enumerate(names))

    def found(params):
        return picked(params[0].data if len(params) == 1 and isinstance(params[0].data, list) else params)

    mine = batches(lambda seed: found(augment.draw(shape, seed).as_kornia()), count)
    torch.manual_seed(0)
    its = batches(lambda _: picked(pipeline.forward_parameters(torch.Size(shape))), count)
    assert len(np.unique(its)) == 12
    assert apart(np.array(mine), np.array(its)) < 1


@pytest.mark.parametrize("shared", [False, True])
def test_noise_is_kornias(shared):
    module = K.RandomGaussianNoise(0.5, 2.0, p=1.0, same_on_batch=shared)
    shape = (1, 3, 200, 100) if shared else (60, 3, 20, 17)
    mine, its = (draw(module, shape, 9)["gaussian_noise"].numpy() for draw in (ours, kornias))
    assert mine.shape == its.shape
    assert distance(mine.ravel(), its.ravel()) < 1
    ordered = ndtr((np.sort(mine.ravel()) - 0.5) / 2)
    steps = np.arange(ordered.size + 1) / ordered.size
    # One sample against the normal distribution itself.
    assert max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()) < np.sqrt(-np.log(ALPHA / 2) / 2 / ordered.size)


def test_noise_is_independent_from_pixel_to_pixel():
    module = K.RandomGaussianNoise(p=1.0)
    field, other = (ours(module, (20, 3, 32, 33), seed)["gaussian_noise"].numpy() for seed in (10, 11))
    for axis, by in ((3, 1), (3, 2), (3, 32), (2, 1), (1, 1), (0, 1), (0, 2)):
        length = field.shape[axis]
        first, second = (np.take(field, range(*ends), axis).ravel() for ends in ((0, length - by), (by, length)))
        assert related(first, second) < 1
        assert related(abs(first), abs(second)) < 1
    assert related(field.ravel(), other.ravel()) < 1


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
def test_a_distribution_a_tenth_off_would_be_found(name):
    module, key = OFF[name]
    right = columns(kornias(made(name), SHAPE, 0), COUNT)[key]
    assert apart(right, columns(ours(made(name), SHAPE, 1), COUNT)[key]) < 1
    assert apart(right, columns(ours(module, SHAPE, 1), COUNT)[key]) > 1


def test_numbers_used_twice_and_wrong_gates_would_be_found():
    generator = np.random.default_rng(0)
    x, y, its_x, its_y = generator.random((4, COUNT))
    right = {"x": x, "y": y}
    assert together_apart(right, {"x": its_x, "y": its_y}) < 1
    for wrong in (its_x, 1 - its_x, ranks(its_x + 3 * its_y) / COUNT):
        assert distance(y, wrong) < 1  # nothing is wrong with it by itself
        assert together_apart(right, {"x": its_x, "y": wrong}) > 1
        assert related(its_x, wrong) > 1
    assert related(x, y) < 1
    gated = {"x": x, "apply_mask": y < 0.3}
    assert together_apart(gated, {"x": its_x, "apply_mask": its_y < 0.3}) < 1
    assert together_apart(gated, {"x": its_x, "apply_mask": its_x < 0.3}) > 1
    assert apart(x < 0.3, its_x < 0.3) < 1
    assert apart(x < 0.3, its_x < 0.35) > 1


def test_small_faults_of_crops_would_be_found():
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
