"""Transforms of LeRobot, open_clip, timm and torchgeo, told by their names and their methods: gpuaug imports none of them."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations, permutations
from math import comb
from types import FunctionType
from typing import Any

import torch
from torchvision.transforms import v2

from gpuaug.core.errors import ArgumentTypeError
from gpuaug.core.torchvision_types import NOT_APPLIED, code_names, difference, is_same
from gpuaug.fusion.lower.refusals import TIMMS_SETTINGS, refuse_timms
from gpuaug.fusion.ops.torchvision import filters, timm
from gpuaug.fusion.ops.torchvision.base import TorchvisionOp, Units

METHODS: dict[str, dict[str, str]] = {
    "lerobot.ImageTransforms": {"forward": "tf"},
    "lerobot.RandomSubsetApply": {"forward": "len multinomial n_subset p random_order sort tensor torch transforms values"},
    "lerobot.SharpnessJitter": {
        "make_params": "empty item sharpness torch uniform_",
        "transform": "F _call_kernel adjust_sharpness",
    },
    "open_clip.CenterCropOrPad": {"forward": "center_crop_or_pad fill size"},
    "open_clip.MaybeConvertMode": {"__call__": "Tensor convert isinstance mode ndarray np torch"},
    "open_clip.ResizeKeepRatio": {
        "get_params": "max min random round size uniform zip",
        "__call__": "F get_params interpolation longest random_aspect_prob random_aspect_range random_scale_prob "
        "random_scale_range resize size",
    },
    "open_clip.color_jitter": {"__call__": "p random transf"},
    "open_clip.gray_scale": {"__call__": "p random transf"},
    "timm.CenterCropOrPad": {"forward": "center_crop_or_pad fill padding_mode size"},
    "timm.MaybePILToTensor": {"__call__": "F Tensor isinstance pil_to_tensor torch"},
    "timm.RandomCropOrPad": {
        "get_params": "F abs copysign get_dimensions int math randint random",
        "forward": "crop_or_pad fill get_params padding_mode size",
    },
    "timm.RandomErasing": {
        "_erase": "_get_pixels device exp int log_aspect_ratio math max_area max_count min_area min_count per_pixel "
        "probability rand_color randint random range round sqrt uniform",
        "__call__": "_erase dtype len num_splits range size",
    },
    "timm.RandomResizedCropAndInterpolation": {
        "get_params": "F exp get_image_size int log math max min randint random range round sqrt uniform",
        "__call__": "F choice get_params interpolation isinstance list random ratio resized_crop scale size tuple",
    },
    "timm.ResizeKeepRatio": {
        "get_params": "F exp get_dimensions log math max min random round sqrt uniform zip",
        "__call__": "F choice get_params interpolation isinstance list longest random random_aspect_prob random_aspect_range "
        "random_scale_area random_scale_prob random_scale_range resize size tuple",
    },
    "torchgeo.RandomGrayscale": {"apply_transform": "device expand shape sum to unsqueeze"},
}
"""The methods by which each class is applied, and the names in their code, in the versions compared with."""

_NOT_READ = frozenset({"selected_transforms"})
"""Attributes that some versions set, and do not read."""

LOWERED: dict[str, Callable[[str, Any, Units], TorchvisionOp]] = {
    "lerobot.SharpnessJitter": filters.SharpnessJitter,
    "open_clip.CenterCropOrPad": partial(timm.CenterCropOrPad, mode="constant"),
    "open_clip.ResizeKeepRatio": timm.OpenClipResizeKeepRatio,
    "timm.CenterCropOrPad": timm.CenterCropOrPad,
    "timm.ResizeKeepRatio": timm.resize_keep_ratio,
}

MOST_PLACED = 24
"""Largest product of picks and transforms of a ``RandomSubsetApply`` in random order: a transform has an op for each place."""

MOST_SUBSETS = 10_000
"""Largest number of subsets of a ``RandomSubsetApply``. Their shares are computed when the pipeline is fused."""


def qualified_name(kind: type | None) -> str:
    """Package and name of a class, such as ``"timm.ResizeKeepRatio"``, if it is one of these; empty otherwise."""
    name = "" if kind is None else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
    return name if name in METHODS else ""


def named_class(transform: Any) -> type | None:
    """The class of ``transform``, or the nearest base class, that is one of these; ``None`` without one."""
    return next((kind for kind in type(transform).__mro__ if qualified_name(kind)), None)


def is_a(transform: Any, name: str) -> bool:
    """Whether ``transform`` does what the class ``name`` does, with other settings."""
    kind = named_class(transform)
    return kind is not None and qualified_name(kind) == name and unlike(transform, kind) is None


def unlike(transform: Any, kind: type) -> str | None:
    """Why ``transform``, of class ``kind``, may behave otherwise than that class in the versions compared with, or ``None``."""
    known = METHODS[qualified_name(kind)]
    found = {name: getattr(value, "__func__", value) for name, value in vars(kind).items() if name not in NOT_APPLIED}
    inherited = {name: getattr(base, name) for base in (v2.Transform, *kind.__bases__) for name in found if hasattr(base, name)}
    applied = [name for name, value in found.items() if name in inherited and not is_same(value, inherited[name])]
    for name in dict.fromkeys((*known, *applied)):
        method = found.get(name)
        if not isinstance(method, FunctionType) or code_names([method]) - _NOT_READ != {*known.get(name, "").split()}:
            return f"{name} of {kind.__name__} is not that of the versions compared with"
    return difference(transform, kind)


def written_out(transform: Any) -> Any:
    """The transform of torchvision's, or the list of transforms, that does the same; without one ``transform``.

    Raises:
        ArgumentTypeError: If it is one of timm's with a setting that torchvision has no transform for.
    """
    kind = named_class(transform)
    if kind is None or unlike(transform, kind) is not None:
        return transform
    name = qualified_name(kind)
    interpolation = getattr(transform, "interpolation", None)
    if isinstance(interpolation, tuple) and name in ("timm.RandomResizedCropAndInterpolation", "timm.ResizeKeepRatio"):
        raise _refused(kind, "with random interpolation")
    if name == "lerobot.ImageTransforms":
        return transform.tf
    if name == "open_clip.MaybeConvertMode":  # which returns tensors unchanged
        return v2.Identity()
    if name in ("open_clip.color_jitter", "open_clip.gray_scale"):
        return v2.RandomApply([transform.transf], transform.p)
    if name == "timm.MaybePILToTensor":
        return v2.PILToTensor()
    if name == "timm.RandomResizedCropAndInterpolation":
        return v2.RandomResizedCrop(transform.size, transform.scale, transform.ratio, interpolation, antialias=True)
    if name == "timm.RandomCropOrPad":
        edge = transform.padding_mode
        return v2.RandomCrop(transform.size, pad_if_needed=True, fill=transform.fill, padding_mode=edge)
    return _erasing(transform) if name == "timm.RandomErasing" else transform


def _refused(kind: type, setting: str) -> ArgumentTypeError:
    return refuse_timms(f"{kind.__name__} {setting}", TIMMS_SETTINGS[setting])


def _erasing(transform: Any) -> Any:
    if transform.rand_color:
        raise _refused(type(transform), "with mode='rand'")
    if transform.max_count > 1:
        raise _refused(type(transform), "with several rectangles")
    ratio = tuple(map(math.exp, transform.log_aspect_ratio))
    scale = (transform.min_area, transform.max_area)
    return v2.RandomErasing(transform.probability, scale, ratio, value="random" if transform.per_pixel else 0)


def unsupported_subset(container: Any) -> str | None:
    """Why a ``RandomSubsetApply`` is left to torchvision, or ``None``."""
    count = len(container.transforms)
    picks = container.n_subset
    shares = torch.tensor(container.p)
    if not bool(torch.isfinite(shares).all()) or bool((shares < 0).any()) or int((shares > 0).sum()) < picks:
        return "its weights are not what torch.multinomial takes"
    if container.random_order:
        return f"more than {MOST_PLACED} transforms in all places of its order" if count * picks > MOST_PLACED else None
    return f"more than {MOST_SUBSETS} subsets" if comb(count, picks) > MOST_SUBSETS else None


def subsets(container: Any) -> tuple[list[tuple[int, ...]], list[float]]:
    """The picks of a ``RandomSubsetApply``: indices of transforms in the order in which they run, and the share of each pick.

    ``torch.multinomial`` without replacement draws one after the other, each by its share of what is left.
    """
    shares: list[float] = torch.tensor(container.p).double().tolist()
    members = [index for index, share in enumerate(shares) if share > 0]
    if container.random_order:
        picked = list(permutations(members, container.n_subset))
        return picked, [_in_turn(each, shares) for each in picked]
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for size in range(1, container.n_subset + 1):
        found = {each: sum(_with_last(each, last, found, shares) for last in each) for each in combinations(members, size)}
    return list(found), list(found.values())


def _in_turn(order: Sequence[int], shares: Sequence[float]) -> float:
    """The probability of an order of picks."""
    left = sum(shares)
    probability = 1.0
    for member in order:
        probability *= shares[member] / left
        left -= shares[member]
    return probability


def _with_last(picked: tuple[int, ...], last: int, before: dict[tuple[int, ...], float], shares: Sequence[float]) -> float:
    """The probability of a set of picks of which ``last`` was the last."""
    others = tuple(member for member in picked if member != last)
    left = sum(shares) - sum(shares[member] for member in others)
    return before[others] * shares[last] / left
