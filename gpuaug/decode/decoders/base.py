"""The interface of a decoder of image files."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gpuaug.core.streams import Event, Lane, Lanes

PREPARED = 4
"""Batches in preparation at once.

Threads that are done with one batch go on with the next while its slowest file is decoded, and while a batch waits for the card
to free memory: with two, 9 of 16 cores were idle on files of many kinds.
"""


MOST_SESSIONS = 8
"""Sessions of NVDEC that decode at once, each on a thread. An H100 has seven engines."""


class Pools:
    """The threads of one iterator, started with its first batch and so after workers have been forked.

    Args:
        threads: Number of threads that decode on the CPU.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.batches = ThreadPoolExecutor(PREPARED, "gpuaug-decode")
        self.card = ThreadPoolExecutor(1, "gpuaug-decode-card")  # calls of the engines do not overlap
        self.images = ThreadPoolExecutor(threads, "gpuaug-decode-cpu")
        self.clips = ThreadPoolExecutor(MOST_SESSIONS, "gpuaug-decode-nvdec")

    def close(self) -> None:
        """End the threads after their current calls."""
        self.batches.shutdown(cancel_futures=True)
        self.card.shutdown()
        self.clips.shutdown(cancel_futures=True)
        self.images.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Resources:
    """Lanes and threads that a decoder uses for one batch."""

    lanes: Lanes
    lane: Lane
    """Lane for copies of images that the CPU has decoded."""
    card_lanes: "SimpleQueue[Lane]"
    """Idle lanes for calls of decoders of the card. A call takes a lane and puts it back."""
    pools: Pools


class FileDecoder(ABC):
    """Decodes files of a batch. One object serves all loaders of a device."""

    name: ClassVar[str]
    files: ClassVar[str]
    """Short description of the files that it takes."""
    on_card: ClassVar[bool]
    """Whether it writes images as stored to the device's memory. Other decoders write upright, downsampled images on the
    host."""
    decodes_windows: bool = True
    """Whether it decodes the window of an image, with the pixels that the whole image has there."""
    calls: int = 1
    """Maximum number of concurrent calls on the lanes of one loader."""

    @property
    def held_bytes(self) -> tuple[int, int]:
        """Bytes that it keeps for all loaders: page-locked, on the device."""
        return 0, 0

    @property
    @abstractmethod
    def version(self) -> str:
        """The libraries and their versions."""

    @abstractmethod
    def takes(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """(B,) whether it decodes each file, by the records of ``HEADER`` alone."""

    def widened(self, windows: NDArray[np.int64], table: NDArray[np.void], scales: NDArray[np.int64]) -> NDArray[np.int64]:
        """Windows that contain those wanted, and are decoded in less time.

        Args:
            windows: (n, 4) top, left, height and width in images that are upright as stored.
            table: (n,) records of ``HEADER``.
            scales: (n,) downsampling factors.
        """
        return windows

    @abstractmethod
    def begin(self, work: Any, indices: NDArray[Any], resources: Resources) -> Callable[[], Event]:
        """Start to decode the images ``indices`` of a batch. Called on a thread of ``Pools.batches``.

        A decoder on the card is called when the device's memory of the batch is free to be written.

        Args:
            work: The ``Work`` of a batch, or the ``ClipWork`` for a decoder of clips. Images and clips that cannot be decoded
                are added to its ``problems``.
            indices: (n,) indices of the images.
            resources: Lanes and threads.

        Returns:
            A function that waits for the decoder and returns the event after which the pixels are in ``work.data``.
        """
