"""Regions of JPEGs, decoded by libturbojpeg: the pixels of the whole image in every window of every kind of file."""

import ctypes
import ctypes.util
import itertools
import random
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.files.encoded import encoded
from support.files.jpeg_windows import (
    CODINGS,
    SCALES,
    SUBSAMPLINGS,
    decoded,
    jpeg,
    scans_of,
    size,
    some_windows,
    whole,
)
from support.files.other_encoders import files

from gpuaug.decode.decoders import turbojpeg

pytestmark = pytest.mark.skipif(turbojpeg.library() is None, reason="no libturbojpeg of libjpeg-turbo 3")

WINDOW_CODINGS = [coding for coding in CODINGS if "progressive" not in coding]
"""Codings whose windows are decoded alone."""


def same(file, window, channels=3, scale=1):
    """Whether the window was decoded; if so, its pixels must be those of the whole image."""
    made = decoded(file, window, channels, scale)
    if made is None:
        return False
    top, left, height, width = window
    expected = whole(file, channels, scale)
    assert expected is not None
    assert np.array_equal(made, expected[top : top + height, left : left + width]), (window, channels, scale)
    return True


@pytest.mark.parametrize("coding", WINDOW_CODINGS)
@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_windows_have_the_pixels_of_the_whole_image(subsampling, coding):
    shapes = [(1, 1), (1, 40), (40, 1), (2, 2), (9, 18), (17, 33), (37, 70), (64, 64), (19, 100), (50, 9)]
    for number, ((height, width), scale) in enumerate(itertools.product(shapes, SCALES)):
        file, channels = jpeg(height, width, subsampling, coding), 1 if number % 3 == 0 else 3
        if whole(file, channels, scale) is not None:
            shape = (-(-height // scale), -(-width // scale))
            assert all(same(file, window, channels, scale) for window in some_windows(*shape, 5, seed=height + scale))


def some_spans(length):
    """(first, end) of spans that are narrow or touch an end: every position is a first and a last one."""
    pairs = itertools.combinations(range(length + 1), 2)
    return [(first, end) for first, end in pairs if end - first < 4 or first == 0 or end == length]


def all_spans(length):
    return list(itertools.combinations(range(length + 1), 2))


some_or_all_spans = pytest.mark.parametrize(
    "spans", [pytest.param(some_spans, id="some"), pytest.param(all_spans, id="all", marks=pytest.mark.slow)]
)


@some_or_all_spans
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("subsampling", ["4:2:2", "4:2:0", "4:1:1"])
def test_every_column_may_be_the_first_and_the_last(subsampling, scale, spans):
    """For these subsamplings, chroma is interpolated from the columns beside a window."""
    for width in (66, 69):
        file = jpeg(9, width, subsampling)
        for left, right in spans(-(-width // scale)):
            assert same(file, (0, left, -(-9 // scale), right - left), 3, scale)


@some_or_all_spans
@pytest.mark.parametrize("subsampling", ["4:2:0", "4:4:0", "grey"])
def test_every_row_may_be_the_first_and_the_last(subsampling, spans):
    """For two of these, chroma is interpolated from the rows beside a window."""
    for height in (49, 53):
        file = jpeg(height, 20, subsampling)
        for top, bottom in spans(height):
            assert same(file, (top, 3, bottom - top, 4))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_random_windows_of_random_sizes(data):
    subsampling, coding = data.draw(st.sampled_from(SUBSAMPLINGS)), data.draw(st.sampled_from(WINDOW_CODINGS))
    full = data.draw(st.tuples(st.integers(1, 120), st.integers(1, 120)))
    scale = data.draw(st.sampled_from([scale for scale in SCALES if scale <= min(full)]))
    ends = [st.lists(st.integers(0, -(-side // scale)), min_size=2, max_size=2, unique=True).map(sorted) for side in full]
    tops, lefts = (data.draw(pair) for pair in ends)
    window = (tops[0], lefts[0], tops[1] - tops[0], lefts[1] - lefts[0])
    assert same(jpeg(*full, subsampling, coding), window, data.draw(st.sampled_from([3, 1])), scale)


def test_files_of_other_encoders_have_the_pixels_of_the_whole_image_or_are_refused():
    refused = set()
    for name, file in files().items():
        if "of 12 bits" in name or "of 16 bits" in name or "lossless of another" in name:
            continue  # which PIL refuses
        for scale, channels in itertools.product((1, 2), (3, 1)):
            shape = [-(-side // scale) for side in size(file)]
            for window in some_windows(*shape, 4, seed=7):
                if not same(file, window, channels, scale) and "progressive" not in name:
                    refused.add(" ".join(name.split()[:3]))
    assert refused <= {
        *("cjpeg 4:1:0 restart", "cjpeg chroma of", "cjpeg all components"),  # without a name in TurboJPEG
        *("imagecodecs lossless RGB", "imagecodecs lossless grey"),
    }


@pytest.mark.parametrize("name", [name for name in files() if "lossless" in name or "of 12 bits" in name])
def test_other_than_lossy_jpegs_of_8_bits_are_refused(name):
    file = files()[name]
    assert decoded(file, (2, 2, 5, 9), 3, 1, full=(43, 61)) is None
    assert decoded(file, (0, 0, 22, 31), 3, 2, full=(43, 61)) is None


def test_a_file_of_another_size_or_colours_than_its_header_is_refused():
    file = jpeg(40, 50)
    assert decoded(file, (3, 4, 5, 6)) is not None
    assert decoded(file, (3, 4, 5, 6), full=(40, 51)) is None
    assert decoded(file, (3, 4, 5, 6), full=(41, 50)) is None
    for channels in (3, 1):
        assert decoded(encoded(50, 40, mode="CMYK"), (3, 4, 5, 6), channels) is None
    assert decoded(b"\xff\xd8" + file[4:300], (3, 4, 5, 6), full=(40, 50)) is None


def test_rows_beyond_the_image_are_refused():
    for window in ((0, 0, 41, 50), (36, 0, 5, 50)):
        assert decoded(jpeg(40, 50), window) is None


def test_windows_of_progressive_files_are_refused():
    assert decoded(jpeg(64, 96, "4:2:0", "progressive"), (10, 10, 30, 40)) is None


def test_tables_of_one_file_are_not_those_of_the_next():
    """As libjpeg keeps them for files without tables."""
    file = jpeg(40, 50)
    assert decoded(file, (3, 4, 5, 6)) is not None
    tables = file.index(b"\xff\xdb")
    without = file[:tables] + file[tables + 2 + int.from_bytes(file[tables + 2 : tables + 4], "big") :]
    assert decoded(without, (3, 4, 5, 6)) is None


def test_a_warning_is_left_to_the_decoder_of_whole_images():
    file = jpeg(64, 96)
    table, window = file.find(b"\xff\xdb"), (40, 10, 20, 40)
    assert same(file + b"junk", window)
    assert decoded(file[:table] + b"junk" + file[table:], window) is None
    assert decoded(file[:-300], window) is None


def test_a_file_may_be_damaged_below_the_window():
    """What is not read cannot matter: the pixels are those of the file as it was."""
    file = jpeg(256, 96)
    cut = file[: len(file) // 2] + b"\xff\xd9"
    window = (16, 10, 40, 40)
    assert np.array_equal(decoded(cut, window), decoded(file, window))
    assert decoded(cut, (200, 10, 40, 40)) is None


@pytest.mark.parametrize("seeds", [range(250), pytest.param(range(400, 20000), marks=pytest.mark.slow)], ids=["some", "many"])
def test_damaged_files_have_the_pixels_of_pil_or_are_refused(seeds):
    decodable = []
    for seed in seeds:
        draw = random.Random(seed)
        file = bytearray(jpeg(50, 70, draw.choice(SUBSAMPLINGS), draw.choice(WINDOW_CODINGS)))
        first_scan = scans_of(file)[0]
        for _ in range(draw.choice((1, 1, 3))):
            file[draw.randrange(first_scan if draw.random() < 0.7 else 2, len(file))] ^= 1 << draw.randrange(8)
        file, scale, channels = bytes(file), draw.choice((1, 1, 2, 4, 8)), draw.choice((3, 1))
        window = next(some_windows(-(-50 // scale), -(-70 // scale), 1, seed))
        made = decoded(file, window, channels, scale, full=(50, 70))
        decodable.append(made is not None)
        if made is None:
            continue
        try:
            expected = whole(file, channels, scale)
        except (OSError, SyntaxError):  # PIL refuses a file that is damaged below the window
            continue
        top, left, height, width = window
        assert np.array_equal(made, expected[top : top + height, left : left + width])
    assert 0.1 < np.mean(decodable) < 0.9


def test_windows_are_decoded_side_by_side():
    file = jpeg(256, 300)
    wrong = []

    def decode(seed):
        for window in some_windows(256, 300, 20, seed):
            top, left, height, width = window
            if not np.array_equal(decoded(file, window), expected[top : top + height, left : left + width]):
                wrong.append(window)

    expected = whole(file, 3, 1)
    threads = [threading.Thread(target=decode, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def found(monkeypatch, tmp_path, *, wheel=False, conda=False, system=None):
    """Name of the library that is found, and names of all that are loaded, where ``lib*-2`` has no regions."""
    loaded = []

    def load(path):
        loaded.append(path)
        if path.endswith("-2.so"):
            return object()
        if path == "missing" or (not path.startswith("lib") and not (tmp_path / path).exists()):
            raise OSError
        return turbojpeg_library

    turbojpeg_library = turbojpeg.library()
    for name, present in (("turbojpeg.libs/libturbojpeg-1.so.0", wheel), ("lib/libturbojpeg.so.0", conda)):
        if present:
            (tmp_path / name).parent.mkdir(parents=True)
            (tmp_path / name).touch()
    module = tmp_path / "turbojpeg.py"
    module.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "turbojpeg", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(turbojpeg, "_system_name", lambda: system)
    monkeypatch.setattr(ctypes, "CDLL", load)
    result = turbojpeg.library.__wrapped__()
    assert "turbojpeg" not in sys.modules
    return result is not None, loaded[-1] if result is not None else None


def test_conda_comes_before_the_system_and_the_system_before_the_wheel(monkeypatch, tmp_path):
    assert found(monkeypatch, tmp_path, system="missing") == (False, None)
    assert found(monkeypatch, tmp_path, system="libturbojpeg-2.so") == (False, None)
    assert found(monkeypatch, tmp_path) == (False, None)
    assert found(monkeypatch, tmp_path, system="libturbojpeg-3.so") == (True, "libturbojpeg-3.so")
    # Files that one call has made are there for the next.
    assert found(monkeypatch, tmp_path, wheel=True, system="libturbojpeg-3.so") == (True, "libturbojpeg-3.so")
    wheel = str(tmp_path / "turbojpeg.libs/libturbojpeg-1.so.0")
    assert found(monkeypatch, tmp_path, system="libturbojpeg-2.so") == (True, wheel)
    conda = str(tmp_path / "lib/libturbojpeg.so.0")
    assert found(monkeypatch, tmp_path, conda=True, system="libturbojpeg-3.so") == (True, conda)


def test_a_module_without_a_specification_is_no_wheel(monkeypatch, tmp_path):
    assert found(monkeypatch, tmp_path) == (False, None)
    monkeypatch.setitem(sys.modules, "turbojpeg", type(sys)("turbojpeg"))
    assert turbojpeg.library.__wrapped__() is None


def test_the_version_is_read_from_the_file_or_is_its_name(monkeypatch, tmp_path):
    path = tmp_path / "libturbojpeg.so.0.3.0"
    path.write_bytes(b"\0libjpeg-turbo version 3.0.1 (build 1)\0")
    for name, version in ((str(path), "libjpeg-turbo 3.0.1"), ("libturbojpeg.so.0", "libturbojpeg.so.0")):
        monkeypatch.setattr(turbojpeg, "library", lambda name=name: SimpleNamespace(_name=name))
        assert turbojpeg.version.__wrapped__() == version
