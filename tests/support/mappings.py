"""Mappings as libraries make them, for the tests of everything that walks over a batch."""

from collections import UserDict
from collections.abc import Mapping, MutableMapping


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
