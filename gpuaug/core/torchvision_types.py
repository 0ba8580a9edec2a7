"""Recognition of modules of torchvision and Kornia, and walks through pipelines of modules.

A class belongs to the library that the name of its Python module begins with, so recognition imports neither library.

Torchvision's transforms are designed for one image. Called on a batch, most random transforms draw their parameters once, so
all images get the same crop.
"""

import functools
import itertools
from collections.abc import Container, Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

_MIXES = ("CutMix", "MixUp")
"""Transforms that are designed for batches. As torchvision documents, they draw once for all samples."""

_RANGE_ATTRIBUTES = {"GaussianBlur": "sigma", "JPEG": "quality"}
"""Transform that draws one parameter from a range → attribute with the range. If the range is one value, nothing is drawn."""

_DRAWING_METHODS = ("make_params", "_get_params", "get_params")
"""Methods in which transforms draw their parameters: in v2, in older versions of v2, and in v1."""

IGNORED_OVERRIDES = frozenset(
    {
        *("__init__", "__init_subclass__", "__repr__", "extra_repr", "_get_name", "__dir__", "__getstate__", "__setstate__"),
        *("__doc__", "__module__", "__dict__", "__weakref__", "__annotations__", "__annotate_func__", "__annotations_cache__"),
        *("__firstlineno__", "__static_attributes__", "__slotnames__"),
    }
)
"""Attributes that a subclass may override without an effect on calls of its instances."""

_EFFECTIVE_OBJECT_ATTRIBUTES = frozenset({"__class__", "__getattribute__"})
"""Attributes of ``object`` that affect calls of instances if a class overrides them."""


def nearest_class(module: Any, classes: Container[type]) -> type | None:
    """Return the first class in the method resolution order of ``module`` that is in ``classes``, or ``None``."""
    return next((cls for cls in type(module).__mro__ if cls in classes), None)


def class_of(module: Any, classes: Container[type]) -> type | None:
    """Return the class in ``classes`` that ``module`` is an instance of and behaves like, or ``None``.

    The class is ``nearest_class(module, classes)``. A module with overrides, replaced methods or hooks does not behave like it.
    """
    cls = nearest_class(module, classes)
    return cls if cls is not None and difference(module, cls) is None else None


def difference(module: Any, base: type) -> str | None:
    """Return the reason why ``module`` may behave unlike an instance of ``base`` with the same attributes, or ``None``.

    The reason is a fragment that stands after the name of the module in a message or table: "Blur: its forward is replaced".

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
    return "it has forward hooks" if has_hooks(module) else None


def has_hooks(module: Any) -> bool:
    """Return whether a module has forward hooks, which torch calls only if the module itself is called."""
    return any(getattr(module, name, None) for name in ("_forward_hooks", "_forward_pre_hooks"))


def _overridden(cls: type, base: type) -> str | None:
    """Return the name of an attribute of ``base`` that ``cls``, or a mixin of ``cls``, overrides; or ``None``."""
    order = cls.__mro__
    bases = base.__mro__[:-1]  # without ``object``
    attributes = _attributes(base)
    # Classes that are not after the last base in the method resolution order may override attributes of ``base``.
    for subclass in (cls for cls in order[: order.index(bases[-1])] if cls not in bases):
        for name, value in vars(subclass).items():
            if name in IGNORED_OVERRIDES:
                continue
            # The default ``value`` of ``get``: an attribute that ``base`` does not have is no override.
            if name in _EFFECTIVE_OBJECT_ATTRIBUTES or not is_same(value, attributes.get(name, value)):
                return name
            # A property takes precedence over an attribute of the instance.
            if hasattr(type(value), "__set__") and name in names_used(base):
                return name
    return None


def is_same(value: Any, other: Any) -> bool:
    """Return whether two attributes are one object, or functions with the same code.

    Kornia gives every class a copy of ``forward``, named after the class.
    """
    value = getattr(value, "__func__", value)
    other = getattr(other, "__func__", other)
    if value is other:
        return True
    if not (isinstance(value, FunctionType) and isinstance(other, FunctionType)):
        return False
    # The code of ``value`` under the name of ``other``, because copies of a function may be renamed.
    code = value.__code__.replace(co_name=other.__code__.co_name, co_qualname=other.__code__.co_qualname)
    parts = ("__closure__", "__defaults__", "__kwdefaults__")
    are_parts_equal = all(getattr(value, part) == getattr(other, part) for part in parts)
    return are_parts_equal and code == other.__code__ and value.__globals__ is other.__globals__


@functools.cache
def _attributes(base: type) -> dict[str, Any]:
    """Return name → value of the attributes of a class of a library and of its base classes except ``object``."""
    return {name: value for cls in reversed(base.__mro__[:-1]) for name, value in vars(cls).items()}


@functools.cache
def names_used(base: type) -> frozenset[str]:
    """Return the names of attributes and globals in the code of a class of a library, and in inner functions."""
    names: set[str] = set()
    functions = (getattr(value, "__func__", value) for cls in base.__mro__ for value in vars(cls).values())
    codes = [function.__code__ for function in functions if isinstance(function, FunctionType)]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(names)


class TypeChange(NamedTuple):
    """Change of the torchvision type of images by ``v2.ToPureTensor``, then by ``v2.ToImage``."""

    to_pure: bool = False
    """Whether the class becomes ``torch.Tensor``."""
    to_image: bool = False
    """Whether a plain tensor then becomes an ``Image`` of ``torchvision.tv_tensors``."""

    def __call__(self, class_: type[Tensor]) -> type[Tensor]:
        """Return the class of an image of class ``class_`` after the change."""
        class_ = Tensor if self.to_pure else class_
        return tv_tensor_class() if self.to_image and class_ is Tensor else class_


UNCHANGED_TYPE = TypeChange()
"""No change of the torchvision type."""


def tv_tensor_class(name: str = "Image") -> type[Tensor]:
    """Return the class ``name`` of ``torchvision.tv_tensors``, by default the class of images."""
    from torchvision import tv_tensors

    class_: type[Tensor] = getattr(tv_tensors, name)
    return class_


def torchvision_class(transform: Any) -> type | None:
    """Return the first class of torchvision in the method resolution order of ``transform``, or ``None``."""
    return next((cls for cls in type(transform).__mro__ if _is_of_torchvision(cls)), None)


def library_class(module: Any) -> type | None:
    """Return the first class of Kornia or torchvision in the method resolution order of ``module``, or ``None``."""
    return next((cls for cls in type(module).__mro__ if _is_of_torchvision(cls) or cls.__module__.startswith("kornia.")), None)


def children_of(pipeline: Any) -> list[Any]:
    """Return the children of a pipeline, in order.

    Children are the items of a sequence, submodules, the items of the attribute ``transforms``, and the items of the attribute
    ``pipeline`` of a module that ``gpuaug.fuse`` returned, which is a tuple.
    """
    if is_sequence(pipeline) or isinstance(pipeline, nn.Sequential | nn.ModuleList):
        return list(pipeline)
    fused = getattr(pipeline, "pipeline", ())
    transforms = getattr(pipeline, "transforms", ())
    return [
        *(pipeline.children() if isinstance(pipeline, nn.Module) else ()),
        *(fused if isinstance(fused, tuple) else ()),
        *(transforms if is_sequence(transforms) else ()),
    ]


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called: unlike a plain ``nn.ModuleDict`` or ``nn.ModuleList``, it defines ``forward``."""
    is_defined = getattr(module.forward, "__func__", None) is not nn.Module.forward
    return is_defined or not type(module).__call__.__module__.startswith("torch.nn.")


def is_unmodified_sequential(module: Any) -> bool:
    """Return whether a module is an ``nn.Sequential``, not of a subclass, that only calls its children: it has no hooks."""
    return type(module) is nn.Sequential and difference(module, nn.Sequential) is None


def is_sequence(value: Any) -> bool:
    """Return whether a value is a plain sequence of modules. A sequence that can be called is itself a transform."""
    return isinstance(value, Sequence) and not isinstance(value, str) and not callable(value)


def unwrapped(transform: Any) -> Any:
    """Return the function that a ``functools.partial`` calls, or the module of a bound ``forward`` or ``__call__``.

    Any other transform is returned itself.
    """
    return unwrapped_with_code(transform)[0]


def unwrapped_with_code(transform: Any) -> tuple[Any, str]:
    """Return ``unwrapped(transform)`` and the Python expression for it, such as ``"transform.func"``."""
    expression = "transform"
    while True:
        if isinstance(transform, functools.partial):
            transform = transform.func
            expression += ".func"
        elif isinstance(transform, MethodType) and _is_forward_or_call(transform):
            transform = transform.__self__
            expression += ".__self__"
        else:
            return transform, expression


def _is_forward_or_call(method: MethodType) -> bool:
    """Return whether a bound method is the ``forward`` or ``__call__`` of its object."""
    return any(method.__func__ is getattr(type(method.__self__), name, None) for name in ("forward", "__call__"))


def all_parts(pipeline: Any) -> Iterator[Any]:
    """Yield ``pipeline`` and all its descendants, unwrapped, depth first."""
    pipeline = unwrapped(pipeline)
    yield pipeline
    for child in children_of(pipeline):
        yield from all_parts(child)


def in_sequence(pipeline: Any) -> Iterator[Any]:
    """Yield the modules of a pipeline in order. In place of a container that runs all its children, yield the children.

    A container that chooses among its children, and a module of a user's class, are yielded themselves.
    """
    cls = library_class(pipeline)
    is_unmodified = cls is not None and difference(pipeline, cls) is None
    is_sequential = is_unmodified_sequential(pipeline) or (isinstance(pipeline, nn.Sequential) and is_unmodified)
    is_compose = cls is not None and is_unmodified and cls.__name__ == "Compose"
    is_fused = isinstance(getattr(pipeline, "pipeline", None), tuple)
    # ``random_apply``: Kornia's container then chooses among its children.
    if (is_sequential and not getattr(pipeline, "random_apply", False)) or is_sequence(pipeline) or is_compose or is_fused:
        for child in children_of(pipeline):
            yield from in_sequence(child)
    else:
        yield pipeline


def names_drawing_once(transform: Any) -> tuple[str, ...]:
    """Return the names of torchvision's transforms in ``transform`` that draw once for all images of a batch.

    Torchvision's containers, ``nn.Sequential`` and lists are searched. Other modules are not, because they may call a transform
    once per image. Noise transforms are not returned, because they draw per pixel, and so differently for all images.
    """
    transform = unwrapped(transform)
    if type(transform) in (list, tuple, nn.Sequential, nn.ModuleList):
        return _names_drawing_once_in_children(transform)
    cls = torchvision_class(transform)
    if cls is None or _is_mix(transform) or _overrides_drawing(transform):
        return ()
    name = cls.__name__
    p = getattr(transform, "p", None)
    if p == 0:
        return ()
    names = (type(transform).__name__,)
    if hasattr(transform, "transforms"):
        is_random = name.startswith("Random") and not (name == "RandomApply" and p == 1)
        return (names if is_random else ()) + _names_drawing_once_in_children(transform)
    if name in _RANGE_ATTRIBUTES and len(set(getattr(transform, _RANGE_ATTRIBUTES[name], ()))) == 1:
        return ()
    # Flips, whose only random number decides whether they apply, have no method of _DRAWING_METHODS, but a name with "Random".
    # The policies of v2, all with "Aug" in the name, draw in ``forward``. v2.RandomGrayscale only counts channels in a method.
    is_random = name.startswith(("Random", "_Random")) and p != 1
    draws_parameters = "Aug" in name or (name != "RandomGrayscale" and any(map(_draws, cls.__mro__)))
    return names if is_random or draws_parameters else ()


def _names_drawing_once_in_children(container: Any) -> tuple[str, ...]:
    """Return the result of ``names_drawing_once`` for all children of a container, without repetitions."""
    return tuple(dict.fromkeys(name for transform in children_of(container) for name in names_drawing_once(transform)))


def _is_of_torchvision(cls: type) -> bool:
    """Return whether a class is defined in ``torchvision.transforms``."""
    return cls.__module__ == "torchvision.transforms" or cls.__module__.startswith("torchvision.transforms.")


def _is_mix(transform: Any) -> bool:
    """Return whether ``transform`` is CutMix or MixUp, or a container of them, as ``RandomChoice([CutMix(), MixUp()])``."""
    cls = torchvision_class(transform)
    if cls is not None and hasattr(transform, "transforms"):
        return all(map(_is_mix, transform.transforms))
    return cls is not None and cls.__name__ in _MIXES


def _overrides_drawing(transform: Any) -> bool:
    """Return whether a user's subclass overrides a method that draws parameters, or that runs the transform.

    Such a method may draw once per image.
    """
    # ``get_params`` is not among these methods, because v2 adds it to subclasses.
    methods = ("make_params", "_get_params", "forward", "__call__")
    own_classes = itertools.takewhile(lambda cls: not _is_of_torchvision(cls), type(transform).__mro__)
    return any(name in vars(cls) for cls in own_classes for name in methods)


def _draws(cls: type) -> bool:
    """Return whether a class of torchvision defines a method that draws parameters."""
    # The base class Transform of v2 defines such a method, but draws nothing in it.
    return _is_of_torchvision(cls) and cls.__name__ != "Transform" and any(name in vars(cls) for name in _DRAWING_METHODS)
