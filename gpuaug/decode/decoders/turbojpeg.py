"""Bindings of libturbojpeg (libjpeg-turbo 3 or later) that decode regions of JPEGs.

A *window* is the part of an image that is needed. A *region* is the rectangle that libturbojpeg decodes for a window: it begins
at whole blocks of pixels. simplejpeg and PIL decode only whole images.
"""

import ctypes
import ctypes.util
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from ctypes import c_int, c_size_t, c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuaug.decode.headers import scans
from gpuaug.decode.limits import LimitError

DECOMPRESS = 1
"""``TJINIT_DECOMPRESS``."""

SUBSAMPLING, WIDTH, HEIGHT, PROGRESSIVE = 4, 5, 6, 12
"""Numbers of the enumeration ``TJPARAM``: values to read with ``tj3Get``."""

PIXEL_FORMATS = {1: 6, 3: 0}
"""``TJPF_GRAY`` and ``TJPF_RGB``, by number of channels."""

MCU_WIDTHS = (8, 16, 16, 8, 8, 32, 8)
"""``tjMCUWidth``: width of a block in pixels, for 4:4:4, 4:2:2, 4:2:0, grey, 4:4:0, 4:1:1 and 4:4:1, by ``TJSAMP``.

A region must begin at a multiple of this width.
"""

MARGIN = 2
"""Number of extra columns on each side of a window if chroma is interpolated: one chroma sample where chroma has half the
width.

libjpeg interpolates the first and last chroma samples of a region without their outer neighbours, and a region of one sample
not at all. Rows need no margin, because libjpeg decodes the rows above and below a region for the interpolation.
"""

_FILES = ("turbojpeg.libs/libturbojpeg*.so*", "turbojpeg.dylibs/libturbojpeg*.dylib", "turbojpeg-*.dll")
"""Paths of the library in the wheel ``turbojpeg`` on Linux, macOS and Windows, relative to the module's folder."""

_CONDA_FILES = ("lib/libturbojpeg.so.0", "lib/libturbojpeg.dylib", "Library/bin/turbojpeg.dll")
"""Paths of the library in a conda environment."""

_MAX_REUSED_BYTES = 2**25
"""Maximum size in bytes of the scratch buffer that a thread reuses for its next window.

A window of 5 megapixels of a 12-megapixel JPEG takes 25 ms with a reused buffer, and 33 ms with a new one (2026-11-26).
"""

_thread_buffer = threading.local()

_VERSION = re.compile(rb"libjpeg-turbo version ([0-9.]+)")


class _Region(ctypes.Structure):
    """``tjregion``."""

    _fields_ = (("x", c_int), ("y", c_int), ("w", c_int), ("h", c_int))


class _Scale(ctypes.Structure):
    """``tjscalingfactor``."""

    _fields_ = (("num", c_int), ("denom", c_int))


class Library(NamedTuple):
    """Functions of libturbojpeg."""

    quick: ctypes.PyDLL
    """Functions that are called with the interpreter's lock held, because they take less time than acquiring the lock again."""
    decompress: Callable[..., int]
    """``tj3Decompress8``, called with the lock released."""


@cache
def library() -> Library | None:
    """Return the functions of the first installed library that decodes regions, or ``None``.

    The search order is the conda environment, the system, and the wheel ``turbojpeg``, because conda and the system receive
    updates of the library. The Python module of the wheel is not imported, because it has no function for regions.
    """
    for path in _paths():
        try:
            quick = ctypes.PyDLL(path)
            quick.tj3Init.argtypes = [c_int]
            quick.tj3Init.restype = c_void_p
            quick.tj3Destroy.argtypes = [c_void_p]
            quick.tj3Destroy.restype = None
            quick.tj3Get.argtypes = [c_void_p, c_int]
            quick.tj3DecompressHeader.argtypes = [c_void_p, c_void_p, c_size_t]
            quick.tj3SetScalingFactor.argtypes = [c_void_p, _Scale]
            quick.tj3SetCroppingRegion.argtypes = [c_void_p, _Region]
            decompress = ctypes.CDLL(path).tj3Decompress8
            decompress.argtypes = [c_void_p, c_void_p, c_size_t, c_void_p, c_int, c_int]
        except (OSError, AttributeError):  # AttributeError: libjpeg-turbo 2 has none of these functions
            continue
        return Library(quick, decompress)
    return None


def _paths() -> Iterator[str]:
    """Yield candidate paths of the library, in order of preference."""
    for name in _CONDA_FILES:
        yield str(Path(sys.prefix, name))
    system = _system_name()
    if system is not None:
        yield system
    with suppress(ValueError):  # raised for a loaded module without a specification
        spec = find_spec("turbojpeg")
        if spec is not None and spec.origin is not None:
            for name in _FILES:
                yield from map(str, Path(spec.origin).parent.glob(name))


def _system_name() -> str | None:
    """Return the name of the system's library, which may be missing."""
    # On Linux, find_library writes a temporary file and runs a compiler if the library is missing.
    return "libturbojpeg.so.0" if sys.platform == "linux" else ctypes.util.find_library("turbojpeg")


@cache
def version() -> str:
    """Return name and version of the library; if the version cannot be read, the name of the library's file.

    The version is text in the file, because the library has no function that returns it.
    """
    functions = library()
    assert functions is not None
    path = Path(functions.quick._name)
    with suppress(OSError):  # raised for the system's library, which has no path
        if match := _VERSION.search(path.read_bytes()):
            return f"libjpeg-turbo {match[1].decode()}"
    return path.name


def regions(windows: NDArray[np.int64], table: NDArray[np.void], scales: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return (n, 4) regions that libjpeg decodes for windows: with a margin, extended to whole columns of blocks.

    Args:
        windows: (n, 4) top, left, height and width.
        table: (n,) records of ``HEADER`` with a nonzero ``sampling``.
        scales: (n,) downsampling factors.
    """
    top, left, height, width = windows.T
    mcu_widths = np.where(table["channels"] == 1, 8, (table["sampling"].astype(np.int64) - 1) // 4 * 8)
    margins = np.where(mcu_widths > 8, MARGIN, 0)
    multiples = np.maximum(mcu_widths // scales, 1)
    starts = np.maximum(left - margins, 0) // multiples * multiples
    ends = np.minimum(left + width + margins, -(-table["width"].astype(np.int64) // scales))
    return np.column_stack([top, starts, height, ends - starts])


def decode(
    file: NDArray[np.uint8],
    buffer: NDArray[np.uint8],
    window: tuple[int, int, int, int],
    full: tuple[int, int],
    scale: int,
    needed_columns: tuple[int, int] | None = None,
) -> bool:
    """Decode a window of a JPEG, with the interpreter's lock released.

    The pixels equal those that libjpeg-turbo decodes of the whole image, bit for bit. A file that causes a warning is rejected,
    so that the caller decodes the whole image. In a JPEG of one scan, libjpeg does not read the rows below the window: a file
    that is damaged or truncated there is decoded without a warning, although a decoder of whole images may reject it.

    Args:
        file: (bytes,) encoded image.
        buffer: (h, w, C) contiguous output of the size of the window, for RGB or luma. Its content is undefined after a
            failure.
        window: (top, left, height, width) in pixels of the downsampled image, in the orientation of the file.
        full: (height, width) of the image according to the caller's header, before downsampling.
        scale: Downsampling factor 1, 2, 4 or 8. Sides are rounded up.
        needed_columns: (first column, number of columns) of ``buffer`` that the caller needs. The content of other columns is
            undefined. Default: all columns.

    Returns:
        Whether the window was decoded. ``False`` also for an image whose size is not ``full``, a window outside the image,
        CMYK, more than 8 bits, a lossless JPEG, a subsampling without a name in TurboJPEG, and an incomplete progressive JPEG.

    Cost:
        Huffman decoding of all rows down to the end of the window, or of the whole image if it has several scans. All other
        work is limited to the region of the window (see ``regions``). One copy if ``buffer`` does not have the region's width.
    """
    functions = library()
    assert functions is not None
    turbojpeg = functions.quick
    top, left, height, width = window
    full_height, full_width = full
    columns = -(-full_width // scale)
    needed_start, needed_width = (0, width) if needed_columns is None else needed_columns
    address = _address(file)
    if left + width > columns:
        return False
    # A new handle per file (1 µs): a handle keeps the tables of its last file, and would use them for a file without tables.
    handle = turbojpeg.tj3Init(DECOMPRESS)
    try:
        if turbojpeg.tj3DecompressHeader(handle, address, file.size):  # this and later calls also fail for a warning
            return False
        get_parameter = turbojpeg.tj3Get
        subsampling = get_parameter(handle, SUBSAMPLING)
        if (
            (get_parameter(handle, HEIGHT), get_parameter(handle, WIDTH)) != (full_height, full_width)
            or not 0 <= subsampling < len(MCU_WIDTHS)
            or (get_parameter(handle, PROGRESSIVE) and not _is_complete(file))
        ):
            return False
        mcu_width = MCU_WIDTHS[subsampling]
        margin = MARGIN if mcu_width > 8 else 0
        multiple = max(mcu_width // scale, 1)
        start = max(left + needed_start - margin, 0) // multiple * multiple
        end = min(left + needed_start + needed_width + margin, columns)
        # Set a region even for a whole image: the call fails for a lossless JPEG, which would be decoded without downsampling.
        region = _Region(start, top, end - start, height)
        if (scale > 1 and turbojpeg.tj3SetScalingFactor(handle, _Scale(1, scale))) or turbojpeg.tj3SetCroppingRegion(
            handle, region
        ):
            return False
        shape = (height, end - start, buffer.shape[2])
        pixels = buffer if start == left and buffer.shape == shape else _scratch(shape)
        row_bytes = shape[1] * shape[2]
        format_ = PIXEL_FORMATS[shape[2]]
        # Fails for CMYK, which is not converted to RGB or grey, and for 12 bits.
        if functions.decompress(handle, address, file.size, _address(pixels), row_bytes, format_):
            return False
        if pixels is not buffer:
            offset = left + needed_start - start
            buffer[:, needed_start : needed_start + needed_width] = pixels[:, offset : offset + needed_width]
        return True
    finally:
        turbojpeg.tj3Destroy(handle)


def _address(array: NDArray[np.uint8]) -> int:
    """Return the address of the first element of an array, three times as fast as ``ctypes.data``."""
    address: int = array.__array_interface__["data"][0]
    return address


def _scratch(shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return an uninitialised buffer of the current thread, valid until the thread's next call."""
    size = shape[0] * shape[1] * shape[2]
    memory: NDArray[np.uint8] | None = getattr(_thread_buffer, "memory", None)
    if memory is None or memory.size < size:
        memory = np.empty(size, np.uint8)
        if size <= _MAX_REUSED_BYTES:
            _thread_buffer.memory = memory
    return memory[:size].reshape(shape)


def _is_complete(file: NDArray[np.uint8]) -> bool:
    """Return whether the scans of a progressive JPEG have all bits of all coefficients.

    In an incomplete file, libjpeg smooths the borders between blocks, with a result that depends on the region and on libjpeg's
    version.
    """
    data = file.data
    missing: dict[int, bytearray] = {}  # component → number of missing bits per coefficient; 255 before its first scan
    try:
        for position in scans(data):
            end = position + 3 + 2 * data[position + 2]
            first = data[end]
            last = data[end + 1]
            bits = data[end + 2] & 15
            for component in data[position + 3 : end : 2]:
                missing_bits = missing.setdefault(component, bytearray(b"\xff" * 64))
                missing_bits[first : last + 1] = bytes([bits]) * (last + 1 - first)
    except (IndexError, LimitError):  # the file ends, or has too many segments
        return False
    return not any(map(any, missing.values()))
