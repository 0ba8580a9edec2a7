"""Ops on other numbers of channels than three: what each library does with them, and what it refuses."""

import itertools

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from kornia.augmentation import auto
from support.batches.pairwise import sweep
from support.comparison.kornia_draws import kornias, ours
from support.comparison.replay import assert_replays as assert_replays_kornia
from support.comparison.replay import photographs
from support.comparison.statistics import apart, together_apart
from support.comparison.torchvision_replay import assert_replays, both
from support.comparison.values import assert_values
from support.ops.op_cases import CASES
from torchvision.transforms import v2

import gpuaug

CHANNELS = [1, 4, 6, 13]
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)


def runs(library, images):
    """Whether a library takes the images, in any of some calls, and in all."""
    outcomes = []
    for seed in range(20 if "Augment" in type(library).__name__ else 1):
        torch.manual_seed(seed)
        try:
            library(images)
        except Exception:
            outcomes.append(False)
        else:
            outcomes.append(True)
    return all(outcomes)


def agrees(augment, images, *, taken):
    """Assert that fuse fuses what the library takes, and refuses by name what it does not."""
    if taken:
        assert all(not line.reason for line in augment.explain(images.shape).lines)
        assert augment(images).shape[:2] == images.shape[:2]
        return
    for call in (lambda: augment(images), lambda: augment.draw(images.shape), lambda: augment.explain(images.shape)):
        with pytest.raises(gpuaug.ArgumentError, match=rf"images must have .* channels for .*, got {images.shape[1]}\. Leave"):
            call()


KORNIA = {
    **{case.name: case.first for kind, case in CASES.items() if not issubclass(kind, K.MixAugmentationBaseV2 | K.PadTo)},
    "jitter, brightness and contrast": lambda: K.ColorJitter(0.4, (0.2, 2.0), p=1.0),
    "jitter, saturation": lambda: K.ColorJitter(saturation=0.4, p=1.0),
    "jitter, hue": lambda: K.ColorJitter(hue=0.1, p=1.0),
    "jitter, fixed order": lambda: K.ColorJitter(0.4, 0.4, 0.4, p=1.0, order=(1, 0)),
    "jiggle, brightness and contrast": lambda: K.ColorJiggle(0.4, 0.4, p=1.0),
    "jiggle, saturation": lambda: K.ColorJiggle(saturation=0.4, p=1.0),
    "RandAugment": lambda: auto.RandAugment(2, 10),
    "AutoAugment": lambda: auto.AutoAugment(),
    "TrivialAugment": lambda: auto.TrivialAugment(),
}


@pytest.mark.parametrize(("name", "channels"), sweep(KORNIA, CHANNELS))
def test_kornias_modules_are_fused_where_kornia_takes_the_channels(name, channels):
    images, module = photographs(2, channels), KORNIA[name]()
    if getattr(module, "p", 1.0) < 1:
        module.p = 1.0
    agrees(gpuaug.fuse(module), images, taken=runs(module, images / 255))


TORCHVISION = {
    "jitter": lambda: v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
    "jitter, brightness": lambda: v2.ColorJitter(0.4),
    "photometric": lambda: v2.RandomPhotometricDistort((0.5, 1.5), p=1.0),
    "grey by chance": lambda: v2.RandomGrayscale(1.0),
    "permuted": lambda: v2.RandomChannelPermutation(),
    "inverted": lambda: v2.RandomInvert(1.0),
    "solarized": lambda: v2.RandomSolarize(128, 1.0),
    "posterized": lambda: v2.RandomPosterize(4, 1.0),
    "blurred": lambda: v2.GaussianBlur(3),
    "sharpened": lambda: v2.RandomAdjustSharpness(2, 1.0),
    "equalized": lambda: v2.RandomEqualize(1.0),
    "autocontrast": lambda: v2.RandomAutocontrast(1.0),
    "erased": lambda: v2.RandomErasing(1.0),
    "RandAugment": lambda: v2.RandAugment(),
    "AutoAugment": lambda: v2.AutoAugment(),
    "TrivialAugmentWide": lambda: v2.TrivialAugmentWide(),
    "AugMix": lambda: v2.AugMix(),
}


@pytest.mark.parametrize(("name", "channels"), [*itertools.product(TORCHVISION, [1]), *sweep(TORCHVISION, [4, 6, 13])])
def test_torchvisions_transforms_are_fused_where_torchvision_takes_the_channels(name, channels):
    images = photographs(2, channels)
    agrees(gpuaug.fuse(TORCHVISION[name]()), images, taken=runs(TORCHVISION[name](), images))


def banded(pipeline, channels, **options):
    """The pipeline before a normalisation of each channel by its own numbers."""
    mean, std = torch.linspace(0.2, 0.8, channels), torch.linspace(0.25, 0.5, channels)
    return K.AugmentationSequential(*pipeline, K.Normalize(mean, std), **options)


MIXED = {
    "shuffle": lambda channels: [K.RandomChannelShuffle(p=0.7)],
    "grey": lambda channels: [K.RandomGrayscale(p=0.7)],
    "grey, weighted": lambda channels: [K.RandomGrayscale(rgb_weights=torch.rand(channels), p=0.7)],
    "jitter": lambda channels: [K.ColorJitter(0.4, (0.2, 2.0), p=0.7)],
    "jiggle": lambda channels: [K.ColorJiggle(0.4, 0.4, p=0.7)],
    "in a row": lambda channels: [
        K.RandomResizedCrop((16, 20)),
        K.RandomChannelDropout(p=0.5),
        K.RandomChannelShuffle(p=0.7),
        K.RandomHorizontalFlip(),
        K.RandomGaussianBlur((3, 3), (0.5, 1.0), p=0.5),
        K.RandomChannelShuffle(p=0.7),
        K.ColorJitter(0.4, 0.9, p=0.7),
        K.RandomGrayscale(p=0.3),
    ],
}


@pytest.mark.parametrize(("name", "channels"), sweep(MIXED, CHANNELS))
def test_ops_that_mix_channels_equal_kornia(name, channels):
    for images in (photographs(6, channels), photographs(6, channels, dtype=torch.float32)):
        pipeline = banded(MIXED[name](channels), channels)
        assert_replays_kornia(pipeline, images, atol=2e-4 if name == "in a row" else 2e-5)
    assert gpuaug.fuse(pipeline).explain(images.shape).launches <= (2 if name != "in a row" else 8)


def test_jitter_of_grey_images_is_kornias():
    pipeline = K.AugmentationSequential(K.ColorJitter(0.4, 0.4, 0.4, p=0.8))
    assert_replays_kornia(pipeline, photographs(6, 1), atol=5e-6)


GREY = {
    "jitter": (lambda: v2.ColorJitter(0.4, 0.9, 0.9, 0.3), 5e-6),
    "photometric": (lambda: v2.RandomPhotometricDistort(), 5e-6),
    "grey": (lambda: v2.RandomGrayscale(0.5), 0),
    "in a row": (lambda: v2.Compose([v2.RandomGrayscale(0.5), v2.RandomInvert(), v2.RandomChannelPermutation()]), 0),
}


@pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")
@pytest.mark.parametrize("name", GREY)
def test_transforms_of_grey_images_equal_torchvision(name):
    make, tolerance = GREY[name]
    assert_replays(make(), photographs(6, 1, dtype=torch.float32), atol=tolerance)


@pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")
def test_grey_of_three_channels_is_made_of_one_by_torchvision():
    images, resize = photographs(3, 1), v2.Resize((16, 20), antialias=False)
    made = gpuaug.fuse([v2.Grayscale(3), resize, TO_FLOAT])(images)
    expected = torch.stack([TO_FLOAT(resize(v2.Grayscale(3)(image))) for image in images])
    assert made.shape == (3, 3, 16, 20)
    assert_values(made, expected, atol=1.01 / 255)


@pytest.mark.parametrize("make", [v2.RandAugment, v2.AutoAugment, v2.TrivialAugmentWide, v2.AugMix])
def test_policies_on_grey_images_equal_torchvision(make):
    for seed in range(3):
        expected, got = both([make(), TO_FLOAT], photographs(12, 1), seed)
        apart = (got - expected).abs() * 255
        assert apart.quantile(0.99) <= 2.1  # the rounding of two operations
        assert apart.mean() < 0.5


@pytest.mark.parametrize("channels", CHANNELS)
def test_permutations_of_channels_equal_torchvision(channels):
    images = photographs(6, channels)
    assert_replays(v2.Compose([v2.RandomHorizontalFlip(), v2.RandomChannelPermutation(), v2.RandomInvert()]), images)


COUNT = 4000


def test_permutations_of_five_channels_have_the_libraries_distribution():
    shape = (COUNT, 5, 8, 8)
    module, transform = K.RandomChannelShuffle(p=1.0), v2.RandomChannelPermutation()
    one, other = (drawn(module, shape, seed)["channels"].numpy() for seed, drawn in enumerate((ours, kornias)))
    calls = gpuaug.fuse(transform).draw(shape, seed=2).as_torchvision()
    torch.manual_seed(3)
    third = np.array([given["permutation"] for ((_, given),) in calls])
    fourth = np.stack([transform.make_params([torch.zeros(5, 2, 2)])["permutation"].numpy() for _ in range(COUNT)])
    for mine, its in ((one, other), (third, fourth)):
        mine, its = ({f"{index}": made[:, index].astype(float) for index in range(5)} for made in (mine, its))
        assert all(apart(mine[name], its[name]) < 1 for name in mine)
        assert together_apart(mine, its) < 1
