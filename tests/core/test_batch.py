import collections
import dataclasses
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batches.containers import MAPPINGS, RECORDS, Encoding, Fixed, Pair, Store
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from gpuaug import ArgumentTypeError
from gpuaug.core.batch import is_namedtuple, leaves, map_leaves, moves_itself, named_leaves, replace, tensors


class Marked(list):
    """A list that carries something else."""

    mark = "none"


class Boxed:
    """Stands for a leaf that was changed."""

    def __init__(self, leaf):
        self.leaf = leaf


class Moves:
    def to(self, device):
        return self


def two(kind):
    return lambda images, labels: kind([images, labels])


CONTAINERS = {"tuple": two(tuple), "list": two(list), "list subclass": two(Marked), **MAPPINGS, **RECORDS}


LEAVES = (
    st.integers()
    | st.text(max_size=3)
    | st.none()
    | st.binary(max_size=2)
    | st.builds(torch.full, st.just((2,)), st.integers(0, 9))
    | st.builds(Moves)
)


def containers(inner):
    keys = st.integers() | st.text(max_size=3)
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=3).map(Fixed)
        | st.builds(lambda make, images, labels: make(images, labels), st.sampled_from(list(CONTAINERS.values())), inner, inner)
    )


any_batch = given(st.recursive(LEAVES, containers, max_leaves=12))


def outline(batch):
    """The containers of ``batch`` and nothing of its leaves, by another way than the code that is tested."""
    if isinstance(batch, Mapping):
        return type(batch), {key: outline(value) for key, value in batch.items()}
    if dataclasses.is_dataclass(batch):
        return type(batch), outline(batch.images), outline(batch.labels)
    if isinstance(batch, list | tuple):
        return type(batch), *(outline(value) for value in batch)
    return "leaf"


@any_batch
def test_map_leaves_returns_unchanged_batch_itself(batch):
    assert map_leaves(lambda leaf: leaf, batch) is batch


@any_batch
def test_map_leaves_replaces_leaves_and_keeps_container_types(batch):
    before = leaves(batch)
    mapped = map_leaves(Boxed, batch)
    assert outline(mapped) == outline(batch)
    assert [boxed.leaf for boxed in leaves(mapped)] == before
    assert all(now is then for now, then in zip(leaves(batch), before, strict=True)), "the batch itself was changed"


@any_batch
def test_leaf_path_is_python_expression(batch):
    named = list(named_leaves(batch))
    assert all(eval(f"batch{path}", {"batch": batch}) is leaf for path, leaf in named)
    assert len({path for path, _ in named}) == len(named)


@any_batch
def test_paths_are_in_order_of_leaves(batch):
    listed = leaves(batch)
    assert all(leaf is other for (_, leaf), other in zip(named_leaves(batch), listed, strict=True))
    assert [leaf for leaf in listed if isinstance(leaf, torch.Tensor)] == list(tensors(batch))


def test_rebuilt_container_keeps_extra_attributes():
    marked = Marked([1, 2])
    marked.mark = "kept"
    assert map_leaves(Boxed, marked).mark == "kept"
    assert map_leaves(Boxed, defaultdict(list, a=1))["missing"] == []


def test_rebuilt_dataclass_keeps_post_init_values():
    @dataclasses.dataclass
    class Derived:
        images: object
        count: int = dataclasses.field(init=False)
        scale: dataclasses.InitVar[int] = 2

        def __post_init__(self, scale):
            self.count = scale * len(self.images)

    batch = Derived(torch.zeros(3))
    assert batch.count == 6
    assert map_leaves(lambda leaf: leaf + 1, batch).count == 7


@pytest.mark.parametrize("frozen_with_slots", [False, True])
def test_unset_dataclass_field_stays_unset(frozen_with_slots):
    @dataclasses.dataclass(frozen=frozen_with_slots, slots=frozen_with_slots)
    class Partial:
        images: object
        boxes: object = dataclasses.field(init=False)

    batch = Partial(1)
    mapped = map_leaves(Boxed, batch)
    assert mapped.images.leaf == 1
    assert not hasattr(mapped, "boxes")
    assert [path for path, _ in named_leaves(batch)] == [".images"]


def test_lookalike_containers_are_leaves():
    size, names = torch.Size([2, 3]), ["a.jpg", "b.jpg"]
    mapped = map_leaves(lambda leaf: leaf + 1 if isinstance(leaf, torch.Tensor) else leaf, (torch.zeros(1), size, names))
    assert mapped[1] is size
    assert mapped[2] is names


def test_strings_bytes_arrays_and_sets_are_leaves():
    import numpy as np

    batch = ["text", b"bytes", np.zeros(2), {1, 2}, collections.deque([1])]
    assert all(leaf is other for leaf, other in zip(leaves(batch), batch, strict=True))


def test_tensor_subclass_and_parameter_are_leaves():
    class Mask(torch.Tensor):
        pass

    batch = (torch.zeros(2).as_subclass(Mask), nn.Parameter(torch.zeros(1)))
    assert [type(leaf) for leaf in tensors(batch)] == [Mask, nn.Parameter]


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_objects_with_to_are_leaves_even_if_named_tuples(enforce_sorted):
    packed = pack_sequence([torch.zeros(2), torch.zeros(1)], enforce_sorted=enforce_sorted)
    assert is_namedtuple(packed)
    for batch in (packed, [packed], {"packed": packed}):
        assert [leaf is packed for leaf in leaves(batch)] == [True]
        assert [leaf is packed for _, leaf in named_leaves(batch)] == [True]
    assert map_leaves(Boxed, packed).leaf is packed


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Moves(), True),
        (nn.Linear(1, 1), True),
        (pack_sequence([torch.zeros(2)]), True),
        (torch.zeros(1), False),
        (Encoding(), True),
        (Moves, False),
        (Pair(1, 2), False),
        ([1], False),
        ("to", False),
        (None, False),
    ],
)
def test_moves_itself(value, expected):
    assert moves_itself(value) is expected


class Odd(tuple):
    """A tuple that is not made from its items."""

    def __new__(cls, images, labels):
        return super().__new__(cls, (images, labels))


class Sealed(Fixed):
    """A mapping that is not made from a mapping."""

    def __init__(self, images, labels):
        super().__init__({"images": images, "labels": labels})


class InSlot(Store):
    """A mapping whose items ``copy.copy`` shares: they are in a slot."""

    __slots__ = ("_items",)


class InNamespace(Store):
    """A mapping whose items ``copy.copy`` shares: they are attributes of an object."""

    def __init__(self, items):
        self._namespace = SimpleNamespace(**items)

    _items = property(lambda self: vars(self._namespace))


class InTwo(Store):
    """A mapping whose items ``copy.copy`` shares: they are in a mapping within a list."""

    def __init__(self, items):
        self._all_items = [dict(items)]

    _items = property(lambda self: self._all_items[0])


@pytest.mark.parametrize("kind", [InSlot, InNamespace, InTwo])
def test_mapping_whose_copy_shares_its_items_is_rebuilt(kind):
    first = torch.zeros(1)
    batch = kind({"images": first, "labels": 2})
    changed = replace(batch, {"labels": 3, "new": 4})
    assert type(changed) is kind
    assert dict(changed) == {"images": first, "labels": 3, "new": 4}
    assert changed["images"] is first
    assert dict(batch) == {"images": first, "labels": 2}
    assert [boxed.leaf for boxed in leaves(map_leaves(Boxed, batch))] == [first, 2]


class Tagged(tuple):
    def __new__(cls, items, tag=None):
        self = super().__new__(cls, items)
        self.tag = tag
        return self


class TaggedPair(Pair):
    """A named tuple with attributes."""

    @functools.cached_property
    def count(self):
        return len(leaves(self)) + isinstance(self.images, Boxed)


@pytest.mark.parametrize("change", [lambda batch, _: map_leaves(Boxed, batch), lambda batch, name: replace(batch, {name: 3})])
@pytest.mark.parametrize(
    ("batch", "name"), [(Tagged([1, 2]), 0), (TaggedPair(1, 2), "images"), (Fixed({"images": 1}), "images"), (Marked([1]), 0)]
)
def test_rebuilt_container_keeps_attributes_that_the_user_has_set(batch, name, change):
    batch.tag = "kept"
    changed = change(batch, name)
    assert type(changed) is type(batch)
    assert leaves(changed) != leaves(batch)
    assert changed.tag == "kept"


def test_rebuilt_named_tuple_computes_cached_properties_anew():
    pair = TaggedPair(1, 2)
    assert pair.count == 2
    assert map_leaves(Boxed, pair).count == 3


@pytest.mark.parametrize("kind", [Odd, Sealed])
def test_container_that_cannot_be_rebuilt_error_has_way_out(kind):
    with pytest.raises(ArgumentTypeError) as caught:
        map_leaves(Boxed, kind(1, 2))
    assert f"A container of tensors must be of a type that can be rebuilt with other values, got {kind.__name__}" in str(
        caught.value
    )
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize("kind", [Odd, Sealed])
def test_container_that_cannot_be_rebuilt_may_hold_unchanged_leaves(kind):
    batch = kind(1, 2)
    assert map_leaves(lambda leaf: leaf, batch) is batch


def test_leaves_of_containers_that_cannot_be_rebuilt_are_listed():
    assert leaves([{"size": torch.Size([2, 3])}, "name"]) == [2, 3, "name"]
