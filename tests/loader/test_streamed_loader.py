import itertools
import operator
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from contract.sources import noise, streamed
from support.loader.resumed_loaders import Reversed
from support.process.waiting import WAIT_S
from torch import distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

from gpuaug import ArgumentTypeError, DeviceError, FeatureStage, StreamedLoader, TransformStage
from gpuaug.loader import iterator

MIRRORED = ["dataset", "batch_size", "sampler", "batch_sampler", "drop_last"]


class Epochs:
    """Remembers which epochs it was told."""

    def __init__(self):
        self.told = []

    def set_epoch(self, epoch):
        self.told.append(epoch)


class EpochSampler(Epochs, BatchSampler):
    def __init__(self, indices, batch_size):
        Epochs.__init__(self)
        BatchSampler.__init__(self, indices, batch_size, drop_last=False)


# Not a DataLoader in disguise


def test_dataloader_attributes_are_mirrored():
    wrapped = DataLoader(TensorDataset(torch.arange(5)), batch_size=2, drop_last=True)
    loader = streamed(wrapped)
    for name in MIRRORED:
        assert getattr(loader, name) is getattr(wrapped, name)
    assert len(loader) == len(wrapped) == 2
    assert loader.loader is wrapped


@pytest.mark.parametrize("name", MIRRORED)
def test_attributes_that_wrapped_loader_lacks_are_missing(name):
    assert not hasattr(streamed([]), name)


@pytest.mark.parametrize("name", ["num_workers", "prefetch_factor", "collate_fn", "generator", "persistent_workers"])
def test_worker_options_are_not_mirrored(name):
    # With these, frameworks would rebuild a plain DataLoader from the parts and leave the stages out.
    loader = streamed(DataLoader(TensorDataset(torch.arange(5))))
    assert hasattr(loader.loader, name)
    assert not hasattr(loader, name)


def test_streamed_loader_is_no_dataloader():
    loader = streamed([])
    assert not isinstance(loader, DataLoader)
    assert loader.__class__ is StreamedLoader
    assert not any("__getattr__" in vars(base) or "__getattribute__" in vars(base) for base in StreamedLoader.__mro__[:-1])


# How long it is


def test_len_is_that_of_wrapped_loader():
    assert len(streamed([1, 2, 3])) == 3
    assert len(streamed(DataLoader(TensorDataset(torch.arange(5)), batch_size=2))) == 3
    assert not streamed([])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(3))


@pytest.mark.parametrize(
    "make", [lambda: (x for x in [1]), lambda: iter([1]), lambda: DataLoader(Stream())], ids=["generator", "iterator", "stream"]
)
def test_len_raises_type_error_without_wrapped_len(make):
    wrapped = make()
    with pytest.raises(TypeError) as plain:
        len(wrapped)
    with pytest.raises(TypeError) as caught:
        len(streamed(wrapped))
    assert str(caught.value) == str(plain.value)
    assert operator.length_hint(streamed(wrapped), 7) == 7, "list() and tqdm ask so"


# Epochs


def test_set_epoch_of_wrapped_loader_is_called():
    class Loader(list, Epochs):
        def __init__(self):
            Epochs.__init__(self)
            self.sampler = Epochs()

    wrapped = Loader()
    streamed(wrapped).set_epoch(3)
    assert wrapped.told == [3]
    assert wrapped.sampler.told == [], "the loader tells its own parts"


def test_set_epoch_of_distributed_sampler_is_called_once():
    data = TensorDataset(torch.arange(8))
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    told = []
    sampler.set_epoch = lambda epoch: (told.append(epoch), DistributedSampler.set_epoch(sampler, epoch))
    loader = streamed(DataLoader(data, batch_size=2, sampler=sampler))
    orders = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        orders.append([batch[0].tolist() for batch in loader])
    assert told == [0, 1, 0]
    assert orders[0] != orders[1]
    assert orders[0] == orders[2]


NESTED_SAMPLERS = {
    "sampler": lambda sampler: {"sampler": sampler},
    "batch_sampler.sampler": lambda sampler: {"batch_sampler": BatchSampler(sampler, 2, drop_last=False)},
    "sampler.sampler": lambda sampler: {"batch_size": None, "sampler": BatchSampler(sampler, 2, drop_last=False)},
    "batch_sampler.sampler.sampler": lambda sampler: {"batch_sampler": EpochSampler(EpochSampler(sampler, 2), 1)},
    "batch_sampler.batch_sampler.sampler": lambda sampler: {
        "batch_sampler": Reversed(BatchSampler(sampler, 2, drop_last=False))
    },
    "sampler.batch_sampler.sampler": lambda sampler: {
        "batch_size": None,
        "sampler": Reversed(BatchSampler(sampler, 2, drop_last=False)),
    },
}


@pytest.mark.parametrize("path", NESTED_SAMPLERS)
def test_set_epoch_reaches_samplers_within_samplers(path):
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    wrapped = DataLoader(torch.arange(8), **NESTED_SAMPLERS[path](sampler))
    assert operator.attrgetter(path)(wrapped) is sampler
    streamed(wrapped).set_epoch(5)
    assert sampler.epoch == 5


def test_set_epoch_of_a_loader_whose_samplers_have_no_end():
    class Endless(list):
        def __getattr__(self, name):
            if name in ("sampler", "batch_sampler"):
                return Endless()
            raise AttributeError(name)

    loader = streamed(Endless([0]))
    loader.set_epoch(5)
    assert list(loader) == [0]


def test_set_epoch_calls_shared_sampler_and_dataset_once():
    class Parts(list):
        pass

    wrapped = Parts()
    wrapped.sampler = wrapped.dataset = Epochs()
    wrapped.batch_sampler = None
    streamed(wrapped).set_epoch(2)
    assert wrapped.sampler.told == [2]


# Stages between epochs


def test_stages_may_be_assigned_between_epochs():
    loader = streamed([torch.ones(1)], lambda x: x + 1)
    assert [x.item() for x in loader] == [2]
    loader.stages = [lambda x: x * 10, lambda x: x + 5]
    assert [x.item() for x in loader] == [15]
    assert [stage.kind for stage in loader.stages] == ["transform"] * 2
    loader.stages = []
    assert [x.item() for x in loader] == [1]


def test_open_iterator_keeps_its_stages():
    loader = streamed([torch.ones(1)] * 3, lambda x: x + 1)
    batches = iter(loader)
    next(batches)
    loader.stages = [lambda x: x * 0]
    assert [x.item() for x in batches] == [2, 2]


@pytest.mark.parametrize("refused", [[len, 3], [FeatureStage(nn.Linear(1, 1, device="meta").requires_grad_(False))]])
def test_refused_stages_change_nothing(refused):
    loader = streamed([torch.ones(1)], TransformStage(lambda x: x + 1, name="kept"))
    before = loader.stages
    with pytest.raises((ArgumentTypeError, DeviceError)):
        loader.stages = refused
    assert loader.stages == before
    assert "kept=" in repr(loader)
    assert [x.item() for x in loader] == [2]


# What it says of itself


def test_repr_names_stages_device_depth_and_feed():
    def brighten(x):
        return x

    loader = streamed([], brighten, FeatureStage(nn.Identity(), name="encode"), depth=3)
    assert repr(loader) == (
        "StreamedLoader(list, stages=[transform=TransformStage(brighten), encode=FeatureStage(Identity)], device=cpu, depth=3, "
        "feed=plain (the device is cpu))"
    )


def test_stats_count_over_all_epochs():
    loader = streamed([torch.ones(1)] * 3)
    list(loader)
    next(iter(loader))
    stats = loader.stats()
    assert stats.batches == 4
    assert (stats.copied_bytes, stats.held_back, stats.held_back_ms) == (0, 0, 0)
    next(iter(loader))
    assert stats.batches == 5, "the counters are live"


def test_stats_starved_counts_and_times_waits_for_a_slow_loader(monkeypatch):
    asked_s, clock_s, asked = [], itertools.count(start=10, step=0.2), threading.Event()

    def perf_counter():
        asked_s.append(next(clock_s))
        asked.set()
        return asked_s[-1]

    def slow():
        assert asked.wait(WAIT_S), "the loop has begun to wait before there is a batch"
        yield torch.ones(1)

    monkeypatch.setattr(iterator, "time", SimpleNamespace(perf_counter=perf_counter))
    loader = streamed(slow())
    assert next(iter(loader)).item() == 1
    assert len(asked_s) == 2
    assert (loader.stats().starved, loader.stats().starved_ms) == (1, pytest.approx(200))


# Arguments


def test_depth_seed_and_rank_may_be_numpy_or_torch_integers():
    loader = streamed([0], noise, depth=np.int64(3), seed=torch.tensor(5), rank=np.uint8(1))
    assert loader.depth == 3
    assert torch.equal(next(iter(loader)), next(iter(streamed([0], noise, seed=5, rank=1))))


def test_seed_defaults_to_torch_initial_seed():
    torch.manual_seed(9)
    loader = streamed([0], noise)
    torch.rand(5)
    torch.manual_seed(10)
    assert loader.seed == 9
    assert torch.equal(next(iter(loader)), next(iter(streamed([0], noise, seed=9))))


@pytest.mark.parametrize("seed", [-1, 2**63, 0])
def test_default_seed_may_be_any_torch_seed(seed):
    torch.manual_seed(seed)
    next(iter(streamed([0], noise)))


def test_rank_defaults_to_torch_distributed_rank():
    loader = streamed([0], noise, seed=0)
    alone = next(iter(loader))
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        loader.set_epoch(0)
        second = next(iter(loader))
    finally:
        distributed.destroy_process_group()
    assert torch.equal(alone, next(iter(streamed([0], noise, seed=0, rank=0))))
    assert torch.equal(second, next(iter(streamed([0], noise, seed=0, rank=1))))


@pytest.mark.parametrize("given", ["mps", "xpu", "meta", "hpu"])
@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine may have it")
def test_accelerator_must_exist(given):
    with pytest.raises(DeviceError) as caught:
        StreamedLoader([], device=given)
    assert str(caught.value) == f"device must be one that this machine has, got {given}. 'cpu' always works."


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_cuda_device_must_exist():
    with pytest.raises(DeviceError) as caught:
        StreamedLoader([], device="cuda:1")
    words = "device must be one that this machine has, got cuda:1. It has no CUDA device; 'cpu' always works."
    assert str(caught.value) == words


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_device_defaults_to_cpu_without_accelerator():
    loader = StreamedLoader([torch.zeros(1)], [lambda x: x + 1])
    assert loader.device == torch.device("cpu")
    assert [batch.item() for batch in loader] == [1]
