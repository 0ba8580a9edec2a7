"""The ranges that profilers see of each part of a batch: ``torch.profiler``, and tools that read NVTX."""

from contextlib import contextmanager

import pytest
import torch
from support import internals

from gpuaug import StreamedLoader, TransformStage
from gpuaug.loader import hooks
from gpuaug.profiler.recorder import Recorder

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
