"""Encoded images: the files of a batch in one flat buffer, with their header fields."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.errors import whole_number


class Format(IntEnum):
    """Format of an encoded image. JPEGs are divided by the decoders that accept them."""

    UNREADABLE = 0
    """Cannot be decoded. ``Headers.problems`` has the reason."""
    JPEG = 1
    """Baseline JPEG (SOF0, 8 bits) in one scan. JPEG engines decode it correctly if they support its chroma sampling."""
    OTHER_JPEG = 2
    """Any other JPEG of 8 bits: several scans, arithmetic coding, extended, grey with restart markers, or other colours."""
    OTHER = 3
    """An image of another format, such as PNG, WebP or GIF."""
    LOSSLESS_JPEG = 4
    """Lossless JPEG (SOF3) of 8 bits. Decoders cannot downsample it: simplejpeg ignores the size and writes the whole image."""
    PROGRESSIVE_JPEG = 5
    """Progressive JPEG (SOF2) of 8 bits, Huffman-coded, grey or YCbCr."""
    DEEP = 6
    """PNG or TIFF of 16 bits, or TIFF of more bands than colours and alpha. Decoded with the stored channels only."""


SAMPLE_TYPES = ("uint8", "uint16", "int16")
"""dtypes of pixels. ``HEADER`` stores an index of this tuple."""


HEADER = np.dtype(
    [
        ("start", np.int64),  # first byte in the buffer
        ("length", np.int64),  # bytes
        ("height", np.int32),  # as stored, before the orientation is applied
        ("width", np.int32),
        ("channels", np.uint8),  # components of a JPEG, bands of another image (a palette is one)
        ("stored", np.uint8),  # channels of the image that is decoded as stored: palettes and CMYK become RGB
        ("format", np.uint8),  # a Format
        ("sampling", np.uint8),  # JPEG: 4·h + v of the luma if all chroma is 1x1 (5: 4:4:4 or grey); otherwise 0
        ("orientation", np.uint8),  # EXIF orientation, 1 to 8
        ("type", np.uint8),  # dtype of the pixels, an index of SAMPLE_TYPES
    ]
)
"""Structured NumPy dtype: the header fields of one image."""


class Headers:
    """Header fields of a batch's images, on the host.

    Args:
        table: (B,) records of ``HEADER``.
        names: Path of each image, or an empty string.
        problems: Index of each image that cannot be decoded → the reason.
    """

    __slots__ = ("names", "problems", "table")

    def __init__(self, table: NDArray[np.void], names: Sequence[str], problems: dict[int, str]) -> None:
        self.table, self.names, self.problems = table, names, problems

    def __repr__(self) -> str:
        return f"Headers({len(self.table)} images)"


@dataclass(frozen=True, eq=False, repr=False)
class Encoded:
    """A batch of encoded images: the files, concatenated.

    ``gpuaug.collate_encoded`` returns it; ``gpuaug.DecodeStage`` decodes it to a ``Ragged``. ``len()`` is the number of images.

    Shape:
        - data: (bytes,) uint8, on the host
        - headers: offset and length of each file in ``data``, and the size, format and orientation of its image

    Examples:
        >>> encoded = collate_encoded([b"no image", b""])
        >>> encoded, encoded.headers.problems[1]
        (Encoded(2 images, 8 bytes), 'it is empty')
    """

    data: Tensor
    headers: Headers

    def __len__(self) -> int:
        return len(self.headers.table)

    def __repr__(self) -> str:
        return f"Encoded({len(self)} images, {int(self.headers.table['length'].sum())} bytes)"

    def file(self, index: int) -> NDArray[np.uint8]:
        """Return the bytes of one file. They share the memory of ``data``.

        Args:
            index: Index of the image, from 0.

        Shape:
            - returns: (bytes,) uint8

        Raises:
            ArgumentError, ArgumentTypeError: If no image has this index.
        """
        index = whole_number("index", index, "Count images from 0.", most=len(self) - 1)
        header = self.headers.table[index]
        data: NDArray[np.uint8] = self.data.numpy()
        return data[int(header["start"]) : int(header["start"] + header["length"])]

    def pin_memory(self) -> "Encoded":
        """Copy the batch to page-locked memory. ``DataLoader(pin_memory=True)`` calls it.

        Returns:
            The copy.
        """
        return Encoded(self.data.pin_memory(), self.headers)
