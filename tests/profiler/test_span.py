"""The ranges that profilers see of each part of a batch: ``torch.profiler``, and tools that read NVTX."""

import shutil
import subprocess

import pytest
import torch
from support import internals
from support.process import processes

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
import importlib
import torch
from gpuaug import StreamedLoader, TransformStage
from gpuaug.loader import hooks
importlib.reload(hooks)  # it looks for tools when it is imported, and this process was forked from one that has imported it
list(StreamedLoader([torch.zeros(1)] * 2, [TransformStage(lambda x: x + 1, name="augment")], device="cpu"))
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the tool is compiled, and there is no gcc")
@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch was built without CUDA, and so without NVTX")
def test_nvtx_tool_sees_a_range_for_each_part(tmp_path, monkeypatch):
    source, tool, told = tmp_path / "tool.c", tmp_path / "tool.so", tmp_path / "told"
    source.write_text(TOOL)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tool), str(source)], check=True)
    monkeypatch.setenv("NVTX_INJECTION64_PATH", str(tool))
    monkeypatch.setenv("TOLD", str(told))
    done = processes.run_script(TWO_BATCHES)
    assert done.returncode == 0, done.stderr
    assert told.read_text().splitlines() == [line for name in PARTS_OF_A_BATCH * 2 for line in (f"push {name}", "pop")]
