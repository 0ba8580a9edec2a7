"""Decoding of windows of JPEGs, and of PNGs and WebPs, in loops that call libturbojpeg, libspng and libwebp by address.

A *window* is the part of an image that is needed. A *job* is a record of ``layout.IMAGE``: header fields and a window.

Numba compiles the loops, so that they do not hold the interpreter's lock. Without Numba, Python runs the loops. A thread then
acquires the lock several times per image, and waits for it: of 16 cores, 10 were busy with windows of JPEGs; of 14 threads, 3
were waiting with PNGs and WebPs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core.encoded import Format, is_among
from gpuaug.decode.c_calls import LOW, addresses, addresses_in_module, compile_once, compiled_or_python
from gpuaug.decode.decoders import turbojpeg
from gpuaug.decode.decoders.turbojpeg import (
    DECOMPRESS,
    HEIGHT,
    MCU_WIDTHS,
    PIXEL_FORMATS,
    PROGRESSIVE,
    SUBSAMPLING,
    WIDTH,
)
from gpuaug.decode.layout import IMAGE, Layout, Work

Array = NDArray[Any]

DecodeJobs = Callable[[Array, Array, Array, Array, int, Array], None]
"""Loop over images: function of (files, out, jobs, starts, channels, decoded), which returns nothing.

``decoded``, (n,) bool, is true for each image to decode. The loop sets it to false where decoding fails. ``files`` and ``out``
are flat arrays of bytes; ``jobs`` are (n,) records of ``IMAGE``; ``starts`` are the (n,) offsets of the windows in ``out``;
``channels`` is the number of channels in ``out``.
"""

WINDOW_FORMATS = (int(Format.JPEG), int(Format.OTHER_JPEG))
"""Values of ``Format`` for which libturbojpeg decodes a window faster than the whole image.

Progressive JPEGs are not among them: reading all of their scans takes as long as decoding the whole image.
"""

PNG_AND_WEBP = (int(Format.PNG), int(Format.WEBP))
"""Values of ``Format`` that ``png_and_webp_loop`` decodes."""

MAX_SCRATCH_PIXELS = 2**24
"""Maximum number of pixels of a PNG or WebP that is first decoded into scratch memory, instead of directly into the output."""

LIBSPNG = (
    "imagecodecs._spng",
    ("spng_ctx_new", "spng_ctx_free", "spng_set_png_buffer", "spng_get_ihdr", "spng_decode_image"),
)
"""Module of imagecodecs that contains libspng, a decoder of PNGs, and names of functions that the module exports on Linux."""

LIBWEBP = (
    "PIL._webp",
    ("WebPDemuxInternal", "WebPDemuxGetFrame", "WebPDemuxReleaseIterator", "WebPDemuxDelete", "WebPDecodeRGBInto"),
)
"""Module that is linked to libwebp, and names of its functions. ``WebPDecodeRGBInto`` decodes; the others take microseconds.

The functions are called without PIL, because PIL decodes a WebP into four channels, and copies the pixels three times, in part
with the interpreter's lock held. Pixels equal PIL's for every version of libwebp, because PIL uses the same library file.
"""

DEMUX_ABI = 0x0107
"""``WEBP_DEMUX_ABI_VERSION``: version of the structures ``WebPData`` and ``WebPIterator``.

libwebp rejects a version whose major part, the upper byte, differs from its own.
"""

_WORDS = 12
"""Size of the memory for a structure of libspng or libwebp, in 64-bit integers."""


class Loops:
    """Loops over images of one batch that need no rotation: windows of JPEGs; PNGs and WebPs, whole or a window of them.

    ``bool()`` of the object is true if there is a loop for at least one image.

    Args:
        work: Decoding task of the batch.
        indices: (n,) indices of the images that the CPU decodes.
    """

    def __init__(self, work: Work[Layout], indices: NDArray[Any]) -> None:
        layout = work.layout
        out, self._starts = work.host
        self._out = out.numpy()
        self._files = work.encoded.data.numpy()
        self._channels = layout.channels
        self._jobs = jobs = layout.records
        selected = np.zeros(len(jobs), np.bool_)
        if layout.channels in PIXEL_FORMATS and layout.dtype == torch.uint8:  # grey or RGB of 8 bits
            selected[indices] = layout.orientations[indices] == 1
        is_part = (layout.windows[:, 2:] != layout.shapes.sizes).any(1)
        is_jpeg = is_part & is_among(jobs["format"], WINDOW_FORMATS) & is_among(jobs["channels"], (1, 3))
        is_png_or_webp = is_among(jobs["format"], PNG_AND_WEBP)
        makers = ((jpeg_loop, selected & is_jpeg), (png_and_webp_loop, selected & is_png_or_webp))
        # (loop, (B,) mask of its images) for each loop that has images and can run here. Only such a loop is made and compiled.
        self._loops = [(decode_jobs, mask) for maker, mask in makers if mask.any() and (decode_jobs := maker()) is not None]

    def __bool__(self) -> bool:
        return bool(self._loops)

    def decode(self, indices: Sequence[int]) -> NDArray[np.bool_]:
        """Decode the (n,) images ``indices`` of the batch. Return the (n,) mask of the images that were decoded.

        Images that no loop can decode are left to the caller, such as progressive JPEGs, damaged files, and PNGs and WebPs
        whose pixels need a conversion other than dropping alpha.
        """
        selected = np.array(indices)
        decoded = np.zeros(len(indices), np.bool_)
        for decode_jobs, is_of_loop in self._loops:
            mask = is_of_loop[selected]
            if mask.any():
                decode_jobs(self._files, self._out, self._jobs[selected], self._starts[selected], self._channels, mask)
                decoded |= mask  # the loop has set ``mask`` to false where decoding failed
        return decoded


def _compiled(decode_jobs: Any) -> DecodeJobs:
    """Call a loop without images, so that Numba compiles it now, and return the loop."""
    files, starts, decoded = np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.bool_)
    decode_jobs(files, files, np.empty(0, IMAGE), starts, 3, decoded)
    result: DecodeJobs = decode_jobs
    return result


@compile_once
def jpeg_loop() -> DecodeJobs | None:
    """Return the loop over windows of JPEGs, or ``None`` if libturbojpeg is missing, or the machine is not supported.

    The pixels are equal, bit for bit, to the pixels of the whole image decoded by libjpeg-turbo. A window must be one that
    ``turbojpeg.regions`` returns. If libjpeg-turbo warns about a file, decoding counts as failed, so that the caller decodes
    the whole image.

    In a JPEG of one scan, libjpeg does not read the rows below the window: a file that is damaged or truncated in these rows is
    decoded without a warning, although a decoder of whole images may reject the file.

    Cost:
        About a second in the first call of a process with Numba. Per image, Huffman decoding of all rows down to the end of the
        window; all other work is limited to the window.
    """
    return None if turbojpeg.library() is None else compiled_or_python("decode windows of JPEGs", _define_jpeg_loop)


def _define_jpeg_loop(call: Any, call_unlocked: Any, compile_function: Any) -> DecodeJobs:
    """Define the loop of ``jpeg_loop``. For the arguments see ``compiled_or_python``."""
    init, destroy, read_header, get, set_scale, set_region, decompress = addresses(turbojpeg.library(), turbojpeg.NAMES)
    grey, rgb = PIXEL_FORMATS[1], PIXEL_FORMATS[3]

    @compile_function  # type: ignore[untyped-decorator]
    def decode_jpeg(handle: int, file: int, out: int, job: Any, channels: int) -> bool:
        if call(read_header, (handle, file, job["length"])) & LOW:  # not 0 after an error or a warning, here and below
            return False
        if call(get, (handle, HEIGHT)) & LOW != job["height"] or call(get, (handle, WIDTH)) & LOW != job["width"]:
            return False
        subsampling = call(get, (handle, SUBSAMPLING)) & LOW
        columns = -(-job["width"] // job["scale"])
        mcu_width = 8 if job["channels"] == 1 else (job["sampling"] - 1) // 4 * 8
        if subsampling >= len(MCU_WIDTHS) or MCU_WIDTHS[subsampling] != mcu_width:  # ``regions`` was computed for another width
            return False
        if call(get, (handle, PROGRESSIVE)) & LOW or job["left"] + job["window_width"] > columns:
            return False
        # Structures are passed in 64-bit registers of two 32-bit integers, the first in the low half: the scaling factor
        # (numerator, denominator) in one register, the region (x, y, width, height) in two.
        if job["scale"] > 1 and call(set_scale, (handle, 1 | job["scale"] << 32)) & LOW:
            return False
        # Set a region even for a whole image: the call fails for a lossless JPEG, which would be decoded without downsampling.
        if call(set_region, (handle, job["left"] | job["top"] << 32, job["window_width"] | job["window_height"] << 32)) & LOW:
            return False
        row_bytes = job["window_width"] * channels
        pixel_format = grey if channels == 1 else rgb
        # Fails for CMYK, which libjpeg-turbo does not convert to RGB or grey, and for 12 bits per value.
        status: int = call_unlocked(decompress, (handle, file, job["length"], out, row_bytes, pixel_format))
        return status & LOW == 0

    @compile_function  # type: ignore[untyped-decorator]
    def decode_jobs(files: Array, out: Array, jobs: Array, starts: Array, channels: int, decoded: Array) -> None:
        for index in range(len(jobs)):
            if decoded[index]:
                job = jobs[index]
                # A new handle per file: a handle keeps the tables of its last file, and would use them for a file without
                # tables.
                handle = call(init, (DECOMPRESS,))
                file = np.int64(files.ctypes.data) + job["start"]
                pixels = np.int64(out.ctypes.data) + starts[index]
                decoded[index] = decode_jpeg(handle, file, pixels, job, channels)
                call(destroy, (handle,))

    return _compiled(decode_jobs)


@compile_once
def png_and_webp_loop() -> DecodeJobs | None:
    """Return the loop over PNGs and WebPs, or ``None`` if both libraries are missing, or the machine is not supported.

    Cost:
        About three seconds in the first call of a process with Numba.
    """
    if not any((*addresses_in_module(*LIBSPNG), *addresses_in_module(*LIBWEBP))):
        return None
    return compiled_or_python("decode PNGs and WebPs", _define_png_and_webp_loop)


def _define_png_and_webp_loop(call: Any, call_unlocked: Any, compile_function: Any) -> DecodeJobs:
    """Define the loop of ``png_and_webp_loop``. For the arguments see ``compiled_or_python``."""
    new, free, set_file, read_header, decode_image = addresses_in_module(*LIBSPNG)
    demux, get_frame, release_frame, delete, decode_rgb = addresses_in_module(*LIBWEBP)
    png = int(Format.PNG)

    @compile_function  # type: ignore[untyped-decorator]
    def decode_png(file: int, buffer: int, size: int, job: Any, words: Array) -> bool:
        """Decode a PNG of 8 bits per channel into ``buffer`` as ``imagecodecs.spng_decode`` does. Return whether it succeeded.

        ``file``, ``buffer``: addresses. ``size``: number of bytes of ``buffer``. ``words``: scratch memory for the header.
        """
        stored = job["channels"]
        pixel_format = 64 if stored == 1 else 4 if stored == 3 else 1  # SPNG_FMT_G8, SPNG_FMT_RGB8 or SPNG_FMT_RGBA8
        context = call(new, (0,))
        if not context:
            return False
        decoded: bool = (
            call(set_file, (context, file, job["length"])) & LOW == 0
            and call(read_header, (context, np.int64(words.ctypes.data))) & LOW == 0
            and words[0] == job["width"] | job["height"] << 32  # first two 32-bit integers of the header
            and call_unlocked(decode_image, (context, buffer, size, pixel_format, 0)) & LOW == 0
        )
        call(free, (context,))
        return decoded

    @compile_function  # type: ignore[untyped-decorator]
    def decode_webp(file: int, buffer: int, size: int, job: Any, words: Array) -> bool:
        """Decode a WebP, or the first frame of an animation if the frame covers the canvas. Arguments as of ``decode_png``.

        As in PIL, only the chunks of the frame are decoded, without the bytes that follow in the file. ``words[:10]`` is a
        ``WebPIterator``, in which ``words[2]`` is (width, height) of the frame, ``words[5]`` the address of its chunks, and
        ``words[6]`` their length. ``words[10:12]`` is a ``WebPData``: address and length of the file.
        """
        words[:10] = 0
        words[10] = file
        words[11] = job["length"]
        iterator = np.int64(words.ctypes.data)
        # + 80: address of ``words[10]``. The zeros: the file must be complete, and its state is not stored.
        demuxer = call(demux, (iterator + 80, 0, 0, DEMUX_ABI))
        decoded: bool = (
            demuxer != 0
            and call(get_frame, (demuxer, 1, iterator)) & LOW != 0  # frames are numbered from 1
            and words[2] == job["width"] | job["height"] << 32
            and call_unlocked(decode_rgb, (words[5], words[6], buffer, size, 3 * job["width"])) != 0
        )
        call(release_frame, (iterator,))
        call(delete, (demuxer,))
        return decoded

    @compile_function  # type: ignore[untyped-decorator]
    def decode_job(files: Array, out: Array, job: Any, start: int, channels: int, words: Array) -> bool:
        """Decode one image: directly into the output, or into scratch memory, from which its window is copied without alpha."""
        height, width = job["window_height"], job["window_width"]
        is_png = job["format"] == png
        stored = job["channels"] if is_png else 3  # channels of the decoded image, before alpha is dropped
        # ``new`` and ``decode_rgb`` are 0 if the library is missing.
        if not (new if is_png else decode_rgb) or not (stored == channels or (is_png and stored == 4 and channels == 3)):
            return False
        pixels = job["height"] * job["width"]
        is_direct = stored == channels and height * width == pixels
        if not is_direct and pixels > MAX_SCRATCH_PIXELS:
            return False
        scratch = np.empty(0 if is_direct else pixels * stored, np.uint8)
        buffer = np.int64(out.ctypes.data) + start if is_direct else np.int64(scratch.ctypes.data)
        file = np.int64(files.ctypes.data) + job["start"]
        size = pixels * stored
        if not (decode_png(file, buffer, size, job, words) if is_png else decode_webp(file, buffer, size, job, words)):
            return False
        if not is_direct:
            image = scratch.reshape((job["height"], job["width"], stored))
            window = out[start : start + height * width * channels].reshape((height, width, channels))
            window[:, :, :] = image[job["top"] :, job["left"] :, :channels][:height, :width]
        return True

    @compile_function  # type: ignore[untyped-decorator]
    def decode_jobs(files: Array, out: Array, jobs: Array, starts: Array, channels: int, decoded: Array) -> None:
        words = np.empty(_WORDS, np.int64)
        for index in range(len(jobs)):
            if decoded[index]:
                decoded[index] = decode_job(files, out, jobs[index], starts[index], channels, words)

    return _compiled(decode_jobs)
