"""Transforms of torchvision that convert images to another dtype (*conversions*), and equivalents of torchvision's presets."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms._presets import ImageClassification, ObjectDetection, SemanticSegmentation

from gpuaug.core.errors import ArgumentError
from gpuaug.core.torchvision_types import class_of, in_sequence
from gpuaug.fusion.lower import by_name
from gpuaug.fusion.lower.refusals import is_maybe_to_tensor

CONVERSIONS = (v2.ToDtype, v2.ConvertImageDtype, v2.ToTensor, v1.ToTensor)
"""Classes of conversions."""

PRESETS = (ImageClassification, ObjectDetection, SemanticSegmentation)
"""Classes of the presets: the transforms that ``weights.transforms()`` returns for torchvision's models."""

_IMAGES = (tv_tensors.Image, tv_tensors.Video, torch.Tensor)
"""Keys of the ``dtype`` of a conversion, if it is a dict by class of tensor, that apply to images. The first one counts."""


def for_videos(transform: Any) -> Any:
    """Return a transform for inputs of class ``tv_tensors.Video``. Ops read the settings for ``tv_tensors.Image``.

    A setting may be a dict by class of tensor. In the result, its value for ``Video`` replaces its value for ``Image``.
    """
    settings = {name: getattr(transform, name, None) for name in ("fill", "_fill", "dtype")}
    by_type = {name: value for name, value in settings.items() if isinstance(value, dict) and tv_tensors.Video in value}
    if not by_type:
        return transform
    transform = copy.copy(transform)
    for name, value in by_type.items():
        setattr(transform, name, {**value, tv_tensors.Image: value[tv_tensors.Video]})
    return transform


def conversion_of(transform: Any) -> tuple[torch.dtype | None, bool]:
    """Return (output dtype of images, whether their values are scaled) of a conversion.

    The dtype is ``None`` if images are not converted, but only masks.

    Raises:
        ArgumentError: If the conversion converts other tensors than images and masks.
    """
    if isinstance(transform, v2.ToTensor | v1.ToTensor):
        return torch.float32, True
    setting = transform.dtype
    if isinstance(setting, dict):
        image_types = (*_IMAGES, tv_tensors.Mask)
        other_types = {cls: dtype for cls, dtype in setting.items() if cls not in image_types and dtype is not None}
        if other_types:
            raise ArgumentError(
                f"dtype of {type(transform).__name__} must be set for images and masks only, got {other_types}. Convert other "
                "values after gpuaug.fuse, which does not change their type."
            )
        setting = next((setting[cls] for cls in _IMAGES if cls in setting), None)
    return setting, bool(transform.scale) if isinstance(transform, v2.ToDtype) else True


def converts_to_floats(transform: Any) -> bool:
    """Return whether a transform converts integer images to floats."""
    if is_maybe_to_tensor(transform):  # lowered like ToTensor
        return True
    if class_of(transform, (*CONVERSIONS, v1.ConvertImageDtype)) is None:
        return False
    dtype, _ = conversion_of(transform)
    return dtype is not None and dtype.is_floating_point


def torchvision_equivalent(transform: Any) -> Any:
    """Return a transform or ``Compose`` of torchvision that is equivalent to ``transform``; ``transform`` itself without one.

    Presets, and transforms of other libraries that ``by_name`` recognizes, have equivalents.
    """
    transform = by_name.torchvision_equivalent(transform)
    class_ = class_of(transform, PRESETS)
    if class_ is None:
        return transform
    to_float = v2.ToDtype(torch.float32, scale=True)
    if class_ is ObjectDetection:
        return to_float
    transforms: list[Any] = [to_float, v2.Normalize(transform.mean, transform.std)]
    if class_ is ImageClassification:
        transforms.insert(0, v2.CenterCrop(transform.crop_size))
    if class_ is ImageClassification or transform.resize_size is not None:
        resize: Any = v2.Resize(transform.resize_size, transform.interpolation, antialias=transform.antialias)
        resize.rounds_once = True  # read by the op: presets call functions of v1, which resize bytes as floats, and round once
        transforms.insert(0, resize)
    return v2.Compose(transforms)


def expanded(pipeline: Any) -> Iterator[Any]:
    """Yield the transforms that run for every sample, in order, each replaced by its ``torchvision_equivalent``.

    A container that picks transforms at random is itself yielded, not its members.
    """
    for transform in in_sequence(pipeline):
        replacement = torchvision_equivalent(transform)
        if replacement is transform:
            yield transform
        else:
            yield from in_sequence(replacement)
