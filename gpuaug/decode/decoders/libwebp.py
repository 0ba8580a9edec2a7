"""Bindings of the C functions of libwebp, in the library file that PIL has loaded.

PIL itself decodes a WebP into four channels, and copies the pixels three times, in part with the interpreter's lock held.
"""

import ctypes
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint32, c_void_p
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SIGNATURE = b"WEBPVP8"
"""Bytes 8 to 14 of a WebP."""

DEMUX_ABI = 0x0107
"""``WEBP_DEMUX_ABI_VERSION``: version of the structures below.

libwebp rejects a version whose upper byte differs from its own.
"""


class _Data(ctypes.Structure):
    """``WebPData``."""

    _fields_ = (("bytes", c_void_p), ("size", c_size_t))


class _Frame(ctypes.Structure):
    """``WebPIterator``."""

    _fields_ = (
        ("number", c_int),
        ("count", c_int),
        ("left", c_int),
        ("top", c_int),
        ("width", c_int),
        ("height", c_int),
        ("duration", c_int),
        ("dispose_method", c_int),
        ("complete", c_int),
        ("chunks", _Data),
        ("has_alpha", c_int),
        ("blend_method", c_int),
        ("pad", c_uint32 * 2),
        ("private", c_void_p),
    )


class Functions(NamedTuple):
    """Functions of libwebp."""

    container: ctypes.PyDLL
    """Functions that read the container of an image. They take microseconds, and keep the interpreter's lock, because a thread
    would wait for the lock after each of them for about a millisecond."""
    decode_rgb: Callable[..., int | None]
    """``WebPDecodeRGBInto``, which releases the interpreter's lock."""


@cache
def library() -> Functions | None:
    """Return the functions of libwebp, or ``None`` if PIL has no libwebp, or has linked it statically, as on Windows.

    Pixels equal PIL's for every version of libwebp, because PIL uses the same library file.
    """
    try:
        from PIL import _webp  # type: ignore[attr-defined]  # here, so that importing gpuaug does not import PIL

        # These handles also find functions of the libraries that the module is linked to.
        container = ctypes.PyDLL(_webp.__file__)
        decode_rgb = ctypes.CDLL(_webp.__file__).WebPDecodeRGBInto
        container.WebPDemuxInternal.argtypes = [c_void_p, c_int, c_void_p, c_int]
        container.WebPDemuxInternal.restype = c_void_p
        container.WebPDemuxGetFrame.argtypes = [c_void_p, c_int, c_void_p]
        container.WebPDemuxReleaseIterator.argtypes = [c_void_p]
        container.WebPDemuxDelete.argtypes = [c_void_p]
        decode_rgb.argtypes = [c_void_p, c_size_t, c_void_p, c_size_t, c_int]
        decode_rgb.restype = c_void_p
    except (ImportError, OSError, AttributeError):
        return None
    return Functions(container, decode_rgb)


def decode(file: NDArray[np.uint8], buffer: NDArray[np.uint8]) -> bool:
    """Decode a WebP, or the first frame of an animation if the frame covers the canvas. Releases the interpreter's lock.

    Args:
        file: (bytes,) encoded image.
        buffer: (h, w, 3) contiguous memory for RGB. Its content is undefined after a failure.

    Returns:
        Whether the image was decoded. ``False`` also if its size differs from ``buffer``.
    """
    libwebp = library()
    height, width, _ = buffer.shape
    assert libwebp is not None
    data = _Data(file.ctypes.data, file.size)
    frame = _Frame()
    # As in PIL, only the chunks of the frame are decoded, without the bytes that follow in the file.
    demuxer = libwebp.container.WebPDemuxInternal(byref(data), 0, None, DEMUX_ABI)
    try:
        if not demuxer or not libwebp.container.WebPDemuxGetFrame(demuxer, 1, byref(frame)):
            return False
        if (frame.width, frame.height) != (width, height):
            return False
        chunks = frame.chunks
        return libwebp.decode_rgb(chunks.bytes, chunks.size, buffer.ctypes.data, buffer.size, 3 * width) is not None
    finally:
        libwebp.container.WebPDemuxReleaseIterator(byref(frame))  # allows a null pointer and an empty frame
        libwebp.container.WebPDemuxDelete(demuxer)
