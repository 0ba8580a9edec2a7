"""Recorder: copies rows of a batch to the host, and writes them to shards on a thread.

The training thread makes all CUDA calls: it queues the copies, asks whether they have ended, and frees the memory. The thread
only reads memory of the host and writes files.
"""

import errno
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.cache.index import shard_numbers
from gpuaug.cache.shards import SUFFIX, write
from gpuaug.core.encoded import varies
from gpuaug.core.errors import GpuAugError, GpuAugWarning
from gpuaug.core.streams import Event, Lane

MAX_WAITING_BYTES = 1 << 30
"""Bytes of rows that may wait in page-locked memory. Rows of further batches are not recorded."""

SHARD_BYTES = 64 << 20
"""Bytes of rows after which a shard is written."""

SHARD_SECONDS = 30.0
"""Time after which a shard is written that has not reached ``SHARD_BYTES``: the rows that a killed process may lose."""


@dataclass(slots=True)
class Record:
    """Rows of one batch on their way to a shard."""

    view: Path
    """Folder of the shards."""
    epoch: int
    """Epoch in which the rows were encoded."""
    ids: NDArray[np.int64]
    """(N, 4) ``RowId`` of the rows."""
    names: list[str]
    columns: dict[str, Tensor]
    """Name of a column → (N, …) tensor on the host, or a flat tensor if the shape varies."""
    shapes: dict[str, NDArray[np.int64]]
    """Name of a column of varying shape → (N, axes) shape in each row."""
    copied: Event
    """Event after the copies to the host."""
    sources: list[Tensor]
    """Tensors on the device. Referenced until the host has seen the event: then any lane may reuse their memory."""
    read: bool = False
    """Whether the thread no longer reads ``columns``."""

    @property
    def kind(self) -> Any:
        """Object that is equal for records that may share a shard."""
        shapes = [(name, values.dtype, () if varies(name) else values.shape[1:]) for name, values in self.columns.items()]
        return self.view, self.epoch, tuple(shapes), tuple(values.shape[1] for values in self.shapes.values())


class Recorder:
    """Writes rows to the folder of a cache.

    Args:
        lane: Lane of the copies to the host.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._waiting: deque[Record] = deque()
        """Records whose memory is in use."""
        self._copying: deque[Record] = deque()
        self._queue: SimpleQueue[Record | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.written = 0
        """Number of rows that were written to shards."""
        self.dropped = 0
        """Number of rows that were not recorded, because too many batches were waiting."""

    def record(
        self,
        view: Path,
        epoch: int,
        ids: NDArray[np.int64],
        names: list[str],
        columns: Mapping[str, Sequence[Tensor]],
        lane: Lane,
    ) -> None:
        """Queue the copy of rows to the host.

        Later work on ``lane``, and of the user, may change the columns in place: they are put together on ``lane``.

        Args:
            view: Folder of the shards.
            epoch: Epoch of the rows.
            ids: (N, 4) ``RowId`` of the rows.
            names: Name of each row.
            columns: Name of a column → its part of each row, on the device.
            lane: Lane that has written the columns last, which is current.

        Raises:
            GpuAugError: If earlier rows could not be written.
        """
        self.poll()
        waiting_bytes = sum(column.nbytes for record in self._waiting for column in record.columns.values())
        if waiting_bytes >= MAX_WAITING_BYTES:
            if not self.dropped:
                warnings.warn(
                    f"Rows of the feature cache are not written, because the disk of {view} is too slow: "
                    f"{waiting_bytes / 1e9:.1f} GB are waiting. They are encoded again in later epochs. Use a faster disk.",
                    GpuAugWarning,
                    stacklevel=2,
                )
            self.dropped += len(ids)
            return
        sources = {}
        shapes = {}
        for name, parts in columns.items():
            if varies(name):
                shapes[name] = np.array([part.shape for part in parts], np.int64).reshape(len(parts), -1)
            sources[name] = torch.cat([part.reshape(-1) for part in parts]) if varies(name) else torch.stack(list(parts))
        self._lane.wait(lane.record_event())
        self._lane.make_current()
        on_host = {}
        for name, source in sources.items():
            on_host[name] = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)
            on_host[name].copy_(source, non_blocking=True)
        record = Record(view, epoch, ids, names, on_host, shapes, self._lane.record_event(), list(sources.values()))
        lane.make_current()
        self._waiting.append(record)
        self._copying.append(record)

    def poll(self) -> None:
        """Pass rows that are on the host to the thread, and free memory that it has read.

        Raises:
            GpuAugError: If rows could not be written.
        """
        while self._copying and self._copying[0].copied.query():
            self._pass_on()
        while self._waiting and self._waiting[0].read:
            self._waiting.popleft().columns.clear()  # here: the thread may hold the record, and must not free its memory
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self, *, raises: bool = True) -> None:
        """Write all rows, and end the thread. ``raises``: otherwise, the next call of ``poll`` or ``close`` raises the error.

        Raises:
            GpuAugError: If rows could not be written.
        """
        while self._copying:
            self._pass_on()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self._waiting.clear()
        if raises:
            self.poll()

    def _pass_on(self) -> None:
        """Wait for the copy of the oldest record, and pass it to the thread."""
        record = self._copying.popleft()
        record.copied.synchronize()
        record.sources.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="gpuaug cache", daemon=True)
            self._thread.start()
        self._queue.put(record)

    def _write_all(self) -> None:
        """Write records until ``None`` arrives. After an error, drop them."""
        shards: dict[Any, list[Record]] = {}
        written_s = time.monotonic()
        ended = False
        failed = False
        while not ended:
            record = None
            with suppress(Empty):
                record = self._queue.get(timeout=SHARD_SECONDS)
                ended = record is None
            is_late = ended or time.monotonic() - written_s >= SHARD_SECONDS
            written_s = time.monotonic() if is_late else written_s
            try:
                if failed and record is not None:
                    record.read = True
                elif not failed:
                    self._add(shards, record, is_late=is_late)
            except BaseException as error:  # raised on the training thread
                self._error = error.with_traceback(None)  # frames refer to records, whose memory this thread must not free
                failed = True

    def _add(self, shards: dict[Any, list[Record]], record: Record | None, *, is_late: bool) -> None:
        """Add a record to its shard, and write shards: the large ones, or all if ``is_late``."""
        if record is not None:
            shards.setdefault(record.kind, []).append(_copied(record))
        for kind, records in list(shards.items()):
            if is_late or sum(column.nbytes for each in records for column in each.columns.values()) >= SHARD_BYTES:
                self._write(shards.pop(kind))

    def _write(self, records: list[Record]) -> None:
        """Write a shard with the next number. Other processes may take the same number: the names of their files differ."""
        view = records[0].view
        try:
            view.mkdir(parents=True, exist_ok=True)
            number = max((number for number, _ in shard_numbers(view)), default=-1) + 1
            columns = {name: torch.cat([each.columns[name] for each in records]) for name in records[0].columns}
            shapes = {name: np.concatenate([each.shapes[name] for each in records]) for name in records[0].shapes}
            names = [name for each in records for name in each.names]
            path = view / f"{number:06d}-{os.getpid():x}-{time.time_ns():x}{SUFFIX}"
            write(path, records[0].epoch, np.concatenate([each.ids for each in records]), names, columns, shapes)
            self.written += len(names)
        except OSError as error:
            raise write_error(view, error) from error


def _copied(record: Record) -> Record:
    """Return a record in ordinary memory, so that the page-locked memory is free."""
    try:
        return replace(record, columns={name: column.clone() for name, column in record.columns.items()})
    finally:
        record.read = True


def write_error(folder: Path, error: OSError) -> GpuAugError:
    """Return the error for the user about a file of a cache that could not be written."""
    way_out = "Check the disk, or use another folder."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        way_out = "Free space, or use fewer views: the rows that were written will be read."
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        way_out = "Make the folder writable, or use another folder."
    return GpuAugError(f"A feature cache cannot be written to {folder}, because of {error}. {way_out}")
