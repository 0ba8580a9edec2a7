import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.process.processes import run_in_fork
from support.process.waiting import WAIT_S

from gpuaug import GpuAugError, GpuAugWarning
from gpuaug.core import rng
from gpuaug.core.generators import GlobalGenerator, host_states
from gpuaug.core.rng import CallSeeds, Generators, Position, default_seed, following_seeds, next_seed

CPU = torch.device("cpu")

positions = st.builds(Position, st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(0, 2**20), st.integers(0, 2**40))
names = st.text(max_size=20)


def drawn(key):
    with Generators(CPU).keyed(key):
        return torch.rand(4)


@given(positions, names)
def test_key_is_valid_seed_for_every_generator(position, stage):
    key = position.key(stage)
    assert 0 <= key < 2**63
    drawn(key)


@given(positions, names, positions, names)
def test_keys_differ_by_position_and_stage(position, stage, other, other_stage):
    same = (position, stage) == (other, other_stage)
    assert (position.key(stage) == other.key(other_stage)) is same


def test_epoch_after_the_last_that_can_be_set_has_a_key():
    last, after = (Position(0, epoch, 0, 0).key("s") for epoch in (2**63 - 1, 2**63))
    assert last != after


def test_keys_are_stable():
    # A run that is resumed after an upgrade draws what it would have drawn.
    assert Position(seed=0, epoch=0, rank=0, batch=0).key("transform") == 138399822330705441
    assert Position(seed=42, epoch=3, rank=1, batch=1000).key("augment") == 8511380437846655753


@pytest.mark.parametrize("bit", [0, 31, 32, 47, 62])
def test_draws_depend_on_all_bits_of_the_key(bit):
    key = 6148914691236517205
    assert not torch.isin(drawn(key), drawn(key ^ (1 << bit))).any()


@pytest.mark.parametrize("key", [0, 1, 2**63 - 1])
def test_generator_says_which_key_it_has(key):
    with Generators(CPU).keyed(key):
        assert torch.initial_seed() == key
        values = torch.rand(10_000)
        copy = torch.Generator()
        copy.set_state(torch.get_rng_state())
        assert torch.equal(torch.rand(7), torch.rand(7, generator=copy))
    assert abs(values.mean().item() - 0.5) < 0.02
    assert abs(values.std().item() - 12**-0.5) < 0.01


def test_draws_are_stable():
    # A run that is resumed after an upgrade draws what it would have drawn.
    assert drawn(138399822330705441).tolist() == [0.6280769109725952, 0.930720865726471, 0.8650689721107483, 0.8784587383270264]


def test_normal_draw_of_another_key_is_not_kept():
    with Generators(CPU).keyed(1):
        torch.randn(1)  # the second of the pair waits
    with Generators(CPU).keyed(2):
        first = torch.randn(1)
    with Generators(CPU).keyed(2):
        assert torch.equal(torch.randn(1), first)


def test_nested_blocks_keep_outer_draws():
    with Generators(CPU).keyed(1):
        first = torch.rand(2)
        with Generators(CPU).keyed(2):
            torch.rand(7)
        second = torch.rand(2)
    assert torch.equal(torch.cat([first, second]), drawn(1))


def test_cached_normal_draw_is_restored():
    torch.manual_seed(5)
    torch.randn(1)
    expected = torch.randn(3)
    torch.manual_seed(5)
    torch.randn(1)
    with Generators(CPU).keyed(1):
        torch.randn(1)
    assert torch.equal(torch.randn(3), expected)


def test_next_seed_equals_torch_randint():
    def seeds():
        torch.manual_seed(3)
        with torch.device("meta"):
            with torch.inference_mode():
                first = next_seed()
            following = following_seeds(2)
        return [first, *following, next_seed(), next_seed(), int(torch.randint(0, 2**63 - 1, ()))]

    with ThreadPoolExecutor(1) as fresh:
        got = fresh.submit(seeds).result(), seeds()
    torch.manual_seed(3)
    expected = torch.randint(0, 2**63 - 1, (4,)).tolist()
    assert got == ([expected[0], *expected[1:3], *expected[1:]],) * 2


def test_stage_seeds_belong_to_its_thread(monkeypatch):
    monkeypatch.setattr(rng, "DRAW_WAIT_S", 0)
    calls = CallSeeds(Position(0, 0, 0, 0), "a")
    with ThreadPoolExecutor(1) as other, Generators(CPU).keyed(1), calls:
        with pytest.warns(GpuAugWarning, match="Random numbers outside of a stage are drawn from the state of a stage"):
            elsewhere = other.submit(next_seed).result()
        here = next_seed()
    with Generators(CPU).keyed(1):
        assert elsewhere == int(torch.randint(0, 2**63 - 1, ()))
    assert here == CallSeeds(Position(0, 0, 0, 0), "a").next()


def test_concurrent_threads_get_distinct_seeds(monkeypatch):
    # Locks are not fair: with such a short switch interval on a busy machine, a thread may wait longer than the default.
    monkeypatch.setattr(rng, "DRAW_WAIT_S", WAIT_S)

    def several(begin):
        begin.wait()
        return [next_seed() for _ in range(5000)]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        torch.manual_seed(3)
        with ThreadPoolExecutor(4) as threads:
            got = [seed for part in threads.map(several, [threading.Barrier(4)] * 4) for seed in part]
    finally:
        sys.setswitchinterval(before)
    torch.manual_seed(3)
    assert sorted(got) == sorted(torch.randint(0, 2**63 - 1, (20_000,)).tolist())


A_WHILE_S = 0.1
"""Long enough for another thread to get as far as it can."""


def test_blocks_of_two_threads_take_turns():
    inside = threading.Event()

    def other():
        with Generators(CPU).keyed(2):
            inside.set()
            return torch.rand(4)

    torch.manual_seed(5)
    before = torch.get_rng_state()
    with ThreadPoolExecutor(1) as thread:
        with Generators(CPU).keyed(1):
            first = torch.rand(2)
            elsewhere = thread.submit(other)
            assert not inside.wait(A_WHILE_S)
            second = torch.rand(2)
        assert torch.equal(elsewhere.result(WAIT_S), drawn(2))
    assert torch.equal(torch.cat([first, second]), drawn(1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("draw", [next_seed, partial(following_seeds, 2), default_seed], ids=["next", "following", "default"])
def test_draw_waits_for_stage_of_another_thread(draw, monkeypatch):
    monkeypatch.setattr(rng, "DRAW_WAIT_S", WAIT_S)
    torch.manual_seed(5)
    expected = draw()
    torch.manual_seed(5)
    with ThreadPoolExecutor(1) as thread:
        with Generators(CPU).keyed(1):
            elsewhere = thread.submit(draw)
            with pytest.raises(TimeoutError):
                elsewhere.result(A_WHILE_S)
            assert torch.equal(torch.rand(4), drawn(1))
        assert elsewhere.result(WAIT_S) == expected


def test_block_that_another_thread_keeps_is_an_error(monkeypatch):
    with ThreadPoolExecutor(1) as thread, Generators(CPU).keyed(1):
        monkeypatch.setattr(rng, "STAGE_WAIT_S", 0)
        with pytest.raises(GpuAugError, match="because a stage of another thread has used them"):
            thread.submit(drawn, 2).result(WAIT_S)
        monkeypatch.setattr(rng, "STAGE_WAIT_S", WAIT_S)
        elsewhere = thread.submit(drawn, 2)
        here = torch.rand(4)
        assert torch.equal(here, drawn(1))
    assert torch.equal(elsewhere.result(), drawn(2))


def test_generators_are_free_after_a_block_that_could_not_begin():
    with ThreadPoolExecutor(1) as thread:
        with pytest.raises((TypeError, RuntimeError)), Generators(CPU).keyed("no key"):
            pass
        assert torch.equal(thread.submit(drawn, 2).result(WAIT_S), drawn(2))


def in_a_block(entered, leave):
    with Generators(CPU).keyed(1):
        entered.set()
        leave()


def test_forked_child_has_the_users_numbers(monkeypatch):
    monkeypatch.setattr(rng, "FORK_WAIT_S", WAIT_S)
    entered = threading.Event()
    torch.manual_seed(5)
    before = torch.get_rng_state()

    def child():
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(drawn(2), expected)

    expected = drawn(2)
    with ThreadPoolExecutor(1) as thread:
        stage = thread.submit(in_a_block, entered, lambda: time.sleep(A_WHILE_S))
        assert entered.wait(WAIT_S)
        run_in_fork(child)
        stage.result(WAIT_S)
        run_in_fork(child)  # and the parent's generators were free again
        assert torch.equal(thread.submit(drawn, 2).result(WAIT_S), expected)


def test_child_that_is_forked_in_the_middle_of_a_stage_does_not_wait_for_its_end(monkeypatch):
    monkeypatch.setattr(rng, "FORK_WAIT_S", 0)
    entered, leave, expected = threading.Event(), threading.Event(), drawn(2)

    def child():
        assert torch.equal(drawn(2), expected)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(in_a_block, entered, partial(leave.wait, WAIT_S))
        assert entered.wait(WAIT_S)
        run_in_fork(child)
        leave.set()
        assert torch.equal(thread.submit(drawn, 2).result(WAIT_S), expected)


def test_stage_may_fork():
    with Generators(CPU).keyed(1):
        run_in_fork(lambda: drawn(2))
    with ThreadPoolExecutor(1) as thread:
        assert torch.equal(thread.submit(drawn, 2).result(WAIT_S), drawn(2))


def test_threads_of_a_child_that_is_forked_in_a_block_do_not_wait_for_its_end(monkeypatch):
    # A loader starts its workers within such a block, and a worker never leaves it.
    monkeypatch.setattr(rng, "STAGE_WAIT_S", 0)

    def child():
        with ThreadPoolExecutor(1) as thread:
            assert torch.equal(thread.submit(drawn, 2).result(WAIT_S), expected)

    expected = drawn(2)
    with rng.generator_lock:
        run_in_fork(child)
    with Generators(CPU).keyed(1):
        run_in_fork(child)
        assert torch.equal(torch.rand(4), drawn(1))


def test_block_that_could_not_begin_leaves_the_generators_as_they_were():
    def fail(key):
        raise ZeroDivisionError

    restored = []
    generators = Generators(CPU)
    generators._generators.append(GlobalGenerator(lambda: partial(restored.append, 1), fail))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), generators.keyed(1):
        pass
    assert torch.equal(torch.get_rng_state(), before)
    assert restored == [1]
    torch.set_rng_state(before)
    seed = next_seed()
    torch.set_rng_state(before)
    assert next_seed() == seed


def test_generators_behind_one_that_cannot_be_restored_are_restored(monkeypatch):
    def fail(state):
        raise LookupError("its own")

    monkeypatch.setattr(rng, "python_generator", lambda: GlobalGenerator(lambda: partial(fail, None), lambda key: None))
    state = host_states()
    with pytest.raises(LookupError, match="its own"), Generators(CPU, libraries=True).keyed(1):
        np.random.rand()
    assert host_states() == state


def test_calls_that_an_interrupt_kept_open_give_no_seeds_once_recovered():
    CallSeeds(Position(0, 0, 0, 0), "stage").__enter__()
    rng.generator_lock.recover()
    torch.manual_seed(3)
    seed = next_seed()
    torch.manual_seed(3)
    assert seed == int(torch.randint(0, 2**63 - 1, ()))
