"""Recipes for detection and segmentation, with targets: torchvision's references, RT-DETR, RF-DETR, YOLO, Mask2Former."""

from collections import defaultdict

import kornia.augmentation as K
import torch
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from bench.data.pipelines import MEAN, STD

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


def _fill() -> dict:
    return defaultdict(lambda: (123.0, 117.0, 104.0), {tv_tensors.Mask: 0})


def _flip() -> nn.Module:
    return v2.RandomHorizontalFlip(p=0.5)


def _to_float() -> nn.Module:
    return v2.ToDtype(torch.float32, scale=True)


def _normalize() -> nn.Module:
    return v2.Normalize(mean=list(MEAN), std=list(STD))


def _preset(*transforms: nn.Module) -> nn.Module:
    """Return a preset of the references for detection: ``transforms`` between the first and last transforms of all presets."""
    end = [v2.ConvertBoundingBoxFormat(tv_tensors.BoundingBoxFormat.XYXY), v2.SanitizeBoundingBoxes(), v2.ToPureTensor()]
    return v2.Compose([v2.ToImage(), *transforms, _to_float(), *end])


def hflip() -> nn.Module:
    """Return the references' preset ``hflip``."""
    return _preset(_flip())


def lsj(size: int, crop: nn.Module | None = None) -> nn.Module:
    """Return the references' preset ``lsj``.

    ``crop`` replaces its ``FixedSizeCrop``, which pads only on the right and below, and tensors with one fill value. The
    default is a ``RandomCrop``.
    """
    crop = crop or v2.RandomCrop((size, size), pad_if_needed=True, fill=_fill())
    return _preset(v2.ScaleJitter(target_size=(size, size), antialias=True), crop, _flip())


def multiscale(min_sizes: tuple[int, ...], max_size: int, *resizes: nn.Module) -> nn.Module:
    """Return the references' preset ``multiscale``, whose images have many sizes, followed by ``resizes`` to one size."""
    return _preset(v2.RandomShortestSize(min_size=min_sizes, max_size=max_size), _flip(), *resizes)


def ssd(size: int) -> nn.Module:
    """Return the references' preset ``ssd``, followed by the resize of the model."""
    colours = v2.RandomPhotometricDistort()
    return _preset(colours, v2.RandomZoomOut(fill=_fill()), v2.RandomIoUCrop(), _flip(), v2.Resize((size, size)))


def ssdlite(size: int) -> nn.Module:
    """Return the references' preset ``ssdlite``, followed by the resize of the model."""
    return _preset(v2.RandomIoUCrop(), _flip(), v2.Resize((size, size)))


def segmentation(size: int, out: int, padding: nn.Module | None = None) -> nn.Module:
    """Return the references' preset for segmentation, from about ``size`` pixels to ``out``.

    ``padding`` replaces its ``PadIfSmaller``, which pads only on the right and below. By default the crop pads.
    """
    crop = [v2.RandomCrop(out, pad_if_needed=True, fill={tv_tensors.Mask: 255, "others": 0})]
    if padding is not None:
        crop = [padding, v2.RandomCrop(out)]
    by_type = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}
    return v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResize(min_size=size // 2, max_size=size * 2),
            _flip(),
            *crop,
            v2.ToDtype(by_type, scale=True),
            _normalize(),
            v2.ToPureTensor(),
        ]
    )


def segmentation_validation(size: int) -> nn.Module:
    """Return the references' preset for the validation of segmentation."""
    return v2.Compose([v2.ToImage(), v2.Resize(size=(size, size)), _to_float(), _normalize(), v2.ToPureTensor()])


def rt_detr(size: int) -> nn.Module:
    """Return RT-DETR's pipeline for training, with a RandomApply in place of its RandomIoUCrop with a probability.

    The division of boxes by the sides of the image is left to the loop.
    """
    return v2.Compose(
        [
            v2.RandomPhotometricDistort(p=0.5),
            v2.RandomZoomOut(fill=0),
            v2.RandomApply([v2.RandomIoUCrop()], p=0.8),
            v2.SanitizeBoundingBoxes(min_size=1),
            _flip(),
            v2.Resize([size, size]),
            v2.SanitizeBoundingBoxes(min_size=1),
            _to_float(),
            v2.ConvertBoundingBoxFormat("CXCYWH"),
        ]
    )


def rt_detr_validation(size: int) -> nn.Module:
    """Return RT-DETR's pipeline for validation."""
    return v2.Compose([v2.Resize([size, size]), _to_float()])


def rf_detr_square(size: int, shorter: tuple[int, ...], *crop: nn.Module) -> nn.Module:
    """Return RF-DETR's pipeline for training with square resizes, for one size.

    ``crop`` replaces its ``RandomSizeCrop``, which takes PIL images. A ``RandomChoice`` replaces its ``RandomSelect``.
    """
    resize_and_crop = v2.Compose([v2.RandomShortestSize(shorter), *crop, v2.Resize((size, size))])
    return v2.Compose([_flip(), v2.RandomChoice([v2.Resize((size, size)), resize_and_crop]), _to_float(), _normalize()])


def rf_detr_validation(size: int) -> nn.Module:
    """Return RF-DETR's pipeline for validation."""
    return v2.Compose([v2.Resize((size, size)), _to_float(), _normalize()])


def yolo_validation(size: int) -> nn.Module:
    """Return YOLO's letterbox for validation, padded with 0 instead of 114."""
    return v2.Compose([*_letterbox(size), _to_float()])


def yolo(size: int) -> nn.Module:
    """Return YOLO's pipeline for training without its mosaic. A colour jitter replaces its gains in HSV."""
    fill = {tv_tensors.Mask: 0, "others": 114}
    affine = v2.RandomAffine(0, (0.1, 0.1), (0.5, 1.5), interpolation=InterpolationMode.BILINEAR, fill=fill)
    colours = v2.ColorJitter(brightness=0.4, saturation=0.7, hue=0.015)
    return v2.Compose([*_letterbox(size), affine, colours, _flip(), _to_float()])


def _letterbox(size: int) -> list[nn.Module]:
    return [v2.Resize(None, max_size=size), v2.CenterCrop(size)]


def mask_2_former(size: int, crop: nn.Module | None = None) -> nn.Module:
    """Return Mask2Former's pipeline for instance segmentation.

    ``crop`` replaces detectron2's ``FixedSizeCrop``, which takes arrays and pads only on the right and below. The default is a
    ``RandomCrop``.
    """
    crop = crop or v2.RandomCrop((size, size), pad_if_needed=True, fill={tv_tensors.Mask: 0, "others": 128})
    return v2.Compose(
        [
            _flip(),
            v2.ScaleJitter(target_size=(size, size), scale_range=(0.1, 2.0)),
            crop,
            v2.ToDtype(torch.float32),  # floats in [0, 255]
            v2.Normalize([123.675, 116.28, 103.53], [58.395, 57.12, 57.375]),
        ]
    )


def rf_detr(*modules: nn.Module) -> nn.Module:
    """Return RF-DETR's pipeline on the GPU, of Kornia's modules."""
    return K.AugmentationSequential(*modules, K.Normalize(mean=MEAN, std=STD), data_keys=["input", "bbox_xyxy", "mask"])
