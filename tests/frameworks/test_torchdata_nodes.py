"""Graphs of torchdata's nodes."""

import pytest
import torch
from torch.utils.data import RandomSampler, default_collate
from torchdata import nodes

import gpuaug


@pytest.fixture(params=["in process", "threads"])
def make(request, noise):
    def sample(index):
        return torch.tensor([float(index)])

    def make():
        node = nodes.SamplerWrapper(RandomSampler(range(19), generator=torch.Generator().manual_seed(1)))
        in_threads = {"num_workers": 2, "method": "thread"}
        node = nodes.ParallelMapper(node, sample, **in_threads) if request.param == "threads" else nodes.Mapper(node, sample)
        node = nodes.Mapper(nodes.Batcher(node, 2, drop_last=False), default_collate)
        return gpuaug.StreamedLoader(nodes.Loader(node, restart_on_stop_iteration=False), [noise], seed=1)

    return make


@pytest.mark.parametrize("at", [4, 10])
def test_a_graph_goes_on_after_the_batch_of_the_loop(make, at):
    whole = make()
    epochs = [[batch.tolist() for batch in whole] for _ in range(2)]
    assert sorted(int(value) for batch in epochs[0] for (value,) in batch) == list(range(19))
    stopped, resumed = make(), make()
    for number, _ in enumerate(stopped, start=1):
        if number == at:
            state = stopped.state_dict()
    resumed.load_state_dict(state)
    assert [[batch.tolist() for batch in resumed] for _ in range(2)] == [epochs[0][at:], epochs[1]]
