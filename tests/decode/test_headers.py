"""What headers say, against PIL, and what is said of files that are broken."""

import io
import warnings

import numpy as np
import PIL.Image
import PIL.ImageFile
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.files import hostile_files
from support.files.encoded_files import (
    DHT,
    DQT,
    SOF0,
    SOS,
    changed,
    encoded,
    exif_segment,
    inserted,
    jpeg,
    oriented,
    png,
    segment,
    with_one_segment,
    with_tables_of_16_bits,
    without,
)

from gpuaug.core.encoded import HEADER, SAMPLE_TYPES, Format
from gpuaug.decode import limits
from gpuaug.decode.formats import pil
from gpuaug.decode.formats.header import Header
from gpuaug.decode.headers import UNKNOWN_FORMAT, parse

JPEG, OTHER_JPEG, OTHER = Format.JPEG, Format.OTHER_JPEG, Format.OTHER

WIDE = with_tables_of_16_bits(jpeg())

JPEGS = {
    "4:4:4": (jpeg(subsampling=0), JPEG, 5),
    "4:2:2": (jpeg(subsampling=1), JPEG, 9),
    "4:2:0": (jpeg(subsampling=2), JPEG, 10),
    "4:4:0": (changed(jpeg(subsampling=0), SOF0, 11, b"\x12"), JPEG, 6),
    "4:1:1": (changed(jpeg(subsampling=0), SOF0, 11, b"\x41"), JPEG, 17),
    "4:1:0": (changed(jpeg(subsampling=0), SOF0, 11, b"\x42"), JPEG, 18),
    "chroma of two sizes": (changed(jpeg(subsampling=2), SOF0, 14, b"\x21"), JPEG, 0),
    "quality 5": (jpeg(quality=5), JPEG, 10),
    "quality 100": (jpeg(quality=100, optimize=True), JPEG, 10),
    "restart markers": (jpeg(restart_marker_blocks=1), JPEG, 10),
    "large": (jpeg(1100, 901), JPEG, 10),
    "one pixel": (jpeg(1, 1), JPEG, 10),
    "grey": (jpeg(mode="L"), JPEG, 5),
    "grey with factors": (changed(jpeg(mode="L"), SOF0, 11, b"\x22"), OTHER_JPEG, 5),
    "grey with restart markers": (jpeg(mode="L", restart_marker_rows=1), OTHER_JPEG, 5),
    "grey with an interval of 0": (inserted(jpeg(mode="L"), SOF0, b"\xff\xdd\0\4\0\0"), JPEG, 5),
    "quantization tables of 16 bits": (with_tables_of_16_bits(jpeg()), OTHER_JPEG, 10),
    "a quantization table once more in 16 bits": (
        inserted(jpeg(), SOS, WIDE[segment(WIDE, DQT) : segment(WIDE, SOS)]),
        OTHER_JPEG,
        10,
    ),
    "quantization tables in one segment": (with_one_segment(jpeg(), DQT), JPEG, 10),
    "Huffman tables in one segment": (with_one_segment(jpeg(), DHT), JPEG, 10),
    "no quantization table": (without(jpeg(), DQT), OTHER_JPEG, 10),
    "no Huffman table": (without(jpeg(), DHT), OTHER_JPEG, 10),
    "another Huffman table": (changed(jpeg(), SOS, 6, b"\x22"), OTHER_JPEG, 10),
    "components of the scan in another order": (changed(jpeg(), SOS, 5, b"\2\x11\1\0"), OTHER_JPEG, 10),
    "a scan of some coefficients": (changed(jpeg(), SOS, 12, b"\x0a"), OTHER_JPEG, 10),
    "a frame longer than its components": (
        changed(inserted(jpeg(), DHT, b"\0\0\0"), SOF0, 2, b"\0\x14"),
        OTHER_JPEG,
        10,
    ),
    "with a profile of many segments": (jpeg(icc_profile=bytes(200_000)), JPEG, 10),
    "with a comment": (jpeg(comment=b"\xff\xd9\xff\xda\xff\xc0"), JPEG, 10),
    "more behind its end": (jpeg() + bytes(100), JPEG, 10),
    "padded markers": (inserted(jpeg(), SOF0, b"\xff\xff"), JPEG, 10),
    "progressive": (jpeg(progressive=True), Format.PROGRESSIVE_JPEG, 10),
    "progressive grey": (jpeg(mode="L", progressive=True), Format.PROGRESSIVE_JPEG, 5),
    "CMYK": (jpeg(mode="CMYK"), OTHER_JPEG, 0),
    "RGB": (jpeg(keep_rgb=True), OTHER_JPEG, 5),
    "RGB by its components": (
        changed(changed(changed(jpeg(subsampling=0), SOF0, 10, b"R"), SOF0, 13, b"G"), SOF0, 16, b"B"),
        OTHER_JPEG,
        5,
    ),
    "YCbCr of Adobe's": (inserted(jpeg(), SOF0, b"\xff\xee\x00\x0eAdobe\0\x64\0\0\0\0\x01"), JPEG, 10),
    "RGB by Adobe's word": (inserted(jpeg(), SOF0, b"\xff\xee\x00\x0eAdobe\0\x64\0\0\0\0\x00"), OTHER_JPEG, 10),
    "extended": (changed(jpeg(), SOF0, 1, b"\xc1"), OTHER_JPEG, 10),
    "arithmetic": (changed(jpeg(), SOF0, 1, b"\xc9"), OTHER_JPEG, 10),
    "progressive arithmetic": (changed(jpeg(), SOF0, 1, b"\xca"), OTHER_JPEG, 10),
    "lossless": (changed(jpeg(), SOF0, 1, b"\xc3"), Format.LOSSLESS_JPEG, 10),
    "in several scans": (changed(jpeg(), SOS, 4, b"\x01"), OTHER_JPEG, 10),
    "bytes between segments": (inserted(jpeg(), SOF0, b"\x00\x01\xff\x00"), OTHER_JPEG, 10),
    **{f"orientation {value}": (oriented(value), JPEG, 10) for value in range(1, 9)},
    **{f"orientation {value}, big end first": (oriented(value, ">"), JPEG, 10) for value in range(1, 9)},
}

OTHERS = {
    **{f"PNG {mode}": encoded("PNG", mode=mode) for mode in ("RGB", "L", "1", "P", "RGBA", "LA")},
    "PNG with a transparent colour": encoded("PNG", transparency=(1, 2, 3)),
    **{f"WebP {mode}": encoded("WEBP", mode=mode) for mode in ("RGB", "RGBA")},
    "lossless WebP": encoded("WEBP", lossless=True),
    "GIF": encoded("GIF", mode="P"),
    **{f"BMP {mode}": encoded("BMP", mode=mode) for mode in ("RGB", "L", "1", "P")},
    **{f"TIFF {mode}": encoded("TIFF", mode=mode) for mode in ("RGB", "L", "1", "CMYK")},
    "TIFF by LZW": encoded("TIFF", compression="tiff_lzw"),
    "PPM": encoded("PPM"),
    "PGM": encoded("PPM", mode="L"),
    **{f"{kind}, orientation {value}": oriented(value, kind=kind) for kind in ("PNG", "WEBP") for value in (1, 3, 6)},
}


def opened(data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PIL.Image.open(io.BytesIO(data))


@pytest.mark.parametrize(("data", "kind", "sampling"), JPEGS.values(), ids=JPEGS.keys())
def test_jpeg_header(data, kind, sampling, monkeypatch):
    image = opened(data)
    monkeypatch.setattr(pil, "open_image", None)  # PIL is not asked
    orientation = image.getexif().get(0x0112, 1)
    bands = len(image.getbands())
    want = Header(image.height, image.width, bands, 3 if bands == 4 else bands, kind, sampling, orientation)
    want = want._replace(label_max=255 if bands == 1 else 0)
    for held in (data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
        assert parse(held) == want


@pytest.mark.parametrize("data", OTHERS.values(), ids=OTHERS.keys())
def test_header_of_other_format(data, monkeypatch):
    image = opened(data)
    bands = len(image.getbands())
    stored = 3 if image.mode in ("P", "CMYK") else bands
    kind = Format.WEBP if image.format == "WEBP" else OTHER
    if image.format == "PNG" and image.mode in ("L", "RGB", "RGBA"):
        kind = Format.PNG
    want = Header(image.height, image.width, bands, stored, kind, 0, image.getexif().get(0x0112, 1))
    want = want._replace(label_max=1 if image.mode == "1" else 255 if bands < 3 else 0)
    monkeypatch.setattr(PIL.ImageFile.ImageFile, "load", None)  # it is not decoded
    assert parse(data) == want


def test_a_format_that_pil_may_lack():
    for kind in ("AVIF", "JPEG2000"):
        if kind in PIL.Image.SAVE:
            header = parse(encoded(kind, mode="RGB"))
            assert header[:4] == (13, 21, 3, OTHER), kind
        else:
            assert parse(b"\xff\x4f\xff\x51" + bytes(30)).problem


def test_orientation_of_the_first_exif_segment_that_has_one():
    first, second = oriented(3), oriented(6)
    at = segment(second, 0xE1)
    assert parse(inserted(first, 0xDB, second[at : segment(second, 0xDB)])).orientation == 3
    photoshop = b"\xff\xe1\x00\x10http://ns.ad\0\0"
    assert parse(first[:2] + photoshop + first[2:]).orientation == 3


ENTRY = b"\x12\x01\x03\x00\x01\x00\x00\x00\x06\x00\x00\x00"
"""Orientation 6, little end first."""


@pytest.mark.parametrize(
    ("tiff", "orientation"),
    [
        (b"II*\0\x08\0\0\0\x01\0" + ENTRY, 6),
        (b"II*\0\x08\0\0\0\x02\0" + bytes(3) + ENTRY[:9] + ENTRY, 6),  # the same bytes across two entries
        (b"II*\0\x08\0\0\0\x01\0" + bytes(3) + ENTRY[:9], 1),
        (b"II*\0\x08\0\0\0\x00\0" + ENTRY, 1),
        (b"II*\0\x08\0\0\0\xff\xff" + ENTRY, 1),
        (b"II*\0\x08\0\0\0\x01\0" + ENTRY[:8] + b"\x00\x00", 1),
        (b"II*\0\x08\0\0\0\x01\0" + ENTRY[:8] + b"\x09\x00", 1),
        (b"II*\0\x08\0\0\0\x01\0" + ENTRY[:8] + b"\x06", 1),
        (b"II*\0\xff\xff\xff\xff\x01\0" + ENTRY, 1),
        (b"II*\0\x08\0", 1),
        (b"MM*\0\x08\0\0\0\x01\0" + ENTRY, 1),
        (b"", 1),
    ],
)
def test_broken_exif_is_orientation_1(tiff, orientation):
    header = parse(exif_segment(tiff))
    assert (header.format, header.orientation, header.problem) == (JPEG, orientation, "")


FINE = jpeg()
SCAN = segment(FINE, SOS)

BROKEN = {
    "empty": (b"", "it is empty"),
    "text": (b"no image at all", UNKNOWN_FORMAT),
    "zeros": (bytes(1000), UNKNOWN_FORMAT),
    "a format that runs a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", UNKNOWN_FORMAT),
    "an end marker in its EXIF only": (exif_segment(b"\xff\xd9")[:-2], "it ends before its end marker"),
    "ended before its scan": (FINE[:SCAN] + b"\xff\xd9", "it ends within its header"),
    "no frame": (FINE[: segment(FINE, SOF0)] + FINE[segment(FINE, DHT) :], "its header is broken"),
    "thousands of markers": (FINE[:2] + b"\xff\x01" * 100_000 + FINE[2:], "its header is broken"),
    "bytes in its place": (b"\xff\xd8\xff" + bytes(1_000_000), "its header is broken"),
    "two frames": (
        inserted(FINE, DHT, FINE[segment(FINE, SOF0) : segment(FINE, DHT)]),
        "it has several frames",
    ),
    **{
        f"SOF{number}": (changed(FINE, SOF0, 1, bytes([SOF0 + number])), f"it is coded as SOF{number}, which no decoder reads")
        for number in (5, 6, 7, 11, 13, 14, 15)
    },
    "no height": (changed(FINE, SOF0, 5, b"\0\0"), "its size is 21x0"),
    "no width": (changed(FINE, SOF0, 7, b"\0\0"), "its size is 0x13"),
    "no component": (changed(FINE, SOF0, 9, b"\0"), "its size is 21x13"),
    "12 bits": (changed(FINE, SOF0, 4, b"\x0c"), "it has 12 bits per channel"),
    "16 bits of a PGM": (b"P5\n1 1\n65535\n\0\0", "it has 32 bits per channel"),
    "a PFM": (b"Pf\n1 1\n-1.0\n\0\0\0\0", "it has 32 bits per channel"),
    "32 bits": (encoded("TIFF", mode="I"), "it has 32 bits per channel"),
    "floating": (
        encoded("TIFF", mode="F"),
        "its values are float32, and files are decoded to 8 or 16 bits: read it in the dataset, for example with "
        "tifffile.imread, and return a tensor",
    ),
    "more scans than decoders may read": (
        hostile_files.jpegs(100)["progressive scans"],
        "it has more than 100 scans, which is the limit",
    ),
}


DEEP = {
    "a PNG": (png(depth=16), 13, 21, 3),
    "a grey PNG": (png(depth=16, colour=0), 13, 21, 1),
    "a PNG with alpha": (png(depth=16, colour=6), 13, 21, 4),
    "a TIFF": (encoded("TIFF").replace(b"\x08\0\x08\0\x08\0", b"\x10\0\x10\0\x10\0"), 13, 21, 3),
    "a grey TIFF": (encoded("TIFF", mode="I;16"), 13, 21, 1),
}


@pytest.mark.parametrize(("data", "height", "width", "channels"), DEEP.values(), ids=DEEP.keys())
def test_header_of_16_bits(data, height, width, channels):
    label_max = 255 if channels == 1 else 0
    assert parse(data) == Header(height, width, channels, channels, Format.DEEP, 0, 1, SAMPLE_TYPES.index("uint16"), label_max)


@pytest.mark.parametrize(("data", "problem"), BROKEN.values(), ids=BROKEN.keys())
def test_problem(data, problem):
    assert parse(data) == Header(problem=problem)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_problem_of_a_cut_file_of_another_format(kind):
    start = encoded(kind, mode="P" if kind == "GIF" else "RGB")[:16]
    problem = parse(start).problem
    own = {"WEBP": "it ends within its header", "PNG": "it ends within its header", "TIFF": "its header is broken"}
    assert problem == own[kind] if kind in own else problem.startswith("PIL cannot read its header: ")


def test_chunks_of_pixels_are_limited(monkeypatch):
    monkeypatch.setattr(limits, "MAX_CHUNKS", 100)
    files = [hostile_files.pngs(101)["pixels in front"], hostile_files.webps(101)["frames"]]
    files.append(hostile_files.gifs(101)["application data"])
    assert {parse(data).problem for data in files} == {"it has more than 100 chunks, which is the limit"}


@pytest.mark.parametrize(
    ("data", "is_limited"),
    [
        (hostile_files.bmps(1)["pairs"], True),
        (hostile_files.bmps(1)["large and empty"], False),
        *((b"P%c\n70 70\n255\n" % kind, kind in b"123") for kind in b"123456"),
        (b"P6\n70 70\n254\n", True),
        (b"P6\n8 8\n100\n" + bytes(4000), True),
        (b"P6\n8 8\n255\n" + bytes(4000), False),
    ],
)
def test_files_that_pil_decodes_in_python_are_limited(data, is_limited, monkeypatch):
    monkeypatch.setattr(pil, "MAX_PYTHON_BYTES", 4000)
    problem = parse(data).problem
    assert ("more than 4000 bytes or pixels" in problem) == is_limited
    assert is_limited or not problem


def test_a_long_header_of_netpbm_is_not_read_byte_by_byte(monkeypatch):
    monkeypatch.setattr(pil, "MAX_TEXT_BYTES", 4000)
    comment = b"P6\n#" + b"a" * 4000
    assert "EOF while reading header" in parse(comment + b"\n1 1\n255\n" + bytes(3)).problem


def test_problem_is_one_line(monkeypatch):
    def fail(data, names):
        raise RuntimeError("one\ntwo")

    monkeypatch.setattr(pil, "open_image", fail)
    assert parse(b"GIF8").problem == "PIL cannot read its header: one"


def test_jpeg_cut_anywhere_has_a_problem():
    for length in range(1, len(FINE)):
        header = parse(FINE[:length])
        text = UNKNOWN_FORMAT if length < 3 else f"it ends {'before' if length > SCAN + 3 else 'within'} its"
        assert header.problem.startswith(text), length
        assert header.format is Format.UNREADABLE


def test_large_images_are_neither_decoded_nor_warned_of(monkeypatch):
    monkeypatch.setattr(PIL.ImageFile.ImageFile, "load", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for side in (12_000, 60_000):  # where PIL warns, and where it refuses
            for data in (png(side, side), changed(FINE, SOF0, 5, side.to_bytes(2, "big") * 2)):
                header = parse(data)
                assert (header.height, header.width, header.problem) == (side, side, "")
        for side in (2**31 - 1, 2**31):
            for height, width in ((side, 1), (1, side)):
                problem = "" if side < 2**31 else f"its size is {width}x{height}"
                assert parse(png(height, width)).problem == problem


FILES = [data for data, *_ in JPEGS.values() if len(data) < 10_000] + list(OTHERS.values())


@st.composite
def damaged(draw):
    data = bytearray(draw(st.sampled_from(FILES)))
    for at, value in draw(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=8)):
        data[at % len(data)] = value
    at = draw(st.integers(0, len(data)))
    data[at:at] = draw(st.binary(max_size=4))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@given(damaged() | st.binary(max_size=200) | st.binary(max_size=200).map(lambda data: b"\xff\xd8\xff" + data))
@settings(max_examples=200)
@pytest.mark.filterwarnings("ignore")
def test_any_bytes_have_a_header(data):
    header = parse(data)
    assert (header.format == Format.UNREADABLE) == bool(header.problem)
    assert "\n" not in header.problem
    row = np.array([(0, len(data), *header[:-1])], HEADER)[0]
    assert row.tolist()[2:] == header[:-1]
    if not header.problem:
        assert min(header.height, header.width, header.channels) > 0
        assert 1 <= header.orientation <= 8
