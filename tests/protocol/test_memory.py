"""Memory of every origin is ordered: what lay on the device before, weights, what moves itself, and what is left behind."""

import gc
import weakref
from collections import deque
from contextlib import nullcontext, suppress

import pytest
import torch
from protocol.scenarios import (
    STRUCTURED,
    Encoder,
    FakeTorch,
    Source,
    install,
    kernel,
    make_stage,
    name_lanes,
    read_with,
    script_arrivals,
)
from support.batches.containers import Encoding
from support.gpu.stream_double import FakeGraph, FakeStream, HostBuffer
from support.gpu.stream_history import OVERWRITTEN, REUSED, UNREADY
from torch import nn

from gpuaug import FeatureStage, SelectionError, StreamedLoader, TransformStage
from gpuaug.core import batch
from gpuaug.core.streams import Lane, Lanes
from gpuaug.feed.prefetch import FeedIterator
from gpuaug.feed.ring import Ring, Slots
from gpuaug.stages import feature


class Resident(torch.Tensor):
    """A tensor that was on the device before the loader saw it."""

    device = torch.device("cuda", 0)
    is_cpu = False

    @classmethod
    def holding(cls, buffer):
        tensor = torch.empty(0).as_subclass(cls)
        tensor.buffer = buffer
        return tensor

    def record_stream(self, stream):
        self.buffer.record_stream(stream)


def feed_resident(cuda, stages):
    """Train on batches that the loader makes on the device, on a stream of its own."""
    stream = FakeStream(cuda, "source")

    def source():
        for number in range(12):
            with cuda.stream(stream):
                yield Resident.holding(cuda.new("resident", number))

    streamed = StreamedLoader(source(), stages, device="cuda")
    name_lanes(cuda, streamed)
    for received in streamed:
        cuda.read(getattr(received, "buffer", received))


def augment_resident(cuda):
    return TransformStage(lambda tensor: kernel(cuda, tensor.buffer))


@pytest.mark.parametrize("augmented", [False, True])
def test_memory_that_was_on_the_device_before_is_ordered(cuda, augmented):
    feed_resident(cuda, [augment_resident(cuda)] if augmented else [])
    assert not cuda.history.violations, cuda.history.report()


@pytest.mark.parametrize(
    ("method", "augmented", "rule", "words"),
    [
        ((Lanes, "follow"), False, UNREADY, "default reads resident"),
        ((Lanes, "follow"), True, UNREADY, "stage/transform lane reads resident"),
        ((Lane, "reads"), False, REUSED, "last use: default reads"),
        ((Lane, "reads"), True, REUSED, "last use: stage/transform lane reads"),
    ],
)
def test_memory_that_was_on_the_device_before_needs_both_orders(cuda, monkeypatch, method, augmented, rule, words):
    monkeypatch.setattr(*method, lambda *_: None)
    script_arrivals(monkeypatch, [True])
    feed_resident(cuda, [augment_resident(cuda)] if augmented else [])
    assert any(violation.rule == rule and words in violation.text for violation in cuda.history.violations)


@pytest.mark.parametrize("capture", ["auto", "never"])
@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("announced", [True, False])
def test_weights_change_in_order_within_update_and_only_there(cuda, monkeypatch, announced, aside, branches, capture):
    script_arrivals(monkeypatch, [True])
    weight = cuda.new("weight", batch=-1)

    class Weighted(nn.Module):
        def forward(self, *values):
            cuda.read(weight)
            return kernel(cuda, *values)

    stage = FeatureStage({"a": Weighted(), "b": Weighted()} if branches else Weighted(), capture=capture)
    streamed = StreamedLoader(Source(cuda, 12), [stage], device="cuda")
    side = FakeStream(cuda, "side")
    for received in streamed:
        cuda.read(*batch.leaves(received))
        # Lanes wait for streams that batches were handed over on in any case: update()'s second wait is for the others.
        with cuda.stream(side) if aside else nullcontext(), stage.update() if announced else nullcontext():
            cuda.write(weight)
    rules = {violation.rule for violation in cuda.history.violations}
    expected = {OVERWRITTEN, UNREADY} if aside else {OVERWRITTEN}
    assert rules == (set() if announced else expected), cuda.history.report()


def test_graphs_that_are_captured_ahead_read_weights_after_they_were_written(cuda, monkeypatch):
    class Weighted(nn.Module):
        def forward(self, values):
            cuda.read(weight)
            return {"result": kernel(cuda, values)}

    fake = FakeTorch(cuda)
    fake.zeros_like = lambda value, device: cuda.new("zeros", batch=0)
    monkeypatch.setattr(feature, "torch", fake)
    loader = StreamedLoader(Source(cuda, 2), [FeatureStage(Weighted())], device="cuda:0")
    weight = cuda.new("weight", batch=-1)
    loader._shared.device_setup.bound_stages[0][0].capture([(torch.empty(1),)])
    assert not cuda.history.violations, cuda.history.report()
    assert f"reads {weight.key}" in cuda.history.report()


@pytest.mark.parametrize("form", ["mapping", "list"])
def test_a_transform_may_change_its_container_in_place(cuda, monkeypatch, form):
    def augment(members):
        members[0] = kernel(cuda, members[0])
        return members

    script_arrivals(monkeypatch, [True])
    source = Source(cuda, 8, {"mapping": lambda leaves: dict(enumerate(leaves)), "list": list}[form])
    streamed = StreamedLoader(source, [TransformStage(augment, on=None)], device="cuda")
    for received in streamed:
        cuda.read(*batch.leaves(received))
    assert not cuda.history.violations, cuda.history.report()


def test_an_interrupt_within_a_stage_leaves_its_reads_ordered(cuda, monkeypatch):
    script_arrivals(monkeypatch, [True])

    def interrupted(images):
        kernel(cuda, images)
        raise KeyboardInterrupt

    streamed = StreamedLoader(Source(cuda, 3), [interrupted], device="cuda")
    for _ in range(4):
        with suppress(KeyboardInterrupt):
            next(iter(streamed))
        gc.collect()
    assert not cuda.history.violations, cuda.history.report()


def test_a_mapping_that_moves_itself_may_be_changed_in_place(cuda, monkeypatch):
    def augment(members):
        members["images"] = kernel(cuda, members["images"])
        return members

    script_arrivals(monkeypatch, [True])
    source = Source(cuda, 8, lambda leaves: Encoding(zip(("images", "labels"), leaves, strict=True)))
    for received in StreamedLoader(source, [TransformStage(augment, on=None)], device="cuda"):
        cuda.read(*received.values())
    assert not cuda.history.violations, cuda.history.report()


class Holder:
    """An object that is on the device already, so its ``to`` has nothing to do."""

    def __init__(self, held):
        self.held = held

    def to(self, device):
        return self


@pytest.mark.parametrize("ending", ["left early", "a stage fails"])
def test_objects_on_the_device_are_read_before_their_memory_is_used_again(cuda, monkeypatch, ending):
    def made():
        for number in range(6):
            yield Holder(cuda.new("resident", number))

    class Objects:
        def __iter__(self):
            return made()

    def augment(holder):
        result = kernel(cuda, holder.held)
        if ending == "a stage fails":
            raise ValueError("planted")
        return result

    script_arrivals(monkeypatch, [True])
    streamed = StreamedLoader(Objects(), [augment], device="cuda")
    for _ in range(4):
        iterator = iter(streamed)
        with suppress(ValueError):
            cuda.read(next(iterator))
        iterator.close()
        gc.collect()
    assert not cuda.history.violations, cuda.history.report()


def test_an_error_before_a_stage_has_begun_leaves_earlier_stages_ordered(cuda, monkeypatch):
    script_arrivals(monkeypatch, [True])
    stages = [lambda images: kernel(cuda, images), TransformStage(lambda labels: labels, on=5)]
    streamed = StreamedLoader(Source(cuda, 3), stages, device="cuda")
    for _ in range(3):
        with suppress(SelectionError):
            next(iter(streamed))
        gc.collect()  # the error holds the batch
    assert not cuda.history.violations, cuda.history.report()


def test_an_iterator_may_be_collected_while_a_stage_runs(cuda, monkeypatch):
    script_arrivals(monkeypatch, [True])
    garbage = []

    def augment(images):
        garbage.clear()
        return kernel(cuda, images)

    streamed = StreamedLoader(Source(cuda, 8), [augment, lambda images: kernel(cuda, images)], device="cuda")
    iterator = iter(streamed)
    cuda.read(*next(iterator))
    abandoned = iter(streamed)
    cuda.read(*next(abandoned))
    garbage.append(abandoned)
    del abandoned
    for received in iterator:
        cuda.read(*received)
    assert not cuda.history.violations, cuda.history.report()


@pytest.mark.parametrize("kinds", [("augment", "encode"), ("augment", *STRUCTURED)], ids=str)
@pytest.mark.parametrize("new_stages", [False, True])
def test_device_memory_is_flat_over_epochs(cuda, monkeypatch, new_stages, kinds):
    # The allocator keeps a pool for each stream, so lanes that are made again take as much memory again.
    def stages():
        return [make_stage(cuda, kind) for kind in kinds]

    script_arrivals(monkeypatch, [True])
    cuda.shape_of = lambda batch: (batch % 2,)
    streamed = StreamedLoader(Source(cuda, 6), stages(), device="cuda")
    blocks = []
    for _ in range(12):
        if new_stages:
            streamed.stages = stages()
        for received in streamed:
            cuda.read(*batch.leaves(received))
        blocks.append(blocks_of(cuda))
    assert blocks[1:] == [blocks[1]] * 11
    assert any("replays" in line for line in cuda.history.log) == (kinds[1:] == STRUCTURED)


def blocks_of(cuda):
    """Blocks of memory that were reserved so far."""
    return len({line.rpartition(" in block ")[2] for line in cuda.history.log if line.startswith("alloc")})


REPLACED = {(): 0, ("augment",): 1, ("both",): 2, ("augment", "encode"): 2, ("augment", "beside"): 1}
"""Buffers of a batch that stages put results in the place of."""


def train_on_sizes(cuda, monkeypatch, kinds, depth, sizes, epochs=1):
    """Train on batches of two buffers of these sizes each.

    Returns:
        What the formula in the documentation allows for the largest of them, and what is reserved after each epoch.
    """
    script_arrivals(monkeypatch, [True])
    cuda.bytes_of = lambda batch: sizes[batch % len(sizes)]
    loader = StreamedLoader(Source(cuda, len(sizes)), [make_stage(cuda, kind) for kind in kinds], device="cuda", depth=depth)
    reserved = []
    for _ in range(epochs):
        for received in loader:
            cuda.read(*batch.leaves(received))
        del received
        reserved.append(cuda.reserved_bytes)
    result, temporary = (3 if "beside" in kinds else 2) * max(sizes), max(sizes) if kinds else 0
    return (depth + 2) * result + 2 * REPLACED[kinds] * max(sizes) + temporary, reserved


@pytest.mark.parametrize("kinds", REPLACED, ids=str)
@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("step", [0, 7])
def test_live_device_memory_is_within_its_formula(cuda, monkeypatch, kinds, depth, step):
    most, _ = train_on_sizes(cuda, monkeypatch, kinds, depth, [100 + step * number for number in range(24)])
    assert most / 2 < cuda.most_live_bytes <= most


@pytest.mark.parametrize("depth", [0, 2])
def test_growing_batches_reserve_a_block_of_each_size_once(cuda, monkeypatch, depth):
    sizes = [100 + 7 * number for number in range(24)]
    most, reserved = train_on_sizes(cuda, monkeypatch, ("augment", "encode"), depth, sizes, epochs=6)
    assert most < reserved[0] <= most / max(sizes) * sum(sizes)
    assert reserved[1:] == [reserved[1]] * 5


@pytest.mark.parametrize("depth", [0, 2])
def test_batches_that_shrink_reserve_no_more_than_batches_of_the_first_size(monkeypatch, depth):
    def reserved(sizes):
        return train_on_sizes(install(monkeypatch), monkeypatch, ("augment", "encode"), depth, sizes)[1][0]

    assert reserved([300 - 6 * number for number in range(24)]) <= reserved([300] * 24)


def test_device_memory_is_flat_over_loaders(cuda, monkeypatch):
    script_arrivals(monkeypatch, [True])
    blocks = []
    for number in range(40):
        stages = [TransformStage(lambda images: kernel(cuda, images), name=f"augment {number}"), lambda x: kernel(cuda, x)]
        kept = []
        for received in StreamedLoader(Source(cuda, 5), stages[: 1 + number % 2], device="cuda"):
            cuda.read(*batch.leaves(received))
            kept.append(received)
            if len(kept) == 2 + number % 2:
                break
        del kept, received
        blocks.append(blocks_of(cuda))
    assert blocks[2:] == [blocks[2]] * 38
    assert not cuda.history.violations, cuda.history.report()


def test_loaders_that_are_alive_share_no_stream(cuda):
    def streams_of(loader):
        return {lane.stream for lane in loader._shared.lanes._lanes.values()}

    alive = [StreamedLoader([], [kernel] * (number % 3), device="cuda:0") for number in range(5)]
    for number in range(5, 40):
        gone = streams_of(alive[number % 5])
        alive[number % 5] = None
        alive[number % 5] = StreamedLoader([], [kernel] * (number % 3), device="cuda:0")
        assert streams_of(alive[number % 5]) & gone
        every = [streams_of(loader) for loader in alive]
        assert len(set().union(*every)) == sum(map(len, every))
    assert cuda.number("stream") <= 5 * 3  # a copy lane and two stages each, as in no more than five


def test_streams_stay_with_a_loader_that_an_iterator_keeps_alive(cuda, monkeypatch):
    script_arrivals(monkeypatch, [True])
    batches = iter(StreamedLoader(Source(cuda, 5), device="cuda:0"))
    next(batches)
    other = StreamedLoader(Source(cuda, 5), device="cuda:0")
    assert other._shared.lanes.copy.stream.name == "stream 1"
    batches.close()
    del batches
    assert StreamedLoader(Source(cuda, 5), device="cuda:0")._shared.lanes.copy.stream.name == "stream 0"


@pytest.mark.parametrize("waits", [True, False])
def test_memory_that_is_emptied_with_former_graphs_goes_to_other_lanes_once_the_device_is_done_with_it(
    cuda, monkeypatch, waits
):
    script_arrivals(monkeypatch, [True])
    if not waits:
        monkeypatch.setattr(cuda, "synchronize", lambda: None)
    other, former = (StreamedLoader(Source(cuda, 5), [FeatureStage(Encoder(cuda))], device="cuda:0") for _ in range(2))
    with cuda.stream(FakeStream(cuda, "second")):
        for received in former:
            cuda.read(*received)
    former = received = None
    gc.collect()
    for received in other:
        cuda.read(*received)
    assert (not cuda.history.violations) == waits, cuda.history.report()
    assert all(rule == REUSED for rule in cuda.history.rules())
    assert sum("replays" in line for line in cuda.history.log) == 8


@pytest.mark.filterwarnings("ignore:Some shapes of stage")
@pytest.mark.parametrize("why", ["room", "update"])
def test_graphs_that_go_are_not_in_flight(cuda, monkeypatch, why):
    class Watched(FakeGraph):
        last = None

        def replay(self):
            super().replay()
            self.last = cuda.Event()
            self.last.record()

        def __del__(self):
            gone.append(self.last is None or self.last.query())

    gone = []
    script_arrivals(monkeypatch, [True])
    monkeypatch.setattr(cuda, "CUDAGraph", lambda: Watched(cuda, "graph"))
    cuda.shape_of = lambda batch: (batch % 2,)
    stage = FeatureStage(Encoder(cuda), graph_bytes=3 if why == "room" else None)
    loader = StreamedLoader(Source(cuda, 5), [stage], device="cuda:0")
    for _ in range(2):
        for received in loader:
            cuda.read(*received)
        if why == "update":
            with stage.update():
                stage.encoder.weight = nn.Parameter(torch.ones(1), requires_grad=False)
    assert gone == ([True] if why == "room" else [True] * 4)


class DoubleRing(Ring):
    """A ring whose slots are buffers of the double: a worker writes the next one where one was freed."""

    def __init__(self):
        self._copies = deque()

    def page_lock(self):
        pass

    def close(self):
        pass


class InSlot(HostBuffer):
    """A leaf that lies in a slot, which its copy reads."""

    def __init__(self, cuda, slot):
        super().__init__(cuda, "images", [])
        self._slot = slot.key

    def to(self, device, non_blocking=False):
        with self._cuda.operation() as history:
            history.read(self._cuda.current_stream(), self._slot)
        return super().to(device, non_blocking)


@pytest.mark.parametrize("depth", [0, 2])
def test_slots_are_written_again_after_their_copy(monkeypatch, depth):
    cuda, ring = install(monkeypatch, keeps_up=True), DoubleRing()
    worker = FakeStream(cuda, "worker")

    class Slotted(FeedIterator):
        def _get(self, block):
            pulled = super()._get(block)
            if not pulled.ended:
                with cuda.stream(worker):
                    slot = cuda.new("slot", pulled.batch)
                    written = cuda.Event()
                    written.record()
                cuda.history.learn(written)  # it has been sent, so it has been written
                pulled.slot = Slots(ring, slot)
                pulled.batch = InSlot(cuda, slot)
            return pulled

    read_with(monkeypatch, Slotted)
    streamed = StreamedLoader(range(12), [lambda images: kernel(cuda, images)], device="cuda", depth=depth)
    streamed._shared.feed._rings.append(weakref.ref(ring))
    for received in streamed:
        cuda.read(received)
    assert not cuda.history.violations, cuda.history.report()
    allocated = [line for line in cuda.history.log if line.startswith("alloc slot")]
    assert len({line.rpartition(" in block ")[2] for line in allocated}) < 12, "no slot was written again"
