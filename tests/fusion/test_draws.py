"""What one sample drew, as it can be read: against Kornia's own form of the same draws."""

import kornia.augmentation as K
import pytest
import torch
from kornia.augmentation.auto import RandAugment, TrivialAugment
from support.comparison.replay import left_to_kornia
from support.comparison.values import assert_values

import gpuaug

SHAPE = (6, 3, 16, 18)


def test_draws_of_a_sample_equal_kornia_params():
    augment = gpuaug.fuse(
        [K.RandomResizedCrop((8, 8)), K.RandomRotation(30.0, p=1.0), K.ColorJitter(0.4, 0.3, 0.2, 0.1), K.RandomErasing(p=1.0)]
    )
    draws = augment.draw(SHAPE, seed=1)
    crop, turn, jitter, erase = draws.as_kornia()
    assert len(draws) == 6
    for sample in range(6):
        found = draws.of(sample)
        assert list(found) == ["RandomResizedCrop_0", "RandomRotation_1", "ColorJitter_2", "RandomErasing_3"]
        (x, y), _, (right, bottom), _ = crop["src"][sample].tolist()
        assert found["RandomResizedCrop_0"] == {"x": x, "y": y, "width": right - x + 1, "height": bottom - y + 1}
        assert found["RandomRotation_1"] == {"degrees": turn["degrees"][sample].item()}
        factors = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
        assert found["ColorJitter_2"] == {name: jitter[name][sample].item() for name in factors}
        assert found["RandomErasing_3"] == {name: erase[name][sample].item() for name in ("widths", "heights", "xs", "ys")}


def test_draws_of_color_jitter_leave_unused_factors_out():
    found = gpuaug.fuse(K.ColorJitter(0.4, 0.0, 0.0, 0.1)).draw(SHAPE, seed=1).of(0)
    assert list(found["ColorJitter"]) == ["brightness_factor", "hue_factor"]


@left_to_kornia
def test_draws_of_a_sample_leave_skipped_modules_out():
    augment = gpuaug.fuse(K.AugmentationSequential(K.RandomInvert(), K.RandomVerticalFlip(), K.RandomMedianBlur(7, p=0.5)))
    draws = augment.draw((64, 3, 8, 8), seed=1)
    masks = [item.data["batch_prob"] > 0.5 for item in draws.as_kornia()]
    assert all(0 < mask.sum() < 64 for mask in masks)
    names = ["RandomInvert_0", "RandomVerticalFlip_1", "RandomMedianBlur_2"]
    for sample in range(64):
        assert draws.of(sample) == {name: {} for name, mask in zip(names, masks, strict=True) if mask[sample]}


def test_draws_of_perspective_name_each_coordinate():
    draws = gpuaug.fuse(K.RandomPerspective(p=1.0)).draw(SHAPE, seed=1)
    end = draws.as_kornia()["end_points"]
    found = draws.of(2)["RandomPerspective"]
    assert found == {f"end_points_{k}_{axis}": end[2, k, "xy".index(axis)].item() for k in range(4) for axis in "xy"}
    draws = gpuaug.fuse(K.RandomChannelShuffle(p=1.0)).draw(SHAPE, seed=1)
    assert list(draws.of(0)["RandomChannelShuffle"].values()) == draws.as_kornia()["channels"][0].tolist()
    assert gpuaug.fuse(K.RandomGaussianNoise(p=1.0)).draw(SHAPE, seed=1).of(0) == {"RandomGaussianNoise": {}}


@left_to_kornia
def test_draws_of_modules_left_to_kornia_hold_one_number_per_sample():
    augment = gpuaug.fuse(
        [
            K.RandomMotionBlur(3, 35.0, 0.5, resample="bicubic", p=0.5),
            K.RandomThinPlateSpline(p=1.0),
            K.ImageSequential(K.RandomMedianBlur(7, p=1.0)),
        ]
    )
    draws = augment.draw((4, 3, 16, 16), seed=3)  # as many as the shape has sides, and jitter has factors
    blur = draws.as_kornia()[0]
    mask = blur["batch_prob"] > 0.5
    assert 0 < mask.sum() < 4
    for sample in range(4):
        found = draws.of(sample)
        assert ("RandomMotionBlur_0" in found) == bool(mask[sample])
        assert found["RandomThinPlateSpline_1"] == found["ImageSequential_2/RandomMedianBlur_0"] == {}
        if mask[sample]:
            names = {"ksize_factor", "angle_factor", "direction_factor"}
            assert found["RandomMotionBlur_0"] == {name: blur[name][sample].item() for name in names}


@pytest.mark.parametrize("kind", [RandAugment, TrivialAugment])
@pytest.mark.parametrize("pick", ["batch", "sample"])
@left_to_kornia
def test_draws_of_policies_name_the_picked_operations(kind, pick):
    policy = kind(n=2, m=10) if kind is RandAugment else kind()
    augment = gpuaug.fuse(K.AugmentationSequential(K.RandomInvert(p=1.0), policy), pick=pick)
    draws = augment.draw((32, 3, 16, 16), seed=2)
    images = torch.rand(32, 3, 16, 16)
    told = [draws.of(sample) for sample in range(32)]
    kinds = {tuple(found) for found in told}
    assert (len(kinds) == 1) == (pick == "batch" and all(len(found) == len(told[0]) for found in told))
    for found in told:
        first, *picked = found
        assert first == "RandomInvert_0"
        assert all(name.startswith(f"{kind.__name__}_1/") for name in picked)
        assert len(picked) <= (2 if kind is RandAugment else 1)
    if pick == "batch":
        operations = [item.name for item in draws.as_kornia()[1].data]
        children = dict(policy.named_children())
        ran = [next(iter(dict(children[name].named_children()))) for name in operations]
        assert max(told, key=len).keys() == {"RandomInvert_0", *(f"{kind.__name__}_1/{name}" for name in ran)}
    # A sample that picked nothing is inverted and no more.
    left = [sample for sample, found in enumerate(told) if len(found) == 1]
    assert_values(augment(images, draws=draws)[left], 1 - images[left], atol=1e-5)


@pytest.mark.parametrize("pick", ["batch", "sample"])
def test_draws_of_a_mix_container_name_the_picked_mix(pick):
    mixes = K.AugmentationSequential(K.RandomMixUpV2(p=1.0), K.RandomCutMixV2(p=1.0, use_correct_lambda=True), random_apply=1)
    draws = gpuaug.fuse(K.AugmentationSequential(K.RandomHorizontalFlip(p=1.0), mixes), pick=pick).draw((16, 3, 32, 32), seed=0)
    named = [list(draws.of(sample)) for sample in range(16)]
    assert all(len(names) == 2 and names[1].split("/")[-1].startswith(("RandomMixUp", "RandomCutMix")) for names in named)
    assert len({names[1] for names in named}) == (1 if pick == "batch" else 2)


PICKED = {
    "all": lambda: [K.RandomMedianBlur(7, p=1.0), K.RandomHorizontalFlip(p=0.5)],
    "one": lambda: [K.RandomMedianBlur(7, p=1.0)],
    "two left to Kornia": lambda: [
        K.RandomMedianBlur(7, p=0.5),
        K.RandomFisheye(*[torch.tensor([-0.3, 0.3])] * 2, torch.ones(2)),
    ],
    "fused": lambda: [K.RandomRotation(20.0), K.RandomInvert()],
}


@left_to_kornia
@pytest.mark.parametrize("random_apply", [False, True, 1])
@pytest.mark.parametrize("name", PICKED)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.every(5)
def test_draws_of_clips_of_any_number_replay_in_kornia(name, random_apply):
    for clips, frames in ((3, 1), (2, 3), (1, 2), (1, 1), (2, 2), (0, 2)):
        video = K.VideoSequential(*PICKED[name](), random_apply=random_apply)
        augment, videos = gpuaug.fuse(video), torch.rand(clips, frames, 3, 12, 14)
        for seed in range(3):
            draws = augment.draw(videos.shape, seed=seed, dtype=videos.dtype)
            params, got = draws.as_kornia(), augment(videos, draws=draws)
            if clips:  # Kornia's containers fail for an empty batch
                torch.testing.assert_close(got, video(videos, params=params), atol=1e-4, rtol=0)
