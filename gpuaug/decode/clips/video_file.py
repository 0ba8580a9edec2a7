"""Videos in worker processes: open files, and the packets of a clip."""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np

from gpuaug.decode.clips import libav, limits, mp4
from gpuaug.decode.clips.index import CONVERT, Index, Scan, VideoError, checksum, packets_of, stamp_of
from gpuaug.decode.encoded_input import NotRegularError, file_problem, open_file

MAX_INDICES = 1024
"""Maximum number of videos whose ``Index`` a process keeps, each with about 30 bytes per frame."""

MAX_OPEN = 8
"""Maximum number of videos that a process keeps open."""


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
        for container in getattr(self, "open", {}).values():
            _close(container)
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
            return Video(source, None, None, None)
        try:
            status = os.stat(source)
        except (OSError, ValueError) as error:
            raise VideoError(file_problem(error)) from None
        key = (source, status.st_size, status.st_mtime_ns)
        with self._lock:
            container = self.open.pop(key, None)
            index = self.indices.get(key)
        return Video(source, container, index, key)

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
                _close(container)


VIDEOS = Videos()
"""Videos of this process."""


def _open_container(source: str | memoryview, *, is_known: bool) -> Any:
    """Open a video and return PyAV's container.

    Args:
        source: Path of the video, or its bytes.
        is_known: Whether the headers of the same file were checked before.

    Raises:
        VideoError: If the video cannot be opened, has no video stream, or exceeds a limit.
    """
    av = libav.required_module()
    container = None
    try:
        file = open_file(source) if isinstance(source, str) else BytesIO(source)
    except (OSError, ValueError, NotRegularError) as error:
        raise VideoError(file_problem(error)) from None
    try:
        if not is_known:
            mp4.check(file, file.seek(0, os.SEEK_END))
        container = libav.open_container(file)
        if not container.streams.video:
            raise VideoError("it has no video stream")
        return container
    except BaseException as error:
        if container is not None:
            container.close()
        file.close()
        if isinstance(error, av.error.ArgumentError):  # FFmpeg reports a demuxer that is not allowed in no other way
            raise VideoError(f"its container is none of {', '.join(libav.DEMUXERS)}: {CONVERT}") from None
        if isinstance(error, MemoryError):
            raise VideoError(f"it has more than {limits.MAX_TRACKS} tracks, or too little memory is free") from None
        if isinstance(error, (av.error.FFmpegError, OSError, ValueError, EOFError)):
            raise VideoError(_reason(error)) from None
        raise


def _close(container: Any) -> None:
    """Close a container and its file."""
    container.close()
    container.file.file.close()


class Video:
    """An open video.

    Args:
        source: Path of the video, or its bytes.
        container: PyAV's container; ``None`` to open it.
        index: Index of the video; ``None`` if the packets were not read yet.
        key: Key of the video in ``Videos``; ``None`` for a video in bytes.

    Raises:
        VideoError: If the video cannot be opened.
    """

    def __init__(self, source: str | memoryview, container: Any, index: Index | None, key: tuple[Any, ...] | None) -> None:
        self._source = source
        self.container = container or _open_container(source, is_known=index is not None)
        self.index = index
        self.key = key

    def close(self) -> None:
        """Close the container."""
        _close(self.container)

    def _open_again(self) -> Any:
        """Return the container at its beginning. Packets are then read as in the first reading, unlike after a seek."""
        self.close()
        self.container = _open_container(self._source, is_known=True)
        return self.container

    def read_index(self) -> Index:
        """Return the index. The first call reads all packets.

        Raises:
            VideoError: If the video cannot be decoded.
        """
        if self.index is None:
            av = libav.required_module()
            try:
                self.index = Scan(self.container).index(self._open_again)
            except (av.error.FFmpegError, ValueError, EOFError, OverflowError) as error:
                raise VideoError(_reason(error)) from None
        return self.index

    def packets(self, first: int, last: int) -> Iterator[tuple[int, Any]]:
        """Yield (index, packet) for the packets ``first``, a key frame, to ``last``, in decoding order.

        Raises:
            VideoError: If the packets differ from the packets that were read for the index.
        """
        av = libav.required_module()
        try:
            yield from self._packets(first, last)
        except (av.error.FFmpegError, ValueError, EOFError, OverflowError) as error:
            raise VideoError(_reason(error)) from None

    def _packets(self, first: int, last: int) -> Iterator[tuple[int, Any]]:
        index = self.read_index()
        number = first
        for packet in self._packets_after_seek(first):
            if not _is_packet(packet, index, number):
                break
            yield number, packet
            number += 1
            if number > last:
                return
        # After a seek, a container may compute other time stamps, or miss the packet. Then count packets from the beginning.
        for position, packet in enumerate(packets_of(self._open_again())):
            if position < number:
                continue
            if not _is_packet(packet, index, number):
                raise VideoError(f"its packet {number} is damaged")
            yield number, packet
            number += 1
            if number > last:
                return
        raise VideoError(f"its data end before packet {last}")

    def _packets_after_seek(self, first: int) -> Iterator[Any]:
        """Yield packets from the key frame ``first`` on; no packet if the key frame is not found."""
        index = self.read_index()
        stamp = index.stamps[first]
        seek_dts = int(index.key_dts[np.searchsorted(index.keys, first)])
        try:
            self.container.seek(seek_dts, stream=self.container.streams.video[0], backward=True)
        except libav.required_module().error.FFmpegError:
            return
        is_found = False
        for packet in packets_of(self.container):
            if not is_found:
                packet_stamp = stamp_of(packet)
                is_found = packet_stamp == stamp
                if packet.is_keyframe and packet_stamp is not None and packet_stamp > stamp:
                    return
            if is_found:
                yield packet


def _is_packet(packet: Any, index: Index, number: int) -> bool:
    """Return whether a packet is the undamaged packet ``number`` of the index."""
    is_equal = stamp_of(packet) in (None, index.stamps[number]) and checksum(packet) == index.checksums[number]
    return is_equal and not packet.is_corrupt


def _reason(error: BaseException) -> str:
    """Return FFmpeg's description of an error, without the name of the file."""
    strerror = getattr(error, "strerror", None)
    return f"FFmpeg says: {strerror or error}" if strerror or str(error) else type(error).__name__
