"""A video as a worker reads it: the time stamps of all its frames, and the packets that some frames are decoded from.

**Frame numbers.** A packet holds one frame. Frames are numbered by their presentation time stamps, from the first key frame of
the file on, as a decoder that reads the whole file gives them. The packets are read once per file for that, without decoding.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.decode.clips import libav, nal

MOST_INDICES = 1024
"""Videos whose time stamps a process keeps: about 17 bytes per frame."""

MOST_OPEN = 8
"""Videos that a process keeps open."""

MOST_FRAMES = 2**24
"""Frames of a video: six days of it."""

_ORIENTATIONS = {0: 1, 90: 8, -90: 6, 180: 3, -180: 3, 270: 6, -270: 8}
"""EXIF's orientation by the degrees that a frame is turned counterclockwise to be displayed."""

_UNSPECIFIED = 2
"""H.273's number for colours without a matrix."""


class VideoError(Exception):
    """Why a video cannot be read, as a clause."""


@dataclass(frozen=True, slots=True)
class Index:
    """Header fields of a video, and its packets in the order of decoding, from the first key frame on."""

    codec: str
    library: str
    pixels: str
    height: int
    width: int
    matrix: int
    full_range: bool
    interlaced: bool
    orientation: int
    reorder: int
    extradata: bytes
    """Parameter sets, with start codes for H.264 and HEVC."""
    length_size: int
    """Bytes of the length before each NAL unit; 0 without lengths."""
    pts: NDArray[np.int64]
    """(P,) presentation time stamps."""
    dts: NDArray[np.int64]
    """(P,) decoding time stamps."""
    keys: NDArray[np.int64]
    """(K,) packets of key frames."""
    recoveries: NDArray[np.int64]
    """(K,) number of frames after which decoding from each key frame on gives the right pictures."""
    instant: NDArray[np.bool_]
    """(K,) whether no frame behind a key frame refers to frames before it."""
    shown: NDArray[np.int64]
    """(N,) packet of each frame that is shown, in the order in which they are shown."""
    time_base: Fraction
    missing: int
    """Number of packets that the container declares and does not have."""

    def ranges(self, wanted: NDArray[np.int64]) -> list[tuple[int, int]]:
        """First and last packet of each part of the video that frames are decoded from, each from a key frame on.

        Frames that are decoded after a key frame and shown before it need the key frame before that.

        Args:
            wanted: (T,) packets of the frames.
        """
        right = np.minimum(self.keys + self.recoveries, len(self.pts) - 1)
        found: list[tuple[int, int]] = []
        for packet in np.unique(wanted).tolist():
            usable = np.flatnonzero((right <= packet) & (self.pts[right] <= self.pts[packet]))
            number = int(usable[-1]) if len(usable) else 0
            first = int(self.keys[number])
            if not found or (first > found[-1][1] and self.instant[number]):
                found.append((first, packet))
            else:
                found[-1] = (found[-1][0], packet)
        return found

    @property
    def times_s(self) -> NDArray[np.float64]:
        """(N,) time of each frame in seconds."""
        return (self.pts[self.shown] * float(self.time_base)).astype(np.float64)


class Videos:
    """Videos that this process reads: the indices of many, and some open. Least recently used ones go first.

    Containers of a process that forked are left alone in the child: their files share one position.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clear()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._clear)

    def _clear(self) -> None:
        self._lock = threading.Lock()
        self.indices: OrderedDict[tuple[Any, ...], Index] = OrderedDict()
        self.open: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def take(self, source: str | memoryview) -> "Video":
        """The video at a path, or in bytes. Give it back after use.

        Raises:
            VideoError: If it cannot be opened.
        """
        if not isinstance(source, str):
            if not len(source):
                raise VideoError("it is empty")
            return Video(_opened(BytesIO(source)), None, None)
        try:
            facts = os.stat(source)
        except (OSError, ValueError) as error:
            reason = f"[Errno {error.errno}] {error.strerror}" if isinstance(error, OSError) else str(error)
            raise VideoError(reason) from None
        key = (source, facts.st_size, facts.st_mtime_ns)
        with self._lock:
            container = self.open.pop(key, None)
            index = self.indices.get(key)
        return Video(container or _opened(source), index, key)

    def give_back(self, video: "Video") -> None:
        """Keep a video open for the next clip of it."""
        if video.key is None or video.index is None:
            video.close()
            return
        with self._lock:
            self.indices[video.key] = video.index
            self.indices.move_to_end(video.key)
            closing = [self.open.pop(video.key, None)]
            self.open[video.key] = video.container
            while len(self.indices) > MOST_INDICES:
                self.indices.popitem(last=False)
            while len(self.open) > MOST_OPEN:
                closing.append(self.open.popitem(last=False)[1])
        for container in closing:
            if container is not None:
                container.close()


VIDEOS = Videos()
"""The videos of this process."""


def _opened(source: str | BytesIO) -> Any:
    av = libav.required()
    try:
        container = libav.opened(source)
        if not container.streams.video:
            container.close()
            raise VideoError("it has no video stream")
        return container
    except (av.error.FFmpegError, ValueError, EOFError, MemoryError) as error:
        raise VideoError(_words(error)) from None


class Video:
    """An open video.

    Args:
        container: PyAV's container.
        index: The index, or ``None`` if the packets have not been read.
        key: The video's key in ``Videos``.
    """

    def __init__(self, container: Any, index: Index | None, key: tuple[Any, ...] | None) -> None:
        self.container, self.index, self.key = container, index, key
        self._stream = container.streams.video[0]

    def close(self) -> None:
        """Close the container."""
        self.container.close()

    def read_index(self) -> Index:
        """The index; reads all packets unless they have been read.

        Raises:
            VideoError: If the video cannot be decoded.
        """
        if self.index is None:
            av = libav.required()
            try:
                self.index = self._scanned()
            except (av.error.FFmpegError, ValueError, OverflowError) as error:
                raise VideoError(_words(error)) from None
        return self.index

    def _scanned(self) -> Index:
        stream, context = self._stream, self._stream.codec_context
        if context is None or not context.codec.canonical_name or not context.is_decoder:
            raise VideoError("no decoder knows its codec")
        codec = context.codec.canonical_name
        extradata, length_size = nal.parameter_sets(codec, bytes(context.extradata or b""))
        pts, dts, keys, recoveries = list[int](), list[int](), list[int](), list[int]()
        instant, hidden = list[bool](), list[bool]()
        count, first = 0, None
        for packet in self.container.demux(stream):
            if packet.size == 0:
                continue
            count += 1
            if count > MOST_FRAMES:
                raise VideoError(f"it has more than {MOST_FRAMES} frames")
            if not packet.is_keyframe and first is None:
                continue
            if first is None:
                first = self._first_frame(packet)
            time = packet.pts if packet.pts is not None else (packet.dts if not context.reorder_depth else None)
            if time is None:
                raise VideoError(f"its frame {len(pts)} has no time stamp")
            pts.append(time)
            dts.append(packet.dts if packet.dts is not None else time)
            if packet.is_keyframe:
                keys.append(len(pts) - 1)
                content = nal.with_start_codes(memoryview(packet), length_size)
                instant.append(nal.is_instant(codec, content))
                counted = nal.recovery(codec, content)
                recoveries.append(counted * (1 + 2 * context.reorder_depth))  # frames that none refers to are not counted
            hidden.append(packet.is_discard)
        if first is None:
            raise VideoError("it has no key frame")
        stamps, discarded = np.array(pts, np.int64), np.array(hidden, np.bool_)
        order = np.argsort(stamps, kind="stable")
        if len(stamps) > 1 and not np.diff(stamps[order]).all():
            raise VideoError("two of its frames have the same time stamp")
        degrees = int(first.rotation)
        if degrees not in _ORIENTATIONS:
            raise VideoError(f"it is turned by {degrees} degrees, no quarter turn")
        return Index(
            codec,
            context.name,
            first.format.name,
            first.height,
            first.width,
            _UNSPECIFIED if first.colorspace is None else int(first.colorspace),
            int(first.color_range) == 2 or first.format.name.startswith("yuvj"),
            bool(first.interlaced_frame) or context.field_order > 1,
            _ORIENTATIONS[degrees],
            context.reorder_depth,
            extradata,
            length_size,
            stamps,
            np.array(dts, np.int64),
            np.array(keys, np.int64),
            np.array(recoveries, np.int64),
            np.array(instant, np.bool_),
            order[~discarded[order]],
            stream.time_base,
            max(stream.frames - count, 0),
        )

    def _first_frame(self, packet: Any) -> Any:
        """The first frame, decoded for its rotation and colours, which FFmpeg gives with frames alone."""
        context = self._stream.codec_context
        context.thread_count = 1
        frames = [*context.decode(packet), *context.decode(None)]
        context.flush_buffers()
        if not frames:
            raise VideoError("its first key frame cannot be decoded")
        return frames[0]

    def packets(self, first: int, last: int) -> Iterator[Any]:
        """The packets from number ``first``, a key frame, to ``last``, in the order of decoding.

        Raises:
            VideoError: If other packets are read than those of the index.
        """
        av = libav.required()
        try:
            yield from self._packets(first, last)
        except (av.error.FFmpegError, ValueError, EOFError, OverflowError) as error:
            raise VideoError(_words(error)) from None

    def _packets(self, first: int, last: int) -> Iterator[Any]:
        index = self.read_index()
        start = (int(index.pts[first]), int(index.dts[first]))
        for stamp in (start[1], int(index.dts[0]) - 1):  # a container without an index may seek past the key frame
            self.container.seek(stamp, stream=self._stream, backward=True)
            number = None
            for packet in self._stamped():
                if number is None:
                    if packet[1:] != start:
                        if packet[2] > start[1]:
                            break
                        continue
                    number = first
                if packet[1] != index.pts[number] or packet[0].is_corrupt:
                    raise VideoError(f"its packet {number} is damaged")
                yield packet[0]
                number += 1
                if number > last:
                    return
            if number is not None:
                raise VideoError(f"its data end before packet {last}")
        raise VideoError(f"its packet {first} cannot be found")

    def _stamped(self) -> Iterator[tuple[Any, int, int]]:
        """Packets with their presentation and decoding time stamps, as the index has them."""
        for packet in self.container.demux(self._stream):
            if packet.size:
                pts = packet.pts if packet.pts is not None else packet.dts
                if pts is not None:
                    yield packet, pts, packet.dts if packet.dts is not None else pts


def _words(error: BaseException) -> str:
    """FFmpeg's words for an error, without the file's name."""
    strerror = getattr(error, "strerror", None)
    return f"FFmpeg says: {strerror or error}" if strerror or str(error) else type(error).__name__
