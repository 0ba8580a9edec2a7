"""Decoding of many windows of JPEGs in one call that does not hold the interpreter's lock: libturbojpeg, called by Numba.

A thread that decodes one image per call takes the interpreter's lock once per image, and waits for it: with 16 cores, 10 were
busy. Numba compiles the loop over images, and calls libturbojpeg's functions by their addresses.
"""

from collections.abc import Callable, Sequence
from ctypes import c_void_p, cast
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.decode.decoders import turbojpeg
from gpuaug.decode.decoders.c_calls import LOW, c_call, compiled_or_none
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
        *((name, np.int64) for name in ("file", "bytes", "out", "top", "left", "height", "width", "inner_left", "inner_width")),
        *((name, np.int64) for name in ("full_height", "full_width", "scale", "channels", "pixel_format")),
    ]
)
"""Structured dtype of the arguments for one image: addresses, and sides in pixels, as of ``turbojpeg.decode``."""

DecodeJobs = Callable[[NDArray[np.void], NDArray[np.bool_]], None]
"""Function of (n,) jobs and a (n,) mask: decodes the jobs of the mask, and sets it to false for those that it cannot decode."""


class WindowLoop:
    """Windows of one batch that libturbojpeg can decode directly into the batch.

    Args:
        decode_jobs: Result of ``compiled``.
        files: Address of the files of the batch.
        out: Address of the decoded images.
        channels: Number of channels of the decoded images.
        table: (B,) records of ``HEADER``.
        starts: (B,) offset of each decoded image.
        windows: (B, 4) top, left, height and width.
        wanted: (B, 4) requested part of ``windows``.
        scales: (B,) downsampling factors.
        direct: (B,) mask of the images whose windows are decoded here.
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
        wanted: NDArray[np.int64],
        scales: NDArray[np.int64],
        direct: NDArray[np.bool_],
    ) -> None:
        self._decode_jobs = decode_jobs
        self._direct = direct
        self._jobs = jobs = np.empty(len(table), _JOB)
        jobs["file"] = files + table["start"].astype(np.int64)
        jobs["bytes"] = table["length"]
        jobs["out"] = out + starts
        for name, column in zip(("top", "left", "height", "width"), windows.T, strict=True):
            jobs[name] = column
        jobs["inner_left"] = wanted[:, 1]
        jobs["inner_width"] = wanted[:, 3]
        jobs["full_height"] = table["height"]
        jobs["full_width"] = table["width"]
        jobs["scale"] = scales
        jobs["channels"] = channels
        jobs["pixel_format"] = PIXEL_FORMATS[channels]

    def decode(self, indices: Sequence[int]) -> NDArray[np.bool_]:
        """Decode images of the batch. Return the (n,) mask of those that were decoded; the others need another decoder.

        Not decoded are also images that ``turbojpeg.decode`` decodes by way of a scratch buffer, and progressive ones.
        """
        chosen = np.array(indices)
        decoded: NDArray[np.bool_] = self._direct[chosen]
        if decoded.any():
            self._decode_jobs(self._jobs[chosen], decoded)
        return decoded


@cache
def compiled() -> DecodeJobs | None:
    """Return the compiled loop, or ``None`` without Numba, or without libturbojpeg.

    Cost:
        About a second in the first call of a process.
    """
    functions = turbojpeg.library()
    return None if functions is None else compiled_or_none("decode windows of JPEGs", lambda: _compile(functions))


def _compile(functions: turbojpeg.Library) -> DecodeJobs:
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
        start = max(job.inner_left - margin, 0) // multiple * multiple
        end = min(job.inner_left + job.inner_width + margin, columns)
        if start != job.left or end - start != job.width:
            return False
        # Structures of two and four 32-bit integers, as they lie in registers.
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
                # A new handle per file: a handle keeps the tables of a file, and the next file may lack tables.
                handle = call(init, (DECOMPRESS,))
                decoded[index] = decode_one(handle, jobs[index])
                call(destroy, (handle,))

    decode_jobs(np.empty(0, _JOB), np.empty(0, np.bool_))
    result: DecodeJobs = decode_jobs
    return result
