"""How many batches a loader works on ahead: what the user sets, what is counted, and the order while the depth changes."""

import itertools
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol.scenarios import ANY_SCENARIO, Source, install, run, script_arrivals

from gpuaug import StreamedLoader
from gpuaug.loader.inspection import Inspection
from gpuaug.loader.iterator import PipelinedIterator
from gpuaug.loader.state import RunAheadLimit


@pytest.fixture
def cuda(monkeypatch):
    """A device that keeps up, and a loader that has a batch whenever it is asked."""
    cuda = install(monkeypatch, keeps_up=True)
    script_arrivals(monkeypatch, [True])
    return cuda


# What the user sets


def test_new_depth_is_that_of_the_next_iterator(cuda):
    loader = StreamedLoader(Source(cuda, 8), device="cuda")
    older = iter(loader)
    next(older)
    loader.depth = 3
    assert "depth=3" in repr(loader)
    next(older)
    assert loader.stats().depth == 2
    assert [loader.stats().ready for _ in loader] == [3, 3, 3, 3, 3, 2, 1, 0]
    assert loader.stats().depth == 3


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_inspection_begins_an_iterator_of_another_depth(cuda, depth):
    loader = StreamedLoader(Source(cuda, 8), device="cuda")
    inspection = Inspection(loader)
    with closing(inspection.begin(depth)) as pipelined:
        pipelined.fill(inspection.lanes.consumer())
        assert len(pipelined.launched_batches) == depth + 1
    assert loader.depth == 2


# What is counted


def ready(cuda, **options):
    loader = StreamedLoader(Source(cuda, 5), device="cuda", **options)
    assert (loader.stats().depth, loader.stats().ready) == (0, 0)
    found = [loader.stats().ready for _ in loader]
    return found, loader.stats().depth


@pytest.mark.parametrize(("depth", "expected"), [(0, [0] * 5), (1, [1, 1, 1, 1, 0]), (2, [2, 2, 2, 1, 0])])
def test_stats_ready_counts_batches_behind_the_given_one(cuda, depth, expected):
    assert ready(cuda, depth=depth) == (expected, depth)


def test_stats_ready_is_0_with_slow_loader(cuda, monkeypatch):
    script_arrivals(monkeypatch, [False])
    assert ready(cuda, depth=2) == ([0] * 5, 2)


def test_stats_ready_is_0_on_cpu():
    loader = StreamedLoader(torch.arange(4), device="cpu", depth=2)
    assert [loader.stats().ready for _ in loader] == [0] * 4


# While the depth changes from batch to batch, as the profiler changes it


def change_depth(patch, script):
    """Before each batch of any iterator, set the depth that comes next in a script."""
    depths, real = itertools.cycle(script), PipelinedIterator.fill

    def fill(self, consumer):
        self.depth = next(depths)
        real(self, consumer)

    patch.setattr(PipelinedIterator, "fill", fill)


@settings(max_examples=30)
@given(ANY_SCENARIO, st.lists(st.sampled_from([0, 1, 2, 5]), min_size=2, max_size=7))
def test_lanes_are_ordered_when_depth_changes_every_batch(scenario, script):
    history, loop = run(replace(scenario, depth=max(script)), lambda patch, cuda: change_depth(patch, script))
    assert not history.violations, history.report()
    assert history.syncs == loop.held_back


@pytest.mark.parametrize("script", [[2, 0], [5, 0, 0, 1], [0, 0, 0, 2, 2, 2], [3, 2, 1, 0]])
def test_batches_are_complete_and_in_order_when_depth_changes(cuda, monkeypatch, script):
    change_depth(monkeypatch, script)
    loader = StreamedLoader(Source(cuda, 23), device="cuda", depth=max(script))
    for epoch in range(2):
        assert [images.batch for images, _ in loader] == list(range(23 * epoch, 23 * epoch + 23))


def test_ready_batches_come_before_in_line_launches(cuda, monkeypatch):
    change_depth(monkeypatch, [2, 2, 0, 0, 0, 2, 2, 2, 2])
    loader = StreamedLoader(Source(cuda, 8), device="cuda")
    launched, ready = [], []
    for _ in loader:
        launched.append(sum(line.startswith("alloc images") for line in cuda.history.log))
        ready.append(loader.stats().ready)
    assert launched == [3, 4, 4, 4, 5, 8, 8, 8]
    assert ready == [2, 2, 1, 0, 0, 2, 1, 0]


def test_run_ahead_limit_waits_for_the_newest_event_beyond_a_smaller_depth():
    class Counted:
        def __init__(self, number):
            self.number = number

        def query(self):
            return False

        def synchronize(self):
            waited.append(self.number)

    waited, run_ahead_limit = [], RunAheadLimit()
    for number in range(5):
        run_ahead_limit.add(Counted(number), ahead=4)
    run_ahead_limit.add(Counted(5), ahead=1)
    run_ahead_limit.add(Counted(6), ahead=1)
    assert waited == [0, 4, 5]
