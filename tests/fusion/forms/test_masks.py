"""Masks under the geometry, against Kornia on the same draws."""

import kornia.augmentation as K
import pytest
import torch
from support.batches.pairwise import sweep
from support.comparison.replay import left_to_kornia, photographs
from support.comparison.values import assert_values
from support.targets.detection import masks

import gpuaug

EXACT = {
    "flips": lambda p: [K.RandomHorizontalFlip(p=p), K.RandomVerticalFlip(p=p)],
    "crop": lambda p: [K.RandomCrop((14, 20)), K.RandomHorizontalFlip(p=p)],
    "crop, padded": lambda p: [K.RandomHorizontalFlip(p=p), K.RandomCrop((30, 44), padding=(3, 5, 2, 7), fill=1.0)],
    "crop, reflected": lambda p: [K.RandomCrop((30, 44), padding=7, padding_mode="reflect")],
    "crop, replicated": lambda p: [K.RandomCrop((30, 44), padding=7, padding_mode="replicate")],
    "crop, padded with a colour": lambda p: [K.RandomCrop((30, 44), padding=7, fill=(0.2, 0.4, 0.6))],
    "centre, pad": lambda p: [K.CenterCrop((20, 30)), K.PadTo((40, 50), pad_value=1.0)],
    "resized crop": lambda p: [K.RandomResizedCrop((20, 24)), K.RandomVerticalFlip(p=p)],
    "resized crop, squares": lambda p: [K.RandomResizedCrop((20, 24), align_corners=False)],
    "resized crop, nearest": lambda p: [K.RandomResizedCrop((20, 24), resample="nearest")],
    "resize up": lambda p: [K.RandomHorizontalFlip(p=p), K.Resize((50, 77))],
    "resize down": lambda p: [K.Resize((16, 23)), K.PadTo((30, 30))],
    "resize by half": lambda p: [K.Resize((16, 24), align_corners=False)],
    "pad, resize, crop": lambda p: [K.PadTo((40, 50)), K.Resize((33, 44)), K.RandomCrop((30, 40), padding=4)],
    "pads between two classes": lambda p: [
        K.PadTo((40, 50), pad_value=2.75),
        K.Resize((33, 44)),
        K.RandomCrop((30, 40), padding=4, fill=0.5),
    ],
    "quarters": lambda p: [K.RandomRotation90((-3, 3), p=p)],
    "colour alone": lambda p: [K.RandomInvert(p=p), K.RandomGaussianBlur((3, 3), (0.5, 1.0), p=p)],
    "erasing": lambda p: [K.RandomHorizontalFlip(p=p), K.RandomErasing((0.1, 0.5), p=p), K.RandomVerticalFlip(p=p)],
    "erasing after a blur": lambda p: [K.RandomGaussianBlur((3, 3), (0.5, 1.0)), K.RandomErasing((0.1, 0.5), p=p)],
    "erasing twice": lambda p: [K.RandomErasing((0.1, 0.3), value=0.5, p=p), K.RandomErasing((0.1, 0.3), p=p)],
    "a module of Kornia's between": lambda p: [
        K.RandomHorizontalFlip(p=p),
        K.RandomMedianBlur(7, p=p),
        K.RandomResizedCrop((20, 24)),
    ],
}

WARPED = {
    "rotation": lambda p: [K.RandomHorizontalFlip(p=p), K.RandomRotation(45.0, p=p), K.RandomCrop((20, 30))],
    "rotation, nearest": lambda p: [K.RandomRotation(45.0, resample="nearest", p=p)],
    "affine": lambda p: [K.RandomAffine(30.0, (0.2, 0.1), (0.7, 1.3), (5.0, 20.0), p=p), K.RandomVerticalFlip(p=p)],
    "affine, border": lambda p: [K.RandomAffine(30.0, (0.2, 0.1), padding_mode="border", p=p)],
    "shear": lambda p: [K.RandomShear((-10.0, 20.0), p=p)],
    "translation": lambda p: [K.RandomTranslate((-0.2, 0.3), (-0.1, 0.1), p=p)],
    "perspective": lambda p: [K.RandomPerspective(0.5, p=p), K.RandomHorizontalFlip(p=p)],
}

DTYPES = [torch.uint8, torch.bool, torch.int64, torch.int32, torch.float32, torch.float64]


def followed(modules, images, given, seed=0, **options):
    """(what Kornia makes of masks, what fuse makes of them, Kornia's pipeline) on the same draws."""
    pipeline = K.AugmentationSequential(*modules, data_keys=["input", "mask"], **options)
    augment = gpuaug.fuse(pipeline)
    shape = images.shape if images.ndim == 4 else (1, *images.shape)
    draws = augment.draw(shape, seed=seed)
    _, expected = pipeline(images.float() / 255, given, params=draws.as_kornia())
    _, got = augment(images, given, draws=draws)
    assert got.dtype == expected.dtype == given.dtype
    assert got.shape == expected.shape
    return expected, got, pipeline


@pytest.mark.parametrize(("name", "p"), sweep(EXACT, [0.5, 0.0, 1.0]))
@left_to_kornia
def test_masks_under_crops_flips_and_resizes_equal_kornia(name, p):
    for seed in range(3):
        expected, got, _ = followed(EXACT[name](p), photographs(5), masks(5, 1, 32, 48, seed=seed), seed)
        assert_values(got, expected)


@pytest.mark.parametrize(("name", "p"), sweep(WARPED, [0.5, 0.0, 1.0]))
def test_masks_under_warps_take_the_nearest_pixel(name, p):
    for seed in range(3):
        expected, got, pipeline = followed(WARPED[name](p), photographs(5), masks(5, 2, 32, 48, seed=seed), seed)
        ties = near_ties(pipeline.transform_matrix, *got.shape[2:])
        assert ties.float().mean() < 0.02
        assert_values(torch.where(ties, 0, got), torch.where(ties, 0, expected))


def near_ties(matrix, height, width):
    """(B, 1, H, W): where an output pixel falls within 0.001 of half way between two input pixels."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack((x, y, torch.ones_like(x)), -1).double() @ matrix.double().inverse().mT[:, None]
    places = places[..., :2] / places[..., 2:]
    return ((places - places.floor() - 0.5).abs() < 1e-3).any(-1)[:, None]


MANY_SHAPES = [(5, 1, 32, 48), (5, 4, 32, 48), (5, 32, 48)]
OF_SHAPES = ["pads between two classes", "pad, resize, crop", "resized crop", "erasing", "quarters"]


@pytest.mark.parametrize(("name", "shape", "dtype"), sweep(OF_SHAPES, MANY_SHAPES, DTYPES), ids=str)
def test_masks_keep_their_dtype_and_shape(name, shape, dtype):
    expected, got, _ = followed(EXACT[name](0.5), photographs(5), masks(*shape, dtype=dtype))
    assert_values(got, expected)


RARE = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.complex64]
"""Types that torch itself hardly computes with, and Kornia not at all."""


@pytest.mark.parametrize(("name", "dtype"), sweep(["crop, padded", "pad, resize, crop", "erasing", "affine"], RARE), ids=str)
def test_masks_of_rare_types_follow_as_others_do(name, dtype):
    modules = {**EXACT, **WARPED}[name](0.5)
    augment, images, given = gpuaug.fuse(modules), photographs(5), masks(5, 2, 32, 48)
    draws, keys = augment.draw(images.shape, seed=1), ["input", "mask"]
    _, expected = augment(images, given, data_keys=keys, draws=draws)
    _, got = augment(images, given.to(dtype), data_keys=keys, draws=draws)
    assert_values(got.view(torch.uint8), expected.to(dtype).view(torch.uint8))


@pytest.mark.parametrize("name", ["crop, padded", "resized crop", "erasing", "quarters"])
def test_masks_of_an_empty_batch(name):
    followed(EXACT[name](0.5), photographs(0), masks(0, 1, 32, 48))


@pytest.mark.parametrize(
    ("name", "shape", "keepdim"),
    sweep(["flips", "resized crop", "erasing", "colour alone"], [(3, 32, 48), (1, 32, 48), (1, 1, 32, 48)], [False, True]),
    ids=str,
)
def test_masks_of_one_image(name, shape, keepdim):
    expected, got, _ = followed(EXACT[name](1.0), photographs(1)[0], masks(*shape), keepdim=keepdim)
    assert_values(got, expected)


@pytest.mark.parametrize("shape", [(5, 32, 48), (5, 1, 32, 48), (5, 3, 32, 48)], ids=str)
def test_keepdim_keeps_masks_without_channels(shape):
    expected, got, _ = followed(EXACT["resized crop"](1.0), photographs(5), masks(*shape), keepdim=True)
    assert_values(got, expected)


def test_masks_keep_int64_values_beyond_float32():
    given = masks(2, 1, 32, 48, dtype=torch.int64) + 2**53
    _, got = gpuaug.fuse(K.RandomHorizontalFlip(p=1.0))(photographs(2), given, data_keys=["input", "mask"])
    assert_values(got, given.flip(3))


def test_masks_keep_nan_and_inf():
    given = torch.full((2, 1, 32, 48), torch.nan)
    augment = gpuaug.fuse([K.RandomCrop((40, 40), padding=10), K.RandomRotation(45.0, p=1.0)])
    images = photographs(2)
    draws = augment.draw(images.shape, seed=0)
    _, got = augment(images, given, data_keys=["input", "mask"], draws=draws)
    _, ones = augment(images, torch.ones_like(given), data_keys=["input", "mask"], draws=draws)
    assert_values(got.isnan(), ones == 1)


def test_mask_strides_make_no_difference():
    given = masks(5, 2, 32, 48)
    for name in ("resized crop", "crop, padded", "erasing"):
        _, plain, _ = followed(EXACT[name](0.5), photographs(5), given)
        for laid_out in (given.to(memory_format=torch.channels_last), given.repeat_interleave(2, 3)[..., ::2]):
            assert_values(followed(EXACT[name](0.5), photographs(5), laid_out)[1], plain)
