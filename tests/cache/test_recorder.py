"""Writing rows: killed runs, damaged files, disks that fail or are slow, and the memory of rows."""

import errno
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.cache.cached_loaders import (
    COUNT,
    DEVICES,
    Files,
    as_dict,
    assert_equal,
    epochs_of,
    loader,
    rows_of,
    stages,
)
from support.process import waiting

import gpuaug
from gpuaug import DeviceError, FeatureCache, GpuAugError
from gpuaug.cache import recorder
from gpuaug.core import batch as batches
from gpuaug.core.streams import Lanes


def damage(data):
    """Yield (name, damaged copy of a file)."""
    yield "truncated", data[: len(data) // 2]
    yield "empty", b""
    yield "zeros", bytes(len(data))
    for place in range(9, len(data), len(data) // 13):
        flipped = bytearray(data)
        flipped[place] ^= 16
        yield f"bit at {place}", bytes(flipped)


def test_damaged_shards_are_encoded_again(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    wrapped = cache.wrap(Files(paths, as_dict))
    [recorded] = epochs_of(loader(wrapped, stages(cache)), 1)
    [shard] = (tmp_path / "cache").glob("*/view-0/*.safetensors")
    data = shard.read_bytes()
    for name, damaged in damage(data):
        for later in shard.parent.glob("*.safetensors"):
            later.unlink()
        shard.write_bytes(damaged)
        streamed = loader(wrapped, stages(cache))
        rows = [rows_of(streamed)]  # epoch 0 again
        streamed.set_epoch(0)
        rows.append(rows_of(streamed))
        for read in rows:
            assert_equal(read, recorded)
        assert streamed.stats().rows_encoded <= COUNT, name
        assert streamed.stats().rows_encoded > 0 or name.startswith("bit"), name


def exchange(first, second):
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def link_to_nothing(first, _):
    first.unlink()
    first.symlink_to("missing")


@pytest.mark.filterwarnings("ignore:.*begins anew")
@pytest.mark.parametrize("other", ["view", "key"])
@pytest.mark.parametrize("change", [exchange, lambda first, second: shutil.copy(second, first), link_to_nothing])
def test_shards_in_a_wrong_folder_are_not_read(change, other, paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache", views=2)
    dataset = Files(paths, as_dict)
    right = epochs_of(loader(cache.wrap(dataset), stages(cache)), 2)
    key = cache.key
    epochs_of(loader(cache.wrap(dataset), stages(cache), seed=4), 2)
    [first] = cache.folder.glob(f"{key}/view-0/*.safetensors")
    [second] = cache.folder.glob(f"{key}/view-1/*.safetensors" if other == "view" else f"{cache.key}/view-0/*.safetensors")
    change(first, second)
    str(cache)
    streamed = loader(cache.wrap(dataset), stages(cache))
    for epoch, rows in enumerate(epochs_of(streamed, 2)):
        assert_equal(rows, right[epoch])
    assert streamed.stats().rows_encoded == COUNT * (1 + (change is exchange and other == "view"))


def test_a_run_that_was_killed_continues(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "SHARD_BYTES", 1)
    folder, dataset = tmp_path / "cache", Files(paths, as_dict)
    [wanted] = epochs_of(loader(dataset, stages(None)), 1)  # which compiles the decoders, for both processes

    def train():
        torch.set_num_threads(1)  # a forked process lacks OpenMP's threads, for which torch would wait
        cache = FeatureCache(folder)
        for number, _ in enumerate(loader(cache.wrap(dataset), stages(cache))):
            time.sleep(60 if number == 3 else 0)

    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    waiting.until(lambda: list(folder.glob("*/view-0/*.safetensors")))
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    cache = FeatureCache(folder)
    streamed = loader(cache.wrap(dataset), stages(cache))
    assert_equal(epochs_of(streamed, 1)[0], wanted)
    assert 0 < streamed.stats().rows_read < COUNT


@pytest.mark.parametrize(
    ("number", "way_out"),
    [
        (errno.ENOSPC, "Free space, or use fewer views. The rows that were written remain valid"),
        (errno.EROFS, "Make the folder writable, or use another folder"),
        (errno.EIO, "Check the disk, or use another folder"),
    ],
)
@pytest.mark.parametrize("place", [".safetensors", "key.json"])
def test_a_disk_that_fails(place, number, way_out, paths, tmp_path, monkeypatch):
    replace = Path.replace

    def fail(path, target):
        if str(target).endswith(place):
            raise OSError(number, os.strerror(number))
        return replace(path, target)

    cache = FeatureCache(tmp_path / "cache")
    streamed = loader(cache.wrap(Files(paths, as_dict)), stages(cache))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(GpuAugError, match=way_out):
            rows_of(streamed)
    assert len(rows_of(streamed)) == COUNT


def test_a_disk_that_is_too_slow(paths, tmp_path, monkeypatch):
    written = threading.Event()
    write = recorder.write_file
    monkeypatch.setattr(recorder, "write_file", lambda *arguments: written.wait(60) and write(*arguments))
    monkeypatch.setattr(recorder, "SHARD_BYTES", 1)
    monkeypatch.setattr(recorder, "MAX_WAITING_BYTES", 300)  # one batch has 256 bytes
    cache = FeatureCache(tmp_path / "cache")
    streamed = loader(cache.wrap(Files(paths, as_dict)), stages(cache))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in streamed:
            if streamed.stats().rows_dropped:
                written.set()
    assert [str(warning.message).partition(",")[0] for warning in caught] == ["Rows of the feature cache are not written"]
    stats = streamed.stats()
    assert stats.rows_dropped > 0
    assert stats.rows_written + stats.rows_dropped == COUNT


def test_memory_is_reused_in_the_order_of_a_loader_without_a_cache(paths, tmp_path, monkeypatch):
    """Each batch retires its tensors once, with the columns of rows that a lane has read."""
    retired = []
    monkeypatch.setattr(Lanes, "retire", lambda lanes, values, event: retired.append(batches.leaves(values)))
    cache = FeatureCache(tmp_path / "cache")
    dataset = Files(paths, as_dict)
    rows_of(loader(dataset, stages(None)))
    counts = [len(retired)]
    streamed = loader(cache.wrap(dataset), stages(cache))
    rows_of(streamed)
    counts.append(len(retired) - sum(counts))
    for path in paths[::4]:
        os.utime(path, ns=(1, 1))
    list(streamed)
    counts.append(len(retired) - sum(counts))
    assert counts[0] == counts[1] == -(-COUNT // 4) >= counts[2] > 0
    for leaves in retired[-counts[2] :]:
        assert sum(isinstance(leaf, torch.Tensor) and leaf.shape[1:] == (4, 2, 2) for leaf in leaves) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_recorded_before_later_stages_change_them(device, paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    made = [*stages(cache), gpuaug.TransformStage(lambda latents: latents.mul_(2), on="latents")]
    first, second = epochs_of(loader(cache.wrap(Files(paths, as_dict)), made, device=device), 2)
    assert_equal(second, first)


@pytest.mark.parametrize("place", ["write_file", "replace"])
@pytest.mark.parametrize("end", ["break", "error"])
def test_an_error_of_an_epoch_that_was_left_is_raised_at_the_next(end, place, paths, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise GpuAugError("no space") if place == "write_file" else MemoryError("no memory")

    cache = FeatureCache(tmp_path / "cache")
    streamed = loader(cache.wrap(Files(paths, as_dict)), stages(cache))
    expected = GpuAugError if place == "write_file" else MemoryError
    with monkeypatch.context() as patched:
        patched.setattr(recorder, place, fail)
        with suppress(ZeroDivisionError):
            for _ in streamed:
                if end == "break":
                    break
                raise ZeroDivisionError
        with pytest.raises(expected):
            next(iter(streamed))
    assert len(rows_of(streamed)) == COUNT


def test_an_error_of_the_writing_thread_is_raised(paths, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise MemoryError("no memory")

    monkeypatch.setattr(recorder, "replace", fail)
    cache = FeatureCache(tmp_path / "cache")
    streamed = loader(cache.wrap(Files(paths, as_dict)), stages(cache))
    with pytest.raises(MemoryError):
        rows_of(streamed)


def test_a_cache_without_safetensors_is_refused_before_the_first_batch(paths, tmp_path, monkeypatch):
    cache = FeatureCache(tmp_path / "cache")
    streamed = loader(cache.wrap(Files(paths, as_dict)), stages(cache))
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DeviceError, match=r"safetensors cannot be imported .*pip install safetensors"):
        next(iter(streamed))
    assert streamed.stats().rows_encoded == 0
