"""EXIF orientation of a file, as PIL's ``ImageOps.exif_transpose`` reads it, without decoding the image.

Where PIL raises an error for damaged EXIF, the orientation is 1.
"""

import re
import struct
from typing import Any

_ORIENTATION = 274
"""Number of the tag with the orientation."""

_BYTE_ORDERS = {b"II*\0": "<", b"II\0*": "<", b"MM*\0": ">", b"MM\0*": ">", b"MM\0+": ">"}
"""Byte order for each signature of EXIF's TIFF structure that PIL accepts. The second and the third are not valid TIFF."""

_VALUE_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
"""Type of an entry → bytes per value. PIL ignores entries of other types."""

_STRUCT_FORMATS = {3: "H", 4: "I", 5: "II", 6: "b", 8: "h", 9: "i", 10: "ii", 11: "f", 12: "d", 13: "I", 16: "Q"}
"""Type of an entry that PIL reads as a number → ``struct`` format.

The type BYTE (1) is not among them, because PIL reads it as bytes.
"""

_STRUCTS = {
    order: (
        struct.Struct(order + "I").unpack_from,
        struct.Struct(order + "H").unpack_from,
        struct.Struct(order + "HHII").unpack_from,
    )
    for order in "<>"
}
"""Byte order → functions that read an offset, a number of entries, and an entry (tag, type, number of values, value)."""

_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def orientation(exif: Any, xmp: Any = b"") -> int:
    r"""Return the EXIF orientation of an image.

    Args:
        exif: (bytes,) EXIF, with or without ``Exif\0\0`` before its TIFF structure; empty if the file has none.
        xmp: (bytes,) XMP. Its ``tiff:Orientation`` is used if EXIF has no entry for the orientation.

    Returns:
        1 to 8; 1 if it is missing, invalid or damaged.

    Cost:
        About 3 µs.

    Examples:
        >>> orientation(b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0")
        6
        >>> orientation(b"", b'<rdf:Description tiff:Orientation="8"/>')
        8
    """
    try:
        value = _orientation_value(memoryview(exif))
    except (struct.error, ValueError, ArithmeticError):  # ValueError: NaN. ArithmeticError: infinity, or division by 0
        return 1
    if value is None:
        match = _XMP_ORIENTATION.search(xmp)
        value = int(match[1]) if match else 1
    return value if 1 <= value <= 8 else 1


def _orientation_value(tiff: memoryview) -> int | None:
    """Return the value of the orientation entry; 0 if it is not an integer, ``None`` if there is no entry.

    Raises:
        struct.error: If PIL does not read this TIFF structure.
        ValueError, ArithmeticError: If the value is not finite.
    """
    for _ in range(2):  # some files have the prefix twice
        if bytes(tiff[:6]) == b"Exif\0\0":
            tiff = tiff[6:]
    if not len(tiff):
        return None
    order = _BYTE_ORDERS.get(bytes(tiff[:4]))
    if order is None:
        raise struct.error
    unpack_long, unpack_short, unpack_entry = _STRUCTS[order]
    (directory,) = unpack_long(tiff, 4)
    (count,) = unpack_short(tiff, directory) if directory + 2 <= len(tiff) else (0,)
    tags_read = set[int]()  # PIL ignores later entries of the same tag
    external_bytes = 0  # total size of the values that are not stored in their entries
    for start in range(directory + 2, min(directory + 2 + 12 * count, len(tiff) - 11), 12):
        tag, entry_type, values, offset = unpack_entry(tiff, start)
        if tag in tags_read or entry_type not in _VALUE_SIZES:
            continue
        size = values * _VALUE_SIZES[entry_type]
        value_start = start + 8
        if size > 4:
            external_bytes += size
            value_start = offset
            if external_bytes > len(tiff):  # PIL ignores an entry if the values so far would exceed the data
                continue
            if value_start + size > len(tiff):  # PIL reads no further entries
                return None
        if not size:
            continue
        if tag != _ORIENTATION:
            tags_read.add(tag)
        elif entry_type not in _STRUCT_FORMATS:
            return 0
        else:
            value, *divisor = struct.unpack_from(order + _STRUCT_FORMATS[entry_type], tiff, value_start)
            quotient = value / divisor[0] if divisor else value
            return int(quotient) if quotient == int(quotient) else 0
    return None
