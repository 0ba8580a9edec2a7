"""Packs the packets that the clips of a batch are decoded from."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core.encoded import CLIP, PACKET, ClipHeaders, EncodedClips
from gpuaug.core.errors import ArgumentError, ArgumentTypeError
from gpuaug.decode.clips import nal
from gpuaug.decode.clips.read_clip import Clip
from gpuaug.decode.clips.video_file import VIDEOS, Index, VideoError
from gpuaug.feed.collate_members import allocated, where

PADDING = 64
"""Bytes of zeros behind each packet: decoders read whole words, and past the end."""

MOST_BYTES = 2**30
"""Bytes of the largest clip."""


class _Read(NamedTuple):
    """The packets of one clip."""

    video: Index
    pts: NDArray[np.int64]
    """(T,) time stamps of the frames that are wanted."""
    packets: list[tuple[bytes, int, bool]]
    """Bytes, time stamp, and whether it is a key frame."""


def packed(clips: Sequence[Any], path: str) -> EncodedClips:
    """Pack one member of a batch.

    Args:
        clips: The member's value in each sample.
        path: Path of the member within a sample.

    Raises:
        ArgumentTypeError: If a value is no ``Clip``.
        ArgumentError: If clips differ in their number of frames.
        DeviceError: If PyAV is not installed.
    """
    for number, clip in enumerate(clips):
        if type(clip) is not Clip:
            raise ArgumentTypeError(
                f"Clips must be gpuaug.read_clip(…) in all samples, got {type(clip).__name__} in {where(number, path)}. "
                "Return the samples of one form from the dataset."
            )
        if clip.frames != clips[0].frames:
            raise ArgumentError(
                f"Clips of a batch must have as many frames as the first, {clips[0].frames}, got {clip.frames} in "
                f"{where(number, path)}. Pass the same number of frames to gpuaug.read_clip."
            )
    problems: dict[int, str] = {}
    found: list[_Read | None] = []
    for number, clip in enumerate(clips):
        try:
            found.append(_read(clip))
        except (VideoError, nal.DamagedPacketError) as error:
            found.append(None)
            problems[number] = str(error)
    sizes = [0 if read is None else _size(read) for read in found]
    starts = [0, *accumulate(sizes)]
    data = allocated((starts[-1] + PADDING,), torch.uint8)
    table = np.zeros(len(clips), CLIP)
    pts = np.zeros((len(clips), clips[0].frames), np.int64)
    rows: list[tuple[int, int, int, bool]] = []
    room = data.numpy()
    room[-PADDING:] = 0
    buffer = room.data
    for number, (read, start, size) in enumerate(zip(found, starts, sizes, strict=False)):
        if read is None:
            continue
        index = read.video
        table[number] = (
            *(start, size, len(index.extradata), len(rows), len(read.packets)),
            *(index.codec, index.library, index.pixels, index.height, index.width),
            *(index.matrix, index.full_range, index.interlaced, index.orientation, index.reorder),
            index.codec != "h264" or nal.is_instant(index.codec, read.packets[0][0]),
        )
        pts[number] = read.pts
        at = start + len(index.extradata)
        buffer[start:at] = index.extradata
        for content, stamp, key in read.packets:
            rows.append((at, len(content), stamp, key))
            end = at + len(content)
            buffer[at:end] = content
            buffer[end : end + PADDING] = bytes(PADDING)
            at = end + PADDING
    names = [clip.source if isinstance(clip.source, str) else "" for clip in clips]
    return EncodedClips(data, ClipHeaders(table, names, problems, np.array(rows, PACKET), pts))


def _size(read: _Read) -> int:
    return len(read.video.extradata) + sum(len(content) + PADDING for content, _, _ in read.packets)


def _read(clip: Clip) -> _Read:
    """Read the packets from the key frame before a clip to its last frame, without frames that nothing needs.

    Raises:
        VideoError, DamagedPacketError: If they cannot be read.
    """
    video = VIDEOS.take(clip.source)
    try:
        index = video.read_index()
        if not len(index.shown):
            raise VideoError("it has no frame that is shown")
        numbers = clip.numbers_in(index.times_s)
        if index.missing and (isinstance(numbers, str) or clip.at is not None or clip.short != "error"):
            raise VideoError(f"its data end after {len(index.pts)} of {len(index.pts) + index.missing} frames")
        if isinstance(numbers, str):
            raise VideoError(numbers)
        wanted = index.shown[numbers]
        pts = index.pts[wanted]
        needed = set(pts.tolist())
        packets = list[tuple[bytes, int, bool]]()
        size = 0
        for first, last in index.ranges(wanted):
            for packet in video.packets(first, last):
                content = nal.with_start_codes(memoryview(packet), index.length_size)
                stamp = packet.pts if packet.pts is not None else packet.dts
                # Frames before the key frame in an open group refer to frames before it, and no later frame refers to them.
                if stamp < index.pts[first] or not (stamp in needed or nal.is_reference(index.codec, content)):
                    continue
                packets.append((bytes(content), stamp, packet.is_keyframe))
                size += len(content)
                if size > MOST_BYTES:
                    raise VideoError(f"its packets from a key frame to the clip's end have more than {MOST_BYTES} bytes")
    except BaseException:
        video.close()
        raise
    VIDEOS.give_back(video)
    return _Read(index, pts, packets)
