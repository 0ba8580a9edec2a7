"""Members of a batch that a stage reads (``on``) and writes (``into``).

A *member* is an entry of a batch: an item of a tuple or list, a value of a mapping, or a field of a named tuple or dataclass. A
*data key* is Kornia's name for a type of input, such as ``"input"`` (images), ``"mask"`` or ``"bbox"``. A *leaf* is a batch
without members, such as a tensor; here also a ``Ragged`` or an ``Encoded``.
"""

from collections.abc import Hashable, Iterable, Mapping
from enum import Enum
from numbers import Integral
from types import EllipsisType
from typing import Any

import torch

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.encoded import Encoded
from gpuaug.core.errors import ArgumentError, SelectionError, shown
from gpuaug.core.ragged import Ragged

Selector = Hashable
"""Name of a member: an index of a tuple or list, a key of a mapping, or a field of a named tuple or dataclass."""

On = Selector | tuple[Selector, ...] | Mapping[Selector, str] | None | EllipsisType
"""Type of ``on``, see ``Selection``."""

Into = Selector | tuple[Selector, ...] | EllipsisType
"""Type of ``into``, see ``Selection``."""

_KEY_ALIASES = {"image": "input", "label": "class"}
"""Alias → data key, for the data keys of Kornia that have an alias."""


class Selection:
    """Read a stage's arguments from a batch, and write its results into the batch.

    Args:
        on: Members to read. ``...`` (default): the batch itself if it is a tensor or ``Ragged``, or index 0 of a tuple or list.
            A selector: one member. A tuple of selectors: several members, in order. A mapping ``{selector: name}``: several
            members, each with its data key, or with the name of the encoder's parameter for it. ``None``: the whole batch.
        into: Members to write results to. ``...`` (default): the members that ``on`` names.
        stage_class: Class name of the stage, such as ``TransformStage``, for the code in error messages.

    Raises:
        ArgumentError: If ``on`` or ``into`` is empty or names no possible member, or ``into`` is passed with ``on=None``.
    """

    def __init__(self, on: On, into: Into, *, stage_class: str) -> None:
        if on is None and into is not ...:
            raise ArgumentError(
                f"into must be left out with on=None, which passes the whole batch, got {shown(into)}. "
                "Let the transform return the whole batch with the result in it."
            )
        for argument, value in {"on": on, "into": into}.items():
            names = tuple(value) if isinstance(value, tuple) or (argument == "on" and isinstance(value, Mapping)) else (value,)
            if not names or (argument == "into" and value is None):
                raise ArgumentError(
                    f"{argument} must name at least one member of the batch, got {value!r}. Leave it out for the default."
                )
            if not all(isinstance(name, Hashable) and not isinstance(name, torch.Tensor) for name in names):
                raise ArgumentError(
                    f"{argument} must be a key, an index or a tuple of them, got {shown(value)}. "
                    "Pass several members as a tuple: (0, 1)."
                )
            if isinstance(value, tuple) and len(set(value)) < len(value):
                raise ArgumentError(f"{argument} must name each member once, got {shown(value)}. Remove the repetition.")
        if isinstance(on, Mapping) and not all(isinstance(key, str | Enum) for key in on.values()):
            raise ArgumentError(
                f"on must map members to names, got {shown(on)}. Pass Kornia's data keys, {{0: 'input', 1: 'mask'}}, or an "
                "encoder's parameters, {'ids': 'input_ids'}."
            )
        self.on = on
        self.into = into
        self._selectors = tuple(on) if isinstance(on, tuple | Mapping) else (on,)
        self._stage_class = stage_class

    def read(self, batch: Batch) -> tuple[Any, ...]:
        """Return the values of the members that ``on`` names.

        Raises:
            SelectionError: If ``on`` does not fit ``batch``. The message lists the members of ``batch``.
        """
        if self.on is None:
            return (batch,)
        return tuple(self._get(batch, selector) for selector in self._selectors)

    def names(self, batch: Batch) -> list[Any]:
        """Return the names of the members that the stage reads: keys, fields, or indices from 0.

        Empty if the stage reads the whole batch.
        """
        if self.on is None or _form(batch) == "leaf":
            return []
        if self.on is ...:
            return [0]
        return _from_start(batch, self._selectors)

    def image_names(self, batch: Batch) -> list[Any]:
        """Return the names of the members that hold images before or after the stage.

        With ``into``: the members that the stage writes. Without ``into``: the members with the data key ``"input"`` or
        ``"image"``; without data keys, the member that the stage reads, if it is only one.
        """
        if self.into is not ...:
            return _from_start(batch, self.into if isinstance(self.into, tuple) else (self.into,))
        names = self.names(batch)
        if self.normalized_keys:  # ``names`` is empty for a batch that is a leaf
            return [name for name, key in zip(names, self.normalized_keys, strict=False) if key == "input"]
        return names if len(names) == 1 else []

    @property
    def data_keys(self) -> list[str] | None:
        """Values of ``on`` if it is a mapping: data keys, or parameters of an encoder. Otherwise ``None``."""
        return list(self.on.values()) if isinstance(self.on, Mapping) else None

    @property
    def normalized_keys(self) -> list[str]:
        """``data_keys``, normalized by ``normalized_key``; empty if ``on`` is not a mapping."""
        return list(map(normalized_key, self.data_keys or ()))

    def write(self, batch: Batch, result: Any) -> Batch:
        """Return a copy of ``batch`` with the stage's result in the members that ``into``, or by default ``on``, names.

        Raises:
            ArgumentError: If the number of results differs from the number of members to write.
            SelectionError: If ``into`` does not fit ``batch``.
        """
        if self.on is None:
            return result
        written = self.on if self.into is ... else self.into
        if written is ...:
            return result if _form(batch) == "leaf" else batches.replace(batch, {0: result})
        if not isinstance(written, tuple | Mapping):
            return self._put(batch, {written: result})
        names = tuple(written)
        if isinstance(written, Mapping) and len(names) == 1:
            return self._put(batch, {names[0]: result})  # for a single data key, Kornia returns one value, not a list
        if not isinstance(result, tuple | list) or len(result) != len(names):
            got = f"{len(result)} in a {type(result).__name__}" if isinstance(result, tuple | list) else type(result).__name__
            raise ArgumentError(
                f"The transform must return {len(names)} values, one for each of {_listed(names)}, got {got}. "
                "Return a tuple in that order, or pass into= with the one member to which the whole result is written."
            )
        return self._put(batch, dict(zip(names, result, strict=True)))

    def _get(self, batch: Batch, selector: Any) -> Any:
        """Return the member that a selector names. ``...``: the batch itself if it is a leaf, index 0 of a sequence.

        Raises:
            SelectionError: If there is no such member.
        """
        form = _form(batch)
        members = _members(batch)
        if selector is ...:
            if form == "leaf":
                return batch
            if form == "sequence":
                selector = 0
            else:
                advice = f": write {self._stage_class}(…, on={members[0]!r})" if members else ""
                raise SelectionError(
                    f"on must be passed for a batch that is a {type(batch).__name__}, got no on. "
                    f"The batch has {_listed(members)}{advice}."
                )
        if form == "sequence" and _is_index(selector) and -len(batch) <= selector < len(batch):
            return batch[selector]
        if form != "sequence" and selector in members:  # ``members`` is empty for a leaf
            return batches.member(batch, selector)
        way_out = f"It has {_listed(members)}." if members else "Leave on out. Pass on=None for batches that may be empty."
        raise SelectionError(
            f"on must name a member of the batch, a {type(batch).__name__} of {len(members)}, got {selector!r}. {way_out}"
        )

    def _put(self, batch: Batch, values: Mapping[Any, Any]) -> Batch:
        """Return a copy of ``batch`` with new values. ``values``: selector → value of the member to replace or add.

        Raises:
            SelectionError: If a member cannot be replaced or added.
        """
        form = _form(batch)
        fields = _fields(batch) if form == "record" else []
        if form == "leaf" or (fields and not values.keys() <= {*fields}):
            raise SelectionError(
                f"into must name members of a {type(batch).__name__}, got {_listed(values)}. It has {_listed(fields)}. "
                "To add a member, return a tuple or dict from collate_fn."
            )
        if form == "sequence":
            names = _from_start(batch, values)
            indices = {name for name in names if _is_index(name) and name >= 0}
            new_indices = sorted(index for index in indices if index >= len(batch))  # members to add
            if len(indices) < len(names) or new_indices != list(range(len(batch), len(batch) + len(new_indices))):
                raise SelectionError(
                    f"into must be an index of a {type(batch).__name__} of {len(batch)}, or the index after its end, without "
                    f"repetition or gap, got {_listed(values)}. Pass an index from 0 to {len(batch)}."
                )
            values = dict(zip(names, values.values(), strict=True))
        return batches.replace(batch, values)


def normalized_key(key: str | Enum) -> str:
    """Return a data key in lower case, without aliases: ``"input"`` for ``"image"``, ``"INPUT"`` or ``DataKey.IMAGE``."""
    name = (key.name if isinstance(key, Enum) else key).lower()
    return _KEY_ALIASES.get(name, name)


def _form(batch: Batch) -> str:
    """Return how members are read: ``"sequence"`` by index, ``"mapping"`` by key, ``"record"`` by attribute.

    ``"leaf"``: the batch has no members.
    """
    if isinstance(batch, Mapping):
        return "mapping"
    if isinstance(batch, Ragged | Encoded) or not batches.is_container(batch):
        return "leaf"
    if batches.by_key(batch):
        return "sequence"
    return "leaf" if batches.moves_itself(batch) else "record"


def _from_start(batch: Batch, selectors: Iterable[Any]) -> list[Any]:
    """Return selectors, with negative indices of a sequence replaced by indices from its start."""
    if _form(batch) != "sequence":
        return list(selectors)
    return [selector + len(batch) if _is_index(selector) and selector < 0 else selector for selector in selectors]


def _members(batch: Batch) -> list[Any]:
    """Return the keys, fields or indices of a batch; an empty list for a leaf."""
    return [] if _form(batch) == "leaf" else batches.member_names(batch)


def _fields(record: Any) -> list[str]:
    """Return the names of all fields of a dataclass or named tuple, including fields without a value."""
    return list(batches.field_names(record.__class__) or ())


def _is_index(selector: Any) -> bool:
    """Return whether a selector is an index of a sequence."""
    return isinstance(selector, Integral) and not isinstance(selector, bool)  # Integral: NumPy's integers, too


def _listed(members: Iterable[Any]) -> str:
    """Return the names of members for an error message."""
    return ", ".join(repr(member) for member in members) or "nothing"
