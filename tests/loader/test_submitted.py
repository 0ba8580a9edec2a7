"""Batches that other threads work on before they are launched: how many, in which order, and what an error does to them."""

import threading

import pytest
import torch
from support import internals
from support.loader.checkpoints import BATCHES, Counter, shuffled
from support.loader.submitting import Submitting, numbers, working_ahead
from support.process.processes import run_in_fork
from support.process.waiting import WAIT_S
from torch.utils.data import DataLoader

from gpuaug import IteratorEndedError, StreamedLoader
from gpuaug.loader.hooks import Hooks


def actions(log, *kinds):
    return [line for line in log if line.rpartition(" ")[0] in kinds]


def several(kind, numbers):
    return [f"{kind} {number}" for number in numbers]


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_a_front_that_is_not_done_holds_up_neither_pulling_nor_more_than_itself(depth):
    stage, most = Submitting(), depth + 1 + min(depth, 2)
    batches = iter(working_ahead(numbers(), stage, depth=depth))
    for number in range(4):
        assert next(batches).item() == number
        wanted = [*several("submit", range(most)), "wait for 0"]
        for later in range(1, number + 1):
            wanted += [f"submit {most + later - 1}", f"wait for {later}"]
        assert actions(stage.log, "submit", "collect", "wait for") == wanted


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_what_is_done_is_launched_and_two_more_are_submitted(depth):
    stage = Submitting(finished=lambda number: True)
    batches = iter(working_ahead(numbers(20), stage, depth=depth))
    for number in range(4):
        assert next(batches).item() == number
        assert actions(stage.log, "launch") == several("launch", range(number + depth + 1))
        assert actions(stage.log, "submit") == several("submit", range(number + depth + 1 + min(depth, 2)))
    assert not actions(stage.log, "wait for")


def test_in_line_one_batch_is_launched_and_two_more_are_submitted():
    stage = Submitting(finished=lambda number: True)
    batches = iter(StreamedLoader(numbers(), [stage], device="cpu", depth=2))
    next(batches)
    assert stage.log == ["submit 0", "collect 0", "launch 0", "submit 1", "submit 2"]


def test_batches_that_are_done_early_keep_their_order():
    stage = Submitting(finished=lambda number: number % 4 != 0)
    loader = working_ahead(numbers(), stage, depth=3)
    assert [batch.item() for batch in loader] == list(range(12))
    assert actions(stage.log, "wait for") == several("wait for", [0, 4, 8])
    assert actions(stage.log, "launch") == several("launch", range(12))


def test_a_launched_batch_is_handed_over_while_the_next_one_is_worked_on():
    stage = Submitting(finished=lambda number: number < 2)
    batches = iter(working_ahead(numbers(), stage, depth=2))
    assert [next(batches).item(), next(batches).item()] == [0, 1]
    assert not actions(stage.log, "wait for")
    stage.works[2].finished = True
    assert next(batches).item() == 2
    assert not actions(stage.log, "wait for")
    next(batches)
    assert actions(stage.log, "wait for") == ["wait for 3"]


@pytest.mark.parametrize("done", [True, False])
def test_a_submitted_batch_is_not_held_up_by_a_slow_loader(done):
    asked, answer = threading.Event(), threading.Event()

    def source():
        yield from numbers(2)
        asked.set()
        assert answer.wait(WAIT_S), "next() waited for the loader"
        yield torch.tensor(2)

    batches = iter(working_ahead(source(), Submitting(finished=lambda number: done)))
    assert next(batches).item() == 0
    assert asked.wait(WAIT_S)
    assert next(batches).item() == 1
    answer.set()
    assert [batch.item() for batch in batches] == [2]


def failing(number, broken):
    def fail(at):
        if broken and at == number:
            raise ZeroDivisionError

    return fail


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("late", [(), range(8), (3,)], ids=["done", "not done", "done but for the failing one"])
@pytest.mark.parametrize("where", ["submitted", "collected", "loader"])
def test_an_error_comes_at_its_batch_and_ends_what_is_submitted_after_it(where, late, depth):
    stage, broken = Submitting(finished=lambda number: number not in late), [True]
    if where != "loader":
        setattr(stage, f"when_{where}", failing(3, broken))

    class Source:
        def __iter__(self):
            for batch in numbers(8):
                if where == "loader":
                    failing(3, broken)(batch)
                yield batch

    loader = working_ahead(Source() if where == "loader" else numbers(8), stage, depth=depth)
    batches, arrived = iter(loader), []
    with pytest.raises(ZeroDivisionError) as raised:
        arrived.extend(batch.item() for batch in batches)
    assert arrived == [0, 1, 2]
    place = "by the wrapped loader" if where == "loader" else "in stage 'submitting'"
    assert raised.value.__notes__ == [f"gpuaug: raised {place}, at batch 3 of epoch 0."]
    assert actions(stage.log, "launch") == several("launch", range(3))
    left = [work.number for work in stage.works if work.number > 2]
    assert set(actions(stage.log, "abandon")) == set(several("abandon", left))
    assert stage.log[-1] == "close"
    assert next(batches, "the end") == "the end"
    broken.clear()
    assert [batch.item() for batch in loader] == list(range(8))


def test_work_of_an_earlier_stage_ends_where_a_later_one_refuses_the_batch():
    first, second = Submitting(name="first"), Submitting(name="second")
    second.when_submitted = failing(1, [True])
    batches = iter(working_ahead(numbers(8), first, second))
    next(batches)
    with pytest.raises(ZeroDivisionError):
        next(batches)
    assert "abandon 1" in first.log


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_all_work_on_a_batch_is_over_before_its_memory_is_free(kind):
    first, second = Submitting(name="first"), Submitting(name="second")

    def fail(number):
        if number == 1:
            raise kind

    first.when_collected = fail
    batches = iter(working_ahead(numbers(8), first, second))
    next(batches)
    with pytest.raises(kind):
        next(batches)
    for stage in (first, second):
        assert set(actions(stage.log, "abandon")) == set(several("abandon", [work.number for work in stage.works[1:]]))
    assert next(batches, "the end") == "the end"


def leave_by_break(loader, batches):
    batches.close()


def leave_by_close(loader, batches):
    loader.close()


def leave_by_del(loader, batches):
    del batches


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_close, leave_by_del])
def test_what_is_submitted_ends_with_the_iterator(leave):
    stage = Submitting(finished=lambda number: number == 0)
    loader = working_ahead(numbers(), stage)
    open_iterators = [iter(loader)]
    next(open_iterators[0])
    leave(loader, open_iterators.pop())
    assert stage.log[-5:] == ["abandon 1", "abandon 2", "abandon 3", "abandon 4", "close"]


def test_closing_the_loader_ends_an_iterator_after_what_is_launched():
    stage = Submitting(finished=lambda number: number < 3)
    loader = working_ahead(numbers(5), stage)
    batches = iter(loader)
    next(batches)
    assert stage.log[-2:] == ["submit 3", "submit 4"]
    loader.close()
    assert [next(batches).item(), next(batches).item()] == [1, 2]
    with pytest.raises(IteratorEndedError, match="its loader was closed or loaded a state"):
        next(batches)
    assert actions(stage.log, "launch") == several("launch", range(3))
    assert len(actions(stage.log, "submit")) == 5, "nothing is submitted after that"


def test_a_batch_that_arrives_as_the_loader_is_closed_is_not_submitted():
    class Closing(Hooks):
        def on_pull(self, number, began_s, ended_s):
            if number == 2:
                loader.close()

    class NoLock:
        """As if another thread had closed the loader just before the launch."""

        def run(self, work, *_):
            work()

        try_run = run

    stage = Submitting(finished=lambda number: True)
    loader = working_ahead(numbers(), stage)
    internals.shared(loader).hooks, internals.shared(loader).launch_lock = Closing(), NoLock()
    batches = iter(loader)
    assert [next(batches).item(), next(batches).item()] == [0, 1]
    with pytest.raises(IteratorEndedError):
        next(batches)
    assert actions(stage.log, "submit") == several("submit", range(2))


def test_closing_the_loader_from_another_thread_waits_for_the_batch_that_is_launched():
    stage = Submitting()
    loader = working_ahead(numbers(), stage)
    closing = threading.Thread(target=loader.close)

    def close_meanwhile(number):
        if number == 1:
            closing.start()
            closing.join(0.05)  # long enough for it to get where it must wait

    stage.when_collected = close_meanwhile
    batches, arrived = iter(loader), []
    with pytest.raises(IteratorEndedError):
        arrived.extend(batch.item() for batch in batches)
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert arrived == [0, 1]
    assert stage.log.index("launch 1") < stage.log.index("abandon 2")


def test_a_forked_child_waits_for_no_thread_and_destroys_nothing_of_its_parents():
    """To destroy a CUDA event aborts a process that cannot reach the device."""
    stage = Submitting(finished=lambda number: number < 3)
    loader = working_ahead(numbers(), stage)
    batches = iter(loader)
    next(batches)
    (pipelined,) = internals.iterators(loader)
    before, launched = list(stage.log), len(pipelined.launched_batches)
    assert launched

    def child():
        loader.close()
        with pytest.raises(IteratorEndedError, match="was forked from the one that began it"):
            next(batches)
        assert stage.log == before
        assert len(pipelined.launched_batches) == launched

    run_in_fork(child)
    assert len(list(batches)) == 11


def test_two_iterators_do_not_disturb_one_another():
    loader = working_ahead(numbers(), Submitting(finished=lambda number: number % 3 == 0))
    pairs = zip(loader, loader, strict=True)
    assert [(first.item(), second.item()) for first, second in pairs] == [(number, number) for number in range(12)]


@pytest.mark.parametrize("depth", [0, 2, 5])
def test_what_is_submitted_is_not_in_the_state(depth):
    stage = Submitting()
    loader = working_ahead(Counter(), stage, depth=depth)
    for number, batch in enumerate(loader, start=1):
        state = loader.state_dict()
        assert (state["source"]["next"], state["batch"], batch.item()) == (number, number, number)
    assert (loader.state_dict()["batch"], loader.state_dict()["ended"]) == (BATCHES, True)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_loader_goes_on_after_the_batch_that_was_handed_over(workers):
    def streamed():
        def first(samples):
            return torch.tensor(samples[0][1])

        return working_ahead(shuffled(num_workers=workers, collate_fn=first), Submitting(), depth=3)

    everything = [batch.item() for batch in streamed()]
    stopped = streamed()
    batches = iter(stopped)
    assert [next(batches).item() for _ in range(3)] == everything[:3]
    resumed = streamed()
    resumed.load_state_dict(stopped.state_dict())
    batches.close()
    assert [batch.item() for batch in resumed] == everything[3:]


def test_slots_of_batches_that_are_abandoned_are_free():
    def collate(samples):
        return torch.stack(samples).sum()

    data = DataLoader(torch.arange(40), batch_size=2, num_workers=1, collate_fn=collate)
    loader = StreamedLoader(data, [Submitting()], device="cpu", feed="ring")
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    (ring,) = (reference() for reference in internals.rings(internals.shared(loader).feed))
    assert loader.stats().slot_batches > 0
    assert ring.memory.slots_in_use
    batches.close()
    internals.shared(loader).feed.free_read_slots()
    assert not ring.memory.slots_in_use
