"""What a recorder notes of each batch: who did what when, on the training thread, in the loader and on each lane."""

from contextlib import contextmanager

import pytest
import torch
from protocol.scenarios import SCENARIOS, Encoder, Source, install, kernel, name_lanes, run, script_arrivals
from support.gpu.stream_double import HostBuffer
from support.loader.submitting import Submitting, numbers
from support.profiler import virtual_clock
from torch import nn

from gpuaug import FeatureStage, StreamedLoader, TransformStage
from gpuaug.core.streams import Lanes
from gpuaug.loader.hooks import Hooks
from gpuaug.loader.inspection import Inspection
from gpuaug.profiler.recorder import CONSUMER, LOADER, THREAD, Recorder
from gpuaug.profiler.timeline import Span

LOAD_MS, STAGE_MS, TRAIN_MS = 10, 4, 5


@pytest.fixture
def cuda(monkeypatch):
    cuda = install(monkeypatch, keeps_up=True)
    script_arrivals(monkeypatch, [True])
    return cuda


@pytest.fixture
def clock(monkeypatch):
    return virtual_clock.install(monkeypatch)


@contextmanager
def recording(loader):
    """Let a recorder watch for the length of the block."""
    recorder = Recorder(Inspection(loader).lanes)
    with Inspection(loader).with_hooks(recorder):
        yield recorder


# On a CPU


def loading(clock, count):
    for batch in range(count):
        clock.sleep(LOAD_MS / 1e3)
        yield torch.tensor(batch)


def assert_spans(recorder, expected):
    """The spans are those, but for parts that take no time, which are on the thread."""

    def order(span):
        return round(span.start_ms, 6), span.lane, span.end_ms

    spans = sorted((span for span in recorder.spans() if span.name not in ("copy", "wait")), key=order)
    expected = sorted(expected, key=order)
    assert [(span.lane, span.name, span.batch, span.waits) for span in spans] == [
        (span.lane, span.name, span.batch, span.waits) for span in expected
    ]
    for found, wanted in zip(spans, expected, strict=True):
        assert (found.start_ms, found.end_ms) == (
            pytest.approx(wanted.start_ms, abs=1e-6),
            pytest.approx(wanted.end_ms, abs=1e-6),
        ), found
    for span in recorder.spans():
        assert span in spans or (span.lane, span.start_ms) == (THREAD, span.end_ms)


def test_spans_in_line_with_the_loader(clock, monkeypatch):
    script_arrivals(monkeypatch, [True])  # each batch is pulled on the training thread
    clock.sleep(7)
    loader = StreamedLoader(loading(clock, 3), [TransformStage(clock.working(STAGE_MS), name="slow")], device="cpu")
    with recording(loader) as recorder:
        for batch in loader:
            clock.working(TRAIN_MS)(batch)
    expected, at = [], 0
    for batch in range(3):
        trains = at + LOAD_MS + STAGE_MS
        expected.append(Span(LOADER, "load", batch, at, at + LOAD_MS))
        expected.append(Span(THREAD, "stage/slow", batch, at + LOAD_MS, trains))
        at = trains + TRAIN_MS
        expected.append(Span(THREAD, "step", batch, trains, at))
    assert_spans(recorder, expected)
    parts = [(span.name, span.batch) for span in recorder.spans() if span.lane == THREAD]
    assert parts == [(name, batch) for batch in range(3) for name in ("copy", "stage/slow", "wait", "step")]


def test_spans_beside_the_loader(clock):
    loader = StreamedLoader(loading(clock, 3), [TransformStage(clock.working(STAGE_MS), name="slow")], device="cpu")
    with recording(loader) as recorder:
        for batch in loader:
            clock.working(TRAIN_MS)(batch)
    expected, at = [], 0
    for batch in range(3):
        pulled = (batch + 1) * LOAD_MS  # one after another, whatever the training thread does
        expected.append(Span(LOADER, "load", batch, pulled - LOAD_MS, pulled))
        expected.append(Span(THREAD, "wait for loader", batch, at, pulled, waits=True))
        expected.append(Span(THREAD, "stage/slow", batch, pulled, pulled + STAGE_MS))
        at = pulled + STAGE_MS + TRAIN_MS
        expected.append(Span(THREAD, "step", batch, pulled + STAGE_MS, at))
    assert_spans(recorder, expected)
    waited_ms = sum(span.end_ms - span.start_ms for span in recorder.spans() if span.waits)
    assert loader.stats().starved == 3
    assert loader.stats().starved_ms == pytest.approx(waited_ms) == pytest.approx(LOAD_MS + 2 * (LOAD_MS - STAGE_MS - TRAIN_MS))


def test_waits_for_decoding_are_counted_and_noted(clock):
    stage = Submitting(finished=lambda number: number == 1)
    stage.when_waited_for = lambda number: clock.sleep((number + 1) * LOAD_MS / 1e3)
    loader = StreamedLoader(numbers(3), [stage], device="cpu")
    with recording(loader) as recorder:
        list(loader)
    waits = [span for span in recorder.spans() if span.waits]
    assert [(span.lane, span.name, span.batch) for span in waits] == [(THREAD, "wait for decoding", batch) for batch in (0, 2)]
    assert [span.end_ms - span.start_ms for span in waits] == pytest.approx([LOAD_MS, 3 * LOAD_MS])
    stats = loader.stats()
    assert (stats.decode_waits, stats.decode_wait_ms) == (2, pytest.approx(4 * LOAD_MS))
    assert stats.starved == 0, "the loader had them all"


def test_batches_before_and_after_a_recording_are_not_noted():
    loader = StreamedLoader(list(torch.arange(9)), [lambda x: x], device="cpu")
    batches = iter(loader)
    next(batches)
    next(batches)
    with recording(loader) as recorder:
        next(batches)
        next(batches)
    next(batches)
    found = [(span.name, span.batch) for span in recorder.spans() if span.lane == THREAD]
    steps = ["copy", "stage/transform", "wait", "step"]
    assert found == [*((name, 2) for name in steps), *((name, 3) for name in steps[:-1])]


def test_step_that_never_ended_is_not_noted():
    loader = StreamedLoader(list(torch.arange(3)), device="cpu")
    with recording(loader) as recorder:
        for batch in loader:
            if batch == 1:
                break
    assert [span.batch for span in recorder.spans() if span.name == "step"] == [0]


def test_batches_are_numbered_through_iterators():
    loader = StreamedLoader(list(torch.arange(2)), device="cpu")
    with recording(loader) as recorder:
        list(loader)
        list(loader)
    assert [span.batch for span in recorder.spans() if span.name == "step"] == [0, 1, 2, 3], "counted through"


def test_range_of_a_failing_stage_is_closed(monkeypatch):
    log = []

    class Logged:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            log.append(f"begin {self.name}")

        def __exit__(self, *exc):
            log.append(f"end {self.name}")

    def fail(x):
        log.append("fail")
        raise ZeroDivisionError

    monkeypatch.setattr(Hooks, "span", lambda self, name, batch: Logged(name))
    loader = StreamedLoader([torch.zeros(1)], [fail], device="cpu")
    with recording(loader) as recorder, pytest.raises(ZeroDivisionError):
        list(loader)
    assert [span.name for span in recorder.spans() if span.lane == THREAD] == ["copy", "stage/transform"]
    stage = ["begin gpuaug/stage/transform", "fail", "end gpuaug/stage/transform"]
    assert log == ["begin gpuaug/copy", "end gpuaug/copy", *stage]


COPY_MS, AUGMENT_MS, ENCODE_MS, WAIT_MS, STEP_MS = 1, 3, 5, 2, 7


class Clocked(nn.Module):
    """An encoder that takes its time on the device."""

    def __init__(self, cuda):
        super().__init__()
        self._cuda, self._encoder = cuda, Encoder(cuda)

    def forward(self, *values):
        self._cuda.now_ms += ENCODE_MS
        return self._encoder(*values)


@pytest.fixture
def clocked(cuda, monkeypatch):
    """A loader of six batches whose every part takes time on the device."""
    copy, hand_over = HostBuffer.to, Lanes.hand_over

    def to(self, *args, **options):
        cuda.now_ms += COPY_MS / 2  # a batch has two leaves
        return copy(self, *args, **options)

    def handed_over(self, *args):
        cuda.now_ms += WAIT_MS
        hand_over(self, *args)

    def augment(images):
        cuda.now_ms += AUGMENT_MS
        return kernel(cuda, images)

    monkeypatch.setattr(HostBuffer, "to", to)
    monkeypatch.setattr(Lanes, "hand_over", handed_over)
    stages = [TransformStage(augment, name="augment"), FeatureStage(Clocked(cuda), capture="never", name="encode")]
    loader = StreamedLoader(Source(cuda, 6), stages, device="cuda")
    name_lanes(cuda, loader)
    return loader


def train(cuda, loader):
    for received in loader:
        cuda.read(*received)
        cuda.now_ms += STEP_MS


PARTS = {
    ("copy", "copy"): COPY_MS,
    ("stage/augment", "stage/augment"): AUGMENT_MS,
    ("stage/encode", "stage/encode"): ENCODE_MS,
    (CONSUMER, "wait"): WAIT_MS,
    (CONSUMER, "step"): STEP_MS,
}


def test_lane_spans_are_timed_on_the_device(cuda, clocked):
    cuda.now_ms = 1000.0
    with recording(clocked) as recorder:
        train(cuda, clocked)
    device = [span for span in recorder.spans() if span.lane not in (LOADER, THREAD)]
    for (lane, name), takes_ms in PARTS.items():
        found = [span for span in device if (span.lane, span.name) == (lane, name)]
        assert [span.batch for span in found] == list(range(6))
        assert [span.end_ms - span.start_ms for span in found] == pytest.approx([takes_ms] * 6)
        assert {span.waits for span in found} == {name == "wait"}
    assert len(device) == 6 * len(PARTS)
    assert min(span.start_ms for span in device) == 0, "since the recorder was made"
    steps = [span for span in device if span.name == "step"]
    waits = [span for span in device if span.name == "wait"]
    assert [span.start_ms for span in steps] == [span.end_ms for span in waits]
    thread = [(span.name, span.waits) for span in recorder.spans() if span.lane == THREAD]
    parts = {"copy", "stage/augment", "stage/encode", "wait", "step"}
    assert set(thread) == {(name, False) for name in parts}, "the device waits, not the thread"
    assert not cuda.history.violations, cuda.history.report()


def test_events_enclose_the_work_on_its_stream(cuda, clocked):
    with recording(clocked) as recorder:
        train(cuda, clocked)
    log = cuda.history.log
    assert len(recorder._device) == 6 * len(PARTS)
    for lane, name, _, first, last, _ in recorder._device:
        stream = "default" if lane == CONSUMER else f"{lane} lane"
        began, ended = (log.index(f"{stream} records {mark}") for mark in (first, last))
        own = [line.removeprefix(f"{stream} ") for line in log[began:ended] if line.startswith(f"{stream} ")]
        writes, waits = (sum(line.startswith(verb) for line in own) for verb in ("writes", "waits"))
        # What a lane waits for before its work is no part of it; on the consumer the wait is all that there is.
        # An encoder copies its result.
        expected = {"stage/encode": (3, 0), "wait": (0, 1), "step": (0, 0)}.get(name, (2, 0))
        assert (writes, waits) == expected, (lane, name, own)
        if name == "step":
            assert sum(line.startswith("reads") for line in own) == 2


@pytest.mark.parametrize("keeps_up", [True, False])
def test_recording_synchronizes_once(cuda, clocked, keeps_up):
    cuda.keeps_up = keeps_up
    with recording(clocked) as recorder:
        assert cuda.history.syncs == 1
        train(cuda, clocked)
    assert cuda.history.syncs == 1 + clocked.stats().held_back
    assert clocked.stats().held_back == (0 if keeps_up else 2)
    held_back = [span for span in recorder._host if span.name == "hold back"]
    expected = [] if keeps_up else [(THREAD, 5, True), (THREAD, 6, True)]
    assert [(span.lane, span.batch, span.waits) for span in held_back] == expected
    if not keeps_up:
        with pytest.raises(RuntimeError, match="not ready"):
            recorder.spans()
        cuda.keeps_up = True  # the device has passed everything now
    assert len([span for span in recorder.spans() if span.lane == CONSUMER]) == 12


@pytest.mark.every(2)
@pytest.mark.parametrize("name", SCENARIOS)
def test_recording_keeps_streams_ordered(name):
    watched = []

    def mutate(patch, cuda):
        begin = StreamedLoader._begin

        def begin_watched(self, *args):
            if not watched:
                watched.append(Recorder(self._shared.lanes))
                self._shared.hooks = watched[0]
            return begin(self, *args)

        patch.setattr(StreamedLoader, "_begin", begin_watched)

    history, loop = run(SCENARIOS[name], mutate)
    assert not history.violations, history.report()
    assert history.syncs == 1 + loop.held_back
    assert len([entry for entry in watched[0]._device if entry[1] == "wait"]) == loop.stats[0].batches
