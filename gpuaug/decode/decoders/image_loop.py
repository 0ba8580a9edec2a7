"""Decoding of PNGs and WebPs without the interpreter's lock: a loop that Numba compiles calls libspng and libwebp.

A thread that decodes such an image in Python acquires the interpreter's lock several times per image, and waits for it: of 14
threads, 3 were waiting.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_void_p, cast
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.encoded import Format
from gpuaug.decode.c_calls import LOW, c_call, compile_once, compiled_or_none
from gpuaug.decode.decoders import libspng, libwebp
from gpuaug.decode.work import Work

_JOB = np.dtype(
    [
        *((name, np.int64) for name in ("format", "start", "bytes", "out")),
        *((name, np.int64) for name in ("top", "left", "height", "width", "full_height", "full_width")),
    ]
)
"""Structured dtype of the arguments for one image: format, offset and length of the file, address of the output, window, and
size of the image."""

MAX_PIXELS = 2**24
"""Maximum number of pixels of an image for the loop, which takes four bytes of scratch memory per pixel."""

_WORDS = 12
"""Number of 64-bit integers for the structures of libspng and libwebp."""

_PNG, _WEBP = 1, 2
"""Formats of files, for the field ``format`` of ``_JOB``."""

_SIGNATURES = {_PNG: (0, libspng.SIGNATURE), _WEBP: (8, libwebp.SIGNATURE)}
"""Format → offset and value of the bytes that all files of the format have."""

_PREFIX_BYTES = 16
"""Number of bytes at the beginning of a file that contain its signature."""

DecodeJobs = Callable[[NDArray[np.uint8], NDArray[np.void], int, NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_]], None]
"""Function of the files, (n,) records of ``_JOB``, the number of channels, a scratch buffer, ``_WORDS`` integers, and an (n,)
mask. Decodes the images of the mask, and clears the mask where it fails."""


class ImageLoop:
    """Compiled loop over the PNGs and WebPs of one batch.

    Args:
        decode_jobs: Result of ``compiled``.
        files: (bytes,) files of the batch.
        out: Address of the buffer for the decoded images.
        channels: Number of channels of the decoded images.
        table: (B,) records of ``HEADER``.
        starts: (B,) offset of each decoded image in the buffer, in bytes.
        windows: (B, 4) top, left, height and width.
        mask: (B,) mask of the images that the loop may decode.
    """

    def __init__(
        self,
        decode_jobs: DecodeJobs,
        files: NDArray[np.uint8],
        out: int,
        channels: int,
        table: NDArray[np.void],
        starts: NDArray[np.int64],
        windows: NDArray[np.int64],
        mask: NDArray[np.bool_],
    ) -> None:
        self._decode_jobs, self._files, self._channels = decode_jobs, files, channels
        self._jobs = jobs = np.empty(len(table), _JOB)
        small = table["height"].astype(np.int64) * table["width"] <= MAX_PIXELS
        jobs["format"] = np.where(mask & small, _formats(files, table), 0)
        jobs["start"] = table["start"]
        jobs["bytes"] = table["length"]
        jobs["out"] = out + starts
        for name, column in zip(("top", "left", "height", "width"), windows.T, strict=True):
            jobs[name] = column
        jobs["full_height"] = table["height"]
        jobs["full_width"] = table["width"]

    def decode(self, indices: Sequence[int]) -> NDArray[np.bool_]:
        """Decode images of the batch. Return the (n,) mask of the images that were decoded.

        The loop skips files of other formats, and PNGs and WebPs whose pixels need a conversion other than the loss of alpha.
        """
        index_array = np.array(indices)
        jobs = self._jobs[index_array]
        decoded: NDArray[np.bool_] = jobs["format"] != 0
        if decoded.any():
            scratch = np.empty(4 * int((jobs["full_height"] * jobs["full_width"])[decoded].max()), np.uint8)
            self._decode_jobs(self._files, jobs, self._channels, scratch, np.empty(_WORDS, np.int64), decoded)
        return decoded


def loops(work: Work, out: Tensor, starts: NDArray[np.int64], upright: NDArray[np.bool_]) -> Iterator[ImageLoop]:
    """Yield the loop over PNGs and WebPs, if it can decode images of the batch.

    Args:
        work: Decoding task of the batch.
        out: Buffer for the decoded images.
        starts: (B,) offset of each image in ``out``.
        upright: (B,) mask of the images that the CPU decodes and does not rotate.
    """
    layout = work.layout
    mask = upright & (layout.headers["format"] == Format.OTHER)
    decode_jobs = compiled() if mask.any() else None
    if decode_jobs is not None:
        files = work.encoded.data.numpy()
        yield ImageLoop(decode_jobs, files, out.data_ptr(), layout.channels, layout.headers, starts, layout.windows, mask)


def _formats(files: NDArray[np.uint8], table: NDArray[np.void]) -> NDArray[np.int64]:
    """Return the (B,) format of each file: ``_PNG``, ``_WEBP``, or 0 for other formats.

    Args:
        files: (bytes,) files of the batch.
        table: (B,) records of ``HEADER``.
    """
    result = np.zeros(len(table), np.int64)
    long_enough = np.flatnonzero(table["length"] >= _PREFIX_BYTES)
    prefixes = files[table["start"][long_enough, None] + np.arange(_PREFIX_BYTES)]
    for file_format, (offset, value) in _SIGNATURES.items():
        equal = prefixes[:, offset : offset + len(value)] == np.frombuffer(value, np.uint8)
        result[long_enough[equal.all(1)]] = file_format
    return result


@compile_once
def compiled() -> DecodeJobs | None:
    """Return the compiled loop, or ``None`` if Numba or both libraries are missing, or the platform is not supported.

    Cost:
        About three seconds in the first call of a process.
    """
    if libspng.functions() is None and libwebp.library() is None:
        return None
    return compiled_or_none("decode PNGs and WebPs", _compile)


def _compile() -> DecodeJobs:
    """Compile the loop over images.

    Raises:
        ImportError: If Numba is not installed.
    """
    from numba import njit

    new, free, set_file, read_header, decode_image = _addresses(libspng.functions(), libspng.NAMES)
    webp = libwebp.library()
    names = ("WebPDemuxInternal", "WebPDemuxGetFrame", "WebPDemuxReleaseIterator", "WebPDemuxDelete")
    demux, get_frame, release_frame, delete = _addresses(webp and webp.container, names)
    decode_rgb = 0 if webp is None else _address(webp.decode_rgb)
    memmove = _address(ctypes.memmove)
    call = c_call()
    compile_function = njit(nogil=True)
    fits_libspng = compile_function(libspng.fits)

    @compile_function
    def copy_window(job: Any, scratch: NDArray[np.uint8], stored: int, channels: int) -> None:
        """Copy the window from an image of ``stored`` channels in ``scratch`` to the output, without the last channels."""
        for row in range(job.height):
            first = ((job.top + row) * job.full_width + job.left) * stored
            if stored != channels:
                for column in range(job.width):
                    for channel in range(channels):
                        scratch[first + column * channels + channel] = scratch[first + column * stored + channel]
            length = job.width * channels
            call(memmove, (job.out + row * length, np.int64(scratch.ctypes.data) + first, length))

    @compile_function
    def decode_png(
        files: NDArray[np.uint8], job: Any, channels: int, scratch: NDArray[np.uint8], words: NDArray[np.int64]
    ) -> bool:
        """Decode a PNG of 8 bits per channel as ``imagecodecs.spng_decode`` does."""
        file = files[job.start : job.start + job.bytes]
        if not new or not fits_libspng(file) or file[libspng.DEPTH] != 8:
            return False
        colour_type = file[libspng.COLOUR_TYPE]
        # Number of channels, and SPNG_FMT_G8, SPNG_FMT_RGB8 or SPNG_FMT_RGBA8.
        stored, pixel_format = (1, 64) if colour_type == 0 else (3, 4) if colour_type == 2 else (4, 1)
        if stored != channels and not (stored == 4 and channels == 3):
            return False
        whole = job.height == job.full_height and job.width == job.full_width
        buffer = job.out if whole and stored == channels else np.int64(scratch.ctypes.data)
        size = job.full_height * job.full_width * stored
        address = np.int64(words.ctypes.data)
        context = call(new, (0,))
        if not context:
            return False
        decoded: bool = (
            call(set_file, (context, np.int64(files.ctypes.data) + job.start, job.bytes)) & LOW == 0
            and call(read_header, (context, address)) & LOW == 0
            and words[0] == job.full_width | job.full_height << 32
            and call(decode_image, (context, buffer, size, pixel_format, 0)) & LOW == 0
        )
        call(free, (context,))
        if decoded and buffer != job.out:
            copy_window(job, scratch, stored, channels)
        return decoded

    @compile_function
    def decode_webp(
        files: NDArray[np.uint8], job: Any, channels: int, scratch: NDArray[np.uint8], words: NDArray[np.int64]
    ) -> bool:
        """Decode a WebP as ``libwebp.decode`` does. The first 10 integers of ``words`` are a ``WebPIterator``."""
        if not decode_rgb or channels != 3:
            return False
        whole = job.height == job.full_height and job.width == job.full_width
        buffer = job.out if whole else np.int64(scratch.ctypes.data)
        size = 3 * job.full_height * job.full_width
        words[:10] = 0
        words[10] = np.int64(files.ctypes.data) + job.start
        words[11] = job.bytes
        address = np.int64(words.ctypes.data)
        demuxer = call(demux, (address + 80, 0, 0, libwebp.DEMUX_ABI))
        decoded: bool = (
            demuxer != 0
            and call(get_frame, (demuxer, 1, address)) & LOW != 0
            and words[2] == job.full_width | job.full_height << 32
            and call(decode_rgb, (words[5], words[6], buffer, size, 3 * job.full_width)) != 0
        )
        call(release_frame, (address,))
        call(delete, (demuxer,))
        if decoded and not whole:
            copy_window(job, scratch, channels, channels)
        return decoded

    @compile_function
    def decode_jobs(
        files: NDArray[np.uint8],
        jobs: NDArray[np.void],
        channels: int,
        scratch: NDArray[np.uint8],
        words: NDArray[np.int64],
        decoded: NDArray[np.bool_],
    ) -> None:
        for index in range(len(jobs)):
            job = jobs[index]
            if job.format == _PNG:
                decoded[index] = decode_png(files, job, channels, scratch, words)
            elif job.format == _WEBP:
                decoded[index] = decode_webp(files, job, channels, scratch, words)

    empty = np.empty(0, np.uint8)
    decode_jobs(empty, np.empty(0, _JOB), 3, empty, np.empty(_WORDS, np.int64), np.empty(0, np.bool_))
    result: DecodeJobs = decode_jobs
    return result


def _addresses(library: Any, names: Sequence[str]) -> list[int]:
    """Return the addresses of functions of a library; zeros if ``library`` is ``None``."""
    return [0 if library is None else _address(getattr(library, name)) for name in names]


def _address(function: Any) -> int:
    return cast(function, c_void_p).value or 0
