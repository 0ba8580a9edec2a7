"""Data set of ``FeatureCache.wrap``: a user's data set whose samples have rows of the cache in place of images.

A *row* is the recorded results of a loader's stages for one sample. A *view* is a folder with the rows that were recorded in
one epoch, in files, the *shards*, with ascending numbers. The *key* of a cache is a hash of all that rows depend on besides
their sample. A ``RowId`` identifies a sample. A *member* is an entry of a sample: the value of a key of a
dict, an item of a tuple, or a field.
"""

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from gpuaug.cache.index import Index
from gpuaug.cache.inputs import digest_of, input_hashes
from gpuaug.core import batch as batches
from gpuaug.core.encoded import RowId
from gpuaug.core.errors import ArgumentError, shown
from gpuaug.decode.clips.read_clip import Clip
from gpuaug.decode.encoded_input import CachedFile, EncodedFile, are_encoded, name_and_bytes

_FORWARDED = ("epoch", "set_epoch", "state_dict", "load_state_dict", "worker_init_fn")
"""Attributes that loaders read of a data set if they exist. The wrapper returns the attributes of the wrapped data set."""

_NO_IMAGES = {int, float, str}
"""Types of members that are never images. Members of other types are examined."""

_HALVES = struct.Struct("<2q")
"""Layout of a hash of 16 bytes as two 64-bit integers."""

_CONTAINERS = {dict, list, tuple}
"""Containers whose items may be data sets."""


class ViewToRead:
    """Setting which view workers read. The main process changes it before each epoch, in memory that it shares with workers.

    The workers of a ``DataLoader`` get it with the data set. A copy of the data set, such as by ``deepcopy``, has separate
    memory, which it shares with its own workers.
    """

    def __init__(self) -> None:
        self._shared = torch.full((4,), -1, dtype=torch.int64, device="cpu").share_memory_()
        """Two halves of the key, number of the view, largest number of a shard to read. All are -1 before the first epoch."""
        self._opened: tuple[list[int], Index | None] = ([], None)
        """(values of ``_shared``, index for these values) of the last call of ``index`` in this process."""
        self.version = 0
        """Number of times that ``set`` has changed the key or the view, in the main process."""

    def set(self, key: str, view: int, last_number: int) -> None:
        """Set the view to read.

        Args:
            key: Key of the cache, 16 hexadecimal digits.
            view: Number of the view; -1 to read no rows.
            last_number: Largest number of a shard to read. Later shards are written during the epoch.
        """
        key_and_view = [int(key[:8], 16), int(key[8:], 16), view]
        self.version += key_and_view != self._shared[:3].tolist()
        self._shared.copy_(torch.tensor([*key_and_view, last_number], device="cpu"))

    def index(self, folder: Path) -> Index | None:
        """Return the index of the view to read, or ``None`` to read no rows. ``folder``: folder of the cache."""
        values: list[int] = self._shared.tolist()
        if values != self._opened[0]:
            first, second, view, last_number = values
            index = None if view < 0 else Index(view_folder(folder, f"{first:08x}{second:08x}", view), last_number)
            self._opened = values, index
        return self._opened[1]

    def __getstate__(self) -> Any:
        return self._shared

    def __setstate__(self, shared: torch.Tensor) -> None:
        self._shared = shared.share_memory_()  # no effect in a worker: its tensor is shared
        self._opened = ([], None)
        self.version = 0


def view_folder(folder: Path, key: str, view: int) -> Path:
    """Return the folder of the shards of one view. ``folder``: folder of the cache."""
    return folder / key / f"view-{view}"


class _WrappedDataset:
    """Base class of the data sets of ``FeatureCache.wrap``.

    Args:
        dataset: Data set of the user.
        folder: Folder of the cache.
        key: Name of the member that identifies a sample (not the key of the cache); ``None`` to identify samples by the paths
            of their images, or hashes of the images' bytes.
    """

    def __init__(self, dataset: Any, folder: Path, key: Any) -> None:
        self.dataset = dataset
        self.view = ViewToRead()
        self.folder = folder
        self.key = key

    def __getattr__(self, name: str) -> Any:
        if name in _FORWARDED and "dataset" in vars(self):
            return getattr(self.dataset, name)
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}. The data set is its attribute dataset."
        )

    def __len__(self) -> int:
        return len(self.dataset)

    gpuaug_unwrapped = property(attrgetter("dataset"), doc="Data set of the user, for functions that depend on its type.")

    def with_rows(self, samples: Sequence[Any]) -> list[Any]:
        """Return samples with their images replaced by ``CachedFile`` objects, which hold the row if it is in the cache.

        If a sample has several images, the first ``CachedFile`` holds the row, and the others hold an empty row.
        """
        results = list(map(self._with_files, samples))
        index = self.view.index(self.folder)
        if index is not None:
            rows = index.find([files[0].row_id for _, files in results], [result for result, _ in results])
            for (result, files), row in zip(results, rows, strict=True):
                # To record a missing row, the main process needs hashes of the other members of the sample.
                inputs = input_hashes(result) if row is None else {}
                for file in files:
                    file.inputs = inputs
                    file.row = {} if file.number and row is not None else row
        return [result for result, _ in results]

    def _with_files(self, sample: Any) -> tuple[Any, list[CachedFile]]:
        """Return a sample with its images replaced by ``CachedFile`` objects without rows, and a list of these objects."""
        files: list[CachedFile] = []

        # ``are_encoded`` and ``name_and_bytes`` take the path of a value in its sample: "" if the sample itself is the image.
        # Then text is the path of a file. A member that is text is no image.
        def collect(value: Any) -> CachedFile:
            files.append(CachedFile(*name_and_bytes(value, "" if value is sample else "member", "a sample")))
            return files[-1]

        result = batches.map_members(collect, lambda value: _is_image(value, "" if value is sample else "member"), sample)
        if not files:
            raise ArgumentError(
                f"A sample of a wrapped data set must have an encoded image, got {shown(sample)}. "
                "Return gpuaug.read_encoded(path), or the bytes of a file, from the data set."
            )
        name, row_id = self._identity(sample, files)
        for number, file in enumerate(files):
            file.name = name
            file.row_id = row_id
            file.number = number
        return result, files

    def _identity(self, sample: Any, files: Sequence[CachedFile]) -> tuple[str, RowId]:
        """Return the name and the ``RowId`` of a sample. ``files``: its images."""
        names, versions = zip(*(_name_and_version(file.path, file.content) for file in files), strict=True)
        name = "\n".join(names) if self.key is None else self._value_of_key(sample)
        return str(name), _HALVES.unpack(digest_of((name, str(versions)), 16))

    def _value_of_key(self, sample: Any) -> Any:
        """Return the member that identifies a sample."""
        try:
            return batches.member(sample, self.key)
        except (AttributeError, LookupError, TypeError):
            raise ArgumentError(
                f"key must name a member of each sample, got {self.key!r} for {shown(sample)}. "
                "Leave it out, and samples are identified by their images."
            ) from None


def _is_image(value: Any, member_path: str) -> bool:
    """Return whether a value is an encoded image. ``member_path``: "" if the value is a sample, else not empty."""
    if type(value) is EncodedFile:
        return True
    if type(value) is Clip or (member_path and type(value) in _NO_IMAGES):
        return False
    return are_encoded([value], member_path)


def _name_and_version(path: str, content: memoryview | None) -> tuple[str, str]:
    """Return the absolute path of the file of an image, and its size and the time of its last change as text.

    For an image in memory, ``content``, both are a hash of the bytes.
    """
    if content is not None:
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        return digest, digest
    try:
        path = os.path.abspath(path)
        status = os.stat(path)
    except (OSError, ValueError):  # reported when the batch is collated
        return path, ""
    return path, f"{status.st_size} {status.st_mtime_ns}"


class CachedDataset(_WrappedDataset, Dataset[Any]):
    """Map-style data set whose samples have rows of a cache in place of images."""

    def __getitem__(self, index: Any) -> Any:
        return self.with_rows([self.dataset[index]])[0]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        read = getattr(self.dataset, "__getitems__", None)
        samples = read(indices) if callable(read) else [self.dataset[index] for index in indices]
        return self.with_rows(samples)


class CachedIterable(_WrappedDataset, IterableDataset[Any]):
    """Iterable data set whose samples have rows of a cache in place of images."""

    def __iter__(self) -> Iterator[Any]:
        return (self.with_rows([sample])[0] for sample in self.dataset)


def wrapped_datasets(source: Any) -> list[_WrappedDataset]:
    """Return the data sets of ``FeatureCache.wrap`` inside a loader, or inside a data set that consists of data sets.

    Searched are the attributes of all objects that are iterable or indexable, and the items of lists, tuples and dicts.
    """
    wrapped: list[_WrappedDataset] = []
    seen: set[int] = set()
    pending = [source]
    for value in pending:  # grows in the loop
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _WrappedDataset):
            wrapped.append(value)
        elif type(value) in _CONTAINERS:
            # Only items that may be data sets or loaders are searched, because lists of samples are long.
            items = value.values() if isinstance(value, dict) else value
            pending += [item for item in items if hasattr(item, "__dict__") and _has_items(item)]
        elif _has_items(value):
            pending += getattr(value, "__dict__", {}).values()
    return wrapped


def _has_items(value: Any) -> bool:
    """Return whether a value may be a data set or loader: it is iterable or indexable."""
    return hasattr(type(value), "__getitem__") or hasattr(type(value), "__iter__")
