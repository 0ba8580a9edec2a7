"""When a batch is captured, replayed or run eager, without a GPU: the graphs of these tests only note that they were used."""

import gc
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from support.gpu.lanes import OnLanes
from torch import nn

from gpuaug import FeatureStage, StreamedLoader
from gpuaug.stages import cuda_graph, feature
from gpuaug.stages.cuda_graph import GraphRunner, _Graph


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
        def _inspect(self, inputs):
            return self._encode(*inputs)

        def _capture(self, inputs):
            noted.append("captured")
            return _Graph(SimpleNamespace(replay=lambda: noted.append("replayed")), inputs, inputs[0])

    monkeypatch.setattr(feature, "GraphRunner", WithoutGraphs)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return noted


def loader_on_lanes(sizes, stage, depth):
    loader = StreamedLoader([torch.rand(size, 3) for size in sizes], device="cpu", depth=depth)
    loader._shared.placement.lanes = OnLanes(loader._shared.lanes)
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


@pytest.mark.parametrize("moved", [False, True])
def test_update_has_moved_weights_captured_again(found, moved):
    stage = FeatureStage(Noted(found))
    batches = iter(loader_on_lanes((4,) * 5, stage, depth=0))
    list(islice(batches, 3))
    with stage.update():
        stage.encoder.load_state_dict(Noted(found).state_dict(), assign=moved)
        stage.encoder.requires_grad_(False)
    list(batches)
    after = ["eager", "captured", "replayed"] if moved else ["replayed", "replayed"]
    assert found == ["eager", "captured", "replayed", "replayed", *after]


def test_replayed_outputs_share_no_memory(found):
    kept = list(loader_on_lanes((4,) * 5, FeatureStage(Noted(found)), depth=2))
    assert found.count("replayed") == 4
    assert len({features.data_ptr() for features in kept}) == 5


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
    monkeypatch.setattr(cuda_graph._Pool, "left_any", False)
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
