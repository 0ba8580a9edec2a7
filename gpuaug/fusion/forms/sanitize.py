"""Removal of boxes that are not valid, and of their labels and masks.

A *target dict* holds the annotations of one image: ``{"boxes": …, "labels": …, "valid": …}``. The mask ``valid`` says which
boxes are still inside the image. A *column* is the values of all dicts under one key; its *samples* are the indices of the
dicts that have the key. Target dicts are *packed* if each column is stored as one tensor: inside a loader, stages get them so.

Removal is the only operation on target dicts for which the host waits for the device, because only the device knows how many
boxes are valid. For packed dicts it does not wait: the result has *pending* rows, which the loader removes when it returns the
batch (``PendingRows``).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
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
    FlatColumn,
    PackedTargets,
    PendingRows,
    columns,
    type_name,
    with_class_of,
)
from gpuaug.fusion.backends.readers import send
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
        targets: List of one dict per image with ``valid``, (n,), or one dict of padded tensors with ``valid``, (B, N). For
            clips, a list of one list per clip, with one dict per frame.
        per_box: Keys that hold one entry per box in all dicts, besides ``valid``. Default: common keys, such as ``boxes``,
            ``labels``, ``class_labels``, ``masks``, ``keypoints``, ``area``, ``iscrowd``, ``scores``, ``names``,
            ``track_ids``; the page "Detection" of the documentation lists all of these keys. Without a key ``labels``, also the
            first key that contains ``label``, as in torchvision.

    Returns:
        List of one dict per image, or of one list of dicts per clip, of the type of the input dicts. Of a padded dict, tensors,
        arrays, lists and tuples of length B are split by image; all other values are shared by the dicts.

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
        result = _sanitize_packed(targets, per_box)
        # Only stages of a loader pass ``PackedTargets``.
        return sanitize(targets.unpacked(), per_box=per_box) if result is None else result  # type: ignore[return-value]
    if isinstance(targets, list | tuple) and targets and all(isinstance(frames, list | tuple) for frames in targets):
        records_of_clips = iter(sanitize([*chain.from_iterable(targets)], per_box=per_box))
        return [[*islice(records_of_clips, len(frames))] for frames in targets]
    if isinstance(targets, str | Tensor) or not isinstance(targets, Sequence):
        raise ArgumentTypeError(
            f"targets must be a list of dicts or one dict of padded tensors, got {type(targets).__name__}. "
            "Pass the target dicts that gpuaug.fuse returned."
        )
    keys = _possible_keys(chain.from_iterable(record for record in targets if isinstance(record, Mapping)), per_box)
    has_valid = any(isinstance(record, Mapping) and "valid" in record for record in targets)
    # Dicts without boxes need no ``valid``. If no dict has ``valid``, the user may have forgotten fuse, so only dicts that
    # surely have no boxes under any key are accepted. For others, ``_check_valid`` raises an error.
    is_without_boxes = _has_no_boxes if has_valid else partial(_has_only_values_of_the_image, keys)
    records = {sample: record for sample, record in enumerate(targets) if not is_without_boxes(record)}
    for sample, record in records.items():
        _check_valid(record, 1, f" of sample {sample}")
    changes: list[dict[Any, Any]] = [{} for _ in targets]
    """Per dict, the values that lose entries, by key."""
    if records:
        columns_by_key = columns([*records.values()], [*records])
        valid = columns_by_key[VALID.name]
        valid.join()
        host_valid = valid.joined.cpu().numpy()
        # Indices of the entries that remain: of each sample, and of all samples together.
        kept = [np.flatnonzero(flags) for flags in np.split(host_valid, np.cumsum(valid.lengths)[:-1])]
        (kept_rows,) = send([np.flatnonzero(host_valid)], valid.joined.device)
        for name, column in _columns_per_box(columns_by_key, valid, keys, per_box).items():
            if _can_be_joined(column, valid):
                packed = column.packed._replace(lengths=[*map(len, kept)])
                values: Sequence[Any] = packed.tensors(column.joined.index_select(0, kept_rows))
            else:
                kept_by_sample = dict(zip(valid.samples, kept, strict=True))
                pairs = zip(column.values, column.samples, strict=True)
                values = [_entries(value, kept_by_sample[sample]) for value, sample in pairs]
            for sample, value in zip(column.samples, values, strict=True):
                changes[sample][name] = value
    return [batches.replace(record, change) for record, change in zip(targets, changes, strict=True)]


def _sanitize_packed(targets: PackedTargets, per_box: Collection[str] | None) -> PackedTargets | None:
    """Remove boxes from packed dicts without waiting for the device; return ``None`` if the dicts must be unpacked.

    They must be if ``valid`` is not packed, if dicts with boxes lack it, or if a column cannot be shortened in one launch.
    """
    valid = targets.columns().get(VALID.name)
    if valid is None or valid.dtypes != {torch.bool} or valid.joined.ndim > 1 or valid.packed.shapes is not None:
        return None
    samples = set(valid.samples)
    if not all(sample in samples or _has_no_boxes(record) for sample, record in enumerate(targets.layout.records)):
        return None
    keys = _possible_keys(targets.layout.keys, per_box)
    columns_per_box = _columns_per_box(targets.all_columns(), valid, keys, per_box)
    if not all(_can_be_joined(column, valid) for column in columns_per_box.values()):
        return None
    flags = valid.joined
    host_valid = torch.empty(flags.shape, dtype=torch.bool, device="cpu", pin_memory=flags.is_cuda)
    host_valid.copy_(flags, non_blocking=True)
    # As many indices as rows, so that the host need not wait for their number. The surplus indices at the end repeat row 0. The
    # loader calls ``PackedTargets.settled``, which removes these rows.
    kept_rows = torch.nonzero_static(flags, size=len(flags), fill_value=0).view(-1)
    kept_columns = (FlatColumn(column.packed, column.joined.index_select(0, kept_rows)) for column in columns_per_box.values())
    return targets.with_columns(kept_columns, PendingRows(frozenset(columns_per_box), valid.lengths, host_valid))


def _can_be_joined(column: Column, valid: Column) -> bool:
    """Return whether the rows of a column can be removed in one launch, from the concatenation of its values.

    Its values must be tensors of one class, dtype and row shape, on the device of ``valid``, and exactly the dicts that have
    ``valid`` must have the key.
    """
    if not all(issubclass(cls, Tensor) for cls in column.types) or column.samples != valid.samples:
        return False
    column.join(valid.joined.device)
    is_one_type = len(column.types) == len(column.dtypes) == 1
    return is_one_type and column.devices == valid.devices and column.row_shape is not None


def _possible_keys(all_keys: Iterable[Any], per_box: Collection[str] | None) -> set[str]:
    """Return the keys that may hold one entry per box. ``all_keys``: keys of the dicts. ``per_box``: see ``sanitize``."""
    if per_box is not None:
        return {"valid", *per_box}
    labels = label_key(dict.fromkeys(all_keys))
    return {*PER_BOX, *([] if labels is None else [labels])}


def _columns_per_box(
    columns_by_key: Mapping[Any, Column], valid: Column, keys: Collection[str], per_box: Collection[str] | None
) -> dict[Any, Column]:
    """Return key → column of the columns from which entries are removed, because they hold one entry per box.

    Args:
        columns_by_key: Key → column.
        valid: Column of the masks ``valid``, one flag per box.
        keys: Keys that may hold one entry per box.
        per_box: Argument of ``sanitize``.

    Raises:
        ArgumentError: If boxes, or a value that ``per_box`` names, do not hold one entry per box; if a key that is not among
            ``keys`` appears to hold one entry per box, in images with different numbers of boxes.
    """
    columns_per_box = {}
    counts = dict(zip(valid.samples, valid.lengths, strict=True))
    # Boxes come first: if ``valid`` belongs to other boxes, this is the error, whatever holds as many entries as ``valid``.
    for name, column in sorted(columns_by_key.items(), key=lambda item: item[0] not in BOXES.keys):
        lengths = _lengths(column)
        # ``lengths == counts`` is true for most columns, and takes a tenth of the time of the loop. A column may also have
        # values in only some of the dicts.
        pairs = () if lengths == counts else lengths.items()
        sample = next((sample for sample, length in pairs if counts.get(sample, length) != length), None)
        if sample is not None and name in BOXES.keys:
            raise ArgumentError(
                f"valid of sample {sample} must be one bool for each of its {lengths[sample]} boxes, got "
                f"{counts[sample]}. Pass valid as gpuaug.fuse returned it."
            )
        if sample is not None and name in (per_box or ()):
            value = column.values[list(column.samples).index(sample)]
            raise ArgumentError(
                f"{name} of sample {sample} must hold one entry for each of the {counts[sample]} boxes if "
                f"per_box names it, got {type(value).__name__} with {max(lengths[sample], 0)}. Leave {name!r} out of per_box."
            )
        if sample is not None or not lengths:
            continue
        # The lengths of a column under another key may be equal by chance. It is shortened only if its class implies boxes.
        if name in keys or all(map(_is_typed, column.values)):
            columns_per_box[name] = column
        elif per_box is None:
            numbers = sorted({counts[sample] for sample in column.samples if sample in counts})
            if len(numbers) > 1:  # equal lengths are then hardly a coincidence
                raise ArgumentError(
                    f"per_box must say whether {name!r} holds one entry per box, got no per_box, and as many entries as boxes "
                    f"in images with {' and '.join(map(str, numbers))} boxes. Pass all keys that hold one entry per box: "
                    f"per_box=('boxes', 'labels', 'masks', {name!r})."
                )
    return columns_per_box


def _lengths(column: Column) -> dict[int, int]:
    """Return sample → number of entries, of each value that is a tensor, array, list or tuple. See ``_length``."""
    if all(issubclass(cls, Tensor) for cls in column.types):
        return dict(zip(column.samples, column.lengths, strict=True))
    pairs = zip(column.samples, column.values, strict=True)
    return {sample: _length(value) for sample, value in pairs if isinstance(value, _SEQUENCES)}


def _is_typed(value: Any) -> bool:
    """Return whether the class of a value implies one entry per box. ``Mask`` does not: it may be a map of the image."""
    name = type_name(value)
    return name == "BoundingBoxes" or (name == "KeyPoints" and value.ndim > 2)


def _sanitize_padded(targets: Mapping[str, Any], per_box: Collection[str] | None) -> list[Any]:
    """Split one dict of padded tensors into one dict per image, without the boxes that are not valid.

    Raises:
        ArgumentError: If boxes, or a value that ``per_box`` names, do not have one entry per image.
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


_SEQUENCES = (Tensor, np.ndarray, list, tuple)
"""Types that may hold one entry per box."""


def _length(value: Any) -> int:
    """Return the number of entries of a value of ``_SEQUENCES``; -1 for a value without axes or a namedtuple."""
    if isinstance(value, Tensor):  # len() of a tensor takes five times as long
        return value.shape[0] if value.ndim else -1
    return -1 if batches.is_namedtuple(value) or not getattr(value, "ndim", 1) else len(value)


_BOX_KEYS = BOXES.keys | VALID.keys
"""A dict whose keys are ``boxes``, ``bbox`` and ``valid``. Its values are not used."""


def _has_no_boxes(record: Any) -> bool:
    """Return whether a target dict has none of the keys ``valid``, ``boxes`` and ``bbox``."""
    return isinstance(record, Mapping) and _BOX_KEYS.keys().isdisjoint(record)


def _has_only_values_of_the_image(keys: Collection[str], record: Any) -> bool:
    """Return whether a target dict surely has no boxes: none of ``keys``, and no value with two axes or nested containers.

    ``keys``: keys that may hold one entry per box.
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


def _entries(value: Any, indices: Array) -> Any:
    """Return the entries of a value at ``indices``; the value itself if its type cannot hold one entry per box."""
    if isinstance(value, Tensor):
        return with_class_of(value.index_select(0, *send([indices], value.device)), value)
    if isinstance(value, np.ndarray):
        return value[indices]
    return type(value)(value[index] for index in indices) if isinstance(value, list | tuple) else value


def _check_valid(record: Any, axes: int, suffix: str) -> None:
    """Raise an error if a value is not a target dict with ``valid``, a bool tensor with ``axes`` axes.

    ``suffix``: which dict it is, for the message, such as " of sample 3".
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
            "gpuaug.fuse returned it: in a list of one dict per image, or in one dict of padded tensors."
        )
