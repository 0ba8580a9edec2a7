import itertools
import operator
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.waiting import WAIT_S
from torch import distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from gpuaug import ArgumentError, ArgumentTypeError, DeviceError, FeatureStage, StreamedLoader, TransformStage
from gpuaug.loader import iterator

MIRRORED = ["dataset", "batch_size", "sampler", "batch_sampler", "drop_last"]


def noise(_):
    return torch.rand(3)


def streamed(loader, *stages, **options):
    return StreamedLoader(loader, stages, device="cpu", **options)


class Epochs:
    """Remembers which epochs it was told."""

    def __init__(self):
        self.told = []

    def set_epoch(self, epoch):
        self.told.append(epoch)


class EpochDataset(Epochs, Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(index)


class EpochSampler(Epochs, BatchSampler):
    def __init__(self, indices, batch_size):
        Epochs.__init__(self)
        BatchSampler.__init__(self, indices, batch_size, drop_last=False)


# Not a DataLoader in disguise


def test_what_a_dataloader_says_of_itself_is_mirrored():
    wrapped = DataLoader(TensorDataset(torch.arange(5)), batch_size=2, drop_last=True)
    loader = streamed(wrapped)
    for name in MIRRORED:
        assert getattr(loader, name) is getattr(wrapped, name)
    assert len(loader) == len(wrapped) == 2
    assert loader.loader is wrapped


@pytest.mark.parametrize("name", [*MIRRORED, "state_dict", "load_state_dict"])
def test_what_the_wrapped_loader_lacks_is_lacking(name):
    assert not hasattr(streamed([]), name)


@pytest.mark.parametrize("name", ["num_workers", "prefetch_factor", "collate_fn", "generator", "persistent_workers"])
def test_nothing_else_is_mirrored(name):
    # With these, frameworks would rebuild a plain DataLoader from the parts and leave the stages out.
    loader = streamed(DataLoader(TensorDataset(torch.arange(5))))
    assert hasattr(loader.loader, name)
    assert not hasattr(loader, name)


def test_it_is_no_dataloader_and_does_not_pretend():
    loader = streamed([])
    assert not isinstance(loader, DataLoader)
    assert loader.__class__ is StreamedLoader
    assert not any("__getattr__" in vars(base) or "__getattribute__" in vars(base) for base in StreamedLoader.__mro__[:-1])


# How long it is


def test_len_is_the_wrapped_loaders():
    assert len(streamed([1, 2, 3])) == 3
    assert len(streamed(DataLoader(TensorDataset(torch.arange(5)), batch_size=2))) == 3
    assert not streamed([])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(3))


@pytest.mark.parametrize(
    "make", [lambda: (x for x in [1]), lambda: iter([1]), lambda: DataLoader(Stream())], ids=["generator", "iterator", "stream"]
)
def test_len_is_a_type_error_where_the_wrapped_loader_has_none(make):
    wrapped = make()
    with pytest.raises(TypeError) as plain:
        len(wrapped)
    with pytest.raises(TypeError) as caught:
        len(streamed(wrapped))
    assert str(caught.value) == str(plain.value)
    assert operator.length_hint(streamed(wrapped), 7) == 7, "list() and tqdm ask so"


# Epochs


def test_set_epoch_goes_to_the_loader_itself_if_it_takes_it():
    class Loader(list, Epochs):
        def __init__(self):
            Epochs.__init__(self)
            self.sampler = Epochs()

    wrapped = Loader()
    streamed(wrapped).set_epoch(3)
    assert wrapped.told == [3]
    assert wrapped.sampler.told == [], "the loader tells its own parts"


def test_set_epoch_goes_to_a_distributed_sampler_once():
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


def test_set_epoch_goes_to_the_sampler_of_a_batch_sampler():
    data = EpochDataset()
    sampler = DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
    batch_sampler = EpochSampler(sampler, 2)
    loader = streamed(DataLoader(data, batch_sampler=batch_sampler))
    loader.set_epoch(5)
    assert sampler.epoch == 5
    assert batch_sampler.told == [5]
    assert data.told == [5]


def test_each_part_is_told_once_even_if_it_plays_two_parts():
    class Parts(list):
        pass

    wrapped = Parts()
    wrapped.sampler = wrapped.dataset = Epochs()
    wrapped.batch_sampler = None
    streamed(wrapped).set_epoch(2)
    assert wrapped.sampler.told == [2]


def test_set_epoch_needs_nobody_to_tell():
    loader = streamed([0], noise)
    loader.set_epoch(4)
    (fourth,) = loader
    (fifth,) = loader
    loader.set_epoch(4)
    (again,) = loader
    assert torch.equal(fourth, again)
    assert not torch.equal(fourth, fifth)


def test_an_epoch_that_was_chosen_is_followed_by_the_next():
    loader = streamed([0], noise)
    epochs = [next(iter(loader)) for _ in range(3)]
    loader.set_epoch(1)
    assert torch.equal(next(iter(loader)), epochs[1])
    assert torch.equal(next(iter(loader)), epochs[2])


@pytest.mark.parametrize(("epoch", "kind"), [(-1, ArgumentError), (1.5, ArgumentTypeError), (None, ArgumentTypeError)])
def test_an_epoch_is_counted_from_0(epoch, kind):
    loader = streamed([0], noise)
    rule = "0 or more" if kind is ArgumentError else "a whole number"
    with pytest.raises(kind) as caught:
        loader.set_epoch(epoch)
    assert str(caught.value) == f"epoch must be {rule}, got {epoch!r}. Count epochs from 0."


# Arguments


@pytest.mark.parametrize(("given", "kind"), [(3, "int"), (None, "NoneType"), (len, "builtin_function_or_method")])
def test_a_loader_is_an_iterable(given, kind):
    with pytest.raises(ArgumentTypeError) as caught:
        streamed(given)
    assert str(caught.value) == (
        f"loader must be an iterable of batches, got {kind}. Pass a DataLoader, a list or a generator."
    )


def test_a_loader_may_be_indexed_instead_of_iterated():
    class Indexed:
        def __getitem__(self, index):
            return torch.tensor([[1, 2, 3][index]])

    assert [batch.item() for batch in streamed(Indexed())] == [1, 2, 3]


WAYS_OUT = {
    "depth": "Use 0 for the in-line reference, 2 to overlap, 'auto' to have the faster.",
    "seed": "Leave it out for torch's own.",
    "rank": "Leave it out for torch.distributed's.",
}


@pytest.mark.parametrize(("name", "way_out"), WAYS_OUT.items())
@pytest.mark.parametrize("given", [1.0, "2", [1]])
def test_counts_are_whole_numbers(name, way_out, given):
    with pytest.raises(ArgumentTypeError) as caught:
        streamed([], **{name: given})
    assert str(caught.value) == f"{name} must be a whole number, got {given!r}. {way_out}"


@pytest.mark.parametrize(("name", "way_out"), WAYS_OUT.items())
def test_counts_are_0_or_more(name, way_out):
    with pytest.raises(ArgumentError) as caught:
        streamed([], **{name: -1})
    assert str(caught.value) == f"{name} must be 0 or more, got -1. {way_out}"


def test_numbers_of_other_libraries_are_numbers():
    loader = streamed([0], noise, depth=np.int64(3), seed=torch.tensor(5), rank=np.uint8(1))
    assert loader.depth == 3
    assert torch.equal(next(iter(loader)), next(iter(streamed([0], noise, seed=5, rank=1))))


def test_the_seed_is_torchs_own_where_it_was_left_out():
    torch.manual_seed(9)
    loader = streamed([0], noise)
    torch.rand(5)
    torch.manual_seed(10)
    assert loader.seed == 9
    assert torch.equal(next(iter(loader)), next(iter(streamed([0], noise, seed=9))))


@pytest.mark.parametrize("seed", [-1, 2**63, 0])
def test_every_seed_that_torch_takes_may_be_the_default(seed):
    torch.manual_seed(seed)
    next(iter(streamed([0], noise)))


def test_the_rank_is_that_of_torch_distributed_where_it_was_left_out():
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


@pytest.mark.parametrize("given", ["gpu0", "cuda:x", 1.5])
def test_a_device_is_one_of_torchs(given):
    with pytest.raises(ArgumentError) as caught:
        StreamedLoader([], device=given)
    assert str(caught.value) == f"device must be a torch device, got {given!r}. Write 'cuda', 'cuda:1' or 'cpu'."


@pytest.mark.parametrize("given", ["cuda:99", 99])
def test_a_card_is_one_that_this_machine_has(given):
    with pytest.raises(
        DeviceError, match=r"^device must be one that this machine has, got cuda:99\. It has .*; 'cpu' always works\.$"
    ):
        StreamedLoader([], device=given)


@pytest.mark.parametrize("given", ["mps", "xpu", "meta", "hpu"])
@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine may have it")
def test_an_accelerator_is_one_that_this_machine_has(given):
    with pytest.raises(DeviceError) as caught:
        StreamedLoader([], device=given)
    assert str(caught.value) == f"device must be one that this machine has, got {given}. 'cpu' always works."


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_the_device_is_the_cpu_on_a_machine_without_an_accelerator():
    loader = StreamedLoader([torch.zeros(1)], [lambda x: x + 1])
    assert loader.device == torch.device("cpu")
    assert [batch.item() for batch in loader] == [1]


# Stages between epochs


def test_stages_may_be_replaced_between_epochs():
    loader = streamed([torch.ones(1)], lambda x: x + 1)
    assert [x.item() for x in loader] == [2]
    loader.stages = [lambda x: x * 10, lambda x: x + 5]
    assert [x.item() for x in loader] == [15]
    assert [stage.kind for stage in loader.stages] == ["transform"] * 2
    loader.stages = []
    assert [x.item() for x in loader] == [1]


def test_an_iterator_keeps_the_stages_that_it_began_with():
    loader = streamed([torch.ones(1)] * 3, lambda x: x + 1)
    batches = iter(loader)
    next(batches)
    loader.stages = [lambda x: x * 0]
    assert [x.item() for x in batches] == [2, 2]


@pytest.mark.parametrize("refused", [[len, 3], [FeatureStage(nn.Linear(1, 1, device="meta").requires_grad_(False))]])
def test_stages_that_are_refused_change_nothing(refused):
    loader = streamed([torch.ones(1)], TransformStage(lambda x: x + 1, name="kept"))
    before = loader.stages
    with pytest.raises((ArgumentTypeError, DeviceError)):
        loader.stages = refused
    assert loader.stages == before
    assert "kept=" in repr(loader)
    assert [x.item() for x in loader] == [2]


# What it says of itself


def test_repr_names_what_is_done_where():
    def brighten(x):
        return x

    loader = streamed([], brighten, FeatureStage(nn.Identity(), name="encode"), depth=3)
    assert repr(loader) == (
        "StreamedLoader(list, stages=[transform=TransformStage(brighten), encode=FeatureStage(Identity)], device=cpu, depth=3, "
        "feed=plain (the device is cpu))"
    )


def test_batches_are_counted_over_all_epochs():
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
