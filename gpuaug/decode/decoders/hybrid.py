"""Decoding of JPEGs by host threads and the card together: threads read the Huffman codes, and the card does the rest."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core.encoded import Format
from gpuaug.core.streams import Event, Lane
from gpuaug.decode import nvjpeg
from gpuaug.decode.decoders.base import PREPARED, FileDecoder, Resources
from gpuaug.decode.decoders.engines import fits_nvjpeg
from gpuaug.decode.decoders.phase_loop import File, OneByOne, PhaseLoop, Target, phases
from gpuaug.decode.work import Work

MAX_STATES = 96
"""Maximum number of images of one capacity between their phases, over all loaders of a process on one device.

A state of the smallest capacity has 2 MB of page-locked and 4 MB of device memory. With 48 states, threads waited for them:
14 threads decoded 9,900 images/s with 48 states and 4 images per call, and 11,200 to 12,000 with 96 to 128 states and 8 images
(H200, 2026-11-26).
"""

LEAST_STATES, CLASS_BYTES = 4, 2**29
"""Minimum number of states of one capacity, and limit on the bytes of all states of one capacity above this number."""

LEAST_CAPACITY = 2**21
"""Minimum capacity of a state in bytes of coefficients: 500 000 pixels at 4:2:0, with a margin."""

MAX_PIXELS = 2**25
"""Maximum number of pixels of an image. Coefficients take up to 6 bytes per pixel, in page-locked memory."""

GROUP = 16
"""Number of images whose card phases share one event."""


def most_states(capacity: int) -> int:
    """Return the maximum number of states of a capacity in bytes."""
    return min(max(CLASS_BYTES // capacity, LEAST_STATES), MAX_STATES)


class Hybrid(FileDecoder):
    """Decode with nvJPEG in phases: host phases on the threads that decode on the CPU, card phases on a lane of the loader.

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
        self.decodes_windows = self._decoder.exact_windows
        # One pool per capacity, because nvJPEG waits for all work of the device when it enlarges a state.
        self._pools: dict[int, _States] = {}
        self._making = threading.Lock()

    @cached_property
    def _phases(self) -> PhaseLoop | OneByOne:
        return phases(self._decoder)  # at the first batch, because compiling takes a second

    @property
    def version(self) -> str:
        """Version of nvJPEG."""
        return f"nvJPEG {self._decoder.version}"

    @property
    def held_bytes(self) -> tuple[int, int]:
        """(page-locked, device) bytes of coefficients."""
        held = [self._decoder.held_bytes(state) for pool in list(self._pools.values()) for state in pool.made]
        return sum(pinned for pinned, _ in held), sum(device for _, device in held)

    def takes(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return the (B,) mask of the baseline and progressive JPEGs with a supported chroma subsampling and size."""
        pixels = table["height"].astype(np.int64) * table["width"]
        taken = fits_nvjpeg(table)
        taken &= np.isin(table["format"], (Format.JPEG, Format.PROGRESSIVE_JPEG)) & (pixels <= MAX_PIXELS)
        return taken

    def begin(self, work: Work, indices: NDArray[Any], resources: Resources) -> Callable[[], Event]:
        """Return the function that decodes. It starts nothing before, as two batches could deadlock waiting for states."""
        return partial(self._decode, work, indices, resources)

    def _decode(self, work: Work, indices: NDArray[Any], resources: Resources) -> Event:
        """Submit the host phases, longest file first, and queue each card phase when its host phase has ended."""
        layout = work.layout
        with self._making:  # before threads start, or each of them would compile the phases
            _ = self._phases
        indices = indices[np.argsort(-layout.headers["length"][indices])]
        images = _images(work, indices)
        batch = _Batch(work.problems, images, iter(range(len(images))))
        lane = resources.card_lanes.get()  # before any state is taken, because only this thread puts states back
        try:
            try:
                for _ in range(min(len(images), resources.pools.threads)):
                    resources.pools.images.submit(self._host_phases, batch, resources)
            except RuntimeError as error:  # no thread can be started, but others may have started
                batch.give_up(error)
            return self._card_phases(batch, lane)
        finally:
            resources.card_lanes.put(lane)

    def _host_phases(self, batch: "_Batch", resources: Resources) -> None:
        """Run host phases of a batch until all have started."""
        for number in batch.pending:
            numbers = [number, *islice(batch.pending, self._phases.most_images - 1)]
            images = [batch.images[number] for number in numbers]
            try:
                nvjpeg.enter(resources.lanes.device)  # within try, so that its error is raised at the batch
                while images:
                    states = self._states(images)
                    started = images[: len(states)]
                    del images[: len(states)]
                    self._run_host_phases(batch, started, states)
            except BaseException as error:  # raised at the batch
                for _ in images:
                    batch.ready.put(error)

    def _run_host_phases(self, batch: "_Batch", images: "list[_Image]", states: list[nvjpeg.PhasedState]) -> None:
        outcomes: Sequence[str | BaseException]
        try:
            outcomes = self._phases.host_phases(states, [image.file for image in images])
        except BaseException as error:
            outcomes = [error] * len(images)
        for image, state, outcome in zip(images, states, outcomes, strict=True):
            if outcome:
                self._pools[image.capacity].idle.put(state)
            if isinstance(outcome, BaseException):
                batch.ready.put(outcome)
            elif outcome:
                batch.problems[image.position] = outcome
                batch.ready.put(None)
            else:
                batch.ready.put((image, state))

    def _states(self, images: "list[_Image]") -> list[nvjpeg.PhasedState]:
        """Return states of the first of ``images``: at least one, and as many as can be had without waiting.

        A thread that holds states must not wait for more.
        """
        states: list[nvjpeg.PhasedState] = []
        for image in images:
            try:
                state = self._idle_state(image.capacity)
            except nvjpeg.NvJpegError:  # not even memory for one state
                if not states:
                    raise
                break
            if state is None and states:
                break
            states.append(state or self._pools[image.capacity].idle.get())
        return states

    def _idle_state(self, capacity: int) -> nvjpeg.PhasedState | None:
        """Return an idle state. Creates one if the pool is not full; ``None`` if it is full, or memory is exhausted."""
        pool = self._pools.get(capacity) or self._pools.setdefault(capacity, _States())
        try:
            return pool.idle.get_nowait()
        except Empty:
            with self._making:
                if len(pool.made) < most_states(capacity):
                    try:
                        pool.made.append(self._decoder.state(capacity))
                        return pool.made[-1]
                    except nvjpeg.NvJpegError:  # no memory for one more
                        if not pool.made:
                            raise
        return None

    def _put_back(self, used: list["_Used"]) -> None:
        for capacity, state in used:
            self._pools[capacity].idle.put(state)

    def _card_phases(self, batch: "_Batch", lane: Lane) -> Event:
        """Queue the card phase of each image when its host phase has ended. Returns an event after all card phases."""
        queued, states = deque[tuple[Event, list[_Used]]](), list[_Used]()
        ready, remaining = batch.ready, len(batch.images)
        error: BaseException | None = None
        try:
            while remaining or states or queued:
                if len(states) == GROUP or (states and (ready.empty() or not remaining)):
                    queued.append((lane.record_event(), states))
                    states = []
                # Put states back before waiting for host phases, which may be waiting for states.
                if queued and (len(queued) > 1 or ready.empty()):
                    event, used = queued[0]
                    event.synchronize()
                    queued.popleft()
                    self._put_back(used)
                elif remaining:
                    results = [ready.get()]
                    while len(states) + len(results) < GROUP and not ready.empty():
                        results.append(ready.get())
                    remaining -= len(results)
                    error = error or next((result for result in results if isinstance(result, BaseException)), None)
                    ended = [result for result in results if isinstance(result, tuple)]
                    states += [(image.capacity, state) for image, state in ended]
                    targets = [image.target for image, _ in ended]
                    outcomes = self._phases.card_phases([state for _, state in ended], targets, lane.number)
                    for (image, _), outcome in zip(ended, outcomes, strict=True):
                        if isinstance(outcome, BaseException):
                            error = error or outcome
                        elif outcome:
                            batch.problems[image.position] = outcome
        except BaseException as card_error:  # an event fails: the card does no more work
            batch.give_up(card_error)
            for _, used in queued:
                self._put_back(used)
            self._put_back(states)
            for _ in range(remaining):  # wait until no thread reads a file
                if isinstance(result := ready.get(), tuple):
                    self._put_back([(result[0].capacity, result[1])])
            raise
        if error is not None:
            raise error
        return lane.record_event()


@dataclass(slots=True)
class _States:
    """Pool of the states of one capacity."""

    made: list[nvjpeg.PhasedState] = field(default_factory=list)
    idle: "SimpleQueue[nvjpeg.PhasedState]" = field(default_factory=SimpleQueue)


_Used: TypeAlias = tuple[int, nvjpeg.PhasedState]
"""(capacity, state) in use by an image."""


class _Image(NamedTuple):
    """Arguments of the phases of one image."""

    position: int
    """Index in the batch."""
    file: File
    target: Target
    capacity: int
    """Bytes of memory for coefficients: a power of 2."""


@dataclass(slots=True)
class _Batch:
    """Images of a batch between their phases."""

    problems: dict[int, str]
    images: list[_Image]
    pending: Iterator[int]
    """Indices into ``images`` of the images whose host phase has not started. Shared by all threads."""
    ready: "SimpleQueue[tuple[_Image, nvjpeg.PhasedState] | BaseException | None]" = field(default_factory=SimpleQueue)
    """One entry per image whose host phase has ended; ``None`` if the image cannot be decoded."""

    def give_up(self, error: BaseException) -> None:
        """Put ``error`` into ``ready`` for each image whose host phase has not started, so that none of these phases starts."""
        for _ in self.pending:
            self.ready.put(error)


def _images(work: Work, indices: NDArray[Any]) -> list[_Image]:
    layout = work.layout
    headers, stored = layout.headers[indices], layout.stored[indices]
    targets = work.data.data_ptr() + layout.starts[indices]
    if work.raw is not None:
        raw = layout.needs_postprocessing[indices]
        targets[raw] = work.raw.data_ptr() + layout.raw_starts[indices][raw]
    form = nvjpeg.OUTPUT_RGBI if layout.channels == 3 else nvjpeg.OUTPUT_Y
    starts = work.encoded.data.data_ptr() + headers["start"]
    windows = layout.card_windows(indices)
    pitches = windows[:, 3] * layout.channels
    columns = (indices, starts, headers["length"], *stored.T, windows, targets, pitches, _capacities(headers))
    return [
        _Image(index, (start, length, height, width, form, window), (target, pitch), capacity)
        for index, start, length, height, width, window, target, pitch, capacity in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def _capacities(headers: NDArray[np.void]) -> NDArray[np.int64]:
    """Return (B,) bytes of memory for coefficients, at 2 bytes each, plus a quarter and 256 KB, rounded up to a power of 2."""
    area = (headers["height"].astype(np.int64) + 31) * (headers["width"].astype(np.int64) + 31)
    # h · v of the luma's sampling factors, from 4 h + v: chroma has fewer pixels by this factor.
    factors = (headers["sampling"] - 1) // 4 * ((headers["sampling"] - 1) % 4 + 1)
    chroma = np.where(headers["channels"] == 3, 2 / np.maximum(factors, 1), 0)
    needed = np.maximum(2.5 * area * (1 + chroma) + 2**18, LEAST_CAPACITY)
    capacities: NDArray[np.int64] = (2 ** np.ceil(np.log2(needed))).astype(np.int64)
    return capacities
