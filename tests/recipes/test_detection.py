"""Detection and segmentation, with their targets: torchvision's references, RT-DETR, RF-DETR, YOLO, Mask2Former."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import kornia.augmentation as K
import pytest
import torch
from support.comparison.torchvision_replay import followed
from support.comparison.values import assert_values
from support.ops.recipes import MEAN, STD, Recipe, assert_equals_torchvision, assert_fused, cases, drawn
from torchvision import tv_tensors
from torchvision.ops import masks_to_boxes
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional

import gpuaug

KEYS = ["input", "targets"]
BILINEAR = InterpolationMode.BILINEAR

DETECTION = "pytorch/vision@8a347e1b references/detection/presets.py, with v2's classes and their end"
SEGMENTATION = "pytorch/vision@15866918 references/segmentation/presets.py, with v2's classes and their end"
RT_DETR = "lyuwenyu/RT-DETR@068dfde6 rtdetrv2_pytorch/configs/rtdetrv2/include/dataloader.yml"
RF_DETR = "roboflow/rf-detr@04835d4b src/rfdetr/datasets/kornia_transforms.py, @036d947c src/rfdetr/datasets/aug_configs.py"
RF_DETR_CPU = "roboflow/rf-detr@35ac6ab6 rfdetr/datasets/coco.py"
YOLO = "ultralytics/ultralytics@0005af52 ultralytics/data/augment.py, with the values of ultralytics/cfg/default.yaml"
MASK_2_FORMER = (
    "facebookresearch/Mask2Former@9b0651c6 configs/coco/instance-segmentation/Base-COCO-InstanceSegmentation.yaml, "
    "mask2former/data/dataset_mappers/coco_instance_new_baseline_dataset_mapper.py"
)


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


GREY = defaultdict(lambda: (123.0, 117.0, 104.0), {tv_tensors.Mask: 0})
FLIP = v2.RandomHorizontalFlip(p=0.5)
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
BY_TYPE = v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}, scale=True)
NORMALIZE = v2.Normalize(mean=list(MEAN), std=list(STD))


def preset(*transforms):
    """A preset for detection with its beginning and its end."""
    end = [v2.ConvertBoundingBoxFormat(tv_tensors.BoundingBoxFormat.XYXY), v2.SanitizeBoundingBoxes(), v2.ToPureTensor()]
    return v2.Compose([v2.ToImage(), *transforms, TO_FLOAT, *end])


MULTISCALE = v2.RandomShortestSize(min_size=(20, 24, 28, 32), max_size=54)
RECIPES = {
    "references, hflip": Detection(DETECTION, lambda: preset(FLIP), 1),
    # Their FixedSizeCrop, which takes no tensors, pads on the right and below alone.
    "references, lsj": Detection(
        DETECTION,
        lambda: preset(
            v2.ScaleJitter(target_size=(40, 40), antialias=True),
            v2.RandomCrop((40, 40), pad_if_needed=True, fill=GREY),
            FLIP,
        ),
        1,
        1,
    ),
    # Padded to one size here, and by the model to that of the largest image.
    "references, multiscale": Detection(DETECTION, lambda: preset(MULTISCALE, FLIP, v2.CenterCrop(54)), 1, 1),
    # Their PadIfSmaller pads on the right and below alone.
    "references, segmentation": Detection(
        SEGMENTATION,
        lambda: v2.Compose(
            [
                v2.ToImage(),
                v2.RandomResize(min_size=26, max_size=104),
                FLIP,
                v2.RandomCrop(48, pad_if_needed=True, fill={tv_tensors.Mask: 255, "others": 0}),
                BY_TYPE,
                NORMALIZE,
                v2.ToPureTensor(),
            ]
        ),
        1,
        1,
        mask_fill=255,
        mask_dtype=torch.int64,
    ),
    "references, segmentation, validation": Detection(
        SEGMENTATION,
        lambda: v2.Compose([v2.ToImage(), v2.Resize(size=(52, 52)), TO_FLOAT, NORMALIZE, v2.ToPureTensor()]),
        1,
        1,
    ),
    "RT-DETR, validation": Detection(RT_DETR, lambda: v2.Compose([v2.Resize([32, 32]), TO_FLOAT]), 1, 1),
    "RF-DETR, validation": Detection(RF_DETR_CPU, lambda: v2.Compose([v2.Resize((32, 32)), TO_FLOAT, NORMALIZE]), 1, 1),
    # Padded with black, and by YOLO with 114.
    "YOLO, validation": Detection(YOLO, lambda: v2.Compose([v2.Resize(None, max_size=40), v2.CenterCrop(40), TO_FLOAT]), 1, 1),
    # Less its mosaic. A jitter of saturation and brightness stands for gains in HSV.
    "YOLO": Detection(
        YOLO,
        lambda: v2.Compose(
            [
                v2.Resize(None, max_size=40),
                v2.CenterCrop(40),
                v2.RandomAffine(0, (0.1, 0.1), (0.5, 1.5), interpolation=BILINEAR, fill={tv_tensors.Mask: 0, "others": 114}),
                v2.ColorJitter(brightness=0.4, saturation=0.7, hue=0.015),
                FLIP,
                TO_FLOAT,
            ]
        ),
        2,
        2,
        atol=5e-5,
        share=1e-3,
        mask_share=4e-3,
    ),
    # Their FixedSizeCrop pads on the right and below alone.
    "Mask2Former": Detection(
        MASK_2_FORMER,
        lambda: v2.Compose(
            [
                FLIP,
                v2.ScaleJitter(target_size=(40, 40), scale_range=(0.1, 2.0)),
                v2.RandomCrop((40, 40), pad_if_needed=True, fill={tv_tensors.Mask: 0, "others": 128}),
                TO_FLOAT,
                v2.Normalize([123.675 / 255, 116.28 / 255, 103.53 / 255], [58.395 / 255, 57.12 / 255, 57.375 / 255]),
            ]
        ),
        1,
        1,
    ),
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
    "references, ssd": Detection(
        DETECTION,
        lambda: preset(
            v2.RandomPhotometricDistort(), v2.RandomZoomOut(fill=GREY), v2.RandomIoUCrop(), FLIP, v2.Resize((30, 30))
        ),
        3,
        3,
        size=30,
    ),
    "references, ssdlite": Detection(DETECTION, lambda: preset(v2.RandomIoUCrop(), FLIP, v2.Resize((32, 32))), 1, 1),
    # With its own RandomIoUCrop written as a RandomApply. Boxes are divided by the sides in the loop.
    "RT-DETR": Detection(
        RT_DETR,
        lambda: v2.Compose(
            [
                v2.RandomPhotometricDistort(p=0.5),
                v2.RandomZoomOut(fill=0),
                v2.RandomApply([v2.RandomIoUCrop()], p=0.8),
                v2.SanitizeBoundingBoxes(min_size=1),
                FLIP,
                v2.Resize([32, 32]),
                v2.SanitizeBoundingBoxes(min_size=1),
                TO_FLOAT,
                v2.ConvertBoundingBoxFormat("CXCYWH"),
            ]
        ),
        3,
        3,
        boxes="CXCYWH",
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


def rf_detr(*modules):
    return K.AugmentationSequential(*modules, K.Normalize(mean=MEAN, std=STD), data_keys=["input", "bbox_xyxy", "mask"])


PRESETS = {
    "conservative": Recipe(RF_DETR, lambda: rf_detr(K.RandomHorizontalFlip(p=0.5), K.ColorJiggle(0.1, 0.1, p=0.3)), 1),
    "aggressive": Recipe(
        RF_DETR,
        lambda: rf_detr(
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
        RF_DETR,
        lambda: rf_detr(
            K.RandomHorizontalFlip(p=0.5),
            K.RandomVerticalFlip(p=0.5),
            K.RandomRotation(degrees=(90, 90), p=0.5),
            K.ColorJiggle(0.15, 0.15, p=0.4),
        ),
        1,
        atol=5e-4,
    ),
    "industrial": Recipe(
        RF_DETR,
        lambda: rf_detr(
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


class PadIfSmaller(v2.Transform):
    """As in the references for segmentation."""

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
        lambda: preset(MULTISCALE, FLIP),
        gpuaug.ArgumentError,
        "pipeline must give images one size behind RandomShortestSize_1",
    ),
    "references, a padding of their own": (
        lambda: v2.Compose([v2.RandomResize(26, 104), FLIP, PadIfSmaller(), v2.RandomCrop(48), BY_TYPE]),
        gpuaug.ArgumentError,
        "PadIfSmaller_2: no lowering for this type",
    ),
    "RT-DETR, a crop of its own": (
        lambda: v2.Compose([RandomIoUCrop(), v2.Resize([32, 32]), TO_FLOAT]),
        gpuaug.ArgumentTypeError,
        "RandomIoUCrop_0 must be one that gpuaug.fuse lowers, .* a subclass of RandomIoUCrop that overrides __call__",
    ),
    "RF-DETR, DETR": (
        lambda: v2.Compose(
            [
                FLIP,
                v2.RandomChoice(
                    [
                        v2.Resize((32, 32)),
                        v2.Compose([v2.RandomShortestSize([40, 50, 60]), v2.RandomCrop(38), v2.Resize((32, 32))]),
                    ]
                ),
                TO_FLOAT,
                NORMALIZE,
            ]
        ),
        gpuaug.ArgumentTypeError,
        "RandomChoice_1 must hold transforms that give all images one size, got RandomShortestSize_0",
    ),
}
"""Parts of recipes that are not fused, and what is said of them."""


@pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_fused_is_refused_and_named(name):
    make, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        gpuaug.fuse(make()).explain((4, 3, 64, 80))
