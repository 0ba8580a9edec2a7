"""``Recorder``: copies rows of a feature cache to the host, and writes them to files on a background thread.

A *row* is the results of the stages up to an encoder for one sample: one tensor per *column* (``core/encoded.py``). Its
*inputs* are the values of members of the sample for which it is valid (``inputs.py``). A *shard* is a file of rows. A *lane* is
a CUDA stream of the loader.

The training thread makes all CUDA calls: it queues the copies, asks whether they have ended, and frees the memory. The
background thread, of ``Recorder._executor``, only reads memory of the host and writes files.
"""

import os
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.cache.index import last_shard_number
from gpuaug.cache.shards import SUFFIX, shard_content, write_file
from gpuaug.core.encoded import has_varying_shape
from gpuaug.core.errors import GpuAugWarning
from gpuaug.core.streams import Event, Lane

MAX_WAITING_BYTES = 1 << 30
"""If rows of at least this many bytes wait in page-locked memory, the rows of the next batch are not recorded."""

SHARD_BYTES = 64 << 20
"""Number of bytes of rows from which a shard is written."""

SHARD_SECONDS = 30.0
"""Time after which rows are written even if they have fewer than ``SHARD_BYTES``.

If the process is killed, the rows of about this time are lost.
"""


@dataclass(slots=True)
class Record:
    """Rows of one batch on their way to a shard."""

    folder: Path
    """Folder of the shards: of a view, the rows that were recorded in one epoch."""
    epoch: int
    """Epoch in which the rows were encoded."""
    ids: NDArray[np.int64]
    """(N, 5) ``RowId`` of the sample of each row (four integers), and hash of its inputs."""
    names: list[str]
    """Name of the sample of each row."""
    inputs: tuple[str, ...]
    """Names of the inputs, which are the same for all rows."""
    columns: dict[str, Tensor]
    """Name of a column → (N, …) tensor on the host, or a flat tensor if the shape varies."""
    shapes: dict[str, NDArray[np.int64]]
    """Name of a column of varying shape → (N, axes) shape in each row."""
    copied: Event
    """Event that is recorded after the copies to the host."""
    sources: list[Tensor]
    """Copied tensors on the device. Kept until ``copied`` is complete, because then any lane may reuse their memory."""
    reading: "Future[None] | None" = None
    """Done when the background thread has read ``columns``; ``None`` before the record is passed to the thread."""

    @property
    def shard_key(self) -> Any:
        """Value that is equal for records that can be concatenated in one shard."""
        columns = [(name, values.dtype, values.shape[1:]) for name, values in self.columns.items()]
        return self.folder, self.epoch, self.inputs, *columns, *(shapes.shape[1] for shapes in self.shapes.values())

    @property
    def nbytes(self) -> int:
        """Number of bytes of the columns."""
        return sum(values.nbytes for values in self.columns.values())


class Recorder:
    """Writer of rows to the folder of a cache.

    Call ``record`` for each batch with missing rows, and ``close`` at the end of an epoch.

    Args:
        lane: Lane of the copies to the host.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._waiting: deque[Record] = deque()
        """Records whose host memory is not freed yet, oldest first."""
        self._executor: ThreadPoolExecutor | None = None
        """Executor of the background thread; ``None`` before the first rows of an epoch are on the host."""
        self._shards: dict[Any, list[Record]] = {}
        """``Record.shard_key`` → records of the next shard. Used by the background thread only."""
        self._flushed_s = 0.0
        """``time.monotonic()`` at the last write of all records, or when the thread was started."""
        self._error: BaseException | None = None
        """Error of the background thread that ``poll`` has not raised yet."""
        self._has_failed = False
        """Whether rows could not be written in this epoch. Then no more rows of the epoch are written."""
        self.written = 0
        """Number of rows that were written to shards."""
        self.dropped = 0
        """Number of rows that were not recorded, because too many rows were waiting."""

    def record(
        self,
        folder: Path,
        epoch: int,
        ids: NDArray[np.int64],
        names: list[str],
        inputs: tuple[str, ...],
        columns: Mapping[str, Sequence[Tensor]],
        lane: Lane,
    ) -> None:
        """Queue the copy of N rows to the host. Later calls of ``poll`` pass them to the background thread.

        The rows are first concatenated on ``lane``, because later work on ``lane``, or of the user, may change them in place.

        Args:
            folder: See ``Record`` for this and the next four arguments.
            epoch: Epoch in which the rows were encoded.
            ids: (N, 5) ``RowId`` and hash of the inputs.
            names: Name of the sample of each row.
            inputs: Names of the inputs.
            columns: Name of a column → list of its part of each row, on the device.
            lane: Lane that has written the columns last. It must be current.

        Raises:
            GpuAugError: If earlier rows could not be written.
        """
        self.poll()
        waiting_bytes = sum(record.nbytes for record in self._waiting)
        if waiting_bytes >= MAX_WAITING_BYTES:
            if not self.dropped:
                warnings.warn(
                    f"Rows of the feature cache are not written, because the disk of {folder} is too slow: "
                    f"{waiting_bytes / 1e9:.1f} GB are waiting. They are encoded again in later epochs. Use a faster disk.",
                    GpuAugWarning,
                    stacklevel=2,
                )
            self.dropped += len(ids)
            return
        sources = {}
        shapes = {}
        for name, parts in columns.items():
            if has_varying_shape(name):
                shapes[name] = np.array([part.shape for part in parts], np.int64).reshape(len(parts), -1)
                sources[name] = torch.cat([part.reshape(-1) for part in parts])
            else:
                sources[name] = torch.stack(list(parts))
        self._lane.wait(lane.record_event())
        self._lane.make_current()
        on_host = {}
        for name, source in sources.items():
            on_host[name] = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)
            on_host[name].copy_(source, non_blocking=True)
        copied = self._lane.record_event()
        lane.make_current()
        self._waiting.append(Record(folder, epoch, ids, names, inputs, on_host, shapes, copied, list(sources.values())))

    def poll(self) -> None:
        """Pass rows whose copy is complete to the background thread, and free the memory of rows that the thread has read.

        Raises:
            GpuAugError: If rows could not be written.
        """
        for record in self._waiting:
            if record.reading is None and record.copied.query():
                self._pass_on(record)
        while self._waiting and (reading := self._waiting[0].reading) is not None and reading.done():
            # Freed here, because the background thread, which may still refer to the record, must not free page-locked memory.
            self._waiting.popleft().columns.clear()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self, *, raises: bool = True) -> None:
        """Write all rows, end the background thread, and wait for it.

        Args:
            raises: Whether to raise an error of the thread now. If not, the next call of ``poll`` or ``close`` raises it.

        Raises:
            GpuAugError: If rows could not be written.
        """
        for record in self._waiting:
            if record.reading is None:
                self._pass_on(record)
        if self._executor is not None:
            self._executor.submit(self._add, None)
            self._executor.shutdown()
            self._executor = None
        self._waiting.clear()
        self._has_failed = False
        if raises:
            self.poll()

    def _pass_on(self, record: Record) -> None:
        """Wait until a record is on the host, and pass it to the background thread, which is started if necessary."""
        record.copied.synchronize()
        record.sources.clear()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "gpuaug cache")
            self._flushed_s = time.monotonic()
        record.reading = self._executor.submit(self._add, record)

    def _add(self, record: Record | None) -> None:
        """Add a record to its shard, and write the shards that are large or old enough. With ``None``, write all shards.

        Runs on the background thread.
        """
        try:
            if record is not None and not self._has_failed:
                # Copied to pageable memory, so that the page-locked memory can be freed before the shard is written.
                columns = {name: column.clone() for name, column in record.columns.items()}
                self._shards.setdefault(record.shard_key, []).append(replace(record, columns=columns))
            writes_all = record is None or time.monotonic() - self._flushed_s >= SHARD_SECONDS
            for key, records in list(self._shards.items()):
                if writes_all or sum(record.nbytes for record in records) >= SHARD_BYTES:
                    self._write(self._shards.pop(key))
            self._flushed_s = time.monotonic() if writes_all else self._flushed_s
        except BaseException as error:  # raised on the training thread
            # The traceback is removed, because it refers to records, whose memory this thread must not be the last to free.
            self._error = error.with_traceback(None)
            self._has_failed = True
            self._shards.clear()

    def _write(self, records: list[Record]) -> None:
        """Write records of one ``shard_key`` to a shard with the next number.

        Another process may choose the same number. The names of the files still differ, by process and time.
        """
        folder = records[0].folder
        number = last_shard_number(folder) + 1
        columns = {name: torch.cat([record.columns[name] for record in records]) for name in records[0].columns}
        shapes = {name: np.concatenate([record.shapes[name] for record in records]) for name in records[0].shapes}
        names = [name for record in records for name in record.names]
        ids = np.concatenate([record.ids for record in records])
        path = folder / f"{number:06d}-{os.getpid():x}-{time.time_ns():x}{SUFFIX}"
        write_file(path, shard_content(folder, records[0].epoch, ids, names, columns, shapes, records[0].inputs))
        self.written += len(names)
