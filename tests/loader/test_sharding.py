"""Ranks that all read the whole dataset are warned once; what may give each its own part is left alone."""

import warnings

import pytest
import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import gpuaug
from gpuaug import GpuAugWarning, StreamedLoader
from gpuaug.loader.sharding import count_ranks, reads_whole_dataset

DATASET = TensorDataset(torch.arange(10))
WARNING = "Each of {} ranks reads all 10 samples, because the DataLoader has a {} and no DistributedSampler. "


@pytest.fixture
def ranks():
    """Two ranks, of which this is the second."""
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    distributed.destroy_process_group()


def streamed(loader, **options):
    return StreamedLoader(loader, device="cpu", **options)


def said(loader):
    """The warnings of one pass."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = list(loader)
    assert len(batches) > 0
    return [each for each in caught if issubclass(each.category, GpuAugWarning)]


class Own(DataLoader):
    """A subclass that is iterated as its base."""


SAME_ON_ALL = {
    "in order": (lambda: DataLoader(DATASET, batch_size=4), "SequentialSampler"),
    "shuffled": (lambda: DataLoader(DATASET, batch_size=4, shuffle=True), "RandomSampler"),
    "samples": (lambda: DataLoader(DATASET, batch_size=None), "SequentialSampler"),
    "batches": (
        lambda: DataLoader(DATASET, batch_sampler=BatchSampler(SequentialSampler(DATASET), 4, True)),
        "SequentialSampler",
    ),
    "a subclass": (lambda: Own(DATASET, batch_size=4), "SequentialSampler"),
    "a loader with a state": (lambda: StatefulDataLoader(DATASET, batch_size=4, shuffle=True), "RandomSampler"),
    "a large part": (lambda: DataLoader(Subset(TensorDataset(torch.arange(12)), range(10)), batch_size=4), "SequentialSampler"),
}


@pytest.mark.parametrize("name", SAME_ON_ALL)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_ranks_that_read_the_same_are_warned_once(ranks, name):
    make, sampler = SAME_ON_ALL[name]
    loader = streamed(make())
    (found,) = said(loader)
    assert str(found.message).startswith(WARNING.format(2, sampler))
    assert found.filename == __file__, "it points at the loop"
    assert said(loader) == []


def test_the_line_that_the_warning_says_to_type_ends_it(ranks):
    dataset = DATASET
    assert said(streamed(DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset)))) == []
    assert said(streamed(DataLoader(dataset, batch_size=4), rank=torch.distributed.get_rank())) == []


def test_a_warning_that_is_an_error_leaves_a_loader_that_can_be_iterated(ranks):
    loader = streamed(DataLoader(DATASET, batch_size=4))
    with pytest.raises(GpuAugWarning):  # pytest's settings make it one
        next(iter(loader))
    assert len(list(loader)) == 3


def test_ranks_are_counted_by_torch_distributed(request):
    assert count_ranks() == 1
    request.getfixturevalue("ranks")
    assert count_ranks() == 2


def test_ranks_that_come_up_after_the_first_iterator_are_warned(request):
    loader = streamed(DataLoader(DATASET, batch_size=4))
    assert said(loader) == []
    request.getfixturevalue("ranks")
    assert len(said(loader)) == 1


def test_one_rank_is_not_warned():
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        assert said(streamed(DataLoader(DATASET, batch_size=4))) == []
    finally:
        distributed.destroy_process_group()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class OfRank(Sampler):
    """A sampler that knows of ranks without being torch's, such as a framework's wrapper around another."""

    def __init__(self, sampler):
        self.sampler, self.rank, self.num_replicas = sampler, 1, 2

    def __iter__(self):
        return iter(list(self.sampler)[self.rank :: self.num_replicas])

    def __len__(self):
        return len(self.sampler) // self.num_replicas


class ByEnvironment(Sampler):
    """One that asks for the rank as it is iterated, and shows nothing of that."""

    def __iter__(self):
        return iter(range(distributed.get_rank(), 10, distributed.get_world_size()))

    def __len__(self):
        return 5


class BatchSamplerShard(BatchSampler):
    """As Accelerate's: hands every second batch of another batch sampler out."""

    def __init__(self, batch_sampler):
        self.batch_sampler, self.num_processes, self.process_index = batch_sampler, 2, 1
        super().__init__(batch_sampler.sampler, batch_sampler.batch_size, batch_sampler.drop_last)

    def __iter__(self):
        return iter(list(self.batch_sampler)[1::2])


class DataLoaderDispatcher(DataLoader):
    """As Accelerate's: has a plain sampler, and gets its batches from the first rank."""

    def __iter__(self):
        return super().__iter__()


class Unsized(Dataset):
    """A map-style dataset that does not say how many samples it has."""

    def __getitem__(self, index):
        return index


class Shard(TensorDataset):
    """A dataset that is one rank's part."""

    def __init__(self, rank, world_size):
        super().__init__(torch.arange(10)[rank::world_size])
        self._rank, self._world_size = rank, world_size


OWN_PARTS = {
    "DistributedSampler": lambda: DataLoader(DATASET, sampler=DistributedSampler(DATASET)),
    "DistributedSampler in batches": lambda: DataLoader(
        DATASET, batch_sampler=BatchSampler(DistributedSampler(DATASET), 2, False)
    ),
    "StatefulDataLoader": lambda: StatefulDataLoader(DATASET, sampler=DistributedSampler(DATASET)),
    "a sampler of a rank": lambda: DataLoader(DATASET, sampler=OfRank(RandomSampler(DATASET))),
    "a sampler of a rank in batches": lambda: DataLoader(
        DATASET, batch_sampler=BatchSampler(OfRank(SequentialSampler(DATASET)), 2, False)
    ),
    "a sampler that asks": lambda: DataLoader(DATASET, sampler=ByEnvironment()),
    "every second batch": lambda: DataLoader(
        DATASET, batch_sampler=BatchSamplerShard(BatchSampler(SequentialSampler(DATASET), 2, False))
    ),
    "listed batches": lambda: DataLoader(DATASET, batch_sampler=[[1, 3], [5, 7]]),
    "a dispatching loader": lambda: DataLoaderDispatcher(DATASET, batch_size=2),
    "listed samples": lambda: DataLoader(DATASET, sampler=SubsetRandomSampler([1, 3, 5])),
    "weighted": lambda: DataLoader(DATASET, sampler=WeightedRandomSampler(torch.ones(10), 10)),
    "with replacement": lambda: DataLoader(DATASET, sampler=RandomSampler(DATASET, replacement=True)),
    "a part of each epoch": lambda: DataLoader(DATASET, sampler=RandomSampler(DATASET, num_samples=5)),
    "a dataset without a length": lambda: DataLoader(Unsized(), sampler=RandomSampler(range(10))),
    "indices of its own": lambda: DataLoader(DATASET, sampler=SequentialSampler(range(5))),
    "a rank's subset": lambda: DataLoader(Subset(DATASET, range(1, 10, 2))),
    "a rank's subset of an odd number": lambda: DataLoader(Subset(TensorDataset(torch.arange(9)), range(0, 9, 2))),
    "a rank's dataset": lambda: DataLoader(Shard(1, 2)),
    "a stream": lambda: DataLoader(Stream()),
    "a list": lambda: [torch.zeros(2)],
    "another iterable": lambda: (torch.zeros(2) for _ in range(3)),
}


@pytest.mark.parametrize("name", OWN_PARTS)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_nothing_is_said_where_each_rank_may_read_its_own_part(ranks, name):
    assert said(streamed(OWN_PARTS[name]())) == []


def test_a_profile_of_ranks_that_read_the_same_is_warned_as_well(ranks):
    loader = streamed(DataLoader(DATASET, batch_size=4))
    with pytest.warns(GpuAugWarning, match="ranks reads all 10 samples"):
        gpuaug.profile(loader, lambda batch: None, batches=8, rounds=1, show=False)


@pytest.mark.parametrize("count", [5, 10])
def test_a_part_that_a_feature_cache_has_wrapped(count):
    cache = gpuaug.FeatureCache("unused")
    loaders = [DataLoader(dataset) for dataset in (Subset(DATASET, range(count)), cache.wrap(Subset(DATASET, range(count))))]
    assert [reads_whole_dataset(loader, 2) for loader in loaders] == [count == 10] * 2
