"""JPEGs decoded by host threads and the card together: threads read the Huffman codes, and the card does the rest."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core.encoded import Format
from gpuaug.core.streams import Event, Lane
from gpuaug.decode import nvjpeg
from gpuaug.decode.decoders.base import PREPARED, FileDecoder, Place
from gpuaug.decode.decoders.engines import fits_nvjpeg
from gpuaug.decode.work import Work

MOST_STATES = 32
"""Number of images that may be between their first and their last phase at once, over all loaders of a process."""

MOST_PIXELS = 2**25
"""Pixels of the largest image. Its coefficients take 6 bytes a pixel at most, in page-locked memory and on the device."""

GROUP = 8
"""Images whose card phases are queued behind one event."""


class Hybrid(FileDecoder):
    """nvJPEG by phases: the host phase on the threads that decode on the CPU, the card phase on a lane of the loader.

    Args:
        device: A CUDA device.

    Raises:
        NvJpegError: If nvJPEG cannot be set up.
    """

    name, on_card = "hybrid", True
    files = "baseline JPEG in one scan, or progressive JPEG: 4:4:4, 4:2:2, 4:2:0, 4:4:0 or grey, at most 32 megapixels"
    calls = PREPARED

    def __init__(self, device: torch.device) -> None:
        self._decoder = nvjpeg.PhasedDecoder(device)
        self._idle: SimpleQueue[nvjpeg.PhasedState] = SimpleQueue()
        self._states: list[nvjpeg.PhasedState] = []
        self._making = threading.Lock()

    @property
    def version(self) -> str:
        """Version of nvJPEG."""
        return f"nvJPEG {self._decoder.version}"

    @property
    def held_bytes(self) -> tuple[int, int]:
        """Bytes of coefficients: page-locked, on the device."""
        return sum(state.pinned_bytes for state in self._states), sum(state.device_bytes for state in self._states)

    def takes(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """(B,) whether each file is a baseline or progressive JPEG of a supported sampling and size."""
        pixels = table["height"].astype(np.int64) * table["width"]
        taken = fits_nvjpeg(table)
        taken &= np.isin(table["format"], (Format.JPEG, Format.PROGRESSIVE_JPEG)) & (pixels <= MOST_PIXELS)
        return taken

    def begin(self, work: Work, indices: NDArray[Any], place: Place) -> Callable[[], Event]:
        """Nothing begins before the function that is returned is called: two batches of one thread might wait for states."""
        return partial(self._decode, work, indices, place)

    def _decode(self, work: Work, indices: NDArray[Any], place: Place) -> Event:
        """Submit the host phases, the longest first, and queue the card phases as they end."""
        lengths = work.layout.headers["length"][indices]
        batch = _Batch(work, iter(indices[np.argsort(-lengths)].tolist()))
        for _ in range(min(len(indices), place.pools.threads)):
            place.pools.images.submit(self._host_phases, batch, place)
        return self._card_phases(batch, len(indices), place)

    def _host_phases(self, batch: "_Batch", place: Place) -> None:
        nvjpeg.enter(place.lanes.device)
        layout, data = batch.work.layout, batch.work.encoded.data.data_ptr()
        for index in batch.left:
            try:
                header = layout.headers[index]
                height, width = layout.stored[index].tolist()
                file = data + int(header["start"]), int(header["length"])
                state, problem = self._state(), "it was not decoded"
                try:
                    problem = self._decoder.host_phase(state, *file, height, width, layout.channels)
                finally:
                    if problem:
                        self._idle.put(state)
                if problem:
                    batch.work.problems[index] = problem
                batch.ready.put(None if problem else (index, state))
            except BaseException as error:  # raised at the batch
                batch.ready.put(error)

    def _state(self) -> nvjpeg.PhasedState:
        """A state that no image uses. Waits for one if there are as many as there may be."""
        try:
            return self._idle.get_nowait()
        except Empty:
            with self._making:
                if len(self._states) < MOST_STATES:
                    self._states.append(self._decoder.state())
                    return self._states[-1]
        return self._idle.get()

    def _card_phases(self, batch: "_Batch", count: int, place: Place) -> Event:
        """Queue the card phase of each image whose host phase has ended, until all have. Returns the event behind them."""
        lane, queued, group = place.card_lanes.get(), deque[_Group](), _Group()
        error: BaseException | None = None
        try:
            while count:
                if batch.ready.empty() and (queued or group.states):
                    # States go back before this thread waits for host phases, which may be waiting for states.
                    self._end(queued, group, lane, most=0)
                    group = _Group()
                    continue
                done = batch.ready.get()
                count -= 1
                if isinstance(done, BaseException):
                    error = error or done
                elif done is not None:
                    index, state = done
                    group.states.append(state)
                    try:
                        self._decoder.card_phase(state, *_target(batch.work, index), lane.number)
                    except nvjpeg.NvJpegError as failed:
                        error = error or failed
                    if len(group.states) == GROUP:
                        self._end(queued, group, lane, most=1)
                        group = _Group()
            self._end(queued, group, lane, most=0)
            if error is not None:
                raise error
            return lane.record_event()
        finally:
            place.card_lanes.put(lane)

    def _end(self, queued: "deque[_Group]", group: "_Group", lane: Lane, *, most: int) -> None:
        """Record an event behind a group, and wait for the oldest groups until ``most`` are left. Their states become idle."""
        group.event = lane.record_event()
        queued.append(group)
        while len(queued) > most:
            oldest = queued.popleft()
            assert oldest.event is not None
            oldest.event.synchronize()
            for state in oldest.states:
                self._idle.put(state)


@dataclass(slots=True)
class _Batch:
    """The images of a batch between their phases."""

    work: Work
    left: Iterator[int]
    """Images whose host phase has not begun."""
    ready: "SimpleQueue[tuple[int, nvjpeg.PhasedState] | BaseException | None]" = field(default_factory=SimpleQueue)
    """An entry for each image whose host phase has ended; ``None`` for one that cannot be decoded."""


@dataclass(slots=True)
class _Group:
    """Images whose card phases are queued, and the event behind them."""

    states: list[nvjpeg.PhasedState] = field(default_factory=list)
    event: Event | None = None


def _target(work: Work, index: int) -> tuple[int, int]:
    """(address, pitch in bytes) of an image's pixels on the device."""
    layout = work.layout
    start = work.data.data_ptr() + int(layout.starts[index])
    if layout.needs_postprocessing[index]:
        assert work.raw is not None
        start = work.raw.data_ptr() + int(layout.raw_starts[index])
    return start, int(layout.stored[index, 1]) * layout.channels
