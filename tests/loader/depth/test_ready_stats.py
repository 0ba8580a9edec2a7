"""What is counted of the depth, and the clock of the double that these tests turn."""

import pytest
import torch
from protocol.scenarios import Source, script_arrivals
from support.stream_double import HostBuffer

from gpuaug import StreamedLoader
from gpuaug.loader.depth import AHEAD


def ready(cuda, **options):
    loader = StreamedLoader(Source(cuda, 5), device="cuda", **options)
    assert (loader.stats().depth, loader.stats().ready) == (0, 0)
    found = [loader.stats().ready for _ in loader]
    return found, loader.stats().depth


@pytest.mark.parametrize(
    ("given", "expected"), [(0, [0] * 5), (1, [1, 1, 1, 1, 0]), (2, [2, 2, 2, 1, 0]), ("auto", [2, 2, 2, 1, 0])]
)
def test_stats_ready_counts_batches_behind_the_given_one(cuda, given, expected):
    assert ready(cuda, depth=given) == (expected, AHEAD if given == "auto" else given)


def test_stats_ready_is_0_with_slow_loader(cuda, monkeypatch):
    script_arrivals(monkeypatch, [False])
    assert ready(cuda, depth=2) == ([0] * 5, 2)


def test_stats_ready_is_0_on_cpu():
    loader = StreamedLoader(torch.arange(4), device="cpu", depth=2)
    assert [loader.stats().ready for _ in loader] == [0] * 4


# The double's clock


def test_stream_double_events_measure_elapsed_time(cuda):
    cuda.keeps_up = False
    first, last, silent = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True), cuda.Event()
    for event in (first, last, silent):
        cuda.write(HostBuffer(cuda, "x", []).to("cuda"))
        event.record()
        cuda.now_ms += 3
    with pytest.raises(RuntimeError, match="not ready"):
        first.elapsed_time(last)
    silent.synchronize()
    assert first.elapsed_time(last) == 3
    with pytest.raises(ValueError, match="enable_timing"):
        first.elapsed_time(silent)
