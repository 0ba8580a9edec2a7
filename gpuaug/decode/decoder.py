"""Decodes batches on threads of its own: the JPEG engines take what they can, a pool of host threads the rest.

nvJPEG's call blocks its thread for milliseconds. One thread makes these calls and nothing else, so that the engines never wait
for the interpreter; two prepare batches for it. Calls on one device take turns, and all that one has queued is done before the
next begins: two at once decode no faster, and have been seen to wait for each other for ever, those of two threads and those of
two processes (nvJPEG 13.3, H200).

**Memory.** Threads allocate nothing through PyTorch. The training thread allocates on the copy lane, which orders it after all
readers of what was dropped there. The engines do not wait for the stream that they are given: they begin at once. So a thread
waits on the host for the copy lane's event before it has anything decoded into that memory.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.core.encoded import Encoded
from gpuaug.core.ragged import Ragged
from gpuaug.core.streams import Event, Lane, Lanes
from gpuaug.decode import cpu, nvjpeg
from gpuaug.decode.layout import Layout, Options, slab_length

PREPARED = 2
"""Batches that are prepared at once: one that the engines work on, and the next."""

_turns: defaultdict[torch.device, threading.Lock] = defaultdict(threading.Lock)
"""For each device, held while its engines work."""

POISON: int | None = None
"""The byte that memory for pixels is filled with before it is decoded into, for tests: what is not written is then wrong."""


@dataclass(slots=True, eq=False)
class Work:
    """One ``Encoded`` of a batch and the memory that it is decoded into, allocated on the training thread."""

    encoded: Encoded
    layout: Layout
    data: Tensor
    raw: Tensor | None
    staging: Tensor | None
    """Page-locked memory for what the CPU decodes, or ``None`` where that is ``data`` itself."""
    problems: dict[int, str] = field(default_factory=dict)
    """What could not be decoded, and why, by the place in the batch."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Ragged:
        """The decoded batch. Called for it in place of a copy, on the copy lane, which waits for the decoder."""
        self.layout.finish(self.data, self.raw)
        return self.layout.ragged(self.data, self.layout.places().to(device, non_blocking=non_blocking))


class Decoder:
    """Decodes on the lanes of one loader.

    Args:
        name: Of the stage.
        lanes: The loader's.
        options: What the stage was told.
        engines: Those of the lanes' device, or ``None`` to decode on the CPU alone.
    """

    def __init__(self, name: str, lanes: Lanes, options: Options, engines: nvjpeg.Engines | None) -> None:
        self._lanes, self._options = lanes, options
        # Beside a training step, colour conversion would otherwise wait behind its kernels.
        self._lane: Lane = lanes.lane(f"decode/{name}", urgent=True)
        self._engines = engines
        self._turn = _turns[lanes.device]

    @property
    def uses_engines(self) -> bool:
        """Whether there are engines."""
        return self._engines is not None

    @property
    def version(self) -> str:
        """What decodes, with versions."""
        return f"nvJPEG {self._engines.version} and {cpu.version()}" if self._engines is not None else cpu.version()

    def allocate(self, encoded: Encoded, bad: Mapping[int, str]) -> Work:
        """Memory for a batch. On the training thread, where the copy lane is current."""
        layout = Layout(encoded.headers, self._options, engines=self.uses_engines, bad=bad)
        device, on_host = self._lanes.device, self._lanes.in_line
        data = _empty(slab_length(layout.length), device)
        raw = _empty(slab_length(layout.raw_length), device) if layout.raw_length else None
        staging = None
        if not on_host and not layout.by_engines.all():
            staging = _empty(layout.length, torch.device("cpu"), pin_memory=True)
        return Work(encoded, layout, data, raw, staging)

    def start(self, pools: "Pools", works: list[Work]) -> Future[Event]:
        """Have a batch decoded. The result is the decoder's event, or an error of the library or the card."""
        free = self._lanes.copy.record_event()
        return pools.batches.submit(self._decode, pools, works, free)

    def settle(self) -> None:
        """Order the copy lane after all that has been decoded, whose memory may then be used again."""
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
                self._lane.copy_parts(work.data, work.staging, _runs(work.layout, decoded))
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
        """Decode a batch, or its images one by one to find which of them cannot be decoded."""
        if not len(call.indices) or not self._status(work, call, slice(None)):
            return
        for at, index in enumerate(call.indices.tolist()):
            if status := self._status(work, call, slice(at, at + 1)):
                work.problems[index] = f"nvJPEG finds: {nvjpeg.STATUS[status]}"

    def _status(self, work: Work, call: "_Call", part: slice) -> int:
        """Decode a part of a batch to its end, and give the status of it."""
        assert self._engines is not None
        form = nvjpeg.OUTPUT_RGBI if work.layout.channels == 3 else nvjpeg.OUTPUT_Y
        files = call.addresses[part], call.lengths[part]
        status = self._engines.decode(*files, call.outputs[part], form, self._lane.number)
        self._lane.record_event(spin=True).synchronize()  # what is queued still would meet the next call
        return status


@dataclass(slots=True)
class _Call:
    """Arguments of nvJPEG's batched call."""

    indices: Any
    addresses: Any
    lengths: Any
    outputs: Any


class Pools:
    """The threads of one iterator, started with its first batch and so after workers have been forked."""

    def __init__(self) -> None:
        self.batches = ThreadPoolExecutor(PREPARED, "gpuaug-decode")
        self.engines = ThreadPoolExecutor(1, "gpuaug-decode-engines")
        self.images = ThreadPoolExecutor(cpu.usable_cores(), "gpuaug-decode-cpu")

    def decoding(self, work: Work) -> list[Future[list[int]]]:
        """Have what the engines do not take decoded on the host: futures of the indices that could be."""
        # One iterator that all threads take from, and not a task for each image: that is a tenth of the time, in Python.
        indices = np.flatnonzero(~work.layout.by_engines).tolist()
        left = iter(indices)
        return [self.images.submit(_decode_on_cpu, work, left) for _ in range(min(len(indices), cpu.usable_cores()))]

    def close(self) -> None:
        """End the threads, after the calls that they are in."""
        self.batches.shutdown(cancel_futures=True)
        self.engines.shutdown()
        self.images.shutdown(cancel_futures=True)


def _empty(length: int, device: torch.device, *, pin_memory: bool = False) -> Tensor:
    with torch.inference_mode(False):  # or threads, which are not in the consumer's inference mode, could not write to it
        data = torch.empty(length, dtype=torch.uint8, device=device, pin_memory=pin_memory)
        return data if POISON is None else data.fill_(POISON)


_entered = threading.local()


def _enter(device: torch.device) -> None:
    """Make this thread one that decodes on a device."""
    if getattr(_entered, "device", None) != device:
        torch.cuda.set_device(device)
        nvjpeg.relax_capture()
        _entered.device = device


def _prepared(work: Work, engines: nvjpeg.Engines | None) -> _Call:
    """Arrays of addresses. A file whose size nvJPEG does not find to be that of its header is left out."""
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
    raw = layout.raw[indices]
    outputs["channel"][:, 0] = work.data.data_ptr() + layout.starts[indices]
    if work.raw is not None:
        outputs["channel"][raw, 0] = work.raw.data_ptr() + layout.raw_starts[indices][raw]
    outputs["pitch"][:, 0] = layout.stored[indices, 1] * layout.channels
    return _Call(indices, addresses, lengths, outputs)


def _decode_on_cpu(work: Work, indices: Iterator[int]) -> list[int]:
    """Decode images into their places on the host: the indices of those that could be."""
    room = (work.data if work.staging is None else work.staging).numpy()
    decoded = []
    for index in indices:
        file = work.encoded.file(int(work.layout.sources[index]))
        if problem := cpu.decode(file, work.layout, index, work.layout.image(room, index)):
            work.problems[index] = problem
        else:
            decoded.append(index)
    return decoded


def _runs(layout: Layout, indices: list[int]) -> list[tuple[int, int]]:
    """First and last value of images that lie behind one another, joined."""
    ends = [*layout.starts[1:].tolist(), layout.length]
    runs: list[tuple[int, int]] = []
    for index in indices:
        start, end = int(layout.starts[index]), int(ends[index])
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
    return runs
