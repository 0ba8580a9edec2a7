"""torchvision's RandAugment, TrivialAugmentWide, AutoAugment and AugMix: each sample by torchvision's own functions."""

import numpy as np
import pytest
import torch
from support import internals
from support.comparison.replay import photographs
from support.comparison.statistics import apart, together_apart
from support.comparison.torchvision_replay import BYTES_OFF, assert_replays, both, replayed, scaled
from support.comparison.values import assert_values
from torchvision.transforms import (
    AugMix,
    AutoAugment,
    AutoAugmentPolicy,
    InterpolationMode,
    RandAugment,
    TrivialAugmentWide,
    v2,
)
from torchvision.transforms.autoaugment import _apply_op

import gpuaug
from gpuaug.fusion.ops.base import Size

TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
MADE = {
    "rand": lambda **options: v2.RandAugment(**options),
    "rand, strong": lambda **options: v2.RandAugment(3, 7, 11, **options),
    "trivial": lambda **options: v2.TrivialAugmentWide(**options),
    "trivial, few bins": lambda **options: v2.TrivialAugmentWide(4, **options),
    "imagenet": lambda **options: v2.AutoAugment(**options),
    "cifar10": lambda **options: v2.AutoAugment(AutoAugmentPolicy.CIFAR10, **options),
    "svhn": lambda **options: v2.AutoAugment(AutoAugmentPolicy.SVHN, **options),
    "rand, filled": lambda **options: v2.RandAugment(fill=[255, 128, 0], **options),
}
EXACT = {"affine", "rotate", "posterize", "solarize", "equalize", "invert"}
"""Functions that make the same bytes of bytes; where the nearest pixel is taken, two may be as near."""
MOVED = {"affine", "rotate"}
CONVERSION = "to_dtype"


def functions(calls):
    return [name for name, _ in calls if name != CONVERSION]


@pytest.mark.parametrize("name", MADE)
@pytest.mark.every(3)
def test_policies_equal_torchvisions_functions(name):
    augment, compared = gpuaug.fuse([MADE[name](), TO_FLOAT]), dict.fromkeys(("exact", "moved", "last computed"), 0)
    # Few pixels have no levels to spread, but many of them show what is rare.
    for images in (photographs(30, height=24, width=28), photographs(200, height=5, width=6)):
        draws = augment.draw(images.shape, seed=0)
        both_of_each = zip(augment(images, draws=draws), replayed(draws, images), strict=True)
        for (got, expected), calls in zip(both_of_each, map(functions, draws.as_torchvision()), strict=True):
            if set(calls) <= EXACT - MOVED:
                compared["exact"] += 1
                assert_values(got, expected, atol=1e-4 / 255, about=calls)
            elif set(calls) <= EXACT:
                compared["moved"] += 1
                share = 1 if images.shape[3] == 6 else 0.05
                assert_values(got, expected, atol=1e-4 / 255, share=share, about=calls)
            elif set(calls[:-1]) <= EXACT - MOVED:
                compared["last computed"] += 1
                assert_values(got, expected, atol=1.01 / 255, about=calls)
    assert min(compared.values()) > 5, compared


@pytest.mark.parametrize("name", MADE)
@pytest.mark.every(3)
def test_bytes_are_rounded_behind_each_operation(name):
    assert_replays([MADE[name](), TO_FLOAT], photographs(32, height=24, width=28), 1, atol=1e-6, share=BYTES_OFF)


COMPOSITIONS = {
    "RandAugment(3, 13)": [v2.RandAugment(3, 13), TO_FLOAT],
    "classification": [
        v2.RandomResizedCrop(48),
        v2.RandomHorizontalFlip(),
        v2.TrivialAugmentWide(interpolation=InterpolationMode.BILINEAR),
        TO_FLOAT,
    ],
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_hardly_a_byte_is_off_by_more_than_a_level_behind_several_operations(name):
    expected, got = both(COMPOSITIONS[name], photographs(200, height=64, width=80))
    levels_off = ((got - expected) * 255).abs().round()
    assert (levels_off > 1).float().mean() < 1e-4
    assert (levels_off > 2).float().mean((1, 2, 3)).max() < 1e-2


@pytest.mark.parametrize("fill", [None, 0, [255, 128, 0]], ids=str)
@pytest.mark.parametrize("name", ["rand", "imagenet"])
@pytest.mark.every(2)
def test_interpolated_policies_equal_torchvisions_functions(name, fill):
    made = [MADE[name](interpolation=InterpolationMode.BILINEAR, fill=fill), TO_FLOAT]
    augment, images = gpuaug.fuse(made), photographs(56, height=24, width=28)
    draws = augment.draw(images.shape, seed=0)
    got, expected = augment(images, draws=draws), replayed(draws, images)
    single = [index for index, calls in enumerate(draws.as_torchvision()) if functions(calls) in (["affine"], ["rotate"])]
    assert len(single) > 2
    assert_values(got[single], expected[single], atol=1.01 / 255)
    assert_values(got, expected, atol=1e-6, share=BYTES_OFF)


def told(draws, sample):
    """The operations of a sample and their magnitudes, in order."""
    picked = [(way.split("/")[1].split(" ")[0], own) for way, own in draws.of(sample).items() if "/" in way]
    return [(operation, own.get("magnitude", 0.0)) for operation, own in picked]


@pytest.mark.parametrize("name", MADE)
def test_calls_are_those_of_torchvisions_policy(name):
    """Its own function for an operation and a magnitude gives the bits that the calls give."""
    transform, images = MADE[name](), photographs(30, height=24, width=28)
    draws = gpuaug.fuse([transform, TO_FLOAT]).draw(images.shape, seed=2)
    expected = []
    for sample, image in enumerate(images):
        for operation, magnitude in told(draws, sample):
            image = transform._apply_image_or_video_transform(
                image, operation, magnitude, transform.interpolation, transform._fill
            )
        expected.append(TO_FLOAT(image))
    assert_values(replayed(draws, images), torch.stack(expected))


def without_posterize(policy):
    """Remove Posterize from a policy, so that ``fuse`` fuses the policy for floats."""
    if isinstance(policy, v2.AutoAugment):
        policy._policies = [pair for pair in policy._policies if all(operation[0] != "Posterize" for operation in pair)]
    else:
        policy._AUGMENTATION_SPACE = {name: space for name, space in policy._AUGMENTATION_SPACE.items() if name != "Posterize"}
    return policy


@pytest.mark.parametrize("name", MADE)
@pytest.mark.every(3)
def test_policies_without_posterize_equal_torchvisions_policy_for_floats(name):
    """Each pixel by torchvision's function for the operation and the magnitude of the sample, and the calls to the bit."""
    policy, images = without_posterize(MADE[name]()), scaled(photographs(200, height=5, width=6))
    images[:100] = torch.linspace(0, 1, 100)[:, None, None, None]  # thresholds of bytes would solarize some of these
    augment, exact, seen = gpuaug.fuse(policy), {"Solarize", "Invert", "Identity"}, set()
    draws = augment.draw(images.shape, seed=0, dtype=images.dtype)
    got, by_calls = augment(images, draws=draws), replayed(draws, images)
    assert not [line for line in augment.explain(images.shape, dtype=images.dtype).lines if line.reason]
    for sample, image in enumerate(images):
        operations = told(draws, sample)
        for operation, magnitude in operations:
            image = policy._apply_image_or_video_transform(image, operation, magnitude, policy.interpolation, policy._fill)
        assert_values(by_calls[sample], image, about=operations)
        if exact.issuperset(dict(operations)):
            seen |= set(dict(operations))
            assert_values(got[sample], image, atol=2e-7, about=operations)
    assert "Solarize" in seen


@pytest.mark.parametrize("magnitude", [-1, -31, 30])
def test_magnitudes_are_indices_of_bins_as_in_torchvision(magnitude):
    """Negative ones count from the end."""
    images = photographs(30, height=24, width=28)
    index = magnitude % 31
    both_ways = [gpuaug.fuse([v2.RandAugment(magnitude=each), TO_FLOAT]) for each in (magnitude, index)]
    one, other = (augment(images, draws=augment.draw(images.shape, seed=0)) for augment in both_ways)
    assert_values(one, other)


@pytest.mark.parametrize("magnitude", [-32, 31])
def test_magnitudes_out_of_the_bins_are_left_to_torchvision_which_refuses_them(magnitude):
    with pytest.warns(gpuaug.GpuAugWarning, match="the magnitude of an operation is not one of its bins"):
        augment = gpuaug.fuse([v2.RandAugment(magnitude=magnitude), TO_FLOAT])
    with pytest.raises(IndexError):
        augment(photographs(30))


def torchvisions(transform, count, shape, monkeypatch):
    """What torchvision's own policy picks and with which magnitudes, a list for each call of it."""
    made = []

    def noted(image, operation, magnitude, interpolation, fill):
        if operation != "Identity":
            made[-1].append((operation, magnitude))
        return image

    monkeypatch.setattr(transform, "_apply_image_or_video_transform", noted)
    image = torch.zeros(shape, dtype=torch.uint8)
    for _ in range(count):
        made.append([])
        transform(image)
    return made


def columns(picked, names):
    """The place of each operation in ``names`` and its magnitude, {name: (N,)}; -1 and 0 where there is none."""
    longest = max(map(len, picked))
    padded = [[*each, *[(None, 0.0)] * (longest - len(each))] for each in picked]
    found = {}
    for turn in range(longest):
        found[f"operation {turn}"] = np.array([names.index(each[turn][0]) if each[turn][0] else -1 for each in padded])
        found[f"magnitude {turn}"] = np.array([each[turn][1] for each in padded])
    return found


@pytest.mark.parametrize("name", MADE)
def test_draws_have_torchvisions_distribution(name, monkeypatch):
    count, shape, transform = 1000, (3, 40, 331), MADE[name]()
    draws = gpuaug.fuse([transform, TO_FLOAT]).draw((count, *shape), seed=0)
    torch.manual_seed(0)
    one = [told(draws, sample) for sample in range(count)]
    other = torchvisions(transform, count, shape, monkeypatch)
    names = list(transform._AUGMENTATION_SPACE)
    mine, its = columns(one, names), columns(other, names)
    assert mine.keys() == its.keys()
    assert all(apart(mine[column], its[column]) < 1 for column in mine)
    assert together_apart(mine, its) < 1
    if "trivial" not in name:  # which has more magnitudes than are drawn
        assert {pick for picks in one for pick in picks} == {pick for picks in other for pick in picks}


def test_magnitudes_of_another_policy_are_seen(monkeypatch):
    count, transform = 1500, v2.RandAugment(magnitude=10)
    draws = gpuaug.fuse([v2.RandAugment(), TO_FLOAT]).draw((count, 3, 24, 24), seed=0)
    names = list(transform._AUGMENTATION_SPACE)
    other = columns(torchvisions(transform, count, (3, 24, 24), monkeypatch), names)
    one = columns([told(draws, sample) for sample in range(count)], names)
    assert apart(one["magnitude 0"], other["magnitude 0"]) > 1


def test_samples_pick_apart_and_by_the_chance_of_a_container():
    images = photographs(64)
    augment = gpuaug.fuse([v2.RandomApply([v2.RandAugment()], p=0.5), TO_FLOAT])
    draws = augment.draw(images.shape, seed=0)
    skipped = torch.tensor([not functions(calls) for calls in draws.as_torchvision()])
    assert 16 < skipped.sum() < 48
    assert_values(augment(images, draws=draws)[skipped], scaled(images)[skipped])
    assert len({str(calls) for calls in draws.as_torchvision()}) > 24


def test_what_never_applies_and_picks_nothing_leaves_images_as_they_are():
    images = photographs(4)
    for made in (v2.RandAugment(num_ops=0), v2.RandomApply([v2.TrivialAugmentWide()], p=0.0)):
        assert_values(gpuaug.fuse([made, TO_FLOAT])(images), scaled(images))


V1 = {
    "rand": lambda: (RandAugment(3, 5), v2.RandAugment(3, 5)),
    "trivial": lambda: (TrivialAugmentWide(11), v2.TrivialAugmentWide(11)),
    "imagenet": lambda: (AutoAugment(), v2.AutoAugment()),
    "svhn": lambda: (AutoAugment(AutoAugmentPolicy.SVHN), v2.AutoAugment(AutoAugmentPolicy.SVHN)),
}


@pytest.mark.parametrize("name", V1)
def test_policies_of_v1_are_those_of_v2(name):
    """The same draws and magnitudes, and the same bytes by v1's own function for them, but for how it rounds."""
    images = photographs(24, height=24, width=28)
    old, new = V1[name]()
    draws, other = (gpuaug.fuse([made, TO_FLOAT]).draw(images.shape, seed=0) for made in (old, new))
    picked = [told(draws, sample) for sample in range(len(images))]
    assert picked == [told(other, sample) for sample in range(len(images))]
    space = old._augmentation_space(*((11,) if name == "trivial" else (31 if name == "rand" else 10, (24, 28))))
    for image, operations in zip(images, picked, strict=True):
        for operation, magnitude in operations:
            values, _ = space[operation]
            given = 255 * magnitude if operation == "Solarize" else magnitude
            assert not values.ndim or (values.double().abs() - abs(given)).abs().min() < 1e-4
            its = _apply_op(image, operation, given, old.interpolation, old.fill)
            image = new._apply_image_or_video_transform(image, operation, magnitude, new.interpolation, new._fill)
            assert_values(image.int(), its.int(), atol=1, about=operation)
            if operation not in ("Color", "Sharpness", "AutoContrast"):
                assert_values(image, its, about=operation)


LEFT = {
    "it gives floats other levels than bytes": (lambda: [TO_FLOAT, v2.RandAugment()], (4, 3, 32, 32)),
    "the image has no 3x3 pixels": (lambda: [v2.AutoAugment(), TO_FLOAT], (4, 3, 2, 32)),
    "image has no 3x3 pixels": (lambda: [v2.AugMix(), TO_FLOAT], (4, 3, 2, 32)),
    "differently for torch.float32": (lambda: [TO_FLOAT, v2.AugMix()], (4, 3, 32, 32)),
}


@pytest.mark.parametrize("reason", LEFT)
def test_policies_that_are_not_exact_are_left_to_torchvision_whole(reason):
    make, shape = LEFT[reason]

    def run():
        augment = gpuaug.fuse(make())
        draws = augment.draw(shape, seed=0)
        return augment, draws, augment(photographs(*shape), draws=draws)

    text = f"Aug(ment|Mix)_[01] is not fused, because .*{reason}"
    with pytest.warns(gpuaug.GpuAugWarning, match=text):
        augment, draws, got = run()
    assert got.shape == shape
    assert_values(got, augment(photographs(*shape), draws=draws))
    (line,) = (line for line in augment.explain(shape).lines if line.reason)
    assert (line.package, line.launches) == ("torchvision", None)
    assert reason in line.reason
    assert any("Aug" in name for name in draws.of(0))
    with pytest.raises(gpuaug.ArgumentError, match="which torchvision runs"):
        draws.as_torchvision()


def test_passes_are_counted_by_kinds_and_not_by_operations():
    said = gpuaug.fuse([v2.RandAugment(), TO_FLOAT, v2.Normalize([0.5], [0.25])]).explain((8, 3, 32, 32))
    lines = said.lines
    # For each of two picks a warp and a jitter with its mean, sharpness, and equalize or auto contrast with their tables.
    assert [line.launches for line in lines] == [1, 2, 1, 2, 2, 1, 2]
    assert said.notes[-1].startswith("Bytes are maxima: a pass between the first and the last skips samples")
    assert lines[0].what == "read, one of posterize, solarize"
    assert lines[1].what == "one of several affine warps, brightness, contrast, color"
    assert lines[3].what == "equalize or auto contrast, one of posterize, solarize"
    assert lines[-1].modules == ("RandAugment_0", "Normalize_2")


@pytest.mark.parametrize("name", MADE)
def test_rows_of_policies_are_made_with_all_others_of_the_pipeline(name):
    augment = gpuaug.fuse([v2.RandomResizedCrop(16), MADE[name](), TO_FLOAT])
    planned = internals.program(augment).segments.whole_plan(Size(4, 3, 24, 28), masks=False, views=1)
    assert planned is not None
    assert not planned.draws_one_batch_at_a_time
    assert sum(planned.uniforms_per_op) == planned.uniform_count


AUGMIX = {
    "default": {},
    "strong": {
        "severity": 10,
        "mixture_width": 2,
        "chain_depth": 2,
        "alpha": 0.3,
        "all_ops": False,
        "interpolation": "nearest",
    },
    "filled": {"severity": 5, "mixture_width": 1, "alpha": 4.0, "fill": [255, 128, 0]},
}


def chains_told(draws, sample, width):
    """(weights of the image and of the chains, the operations of each chain and their magnitudes)."""
    told_of = draws.of(sample)
    chains = [[] for _ in range(width)]
    for way, own in told_of.items():
        if "/" in way:
            _, chain, operation = way.split(" ")[0].split("/")
            chains[int(chain.removeprefix("chain_"))].append((operation, own.get("magnitude", 0.0)))
    return list(told_of["AugMix"].values()), chains


def by_torchvision(transform, image, weights, chains, monkeypatch):
    """What ``AugMix.forward`` makes of an image with these weights, operations and magnitudes."""
    samples = iter([[weights[0], 1.0], weights[1:]])
    depths, picks = iter(map(len, chains)), iter([pick for chain in chains for pick in chain])

    def picked(_):
        operation, magnitude = next(picks)
        return operation, (lambda *_: [magnitude], False)

    def drawn(high=0, size=(), *, low=0):
        return torch.tensor(next(depths) if low else 0)

    monkeypatch.setattr(transform, "_sample_dirichlet", lambda _: torch.tensor([next(samples)]))
    monkeypatch.setattr(transform, "_get_random_item", picked)
    monkeypatch.setattr(torch, "randint", drawn)
    return transform(image)


@pytest.mark.parametrize("name", AUGMIX)
def test_augmix_equals_torchvisions(name, monkeypatch):
    """Its own code gives the bytes that the calls give, and fuse gives them but for how an operation rounds."""
    transform, images = v2.AugMix(**AUGMIX[name]), photographs(32, height=48, width=56)
    augment = gpuaug.fuse(transform)
    assert not [line for line in augment.explain(images.shape).lines if line.reason]
    draws = augment.draw(images.shape, seed=0)
    got, by_calls = augment(images, draws=draws), replayed(draws, images)
    for sample, image in enumerate(images):
        weights, chains = chains_told(draws, sample, transform.mixture_width)
        with monkeypatch.context() as patch:
            expected = by_torchvision(transform, image, weights, chains, patch)
        # The angle of a shear may differ in its last bit.
        share = 1e-3 if "Shear" in str(chains) else 0
        assert_values(by_calls[sample].int(), expected.int(), share=share, about=chains)
    assert got.dtype == torch.uint8
    # Of two nearest pixels either may be taken.
    share_off, share_far_off = (0.03, 0.02) if name == "strong" else (BYTES_OFF, 1e-3)
    assert_values(got.float(), by_calls.float(), share=share_off)
    assert_values(got.float(), by_calls.float(), atol=1, share=share_far_off)


def chains_of_torchvision(transform, count, shape, monkeypatch):
    """[(weights, chains)] of what torchvision's own AugMix draws, as ``chains_told`` tells them."""
    sample, made = transform._sample_dirichlet, []

    def weighed(parameters):
        weights = sample(parameters)
        made[-1][0].append(weights[0].numpy())
        return weights

    def noted(image, operation, magnitude, **_):
        _, chains, first = made[-1]
        first.append(image)
        if image is first[0]:  # each chain begins with it
            chains.append([])
        chains[-1].append((operation, magnitude))
        return image.clone()

    monkeypatch.setattr(transform, "_sample_dirichlet", weighed)
    monkeypatch.setattr(transform, "_apply_image_or_video_transform", noted)
    image = torch.zeros(shape, dtype=torch.uint8)
    for _ in range(count):
        made.append(([], [], []))
        transform(image)
    return [([of_image[0], *of_image[1] * of_chains], chains) for (of_image, of_chains), chains, _ in made]


def augmix_columns(drawn, names):
    """Columns of the weights, and of the depth, the operations and the magnitudes of each chain, {name: (N,)}."""
    found = {
        f"weight {index}": np.array(weights) for index, weights in enumerate(zip(*(each for each, _ in drawn), strict=True))
    }
    for index, chain in enumerate(zip(*(chains for _, chains in drawn), strict=True)):
        found[f"depth {index}"] = np.array([len(picks) for picks in chain])
        found |= {f"{name} of chain {index}": values for name, values in columns(chain, names).items()}
    return found


@pytest.mark.parametrize("name", AUGMIX)
def test_draws_of_augmix_have_torchvisions_distribution(name, monkeypatch):
    count, shape, transform = 1500, (3, 8, 331), v2.AugMix(**AUGMIX[name])
    names = list(transform._AUGMENTATION_SPACE if transform.all_ops else transform._PARTIAL_AUGMENTATION_SPACE)
    draws = gpuaug.fuse(transform).draw((count, *shape), seed=0)
    torch.manual_seed(0)
    mine = augmix_columns([chains_told(draws, sample, transform.mixture_width) for sample in range(count)], names)
    its = augmix_columns(chains_of_torchvision(transform, count, shape, monkeypatch), names)
    assert mine.keys() == its.keys()
    assert {column: size for column in mine if (size := apart(mine[column], its[column])) >= 1} == {}
    assert together_apart(mine, its) < 1


def test_augmix_draws_for_a_clip_as_a_whole_and_by_the_chance_of_a_container():
    clips = photographs(48, height=20, width=24).unflatten(0, (24, 2))
    augment = gpuaug.fuse(v2.RandomApply([v2.AugMix()], p=0.5))
    draws = augment.draw(clips.shape, seed=0)
    got = augment(clips, draws=draws)
    skipped = torch.tensor([not calls for calls in draws.as_torchvision()])
    assert 4 < skipped.sum() < 20
    assert_values(got[skipped], clips[skipped])
    for frame in range(2):
        assert_values(got[:, frame].float(), replayed(draws, clips[:, frame]).float(), share=BYTES_OFF)


def test_augmix_of_v1_is_that_of_v2():
    images = photographs(8)
    one, other = (gpuaug.fuse(kind(7, 2, 1, 0.5, False, InterpolationMode.NEAREST, 9)) for kind in (AugMix, v2.AugMix))
    draws = one.draw(images.shape, seed=0)
    assert draws.as_torchvision() == other.draw(images.shape, seed=0).as_torchvision()
    assert_values(one(images, draws=draws), replayed(draws, images), atol=1, share=BYTES_OFF)


def test_augmix_refuses_what_moves_with_pixels():
    augment, images = gpuaug.fuse(v2.AugMix()), photographs(2)
    labels = torch.arange(2)
    assert augment(images, labels, data_keys=["input", "class"])[1] is labels
    for value, key in ((torch.zeros(2, 1, *images.shape[2:]), "mask"), (torch.ones(2, 1, 4), "bbox_xyxy")):
        with pytest.raises(gpuaug.ArgumentError, match=f"among input, class with AugMix, got {key}"):
            augment(images, value, data_keys=["input", key])


@pytest.mark.parametrize("severity", [0, 11])
def test_severities_out_of_the_bins_are_left_to_torchvision_which_refuses_them(severity):
    transform = v2.AugMix()
    transform.severity = severity
    with pytest.warns(gpuaug.GpuAugWarning, match="mixture_width, alpha or severity is out of range"):
        augment = gpuaug.fuse(transform)
    with pytest.raises((IndexError, RuntimeError)):
        augment(photographs(30))
