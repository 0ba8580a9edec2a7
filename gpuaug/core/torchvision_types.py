"""Classes of transforms and of torchvision's tensors, recognised by module name without importing torchvision.

Torchvision's transforms are designed for one image. Called on a batch, most random transforms draw once, so all images get the
same crop.
"""

import functools
from collections.abc import Container, Iterable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from gpuaug.core import batch as batches
from gpuaug.core.packed_targets import PackedTargets

_MIXES = ("CutMix", "MixUp")
"""Transforms for batches. Torchvision documents that they draw once for all samples."""

_COIN_ONLY = frozenset(
    {
        "RandomAdjustSharpness",
        "RandomAutocontrast",
        "RandomEqualize",
        "RandomGrayscale",
        "RandomHorizontalFlip",
        "RandomInvert",
        "RandomPosterize",
        "RandomSolarize",
        "RandomVerticalFlip",
    }
)
"""Transforms that draw only whether they apply. With p=1 their result does not depend on a draw."""

_RANGES = {"GaussianBlur": "sigma", "JPEG": "quality"}
"""Transforms that draw one parameter from a range, and the attribute with the range. A range of one value draws nothing."""

_DRAWING_METHODS = ("make_params", "_get_params", "get_params")
"""Methods in which transforms draw: in v2, in older versions of v2, and in v1."""

TARGET_TYPES = {"Mask": "masks", "BoundingBoxes": "boxes", "KeyPoints": "keypoints"}
"""Torchvision's tensor classes that are transformed along with the images, and the key of each in a target dict."""

HOLDS_NOTHING = frozenset({Tensor, int, float, bool, str, bytes, type(None)})
"""Types of values that contain no tensor of torchvision's classes."""

NOT_APPLIED = frozenset(
    {
        *("__init__", "__init_subclass__", "__repr__", "extra_repr", "_get_name", "__dir__", "__getstate__", "__setstate__"),
        *("__doc__", "__module__", "__dict__", "__weakref__", "__annotations__", "__annotate_func__", "__annotations_cache__"),
        *("__firstlineno__", "__static_attributes__"),
    }
)
"""Attributes of a class that do not affect a call of an instance."""

_OF_OBJECT = frozenset({"__class__", "__getattribute__"})
"""Attributes of ``object`` that affect a call of an instance."""


def nearest_class(module: Any, classes: Container[type]) -> type | None:
    """First class in the method resolution order of ``module`` that is in ``classes``; ``None`` if there is none."""
    return next((cls for cls in type(module).__mro__ if cls in classes), None)


def class_of(module: Any, classes: Container[type]) -> type | None:
    """Nearest class in ``classes`` whose methods ``module`` does not override; ``None`` if there is none."""
    cls = nearest_class(module, classes)
    return cls if cls is not None and difference(module, cls) is None else None


def difference(module: Any, base: type) -> str | None:
    """Why ``module`` may behave differently from an instance of ``base`` with the same attributes; ``None`` if it cannot.

    Args:
        module: An instance of ``base`` or of a subclass.
        base: A class of a library.
    """
    name = _overridden(type(module), base)
    if name is not None:
        return f"a subclass of {base.__name__} that overrides {name}"
    methods = (FunctionType, staticmethod, classmethod)
    attributes = _attributes(base)
    name = next((name for name in vars(module) if isinstance(attributes.get(name), methods)), None)
    if name is not None:
        return f"its {name} is replaced"
    hooks = (getattr(module, name, None) for name in ("_forward_hooks", "_forward_pre_hooks"))
    return "it has forward hooks" if any(hooks) else None


def _overridden(cls: type, base: type) -> str | None:
    """Name of an attribute of ``base`` that ``cls`` or a mixin class overrides; ``None`` if there is none."""
    order = cls.__mro__
    bases = base.__mro__[:-1]
    attributes = _attributes(base)
    for subclass in (cls for cls in order[: order.index(bases[-1])] if cls not in bases):
        for name, value in vars(subclass).items():
            if name in NOT_APPLIED:
                continue
            if name in _OF_OBJECT or not is_same(value, attributes.get(name, value)):
                return name
            # A property takes precedence over an attribute of the instance.
            if hasattr(type(value), "__set__") and name in names_used(base):
                return name
    return None


def is_same(value: Any, other: Any) -> bool:
    """Whether two attributes are one object, or functions of the same code, such as Kornia's copies of ``forward``."""
    value = getattr(value, "__func__", value)
    other = getattr(other, "__func__", other)
    if value is other:
        return True
    if not (isinstance(value, FunctionType) and isinstance(other, FunctionType)):
        return False
    # Kornia gives every class a copy of forward, named after the class.
    code = value.__code__.replace(co_name=other.__code__.co_name, co_qualname=other.__code__.co_qualname)
    parts = ("__closure__", "__defaults__", "__kwdefaults__")
    same = all(getattr(value, part) == getattr(other, part) for part in parts)
    return same and code == other.__code__ and value.__globals__ is other.__globals__


@functools.cache
def _attributes(base: type) -> dict[str, Any]:
    """Name → value of the class attributes of ``base``, a class of a library, and its base classes except ``object``."""
    return {name: value for cls in reversed(base.__mro__[:-1]) for name, value in vars(cls).items()}


@functools.cache
def names_used(base: type) -> frozenset[str]:
    """Names of attributes and globals in the code of ``base``, a class of a library."""
    functions = (getattr(value, "__func__", value) for cls in base.__mro__ for value in vars(cls).values())
    return code_names(function for function in functions if isinstance(function, FunctionType))


def code_names(functions: Iterable[FunctionType]) -> frozenset[str]:
    """Names of attributes and globals in the code of functions and of their inner functions."""
    names: set[str] = set()
    codes = [function.__code__ for function in functions]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(names)


def torchvision_class(transform: Any) -> type | None:
    """First class of torchvision in the method resolution order of ``transform``; ``None`` if there is none."""
    return next((cls for cls in type(transform).__mro__ if _is_torchvisions(cls)), None)


def library_class(module: Any) -> type | None:
    """First class of Kornia or torchvision in the method resolution order of ``module``; ``None`` if there is none."""
    return next((cls for cls in type(module).__mro__ if _is_torchvisions(cls) or cls.__module__.startswith("kornia.")), None)


def children_of(pipeline: Any) -> list[Any]:
    """Children of a pipeline in order: items of a sequence, submodules, ``transforms``, the pipeline of a ``Fused``."""
    if _is_sequence(pipeline) or isinstance(pipeline, nn.Sequential | nn.ModuleList):
        return list(pipeline)
    fused = getattr(pipeline, "pipeline", ())
    transforms = getattr(pipeline, "transforms", ())
    return [
        *(pipeline.children() if isinstance(pipeline, nn.Module) else ()),
        *(fused if isinstance(fused, tuple) else ()),
        *(transforms if _is_sequence(transforms) else ()),
    ]


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def all_parts(pipeline: Any) -> Iterator[Any]:
    """``pipeline`` and all its descendants, depth first."""
    yield pipeline
    for child in children_of(pipeline):
        yield from all_parts(child)


def in_sequence(pipeline: Any) -> Iterator[Any]:
    """Modules that run for every sample, in order. Containers that choose among children, and user classes, are not entered."""
    cls = library_class(pipeline)
    unmodified = cls is not None and difference(pipeline, cls) is None
    sequential = isinstance(pipeline, nn.Sequential) and (type(pipeline) is nn.Sequential or unmodified)
    compose = cls is not None and unmodified and cls.__name__ == "Compose"
    fused = isinstance(getattr(pipeline, "pipeline", None), tuple)
    if (sequential and not getattr(pipeline, "random_apply", False)) or _is_sequence(pipeline) or compose or fused:
        for child in children_of(pipeline):
            yield from in_sequence(child)
    else:
        yield pipeline


def drawn_once(transform: Any) -> tuple[str, ...]:
    """Names of torchvision's transforms in ``transform`` that draw once for all images of a batch.

    Torchvision's containers, ``nn.Sequential`` and lists are searched. Other modules are not: they may call a transform per
    image, which is correct. Noise is not listed, because it is drawn per pixel.
    """
    if type(transform) in (list, tuple, nn.Sequential, nn.ModuleList):
        return _drawn_once_in_children(transform)
    cls = torchvision_class(transform)
    if cls is None or _is_mix(transform) or _draws_by_itself(transform):
        return ()
    name = cls.__name__
    p = getattr(transform, "p", None)
    if p == 0 or (p == 1 and name in _COIN_ONLY):
        return ()
    names = (type(transform).__name__,)
    if hasattr(transform, "transforms"):
        draws = name.startswith("Random") and not (name == "RandomApply" and p == 1)
        return (names if draws else ()) + _drawn_once_in_children(transform)
    if name in _RANGES and len(set(getattr(transform, _RANGES[name], ()))) == 1:
        return ()
    # Flips and policies of v2 draw in their forward method, and define no method of _DRAWING_METHODS.
    draws = name.startswith(("Random", "_Random")) or "Aug" in name or any(map(_draws, cls.__mro__))
    return names if draws else ()


def _drawn_once_in_children(container: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for transform in children_of(container) for name in drawn_once(transform)))


def _is_torchvisions(cls: type) -> bool:
    return cls.__module__ == "torchvision.transforms" or cls.__module__.startswith("torchvision.transforms.")


def _is_mix(transform: Any) -> bool:
    """Whether ``transform`` is a mix, or a container of mixes such as ``RandomChoice([CutMix(), MixUp()])``."""
    cls = torchvision_class(transform)
    if cls is not None and hasattr(transform, "transforms"):
        return all(map(_is_mix, transform.transforms))
    return cls is not None and cls.__name__ in _MIXES


def _draws_by_itself(transform: Any) -> bool:
    """Whether a user's subclass overrides a method that draws or runs: the override may draw per image."""
    # Without get_params, which v2 adds to every subclass.
    methods = ("make_params", "_get_params", "forward", "__call__")
    for cls in type(transform).__mro__:
        if _is_torchvisions(cls):
            break
        if any(name in vars(cls) for name in methods):
            return True
    return False


def _draws(cls: type) -> bool:
    # The base class Transform of v2 defines the method too, but draws nothing in it.
    return _is_torchvisions(cls) and cls.__name__ != "Transform" and any(name in vars(cls) for name in _DRAWING_METHODS)


def type_name(value: Any) -> str:
    """Name of torchvision's tensor class of ``value``, such as ``"Mask"``; an empty string for all other values."""
    cls: Any = type(value)
    return "" if cls is Tensor else type_name_of(cls)


@functools.cache
def type_name_of(cls: Any) -> str:
    """Name of torchvision's tensor class that ``cls`` is or extends; an empty string for all other classes."""
    return next((base.__name__ for base in cls.__mro__ if base.__module__.startswith("torchvision.tv_tensors")), "")


def holds_targets(value: Any) -> bool:
    """Whether ``value`` is or contains a mask, boxes or keypoints of torchvision's tensor classes.

    Torchvision's transforms transform all of them along with the images.
    """
    cls: Any = type(value)
    if cls in HOLDS_NOTHING:  # fast path: the function is called for every batch
        return False
    if cls in (dict, list, tuple):
        members = value.values() if cls is dict else value
        return any(type(member) not in HOLDS_NOTHING and holds_targets(member) for member in members)
    if isinstance(value, Tensor):
        return type_name(value) in TARGET_TYPES
    if isinstance(value, PackedTargets):
        return any(type_name_of(cls) in TARGET_TYPES for cls in value.types) or holds_targets(value.others)
    names = batches.member_names(value) if batches.is_container(value) else ()
    return any(holds_targets(batches.member(value, name)) for name in names)
