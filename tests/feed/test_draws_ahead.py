"""Samplers draw while they are read ahead: neither a plain ``DataLoader``'s order nor the draws of stages may depend on it."""

import random
import threading
import time

import numpy as np
import pytest
import torch
from support.batches.pairwise import sweep
from support.loader.resumed_loaders import DATA, OPTIONS, Loaded, generator
from support.process.waiting import WAIT_S
from torch.utils.data import DataLoader, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from gpuaug import StreamedLoader, TransformStage
from gpuaug.core import rng

AHEAD_S = 0.01
"""Time in which the pulling thread reads as far ahead as it may."""


class PerBatch(Sampler):
    """Batches that are drawn one by one, from the attribute ``generator``."""

    def __init__(self):
        self.generator = generator()

    def __len__(self):
        return 7

    def __iter__(self):
        for _ in range(7):
            yield torch.randint(14, (2,), generator=self.generator).tolist()


class Private(PerBatch):
    """Batches that are drawn one by one, from an attribute of another name, or in another library."""

    def __init__(self, generator):
        self.source = generator

    def __iter__(self):
        draw = getattr(self.source, "integers", getattr(self.source, "randint", None))
        for _ in range(7):
            if isinstance(self.source, torch.Generator):
                yield torch.randint(14, (2,), generator=self.source).tolist()
            else:
                yield [int(draw(0, 13)), int(draw(0, 13))]


LATE = {
    **OPTIONS,
    "drawn batch by batch": lambda: {"batch_sampler": PerBatch()},
    "drawn from a private generator": lambda: {"batch_sampler": Private(generator())},
    "drawn from NumPy's generator": lambda: {"batch_sampler": Private(np.random.default_rng(5))},
    "drawn from a state of NumPy's": lambda: {"batch_sampler": Private(np.random.RandomState(5))},
    "drawn from Python's generator": lambda: {"batch_sampler": Private(random.Random(5))},
    "drawn with replacement, 200": lambda: {
        "batch_size": 30, "sampler": RandomSampler(DATA, replacement=True, num_samples=200, generator=generator()),
    },
}  # fmt: skip
"""Arguments of a ``DataLoader``, with samplers that draw at the beginning, at the end, and between."""


def second_epoch(loader, count):
    """Batches of the epoch after a loop that was left after ``count`` batches."""
    for number, _ in enumerate(loader, 1):
        if number == count:
            time.sleep(AHEAD_S)
            break
    return [batch.tolist() for batch in loader]


def compared(kind, cls, counts, **workers):
    for count in counts:
        plain = cls(Loaded(), **LATE[kind](), **workers)
        expected = second_epoch(plain, count)
        del plain
        with StreamedLoader(cls(Loaded(), **LATE[kind](), **workers), device="cpu", depth=3) as loader:
            assert second_epoch(loader, count) == expected, count


@pytest.mark.parametrize("cls", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("kind", LATE)
@pytest.mark.every(3)
def test_the_epoch_after_a_loop_that_was_left_is_that_of_a_plain_dataloader(kind, cls):
    compared(kind, cls, range(1, 1 + sum(1 for _ in cls(Loaded(), **LATE[kind]()))))


QUICK = {
    ("shuffled by a generator", DataLoader, "workers"): (1, 5),
    ("several orders in an epoch", StatefulDataLoader, "workers"): (4, 7),
}
"""Numbers of batches after which the loop of a loader is left by default."""

WORKERS = {
    "workers": {"num_workers": 1},
    "persistent workers": {"num_workers": 1, "persistent_workers": True},
    "in any order": {"num_workers": 1, "in_order": False},
    "many batches ahead": {"num_workers": 2, "prefetch_factor": 3},
}


@pytest.mark.parametrize(
    ("kind", "cls", "workers"),
    [
        pytest.param(kind, cls, workers, marks=() if (kind, cls, workers) in QUICK else pytest.mark.slow)
        for kind in LATE
        for cls in (DataLoader, StatefulDataLoader)
        for workers in WORKERS
        if cls is DataLoader or workers != "in any order"
    ],
)
def test_workers_are_asked_for_as_many_batches_ahead_as_those_of_a_plain_dataloader(kind, cls, workers):
    compared(kind, cls, QUICK.get((kind, cls, workers), (1, 4, 5, 7)), **WORKERS[workers])


def interleaved(loader, count, wait_s, other):
    """Batches of an epoch, of one that begins after ``count`` batches of the first, and of the epoch after both."""
    first = iter(loader)
    batches = [[next(first).tolist() for _ in range(count)]]
    time.sleep(wait_s)
    second = iter(other)
    batches.append([next(second).tolist()])
    time.sleep(wait_s)
    for iterator, read in zip((first, second), batches, strict=True):
        read += [batch.tolist() for batch in iterator]
    return [*batches, [batch.tolist() for batch in loader]]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count_loaders", [1, 2])
@pytest.mark.parametrize("cls", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("kind", LATE)
@pytest.mark.every(3)
def test_orders_of_two_open_iterators_do_not_depend_on_time(kind, cls, count_loaders, workers):
    def run(depth, wait_s):
        options = LATE[kind]()
        loaders = [StreamedLoader(cls(Loaded(), **options, num_workers=workers), device="cpu", depth=depth) for _ in range(2)]
        return interleaved(loaders[0], 2, wait_s, loaders[count_loaders - 1])

    assert run(3, AHEAD_S) == run(0, 0.0)


def test_numbers_that_the_loop_draws_from_the_generator_are_not_drawn_again():
    shared = generator()
    loader = StreamedLoader(DataLoader(DATA, 7, shuffle=True, generator=shared), device="cpu")
    for _ in zip(range(2), loader, strict=False):
        time.sleep(AHEAD_S)  # the sampler draws at its end
        torch.rand(1, generator=shared)
        state = shared.get_state()
    assert torch.equal(shared.get_state(), state)


def test_an_error_counts_as_a_batch_that_was_asked_for():
    def second(wrap):
        calls = iter(range(20))

        def failing(samples):
            if next(calls) == 3:
                raise ZeroDivisionError
            return torch.tensor(samples)

        loader = wrap(DataLoader(range(14), collate_fn=failing, **LATE["drawn batch by batch"]()))
        with pytest.raises(ZeroDivisionError):
            list(loader)
        return [batch.tolist() for batch in loader]

    assert second(lambda source: StreamedLoader(source, device="cpu")) == second(lambda source: source)


class Waiting(Sampler):
    """Batches of a sampler that draws each from a global generator, while a stage is running if that is possible."""

    def __init__(self, draw, wait=None):
        self.draw = draw
        self.wait = wait

    def __len__(self):
        return 6

    def __iter__(self):
        for _ in range(6):
            if self.wait is not None:
                self.wait()
            yield self.draw()


GLOBAL = {
    "torch": (lambda: torch.randint(100, (2,)).tolist(), lambda: torch.rand(()).item()),
    "NumPy": (lambda: np.random.randint(0, 100, 2).tolist(), np.random.rand),
    "Python": (lambda: random.sample(range(100), 2), random.random),
}
"""Functions that draw from the global generators: the indices of a batch, and a number."""


@pytest.mark.parametrize(("library", "workers"), sweep(GLOBAL, [0, 1]))
def test_a_sampler_draws_while_no_stage_is_running(library, workers):
    draw_indices, draw = GLOBAL[library]
    runs = threading.Event()
    has_drawn = threading.Event()

    def stage(batch):
        first = draw()
        has_drawn.clear()
        runs.set()
        has_drawn.wait(0.02)
        runs.clear()
        return batch, first, draw()

    def draw_in_stage():
        runs.wait(0.02)
        indices = draw_indices()
        has_drawn.set()
        return indices

    def run(draw_batch):
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(3)
        source = DataLoader(range(100), batch_sampler=Waiting(draw_batch), num_workers=workers)
        with StreamedLoader(source, [TransformStage(stage, on=None)], device="cpu", seed=1) as loader:
            batches = list(loader)
        return [batch.tolist() for batch, *_ in batches], [numbers for _, *numbers in batches]

    indices, numbers = run(draw_in_stage)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    assert numbers == run(lambda: [1, 2])[1]
    assert len({tuple(batch) for batch in indices}) == 6


def test_a_sampler_may_wait_for_the_loop():
    go_on = threading.Semaphore(1)

    def asked():
        assert go_on.acquire(timeout=WAIT_S)
        return [1, 2]

    source = DataLoader(range(100), batch_sampler=Waiting(asked))
    loader = iter(StreamedLoader(source, [lambda batch: batch + torch.rand(2)], device="cpu"))
    assert [go_on.release() for _ in loader] == [None] * 6


def test_a_stage_may_read_a_loader_whose_sampler_draws():
    draw, _ = GLOBAL["torch"]
    inner = StreamedLoader(DataLoader(range(100), batch_sampler=Waiting(draw)), device="cpu")
    began = time.perf_counter()
    loader = StreamedLoader([torch.zeros(2)] * 2, [lambda batch: batch + sum(inner)], device="cpu")
    assert len(list(loader)) == 2
    assert time.perf_counter() - began < WAIT_S


def test_a_sampler_that_waits_for_a_stage_does_not_delay_the_end(monkeypatch):
    monkeypatch.setattr(rng, "STAGE_WAIT_S", 4 * WAIT_S)
    draw, _ = GLOBAL["torch"]
    source = DataLoader(range(100), batch_sampler=Waiting(draw))
    loader = StreamedLoader(source, device="cpu")
    iterator = iter(loader)
    next(iterator)
    with rng.generator_lock:
        time.sleep(AHEAD_S)
        began = time.perf_counter()
        iterator.close()
        assert time.perf_counter() - began < WAIT_S
