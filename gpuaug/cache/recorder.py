"""Recorder: copies rows of a batch to the host, and writes them to shards on a thread.

The training thread makes all CUDA calls: it queues the copies, asks whether they have ended, and frees the memory. The thread
only reads memory of the host and writes files.
"""

import errno
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.cache.index import shard_numbers
from gpuaug.cache.shards import SUFFIX, write
from gpuaug.core.errors import GpuAugError
from gpuaug.core.rows import varies
from gpuaug.core.streams import Event, Lane

MAX_WAITING = 16
"""Maximum number of batches that wait to be copied or written. Rows of further batches are not recorded."""

SHARD_BYTES = 64 << 20
"""Bytes of rows after which a shard is written."""

SHARD_SECONDS = 30.0
"""Time after which a shard is written that has not reached ``SHARD_BYTES``: the rows that a killed process may lose."""

_log = logging.getLogger("gpuaug")


@dataclass(slots=True)
class Record:
    """Rows of one batch on their way to a shard."""

    view: Path
    """Folder of the shards."""
    ids: NDArray[np.int64]
    """(N, 4) ``RowId`` of the rows."""
    names: list[str]
    columns: dict[str, list[Tensor]]
    """Name of a column → its part of each row, on the host."""
    copied: Event
    """Event after the copies to the host."""
    memory: list[Tensor]
    """Page-locked memory of the columns."""
    written: bool = False
    """Whether the thread no longer reads the memory."""


@dataclass(slots=True)
class _Open:
    """Rows that will be one shard."""

    ids: list[NDArray[np.int64]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    columns: dict[str, list[Tensor]] = field(default_factory=dict)
    num_bytes: int = 0
    since_s: float = field(default_factory=time.monotonic)


class Recorder:
    """Writes rows to the folder of a cache.

    Args:
        lane: Lane of the copies to the host.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._records: deque[Record] = deque()
        self._copying: deque[Record] = deque()
        self._queue: SimpleQueue[Record | threading.Event | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._open: dict[Any, _Open] = {}
        self._error: BaseException | None = None
        self.written = 0
        """Number of rows that were written to shards."""
        self.dropped = 0
        """Number of rows that were not recorded, because too many batches were waiting."""

    def record(
        self, view: Path, ids: NDArray[np.int64], names: Sequence[str], columns: dict[str, Sequence[Tensor]], ready: Event
    ) -> Event | None:
        """Queue the copy of rows to the host. Their lane is current afterwards.

        Args:
            view: Folder of the shards.
            ids: (N, 4) ``RowId`` of the rows.
            names: Name of each row.
            columns: Name of a column → its part of each row, on the device.
            ready: Event after the last write to the columns.

        Returns:
            Event after the copies; ``None`` if the rows are not recorded.

        Raises:
            GpuAugError: If earlier rows could not be written.
        """
        self.poll()
        if len(self._records) >= MAX_WAITING:
            self.dropped += len(ids)
            return None
        self._lane.make_current()
        self._lane.wait(ready)
        memory = []
        parts: dict[str, list[Tensor]] = {}
        for name, tensors in columns.items():
            together = torch.cat([tensor.reshape(-1) for tensor in tensors]) if varies(name) else torch.stack(list(tensors))
            host = torch.empty(together.shape, dtype=together.dtype, device="cpu", pin_memory=together.is_cuda)
            host.copy_(together, non_blocking=True)
            memory.append(host)
            sizes = [tensor.numel() for tensor in tensors]
            parts[name] = [
                part.reshape(tensor.shape) for part, tensor in zip(host.reshape(-1).split(sizes), tensors, strict=True)
            ]
        event = self._lane.record_event()
        record = Record(view, ids, list(names), parts, event, memory)
        self._records.append(record)
        self._copying.append(record)
        self.poll()
        return event

    def poll(self, *, wait: bool = False) -> None:
        """Pass rows that are on the host to the thread, and free memory that was written. ``wait``: wait for all copies.

        Raises:
            GpuAugError: If rows could not be written.
        """
        while self._copying and (wait or self._copying[0].copied.query()):
            record = self._copying.popleft()
            record.copied.synchronize()
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="gpuaug cache", daemon=True)
                self._thread.start()
            self._queue.put(record)
        while self._records and self._records[0].written:
            self._records.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def flush(self) -> None:
        """Wait until all rows are in shards.

        Raises:
            GpuAugError: If rows could not be written.
        """
        self.poll(wait=True)
        if self._thread is not None:
            done = threading.Event()
            self._queue.put(done)
            done.wait()
        self.poll()

    def close(self) -> None:
        """Write all rows, and end the thread.

        Raises:
            GpuAugError: If rows could not be written.
        """
        try:
            self.flush()
        finally:
            if self._thread is not None:
                self._queue.put(None)
                self._thread.join()
                self._thread = None

    def _write_all(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=SHARD_SECONDS)
            except Empty:
                self._write_shards(older_than_s=SHARD_SECONDS)
                continue
            if item is None:
                return
            if isinstance(item, threading.Event):
                self._write_shards(older_than_s=0.0)
                item.set()
            else:
                self._add(item)
                item.written = True
                self._write_shards(older_than_s=SHARD_SECONDS)

    def _add(self, record: Record) -> None:
        """Copy rows from page-locked memory to a shard that is not written yet. Rows of one shape share a shard."""
        shapes = tuple(
            (name, parts[0].dtype, parts[0].dim() if varies(name) else parts[0].shape) for name, parts in record.columns.items()
        )
        shard = self._open.setdefault((record.view, shapes), _Open())
        shard.ids.append(record.ids)
        shard.names += record.names
        for name, parts in record.columns.items():
            shard.columns.setdefault(name, []).extend(part.clone() for part in parts)
            shard.num_bytes += sum(part.nbytes for part in parts)

    def _write_shards(self, *, older_than_s: float) -> None:
        """Write the shards that are large or old enough."""
        now = time.monotonic()
        for (view, shapes), shard in list(self._open.items()):
            if shard.num_bytes < SHARD_BYTES and now - shard.since_s < older_than_s:
                continue
            del self._open[view, shapes]
            try:
                write_shard(view, np.concatenate(shard.ids), shard.names, shard.columns)
                self.written += len(shard.names)
            except BaseException as error:
                self._error = self._error or _write_error(view, error)


def write_shard(view: Path, ids: NDArray[np.int64], names: Sequence[str], columns: dict[str, list[Tensor]]) -> Path:
    """Write a shard with the next number of a view. Of equal rows the first is kept.

    Processes that write at the same time may take the same number, because the names of their files differ.
    """
    _, first = np.unique(ids, axis=0, return_index=True)
    if len(first) < len(ids):
        kept = np.sort(first)
        ids, names = ids[kept], [names[index] for index in kept]
        columns = {name: [parts[index] for index in kept] for name, parts in columns.items()}
    view.mkdir(parents=True, exist_ok=True)
    shards = shard_numbers(view)
    number = shards[-1][0] + 1 if shards else 0
    path = view / f"{number:06d}-{os.getpid():x}-{time.time_ns():x}{SUFFIX}"
    write(path, ids, names, columns)
    return path


def _write_error(view: Path, error: BaseException) -> BaseException:
    """Return the error for the user about a shard that could not be written."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        way_out = "Free space, or use fewer views. The rows that are on the disk will be read."
    elif isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        way_out = "Make the folder writable, or leave cache= out."
    elif isinstance(error, OSError):
        way_out = "Check the disk, or use another folder."
    else:
        return error
    result = GpuAugError(f"Rows of a feature cache could not be written to {view}, because of {error}. {way_out}")
    result.__cause__ = error
    return result


def warn_if_too_large(folder: Path, row_bytes: int, rows: int) -> None:
    """Log the size that a cache will have, and warn if the disk has less space."""
    needed = row_bytes * rows
    free = shutil.disk_usage(folder).free
    text = f"The feature cache in {folder} will take about {needed / 1e9:.3g} GB; the disk has {free / 1e9:.3g} GB free"
    if needed > free:
        _log.warning("%s. Use fewer views, or another folder.", text)
    else:
        _log.info("%s.", text)
