"""Decoding of baseline JPEGs by the JPEG engines (decoding hardware) of a data-centre GPU (*card*).

One call per chroma subsampling decodes all files with this subsampling, of all members of a batch, and of small batches that
wait at the same time. A *window* is the part of an image that is decoded. A *member* is an entry of the batch: images that were
collated together. A *group* is the files of one chroma subsampling, or grey files. A *lane* is a CUDA stream.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty
from typing import Any, NamedTuple

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

MERGED_FILES = 256
"""Waiting batches are decoded together until they have this number of files."""

Tasks = Sequence[tuple[Work[Layout], NDArray[Any]]]
"""Per member of a batch: its decoding task, and the (n,) indices of its images that the engines decode."""


class Request(NamedTuple):
    """Files of one batch that wait for the engines."""

    tasks: Tasks
    calls: list[NDArray[np.void]]
    """Files of each call if the batch is decoded alone: one (n,) array of ``FILE`` per group and output format."""
    event: Future[Event]
    """Event after the GPU work of the batch, or an error."""


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

    def begin_all(self, tasks: Tasks, resources: Resources) -> list[Callable[[], Event]]:
        """Submit the files to ``Pools.card``, a thread with no other tasks, so that the engines wait for no Python code.

        Returns:
            One function for all members: it waits for the calls, and returns the event after their GPU work.
        """
        request = Request(tasks, self._calls(tasks), Future())
        pools = resources.pools
        pools.card_requests.put(request)
        try:
            pools.card.submit(self._decode_requests, resources)
        except RuntimeError:  # the task was queued, and then the thread could not be started
            request.calls.clear()  # otherwise the task, if it runs later, would write to memory that is then reused
            raise
        return [request.event.result]

    def _calls(self, tasks: Tasks) -> list[NDArray[np.void]]:
        """Return ``Request.calls``. A file whose size by nvJPEG is not the size in its header is added to ``work.problems``.

        256 photographs, a fifth of them not 4:2:0, took 40 ms in one call with one decoding state of nvJPEG, and 10 ms with one
        call and one state per group (H200, nvJPEG 13.3).
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
        files = _largest_first(np.concatenate(files_of_members))
        if any(work.layout.shapes.windows is not None for work, _ in tasks):
            self._decoder.set_windows(files)
        calls = files["group"] * 256 + files["form"]  # a number per pair; one-dimensional, because np.unique of pairs is slow
        return [files[calls == call] for call in np.unique(calls)]

    def _decode_requests(self, resources: Resources) -> None:
        """Decode waiting requests together, on the thread of ``Pools.card``. Later tasks of the thread find no request.

        Calls of few files leave engines idle: with 16 files per batch, in three calls, most engines waited for the largest file
        of each call.
        """
        requests: list[Request] = []
        file_count = 0
        while file_count < MERGED_FILES:
            try:
                request = resources.pools.card_requests.get_nowait()
            except Empty:
                break
            requests.append(request)
            file_count += sum(map(len, request.calls))
        if requests:
            self._answer(requests, resources)

    def _answer(self, requests: Sequence[Request], resources: Resources) -> None:
        """Decode requests together, and set their events. After an error, decode each alone, to find the batch that fails."""
        try:
            event = self._decode(requests, resources)
        except BaseException as error:
            if len(requests) == 1:
                requests[0].event.set_exception(error)
                return
            for request in requests:
                self._answer([request], resources)
        else:
            for request in requests:
                for files in request.calls:
                    if files["parameters"].any():
                        self._decoder.put_back(files)
                request.event.set_result(event)

    def _decode(self, requests: Sequence[Request], resources: Resources) -> Event:
        """Decode requests together, and return the event after the GPU work.

        If a call fails, its files are divided into two calls, and so on, until the files that fail are found.
        """
        nvjpeg.enter(resources.lanes.device)
        tasks = [task for request in requests for task in request.tasks]
        calls = _merged_calls(requests)
        with self._call_lock:
            lane = resources.card_lanes.get()
            try:
                while calls := _without_abandoned(calls, tasks):
                    # Not lane.record_event() and synchronize() after each call: with 16 files per batch, taking the
                    # interpreter's lock again after each took longer than the calls (1.6 and 1.4 ms per batch, H200).
                    statuses = self._decoder.decode(calls, lane.handle)
                    failed: list[NDArray[np.void]] = []
                    for files, status in zip(calls, statuses, strict=True):
                        middle = len(files) // 2
                        if status and middle:
                            failed += [files[:middle], files[middle:]]
                        elif status:
                            tasks[int(files["work"][0])][0].problems[int(files["index"][0])] = nvjpeg.problem(status)
                    calls = failed
                return lane.record_event()
            finally:
                resources.card_lanes.put(lane)


def _merged_calls(requests: Sequence[Request]) -> list[NDArray[np.void]]:
    """Return the files of each call for several batches. ``work`` is then an index into the tasks of all batches."""
    if len(requests) == 1:
        return list(requests[0].calls)
    arrays_by_key: defaultdict[tuple[int, int, bool], list[NDArray[np.void]]] = defaultdict(list)
    first_task = 0
    for request in requests:
        for files in map(np.copy, request.calls):
            files["work"] += first_task
            key = int(files["group"][0]), int(files["form"][0]), bool(files["parameters"][0])  # not 0: windows
            arrays_by_key[key].append(files)
        first_task += len(request.tasks)
    return [_largest_first(np.concatenate(arrays)) for arrays in arrays_by_key.values()]


def _without_abandoned(calls: list[NDArray[np.void]], tasks: Tasks) -> list[NDArray[np.void]]:
    """Return the files of each call without the files of batches that were abandoned."""
    is_abandoned = np.array([work.is_abandoned for work, _ in tasks])
    if not is_abandoned.any():
        return calls
    remaining = [files[~is_abandoned[files["work"]]] for files in calls]
    return [files for files in remaining if len(files)]


def _largest_first(files: NDArray[np.void]) -> NDArray[np.void]:
    """Return files in order of decreasing number of pixels, because all engines then end at about the same time.

    256 photographs took 8.5 ms instead of 10 ms (H200, nvJPEG 13.3).
    """
    return files[np.argsort(-files["height"] * files["width"], kind="stable")]


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
