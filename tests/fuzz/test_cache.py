"""Damaged files of a feature cache: a batch has the rows that were recorded, or its samples are encoded again."""

import functools
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from support.cache.cached_loaders import Files, as_dict, assert_equal, loader, rows_of, stages, write_images
from support.public.fuzzing import cases, outcome

import gpuaug

pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore::gpuaug.GpuAugWarning")]

COUNT = 8


def read(folder, paths):
    """Rows of one epoch that are read from a folder, or recorded there."""
    cache = gpuaug.FeatureCache(folder)
    streamed = loader(cache.wrap(Files(paths, as_dict)), stages(cache))
    with streamed:
        return rows_of(streamed), streamed.stats().rows_read


@functools.cache
def recorded():
    """Folder with images and the files of a cache, paths of the images, and the rows."""
    folder = Path(tempfile.mkdtemp())
    paths = write_images(folder / "images", COUNT)
    return folder, paths, read(folder / "cache", paths)[0]


@pytest.fixture(autouse=True, scope="module")
def _folder():
    yield
    if recorded.cache_info().currsize:
        shutil.rmtree(recorded()[0])
        recorded.cache_clear()


@st.composite
def damages(draw):
    """A change of the bytes of one file."""
    place, length = draw(st.floats(0, 1)), draw(st.integers(1, 64))
    kind = draw(st.sampled_from(["flipped", "cut", "removed", "inserted", "deleted", "empty"]))
    value = draw(st.binary(min_size=1, max_size=64))

    def damaged(data):
        at = int(place * max(len(data) - 1, 0))
        if kind == "flipped":
            return bytes([*data[:at], data[at] ^ (value[0] or 1), *data[at + 1 :]]) if data else value
        return {
            "cut": data[:at],
            "removed": data[:at] + data[at + length :],
            "inserted": data[:at] + value + data[at:],
            "empty": b"",
            "deleted": None,
        }[kind]

    return draw(st.integers(0, 99)), damaged


@cases(10)
@given(st.lists(damages(), min_size=1, max_size=3))
def test_damaged_files_give_the_recorded_rows_or_are_encoded_again(changes):
    folder, paths, expected = recorded()
    with tempfile.TemporaryDirectory() as copy:
        cache = Path(copy, "cache")
        shutil.copytree(folder / "cache", cache)
        files = sorted(path for path in cache.rglob("*") if path.is_file())
        for index, damaged in changes:
            path = files[index % len(files)]
            data = damaged(path.read_bytes()) if path.exists() else None
            if data is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(data)
        made = outcome(read, cache, paths)
    event(type(made).__name__)
    if not isinstance(made, gpuaug.GpuAugError):
        rows, count = made
        event(f"read: {count}")
        assert count <= COUNT
        assert torch.stack([*rows.values()]).isfinite().all()
        assert_equal(rows, expected)
