"""What ``depth="auto"`` makes of its own measurements, and when."""

import itertools
import threading

import pytest
from protocol.scenarios import Source, install, script_arrivals
from support.depth_tuning import ALL, MEASURING, TURNS, Training, augment, auto, decided, measured

from gpuaug import StreamedLoader
from gpuaug.core import streams
from gpuaug.loader.depth import AHEAD, COUNT, ROUNDS, SETTLE, WARM
from gpuaug.loader.state import RunAheadLimit


@pytest.mark.parametrize(
    ("streamed_ms", "in_line_ms", "chosen"),
    [(8, 10, AHEAD), (10, 8, 0), (10, 10, AHEAD), (10, 9.95, AHEAD), (10, 10.04, AHEAD), (10, 9.81, AHEAD), (10, 9.79, 0)],
)
def test_tuner_keeps_the_faster_depth_and_streams_on_a_tie(cuda, streamed_ms, in_line_ms, chosen):
    training = measured(cuda, streamed_ms, in_line_ms)
    loader = training.loader
    assert loader._depth.streamed_ms == pytest.approx([streamed_ms] * ROUNDS)
    assert loader._depth.in_line_ms == pytest.approx([in_line_ms] * ROUNDS)
    way = "streamed" if chosen else "in line"
    assert decided(loader) == f"'auto' ({way}: {in_line_ms:.3g} ms a batch in line, {streamed_ms:.3g} streamed)"
    assert loader.depth == "auto"
    assert loader.stats().depth == chosen
    assert training.depths[-1] == chosen
    training.depths.clear()
    training.epoch()
    assert set(training.depths) == {chosen}, "for good"
    assert not cuda.history.violations, cuda.history.report()


def test_tuner_alternates_windows_beginning_with_streaming(cuda):
    training = measured(cuda, 10, 8)
    runs = [(now, len(list(batches))) for now, batches in itertools.groupby(training.depths)]
    window = SETTLE + COUNT
    # A window ends with the mark before the batch that follows it. Behind the last it goes on as it was, until it decides.
    depths = [AHEAD] * (WARM - 1) + [TURNS[number] for number in range(2 * ROUNDS) for _ in range(window)] + [TURNS[-1]]
    expected = [(now, len(list(batches))) for now, batches in itertools.groupby(depths)]
    assert TURNS[:4] == [AHEAD, 0, 0, AHEAD]
    assert runs == [*expected, (0, 10)]


@pytest.mark.parametrize("period", [2, 4])
def test_tuner_is_not_biased_by_periodic_slow_batches(cuda, period):
    training = Training(cuda, auto(cuda, ALL + 10), 10, 10)
    for number, _ in enumerate(training.loader):
        cuda.now_ms += 30 if number % period == 0 else 10
    found = training.loader._depth
    assert sum(found.streamed_ms) == pytest.approx(sum(found.in_line_ms))
    assert decided(training.loader).startswith("'auto' (streamed: ")


@pytest.mark.parametrize("growth", [0.999, 1.001])
def test_tuner_is_not_biased_by_drift(cuda, growth):
    training = Training(cuda, auto(cuda, ALL + 10), 10, 10)
    for number, _ in enumerate(training.loader):
        cuda.now_ms += 10 * growth**number
    found = training.loader._depth
    assert sum(found.streamed_ms) == pytest.approx(sum(found.in_line_ms), rel=1e-3)
    assert decided(training.loader).startswith("'auto' (streamed: ")


@pytest.mark.parametrize("slow", range(2 * ROUNDS))
def test_tuner_with_one_slow_window(cuda, slow):
    training = Training(cuda, auto(cuda, ALL + 10), 10, 8)
    held_up = WARM + slow * (SETTLE + COUNT) + SETTLE + COUNT // 2
    batches = iter(training.loader)
    for number, _ in enumerate(batches, start=1):
        now = training.loader.stats().depth
        cuda.now_ms += 5000 if number == held_up else training._ms[now]
    streamed = TURNS[slow] == AHEAD
    found = training.loader._depth.streamed_ms if streamed else training.loader._depth.in_line_ms
    assert [window > 100 for window in found] == [number == slow for number, now in enumerate(TURNS) if now == TURNS[slow]]
    way = "in line" if streamed else "streamed"
    assert decided(training.loader) == f"'auto' ({way}: 8 ms a batch in line, 10 streamed)"


def test_only_tuning_events_are_timed(cuda, monkeypatch):
    timed, real = [], cuda.Event

    def event(**options):
        timed.append(options["enable_timing"])
        return real(**options)

    monkeypatch.setattr(streams, "_CudaEvent", event)
    training = measured(cuda, 8, 10)
    assert sum(timed) == ALL + 1, "one for each batch, and that by which it decided"
    timed.clear()
    training.epoch()
    assert timed
    assert not any(timed)


# When it decides


@pytest.mark.parametrize(("streamed_ms", "in_line_ms"), [(8, 10), (10, 8)])
def test_tuner_adds_no_host_waits(monkeypatch, streamed_ms, in_line_ms):
    waited = {}
    for setting in (2, "auto"):
        cuda = install(monkeypatch)
        script_arrivals(monkeypatch, [True])
        loader = StreamedLoader(Source(cuda, ALL + 30), [augment(cuda)], device="cuda", depth=setting)
        training = Training(cuda, loader, streamed_ms, in_line_ms)
        assert training.epoch() == list(range(ALL + 30))
        assert cuda.history.syncs == loader.stats().held_back, "for the bound on its run-ahead, and for nothing else"
        assert not cuda.history.violations, cuda.history.report()
        waited[setting] = cuda.history.syncs
    assert set(training.depths) == {0, AHEAD}
    assert "still" not in decided(loader)
    assert waited["auto"] <= waited[2]


def test_tuner_decides_only_after_the_device_has_passed_its_events(cuda, monkeypatch):
    cuda.keeps_up = False
    monkeypatch.setattr(RunAheadLimit, "keep", lambda self, mark, ahead: None)
    training = Training(cuda, auto(cuda, ALL + 30), 10, 8)
    batches = iter(training.loader)
    for number, _ in enumerate(batches, start=1):
        cuda.now_ms += training._ms[training.loader.stats().depth]
        if number <= ALL + 10:
            assert decided(training.loader) == MEASURING
        cuda.keeps_up = number >= ALL + 10
    assert decided(training.loader).startswith("'auto' (in line: 8 ms")
    assert cuda.history.syncs == 0


def test_tuner_decides_only_after_its_last_window(cuda):
    training = Training(cuda, auto(cuda, ALL - 1), 10, 8)
    training.epoch()
    assert training.loader._depth.in_line_ms == []
    assert decided(training.loader) == MEASURING
    training.epoch(most=2)
    assert decided(training.loader).startswith("'auto' (in line: 8 ms")


# Epochs


@pytest.mark.parametrize("most", [None, 33], ids=["to the end", "left by break"])
def test_tuner_restarts_windows_cut_short_by_an_epoch(cuda, most):
    training = Training(cuda, auto(cuda, 40), 10, 8)
    left, warming = 2 * ROUNDS, WARM
    while left > 0:
        assert decided(training.loader) == MEASURING
        numbers = training.epoch(most)
        assert numbers == list(range(numbers[0], numbers[0] + (most or 40)))
        asked = most or 41  # the end is found by asking too
        left, warming = left - (asked - warming) // (SETTLE + COUNT), 0
    assert training.loader._depth.streamed_ms == pytest.approx([10] * ROUNDS)
    assert training.loader._depth.in_line_ms == pytest.approx([8] * ROUNDS)
    assert decided(training.loader) == "'auto' (in line: 8 ms a batch in line, 10 streamed)"
    assert not cuda.history.violations, cuda.history.report()


def test_tuner_streams_epochs_shorter_than_a_window(cuda):
    training = Training(cuda, auto(cuda, 5), 10, 8)
    for epoch in range(40):
        assert training.epoch() == list(range(5 * epoch, 5 * epoch + 5))
    assert decided(training.loader) == MEASURING
    assert set(training.depths) == {AHEAD}
    assert not cuda.history.violations, cuda.history.report()


def test_tuner_does_not_measure_two_open_iterators(cuda):
    loader = auto(cuda, ALL + 10)
    received = [[], []]
    for pair in zip(loader, loader, strict=True):
        for numbers, (images, _) in zip(received, pair, strict=True):
            cuda.read(images)
            numbers.append(images.batch)
        cuda.now_ms += 1
    assert all(numbers == sorted(numbers) for numbers in received)
    assert sorted(received[0] + received[1]) == list(range(2 * (ALL + 10)))
    assert decided(loader) == MEASURING
    assert loader.stats().depth == AHEAD
    assert not cuda.history.violations, cuda.history.report()
    training = Training(cuda, loader, 10, 8)
    training._warming = 0
    training.epoch()
    assert loader._depth.streamed_ms == pytest.approx([10] * ROUNDS)
    assert decided(loader).startswith("'auto' (in line: 8 ms"), "one by itself is"


def test_iterator_left_during_tuning_ends_its_thread(monkeypatch):
    loader = auto(install(monkeypatch), 8)
    before = set(threading.enumerate())
    batches = iter(loader)
    next(batches)
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["gpuaug-feed"]
    del batches
    assert set(threading.enumerate()) <= before
    assert len(list(loader)) == 8
