"""Headers of encoded images: a JPEG's markers are parsed here; PIL opens every other format, without decoding it."""

import io
import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuaug.core.encoded import SAMPLE_TYPES, Format
from gpuaug.decode import tiff
from gpuaug.decode.exif import of_png, orientation


class Header(NamedTuple):
    """Metadata parsed from an image file.

    Fields follow the order of ``gpuaug.core.encoded.HEADER`` after its first two, ``start`` and ``length``;
    ``problem`` is extra.
    """

    height: int = 0
    width: int = 0
    channels: int = 0
    stored: int = 0
    """Channels of the image decoded as stored: palettes and CMYK are RGB."""
    format: Format = Format.UNREADABLE
    sampling: int = 0
    """JPEG chroma subsampling as 4*h + v, h and v being the luma component's horizontal and vertical sampling factors.

    5 = 4:4:4 or grey, 9 = 4:2:2, 10 = 4:2:0, 6 = 4:4:0. 0 if a chroma factor is not 1, or not a JPEG.
    """
    orientation: int = 1
    """EXIF orientation, 1 to 8."""
    type: int = 0
    """Type of the pixels, an index of ``SAMPLE_TYPES``."""
    problem: str = ""
    """Why the image cannot be decoded, as a clause; empty if it can be."""


_MOST_SEGMENTS = 4096
"""Most segments before the first scan. Photographs have about ten, and one more for each 64 KB of embedded metadata."""

_SEGMENT = struct.Struct(">BBH").unpack_from
_FRAME = struct.Struct(">BHHB").unpack_from

_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0 to SOF15, without DHT, JPG and DAC between them
_SOF0, _SOF2, _SOF3, _DHT, _SOS, _EOI, _DQT, _DRI, _APP1, _APP14 = 0xC0, 0xC2, 0xC3, 0xC4, 0xDA, 0xD9, 0xDB, 0xDD, 0xE1, 0xEE
_DECODABLE = frozenset([_SOF0, 0xC1, _SOF2, _SOF3, 0xC9, 0xCA])
"""Frames that libjpeg-turbo decodes: baseline, extended, progressive, lossless; extended and progressive arithmetic."""

_ALONE = frozenset([0x00, 0x01, *range(0xD0, 0xD9)])
"""Markers without a length, which are not allowed before a scan."""

_SAMPLING = {h << 4 | v: 4 * h + v for h in range(1, 5) for v in range(1, 5)}
"""``Header.sampling`` by the luma component's byte of sampling factors."""

_PIL_FORMATS = ("PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF", "JPEG2000", "AVIF", "HEIF")
"""Formats that PIL or a plugin opens without decoding. PIL decodes others at once, runs a program, or checks no signature."""

_MOST_SIDE = 2**31 - 1
"""Pixels of the longest side: the table of headers has 32 bits for it."""

_MOST_OF_PIL = 4
"""Bands of a grey or RGB image that PIL decodes, alpha included."""

_MOST_BANDS = 255
"""Bands of an image: the table of headers has 8 bits for their number."""

_PNG_SAMPLES = {0: 1, 2: 3, 4: 2, 6: 4}
"""Channels of a PNG of 16 bits by its colour type."""

_CONVERTED = ("P", "PA", "CMYK", "YCbCr", "LAB", "HSV")
"""Modes of PIL whose images become RGB where they are decoded as stored."""

_XMP_NAME = b"http://ns.adobe.com/xap/1.0/\0"


def parse(data: bytes | bytearray | memoryview | NDArray[np.uint8]) -> Header:
    """Read the header of an encoded image.

    Args:
        data: (bytes,) the whole file.

    Returns:
        The header. For any bytes that are no image to decode, the format is ``UNREADABLE`` and ``problem`` says why.

    Cost:
        About 6 µs for a JPEG, 10 with EXIF. For any other format PIL opens the file: 50 to 200 µs.

    Examples:
        >>> parse(b"").format, parse(b"").problem
        (<Format.UNREADABLE: 0>, 'it is empty')
    """
    view = memoryview(data)  # type: ignore[arg-type]
    if not len(view):
        return Header(problem="it is empty")
    if bytes(view[:2]) != b"\xff\xd8":
        return _other(view)
    try:
        return _jpeg(view)
    except (struct.error, IndexError):
        return Header(problem="it ends within its header")


def _jpeg(data: memoryview) -> Header:
    """Parse the segments before the first scan.

    Raises:
        IndexError, struct.error: If the file ends before it.
    """
    at, frame, regular, ycc, restarts, huffman = 2, 0, True, True, False, False
    exif = b""
    xmp = b""
    tables = set[int]()
    for _ in range(_MOST_SEGMENTS):
        first, marker, size = _SEGMENT(data, at)
        if first != 0xFF or marker in _ALONE:  # libjpeg looks for the next marker
            at += 1 + max(bytes(data[at + 1 : at + 65536]).find(b"\xff"), 0)
            regular = False
            continue
        if marker == 0xFF:  # a byte of padding
            at += 1
            continue
        if marker == _SOS:
            break
        if marker == _EOI:
            raise IndexError
        if marker in _FRAMES:
            if frame:  # libjpeg refuses it; PIL takes the size of the last one
                return Header(problem="it has several frames")
            frame, frame_marker, frame_size = at, marker, size
        elif marker == _DQT:
            tables |= _quantization_tables(data[at + 4 : at + 2 + size])
        elif marker == _DHT:
            huffman = True
        elif marker == _DRI:
            restarts = bytes(data[at + 4 : at + 6]) != b"\0\0"
        elif marker == _APP1:
            if bytes(data[at + 4 : at + 10]) == b"Exif\0\0":  # the first one, and what others add to it
                exif += data[at + (10 if exif else 4) : at + 2 + size]
            elif bytes(data[at + 4 : at + 4 + len(_XMP_NAME)]) == _XMP_NAME:
                xmp = bytes(data[at + 4 : at + 2 + size])
        elif marker == _APP14 and bytes(data[at + 4 : at + 9]) == b"Adobe":
            ycc = data[at + 15] == 1
        at += 2 + size
    else:
        frame = 0
    if not frame:
        return Header(problem="its header is broken")
    if frame_marker not in _DECODABLE:
        return Header(problem=f"it is coded as SOF{frame_marker - _SOF0}, which no decoder reads")
    precision, height, width, channels = _FRAME(data, frame + 4)
    components = bytes(data[frame + 10 : frame + 10 + 3 * channels])
    if precision != 8:
        return Header(problem=f"it has {precision} bits a channel")
    if not (height and width and channels):
        return Header(problem=f"its size is {width}x{height}")
    # Bytes after the end marker are common: search backwards for it.
    if bytes(data[-2:]) != b"\xff\xd9" and bytes(data[at:]).rfind(b"\xff\xd9") < 0:
        return Header(problem="it ends before its end marker")
    sampling = 5
    if channels != 1:
        sampling = _SAMPLING.get(components[1], 0) if components[4::3] == b"\x11\x11" else 0
        ycc = ycc and components[::3] != b"RGB"
    else:  # engines decode a grey image with other factors, or with restart markers, to garbage
        regular = regular and components[1] == 0x11 and not restarts
    scan = bytes(data[at + 4 : at + 2 + size])
    regular = regular and huffman and frame_size == 8 + 3 * channels and (channels == 1 or (channels == 3 and ycc))
    if frame_marker == _SOF3:
        form = Format.LOSSLESS_JPEG
    elif regular and frame_marker == _SOF0 and _is_baseline(components, scan, tables):
        form = Format.JPEG
    elif regular and frame_marker == _SOF2 and tables.issuperset(components[2::3]) and max(tables) < 16:
        form = Format.PROGRESSIVE_JPEG
    else:
        form = Format.OTHER_JPEG
    turned = orientation(exif, xmp) if exif or xmp else 1
    return Header(height, width, channels, 3 if channels == 4 else channels, form, sampling, turned)


def _quantization_tables(content: memoryview) -> set[int]:
    """Index of each table that a segment DQT defines, plus 16 or more for a table of 16 bits."""
    found = set[int]()
    at = 0
    while at < len(content):
        found.add(content[at])
        at += 65 if content[at] < 16 else 129
    return found


def _is_baseline(components: bytes, scan: bytes, tables: set[int]) -> bool:
    """Whether a scan is all of a baseline image: what engines are known to decode.

    Args:
        components: Identifier, sampling factors and quantization table of each component.
        scan: Content of the segment SOS.
        tables: Quantization tables before it.
    """
    return (
        scan[:1] == bytes([len(components) // 3])
        and scan[1:-3:2] == components[::3]
        and scan[-3:] == b"\0\x3f\0"  # all coefficients, in all their bits
        and not scan[2:-3:2].strip(b"\x00\x01\x10\x11")  # Huffman tables 0 and 1
        and tables.issuperset(components[2::3])
        and max(tables) < 16
    )


def _other(data: memoryview) -> Header:
    found = tiff.tags(data) if tiff.is_tiff(bytes(data[:4])) else None
    if found is not None and (found.bits == 16 or (found.samples > _MOST_OF_PIL and found.is_plain)):
        return _of_tags(found)
    try:
        image = opened(data)
        if image is None:
            return Header(problem="it is no image that PIL knows")
        deep = image.format == "PNG" and data[24] == 16
        bits = 16 if deep else _bits(image)
        if bits > 8 and not deep:
            return Header(problem=f"it has {bits} bits a channel")
        width, height = image.size
        bands = _PNG_SAMPLES[data[25]] if deep else len(image.getbands())
        if image.format == "TIFF":
            if found is not None and found.samples > bands:  # PIL leaves them out without a word
                return _of_tags(found)
            # PIL turns it upright as it decodes; in some versions ``size`` is the stored one.
            width, height = image.tag_v2[tiff.WIDTH], image.tag_v2[tiff.HEIGHT]
            turned = image.getexif().get(tiff.ORIENTATION, 1)
            turned = int(turned) if turned in range(1, 9) else 1
        elif image.format == "PNG":
            turned = orientation(*of_png(data))
        else:
            metadata = [image.info.get(key) for key in ("exif", "xmp")]
            turned = orientation(*(each if isinstance(each, bytes) else b"" for each in metadata))
        if not (0 < height <= _MOST_SIDE and 0 < width <= _MOST_SIDE):
            return Header(problem=f"its size is {width}x{height}")
        stored = 3 if image.mode in _CONVERTED else bands
        form = Format.DEEP if deep else Format.OTHER
        return Header(height, width, bands, stored, form, 0, turned, SAMPLE_TYPES.index("uint16") if deep else 0)
    except Exception as error:  # a plugin may raise anything
        if found is not None and found.samples > 1:
            return _of_tags(found)
        return Header(problem=f"PIL cannot read its header: {error}".splitlines()[0])


def _of_tags(found: tiff.Tags) -> Header:
    """The header of a TIFF that PIL does not decode."""
    if not found.type:
        return Header(problem=f"it has {found.bits} bits a channel, or channels of several types")
    if not found.is_plain:
        return Header(problem=f"its {found.samples} bands of {found.bits} bits are neither RGB nor grey with black as 0")
    if found.samples > _MOST_BANDS:
        return Header(problem=f"it has {found.samples} bands, more than {_MOST_BANDS}")
    if not (0 < found.height <= _MOST_SIDE and 0 < found.width <= _MOST_SIDE and found.samples):
        return Header(problem=f"its size is {found.width}x{found.height}")
    kind = SAMPLE_TYPES.index(found.type)
    return Header(found.height, found.width, found.samples, found.samples, Format.DEEP, 0, found.orientation, kind)


def opened(data: memoryview) -> Any:
    """An image of another format than JPEG as PIL opens it, undecoded, or ``None``.

    ``PIL.Image.open`` is not used: it tries formats that PIL decodes at once, warns of large images and refuses larger ones. A
    stage has a limit of its own, and PIL's limit is a global variable, which holds for TIFF and WebP all the same.
    """
    from PIL import Image  # here, so that importing gpuaug does not import PIL

    Image.init()
    prefix = bytes(data[:16])
    failed = None
    for kind in _PIL_FORMATS:
        factory, accept = Image.OPEN.get(kind, (None, None))
        if factory is None or accept is None or accept(prefix) is not True:
            continue
        try:
            return factory(io.BytesIO(data), "")
        except Exception as error:  # AVIF and HEIF share signatures
            failed = error
    if failed is not None:
        raise failed
    return None


def _bits(image: Any) -> int:
    """Bits per channel: the larger of PIL's decoded pixels and the stored ones."""
    if image.mode.startswith("I;16"):
        return 16
    stored: tuple[int, ...] = getattr(image, "tag_v2", {}).get(tiff.BITS, (8,))
    return max(32 if image.mode in ("I", "F") else 8, *stored)
