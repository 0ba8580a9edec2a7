"""Python's and NumPy's global generators within a block: what they draw, and that they are then as they were."""

import random
from contextlib import suppress

import numpy as np
import pytest
import torch

from gpuaug.core.rng import Generators

CPU = torch.device("cpu")


def draw():
    """Numbers of each kind of draw: of words, of pairs of normal numbers, of permutations."""
    shuffled = list(range(50))
    random.shuffle(shuffled)
    python = [random.random(), random.gauss(0, 1), random.getrandbits(70), random.choice(range(1000)), *shuffled]
    rand = np.random
    return [*python, *rand.rand(700), rand.randn(), rand.randint(10**6), rand.beta(2, 3), *rand.permutation(50)]


def drawn(key):
    with Generators(CPU, libraries=True).keyed(key):
        return draw()


def state():
    name, words, *more = np.random.get_state()
    return random.getstate(), [name, words.tolist(), *more]


def test_draws_follow_from_the_key():
    first = drawn(1)
    draw()
    assert drawn(1) == first
    assert drawn(2) != first


@pytest.mark.parametrize("bit", [0, 31, 32, 62])
def test_draws_depend_on_all_bits_of_the_key(bit):
    def firsts(key):
        with Generators(CPU, libraries=True).keyed(key):
            return random.random(), np.random.rand()

    key = 6148914691236517205
    assert not set(firsts(key)) & set(firsts(key ^ (1 << bit)))


def test_generators_of_one_key_draw_other_numbers_than_one_another():
    with Generators(CPU, libraries=True).keyed(5 + 2**40):
        words = {
            "python": [random.getrandbits(32) for _ in range(1300)],
            "numpy": np.random.randint(0, 2**32, 1300, dtype=np.uint32).tolist(),
            "torch": torch.randint(0, 2**32, (1300,)).tolist(),
        }
    values = [np.array(each) / 2**32 for each in words.values()]
    assert all(abs(each.mean() - 0.5) < 0.03 for each in values)
    assert len({value for each in words.values() for value in each}) > 3800


@pytest.mark.parametrize("cached", [False, True], ids=["", "half of a pair of normal numbers in hand"])
def test_generators_are_as_they_were(cached):
    if cached:
        random.gauss(0, 1)
        np.random.randn()
    before = state()
    for within in (
        lambda: None,
        draw,
        lambda: (random.seed(3), np.random.seed(3)),
        lambda: (random.gauss(0, 1), np.random.randn()),
    ):
        with Generators(CPU, libraries=True).keyed(1):
            within()
            with Generators(CPU, libraries=True).keyed(2):
                draw()
            kept = state()
            drawn(3)
            assert state() == kept
        assert state() == before
    with suppress(LookupError), Generators(CPU, libraries=True).keyed(1):
        draw()
        raise LookupError
    assert state() == before


def test_a_first_normal_number_is_not_the_users():
    def normal():
        with Generators(CPU, libraries=True).keyed(1):
            return random.gauss(0, 1), np.random.randn()

    first = normal()
    random.gauss(0, 1)
    np.random.randn()
    assert normal() == first


def test_another_bit_generator_of_the_users_comes_back():
    before, own = np.random.get_bit_generator(), np.random.PCG64(7)
    np.random.set_bit_generator(own)
    try:
        found = own.state
        first = drawn(1)
        assert np.random.get_bit_generator() is own
        assert own.state == found
    finally:
        np.random.set_bit_generator(before)
    assert drawn(1) == first


def test_state_within_a_block_can_be_read_and_set():
    with Generators(CPU, libraries=True).keyed(1):
        python, numpy = random.Random(), np.random.RandomState()
        python.setstate(random.getstate())
        numpy.set_state(np.random.get_state())
        assert (random.random(), np.random.rand()) == (python.random(), numpy.rand())
        np.random.set_state(("MT19937", np.arange(624), 0))
        assert np.random.get_state()[1].tolist() == list(range(624))


def test_generators_are_left_alone_unless_asked_for():
    before = state()
    with Generators(CPU).keyed(1):
        assert state() == before
