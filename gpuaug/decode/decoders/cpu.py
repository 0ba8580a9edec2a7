"""Decoding on the CPU: JPEGs by simplejpeg, most PNGs by imagecodecs, WebPs by libwebp, all other files by PIL."""

import io
import struct
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.core.encoded import Format
from gpuaug.core.streams import Event
from gpuaug.decode.decoders import libwebp, turbojpeg, window_loop
from gpuaug.decode.decoders.base import FileDecoder, Resources
from gpuaug.decode.decoders.window_loop import WindowLoop
from gpuaug.decode.headers import opened
from gpuaug.decode.layout import ImageFacts, Layout
from gpuaug.decode.work import Work
from gpuaug.feed.image_input import prepared, unpacked

COSTS = np.zeros(len(Format), np.int64)
"""Relative time per pixel of each ``Format``, to decode the slowest files first."""
COSTS[[Format.JPEG, Format.PROGRESSIVE_JPEG, Format.OTHER_JPEG, Format.LOSSLESS_JPEG]] = 1, 3, 3, 6
COSTS[[Format.OTHER, Format.DEEP]] = 8

_OTHER, _LOSSLESS, _DEEP = int(Format.OTHER), int(Format.LOSSLESS_JPEG), int(Format.DEEP)

_STORED_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
"""PIL mode of an image that is decoded as stored, by number of channels."""

_CUT = (int(Format.JPEG), int(Format.OTHER_JPEG))
"""Formats whose windows libturbojpeg can decode without the rest of the image."""

MOST_AT_ONCE = 4
"""Maximum number of windows that a thread decodes per call."""

_UPSIDE_DOWN, _MIRRORED = (3, 4, 6, 7), (2, 3, 7, 8)
"""Orientations with reversed rows, and with reversed columns. Above 4, rows and columns are then swapped."""

_BACK = {6: 8, 8: 6}
"""Inverse of each orientation that is not its own inverse."""

_PNG = b"\x89PNG\r\n\x1a\n"

_PNG_CHANNELS = {0: 1, 2: 3, 6: 4}
"""Number of channels of PNGs that libspng decodes, by colour type. Palettes are as fast in PIL; grey with alpha fails."""

_CHUNK = struct.Struct(">I4s").unpack_from

_MOST_TEXT = 2**26
"""Size in bytes of a file above which its text may be so long that PIL rejects the PNG, even if the text follows the pixels."""


@cache
def simplejpeg() -> Any:
    """Return the module, or ``None`` if it is not installed. Lazy, so that importing gpuaug does not import simplejpeg."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


@cache
def imagecodecs() -> Any:
    """Return the module, or ``None`` if it is not installed or was built without libspng."""
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
        """Installed libraries and their versions. PIL is always installed, and decodes all files that the others do not."""
        import PIL

        modules = [("simplejpeg", simplejpeg()), ("imagecodecs", imagecodecs()), ("PIL", PIL)]
        named = [f"{name} {module.__version__}" for name, module in modules if module is not None]
        return ", ".join([*named, *([turbojpeg.version()] if turbojpeg.library() is not None else [])])

    def takes(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return a (B,) mask of true: all files."""
        return np.ones(len(table), np.bool_)

    def widened(self, windows: NDArray[np.int64], table: NDArray[np.void], scales: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return windows enlarged, for JPEGs, to the regions that libturbojpeg can decode directly into the batch.

        Decoding into a scratch buffer and copying the window would acquire the interpreter's lock once more per image: 16 cores
        decoded 8 700 images per second, not 12 100.
        """
        cut = np.isin(table["format"], _CUT) & np.isin(table["channels"], (1, 3)) & (table["sampling"] > 0)
        if turbojpeg.library() is not None:
            windows[cut] = turbojpeg.regions(windows[cut], table[cut], scales[cut])
        return windows

    def begin(self, work: Work, indices: NDArray[Any], resources: Resources) -> Callable[[], Event]:
        """Submit the images to the threads, slowest first, so that all threads finish at about the same time."""
        facts = work.layout.facts  # before threads start, or each thread may compute the cached property
        cost = work.layout.stored.prod(1)[indices] * COSTS[work.layout.headers["format"][indices]]
        # All threads share one iterator. One task per image would take ten times as long in Python.
        pending = iter(indices[np.argsort(-cost)].tolist())
        threads = resources.pools.threads
        at_once = min(max(len(indices) // (2 * threads), 1), MOST_AT_ONCE)
        windows = _window_loop(work)
        ended = _Ended(len(indices))
        try:
            for _ in range(min(-(-len(indices) // at_once), threads)):
                resources.pools.images.submit(_decode_some, work, facts, windows, pending, at_once, ended)
        except RuntimeError as error:  # no thread can be started, but others may have started
            for _ in pending:
                ended.note(error)

        def finish() -> Event:
            ended.all.wait()  # even after an error: no thread may write to memory that is reused
            entries = ended.entries
            for error in entries:
                if isinstance(error, BaseException):
                    raise error
            decoded = [entry for entry in entries if isinstance(entry, int)]
            if work.staging is not None and decoded:
                resources.lane.copy_parts(work.data, work.staging, _ranges(work.layout, sorted(decoded)))
            return resources.lane.record_event()

        return finish


class _Ended:
    """Completed images of a batch.

    The waiting thread wakes once, for all images. If each image woke it, it would take the interpreter's lock from decoding
    threads.

    Args:
        count: Number of images in the batch, at least one.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.entries: list[int | BaseException | None] = []
        """Per image, its index, ``None`` if it cannot be decoded, or an error to raise when the batch is collected."""
        self.all = threading.Event()
        """Event that is set when all images are completed."""

    def note(self, entry: int | BaseException | None) -> None:
        """Add the entry of one image. Thread-safe."""
        self.entries.append(entry)
        if len(self.entries) == self._count:
            self.all.set()


def decode(file: NDArray[np.uint8], layout: Layout, facts: ImageFacts, out: NDArray[np.uint8]) -> str:
    """Decode the window of one image into ``out``, upright and downsampled by the scale of the image.

    The pixels of every decoder must equal PIL's bit for bit. If a decoder rejects the file and returns ``None``, PIL decodes
    it, so errors come from PIL.

    Args:
        file: (bytes,) encoded image.
        layout: Layout of the batch.
        facts: Facts of the image.
        out: (h, w, C) view of the window in the buffer of the batch. Its content is undefined after a failure.

    Returns:
        Reason why the file cannot be decoded; an empty string on success.
    """
    orientation, scale = facts.orientation, facts.scale
    height, width = -(-facts.height // scale), -(-facts.width // scale)
    shape = (height, width, layout.channels)
    try:
        if not facts.whole and _cut_by_library(file, facts, out):
            return ""
        buffer = out if orientation == 1 and facts.whole else np.empty(shape, out.dtype)
        pixels: NDArray[Any] | str | None
        pixels = _deep(file, facts, out.dtype) if facts.format == _DEEP else _by_library(file, facts, buffer)
        if isinstance(pixels, str):
            return pixels
        if pixels is None:
            pixels = _by_pil(file, layout.channels, facts)
    except Exception as error:  # a decoder may raise any error for a damaged file
        return f"{type(error).__name__}: {error}"
    if pixels.shape != shape:
        return f"its {pixels.shape[1]}x{pixels.shape[0]} pixels are not the {width}x{height} of its header"
    if pixels is not out:
        top, left, window_height, window_width = facts.window
        _copy(_turned(pixels, orientation)[top : top + window_height, left : left + window_width], out)
    return ""


def _by_library(file: NDArray[np.uint8], facts: ImageFacts, buffer: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """Decode an image (h, w, C) with a library that is faster than PIL. Return ``None`` if no such library accepts the file."""
    if facts.format != _OTHER:
        # CMYK JPEGs have 4 channels; PIL converts them.
        if simplejpeg() is not None and facts.channels in (1, 3) and _fits_simplejpeg(file, facts):
            return _by_simplejpeg(file, buffer, smaller=facts.scale > 1)
        return None
    prefix = file[:16].tobytes()
    if prefix[:8] == _PNG and imagecodecs() is not None and _fits_libspng(file):
        return _by_libspng(file, buffer)
    if prefix[8:15] == b"WEBPVP8" and libwebp.library() is not None and buffer.shape[2] in (1, 3):
        return _by_libwebp(file, buffer)
    return None


def _cut_by_library(file: NDArray[np.uint8], facts: ImageFacts, out: NDArray[np.uint8]) -> bool:
    """Decode only the window of a JPEG into ``out``. Return ``False`` if no library can.

    Progressive JPEGs are excluded, because all of their scans must be read, which takes as long as the whole image.
    """
    if facts.format not in _CUT or facts.channels not in (1, 3) or turbojpeg.library() is None:
        return False
    window = _stored_window(facts)
    buffer = out if facts.orientation == 1 else np.empty((*window[2:], out.shape[2]), np.uint8)
    inner = (facts.wanted[1] - facts.window[1], facts.wanted[3]) if facts.orientation == 1 else (0, window[3])
    if not turbojpeg.decode(file, buffer, window, (facts.height, facts.width), facts.scale, inner):
        return False
    if buffer is not out:
        _copy(_turned(buffer, facts.orientation), out)
    return True


def _stored_window(facts: ImageFacts) -> tuple[int, int, int, int]:
    """Return top, left, height and width of the window in the downsampled image, in the stored orientation."""
    top, left, height, width = facts.window
    if facts.orientation > 4:
        top, left, height, width = left, top, width, height
    if facts.orientation in _UPSIDE_DOWN:
        top = -(-facts.height // facts.scale) - top - height
    if facts.orientation in _MIRRORED:
        left = -(-facts.width // facts.scale) - left - width
    return top, left, height, width


def _fits_simplejpeg(file: NDArray[np.uint8], facts: ImageFacts) -> bool:
    """Return whether simplejpeg reads the same size and channels as ``Header``, so that it cannot write beyond its buffer.

    simplejpeg checks its buffer against the downsampled size, but writes a lossless JPEG at full size.
    """
    if facts.scale > 1 and facts.format == _LOSSLESS:
        return False
    try:
        height, width, colorspace, _ = simplejpeg().decode_jpeg_header(file.data)  # 1.3 µs
    except (ValueError, KeyError):  # KeyError: a subsampling without a name in simplejpeg, such as 1x4
        return False
    channels = {"Gray": 1, "RGB": 3, "YCbCr": 3}.get(colorspace)
    return (height, width, channels) == (facts.height, facts.width, facts.channels)


def _by_simplejpeg(file: NDArray[np.uint8], buffer: NDArray[np.uint8], *, smaller: bool) -> NDArray[np.uint8] | None:
    """Decode an image (h, w, C) into ``buffer``. Return ``buffer``, or an array that shares its memory.

    Returns ``None`` if simplejpeg rejects the file, or the image does not fit into ``buffer``.
    """
    height, width, channels = buffer.shape
    size = {"min_height": height, "min_width": width} if smaller else {}
    try:
        # Without strict=True, simplejpeg reports an error that follows a warning as a warning only and leaves the buffer
        # unwritten. With it, warnings raise as well; the file then goes to PIL, which accepts warnings and raises errors.
        pixels: NDArray[np.uint8] = simplejpeg().decode_jpeg(
            file.data, "RGB" if channels == 3 else "GRAY", buffer=buffer, strict=True, **size
        )
    except ValueError:
        return None
    return buffer if pixels.shape == buffer.shape else pixels  # simplejpeg returns a new view of the buffer


def _fits_libspng(file: NDArray[np.uint8]) -> bool:
    """Return whether libspng and PIL decode a PNG to the same pixels, and PIL accepts the file if libspng does.

    PIL has read the chunks before the pixels for the header. libspng ignores the chunks after the pixels, whose types must be
    types that PIL never rejects.
    """
    data = file.data
    position = 8
    after_pixels = False
    accepted_after = {b"IDAT", b"eXIf", b"tIME", b"tEXt"}
    if file[25] not in _PNG_CHANNELS or len(data) > _MOST_TEXT:
        return False
    try:
        while True:
            length, name = _CHUNK(data, position)  # 0.3 µs
            position += 12 + length
            if name == b"IEND":
                return True
            if name in (b"zTXt", b"iTXt"):  # their text may be so long that PIL rejects any further text
                accepted_after.discard(b"tEXt")
            if name == b"fcTL" or (after_pixels and name not in accepted_after):  # fcTL: the frame may be a part of the image
                return False
            after_pixels = after_pixels or name == b"IDAT"
    except struct.error:  # the file ends before its end chunk
        return False


def _by_libspng(file: NDArray[np.uint8], buffer: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """Decode an image (h, w, C) with libspng. Return ``buffer`` or another array; ``None`` if libspng rejects the file."""
    channels = buffer.shape[2]
    direct = _PNG_CHANNELS[int(file[25])] == channels
    if not direct and channels not in (1, 3):
        return None
    try:
        # imagecodecs checks the size of the buffer against the size in the file.
        pixels = imagecodecs().spng_decode(file, out=(buffer if channels > 1 else buffer[..., 0]) if direct else None)
    except (RuntimeError, ValueError):
        return None
    return buffer if direct else _converted(pixels, channels)


def _by_libwebp(file: NDArray[np.uint8], buffer: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """Decode an image (h, w, C) with libwebp. Return ``buffer`` or another array; ``None`` if libwebp rejects the file."""
    height, width, channels = buffer.shape
    colours = buffer if channels == 3 else np.empty((height, width, 3), np.uint8)
    if not libwebp.decode(file, colours):
        return None
    return buffer if colours is buffer else _converted(colours, channels)


def _deep(file: NDArray[np.uint8], facts: ImageFacts, dtype: np.dtype[Any]) -> NDArray[Any] | str:
    """Decode a 16-bit PNG, or a TIFF that PIL does not decode, as stored: (h, w, C), or the reason why it cannot be decoded."""
    library = imagecodecs()
    if library is None:
        return 'imagecodecs, which decodes it, is not installed: pip install "gpuaug[decode]"'
    is_png = file[:8].tobytes() == _PNG
    pixels: NDArray[Any] = library.png_decode(file) if is_png else library.tiff_decode(file, index=0)
    shape = (facts.height, facts.width, facts.channels)
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.shape != shape and pixels.shape == (shape[2], *shape[:2]):  # planar bands
        pixels = pixels.transpose(1, 2, 0)
    if pixels.shape != shape or pixels.dtype != dtype:
        return f"its {pixels.dtype} {pixels.shape} are not the {dtype} {shape} of its header"
    return pixels


def _converted(pixels: NDArray[np.uint8], channels: Any) -> NDArray[np.uint8]:
    """Convert decoded pixels (h, w[, C]) to the channels of the batch. Returns a view, or a new array for grey from RGB."""
    from PIL import Image  # converts RGB to grey ten times as fast as NumPy

    return unpacked(prepared(Image.fromarray(pixels) if channels == 1 else pixels, channels, convert=True, where="the file"))


def _by_pil(file: NDArray[np.uint8], channels: Any, facts: ImageFacts) -> NDArray[np.uint8]:
    """Decode an image (h, w, C) with PIL, in the stored orientation. Of a file with several images, the first."""
    from PIL import JpegImagePlugin  # here, so that importing gpuaug does not import PIL

    jpeg = facts.format != _OTHER
    # JpegImageFile, because PIL.Image.open opens the JPEGs of many phones as MPO, a format with several images.
    with JpegImagePlugin.JpegImageFile(io.BytesIO(file.data)) if jpeg else opened(file.data) as image:
        if jpeg and facts.format != _LOSSLESS:  # libjpeg-turbo converts no lossless JPEG
            grey = channels == 1 and image.mode in ("L", "RGB", "YCbCr")
            # "L" reads the luma stored in the file, as the engines do.
            # PIL picks the smallest scaled size that is at least the requested size, and rounds up. So round the sides down.
            sides = (max(image.width // facts.scale, 1), max(image.height // facts.scale, 1))
            image.draft("L" if grey else image.mode, sides)
        if channels in (2, 4):  # as stored
            pixels = unpacked(image.convert(_STORED_MODES[channels]))
        else:
            pixels = unpacked(prepared(image, channels, convert=True, where="the file"))
        if image.format == "TIFF":  # PIL rotates TIFFs upright while decoding
            pixels = _turned(pixels, _BACK.get(facts.stored_orientation, facts.stored_orientation))
        return pixels


def _turned(image: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Rotate an image (h, w, C) upright. ``orientation``: EXIF orientation, 1 to 8. Returns a view."""
    if orientation in _UPSIDE_DOWN:
        image = image[::-1]
    if orientation in _MIRRORED:
        image = image[:, ::-1]
    return image.transpose(1, 0, 2) if orientation > 4 else image


def _copy(image: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Copy an image (h, w, C) of any strides to ``out``."""
    if image.strides[1:] == out.strides[1:]:
        out[:] = image
    else:  # per channel, since NumPy's inner loop would be over 3 channels: 0.3 ms for 674x450 pixels, not 1.3
        for channel in range(out.shape[2]):
            out[..., channel] = image[..., channel]


def _window_loop(work: Work) -> WindowLoop | None:
    """Return the windows of the batch that ``WindowLoop`` decodes; ``None`` if no image is decoded so."""
    layout = work.layout
    table = layout.headers
    direct = np.isin(table["format"], _CUT) & np.isin(table["channels"], (1, 3)) & (layout.orientations == 1)
    direct &= (layout.windows[:, 2:] != layout.shapes.sizes).any(1)
    decode_jobs = window_loop.compiled() if layout.channels in (1, 3) and direct.any() else None
    if decode_jobs is None:
        return None
    out, starts = (work.data, layout.starts) if work.staging is None else (work.staging, layout.staged_starts)
    return WindowLoop(
        decode_jobs,
        work.encoded.data.data_ptr(),
        out.data_ptr(),
        layout.channels,
        table,
        starts,
        layout.windows,
        layout.wanted,
        layout.scales,
        direct,
    )


def _decode_some(
    work: Work,
    facts_of: list[ImageFacts],
    windows: WindowLoop | None,
    indices: Iterator[int],
    at_once: int,
    ended: _Ended,
) -> None:
    """Decode images into host memory.

    Args:
        work: Decoding task of the batch.
        facts_of: ``Layout.facts`` of the batch.
        windows: Windows of the batch that are decoded without the interpreter's lock.
        indices: Indices of the images that no thread has started, shared by all threads.
        at_once: Number of images that the thread takes at once.
        ended: Record of the completed images.
    """
    layout = work.layout
    data, firsts = (work.data, layout.starts) if work.staging is None else (work.staging, layout.staged_starts)
    starts = firsts.tolist()
    values, files = data.numpy(), work.encoded.data.numpy()
    for index in _remaining_after_loop(windows, indices, at_once, ended):
        try:
            facts = facts_of[index]
            file = files[facts.start : facts.start + facts.length]
            _, _, height, width = facts.window
            pixels = values[starts[index] : starts[index] + height * width * layout.channels]
            if problem := decode(file, layout, facts, pixels.reshape(height, width, layout.channels)):
                work.problems[index] = problem
            ended.note(None if problem else index)
        except BaseException as error:  # raised at the batch
            ended.note(error)


def _remaining_after_loop(windows: WindowLoop | None, indices: Iterator[int], at_once: int, ended: _Ended) -> Iterator[int]:
    """Decode windows in ``windows``, record them in ``ended``, and yield the indices of the other images.

    Arguments: as of ``_decode_some``.
    """
    if windows is None:
        yield from indices
    while chunk := list(islice(indices, at_once)):
        try:
            decoded = windows.decode(chunk).tolist() if windows is not None else []
        except BaseException as error:  # raised at the batch
            for _ in chunk:
                ended.note(error)
            continue
        for index, is_decoded in zip(chunk, decoded, strict=True):
            if is_decoded:
                ended.note(index)
            else:
                yield index


def _ranges(layout: Layout, indices: list[int]) -> list[tuple[int, int, int]]:
    """Return ranges (offset in the batch, offset in staging, number of values) of images. Adjacent images share a range."""
    ranges: list[tuple[int, int, int]] = []
    for index in indices:
        start, staged, length = int(layout.starts[index]), int(layout.staged_starts[index]), int(layout.lengths[index])
        if ranges and ranges[-1][0] + ranges[-1][2] == start:  # then they are adjacent in staging, too
            ranges[-1] = (*ranges[-1][:2], ranges[-1][2] + length)
        else:
            ranges.append((start, staged, length))
    return ranges
