"""RandAugment, TrivialAugment and AutoAugment: replayed in Kornia, compared with its draws, and few to compile."""

import itertools

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from kornia.augmentation import auto
from kornia.augmentation.auto.operations import PolicySequential
from kornia.augmentation.auto.operations import ops as operations
from kornia.augmentation.auto.rand_augment import rand_augment
from support import internals
from support.comparison.replay import as_kornia_takes_them, assert_replays, left_to_kornia, overriding, photographs
from support.comparison.values import assert_values

import gpuaug

# Kornia's own policies pick from equalize and auto_contrast too.
pytestmark = left_to_kornia


ONE_BY_ONE = {policy[0][0]: policy for policy in rand_augment.default_policy}


def with_flips():
    """A policy with operations that none of Kornia's configurations names."""
    made = auto.TrivialAugment([ONE_BY_ONE["invert"], ONE_BY_ONE["rotate"]])
    flips = PolicySequential(operations.HorizontalFlip(1.0), operations.VerticalFlip(0.5))
    made.add_module("PolicySequential_2", flips)
    return made


def picked(params):
    """The names of what ran, in order."""
    return [operation.name for policy in params for operation in policy.data]


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("kind", ["rand", "trivial"])
def test_each_policy_operation_replays_in_kornia(name, kind):
    policy = [ONE_BY_ONE[name]]
    made = auto.RandAugment(1, 17, policy) if kind == "rand" else auto.TrivialAugment(policy)
    for seed, dtype in enumerate((torch.uint8, torch.float32)):
        assert_replays(made, photographs(4, dtype=dtype), seed, atol=5e-5)


MADE = {
    "rand 1": lambda: auto.RandAugment(1, 10),
    "rand 2": lambda: auto.RandAugment(2, 10),
    "rand 3": lambda: auto.RandAugment(3, 29),
    "trivial": auto.TrivialAugment,
    "imagenet": lambda: auto.AutoAugment("imagenet"),
    "cifar10": lambda: auto.AutoAugment("cifar10"),
    "svhn": lambda: auto.AutoAugment("svhn"),
    "flips": with_flips,
    "up to three": lambda: auto.AutoAugment(
        [[("rotate", 0.6, 7), ("shear_y", 0.5, 2), ("sharpness", 0.5, 3)], [("sharpness", 1.0, 8), ("posterize", 0.0, 1)]]
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_policies_replay_in_kornia(name):
    # A tree, with what is drawn and done before and after.
    made = K.AugmentationSequential(K.RandomHorizontalFlip(), K.ImageSequential(MADE[name]()), K.RandomErasing(p=0.7))
    augment, images = gpuaug.fuse(made), photographs()
    far = 0
    for seed in range(8):
        draws = augment.draw(images.shape, seed=seed)
        expected, got = made(as_kornia_takes_them(images), params=draws.as_kornia()), augment(images, draws=draws)
        wrong = ((got - expected).abs() > 5e-5).float().mean().item()
        names = " ".join(picked(draws.as_kornia()[1].data[0].data)).lower()
        # An equalisation or a posterisation makes jumps of the last bit of what it is given.
        if not any(word in names for word in ("equalize", "posterize", "solarize")):
            assert wrong == 0, names
        far += wrong > 0.01
    assert far <= 2


@pytest.mark.parametrize("shape", [(3, 1, 16, 20), (3, 3, 1, 20), (3, 3, 2, 2), (0, 3, 8, 8)], ids=str)
def test_policy_operations_that_refuse_a_size_run_in_kornia(shape):
    images, made = photographs(*shape, dtype=torch.float32), auto.TrivialAugment()
    augment = gpuaug.fuse(made)
    for seed in range(12):
        draws = augment.draw(images.shape, seed=seed)
        try:
            expected = made(images, params=draws.as_kornia())
        except Exception as error:
            if images.numel():
                with pytest.raises(type(error)):
                    augment(images, draws=draws)
            continue
        torch.testing.assert_close(augment(images, draws=draws), expected, atol=5e-5, rtol=0)


def test_policy_magnitude_is_read_at_each_draw():
    made = auto.AutoAugment([[("rotate", 1.0, 8)]])
    operation = made[0][0]
    augment, images = gpuaug.fuse(made), photographs()
    operation._magnitude = torch.nn.Parameter(torch.tensor([19.0]))
    degrees = augment.draw(images.shape, seed=1).as_kornia()[0].data[0].data["degrees"]
    assert degrees.tolist() == [19.0] * 3
    assert made.forward_parameters(images.shape)[0].data[0].data["degrees"].tolist() == [19.0] * 3
    with torch.no_grad():
        operation._magnitude.fill_(100.0)  # out of range, where Kornia clamps
    got = augment.draw(images.shape, seed=1).as_kornia()[0].data[0].data["degrees"]
    assert_values(got, made.forward_parameters(images.shape)[0].data[0].data["degrees"].detach())


@pytest.mark.parametrize("pick", ["batch", "sample"])
def test_a_magnitude_that_changes_between_calls_is_that_of_the_next_batch(pick):
    """Rows are made for many batches ahead, and those with another magnitude are dropped."""
    strong, fixed = auto.RandAugment(2, 9), auto.AutoAugment([[("rotate", 1.0, 8)], [("color", 1.0, 3)]])
    augment, images = gpuaug.fuse([strong, fixed], pick=pick), photographs(4, height=12, width=16)
    torch.manual_seed(0)
    for number in range(30):
        if number == 12:
            strong.m = 29
        if number == 20:
            fixed[0][0]._magnitude = torch.nn.Parameter(torch.tensor([3.0]))
        if number == 25:
            fixed[0][0]._magnitude.data.fill_(17.0)
        state = torch.get_rng_state()
        expected = augment(images, draws=augment.draw(images.shape))
        torch.set_rng_state(state)
        assert_values(augment(images), expected), number


def test_subclasses_of_policies_that_override_a_method_are_left_to_kornia():
    inside = auto.TrivialAugment([ONE_BY_ONE["invert"]])
    inside[0][0].__class__ = overriding(operations.Invert, "forward")
    around = auto.TrivialAugment([ONE_BY_ONE["invert"]])
    around[0].__class__ = overriding(PolicySequential, "forward")
    other, shared = (auto.TrivialAugment([ONE_BY_ONE["invert"]]) for _ in range(2))
    other[0][0].op = K.RandomGaussianBlur((3, 3), (0.5, 1.0), p=1.0)
    shared[0][0].op.same_on_batch = True
    for made, reason in (
        (overriding(auto.TrivialAugment, "transform_inputs")(), "a subclass of TrivialAugment that overrides transform_inputs"),
        (inside, "Invert_0 in PolicySequential_0 is a subclass of Invert that overrides forward"),
        (around, "PolicySequential_0 is a subclass of PolicySequential that overrides forward"),
        (other, "Invert_0 in PolicySequential_0 is made of RandomGaussianBlur, which is not Kornia"),
        (shared, "Invert_0 in PolicySequential_0 is set to same_on_batch=True or p_batch below 1"),
    ):
        augment = gpuaug.fuse(made)
        assert reason in str(augment.explain())
        assert_replays(made, photographs(), 1)


@pytest.mark.parametrize("pick", ["batch", "sample"])
def test_explain_lists_the_passes_of_a_policy(pick):
    geometry = auto.RandAugment(2, 10, [ONE_BY_ONE[name] for name in ("rotate", "invert", "sharpness", "color", "shear_x")])
    made = gpuaug.fuse([K.RandomCrop((24, 24)), geometry, K.Normalize(0.5, 0.5)], pick=pick).explain((8, 3, 32, 32))
    assert [line.what for line in made.lines] == [
        "crop 24x24, one of invert, saturation",
        "one of several affine warps",
        "sharpen, one of invert, saturation",
        "one of several affine warps",
        "sharpen, normalise",
    ]
    assert made.lines[-1].modules == ("RandAugment_1", "Normalize_2")
    assert made.launches == 5
    assert "skips samples to which none of its ops applies" in made.notes[-1]
    assert gpuaug.fuse(auto.RandAugment(2, 9), pick=pick).explain((8, 3, 32, 32)).launches == 9
    assert gpuaug.fuse(auto.TrivialAugment(), pick=pick).explain((8, 3, 32, 32)).launches == 5


def test_policies_with_an_operation_for_other_sizes_are_left_to_kornia_whole():
    made = auto.RandAugment(1, 10, [ONE_BY_ONE["rotate"], ONE_BY_ONE["invert"]])
    augment, images = gpuaug.fuse([K.RandomHorizontalFlip(), made]), photographs(3, 1, 12, 1)
    reason = "the images are one pixel wide or high (rotate)"
    line = augment.explain(images.shape).lines[-1]
    assert (line.modules, line.launches, line.reason) == (("RandAugment_1",), None, reason)
    assert augment.explain((3, 1, 12, 2)).launches is not None
    with pytest.warns(gpuaug.GpuAugWarning, match=r"RandAugment_1 is not fused, because .* wide or high \(rotate\)"):
        augment(images)
    for seed in range(6):
        draws = augment.draw(images.shape, seed=seed)
        flipped, params = K.RandomHorizontalFlip()(images / 255, params=draws.as_kornia()[0]), draws.as_kornia()[1]
        torch.testing.assert_close(augment(images, draws=draws), made(flipped, params=params), equal_nan=True)


def kornias(made, shape, calls):
    torch.manual_seed(0)
    return [made.forward_parameters(torch.Size(shape)) for _ in range(calls)]


@pytest.mark.parametrize(
    ("made", "children"), [(auto.RandAugment(3, 10), 15), (auto.TrivialAugment(), 12), (auto.AutoAugment(), 25)]
)
def test_policy_picks_have_kornia_distribution(made, children):
    augment, calls = gpuaug.fuse(made), 400
    ours = [augment.draw((1, 3, 8, 8), seed=seed).as_kornia() for seed in range(calls)]
    names = [name for name, _ in made.named_children()]
    assert len(names) == children
    for position in range(len(ours[0])):
        counts = np.bincount([names.index(path[position].name) for path in ours], minlength=children)
        chi2 = ((counts - calls / children) ** 2 / (calls / children)).sum()
        assert chi2 < children + 5 * np.sqrt(2 * children)
    assert all(len({item.name for item in path}) == len(path) for path in ours)
    assert {len(path) for path in ours} == {len(path) for path in kornias(made, (1, 3, 8, 8), 5)}


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("kind", ["rand", "trivial", "auto"])
@pytest.mark.every(4)
def test_policy_magnitudes_and_signs_have_kornia_distribution(name, kind):
    if kind == "auto" and name == "solarize_add":
        pytest.skip("not among AutoAugment's")
    config = {
        "rand": lambda: auto.RandAugment(1, 7, [ONE_BY_ONE[name]]),
        "trivial": lambda: auto.TrivialAugment([ONE_BY_ONE[name]]),
        "auto": lambda: auto.AutoAugment([[(name, 0.3, 7)]]),
    }
    made, shape = config[kind](), (4000, 3, 20, 30)
    (theirs,) = kornias(made, shape, 1)
    theirs, ours = theirs[0].data[0].data, gpuaug.fuse(made).draw(shape, seed=3).as_kornia()[0].data[0].data
    assert theirs.keys() == ours.keys()
    for key, values in theirs.items():
        if key == "forward_input_shape":
            continue
        a, b = values.double().flatten().sort().values, ours[key].double().flatten().sort().values
        assert a.shape == b.shape, key
        # Values that Kornia never draws are never drawn, and ranks agree as those of two samples do.
        if len(a.unique()) <= 8:
            assert_values(a.unique(), b.unique(), about=key)
            for value in a.unique():
                assert abs((a == value).sum() - (b == value).sum()) < 5 * (len(a) / 2) ** 0.5
        else:
            points = torch.cat([a, b])
            gap = (torch.searchsorted(a, points, right=True) - torch.searchsorted(b, points, right=True)).abs().max() / len(a)
            assert gap < 1.95 * (2 / len(a)) ** 0.5, key


def sample_by_sample(augment, images, draws):
    """Every sample alone through Kornia's own operations, with what it drew."""
    policy = internals.program(augment).ops[0]
    done = []
    for index in range(len(images)):
        image = as_kornia_takes_them(images[index : index + 1])
        for number, layer in enumerate(internals.drawn(draws)[0]["layers"]):
            for picked, drawn in [(picked, drawn) for picked, drawn in layer.items() if drawn["apply_mask"][index]]:
                params = policy.layer(number)[picked].params(drawn, internals.sizes(draws)[0])
                own = {key: values[index : index + 1] for key, values in params.items()}
                operation = policy.choices[picked].operations[number % policy.layer_count]
                image = operation(image, params={**own, "forward_input_shape": torch.tensor(image.shape)})
        done.append(image)
    return torch.cat(done)


@pytest.mark.parametrize("name", MADE)
def test_pick_sample_equals_each_sample_alone(name):
    made = MADE[name]()
    augment, images = gpuaug.fuse(made, pick="sample"), photographs(8, height=24, width=28)
    for seed in range(3):
        draws = augment.draw(images.shape, seed=seed)
        expected, got = sample_by_sample(augment, images, draws), augment(images, draws=draws)
        wrong = ((got - expected).abs() > 5e-5).flatten(1).float().mean(1)
        # Samples in which an operation makes jumps of the last bit of what it is given.
        assert (wrong > 0.01).sum() <= 2
        assert wrong.median() == 0


def test_pick_sample_picks_evenly_and_independently():
    augment, batch = gpuaug.fuse(auto.RandAugment(2, 10), pick="sample"), 6000
    layers = internals.drawn(augment.draw((batch, 3, 8, 8), seed=1))[0]["layers"]
    picked = np.full((2, batch), -1)
    for row, layer in zip(picked, layers, strict=True):
        for choice, drawn in layer.items():
            assert (row[drawn["apply_mask"]] == -1).all()
            row[drawn["apply_mask"]] = choice
    assert (picked >= 0).all()
    assert (picked[0] != picked[1]).all()
    pairs = np.bincount(picked[0] * 15 + picked[1], minlength=225)
    assert (pairs > 0).sum() == 210
    assert abs(pairs[pairs > 0] - batch / 210).max() < 6 * (batch / 210) ** 0.5


def test_pick_sample_gives_every_order_of_picks_the_same_chance():
    policy = [ONE_BY_ONE[name] for name in ("invert", "rotate", "sharpness", "equalize")]
    draws = gpuaug.fuse(auto.RandAugment(3, 10, policy), pick="sample").draw((6000, 3, 8, 8), seed=1)
    layers = internals.drawn(draws)[0]["layers"]
    picks = np.array([sum(choice * drawn["apply_mask"] for choice, drawn in layer.items()) for layer in layers])
    orders, counts = np.unique(picks, axis=1, return_counts=True)
    assert set(map(tuple, orders.T)) == set(itertools.permutations(range(4), 3))
    assert abs(counts - 250).max() < 6 * 250**0.5


def test_pick_sample_moves_masks():
    policy = [ONE_BY_ONE["shear_x"], ONE_BY_ONE["invert"], ONE_BY_ONE["translate_y"], ONE_BY_ONE["equalize"]]
    augment = gpuaug.fuse(auto.RandAugment(2, 20, policy), pick="sample")
    images = photographs(8, dtype=torch.float32)
    positions = torch.arange(32 * 48).reshape(1, 1, 32, 48).expand(8, 1, 32, 48).contiguous()
    draws = augment.draw(images.shape, seed=4)
    _, masks = augment(images, positions, draws=draws, data_keys=["input", "mask"])
    for index in range(8):
        moved = any(name in draws.of(index) for name in ("RandAugment/ShearX_0", "RandAugment/TranslateY_0"))
        assert torch.equal(masks[index], positions[index]) == (not moved)


def test_as_kornia_refuses_draws_with_pick_sample():
    draws = gpuaug.fuse(auto.TrivialAugment(), pick="sample").draw((2, 3, 8, 8), seed=0)
    text = "pick must be 'batch' for as_kornia\\(\\), got 'sample': .* Fuse with pick='batch' to compare the results."
    with pytest.raises(gpuaug.ArgumentError, match=text):
        draws.as_kornia()
    with pytest.raises(gpuaug.ArgumentError, match="pick must be 'batch' or 'sample', got 'image'"):
        gpuaug.fuse(auto.TrivialAugment(), pick="image")
