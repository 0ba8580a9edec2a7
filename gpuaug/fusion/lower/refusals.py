"""Transforms that ``fuse`` refuses, and their replacements."""

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
"""Names of torchvision's transforms that cannot run image by image, and the advice for each."""

NAMED_MODULES = ("open_clip.transform", "timm.data.auto_augment", "timm.data.random_erasing", "timm.data.transforms")
"""Modules of transforms that are told by their names, and may be no subclass of torchvision's."""

TIMM = {
    "AugMixAugment": "Write v2.AugMix(…) instead, which torchvision runs image by image",
    "AutoAugment": "Write v2.AutoAugment() instead, which has one policy",
    "RandAugment": "Write v2.RandAugment(…) instead, which has other magnitudes",
    "ToNumpy": "gpuaug.fuse takes tensors and gives tensors. Leave it out",
    "ToTensor": "Write v2.ToDtype(torch.float32, scale=True) instead, and divide later means and deviations by 255",
}
"""Names of timm's transforms, and the advice for each."""


TIMMS_SETTINGS = {
    "with mode='rand'": "Pass re_mode='const' to create_transform",
    "with random interpolation": "Pass interpolation='bicubic' to create_transform",
    "with several rectangles": "Pass re_count=1 to create_transform",
}
"""Settings of timm's transforms that torchvision has not, and the advice for each."""


def refuse_held(module: nn.Module) -> None:
    """Refuse transforms of torchvision's in a module of Kornia's that calls them itself: they would draw once for a batch.

    Raises:
        ArgumentTypeError: If ``module`` is Kornia's, and holds one where nothing takes them apart.
    """
    kind: Any = library_class(module)
    changed = kind is not None and difference(module, kind) is not None
    if kind is None or (changed and type(module) is not kind):  # what a user's module holds is its own affair
        return
    sequence = (
        not changed
        and kind.__name__ in ("AugmentationSequential", "ImageSequential")
        and not getattr(module, "random_apply", 0)
    )
    for each in () if sequence else module.modules():
        if torchvision_class(each) is not None:
            raise ArgumentTypeError(
                f"{type(module).__name__} must hold Kornia's modules, got torchvision's {type(each).__name__}, which it would "
                "call once for the whole batch. Put it into a list, v2.Compose or v2.RandomChoice instead."
            )


def refuse_transform(transform: Any) -> None:
    """Refuse transforms that cannot run image by image.

    Raises:
        ArgumentTypeError: If ``transform`` is such a transform of torchvision's, or one of timm's.
    """
    kind = type(transform)
    if kind.__module__.startswith("timm.") and kind.__name__ in TIMM:
        raise refuse_timms(kind.__name__, TIMM[kind.__name__])
    base = torchvision_class(transform)
    if base is not None and base.__name__ in NOT_TAKEN:
        changed = difference(transform, base)
        name = kind.__name__ if changed is None else f"{kind.__name__}, {changed}"
        raise ArgumentTypeError(
            f"pipeline must be made of transforms that take one image and give one, got torchvision's {name}. "
            f"{NOT_TAKEN[base.__name__]}."
        )


def refuse_timms(name: str, way_out: str) -> ArgumentTypeError:
    """The error for a transform of timm's."""
    return ArgumentTypeError(
        f"pipeline must be made of torchvision's transforms, v2, or Kornia's modules, got timm's {name}. {way_out}."
    )


def is_maybe_to_tensor(transform: Any) -> bool:
    """True for the ``MaybeToTensor`` of timm, DINOv2 and open_clip, which returns tensors unchanged."""
    kind = type(transform)
    return kind.__name__ == "MaybeToTensor" and kind.__module__.partition(".")[0] in ("timm", "dinov2", "open_clip")


def v2_of(transform: Any, exact: Sequence[type]) -> Any:
    """The v2 form of a transform of torchvision's v1; all others as they are.

    Args:
        transform: Of torchvision.
        exact: Transforms of v2 with the same settings as those of v1 with their names, and the same results.

    Raises:
        ArgumentTypeError: If it is of v1, and there is none such.
    """
    if is_maybe_to_tensor(transform):
        return next(each for each in exact if each.__module__.startswith("torchvision.transforms.transforms"))()
    refuse_transform(transform)
    kind = torchvision_class(transform)
    if kind is None or kind in exact or kind.__module__.startswith("torchvision.transforms.v2"):
        return transform
    made = next((each for each in exact if each.__name__ == kind.__name__), None)
    if difference(transform, kind) is not None or (made is None and type(transform) is not kind):
        return transform
    if made is None:
        raise ArgumentTypeError(
            f"pipeline must be made of torchvision's transforms, v2, or Kornia's modules, got {kind.__name__} of v1. "
            f"Write v2.{kind.__name__}(…) instead: from torchvision.transforms import v2."
        )
    plain = (each for each in signature(made).parameters.values() if each.kind is Parameter.POSITIONAL_OR_KEYWORD)
    return made(**{each.name: getattr(transform, each.name) for each in plain})
