"""Rows of a feature cache in a batch, which ``collate_encoded`` packs in place of files that were encoded before."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gpuaug.core.encoded import Encoded
from gpuaug.core.errors import ArgumentError
from gpuaug.core.rows import Rows, varies
from gpuaug.decode.encoded_input import CachedFile
from gpuaug.feed.collate_members import allocate_tensor


def pack_rows(files: Sequence[CachedFile], pack_files: Callable[[Sequence[CachedFile]], Encoded]) -> Rows:
    """Pack the rows of a batch. If some are missing, pack all files, too.

    Stages run on whole batches, because a sample's random numbers depend on its place in the batch, and a file that cannot be
    decoded may be replaced by any other.

    Args:
        files: (B,) images of one member.
        pack_files: Function that packs images.

    Raises:
        ArgumentError: If the rows differ in their columns, or in the shape of a column that has one shape per batch.
    """
    missing = [file.row is None for file in files]
    found = [file.row for file in files if file.row is not None]
    first = found[0] if found else {}
    columns = {}
    shapes = {}
    for name, part in first.items():
        if any(row.keys() != first.keys() or (row[name].shape != part.shape and not varies(name)) for row in found):
            kinds = [", ".join(f"{key} {tuple(value.shape)}" for key, value in row.items()) for row in found]
            raise ArgumentError(
                f"The rows of a batch must have the same columns and shapes, got {' and '.join(dict.fromkeys(kinds))}. "
                "Batch images of one size together, with a batch sampler that has a bucket per size."
            )
        if varies(name):
            empty = part.new_empty((0,) * part.dim())
            parts = [empty if file.row is None else file.row[name] for file in files]
            shapes[name] = np.array([each.shape for each in parts], np.int64).reshape(len(files), -1)
            columns[name] = _concatenated(parts)
        else:
            parts = [part if file.row is None else file.row[name] for file in files]
            columns[name] = torch.stack(parts, out=allocate_tensor((len(files), *part.shape), part.dtype))
    encoded = pack_files(files) if any(missing) else None
    described = [] if encoded is None else files
    ids = np.array([file.row_id for file in described], np.int64)
    return Rows(encoded, np.array(missing), ids, "\0".join(file.name for file in described), columns, shapes)


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    flat = [part.reshape(-1) for part in parts]
    return torch.cat(flat, out=allocate_tensor((sum(map(len, flat)),), parts[0].dtype))
