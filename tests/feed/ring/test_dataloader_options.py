"""Whatever a loader does with its workers, its batches come through slots bit for bit."""

import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.feed.ring_equality import assert_ring_is_plain, assert_same, passes
from support.feed.ring_inputs import COUNT, Made, Samples, any_bits, generator, padded, values, with_workers, without_workers
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from gpuaug import StreamedLoader

# What a finaliser raises nobody else hears of.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


class Shards(IterableDataset):
    """A stream of which each worker has a part, of another length."""

    def __iter__(self):
        info = get_worker_info()
        for index in range(info.id, 40 - 9 * info.id, info.num_workers):
            yield values(index, 3), index, f"of {info.id}"


class Drawn(Dataset):
    """Samples that are drawn, from each of the generators that a worker has."""

    def __len__(self):
        return 2 * COUNT

    def __getitem__(self, index):
        return torch.rand(3), torch.tensor(random.random()), torch.tensor(np.random.rand())


LOADERS = {
    "map-style": with_workers(Samples()),
    "last one dropped": with_workers(Samples(), drop_last=True, num_workers=1),
    "one sample a batch": with_workers(Samples(), batch_size=1, num_workers=1),
    "no batches": with_workers(Samples(), batch_size=None, num_workers=1),
    "custom collate": with_workers(Samples(), collate_fn=padded, num_workers=1),
    "default collate, named": with_workers(Samples(), collate_fn=default_collate, num_workers=1),
    "stream": with_workers(Shards()),
    "stream without batches": with_workers(Shards(), batch_size=None),
    "drawn": with_workers(Drawn()),
    "one worker": with_workers(Samples(), num_workers=1),
    "three workers": with_workers(Samples(), num_workers=3, prefetch_factor=1),
    "many ready": with_workers(Samples(), batch_size=1, prefetch_factor=5),
    "page-locked": with_workers(Samples(), pin_memory=True, num_workers=1),
    "persistent": with_workers(Samples(), persistent_workers=True),
    "persistent stream": with_workers(Shards(), persistent_workers=True),
    "shared as tensors": with_workers(TensorDataset(values(0, 40, 5).share_memory_(), torch.arange(40)), num_workers=1),
}


SLOW = ("stream without batches", "one worker", "many ready")
CASES = [pytest.param(make, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, make in LOADERS.items()]


@pytest.mark.parametrize("make", CASES)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_dataloader_options_through_ring_match_plain_feed(make):
    options = {"depends_on_workers": isinstance(make().dataset, Shards | Drawn)}
    assert_ring_is_plain(make, epochs=2 if make().persistent_workers else 1, **options)


@pytest.mark.parametrize("persistent", [False, True])
def test_every_batch_uses_a_slot_from_second_epoch_on(persistent):
    wrapped = with_workers(Samples(), num_workers=1, persistent_workers=persistent)()
    with StreamedLoader(wrapped, device="cpu", feed="ring") as loader:
        list(loader)
        stats = loader.stats()
        first = replace(stats)
        assert first.other_batches >= 1, "the first one, which shows its size"
        for epoch in range(1, 3):
            list(loader)
            assert stats.slot_batches - first.slot_batches == epoch * len(loader)
        assert stats.other_batches == first.other_batches


class Slow(Dataset):
    """Samples that take their time, each another."""

    def __len__(self):
        return 2 * COUNT

    def __getitem__(self, index):
        time.sleep(random.Random(index).choice([0, 0, 0.001, 0.02]))
        return values(index, 100)


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), 2, pytest.param(8, marks=pytest.mark.slow)])
def test_slow_workers_at_every_depth(depth):
    assert_ring_is_plain(with_workers(Slow()), depth=depth)


def test_slow_consumer_with_more_batches_than_slots():
    def make():
        return with_workers(Made(lambda i: any_bits(i, torch.uint8, 100_000), 60))()

    want = [list(without_workers(make)())]
    with StreamedLoader(make(), device="cpu", feed="ring") as loader:
        got = []
        for index, batch in enumerate(loader):
            got.append(batch)
            time.sleep(0.02 if index % 10 == 0 else 0)
        assert loader.stats().slot_batches > 0
    assert_same([got], want)


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_forkserver_and_spawn_workers(method):
    make = with_workers(Samples(), multiprocessing_context=method, num_workers=1, persistent_workers=True)
    got, stats, _ = passes(make, "ring", epochs=2)
    assert_same(got, [list(DataLoader(Samples(), batch_size=2))] * 2)
    assert stats.slot_batches > COUNT


def test_file_system_sharing_strategy():
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        assert_ring_is_plain(with_workers(Samples(), num_workers=1))
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


class Marked(Dataset):
    """A dataset that its worker has to have prepared."""

    mark = -1

    def __len__(self):
        return 2 * COUNT

    def __getitem__(self, index):
        return torch.tensor([index, self.mark])


def mark_worker(worker_id):
    get_worker_info().dataset.mark = 100 + worker_id


def test_worker_init_fn_is_called():
    got, _ = assert_ring_is_plain(with_workers(Marked(), worker_init_fn=mark_worker), depends_on_workers=True)
    assert {mark for batch in got[0] for mark in batch[:, 1].tolist()} == {100, 101}


class Backwards(Sampler):
    def __iter__(self):
        return iter(range(2 * COUNT, -1, -1))

    def __len__(self):
        return 2 * COUNT + 1


ORDERS = {
    "shuffled": lambda: {"shuffle": True, "generator": generator()},
    "shuffled by the global generator": lambda: {"shuffle": True},
    "random": lambda: {"sampler": RandomSampler(range(25), num_samples=30, replacement=True, generator=generator())},
    "weighted": lambda: {"sampler": WeightedRandomSampler(range(25), 30, generator=generator())},
    "backwards": lambda: {"sampler": Backwards()},
    "in batches": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(range(25), generator=generator()), 3, False),
        "batch_size": 1,
    },
    "listed batches": lambda: {"batch_sampler": [[0, 1], [5], [2, 3, 4], *([i, 2 * i] for i in range(9))], "batch_size": 1},
    "lists of indices": lambda: {"sampler": BatchSampler(SequentialSampler(range(25)), 2, True), "batch_size": None},
}


class Gathered(Samples):
    """Takes one index or a list of them."""

    def __getitem__(self, index):
        return torch.tensor(index) if isinstance(index, list) else super().__getitem__(index)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
def test_samplers_draw_the_same_and_leave_generators_the_same(order):
    states = {}

    def make():
        wrapped = with_workers(Gathered(), num_workers=1, **order())()
        made_loaders.append(wrapped)
        return wrapped

    made_loaders = []
    assert_ring_is_plain(make)
    plain, through_ring = made_loaders
    for name, wrapped in (("plain", plain), ("ring", through_ring)):
        states[name] = [
            source.generator.get_state()
            for source in (wrapped, wrapped.sampler, getattr(wrapped.batch_sampler, "sampler", None))
            if getattr(source, "generator", None) is not None
        ]
    assert len(states["plain"]) == len(states["ring"])
    for one, other in zip(states["plain"], states["ring"], strict=True):
        assert torch.equal(one, other)
