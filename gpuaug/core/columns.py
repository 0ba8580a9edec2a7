"""The tensors of many dicts, a column for each key: facts about a whole column by one call, and a column as one tensor.

A call of Python per tensor takes a microsecond and more, and a batch has hundreds of tensors.
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
"""A block in which functions take tensors of torchvision's types as plain ones, and return plain ones."""

# Attributes as functions: torchvision's types have slower ones of their own.
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
"""Predicates that hold for tensors which a copy of their values alone does not keep."""


class Column(NamedTuple):
    """The values of one key."""

    samples: Sequence[int]
    """Index of the dict that has each value, ascending."""
    values: Sequence[Any]


def columns(records: Sequence[Mapping[Any, Any]]) -> dict[Any, Column]:
    """The columns of dicts, by key, in the order in which the dicts have their keys."""
    names = tuple(records[0]) if records else ()
    if all(tuple(record) == names for record in records):
        samples = range(len(records))
        values = zip(*[record.values() for record in records], strict=True)
        return {name: Column(samples, column) for name, column in zip(names, values, strict=True)}
    found: dict[Any, tuple[list[int], list[Any]]] = {}
    for sample, record in enumerate(records):
        for name, value in record.items():
            of_name = found.get(name)
            if of_name is None:
                of_name = found[name] = [], []
            of_name[0].append(sample)
            of_name[1].append(value)
    return {name: Column(*column) for name, column in found.items()}


def are_tensors(values: Sequence[Any]) -> bool:
    """Whether all values are tensors."""
    return all(issubclass(kind, Tensor) for kind in set(map(type, values)))


def are_plain(values: Sequence[Any]) -> bool:
    """Whether all values are tensors, and none is of a subclass."""
    return set(map(type, values)) <= _PLAIN


def shapes(tensors: Sequence[Tensor]) -> list[torch.Size]:
    """Shape of each tensor."""
    with plainly():
        return list(map(_shape, tensors))


def shape_behind_first(known: Sequence[torch.Size]) -> torch.Size | None:
    """The shape without its first axis, if all shapes have one and are equal behind it; else ``None``."""
    axes = set(map(len, known))
    if len(axes) != 1 or 0 in axes:
        return None
    if any(len({shape[axis] for shape in known}) > 1 for axis in range(1, axes.pop())):
        return None
    return known[0][1:]


def dtypes(tensors: Sequence[Tensor]) -> set[torch.dtype]:
    """The types of all tensors."""
    with plainly():
        return set(map(_dtype, tensors))


def devices(tensors: Sequence[Tensor]) -> set[torch.device]:
    """The devices of all tensors."""
    with plainly():
        return set(map(_device, tensors))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors, one behind the other along the first axis, as a plain tensor."""
    with plainly():
        return torch.cat(tuple(tensors))


def split(values: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    """Splits of ``values`` with the given numbers of rows. They share its memory, but without gradients no version counter."""
    if values.requires_grad:
        return values.split_with_sizes(counts)
    with torch.no_grad():  # in two thirds of the time
        return torch.unsafe_split_with_sizes(values, counts)


class TensorColumn:
    """Tensors of one key, with facts about all of them, each found once."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    @cached_property
    def shapes(self) -> list[torch.Size]:
        """Shape of each tensor."""
        return shapes(self.tensors)

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        """The types of all tensors."""
        return dtypes(self.tensors)

    @cached_property
    def devices(self) -> set[torch.device]:
        """The devices of all tensors."""
        return devices(self.tensors)

    @cached_property
    def entry(self) -> torch.Size | None:
        """The shape without its first axis, if all shapes have one and are equal behind it; else ``None``."""
        return shape_behind_first(self.shapes)

    @cached_property
    def joined(self) -> Tensor:
        """The tensors, one behind the other along the first axis, as a plain tensor."""
        return joined(self.tensors)


def lying_together(tensors: Sequence[Tensor]) -> Tensor | None:
    """A view of the tensors' memory as ``joined`` has it, if they lie there one behind the other; else ``None``.

    Args:
        tensors: Of one type and device, and equal in shape but for the first axis, which all have.
    """
    with plainly():
        if not all(map(Tensor.is_contiguous, tensors)):
            return None
        filled = [tensor for tensor in tensors if tensor.numel()]
        if not filled:
            return None
        first = filled[0]
        at = start = first.data_ptr()
        for tensor in filled:
            if tensor.data_ptr() != at:
                return None
            at += tensor.nbytes
        # Memory of another storage may happen to begin where this one's ends.
        storage = first.untyped_storage()
        if at > storage.data_ptr() + storage.nbytes():
            return None
        row = math.prod(first.shape[1:])
        rows = (at - start) // (row * first.itemsize)
        return first.as_strided((rows, *first.shape[1:]), (row, *first.stride()[1:]))


_PLAIN = {Tensor}

FEWEST_PACKED = 8
"""Fewest tensors of a list of dicts that are packed. A batch may be a list of a few dicts, each of a part of the batch."""

MOST_PACKED_BYTES = 32 * 1024
"""Most bytes of a tensor that is packed with others, masks aside. Packed ones are not aligned, which slows reading."""

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor | None]
"""Memory for a contiguous tensor of this shape and dtype, or ``None`` for memory of torch's."""


class _PackedColumn(NamedTuple):
    """A column whose tensors are joined in one tensor."""

    name: Any
    samples: Sequence[int]
    lengths: list[int]
    """Rows of each tensor; where tensors differ in shape behind the first axis, elements."""
    shapes: list[torch.Size] | None
    """Shape of each tensor, where tensors differ so."""
    kind: type[Tensor]
    attributes: list[dict[str, Any]] | None
    """Attributes of each tensor of a type of torchvision's, such as its format."""

    def tensors(self, flat: Tensor) -> Sequence[Tensor]:
        """The tensors. They share the memory of ``flat``, and nothing else, as ``split`` has it."""
        parts = split(flat, self.lengths)
        if self.shapes is not None:
            parts = [part.view(shape).data for part, shape in zip(parts, self.shapes, strict=True)]
        if self.kind is Tensor:
            return parts
        dressed = [part.as_subclass(self.kind) for part in parts]
        for part, known in zip(dressed, self.attributes or (), strict=False):
            vars(part).update(known)
        return dressed


class TargetsLayout:
    """Form of packed target dicts, on the host.

    Args:
        kind: Type of the container of the dicts.
        records: The dicts. ``None`` stands for each value that is elsewhere.
        packed: The columns of the packed tensors.
        others: (index of the dict, key) of each other value that a loader has to see.
    """

    __slots__ = ("kind", "others", "packed", "records")

    def __init__(
        self,
        kind: type[Any],
        records: list[dict[Any, Any]],
        packed: list[_PackedColumn],
        others: list[tuple[int, Any]],
    ) -> None:
        self.kind, self.records, self.packed, self.others = kind, records, packed, others


@dataclass(frozen=True, eq=False, repr=False)
class PackedTargets:
    """A list of dicts of tensors on its way from a worker to the device: the tensors of each key in one.

    To a loader it is a record of a few tensors that move, and one leaf that stays on the host. Stages and users never see it.
    """

    flat: tuple[Tensor, ...]
    """All tensors of each packed column."""
    others: tuple[Any, ...]
    """Values that are not packed, apart from numbers and text."""
    layout: TargetsLayout

    @property
    def types(self) -> set[type]:
        """The types of the tensors in the dicts."""
        return {column.kind for column in self.layout.packed}

    def unpacked(self) -> Any:
        """The dicts, new ones, with tensors that share the packed ones' memory.

        Cost:
            Half a microsecond of host time for a tensor, two for one of torchvision's types. No launch.
        """
        records = [record.copy() for record in self.layout.records]
        for column, flat in zip(self.layout.packed, self.flat, strict=True):
            name = column.name
            for sample, tensor in zip(column.samples, column.tensors(flat), strict=True):
                records[sample][name] = tensor
        for (sample, name), value in zip(self.layout.others, self.others, strict=True):
            records[sample][name] = value
        return records if self.layout.kind is list else self.layout.kind(records)


class _Plan:
    """The columns of a list of dicts that can be packed. A leaf of the batch, in the place of the list."""

    def __init__(self, dicts: Sequence[dict[Any, Any]], *, masks: bool) -> None:
        self._kind = type(dicts)
        self._records = [record.copy() for record in dicts]
        self._columns: list[tuple[_PackedColumn, Sequence[Tensor]]] = []
        self._positions: list[tuple[int, Any]] = []
        self.others: list[Any] = []
        """Values that are neither packed nor numbers or text."""
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
        """The identities of the tensors, save empty ones, which a dataset may share among samples."""
        with plainly():
            return [id(tensor) for _, values in self._columns for tensor in values if Tensor.numel(tensor)]

    def packed(self, allocate: Allocate) -> PackedTargets:
        """The tensors in memory from ``allocate``."""
        flat = tuple(_flat(column, values, allocate) for column, values in self._columns)
        layout = TargetsLayout(self._kind, self._records, [column for column, _ in self._columns], self._positions)
        return PackedTargets(flat, tuple(self.others), layout)


def pack_targets(batch: Batch, allocate: Allocate, *, masks: bool = True) -> Batch:
    """A batch with ``PackedTargets`` for each list or tuple of dicts with tensors.

    Args:
        batch: On the host.
        allocate: Gives the memory that tensors are copied to.
        masks: Whether masks of any size are packed, too.

    Returns:
        The batch. The same object if nothing is packed, or a tensor stands in two places of it, where it has to stay one.

    Cost:
        On the host, one copy of the tensors and 3 µs for each dict.
    """
    plans: list[_Plan] = []

    def planned(value: Any) -> Any:
        plan = _Plan(value, masks=masks) if _are_dicts(value) else None
        if plan is None or len(plan) < FEWEST_PACKED:
            return value
        plans.append(plan)
        return plan

    try:
        made = batches.map_members(planned, lambda value: _are_dicts(value) or batches.moves_itself(value), batch)
    except ArgumentTypeError:  # a container that cannot be rebuilt
        return batch
    if not plans:
        return batch
    ids = [each for plan in plans for each in plan.ids()]
    known = set(ids)
    rest = [batches.leaves(made), *(batches.leaves(plan.others) for plan in plans)]
    if len(known) < len(ids) or any(id(leaf) in known for leaves in rest for leaf in leaves):
        return batch
    return batches.map_leaves(lambda leaf: leaf.packed(allocate) if type(leaf) is _Plan else leaf, made)


def unpack_targets(batch: Batch) -> Batch:
    """A batch with the dicts themselves in the place of each ``PackedTargets``."""
    return batches.map_members(PackedTargets.unpacked, lambda value: type(value) is PackedTargets, batch)


def are_packable(values: Sequence[Any], *, any_size: bool) -> bool:
    """Whether all values are tensors of one type and dtype that can lie in one: dense ones on the host.

    Args:
        values: Of a column.
        any_size: Whether they may be larger than ``MOST_PACKED_BYTES`` each.
    """
    kinds = set(map(type, values))
    if len(kinds) > 1 or not issubclass(kind := kinds.pop(), Tensor):
        return False
    if kind is not Tensor and kind.__module__ not in _REBUILT:
        return False
    with plainly():
        return (
            len(dtypes(values)) == 1
            and devices(values) == {_HOST}
            and set(map(_layout, values)) == {torch.strided}
            and not any(any(map(is_so, values)) for is_so in _EXCEPTIONS)
            and all(map(Tensor.is_contiguous, values))
            and (any_size or max(map(_nbytes, values)) <= MOST_PACKED_BYTES)
        )


def _packed_column(name: Any, samples: Sequence[int], tensors: Sequence[Tensor]) -> _PackedColumn:
    known = shapes(tensors)
    kind = type(tensors[0])
    attributes = None if kind is Tensor else [vars(tensor) for tensor in tensors]
    if shape_behind_first(known) is not None:
        return _PackedColumn(name, samples, [shape[0] for shape in known], None, kind, attributes)
    return _PackedColumn(name, samples, [shape.numel() for shape in known], known, kind, attributes)


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
_REBUILT = frozenset({f"torchvision.tv_tensors.{name}" for name in ("_bounding_boxes", "_mask", "_keypoints", "_image")})
