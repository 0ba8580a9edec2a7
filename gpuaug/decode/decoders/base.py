"""Interface of a decoder of image files or clips, and the threads and lanes (named CUDA streams) that decoders use."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpuaug.core.streams import Event, Lane, Lanes

Item = TypeVar("Item")

PREPARED = 4
"""Maximum number of batches that are decoded at the same time.

While the slowest file of one batch is decoded, or a batch waits for device memory, idle threads decode the next batches. With
at most two batches, 9 of 16 cores were idle on a mix of file formats.
"""


MAX_SESSIONS = 12
"""Maximum number of sessions of NVDEC (the video engines) that decode at the same time, one per thread.

An H100 has 7 engines.
"""


class Pools:
    """Threads of one iterator of a loader. They start with its first batch, after the workers have been forked.

    Args:
        threads: Number of threads that decode on the CPU.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.batches = ThreadPoolExecutor(PREPARED, "gpuaug-decode")
        """Threads that run all decoders of a batch, one thread per batch."""
        self.card = ThreadPoolExecutor(1, "gpuaug-decode-card")
        """Thread that calls the JPEG engines. One, because the calls must not overlap."""
        self.images = ThreadPoolExecutor(threads, "gpuaug-decode-cpu")
        """Threads that decode images and clips on the CPU."""
        self.clips = ThreadPoolExecutor(MAX_SESSIONS, "gpuaug-decode-nvdec")
        """Threads that feed the video engines."""

    def close(self) -> None:
        """End the threads after their current calls."""
        for executor in (self.batches, self.card, self.clips, self.images):
            executor.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Resources:
    """Lanes and threads that a decoder uses for one batch."""

    lanes: Lanes
    """All lanes of the loader."""
    lane: Lane
    """Lane for copies of images that the CPU decodes."""
    card_lanes: "SimpleQueue[Lane]"
    """Idle lanes for decoders that write to device memory. A decoder takes a lane and puts it back after its calls."""
    pools: Pools


class FileDecoder(ABC):
    """Decoder of the images or clips of a batch. One object serves all loaders of a device."""

    name: ClassVar[str]
    files: ClassVar[str]
    """Short description of the files that the decoder decodes, for ``DecoderTable``."""
    on_card: ClassVar[bool]
    """Whether the decoder writes images to device memory, in the stored orientation and size. Other decoders write upright,
    downsampled images to host memory."""
    decodes_windows: bool = True
    """Whether the decoder can decode a window of an image, with the same pixels as in the whole image."""
    max_calls: int = 1
    """Maximum number of concurrent calls on the lanes of one loader."""

    @property
    def description(self) -> str:
        """Row of ``DecoderTable``."""
        return f"{self.version}: {self.files}"

    @property
    def held_bytes(self) -> tuple[int, int]:
        """(page-locked bytes, device bytes) that the decoder keeps allocated for all loaders."""
        return 0, 0

    @property
    @abstractmethod
    def version(self) -> str:
        """Names and versions of the libraries that the decoder uses."""

    @abstractmethod
    def takes(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return the (B,) mask of the files that the decoder decodes. ``table``: (B,) records of ``HEADER``."""

    def takes_first(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return the (B,) mask of the files that this decoder decodes even if an earlier decoder takes them. Default: none."""
        return np.zeros(len(table), np.bool_)

    def enlarge(self, windows: NDArray[np.int64], table: NDArray[np.void], scales: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return windows that contain ``windows``, enlarged to regions that are faster to decode.

        Args:
            windows: (n, 4) top, left, height and width, in images with EXIF orientation 1.
            table: (n,) records of ``HEADER``.
            scales: (n,) downsampling factors.
        """
        return windows

    def begin_all(self, tasks: Sequence[tuple[Any, NDArray[Any]]], resources: Resources) -> list[Callable[[], Event]]:
        """Start to decode images or clips of several members of a batch. By default, one call of ``begin`` per member.

        Args:
            tasks: (``Work``, indices) of each member, as the arguments of ``begin``.
            resources: Lanes and threads.

        Returns:
            Results of ``begin``.
        """
        return [self.begin(work, indices, resources) for work, indices in tasks]

    @abstractmethod
    def begin(self, work: Any, indices: NDArray[Any], resources: Resources) -> Callable[[], Event]:
        """Start to decode images or clips of a batch. Called on a thread of ``Pools.batches``.

        For a decoder with ``on_card``, it is called only when the device memory of the batch can be written.

        Args:
            work: ``Work`` of a batch. The decoder adds images and clips that cannot be decoded to ``work.problems``.
            indices: (n,) indices of the images or clips in the batch.
            resources: Lanes and threads.

        Returns:
            Function that waits for the decoder on the host, and returns the event after which the pixels are in ``work.data``.
        """


class HostDecoder(FileDecoder):
    """Decoder on host threads, of all files that no other decoder takes."""

    on_card = False

    def takes(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return a (B,) mask of true: all files."""
        return np.ones(len(table), np.bool_)

    def share(
        self,
        work: Any,
        indices: NDArray[Any],
        resources: Resources,
        count: int,
        function: Callable[[Iterator[Item]], None],
        pending: Iterator[Item],
    ) -> Callable[[], Event]:
        """Share a batch between ``count`` threads, and return the result of ``begin``. Other arguments: see ``share``."""
        wait_for_calls = share(resources.pools.images.submit, count, function, pending)

        def finish() -> Event:
            wait_for_calls()
            work.copy_staged(indices, resources.lane)
            return resources.lane.record_event()

        return finish


def share(
    submit: Callable[..., Future[None]], count: int, function: Callable[[Iterator[Item]], None], pending: Iterator[Item]
) -> Callable[[], None]:
    """Start concurrent calls of one function on several threads.

    Submitting one task per image would take ten times as long in Python.

    Args:
        submit: Method ``submit`` of an executor.
        count: Number of calls.
        function: Function to call with ``pending``.
        pending: Images or clips that no thread has started, shared by all threads.

    Returns:
        Function that waits until all calls have ended, even after an error, because no call may write to memory that is reused.
        It then raises the first error.
    """
    futures: list[Future[None]] = []
    try:
        for _ in range(count):
            futures.append(submit(function, pending))  # noqa: PERF401 - the list also holds the calls before an error
    except RuntimeError as error:  # a thread could not be started, but others are running
        for _ in pending:  # leave no work for the call, which may still run later
            pass
        futures.append(Future())
        futures[-1].set_exception(error)

    def finish() -> None:
        wait(futures)
        for future in futures:
            future.result()

    return finish
