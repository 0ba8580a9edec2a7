"""Containers that pick among transforms of which some change sizes, and that all end at one size."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import internals
from support.batches.ragged import images_of, pack
from support.comparison.replay import photographs
from support.comparison.torchvision_replay import BYTES_OFF, followed, replayed
from support.comparison.values import assert_values
from support.targets.boxes_masks_points import plain, targets_of
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional

import gpuaug
from gpuaug.fusion.backends.readers import size_of
from gpuaug.fusion.table.on_device import device_crop

TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
KEYS = ["input", "targets"]
SIDES = st.integers(1, 24)
left_to_torchvision = pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")

HEIGHT, WIDTH = 12, 15
BRANCHES = {
    "resize": lambda: v2.Resize((HEIGHT, WIDTH)),
    "nearest": lambda: v2.Resize((HEIGHT, WIDTH), InterpolationMode.NEAREST_EXACT),
    "resized crop": lambda: v2.RandomResizedCrop((HEIGHT, WIDTH)),
    "DETR's": lambda: v2.Compose([v2.RandomShortestSize([10, 14, 20]), v2.RandomCrop(9), v2.Resize((HEIGHT, WIDTH))]),
    "crop": lambda: v2.RandomCrop((HEIGHT, WIDTH), pad_if_needed=True, fill=3),
    "fixed size": lambda: gpuaug.FixedSizeCrop((HEIGHT, WIDTH)),
    "centre": lambda: v2.Compose([v2.Resize(20), v2.CenterCrop((HEIGHT, WIDTH))]),
    "padding": lambda: v2.Compose([v2.RandomResize(5, 20), gpuaug.PadIfSmaller(16), v2.RandomCrop((HEIGHT, WIDTH))]),
    "pad by some": lambda: v2.Compose([v2.Pad((1, 2, 3, 4), fill=3), v2.RandomResizedCrop((HEIGHT, WIDTH))]),
    "zoom out": lambda: v2.Compose([v2.RandomZoomOut(1, p=0.7), v2.ColorJitter(0.3), v2.Resize((HEIGHT, WIDTH))]),
    "pick": lambda: v2.RandomChoice([BRANCHES["resize"](), BRANCHES["DETR's"](), BRANCHES["crop"]()]),
    "pick, then resize": lambda: v2.Compose(
        [v2.RandomChoice([v2.RandomResize(5, 20), v2.RandomZoomOut()]), v2.Resize((HEIGHT, WIDTH))]
    ),
    "order": lambda: v2.RandomOrder([v2.ColorJitter(0.3), v2.Resize((HEIGHT, WIDTH))]),
}
"""Transforms that give images of any size one size."""


@settings(deadline=None, max_examples=12)
@given(
    names=st.lists(st.sampled_from(list(BRANCHES)), min_size=2, max_size=3),
    sizes=st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    flips=st.booleans(),
)
def test_choice_is_fused_and_equals_torchvision_on_images_and_targets_of_every_size(names, sizes, seed, flips):
    choice = v2.RandomChoice([BRANCHES[name]() for name in names])
    pipeline = [*([v2.RandomVerticalFlip()] if flips else []), choice, v2.ColorJitter(0.2), TO_FLOAT]
    augment = gpuaug.fuse(pipeline, ragged=True)
    images = images_of(sizes)
    batch, targets = pack(images), targets_of(images)
    assert not any(line.reason for line in augment.explain(batch).lines)
    draws = augment.draw(batch, seed=seed)
    made, got = augment(batch, targets, data_keys=KEYS, draws=draws)
    assert_values(made, replayed(draws, images), atol=1e-5, share=BYTES_OFF, draws=draws)
    assert_values(augment(batch, draws=draws), made)
    for key in ("boxes", "masks", "keypoints")[: 2 if flips else 3]:
        for mine, theirs in zip(got, followed(draws, [target[key] for target in targets]), strict=True):
            theirs = functional.clamp_bounding_boxes(theirs) if key == "boxes" else theirs
            assert_values(plain(mine[key]), plain(theirs).to(mine[key].dtype), atol=0 if key == "masks" else 2e-4)


def launches(*branches, ragged=True):
    images = images_of([(30, 40), (40, 30)])
    return gpuaug.fuse([v2.RandomChoice(list(branches)), TO_FLOAT], ragged=ragged).explain(pack(images)).launches


def test_a_resize_in_which_all_transforms_end_runs_once():
    """It is one pass for all samples. Resizes that differ are one each."""
    resize, crop = v2.Resize((9, 9)), v2.RandomCrop(20)
    assert launches(resize, v2.Compose([crop, v2.Resize((9, 9))])) == 1
    assert launches(resize, v2.Compose([v2.RandomShortestSize([40]), crop, v2.Resize([9, 9])])) == 2
    assert launches(resize, v2.Compose([crop, v2.Resize((9, 9), antialias=False)])) == 2
    assert launches(v2.CenterCrop(9), v2.RandomCrop(9)) == 1


def test_transforms_are_picked_by_their_weights_for_each_sample():
    crop = v2.Compose([v2.RandomCrop(8), v2.Resize((9, 9))])
    choice = v2.RandomChoice([v2.Resize((9, 9)), crop, v2.CenterCrop(9)], p=[0.2, 0.3, 0.5])
    calls = gpuaug.fuse(choice).draw((4000, 3, 20, 30), seed=1).as_torchvision()
    picked = [[name for name, _ in of_sample] for of_sample in calls]
    counts = [picked.count(names) for names in (["resize"], ["crop", "resize"], ["center_crop"])]
    assert sum(counts) == 4000
    np.testing.assert_allclose(counts, [800, 1200, 2000], atol=130)


def test_windows_of_a_crop_in_a_choice_are_not_computed_by_the_device():
    """Its kernel knows no sample that skips the crop."""
    images = pack(images_of([(30, 40), (40, 30)]))
    augment = gpuaug.fuse([v2.RandomChoice([v2.RandomResizedCrop(8), v2.CenterCrop(8)]), TO_FLOAT], ragged=True)
    planned = internals.program(augment).segments.at(0, size_of(images), masks=False).plan
    assert len(planned.passes) == 1
    assert device_crop(planned) is None


def test_clips_are_picked_for_as_a_whole():
    choice = v2.RandomChoice([v2.Resize((8, 9)), v2.RandomCrop((8, 9))])
    augment = gpuaug.fuse([choice, TO_FLOAT])
    clips = photographs(15).view(5, 3, 3, 32, 48)
    draws = augment.draw(clips.shape, seed=3)
    expected = [replayed(draws, clips[:, frame]) for frame in range(3)]
    assert_values(augment(clips, draws=draws), torch.stack(expected, 1), atol=1e-5, share=BYTES_OFF)


def test_first_crop_of_a_choice_restricts_no_decoding():
    """Another transform may read the whole image."""
    augment = gpuaug.fuse([v2.RandomChoice([v2.RandomCrop(9), v2.Resize((9, 9))]), TO_FLOAT], ragged=True)
    images = pack(images_of([(30, 40), (40, 30)]))
    assert augment.windows_read(images.shapes) is None


REFUSED = {
    "other pixels": (
        [v2.CenterCrop(9), v2.Compose([v2.RandomResize(20, 30), v2.GaussianBlur(3), v2.CenterCrop(9)])],
        "got GaussianBlur_1: it reads other pixels of an image, or their coordinates",
    ),
    "not fused": (
        [v2.CenterCrop(9), v2.Compose([v2.RandomResize(20, 30), v2.Lambda(abs), v2.CenterCrop(9)])],
        "got Lambda_1: no lowering for this type",
    ),
    "a crop by boxes": (
        [v2.CenterCrop(9), v2.Compose([v2.RandomIoUCrop(), v2.Resize((9, 9))])],
        r"got RandomIoUCrop_0 without the same v2.Resize\(\(height, width\)\) at the end of each transform of the choice",
    ),
}


@left_to_torchvision
@pytest.mark.parametrize("name", REFUSED)
def test_choice_that_cannot_be_fused_is_refused_and_its_transform_named(name):
    branches, text = REFUSED[name]
    with pytest.raises(gpuaug.ArgumentTypeError, match=text):
        gpuaug.fuse([v2.RandomChoice(branches), TO_FLOAT])


DETRS = [
    v2.RandomShortestSize([20, 24], 40),
    v2.Compose([v2.RandomShortestSize([40]), v2.RandomCrop(38), v2.RandomShortestSize([20, 24], 40)]),
]
"""DETR's choice, which gives images many sizes."""


def test_choice_of_many_sizes_is_fused_with_what_gives_images_one_size():
    with pytest.raises(gpuaug.ArgumentError, match="pipeline must give images one size after RandomShortestSize_0, got Ran"):
        gpuaug.fuse([v2.RandomChoice(DETRS), TO_FLOAT])
    augment = gpuaug.fuse([v2.RandomChoice(DETRS), v2.CenterCrop(40), TO_FLOAT], ragged=True)
    images = images_of([(30, 40), (1, 9), (50, 20), (40, 40)])
    batch, targets = pack(images), targets_of(images)
    assert augment.explain(batch).launches == 3
    for seed in range(4):
        draws = augment.draw(batch, seed=seed)
        made, got = augment(batch, targets, data_keys=KEYS, draws=draws)
        assert_values(made, replayed(draws, images), atol=1e-5, share=BYTES_OFF)
        masks = followed(draws, [target["masks"] for target in targets])
        assert_values(torch.stack([plain(target["masks"]) for target in got]), plain(torch.stack(masks)))


def test_image_too_small_for_a_crop_in_a_choice_is_an_error_wherever_the_crop_sees_its_size():
    crop = v2.Compose([v2.RandomCrop(8), v2.Resize((9, 9))])
    augment = gpuaug.fuse([v2.RandomChoice([v2.Resize((9, 9)), crop]), TO_FLOAT], ragged=True)
    with pytest.raises(gpuaug.ArgumentError, match="images must fit RandomCrop_0, got 7x40 at 1 of the batch, which crops 8x8"):
        augment(pack(images_of([(9, 9), (7, 40)])))
    # A crop sees neither the size that another transform of the choice gives, nor that of images that skip a resize before it.
    augment = gpuaug.fuse([v2.RandomChoice([v2.CenterCrop(7), v2.Compose([crop, v2.CenterCrop(7)])]), TO_FLOAT], ragged=True)
    assert augment(pack(images_of([(9, 9), (8, 40)]))).shape == (2, 3, 7, 7)
    resized = v2.Compose([v2.RandomResize(8, 12), crop])
    augment = gpuaug.fuse([v2.RandomChoice([v2.Resize((9, 9)), resized]), TO_FLOAT], ragged=True)
    assert augment(pack(images_of([(9, 9), (7, 40)]))).shape == (2, 3, 9, 9)


@left_to_torchvision
def test_choice_without_drawn_sizes_that_cannot_be_fused_is_run_by_torchvision():
    blurred = v2.Compose([v2.CenterCrop(9), v2.GaussianBlur(3), v2.Pad(1)])
    inner = v2.RandomChoice([v2.CenterCrop(11), v2.RandomResizedCrop(11)])
    of_other_pixels = "; GaussianBlur_1: it reads other pixels of an image, or their coordinates"
    for choice, text in (
        ([v2.CenterCrop(11), blurred], of_other_pixels),
        ([inner, blurred], of_other_pixels),
        ([v2.CenterCrop(11), v2.Identity()], ""),
    ):
        augment = gpuaug.fuse([v2.RandomChoice(choice), TO_FLOAT])
        assert augment.explain((3, 3, 11, 11)).lines[0].reason.endswith(f"in it may change the size of some images{text}")
        assert augment(photographs(3, height=11, width=11)).shape == (3, 3, 11, 11)
