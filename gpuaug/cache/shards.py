"""Shards: safetensors files of the rows of a feature cache.

A *row* is the recorded results of a loader's stages for one sample: one tensor per *column*, such as ``latents``. A *view* is a
folder with the rows that were recorded in one epoch, in any number of shards. The *inputs* of a row are values of members of
its sample for which it is valid (``inputs.py``).

A shard of N rows has one tensor (N, …) per column; for a column whose shape varies between rows, such as boxes, a flat tensor,
and ``row.shapes.<column>``, (N, axes). Its other tensors ``row.…`` identify and check the rows.
"""

import ctypes
import errno
import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.encoded import Row, has_varying_shape
from gpuaug.core.errors import DeviceError, GpuAugError

SUFFIX = ".safetensors"

_LIBC = ctypes.CDLL(None) if os.name == "posix" else None
"""C library of the process; ``None`` on Windows."""
_WILL_NEED = 3
"""Advice ``MADV_WILLNEED`` of the C function ``madvise``, on Linux and macOS."""


class ShardError(ValueError):
    """Error for a damaged shard. Its rows count as missing."""


def required_safetensors() -> Any:
    """Return the module ``safetensors``, which is optional.

    Raises:
        DeviceError: If it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise DeviceError(
            f"A feature cache cannot be used, because the package safetensors cannot be imported ({error}). Install it: "
            "pip install safetensors."
        ) from error
    return safetensors


def write_file(path: Path, content: bytes) -> None:
    """Write a file of a cache under a temporary name, and rename it, so that other processes never read a part of it.

    Raises:
        GpuAugError: If the file cannot be written.
    """
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        way_out = "Check the disk, or use another folder."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            way_out = "Free space, or use fewer views. The rows that were written remain valid."
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            way_out = "Make the folder writable, or use another folder."
        message = f"A feature cache cannot be written to {path.parent}, because of {error}. {way_out}"
        raise GpuAugError(message) from error


@dataclass(slots=True)
class RowBlock:
    """N rows of a view with equal columns and inputs, to be written to a shard."""

    folder: Path
    """Folder of the view."""
    epoch: int
    """Epoch in which the rows were encoded."""
    ids: NDArray[np.int64]
    """(N, 3) ``RowId`` of the sample of each row (two integers), and hash of its inputs."""
    names: Sequence[str]
    """Name of the sample of each row, for readers other than gpuaug."""
    inputs: tuple[str, ...]
    """Names of the inputs of the rows (``inputs.py``)."""
    columns: dict[str, Tensor]
    """Name of a column → (N, …) tensor, or a flat tensor if the shape varies."""
    shapes: dict[str, NDArray[np.int64]]
    """Name of a column of varying shape → (N, axes) shape in each row."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of the columns."""
        return sum(values.nbytes for values in self.columns.values())

    def shard_content(self) -> bytes:
        """Return the content of a shard with these rows, whose columns must be on the host."""
        encoded_names = [name.encode(errors="surrogateescape") for name in self.names]
        row_tensors = {
            "row.epoch": torch.tensor([self.epoch], device="cpu"),
            "row.id": torch.from_numpy(self.ids),
            "row.name": torch.frombuffer(bytearray(b"".join(encoded_names) + b"\0"), dtype=torch.uint8),
            "row.name_end": torch.tensor([len(name) for name in encoded_names], device="cpu").cumsum(0),
            **{f"row.shapes.{name}": torch.from_numpy(values) for name, values in self.shapes.items()},
        }
        shard = Shard(self.columns, row_tensors, self.inputs)  # created only to compute the checksums of the rows
        row_tensors["row.checksum"] = torch.tensor([shard.checksum(row) for row in range(len(self.ids))], device="cpu")
        about = json.dumps({"view": _view_of(self.folder), "inputs": self.inputs})
        metadata = {"columns": json.dumps(list(self.columns)), "about": about, "checksum": _digest(row_tensors, about)}
        content: bytes = required_safetensors().torch.save({**self.columns, **row_tensors}, {"format": "pt", **metadata})
        return content


class Shard:
    """Reader of the rows of a shard.

    Args:
        columns: Name of a column → tensor of all rows.
        row_tensors: Tensors ``row.…`` of the shard, which identify and check the rows.
        inputs: Names of the inputs of the rows.
    """

    def __init__(self, columns: Mapping[str, Tensor], row_tensors: Mapping[str, Tensor], inputs: Iterable[str]) -> None:
        self._columns = columns
        self.epoch = int(row_tensors["row.epoch"])
        """Epoch in which the rows were encoded."""
        self.ids: NDArray[np.int64] = row_tensors["row.id"].numpy()
        """(N, 3) ``RowId`` of the sample of each row, and hash of its inputs."""
        self.inputs = tuple(inputs)
        """Names of the inputs of the rows."""
        self._unchecked: dict[int, int] = {}
        """Index of a row → its checksum in the file, for the rows that this process has not checked yet."""
        self._shapes = {name: row_tensors[f"row.shapes.{name}"] for name in columns if has_varying_shape(name)}
        self._bytes: dict[str, tuple[memoryview, list[int]]] = {}
        """Name of a column → (bytes of all rows; offset of each row in them in bytes, then their total number)."""
        for name, column in columns.items():
            if name in self._shapes:
                lengths = self._shapes[name].prod(1)
            else:
                lengths = torch.full((len(self.ids),), column[0].numel(), device="cpu")
            self._bytes[name] = as_bytes(column), [0, *(lengths.cumsum(0) * column.itemsize).tolist()]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Map a shard into memory.

        Raises:
            ShardError: If the file cannot be read, as when its length is wrong; if the checksum of the tensors ``row.…`` is
                wrong; or if the file was written for the folder of another view or key.
            DeviceError: If the package safetensors is not installed.
        """
        safetensors = required_safetensors()
        try:
            with safetensors.safe_open(path, "pt") as file:  # tensors are mapped: the file is read when values are read
                metadata = file.metadata()
                columns = {name: file.get_tensor(name) for name in json.loads(metadata["columns"])}
                row_tensors = {key: file.get_tensor(key).clone() for key in file.keys() if key not in columns}  # noqa: SIM118
        except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ShardError(str(error)) from error
        about = metadata.get("about", "")
        if _digest(row_tensors, about) != metadata.get("checksum"):
            raise ShardError("its checksum is wrong")
        facts = json.loads(about)
        if facts["view"] != _view_of(path.parent):
            raise ShardError(f"it belongs into the folder {facts['view']}")
        shard = cls(columns, row_tensors, facts["inputs"])
        shard._unchecked = dict(enumerate(row_tensors["row.checksum"].tolist()))
        return shard

    def read_ahead(self, index: int) -> None:
        """Ask the operating system to read a row from the disk, without waiting for it.

        Otherwise, a row of the memory-mapped file is read by page faults, one after another, each with the pages around it. On
        a virtual disk, with 64 rows at a time in random order, rows of 64 KiB are read at 889 instead of 219 MB/s, and for rows
        of 2 KiB the disk reads twice their bytes instead of the whole file (2026-11-29).
        """
        for column, (_, offsets) in zip(self._columns.values(), self._bytes.values(), strict=True):
            begin, end = (column.data_ptr() + offset for offset in offsets[index : index + 2])
            begin -= begin % mmap.PAGESIZE
            if _LIBC is not None:
                _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _WILL_NEED)

    def row(self, index: int) -> Row | None:
        """Return a row, whose parts share the memory of the columns; ``None`` if its bytes are damaged."""
        if index in self._unchecked:
            if self.checksum(index) != self._unchecked[index]:
                return None
            del self._unchecked[index]
        parts = {}
        for name, column in self._columns.items():
            if name in self._shapes:
                begin, end = (offset // column.itemsize for offset in self._bytes[name][1][index : index + 2])
                parts[name] = column[begin:end].reshape(self._shapes[name][index].tolist())
            else:
                parts[name] = column[index]
        return parts

    def checksum(self, index: int) -> int:
        """Return the CRC-32 of the bytes of a row in all columns."""
        value = 0
        for content, offsets in self._bytes.values():
            value = zlib.crc32(content[offsets[index] : offsets[index + 1]], value)
        return value


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the values of a strided tensor on the CPU as bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _view_of(folder: Path) -> str:
    """Return "KEY/view-NUMBER", the last two names in the path of the folder of a view."""
    return "/".join(folder.parts[-2:])


def _digest(row_tensors: Mapping[str, Tensor], about: str) -> str:
    """Return a hash of what describes the rows of a shard: the tensors ``row.…``, and the text ``about``."""
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    for name in sorted(row_tensors):
        digest.update(name.encode())
        digest.update(as_bytes(row_tensors[name]))
    return digest.hexdigest()
