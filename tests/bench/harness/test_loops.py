"""Loops over a loader that first has to settle."""

from types import SimpleNamespace

import pytest

from bench.harness import loops


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
