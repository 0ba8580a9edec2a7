"""Transforms of LeRobot, open_clip, timm and torchgeo, recognized by class name and methods, without importing them.

Also copies of transforms of torchvision's reference scripts. A transform is replaced by the equivalent transform of
torchvision, *lowered* to an op, or called unfused, as it is.
"""

import math
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

from torchvision import transforms as v1
from torchvision.transforms import v2

from gpuaug.core.errors import ArgumentTypeError
from gpuaug.core.torchvision_types import NOT_APPLIED, code_names, difference, is_same
from gpuaug.fusion.lower import references
from gpuaug.fusion.lower.refusals import UNSUPPORTED_TIMM_SETTINGS, timm_error
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
"""Class → method → names in the code of the method, for the methods that apply a transform, in the tested versions."""

_NOT_READ = frozenset({"selected_transforms"})
"""Attributes that the methods of some versions set, but do not read."""

LOWERED: dict[str, Callable[[str, Any, Units], TorchvisionOp]] = {
    "lerobot.SharpnessJitter": filters.SharpnessJitter,
    "open_clip.CenterCropOrPad": partial(timm.CenterCropOrPad, mode="constant"),
    "open_clip.ResizeKeepRatio": timm.OpenClipResizeKeepRatio,
    "timm.CenterCropOrPad": timm.CenterCropOrPad,
    "timm.ResizeKeepRatio": timm.resize_keep_ratio,
    **references.LOWERED,
}


def qualified_name(class_: type | None) -> str:
    """Return the name under which a class is recognized; empty if it is not.

    It is the package and the class name, such as ``"timm.ResizeKeepRatio"``, for the keys of ``METHODS``, and the class name
    alone for copies from torchvision's reference scripts.
    """
    if class_ is None:
        return ""
    name = f"{class_.__module__.partition('.')[0]}.{class_.__name__}"
    if name in METHODS:
        return name
    return class_.__name__ if references.is_copy(class_) else ""


def recognized_class(transform: Any) -> type | None:
    """Return the first class of ``transform``, then of its bases, that has a ``qualified_name``; ``None`` without one."""
    return next((class_ for class_ in type(transform).__mro__ if qualified_name(class_)), None)


def is_a(transform: Any, name: str) -> bool:
    """Return whether ``transform`` behaves as an instance of the class with the ``qualified_name`` ``name``."""
    class_ = recognized_class(transform)
    return class_ is not None and qualified_name(class_) == name and difference_reason(transform, class_) is None


def difference_reason(transform: Any, class_: type) -> str | None:
    """Return the reason why ``transform`` may behave differently from ``class_`` in the tested versions, or ``None``."""
    if references.is_copy(class_):
        return difference(transform, class_)
    expected_names = METHODS[qualified_name(class_)]
    attributes = {name: getattr(value, "__func__", value) for name, value in vars(class_).items() if name not in NOT_APPLIED}
    inherited = {
        name: getattr(base, name) for base in (v2.Transform, *class_.__bases__) for name in attributes if hasattr(base, name)
    }
    # Methods that the class overrides are checked too, because a call of the transform may call them.
    overridden = [name for name, value in attributes.items() if name in inherited and not is_same(value, inherited[name])]
    for name in dict.fromkeys((*expected_names, *overridden)):
        method = attributes.get(name)
        if not isinstance(method, FunctionType) or code_names([method]) - _NOT_READ != {*expected_names.get(name, "").split()}:
            return f"{name} of {class_.__name__} differs from the tested versions"
    return difference(transform, class_)


def torchvision_equivalent(transform: Any) -> Any:
    """Return the equivalent transform of torchvision, or list of transforms; ``transform`` itself without an equivalent.

    Raises:
        ArgumentTypeError: If ``transform`` belongs to timm and has a setting that torchvision's equivalent does not have.
    """
    if _converts_to_rgb(transform):
        return v2.RGB()
    class_ = recognized_class(transform)
    if class_ is None or difference_reason(transform, class_) is not None:
        return transform
    name = qualified_name(class_)
    interpolation = getattr(transform, "interpolation", None)
    if isinstance(interpolation, tuple) and name in ("timm.RandomResizedCropAndInterpolation", "timm.ResizeKeepRatio"):
        raise _setting_error(class_, "with random interpolation")
    if name == "lerobot.ImageTransforms":
        return transform.tf
    if name == "open_clip.MaybeConvertMode":  # returns tensors unchanged
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
    return _random_erasing(transform) if name == "timm.RandomErasing" else transform


def _converts_to_rgb(transform: Any) -> bool:
    """Return whether a function, or a ``v2.Lambda`` of one, only calls ``image.convert("RGB")``, which tensors do not have."""
    function = transform.lambd if type(transform) in (v1.Lambda, v2.Lambda) else transform
    if not isinstance(function, FunctionType) or function.__code__.co_argcount != 1:
        return False
    constants = {*function.__code__.co_consts} - {None, function.__doc__}
    return constants == {"RGB"} and {"convert"} <= {*function.__code__.co_names} <= {"convert", "mode"}


def _setting_error(class_: type, setting: str) -> ArgumentTypeError:
    """Return the error for a setting of timm's that torchvision does not have."""
    return timm_error(f"{class_.__name__} {setting}", UNSUPPORTED_TIMM_SETTINGS[setting])


def _random_erasing(transform: Any) -> Any:
    """Return torchvision's equivalent of timm's ``RandomErasing``."""
    if transform.rand_color:
        raise _setting_error(type(transform), "with mode='rand'")
    if transform.max_count > 1:
        raise _setting_error(type(transform), "with several rectangles")
    ratio = tuple(map(math.exp, transform.log_aspect_ratio))
    scale = (transform.min_area, transform.max_area)
    return v2.RandomErasing(transform.probability, scale, ratio, value="random" if transform.per_pixel else 0)
