"""Reader of the directories of tags in a TIFF structure, which a TIFF and EXIF are, and of the EXIF orientation of a file."""

import re
import struct
from collections.abc import Iterator
from typing import Any

from gpuaug.decode.limits import MAX_METADATA_BYTES, MAX_SEGMENTS, LimitError

ORIENTATION = 274
"""Number of the tag with the orientation."""

_VALUE_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
"""Type of a value → size in bytes."""

_STRUCT_FORMATS = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 13: "I", 16: "Q", 17: "q", 18: "Q"}
"""``struct`` format of each integer type."""

_ORIENTATION_FORMATS = {3: "H", 4: "I", 5: "II", 6: "b", 8: "h", 9: "i", 10: "ii", 11: "f", 12: "d", 13: "I", 16: "Q"}
"""``struct`` format of each type of an orientation that PIL reads as a number. PIL reads the type BYTE (1) as bytes."""

_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def orientation(exif: Any, xmp: Any = b"") -> int:
    r"""Return the EXIF orientation of an image, as PIL's ``ImageOps.exif_transpose`` does.

    Args:
        exif: (bytes,) EXIF, with or without ``Exif\0\0`` before its TIFF structure; empty if the file has none.
        xmp: (bytes,) XMP. Its ``tiff:Orientation`` is used if EXIF has no entry for the orientation.

    Returns:
        1 to 8; 1 if it is missing or invalid, or if EXIF is damaged.

    Cost:
        About 10 µs.

    Examples:
        >>> orientation(b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0")
        6
        >>> orientation(b"", b'<rdf:Description tiff:Orientation="8"/>')
        8
    """
    data = memoryview(exif)
    for _ in range(2):  # some files have the prefix twice
        data = data[6:] if bytes(data[:6]) == b"Exif\0\0" else data
    values: dict[int, tuple[int, ...]] = {}
    if len(data):
        try:
            values, _ = next(pages(data, {ORIENTATION: 1}), (values, 0))
        except LimitError:
            return 1
    if ORIENTATION not in values and (match := _XMP_ORIENTATION.search(xmp)):
        return valid_orientation(int(match[1]))
    return valid_orientation(values.get(ORIENTATION, (1,))[0])


def valid_orientation(value: Any) -> int:
    """Return ``value`` if it is an EXIF orientation, or else 1."""
    return int(value) if value in range(1, 9) else 1


def is_tiff(prefix: bytes) -> bool:
    """Return whether data begin with a signature of a TIFF or BigTIFF that PIL reads: four are valid, and two are not."""
    return prefix[:4] in (b"II*\0", b"MM\0*", b"II\0*", b"MM*\0", b"II+\0", b"MM\0+")


def pages(data: memoryview, limits: dict[int, int]) -> Iterator[tuple[dict[int, tuple[int, ...]], int]]:
    """Yield (tag number → values, number of tags) of each page. A page that cannot be read has no tags, and is the last.

    If the pages form a loop, the iterator does not end.

    Args:
        data: (bytes,) TIFF structure.
        limits: Number of each tag that is read → maximum number of values to read; 0 to yield the number of values instead.

    Raises:
        LimitError: If the data do not begin like a TIFF; if a page has too many tags or bytes, or repeats a tag, or a tag has a
            wrong type.
    """
    if not is_tiff(bytes(data[:4])):
        raise LimitError("it is no TIFF")
    # ``struct`` formats: of the byte order, and below of an offset (``word``) and of the number of tags.
    order = "<" if bytes(data[:1]) == b"I" else ">"
    is_bigtiff = 43 in bytes(data[2:4])  # the version, in either byte order; 42 for a TIFF
    word, count_format, entry_size = ("Q", "Q", 20) if is_bigtiff else ("I", "H", 12)
    # Bytes of the field for values at the end of an entry of ``entry_size`` bytes.
    inline_bytes = struct.calcsize(order + word)  # the entry of a longer value holds the offset of the value
    position = 8 if is_bigtiff else 4  # position of the offset of the next directory
    while True:
        try:
            (directory,) = struct.unpack_from(order + word, data, position)
            if not directory:
                return
            (count,) = struct.unpack_from(order + count_format, data, directory)
            start = directory + struct.calcsize(order + count_format)
            position = start + count * entry_size
            values = _page(data, order, word, start, entry_size, inline_bytes, count, limits)
        except (struct.error, IndexError, OverflowError):  # the file ends
            yield {}, 0
            return
        yield values, count


def _page(
    data: memoryview, order: str, word: str, start: int, entry_size: int, inline_bytes: int, count: int, limits: dict[int, int]
) -> dict[int, tuple[Any, ...]]:
    """Return tag number → values, for the ``count`` tags of a page, whose first entry is at offset ``start``.

    An entry has the number of the tag, the type of its values, their number, and the values, or, if these have more than
    ``inline_bytes``, the offset of the values. ``order``, ``word``: ``struct`` formats of the byte order and of
    offsets. ``limits``: see ``pages``.

    Raises:
        struct.error, IndexError, OverflowError: If the file ends before the values.
        LimitError: As ``pages``.
    """
    if count > MAX_SEGMENTS:
        raise LimitError(f"a page has more than {MAX_SEGMENTS} tags, which is the limit")
    values_of: dict[int, tuple[Any, ...]] = {}
    total_bytes = 0
    for position in range(start, start + count * entry_size, entry_size):
        tag, type_, value_count = struct.unpack_from(f"{order}HH{word}", data, position)
        size = value_count * _VALUE_SIZES.get(type_, 0)
        total_bytes += size if size <= len(data) else 0  # PIL and libtiff skip a value longer than the file
        if total_bytes > MAX_METADATA_BYTES:
            raise LimitError(f"its tags have more than {MAX_METADATA_BYTES} bytes, which is the limit")
        if tag not in limits or not value_count:
            continue
        value_position = position + entry_size - inline_bytes
        if size > inline_bytes:
            (value_position,) = struct.unpack_from(order + word, data, value_position)
        if tag == ORIENTATION:
            if tag not in values_of and size:  # as in PIL, which ignores unknown types, and reads the first
                format_ = _ORIENTATION_FORMATS.get(type_, "")
                values_of[tag] = (_number(data, order + format_, value_position) if format_ else 0,)
            continue
        if tag in values_of:
            raise LimitError(f"its tag {tag} is repeated")
        if type_ not in _STRUCT_FORMATS:
            raise LimitError(f"its tag {tag} has type {type_}, which is no integer")
        if not limits[tag]:
            values_of[tag] = (value_count,)
            continue
        count_read = min(value_count, limits[tag])
        values_of[tag] = struct.unpack_from(f"{order}{count_read}{_STRUCT_FORMATS[type_]}", data, value_position)
    return values_of


def _number(data: memoryview, format_: str, position: int) -> float:
    """Return the number or fraction at ``position``; 0 if the divisor is 0."""
    number, divisor, *_ = (*struct.unpack_from(format_, data, position), 1)  # 1: divisor of a number that is not a fraction
    return number / divisor if divisor else 0
