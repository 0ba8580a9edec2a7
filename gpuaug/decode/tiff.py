"""TIFFs that PIL does not decode: of 16 bits, or of more bands than colours and alpha. Their tags say what they hold."""

import struct
from typing import Any, NamedTuple

WIDTH, HEIGHT, BITS, PHOTOMETRIC, ORIENTATION, SAMPLES, SAMPLE_FORMAT = 256, 257, 258, 262, 274, 277, 339

_TAKEN = frozenset([WIDTH, HEIGHT, BITS, PHOTOMETRIC, ORIENTATION, SAMPLES, SAMPLE_FORMAT])

_MOST_ENTRIES = 4096
"""Most tags of a page that are looked at. Files of GDAL have about twenty."""

_MOST_VALUES = 255
"""Most values of a tag that are read: one for each band."""

_NUMBERS = {1: "B", 3: "H", 4: "I", 16: "Q"}
"""``struct`` formats of the types of whole numbers: bytes, and of 16, 32 and 64 bits."""

_PHOTOMETRICS = frozenset([1, 2])
"""Interpretations whose stored values are those of the image: grey where black is 0, and RGB."""

_TYPES = {(8, 1): "uint8", (16, 1): "uint16", (16, 2): "int16"}
"""Type of a band by its bits and its sample format: 1 without a sign, 2 with one."""


class Tags(NamedTuple):
    """The tags of a TIFF's first page that decide how the page is decoded."""

    height: int
    width: int
    samples: int
    bits: int
    """The most of any band."""
    orientation: int
    type: str
    """Type of the bands, or an empty string for one that is not decoded."""
    is_plain: bool
    """Whether stored values are those of the image."""


def is_tiff(prefix: bytes) -> bool:
    """Whether a file begins as a TIFF or BigTIFF."""
    return prefix[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def tags(data: memoryview) -> Tags | None:
    """Read the tags of the first page; ``None`` where they cannot be read, or say no size.

    Args:
        data: (bytes,) the whole file.
    """
    try:
        found = _first_page(data)
        height, width = (found[tag][0] for tag in (HEIGHT, WIDTH))
    except (struct.error, IndexError, KeyError, OverflowError):
        return None
    samples = found.get(SAMPLES, (1,))[0]
    bits = found.get(BITS, (1,))
    formats = found.get(SAMPLE_FORMAT, (1,))
    kinds = set(zip(bits, formats * len(bits) if len(formats) == 1 else formats, strict=False))
    orientation = found.get(ORIENTATION, (1,))[0]
    return Tags(
        height,
        width,
        samples,
        max(bits),
        orientation if orientation in range(1, 9) else 1,
        _TYPES.get(kinds.pop(), "") if len(kinds) == 1 else "",
        found.get(PHOTOMETRIC, (1,))[0] in _PHOTOMETRICS,
    )


def _first_page(data: memoryview) -> dict[int, tuple[Any, ...]]:
    """Values of the tags of the first page by number.

    Raises:
        struct.error, IndexError, OverflowError: If the file ends before them.
    """
    order = "<" if data[0] == ord("I") else ">"
    big = bytes(data[:4])[2 if order == "<" else 3] == 43
    at = struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)[0]
    count = struct.unpack_from(order + ("Q" if big else "H"), data, at)[0]
    entry, inline = (20, 8) if big else (12, 4)
    at += 8 if big else 2
    found: dict[int, tuple[Any, ...]] = {}
    for index in range(min(count, _MOST_ENTRIES)):
        start = at + index * entry
        tag, kind = struct.unpack_from(order + "HH", data, start)
        if tag not in _TAKEN or kind not in _NUMBERS:
            continue
        number = struct.unpack_from(order + ("Q" if big else "I"), data, start + 4)[0]
        if not number:
            continue
        values = f"{min(number, _MOST_VALUES)}{_NUMBERS[kind]}"
        place = start + entry - inline
        if struct.calcsize(order + f"{number}{_NUMBERS[kind]}") > inline:
            place = struct.unpack_from(order + ("Q" if big else "I"), data, place)[0]
        found[tag] = struct.unpack_from(order + values, data, place)
    return found
