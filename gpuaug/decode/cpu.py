"""Decoding on the CPU: simplejpeg for JPEGs where it is installed, PIL for all else."""

import io
import os
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.core.encoded import Format
from gpuaug.decode.layout import Layout
from gpuaug.feed.image_input import prepared, unpacked


@cache
def simplejpeg() -> Any:
    """The module, or ``None`` where it is not installed. Imported here, so that importing gpuaug does not import it."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def version() -> str:
    """The decoder and its version."""
    import PIL

    module = simplejpeg()
    return f"simplejpeg {module.__version__}" if module is not None else f"PIL {PIL.__version__}"


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decode(file: NDArray[np.uint8], layout: Layout, index: int, room: NDArray[np.uint8]) -> str | None:
    """Decode one image, upright and made smaller as its layout says, into ``room`` (H, W, C).

    Returns:
        How the file is other than its header says, or ``None``.

    Raises:
        Exception: Whatever the decoder raises for a file that it cannot read.
    """
    header, scale = layout.headers[index], int(layout.scales[index])
    height, width = (-(-layout.stored[index] // scale)).tolist()
    orientation = int(layout.orientations[index])
    straight = room if orientation == 1 else np.empty((height, width, layout.channels), np.uint8)
    is_turbos = simplejpeg() is not None and header["format"] != Format.OTHER and header["channels"] in (1, 3)
    made = _by_turbo(file, straight, smaller=scale > 1) if is_turbos else None
    if made is None:
        made = straight = _by_pil(file, layout.channels, scale)
    if made.shape != (height, width, layout.channels):
        return f"its {made.shape[1]}x{made.shape[0]} pixels are not the {width}x{height} of its header"
    if straight is not room:
        room[:] = _turned(straight, orientation)
    return None


def _by_turbo(file: NDArray[np.uint8], room: NDArray[np.uint8], *, smaller: bool) -> NDArray[np.uint8] | None:
    """The image in ``room``, or ``None`` if there is anything wrong with the file, or with its size."""
    height, width, channels = room.shape
    size = {"min_height": height, "min_width": width} if smaller else {}
    try:
        # Unless strict, it takes an error behind a warning for a warning, and leaves memory as it was. PIL tells them apart.
        made: NDArray[np.uint8] = simplejpeg().decode_jpeg(
            file.data, "RGB" if channels == 3 else "GRAY", buffer=room, strict=True, **size
        )
    except ValueError:
        return None
    return made


def _by_pil(file: NDArray[np.uint8], channels: Any, scale: int) -> NDArray[np.uint8]:
    from PIL import Image  # here, so that importing gpuaug does not import PIL

    with Image.open(io.BytesIO(file.data)) as image:
        if image.format == "JPEG":
            grey = channels == 1 and image.mode in ("L", "RGB", "YCbCr")
            # Grey is the luma that the file has, as the engines give it.
            # PIL takes the smallest image that is not smaller than this, so sides are rounded down; it rounds them up.
            image.draft("L" if grey else image.mode, (max(image.width // scale, 1), max(image.height // scale, 1)))
        return unpacked(prepared(image, channels, convert=True, where="the file"))


def _turned(image: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    if orientation in (3, 4, 6, 7):
        image = image[::-1]
    if orientation in (2, 3, 7, 8):
        image = image[:, ::-1]
    return image.transpose(1, 0, 2) if orientation > 4 else image
