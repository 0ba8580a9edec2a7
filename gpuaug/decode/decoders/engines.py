"""Decoding of baseline JPEGs by the JPEG engines (decoding hardware) of a data-centre GPU (*card*).

One call per batch and chroma subsampling decodes all files with this subsampling, of all members of the batch. A *window* is
the part of an image that is decoded. A *member* is an entry of the batch: images that were collated together. A *group* is the
files of one chroma subsampling, or grey files. A *lane* is a CUDA stream.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core.encoded import Format, is_among
from gpuaug.core.streams import Event
from gpuaug.decode import nvjpeg
from gpuaug.decode.decoders.base import FileDecoder, Resources
from gpuaug.decode.layout import Layout, Work
from gpuaug.decode.nvjpeg_loops import FILE

MAX_ENGINE_SIDE = 16384
"""Maximum length of a side that the JPEG engines support, in pixels."""

SAMPLINGS = (4 * 1 + 1, 4 * 2 + 1, 4 * 2 + 2, 4 * 1 + 2)
"""Chroma subsamplings that the engines support: 4:4:4 or grey, 4:2:2, 4:2:0, 4:4:0.

Written as 4·h + v, as in the field ``sampling`` of ``core.encoded.HEADER``: h and v are the horizontal and vertical sampling
factors of luma.
"""

_GREY = 0
"""Value of ``FILE["group"]`` for grey files. For files with chroma, the group is the value of ``sampling``.

``SAMPLINGS`` has no 0, so a group is either grey or has chroma.
"""


def fits_nvjpeg(table: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return the (B,) mask of the JPEGs whose chroma subsampling and size the engines support. The format is not checked.

    ``Hybrid`` has the same limits, and a limit of pixels.
    """
    fits_engines: NDArray[np.bool_] = np.maximum(table["height"], table["width"]) <= MAX_ENGINE_SIDE
    return fits_engines & is_among(table["sampling"], SAMPLINGS)


class Engines(FileDecoder):
    """JPEG engines of one device.

    Loaders of a device share one instance per process (``registry.py``), whose calls run one at a time, until their GPU work
    has ended: on an H200 with nvJPEG 13.3, concurrent calls of threads or processes deadlocked, and were not faster.
    Each batch has calls of its own: with 16 files per batch, common calls for waiting batches were not faster.

    Args:
        device: A CUDA device.

    Raises:
        NvJpegError: If the device has no engines, or nvJPEG cannot be set up.
    """

    name, on_card = "engines", True
    files = "baseline JPEG in one scan: 4:4:4, 4:2:2, 4:2:0, 4:4:0 or grey, sides of at most 16384 pixels"

    def __init__(self, device: torch.device) -> None:
        self._decoder = nvjpeg.BatchDecoder(device)
        self._call_lock = threading.Lock()
        self.decodes_windows = self._decoder.exact_windows

    @property
    def version(self) -> str:
        """Version of nvJPEG."""
        return f"nvJPEG {self._decoder.version}"

    def takes(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return the (B,) mask of the baseline JPEGs with a supported chroma subsampling and size."""
        return fits_nvjpeg(table) & is_among(table["format"], (Format.JPEG,))

    def begin_all(self, tasks: Sequence[tuple[Work[Layout], NDArray[Any]]], resources: Resources) -> list[Callable[[], Event]]:
        """Submit the calls to ``Pools.card``, a thread with no other tasks, so that the engines wait for no Python code.

        Returns:
            One function for all members: it waits for the calls, and returns the event after their GPU work.
        """
        calls = self._calls(tasks)
        try:
            return [resources.pools.card.submit(self._decode, tasks, calls, resources).result]
        except RuntimeError:  # the task was queued, and then the thread could not be started
            calls.clear()  # otherwise the task, if it runs later, would write to memory that is then reused
            raise

    def _calls(self, tasks: Sequence[tuple[Work[Layout], NDArray[Any]]]) -> list[NDArray[np.void]]:
        """Return the files of each call: one (n,) array of ``FILE`` per group and output format, with files of all members.

        A file whose size according to nvJPEG differs from its header is left out, and added to ``work.problems``. Calls of a
        few files would leave engines idle, so a call has the files of all members. The largest images come first, because all
        engines then end at about the same time.

        256 photographs, a fifth of them not 4:2:0, took 40 ms in one call with one decoding state of nvJPEG, 10 ms with one
        call and one state per group, and 8.5 ms with the largest images first (H200, nvJPEG 13.3).
        """
        files_of_members = []
        for number, (work, indices) in enumerate(tasks):
            table = work.layout.headers[indices]
            files = card_files(work, indices)
            files["work"] = number  # index into ``tasks``
            files["group"] = np.where(table["channels"] == 1, _GREY, table["sampling"])
            self._decoder.find_sizes(files)
            matches = (files["found_height"] == files["height"]) & (files["found_width"] == files["width"])
            work.problems.update((int(file["index"]), nvjpeg.size_problem(file)) for file in files[~matches])
            files_of_members.append(files[matches])
        files = np.concatenate(files_of_members)
        files = files[np.argsort(-files["height"] * files["width"], kind="stable")]
        if any(work.layout.shapes.windows is not None for work, _ in tasks):
            self._decoder.set_windows(files)
        calls = files["group"] * 256 + files["form"]  # a number per pair; one-dimensional, because np.unique of pairs is slow
        return [files[calls == call] for call in np.unique(calls)]

    def _decode(
        self, tasks: Sequence[tuple[Work[Layout], NDArray[Any]]], calls: list[NDArray[np.void]], resources: Resources
    ) -> Event:
        """Decode a batch on the thread of ``Pools.card``, and return the event after the GPU work.

        If a call fails, its files are divided into two calls, and so on, until the files that fail are found.
        """
        nvjpeg.enter(resources.lanes.device)
        with self._call_lock:
            lane = resources.card_lanes.get()
            try:
                while calls:
                    is_abandoned = tasks[0][0].is_abandoned  # ``abandon`` sets it for all members of a batch
                    # Not lane.record_event() and synchronize() after each call: with 16 files per batch, taking the
                    # interpreter's lock again after each took longer than the calls (1.6 and 1.4 ms per batch, H200).
                    statuses = [0] * len(calls) if is_abandoned else self._decoder.decode(calls, lane.handle)
                    failed: list[NDArray[np.void]] = []
                    for files, status in zip(calls, statuses, strict=True):
                        middle = len(files) // 2
                        if status and middle:
                            failed += [files[:middle], files[middle:]]
                            continue
                        if status:  # ``files`` has only one file, because a call of several files would be divided
                            tasks[int(files["work"][0])][0].problems[int(files["index"][0])] = nvjpeg.problem(status)
                        if files["parameters"].any():
                            self._decoder.put_back(files)
                    calls = failed
                return lane.record_event()
            finally:
                resources.card_lanes.put(lane)


def card_files(work: Work[Layout], indices: NDArray[Any]) -> NDArray[np.void]:
    """Return (n,) records of ``FILE``, without ``work`` and ``group``, for images of one member.

    Args:
        work: Decoding task of the member.
        indices: (n,) indices of the images. Images that need postprocessing are decoded into ``work.raw``, others into
            ``work.data``.
    """
    layout = work.layout
    table = layout.headers[indices]
    files = np.zeros(len(indices), FILE)
    files["index"] = indices
    files["address"] = work.encoded.data.data_ptr() + table["start"]
    for name in ("length", "height", "width"):
        files[name] = table[name]
    windows = layout.card_windows(indices)
    for name, column in zip(("top", "left", "window_height", "window_width"), windows.T, strict=True):
        files[name] = column
    addresses = work.data.data_ptr() + layout.starts[indices]
    if work.raw is not None:
        addresses = np.where(layout.needs_postprocessing[indices], work.raw.data_ptr() + layout.raw_starts[indices], addresses)
    files["output"]["channel"][:, 0] = addresses
    files["output"]["pitch"][:, 0] = windows[:, 3] * layout.channels
    files["form"] = nvjpeg.OUTPUT_RGBI if layout.channels == 3 else nvjpeg.OUTPUT_Y
    return files
