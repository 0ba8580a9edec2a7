"""A run that is taken up on a card goes on as if it had never stopped, however far ahead the card was."""

import kornia.augmentation as K
import pytest
import torch
from support.comparison.values import assert_values
from support.files.encoded import encoded
from torch.utils.data import DataLoader, TensorDataset

import gpuaug

stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

pytestmark = pytest.mark.gpu

BATCHES = 12


def images():
    return torch.randint(0, 256, (4 * BATCHES, 3, 24, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def plain(dataset, size, **options):
    return DataLoader(dataset, size, shuffle=True, generator=torch.Generator().manual_seed(2), **options)


def loader(depth, feed, workers, kind=stateful_dataloader.StatefulDataLoader):
    source = kind(TensorDataset(images()), 4, num_workers=workers)
    pipeline = K.AugmentationSequential(K.RandomResizedCrop((16, 16)), K.RandomHorizontalFlip())
    return gpuaug.StreamedLoader(source, [gpuaug.fuse(pipeline)], device="cuda", depth=depth, feed=feed, seed=3)


@pytest.mark.parametrize("kind", [stateful_dataloader.StatefulDataLoader, plain])
@pytest.mark.parametrize(("depth", "feed", "workers"), [(0, "plain", 0), (2, "auto", 0), (2, "auto", 2), (5, "ring", 2)])
def test_resumed_epoch_equals_uninterrupted_run(depth, feed, workers, kind):
    with loader(0, "plain", 0, kind) as whole:
        expected = [batch.clone() for (batch,) in whole]
    with loader(depth, feed, workers, kind) as stopped:
        for count, _ in enumerate(stopped, start=1):
            torch.cuda._sleep(20_000_000)  # the loop reaches the state of a batch while the card is far behind
            if count == 5:
                break
        state = stopped.state_dict()
    assert state["batch"] == 5
    with loader(depth, feed, workers, kind) as resumed:
        resumed.load_state_dict(state)
        rest = [batch.clone() for (batch,) in resumed]
    assert len(rest) == BATCHES - 5
    for one, two in zip(rest, expected[5:], strict=True):
        assert_values(one, two)


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_decoded_epoch_goes_on_with_the_next_batch(backend):
    files = [(encoded(40 + number, 30, seed=number), number) for number in range(12)]

    def made():
        source = plain(files, 2, num_workers=2, collate_fn=gpuaug.collate_encoded)
        resized = gpuaug.fuse(K.RandomResizedCrop((16, 16)), ragged=True)
        stages = [gpuaug.DecodeStage(backend=backend), resized, noisy]
        return gpuaug.StreamedLoader(source, stages, device="cuda", seed=3)

    with made() as whole:
        expected = [(images.clone(), labels.tolist()) for images, labels in whole]
    with made() as stopped:
        for count, _ in enumerate(stopped, start=1):
            if count == 2:
                break
        state = stopped.state_dict()
    with made() as resumed:
        resumed.load_state_dict(state)
        rest = [(images.clone(), labels.tolist()) for images, labels in resumed]
    assert [labels for _, labels in rest] == [labels for _, labels in expected[2:]]
    for (one, _), (two, _) in zip(rest, expected[2:], strict=True):
        assert_values(one, two)


def noisy(images):
    return images + torch.rand_like(images)
