"""Batches without an end, over the epochs of a loader."""

import threading

import pytest
from protocol.scenarios import install, script_arrivals
from support.profiler.profiler_sources import HostBatches

from gpuaug import StreamedLoader
from gpuaug.profiler.steady_state import EndlessBatches


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 10, 11, 12, 13, 40])
def test_pull_after_an_end_that_was_read_ahead_does_not_block(monkeypatch, count):
    cuda = install(monkeypatch, keeps_up=True)
    passes, pulled = EndlessBatches(StreamedLoader(HostBatches(cuda, count), device="cuda", feed="plain")), []
    with passes:
        for taken in range(1, 16):
            passes.next(2)
            thread = threading.Thread(target=lambda: pulled.append(passes.pull()), daemon=True)
            thread.start()
            thread.join(60)
            assert len(pulled) == taken, "it waits for what never comes"


@pytest.mark.parametrize("loaders_own", [0, 2, 5])
def test_batches_are_launched_as_far_ahead_as_each_call_says(monkeypatch, loaders_own):
    cuda = install(monkeypatch, keeps_up=True)
    script_arrivals(monkeypatch, [True])
    loader = StreamedLoader(HostBatches(cuda, 6), device="cuda", feed="plain", depth=loaders_own)
    passes, ready = EndlessBatches(loader), []
    with passes:
        for depth in (0, 0, 2, 2, 0, 0, 2, 0):  # the seventh batch is the first of an epoch
            passes.next(depth)
            assert loader.stats().depth == depth
            ready.append(loader.stats().ready)
    assert ready == [0, 0, 2, 2, 1, 0, 2, 1]
