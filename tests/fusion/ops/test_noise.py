"""Keys of noise fields: no batch of a run has another's."""

import kornia.augmentation as K
import pytest
import torch

from gpuaug.core.rng import Generators, Position
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.positional import NOISE_FIELDS, GaussianNoise
from gpuaug.fusion.ops.sampler import Sampler

SIZE = Size(64, 1, 4, 4)


def drawn(op, batch, size=SIZE):
    key = Position(seed=1, epoch=0, rank=0, batch=batch).key("augment/1")
    return op.draw_parameters(Sampler((key,), size.batch, 1), size)


def test_noise_differs_between_positions_whose_keys_share_31_bits():
    op, fields = GaussianNoise("noise", K.RandomGaussianNoise(p=1.0)), []
    for epoch, batch in ((8, 4287), (10, 830)):
        key = Position(seed=1, epoch=epoch, rank=0, batch=batch).key("augment/1")
        sampler = Sampler((key,), SIZE.batch, 1)
        fields.append(op.kornia_parameters(op.draw_parameters(sampler, SIZE), SIZE)["gaussian_noise"])
    assert not torch.isclose(*fields).all((1, 2, 3)).any()


@pytest.mark.slow
def test_noise_keys_of_100_000_positions_differ():
    op, size = GaussianNoise("noise", K.RandomGaussianNoise()), Size(1, 1, 1, 1)
    found = {(each["seed"], each["field"][0]) for each in (drawn(op, batch, size) for batch in range(100_000))}
    assert len(found) == 100_000


@pytest.mark.parametrize("shared", [False, True])
def test_noise_fields_of_a_batch_differ_unless_shared(shared):
    op, size = GaussianNoise("noise", K.RandomGaussianNoise(same_on_batch=shared)), Size(1000, 1, 1, 1)
    firsts = set()
    for batch in range(20):
        each = drawn(op, batch, size)
        fields = each["field"].astype(int)
        assert 0 <= each["seed"] < 2**31  # two halves in a row of float32
        assert fields.min() >= 0
        assert fields.max() < NOISE_FIELDS
        assert ((fields - fields[0]) % NOISE_FIELDS == (0 if shared else range(1000))).all()
        firsts.add(fields[0])
    assert max(firsts) > NOISE_FIELDS // 2, "fields begin anywhere"


def test_seeds_of_modules_left_to_kornia_have_more_than_32_bits():
    keys = [Sampler((key,), 1, 1).key() for key in range(100)]
    assert all(0 <= key < 2**63 for key in keys)
    assert max(keys) > 2**62
    with Generators(torch.device("cpu")).keyed(max(keys)):
        torch.rand(1)
