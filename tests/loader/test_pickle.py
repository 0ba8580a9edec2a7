"""A loader in another process: what travels with it, and what it gives there."""

import copy
import multiprocessing
import pickle

import kornia.augmentation as K
import pytest
import torch
from support.files.encoded import encoded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from gpuaug import DecodeStage, FeatureStage, StreamedLoader, TransformStage, collate_encoded, fuse

WAYS = {"pickle": lambda value: pickle.loads(pickle.dumps(value)), "deepcopy": copy.deepcopy}


def noisy(images):
    return images + torch.rand_like(images)


def all_stages():
    return [
        fuse(K.AugmentationSequential(K.RandomHorizontalFlip(), K.RandomCrop((6, 6)))),
        TransformStage(noisy, on=0, name="noise"),
        FeatureStage({"pool": nn.AvgPool2d(2), "own": nn.BatchNorm2d(3).requires_grad_(False)}, into=2),
    ]


def shuffled(**options):
    images, labels = torch.rand(9, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(9)
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(images, labels), batch_size=2, shuffle=True, generator=generator, **options)


def loaders(**options):
    yield StreamedLoader(list(shuffled()), all_stages(), device="cpu", **options)
    yield StreamedLoader(shuffled(), all_stages(), device="cpu", **options)
    files = collate_encoded([(encoded(16, 8, seed=number), number) for number in range(2)])
    yield StreamedLoader([files] * 2, [DecodeStage(min_side=4)], device="cpu", **options)


def epochs(loader, count=2):
    """What ``count`` iterators give, in values that can be compared."""
    found = []
    for _ in range(count):
        for images, labels, *features in loader:
            found += [torch.stack(list(images)), labels, *(value for each in features for value in each.values())]
    return found


def assert_same(some, others):
    assert len(some) == len(others)
    assert all(map(torch.equal, some, others))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("number", range(3), ids=["list", "DataLoader", "files"])
def test_copy_goes_on_as_the_loader_would(way, number):
    loader = list(loaders())[number]
    batches = iter(loader)
    next(batches)  # an epoch has begun, and its iterator is open
    again = way(loader)
    torch.manual_seed(torch.initial_seed() + 1)
    assert repr(again) == repr(loader)
    assert again.stats().batches == 0
    assert_same(epochs(again), epochs(loader))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_copy_within_an_epoch_has_the_orders_of_the_loader(way):
    """The sampler draws from the generator at the end of its epoch, too: for both, before the copy is made."""

    def shuffling():
        return DataLoader(range(10), 2, shuffle=True, generator=torch.Generator().manual_seed(5))

    def rest(iterable):
        return [batch.tolist() for batch in iterable]

    plain, loader = shuffling(), StreamedLoader(shuffling(), device="cpu", seed=0)
    plain_batches, batches = iter(plain), iter(loader)
    assert next(batches).tolist() == next(plain_batches).tolist()
    again = way(loader)
    assert rest(batches) == rest(plain_batches)
    for _ in range(2):
        order = rest(plain)
        assert rest(loader) == order
        assert rest(again) == order


def test_settings_and_attributes_travel():
    class Own(StreamedLoader):
        def __init__(self):
            super().__init__(shuffled(), device=None, depth=0, rank=3, feed="plain", feed_bytes=1 << 20)
            self.note = "mine"

    loader = Own()
    loader.depth, loader.seed = 5, 8
    loader.set_epoch(4)
    again = copy.copy(loader)
    assert type(again) is Own
    assert (again.note, again.depth, again.seed, again._rank) == ("mine", 5, 8, 3)
    assert again._settings == loader._settings
    assert again.state_dict()["epoch"] == 4


def test_place_travels_and_a_seed_that_was_not_given_can_still_be_adopted():
    loader = next(loaders())
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    resumed = next(loaders())
    resumed.load_state_dict(state)
    again = WAYS["pickle"](resumed)
    assert again.state_dict()["batch"] == 1
    assert_same(epochs(again, 1), [value for batch in batches for value in epochs([batch], 1)])
    again.load_state_dict({**state, "seed": state["seed"] + 1})
    assert again.seed == state["seed"] + 1


@pytest.mark.parametrize("batches_before", [0, 1, 3], ids=["new", "within an epoch", "after an epoch"])
@pytest.mark.parametrize(("kind", "feed"), [(DataLoader, "ring"), (StatefulDataLoader, "plain")])
def test_copy_of_a_loader_with_persistent_workers_goes_on_as_the_loader_would(kind, feed, batches_before):
    generator = torch.Generator().manual_seed(1)
    wrapped = kind(range(6), 2, shuffle=True, generator=generator, num_workers=1, persistent_workers=True)
    with StreamedLoader(wrapped, feed=feed, device="cpu", seed=1) as loader:
        for number, _ in enumerate(loader if batches_before else (), 1):
            if number == batches_before < 3:
                break
        with copy.deepcopy(loader) as again:
            assert [values.tolist() for _ in range(2) for values in again] == [
                values.tolist() for _ in range(2) for values in loader
            ]


def _send(pickled, results):
    results.put([value.tolist() for value in epochs(pickle.loads(pickled))])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3), ids=["list", "DataLoader", "files"])
def test_spawned_process_gets_the_same_batches(number):
    loader, context = list(loaders())[number], multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_send, args=(pickle.dumps(loader), results))
    process.start()
    got = results.get()
    process.join()
    assert got == [value.tolist() for value in epochs(loader)]
