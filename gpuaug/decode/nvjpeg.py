"""nvJPEG through its C interface: a batch of JPEGs in one call, or one JPEG by phases. The only file that calls nvJPEG.

Source: nvjpeg.h of CUDA 12 and 13.
"""

import ctypes
import importlib.util
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core.errors import GpuAugError

HYBRID, HARDWARE = 1, 3
"""``NVJPEG_BACKEND_HYBRID`` and ``_HARDWARE``: Huffman codes on the host, the rest on the card; all on the JPEG engines."""

FLAGS = 1 << 5
"""``NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION``, of nvJPEG 12.1: interpolate subsampled chroma as libjpeg-turbo does."""

OUTPUT_Y, OUTPUT_RGBI = 2, 5

OUTPUT = np.dtype([("channel", np.uint64, 4), ("pitch", np.uint64, 4)])
"""``nvjpegImage_t``: device addresses of the planes, and their pitches in bytes."""

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
OF_THE_FILE = {3, 4, 10}
"""Statuses that a file causes. The library or the card causes the others."""

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Environment variable that CUDA reads when it starts: number of hardware queues that the streams of a process share."""

MOST_QUEUES, USUAL_QUEUES = 32, 8
"""CUDA's maximum and default number of hardware queues."""

_RELAXED = 2  # cudaStreamCaptureModeRelaxed


class NvJpegError(GpuAugError, RuntimeError):
    """A call of nvJPEG failed."""

    def __init__(self, call: str, status: int) -> None:
        self.status = status
        super().__init__(
            f"{call} must succeed, got status {status} ({STATUS.get(status, 'unknown')}). "
            "If it is the same each time, decode with DecodeStage(backend='cpu')."
        )


@cache
def find_library() -> str | None:
    """Path or name of an installed nvJPEG for torch's major version of CUDA, or ``None``."""
    for name in [*map(str, _wheels(major())), f"libnvjpeg.so.{major()}"]:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


def other_majors() -> list[str]:
    """Major versions of CUDA, other than torch's, that nvJPEG is installed for."""
    return sorted({path.suffix[1:] for path in _wheels("*")} - {major()})


def major() -> str:
    """Major version of torch's CUDA, or an empty string."""
    return (torch.version.cuda or "").partition(".")[0]


def _wheels(major: str) -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    return sorted(Path(found) for folder in folders for found in glob(f"{folder}/*/lib/libnvjpeg.so.{major}"))


def ask_for_queues() -> int:
    """Have CUDA make its maximum number of hardware queues, unless it has started or the user has set the number.

    nvJPEG decodes on about sixteen streams of its own, and a stream waits for all earlier work on its hardware queue, of any
    stream. Beside a ResNet-50 a call took as long as the training step, 59 ms, with CUDA's default of 8 queues; 12 ms with 32.

    Returns:
        Number of hardware queues of this process.
    """
    if QUEUES not in os.environ and not torch.cuda.is_initialized():
        os.environ[QUEUES] = str(MOST_QUEUES)
    found = os.environ.get(QUEUES, "")
    return int(found) if found.isdecimal() else USUAL_QUEUES


queues = ask_for_queues()
"""Hardware queues of this process. Found on import, since CUDA may start at any time after that."""


class Library:
    """A handle of nvJPEG."""

    def __init__(self) -> None:
        path = find_library()
        assert path is not None
        # CDLL releases the GIL during a call. PyDLL keeps it, for calls that take less time than releasing it.
        self._library, self._quick = ctypes.CDLL(path), ctypes.PyDLL(path)
        self._handle = c_void_p()
        self._set_roi = self._quick.nvjpegDecodeParamsSetROI
        self._set_roi.argtypes = [c_void_p, c_int, c_int, c_int, c_int]

    @property
    def exact_windows(self) -> bool:
        """Whether the pixels of a window equal those of the whole image.

        Before nvJPEG 13.2, windows with interpolated chroma may be wrong by a pixel at their edges.
        """
        return tuple(int(part) for part in self.version.split(".")[:2]) >= (13, 2)

    @property
    def version(self) -> str:
        """Version of nvJPEG."""
        parts = [c_int() for _ in range(3)]
        for kind, part in enumerate(parts):
            self._call("nvjpegGetProperty", c_int(kind), byref(part))
        return ".".join(str(part.value) for part in parts)

    def _set_window(self, parameters: int, window: Sequence[int]) -> None:
        """Set top, left, height and width of the part of an image to decode."""
        top, left, height, width = window
        self._set_roi(parameters, left, top, width, height)

    def _create(self, backend: int) -> None:
        self._call("nvjpegCreateEx", c_int(backend), None, None, c_uint(FLAGS), byref(self._handle))

    def _call(self, name: str, *arguments: Any) -> None:
        status = int(getattr(self._library, name)(*arguments))
        if status:
            raise NvJpegError(name, status)

    def _made(self, name: str, *arguments: Any) -> int:
        """Handle of an object that nvJPEG creates."""
        made = c_void_p()
        self._call(name, *arguments, byref(made))
        return int(made.value or 0)


class BatchDecoder(Library):
    """The JPEG engines of one device, and a decoding state for each kind of file. Calls of ``decode`` must not overlap.

    Kinds share the first state where no more can be made. An H200 had 136 states for one process, and about 30 in all for
    12 processes of 32 hardware queues each.

    Args:
        device: A CUDA device.

    Raises:
        NvJpegError: If nvJPEG cannot be set up, or the device has no engines.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        with torch.cuda.device(device):
            self._create(HARDWARE)
            self._first = self._made("nvjpegJpegStateCreate", self._handle)
        self._states: dict[int, int] = {}
        """State of each kind that has been decoded."""
        self._idle: dict[int, list[int]] = {OUTPUT_Y: [], OUTPUT_RGBI: []}
        """Parameters that no batch uses, by their form of output."""
        self._initialized: dict[int, tuple[int, int]] = {}
        """Number of images and format of each state's last batch."""

    def sizes(self, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> NDArray[np.int32]:
        """(B, 2) height and width of each file by nvJPEG's own parser; 0 where the parser fails."""
        found = np.zeros((len(addresses), 2), np.int32)
        components, sampling = c_int(), c_int()
        widths, heights = (c_int * 4)(), (c_int * 4)()
        arguments = (byref(components), byref(sampling), widths, heights)
        info = self._quick.nvjpegGetImageInfo
        for index, (address, length) in enumerate(zip(addresses.tolist(), lengths.tolist(), strict=True)):
            if not info(self._handle, c_void_p(address), c_size_t(length), *arguments):
                found[index] = heights[0], widths[0]
        return found

    def decode(
        self,
        kind: int,
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
        outputs: NDArray[np.void],
        form: int,
        stream: int,
        parameters: NDArray[np.uint64] | None = None,
    ) -> int:
        """Decode a batch. Blocks while the engines work; work of the multiprocessors is queued on ``stream``.

        Args:
            kind: Number of the files' kind, which has one chroma subsampling: nvJPEG sets a state up again where that changes.
            addresses: (B,) host addresses of the files.
            lengths: (B,) lengths of the files in bytes.
            outputs: (B,) records of ``OUTPUT``.
            form: ``OUTPUT_RGBI`` or ``OUTPUT_Y``.
            stream: Handle of a CUDA stream.
            parameters: (B,) handles of parameters with the window of each image. Left out: whole images are decoded.

        Returns:
            0, or a status in ``OF_THE_FILE``: then all outputs of the batch are undefined.

        Raises:
            NvJpegError: If it fails for another reason.
        """
        state, shape = self._state(kind), (len(addresses), form)
        if self._initialized.get(state) != shape:
            self._initialized.pop(state, None)  # until it succeeds
            self._call("nvjpegDecodeBatchedInitialize", self._handle, c_void_p(state), c_int(shape[0]), c_int(1), c_int(form))
            self._initialized[state] = shape
        arrays = [c_void_p(array.ctypes.data) for array in (addresses, lengths, outputs)]
        if parameters is None:
            status = int(self._library.nvjpegDecodeBatched(self._handle, c_void_p(state), *arrays, c_void_p(stream)))
        else:
            arrays.append(c_void_p(parameters.ctypes.data))
            status = int(self._library.nvjpegDecodeBatchedEx(self._handle, c_void_p(state), *arrays, c_void_p(stream)))
        if status:
            del self._initialized[state]  # nvjpeg.h: initialize again after a failed batch
            if status not in OF_THE_FILE:
                raise NvJpegError("nvjpegDecodeBatched", status)
        return status

    def with_windows(self, windows: NDArray[np.int64], form: int) -> NDArray[np.uint64]:
        """Handles of parameters, for ``decode``. Any thread may call this.

        Args:
            windows: (B, 4) top, left, height and width of the part of each image to decode.
            form: ``OUTPUT_RGBI`` or ``OUTPUT_Y``.
        """
        found = []
        for window in windows.tolist():
            try:
                parameters = self._idle[form].pop()
            except IndexError:
                parameters = self._made("nvjpegDecodeParamsCreate", self._handle)
                self._quick.nvjpegDecodeParamsSetOutputFormat(c_void_p(parameters), c_int(form))
            self._set_window(parameters, window)
            found.append(parameters)
        return np.array(found, np.uint64)

    def put_back(self, parameters: NDArray[np.uint64], form: int) -> None:
        """Give back parameters that no call uses any more."""
        self._idle[form] += parameters.tolist()

    def _state(self, kind: int) -> int:
        if kind not in self._states:
            made = self._first
            if self._states:
                with suppress(NvJpegError):
                    made = self._made("nvjpegJpegStateCreate", self._handle)
            self._states[kind] = made
        return self._states[kind]


class PhasedState:
    """Decoding state of one image between its phases: handles of nvJPEG, as numbers."""

    __slots__ = ("device", "form", "height", "output", "parameters", "pinned", "state", "stream", "width")

    def __init__(self, state: int, pinned: int, device: int, stream: int, parameters: int) -> None:
        self.state, self.pinned, self.device, self.stream, self.parameters = state, pinned, device, stream, parameters
        self.width, self.height = c_uint(), c_uint()
        self.form = 0
        """Form of the output that the parameters are set to."""
        self.output = (c_uint64 * 8)()
        """A record of ``OUTPUT``: addresses of four planes, then their pitches."""


class PhasedDecoder(Library):
    """Decodes one JPEG in two phases, each on any thread. Images in different states may be in any phase at once.

    Arguments are numbers, whose conversion for the library is set up once: threads wait for one another while Python prepares
    a call.

    Args:
        device: A CUDA device.

    Raises:
        NvJpegError: If nvJPEG cannot be set up.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        with torch.cuda.device(device):
            self._create(HYBRID)
            self._decoder = self._made("nvjpegDecoderCreate", self._handle, c_int(HYBRID))
        pointer = c_void_p
        self._parse = self._library.nvjpegJpegStreamParse
        self._parse.argtypes = [pointer, pointer, c_size_t, c_int, c_int, pointer]
        self._dimensions = self._quick.nvjpegJpegStreamGetFrameDimensions
        self._dimensions.argtypes = [pointer, pointer, pointer]
        self._host = self._library.nvjpegDecodeJpegHost
        self._host.argtypes = [pointer] * 5
        self._transfer = self._library.nvjpegDecodeJpegTransferToDevice
        self._transfer.argtypes = [pointer] * 5
        self._on_device = self._library.nvjpegDecodeJpegDevice
        self._on_device.argtypes = [pointer] * 5
        self._handles = int(self._handle.value or 0), self._decoder

    def state(self, capacity: int) -> PhasedState:
        """A new state. Call ``enter`` on this thread first.

        Args:
            capacity: Bytes of coefficients that the state has memory for. nvJPEG enlarges it where that is too little, and then
                waits for all work of the device.

        Raises:
            NvJpegError: If it cannot be made. Nothing of it is kept.
        """
        handle = self._handle
        with ExitStack() as undo:  # else each attempt would keep what it has made before it fails
            state = self._made("nvjpegDecoderStateCreate", handle, c_void_p(self._decoder))
            undo.callback(self._library.nvjpegJpegStateDestroy, c_void_p(state))
            pinned = self._made("nvjpegBufferPinnedCreate", handle, None)
            undo.callback(self._library.nvjpegBufferPinnedDestroy, c_void_p(pinned))
            device = self._made("nvjpegBufferDeviceCreate", handle, None)
            undo.callback(self._library.nvjpegBufferDeviceDestroy, c_void_p(device))
            stream = self._made("nvjpegJpegStreamCreate", handle)
            undo.callback(self._library.nvjpegJpegStreamDestroy, c_void_p(stream))
            parameters = self._made("nvjpegDecodeParamsCreate", handle)
            undo.callback(self._library.nvjpegDecodeParamsDestroy, c_void_p(parameters))
            self._call("nvjpegBufferPinnedResize", c_void_p(pinned), c_size_t(capacity), None)
            self._call("nvjpegBufferDeviceResize", c_void_p(device), c_size_t(2 * capacity), None)
            self._call("nvjpegStateAttachPinnedBuffer", c_void_p(state), c_void_p(pinned))
            self._call("nvjpegStateAttachDeviceBuffer", c_void_p(state), c_void_p(device))
            undo.pop_all()
        return PhasedState(state, pinned, device, stream, parameters)

    def held_bytes(self, state: PhasedState) -> tuple[int, int]:
        """Bytes of the state's coefficients: page-locked, on the device."""
        found = []
        for name, buffer in (("Pinned", state.pinned), ("Device", state.device)):
            size, address = c_size_t(), c_void_p()
            getattr(self._quick, f"nvjpegBuffer{name}Retrieve")(c_void_p(buffer), byref(size), byref(address))
            found.append(int(size.value))
        return found[0], found[1]

    def host_phase(
        self, state: PhasedState, address: int, length: int, height: int, width: int, form: int, window: Sequence[int]
    ) -> str:
        """Read the Huffman codes of a file. The state's card phase must have ended before.

        Args:
            state: A state that no other image uses.
            address: Host address of the file.
            length: Bytes of the file.
            height: Of the image, by its header.
            width: Likewise.
            form: ``OUTPUT_RGBI`` or ``OUTPUT_Y``.
            window: Top, left, height and width of the part of the image to decode.

        Returns:
            Why the file cannot be decoded, or an empty string.

        Raises:
            NvJpegError: If it fails for another reason than the file.
        """
        handle, decoder = self._handles
        status = self._parse(handle, address, length, 0, 0, state.stream)
        if not status:
            status = self._dimensions(state.stream, byref(state.width), byref(state.height))
        if not status:
            found = state.width.value, state.height.value
            if found != (width, height):
                return f"nvJPEG finds {found[0]}x{found[1]} pixels and its header {width}x{height}"
            if state.form != form:
                self._quick.nvjpegDecodeParamsSetOutputFormat(c_void_p(state.parameters), c_int(form))
                state.form = form
            self._set_window(state.parameters, window)
            status = self._host(handle, decoder, state.state, state.parameters, state.stream)
        if status and status not in OF_THE_FILE:
            raise NvJpegError("nvjpegDecodeJpegHost", status)
        return f"nvJPEG finds: {STATUS[status]}" if status else ""

    def card_phase(self, state: PhasedState, address: int, pitch: int, stream: int) -> str:
        """Queue the rest of an image whose host phase has ended. The state is in use until that GPU work has ended.

        Args:
            state: The image's state.
            address: Device address of its pixels.
            pitch: Bytes of a row.
            stream: Handle of a CUDA stream.

        Returns:
            Why the file cannot be decoded, or an empty string.

        Raises:
            NvJpegError: If it fails for another reason than the file.
        """
        handle, decoder = self._handles
        state.output[0] = address
        state.output[4] = pitch
        status = self._transfer(handle, decoder, state.state, state.stream, stream)
        if not status:
            status = self._on_device(handle, decoder, state.state, state.output, stream)
        if status and status not in OF_THE_FILE:
            raise NvJpegError("nvjpegDecodeJpegDevice", status)
        return f"nvJPEG finds: {STATUS[status]}" if status else ""


_entered = threading.local()


def enter(device: torch.device) -> None:
    """Prepare this thread to call nvJPEG on ``device``."""
    if getattr(_entered, "device", None) != device:
        torch.cuda.set_device(device)
        relax_capture()
        _entered.device = device


def relax_capture() -> None:
    """Allow CUDA calls of this thread while another thread captures a graph: they are not part of it."""
    runtime = ctypes.CDLL(f"libcudart.so.{major()}")
    mode = c_int(_RELAXED)
    runtime.cudaThreadExchangeStreamCaptureMode(byref(mode))
