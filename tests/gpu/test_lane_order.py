"""Order between lanes on a real device: delayed, dropped and overwritten, batches stay the same."""

import pytest
import torch
from support import internals
from support.gpu.cuda_loops import (
    CYCLES,
    Encoder,
    assert_same,
    checksum,
    host_batches,
    poison,
    poisoning,
    reference,
    stages_for,
)
from support.gpu.launches import synchronisation_is_error

from gpuaug import StreamedLoader
from gpuaug.core import streams

pytestmark = pytest.mark.gpu


@pytest.fixture
def encoder():
    return Encoder().cuda().requires_grad_(False)


@pytest.mark.parametrize("slow", ["copy", "stage/transform", "stage/feature", "consumer"])
def test_delayed_lanes_dropped_references_and_poisoned_memory(encoder, slow, monkeypatch):
    batches = host_batches()
    want = [checksum(b) for b in reference(batches, stages_for(encoder))]
    loader = StreamedLoader(batches, stages_for(encoder), depth=2, seed=1)
    lanes = internals.shared(loader).lanes
    gate = lanes.wait_for_consumers

    def delayed(consumer, mark):
        gate(consumer, mark)
        with torch.cuda.stream(lanes.lane(slow).stream):
            torch.cuda._sleep(CYCLES)

    if slow != "consumer":
        monkeypatch.setattr(lanes, "wait_for_consumers", delayed)
    monkeypatch.setattr(
        internals.shared(loader).device_setup.copier, "copy", poisoning(internals.shared(loader).device_setup.copier.copy)
    )
    got = []
    for images, labels in loader:
        if slow == "consumer":
            torch.cuda._sleep(CYCLES)
        # The reference is dropped while the kernel that reads it is still queued behind the delay.
        got.append((images.double().sum(), labels.sum()))
        del images, labels
        poison()
    assert [(a.item(), b.item()) for a, b in got] == want


@pytest.mark.parametrize("slow", ["copy", "stage/transform", "stage/feature"])
def test_lanes_delayed_after_their_launch(encoder, slow):
    """The hand-over must wait for the batch's own work, so a lane that lags behind changes nothing."""
    batches = host_batches()
    want = reference(batches, stages_for(encoder))
    loader = StreamedLoader(batches, stages_for(encoder), depth=3, seed=1)
    got = []
    for batch in loader:
        got.append(tuple(t.clone() for t in batch))
        with torch.cuda.stream(internals.shared(loader).lanes.lane(slow).stream):
            torch.cuda._sleep(CYCLES)
    assert_same(got, want)


@pytest.mark.parametrize("broken", ["wait_for_consumers", "hand_over", "reclaim"])
def test_removed_waits_change_batches(encoder, broken, monkeypatch):
    """Take one wait away and the bits must change: the delays above are long enough to prove something."""
    batches = host_batches(count=20, size=256)
    want = [checksum(b) for b in reference(batches, stages_for(encoder))]
    if broken == "hand_over":
        monkeypatch.setattr(streams.Lanes, "hand_over", lambda self, ready, consumer: None)
    if broken == "wait_for_consumers":
        monkeypatch.setattr(streams.Lanes, "wait_for_consumers", lambda self, consumer, mark: None)
    if broken == "reclaim":
        monkeypatch.setattr(streams.Lanes, "retire", lambda self, values, read_by: None)
    loader = StreamedLoader(batches, stages_for(encoder), depth=2, seed=1)
    transform = internals.shared(loader).lanes.lane("stage/transform")
    got = []
    for index, (images, labels) in enumerate(loader):
        if broken == "wait_for_consumers":
            torch.cuda._sleep(CYCLES)
        elif index % 2 == 0:
            with torch.cuda.stream(transform.stream):
                torch.cuda._sleep(CYCLES)
        got.append((images.double().sum(), labels.sum()))
        del images, labels
    assert [(a.item(), b.item()) for a, b in got] != want


def test_consumer_that_changes_its_stream_and_drops_a_batch_under_another_one(encoder):
    batches = host_batches(count=20)
    want = [checksum(b) for b in reference(batches, stages_for(encoder))]
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    got, iterator = [], iter(StreamedLoader(batches, stages_for(encoder), depth=2, seed=1))
    for index in range(len(batches)):
        with torch.cuda.stream((one, two)[index % 2]):
            images, labels = next(iterator)
            assert torch.cuda.current_stream() == (one, two)[index % 2]
            torch.cuda._sleep(CYCLES)
            got.append((images.double().sum(), labels.sum()))
        with torch.cuda.stream((two, one)[index % 2]):
            del images, labels
    torch.cuda.synchronize()
    assert [(a.item(), b.item()) for a, b in got] == want


def test_steady_state_does_not_synchronise(encoder, monkeypatch):
    class Counted(streams._CudaEvent):
        def synchronize(self):
            waits.append(self)
            super().synchronize()

    waits = []
    monkeypatch.setattr(streams, "_CudaEvent", Counted)
    batches = host_batches(count=40)
    loader = StreamedLoader(batches, stages_for(encoder), depth=2, seed=1)
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)  # captures, and allocates what it needs
    torch.cuda.synchronize()
    held_back, waited = loader.stats().held_back, len(waits)
    with synchronisation_is_error():
        torch.cuda._sleep(100 * CYCLES)  # however busy the host is, it gets ahead and is held back
        for _ in iterator:
            torch.cuda._sleep(CYCLES // 10)
    assert len(waits) - waited == loader.stats().held_back - held_back > 0


def test_host_run_ahead_is_bounded():
    loader = StreamedLoader(host_batches(count=30), depth=2)
    marks = []
    for _ in loader:
        torch.cuda._sleep(CYCLES)
        event = torch.cuda.Event()
        event.record()
        marks.append(event)
        assert sum(not mark.query() for mark in marks) <= loader.depth + 3
    assert loader.stats().held_back > 10


def test_resident_batches_are_ordered_after_their_stream():
    def source():
        side = torch.cuda.Stream()
        for value in range(6):
            with torch.cuda.stream(side):
                torch.cuda._sleep(CYCLES)
                made = torch.full((1 << 20,), float(value), device="cuda")
                yield made

    got = [batch.sum() for batch in StreamedLoader(source(), [lambda x: x * 2], depth=2)]
    assert [total.item() for total in got] == [2.0 * value * (1 << 20) for value in range(6)]
