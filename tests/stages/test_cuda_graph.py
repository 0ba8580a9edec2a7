"""When a batch is captured, replayed or run eager, without a GPU: the graphs of these tests only note that they were used."""

import gc
import itertools
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from support import internals
from support.gpu.lanes import OnLanes
from torch import nn

from gpuaug import FeatureStage, GpuAugWarning, StreamedLoader
from gpuaug.stages import cuda_graph, feature, graph_memory
from gpuaug.stages.cuda_graph import GraphRunner, _Graph
from gpuaug.stages.graph_memory import MemoryNeed


class Noted(nn.Linear):
    """An encoder that notes each of its eager runs."""

    def __init__(self, found):
        super().__init__(3, 2)
        self.requires_grad_(False)
        self._found = found

    def forward(self, x):
        self._found.append("eager")
        return super().forward(x)


@pytest.fixture
def found(monkeypatch):
    """How batches were run, in order."""
    noted = []

    class WithoutGraphs(GraphRunner):
        def _run_and_inspect(self, inputs, signature):
            self._needs[signature] = MemoryNeed(peak_bytes=inputs[0].nbytes, io_bytes=10)
            return self._encode(*inputs)

        def _capture(self, inputs, need):
            noted.append("captured")
            return _Graph(SimpleNamespace(replay=lambda: noted.append("replayed")), inputs, inputs[0], need, [])

    monkeypatch.setattr(feature, "GraphRunner", WithoutGraphs)
    monkeypatch.setattr(feature, "default_max_bytes", lambda device: 1 << 30)
    monkeypatch.setattr(cuda_graph, "_is_on_gpu", lambda value: True)
    return noted


def loader_on_lanes(sizes, stage, depth):
    loader = StreamedLoader([torch.rand(size, 3) for size in sizes], device="cpu", depth=depth)
    internals.shared(loader).device_setup.lanes = OnLanes(internals.shared(loader).lanes)
    loader.stages = [stage]
    return loader


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_batches_take_the_same_form_at_every_depth(found, depth):
    loader = loader_on_lanes((4, 4, 4, 2, 4, 2), FeatureStage(Noted(found)), depth)
    for leave_at in (None, 1, None, 3, None):
        found.clear()
        given = len(list(islice(loader, leave_at)))
        forms = [form for form in found if form != "captured"]
        assert forms == ["eager", "replayed", "replayed", "eager", "replayed", "replayed"][: len(forms)]
        assert len(forms) >= given
        assert loader.stats().ready == (0 if leave_at is None else min(depth, 6 - given))


SHAPES = {"large": (40, 3), "small": (2, 3), "other": (4, 3), "another": (6, 3)}
"""Of 480, 24, 48 and 72 bytes. A graph needs as many, which graphs share, and ten of its own."""


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize(
    ("graph_bytes", "captured"),
    [
        (1 << 20, {"large", "small", "other", "another"}),
        (490 + 20, {"large", "small", "other"}),
        (489, {"small", "other", "another"}),
        (48 + 20, {"small", "other"}),
        (10, set()),
        (0, set()),
    ],
)
def test_shapes_for_which_there_is_room_are_captured_and_the_same_at_every_depth(found, graph_bytes, captured, depth):
    names = ["small", "large", "other", "another", *(["large", "small", "other", "small", "large", "another"] * 2)]
    if "large" in captured:  # first come, first served
        names.insert(4, "large")
    stage = FeatureStage(Noted(found), graph_bytes=graph_bytes)
    loader = loader_on_lanes([SHAPES[name][0] for name in names], stage, depth)
    if graph_bytes < 1 << 20:
        with pytest.warns(
            GpuAugWarning, match=r"exceeds the limit for all graphs, .* MB and 64 graphs. Pass a larger graph_bytes="
        ) as caught:
            list(loader)
        assert len(caught) == 1
    want = []
    seen = set()
    for name in names:
        want.append("replayed" if name in captured & seen else "eager")
        seen.add(name)
    for leave_at in (1, 4, 6, None, 9, None):
        found.clear()
        given = len(list(islice(loader, leave_at)))
        forms = [form for form in found if form != "captured"]
        assert forms == want[: len(forms)]
        assert len(forms) >= given
        assert len(internals.runner(loader)) <= max(len(captured), 1)


def test_epochs_of_other_shapes_take_the_room_of_those_before(found):
    stage = FeatureStage(Noted(found), graph_bytes=72 + 10 * 2)
    sizes = [4, 4, 2, 2, 4]
    loader = loader_on_lanes(sizes, stage, 2)
    list(loader)
    assert found.count("captured") == 2
    loader.loader[:] = [torch.rand(size, 3) for size in (4, 6, 6, 4, 4)]
    found.clear()
    list(loader)
    assert found == ["eager", "eager", "captured", "replayed", "captured", "replayed", "replayed"], "all graphs went"
    found.clear()
    list(loader)
    assert found == ["eager", "eager", "replayed", "replayed", "replayed"]


@pytest.mark.parametrize("when", ["between epochs", "between batches"])
def test_graphs_of_weights_that_were_moved_are_deleted_without_update(found, when):
    encoder = Noted(found)
    loader = loader_on_lanes([4] * 6, FeatureStage(encoder), 0)
    for number, _ in enumerate(itertools.chain(loader, loader)):
        if number == {"between batches": 3, "between epochs": 5}[when]:
            assert found[:3] == ["eager", "captured", "replayed"]
            found.clear()
            encoder.weight.data = encoder.weight.clone()
    assert found[:3] == ["eager", "captured", "replayed"]
    assert len(internals.runner(loader)) == 1


def test_shapes_that_never_repeat_are_never_captured(found):
    list(loader_on_lanes(range(1, 200), FeatureStage(Noted(found)), 2))
    assert set(found) == {"eager"}


def test_number_of_shapes_that_are_remembered_is_bounded(found, monkeypatch):
    monkeypatch.setattr(cuda_graph, "MAX_SIGNATURES", 3)
    loader = loader_on_lanes((1, 2, 3, 4, 4, 3, 2, 4), FeatureStage(Noted(found)), 2)
    list(loader)
    assert found == [*["eager"] * 5, "captured", "replayed", "captured", "replayed", "eager"]
    branch = internals.branches(loader)[None]
    assert len(branch.runner._needs) == 3


@pytest.mark.filterwarnings("ignore:Some shapes of stage 'feature' run without CUDA graphs")
def test_number_of_graphs_is_bounded_in_an_epoch_and_over_epochs(found, monkeypatch):
    monkeypatch.setattr(graph_memory, "MAX_GRAPHS", 2)
    loader = loader_on_lanes((1, 2, 3, 1, 2, 3, 1, 3), FeatureStage(Noted(found)), 2)
    list(loader)
    forms = [*["eager"] * 3, "captured", "replayed", "captured", "replayed", "eager", "replayed", "eager"]
    assert found == forms
    loader.loader[:] = loader.loader[5:3:-1] * 2  # of lengths 3 and 2
    list(loader)
    assert found[len(forms) :] == ["eager", "eager", *["captured", "replayed"] * 2], "all graphs go"
    assert len(internals.runner(loader)) == 2


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "shapes", [[(4, 3), (2, 3)], [torch.empty(4, 3), (torch.empty(2, 3, device="meta"),)], [[4, 3], torch.Size((2, 3))]]
)
def test_graphs_that_are_captured_ahead_change_no_form(found, shapes, when):
    stage = FeatureStage(Noted(found))
    if when == "before":
        stage.capture(shapes)
    loader = loader_on_lanes((4, 2, 4, 2), stage, 2)
    if when == "after":
        stage.capture(shapes)
    assert found == ["eager", "captured", "eager", "captured"]
    found.clear()
    list(loader)
    assert found == ["eager", "eager", "replayed", "replayed"]
    stats = loader.stats()
    assert (stats.captured, stats.replayed, stats.eager) == (2, 2, 2)


def test_graphs_that_are_captured_ahead_keep_within_their_bytes(found):
    stage = FeatureStage(Noted(found), graph_bytes=48 + 20)
    loader = loader_on_lanes((4, 2, 4, 2, 6), stage, 2)
    stage.capture([(2, 3), (4, 3), (6, 3), (2, 3)])
    assert found.count("captured") == 2
    with pytest.warns(GpuAugWarning, match="exceeds the limit for all graphs"):
        list(loader)
    assert found.count("replayed") == 2


def test_batches_are_counted_by_form_over_epochs_and_branches(found):
    loader = loader_on_lanes((4, 4, 4, 2), FeatureStage({"a": Noted(found), "b": Noted(found)}), 2)
    list(loader)
    list(loader)
    stats = loader.stats()
    assert (stats.captured, stats.replayed, stats.eager) == (2, 8, 8)
    plain = StreamedLoader([torch.rand(2, 3)] * 3, [FeatureStage(Noted(found))], device="cpu")
    list(plain)
    assert (plain.stats().captured, plain.stats().replayed, plain.stats().eager) == (0, 0, 3)


@pytest.mark.usefixtures("found")
def test_memory_of_graphs_is_given_back_when_others_are_captured_after_them(monkeypatch):
    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            calls.append(f"captured in {pool}")

        def capture_end(self):
            pass

        def replay(self):
            pass

    calls, pools = [], iter("abc")
    monkeypatch.setattr(graph_memory.Pool, "is_deleted_pool_cached", False)
    monkeypatch.setattr(graph_memory.Pool, "num_bytes", 0)
    monkeypatch.setattr(feature.GraphRunner, "_capture", GraphRunner._capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("waited"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("given back"))
    gc.disable()  # a loader that is dropped is gone, and its graphs with it
    try:
        loader = loader_on_lanes((4, 4, 2, 2), FeatureStage(Noted([])), depth=0)
        list(loader)
        assert calls == ["captured in a", "captured in a"]
        other = loader_on_lanes((4, 4), FeatureStage(Noted([])), depth=0)
        list(other)
        assert calls[2:] == ["captured in b"]
        del loader
        list(loader_on_lanes((4, 4), FeatureStage(Noted([])), depth=0))
        assert calls[3:] == ["waited", "given back", "captured in c"]
    finally:
        gc.enable()


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("method", ["capture_begin", "capture_end"])
def test_a_pool_whose_only_graph_was_interrupted_is_not_used_again(monkeypatch, method):
    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            pools.append(pool)
            self.interrupt("capture_begin")

        def capture_end(self):
            self.interrupt("capture_end")

        def interrupt(self, called):
            if called == method and len(pools) == 1:
                raise KeyboardInterrupt

        def replay(self):
            pass

    pools, handles = [], iter("abc")
    monkeypatch.setattr(graph_memory.Pool, "is_deleted_pool_cached", False)
    monkeypatch.setattr(graph_memory.Pool, "num_bytes", 0)
    monkeypatch.setattr(feature.GraphRunner, "_capture", GraphRunner._capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    loader = loader_on_lanes((4,) * 4, FeatureStage(Noted([])), depth=0)
    with pytest.raises(KeyboardInterrupt):
        list(loader)
    loader.set_epoch(0)
    assert len(list(loader)) == 4
    assert pools == ["a", "b"]
