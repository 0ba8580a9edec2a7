"""PNGs of every colour type, depth and order of rows, with other chunks, and damaged ones; and damaged WebPs."""

import functools
import io
import itertools
import random
import struct
import zlib

import numpy as np
from PIL import Image
from support.files.encoded import smooth

SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Samples of a pixel by colour type."""

KINDS = [(colour, depth) for colour in SAMPLES for depth in (1, 2, 4, 8) if depth == 8 or colour in (0, 3)]
"""(colour type, bits a sample) of all PNGs of up to 8 bits a channel."""

ADAM7 = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
"""First row and column, and steps between rows and columns, of the seven passes of an interlaced PNG."""

OTHERS = [
    (b"tEXt", b"key\0text"),
    (b"zTXt", b"key\0\0no zlib"),
    (b"gAMA", struct.pack(">I", 30000)),
    (b"IDAT", b""),
    (b"IDAT", b"more"),
    (b"DDAT", b"more"),
    (b"acTL", struct.pack(">II", 2, 0)),
    (b"fcTL", bytes(26)),
    (b"ABCD", b""),
    (b"abCd", b"private"),
]
"""Chunks that are put between those of a PNG."""

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def chunk(name, content=b""):
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def joined(chunks):
    return SIGNATURE + b"".join(chunk(*each) for each in chunks)


def rows(colour, depth, height, width, seed, *, interlaced):
    """Bytes of all rows before they are compressed. Any bytes behind any of the five filters are an image."""
    made, drawn = [], np.random.default_rng(seed)
    for top, left, down, right in ADAM7 if interlaced else [(0, 0, 1, 1)]:
        lines, columns = -(-(height - top) // down), -(-(width - left) // right)
        length = -(-columns * SAMPLES[colour] * depth // 8)
        for _ in range(lines if columns > 0 else 0):
            made += [bytes([drawn.integers(5)]), drawn.integers(0, 24, length, np.uint8).tobytes()]
    return b"".join(made)


def png_chunks(colour, depth, height, width, seed=0, *, interlaced=False, before=(), behind=(), data=None, parts=2):
    """The chunks of a PNG: ``before`` and ``behind`` the pixels others, the pixels in ``parts``."""
    if data is None:
        data = zlib.compress(rows(colour, depth, height, width, seed, interlaced=interlaced))
    edges = [len(data) * part // parts for part in range(parts + 1)]
    palette = [(b"PLTE", (bytes(range(256)) * 3)[: 3 * 2**depth])] if colour == 3 and b"PLTE" not in dict(before) else []
    return [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)),
        *palette,
        *before,
        *((b"IDAT", data[first:last]) for first, last in itertools.pairwise(edges)),
        *behind,
        (b"IEND", b""),
    ]


def png(*arguments, **options):
    return joined(png_chunks(*arguments, **options))


def webp(width=33, height=21, *, mode="RGB", seed=0, **options):
    packed = io.BytesIO()
    image = smooth(width, height, seed)
    if mode == "RGBA":
        image.putalpha(smooth(width, height, seed + 1).convert("L"))
    image.convert(mode).save(packed, "WEBP", **options)
    return packed.getvalue()


@functools.cache
def webps():
    """WebPs by what they are: lossy, lossless, with alpha, with metadata, animated."""
    exif = Image.Exif()
    exif[274] = 6
    moving = {"save_all": True, "append_images": [smooth(33, 21, 5)]}
    return {
        "lossy": webp(quality=90),
        "lossy of odd sides": webp(1, 1),
        "coarse": webp(67, 45, quality=5),
        "fine": webp(64, 48, quality=100),
        "lossy with alpha": webp(mode="RGBA", quality=80),
        "lossless": webp(lossless=True),
        "lossless with alpha": webp(mode="RGBA", lossless=True),
        "lossless, exact": webp(mode="RGBA", lossless=True, exact=True),
        "with metadata": webp(exif=exif, icc_profile=b"a profile", xmp=b"<x/>"),
        "animated": webp(**moving),
        "animated with alpha": webp(mode="RGBA", lossless=True, **moving),
    }


def damaged_png(seed):
    """A PNG that is damaged in its bytes, its chunks, its compressed data or its rows. Most have right checksums."""
    draw = random.Random(seed)
    colour, depth = draw.choice([(2, 8), (2, 8), (6, 8), (0, 8), *KINDS])
    height, width, interlaced = draw.randrange(1, 20), draw.randrange(1, 20), draw.random() < 0.2
    content = bytearray(rows(colour, depth, height, width, seed, interlaced=interlaced))
    damage = draw.randrange(6)
    if damage == 0:  # of rows: filters that there are not, too few bytes, too many
        content[draw.randrange(len(content))] = draw.randrange(256)
        content = content[: draw.choice([len(content), draw.randrange(len(content) + 1)])]
        content += bytes(draw.choice([0, 0, 1, 40, 4000]))
    data = bytearray(zlib.compress(content, draw.choice([0, 1, 6, 9])))
    if damage == 1:  # of the compressed data, also of its checksum or its end
        at = draw.choice([draw.randrange(len(data)), len(data) - draw.randrange(1, 6), draw.randrange(2)])
        data[at] = draw.randrange(256)
        data = data[: draw.choice([len(data), draw.randrange(len(data)), max(len(data) - draw.randrange(8), 0)])]
        data += bytes(draw.choice([0, 0, 3, 300]))
    chunks = png_chunks(colour, depth, height, width, seed, interlaced=interlaced, data=bytes(data), parts=draw.randrange(1, 4))
    if damage in (2, 5):  # of their order
        for _ in range(draw.randrange(1, 4)):
            chunks.insert(
                draw.randrange(1, len(chunks) + 1), draw.choice([(b"tRNS", bytes(draw.randrange(7))), *OTHERS, *chunks])
            )
        if draw.random() < 0.3:
            del chunks[draw.randrange(len(chunks))]
    file = bytearray(joined(chunks))
    if damage in (3, 5):  # of bytes, checksums left as they were
        for _ in range(draw.choice([1, 1, 5])):
            file[draw.randrange(8, len(file))] ^= 1 << draw.randrange(8)
    if damage == 4:  # of its end
        file = file[: draw.choice([len(file) - draw.randrange(20), draw.randrange(33, len(file))])] + bytes(
            draw.choice([0, 0, 5])
        )
    return bytes(file)


def damaged_webp(seed):
    """A WebP of which some bytes are others, some are missing or some follow."""
    draw = random.Random(seed)
    file = bytearray(draw.choice(list(webps().values())))
    for _ in range(draw.choice([0, 1, 1, 5])):
        file[draw.choice([draw.randrange(len(file)), draw.randrange(12, min(60, len(file)))])] = draw.randrange(256)
    if draw.random() < 0.3:
        at = draw.randrange(20, len(file))
        del file[at : at + draw.choice([1, 2, 100, len(file)])]
    file += bytes(draw.choice([0, 0, 0, 2, 100]))
    if draw.random() < 0.5:
        file[4:8] = struct.pack("<I", (len(file) - 8) & 0xFFFFFFFF)
    return bytes(file)
