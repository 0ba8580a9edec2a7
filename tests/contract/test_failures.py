"""Failures arrive where they belong: at their batch, with their own type, and nothing hangs."""

import gc
import itertools
import traceback
import weakref
from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch
from contract.sources import DEPTHS, Numbers, OwnError, failing_at, failure, raises, streamed, values
from support import internals
from support.gpu.host_graphs import install, on_lanes
from support.gpu.lanes import OnLanes
from support.process import processes
from support.process.waiting import until
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from gpuaug import FeatureStage, IteratorEndedError, TransformStage


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
def test_a_datasets_error_is_raised_at_its_batch(depth):
    own = OwnError(7, text="its own")
    loader = streamed(DataLoader(Numbers(10, 7, raises(own)), batch_size=2), depth=depth)
    arrived, error = failure(loader)
    assert arrived == [[0, 1], [2, 3], [4, 5]]
    assert error is own
    assert error.__notes__ == ["gpuaug: raised by the wrapped loader, at batch 3 of epoch 0."]
    assert "__getitem__" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def _read_by_two(loader):
    first = iter(loader)
    next(first)
    next(iter(loader))
    next(first)


def _fails(batch):
    raise LookupError("its own")


CAUSES = {
    "dataset": (Numbers(10, 7, raises(LookupError("its own"))), [], list),
    "stage": (Numbers(10), [TransformStage(_fails)], list),
    "newer iterator": (Numbers(10), [], _read_by_two),
}


@pytest.mark.parametrize("make", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("cause", CAUSES)
def test_an_error_forms_no_reference_cycle_with_persistent_workers(cause, make):
    """The garbage collector would free the iterator of the workers after its queues, and then wait five seconds per worker."""
    dataset, stages, read = CAUSES[cause]
    wrapped = make(dataset, batch_size=2, num_workers=1, persistent_workers=True)
    loader = streamed(wrapped, *stages)
    gc.collect()
    gc.disable()
    try:
        with suppress(LookupError, IteratorEndedError):
            read(loader)
        iterator = weakref.ref(wrapped._iterator)
        del wrapped, loader
        assert iterator() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_an_error_of_an_encoder_keeps_none_of_its_frames(monkeypatch, error):
    """A frame holds the batch on the device, and an interrupted context manager, which restores when it is freed."""
    install(monkeypatch)
    images = []

    class Fails(nn.Module):
        def forward(self, batch):
            images.append(weakref.ref(made := batch + 1))
            raise error(made.shape)

    def fail():
        with suppress(error):
            next(iter(on_lanes(torch.ones(2, 3), FeatureStage(Fails()))))

    fail()  # torch imports its compiler at the first operation of an encoder, which keeps frames, too
    gc.collect()
    gc.disable()
    try:
        fail()
        assert images[1]() is None
    finally:
        gc.enable()


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


def noisy(x):
    return x + torch.rand(x.shape)


def failing_once(at, error):
    fails = itertools.chain((call == at for call in range(100)), itertools.repeat(False))

    def transform(x):
        if next(fails):
            raise error
        return x

    return transform


@dataclass(frozen=True)
class FrozenError(Exception):
    number: int


class ErrorWithoutAttributes(Exception):
    __slots__ = ()

    def __setattr__(self, name, value):
        raise AttributeError(name)


@pytest.mark.parametrize("own", [FrozenError(7), ErrorWithoutAttributes()])
def test_an_error_that_takes_no_attributes_arrives_as_itself(own):
    _, error = failure(streamed(torch.arange(3), failing_at(1, own)))
    assert error is own
    assert error.__notes__ == ["gpuaug: raised in stage 'transform', at batch 1 of epoch 0."]
    _, error = failure(streamed(DataLoader(Numbers(10, 7, raises(own)), batch_size=2)))
    assert error is own
    assert error.__notes__[1:] == ["gpuaug: raised by the wrapped loader, at batch 3 of epoch 0."]


def test_an_error_that_is_raised_again_and_again_has_one_note_of_each_place():
    own = OwnError(7, text="")
    own.add_note("the user's")
    loader = streamed(torch.arange(3), failing_at(1, own))
    for epoch in (0, 0, 1, 2):
        loader.set_epoch(epoch)
        assert failure(loader)[1] is own
        assert own.__notes__ == ["the user's", f"gpuaug: raised in stage 'transform', at batch 1 of epoch {epoch}."]


def test_an_error_of_opening_the_loader_is_its_own():
    class Closed:
        def __iter__(self):
            raise OwnError(7, text="no workers")

    arrived, error = failure(streamed(Closed()))
    assert (arrived, type(error)) == ([], OwnError)


@pytest.mark.parametrize("depth", [0, 2])
def test_an_iterator_that_has_failed_stays_ended(depth):
    batches = iter(streamed(torch.arange(5), failing_at(1, OwnError(7, text="")), depth=depth))
    next(batches)
    with pytest.raises(OwnError):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize(
    ("workers", "feed", "where", "at"),
    [
        *[(0, "plain", "dataset", 0), (0, "plain", "stage", 3), (0, "ring", "dataset", 3), (0, "ring", "stage", 0)],
        *[(1, "plain", "dataset", 3), (1, "plain", "stage", 0), (1, "ring", "dataset", 0), (1, "ring", "stage", 3)],
    ],
)
def test_a_batch_that_failed_is_tried_again_from_the_state_after_it(workers, feed, where, at):
    def make(*, fails):
        error = torch.OutOfMemoryError("CUDA out of memory.")
        numbers = Numbers(12, 2 * at if fails and where == "dataset" else None, raises(error))
        stages = (noisy, failing_once(at if fails else None, error)) if where == "stage" else (noisy,)
        return streamed(StatefulDataLoader(numbers, 2, num_workers=workers), *stages, feed=feed, seed=1)

    everything = values(make(fails=False))
    stopped, resumed = make(fails=True), make(fails=False)
    arrived, error = failure(stopped)
    assert arrived == everything[:at]
    assert type(error) is torch.OutOfMemoryError
    assert error.__notes__[-1] == "gpuaug: up to 2 batches are on cpu at once (depth=0). Lower batch_size of the DataLoader."
    state = stopped.state_dict()
    assert (state["epoch"], state["batch"]) == (0, at)
    resumed.load_state_dict(state)
    assert values(resumed) == everything[at:]
    if where == "stage":
        stopped.load_state_dict(state)
        assert values(stopped) == everything[at:]


@pytest.mark.parametrize(("depth", "turn"), [(0, "batch_size"), (1, "depth, or batch_size"), (2, "depth, or batch_size")])
def test_an_error_about_device_memory_names_what_to_lower(depth, turn):
    error = torch.OutOfMemoryError("CUDA out of memory.")
    loader = streamed(torch.arange(5), failing_at(3, error), depth=depth)
    internals.shared(loader).device_setup.lanes = OnLanes(internals.shared(loader).lanes)
    for _ in range(2):  # the same object
        assert failure(loader)[1] is error
    held = f"up to {depth + 2} batches are on cpu at once (depth={depth})"
    assert error.__notes__[-1] == f"gpuaug: {held}. Lower {turn} of the DataLoader."
    assert len(error.__notes__) == 2


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
import multiprocessing, os, signal
import torch
from support.process.processes import assert_no_workers_or_feeds, read_until_worker_dies
from torch.utils.data import DataLoader, Dataset
from gpuaug import StreamedLoader

received = multiprocessing.Event()

class Numbers(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 9:
            assert received.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)

def numbers(batch):
    # A DataLoader that has yet to fetch what a worker made may fail at that first, with an error of the worker's socket.
    if batch[0] == 4:
        received.set()
    return batch.tolist()

loader = StreamedLoader(DataLoader(Numbers(), batch_size=2, num_workers=2), device="cpu")
read_until_worker_dies(loader, numbers, most=4)
assert_no_workers_or_feeds()
print("done")
"""


def test_a_worker_that_is_killed_is_an_error_and_no_hang():
    # In a process of its own: DataLoader's handler raises wherever the main thread is when the signal arrives, which may be
    # after the pulling thread has told of the same death, in the middle of whatever runs next.
    done = processes.run_script(KILLED_WORKER)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


KILLED_AT_ITS_END = """
import os
import signal
from multiprocessing import util

import torch
from torch.utils.data import DataLoader

from gpuaug import StreamedLoader


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 20:
            raise LookupError("its own")
        return torch.tensor(index)


def killed_at_its_end(worker):
    util.Finalize(None, os.kill, (os.getpid(), signal.SIGKILL), exitpriority=0)


for feed in ("plain", "ring"):
    workers = DataLoader(Numbers(), batch_size=2, num_workers=2, worker_init_fn=killed_at_its_end)
    for leave in (True, False):
        loader = StreamedLoader(workers, device="cpu", feed=feed)
        try:
            for _ in loader:
                if leave:
                    break
        except LookupError:
            print(feed, "raised")
        else:
            print(feed, "left")
"""


def test_a_worker_that_dies_while_it_ends_is_no_error():
    done = processes.run_script(KILLED_AT_ITS_END)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["plain left", "plain raised", "ring left", "ring raised"]
    assert "killed by signal" not in done.stderr
