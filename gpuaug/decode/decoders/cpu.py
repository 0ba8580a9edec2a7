"""Decoding on the CPU.

A batch holds a *window* of each image: the part that the next stage reads, or the whole image. ``Loops`` (``loops.py``)
decodes PNGs, WebPs, and windows of JPEGs; outside the window, libturbojpeg skips the image. simplejpeg decodes whole JPEGs, and
PIL decodes all other files. If the batch is on a GPU, threads decode into *staging* memory on the host, which is then copied;
otherwise they decode directly into the batch.
"""

import io
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import compress, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.core.encoded import Format, is_among
from gpuaug.core.streams import Event
from gpuaug.decode.decoders import turbojpeg
from gpuaug.decode.decoders.base import HostDecoder, Resources
from gpuaug.decode.decoders.loops import WINDOW_FORMATS, Loops
from gpuaug.decode.formats import pil
from gpuaug.decode.formats.header import ImageFormat
from gpuaug.decode.formats.imagecodecs import imagecodecs
from gpuaug.decode.formats.jpeg import simplejpeg
from gpuaug.decode.headers import format_of
from gpuaug.decode.layout import ImageInfo, Layout, Work, rotated_upright
from gpuaug.feed.image_input import as_array, copy_pixels, stored_values

_JPEGS = (Format.JPEG, Format.PROGRESSIVE_JPEG, Format.OTHER_JPEG, Format.LOSSLESS_JPEG)

COSTS = np.full(len(Format), 8)
"""Relative decoding time per pixel, by ``Format``, to decode the slowest files first. 8 for the formats that are not JPEG."""
COSTS[list(_JPEGS)] = 1, 3, 3, 6

_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
"""Number of channels → PIL mode. 2 and 4 are only for images that are decoded as stored in their files."""

MAX_CHUNK = 8
"""Maximum number of images that a thread takes at once, and decodes in one call of a loop.

With 8 instead of 4, 14 threads decoded 11,100 instead of 10,300 images of 0.2 megapixels per second (2026-11-27).
"""

_INVERSE_ORIENTATIONS = {6: 8, 8: 6}
"""EXIF orientation → its inverse, for the orientations that are not their own inverse."""


class Cpu(HostDecoder):
    """Decode images on host threads. Each image is decoded by the fastest library whose pixels equal PIL's."""

    name = "cpu"
    files = "all other files"  # that no decoder in an earlier row of ``DecoderTable`` decodes

    @property
    def version(self) -> str:
        """Installed libraries and their versions. PIL is always installed."""
        import PIL

        modules = [("simplejpeg", simplejpeg()), ("imagecodecs", imagecodecs()), ("PIL", PIL)]
        versions = [f"{name} {module.__version__}" for name, module in modules if module is not None]
        return ", ".join([*versions, *([turbojpeg.version()] if turbojpeg.library() is not None else [])])

    def enlarge(self, windows: NDArray[np.int64], table: NDArray[np.void], scales: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the windows. Windows of JPEGs are enlarged to regions that libturbojpeg can decode directly into the batch.

        Enlarged windows need no intermediate buffer and no copy. For a copy, a thread acquires the interpreter's lock once more
        per image: 16 cores decoded 8,700 images per second with the copy, and 12,100 without.
        """
        selected = is_among(table["format"], WINDOW_FORMATS) & is_among(table["channels"], (1, 3)) & (table["sampling"] > 0)
        if turbojpeg.library() is not None:
            windows[selected] = turbojpeg.regions(windows[selected], table[selected], scales[selected])
        return windows

    def begin(self, work: Work[Layout], indices: NDArray[Any], resources: Resources) -> Callable[[], Event]:
        """Start to decode the images, slowest first, so that all threads finish at about the same time."""
        cost = work.layout.stored.prod(1)[indices] * COSTS[work.layout.headers["format"][indices]]
        pending = iter(indices[np.argsort(-cost)].tolist())
        threads = resources.pools.threads
        loops = Loops(work, indices)
        # If there are few images, the chunks are smaller, so that all threads take part.
        chunk_size = min(-(-len(indices) // threads), MAX_CHUNK) if loops else 1
        # ``infos`` is read before the threads start: several threads could compute the cached property at the same time.
        function = partial(_decode_pending, work, work.layout.infos, loops, chunk_size)
        return self.share(work, indices, resources, min(-(-len(indices) // chunk_size), threads), function, pending)


def decode(file: NDArray[np.uint8], layout: Layout, info: ImageInfo, out: NDArray[np.uint8]) -> str:
    """Decode the window of one image into ``out``, upright and downsampled by the scale of the image.

    The pixels of every library must equal PIL's bit for bit. If a faster library rejects a file, PIL decodes it, so that PIL
    decides whether the file is damaged.

    Args:
        file: (bytes,) encoded image.
        layout: Layout of the batch.
        info: Header fields and window of the image.
        out: (h, w, C) view of the window in the buffer of the batch. Its content is undefined after a failure.

    Returns:
        Reason why the file cannot be decoded; an empty string on success.
    """
    orientation, scale = info.orientation, info.scale
    format_ = format_of(file.data)
    assert format_ is not None
    height, width = -(-info.height // scale), -(-info.width // scale)
    shape = (height, width, layout.channels)
    try:
        buffer = out if orientation == 1 and out.shape == shape else np.empty(shape, out.dtype)
        # Decoded pixels, or the reason why the file cannot be decoded, or None if PIL has to decode the file.
        pixels = format_.decode(file, layout, info, buffer) if format_.decode is not None else None
        if isinstance(pixels, str):
            return pixels
        if pixels is None:
            pixels = _decode_with_pil(file, format_, layout.channels, info)
    except Exception as error:  # a library may raise any error for a damaged file
        return f"{type(error).__name__}: {error}"
    if pixels.shape != shape:
        return f"it decodes to {pixels.shape[1]}x{pixels.shape[0]} pixels, but its header says {width}x{height}"
    if pixels is not out:
        window = rotated_upright(pixels, orientation)[info.top :, info.left :][: info.window_height, : info.window_width]
        copy_pixels(window, out)
    return ""


def _decode_with_pil(file: NDArray[np.uint8], format_: ImageFormat, channels: Any, info: ImageInfo) -> NDArray[np.uint8]:
    """Return an image (h, w, C), decoded with PIL and downsampled, in the orientation of its file.

    Args:
        file: (bytes,) encoded image. If it contains several images, the first is decoded.
        format_: Format of the file.
        channels: Number of channels of the result.
        info: Header fields and window of the image.
    """
    from PIL import JpegImagePlugin  # here, so that importing gpuaug does not import PIL

    # Not PIL.Image.open, which opens the JPEGs of many phones as MPO, a format with several images.
    open_jpeg = JpegImagePlugin.JpegImageFile
    is_jpeg = info.format in _JPEGS
    with open_jpeg(io.BytesIO(file.data)) if is_jpeg else pil.open_image(file.data, format_.names) as image:
        if is_jpeg and info.format != Format.LOSSLESS_JPEG:  # libjpeg-turbo does not convert or downsample lossless JPEGs
            grey = channels == 1 and image.mode in ("L", "RGB", "YCbCr")
            # ``draft`` makes libjpeg convert and downsample. "L" reads the luma in the file, as the JPEG engines of a card do.
            # PIL picks the smallest scaled size that is at least the requested size, and rounds it up. The requested sides are
            # fractions: rounded up, a side with fewer pixels than the scale would make PIL pick a smaller scale.
            sides: Any = (image.width / info.scale, image.height / info.scale)
            image.draft("L" if grey else image.mode, sides)
        if info.label_max:  # with ``channels="labels"``
            pixels = stored_values(image, info.label_max)
        else:
            mode = _MODES[channels]
            pixels = as_array(image if image.mode == mode else image.convert(mode))
        if image.format == "TIFF":  # PIL rotates TIFFs upright while decoding, which is undone here
            pixels = rotated_upright(pixels, _INVERSE_ORIENTATIONS.get(info.stored_orientation, info.stored_orientation))
        return pixels


def _decode_pending(work: Work[Layout], infos: list[ImageInfo], loops: Loops, chunk_size: int, pending: Iterator[int]) -> None:
    """Decode images into host memory until ``pending`` is exhausted. Runs on several threads for one batch.

    Args:
        work: Decoding task of the batch.
        infos: ``Layout.infos`` of the batch.
        loops: Loops that decode images without the interpreter's lock.
        chunk_size: Number of images that a thread takes at once.
        pending: Indices of the images that no thread has started, shared by all threads.
    """
    channels = work.layout.channels
    data, starts = work.host
    values, files = data.numpy(), work.encoded.data.numpy()
    while chunk := list(islice(pending, chunk_size)):
        if work.is_abandoned:
            return
        for index in compress(chunk, ~loops.decode(chunk)):  # the images that no loop has decoded
            if work.is_abandoned:
                return
            info = infos[index]
            shape = (info.window_height, info.window_width, channels)
            pixels = values[int(starts[index]) :][: math.prod(shape)].reshape(shape)
            if problem := decode(files[info.start : info.start + info.length], work.layout, info, pixels):
                work.problems[index] = problem
