"""The loop over windows of JPEGs that Numba compiles: what single calls give, without the interpreter's lock."""

import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.files.encoded import encoded
from support.files.jpeg_windows import CODINGS, FILLED, GUARD, SCALES, SUBSAMPLINGS, decoded, jpeg, scans_of, some_windows
from torchvision.transforms import v2

from gpuaug import DecodeStage, StreamedLoader, collate_encoded, fuse
from gpuaug.core.encoded import HEADER
from gpuaug.decode import c_calls
from gpuaug.decode.decoders import turbojpeg, window_loop


def decoded_by_loop(cases):
    """Decode (file, region, wanted columns, channels, scale, full size) in one call. Return (mask, images).

    Fails if memory between the images is written.
    """
    files = b"".join(case[0] for case in cases)
    table = np.zeros(len(cases), HEADER)
    lengths = [len(case[0]) for case in cases]
    table["start"], table["length"] = np.cumsum([0, *lengths[:-1]]), lengths
    table["height"], table["width"] = np.array([case[5] for case in cases]).T
    regions = np.array([case[1] for case in cases])
    wanted = regions.copy()
    wanted[:, 1], wanted[:, 3] = np.array([case[2] for case in cases]).T
    channels = cases[0][3]
    sizes = regions[:, 2] * regions[:, 3] * channels
    starts = GUARD + np.cumsum([0, *(sizes[:-1] + GUARD)])
    memory = np.full(starts[-1] + sizes[-1] + GUARD, FILLED, np.uint8)
    data = np.frombuffer(files, np.uint8)
    loop = window_loop.WindowLoop(
        window_loop.compiled(),
        data.ctypes.data,
        memory.ctypes.data,
        channels,
        table,
        starts,
        regions,
        wanted,
        np.array([case[4] for case in cases]),
        np.ones(len(cases), np.bool_),
    )
    mask = loop.decode(range(len(cases)))
    images = []
    for start, size, region in zip(starts.tolist(), sizes.tolist(), regions.tolist(), strict=True):
        images.append(memory[start : start + size].reshape(region[2], region[3], channels).copy())
        memory[start : start + size] = FILLED
    assert (memory == FILLED).all()
    return mask, images


@pytest.fixture
def _compiled_loop():
    if window_loop.compiled() is None:  # asked here, because to compile takes seconds
        pytest.skip("no Numba, or another machine")


NUMBA = pytest.mark.usefixtures("_compiled_loop")


@NUMBA
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("coding", CODINGS)
def test_loop_decodes_what_single_calls_decode_without_a_scratch_buffer(coding, channels, monkeypatch):
    monkeypatch.setattr(turbojpeg, "_scratch", None)
    shapes = [(1, 1), (1, 40), (9, 18), (17, 33), (37, 70), (19, 100), (50, 9)]
    cases = []
    for subsampling, (height, width), scale in itertools.product(SUBSAMPLINGS, shapes, SCALES):
        file = jpeg(height, width, subsampling, coding)
        full, smaller = (height, width), (-(-height // scale), -(-width // scale))
        windows = np.array(list(some_windows(*smaller, 2, seed=height + scale)))
        table = np.repeat(collate_encoded([file]).headers.table, len(windows))
        regions = turbojpeg.regions(windows, table, np.full(len(windows), scale))
        for window, region in zip(windows.tolist(), regions.tolist(), strict=True):
            cases.append((file, region, (window[1], window[3]), channels, scale, full))
    cases += [(*case[:5], (case[5][0] + 1, case[5][1])) for case in cases[:3]]  # headers of another size
    mask, images = decoded_by_loop(cases)
    for found, image, (file, region, (left, wide), _, scale, full) in zip(mask.tolist(), images, cases, strict=True):
        single = np.empty_like(image)
        inner = (left - region[1], wide)
        accepted = turbojpeg.decode(np.frombuffer(file, np.uint8), single, region, full, scale, inner)
        assert found == (accepted and "progressive" not in coding)
        if found:
            columns = slice(inner[0], inner[0] + wide)
            assert np.array_equal(image[:, columns], single[:, columns])
    assert "progressive" in coding or mask[:-3].all()


@NUMBA
def test_loop_refuses_damaged_files_that_single_calls_refuse():
    cases = []
    for seed in range(300):
        draw = random.Random(seed)
        file = bytearray(jpeg(48, 64, "4:4:4", "baseline"))
        for _ in range(draw.choice((1, 1, 3))):
            file[draw.randrange(2, draw.choice((scans_of(file)[0], len(file))))] ^= 1 << draw.randrange(8)
        cases.append((bytes(file[: draw.choice((None, None, -200))]), (8, 16, 24, 32), (16, 32), 3, 1, (48, 64)))
    mask, images = decoded_by_loop(cases)
    for found, image, (file, region, *_) in zip(mask.tolist(), images, cases, strict=True):
        single = decoded(file, region, full=(48, 64))
        assert found == (single is not None)
        assert not found or np.array_equal(image, single)
    assert 0.1 < mask.mean() < 0.95


@NUMBA
def test_loop_does_not_hold_the_interpreters_lock():
    assert window_loop.compiled().targetoptions["nogil"]


@NUMBA
@pytest.mark.parametrize("region", [(0, 5, 20, 24), (0, 48, 20, 32), (30, 16, 30, 32)])
def test_loop_refuses_windows_that_are_not_regions_of_the_file(region):
    mask, _ = decoded_by_loop([(jpeg(48, 64, "4:4:4"), region, (region[1], region[3]), 3, 1, (48, 64))])
    assert not mask.any()


@NUMBA
def test_batches_are_the_same_without_the_loop(monkeypatch):
    data = [[(encoded(60 + number, 40, seed=number), number) for number in range(start, start + 8)] for start in (0, 8)]
    data[1][3] = (b"no image", 3)
    counted = []
    once = window_loop.WindowLoop.decode
    monkeypatch.setattr(window_loop.WindowLoop, "decode", lambda loop, chunk: counted.append(once(loop, chunk)) or counted[-1])

    def batches():
        stages = [DecodeStage(on_error="replace"), fuse(v2.RandomResizedCrop(16, scale=(0.1, 0.4)), ragged=True)]
        loader = StreamedLoader([collate_encoded(batch) for batch in data], stages, device="cpu", seed=3)
        return [images for images, _ in loader]

    with_loop = batches()
    assert sum(int(mask.sum()) for mask in counted) >= 8
    monkeypatch.setattr(window_loop, "compiled", lambda: None)
    for got, want in zip(with_loop, batches(), strict=True):
        assert np.array_equal(got.numpy(), want.numpy())


def test_an_error_of_the_loop_is_raised_at_its_batch(monkeypatch):
    def fail(*_):
        raise MemoryError("of the loop")

    monkeypatch.setattr(window_loop, "compiled", lambda: fail)
    stages = [DecodeStage(), fuse(v2.RandomResizedCrop(16, scale=(0.1, 0.4)), ragged=True)]
    batch = collate_encoded([(encoded(64, 48, seed=number), number) for number in range(8)])
    with pytest.raises(MemoryError, match="of the loop"):
        list(StreamedLoader([batch], stages, device="cpu"))


@pytest.mark.parametrize("error", [ImportError("no module"), AttributeError("module 'scipy' has no attribute '__version__'")])
def test_a_numba_that_cannot_be_imported_is_not_used(monkeypatch, caplog, error):
    def fail(_):
        raise error

    monkeypatch.setattr(window_loop, "_compile", fail)
    monkeypatch.setattr(turbojpeg, "library", lambda: "libturbojpeg")
    assert window_loop.compiled.__wrapped__() is None
    assert ("scipy" in caplog.text) == isinstance(error, AttributeError)


def test_threads_that_need_a_loop_at_once_compile_it_once():
    compilations = []

    @c_calls.compile_once
    def compiled(count):
        compilations.append(threading.get_ident())
        time.sleep(0.05)  # the other threads call meanwhile
        return count, len(compilations)

    with ThreadPoolExecutor(4) as pool:
        assert [future.result() for future in [pool.submit(compiled, 5) for _ in range(4)]] == [(5, 1)] * 4
    assert compiled(7) == (7, 2)
