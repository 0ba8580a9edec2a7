"""Regions of JPEGs, by a libturbojpeg of libjpeg-turbo 3 or later, through its C interface.

simplejpeg and PIL decode whole images only. Apart from ``cpu.py``, because one file alone speaks to each C library.
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

_DECOMPRESS = 1
"""``TJINIT_DECOMPRESS``."""

_SUBSAMPLING, _WIDTH, _HEIGHT, _PROGRESSIVE = 4, 5, 6, 12
"""Parameters of the enumeration ``TJPARAM``."""

_PIXEL_FORMATS = {1: 6, 3: 0}
"""``TJPF_GRAY`` and ``TJPF_RGB``, by number of channels."""

_MCU_WIDTHS = (8, 16, 16, 8, 8, 32, 8)
"""``tjMCUWidth`` of 4:4:4, 4:2:2, 4:2:0, grey, 4:4:0, 4:1:1 and 4:4:1, by ``TJSAMP``. A region begins at a multiple of it."""

_MARGIN = 2
"""Columns decoded on either side of a window whose chroma is interpolated: one sample of chroma at half the width of luma.

The first and the last sample of a region are interpolated without their neighbour, and a region that is one sample wide is not
interpolated at all. Rows need no margin: libjpeg decodes the neighbours of skipped rows.
"""

_FILES = ("turbojpeg.libs/libturbojpeg*.so*", "turbojpeg.dylibs/libturbojpeg*.dylib", "turbojpeg-*.dll")
"""The library in the wheel ``turbojpeg`` on Linux, macOS and Windows, beside the module."""

_CONDA_FILES = ("lib/libturbojpeg.so.0", "lib/libturbojpeg.dylib", "Library/bin/turbojpeg.dll")
"""The library in an environment of conda."""

_KEPT_BYTES = 2**25
"""Largest scratch that a thread keeps for its next window.

A window of 5 megapixels of 12 takes 25 ms, and 33 in fresh memory (2026-11-26).
"""

_kept = threading.local()

_VERSION = re.compile(rb"libjpeg-turbo version ([0-9.]+)")

_NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]").search
"""Marker that ends the coded data of a scan, as restart markers and stuffed bytes do not."""


class _Region(ctypes.Structure):
    """``tjregion``."""

    _fields_ = (("x", c_int), ("y", c_int), ("w", c_int), ("h", c_int))


class _Scale(ctypes.Structure):
    """``tjscalingfactor``."""

    _fields_ = (("num", c_int), ("denom", c_int))


class Library(NamedTuple):
    """The functions of a library."""

    quick: ctypes.PyDLL
    """Keeps the interpreter's lock, for calls that take less time than to take the lock again beside other threads."""
    decompress: Callable[..., int]
    """``tj3Decompress8``, with the lock released."""


@cache
def library() -> Library | None:
    """The functions of the first library found that decodes regions, or ``None``.

    Searched in this order: the environment of conda and the system, whose libraries are kept up to date, and the wheel
    ``turbojpeg``, whose module, which decodes no regions, is not imported.
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
    """Files that may be the library, the preferred one first."""
    for name in _CONDA_FILES:
        yield str(Path(sys.prefix, name))
    system = ctypes.util.find_library("turbojpeg")
    if system is not None:
        yield system
    with suppress(ValueError):  # of a module that is loaded and has no specification
        spec = find_spec("turbojpeg")
        if spec is not None and spec.origin is not None:
            for name in _FILES:
                yield from map(str, Path(spec.origin).parent.glob(name))


@cache
def version() -> str:
    """Name and version of the library, which no function of its interface returns: a text in its file, or the file's name."""
    found = library()
    assert found is not None
    path = Path(found.quick._name)
    with suppress(OSError):  # of the system's library, which has no path
        if match := _VERSION.search(path.read_bytes()):
            return f"libjpeg-turbo {match[1].decode()}"
    return path.name


def regions(windows: NDArray[np.int64], table: NDArray[np.void], scales: NDArray[np.int64]) -> NDArray[np.int64]:
    """Regions that libjpeg decodes: windows with a margin, extended to whole columns of blocks.

    Args:
        windows: (n, 4) top, left, height and width.
        table: (n,) records of ``HEADER`` with a sampling.
        scales: (n,) downsampling factors.
    """
    top, left, height, width = windows.T
    mcu_widths = np.where(table["channels"] == 1, 8, (table["sampling"].astype(np.int64) - 1) // 4 * 8)
    margins = np.where(mcu_widths > 8, _MARGIN, 0)
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
    inner: tuple[int, int] | None = None,
) -> bool:
    """Decode a window of a JPEG, with the interpreter's lock released.

    Pixels equal those of the whole image as decoded by libjpeg-turbo, bit for bit. A file that causes a warning is refused, so
    that the caller's decoder of whole images decides. What libjpeg does not read causes no warning: in a JPEG of one scan, the
    rows below the window. A file that is damaged or cut off there gives its pixels, although a decoder of whole images may
    refuse it. Pixels are a function of file, decoder and window, and so is whether there are any.

    Args:
        file: (bytes,) the encoded image.
        buffer: (h, w, C) contiguous memory of the window's size, for RGB or for the luma. Its content is undefined after a
            failure. Nothing is written outside.
        window: (top, left, height, width) in pixels of the downsampled image, in the orientation of the file.
        full: (height, width) of the image in its header, before downsampling.
        scale: Downsampling factor 1, 2, 4 or 8. Sides are rounded up.
        inner: First column and number of columns of ``buffer`` that are wanted. Left out: all. The content of other columns is
            undefined.

    Returns:
        Whether the window was decoded; ``False`` also for an image of another size than ``full``, a window beyond the image,
        CMYK, more than 8 bits, a lossless JPEG, a subsampling that TurboJPEG does not name, and a progressive JPEG without all
        of its scans.

    Cost:
        Huffman decoding of all rows down to the end of the window, or of the whole image if it has several scans. All other
        work is for the window alone, widened to columns that are decoded together. A copy if ``buffer`` is not of that width.
    """
    found = library()
    assert found is not None
    turbojpeg = found.quick
    top, left, height, width = window
    full_height, full_width = full
    columns = -(-full_width // scale)
    first, wanted = (0, width) if inner is None else inner
    address = _address(file)
    if left + width > columns:
        return False
    # A new one for each file (1 µs), because it keeps the tables of a file for the next one, which may lack some.
    handle = turbojpeg.tj3Init(_DECOMPRESS)
    try:
        if turbojpeg.tj3DecompressHeader(handle, address, file.size):  # each call fails if there is a warning
            return False
        get = turbojpeg.tj3Get
        subsampling = get(handle, _SUBSAMPLING)
        if (
            (get(handle, _HEIGHT), get(handle, _WIDTH)) != (full_height, full_width)
            or not 0 <= subsampling < len(_MCU_WIDTHS)
            or (get(handle, _PROGRESSIVE) and not _is_complete(file))
        ):
            return False
        mcu_width = _MCU_WIDTHS[subsampling]
        margin = _MARGIN if mcu_width > 8 else 0
        multiple = max(mcu_width // scale, 1)
        start = max(left + first - margin, 0) // multiple * multiple
        end = min(left + first + wanted + margin, columns)
        # A region is set for whole images, too: a lossless JPEG, which is decoded without regard to the scale, is refused here.
        region = _Region(start, top, end - start, height)
        if (scale > 1 and turbojpeg.tj3SetScalingFactor(handle, _Scale(1, scale))) or turbojpeg.tj3SetCroppingRegion(
            handle, region
        ):
            return False
        shape = (height, end - start, buffer.shape[2])
        made = buffer if start == left and buffer.shape == shape else _scratch(shape)
        row_bytes = shape[1] * shape[2]
        format_ = _PIXEL_FORMATS[shape[2]]  # refused for CMYK; 12 bits are refused always
        if found.decompress(handle, address, file.size, _address(made), row_bytes, format_):
            return False
        if made is not buffer:
            at = left + first - start
            buffer[:, first : first + wanted] = made[:, at : at + wanted]
        return True
    finally:
        turbojpeg.tj3Destroy(handle)


def _address(array: NDArray[np.uint8]) -> int:
    """Address of an array's first element, in a third of the time that ``ctypes.data`` takes."""
    address: int = array.__array_interface__["data"][0]
    return address


def _scratch(shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Memory that is this thread's own until the next call."""
    size = shape[0] * shape[1] * shape[2]
    memory: NDArray[np.uint8] | None = getattr(_kept, "memory", None)
    if memory is None or memory.size < size:
        memory = np.empty(size, np.uint8)
        if size <= _KEPT_BYTES:
            _kept.memory = memory
    return memory[:size].reshape(shape)


def _is_complete(file: NDArray[np.uint8]) -> bool:
    """Whether the scans of a progressive JPEG have all bits of all coefficients.

    libjpeg smooths the blocks of other files across the borders of a region, and differently from version to version.
    """
    data = file.data
    missing: dict[int, bytearray] = {}  # by component, for each coefficient the number of bits, 255 before the first scan
    at = 2
    try:
        while match := _NEXT_MARKER(data, at):
            at = match.end()
            marker = data[at - 1]
            if marker == 0xD9:  # the end of the image
                break
            if marker == 0xDA:  # a scan
                end = at + 3 + 2 * data[at + 2]
                first = data[end]
                last = data[end + 1]
                bits = data[end + 2] & 15
                for component in data[at + 3 : end : 2]:
                    of_component = missing.setdefault(component, bytearray(b"\xff" * 64))
                    of_component[first : last + 1] = bytes([bits]) * (last + 1 - first)
            at += data[at] << 8 | data[at + 1]
    except IndexError:  # the file ends
        return False
    return not any(map(any, missing.values()))
