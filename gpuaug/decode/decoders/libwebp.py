"""Bindings of the C functions of libwebp, in the library file that PIL has loaded.

PIL itself decodes a WebP into four channels, and copies the pixels three times, in part with the interpreter's lock held.
"""

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint32, c_void_p
from functools import cache

import numpy as np
from numpy.typing import NDArray

_DEMUX_ABI = 0x0107
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


@cache
def library() -> ctypes.CDLL | None:
    """Return libwebp, or ``None`` if PIL has no libwebp, or has linked it statically, as on Windows.

    Pixels equal PIL's for every version of libwebp, because PIL uses the same library file.
    """
    try:
        from PIL import _webp  # type: ignore[attr-defined]  # here, so that importing gpuaug does not import PIL

        functions = ctypes.CDLL(_webp.__file__)  # the handle also finds functions of the libraries that the module is linked to
        functions.WebPDemuxInternal.argtypes = [c_void_p, c_int, c_void_p, c_int]
        functions.WebPDemuxInternal.restype = c_void_p
        functions.WebPDemuxGetFrame.argtypes = [c_void_p, c_int, c_void_p]
        functions.WebPDemuxReleaseIterator.argtypes = [c_void_p]
        functions.WebPDemuxDelete.argtypes = [c_void_p]
        functions.WebPDecodeRGBInto.argtypes = [c_void_p, c_size_t, c_void_p, c_size_t, c_int]
        functions.WebPDecodeRGBInto.restype = c_void_p
    except (ImportError, OSError, AttributeError):
        return None
    return functions


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
    demuxer = libwebp.WebPDemuxInternal(byref(data), 0, None, _DEMUX_ABI)
    try:
        if not demuxer or not libwebp.WebPDemuxGetFrame(demuxer, 1, byref(frame)):
            return False
        if (frame.width, frame.height) != (width, height):
            return False
        chunks = frame.chunks
        return libwebp.WebPDecodeRGBInto(chunks.bytes, chunks.size, buffer.ctypes.data, buffer.size, 3 * width) is not None
    finally:
        libwebp.WebPDemuxReleaseIterator(byref(frame))  # allows a null pointer and an empty frame
        libwebp.WebPDemuxDelete(demuxer)
