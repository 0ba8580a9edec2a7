"""Videos in worker processes: cache of open files, and the packets of a clip.

A *packet* is a unit of coded data, usually of one frame. A *clip* is a number of selected frames of a video.
"""

import itertools
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np

from gpuaug.decode.clips import libav, mp4
from gpuaug.decode.clips.index import Index, packets_of, read_index, stamp_of
from gpuaug.decode.clips.limits import VideoError
from gpuaug.decode.file_bytes import file_problem, open_file
from gpuaug.decode.limits import LimitError
from gpuaug.feed.worker import READ_EVENT

MAX_INDICES = 1024
"""Maximum number of videos whose ``Index`` a process keeps, each with about 30 bytes per frame."""

MAX_OPEN = 8
"""Maximum number of idle videos that a process keeps open."""


class Videos:
    """Least-recently-used caches of a process: ``Index`` objects of many videos, and a few open videos that are idle.

    A video is idle if no thread is using it. Threads that use the same video at the same time open it once each, and share its
    index. A forked process does not use the open videos of its parent, because the files of both processes share one read
    position. It does not close these videos either, because closing may wait for threads of the parent's decoders.
    """

    def __init__(self) -> None:
        self.idle_videos: OrderedDict[tuple[Any, ...], Video] = OrderedDict()
        """(path, size, time of the last change) of a file → open video that no thread is using."""
        self._inherited_videos: list[OrderedDict[tuple[Any, ...], Video]] = []
        """Idle videos of the parent processes of a forked process. Referenced here, because freeing them would close them."""
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._indices: OrderedDict[tuple[Any, ...], Index] = OrderedDict()
        self._inherited_videos.append(self.idle_videos)
        self.idle_videos = OrderedDict()

    @contextmanager
    def opened(self, source: str | bytes | memoryview) -> Iterator["Video"]:
        """Context manager for the use of a video by one thread.

        After the ``with`` statement, the file stays open for the next clip, unless an error was raised.

        Args:
            source: Path of the video, or its bytes.

        Raises:
            VideoError: If the video cannot be read, when it is opened or within the ``with`` statement. The message does not
                name the file.
        """
        av = libav.required_module()
        try:
            key: tuple[Any, ...] = ()  # of bytes, which are never kept open
            if isinstance(source, str):
                sys.audit(READ_EVENT, source)  # the video may be open already
                status = os.stat(source)
                key = (source, status.st_size, status.st_mtime_ns)
            with self._lock:
                video = self.idle_videos.pop(key, None) or Video(source, self._indices.get(key))
            try:
                yield video
            except BaseException:
                video.close()
                raise
            self._keep(key, video)
        except av.error.FFmpegError as error:
            raise VideoError(f"FFmpeg says: {error.strerror or error}") from None
        except (OSError, ValueError, LimitError, OverflowError, MemoryError) as error:
            raise VideoError(file_problem(error)) from None

    def _keep(self, key: tuple[Any, ...], video: "Video") -> None:
        """Add a video and its index to the caches, and remove the least recently used ones if there are too many."""
        with self._lock:
            # Videos in memory have no key. Another thread may have read the same video.
            if not key or self.idle_videos.setdefault(key, video) is not video:
                video.close()
            if key:
                self._indices[key] = self._indices.pop(key, video.index)  # moved to the end
            if len(self._indices) > MAX_INDICES:
                self._indices.popitem(last=False)
            if len(self.idle_videos) > MAX_OPEN:
                self.idle_videos.popitem(last=False)[1].close()


class Video:
    """A video, opened when its packets are read.

    Args:
        source: Path of the video, or its bytes.
        index: Index of the video; ``None`` to create it from the packets when it is needed.
    """

    def __init__(self, source: str | bytes | memoryview, index: Index | None) -> None:
        self._source, self._index = source, index
        self._file: BinaryIO | None = None
        self._container: Any = None

    def close(self) -> None:
        """Close the container and its file."""
        if self._container is not None:
            self._container.close()
        if self._file is not None:
            self._file.close()

    def _open(self) -> Any:
        """Open the file again, and return the container at its beginning.

        A seek to the beginning is not enough, because a container may return other packets after a seek.
        """
        self.close()
        self._file = open_file(self._source) if isinstance(self._source, str) else BytesIO(self._source)
        if self._index is None:
            mp4.check(self._file, self._file.seek(0, os.SEEK_END))
        self._container = libav.open_container(self._file)
        return self._container

    @property
    def index(self) -> Index:
        """Index of the video. The first access reads all packets, unless the index was passed."""
        if self._index is None:
            self._index = read_index(self._open(), open_again=self._open)
        return self._index

    def packets(self, first: int, last: int) -> Iterator[Any]:
        """Yield the packets ``first`` … ``last``, in decoding order.

        Args:
            first: Number of the packet of a key frame. Packets are numbered from 0 in decoding order, as in ``Index``.
            last: Number of the last packet.

        Raises:
            VideoError: If the packets differ from the packets that were read for the index.
        """
        number = first
        # After a seek, the time stamps may differ, or the seek may miss the key frame. In these cases, the remaining packets
        # are counted from the beginning of the file.
        for packets_from in (self._packets_after_seek, self._counted_packets):
            for packet in packets_from(number):
                if not self.index.matches(number, packet):
                    break
                yield packet
                number += 1
                if number > last:
                    return
        raise VideoError(f"packet {number} of its video track is damaged or missing")

    def _counted_packets(self, first: int) -> Iterator[Any]:
        """Return the packets from packet ``first`` on, counted from the beginning of the file."""
        return itertools.islice(packets_of(self._open()), first, None)

    def _packets_after_seek(self, first: int) -> Iterator[Any]:
        """Return the packets from packet ``first`` on, after a seek to it; no packet if it is not found.

        Packets are compared by ``stamp_of``: the presentation time stamp, or the decoding time stamp if there is none.
        """
        index = self.index
        container = self._container or self._open()
        try:
            seek_dts = int(index.key_dts[np.searchsorted(index.keys, first)])
            container.seek(seek_dts, stream=container.streams.video[0], backward=True)
        except libav.required_module().error.FFmpegError:
            return iter(())
        packets = packets_of(container)
        for packet in packets:
            stamp = stamp_of(packet)
            if stamp == index.stamp[first]:
                return itertools.chain([packet], packets)
            if packet.is_keyframe and stamp is not None and stamp > index.stamp[first]:
                break  # a later key frame: the seek has missed packet ``first``
        return iter(())


VIDEOS = Videos()
"""Videos of this process."""
