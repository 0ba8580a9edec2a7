"""Rows of a feature cache in a batch: ``collate_encoded`` packs them instead of the files of samples that were encoded before."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from gpuaug.core.encoded import Encoded
from gpuaug.core.errors import ArgumentError
from gpuaug.core.rows import Part, Rows, varies
from gpuaug.decode.encoded_input import CachedFile
from gpuaug.decode.members import encoded_with_samples
from gpuaug.feed.collate_members import allocate_tensor


def pack_rows(files: Sequence[CachedFile], pack_files: Callable[[Sequence[CachedFile]], Encoded]) -> Rows:
    """Pack the rows of a batch, and the files of the samples without a row.

    Stages run on whole batches, because a sample's random numbers depend on its place in the batch. So in a batch in which some
    rows are missing, each other sample has the file of a sample without a row.

    Args:
        files: (B,) images of one member.
        pack_files: Function that packs images.

    Raises:
        ArgumentError: If the rows differ in their columns, or in the shape of a column that has one shape per batch.
    """
    missing = [file.row is None for file in files]
    encoded = None
    if any(missing):
        encoded = pack_files([file for file in files if file.row is None])
        places = np.cumsum(missing) - 1  # the file itself, or the last one before it that is packed
        encoded = encoded_with_samples(places.clip(0), encoded)
    read = {index: file.row for index, file in enumerate(files) if file.row is not None}
    first = next(iter(read.values()), {})
    if different := next((row for row in read.values() if row.keys() != first.keys()), None):
        raise ArgumentError(
            f"The rows of a batch must have the same members, got {', '.join(first)} and {', '.join(different)}. "
            "Batch samples of one kind together, or use a cache per kind."
        )
    columns = {}
    shapes = {}
    for name in first:
        parts = {index: row[name] for index, row in read.items()}
        if varies(name):
            columns[name] = _concatenated(list(parts.values()))
            shapes[name] = np.zeros((len(files), len(first[name].shape)), np.int64)
            for index, part in parts.items():
                shapes[name][index] = part.shape
        else:
            columns[name] = _stacked(parts, len(files), name)
    return Rows(
        encoded,
        np.array([file.row_id for file in files], np.int64),
        [file.name for file in files],
        torch.tensor(missing),
        columns,
        shapes,
    )


def _stacked(parts: dict[int, Part], count: int, name: str) -> Tensor:
    """Return a tensor (B, …) with the rows at their places. ``parts``: index in the batch → part."""
    first = next(iter(parts.values()))
    if different := next((part for part in parts.values() if part[:2] != first[:2]), None):
        raise ArgumentError(
            f"The rows of a batch must have one shape in {name!r}, got {first.shape} and {different.shape}. "
            "Batch images of one size together, with a batch sampler that has a bucket per size."
        )
    stacked = allocate_tensor((count, *first.shape), first.dtype)
    data = stacked.view(torch.uint8).numpy().reshape(count, -1) if stacked.numel() else np.empty((count, 0), np.uint8)
    for index, part in parts.items():
        data[index] = part.data
    return stacked


def _concatenated(parts: Sequence[Part]) -> Tensor:
    """Return the elements of all parts as a flat tensor."""
    dtype = parts[0].dtype
    ends = list(accumulate(len(part.data) for part in parts))
    flat = allocate_tensor((ends[-1] // dtype.itemsize,), dtype)
    data = flat.view(torch.uint8).numpy()
    for end, part in zip(ends, parts, strict=True):
        data[end - len(part.data) : end] = part.data
    return flat
