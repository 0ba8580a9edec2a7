"""Columns of a list of dicts, such as target dicts: the tensors of one key, their properties, and their concatenation.

The functions take a whole column, because a Python call per tensor costs 1 µs or more and a batch has hundreds of tensors.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentTypeError

plainly = torch._C.DisableTorchFunctionSubclass
"""Context manager in which functions treat tensors of subclasses, such as torchvision's, as plain tensors."""

# Attribute getters of the base class: those of torchvision's subclasses are slower.
_get: Any = vars(torch._C.TensorBase)
_shape = _get["shape"].__get__
_dtype = _get["dtype"].__get__
_device = _get["device"].__get__
_layout = _get["layout"].__get__
_nbytes = _get["nbytes"].__get__
_EXCEPTIONS = (
    _get["requires_grad"].__get__,
    _get["is_nested"].__get__,
    _get["is_quantized"].__get__,
    Tensor.is_neg,
    Tensor.is_conj,
)
"""Predicates. A tensor for which one is true loses information if only its values are copied."""


class Column(NamedTuple):
    """Values of one key."""

    samples: Sequence[int]
    """For each value, the index of its dict, ascending."""
    values: Sequence[Any]


def columns(records: Sequence[Mapping[Any, Any]]) -> dict[Any, Column]:
    """Column of each key, in the order of the first dict that has the key."""
    names = tuple(records[0]) if records else ()
    if all(tuple(record) == names for record in records):
        samples = range(len(records))
        values = zip(*[record.values() for record in records], strict=True)
        return {name: Column(samples, column) for name, column in zip(names, values, strict=True)}
    result: dict[Any, tuple[list[int], list[Any]]] = {}
    for sample, record in enumerate(records):
        for name, value in record.items():
            column_lists = result.get(name)
            if column_lists is None:
                column_lists = result[name] = [], []
            column_lists[0].append(sample)
            column_lists[1].append(value)
    return {name: Column(*column_lists) for name, column_lists in result.items()}


def are_tensors(values: Sequence[Any]) -> bool:
    """Whether all values are tensors."""
    return all(issubclass(cls, Tensor) for cls in set(map(type, values)))


def are_plain(values: Sequence[Any]) -> bool:
    """Whether the class of all values is ``torch.Tensor`` itself."""
    return set(map(type, values)) <= _PLAIN


def shapes(tensors: Sequence[Tensor]) -> list[torch.Size]:
    """Shape of each tensor."""
    with plainly():
        return list(map(_shape, tensors))


def shape_behind_first(shapes: Sequence[torch.Size]) -> torch.Size | None:
    """``shape[1:]`` if it is the same for all shapes and no shape is empty; else ``None``."""
    axes = set(map(len, shapes))
    if len(axes) != 1 or 0 in axes:
        return None
    if any(len({shape[axis] for shape in shapes}) > 1 for axis in range(1, axes.pop())):
        return None
    return shapes[0][1:]


def dtypes(tensors: Sequence[Tensor]) -> set[torch.dtype]:
    """Set of the tensors' dtypes."""
    with plainly():
        return set(map(_dtype, tensors))


def devices(tensors: Sequence[Tensor]) -> set[torch.device]:
    """Set of the tensors' devices."""
    with plainly():
        return set(map(_device, tensors))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenation of the tensors along the first axis, as a plain tensor."""
    with plainly():
        return torch.cat(tuple(tensors))


def split(values: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    """Split ``values`` into tensors of ``counts`` rows.

    The tensors share the memory of ``values``. Without gradients each has a version counter of its own.
    """
    if values.requires_grad:
        return values.split_with_sizes(counts)
    with torch.no_grad():  # takes two thirds of the time
        return torch.unsafe_split_with_sizes(values, counts)


class TensorColumn:
    """Tensors of one key, with cached properties of the whole column."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    @cached_property
    def shapes(self) -> list[torch.Size]:
        """Shape of each tensor."""
        return shapes(self.tensors)

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        """Set of the tensors' dtypes."""
        return dtypes(self.tensors)

    @cached_property
    def devices(self) -> set[torch.device]:
        """Set of the tensors' devices."""
        return devices(self.tensors)

    @cached_property
    def entry(self) -> torch.Size | None:
        """Shape of one row: ``shape[1:]`` if it is the same for all tensors; else ``None``."""
        return shape_behind_first(self.shapes)

    @cached_property
    def joined(self) -> Tensor:
        """Concatenation of the tensors along the first axis, as a plain tensor."""
        return joined(self.tensors)


def lying_together(tensors: Sequence[Tensor]) -> Tensor | None:
    """``joined(tensors)`` without a copy: a view of their memory if they are adjacent there, in order; else ``None``.

    Args:
        tensors: Tensors of one dtype and device, whose shapes may differ in the first axis.
    """
    with plainly():
        if not all(map(Tensor.is_contiguous, tensors)):
            return None
        non_empty = [tensor for tensor in tensors if tensor.numel()]
        if not non_empty:
            return None
        first = non_empty[0]
        address = start = first.data_ptr()
        for tensor in non_empty:
            if tensor.data_ptr() != address:
                return None
            address += tensor.nbytes
        # The next tensor may be in another storage that happens to begin where this storage ends.
        storage = first.untyped_storage()
        if address > storage.data_ptr() + storage.nbytes():
            return None
        row_elements = math.prod(first.shape[1:])
        rows = (address - start) // (row_elements * first.itemsize)
        return first.as_strided((rows, *first.shape[1:]), (row_elements, *first.stride()[1:]))


_PLAIN = {Tensor}

MIN_PACKED_TENSORS = 8
"""Smallest number of tensors in a list of dicts that is packed. A short list may hold one dict per part of the batch."""

MAX_PACKED_BYTES = 32 * 1024
"""Largest size of a packed tensor other than a mask. Packed tensors are not aligned, which makes reading them slower."""

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor | None]
"""Function that returns a contiguous tensor of a shape and dtype, or ``None`` to let torch allocate it."""


class _PackedColumn(NamedTuple):
    """A column whose tensors are concatenated in one tensor."""

    name: Any
    samples: Sequence[int]
    lengths: list[int]
    """Number of rows of each tensor; of elements if ``shapes`` is not ``None``."""
    shapes: list[torch.Size] | None
    """Shape of each tensor if the shapes differ behind the first axis; else ``None``."""
    tensor_type: type[Tensor]
    attributes: list[dict[str, Any]] | None
    """Attributes of each tensor of torchvision's classes, such as the format of boxes; ``None`` for plain tensors."""

    def tensors(self, flat: Tensor) -> Sequence[Tensor]:
        """Split ``flat`` into the tensors of the column, with their shapes, class and attributes. They share its memory."""
        parts = split(flat, self.lengths)
        if self.shapes is not None:
            parts = [part.view(shape).data for part, shape in zip(parts, self.shapes, strict=True)]
        if self.tensor_type is Tensor:
            return parts
        typed_parts = [part.as_subclass(self.tensor_type) for part in parts]
        for part, attributes in zip(typed_parts, self.attributes or (), strict=False):
            vars(part).update(attributes)
        return typed_parts


class TargetsLayout:
    """Structure of packed target dicts, on the host.

    Args:
        container_type: Type of the container of the dicts.
        records: The dicts, with ``None`` for each value that is in ``PackedTargets.flat`` or ``PackedTargets.others``.
        packed: Columns of the packed tensors.
        others: (index of the dict, key) of each value in ``PackedTargets.others``.
    """

    __slots__ = ("container_type", "others", "packed", "records")

    def __init__(
        self,
        container_type: type[Any],
        records: list[dict[Any, Any]],
        packed: list[_PackedColumn],
        others: list[tuple[int, Any]],
    ) -> None:
        self.container_type, self.records, self.packed, self.others = container_type, records, packed, others


@dataclass(frozen=True, eq=False, repr=False)
class PackedTargets:
    """A list of dicts of tensors, packed for the transfer from a worker to the device: one tensor per key.

    The loader copies ``flat`` and ``others`` to the device; ``layout`` stays on the host. Stages and users get the dicts.
    """

    flat: tuple[Tensor, ...]
    """For each packed column, the concatenation of its tensors."""
    others: tuple[Any, ...]
    """Values that are not packed, except numbers and strings."""
    layout: TargetsLayout

    @property
    def types(self) -> set[type]:
        """Classes of the packed tensors."""
        return {column.tensor_type for column in self.layout.packed}

    def unpacked(self) -> Any:
        """Return new dicts whose tensors share the memory of the packed tensors.

        Cost:
            Half a microsecond of host time per tensor, two per tensor of torchvision's classes. No launch.
        """
        records = [record.copy() for record in self.layout.records]
        for column, flat in zip(self.layout.packed, self.flat, strict=True):
            name = column.name
            for sample, tensor in zip(column.samples, column.tensors(flat), strict=True):
                records[sample][name] = tensor
        for (sample, name), value in zip(self.layout.others, self.others, strict=True):
            records[sample][name] = value
        return records if self.layout.container_type is list else self.layout.container_type(records)


class _Plan:
    """Columns of a list of dicts that can be packed. It replaces the list as a leaf of the batch."""

    def __init__(self, dicts: Sequence[dict[Any, Any]], *, masks: bool) -> None:
        self._container_type = type(dicts)
        self._records = [record.copy() for record in dicts]
        self._columns: list[tuple[_PackedColumn, Sequence[Tensor]]] = []
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
        """``id`` of each tensor, except empty tensors, which a dataset may share among samples."""
        with plainly():
            return [id(tensor) for _, values in self._columns for tensor in values if Tensor.numel(tensor)]

    def packed(self, allocate: Allocate) -> PackedTargets:
        """Copy the tensors of each column into one tensor, in memory from ``allocate``."""
        flat = tuple(_flat(column, values, allocate) for column, values in self._columns)
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
        The new batch; ``batch`` itself if nothing is packed, or if one tensor occurs twice, because both stay one object.

    Cost:
        On the host, one copy of the tensors and 3 µs per dict.
    """
    plans: list[_Plan] = []

    def planned(value: Any) -> Any:
        plan = _Plan(value, masks=masks) if _are_dicts(value) else None
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
    return batches.map_leaves(lambda leaf: leaf.packed(allocate) if type(leaf) is _Plan else leaf, planned_batch)


def unpack_targets(batch: Batch) -> Batch:
    """Replace each ``PackedTargets`` of a batch by its list of dicts."""
    return batches.map_members(PackedTargets.unpacked, lambda value: type(value) is PackedTargets, batch)


def are_packable(values: Sequence[Any], *, any_size: bool) -> bool:
    """Whether the values of a column can be concatenated: dense host tensors of one class and dtype.

    Args:
        values: Values of a column.
        any_size: Whether a tensor may be larger than ``MAX_PACKED_BYTES``.
    """
    classes = set(map(type, values))
    if len(classes) > 1 or not issubclass(cls := classes.pop(), Tensor):
        return False
    if cls is not Tensor and cls.__module__ not in _PACKABLE_MODULES:
        return False
    with plainly():
        return (
            len(dtypes(values)) == 1
            and devices(values) == {_HOST}
            and set(map(_layout, values)) == {torch.strided}
            and not any(any(map(is_exception, values)) for is_exception in _EXCEPTIONS)
            and all(map(Tensor.is_contiguous, values))
            and (any_size or max(map(_nbytes, values)) <= MAX_PACKED_BYTES)
        )


def _packed_column(name: Any, samples: Sequence[int], tensors: Sequence[Tensor]) -> _PackedColumn:
    tensor_shapes = shapes(tensors)
    cls = type(tensors[0])
    attributes = None if cls is Tensor else [vars(tensor) for tensor in tensors]
    if shape_behind_first(tensor_shapes) is not None:
        return _PackedColumn(name, samples, [shape[0] for shape in tensor_shapes], None, cls, attributes)
    return _PackedColumn(name, samples, [shape.numel() for shape in tensor_shapes], tensor_shapes, cls, attributes)


def _flat(column: _PackedColumn, tensors: Sequence[Tensor], allocate: Allocate) -> Tensor:
    with plainly():
        inner = () if column.shapes is not None else tensors[0].shape[1:]
        out = allocate((sum(column.lengths), *inner), tensors[0].dtype)
        parts = tuple(tensors) if column.shapes is None else tuple(tensor.flatten() for tensor in tensors)
        return torch.cat(parts) if out is None else torch.cat(parts, out=out)


def _are_dicts(value: Any) -> bool:
    return type(value) in (list, tuple) and set(map(type, value)) == {dict}


_HOST = torch.device("cpu")
_HOST_VALUES = frozenset({int, float, bool, str, bytes, type(None)})
_PACKABLE_MODULES = frozenset(
    {f"torchvision.tv_tensors.{name}" for name in ("_bounding_boxes", "_mask", "_keypoints", "_image")}
)
