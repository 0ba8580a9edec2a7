"""torchvision's MixUp and CutMix, against the transforms themselves with the same draws, and against what they draw."""

import pickle

import numpy as np
import pytest
import torch
from support.comparison.replay import photographs
from support.comparison.statistics import apart, together_apart
from support.comparison.values import assert_values
from torch.nn.functional import one_hot
from torchvision.transforms import v2

import gpuaug

KEYS = ["input", "class"]
CLASSES = 7
MIXES = {
    "mixup": lambda **o: v2.MixUp(**o),
    "mixup, low alpha": lambda **o: v2.MixUp(alpha=0.2, **o),
    "cutmix": lambda **o: v2.CutMix(**o),
    "cutmix, high alpha": lambda **o: v2.CutMix(alpha=4.0, **o),
}
SHAPES = [(5, 3, 32, 48), (1, 1, 37, 21), (4, 2, 1, 9)]


def labels_of(batch, seed=0):
    return torch.randint(0, CLASSES, (batch,), generator=torch.Generator().manual_seed(seed))


def params_of(draws):
    """What was drawn for the batch, as ``make_params`` gives it, and each sample's partner."""
    (numbers,) = {tuple(each.items()) for sample in range(len(draws)) for each in partnerless(draws, sample)}
    found = dict(numbers)
    box = tuple(int(found.pop(name)) for name in [name for name in found if name.startswith("box")])
    return {**found, **({"box": box} if box else {})}


def partnerless(draws, sample):
    for numbers in draws.of(sample).values():
        assert numbers.pop("partner") == (sample - 1) % len(draws)
        yield numbers


def mixed_by_torchvision(transform, draws, images, labels):
    params = {"labels": labels, "batch_size": len(images), **params_of(draws)}
    return transform.transform(images, params), transform.transform(labels, params)


@pytest.mark.parametrize("name", MIXES)
def test_images_and_labels_equal_torchvision(name):
    transform = MIXES[name](num_classes=CLASSES)
    augment = gpuaug.fuse(transform)
    for seed, shape in enumerate(SHAPES * 3):
        images, labels = photographs(*shape, dtype=torch.float32, seed=seed), labels_of(shape[0], seed)
        draws = pickle.loads(pickle.dumps(augment.draw(shape, seed=seed)))
        expected, expected_labels = mixed_by_torchvision(transform, draws, images, labels)
        got, got_labels = augment(images, labels, data_keys=KEYS, draws=draws)
        if name.startswith("cutmix"):
            assert_values(got, expected)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
        assert got_labels.dtype is expected_labels.dtype
        torch.testing.assert_close(got_labels, expected_labels.view(shape[0], CLASSES), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, (24, 40)) for name in MIXES),
        *(("cutmix", size) for size in ((37, 11), (1, 6))),  # a mixup draws nothing that depends on the size
    ],
)
def test_draws_have_torchvision_distribution(name, size):
    transform, count = MIXES[name](), 500
    augment, images = gpuaug.fuse(transform), torch.zeros(1, 3, *size)
    torch.manual_seed(0)
    one, other = (
        {key: np.array([np.ravel(each[key]) for each in drawn]).T for key in drawn[0]}
        for drawn in (
            [params_of(augment.draw(images.shape, seed=seed)) for seed in range(count)],
            [transform.make_params([images]) for _ in range(count)],
        )
    )
    assert set(one) == set(other)
    mine, its = ({f"{key} {i}": row for key, rows in each.items() for i, row in enumerate(rows)} for each in (one, other))
    for key in mine:
        assert apart(mine[key], its[key]) < 1, key
    assert len(mine) < 2 or together_apart(mine, its) < 1


def test_mix_behind_a_pipeline_mixes_what_the_pipeline_gives():
    before = [v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
    images, labels = photographs(6), labels_of(6)
    for mix in (v2.MixUp(num_classes=CLASSES), v2.CutMix(num_classes=CLASSES)):
        whole = gpuaug.fuse([*before, mix])
        draws = whole.draw(images.shape, seed=3)
        flipped = [draws.of(sample).get("RandomHorizontalFlip_0") for sample in range(6)]
        alike = torch.stack(
            [image.flip(-1) if flip is not None else image for image, flip in zip(images, flipped, strict=True)]
        )
        unmixed = (alike.float() / 255 - 0.5) / 0.25
        name = f"{type(mix).__name__}_3"
        numbers = draws.of(0)[name]
        box = [int(numbers[f"box_{i}"]) for i in range(4)] if "box_0" in numbers else None
        params = {"box": box, "lam": numbers.get("lam"), "lam_adjusted": numbers.get("lam_adjusted")}
        params |= {"labels": labels, "batch_size": 6}
        got, got_labels = whole(images, labels, data_keys=KEYS, draws=draws)
        torch.testing.assert_close(got, mix.transform(unmixed, params), atol=1e-5, rtol=0)
        torch.testing.assert_close(got_labels, mix.transform(labels, params), atol=1e-6, rtol=0)


EITHER = v2.RandomChoice([v2.CutMix(num_classes=CLASSES), v2.MixUp(num_classes=CLASSES)], p=[0.25, 0.75])


def test_random_choice_picks_one_mix_for_a_batch_by_its_weights():
    augment = gpuaug.fuse([v2.RandomHorizontalFlip(0.0), EITHER])
    images, labels = photographs(4, dtype=torch.float32), labels_of(4)
    picked = []
    for seed in range(400):
        draws = augment.draw(images.shape, seed=seed)
        names = {tuple(draws.of(sample)) for sample in range(4)}
        ((name,),) = names
        picked.append(name.split("/")[-1])
        if seed < 20:
            transform = EITHER.transforms[int(picked[-1][-1])]
            expected = mixed_by_torchvision(transform, draws, images, labels)
            got = augment(images, labels, data_keys=KEYS, draws=draws)
            for mine, its in zip(got, expected, strict=True):
                torch.testing.assert_close(mine, its, atol=1e-6, rtol=0)
    assert set(picked) == {"CutMix_0", "MixUp_1"}
    assert 65 < picked.count("CutMix_0") < 135  # within four standard deviations of 100


@pytest.mark.parametrize("held", [lambda: v2.MixUp(num_classes=CLASSES), lambda: EITHER], ids=["one", "either"])
def test_random_apply_mixes_a_share_of_the_batches(held):
    augment = gpuaug.fuse(v2.RandomApply([held()], p=0.3))
    images, labels = photographs(4, dtype=torch.float32), labels_of(4)
    mixed = [augment(images, labels, data_keys=KEYS, draws=augment.draw(images.shape, seed=seed)) for seed in range(200)]
    skipped = [torch.equal(got, images) for got, _ in mixed]
    assert 100 < sum(skipped) < 178
    for (_, shares), left in zip(mixed, skipped, strict=True):
        if left:
            assert_values(shares, one_hot(labels, CLASSES).float())


def test_num_classes_is_that_of_the_transform_or_of_fuse():
    images, labels = photographs(4, dtype=torch.float32), labels_of(4)
    for augment in (
        gpuaug.fuse(v2.MixUp(num_classes=CLASSES)),
        gpuaug.fuse(v2.MixUp(), num_classes=CLASSES),
        gpuaug.fuse(v2.MixUp(num_classes=CLASSES), num_classes=CLASSES, label_smoothing=0.1),
    ):
        assert augment(images, labels, data_keys=KEYS)[1].shape == (4, CLASSES)
        assert pickle.loads(pickle.dumps(augment))(images, labels, data_keys=KEYS)[1].shape == (4, CLASSES)


@pytest.mark.parametrize("mix", [v2.MixUp(), v2.RandomChoice([v2.MixUp(), v2.CutMix()])], ids=["one", "either"])
def test_shares_need_no_num_classes_and_indices_do(mix):
    augment, images = gpuaug.fuse(mix), photographs(4, dtype=torch.float32)
    shares = one_hot(labels_of(4), CLASSES)
    for dtype, mixed in ((torch.float16, torch.float16), (torch.int64, torch.float32), (torch.bool, torch.float32)):
        got, labels = augment(images, shares.to(dtype), data_keys=KEYS)
        assert labels.dtype is mixed
        torch.testing.assert_close(labels.sum(1), torch.ones(4, dtype=mixed))
        assert not torch.equal(got, images)
    with pytest.raises(gpuaug.ArgumentError, match="For class indices pass num_classes"):
        augment(images, labels_of(4), data_keys=KEYS)


def test_empty_batch_keeps_its_form():
    augment = gpuaug.fuse(EITHER)
    images, labels = augment(torch.zeros(0, 3, 8, 8), torch.zeros(0, dtype=torch.int64), data_keys=KEYS)
    assert images.shape == (0, 3, 8, 8)
    assert labels.shape == (0, CLASSES)
