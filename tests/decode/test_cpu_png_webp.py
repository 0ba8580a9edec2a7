"""PNGs by imagecodecs and WebPs by libwebp: PIL's pixels for the files that PIL accepts, PIL's errors for all others."""

import ctypes
import functools
import itertools
import struct
import sys
import threading
import zlib
from types import SimpleNamespace
from unittest import mock

import numpy as np
import PIL._imaging
import pytest
from support.files.encoded import by_pil, room_of
from support.files.png_files import KINDS, chunk, damaged_png, damaged_webp, joined, png, png_chunks, rows, webp, webps

from gpuaug import collate_encoded
from gpuaug.decode.decoders import cpu, libspng, libwebp
from gpuaug.decode.layout import Layout, Options

GUARD = 4096
"""Bytes before and behind an image's memory, which decoders must leave as they are."""

FAST_KINDS = [kind for kind in KINDS if kind[0] in (0, 2, 6)]
SIZES = [(1, 1), (1, 9), (9, 1), (2, 3), (5, 7), (13, 21), (16, 40)]
ORIENTED = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0"
TEXT = (b"tEXt", b"date:create\x002026-01-01")
OTHER_CHUNKS = [
    (b"gAMA", struct.pack(">I", 100000)),
    (b"gAMA", struct.pack(">I", 22000)),
    (b"sRGB", b"\0"),
    (b"iCCP", b"profile\0\0" + zlib.compress(b"no profile")),
    (b"cHRM", struct.pack(">8I", *[31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000])),
    (b"pHYs", struct.pack(">IIB", 2835, 2835, 1)),
    (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0<x/>"),
    TEXT,
    (b"eXIf", ORIENTED),
]


def library(name):
    """Skip a test where this library is missing."""
    if name == "imagecodecs":
        pytest.importorskip(name)
    elif sys.platform == "win32":
        pytest.skip("PIL has libwebp inside of its own module")


def decoded(file, channels=3):
    """One image (h, w, C) or ``None``, and why it cannot be decoded."""
    batch = collate_encoded([file])
    if batch.headers.problems:
        return None, batch.headers.problems[0]
    layout = Layout(batch.headers, Options(channels, None, True, 10**9), [cpu.Cpu()])
    memory = np.full(layout.length + 2 * GUARD, 0xA5, np.uint8)
    room = room_of(layout, memory[GUARD : GUARD + layout.length], 0, 0)
    problem = cpu.decode(batch.file(0), layout, layout.infos[0], room)
    assert (memory[:GUARD] == 0xA5).all()
    assert (memory[GUARD + layout.length :] == 0xA5).all()
    return (None if problem else room), problem


def decoded_by_pil(file, channels=3):
    with mock.patch.object(cpu, "imagecodecs", return_value=None), mock.patch.object(libwebp, "library", return_value=None):
        return decoded(file, channels)


def same(file, channels=3):
    """Whether PIL's pixels came out or its refusal."""
    (image, problem), (wanted, refusal) = decoded(file, channels), decoded_by_pil(file, channels)
    assert problem == refusal
    assert np.array_equal(image, wanted)
    return not problem


def decoded_without_pil(file, channels=3):
    with mock.patch.object(cpu, "_decode_with_pil", side_effect=AssertionError("PIL was asked")):
        image, problem = decoded(file, channels)
    assert not problem
    return image


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize(("colour", "depth"), KINDS)
def test_pngs_of_every_kind_have_the_pixels_of_pil(colour, depth):
    values = struct.pack(">HHH", 3, 5, 7)[: {0: 2, 2: 6}.get(colour, 2)]
    befores = [[]] if colour in (4, 6) else [[], [(b"tRNS", values)]]
    befores += [[(b"PLTE", bytes(range(9)))]] if (colour, depth) == (3, 8) else []  # which is short
    cases = itertools.product(enumerate(SIZES), (False, True), enumerate(befores))
    for seed, ((row, size), interlaced, (column, before)) in enumerate(cases):
        channels = (3, 1)[(row + interlaced + column) % 2]
        file = png(colour, depth, *size, seed, interlaced=interlaced, before=before)
        assert same(file, channels)
        assert np.array_equal(decoded(file, channels)[0], by_pil(file, mode="RGB" if channels == 3 else "L"))


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize(("colour", "depth"), FAST_KINDS)
def test_pil_is_not_asked_for_most_pngs(colour, depth, channels):
    library("imagecodecs")
    for interlaced, parts in itertools.product((False, True), (1, 3)):
        decoded_without_pil(png(colour, depth, 13, 21, interlaced=interlaced, parts=parts), channels)
    for other in OTHER_CHUNKS:
        decoded_without_pil(png(colour, depth, 13, 21, before=[other]), channels)
    decoded_without_pil(png(colour, depth, 13, 21, behind=[TEXT, (b"tIME", bytes(7)), (b"eXIf", ORIENTED)]) + b"more", channels)


@pytest.mark.parametrize(("colour", "depth"), FAST_KINDS)
def test_other_chunks_change_no_pixels(colour, depth):
    plain, _ = decoded(png(colour, depth, 13, 21))
    for name, content in OTHER_CHUNKS:
        for file in (
            png(colour, depth, 13, 21, before=[(name, content)]),
            png(colour, depth, 13, 21, behind=[(name, content)]),
        ):
            assert same(file)
            turned = plain[::-1].transpose(1, 0, 2) if name == b"eXIf" else plain
            assert np.array_equal(decoded(file)[0], turned)


RAW = rows(2, 8, 5, 7, 0, interlaced=False)
STREAM = zlib.compress(RAW)
WRONG_SUM = STREAM[:-1] + bytes([STREAM[-1] ^ 1])
CHUNKS = png_chunks(2, 8, 5, 7)
PARTLY = {
    "other checksum of the stream": {"data": WRONG_SUM},
    "no checksum of the stream": {"data": STREAM[:-4]},
    "data behind the stream": {"data": STREAM + b"more"},
    "half the stream": {"data": STREAM[: len(STREAM) // 2]},
    "no data": {"data": b""},
    "empty chunks": {"parts": 400},
    "no such filter": {"data": zlib.compress(b"\5" + RAW[1:])},
    "a row too few": {"data": zlib.compress(RAW[:-22])},
    "a byte too few": {"data": zlib.compress(RAW[:-1])},
    "a row too many": {"data": zlib.compress(RAW + RAW[:22])},
    "no zlib": {"data": b"\x18" + STREAM[1:]},
    "with a dictionary": {"data": b"\x78\xbb\0\0\0\1" + STREAM[2:]},
    "text behind that PIL refuses": {"behind": [(b"zTXt", b"key\0\0" + zlib.compress(bytes(2**21)))]},
    "broken text behind": {"behind": [(b"iTXt", b"key")]},
    "a broken profile behind": {"behind": [(b"iCCP", b"name\0\1")]},
    "animated": {"before": [(b"acTL", struct.pack(">II", 1, 0)), (b"fcTL", struct.pack(">5I2H2B", 0, 7, 5, 0, 0, 1, 1, 0, 0))]},
    "animated but for its first image": {"before": [(b"acTL", struct.pack(">II", 2, 0))]},
    "pixels in a frame beyond the image": {"before": [(b"fcTL", struct.pack(">5I2H2B", 0, 90, 90, 0, 0, 1, 1, 0, 0))]},
    "pixels in an empty frame": {"before": [(b"fcTL", bytes(26))]},
    "pixels in a part of the image": {"before": [(b"fcTL", struct.pack(">5I2H2B", 0, 3, 3, 1, 1, 1, 1, 0, 0))]},
    "pixels of another chunk": {"behind": [(b"DDAT", b"more")], "data": STREAM[:-30]},
    "a palette of no use": {"before": [(b"PLTE", bytes(6))]},
}
DAMAGED = {name: png(2, 8, 5, 7, **options) for name, options in PARTLY.items()} | {
    "data in two places": joined([*CHUNKS[:2], TEXT, *CHUNKS[2:]]),
    "two headers": joined([CHUNKS[0], CHUNKS[0], *CHUNKS[1:]]),
    "another header": joined([CHUNKS[0], (b"IHDR", struct.pack(">IIBBBBB", 7, 4, 8, 2, 0, 0, 0)), *CHUNKS[1:]]),
    "no end": joined(CHUNKS[:-1]),
    "half an end": joined(CHUNKS)[:-6],
    "no checksum of the end": joined(CHUNKS)[:-4],
    "other checksum of data": joined(CHUNKS[:1]) + chunk(*CHUNKS[1])[:-1] + b"\0" + joined(CHUNKS[2:])[8:],
    "a chunk behind that is cut off": joined(CHUNKS[:-1]) + chunk(*TEXT)[:-9],
    "a chunk behind that is too long": joined(CHUNKS[:-1]) + b"\xff\xff\xff\xfftEXt" + chunk(*CHUNKS[-1]),
    "many chunks": png(2, 8, 5, 7, before=[(b"abCd", b"")] * 5000),
}


@pytest.mark.parametrize("file", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("channels", [3, 1])
def test_a_damaged_png_is_what_it_is_for_pil(file, channels):
    same(file, channels)


def test_text_behind_the_pixels_counts_with_that_before_them(monkeypatch):
    """PIL refuses more than so much of it together."""
    from PIL import PngImagePlugin

    monkeypatch.setattr(PngImagePlugin, "MAX_TEXT_MEMORY", 1000)
    before = [(b"zTXt", b"key\0\0" + zlib.compress(bytes(995)))]
    assert same(png(2, 8, 5, 7, before=before))
    assert not same(png(2, 8, 5, 7, before=before, behind=[TEXT]))
    monkeypatch.setattr(libspng, "MAX_BYTES", 1000)
    assert not same(png(2, 8, 5, 7, behind=[(b"tEXt", b"key\0" + bytes(1001))]))


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", webps())
def test_webps_of_every_kind_have_the_pixels_of_pil(name, channels):
    file = webps()[name]
    assert same(file, channels)
    assert np.array_equal(decoded(file, channels)[0], by_pil(file, mode="RGB" if channels == 3 else "L"))


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", webps())
def test_pil_is_not_asked_for_webps(name, channels):
    library("libwebp")
    decoded_without_pil(webps()[name], channels)


@pytest.mark.parametrize("quality", [1, 30, 75, 90, 100])
def test_lossy_webps_of_every_size_have_the_pixels_of_pil(quality):
    """Their chroma is interpolated, by other instructions at the ends of rows."""
    for width, height in itertools.product((1, 2, 15, 16, 17, 33, 66), (1, 2, 31)):
        assert same(webp(width, height, seed=width, quality=quality))


@pytest.mark.parametrize("file", [webp(), webp(mode="RGBA", lossless=True)], ids=["lossy", "lossless"])
def test_a_webp_of_another_size_than_its_header_is_given_no_memory(file):
    library("libwebp")
    for height, width in ((20, 33), (21, 32), (22, 33), (21, 34)):
        buffer = np.full((height, width, 3), 0xA5, np.uint8)
        assert not libwebp.decode(np.frombuffer(file, np.uint8), buffer)
        assert (buffer == 0xA5).all()


@pytest.mark.parametrize("damaged", [damaged_png, damaged_webp])
@pytest.mark.parametrize("seeds", [range(120), pytest.param(range(120, 4000), marks=pytest.mark.slow)], ids=["some", "many"])
@pytest.mark.filterwarnings("ignore")  # of PIL, about what it finds in a file
@pytest.mark.timeout(1800)
def test_damaged_files_are_what_they_are_for_pil(damaged, seeds):
    decodable = [same(damaged(seed), channels=3 if seed % 3 else 1) for seed in seeds]
    assert 0.1 < np.mean(decodable) < 0.9


@pytest.mark.parametrize("module", [None, SimpleNamespace(), SimpleNamespace(SPNG=SimpleNamespace(available=False))])
def test_imagecodecs_may_be_missing_or_built_without_libspng(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecodecs", module)
    assert cpu.imagecodecs.__wrapped__() is None


@pytest.mark.parametrize("path", [PIL._imaging.__file__, "no such file"])
def test_libwebp_may_be_out_of_reach(path, monkeypatch):
    monkeypatch.setattr(PIL, "_webp", SimpleNamespace(__file__=path))
    assert libwebp.library.__wrapped__() is None


def test_libwebp_decodes_without_the_lock_of_the_interpreter():
    library("libwebp")
    assert not libwebp.library().decode_rgb._flags_ & ctypes._FUNCFLAG_PYTHONAPI  # a function of ctypes.PyDLL has this flag


@pytest.mark.parametrize("file", [png(2, 8, 300, 400), webp(400, 300)], ids=["PNG", "WebP"])
def test_files_are_decoded_side_by_side(file):
    library("imagecodecs")
    library("libwebp")
    wanted, _ = decoded_by_pil(file)
    made = [None] * 16

    def decode(index):
        made[index], _ = decoded(file)

    threads = [threading.Thread(target=functools.partial(decode, index)) for index in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(image, wanted) for image in made)
