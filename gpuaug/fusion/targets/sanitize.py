"""Dropping boxes that are not valid: the only step of detection targets that waits for the device."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, shown
from gpuaug.core.torchvision_types import type_name
from gpuaug.fusion.ops.base import Array
from gpuaug.fusion.targets.masks import like, split, to_device

PER_BOX = frozenset(
    {
        *("boxes", "bbox", "valid", "labels", "class_labels", "classes", "names", "masks", "keypoints", "segmentation"),
        *("area", "areas", "iscrowd", "is_crowd", "scores", "weights", "visibility", "difficult", "truncated", "occluded"),
        *("id", "ids", "category_id", "category_ids", "annotation_id", "annotation_ids", "track_id", "track_ids"),
    }
)
"""Keys that hold one entry per box. A length cannot tell: two boxes, and a height and a width, are two entries each."""

MOST_JOINED = 256
"""Most numbers of a box in a tensor, such as its corners, of which those of all images are joined, to be indexed at once."""


def sanitize(targets: Any, *, per_box: Collection[str] | None = None) -> list[Any]:
    """Drop the boxes that are not valid, and the other values of these boxes: labels, masks, keypoints, areas, names.

    ``gpuaug.fuse`` marks boxes that have left the image in ``valid``, and drops none, since their number is known on the
    device alone. Here the tensors, arrays, lists and tuples under the keys ``per_box``, and torchvision's boxes and
    keypoints under any key, lose the same entries. All other values stay, and so do values of another length in any of the
    dicts, and dicts without boxes, as some datasets have for images without annotations.

    Args:
        targets: A list of one dict for each image with ``valid``, (n,), or one dict of padded tensors with ``valid``, (B, N).
        per_box: Keys that hold one entry per box, besides ``valid``. Left out: the usual ones, such as ``boxes``, ``labels``,
            ``class_labels``, ``masks``, ``keypoints``, ``area``, ``iscrowd``, ``scores``, ``names``, ``track_ids``; the
            documentation of detection lists them all.

    Returns:
        A list of one dict for each image, of the type of those that came in. From a padded dict each takes its part of every
        tensor, list and tuple of B; the rest is the same for all.

    Raises:
        ArgumentTypeError: If ``targets`` are nothing of the kind.
        ArgumentError: If there is no ``valid``, or it does not say of each box whether it is; if ``per_box`` is left out and
            another key seems to hold one entry per box.

    Cost:
        The host waits for the device, once for the whole batch. A few launches for each key, and one for each tensor of masks.

    Examples:
        >>> boxes, labels = torch.tensor([[0.0, 0.0, 4.0, 4.0], [9.0, 9.0, 9.0, 9.0]]), torch.tensor([7, 8])
        >>> kept = sanitize([{"boxes": boxes, "labels": labels, "valid": torch.tensor([True, False])}])
        >>> kept[0]["labels"]
        tensor([7])
    """
    listed = PER_BOX if per_box is None else per_box
    if not isinstance(listed, list | tuple | set | frozenset) or not all(isinstance(key, str) for key in listed):
        raise ArgumentTypeError(f"per_box must be a list of keys, got {shown(per_box)}. List all: ['boxes', 'labels'].")
    keys = {"valid", *listed}  # or valid would be longer than the boxes
    if isinstance(targets, Mapping):
        return _sanitize_padded(targets, keys)
    if isinstance(targets, str | Tensor) or not isinstance(targets, Sequence):
        raise ArgumentTypeError(
            f"targets must be a list of dicts or one dict of padded tensors, got {type(targets).__name__}. "
            "Pass what fuse has returned for them."
        )
    some = any(isinstance(record, Mapping) and "valid" in record for record in targets)
    judged = [sample for sample, record in enumerate(targets) if not (some and _has_no_boxes(record))]
    valid = [_valid_of(targets[sample], 1, f" of sample {sample}") for sample in judged]
    records = [targets[sample] for sample in judged]
    fitting = _fitting(records, [len(each) for each in valid])
    unlisted = {
        name for name in fitting.keys() - keys if not all(_is_typed(record[name]) for record in records if name in record)
    }
    for name in unlisted if per_box is None else ():
        _check_whole(name, fitting[name])
    made = [batches.replace(record, {}) for record in targets]
    taken = _taken(records, fitting.keys() - unlisted, _kept(valid))
    for sample, values in zip(judged, taken, strict=True):
        made[sample] = batches.replace(targets[sample], values)
    return made


def _fitting(records: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> dict[str, set[int]]:
    """Keys whose values have one entry per box in all records, with these numbers of entries."""
    fitting: dict[str, set[int]] = {}
    others: set[str] = set()
    for record, count in zip(records, counts, strict=True):
        for name, value in record.items():
            if not isinstance(value, _SEQUENCES) or name in others:
                continue
            if batches.is_namedtuple(value) or _length(value) != count:
                others.add(name)
            else:
                fitting.setdefault(name, set()).add(count)
    return {name: found for name, found in fitting.items() if name not in others}


def _is_typed(value: Any) -> bool:
    """Whether the type of a value says that it holds one entry per box. A ``Mask`` may be of the whole image."""
    name = type_name(value)
    return name == "BoundingBoxes" or (name == "KeyPoints" and value.ndim > 2)


def _check_whole(name: str, counts: set[int]) -> None:
    """Refuse a key that is not known, but has one entry per box in images with different numbers of boxes.

    Raises:
        ArgumentError: If that is so.
    """
    if len(counts) > 1:
        raise ArgumentError(
            f"per_box must say whether {name!r} holds one entry per box, got nothing, and entries for "
            f"{' and '.join(map(str, sorted(counts)))} boxes. Pass the keys that do, such as per_box=('boxes', 'labels', "
            f"'masks', {name!r})."
        )


def _sanitize_padded(targets: Mapping[str, Any], per_box: set[str]) -> list[Any]:
    valid = _valid_of(targets, 2, "")
    batch = len(valid)
    padded = {
        name for name, value in targets.items() if isinstance(value, Tensor) and tuple(value.shape[:2]) == tuple(valid.shape)
    }
    keys = padded & per_box
    own = [
        {
            name: like(value[sample], value) if isinstance(value, Tensor) else value[sample]
            for name, value in targets.items()
            if isinstance(value, Tensor | list | tuple)
            and (not isinstance(value, Tensor) or value.ndim)
            and len(value) == batch
        }
        for sample in range(batch)
    ]
    taken = _taken(own, keys, _kept(list(valid)))
    return [batches.replace(targets, {**each, **values}) for each, values in zip(own, taken, strict=True)]


_SEQUENCES = (Tensor, np.ndarray, list, tuple)
"""Types that may hold one entry for each box."""


def _length(value: Any) -> int:
    """Number of entries; -1 for a scalar."""
    if isinstance(value, Tensor):  # whose len() takes five times as long
        return value.shape[0] if value.ndim else -1
    return len(value) if getattr(value, "ndim", 1) else -1


def _has_no_boxes(record: Any) -> bool:
    return isinstance(record, Mapping) and not {"valid", "boxes", "bbox"} & set(record)


def _taken(
    records: Sequence[Mapping[str, Any]], keys: Collection[str], kept: Sequence[tuple[Array, Tensor]]
) -> list[dict[str, Any]]:
    """The values of each record under the keys, without the entries that are not kept."""
    taken: list[dict[str, Any]] = [{} for _ in records]
    alike = defaultdict(list)
    for record, made, places in zip(records, taken, kept, strict=True):
        for name, value in record.items():
            if name not in keys or not isinstance(value, _SEQUENCES):
                continue
            if isinstance(value, Tensor):
                alike[name, value.dtype, value.device, value.shape[1:]].append((made, places, value))
            elif isinstance(value, np.ndarray):
                made[name] = value[places[0]]
            else:
                made[name] = type(value)(value[at] for at in places[0])
    for (name, *_, shape), found in alike.items():
        values = [value.as_subclass(Tensor) for _, _, value in found]
        if len(found) > 1 and math.prod(shape) <= MOST_JOINED:
            parts = _joined(values, [on_host for _, (on_host, _), _ in found])
        else:
            on_device = (places.to(values[0].device) for _, (_, places), _ in found)
            parts = [value.index_select(0, places) for value, places in zip(values, on_device, strict=True)]
        for (made, _, value), part in zip(found, parts, strict=True):
            made[name] = like(part, value)
    return taken


def _joined(values: Sequence[Tensor], indices: Sequence[Array]) -> Sequence[Tensor]:
    """Entries of each tensor, by their indices, with one launch for all."""
    starts = np.cumsum([0, *(value.shape[0] for value in values[:-1])])
    whole = np.concatenate([each + start for each, start in zip(indices, starts, strict=True)])
    (index,) = to_device([whole], values[0].device)
    return split(torch.cat(tuple(values)).index_select(0, index), [len(each) for each in indices])


def _valid_of(record: Any, axes: int, whose: str) -> Tensor:
    if not isinstance(record, Mapping):
        raise ArgumentTypeError(
            f"targets{whose} must be a dict, got {type(record).__name__}. Pass what fuse has returned for them."
        )
    if "valid" not in record:
        raise ArgumentError(
            f"targets{whose} must say in 'valid' which boxes to keep, got {', '.join(map(str, record)) or 'nothing'}. "
            "Take them through gpuaug.fuse first, with the data key 'targets'; or, padded, with 'valid' beside the boxes."
        )
    valid = record["valid"]
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool or valid.ndim != axes:
        got = f"{valid.dtype} {tuple(valid.shape)}" if isinstance(valid, Tensor) else type(valid).__name__
        raise ArgumentError(
            f"valid{whose} must be torch.bool {'(n,)' if axes == 1 else '(B, N)'}, got {got}. Pass it as fuse has returned it."
        )
    return valid


def _kept(valid: Sequence[Tensor]) -> list[tuple[Array, Tensor]]:
    """Indices of the True entries of each mask, on the host and on the device."""
    if not valid:
        return []
    # One synchronisation for all masks: each nonzero() would be one.
    known = torch.cat(tuple(valid)).cpu().numpy()
    ends = np.cumsum([len(each) for each in valid])
    found = [np.flatnonzero(part) for part in np.split(known, ends[:-1])]
    return list(zip(found, to_device(found, valid[0].device), strict=True))
