"""Packing of encoded clips into one buffer: per clip, the codec's parameter sets and the packets to decode.

A *clip* is a number of selected frames of a video, and the packets from which these are decoded. A *packet* is a unit of coded
data, usually of one frame. *Display rank*: a number per packet that ascends in the order in which frames are displayed
(``Index.display_rank``). A *member* is an entry of a batch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core.encoded import CLIP, PACKET, ClipHeaders, EncodedClips
from gpuaug.core.errors import ArgumentError, ArgumentTypeError
from gpuaug.decode.clips import limits, nal
from gpuaug.decode.clips.index import Index
from gpuaug.decode.clips.limits import VideoError
from gpuaug.decode.clips.read_clip import Clip
from gpuaug.decode.clips.video_file import VIDEOS
from gpuaug.feed.collate_members import allocate_tensor, position_text

PADDING = 64
"""Number of zero bytes after each packet, because decoders may read beyond its end."""


class _ClipPackets(NamedTuple):
    """Packets of one clip, read from its video."""

    video: Index
    pts: NDArray[np.int64]
    """(T,) display ranks of the clip's frames."""
    data: bytearray
    """Parameter sets of the codec, and the packets, each with ``PADDING``."""
    packets: list[tuple[int, int, int, bool]]
    """(offset in ``data``, size, display rank, whether it is a key frame) per packet."""
    fits_nvdec: bool
    """Field ``fits_nvdec`` of ``CLIP``: whether NVDEC can decode the packets."""


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
    read_clips: dict[int, _ClipPackets] = {}
    for sample, clip in enumerate(clips):
        try:
            read_clips[sample] = _read_packets(clip)
        except VideoError as error:
            problems[sample] = str(error)
    data = allocate_tensor((sum(len(read_clip.data) for read_clip in read_clips.values()) + PADDING,), torch.uint8)
    table = np.zeros(len(clips), CLIP)
    pts = np.zeros((len(clips), clips[0].frames), np.int64)
    packet_records: list[tuple[int, int, int, bool]] = []
    memory = data.numpy()
    memory[-PADDING:] = 0
    start = 0
    for sample, (video, clip_pts, content, packets, fits_nvdec) in read_clips.items():
        first = len(packet_records)
        end = start + len(content)
        table[sample] = (start, len(content), len(video.extradata), first, len(packets), fits_nvdec, *video.stream)
        pts[sample] = clip_pts
        packet_records += [(start + offset, *record) for offset, *record in packets]  # type: ignore[misc]
        memory[start:end] = np.frombuffer(content, np.uint8)
        start = end
    paths = [clip.source if isinstance(clip.source, str) else "" for clip in clips]
    return EncodedClips(data, ClipHeaders(table, paths, problems, np.array(packet_records, PACKET), pts, member=path))


def _read_packets(clip: Clip) -> _ClipPackets:
    """Read the packets that a clip needs, from the key frame before its first frame to its last frame.

    Frames that are neither selected nor used to predict other frames are omitted.

    Raises:
        VideoError: If the video cannot be read.
    """
    with VIDEOS.opened(clip.source) as video:
        index = video.index
        codec, packet_of_frame, missing = index.stream.codec, index.packet_of_frame, index.missing
        if not len(packet_of_frame):
            raise VideoError("it has no visible frame")
        times = None if clip.times_s is None else (index.times_s, index.end_s)
        numbers = clip.numbers_in(len(packet_of_frame), times)
        # In a truncated video, the end is unknown. A clip that depends on it cannot be read.
        if missing and (isinstance(numbers, str) or clip.at is not None or clip.short != "error"):
            count = len(index.stamp)
            raise VideoError(f"its data end after {count} of {count + missing} frames")
        if isinstance(numbers, str):  # the reason why the video does not contain the clip
            raise VideoError(numbers)
        clip_frames = packet_of_frame[numbers]
        ranks = index.display_rank
        selected_ranks = set(ranks[clip_frames].tolist())
        data = bytearray(index.extradata)
        packets = list[tuple[int, int, int, bool]]()
        all_visible = True
        for first, last in index.ranges(clip_frames):
            for number, packet in enumerate(video.packets(first, last), first):
                content = nal.with_start_codes(memoryview(packet), index.length_size)
                rank, is_visible = int(ranks[number]), bool(index.has_visible_frame[number])
                # Frames after a key frame that are displayed before it may be predicted from frames before the key frame, and
                # no frame that is displayed after the key frame is predicted from such frames. Such frames are omitted, except
                # after packet 0, where PyAV shows them, and in MPEG-4, whose packets may hold the data of the next packet.
                if rank < ranks[first] and not (is_visible and (first == 0 or codec == "mpeg4")):
                    continue
                if is_visible and rank not in selected_ranks and not nal.is_reference(codec, content):
                    continue
                packets.append((len(data), len(content), rank, packet.is_keyframe))
                data += content
                data += bytes(PADDING)
                all_visible &= is_visible
                if len(data) > limits.MAX_CLIP_BYTES:
                    raise VideoError(f"its packets from a key frame to the end have more than {limits.MAX_CLIP_BYTES} bytes")
        first_content = bytes(data[packets[0][0] :][: packets[0][1]])  # content of the first packet, by its offset and size
    fits_nvdec = (codec != "h264" or nal.is_idr(codec, first_content)) and (all_visible or not index.are_decoded)
    return _ClipPackets(index, ranks[clip_frames], data, packets, fits_nvdec)
