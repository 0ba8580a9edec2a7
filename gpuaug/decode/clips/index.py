"""Index of a video: the number of each frame, and the packets from which selected frames are decoded.

A *packet* is a unit of coded data, usually of one frame. P is the number of packets, N the number of frames, and T the number
of selected frames. *Display rank*: a number per packet that ascends in the order in which frames are displayed.

**Frame numbers.** Frames are numbered in the order in which a decoder that reads the whole file returns them, starting at 0. In
H.264, HEVC, VP9 and AV1, each packet holds one frame, and in some containers presentation time stamps give this order. Then all
packets are read once, without decoding. All other files are also decoded once, and so are files whose first frames refer to
frames before the beginning of the file.
"""

import itertools
import zlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuaug.decode.clips import libav, limits, nal
from gpuaug.decode.clips.limits import CONVERT, VideoError

CONTAINERS_WITH_PTS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "mpegts")
"""FFmpeg's names of containers that store the presentation time stamp of each frame."""

CODECS_WITH_A_FRAME_PER_PACKET = ("h264", "hevc", "vp9", "av1")
"""FFmpeg's names of codecs whose packets hold one visible frame each."""

CODECS_WITH_KEY_FRAMES = (
    *CODECS_WITH_A_FRAME_PER_PACKET,
    *("vp8", "mpeg1video", "mpeg2video", "mpeg4", "ffv1", "h263", "flv1", "msmpeg4v2", "msmpeg4v3", "wmv1", "wmv2"),
)
"""FFmpeg's names of the codecs that can be decoded from any key frame, in addition to codecs without prediction. Clips of other
codecs are decoded from packet 0."""

_MAX_REORDERED = 16
"""Maximum number of frames by which the display order of a codec differs from the decoding order."""

_SIDE_DATA = ("palette", "new_extradata", "param_change")
"""Data of a packet, in addition to its content, that change the pixels."""

_CHECKED_BYTES = 1024
"""Number of bytes at the beginning of a packet from which its checksum is computed."""

_NO_STAMP = np.iinfo(np.int64).min
"""Value that stands for a missing time stamp, as in FFmpeg."""

_SCANNED = np.dtype(
    {
        "names": ["stamp", "dts", "duration", "checksum", "is_hidden", "is_key", "is_idr"],
        "formats": [np.int64, np.int64, np.int64, np.uint32, np.bool_, np.bool_, np.bool_],
    }
)
"""Structured NumPy dtype: one packet, as its container returns it.

``stamp``: see ``Index``. ``dts``: decoding time stamp. ``duration``: duration of the frame; 0 if it is not stored.
``is_hidden``: whether the container hides the frame. ``is_key`` and ``is_idr``: see ``nal``.
"""

_MAX_SKEW = 0.0175
"""Maximum ratio of the elements beside a rotation by a multiple of 90 degrees in a display matrix: one degree, as in FFmpeg."""

UNSPECIFIED = 2
"""Number of the colour matrix in H.273 for a video that does not specify one."""


class Stream(NamedTuple):
    """Codec, size and colours of a video: the last fields of ``CLIP``."""

    codec: str
    """FFmpeg's name of the codec, such as h264."""
    library: str
    """FFmpeg's name of the decoder, such as libdav1d."""
    tag: str
    """Codec tag of the container, at most four characters, such as XVID."""
    bits: int
    """Number of bits per pixel in the container; 0 if it is not stored."""
    pixel_format: str
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
    """Whether a frame consists of two fields."""
    orientation: int
    """EXIF orientation of the frames, 1 to 8."""
    reorder: int
    """Number of frames by which decoding runs ahead of display."""


class Index(NamedTuple):
    """Index of a video: its P packets in decoding order, and its N visible frames in display order.

    Decoding can start at K of the packets: packet 0, and key frames.
    """

    stream: Stream
    extradata: bytes
    """Parameter sets of the codec, with start codes for H.264 and HEVC."""
    length_size: int
    """Number of bytes of the length before each NAL unit; 0 for start codes."""
    time_base: Fraction
    """Seconds per unit of time stamps."""
    stamp: NDArray[np.int64]
    """(P,) presentation time stamp in the file; the decoding time stamp if there is none."""
    checksum: NDArray[np.uint32]
    """(P,) result of ``_checksum``."""
    display_rank: NDArray[np.int64]
    """(P,) sort key of display order: the time stamp, or, if the file was decoded, a number by the order of the decoder."""
    has_visible_frame: NDArray[np.bool_]
    """(P,) whether the packet holds a frame that is displayed."""
    keys: NDArray[np.int64]
    """(K,) packet index."""
    key_dts: NDArray[np.int64]
    """(K,) decoding time stamp; the presentation time stamp if there is none."""
    key_is_idr: NDArray[np.bool_]
    """(K,) whether no frame after the key frame, in decoding order, is predicted from frames before the key frame."""
    packet_of_frame: NDArray[np.int64]
    """(N,) packet index."""
    last_duration: int
    """Duration of the frame with the last time stamp, in units of time stamps; 0 if the file does not store it."""
    are_decoded: bool
    """Whether the frames were found by decoding the file."""
    missing: int
    """Number of packets that the container declares but does not contain."""

    def matches(self, number: int, packet: Any) -> bool:
        """Return whether a packet has the time stamp and checksum of packet ``number`` of the index, and is not damaged."""
        is_equal = stamp_of(packet) in (None, self.stamp[number]) and _checksum(packet) == self.checksum[number]
        return is_equal and not packet.is_corrupt

    def ranges(self, frame_packets: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return the ranges of packets, (first, last), from which frames are decoded. Each range starts at a key frame.

        A frame after a key frame in decoding order may be displayed before the key frame. Its range starts at an earlier key
        frame. If decoding cannot start at the key frame of a range, the range is merged with the preceding one.

        Args:
            frame_packets: (T,) packet indices of the frames.
        """
        keys, rank = self.keys, self.display_rank
        # Per frame: (index into ``keys`` of the last key frame from which the frame can be decoded, packet index of the frame).
        key_of_frames: list[tuple[int, int]] = []
        for packet in np.unique(frame_packets).tolist():
            # ``initial=0``: if no key frame is usable, packet 0, the first of ``keys``.
            usable = np.flatnonzero((keys <= packet) & (rank[keys] <= rank[packet]))
            key_of_frames.append((int(usable.max(initial=0)), packet))
        # Packets without a visible frame belong to the packet before them: they may hold the second field of its frame. So a
        # frame ends where the next packet with a visible frame begins.
        packet_ends = np.append(np.flatnonzero(self.has_visible_frame), len(rank))
        ranges: list[tuple[int, int]] = []
        for key_index, packet in sorted(key_of_frames):
            first = int(keys[key_index])
            last = int(packet_ends[np.searchsorted(packet_ends, packet, side="right")]) - 1
            if self.are_decoded:
                # H.264 from a non-IDR key frame: the decoder outputs a frame only after up to ``reorder`` more packets.
                last = min(last + self.stream.reorder, len(rank) - 1)
            if ranges and (first <= ranges[-1][1] or not self.key_is_idr[key_index]):
                first, last_before = ranges.pop()
                last = max(last, last_before)
            ranges.append((first, last))
        return ranges

    @property
    def times_s(self) -> NDArray[np.float64]:
        """(N,) time of each visible frame in seconds, ascending.

        Raises:
            VideoError: If the time stamps begin again, as in files that were joined end to end.
        """
        stamps = self.stamp[self.packet_of_frame]
        if (np.diff(stamps) < 0).any():
            # Decoding time stamps, in containers without presentation time stamps, ascend in the order of the packets.
            if (np.diff(self.stamp) < 0).any():
                raise VideoError("its time stamps begin again: pass start, at or a list of frames to read_clip")
            stamps = np.sort(stamps)
        return (stamps * float(self.time_base)).astype(np.float64)

    @property
    def end_s(self) -> float:
        """End of the last visible frame in seconds; its time stamp if its duration is not known."""
        last = self.stamp[self.packet_of_frame].max()
        return float((last + self.last_duration) * float(self.time_base))


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


def read_index(container: Any, open_again: Callable[[], Any]) -> Index:
    """Read all packets of a video, and decode the first frame, or all frames.

    Args:
        container: PyAV's container, at its beginning.
        open_again: Function that returns the container at its beginning. It is called if all frames must be decoded.

    Raises:
        VideoError: If the video cannot be decoded.
    """
    stream = container.streams.video[0]
    context = stream.codec_context
    if context is None or not context.codec.canonical_name or not context.is_decoder:
        raise VideoError("FFmpeg has no decoder for its codec")
    if context.width * context.height > limits.MAX_FRAME_PIXELS:
        raise VideoError(f"its {context.width}x{context.height} pixels are more than {limits.MAX_FRAME_PIXELS}")
    libav.limit_pixels(context, limits.MAX_FRAME_PIXELS)
    codec, reorder = context.codec.canonical_name, context.reorder_depth
    extradata, length_size = nal.parameter_sets(codec, bytes(context.extradata or b""))
    packets = packets_of(container)
    first_packet = next(packets, None)
    if first_packet is None:
        raise VideoError("it has no frame")
    frame: Any = None
    if container.format.name in CONTAINERS_WITH_PTS and codec in CODECS_WITH_A_FRAME_PER_PACKET:
        # A packet of a transport stream may hold one of the two fields of an interlaced frame. ``field_order`` is 0 if unknown,
        # 1 if frames are progressive, and more if they are interlaced.
        may_hold_fields = codec == "h264" and context.field_order > 1 and container.format.name == "mpegts"
        frame = None if may_hold_fields else _decode_alone(first_packet, context)
    scanned = np.fromiter(_scan(itertools.chain([first_packet], packets), context, length_size), _SCANNED)
    stamps = _filled(scanned["stamp"])
    packet_indices = np.arange(len(scanned))
    is_key = scanned["is_key"]
    # All frames are decoded if the first packet cannot be decoded alone, or the time stamps do not give the display order.
    are_decoded = frame is None or not _gives_display_order(scanned, codec, reorder)
    if are_decoded:
        stream = open_again().streams.video[0]
        context = stream.codec_context
        frame, packet_of_frame, decoded_keys = _decode(stream, len(scanned))
        reorder = max(reorder, context.reorder_depth)
        display_rank = _ranks(packet_of_frame, len(scanned))
        is_key = (is_key & np.isin(packet_indices, decoded_keys)) | (packet_indices == 0)
    else:
        display_order = stamps.argsort()
        packet_of_frame = display_order[~scanned["is_hidden"][display_order]]
        display_rank = stamps
    last_packet = packet_of_frame[stamps[packet_of_frame].argmax()] if len(packet_of_frame) else 0
    key_packets = np.flatnonzero(is_key)
    return Index(
        stream=Stream(
            codec=codec,
            library=context.name,
            tag=_tag(context),
            bits=context.bits_per_coded_sample,
            pixel_format=frame.format.name,
            height=frame.height,
            width=frame.width,
            matrix=UNSPECIFIED if frame.colorspace is None else int(frame.colorspace),
            full_range=int(frame.color_range) == 2 or frame.format.name.startswith("yuvj"),
            interlaced=bool(frame.interlaced_frame) or context.field_order > 1,
            orientation=_orientation(frame),
            reorder=reorder,
        ),
        extradata=extradata,
        length_size=length_size,
        time_base=stream.time_base,
        stamp=stamps,
        checksum=scanned["checksum"].copy(),
        display_rank=display_rank,
        has_visible_frame=np.isin(packet_indices, packet_of_frame),
        keys=key_packets,
        key_dts=np.where(scanned["dts"] == _NO_STAMP, stamps, scanned["dts"])[key_packets],
        key_is_idr=scanned["is_idr"][key_packets],
        packet_of_frame=packet_of_frame,
        last_duration=int(scanned["duration"][last_packet]),
        are_decoded=are_decoded,
        missing=max(stream.frames - len(scanned), 0),
    )


def _scan(packets: Iterator[Any], context: Any, length_size: int) -> Iterator[tuple[Any, ...]]:
    """Yield a record of ``_SCANNED`` per packet.

    Raises:
        VideoError: If there are too many packets, or a packet changes parameters of the codec, or is damaged.
    """
    codec = context.codec.canonical_name
    for number, packet in enumerate(packets):
        if number == limits.MAX_PACKETS:
            raise VideoError(f"it has more than {limits.MAX_PACKETS} frames")
        for side_data in _SIDE_DATA:
            if packet.has_sidedata(side_data) and bytes(packet.get_sidedata(side_data)) != context.extradata:
                raise VideoError(f"its packet {number} changes parameters of the codec ({side_data}): {CONVERT}")
        is_key = is_idr = False
        if packet.is_keyframe:
            content = nal.with_start_codes(memoryview(packet), length_size)
            is_key, is_idr = nal.is_key_frame(codec, content), nal.is_idr(codec, content)
        stamp, dts = (_NO_STAMP if value is None else value for value in (stamp_of(packet), packet.dts))
        duration = max(packet.duration or 0, 0)
        yield stamp, dts, duration, _checksum(packet), packet.is_discard, is_key, is_idr


def _checksum(packet: Any) -> int:
    """Return a checksum of the size and the first bytes of a packet."""
    return zlib.crc32(memoryview(packet)[:_CHECKED_BYTES], packet.size)


def _filled(stamps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return (P,) time stamps: a missing time stamp is interpolated from its neighbours in decoding order.

    Raises:
        VideoError: If no packet has a time stamp.
    """
    is_missing = stamps == _NO_STAMP
    if is_missing.all():
        raise VideoError(f"its frames have no time stamps: {CONVERT}")
    filled = stamps.copy()
    filled[is_missing] = np.interp(np.flatnonzero(is_missing), np.flatnonzero(~is_missing), stamps[~is_missing])
    return filled


def _gives_display_order(scanned: NDArray[np.void], codec: str, reorder: int) -> bool:
    """Return whether the order of the packets' time stamps is certainly the order of the frames.

    Args:
        scanned: (P,) records of ``_SCANNED``. Each packet holds one frame.
        codec: FFmpeg's name of the codec.
        reorder: Number of frames by which decoding runs ahead of display.
    """
    stamps = scanned["stamp"]
    # H.264's decoder hides the first frames of a file that does not begin with an IDR frame.
    if not scanned["is_key"][0] or (codec == "h264" and not scanned["is_idr"][0]):
        return False
    # Frames that are displayed before the first key frame may refer to frames before the file.
    if (stamps == _NO_STAMP).any() or (stamps[1:] <= stamps[0]).any():
        return False
    # Decoding time stamps descend where two recordings were joined. Presentation time stamps of the two may overlap.
    display_order = stamps.argsort()
    dts = scanned["dts"][scanned["dts"] != _NO_STAMP]
    if (np.diff(dts) < 0).any() or not np.diff(stamps[display_order]).all():
        return False
    distance = np.abs(display_order - np.arange(len(display_order))).max()
    if distance == 0:  # If the decoder reorders frames, the container has copied decoding time stamps.
        return not reorder
    return bool(distance <= _MAX_REORDERED)


def _decode(stream: Any, count: int) -> tuple[Any, NDArray[np.int64], list[int]]:
    """Decode a video.

    Args:
        stream: PyAV's stream, whose container is at its beginning.
        count: Number of packets.

    Returns:
        The first frame, (N,) packet index of each frame, in the order of the decoder, and the indices of packets with key
        frames at which decoding can start.

    Raises:
        VideoError: If the frames cannot be matched with the packets.
    """
    context = stream.codec_context
    libav.limit_pixels(context, limits.MAX_FRAME_PIXELS)
    context.thread_count = 1
    first_frame = None
    packet_of_frame: list[int] = []
    key_packets: list[int] = []
    for packet_index, packet in enumerate(itertools.chain(packets_of(stream.container), [None])):
        if packet is not None:
            packet.pts = packet.dts = packet_index
        for frame in context.decode(packet):
            first_frame = first_frame or frame
            packet_of_frame.append(-1 if frame.pts is None else frame.pts)
            if frame.key_frame:
                key_packets.append(packet_of_frame[-1])
    if not packet_of_frame:
        raise VideoError("FFmpeg decodes no frame of it")
    if len(set(packet_of_frame)) < len(packet_of_frame) or min(packet_of_frame) < 0 or max(packet_of_frame) >= count:
        raise VideoError(f"FFmpeg decodes several frames from one of its packets: {CONVERT}")
    can_start_at_keys = context.codec.intra_only or context.codec.canonical_name in CODECS_WITH_KEY_FRAMES
    return first_frame, np.array(packet_of_frame, np.int64), key_packets if can_start_at_keys else []


def _ranks(packet_of_frame: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the (P,) sort key of display order.

    A packet without a visible frame is sorted immediately after the packet before it.

    Args:
        packet_of_frame: (N,) packet index of each visible frame, in display order.
        count: Number of packets, P.
    """
    packet_indices = np.arange(count)
    ranks = np.full(count, -1)
    ranks[packet_of_frame] = np.arange(len(packet_of_frame))
    # Index of the last packet with a visible frame up to each packet; -1 if there is none.
    packet_before = np.maximum.accumulate(np.where(ranks >= 0, packet_indices, -1))
    # The number of a frame times (count + 1), plus the distance from its packet, which is at most ``count``.
    return np.where(packet_before >= 0, ranks[packet_before], -1) * (count + 1) + packet_indices - packet_before


def _decode_alone(packet: Any, context: Any) -> Any:
    """Return the frame of a key frame's packet, or ``None`` if the packet cannot be decoded alone."""
    av = libav.required_module()
    copy = av.Packet(bytes(packet))  # without the flag that hides the frame
    copy.is_keyframe = True
    context.thread_count = 1
    try:
        return next(iter([*context.decode(copy), *context.decode(None)]), None)
    except av.error.FFmpegError:
        return None
    finally:
        context.flush_buffers()


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
    if max(map(abs, skew)) > _MAX_SKEW * min(abs(x_scale), abs(y_scale)) or not x_scale * y_scale:
        raise VideoError(f"its display matrix rotates by other than a multiple of 90 degrees, or skews: {CONVERT}")
    # Reversals of x and y, after rows have become columns, in the order of the EXIF orientations 1 to 4, and 5 to 8.
    reversals = [(False, False), (True, False), (True, True), (False, True)]
    return reversals.index((x_scale < 0, y_scale < 0)) + (5 if is_transposed else 1)


def _tag(context: Any) -> str:
    """Return the codec tag; an empty string if it is not ASCII, which PyAV does not support."""
    try:
        return str(context.codec_tag).rstrip("\0")
    except UnicodeDecodeError:
        return ""
