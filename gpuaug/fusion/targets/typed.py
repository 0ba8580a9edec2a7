"""Masks, boxes and keypoints that are found by their type: torchvision's tensors, in any container."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.columns import Column, columns
from gpuaug.core.errors import ArgumentError
from gpuaug.core.torchvision_types import HOLDS_NOTHING, TARGET_TYPES, holds_targets, type_name
from gpuaug.fusion.targets.masks import like

_Path = tuple[Any, ...]
"""Keys, fields and indices that lead to a tensor; within a sequence of one element per image, those within its element."""

_Visit = Callable[[Tensor, _Path, int | None, Any], tuple[Tensor, Tensor | None]]
"""Function of (tensor, path, image index or ``None``, container). Returns (tensor, mask of its valid boxes or ``None``)."""

_NAMED = frozenset({*TARGET_TYPES.values(), "bbox"})
"""Keys of target dicts whose values follow the images whatever their type."""


@dataclass
class _Column:
    """The tensors at one path: one for each image that has it."""

    key: str
    """Key of a target dict."""
    tensors: dict[int, Tensor] = field(default_factory=dict)
    valid: dict[int, Tensor] = field(default_factory=dict)
    """Masks of the boxes that were valid before."""
    is_whole: bool = False
    """Whether one tensor holds the boxes or keypoints of all images."""


class TypedTargets:
    """The masks, boxes and keypoints of one input, as inputs that have data keys.

    An element of a sequence with one element per image belongs to its image. A tensor that is in no such sequence holds one
    entry per image, (B, …).

    Args:
        given: A tensor of torchvision's types, or a container of any depth.
        batch: Number of images.
        in_dicts: Whether ``given`` is a list of target dicts. Values under the keys of target dicts (``boxes``, ``bbox``,
            ``masks``, ``keypoints``) are then skipped.

    Raises:
        ArgumentError: If a sequence or a tensor does not hold one entry per image.
    """

    def __init__(self, given: Any, batch: int, *, in_dicts: bool = False) -> None:
        self._batch = batch
        self._skipped = _NAMED if in_dicts else frozenset()
        self._columns: dict[_Path, _Column] = {}
        self._maps: dict[_Path, Tensor] = {}
        self._given = given
        self._flat = _flat_columns(given, batch, self._skipped)
        """Columns of the tensors by key, where ``given`` is a list of dicts of tensors; ``None`` in other containers."""
        if self._flat is None:
            self._mapped(given, self._find)
        else:
            self._find_flat(self._flat)
        self.inputs = [*(("mask", values) for values in self._maps.values()), *(("targets", each) for each in self._dicts())]
        """(data key, value) of each input."""

    def results(self, results: Sequence[Any], dicts: Sequence[Any] | None = None) -> Any:
        """The container with the tensors that followed the images.

        Args:
            results: Results of ``inputs``, in their order.
            dicts: The list of target dicts, if the values under their keys have followed the images elsewhere.
        """
        maps = dict(zip(self._maps, results, strict=False))
        records = results[len(maps) :]
        numbers = self._numbers()
        if self._flat is not None:
            return self._put_flat(self._flat, records, self._given if dicts is None else dicts)

        def put(_: Tensor, path: _Path, sample: int | None, container: Any) -> tuple[Tensor, Tensor | None]:
            if path in maps:
                return maps[path], None
            column, number = self._columns[path], numbers[path]
            if not column.is_whole:
                record = records[number][sample]
                return record[column.key], record.get("valid") if self._has_valid(path, container) else None
            parts = [record[column.key] for record in records[number]]
            made = (torch.cat if column.key == "boxes" else torch.stack)([part.as_subclass(Tensor) for part in parts])
            return like(made, parts[0]), None

        made = self._mapped(self._given, put)
        if dicts is None:
            return made
        changed = [
            {name: value for name, value in new.items() if value is not old.get(name)}
            for new, old in zip(made, self._given, strict=True)
        ]
        return (tuple if isinstance(dicts, tuple) else list)(
            batches.replace(record, values) if values else record for record, values in zip(dicts, changed, strict=True)
        )

    def _find_flat(self, of_keys: Mapping[str, Column]) -> None:
        for name, (samples, values) in of_keys.items():
            column = self._columns[name,] = _Column(TARGET_TYPES[type_name(values[0])])
            column.tensors.update(zip(samples, values, strict=True))
        for name, (samples, _) in of_keys.items():
            for sample in self._with_valid(name, samples):
                if "valid" in self._given[sample]:
                    self._columns[name,].valid[sample] = self._given[sample]["valid"]

    def _put_flat(self, of_keys: Mapping[str, Column], records: Sequence[Any], dicts: Sequence[Any]) -> Any:
        """``dicts`` with the tensors that followed the images."""
        numbers = self._numbers()
        changes: list[dict[str, Any]] = [{} for _ in dicts]
        for name, (samples, _) in of_keys.items():
            column = self._columns[name,]
            results = records[numbers[name,]]
            for sample in samples:
                changes[sample][name] = results[sample][column.key]
            for sample in self._with_valid(name, samples):
                changes[sample]["valid"] = results[sample]["valid"]
        return (tuple if isinstance(dicts, tuple) else list)(
            record if not change else {**record, **change} if type(record) is dict else batches.replace(record, change)
            for record, change in zip(dicts, changes, strict=True)
        )

    def _with_valid(self, name: str, samples: Sequence[int]) -> Sequence[int]:
        """Samples in whose dicts ``valid`` says which boxes under a key are valid. Called when all columns are known."""
        if self._columns[name,].key != "boxes":
            return ()
        if not self._skipped and sum(column.key == "boxes" for column in self._columns.values()) == 1:
            return samples
        return [sample for sample in samples if self._has_valid((name,), self._given[sample])]

    def _numbers(self) -> dict[_Path, int]:
        """Index of the list of dicts that holds each column: a dict has room for one column of each kind."""
        counts = dict.fromkeys(TARGET_TYPES.values(), 0)
        numbers = {}
        for path, column in self._columns.items():
            numbers[path] = counts[column.key]
            counts[column.key] += 1
        return numbers

    def _dicts(self) -> list[list[dict[str, Tensor]]]:
        numbers = self._numbers()
        made: list[list[dict[str, Tensor]]] = [
            [{} for _ in range(self._batch)] for _ in range(1 + max(numbers.values(), default=-1))
        ]
        for path, column in self._columns.items():
            for sample, tensor in column.tensors.items():
                made[numbers[path]][sample][column.key] = tensor
            for sample, valid in column.valid.items():
                made[numbers[path]][sample]["valid"] = valid
        return made

    def _mapped(self, value: Any, visit: _Visit, path: _Path = (), sample: int | None = None) -> Any:
        """``value`` with the result of ``visit`` in the place of each tensor; the same object if all are the same."""
        if isinstance(value, Tensor):
            return self._visited(value, visit, path, sample, None)[0]
        if not batches.is_container(value):
            return value
        per_image = sample is None and _is_sequence(value)
        if per_image and len(value) != self._batch:
            if not holds_targets(value):
                return value
            raise ArgumentError(
                f"A list of masks, boxes or keypoints must hold one element for each of the {self._batch} images, got "
                f"{len(value)}. Put tensors that hold all images into a dict."
            )
        changes: dict[Any, Any] = {}
        for name in batches.member_names(value):
            member = batches.member(value, name)
            inner, image = ((*path, name), sample) if not per_image else (path, name)
            if isinstance(member, Tensor):
                if name in self._skipped and not path:
                    continue
                made, valid = self._visited(member, visit, inner, image, value)
                if valid is not None:
                    changes["valid"] = valid
            else:
                made = self._mapped(member, visit, inner, image)
            if made is not member:
                changes[name] = made
        return batches.replace(value, changes) if changes else value

    def _visited(
        self, tensor: Tensor, visit: _Visit, path: _Path, sample: int | None, container: Any
    ) -> tuple[Tensor, Tensor | None]:
        name = type_name(tensor)
        if name not in TARGET_TYPES:
            return tensor, None
        # In a batch of one image every tensor belongs to that image, unless it has an axis for the batch.
        sample = 0 if sample is None and self._batch == 1 and tensor.ndim < 4 else sample
        return visit(tensor, path, sample, container)

    def _find(self, tensor: Tensor, path: _Path, sample: int | None, container: Any) -> tuple[Tensor, None]:
        key = TARGET_TYPES[type_name(tensor)]
        if sample is None and key == "masks":
            self._maps[path] = tensor
            return tensor, None
        column = self._columns.setdefault(path, _Column(key))
        if sample is not None:
            column.tensors[sample] = tensor
            if self._has_valid(path, container) and "valid" in container:
                column.valid[sample] = container["valid"]
            return tensor, None
        if not tensor.ndim or len(tensor) != self._batch:
            raise ArgumentError(
                f"{type_name(tensor)} must hold one entry for each of the {self._batch} images, got {tuple(tensor.shape)}. "
                "Pass a list of one tensor per image."
            )
        column.is_whole = True
        parts = tensor.split(1) if key == "boxes" else tensor.unbind()
        column.tensors.update((index, like(part, tensor)) for index, part in enumerate(parts))
        return tensor, None

    def _has_valid(self, path: _Path, container: Any) -> bool:
        """Whether ``valid`` of a mapping says which boxes at ``path`` are valid: those that come first in the mapping."""
        if not isinstance(container, Mapping):
            return False
        names = [name for name, value in container.items() if type_name(value) == "BoundingBoxes"]
        taken_elsewhere = len(path) == 1 and any(name in self._skipped for name in ("boxes", "bbox") if name in container)
        return names[:1] == [path[-1]] and not taken_elsewhere


def _flat_columns(given: Any, batch: int, skipped: Collection[str]) -> dict[str, Column] | None:
    """The columns of dicts that hold masks, boxes or keypoints by their type, each column of one type.

    Returns:
        The columns by key. ``None`` if ``given`` is not one dict of tensors for each image, or has a column of several types.
    """
    if type(given) not in (list, tuple) or len(given) != batch or set(map(type, given)) != {dict}:
        return None
    found = {}
    for name, column in columns(given).items():
        kinds = set(map(type, column.values))
        if name in skipped or kinds <= HOLDS_NOTHING:
            continue
        if len(kinds) > 1 or type_name(column.values[0]) not in TARGET_TYPES:
            if any(map(holds_targets, column.values)):
                return None
            continue
        found[name] = column
    return found


def holds_unnamed(dicts: Any) -> bool:
    """Whether target dicts hold torchvision's tensors under other keys than those by which targets are known."""
    if not isinstance(dicts, list | tuple):
        return False
    records = dicts if set(map(type, dicts)) == {dict} else [record for record in dicts if isinstance(record, Mapping)]
    return any(
        key not in _NAMED and not HOLDS_NOTHING.issuperset(map(type, values)) and any(map(holds_targets, values))
        for key, (_, values) in columns(records).items()
    )


def joined_views(views: Sequence[Any], batch: int) -> Any:
    """The results of one input in several views, one behind the other.

    Args:
        views: The result in each view.
        batch: Number of images of a view.
    """
    first = views[0]
    if isinstance(first, Tensor):
        return like(torch.cat(tuple(views)), first) if type_name(first) in TARGET_TYPES else first
    if not holds_targets(first):
        return first
    if _is_sequence(first) and len(first) == batch:
        return type(first)(each for view in views for each in view)
    names = batches.member_names(first)
    return batches.replace(first, {name: joined_views([batches.member(view, name) for view in views], batch) for name in names})


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and not batches.is_namedtuple(value)
