"""Randomness is keyed, not consumed: draws depend on the position alone, and the user's generators are as they were."""

import random

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from contract.sources import Numbers, OwnError, failure, noise, streamed, values
from support.comparison.values import assert_values
from torch import nn
from torch.utils.data import DataLoader

from gpuaug import FeatureStage, TransformStage, fuse


def first_draw(seed=0, epoch=0, rank=0, batch=0, name="stage"):
    loader = streamed([torch.zeros(4)] * (batch + 1), TransformStage(noise, name=name), seed=seed, rank=rank)
    loader.set_epoch(epoch)
    return list(loader)[batch].tolist()


def test_draws_are_the_same_at_the_same_position():
    assert first_draw(1, 2, 3, 4, "here") == first_draw(1, 2, 3, 4, "here")


@pytest.mark.parametrize("changed", [{"seed": 5}, {"epoch": 5}, {"rank": 5}, {"batch": 5}, {"name": "other"}])
def test_draws_differ_wherever_the_position_does(changed):
    assert first_draw() != first_draw(**changed)


def test_draws_do_not_depend_on_what_other_stages_draw():
    def busy(x):
        torch.rand(17)
        return x

    batches = [torch.zeros(4)] * 3
    alone = values(streamed(batches, TransformStage(noise, name="n"), seed=0))
    accompanied = values(streamed(batches, busy, TransformStage(noise, name="n"), busy, seed=0))
    assert alone == accompanied


def test_draws_do_not_depend_on_which_batches_were_left_unread():
    loader = streamed([torch.zeros(4)] * 5, noise, seed=0)
    whole = values(loader)
    next(iter(loader))  # epoch 1 is left at once
    loader.set_epoch(0)
    assert values(loader) == whole


def test_one_pipeline_called_twice_in_a_stage_gives_two_views():
    pipeline = K.AugmentationSequential(K.RandomGaussianNoise(p=1.0))
    stage = TransformStage(lambda x: (pipeline(x), pipeline(x)))
    ((left, right),) = streamed([torch.zeros(2, 3, 4, 4)], stage)
    assert not torch.equal(left, right)


def test_two_stages_of_one_pipeline_draw_differently():
    stages = [TransformStage(noise, on=0), TransformStage(noise, on=1)]
    ((left, right),) = streamed([(torch.zeros(4), torch.zeros(4))], *stages)
    assert not torch.equal(left, right)


def test_epochs_differ_unless_one_is_chosen():
    loader = streamed([torch.zeros(4)] * 2, noise, seed=0)
    epochs = [values(loader) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    loader.set_epoch(1)
    assert values(loader) == epochs[1]
    assert values(loader) == epochs[2]


def test_an_iterator_that_was_never_read_takes_no_epoch():
    loader = streamed([torch.zeros(4)] * 2, noise, seed=0)
    unread = [iter(loader) for _ in range(3)]
    assert values(loader) == values(streamed([torch.zeros(4)] * 2, noise, seed=0))
    del unread


@pytest.mark.parametrize("workers", [0, 1])
def test_the_users_generator_is_as_if_the_stages_had_not_run(workers):
    # Shuffling draws from it, too: the order of the samples is that of the plain loader.
    wrapped = DataLoader(Numbers(8), batch_size=2, shuffle=True, num_workers=workers)
    torch.manual_seed(3)
    plain = [values(wrapped) for _ in range(2)]
    expected = torch.rand(4)
    torch.manual_seed(3)
    loader = streamed(wrapped, lambda x: x + 0 * torch.randint(9, x.shape), FeatureStage(nn.Dropout()))
    assert [values(loader) for _ in range(2)] == plain
    assert_values(torch.rand(4), expected)


def test_the_users_generator_is_as_it_was_in_the_middle_of_an_epoch():
    torch.manual_seed(3)
    expected = [torch.rand(1).item() for _ in range(6)]
    torch.manual_seed(3)
    assert [torch.rand(1).item() for _ in streamed(torch.arange(6.0), noise)] == expected


def test_the_users_generator_is_as_it_was_after_a_stage_failed():
    def fail(x):
        torch.rand(3)
        raise OwnError(7, text="")

    torch.manual_seed(3)
    before = torch.get_rng_state()
    failure(streamed([torch.zeros(1)], fail))
    assert_values(torch.get_rng_state(), before)


def test_the_users_own_draws_do_not_reach_the_stages():
    loader = streamed([torch.zeros(4)] * 4, noise, seed=0)
    alone = values(loader)
    loader.set_epoch(0)
    found = []
    for batch in loader:
        found.append(batch.tolist())
        torch.manual_seed(torch.randint(100, ()).item())
    assert found == alone


def mixup(images):
    """As timm's Mixup draws: from NumPy, and here from Python besides."""
    lam = np.random.beta(0.8, 0.8)
    return images * lam + images.flip(0) * (1 - lam) + np.random.permutation(len(images))[0] + random.gauss(0, 1)


def test_draws_from_python_and_numpy_are_keyed():
    def state():
        return random.getstate(), [str(value) for value in np.random.get_state()]

    batches = list(torch.rand(4, 3, 2))
    want = values(streamed(batches, mixup, mixup, seed=3))
    assert len({str(batch) for batch in want}) == 4
    assert values(streamed(batches, mixup, mixup, seed=4)) != want
    random.gauss(0, 1)
    np.random.randn()
    for depth in (0, 5):
        before = state()
        assert values(streamed(batches, mixup, mixup, seed=3, depth=depth)) == want
        assert state() == before
    fused = fuse(K.AugmentationSequential(K.RandomHorizontalFlip()))
    assert fused.draws_only_from_seed
    assert values(streamed([torch.rand(2, 3, 4, 4)], fused))


class Shifted(K.RandomHorizontalFlip):
    """A module of the user's, which draws from NumPy."""

    def apply_transform(self, images, params, flags, transform=None):
        return images + np.random.rand()


@pytest.mark.filterwarnings("ignore::gpuaug.GpuAugWarning")
def test_draws_from_numpy_in_a_fused_pipeline_are_keyed():
    augment = fuse(K.AugmentationSequential(K.RandomVerticalFlip(), Shifted(p=1.0)))
    assert not augment.draws_only_from_seed
    first, second = (values(streamed([torch.rand(2, 3, 4, 4).fill_(0.5)] * 2, augment, seed=1)) for _ in range(2))
    assert first == second
    assert first[0] != first[1]
