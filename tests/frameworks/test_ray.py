"""Ray Data: batches of a dataset, and of shards that ranks read together."""

import threading

import pytest
import torch

import gpuaug

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def dataset():
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray.data.range(20).repartition(4)
    ray.shutdown()


def streamed(shard, noise, rank):
    stage = gpuaug.TransformStage(noise, on="id", name="noise")
    return gpuaug.StreamedLoader(shard.iter_torch_batches(batch_size=4, device="cpu"), [stage], seed=1, rank=rank)


def epochs_of(loader):
    return [[value for batch in loader for value in batch["id"].flatten().tolist()] for _ in range(2)]


def test_ranks_share_each_epoch_and_draw_by_themselves(dataset):
    def noise(numbers):
        return numbers + torch.rand(numbers.shape)

    whole = streamed(dataset, noise, 0)
    assert not hasattr(whole, "state_dict")
    with pytest.raises(TypeError, match="no len"):
        len(whole)
    first, second = epochs_of(whole)
    assert sorted(map(int, first)) == sorted(map(int, second)) == list(range(20))
    assert first != second

    shards, found = dataset.streaming_split(2, equal=True), {}

    def read(rank):
        found[rank] = epochs_of(streamed(shards[rank], noise, rank))

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for epoch in range(2):
        values = [*found[0][epoch], *found[1][epoch]]
        assert sorted(map(int, values)) == list(range(20))
        assert len({round(value % 1, 4) for value in values}) == 20
