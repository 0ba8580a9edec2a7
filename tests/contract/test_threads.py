"""Several threads, and processes that are forked: each gets what it would have had alone, or an error with the way out."""

import gc
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from contract.sources import Numbers, failing_at, failure, noise, streamed, values
from support import internals
from support.comparison.values import assert_values
from support.feed.ring_cleanup import grown, taken
from support.process.processes import run_in_fork
from support.process.waiting import WAIT_S, Meeting, returned, until
from torch.utils.data import DataLoader, Sampler

from gpuaug import GpuAugError, IteratorEndedError, TransformStage
from gpuaug.feed.mailbox import Pulled

ZEROS = [torch.zeros(4)] * 3


def quiet(x):
    return x


@pytest.mark.parametrize("draws", [noise, quiet])
def test_loaders_in_two_threads_draw_as_each_alone(draws):
    meeting = Meeting()

    def stage(x):
        meeting()
        return draws(x)

    def read(seed, stage):
        return values(streamed(ZEROS, TransformStage(stage, name="same"), seed=seed))

    expected = [read(seed, draws) for seed in (0, 1)]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(read, [0, 1], [stage, stage])) == expected
    assert_values(torch.get_rng_state(), before)
    assert not meeting.happened


def test_a_loop_begins_when_no_other_thread_is_in_a_stage():
    # A DataLoader draws its workers' seed as it begins.
    begun, wrapped = threading.Event(), DataLoader(Numbers(2), batch_size=2)

    class Source:
        def __iter__(self):
            begun.set()
            return iter(wrapped)

    def stage(x):
        other.append(thread.submit(values, streamed(Source())))
        assert not begun.wait(0.1)
        return noise(x)

    other = []
    expected = values(streamed(ZEROS[:1], TransformStage(noise, name="same"), seed=0))
    torch.manual_seed(3)
    list(wrapped)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with ThreadPoolExecutor(1) as thread:
        assert values(streamed(ZEROS[:1], TransformStage(stage, name="same"), seed=0)) == expected
        assert other[0].result(WAIT_S) == [[0, 1]]
    assert_values(torch.get_rng_state(), after)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stage_may_read_another_loader(workers):
    def stage(x):
        return noise(x) + sum(batch.sum() for batch in inner)

    numbers = DataLoader(Numbers(4), batch_size=2, num_workers=workers)
    inner = streamed(numbers, lambda x: x + torch.rand(x.shape), seed=0)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = returned(lambda: values(streamed(ZEROS[:2], stage, seed=0)))
    inner.set_epoch(0)
    assert returned(lambda: values(streamed(ZEROS[:2], stage, seed=0))) == found
    assert_values(torch.get_rng_state(), before)


OWN_LOADER = "A stage cannot read this loader, because it is the loader that runs the stage."
AT_ONCE = "next() cannot run, because another call of next() of this iterator has not returned."


@pytest.mark.parametrize(("which", "text"), [("a new one", OWN_LOADER), ("another", OWN_LOADER), ("the same", AT_ONCE)])
def test_a_stage_that_reads_its_own_loader_is_an_error(which, text):
    def stage(x):
        return next({"a new one": iter(loader), "another": other, "the same": batches}[which])

    loader = streamed([torch.zeros(1)] * 3, stage)
    batches, other = iter(loader), iter(loader)
    ((_, error),) = returned(lambda: failure(batches))
    assert type(error) is GpuAugError
    assert str(error).startswith(text)
    assert error.__notes__ == ["gpuaug: raised in stage 'transform', at batch 0 of epoch 0."]
    loader.stages = []
    assert len(list(loader)) == 3


def test_an_iterator_that_two_threads_read_at_once_is_an_error():
    within, leave = threading.Event(), threading.Event()

    def stage(x):
        within.set()
        assert leave.wait(WAIT_S)
        return x

    batches = iter(streamed(torch.arange(3), stage, depth=0))
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(next, batches)
        assert within.wait(WAIT_S)
        with pytest.raises(GpuAugError) as caught:
            next(batches)
        with pytest.raises(GpuAugError) as not_closed:
            batches.close()
        leave.set()
        assert first.result(WAIT_S) == 0
    assert str(caught.value).startswith(AT_ONCE)
    assert str(not_closed.value).startswith("close() cannot run")
    assert [batch.item() for batch in batches] == [1, 2]


def close_it(iterators):
    iterators.pop().close()


def drop_it(iterators):
    iterators.pop()


def collect_it(iterators):
    held = [iterators.pop()]
    held.append(held)
    del held
    gc.collect()


PERSISTENT = {"num_workers": 1, "persistent_workers": True}


@pytest.mark.parametrize(
    ("end", "options", "feed"),
    [
        *[(close_it, {}, "ring"), (close_it, PERSISTENT, "plain"), (drop_it, {"num_workers": 1}, "ring")],
        *[(drop_it, PERSISTENT, "ring"), (collect_it, {}, "ring"), (collect_it, PERSISTENT, "ring")],
    ],
)
def test_an_iterator_may_end_in_another_thread(end, options, feed):
    loader = streamed(DataLoader(Numbers(16), batch_size=2, **options), feed=feed)
    everything, before = values(loader), taken()
    iterators = [iter(loader)]
    next(iterators[0])
    returned(lambda: end(iterators))
    # A collection does nothing where another thread is in one.
    until(lambda: not grown(before) or (end is collect_it and gc.collect() < 0))
    assert values(loader) == everything
    loader.close()


def test_a_value_error_of_a_stage_is_its_own():
    own = ValueError("generator already executing")
    assert failure(streamed(torch.arange(3), failing_at(1, own)))[1] is own


class MeetingSampler(Sampler):
    def __init__(self, count):
        self.count = count
        self.meeting = Meeting()

    def __iter__(self):
        self.meeting()
        return iter(range(self.count))

    def __len__(self):
        return self.count


@pytest.mark.parametrize("feed", ["plain", "ring"])
@pytest.mark.parametrize("persistent", [False, True])
def test_two_threads_may_begin_a_loop_at_once(feed, persistent):
    sampler = MeetingSampler(8)
    wrapped = DataLoader(Numbers(8), sampler=sampler, batch_size=2, num_workers=1, persistent_workers=persistent)
    loader = streamed(wrapped, feed=feed)

    def read():
        found = []
        try:
            found.extend(batch.tolist() for batch in loader)
        except IteratorEndedError as error:
            assert persistent
            return found, error
        return found, None

    found = returned(read, threads=2)
    loader.close()
    whole = [[0, 1], [2, 3], [4, 5], [6, 7]]
    for batches, error in found:
        assert batches == (whole if error is None else whole[: len(batches)])
    assert None in [error for _, error in found]
    assert not sampler.meeting.happened


def test_waits_of_two_threads_are_all_counted(monkeypatch):
    class Slow:
        def get(self, *, block):
            return Pulled(ended=True) if block else None

    def clock():
        now = next(ticks)
        if now == 1:
            second._pull()  # as another thread might, while this one looks at the clock
        return now

    loader, ticks = streamed([]), itertools.count()
    first, second = loader._begin(), loader._begin()
    first.feed_iterator = second.feed_iterator = Slow()
    monkeypatch.setattr(time, "perf_counter", clock)
    first._pull()
    monkeypatch.undo()
    assert (loader.stats().starved, loader.stats().starved_ms) == (2, 2000)


def test_loops_that_two_threads_begin_have_epochs_of_their_own():
    meeting = Meeting()

    class Source:
        def __iter__(self):
            meeting()
            return iter(ZEROS)

    one_by_one, at_once = streamed(ZEROS, noise, seed=0), streamed(Source(), noise, seed=0)
    found = returned(lambda: values(at_once), threads=2)
    assert sorted(found) == sorted([values(one_by_one), values(one_by_one)])
    assert not meeting.happened


def test_slots_are_freed_by_one_thread_at_a_time(monkeypatch):
    meeting, loader = Meeting(), streamed(torch.arange(4))
    monkeypatch.setattr(internals.shared(loader).feed, "free_read_slots", meeting)
    assert returned(lambda: values(loader), threads=2) == [[0, 1, 2, 3]] * 2
    assert not meeting.happened


@pytest.mark.parametrize("persistent", [False, True])
def test_a_forked_child_has_workers_and_a_ring_of_its_own(persistent):
    def child():
        with loader:
            assert values(loader) == everything
            assert internals.ring(loader).memory is not parents

    everything = [[index, index + 1] for index in range(0, 24, 2)]
    wrapped = DataLoader(Numbers(24), batch_size=2, num_workers=1, persistent_workers=persistent)
    with streamed(wrapped, feed="ring") as loader:
        assert values(loader) == everything
        parents = internals.ring(loader).memory
        run_in_fork(child)
        assert values(loader) == everything
        assert internals.ring(loader).memory is parents


@pytest.mark.parametrize(("workers", "feed"), [(None, "plain"), (0, "plain"), (0, "ring"), (1, "plain"), (1, "ring")])
def test_an_iterator_of_the_parent_process_is_an_error_in_a_forked_child(workers, feed):
    everything = [[index, index + 1] for index in range(0, 12, 2)]

    def child():
        with pytest.raises(IteratorEndedError, match="was forked from the one that began it"):
            list(batches)
        with loader:
            assert values(loader) == everything

    source = torch.tensor(everything) if workers is None else DataLoader(Numbers(12), batch_size=2, num_workers=workers)
    loader = streamed(list(source) if workers is None else source, feed=feed)
    assert values(loader) == everything
    batches = iter(loader)
    got = [next(batches).tolist()]
    run_in_fork(child)
    assert got + [batch.tolist() for batch in batches] == everything
