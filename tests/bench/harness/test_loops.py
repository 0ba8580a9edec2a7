"""Loops over a loader that first has to settle."""

from types import SimpleNamespace

import pytest
import torch

import gpuaug
from bench.harness import loops


@pytest.mark.parametrize("after", [1, 130])
def test_a_loader_that_decides_is_measured_from_then_on(after):
    trained = []

    class Batches(list):
        def __repr__(self):
            return "'auto' (still measuring)" if len(trained) < after else "'auto' (streamed: 1 ms a batch in line, 1 streamed)"

    steps = loops.decided(Batches([(None, [0, 0])] * 1000), lambda images, labels: trained.append(labels))()
    for count in range(after, after + 3):
        assert next(steps) == 2
        assert len(trained) == count, "those before it has decided are trained on, and not counted"


@pytest.mark.parametrize(("without", "first"), [({0, 3}, 8), (set(range(1000)), 16), (set(), 4)])
def test_a_loader_with_slots_is_measured_once_its_batches_come_in_them(without, first):
    came = SimpleNamespace(other_batches=0)

    class Batches:
        def stats(self):
            return came

        def __iter__(self):
            for number in range(1000):
                came.other_batches += number in without
                yield number, [0, 0]

    trained = []
    steps = loops.settled(Batches(), lambda number, labels: trained.append(number), 4)()
    assert next(steps) == 2
    assert trained == list(range(first + 1))
    next(steps)
    assert len(trained) == first + 2


def test_a_loader_on_a_cpu_has_nothing_to_decide():
    trained = []
    loader = gpuaug.StreamedLoader([(torch.ones(1), torch.ones(2))] * 5, device="cpu", depth="auto")
    assert next(loops.decided(loader, lambda images, labels: trained.append(labels))()) == 2
    assert len(trained) == 1
