"""Parser of the tags of TIFFs, which checks the limits, and finds the pages that are bands of one image."""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from gpuaug.decode.limits import (
    MAX_METADATA_BYTES,
    MAX_SEGMENTS,
    MAX_TILE_BYTES,
    MAX_TILES,
    LimitError,
)

SUBFILE_TYPE, WIDTH, HEIGHT, BITS, PHOTOMETRIC, STRIP_OFFSETS, ORIENTATION, SAMPLES = 254, 256, 257, 258, 262, 273, 274, 277
ROWS_PER_STRIP, PLANAR, TILE_WIDTH, TILE_HEIGHT, TILE_OFFSETS, SAMPLE_FORMAT = 278, 284, 322, 323, 324, 339
"""Numbers of tags."""

_LIST_TAGS = frozenset([BITS, SAMPLE_FORMAT])
"""Tags with a number per band."""

_COUNTED_TAGS = frozenset([STRIP_OFFSETS, TILE_OFFSETS])
"""Tags whose values are not read, only the number of values."""

_TAGS_READ = _LIST_TAGS | _COUNTED_TAGS
_TAGS_READ |= {SUBFILE_TYPE, WIDTH, HEIGHT, PHOTOMETRIC, ORIENTATION, SAMPLES, ROWS_PER_STRIP, PLANAR, TILE_WIDTH, TILE_HEIGHT}

MAX_BANDS = 255
"""Maximum number of bands of an image, over all pages: the maximum that ``HEADER`` can store."""

_REDUCED_OR_MASK = 1 | 4
"""Bits of ``SUBFILE_TYPE`` of a page that is an overview of another page, or a mask."""

_VALUE_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
"""Type of a value → size in bytes."""

_STRUCT_FORMATS = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 13: "I", 16: "Q", 17: "q", 18: "Q"}
"""``struct`` format of each integer type."""

_PLAIN_PHOTOMETRICS = frozenset([1, 2])
"""Photometric interpretations whose stored values need no conversion: grey with black as 0, and RGB."""

_TYPES = {(8, 1): "uint8", (8, 2): "int8", (16, 1): "uint16", (16, 2): "int16", (32, 3): "float32", (64, 3): "float64"}
"""(bits, sample format) of a band → dtype. Sample format 1 is unsigned, 2 is signed, 3 is floating."""


class Tags(NamedTuple):
    """Tags of the first page of a TIFF that affect decoding, and the pages with more bands."""

    height: int
    width: int
    samples: int
    """Number of bands of a page."""
    bits: int
    """Number of bits of the band with the most bits."""
    orientation: int
    """EXIF orientation, 1 to 8."""
    type: str
    """dtype of the bands; empty for types that are not in ``_TYPES``."""
    is_plain: bool
    """Whether the values in the file need no conversion: RGB, or grey with black as 0."""
    is_planar: bool
    """Whether bands are stored one after the other, not interleaved."""
    pages: tuple[int, ...]
    """Indices of the pages that are bands of the image: the first, and all others but overviews and masks.

    Empty if these pages differ in size or type, if they have more than ``MAX_BANDS`` bands, or if they form a loop.
    """


def is_tiff(prefix: bytes) -> bool:
    """Return whether a file begins with a signature of a TIFF or BigTIFF that PIL reads. Two of them are not valid TIFF."""
    return prefix[:4] in (b"II*\0", b"MM\0*", b"II\0*", b"MM*\0", b"II+\0", b"MM\0+")


def tags(data: memoryview) -> Tags | None:
    """Read the tags of the pages. Return ``None`` if tags of the first page cannot be read, or lack the width or height.

    Args:
        data: (bytes,) content of the file.

    Raises:
        LimitError: If a page exceeds a limit, or repeats a tag: libraries differ in the one that they read.
    """
    found: Tags | None = None
    pages: list[int] = []
    budget = 16 * MAX_SEGMENTS  # of tags over all pages
    for number, (values, count) in enumerate(_pages(data)):
        page = _tags_of_page(values)
        found = found or page
        if found is None:
            return None
        budget -= 1 + count
        is_band = number == 0 or not values.get(SUBFILE_TYPE, (0,))[0] & _REDUCED_OR_MASK
        pages += [number] if is_band else []
        if (is_band and page != found) or budget < 0 or len(pages) * found.samples > MAX_BANDS:
            return found
    return found and found._replace(pages=tuple(pages))


def _tags_of_page(values: dict[int, tuple[int, ...]]) -> Tags | None:
    """Return the tags of a page without the field ``pages``, or ``None`` if it lacks the width or height.

    Raises:
        LimitError: If the page has too many strips or tiles, or too large tiles.
    """
    if WIDTH not in values or HEIGHT not in values:
        return None
    height, width = values[HEIGHT][0], values[WIDTH][0]
    samples = values.get(SAMPLES, (1,))[0]
    bits = values.get(BITS, (1,))
    formats = values.get(SAMPLE_FORMAT, (1,))
    types = set(zip(bits, formats * len(bits) if len(formats) == 1 else formats, strict=False))
    is_planar = samples > 1 and values.get(PLANAR, (1,))[0] == 2
    tile_width = values.get(TILE_WIDTH, (width,))[0]
    tile_height = values.get(TILE_HEIGHT, values.get(ROWS_PER_STRIP, (height,)))[0]
    needed = -(-width // max(tile_width, 1)) * -(-height // max(tile_height, 1)) * (samples if is_planar else 1)
    most = min(max(needed, MAX_SEGMENTS), MAX_TILES)
    if max(values.get(tag, (0,))[0] for tag in _COUNTED_TAGS) > most:
        raise LimitError(f"it has more than {most} strips or tiles, which is the limit for its size")
    tile_pixels = values.get(TILE_WIDTH, (0,))[0] * values.get(TILE_HEIGHT, (0,))[0]
    if tile_pixels > height * width and tile_pixels * samples * max(bits) > 8 * MAX_TILE_BYTES:
        raise LimitError(f"its tiles have more than {MAX_TILE_BYTES} bytes, which is the limit, and more than the image")
    orientation = values.get(ORIENTATION, (1,))[0]
    return Tags(
        height,
        width,
        samples,
        max(bits),
        orientation if orientation in range(1, 9) else 1,
        _TYPES.get(types.pop(), "") if len(types) == 1 else "",
        values.get(PHOTOMETRIC, (1,))[0] in _PLAIN_PHOTOMETRICS,
        is_planar,
        (),
    )


def _pages(data: memoryview) -> Iterator[tuple[dict[int, tuple[int, ...]], int]]:
    """Yield (tag number → values, number of tags) of each page: no tags of a page that cannot be read, and no end of a loop.

    Of ``_COUNTED_TAGS``, the number of values is yielded instead of the values.

    Raises:
        LimitError: If a page has too many tags or bytes, or repeats a tag, or a tag has a wrong type.
    """
    order = "<" if bytes(data[:1]) == b"I" else ">"
    is_bigtiff = 43 in bytes(data[2:4])
    word, count_format, entry_size = ("Q", "Q", 20) if is_bigtiff else ("I", "H", 12)
    inline_bytes = struct.calcsize(order + word)  # longer values are elsewhere, and the entry has their offset
    position = 8 if is_bigtiff else 4
    while True:
        try:
            (directory,) = struct.unpack_from(order + word, data, position)
            if not directory:
                return
            (count,) = struct.unpack_from(order + count_format, data, directory)
            start = directory + struct.calcsize(order + count_format)
            position = start + count * entry_size
            values = _page(data, order, word, start, entry_size, inline_bytes, count)
        except (struct.error, IndexError, OverflowError):  # the file ends
            yield {}, 0
            return
        yield values, count


def _page(
    data: memoryview, order: str, word: str, start: int, entry_size: int, inline_bytes: int, count: int
) -> dict[int, tuple[Any, ...]]:
    """Return tag number → values, for the ``count`` tags of a page at offset ``start``.

    Raises:
        struct.error, IndexError, OverflowError: If the file ends before the values.
        LimitError: As ``_pages``.
    """
    if count > MAX_SEGMENTS:
        raise LimitError(f"a page has more than {MAX_SEGMENTS} tags, which is the limit")
    values_of: dict[int, tuple[Any, ...]] = {}
    total_bytes = 0
    for position in range(start, start + count * entry_size, entry_size):
        tag, type_ = struct.unpack_from(order + "HH", data, position)
        (value_count,) = struct.unpack_from(order + word, data, position + 4)
        size = value_count * _VALUE_SIZES.get(type_, 0)
        total_bytes += size if size <= len(data) else 0  # PIL and libtiff skip a value longer than the file
        if total_bytes > MAX_METADATA_BYTES:
            raise LimitError(f"its tags have more than {MAX_METADATA_BYTES} bytes, which is the limit")
        if (
            tag not in _TAGS_READ
            or not value_count
            or (tag == ORIENTATION and (type_ not in _STRUCT_FORMATS or tag in values_of))
        ):
            continue
        if tag in values_of:
            raise LimitError(f"its tag {tag} is repeated")
        if type_ not in _STRUCT_FORMATS:
            raise LimitError(f"its tag {tag} has type {type_}, which is no integer")
        if tag in _COUNTED_TAGS:
            values_of[tag] = (value_count,)
            continue
        value_position = position + entry_size - inline_bytes
        if size > inline_bytes:
            (value_position,) = struct.unpack_from(order + word, data, value_position)
        count_read = min(value_count, MAX_BANDS) if tag in _LIST_TAGS else 1
        values_of[tag] = struct.unpack_from(f"{order}{count_read}{_STRUCT_FORMATS[type_]}", data, value_position)
    return values_of
