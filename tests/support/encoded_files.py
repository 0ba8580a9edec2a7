"""Encoded images of every kind, made by PIL, or from such by changing what PIL cannot write."""

import io
import struct
import zlib

import numpy as np
import PIL.Image
from support.images import noise

DHT, SOF0, SOS, APP1 = 0xC4, 0xC0, 0xDA, 0xE1


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
