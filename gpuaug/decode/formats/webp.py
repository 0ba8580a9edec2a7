"""WebP: parser of the chunks."""

import struct

from gpuaug.core.encoded import Format
from gpuaug.decode.formats.exif import orientation
from gpuaug.decode.formats.header import Header, ImageFormat
from gpuaug.decode.limits import MetadataLimits

_WEBP_ALPHA, _WEBP_EXIF, _WEBP_XMP = 0x10, 0x08, 0x04
"""Flags of the chunk VP8X."""

_BROKEN = Header(problem="its header is broken")


def _parse(data: memoryview) -> Header:
    """Parse the chunks.

    PIL is not used, because it creates a decoder, which allocates memory for two frames.

    Raises:
        LimitError: If the chunks exceed a limit.
        struct.error: If the file ends before its size.
    """
    limits = MetadataLimits()
    first = bytes(data[12:16])
    end = min(8 + int.from_bytes(data[4:8], "little"), len(data))
    flags = 0
    exif = xmp = b""
    has_alpha = False
    if first == b"VP8X":
        flags, width_minus_1, width_high, height_minus_1, height_high = struct.unpack_from("<B3xHBHB", data, 20)
        width = 1 + width_minus_1 + (width_high << 16)
        height = 1 + height_minus_1 + (height_high << 16)
        has_alpha = bool(flags & _WEBP_ALPHA)
    elif first == b"VP8 ":
        start, width, height = struct.unpack_from("<3sHH", data, 23)
        if start != b"\x9d\x01\x2a":
            return _BROKEN
        width, height = width & 0x3FFF, height & 0x3FFF
    elif first == b"VP8L":
        start, bits = struct.unpack_from("<BI", data, 20)
        if start != 0x2F:
            return _BROKEN
        width = 1 + (bits & 0x3FFF)
        height = 1 + (bits >> 14 & 0x3FFF)
    else:
        return _BROKEN
    position = 12
    while position + 8 <= end:
        chunk_type, length = struct.unpack_from("<4sI", data, position)
        content = data[position + 8 : min(position + 8 + length, end)]
        position += 8 + length + length % 2
        if chunk_type in (b"VP8 ", b"VP8L", b"ALPH", b"ANMF"):
            limits.add_chunk()
            if chunk_type == b"ALPH":
                has_alpha = True
            elif chunk_type == b"VP8L" and len(content) >= 5:
                has_alpha = has_alpha or bool(content[4] >> 4 & 1)  # bit 28 after the signature byte
            continue
        limits.add(length)
        if chunk_type == b"EXIF" and flags & _WEBP_EXIF and not exif:
            exif = bytes(content)
        elif chunk_type == b"XMP " and flags & _WEBP_XMP and not xmp:
            xmp = bytes(content)
    bands = 4 if has_alpha else 3  # channels
    return Header(height, width, bands, bands, Format.WEBP, 0, orientation(exif, xmp))  # 0: no chroma subsampling of a JPEG


FORMAT = ImageFormat(("WEBP",), lambda prefix: prefix[:4] == b"RIFF" and prefix[8:12] == b"WEBP", _parse)
