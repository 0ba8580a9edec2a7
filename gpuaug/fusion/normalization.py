"""Normalization of the images that a pipeline returns, which ``gpuaug.show`` inverts."""

from collections.abc import Sequence
from typing import Any

import torch
from kornia import augmentation as K
from torch import Tensor

from gpuaug.core.torchvision_types import class_of, difference, in_sequence, torchvision_class


def _is_torchvision_class(transform: Any, name: str) -> bool:
    """Return whether ``transform`` behaves as torchvision's class ``name``."""
    class_ = torchvision_class(transform)
    return class_ is not None and class_.__name__ == name and difference(transform, class_) is None


def normalized_by(transforms: Sequence[Any], largest: int = 1) -> tuple[Tensor, Tensor] | None:
    """Return (mean, standard deviation) by which the output of all transforms is normalized, or ``None``.

    Args:
        transforms: Transforms of all stages, in order.
        largest: Value of the input images that stands for 1.

    Shape:
        - returns: (C, 1, 1) or (1, 1, 1) each, float32
    """
    normalization: tuple[Tensor, Tensor] | None = None
    for module in (module for transform in transforms for module in in_sequence(transform)):
        class_ = class_of(module, (K.Denormalize, K.Normalize))
        dtype = getattr(module, "dtype", None)  # output type of a conversion; a dict by type of input in ``v2.ToDtype``
        is_float = class_ is not None or torch.float32 in (dtype.values() if isinstance(dtype, dict) else [dtype])
        if class_ is K.Denormalize:
            normalization = None
        elif _is_torchvision_class(module, "ToDtype") and is_float and not module.scale and largest > 1:
            # Without ``scale`` floats keep the range of the integers: images in [0, 1], minus 0, divided by 1 / largest.
            zero = torch.zeros(1, 1, 1, dtype=torch.float32, device="cpu")
            normalization = zero, zero + 1 / largest
        elif (class_ is K.Normalize and module.p == 1 == module.p_batch) or _is_torchvision_class(module, "Normalize"):
            settings = module.flags if class_ is K.Normalize else vars(module)
            values = (torch.as_tensor(settings[name], dtype=torch.float32, device="cpu").detach() for name in ("mean", "std"))
            mean, std = (value.reshape(-1, 1, 1) for value in values)
            normalization = (
                (mean, std) if normalization is None else (normalization[0] + mean * normalization[1], std * normalization[1])
            )
        largest = 1 if is_float or _is_torchvision_class(module, "ToTensor") else largest
    return normalization


def lam_weighs_sample(transforms: Sequence[Any]) -> bool:
    """Return whether lambda in Kornia's mixed labels is the weight of the sample, not of the sample that is mixed in."""
    modules = (module for transform in transforms for module in in_sequence(transform))
    return any(isinstance(module, K.RandomCutMixV2) and module.use_correct_lambda for module in modules)
