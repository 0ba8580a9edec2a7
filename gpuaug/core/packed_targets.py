"""Packing of target dicts into one tensor per key, for the transfer from a worker to the device, and for fused stages.

*Target dict*, *column*, *packed*: see ``targets.py``. Rows are *pending* if a stage has queued their removal on the device, and
the host does not know yet how many rows remain.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentTypeError
from gpuaug.core.targets import (
    HOLDS_NOTHING,
    MASKS,
    PackedColumn,
    PackedTargets,
    TargetsLayout,
    TensorColumn,
    as_plain_tensors,
    columns,
)

MIN_PACKED_TENSORS = 8
"""Minimum number of tensors in a list of dicts that is packed. A short list may hold one dict per view, not per sample."""

MAX_PACKED_BYTES = 32 * 1024
"""Maximum size in bytes of a packed tensor other than a mask. Packed tensors are not aligned, so they are read more slowly."""

_HOST = torch.device("cpu")

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor | None]
"""Function of (shape, dtype) that returns an uninitialised contiguous tensor, or ``None`` to let torch allocate it."""


class _PackPlan:
    """Columns of a list of dicts that can be packed. Replaces the list as a leaf of the batch until the columns are packed.

    Args:
        targets: List or tuple of dicts, or of lists of dicts.
        any_mask_size: Whether masks of any size are packed. If not, masks have the size limit of other tensors.
        device: See ``are_packable``.
    """

    def __init__(self, targets: Sequence[Any], *, any_mask_size: bool = True, device: torch.device | None = None) -> None:
        self._container_type = type(targets)
        self._groups = None if type(targets[0]) is dict else [len(dicts) for dicts in targets]
        dicts = targets if self._groups is None else [record for dicts in targets for record in dicts]
        self._records = [record.copy() for record in dicts]
        self._columns: list[tuple[PackedColumn, Sequence[Tensor]]] = []
        self._positions: list[tuple[int, Any]] = []
        """(index of the dict, key) of each value in ``others``."""
        self.others: list[Any] = []
        """Values that are not packed, except numbers and strings."""
        for name, column in columns(dicts).items():
            are_masks = name in MASKS.keys or type(column.values[0]).__name__ == MASKS.class_name
            if not are_packable(column.values, any_size=any_mask_size and are_masks, device=device):
                for sample, value in zip(*column, strict=True):
                    if type(value) is Tensor or type(value) not in HOLDS_NOTHING:
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
        layout = TargetsLayout(self._container_type, self._records, packed_columns, self._positions, self._groups)
        return PackedTargets(flat, tuple(self.others), layout)


def pack_targets(batch: Batch, allocate: Allocate, *, any_mask_size: bool = True) -> Batch:
    """Replace each list or tuple of dicts, or of lists of dicts, with tensors by a ``PackedTargets``.

    Args:
        batch: A batch on the host.
        allocate: Allocator of the packed tensors.
        any_mask_size: Whether masks of any size are packed. If not, masks have the size limit of other tensors.

    Returns:
        New batch; ``batch`` itself if nothing is packed. If a tensor occurs twice in the batch, nothing is packed, because both
        occurrences must remain one object.

    Cost:
        On the host, one copy of the tensors and 3 µs per dict.
    """
    plans: list[_PackPlan] = []

    def packs(value: Any) -> bool:
        # The batch itself is a container of members, also if each member is a list of dicts.
        return _are_dicts(value) or (value is not batch and _are_nested_dicts(value))

    def planned(value: Any) -> Any:
        plan = _PackPlan(value, any_mask_size=any_mask_size) if packs(value) else None
        if plan is None or len(plan) < MIN_PACKED_TENSORS:
            return value
        plans.append(plan)
        return plan

    try:
        planned_batch = batches.map_members(planned, lambda value: packs(value) or batches.moves_itself(value), batch)
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


def are_packable(values: Sequence[Any], *, any_size: bool, device: torch.device | None = None) -> bool:
    """Return whether the values of a column can be concatenated: contiguous tensors of one class, dtype and device.

    Args:
        values: Values of a column.
        any_size: Whether a tensor may be larger than ``MAX_PACKED_BYTES``.
        device: Device of tensors of which only the values are read: they may have any strides and size. Default: the host, and
            tensors must be as before, once they are split.
    """
    column = TensorColumn(range(len(values)), values)
    exact = device is None
    if len(column.types) > 1 or not column.are_on(device or _HOST):
        return False
    (cls,) = column.types
    if cls is not Tensor and cls.__module__ not in _PACKABLE_MODULES:
        return False
    with as_plain_tensors():
        return (
            len(column.dtypes) == 1
            and set(map(_layout, values)) == {torch.strided}
            and not (exact and any(any(map(is_lossy, values)) for is_lossy in _LOSSY_COPY_PREDICATES))
            and (not exact or all(map(Tensor.is_contiguous, values)))
            and (not exact or any_size or max(map(_nbytes, values)) <= MAX_PACKED_BYTES)
        )


def _packed_column(name: Any, samples: Sequence[int], tensors: Sequence[Tensor]) -> PackedColumn:
    """Return the description of a column."""
    column = TensorColumn(samples, tensors)
    cls = type(tensors[0])
    attributes = [vars(tensor) for tensor in tensors] if cls is not Tensor else [{}]
    if all(tensor_attributes == attributes[0] for tensor_attributes in attributes):
        attributes = attributes[:1]
    if column.row_shape is not None:
        return PackedColumn(name, samples, [shape[0] for shape in column.shapes], None, cls, attributes)
    return PackedColumn(name, samples, [shape.numel() for shape in column.shapes], column.shapes, cls, attributes)


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


def _are_nested_dicts(value: Any) -> bool:
    """Return whether ``value`` is a non-empty list or tuple of non-empty lists of dicts."""
    return type(value) in (list, tuple) and set(map(type, value)) == {list} and all(map(_are_dicts, value))


def packed_targets(targets: Sequence[Any], device: torch.device) -> PackedTargets:
    """Return a list of dicts as a ``PackedTargets``. Tensors that are not on ``device`` are not packed."""
    return _PackPlan(targets, device=device).packed(lambda *_: None)


# Attribute getters of the base class, which are faster than the getters of torchvision's subclasses.
_descriptors: Any = vars(Tensor.__base__)
_layout, _nbytes = (_descriptors[name].__get__ for name in ("layout", "nbytes"))
_LOSSY_COPY_PREDICATES = (
    *(_descriptors[name].__get__ for name in ("requires_grad", "is_nested", "is_quantized")),
    Tensor.is_neg,
    Tensor.is_conj,
)
"""Predicates of a tensor. If one is true, a copy of the values alone would lose information."""
_PACKABLE_MODULES = frozenset(
    {f"torchvision.tv_tensors.{name}" for name in ("_bounding_boxes", "_mask", "_keypoints", "_image")}
)
