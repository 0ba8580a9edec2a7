"""Containers as users and libraries make them, for the tests of everything that walks over a batch."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import NamedTuple


class Fixed(Mapping):
    """A mapping that cannot be changed, and is made from another."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Store(MutableMapping):
    """A mapping that keeps its items in an attribute, as most of those in the wild do."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __setitem__(self, key, value):
        self._items[key] = value

    def __delitem__(self, key):
        del self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Encoding(UserDict):
    """As Hugging Face's ``BatchEncoding``: its ``to`` changes it in place."""

    def to(self, device, non_blocking=False):
        self.data = {key: value.to(device) for key, value in self.items()}
        return self


Pair = namedtuple("Pair", ["images", "labels"])


class Sample(NamedTuple):
    images: object
    labels: object


@dataclasses.dataclass
class Record:
    images: object
    labels: object


@dataclasses.dataclass(frozen=True)
class Frozen:
    images: object
    labels: object


@dataclasses.dataclass(slots=True)
class Slots:
    images: object
    labels: object


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    images: object
    labels: object


@dataclasses.dataclass
class Derived:
    images: object
    labels: object
    count: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.count = len(self.labels)


def keyed(kind):
    return lambda images, labels: kind({"images": images, "labels": labels})


MAPPINGS = {
    "dict": keyed(dict),
    "OrderedDict": keyed(OrderedDict),
    "defaultdict": keyed(lambda items: defaultdict(list, items)),
    "UserDict": keyed(UserDict),
    "mapping proxy": keyed(MappingProxyType),
    "immutable mapping": keyed(Fixed),
    "mutable mapping": keyed(Store),
}
RECORDS = {
    "named tuple": Pair,
    "typed named tuple": Sample,
    "dataclass": Record,
    "frozen dataclass": Frozen,
    "dataclass with slots": Slots,
    "frozen dataclass with slots": FrozenSlots,
}
