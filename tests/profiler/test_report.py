"""The figures of a report, and how it reads."""

from contextlib import contextmanager
from dataclasses import replace
from typing import get_args

import pytest
import torch
from support import internals
from support.profiler import tables
from support.profiler.profiler_reports import CPU, copy, load, part, report, spread, step

from bench.harness.result_check import check_result
from gpuaug import ArgumentError, StreamedLoader, TransformStage
from gpuaug.benchkit import results
from gpuaug.decode.decoders.registry import Backend
from gpuaug.loader import hooks
from gpuaug.profiler.recorder import Recorder
from gpuaug.profiler.report import DECODERS, size_of
from gpuaug.profiler.verdict import verdict

STAGES = part("stage/a", host=1, device=2), part("stage/b", host=0.5, device=3)


def test_bounds():
    found = report(load(1), copy(device=2.5, host=0.25), *STAGES, step(host=1.5, device=4))
    assert (found.load_ms, found.copy_ms) == (1, 2.5)
    assert found.host_ms == 0.25 + 1 + 0.5 + 1.5
    assert found.device_ms == 2 + 3 + 4
    assert found.serial_ms == 1 + 2.5 + 2 + 3 + 4
    assert found.bound_ms == 4
    assert found.full_ms == 9
    assert found.copy_gb_per_s == 8
    assert found.part("stage/b") is STAGES[1]
    with pytest.raises(ArgumentError) as caught:
        found.part("stage/z")
    assert "name must be the name of a part, got 'stage/z'" in str(caught.value)


@pytest.mark.parametrize(
    ("longest", "ms"),
    [
        ({"load": 20}, 20),
        ({"copy": 20}, 20),
        ({"host": 20}, 21.25),  # of the training thread it is all parts together
        ({"stage": 20}, 20),
        ({"step": 20}, 20),
    ],
)
def test_bound_is_the_longest_part(longest, ms):
    of = {"load": 1, "copy": 1, "host": 1, "stage": 1, "step": 1} | longest
    stage = part("stage/a", host=0.25, device=of["stage"])
    found = report(load(of["load"]), copy(device=of["copy"], host=0), stage, step(host=of["host"] + 1, device=of["step"]))
    assert found.bound_ms == max(ms, 2.25)
    assert found.full_ms >= found.bound_ms


def test_bound_on_a_cpu_is_the_loader_or_the_training_thread():
    found = report(load(5), part("copy", 1), part("stage/a", 2), part("step", 3), device=CPU)
    assert (found.copy_ms, found.device_ms, found.copy_gb_per_s) == (0, 0, None)
    assert found.bound_ms == found.full_ms == found.host_ms == 6
    assert found.serial_ms == 11


@pytest.mark.parametrize(("streamed", "efficiency"), [(4, 1), (2, 1), (12.5, 0), (30, 0), (8.25, 0.5)])
def test_overlap_efficiency(streamed, efficiency):
    found = report(load(1), copy(device=2.5), *STAGES, step(), streamed=streamed)
    assert found.serial_ms - found.bound_ms == 8.5
    assert found.overlap_efficiency == pytest.approx(efficiency)


def test_overlap_efficiency_is_none_without_anything_to_overlap():
    found = report(load(0), part("copy", 0.01), part("step", 6), device=CPU)
    assert found.overlap_efficiency is None
    assert "nothing to overlap; " in str(found)
    assert "overlap_efficiency" not in found.rows()[-1]


def test_exposed_ms_and_headspace():
    found = report(load(), copy(), step(), streamed=5, cached=4)
    assert (found.exposed_ms, found.headspace) == (1, 1.25)
    faster = report(load(), copy(), step(), streamed=3.9, cached=4)
    assert (faster.exposed_ms, faster.headspace) == (0, pytest.approx(0.975))


WHOLE = report(
    load(1),
    copy(device=2.5, host=0.25),
    part("stage/augment", host=1, device=2, launches=12, kind="fused"),
    part("stage/encode", host=0.5, device=3, launches=3, kind="captured"),
    step(host=1.5, device=4),
    streamed=9.2,
    in_line=13.8,
    thread_ms={
        "copy": 0.3,
        "stage/augment": 1.2,
        "wait": 0.02,
        "step": 1.6,
        "wait for loader": 0.5,
        "wait for decoding": 0.75,
        "hold back": 1.25,
    },
)
WHOLE = replace(WHOLE, verdict=tuple(verdict(WHOLE)))


TEXT = """\
ms per batch       alone             thread  device  launches  in loop
load               1 (0.9-1.1)
copy               2.5 (2.25-2.75)   0.25    2.5     2         0.3
stage/augment      2 (1.8-2.2)       1       2       12        1.2
stage/encode       3 (2.7-3.3)       0.5     3       3
step               4 (3.6-4.4)       1.5     4       100       1.6
loop, in line      13.8 (13.7-13.9)
loop, streamed     9.2 (9.11-9.29)

bounds: 4 ms if everything overlaps, 9 ms if stages and step fill the device, 12.5 ms without overlap
overlap saves 39% of the time that it can save; exposed: 5.2 ms beyond the step; headspace: 2.30
copy: 20 MB per batch at 8 GB/s; 64 MB copies reach 54.3 GB/s
the training thread waited 0.5 ms per batch for the loader
the training thread waited 0.75 ms per batch for images to be decoded
the training thread waited 1.25 ms per batch for the device, because depth + 2 batches were queued
device: NVIDIA H200, depth: 2, feed: ring, workers: 8, batches: 40, rounds: 3

- GPU saturated: stages (5 ms) and the step (4 ms) keep the device busy for 9 ms, and a batch takes 9.2 ms. \
Streams cannot speed up the loop further; only cheaper kernels can.
- Overlap pays here: 13.8 ms per batch in line, 9.2 ms streamed, 1.50x.
- Encoding ('encode') and the step overlap by 100% of the shorter time: alone, they take 3 and 4 ms.
- A feature cache would save up to 5.2 of the 9.2 ms per batch in epochs that read it: pass cache=gpuaug.FeatureCache(folder) \
to the FeatureStage of encoder 'encode'."""


def words(text):
    return [line.split() for line in text.splitlines()]


def test_report_as_text():
    assert words(str(WHOLE)) == words(TEXT)
    table = str(WHOLE).split("\n\n")[0].splitlines()
    for title in ("alone", "thread", "device", "launches", "in loop"):
        column = table[0].index(title)
        assert all(line[column - 1 : column] in ("", " ") for line in table), f"{title} is a column"
    assert table[4][table[0].index("device")] == "3"


def test_notebook_shows_the_table_the_verdict_and_the_figures():
    found = report(load(1), copy(device=2.5, host=0.25), part("stage/<a>", host=1, device=2), step(host=1.5, device=4))
    found = replace(found, verdict=("Bounded by <a> & more.",))
    table, paragraphs = tables.read(found._repr_html_())
    assert table == [list(line) for line in found.lines()]
    assert paragraphs == [*found.verdict, *found.summary()]


@pytest.mark.parametrize("found", [WHOLE, report(load(0), part("copy", 0.01), part("step", 6), device=CPU)], ids=["gpu", "cpu"])
def test_rows_are_those_of_a_result(found):
    result = results.result("profile", rows=found.rows(), settings=found.settings, device=torch.device("cpu"))
    check_result(result)
    names = [row["name"] for row in found.rows()]
    loops = ["loop, in line", "loop, streamed", "bounds"]
    assert names == [each.name for each in found.parts] + loops
    assert found.rows()[-1]["bound_ms"] == found.bound_ms


def test_loop_with_the_step_first_has_a_row_and_a_figure_where_it_was_measured():
    found = replace(WHOLE, step_first=spread(8.5))
    assert [row["name"] for row in found.rows()[-4:]] == ["loop, in line", "loop, streamed", "loop, step first", "bounds"]
    assert found.rows()[-2]["wall_ms"] == found.rows()[-1]["step_first_ms"] == 8.5
    assert WHOLE.figures()["step_first_ms"] is None


def test_rows_hold_the_figures():
    assert WHOLE.rows()[2] == {
        "name": "stage/augment",
        "wall_ms": 2,
        "low_ms": pytest.approx(1.8),
        "high_ms": pytest.approx(2.2),
        "host_ms": 1,
        "device_ms": 2,
        "launches": 12,
        "thread_ms": 1.2,
    }
    assert WHOLE.rows()[0] == {"name": "load", "wall_ms": 1, "low_ms": 0.9, "high_ms": 1.1}
    assert WHOLE.rows()[6]["wall_ms"] == 9.2


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (19_500_000, "19.5 MB"), (2.5e9, "2.5 GB"), (4.2e12, "4,200 GB")],
)
def test_size_of(num_bytes, text):
    assert size_of(num_bytes) == text


def test_every_decoder_has_a_kind_that_the_verdict_knows():
    assert {"auto", *DECODERS} == {*get_args(Backend), "pyav"}


PARTS_OF_A_BATCH = ["gpuaug/copy", "gpuaug/stage/augment", "gpuaug/wait"]


def ranges(recorded):
    """The names of the ranges that ``torch.profiler`` finds in two batches, in their order."""
    loader = StreamedLoader([torch.zeros(1)] * 2, [TransformStage(lambda x: x + 1, name="augment")], device="cpu")
    if recorded:
        internals.shared(loader).hooks = Recorder(internals.shared(loader).lanes)
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


@pytest.mark.parametrize("recorded", [False, True], ids=["alone", "recorded"])
def test_torch_profiler_sees_a_range_for_each_part(recorded):
    assert ranges(recorded) == PARTS_OF_A_BATCH * 2


def test_span_is_shared_while_no_tool_listens(monkeypatch):
    monkeypatch.setattr(hooks, "_HAS_NVTX_READER", False)
    assert hooks.Hooks().span("gpuaug/copy", 0) is hooks.Hooks().span("gpuaug/wait", 1)


def test_nvtx_tool_sees_a_range_for_each_part(monkeypatch):
    told = []

    @contextmanager
    def pushed(name):
        told.append(f"push {name}")
        yield
        told.append("pop")

    monkeypatch.setattr(hooks, "_HAS_NVTX_READER", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", pushed)
    list(StreamedLoader([torch.zeros(1)] * 2, [TransformStage(lambda x: x + 1, name="augment")], device="cpu"))
    assert told == [line for name in PARTS_OF_A_BATCH * 2 for line in (f"push {name}", "pop")]
