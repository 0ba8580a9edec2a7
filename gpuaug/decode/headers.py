"""Parser of the headers of encoded images: JPEG, WebP and TIFF directly; PIL opens all other formats, without decoding them."""

import io
import re
import struct
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuaug.core.encoded import SAMPLE_TYPES, Format
from gpuaug.decode.formats import containers, tiff
from gpuaug.decode.formats.exif import orientation
from gpuaug.decode.limits import MAX_EXIF_SEGMENTS, MAX_METADATA_BYTES, MAX_SCANS, MAX_SEGMENTS, LimitError


class Header(NamedTuple):
    """Metadata parsed from an image file.

    All fields except ``problem`` are the fields of ``gpuaug.core.encoded.HEADER`` after ``start`` and ``length``, in order.
    """

    height: int = 0
    """Height in the file, in pixels."""
    width: int = 0
    """Width in the file, in pixels."""
    channels: int = 0
    """Number of components of a JPEG, or of bands of another image."""
    stored_channels: int = 0
    """Number of channels if decoded with ``channels=None``, where palettes and CMYK become RGB, and pages of a TIFF are bands.

    0 if the pages of a TIFF are no bands of one image.
    """
    format: Format = Format.UNREADABLE
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
"""Find the marker that ends the coded data of a scan: any but restart markers and stuffed bytes."""

_SAMPLING = {h << 4 | v: 4 * h + v for h in range(1, 5) for v in range(1, 5)}
"""``Header.sampling`` for each byte of sampling factors of the luma component."""

_PIL_FORMATS = ("PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF", "JPEG2000", "AVIF", "HEIF")
"""Formats that PIL or a plugin opens without decoding.

For other formats PIL decodes, runs a program, or checks no signature.
"""

UNKNOWN_FORMAT = (
    f"it is in none of the supported formats: JPEG, {', '.join(_PIL_FORMATS[:-2])}; AVIF and HEIF if PIL reads them"
)
"""``Header.problem`` of data in another format."""

_MAX_SIDE = 2**31 - 1
"""Maximum length of a side in pixels: the maximum that ``HEADER`` can store."""

_MAX_PIL_BANDS = 4
"""Maximum number of bands of an image that PIL decodes, alpha included."""

_PNG_SAMPLES = {0: 1, 2: 3, 4: 2, 6: 4}
"""Number of channels of a 16-bit PNG, by colour type."""

_MODES_CONVERTED_TO_RGB = ("P", "PA", "CMYK", "YCbCr", "LAB", "HSV")
"""PIL modes that are converted to RGB even with ``channels=None``."""

_XMP_NAME = b"http://ns.adobe.com/xap/1.0/\0"
"""First bytes of a JPEG segment with XMP metadata."""


def parse(data: bytes | bytearray | memoryview | NDArray[np.uint8]) -> Header:
    """Parse the header of an encoded image.

    Args:
        data: (bytes,) content of the file.

    Returns:
        Header. If the bytes cannot be decoded, its ``format`` is ``UNREADABLE`` and its ``problem`` is the reason.

    Cost:
        About 6 µs for a JPEG, 10 with EXIF. For any other format PIL opens the file: 50 to 200 µs.

    Examples:
        >>> parse(b"").format, parse(b"").problem
        (<Format.UNREADABLE: 0>, 'it is empty')
    """
    view = memoryview(data)  # type: ignore[arg-type]
    if not len(view):
        return Header(problem="it is empty")
    try:
        return _jpeg(view) if bytes(view[:2]) == b"\xff\xd8" else _other_format(view)
    except (struct.error, IndexError):
        return Header(problem="it ends within its header")
    except LimitError as error:
        return Header(problem=str(error))


def _jpeg(data: memoryview) -> Header:
    """Parse the segments of a JPEG before its first scan.

    Raises:
        IndexError, struct.error: If the file ends before the first scan.
        LimitError: If the file has too much metadata or too many scans.
    """
    position = 2  # of the next segment
    frame = 0  # position of the frame segment
    is_regular = True  # whether the engines decode the header correctly
    is_ycc = True  # whether colours are YCbCr
    has_restarts = has_huffman_tables = False
    exif: list[memoryview] = []
    xmp = b""
    tables = set[int]()
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
            raise IndexError
        if marker in _FRAME_MARKERS:
            if frame:  # libjpeg raises an error; PIL uses the size of the last frame
                return Header(problem="it has several frames")
            frame, frame_marker, frame_size = position, marker, size
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
            is_ycc = data[position + 15] == 1
        position += 2 + size
    else:
        frame = 0  # too many segments
    if len(exif) > MAX_EXIF_SEGMENTS:
        raise LimitError(f"it has more than {MAX_EXIF_SEGMENTS} segments of EXIF, which is the limit")
    if position > MAX_METADATA_BYTES:
        raise LimitError(f"its metadata have more than {MAX_METADATA_BYTES} bytes, which is the limit")
    if not frame:
        return Header(problem="its header is broken")
    if frame_marker not in _DECODABLE:
        return Header(problem=f"it is coded as SOF{frame_marker - _SOF0}, which no decoder reads")
    precision, height, width, channels = _unpack_frame(data, frame + 4)
    components = bytes(data[frame + 10 : frame + 10 + 3 * channels])
    if precision != 8:
        return Header(problem=f"it has {precision} bits per channel")
    if not (height and width and channels):
        return Header(problem=f"its size is {width}x{height}")
    # Many files have bytes after the end marker, so search for the marker from the end of the file.
    if bytes(data[-2:]) != b"\xff\xd9" and bytes(data[position:]).rfind(b"\xff\xd9") < 0:
        return Header(problem="it ends before its end marker")
    sampling = 5
    if channels != 1:
        sampling = _SAMPLING.get(components[1], 0) if components[4::3] == b"\x11\x11" else 0
        is_ycc = is_ycc and components[::3] != b"RGB"
    else:  # the engines decode a grey image with sampling factors other than 1x1, or with restart markers, to wrong pixels
        is_regular = is_regular and components[1] == 0x11 and not has_restarts
    scan = bytes(data[position + 4 : position + 2 + size])
    is_regular = is_regular and has_huffman_tables and frame_size == 8 + 3 * channels
    is_regular = is_regular and (channels == 1 or (channels == 3 and is_ycc))
    if frame_marker == _SOF3:
        format_ = Format.LOSSLESS_JPEG
    elif is_regular and frame_marker == _SOF0 and _is_baseline(components, scan, tables):
        format_ = Format.JPEG
    elif is_regular and frame_marker == _SOF2 and tables.issuperset(components[2::3]) and max(tables) < 16:
        format_ = Format.PROGRESSIVE_JPEG
    else:
        format_ = Format.OTHER_JPEG
    # Decoders reject a second scan after a complete baseline scan, so its data, most of the file, are not searched.
    if format_ != Format.JPEG and next(islice(scans(data, position), MAX_SCANS, None), None) is not None:
        raise LimitError(f"it has more than {MAX_SCANS} scans, which is the limit")
    orientation_ = orientation(b"".join(exif), xmp) if exif or xmp else 1
    stored_channels = 3 if channels == 4 else channels
    label_max = 255 if channels == 1 else 0
    return Header(height, width, channels, stored_channels, format_, sampling, orientation_, label_max=label_max)


def scans(data: memoryview, position: int = 2) -> Iterator[int]:
    """Yield the offset of the segment SOS of each scan of a JPEG, in order, up to the end marker.

    Args:
        data: (bytes,) content of the file.
        position: Offset of a segment.

    Raises:
        IndexError: If the file ends within a segment.
        LimitError: If there are too many segments.

    Cost:
        0.7 µs per KB.
    """
    for _ in range(MAX_SEGMENTS):
        match = _next_marker(data, position)
        if match is None or (marker := data[match.end() - 1]) == _EOI:
            return
        position = match.end()
        if marker == _SOS:
            yield position
        if marker in _SEGMENT_MARKERS:
            position += data[position] << 8 | data[position + 1]
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
        scan[:1] == bytes([len(components) // 3])
        and scan[1:-3:2] == components[::3]
        and scan[-3:] == b"\0\x3f\0"  # all coefficients with all bits
        and not scan[2:-3:2].strip(b"\x00\x01\x10\x11")  # only Huffman tables 0 and 1
        and tables.issuperset(components[2::3])
        and max(tables) < 16
    )


def _other_format(data: memoryview) -> Header:
    """Parse the header of an image that is not a JPEG.

    Raises:
        struct.error: If the file ends within its header.
        LimitError: If the file exceeds a limit.
    """
    if bytes(data[:4]) == b"RIFF" and bytes(data[8:15]) == b"WEBPVP8":
        return _webp(data)
    is_png = bytes(data[:8]) == b"\x89PNG\r\n\x1a\n"
    metadata = containers.of_png(data) if is_png else (b"", b"")
    size_in_codestream = containers.check(data)
    tags = tiff.tags(data) if tiff.is_tiff(bytes(data[:4])) else None
    if tags is not None and (
        tags.bits == 16 or tags.type[:5] in ("int8", "float") or (tags.samples > _MAX_PIL_BANDS and tags.is_plain)
    ):
        return _of_tags(tags)  # PIL reads -1 of int8 as 255
    try:
        image = open_image(data)
        if image is None:
            return Header(problem=UNKNOWN_FORMAT)
        is_deep = image.format == "PNG" and data[24] == 16
        bits = 16 if is_deep else _bits(image)
        if bits > 8 and not is_deep:
            return Header(problem=f"it has {bits} bits per channel")
        width, height = image.size
        bands = _PNG_SAMPLES[data[25]] if is_deep else len(image.getbands())
        if image.format == "TIFF":
            if tags is not None and tags.samples > bands:  # PIL drops the other bands silently
                return _of_tags(tags)
            # PIL rotates TIFFs upright while decoding. ``size`` is the size before or after that, by version, so read the tags.
            width, height = image.tag_v2[tiff.WIDTH], image.tag_v2[tiff.HEIGHT]
            orientation_ = image.getexif().get(tiff.ORIENTATION, 1)
            orientation_ = int(orientation_) if orientation_ in range(1, 9) else 1
        elif is_png:
            orientation_ = orientation(*metadata)
        else:
            exif, xmp = (image.info.get(key) for key in ("exif", "xmp"))
            orientation_ = orientation(exif if isinstance(exif, bytes) else b"", xmp if isinstance(xmp, bytes) else b"")
        if size_in_codestream not in (None, (width, height)):
            return Header(problem=f"its header says {width}x{height} pixels, but its codestream {size_in_codestream}")
        if not (0 < height <= _MAX_SIDE and 0 < width <= _MAX_SIDE):
            return Header(problem=f"its size is {width}x{height}")
        stored_channels = 3 if image.mode in _MODES_CONVERTED_TO_RGB else bands
        if tags is not None and len(tags.pages) != 1:
            stored_channels = _stored_channels(tags) if tags.is_plain and tags.type == "uint8" else 0
        format_ = Format.DEEP if is_deep else Format.OTHER
        type_ = SAMPLE_TYPES.index("uint16" if is_deep else "uint8")
        label_max = (0 if bands > 2 else 255) if is_deep else _label_max(image, data)
        if tags is not None and len(tags.pages) != 1:
            label_max = 0
        return Header(height, width, bands, stored_channels, format_, 0, orientation_, type_, label_max)
    except Exception as error:  # a plugin may raise anything
        if tags is not None and tags.samples > 1:
            return _of_tags(tags)
        return Header(problem=f"PIL cannot read its header: {error}".splitlines()[0])


def _of_tags(tags: tiff.Tags) -> Header:
    """Return the header of a TIFF that PIL does not decode."""
    if tags.type == "int8":
        return Header(problem="its values are int8, which are not supported")
    if tags.type[:5] == "float":
        return Header(
            problem=f"its values are {tags.type}, and files are decoded to 8 or 16 bits: read it in the dataset, for example "
            "with tifffile.imread, and return a tensor"
        )
    if not tags.type:
        return Header(problem=f"it has {tags.bits} bits per channel, or channels of several types")
    if not tags.is_plain:
        return Header(problem=f"its {tags.samples} bands of {tags.bits} bits are neither RGB nor grey with black as 0")
    if tags.samples > tiff.MAX_BANDS:
        return Header(problem=f"it has {tags.samples} bands, more than {tiff.MAX_BANDS}")
    if not (0 < tags.height <= _MAX_SIDE and 0 < tags.width <= _MAX_SIDE and tags.samples > 0):
        return Header(problem=f"its size is {tags.width}x{tags.height}")
    type_ = SAMPLE_TYPES.index(tags.type)
    label_max = 255 if tags.samples == len(tags.pages) == 1 else 0
    stored_channels = _stored_channels(tags)
    return Header(tags.height, tags.width, tags.samples, stored_channels, Format.DEEP, 0, tags.orientation, type_, label_max)


def _stored_channels(tags: tiff.Tags) -> int:
    """Return the number of bands of all pages; 0 if the pages are no bands of one image."""
    return tags.samples * len(tags.pages)


def _webp(data: memoryview) -> Header:
    """Parse the header of a WebP.

    Raises:
        struct.error: If the file ends within its header.
        LimitError: If the file exceeds a limit.
    """
    webp = containers.of_webp(data)
    if webp is None:
        return Header(problem="its header is broken")
    bands = 4 if webp.has_alpha else 3
    return Header(webp.height, webp.width, bands, bands, Format.OTHER, 0, orientation(webp.exif, webp.xmp))


def open_image(data: memoryview) -> Any:
    """Open an image of a format other than JPEG with PIL, without decoding it. Return ``None`` if no format matches.

    ``PIL.Image.open`` is not used, because it tries formats that PIL decodes when it opens them, and limits the number of
    pixels by a global variable. The argument ``max_pixels`` of a stage replaces that limit, which PIL still applies to TIFF and
    WebP.
    """
    from PIL import Image  # here, so that importing gpuaug does not import PIL

    Image.init()
    prefix = bytes(data[:16])
    last_error = None
    for format_name in _PIL_FORMATS:
        factory, accept = Image.OPEN.get(format_name, (None, None))
        if factory is None or accept is None or accept(prefix) is not True:
            continue
        try:
            return factory(io.BytesIO(data), "")
        except Exception as error:  # AVIF and HEIF share signatures
            last_error = error
    if last_error is not None:
        raise last_error
    return None


def _label_max(image: Any, data: memoryview) -> int:
    """Return ``Header.label_max`` of an image that PIL has opened. PIL scales grey of less than 8 bits to 0 … 255."""
    if image.mode not in ("1", "L", "LA", "P", "PA"):
        return 0
    if image.mode == "1":
        return 1
    if image.format == "PPM":
        arguments = image.tile[0][3]
        return 255 if isinstance(arguments, str) else int(arguments[1])  # (mode, largest value)
    if image.mode != "L" or image.format not in ("PNG", "TIFF"):
        return 255
    bits = data[24] if image.format == "PNG" else image.tag_v2.get(tiff.BITS, (1,))[0]
    return int((1 << min(bits, 8)) - 1)


def _bits(image: Any) -> int:
    """Return the number of bits per channel, in the file or in PIL's decoded pixels, whichever is larger."""
    if image.mode.startswith("I;16"):
        return 16
    bits_in_file: tuple[int, ...] = getattr(image, "tag_v2", {}).get(tiff.BITS, (8,))
    return max(32 if image.mode in ("I", "F") else 8, *bits_in_file)
