"""Decodes batches on threads of its own: the JPEG engines take the images that they support, a pool of host threads the rest.

nvJPEG's call blocks its thread for milliseconds. One thread makes these calls and nothing else, so that the engines never wait
for the interpreter; two prepare batches for it. nvJPEG calls on one device are serialised by a per-device lock, held until the
call's GPU work is done. Concurrent calls deadlocked on an H200 with nvJPEG 13.3, between threads and between processes, and
were no faster.

**Memory.** Threads allocate nothing through PyTorch. The training thread allocates on the copy lane, after that lane's wait for
all readers of memory freed there. The engines do not wait for the stream that they are given: they begin at once. So a thread
waits on the host for the copy lane's event before it decodes into that memory.
"""

import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.core.encoded import Encoded
from gpuaug.core.errors import GpuAugWarning
from gpuaug.core.ragged import Ragged
from gpuaug.core.streams import Event, Lane, Lanes
from gpuaug.decode import cpu, nvjpeg
from gpuaug.decode.layout import Layout, Options, slab_length

PREPARED = 2
"""Batches in preparation at once: the one that the engines decode, and the next."""

_turns: defaultdict[torch.device, threading.Lock] = defaultdict(threading.Lock)
"""The lock of each device, held while its engines work."""

POISON: int | None = None
"""Byte that memory for pixels is filled with before decoding, for tests: a pixel that is not written then has a wrong value."""


@dataclass(slots=True, eq=False)
class Work:
    """One ``Encoded`` of a batch and the memory for its pixels, allocated on the training thread."""

    encoded: Encoded
    layout: Layout
    data: Tensor
    """(bytes,) the decoded images, on the device."""
    raw: Tensor | None
    """(bytes,) full-size images for ``Layout.finish``, on the device. ``None`` where no image needs postprocessing."""
    staging: Tensor | None
    """(bytes,) host memory for images that the CPU decodes, page-locked. ``None`` if it decodes into ``data``, or no image."""
    problems: dict[int, str] = field(default_factory=dict)
    """Why an image could not be decoded, by its index in the batch."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Ragged:
        """Return the decoded images as a ``Ragged`` on ``device``.

        The loader calls this where it would copy a tensor; the copy lane already waits for the decoder's event.
        """
        self.layout.finish(self.data, self.raw)
        return self.layout.ragged(self.data, self.layout.places().to(device, non_blocking=non_blocking))


class Decoder:
    """Decodes on the lanes of one loader.

    Args:
        name: The stage's name.
        lanes: The loader's lanes.
        options: The stage's options.
        engines: The JPEG engines of the lanes' device, or ``None`` to decode on the CPU alone.
    """

    def __init__(self, name: str, lanes: Lanes, options: Options, engines: nvjpeg.Engines | None) -> None:
        self._lanes, self._options = lanes, options
        # Beside a training step, colour conversion would otherwise wait behind its kernels.
        self._lane: Lane = lanes.lane(f"decode/{name}", urgent=True)
        self._engines = engines
        self._turn = _turns[lanes.device]
        self._cannot_lock = False
        self._pinned: list[weakref.ref[Tensor]] = []

    @property
    def uses_engines(self) -> bool:
        """Whether there are engines."""
        return self._engines is not None

    @property
    def version(self) -> str:
        """The decoders, each with its libraries and their versions."""
        return f"engines: nvJPEG {self._engines.version}; {cpu.version()}" if self._engines is not None else cpu.version()

    @property
    def pinned_bytes(self) -> int:
        """Page-locked bytes of batches that are being decoded."""
        staging = [reference() for reference in self._pinned]
        return sum(each.nbytes for each in staging if each is not None)

    def allocate(self, encoded: Encoded, bad: Mapping[int, str]) -> Work:
        """Allocate memory for a batch. Called on the training thread, with the copy lane current."""
        layout = Layout(encoded.headers, self._options, engines=self.uses_engines, bad=bad)
        device, on_host = self._lanes.device, self._lanes.in_line
        data = _empty(slab_length(layout.length), device)
        raw = _empty(slab_length(layout.raw_length), device) if layout.raw_length else None
        staging = None
        if not on_host and not layout.by_engines.all():
            staging = self._staging(layout.length)
        return Work(encoded, layout, data, raw, staging)

    def _staging(self, length: int) -> Tensor:
        """Host memory, page-locked unless that cannot be had."""
        host = torch.device("cpu")
        if self._cannot_lock:
            return _empty(length, host)
        try:
            staging = _empty(length, host, pin_memory=True)
        except RuntimeError as error:
            self._cannot_lock = True
            reason = str(error).partition("\n")[0]
            warnings.warn(
                f"Copies of decoded images make the decoder wait, because {length / 1e6:.1f} MB could not be page-locked "
                f"({reason}). Lower depth, or batch_size of the DataLoader.",
                GpuAugWarning,
                stacklevel=2,
            )
            return _empty(length, host)
        self._pinned = [*(each for each in self._pinned if each() is not None), weakref.ref(staging)]
        return staging

    def start(self, pools: "Pools", works: list[Work]) -> Future[Event]:
        """Submit a batch. The future's result is the decoder's event; its exception, an error of the library or the card."""
        free = self._lanes.copy.record_event()
        return pools.batches.submit(self._decode, pools, works, free)

    def settle(self) -> None:
        """Make the copy lane wait for all decoding queued so far. Memory freed on that lane can then be reused safely."""
        self._lanes.copy.wait(self._lane.record_event())

    def _decode(self, pools: "Pools", works: list[Work], free: Event) -> Event:
        if not self._lanes.in_line:
            _enter(self._lanes.device)
        on_cpu = [(work, pools.decoding(work)) for work in works if not work.layout.by_engines.all()]
        calls = [(work, _prepared(work, self._engines)) for work in works if work.layout.by_engines.any()]
        free.synchronize()
        event = pools.engines.submit(self._by_engines, calls).result() if calls else self._lane.record_event()
        for work, parts in on_cpu:
            decoded = sorted(index for part in parts for index in part.result())
            if work.staging is not None and decoded:
                self._lane.copy_parts(work.data, work.staging, _byte_ranges(work.layout, decoded))
                event = self._lane.record_event()
        return event

    def _by_engines(self, calls: list[tuple[Work, "_Call"]]) -> Event:
        if not self._lanes.in_line:
            _enter(self._lanes.device)
        with self._turn:
            for work, call in calls:
                self._call(work, call)
            return self._lane.record_event()

    def _call(self, work: Work, call: "_Call") -> None:
        """Decode a batch; after a failure decode its images one by one, to find the ones that cannot be decoded."""
        if not len(call.indices) or not self._status(work, call, slice(None)):
            return
        for at, index in enumerate(call.indices.tolist()):
            if status := self._status(work, call, slice(at, at + 1)):
                work.problems[index] = f"nvJPEG finds: {nvjpeg.STATUS[status]}"

    def _status(self, work: Work, call: "_Call", part: slice) -> int:
        """Status of nvJPEG for a part of a batch, after all GPU work of that call is done."""
        assert self._engines is not None
        form = nvjpeg.OUTPUT_RGBI if work.layout.channels == 3 else nvjpeg.OUTPUT_Y
        files = call.addresses[part], call.lengths[part]
        status = self._engines.decode(*files, call.outputs[part], form, self._lane.number)
        self._lane.record_event(spin=True).synchronize()  # or its GPU work would overlap with the next call's
        return status


@dataclass(slots=True)
class _Call:
    """Arguments of nvJPEG's batched call."""

    indices: Any
    addresses: Any
    lengths: Any
    outputs: Any


class Pools:
    """The threads of one iterator, started with its first batch and so after workers have been forked.

    Args:
        threads: Number of threads that decode on the CPU.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.batches = ThreadPoolExecutor(PREPARED, "gpuaug-decode")
        self.engines = ThreadPoolExecutor(1, "gpuaug-decode-engines")
        self.images = ThreadPoolExecutor(threads, "gpuaug-decode-cpu")

    def decoding(self, work: Work) -> list[Future[list[int]]]:
        """Submit the images that the engines do not take to host threads: futures of the indices that were decoded."""
        # All threads take from one iterator. A task for each image would take ten times as long in Python.
        indices = np.flatnonzero(~work.layout.by_engines).tolist()
        left = iter(indices)
        return [self.images.submit(_decode_on_cpu, work, left) for _ in range(min(len(indices), self._threads))]

    def close(self) -> None:
        """End the threads after their current calls."""
        self.batches.shutdown(cancel_futures=True)
        self.engines.shutdown()
        self.images.shutdown(cancel_futures=True)


def _empty(length: int, device: torch.device, *, pin_memory: bool = False) -> Tensor:
    with torch.inference_mode(False):  # else threads outside the consumer's inference mode could not write to it
        data = torch.empty(length, dtype=torch.uint8, device=device, pin_memory=pin_memory)
        return data if POISON is None else data.fill_(POISON)


_entered = threading.local()


def _enter(device: torch.device) -> None:
    """Prepare this thread to call nvJPEG on ``device``."""
    if getattr(_entered, "device", None) != device:
        torch.cuda.set_device(device)
        nvjpeg.relax_capture()
        _entered.device = device


def _prepared(work: Work, engines: nvjpeg.Engines | None) -> _Call:
    """Addresses and lengths for nvJPEG's call, without the files for which nvJPEG finds another size than their header's."""
    assert engines is not None
    layout = work.layout
    indices = np.flatnonzero(layout.by_engines)
    table = layout.headers[indices]
    addresses = (work.encoded.data.data_ptr() + table["start"]).astype(np.uint64)
    lengths = table["length"].astype(np.uint64)
    found = engines.sizes(addresses, lengths)
    same = (found == layout.stored[indices]).all(1)
    for index, (height, width) in zip(indices[~same].tolist(), found[~same].tolist(), strict=True):
        stored = layout.stored[index].tolist()
        work.problems[index] = f"nvJPEG finds {width}x{height} pixels and its header {stored[1]}x{stored[0]}"
    indices, addresses, lengths = indices[same], addresses[same], lengths[same]
    outputs = np.zeros(len(indices), nvjpeg.OUTPUT)
    raw = layout.needs_postprocessing[indices]
    outputs["channel"][:, 0] = work.data.data_ptr() + layout.starts[indices]
    if work.raw is not None:
        outputs["channel"][raw, 0] = work.raw.data_ptr() + layout.raw_starts[indices][raw]
    outputs["pitch"][:, 0] = layout.stored[indices, 1] * layout.channels
    return _Call(indices, addresses, lengths, outputs)


def _decode_on_cpu(work: Work, indices: Iterator[int]) -> list[int]:
    """Decode images into host memory. Returns the indices of the images that were decoded."""
    room = (work.data if work.staging is None else work.staging).numpy()
    decoded = []
    for index in indices:
        file = work.encoded.file(int(work.layout.sources[index]))
        if problem := cpu.decode(file, work.layout, index, work.layout.image(room, index)):
            work.problems[index] = problem
        else:
            decoded.append(index)
    return decoded


def _byte_ranges(layout: Layout, indices: list[int]) -> list[tuple[int, int]]:
    """Merge adjacent images into ranges [start, end) of the flat buffer, in bytes; ``end`` is exclusive."""
    ends = [*layout.starts[1:].tolist(), layout.length]
    ranges: list[tuple[int, int]] = []
    for index in indices:
        start, end = int(layout.starts[index]), int(ends[index])
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((start, end))
    return ranges
