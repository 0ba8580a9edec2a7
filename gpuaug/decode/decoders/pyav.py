"""Decoding of clips on host threads with PyAV.

A clip is a number of selected frames of a video, and the *packets* (encoded frames) from which these are decoded.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.core.streams import Event
from gpuaug.decode.clips import libav
from gpuaug.decode.clips.index import UNSPECIFIED
from gpuaug.decode.clips.layout import ClipInfo, ClipLayout
from gpuaug.decode.decoders.base import HostDecoder, Resources
from gpuaug.decode.layout import Work, rotated_upright

RGB = "rgb24"
"""PyAV's name of the pixel format to which frames are converted."""

FULL_RANGE = 2
"""FFmpeg's constant ``AVCOL_RANGE_JPEG``: full colour range, 0 to 255."""


class PyAv(HostDecoder):
    """Decode clips on host threads. Each clip is decoded by one thread, in a new codec context (decoder of FFmpeg)."""

    name = "pyav"
    files = "all other clips"  # after the row of NVDEC in ``DecoderTable``

    @property
    def version(self) -> str:
        """Versions of PyAV and its FFmpeg."""
        av = libav.find_module()
        return f"PyAV {av.__version__}, FFmpeg {av.ffmpeg_version_info}"

    def begin(self, work: Work[ClipLayout], indices: NDArray[Any], resources: Resources) -> Callable[[], Event]:
        """Start to decode the clips, in descending order of packets · pixels."""
        threads = min(len(indices), resources.pools.threads)
        pending = work.layout.slowest_first(indices)
        return self.share(work, indices, resources, threads, partial(_decode_pending, work), pending)


def _decode_pending(work: Work[ClipLayout], pending: Iterator[tuple[int, ClipInfo]]) -> None:
    """Decode clips into host memory until ``pending`` is exhausted. Runs on several threads for one batch.

    Args:
        work: Decoding task of the batch.
        pending: Clips that no thread has started, shared by all threads: index, and header fields.
    """
    data, starts = work.host
    packets = work.encoded.data.numpy().data
    for index, info in pending:
        if work.is_abandoned:
            return
        frames = work.layout.clip(data, index, int(starts[index])).numpy()
        if problem := decode(packets, info, frames):
            work.problems[index] = problem


def decode(data: memoryview, info: ClipInfo, out: NDArray[np.uint8]) -> str:
    """Decode one clip.

    Args:
        data: (bytes,) packets of the batch.
        info: Header fields of the clip.
        out: (T, H, W, 3) output for the selected frames, rotated upright.

    Returns:
        Reason why the clip cannot be decoded; an empty string on success.
    """
    av = libav.required_module()
    stream = info.stream
    try:
        context = _context(av, data, info)
        missing = set(info.positions)  # time stamps of selected frames that are not decoded yet
        for frame in _frames(av, context, data, info):
            if frame.is_corrupt:  # also checked if it is not selected, because selected frames may be predicted from it
                return f"its frame at time stamp {frame.pts} is damaged"
            if frame.pts not in missing:
                continue
            if (frame.height, frame.width) != (stream.height, stream.width):
                return f"it has frames of {frame.width}x{frame.height} and of {stream.width}x{stream.height} pixels"
            missing.discard(frame.pts)
            pixels = frame.to_ndarray(format=RGB)
            for position in info.positions[frame.pts]:  # several if the clip repeats a frame
                out[position] = rotated_upright(pixels, stream.orientation)
        return f"its frame at time stamp {min(missing)} is missing" if missing else ""
    except Exception as error:  # damaged data may raise errors of any type
        return f"FFmpeg says: {getattr(error, 'strerror', None) or error}"


def _context(av: Any, data: memoryview, info: ClipInfo) -> Any:
    """Return a new codec context for one clip. ``data``: (bytes,) packets of the batch."""
    stream = info.stream
    context = av.CodecContext.create(stream.library, "r")
    if info.extradata_size:
        context.extradata = bytes(data[info.start : info.start + info.extradata_size])
    context.thread_count = 1
    libav.limit_pixels(context, 2 * stream.width * stream.height + 2**20)  # coded frames are larger than displayed frames
    # Some codecs store these properties only in the container.
    context.width, context.height = stream.width, stream.height
    context.pix_fmt = stream.pixel_format
    context.bits_per_coded_sample = stream.bits
    if stream.tag:
        context.codec_tag = stream.tag.ljust(4, "\0")
    if stream.matrix != UNSPECIFIED:
        context.colorspace = stream.matrix
    if stream.full_range:
        context.color_range = FULL_RANGE
    if stream.reorder:  # as in the file: with a smaller delay, a decoder may drop frames that arrive too late for their display
        context.reorder_depth = stream.reorder
    return context


def _frames(av: Any, context: Any, data: memoryview, info: ClipInfo) -> Iterator[Any]:
    """Yield the frames of all packets of a clip, in display order, from the codec context of the clip."""
    for start, size, time_stamp, is_key in info.packets:
        packet = av.Packet(data[start : start + size])
        packet.pts = packet.dts = time_stamp
        packet.is_keyframe = is_key
        yield from context.decode(packet)
    yield from context.decode(None)  # the remaining frames
