"""A run that is taken up from a checkpoint goes on as if it had never stopped."""

import threading

import pytest
import torch
import torch.distributed.checkpoint.stateful
from support.loader.checkpoints import (
    BATCHES,
    SOURCES,
    Counter,
    Prepared,
    bits,
    noisy,
    one_worker,
    same,
    saved,
    shuffled,
    stopped_at,
    streamed,
)
from support.process.waiting import WAIT_S, until
from torch.utils.data import Sampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from gpuaug import IteratorEndedError, StreamedLoader
from gpuaug.loader.checkpoint import VERSION

IN_PROCESS = [kind for kind in SOURCES if kind.endswith("in this process")]
STOPS = {
    **{(kind, "plain"): (0, 1, BATCHES) for kind in IN_PROCESS},
    **{(kind, "ring"): (4, BATCHES - 1) for kind in IN_PROCESS},
    ("two workers", "plain"): (BATCHES,),
    ("two workers", "ring"): (4,),
    ("one worker, every third state", "plain"): (BATCHES - 1,),
    ("one worker, every third state", "ring"): (4,),
    ("workers that persist", "plain"): (4,),
    ("a stream", "plain"): (1,),
    ("a stream", "ring"): (BATCHES - 1,),
    ("a stream with a state", "plain"): (0,),
    ("a stream with a state", "ring"): (4,),
}
"""Number of batches before each stop, by source and feed. Sources with workers stop once: workers take time to start."""


@pytest.mark.parametrize(("kind", "feed"), STOPS)
def test_resumed_epoch_equals_uninterrupted_run(kind, feed):
    make, counts = SOURCES[kind], STOPS[kind, feed]
    expected, states = [], []
    with streamed(make, kind=kind, feed=feed) as whole:
        batches = iter(whole)
        states.append(saved(whole.state_dict()))
        for batch in batches:
            expected.append(bits(batch))
            states.append(saved(whole.state_dict()))
    assert len(expected) == BATCHES
    for count in counts:
        state = stopped_at(4, streamed(make, kind=kind, feed=feed)) if count == 4 else states[count]
        with streamed(make, kind=kind, feed=feed) as resumed:
            resumed.load_state_dict(state)
            rest = [bits(batch) for batch in resumed]
        assert same(rest, expected[count:]), count


@pytest.mark.parametrize(
    ("kind", "depth"),
    [
        *((kind, depth) for kind in IN_PROCESS for depth in (0, 2, 5)),
        *(pytest.param("two workers", depth, marks=() if depth == 5 else pytest.mark.slow) for depth in (0, 2, 5)),
    ],
)
def test_state_dict_holds_wrapped_loaders_state_at_given_batch(kind, depth):
    by_itself, loader = SOURCES[kind](), streamed(SOURCES[kind], kind=kind, depth=depth)
    alone, read_ahead = iter(by_itself), iter(loader)
    for count in range(1, BATCHES + 1):
        next(alone), next(read_ahead)
        state = loader.state_dict()
        source, stages = state.pop("source"), state.pop("stages")
        assert list(stages) == ["first", "second"]
        assert state == {
            "version": VERSION, "seed": 7, "epoch": 0, "batch": count, "ended": False, "chosen": False, "ranks": 1
        }  # fmt: skip
        assert repr(without_orders(source)) == repr(without_orders(by_itself.state_dict()))


@pytest.mark.parametrize("kind", ["in this process", pytest.param("two workers", marks=pytest.mark.slow)])
def test_state_dict_follows_the_iterator_read_last(kind):
    loader = streamed(SOURCES[kind])
    older = iter(loader)
    next(older), next(older)
    newer = iter(loader)
    next(newer)
    next(older)
    yielded = loader.state_dict()
    assert (yielded["epoch"], yielded["batch"]) == (0, 3)
    older.close(), newer.close()
    resumed = streamed(SOURCES[kind])
    resumed.load_state_dict(yielded)
    assert same([bits(batch) for batch in resumed], [bits(batch) for batch in streamed(SOURCES[kind])][3:])


def without_orders(state):
    """What workers seed themselves by is drawn anew in each process, and the order is kept beside torchdata's state."""
    if not isinstance(state, dict):
        return state
    left = ("_base_seed", "_sampler_iter_state", "gpuaug_order")
    return {key: without_orders(value) for key, value in state.items() if key not in left}


def test_draws_after_resume_equal_uninterrupted_run():
    def loader():
        return StreamedLoader(Counter(), [lambda images: torch.rand(3)], device="cpu", seed=7)

    went_on, resumed = loader(), loader()
    resumed.load_state_dict(stopped_at(3, loader()))
    epochs = [torch.cat(list(went_on)).tolist() for _ in range(3)]
    assert [torch.cat(list(resumed)).tolist() for _ in range(3)] == [epochs[0][9:], *epochs[1:]]
    assert epochs[1] != epochs[2]


def test_resume_after_ended_epoch_begins_the_next():
    make = one_worker
    ended = streamed(make)
    list(ended)
    state = saved(ended.state_dict())
    assert (state["epoch"], state["batch"], state["ended"]) == (0, BATCHES, True)
    resumed = streamed(make)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["ended"]
    assert same([bits(batch) for batch in resumed], [bits(batch) for batch in ended])
    assert resumed.state_dict()["epoch"] == 1


def test_state_dict_before_first_batch():
    make = one_worker
    loader = streamed(make)
    loader.set_epoch(4)
    state = saved(loader.state_dict())
    assert (state["epoch"], state["batch"], state["ended"]) == (4, 0, False)
    expected = [bits(batch) for batch in loader]
    assert loader.state_dict()["epoch"] == 4
    resumed = streamed(make)
    resumed.load_state_dict(state)
    assert same([bits(batch) for batch in resumed], expected)


def test_state_dict_returns_loaded_state_until_next_batch():
    make = SOURCES["in this process"]
    state = stopped_at(3, streamed(make))
    resumed = streamed(make)
    resumed.load_state_dict(state)
    assert repr(resumed.state_dict()) == repr(state)
    next(iter(resumed))
    assert resumed.state_dict()["batch"] == 4


def test_seed_of_state_is_adopted_where_none_was_given():
    make = SOURCES["in this process"]
    expected = [bits(batch) for batch in streamed(make)]
    resumed = streamed(make, seed=None)
    for count in (2, 3):
        resumed.load_state_dict(stopped_at(count, streamed(make)))
        assert resumed.seed == 7
        assert same([bits(batch) for batch in resumed], expected[count:])
    other = stopped_at(2, streamed(make, seed=9))
    resumed.load_state_dict(other)
    assert resumed.seed == 9, "it adopts each state's"


def test_resume_then_set_epoch_continues_mid_epoch():
    make = SOURCES["in this process"]
    whole = streamed(make)
    whole.set_epoch(3)
    expected = [bits(batch) for batch in whole]
    stopped = streamed(make)
    stopped.set_epoch(3)
    resumed = streamed(make)
    resumed.load_state_dict(stopped_at(2, stopped))
    resumed.set_epoch(3)
    assert same([bits(batch) for batch in resumed], expected[2:])


class Reordered(Sampler):
    """An order for each epoch, as a sampler of a distributed run has it."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 2 * BATCHES

    def __iter__(self):
        return iter([(index * 5 + 3 * self.epoch) % (2 * BATCHES) for index in range(2 * BATCHES)])

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.parametrize("chosen", [True, False])
def test_resume_sets_epoch_of_sampler_again(chosen):
    def make():
        return StreamedLoader(
            StatefulDataLoader(TensorDataset(torch.arange(2 * BATCHES)), 2, sampler=Reordered()), device="cpu"
        )

    def begun():
        loader = make()
        if chosen:
            loader.set_epoch(3)
        else:
            list(loader)
        return loader

    expected = [bits(batch) for batch in begun()]
    once, twice = make(), make()
    once.load_state_dict(stopped_at(2, begun()))
    twice.load_state_dict(stopped_at(2, once))
    assert same([bits(batch) for batch in twice], expected[4:])


def test_epochs_after_the_last_that_can_be_set():
    whole, resumed = (StreamedLoader([torch.zeros(2)], [noisy], device="cpu", seed=7) for _ in range(2))
    whole.set_epoch(2**63 - 1)
    last, after = list(whole), list(whole)
    assert not torch.equal(*last, *after)
    state = saved(whole.state_dict())
    assert state["epoch"] == 2**63
    resumed.load_state_dict(state)
    assert torch.equal(*resumed, *whole)


def test_chosen_flag_belongs_to_each_iterator():
    loader = streamed(shuffled)
    loader.set_epoch(3)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer)
    assert (loader.state_dict()["epoch"], loader.state_dict()["chosen"]) == (4, False)
    next(older)
    assert (loader.state_dict()["epoch"], loader.state_dict()["chosen"]) == (3, True)


def test_seed_may_be_assigned_between_epochs():
    loader = StreamedLoader(Counter(), [lambda images: torch.rand(3)], device="cpu", seed=7)
    other = StreamedLoader(Counter(), [lambda images: torch.rand(3)], device="cpu", seed=8)
    list(loader), list(other)
    loader.seed = 8
    assert same([bits(batch) for batch in loader], [bits(batch) for batch in other])


def test_state_dict_is_a_copy():
    loader = streamed(shuffled)
    next(iter(loader))
    loader.state_dict()["source"].clear()
    state = loader.state_dict()
    assert state["source"]
    loader.load_state_dict(state)
    state["source"].clear()
    assert len(list(loader)) == BATCHES - 1


def test_resume_from_finished_iterator_starts_next_epoch():
    loader = streamed(lambda: Prepared(shuffled()))
    state = stopped_at(BATCHES, streamed(lambda: Prepared(shuffled())))
    state["source"]["_iterator_finished"] = True  # as under Accelerate, which reads one batch ahead of those it gives
    loader.load_state_dict(state)
    next(iter(loader))
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (1, 1)


def test_close_from_another_thread_does_not_end_the_epoch():
    asked = threading.Event()

    class Slow(Counter):
        def __iter__(self):
            for batch in super().__iter__():
                if batch.item() == 3:
                    asked.set()
                    until(lambda: not any(feed.is_open for feed in list(loader._feed_iterators)))
                yield batch

    def close():
        assert asked.wait(WAIT_S)
        until(lambda: loader.state_dict()["batch"] == 2)  # the loop has the batches before the one it now waits for
        loader.close()

    loader = StreamedLoader(Slow(), device="cpu", depth=0)
    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(IteratorEndedError):
        list(loader)
    closing.join()
    assert (loader.state_dict()["batch"], loader.state_dict()["ended"]) == (2, False)


def test_resume_repeats_failed_batch():
    make, failing = one_worker, [5]

    def fails_once(images):
        failing[0] -= 1
        if failing[0] == 0:
            raise ZeroDivisionError("once")
        return images + torch.rand(())

    expected = [bits(batch) for batch in StreamedLoader(make(), [lambda images: images + torch.rand(())], device="cpu", seed=1)]
    loader = StreamedLoader(make(), [fails_once], device="cpu", seed=1)
    with pytest.raises(ZeroDivisionError):
        list(loader)
    resumed = StreamedLoader(make(), [fails_once], device="cpu", seed=1)
    resumed.load_state_dict(loader.state_dict())
    assert same([bits(batch) for batch in resumed], expected[4:])


def test_resume_repeats_failed_first_batch():
    make, fails = one_worker, [True]

    def stage(images):
        if fails[0]:
            raise ZeroDivisionError("at first")
        return images + torch.rand(())

    loader = StreamedLoader(make(), [stage], device="cpu", seed=1)
    with pytest.raises(ZeroDivisionError):
        list(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (0, 0)
    fails[0] = False
    resumed = StreamedLoader(make(), [stage], device="cpu", seed=1)
    resumed.load_state_dict(state)
    assert same(
        [bits(batch) for batch in resumed], [bits(batch) for batch in StreamedLoader(make(), [stage], device="cpu", seed=1)]
    )
