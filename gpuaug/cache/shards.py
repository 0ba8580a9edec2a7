"""Shards: safetensors files of rows. A view (a folder of a cache) has any number of them, in the order of their numbers.

A shard has one tensor (N, …) per column, or for a column of varying length a flat tensor and ``<column>.shapes`` (N, axes). Its
tensors ``row.…`` identify the N rows. Later shards replace the rows of earlier shards.
"""

import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.rows import Part, Row, varies

SUFFIX = ".safetensors"

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32},
    **{"I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16},
}
"""Name of a dtype in a header of safetensors → dtype."""


class ShardError(ValueError):
    """A shard that is damaged. Its rows count as missing."""


def as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous tensor. They share its memory."""
    data: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return data


def write(path: Path, ids: NDArray[np.int64], names: Sequence[str], columns: Mapping[str, Sequence[Tensor]]) -> int:
    """Write a shard under a temporary name, and rename it. Return its size in bytes.

    Args:
        path: Path of the shard.
        ids: (N, 4) ``RowId`` of each row.
        names: Name of each row, for readers other than gpuaug.
        columns: Name of a column → its part of each row, on the host.

    Raises:
        OSError: If the file cannot be written.
    """
    from safetensors.torch import save  # an optional package

    checksums = np.zeros(len(ids), np.int64)
    tensors: dict[str, Tensor] = {}
    for column, parts in columns.items():
        for row, part in enumerate(parts):
            checksums[row] = zlib.crc32(as_bytes(part), checksums[row])
        if varies(column):
            tensors[column] = torch.cat([part.reshape(-1) for part in parts])
            tensors[f"{column}.shapes"] = torch.tensor([part.shape for part in parts], dtype=torch.int64)
        else:
            tensors[column] = torch.stack(list(parts))
    encoded_names = [name.encode(errors="surrogateescape") for name in names]
    tensors["row.id"] = torch.from_numpy(ids)
    tensors["row.checksum"] = torch.from_numpy(checksums)
    tensors["row.name"] = torch.frombuffer(bytearray(b"".join(encoded_names) or b"\0"), dtype=torch.uint8)
    tensors["row.name_end"] = torch.tensor([len(name) for name in encoded_names]).cumsum(0)
    described = [tensors[name] for name in sorted(tensors) if _describes_rows(name)]
    metadata = {"format": "pt", "checksum": _digest(map(as_bytes, described))}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        data = save(tensors, metadata)
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return len(data)


class _Column(NamedTuple):
    """Place of a column in a shard."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Offset in the file, in bytes."""


class Shard:
    """A shard that is mapped into memory.

    Args:
        path: Path of the shard.

    Raises:
        OSError: If the file cannot be read.
        ShardError: If its length is wrong, or its description of the rows.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._data = np.frombuffer(self._map, np.uint8)
        try:
            begin = 8 + int.from_bytes(self._map[:8], "little")
            header: dict[str, Any] = json.loads(self._map[8:begin])
            metadata = header.pop("__metadata__")
            columns = {
                name: _Column(_DTYPES[entry["dtype"]], tuple(entry["shape"]), begin + entry["data_offsets"][0])
                for name, entry in header.items()
            }
            length = begin + max(entry["data_offsets"][1] for entry in header.values())
        except (KeyError, TypeError, ValueError) as error:
            raise ShardError(f"its header cannot be read ({error!r})") from error
        if length != len(self._map):
            raise ShardError(f"it has {len(self._map):,} bytes instead of {length:,}")
        described = {name: self._bytes(columns[name]) for name in sorted(columns) if _describes_rows(name)}
        if _digest(described.values()) != metadata["checksum"]:
            raise ShardError("its checksum is wrong")
        self.ids: NDArray[np.int64] = described["row.id"].view(np.int64).reshape(-1, 4)
        """(N, 4) ``RowId`` of each row."""
        self._checksums = described["row.checksum"].view(np.int64)
        self._columns = {name: column for name, column in columns.items() if not _describes_rows(name)}
        self._shapes = {
            name: described[f"{name}.shapes"].view(np.int64).reshape(columns[f"{name}.shapes"].shape)
            for name in self._columns
            if varies(name)
        }
        self._starts = {name: np.r_[0, shapes.prod(1).cumsum()] for name, shapes in self._shapes.items()}

    def row(self, index: int) -> Row | None:
        """Return a row, whose parts are views of the file; ``None`` if its bytes are damaged."""
        row: Row = {}
        checksum = 0
        for name, column in self._columns.items():
            if name in self._shapes:
                shape = tuple(self._shapes[name][index].tolist())
                first, last = self._starts[name][index : index + 2].tolist()
            else:
                shape = column.shape[1:]
                count = int(np.prod(shape))
                first, last = index * count, (index + 1) * count
            itemsize = column.dtype.itemsize
            data = self._data[column.start + first * itemsize : column.start + last * itemsize]
            checksum = zlib.crc32(data, checksum)
            row[name] = Part(column.dtype, shape, data)
        return row if checksum == self._checksums[index] else None

    def _bytes(self, column: _Column) -> NDArray[np.uint8]:
        length = int(np.prod(column.shape)) * column.dtype.itemsize
        return self._data[column.start : column.start + length].copy()


def _describes_rows(name: str) -> bool:
    """Return whether a tensor of a shard describes its rows, rather than holding a column."""
    return name.startswith("row.") or name.endswith(".shapes")


def _digest(parts: Iterable[NDArray[np.uint8]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
