"""Parser of the tags of TIFFs, for files that PIL does not decode as stored, such as 16 bits per band and many bands."""

import struct
from typing import Any, NamedTuple

WIDTH, HEIGHT, BITS, PHOTOMETRIC, ORIENTATION, SAMPLES, PLANAR, SAMPLE_FORMAT = 256, 257, 258, 262, 274, 277, 284, 339
"""Numbers of tags."""

_TAGS_READ = frozenset([WIDTH, HEIGHT, BITS, PHOTOMETRIC, ORIENTATION, SAMPLES, PLANAR, SAMPLE_FORMAT])

_MAX_TAGS = 4096
"""Maximum number of tags read per page. Files written by GDAL have about twenty."""

_MAX_VALUES = 255
"""Maximum number of values read per tag: one per band."""

_STRUCT_FORMATS = {1: "B", 3: "H", 4: "I", 16: "Q"}
"""``struct`` format of each integer type: 8, 16, 32 and 64 bits."""

_PLAIN_PHOTOMETRICS = frozenset([1, 2])
"""Photometric interpretations whose stored values need no conversion: grey with black as 0, and RGB."""

_TYPES = {(8, 1): "uint8", (8, 2): "int8", (16, 1): "uint16", (16, 2): "int16"}
"""(bits, sample format) of a band → dtype. Sample format 1 is unsigned, 2 is signed."""


class Tags(NamedTuple):
    """Tags of the first page of a TIFF that affect decoding."""

    height: int
    width: int
    samples: int
    """Number of bands."""
    bits: int
    """Number of bits of the band with the most bits."""
    orientation: int
    """EXIF orientation, 1 to 8."""
    type: str
    """dtype of the bands; empty for other types than int8, uint8, int16 and uint16."""
    is_plain: bool
    """Whether the values in the file need no conversion: RGB, or grey with black as 0."""
    is_planar: bool
    """Whether bands are stored one after the other, not interleaved."""


def is_tiff(prefix: bytes) -> bool:
    """Return whether a file begins with the signature of a TIFF or BigTIFF."""
    return prefix[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def tags(data: memoryview) -> Tags | None:
    """Read the tags of the first page. Return ``None`` if they cannot be read, or lack the width or height.

    Args:
        data: (bytes,) content of the file.
    """
    try:
        values = _first_page(data)
        height, width = (values[tag][0] for tag in (HEIGHT, WIDTH))
    except (struct.error, IndexError, KeyError, OverflowError):
        return None
    samples = values.get(SAMPLES, (1,))[0]
    bits = values.get(BITS, (1,))
    formats = values.get(SAMPLE_FORMAT, (1,))
    types = set(zip(bits, formats * len(bits) if len(formats) == 1 else formats, strict=False))
    orientation = values.get(ORIENTATION, (1,))[0]
    return Tags(
        height,
        width,
        samples,
        max(bits),
        orientation if orientation in range(1, 9) else 1,
        _TYPES.get(types.pop(), "") if len(types) == 1 else "",
        values.get(PHOTOMETRIC, (1,))[0] in _PLAIN_PHOTOMETRICS,
        samples > 1 and values.get(PLANAR, (1,))[0] == 2,
    )


def _first_page(data: memoryview) -> dict[int, tuple[Any, ...]]:
    """Return tag number → values, for the tags of the first page.

    Raises:
        struct.error, IndexError, OverflowError: If the file ends before the values.
    """
    order = "<" if data[0] == ord("I") else ">"
    is_bigtiff = bytes(data[:4])[2 if order == "<" else 3] == 43
    directory = struct.unpack_from(order + ("Q" if is_bigtiff else "I"), data, 8 if is_bigtiff else 4)[0]
    count = struct.unpack_from(order + ("Q" if is_bigtiff else "H"), data, directory)[0]
    entry_size, inline_bytes = (20, 8) if is_bigtiff else (12, 4)  # longer values are elsewhere, and the entry has their offset
    directory += 8 if is_bigtiff else 2
    values_of: dict[int, tuple[Any, ...]] = {}
    for index in range(min(count, _MAX_TAGS)):
        start = directory + index * entry_size
        tag, type_ = struct.unpack_from(order + "HH", data, start)
        if tag not in _TAGS_READ or type_ not in _STRUCT_FORMATS:
            continue
        value_count = struct.unpack_from(order + ("Q" if is_bigtiff else "I"), data, start + 4)[0]
        if not value_count:
            continue
        struct_format = f"{min(value_count, _MAX_VALUES)}{_STRUCT_FORMATS[type_]}"
        value_start = start + entry_size - inline_bytes
        if struct.calcsize(order + f"{value_count}{_STRUCT_FORMATS[type_]}") > inline_bytes:
            value_start = struct.unpack_from(order + ("Q" if is_bigtiff else "I"), data, value_start)[0]
        values_of[tag] = struct.unpack_from(order + struct_format, data, value_start)
    return values_of
