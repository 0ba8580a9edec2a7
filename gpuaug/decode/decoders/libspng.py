"""PNGs for libspng: whether libspng decodes a file to PIL's pixels, and bindings of the functions in the module imagecodecs.

imagecodecs links libspng statically. Its module for PNGs exports libspng's functions on Linux.
"""

import ctypes
import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

from numpy.typing import NDArray

from gpuaug.decode.c_calls import load_library

_COLOUR_TYPES = (0, 2, 6)
"""Colour types of PNGs that libspng decodes: grey, RGB and RGBA. Palettes are as fast in PIL; grey with alpha fails."""

DEPTH, COLOUR_TYPE = 24, 25
"""Offsets of the number of bits per channel and of the colour type in a file, in bytes."""

MAX_BYTES = 2**26
"""Maximum size in bytes of a PNG for libspng. PIL limits the text in a PNG, and a larger file may exceed this limit."""

NAMES = ("spng_ctx_new", "spng_ctx_free", "spng_set_png_buffer", "spng_get_ihdr", "spng_decode_image")
"""Names of the functions that ``loops`` calls."""

_FIRST_BYTES = 33
"""Number of bytes before the first optional chunk: the signature and the chunk IHDR."""

_END, _PIXELS, _FRAME, _EXIF, _TIME, _TEXT, _COMPRESSED_TEXT, _UNICODE_TEXT = (
    int.from_bytes(chunk_type, "big") for chunk_type in (b"IEND", b"IDAT", b"fcTL", b"eXIf", b"tIME", b"tEXt", b"zTXt", b"iTXt")
)
"""Types of chunks as big-endian integers."""


def fits(file: Sequence[int] | NDArray[Any]) -> bool:
    """Return whether libspng and PIL decode a PNG to the same pixels, and PIL accepts the file if libspng does.

    PIL has accepted the chunks before the pixels when it read the header. libspng ignores the chunks after the pixels, so these
    must be of types that PIL never rejects.

    Numba compiles this function, which therefore reads the bytes one by one.

    Args:
        file: (bytes,) file that begins with the signature of PNGs.
    """
    size = len(file)
    if size < _FIRST_BYTES or size > MAX_BYTES or file[COLOUR_TYPE] not in _COLOUR_TYPES:
        return False
    position = 8
    after_pixels = False
    rejects_text = False
    while position + 8 <= size:
        length = 0
        chunk_type = 0
        for offset in range(position, position + 4):
            length = length << 8 | int(file[offset])
            chunk_type = chunk_type << 8 | int(file[offset + 4])
        position += 12 + length
        if chunk_type == _END:
            return True
        if chunk_type in (_COMPRESSED_TEXT, _UNICODE_TEXT):  # PIL limits the total text: after this it may reject more text
            rejects_text = True
        if chunk_type == _FRAME:  # an animation, whose first frame may cover a part of the image only
            return False
        accepted = chunk_type in (_PIXELS, _EXIF, _TIME) or (chunk_type == _TEXT and not rejects_text)
        if after_pixels and not accepted:
            return False
        after_pixels = after_pixels or chunk_type == _PIXELS
    return False  # the file ends before the chunk IEND


@cache
def library() -> ctypes.CDLL | None:
    """Return libspng; ``None`` if imagecodecs is not installed, or its module does not export libspng's functions."""
    try:
        module = importlib.import_module("imagecodecs._spng")
    except ImportError:
        return None
    return load_library([str(module.__file__)], NAMES)
