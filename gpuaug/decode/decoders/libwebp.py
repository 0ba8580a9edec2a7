"""The libwebp that PIL has loaded, through its C interface.

PIL decodes a WebP with it into four channels, and copies them three times, in part with the interpreter's lock held. Apart from
``cpu.py``, because one file alone speaks to each C library.
"""

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint32, c_void_p
from functools import cache

import numpy as np
from numpy.typing import NDArray

_DEMUX_ABI = 0x0107
"""``WEBP_DEMUX_ABI_VERSION``. libwebp refuses another than its own in the upper byte, with which structures change."""


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
    """The functions, or ``None`` where PIL has no libwebp, or has it inside of its own module, as on Windows.

    It is PIL's own library, so pixels are equal in every version of it.
    """
    try:
        from PIL import _webp  # type: ignore[attr-defined]  # here, so that importing gpuaug does not import PIL

        found = ctypes.CDLL(_webp.__file__)  # a symbol is also searched for in the libraries that the module is linked to
        found.WebPDemuxInternal.argtypes = [c_void_p, c_int, c_void_p, c_int]
        found.WebPDemuxInternal.restype = c_void_p
        found.WebPDemuxGetFrame.argtypes = [c_void_p, c_int, c_void_p]
        found.WebPDemuxReleaseIterator.argtypes = [c_void_p]
        found.WebPDemuxDelete.argtypes = [c_void_p]
        found.WebPDecodeRGBInto.argtypes = [c_void_p, c_size_t, c_void_p, c_size_t, c_int]
        found.WebPDecodeRGBInto.restype = c_void_p
    except (ImportError, OSError, AttributeError):
        return None
    return found


def decode(file: NDArray[np.uint8], buffer: NDArray[np.uint8]) -> bool:
    """Decode a WebP, of an animation the first frame if it covers the canvas, with the interpreter's lock released.

    Args:
        file: (bytes,) the encoded image.
        buffer: (h, w, 3) contiguous memory for RGB. Its content is undefined after a failure.

    Returns:
        Whether the image was decoded; ``False`` also for one of another size than ``buffer``.
    """
    libwebp = library()
    height, width, _ = buffer.shape
    assert libwebp is not None
    data = _Data(file.ctypes.data, file.size)
    frame = _Frame()
    # As PIL does: the decoder gets the chunks of the frame, not what follows them.
    demuxer = libwebp.WebPDemuxInternal(byref(data), 0, None, _DEMUX_ABI)
    try:
        if not demuxer or not libwebp.WebPDemuxGetFrame(demuxer, 1, byref(frame)):
            return False
        if (frame.width, frame.height) != (width, height):
            return False
        chunks = frame.chunks
        return libwebp.WebPDecodeRGBInto(chunks.bytes, chunks.size, buffer.ctypes.data, buffer.size, 3 * width) is not None
    finally:
        libwebp.WebPDemuxReleaseIterator(byref(frame))  # which a null pointer and an empty frame allow
        libwebp.WebPDemuxDelete(demuxer)
