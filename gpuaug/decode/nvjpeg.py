"""Bindings of nvJPEG's C interface: decode a batch of JPEGs in one call, or one JPEG in phases. No other file calls nvJPEG.

Source: nvjpeg.h of CUDA 12 and 13.
"""

import ctypes
import importlib.util
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from ctypes import addressof, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p, cast
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core.errors import GpuAugError
from gpuaug.decode.c_calls import call_each

HYBRID, GPU_HYBRID, HARDWARE = 1, 2, 3
"""Backends of nvJPEG, by where a JPEG is decoded.

``NVJPEG_BACKEND_HYBRID``: the host reads the Huffman codes, the card does the rest. ``_GPU_HYBRID``: the host only prepares the
file, and the card also reads the Huffman codes; baseline JPEGs only. ``_HARDWARE``: the JPEG engines do all.
"""

FLAGS = 1 << 5
"""``NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION``, from nvJPEG 12.1 on: interpolate subsampled chroma as libjpeg-turbo does."""

OUTPUT_Y, OUTPUT_RGBI = 2, 5
"""Output formats: luma only, and interleaved RGB."""

OUTPUT = np.dtype([("channel", np.uint64, 4), ("pitch", np.uint64, 4)])
"""``nvjpegImage_t``: device addresses of the planes, and their pitches in bytes."""

_IMAGE_INFO = np.dtype([("components", np.int32), ("subsampling", np.int32), ("widths", np.int32, 4), ("heights", np.int32, 4)])
"""Results of ``nvjpegGetImageInfo`` for one file, with the widths and heights of its components."""

_IMAGE_INFO_OFFSETS = np.array([0, 4, 8, 24])
"""Offsets of the fields of ``_IMAGE_INFO`` in bytes."""

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
"""Statuses whose cause is the file. The cause of all other statuses is the library or the GPU."""

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Environment variable that CUDA reads when it starts: number of hardware queues that the streams of a process share."""

MOST_QUEUES, USUAL_QUEUES = 32, 8
"""CUDA's maximum and default number of hardware queues."""

_RELAXED = 2  # cudaStreamCaptureModeRelaxed


class NvJpegError(GpuAugError, RuntimeError):
    """Error of a call to nvJPEG."""

    def __init__(self, call: str, status: int) -> None:
        self.status = status
        super().__init__(
            f"{call} must succeed, got status {status} ({STATUS.get(status, 'unknown')}). "
            "If it is the same each time, decode with DecodeStage(backend='cpu')."
        )


@cache
def find_library() -> str | None:
    """Return the path or name of an installed nvJPEG for torch's major version of CUDA, or ``None``."""
    for name in [*map(str, _wheels(major())), f"libnvjpeg.so.{major()}"]:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


def other_majors() -> list[str]:
    """Return the major versions of CUDA, other than torch's, for which nvJPEG is installed."""
    return sorted({path.suffix[1:] for path in _wheels("*")} - {major()})


def major() -> str:
    """Return the major version of torch's CUDA, or an empty string."""
    return (torch.version.cuda or "").partition(".")[0]


def _wheels(major: str) -> list[Path]:
    """Return the paths of nvJPEG in NVIDIA's Python packages, for a major version of CUDA, or ``"*"``."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    return sorted(Path(path) for folder in folders for path in glob(f"{folder}/*/lib/libnvjpeg.so.{major}"))


def ask_for_queues() -> int:
    """Set CUDA's number of hardware queues to the maximum, unless CUDA has started or the user has set the number.

    nvJPEG decodes on about sixteen internal streams. Streams that share a hardware queue wait for each other's earlier work.
    While a ResNet-50 trained, a call of ``BatchDecoder.decode`` took 59 ms with CUDA's default of 8 queues, as long as the
    training step, and 12 ms with 32.

    Returns:
        Number of hardware queues of this process.
    """
    if QUEUES not in os.environ and not torch.cuda.is_initialized():
        os.environ[QUEUES] = str(MOST_QUEUES)
    setting = os.environ.get(QUEUES, "")
    return int(setting) if setting.isdecimal() else USUAL_QUEUES


queues = ask_for_queues()
"""Number of hardware queues of this process. Set on import, because CUDA may start at any time after it."""


class Library:
    """Base class of decoders: the functions of nvJPEG's library, and an nvJPEG handle."""

    def __init__(self) -> None:
        path = find_library()
        assert path is not None
        # CDLL releases the GIL during a call. PyDLL holds it, for calls that take less time than releasing it.
        self._library, self._with_gil = ctypes.CDLL(path), ctypes.PyDLL(path)
        self._handle = c_void_p()
        self._set_roi = self._with_gil.nvjpegDecodeParamsSetROI
        self._set_roi.argtypes = [c_void_p, c_int, c_int, c_int, c_int]
        self._image_info = self._with_gil.nvjpegGetImageInfo
        self._image_info.argtypes = [c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_void_p, c_void_p]

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

    def _set_window(self, parameters: int, window: Sequence[int]) -> None:
        """Set the window of decoding parameters, the part of an image to decode: top, left, height and width."""
        top, left, height, width = window
        self._set_roi(parameters, left, top, width, height)

    def _create(self, backend: int) -> None:
        self._call("nvjpegCreateEx", c_int(backend), None, None, c_uint(FLAGS), byref(self._handle))

    def _call(self, name: str, *arguments: Any) -> None:
        status = int(getattr(self._library, name)(*arguments))
        if status:
            raise NvJpegError(name, status)

    def _create_object(self, name: str, *arguments: Any) -> int:
        """Call a function of nvJPEG that creates an object, and return the handle of the object."""
        handle = c_void_p()
        self._call(name, *arguments, byref(handle))
        return int(handle.value or 0)


class BatchDecoder(Library):
    """JPEG engines of one device. Calls of ``decode`` must not overlap.

    Files are decoded in groups that have one chroma subsampling each. Each group has a decoding state, because nvJPEG sets up a
    state again when the subsampling changes. If nvJPEG cannot create another state, groups share the first state. On an H200,
    nvJPEG could create 136 states in one process, or about 30 in all in 12 processes with 32 hardware queues each.

    Args:
        device: A CUDA device.

    Raises:
        NvJpegError: If nvJPEG cannot be set up, or the device has no engines.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        with torch.cuda.device(device):
            self._create(HARDWARE)
            self._first_state = self._create_object("nvjpegJpegStateCreate", self._handle)
        self._states: dict[int, int] = {}
        """Decoding state by group."""
        self._idle_parameters: dict[int, list[int]] = {OUTPUT_Y: [], OUTPUT_RGBI: []}
        """Handles of decoding parameters (``nvjpegDecodeParams_t``) that no batch uses, by output format."""
        self._setups: dict[int, tuple[int, int]] = {}
        """(number of images, output format) that each state is initialized for."""

    def sizes(self, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Return (B, 2) height and width of each file, by nvJPEG's parser; 0 if the parser fails."""
        results = np.zeros(len(addresses), _IMAGE_INFO)
        arguments = np.empty((len(addresses), 7), np.int64)
        arguments[:, 0], arguments[:, 1], arguments[:, 2] = self._handle.value or 0, addresses, lengths
        # Addresses of the four fields of each file's record.
        arguments[:, 3:] = results.ctypes.data + results.itemsize * np.arange(len(addresses))[:, None] + _IMAGE_INFO_OFFSETS
        statuses = call_each(self._image_info, arguments)
        sizes: NDArray[np.int32] = np.column_stack([results["heights"][:, 0], results["widths"][:, 0]])
        sizes[statuses != 0] = 0
        return sizes

    def decode(
        self,
        group: int,
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
        outputs: NDArray[np.void],
        form: int,
        stream: int,
        parameters: NDArray[np.uint64] | None = None,
    ) -> int:
        """Decode the files of one group. Blocks while the engines work, and queues the colour conversion on ``stream``.

        Args:
            group: Number of the group. All files of all calls with this number must have the same chroma subsampling.
            addresses: (B,) host addresses of the files.
            lengths: (B,) lengths of the files in bytes.
            outputs: (B,) records of ``OUTPUT``.
            form: ``OUTPUT_RGBI`` or ``OUTPUT_Y``.
            stream: Handle of a CUDA stream.
            parameters: (B,) handles from ``with_windows``. ``None``: decode whole images.

        Returns:
            0, or a status in ``OF_THE_FILE``, after which all outputs of the batch are undefined.

        Raises:
            NvJpegError: If nvJPEG returns another status.
        """
        state, setup = self._state(group), (len(addresses), form)
        if self._setups.get(state) != setup:
            self._setups.pop(state, None)  # set again on success
            self._call("nvjpegDecodeBatchedInitialize", self._handle, c_void_p(state), c_int(setup[0]), c_int(1), c_int(form))
            self._setups[state] = setup
        arrays = [c_void_p(array.ctypes.data) for array in (addresses, lengths, outputs)]
        if parameters is None:
            status = int(self._library.nvjpegDecodeBatched(self._handle, c_void_p(state), *arrays, c_void_p(stream)))
        else:
            arrays.append(c_void_p(parameters.ctypes.data))
            status = int(self._library.nvjpegDecodeBatchedEx(self._handle, c_void_p(state), *arrays, c_void_p(stream)))
        if status:
            del self._setups[state]  # nvjpeg.h: initialize again after a failed batch
            if status not in OF_THE_FILE:
                raise NvJpegError("nvjpegDecodeBatched", status)
        return status

    def with_windows(self, windows: NDArray[np.int64], form: int) -> NDArray[np.uint64]:
        """Return (B,) handles of decoding parameters, each with the window of one image, for ``decode``. Thread-safe.

        Args:
            windows: (B, 4) top, left, height and width of the part of each image to decode.
            form: ``OUTPUT_RGBI`` or ``OUTPUT_Y``.
        """
        handles = []
        for _ in range(len(windows)):
            try:
                parameters = self._idle_parameters[form].pop()
            except IndexError:
                parameters = self._create_object("nvjpegDecodeParamsCreate", self._handle)
                self._with_gil.nvjpegDecodeParamsSetOutputFormat(c_void_p(parameters), c_int(form))
            handles.append(parameters)
        call_each(self._set_roi, np.column_stack([handles, windows[:, [1, 0, 3, 2]]]))
        return np.array(handles, np.uint64)

    def put_back(self, parameters: NDArray[np.uint64], form: int) -> None:
        """Make handles from ``with_windows`` available for reuse. Call after the ``decode`` that used them."""
        self._idle_parameters[form] += parameters.tolist()

    def _state(self, group: int) -> int:
        """Return the decoding state of a group: a new state for a new group, or the first state if none can be created."""
        if group not in self._states:
            state = self._first_state
            if self._states:
                with suppress(NvJpegError):
                    state = self._create_object("nvjpegJpegStateCreate", self._handle)
            self._states[group] = state
        return self._states[group]


class PhasedState:
    """Decoding state of one image between its two phases.

    Args:
        decoder: Decoder that created the state.
        state: Handle of nvJPEG's state (``nvjpegJpegState_t``).
        pinned: Handle of the state's buffer in page-locked memory (``nvjpegBufferPinned_t``).
        device: Handle of the state's buffer in device memory (``nvjpegBufferDevice_t``).
        stream: Handle of the parsed file (``nvjpegJpegStream_t``); not a CUDA stream.
        parameters: Handle of the decoding parameters (``nvjpegDecodeParams_t``): output format and window.
    """

    __slots__ = (
        *("_output", "_output_address", "decoder", "device", "form", "height", "parameters", "pinned", "state", "stream"),
        "width",
    )

    def __init__(self, decoder: "PhasedDecoder", state: int, pinned: int, device: int, stream: int, parameters: int) -> None:
        self.decoder = decoder
        self.state, self.pinned, self.device, self.stream, self.parameters = state, pinned, device, stream, parameters
        self.width, self.height = c_uint(), c_uint()
        self.form = 0
        """Output format that ``parameters`` are set to; 0 before the first image."""
        self._output = (c_uint64 * 8)()
        self._output_address = addressof(self._output)

    def output_of(self, address: int, pitch: int) -> int:
        """Set the output to one plane: its device address and bytes per row. Return the host address of the ``OUTPUT``."""
        self._output[0] = address
        self._output[4] = pitch
        return self._output_address


class PhasedDecoder(Library):
    """Decode one JPEG in two phases, on any threads. Images in different states may be in any phase at the same time.

    Arguments of nvJPEG's functions are integers, and ``argtypes`` declares their C types once per function. This shortens the
    calls, in which other threads wait for Python's interpreter lock.

    Args:
        device: A CUDA device.
        backend: ``HYBRID`` or ``GPU_HYBRID``. Pixels are the same.

    Raises:
        NvJpegError: If nvJPEG cannot be set up.
    """

    def __init__(self, device: torch.device, backend: int = HYBRID) -> None:
        super().__init__()
        with torch.cuda.device(device):
            self._create(backend)
            self._decoder = self._create_object("nvjpegDecoderCreate", self._handle, c_int(backend))
        pointer = c_void_p
        self._parse = self._library.nvjpegJpegStreamParse
        self._parse.argtypes = [pointer, pointer, c_size_t, c_int, c_int, pointer]
        self._dimensions = self._with_gil.nvjpegJpegStreamGetFrameDimensions
        self._dimensions.argtypes = [pointer, pointer, pointer]
        self._decode_host = self._library.nvjpegDecodeJpegHost
        self._decode_host.argtypes = [pointer] * 5
        self._decode_transfer = self._library.nvjpegDecodeJpegTransferToDevice
        self._decode_transfer.argtypes = [pointer] * 5
        self._decode_device = self._library.nvjpegDecodeJpegDevice
        self._decode_device.argtypes = [pointer] * 5
        self.handles = int(self._handle.value or 0), self._decoder
        """Handles of the library (``nvjpegHandle_t``) and of its decoder (``nvjpegJpegDecoder_t``)."""

    @property
    def addresses(self) -> list[int]:
        """Addresses of the functions that the phases call, in the order of the calls, for a compiled loop."""
        functions: list[Any] = [self._parse, self._dimensions, self._with_gil.nvjpegDecodeParamsSetOutputFormat, self._set_roi]
        functions += [self._decode_host, self._decode_transfer, self._decode_device]
        return [int(cast(function, c_void_p).value or 0) for function in functions]

    def state(self, pinned_bytes: int, device_bytes: int) -> PhasedState:
        """Create a state. Call ``enter`` on this thread first.

        Args:
            pinned_bytes: Size of the page-locked memory. If the memory is too small for an image, nvJPEG enlarges it, and then
                waits for all work of the device.
            device_bytes: Size of the device memory, which nvJPEG enlarges likewise.

        Raises:
            NvJpegError: If the state cannot be created. All parts of it are then destroyed.
        """
        handle = self._handle
        with ExitStack() as undo:  # destroys the objects of an attempt that fails
            state = self._create_object("nvjpegDecoderStateCreate", handle, c_void_p(self._decoder))
            undo.callback(self._library.nvjpegJpegStateDestroy, c_void_p(state))
            pinned = self._create_object("nvjpegBufferPinnedCreate", handle, None)
            undo.callback(self._library.nvjpegBufferPinnedDestroy, c_void_p(pinned))
            device = self._create_object("nvjpegBufferDeviceCreate", handle, None)
            undo.callback(self._library.nvjpegBufferDeviceDestroy, c_void_p(device))
            stream = self._create_object("nvjpegJpegStreamCreate", handle)
            undo.callback(self._library.nvjpegJpegStreamDestroy, c_void_p(stream))
            parameters = self._create_object("nvjpegDecodeParamsCreate", handle)
            undo.callback(self._library.nvjpegDecodeParamsDestroy, c_void_p(parameters))
            self._call("nvjpegBufferPinnedResize", c_void_p(pinned), c_size_t(pinned_bytes), None)
            self._call("nvjpegBufferDeviceResize", c_void_p(device), c_size_t(device_bytes), None)
            self._call("nvjpegStateAttachPinnedBuffer", c_void_p(state), c_void_p(pinned))
            self._call("nvjpegStateAttachDeviceBuffer", c_void_p(state), c_void_p(device))
            undo.pop_all()
        return PhasedState(self, state, pinned, device, stream, parameters)

    def held_bytes(self, state: PhasedState) -> tuple[int, int]:
        """Return (page-locked, device) bytes of the memory of a state."""
        sizes = []
        for name, buffer in (("Pinned", state.pinned), ("Device", state.device)):
            size, address = c_size_t(), c_void_p()
            getattr(self._with_gil, f"nvjpegBuffer{name}Retrieve")(c_void_p(buffer), byref(size), byref(address))
            sizes.append(int(size.value))
        return sizes[0], sizes[1]

    def host_phase(
        self, state: PhasedState, address: int, length: int, height: int, width: int, form: int, window: Sequence[int]
    ) -> str:
        """Run the first phase of an image: with ``HYBRID``, read its Huffman codes; with ``GPU_HYBRID``, only prepare the file.

        Args:
            state: State that no other image uses. The GPU work of the card phase of its last image must have ended.
            address: Host address of the file.
            length: Length of the file in bytes.
            height: Height of the image according to its header.
            width: Width of the image according to its header.
            form: ``OUTPUT_RGBI`` or ``OUTPUT_Y``.
            window: Top, left, height and width of the part of the image to decode.

        Returns:
            Reason why the file cannot be decoded, or an empty string.

        Raises:
            NvJpegError: If nvJPEG returns a status that is not caused by the file.
        """
        handle, decoder = self.handles
        status = self._parse(handle, address, length, 0, 0, state.stream)
        if not status:
            status = self._dimensions(state.stream, byref(state.width), byref(state.height))
        if not status:
            size = state.width.value, state.height.value
            if size != (width, height):
                return size_problem(*size, width, height)
            if state.form != form:
                self._with_gil.nvjpegDecodeParamsSetOutputFormat(c_void_p(state.parameters), c_int(form))
                state.form = form
            self._set_window(state.parameters, window)
            status = self._decode_host(handle, decoder, state.state, state.parameters, state.stream)
        return problem("nvjpegDecodeJpegHost", status)

    def card_phase(self, state: PhasedState, address: int, pitch: int, stream: int) -> str:
        """Queue the second phase of an image whose host phase has ended. The state is in use until the queued work has ended.

        Args:
            state: State of the image.
            address: Device address of the output.
            pitch: Bytes per row of the output.
            stream: Handle of the CUDA stream of the GPU work.

        Returns:
            Reason why the file cannot be decoded, or an empty string.

        Raises:
            NvJpegError: If nvJPEG returns a status that is not caused by the file.
        """
        handle, decoder = self.handles
        output = state.output_of(address, pitch)
        status = self._decode_transfer(handle, decoder, state.state, state.stream, stream)
        if not status:
            status = self._decode_device(handle, decoder, state.state, output, stream)
        return problem("nvjpegDecodeJpegDevice", status)


def problem(call: str, status: int) -> str:
    """Return the reason why a file cannot be decoded, or an empty string for status 0.

    Raises:
        NvJpegError: If the file did not cause the status.
    """
    if status and status not in OF_THE_FILE:
        raise NvJpegError(call, status)
    return f"nvJPEG finds: {STATUS[status]}" if status else ""


def size_problem(found_width: int, found_height: int, width: int, height: int) -> str:
    """Return the reason why a file cannot be decoded: nvJPEG finds another size than ``width`` and ``height`` of the header."""
    return f"nvJPEG finds {found_width}x{found_height} pixels and its header {width}x{height}"


_thread = threading.local()
"""``device``: device that ``enter`` has prepared the thread for."""


def enter(device: torch.device) -> None:
    """Prepare this thread to call nvJPEG on ``device``."""
    if getattr(_thread, "device", None) != device:
        torch.cuda.set_device(device)
        relax_capture()
        _thread.device = device


def relax_capture() -> None:
    """Allow CUDA calls of this thread while another thread captures a CUDA graph. They do not become part of the graph."""
    runtime = ctypes.CDLL(f"libcudart.so.{major()}")
    mode = c_int(_RELAXED)
    runtime.cudaThreadExchangeStreamCaptureMode(byref(mode))
