"""Limits on the numbers in MP4 and QuickTime files. FFmpeg's demuxer has no such limits.

When the demuxer opens a file, it expands tables to some 40 bytes of memory per sample. A table of a few bytes may declare
billions of samples: by one size for all samples, by fragments without a size per sample, or by edits that repeat all samples.
So the declared numbers are read first. A file consists of boxes: a size of four bytes, a type code of four bytes, and content.
The demuxer accepts boxes at almost any depth, so all occurrences of the type codes in the headers of the file are read, without
their nesting. The content of the boxes that are read begins with a version of one byte and flags of three bytes. Numbers are
big-endian. ISO/IEC 14496-12 defines the offsets of the fields.
"""

import re
from collections.abc import Iterator
from typing import BinaryIO

from gpuaug.decode.clips import limits
from gpuaug.decode.clips.limits import CONVERT, VideoError

_HEADERS = re.compile(
    b"moov|moof|hoov|free|mfra|meta|udta|sidx|trak|traf|mdia|minf|stbl|edts|elst|mvex|trun|stsd|sts[zc]|stz2|stts|stco|co64|cmov|tfra|"
    b"dinf|ilst|tref|wave|sinf|schi|avss|i(?:loc|inf|prp|ref)"
)
"""Boxes at the top level that the demuxer searches for other boxes; ``free`` only if it begins with a movie header."""

_CHECKED_BOXES = re.compile(b"trak|moof|stsz|stz2|stsc|stco|co64|stts|elst|trun|sidx|tfra|cmov|stsd|hdlr|iinf|iloc|ipco")
"""Boxes that are counted, or whose content is read, at any depth."""

_SOUND = re.compile(
    rb"raw |NONE|twos|sowt|in24|in32|fl32|fl64|lpcm|ipcm|fpcm|alaw|ulaw|ima4|MAC[36]|QDM[2C]|Qclp|\.mp3|agsm|samr|"
    rb"ms\0[\x02\x11U]"
)
"""Formats of sound whose samples the demuxer reads in groups, if each sample lasts for one unit of time."""

_MIN_IN_GROUP = 160
"""Minimum number of samples of sound per group."""

_DAMAGED = "its headers are damaged"


class _Track:
    """Numbers that the tables of a track declare."""

    def __init__(self) -> None:
        self.samples = self.edits = self.chunks = self.max_in_chunk = 0
        self.durations: list[tuple[int, int]] = []
        """(number of runs, duration of the first run) per table of durations."""
        self.formats: list[bytes] = []
        self.has_pictures = False

    @property
    def packets(self) -> int:
        """Maximum number of packets for which the demuxer allocates memory."""
        is_sound = not self.has_pictures and len(self.formats) == 1 and _SOUND.fullmatch(self.formats[0]) is not None
        if is_sound and self.durations == [(1, 1)]:
            return self.chunks * -(-self.max_in_chunk // _MIN_IN_GROUP)
        return self.samples * max(self.edits, 1)


class _Headers:
    """Numbers that the headers of a file declare.

    Args:
        file: The video.
        size: Number of bytes of the video.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self.limit = min(limits.MAX_PACKETS, size)
        """Maximum number of packets: every packet has at least one byte."""
        self.tracks = [_Track()]  # the first entry gets the numbers that come before the first ``trak``
        self.packets = 0
        """Number of packets outside of tables of tracks: in fragments (``trun``), and items of images (``iinf``, ``iloc``)."""
        self.fragments = 0
        self._starts = {size}
        """Offsets of the boxes at the top level, and of the end of the file."""
        self._fragment_offsets: list[int] = []
        num_bytes = 0
        for start, end in [*self._top_level()]:
            num_bytes += end - start
            if num_bytes > limits.MAX_HEADER_BYTES:
                raise VideoError(f"its headers have more than {limits.MAX_HEADER_BYTES} bytes")
            self._read(start, self._content(start, end))
        self.packets += self.fragments * len(self.tracks) + sum(track.packets for track in self.tracks)
        if not self._starts.issuperset(self._fragment_offsets):
            raise VideoError(f"{_DAMAGED}: {CONVERT}")

    def _content(self, start: int, end: int) -> bytes:
        self._file.seek(start)
        return self._file.read(end - start)

    def _top_level(self) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of the boxes that the demuxer searches for other boxes."""
        start = 0
        while start + 8 <= self._size:
            self._starts.add(start)
            header = self._content(start, start + 24)
            box_size = int.from_bytes(header[:4], "big")
            if box_size == 1:
                box_size = int.from_bytes(header[8:16], "big")
            end = min(start + box_size, self._size) if box_size else self._size
            if end < start + 8 or (start == 0 and not header[4:8].isascii()):  # a damaged size, or a file of another format
                break
            name = header[4:8]
            if _HEADERS.fullmatch(name) and (name != b"free" or header[12:16] in (b"mvhd", b"cmov")):
                yield start, end
            start = end
        # The last four bytes may be the size of an index of fragments.
        start = self._size - int.from_bytes(self._content(max(self._size - 4, 0), self._size), "big")
        if start >= 0 and self._content(start + 4, start + 8) == b"mfra":
            yield start, self._size

    def _read(self, start: int, data: bytes) -> None:
        """Add the numbers in a box at the top level, and in the boxes inside it. ``start``: offset of the box."""
        for match in _CHECKED_BOXES.finditer(data):
            offset = match.end()
            fields = data[offset : offset + 32].ljust(32, b"\0")
            number_at = {position: int.from_bytes(fields[position : position + 4], "big") for position in (4, 6, 8, 12)}
            track = self.tracks[-1]
            match match[0]:
                case b"trak":
                    self.tracks.append(_Track())
                case b"cmov":
                    raise VideoError(f"its headers are compressed: {CONVERT}")
                case b"stsz" | b"stz2":
                    track.samples += number_at[8]
                case b"elst":
                    track.edits += number_at[4]
                case b"stsc":
                    for position in range(offset + 12, min(offset + 8 + 12 * number_at[4], len(data)), 12):
                        track.max_in_chunk = max(track.max_in_chunk, int.from_bytes(data[position : position + 4], "big"))
                case b"stco" | b"co64":
                    track.chunks += number_at[4]
                case b"stts":
                    track.durations.append((number_at[4], number_at[12]))
                case b"hdlr":
                    track.has_pictures |= fields[8:12] == b"vide"
                case b"stsd":
                    track.formats.append(fields[12:16])
                    self._check_descriptions(data, offset)
                case b"ipco" if int.from_bytes(data[offset - 8 : offset - 4], "big") > len(data) - offset + 8:
                    raise VideoError(f"{_DAMAGED}: {CONVERT}")
                case b"trun":
                    self.packets += number_at[4]
                case b"iinf":
                    self.packets += number_at[4] if fields[0] else 0  # numbers of version 0 have 16 bits: too small to matter
                case b"iloc":
                    self.packets += number_at[6] if fields[0] > 1 else 0
                case b"moof":
                    self.fragments += 1
                case b"sidx":
                    self._read_sidx(data, offset, start)
                case b"tfra":
                    self._read_tfra(data, offset)

    def _check_descriptions(self, data: bytes, offset: int) -> None:
        """Check that descriptions of samples end within their box, because the demuxer searches all their bytes for boxes."""
        end = offset - 8 + int.from_bytes(data[offset - 8 : offset - 4], "big")
        count, offset = int.from_bytes(data[offset + 4 : offset + 8], "big"), offset + 8
        for _ in range(count):
            description_size = int.from_bytes(data[offset : offset + 4], "big")
            offset += description_size
            if description_size < 8 or offset > min(end, len(data)):
                raise VideoError(f"{_DAMAGED}: {CONVERT}")

    def _read_sidx(self, data: bytes, offset: int, start: int) -> None:
        """Read the sizes of fragments. The demuxer searches each fragment for boxes."""
        field_bytes = 8 if data[offset : offset + 1] > b"\0" else 4
        box_end = start + offset - 8 + int.from_bytes(data[offset - 8 : offset - 4], "big")
        position = offset + 12 + field_bytes
        fragment_start = box_end + int.from_bytes(data[position : position + field_bytes], "big")
        position += field_bytes + 4
        for _ in range(int.from_bytes(data[position - 2 : position], "big")):
            self._fragment_offsets.append(fragment_start)
            fragment_start += int.from_bytes(data[position : position + 4], "big") & 0x7FFFFFFF
            position += 12
            self.fragments += 1

    def _read_tfra(self, data: bytes, offset: int) -> None:
        """Read the offsets of fragments."""
        field_bytes = 8 if data[offset : offset + 1] > b"\0" else 4
        length_sizes = int.from_bytes(data[offset + 8 : offset + 12], "big")
        record_size = 2 * field_bytes + 3 + sum(length_sizes >> shift & 3 for shift in (0, 2, 4))
        position = offset + 16
        for _ in range(int.from_bytes(data[offset + 12 : offset + 16], "big")):
            if position + record_size > len(data):
                break
            self._fragment_offsets.append(int.from_bytes(data[position + field_bytes : position + 2 * field_bytes], "big"))
            position += record_size
            self.fragments += 1


def check(file: BinaryIO, size: int) -> None:
    """Check the numbers that the headers of a video declare, if the video is an MP4 or QuickTime file.

    Args:
        file: The video. Its position is 0 after the call.
        size: Number of bytes of the video.

    Raises:
        VideoError: If the numbers exceed a limit.

    Cost:
        Reads the headers: some 10 µs, and 20 µs per fragment.
    """
    headers = _Headers(file, size)
    file.seek(0)
    count = len(headers.tracks) - 1
    if count > limits.MAX_TRACKS:
        raise VideoError(f"it has {count} tracks, more than {limits.MAX_TRACKS}")
    if headers.packets > headers.limit:
        raise VideoError(f"its headers declare {headers.packets} packets, more than {headers.limit}: {CONVERT}")
