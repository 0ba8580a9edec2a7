"""Passes behind which images differ in size: each image as its library makes it by itself, from the same draws."""

import itertools
import re

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support import internals
from support.batches.ragged import copies, images_of, pack, targets_of
from support.comparison.torchvision_replay import replayed
from support.comparison.values import assert_values
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

import gpuaug
from gpuaug.core.ragged import Ragged, Shapes
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.program.sizes import check_canvases
from gpuaug.fusion.table.rows import draws_of_plan_ops

BILINEAR = InterpolationMode.BILINEAR
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)

FIRST = {
    "distort": lambda: [v2.RandomPhotometricDistort(p=0.8)],
    "jitter, grey": lambda: [v2.ColorJitter(0.4, 0.4, 0.4, 0.1), v2.RandomGrayscale(0.3)],
    "two contrasts": lambda: [v2.ColorJitter(contrast=0.5), v2.RandomInvert(), v2.ColorJitter(contrast=(1.5, 2.0))],
    "flip, distort, flip": lambda: [v2.RandomHorizontalFlip(), v2.RandomPhotometricDistort(), v2.RandomVerticalFlip()],
    "normalize": lambda: [v2.Normalize([0.0, 0.0, 0.0], [1.0, 2.0, 1.5])],
    "turn": lambda: [v2.RandomRotation(30, BILINEAR, fill=0.5)],
    "turn in a larger frame": lambda: [v2.RandomRotation(40, BILINEAR, expand=True, fill={tv_tensors.Mask: 0, "others": 0.5})],
    "turn, distort": lambda: [v2.RandomPerspective(0.4), v2.RandomPhotometricDistort()],
    "pad": lambda: [v2.Pad((3, 1), fill=0.25), v2.RandomSolarize(0.4)],
    "shorter side": lambda: [v2.Resize(20, max_size=30), v2.RandomInvert()],
    "by chance": lambda: [v2.RandomApply([v2.ColorJitter(0.4, 0.4), v2.RandomRotation(30, BILINEAR)], p=0.5)],
}
"""What needs a pass before images get one size."""

THEN = {
    "resized crop": lambda: [v2.RandomResizedCrop((12, 16))],
    "resize": lambda: [v2.Resize((12, 16)), v2.RandomHorizontalFlip()],
    "zoom out, resize": lambda: [v2.RandomZoomOut(0.25), v2.Resize((12, 16), antialias=False)],
    "letterbox": lambda: [v2.Resize(None, max_size=20), v2.CenterCrop(20)],
    "crop": lambda: [v2.RandomCrop(24, pad_if_needed=True, fill=0.5), v2.ColorJitter(contrast=0.5)],
    "drawn size": lambda: [v2.RandomShortestSize([10, 14], max_size=30), v2.CenterCrop((16, 30))],
}

PIPELINES = {
    **{
        f"{first}, {then}": (lambda f=first, t=then: [*FIRST[f](), *THEN[t]()])
        for first, then in itertools.product(FIRST, THEN)
    },
    "three passes": lambda: [
        v2.RandomRotation(30, BILINEAR),
        v2.RandomInvert(),
        v2.RandomPerspective(0.4),
        v2.RandomGrayscale(),
        v2.RandomResizedCrop((12, 16)),
    ],
    "two fills": lambda: [v2.RandomZoomOut(0.5), v2.CenterCrop((40, 48))],
    "two drawn sizes": lambda: [v2.RandomResize(20, 40), v2.RandomZoomOut(0.5), v2.CenterCrop(30)],
    "colour between": lambda: [v2.ScaleJitter((30, 30)), v2.RandomPhotometricDistort(), v2.RandomCrop(20, pad_if_needed=True)],
}
SIZES = [(37, 52), (64, 40), (30, 30), (20, 33)]


CROSSED = len(FIRST) * len(THEN)
"""Number of pipelines of two parts. By default every third is tried: each first part with two others, and the reverse."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (number < CROSSED and (number // len(THEN) + number) % 3 > 0))
        for number, name in enumerate(PIPELINES)
    ],
)
def test_each_image_equals_torchvision(name):
    images = images_of(SIZES)
    augment, batch = gpuaug.fuse([TO_FLOAT, *PIPELINES[name]()], ragged=True), pack(images, "hwc")
    for seed in range(2):
        draws = augment.draw(batch, seed=seed)
        expected = replayed(draws, [image.float() / 255 for image in images])
        got = augment(batch, draws=draws)
        # A hue at the border of two sixths may fall on either side of it, and a level at a threshold.
        jumps = any(word in name for word in ("distort", "jitter", "pad", "chance", "colour"))
        assert_values(got, expected, atol=2e-4, share=2e-3 if jumps else 0, draws=draws)


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize(
    "name",
    [
        "distort, letterbox",
        "turn, distort, zoom out, resize",
        "flip, distort, flip, resized crop",
        "turn in a larger frame, crop",
        "turn in a larger frame, resize",
        "two drawn sizes",
        "three passes",
    ],
)
def test_targets_follow_as_they_do_for_each_image_alone(name, views):
    images = images_of(SIZES)
    targets = targets_of(images)
    augment = gpuaug.fuse(PIPELINES[name](), ragged=True, views=views)
    batch = pack(images)
    made, found = augment(batch, targets, data_keys=["input", "targets"], draws=augment.draw(batch, seed=2))
    for index, (image, target) in enumerate(zip(images, targets, strict=True)):
        dense = pack(copies(image, len(images)))
        draws = augment.draw(dense, seed=2)
        alone, expected = augment(dense, [target] * len(images), data_keys=["input", "targets"], draws=draws)
        for sample in range(index, len(made), len(images)):
            assert_values(made[sample], alone[sample])
            for key, value in expected[sample].items():
                assert_values(found[sample][key], value)


def test_masks_follow_what_moves_before_images_have_one_size():
    """A mask that is the image, by nearest pixels: as the image, where this takes nearest pixels too."""
    nearest = InterpolationMode.NEAREST_EXACT
    pipeline = [v2.RandomHorizontalFlip(), v2.RandomZoomOut(0.5), v2.RandomInvert(0.0), v2.Resize((12, 16), nearest)]
    pipeline[1]._fill = {torch.Tensor: 0, "others": 0}
    images = images_of(SIZES, channels=1)
    augment = gpuaug.fuse(pipeline, ragged=True, dtype=torch.uint8)
    masks = [{"masks": image.clone()} for image in images]
    torch.manual_seed(0)
    made, found = augment(pack(images), masks, data_keys=["input", "targets"])
    for image, each in zip(made, found, strict=True):
        assert_values(each["masks"], image)


@pytest.mark.parametrize("channels", [(), (1,), (2,)], ids=str)
def test_stacked_masks_of_images_of_one_size_follow_as_each_alone(channels):
    images = images_of([(30, 44)] * 3)
    masks = torch.randint(0, 9, (3, *channels, 30, 44), generator=torch.Generator().manual_seed(0))
    augment, batch = gpuaug.fuse(PIPELINES["turn in a larger frame, resize"](), ragged=True), pack(images)
    draws = augment.draw(batch, seed=1)
    _, together = augment(batch, masks, data_keys=["input", "mask"], draws=draws)
    _, apart = augment(batch, list(masks), data_keys=["input", "mask"], draws=draws)
    assert_values(together.view(3, -1, 12, 16), torch.stack(apart).view(3, -1, 12, 16))


def test_explain_counts_the_bytes_of_images_between_passes():
    batch = pack(images_of(SIZES))
    pixels = sum(height * width for height, width in SIZES)
    lines = gpuaug.fuse(PIPELINES["distort, resize"](), ragged=True).explain(batch).lines
    assert [(line.read_bytes, line.written_bytes) for line in lines] == [
        (3 * pixels, 3 * pixels),
        (3 * pixels, 4 * 3 * 12 * 16),
    ]
    lines = gpuaug.fuse(PIPELINES["turn, distort, resize"](), ragged=True).explain(batch).lines
    assert lines[1].read_bytes is None, "it is drawn"


@pytest.mark.parametrize(
    ("sizes", "canvases"),
    [
        ([(1, 300), (20_000, 1)], "2 canvases of 400000x6000 for images of 400000x20 and 20x6000"),
        ([(1, 250), *[(250, 1)] * 29], "30 canvases of 5000x5000 for images of 5000x20 and 20x5000"),
    ],
    ids=["one canvas of 2**31 values", "mostly empty canvases"],
)
def test_a_tall_and_a_wide_image_do_not_need_all_memory(sizes, canvases):
    augment = gpuaug.fuse([v2.Resize(20), v2.RandomInvert(), v2.CenterCrop(20)], ragged=True)
    message = (
        f"canvases of images between two passes must have fewer than 2**31 values, got {canvases}. Put the transform to one "
    )
    with pytest.raises(gpuaug.ArgumentError, match=re.escape(message)):
        augment(pack(images_of(sizes)))
    # The advice: without the pass in between, or without the second image.
    gpuaug.fuse([v2.Resize(20), v2.CenterCrop(20), v2.RandomInvert()], ragged=True)(pack(images_of(sizes)))
    augment(pack(images_of(sizes[:1])))


def test_large_canvases_that_images_fill_are_accepted():
    check_canvases(np.full((1024, 2), 1200), 3)


def test_the_limit_of_an_image_is_that_of_a_frame_of_a_clip():
    augment = gpuaug.fuse([v2.Resize(4320), v2.RandomInvert(), v2.CenterCrop(20)], ragged=True)
    sides, frames = (1080, 1920), 64
    shapes = Shapes(np.full((frames, 2), sides), 3, "chw", frames=frames)
    clip = Ragged(
        torch.zeros(1, dtype=torch.uint8).expand(shapes.num_elements), torch.zeros((frames, 3), dtype=torch.int64), shapes
    )
    size = Size(1, 3, *(np.array([side]) for side in sides), frames)
    plan = internals.program(augment, torch.uint8).segments.at(0, size, masks=False, points=False).plan
    draws = draws_of_plan_ops(plan.ops, internals.drawn(augment.draw(clip)))
    assert plan.canvases(size, [draws]) == ((4320, 7680),)


MIXES_CHANNELS = {
    "shuffle": lambda: K.RandomChannelShuffle(p=1.0),
    "permutation": lambda: v2.RandomChannelPermutation(),
    "grey": lambda: K.RandomGrayscale(p=1.0),
}


@pytest.mark.parametrize("channels", [1, 4, 13])
@pytest.mark.parametrize("name", MIXES_CHANNELS)
def test_mixes_of_other_numbers_of_channels_stand_behind_one_size_or_are_refused(name, channels):
    mixing, crop = MIXES_CHANNELS[name](), v2.RandomResizedCrop((12, 16))
    batch = pack(images_of(SIZES, channels))
    assert gpuaug.fuse([crop, mixing], ragged=True)(batch).shape == (len(SIZES), channels, 12, 16)
    text = f"images must have one size for {type(mixing).__name__}_0 of {channels} channels, got different sizes"
    with pytest.raises(gpuaug.ArgumentError, match=text):
        gpuaug.fuse([mixing, crop], ragged=True)(batch)
    drawn = [v2.ScaleJitter((30, 30)), mixing, v2.RandomCrop(12, pad_if_needed=True)]
    with pytest.raises(gpuaug.ArgumentError, match=r"must have one size for .*, got different sizes"):
        gpuaug.fuse(drawn)(torch.stack(images_of([(20, 24)] * 2, channels)))


@pytest.mark.parametrize("name", ["distort, letterbox", "turn in a larger frame, resize", "turn, crop", "two drawn sizes"])
def test_batch_without_images_comes_out_empty(name):
    full = pack(images_of(SIZES))
    empty = Ragged(full.data[:0], full.places[:0], Shapes(full.shapes.sizes[:0], 3, "chw"))
    augment = gpuaug.fuse(PIPELINES[name](), ragged=True)
    images, targets = augment(empty, [], data_keys=["input", "targets"])
    assert images.shape == (0, *augment(full).shape[1:])
    assert targets == []


def test_normalize_of_any_number_of_bands_stands_in_front():
    images, count = images_of(SIZES, 13), 13
    means, deviations = torch.linspace(0.1, 0.5, count), torch.linspace(0.2, 0.9, count)
    normalize = v2.Normalize(means.tolist(), deviations.tolist())
    augment = gpuaug.fuse([TO_FLOAT, normalize, v2.Resize((12, 16))], ragged=True)
    batch = pack(images)
    draws = augment.draw(batch, seed=0)
    assert_values(augment(batch, draws=draws), replayed(draws, [image.float() / 255 for image in images]), atol=2e-5)
    with pytest.raises(
        gpuaug.ArgumentError, match=r"mean of Normalize_1 must have one value, or one per channel .* got 13 for 3"
    ):
        augment(pack(images_of(SIZES)))


@pytest.mark.parametrize("name", ["two drawn sizes", "colour between", "turn in a larger frame, letterbox"])
def test_each_view_is_that_of_its_draws(name):
    images = pack(images_of(SIZES))
    several = gpuaug.fuse(PIPELINES[name](), ragged=True, views=3)
    draws = several.draw(images, seed=0)
    alone = [gpuaug.fuse(PIPELINES[name](), ragged=True)(images, draws=view) for view in draws.views]
    assert_values(several(images, draws=draws), torch.cat(alone))
