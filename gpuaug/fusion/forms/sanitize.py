"""Removal of boxes that are not valid, and of their labels and masks.

A *target dict* holds the annotations of one image: ``{"boxes": …, "labels": …, "valid": …}``. A *column* is the values of all
dicts under one key. Target dicts are *packed* if each column is stored as one tensor. Removal is the only operation on target
dicts for which the host waits for the device, because only the device knows how many boxes are valid.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, shown
from gpuaug.core.targets import (
    BOXES,
    PER_BOX,
    VALID,
    Column,
    PackedColumn,
    PackedTargets,
    PendingRows,
    TensorColumn,
    columns,
    split,
    type_name,
    type_name_of,
    with_class_of,
)
from gpuaug.fusion.forms.record import to_device
from gpuaug.fusion.ops.base import Array
from gpuaug.fusion.ops.torchvision.per_box import label_key


def sanitize(targets: Any, *, per_box: Collection[str] | None = None) -> list[Any]:
    """Remove the boxes that are not valid, and their labels, masks, keypoints, areas and names.

    ``gpuaug.fuse`` sets ``valid`` to False for boxes outside the image, and does not remove them, because only the device knows
    their number. ``sanitize`` removes the entries of these boxes from the tensors, arrays, lists and tuples under the keys
    ``per_box``, and, in a list of dicts, from torchvision's boxes and (n, K, 2) keypoints under any key. All other values are
    returned unchanged; so are dicts without boxes, which some datasets have for images without annotations. Without
    ``per_box``, a key that in any dict does not hold one entry per box is unchanged in all dicts.

    Args:
        targets: List of one dict per image with ``valid``, (n,), or one dict of padded tensors with ``valid``, (B, N).
        per_box: Keys that hold one entry per box in all dicts, besides ``valid``. Default: common keys, such as ``boxes``,
            ``labels``, ``class_labels``, ``masks``, ``keypoints``, ``area``, ``iscrowd``, ``scores``, ``names``,
            ``track_ids``; the page "Detection" of the documentation lists all of these keys. Without a key ``labels``, also the
            first key that contains ``label``, as in torchvision.

    Returns:
        List of one dict per image, of the type of the input dicts. Of a padded dict, tensors, arrays, lists and tuples of
        length B are split by image; all other values are shared by the dicts.

    Raises:
        ArgumentTypeError: If ``targets`` is neither a list of dicts nor a dict.
        ArgumentError: If ``valid`` is missing from dicts that may have boxes, or is not one bool per box; if a tensor, array,
            list or tuple under a key that ``per_box`` names does not hold one entry per box; if ``per_box`` is not passed, and
            in dicts with different numbers of boxes a key that is not among the common keys appears to hold one entry per box.

    Cost:
        One synchronization per batch: the host waits for all work on the current stream. In a stage of a loader,
        ``TransformStage(sanitize, on=…)``, it waits only for the stages of the batch, when the loader returns the batch. A few
        launches per key, and one copy of its values; for tensors of different dtypes or sizes, a few launches per tensor.

    Examples:
        >>> boxes, labels = torch.tensor([[0.0, 0.0, 4.0, 4.0], [9.0, 9.0, 9.0, 9.0]]), torch.tensor([7, 8])
        >>> sanitized = sanitize([{"boxes": boxes, "labels": labels, "valid": torch.tensor([True, False])}])
        >>> sanitized[0]["labels"]
        tensor([7])
    """
    if per_box is not None and (
        not isinstance(per_box, list | tuple | set | frozenset) or not all(isinstance(key, str) for key in per_box)
    ):
        raise ArgumentTypeError(f"per_box must be a list of keys, got {shown(per_box)}. List all: ['boxes', 'labels'].")
    if isinstance(targets, Mapping):
        return _sanitize_padded(targets, per_box)
    if isinstance(targets, PackedTargets):
        packed = _sanitize_packed(targets, per_box)
        if packed is not None:
            return packed  # type: ignore[return-value]  # only stages of a loader pass PackedTargets
        targets = targets.unpacked()
    if isinstance(targets, str | Tensor) or not isinstance(targets, Sequence):
        raise ArgumentTypeError(
            f"targets must be a list of dicts or one dict of padded tensors, got {type(targets).__name__}. "
            "Pass the target dicts that gpuaug.fuse returned."
        )
    keys = _keys(targets, per_box)
    has_valid = any(isinstance(record, Mapping) and "valid" in record for record in targets)
    # If no dict has valid, boxes may be under another key, for which fuse sets no valid.
    is_without_boxes = _has_no_boxes if has_valid else partial(_has_only_values_of_the_image, keys)
    samples = [sample for sample, record in enumerate(targets) if not is_without_boxes(record)]  # indices of dicts with boxes
    records = [targets[sample] for sample in samples]
    for sample, record in zip(samples, records, strict=True):
        _check_valid(record, 1, f" of sample {sample}")
    valid_indices = _ValidIndices(TensorColumn(samples, [record["valid"] for record in records]))
    columns_by_key = columns(records)
    shortened = {name: column for name, column in columns_by_key.items() if _has_entry_per_box(column, valid_indices.counts)}
    keys_to_check = [name for name in (*BOXES.keys, *(per_box or ())) if name not in shortened]
    _check_lengths(keys_to_check, columns_by_key, valid_indices.counts, samples)
    for name in shortened.keys() - keys:
        if not all(map(_is_typed, shortened[name].values)):
            column = shortened.pop(name)
            if per_box is None:
                _check_not_per_box(name, {valid_indices.counts[record] for record in column.samples})
    # For a dict: a copy, which is changed. For another mapping: only the changes.
    changes: list[dict[Any, Any]] = [record.copy() if type(record) is dict else {} for record in targets]
    for name, column in shortened.items():
        for record, value in zip(column.samples, valid_indices.entries(column), strict=True):
            changes[samples[record]][name] = value
    return [
        change if type(record) is dict else batches.replace(record, change)
        for record, change in zip(targets, changes, strict=True)
    ]


def _keys(records: Iterable[Any], per_box: Collection[str] | None) -> set[str]:
    """Return the keys that may hold one entry per box. ``per_box``: keys that the user passed."""
    if per_box is not None:
        return {"valid", *per_box}
    labels = label_key(name for record in records if isinstance(record, Mapping) for name in record)
    return {*PER_BOX, *([] if labels is None else [labels])}


def _has_entry_per_box(column: Column, counts: Sequence[int]) -> bool:
    """Return whether the tensors, arrays, lists and tuples of a column have as many entries as their dicts have boxes.

    Args:
        column: Values of one key in all dicts. At least one value has entries.
        counts: Number of boxes of each dict.
    """
    lengths = [(_length(value), counts[record]) for record, value in zip(*column, strict=True) if isinstance(value, _SEQUENCES)]
    return bool(lengths) and all(length == count for length, count in lengths)


def _is_typed(value: Any) -> bool:
    """Return whether the class of a value implies one entry per box. ``Mask`` does not: it may be a map of the image."""
    name = type_name(value)
    return name == "BoundingBoxes" or (name == "KeyPoints" and value.ndim > 2)


def _check_not_per_box(name: str, counts: set[int]) -> None:
    """Raise an error if a key that is not among the common keys has as many entries as its dicts have boxes, ``counts``.

    Raises:
        ArgumentError: If there are several numbers of boxes, because equal lengths are then hardly a coincidence.
    """
    if len(counts) > 1:
        raise ArgumentError(
            f"per_box must say whether {name!r} holds one entry per box, got no per_box, and as many entries as boxes in "
            f"images with {' and '.join(map(str, sorted(counts)))} boxes. Pass all keys that hold one entry per box: "
            f"per_box=('boxes', 'labels', 'masks', {name!r})."
        )


def _sanitize_padded(targets: Mapping[str, Any], per_box: Collection[str] | None) -> list[Any]:
    """Split one dict of padded tensors into one dict per image, without the boxes that are not valid.

    Raises:
        ArgumentError: If boxes, or a value that ``per_box`` names, are not of all images.
    """
    _check_valid(targets, 2, "")
    batch = len(targets["valid"])
    lengths = {name: _length(value) for name, value in targets.items() if isinstance(value, _SEQUENCES)}
    for name in (*BOXES.keys, *(per_box or ())):
        if lengths.get(name, batch) != batch:
            raise ArgumentError(
                f"{name} must have one entry for each of the {batch} images, as valid has, got {max(lengths[name], 0)}. Pass "
                "boxes and valid of the same images, and leave other keys out of per_box."
            )
    values = {name: targets[name] for name, length in lengths.items() if length == batch}
    records = [
        {
            name: with_class_of(value[sample], value) if isinstance(value, Tensor) else value[sample]
            for name, value in values.items()
        }
        for sample in range(batch)
    ]
    return [batches.replace(targets, record) for record in sanitize(records, per_box=per_box)]


# Attributes that TransformStage reads: the function accepts packed targets, and draws no random numbers.
vars(sanitize).update(takes_packed=True, draws_only_from_seed=True)


def _sanitize_packed(targets: PackedTargets, per_box: Collection[str] | None) -> PackedTargets | None:
    """Remove the boxes that are not valid from packed target dicts, without waiting for the device.

    Args:
        targets: Packed target dicts.
        per_box: Keys that the user passed; ``None`` if other keys that appear to hold one entry per box are an error.

    Returns:
        Packed target dicts whose numbers of boxes the host reads later. ``None`` if the dicts must be unpacked, because the
        host needs the numbers at once, or to find an error.
    """
    own = targets.columns()
    valid = own.get("valid")
    if valid is None or valid.dtypes != {torch.bool} or valid.joined.ndim > 1 or valid.packed.shapes is not None:
        return None
    layout = targets.layout
    counts = dict(zip(valid.packed.samples, valid.packed.lengths, strict=True))
    if any(sample not in counts and not _has_no_boxes(record) for sample, record in enumerate(layout.records)):
        return None
    keys = _keys(layout.records, per_box)
    named = frozenset(per_box or ())
    for (sample, name), value in zip(layout.others, targets.others, strict=True):
        if isinstance(value, _SEQUENCES) and (name in named or _length(value) == counts.get(sample)):
            return None
    rows: dict[Any, tuple[PackedColumn, Tensor]] = {}
    for column, flat in ((packed.packed, packed.joined) for packed in own.values()):
        lengths = column.lengths if column.shapes is None else [shape[0] if shape else -1 for shape in column.shapes]
        column_counts = dict(zip(column.samples, lengths, strict=True))
        if column.shapes is not None or column_counts != counts:
            matches = all(counts.get(sample, length) == length for sample, length in column_counts.items())
            if matches or column.name in {*_BOX_KEYS, *named}:
                return None
            continue
        class_name = type_name_of(column.tensor_type)
        if column.name in keys or class_name == "BoundingBoxes" or (class_name == "KeyPoints" and flat.ndim > 2):
            rows[column.name] = column, flat
        elif per_box is None:
            _check_not_per_box(column.name, set(lengths))
    flags = valid.joined
    index = torch.nonzero_static(flags, size=len(flags)).view(-1).clamp_(min=0)  # filled with -1 at the end
    changes = {name: (column, flat.index_select(0, index)) for name, (column, flat) in rows.items()}
    host_flags = torch.empty(flags.shape, dtype=torch.bool, device="cpu", pin_memory=flags.is_cuda)
    host_flags.copy_(flags, non_blocking=True)
    return targets.with_columns(changes, PendingRows(frozenset(changes), host_flags))


_SEQUENCES = (Tensor, np.ndarray, list, tuple)
"""Types that may hold one entry per box."""


def _length(value: Any) -> int:
    """Number of entries; -1 for a scalar or a namedtuple."""
    if isinstance(value, Tensor):  # len() of a tensor takes five times as long
        return value.shape[0] if value.ndim else -1
    return -1 if batches.is_namedtuple(value) or not getattr(value, "ndim", 1) else len(value)


_BOX_KEYS = BOXES.keys | VALID.keys
"""Keys of boxes and of their mask."""


def _has_no_boxes(record: Any) -> bool:
    """Return whether a target dict has none of the keys ``valid``, ``boxes`` and ``bbox``."""
    return isinstance(record, Mapping) and _BOX_KEYS.keys().isdisjoint(record)


def _has_only_values_of_the_image(keys: Collection[str], record: Any) -> bool:
    """Return whether a target dict has none of ``keys``, and no value that may be boxes: with two axes, or nested.

    ``keys``: keys that hold one entry per box.
    """
    if not isinstance(record, Mapping) or not set(keys).isdisjoint(record):
        return False
    return not any(
        value.ndim > 1
        if isinstance(value, Tensor | np.ndarray)
        else isinstance(value, Mapping)
        or (isinstance(value, list | tuple) and any(isinstance(entry, (*_SEQUENCES, Mapping)) for entry in value))
        for value in record.values()
    )


class _ValidIndices:
    """Indices of the valid boxes of each target dict, on the host.

    Args:
        valid: Column of the masks of the valid boxes, (n,) bool per dict.

    Cost:
        One synchronization for all masks, instead of one ``nonzero()`` per mask.
    """

    def __init__(self, valid: TensorColumn) -> None:
        self.counts = [shape[0] for shape in valid.shapes]
        """Number of boxes of each dict, valid or not."""
        flags = valid.joined.cpu().numpy() if valid.tensors else np.empty(0, bool)
        self._of_dicts = [np.flatnonzero(part) for part in np.split(flags, np.cumsum(self.counts)[:-1])]
        self._on_device: dict[Any, Tensor] = {}
        """Cache of the concatenated indices, by (indices of the dicts, device)."""

    def entries(self, column: Column) -> list[Any]:
        """Return the entries of the valid boxes of each value of a column. One launch if its tensors are alike."""
        samples, values = column
        tensors = TensorColumn(samples, values)
        are_tensors = all(issubclass(cls, Tensor) for cls in tensors.types)
        if not are_tensors or len(tensors.dtypes) * len(tensors.devices) > 1 or tensors.row_shape is None:
            return [self._entries(value, self._of_dicts[sample]) for sample, value in zip(samples, values, strict=True)]
        indices = [self._of_dicts[sample] for sample in samples]
        (device,) = tensors.devices
        key = tuple(samples), device
        if key not in self._on_device:
            starts = np.cumsum([0, *(shape[0] for shape in tensors.shapes[:-1])])
            shifted = [index + start for index, start in zip(indices, starts, strict=True)]
            (self._on_device[key],) = to_device([np.concatenate(shifted)], device)
        parts = split(tensors.joined.index_select(0, self._on_device[key]), list(map(len, indices)))
        return [with_class_of(part, value) for part, value in zip(parts, values, strict=True)]

    def _entries(self, value: Any, indices: Array) -> Any:
        """Return some entries of a value; the value itself if its type cannot hold one entry per box."""
        if isinstance(value, Tensor):
            return with_class_of(value.index_select(0, *to_device([indices], value.device)), value)
        if isinstance(value, np.ndarray):
            return value[indices]
        return type(value)(value[index] for index in indices) if isinstance(value, list | tuple) else value


def _check_valid(record: Any, axes: int, suffix: str) -> None:
    """Raise an error if a target dict has no ``valid`` that is bool with ``axes`` axes.

    ``suffix``: position for the message, such as " of sample 3".
    """
    if not isinstance(record, Mapping):
        raise ArgumentTypeError(
            f"targets{suffix} must be a dict, got {type(record).__name__}. Pass the target dicts that gpuaug.fuse returned."
        )
    if "valid" not in record:
        raise ArgumentError(
            f"targets{suffix} must have the key 'valid', got {', '.join(map(str, record)) or 'no keys'}. "
            "Transform them by gpuaug.fuse first, with the data key 'targets'; or, if padded, with 'valid' beside the boxes."
        )
    valid = record["valid"]
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool or valid.ndim != axes:
        got = f"{valid.dtype} {tuple(valid.shape)}" if isinstance(valid, Tensor) else type(valid).__name__
        raise ArgumentError(
            f"valid{suffix} must be torch.bool {'(n,)' if axes == 1 else '(B, N)'}, got {got}. Pass valid as "
            "gpuaug.fuse returned it."
        )


def _check_lengths(
    keys: Iterable[str], columns_by_key: Mapping[Any, Column], counts: Sequence[int], samples: Sequence[int]
) -> None:
    """Raise an error if a value under one of ``keys`` does not hold one entry per box.

    Args:
        keys: Keys of boxes, and other keys that the user passed as ``per_box``.
        columns_by_key: Columns of the dicts.
        counts: Number of entries of ``valid`` of each dict.
        samples: Index of each dict in the batch, for the error.
    """
    for name in keys:
        for record, value in zip(*columns_by_key.get(name, ((), ())), strict=True):
            if not isinstance(value, _SEQUENCES) or _length(value) == counts[record]:
                continue
            if name in _BOX_KEYS:
                raise ArgumentError(
                    f"valid of sample {samples[record]} must be one bool for each of its {_length(value)} boxes, got "
                    f"{counts[record]}. Pass valid as gpuaug.fuse returned it."
                )
            raise ArgumentError(
                f"{name} of sample {samples[record]} must hold one entry for each of the {counts[record]} boxes if "
                f"per_box names it, got {type(value).__name__} with {max(_length(value), 0)}. Leave {name!r} out of per_box."
            )
