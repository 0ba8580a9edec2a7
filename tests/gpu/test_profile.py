"""``gpuaug.profile`` on a real device: work of known length is found where it was put, and named as what it is.

Where the host's time matters, it has a clock of its own. A device's times are its events', which a busy host does not change.
Other processes on the device can make any of them longer, and none shorter, so no test compares
measurements of different moments.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support import internals
from support.comparison.values import assert_values
from support.profiler import virtual_clock
from support.profiler.profiler_reports import spread
from support.profiler.profiler_sources import Numbers
from torch.utils.data import DataLoader

import gpuaug
from bench.harness.result_check import check_result
from gpuaug import FeatureStage, StreamedLoader, TransformStage
from gpuaug.benchkit import results
from gpuaug.profiler.verdict import verdict

pytestmark = pytest.mark.gpu

SHORT = {"batches": 8, "rounds": 1, "show": False}
MB = 1_000_000


@pytest.fixture(scope="module")
def sleep():
    """Queues a kernel that does nothing for so many milliseconds. It takes one multiprocessor, so two lanes' overlap."""
    cycles = 20_000_000
    torch.cuda._sleep(10 * cycles)  # to the clock that it will have
    took_ms = []
    for _ in range(5):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        torch.cuda._sleep(cycles)
        last.record()
        last.synchronize()
        took_ms.append(first.elapsed_time(last))
    per_ms = cycles / min(took_ms)  # another process on the card can only make it longer
    return lambda ms: torch.cuda._sleep(int(ms * per_ms))


@pytest.fixture
def clock(monkeypatch):
    return virtual_clock.install(monkeypatch)


@pytest.fixture
def profiled(sleep):
    """The report on a loader whose stages, and whose step, take so many milliseconds of the device."""

    def run(stages_ms, step_ms, **settings):
        loader = StreamedLoader(images(), [sleeping(sleep, name, ms) for name, ms in stages_ms.items()])
        return gpuaug.profile(loader, lambda batch: sleep(step_ms), **{**SHORT, **settings})

    return run


def images(count=120, size=32):
    """Pinned batches of images and labels: as many as a profile takes, so that no epoch begins within a window."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.rand(8, 3, size, size, generator=generator).pin_memory(), (torch.arange(8) + index).pin_memory())
        for index in range(count)
    ]


def sleeping(sleep, name, ms):
    def stage(x):
        sleep(ms)
        return x + 1

    return TransformStage(stage, name=name)


def check_rows(report):
    check_result(results.result("profile", rows=report.rows(), settings=report.settings, device=torch.device("cuda")))


@pytest.mark.usefixtures("clock")
def test_planted_device_times_are_found(profiled):
    report = profiled({"slow": 6}, 6)
    assert [part.name for part in report.parts] == ["load", "copy", "stage/slow", "step"]
    for name in ("stage/slow", "step"):
        part = report.part(name)
        assert part.device_ms >= 0.8 * 6
        assert part.host.median == 0, "queueing takes none of the planted time"
        assert part.waits_at is None
        assert part.kind == ""
    assert report.part("step").launches == 1
    assert report.part("stage/slow").launches == 2
    assert report.part("load").host is None
    assert report.part("copy").launches == 2
    assert report.full_ms == report.device_ms == report.part("stage/slow").device_ms + report.part("step").device_ms
    assert report.bound_ms == max(report.part("stage/slow").device_ms, report.part("step").device_ms)
    assert report.cached.low >= 0.8 * 6
    assert report.in_line.low >= 0.8 * 12
    assert report.streamed.low >= 0.8 * 6
    assert report.batch_bytes == 8 * 3 * 32 * 32 * 4 + 8 * 8
    assert report.pageable_bytes == 0
    assert report.settings["device"] == torch.cuda.get_device_name()
    beside = report.streamed.median < 0.9 * report.device_ms
    assert (": it keeps the device busy for " in report.verdict[0]) == beside
    assert report.verdict[0].startswith("GPU saturated: stages (") == (not beside)
    check_rows(report)


@pytest.mark.usefixtures("clock")
def test_stages_and_a_step_that_each_fill_the_device_saturate_it():
    matrix = torch.rand(4096, 4096, device="cuda")  # a product of its own fills the device

    def stage(x):
        matrix @ matrix
        return x

    report = gpuaug.profile(StreamedLoader(images(), [TransformStage(stage)]), lambda batch: matrix @ matrix, **SHORT)
    assert report.full_ms == report.device_ms > report.bound_ms
    for share, sentence in ((1.0, "GPU saturated: stages ("), (0.8, "Bounded by ")):
        took = replace(report, streamed=spread(share * report.device_ms))
        assert next(verdict(took)).startswith(sentence)


@pytest.mark.usefixtures("clock")
def test_a_step_that_fills_the_device_has_nothing_to_gain(profiled):
    assert profiled({"quick": 0.1}, 12).verdict[0].startswith("Bounded by the training step: it keeps the device busy for ")


def test_a_transform_of_many_launches_is_named_with_their_number():
    def many(x):
        for _ in range(300):
            x = x + 1
        return x

    loader = StreamedLoader(images(), [TransformStage(many, name="many"), TransformStage(lambda x: x * 2, name="few")])
    report = gpuaug.profile(loader, lambda batch: batch[0].sum(), **SHORT)
    part = report.part("stage/many")
    assert part.launches == 300
    assert part.device_ms < part.host.median
    assert report.verdict[0].startswith("Bounded by launches on the training thread: 300 of them in transform 'many' (")
    assert report.verdict[0].endswith(
        " ms). Use fewer and larger operations in the transform, or compile it with torch.compile."
    )
    assert report.thread_ms["stage/many"] > report.thread_ms["stage/few"]


def waits(x):
    return x + sum(x.mean().item() for _ in range(50))


def trains_and_waits(batch):
    return [batch[0].sum().item() for _ in range(50)]


def line(function):
    """Where the only line of a function is."""
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno + 1}"


def test_a_stage_that_makes_the_host_wait_is_named_with_its_line():
    mode = torch.cuda.get_sync_debug_mode()
    loader = StreamedLoader(images(), [TransformStage(waits, name="waits")])
    report = gpuaug.profile(loader, lambda batch: batch[0].sum(), **SHORT)
    assert report.part("stage/waits").waits_at == line(waits)
    assert report.part("step").waits_at is None
    first, second, *_ = report.verdict
    assert first.startswith("Bounded by the training thread, which waits for the device in transform 'waits' (")
    assert first.endswith(f" ms), at {line(waits)}.")
    assert second.startswith(f"Host synchronisation inside transform 'waits', at {line(waits)}: ")
    assert second.endswith(" ms per batch. Keep values on the device: streams cannot overlap work that the host waits for.")
    assert torch.cuda.get_sync_debug_mode() == mode


def test_a_step_that_makes_the_host_wait_is_named_with_its_line():
    report = gpuaug.profile(StreamedLoader(images(), [lambda x: x + 1]), trains_and_waits, **SHORT)
    assert report.part("step").waits_at == line(trains_and_waits)
    assert report.part("stage/transform").waits_at is None
    first, second, *_ = report.verdict
    assert first.startswith("Bounded by the training thread, which waits for the device in the training step (")
    assert second.startswith(f"Host synchronisation inside the training step, at {line(trains_and_waits)}: ")
    assert second.endswith(" ms per batch.")


def test_a_pageable_source_is_named():
    source = [torch.ones(4, MB) for _ in range(4)]
    with pytest.warns(gpuaug.GpuAugWarning, match="not page-locked"):
        report = gpuaug.profile(StreamedLoader(source, feed="plain"), lambda batch: batch[0].sum(), **SHORT)
    assert report.pageable_bytes == report.batch_bytes == 16 * MB
    (said,) = [text for text in report.verdict if text.startswith("Pageable source")]
    assert said == (
        "Pageable source: 16 MB per batch are not page-locked, so the training thread waits for the copy. "
        "Pass pin_memory=True to the DataLoader, or leave feed='auto'."
    )


@pytest.mark.usefixtures("clock")
def test_large_batches_before_a_small_step_are_bounded_by_the_link():
    source = [torch.ones(64 * MB, dtype=torch.uint8).pin_memory()] * 8
    report = gpuaug.profile(StreamedLoader(source), lambda batch: batch[:64].sum(), **SHORT)
    assert report.batch_bytes == 64 * MB
    assert report.verdict[0].startswith("Bounded by the link: 64 MB per batch take ")
    assert report.bound_ms == report.copy_ms
    assert report.copy_gb_per_s == pytest.approx(64 / report.copy_ms)
    assert report.link_gb_per_s > 0
    assert " GB/s; 64 MB copies reach " in str(report)
    check_rows(report)


def test_workers_come_through_the_ring():
    loader = StreamedLoader(DataLoader(Numbers(480), batch_size=4, num_workers=2), [lambda x: x + 1])
    report = gpuaug.profile(loader, lambda batch: batch[0].sum(), **SHORT)
    assert (report.settings["workers"], report.settings["feed"]) == (2, "ring")
    assert report.load_ms > 0
    assert report.pageable_bytes == 0, "the feed's slots are page-locked"


def test_the_timeline_shows_ten_batches_on_their_way_in_order(profiled):
    report = profiled({"first": 2, "second": 1}, 3)
    lanes = report.timeline.lanes()
    assert list(lanes) == ["loader", "thread", "copy", "stage/first", "stage/second", "consumer"]
    shown = sorted({span.batch for span in report.timeline.spans})
    assert shown == list(range(shown[0], shown[0] + 10))
    way = []
    for lane, name in (*[(lane, lane) for lane in ("copy", "stage/first", "stage/second")], ("consumer", "step")):
        found = [span for span in lanes[lane] if span.name == name]
        assert [span.batch for span in found] == shown, lane
        assert not any(span.waits for span in found)
        way.append(found)
    for ms, (before, after) in zip((2, 1, 3), pairwise(way), strict=True):
        for earlier, later in zip(before, after, strict=True):
            assert earlier.end_ms <= later.start_ms + 0.05, (earlier, later)
            assert later.end_ms - later.start_ms >= 0.8 * ms, later
    steps = way[-1]
    for earlier, later in pairwise(steps):
        assert earlier.end_ms <= later.start_ms + 0.05, "there is one stream that trains"
    assert {span.name for span in lanes["consumer"] if span.waits} == {"wait"}
    assert {span.name for span in lanes["thread"]} >= {"copy", "stage/first", "stage/second", "wait", "step"}


def test_a_captured_stage_is_profiled_captured_and_left_as_it_was():
    torch.manual_seed(0)
    encoder = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Conv2d(channels, 8, 3, padding=1), torch.nn.ReLU()) for channels in (3, 8, 8, 8, 8, 8)]
    )
    stage = FeatureStage(encoder.cuda().requires_grad_(False), name="encode")
    noisy = TransformStage(lambda x: x + torch.rand_like(x), name="noisy")
    loader = StreamedLoader(images(8), [noisy, stage], seed=1)
    runner = internals.runner(loader, 1)

    def epoch(number):
        loader.set_epoch(number)
        return [tuple(part.clone() for part in batch) for batch in loader]

    before = [epoch(number) for number in range(2)]
    graphs, counted = dict(internals.graphs(runner)), loader.stats().batches
    assert len(graphs) == 1
    loader.set_epoch(1)
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    report = gpuaug.profile(loader, lambda batch: batch[0].sum() + torch.rand((), device="cuda"), **SHORT)
    assert_values(torch.get_rng_state(), states[0])
    assert_values(torch.cuda.get_rng_state(), states[1])
    part = report.part("stage/encode")
    assert part.kind == "captured"
    assert part.launches <= 6, "the input's copy, the graph, a copy of what it gives, and two for its draws"
    assert part.waits_at is None
    assert runner.eager_reason is None
    assert {key: graph.graph for key, graph in internals.graphs(runner).items()} == {
        key: graph.graph for key, graph in graphs.items()
    }
    assert loader.stats().batches == counted
    following = [tuple(part.clone() for part in batch) for batch in loader]
    for got, want in zip([epoch(0), following], before, strict=True):
        assert len(got) == len(want) == 8
        for batches in zip(got, want, strict=True):
            for pair in zip(*batches, strict=True):
                assert_values(*pair)
