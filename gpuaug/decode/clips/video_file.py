"""Videos in worker processes: the time stamps of all frames, and the packets from which selected frames are decoded.

**Frame numbers.** A packet holds one frame. Frames are numbered by presentation time stamp, starting at the first key frame of
the file: the order in which a decoder that reads the whole file returns them. To number them, all packets are read once per
file, without decoding.
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
"""Maximum number of videos whose index a process keeps: about 17 bytes per frame."""

MOST_OPEN = 8
"""Maximum number of videos that a process keeps open."""

MOST_FRAMES = 2**24
"""Maximum number of frames of a video: six days."""

_ORIENTATIONS = {0: 1, 90: 8, -90: 6, 180: 3, -180: 3, 270: 6, -270: 8}
"""EXIF orientation by the rotation that displays a frame, in degrees counterclockwise."""

_UNSPECIFIED = 2
"""Matrix coefficients (H.273) of a video that does not specify them."""


class VideoError(Exception):
    """Reason why a video cannot be read, as a clause about "it"."""


@dataclass(frozen=True, slots=True)
class Index:
    """Header fields of a video, and its packets in decoding order, from the first key frame on."""

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
    """Number of bytes of the length before each NAL unit; 0 for start codes."""
    pts: NDArray[np.int64]
    """(P,) presentation time stamps."""
    dts: NDArray[np.int64]
    """(P,) decoding time stamps."""
    keys: NDArray[np.int64]
    """(K,) indices of the packets with key frames."""
    recoveries: NDArray[np.int64]
    """(K,) number of frames after which decoding from a key frame gives correct pictures."""
    instant: NDArray[np.bool_]
    """(K,) whether no frame after a key frame refers to frames before it."""
    displayed: NDArray[np.int64]
    """(N,) packet index of each visible frame, in display order."""
    time_base: Fraction
    missing: int
    """Number of packets that the container declares but does not contain."""

    def ranges(self, frame_packets: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return the ranges of packets, (first, last), from which frames are decoded. Each range starts at a key frame.

        A frame that follows a key frame in decoding order, and precedes it in display order, needs the key frame before that
        one.

        Args:
            frame_packets: (T,) packet indices of the frames.
        """
        correct_from = np.minimum(self.keys + self.recoveries, len(self.pts) - 1)
        ranges: list[tuple[int, int]] = []
        for packet in np.unique(frame_packets).tolist():
            usable = np.flatnonzero((correct_from <= packet) & (self.pts[correct_from] <= self.pts[packet]))
            key = int(usable[-1]) if len(usable) else 0
            first = int(self.keys[key])
            if not ranges or (first > ranges[-1][1] and self.instant[key]):
                ranges.append((first, packet))
            else:
                ranges[-1] = (ranges[-1][0], packet)
        return ranges

    @property
    def times_s(self) -> NDArray[np.float64]:
        """(N,) time of each visible frame in seconds."""
        return (self.pts[self.displayed] * float(self.time_base)).astype(np.float64)


class Videos:
    """Least-recently-used caches of a process: indices of many videos, and some open videos.

    A forked child does not use the open containers of its parent, because their files share one read position.
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
        """Return the video at a path, or in bytes. Call ``give_back`` after use.

        Raises:
            VideoError: If the video cannot be opened.
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
        """Keep a video open for the next clip of the same video."""
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
"""Videos of this process."""


def _opened(source: str | BytesIO) -> Any:
    av = libav.required()
    try:
        container = libav.opened(source)
        if not container.streams.video:
            container.close()
            raise VideoError("it has no video stream")
        return container
    except (av.error.FFmpegError, ValueError, EOFError, MemoryError) as error:
        raise VideoError(_reason(error)) from None


class Video:
    """An open video.

    Args:
        container: PyAV's container.
        index: Index of the video; ``None`` if its packets were not read yet.
        key: Key of the video in ``Videos``; ``None`` for a video in bytes.
    """

    def __init__(self, container: Any, index: Index | None, key: tuple[Any, ...] | None) -> None:
        self.container, self.index, self.key = container, index, key
        self._stream = container.streams.video[0]

    def close(self) -> None:
        """Close the container."""
        self.container.close()

    def read_index(self) -> Index:
        """Return the index. The first call reads all packets.

        Raises:
            VideoError: If the video cannot be decoded.
        """
        if self.index is None:
            av = libav.required()
            try:
                self.index = self._scanned()
            except (av.error.FFmpegError, ValueError, OverflowError) as error:
                raise VideoError(_reason(error)) from None
        return self.index

    def _scanned(self) -> Index:
        stream, context = self._stream, self._stream.codec_context
        if context is None or not context.codec.canonical_name or not context.is_decoder:
            raise VideoError("FFmpeg has no decoder for its codec")
        codec = context.codec.canonical_name
        extradata, length_size = nal.parameter_sets(codec, bytes(context.extradata or b""))
        pts, dts, keys, recoveries = list[int](), list[int](), list[int](), list[int]()
        instant, hidden = list[bool](), list[bool]()
        count, first_frame = 0, None
        for packet in self.container.demux(stream):
            if packet.size == 0:
                continue
            count += 1
            if count > MOST_FRAMES:
                raise VideoError(f"it has more than {MOST_FRAMES} frames")
            if not packet.is_keyframe and first_frame is None:
                continue
            if first_frame is None:
                first_frame = self._first_frame(packet)
            time = packet.pts if packet.pts is not None else (packet.dts if not context.reorder_depth else None)
            if time is None:
                raise VideoError(f"its frame {len(pts)} has no time stamp")
            pts.append(time)
            dts.append(packet.dts if packet.dts is not None else time)
            if packet.is_keyframe:
                keys.append(len(pts) - 1)
                content = nal.with_start_codes(memoryview(packet), length_size)
                instant.append(nal.is_instant(codec, content))
                recovery_frames = nal.recovery(codec, content)
                # The count leaves out frames that no other frame refers to.
                recoveries.append(recovery_frames * (1 + 2 * context.reorder_depth))
            hidden.append(packet.is_discard)
        if first_frame is None:
            raise VideoError("it has no key frame")
        stamps, discarded = np.array(pts, np.int64), np.array(hidden, np.bool_)
        order = np.argsort(stamps, kind="stable")
        if len(stamps) > 1 and not np.diff(stamps[order]).all():
            raise VideoError("two of its frames have the same time stamp")
        degrees = int(first_frame.rotation)
        if degrees not in _ORIENTATIONS:
            raise VideoError(f"its rotation of {degrees} degrees is not a multiple of 90")
        return Index(
            codec,
            context.name,
            first_frame.format.name,
            first_frame.height,
            first_frame.width,
            _UNSPECIFIED if first_frame.colorspace is None else int(first_frame.colorspace),
            int(first_frame.color_range) == 2 or first_frame.format.name.startswith("yuvj"),
            bool(first_frame.interlaced_frame) or context.field_order > 1,
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
        """Decode the first frame, because FFmpeg reports the rotation and colours of frames only."""
        context = self._stream.codec_context
        context.thread_count = 1
        frames = [*context.decode(packet), *context.decode(None)]
        context.flush_buffers()
        if not frames:
            raise VideoError("its first key frame cannot be decoded")
        return frames[0]

    def packets(self, first: int, last: int) -> Iterator[Any]:
        """Yield the packets ``first``, a key frame, to ``last``, in decoding order.

        Raises:
            VideoError: If the packets differ from those of the index.
        """
        av = libav.required()
        try:
            yield from self._packets(first, last)
        except (av.error.FFmpegError, ValueError, EOFError, OverflowError) as error:
            raise VideoError(_reason(error)) from None

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
        """Yield (packet, presentation time stamp, decoding time stamp), with the same time stamps as the index."""
        for packet in self.container.demux(self._stream):
            if packet.size:
                pts = packet.pts if packet.pts is not None else packet.dts
                if pts is not None:
                    yield packet, pts, packet.dts if packet.dts is not None else pts


def _reason(error: BaseException) -> str:
    """Return FFmpeg's description of an error, without the name of the file."""
    strerror = getattr(error, "strerror", None)
    return f"FFmpeg says: {strerror or error}" if strerror or str(error) else type(error).__name__
