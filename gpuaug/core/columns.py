"""Columns of a list of dicts. A *column* is the values of one key, such as the boxes of all images of a batch.

The functions process a whole column per call, because a batch has hundreds of tensors and a Python call per tensor takes 1 µs
or more.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

as_plain_tensors = torch._C.DisableTorchFunctionSubclass
"""Context manager in which functions treat tensors of subclasses, such as torchvision's, as plain tensors."""

# Attribute getters of the base class, which are faster than the getters of torchvision's subclasses.
_descriptors: Any = vars(Tensor.__base__)
_shape = _descriptors["shape"].__get__
_dtype = _descriptors["dtype"].__get__
_device = _descriptors["device"].__get__
_layout = _descriptors["layout"].__get__
_nbytes = _descriptors["nbytes"].__get__
_LOSSY_COPY_PREDICATES = (
    _descriptors["requires_grad"].__get__,
    _descriptors["is_nested"].__get__,
    _descriptors["is_quantized"].__get__,
    Tensor.is_neg,
    Tensor.is_conj,
)
"""Predicates of a tensor. If one is true, a copy of the values alone would lose information."""


class Column(NamedTuple):
    """Values of one key in a list of dicts."""

    samples: Sequence[int]
    """For each value, the index of its dict, ascending."""
    values: Sequence[Any]


def columns(records: Sequence[Mapping[Any, Any]]) -> dict[Any, Column]:
    """Return key → column. Keys are in the order of their first occurrence."""
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
    """Return whether all values are tensors."""
    return all(issubclass(cls, Tensor) for cls in set(map(type, values)))


def are_plain(values: Sequence[Any]) -> bool:
    """Return whether the class of all values is ``torch.Tensor``, not a subclass."""
    return set(map(type, values)) <= _PLAIN


def shapes(tensors: Sequence[Tensor]) -> list[torch.Size]:
    """Return the shape of each tensor."""
    with as_plain_tensors():
        return list(map(_shape, tensors))


def common_row_shape(shapes: Sequence[torch.Size]) -> torch.Size | None:
    """Return ``shape[1:]`` if it is the same for all shapes. Return ``None`` if it differs, or a tensor has no axes."""
    axes = set(map(len, shapes))
    if len(axes) != 1 or 0 in axes:
        return None
    if any(len({shape[axis] for shape in shapes}) > 1 for axis in range(1, axes.pop())):
        return None
    return shapes[0][1:]


def are_dense(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Return whether all tensors are contiguous, on ``device``, of one dtype, and fully described by their values."""
    with as_plain_tensors():
        return (
            len(set(map(_dtype, tensors))) == 1
            and set(map(_device, tensors)) == {device}
            and set(map(_layout, tensors)) == {torch.strided}
            and not any(any(map(loses_information, tensors)) for loses_information in _LOSSY_COPY_PREDICATES)
            and all(map(Tensor.is_contiguous, tensors))
        )


def largest_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the size in bytes of the largest tensor."""
    with as_plain_tensors():
        largest: int = max(map(_nbytes, tensors))
    return largest


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the concatenation of the tensors along the first axis, as a plain tensor."""
    with as_plain_tensors():
        return torch.cat(tuple(tensors))


def split(values: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    """Split ``values`` into tensors of ``counts`` rows, which share the memory of ``values``.

    If ``values`` requires no gradient, each tensor has a separate version counter.
    """
    if values.requires_grad:
        return values.split_with_sizes(counts)
    with torch.no_grad():  # a third faster than with gradients enabled
        return torch.unsafe_split_with_sizes(values, counts)


class TensorColumn:
    """Column whose values are all tensors, with cached properties of the whole column.

    A subclass may set the properties without having the tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors."""
        return self._tensors

    @cached_property
    def types(self) -> set[type]:
        """Set of the classes of the tensors."""
        return set(map(type, self.tensors))

    @cached_property
    def attributes(self) -> list[dict[str, Any]]:
        """Attributes of each tensor, such as the format of torchvision's boxes.

        A subclass may set a list of one dict, if the attributes of all tensors are equal.
        """
        return list(map(vars, self.tensors))

    @cached_property
    def shapes(self) -> list[torch.Size]:
        """Shape of each tensor."""
        return shapes(self.tensors)

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        """Set of the tensors' dtypes."""
        with as_plain_tensors():
            return set(map(_dtype, self.tensors))

    @cached_property
    def devices(self) -> set[torch.device]:
        """Set of the tensors' devices."""
        with as_plain_tensors():
            return set(map(_device, self.tensors))

    @cached_property
    def entry(self) -> torch.Size | None:
        """Shape of one row: ``shape[1:]`` if it is the same for all tensors; else ``None``."""
        return common_row_shape(self.shapes)

    @cached_property
    def joined(self) -> Tensor:
        """Concatenation of the tensors along the first axis, as a plain tensor."""
        return joined(self.tensors)


def adjacent_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return ``joined(tensors)`` as a view of their memory, if they are adjacent in memory and in order; else ``None``.

    Args:
        tensors: Tensors of one dtype and device, whose shapes may differ in the first axis.
    """
    with as_plain_tensors():
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
"""Classes of plain tensors."""
