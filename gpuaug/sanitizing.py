"""Dropping what is not valid: the one step of detection targets for which the host has to wait."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug import batch as batches
from gpuaug.errors import ArgumentError, ArgumentTypeError
from gpuaug.fuse.masks import like, to_device

WHOLE = frozenset({"image", "images", "input", "pixel_values", "image_id", "size", "orig_size"})
"""What is said of an image as a whole, however many objects are in it."""


def sanitize(targets: Any) -> list[Any]:
    """Drop the boxes that are not valid, and with each all that is known of it.

    :func:`gpuaug.fuse` marks boxes that have left the image in ``valid``, and drops none, since how many are left is known on
    the device alone. Here every tensor whose first axis is as long as ``valid`` loses the same entries: boxes, labels, masks,
    keypoints, areas. What is said of the whole image stays: ``image_id``, ``size``, ``orig_size``, and what has another length
    in any of the dicts.

    Args:
        targets: A list of one dict for each image with ``valid``, (n,), or one dict of padded tensors with ``valid``, (B, N).

    Returns:
        A list of one dict for each image, of the type of those that came in. From a padded dict each takes its part of every
        tensor, list and tuple of B; the rest is the same for all.

    Raises:
        ArgumentTypeError: If ``targets`` are nothing of the kind.
        ArgumentError: If there is no ``valid``, or it does not say of each box whether it is.

    Cost:
        The host waits for the device, once for the whole batch. One launch for each tensor.

    Examples:
        >>> boxes, labels = torch.tensor([[0.0, 0.0, 4.0, 4.0], [9.0, 9.0, 9.0, 9.0]]), torch.tensor([7, 8])
        >>> kept = sanitize([{"boxes": boxes, "labels": labels, "valid": torch.tensor([True, False])}])
        >>> kept[0]["labels"]
        tensor([7])
    """
    if isinstance(targets, Mapping):
        return _sanitize_padded(targets)
    if isinstance(targets, str | Tensor) or not isinstance(targets, Sequence):
        raise ArgumentTypeError(
            f"targets must be a list of dicts or one dict of padded tensors, got {type(targets).__name__}. "
            "Pass what fuse has returned for them."
        )
    valid = [_valid_of(record, 1, f" of sample {sample}") for sample, record in enumerate(targets)]
    kept = _kept(valid)
    counts = [len(each) for each in valid]
    whole = {
        name
        for record, count in zip(targets, counts, strict=True)
        for name, value in record.items()
        if isinstance(value, Tensor) and (not value.ndim or value.shape[0] != count)
    }
    return [
        batches.replace(record, _taken(record, {*WHOLE, *whole}, places)) for record, places in zip(targets, kept, strict=True)
    ]


def _sanitize_padded(targets: Mapping[str, Any]) -> list[Any]:
    valid = _valid_of(targets, 2, "")
    batch = len(valid)
    shared = {
        name for name, value in targets.items() if isinstance(value, Tensor) and tuple(value.shape[:2]) != tuple(valid.shape)
    }
    made = []
    for sample, places in enumerate(_kept(list(valid))):
        own = {
            name: like(value[sample], value) if isinstance(value, Tensor) else value[sample]
            for name, value in targets.items()
            if isinstance(value, Tensor | list | tuple)
            and (not isinstance(value, Tensor) or value.ndim)
            and len(value) == batch
        }
        made.append(batches.replace(targets, {**own, **_taken(own, {*WHOLE, *shared}, places)}))
    return made


def _taken(record: Mapping[str, Any], whole: set[str], places: Tensor) -> dict[str, Tensor]:
    return {
        name: like(value.as_subclass(Tensor).index_select(0, places), value)
        for name, value in record.items()
        if isinstance(value, Tensor) and name not in whole
    }


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


def _kept(valid: Sequence[Tensor]) -> list[Tensor]:
    """Where each is true."""
    if not valid:
        return []
    # One wait for all: each nonzero() would be one.
    known = torch.cat(tuple(valid)).cpu().numpy()
    ends = np.cumsum([len(each) for each in valid])
    found = [np.flatnonzero(part) for part in np.split(known, ends[:-1])]
    return list(to_device(found, valid[0].device))
