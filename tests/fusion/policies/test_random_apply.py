"""Containers with ``random_apply``: replayed in Kornia, and compared with its picks."""

from collections import Counter

import kornia.augmentation as K
import pytest
import torch
from kornia.augmentation import auto
from support import internals
from support.batches.pairwise import sweep
from support.comparison.replay import as_kornia_takes_them, assert_replays, left_to_kornia, photographs, programs
from support.comparison.values import assert_values

import gpuaug
from gpuaug.fusion.lower import kornia
from gpuaug.fusion.policies.random_apply import RandomApply


def modules():
    return (
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        K.RandomAffine(20.0, (0.1, 0.1), (0.8, 1.2)),
        K.RandomInvert(),
        K.RandomContrast((0.6, 1.5)),
        K.RandomGaussianBlur((5, 5), (0.3, 2.0)),
        K.RandomErasing(p=0.7),
    )


FORMS = {
    "all": {"random_apply": True},
    "three": {"random_apply": 3},
    "from two": {"random_apply": (2,)},
    "none to four": {"random_apply": (0, 4)},
    "weights": {"random_apply": 3, "random_apply_weights": [1.0, 5.0, 1.0, 1.0, 0.0, 2.0, 1.0]},
    "again": {"random_apply": 12},
}


@pytest.mark.parametrize(("form", "kind"), sweep(FORMS, [K.AugmentationSequential, K.ImageSequential]))
def test_random_apply_forms_replay_in_kornia(form, kind):
    made = kind(*modules(), **FORMS[form])
    augment, images = gpuaug.fuse(made), photographs()
    assert isinstance(internals.program(augment).ops[0], RandomApply)
    assert "left to Kornia" not in repr(augment)
    for seed in range(6):
        draws = augment.draw(images.shape, seed=seed)
        expected = made(as_kornia_takes_them(images), params=draws.as_kornia())
        # A hue at a threshold may fall on either side of it.
        assert_values(augment(images, draws=draws), expected, atol=2e-4, share=2e-3, draws=draws)


@left_to_kornia
def test_random_apply_moves_masks_and_changes_sizes():
    made = K.AugmentationSequential(
        K.RandomVerticalFlip(),
        K.AugmentationSequential(
            K.RandomResizedCrop((20, 28)),
            K.CenterCrop((16, 17)),  # the size of the other crop: either may be first
            K.ImageSequential(K.RandomInvert(), K.RandomErasing(p=1.0)),
            K.RandomMedianBlur(),
            K.RandomCrop((16, 17), p=0.5),
            random_apply=(0, 3),
        ),
        K.Resize((12, 14)),
        data_keys=["input", "mask"],
    )
    augment, images = gpuaug.fuse(made), photographs(1, dtype=torch.float32)
    masks = (images[:, :1] * 3).round()
    for seed in range(15):
        draws = augment.draw(images.shape, seed=seed)
        names = {item.name for item in draws.as_kornia()[1].data}
        expected = made(images, masks, params=draws.as_kornia())
        got = augment(images, masks, draws=draws)
        assert got[1].shape == expected[1].shape
        # An equalisation makes jumps of the last bit of what it is given.
        if "RandomMedianBlur_3" not in names:
            torch.testing.assert_close(got[0], expected[0], atol=5e-5, rtol=0)
            assert_values(got[1], expected[1], share=0.02)


def test_random_apply_picks_have_kornia_distribution():
    for options in (
        {"random_apply": (1, 2), "random_apply_weights": [1.0, 2.0, 3.0]},
        {"random_apply": 1, "random_apply_weights": [1.0, 2.0, 20.0]},
        {"random_apply": 4},
    ):
        made = K.ImageSequential(K.RandomHorizontalFlip(), K.RandomInvert(), K.RandomVerticalFlip(), **options)
        augment, calls = gpuaug.fuse(made), 900
        torch.manual_seed(0)
        theirs = Counter(tuple(p.name for p in made.forward_parameters(torch.Size((1, 3, 4, 4)))) for _ in range(calls))
        ours = Counter(tuple(p.name for p in augment.draw((1, 3, 4, 4), seed=seed).as_kornia()) for seed in range(calls))
        assert set(ours) == set(theirs)
        assert all(abs(ours[path] - theirs[path]) < 5 * (ours[path] + theirs[path]) ** 0.5 for path in ours)


def test_random_apply_with_zero_weights_picks_nothing():
    made = K.ImageSequential(K.RandomInvert(p=1.0), random_apply=1, random_apply_weights=[0.0])
    assert_replays(made, photographs())


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        ([K.RandomMixUpV2()], "random_apply over a mix"),
        ([auto.TrivialAugment()], "random_apply over modules that pick modules themselves"),
        ([K.ImageSequential(K.ImageSequential(K.RandomInvert()))], "random_apply over containers in containers"),
    ],
)
@left_to_kornia
def test_random_apply_settings_left_to_kornia(inside, reason):
    made = K.AugmentationSequential(K.RandomInvert(), *inside, random_apply=True)
    assert reason in str(gpuaug.fuse(made).explain((4, 3, 16, 16)))
    assert gpuaug.fuse(made)(photographs()).shape == photographs().shape


@pytest.mark.filterwarnings("ignore:No module of Kornia is fused")
def test_random_apply_of_unknown_kornia_versions_is_left_to_kornia(monkeypatch):
    monkeypatch.setattr(kornia, "version", lambda name: "1.3.0")
    for made in (K.ImageSequential(K.RandomInvert(), random_apply=True), auto.TrivialAugment()):
        assert "Kornia 1.3.0 is not one of the tested versions" in str(gpuaug.fuse(made).explain())


def test_random_apply_compiles_few_programs():
    augment = gpuaug.fuse(K.ImageSequential(*modules(), random_apply=True))
    assert len(programs(augment, (4, 3, 32, 32), 100)) <= 20


def test_explain_says_how_many_modules_random_apply_picks():
    made = gpuaug.fuse(K.ImageSequential(*modules(), random_apply=(2, 3))).explain((4, 3, 16, 16))
    assert made.launches == 6
    assert "for each batch 2 to 3 of flip left and right, jitter, affine, invert, contrast" in str(made)
