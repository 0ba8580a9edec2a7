"""Files with an orientation in every place, type and byte order that PIL reads, and in some that it does not."""

import io
import struct
import zlib

import numpy as np
import PIL.Image
import tifffile
from support.files.encoded_files import APP1, encoded, inserted
from support.files.images import noise

TYPES = {1: "B", 2: "B", 3: "H", 4: "I", 5: "I", 6: "b", 7: "B", 8: "h", 9: "i", 10: "i", 11: "f", 12: "d", 13: "I", 16: "Q"}
"""Types of EXIF's entries, and the form of one number of each. 5 and 10 are fractions of two."""

ORIENTATION = 274


def exif(value, form=3, order="<", count=1, maker=b"a maker\0"):
    """EXIF as the TIFF structure that it is, with the orientation behind an entry whose value lies outside of the directory."""
    numbers = [value, 1] if form in (5, 10) else [value]
    packed = struct.pack(order + TYPES.get(form, "I") * len(numbers) * count, *numbers * count)
    entries = [(271, 2, len(maker), maker), (ORIENTATION, form, count, packed)]
    start = 10 + 12 * len(entries) + 4
    directory, outside = struct.pack(order + "H", len(entries)), b""
    for tag, kind, many, data in entries:
        directory += struct.pack(order + "HHI", tag, kind, many)
        if len(data) > 4:
            directory += struct.pack(order + "I", start + len(outside))
            outside += data
        else:
            directory += data.ljust(4, b"\0")
    return (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8) + directory + bytes(4) + outside


def xmp(value, form='<rdf:Description tiff:Orientation="{}"/>'):
    return b"<x:xmpmeta>" + form.format(value).encode() + b"</x:xmpmeta>"


def app1(*contents):
    """A JPEG with these segments APP1 in front."""
    parts = [struct.pack(">BBH", 0xFF, APP1, len(content) + 2) + content for content in contents]
    whole = encoded("JPEG", 5, 9)
    return whole[:2] + b"".join(parts) + whole[2:]


def in_jpeg(tiff):
    """The same EXIF in every place of a JPEG, by its name."""
    head = b"Exif\0\0"
    whole = app1(head + tiff)
    size = 4 + len(head + tiff)
    return {
        "in front": whole,
        "behind the tables": inserted(whole[:2] + whole[2 + size :], 0xDA, whole[2 : 2 + size]),
        "in two segments": app1(head + tiff[:30], head + tiff[30:]),
        "behind XMP": app1(b"http://ns.adobe.com/xap/1.0/\0" + xmp(3), head + tiff),
        "named twice": app1(head + head + tiff),
        "behind EXIF of its own": app1(head + exif(0, 14), head + tiff),
    }


def chunk(name, content):
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def in_png(tiff):
    """The same EXIF in every place of a PNG, by its name."""
    whole = encoded("PNG", 5, 9)
    pixels = whole.index(b"IDAT") - 4
    start, rest, end = whole[:pixels], whole[pixels:-12], whole[-12:]
    name = b"Raw profile type exif\0"
    profiles = {}
    for kind, content in {"as it is": tiff, "with its name": b"Exif\0\0" + tiff}.items():
        text = b"\nexif\n%8d\n" % len(content) + b"\n".join(
            content.hex().encode()[at : at + 72] for at in range(0, 2 * len(content), 72)
        )
        profiles[f"tEXt, {kind}"] = chunk(b"tEXt", name + text + b"\n")
        profiles[f"zTXt, {kind}"] = chunk(b"zTXt", name + b"\0" + zlib.compress(text))
        profiles[f"iTXt, {kind}"] = chunk(b"iTXt", name + b"\0\0\0\0" + text)
        profiles[f"compressed iTXt, {kind}"] = chunk(b"iTXt", name + b"\1\0en\0\0" + zlib.compress(text))
    profiles["eXIf"] = chunk(b"eXIf", tiff)
    profiles["eXIf, then another one"] = chunk(b"eXIf", exif(3)) + chunk(b"eXIf", tiff)
    profiles["a text before eXIf"] = profiles["tEXt, as it is"] + chunk(b"eXIf", exif(8))
    files = {}
    for kind, each in profiles.items():
        files[f"{kind}, before the pixels"] = start + each + rest + end
        files[f"{kind}, behind them"] = start + rest + each + end
    files["in both places"] = start + profiles["eXIf"] + rest + chunk(b"eXIf", exif(2)) + end
    return files


def in_webp(tiff):
    return {name: encoded("WEBP", 5, 9, exif=data) for name, data in {"": tiff, "with its name": b"Exif\0\0" + tiff}.items()}


def in_avif(tiff):
    """PIL moves an orientation that it reads into the properties of the image."""
    return {"": encoded("AVIF", 16, 24, speed=10, exif=tiff)} if "AVIF" in PIL.Image.SAVE else {}


def in_xmp(value):
    """An orientation in XMP alone, or beside EXIF that has one or has none."""
    name = b"http://ns.adobe.com/xap/1.0/\0"
    element = xmp(value, "<tiff:Orientation>{}</tiff:Orientation>")
    whole = encoded("PNG", 5, 9)
    key = b"XML:com.adobe.xmp\0"
    files = {
        "JPEG": app1(name + xmp(value)),
        "JPEG, element": app1(name + element),
        "JPEG, the last of two": app1(name + xmp(5), name + xmp(value)),
        "JPEG, EXIF without": app1(b"Exif\0\0" + exif(0, 14), name + xmp(value)),
        "JPEG, EXIF with": app1(name + xmp(value), b"Exif\0\0" + exif(6)),
        "JPEG, EXIF with an invalid one": app1(name + xmp(value), b"Exif\0\0" + exif(9)),
        "JPEG, EXIF with one of another type": app1(name + xmp(value), b"Exif\0\0" + exif(6, 7)),
        "PNG": whole[:33] + chunk(b"iTXt", key + b"\0\0\0\0" + xmp(value)) + whole[33:],
        "PNG, compressed": whole[:33] + chunk(b"iTXt", key + b"\1\0\0\0" + zlib.compress(element)) + whole[33:],
        "PNG, text": whole[:33] + chunk(b"tEXt", key + xmp(value)) + whole[33:],
        "PNG, behind the pixels": whole[:-12] + chunk(b"iTXt", key + b"\0\0\0\0" + xmp(value)) + whole[-12:],
        "PNG with EXIF": whole[:33] + chunk(b"eXIf", exif(6)) + chunk(b"iTXt", key + b"\0\0\0\0" + xmp(value)) + whole[33:],
        "WebP": encoded("WEBP", 5, 9, xmp=xmp(value)),
        "WebP with EXIF": encoded("WEBP", 5, 9, xmp=xmp(value), exif=exif(8)),
        "TIFF": tiff(extratags=[(700, 1, len(xmp(value)), xmp(value), True)]),
    }
    if "AVIF" in PIL.Image.SAVE:
        files["AVIF"] = encoded("AVIF", 16, 24, speed=10, xmp=xmp(value))
    return files


def tiff(pixels=None, order="<", **options):
    """A TIFF of these pixels by tifffile, which writes what PIL does not."""
    file = io.BytesIO()
    pixels = noise(0, 5, 9, 3) if pixels is None else pixels
    options = {"photometric": "rgb", "metadata": None, **options}
    with tifffile.TiffWriter(file, byteorder=order, bigtiff=options.pop("bigtiff", False)) as writer:
        writer.write(np.ascontiguousarray(pixels), **options)
    return file.getvalue()


def in_tiff(value, form, order, names=None):
    """TIFFs with an orientation, which PIL decodes itself or by libtiff: these of ``TIFFS``, or all."""
    many = [value, 1] if form in (5, 10) else value
    tags = [(ORIENTATION, form, 1, many, True)]
    return {name: tiff(order=order, extratags=tags, **TIFFS[name]) for name in names or TIFFS}


TIFFS = {"": {}, "in strips": {"rowsperstrip": 2}, "compressed": {"compression": "zlib"}}
