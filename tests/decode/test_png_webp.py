"""PNGs by libspng and WebPs by libwebp, in a loop: PIL's pixels for the files that PIL accepts, PIL's errors for all others."""

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
from support.files.encoded import by_pil
from support.files.jpeg_windows import FILLED, GUARD, some_windows
from support.files.png_files import KINDS, chunk, damaged_png, damaged_webp, joined, png, png_chunks, rows, webp, webps

from gpuaug import DecodeError, DecodeStage, collate_encoded
from gpuaug.decode import c_calls
from gpuaug.decode.decoders import cpu, loops
from gpuaug.decode.formats import imagecodecs
from gpuaug.decode.formats import png as png_format
from gpuaug.decode.layout import IMAGE

pytestmark = [
    pytest.mark.skipif(
        not all(c_calls.addresses_in_module(*loops.LIBSPNG)),
        reason="imagecodecs is missing, or exports no functions of libspng",
    ),
    pytest.mark.skipif(not all(c_calls.addresses_in_module(*loops.LIBWEBP)), reason="PIL has linked libwebp statically"),
]

FAST_KINDS = [kind for kind in KINDS if kind[0] in (0, 2, 6)]
LOOP_KINDS = {3: [(2, 8), (6, 8)], 1: [(0, 8)]}
"""Number of channels of the batch: (colour type, bits) of the PNGs that the loop decodes."""
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


@functools.cache
def python_loop():
    """The loop without Numba."""
    return c_calls.in_python(loops._define_png_and_webp_loop)


@pytest.fixture(params=["Numba", "Python"])
def _loop(request, monkeypatch):
    if request.param == "Python":
        monkeypatch.setattr(loops, "png_and_webp_loop", python_loop)


both_loops = pytest.mark.usefixtures("_loop")


def decoded_windows(files, windows, channels=3, sizes=None):
    """Decode (h, w, C) windows of files in one call. Return (mask, images). Fails if memory between the images is written.

    ``sizes``: (height, width) to expect of each file. Default: the sizes in the headers.
    """
    batch = collate_encoded(files)
    table, windows = batch.headers.table, np.array(windows)
    lengths = windows[:, 2:].prod(1) * channels
    starts = GUARD + np.cumsum([0, *(lengths[:-1] + GUARD)])
    memory = np.full(starts[-1] + lengths[-1] + GUARD, FILLED, np.uint8)
    jobs = np.zeros(len(files), IMAGE)
    for name in ("format", "channels", "start", "length"):
        jobs[name] = table[name]
    jobs["top"], jobs["left"], jobs["window_height"], jobs["window_width"] = windows.T
    jobs["height"], jobs["width"] = (table["height"], table["width"]) if sizes is None else np.array(sizes).T
    mask = np.ones(len(files), np.bool_)
    loops.png_and_webp_loop()(batch.data.numpy(), memory, jobs, starts, channels, mask)
    images = []
    for start, length, (_, _, height, width) in zip(starts.tolist(), lengths.tolist(), windows.tolist(), strict=True):
        images.append(memory[start : start + length].reshape(height, width, channels).copy())
        memory[start : start + length] = FILLED
    assert (memory == FILLED).all()
    return mask.tolist(), images


def equal_windows_of_pil(cases, channels):
    """Assert that the images of the mask are PIL's. ``cases``: (file, window). Returns the mask."""
    files, windows = zip(*cases, strict=True)
    mask, images = decoded_windows(list(files), windows, channels)
    for file, (top, left, height, width), found, image in zip(files, windows, mask, images, strict=True):
        if found:
            whole = by_pil(file, mode="RGB" if channels == 3 else "L", upright=False)
            assert np.array_equal(image, whole[top : top + height, left : left + width])
    return mask


def decoded(file, channels=3):
    """One image (h, w, C) or ``None``, and the error."""
    try:
        (image,) = DecodeStage(backend="cpu", channels=channels)(collate_encoded([file]), "cpu")
    except DecodeError as error:
        return None, str(error)
    return image.permute(1, 2, 0).numpy(), ""


def decoded_by_pil(file, channels=3):
    with mock.patch.object(loops, "png_and_webp_loop", return_value=None):
        return decoded(file, channels)


def decoded_alike(file, channels=3):
    """The pixels of PIL, or ``None`` for PIL's refusal."""
    (image, problem), (wanted, refusal) = decoded(file, channels), decoded_by_pil(file, channels)
    assert problem == refusal
    assert np.array_equal(image, wanted)
    return image


def same(file, channels=3):
    """Whether PIL's pixels came out or its refusal."""
    return decoded_alike(file, channels) is not None


def decoded_without_pil(file, channels=3):
    with mock.patch.object(cpu, "_decode_with_pil", side_effect=AssertionError("PIL was asked")):
        image, problem = decoded(file, channels)
    assert not problem
    return image


@both_loops
@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("channels", [3, 1])
def test_windows_of_pngs_of_every_kind_have_pils_pixels_or_are_skipped(channels):
    cases, expected = [], []
    for kind, (height, width), interlaced in itertools.product(KINDS, [(1, 1), (5, 7), (13, 21)], (False, True)):
        file = png(*kind, height, width, seed=height, interlaced=interlaced)
        for window in [(0, 0, height, width), *some_windows(height, width, 3, seed=width)]:
            cases.append((file, window))
            expected.append(kind in LOOP_KINDS[channels])
    assert equal_windows_of_pil(cases, channels) == expected


@both_loops
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", webps())
def test_windows_of_webps_of_every_kind_have_pils_pixels_or_are_skipped(name, channels):
    file = webps()[name]
    height, width = by_pil(file, upright=False).shape[:2]
    windows = [(0, 0, height, width), *some_windows(height, width, 5, seed=3)]
    assert equal_windows_of_pil([(file, window) for window in windows], channels) == [channels == 3] * len(windows)


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
        image, problem = decoded(file, channels)
        assert not problem
        assert np.array_equal(image, by_pil(file, mode="RGB" if channels == 3 else "L"))


@pytest.mark.parametrize(
    ("channels", "kind"), [(channels, kind) for channels in (3, 1) for kind in LOOP_KINDS[channels]], ids=str
)
def test_pil_is_not_asked_for_most_pngs(kind, channels):
    for interlaced, parts in itertools.product((False, True), (1, 3)):
        decoded_without_pil(png(*kind, 13, 21, interlaced=interlaced, parts=parts), channels)
    for other in OTHER_CHUNKS[:-1]:
        decoded_without_pil(png(*kind, 13, 21, before=[other]), channels)
    decoded_without_pil(png(*kind, 13, 21, behind=[TEXT, (b"tIME", bytes(7))]) + b"more", channels)


@pytest.mark.parametrize(("colour", "depth"), FAST_KINDS)
def test_other_chunks_change_no_pixels(colour, depth):
    plain, _ = decoded(png(colour, depth, 13, 21))
    for name, content in OTHER_CHUNKS:
        for file in (
            png(colour, depth, 13, 21, before=[(name, content)]),
            png(colour, depth, 13, 21, behind=[(name, content)]),
        ):
            turned = plain[::-1].transpose(1, 0, 2) if name == b"eXIf" else plain
            assert np.array_equal(decoded_alike(file), turned)


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
    monkeypatch.setattr(png_format, "_MAX_SPNG_BYTES", 1000)
    assert not same(png(2, 8, 5, 7, behind=[(b"tEXt", b"key\0" + bytes(1001))]))


@pytest.mark.parametrize("name", [name for name in webps() if "metadata" not in name])
def test_pil_is_not_asked_for_webps(name):
    decoded_without_pil(webps()[name])


@pytest.mark.parametrize("quality", [1, 30, 75, 90, 100])
def test_lossy_webps_of_every_size_have_the_pixels_of_pil(quality):
    """Their chroma is interpolated, by other instructions at the ends of rows."""
    for width, height in itertools.product((1, 2, 15, 16, 17, 33, 66), (1, 2, 31)):
        assert same(webp(width, height, seed=width, quality=quality))


@both_loops
@pytest.mark.parametrize("file", [png(2, 8, 21, 33), webp(), webp(mode="RGBA", lossless=True)], ids=["PNG", "WebP", "lossless"])
def test_files_of_another_size_than_their_header_are_skipped(file):
    for height, width in ((20, 33), (21, 32), (22, 33), (21, 34), (33, 21)):
        mask, images = decoded_windows([file], [[0, 0, height, width]], sizes=[(height, width)])
        assert mask == [False]
        assert (images[0] == FILLED).all()


def test_windows_of_large_images_are_skipped(monkeypatch):
    monkeypatch.setattr(loops, "MAX_SCRATCH_PIXELS", 21 * 32)
    monkeypatch.setattr(loops, "png_and_webp_loop", lambda: python_loop.__wrapped__())
    files = [png(2, 8, 21, 33), png(2, 8, 21, 32), png(2, 8, 21, 33), webp(33, 21)]
    windows = [(0, 0, 20, 30), (0, 0, 20, 30), (0, 0, 21, 33), (0, 0, 20, 30)]
    assert decoded_windows(files, windows)[0] == [False, True, True, False]


@both_loops
@pytest.mark.parametrize("damaged", [damaged_png, damaged_webp])
@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 4000), marks=pytest.mark.slow)], ids=["some", "many"])
@pytest.mark.filterwarnings("ignore")  # of PIL, about what it finds in a file
@pytest.mark.timeout(1800)
def test_damaged_files_are_what_they_are_for_pil(damaged, seeds):
    decodable = [same(damaged(seed), channels=3 if seed % 3 else 1) for seed in seeds]
    assert 0.1 < np.mean(decodable) < 0.9


@pytest.mark.parametrize("module", [None, SimpleNamespace(), SimpleNamespace(SPNG=SimpleNamespace(available=False))])
def test_imagecodecs_may_be_missing_or_built_without_libspng(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecodecs", module)
    assert imagecodecs.imagecodecs.__wrapped__() is None


@pytest.mark.parametrize("module", [PIL._imaging, SimpleNamespace(__file__="no such file"), None])
@pytest.mark.parametrize("library", [loops.LIBWEBP, loops.LIBSPNG])
def test_a_library_may_be_out_of_reach(library, module, monkeypatch):
    monkeypatch.setitem(sys.modules, library[0], module)
    assert c_calls.addresses_in_module.__wrapped__(*library) == [0] * 5


@pytest.mark.parametrize("missing", ["LIBSPNG", "LIBWEBP"])
def test_loop_decodes_the_files_of_one_library_without_the_other(missing, monkeypatch):
    monkeypatch.setattr(loops, missing, ("no_module", getattr(loops, missing)[1]))
    monkeypatch.setattr(loops, "png_and_webp_loop", lambda: python_loop.__wrapped__())
    mask, _ = decoded_windows([png(2, 8, 30, 20), webp(20, 30)], [[0, 0, 30, 20]] * 2)
    assert mask == [missing != "LIBSPNG", missing != "LIBWEBP"]


@pytest.mark.parametrize("file", [png(2, 8, 300, 400), webp(400, 300)], ids=["PNG", "WebP"])
def test_files_are_decoded_side_by_side(file):
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
