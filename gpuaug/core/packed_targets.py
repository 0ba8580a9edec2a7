"""Target dicts, packed into one tensor per key for the transfer from a worker to the device, and for fused stages.

A *target dict* has the annotations of one image, such as ``{"boxes": …, "labels": …}``. A *column* is the values of one key in
a list of target dicts. A column is *packed* if its tensors are concatenated along the first axis into one *flat* tensor. Rows
are *pending* if a stage has queued their removal on the device, and the host does not know yet how many rows remain.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.columns import (
    Column,
    TensorColumn,
    are_dense,
    as_plain_tensors,
    columns,
    common_row_shape,
    largest_bytes,
    shapes,
    split,
)
from gpuaug.core.errors import ArgumentTypeError

TARGET_KEYS = ("boxes", "bbox", "keypoints", "masks")
"""Keys of target dicts whose plain tensors a fused pipeline transforms along with the images."""

MIN_PACKED_TENSORS = 8
"""Minimum number of tensors in a list of dicts that is packed. A short list may hold one dict per view, not per sample."""

MAX_PACKED_BYTES = 32 * 1024
"""Maximum size in bytes of a packed tensor other than a mask. Packed tensors are not aligned, so they are read more slowly."""

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor | None]
"""Function of (shape, dtype) that returns an uninitialised contiguous tensor, or ``None`` to let torch allocate it."""


class PackedColumn(NamedTuple):
    """Description of a packed column, without its data."""

    name: Any
    """Key of the column in the dicts."""
    samples: Sequence[int]
    """Index of the dict of each tensor."""
    lengths: list[int]
    """Number of rows of each tensor. If ``shapes`` is not ``None``, number of elements of each tensor."""
    shapes: list[torch.Size] | None
    """Shape of each tensor if shapes differ in more than the first axis; else ``None``."""
    tensor_type: type[Tensor]
    """Class of the tensors."""
    attributes: list[dict[str, Any]]
    """Attributes of each tensor, such as the format of torchvision's boxes; a list of one dict if all are equal."""

    def tensors(self, flat: Tensor) -> Sequence[Tensor]:
        """Split the concatenation ``flat`` into the tensors of the column. The tensors share the memory of ``flat``."""
        parts = split(flat, self.lengths)
        if self.shapes is not None:
            parts = [part.view(shape).data for part, shape in zip(parts, self.shapes, strict=True)]
        if self.tensor_type is Tensor:
            return parts
        typed_parts = [part.as_subclass(self.tensor_type) for part in parts]
        attributes_per_part = self.attributes * len(parts) if len(self.attributes) == 1 else self.attributes
        for part, attributes in zip(typed_parts, attributes_per_part, strict=True):
            vars(part).update(attributes)
        return typed_parts

    def plain(self) -> Self:
        """Return the column with ``torch.Tensor`` as the class of its tensors, without attributes."""
        return self._replace(tensor_type=Tensor, attributes=[{}])


class FlatColumn(TensorColumn):
    """A packed column with its data, which is split into tensors only when a caller reads ``tensors``.

    Args:
        packed: Description of a column whose tensors differ in the first axis only.
        flat: Concatenation of the tensors.
    """

    def __init__(self, packed: PackedColumn, flat: Tensor) -> None:
        assert packed.shapes is None, "the tensors must differ in the first axis only"
        self.packed = packed
        self.joined = flat
        entry = flat.shape[1:]
        self.entry = entry
        self.rows_per_entry = entry[:-1].numel()
        """Number of vectors along the last axis per row of a tensor, such as the keypoints of an object."""
        self.dtypes = {flat.dtype}
        self.devices = {flat.device}
        self.types = {packed.tensor_type}
        self.attributes = packed.attributes

    @cached_property
    def shapes(self) -> list[torch.Size]:
        """Shape of each tensor."""
        return [torch.Size((length, *self.joined.shape[1:])) for length in self.packed.lengths]

    @cached_property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors, which share the memory of ``joined``."""
        return self.packed.tensors(self.joined)


class TargetsLayout:
    """Structure of packed target dicts, on the host.

    Args:
        container_type: Type of the container of the dicts, list or tuple.
        records: Dicts, with ``None`` in place of each value that is in ``PackedTargets.flat`` or ``PackedTargets.others``.
        packed: Packed columns, in the order of ``PackedTargets.flat``.
        others: (index of the dict, key) of each value in ``PackedTargets.others``.
    """

    __slots__ = ("container_type", "others", "packed", "records")

    def __init__(
        self,
        container_type: type[Any],
        records: list[dict[Any, Any]],
        packed: list[PackedColumn],
        others: list[tuple[int, Any]],
    ) -> None:
        self.container_type, self.records, self.packed, self.others = container_type, records, packed, others


class PendingRows:
    """Removal of rows that is queued on the device. The host does not know yet how many rows remain.

    Args:
        names: Keys of the columns whose rows are removed. The flat tensor of such a column has the remaining rows first, and
            undefined rows after them.
        keep_mask: (n,) host tensor, true for each row that remains, in the order before the removal. The device may not have
            written the mask yet.
    """

    __slots__ = ("keep_mask", "names")

    def __init__(self, names: frozenset[Any], keep_mask: Tensor) -> None:
        self.names, self.keep_mask = names, keep_mask

    def counts(self, lengths: Sequence[int]) -> list[int]:
        """Return the number of remaining rows per dict. ``lengths``: number of rows per dict before the removal."""
        remaining_before = np.concatenate(([0], np.cumsum(self.keep_mask.numpy())))
        counts: list[int] = np.diff(remaining_before[np.cumsum([0, *lengths])]).tolist()
        return counts


@dataclass(frozen=True, eq=False, repr=False)
class PackedTargets:
    """A list of target dicts, packed: one tensor per key.

    The loader copies ``flat`` and ``others`` to the device; ``layout`` stays on the host. Fused stages read packed targets;
    other stages and the user get dicts.
    """

    flat: tuple[Tensor, ...]
    """Concatenation of the tensors of each packed column."""
    others: tuple[Any, ...]
    """Values that are not packed, except numbers and strings."""
    layout: TargetsLayout
    """Structure of the dicts."""
    pending: PendingRows | None = None
    """Pending removal of rows, which ``settled`` completes; ``None`` if no rows are pending."""

    @property
    def types(self) -> set[type]:
        """Classes of the packed tensors."""
        return {column.tensor_type for column in self.layout.packed}

    def values(self, name: Any) -> Column | None:
        """Return the column of a key, split into its tensors; ``None`` if the tensors are not packed."""
        for column, flat in zip(self.layout.packed, self.flat, strict=True):
            if column.name == name:
                return Column(column.samples, column.tensors(flat))
        return None

    def column(self, name: Any) -> FlatColumn | None:
        """Return the packed column of a key; ``None`` if its tensors are not packed, or differ in more than the first axis."""
        for column, flat in zip(self.layout.packed, self.flat, strict=True):
            if column.name == name and column.shapes is None:
                return FlatColumn(column, flat)
        return None

    def with_columns(self, columns: Mapping[Any, tuple[PackedColumn, Tensor]], pending: PendingRows | None = None) -> Self:
        """Return packed targets with columns replaced or added.

        Args:
            columns: Key → (description, concatenation) of each new column.
            pending: Removal of rows in the new targets.
        """
        old = {column.name: (column, flat) for column, flat in zip(self.layout.packed, self.flat, strict=True)}
        new = list({**old, **columns}.values())
        layout = self.layout
        new_layout = TargetsLayout(layout.container_type, layout.records, [column for column, _ in new], layout.others)
        return replace(self, flat=tuple(flat for _, flat in new), layout=new_layout, pending=pending)

    def settled(self) -> Self:
        """Return packed targets without the pending rows. Call after the device has written ``pending.keep_mask``."""
        if self.pending is None:
            return self
        columns = {}
        for column, flat in zip(self.layout.packed, self.flat, strict=True):
            if column.name in self.pending.names:
                counts = self.pending.counts(column.lengths)
                columns[column.name] = column._replace(lengths=counts), flat[: sum(counts)]
        return self.with_columns(columns)

    def unpacked(self) -> Any:
        """Return new dicts whose tensors share the memory of the packed tensors. ``pending`` must be ``None``.

        Cost:
            Half a microsecond of host time per tensor, or two microseconds for torchvision's classes. No launch.
        """
        assert self.pending is None, "the number of rows is not known yet"
        records = [record.copy() for record in self.layout.records]
        for column, flat in zip(self.layout.packed, self.flat, strict=True):
            name = column.name
            for sample, tensor in zip(column.samples, column.tensors(flat), strict=True):
                records[sample][name] = tensor
        for (sample, name), value in zip(self.layout.others, self.others, strict=True):
            records[sample][name] = value
        return records if self.layout.container_type is list else self.layout.container_type(records)


class _PackPlan:
    """Columns of a list of dicts that can be packed. Replaces the list as a leaf of the batch until the columns are packed.

    Args:
        dicts: List or tuple of dicts.
        masks: Whether masks are packed whatever their size.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]], *, masks: bool) -> None:
        self._container_type = type(dicts)
        self._records = [record.copy() for record in dicts]
        self._columns: list[tuple[PackedColumn, Sequence[Tensor]]] = []
        self._positions: list[tuple[int, Any]] = []
        self.others: list[Any] = []
        """Values that are not packed, except numbers and strings."""
        for name, column in columns(dicts).items():
            are_masks = name == "masks" or type(column.values[0]).__name__ == "Mask"
            if not are_packable(column.values, any_size=masks and are_masks):
                for sample, value in zip(*column, strict=True):
                    if type(value) not in _HOST_VALUES:
                        self._records[sample][name] = None
                        self._positions.append((sample, name))
                        self.others.append(value)
                continue
            self._columns.append((_packed_column(name, *column), column.values))
            for sample in column.samples:
                self._records[sample][name] = None

    def __len__(self) -> int:
        return sum(len(values) for _, values in self._columns)

    def ids(self) -> list[int]:
        """Return the ``id`` of each tensor that is not empty. A dataset may use one empty tensor for several samples."""
        with as_plain_tensors():
            return [id(tensor) for _, values in self._columns for tensor in values if Tensor.numel(tensor)]

    def packed(self, allocate: Allocate) -> PackedTargets:
        """Copy the tensors of each column into one tensor, in memory from ``allocate``."""
        flat = tuple(_concatenate(column, values, allocate) for column, values in self._columns)
        packed_columns = [column for column, _ in self._columns]
        layout = TargetsLayout(self._container_type, self._records, packed_columns, self._positions)
        return PackedTargets(flat, tuple(self.others), layout)


def pack_targets(batch: Batch, allocate: Allocate, *, masks: bool = True) -> Batch:
    """Replace each list or tuple of dicts with tensors by a ``PackedTargets``.

    Args:
        batch: A batch on the host.
        allocate: Allocator of the packed tensors.
        masks: Whether masks are packed whatever their size.

    Returns:
        New batch; ``batch`` itself if nothing is packed. If a tensor occurs twice in the batch, nothing is packed, because both
        occurrences must remain one object.

    Cost:
        On the host, one copy of the tensors and 3 µs per dict.
    """
    plans: list[_PackPlan] = []

    def planned(value: Any) -> Any:
        plan = _PackPlan(value, masks=masks) if _are_dicts(value) else None
        if plan is None or len(plan) < MIN_PACKED_TENSORS:
            return value
        plans.append(plan)
        return plan

    try:
        planned_batch = batches.map_members(planned, lambda value: _are_dicts(value) or batches.moves_itself(value), batch)
    except ArgumentTypeError:  # a container that cannot be rebuilt
        return batch
    if not plans:
        return batch
    tensor_ids = [tensor_id for plan in plans for tensor_id in plan.ids()]
    unique_ids = set(tensor_ids)
    other_leaves = [batches.leaves(planned_batch), *(batches.leaves(plan.others) for plan in plans)]
    if len(unique_ids) < len(tensor_ids) or any(id(leaf) in unique_ids for leaves in other_leaves for leaf in leaves):
        return batch
    return batches.map_leaves(lambda leaf: leaf.packed(allocate) if type(leaf) is _PackPlan else leaf, planned_batch)


def unpack_targets(batch: Batch) -> Batch:
    """Replace each ``PackedTargets`` of a batch by its list of dicts."""
    return batches.map_members(PackedTargets.unpacked, is_packed, batch)


def settle_targets(batch: Batch) -> Batch:
    """Remove pending rows from each ``PackedTargets`` of a batch. The device must have written their masks."""
    return batches.map_members(PackedTargets.settled, is_packed, batch)


def has_pending_targets(batch: Batch) -> bool:
    """Return whether a ``PackedTargets`` of a batch has pending rows. Then wait for the device before ``settle_targets``."""
    has_pending = False

    def check(targets: PackedTargets) -> PackedTargets:
        nonlocal has_pending
        has_pending |= targets.pending is not None
        return targets

    batches.map_members(check, is_packed, batch)
    return has_pending


def is_packed(value: Any) -> bool:
    """Return whether ``value`` is a ``PackedTargets``."""
    return type(value) is PackedTargets


def are_packable(values: Sequence[Any], *, any_size: bool) -> bool:
    """Return whether the values of a column can be concatenated: contiguous host tensors of one class and dtype.

    Args:
        values: Values of a column.
        any_size: Whether a tensor may be larger than ``MAX_PACKED_BYTES``.
    """
    classes = set(map(type, values))
    if len(classes) > 1 or not issubclass(cls := classes.pop(), Tensor):
        return False
    if cls is not Tensor and cls.__module__ not in _PACKABLE_MODULES:
        return False
    return are_dense(values, _HOST) and (any_size or largest_bytes(values) <= MAX_PACKED_BYTES)


def _packed_column(name: Any, samples: Sequence[int], tensors: Sequence[Tensor]) -> PackedColumn:
    """Return the description of a column."""
    tensor_shapes = shapes(tensors)
    cls = type(tensors[0])
    attributes = [{}] if cls is Tensor else shared_attributes([vars(tensor) for tensor in tensors])
    if common_row_shape(tensor_shapes) is not None:
        return PackedColumn(name, samples, [shape[0] for shape in tensor_shapes], None, cls, attributes)
    return PackedColumn(name, samples, [shape.numel() for shape in tensor_shapes], tensor_shapes, cls, attributes)


def shared_attributes(attributes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a list of the first dict if all dicts are equal; else ``attributes``."""
    first = attributes[0]
    return [first] if all(tensor_attributes == first for tensor_attributes in attributes) else attributes


def _concatenate(column: PackedColumn, tensors: Sequence[Tensor], allocate: Allocate) -> Tensor:
    """Concatenate the tensors of a column in memory from ``allocate``."""
    with as_plain_tensors():
        inner = () if column.shapes is not None else tensors[0].shape[1:]
        out = allocate((sum(column.lengths), *inner), tensors[0].dtype)
        parts = tuple(tensors) if column.shapes is None else tuple(tensor.flatten() for tensor in tensors)
        return torch.cat(parts) if out is None else torch.cat(parts, out=out)


def _are_dicts(value: Any) -> bool:
    """Return whether ``value`` is a non-empty list or tuple of dicts."""
    return type(value) in (list, tuple) and set(map(type, value)) == {dict}


_HOST = torch.device("cpu")
_HOST_VALUES = frozenset({int, float, bool, str, bytes, type(None)})
"""Types of values that are not copied to the device."""
_PACKABLE_MODULES = frozenset(
    {f"torchvision.tv_tensors.{name}" for name in ("_bounding_boxes", "_mask", "_keypoints", "_image")}
)
