"""Pipelines of transforms, their classes, and torchvision's tensors, without importing torchvision: its classes have its name.

Torchvision's transforms are made for one image in a dataset. Called on a batch, most random ones draw once, and all images get
the same crop.
"""

import functools
from collections.abc import Container, Iterable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from gpuaug.core import batch as batches
from gpuaug.core.columns import PackedTargets

_MIXES = ("CutMix", "MixUp")
"""Made for batches: torchvision documents that they draw once for all samples."""

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
"""Draw only whether they apply. With p=1 no draw matters."""

_RANGES = {"GaussianBlur": "sigma", "JPEG": "quality"}
"""Draw from one range. No draw matters if it holds one value."""

_DRAWING_METHODS = ("make_params", "_get_params", "get_params")
"""Where transforms draw: of v2, of v2 in older versions, and of v1."""

TARGET_TYPES = {"Mask": "masks", "BoundingBoxes": "boxes", "KeyPoints": "keypoints"}
"""Types of torchvision's tensors that follow the images, and the key of each in a target dict."""

HOLDS_NOTHING = frozenset({Tensor, int, float, bool, str, bytes, type(None)})
"""Types of values that hold none of torchvision's tensors."""

NOT_APPLIED = frozenset(
    {
        *("__init__", "__init_subclass__", "__repr__", "extra_repr", "_get_name", "__dir__", "__getstate__", "__setstate__"),
        *("__doc__", "__module__", "__dict__", "__weakref__", "__annotations__", "__annotate_func__", "__annotations_cache__"),
        *("__firstlineno__", "__static_attributes__"),
    }
)
"""Attributes of a class that do not take part when an instance is called."""

_OF_OBJECT = frozenset({"__class__", "__getattribute__"})
"""Attributes of ``object`` that do take part."""


def nearest_class(module: Any, classes: Container[type]) -> type | None:
    """The class of ``module``, or the nearest of its base classes, that is in ``classes``; ``None`` without one."""
    return next((kind for kind in type(module).__mro__ if kind in classes), None)


def class_of(module: Any, classes: Container[type]) -> type | None:
    """The class in ``classes`` whose instances, with the attributes of ``module``, do the same; ``None`` without one."""
    kind = nearest_class(module, classes)
    return kind if kind is not None and difference(module, kind) is None else None


def difference(module: Any, base: type) -> str | None:
    """Why ``module`` may behave otherwise than an instance of ``base`` with the same attributes; ``None`` if it cannot.

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


def _overridden(kind: type, base: type) -> str | None:
    """Name of an attribute of ``base`` that ``kind``, or a class mixed in, defines anew; ``None`` without one."""
    order = kind.__mro__
    bases = base.__mro__[:-1]
    attributes = _attributes(base)
    for added in (each for each in order[: order.index(bases[-1])] if each not in bases):
        for name, value in vars(added).items():
            if name in NOT_APPLIED:
                continue
            if name in _OF_OBJECT or not is_same(value, attributes.get(name, value)):
                return name
            # A property comes before an attribute of the instance.
            if hasattr(type(value), "__set__") and name in names_used(base):
                return name
    return None


def is_same(value: Any, other: Any) -> bool:
    """Whether two attributes are one, or functions of the same code, such as Kornia's copies of ``forward``."""
    value, other = (getattr(each, "__func__", each) for each in (value, other))
    if value is other:
        return True
    if not (isinstance(value, FunctionType) and isinstance(other, FunctionType)):
        return False
    # Kornia gives every class a copy of forward, under the name of the class.
    code = value.__code__.replace(co_name=other.__code__.co_name, co_qualname=other.__code__.co_qualname)
    parts = ("__closure__", "__defaults__", "__kwdefaults__")
    same = all(getattr(value, part) == getattr(other, part) for part in parts)
    return same and code == other.__code__ and value.__globals__ is other.__globals__


@functools.cache
def _attributes(base: type) -> dict[str, Any]:
    """Attributes that ``base``, a class of a library, and its base classes define, by name, except those of ``object``."""
    return {name: value for kind in reversed(base.__mro__[:-1]) for name, value in vars(kind).items()}


@functools.cache
def names_used(base: type) -> frozenset[str]:
    """Names of attributes, and of globals, in the code of ``base``, a class of a library's."""
    functions = (getattr(value, "__func__", value) for kind in base.__mro__ for value in vars(kind).values())
    return code_names(function for function in functions if isinstance(function, FunctionType))


def code_names(functions: Iterable[FunctionType]) -> frozenset[str]:
    """Names of attributes and of globals in the code of functions, and of the functions in it."""
    names: set[str] = set()
    codes = [function.__code__ for function in functions]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(names)


def torchvision_class(transform: Any) -> type | None:
    """Torchvision's class of ``transform``, or the nearest base class that is torchvision's; ``None`` without one."""
    return next((kind for kind in type(transform).__mro__ if _is_torchvisions(kind)), None)


def library_class(module: Any) -> type | None:
    """The class of ``module``, or the nearest base class, that is Kornia's or torchvision's; ``None`` without one."""
    return next(
        (kind for kind in type(module).__mro__ if _is_torchvisions(kind) or kind.__module__.startswith("kornia.")), None
    )


def children_of(pipeline: Any) -> list[Any]:
    """Direct parts of a pipeline in order: items of a sequence, submodules, ``transforms`` of a container, what was fused."""
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
    """``pipeline``, its parts, and their parts."""
    yield pipeline
    for child in children_of(pipeline):
        yield from all_parts(child)


def in_sequence(pipeline: Any) -> Iterator[Any]:
    """The modules that run for every sample, in order. Containers that pick, and a user's own, are yielded whole."""
    kind = library_class(pipeline)
    known = kind is not None and difference(pipeline, kind) is None
    torchs = isinstance(pipeline, nn.Sequential) and (type(pipeline) is nn.Sequential or known)
    compose = kind is not None and known and kind.__name__ == "Compose"
    fused = isinstance(getattr(pipeline, "pipeline", None), tuple)
    if (torchs and not getattr(pipeline, "random_apply", False)) or _is_sequence(pipeline) or compose or fused:
        for child in children_of(pipeline):
            yield from in_sequence(child)
    else:
        yield pipeline


def drawn_once(transform: Any) -> tuple[str, ...]:
    """Names of torchvision's transforms in ``transform`` that draw once for all images of a batch.

    Containers of torchvision's, ``nn.Sequential`` and lists are searched; other modules are not, since one that calls a
    transform for each image does it right. Noise is drawn for each pixel, and so not once.
    """
    if type(transform) in (list, tuple, nn.Sequential, nn.ModuleList):
        return _of_children(transform)
    kind = torchvision_class(transform)
    if kind is None or _is_mix(transform) or _draws_by_itself(transform):
        return ()
    name = kind.__name__
    p = getattr(transform, "p", None)
    if p == 0 or (p == 1 and name in _COIN_ONLY):
        return ()
    own = (type(transform).__name__,)
    if hasattr(transform, "transforms"):
        draws = name.startswith("Random") and not (name == "RandomApply" and p == 1)
        return (own if draws else ()) + _of_children(transform)
    if name in _RANGES and len(set(getattr(transform, _RANGES[name], ()))) == 1:
        return ()
    # Flips and the policies of v2 draw where they are called, and have none of the methods.
    draws = name.startswith(("Random", "_Random")) or "Aug" in name or any(map(_draws, kind.__mro__))
    return own if draws else ()


def _of_children(container: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for transform in children_of(container) for name in drawn_once(transform)))


def _is_torchvisions(kind: type) -> bool:
    return kind.__module__ == "torchvision.transforms" or kind.__module__.startswith("torchvision.transforms.")


def _is_mix(transform: Any) -> bool:
    """Whether it is a mix, or a container of mixes, such as the documented ``RandomChoice([CutMix(), MixUp()])``."""
    kind = torchvision_class(transform)
    if kind is not None and hasattr(transform, "transforms"):
        return all(map(_is_mix, transform.transforms))
    return kind is not None and kind.__name__ in _MIXES


def _draws_by_itself(transform: Any) -> bool:
    """Whether a user's subclass overrides how it draws or runs, which may be for each image."""
    # Not by get_params, which v2 gives to every subclass.
    own = ("make_params", "_get_params", "forward", "__call__")
    for kind in type(transform).__mro__:
        if _is_torchvisions(kind):
            break
        if any(name in vars(kind) for name in own):
            return True
    return False


def _draws(kind: type) -> bool:
    # The base class of v2 has the method too, and draws nothing in it.
    return _is_torchvisions(kind) and kind.__name__ != "Transform" and any(name in vars(kind) for name in _DRAWING_METHODS)


def type_name(value: Any) -> str:
    """Name of the class of torchvision's that ``value`` is a tensor of, such as ``"Mask"``; empty for all other values."""
    kind: Any = type(value)
    return "" if kind is Tensor else _type_name(kind)


@functools.cache
def _type_name(kind: Any) -> str:
    return next((base.__name__ for base in kind.__mro__ if base.__module__.startswith("torchvision.tv_tensors")), "")


def holds_targets(value: Any) -> bool:
    """Whether ``value`` is a mask, boxes or keypoints of torchvision's types, or a container that holds any.

    Transforms of torchvision's move all of these with the images.
    """
    kind: Any = type(value)
    if kind in HOLDS_NOTHING:  # nearly all: this is asked of every batch
        return False
    if kind in (dict, list, tuple):
        members = value.values() if kind is dict else value
        return any(type(member) not in HOLDS_NOTHING and holds_targets(member) for member in members)
    if isinstance(value, Tensor):
        return type_name(value) in TARGET_TYPES
    if isinstance(value, PackedTargets):
        return any(_type_name(each) in TARGET_TYPES for each in value.types) or holds_targets(value.others)
    names = batches.member_names(value) if batches.is_container(value) else ()
    return any(holds_targets(batches.member(value, name)) for name in names)
