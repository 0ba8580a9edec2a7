"""Index of a video: the number of each frame, and the packets from which selected frames are decoded.

**Frame numbers.** Frames are numbered in the order in which a decoder that reads the whole file returns them, starting at 0. In
most files each packet holds one frame, and presentation time stamps give this order. Then all packets are read once, without
decoding. Other files are also decoded once: files whose container stores no presentation time stamps (AVI), files whose first
frames refer to frames before the beginning of the file, and codecs whose packets may hold no frame or several frames.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuaug.decode.clips import frame_headers, libav, limits, nal

_STORE_PRESENTATION = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "mpegts", "flv")
"""FFmpeg's names of the containers that store the presentation time stamp of each frame."""

_STORE_FRAMES = _STORE_PRESENTATION[:2]
"""Containers whose packets hold both fields of an interlaced H.264 frame."""

_ONE_FRAME_PER_PACKET = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg1video", "mpeg2video", "mpeg4", "ffv1")
"""FFmpeg's names of the codecs with one frame per packet, in addition to codecs without prediction. ``frame_headers`` detects
packets with no frame or several frames, and packets that the container marks as key frames by mistake."""

_START_AT_KEYS = (*_ONE_FRAME_PER_PACKET, "h263", "flv1", "msmpeg4v2", "msmpeg4v3", "wmv1", "wmv2")
"""FFmpeg's names of the codecs that can be decoded from any key frame. Clips of other codecs with prediction are decoded from
packet 0."""

_MOST_REORDERED = 16
"""Maximum number of frames by which the display order of a codec differs from the decoding order."""

_SIDE_DATA = ("palette", "new_extradata", "param_change")
"""Data of a packet, in addition to its content, that change the pixels."""

_CHECKED_BYTES = 1024
"""Number of bytes at the beginning of a packet from which its checksum is computed."""

_ORIENTATIONS = {
    (False, False, False): 1,
    (False, True, False): 2,
    (False, True, True): 3,
    (False, False, True): 4,
    (True, False, False): 5,
    (True, True, False): 6,
    (True, True, True): 7,
    (True, False, True): 8,
}
"""(Whether rows become columns, whether x is reversed after that, and y) → EXIF orientation."""

_MOST_SKEW = 0.0175
"""Maximum ratio of the elements beside a rotation by a multiple of 90 degrees in a display matrix: one degree, as in FFmpeg."""

UNSPECIFIED = 2
"""Number of the colour matrix in H.273 for a video that does not specify one."""

CONVERT = "convert it to H.264 in an MP4 file"
"""Way out for a video that cannot be read frame by frame."""


class VideoError(Exception):
    """Reason why a video cannot be read, as a clause about "it"."""


@dataclass(frozen=True, slots=True)
class Index:
    """Header fields of a video, and its packets in decoding order."""

    codec: str
    """FFmpeg's name of the codec, such as h264."""
    library: str
    """FFmpeg's name of the decoder, such as libdav1d."""
    tag: str
    """Codec tag of the container, at most four characters, such as XVID."""
    bits: int
    """Number of bits per pixel in the container; 0 if it is not stored."""
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
    """EXIF orientation of the frames, 1 to 8."""
    reorder: int
    """Number of frames by which decoding runs ahead of display."""
    extradata: bytes
    """Parameter sets, with start codes for H.264 and HEVC."""
    length_size: int
    """Number of bytes of the length before each NAL unit; 0 for start codes."""
    stamps: NDArray[np.int64]
    """(P,) presentation time stamp of each packet in the file; its decoding time stamp if it has none."""
    checksums: NDArray[np.uint32]
    """(P,) ``checksum`` of each packet."""
    pts: NDArray[np.int64]
    """(P,) distinct numbers that ascend in display order: ``stamps``, or numbers found by decoding."""
    shown: NDArray[np.bool_]
    """(P,) whether the packet holds a frame that is displayed."""
    keys: NDArray[np.int64]
    """(K,) indices of the packets at which decoding can start: 0, and key frames."""
    key_dts: NDArray[np.int64]
    """(K,) decoding time stamp of each of these packets."""
    instant: NDArray[np.bool_]
    """(K,) whether no frame after the key frame, in decoding order, is predicted from frames before the key frame."""
    displayed: NDArray[np.int64]
    """(N,) packet index of each visible frame, in display order."""
    time_base: Fraction
    """Seconds per unit of ``stamps``."""
    last_duration: int
    """Duration of the frame with the last time stamp, in units of ``stamps``; 0 if the file does not store it."""
    numbered_by_decoder: bool
    """Whether ``pts`` and ``displayed`` were found by decoding."""
    missing: int
    """Number of packets that the container declares but does not contain."""

    def ranges(self, frame_packets: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return the ranges of packets, (first, last), from which frames are decoded. Each range starts at a key frame.

        A frame after a key frame in decoding order may be displayed before the key frame. Its range starts at an earlier key
        frame. A range that would refer to frames before it is joined with the range before it.

        Args:
            frame_packets: (T,) packet indices of the frames.
        """
        needs: list[tuple[int, int]] = []
        for packet in np.unique(frame_packets).tolist():
            usable = np.flatnonzero((self.keys <= packet) & (self.pts[self.keys] <= self.pts[packet]))
            needs.append((int(usable[-1]) if len(usable) else 0, packet))
        shown = np.flatnonzero(self.shown)
        ranges: list[tuple[int, int]] = []
        for key, packet in sorted(needs):
            first = int(self.keys[key])
            # Packets without a frame that follow may hold the rest of the frame, such as its second field.
            after = int(np.searchsorted(shown, packet, side="right"))
            last = int(shown[after]) - 1 if after < len(shown) else len(self.pts) - 1
            if self.numbered_by_decoder:  # H.264: after a start at no IDR frame, a later frame decides whether a frame is shown
                last = min(last + self.reorder, len(self.pts) - 1)
            if ranges and (first <= ranges[-1][1] or not self.instant[key]):
                ranges[-1] = (ranges[-1][0], max(ranges[-1][1], last))
            else:
                ranges.append((first, last))
        return ranges

    @property
    def may_be_packed(self) -> bool:
        """Whether a packet may hold a frame and the next packet's frame (DivX)."""
        return self.codec == "mpeg4" and self.numbered_by_decoder

    @property
    def times_s(self) -> NDArray[np.float64]:
        """(N,) time of each visible frame in seconds, ascending.

        Raises:
            VideoError: If the time stamps begin again, as in files that were joined end to end.
        """
        stamps = self.stamps[self.displayed]
        if (np.diff(stamps) < 0).any():
            # Decoding time stamps, in containers without presentation time stamps, ascend in the order of the packets.
            if (np.diff(self.stamps) < 0).any():
                raise VideoError("its time stamps begin again: pass start, at or a list of frames to read_clip")
            stamps = np.sort(stamps)
        return (stamps * float(self.time_base)).astype(np.float64)

    @property
    def end_s(self) -> float:
        """End of the last visible frame in seconds; its time stamp if its duration is not known."""
        return float((self.stamps[self.displayed].max() + self.last_duration) * float(self.time_base))


def stamp_of(packet: Any) -> int | None:
    """Return the presentation time stamp of a packet, or its decoding time stamp, or ``None`` if it has neither."""
    stamp: int | None = packet.dts if packet.pts is None else packet.pts
    return stamp


def packets_of(container: Any) -> Iterator[Any]:
    """Yield the packets of the video from the position of the container on. Empty packets, which hold no frame, are omitted.

    Raises:
        VideoError: If the packets of all tracks have many more bytes than the file, because they overlap.
    """
    video = container.streams.video[0].index
    remaining = limits.MAX_READINGS * container.size + _CHECKED_BYTES
    for packet in container.demux():
        remaining -= packet.size
        if remaining < 0:
            raise VideoError(f"its packets have {limits.MAX_READINGS} times as many bytes as the file: {CONVERT}")
        if packet.size and packet.stream_index == video:
            yield packet


def checksum(packet: Any) -> int:
    """Return a checksum of the size and the first bytes of a packet."""
    return zlib.crc32(memoryview(packet)[:_CHECKED_BYTES], packet.size)


class _Key(NamedTuple):
    """Key frame. See ``Index``."""

    packet: int
    dts: int
    instant: bool


class Scan:
    """Packets of a video in decoding order. The constructor reads all of them.

    Args:
        container: PyAV's container, at its beginning.

    Raises:
        VideoError, DamagedPacketError: If the video cannot be decoded.
    """

    def __init__(self, container: Any) -> None:
        self._stream = stream = container.streams.video[0]
        self._stores_presentation = container.format.name in _STORE_PRESENTATION
        context = stream.codec_context
        if context is None or not context.codec.canonical_name or not context.is_decoder:
            raise VideoError("FFmpeg has no decoder for its codec")
        if context.width * context.height > limits.MAX_FRAME_PIXELS:
            raise VideoError(f"its {context.width}x{context.height} pixels are more than {limits.MAX_FRAME_PIXELS}")
        libav.limit_pixels(context, limits.MAX_FRAME_PIXELS)
        self._codec = context.codec.canonical_name
        self._reorder = context.reorder_depth
        self._extradata, self._length_size = nal.parameter_sets(self._codec, bytes(context.extradata or b""))
        self._stamps: list[int | None] = []
        self._durations: list[int] = []
        self._checksums: list[int] = []
        self._discarded: list[bool] = []
        self._keys: list[_Key] = []
        self._last_dts: int | None = None
        self._first_frame: Any = None
        # Whether each packet certainly holds one frame, and no displayed frame refers to frames before the file.
        self._is_plain = context.codec.intra_only or self._codec in _ONE_FRAME_PER_PACKET
        if self._codec in ("h264", "hevc"):  # the depth of the reordering may grow after the beginning
            self._is_plain = self._stores_presentation
        if self._codec == "h264" and context.field_order > 1:
            self._is_plain = container.format.name in _STORE_FRAMES
        for packet in packets_of(container):
            self._append(packet, context)
        if not self._stamps:
            raise VideoError("it has no frame")

    def _append(self, packet: Any, context: Any) -> None:
        """Append one packet. See ``Index`` for the meaning of the lists."""
        number = len(self._stamps)
        if number == limits.MAX_PACKETS:
            raise VideoError(f"it has more than {limits.MAX_PACKETS} frames")
        for side_data in _SIDE_DATA:
            if packet.has_sidedata(side_data) and bytes(packet.get_sidedata(side_data)) != context.extradata:
                raise VideoError(f"its packet {number} changes parameters of the codec ({side_data}): {CONVERT}")
        stamp = stamp_of(packet)
        self._stamps.append(stamp)
        self._durations.append(max(packet.duration or 0, 0))
        self._checksums.append(checksum(packet))
        self._discarded.append(packet.is_discard)
        content = memoryview(packet)
        if packet.is_keyframe or context.codec.intra_only:
            content = nal.with_start_codes(content, self._length_size)  # type: ignore[assignment]
            if frame_headers.is_key_frame(self._codec, content):
                dts = (stamp or 0) if packet.dts is None else packet.dts
                self._keys.append(_Key(number, dts, nal.is_instant(self._codec, content)))
        if number == 0:
            self._first_frame = _decode_alone(packet, context) if self._keys else None
            # Other decoders than H.264's show the first frame if it is a key frame.
            self._is_plain &= self._first_frame is not None and (self._codec != "h264" or self._keys[0].instant)
        elif self._is_plain:
            # Decoding time stamps that descend begin again. Frames before and after this packet have similar time stamps.
            descends = packet.dts is not None and self._last_dts is not None and packet.dts < self._last_dts
            self._is_plain = not descends and self._holds_a_frame(packet, stamp)
        self._last_dts = packet.dts

    def _holds_a_frame(self, packet: Any, stamp: int | None) -> bool:
        """Return whether a packet after the first certainly holds a frame that is displayed, or that ``index`` omits."""
        content = memoryview(packet)
        if not frame_headers.holds_one_frame(self._codec, content, allow_b_frames=self._stores_presentation):
            return False
        first = self._stamps[0]
        if stamp is None or first is None:
            return False
        # Frames that are displayed before the first key frame may refer to frames before the file.
        return stamp > first or (
            self._codec == "hevc" and nal.is_skipped_leading(nal.with_start_codes(content, self._length_size))
        )

    def index(self, open_again: Callable[[], Any]) -> Index:
        """Return the index.

        Args:
            open_again: Function that returns the container at its beginning. It is called if the video must be decoded.

        Raises:
            VideoError: If the video cannot be decoded.
        """
        stream = self._stream
        keys = self._keys
        reorder = self._reorder
        count = len(self._stamps)
        stamps = self._filled_stamps()
        order = np.argsort(stamps, kind="stable")
        numbered_by_decoder = not self._is_display_order(stamps, order)
        if numbered_by_decoder:
            stream = open_again().streams.video[0]
            displayed, key_frames = self._decode(stream)
            reorder = max(reorder, stream.codec_context.reorder_depth)
            shown = np.isin(np.arange(count), displayed)
            pts = _ascending_numbers(displayed, count)
            keys = [_Key(0, int(stamps[0]), True), *(key for key in keys if key.packet in key_frames)]
        else:
            shown = ~np.array(self._discarded, np.bool_) & (stamps >= stamps[0])
            displayed = order[shown[order]]
            pts = stamps
        frame, context = self._first_frame, stream.codec_context
        return Index(
            self._codec,
            context.name,
            _tag(context),
            context.bits_per_coded_sample,
            frame.format.name,
            frame.height,
            frame.width,
            UNSPECIFIED if frame.colorspace is None else int(frame.colorspace),
            int(frame.color_range) == 2 or frame.format.name.startswith("yuvj"),
            bool(frame.interlaced_frame) or context.field_order > 1,
            _orientation(frame),
            reorder,
            self._extradata,
            self._length_size,
            stamps,
            np.array(self._checksums, np.uint32),
            pts,
            shown,
            np.array([key.packet for key in keys], np.int64),
            np.array([key.dts for key in keys], np.int64),
            np.array([key.instant for key in keys], np.bool_),
            displayed,
            stream.time_base,
            self._durations[displayed[stamps[displayed].argmax()]] if len(displayed) else 0,
            numbered_by_decoder,
            max(stream.frames - count, 0),
        )

    def _filled_stamps(self) -> NDArray[np.int64]:
        """Return the (P,) time stamps. Missing ones are interpolated in decoding order.

        Raises:
            VideoError: If no packet has a time stamp.
        """
        known = np.array([stamp is not None for stamp in self._stamps])
        if not known.any():
            raise VideoError(f"its frames have no time stamps: {CONVERT}")
        values = np.array([stamp or 0 for stamp in self._stamps], np.int64)
        if not known.all():
            missing = np.flatnonzero(~known)
            values[missing] = np.interp(missing, np.flatnonzero(known), values[known])
        return values

    def _is_display_order(self, stamps: NDArray[np.int64], order: NDArray[np.int64]) -> bool:
        """Return whether the order of the time stamps is certainly the order of the frames.

        Args:
            stamps: (P,) time stamps.
            order: (P,) packet indices, sorted by time stamp.
        """
        if not self._is_plain or not np.diff(stamps[order]).all():
            return False
        distance = np.abs(order - np.arange(len(order))).max()
        # Frames are not in decoding order if the decoder reorders them. Then the container has copied decoding time stamps.
        return distance <= _MOST_REORDERED and self._stores_presentation if distance else not self._reorder

    def _decode(self, stream: Any) -> tuple[NDArray[np.int64], set[int]]:
        """Decode the video. Set ``_first_frame``.

        Returns:
            (N,) packet index of each frame, in the order of the decoder, and the indices of packets with key frames, except the
            first packet, at which decoding can start.

        Raises:
            VideoError: If the frames cannot be matched with the packets.
        """
        context = stream.codec_context
        libav.limit_pixels(context, limits.MAX_FRAME_PIXELS)
        context.thread_count = 1
        displayed, key_frames = list[int](), set[int]()
        self._first_frame = None

        def append(frames: list[Any]) -> None:
            for frame in frames:
                self._first_frame = self._first_frame or frame
                displayed.append(-1 if frame.pts is None else frame.pts)
                if frame.key_frame and frame.pts:
                    key_frames.add(frame.pts)

        for number, packet in enumerate(packets_of(stream.container)):
            packet.pts = packet.dts = number
            append(context.decode(packet))
        append(context.decode(None))
        if not displayed:
            raise VideoError("FFmpeg decodes no frame of it")
        if len(set(displayed)) < len(displayed) or min(displayed) < 0 or max(displayed) >= len(self._stamps):
            raise VideoError(f"FFmpeg decodes several frames from one of its packets: {CONVERT}")
        can_start = context.codec.intra_only or self._codec in _START_AT_KEYS
        return np.array(displayed, np.int64), key_frames if can_start else set()


def _ascending_numbers(displayed: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return a (P,) number per packet. Numbers of displayed frames ascend in display order.

    A packet without a displayed frame gets a number immediately after the number of the packet before it.

    Args:
        displayed: (N,) packet index of each frame, in display order.
        count: Number of packets, P.
    """
    packets = np.arange(count)
    ranks = np.full(count, -1)
    ranks[displayed] = np.arange(len(displayed))
    owners = np.maximum.accumulate(np.where(ranks >= 0, packets, -1))
    return np.where(owners >= 0, ranks[owners], -1) * (count + 1) + packets - owners


def _decode_alone(packet: Any, context: Any) -> Any:
    """Return the frame of a key frame's packet, or ``None`` if the packet cannot be decoded alone."""
    av = libav.required_module()
    copy = av.Packet(bytes(packet))  # without the flag that hides the frame
    copy.is_keyframe = True
    context.thread_count = 1
    try:
        frames = [*context.decode(copy), *context.decode(None)]
    except av.error.FFmpegError:
        frames = []
    context.flush_buffers()
    return frames[0] if frames else None


def _orientation(frame: Any) -> int:
    """Return the EXIF orientation, 1 to 8, of a frame with a display matrix, as FFmpeg's ``-autorotate`` shows the frame.

    Raises:
        VideoError: If the matrix rotates by other than a multiple of 90 degrees, or skews.
    """
    try:
        matrix = frame.side_data["DISPLAYMATRIX"]
    except KeyError:
        return 1
    # Position (x, y) of a stored pixel is shown at (a x + c y, b x + d y), plus an offset.
    a, b, _, c, d, *_ = np.frombuffer(bytes(matrix), np.int32).astype(np.float64).tolist()
    is_transposed = abs(b) + abs(c) > abs(a) + abs(d)
    x_scale, y_scale, *skew = (c, b, a, d) if is_transposed else (a, d, b, c)
    if max(map(abs, skew)) > _MOST_SKEW * min(abs(x_scale), abs(y_scale)) or not x_scale * y_scale:
        raise VideoError(f"its display matrix rotates by other than a multiple of 90 degrees, or skews: {CONVERT}")
    return _ORIENTATIONS[is_transposed, x_scale < 0, y_scale < 0]


def _tag(context: Any) -> str:
    """Return the codec tag; an empty string if it is not ASCII, which PyAV does not support."""
    try:
        return str(context.codec_tag).rstrip("\0")
    except UnicodeDecodeError:
        return ""
