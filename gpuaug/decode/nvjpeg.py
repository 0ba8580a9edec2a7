"""Bindings of nvJPEG, NVIDIA's library for JPEGs. gpuaug calls nvJPEG only through this file and ``nvjpeg_loops.py``.

``BatchDecoder`` decodes a batch of files in one call, on the *JPEG engines*, the JPEG decoding hardware of some GPUs (*cards*).
``PhasedDecoder`` decodes each file in two phases: the *host phase* on a CPU thread, then the *card phase* on a CUDA stream.

Files are passed as arrays of records of ``nvjpeg_loops.FILE``. A *window* is the part of an image that is decoded. Numbers
and names of functions are from ``nvjpeg.h`` of CUDA 12 and 13.
"""

import ctypes
import importlib.util
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from functools import cache, cached_property
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core.errors import GpuAugError
from gpuaug.decode.c_calls import addresses, load_library
from gpuaug.decode.nvjpeg_loops import CALL, NAMES, OTHER_SIZE, loops

HYBRID, GPU_HYBRID, HARDWARE = 1, 2, 3
"""Backends of nvJPEG (``NVJPEG_BACKEND_…``), which differ in where a JPEG is decoded.

``HYBRID``: the host reads the Huffman codes, and the card computes the pixels. ``GPU_HYBRID``: the host only prepares the
file, and the card also reads the Huffman codes; baseline JPEGs only. ``HARDWARE``: the JPEG engines decode the whole file.
"""

FLAGS = 1 << 5
"""``NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION``: interpolate subsampled chroma as libjpeg-turbo does. From nvJPEG 12.1 on."""

OUTPUT_Y, OUTPUT_RGBI = 2, 5
"""Output formats ``NVJPEG_OUTPUT_Y`` (luma only) and ``NVJPEG_OUTPUT_RGBI`` (interleaved RGB)."""

STATUS = {
    1: "not initialized",
    2: "invalid parameter",
    3: "bad JPEG",
    4: "JPEG not supported",
    5: "allocator failure",
    6: "execution failed",
    7: "architecture mismatch",
    8: "internal error",
    9: "implementation not supported",
    10: "incomplete bitstream",
}
"""Text for each error status that a function of nvJPEG can return. A function returns 0 on success."""
OF_THE_FILE = {3, 4, 10}
"""Error statuses whose cause is the file. The cause of all other error statuses is the library or the GPU."""

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Name of the environment variable for the number of hardware queues that the streams of a process share. CUDA reads it once,
when it starts."""

MAX_QUEUES, DEFAULT_QUEUES = 32, 8
"""CUDA's maximum and default number of hardware queues."""

_RELAXED = 2  # cudaStreamCaptureModeRelaxed

_COLUMNS = ("address", "length", "output", "parameters")
"""Fields of ``FILE`` that a call of the JPEG engines takes as arrays."""


class NvJpegError(GpuAugError, RuntimeError):
    """Error status that a function of nvJPEG has returned. ``status``: a key of ``STATUS``."""

    def __init__(self, call: str, status: int) -> None:
        self.status = status
        super().__init__(
            f"{call} must succeed, got status {status} ({STATUS.get(status, 'unknown')}). "
            "If it is the same each time, decode with DecodeStage(backend='cpu')."
        )


@cache
def library() -> ctypes.CDLL | None:
    """Return an installed nvJPEG for torch's major version of CUDA, or ``None``."""
    return load_library([*map(str, _library_files(major())), f"libnvjpeg.so.{major()}"], NAMES)


def other_majors() -> list[str]:
    """Return the major versions of CUDA, other than torch's, for which nvJPEG is installed."""
    return sorted({path.suffix[1:] for path in _library_files("*")} - {major()})


def major() -> str:
    """Return the major version of torch's CUDA, or an empty string."""
    return (torch.version.cuda or "").partition(".")[0]


def _library_files(cuda_major: str) -> list[Path]:
    """Return the paths of nvJPEG in NVIDIA's Python packages, for a major version of CUDA, or for all with ``"*"``."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    return sorted(Path(path) for folder in folders for path in glob(f"{folder}/*/lib/libnvjpeg.so.{cuda_major}"))


def ask_for_queues() -> int:
    """Set CUDA's number of hardware queues to the maximum, unless CUDA has started or the user has set the number.

    nvJPEG decodes on about sixteen streams of its own. Streams that share a hardware queue wait for each other's earlier work.
    While a ResNet-50 trained, a call of ``BatchDecoder.decode`` took 59 ms with CUDA's default of 8 queues, as long as the
    training step, and 12 ms with 32.

    Returns:
        Number of hardware queues of this process.
    """
    if QUEUES not in os.environ and not torch.cuda.is_initialized():
        os.environ[QUEUES] = str(MAX_QUEUES)
    setting = os.environ.get(QUEUES, "")
    return int(setting) if setting.isdecimal() else DEFAULT_QUEUES


queues = ask_for_queues()
"""Number of hardware queues of this process.

The environment variable is set when this module is imported, because CUDA may start at any time after that.
"""


class Library:
    """Base class of decoders: the loaded library nvJPEG, and one handle of it (``nvjpegHandle_t``), for one backend."""

    def __init__(self, device: torch.device, backend: int) -> None:
        self._library: Any = library()  # ``registry.py`` has checked that nvJPEG is installed
        self._handle = c_void_p()
        with torch.cuda.device(device):
            self._call("nvjpegCreateEx", c_int(backend), None, None, c_uint(FLAGS), byref(self._handle))

    @property
    def exact_windows(self) -> bool:
        """Whether pixels decoded within a window equal the pixels of the whole image.

        Before nvJPEG 13.2, the outermost pixels of a window may have wrong values where chroma is interpolated.
        """
        return tuple(int(part) for part in self.version.split(".")[:2]) >= (13, 2)

    @property
    def version(self) -> str:
        """Version of nvJPEG."""
        parts = [c_int() for _ in range(3)]
        for property_, part in enumerate(parts):
            self._call("nvjpegGetProperty", c_int(property_), byref(part))
        return ".".join(str(part.value) for part in parts)

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of nvJPEG, and raise an ``NvJpegError`` if its status is not 0."""
        status = int(getattr(self._library, name)(*arguments))
        if status:
            raise NvJpegError(name, status)

    def _create_object(self, name: str, *arguments: Any) -> int:
        """Call a function of nvJPEG that creates an object, and return the handle of the object."""
        handle = c_void_p()
        self._call(name, *arguments, byref(handle))
        return int(handle.value or 0)

    @cached_property
    def _addresses(self) -> NDArray[np.int64]:
        """Addresses of the functions ``nvjpeg_loops.NAMES``, which the loops take."""
        return np.array(addresses(self._library, NAMES), np.int64)


class BatchDecoder(Library):
    """JPEG engines of one device. Calls of ``decode`` must not overlap.

    A call of nvJPEG decodes files of one *group* (``FILE["group"]``), which have the same chroma subsampling. Each group has a
    decoding state of nvJPEG, because nvJPEG sets up a state again when the subsampling changes. If nvJPEG cannot create another
    state, groups share the first state. On an H200, nvJPEG could create 136 states in one process, or about 30 in all in 12
    processes with 32 hardware queues each.

    Args:
        device: A CUDA device.

    Raises:
        NvJpegError: If nvJPEG cannot be set up, or the device has no engines.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, HARDWARE)
        with torch.cuda.device(device):
            self._first_state = self._create_object("nvjpegJpegStateCreate", self._handle)
        self._states: dict[int, int] = {}
        """Group → handle of its decoding state (``nvjpegJpegState_t``)."""
        self._idle_parameters: list[int] = []
        """Handles of decoding parameters (``nvjpegDecodeParams_t``) that no batch uses."""
        (self._synchronize,) = addresses(_cuda_runtime(), ["cudaStreamSynchronize"])

    def find_sizes(self, files: NDArray[np.void]) -> None:
        """Write the size of each file by nvJPEG's parser into ``files``, (n,) ``FILE``; 0 if the parser fails."""
        loops().find_sizes(self._addresses, self._handle.value or 0, files, files.ctypes.data)

    def decode(self, calls: Sequence[NDArray[np.void]], stream: int) -> list[int]:
        """Make calls of nvJPEG, one after the other, each for files of one group. Blocks until their GPU work has ended.

        Args:
            calls: Files of each call, (n,) records of ``FILE`` of one group and one output format. If ``set_windows`` was
                called for the files, only their windows are decoded. All files of a group, in all calls, must have the same
                chroma subsampling.
            stream: Handle of the CUDA stream on which nvJPEG queues colour conversions.

        Returns:
            Per call: 0, or a status in ``OF_THE_FILE``, after which all outputs of the call are undefined.

        Raises:
            NvJpegError: If nvJPEG returns another status.
        """
        # Contiguous arrays, which must exist until the calls have ended, because ``records`` holds only their addresses.
        columns = [{name: np.ascontiguousarray(files[name]) for name in _COLUMNS} for files in calls]
        records = np.zeros(len(calls), CALL)
        for record, files, arrays in zip(records, calls, columns, strict=True):
            record["state"] = self._state(int(files["group"][0]))
            record["count"], record["form"] = len(files), files["form"][0]
            for name, array in arrays.items():
                record[name] = array.ctypes.data
            if not arrays["parameters"].all():  # ``set_windows`` was not called: the files are decoded whole
                record["parameters"] = 0
        loops().decode_batches(self._addresses, records, self._handle.value or 0, stream, self._synchronize)
        statuses: list[int] = records["status"].tolist()
        for status in statuses:
            if status and status not in OF_THE_FILE:
                raise NvJpegError("nvjpegDecodeBatched", status)
        return statuses

    def set_windows(self, files: NDArray[np.void]) -> None:
        """Write handles of decoding parameters with the window of each file into ``files``, (B,) ``FILE``. Thread-safe.

        Raises:
            NvJpegError: If nvJPEG returns an error status.
        """
        for file in files:
            try:
                file["parameters"] = self._idle_parameters.pop()
            except IndexError:
                file["parameters"] = self._create_object("nvjpegDecodeParamsCreate", self._handle)
        loops().set_windows(self._addresses, files)
        if files["status"].any():
            raise NvJpegError("nvjpegDecodeParamsSetROI", int(files["status"].max()))

    def put_back(self, files: NDArray[np.void]) -> None:
        """Make the parameters that ``set_windows`` wrote into ``files`` available for reuse. Call after ``decode``."""
        self._idle_parameters += files["parameters"].tolist()

    def _state(self, group: int) -> int:
        """Return the decoding state of a group: a new state for a new group, or the first state if none can be created."""
        if group not in self._states:
            state = self._first_state
            if self._states:
                with suppress(NvJpegError):
                    state = self._create_object("nvjpegJpegStateCreate", self._handle)
            self._states[group] = state
        return self._states[group]


class PhasedState(NamedTuple):
    """State of nvJPEG that one image occupies from its host phase to the end of its card phase."""

    handles: tuple[int, int, int, int, int]
    """Handles of the library (``nvjpegHandle_t``), the decoder (``nvjpegJpegDecoder_t``), the state (``nvjpegJpegState_t``),
    the decoding parameters (``nvjpegDecodeParams_t``), and the parsed file (``nvjpegJpegStream_t``), in this order."""
    pinned: int
    """Handle of the state's buffer in page-locked memory (``nvjpegBufferPinned_t``)."""
    device: int
    """Handle of the state's buffer in device memory (``nvjpegBufferDevice_t``)."""


class PhasedDecoder(Library):
    """Decode JPEGs in two phases, on any threads. Concurrent calls are allowed if they use different states.

    Args:
        device: A CUDA device.
        backend: ``HYBRID`` or ``GPU_HYBRID``. The pixels do not depend on it.

    Raises:
        NvJpegError: If nvJPEG cannot be set up.
    """

    def __init__(self, device: torch.device, backend: int = HYBRID) -> None:
        super().__init__(device, backend)
        with torch.cuda.device(device):
            self._decoder = self._create_object("nvjpegDecoderCreate", self._handle, c_int(backend))

    def state(self, pinned_bytes: int, device_bytes: int) -> PhasedState:
        """Create a state. Call ``enter`` on this thread first.

        Args:
            pinned_bytes: Size of the page-locked memory. If the memory is too small for an image, nvJPEG enlarges it, and then
                waits for all work of the device.
            device_bytes: Size of the device memory, which nvJPEG enlarges in the same way.

        Raises:
            NvJpegError: If the state cannot be created. The objects that were created for the state are destroyed.
        """
        handle = self._handle
        with ExitStack() as undo:  # destroys the objects of an attempt that fails
            state = self._create_object("nvjpegDecoderStateCreate", handle, c_void_p(self._decoder))
            undo.callback(self._library.nvjpegJpegStateDestroy, c_void_p(state))
            pinned = self._create_object("nvjpegBufferPinnedCreate", handle, None)
            undo.callback(self._library.nvjpegBufferPinnedDestroy, c_void_p(pinned))
            device = self._create_object("nvjpegBufferDeviceCreate", handle, None)
            undo.callback(self._library.nvjpegBufferDeviceDestroy, c_void_p(device))
            parsed_file = self._create_object("nvjpegJpegStreamCreate", handle)
            undo.callback(self._library.nvjpegJpegStreamDestroy, c_void_p(parsed_file))
            parameters = self._create_object("nvjpegDecodeParamsCreate", handle)
            undo.callback(self._library.nvjpegDecodeParamsDestroy, c_void_p(parameters))
            self._call("nvjpegBufferPinnedResize", c_void_p(pinned), c_size_t(pinned_bytes), None)
            self._call("nvjpegBufferDeviceResize", c_void_p(device), c_size_t(device_bytes), None)
            self._call("nvjpegStateAttachPinnedBuffer", c_void_p(state), c_void_p(pinned))
            self._call("nvjpegStateAttachDeviceBuffer", c_void_p(state), c_void_p(device))
            undo.pop_all()
        return PhasedState((int(handle.value or 0), self._decoder, state, parameters, parsed_file), pinned, device)

    def held_bytes(self, state: PhasedState) -> tuple[int, int]:
        """Return the sizes of a state's buffers: (page-locked bytes, device bytes)."""
        sizes = []
        for name, buffer in (("Pinned", state.pinned), ("Device", state.device)):
            size, address = c_size_t(), c_void_p()
            getattr(self._library, f"nvjpegBuffer{name}Retrieve")(c_void_p(buffer), byref(size), byref(address))
            sizes.append(int(size.value))
        return sizes[0], sizes[1]

    def host_phases(self, states: Sequence[PhasedState], files: NDArray[np.void]) -> list[str | NvJpegError]:
        """Run the host phase of images: with ``HYBRID``, read their Huffman codes; with ``GPU_HYBRID``, only prepare the files.

        Args:
            states: One state per image, in use by no other image. The states may belong to decoders of both backends. The card
                phase of the previous image of each state must have ended on the GPU.
            files: (n,) records of ``FILE``.

        Returns:
            Per image: an empty string on success, the reason why the file cannot be decoded, or an error whose cause is not the
            file.
        """
        handles = np.array([state.handles for state in states], np.int64)
        loops().host_phases(self._addresses, handles, files, files.ctypes.data)
        return [_outcome("nvjpegDecodeJpegHost", file) for file in files]

    def card_phases(self, states: Sequence[PhasedState], files: NDArray[np.void], stream: int) -> list[str | NvJpegError]:
        """Queue the card phase of images whose host phase has ended. A state is in use until the queued work has ended.

        Args:
            states: States that were passed to ``host_phases`` for the images.
            files: (n,) records of ``FILE``.
            stream: Handle of the CUDA stream on which the work is queued.

        Returns:
            As for ``host_phases``.
        """
        handles = np.array([state.handles for state in states], np.int64).reshape(-1, 5)
        loops().card_phases(self._addresses, handles, files, files.ctypes.data, stream)
        return [_outcome("nvjpegDecodeJpegDevice", file) for file in files]


def _outcome(call: str, file: Any) -> str | NvJpegError:
    """Return the result of a phase for one image, as ``host_phases`` does. ``file``: record of ``FILE`` after the phase."""
    status = int(file["status"])
    if status == OTHER_SIZE:
        return size_problem(file)
    if status and status not in OF_THE_FILE:
        return NvJpegError(call, status)
    return problem(status) if status else ""


def problem(status: int) -> str:
    """Return the reason why a file cannot be decoded. ``status``: status in ``OF_THE_FILE``."""
    return f"nvJPEG finds: {STATUS[status]}"


def size_problem(file: Any) -> str:
    """Return the reason why a ``FILE`` cannot be decoded whose size by nvJPEG's parser differs from the size in its header."""
    return f"nvJPEG finds {file['found_width']}x{file['found_height']} pixels and its header {file['width']}x{file['height']}"


_thread = threading.local()
"""``device``: device for which ``enter`` has prepared the thread."""


def enter(device: torch.device) -> None:
    """Prepare this thread for CUDA calls of any library on ``device``, even while another thread captures a CUDA graph."""
    if getattr(_thread, "device", None) != device:
        torch.cuda.set_device(device)
        # CUDA calls of this thread are then allowed, and do not become part of the graph.
        _cuda_runtime().cudaThreadExchangeStreamCaptureMode(byref(c_int(_RELAXED)))
        _thread.device = device


def _cuda_runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch has loaded."""
    return ctypes.CDLL(f"libcudart.so.{major()}")
