"""Targets recognized by type: torchvision's ``Mask``, ``BoundingBoxes`` and ``KeyPoints`` in any container."""

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
"""Path of a tensor in a container: keys, field names and indices, without the index into a per-image sequence."""

_Visit = Callable[[Tensor, _Path, int | None, Any], tuple[Tensor, Tensor | None]]
"""Function of (tensor, path, image index or ``None``, container). Returns (tensor, mask of its valid boxes or ``None``)."""

_NAMED = frozenset({*TARGET_TYPES.values(), "bbox"})
"""Keys of target dicts whose values follow the images regardless of type."""


@dataclass
class _Column:
    """Tensors at one path, by sample index."""

    key: str
    """Key of these tensors in a target dict."""
    tensors: dict[int, Tensor] = field(default_factory=dict)
    valid: dict[int, Tensor] = field(default_factory=dict)
    """(n,) masks of the input boxes that are valid, by sample index."""
    is_whole: bool = False
    """True if one tensor holds the boxes or keypoints of all images."""


class TypedTargets:
    """Masks, boxes and keypoints of one input, as a list of inputs with data keys.

    In a sequence of B elements, element ``i`` belongs to image ``i``. A tensor outside such a sequence holds one entry per
    image, (B, …).

    Args:
        container: Tensor of one of torchvision's types, or a container of such tensors, nested to any depth.
        batch: Number of images.
        in_dicts: Whether ``container`` is a list of target dicts. Values under the keys of target dicts (``boxes``, ``bbox``,
            ``masks``, ``keypoints``) are then skipped.

    Raises:
        ArgumentError: If a sequence or a tensor does not hold one entry per image.
    """

    def __init__(self, container: Any, batch: int, *, in_dicts: bool = False) -> None:
        self._batch = batch
        self._skipped = _NAMED if in_dicts else frozenset()
        self._columns: dict[_Path, _Column] = {}
        self._maps: dict[_Path, Tensor] = {}
        self._container = container
        self._flat = _flat_columns(container, batch, self._skipped)
        """Columns of the tensors by key, if the container is a list of dicts of tensors; ``None`` in other containers."""
        if self._flat is None:
            self._mapped(container, self._find)
        else:
            self._find_flat(self._flat)
        self.inputs = [*(("mask", values) for values in self._maps.values()), *(("targets", dicts) for dicts in self._dicts())]
        """(data key, value) of each input."""

    def results(self, results: Sequence[Any], dicts: Sequence[Any] | None = None) -> Any:
        """Return the container with its masks, boxes and keypoints replaced by their transformed versions.

        Args:
            results: Results of ``inputs``, in the same order.
            dicts: Target dicts whose values under the keys of target dicts are transformed already; ``None``: the container.
        """
        maps = dict(zip(self._maps, results, strict=False))
        records = results[len(maps) :]
        list_indices = self._list_indices()
        if self._flat is not None:
            return self._put_flat(self._flat, records, self._container if dicts is None else dicts)

        def put(_: Tensor, path: _Path, sample: int | None, container: Any) -> tuple[Tensor, Tensor | None]:
            if path in maps:
                return maps[path], None
            column, list_index = self._columns[path], list_indices[path]
            if not column.is_whole:
                record = records[list_index][sample]
                return record[column.key], record.get("valid") if self._has_valid(path, container) else None
            parts = [record[column.key] for record in records[list_index]]
            result = (torch.cat if column.key == "boxes" else torch.stack)([part.as_subclass(Tensor) for part in parts])
            return like(result, parts[0]), None

        result = self._mapped(self._container, put)
        if dicts is None:
            return result
        changes = [
            {name: value for name, value in new_record.items() if value is not old_record.get(name)}
            for new_record, old_record in zip(result, self._container, strict=True)
        ]
        return (tuple if isinstance(dicts, tuple) else list)(
            batches.replace(record, values) if values else record for record, values in zip(dicts, changes, strict=True)
        )

    def _find_flat(self, of_keys: Mapping[str, Column]) -> None:
        for name, (samples, values) in of_keys.items():
            column = self._columns[name,] = _Column(TARGET_TYPES[type_name(values[0])])
            column.tensors.update(zip(samples, values, strict=True))
        for name, (samples, _) in of_keys.items():
            for sample in self._with_valid(name, samples):
                if "valid" in self._container[sample]:
                    self._columns[name,].valid[sample] = self._container[sample]["valid"]

    def _put_flat(self, of_keys: Mapping[str, Column], records: Sequence[Any], dicts: Sequence[Any]) -> Any:
        """Return ``dicts`` with the tensors under all other keys replaced by their transformed versions."""
        list_indices = self._list_indices()
        changes: list[dict[str, Any]] = [{} for _ in dicts]
        for name, (samples, _) in of_keys.items():
            column = self._columns[name,]
            results = records[list_indices[name,]]
            for sample in samples:
                changes[sample][name] = results[sample][column.key]
            for sample in self._with_valid(name, samples):
                changes[sample]["valid"] = results[sample]["valid"]
        return (tuple if isinstance(dicts, tuple) else list)(
            record if not change else {**record, **change} if type(record) is dict else batches.replace(record, change)
            for record, change in zip(dicts, changes, strict=True)
        )

    def _with_valid(self, name: str, samples: Sequence[int]) -> Sequence[int]:
        """Return the samples in whose dicts ``valid`` refers to the boxes under ``name``. Needs all of ``_columns``."""
        if self._columns[name,].key != "boxes":
            return ()
        if not self._skipped and sum(column.key == "boxes" for column in self._columns.values()) == 1:
            return samples
        return [sample for sample in samples if self._has_valid((name,), self._container[sample])]

    def _list_indices(self) -> dict[_Path, int]:
        """Return the index of the list of dicts for each column. A dict holds at most one column per key."""
        counts = dict.fromkeys(TARGET_TYPES.values(), 0)
        list_indices = {}
        for path, column in self._columns.items():
            list_indices[path] = counts[column.key]
            counts[column.key] += 1
        return list_indices

    def _dicts(self) -> list[list[dict[str, Tensor]]]:
        list_indices = self._list_indices()
        dict_lists: list[list[dict[str, Tensor]]] = [
            [{} for _ in range(self._batch)] for _ in range(1 + max(list_indices.values(), default=-1))
        ]
        for path, column in self._columns.items():
            for sample, tensor in column.tensors.items():
                dict_lists[list_indices[path]][sample][column.key] = tensor
            for sample, valid in column.valid.items():
                dict_lists[list_indices[path]][sample]["valid"] = valid
        return dict_lists

    def _mapped(self, value: Any, visit: _Visit, path: _Path = (), sample: int | None = None) -> Any:
        """Return ``value`` with each tensor replaced by the result of ``visit``; ``value`` itself if no tensor changes."""
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
            member_path, member_sample = ((*path, name), sample) if not per_image else (path, name)
            if isinstance(member, Tensor):
                if name in self._skipped and not path:
                    continue
                result, valid = self._visited(member, visit, member_path, member_sample, value)
                if valid is not None:
                    changes["valid"] = valid
            else:
                result = self._mapped(member, visit, member_path, member_sample)
            if result is not member:
                changes[name] = result
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
        """Return whether ``valid`` of a mapping refers to the boxes at ``path``: the first boxes in the mapping."""
        if not isinstance(container, Mapping):
            return False
        names = [name for name, value in container.items() if type_name(value) == "BoundingBoxes"]
        taken_elsewhere = len(path) == 1 and any(name in self._skipped for name in ("boxes", "bbox") if name in container)
        return names[:1] == [path[-1]] and not taken_elsewhere


def _flat_columns(container: Any, batch: int, skipped: Collection[str]) -> dict[str, Column] | None:
    """Return the columns of masks, boxes and keypoints of a list of flat dicts.

    Returns:
        Columns by key. ``None`` if ``container`` is not a list of one flat dict per image, or a column has several types.
    """
    if type(container) not in (list, tuple) or len(container) != batch or set(map(type, container)) != {dict}:
        return None
    result = {}
    for name, column in columns(container).items():
        types = set(map(type, column.values))
        if name in skipped or types <= HOLDS_NOTHING:
            continue
        if len(types) > 1 or type_name(column.values[0]) not in TARGET_TYPES:
            if any(map(holds_targets, column.values)):
                return None
            continue
        result[name] = column
    return result


def holds_unnamed(dicts: Any) -> bool:
    """Return whether target dicts hold torchvision's tensors under keys other than the keys of target dicts."""
    if not isinstance(dicts, list | tuple):
        return False
    records = dicts if set(map(type, dicts)) == {dict} else [record for record in dicts if isinstance(record, Mapping)]
    return any(
        key not in _NAMED and not HOLDS_NOTHING.issuperset(map(type, values)) and any(map(holds_targets, values))
        for key, (_, values) in columns(records).items()
    )


def joined_views(views: Sequence[Any], batch: int) -> Any:
    """Concatenate the results of one input in several views.

    Args:
        views: Result of the input per view.
        batch: Number of images per view.
    """
    first = views[0]
    if isinstance(first, Tensor):
        return like(torch.cat(tuple(views)), first) if type_name(first) in TARGET_TYPES else first
    if not holds_targets(first):
        return first
    if _is_sequence(first) and len(first) == batch:
        return type(first)(element for view in views for element in view)
    names = batches.member_names(first)
    return batches.replace(first, {name: joined_views([batches.member(view, name) for view in views], batch) for name in names})


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and not batches.is_namedtuple(value)
