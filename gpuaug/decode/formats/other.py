"""Formats that PIL alone decodes: GIF, BMP, netpbm, JPEG 2000, AVIF and HEIF. Limits are checked before PIL opens a file."""

import re
import struct

from gpuaug.decode.formats import pil
from gpuaug.decode.formats.header import Header, ImageFormat
from gpuaug.decode.limits import MAX_PYTHON_BYTES, MAX_SEGMENTS, MIN_TILE_PIXELS, LimitError, MetadataLimits

_match_netpbm = re.compile(rb"P(?:[1-6f]|0CMYK|y(?:P|RGBA|CMYK))(?=[ \t-\r]+[0-9#])").match
"""Match the start of PBM, PGM, PPM and related formats: type, then size or comment.

The type alone, such as P5, is not enough: a label may be the same bytes.
"""

_IMAGE_BRANDS = (b"avif", b"avis", b"mif1", b"msf1", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs")
"""Brands (bytes 8 to 11) of AVIF and HEIF files.

Videos also have ``ftyp`` in bytes 4 to 7. Only the brand distinguishes images from videos.
"""

_BMP_HEADER_SIZES = frozenset([12, 40, 52, 56, 64, 108, 124])
"""Sizes in bytes of the second header of BMPs that PIL reads. The first bytes, BM, are not enough: a label may have them."""


def _parse_gif(data: memoryview) -> Header:
    """Parse the header. Count the blocks of extensions before the first image, because PIL reads block by block."""
    limits = MetadataLimits()
    # After the header of 13 bytes, whose byte 10 has a flag for a table of colours, and the table's number of bits minus 1.
    position = 13 + (3 << (data[10] & 7) + 1 if len(data) > 10 and data[10] & 0x80 else 0)
    while position + 2 < len(data) and data[position] not in b",;":  # an image, or the end
        start = position
        if data[position] == 0x21:  # an extension
            is_comment = data[position + 1] == 0xFE
            position += 2
            while position < len(data) and data[position]:
                if is_comment:
                    limits.add(data[position])
                else:
                    limits.add_chunk()
                position += 1 + data[position]
        position += 1
        limits.add(position - start)
    return pil.parse(data, GIF.names)


def _parse_netpbm(data: memoryview) -> Header:
    """Parse the header. Count the comments in files whose pixels are text.

    Comments after ``MAX_PYTHON_BYTES`` are not counted, because ``pil.parse`` refuses text files that are larger.
    """
    limits = MetadataLimits()
    if bytes(data[:2]) in (b"P1", b"P2", b"P3"):
        for _ in range(bytes(data[:MAX_PYTHON_BYTES]).count(b"#")):
            limits.add(0)
    return pil.parse(data, NETPBM.names)


def _parse_jpeg_2000(data: memoryview) -> Header:
    """Parse the header. Count the boxes, and the segments of the codestream before its first tile."""
    limits = MetadataLimits()
    position = 0
    while bytes(data[position : position + 2]) != b"\xff\x4f" and position + 8 <= len(data):  # boxes
        length, box_type = struct.unpack_from(">I4s", data, position)
        header_size = 8
        if length == 1:
            length = int.from_bytes(data[position + 8 : position + 16])
            header_size = 16
        if box_type == b"jp2c":
            position += header_size
            break
        if length < header_size:
            break
        limits.add(length)
        position += length
    size = None
    position += 2
    while position + 4 <= len(data):
        marker, length = struct.unpack_from(">HH", data, position)
        if marker in (0xFF90, 0xFFD9) or length < 2:  # SOT (start of a tile) or EOC (end of the codestream)
            break
        limits.add(length)
        if marker == 0xFF51:  # SIZ
            size = size or _check_siz(data, position + 6)
        position += 2 + length
    if size is None:
        raise LimitError("it has no codestream")
    header = pil.parse(data, JPEG_2000.names)
    if not header.problem and size != (header.width, header.height):
        return Header(problem=f"its header says {header.width}x{header.height} pixels, but its codestream {size}")
    return header


def _check_siz(data: memoryview, position: int) -> tuple[int, int]:
    """Check the number of tiles and components in the segment SIZ of a JPEG 2000. Return (width, height).

    Args:
        data: (bytes,) content of the file.
        position: Offset of the field Xsiz.
    """
    # The tiles form a grid that begins at (tile_left, tile_top). ``right`` and ``bottom`` are exclusive.
    right, bottom, left, top, *tile, components = struct.unpack_from(">8IH", data, position)
    tile_width, tile_height, tile_left, tile_top = tile
    if components > 4:
        raise LimitError(f"it has {components} components, more than 4")
    if tile_width and tile_height:
        tiles = -((tile_left - right) // tile_width) * -((tile_top - bottom) // tile_height)
        if tiles > max(MAX_SEGMENTS, (bottom - top) * (right - left) // MIN_TILE_PIXELS):
            raise LimitError(f"it has {tiles} tiles, more than {MAX_SEGMENTS} and more than one per {MIN_TILE_PIXELS} pixels")
    return right - left, bottom - top


GIF = ImageFormat(("GIF",), lambda prefix: prefix.startswith(b"GIF8"), _parse_gif)
BMP = ImageFormat(
    ("BMP",),
    lambda prefix: prefix[:2] == b"BM" and int.from_bytes(prefix[14:18], "little") in _BMP_HEADER_SIZES,
    lambda data: pil.parse(data, ("BMP",)),
)
NETPBM = ImageFormat(("PPM",), lambda prefix: _match_netpbm(prefix) is not None, _parse_netpbm)
JPEG_2000 = ImageFormat(
    ("JPEG2000",),
    lambda prefix: prefix.startswith((b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51")),
    _parse_jpeg_2000,
)
HEIF = ImageFormat(
    ("AVIF", "HEIF"),
    lambda prefix: prefix[4:8] == b"ftyp" and prefix[8:12] in _IMAGE_BRANDS,
    lambda data: pil.parse(data, ("AVIF", "HEIF")),
)
