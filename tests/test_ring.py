"""The ring, seen from outside: whatever a loader gives, it gives bit for bit through slots, and nothing is left behind."""

import gc
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from ast import literal_eval
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from multiprocessing.reduction import ForkingPickler
from pickle import loads
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence
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

from gpuaug import ArgumentError, ArgumentTypeError, IteratorEndedError, StreamedLoader, ring
from gpuaug.collating import described_or_not

# What a finaliser raises nobody else hears of.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")

WAIT_S = 10.0
COUNT = 12
"""Batches of most tests: with two workers the first five at most are on their way before slots can have been carved."""


@pytest.fixture(scope="module", autouse=True)
def _workers_share_what_there_is():
    # Many are forked here. What a worker's garbage collector does not touch need not be copied for it.
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _slots_are_overwritten_when_they_are_given_back(monkeypatch):
    monkeypatch.setattr(ring, "POISON", True)


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


# What is compared, and how


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def is_dense(tensor):
    """Whether values fill their memory, so that a copy has the same strides."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def assert_same_tensor(got, want, where):
    assert type(got) is type(want), where
    for name in ("dtype", "shape", "layout", "device", "requires_grad", "is_leaf"):
        assert getattr(got, name) == getattr(want, name), (where, name)
    assert got.is_inference() == want.is_inference(), where
    if want.layout is torch.sparse_coo:
        assert got.is_coalesced() == want.is_coalesced(), where
        assert torch.equal(got.coalesce().indices(), want.coalesce().indices()), where
        assert torch.equal(got.coalesce().values(), want.coalesce().values()), where
    elif want.layout is torch.sparse_csr:
        for part in ("crow_indices", "col_indices", "values"):
            assert torch.equal(getattr(got, part)(), getattr(want, part)()), where
    else:
        assert torch.equal(bits(got), bits(want)), where
        assert got.is_conj() == want.is_conj(), where
        assert got.is_neg() == want.is_neg(), where
        if is_dense(want):
            assert got.stride() == want.stride(), where


def assert_same(got, want, where="batch"):
    """The same containers, and in them the same bits."""
    if isinstance(want, torch.Tensor):
        assert_same_tensor(got, want, where)
        return
    assert type(got) is type(want), where
    if isinstance(want, np.ndarray):
        assert (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes()), where
    elif isinstance(want, dict | UserDict):
        assert list(got) == list(want), where
        for key in want:
            assert_same(got[key], want[key], f"{where}[{key!r}]")
    elif isinstance(want, tuple | list):
        assert len(got) == len(want), where
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same(a, b, f"{where}[{index}]")
    elif is_dataclass(want):
        for field in fields(want):
            assert_same(getattr(got, field.name), getattr(want, field.name), f"{where}.{field.name}")
    else:
        assert got == want, where


def passes(make, feed, epochs=1, **options):
    """All batches of some epochs, kept until the last of them has arrived; the counters; torch's generator afterwards."""
    torch.manual_seed(7)
    with StreamedLoader(make(), device="cpu", feed=feed, **options) as loader:
        found = [list(loader) for _ in range(epochs)]
        return found, replace(loader.stats()), torch.get_rng_state()


def assert_ring_is_plain(make, *, slots=True, epochs=1, **options):
    """Both feeds give the same. ``slots`` says whether any batch must have come through one, ``None`` that it may."""
    want, plain, plain_state = passes(make, "plain", epochs, **{k: v for k, v in options.items() if k != "feed_bytes"})
    got, stats, state = passes(make, "ring", epochs, **options)
    assert_same(got, want, "epochs")
    assert torch.equal(state, plain_state), "the global generator"
    assert plain.slot_batches == 0
    count = sum(map(len, got))
    assert stats.slot_batches + stats.other_batches == stats.batches == count
    if slots is not None:
        assert (stats.slot_batches > 0) == slots, stats
    return got, stats


# Kinds of batches


class Point(NamedTuple):
    x: torch.Tensor
    name: str


Pair = namedtuple("Pair", "images labels")


@dataclass
class Record:
    images: torch.Tensor
    meta: dict
    note: str = "none"


@dataclass(frozen=True, slots=True)
class Frozen:
    images: torch.Tensor
    labels: list


class Image(torch.Tensor):
    """A subclass, which must arrive as one."""


class Opaque:
    """A leaf that nobody looks into."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value

    __hash__ = None


DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32),
]


def values(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def any_bits(seed, dtype, *shape):
    """Every pattern of bits, so NaNs of all kinds too; of booleans those that are booleans."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def twice(i):
    tensor = values(i, 4)
    return {"first": tensor, "again": [tensor, (tensor,)]}


def two_views(i):
    base = values(i, 6, 8)
    return base, base[2:], base[:, ::2], base.t(), base[1:1], base.diagonal()


PLACED = {
    "tensor": lambda i: values(i, 3, 5),
    "tuple": lambda i: (values(i, 3, 5), torch.arange(i)),
    "list": lambda i: [values(i, 3, 5), torch.arange(3)],
    "dict": lambda i: {"b": values(i, 3, 5), "a": torch.tensor(i)},
    "nested": lambda i: {"x": [(values(i, 2), {"y": torch.arange(3)}), []], "z": ((), {}, (torch.ones(1),))},
    "named tuples": lambda i: Pair(values(i, 3), Point(torch.tensor([i]), f"number {i}")),
    "dataclass": lambda i: Record(values(i, 3), {"label": torch.tensor(i)}, note=str(i)),
    "frozen dataclass": lambda i: Frozen(values(i, 3), [torch.tensor(i), "text"]),
    "other mappings": lambda i: [
        OrderedDict(b=values(i, 3), a=1),
        defaultdict(int, x=torch.arange(i)),
        UserDict(u=torch.ones(i)),
    ],
    "no tensors among tensors": lambda i: (values(i, 2), None, i, "text", 0.5, b"bytes", ["a", "b"], Opaque(i), {1, 2}, ...),
    "arrays": lambda i: (np.arange(i), np.full((2, 2), i, np.float16), values(i, 2), np.float32(i)),
    "views": two_views,
    "channels last": lambda i: (
        values(i, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        values(i, 2, 3, 2, 4, 5).contiguous(memory_format=torch.channels_last_3d),
        values(i, 1, 1, 4, 5).contiguous(memory_format=torch.channels_last),
        values(i, 2, 3, 4, 5).permute(3, 1, 0, 2),
    ),
    "expanded": lambda i: (
        values(i, 3, 1).expand(3, 100),
        torch.tensor(i).expand(4, 5),
        values(i, 9).as_strided((4, 3), (2, 1)),
    ),
    "subclass beside a tensor": lambda i: (values(i, 3).as_subclass(Image), values(i, 3)),
    "requires grad beside a tensor": lambda i: (values(i, 3).requires_grad_(), values(i, 3), torch.nn.Parameter(values(i, 2))),
    "the same one twice": twice,
    "sparse beside a tensor": lambda i: (torch.eye(i + 1).to_sparse(), torch.eye(3).to_sparse_csr() * i, torch.arange(3)),
    "nothing in them": lambda i: (torch.empty(0), torch.empty(0, 3, 4), torch.empty(2, 0).t(), values(i, 2)),
    "without dimensions": lambda i: (torch.tensor(i), torch.tensor(i / 7), torch.tensor(i % 2 == 0)),
    "dtypes": lambda i: {str(dtype): any_bits(i, dtype, 3, 5) for dtype in DTYPES},
    "conjugated and negated": lambda i: (
        torch.complex(values(i, 4), values(i + 1, 4)).conj(),
        torch.complex(values(i, 4), values(i + 1, 4)).conj().imag,
        torch.complex(values(i, 4), values(i + 1, 4)).real,
    ),
    "an object that moves itself": lambda i: (pack_sequence([values(i, 4, 2), values(i, 1, 2)]), values(i, 3)),
    "many small ones": lambda i: [torch.tensor([index, i]) for index in range(40)],
    "one large one": lambda i: any_bits(i, torch.uint8, 300_001),
}
"""Batches some tensor of which must come through a slot."""

NOT_PLACED = {
    "no tensor": lambda i: {"text": str(i), "number": i, "array": np.arange(i)},
    "none": lambda i: None,
    "empty": lambda i: [[], (), {}],
    "subclass": lambda i: values(i, 3).as_subclass(Image),
    "requires grad": lambda i: values(i, 3).requires_grad_(),
    "sparse": lambda i: torch.eye(i + 1).to_sparse(),
}
"""Batches that have to travel as they would."""


class Made(Dataset):
    """Whole batches, made by a function of their number."""

    def __init__(self, make, count=COUNT):
        self.make = make
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.make(index)


def whole(samples):
    """A collate function that takes a sample for the batch, as it is."""
    return samples[0]


def made(make, count=COUNT, **options):
    return lambda: DataLoader(Made(make, count), collate_fn=whole, **{"num_workers": 2, **options})


@pytest.mark.parametrize("make", PLACED.values(), ids=PLACED.keys())
def test_whatever_a_collate_function_returns_arrives_bit_for_bit(make):
    assert_ring_is_plain(made(make, num_workers=1))


@pytest.mark.parametrize("make", NOT_PLACED.values(), ids=NOT_PLACED.keys())
def test_what_cannot_lie_in_a_slot_travels_as_it_would(make):
    assert_ring_is_plain(made(make, num_workers=1), slots=False)


def test_a_tensor_that_stands_in_two_places_stays_one():
    (batches,), _ = assert_ring_is_plain(made(twice))
    assert all(batch["first"] is batch["again"][0] is batch["again"][1][0] for batch in batches)


def test_what_arrives_is_memory_of_its_own():
    (batches, again), _ = assert_ring_is_plain(made(lambda i: (values(i, 5), values(i, 5))), epochs=2)
    for batch in batches:
        for tensor in batch:
            tensor.fill_(-1)
    assert all((tensor >= 0).all() for batch in again for tensor in batch)
    addresses = [tensor.data_ptr() for epoch in (batches, again) for batch in epoch for tensor in batch]
    assert len(set(addresses)) == len(addresses)


class NoList(tuple):
    """A container that cannot be rebuilt with other values in it."""

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))

    def __reduce__(self):
        return NoList, tuple(self)


def test_a_container_that_cannot_be_rebuilt_is_as_the_plain_feed_has_it():
    got, _ = assert_ring_is_plain(made(lambda i: NoList(values(i, 2), i)), slots=False)
    assert type(got[0][0]) is NoList


# Datasets and collate functions


class Samples(Dataset):
    """Samples of several kinds, for the default collate function."""

    def __len__(self):
        return 2 * COUNT + 1

    def __getitem__(self, index):
        return {
            "image": values(index, 3, 4, 4),
            "array": np.full((2, 3), index, np.int16),
            "label": index,
            "weight": index / 3,
            "name": f"sample {index}",
            "pair": Pair(torch.tensor(index), [np.float32(index), True]),
            "nothing": torch.empty(0),
        }


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


def padded(samples):
    """A collate function whose batches differ in shape."""
    images = torch.stack([sample["image"] for sample in samples])
    return {"images": images[..., : 1 + samples[0]["label"] % 4], "names": [sample["name"] for sample in samples]}


def with_workers(dataset, **options):
    return lambda: DataLoader(dataset, **{"num_workers": 2, "batch_size": 2, **options})


LOADERS = {
    "map-style": with_workers(Samples()),
    "last one dropped": with_workers(Samples(), drop_last=True),
    "one sample a batch": with_workers(Samples(), batch_size=1),
    "no batches": with_workers(Samples(), batch_size=None),
    "custom collate": with_workers(Samples(), collate_fn=padded),
    "default collate, named": with_workers(Samples(), collate_fn=default_collate),
    "stream": with_workers(Shards()),
    "stream without batches": with_workers(Shards(), batch_size=None),
    "drawn": with_workers(Drawn()),
    "one worker": with_workers(Samples(), num_workers=1),
    "three workers": with_workers(Samples(), num_workers=3, prefetch_factor=1),
    "many ready": with_workers(Samples(), batch_size=1, prefetch_factor=5),
    "page-locked": with_workers(Samples(), pin_memory=True),
    "persistent": with_workers(Samples(), persistent_workers=True),
    "persistent stream": with_workers(Shards(), persistent_workers=True),
    "shared as tensors": with_workers(TensorDataset(values(0, 40, 5).share_memory_(), torch.arange(40))),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS.keys())
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_what_a_loader_gives_arrives_bit_for_bit(make):
    assert_ring_is_plain(make, epochs=2 if make().persistent_workers else 1)


@pytest.mark.parametrize("persistent", [False, True])
def test_from_the_second_epoch_on_every_batch_comes_through_a_slot(persistent):
    wrapped = with_workers(Samples(), persistent_workers=persistent)()
    with StreamedLoader(wrapped, device="cpu", feed="ring") as loader:
        list(loader)
        stats = loader.stats()
        first = replace(stats)
        assert first.other_batches >= 1, "the first one, which shows its size"
        for epoch in range(1, 4):
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


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 8])
def test_slow_workers_and_every_depth(depth):
    assert_ring_is_plain(with_workers(Slow()), depth=depth)


def test_a_slow_consumer_of_more_batches_than_there_are_slots():
    def make():
        return with_workers(Made(lambda i: any_bits(i, torch.uint8, 100_000), 120))()

    want = [list(epoch) for epoch in passes(make, "plain", 1)[0]]
    with StreamedLoader(make(), device="cpu", feed="ring") as loader:
        got = []
        for index, batch in enumerate(loader):
            got.append(batch)
            time.sleep(0.02 if index % 10 == 0 else 0)
        assert loader.stats().slot_batches > 0
    assert_same([got], want)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_that_are_not_forked(method):
    make = with_workers(Samples(), multiprocessing_context=method, num_workers=1, persistent_workers=True)
    got, stats, _ = passes(make, "ring", epochs=2)
    assert_same(got, [list(DataLoader(Samples(), batch_size=2))] * 2)
    assert stats.slot_batches > COUNT


def test_both_ways_in_which_torch_shares_memory():
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        assert_ring_is_plain(with_workers(Samples()))
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


def test_the_function_that_prepares_workers_is_called_in_them():
    got, _ = assert_ring_is_plain(with_workers(Marked(), worker_init_fn=mark_worker))
    assert {mark for batch in got[0] for mark in batch[:, 1].tolist()} == {100, 101}


class Backwards(Sampler):
    def __iter__(self):
        return iter(range(2 * COUNT, -1, -1))

    def __len__(self):
        return 2 * COUNT + 1


def generator(seed=3):
    return torch.Generator().manual_seed(seed)


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
def test_samplers_and_their_generators(order):
    states = {}

    def make():
        wrapped = with_workers(Gathered(), **order())()
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


# Shapes and budgets


def sized(sizes, **options):
    return made(lambda i: (any_bits(i, torch.uint8, sizes[i]), torch.tensor(i)), len(sizes), **options)


SIZES = {
    "changing": [(37 * i) % 11 * 1000 + 1 for i in range(24)],
    "growing": [1000 * (i + 1) for i in range(24)],
    "growing by far": [int(1.6**i) for i in range(30)],
    "shrinking": [100_000 // (i + 1) for i in range(24)],
    "one that is larger": [2_000_000 if i == 12 else 100 for i in range(24)],
    "empty at first": [0] * 8 + [5000] * 16,
    "around a page": [4096 + (i % 3) - 1 for i in range(24)],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_may_have_any_size(sizes, persistent):
    assert_ring_is_plain(sized(sizes, num_workers=2 if persistent else 1, persistent_workers=persistent), epochs=2)


def test_batches_that_have_grown_come_through_slots_again():
    sizes = [1000] * 8 + [50_000] * 24
    _, stats = assert_ring_is_plain(sized(sizes), epochs=2)
    assert stats.slot_batches > 32 + 8, "all of the second epoch, and some larger ones of the first"


def ring_bytes():
    """What the rings of this process take, in memory."""
    found = 0
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "gpuaug-ring" in os.readlink(f"/proc/self/fd/{entry}"):
                found = max(found, os.stat(f"/proc/self/fd/{entry}").st_blocks * 512)
    return found


@pytest.mark.parametrize("persistent", [False, True])
def test_slots_take_no_more_memory_than_they_may(persistent):
    budget = 4_000_000
    sizes = [20_000 * (i // 5 + 1) for i in range(40)]
    make = made(lambda i: any_bits(i, torch.uint8, sizes[i]), len(sizes), persistent_workers=persistent)
    with StreamedLoader(make(), device="cpu", feed="ring", feed_bytes=budget) as loader:
        most = 0
        for _ in range(3):
            for _ in loader:
                most = max(most, ring_bytes())
        assert loader.stats().slot_batches > 0
        assert 0 < most <= budget + 1_000_000


@pytest.mark.parametrize("feed_bytes", [0, 1, 100, 4095])
def test_a_budget_in_which_no_slot_fits(feed_bytes):
    assert_ring_is_plain(made(lambda i: values(i, 5000)), slots=False, feed_bytes=feed_bytes)


@pytest.mark.parametrize(("workers", "slots"), [(1, True), (2, False)])
def test_a_budget_of_one_slot(workers, slots):
    num_bytes = 8 * 4096
    make = made(lambda i: any_bits(i, torch.uint8, num_bytes), 40, num_workers=workers)
    assert_ring_is_plain(make, slots=slots, feed_bytes=num_bytes)


def test_a_budget_that_only_the_smaller_batches_fit_into():
    sizes = [1000 if i % 3 else 5_000_000 for i in range(1, 25)]
    assert_ring_is_plain(sized(sizes), feed_bytes=300_000)


# Failures


class OwnError(Exception):
    def __init__(self, number, *, text):
        super().__init__(f"{number}: {text}")


class Failing(Dataset):
    """Fails at some sample."""

    def __init__(self, error, at=14):
        self.error, self.at = error, at

    def __len__(self):
        return 2 * COUNT

    def __getitem__(self, index):
        if index == self.at:
            raise self.error
        return values(index, 3)


class FailingStream(IterableDataset):
    def __iter__(self):
        for index in range(2 * COUNT):
            if index == 14:
                raise LookupError("fourteen")
            yield values(index, 3)


def failing_collate(samples):
    if any(sample["label"] == 14 for sample in samples):
        raise ZeroDivisionError("of the collate function")
    return default_collate(samples)


def fail_to_prepare(worker_id):
    raise OSError("no worker")


class Ragged(Dataset):
    def __len__(self):
        return 2 * COUNT

    def __getitem__(self, index):
        return torch.zeros(3 if index != 15 else 4)


def alone(dataset, **options):
    return with_workers(dataset, num_workers=1, **options)


FAILURES = {
    "dataset": with_workers(Failing(LookupError("fourteen"))),
    "key": alone(Failing(KeyError("a\nb"))),
    "no message": alone(Failing(ValueError())),
    "cannot be made again": alone(Failing(OwnError(7, text="x"))),
    "stop": alone(Failing(StopIteration("odd"))),
    "first sample": alone(Failing(LookupError("first"), at=0)),
    "stream": alone(FailingStream()),
    "collate": with_workers(Samples(), collate_fn=failing_collate),
    "default collate": alone(Ragged()),
    "preparing": alone(Samples(), worker_init_fn=fail_to_prepare),
    "persistent": alone(Failing(LookupError("fourteen")), persistent_workers=True),
    "persistent collate": alone(Samples(), collate_fn=failing_collate, persistent_workers=True),
}


def failure(loader):
    """What arrived, and of the error that came then all but the lines of its traceback."""
    arrived = []
    try:
        arrived.extend(loader)
    except Exception as error:
        lines = str(error).splitlines()
        caught = type(error), lines[:1], lines[-1:], error.__notes__, error.__cause__
    else:
        caught = None
    return arrived, caught


@pytest.mark.parametrize("make", FAILURES.values(), ids=FAILURES.keys())
def test_an_error_is_the_one_that_the_plain_feed_raises(make):
    found = {}
    for feed in ("plain", "ring"):
        torch.manual_seed(7)
        with StreamedLoader(make(), device="cpu", feed=feed) as loader:
            found[feed] = [failure(loader) for _ in range(2)]
            if feed == "ring" and len(found[feed][0][0]) > 6:
                assert loader.stats().slot_batches > 0
    for (got, error), (want, plain_error) in zip(found["ring"], found["plain"], strict=True):
        assert_same(got, want)
        assert error == plain_error


def every_third_fails(samples):
    if samples[0] % 3 == 0:
        raise LookupError("every third")
    return torch.tensor(samples)


def test_errors_of_a_collate_function_take_no_slots_along():
    order = {"sampler": [1, 2, 4, 5, 1, 2, 4, 5, 3], "batch_size": 1}
    wrapped = with_workers(range(7), collate_fn=every_third_fails, num_workers=1, persistent_workers=True, **order)()
    with StreamedLoader(wrapped, device="cpu", feed="ring") as loader:
        for _ in range(20):
            assert failure(loader)[1][0] is LookupError
        before = loader.stats().slot_batches
        assert failure(loader)[1][0] is LookupError
        assert loader.stats().slot_batches - before == 8


SUBPROCESS = """
import atexit, gc, multiprocessing, os, signal, sys, threading, time, traceback
import torch
from torch.utils.data import DataLoader, Dataset
from gpuaug import StreamedLoader

class Numbers(Dataset):
    def __init__(self, killed=None):
        self.killed = killed

    def __len__(self):
        return 80

    def __getitem__(self, index):
        if index == self.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((50,), index)

def held():
    links = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            pass
    with open("/proc/self/maps") as maps:
        return [name for name in [*links, *maps] if "gpuaug-ring" in name]

def each(cases):
    "Go on in a process of its own for each case; the first one ends when all have, and says how."
    started = {}
    for name, case in cases.items():
        pid = os.fork()
        if pid == 0:
            return case
        started[name] = pid
    print({name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in started.items()})
    sys.exit()
"""

KILLED = """
OPTIONS = each({"one epoch": {}, "persistent": {"persistent_workers": True}})
arrived, caught = [], None
loader = StreamedLoader(DataLoader(Numbers(41), batch_size=2, num_workers=2, **OPTIONS), device="cpu", feed="ring")
try:
    try:
        for batch in loader:
            arrived.append(batch[:, 0].tolist())
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the handler may raise here once more, for the same death
except Exception as error:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    traceback.clear_frames(error.__traceback__)
    caught = type(error), str(error)
assert arrived == [[2 * index, 2 * index + 1] for index in range(len(arrived))], arrived
assert len(arrived) <= 20, arrived
assert caught[0] is RuntimeError, caught
assert "DataLoader worker" in caught[1], caught
assert held()
loader.loader.dataset.killed = None
if not OPTIONS:
    again = [batch[:, 0].tolist() for batch in loader]
    assert again == [[2 * index, 2 * index + 1] for index in range(40)], again
    assert loader.stats().slot_batches > 0
loader.close()
del loader
gc.collect()
deadline = time.monotonic() + 20
while multiprocessing.active_children():
    assert time.monotonic() < deadline, multiprocessing.active_children()
    time.sleep(0.01)
assert not [thread for thread in threading.enumerate() if thread.name == "gpuaug-feed"]
assert not held(), held()
"""


def run(script):
    """What a process of its own says of its cases, and what it prints; a hang is a failure."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    *printed, statuses = done.stdout.splitlines()
    return literal_eval(statuses), printed


@pytest.mark.timeout(120)
def test_a_worker_that_is_killed_is_an_error_and_leaves_nothing():
    # In processes of their own: DataLoader's handler raises wherever the main thread is when the signal arrives.
    statuses, _ = run(SUBPROCESS + KILLED)
    assert statuses == {"one epoch": 0, "persistent": 0}


EXITS = """
def in_the_middle():
    global batches
    batches = iter(loader)
    for _ in range(9):
        next(batches)

def at_the_end():
    list(loader)

def by_an_error():
    for index, _ in enumerate(loader):
        if index == 9:
            raise SystemExit(3)

leave, persistent = each({
    "in the middle": (in_the_middle, False),
    "in the middle, persistent": (in_the_middle, True),
    "at the end, persistent": (at_the_end, True),
    "by an error": (by_an_error, False),
})
workers = dict(batch_size=2, num_workers=2, persistent_workers=persistent)
loader = StreamedLoader(DataLoader(Numbers(), **workers), device="cpu", feed="ring")
atexit.register(lambda: print(*[child.pid for child in multiprocessing.active_children()]))
leave()
"""


@pytest.mark.timeout(120)
def test_a_process_ends_although_nothing_was_closed():
    statuses, printed = run(SUBPROCESS + EXITS)
    assert statuses == {"in the middle": 0, "in the middle, persistent": 0, "at the end, persistent": 0, "by an error": 3}
    workers = " ".join(printed).split()
    assert len(workers) == 6, "two each where the iterator was open or the workers persist"
    assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}")], "workers that outlive their process"


# What is left behind


def rings_here():
    """What of rings this process has open or mapped."""
    links = []
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum("gpuaug-ring" in name for name in [*links, *maps])


@pytest.fixture
def held():
    """How much of rings there is that the test has made; a failed one's traceback may still hold others."""
    end = time.monotonic() + 15  # a worker that was slow in the test before takes its time to end
    while rings_here() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    before = rings_here()
    return lambda: rings_here() - before


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=["one epoch", "persistent"])
def test_forty_epochs_that_are_left_anywhere_leave_nothing(options, held):
    workers, chosen = set(), random.Random(0)
    wrapped = DataLoader(TensorDataset(torch.arange(80)), batch_size=2, num_workers=1, **options)
    loader = StreamedLoader(wrapped, device="cpu", feed="ring")
    before = None
    for epoch in range(40):
        stop = chosen.randrange(42)
        for index, (batch,) in enumerate(loader):
            workers |= {child.pid for child in multiprocessing.active_children()}
            assert batch.tolist() == [2 * index, 2 * index + 1]
            if index == stop:
                break
        if epoch in {3, 39}:
            gc.collect()
            now = len(os.listdir("/proc/self/fd")), held(), threading.active_count()
            before = before or now
            assert now == before
    assert loader.stats().slot_batches > loader.stats().batches * 0.9
    loader.close()
    del loader
    gc.collect()
    until(lambda: not [child for child in multiprocessing.active_children() if child.pid in workers])
    assert not held()
    assert not [name for name in os.listdir("/dev/shm") if any(f"torch_{pid}_" in name for pid in workers)]


def leave_by_break(loader):
    for index, _ in enumerate(loader):
        if index == 8:
            break


def leave_by_error(loader):
    with suppress(LookupError):
        for index, _ in enumerate(loader):
            if index == 8:
                raise LookupError


def leave_by_del(loader):
    batches = iter(loader)
    for _ in range(9):
        next(batches)
    del batches


def leave_by_close(loader):
    batches = iter(loader)
    for _ in range(9):
        next(batches)
    loader.close()
    with pytest.raises(IteratorEndedError):
        next(batches)


def leave_unread(loader):
    next(iter(loader))


@pytest.mark.parametrize("leave", [list, leave_by_break, leave_by_error, leave_by_del, leave_by_close, leave_unread])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_ring_goes_with_its_loader(leave, persistent, held):
    children, threads = set(multiprocessing.active_children()), set(threading.enumerate())
    wrapped = with_workers(Samples(), num_workers=1, persistent_workers=persistent)()
    loader = StreamedLoader(wrapped, device="cpu", feed="ring")
    assert not held(), "nothing is taken before it is needed"
    gc.disable()
    try:
        leave(loader)
        if not persistent:
            assert set(multiprocessing.active_children()) <= children
        assert [batch["label"][0].item() for batch in loader] == list(range(0, 2 * COUNT + 1, 2)), "it can be read again"
        assert held()
        loader.close()
        until(lambda: set(multiprocessing.active_children()) <= children)
        until(lambda: set(threading.enumerate()) <= threads)  # those of torch's queues take a moment
        assert not held(), "closed"
        leave(loader)
        del loader
    finally:
        gc.enable()
    gc.collect()
    assert not held(), "dropped"
    until(lambda: set(multiprocessing.active_children()) <= children)
    until(lambda: set(threading.enumerate()) <= threads)


def test_a_batch_outlives_its_ring(held):
    loader = StreamedLoader(with_workers(Samples())(), device="cpu", feed="ring")
    list(loader)
    batches = [batch["image"] for batch in loader]
    loader.close()
    del loader
    gc.collect()
    assert not held()
    want = torch.stack([values(index, 3, 4, 4) for index in range(2 * COUNT + 1)])
    assert torch.equal(torch.cat(batches), want)


# Beside one another


@pytest.mark.parametrize("which", ["one loader", "two loaders"])
def test_two_iterators_that_take_turns(which):
    wrapped = with_workers(Samples())()
    first = StreamedLoader(wrapped, device="cpu", feed="ring")
    second = first if which == "one loader" else StreamedLoader(wrapped, device="cpu", feed="ring")
    want = list(wrapped)
    for _ in range(2):
        found = list(zip(first, second, strict=True))
        assert_same([a for a, _ in found], want)
        assert_same([b for _, b in found], want)
    assert first.stats().slot_batches > 0
    leave_by_break(first)
    before = first.stats().slot_batches
    assert_same(list(first), want)
    assert first.stats().slot_batches > before


def test_an_iterator_that_goes_on_while_others_come_and_go():
    wrapped = with_workers(Samples())()
    loader = StreamedLoader(wrapped, device="cpu", feed="ring")
    want = list(wrapped)
    list(loader)
    batches = iter(loader)
    got = [next(batches)]
    for turn in range(4):
        assert_same(list(loader) if turn % 2 else [next(iter(loader))], want if turn % 2 else want[:1])
        got.extend(next(batches) for _ in range(2))
    got.extend(batches)
    assert_same(got, want)


class Lingering:
    """A collate function that, while it is told to, takes long from some batch on, and leaves a mark in what it makes."""

    def __init__(self, at):
        self.at = at
        self.lingers = multiprocessing.Value("i", 1)

    def __call__(self, samples):
        old = self.lingers.value
        if old and samples[0] >= self.at:
            time.sleep(0.6)
        return torch.full((1000,), samples[0] + 1000 * old)


def test_a_worker_that_is_still_busy_with_the_pass_before_writes_nothing_into_this_one(monkeypatch):
    monkeypatch.setattr("gpuaug.feed.STOP_S", 0.02)
    collate = Lingering(16)
    loader = StreamedLoader(
        DataLoader(range(40), num_workers=1, prefetch_factor=8, collate_fn=collate), device="cpu", feed="ring"
    )
    batches = iter(loader)
    for _ in range(16):
        next(batches)
    batches.close()
    collate.lingers.value = 0
    batches = iter(loader)
    got = [next(batches)]
    time.sleep(0.9)  # the old worker writes now, while batches of the new one wait
    got.extend(batches)
    assert [batch.unique().tolist() for batch in got] == [[index] for index in range(40)]


def test_persistent_workers_have_one_reader():
    loader = StreamedLoader(with_workers(Samples(), persistent_workers=True)(), device="cpu", feed="ring")
    want = list(with_workers(Samples())())
    list(loader)
    for taken in range(9):
        first, second = iter(loader), iter(loader)
        for index in range(taken):
            assert_same(next(first), want[index])
        assert_same(next(second), want[0])
        if taken:
            with pytest.raises(IteratorEndedError, match="persistent_workers=False"):
                next(first)
        leave_by_break(second)
    before = replace(loader.stats())
    assert_same(list(loader), want)
    assert loader.stats().slot_batches - before.slot_batches == len(want), "no slot went with batches that nobody read"
    loader.close()


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=["one epoch", "persistent"])
def test_the_users_loader_is_not_changed(options):
    wrapped = with_workers(Samples(), **options)()
    before = dict(vars(wrapped))
    with StreamedLoader(wrapped, device="cpu", feed="ring") as loader:
        list(loader)
        leave_by_break(loader)
        assert vars(wrapped) == before
        want = list(wrapped)
        assert all(type(batch) is dict for batch in want)
        assert_same(list(loader), want)


class Named(DataLoader):
    """A subclass that is iterated as its base."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.name = "mine"


def test_a_subclass_that_is_iterated_as_its_base():
    assert_ring_is_plain(lambda: Named(Samples(), batch_size=2, num_workers=2))


@pytest.mark.parametrize(("before", "after"), [(1, 3), (1, 10), (2, 1), (2, 0), (0, 2)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_number_of_workers_may_change_after_the_loader_was_wrapped(before, after):
    sizes = [int(200_000 * 1.4 ** (i // 12)) for i in range(50)]
    wrapped = sized(sizes, num_workers=before)()
    want = list(sized(sizes, num_workers=0)())
    loader = StreamedLoader(wrapped, device="cpu", feed="ring", feed_bytes=2_000_000)
    assert_same([next(iter(loader)) for _ in range(2)], [want[0]] * 2)
    wrapped.num_workers = after
    wrapped.prefetch_factor = 2 if after else None
    assert_same(list(loader), want)


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_number_of_workers_may_change_while_an_iterator_is_open(after):
    wrapped = with_workers(Samples())()
    want = list(wrapped)
    loader = StreamedLoader(wrapped, device="cpu", feed="ring")
    list(loader)
    first = iter(loader)
    got = [next(first)]
    wrapped.num_workers = after
    wrapped.prefetch_factor = 2 if after else None
    second = iter(loader)
    again = [next(second)]
    got.extend(first)
    again.extend(second)
    assert_same(got, want)
    assert_same(again, want)


def test_what_is_replaced_between_epochs_is_used():
    wrapped = with_workers(Samples())()
    loader = StreamedLoader(wrapped, device="cpu", feed="ring")
    assert "image" in next(iter(loader))
    wrapped.collate_fn = padded
    assert_same(list(loader), list(wrapped))
    assert "images" in next(iter(loader))


# Settings of whoever iterates


def test_inference_mode_in_one_epoch_and_not_in_the_next():
    make = with_workers(Samples())
    for feed in ("plain", "ring"):
        loader = StreamedLoader(make(), device="cpu", feed=feed)
        found = []
        for mode in (True, False, True):
            with torch.inference_mode(mode):
                found.append(list(loader))
        assert [epoch[-1]["image"].is_inference() for epoch in found] == [True, False, True]
        assert_same(
            [[batch["label"].tolist() for batch in epoch] for epoch in found[:1]], [[b["label"].tolist() for b in make()]]
        )
        for epoch in found[1:2]:
            epoch[-1]["image"].add_(1)
    assert loader.stats().slot_batches > 0


def test_inference_mode_and_a_source_without_workers():
    loader = StreamedLoader(DataLoader(Samples(), batch_size=2), device="cpu", feed="ring")
    for mode in (True, False):
        with torch.inference_mode(mode):
            images = [batch["image"] for batch in loader]
        assert images[-1].is_inference() == mode
        assert torch.equal(torch.cat(images)[-1], values(2 * COUNT, 3, 4, 4))
    assert loader.stats().slot_batches > 0


def test_a_default_device_does_not_reach_the_slots():
    # Only a source that draws nothing by itself can be read so: a DataLoader takes its seed from the default device.
    loader = StreamedLoader(Source(lambda i: torch.full((3,), i, device="cpu")), device="cpu", feed="ring")
    for device in ("meta", "cpu"):
        with torch.device(device):
            found = [batch[0] for batch in loader]
        assert {each.device.type for each in found} == {"cpu"}
        assert torch.stack(found).tolist() == list(range(COUNT))
    assert loader.stats().slot_batches > 0


# Sources without workers


class Source:
    """Some other iterable."""

    def __init__(self, make, count=COUNT):
        self.make, self.count = make, count

    def __iter__(self):
        return (self.make(index) for index in range(self.count))


@pytest.mark.parametrize("make", PLACED.values(), ids=PLACED.keys())
def test_other_sources_come_through_slots_too(make):
    _, stats = assert_ring_is_plain(lambda: Source(make))
    assert stats.other_batches <= 1 or make is PLACED["other mappings"] or make is PLACED["tuple"], stats


@pytest.mark.parametrize("make", NOT_PLACED.values(), ids=NOT_PLACED.keys())
def test_other_sources_whose_batches_cannot_lie_in_a_slot(make):
    assert_ring_is_plain(lambda: Source(make), slots=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (values(index, 3) for index in range(COUNT)),
        lambda: map(torch.tensor, range(COUNT)),
        lambda: DataLoader(Samples(), batch_size=2),
        lambda: DataLoader(Samples(), batch_size=None),
        lambda: DataLoader(Samples(), batch_size=2, shuffle=True, collate_fn=padded, generator=generator()),
        lambda: torch.arange(COUNT),
    ],
    ids=["generator", "map", "no workers", "no batches", "shuffled", "tensor"],
)
def test_sources_that_are_read_in_this_process(make):
    assert_ring_is_plain(make)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("feed_bytes", [None, 50_000, 0])
def test_other_sources_may_have_batches_of_any_size(sizes, feed_bytes):
    def make():
        return Source(lambda i: (any_bits(i, torch.uint8, sizes[i]), torch.tensor(i)), len(sizes))

    assert_ring_is_plain(make, slots=feed_bytes != 0, feed_bytes=feed_bytes)


def test_a_generator_that_fails_is_as_under_the_plain_feed():
    def failing():
        for index in range(9):
            yield values(index, 3)
        raise LookupError("nine")

    plain, through_ring = (failure(StreamedLoader(failing(), device="cpu", feed=feed)) for feed in ("plain", "ring"))
    assert_same(through_ring[0], plain[0])
    assert through_ring[1] == plain[1]
    assert through_ring[1][3] == ["gpuaug: raised by the wrapped loader, at batch 9 of epoch 0."]


def test_a_generator_that_never_ends_can_be_left(held):
    threads = set(threading.enumerate())
    loader = StreamedLoader((torch.full((1000,), index) for index in iter(int, 1)), device="cpu", feed="ring")
    leave_by_break(loader)
    assert set(threading.enumerate()) <= threads
    assert held()
    del loader
    gc.collect()
    assert not held()


def test_a_batch_is_not_held_once_it_was_dropped():
    class Kept:
        pass

    watched = []

    def source():
        for index in range(20):
            kept = Kept()
            watched.append(weakref.ref(kept))
            yield values(index, 3), kept

    for index, batch in enumerate(StreamedLoader(source(), device="cpu", feed="ring")):
        del batch
        alive = sum(ref() is not None for ref in watched)
        assert alive <= 5, index
    gc.collect()
    assert not any(ref() is not None for ref in watched)


# What is said


class OwnWay(DataLoader):
    def __iter__(self):
        return super().__iter__()


class OwnIterator(DataLoader):
    def _get_iterator(self):
        return super()._get_iterator()


def running():
    wrapped = with_workers(Samples(), persistent_workers=True)()
    next(iter(wrapped))
    return wrapped


REFUSED = {
    "list": (lambda: [torch.ones(1)], "a list's batches are all there"),
    "tuple": (lambda: (torch.ones(1),), "a list's batches are all there"),
    "own iteration": (lambda: OwnWay(Samples(), num_workers=2), "OwnWay is iterated in a way of its own"),
    "own iterator": (lambda: OwnIterator(Samples(), num_workers=2), "OwnIterator is iterated in a way of its own"),
    "page-locked here": (lambda: DataLoader(Samples(), pin_memory=True), "the loader page-locks its batches itself"),
    "running": (running, "the loader's workers are running already"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_a_ring_that_cannot_be_is_refused_and_said_why(case):
    make, why = REFUSED[case]
    wrapped = make()
    with pytest.raises(ArgumentError) as caught:
        StreamedLoader(wrapped, device="cpu", feed="ring")
    assert (
        str(caught.value)
        == f"feed='ring' must be for a source that can fill slots, got one that cannot: {why}. Leave feed out."
    )
    for feed in ("auto", "plain"):
        loader = StreamedLoader(wrapped, device="cpu", feed=feed)
        assert len(list(loader)) == len(loader)
        assert loader.stats().slot_batches == 0
        loader.close()


@pytest.mark.parametrize("feed", ["rings", "", None, True, ["ring"]])
def test_a_feed_that_there_is_not(feed):
    with pytest.raises(ArgumentError) as caught:
        StreamedLoader([], device="cpu", feed=feed)
    assert str(caught.value) == f"feed must be 'auto', 'ring' or 'plain', got {feed!r}. Leave it out to have what fits."


@pytest.mark.parametrize(
    ("feed_bytes", "kind", "rule"),
    [
        (-1, ArgumentError, "0 or more"),
        (1.5, ArgumentTypeError, "a whole number"),
        ("1 GB", ArgumentTypeError, "a whole number"),
    ],
)
@pytest.mark.parametrize("feed", ["auto", "ring", "plain"])
def test_a_budget_that_is_none(feed_bytes, kind, rule, feed):
    with pytest.raises(kind) as caught:
        StreamedLoader(Source(torch.tensor), device="cpu", feed=feed, feed_bytes=feed_bytes)
    assert str(caught.value) == f"feed_bytes must be {rule}, got {feed_bytes!r}. Leave it out for an eighth of the memory."


def test_the_loader_says_how_batches_come():
    def said(loader, feed):
        text = repr(StreamedLoader(loader, device="cpu", feed=feed))
        return text[text.index("feed=") : -1]

    wrapped = with_workers(Samples())()
    assert said(wrapped, "auto") == "feed=plain (the device is cpu)"
    assert said(wrapped, "plain") == "feed=plain (as asked)"
    assert said(wrapped, "ring") == "feed=ring"
    assert said(Source(torch.tensor), "auto") == "feed=plain (the device is cpu)"
    assert said(Source(torch.tensor), "ring") == "feed=staged"
    assert said([], "plain") == "feed=plain (as asked)"


@pytest.mark.parametrize("make", [with_workers(Samples()), lambda: Source(torch.tensor)], ids=["workers", "other"])
def test_on_a_cpu_there_is_no_ring_unless_it_was_asked_for(make, held):
    loader = StreamedLoader(make(), device="cpu")
    list(loader)
    assert loader.stats().slot_batches == 0
    assert not held()


def test_memory_that_cannot_be_had_is_no_failure():
    loader = StreamedLoader(with_workers(Samples())(), device="cpu", feed="ring", feed_bytes=1 << 62)
    assert_same(list(loader), list(with_workers(Samples())()))
    assert loader.stats().slot_batches == 0
    assert "feed=plain (its memory cannot be had here: " in repr(loader)


# Batches that nobody thought of

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def tensors(draw):
    """A tensor of any dtype, shape and strides, and of any bits."""
    tensor = any_bits(draw(st.integers(0, 99)), draw(st.sampled_from(DTYPES)), *draw(SHAPES))
    dims = draw(st.permutations(range(tensor.dim())))
    how = draw(st.sampled_from(["as it is", "permuted", "sliced", "expanded", "offset"]))
    if how == "permuted":
        return tensor.permute(dims)
    if how == "sliced" and tensor.dim():
        return tensor[tuple(slice(draw(st.integers(0, 1)), None, draw(st.integers(1, 2))) for _ in range(tensor.dim()))]
    if how == "expanded":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    if how == "offset" and tensor.dim():
        return tensor[1:].permute(dims)
    return tensor


LEAVES = st.one_of(tensors(), st.text(max_size=3), st.none(), st.integers(), st.just(...))
NESTED = st.recursive(
    LEAVES,
    lambda inside: st.one_of(
        st.lists(inside, max_size=4),
        st.lists(inside, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=2), inside, max_size=3),
        st.tuples(inside, inside).map(lambda pair: Pair(*pair)),
        st.tuples(inside, inside).map(lambda pair: Record(pair[0], {"inside": pair[1]})),
        inside.map(lambda same: (same, [same])),
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(st.lists(NESTED, min_size=1, max_size=4))
def test_any_batch_through_slots_is_that_batch(batches):
    loader = StreamedLoader(iter(batches), device="cpu", feed="ring", feed_bytes=1 << 20)
    assert_same(list(loader), batches)
    loader.close()


@settings(max_examples=100)
@given(st.lists(NESTED, min_size=1, max_size=4), st.integers(0, 3))
def test_any_batch_is_the_same_when_it_was_described_and_sent(batches, room):
    # Within one process: what a worker does, the queue's pickling, and what arrives.
    own = ring.Ring(1, 2, 1 << 20)
    try:
        own.make_room(batches[min(room, len(batches) - 1)])
        for batch in batches:
            writer = own.memory.take(0)
            if writer is None:
                continue
            sent = loads(bytes(ForkingPickler.dumps(described_or_not(batch, writer))))
            if type(sent) is ring.Described:
                sent, slot = own.received(sent)
                assert_same(sent, batch)
                del slot
            else:
                assert_same(sent, batch)
            del sent
        assert not own.held
        assert own.memory.generation()[0] == 0 or own.memory.take(0) is not None, "every slot is free again"
    finally:
        own.close()


def test_a_packed_sequence_is_moved_as_one():
    got, _ = assert_ring_is_plain(made(PLACED["an object that moves itself"]))
    assert all(type(batch[0]) is PackedSequence for batch in got[0])
