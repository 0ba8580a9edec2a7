"""Training and validation of classifiers, and of CLIP: torchvision's references, timm, open_clip, Ultralytics."""

import random
from typing import Any

import numpy as np
import torch
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

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
    """The preset for training."""
    kind, settings = POLICIES.get(policy, ("", {}))
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(size, interpolation=BILINEAR, antialias=True),
            transforms.RandomHorizontalFlip(0.5),
            *([getattr(transforms, kind)(interpolation=BILINEAR, **settings)] if kind else []),
            *_end_of_references(transforms),
            *([transforms.RandomErasing(p=erase)] if erase else []),
        ]
    )


def references_validation(resized: int, size: int, *, transforms: Any = v1) -> Any:
    """The preset for validation."""
    resize = transforms.Resize(resized, interpolation=BILINEAR, antialias=True)
    return transforms.Compose([resize, transforms.CenterCrop(size), *_end_of_references(transforms)])


def _end_of_references(transforms: Any) -> list[Any]:
    to_float = transforms.ConvertImageDtype(torch.float) if transforms is v1 else v2.ToDtype(torch.float, scale=True)
    return [transforms.PILToTensor(), to_float, transforms.Normalize(mean=MEAN, std=STD)]


def timm(size: int, **settings: Any) -> Any:
    """Timm's own pipeline for training or validation.

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
    """A jitter by chance."""

    def __init__(
        self, brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0, hue: float = 0.0, p: float = 0.8
    ) -> None:
        self.p = p
        self.transf = v1.ColorJitter(brightness, contrast, saturation, hue)

    def __call__(self, img: Any) -> Any:
        return self.transf(img) if random.random() < self.p else img


class gray_scale(color_jitter):
    """Grey by chance."""

    def __init__(self, p: float = 0.2) -> None:
        self.p = p
        self.transf = v1.Grayscale(num_output_channels=3)

    def __call__(self, img: Any) -> Any:
        return self.transf(img) if random.random() < self.p else img


for _kind in (MaybeConvertMode, MaybeToTensor, color_jitter, gray_scale):
    _kind.__module__ = "open_clip.transform"


def _open_clip(*head: Any, behind: Any = ()) -> Any:
    end = [MaybeToTensor(), v1.Normalize(mean=OPENAI_MEAN, std=OPENAI_STD)]
    return v1.Compose([*head, MaybeConvertMode(), *behind, *end])


def open_clip(size: int, *, jitter: bool = False) -> Any:
    """open_clip's pipeline for training, alone or with its jitter and grey. It takes PIL images and floats in [0, 1]."""
    crop = v1.RandomResizedCrop(size, scale=(0.9, 1.0), interpolation=BICUBIC)
    return _open_clip(crop, behind=[color_jitter(0.32, 0.32, 0.32, 0.08, p=0.8), gray_scale(0.2)] if jitter else [])


def open_clip_validation(size: int, *, resize_mode: str = "shortest") -> Any:
    """open_clip's pipeline for validation."""
    if resize_mode == "squash":
        return _open_clip(v1.Resize((size, size), interpolation=BICUBIC))
    return _open_clip(v1.Resize(size, interpolation=BICUBIC), v1.CenterCrop((size, size)))


def ultralytics(size: int) -> Any:
    """Ultralytics' pipeline for training classifiers."""
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
    """Ultralytics' pipeline for validating classifiers."""
    normalize = v1.Normalize(mean=torch.zeros(3), std=torch.ones(3))
    return v1.Compose([v1.Resize(size, interpolation=BILINEAR), v1.CenterCrop(size), v1.ToTensor(), normalize])
