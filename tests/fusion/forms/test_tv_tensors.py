"""torchvision's tensors beside images in its pipelines: boxes, masks and keypoints, against its functions on the same draws."""

import math
import re

import pytest
import torch
import torchvision
from support.batches.pairwise import sweep
from support.comparison.replay import photographs
from support.comparison.torchvision_replay import followed
from support.comparison.values import assert_values
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional

import gpuaug

KEYS = ["input", "targets"]
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
FORMATS = ["XYXY", "XYWH", "CXCYWH"]

MOVING = {
    "flips": lambda: [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()],
    "crop, padded": lambda: [v2.RandomCrop((36, 50), padding=[3, 5, 2, 7])],
    "resize, shorter side": lambda: [v2.Resize(20, max_size=27)],
    "resize, nearest": lambda: [v2.Resize((21, 64), interpolation=InterpolationMode.NEAREST_EXACT)],
    "resized crop, larger": lambda: [v2.RandomResizedCrop((61, 64), scale=(0.2, 0.5)), v2.RandomHorizontalFlip()],
    "rotation": lambda: [v2.RandomRotation(45)],
    "rotation, filled by type": lambda: [v2.RandomRotation(45, fill={tv_tensors.Mask: 0, "others": 0})],
    "affine": lambda: [v2.RandomAffine(30, (0.2, 0.1), (0.7, 1.3), (5, 20, -8, 3))],
    "perspective": lambda: [v2.RandomPerspective(0.5, p=1.0, fill=None)],
    "padding of masks": lambda: [v2.RandomCrop((40, 60), pad_if_needed=True, fill={tv_tensors.Mask: 255, "others": 7})],
    "drawn size, nearest, middle": lambda: [
        v2.RandomResize(24, 60, interpolation=InterpolationMode.NEAREST_EXACT),
        v2.CenterCrop(20),
    ],
}
"""Pipelines of images of one size. ``lower/test_choices`` compares crops, paddings and resizes of images of every size."""

VERSION = tuple(int(part) for part in torchvision.__version__.split(".")[:2])
TURNING = ("rotation", "rotation, filled by type", "affine", "perspective")


def boxes_of(count, canvas, form, seed):
    numbers = torch.Generator().manual_seed(seed)
    first = torch.rand(count, 2, generator=numbers) * torch.tensor([canvas[1] * 0.8, canvas[0] * 0.8])
    last = first + 1 + torch.rand(count, 2, generator=numbers) * torch.tensor([canvas[1] * 0.2 - 1, canvas[0] * 0.2 - 1])
    boxes = tv_tensors.BoundingBoxes(torch.cat((first, last), 1), format="XYXY", canvas_size=canvas)
    return functional.convert_bounding_box_format(boxes, new_format=form)


def target(count, canvas=(32, 48), form="XYXY", seed=0):
    numbers = torch.Generator().manual_seed(seed)
    return {
        "boxes": boxes_of(count, canvas, form, seed),
        "labels": torch.arange(count),
        "masks": tv_tensors.Mask(torch.randint(0, 200, (count, *canvas), generator=numbers, dtype=torch.uint8)),
        "keypoints": tv_tensors.KeyPoints(torch.rand(count, 5, 2, generator=numbers) * 30, canvas_size=canvas),
    }


@pytest.mark.parametrize(("name", "form"), sweep(MOVING, FORMATS))
def test_tensors_follow_images_as_torchvision_takes_them(name, form):
    if "nearest" in name and VERSION < (0, 26):
        pytest.skip("older versions resize masks by NEAREST whatever they are told")
    for seed in range(3):
        images, targets = photographs(5, seed=seed), [target(n, form=form, seed=n) for n in (3, 0, 4, 1, 2)]
        augment = gpuaug.fuse([*MOVING[name](), TO_FLOAT])
        draws = augment.draw(images.shape, seed=seed)
        made, got = augment(images, targets, data_keys=KEYS, draws=draws)
        frame = tuple(made.shape[2:])
        boxes = followed(draws, [each["boxes"] for each in targets])
        fill = {"fill": 255} if name == "padding of masks" else {}
        masks = followed(draws, [each["masks"] for each in targets], **fill)
        for sample in range(5):
            mine = got[sample]
            assert type(mine["boxes"]) is tv_tensors.BoundingBoxes
            assert mine["boxes"].format is boxes[sample].format
            assert mine["boxes"].canvas_size == boxes[sample].canvas_size == frame
            torch.testing.assert_close(mine["boxes"], boxes[sample], atol=2e-4, rtol=0)
            assert type(mine["masks"]) is tv_tensors.Mask
            wrong = (mine["masks"] != masks[sample]).sum()
            assert wrong <= (4e-3 if name in TURNING else 0) * masks[sample].numel()
            assert type(mine["keypoints"]) is tv_tensors.KeyPoints
            assert mine["keypoints"].canvas_size == frame


def test_paddings_of_masks_that_differ_do_not_become_one():
    images, mask = photographs(1), tv_tensors.Mask(torch.ones(1, 32, 48, dtype=torch.uint8))
    fills = [{tv_tensors.Mask: 255, "others": 0}, {tv_tensors.Mask: 7, "others": 0}]
    _, got = gpuaug.fuse([v2.Pad(2, fill=fill) for fill in fills])(images, mask, data_keys=["input", "mask"])
    expected = functional.pad(functional.pad(mask, [2], fill=255), [2], fill=7)
    assert_values(got, expected)


@pytest.mark.skipif(VERSION < (0, 24), reason="older versions move keypoints outside the frame to its border")
@pytest.mark.parametrize("name", [name for name in MOVING if name not in ("flips", "resized crop, larger")])
def test_keypoints_follow_images_as_torchvision_takes_them(name):
    images, targets = photographs(4), [target(n, seed=n) for n in (3, 0, 4, 1)]
    augment = gpuaug.fuse([*MOVING[name](), TO_FLOAT])
    draws = augment.draw(images.shape, seed=0)
    _, got = augment(images, targets, data_keys=KEYS, draws=draws)
    for mine, its in zip(got, followed(draws, [each["keypoints"] for each in targets]), strict=True):
        torch.testing.assert_close(mine["keypoints"], its, atol=2e-4, rtol=0)


def test_keypoints_are_flipped_about_the_middle_of_the_image():
    """As boxes are. torchvision's functions flip them about the middle pixel, half a pixel further to the left."""
    images, targets = photographs(1), [target(3)]
    _, (got,) = gpuaug.fuse(v2.RandomHorizontalFlip(p=1.0))(images, targets, data_keys=KEYS)
    its = functional.horizontal_flip(targets[0]["keypoints"])
    torch.testing.assert_close(got["keypoints"], its + torch.tensor([1.0, 0.0]))


ENDED = [
    v2.RandomHorizontalFlip(),
    v2.RandomCrop((24, 30)),
    v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}, scale=True),
    v2.ClampBoundingBoxes(),
    v2.ConvertBoundingBoxFormat("XYXY"),
    v2.SanitizeBoundingBoxes(min_size=3, min_area=20),
]


def ended(values, form):
    """What the last transforms of ``ENDED`` make of boxes, but for those that are dropped, and which are kept."""
    boxes = functional.convert_bounding_box_format(values, new_format="XYXY")
    _, valid = functional.sanitize_bounding_boxes(boxes, min_size=3, min_area=20)
    return boxes, valid


@pytest.mark.parametrize("form", FORMATS)
def test_transforms_of_targets_end_as_in_torchvision(form):
    images, targets = photographs(5), [target(n, form=form, seed=n) for n in (3, 0, 9, 1, 7)]
    augment = gpuaug.fuse(v2.Compose(ENDED))
    kept = []
    for seed in range(5):
        draws = augment.draw(images.shape, seed=seed)
        _, got = augment(images, targets, data_keys=KEYS, draws=draws)
        boxes, masks = (followed(draws, [each[key] for each in targets]) for key in ("boxes", "masks"))
        for mine, box, mask in zip(got, boxes, masks, strict=True):
            expected, valid = ended(box, form)
            assert mine["boxes"].format is tv_tensors.BoundingBoxFormat.XYXY
            torch.testing.assert_close(mine["boxes"], expected, atol=1e-4, rtol=0)
            assert mine["valid"].tolist() == valid.tolist()
            assert mine["masks"].dtype is torch.int64
            assert_values(mine["masks"], mask.long())
            kept += valid.tolist()
        sanitized = gpuaug.sanitize(got)
        assert [len(each["boxes"]) for each in sanitized] == [int(each["valid"].sum()) for each in got]
    assert 10 < sum(kept) < len(kept) - 10


def test_masks_of_a_batch_are_converted_too():
    images, masks = photographs(2), tv_tensors.Mask(torch.arange(2 * 32 * 48).view(2, 32, 48).to(torch.uint8))
    _, got = gpuaug.fuse(ENDED)(images, masks, data_keys=["input", "mask"])
    assert got.dtype is torch.int64
    assert got.shape == (2, 24, 30)


MASK_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]
MASK_FILLS = [0, 1, 255, 256, -1, -100, 0.5, -0.5, 2.7, 2**24 + 1, 2**31, 70000, -(2**60), 1e39, math.nan, math.inf, -math.inf]
PADDINGS = {
    "Pad": lambda fill: v2.Pad(2, fill=fill),
    "RandomCrop": lambda fill: v2.RandomCrop(12, pad_if_needed=True, fill=fill),
    "RandomZoomOut": lambda fill: v2.Compose([v2.RandomZoomOut(fill, (2.0, 2.01), p=1.0), v2.Resize((16, 16))]),
}


PADDED = [*((dtype, "Pad") for dtype in MASK_DTYPES), (torch.uint8, "RandomCrop"), (torch.int32, "RandomZoomOut")]


@pytest.mark.parametrize(("dtype", "padding"), PADDED, ids=str)
def test_padding_of_masks_equals_torchvision_or_is_refused_where_torchvision_refuses_it(dtype, padding):
    image, mask = torch.full((1, 3, 8, 8), 50, dtype=torch.uint8), torch.ones(1, 8, 8).to(dtype)
    refused = 0
    for fill in MASK_FILLS:
        transform = PADDINGS[padding]({tv_tensors.Image: 0, tv_tensors.Mask: fill, "others": 0})
        augment = gpuaug.fuse(transform)
        try:
            expected = transform(tv_tensors.Image(image[0]), tv_tensors.Mask(mask))[1]
        except RuntimeError:
            refused += 1
            with pytest.raises(gpuaug.ArgumentError, match=re.escape(f"for masks of {dtype}, got {fill}. Convert")):
                augment(image, [{"masks": mask}], data_keys=["input", "targets"])
            continue
        _, (got,) = augment(image, [{"masks": mask}], data_keys=["input", "targets"])
        assert got["masks"].dtype == dtype
        assert set(map(str, got["masks"].flatten().tolist())) == set(map(str, expected.flatten().tolist()))
    assert bool(refused) == (dtype not in (torch.bool, torch.float64))


WARPS = {
    "rotation": lambda fill: v2.RandomRotation(30, fill=fill),
    "affine, then a crop": lambda fill: v2.Compose([v2.RandomAffine(20, (0.2, 0.1), fill=fill), v2.RandomCrop(20)]),
    "padding, then perspective": lambda fill: v2.Compose([v2.Pad(4, fill=9), v2.RandomPerspective(0.5, 1.0, fill=fill)]),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize("name", WARPS)
def test_masks_are_filled_by_type_outside_of_a_warp(name, dtype):
    images, masks = photographs(3, 3, 24, 24), torch.ones(3, 1, 24, 24).to(dtype)
    fill = 1 if dtype == torch.bool else 255
    augment = gpuaug.fuse(WARPS[name]({tv_tensors.Image: 114, tv_tensors.Mask: fill, "others": 0}))
    draws = augment.draw(images.shape, seed=1)
    _, got = augment(images, masks, data_keys=["input", "mask"], draws=draws)
    _, records = augment(images, [{"masks": mask} for mask in masks], data_keys=["input", "targets"], draws=draws)
    assert_values(torch.stack([record["masks"] for record in records]), got)
    for mask, made, calls in zip(masks, got, draws.as_torchvision(), strict=True):
        for function, arguments in calls:
            fills = {"fill": 9 if function == "pad" else fill} if "fill" in arguments else {}
            mask = getattr(v2.functional, function)(tv_tensors.Mask(mask), **{**arguments, **fills})
        assert_values(made, mask.as_subclass(torch.Tensor), share=0.01)
    assert dtype == torch.bool or (got == fill).any()
