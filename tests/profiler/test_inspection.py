"""A loader that was profiled is as it was: what comes after is bit for bit what would have come."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.process import processes
from support.process.waiting import WAIT_S, until
from support.profiler.profiler_sources import SHORT, Numbers
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

import gpuaug
from gpuaug import ArgumentError, IteratorEndedError, StreamedLoader, TransformStage
from gpuaug.core.rng import Generators
from gpuaug.loader.inspection import restored_at_end


def drawing():
    return torch.Generator().manual_seed(5)


class Drawn(Numbers):
    """Its workers draw, from a seed that the loader draws for them."""

    def __getitem__(self, index):
        images, number = super().__getitem__(index)
        return images + torch.rand(3), number


class Reordered(Sampler):
    """An order for each epoch, as a sampler of a distributed run has it."""

    epoch = 0

    def __len__(self):
        return 40

    def __iter__(self):
        return iter([(index * 7 + 3 * self.epoch) % 40 for index in range(40)])

    def set_epoch(self, epoch):
        self.epoch = epoch


class Tape(IterableDataset):
    """A stream that knows its place."""

    next = 0

    def __iter__(self):
        while self.next < 40:
            self.next += 1
            yield torch.tensor([float(self.next)]), self.next
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Counter(Tape):
    """The same as the loader itself."""

    def __iter__(self):
        for images, _ in super().__iter__():
            yield images, images


def few():
    return Numbers(40)


PLAIN = {
    "a list": lambda: [(torch.full((2, 3), float(index)), index) for index in range(20)],
    "torch's generator": lambda: DataLoader(few(), 2, shuffle=True),
    "its own generator": lambda: DataLoader(few(), 2, shuffle=True, generator=drawing()),
    "its sampler's": lambda: DataLoader(few(), 2, sampler=RandomSampler(few(), generator=drawing())),
    "its batch sampler's": lambda: DataLoader(
        few(), batch_sampler=BatchSampler(RandomSampler(few(), generator=drawing()), 2, False)
    ),
    "a sampler that is told": lambda: DataLoader(few(), 2, sampler=Reordered()),
    "workers that draw": lambda: DataLoader(Drawn(60), 2, shuffle=True, num_workers=1),
}
PERSISTENT = {
    "workers that persist": lambda: DataLoader(Numbers(60), 2, shuffle=True, num_workers=1, persistent_workers=True),
    "workers that persist and draw": lambda: DataLoader(Drawn(60), 2, shuffle=True, num_workers=1, persistent_workers=True),
}
STATEFUL = {
    "a state": lambda: StatefulDataLoader(few(), 2, shuffle=True, generator=drawing()),
    "a state and workers": lambda: StatefulDataLoader(Numbers(60), 2, shuffle=True, num_workers=1),
    "a state and a sampler that is told": lambda: StatefulDataLoader(few(), 2, sampler=Reordered()),
}
IN_ITSELF = {
    "a state in itself": Counter,
    "a state in its dataset": lambda: StatefulDataLoader(Tape(), 2),
    "a place in its dataset": lambda: DataLoader(Tape(), 2),
}


def bits(batches):
    return [[part.tolist() if isinstance(part, torch.Tensor) else part for part in batch] for batch in batches]


def taken(loader, count):
    iterator = iter(loader)
    return iterator, bits([next(iterator) for _ in range(count)])


def fresh(loader, profile):
    profile()
    return [bits(loader) for _ in range(2)]


def between(loader, profile):
    first = bits(loader)
    profile()
    return [first, bits(loader), bits(loader)]


def chosen(loader, profile):
    loader.set_epoch(5)
    profile()
    return [bits(loader) for _ in range(2)]


def chosen_before(loader, profile):
    loader.set_epoch(5)
    first = bits(loader)
    profile()
    return [first, bits(loader)]


def left(loader, profile):
    iterator, first = taken(loader, 3)
    iterator.close()
    profile()
    return [first, bits(loader), bits(loader)]


def middle(loader, profile):
    iterator, first = taken(loader, 3)
    profile()
    return [first, bits(iterator), bits(loader)]


def loaded(loader, profile):
    iterator, first = taken(loader, 3)
    state = loader.state_dict()
    iterator.close()
    loader.load_state_dict(state)
    profile()
    return [first, bits(loader), bits(loader)]


def loaded_at_the_end(loader, profile):
    first = bits(loader)
    loader.load_state_dict(loader.state_dict())
    profile()
    return [first, bits(loader)]


def loaded_and_begun(loader, profile):
    iterator, _ = taken(loader, 3)
    loader.load_state_dict(loader.state_dict())
    iterator, first = taken(loader, 3)
    iterator.close()
    profile()
    return [first, bits(loader), bits(loader)]


def noisy(images):
    return images + torch.rand_like(images)


def outcome(make, scenario, *, profiled):
    """All batches of a scenario, what is drawn after it, the counters, and the state on both sides of a profile."""
    torch.manual_seed(3)
    states = []
    with StreamedLoader(make(), [TransformStage(noisy)], device="cpu", seed=1) as loader:

        def look():
            stats = loader.stats()
            states.append((repr(loader.state_dict()) if hasattr(loader, "state_dict") else None, stats, stats.batches))

        def profile():
            look()
            if profiled:
                gpuaug.profile(loader, lambda batch: torch.rand(3), **SHORT)
            look()

        batches = scenario(loader, profile)
        stats = loader.stats()
    before, after = states
    assert before == after
    assert before[1] is after[1] is stats
    return batches, torch.rand(3).tolist(), stats.batches


STATEFUL_SCENARIOS = (fresh, between, chosen, left, middle, loaded, loaded_at_the_end)
PLAIN_SCENARIOS = (fresh, between, chosen, chosen_before, left, middle)


def pairs(kinds, scenarios):
    """Each kind with each scenario. Half of them are slow: each kind and each scenario is in the other half."""
    for number, kind in enumerate(kinds):
        for index, scenario in enumerate(scenarios):
            yield pytest.param(kind, scenario, marks=pytest.mark.slow if (number + index) % 2 else ())


CASES = [
    *pairs(list(PLAIN)[:-1], PLAIN_SCENARIOS),
    ("workers that draw", middle),
    *(pytest.param("workers that draw", scenario, marks=pytest.mark.slow) for scenario in (fresh, between)),
    ("workers that persist", left),
    pytest.param("workers that persist", between, marks=pytest.mark.slow),
    ("workers that persist and draw", fresh),
    *pairs(list(STATEFUL)[::2], STATEFUL_SCENARIOS),
    *(
        pytest.param("a state and workers", scenario, marks=() if scenario is loaded else pytest.mark.slow)
        for scenario in STATEFUL_SCENARIOS
    ),
    ("a state", loaded_and_begun),
    *((kind, scenario) for kind in IN_ITSELF for scenario in (fresh, between)),
    *((kind, scenario) for kind in list(IN_ITSELF)[:2] for scenario in (loaded, loaded_at_the_end)),
]


@pytest.mark.parametrize(("kind", "scenario"), CASES)
@pytest.mark.every(5)
def test_later_batches_are_unchanged(kind, scenario):
    make = (PLAIN | PERSISTENT | STATEFUL | IN_ITSELF)[kind]
    assert outcome(make, scenario, profiled=True) == outcome(make, scenario, profiled=False)
    processes.assert_no_workers_or_feeds()


def test_open_iterator_on_persistent_workers_is_refused_and_goes_on():
    with StreamedLoader(PERSISTENT["workers that persist"](), device="cpu") as loader:
        iterator, _ = taken(loader, 3)
        with pytest.raises(ArgumentError) as caught:
            gpuaug.profile(loader, lambda batch: None, **SHORT)
        assert (
            "loader must have no iterator open on persistent workers while it is profiled, got an open one, which would end"
            in str(caught.value)
        )
        assert len(list(iterator)) > 0, "it goes on"
        gpuaug.profile(loader, lambda batch: None, **SHORT)


def test_open_iterator_on_a_source_with_its_own_state_is_ended():
    with StreamedLoader(IN_ITSELF["a state in itself"](), device="cpu") as loader:
        iterator, _ = taken(loader, 3)
        gpuaug.profile(loader, lambda batch: None, **SHORT)
        with pytest.raises(IteratorEndedError):
            next(iterator)


class Private(Sampler):
    """Draws an order from a generator that is an attribute of any name."""

    def __init__(self, generator):
        self.source = generator

    def __len__(self):
        return 40

    def __iter__(self):
        if isinstance(self.source, torch.Generator):
            return iter(torch.randperm(40, generator=self.source).tolist())
        order = list(range(40))
        self.source.shuffle(order)
        return iter(order)


@pytest.mark.parametrize(
    "make", [lambda seed: torch.Generator().manual_seed(seed), np.random.default_rng, np.random.RandomState, random.Random]
)
def test_a_generator_that_is_any_attribute_of_a_sampler_is_put_back(make):
    loader, copied = (StreamedLoader(DataLoader(few(), 2, sampler=Private(make(5))), device="cpu") for _ in range(2))
    gpuaug.profile(loader, lambda batch: None, **SHORT)
    assert [bits(loader) for _ in range(2)] == [bits(copied) for _ in range(2)]


@pytest.mark.parametrize("workers", [0, 1])
def test_threads_and_workers_end(workers):
    threads = set(threading.enumerate())
    gpuaug.profile(StreamedLoader(DataLoader(Numbers(), 2, num_workers=workers), device="cpu"), lambda batch: None, **SHORT)
    processes.assert_no_workers_or_feeds()
    until(lambda: set(threading.enumerate()) <= threads)  # those of a queue between processes end by themselves


@pytest.mark.parametrize("at", ["its begin", "its end"])
def test_generators_are_kept_while_no_other_thread_is_in_a_stage(at):
    def keep():
        with restored_at_end(loader):
            within.set()
            assert leave.wait(WAIT_S)

    loader, within, leave = StreamedLoader([torch.zeros(1)], device="cpu"), threading.Event(), threading.Event()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with Generators(loader.device).keyed(1):
        expected = torch.rand(3)
    with ThreadPoolExecutor(1) as thread:
        if at == "its end":
            keeping = thread.submit(keep)
            assert within.wait(WAIT_S)
        with Generators(loader.device).keyed(1):
            keeping = keeping if at == "its end" else thread.submit(keep)
            leave.set()
            with pytest.raises(TimeoutError):
                keeping.result(0.1)  # long enough for it to get where it must wait
            assert torch.equal(torch.rand(3), expected)
        keeping.result(WAIT_S)
    assert torch.equal(torch.get_rng_state(), before)
