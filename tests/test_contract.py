"""What the loader promises, in the order of the promises, as far as a machine without a GPU can tell."""

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from contextlib import suppress

import alone
import kornia.augmentation as K
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from waiting import WAIT_S, until

from gpuaug import FeatureStage, IteratorEndedError, StreamedLoader, TransformStage

DEPTHS = [0, 1, 2, 5, 50]


class Numbers(Dataset):
    """The numbers up to ``count``; at ``failing`` it does something else instead."""

    def __init__(self, count=10, failing=None, fail=None):
        self.count = count
        self.failing = failing
        self.fail = fail

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.failing:
            self.fail()
        return torch.tensor(index)


class NumberStream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(5))


def streamed(loader, *stages, **options):
    return StreamedLoader(loader, stages, device="cpu", **options)


def noise(x):
    """Different at each call, unless its draws are keyed."""
    return x + torch.rand(4)


def values(loader):
    return [batch.tolist() for batch in loader]


@pytest.fixture
def feeds():
    """The threads that the test has started and that have not ended."""
    before = set(threading.enumerate())
    return lambda: [thread for thread in threading.enumerate() if thread.name == "gpuaug-feed" and thread not in before]


@pytest.fixture
def workers():
    """The processes that the test has started and that have not ended."""
    before = set(multiprocessing.active_children())
    return lambda: set(multiprocessing.active_children()) - before


def raises(error):
    def fail():
        raise error

    return fail


# 1. Complete and in order


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_every_batch_arrives_in_order_whatever_the_depth(count, depth):
    batches = [torch.tensor([index]) for index in range(count)]
    loader = streamed(batches, depth=depth)
    for _ in range(2):
        assert values(loader) == [[index] for index in range(count)]


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_last_partial_batch_arrives_too(depth):
    wrapped = DataLoader(TensorDataset(torch.arange(7)), batch_size=3)
    assert [batch[0].tolist() for batch in streamed(wrapped, depth=depth)] == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_partial_batch_is_dropped_where_the_wrapped_loader_drops_it():
    wrapped = DataLoader(TensorDataset(torch.arange(7)), batch_size=3, drop_last=True)
    assert [batch[0].tolist() for batch in streamed(wrapped)] == [[0, 1, 2], [3, 4, 5]]


def test_what_workers_load_arrives_in_order():
    wrapped = DataLoader(Numbers(11), batch_size=2, num_workers=2)
    assert values(streamed(wrapped)) == values(wrapped)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (x for x in torch.arange(3)),
        lambda: map(torch.tensor, range(3)),
        lambda: torch.arange(3),
        lambda: DataLoader(NumberStream(), batch_size=None, sampler=None),
    ],
    ids=["generator", "map", "tensor", "stream"],
)
def test_any_iterable_will_do(make):
    expected = [batch.item() for batch in make()]
    assert values(streamed(make())) == expected


def test_an_iterator_that_has_ended_stays_ended():
    batches = iter(streamed([torch.zeros(1)]))
    next(batches)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(batches)


def test_a_source_that_can_be_read_once_is_empty_the_second_time():
    loader = streamed(x for x in torch.arange(3))
    assert values(loader) == [0, 1, 2]
    assert values(loader) == []


# 2. Equal to the reference


def pipelines():
    torch.manual_seed(0)
    augment = K.AugmentationSequential(K.RandomHorizontalFlip(), K.ColorJitter(0.4, 0.4, p=0.8), K.RandomErasing())
    encoder = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).requires_grad_(False)
    mix = TransformStage(lambda x, y: (x[torch.randperm(len(x))], y), on=(0, 1), name="mix")
    return [augment, TransformStage(lambda x: x + torch.randn_like(x)), mix, FeatureStage(encoder)]


@pytest.mark.parametrize("depth", DEPTHS[1:])
def test_batches_are_bit_identical_for_every_depth(depth):
    torch.manual_seed(1)
    batches = [(torch.rand(size, 3, 8, 8), torch.arange(size)) for size in (4, 4, 4, 2)]
    stages = pipelines()
    reference, loader = (streamed(batches, *stages, seed=0, depth=d) for d in (0, depth))
    for _ in range(2):
        for ours, theirs in zip(loader, reference, strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])


# 4. Yours to keep, yours to drop


def test_batches_that_are_kept_do_not_change():
    loader = streamed([torch.full((4,), float(index)) for index in range(6)], noise, seed=0)
    kept = list(loader)
    copies = [batch.clone() for batch in kept]
    list(loader)
    assert all(torch.equal(batch, copy) for batch, copy in zip(kept, copies, strict=True))
    assert len({batch.data_ptr() for batch in kept}) == len(kept)


def test_a_batch_that_is_dropped_is_freed_at_once():
    batches = iter(streamed(torch.ones(6, 2), lambda x: x + 1))
    gc.disable()
    try:
        for batch in batches:
            watched = weakref.ref(batch)
            del batch
            assert watched() is None
    finally:
        gc.enable()


# 5. Bounded memory


@pytest.mark.parametrize("depth", [0, 2])
def test_the_wrapped_loader_is_read_a_bounded_number_of_batches_ahead(depth):
    pulled = 0

    def counted():
        nonlocal pulled
        for index in range(100):
            pulled += 1
            yield torch.tensor(index)

    batches = iter(streamed(counted(), depth=depth))
    for taken in range(1, 6):
        next(batches)
        time.sleep(0.02)  # long enough to run away in
        assert taken <= pulled <= taken + depth + 4
    batches.close()


# 6. A ready batch is never held up by a slow loader


@pytest.mark.parametrize("depth", [0, 2])
def test_a_batch_that_is_ready_is_handed_over_while_the_next_is_being_loaded(depth):
    wanted = threading.Event()

    def slow():
        yield torch.tensor(0)
        assert wanted.wait(WAIT_S), "the first batch was held up by the second"
        yield torch.tensor(1)

    batches = iter(streamed(slow(), depth=depth))
    assert next(batches).item() == 0
    wanted.set()
    assert next(batches).item() == 1
    batches.close()


# 7. Failures arrive where they belong


class OwnError(Exception):
    def __init__(self, number, *, text):
        super().__init__(number)
        self.text = text


def failing_at(index, error):
    def transform(x):
        if x.flatten()[0] == index:
            raise error
        return x

    return transform


def failure(loader):
    """The batches that arrive, and the error after them."""
    arrived, batches = [], iter(loader)
    while True:
        try:
            arrived.append(next(batches).tolist())
        except StopIteration:
            raise AssertionError("nothing failed") from None
        except BaseException as error:
            return arrived, error


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_transforms_error_is_raised_at_its_batch_with_its_own_type(at, depth):
    own = OwnError(7, text="its own")
    loader = streamed(torch.arange(5), TransformStage(failing_at(at, own), name="mix"), depth=depth)
    arrived, error = failure(loader)
    assert arrived == list(range(at))
    assert error is own
    assert error.__notes__ == [f"gpuaug: raised in stage 'mix', at batch {at} of epoch 0."]
    assert traceback.extract_tb(error.__traceback__)[-1].name == "transform"


@pytest.mark.parametrize("depth", [0, 2])
def test_an_encoders_error_is_raised_at_its_batch(depth):
    class Failing(nn.Module):
        def forward(self, x):
            return failing_at(2, OwnError(7, text="its own"))(x)

    loader = streamed(torch.arange(5.0), FeatureStage(Failing()), depth=depth)
    arrived, error = failure(loader)
    assert arrived == [0, 1]
    assert type(error) is OwnError
    assert error.__notes__ == ["gpuaug: raised in stage 'feature', at batch 2 of epoch 0."]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_datasets_error_is_raised_at_its_batch(depth):
    own = OwnError(7, text="its own")
    loader = streamed(DataLoader(Numbers(10, 7, raises(own)), batch_size=2), depth=depth)
    arrived, error = failure(loader)
    assert arrived == [[0, 1], [2, 3], [4, 5]]
    assert error is own
    assert error.__notes__ == ["gpuaug: raised by the wrapped loader, at batch 3 of epoch 0."]
    assert "__getitem__" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_an_error_in_a_worker_is_raised_at_its_batch(workers):
    loader = streamed(DataLoader(Numbers(10, 7, raises(LookupError("its own"))), batch_size=2, num_workers=2))
    arrived, error = failure(loader)
    assert arrived == [[0, 1], [2, 3], [4, 5]]
    assert type(error) is LookupError
    assert "its own" in str(error)
    assert error.__notes__ == ["gpuaug: raised by the wrapped loader, at batch 3 of epoch 0."]
    traceback.clear_frames(error.__traceback__)  # DataLoader's own frames hold its workers
    del error
    until(lambda: not workers())


def test_a_copys_error_is_raised_at_its_batch():
    class Stuck:
        def to(self, device):
            raise OwnError(7, text="its own")

    arrived, error = failure(streamed([torch.tensor(0), Stuck()]))
    assert arrived == [0]
    assert type(error) is OwnError
    assert error.__notes__ == ["gpuaug: raised in its copy, at batch 1 of epoch 0."]


def test_a_batch_that_does_not_fit_a_stage_names_both():
    _, error = failure(streamed([torch.tensor(0)], TransformStage(len, on="image")))
    assert error.__notes__ == ["gpuaug: raised in stage 'transform', at batch 0 of epoch 0."]


def test_the_note_names_the_epoch():
    loader = streamed(torch.arange(3), failing_at(1, OwnError(7, text="")))
    loader.set_epoch(6)
    assert failure(loader)[1].__notes__ == ["gpuaug: raised in stage 'transform', at batch 1 of epoch 6."]


def test_an_error_of_opening_the_loader_is_its_own():
    class Closed:
        def __iter__(self):
            raise OwnError(7, text="no workers")

    arrived, error = failure(streamed(Closed()))
    assert (arrived, type(error)) == ([], OwnError)


@pytest.mark.parametrize("depth", [0, 2])
def test_the_loader_can_be_iterated_again_after_a_failure(depth):
    broken = True

    def transform(x):
        if broken and x == 1:
            raise OwnError(7, text="")
        return x

    loader = streamed(DataLoader(Numbers(4), batch_size=None), transform, depth=depth)
    for _ in range(2):
        assert failure(loader)[0] == [0]
    broken = False
    assert values(loader) == [0, 1, 2, 3]


@pytest.mark.parametrize("depth", [0, 2])
def test_an_iterator_that_has_failed_stays_ended(depth):
    batches = iter(streamed(torch.arange(5), failing_at(1, OwnError(7, text="")), depth=depth))
    next(batches)
    with pytest.raises(OwnError):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def failing_stage(watched):
    def transform(x):
        held = x + 1
        watched.append(weakref.ref(held))
        raise OwnError(7, text="")

    return streamed([torch.zeros(1)], transform)


def failing_source(watched):
    def source():
        held = torch.zeros(1)
        watched.append(weakref.ref(held))
        raise OwnError(7, text="")
        yield

    return streamed(source())


@pytest.mark.parametrize("make", [failing_stage, failing_source])
def test_what_a_failure_held_is_freed_with_the_error(make):
    # A loop that skips a batch after running out of memory gets that memory back without waiting for the collector.
    watched = []
    loader = make(watched)
    gc.disable()
    try:
        with pytest.raises(OwnError):
            next(iter(loader))
        assert watched[0]() is None
    finally:
        gc.enable()


def test_a_transform_may_even_raise_stop_iteration():
    # Within a generator this is a RuntimeError, as everywhere in Python; it must not end the epoch in silence.
    def transform(x):
        return next(iter(()))

    arrived, error = failure(streamed([torch.tensor(0)], transform))
    assert arrived == []
    assert isinstance(error.__cause__ or error, StopIteration)


KILLED_WORKER = """
import os, signal
import torch
from alone import assert_nothing_runs, read_until_a_worker_dies
from torch.utils.data import DataLoader, Dataset
from gpuaug import StreamedLoader

class Numbers(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)

loader = StreamedLoader(DataLoader(Numbers(), batch_size=2, num_workers=2), device="cpu")
read_until_a_worker_dies(loader, torch.Tensor.tolist, most=4)
assert_nothing_runs()
print("done")
"""


@pytest.mark.timeout(120)
def test_a_worker_that_is_killed_is_an_error_and_no_hang():
    # In a process of its own: DataLoader's handler raises wherever the main thread is when the signal arrives, which may be
    # after the pulling thread has told of the same death, in the middle of whatever runs next.
    done = alone.run(KILLED_WORKER)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


# 8. Leaving early is clean


def leave_by_break(loader):
    for _ in loader:
        break


def leave_by_error(loader):
    with suppress(OwnError):
        for _ in loader:
            raise OwnError(7, text="")


def leave_by_interrupt(loader):
    with suppress(KeyboardInterrupt):
        for _ in loader:
            raise KeyboardInterrupt


def leave_by_del(loader):
    batches = iter(loader)
    next(batches)
    del batches


def leave_by_closing_the_iterator(loader):
    batches = iter(loader)
    next(batches)
    batches.close()


def leave_by_closing_the_loader(loader):
    batches = iter(loader)
    next(batches)
    loader.close()


def leave_by_a_with_block(loader):
    with loader:
        batches = iter(loader)
        next(batches)


def leave_by_zip(loader):
    for _ in zip(range(1), loader, strict=False):
        pass


def leave_at_the_end(loader):
    list(loader)


WAYS_TO_LEAVE = [
    leave_by_break,
    leave_by_error,
    leave_by_interrupt,
    leave_by_del,
    leave_by_closing_the_iterator,
    leave_by_closing_the_loader,
    leave_by_a_with_block,
    leave_by_zip,
    leave_at_the_end,
]


@pytest.mark.parametrize("leave", WAYS_TO_LEAVE)
@pytest.mark.parametrize("depth", [0, 2])
def test_threads_end_with_the_loop(leave, depth, feeds):
    loader = streamed(torch.arange(20), depth=depth)
    gc.disable()
    try:
        leave(loader)
        assert not feeds()
    finally:
        gc.enable()
    assert values(loader) == list(range(20)), "the loader can be iterated again"


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_error, leave_by_del, leave_by_closing_the_loader])
def test_workers_end_with_the_loop(leave, workers, feeds):
    loader = streamed(DataLoader(Numbers(20), batch_size=2, num_workers=1))
    gc.disable()
    try:
        leave(loader)
        assert not workers()
    finally:
        gc.enable()
    assert not feeds()


def test_workers_end_where_a_stage_fails(workers):
    loader = streamed(DataLoader(Numbers(20), batch_size=2, num_workers=1), failing_at(4, OwnError(7, text="")))
    gc.disable()
    try:
        arrived, _ = failure(loader)
        assert arrived == [[0, 1], [2, 3]]
        assert not workers()
    finally:
        gc.enable()


def test_a_loader_that_is_dropped_with_its_iterator_leaves_nothing(feeds):
    loader = streamed(torch.arange(20), lambda x: x + 1)
    watched = weakref.ref(loader)
    batches = iter(loader)
    next(batches)
    del loader, batches
    gc.collect()
    assert watched() is None
    assert not feeds()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_within_a_stage_or_the_dataset_ends_the_loop(kind, depth, feeds):
    broken = True

    def interrupt(x):
        if broken and x == 2:
            raise kind
        return x

    in_a_stage = streamed(torch.arange(5), interrupt, depth=depth)
    in_the_dataset = streamed(DataLoader(Numbers(5), batch_size=None, collate_fn=interrupt), depth=depth)
    for loader in (in_a_stage, in_the_dataset):
        arrived, error = failure(loader)
        assert arrived == [0, 1][: len(arrived)]
        assert type(error) is kind
        assert not feeds()
    broken = False
    assert values(in_a_stage) == values(in_the_dataset) == list(range(5))


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_is_heard_while_the_loader_is_slow(feeds):
    def slow():
        yield torch.tensor(0)
        time.sleep(0.5)
        yield torch.tensor(1)

    batches = iter(streamed(slow()))
    next(batches)
    threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert not feeds()
    with pytest.raises(StopIteration):
        next(batches)


def test_two_iterators_do_not_disturb_one_another():
    loader = streamed(torch.arange(5.0), noise, seed=0)
    expected = [list(loader), list(loader)]
    loader = streamed(torch.arange(5.0), noise, seed=0)
    for first, second in zip(zip(loader, expected[0], strict=True), zip(loader, expected[1], strict=True), strict=True):
        assert torch.equal(*first)
        assert torch.equal(*second)


def test_leaving_one_of_two_iterators_leaves_the_other():
    loader = streamed(torch.arange(5))
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    first.close()
    assert [batch.item() for batch in second] == [1, 2, 3, 4]


@pytest.mark.timeout(60)
def test_persistent_workers_have_one_reader_and_end_with_close(workers):
    loader = streamed(DataLoader(Numbers(12), batch_size=2, num_workers=2, persistent_workers=True))
    everything = [[2 * index, 2 * index + 1] for index in range(6)]
    first = iter(loader)
    assert next(first).tolist() == [0, 1]
    started = workers()
    second = iter(loader)
    assert next(second).tolist() == [0, 1]
    with pytest.raises(IteratorEndedError, match="persistent_workers=False"):
        next(first)
    assert [batch.tolist() for batch in second] == everything[1:]
    leave_by_break(loader)
    assert values(loader) == everything
    assert workers() == started, "they are kept from epoch to epoch"
    loader.close()
    until(lambda: not workers())
    assert values(loader) == everything, "they are started anew"
    del loader
    gc.collect()
    until(lambda: not workers())


@pytest.mark.timeout(60)
def test_two_loaders_over_one_dataloader_with_persistent_workers_do_not_hang():
    wrapped = DataLoader(Numbers(40), batch_size=2, num_workers=1, persistent_workers=True)
    first, second = iter(streamed(wrapped)), iter(streamed(wrapped))
    assert next(first).tolist() == [0, 1]
    assert next(second).tolist() == [0, 1]
    found = []

    def read():
        try:
            found.extend(batch.tolist() for batch in second)
        except Exception as error:
            found.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(5)
    assert not reader.is_alive(), "the newer iterator waits for batches that the older one took"
    assert found == [[index, index + 1] for index in range(2, 40, 2)]
    with pytest.raises(IteratorEndedError):
        list(first)


class Reads:
    """An iterator that notices two threads within it."""

    def __init__(self):
        self.count = 0
        self.clashes = 0
        self._within = threading.Lock()

    def __iter__(self):
        return self

    def __next__(self):
        if not self._within.acquire(blocking=False):
            self.clashes += 1
            raise RuntimeError("two threads at once")
        time.sleep(0.03)
        self._within.release()
        self.count += 1
        if self.count > 12:
            raise StopIteration
        return torch.tensor(self.count)


def test_an_iterator_that_two_loops_share_has_one_reader():
    source = Reads()
    loader = streamed(source)
    first = iter(loader)
    assert next(first).item() == 1
    second = iter(loader)
    taken = next(second).item()
    assert taken > 1
    with pytest.raises(IteratorEndedError):
        next(first)
    assert [batch.item() for batch in second] == list(range(taken + 1, 13))
    assert source.clashes == 0


@pytest.mark.timeout(60)
def test_a_process_ends_although_an_iterator_is_open():
    script = """
import time, torch, gpuaug

def slow():
    yield torch.tensor(0)
    time.sleep(0.3)
    yield torch.tensor(1)

batches = iter(gpuaug.StreamedLoader(slow(), device="cpu"))
print(next(batches).item())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_an_iterator_does_not_pass_for_complete_when_its_loader_was_closed():
    loader = streamed(torch.arange(20))
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(IteratorEndedError) as caught:
        list(batches)
    assert str(caught.value) == (
        "An iterator must be read before its loader is closed or given a state, got next() after that. Begin a new one."
    )
    assert list(batches) == []


def test_close_may_be_called_at_any_time_and_often():
    loader = streamed(torch.arange(3))
    loader.close()
    assert values(loader) == [0, 1, 2]
    loader.close()
    loader.close()
    with loader as same:
        assert same is loader
        assert values(loader) == [0, 1, 2]


# 9. Randomness is keyed, not consumed


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
    assert torch.equal(torch.rand(4), expected)


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
    assert torch.equal(torch.get_rng_state(), before)


def test_the_users_own_draws_do_not_reach_the_stages():
    loader = streamed([torch.zeros(4)] * 4, noise, seed=0)
    alone = values(loader)
    loader.set_epoch(0)
    found = []
    for batch in loader:
        found.append(batch.tolist())
        torch.manual_seed(torch.randint(100, ()).item())
    assert found == alone


def test_pythons_and_numpys_generators_are_left_alone():
    def state():
        return random.getstate(), np.random.get_state()[1].tolist()

    before = state()
    list(streamed(torch.arange(3.0), noise))
    assert state() == before

    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    (drawn,) = streamed([0], lambda _: (random.random(), np.random.rand()))
    assert drawn == expected, "a stage that draws from them draws as it would have"


# 13. The same program runs on a CPU


def test_every_kind_of_stage_runs_on_a_cpu():
    augment = K.AugmentationSequential(K.RandomHorizontalFlip(), K.Normalize(0.5, 0.5))
    encoder = nn.Conv2d(3, 4, 3).requires_grad_(False)
    loader = StreamedLoader(
        [{"image": torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8), "label": torch.arange(2), "name": ["a", "b"]}] * 2,
        [
            TransformStage(lambda x: augment(x.float() / 255), on="image"),
            FeatureStage(encoder, on="image", into="features", autocast=torch.bfloat16, memory_format=torch.channels_last),
        ],
        device="cpu",
    )
    for batch in loader:
        assert batch["features"].shape == (2, 4, 6, 6)
        assert batch["features"].dtype is torch.bfloat16
        assert batch["image"].dtype is torch.float32
        assert batch["name"] == ["a", "b"]


@pytest.mark.parametrize("depth", [0, 3])
def test_on_a_cpu_a_batch_is_worked_on_when_it_is_wanted(depth):
    # There is nothing to overlap with: working ahead would only put off the batch that is wanted.
    worked_on = []
    batches = iter(streamed(torch.arange(6), lambda x: worked_on.append(x.item()) or x, depth=depth))
    for taken in range(1, 5):
        next(batches)
        assert worked_on == list(range(taken))
    batches.close()


# 14. Nothing starts before it is wanted


class Opened(list):
    opened = 0

    def __iter__(self):
        self.opened += 1
        return super().__iter__()


def test_nothing_starts_before_the_first_batch_is_asked_for(feeds):
    wrapped = Opened(torch.arange(3))
    loader = streamed(wrapped)
    batches = iter(loader)
    assert len(loader) == 3
    assert (wrapped.opened, feeds()) == (0, [])
    next(batches)
    assert wrapped.opened == 1
    list(batches)
    assert wrapped.opened == 1, "once an epoch"
    list(loader)
    assert wrapped.opened == 2
