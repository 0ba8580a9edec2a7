"""Interface of a decoder of image files or clips, and the threads and lanes that decoders use.

A *lane* is a CUDA stream with a name. A *card* is a GPU. The JPEG engines and the video engines (NVDEC) are decoding hardware
of a card. A *window* is the part of an image that is decoded. ``Work`` (``layout.py``) is the decoding task for one member of a
batch: headers and bytes of the files, and buffers for the pixels. A *member* is an entry of a batch. An *upright* image is
rotated as its EXIF orientation requires. *Pending* images or clips are those that no thread has started.
"""

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

While the slowest file of one batch is decoded, or a batch waits for device memory, idle threads decode the next batches. With a
maximum of two batches, 9 of 16 cores were idle on a mix of file formats.
"""


MAX_SESSIONS = 12
"""Maximum number of sessions (open decoders of the video engines) that decode at the same time, one per thread.

An H100 has 7 video engines.
"""


class Pools:
    """Pools of threads for one iterator of a loader. Threads start with the first batch, after the workers have been forked.

    Args:
        threads: Number of threads in ``images``.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.batches = ThreadPoolExecutor(PREPARED, "gpuaug-decode")
        """Threads that each start the decoders of one batch, and wait for them."""
        self.card = ThreadPoolExecutor(1, "gpuaug-decode-card")
        """Thread that calls the JPEG engines. One, because the calls must not overlap."""
        self.images = ThreadPoolExecutor(threads, "gpuaug-decode-cpu")
        """Threads that decode images and clips on the CPU, or run the CPU's part of decoding on the card."""
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
    """Lane for copies of images that the CPU decodes, to device memory."""
    card_lanes: "SimpleQueue[Lane]"
    """Lanes that no decoder uses. A decoder that writes to device memory takes a lane, and puts it back after its calls."""
    pools: Pools


class FileDecoder(ABC):
    """Decoder of the images or clips of a batch. One object serves all loaders of a device."""

    name: ClassVar[str]
    """Name of the decoder in ``DecoderTable``, which shows the user the decoders of a stage."""
    files: str
    """Short description of the files that the decoder decodes, for ``DecoderTable``."""
    on_card: ClassVar[bool]
    """Whether the decoder writes images to device memory, in the stored orientation and size. Other decoders write upright,
    downsampled images to host memory."""
    decodes_windows: bool = True
    """Whether the decoder can decode a window of an image, with the same pixels as in the whole image."""
    max_calls: int = 1
    """Maximum number of concurrent calls for one loader. Each call uses one of ``Resources.card_lanes``."""

    @property
    def description(self) -> str:
        """Text of the decoder's row in ``DecoderTable``."""
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
        """Return the (B,) mask of the files that the decoder can decode. ``table``: (B,) records of ``HEADER`` or ``CLIP``."""

    def takes_first(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return the (B,) mask of the files that this decoder decodes although an earlier one takes them. Default: none."""
        return np.zeros(len(table), np.bool_)

    def enlarge(self, windows: NDArray[np.int64], table: NDArray[np.void], scales: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return (n, 4) windows that contain ``windows``, enlarged to regions that are faster to decode.

        Args:
            windows: (n, 4) top, left, height and width, in downsampled images with EXIF orientation 1. May be modified.
            table: (n,) records of ``HEADER``.
            scales: (n,) factors by which the images are downsampled.
        """
        return windows

    def begin_all(self, tasks: Sequence[tuple[Any, NDArray[Any]]], resources: Resources) -> list[Callable[[], Event]]:
        """Start to decode images or clips of several members of a batch. A decoder defines this method or ``begin``.

        By default, call ``begin`` for each member.

        Args:
            tasks: Per member, the arguments ``work`` and ``indices`` of ``begin``.
            resources: Lanes and threads.

        Returns:
            Functions as ``begin`` returns them, which together wait for all members.
        """
        return [self.begin(work, indices, resources) for work, indices in tasks]

    def begin(self, work: Any, indices: NDArray[Any], resources: Resources) -> Callable[[], Event]:
        """Start to decode images or clips of a batch. Called on a thread of ``Pools.batches``.

        If ``on_card`` is true, it is called only when the device memory of the batch can be written.

        Args:
            work: ``Work`` of one member. The decoder adds images and clips that cannot be decoded to ``work.problems``.
            indices: (n,) indices of the images or clips that this decoder decodes.
            resources: Lanes and threads.

        Returns:
            Function that waits for the decoder on the host, and returns the event after which the pixels are in ``work.data``.
        """
        raise NotImplementedError


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
        """Decode on ``count`` threads, and return the result of ``begin``, whose arguments are the first three.

        For ``count``, ``function`` and ``pending`` see the function ``share``.
        """
        wait_for_calls = share(resources.pools.images.submit, count, function, pending)

        def finish() -> Event:
            wait_for_calls()
            work.copy_staged(indices, resources.lane)
            return resources.lane.record_event()

        return finish


def share(
    submit: Callable[..., Future[None]], count: int, function: Callable[[Iterator[Item]], None], pending: Iterator[Item]
) -> Callable[[], None]:
    """Start concurrent calls of one function on several threads, which take images from one shared iterator.

    Submitting one task per image would take ten times as long in Python.

    Args:
        submit: Method ``submit`` of an executor.
        count: Number of calls.
        function: Function to call with ``pending``. It decodes until ``pending`` is exhausted.
        pending: Images or clips that no thread has started, shared by all calls.

    Returns:
        Function that waits until all calls have ended, and then raises the first error of a call. After an error it waits for
        the other calls, too, because they must not write to memory that is reused.
    """
    futures: list[Future[None]] = []
    try:
        for _ in range(count):
            futures.append(submit(function, pending))  # noqa: PERF401 - after an error, the list must have the earlier calls
    except RuntimeError as error:  # a thread could not be started, but others are running
        for _ in pending:  # exhausted, because the failed call stays queued and may run later
            pass
        futures.append(Future())
        futures[-1].set_exception(error)

    def finish() -> None:
        wait(futures)
        for future in futures:
            future.result()

    return finish
