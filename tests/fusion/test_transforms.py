"""``FixedSizeCrop`` and ``PadIfSmaller``: the classes against slices of a canvas, and the ops against the classes."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches.ragged import images_of, pack
from support.comparison.torchvision_replay import followed, scaled
from support.comparison.values import assert_values
from support.targets.boxes_masks_points import plain, targets_of
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug import FixedSizeCrop, PadIfSmaller
from gpuaug.core.ragged import Shapes

SIDES = st.integers(1, 24)
SIZES = st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=4)
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
KEYS = ["input", "targets"]


def on_canvas(image, height, width, top, left, fill):
    """Pixels of ``image`` from (top, left), on a canvas of this size."""
    canvas = torch.full((*image.shape[:-2], height, width), fill, dtype=image.dtype)
    part = image[..., top : top + height, left : left + width]
    canvas[..., : part.shape[-2], : part.shape[-1]] = part
    return canvas


@pytest.mark.parametrize("size", [(5, 7), (12, 7), (5, 20), (12, 20), (9, 9)])
@pytest.mark.parametrize("number", [0.0, 0.4, 0.99])
def test_classes_crop_and_pad_on_the_right_and_below(size, number):
    height, width = size
    image = tv_tensors.Image(torch.arange(3 * height * width, dtype=torch.uint8).view(3, height, width))
    mask = tv_tensors.Mask(image[:1])
    boxes = tv_tensors.BoundingBoxes([[1.0, 2.0, 4.0, 5.0]], format="XYXY", canvas_size=size)
    with mock.patch("torch.rand", return_value=torch.tensor(number)):
        cropped, its_mask, its_boxes = FixedSizeCrop((9, 10), fill=7)(image, mask, boxes)
    top, left = int(max(height - 9, 0) * number), int(max(width - 10, 0) * number)
    assert_values(plain(cropped), on_canvas(plain(image), 9, 10, top, left, 7))
    assert_values(plain(its_mask), on_canvas(plain(mask), 9, 10, top, left, 0))
    corners = plain(boxes) - torch.tensor([left, top, left, top])
    assert_values(plain(its_boxes), corners.clamp(min=0).clamp(max=torch.tensor([10, 9, 10, 9])))
    padded, its_mask = PadIfSmaller(9, fill={tv_tensors.Mask: 9, "others": 7})(image, mask)
    assert_values(plain(padded), on_canvas(plain(image), max(height, 9), max(width, 9), 0, 0, 7))
    assert_values(plain(its_mask), on_canvas(plain(mask), max(height, 9), max(width, 9), 0, 0, 9))
    assert_values(PadIfSmaller(9)(plain(image)), on_canvas(plain(image), max(height, 9), max(width, 9), 0, 0, 0))


def number_drawn(calls, size, crop):
    """A number r for which the class crops at int((side - crop) * r) on both axes, as was drawn."""
    bounds = [(0.0, 1.0)]
    (window,) = (arguments for name, arguments in calls if name == "crop")
    for start, side, length in zip((window["top"], window["left"]), size, crop, strict=True):
        if side > length:
            bounds.append((start / (side - length), (start + 1) / (side - length)))
    least, most = max(low for low, _ in bounds), min(high for _, high in bounds)
    assert least < most, "the axes drew apart"
    return (least + most) / 2


@settings(deadline=None, max_examples=12)
@given(sizes=SIZES, crop=st.tuples(SIDES, SIDES), fill=st.integers(0, 255), seed=st.integers(0, 2**32))
def test_fixed_size_crop_equals_the_class_on_images_and_targets_of_every_size(sizes, crop, fill, seed):
    transform = FixedSizeCrop(crop, fill=fill)
    augment = gpuaug.fuse(v2.Compose([transform, TO_FLOAT]), ragged=True)
    images = images_of(sizes)
    batch, targets = pack(images), targets_of(images)
    draws = augment.draw(batch, seed=seed)
    made, got = augment(batch, targets, data_keys=KEYS, draws=draws)
    got = gpuaug.sanitize(got)
    for index, (image, target, calls) in enumerate(zip(images, targets, draws.as_torchvision(), strict=True)):
        with mock.patch("torch.rand", return_value=torch.tensor(number_drawn(calls, sizes[index], crop))):
            expected, theirs = v2.Compose([transform, v2.SanitizeBoundingBoxes()])(tv_tensors.Image(image), target)
        assert_values(made[index], scaled(plain(expected)))
        assert_values(plain(got[index]["boxes"]), plain(theirs["boxes"]), atol=1e-4)
        assert_values(got[index]["labels"], theirs["labels"])
        assert_values(plain(got[index]["masks"]), plain(theirs["masks"]))


@settings(deadline=None, max_examples=12)
@given(
    sizes=SIZES,
    size=st.integers(1, 24),
    side=st.integers(1, 24),
    fill=st.sampled_from([0, 7, (1.0, 2.0, 3.0)]),
    mask_fill=st.sampled_from([0, 255]),
    seed=st.integers(0, 2**32),
)
def test_pad_if_smaller_equals_the_class_on_images_and_targets_of_every_size(sizes, size, side, fill, mask_fill, seed):
    transform = PadIfSmaller(size, fill={tv_tensors.Mask: mask_fill, "others": fill})
    augment = gpuaug.fuse([transform, v2.RandomCrop(min(side, size)), TO_FLOAT], ragged=True)
    images = images_of(sizes)
    batch, targets = pack(images), targets_of(images)
    draws = augment.draw(batch, seed=seed)
    made, got = augment(batch, targets, data_keys=KEYS, draws=draws)
    for index, (image, target, calls) in enumerate(zip(images, targets, draws.as_torchvision(), strict=True)):
        (window,) = (arguments for name, arguments in calls if name == "crop")
        # The class on the image and its targets, then the crop that was drawn.
        padded = transform(tv_tensors.Image(image), target)
        expected = [
            v2.functional.crop(value, **window) for value in (padded[0], *map(padded[1].get, ("masks", "boxes", "keypoints")))
        ]
        assert_values(made[index], scaled(plain(expected[0])))
        assert_values(plain(got[index]["masks"]), plain(expected[1]))
        assert_values(plain(got[index]["boxes"]), plain(v2.functional.clamp_bounding_boxes(expected[2])), atol=1e-4)
        inside = got[index]["keypoints"]
        assert_values(plain(inside), plain(expected[3]).to(inside.dtype), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("size", [(1, 1), (31, 20), (20, 31), (33, 47)])
def test_images_of_one_size_in_every_type(dtype, size):
    """Fills are in units of the type, and two paddings of one fill are one."""
    fill = (12.0, 13.0, 255.0) if dtype == torch.uint8 else (0.25, 0.5, 1.0)
    pipeline = [
        v2.RandomHorizontalFlip(),
        PadIfSmaller(25, fill=fill),
        FixedSizeCrop((24, 30), fill=fill),
        v2.RandomVerticalFlip(),
    ]
    augment = gpuaug.fuse([*pipeline, *([TO_FLOAT] if dtype == torch.uint8 else [])])
    images = torch.stack(images_of([size] * 5, dtype=dtype))
    assert augment.explain(images.shape, dtype=dtype).launches == 1
    draws = augment.draw(images.shape, seed=4, dtype=dtype)
    expected = followed(draws, images)
    assert_values(augment(images, draws=draws), scaled(torch.stack(expected)))


def test_positions_of_both_axes_are_one_fraction_of_the_spare_pixels():
    """Uniform over the spare pixels, the last of which no number reaches, as in the class."""
    draws = gpuaug.fuse(FixedSizeCrop((10, 20))).draw((4000, 3, 14, 36), seed=2)
    top, left = np.array([(calls[-1][1]["top"], calls[-1][1]["left"]) for calls in draws.as_torchvision()]).T
    np.testing.assert_array_equal(top, left // 4)
    counts = np.bincount(left)
    assert len(counts) == 16
    assert np.abs(counts - 250).max() < 5 * 250**0.5


def test_only_the_window_of_a_crop_is_read():
    augment = gpuaug.fuse(FixedSizeCrop((10, 20)), ragged=True)
    windows = augment.windows_read(Shapes(np.array([[40, 12], [8, 50]]), 3, "chw")).table
    assert windows[:, 2:].tolist() == [[10, 12], [8, 20]]
    assert windows[0, 1] == windows[1, 0] == 0
