"""timm's transforms, as create_transform makes them, fused."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from support.batches.ragged import images_of, pack
from support.comparison.replay import photographs
from support.comparison.statistics import apart
from support.comparison.torchvision_replay import assert_replays
from support.comparison.values import assert_values
from torchvision.transforms import v2

import gpuaug
from gpuaug.fusion.lower import by_name
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.sampler import ArraySampler, Sampler
from gpuaug.fusion.ops.torchvision import timm as ops

timm_data = pytest.importorskip("timm.data")
transforms = pytest.importorskip("timm.data.transforms")
random_erasing = pytest.importorskip("timm.data.random_erasing")

SIDE = 32
SIZES = [(37, 52), (64, 40), (48, 48), (90, 33)]


def made(**settings):
    return timm_data.create_transform(**{"input_size": SIDE, "interpolation": "bicubic", **settings})


EVAL = {
    "center": {},
    "center, all": {"crop_pct": 1.0},
    "center, not square": {"input_size": (3, 24, 32)},
    "squash": {"crop_mode": "squash"},
    "border": {"crop_mode": "border"},
    "border, all": {"crop_mode": "border", "crop_pct": 1.0, "interpolation": "bilinear"},
    "border, not square": {"crop_mode": "border", "input_size": (3, 24, 40)},
    "prefetcher": {"use_prefetcher": True},
}


@pytest.mark.parametrize("name", EVAL)
def test_evaluation_is_one_launch_within_rounding_of_pillow(name):
    transform = made(**EVAL[name])
    images = images_of(SIZES)
    wanted = torch.stack([transform(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in images])
    augment = gpuaug.fuse(transform, ragged=True)
    assert augment.explain(pack(images)).launches == 1
    # Pillow rounds to bytes, twice; a normalised byte is 1/58.
    atol = 2 if wanted.dtype == torch.uint8 else 2.01 / 255 / 0.224
    assert_values(augment(pack(images)), wanted, atol=atol)
    alone = torch.cat([gpuaug.fuse(transform)(image[None]) for image in images])
    assert_values(alone, wanted, atol=atol)


TRAIN = {
    "rrc": {},
    "rrc, bilinear": {"interpolation": "bilinear", "scale": (0.3, 0.6), "ratio": (0.5, 2.0)},
    "rkrc": {"train_crop_mode": "rkrc"},
    "rkrr": {"train_crop_mode": "rkrr", "scale": (0.5, 1.2), "ratio": (0.8, 1.25)},
    "vflip": {"vflip": 0.5, "hflip": 0.0},
    "erased": {"re_prob": 0.6},
    "simclr": {
        "grayscale_prob": 0.3,
        "gaussian_blur_prob": 0.5,
        "color_jitter": (0.4, 0.4, 0.4, 0.1),
        "color_jitter_prob": 0.8,
    },
}


@pytest.mark.parametrize("name", TRAIN)
def test_training_is_fused_entirely_and_replays(name):
    transform = made(is_training=True, **{"color_jitter": None, **TRAIN[name]})
    assert_replays(transform, photographs(12, 3, 48, 56, dtype=torch.float32), atol=1e-3, share=1e-4)
    assert "left to" not in repr(gpuaug.fuse(transform, ragged=True))
    images = images_of(SIZES)
    assert gpuaug.fuse(transform, ragged=True)(pack(images)).shape == (len(images), 3, SIDE, SIDE)


class Numbers:
    """Python's random, whose numbers are given: those of gates, of the scale and of the ratio."""

    def __init__(self, numbers, scales):
        self._gates, self._scales = iter(numbers[::2]), scales
        self._scale, self._aspect = numbers[1::2]

    def random(self):
        return next(self._gates)

    def uniform(self, low, high):
        return low + (self._scale if (low, high) == self._scales else self._aspect) * (high - low)


@pytest.mark.parametrize("area", [False, True])
def test_drawn_sizes_equal_timms_for_the_same_numbers(area, monkeypatch):
    scales = (0.7, 1.2)
    transform = transforms.ResizeKeepRatio(
        (24, 32),
        0.3,
        "bicubic",
        random_scale_prob=0.5,
        random_scale_range=scales,
        random_scale_area=area,
        random_aspect_prob=0.6,
    )
    op = ops.ResizeKeepRatio("", transform, "bytes")
    rng = np.random.default_rng(0)
    for height, width in rng.integers(8, 400, (200, 2)).tolist():
        numbers = rng.random(4, np.float32)
        monkeypatch.setattr(transforms, "random", Numbers(numbers.astype(float).tolist(), scales))
        size = Size(1, 3, height, width)
        ((_, mine),) = op.calls(op.draw(ArraySampler(numbers[:, None]), size), 0, size)
        assert mine["size"] == list(transform(torch.empty(3, height, width)).shape[1:])


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
def test_the_middle_is_cropped_or_padded_as_by_timm(mode):
    for height, width in [(20, 50), (33, 31), (20, 21), (41, 47), (24, 30)]:
        transform = transforms.CenterCropOrPad((24, 30), fill=10 if mode == "constant" else 0, padding_mode=mode)
        images = photographs(2, 3, height, width)
        assert_values(gpuaug.fuse(transform)(images), transform(images))


def drawn(transform, size, name, keys, count=4000):
    """Arguments of a call of torchvision's function ``name``, for the images that it is called for."""
    calls = gpuaug.fuse(v2.Compose([transform])).draw((count, 3, *size), seed=0, dtype=torch.float32).as_torchvision()
    found = [arguments for each in calls for call, arguments in each if call == name]
    return {key: np.array([arguments[key] for arguments in found]) for key in keys}


def test_windows_and_rectangles_have_timms_distributions():
    random.seed(0)
    image = torch.empty(3, 40, 60)
    crop = transforms.RandomResizedCropAndInterpolation(SIDE, (0.2, 0.9), (0.6, 1.7))
    theirs = np.array([crop.get_params(image, crop.scale, crop.ratio) for _ in range(4000)]).T
    ours = drawn(crop, (40, 60), "resized_crop", ["top", "left", "height", "width"])
    assert all(apart(theirs[index], values) < 1 for index, values in enumerate(ours.values()))
    pad = transforms.RandomCropOrPad((50, 40))
    theirs = np.array([pad.get_params(image, pad.size) for _ in range(4000)]).T
    ours = drawn(pad, (40, 60), "crop", ["top", "left"])
    assert apart(theirs[0], ours["top"] - 10) < 1
    assert apart(theirs[1], ours["left"]) < 1
    erase = random_erasing.RandomErasing(0.7, 0.05, 0.4, 0.4, device="cpu")
    ours = drawn(erase, (40, 60), "erase", ["i", "j", "h", "w"])
    holes = [torch.nonzero(erase(torch.ones(1, 40, 60))[0] == 0) for _ in range(4000)]
    theirs = np.array([[*hole.min(0).values, *(hole.max(0).values - hole.min(0).values + 1)] for hole in holes if len(hole)]).T
    assert abs(len(ours["i"]) - theirs.shape[1]) < 5 * (2 * 4000 * 0.21) ** 0.5
    assert all(apart(theirs[index], values) < 1 for index, values in enumerate(ours.values()))


REFUSED = {
    "random interpolation": ({"interpolation": "random"}, {"interpolation": "bicubic"}, "Pass interpolation='bicubic' to"),
    "several rectangles": ({"re_prob": 0.5, "re_count": 3}, {"re_count": 1}, "Pass re_count=1 to create_transform"),
    "one colour": ({"re_prob": 0.5, "re_mode": "rand"}, {"re_mode": "const"}, "Pass re_mode='const' to create_transform"),
    "RandAugment": ({"auto_augment": "rand-m9-mstd0.5-inc1"}, {"auto_augment": None}, "Write v2.RandAugment(…) instead"),
    "AutoAugment": ({"auto_augment": "original"}, {"auto_augment": None}, "Write v2.AutoAugment() instead"),
    "AugMix": ({"auto_augment": "augmix-m5-w4-d2"}, {"auto_augment": None}, "Write v2.AugMix(…) instead"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torchvision_has_no_transform_for_is_refused_with_what_to_do(name):
    settings, others, way_out = REFUSED[name]
    with pytest.raises(gpuaug.ArgumentTypeError) as raised:
        gpuaug.fuse(made(is_training=True, **settings))
    assert way_out in str(raised.value)
    gpuaug.fuse(made(is_training=True, **{**settings, **others}))


def test_pixels_that_are_erased_by_noise_are_fused():
    augment = gpuaug.fuse(made(is_training=True, re_prob=1.0, re_mode="pixel"))
    lines = augment.explain((2, 3, 300, 400)).lines
    assert "erase" in str(lines)
    assert not any(line.reason for line in lines)


@pytest.mark.parametrize("name", [name for name in by_name.REPLAYS if name.startswith("timm.")])
def test_a_class_of_another_version_is_recognized_by_its_images(name, monkeypatch):
    class_ = getattr(transforms, name.partition(".")[2], None) or random_erasing.RandomErasing
    monkeypatch.setattr("timm.__version__", "99.0")
    by_name._version_reason.cache_clear()
    arguments, _ = by_name.REPLAYS[name]
    assert by_name.difference_reason(class_(*arguments), class_) is None
    method = "forward" if issubclass(class_, torch.nn.Module) else "__call__"
    other = type(class_.__name__, (class_,), {"__module__": class_.__module__, method: lambda self, image: image + 1})
    reason = f"{class_.__name__} of timm 99.0 returns other images than in the tested versions"
    assert by_name.difference_reason(other(*arguments), other) == reason


def test_another_version_of_a_transform_is_left():
    class ResizeKeepRatio(transforms.ResizeKeepRatio):
        __module__ = "timm.data.transforms"

        def __call__(self, image):
            return v2.functional.resize(image, [9, 9])

    with pytest.warns(gpuaug.GpuAugWarning, match=r"ResizeKeepRatio of timm \d.* returns other images than in the tested"):
        augment = gpuaug.fuse(v2.Compose([ResizeKeepRatio(8)]))
    assert augment(photographs()).shape[-2:] == (9, 9)


@pytest.mark.parametrize("chances", [(0.5, 0.6), (1.0, 0.0), (0.0, 1.0)])
def test_drawn_sizes_lie_in_the_bounds_that_are_said(chances):
    scale, aspect = chances
    transform = transforms.ResizeKeepRatio(
        (64, 48), 1.0, random_scale_prob=scale, random_scale_range=(0.5, 1.6), random_aspect_prob=aspect
    )
    op = ops.ResizeKeepRatio("", transform, "bytes")
    size = Size(5000, 3, 90, 200)
    out = op.out_drawn(op.draw(Sampler((0,), 5000), size), size)
    bounds = op.out_bounds(size)
    for drawn_sides, sides in (
        (out.height, [each.height for each in bounds]),
        (out.width, [each.width for each in bounds]),
    ):
        assert min(sides) <= drawn_sides.min() <= min(sides) + 2
        assert max(sides) - 2 <= drawn_sides.max() <= max(sides)


def test_resize_in_a_choice_keeps_the_size_of_samples_that_skip_it():
    resize = transforms.ResizeKeepRatio(20, interpolation="bilinear", random_scale_prob=1.0, random_scale_range=(0.6, 0.9))
    pipeline = [v2.RandomChoice([resize, v2.RandomCrop(12)]), transforms.CenterCropOrPad(12)]
    assert_replays([*pipeline, v2.ToDtype(torch.float32, scale=True)], photographs(20), atol=2 / 255)
