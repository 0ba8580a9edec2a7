"""``Recorder``: copies rows of a feature cache to the host, and writes them to files on a background thread.

A *row* is the results of the stages up to an encoder for one sample: one tensor per *column* (``core/encoded.py``). Its
*inputs* are the values of members of the sample for which it is valid (``inputs.py``). A *shard* is a file of rows. A *lane* is
a CUDA stream of the loader.

The training thread makes all CUDA calls: it queues the copies, asks whether they have ended, and frees the memory. The
background thread, of ``Recorder._executor``, only reads memory of the host and writes files.
"""

import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.cache.index import last_shard_number
from gpuaug.cache.shards import SUFFIX, RowBlock, write_file
from gpuaug.core.errors import warn
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

    rows: RowBlock
    """The rows, with columns on the host."""
    copied: Event
    """Event that is recorded after the copies to the host."""
    sources: list[Tensor]
    """Copied tensors on the device. Kept until ``copied`` is complete, because then any lane may reuse their memory."""
    reading: "Future[None] | None" = None
    """Done when the background thread has read the columns; ``None`` before the record is passed to the thread."""


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
        self._shards: dict[Any, list[RowBlock]] = {}
        """``_shard_key`` → rows of the next shard. Used by the background thread only."""
        self._flushed_s = 0.0
        """``time.monotonic()`` at the last write of all shards, or when the thread was started."""
        self._errors: list[BaseException] = []
        """Errors of the background thread that ``poll`` has not raised yet."""
        self._has_failed = False
        """Whether rows could not be written in this epoch. Then no more rows of the epoch are written."""
        self.written = 0
        """Number of rows that were written to shards."""
        self.dropped = 0
        """Number of rows that were not recorded, because too many rows were waiting."""

    def record(self, rows: RowBlock, lane: Lane) -> None:
        """Queue the copy of rows to the host. Later calls of ``poll`` pass them to the background thread.

        Args:
            rows: The rows, with columns on the device that no later work changes.
            lane: Lane that has written the columns last. It must be current.

        Raises:
            GpuAugError: If earlier rows could not be written.
        """
        self.poll()
        waiting_bytes = sum(record.rows.nbytes for record in self._waiting)
        if waiting_bytes >= MAX_WAITING_BYTES:
            if not self.dropped:
                warn(
                    f"Rows of the feature cache are not written, because the disk of {rows.folder} is too slow: "
                    f"{waiting_bytes / 1e9:.1f} GB are waiting. They are encoded again in later epochs. Use a faster disk."
                )
            self.dropped += len(rows.ids)
            return
        self._lane.wait(lane.record_event())
        self._lane.make_current()
        sources = rows.columns
        rows.columns = {}
        for name, source in sources.items():
            rows.columns[name] = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)
            rows.columns[name].copy_(source, non_blocking=True)
        copied = self._lane.record_event()
        lane.make_current()
        self._waiting.append(Record(rows, copied, list(sources.values())))

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
            self._waiting.popleft().rows.columns.clear()
        if self._errors:
            raise self._errors.pop()

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
        record.reading = self._executor.submit(self._add, record.rows)

    def _add(self, rows: RowBlock | None) -> None:
        """Add rows to their shard, and write the shards that are large or old enough. With ``None``, write all shards.

        Runs on the background thread.
        """
        try:
            if rows is not None and not self._has_failed:
                # Copied to pageable memory, so that the page-locked memory can be freed before the shard is written.
                columns = {name: column.clone() for name, column in rows.columns.items()}
                self._shards.setdefault(_shard_key(rows), []).append(replace(rows, columns=columns))
            writes_all = rows is None or time.monotonic() - self._flushed_s >= SHARD_SECONDS
            for key, blocks in list(self._shards.items()):
                if writes_all or sum(block.nbytes for block in blocks) >= SHARD_BYTES:
                    self._write(self._shards.pop(key))
            self._flushed_s = time.monotonic() if writes_all else self._flushed_s
        except BaseException as error:  # raised on the training thread
            # The traceback is removed, because it refers to rows, whose memory this thread must not be the last to free.
            self._errors.append(error.with_traceback(None))
            self._has_failed = True
            self._shards.clear()

    def _write(self, blocks: list[RowBlock]) -> None:
        """Write rows of one ``_shard_key`` to a shard with the next number.

        Another process may choose the same number. The names of the files still differ, by process and time.
        """
        first = blocks[0]
        number = last_shard_number(first.folder) + 1
        rows = replace(
            first,
            ids=np.concatenate([block.ids for block in blocks]),
            names=[name for block in blocks for name in block.names],
            columns={name: torch.cat([block.columns[name] for block in blocks]) for name in first.columns},
            shapes={name: np.concatenate([block.shapes[name] for block in blocks]) for name in first.shapes},
        )
        path = first.folder / f"{number:06d}-{os.getpid():x}-{time.time_ns():x}{SUFFIX}"
        write_file(path, rows.shard_content())
        self.written += len(rows.names)


def _shard_key(rows: RowBlock) -> Any:
    """Return a value that is equal for rows that can be concatenated in one shard."""
    columns = [(name, values.dtype, values.shape[1:]) for name, values in rows.columns.items()]
    return rows.folder, rows.epoch, rows.inputs, *columns, *(shapes.shape[1] for shapes in rows.shapes.values())
