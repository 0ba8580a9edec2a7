"""How large the images of a plan may be: as far as float32 counts their pixels, and 32 bits their values. And how small."""

import re

import kornia.augmentation as K
import pytest
import torch
from support.batches.ragged import pack
from support.comparison.replay import left_to_kornia
from torchvision.transforms import v2

import gpuaug

FLIP = [K.RandomHorizontalFlip(p=1.0), K.PadTo((1, 4))]
TURN = [K.RandomRotation90((2, 2), p=1.0), K.PadTo((2, 4))]


def raises(text):
    return pytest.raises(gpuaug.ArgumentError, match=re.escape(text))


def numbered(height, width):
    """One image whose last columns can be told apart."""
    images = torch.zeros(1, 1, height, width, dtype=torch.uint8)
    images[..., -4:] = torch.tensor([10, 20, 30, 40], dtype=torch.uint8)
    return images


def test_flip_of_fewer_than_2_24_columns_takes_the_last_ones():
    got = gpuaug.fuse(FLIP)(numbered(1, 2**24 - 1))
    assert (got * 255).round().flatten().tolist() == [40, 30, 20, 10]


def test_warp_of_2_20_columns_takes_the_last_ones():
    got = gpuaug.fuse(TURN)(numbered(2, 2**20))
    torch.testing.assert_close(got[0, 0] * 255, torch.tensor([[40.0, 30.0, 20.0, 10.0]] * 2), atol=1e-2, rtol=0)


SIDES = {
    "flip": (lambda: K.RandomHorizontalFlip(), 2**24, "2**24 - 1"),
    "crop": (lambda: K.RandomCrop((1, 1)), 2**24, "2**24 - 1"),
    "resized crop": (lambda: K.RandomResizedCrop((1, 4)), 2**24, "2**24 - 1"),
    "erasing": (lambda: K.RandomErasing(), 2**24, "2**24 - 1"),
    "cutmix": (lambda: K.RandomCutMixV2(use_correct_lambda=True), 2**24, "2**24 - 1"),
    "rotation": (lambda: K.RandomRotation(9.0), 2**20 + 1, "2**20"),
    "perspective": (lambda: K.RandomPerspective(), 2**20 + 1, "2**20"),
}


@pytest.mark.parametrize("name", SIDES)
def test_sides_that_float32_does_not_count_are_refused(name):
    make, side, most = SIDES[name]
    module = make()
    augment = gpuaug.fuse([K.RandomInvert(), module])
    text = f"images must have sides of at most {most} pixels for {type(module).__name__}_1, got "
    for height, width in ((2, side), (side, 2)):
        images = torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(1, 1, height, width)
        with raises(f"{text}{height}x{width}. Split or downsample them in the dataset."):
            augment(images)
        with raises(text):
            augment.draw(images.shape)
        assert augment.draw((1, 1, min(height, side - 1), min(width, side - 1))).shape


def test_output_that_float32_does_not_count_is_refused():
    for module in (K.Resize((2**24, 1)), K.PadTo((1, 2**24)), K.RandomResizedCrop((2**24, 2))):
        with raises(f"at most 2**24 - 1 pixels for {type(module).__name__}_0, got "):
            gpuaug.fuse([module, K.CenterCrop(1)]).draw((1, 1, 4, 4))
    with raises("at most 2**24 - 1 pixels for PadTo_1, got 1x16777216."):
        gpuaug.fuse([K.RandomHorizontalFlip(), K.PadTo((1, 2**24))], ragged=True).draw(pack([torch.zeros(3, 5, 4).byte()]))


def test_pixels_that_nothing_counts_may_be_as_many_as_there_are():
    gpuaug.fuse([K.Normalize(0.5, 0.25), K.RandomInvert()]).draw((1, 1, 1, 2**30))


RESIZES = {
    "resized crop": K.RandomResizedCrop((9, 9)),
    "resize": K.Resize((9, 9)),
    "padding": K.PadTo((9, 9)),
    "replicated padding": K.PadTo((9, 9), pad_mode="replicate"),
    "resized crop of torchvision": v2.RandomResizedCrop((9, 9)),
    "resize of torchvision": v2.Resize((9, 9)),
}


@pytest.mark.parametrize("name", RESIZES)
@pytest.mark.parametrize(("height", "width"), [(0, 8), (8, 0), (0, 0)])
def test_images_without_pixels_are_not_made_larger(name, height, width):
    augment = gpuaug.fuse([RESIZES[name]])
    text = f"images must have pixels for {type(RESIZES[name]).__name__}_0, got {height}x{width}. Leave them out of the dataset."
    with raises(text):
        augment(torch.zeros(2, 3, height, width, dtype=torch.uint8))
    assert augment(torch.zeros(0, 3, 8, 8, dtype=torch.uint8)).shape == (0, 3, 9, 9)


SIZED_BY_THE_IMAGE = {
    "one side": lambda: v2.Resize(9),
    "one side, limited": lambda: v2.Resize(9, max_size=12),
    "longer side": lambda: v2.Resize(None, max_size=9),
    "RandomResize": lambda: v2.RandomResize(5, 9),
    "RandomShortestSize": lambda: v2.RandomShortestSize([9]),
    "RandomShortestSize, limited": lambda: v2.RandomShortestSize([9], max_size=12),
    "ScaleJitter": lambda: v2.ScaleJitter((11, 17)),
    "RandomRotation": lambda: v2.RandomRotation((20, 30), expand=True),
    **{f"{side} side of Kornia": lambda side=side: K.Resize(9, side=side) for side in ("short", "long", "vert", "horz")},
    "LongestMaxSize": lambda: K.LongestMaxSize(9),
    "SmallestMaxSize": lambda: K.SmallestMaxSize(9),
}


@left_to_kornia
@pytest.mark.filterwarnings("ignore:.*left to torchvision|.*is not fused", "error::RuntimeWarning")
@pytest.mark.parametrize("name", SIZED_BY_THE_IMAGE)
@pytest.mark.parametrize(("height", "width"), [(0, 8), (8, 0), (0, 0), (2, 24), (24, 2)])
def test_images_without_pixels_before_a_resize_are_a_clear_error(name, height, width):
    """Directly, or of 2x24 pixels as results of a resize to at most 8 pixels."""
    first = [v2.Resize(7, max_size=8)] if height * width else []
    augment = gpuaug.fuse([*first, SIZED_BY_THE_IMAGE[name](), v2.CenterCrop((38, 17))])
    with pytest.raises(Exception) as raised:  # noqa: PT011
        augment(torch.zeros(1, 3, height, width, dtype=torch.uint8))
    from_library = "gpuaug: raised by " in "".join(getattr(raised.value, "__notes__", ()))
    assert from_library or re.match("images must (have pixels for|fit) .*, got [0-9]+x[0-9]+", str(raised.value))


def test_images_of_2_31_values_are_refused():
    for modules, shape in (
        ([K.Normalize(0.5, 0.25)], (1, 4, 2**15, 2**14)),
        ([K.RandomHorizontalFlip()], (1, 4, 2**15, 2**14)),
        ([K.Resize((2**15, 2**14))], (1, 4, 8, 8)),
    ):
        with raises("An image must have fewer than 2**31 values, got 2147483648 at "):
            gpuaug.fuse(modules).draw(shape)
        gpuaug.fuse(modules).draw((1, 3, *shape[2:]))


def test_ragged_warp_of_more_than_2_20_columns_is_refused():
    augment = gpuaug.fuse([K.RandomRotation(9.0), K.CenterCrop((2, 4))], ragged=True)
    images = pack([torch.zeros(1, 3, 8).byte(), torch.zeros(1, 2, 2**20 + 1).byte()])
    text = "images must have sides of at most 2**20 pixels for RandomRotation_0, got 2x1048577 at 1 of the batch. Split"
    with raises(text):
        augment(images)
    with raises(text):
        augment.draw(images)
    augment.draw(pack([torch.zeros(1, 2, 2**20).byte()]))


def test_warp_of_a_drawn_size_of_more_than_2_20_columns_is_refused():
    augment = gpuaug.fuse([v2.RandomZoomOut(side_range=(3.0, 4.0)), v2.RandomRotation(9.0), v2.CenterCrop(1)])
    with raises("images must have sides of at most 2**20 pixels for RandomRotation_1, got 8x1048580. Split or downsample them"):
        augment.draw((1, 1, 2, 2**18 + 1))
    augment.draw((1, 1, 2, 2**18))


@left_to_kornia
def test_what_kornia_runs_is_kornias_to_count():
    assert gpuaug.fuse(K.RandomMedianBlur(7, p=0.0)).draw((1, 1, 1, 2**24)).shape == (1, 1, 1, 2**24)
