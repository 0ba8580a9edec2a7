"""Errors for transforms that ``fuse`` does not support, with replacements."""

from collections.abc import Sequence
from inspect import Parameter, signature
from typing import Any

from torch import nn

from gpuaug.core.errors import ArgumentTypeError
from gpuaug.core.torchvision_types import difference, library_class, torchvision_class

_IN_DATASET = "Keep it in the dataset"
_MIX = "It mixes the images of a batch. Give it a stage of its own"
_TARGETS = "It is for targets, which follow images as data_keys=['input', 'targets']. Leave it out: boxes end at the frame"
_KEYPOINTS = "It is for keypoints, which may leave the frame. Call it on the targets that gpuaug.fuse returns"

NOT_TAKEN = {
    "ClampBoundingBoxes": _TARGETS,
    "ClampKeyPoints": _KEYPOINTS,
    "ConvertBoundingBoxFormat": _TARGETS,
    "CutMix": _MIX,
    "FiveCrop": f"It makes several images of one. {_IN_DATASET}",
    "MixUp": _MIX,
    "OpticalFlow": f"It is for pairs of images. {_IN_DATASET}",
    "SanitizeBoundingBoxes": _TARGETS,
    "SanitizeKeyPoints": _KEYPOINTS,
    "SetClampingMode": _TARGETS,
    "TenCrop": f"It makes several images of one. {_IN_DATASET}",
    "ToPILImage": "gpuaug.fuse takes tensors and gives tensors. Leave it out",
    "VideoClassification": f"It is for videos. {_IN_DATASET}",
}
"""Advice for each of torchvision's transforms that cannot run image by image, by class name."""

NAMED_MODULES = ("open_clip.transform", "timm.data.auto_augment", "timm.data.random_erasing", "timm.data.transforms")
"""Python modules with transforms that are recognized by class name, and may not derive from torchvision's classes."""

TIMM = {
    "AugMixAugment": "Write v2.AugMix(…) instead, which torchvision runs image by image",
    "AutoAugment": "Write v2.AutoAugment() instead, which has one policy",
    "RandAugment": "Write v2.RandAugment(…) instead, which has other magnitudes",
    "ToNumpy": "gpuaug.fuse takes tensors and gives tensors. Leave it out",
    "ToTensor": "Write v2.ToDtype(torch.float32, scale=True) instead, and divide later means and deviations by 255",
}
"""Advice for each unsupported transform of timm, by class name."""


TIMMS_SETTINGS = {
    "with mode='rand'": "Pass re_mode='const' to create_transform",
    "with random interpolation": "Pass interpolation='bicubic' to create_transform",
    "with several rectangles": "Pass re_count=1 to create_transform",
}
"""Advice for each setting of timm's transforms that torchvision does not have."""


def refuse_held(module: nn.Module) -> None:
    """Raise an error for torchvision's transforms inside a module of Kornia, which would call them once per batch.

    Raises:
        ArgumentTypeError: If ``module`` is Kornia's, is not lowered member by member, and contains such a transform.
    """
    kind: Any = library_class(module)
    changed = kind is not None and difference(module, kind) is not None
    if kind is None or (changed and type(module) is not kind):  # the members of a user's module are not checked
        return
    sequence = (
        not changed
        and kind.__name__ in ("AugmentationSequential", "ImageSequential")
        and not getattr(module, "random_apply", 0)
    )
    for child in () if sequence else module.modules():
        if torchvision_class(child) is not None:
            raise ArgumentTypeError(
                f"{type(module).__name__} must hold Kornia's modules, got torchvision's {type(child).__name__}, which it would "
                "call once for the whole batch. Put it into a list, v2.Compose or v2.RandomChoice instead."
            )


def refuse_transform(transform: Any) -> None:
    """Raise an error for transforms that cannot run image by image.

    Raises:
        ArgumentTypeError: If ``transform`` is such a transform of torchvision, or an unsupported transform of timm.
    """
    kind = type(transform)
    if kind.__module__.startswith("timm.") and kind.__name__ in TIMM:
        raise refuse_timms(kind.__name__, TIMM[kind.__name__])
    base = torchvision_class(transform)
    if base is not None and base.__name__ in NOT_TAKEN:
        changed = difference(transform, base)
        name = kind.__name__ if changed is None else f"{kind.__name__}, {changed}"
        raise ArgumentTypeError(
            f"pipeline must be made of transforms that map one image to one image, got torchvision's {name}. "
            f"{NOT_TAKEN[base.__name__]}."
        )


def refuse_timms(name: str, way_out: str) -> ArgumentTypeError:
    """Return the error for a transform of timm. ``way_out``: advice."""
    return ArgumentTypeError(
        f"pipeline must be made of torchvision's transforms, v2, or Kornia's modules, got timm's {name}. {way_out}."
    )


def is_maybe_to_tensor(transform: Any) -> bool:
    """Return whether ``transform`` is ``MaybeToTensor`` of timm, DINOv2 or open_clip, which returns tensors unchanged."""
    kind = type(transform)
    return kind.__name__ == "MaybeToTensor" and kind.__module__.partition(".")[0] in ("timm", "dinov2", "open_clip")


def v2_of(transform: Any, exact: Sequence[type]) -> Any:
    """Convert a transform of torchvision's v1 to v2. All other transforms are returned unchanged.

    Args:
        transform: Transform of torchvision.
        exact: Classes of v2 with the same settings and results as the classes of v1 with the same name.

    Raises:
        ArgumentTypeError: If ``transform`` is of v1, and ``exact`` has no equivalent class.
    """
    if is_maybe_to_tensor(transform):
        return next(class_ for class_ in exact if class_.__module__.startswith("torchvision.transforms.transforms"))()
    refuse_transform(transform)
    kind = torchvision_class(transform)
    if kind is None or kind in exact or kind.__module__.startswith("torchvision.transforms.v2"):
        return transform
    v2_class = next((class_ for class_ in exact if class_.__name__ == kind.__name__), None)
    if difference(transform, kind) is not None or (v2_class is None and type(transform) is not kind):
        return transform
    if v2_class is None:
        raise ArgumentTypeError(
            f"pipeline must be made of torchvision's transforms, v2, or Kornia's modules, got {kind.__name__} of v1. "
            f"Write v2.{kind.__name__}(…) instead: from torchvision.transforms import v2."
        )
    parameters = signature(v2_class).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD]
    return v2_class(**{name: getattr(transform, name) for name in names})
