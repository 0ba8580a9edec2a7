"""Containers that pick one of their mixes: replayed in Kornia, counted by their weights, and for each sample."""

import pickle
from collections import Counter

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support import internals
from support.comparison.replay import as_kornia_takes_them, left_to_kornia, photographs
from support.comparison.values import assert_values

import gpuaug
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.policies.one_mix import OneMix

pytestmark = pytest.mark.filterwarnings("ignore:RandomCutMixV2:DeprecationWarning")

KEYS = ["input", "class"]


def either(*, random_apply=1, p=1.0, weights=None, kind=K.AugmentationSequential, **options):
    mixes = K.RandomMixUpV2(p=p), K.RandomCutMixV2(p=p, use_correct_lambda=True, cut_size=(0.3, 0.6))
    return kind(*mixes, random_apply=random_apply, random_apply_weights=weights, **options)


def picked(augment, seed, shape=(1, 3, 4, 4)):
    """The name of the mix that a seed picks."""
    (item,) = augment.draw(shape, seed=seed).as_kornia()
    return item.name


PIPELINES = {
    "alone": lambda: either(),
    "image sequential": lambda: either(kind=K.ImageSequential),
    "one number": lambda: either(random_apply=(1,)),
    "two numbers": lambda: either(random_apply=(1, 1)),
    "all": lambda: either(random_apply=True),
    "apply masks": lambda: either(p=0.5),
    "in a pipeline": lambda: K.AugmentationSequential(
        K.RandomResizedCrop((24, 20)), K.RandomHorizontalFlip(), either(), K.Normalize(0.5, 0.25)
    ),
    "with data keys": lambda: K.AugmentationSequential(
        K.RandomHorizontalFlip(), either(data_keys=["input", "class"]), data_keys=["input", "class"]
    ),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.every(3)
def test_mix_containers_replay_in_kornia(name, dtype):
    made, images = PIPELINES[name](), photographs(5, dtype=dtype)
    augment = gpuaug.fuse(made)
    assert any(isinstance(op, OneMix) for op in internals.program(augment).ops)
    assert "left to Kornia" not in repr(augment)
    for seed in range(12):
        draws = augment.draw(images.shape, seed=seed)
        keys = {"data_keys": ["input"]} if isinstance(made, K.AugmentationSequential) else {}
        expected = made(as_kornia_takes_them(images), params=draws.as_kornia(), **keys)
        got = augment(images, draws=pickle.loads(pickle.dumps(draws)), data_keys=["input"])
        if len(internals.program(augment).ops) == 1 and dtype is torch.float32 and "CutMix" in draws.as_kornia()[0].name:
            assert_values(got, expected)
        torch.testing.assert_close(got, expected, atol=2e-4 if name == "in a pipeline" else 1e-6, rtol=0)


def test_one_mix_picks_follow_random_apply_weights():
    mixes = K.RandomMixUpV2(p=1.0), K.RandomCutMixV2(p=1.0), K.RandomMixUpV2((0.0, 0.0), p=1.0), K.RandomMixUpV2(p=1.0)
    made = K.ImageSequential(*mixes, random_apply=1, random_apply_weights=[3.0, 6.0, 1.0, 0.0])
    calls, names = 1500, [name for name, _ in made.named_children()]
    augment = gpuaug.fuse(made)
    by_batch = Counter(picked(augment, seed) for seed in range(calls))
    draws = gpuaug.fuse(made, pick="sample").draw((calls, 1, 4, 4), seed=0)
    by_sample = Counter(next(iter(draws.of(sample))).split("/")[-1] for sample in range(calls))
    for found in (by_batch, by_sample):
        assert found[names[3]] == 0
        assert found.total() == calls
        for name, share in zip(names[:3], (0.3, 0.6, 0.1), strict=True):
            # Five standard deviations of the count.
            assert abs(found[name] - share * calls) < 5 * (calls * share * (1 - share)) ** 0.5


def test_one_mix_never_picks_a_weight_of_zero(monkeypatch):
    mixes = [K.RandomMixUpV2(p=1.0) for _ in range(4)]
    augment = gpuaug.fuse(K.ImageSequential(*mixes, random_apply=1, random_apply_weights=[0.0, 0.1, 0.6, 0.0]), pick="sample")
    monkeypatch.setattr(Sampler, "uniform", lambda *_: np.float32([0, 1 - 2**-24]))
    draws = augment.draw((2, 3, 4, 4), seed=0)
    assert [list(draws.of(sample)) for sample in range(2)] == [[f"ImageSequential/RandomMixUpV2_{index}"] for index in (1, 2)]


def test_pick_sample_mixes_differ_but_share_one_permutation():
    augment, batch = gpuaug.fuse(either(), pick="sample"), 64
    whose = torch.eye(batch)[:, :, None, None].repeat(1, 1, 8, 8)
    mixed = augment(whose, draws=augment.draw(whose.shape, seed=0))
    flat = mixed.flatten(2)
    cut = ((flat == 0) | (flat == 1)).flatten(1).all(1)
    assert 16 < cut.sum() < 48
    shares = mixed.mean((2, 3))
    assert_values(shares.sum(1), torch.ones(batch), atol=1e-5)
    shares.fill_diagonal_(0)
    # Each image is the partner of one other at most: of itself, there is nothing to see.
    assert ((shares > 0).sum(0) <= 1).all()
    assert ((shares > 0).sum(1) <= 1).all()


def test_one_mix_apply_mask_is_drawn_once_per_batch():
    augment, images = gpuaug.fuse(either(p=0.3), num_classes=4), photographs(4, dtype=torch.float32)
    left = [torch.equal(augment(images, draws=augment.draw(images.shape, seed=seed)), images) for seed in range(200)]
    # Five standard deviations of the count.
    assert abs(sum(left) - 140) < 33
    by_sample, batch = gpuaug.fuse(either(p=0.5), pick="sample"), (64, 1, 4, 4)
    seen = set()
    for seed in range(40):
        draws = by_sample.draw(batch, seed=seed)
        seen.add(frozenset(name.split("/")[-1] for sample in range(64) for name in draws.of(sample)))
    assert len(seen) == 4


@pytest.mark.parametrize("pick", ["batch", "sample"])
def test_one_mix_labels_hold_the_partners_lam(pick):
    images, labels = torch.eye(5)[:, :, None, None].repeat(1, 1, 10, 10), torch.arange(5)
    augment = gpuaug.fuse(either(), pick=pick)
    for seed in range(6):
        mixed, got = augment(images, labels, data_keys=KEYS, draws=augment.draw(images.shape, seed=seed))
        assert got.shape == (5, 3)
        own, partner, share = got.unbind(-1)
        assert_values(own, labels.float())
        expected = torch.eye(5) * (1 - share[:, None]) + torch.eye(5)[partner.long()] * share[:, None]
        torch.testing.assert_close(mixed.mean((2, 3)), expected, atol=1e-6, rtol=0)


def test_one_mix_keepdim_returns_a_single_image():
    image = photographs(1)[0]
    assert gpuaug.fuse(either())(image).shape == (1, *image.shape)
    kept = K.ImageSequential(K.RandomMixUpV2(keepdim=True), K.RandomCutMixV2(keepdim=True), random_apply=1)
    assert gpuaug.fuse(kept)(image).shape == image.shape


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: either(random_apply=(0, 1)), "random_apply of zero or more mixes"),
        (lambda: either(weights=[0.0, 0.0]), "random_apply_weights are not finite, negative or all 0"),
        (lambda: K.ImageSequential(K.RandomMixUpV2(), K.RandomInvert(), random_apply=1), "MixUp and CutMix alone"),
        (lambda: K.ImageSequential(K.RandomMixUpV2(), K.RandomCutMixV2(num_mix=2), random_apply=1), "MixUp and CutMix alone"),
        (lambda: K.ImageSequential(K.RandomMixUpV2(), either(), random_apply=1), "MixUp and CutMix alone"),
    ],
)
@left_to_kornia
def test_one_mix_settings_left_to_kornia(made, reason):
    augment = gpuaug.fuse(made())
    assert reason in str(augment.explain((4, 3, 16, 16)))
    assert augment(photographs()).shape == photographs().shape


def test_explain_lists_one_mix_with_one_launch():
    said = gpuaug.fuse(either(), pick="sample").explain((4, 3, 16, 16))
    assert said.launches == 1
    assert "for each sample mixup or cutmix" in str(said)
