import collections
import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.mappings import Encoding, Fixed, Store
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from gpuaug import ArgumentTypeError
from gpuaug.core.batch import is_namedtuple, is_record, leaves, map_leaves, moves_itself, named_leaves, replace, tensors

Pair = namedtuple("Pair", ["left", "right"])


class Sample(NamedTuple):
    left: object
    right: object


@dataclasses.dataclass
class Record:
    left: object
    right: object


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    left: object
    right: object


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
    return lambda left, right: kind([left, right])


def keyed(kind):
    return lambda left, right: kind({"left": left, "right": right})


CONTAINERS = {
    "tuple": two(tuple),
    "list": two(list),
    "list subclass": two(Marked),
    "named tuple": Pair,
    "typed named tuple": Sample,
    "dict": keyed(dict),
    "OrderedDict": keyed(OrderedDict),
    "defaultdict": keyed(lambda items: defaultdict(list, items)),
    "UserDict": keyed(UserDict),
    "mapping proxy": keyed(MappingProxyType),
    "immutable mapping": keyed(Fixed),
    "mutable mapping": keyed(Store),
    "dataclass": Record,
    "frozen dataclass with slots": Frozen,
}

every_container = pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())

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
        | st.builds(Pair, inner, inner)
        | st.builds(Record, inner, inner)
        | st.builds(Frozen, inner, inner)
    )


any_batch = given(st.recursive(LEAVES, containers, max_leaves=12))


def outline(batch):
    """The containers of ``batch`` and nothing of its leaves, by another way than the code that is tested."""
    if isinstance(batch, Mapping):
        return type(batch), {key: outline(value) for key, value in batch.items()}
    if isinstance(batch, Record | Frozen):
        return type(batch), outline(batch.left), outline(batch.right)
    if isinstance(batch, list | tuple):
        return type(batch), *(outline(value) for value in batch)
    return "leaf"


@any_batch
def test_a_batch_in_which_nothing_changes_is_handed_on_itself(batch):
    assert map_leaves(lambda leaf: leaf, batch) is batch


@any_batch
def test_every_leaf_is_replaced_in_its_place_and_every_container_keeps_its_type(batch):
    before = leaves(batch)
    mapped = map_leaves(Boxed, batch)
    assert outline(mapped) == outline(batch)
    assert [boxed.leaf for boxed in leaves(mapped)] == before
    assert all(now is then for now, then in zip(leaves(batch), before, strict=True)), "the batch itself was changed"


@any_batch
def test_the_path_of_a_leaf_is_what_one_types_behind_the_name_of_the_batch(batch):
    named = list(named_leaves(batch))
    assert all(eval(f"batch{path}", {"batch": batch}) is leaf for path, leaf in named)
    assert len({path for path, _ in named}) == len(named)


@any_batch
def test_paths_come_in_the_order_of_the_leaves(batch):
    listed = leaves(batch)
    assert all(leaf is other for (_, leaf), other in zip(named_leaves(batch), listed, strict=True))
    assert [leaf for leaf in listed if isinstance(leaf, torch.Tensor)] == list(tensors(batch))


@given(st.lists(st.integers(), min_size=1, max_size=5), st.data())
def test_replace_changes_what_it_names_and_nothing_else(items, data):
    index = data.draw(st.integers(0, len(items)))
    for kind in (list, tuple):
        container = kind(items)
        changed = replace(container, {index: "new"})
        assert type(changed) is kind
        assert list(changed) == [*items[:index], "new", *items[index + 1 :]]
        assert container == kind(items)


@every_container
def test_each_kind_of_container_is_rebuilt_as_what_it_was(make):
    left, right = torch.zeros(2), "label"
    batch = make(left, right)
    mapped = map_leaves(Boxed, batch)
    assert type(mapped) is type(batch)
    assert [boxed.leaf for boxed in leaves(mapped)] == [left, right]


@every_container
def test_the_container_that_was_passed_in_is_left_as_it_was(make):
    left, right = torch.zeros(2), "label"
    batch = make(left, right)
    map_leaves(Boxed, batch)
    assert leaves(batch) == [left, right]


@every_container
def test_replace_leaves_the_container_as_it_was(make):
    batch = make(1, 2)
    place = 0 if isinstance(batch, list | tuple) and not is_namedtuple(batch) else "left"
    changed = replace(batch, {place: "new"})
    assert type(changed) is type(batch)
    assert leaves(changed) == ["new", 2]
    assert leaves(batch) == [1, 2]


@pytest.mark.parametrize("make", [keyed(dict), keyed(OrderedDict), keyed(UserDict), keyed(Fixed), keyed(MappingProxyType)])
def test_a_mapping_takes_a_new_key(make):
    assert dict(replace(make(1, 2), {"third": 3})) == {"left": 1, "right": 2, "third": 3}


def test_containers_keep_what_their_constructor_does_not_take():
    marked = Marked([1, 2])
    marked.mark = "kept"
    assert map_leaves(Boxed, marked).mark == "kept"
    assert map_leaves(Boxed, defaultdict(list, a=1))["missing"] == []


def test_values_derived_by_a_dataclass_are_carried_along_and_not_derived_again():
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
def test_a_field_that_was_never_set_stays_unset(frozen_with_slots):
    @dataclasses.dataclass(frozen=frozen_with_slots, slots=frozen_with_slots)
    class Partial:
        images: object
        boxes: object = dataclasses.field(init=False)

    batch = Partial(1)
    mapped = map_leaves(Boxed, batch)
    assert mapped.images.leaf == 1
    assert not hasattr(mapped, "boxes")
    assert [path for path, _ in named_leaves(batch)] == [".images"]


def test_what_merely_looks_like_a_container_passes_through_untouched():
    size, names = torch.Size([2, 3]), ["a.jpg", "b.jpg"]
    mapped = map_leaves(lambda leaf: leaf + 1 if isinstance(leaf, torch.Tensor) else leaf, (torch.zeros(1), size, names))
    assert mapped[1] is size
    assert mapped[2] is names


def test_strings_bytes_arrays_and_sets_are_leaves():
    import numpy as np

    batch = ["text", b"bytes", np.zeros(2), {1, 2}, collections.deque([1])]
    assert all(leaf is other for leaf, other in zip(leaves(batch), batch, strict=True))


def test_a_tensor_subclass_and_a_parameter_are_leaves():
    class Mask(torch.Tensor):
        pass

    batch = (torch.zeros(2).as_subclass(Mask), nn.Parameter(torch.zeros(1)))
    assert [type(leaf) for leaf in tensors(batch)] == [Mask, nn.Parameter]


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_objects_that_move_themselves_are_leaves_even_if_they_are_named_tuples(enforce_sorted):
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
def test_what_moves_itself(value, expected):
    assert moves_itself(value) is expected


def test_a_named_tuple_is_told_from_a_tuple_and_a_record_from_its_class():
    assert is_namedtuple(Pair(1, 2))
    assert is_namedtuple(Sample(1, 2))
    assert not is_namedtuple((1, 2))
    assert is_record(Record(1, 2))
    assert not is_record(Record)
    assert not is_record(Pair(1, 2))


class Odd(tuple):
    """A tuple that is not made from its items."""

    def __new__(cls, left, right):
        return super().__new__(cls, (left, right))


class Sealed(Fixed):
    """A mapping that is not made from a mapping."""

    def __init__(self, left, right):
        super().__init__({"left": left, "right": right})


@pytest.mark.parametrize("kind", [Odd, Sealed])
def test_a_container_that_cannot_be_rebuilt_says_what_to_return_instead(kind):
    with pytest.raises(ArgumentTypeError) as caught:
        map_leaves(Boxed, kind(1, 2))
    assert str(caught.value) == (
        f"A container of tensors must be one that can be rebuilt with other values in it, got {kind.__name__}. "
        "Return a tuple, list, dict, named tuple or dataclass from collate_fn, or give the type a to(device) method."
    )
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize("kind", [Odd, Sealed])
def test_a_container_that_cannot_be_rebuilt_may_hold_what_does_not_change(kind):
    batch = kind(1, 2)
    assert map_leaves(lambda leaf: leaf, batch) is batch
