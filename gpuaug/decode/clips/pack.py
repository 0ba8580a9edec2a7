"""Packing of encoded clips into one buffer: per clip, the codec's parameter sets and the packets to decode."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core.encoded import CLIP, PACKET, ClipHeaders, EncodedClips
from gpuaug.core.errors import ArgumentError, ArgumentTypeError
from gpuaug.decode.clips import limits, nal
from gpuaug.decode.clips.index import Index, VideoError
from gpuaug.decode.clips.read_clip import Clip
from gpuaug.decode.clips.video_file import VIDEOS
from gpuaug.feed.collate_members import allocate_tensor, position_text

PADDING = 64
"""Number of zero bytes after each packet, because decoders may read beyond its end."""


class _ClipPackets(NamedTuple):
    """Packets of one clip, read from its video."""

    video: Index
    """Header fields of the video."""
    pts: NDArray[np.int64]
    """(T,) presentation time stamps of the clip's frames."""
    packets: list[tuple[bytes, int, bool]]
    """(content, presentation time stamp, whether it is a key frame) per packet."""
    instant: bool
    """Value of the field ``instant`` of ``CLIP``."""


def pack_clips(clips: Sequence[Any], path: str) -> EncodedClips:
    """Pack the clips of one member of the samples.

    Args:
        clips: (B,) values of the member, one per sample.
        path: Path of the member within a sample, for error messages.

    Raises:
        ArgumentTypeError: If a value is not a ``Clip``.
        ArgumentError: If clips differ in their number of frames.
        DeviceError: If PyAV is not installed.
    """
    for sample, clip in enumerate(clips):
        if type(clip) is not Clip:
            raise ArgumentTypeError(
                f"Clips must be gpuaug.read_clip(…) in all samples, got {type(clip).__name__} in "
                f"{position_text(sample, path)}. Return a clip in every sample of the dataset."
            )
        if clip.frames != clips[0].frames:
            raise ArgumentError(
                f"Clips of a batch must have as many frames as the first, {clips[0].frames}, got {clip.frames} in "
                f"{position_text(sample, path)}. Pass the same number of frames to gpuaug.read_clip."
            )
    problems: dict[int, str] = {}
    read_clips: list[_ClipPackets | None] = []
    for sample, clip in enumerate(clips):
        try:
            read_clips.append(_read_packets(clip))
        except (VideoError, nal.DamagedPacketError) as error:
            read_clips.append(None)
            problems[sample] = str(error)
    sizes = [0 if clip_packets is None else _size(clip_packets) for clip_packets in read_clips]
    starts = [0, *accumulate(sizes)]
    data = allocate_tensor((starts[-1] + PADDING,), torch.uint8)
    table = np.zeros(len(clips), CLIP)
    pts = np.zeros((len(clips), clips[0].frames), np.int64)
    packet_records: list[tuple[int, int, int, bool]] = []
    memory = data.numpy()
    memory[-PADDING:] = 0
    buffer = memory.data
    for sample, (clip_packets, start, size) in enumerate(zip(read_clips, starts, sizes, strict=False)):
        if clip_packets is None:
            continue
        video = clip_packets.video
        table[sample] = (
            *(start, size, len(video.extradata), len(packet_records), len(clip_packets.packets)),
            *(video.codec, video.library, video.tag, video.bits, video.pixels, video.height, video.width),
            *(video.matrix, video.full_range, video.interlaced, video.orientation, video.reorder),
            clip_packets.instant,
        )
        pts[sample] = clip_packets.pts
        offset = start + len(video.extradata)
        buffer[start:offset] = video.extradata
        for content, time_stamp, is_key in clip_packets.packets:
            packet_records.append((offset, len(content), time_stamp, is_key))
            end = offset + len(content)
            buffer[offset:end] = content
            buffer[end : end + PADDING] = bytes(PADDING)
            offset = end + PADDING
    paths = [clip.source if isinstance(clip.source, str) else "" for clip in clips]
    return EncodedClips(data, ClipHeaders(table, paths, problems, np.array(packet_records, PACKET), pts, path))


def _size(clip_packets: _ClipPackets) -> int:
    """Return the number of bytes of a packed clip."""
    return len(clip_packets.video.extradata) + sum(len(content) + PADDING for content, _, _ in clip_packets.packets)


def _read_packets(clip: Clip) -> _ClipPackets:
    """Read the packets that a clip needs, from the key frame before its first frame to its last frame.

    Frames that are neither selected nor used to predict other frames are omitted.

    Raises:
        VideoError, DamagedPacketError: If the video cannot be read.
    """
    video = VIDEOS.take(clip.source)
    try:
        index = video.read_index()
        if not len(index.displayed):
            raise VideoError("it has no visible frame")
        times = (index.times_s, index.end_s) if clip.is_timed else None
        numbers = clip.numbers_in(len(index.displayed), times)
        # In a truncated video, the end is unknown. A clip that depends on it cannot be read.
        if index.missing and (isinstance(numbers, str) or clip.at is not None or clip.short != "error"):
            raise VideoError(f"its data end after {len(index.pts)} of {len(index.pts) + index.missing} frames")
        if isinstance(numbers, str):
            raise VideoError(numbers)
        clip_frames = index.displayed[numbers]
        pts = index.pts[clip_frames]
        selected_time_stamps = set(pts.tolist())
        packets = list[tuple[bytes, int, bool]]()
        size = 0
        all_shown = True
        for first, last in index.ranges(clip_frames):
            for number, packet in video.packets(first, last):
                content = nal.with_start_codes(memoryview(packet), index.length_size)
                time_stamp, is_shown = int(index.pts[number]), bool(index.shown[number])
                # Frames after a key frame that are displayed before it may be predicted from frames before the key frame, and
                # no frame that is displayed after the key frame is predicted from them. They are omitted, except from packet 0,
                # where PyAV shows them, and from MPEG-4, whose packets may hold the data of the next packet.
                if time_stamp < index.pts[first] and not (is_shown and (first == 0 or index.may_be_packed)):
                    continue
                if is_shown and time_stamp not in selected_time_stamps and not nal.is_reference(index.codec, content):
                    continue
                packets.append((bytes(content), time_stamp, packet.is_keyframe))
                all_shown &= is_shown
                size += len(content)
                if size > limits.MAX_CLIP_BYTES:
                    raise VideoError(f"its packets from a key frame to the end have more than {limits.MAX_CLIP_BYTES} bytes")
    except BaseException:
        video.close()
        raise
    VIDEOS.give_back(video)
    instant = index.codec != "h264" or nal.is_instant(index.codec, packets[0][0])
    return _ClipPackets(index, pts, packets, instant and (all_shown or not index.numbered_by_decoder))
