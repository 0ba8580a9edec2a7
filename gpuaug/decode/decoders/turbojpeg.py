"""Functions of libturbojpeg (libjpeg-turbo 3 or later) that decode regions of JPEGs. simplejpeg and PIL decode whole images.

A *window* is the part of an image that is needed. A *region* is the rectangle that libturbojpeg decodes for a window: its left
edge is at the edge of a block of pixels (an MCU, the smallest unit of a JPEG that is decoded).
"""

import ctypes
import ctypes.util
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.decode.c_calls import load_library

DECOMPRESS = 1
"""``TJINIT_DECOMPRESS``."""

SUBSAMPLING, WIDTH, HEIGHT, PROGRESSIVE = 4, 5, 6, 12
"""Numbers of parameters (``TJPARAM_SUBSAMP``, ``TJPARAM_JPEGWIDTH``, …) that ``tj3Get`` returns for an opened file."""

PIXEL_FORMATS = {1: 6, 3: 0}
"""Number of channels → pixel format: ``TJPF_GRAY`` or ``TJPF_RGB``."""

MCU_WIDTHS = (8, 16, 16, 8, 8, 32, 8)
"""``tjMCUWidth``: width of a block in pixels, by ``TJSAMP``: 4:4:4, 4:2:2, 4:2:0, grey, 4:4:0, 4:1:1, 4:4:1.

A region must begin at a multiple of this width.
"""

MARGIN = 2
"""Number of extra columns on each side of a window if chroma is interpolated.

Two columns are one chroma sample if chroma has half the width. libjpeg interpolates the first and last chroma samples of a
region without their outer neighbours, and a region of one sample not at all. Rows need no margin, because libjpeg decodes the
rows above and below a region for the interpolation.
"""

_FILES = ("turbojpeg.libs/libturbojpeg*.so*", "turbojpeg.dylibs/libturbojpeg*.dylib")
"""Paths of the library in the wheel ``turbojpeg`` on Linux and macOS, relative to the module's folder."""

_CONDA_FILES = ("lib/libturbojpeg.so.0", "lib/libturbojpeg.dylib")
"""Paths of the library in a conda environment."""

_VERSION = re.compile(rb"libjpeg-turbo version ([0-9.]+)")
"""Text with the version, in the library file."""

NAMES = (
    *("tj3Init", "tj3Destroy", "tj3DecompressHeader", "tj3Get", "tj3SetScalingFactor", "tj3SetCroppingRegion"),
    "tj3Decompress8",
)
"""Names of the library's functions that ``decoders/loops.py`` calls. libjpeg-turbo 2 has none of these functions."""


@cache
def library() -> ctypes.CDLL | None:
    """Return the first installed libturbojpeg that decodes regions, or ``None``.

    The search order is the conda environment, the system, and the wheel ``turbojpeg``, because conda and the system receive
    updates of the library. The Python module of the wheel is not imported, because it has no function for regions.
    """
    return load_library(_paths(), NAMES)


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
    path = Path(getattr(library(), "_name", ""))
    with suppress(OSError):  # raised for a library that was loaded by its name, without a path
        if match := _VERSION.search(path.read_bytes()):
            return f"libjpeg-turbo {match[1].decode()}"
    return path.name


def regions(windows: NDArray[np.int64], table: NDArray[np.void], scales: NDArray[Any]) -> NDArray[np.int64]:
    """Return the (n, 4) regions to decode for windows: with margins, and extended to the left to the edge of a block.

    Args:
        windows: (n, 4) top, left, height and width, in pixels of the downsampled images.
        table: (n,) records of ``HEADER``. ``sampling`` must not be 0.
        scales: (n,) downsampling factors.
    """
    top, left, height, width = windows.T
    # A block is 8·h pixels wide. ``sampling`` is 4·h + v, with the sampling factors h and v of luma.
    mcu_widths = np.where(table["channels"] == 1, 8, (table["sampling"].astype(np.int64) - 1) // 4 * 8)
    margins = np.where(mcu_widths > 8, MARGIN, 0)  # wider blocks have fewer chroma columns, which are interpolated
    block_widths = np.maximum(mcu_widths // scales, 1)  # in pixels of the downsampled images
    starts = np.maximum(left - margins, 0) // block_widths * block_widths
    ends = np.minimum(left + width + margins, -(-table["width"].astype(np.int64) // scales))  # at most the image's width
    return np.column_stack([top, starts, height, ends - starts])
