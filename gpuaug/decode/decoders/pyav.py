"""Decoding of clips on host threads with PyAV."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core.streams import Event
from gpuaug.decode.clips import libav
from gpuaug.decode.clips.index import UNSPECIFIED
from gpuaug.decode.clips.layout import ClipInfo, ClipWork
from gpuaug.decode.decoders.base import FileDecoder, Resources
from gpuaug.decode.layout import rotated_upright

RGB = "rgb24"
"""PyAV's name of the pixel format of decoded frames."""

FULL_RANGE = 2
"""FFmpeg's number of the range of colours in which black is 0."""


class PyAv(FileDecoder):
    """Decode clips on host threads, one clip per thread. Each clip has a new codec context, so that clips are independent."""

    name, on_card = "pyav", False
    files = "all other clips"

    @property
    def version(self) -> str:
        """Versions of PyAV and its FFmpeg."""
        av = libav.find_module()
        return f"PyAV {av.__version__}, FFmpeg {av.ffmpeg_version_info}"

    def takes(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return a (B,) mask of true: all clips."""
        return np.ones(len(table), np.bool_)

    def begin(self, work: ClipWork, indices: NDArray[Any], resources: Resources) -> Callable[[], Event]:
        """Submit the clips to the threads, in descending order of packets · pixels."""
        layout = work.layout
        pending = layout.slowest_first(indices)
        pools = resources.pools
        wait_for_calls = call_concurrently(
            pools.images.submit, min(len(indices), pools.threads), partial(_decode_pending, work, pending)
        )

        def finish() -> Event:
            wait_for_calls()
            if work.staging is not None:
                parts = [
                    (int(layout.starts[index]), int(layout.staged_starts[index]), int(layout.lengths[index]))
                    for index in indices.tolist()
                ]
                resources.lane.copy_parts(work.data, work.staging, parts)
            return resources.lane.record_event()

        return finish


def call_concurrently(submit: Callable[..., Future[None]], count: int, function: Callable[[], None]) -> Callable[[], None]:
    """Start concurrent calls of one function on several threads.

    Args:
        submit: Method ``submit`` of an executor.
        count: Number of calls.
        function: Function to call.

    Returns:
        Function that waits until all calls have ended, even after an error, because no call may write to memory that is reused.
        It then raises the first error.
    """
    futures: list[Future[None]] = []
    try:
        for _ in range(count):
            futures.append(submit(function))  # noqa: PERF401 - the list also holds the calls before an error
    except RuntimeError as error:  # a thread could not be started; earlier ones are running
        futures.append(Future())
        futures[-1].set_exception(error)

    def finish() -> None:
        wait(futures)
        for future in futures:
            future.result()

    return finish


def _decode_pending(work: ClipWork, pending: Iterator[tuple[int, ClipInfo]]) -> None:
    """Decode clips into host memory, until none is left.

    Args:
        work: Decoding task of the batch.
        pending: Clips that no thread has started, shared by all threads: index, and header fields.
    """
    layout = work.layout
    data, starts = (work.data, layout.starts) if work.staging is None else (work.staging, layout.staged_starts)
    packets = work.encoded.data.numpy().data
    for index, info in pending:
        frames = layout.clip(data, index, int(starts[index])).numpy()
        if problem := decode(packets, info, frames):
            work.problems[index] = problem


def decode(data: memoryview, info: ClipInfo, out: NDArray[np.uint8]) -> str:
    """Decode one clip.

    Args:
        data: (bytes,) packets of the batch.
        info: Header fields of the clip.
        out: (T, H, W, 3) output for the upright frames.

    Returns:
        Reason why the clip cannot be decoded; an empty string on success.
    """
    av = libav.required_module()
    stream = info.stream
    try:
        context = _context(av, data, info)
        missing = set(info.positions)  # time stamps of the selected frames that were not decoded yet
        for frame in _frames(av, context, data, info):
            if frame.is_corrupt:  # also if it is not selected, because selected frames may be predicted from it
                return f"its frame at time stamp {frame.pts} is damaged"
            if frame.pts not in missing:
                continue
            if (frame.height, frame.width) != (stream.height, stream.width):
                return f"it has frames of {frame.width}x{frame.height} and of {stream.width}x{stream.height} pixels"
            missing.discard(frame.pts)
            pixels = torch.from_numpy(frame.to_ndarray(format=RGB))
            for position in info.positions[frame.pts]:
                out[position] = rotated_upright(pixels, stream.orientation).numpy()
        return f"its frame at time stamp {min(missing)} is missing" if missing else ""
    except Exception as error:  # damaged data may raise anything
        return f"FFmpeg says: {getattr(error, 'strerror', None) or error}"


def _context(av: Any, data: memoryview, info: ClipInfo) -> Any:
    """Return a codec context for one clip."""
    stream = info.stream
    context = av.CodecContext.create(stream.library, "r")
    if info.extradata:
        context.extradata = bytes(data[info.start : info.start + info.extradata])
    context.thread_count = 1
    libav.limit_pixels(context, 2 * stream.width * stream.height + 2**20)  # coded frames are larger than displayed frames
    # Some codecs store these properties only in the container.
    context.width, context.height = stream.width, stream.height
    context.pix_fmt = stream.pixels
    context.bits_per_coded_sample = stream.bits
    if stream.tag:
        context.codec_tag = stream.tag.ljust(4, "\0")
    if stream.matrix != UNSPECIFIED:
        context.colorspace = stream.matrix
    if stream.full_range:
        context.color_range = FULL_RANGE
    if stream.reorder:  # the value in the file: with a smaller one, a decoder may drop frames as too late
        context.reorder_depth = stream.reorder
    return context


def _frames(av: Any, context: Any, data: memoryview, info: ClipInfo) -> Iterator[Any]:
    """Yield the frames of all packets of a clip, in display order."""
    for start, size, time_stamp, is_key in info.packets:
        packet = av.Packet(data[start : start + size])
        packet.pts = packet.dts = time_stamp
        packet.is_keyframe = is_key
        yield from context.decode(packet)
    yield from context.decode(None)
