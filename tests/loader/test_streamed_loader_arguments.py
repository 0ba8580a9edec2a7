"""The arguments of ``StreamedLoader``: what each takes, its default and what it refuses."""

import numpy as np
import pytest
import torch
from contract.sources import noise, streamed
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import IterableDataset

from gpuaug import DeviceError, StreamedLoader

# Arguments


def test_loader_may_be_a_dataset_that_is_iterated():
    class Batches(IterableDataset):
        def __iter__(self):
            return iter([torch.ones(2)])

    assert len(list(streamed(Batches()))) == 1


def test_loader_may_be_indexable():
    class Indexed:
        def __getitem__(self, index):
            return torch.tensor([[1, 2, 3][index]])

    assert [batch.item() for batch in streamed(Indexed())] == [1, 2, 3]


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
