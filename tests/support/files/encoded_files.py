"""Encoded images of every kind, made by PIL, or from such by changing what PIL cannot write."""

import io
import struct
import zlib

import numpy as np
import PIL.Image
from support.files.images import noise

DHT, DQT, SOF0, SOS, APP1 = 0xC4, 0xDB, 0xC0, 0xDA, 0xE1


def encoded(kind, height=13, width=21, mode="RGB", seed=0, **options):
    """The file of a random image."""
    packed = io.BytesIO()
    image = PIL.Image.fromarray(noise(seed, height, width, 3))
    (image if mode == "RGB" else image.convert(mode)).save(packed, kind, **options)
    return packed.getvalue()


def jpeg(height=13, width=21, mode="RGB", seed=0, **options):
    return encoded("JPEG", height, width, mode, seed, **options)


def oriented(orientation, order="<", kind="JPEG", **options):
    """A file with this orientation in its EXIF, among other entries."""
    exif = PIL.Image.Exif()
    exif.endian = order
    exif[0x010F] = "a maker"
    exif[0x0112] = orientation
    exif[0x0132] = "2024:01:02 03:04:05"
    return encoded(kind, exif=exif.tobytes(), **options)


def exif_segment(tiff):
    """A JPEG with this behind ``Exif`` in its APP1."""
    content = b"Exif\0\0" + tiff
    whole = jpeg()
    return whole[:2] + struct.pack(">BBH", 0xFF, APP1, len(content) + 2) + content + whole[2:]


def segment(data, marker):
    """Where a segment of a JPEG begins: its marker's 0xFF."""
    at = 2
    while data[at + 1] != marker:
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return at


def changed(data, marker, offset, value):
    """The same file with other bytes in a segment, ``offset`` behind its marker's 0xFF."""
    at = segment(data, marker) + offset
    return data[:at] + value + data[at + len(value) :]


def inserted(data, marker, value):
    """The same file with bytes before a segment."""
    at = segment(data, marker)
    return data[:at] + value + data[at:]


def taken_out(data, marker):
    """A JPEG without its segments of this marker, and their contents."""
    at, contents = 2, []
    while data[at + 1] != SOS:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 1] == marker:
            contents.append(data[at + 4 : end])
            data, end = data[:at] + data[end:], at
        at = end
    return data, contents


def without(data, marker):
    """A JPEG without its segments of this marker."""
    return taken_out(data, marker)[0]


def with_one_segment(data, marker):
    """A JPEG with its segments of this marker in one, before the scan."""
    data, contents = taken_out(data, marker)
    content = b"".join(contents)
    return inserted(data, SOS, struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content)


def with_tables_of_16_bits(data):
    """A JPEG with the same quantization tables, in 16 bits a value, which baseline has not."""
    data, contents = taken_out(data, DQT)
    for content in contents:
        wide = bytes([16 + content[0]]) + np.frombuffer(content[1:], np.uint8).astype(">u2").tobytes()
        data = inserted(data, SOS, struct.pack(">BBH", 0xFF, DQT, len(wide) + 2) + wide)
    return data


def png(height=13, width=21, depth=8, colour=2):
    """A PNG by its header: PIL writes neither 16 bits a channel in colour nor more pixels than there are."""
    samples = {0: 1, 2: 3, 6: 4}[colour]
    rows = b"".join(b"\0" + bytes(min(width, 64) * samples * depth // 8) for _ in range(min(height, 64)))

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def pixels(data):
    """What PIL makes of a file, (h, w[, c])."""
    return np.asarray(PIL.Image.open(io.BytesIO(data)))
