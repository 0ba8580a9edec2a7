"""Detection and segmentation, with their targets: torchvision's references, RT-DETR, RF-DETR, YOLO, Mask2Former."""

from dataclasses import dataclass
from typing import Any

import kornia.augmentation as K
import pytest
import torch
from support.comparison.torchvision_replay import followed
from support.comparison.values import assert_values
from support.ops.recipes import Recipe, assert_equals_torchvision, assert_fused, cases, drawn
from torchvision import tv_tensors
from torchvision.ops import masks_to_boxes
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional

import gpuaug
from bench.data.recipes import detection as written
from gpuaug import FixedSizeCrop, PadIfSmaller

KEYS = ["input", "targets"]
BILINEAR = InterpolationMode.BILINEAR
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)


@dataclass(frozen=True)
class Detection(Recipe):
    """A recipe whose targets follow."""

    size: int = 32
    """Height and width of the images that come out."""
    boxes: str = "XYXY"
    """Form of the boxes that come out."""
    mask_fill: int = 0
    """Padding of masks."""
    mask_dtype: Any = torch.uint8
    mask_share: float = 0.0
    """Share of the pixels of masks that may differ: under an affine map two pixels may be as near."""


def multiscale(*behind):
    return written.multiscale((20, 24, 28, 32), 54, *behind)


RECIPES = {
    "references, hflip": Detection(written.DETECTION, written.hflip, 1),
    "references, lsj": Detection(
        written.DETECTION, lambda: written.lsj(40, FixedSizeCrop((40, 40), fill=(123.0, 117.0, 104.0))), 1, 1
    ),
    "references, lsj, RandomCrop": Detection(written.DETECTION, lambda: written.lsj(40), 1, 1),
    # Padded to one size here, and by the model to that of the largest image.
    "references, multiscale": Detection(written.DETECTION, lambda: multiscale(v2.CenterCrop(54)), 1, 1),
    "references, segmentation": Detection(
        written.SEGMENTATION,
        lambda: written.segmentation(52, 48, PadIfSmaller(48, fill={tv_tensors.Mask: 255, "others": 0})),
        1,
        1,
        mask_fill=255,
        mask_dtype=torch.int64,
    ),
    "references, segmentation, RandomCrop": Detection(
        written.SEGMENTATION, lambda: written.segmentation(52, 48), 1, 1, mask_fill=255, mask_dtype=torch.int64
    ),
    "references, segmentation, validation": Detection(written.SEGMENTATION, lambda: written.segmentation_validation(52), 1, 1),
    "RT-DETR, validation": Detection(written.RT_DETR, lambda: written.rt_detr_validation(32), 1, 1),
    "RF-DETR, validation": Detection(written.RF_DETR_CPU, lambda: written.rf_detr_validation(32), 1, 1),
    "YOLO, validation": Detection(written.YOLO, lambda: written.yolo_validation(40), 1, 1),
    "YOLO": Detection(written.YOLO, lambda: written.yolo(40), 2, 2, mask_share=4e-3, units_of_bytes=True),
    "RF-DETR, square": Detection(
        written.RF_DETR_CPU, lambda: written.rf_detr_square(32, (40, 50, 60), v2.RandomCrop(38)), 2, 2
    ),
    "RF-DETR, square, crops of any size": Detection(
        written.RF_DETR_CPU,
        lambda: written.rf_detr_square(32, (40, 50, 60), v2.RandomResizedCrop((38, 38), (0.4, 1.0), (0.6, 1.6))),
        3,
        3,
    ),
    "Mask2Former": Detection(written.MASK_2_FORMER, lambda: written.mask_2_former(40, FixedSizeCrop((40, 40), fill=128)), 1, 1),
    "Mask2Former, RandomCrop": Detection(written.MASK_2_FORMER, lambda: written.mask_2_former(40), 1, 1),
}


@pytest.mark.parametrize(("recipe", "ragged"), cases(RECIPES))
def test_recipe_is_fused_entirely_and_equals_torchvision(recipe, ragged):
    assert_equals_torchvision(recipe, ragged)


def targets_for(images):
    """Two boxes for each image, their masks and labels."""
    made = []
    for image in images:
        height, width = image.shape[-2:]
        boxes = torch.tensor([[4.0, 5.0, width / 2, height / 2], [width / 2 - 6, height / 2 - 9, width - 3.0, height - 2.0]])
        masks = torch.zeros(2, height, width, dtype=torch.uint8)
        for number, (mask, (left, top, right, below)) in enumerate(zip(masks, boxes.int().tolist(), strict=True), 1):
            mask[top:below, left:right] = number
        its = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width))
        made.append({"boxes": its, "masks": tv_tensors.Mask(masks), "labels": torch.tensor([7, 9])})
    return made


@pytest.mark.parametrize(("recipe", "ragged"), cases(RECIPES))
def test_targets_follow_as_torchvision_takes_them(recipe, ragged):
    augment = gpuaug.fuse(recipe.make(), ragged=ragged)
    batch, images, draws = drawn(augment, recipe, ragged, seed=3)
    targets = targets_for(images)
    _, got = augment(batch, targets, data_keys=KEYS, draws=draws)
    boxes = followed(draws, [target["boxes"] for target in targets])
    masks = followed(draws, [target["masks"] for target in targets], fill=recipe.mask_fill)
    is_pure = "ToPureTensor" in str(recipe.make())
    for mine, box, mask, target in zip(got, boxes, masks, targets, strict=True):
        assert type(mine["boxes"]) is (torch.Tensor if is_pure else tv_tensors.BoundingBoxes)
        assert_values(plain(mine["boxes"]), plain(functional.clamp_bounding_boxes(box)), atol=1e-3)
        assert mine["valid"].tolist() == functional.sanitize_bounding_boxes(box)[1].tolist()
        assert_values(plain(mine["masks"]), plain(mask).to(recipe.mask_dtype), share=recipe.mask_share)
        assert_values(mine["labels"], target["labels"])


def plain(tensor):
    return tensor.as_subclass(torch.Tensor)


BY_BOXES = {
    "references, ssd": Detection(written.DETECTION, lambda: written.ssd(30), 3, 3, size=30),
    "references, ssdlite": Detection(written.DETECTION, lambda: written.ssdlite(32), 1, 1),
    "RT-DETR": Detection(written.RT_DETR, lambda: written.rt_detr(32), 3, 3, boxes="CXCYWH"),
    "one of two crops": Detection(
        "of no project",
        lambda: v2.Compose(
            [v2.RandomChoice([v2.Compose([v2.RandomIoUCrop(), v2.Resize((32, 32))]), v2.Resize((32, 32))]), TO_FLOAT]
        ),
        1,
        1,
    ),
}
"""Crops by boxes, with the resize of the model behind them. ``test_iou_crop.py`` compares them with torchvision."""


@pytest.mark.parametrize(("recipe", "ragged"), cases(BY_BOXES))
def test_crops_by_boxes_are_fused_entirely_with_boxes_around_their_masks(recipe, ragged):
    augment = gpuaug.fuse(recipe.make(), ragged=ragged)
    assert_fused(augment, recipe, ragged)
    kept = cropped = 0
    for seed in range(3):
        batch, images, draws = drawn(augment, recipe, ragged, seed)
        targets = targets_for(images)
        made, got = augment(batch, targets, data_keys=KEYS, draws=draws)
        assert made.shape == (len(images), 3, recipe.size, recipe.size)
        assert made.dtype == torch.float32
        for target, whole in zip(gpuaug.sanitize(got), targets, strict=True):
            boxes = functional.convert_bounding_box_format(plain(target["boxes"]), old_format=recipe.boxes, new_format="XYXY")
            around = masks_to_boxes(plain(target["masks"])) + torch.tensor([0.0, 0.0, 1.0, 1.0])
            torch.testing.assert_close(boxes, around, atol=1.01, rtol=0)
            assert set(target["labels"].tolist()) <= set(whole["labels"].tolist())
            assert (target["masks"].flatten(1).amax(1) == torch.searchsorted(whole["labels"], target["labels"]) + 1).all()
            kept += len(boxes)
            cropped += len(boxes) < len(whole["labels"])
    assert kept > 12 > cropped > 0


PRESETS = {
    "conservative": Recipe(
        written.RF_DETR, lambda: written.rf_detr(K.RandomHorizontalFlip(p=0.5), K.ColorJiggle(0.1, 0.1, p=0.3)), 1
    ),
    "aggressive": Recipe(
        written.RF_DETR,
        lambda: written.rf_detr(
            K.RandomHorizontalFlip(p=0.5),
            K.RandomVerticalFlip(p=0.5),
            K.RandomRotation(degrees=(-45, 45), p=0.5),
            K.RandomAffine(degrees=(-15, 15), translate=(0.1, 0.1), scale=(0.8, 1.2), shear=(-5, 5), p=0.5),
            K.ColorJiggle(brightness=0.2, contrast=0.2, saturation=0.2, hue=0.1, p=0.5),
        ),
        2,
        atol=5e-4,
    ),
    "aerial": Recipe(
        written.RF_DETR,
        lambda: written.rf_detr(
            K.RandomHorizontalFlip(p=0.5),
            K.RandomVerticalFlip(p=0.5),
            K.RandomRotation(degrees=(90, 90), p=0.5),
            K.ColorJiggle(0.15, 0.15, p=0.4),
        ),
        1,
        atol=5e-4,
    ),
    "industrial": Recipe(
        written.RF_DETR,
        lambda: written.rf_detr(
            K.RandomHorizontalFlip(p=0.3),
            K.ColorJiggle(0.2, 0.2, p=0.5),
            K.RandomGaussianBlur((3, 3), (0.1, 2.0), p=0.3),
            K.RandomGaussianNoise(std=0.05, p=0.3),
        ),
        2,
    ),
}


def with_targets(images):
    """Boxes and masks as RF-DETR pads them, (B, N, 4) and (B, N, H, W)."""
    targets = targets_for(images)
    return [torch.stack([plain(target[key]).float() for target in targets]) for key in ("boxes", "masks")]


@pytest.mark.parametrize("name", PRESETS)
def test_preset_of_rf_detr_is_fused_entirely_and_equals_kornia(name):
    recipe = PRESETS[name]
    pipeline = recipe.make()
    augment = gpuaug.fuse(pipeline)
    assert_fused(augment, recipe, ragged=False)
    for seed in recipe.seeds:
        images, _, draws = drawn(augment, recipe, False, seed)
        boxes, masks = with_targets(images)
        got = augment(images, boxes, masks, draws=draws)
        expected = pipeline(images / 255, boxes, masks, params=draws.as_kornia())
        for mine, its, (atol, share) in zip(got, expected, [(recipe.atol, 0), (2e-3, 0), (0, 4e-3)], strict=True):
            assert_values(mine, its, atol=atol, share=share, draws=draws)


class PadIfNeeded(v2.Transform):
    """A padding of a project's own."""

    def make_params(self, flat_inputs):
        height, width = v2.functional.get_size(flat_inputs[0])
        return {"padding": [0, 0, max(48 - width, 0), max(48 - height, 0)]}

    def transform(self, inpt, params):
        return self._call_kernel(functional.pad, inpt, **params)


class RandomIoUCrop(v2.RandomIoUCrop):
    """RT-DETR's, by chance."""

    def __call__(self, *inputs):
        return inputs if torch.rand(1) >= 0.8 else super().forward(*inputs)


REFUSED = {
    "references, multiscale": (
        multiscale,
        gpuaug.ArgumentError,
        "pipeline must give images one size after RandomShortestSize_1",
    ),
    "references, a padding of their own": (
        lambda: v2.Compose([v2.RandomResize(26, 104), v2.RandomHorizontalFlip(), PadIfNeeded(), v2.RandomCrop(48), TO_FLOAT]),
        gpuaug.ArgumentError,
        "PadIfNeeded_2: no lowering for this type",
    ),
    "RT-DETR, a crop of its own": (
        lambda: v2.Compose([RandomIoUCrop(), v2.Resize([32, 32]), TO_FLOAT]),
        gpuaug.ArgumentTypeError,
        "RandomIoUCrop_0 must be a transform that gpuaug.fuse lowers, .* a subclass of RandomIoUCrop that overrides __call__",
    ),
    "DETR, of many sizes": (
        lambda: v2.Compose(
            [
                v2.RandomHorizontalFlip(),
                v2.RandomChoice(
                    [
                        v2.RandomShortestSize([20, 24], 40),
                        v2.Compose([v2.RandomShortestSize([40]), v2.RandomCrop(38), v2.RandomShortestSize([20, 24], 40)]),
                    ]
                ),
                TO_FLOAT,
            ]
        ),
        gpuaug.ArgumentError,
        "pipeline must give images one size after RandomShortestSize_0",
    ),
}
"""Parts of recipes that are not fused, and what is said of them."""


@pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_fused_is_refused_and_named(name):
    make, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        gpuaug.fuse(make()).explain((4, 3, 64, 80))
