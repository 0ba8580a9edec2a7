"""Recipes for classifiers and for CLIP: torchvision's references, timm, open_clip, Ultralytics."""

import random
from typing import Any

import numpy as np
import torch
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import functional as F

from bench.data.pipelines import MEAN, STD

BILINEAR = InterpolationMode.BILINEAR
BICUBIC = InterpolationMode.BICUBIC

REFERENCES = "pytorch/vision@080836e5 references/classification/presets.py"
TIMM = "timm 1.0.31 timm/data/transforms_factory.py"
OPEN_CLIP = "mlfoundations/open_clip@89fb801f src/open_clip/transform.py"
YOLO = "ultralytics/ultralytics@0005af52 ultralytics/data/augment.py"
OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)

POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ra": ("RandAugment", {"magnitude": 9}),
    "ta_wide": ("TrivialAugmentWide", {}),
    "augmix": ("AugMix", {"severity": 3}),
    "imagenet": ("AutoAugment", {}),
}
"""Class and arguments for each value of the references' ``--auto-augment``."""


def references(size: int, policy: str = "", *, erase: float = 0.0, transforms: Any = v1) -> Any:
    """Return the references' preset for training."""
    class_name, settings = POLICIES.get(policy, ("", {}))
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(size, interpolation=BILINEAR, antialias=True),
            transforms.RandomHorizontalFlip(0.5),
            *([getattr(transforms, class_name)(interpolation=BILINEAR, **settings)] if class_name else []),
            *_end_of_references(transforms),
            *([transforms.RandomErasing(p=erase)] if erase else []),
        ]
    )


def references_validation(resize_size: int, size: int, *, transforms: Any = v1) -> Any:
    """Return the references' preset for validation."""
    resize = transforms.Resize(resize_size, interpolation=BILINEAR, antialias=True)
    return transforms.Compose([resize, transforms.CenterCrop(size), *_end_of_references(transforms)])


def _end_of_references(transforms: Any) -> list[Any]:
    to_float = transforms.ConvertImageDtype(torch.float) if transforms is v1 else v2.ToDtype(torch.float, scale=True)
    return [transforms.PILToTensor(), to_float, transforms.Normalize(mean=MEAN, std=STD)]


def timm(size: int, **settings: Any) -> Any:
    """Return timm's pipeline for training or validation.

    Raises:
        ImportError: If timm is not installed.
    """
    from timm.data import create_transform

    return create_transform(size, interpolation="bicubic", **settings)


class MaybeConvertMode:
    """Converts PIL images to RGB, and leaves tensors as they are."""

    def __init__(self, mode: str = "RGB") -> None:
        self.mode = mode

    def __call__(self, pic: Any) -> Any:
        return pic if isinstance(pic, np.ndarray | torch.Tensor) else pic.convert(self.mode)


class MaybeToTensor(v1.ToTensor):
    """Converts PIL images to tensors, and leaves tensors as they are."""

    def __call__(self, pic: Any) -> Any:
        return pic if isinstance(pic, torch.Tensor) else super().__call__(pic)


class color_jitter:
    """Colour jitter with probability ``p``."""

    def __init__(
        self, brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0, hue: float = 0.0, p: float = 0.8
    ) -> None:
        self.p = p
        self.transf = v1.ColorJitter(brightness, contrast, saturation, hue)

    def __call__(self, img: Any) -> Any:
        return self.transf(img) if random.random() < self.p else img


class gray_scale(color_jitter):
    """Conversion to grey with probability ``p``."""

    def __init__(self, p: float = 0.2) -> None:
        self.p = p
        self.transf = v1.Grayscale(num_output_channels=3)

    def __call__(self, img: Any) -> Any:
        return self.transf(img) if random.random() < self.p else img


class ResizeKeepRatio:
    """Resize with fixed aspect ratio: to cover a size (``longest`` 0) or to fit into it (1), with optional random scaling."""

    def __init__(self, size: int, longest: float = 0.0, *, scale_prob: float = 0.0, aspect_prob: float = 0.0) -> None:
        self.size = (size, size)
        self.longest = longest
        self.interpolation = BICUBIC
        self.random_scale_prob = scale_prob
        self.random_scale_range = (0.85, 1.05)
        self.random_aspect_prob = aspect_prob
        self.random_aspect_range = (0.9, 1.11)

    @staticmethod
    def get_params(
        img: Any,
        target_size: Any,
        longest: float,
        scale_prob: float,
        scale_range: tuple[float, float],
        aspect_prob: float,
        aspect_range: tuple[float, float],
    ) -> list[int]:
        sides = img.size[::-1]
        ratios = [side / target for side, target in zip(sides, target_size, strict=True)]
        ratio = max(ratios) * longest + min(ratios) * (1.0 - longest)
        scale = random.uniform(*scale_range) if random.random() < scale_prob else 1.0
        aspect = random.uniform(*aspect_range) if random.random() < aspect_prob else 1.0
        return [round(side * factor / ratio) for side, factor in zip(sides, (scale / aspect, scale * aspect), strict=True)]

    def __call__(self, img: Any) -> Any:
        scales = (self.random_scale_prob, self.random_scale_range)
        aspects = (self.random_aspect_prob, self.random_aspect_range)
        return F.resize(img, self.get_params(img, self.size, self.longest, *scales, *aspects), self.interpolation)


def center_crop_or_pad(img: Any, output_size: tuple[int, int], fill: int = 0) -> Any:
    """Crop an image at its centre, and pad it where it is smaller."""
    _, *sides = F.get_dimensions(img)
    missing = [max(target - side, 0) for target, side in zip(output_size, sides, strict=True)]
    pad_y, pad_x = missing
    img = F.pad(img, [pad_x // 2, pad_y // 2, (pad_x + 1) // 2, (pad_y + 1) // 2], fill=fill)
    excesses = [side + pad - target for side, pad, target in zip(sides, missing, output_size, strict=True)]
    return F.crop(img, *(round(excess / 2.0) for excess in excesses), *output_size)


class CenterCropOrPad(torch.nn.Module):
    """Crop an image at its centre, and pad it where it is smaller."""

    def __init__(self, size: int, fill: int = 0) -> None:
        super().__init__()
        self.size = (size, size)
        self.fill = fill

    def forward(self, img: Any) -> Any:
        return center_crop_or_pad(img, self.size, fill=self.fill)


for _class in (MaybeConvertMode, MaybeToTensor, color_jitter, gray_scale, ResizeKeepRatio, CenterCropOrPad):
    _class.__module__ = "open_clip.transform"


def _open_clip(*head: Any, behind: Any = ()) -> Any:
    end = [MaybeToTensor(), v1.Normalize(mean=OPENAI_MEAN, std=OPENAI_STD)]
    return v1.Compose([*head, MaybeConvertMode(), *behind, *end])


def open_clip(size: int, *, jitter: bool = False) -> Any:
    """Return open_clip's pipeline for training. ``jitter`` adds its jitter and grey. Input: PIL images or floats in [0, 1]."""
    crop = v1.RandomResizedCrop(size, scale=(0.9, 1.0), interpolation=BICUBIC)
    return _open_clip(crop, behind=[color_jitter(0.32, 0.32, 0.32, 0.08, p=0.8), gray_scale(0.2)] if jitter else [])


def open_clip_validation(size: int, *, resize_mode: str = "shortest", fill_color: int = 0) -> Any:
    """Return open_clip's pipeline for validation."""
    if resize_mode == "longest":
        return _open_clip(ResizeKeepRatio(size, longest=1.0), CenterCropOrPad(size, fill=fill_color))
    if resize_mode == "squash":
        return _open_clip(v1.Resize((size, size), interpolation=BICUBIC))
    return _open_clip(v1.Resize(size, interpolation=BICUBIC), v1.CenterCrop((size, size)))


def ultralytics(size: int) -> Any:
    """Return Ultralytics' pipeline for training classifiers."""
    return v1.Compose(
        [
            v1.RandomResizedCrop(size, scale=(0.5, 1.0), ratio=(3 / 4, 4 / 3), interpolation=BILINEAR),
            v1.RandomHorizontalFlip(p=0.5),
            v1.RandAugment(interpolation=BILINEAR),
            v1.ToTensor(),
            v1.Normalize(mean=torch.zeros(3), std=torch.ones(3)),
            v1.RandomErasing(p=0.4, inplace=True),
        ]
    )


def ultralytics_validation(size: int) -> Any:
    """Return Ultralytics' pipeline for validating classifiers."""
    normalize = v1.Normalize(mean=torch.zeros(3), std=torch.ones(3))
    return v1.Compose([v1.Resize(size, interpolation=BILINEAR), v1.CenterCrop(size), v1.ToTensor(), normalize])
