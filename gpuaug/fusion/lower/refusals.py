"""What ``fuse`` is given in place of Kornia's modules, and what to type instead."""

from collections.abc import Sequence
from inspect import signature
from operator import attrgetter
from typing import Any, NamedTuple

from kornia import augmentation as K
from torch import nn

from gpuaug.core.errors import ArgumentTypeError
from gpuaug.core.torchvision_transforms import drawn_once, torchvision_class

COUNTERPARTS = {
    "AutoAugment": "auto.AutoAugment",
    "CenterCrop": "CenterCrop",
    "ColorJitter": "ColorJitter",
    "CutMix": "RandomCutMixV2",
    "ElasticTransform": "RandomElasticTransform",
    "GaussianBlur": "RandomGaussianBlur",
    "GaussianNoise": "RandomGaussianNoise",
    "Grayscale": "RandomGrayscale",
    "JPEG": "RandomJPEG",
    "MixUp": "RandomMixUpV2",
    "Normalize": "Normalize",
    "RandAugment": "auto.RandAugment",
    "RandomAdjustSharpness": "RandomSharpness",
    "RandomAffine": "RandomAffine",
    "RandomAutocontrast": "RandomAutoContrast",
    "RandomChannelPermutation": "RandomChannelShuffle",
    "RandomCrop": "RandomCrop",
    "RandomEqualize": "RandomEqualize",
    "RandomErasing": "RandomErasing",
    "RandomGrayscale": "RandomGrayscale",
    "RandomHorizontalFlip": "RandomHorizontalFlip",
    "RandomInvert": "RandomInvert",
    "RandomPerspective": "RandomPerspective",
    "RandomPosterize": "RandomPosterize",
    "RandomResizedCrop": "RandomResizedCrop",
    "RandomRotation": "RandomRotation",
    "RandomSolarize": "RandomSolarize",
    "RandomVerticalFlip": "RandomVerticalFlip",
    "Resize": "Resize",
    "TrivialAugmentWide": "auto.TrivialAugment",
}
"""Kornia's name of a transform of torchvision's, within ``kornia.augmentation``."""

NOT_NEEDED = ("ConvertImageDtype", "Identity", "PILToTensor", "ToDtype", "ToImage", "ToPureTensor", "ToTensor")
"""Transforms of torchvision's whose work a fused pipeline does, or that do none."""

_PICKS = {"Compose": "", "RandomChoice": ", random_apply=1", "RandomOrder": ", random_apply=True"}
"""Containers of torchvision's, and what makes Kornia's container pick as they do."""


class _Rewritten(NamedTuple):
    """A transform of torchvision's in Kornia's words."""

    lines: tuple[str, ...] = ()
    """What to type, a module each."""
    not_needed: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    """Names of transforms that have no counterpart."""


def refuse_torchvision(module: Any) -> None:
    """Refuse a transform of torchvision's: it would run as it is, and draw once for the whole batch.

    Raises:
        ArgumentTypeError: If ``module`` is one, or a module of Kornia's that holds one.
    """
    # Kornia's containers take any module; what other modules hold is their own affair.
    holds = isinstance(module, nn.Module) and type(module).__module__.startswith("kornia.")
    for each in module.modules() if holds else (module,):
        if torchvision_class(each) is not None:
            once = ", which draws once for the whole batch" if drawn_once(each) else ""
            raise ArgumentTypeError(
                f"pipeline must be made of Kornia's modules, got torchvision's {type(each).__name__}{once}. {_way_out(each)}"
            )


def _way_out(transform: Any) -> str:
    found = _rewritten(transform)
    said = []
    if found.lines:
        lines = ", ".join(found.lines)
        said.append(f"Write {f'K.AugmentationSequential({lines})' if len(found.lines) > 1 else lines} instead")
    if found.not_needed:
        names = ", ".join(dict.fromkeys(found.not_needed))
        said.append(f"Leave out {names}: gpuaug.fuse takes uint8 tensors and scales them to [0, 1]")
    if found.without:
        names = ", ".join(dict.fromkeys(found.without))
        once = ", knowing that it draws once for the whole batch" if drawn_once(transform) else ""
        said.append(f"Keep {names} in the dataset, or in a stage of its own, gpuaug.TransformStage(transform){once}")
    return ". ".join(said) + "."


def _rewritten(transform: Any, p: float = 1.0) -> _Rewritten:
    """What to type in place of ``transform``.

    Args:
        transform: Of torchvision, or anything that one of its containers holds.
        p: The chance of a container that holds this transform alone.
    """
    kind, own = torchvision_class(transform), type(transform)
    if kind is None or kind is not own:  # a function, a module, or a subclass, which may do anything
        return _Rewritten(without=(getattr(transform, "__name__", own.__name__),))
    name, members = kind.__name__, list(getattr(transform, "transforms", ()))
    if name in NOT_NEEDED:
        return _Rewritten(not_needed=(name,))
    if name in COUNTERPARTS:
        return _Rewritten((_line(COUNTERPARTS[name], round(getattr(transform, "p", 1.0) * p, 4)),))
    if name == "RandomApply" and len(members) == 1 and type(members[0]).__name__ in COUNTERPARTS:
        return _rewritten(members[0], transform.p)
    if name not in _PICKS:  # several that apply together by chance have no counterpart either
        return _Rewritten(without=(name,))
    inner = _together([_rewritten(each) for each in members])
    picks = _PICKS[name]
    if not picks or not inner.lines:
        return inner
    weighted = ", random_apply_weights=[…]" if len(set(getattr(transform, "p", None) or ())) > 1 else ""
    return inner._replace(lines=(f"K.AugmentationSequential({', '.join(inner.lines)}{picks}{weighted})",))


def _together(parts: Sequence[_Rewritten]) -> _Rewritten:
    lines, not_needed, without = (tuple(name for part in parts for name in part[field]) for field in range(3))
    return _Rewritten(lines, not_needed, without)


def _line(name: str, p: float) -> str:
    """The call of one of Kornia's modules, with ``p`` where Kornia's default is another."""
    parameters = signature(attrgetter(name)(K)).parameters
    return f"K.{name}(…, p={p})" if "p" in parameters and parameters["p"].default != p else f"K.{name}(…)"
