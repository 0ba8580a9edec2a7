"""JPEG: parser of the segments before the first scan, and decoding by simplejpeg."""

import re
import struct
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.core.encoded import Format
from gpuaug.decode.formats.exif import orientation
from gpuaug.decode.formats.header import Header, ImageFormat
from gpuaug.decode.layout import ImageInfo, Layout
from gpuaug.decode.limits import MAX_EXIF_SEGMENTS, MAX_METADATA_BYTES, MAX_SCANS, MAX_SEGMENTS, LimitError

_unpack_segment = struct.Struct(">BBH").unpack_from
"""Read the prefix 0xFF, the marker and the length of a JPEG segment."""

_unpack_frame = struct.Struct(">BHHB").unpack_from
"""Read the precision, height, width and number of components in a frame segment."""

_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0 to SOF15; the other three are DHT, JPG and DAC
_SOF0, _SOF2, _SOF3, _DHT, _SOS, _EOI, _DQT, _DRI, _APP1, _APP14 = 0xC0, 0xC2, 0xC3, 0xC4, 0xDA, 0xD9, 0xDB, 0xDD, 0xE1, 0xEE
_DECODABLE = frozenset([_SOF0, 0xC1, _SOF2, _SOF3, 0xC9, 0xCA])
"""Frame markers that libjpeg-turbo decodes: baseline, extended, progressive, lossless; arithmetic extended and progressive."""

_MARKERS_WITHOUT_LENGTH = frozenset([0x00, 0x01, *range(0xD0, 0xD9)])
"""Markers without a length field. They are not allowed before a scan."""

_SEGMENT_MARKERS = frozenset([*range(0xC0, 0xC8), *range(0xC9, 0xDE), *range(0xE0, 0xF0), 0xFE]) - _MARKERS_WITHOUT_LENGTH
"""Markers of segments that libjpeg skips or parses by their length. After other markers, libjpeg raises an error."""

_next_marker = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]").search
"""Find the marker that ends the coded data of a scan: any marker except restart markers. Stuffed bytes are not markers."""

_SAMPLING = {h << 4 | v: 4 * h + v for h in range(1, 5) for v in range(1, 5)}
"""``Header.sampling`` for each byte of sampling factors of the luma component."""

_XMP_NAME = b"http://ns.adobe.com/xap/1.0/\0"
"""First bytes of a JPEG segment with XMP metadata."""


def _parse(data: memoryview) -> Header:
    """Parse the segments of a JPEG before its first scan.

    Raises:
        IndexError, struct.error: If the file ends before the first scan.
        LimitError: If the file has too much metadata or too many scans.
    """
    position = 2  # offset of the next segment, after the start marker
    frame_position = 0  # offset of the frame segment; 0 if there is none
    is_regular = True  # whether the engines decode the header correctly
    is_ycc = True  # whether colours are YCbCr
    has_restarts = has_huffman_tables = False
    exif: list[memoryview] = []
    xmp = b""
    tables = set[int]()  # indices of the quantization tables
    for _ in range(MAX_SEGMENTS):
        prefix, marker, size = _unpack_segment(data, position)
        if prefix != 0xFF or marker in _MARKERS_WITHOUT_LENGTH:  # libjpeg skips to the next marker
            position += 1 + max(bytes(data[position + 1 : position + 65536]).find(b"\xff"), 0)
            is_regular = False
            continue
        if marker == 0xFF:  # a byte of padding
            position += 1
            continue
        if marker == _SOS:
            break
        if marker == _EOI:
            raise IndexError  # the caller reports that the file ends within its header
        if marker in _FRAME_MARKERS:
            if frame_position:  # libjpeg raises an error; PIL uses the size of the last frame
                return Header(problem="it has several frames")
            frame_position, frame_marker, frame_size = position, marker, size
        elif marker == _DQT:
            tables |= _quantization_tables(data[position + 4 : position + 2 + size])
        elif marker == _DHT:
            has_huffman_tables = True
        elif marker == _DRI:
            has_restarts = bytes(data[position + 4 : position + 6]) != b"\0\0"
        elif marker == _APP1:
            if bytes(data[position + 4 : position + 10]) == b"Exif\0\0":  # later segments continue the first
                exif.append(data[position + (10 if exif else 4) : position + 2 + size])
            elif bytes(data[position + 4 : position + 4 + len(_XMP_NAME)]) == _XMP_NAME:
                xmp = bytes(data[position + 4 : position + 2 + size])
        elif marker == _APP14 and bytes(data[position + 4 : position + 9]) == b"Adobe":
            is_ycc = data[position + 15] == 1  # Adobe's code of the colours
        position += 2 + size
    else:
        frame_position = 0  # too many segments
    if len(exif) > MAX_EXIF_SEGMENTS:
        raise LimitError(f"it has more than {MAX_EXIF_SEGMENTS} segments of EXIF, which is the limit")
    if position > MAX_METADATA_BYTES:
        raise LimitError(f"its metadata have more than {MAX_METADATA_BYTES} bytes, which is the limit")
    if not frame_position:
        return Header(problem="its header is broken")
    if frame_marker not in _DECODABLE:
        return Header(problem=f"it is coded as SOF{frame_marker - _SOF0}, which no decoder reads")
    precision, height, width, channels = _unpack_frame(data, frame_position + 4)
    # Three bytes per component: identifier, sampling factors (horizontal << 4 | vertical), index of the quantization table.
    components = bytes(data[frame_position + 10 : frame_position + 10 + 3 * channels])
    if precision != 8:
        return Header(problem=f"it has {precision} bits per channel")
    if not (height and width and channels):
        return Header(problem=f"its size is {width}x{height}")
    # Many files have bytes after the end marker, so search for the marker from the end of the file.
    if bytes(data[-2:]) != b"\xff\xd9" and bytes(data[position:]).rfind(b"\xff\xd9") < 0:
        return Header(problem="it ends before its end marker")
    sampling = 5  # 4 · 1 + 1: no subsampling
    if channels != 1:
        # Index 1: factors of luma. Index 4 and every third byte from there on: factors of the other components.
        sampling = _SAMPLING.get(components[1], 0) if components[4::3] == b"\x11\x11" else 0
        is_ycc = is_ycc and components[::3] != b"RGB"
    else:  # the engines decode a grey image with sampling factors other than 1x1, or with restart markers, to wrong pixels
        is_regular = is_regular and components[1] == 0x11 and not has_restarts
    scan_content = bytes(data[position + 4 : position + 2 + size])
    is_regular = is_regular and has_huffman_tables and frame_size == 8 + 3 * channels
    is_regular = is_regular and (channels == 1 or (channels == 3 and is_ycc))
    if frame_marker == _SOF3:
        format_ = Format.LOSSLESS_JPEG
    elif is_regular and frame_marker == _SOF0 and _is_baseline(components, scan_content, tables):
        format_ = Format.JPEG
    elif is_regular and frame_marker == _SOF2 and tables.issuperset(components[2::3]) and max(tables) < 16:
        format_ = Format.PROGRESSIVE_JPEG
    else:
        format_ = Format.OTHER_JPEG
    # Decoders reject a second scan after a complete baseline scan, so its data, most of the file, are not searched.
    if format_ != Format.JPEG:
        _check_scans(data, position)
    orientation_ = orientation(b"".join(exif), xmp) if exif or xmp else 1
    stored_channels = 3 if channels == 4 else channels
    label_max = 255 if channels == 1 else 0
    return Header(height, width, channels, stored_channels, format_, sampling, orientation_, label_max=label_max)


def _check_scans(data: memoryview, position: int) -> None:
    """Count the scans of a JPEG from the segment at ``position`` to the end marker.

    Raises:
        IndexError: If the file ends within a segment.
        LimitError: If there are too many scans or segments.

    Cost:
        0.7 µs per KB.
    """
    count = 0
    for _ in range(MAX_SEGMENTS):
        match = _next_marker(data, position)
        if match is None or (marker := data[match.end() - 1]) == _EOI:
            return
        position = match.end()
        count += marker == _SOS
        if count > MAX_SCANS:
            raise LimitError(f"it has more than {MAX_SCANS} scans, which is the limit")
        if marker in _SEGMENT_MARKERS:
            position += data[position] << 8 | data[position + 1]  # length of the segment, from its length field on
    raise LimitError(f"it has more than {MAX_SEGMENTS} segments, which is the limit")


def _quantization_tables(content: memoryview) -> set[int]:
    """Return the index of each table that a DQT segment defines. 16 or more is added for a table of 16-bit values."""
    tables = set[int]()
    position = 0
    while position < len(content):
        tables.add(content[position])
        position += 65 if content[position] < 16 else 129
    return tables


def _is_baseline(components: bytes, scan: bytes, tables: set[int]) -> bool:
    """Return whether one scan contains a complete baseline image, which the JPEG engines decode reliably.

    Args:
        components: 3 bytes per component: identifier, sampling factors, and index of the quantization table.
        scan: Content of the segment SOS.
        tables: Indices of the quantization tables before the scan.
    """
    return (
        scan[:1] == bytes([len(components) // 3])  # the scan has all components
        and scan[1:-3:2] == components[::3]  # in the order of the frame segment, by their identifiers
        and scan[-3:] == b"\0\x3f\0"  # all coefficients with all bits
        and not scan[2:-3:2].strip(b"\x00\x01\x10\x11")  # only Huffman tables 0 and 1
        and tables.issuperset(components[2::3])
        and max(tables) < 16
    )


@cache
def simplejpeg() -> Any:
    """Return the module ``simplejpeg``, or ``None``. A function, so that ``import gpuaug`` does not load the module."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def _fits_simplejpeg(file: NDArray[np.uint8], info: ImageInfo) -> bool:
    """Return whether simplejpeg reads the size and channels of ``info``. If not, it could write beyond the end of its buffer.

    simplejpeg would also write beyond the end of the buffer if it downsampled a lossless JPEG. ``Layout`` never requests this.
    """
    try:
        height, width, colorspace, _ = simplejpeg().decode_jpeg_header(file.data)  # 1.3 µs
    except (ValueError, KeyError):  # KeyError: a subsampling without a name in simplejpeg, such as 1x4
        return False
    channels = {"Gray": 1, "RGB": 3, "YCbCr": 3}.get(colorspace)
    return (height, width, channels) == (info.height, info.width, info.channels)


def _decode(file: NDArray[np.uint8], _layout: Layout, info: ImageInfo, buffer: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """Decode an image (h, w, C) with simplejpeg into ``buffer``. Return ``buffer``, or an array that shares its memory.

    Returns ``None`` if simplejpeg is missing or rejects the file, or the image does not fit into ``buffer``.
    """
    # CMYK JPEGs have 4 channels; PIL converts them.
    if simplejpeg() is None or info.channels not in (1, 3) or not _fits_simplejpeg(file, info):
        return None
    height, width, channels = buffer.shape
    try:
        # Without strict=True, simplejpeg reports an error that follows a warning as a warning only, and leaves the buffer
        # unwritten. With strict=True it raises for warnings, too. PIL then decodes the file, and raises only for errors.
        # simplejpeg downsamples to the smallest size that has at least the sides ``height`` and ``width``.
        pixels: NDArray[np.uint8] = simplejpeg().decode_jpeg(
            file.data, "RGB" if channels == 3 else "GRAY", min_height=height, min_width=width, buffer=buffer, strict=True
        )
    except ValueError:
        return None
    # ``pixels`` is a new view of ``buffer``. The caller does not copy the pixels if it gets the object ``buffer`` itself.
    return buffer if pixels.shape == buffer.shape else pixels


FORMAT = ImageFormat(("JPEG",), lambda prefix: prefix.startswith(b"\xff\xd8\xff"), _parse, _decode)
