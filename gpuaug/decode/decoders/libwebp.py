"""Functions of libwebp, in the library file that PIL has loaded. Not in ``loops.py``, because each C library has its own file.

PIL itself decodes a WebP into four channels, and copies the pixels three times, in part with the interpreter's lock held.
"""

import ctypes
from functools import cache

from gpuaug.decode.c_calls import library_of_module

DEMUX_ABI = 0x0107
"""``WEBP_DEMUX_ABI_VERSION``: version of the structures ``WebPData`` and ``WebPIterator``.

libwebp rejects a version whose upper byte differs from its own.
"""

NAMES = (
    *("WebPDemuxInternal", "WebPDemuxGetFrame", "WebPDemuxReleaseIterator", "WebPDemuxDelete"),  # take microseconds
    "WebPDecodeRGBInto",
)
"""Names of the functions that ``decoders/loops.py`` calls."""


@cache
def library() -> ctypes.CDLL | None:
    """Return libwebp, or ``None`` if PIL has no libwebp, or has linked it statically, as on Windows.

    Pixels equal PIL's for every version of libwebp, because PIL uses the same library file.
    """
    return library_of_module("PIL._webp", NAMES)
