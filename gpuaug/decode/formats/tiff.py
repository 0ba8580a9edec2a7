"""TIFF: parser of the tags, which finds the pages that are bands of one image.

A *band* is a channel of an image, and a *page* is one of the images in a TIFF. Pages may be bands of one image.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuaug.core.encoded import SAMPLE_TYPES, Format
from gpuaug.decode.formats import pil
from gpuaug.decode.formats.exif import ORIENTATION, is_tiff, pages, valid_orientation
from gpuaug.decode.formats.header import MAX_SIDE, Header, ImageFormat
from gpuaug.decode.formats.imagecodecs import decode_as_stored
from gpuaug.decode.layout import ImageInfo, Layout
from gpuaug.decode.limits import MAX_SEGMENTS, MAX_TILE_BYTES, MAX_TILES, LimitError

SUBFILE_TYPE, WIDTH, HEIGHT, BITS, PHOTOMETRIC, STRIP_OFFSETS, SAMPLES = 254, 256, 257, 258, 262, 273, 277
ROWS_PER_STRIP, PLANAR, TILE_WIDTH, TILE_HEIGHT, TILE_OFFSETS, SAMPLE_FORMAT = 278, 284, 322, 323, 324, 339
"""Numbers of tags. A *sample* of a TIFF is a value of one band: ``SAMPLES`` is the number of bands of a page."""

_COUNTED_TAGS = (STRIP_OFFSETS, TILE_OFFSETS)
"""Tags whose values are counted, not read."""

MAX_BANDS = 255
"""Maximum number of bands of an image, over all pages: the maximum that ``HEADER`` can store."""

_TAG_LIMITS = {
    **dict.fromkeys([BITS, SAMPLE_FORMAT], MAX_BANDS),  # tags with a number per band
    **dict.fromkeys(_COUNTED_TAGS, 0),
    **dict.fromkeys([SUBFILE_TYPE, WIDTH, HEIGHT, PHOTOMETRIC, ORIENTATION, SAMPLES, ROWS_PER_STRIP, PLANAR], 1),
    **dict.fromkeys([TILE_WIDTH, TILE_HEIGHT], 1),
}
"""Number of each tag that is read → maximum number of values to read; 0 for ``_COUNTED_TAGS``."""

_REDUCED_OR_MASK = 1 | 4
"""Bits of ``SUBFILE_TYPE`` of a page that is an overview of another page, or a mask."""

_PLAIN_PHOTOMETRICS = frozenset([1, 2])
"""Photometric interpretations whose stored values need no conversion: grey with black as 0, and RGB."""

_TYPES = {(8, 1): "uint8", (8, 2): "int8", (16, 1): "uint16", (16, 2): "int16", (32, 3): "float32", (64, 3): "float64"}
"""(bits, sample format) of a band → dtype. Sample format 1 is unsigned, 2 is signed, 3 is floating."""


class Tags(NamedTuple):
    """Tags of the first page of a TIFF that affect decoding, and the pages that hold bands of the image."""

    height: int
    width: int
    samples: int
    """Number of bands of a page (``SamplesPerPixel``); not samples of a dataset."""
    bits: int
    """Number of bits of the band with the most bits."""
    orientation: int
    """EXIF orientation, 1 to 8."""
    type: str
    """dtype of the bands; empty for types that are not in ``_TYPES``."""
    is_plain: bool
    """Whether the values in the file need no conversion: RGB, or grey with black as 0."""
    is_planar: bool
    """Whether each band is stored as a plane, not interleaved with the other bands."""
    pages: tuple[int, ...]
    """Indices of the pages that are bands of the image: the first page, and all other pages except overviews and masks.

    Empty if these pages differ in size or type, if they have more than ``MAX_BANDS`` bands, or if they form a loop.
    """

    @property
    def stored_channels(self) -> int:
        """Number of bands of all pages; 0 if the pages are not bands of one image."""
        return self.samples * len(self.pages)


def tags(data: memoryview) -> Tags | None:
    """Read the tags of the pages. Return ``None`` if tags of the first page cannot be read, or lack the width or height.

    Args:
        data: (bytes,) content of the file.

    Raises:
        LimitError: If a page exceeds a limit, or has a tag twice: libraries differ in which occurrence they read.
    """
    first_page: Tags | None = None
    band_pages: list[int] = []
    tags_allowed = 16 * MAX_SEGMENTS  # maximum number of tags over all pages
    for number, (values, count) in enumerate(pages(data, _TAG_LIMITS)):
        page = _tags_of_page(values)
        first_page = first_page or page
        if first_page is None:
            return None
        tags_allowed -= 1 + count
        is_band = number == 0 or not values.get(SUBFILE_TYPE, (0,))[0] & _REDUCED_OR_MASK
        band_pages += [number] if is_band else []
        # ``page`` and ``first_page`` both have empty ``pages`` here.
        if (is_band and page != first_page) or tags_allowed < 0 or len(band_pages) * first_page.samples > MAX_BANDS:
            return first_page
    return first_page and first_page._replace(pages=tuple(band_pages))  # ``None`` if the file has no page


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
    sample_formats = values.get(SAMPLE_FORMAT, (1,))
    band_types = set(zip(bits, sample_formats * len(bits) if len(sample_formats) == 1 else sample_formats, strict=False))
    is_planar = samples > 1 and values.get(PLANAR, (1,))[0] == 2
    tile_width = values.get(TILE_WIDTH, (width,))[0]
    tile_height = values.get(TILE_HEIGHT, values.get(ROWS_PER_STRIP, (height,)))[0]
    tiles_needed = -(-width // max(tile_width, 1)) * -(-height // max(tile_height, 1)) * (samples if is_planar else 1)
    most_tiles = min(max(tiles_needed, MAX_SEGMENTS), MAX_TILES)
    if max(values.get(tag, (0,))[0] for tag in _COUNTED_TAGS) > most_tiles:
        raise LimitError(f"it has more than {most_tiles} strips or tiles, which is the limit for its size")
    tile_pixels = values.get(TILE_WIDTH, (0,))[0] * values.get(TILE_HEIGHT, (0,))[0]
    if tile_pixels > height * width and tile_pixels * samples * max(bits) > 8 * MAX_TILE_BYTES:
        raise LimitError(f"its tiles have more than {MAX_TILE_BYTES} bytes, which is the limit, and more than the image")
    return Tags(
        height,
        width,
        samples,
        max(bits),
        valid_orientation(values.get(ORIENTATION, (1,))[0]),
        _TYPES.get(band_types.pop(), "") if len(band_types) == 1 else "",
        values.get(PHOTOMETRIC, (1,))[0] in _PLAIN_PHOTOMETRICS,
        is_planar,
        (),
    )


def _parse(data: memoryview) -> Header:
    """Parse the header: by the tags if PIL cannot decode the file, or would drop bands."""
    first_page = tags(data)
    if first_page is None:
        return Header(problem="its header is broken")
    # PIL reads -1 of int8 as 255. ``type[:5]`` is "float" for float32 and float64.
    if first_page.bits == 16 or first_page.type[:5] in ("int8", "float"):
        return _header_of(first_page)
    header = pil.parse(data, FORMAT.names, bits=first_page.bits)
    if first_page.samples > max(header.channels, 1):  # PIL raises an error, or drops bands after the fourth
        return _header_of(first_page)
    if header.problem:
        return header
    # PIL rotates TIFFs upright while decoding. Its ``size`` is the size before or after the rotation, by version of PIL.
    header = header._replace(height=first_page.height, width=first_page.width)
    if len(first_page.pages) == 1:
        return header
    is_decodable = first_page.is_plain and first_page.type == "uint8"
    return header._replace(stored_channels=first_page.stored_channels if is_decodable else 0, label_max=0)


def _header_of(page: Tags) -> Header:
    """Return the header of a TIFF that PIL does not decode. ``page``: tags of the first page."""
    if page.type == "int8":
        return Header(problem="its values are int8, which are not supported")
    if page.type[:5] == "float":
        return Header(
            problem=f"its values are {page.type}, and files are decoded to 8 or 16 bits: read it in the dataset, for example "
            "with tifffile.imread, and return a tensor"
        )
    if not page.type:
        return Header(problem=f"it has {page.bits} bits per channel, or channels of several types")
    if not page.is_plain:
        return Header(problem=f"its {page.samples} bands of {page.bits} bits are neither RGB nor grey with black as 0")
    if page.samples > MAX_BANDS:
        return Header(problem=f"it has {page.samples} bands, more than {MAX_BANDS}")
    if not (0 < page.height <= MAX_SIDE and 0 < page.width <= MAX_SIDE and page.samples > 0):
        return Header(problem=f"its size is {page.width}x{page.height}")
    type_ = SAMPLE_TYPES.index(page.type)
    label_max = 255 if page.samples == len(page.pages) == 1 else 0
    # 0: no chroma subsampling of a JPEG.
    return Header(
        page.height, page.width, page.samples, page.stored_channels, Format.DEEP, 0, page.orientation, type_, label_max
    )


def _decode(file: NDArray[np.uint8], layout: Layout, info: ImageInfo, _buffer: Any) -> NDArray[Any] | str | None:
    """Decode all bands of a TIFF without conversion.

    Returns ``None`` for a TIFF of 8 bits of one page with 1 or 3 channels, which PIL decodes as stored, except for palettes and
    CMYK. PIL changes TIFFs of 8 bits with alpha: it divides colours by associated alpha, and loses alpha that is stored
    separately.
    """
    file_tags = tags(file.data) if layout.as_stored or info.format == Format.DEEP else None
    page_numbers = (0,) if file_tags is None else file_tags.pages
    if info.format != Format.DEEP and (not layout.as_stored or (len(page_numbers) == 1 and layout.channels in (1, 3))):
        return None

    def decode_pages(library: Any) -> NDArray[Any]:
        pages = [np.atleast_3d(library.tiff_decode(file, index=number)) for number in page_numbers]
        if file_tags is not None and file_tags.is_planar:
            pages = [page.transpose(1, 2, 0) for page in pages]
        return pages[0] if len(pages) == 1 else np.concatenate(pages, 2)

    return decode_as_stored(layout, info, decode_pages)


FORMAT = ImageFormat(("TIFF",), is_tiff, _parse, _decode)
