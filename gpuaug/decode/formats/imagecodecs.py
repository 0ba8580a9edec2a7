"""Decoding of 16-bit PNGs and of TIFFs with the library imagecodecs, without conversion of the stored values.

Pixels decoded *as stored* have the channels and the type in the file.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.decode.layout import ImageInfo, Layout


@cache
def imagecodecs() -> Any:
    """Return the module ``imagecodecs``, or ``None`` if it is not installed or was built without libspng."""
    try:
        import imagecodecs

        return imagecodecs if imagecodecs.SPNG.available else None
    except (ImportError, AttributeError):
        return None


def decode_as_stored(layout: Layout, info: ImageInfo, decode: Callable[[Any], NDArray[Any]]) -> NDArray[Any] | str:
    """Return pixels (h, w, C) without conversion, or the reason why they cannot be decoded.

    Args:
        layout: Layout of the batch.
        info: Header fields of the image.
        decode: Function of the module imagecodecs that returns pixels (h, w, C).
    """
    library = imagecodecs()
    if library is None:
        return 'imagecodecs, which decodes it, is not installed: pip install "gpuaug[decode]"'
    pixels = decode(library)
    shape = (info.height, info.width, layout.channels)
    dtype = np.dtype(str(layout.dtype).removeprefix("torch."))
    if pixels.shape != shape or pixels.dtype != dtype:
        return f"it decodes to {pixels.dtype} {pixels.shape}, but its header says {dtype} {shape}"
    return pixels
