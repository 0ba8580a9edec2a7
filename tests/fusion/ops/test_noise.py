"""Keys of noise fields: no batch of a run has another's. torchvision's noise."""

import kornia.augmentation as K
import pytest
import torch
import torchvision
from support.comparison.replay import photographs
from support.comparison.statistics import apart
from support.comparison.torchvision_replay import replayed
from support.comparison.values import assert_values
from torchvision.transforms import v2

import gpuaug
from gpuaug.core.rng import Generators, Position
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.positional import NOISE_FIELDS, Erasing, GaussianNoise, philox
from gpuaug.fusion.ops.sampler import Sampler

SIZE = Size(64, 1, 4, 4)
VERSION = tuple(int(part) for part in torchvision.__version__.split(".")[:2])
of_bytes = pytest.mark.skipif(VERSION < (0, 24), reason="torchvision before 0.24 adds noise to floats only")
DTYPES = [pytest.param(torch.uint8, marks=of_bytes), torch.float32]


KNOWN_WORDS = {
    "0": ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "all bits": ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "digits of pi": ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
}
"""Counter, key and result of Philox 4x32-10, from the known-answer tests of Random123 (``kat_vectors``)."""


def drawn(op, batch, size=SIZE):
    key = Position(seed=1, epoch=0, rank=0, batch=batch).key("augment/1")
    return op.draw_parameters(Sampler((key,), size.batch, 1), size)


@pytest.mark.parametrize("name", KNOWN_WORDS)
def test_philox_gives_the_words_of_its_authors(name):
    counter, key, expected = ([int(word, 16) for word in words.split()] for words in KNOWN_WORDS[name])
    result = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert [int(word) for word in result] == expected


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("frames", [0, 2])
@pytest.mark.parametrize("settings", [(0.0, 0.1), (0.3, 0.5), (-0.4, 0.7, False), (20 / 255, 0.0), (-3.0, 0.0, False)], ids=str)
def test_torchvision_returns_the_same_pixels_for_the_same_noise(settings, frames, dtype, monkeypatch):
    transform, images = v2.GaussianNoise(*settings), photographs(6, dtype=dtype)
    images = images.unflatten(0, (-1, frames)) if frames else images
    standard = gpuaug.fuse(K.RandomGaussianNoise(0.0, 1.0, p=1.0)).draw(images.shape, seed=3)
    fields = iter(standard.as_kornia()["gaussian_noise"].reshape(images.shape))
    augment = gpuaug.fuse(transform)
    draws = augment.draw(images.shape, seed=3, dtype=dtype)
    monkeypatch.setattr(torch, "randn_like", lambda image, **_: next(fields))
    expected = torch.stack([transform(image) for image in images])
    monkeypatch.undo()
    assert_values(augment(images, draws=draws), expected)
    assert_values(replayed(draws, images), expected)


def test_a_negative_deviation_is_torchvisions_error():
    with pytest.warns(gpuaug.GpuAugWarning, match="sigma is negative"):
        augment = gpuaug.fuse(v2.GaussianNoise(sigma=-0.1))
    with pytest.raises(ValueError, match="sigma shouldn't be negative"):
        augment(photographs(2))


@of_bytes
def test_noise_of_more_than_16_bits_is_left_to_torchvision():
    with pytest.warns(gpuaug.GpuAugWarning, match="the noise of bytes may overflow int16"):
        augment = gpuaug.fuse(v2.GaussianNoise(sigma=25.5))
    assert augment(photographs(2)).dtype == torch.uint8
    assert "the noise of bytes may overflow int16" in str(augment.explain())
    assert not augment.explain((2, 3, 32, 48), dtype=torch.float32).lines[0].reason


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_erased_pixels_have_torchvisions_distribution_and_differ_between_samples(dtype):
    transform = v2.RandomErasing(1.0, scale=(0.5, 0.6), value="random")
    images = torch.full((40, 3, 24, 20), 77, dtype=dtype)
    torch.manual_seed(0)
    theirs = torch.stack([transform(image) for image in images])
    ours = gpuaug.fuse(transform)(images)
    erased = [made[made != 77].double().numpy() for made in (theirs, ours)]
    assert apart(*erased) < 1
    assert apart(erased[0], erased[1] * 1.1) > 1
    values = [set(sample[sample != 77].tolist()) for sample in ours]
    if dtype.is_floating_point:
        assert not any(values[0] & other for other in values[1:])


@of_bytes
def test_noise_in_the_rectangle_alone_equals_noise_of_whole_images(monkeypatch):
    augment, images = gpuaug.fuse(v2.RandomErasing(0.7, value="random")), photographs(6)
    draws = augment.draw(images.shape, seed=1, dtype=images.dtype)
    on_a_cpu = augment(images, draws=draws)
    monkeypatch.setattr(Erasing, "apply_on_cpu", Erasing.apply)
    assert_values(augment(images, draws=draws), on_a_cpu)
