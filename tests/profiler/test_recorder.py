"""What a recorder notes of each batch, and the ranges that profilers see."""

import shutil
import subprocess
import time
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from protocol.scenarios import SCENARIOS, Encoder, Source, install, kernel, name_lanes, run, script_arrivals
from support import processes
from support.stream_double import HostBuffer
from torch import nn

import gpuaug.profiler.recorder
from gpuaug import FeatureStage, StreamedLoader, TransformStage
from gpuaug.core import streams
from gpuaug.core.streams import Lanes
from gpuaug.profiler.recorder import CONSUMER, LOADER, THREAD, Recorder

SLEEP_S = 0.01


@pytest.fixture
def cuda(monkeypatch):
    cuda = install(monkeypatch, keeps_up=True)
    script_arrivals(monkeypatch, [True])
    return cuda


@contextmanager
def recording(loader):
    """Let a recorder watch for the length of the block."""
    shared = loader._shared
    before, shared.hooks = shared.hooks, Recorder(shared.lanes)
    try:
        yield shared.hooks
    finally:
        shared.hooks = before


# On a CPU


class Slept:
    """Sleeps, and what it says of when it did."""

    def __init__(self):
        self.times = {}

    def __call__(self, name, batch):
        began_s = time.perf_counter()
        time.sleep(SLEEP_S)
        self.times[name, batch] = began_s, time.perf_counter()

    def source(self, count):
        for batch in range(count):
            self("pull", batch)
            yield torch.tensor(batch)

    def stage(self, x):
        self("stage/slow", x.item())
        return x


def contained(recorder, spans, times):
    """Whether each span began before and ended after what was timed within it."""
    for span in spans:
        began_s, ended_s = times[span.name, span.batch]
        assert span.start_ms <= (began_s - recorder._began_s) * 1e3, span
        assert span.end_ms >= (ended_s - recorder._began_s) * 1e3, span
    return True


@pytest.mark.parametrize("there", [True, False])
def test_each_part_of_each_batch_is_noted_where_and_when_it_happened(monkeypatch, there):
    # Without a thread that pulls, what happens is the same each time: the loader has a batch, or the loop waits for it.
    script_arrivals(monkeypatch, [there])
    slept = Slept()
    loader = StreamedLoader(slept.source(4), [TransformStage(slept.stage, name="slow")], device="cpu")
    made_s = time.perf_counter()
    with recording(loader) as recorder:
        assert made_s <= recorder._began_s <= time.perf_counter(), "times count from when it was made"
        for batch in loader:
            slept("step", batch.item())
    spans = recorder.spans()
    assert {span.lane for span in spans} == {LOADER, THREAD}
    pulls, thread = ([span for span in spans if span.lane == lane] for lane in (LOADER, THREAD))
    assert [(span.name, span.batch, span.waits) for span in pulls] == [("pull", batch, False) for batch in range(4)]
    pulled = [] if there else ["pull"]
    parts = [*pulled, "copy", "stage/slow", "wait", "step"]
    found = [(span.name, span.batch) for span in thread]
    assert found == [*((name, batch) for batch in range(4) for name in parts), *((name, 4) for name in pulled)]
    assert all(span.waits == (span.name == "pull") for span in thread)
    assert contained(recorder, pulls, slept.times)
    assert contained(recorder, [span for span in thread if (span.name, span.batch) in slept.times], slept.times)
    # One after another, so that none is longer than what it is of.
    assert all(before.end_ms <= after.start_ms for before, after in pairwise(thread))
    within = [[p for p in pulls if span.start_ms <= p.start_ms and p.end_ms <= span.end_ms] for span in thread]
    assert [len(inner) for inner in within] == [int(span.name == "pull" and span.batch < 4) for span in thread]


def test_what_a_thread_pulls_is_noted_with_its_own_times():
    slept = Slept()
    loader = StreamedLoader(slept.source(5), device="cpu")
    with recording(loader) as recorder:
        assert [batch.item() for batch in loader] == list(range(5))
    spans = recorder.spans()
    pulls = [span for span in spans if span.lane == LOADER]
    assert [span.batch for span in pulls] == list(range(5))
    assert contained(recorder, pulls, slept.times)
    assert all(before.end_ms <= after.start_ms for before, after in pairwise(pulls))
    waits = [span for span in spans if span.waits]
    assert {(span.lane, span.name) for span in waits} == {(THREAD, "pull")}
    assert len(waits) == loader.stats().starved
    waited_ms = sum(span.end_ms - span.start_ms for span in waits)
    assert waited_ms <= loader.stats().starved_ms


def test_only_what_happens_while_it_watches_is_noted():
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


def test_a_step_that_was_never_ended_is_not_noted():
    loader = StreamedLoader(list(torch.arange(3)), device="cpu")
    with recording(loader) as recorder:
        for batch in loader:
            if batch == 1:
                break
    assert [span.batch for span in recorder.spans() if span.name == "step"] == [0]


def test_a_step_is_noted_once_though_the_end_is_asked_for_too():
    loader = StreamedLoader(list(torch.arange(2)), device="cpu")
    with recording(loader) as recorder:
        list(loader)
        list(loader)
    assert [span.batch for span in recorder.spans() if span.name == "step"] == [0, 1, 2, 3], "counted through"


def test_a_stage_that_fails_is_noted_and_its_range_is_closed(monkeypatch):
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

    monkeypatch.setattr(gpuaug.profiler.recorder, "span", Logged)
    loader = StreamedLoader([torch.zeros(1)], [fail], device="cpu")
    with recording(loader) as recorder, pytest.raises(ZeroDivisionError):
        list(loader)
    assert [span.name for span in recorder.spans() if span.lane == THREAD] == ["copy", "stage/transform"]
    stage = ["begin gpuaug/stage/transform", "fail", "end gpuaug/stage/transform"]
    assert log == ["begin gpuaug/copy", "end gpuaug/copy", *stage]


# On a device, which is the double


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


def test_each_lanes_work_on_each_batch_is_timed_on_the_device(cuda, clocked):
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


def test_marks_lie_around_the_work_on_the_stream_that_does_it(cuda, clocked):
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
        expected = {"copy": (2, 0), "wait": (0, 1), "step": (0, 0)}.get(name, (2, 0))
        assert (writes, waits) == expected, (lane, name, own)
        if name == "step":
            assert sum(line.startswith("reads") for line in own) == 2


@pytest.mark.parametrize("keeps_up", [True, False])
def test_the_host_waits_for_the_device_once(cuda, clocked, keeps_up):
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


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_unordered_while_it_is_watched(name):
    watched = []

    def mutate(patch, cuda):
        begin = StreamedLoader._begin

        def begin_watched(self, *args):
            if not watched:
                watched.append(Recorder(self._shared.lanes))
                self._shared.hooks = watched[0]
            return begin(self, *args)

        patch.setattr(StreamedLoader, "_begin", begin_watched)

    history, stats = run(SCENARIOS[name], mutate)
    assert not history.violations, history.report()
    assert history.syncs == 1 + stats.held_back
    assert len([entry for entry in watched[0]._device if entry[1] == "wait"]) == stats.batches


# What profilers see


PARTS_OF_A_BATCH = ["gpuaug/copy", "gpuaug/stage/augment", "gpuaug/wait"]


def ranges(hooks):
    """The names of the ranges that ``torch.profiler`` finds in two batches, in their order."""
    loader = StreamedLoader([torch.zeros(1)] * 2, [TransformStage(lambda x: x + 1, name="augment")], device="cpu")
    if hooks:
        loader._shared.hooks = Recorder(loader._shared.lanes)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        list(loader)
    events = [event for event in profiler.events() if event.name.startswith("gpuaug/")]
    added = [event for event in profiler.events() if event.name == "aten::add"]
    stages = [event.time_range for event in events if event.name == "gpuaug/stage/augment"]
    assert all(
        stage.start <= add.time_range.start and add.time_range.end <= stage.end
        for stage, add in zip(stages, added, strict=True)
    )
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


@pytest.mark.parametrize("hooks", [False, True], ids=["alone", "recorded"])
def test_a_profiler_sees_a_range_for_each_part(hooks):
    assert ranges(hooks) == PARTS_OF_A_BATCH * 2


def test_nothing_is_made_while_nobody_listens(monkeypatch):
    monkeypatch.setattr(streams, "_NVTX_LISTENS", False)
    assert streams.span("gpuaug/copy") is streams.span("gpuaug/wait")


# A tool that reads NVTX, as small as can be. Its interface is that of nvtxTypes.h: table 1 has the callbacks, and in the slots
# of their module 1, the core, 9 is RangePushA and 11 RangePop.
TOOL = """
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

typedef void (*Function)(void);
typedef struct {
    size_t size;
    int (*functions)(int module, Function ***slots, unsigned *count);
} Callbacks;

static FILE *told;

static int push(const char *name) { fprintf(told, "push %s\\n", name); return 0; }
static int pop(void) { fprintf(told, "pop\\n"); return 0; }

int InitializeInjectionNvtx2(const void *(*table)(unsigned)) {
    const Callbacks *callbacks = table(1);
    Function **slots;
    unsigned count;
    if (!callbacks || !callbacks->functions(1, &slots, &count) || count <= 11) return 0;
    told = fopen(getenv("TOLD"), "w");
    *slots[9] = (Function)push;
    *slots[11] = (Function)pop;
    return told != NULL;
}
"""

TWO_BATCHES = """
import torch
from gpuaug import StreamedLoader, TransformStage
list(StreamedLoader([torch.zeros(1)] * 2, [TransformStage(lambda x: x + 1, name="augment")], device="cpu"))
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the tool is compiled, and there is no gcc")
@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch was built without CUDA, and so without NVTX")
def test_a_tool_that_reads_nvtx_sees_a_range_for_each_part(tmp_path, monkeypatch):
    source, tool, told = tmp_path / "tool.c", tmp_path / "tool.so", tmp_path / "told"
    source.write_text(TOOL)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tool), str(source)], check=True)
    monkeypatch.setenv("NVTX_INJECTION64_PATH", str(tool))
    monkeypatch.setenv("TOLD", str(told))
    done = processes.run_script(TWO_BATCHES)
    assert done.returncode == 0, done.stderr
    assert told.read_text().splitlines() == [line for name in PARTS_OF_A_BATCH * 2 for line in (f"push {name}", "pop")]
