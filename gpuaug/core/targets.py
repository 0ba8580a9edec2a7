"""Targets: annotations that are transformed along with their images. Their kinds, and lists of target dicts by key.

A *target dict* holds the annotations of one image, such as ``{"boxes": …, "labels": …}``. A *column* is the values of one key
in a list of target dicts; its *samples* are the indices of the dicts that have the key. A *row* is one entry along the first
axis, such as a box. A column is *packed* if its tensors are concatenated along the first axis into one *flat* tensor.
Functions process whole columns, because a batch has hundreds of tensors, and a Python call per tensor takes 1 µs.

torchvision's tensor classes are recognized by the name of their module, because torchvision is not imported here.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.ragged import Leaf


@dataclass(frozen=True, eq=False)
class Kind:
    """Kind of targets, such as boxes: the names by which a pipeline recognizes them in target dicts and in other inputs.

    A *data key* is the name that says what an input of a pipeline holds, such as Kornia's ``bbox_xyxy`` for boxes (B, N, 4).
    """

    keys: dict[str, str]
    """Key in target dicts → data key for an input of the same format."""
    data_keys: dict[str, str]
    """Data key → layout of the numbers of a box or point (``BoxFormat.layout``); ``""`` for kinds without coordinates."""
    class_name: str = ""
    """Name of torchvision's tensor class for the kind; ``""`` if there is none."""

    @cached_property
    def name(self) -> str:
        """Usual key in target dicts, the first of ``keys``."""
        return next(iter(self.keys))


BOXES = Kind(
    {"boxes": "bbox_xyxy", "bbox": "bbox_xywh"},
    {"bbox": "vertices", "bbox_xyxy": "corners", "bbox_xywh": "sides"},
    "BoundingBoxes",
)
KEYPOINTS = Kind({"keypoints": "keypoints"}, {"keypoints": "points"}, "KeyPoints")
MASKS = Kind({"masks": "mask"}, {"mask": ""}, "Mask")
LABELS = Kind(dict.fromkeys(("labels", "class_labels", "classes", "category_id", "category_ids"), "class"), {"class": ""})
VALID = Kind({"valid": "valid"}, {"valid": ""})
"""Mask of the boxes that are inside the image and large enough, (n,) bool. Without the key ``valid``, all boxes are valid."""

MOVED = (BOXES, KEYPOINTS, MASKS)
"""Kinds with coordinates or pixels, which are transformed like the pixels of their image."""
TARGET_KEYS = {key: kind for kind in MOVED for key in kind.keys}
"""Key of target dicts → kind, for the keys under which tensors without a class of torchvision are transformed."""
TARGET_TYPES = {kind.class_name: kind for kind in MOVED}
"""Name of torchvision's tensor class → kind."""
DATA_KEYS = {key: kind for kind in (*MOVED, LABELS, VALID) for key in kind.data_keys}
"""Data key → kind, for inputs that hold the targets of all images."""

PER_BOX = frozenset(
    {
        *TARGET_KEYS,
        *(LABELS.keys | VALID.keys),
        *("names", "segmentation", "area", "areas", "iscrowd", "is_crowd", "scores"),
        *("weight", "weights", "visibility", "difficult"),
        *("truncated", "occluded", "id", "ids", "annotation_id", "annotation_ids", "track_id", "track_ids"),
    }
)
"""Keys of target dicts that hold one entry per box.

They are listed, because lengths are ambiguous: in an image with two boxes, ``size`` (height, width) has as many entries.
"""

HOLDS_NOTHING = frozenset({Tensor, int, float, bool, str, bytes, type(None)})
"""Types of values that neither are nor contain tensors of torchvision's classes."""


def type_name(value: Any) -> str:
    """Return the name of the torchvision tensor class of ``value``, such as ``"Mask"``; an empty string for other values."""
    cls: Any = type(value)
    return "" if cls is Tensor else type_name_of(cls)


@functools.cache
def type_name_of(cls: Any) -> str:
    """Return the name of the torchvision tensor class that ``cls`` is or extends; an empty string for other classes."""
    return next((base.__name__ for base in cls.__mro__ if base.__module__.startswith("torchvision.tv_tensors")), "")


def holds_targets(value: Any) -> bool:
    """Return whether ``value`` is or contains masks, boxes or keypoints of torchvision's tensor classes.

    Torchvision's transforms transform such values along with the images.
    """
    cls: Any = type(value)
    if cls in HOLDS_NOTHING:  # fast path: the function is called for every batch
        return False
    if cls in (dict, list, tuple):
        members = value.values() if cls is dict else value
        return any(type(member) not in HOLDS_NOTHING and holds_targets(member) for member in members)
    if isinstance(value, Tensor):
        return type_name(value) in TARGET_TYPES
    if cls is PackedTargets:
        types = {column.tensor_type for column in value.layout.packed}
        return any(type_name_of(cls) in TARGET_TYPES for cls in types) or holds_targets(value.others)
    names = batches.member_names(value) if batches.is_container(value) else ()
    return any(holds_targets(batches.member(value, name)) for name in names)


def with_class_of(result: Tensor, source: Tensor, **changes: Any) -> Tensor:
    """Return ``result`` as an instance of the class of ``source``, with the attributes of ``source``.

    ``changes``: name → new value of attributes. Names of attributes that ``source`` does not have are ignored.
    """
    if type(source) is Tensor:
        return result
    typed = result.as_subclass(type(source))
    attributes = vars(source)
    vars(typed).update(attributes, **{name: value for name, value in changes.items() if name in attributes})
    return typed


as_plain_tensors = torch._C.DisableTorchFunctionSubclass
"""Context manager in which functions treat tensors of subclasses, such as torchvision's, as plain tensors."""

# Attribute getters of the base class, which are faster than the getters of torchvision's subclasses.
_descriptors: Any = vars(Tensor.__base__)
_shape, _dtype, _device = (_descriptors[name].__get__ for name in ("shape", "dtype", "device"))


class PackedColumn(NamedTuple):
    """Description of a packed column without its data: how its flat tensor was concatenated from tensors."""

    name: Any
    """Key of the column in the dicts."""
    samples: Sequence[int]
    """Index of the dict of each tensor."""
    lengths: list[int]
    """Number of rows of each tensor; or, if ``shapes`` is not ``None``, number of elements of each tensor."""
    shapes: list[torch.Size] | None = None
    """Shape of each tensor if shapes differ in more than the first axis: then the flat tensor has one axis. Else ``None``."""
    tensor_type: type[Tensor] = Tensor
    """Class of the tensors. The flat tensor is a plain tensor, that is, a ``torch.Tensor``."""
    attributes: list[dict[str, Any]] = [{}]  # noqa: RUF012 - not modified
    """Attributes of each tensor, such as the format of torchvision's boxes; a list of one dict if all are equal."""

    def parts(self, flat: Tensor) -> Sequence[Tensor]:
        """Split the flat tensor of the column into plain tensors, which share its memory."""
        parts = split(flat, self.lengths)
        if self.shapes is None:
            return parts
        return [part.view(shape).data for part, shape in zip(parts, self.shapes, strict=True)]

    def tensors(self, flat: Tensor) -> Sequence[Tensor]:
        """Split the flat tensor into the tensors of the column, with their class and attributes. They share its memory."""
        parts = self.parts(flat)
        if self.tensor_type is Tensor:
            return parts
        typed_parts = [part.as_subclass(self.tensor_type) for part in parts]
        attributes_per_part = self.attributes * len(parts) if len(self.attributes) == 1 else self.attributes
        for part, attributes in zip(typed_parts, attributes_per_part, strict=True):
            vars(part).update(attributes)
        return typed_parts

    def plain(self) -> Self:
        """Return the description of the same column with plain tensors in place of torchvision's, without attributes."""
        return self._replace(tensor_type=Tensor, attributes=[{}]) if type_name_of(self.tensor_type) else self


class Column:
    """Values of one key in a list of dicts, with cached properties of all values.

    Args:
        samples: Index of the dict of each value, ascending. Dicts without the key are left out.
        values: The values. Unless all are tensors, only ``samples``, ``values``, ``name`` and ``types`` can be read.
        name: The key.
    """

    values: Sequence[Any]

    def __init__(self, samples: Sequence[int], values: Sequence[Any], name: Any = "") -> None:
        self.samples, self.values, self.name = samples, values, name
        self.storage = values  # tensors with the data of ``values``; in a ``FlatColumn`` only the flat tensor
        self.types = set(map(type, values))
        """Set of the classes of the values."""

    def join(self, device: torch.device | None = None) -> None:
        """Set ``joined``, and derive ``row_shape``, ``devices`` and ``lengths`` from it, which is faster than to read them.

        Call it if the tensors will be concatenated anyway. Nothing is done if they differ in dtype or in more than the first
        axis, or are not on ``device``. For 256 tensors, it takes 62 µs, and reading each 130 µs (one core, 2026-11-29).
        """
        if "joined" in vars(self) or not all(issubclass(cls, Tensor) for cls in self.types) or len(self.dtypes) != 1:
            return
        if device is not None and self.values[0].device != device:
            return
        with as_plain_tensors(), suppress(RuntimeError):
            joined = torch.cat(tuple(self.values))
            row_shape = joined.shape[1:]
            row_numel = row_shape.numel()
            sizes = list(map(Tensor.numel, self.values))
            # torch.cat checks row shapes, but accepts tensors (0,) beside any others: empty tensors are checked separately.
            empty = [value for value, size in zip(self.values, sizes, strict=True) if not size] if 0 in sizes else []
            if row_numel and joined.layout is torch.strided and all(_shape(value)[1:] == row_shape for value in empty):
                self.joined = joined
                self.row_shape = row_shape
                self.devices = {joined.device}
                self.lengths = [size // row_numel for size in sizes]

    def selected(self, positions: Sequence[int]) -> "Column":
        """Return the column of the values at the ascending ``positions`` in ``values``."""
        samples = [self.samples[position] for position in positions]
        return Column(samples, [self.values[position] for position in positions], self.name)

    @cached_property
    def attributes(self) -> list[dict[str, Any]]:
        """Attributes of each tensor, such as the format of torchvision's boxes."""
        return list(map(vars, self.values))

    @cached_property
    def shapes(self) -> list[torch.Size]:
        """Shape of each tensor."""
        with as_plain_tensors():
            return list(map(_shape, self.values))

    @cached_property
    def lengths(self) -> list[int]:
        """Number of entries of each tensor along the first axis; -1 for a tensor without axes."""
        return [shape[0] if shape else -1 for shape in self.shapes]

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        """Set of the tensors' dtypes."""
        with as_plain_tensors():
            return set(map(_dtype, self.storage))

    @cached_property
    def devices(self) -> set[torch.device]:
        """Set of the tensors' devices."""
        with as_plain_tensors():
            return set(map(_device, self.storage))

    def are_on(self, device: torch.device) -> bool:
        """Return whether all values are tensors on ``device``."""
        return all(issubclass(cls, Tensor) for cls in self.types) and self.devices <= {device}

    @cached_property
    def packed(self) -> PackedColumn:
        """Description of the column, as if it were packed. If tensors have several classes, with the class of the first."""
        cls = type(self.values[0])
        attributes = [{}] if cls is Tensor else self.attributes
        attributes = attributes[:1] if all(other == attributes[0] for other in attributes) else attributes
        if self.row_shape is not None:
            return PackedColumn(self.name, self.samples, self.lengths, None, cls, attributes)
        lengths = [shape.numel() for shape in self.shapes]
        return PackedColumn(self.name, self.samples, lengths, self.shapes, cls, attributes)

    @cached_property
    def joined(self) -> Tensor:
        """Concatenation of the tensors along the first axis, as a plain tensor."""
        with as_plain_tensors():
            return torch.cat(tuple(self.values))

    @cached_property
    def row_shape(self) -> torch.Size | None:
        """Shape of one row, ``shape[1:]``; ``None`` if it differs between the tensors, or a tensor has no axes."""
        shapes = self.shapes
        axes = set(map(len, shapes))
        if len(axes) != 1 or 0 in axes:
            return None
        if any(len({shape[axis] for shape in shapes}) > 1 for axis in range(1, axes.pop())):
            return None
        return shapes[0][1:]

    def rows(self) -> Tensor:
        """Return the tensors (…, K) as one plain tensor (n, K): the n boxes or points of all tensors, in one dtype."""
        if self.row_shape is not None and len(self.dtypes) == 1:
            return self.joined.flatten(0, -2)
        # Tensors of several dtypes are converted here: torch.cat would convert int64 beside float16 to float16, in which large
        # coordinates are rounded.
        promoted = torch.float64 if torch.float64 in self.dtypes else torch.float32
        dtype = promoted if len(self.dtypes) > 1 else None
        with as_plain_tensors():
            return torch.cat([value.to(dtype or value.dtype).flatten(0, -2) for value in self.values])

    @cached_property
    def elements(self) -> Tensor:
        """All elements of the tensors, in order, (n,), as a plain tensor."""
        if "joined" in vars(self) or self.row_shape is not None:
            return self.joined.flatten()
        with as_plain_tensors():
            return torch.cat([tensor.flatten() for tensor in self.values])


class FlatColumn(Column):
    """A packed column with its flat tensor, which is split into tensors only when a caller reads ``values``.

    Args:
        packed: Description of the column.
        flat: Flat tensor.
    """

    packed: PackedColumn

    def __init__(self, packed: PackedColumn, flat: Tensor) -> None:
        self.packed, self.joined, self.samples, self.name = packed, flat, packed.samples, packed.name
        self.storage = (flat,)
        self.types = {packed.tensor_type}
        self.row_shape = flat.shape[1:] if packed.shapes is None else None

    @cached_property
    def attributes(self) -> list[dict[str, Any]]:
        """Attributes of each tensor."""
        attributes = self.packed.attributes
        return attributes * len(self.packed.lengths) if len(attributes) == 1 else attributes

    @cached_property
    def lengths(self) -> list[int]:
        """Number of entries of each tensor along the first axis; -1 for a tensor without axes."""
        return self.packed.lengths if self.packed.shapes is None else super().lengths

    @cached_property
    def shapes(self) -> list[torch.Size]:
        """Shape of each tensor."""
        return self.packed.shapes or [torch.Size((length, *self.joined.shape[1:])) for length in self.packed.lengths]

    @cached_property
    def values(self) -> Sequence[Tensor]:  # type: ignore[override]
        """The tensors, which share the memory of ``joined``."""
        return self.packed.tensors(self.joined)


def indices_of(samples: Sequence[int]) -> NDArray[np.int64]:
    """Return ``Column.samples`` as an array. A range is converted twenty times faster than a list."""
    return np.arange(samples.start, samples.stop, samples.step) if isinstance(samples, range) else np.array(samples, np.int64)


def owners_of(samples: Sequence[int], counts: Sequence[int]) -> NDArray[np.int64]:
    """Return the sample of each row of a column, (n,). ``counts``: number of rows for each of ``samples``."""
    return np.repeat(indices_of(samples), counts)


def columns(records: Sequence[Mapping[Any, Any]], samples: Sequence[int] | None = None) -> dict[Any, Column]:
    """Return key → column for a list of dicts, ``records``. Keys are in the order of their first occurrence.

    ``samples``: index of each record, ascending, for ``Column.samples``. Default: its position in the list.
    """
    samples = range(len(records)) if samples is None else samples
    names = tuple(records[0]) if records else ()
    if all(tuple(record) == names for record in records):
        values = zip(*[record.values() for record in records], strict=True)
        return {name: Column(samples, column, name) for name, column in zip(names, values, strict=True)}
    result: dict[Any, tuple[list[int], list[Any]]] = {}
    for sample, record in zip(samples, records, strict=True):
        for name, value in record.items():
            samples_of_name, values_of_name = result.setdefault(name, ([], []))
            samples_of_name.append(sample)
            values_of_name.append(value)
    return {name: Column(*column, name) for name, column in result.items()}


def split(values: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    """Split ``values`` into tensors of ``counts`` rows, which share the memory of ``values``.

    If ``values`` requires no gradient, each tensor has a separate version counter.
    """
    return values.split_with_sizes(counts) if values.requires_grad else torch.unsafe_split_with_sizes(values, counts)


@dataclass(eq=False, repr=False, slots=True)
class TargetsLayout(Leaf):
    """Structure of packed target dicts, on the host.

    Args:
        container_type: Type of the sequence of the dicts, list or tuple.
        records: The dicts, with ``None`` in place of each value that is in ``PackedTargets.flat`` or ``PackedTargets.others``.
        packed: Packed columns, in the order of ``PackedTargets.flat``.
        groups: Number of dicts of each sample, if each sample has a list of dicts; ``None`` if each sample has one dict.
        keys: Keys of all dicts, in the order of their first occurrence. Default: read from ``records``.
    """

    container_type: type[Any]
    records: list[dict[Any, Any]]
    packed: list[PackedColumn]
    groups: list[int] | None = None
    keys: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        self.keys = self.keys or tuple(dict.fromkeys(chain.from_iterable(self.records)))


@dataclass(eq=False, repr=False, slots=True)
class PendingRows(Leaf):
    """Removal of rows, such as invalid boxes, that is queued on the device. The host does not know yet how many rows remain.

    Args:
        names: Keys of the columns from which rows are removed. The flat tensor of such a column has the remaining rows first,
            and undefined rows after them.
        lengths: Number of rows per dict that has these keys, before the removal. It is equal for all of these columns.
        keep_mask: (n,) bool on the host, true for each row that remains, in the order before the removal. The device may not
            have written the mask yet.
    """

    names: frozenset[Any]
    lengths: Sequence[int]
    keep_mask: Tensor

    def counts(self) -> list[int]:
        """Return the number of remaining rows per dict. Call after the device has written ``keep_mask``."""
        owners = owners_of(range(len(self.lengths)), self.lengths)
        counts: list[int] = np.bincount(owners[self.keep_mask.numpy()], minlength=len(self.lengths)).tolist()
        return counts


@dataclass(frozen=True, eq=False, repr=False)
class PackedTargets:
    """A list of target dicts, or of one list of target dicts per sample, packed: one tensor per key.

    The loader copies ``flat`` and ``others`` to the device; ``layout`` stays on the host. Fused stages read packed targets;
    other stages and the user get dicts.
    """

    flat: tuple[Tensor, ...]
    """Concatenation of the tensors of each packed column."""
    others: dict[Any, dict[int, Any]]
    """Key → index of the dict → value, for columns that are not packed. Numbers and strings are in ``layout.records``."""
    layout: TargetsLayout
    """Structure of the dicts."""
    pending: PendingRows | None = None
    """Pending removal of rows, which ``settled`` completes; ``None`` if no rows are pending."""

    def columns(self) -> dict[Any, FlatColumn]:
        """Return key → packed column."""
        return {column.name: FlatColumn(column, flat) for column, flat in zip(self.layout.packed, self.flat, strict=True)}

    def all_columns(self) -> dict[Any, Column]:
        """Return key → column, packed or not."""
        others = {name: Column([*values], [*values.values()], name) for name, values in self.others.items()}
        moved = {**self.columns(), **others}  # columns whose values are not in ``layout.records``
        # The function ``columns`` of this file finds the other columns.
        return moved if moved.keys() >= set(self.layout.keys) else {**columns(self.layout.records), **moved}

    def with_columns(self, columns: Iterable[FlatColumn], pending: PendingRows | None = None) -> "PackedTargets":
        """Return packed targets with packed columns replaced or added.

        Args:
            columns: New columns.
            pending: Pending removal of rows from the result; ``None`` if there is none.
        """
        layout = self.layout
        pairs = {packed.name: (packed, flat) for packed, flat in zip(layout.packed, self.flat, strict=True)}
        pairs |= {column.name: (column.packed, column.joined) for column in columns}
        packed = [packed for packed, _ in pairs.values()]
        new_layout = TargetsLayout(layout.container_type, layout.records, packed, layout.groups, layout.keys)
        return PackedTargets(tuple(flat for _, flat in pairs.values()), self.others, new_layout, pending)

    def settled(self) -> "PackedTargets":
        """Return packed targets with the pending removal completed. Call after the device has written ``pending.keep_mask``."""
        if self.pending is None:
            return self
        counts = self.pending.counts()
        total = sum(counts)
        old = [column for column in self.columns().values() if column.name in self.pending.names]
        return self.with_columns(FlatColumn(column.packed._replace(lengths=counts), column.joined[:total]) for column in old)

    def unpacked(self) -> Any:
        """Return new dicts whose tensors share the memory of the packed tensors. ``pending`` must be ``None``.

        Cost:
            Half a microsecond of host time per tensor, or two microseconds for torchvision's classes. No launch.
        """
        assert self.pending is None, "the number of rows is not known yet"
        records: list[Any] = [record.copy() for record in self.layout.records]
        for name, column in self.columns().items():
            for sample, tensor in zip(column.samples, column.values, strict=True):
                records[sample][name] = tensor
        for name, values in self.others.items():
            for sample, value in values.items():
                records[sample][name] = value
        if self.layout.groups is not None:
            rest = iter(records)
            records = [list(islice(rest, count)) for count in self.layout.groups]
        return records if self.layout.container_type is list else self.layout.container_type(records)
