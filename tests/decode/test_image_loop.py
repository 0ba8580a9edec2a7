"""The loop over PNGs and WebPs that Numba compiles: PIL's pixels or no image, without the interpreter's lock."""

import itertools
from unittest import mock

import numpy as np
import pytest
from support.files.encoded import by_pil, encoded
from support.files.jpeg_windows import some_windows
from support.files.png_files import KINDS, damaged_png, damaged_webp, png, webp, webps
from torchvision.transforms import v2

from gpuaug import DecodeStage, StreamedLoader, collate_encoded, fuse
from gpuaug.core.encoded import Format
from gpuaug.decode.decoders import image_loop, libspng, libwebp

GUARD, FILLED = 64, 0xA5
"""Bytes between the images, which the loop must leave as they are, and their value."""


@pytest.fixture
def _compiled_loop():
    if image_loop.compiled() is None:  # asked here, because to compile takes seconds
        pytest.skip("no Numba, or another machine")


NUMBA = pytest.mark.usefixtures("_compiled_loop")
SPNG = pytest.mark.skipif(libspng.functions() is None, reason="imagecodecs is missing, or exports no functions of libspng")
WEBP = pytest.mark.skipif(libwebp.library() is None, reason="PIL has linked libwebp statically")

LOOP_KINDS = {3: [(2, 8), (6, 8)], 1: [(0, 8)]}
"""Number of channels of the batch: (colour type, bits) of the PNGs that the loop decodes."""


def decoded_by_loop(files, windows, channels=3):
    """Decode (h, w, C) windows of files in one call. Return (mask, images). Fails if memory between the images is written."""
    batch = collate_encoded(files)
    sizes = windows[:, 2:].prod(1) * channels
    starts = GUARD + np.cumsum([0, *(sizes[:-1] + GUARD)])
    memory = np.full(starts[-1] + sizes[-1] + GUARD, FILLED, np.uint8)
    loop = image_loop.ImageLoop(
        image_loop.compiled(),
        batch.data.numpy(),
        memory.ctypes.data,
        channels,
        batch.headers.table,
        starts,
        windows,
        batch.headers.table["format"] == Format.OTHER,
    )
    mask = loop.decode(range(len(files)))
    images = []
    for start, size, (_, _, height, width) in zip(starts.tolist(), sizes.tolist(), windows.tolist(), strict=True):
        images.append(memory[start : start + size].reshape(height, width, channels).copy())
        memory[start : start + size] = FILLED
    assert (memory == FILLED).all()
    return mask.tolist(), images


def equal_windows_of_pil(cases, channels):
    """Assert that the images of the mask are PIL's. ``cases``: (file, window). Returns the mask."""
    files, windows = zip(*cases, strict=True)
    mask, images = decoded_by_loop(list(files), np.array(windows), channels)
    for file, (top, left, height, width), found, image in zip(files, windows, mask, images, strict=True):
        if found:
            whole = by_pil(file, mode="RGB" if channels == 3 else "L", upright=False)
            assert np.array_equal(image, whole[top : top + height, left : left + width])
    return mask


@NUMBA
@SPNG
@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("channels", [3, 1])
def test_pngs_of_every_kind_have_pils_pixels_or_are_skipped(channels):
    cases, expected = [], []
    for kind, (height, width), interlaced in itertools.product(KINDS, [(1, 1), (5, 7), (13, 21)], (False, True)):
        file = png(*kind, height, width, seed=height, interlaced=interlaced)
        for window in [(0, 0, height, width), *some_windows(height, width, 3, seed=width)]:
            cases.append((file, window))
            expected.append(kind in LOOP_KINDS[channels])
    assert equal_windows_of_pil(cases, channels) == expected


@NUMBA
@WEBP
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", webps())
def test_webps_of_every_kind_have_pils_pixels_or_are_skipped(name, channels):
    file = webps()[name]
    height, width = by_pil(file, upright=False).shape[:2]
    windows = [(0, 0, height, width), *some_windows(height, width, 5, seed=3)]
    assert equal_windows_of_pil([(file, window) for window in windows], channels) == [channels == 3] * len(windows)


@NUMBA
@SPNG
@WEBP
@pytest.mark.filterwarnings("ignore")  # of PIL, about what it finds in a file
@pytest.mark.parametrize("damaged", [damaged_png, damaged_webp])
@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 3000), marks=pytest.mark.slow)], ids=["some", "many"])
def test_damaged_files_have_pils_pixels_or_are_skipped(damaged, seeds):
    files = [file for seed in seeds if not collate_encoded([file := damaged(seed)]).headers.problems]
    sizes = collate_encoded(files).headers.table[["height", "width"]].tolist()
    mask = equal_windows_of_pil([(file, (0, 0, *size)) for file, size in zip(files, sizes, strict=True)], 3)
    assert 0.05 < np.mean(mask) < 0.95


@NUMBA
@SPNG
@WEBP
@pytest.mark.parametrize("file", [png(2, 8, 21, 33), webp(), webp(mode="RGBA", lossless=True)], ids=["PNG", "WebP", "lossless"])
def test_files_of_another_size_than_their_header_are_skipped(file):
    for height, width in ((20, 33), (21, 32), (22, 33), (21, 34), (33, 21)):
        batch = collate_encoded([file])
        batch.headers.table["height"], batch.headers.table["width"] = height, width
        with mock.patch(f"{__name__}.collate_encoded", return_value=batch):
            mask, images = decoded_by_loop([file], np.array([[0, 0, height, width]]))
        assert mask == [False]
        assert (images[0] == FILLED).all()


@NUMBA
def test_other_and_short_files_are_skipped():
    files = [encoded(20, 30, "GIF"), encoded(20, 30, "BMP"), encoded(20, 30, "TIFF"), encoded(20, 30)]
    mask, _ = decoded_by_loop(files, np.array([[0, 0, 30, 20]] * 4))
    assert mask == [False] * 4
    batch = collate_encoded([png(2, 8, 30, 20), webp(20, 30)])
    for length in range(40):
        batch.headers.table["length"] = length
        with mock.patch(f"{__name__}.collate_encoded", return_value=batch):
            assert decoded_by_loop([b"", b""], np.array([[0, 0, 30, 20]] * 2))[0] == [False, False]


@NUMBA
@SPNG
def test_large_images_are_skipped(monkeypatch):
    files, windows = [png(2, 8, 21, 33), png(2, 8, 21, 32)], np.array([[0, 0, 21, 33], [0, 0, 21, 32]])
    monkeypatch.setattr(image_loop, "MAX_PIXELS", 21 * 32)
    assert decoded_by_loop(files, windows)[0] == [False, True]


@NUMBA
def test_loop_does_not_hold_the_interpreters_lock():
    assert image_loop.compiled().targetoptions["nogil"]


@NUMBA
@SPNG
@WEBP
@pytest.mark.parametrize("crop", [None, v2.RandomResizedCrop(16, scale=(0.1, 0.4))], ids=["whole", "windows"])
@pytest.mark.parametrize("channels", [3, 1])
def test_batches_are_the_same_without_the_loop(crop, channels, monkeypatch):
    """Rotated files, files with alpha, and files that cannot be decoded among the files that the loop decodes."""
    files = [png(2, 8, 50, 70, seed=number) for number in range(3)] + [
        webp(60 + number, 40, seed=number) for number in range(3)
    ]
    files += [png(6, 8, 33, 44), png(0, 8, 40, 30), png(3, 8, 40, 30), encoded(40, 50, "PNG", orientation=6), encoded(50, 60)]
    files += [webps()["with metadata"], png(2, 8, 50, 70)[:-30], webp(64, 48)[:-200]]
    decoded = []
    decode = image_loop.ImageLoop.decode
    monkeypatch.setattr(image_loop.ImageLoop, "decode", lambda loop, chunk: decoded.append(decode(loop, chunk)) or decoded[-1])

    def batch():
        stages = [DecodeStage(on_error="replace", channels=channels), *([fuse(crop, ragged=True)] if crop else [])]
        loader = StreamedLoader([collate_encoded(files)], stages, device="cpu", seed=3)
        return next(iter(loader))

    with_loop = batch()
    assert sum(int(mask.sum()) for mask in decoded) >= (8 if channels == 3 else 1)
    monkeypatch.setattr(image_loop, "compiled", lambda: None)
    for image, expected in zip(with_loop, batch(), strict=True):
        assert np.array_equal(image.numpy(), expected.numpy())


@pytest.mark.parametrize("module", ["numpy", "no_such_module"])
def test_libspng_may_be_out_of_reach(module, monkeypatch):
    importlib = mock.Mock(import_module=lambda _: __import__(module))
    monkeypatch.setattr(libspng, "importlib", importlib)
    assert libspng.functions.__wrapped__() is None


@NUMBA
@pytest.mark.parametrize("missing", [libspng, pytest.param(libwebp, marks=pytest.mark.slow)], ids=["libspng", "libwebp"])
def test_loop_decodes_the_files_of_one_library_without_the_other(missing, monkeypatch):
    monkeypatch.setattr(missing, "functions" if missing is libspng else "library", lambda: None)
    loop = image_loop._compile()
    monkeypatch.setattr(image_loop, "compiled", lambda: loop)
    mask, _ = decoded_by_loop([png(2, 8, 30, 20), webp(20, 30)], np.array([[0, 0, 30, 20]] * 2))
    assert mask == [missing is not libspng, missing is not libwebp]
