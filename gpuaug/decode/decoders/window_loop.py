"""Decoding of many windows of JPEGs in one call without the interpreter's lock: a loop that Numba compiles calls libturbojpeg.

A *window* is the part of an image that is needed. A thread that decodes one image per call acquires the interpreter's lock once
per image, and waits for it: of 16 cores, 10 were busy.
"""

from collections.abc import Callable, Sequence
from ctypes import c_void_p, cast
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.decode.c_calls import LOW, c_call, compile_once, compiled_or_none
from gpuaug.decode.decoders import turbojpeg
from gpuaug.decode.decoders.turbojpeg import (
    DECOMPRESS,
    HEIGHT,
    MARGIN,
    MCU_WIDTHS,
    PIXEL_FORMATS,
    PROGRESSIVE,
    SUBSAMPLING,
    WIDTH,
)

_JOB = np.dtype(
    [
        *((name, np.int64) for name in ("file", "bytes", "out", "top", "left", "height", "width")),
        *((name, np.int64) for name in ("needed_left", "needed_width", "full_height", "full_width")),
        *((name, np.int64) for name in ("scale", "channels", "pixel_format")),
    ]
)
"""Structured dtype of the arguments of ``turbojpeg.decode`` for one image.

``file`` and ``out`` are addresses. ``needed_left`` and ``needed_width`` are columns of the image that the caller needs.
"""

DecodeJobs = Callable[[NDArray[np.void], NDArray[np.bool_]], None]
"""Function of (n,) records of ``_JOB`` and a (n,) mask. Decodes the images of the mask, and clears the mask where it fails."""


class WindowLoop:
    """Compiled loop over the windows of one batch that libturbojpeg can decode without a scratch buffer.

    Args:
        decode_jobs: Result of ``compiled``.
        files: Address of the files of the batch.
        out: Address of the buffer for the decoded images.
        channels: Number of channels of the decoded images.
        table: (B,) records of ``HEADER``.
        starts: (B,) offset of each decoded image in the buffer, in bytes.
        windows: (B, 4) top, left, height and width.
        requested_windows: (B, 4) part of ``windows`` that the caller needs.
        scales: (B,) downsampling factors.
        mask: (B,) mask of the images that the loop may decode.
    """

    def __init__(
        self,
        decode_jobs: DecodeJobs,
        files: int,
        out: int,
        channels: int,
        table: NDArray[np.void],
        starts: NDArray[np.int64],
        windows: NDArray[np.int64],
        requested_windows: NDArray[np.int64],
        scales: NDArray[np.int64],
        mask: NDArray[np.bool_],
    ) -> None:
        self._decode_jobs = decode_jobs
        self._mask = mask
        self._jobs = jobs = np.empty(len(table), _JOB)
        jobs["file"] = files + table["start"].astype(np.int64)
        jobs["bytes"] = table["length"]
        jobs["out"] = out + starts
        for name, column in zip(("top", "left", "height", "width"), windows.T, strict=True):
            jobs[name] = column
        jobs["needed_left"] = requested_windows[:, 1]
        jobs["needed_width"] = requested_windows[:, 3]
        jobs["full_height"] = table["height"]
        jobs["full_width"] = table["width"]
        jobs["scale"] = scales
        jobs["channels"] = channels
        jobs["pixel_format"] = PIXEL_FORMATS[channels]

    def decode(self, indices: Sequence[int]) -> NDArray[np.bool_]:
        """Decode images of the batch. Return the (n,) mask of the images that were decoded.

        The loop skips progressive JPEGs and images that need a scratch buffer, which ``turbojpeg.decode`` may still decode.
        """
        index_array = np.array(indices)
        decoded: NDArray[np.bool_] = self._mask[index_array]
        if decoded.any():
            self._decode_jobs(self._jobs[index_array], decoded)
        return decoded


@compile_once
def compiled() -> DecodeJobs | None:
    """Return the compiled loop, or ``None`` if Numba or libturbojpeg is missing, or the platform is not supported.

    Cost:
        About a second in the first call of a process.
    """
    functions = turbojpeg.library()
    return None if functions is None else compiled_or_none("decode windows of JPEGs", lambda: _compile(functions))


def _compile(functions: turbojpeg.Library) -> DecodeJobs:
    """Compile the loop over images.

    Raises:
        ImportError: If Numba is not installed.
    """
    from numba import njit

    quick: Any = functions.quick
    decompress_function: Any = functions.decompress
    init, destroy, read_header, get, set_scale, set_region, decompress = (
        cast(function, c_void_p).value
        for function in (
            *(quick.tj3Init, quick.tj3Destroy, quick.tj3DecompressHeader, quick.tj3Get),
            *(quick.tj3SetScalingFactor, quick.tj3SetCroppingRegion, decompress_function),
        )
    )
    call = c_call()

    @njit(nogil=True)  # type: ignore[untyped-decorator]
    def decode_one(handle: int, job: Any) -> bool:
        """``turbojpeg.decode`` for a window that needs no scratch buffer."""
        if call(read_header, (handle, job.file, job.bytes)) & LOW:
            return False
        if call(get, (handle, HEIGHT)) & LOW != job.full_height or call(get, (handle, WIDTH)) & LOW != job.full_width:
            return False
        subsampling = call(get, (handle, SUBSAMPLING)) & LOW
        columns = -(-job.full_width // job.scale)
        if subsampling >= len(MCU_WIDTHS) or call(get, (handle, PROGRESSIVE)) & LOW or job.left + job.width > columns:
            return False
        mcu_width = MCU_WIDTHS[subsampling]
        margin = MARGIN if mcu_width > 8 else 0
        multiple = max(mcu_width // job.scale, 1)
        start = max(job.needed_left - margin, 0) // multiple * multiple
        end = min(job.needed_left + job.needed_width + margin, columns)
        if start != job.left or end - start != job.width:
            return False
        # The structures of two and four 32-bit integers are passed as one and two 64-bit registers.
        if job.scale > 1 and call(set_scale, (handle, 1 | job.scale << 32)) & LOW:
            return False
        if call(set_region, (handle, start | job.top << 32, job.width | job.height << 32)) & LOW:
            return False
        arguments = (handle, job.file, job.bytes, job.out, job.width * job.channels, job.pixel_format)
        status: int = call(decompress, arguments)
        return status & LOW == 0

    @njit(nogil=True)  # type: ignore[untyped-decorator]
    def decode_jobs(jobs: NDArray[np.void], decoded: NDArray[np.bool_]) -> None:
        for index in range(len(jobs)):
            if decoded[index]:
                # A new handle per file: a handle keeps the tables of its last file, and would use them for a file without
                # tables.
                handle = call(init, (DECOMPRESS,))
                decoded[index] = decode_one(handle, jobs[index])
                call(destroy, (handle,))

    decode_jobs(np.empty(0, _JOB), np.empty(0, np.bool_))
    result: DecodeJobs = decode_jobs
    return result
