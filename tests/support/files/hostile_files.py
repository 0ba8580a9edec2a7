"""Files of every format that repeat a piece, or declare a size, a number of times: what decoders allocate or loop over."""

import struct
import zlib

import PIL.Image
from support.files.encoded_files import APP1, DHT, DQT, SOF0, SOS, changed, encoded, inserted, jpeg, png, segment
from support.files.exif_files import chunk

EOI = b"\xff\xd9"


def part(marker, content):
    """A segment of a JPEG."""
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def jpegs(count):
    """JPEGs with ``count`` scans, segments, tables or bytes of padding."""
    plain, progressive = jpeg(mode="L"), jpeg(mode="L", progressive=True)
    scan = plain[segment(plain, SOS) : -2]
    refinement = progressive[progressive.rindex(b"\xff\xda") : -2]
    arithmetic = changed(progressive, 0xC2, 1, b"\xca")
    lossless = changed(plain, SOF0, 1, b"\xc3")
    colour = jpeg(subsampling=0)
    one_component = part(SOS, b"\1\1\0\0\x3f\0") + colour[segment(colour, SOS) + 14 : -2]
    separate = colour[: segment(colour, SOS)]
    tables = plain[segment(plain, DHT) : segment(plain, SOS)]
    quantization = plain[segment(plain, DQT) : segment(plain, SOF0)]
    many = {
        "EXIF": part(APP1, b"Exif\0\0II*\0" + bytes(100)),
        "XMP": part(APP1, b"http://ns.adobe.com/xap/1.0/\0" + bytes(100)),
        "ICC": part(0xE2, b"ICC_PROFILE\0\1\1" + bytes(100)),
        "Photoshop": part(0xED, b"Photoshop 3.0\x00" + b"8BIM\4\4\0\0\0\0\0\0" * 10),
        "comments": part(0xFE, b""),
        "long comments": part(0xFE, b"\xff\xda" * 100),
        "Huffman tables": tables,
        "quantization tables": quantization,
        "intervals": part(0xDD, b"\0\1"),
        "padding": b"\xff",
        "empty markers": b"\xff\x01",
        "restart markers": b"\xff\xd0",
        "end of a scan": b"\0" * 9,
    }
    files = {f"{name} in front": inserted(plain, SOS, piece * count) for name, piece in many.items()}
    first = progressive.rindex(b"\xff\xda")
    files |= {
        f"{name} between scans": progressive[:first] + piece * count + progressive[first:] for name, piece in many.items()
    }
    long_exif = part(APP1, b"Exif\0\0" + bytes(65000)) * (count // 40)
    return {
        **files,
        "long EXIF": inserted(jpeg(mode="CMYK"), SOS, long_exif),
        "progressive scans": progressive[:-2] + refinement * count + EOI,
        "progressive scans and no end": progressive[:-2] + refinement * count,
        "scans behind a false end": progressive[:-2] + part(0xFE, EOI) + refinement * count + EOI,
        "scans behind empty markers": progressive[:-2] + (b"\xff\x01" + refinement) * count + EOI,
        "progressive scans of a large image": changed(progressive, 0xC2, 5, struct.pack(">HH", 12000, 12000))[:-2]
        + refinement * count
        + EOI,
        "arithmetic scans": arithmetic[:-2] + refinement * count + EOI,
        "baseline scans": plain[:-2] + scan * count + EOI,
        "scans of one component": separate + one_component * count + EOI,
        "lossless scans": lossless[:-2] + scan * count + EOI,
        "frames": inserted(plain, SOS, plain[segment(plain, SOF0) : segment(plain, DHT)] * count),
        "large and empty": changed(jpeg(), SOF0, 5, struct.pack(">HH", 13000, 13000)),
        "too large": changed(jpeg(), SOF0, 5, struct.pack(">HH", 65535, 65535)),
    }


def pngs(count):
    """PNGs with ``count`` chunks, in front of the pixels, behind them, and of pixels."""
    whole = png()
    start, end = whole.index(b"IDAT") - 4, len(whole) - 12
    many = {
        "texts": chunk(b"tEXt", b"key\0text"),
        "bombs": chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(bytes(2**20 - 9))),
        "XMP bombs": chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(bytes(2**20 - 9))),
        "profiles": chunk(b"iCCP", b"icc\0\0" + zlib.compress(bytes(2**20 - 9))),
        "palettes": chunk(b"sPLT", b"p\0\x08" + bytes(600)),
        "EXIF": chunk(b"eXIf", b"II*\0" + bytes(100)),
        "empty": chunk(b"abCd", b""),
        "pixels": chunk(b"IDAT", b""),
        "frames": chunk(b"fcTL", bytes(26)) + chunk(b"fdAT", bytes(8)),
    }
    files = {f"{name} in front": whole[:start] + piece * count + whole[start:] for name, piece in many.items()}
    files |= {f"{name} behind": whole[:end] + piece * count + whole[end:] for name, piece in many.items()}
    return {
        **files,
        "long text": whole[:start] + chunk(b"tEXt", b"key\0" + bytes(400 * count)) + whole[start:],
        "animated": whole[:33] + chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0)) + whole[33:],
        "large and empty": png(13000, 13000),
        "large and deep": png(13000, 13000, 16, 6),
        "too large": png(2**31 - 1, 2**31 - 1),
    }


def gifs(count):
    """GIFs with ``count`` blocks or extensions in front of the image, or frames behind."""
    whole = encoded("GIF", mode="P")
    start = 13 + (3 << (whole[10] & 7) + 1) if whole[10] & 0x80 else 13
    image = whole[start:-1]
    many = {
        "blocks of a comment": b"!\xfe" + b"\x02ab" * count + b"\0",
        "long comment": b"!\xfe" + (b"\xff" + bytes(255)) * count + b"\0",
        "comments": b"!\xfe\1a\0" * count,
        "application data": b"!\xff\x0bXMP DataXMP" + b"\1a" * count + b"\0",
        "long application data": b"!\xff\x0bXMP DataXMP" + (b"\xff" + bytes(255)) * count + b"\0",
        "control": b"!\xf9\4\0\0\0\0\0" * count,
        "bytes": b"\0" * count,
    }
    files = {name: whole[:start] + piece + whole[start:] for name, piece in many.items()}
    frame = image.replace(image[image.index(b",") + 1 :][:8], struct.pack("<4H", 65535, 65535, 65535, 65535), 1)
    return {
        **files,
        "frames": whole[:-1] + image * count + b";",
        "too large": whole[:start] + frame + b";",
        "large and empty": whole[:6] + struct.pack("<HH", 13000, 13000) + whole[10:],
    }


def webps(count):
    """WebPs with ``count`` chunks, and with a large canvas."""
    lossy = encoded("WEBP")[12:]

    def riff(chunks, flags=0, width=21, height=13):
        first = (
            b"VP8X" + struct.pack("<IB3x", 10, flags) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
        )
        return b"RIFF" + struct.pack("<I", 4 + len(first + chunks)) + b"WEBP" + first + chunks

    frame = b"ANMF" + struct.pack("<I", 16 + len(lossy)) + bytes(6) + b"\x14\0\0\x0c\0\0" + bytes(4) + lossy
    still = {"unknown": b"ABCD\0\0\0\0", "EXIF": b"EXIF\4\0\0\0II*\0", "XMP": b"XMP \4\0\0\0text"}
    return {
        **{f"{name} in front": riff(piece * count + lossy, 0x0C) for name, piece in still.items()},
        **{f"{name} behind": riff(lossy + piece * count, 0x0C) for name, piece in still.items()},
        "long EXIF": riff(lossy + b"EXIF" + struct.pack("<I", 400 * count) + bytes(400 * count), 0x08),
        "frames": riff(b"ANIM\6\0\0\0" + bytes(6) + frame * count, 0x02),
        "large canvas": riff(b"ANIM\6\0\0\0" + bytes(6) + frame, 0x02, 13000, 13000),
        "too large": riff(b"ANIM\6\0\0\0" + bytes(6) + frame, 0x02, 2**24, 255),
        "wrong canvas": riff(lossy, 0, 13000, 13000),
    }


def netpbms(count):
    """Netpbm files with comments of ``count`` bytes, ``count`` comments, and sizes without pixels."""
    return {
        **{f"{kind:c}, comment": b"P%c\n#" % kind + b"a" * count + b"\n3 2\n255\n" + b"1 " * 18 for kind in b"123456"},
        **{f"{kind:c}, comments": b"P%c\n" % kind + b"#\n" * count + b"3 2\n255\n" + b"1 " * 18 for kind in b"123456"},
        "comments between pixels": b"P2\n3 2\n255\n" + b"#\n" * count + b"1 " * 6,
        "split number": b"P6 1#\n" + b"3000 255 100\n" + bytes(3 * count),
        "digits": b"P3\n13000 13000\n255\n" + b"1 " * count,
        "spaces": b"P1\n13000 13000\n" + b" " * count,
        "slow maximum": b"P6\n13000 13000\n100\n" + bytes(count),
        "large and empty": b"P6\n13000 13000\n255\n",
        "too large": b"P6\n9999999999 9999999999\n255\n",
    }


def bmps(count):
    """BMPs of run lengths, and sizes without pixels."""

    def bmp(width, height, pixels, compression):
        info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, compression, len(pixels), 0, 0, 0, 0)
        return b"BM" + struct.pack("<IHHI", 54 + 1024 + len(pixels), 0, 0, 54 + 1024) + info + bytes(range(256)) * 4 + pixels

    return {
        "ends of lines": bmp(13000, 13000, b"\0\0" * count, 1),
        "single pixels": bmp(13000, 13000, b"\1\1" * count, 1),
        "jumps": bmp(13000, 13000, b"\0\2\0\0" * count, 1),
        "pairs": bmp(3000, 3000, b"\xff\1" * count, 2),
        "large and empty": bmp(13000, 13000, b"", 0),
        "too large": bmp(2**31 - 1, 2**31 - 1, b"", 0),
    }


def tiff_pages(*pages, bigtiff=False, loop=False, data=bytes(4096)):
    """A TIFF of pages, each a list of (tag, type, count, value)."""
    head, word, counter, width = (b"II+\0\x08\0\0\0", "Q", "Q", 8) if bigtiff else (b"II*\0", "I", "H", 4)
    made = bytearray(head + struct.pack("<" + word, len(head) + width + len(data)) + data)
    for number, entries in enumerate(pages):
        made += struct.pack("<" + counter, len(entries))
        for tag, kind, count, value in entries:
            made += struct.pack("<HH" + word * 2, tag, kind, count, value)
        following = len(made) + width if number + 1 < len(pages) else len(head) + width + len(data) if loop else 0
        made += struct.pack("<" + word, following)
    return bytes(made)


def tiffs(count):
    """TIFFs with ``count`` tags, pages or strips, and with tags that contradict each other."""

    def page(width=20, height=20, **changes):
        tags = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: 400}
        entries = {tag: (tag, 4, 1, value) for tag, value in tags.items()}
        entries |= {int(tag[1:]): (int(tag[1:]), *entry) for tag, entry in changes.items()}
        return [entries[tag] for tag in sorted(entries)]

    some = min(count, 65000)
    many = b"".join(struct.pack("<I", 8) for _ in range(count))
    return {
        "tags": tiff_pages([*page(), *((40000 + n % 20000, 4, 1, n) for n in range(some))]),
        "tags of a BigTIFF": tiff_pages([*page(), *((40000 + n % 20000, 4, 1, n) for n in range(count))], bigtiff=True),
        "overlapping values": tiff_pages(
            [*page(), *((40000 + n, 7, 400 * count, 8) for n in range(1000))], data=bytes(400 * count)
        ),
        "repeated width": tiff_pages([page()[0], (256, 4, 1, 13000), *page()[1:]]),
        "repeated samples": tiff_pages([*page(), (277, 4, 1, 255), (277, 4, 1, 1)]),
        "signed width": tiff_pages(page(t256=(9, 1, 13000))),
        "floating width": tiff_pages(page(t256=(11, 1, 0x46000000))),
        "loop": tiff_pages(page(), page(), loop=True),
        "loop of overviews": tiff_pages(page(t254=(4, 1, 1)), page(t254=(4, 1, 1)), loop=True),
        "loop without tags": tiff_pages([], loop=True),
        "pages": tiff_pages(*[page()] * some),
        "overviews": tiff_pages(page(), *[page(t254=(4, 1, 1))] * some),
        "strips": tiff_pages(page(20, 20, t273=(4, count, 8), t278=(4, 1, 1), t279=(4, count, 8)), data=many),
        "large strips": tiff_pages(page(t278=(4, 1, 2**32 - 1), t279=(4, 1, 2**32 - 1))),
        "large tile": tiff_pages(page(t322=(4, 1, 65520), t323=(4, 1, 65520), t324=(4, 1, 8), t325=(4, 1, 400))),
        "large tile by LZW": tiff_pages(
            page(t259=(3, 1, 5), t322=(4, 1, 32000), t323=(4, 1, 32000), t324=(4, 1, 8), t325=(4, 1, 400))
        ),
        "huge counts": tiff_pages(page(t258=(3, 2**32 - 1, 8), t273=(4, 2**32 - 1, 8), t279=(4, 2**32 - 1, 8))),
        "huge counts of a BigTIFF": tiff_pages(page(t273=(16, 2**64 - 1, 8), t279=(16, 2**63, 8)), bigtiff=True),
        "many samples": tiff_pages(page(13000, 13000, t258=(3, 1, 16), t277=(3, 1, 255))),
        "65535 samples": tiff_pages(page(t277=(3, 1, 65535))),
        "large and empty": tiff_pages(page(13000, 13000)),
        "large and deep": tiff_pages(page(13000, 13000, t258=(3, 1, 16))),
        "too large": tiff_pages(page(2**32 - 1, 2**32 - 1)),
    }


def jpegs_2000(count):
    """JPEG 2000 files with ``count`` boxes or segments, and with other numbers in their codestream."""
    if "JPEG2000" not in PIL.Image.SAVE:
        return {}
    boxed, plain = encoded("JPEG2000"), encoded("JPEG2000", no_jp2=True)
    size = plain.index(b"\xff\x51") + 4
    after = size - 2 + int.from_bytes(plain[size - 2 : size])
    at = boxed.index(b"jp2h") - 4

    def siz(data, offset, form, *values):
        start = data.index(b"\xff\x51") + 6 + offset
        return data[:start] + struct.pack(form, *values) + data[start + struct.calcsize(form) :]

    components = siz(plain, 32, ">H", 16000)
    components = components[: size - 2] + struct.pack(">H", 38 + 3 * 16000) + components[size : size + 36]
    return {
        "boxes": boxed[:at] + struct.pack(">I4s", 8, b"free") * count + boxed[at:],
        "segments": plain[:after] + b"\xff\x64\0\2" * count + plain[after:],
        "long segments": plain[:after] + (b"\xff\x65\xff\xff" + bytes(65533)) * min(count // 10, 800) + plain[after:],
        "components": components + b"\7\1\1" * 16000 + plain[after:],
        "tiles": siz(plain, 0, ">8I", 250, 250, 0, 0, 1, 1, 0, 0),
        "another size": siz(boxed, 0, ">II", 13000, 13000),
        "large and empty": siz(plain, 0, ">8I", 13000, 13000, 0, 0, 13000, 13000, 0, 0),
        "too large": siz(plain, 0, ">8I", 2**32 - 1, 2**32 - 1, 0, 0, 2**31, 2**31, 0, 0),
    }


def avifs(count):
    """AVIFs with ``count`` boxes."""
    if "AVIF" not in PIL.Image.SAVE:
        return {}
    whole = encoded("AVIF")
    first = int.from_bytes(whole[:4])
    size = whole.index(b"ispe") + 8
    return {
        "boxes": whole[:first] + struct.pack(">I4s", 8, b"free") * count + whole[first:],
        "another size": whole[:size] + struct.pack(">II", 13000, 13000) + whole[size + 8 :],
        "too large": whole[:size] + struct.pack(">II", 2**32 - 1, 2**32 - 1) + whole[size + 8 :],
    }


def in_tiff(data):
    """A TIFF of one strip, which is a whole JPEG of 13 rows of 21 grey pixels."""
    tags = [(256, 21), (257, 13), (258, 8), (259, 7), (262, 1), (273, 8), (277, 1), (278, 13), (279, len(data))]
    return tiff_pages([(tag, 4, 1, value) for tag, value in tags], data=data)


MAKERS = {
    "JPEG": jpegs,
    "PNG": pngs,
    "GIF": gifs,
    "WebP": webps,
    "netpbm": netpbms,
    "BMP": bmps,
    "TIFF": tiffs,
    "JPEG 2000": jpegs_2000,
    "AVIF": avifs,
}
"""Function of each format that makes its files."""


def hostile_files(count):
    """Format and description → file, of every format."""
    files = {f"{kind}: {name}": data for kind, make in MAKERS.items() for name, data in make(count).items()}
    files["TIFF: JPEG of many scans"] = in_tiff(files["JPEG: progressive scans"])
    return files
