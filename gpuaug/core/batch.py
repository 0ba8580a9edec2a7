"""Functions on batches: nested tuples, lists, named tuples, mappings and dataclasses.

A *leaf* is an object that is not a container, such as a tensor, or a container with a ``to`` method other than a ``Ragged``. A
*member* of a container is a value of a mapping, an item of a sequence, or a field. Functions that replace leaves rebuild each
container in which a leaf changes, as an object of its class. Other containers are returned as they are, so a container that
cannot be rebuilt causes an error only if a leaf in it changes.
"""

import copy
import dataclasses
import functools
import operator
import sys
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any, TypeVar

import torch

from gpuaug.core.errors import ArgumentTypeError
from gpuaug.core.ragged import Leaf, Ragged

T = TypeVar("T")

Batch = Any
"""A batch: the result of the user's collate function."""


_LEAF_TYPES = frozenset({torch.Tensor, int, float, bool, str, bytes, type(None)})
"""Types of leaves. Objects of other types are examined."""

_WITHOUT_OWN_MOVE = (torch.Tensor, type, Ragged)
"""Types for which ``moves_itself`` is false, although they have an attribute ``to``: the loader copies tensors.

A ``Ragged`` is treated as a container, so that its tensors are copied into the page-locked memory of the loader. ``type``: a
class has the ``to`` of its instances as an attribute, but cannot be moved.
"""


def is_namedtuple(value: Any) -> bool:
    """Return whether ``value`` is a named tuple of ``collections.namedtuple`` or ``typing.NamedTuple``."""
    return isinstance(value, tuple) and field_names(value.__class__) is not None


def moves_itself(value: object) -> bool:
    """Return whether the loader calls ``value.to(device)`` to copy a value, such as a ``PackedSequence`` or ``BatchEncoding``.

    True if the object has a ``to`` method. False for tensors and ``Ragged``, which the loader copies itself.
    """
    return not isinstance(value, _WITHOUT_OWN_MOVE) and callable(getattr(value, "to", None))


def inner_values(value: Any) -> list[Any]:
    """Return the values inside a leaf with a ``to`` method: the values of a mapping, or the attributes of another object."""
    return list(value.values() if isinstance(value, Mapping) else getattr(value, "__dict__", {}).values())


@functools.lru_cache(maxsize=256)
def field_names(cls: Any) -> tuple[str, ...] | None:
    """Return the names of the fields of a named tuple or dataclass; ``None`` for a class whose members are no attributes."""
    if issubclass(cls, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_make"):
        return tuple(cls._fields)
    if issubclass(cls, Mapping | tuple | list | Leaf) or not dataclasses.is_dataclass(cls):
        return None
    return tuple(field.name for field in dataclasses.fields(cls))


@functools.lru_cache(maxsize=256)
def _is_container_class(cls: Any) -> bool:
    """Return ``is_container`` for the instances of a class. Cached, because a batch is searched several times."""
    return issubclass(cls, Mapping | tuple | list) or field_names(cls) is not None


def is_container(value: Any) -> bool:
    """Return whether ``value`` is a mapping, tuple, list, named tuple or dataclass."""
    return _is_container_class(value.__class__)


def is_pil_image(value: object) -> bool:
    """Return whether ``value`` is an image of PIL. PIL is not imported."""
    cls = getattr(sys.modules.get("PIL.Image"), "Image", None)
    return cls is not None and isinstance(value, cls)


def member_names(container: Any) -> list[Any]:
    """Return the names of a container's members: keys, names of the fields that have a value, or indices."""
    names = field_names(container.__class__)
    if names is not None:
        return [name for name in names if hasattr(container, name)]
    return list(container) if isinstance(container, Mapping) else list(range(len(container)))


def member(container: Any, name: Any) -> Any:
    """Return the member of a container with the key, field or index ``name``."""
    return container[name] if by_key(container) else getattr(container, name)


def by_key(container: Any) -> bool:
    """Return whether a member is read as ``container[name]``, not as ``container.name``."""
    return field_names(container.__class__) is None


def objects_to_keep(values: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the objects whose memory must not be reused while a stage reads ``values``: leaves, and their values.

    To keep the containers would not be enough: a stage may remove leaves from them.
    """
    for leaf in leaves(values):
        yield leaf
        if type(leaf) not in _LEAF_TYPES and moves_itself(leaf):
            yield inner_values(leaf)


def map_leaves(function: Callable[[Any], Any], batch: Batch) -> Batch:
    """Apply ``function`` to every leaf, in order, and rebuild the containers in which a leaf changes.

    Args:
        function: Called with each leaf. Its result replaces the leaf.
        batch: Any nesting of tuple, list, named tuple, mapping and dataclass.

    Returns:
        A batch of the same structure, or ``batch`` itself if no leaf changes. ``batch`` is not modified.

    Raises:
        ArgumentTypeError: If a container cannot be rebuilt with other values.

    Cost:
        A few microseconds of host time for the usual two or three leaves. No copy, no synchronisation.

    Examples:
        >>> map_leaves(lambda x: x + 1, {"a": 1, "b": [2, (3,)]})
        {'a': 2, 'b': [3, (4,)]}
    """
    return map_members(function, _is_leaf, batch)


def map_members(function: Callable[[Any], Any], is_selected: Callable[[Any], bool], batch: Batch) -> Batch:
    """Apply ``function`` to the leaves and containers for which ``is_selected`` returns true.

    Args:
        function: Called with each selected leaf or container. Its result replaces the argument.
        is_selected: Predicate. The members of a selected container are not visited.
        batch: Any nesting of containers.

    Returns:
        A batch with the results in place of the selected members; ``batch`` itself if no member changed.

    Raises:
        ArgumentTypeError: If a container cannot be rebuilt with other values.
    """
    if is_selected(batch):
        return function(batch)
    cls = type(batch)
    if cls is dict:  # twice as fast as the general case
        changed = {key: map_members(function, is_selected, value) for key, value in batch.items()}
        return batch if _all_identical(changed.values(), batch.values()) else changed
    if cls is tuple or cls is list:
        values = [map_members(function, is_selected, value) for value in batch]
        return batch if _all_identical(values, batch) else cls(values)
    if cls in _LEAF_TYPES or not is_container(batch):
        return batch
    changed = {}
    for name in member_names(batch):
        value = member(batch, name)
        result = map_members(function, is_selected, value)
        if result is not value:
            changed[name] = result
    return replace(batch, changed) if changed else batch


def cached_by_id(function: Callable[[Any], Any], results: Mapping[int, tuple[Any, Any]] | None = None) -> Callable[[Any], Any]:
    """Return ``function`` with a cache, so that ``map_leaves`` calls it once for a leaf that occurs several times.

    Args:
        function: Function of one leaf.
        results: Results that are known already: ``id`` of a leaf → (leaf, result).
    """
    # The leaf is stored beside its result, so that it is not freed: a mapping may create its values on each access, and a later
    # object may get the id of a freed value.
    cache = dict(results or {})

    def apply(leaf: Any) -> Any:
        leaf_and_result = cache.get(id(leaf))
        if leaf_and_result is None:
            leaf_and_result = cache[id(leaf)] = leaf, function(leaf)
        return leaf_and_result[1]

    return apply


def leaves(batch: Batch) -> list[Any]:
    """List the leaves of ``batch`` in the order in which ``map_leaves`` visits them.

    Examples:
        >>> leaves({"a": 1, "b": [2, (3,)]})
        [1, 2, 3]
    """
    return _selected(_is_leaf, batch, [])


def members_of_type(type_: type[T] | tuple[type[T], ...], batch: Batch) -> list[T]:
    """List the leaves and containers of type ``type_``, in order. The members of a listed container are not visited.

    Args:
        type_: Type or types. They must not be ``torch.Tensor``, numbers or text, which may be skipped.
        batch: Any nesting of containers.

    Examples:
        >>> members_of_type(tuple, {"a": (1, (2,)), "b": [3, (4,)]})
        [(1, (2,)), (4,)]
    """
    return _selected(lambda value: isinstance(value, type_), batch, [])


def _selected(is_selected: Callable[[Any], bool], batch: Batch, result: list[Any]) -> list[Any]:
    """Append the leaves and containers for which ``is_selected`` returns true to ``result``, and return ``result``.

    The predicate selects either all or none of the leaves of ``_LEAF_TYPES``. The members of a selected container are not
    visited.
    """
    cls = type(batch)
    inner: Collection[Any] = ()
    if is_selected(batch):
        result.append(batch)
    elif cls is dict:
        inner = batch.values()
    elif cls is tuple or cls is list:
        inner = batch
    elif cls not in _LEAF_TYPES and is_container(batch):
        inner = [member(batch, name) for name in member_names(batch)]
    if _LEAF_TYPES.issuperset(map(type, inner)):  # fast path: most batches, and lists of hundreds of target dicts
        if is_selected(None):
            result.extend(inner)
    else:
        for value in inner:
            _selected(is_selected, value, result)
    return result


def tensors(batch: Batch) -> Iterator[torch.Tensor]:
    """Yield the tensors among the leaves of ``batch``, in order."""
    return (leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))


def named_leaves(batch: Batch, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for each leaf of ``batch``. A path is the Python code that reads the leaf from the batch.

    Examples:
        >>> list(named_leaves({"a": 1, "b": [2, (3,)]}))
        [("['a']", 1), ("['b'][0]", 2), ("['b'][1][0]", 3)]
    """
    if _is_leaf(batch):
        yield path, batch
        return
    for name in member_names(batch):
        yield from named_leaves(member(batch, name), f"{path}[{name!r}]" if by_key(batch) else f"{path}.{name}")


def replace(container: Any, values: Mapping[Any, Any]) -> Any:
    """Return a shallow copy of ``container`` with some members replaced.

    Args:
        container: A tuple, list, named tuple, mapping or dataclass.
        values: Index, field or key → new value. A mapping accepts new keys, and a tuple or list of length n the new index n.

    Raises:
        ArgumentTypeError: If ``container`` cannot be rebuilt with other values.

    Examples:
        >>> replace((1, 2), {0: "one", 2: 3})
        ('one', 2, 3)
    """
    if is_namedtuple(container):
        return _with_attributes(container._replace(**values), container)
    if isinstance(container, tuple | list):
        items = list(container)
        for index, value in sorted(values.items()):
            items[index : index + 1] = [value]
        return _rebuild_sequence(container, items)
    if isinstance(container, Mapping):
        return _rebuild_mapping(container, values)
    return _rebuild_record(container, values)


def _is_leaf(value: Any) -> bool:
    """Return whether ``map_leaves`` passes ``value`` to its function instead of visiting members of ``value``."""
    cls = type(value)
    return cls in _LEAF_TYPES or (cls not in (tuple, list, dict) and (moves_itself(value) or not is_container(value)))


def _all_identical(new: Any, old: Any) -> bool:
    """Return whether two iterables of one length have the same objects."""
    return all(map(operator.is_, new, old))


def _rebuild_sequence(container: Any, items: list[Any]) -> Any:
    """Return a copy of a tuple or list, other than a named tuple, with ``items`` in place of its items."""
    cls = type(container)
    if cls is tuple or cls is list:
        return cls(items)
    try:
        if isinstance(container, MutableSequence):
            clone = copy.copy(container)
            clone[:] = items
            return clone
        return _with_attributes(cls(items), container)
    except TypeError as error:
        raise _cannot_rebuild(cls) from error


def _rebuild_mapping(container: Mapping[Any, Any], values: Mapping[Any, Any]) -> Any:
    """Return a copy of a mapping in which ``values`` replace items, or are added."""
    cls = type(container)
    clone: Any
    try:
        if not isinstance(container, MutableMapping):
            clone = cls({**container, **values})  # type: ignore[call-arg]
            # The attributes that the constructor has set are kept, because one of them may hold the items.
            names = vars(clone).keys() if hasattr(clone, "__dict__") else ()
            return _with_attributes(clone, container, ignored=names)
        # The mapping is copied, not constructed, because its constructor may need other arguments than items, such as the
        # factory of a defaultdict. A mapping that is not a dict may hold its items in an attribute that a shallow copy would
        # share, so it is copied deeply, except for its keys and values.
        if isinstance(container, dict | UserDict):
            clone = copy.copy(container)
        else:
            clone = copy.deepcopy(container, {id(part): part for item in container.items() for part in item})
        for key, value in values.items():  # not update(), which ModelOutput of Transformers does not allow
            clone[key] = value
        return clone
    except TypeError as error:
        raise _cannot_rebuild(cls) from error


def _rebuild_record(record: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a dataclass in which ``values`` replace fields."""
    # Not copy.copy, which reads every field of a dataclass with slots: reading a field without a value raises an error.
    clone = object.__new__(type(record))
    fields = {name: getattr(record, name) for name in member_names(record)}
    for name, value in {**getattr(record, "__dict__", {}), **fields, **values}.items():
        object.__setattr__(clone, name, value)  # plain assignment raises for a frozen dataclass
    return clone


def _with_attributes(clone: Any, container: Any, ignored: Collection[str] = ()) -> Any:
    """Copy the attributes of ``container`` to ``clone``, except those named in ``ignored``, and return ``clone``."""
    for name, value in getattr(container, "__dict__", {}).items():
        # Values of cached properties are not copied, because they may depend on the items.
        if name not in ignored and not isinstance(getattr(type(container), name, None), functools.cached_property):
            vars(clone)[name] = value
    return clone


def _cannot_rebuild(cls: type) -> ArgumentTypeError:
    """Return the error for a container of class ``cls`` that cannot be rebuilt."""
    return ArgumentTypeError(
        f"A container of tensors must be of a type that can be rebuilt with other values, got {cls.__qualname__}. Return a "
        "tuple, list, dict, named tuple or dataclass from collate_fn, or add a method to(device) to the type."
    )
