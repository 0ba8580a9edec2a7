"""Failures of threads, of the card and of decoders: raised at their batch when nothing uses its memory or files any more."""

import itertools
import re
import signal
import threading
from contextlib import closing
from functools import partial
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from support import internals
from support.files import nvjpeg_double
from support.files.encoded import encoded
from support.process.waiting import WAIT_S

from gpuaug import DecodeStage, StreamedLoader, collate_encoded
from gpuaug.core.streams import Lane, Lanes
from gpuaug.decode import decoder as decoder_module
from gpuaug.decode import nvjpeg
from gpuaug.decode.decoder import Decoder
from gpuaug.decode.decoders import base, cpu, loops, registry
from gpuaug.decode.decoders import hybrid as hybrid_module

FILES = [encoded(40 + number, 30, seed=number, progressive=number % 2 == 0) for number in range(9)]


@pytest.fixture
def hybrid(monkeypatch):
    nvjpeg_double.use(monkeypatch)
    return registry.find("hybrid", "a device")["hybrid"]


def decoded(backend="hybrid", files=FILES):
    stage = DecodeStage(backend=backend, threads=3)
    return [len(images) for images, _ in StreamedLoader([[collate_encoded(files), 0]], [stage], device="cpu")]


def all_idle(decoder):
    return all(pool.idle.qsize() == len(pool.states) for pool in decoder._pools.values())


@pytest.mark.timeout(WAIT_S)
def test_a_thread_that_cannot_use_the_device_fails_the_batch(hybrid, monkeypatch):
    def refuse(device):
        if threading.current_thread().name.startswith("gpuaug-decode-cpu"):
            raise OSError("no libcudart")

    monkeypatch.setattr(nvjpeg, "enter", refuse)
    with pytest.raises(OSError, match="no libcudart"):
        decoded()
    monkeypatch.setattr(nvjpeg, "enter", lambda device: None)
    assert decoded() == [9]
    assert all_idle(hybrid)


def limit_threads(patch, most, pool="gpuaug-decode-cpu"):
    """Have a pool start no more than this number of threads."""
    start = threading.Thread.start

    def limited(thread):
        if thread.name.startswith(pool) and int(thread.name.rpartition("_")[2]) >= most:
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", limited)


class Watch:
    """Slows images down on host threads, and checks that none is in work when the iterator of their batch ends its threads."""

    def __init__(self, patch, decoder):
        self.begun, self.ended = [], []
        for owner, name in ((internals.nvjpeg_calls(decoder), "host_phase"), (cpu, "decode")):
            patch.setattr(owner, name, partial(self._watched, getattr(owner, name)), raising=False)
        close = base.Pools.close

        def checked(pools):
            assert len(self.begun) == len(self.ended), "an image was in work when its batch failed"
            close(pools)

        patch.setattr(base.Pools, "close", checked)

    def _watched(self, original, *arguments):
        self.begun.append(1)
        threading.Event().wait(0.02)
        result = original(*arguments)
        self.ended.append(1)
        return result


@pytest.mark.timeout(WAIT_S)
@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("backend", ["hybrid", "cpu"])
def test_too_few_threads_fail_the_batch_after_its_images(hybrid, monkeypatch, backend, most):
    watch = Watch(monkeypatch, hybrid)
    with monkeypatch.context() as patch:
        limit_threads(patch, most)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            decoded(backend)
    assert len(watch.begun) < len(FILES)
    assert all_idle(hybrid)
    assert decoded(backend) == [9]


@pytest.mark.timeout(WAIT_S)
@pytest.mark.parametrize("most", [1, 48])
@pytest.mark.parametrize("fails", ["record_event", "synchronize"])
def test_a_card_that_fails_between_phases_leaves_no_state_in_use(hybrid, monkeypatch, fails, most):
    monkeypatch.setattr(hybrid_module, "MAX_STATES", most)
    Watch(monkeypatch, hybrid)
    card_phase, queued = internals.nvjpeg_calls(hybrid).card_phase, []

    def counted(*arguments):
        queued.append(1)
        card_phase(*arguments)

    def fail(*_, **__):
        if queued:
            raise RuntimeError("CUDA error")
        return event

    event = Lane("a lane").record_event()
    with monkeypatch.context() as patch:
        patch.setattr(internals.nvjpeg_calls(hybrid), "card_phase", counted, raising=False)
        patch.setattr(*((Lane, fails) if fails == "record_event" else (type(event), fails)), fail)
        with pytest.raises(RuntimeError, match="CUDA error"):
            decoded()
    assert all_idle(hybrid)
    assert decoded() == [9]


@pytest.mark.timeout(WAIT_S)
@pytest.mark.parametrize("method", ["begin", "_decode"])
def test_an_error_of_one_decoder_comes_when_the_others_have_ended(hybrid, monkeypatch, method):
    monkeypatch.setattr(loops, "png_and_webp_loop", lambda: None)  # PNGs are decoded by ``cpu.decode``, which is watched
    watch = Watch(monkeypatch, hybrid)

    def fail(*arguments):
        raise RuntimeError("it does not begin")

    monkeypatch.setattr(type(hybrid), method, fail)
    with pytest.raises(RuntimeError, match="it does not begin"):
        decoded(files=[*FILES[:2], encoded(20, 20, "PNG"), encoded(30, 20, "PNG")])
    assert len(watch.ended) == 2


@pytest.mark.timeout(WAIT_S)
@pytest.mark.parametrize("backend", ["hybrid", "cpu"])
def test_an_error_on_a_host_thread_comes_when_the_batchs_other_images_have_ended(hybrid, monkeypatch, backend):
    watch, calls = Watch(monkeypatch, hybrid), itertools.count()
    for owner, name in ((internals.nvjpeg_calls(hybrid), "host_phase"), (cpu, "decode")):
        original = getattr(owner, name)

        def fail(*arguments, original=original):
            if next(calls) == 1:
                raise SystemExit("a thread fails")
            return original(*arguments)

        monkeypatch.setattr(owner, name, fail, raising=False)
    with pytest.raises(SystemExit, match="a thread fails"):
        decoded(backend)
    assert len(watch.ended) == len(FILES) - 1
    assert all_idle(hybrid)


@pytest.mark.timeout(WAIT_S)
def test_states_are_shared_where_memory_for_more_is_missing(hybrid, monkeypatch):
    state, made = internals.nvjpeg_calls(hybrid).state, []

    def limited(*sizes):
        if len(made) == limit:
            raise nvjpeg.NvJpegError("nvjpegBufferPinnedResize", 5)
        made.append(1)
        return state(*sizes)

    monkeypatch.setattr(internals.nvjpeg_calls(hybrid), "state", limited, raising=False)
    limit = 0
    with pytest.raises(nvjpeg.NvJpegError, match="allocator failure"):
        decoded()
    limit = 1
    assert decoded() == [9]
    assert all_idle(hybrid)


class Engines(nvjpeg_double.BatchDecoder):
    """Engines that check that one call runs at once."""

    running = 0

    def decode_call(self, *arguments):
        type(self).running += 1
        assert type(self).running == 1
        threading.Event().wait(0.02)
        status = super().decode_call(*arguments)
        type(self).running -= 1
        return status


def test_calls_of_the_engines_do_not_overlap(monkeypatch):
    nvjpeg_double.use(monkeypatch, Engines)
    data = [[collate_encoded(FILES[1::2]), number] for number in range(6)]
    loaders = [StreamedLoader(data, [DecodeStage(backend="engines")], device="cpu") for _ in range(2)]
    with closing(iter(loaders[0])) as first, closing(iter(loaders[1])) as second:
        assert [number for (_, number), _ in zip(first, second, strict=True)] == list(range(6))


@pytest.mark.parametrize("damaged", [(1,), (3,), (1, 4), (1, 3, 4)])
def test_engines_name_the_images_that_they_refuse(monkeypatch, damaged, caplog):
    nvjpeg_double.use(monkeypatch)
    files = [encoded(20, 20, "PNG"), *(encoded(40 + number, 30, seed=number) for number in range(3)), encoded(30, 40)]
    for index in damaged:
        broken = bytearray(files[index])
        table = broken.find(b"\xff\xc4")
        broken[table + 5 : table + 21] = b"\xff" * 16  # more Huffman codes than there can be
        files[index] = bytes(broken)
    stage = DecodeStage(backend="engines", on_error="replace")
    ((images, _),) = StreamedLoader([[collate_encoded(files), 0]], [stage], device="cpu")
    assert len(images) == len(files)
    assert re.findall(r"sample (\d): nvJPEG finds: bad JPEG", caplog.text) == [str(index) for index in damaged]


def test_threads_that_call_nvjpeg_have_been_prepared_for_it(monkeypatch):
    prepared, calling = set(), set()

    def note(original, *arguments):
        calling.add(threading.current_thread())
        return original(*arguments)

    nvjpeg_double.use(monkeypatch)
    found = registry.find("auto", "a device")
    for owner, names in (
        (internals.nvjpeg_calls(found["engines"]), ["decode"]),
        (internals.nvjpeg_calls(found["hybrid"]), ["state", "host_phase", "card_phase"]),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, partial(note, getattr(owner, name)), raising=False)
    monkeypatch.setattr(nvjpeg, "enter", lambda device: prepared.add(threading.current_thread()))
    assert decoded("auto") == [9]
    # Threads of batches are prepared where the device has lanes, which a CPU has not.
    calling = {thread for thread in calling if not thread.name.startswith("gpuaug-decode_")}
    assert {thread.name.rpartition("_")[0] for thread in calling} == {"gpuaug-decode-card", "gpuaug-decode-cpu"}
    assert calling <= prepared


def test_a_call_of_the_engines_that_could_not_be_submitted_is_not_made_later(monkeypatch):
    nvjpeg_double.use(monkeypatch)
    engines, lanes = registry.find("engines", "a device")["engines"], Lanes(torch.device("cpu"))
    calls, decode = [], internals.nvjpeg_calls(engines).decode
    monkeypatch.setattr(
        internals.nvjpeg_calls(engines),
        "decode",
        lambda *call: calls.append(1) or decode(*call),
        raising=False,
    )
    scheduled, idle = Decoder("decode", lanes, DecodeStage().options, lambda _: [engines]), SimpleQueue()
    idle.put(lanes.copy)
    with closing(base.Pools(1)) as pools:
        resources, work = base.Resources(lanes, lanes.copy, idle, pools), scheduled.allocate(collate_encoded(FILES[1::2]), {})
        with monkeypatch.context() as patch:
            limit_threads(patch, 0, "gpuaug-decode-card")
            with pytest.raises(RuntimeError, match="can't start new thread"):
                engines.begin_all([(work, np.arange(4))], resources)
        engines.begin_all([(work, np.arange(4))], resources)[0]()
    assert len(calls) == 1


def test_host_memory_that_cannot_be_allocated_is_a_memory_error():
    with pytest.raises(MemoryError):
        decoder_module.allocate_pixels(2**50, torch.device("cpu"))


def test_an_error_of_a_signal_handler_is_not_an_error_about_memory(monkeypatch):
    def raising(number, frame):  # as torch's handler does when a worker of a DataLoader has died
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    class Torch:
        """Module whose ``empty`` is interrupted."""

        __getattr__ = partial(getattr, torch)

        def empty(self, *args, **options):
            signal.raise_signal(signal.SIGUSR1)

    previous = signal.signal(signal.SIGUSR1, raising)
    try:
        monkeypatch.setattr(decoder_module, "torch", Torch())
        with pytest.raises(RuntimeError, match="killed by signal"):
            decoded("cpu")
    finally:
        signal.signal(signal.SIGUSR1, previous)
