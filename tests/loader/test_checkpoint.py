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

from gpuaug import IteratorEndedError, StreamedLoader


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
