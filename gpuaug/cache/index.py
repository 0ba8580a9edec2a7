"""Index of a view: the shard and the place of each row, found by the identity of its sample."""

import logging
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from gpuaug.cache.shards import SUFFIX, Shard, ShardError
from gpuaug.core.rows import Row, RowId

_log = logging.getLogger("gpuaug")

_mapped: dict[tuple[str, int, int], Shard | None] = {}
"""(path, size, time of the last change) of each shard that this process has mapped → shard; ``None`` if it is damaged."""


def shard_numbers(view: Path) -> list[tuple[int, Path]]:
    """Return (number, path) of the shards in a folder, in order."""
    found = []
    with suppress(FileNotFoundError):
        for entry in os.scandir(view):
            number = entry.name.partition("-")[0]
            if entry.name.endswith(SUFFIX) and number.isdecimal():
                found.append((int(number), Path(entry.path)))
    return sorted(found)


def mapped(path: Path) -> Shard | None:
    """Return a shard, or ``None`` if it is damaged or has been deleted. Each process checks a shard once."""
    try:
        status = path.stat()
        key = (str(path), status.st_size, status.st_mtime_ns)
        if key not in _mapped:
            _mapped[key] = None
            _mapped[key] = Shard(path)
    except (OSError, ShardError) as error:
        _log.warning("The rows in %s are encoded again, because the file is damaged: %s.", path, error)
        return None
    return _mapped[key]


class Index:
    """Rows of one view that existed when an epoch began.

    Args:
        view: Folder of the shards.
        newest: Largest number of a shard to read. Later shards were written in this epoch.
    """

    def __init__(self, view: Path, newest: int) -> None:
        self._shards = [
            shard for number, path in shard_numbers(view) if number <= newest and (shard := mapped(path)) is not None
        ]
        ids = np.concatenate([np.empty((0, 4), np.int64), *(shard.ids for shard in self._shards)])
        lengths = [len(shard.ids) for shard in self._shards]
        shards = np.repeat(np.arange(len(lengths)), lengths)
        rows = np.concatenate([np.empty(0, np.int64), *map(np.arange, lengths)])
        newest_first = np.argsort(ids[::-1, 0], kind="stable")
        self._ids = ids[::-1][newest_first]
        self._places = np.column_stack([shards, rows])[::-1][newest_first]
        self._first_halves = np.ascontiguousarray(self._ids[:, 0])

    def __len__(self) -> int:
        return len(self._ids)

    def find(self, row_id: RowId) -> Row | None:
        """Return the newest row of a sample, or ``None`` if there is none, its file has changed, or the row is damaged."""
        place = int(np.searchsorted(self._first_halves, row_id[0]))
        while place < len(self._ids) and self._first_halves[place] == row_id[0]:
            if tuple(self._ids[place].tolist()) == row_id:
                shard, index = self._places[place].tolist()
                if (row := self._shards[shard].row(index)) is not None:
                    return row
            place += 1
        return None
