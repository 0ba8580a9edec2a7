"""Errors for transforms that ``gpuaug.fuse`` does not support, with advice."""

from collections.abc import Sequence
from inspect import Parameter, signature
from typing import Any

from kornia import augmentation as K
from torch import nn

from gpuaug.core.errors import ArgumentTypeError
from gpuaug.core.torchvision_types import difference, has_hooks, is_same, library_class, torchvision_class

_IN_DATASET = "Keep it in the dataset"
_MIX = "It mixes the images of a batch. Give it a stage of its own"
_TARGETS = "It is for targets, which are passed with data_keys=['input', 'targets']. Leave it out: boxes are clipped to images"
_KEYPOINTS = "It is for keypoints, which may lie outside of images. Call it on the targets that gpuaug.fuse returns"

UNSUPPORTED = {
    "ClampBoundingBoxes": _TARGETS,
    "ClampKeyPoints": _KEYPOINTS,
    "ConvertBoundingBoxFormat": _TARGETS,
    "CutMix": _MIX,
    "MixUp": _MIX,
    "OpticalFlow": f"It is for pairs of images. {_IN_DATASET}",
    "SanitizeBoundingBoxes": _TARGETS,
    "SanitizeKeyPoints": _KEYPOINTS,
    "SetClampingMode": _TARGETS,
    "ToPILImage": "gpuaug.fuse takes tensors and gives tensors. Leave it out",
    "VideoClassification": f"It is for videos. {_IN_DATASET}",
}
"""Class name of a transform of torchvision that cannot run image by image → advice for the error.

Mixes and transforms of boxes are lowered. The error is raised for their subclasses that override methods.
"""

NAMED_MODULES = ("open_clip.transform", "timm.data.auto_augment", "timm.data.random_erasing", "timm.data.transforms")
"""Python modules whose transforms are recognized by class name, because some do not derive from torchvision's classes."""

UNSUPPORTED_TIMM = {
    "AugMixAugment": "Write v2.AugMix(…) instead, which has other magnitudes",
    "AutoAugment": "Write v2.AutoAugment() instead, which has one policy",
    "RandAugment": "Write v2.RandAugment(…) instead, which has other magnitudes",
    "ToNumpy": "gpuaug.fuse takes tensors and gives tensors. Leave it out",
    "ToTensor": "Write v2.ToDtype(torch.float32, scale=True) instead, and divide later means and deviations by 255",
    "with mode='rand'": "Pass re_mode='const' to create_transform",
    "with random interpolation": "Pass interpolation='bicubic' to create_transform",
    "with several rectangles": "Pass re_count=1 to create_transform",
}
"""Class name of an unsupported transform of timm, or setting that torchvision does not have → advice for the error.

``create_transform`` is timm's.
"""

ATTRIBUTE_ERRORS = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""Errors of the constructor of an op, if the user has set an attribute of the module to a value that the op does not expect."""


def attributes_reason(module: nn.Module, base: type, error: Exception) -> str:
    """Return the reason why a module is not lowered: its attributes caused ``error``. ``base``: its nearest lowered class."""
    return f"{'' if type(module) is base else 'a subclass of '}{base.__name__} with other attributes: {error}"


def refuse_inside_kornia(module: nn.Module) -> None:
    """Raise an error for torchvision's transforms inside a module of Kornia that would call them once per batch.

    Not called for a container that is lowered member by member.

    Raises:
        ArgumentTypeError: If ``module`` is of a class of Kornia, and contains a transform of torchvision.
    """
    class_: Any = library_class(module)
    if class_ is None or (type(module) is not class_ and difference(module, class_) is not None):  # a class of the user
        return
    for child in module.modules():
        if torchvision_class(child) is not None:
            raise ArgumentTypeError(
                f"{type(module).__name__} must hold Kornia's modules, got torchvision's {type(child).__name__}, which Kornia "
                "would call once for the whole batch. Put the transform into a list, v2.Compose or v2.RandomChoice instead."
            )


def refuse_own_forward(module: nn.Module) -> None:
    """Raise an error for a container of Kornia with a ``forward`` or hooks of the user, which a fused pipeline cannot call.

    Not called for a container inside another container of Kornia: there, Kornia calls neither ``forward`` nor hooks.

    Raises:
        ArgumentTypeError: If ``module`` is such a container.
    """
    class_: Any = library_class(module)
    if class_ is None or not isinstance(module, K.container.ImageSequentialBase):
        return
    has_own_forward = not is_same(type(module).forward, class_.forward) or "forward" in vars(module)
    if has_own_forward or has_hooks(module):
        raise ArgumentTypeError(
            f"pipeline must hold containers with Kornia's own forward and without hooks, got {type(module).__name__}: "
            f"{difference(module, class_)}. Put it into a stage without gpuaug.fuse."
        )


def refuse_volumes(module: nn.Module) -> None:
    """Raise an error for Kornia's modules for volumes, (B, C, D, H, W), which would treat the frames of clips as depth.

    Raises:
        ArgumentTypeError: If ``module`` is such a module, or a container of Kornia with such a module.
    """
    for part in module.modules() if library_class(module) is not None else ():
        if any(class_.__module__.startswith("kornia.augmentation._3d.") for class_ in type(part).__mro__):
            raise ArgumentTypeError(
                f"pipeline must hold modules for images, (B, C, H, W), got {type(part).__name__}, which is for volumes, "
                "(B, C, D, H, W). Put it into a stage without gpuaug.fuse."
            )


def refuse_transform(transform: Any) -> None:
    """Raise an error for a transform in ``UNSUPPORTED`` or ``UNSUPPORTED_TIMM``, and for image processors of transformers.

    Raises:
        ArgumentTypeError: If ``transform`` cannot run image by image, is an unsupported transform of timm, or is an image
            processor.
    """
    class_ = type(transform)
    if hasattr(transform, "image_mean") and hasattr(transform, "do_resize"):
        raise ArgumentTypeError(
            f"pipeline must be made of transforms, got the image processor {class_.__name__}. Pass the processor alone, "
            "gpuaug.fuse(processor, ragged=True), or write its operations as transforms."
        )
    if class_.__module__.startswith("timm.") and class_.__name__ in UNSUPPORTED_TIMM:
        raise timm_error(class_)
    base = torchvision_class(transform)
    if base is not None and base.__name__ in UNSUPPORTED:
        type_difference = difference(transform, base)
        name = class_.__name__ if type_difference is None else f"{class_.__name__}, {type_difference}"
        raise ArgumentTypeError(
            f"pipeline must be made of transforms that map one image to one image, got torchvision's {name}. "
            f"{UNSUPPORTED[base.__name__]}."
        )


def timm_error(class_: type, setting: str = "") -> ArgumentTypeError:
    """Return the error for a transform of timm: for a class, or a ``setting`` of a class, in ``UNSUPPORTED_TIMM``."""
    name = f"{class_.__name__} {setting}".rstrip()
    advice = UNSUPPORTED_TIMM[setting or class_.__name__]
    return ArgumentTypeError(
        f"pipeline must be made of torchvision's transforms, v2, or Kornia's modules, got timm's {name}. {advice}."
    )


def is_maybe_to_tensor(transform: Any) -> bool:
    """Return whether ``transform`` is ``MaybeToTensor`` of timm, DINOv2 or open_clip: ``ToTensor`` for PIL images only."""
    class_ = type(transform)
    return class_.__name__ == "MaybeToTensor" and class_.__module__.partition(".")[0] in ("timm", "dinov2", "open_clip")


def v2_of(transform: Any, equivalents: Sequence[type]) -> Any:
    """Convert a transform of torchvision's v1 to v2. All other transforms are returned unchanged.

    ``MaybeToTensor`` is converted to ``ToTensor`` of v1, because the images of a batch take the place of PIL images.

    Args:
        transform: Transform of any library.
        equivalents: Classes of v2 with the same settings and results as the class of v1 with the same name, and classes of v1
            that are not converted.

    Raises:
        ArgumentTypeError: If ``transform`` belongs to v1, and ``equivalents`` has no class with its name, or if
            ``refuse_transform`` refuses it.
    """
    if is_maybe_to_tensor(transform):  # ToTensor is the only class of v1 in ``equivalents``
        return next(class_ for class_ in equivalents if class_.__module__.startswith("torchvision.transforms.transforms"))()
    refuse_transform(transform)
    v1_class = torchvision_class(transform)
    if v1_class is None or v1_class in equivalents or v1_class.__module__.startswith("torchvision.transforms.v2"):
        return transform
    v2_class = next((candidate for candidate in equivalents if candidate.__name__ == v1_class.__name__), None)
    if difference(transform, v1_class) is not None or (v2_class is None and type(transform) is not v1_class):
        return transform
    if v2_class is None:
        raise ArgumentTypeError(
            f"pipeline must be made of torchvision's transforms, v2, or Kornia's modules, got {v1_class.__name__} of v1. "
            f"Write v2.{v1_class.__name__}(…) instead: from torchvision.transforms import v2."
        )
    parameters = signature(v2_class).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD]
    return v2_class(**{name: getattr(transform, name) for name in names})
