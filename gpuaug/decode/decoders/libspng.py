"""Functions of libspng, a decoder of PNGs. imagecodecs links it statically; on Linux, its module ``_spng`` exports them."""

import ctypes
from functools import cache

from gpuaug.decode.c_calls import library_of_module

NAMES = ("spng_ctx_new", "spng_ctx_free", "spng_set_png_buffer", "spng_get_ihdr", "spng_decode_image")
"""Names of the functions that ``decoders/loops.py`` calls."""


@cache
def library() -> ctypes.CDLL | None:
    """Return the library file with libspng.

    ``None`` if imagecodecs is not installed, or its module does not export libspng's functions.
    """
    return library_of_module("imagecodecs._spng", NAMES)
