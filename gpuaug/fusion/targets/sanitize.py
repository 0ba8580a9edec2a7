"""Removal of boxes that are not valid: the only operation on detection targets that waits for the device."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.columns import (
    Column,
    TensorColumn,
    are_plain,
    are_tensors,
    columns,
    lying_together,
    plainly,
    split,
)
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, shown
from gpuaug.core.packed_targets import PackedColumn, PackedTargets, PendingRows
from gpuaug.core.torchvision_types import type_name, type_name_of
from gpuaug.fusion.ops.base import Array
from gpuaug.fusion.targets.masks import like, to_device

PER_BOX = frozenset(
    {
        *("boxes", "bbox", "valid", "labels", "class_labels", "classes", "names", "masks", "keypoints", "segmentation"),
        *("area", "areas", "iscrowd", "is_crowd", "scores", "weights", "visibility", "difficult", "truncated", "occluded"),
        *("id", "ids", "category_id", "category_ids", "annotation_id", "annotation_ids", "track_id", "track_ids"),
    }
)
"""Keys that hold one entry per box. Lengths are ambiguous: ``size`` (height, width) has as many entries as two boxes."""

MOST_JOINED = 256
"""Largest number of values per box for which the tensors of all images are concatenated, and indexed in one launch."""


def sanitize(targets: Any, *, per_box: Collection[str] | None = None) -> list[Any]:
    """Remove the boxes that are not valid, and their labels, masks, keypoints, areas and names.

    ``gpuaug.fuse`` marks boxes outside the image in ``valid``, and removes none, because only the device knows their number.
    ``sanitize`` removes the entries of these boxes from the tensors, arrays, lists and tuples under the keys ``per_box``, and
    from torchvision's boxes and keypoints under any key. All other values are kept, as are keys whose value has another length
    in any of the dicts, and dicts without boxes, which some datasets have for images without annotations.

    Args:
        targets: List of one dict per image with ``valid``, (n,), or one dict of padded tensors with ``valid``, (B, N).
        per_box: Keys that hold one entry per box, besides ``valid``. Default: common names, such as ``boxes``, ``labels``,
            ``class_labels``, ``masks``, ``keypoints``, ``area``, ``iscrowd``, ``scores``, ``names``, ``track_ids``; the
            documentation of detection lists them all.

    Returns:
        List of one dict per image, of the type of the input dicts. Of a padded dict, tensors, lists and tuples of length B are
        split by image; all other values are shared by the dicts.

    Raises:
        ArgumentTypeError: If ``targets`` is neither a list of dicts nor a dict.
        ArgumentError: If ``valid`` is missing, or is not one bool per box; if ``per_box`` is not passed and a key without a
            common name appears to hold one entry per box.

    Cost:
        One synchronization per batch, with everything that is queued on the current stream. In a stage of a loader,
        ``TransformStage(sanitize, on=…)``, the host waits only for the stages of the batch, as it is handed over. A few
        launches per key; one per tensor of masks, unless the masks of the batch are contiguous in memory, as the masks that
        ``fuse`` returns are.

    Examples:
        >>> boxes, labels = torch.tensor([[0.0, 0.0, 4.0, 4.0], [9.0, 9.0, 9.0, 9.0]]), torch.tensor([7, 8])
        >>> kept = sanitize([{"boxes": boxes, "labels": labels, "valid": torch.tensor([True, False])}])
        >>> kept[0]["labels"]
        tensor([7])
    """
    names = PER_BOX if per_box is None else per_box
    if not isinstance(names, list | tuple | set | frozenset) or not all(isinstance(key, str) for key in names):
        raise ArgumentTypeError(f"per_box must be a list of keys, got {shown(per_box)}. List all: ['boxes', 'labels'].")
    keys = {"valid", *names}  # with valid, so that it has as many entries as the boxes
    if isinstance(targets, PackedTargets):
        packed = _sanitize_packed(targets, keys, check=per_box is None)
        if packed is not None:
            return packed  # type: ignore[return-value]  # for a stage, which alone passes PackedTargets
        targets = targets.unpacked()
    if isinstance(targets, Mapping):
        return _sanitize_padded(targets, keys)
    if isinstance(targets, str | Tensor) or not isinstance(targets, Sequence):
        raise ArgumentTypeError(
            f"targets must be a list of dicts or one dict of padded tensors, got {type(targets).__name__}. "
            "Pass what fuse has returned for them."
        )
    checked: Sequence[int] = range(len(targets))
    records: Sequence[Any] = targets
    if not all(type(record) is dict and "valid" in record for record in targets):
        any_valid = any(isinstance(record, Mapping) and "valid" in record for record in targets)
        checked = [sample for sample in checked if not (any_valid and _has_no_boxes(targets[sample]))]
        records = [targets[sample] for sample in checked]
        for sample, record in zip(checked, records, strict=True):
            _check_has_valid(record, f" of sample {sample}")
    of_keys = columns(records)
    tensors = _tensor_columns(of_keys)
    kept = _Kept(_checked_valid(of_keys, tensors, checked))
    fitting = _fitting(of_keys, tensors, kept.counts)
    unlisted = {name for name in fitting.keys() - keys if not all(map(_is_typed, of_keys[name].values))}
    for name in unlisted if per_box is None else ():
        _check_whole(name, fitting[name])
    # For a dict: a copy, which is changed. For another mapping: only the changes.
    changes: list[dict[Any, Any]] = [record.copy() if type(record) is dict else {} for record in targets]
    sanitized = {name: of_keys[name] for name in fitting if name not in unlisted}
    _take([changes[sample] for sample in checked], sanitized, tensors, kept)
    return [
        change if type(record) is dict else batches.replace(record, change)
        for record, change in zip(targets, changes, strict=True)
    ]


def _tensor_columns(of_keys: Mapping[Any, Column]) -> dict[Any, TensorColumn]:
    """Return the columns whose values are all tensors, by key."""
    return {name: TensorColumn(values) for name, (_, values) in of_keys.items() if are_tensors(values)}


def _fitting(of_keys: Mapping[Any, Column], tensors: Mapping[Any, TensorColumn], counts: Sequence[int]) -> dict[Any, set[int]]:
    """Return the keys whose values have one entry per box in all records, with their numbers of entries."""
    fitting: dict[Any, set[int]] = {}
    for name, (samples, values) in of_keys.items():
        of_values = counts if len(samples) == len(counts) else [counts[sample] for sample in samples]
        if name in tensors:
            if [shape[0] if shape else -1 for shape in tensors[name].shapes] == of_values:
                fitting[name] = set(of_values)
            continue
        lengths = [
            (-1 if batches.is_namedtuple(value) else _length(value), count)
            for value, count in zip(values, of_values, strict=True)
            if isinstance(value, _SEQUENCES)
        ]
        if lengths and all(length == count for length, count in lengths):
            fitting[name] = {count for _, count in lengths}
    return fitting


def _is_typed(value: Any) -> bool:
    """Return whether the type of a value implies one entry per box. A ``Mask`` may also be a map of the whole image."""
    name = type_name(value)
    return name == "BoundingBoxes" or (name == "KeyPoints" and value.ndim > 2)


def _check_whole(name: str, counts: set[int]) -> None:
    """Raise an error for a key that is not listed, but has as many entries as boxes in images that differ in number of boxes.

    Raises:
        ArgumentError: If ``counts``, the numbers of entries, has several elements.
    """
    if len(counts) > 1:
        raise ArgumentError(
            f"per_box must say whether {name!r} holds one entry per box, got nothing, and entries for "
            f"{' and '.join(map(str, sorted(counts)))} boxes. Pass the keys that do, such as per_box=('boxes', 'labels', "
            f"'masks', {name!r})."
        )


def _sanitize_padded(targets: Mapping[str, Any], per_box: set[str]) -> list[Any]:
    _check_has_valid(targets, "")
    valid = targets["valid"]
    _check_flags(valid, 2, "")
    batch = len(valid)
    padded = {
        name for name, value in targets.items() if isinstance(value, Tensor) and tuple(value.shape[:2]) == tuple(valid.shape)
    }
    keys = padded & per_box
    records = [
        {
            name: like(value[sample], value) if isinstance(value, Tensor) else value[sample]
            for name, value in targets.items()
            if isinstance(value, Tensor | list | tuple)
            and (not isinstance(value, Tensor) or value.ndim)
            and len(value) == batch
        }
        for sample in range(batch)
    ]
    of_keys = {name: column for name, column in columns(records).items() if name in keys}
    _take(records, of_keys, _tensor_columns(of_keys), _Kept(TensorColumn(valid.unbind())))
    return [batches.replace(targets, record) for record in records]


vars(sanitize).update(takes_packed=True, draws_by_itself=True)  # for TransformStage: the function draws no random numbers


def _sanitize_packed(targets: PackedTargets, keys: set[str], *, check: bool) -> PackedTargets | None:
    """Remove the rows of packed target dicts, without waiting for the device.

    Args:
        targets: Target dicts of a stage.
        keys: Keys that hold one entry per box.
        check: Whether to raise an error for an unknown key that appears to hold one entry per box.

    Returns:
        The packed targets, whose rows are pending; ``None`` if the host has to know the number of rows, or an error has to be
        raised.
    """
    valid = targets.column("valid")
    if valid is None or valid.dtypes != {torch.bool} or valid.entry:
        return None
    samples = list(valid.packed.samples)
    lengths = valid.packed.lengths
    without = set(range(len(targets.layout.records))) - set(samples)
    if any(not _has_no_boxes(targets.layout.records[sample]) for sample in without):
        return None
    counts = dict(zip(samples, lengths, strict=True))
    others = zip(targets.layout.others, targets.others, strict=True)
    if any(isinstance(value, _SEQUENCES) and _length(value) == counts.get(sample) for (sample, _), value in others):
        return None
    rows: dict[Any, tuple[PackedColumn, Tensor]] = {}
    for column, flat in zip(targets.layout.packed, targets.flat, strict=True):
        if column.shapes is not None or column.lengths != lengths or list(column.samples) != samples:
            of_tensors = column.lengths if column.shapes is None else [shape[0] if shape else -1 for shape in column.shapes]
            if all(counts.get(sample, length) == length for sample, length in zip(column.samples, of_tensors, strict=True)):
                return None
            continue
        kind = type_name_of(column.tensor_type)
        if column.name in keys or kind == "BoundingBoxes" or (kind == "KeyPoints" and flat.ndim > 2):
            rows[column.name] = column, flat
        elif check:
            _check_whole(column.name, set(lengths))
    flags = valid.joined
    index = torch.nonzero_static(flags, size=len(flags)).view(-1).clamp_(min=0)  # -1 behind the rows that are kept
    taken = {name: (column, flat.index_select(0, index)) for name, (column, flat) in rows.items()}
    kept = torch.empty(flags.shape, dtype=torch.bool, device="cpu", pin_memory=flags.is_cuda)
    kept.copy_(flags, non_blocking=True)
    return targets.with_columns(taken, PendingRows(frozenset(taken), kept))


_SEQUENCES = (Tensor, np.ndarray, list, tuple)
"""Types that may hold one entry per box."""


def _length(value: Any) -> int:
    """Number of entries; -1 for a scalar."""
    if isinstance(value, Tensor):  # len() of a tensor takes five times as long
        return value.shape[0] if value.ndim else -1
    return len(value) if getattr(value, "ndim", 1) else -1


def _has_no_boxes(record: Any) -> bool:
    return isinstance(record, Mapping) and not ("valid" in record or "boxes" in record or "bbox" in record)


class _Kept:
    """Indices of the valid boxes of each record.

    Args:
        valid: (n,) mask of the boxes of each record.

    Cost:
        One synchronization for all masks, instead of one ``nonzero()`` per mask.
    """

    def __init__(self, valid: TensorColumn) -> None:
        self._valid = valid
        self.counts = [shape[0] for shape in valid.shapes]
        """Number of boxes per record."""
        self._starts = np.cumsum([0, *self.counts])
        self._whole: Array = np.flatnonzero(valid.joined.cpu().numpy()) if valid.tensors else np.empty(0, np.int64)
        self._bounds = np.searchsorted(self._whole, self._starts)
        self._sent: dict[Any, tuple[Tensor, list[int]]] = {}

    def of(self, record: int) -> Array:
        """Return the indices of the valid boxes of one record, on the host."""
        start, end = self._bounds[record : record + 2]
        indices: Array = self._whole[start:end] - self._starts[record]
        return indices

    def of_joined(self, records: Sequence[int], device: torch.device) -> tuple[Tensor, list[int]]:
        """Return device indices into the concatenated values of some records, and the number of indices per record."""
        key = (tuple(records), device)
        if key not in self._sent:
            counts = np.diff(self._bounds)[list(records)].tolist()
            self._sent[key] = self._indices(records, device), counts
        return self._sent[key]

    def _indices(self, records: Sequence[int], device: torch.device) -> Tensor:
        if len(records) == len(self.counts) and self._valid.joined.device == device:
            # Computing the indices again on the device is faster than copying them from the host.
            return torch.nonzero_static(self._valid.joined, size=len(self._whole)).view(-1)
        starts = np.cumsum([0, *(self.counts[record] for record in records[:-1])])
        indices = [self.of(record) + start for record, start in zip(records, starts, strict=True)]
        return to_device([np.concatenate(indices)], device)[0]


def _take(
    records: Sequence[dict[Any, Any]],
    of_keys: Mapping[Any, Column],
    tensors: Mapping[Any, TensorColumn],
    kept: _Kept,
) -> None:
    """Store the valid entries of all columns in ``records``."""
    for name, (samples, values) in of_keys.items():
        column = tensors.get(name)
        for group, whole in _alike(samples, values, column):
            parts = _taken(group, whole, kept)
            if not are_plain(group.values):
                parts = [like(part, value) for part, value in zip(parts, group.values, strict=True)]
            for sample, part in zip(group.samples, parts, strict=True):
                records[sample][name] = part
        if column is not None:
            continue
        for sample, value in zip(samples, values, strict=True):
            if isinstance(value, np.ndarray):
                records[sample][name] = value[kept.of(sample)]
            elif isinstance(value, list | tuple):
                records[sample][name] = type(value)(value[at] for at in kept.of(sample))


def _alike(samples: Sequence[int], values: Sequence[Any], column: TensorColumn | None) -> Iterable[tuple[Column, TensorColumn]]:
    """Group the tensors of a column by dtype, device and shape of an entry. ``column``: ``None`` unless all are tensors."""
    if column is not None and column.entry is not None and len(column.dtypes) == len(column.devices) == 1:
        return [(Column(samples, values), column)]
    groups: dict[Any, tuple[list[int], list[Tensor]]] = {}
    for sample, value in zip(samples, values, strict=True):
        if isinstance(value, Tensor):
            group = groups.setdefault((value.dtype, value.device, value.shape[1:]), ([], []))
            group[0].append(sample)
            group[1].append(value)
    return [(Column(*group), TensorColumn(group[1])) for group in groups.values()]


def _taken(group: Column, tensors: TensorColumn, kept: _Kept) -> Sequence[Tensor]:
    """Return the valid entries of each tensor of a group, in one launch if the tensors can be concatenated."""
    samples, values = group
    device = values[0].device
    whole = None
    if len(values) > 1:
        is_small = values[0].shape[1:].numel() <= MOST_JOINED
        whole = tensors.joined if is_small else lying_together(values)
    if whole is not None:
        index, counts = kept.of_joined(samples, device)
        return split(whole.index_select(0, index), counts)
    indices = to_device([kept.of(sample) for sample in samples], device)
    with plainly():
        return [value.index_select(0, index) for value, index in zip(values, indices, strict=True)]


def _check_has_valid(record: Any, whose: str) -> None:
    if not isinstance(record, Mapping):
        raise ArgumentTypeError(
            f"targets{whose} must be a dict, got {type(record).__name__}. Pass what fuse has returned for them."
        )
    if "valid" not in record:
        raise ArgumentError(
            f"targets{whose} must say in 'valid' which boxes to keep, got {', '.join(map(str, record)) or 'nothing'}. "
            "Take them through gpuaug.fuse first, with the data key 'targets'; or, padded, with 'valid' beside the boxes."
        )


def _checked_valid(of_keys: Mapping[Any, Column], tensors: Mapping[Any, TensorColumn], checked: Sequence[int]) -> TensorColumn:
    """Check ``valid`` of all records, each of which has the key, and return its column."""
    column = tensors.get("valid")
    if column is None or column.dtypes != {torch.bool} or set(map(len, column.shapes)) != {1}:
        for sample, value in zip(checked, of_keys["valid"].values if checked else (), strict=True):
            _check_flags(value, 1, f" of sample {sample}")
    return TensorColumn(()) if column is None else column


def _check_flags(valid: Any, axes: int, whose: str) -> None:
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool or valid.ndim != axes:
        got = f"{valid.dtype} {tuple(valid.shape)}" if isinstance(valid, Tensor) else type(valid).__name__
        raise ArgumentError(
            f"valid{whose} must be torch.bool {'(n,)' if axes == 1 else '(B, N)'}, got {got}. Pass it as fuse has returned it."
        )
