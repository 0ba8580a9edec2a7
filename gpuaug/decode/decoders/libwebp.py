"""Functions of libwebp, in the library file that PIL loads. Apart from ``loops.py``, because each C library has its own file.

The functions are called without PIL, because PIL decodes a WebP into four channels, and copies the pixels three times, in part
with the interpreter's lock held.
"""

import ctypes
from functools import cache

from gpuaug.decode.c_calls import library_of_module

DEMUX_ABI = 0x0107
"""``WEBP_DEMUX_ABI_VERSION``: version of the structures ``WebPData`` and ``WebPIterator``.

libwebp rejects a version whose major part, the upper byte, differs from its own.
"""

NAMES = (
    *("WebPDemuxInternal", "WebPDemuxGetFrame", "WebPDemuxReleaseIterator", "WebPDemuxDelete"),  # these take microseconds
    "WebPDecodeRGBInto",
)
"""Names of the functions that ``decoders/loops.py`` calls."""


@cache
def library() -> ctypes.CDLL | None:
    """Return the library file with libwebp; ``None`` if PIL has no libwebp, or has linked it statically, as on Windows.

    Pixels equal PIL's for every version of libwebp, because PIL uses the same library file.
    """
    return library_of_module("PIL._webp", NAMES)
