"""torchvision's tensors beside images in its pipelines: boxes, masks and keypoints, against its functions on the same draws."""

import pytest
import torch
from support.replay import photographs
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

import gpuaug

KEYS = ["input", "targets"]
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
FORMATS = ["XYXY", "XYWH", "CXCYWH"]

MOVING = {
    "flips": lambda: [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()],
    "crop": lambda: [v2.RandomCrop((20, 30))],
    "crop, padded": lambda: [v2.RandomCrop((36, 50), padding=[3, 5, 2, 7])],
    "crop, padded if needed": lambda: [v2.RandomCrop((40, 50), pad_if_needed=True)],
    "centre crop": lambda: [v2.CenterCrop((20, 31))],
    "pad": lambda: [v2.Pad([1, 2, 3, 4])],
    "resize": lambda: [v2.Resize((21, 64))],
    "resize, shorter side": lambda: [v2.Resize(20, max_size=27)],
    "resize, nearest": lambda: [v2.Resize((21, 64), interpolation=v2.InterpolationMode.NEAREST_EXACT)],
    "resized crop": lambda: [v2.RandomResizedCrop((16, 20))],
    "resized crop, larger": lambda: [v2.RandomResizedCrop((61, 64), scale=(0.2, 0.5)), v2.RandomHorizontalFlip()],
    "rotation": lambda: [v2.RandomRotation(45)],
    "affine": lambda: [v2.RandomAffine(30, (0.2, 0.1), (0.7, 1.3), (5, 20, -8, 3))],
    "perspective": lambda: [v2.RandomPerspective(0.5, p=1.0, fill=None)],
    "padding of masks": lambda: [v2.RandomCrop((40, 60), pad_if_needed=True, fill={tv_tensors.Mask: 255, "others": 7})],
    "padding of all": lambda: [v2.Pad(4, fill=9)],
    "preset": lambda: [
        v2.RandomHorizontalFlip(),
        v2.Resize((40, 60)),
        v2.RandomCrop((32, 32)),
        v2.ColorJitter(0.4),
    ],
}
TURNING = ("rotation", "affine", "perspective")


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


def followed(draws, values, **others):
    """What torchvision's functions make of each sample's tensor with what the sample drew, and ``others`` for padding."""
    made = []
    for value, calls in zip(values, draws.as_torchvision(), strict=True):
        for name, arguments in calls:
            if name not in ("to_dtype", "normalize") and not name.startswith("adjust_"):
                value = getattr(functional, name)(value, **{**arguments, **(others if name == "pad" else {})})
        made.append(value)
    return made


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MOVING)
def test_tensors_follow_images_as_torchvision_takes_them(name, form):
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


@pytest.mark.parametrize("name", [name for name in MOVING if name not in ("flips", "preset", "resized crop, larger")])
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
