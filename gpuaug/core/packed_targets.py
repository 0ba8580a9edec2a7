"""Packing of target dicts into one tensor per key, for the transfer from a worker to the device, and for fused stages.

A *target dict* holds the annotations of one image, such as ``{"boxes": …}``. A *column* is the values of one key in a list of
target dicts. A column is *packed* if its tensors are concatenated into one flat tensor (``targets.py``). Rows, such as boxes,
are *pending* if a stage has queued their removal on the device, and the host does not know yet how many rows remain.
A *leaf* is a value of a batch that is no container, such as a tensor.
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
    Column,
    PackedTargets,
    PendingRows,
    TargetsLayout,
    as_plain_tensors,
    columns,
)

MIN_PACKED_TENSORS = 8
"""Lists of dicts with fewer tensors are not packed. A short list may hold one dict per view, not per sample."""

MAX_PACKED_BYTES = 32 * 1024
"""Larger tensors, except masks, are not packed: parts of a flat tensor are not aligned in memory, so they are read slowly."""

_HOST = torch.device("cpu")

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor | None]
"""Function of (shape, dtype) that returns an uninitialised contiguous tensor, or ``None`` to let torch allocate it."""


def _planned(targets: Sequence[Any], *, any_mask_size: bool = True, device: torch.device | None = None) -> PackedTargets:
    """Return the plan to pack a list of dicts: a ``PackedTargets`` in which each flat tensor is still a ``Column``.

    Args:
        targets: List or tuple of dicts, or of lists of dicts.
        any_mask_size: Whether masks of any size are packed. If not, masks have the size limit of other tensors.
        device: Device of the tensors to pack (``_is_packable``). Default: the host.
    """
    groups = None if not targets or type(targets[0]) is dict else [len(dicts) for dicts in targets]
    dicts = targets if groups is None else [record for dicts in targets for record in dicts]
    packed: list[Column] = []
    others: list[Column] = []
    columns_by_key = columns(dicts)
    for name, column in columns_by_key.items():
        are_masks = name in MASKS.keys or type(column.values[0]).__name__ == MASKS.class_name
        if _is_packable(column, any_size=any_mask_size and are_masks, device=device):
            packed.append(column)
        elif not column.types <= HOLDS_NOTHING - {Tensor}:  # the loader does not copy numbers and strings to the device
            others.append(column)
    moved = [*packed, *others]
    if len(moved) == len(columns_by_key) and all(column.samples == range(len(dicts)) for column in moved):
        records = [dict.fromkeys(columns_by_key)] * len(dicts)  # one object, because nothing remains in the dicts
    else:
        moved_names = {column.name for column in moved}
        records = [{name: None if name in moved_names else value for name, value in record.items()} for record in dicts]
    values_by_key = {column.name: dict(zip(column.samples, column.values, strict=True)) for column in others}
    layout = TargetsLayout(type(targets), records, [column.packed for column in packed], groups, tuple(columns_by_key))
    return PackedTargets(tuple(packed), values_by_key, layout)  # type: ignore[arg-type]


def pack_targets(batch: Batch, allocate: Allocate, *, any_mask_size: bool = True) -> Batch:
    """Replace each list or tuple of target dicts in a batch, or of lists of target dicts, by a ``PackedTargets``.

    Args:
        batch: A batch on the host.
        allocate: Allocator of the flat tensors, such as of page-locked memory.
        any_mask_size: Whether masks of any size are packed. If not, masks have the size limit of other tensors.

    Returns:
        New batch; ``batch`` itself if nothing is packed. If a tensor occurs twice in the batch, nothing is packed, because both
        occurrences must remain one object.

    Cost:
        On the host, one copy of the tensors and 3 µs per dict.
    """

    def packs(value: Any) -> bool:
        # If the batch itself is a list of lists of dicts, its elements are members, and each is packed separately.
        return _are_dicts(value) or (value is not batch and _are_nested_dicts(value))

    def planned(value: Any) -> Any:
        plan = _planned(value, any_mask_size=any_mask_size) if packs(value) else None
        count = 0 if plan is None else sum(len(column.lengths) for column in plan.layout.packed)  # number of packed tensors
        return value if count < MIN_PACKED_TENSORS else plan

    def is_selected(value: Any) -> bool:  # values inside of a selected object are not packed
        return packs(value) or is_packed(value) or batches.moves_itself(value)

    try:
        planned_batch = batches.map_members(planned, is_selected, batch)
    except ArgumentTypeError:  # a container that cannot be rebuilt
        return batch
    if planned_batch is batch:
        return batch
    leaves = batches.leaves(planned_batch)
    tensors = [tensor for leaf in leaves if type(leaf) is Column for tensor in leaf.values]
    with as_plain_tensors():  # a dataset may use one empty tensor for several samples
        ids = [id(tensor) for tensor in tensors if Tensor.numel(tensor)]
    unique_ids = set(ids)
    if len(unique_ids) < len(ids) or not unique_ids.isdisjoint(map(id, leaves)):
        return batch
    return _concatenated(planned_batch, allocate)


def unpack_targets(batch: Batch) -> Batch:
    """Replace each ``PackedTargets`` of a batch by its list of dicts."""
    return batches.map_members(PackedTargets.unpacked, is_packed, batch)


def settle_targets(batch: Batch) -> Batch:
    """Remove pending rows from each ``PackedTargets`` of a batch. The device must have written ``PendingRows.keep_mask``."""
    return batches.map_members(PackedTargets.settled, is_packed, batch)


def has_pending_targets(batch: Batch) -> bool:
    """Return whether a ``PackedTargets`` of a batch has pending rows. Then wait for the device before ``settle_targets``."""
    return any(type(leaf) is PendingRows for leaf in batches.leaves(batch))


def is_packed(value: Any) -> bool:
    """Return whether ``value`` is a ``PackedTargets``."""
    return type(value) is PackedTargets


def can_be_packed(value: Any) -> bool:
    """Return whether a value of a target dict can be packed, whatever its size."""
    return _is_packable(Column((0,), (value,)), any_size=True)


def _is_packable(column: Column, *, any_size: bool, device: torch.device | None = None) -> bool:
    """Return whether the values of a column can be packed: tensors of one class and dtype, on one device.

    Args:
        column: The column.
        any_size: Whether a tensor may be larger than ``MAX_PACKED_BYTES``. Read without ``device``.
        device: Device on which the tensors must be. The tensors may then have any strides and size, because only their values
            are needed. Default: the host, where tensors must be contiguous, so that unpacking restores them exactly.
    """
    is_exact = device is None  # whether unpacking must restore the tensors exactly
    if device is not None:
        column.join(device)
    if len(column.types) > 1 or not column.are_on(device or _HOST):
        return False
    (cls,) = column.types
    if cls is not Tensor and cls.__module__ not in _PACKABLE_MODULES:
        return False
    values = column.values
    with as_plain_tensors():
        return (
            len(column.dtypes) == 1
            # ``join`` sets ``joined`` only for dense tensors.
            and ("joined" in vars(column) or set(map(_layout, values)) == {torch.strided})
            and not (is_exact and any(any(map(is_lossy, values)) for is_lossy in _LOSSY_COPY_PREDICATES))
            and (not is_exact or all(map(Tensor.is_contiguous, values)))
            and (not is_exact or any_size or max(map(_nbytes, values)) <= MAX_PACKED_BYTES)
        )


def _concatenated(planned: Batch, allocate: Allocate) -> Batch:
    """Replace each ``Column`` in a batch of plans (``_planned``) by its flat tensor, in memory from ``allocate``."""

    def concatenated(leaf: Any) -> Any:
        if type(leaf) is not Column:
            return leaf
        packed, tensors = leaf.packed, leaf.values
        inner = () if packed.shapes is not None else tensors[0].shape[1:]
        out = allocate((sum(packed.lengths), *inner), tensors[0].dtype)
        parts = tuple(tensors) if packed.shapes is None else tuple(tensor.flatten() for tensor in tensors)
        return torch.cat(parts) if out is None else torch.cat(parts, out=out)

    with as_plain_tensors():
        return batches.map_leaves(concatenated, planned)


def _are_dicts(value: Any) -> bool:
    """Return whether ``value`` is a non-empty list or tuple of dicts."""
    return type(value) in (list, tuple) and set(map(type, value)) == {dict}


def _are_nested_dicts(value: Any) -> bool:
    """Return whether ``value`` is a non-empty list or tuple of non-empty lists of dicts."""
    return type(value) in (list, tuple) and set(map(type, value)) == {list} and all(map(_are_dicts, value))


def packed_targets(targets: Sequence[Any], device: torch.device) -> PackedTargets:
    """Return a list of dicts, or of lists of dicts, as a ``PackedTargets``. Tensors on other devices are not packed."""
    plan = _planned(targets, device=device)
    # In a plan, each flat tensor is still a ``Column``.
    packed: list[Column] = [*plan.flat]  # type: ignore[list-item]
    flat = [column.joined if column.packed.shapes is None else column.elements for column in packed]
    return PackedTargets(tuple(flat), plan.others, plan.layout)


# Attribute getters of the base class, which are faster than the getters of torchvision's subclasses.
_descriptors: Any = vars(Tensor.__base__)
_layout, _nbytes = (_descriptors[name].__get__ for name in ("layout", "nbytes"))
_LOSSY_COPY_PREDICATES = (
    *(_descriptors[name].__get__ for name in ("requires_grad", "is_nested", "is_quantized")),
    Tensor.is_neg,
    Tensor.is_conj,
)
"""Predicates of a tensor. If one is true, the concatenation of values would lose information about the tensor."""
_PACKABLE_MODULES = frozenset(
    {f"torchvision.tv_tensors.{name}" for name in ("_bounding_boxes", "_mask", "_keypoints", "_image")}
)
"""Modules of torchvision's tensor classes, whose data are the values and ``vars``. Other subclasses are not packed."""
