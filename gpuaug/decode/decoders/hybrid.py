"""Decoding of JPEGs by host threads and the GPU (*card*) together.

An image has two phases: a *host phase* on a thread, and then a *card phase*, which a thread queues on a *lane* (a CUDA stream).
Host phases read the Huffman codes of small and of progressive JPEGs. The card reads the Huffman codes of other JPEGs, for which
the host phase only prepares the file. Pixels of undamaged files do not depend on this choice.

From the beginning of its host phase to the end of its card phase, an image occupies a *state* of nvJPEG: buffers for its
coefficients (or for the file, if the card reads the codes). States with one backend and one capacity form a *pool*:

    threads of ``Pools.images``                 thread of the batch (``_card_phases``)
    take idle states from the pools
    run host phases  ── ``_Batch.ready`` ──►    queues card phases, and one event per call of host phases
    wait for idle states  ◄── pools ──────      puts states back when the event of their call has happened
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core.encoded import Format, is_among
from gpuaug.core.streams import Event, Lane
from gpuaug.decode import nvjpeg
from gpuaug.decode.decoders.base import PREPARED, FileDecoder, Resources
from gpuaug.decode.decoders.engines import card_files, fits_nvjpeg
from gpuaug.decode.layout import Layout, Work

MAX_STATES = 96
"""Maximum number of states of a pool, which all loaders of a process on one device share.

A state of the smallest capacity has 2 MB of page-locked and 3 MB of device memory. With 48 states, threads waited for states:
14 threads decoded 9,900 images/s with 48 states and 4 images per call, and 11,200 to 12,000 with 96 to 128 states and 8 images
(H200, 2026-11-26).
"""

MIN_STATES = 4
"""Number of states that a pool may have even if their capacities exceed ``POOL_BYTES``."""

POOL_BYTES = {nvjpeg.HYBRID: 2**29, nvjpeg.GPU_HYBRID: 2**30}
"""Maximum sum of the capacities of the states of a pool, in bytes, by backend of nvJPEG. See ``MIN_STATES``."""

MIN_CAPACITY = 2**21
"""Minimum capacity of a state, in bytes of coefficients: enough for 500,000 pixels at 4:2:0, with a margin."""

MAX_PIXELS = 2**25
"""Maximum number of pixels of an image. Coefficients take up to 6 bytes per pixel."""

CARD_HUFFMAN_PIXELS = 250_000
"""Minimum number of pixels of a baseline JPEG whose Huffman codes the card reads.

If the card reads the codes, the host phase of a photograph of 12 megapixels takes 13 ms instead of 46 ms, and the host phase of
a photograph of 0.2 megapixels 0.3 ms instead of 0.8 ms. But the card phase of the small photograph takes 0.13 ms instead of
0.05 ms, for which a training step may wait. On small photographs, relative to training without decoding, ResNet-50 trained at
0.95 of the speed if the host read all Huffman codes, at 0.92 if the card read them all, and at 0.94 with this minimum (H200,
2026-11-27).
"""

LARGE_PIXELS = 2**22
"""Number of pixels above which a baseline JPEG is large: of large files, this decoder takes a share from the JPEG engines.

The engines are the JPEG decoding hardware of a card.
"""

LARGE_SHARE = 5 / 16
"""Share of the large baseline JPEGs that this decoder takes from the engines.

The engines alone decode 910 photographs of 12 megapixels per second, with 2 cores busy. With a share of 1/4, 1,183 photographs
per second are decoded with 7 cores; with 5/16, 1,337 with 9 cores; with 3/8, 1,339 with 13 cores (H200, 16 cores, 2026-11-27).
"""

LARGE_THREADS = 7
"""Minimum number of decoding threads with which this decoder takes a share of the large files from the engines.

With 4 threads, 500 photographs of 12 megapixels were decoded per second with a share, and 915 by the engines alone (H200,
2026-11-27).
"""

PINNED_SHARE = {nvjpeg.HYBRID: 1, nvjpeg.GPU_HYBRID: 1 / 4}
"""Page-locked memory of a state, relative to its capacity, by backend of nvJPEG.

It contains the coefficients of an image with ``HYBRID``. With ``GPU_HYBRID`` it contains the file, which takes 1.0 to 1.7 times
its length. If a file is too long, such as one of the highest quality, nvJPEG enlarges the memory of the state.
"""

DEVICE_SHARE = 3 / 2
"""Device memory of a state, relative to its capacity."""

_HASH = np.uint32(2_654_435_761)
"""Factor of a multiplicative hash to 32 bits: 2**32 divided by the golden ratio."""

MAX_IMAGES = 32
"""Maximum number of images per call of host phases.

A thread that runs one host phase per call takes the interpreter's lock twice per image, and waits for it. 14 threads decoded
11,900 images of 0.2 megapixels per second with 8 images per call, 13,600 with 16 and 14,300 with 32 (H200, 2026-11-27).
"""

MAX_CALL_BYTES = 2**21
"""Maximum number of bytes of the files of one call of host phases. A call of one file may exceed it.

A call of several large photographs would take tenths of a second, and keep their states for so long.
"""


def max_states(backend: int, capacity: int) -> int:
    """Return the maximum number of states of a pool. ``capacity``: of each state, in bytes of coefficients."""
    return min(max(POOL_BYTES[backend] // capacity, MIN_STATES), MAX_STATES)


class Hybrid(FileDecoder):
    """Decode with nvJPEG in phases: host phases on the threads that decode on the CPU, card phases on a lane of the loader.

    Args:
        device: A CUDA device.

    Raises:
        NvJpegError: If nvJPEG cannot be set up.
    """

    name, on_card = "hybrid", True
    files = "baseline JPEG in one scan, or progressive JPEG: 4:4:4, 4:2:2, 4:2:0, 4:4:0 or grey, at most 32 megapixels"
    max_calls = PREPARED

    def __init__(self, device: torch.device) -> None:
        self._decoders = {backend: nvjpeg.PhasedDecoder(device, backend) for backend in PINNED_SHARE}
        self._phase_decoder = self._decoders[nvjpeg.HYBRID]
        """Decoder whose methods run the phases, also for states of the other decoder."""
        self.decodes_windows = self._phase_decoder.exact_windows
        # One pool per backend and capacity: nvJPEG would wait for all work of the device to enlarge a state.
        self._pools: dict[_PoolKey, _Pool] = {}
        self._creation_lock = threading.Lock()

    @property
    def version(self) -> str:
        """Version of nvJPEG."""
        return f"nvJPEG {self._phase_decoder.version}"

    @property
    def held_bytes(self) -> tuple[int, int]:
        """(page-locked bytes, device bytes) of all states."""
        pools = list(self._pools.items())
        bytes_of_states = [self._decoders[key.backend].held_bytes(state) for key, pool in pools for state in pool.states]
        return sum(pinned for pinned, _ in bytes_of_states), sum(device for _, device in bytes_of_states)

    def takes(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return the (B,) mask of the baseline and progressive JPEGs with a supported chroma subsampling and size."""
        is_small: NDArray[np.bool_] = table["height"].astype(np.int64) * table["width"] <= MAX_PIXELS
        return is_small & fits_nvjpeg(table) & is_among(table["format"], (Format.JPEG, Format.PROGRESSIVE_JPEG))

    def takes_first(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return the (B,) mask of large baseline JPEGs that this decoder takes from the engines, which are too slow for all.

        A hash of the length of a file selects the files, so that a file is always decoded by the same decoder.
        """
        pixels = table["height"].astype(np.int64) * table["width"]
        hashes = table["length"].astype(np.uint32) * _HASH  # the lower 32 bits of the product
        is_first = self.takes(table)
        is_first &= (table["format"] == Format.JPEG) & (pixels > LARGE_PIXELS) & (hashes < 2**32 * LARGE_SHARE)
        return is_first

    def begin(self, work: Work[Layout], indices: NDArray[Any], resources: Resources) -> Callable[[], Event]:
        """Return a function that decodes. No phase starts before its call: two batches could wait for each other's states."""
        return partial(self._decode, work, indices, resources)

    def _decode(self, work: Work[Layout], indices: NDArray[Any], resources: Resources) -> Event:
        """Submit the host phases, longest file first, and queue each card phase when its host phase has ended.

        Returns:
            Event after all card phases.
        """
        headers = work.layout.headers
        indices = indices[np.argsort(-headers["length"][indices])]
        keys = zip(_backends(headers[indices]).tolist(), _capacities(headers[indices]).tolist(), strict=True)
        # Calls are so large that the calls of this batch occupy a third of the threads: other batches, decoded at the same
        # time, occupy the other threads. With smaller calls, threads would wait more often for the interpreter's lock.
        max_images = min(max(3 * len(indices) // resources.pools.threads, 1), MAX_IMAGES)
        batch = _Batch(work, card_files(work, indices), [_PoolKey(*key) for key in keys], iter(range(len(indices))), max_images)
        # Taken before any state is in use: this thread puts the states back, and must not wait for a lane meanwhile.
        lane = resources.card_lanes.get()
        try:
            try:
                for _ in range(min(len(indices), resources.pools.threads)):
                    resources.pools.images.submit(self._host_phases, batch, resources)
            except RuntimeError as error:  # a thread could not be started, but others may be running
                for file_index in batch.pending:
                    batch.ready.put(_Call([file_index], [], [error]))
            event, errors = self._card_phases(batch, lane)
        finally:
            resources.card_lanes.put(lane)
        if errors:
            raise errors.pop(0)
        return event

    def _host_phases(self, batch: "_Batch", resources: Resources) -> None:
        """Run host phases of a batch, several per call, until no image is pending. Runs on several threads for one batch."""
        for file_index in batch.pending:
            # The first file of a call is its longest, because files are pending in descending order of length.
            images_of_call = min(MAX_CALL_BYTES // int(batch.files["length"][file_index]), batch.images_per_call)
            file_indices = [file_index, *islice(batch.pending, max(images_of_call - 1, 0))]
            while file_indices:
                states: list[nvjpeg.PhasedState] = []
                outcomes: Sequence[str | BaseException] = []
                if not batch.work.is_abandoned:
                    try:
                        nvjpeg.enter(resources.lanes.device)
                        states = self._take_states([batch.pool_keys[file_index] for file_index in file_indices])
                        outcomes = self._phase_decoder.host_phases(states, batch.files[file_indices[: len(states)]])
                    except BaseException as error:  # passed to the thread of the batch, which raises it
                        outcomes = [error] * (len(states) or len(file_indices))
                count = len(outcomes) or len(file_indices)
                batch.ready.put(_Call(file_indices[:count], states, outcomes))
                del file_indices[:count]

    def _take_states(self, keys: "list[_PoolKey]") -> list[nvjpeg.PhasedState]:
        """Return states for the first n images of ``keys``, with n of at least 1. Wait only if no state is free for the first.

        A thread that waited for a state while it holds other states could cause a deadlock.
        """
        states: list[nvjpeg.PhasedState] = []
        for key in keys:
            state = self._state(key, waits=not states)
            if state is None:
                break
            states.append(state)
        return states

    def _state(self, key: "_PoolKey", *, waits: bool) -> nvjpeg.PhasedState | None:
        """Return an idle or a new state. If there is none, wait for a state, or return ``None`` if ``waits`` is false.

        Raises:
            NvJpegError: If the pool has no state to wait for, and none can be created.
        """
        pool = self._pools.get(key) or self._pools.setdefault(key, _Pool())  # another thread may add the pool first
        try:
            return pool.idle.get_nowait()
        except Empty:
            with self._creation_lock:
                if len(pool.states) < max_states(*key):
                    try:
                        pinned_bytes = int(PINNED_SHARE[key.backend] * key.capacity)
                        device_bytes = int(DEVICE_SHARE * key.capacity)
                        pool.states.append(self._decoders[key.backend].state(pinned_bytes, device_bytes))
                        return pool.states[-1]
                    except nvjpeg.NvJpegError:  # no memory for another state
                        if waits and not pool.states:
                            raise
        return pool.idle.get() if waits else None

    def _put_back(self, batch: "_Batch", call: "_Call") -> None:
        """Return the states of a call to their pools."""
        for file_index, state in zip(call.file_indices, call.states, strict=False):
            self._pools[batch.pool_keys[file_index]].idle.put(state)

    def _card_phases(self, batch: "_Batch", lane: Lane) -> tuple[Event, list[BaseException]]:
        """Queue the card phase of each image when its host phase has ended.

        Returns:
            Event after all card phases, and the errors of the phases.
        """
        # Calls whose states are in use, in order, and the events after their card phases.
        calls, events = deque[_Call](), deque[Event]()
        unfinished = len(batch.files)
        errors: list[BaseException] = []
        try:
            while unfinished or calls:
                # Put states back before waiting for host phases, which may be waiting for states.
                if calls and (batch.ready.empty() or events[0].query()):
                    events[0].synchronize()
                    events.popleft()
                    self._put_back(batch, calls.popleft())
                    continue
                call = batch.ready.get()
                unfinished -= len(call.file_indices)
                calls.append(call)
                positions = [position for position, outcome in enumerate(call.outcomes) if not outcome]
                files = batch.files[call.file_indices]
                states = [call.states[position] for position in positions]
                card_outcomes = self._phase_decoder.card_phases(states, files[positions], lane.handle)
                events.append(lane.record_event())
                outcomes = {**dict(enumerate(call.outcomes)), **dict(zip(positions, card_outcomes, strict=True))}
                for position, outcome in outcomes.items():
                    if isinstance(outcome, BaseException):
                        errors.append(outcome)
                    elif outcome:
                        batch.work.problems[int(files["index"][position])] = outcome
        except BaseException:  # such as a failed event, after which the card does no more work
            batch.work.is_abandoned = True
            for call in calls:
                self._put_back(batch, call)
            while unfinished:  # wait until no thread reads a file of the batch
                call = batch.ready.get()
                self._put_back(batch, call)
                unfinished -= len(call.file_indices)
            raise
        return lane.record_event(), errors


class _PoolKey(NamedTuple):
    """Backend and capacity of the decoding states of a pool."""

    backend: int
    """Backend of nvJPEG: ``HYBRID`` or ``GPU_HYBRID``."""
    capacity: int
    """Maximum size of the coefficients of an image, in bytes: a power of 2."""


@dataclass(slots=True)
class _Pool:
    """Decoding states of one backend and one capacity."""

    states: list[nvjpeg.PhasedState] = field(default_factory=list)
    """All states of the pool, idle or in use."""
    idle: "SimpleQueue[nvjpeg.PhasedState]" = field(default_factory=SimpleQueue)
    """States that no image uses."""


class _Call(NamedTuple):
    """Images whose host phases one call has run, or which were skipped, after an error or in an abandoned batch."""

    file_indices: list[int]
    """(n,) indices into ``_Batch.files``."""
    states: list[nvjpeg.PhasedState]
    """(n,) states in use; empty if the images were skipped."""
    outcomes: Sequence[str | BaseException]
    """(n,) results, as ``PhasedDecoder.host_phases`` returns them; empty for an abandoned batch."""


@dataclass(slots=True)
class _Batch:
    """Images of one member of a batch while they are decoded."""

    work: Work[Layout]
    """Decoding task of the member."""
    files: NDArray[np.void]
    """(n,) records of ``nvjpeg_loops.FILE``, one per image, in descending order of length."""
    pool_keys: list[_PoolKey]
    """Per file, the key of the pool whose states can decode the file."""
    pending: Iterator[int]
    """Indices into ``files`` of the images whose host phase has not started. Shared by all threads."""
    images_per_call: int
    """Maximum number of images per call of host phases."""
    ready: "SimpleQueue[_Call]" = field(default_factory=SimpleQueue)
    """Calls that have ended. Each image is in one of them."""


def _backends(headers: NDArray[np.void]) -> NDArray[np.int64]:
    """Return the (n,) backends of nvJPEG for images: ``GPU_HYBRID`` where the card reads the Huffman codes.

    ``headers``: (n,) records of ``HEADER``.
    """
    reads_on_card = headers["format"] == Format.JPEG
    reads_on_card &= headers["height"].astype(np.int64) * headers["width"] >= CARD_HUFFMAN_PIXELS
    return np.where(reads_on_card, nvjpeg.GPU_HYBRID, nvjpeg.HYBRID)


def _capacities(headers: NDArray[np.void]) -> NDArray[np.int64]:
    """Return the (n,) capacities for images: 2 bytes per coefficient, plus a quarter and 256 KB, rounded up to a power of 2.

    ``headers``: (n,) records of ``HEADER``.
    """
    area = (headers["height"].astype(np.int64) + 31) * (headers["width"].astype(np.int64) + 31)
    # Product h·v of the sampling factors of luma (1 to 4), from ``sampling`` = 4·h + v: h is ``(sampling - 1) // 4``. Luma has
    # h·v times the pixels of a chroma plane.
    luma_factors = (headers["sampling"] - 1) // 4 * ((headers["sampling"] - 1) % 4 + 1)
    chroma_share = np.where(headers["channels"] == 3, 2 / np.maximum(luma_factors, 1), 0)
    bytes_needed = np.maximum(2.5 * area * (1 + chroma_share) + 2**18, MIN_CAPACITY)
    capacities: NDArray[np.int64] = (2 ** np.ceil(np.log2(bytes_needed))).astype(np.int64)
    return capacities
