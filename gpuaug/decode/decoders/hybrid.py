"""JPEGs decoded by host threads and the card together: threads read the Huffman codes, and the card does the rest."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core.encoded import Format
from gpuaug.core.streams import Event, Lane
from gpuaug.decode import nvjpeg
from gpuaug.decode.decoders.base import PREPARED, FileDecoder, Place
from gpuaug.decode.decoders.engines import fits_nvjpeg
from gpuaug.decode.work import Work

MOST_STATES = 64
"""Number of images that may be between their first and their last phase at once, over all loaders of a process."""

MOST_PIXELS = 2**25
"""Pixels of the largest image. Its coefficients take 6 bytes a pixel at most, in page-locked memory and on the device."""

GROUP = 16
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
        held = [self._decoder.held_bytes(state) for state in self._states]
        return sum(pinned for pinned, _ in held), sum(device for _, device in held)

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
        layout = work.layout
        indices = indices[np.argsort(-layout.headers["length"][indices])]
        images = _images(work, indices)
        batch = _Batch(work.problems, images, iter(range(len(images))))
        lane = place.card_lanes.get()  # before any state is taken, which this thread alone would put back
        try:
            for _ in range(min(len(images), place.pools.threads)):
                place.pools.images.submit(self._host_phases, batch, place)
            return self._card_phases(batch, lane)
        finally:
            place.card_lanes.put(lane)

    def _host_phases(self, batch: "_Batch", place: Place) -> None:
        nvjpeg.enter(place.lanes.device)
        for number in batch.left:
            image = batch.images[number]
            try:
                state, problem = self._state(), "it was not decoded"
                try:
                    problem = self._decoder.host_phase(state, *image.file)
                finally:
                    if problem:
                        self._idle.put(state)
                if problem:
                    batch.problems[image.position] = problem
                batch.ready.put(None if problem else (image, state))
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

    def _card_phases(self, batch: "_Batch", lane: Lane) -> Event:
        """Queue the card phase of each image whose host phase has ended, until all have. Returns the event behind them."""
        queued, states = deque[tuple[Event, list[nvjpeg.PhasedState]]](), list[nvjpeg.PhasedState]()
        ready, left = batch.ready, len(batch.images)
        error: BaseException | None = None
        while left or states or queued:
            if len(states) == GROUP or (states and (ready.empty() or not left)):
                queued.append((lane.record_event(), states))
                states = []
            # States go back before this thread waits for host phases, which may be waiting for states.
            if queued and (len(queued) > 1 or ready.empty()):
                event, ended = queued.popleft()
                event.synchronize()
                for state in ended:
                    self._idle.put(state)
            elif left:
                done = ready.get()
                left -= 1
                if isinstance(done, BaseException):
                    error = error or done
                elif done is not None:
                    image, state = done
                    states.append(state)
                    try:
                        self._decoder.card_phase(state, *image.target, lane.number)
                    except nvjpeg.NvJpegError as failed:
                        error = error or failed
        if error is not None:
            raise error
        return lane.record_event()


class _Image(NamedTuple):
    """An image of a batch, in the numbers that its phases take."""

    position: int
    """Index in the batch."""
    file: tuple[int, int, int, int, int]
    """Address, length, height, width and form of the output."""
    target: tuple[int, int]
    """Address of the pixels on the device, and bytes of a row."""


@dataclass(slots=True)
class _Batch:
    """The images of a batch between their phases."""

    problems: dict[int, str]
    images: list[_Image]
    left: Iterator[int]
    """Numbers of the images whose host phase has not begun."""
    ready: "SimpleQueue[tuple[_Image, nvjpeg.PhasedState] | BaseException | None]" = field(default_factory=SimpleQueue)
    """An entry for each image whose host phase has ended; ``None`` for one that cannot be decoded."""


def _images(work: Work, indices: NDArray[Any]) -> list[_Image]:
    layout = work.layout
    headers, stored = layout.headers[indices], layout.stored[indices]
    targets = work.data.data_ptr() + layout.starts[indices]
    if work.raw is not None:
        whole = layout.needs_postprocessing[indices]
        targets[whole] = work.raw.data_ptr() + layout.raw_starts[indices][whole]
    form = nvjpeg.OUTPUT_RGBI if layout.channels == 3 else nvjpeg.OUTPUT_Y
    starts = work.encoded.data.data_ptr() + headers["start"]
    numbers = (indices, starts, headers["length"], *stored.T, targets, stored[:, 1] * layout.channels)
    return [
        _Image(index, (start, length, height, width, form), (target, pitch))
        for index, start, length, height, width, target, pitch in zip(*(each.tolist() for each in numbers), strict=True)
    ]
