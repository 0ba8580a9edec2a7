"""Header of an image file, and description of a format: signature, parser and decoder."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuaug.core.encoded import Format
from gpuaug.decode.layout import ImageInfo, Layout


class Header(NamedTuple):
    """Metadata parsed from an image file.

    All fields except ``problem`` are the fields of ``gpuaug.core.encoded.HEADER`` after ``start`` and ``length``, in order.
    """

    height: int = 0
    """Height in the file, in pixels."""
    width: int = 0
    """Width in the file, in pixels."""
    channels: int = 0
    """Number of components of a JPEG, or of bands (channels, in the terms of PIL and TIFF) of another image."""
    stored_channels: int = 0
    """Number of channels if decoded with ``channels=None``, where palettes and CMYK become RGB, and pages of a TIFF are bands.

    0 if the pages of a TIFF are not bands of one image.
    """
    format: Format = Format.UNREADABLE
    """Format, on which the choice of the decoder depends."""
    sampling: int = 0
    """JPEG chroma subsampling 4*h + v, where h and v are the horizontal and vertical sampling factors of the luma component.

    5 = 4:4:4 or grey, 9 = 4:2:2, 10 = 4:2:0, 6 = 4:4:0. 0 if a chroma factor is not 1, or not a JPEG.
    """
    orientation: int = 1
    """EXIF orientation, 1 to 8."""
    type: int = 0
    """Type of the pixels, as an index into ``SAMPLE_TYPES``."""
    label_max: int = 0
    """Stored value that PIL decodes to 255: 255 for palettes, 8 and 16 bits, less for grey of few bits; 0 for colours."""
    problem: str = ""
    """Reason why the image cannot be decoded, as a clause; empty if it can be decoded."""


class ImageFormat(NamedTuple):
    """Format of image files."""

    names: tuple[str, ...]
    """Names of the format in PIL. AVIF and HEIF have one signature, and two names."""
    begins: Callable[[bytes], bool]
    """Function that returns whether a file of this format may begin with the bytes, at least 64 or the whole file.

    Bytes in a sample may also be a label, such as the name of a class. The function is false for bytes that a label is likely
    to have.
    """
    parse: Callable[[memoryview], Header]
    """Function that parses the header of a file that begins like the format, and checks the limits.

    It raises ``IndexError`` or ``struct.error`` if the file ends within its header, and ``LimitError`` if it exceeds a limit.
    """
    decode: Callable[[NDArray[np.uint8], Layout, ImageInfo, NDArray[np.uint8]], NDArray[Any] | str | None] | None = None
    """``None`` if PIL decodes all files of the format. Otherwise a function of (file, layout of the batch, header fields,
    buffer) that decodes an image with another library.

    It returns pixels (h, w, C) in the orientation of the file, downsampled by the scale of the image, in ``buffer`` or another
    array; the reason why the file cannot be decoded; or ``None`` if PIL must decode the file. Pixels must equal PIL's, bit for
    bit, and a file that PIL rejects must be left to PIL.
    """


MAX_SIDE = 2**31 - 1
"""Maximum length of a side in pixels: the maximum that ``gpuaug.core.encoded.HEADER`` can store."""
