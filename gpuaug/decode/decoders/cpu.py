"""Decoding on the CPU: JPEGs by simplejpeg, most PNGs by imagecodecs, WebPs by libwebp, all other files by PIL."""

import io
import struct
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.core.encoded import Format
from gpuaug.core.streams import Event
from gpuaug.decode.decoders import libwebp, turbojpeg
from gpuaug.decode.decoders.base import FileDecoder, Resources
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
"""PIL's mode of an image that is decoded as stored, by its channels."""

_CUT = (int(Format.JPEG), int(Format.OTHER_JPEG))
"""Formats whose windows libturbojpeg decodes without the rest of the image."""

_UPSIDE_DOWN, _MIRRORED = (3, 4, 6, 7), (2, 3, 7, 8)
"""Orientations whose rows or columns are reversed. Above 4, rows then become columns."""

_BACK = {6: 8, 8: 6}
"""Orientation that undoes another one. All others undo themselves."""

_PNG = b"\x89PNG\r\n\x1a\n"

_PNG_CHANNELS = {0: 1, 2: 3, 6: 4}
"""Channels by colour type of the PNGs that libspng decodes. Palettes are as fast in PIL; grey with alpha it does not take."""

_CHUNK = struct.Struct(">I4s").unpack_from

_MOST_TEXT = 2**26
"""Bytes of text with which PIL refuses a PNG, also where the text follows the pixels."""


@cache
def simplejpeg() -> Any:
    """The module, or ``None`` where it is not installed. Imported here, so that importing gpuaug does not import it."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


@cache
def imagecodecs() -> Any:
    """The module, or ``None`` where it is not installed or was built without libspng."""
    try:
        import imagecodecs

        return imagecodecs if imagecodecs.SPNG.available else None
    except (ImportError, AttributeError):
        return None


class Cpu(FileDecoder):
    """Host threads, each with the fastest library that gives PIL's pixels."""

    name, on_card = "cpu", False
    files = "all other files"

    @property
    def version(self) -> str:
        """The libraries that are installed, with their versions: PIL always, as it decodes all that others do not."""
        import PIL

        modules = [("simplejpeg", simplejpeg()), ("imagecodecs", imagecodecs()), ("PIL", PIL)]
        named = [f"{name} {module.__version__}" for name, module in modules if module is not None]
        return ", ".join([*named, *([turbojpeg.version()] if turbojpeg.library() is not None else [])])

    def takes(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """(B,) true."""
        return np.ones(len(table), np.bool_)

    def widened(self, windows: NDArray[np.int64], table: NDArray[np.void], scales: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of JPEGs the regions that libturbojpeg can decode straight into the batch.

        With a copy of a narrower window, threads waited for the interpreter's lock once more: 16 cores decoded 8 700 images a
        second in place of 12 100.
        """
        cut = np.isin(table["format"], _CUT) & np.isin(table["channels"], (1, 3)) & (table["sampling"] > 0)
        if turbojpeg.library() is not None:
            windows[cut] = turbojpeg.regions(windows[cut], table[cut], scales[cut])
        return windows

    def begin(self, work: Work, indices: NDArray[Any], resources: Resources) -> Callable[[], Event]:
        """Submit the images to the threads, the slowest first, so that none is left to decode alone."""
        facts = work.layout.facts  # before threads begin: a cached property may be computed by each of them
        cost = work.layout.stored.prod(1)[indices] * COSTS[work.layout.headers["format"][indices]]
        # All threads take from one iterator. A task for each image would take ten times as long in Python.
        left = iter(indices[np.argsort(-cost)].tolist())
        tasks = min(len(indices), resources.pools.threads)
        ended = _Ended(len(indices))
        try:
            for _ in range(tasks):
                resources.pools.images.submit(_decode_some, work, facts, left, ended)
        except RuntimeError as error:  # no thread can be started; others may have begun
            for _ in left:
                ended.note(error)

        def finish() -> Event:
            ended.all.wait()  # also after an error: none may write to memory that is used again
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
    """Images of a batch that are no longer being decoded.

    The thread that waits for them wakes once. Woken by each image, it would take the interpreter's lock from threads that
    decode.

    Args:
        count: Number of images in the batch, at least one.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.entries: list[int | BaseException | None] = []
        """For each image its index, ``None`` if it cannot be decoded, or an error to raise at the batch."""
        self.all = threading.Event()
        """Set when all images have ended."""

    def note(self, entry: int | BaseException | None) -> None:
        """Add the entry of one image. Any thread may call this."""
        self.entries.append(entry)
        if len(self.entries) == self._count:
            self.all.set()


def decode(file: NDArray[np.uint8], layout: Layout, facts: ImageFacts, room: NDArray[np.uint8]) -> str:
    """Decode the window of one image of a batch into its memory, upright and downsampled by its scale.

    Every decoder must give PIL's pixels bit for bit. One that refuses a file returns ``None``; PIL tries next, and its error
    is the one shown.

    Args:
        file: (bytes,) the encoded image.
        layout: The batch's layout.
        facts: The image's facts.
        room: (h, w, C) memory of the window in the batch. Its content is undefined after a problem.

    Returns:
        Why the file cannot be decoded; an empty string on success.
    """
    orientation, scale = facts.orientation, facts.scale
    height, width = -(-facts.height // scale), -(-facts.width // scale)
    shape = (height, width, layout.channels)
    try:
        if not facts.whole and _cut_by_library(file, facts, room):
            return ""
        buffer = room if orientation == 1 and facts.whole else np.empty(shape, room.dtype)
        made: NDArray[Any] | str | None
        made = _deep(file, facts, room.dtype) if facts.format == _DEEP else _by_library(file, facts, buffer)
        if isinstance(made, str):
            return made
        if made is None:
            made = _by_pil(file, layout.channels, facts)
    except Exception as error:  # a decoder may raise any error for a damaged file
        return f"{type(error).__name__}: {error}"
    if made.shape != shape:
        return f"its {made.shape[1]}x{made.shape[0]} pixels are not the {width}x{height} of its header"
    if made is not room:
        top, left, high, wide = facts.window
        _copy(_turned(made, orientation)[top : top + high, left : left + wide], room)
    return ""


def _by_library(file: NDArray[np.uint8], facts: ImageFacts, buffer: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """The image (h, w, C) as decoded by a library that is faster than PIL, or ``None`` if none takes or accepts the file."""
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


def _cut_by_library(file: NDArray[np.uint8], facts: ImageFacts, room: NDArray[np.uint8]) -> bool:
    """Decode the window of a JPEG into its memory, and nothing else of it. Returns whether there is a library that does.

    Of a progressive JPEG all scans have to be read, which takes as long as the whole image.
    """
    if facts.format not in _CUT or facts.channels not in (1, 3) or turbojpeg.library() is None:
        return False
    window = _stored_window(facts)
    buffer = room if facts.orientation == 1 else np.empty((*window[2:], room.shape[2]), np.uint8)
    inner = (facts.wanted[1] - facts.window[1], facts.wanted[3]) if facts.orientation == 1 else (0, window[3])
    if not turbojpeg.decode(file, buffer, window, (facts.height, facts.width), facts.scale, inner):
        return False
    if buffer is not room:
        _copy(_turned(buffer, facts.orientation), room)
    return True


def _stored_window(facts: ImageFacts) -> tuple[int, int, int, int]:
    """Top, left, height and width of the window in the downsampled image as stored."""
    top, left, height, width = facts.window
    if facts.orientation > 4:
        top, left, height, width = left, top, width, height
    if facts.orientation in _UPSIDE_DOWN:
        top = -(-facts.height // facts.scale) - top - height
    if facts.orientation in _MIRRORED:
        left = -(-facts.width // facts.scale) - left - width
    return top, left, height, width


def _fits_simplejpeg(file: NDArray[np.uint8], facts: ImageFacts) -> bool:
    """Whether simplejpeg finds the size and channels of the header, and so writes no more than its buffer holds.

    It checks its buffer against the downsampled size, but writes a lossless JPEG at full size.
    """
    if facts.scale > 1 and facts.format == _LOSSLESS:
        return False
    try:
        height, width, colorspace, _ = simplejpeg().decode_jpeg_header(file.data)  # 1.3 µs
    except (ValueError, KeyError):  # KeyError: of a subsampling without a name there, such as 1x4
        return False
    channels = {"Gray": 1, "RGB": 3, "YCbCr": 3}.get(colorspace)
    return (height, width, channels) == (facts.height, facts.width, facts.channels)


def _by_simplejpeg(file: NDArray[np.uint8], buffer: NDArray[np.uint8], *, smaller: bool) -> NDArray[np.uint8] | None:
    """The decoded image, (h, w, C): ``buffer``, or an array that shares its memory.

    Returns ``None`` if simplejpeg refuses the file or the image does not fit into ``buffer``.
    """
    height, width, channels = buffer.shape
    size = {"min_height": height, "min_width": width} if smaller else {}
    try:
        # Without strict=True, simplejpeg reports an error that follows a warning as a warning only and leaves the buffer
        # unwritten. With it, warnings raise as well; the file then goes to PIL, which accepts warnings and raises errors.
        made: NDArray[np.uint8] = simplejpeg().decode_jpeg(
            file.data, "RGB" if channels == 3 else "GRAY", buffer=buffer, strict=True, **size
        )
    except ValueError:
        return None
    return buffer if made.shape == buffer.shape else made  # simplejpeg returns a new view of the buffer


def _fits_libspng(file: NDArray[np.uint8]) -> bool:
    """Whether libspng decodes a PNG to PIL's pixels if it accepts the file, and PIL accepts all files that libspng does.

    PIL has read the chunks before the pixels for the header. libspng does not look at those behind them, which must be of types
    that PIL never refuses.
    """
    data = file.data
    at = 8
    pixels = False
    accepted_behind = {b"IDAT", b"eXIf", b"tIME", b"tEXt"}
    if file[25] not in _PNG_CHANNELS or len(data) > _MOST_TEXT:
        return False
    try:
        while True:
            length, name = _CHUNK(data, at)  # 0.3 µs
            at += 12 + length
            if name == b"IEND":
                return True
            if name in (b"zTXt", b"iTXt"):  # whose text may be long enough for PIL to refuse any more
                accepted_behind.discard(b"tEXt")
            if name == b"fcTL" or (pixels and name not in accepted_behind):  # fcTL: the frame may be a part of the image
                return False
            pixels = pixels or name == b"IDAT"
    except struct.error:  # it ends before its end chunk
        return False


def _by_libspng(file: NDArray[np.uint8], buffer: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """The decoded image, (h, w, C): ``buffer``, or another array. Returns ``None`` if libspng refuses the file."""
    channels = buffer.shape[2]
    direct = _PNG_CHANNELS[int(file[25])] == channels
    if not direct and channels not in (1, 3):
        return None
    try:
        # imagecodecs checks the memory's size against the file's.
        made = imagecodecs().spng_decode(file, out=(buffer if channels > 1 else buffer[..., 0]) if direct else None)
    except (RuntimeError, ValueError):
        return None
    return buffer if direct else _converted(made, channels)


def _by_libwebp(file: NDArray[np.uint8], buffer: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """The decoded image, (h, w, C): ``buffer``, or another array. Returns ``None`` if libwebp refuses the file."""
    height, width, channels = buffer.shape
    colours = buffer if channels == 3 else np.empty((height, width, 3), np.uint8)
    if not libwebp.decode(file, colours):
        return None
    return buffer if colours is buffer else _converted(colours, channels)


def _deep(file: NDArray[np.uint8], facts: ImageFacts, dtype: np.dtype[Any]) -> NDArray[Any] | str:
    """The decoded image as stored, (h, w, C), of a PNG of 16 bits or a TIFF that PIL does not decode; or why there is none."""
    library = imagecodecs()
    if library is None:
        return 'imagecodecs, which decodes it, is not installed: pip install "gpuaug[decode]"'
    is_png = file[:8].tobytes() == _PNG
    made: NDArray[Any] = library.png_decode(file) if is_png else library.tiff_decode(file, index=0)
    shape = (facts.height, facts.width, facts.channels)
    if made.ndim == 2:
        made = made[..., None]
    if made.shape != shape and made.shape == (shape[2], *shape[:2]):  # bands apart
        made = made.transpose(1, 2, 0)
    if made.shape != shape or made.dtype != dtype:
        return f"its {made.dtype} {made.shape} are not the {dtype} {shape} of its header"
    return made


def _converted(made: NDArray[np.uint8], channels: Any) -> NDArray[np.uint8]:
    """Decoded pixels (h, w[, C]) with the channels of the batch: a view, or for grey of colours an array."""
    from PIL import Image  # which makes grey of colours in a tenth of NumPy's time

    return unpacked(prepared(Image.fromarray(made) if channels == 1 else made, channels, convert=True, where="the file"))


def _by_pil(file: NDArray[np.uint8], channels: Any, facts: ImageFacts) -> NDArray[np.uint8]:
    """The decoded image, (h, w, C), in the orientation of the file. Of several in a file, the first."""
    from PIL import JpegImagePlugin  # here, so that importing gpuaug does not import PIL

    jpeg = facts.format != _OTHER
    # JpegImageFile, because PIL.Image.open opens JPEGs of many phones as MPO, a format of several pictures.
    with JpegImagePlugin.JpegImageFile(io.BytesIO(file.data)) if jpeg else opened(file.data) as image:
        if jpeg and facts.format != _LOSSLESS:  # libjpeg-turbo converts no lossless JPEG
            grey = channels == 1 and image.mode in ("L", "RGB", "YCbCr")
            # "L" reads the luma stored in the file, as the engines do.
            # PIL picks the smallest scaled size that is at least the one asked for and rounds it up, so sides are rounded down.
            sides = (max(image.width // facts.scale, 1), max(image.height // facts.scale, 1))
            image.draft("L" if grey else image.mode, sides)
        if channels in (2, 4):  # as stored
            made = unpacked(image.convert(_STORED_MODES[channels]))
        else:
            made = unpacked(prepared(image, channels, convert=True, where="the file"))
        if image.format == "TIFF":  # which PIL turns as it decodes
            made = _turned(made, _BACK.get(facts.stored_orientation, facts.stored_orientation))
        return made


def _turned(image: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """An image (h, w, C) upright, given its EXIF orientation: a view."""
    if orientation in _UPSIDE_DOWN:
        image = image[::-1]
    if orientation in _MIRRORED:
        image = image[:, ::-1]
    return image.transpose(1, 0, 2) if orientation > 4 else image


def _copy(image: NDArray[np.uint8], room: NDArray[np.uint8]) -> None:
    """Copy pixels (h, w, C) of any strides."""
    if image.strides[1:] == room.strides[1:]:
        room[:] = image
    else:  # NumPy's innermost loop would be one over three channels: 1.3 ms for 674x450 pixels, and 0.3 so
        for channel in range(room.shape[2]):
            room[..., channel] = image[..., channel]


def _decode_some(work: Work, facts_of: list[ImageFacts], indices: Iterator[int], ended: _Ended) -> None:
    """Decode images into host memory.

    Args:
        work: The batch.
        facts_of: ``Layout.facts`` of the batch.
        indices: Indices of the images that no thread has begun.
        ended: Notes each image.
    """
    layout = work.layout
    data, firsts = (work.data, layout.starts) if work.staging is None else (work.staging, layout.staged_starts)
    starts = firsts.tolist()
    room, files = data.numpy(), work.encoded.data.numpy()
    for index in indices:
        try:
            facts = facts_of[index]
            file = files[facts.start : facts.start + facts.length]
            _, _, height, width = facts.window
            pixels = room[starts[index] : starts[index] + height * width * layout.channels]
            if problem := decode(file, layout, facts, pixels.reshape(height, width, layout.channels)):
                work.problems[index] = problem
            ended.note(None if problem else index)
        except BaseException as error:  # raised at the batch
            ended.note(error)


def _ranges(layout: Layout, indices: list[int]) -> list[tuple[int, int, int]]:
    """Ranges (start in the batch, start in staging, values) of images. Adjacent images are one range."""
    ranges: list[tuple[int, int, int]] = []
    for index in indices:
        start, staged, length = int(layout.starts[index]), int(layout.staged_starts[index]), int(layout.lengths[index])
        if ranges and ranges[-1][0] + ranges[-1][2] == start:  # then they are adjacent in staging, too
            ranges[-1] = (*ranges[-1][:2], ranges[-1][2] + length)
        else:
            ranges.append((start, staged, length))
    return ranges
