"""How far ahead the host runs, when a batch arrives, and what ends with the iterator."""

import itertools
import sys
import threading
from contextlib import suppress
from functools import partial

import pytest
import torch
from protocol.scenarios import STRUCTURED, Source, install, kernel, make_stage, read_with, script_arrivals
from support.process.interrupts import Interrupt
from support.process.waiting import WAIT_S

from gpuaug import StreamedLoader, TransformStage
from gpuaug.core import batch
from gpuaug.feed import feed as feed
from gpuaug.feed.prefetch import FeedIterator


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_what_was_launched_ahead_is_not_in_the_state(cuda, monkeypatch, depth):
    class Stateful(Source):
        def state_dict(self):
            raise AssertionError("its batches bring it along")

        def load_state_dict(self, state):
            pass

    class Dated(FeedIterator):
        pulled = 0

        def _get(self, block):
            found = super()._get(block)
            self.pulled += 1
            found.state = self.pulled
            return found

    read_with(monkeypatch, Dated)
    streamed = StreamedLoader(Stateful(cuda, 6), device="cuda", depth=depth)
    for number, _ in enumerate(streamed, start=1):
        (iterator,) = streamed._feed_iterators
        assert iterator.pulled >= min(number + depth, 7)
        state = streamed.state_dict()
        assert (state["source"], state["batch"], state["ended"]) == (number, number, False)
    state = streamed.state_dict()
    assert (state["source"], state["batch"], state["ended"]) == (7, 6, True)


def most_ahead(cuda, streamed, epochs=1):
    """The most batches that were launched and not known to be done with, over a training run."""
    history, ends, most = cuda.history, [], 0
    for received in itertools.chain.from_iterable(itertools.repeat(streamed, epochs)):
        cuda.read(*batch.leaves(received))
        ends.append(cuda.Event())
        ends[-1].record()
        launched = sum(line.startswith("alloc images") for line in history.log)
        most = max(most, launched - sum(end.query() for end in ends))
    return most


@pytest.mark.parametrize("kinds", [(), STRUCTURED])
@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_the_host_is_held_back_a_bounded_number_of_batches_ahead(cuda, monkeypatch, depth, kinds):
    script_arrivals(monkeypatch, [True])
    cuda.shape_of = lambda batch: (batch % 3,)
    streamed = StreamedLoader(Source(cuda, 20), [make_stage(cuda, kind) for kind in kinds], device="cuda", depth=depth)
    assert most_ahead(cuda, streamed) <= (depth + 2) + (depth + 1)  # steps behind, batches in flight
    assert streamed.stats().held_back == cuda.history.syncs == 20 - (depth + 2)
    assert streamed.stats().held_back_ms > 0


def test_the_host_is_held_back_over_short_epochs(cuda, monkeypatch):
    script_arrivals(monkeypatch, [True])
    assert most_ahead(cuda, StreamedLoader(Source(cuda, 3), device="cuda"), epochs=8) <= 4 + 3


def test_a_device_that_keeps_up_holds_nobody_back(monkeypatch):
    cuda = install(monkeypatch, keeps_up=True)
    streamed = StreamedLoader(Source(cuda, 20), device="cuda")
    assert most_ahead(cuda, streamed) <= 3
    assert streamed.stats().held_back == cuda.history.syncs == 0


@pytest.mark.parametrize("kinds", [(), STRUCTURED])
def test_a_batch_in_flight_is_not_held_up_by_a_slow_loader(cuda, kinds):
    asked, answer = threading.Event(), threading.Event()

    def source():
        yield cuda.host_batch()
        yield cuda.host_batch()
        asked.set()
        assert answer.wait(WAIT_S), "next() waited for the loader"
        yield cuda.host_batch()

    iterator = iter(StreamedLoader(source(), [make_stage(cuda, kind) for kind in kinds], device="cuda"))
    next(iterator)
    assert asked.wait(WAIT_S)
    next(iterator)
    assert not answer.is_set()
    answer.set()
    assert len(list(iterator)) == 1


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("where", ["loader", "stage"])
def test_an_error_arrives_after_the_batches_before_it(cuda, monkeypatch, where, depth):
    script_arrivals(monkeypatch, [True])

    def source():
        for number in range(8):
            if where == "loader" and number == 3:
                raise ZeroDivisionError
            yield cuda.host_batch()

    def augment(images):
        if where == "stage" and images.batch == 3:
            raise ZeroDivisionError
        return kernel(cuda, images)

    streamed = StreamedLoader(source(), [augment], device="cuda", depth=depth)
    iterator, received = iter(streamed), []
    with pytest.raises(ZeroDivisionError) as caught:
        received.extend(leaf.batch for leaf, _ in iterator)
    assert received == [0, 1, 2]
    place = "by the wrapped loader" if where == "loader" else "in stage 'transform'"
    assert caught.value.__notes__ == [f"gpuaug: raised {place}, at batch 3 of epoch 0."]
    assert next(iterator, "the end") == "the end"


@pytest.mark.parametrize(
    ("within", "step"),
    [("core/streams.py", 3), *(pytest.param(within, 1, marks=pytest.mark.slow) for within in ("core/streams.py", ""))],
)
def test_ctrl_c_anywhere_leaves_the_users_stream_current_and_memory_in_order(monkeypatch, within, step):
    script_arrivals(monkeypatch, [True])
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    for at in itertools.count(1, step):
        cuda = install(monkeypatch)
        augment = partial(kernel, cuda)
        streamed = StreamedLoader(Source(cuda, 3), [augment, TransformStage(augment, into=2)], device="cuda", depth=1)
        with suppress(KeyboardInterrupt), Interrupt(at, within) as interrupt:
            for received in streamed:
                cuda.read(*received)
        assert cuda.current_stream() is cuda.default, interrupt.place
        for received in streamed:
            cuda.read(*received)
        assert not cuda.history.violations, (interrupt.place, cuda.history.report())
        if interrupt.place is None:
            break
    assert at > 100


@pytest.mark.parametrize("kinds", [("augment",), STRUCTURED])
def test_the_thread_that_pulls_makes_no_cuda_calls(cuda, monkeypatch, kinds):
    real, callers = cuda.operation, set()

    def operation():
        callers.add(threading.current_thread().name)
        return real()

    monkeypatch.setattr(cuda, "operation", operation)
    for received in StreamedLoader(Source(cuda, 8), [make_stage(cuda, kind) for kind in kinds], device="cuda"):
        cuda.read(*batch.leaves(received))
    assert callers == {threading.current_thread().name}


def draws(cuda, depth):
    """What a stage draws for each batch of two epochs, the first of which is left early."""
    drawn = {}

    def augment(images):
        drawn[images] = torch.rand(()).item()
        return images

    streamed = StreamedLoader(Source(cuda, 6), [augment], device="cuda", depth=depth, seed=7)
    first = [drawn[images] for (images, _), _ in zip(streamed, range(4), strict=False)]
    return first + [drawn[images] for images, _ in streamed]


def test_draws_do_not_depend_on_depth_and_take_nothing_from_the_user(cuda):
    state = torch.get_rng_state()
    reference = draws(cuda, depth=0)
    assert len(set(reference)) == 4 + 6
    assert all(draws(cuda, depth) == reference for depth in (1, 2, 5))
    assert torch.equal(torch.get_rng_state(), state)
