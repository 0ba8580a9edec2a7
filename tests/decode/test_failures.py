"""Failures of threads, of the card and of decoders: raised at their batch when nothing uses its memory or files any more."""

import threading

import pytest
from support import nvjpeg_double
from support.encoded import encoded
from support.waiting import WAIT_S

from gpuaug import DecodeStage, StreamedLoader, collate_encoded
from gpuaug.core.streams import InLineLane
from gpuaug.decode import nvjpeg
from gpuaug.decode.decoders import base, cpu, registry
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
    return all(pool.idle.qsize() == len(pool.made) for pool in decoder._pools.values())


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


def limit_threads(patch, most):
    """Have pools start no more than this number of threads that decode on the CPU."""
    start = threading.Thread.start

    def limited(thread):
        if thread.name.startswith("gpuaug-decode-cpu") and int(thread.name.rpartition("_")[2]) >= most:
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", limited)


@pytest.mark.timeout(WAIT_S)
@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("backend", ["hybrid", "cpu"])
def test_too_few_threads_fail_the_batch_after_its_images(hybrid, monkeypatch, backend, most):
    begun, ended = [], []
    for owner, name in ((hybrid._decoder, "host_phase"), (cpu, "decode")):
        original = getattr(owner, name)

        def counted(*arguments, original=original):
            begun.append(1)
            threading.Event().wait(0.02)
            result = original(*arguments)
            ended.append(1)
            return result

        monkeypatch.setattr(owner, name, counted, raising=False)
    close = base.Pools.close

    def checked(pools):
        assert len(begun) == len(ended), "an image was being decoded when the batch failed"
        close(pools)

    monkeypatch.setattr(base.Pools, "close", checked)
    with monkeypatch.context() as patch:
        limit_threads(patch, most)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            decoded(backend)
    assert len(begun) < len(FILES)
    assert all_idle(hybrid)
    assert decoded(backend) == [9]


@pytest.mark.timeout(WAIT_S)
@pytest.mark.parametrize("most", [1, 48])
@pytest.mark.parametrize("fails", ["record_event", "synchronize"])
def test_a_card_that_fails_between_phases_leaves_no_state_in_use(hybrid, monkeypatch, fails, most):
    monkeypatch.setattr(hybrid_module, "MOST_STATES", most)
    card_phase, queued = hybrid._decoder.card_phase, []

    def counted(*arguments):
        queued.append(1)
        card_phase(*arguments)

    def fail(*_, **__):
        if queued:
            raise RuntimeError("CUDA error")
        return event

    event = InLineLane("a lane").record_event()
    with monkeypatch.context() as patch:
        patch.setattr(hybrid._decoder, "card_phase", counted, raising=False)
        patch.setattr(*((InLineLane, fails) if fails == "record_event" else (type(event), fails)), fail)
        with pytest.raises(RuntimeError, match="CUDA error"):
            decoded()
    assert all_idle(hybrid)
    assert decoded() == [9]


@pytest.mark.timeout(WAIT_S)
def test_an_error_of_one_decoder_comes_when_the_others_have_ended(hybrid, monkeypatch):
    decode, ended, released = cpu.decode, [], threading.Event()

    def late(*arguments):
        assert released.wait(WAIT_S)
        result = decode(*arguments)
        ended.append(1)
        return result

    def fail(*arguments):
        threading.Timer(0.05, released.set).start()
        raise RuntimeError("it does not begin")

    monkeypatch.setattr(cpu, "decode", late)
    monkeypatch.setattr(type(hybrid), "begin", fail)
    close = base.Pools.close

    def checked(pools):
        assert len(ended) == 2, "the batch failed while its images were being decoded"
        close(pools)

    monkeypatch.setattr(base.Pools, "close", checked)
    with pytest.raises(RuntimeError, match="it does not begin"):
        decoded(files=[*FILES[:2], encoded(20, 20, "PNG"), encoded(30, 20, "PNG")])
