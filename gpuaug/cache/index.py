"""Index of a view: the shard and the place of each row, found by the identity of its sample."""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from gpuaug.cache.shards import SUFFIX, Shard, ShardError
from gpuaug.core.encoded import Row, RowId

_log = logging.getLogger("gpuaug")


def shard_numbers(view: Path) -> list[tuple[int, Path]]:
    """Return (number, path) of the shards in a folder, in order."""
    found = []
    with suppress(FileNotFoundError):
        for entry in os.scandir(view):
            number = entry.name.partition("-")[0]
            if entry.name.endswith(SUFFIX) and number.isdecimal():
                found.append((int(number), Path(entry.path)))
    return sorted(found)


@cache
def _mapped(path: Path, _size_and_time: tuple[int, int]) -> Shard | None:
    """Return a shard, which each process checks once; ``None`` if it is damaged."""
    try:
        return Shard(path)
    except ShardError as error:
        _log.warning("The rows in %s are encoded again, because the file is damaged: %s.", path, error)
        return None


class Index:
    """Rows of one view that existed when an epoch began.

    Args:
        view: Folder of the shards.
        newest: Largest number of a shard to read. Later shards were written in this epoch.
    """

    def __init__(self, view: Path, newest: int) -> None:
        self._shards: list[Shard] = []
        for number, path in shard_numbers(view):
            status = path.stat()
            shard = _mapped(path, (status.st_size, status.st_mtime_ns)) if number <= newest else None
            self._shards += [] if shard is None else [shard]
        # Of equal rows the first is read. Another rank may have encoded a row of an earlier epoch again before it was a file.
        self._shards.sort(key=lambda shard: shard.epoch)
        ids = np.concatenate([np.empty((0, 4), np.int64), *(shard.ids for shard in self._shards)])
        lengths = [len(shard.ids) for shard in self._shards]
        shards = np.repeat(np.arange(len(lengths)), lengths)
        rows = np.concatenate([np.empty(0, np.int64), *map(np.arange, lengths)])
        order = np.argsort(ids[:, 0], kind="stable")
        self._ids = ids[order]
        self._places = np.column_stack([shards, rows])[order]
        self._first_halves = np.ascontiguousarray(self._ids[:, 0])

    def __len__(self) -> int:
        return len(np.unique(self._ids, axis=0))

    def find(self, row_ids: Sequence[RowId]) -> list[Row | None]:
        """Return the row of each sample; ``None`` if there is none, its file has changed, or the row is damaged."""
        searched = np.array(row_ids, np.int64).reshape(-1, 4)
        begins = np.searchsorted(self._first_halves, searched[:, 0]).tolist()
        ends = np.searchsorted(self._first_halves, searched[:, 0], side="right").tolist()
        return [self._find_between(row_id, begin, end) for row_id, begin, end in zip(row_ids, begins, ends, strict=True)]

    def _find_between(self, row_id: RowId, begin: int, end: int) -> Row | None:
        """Return the row of a sample among the rows at ``begin`` … ``end`` - 1."""
        for place in range(begin, end):
            if tuple(self._ids[place].tolist()) == row_id:
                shard, index = self._places[place].tolist()
                row: Row | None = self._shards[shard].row(index)
                if row is not None:
                    return row
        return None
