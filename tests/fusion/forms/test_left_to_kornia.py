"""Targets beside modules that Kornia runs: each follows the pixels, or is refused. Labels are mixed, or are refused."""

import itertools
import warnings
from inspect import signature

import kornia.augmentation as K
import pytest
import torch
from kornia.augmentation import auto
from kornia.core.exceptions import BaseError
from support.comparison.replay import overriding
from support.comparison.values import assert_values
from torch import nn
from torchvision import tv_tensors

import gpuaug
from gpuaug.fusion.lower.kornia import LOWERED

SIDE = 64


class Shift(nn.Module):
    """A user's module that moves pixels."""

    def forward(self, images):
        return images.roll(9, -1)


class OwnWarp(K.AugmentationBase2D):
    """A user's augmentation that moves pixels and masks. Kornia hands boxes and keypoints to geometric ones alone."""

    def apply_transform(self, images, params, flags, transform=None):
        return images.roll(9, -1)

    apply_transform_mask = apply_transform


class OwnShift(K.GeometricAugmentationBase2D):
    """A user's augmentation with a matrix, by which Kornia moves boxes and keypoints."""

    def compute_transformation(self, images, params, flags):
        matrix = torch.eye(3).repeat(len(images), 1, 1)
        matrix[:, 0, 2] = 9
        return matrix

    def apply_transform(self, images, params, flags, transform=None):
        return images.roll(9, -1)


SETTINGS = {
    "RandomElasticTransform": {"kernel_size": (31, 31), "sigma": (16.0, 16.0), "alpha": (12.0, 12.0)},
    "RandomThinPlateSpline": {"scale": 0.4},
    "RandomFisheye": dict(
        zip(signature(K.RandomFisheye).parameters, torch.tensor([[0.3, 0.31], [0.3, 0.31], [1.5, 1.6]]), strict=False)
    ),
    "RandomAffine": {"degrees": 30.0},
    "RandomRotation": {"degrees": 30.0},
    "RandomRotation90": {"times": (1, 1)},
    "RandomShear": {"shear": 20.0},
    "RandomTranslate": {"translate_x": (0.1, 0.2)},
    "RandomCrop": {"size": (50, 50)},
    "RandomResizedCrop": {"size": (50, 50), "scale": (0.6, 0.9)},
    "CenterCrop": {"size": 50},
    "Resize": {"size": (50, 50)},
    "PadTo": {"size": (80, 80)},
    "LongestMaxSize": {"max_size": 50},
    "SmallestMaxSize": {"max_size": 50},
}
ALL = {
    name: kind
    for name, kind in vars(K).items()
    if isinstance(kind, type)
    and issubclass(kind, K.AugmentationBase2D | K.MixAugmentationBaseV2)
    and kind.__module__.startswith("kornia.augmentation._2d.")
    and not issubclass(kind, K.IntensityAugmentationBase2D)
    and not name.endswith(("Base2D", "BaseV2"))
    and name != "RandomMosaic"  # each image gets the boxes of four, which a test of one square cannot tell apart
}
LEFT = {name: kind if not issubclass(kind, (*LOWERED,)) else overriding(kind, "apply_func") for name, kind in ALL.items()}


def made(name):
    settings = SETTINGS.get(name, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return LEFT[name](**settings, p=1.0)
        except TypeError:
            return LEFT[name](**settings)


CASES = {
    **{name: lambda name=name: made(name) for name in LEFT},
    "a user's module": Shift,
    "a user's warp": lambda: OwnWarp(p=1.0),
    "a user's shift": lambda: OwnShift(p=1.0),
    "policy": lambda: auto.AutoAugment(),
    "container": lambda: K.ImageSequential(K.RandomElasticTransform(p=1.0, **SETTINGS["RandomElasticTransform"])),
    "container, some": lambda: K.ImageSequential(made("RandomElasticTransform"), Shift(), random_apply=1),
    "warped patches": lambda: K.PatchSequential(made("RandomElasticTransform"), grid_size=(1, 1), patchwise_apply=False),
    "patches": lambda: K.PatchSequential(
        overriding(K.RandomHorizontalFlip, "apply_func")(p=1.0), grid_size=(2, 2), patchwise_apply=False
    ),
}


def middle(values):
    """Coordinates (x, y) of the bright square, or ``None`` if it is gone."""
    bright = (values[0, 0] - values[0, 0].median()).abs()
    if not bright.sum():
        return None
    y, x = torch.meshgrid(*(torch.arange(float(side)) for side in bright.shape), indexing="ij")
    return torch.stack(((bright * x).sum(), (bright * y).sum())) / bright.sum()


@pytest.mark.parametrize("key", ["mask", "bbox_xyxy", "keypoints", "targets"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_targets_follow_the_pixels_or_are_refused(name, key):
    images = torch.zeros(2, 3, SIDE, SIDE)
    images[:, :, 20:28, 20:28] = 1
    boxes, points = torch.tensor([[[20.0, 20.0, 27.0, 27.0]]] * 2), torch.tensor([[[23.5, 23.5]]] * 2)
    records = [{"boxes": torch.tensor([[20.0, 20.0, 28.0, 28.0]])}] * 2
    value = {"mask": images[:, :1].clone(), "bbox_xyxy": boxes, "keypoints": points, "targets": records}[key]
    torch.manual_seed(0)
    try:
        moved, followed = gpuaug.fuse(CASES[name]())(images, value, data_keys=["input", key])
    except (gpuaug.GpuAugError, NotImplementedError, BaseError):
        return
    found = middle(moved)
    if found is None:
        return
    if key == "mask":
        torch.testing.assert_close(middle(followed), found, atol=2.0, rtol=0)
        return
    place = followed[0]["boxes"] if key == "targets" else followed[0]
    centre = place[0] if key == "keypoints" else (place[0, :2] + place[0, 2:]) / 2
    torch.testing.assert_close(centre, found, atol=3.0, rtol=0)


@pytest.mark.filterwarnings("ignore")
def test_masks_of_torchvisions_type_follow_as_named_ones_do():
    masks = torch.randint(0, 9, (2, SIDE, SIDE))
    augment = gpuaug.fuse([OwnShift(p=1.0), K.RandomVerticalFlip(p=1.0)])
    _, got = augment(torch.rand(2, 3, SIDE, SIDE), {"map": tv_tensors.Mask(masks)})
    _, wanted = augment(torch.rand(2, 3, SIDE, SIDE), masks, data_keys=["input", "mask"])
    assert_values(got["map"], wanted)
    assert not torch.equal(wanted, masks)


@pytest.mark.filterwarnings("ignore")
def test_modules_that_move_no_boxes_are_refused_by_name():
    for name in ("RandomElasticTransform", "RandomThinPlateSpline", "RandomFisheye"):
        augment = gpuaug.fuse(made(name))
        others = {"keypoints": torch.rand(2, 1, 2), "bbox_xyxy": torch.rand(2, 1, 4), "mask": torch.rand(2, 1, SIDE, SIDE)}
        if name == "RandomElasticTransform":
            del others["mask"]
        for key, value in others.items():
            text = f"{name} must be fused, .* so that {key} can be transformed with the images, got a module that Kornia runs"
            with pytest.raises(gpuaug.ArgumentError, match=text):
                augment(torch.rand(2, 3, SIDE, SIDE), value, data_keys=["input", key])


class Wrapped(nn.Module):
    """A user's module that calls a module of Kornia."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, images):
        return self.module(images)


INVERT, IMAGES = K.RandomInvert(p=1.0), torch.rand(4, 3, 8, 8)
MIXES = {
    "mixup": K.RandomMixUpV2((0.5, 0.5), p=1.0),
    "cutmix": K.RandomCutMixV2(p=1.0, use_correct_lambda=True),
    "two rectangles": K.RandomCutMixV2(num_mix=2, p=1.0, use_correct_lambda=True),
    "mosaic": K.RandomMosaic((8, 8), p=1.0),
    "the user's": overriding(K.RandomMixUpV2, "apply_transform")((0.5, 0.5), p=1.0),
    "jigsaw": K.RandomJigsaw((2, 2), p=1.0),
}
HOLDERS = {
    "alone": lambda mix: mix,
    "list": lambda mix: [mix, INVERT],
    "container": lambda mix: K.AugmentationSequential(INVERT, mix),
    "nested": lambda mix: K.AugmentationSequential(K.AugmentationSequential(mix)),
    "picked": lambda mix: K.AugmentationSequential(mix, random_apply=1),
    "picked or not": lambda mix: K.AugmentationSequential(mix, random_apply=(0, 1)),
    "beside": lambda mix: [K.AugmentationSequential(mix, INVERT, random_apply=2)],
    "patches": lambda mix: K.PatchSequential(INVERT, mix, random_apply=True, grid_size=(2, 2)),
    "called by the user's": Wrapped,
    "picked, called by the user's": lambda mix: K.AugmentationSequential(Wrapped(mix), INVERT, random_apply=2),
}


@pytest.mark.parametrize("images", [IMAGES, IMAGES[:, None].expand(-1, 2, -1, -1, -1)], ids=["images", "clips"])
@pytest.mark.parametrize("num_classes", [None, 4])
@pytest.mark.filterwarnings("ignore")
def test_labels_are_mixed_or_refused_wherever_the_mix_is(images, num_classes):
    labels, probabilities = torch.arange(4), torch.eye(4)
    outcomes = set()
    for (mix, module), (holder, hold) in itertools.product(MIXES.items(), HOLDERS.items()):
        torch.manual_seed(0)
        augment = gpuaug.fuse(hold(module), num_classes=num_classes)
        try:
            _, out = augment(images, labels, data_keys=["input", "class"])
        except gpuaug.ArgumentError as error:
            if images.ndim == 5 and "a container that Kornia runs on images only" in str(error):
                continue
            refusals = "so that class can be mixed", "data_keys must be among input with RandomMosaic"
            if not any(text in str(error) for text in refusals) or mix == "jigsaw":
                raise
            outcomes.add("refused")
            continue
        outcomes.add("mixed" if mix != "jigsaw" else "unchanged")
        if mix == "jigsaw":
            torch.testing.assert_close(out, labels if num_classes is None else probabilities)
        else:
            mixed = (out[..., 2] > 0).any() if num_classes is None else not torch.equal(out, probabilities)
            assert mixed, (mix, holder)
    assert outcomes == {"refused", "mixed", "unchanged"}
