"""Phases of several JPEGs per call, for the hybrid decoder: compiled by Numba, or one by one in Python.

A thread that runs one host phase per call takes the interpreter's lock twice per image, and waits for it: with 16 cores, 10
were busy. Numba compiles the loop over images, and calls nvJPEG's functions by their addresses.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.decode import nvjpeg
from gpuaug.decode.c_calls import LOW, c_call, compiled_or_none

File = tuple[int, int, int, int, int, Sequence[int]]
"""Address, length in bytes, height, width, output format, and window of a file."""

Target = tuple[int, int]
"""Device address of an output, and its bytes per row."""

Outcome = str | Exception
"""Empty string for success, the reason why a file cannot be decoded, or an error that a file did not cause."""

MAX_IMAGES = 32
"""Maximum number of images per call of the compiled loop over host phases.

14 threads decoded 11,900 images of 0.2 megapixels per second with 8 images per call, 13,600 with 16 and 14,300 with 32 (H200,
2026-11-27).
"""

_HANDLES = tuple((name, np.int64) for name in ("handle", "decoder", "state", "parameters", "stream"))
_FILE = tuple((name, np.int64) for name in ("file", "bytes", "height", "width", "form"))
_WINDOW = tuple((name, np.int64) for name in ("top", "left", "window_height", "window_width"))

_HOST_JOB = np.dtype(
    [*_HANDLES, *_FILE, *_WINDOW, ("status", np.int64), ("found_width", np.uint32), ("found_height", np.uint32)]
)
"""Structured dtype of the arguments and results of one host phase."""

_FOUND_OFFSET = _HOST_JOB.itemsize - 8
"""Bytes from the start of a record to ``found_width``."""

_SIZES = ("found_width", "found_height", "width", "height")

_CARD_JOB = np.dtype([*_HANDLES, ("output", np.int64), ("status", np.int64)])
"""Structured dtype of the arguments and the result of one card phase. ``output`` is the address of a record of ``OUTPUT``."""

_OTHER_SIZE = -1
"""Status of a file whose size, by nvJPEG's parser, differs from the size in its header."""

Functions = tuple[Callable[..., None], Callable[..., None]]
"""Compiled loops over host phases and over card phases."""


class OneByOne:
    """Phases of several images, one by one in Python."""

    most_images = 1
    """Maximum number of images per call of ``host_phases``."""

    def host_phases(self, states: Sequence[nvjpeg.PhasedState], files: Sequence[File]) -> list[Outcome]:
        """Read the Huffman codes of each file into its state."""
        return [_outcome(state.decoder.host_phase, state, *file) for state, file in zip(states, files, strict=True)]

    def card_phases(self, states: Sequence[nvjpeg.PhasedState], targets: Sequence[Target], stream: int) -> list[Outcome]:
        """Queue the second phase of each image on a CUDA stream."""
        return [
            _outcome(state.decoder.card_phase, state, *target, stream) for state, target in zip(states, targets, strict=True)
        ]


class PhaseLoop:
    """Phases of several images, in loops that do not hold the interpreter's lock.

    Args:
        functions: Compiled loops.
    """

    most_images = MAX_IMAGES
    """Maximum number of images per call of ``host_phases``."""

    def __init__(self, functions: Functions) -> None:
        self._run_host_phases, self._run_card_phases = functions

    def host_phases(self, states: Sequence[nvjpeg.PhasedState], files: Sequence[File]) -> list[Outcome]:
        """Read the Huffman codes of each file into its state."""
        jobs = np.array(
            [
                (*state.decoder.handles, state.state, state.parameters, state.stream, *file, *window, 0, 0, 0)
                for state, (*file, window) in zip(states, files, strict=True)
            ],
            _HOST_JOB,
        )
        self._run_host_phases(jobs, jobs.ctypes.data + _FOUND_OFFSET)
        outcomes: list[Outcome] = []
        for job in jobs:
            status = int(job["status"])
            if status == _OTHER_SIZE:
                outcomes.append(nvjpeg.size_problem(*(int(job[name]) for name in _SIZES)))
            else:
                outcomes.append(_outcome(nvjpeg.problem, "nvjpegDecodeJpegHost", status))
        return outcomes

    def card_phases(self, states: Sequence[nvjpeg.PhasedState], targets: Sequence[Target], stream: int) -> list[Outcome]:
        """Queue the second phase of each image on a CUDA stream."""
        jobs = np.array(
            [
                (*state.decoder.handles, state.state, state.parameters, state.stream, state.output_of(*target), 0)
                for state, target in zip(states, targets, strict=True)
            ],
            _CARD_JOB,
        )
        self._run_card_phases(jobs, stream)
        return [_outcome(nvjpeg.problem, "nvjpegDecodeJpegDevice", status) for status in jobs["status"].tolist()]


def phases(decoder: nvjpeg.PhasedDecoder) -> OneByOne | PhaseLoop:
    """Return the compiled phases, or phases one by one without Numba.

    Cost:
        About a second in the first call of a process with Numba.
    """
    functions = compiled_or_none("decode JPEGs in phases", lambda: compile_phases(decoder.addresses))
    return OneByOne() if functions is None else PhaseLoop(functions)


def compile_phases(addresses: Sequence[int]) -> Functions:
    """Compile the loops over the phases of ``nvjpeg.PhasedDecoder``, which call the functions at ``addresses``.

    Raises:
        ImportError: If Numba is not installed.
    """
    from numba import njit

    call = c_call()
    parse, dimensions, set_format, set_window, host, transfer, device = addresses
    stride = _HOST_JOB.itemsize

    @njit(nogil=True)  # type: ignore[untyped-decorator]
    def run_host_phases(jobs: NDArray[np.void], found_width: int) -> None:
        for index in range(len(jobs)):
            job: Any = jobs[index]
            status = call(parse, (job.handle, job.file, job.bytes, 0, 0, job.stream)) & LOW
            if status == 0:
                width_address = found_width + index * stride
                status = call(dimensions, (job.stream, width_address, width_address + 4)) & LOW
            if status == 0:
                if job.found_width != job.width or job.found_height != job.height:
                    status = _OTHER_SIZE
                else:
                    call(set_format, (job.parameters, job.form))
                    call(set_window, (job.parameters, job.left, job.top, job.window_width, job.window_height))
                    status = call(host, (job.handle, job.decoder, job.state, job.parameters, job.stream)) & LOW
            job.status = status

    @njit(nogil=True)  # type: ignore[untyped-decorator]
    def run_card_phases(jobs: NDArray[np.void], cuda_stream: int) -> None:
        for index in range(len(jobs)):
            job: Any = jobs[index]
            status = call(transfer, (job.handle, job.decoder, job.state, job.stream, cuda_stream)) & LOW
            if status == 0:
                status = call(device, (job.handle, job.decoder, job.state, job.output, cuda_stream)) & LOW
            job.status = status

    run_host_phases(np.empty(0, _HOST_JOB), 0)
    run_card_phases(np.empty(0, _CARD_JOB), 0)
    return run_host_phases, run_card_phases


def _outcome(function: Callable[..., str], *arguments: Any) -> Outcome:
    try:
        return function(*arguments)
    except nvjpeg.NvJpegError as error:
        return error
