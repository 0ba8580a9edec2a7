"""Decoding on the CPU: JPEGs by simplejpeg, most PNGs by imagecodecs, WebPs by libwebp, all other files by PIL.

A batch holds a *window* of each image: the part that the next stage reads, or the whole image. JPEG windows are decoded by
libturbojpeg, without the rest of the image. Threads decode into *staging* memory, which is page-locked and is then copied to
the GPU, or without a GPU directly into the batch.
"""

import io
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.encoded import Format
from gpuaug.core.streams import Event
from gpuaug.decode.decoders import image_loop, libspng, libwebp, turbojpeg, window_loop
from gpuaug.decode.decoders.base import FileDecoder, Resources
from gpuaug.decode.decoders.image_loop import ImageLoop
from gpuaug.decode.decoders.window_loop import WindowLoop
from gpuaug.decode.formats import tiff
from gpuaug.decode.headers import open_image
from gpuaug.decode.layout import ImageInfo, Layout
from gpuaug.decode.work import Work
from gpuaug.feed.image_input import as_array, stored_values, with_channels

COSTS = np.zeros(len(Format), np.int64)
"""Relative time per pixel of each ``Format``, to decode the slowest files first."""
COSTS[[Format.JPEG, Format.PROGRESSIVE_JPEG, Format.OTHER_JPEG, Format.LOSSLESS_JPEG]] = 1, 3, 3, 6
COSTS[[Format.OTHER, Format.DEEP]] = 8

# Integers, because ``ImageInfo.format`` is one.
_OTHER, _LOSSLESS, _DEEP = int(Format.OTHER), int(Format.LOSSLESS_JPEG), int(Format.DEEP)

_STORED_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
"""PIL mode of an image that is decoded as stored, by number of channels."""

_WINDOW_FORMATS = (int(Format.JPEG), int(Format.OTHER_JPEG))
"""Formats in which libturbojpeg can decode a window without the rest of the image."""

MAX_CHUNK = 8
"""Maximum number of images that a thread takes at once, whose windows it decodes in one call. With 8 instead of 4, 14 threads
decoded 11,100 instead of 10,300 images of 0.2 megapixels per second (one-off, 2026-11-27)."""

_ROWS_REVERSED, _COLUMNS_REVERSED = (3, 4, 6, 7), (2, 3, 7, 8)
"""EXIF orientations with reversed rows, and with reversed columns. From 5 on, rows and columns are swapped after that."""

_INVERSE_ORIENTATIONS = {6: 8, 8: 6}
"""Inverse of each EXIF orientation that is not its own inverse."""


@cache
def simplejpeg() -> Any:
    """Return the module ``simplejpeg``, or ``None``. A function, so that ``import gpuaug`` does not load the module."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


@cache
def imagecodecs() -> Any:
    """Return the module ``imagecodecs``, or ``None`` if it is not installed or was built without libspng."""
    try:
        import imagecodecs

        return imagecodecs if imagecodecs.SPNG.available else None
    except (ImportError, AttributeError):
        return None


class Cpu(FileDecoder):
    """Decode images on host threads, each with the fastest library whose pixels equal PIL's."""

    name, on_card = "cpu", False
    files = "all other files"

    @property
    def version(self) -> str:
        """Installed libraries and their versions. PIL is always installed."""
        import PIL

        modules = [("simplejpeg", simplejpeg()), ("imagecodecs", imagecodecs()), ("PIL", PIL)]
        versions = [f"{name} {module.__version__}" for name, module in modules if module is not None]
        return ", ".join([*versions, *([turbojpeg.version()] if turbojpeg.library() is not None else [])])

    def takes(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return a (B,) mask of true: all files."""
        return np.ones(len(table), np.bool_)

    def enlarge(self, windows: NDArray[np.int64], table: NDArray[np.void], scales: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return windows enlarged, for JPEGs, to the regions that libturbojpeg can decode directly into the batch.

        Enlarged windows need no scratch buffer and no copy, for which a thread would acquire the interpreter's lock once more
        per image: with the copy, 16 cores decoded 8 700 images per second; without it, 12 100.
        """
        selected = np.isin(table["format"], _WINDOW_FORMATS) & np.isin(table["channels"], (1, 3)) & (table["sampling"] > 0)
        if turbojpeg.library() is not None:
            windows[selected] = turbojpeg.regions(windows[selected], table[selected], scales[selected])
        return windows

    def begin(self, work: Work, indices: NDArray[Any], resources: Resources) -> Callable[[], Event]:
        """Submit the images to the threads, slowest first, so that all threads finish at about the same time."""
        infos = work.layout.infos  # computed before threads start, because each of them might compute the cached property
        cost = work.layout.stored.prod(1)[indices] * COSTS[work.layout.headers["format"][indices]]
        # All threads share one iterator. Submitting one task per image would take ten times as long in Python.
        pending = iter(indices[np.argsort(-cost)].tolist())
        threads = resources.pools.threads
        # Few images are spread over all threads.
        chunk_size = min(-(-len(indices) // threads), MAX_CHUNK)
        loops = _make_loops(work, indices)
        completion = _Completion(len(indices))
        try:
            for _ in range(min(-(-len(indices) // chunk_size), threads)):
                resources.pools.images.submit(_decode_pending, work, infos, loops, pending, chunk_size, completion)
        except RuntimeError as error:  # a thread could not be started; earlier ones are running
            for _ in pending:
                completion.add(error)

        def finish() -> Event:
            # Wait even if a result is an error: the memory is reused after this call, so no thread may still write to it.
            completion.is_complete.wait()
            for result in completion.results:
                if isinstance(result, BaseException):
                    raise result
            decoded_indices = [result for result in completion.results if isinstance(result, int)]
            if work.staging is not None and decoded_indices:
                resources.lane.copy_parts(work.data, work.staging, _ranges(work.layout, sorted(decoded_indices)))
            return resources.lane.record_event()

        return finish


class _Completion:
    """Results of the images of a batch, added by the threads that decode them.

    The thread that waits for the batch wakes once, when all results have been added. If it woke for each image, it would
    compete with the decoding threads for the interpreter's lock.

    Args:
        count: Number of images that the CPU decodes, at least one.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.results: list[int | BaseException | None] = []
        """Result per image: its index, ``None`` if it cannot be decoded, or an error to raise when the batch is collected."""
        self.is_complete = threading.Event()
        """Event that is set when all results have been added."""

    def add(self, result: int | BaseException | None) -> None:
        """Add the result of one image. Thread-safe."""
        self.results.append(result)
        if len(self.results) == self._count:
            self.is_complete.set()


def decode(file: NDArray[np.uint8], layout: Layout, info: ImageInfo, out: NDArray[np.uint8]) -> str:
    """Decode the window of one image into ``out``, upright and downsampled by the scale of the image.

    The pixels of every library must equal PIL's bit for bit. PIL decodes a file that a faster library rejects, so that PIL
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
    height, width = -(-info.height // scale), -(-info.width // scale)
    shape = (height, width, layout.channels)
    as_stored = info.format == _DEEP or (layout.as_stored and tiff.is_tiff(file[:4].tobytes()))
    try:
        if not info.whole and _decode_window_with_library(file, info, out):
            return ""
        buffer = out if orientation == 1 and info.whole else np.empty(shape, out.dtype)
        pixels = _decode_as_stored(file, layout, info) if as_stored else None
        if pixels is None:
            pixels = _decode_with_library(file, info, buffer)
        if isinstance(pixels, str):
            return pixels
        if pixels is None:
            pixels = _decode_with_pil(file, layout.channels, info)
    except Exception as error:  # a library may raise any error for a damaged file
        return f"{type(error).__name__}: {error}"
    if pixels.shape != shape:
        return f"it decodes to {pixels.shape[1]}x{pixels.shape[0]} pixels, but its header says {width}x{height}"
    if pixels is not out:
        top, left, window_height, window_width = info.window
        _copy(_rotated_upright(pixels, orientation)[top : top + window_height, left : left + window_width], out)
    return ""


def _decode_with_library(file: NDArray[np.uint8], info: ImageInfo, buffer: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """Decode an image (h, w, C) with a library faster than PIL. Return ``buffer`` or another array; ``None`` if not decoded."""
    if info.format != _OTHER:
        # CMYK JPEGs have 4 channels; PIL converts them.
        if simplejpeg() is not None and info.channels in (1, 3) and _fits_simplejpeg(file, info):
            return _decode_with_simplejpeg(file, buffer, smaller=info.scale > 1)
        return None
    prefix = file[:16].tobytes()
    # PIL unpacks labels of less than 8 bits.
    if prefix[:8] == libspng.SIGNATURE and imagecodecs() and info.label_max in (0, 255) and libspng.fits(file.data):
        return _decode_with_libspng(file, buffer)
    if prefix[8:15] == libwebp.SIGNATURE and libwebp.library() is not None and buffer.shape[2] in (1, 3):
        return _decode_with_libwebp(file, buffer)
    return None


def _decode_window_with_library(file: NDArray[np.uint8], info: ImageInfo, out: NDArray[np.uint8]) -> bool:
    """Decode only the window of a JPEG into ``out``. Return whether it was decoded.

    Progressive JPEGs are not decoded by window: reading all scans takes as long as decoding the whole image.
    """
    if info.format not in _WINDOW_FORMATS or info.channels not in (1, 3) or turbojpeg.library() is None:
        return False
    window = _stored_window(info)
    buffer = out if info.orientation == 1 else np.empty((*window[2:], out.shape[2]), np.uint8)
    requested = info.requested_window
    needed_columns = (requested[1] - info.window[1], requested[3]) if info.orientation == 1 else (0, window[3])
    if not turbojpeg.decode(file, buffer, window, (info.height, info.width), info.scale, needed_columns):
        return False
    if buffer is not out:
        _copy(_rotated_upright(buffer, info.orientation), out)
    return True


def _stored_window(info: ImageInfo) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of the window in the downsampled image before its rotation upright."""
    top, left, height, width = info.window
    if info.orientation > 4:
        top, left, height, width = left, top, width, height
    if info.orientation in _ROWS_REVERSED:
        top = -(-info.height // info.scale) - top - height
    if info.orientation in _COLUMNS_REVERSED:
        left = -(-info.width // info.scale) - left - width
    return top, left, height, width


def _fits_simplejpeg(file: NDArray[np.uint8], info: ImageInfo) -> bool:
    """Return whether simplejpeg reads the size and channels that ``info`` has: otherwise it could write past its buffer.

    ``False`` for a lossless JPEG that is to be downsampled: simplejpeg expects a buffer of the downsampled size, but writes
    the image at full size.
    """
    if info.scale > 1 and info.format == _LOSSLESS:
        return False
    try:
        height, width, colorspace, _ = simplejpeg().decode_jpeg_header(file.data)  # 1.3 µs
    except (ValueError, KeyError):  # KeyError: a subsampling without a name in simplejpeg, such as 1x4
        return False
    channels = {"Gray": 1, "RGB": 3, "YCbCr": 3}.get(colorspace)
    return (height, width, channels) == (info.height, info.width, info.channels)


def _decode_with_simplejpeg(file: NDArray[np.uint8], buffer: NDArray[np.uint8], *, smaller: bool) -> NDArray[np.uint8] | None:
    """Decode an image (h, w, C) into ``buffer``. Return ``buffer``, or an array that shares its memory.

    Returns ``None`` if simplejpeg rejects the file, or the image does not fit into ``buffer``.
    """
    height, width, channels = buffer.shape
    size = {"min_height": height, "min_width": width} if smaller else {}
    try:
        # Without strict=True, simplejpeg reports an error that follows a warning as a warning only, and leaves the buffer
        # unwritten. With strict=True it raises for warnings, too. PIL then decodes the file, and raises only for errors.
        pixels: NDArray[np.uint8] = simplejpeg().decode_jpeg(
            file.data, "RGB" if channels == 3 else "GRAY", buffer=buffer, strict=True, **size
        )
    except ValueError:
        return None
    return buffer if pixels.shape == buffer.shape else pixels  # simplejpeg returns a new view of the buffer


def _decode_with_libspng(file: NDArray[np.uint8], buffer: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """Decode an image (h, w, C) with libspng. Return ``buffer`` or another array; ``None`` if libspng rejects the file."""
    channels = buffer.shape[2]
    fits_buffer = libspng.CHANNELS[int(file[libspng.COLOUR_TYPE])] == channels
    if not fits_buffer and channels not in (1, 3):
        return None
    try:
        # imagecodecs checks the size of the buffer against the size in the file.
        pixels = imagecodecs().spng_decode(file, out=(buffer if channels > 1 else buffer[..., 0]) if fits_buffer else None)
    except (RuntimeError, ValueError):
        return None
    return buffer if fits_buffer else _with_channels(pixels, channels)


def _decode_with_libwebp(file: NDArray[np.uint8], buffer: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """Decode an image (h, w, C) with libwebp. Return ``buffer`` or another array; ``None`` if libwebp rejects the file."""
    height, width, channels = buffer.shape
    colours = buffer if channels == 3 else np.empty((height, width, 3), np.uint8)
    if not libwebp.decode(file, colours):
        return None
    return buffer if colours is buffer else _with_channels(colours, channels)


def _decode_as_stored(file: NDArray[np.uint8], layout: Layout, info: ImageInfo) -> NDArray[Any] | str | None:
    """Decode a 16-bit PNG or a TIFF without conversion. Return (h, w, C) pixels, or the reason of a failure.

    Returns ``None`` for a TIFF of one page with 1 or 3 channels, which PIL decodes as stored, except for palettes and CMYK. PIL
    changes TIFFs of 8 bits with alpha: it divides colours by associated alpha, and loses alpha that is stored separately.
    """
    is_png = file[:8].tobytes() == libspng.SIGNATURE
    tags = None if is_png else tiff.tags(file.data)
    pages = (0,) if tags is None else tags.pages
    if info.format != _DEEP and len(pages) == 1 and layout.channels in (1, 3):
        return None
    library = imagecodecs()
    if library is None:
        return 'imagecodecs, which decodes it, is not installed: pip install "gpuaug[decode]"'
    shape = (info.height, info.width, info.channels)
    dtype = np.dtype(str(layout.dtype).removeprefix("torch."))
    bands = np.empty((*shape[:2], len(pages) * info.channels), dtype) if len(pages) > 1 else None
    for number, page in enumerate(pages):
        pixels: NDArray[Any] = library.png_decode(file) if is_png else library.tiff_decode(file, index=page)
        if pixels.ndim == 2:
            pixels = pixels[..., None]
        if is_png:
            pixels = pixels[..., : info.channels]  # imagecodecs adds alpha for a transparent colour (tRNS)
        elif tags is not None and tags.is_planar:
            pixels = pixels.transpose(1, 2, 0)
        if pixels.shape != shape or pixels.dtype != dtype:
            return f"it decodes to {pixels.dtype} {pixels.shape}, but its header says {dtype} {shape}"
        if bands is not None:
            bands[..., number * info.channels : (number + 1) * info.channels] = pixels
    return pixels if bands is None else bands


def _with_channels(pixels: NDArray[np.uint8], channels: Any) -> NDArray[np.uint8]:
    """Return pixels (h, w[, C]) with 1 or 3 channels: a view, or a new array for grey from RGB."""
    from PIL import Image  # used for RGB to grey, which takes NumPy ten times as long

    return as_array(
        with_channels(Image.fromarray(pixels) if channels == 1 else pixels, channels, convert=True, position="the file")
    )


def _decode_with_pil(file: NDArray[np.uint8], channels: Any, info: ImageInfo) -> NDArray[np.uint8]:
    """Decode an image (h, w, C) with PIL, not rotated upright. In a file with several images, decode the first."""
    from PIL import JpegImagePlugin  # here, so that importing gpuaug does not import PIL

    jpeg = info.format != _OTHER
    # JpegImageFile, because PIL.Image.open opens the JPEGs of many phones as MPO, a format with several images.
    with JpegImagePlugin.JpegImageFile(io.BytesIO(file.data)) if jpeg else open_image(file.data) as image:
        if jpeg and info.format != _LOSSLESS:  # libjpeg-turbo converts no lossless JPEG
            grey = channels == 1 and image.mode in ("L", "RGB", "YCbCr")
            # "L" reads the luma stored in the file, as the JPEG engines of a card do.
            # PIL picks the smallest scaled size that is at least the requested size, and rounds it up. Fractions are exact, and
            # request the scale even if a side has fewer pixels than the scale.
            sides: Any = (image.width / info.scale, image.height / info.scale)
            image.draft("L" if grey else image.mode, sides)
        if info.label_max:
            pixels = stored_values(image, info.label_max)
        elif channels in (2, 4):  # channels=None: decoded as stored
            pixels = as_array(image.convert(_STORED_MODES[channels]))
        else:
            pixels = as_array(with_channels(image, channels, convert=True, position="the file"))
        if image.format == "TIFF":  # PIL rotates TIFFs upright while decoding
            pixels = _rotated_upright(pixels, _INVERSE_ORIENTATIONS.get(info.stored_orientation, info.stored_orientation))
        return pixels


def _rotated_upright(image: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Return a view of an image (h, w, C), rotated upright. ``orientation``: EXIF orientation, 1 to 8."""
    if orientation in _ROWS_REVERSED:
        image = image[::-1]
    if orientation in _COLUMNS_REVERSED:
        image = image[:, ::-1]
    return image.transpose(1, 0, 2) if orientation > 4 else image


def _copy(image: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Copy an image (h, w, C) of any strides to ``out``."""
    if image.strides[1:] == out.strides[1:]:
        out[:] = image
    else:  # by channel, because NumPy's inner loop would run over 3 channels: 674x450 pixels take 0.3 ms, and would take 1.3
        for channel in range(out.shape[2]):
            out[..., channel] = image[..., channel]


def _make_loops(work: Work, indices: NDArray[Any]) -> list[WindowLoop | ImageLoop]:
    """Return the compiled loops that may decode images of the batch. ``indices``: images that the CPU decodes."""
    layout = work.layout
    if layout.channels not in (1, 3) or layout.dtype != torch.uint8:
        return []
    out, starts = (work.data, layout.starts) if work.staging is None else (work.staging, layout.staged_starts)
    mask = np.zeros(len(layout.headers), np.bool_)
    mask[indices] = True
    mask &= layout.orientations == 1
    return [*_window_loops(work, out, starts, mask), *image_loop.loops(work, out, starts, mask)]


def _window_loops(work: Work, out: Tensor, starts: NDArray[np.int64], upright: NDArray[np.bool_]) -> Iterator[WindowLoop]:
    """Yield the loop over windows of JPEGs, if it can decode images of the batch. Args: as for ``image_loop.loops``."""
    layout = work.layout
    table = layout.headers
    mask = upright & np.isin(table["format"], _WINDOW_FORMATS) & np.isin(table["channels"], (1, 3))
    mask &= (layout.windows[:, 2:] != layout.shapes.sizes).any(1)
    decode_jobs = window_loop.compiled() if mask.any() else None
    if decode_jobs is not None:
        yield WindowLoop(
            decode_jobs,
            work.encoded.data.data_ptr(),
            out.data_ptr(),
            layout.channels,
            table,
            starts,
            layout.windows,
            layout.requested_windows,
            layout.scales,
            mask,
        )


def _decode_pending(
    work: Work,
    infos: list[ImageInfo],
    loops: list[WindowLoop | ImageLoop],
    pending: Iterator[int],
    chunk_size: int,
    completion: _Completion,
) -> None:
    """Decode images into host memory. Runs on several threads for one batch.

    Args:
        work: Decoding task of the batch.
        infos: ``Layout.infos`` of the batch.
        loops: Compiled loops, which decode without the interpreter's lock.
        pending: Indices of the images that no thread has started, shared by all threads.
        chunk_size: Number of images that a thread takes at once.
        completion: Results of the batch.
    """
    layout = work.layout
    data, offsets = (work.data, layout.starts) if work.staging is None else (work.staging, layout.staged_starts)
    starts = offsets.tolist()
    values, files = data.numpy(), work.encoded.data.numpy()
    for index in _remaining_after_loops(work, loops, pending, chunk_size, completion):
        if work.is_abandoned:
            completion.add(None)
            continue
        try:
            info = infos[index]
            file = files[info.start : info.start + info.length]
            _, _, height, width = info.window
            pixels = values[starts[index] : starts[index] + height * width * layout.channels]
            if problem := decode(file, layout, info, pixels.reshape(height, width, layout.channels)):
                work.problems[index] = problem
            completion.add(None if problem else index)
        except BaseException as error:  # raised by ``finish``
            completion.add(error)


def _remaining_after_loops(
    work: Work, loops: list[WindowLoop | ImageLoop], pending: Iterator[int], chunk_size: int, completion: _Completion
) -> Iterator[int]:
    """Decode images with ``loops``, and yield the indices of the images that the loops do not decode.

    Args: as for ``_decode_pending``.
    """
    if not loops:
        yield from pending
        return
    while chunk := list(islice(pending, chunk_size)):
        decoded = np.zeros(len(chunk), np.bool_)
        try:
            for loop in [] if work.is_abandoned else loops:
                decoded |= loop.decode(chunk)
        except BaseException as error:  # raised by ``finish``
            for _ in chunk:
                completion.add(error)
            continue
        for index, is_decoded in zip(chunk, decoded.tolist(), strict=True):
            if is_decoded:
                completion.add(index)
            else:
                yield index


def _ranges(layout: Layout, indices: list[int]) -> list[tuple[int, int, int]]:
    """Return (offset in the batch, offset in ``Work.staging``, number of values) per run of adjacent images."""
    ranges: list[tuple[int, int, int]] = []
    for index in indices:
        start, staged, length = int(layout.starts[index]), int(layout.staged_starts[index]), int(layout.lengths[index])
        if ranges and ranges[-1][0] + ranges[-1][2] == start:  # adjacent in the batch, and therefore in staging
            ranges[-1] = (*ranges[-1][:2], ranges[-1][2] + length)
        else:
            ranges.append((start, staged, length))
    return ranges
