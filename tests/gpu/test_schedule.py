"""Stages that change with the epoch on a card: every epoch equals one of its stage alone, however far ahead the card is."""

import pytest
import torch
from support.comparison.values import assert_values
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import v2

import gpuaug

pytestmark = pytest.mark.gpu

EPOCHS, CHANGE, BATCHES = 4, 2, 5


def augment(size, magnitude):
    pipeline = [v2.RandomResizedCrop(size), v2.RandAugment(magnitude=magnitude), v2.ToDtype(torch.float32, scale=True)]
    return gpuaug.fuse(pipeline)


def encoder(width):
    torch.manual_seed(width)
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.Dropout(), nn.ReLU()).cuda().requires_grad_(False)


def stages():
    """Return the stages before ``CHANGE``, and the stages from then on."""
    return (
        [augment(32, 9), gpuaug.FeatureStage(encoder(8), into=2)],
        [augment(24, 3), gpuaug.FeatureStage(encoder(4), into=2)],
    )


def loader(loader_stages, depth, workers=0):
    images = torch.randint(0, 256, (4 * BATCHES, 3, 40, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    source = DataLoader(
        TensorDataset(images, torch.arange(4 * BATCHES)), 4, num_workers=workers, persistent_workers=workers > 0
    )
    return gpuaug.StreamedLoader(source, loader_stages, device="cuda", depth=depth, seed=3)


def changing():
    return [gpuaug.until(CHANGE, one, other) for one, other in zip(*stages(), strict=True)]


def cloned(batch):
    torch.cuda._sleep(5_000_000)  # the loop reaches the end of an epoch while the card is behind
    return [tensor.clone() for tensor in batch]


def epochs_of(streamed):
    with streamed:
        return [[cloned(batch) for batch in streamed] for _ in range(EPOCHS)]


def assert_equal(got, wanted):
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        for tensor, expected in zip(one, other, strict=True):
            assert_values(tensor, expected)


@pytest.mark.parametrize(("depth", "workers"), [(0, 0), (2, 0), (2, 2), (5, 2)])
def test_an_epoch_equals_one_of_the_stage_alone(depth, workers):
    first, then = (epochs_of(loader(alone, depth=0)) for alone in stages())
    for got, wanted in zip(epochs_of(loader(changing(), depth, workers)), first[:CHANGE] + then[CHANGE:], strict=True):
        assert_equal(got, wanted)


@pytest.mark.parametrize("depth", [0, 2])
def test_resumed_epochs_equal_an_uninterrupted_run(depth):
    whole = epochs_of(loader(changing(), 0))
    stopped, states = loader(changing(), depth), []
    for _ in range(CHANGE + 1):
        states.extend(stopped.state_dict() for _ in stopped)
    for state in states[CHANGE * BATCHES - 2 : CHANGE * BATCHES + 1]:
        with loader(changing(), depth) as resumed:
            resumed.load_state_dict(state)
            assert_equal([cloned(batch) for batch in resumed], whole[state["epoch"]][state["batch"] :])
            assert_equal([cloned(batch) for batch in resumed], whole[state["epoch"] + 1])


def test_graphs_of_a_stage_are_kept_while_another_one_runs():
    streamed = loader(changing(), 2)
    for epoch in (0, CHANGE, 0, CHANGE, 0):
        streamed.set_epoch(epoch)
        for _ in streamed:
            pass
    stats = streamed.stats()
    assert stats.captured == 2
    assert stats.graph_bytes > 0
