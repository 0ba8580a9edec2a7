"""The tensors of many dicts, a column for each key: facts about a whole column by one call, and a column as one tensor.

A call of Python per tensor takes a microsecond and more, and a batch has hundreds of tensors.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

plainly = torch._C.DisableTorchFunctionSubclass
"""A block in which functions take tensors of torchvision's types as plain ones, and return plain ones."""

_shape: Any = vars(torch._C.TensorBase)["shape"].__get__
_dtype: Any = vars(torch._C.TensorBase)["dtype"].__get__
_device: Any = vars(torch._C.TensorBase)["device"].__get__


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
    """Splits of ``values`` with the given numbers of rows. They share its memory, but no version counter."""
    # Unsafe only with gradients, which there are none of here; takes a third less of the host's time.
    return torch.unsafe_split_with_sizes(values, counts)


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
