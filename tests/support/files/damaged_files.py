"""Image files that are damaged: bits flipped, ends cut off, files spliced, segments in another order, sizes that are lies."""

import functools
import itertools
import struct
import zlib

from hypothesis import strategies as st
from support.files.encoded import encoded
from support.files.other_encoders import files

FRAMES = sorted(set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC})
"""Markers of a JPEG's frame, SOF0 to SOF15."""

PNG = b"\x89PNG\r\n\x1a\n"
SIDES = st.sampled_from([0, 1, 2, 8, 30, 48, 300, 1000, 0xFFFF]) | st.integers(0, 100)


@functools.cache
def whole_files():
    """Small files of every kind that is decoded, some with several scans, intervals or a rotation."""
    jpegs = [
        {},
        {"subsampling": 0},
        {"subsampling": 1, "orientation": 6},
        {"progressive": True},
        {"mode": "L"},
        {"mode": "CMYK"},
    ]
    jpegs += [{"progressive": True, "orientation": 3, "subsampling": 1}, {"optimize": True, "restart_marker_blocks": 2}]
    others = [("PNG", mode, {}) for mode in ("RGB", "L", "P", "RGBA", "1")]
    others += [
        ("WEBP", "RGB", {}),
        ("WEBP", "RGBA", {"lossless": True}),
        ("GIF", "P", {}),
        ("BMP", "RGB", {}),
        ("PPM", "RGB", {}),
        ("TIFF", "RGB", {"orientation": 6}),
        ("TIFF", "P", {"compression": "tiff_lzw"}),
        ("PNG", "L", {"orientation": 8}),
    ]
    return [
        *(encoded(40 + number, 30, seed=number, **options) for number, options in enumerate(jpegs)),
        *(data for name, data in files().items() if name.split()[0] != "cjpeg" or "arithmetic" in name or "2x2" in name),
        *(encoded(30, 20 + number, form, mode=mode, **options) for number, (form, mode, options) in enumerate(others)),
    ]


def segments(data):
    """Where the segments of a JPEG before its first scan, or the chunks of a PNG, begin, and where the last of them ends."""
    at, found = (8 if data[:8] == PNG else 2), []
    while at + 8 <= len(data):
        found.append(at)
        if data[:8] == PNG:
            at += 12 + int.from_bytes(data[at : at + 4], "big")
        elif data[at] == 0xFF and data[at + 1] not in (0xDA, 0xD9):
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        else:
            break
    return [at for at in found if at < len(data)]


@st.composite
def flipped(draw, data):
    """Other bits, anywhere or in the header."""
    made = bytearray(data)
    for _ in range(draw(st.sampled_from([1, 1, 3, 30]))):
        at = draw(st.integers(0, min(len(made), draw(st.sampled_from([64, 2**20]))) - 1))
        made[at] ^= draw(st.integers(1, 255))
    return bytes(made)


@st.composite
def cut(draw, data):
    """Without a part, or with a part twice."""
    first, last = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
    return draw(st.sampled_from([data[:first], data[:first] + data[last:], data[:last] + data[first:]]))


@st.composite
def spliced(draw, data):
    """The beginning of one file, and the end of another."""
    other = draw(st.sampled_from(whole_files()))
    return data[: draw(st.integers(0, len(data)))] + other[draw(st.integers(0, len(other))) :]


@st.composite
def rearranged(draw, data):
    """Segments in another order, some of them twice and some not at all."""
    starts = segments(data)
    if len(starts) < 2:
        return data
    parts = [data[start:end] for start, end in itertools.pairwise(starts)]
    chosen = draw(st.lists(st.sampled_from(parts), max_size=len(parts) + 2) | st.permutations(parts))
    return data[: starts[0]] + b"".join(chosen) + data[starts[-1] :]


@st.composite
def lying(draw, data):
    """With another size in its header."""
    height, width = draw(SIDES), draw(SIDES)
    made = bytearray(data)
    if made[:8] == PNG:
        made[16:24] = struct.pack(">II", width, height)
        made[29:33] = struct.pack(">I", zlib.crc32(made[12:29]))
        return bytes(made)
    for at in segments(data):
        if data[:2] == b"\xff\xd8" and made[at + 1] in FRAMES:
            made[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(made)


@st.composite
def reframed(draw, data):
    """A JPEG with another marker or precision of its frame, or with one more frame."""
    frames = [at for at in segments(data) if data[:2] == b"\xff\xd8" and at + 9 < len(data) and data[at + 1] in FRAMES]
    if not frames:
        return data
    marker, precision = draw(st.sampled_from(FRAMES)), draw(st.sampled_from([8, 8, 8, 2, 12, 16]))
    at = frames[0]
    frame = bytes([0xFF, marker]) + data[at + 2 : at + 4] + bytes([precision]) + data[at + 5 :]
    return draw(st.sampled_from([data[:at] + frame, data[: at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")] + frame]))


DAMAGES = (flipped, cut, spliced, rearranged, lying, reframed)


@st.composite
def damaged_files(draw):
    """A file with one or more damages."""
    data = draw(st.sampled_from(whole_files()))
    for damage in draw(st.lists(st.sampled_from(DAMAGES), min_size=1, max_size=3)):
        data = draw(damage(data)) if data else data
    return data
