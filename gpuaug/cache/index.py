"""Index of a view: file and position of the row of a sample, by the sample's ``RowId``.

A *row* is the recorded results of a loader's stages for one sample. A *view* is a folder with the rows that were recorded in
one epoch. If an epoch that reads the view finds rows missing, it adds them to the view. A *shard* is a file of rows,
``<number>-<process>-<time>.safetensors``. New shards have larger numbers.

A ``RowId`` identifies a sample by two integers: a hash of its name, and of size and time of the last change of its file. In
place of size and time, an image in memory has a hash of its bytes (``core/encoded.py``). A row is valid only for the values
that members of the sample had when the stages have overwritten them, such as boxes: the *inputs* of the row (``inputs.py``). A
third integer is the hash of these values.
"""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpuaug.cache.inputs import combined, input_hashes
from gpuaug.cache.shards import SUFFIX, Shard, ShardError
from gpuaug.core.encoded import Row, RowId

_log = logging.getLogger("gpuaug")


class ShardFile(NamedTuple):
    """File of a shard."""

    number: int
    path: Path
    size: int
    time: int
    """Time of the last change in nanoseconds."""


def shard_files(folder: Path) -> list[ShardFile]:
    """Return the shards in the folder of a view, in ascending order of the numbers."""
    files = []
    with suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            number = entry.name.partition("-")[0]
            if entry.name.endswith(SUFFIX) and number.isdecimal():
                with suppress(FileNotFoundError):  # deleted by another process, or a broken link
                    status = entry.stat()
                    files.append(ShardFile(int(number), Path(entry.path), status.st_size, status.st_mtime_ns))
    return sorted(files)


def last_shard_number(folder: Path) -> int:
    """Return the largest number of a shard in the folder of a view; -1 without shards."""
    return max((file.number for file in shard_files(folder)), default=-1)


@cache
def _checked_shard(file: ShardFile) -> Shard | None:
    """Return the shard in a file; ``None`` if it is damaged. Cached: a file is read again only if its size or time changes."""
    try:
        return Shard.read(file.path)
    except ShardError as error:
        _log.warning("The rows in %s are encoded again, because the file is damaged: %s.", file.path, error)
        return None


class Index:
    """Index of the rows of one view that were in its folder at the beginning of the current epoch.

    Args:
        folder: Folder of the view.
        last_number: Largest number of a shard to read. Shards with larger numbers were written in the current epoch.
    """

    def __init__(self, folder: Path, last_number: int) -> None:
        self._shards: list[Shard] = []
        for file in shard_files(folder):
            shard = _checked_shard(file) if file.number <= last_number else None
            if shard is not None:
                self._shards.append(shard)
        # A view may have several rows of a sample: if a rank (a process of distributed training) begins an epoch before
        # another rank has written the row of an earlier epoch, it encodes the sample again. ``find`` returns the first of these
        # rows. In this order, it is the row of the earliest epoch, as if that row had been written in time.
        self._shards.sort(key=lambda shard: shard.epoch)
        # Rows of an earlier release, which are only counted, have ids of more integers.
        ids = np.concatenate([shard.ids for shard in self._shards] or [np.empty((0, 3), np.int64)])
        lengths = [len(shard.ids) for shard in self._shards]
        shard_of_row = np.repeat(np.arange(len(lengths)), lengths)
        first_rows = np.cumsum(lengths) - lengths  # index, among the rows of all shards, of the first row of each shard
        order = np.argsort(ids[:, 0], kind="stable")
        self._ids = ids[order]
        """(N, 3) ``RowId`` and hash of the inputs of each row of all shards, sorted by the first integer."""
        self._positions = np.column_stack([shard_of_row, np.arange(len(ids)) - first_rows[shard_of_row]])[order]
        """(N, 2) index of the shard, and index of the row in the shard, of each row in ``_ids``."""
        self._first_integers = np.ascontiguousarray(self._ids[:, 0])
        """(N,) first column of ``_ids``, in which ``find`` searches."""

    def __len__(self) -> int:
        """Return the number of rows, counting rows of one sample with the same inputs once."""
        return len(np.unique(self._ids, axis=0))

    def find(self, row_ids: Sequence[RowId], samples: Sequence[Any]) -> list[Row | None]:
        """Return the row of each sample; ``None`` if it has no row, if its inputs have changed, or if the row is damaged.

        Args:
            row_ids: ``RowId`` of each sample.
            samples: The samples, from which the inputs are hashed.
        """
        searched = np.array(row_ids, np.int64).reshape(-1, 2)[:, 0]
        begins = np.searchsorted(self._first_integers, searched).tolist()
        ends = np.searchsorted(self._first_integers, searched, side="right").tolist()
        rows_of_samples = [self._rows_between(*arguments) for arguments in zip(row_ids, samples, begins, ends, strict=True)]
        for shard, row_index in chain.from_iterable(rows[:1] for rows in rows_of_samples):
            shard.read_ahead(row_index)  # for the rows of all samples, before the first access waits for the disk
        return [_first_undamaged(rows) for rows in rows_of_samples]

    def _rows_between(self, row_id: RowId, sample: Any, begin: int, end: int) -> list[tuple[Shard, int]]:
        """Return (shard, index of the row in it) for the rows ``begin`` … ``end`` - 1 of ``_ids`` that belong to a sample."""
        rows = []
        for position in range(begin, end):
            *identity, inputs_hash = self._ids[position].tolist()
            shard_index, row_index = self._positions[position].tolist()
            shard = self._shards[shard_index]
            if tuple(identity) == row_id and inputs_hash == combined(input_hashes(sample, shard.inputs).values()):
                rows.append((shard, row_index))
        return rows


def _first_undamaged(rows: Sequence[tuple[Shard, int]]) -> Row | None:
    """Return the first row that is not damaged, or ``None``. ``rows``: (shard, index of the row in it) of each row."""
    rows_or_none = (shard.row(row_index) for shard, row_index in rows)
    return next((row for row in rows_or_none if row is not None), None)
