"""Recognition of transforms of LeRobot, open_clip and timm, without importing these packages.

A class is recognized by the names of its package and class, and by its output: with the arguments and the seed of a test, it
must return the same images as in the tested versions: lerobot 0.4.4 and 0.6.1, timm 1.0.31, and open_clip.

A recognized transform is replaced by the equivalent transform of torchvision, or is *lowered*, that is, translated to an *op*
of a fused pipeline. Others are called unchanged, image by image, or refused (``refusals.py``).
"""

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from gpuaug.core.rng import Generators
from gpuaug.core.settings import initial_settings
from gpuaug.core.torchvision_types import difference
from gpuaug.fusion.lower.refusals import timm_error
from gpuaug.fusion.ops.torchvision import filters, timm
from gpuaug.fusion.ops.torchvision.base import TorchvisionOp, Units

# Arguments of LeRobot's classes in ``REPLAYS``: configuration of ``ImageTransforms``, and members of ``RandomSubsetApply``.
_JITTER = SimpleNamespace(type="ColorJitter", weight=1.0, kwargs={"brightness": (0.5, 1.5)})
_CONFIGURATION = SimpleNamespace(enable=True, max_num_transforms=1, random_order=False, tfs={"jitter": _JITTER})
_MEMBERS = (v2.RandomInvert(1.0), v2.RandomSolarize(0.4, 1.0), v2.RandomHorizontalFlip(1.0))

REPLAYS: dict[str, tuple[tuple[Any, ...], float]] = {
    "lerobot.ImageTransforms": ((_CONFIGURATION,), 78.122155),
    "lerobot.RandomSubsetApply": ((_MEMBERS, [1.0, 2.0, 3.0], 2, True), 63.00455),
    "lerobot.SharpnessJitter": (((0.5, 1.5),), 83.937099),
    "open_clip.CenterCropOrPad": ((28, 7), 4671055.4),
    "open_clip.MaybeConvertMode": ((), 5368363),
    "open_clip.ResizeKeepRatio": ((20, 0.3), 3390877.8),
    "open_clip.color_jitter": ((0.4, 0.4, 0.4, 0.1, 0.6), 4443933.8),
    "open_clip.gray_scale": ((0.6,), 4907823.8),
    "timm.CenterCropOrPad": ((28, 7), 1828.1445),
    "timm.MaybePILToTensor": ((), 83.458637),
    "timm.RandomCropOrPad": ((28, 7), 1686.542),
    "timm.RandomErasing": ((0.6, 0.05, 0.4, 0.4, None, "const", 1, None, 0, "cpu"), 77.705362),
    "timm.RandomResizedCropAndInterpolation": ((20, (0.2, 0.9), (0.6, 1.7), "bicubic"), 53.403931),
    "timm.ResizeKeepRatio": ((20, 0.3, "bilinear", 0.6, (0.7, 1.2), True, 0.6, (0.8, 1.25)), 50.418754),
}
"""``qualified_name`` of a class → (arguments of its constructor, ``checksum`` with these arguments in the tested versions)."""

LOWERED: dict[str, Callable[[str, Any, Units], TorchvisionOp]] = {
    "lerobot.SharpnessJitter": filters.SharpnessJitter,
    "open_clip.CenterCropOrPad": timm.CenterCropOrPad,
    "open_clip.ResizeKeepRatio": timm.OpenClipResizeKeepRatio,
    "timm.CenterCropOrPad": timm.CenterCropOrPad,
    "timm.ResizeKeepRatio": timm.ResizeKeepRatio,
}
"""``qualified_name`` of a class without equivalent in torchvision → its op, which is created from (name, transform, units)."""


def qualified_name(class_: type | None) -> str:
    """Return package and name of a class, such as ``"timm.ResizeKeepRatio"``; empty if this is not a key of ``REPLAYS``."""
    name = "" if class_ is None else f"{class_.__module__.partition('.')[0]}.{class_.__name__}"
    return name if name in REPLAYS else ""


def recognized_class(transform: Any) -> type | None:
    """Return the first class in the method resolution order of ``transform`` with a ``qualified_name``, or ``None``."""
    return next((class_ for class_ in type(transform).__mro__ if qualified_name(class_)), None)


def is_a(transform: Any, name: str) -> bool:
    """Return whether ``transform`` behaves as an instance of the class with the ``qualified_name`` ``name``."""
    class_ = recognized_class(transform)
    return class_ is not None and qualified_name(class_) == name and difference_reason(transform, class_) is None


def difference_reason(transform: Any, class_: type) -> str | None:
    """Return the reason why ``transform`` may differ from an instance of ``class_`` in the tested versions, or ``None``.

    The version counts for classes with a ``qualified_name``, which are recognized by their names.
    """
    return difference(transform, class_) or (_version_reason(class_) if qualified_name(class_) else None)


@cache
def _version_reason(class_: type) -> str | None:
    """Return the reason why the installed version of a class is not recognized; ``None`` if its ``checksum`` is as expected."""
    name = qualified_name(class_)
    arguments, expected = REPLAYS[name]
    with suppress(Exception):  # another version may raise any error
        if math.isclose(checksum(class_, arguments), expected, rel_tol=1e-5):
            return None
    package = name.partition(".")[0]
    version = getattr(sys.modules.get(package), "__version__", "of unknown version")
    return f"{class_.__name__} of {package} {version} returns other images than in the tested versions"


def checksum(class_: type, arguments: Sequence[Any]) -> float:
    """Return the weighted mean of all squared pixels of ``class_(*arguments)`` for one image, summed over eight calls.

    The random generators are seeded. Weights depend on the position of the pixel, so that moved pixels change the sum.
    """
    total = 0.0
    with Generators(torch.device("cpu"), libraries=True).keyed(0), initial_settings():
        image = torch.rand(3, 24, 32, device="cpu")
        pil_image = functional.to_pil_image(image)
        transform = class_(*arguments)
        for _ in range(8):
            # open_clip calls its transforms on PIL images, not on tensors.
            output = transform(pil_image if class_.__module__.startswith("open_clip.") else image.clone())
            pixels = np.asarray(output, dtype=np.float64)
            total += float((pixels**2 * np.sqrt(np.arange(pixels.size)).reshape(pixels.shape)).mean())
    return total


def torchvision_equivalent(transform: Any) -> Any:
    """Return the equivalent transform of torchvision, or ``transform`` itself if there is none.

    For LeRobot's ``ImageTransforms``, the result is the transform that it calls, which may be LeRobot's ``RandomSubsetApply``.

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
        raise timm_error(class_, "with random interpolation")
    # ``tf`` and ``transf`` are the attributes in which the classes keep the transform that they call.
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
        mode = transform.padding_mode
        return v2.RandomCrop(transform.size, pad_if_needed=True, fill=transform.fill, padding_mode=mode)
    return _random_erasing(transform) if name == "timm.RandomErasing" else transform


def _converts_to_rgb(transform: Any) -> bool:
    """Return whether ``transform`` is a function, or a ``Lambda`` of a function, that only calls ``image.convert("RGB")``.

    The function may read ``image.mode`` first. Tensors have neither name, so it is meant for PIL images.
    """
    function = transform.lambd if type(transform) in (v1.Lambda, v2.Lambda) else transform
    if not isinstance(function, FunctionType) or function.__code__.co_argcount != 1:
        return False
    constants = {*function.__code__.co_consts} - {None, function.__doc__}
    return constants == {"RGB"} and {"convert"} <= {*function.__code__.co_names} <= {"convert", "mode"}


def _random_erasing(transform: Any) -> Any:
    """Return torchvision's equivalent of timm's ``RandomErasing``.

    Raises:
        ArgumentTypeError: If the transform has a setting that torchvision's does not have.
    """
    if transform.rand_color:
        raise timm_error(type(transform), "with mode='rand'")
    if transform.max_count > 1:
        raise timm_error(type(transform), "with several rectangles")
    ratio = tuple(map(math.exp, transform.log_aspect_ratio))
    scale = (transform.min_area, transform.max_area)
    return v2.RandomErasing(transform.probability, scale, ratio, value="random" if transform.per_pixel else 0)
