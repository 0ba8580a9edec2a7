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

MAX_INDICES = 1024
"""Maximum number of videos whose ``Index`` a process keeps, each with about 17 bytes per frame."""

MAX_OPEN = 8
"""Maximum number of videos that a process keeps open."""

MAX_FRAMES = 2**24
"""Maximum number of frames of a video: six days."""

_ORIENTATIONS = {0: 1, 90: 8, -90: 6, 180: 3, -180: 3, 270: 6, -270: 8}
"""Rotation that displays a frame upright, in degrees counterclockwise → EXIF orientation."""

_UNSPECIFIED = 2
"""Number of the colour matrix in H.273 for a video that does not specify one."""


class VideoError(Exception):
    """Reason why a video cannot be read, as a clause about "it"."""


@dataclass(frozen=True, slots=True)
class Index:
    """Header fields of a video, and time stamps of its packets in decoding order, from the first key frame on."""

    codec: str
    """FFmpeg's name of the codec, such as h264."""
    library: str
    """FFmpeg's name of the decoder, such as libdav1d."""
    pixels: str
    """FFmpeg's name of the pixel format, such as yuv420p."""
    height: int
    """Height of the stored frames, before they are rotated upright."""
    width: int
    """Width of the stored frames."""
    matrix: int
    """Number of the colour matrix in H.273."""
    full_range: bool
    """Whether black is 0, not 16."""
    interlaced: bool
    orientation: int
    """EXIF orientation of the frames: 1, 3, 6 or 8."""
    reorder: int
    """Number of frames by which decoding runs ahead of display."""
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
    """(K,) whether decoding can start at a key frame: no later frame is predicted from frames before the key frame."""
    displayed: NDArray[np.int64]
    """(N,) packet index of each visible frame, in display order."""
    time_base: Fraction
    """Seconds per unit of the time stamps."""
    missing: int
    """Number of packets that the container declares but does not contain."""

    def ranges(self, frame_packets: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return the ranges of packets, (first, last), from which frames are decoded. Each range starts at a key frame.

        A frame after a key frame in decoding order may be displayed before the key frame. Its range starts at an earlier key
        frame.

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
    """Least-recently-used caches of a process: ``Index`` objects of many videos, and a few open videos.

    A forked process does not use the open containers of its parent, because the files of both share one read position.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clear()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._clear)

    def _clear(self) -> None:
        self._lock = threading.Lock()
        self.indices: OrderedDict[tuple[Any, ...], Index] = OrderedDict()
        """(path, size, time of the last change) of a file → index."""
        self.open: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        """(path, size, time of the last change) of a file → PyAV's container, which no thread is using."""

    def take(self, source: str | memoryview) -> "Video":
        """Return the video at a path, or in bytes, for use by one thread. Call ``give_back`` after use.

        Raises:
            VideoError: If the video cannot be opened.
        """
        if not isinstance(source, str):
            if not len(source):
                raise VideoError("it is empty")
            return Video(_open_container(BytesIO(source)), None, None)
        try:
            status = os.stat(source)
        except (OSError, ValueError) as error:
            reason = f"[Errno {error.errno}] {error.strerror}" if isinstance(error, OSError) else str(error)
            raise VideoError(reason) from None
        key = (source, status.st_size, status.st_mtime_ns)
        with self._lock:
            container = self.open.pop(key, None)
            index = self.indices.get(key)
        return Video(container or _open_container(source), index, key)

    def give_back(self, video: "Video") -> None:
        """Keep a video open for the next clip of the same video."""
        if video.key is None or video.index is None:
            video.close()
            return
        with self._lock:
            self.indices[video.key] = video.index
            self.indices.move_to_end(video.key)
            to_close = [self.open.pop(video.key, None)]
            self.open[video.key] = video.container
            while len(self.indices) > MAX_INDICES:
                self.indices.popitem(last=False)
            while len(self.open) > MAX_OPEN:
                to_close.append(self.open.popitem(last=False)[1])
        for container in to_close:
            if container is not None:
                container.close()


VIDEOS = Videos()
"""Videos of this process."""


def _open_container(source: str | BytesIO) -> Any:
    """Open a video and return PyAV's container.

    Raises:
        VideoError: If the video cannot be opened, or has no video stream.
    """
    av = libav.required_module()
    try:
        container = libav.open_container(source)
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
        index: Index of the video; ``None`` if the packets were not read yet.
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
            av = libav.required_module()
            try:
                self.index = self._scan()
            except (av.error.FFmpegError, ValueError, OverflowError) as error:
                raise VideoError(_reason(error)) from None
        return self.index

    def _scan(self) -> Index:
        """Read all packets and return the index.

        Raises:
            VideoError: If the video cannot be decoded.
        """
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
            if count > MAX_FRAMES:
                raise VideoError(f"it has more than {MAX_FRAMES} frames")
            if not packet.is_keyframe and first_frame is None:
                continue
            if first_frame is None:
                first_frame = self._first_frame(packet)
            time_stamp = packet.pts if packet.pts is not None else (packet.dts if not context.reorder_depth else None)
            if time_stamp is None:
                raise VideoError(f"its frame {len(pts)} has no time stamp")
            pts.append(time_stamp)
            dts.append(packet.dts if packet.dts is not None else time_stamp)
            if packet.is_keyframe:
                keys.append(len(pts) - 1)
                content = nal.with_start_codes(memoryview(packet), length_size)
                instant.append(nal.is_instant(codec, content))
                recovery_frames = nal.recovery(codec, content)
                # The number in the file leaves out frames from which no other frame is predicted.
                recoveries.append(recovery_frames * (1 + 2 * context.reorder_depth))
            hidden.append(packet.is_discard)
        if first_frame is None:
            raise VideoError("it has no key frame")
        time_stamps, is_hidden = np.array(pts, np.int64), np.array(hidden, np.bool_)
        order = np.argsort(time_stamps, kind="stable")
        if len(time_stamps) > 1 and not np.diff(time_stamps[order]).all():
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
            time_stamps,
            np.array(dts, np.int64),
            np.array(keys, np.int64),
            np.array(recoveries, np.int64),
            np.array(instant, np.bool_),
            order[~is_hidden[order]],
            stream.time_base,
            max(stream.frames - count, 0),
        )

    def _first_frame(self, packet: Any) -> Any:
        """Decode the first frame, because FFmpeg reports the rotation and the colours only with a decoded frame."""
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
            VideoError: If the packets differ from the packets that were read for the index.
        """
        av = libav.required_module()
        try:
            yield from self._packets(first, last)
        except (av.error.FFmpegError, ValueError, EOFError, OverflowError) as error:
            raise VideoError(_reason(error)) from None

    def _packets(self, first: int, last: int) -> Iterator[Any]:
        index = self.read_index()
        first_pts, first_dts = int(index.pts[first]), int(index.dts[first])
        # A file without a table of key frames may seek past the packet. Then read from the beginning.
        for seek_dts in (first_dts, int(index.dts[0]) - 1):
            self.container.seek(seek_dts, stream=self._stream, backward=True)
            number = None
            for packet, pts, dts in self._packets_with_time_stamps():
                if number is None:
                    if (pts, dts) != (first_pts, first_dts):
                        if dts > first_dts:
                            break
                        continue
                    number = first
                if pts != index.pts[number] or packet.is_corrupt:
                    raise VideoError(f"its packet {number} is damaged")
                yield packet
                number += 1
                if number > last:
                    return
            if number is not None:
                raise VideoError(f"its data end before packet {last}")
        raise VideoError(f"its packet {first} cannot be found")

    def _packets_with_time_stamps(self) -> Iterator[tuple[Any, int, int]]:
        """Yield (packet, presentation time stamp, decoding time stamp). The time stamps are computed as for the index."""
        for packet in self.container.demux(self._stream):
            if packet.size:
                pts = packet.pts if packet.pts is not None else packet.dts
                if pts is not None:
                    yield packet, pts, packet.dts if packet.dts is not None else pts


def _reason(error: BaseException) -> str:
    """Return FFmpeg's description of an error, without the name of the file."""
    strerror = getattr(error, "strerror", None)
    return f"FFmpeg says: {strerror or error}" if strerror or str(error) else type(error).__name__
