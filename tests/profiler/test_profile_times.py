"""``gpuaug.profile`` on a CPU and a virtual clock: planted times are found, exactly, where they were planted."""

from contextlib import closing
from itertools import pairwise

import pytest
import torch
from support.profiler import virtual_clock
from support.profiler.profiler_sources import SHORT, Numbers
from support.profiler.virtual_clock import Workers
from torch.utils.data import DataLoader

import gpuaug
from gpuaug import StreamedLoader, TransformStage
from gpuaug.profiler import profile
from gpuaug.profiler.recorder import THREAD

STEP_MS = 1
"""A step that takes no time has no headspace."""


@pytest.fixture
def clock(monkeypatch):
    return virtual_clock.install(monkeypatch)


@pytest.fixture
def recorded(monkeypatch):
    """All spans of the last report's recording. Its timeline shows ten batches of them."""
    found, by_part = [], profile._thread_ms_by_part

    def kept(spans):
        found[:] = spans
        return by_part(spans)

    monkeypatch.setattr(profile, "_thread_ms_by_part", kept)
    return found


class Decoded(Numbers):
    """Samples of which two take so many milliseconds."""

    def __init__(self, clock, batch_ms, count=180):
        super().__init__(count)
        self.clock, self.sample_s = clock, batch_ms / 2e3

    def __getitem__(self, index):
        self.clock.sleep(self.sample_s)
        return super().__getitem__(index)


def loading(clock, batch_ms, workers, **options):
    """A source that gives a batch every ``batch_ms``."""
    if workers:  # side by side
        return Workers(clock, batch_ms * workers, workers, **options)
    return DataLoader(Decoded(clock, batch_ms), batch_size=2)


def approx(ms):
    return pytest.approx(ms, rel=1e-6, abs=1e-6)


def assert_ten_batches_are_shown(report, recorded):
    """The timeline has all spans of ten batches, numbered through. Times by part are those of one batch."""
    lanes = report.timeline.lanes()
    assert list(lanes) == ["loader", "thread"]
    batches = sorted({span.batch for span in report.timeline.spans})
    assert batches == list(range(batches[0], batches[0] + 10))
    for lane, name in (("loader", "load"), *(("thread", part.name) for part in report.parts[1:])):
        assert [span.batch for span in lanes[lane] if span.name == name] == batches, name
    for part in report.parts[1:]:
        of = [span.end_ms - span.start_ms for span in recorded if (span.lane, span.name) == (THREAD, part.name)]
        assert report.thread_ms[part.name] == approx(min(of)) == approx(max(of))
    steps = [span for span in lanes["thread"] if span.name == "step"]
    assert all(before.end_ms <= after.start_ms for before, after in pairwise(steps))


PLANTED = {
    "loader": (24, 10, 10, "Bounded by the loader: {who} "),
    "stage": (10, 20, 10, "Bounded by the training thread, most of all by transform 'planted' (20 of 30 ms). "),
    "step": (10, 10, 20, "Bounded by the training thread, most of all by the training step (20 of 30 ms). "),
}


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("longest", PLANTED)
def test_planted_times_are_found(longest, workers, clock, recorded):
    load_ms, stage_ms, step_ms, bound = PLANTED[longest]
    who = {0: "without workers it loads", 1: "1 worker loads", 2: "2 workers load"}[workers]
    loader = StreamedLoader(
        loading(clock, load_ms, workers), [TransformStage(clock.working(stage_ms), name="planted")], device="cpu"
    )
    report = gpuaug.profile(loader, clock.working(step_ms), **SHORT)
    alone = {part.name: part.wall.median for part in report.parts}
    assert alone == approx({"load": load_ms, "copy": 0, "stage/planted": stage_ms, "step": step_ms})
    assert [part.host for part in report.parts] == [None, *(part.wall for part in report.parts[1:])]
    on_thread = stage_ms + step_ms
    # Batches are pulled beside the training thread, and on a CPU all else is done in line on it.
    assert [report.streamed.median, report.in_line.median] == approx([max(load_ms, on_thread)] * 2)
    assert [report.bound_ms, report.full_ms] == approx([max(load_ms, on_thread)] * 2)
    assert report.cached.median == approx(step_ms)
    assert report.serial_ms == approx(load_ms + on_thread)
    assert report.exposed_ms == approx(max(load_ms, on_thread) - step_ms)
    assert report.epoch_ms == 0
    assert report.overlap_efficiency == approx(1)
    assert (report.copy_ms, report.device_ms, report.pageable_bytes, report.link_gb_per_s) == (0, 0, 0, None)
    assert report.verdict[0].startswith(bound.format(who=who))
    thread_ms = {"wait for loader": 0.0, **report.thread_ms}
    waited_ms = thread_ms.pop("wait for loader")
    assert thread_ms == approx({"copy": 0, "stage/planted": stage_ms, "wait": 0, "step": step_ms})
    if longest == "loader" and workers:  # which have batches ready when the recording begins
        assert 0 < waited_ms < load_ms - on_thread
    else:
        assert waited_ms == approx(max(0, load_ms - on_thread))
    assert (" ms per batch for the loader\n" in str(report)) == (longest == "loader")
    assert report.settings == {
        "device": "CPU",
        "depth": "in line",
        "feed": "plain (the device is cpu)",
        "workers": workers,
        "batches": 8,
        "rounds": 1,
    }
    assert_ten_batches_are_shown(report, recorded)


def test_a_slow_batch_in_eight_is_found(clock):
    class Uneven:
        def __iter__(self):
            for batch in range(180):
                clock.sleep(0.06 if batch % 8 == 7 else 0)
                yield torch.ones(2)

    report = gpuaug.profile(StreamedLoader(Uneven(), device="cpu"), clock.working(10), batches=16, rounds=2, show=False)
    assert report.load_ms == approx(60 / 8)
    waits_ms = [ms for ms in report.waits_for_loader_ms if ms]
    assert len(report.waits_for_loader_ms) == 2 * 16
    assert waits_ms == [approx(8 * (report.streamed.median - 10))] * 4
    assert report.verdict == (
        "Bounded by the training thread, most of all by the training step (10 of 10 ms).",
        f"The training thread waited {waits_ms[0]:.0f} ms or more for one batch in 8, although the loader loads a "
        "batch every 7.5 ms on average. "
        "Look for slow samples, or pass num_workers to the DataLoader.",
    )


def test_windows_differ_as_their_steps_do(clock):
    def step(batch):
        steps.append(batch)
        clock.sleep(len(steps) / 1e3)

    steps = []
    loader = StreamedLoader(loading(clock, 0, 0), device="cpu")
    streamed = gpuaug.profile(loader, step, batches=8, rounds=3, show=False).streamed
    # Each step takes a millisecond more than the one before: three windows of eight, and two of another kind between.
    apart = [streamed.median - streamed.low, streamed.high - streamed.median]
    assert apart == [approx(3 * 8 + 2 * 6)] * 2


@pytest.mark.parametrize(("step_ms", "counted"), [(1000, 8), (500, 10), (100, 40)])
def test_a_window_ends_after_five_seconds_if_it_has_eight_batches(step_ms, counted, clock, monkeypatch):
    done, repeat = [], profile._Profile._repeat

    def counting(self, once):
        repeat(self, once)
        done.append(self._window_batches)

    monkeypatch.setattr(profile._Profile, "_repeat", counting)
    loader = StreamedLoader(loading(clock, 0, 0), device="cpu")
    report = gpuaug.profile(loader, clock.working(step_ms), batches=40, rounds=1, show=False)
    assert done == [40, counted, counted, counted], "the loader alone, streamed, in line, and the step alone"
    assert report.streamed.median == approx(step_ms)


def test_epoch_start_is_told_apart_from_loading(clock):
    loader = StreamedLoader(loading(clock, 10, 1, start_ms=300, count=3), device="cpu")
    report = gpuaug.profile(loader, clock.working(STEP_MS), batches=9, rounds=2, show=False)
    assert report.waits_for_loader_ms == approx([9, 9] * 6), "without the first of each epoch"
    # Nine batches are three epochs. Each waits for its worker and for the first batch, and then for two more.
    assert report.epoch_ms == approx(3 * (300 + 10) / 9)
    assert report.load_ms == approx(6 * 10 / 9)
    assert report.streamed.median == approx(3 * (300 + 3 * 10 + STEP_MS) / 9)
    assert report.verdict[0] == (
        "Bounded by the beginning of epochs: 103 of the 110 ms per batch are spent on starting epochs. "
        "Pass persistent_workers=True to the DataLoader, or make epochs longer."
    )


def test_epochs_that_are_longer_than_the_profile_cost_nothing(clock):
    loader = StreamedLoader(loading(clock, 10, 1, start_ms=300), device="cpu")
    report = gpuaug.profile(loader, clock.working(STEP_MS), **SHORT)
    assert (report.epoch_ms, report.load_ms) == (0, approx(10))


def test_epochs_that_began_before_a_window_are_not_counted_in_it(clock):
    loader = StreamedLoader([0] * 90, device="cpu")
    measurements = profile._Profile(loader, clock.working(STEP_MS), 8, 1)
    measurements._batches.epoch_start_s = 5.0
    with closing(measurements._batches):
        assert measurements._time_streamed() == approx(STEP_MS)
        assert measurements._time_loader() == approx(0)
    assert measurements._epoch_start_ms == [0.0]


@pytest.mark.parametrize("count", [1, 3, 8, 11])
@pytest.mark.parametrize("workers", [None, 0, 1], ids=["list", "loader", "worker"])
def test_a_window_spans_short_epochs(workers, count, clock, recorded):
    if workers is None:
        source, load_ms = [(0, 1)] * count, 0
    else:
        source = Workers(clock, 2, 1, count=count) if workers else DataLoader(Decoded(clock, 2, 2 * count), batch_size=2)
        load_ms = 2
    report = gpuaug.profile(StreamedLoader(source, [clock.working(2)], device="cpu"), clock.working(2), **SHORT)
    assert_ten_batches_are_shown(report, recorded)
    # Beginning an epoch lasts until its first batch is there, stages and all. Others are pulled beside stages and steps.
    began = report.epoch_ms * 8 / (load_ms + 2)
    assert began == approx(round(began))
    assert 8 // count <= round(began) <= -(-8 // count)
    assert report.streamed.median == approx(report.epoch_ms + 2 * (8 - began) / 8 + 2)


@pytest.mark.parametrize(("depth", "ahead", "text"), [(0, 2, "2 (loader: 0)"), (1, 1, 1), (5, 5, 5)])
def test_depth_that_is_measured(depth, ahead, text, clock, recorded):
    loader = StreamedLoader([0] * 7, device="cpu", depth=depth)
    measurements = profile._Profile(loader, clock.working(STEP_MS), 8, 1)
    assert (measurements._ahead, measurements._depth_text) == (ahead, text)
    report = gpuaug.profile(loader, clock.working(STEP_MS), **SHORT)
    assert (report.settings["depth"], report.timeline.depth) == ("in line", 0), "on a CPU"
    assert loader.depth == depth
    assert_ten_batches_are_shown(report, recorded)
