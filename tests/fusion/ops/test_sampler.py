"""The numbers of a sampler; and extra uniforms, from SplitMix64 seeded by a sample's own, where it needs more."""

import numpy as np
import pytest

from gpuaug.fusion.ops.sampler import Sampler, extra_uniforms

COUNT, PAIRS = 60_000, 3
KEYS = (0, 7, 2**63, 2**64 - 1)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("each", [1, 3, 8])
@pytest.mark.parametrize("columns", [1, 3, 4])
@pytest.mark.parametrize("keys", [KEYS, KEYS[1:2]])
def test_numbers_are_those_of_numpys_philox_for_each_key(keys, columns, each, apart):
    generators = [np.random.Generator(np.random.Philox(key=key)) for key in keys]

    def uniform():
        return np.concatenate([made.random((columns, each), dtype=np.float32) for made in generators], 1)

    for _ in range(2):  # the thread's generators are used again
        sampler = Sampler(keys, each, columns, separate_generators=apart)
        generators = [np.random.Generator(np.random.Philox(key=key)) for key in keys]
        np.testing.assert_array_equal(sampler.uniform(columns), uniform())
        # Half a word of Philox may be left between these.
        for count in (4, 3, 40):
            np.testing.assert_array_equal(sampler.permutation(count), [made.permutation(count) for made in generators])
            np.testing.assert_array_equal(sampler.uniform(columns), uniform())
        assert (
            sampler.shared_by_samples().uniform().tolist()
            == np.repeat([made.random(dtype=np.float32) for made in generators], each).tolist()
        )


@pytest.fixture(scope="module")
def drawn():
    """What samples were given, and what they got, (4, B) and (6, B)."""
    given = np.random.default_rng(1).random((4, COUNT), dtype=np.float32)
    return given, extra_uniforms(given, PAIRS).reshape(2 * PAIRS, COUNT)


def test_extra_uniforms_are_splitmix64():
    """Its first words for the seeds 0 and 1: Vigna's reference implementation, https://prng.di.unimi.it/splitmix64.c."""
    words = {0: (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4), 1: (0x910A2DEC89025CC1, 0xBEEB8DA1658EEC67)}
    for seed, expected in words.items():
        high, low = extra_uniforms(np.array([[0.0], [0.0], [0.0], [seed * 2.0**-24]], dtype=np.float32), 2)
        assert high[:, 0].tolist() == [(word >> 40) / 2**24 for word in expected]
        assert low[:, 0].tolist() == [(word & 0xFFFFFF) / 2**24 for word in expected]


def test_extra_uniforms_can_be_had_in_parts(drawn):
    given, got = drawn
    np.testing.assert_array_equal(extra_uniforms(given, PAIRS - 1, 1).reshape(-1, COUNT), np.delete(got, [0, PAIRS], 0))


@pytest.mark.parametrize("row", range(4))
def test_each_bit_of_the_seed_changes_extra_uniforms(row):
    given = np.random.default_rng(2).random((4, 1), dtype=np.float32)
    flipped = given.repeat(24, 1)
    flipped[row] = ((given[row] * 2**24).astype(np.int64) ^ (1 << np.arange(24))) * 2.0**-24
    assert len(np.unique(extra_uniforms(np.concatenate([given, flipped], 1), 1)[0])) > 20
