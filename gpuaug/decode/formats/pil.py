"""Headers of files that PIL opens, without decoding them.

A *band* is a channel of an image, in the terms of PIL.
"""

import io
from typing import Any

from gpuaug.core.encoded import Format
from gpuaug.decode.formats.exif import ORIENTATION, orientation, valid_orientation
from gpuaug.decode.formats.header import MAX_SIDE, Header
from gpuaug.decode.limits import MAX_PYTHON_BYTES, MAX_TEXT_BYTES

_MODES_CONVERTED_TO_RGB = ("P", "PA", "CMYK", "YCbCr", "LAB", "HSV")
"""PIL modes that are converted to RGB even with ``channels=None``."""

_PYTHON_DECODERS = ("bmp_rle", "ppm", "ppm_plain")
"""PIL's names of its decoders in Python: for BMPs with run lengths, and for netpbm as text or with a maximum other than 255."""


def parse(data: memoryview, names: tuple[str, ...], *, bits: int = 8, is_deep: bool = False) -> Header:
    """Return the header of an image that PIL opens.

    Args:
        data: (bytes,) content of the file.
        names: Names of the format in PIL.
        bits: Number of bits per channel in the file.
        is_deep: Whether the caller accepts more than 8 bits per channel.
    """
    try:
        # PIL reads the header of a netpbm file byte by byte, in about a microsecond per byte.
        image = open_image(data[:MAX_TEXT_BYTES] if "PPM" in names else data, names)
        if image is None:
            return Header(problem=f"PIL is built without {' and '.join(names)}")
        depth = max(16 if image.mode.startswith("I;16") else 32 if image.mode in ("I", "F") else 8, bits)
        if depth > 8 and not is_deep:
            return Header(problem=f"it has {depth} bits per channel")
        width, height = image.size
        if not (0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE):
            return Header(problem=f"its size is {width}x{height}")
        # A tile of PIL is (name of the decoder, box, offset, arguments of the decoder).
        if image.tile and image.tile[0][0] in _PYTHON_DECODERS and max(len(data), width * height) > MAX_PYTHON_BYTES:
            reason = "the limit for files that PIL decodes in Python"
            return Header(problem=f"it has more than {MAX_PYTHON_BYTES} bytes or pixels, which is {reason}")
        exif, xmp = (value if isinstance(value := image.info.get(key), bytes) else b"" for key in ("exif", "xmp"))
        orientation_ = orientation(exif, xmp)
        if image.format == "TIFF":  # the orientation by which PIL rotates TIFFs while decoding
            orientation_ = valid_orientation(image.getexif().get(ORIENTATION, 1))
        bands = len(image.getbands())
        stored_channels = 3 if image.mode in _MODES_CONVERTED_TO_RGB else bands
        label_max = _label_max(image, bits)
        # 0: no chroma subsampling of a JPEG.
        return Header(height, width, bands, stored_channels, Format.OTHER, 0, orientation_, label_max=label_max)
    except Exception as error:  # a plugin may raise anything
        return Header(problem=f"PIL cannot read its header: {error}".splitlines()[0])


def open_image(data: memoryview, names: tuple[str, ...]) -> Any:
    """Open an image with PIL, without decoding it. Return ``None`` if PIL supports none of the formats.

    ``PIL.Image.open`` is not used, because it tries formats whose images PIL decodes on opening, and limits the number of
    pixels by a global variable. The argument ``max_pixels`` of a stage replaces this limit, but PIL still applies the limit to
    TIFF and WebP.
    """
    from PIL import Image  # here, so that importing gpuaug does not import PIL

    Image.init()
    factories = [Image.OPEN[name][0] for name in names if name in Image.OPEN]
    for factory in factories:
        try:
            return factory(io.BytesIO(data), "")
        except Exception:  # AVIF and HEIF share signatures
            if factory is factories[-1]:
                raise
    return None


def _label_max(image: Any, bits: int) -> int:
    """Return ``Header.label_max`` of an image that PIL has opened. PIL scales grey of less than 8 bits to 0 … 255."""
    if image.mode == "1":
        return 1
    if image.mode == "L" and image.format == "PPM":
        arguments = image.tile[0][3]  # of PIL's decoder
        return 255 if isinstance(arguments, str) else int(arguments[1])  # (mode, largest value)
    if image.mode == "L":
        return int((1 << min(bits, 8)) - 1)
    return 255 if image.mode in ("LA", "P", "PA") else 0
