"""Batches are the same, complete and in order while the depth changes."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol.scenarios import ANY_SCENARIO, SCENARIOS, Step, run
from support.depth_tuning import auto
from support.lanes import OnLanes
from torch import nn

from gpuaug import FeatureStage, StreamedLoader, TransformStage
from gpuaug.loader import depth
from gpuaug.loader.depth import AHEAD
from gpuaug.loader.iterator import PipelinedIterator


def small_windows(patch, rounds=6):
    """Let the way change every other batch."""
    for name, value in {"WARM": 1, "SETTLE": 1, "COUNT": 1, "ROUNDS": rounds}.items():
        patch.setattr(depth, name, value)


@pytest.mark.parametrize("leave_at", [None, 9])
def test_batches_of_depth_auto_equal_depth_0(monkeypatch, leave_at):
    small_windows(monkeypatch, rounds=20)
    stages = [
        lambda x: x[torch.randperm(len(x))] + torch.rand_like(x),
        TransformStage(lambda x: x * torch.randn(()), name="scale"),
        FeatureStage(nn.Linear(3, 2).requires_grad_(False)),
    ]
    source = list(torch.rand(20, 4, 3))
    reference, loader = (StreamedLoader(source, stages, device="cpu", depth=d, seed=3) for d in (0, "auto"))
    loader._shared.placement.lanes = OnLanes(loader._shared.lanes)
    used, ready = [], []
    for _ in range(3):
        for ours, theirs in itertools.islice(zip(loader, reference, strict=True), leave_at):
            assert torch.equal(ours, theirs)
            used.append(loader.stats().depth)
            ready.append(loader.stats().ready)
            torch.rand(3)  # the user's own draws
    assert [now for now, _ in itertools.groupby(used)][:5] == [AHEAD, 0, AHEAD, 0, AHEAD]
    assert set(ready) == {0, 1, 2}


# What is ordered while the way changes


BURSTS = tuple(Step(iterator=number // 5 % 2, stream=number // 3 % 3, keep=number % 4 == 0) for number in range(40))
CHANGING = {
    **{name: replace(scenario, depth="auto") for name, scenario in SCENARIOS.items()},
    "long": replace(SCENARIOS["plain"], depth="auto", batches=40, steps=(Step(),) * 45),
    "bursts": replace(SCENARIOS["plain"], depth="auto", batches=20, steps=BURSTS),
    "left often": replace(SCENARIOS["plain"], depth="auto", batches=9, steps=(*[Step()] * 4, Step(keep=True, leave=True)) * 8),
}


@pytest.mark.parametrize("keeps_up", [False, True])
@pytest.mark.parametrize("name", CHANGING)
def test_lanes_are_ordered_while_depth_is_tuned(name, keeps_up):
    used = []

    def mutate(patch, cuda):
        cuda.keeps_up = keeps_up
        small_windows(patch)
        real = PipelinedIterator.pop

        def pop(self, consumer):
            used.append(self._depth.now)
            return real(self, consumer)

        patch.setattr(PipelinedIterator, "pop", pop)

    history, loop = run(CHANGING[name], mutate)
    assert not history.violations, history.report()
    assert history.syncs == loop.held_back
    if name in ("long", "bursts", "left often"):
        assert len(list(itertools.groupby(used))) > 6, used


class Scripted:
    """Changes with every batch, as a script says."""

    def __init__(self, script):
        self._script = itertools.cycle(script)
        self.now, self.most = 0, max(script)

    def record_event(self, consumer, iterator):
        self.now = next(self._script)
        return consumer.record_event()


@settings(max_examples=60)
@given(ANY_SCENARIO, st.lists(st.sampled_from([0, 1, 2, 5]), min_size=2, max_size=7))
def test_lanes_are_ordered_when_depth_changes_every_batch(scenario, script):
    history, loop = run(scenario, lambda patch, cuda: patch.setattr(depth, "FixedDepth", lambda _: Scripted(script)))
    assert not history.violations, history.report()
    assert history.syncs == loop.held_back


@pytest.mark.parametrize("script", [[2, 0], [5, 0, 0, 1], [0, 0, 0, 2, 2, 2], [3, 2, 1, 0]])
def test_batches_are_complete_and_in_order_when_depth_changes(cuda, script):
    loader = auto(cuda, 23)
    loader._depth = Scripted(script)
    for epoch in range(2):
        assert [images.batch for images, _ in loader] == list(range(23 * epoch, 23 * epoch + 23))


def test_ready_batches_come_before_in_line_launches(cuda):
    loader = auto(cuda, 8)
    loader._depth = Scripted([2, 2, 0, 0, 0, 2, 2, 2, 2])
    launched, ready = [], []
    for _ in loader:
        launched.append(sum(line.startswith("alloc images") for line in cuda.history.log))
        ready.append(loader.stats().ready)
    assert launched == [3, 4, 4, 4, 5, 8, 8, 8]
    assert ready == [2, 2, 1, 0, 0, 2, 1, 0]
