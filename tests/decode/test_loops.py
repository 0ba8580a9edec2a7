"""Loops over images that Numba compiles, or that Python runs: the same pixels, without the interpreter's lock."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.files.encoded import encoded
from support.files.jpeg_windows import CODINGS, SUBSAMPLINGS, decoded, jpeg
from support.files.png_files import png, webp, webps
from torchvision.transforms import v2

from gpuaug import DecodeStage, StreamedLoader, collate_encoded, fuse
from gpuaug.decode import c_calls
from gpuaug.decode.decoders import loops, turbojpeg

CROP = v2.RandomResizedCrop(16, scale=(0.1, 0.4))

needs_turbojpeg = pytest.mark.skipif(turbojpeg.library() is None, reason="no libturbojpeg of libjpeg-turbo 3")


def python_loop(loop):
    """The loop without Numba."""
    return c_calls.in_python(getattr(loops, f"_define_{loop}"))


@needs_turbojpeg
def test_the_loop_over_windows_decodes_the_same_without_numba():
    in_python = python_loop("jpeg_loop")
    windows = [(0, 0, 9, 13), (4, 20, 1, 2), (5, 0, 4, 9)]
    refused = 0
    for coding, subsampling, scale, channels, window in itertools.product(CODINGS, SUBSAMPLINGS, (1, 2), (3, 1), windows):
        arguments = (jpeg(37, 70, subsampling, coding), window, channels, scale)
        found, expected = decoded(*arguments, decode_jobs=in_python), decoded(*arguments)
        assert (found is None) == (expected is None)
        refused += found is None
        assert found is None or np.array_equal(found, expected)
    assert refused == 2 * 6 * 2 * 2 * 3  # the progressive codings


@pytest.mark.parametrize("loop", [loops.jpeg_loop, loops.png_and_webp_loop])
def test_loops_do_not_hold_the_interpreters_lock(loop):
    pytest.importorskip("numba")
    assert loop().targetoptions["nogil"]


@pytest.mark.parametrize("numba", [True, False])
@pytest.mark.parametrize("crop", [None, CROP], ids=["whole", "windows"])
@pytest.mark.parametrize("channels", [3, 1])
def test_batches_are_the_same_without_loops(crop, channels, numba, monkeypatch):
    """Rotated files, files with alpha, and files that cannot be decoded among the files that the loops decode."""
    files = [png(2, 8, 50, 70, seed=number) for number in range(3)] + [webp(60 + number, 40) for number in range(3)]
    files += [png(6, 8, 33, 44), png(0, 8, 40, 30), png(3, 8, 40, 30), encoded(40, 50, "PNG", orientation=6), encoded(50, 60)]
    files += [webps()["with metadata"], png(2, 8, 50, 70)[:-30], webp(64, 48)[:-200], b"no image"]
    files += [encoded(60 + number, 40, seed=number, orientation=number) for number in range(1, 9)]
    for name in () if numba else ("jpeg_loop", "png_and_webp_loop"):
        in_python = python_loop(name)
        monkeypatch.setattr(loops, name, lambda in_python=in_python: in_python)
    masks, decode = [], loops.Loops.decode
    monkeypatch.setattr(loops.Loops, "decode", lambda loop, chunk: masks.append(decode(loop, chunk)) or masks[-1])

    def batch():
        stages = [DecodeStage(on_error="replace", channels=channels), *([fuse(crop, ragged=True)] if crop else [])]
        loader = StreamedLoader([collate_encoded(files)], stages, device="cpu", seed=3)
        return next(iter(loader))

    with_loops = batch()
    assert sum(int(mask.sum()) for mask in masks) >= (8 if channels == 3 else 1)
    monkeypatch.setattr(loops, "jpeg_loop", lambda: None)
    monkeypatch.setattr(loops, "png_and_webp_loop", lambda: None)
    for image, expected in zip(with_loops, batch(), strict=True):
        assert np.array_equal(image.numpy(), expected.numpy())


def test_an_error_of_a_loop_is_raised_at_its_batch(monkeypatch):
    def fail(*_):
        raise MemoryError("of the loop")

    monkeypatch.setattr(loops, "jpeg_loop", lambda: fail)
    batch = collate_encoded([(encoded(64, 48, seed=number), number) for number in range(8)])
    with pytest.raises(MemoryError, match="of the loop"):
        list(StreamedLoader([batch], [DecodeStage(), fuse(CROP, ragged=True)], device="cpu"))


@pytest.mark.parametrize("error", [ImportError("no module"), AttributeError("module 'scipy' has no attribute '__version__'")])
def test_a_numba_that_cannot_be_imported_is_not_used(monkeypatch, caplog, error):
    def fail():
        raise error

    monkeypatch.setattr(c_calls, "c_call", fail)
    assert c_calls.compiled_or_python("decode", lambda *_: "in Python") == "in Python"
    assert ("scipy" in caplog.text) == isinstance(error, AttributeError)
    monkeypatch.setattr(c_calls.sys, "platform", "win32")
    assert c_calls.compiled_or_python("decode", lambda *_: "in Python") is None


def test_threads_that_need_a_loop_at_once_compile_it_once():
    compilations = []

    @c_calls.compile_once
    def compiled():
        compilations.append(threading.get_ident())
        time.sleep(0.05)  # the other threads call meanwhile
        return len(compilations)

    with ThreadPoolExecutor(4) as pool:
        assert [future.result() for future in [pool.submit(compiled) for _ in range(4)]] == [1] * 4
