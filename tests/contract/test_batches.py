"""The loader gives the batches that it promises, when it promises them, as far as a machine without a GPU can tell."""

import gc
import threading
import time
import weakref

import kornia.augmentation as K
import pytest
import torch
from contract.sources import DEPTHS, Numbers, NumberStream, Opened, noise, streamed, values
from support.comparison.values import assert_values
from support.process.waiting import WAIT_S
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpuaug import FeatureStage, StreamedLoader, TransformStage

# 1. Complete and in order


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_every_batch_arrives_in_order_whatever_the_depth(count, depth):
    batches = [torch.tensor([index]) for index in range(count)]
    loader = streamed(batches, depth=depth)
    for _ in range(2):
        assert values(loader) == [[index] for index in range(count)]


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_last_partial_batch_arrives_too(depth):
    wrapped = DataLoader(TensorDataset(torch.arange(7)), batch_size=3)
    assert [batch[0].tolist() for batch in streamed(wrapped, depth=depth)] == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_partial_batch_is_dropped_where_the_wrapped_loader_drops_it():
    wrapped = DataLoader(TensorDataset(torch.arange(7)), batch_size=3, drop_last=True)
    assert [batch[0].tolist() for batch in streamed(wrapped)] == [[0, 1, 2], [3, 4, 5]]


def test_what_workers_load_arrives_in_order():
    wrapped = DataLoader(Numbers(11), batch_size=2, num_workers=2)
    assert values(streamed(wrapped)) == values(wrapped)


class Indexed:
    def __getitem__(self, index):
        return torch.tensor([1, 2, 3][index])


@pytest.mark.parametrize(
    "make",
    [
        lambda: (x for x in torch.arange(3)),
        lambda: map(torch.tensor, range(3)),
        lambda: torch.arange(3),
        lambda: DataLoader(NumberStream(), batch_size=None, sampler=None),
        NumberStream,
        Indexed,
    ],
    ids=["generator", "map", "tensor", "stream", "dataset", "indexable"],
)
def test_any_iterable_will_do(make):
    expected = [batch.item() for batch in make()]
    assert values(streamed(make())) == expected


def test_an_iterator_that_has_ended_stays_ended():
    batches = iter(streamed([torch.zeros(1)]))
    next(batches)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(batches)


def test_a_source_that_can_be_read_once_is_empty_the_second_time():
    loader = streamed(x for x in torch.arange(3))
    assert values(loader) == [0, 1, 2]
    assert values(loader) == []


# 2. Equal to the reference


def pipelines():
    torch.manual_seed(0)
    augment = K.AugmentationSequential(K.RandomHorizontalFlip(), K.ColorJitter(0.4, 0.4, p=0.8), K.RandomErasing())
    encoder = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).requires_grad_(False)
    mix = TransformStage(lambda x, y: (x[torch.randperm(len(x))], y), on=(0, 1), name="mix")
    return [augment, TransformStage(lambda x: x + torch.randn_like(x)), mix, FeatureStage(encoder)]


@pytest.mark.parametrize("depth", DEPTHS[1:])
def test_batches_are_bit_identical_for_every_depth(depth):
    torch.manual_seed(1)
    batches = [(torch.rand(size, 3, 8, 8), torch.arange(size)) for size in (4, 4, 4, 2)]
    stages = pipelines()
    reference, loader = (streamed(batches, *stages, seed=0, depth=d) for d in (0, depth))
    for _ in range(2):
        for ours, theirs in zip(loader, reference, strict=True):
            assert_values(ours[0], theirs[0])
            assert_values(ours[1], theirs[1])


# 4. Yours to keep, yours to drop


def test_batches_that_are_kept_do_not_change():
    loader = streamed([torch.full((4,), float(index)) for index in range(6)], noise, seed=0)
    kept = list(loader)
    copies = [batch.clone() for batch in kept]
    list(loader)
    for batch, copy in zip(kept, copies, strict=True):
        assert_values(batch, copy)
    assert len({batch.data_ptr() for batch in kept}) == len(kept)


def test_a_batch_that_is_dropped_is_freed_at_once():
    batches = iter(streamed(torch.ones(6, 2), lambda x: x + 1))
    gc.disable()
    try:
        for batch in batches:
            watched = weakref.ref(batch)
            del batch
            assert watched() is None
    finally:
        gc.enable()


# 5. Bounded memory


@pytest.mark.parametrize("depth", [0, 2])
def test_the_wrapped_loader_is_read_a_bounded_number_of_batches_ahead(depth):
    pulled = 0

    def counted():
        nonlocal pulled
        for index in range(100):
            pulled += 1
            yield torch.tensor(index)

    batches = iter(streamed(counted(), depth=depth))
    for taken in range(1, 6):
        next(batches)
        time.sleep(0.02)  # long enough to run away in
        assert taken <= pulled <= taken + depth + 4
    batches.close()


# 6. A ready batch is never held up by a slow loader


@pytest.mark.parametrize("depth", [0, 2])
def test_a_batch_that_is_ready_is_handed_over_while_the_next_is_being_loaded(depth):
    wanted = threading.Event()

    def slow():
        yield torch.tensor(0)
        assert wanted.wait(WAIT_S), "the first batch was held up by the second"
        yield torch.tensor(1)

    batches = iter(streamed(slow(), depth=depth))
    assert next(batches).item() == 0
    wanted.set()
    assert next(batches).item() == 1
    batches.close()


# 13. The same program runs on a CPU


def test_every_kind_of_stage_runs_on_a_cpu():
    augment = K.AugmentationSequential(K.RandomHorizontalFlip(), K.Normalize(0.5, 0.5))
    encoder = nn.Conv2d(3, 4, 3).requires_grad_(False)
    loader = StreamedLoader(
        [{"image": torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8), "label": torch.arange(2), "name": ["a", "b"]}] * 2,
        [
            TransformStage(lambda x: augment(x.float() / 255), on="image"),
            FeatureStage(encoder, on="image", into="features", autocast=torch.bfloat16, memory_format=torch.channels_last),
        ],
        device="cpu",
    )
    for batch in loader:
        assert batch["features"].shape == (2, 4, 6, 6)
        assert batch["features"].dtype is torch.bfloat16
        assert batch["image"].dtype is torch.float32
        assert batch["name"] == ["a", "b"]


@pytest.mark.parametrize("depth", [0, 3])
def test_on_a_cpu_a_batch_is_worked_on_when_it_is_wanted(depth):
    # There is nothing to overlap with: working ahead would only put off the batch that is wanted.
    worked_on = []
    batches = iter(streamed(torch.arange(6), lambda x: worked_on.append(x.item()) or x, depth=depth))
    for taken in range(1, 5):
        next(batches)
        assert worked_on == list(range(taken))
    batches.close()


# 14. Nothing starts before it is wanted


def test_nothing_starts_before_the_first_batch_is_asked_for(feeds):
    wrapped = Opened(torch.arange(3))
    loader = streamed(wrapped)
    batches = iter(loader)
    assert len(loader) == 3
    assert (wrapped.opened, feeds()) == (0, [])
    next(batches)
    assert wrapped.opened == 1
    list(batches)
    assert wrapped.opened == 1, "once an epoch"
    list(loader)
    assert wrapped.opened == 2
