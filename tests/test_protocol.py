"""The lanes' protocol, against a double of the stream layer and a checker of what is ordered (``double.py``)."""

import gc
import itertools
import threading
from collections import UserDict
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import pytest
import torch
from double import OVERWAITED, OVERWRITTEN, REUSED, UNREADY, FakeCuda, FakeStream, HostBuffer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpuaug import FeatureStage, SelectionError, StreamedLoader, TransformStage, batch, seeding, streams, supply
from gpuaug.features import _BoundFeature
from gpuaug.feed import ListFeed, Pulled
from gpuaug.flight import Flight
from gpuaug.streams import Lane, Lanes


@dataclass(frozen=True)
class Step:
    """One turn of the training loop."""

    iterator: int = 0
    """Which of two open iterators the batch comes from."""
    stream: int = 0
    """The stream that is current: the default one, or one of two others."""
    keep: bool = False
    """Whether the batch outlives the step. Kept ones are read again in every later step, on the stream of that step."""
    forget: bool = False
    """Whether what was kept is dropped at the end of the step."""
    leave: bool = False
    """Whether the iterator is left after the step."""
    stages: tuple[str, ...] | None = None
    """What the loader's stages are replaced with before the step."""


@dataclass(frozen=True)
class Scenario:
    stages: tuple[str, ...] = ("augment", "encode")
    steps: tuple[Step, ...] = (Step(),) * 12
    depth: int = 2
    batches: int = 5
    there: tuple[bool, ...] = (True,)
    """Whether the loader has a batch when it is asked without waiting, over and over."""


KINDS = ("augment", "beside", "both", "branches", "encode", "flaky", "in place", "whole")
SWITCHING = tuple(Step(stream=number % 3, keep=number % 4 == 0, forget=number % 4 == 3) for number in range(14))
INTERLEAVED = tuple(Step(iterator=number % 2) for number in range(14))

SCENARIOS = {
    "plain": Scenario(),
    "no stages": Scenario(stages=()),
    "depth 0": Scenario(depth=0),
    "depth 1": Scenario(depth=1),
    "depth 5": Scenario(depth=5, batches=9, steps=(Step(),) * 22),
    "slow loader": Scenario(there=(False,)),
    "unsteady loader": Scenario(there=(True, False, False, True, True)),
    "one batch": Scenario(batches=1),
    "empty": Scenario(batches=0),
    "kept": Scenario(steps=(Step(keep=True),) * 8),
    "kept for a while": Scenario(steps=(Step(keep=True), Step(keep=True), Step(forget=True)) * 4),
    "switching streams": Scenario(steps=SWITCHING, batches=9),
    "another stream": Scenario(steps=(Step(stream=1),) * 12),
    "interleaved": Scenario(steps=INTERLEAVED),
    "left early": Scenario(steps=(Step(), Step(keep=True, leave=True)) * 6),
    "new stages": Scenario(steps=(Step(), Step(), Step(leave=True), Step(stages=("both", "encode")), *[Step()] * 6)),
    "error": Scenario(stages=("augment", "flaky", "encode"), steps=(Step(),) * 14),
    "long chain": Scenario(stages=("augment", "both", "whole", "encode")),
    "sources kept": Scenario(stages=("augment", "beside", "beside")),
    "in place": Scenario(stages=("in place", "beside", "in place")),
    "branches": Scenario(stages=("augment", "branches")),
    "branches first": Scenario(stages=("branches", "augment")),
}


@pytest.fixture
def cuda(monkeypatch):
    return install(monkeypatch)


def install(patch, **options):
    """Put a double in the place of the stream layer."""
    cuda = FakeCuda(**options)
    patch.setattr(streams, "cuda", cuda)
    patch.setattr(seeding, "_device_generator", lambda device: None)
    patch.setattr(supply, "why_not_here", lambda: "the double has no page-locked memory")
    return cuda


def name_lanes(cuda, loader):
    for name, lane in loader._machinery.lanes._lanes.items():
        lane.stream.name = f"{name} lane"


class Source:
    """A loader of ``length`` host batches, each in the form that ``form`` gives to images and labels."""

    def __init__(self, cuda, length, form=tuple):
        self._cuda = cuda
        self._length = length
        self._form = form

    def __iter__(self):
        return (self._form(self._cuda.host_batch()) for _ in range(self._length))


def script_arrivals(patch, there):
    """Let a script say whether a batch is there when it is asked for, not the timing of threads."""
    script = itertools.cycle(there)

    class ScriptedFeed(ListFeed):
        def _get(self, block):
            if not (block or next(script)):
                return None
            try:
                return super()._get(block)
            except Exception as error:
                return Pulled(error=error, ended=True)

    patch.setattr(supply, "open_feed", lambda source, current_stream, *_: ScriptedFeed(source, iter(source), current_stream))


def kernel(cuda, *values):
    """Read all of ``values`` into a temporary, and that into a result."""
    inputs = batch.leaves(values)
    cuda.read(*inputs)
    temporary = cuda.new("temporary", inputs[0].batch)
    cuda.read(temporary, *inputs)
    return cuda.new("result", inputs[0].batch)


class Encoder(nn.Module):
    def __init__(self, cuda):
        super().__init__()
        self._cuda = cuda

    def forward(self, *values):
        return kernel(self._cuda, *values)


def make_stage(cuda, kind):
    calls = itertools.count(1)

    def augment(*values):
        return kernel(cuda, *values)

    def both(images, labels):
        return kernel(cuda, images, labels), kernel(cuda, labels)

    def flaky(*values):
        result = kernel(cuda, *values)
        if next(calls) % 4 == 0:
            raise RuntimeError("flaky")
        return result

    def in_place(images):
        cuda.read(*batch.leaves(images))
        for buffer in batch.leaves(images):
            cuda.write(buffer)
        return images

    def whole(members):
        return kernel(cuda, *members), *members[1:]

    match kind:
        case "augment":
            return TransformStage(augment)
        case "beside":
            return TransformStage(augment, into=2)
        case "both":
            return TransformStage(both, on=(0, 1))
        case "branches":
            return FeatureStage({"a": Encoder(cuda), "b": Encoder(cuda)}, capture="never")
        case "encode":
            return FeatureStage(Encoder(cuda), capture="never")
        case "flaky":
            return TransformStage(flaky)
        case "in place":
            return TransformStage(in_place)
        case "whole":
            return TransformStage(whole, on=None)


class TrainingLoop:
    """Takes the steps of a scenario, and reads every leaf of what it has on the stream that is current."""

    def __init__(self, cuda, scenario):
        self.loader = StreamedLoader(
            Source(cuda, scenario.batches), self._make(cuda, scenario.stages), device="cuda", depth=scenario.depth
        )
        self._cuda = cuda
        self._streams = [cuda.default, FakeStream(cuda, "second"), FakeStream(cuda, "third")]
        self._iterators = {}
        self._kept = []
        for step in scenario.steps:
            self._take(step)

    @staticmethod
    def _make(cuda, kinds):
        return [make_stage(cuda, kind) for kind in kinds]

    def _take(self, step):
        if step.stages is not None:
            self.loader.stages = self._make(self._cuda, step.stages)
        name_lanes(self._cuda, self.loader)
        with self._cuda.stream(self._streams[step.stream]):
            try:
                received = next(self._iterators.setdefault(step.iterator, iter(self.loader)))
            except (StopIteration, RuntimeError):
                received = None
            self._use(received, step)
        if step.leave or received is None:
            del self._iterators[step.iterator]

    def _use(self, received, step):
        if received is None:
            return
        stream = self._cuda.current_stream()
        buffers = batch.leaves(received)
        self._cuda.history.receive(stream, buffers[0].batch)
        event = self._cuda.Event()
        event.record(stream)
        self._cuda.read(*buffers, *buffers)
        if step.keep:
            self._kept.append((received, event))
        for kept, handed_over in self._kept:
            stream.wait_event(handed_over)  # who reads on another stream than the batch was handed over on orders that
            self._cuda.read(*batch.leaves(kept))
        if step.forget:
            self._kept.clear()


def run(scenario, mutate=None):
    """Run the real loader through ``scenario``."""
    with pytest.MonkeyPatch.context() as patch:
        cuda = install(patch)
        script_arrivals(patch, scenario.there)
        if mutate is not None:
            mutate(patch, cuda)
        loop = TrainingLoop(cuda, scenario)
        loop.loader.close()
    return cuda.history, loop.loader.stats()


STEPS = st.builds(
    Step,
    iterator=st.sampled_from([0, 0, 0, 1]),
    stream=st.sampled_from([0, 0, 0, 1, 2]),
    keep=st.booleans(),
    forget=st.booleans(),
    leave=st.sampled_from([False, False, False, True]),
    stages=st.none() | st.none() | st.lists(st.sampled_from(KINDS), max_size=3).map(tuple),
)
ANY_SCENARIO = st.builds(
    Scenario,
    stages=st.lists(st.sampled_from(KINDS), max_size=3).map(tuple),
    # What a broken order damages shows when memory is used again, so every scenario ends with a few plain steps.
    steps=st.lists(STEPS, max_size=16).map(lambda steps: (*steps, *[Step()] * 4)),
    depth=st.sampled_from([0, 1, 2, 5]),
    batches=st.integers(0, 7),
    there=st.lists(st.booleans(), min_size=1, max_size=5).map(tuple),
)


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_unordered(name):
    history, stats = run(SCENARIOS[name])
    assert not history.violations, history.report()
    assert history.syncs == stats.held_back  # the host waits for the bound on its run-ahead, and for nothing else


@settings(deadline=None, max_examples=50)
@given(ANY_SCENARIO)
def test_nothing_is_unordered_in_any_scenario(scenario):
    history, stats = run(scenario)
    assert not history.violations, history.report()
    assert history.syncs == stats.held_back


def no_consumer_wait(patch, cuda):
    def hand_over(self, ready, consumer):
        self._consumers[consumer.stream.cuda_stream] = consumer

    patch.setattr(Lanes, "hand_over", hand_over)


def consumer_of_the_first_batch(patch, cuda):
    real, first = Lanes.consumer, []

    def consumer(self):
        first.append(real(self))
        return first[0]

    patch.setattr(Lanes, "consumer", consumer)


def no_reverse_wait(patch, cuda):
    patch.setattr(Lanes, "wait_for_consumers", lambda self, consumer, mark: None)


def reverse_wait_on_another_lane(patch, cuda):
    def wait_for_consumers(self, consumer, mark):
        self._lanes["stage/feature"].wait(mark)

    patch.setattr(Lanes, "wait_for_consumers", wait_for_consumers)


def reverse_wait_for_another_stream(patch, cuda):
    def wait_for_consumers(self, consumer, mark):
        self.copy.wait(Lane("default", cuda.default).mark())

    patch.setattr(Lanes, "wait_for_consumers", wait_for_consumers)


def reverse_wait_for_the_last_consumer_alone(patch, cuda):
    patch.setattr(Lanes, "wait_for_consumers", lambda self, consumer, mark: self.copy.wait(mark))


def reverse_wait_for_the_step_before(patch, cuda):
    real, marks = Lanes.wait_for_consumers, []

    def wait_for_consumers(self, consumer, mark):
        marks.append(mark)
        real(self, consumer, marks[-2] if len(marks) > 1 else mark)

    patch.setattr(Lanes, "wait_for_consumers", wait_for_consumers)


def record_instead(patch, stream_of):
    """The protocol of ``record_stream``: no reverse wait, and the stream that ``stream_of`` gives recorded."""
    real = Flight.hand_over

    def hand_over(self, consumer):
        handed_over = real(self, consumer)
        for buffer in batch.leaves(handed_over):
            buffer.record_stream(stream_of(buffer, consumer))
        return handed_over

    patch.setattr(Flight, "hand_over", hand_over)
    patch.setattr(Lanes, "wait_for_consumers", lambda self, consumer, mark: None)


def record_on_the_producer(patch, cuda):
    record_instead(patch, lambda buffer, consumer: buffer.stream)


def record_on_the_consumer(patch, cuda):
    record_instead(patch, lambda buffer, consumer: consumer.stream)


def wait_for_the_tail(patch, cuda):
    real = Lanes.hand_over

    def hand_over(self, ready, consumer):
        last = list(self._lanes.values())[-1]
        real(self, last.mark(), consumer)

    patch.setattr(Lanes, "hand_over", hand_over)


def one_event_recorded_again(patch, cuda):
    events = {}

    def mark(self):
        event = events.setdefault(self.stream, cuda.Event())
        event.record(self.stream)
        return event

    patch.setattr(Lane, "mark", mark)


def wait_when_launched(patch, cuda):
    real = Flight._launch

    def launch(self, pulled):
        real(self, pulled)
        Lane("consumer", cuda.default).wait(self.waiting[-1].ready)

    patch.setattr(Flight, "_launch", launch)


def mark_before_the_last_write(patch, cuda):
    make_current, mark, early = Lane.make_current, Lane.mark, {}

    def make_current_from(self):
        early[self.name] = mark(self)
        make_current(self)

    def mark_from(self):
        return early.pop(self.name, None) or mark(self)

    patch.setattr(Lane, "make_current", make_current_from)
    patch.setattr(Lane, "mark", mark_from)


def labels_on_a_stream_of_their_own(patch, cuda):
    real, other = HostBuffer.to, cuda.Stream()

    def to(self, device, non_blocking=False):
        with cuda.stream(other if self.name == "labels" else cuda.current_stream()):
            return real(self, device, non_blocking)

    patch.setattr(HostBuffer, "to", to)


def labels_copied_after_the_mark(patch, cuda):
    real = Flight.hand_over

    def hand_over(self, consumer):
        images, labels = real(self, consumer)
        with cuda.stream(self._lanes.copy.stream):
            cuda.write(labels)
        return images, labels

    patch.setattr(Flight, "hand_over", hand_over)


def no_wait_between_lanes(patch, cuda):
    real = Lane.wait
    patch.setattr(Lane, "wait", lambda self, mark: None if self.name.startswith("stage") else real(self, mark))


def no_join_of_branches(patch, cuda):
    def run_without(self, values, ready, position, memory):
        for branch in self._branches.values():
            branch.lane.wait(ready)
        return {name: branch.run(values, position, memory) for name, branch in self._branches.items()}

    patch.setattr(_BoundFeature, "run", run_without)


def intermediates_not_kept(patch, cuda):
    patch.setattr(Lanes, "retire", lambda self, values, read_by: None)


def intermediates_dropped_without_waiting(patch, cuda):
    def reclaim(self, keep=1):
        while len(self._intermediates) > keep:
            self._intermediates.popleft()

    patch.setattr(Lanes, "reclaim", reclaim)


def intermediates_dropped_before_waiting_on_the_stage(patch, cuda):
    """The lane that waits is the one that read, not the one that allocated."""

    def reclaim(self, keep=1):
        while len(self._intermediates) > keep:
            self.lane("stage/feature").wait(self._intermediates.popleft()[1])

    patch.setattr(Lanes, "reclaim", reclaim)


def host_wait(patch, cuda):
    real = Lanes.hand_over

    def hand_over(self, ready, consumer):
        ready.synchronize()
        real(self, ready, consumer)

    patch.setattr(Lanes, "hand_over", hand_over)


@pytest.mark.parametrize(
    ("mutate", "name", "rule", "words"),
    [
        (no_consumer_wait, "plain", UNREADY, "default reads result"),
        (no_consumer_wait, "depth 0", UNREADY, "default reads labels"),
        (consumer_of_the_first_batch, "switching streams", UNREADY, "second reads"),
        (no_reverse_wait, "plain", REUSED, "last use: default reads"),
        (no_reverse_wait, "depth 0", REUSED, "last use: default reads"),
        (no_reverse_wait, "interleaved", REUSED, "last use: default reads"),
        (reverse_wait_on_another_lane, "plain", REUSED, "copy lane writes"),
        (reverse_wait_for_another_stream, "another stream", REUSED, "last use: second reads"),
        (reverse_wait_for_the_last_consumer_alone, "switching streams", REUSED, "last use: default reads"),
        (reverse_wait_for_the_step_before, "plain", REUSED, "last use: default reads"),
        (record_on_the_producer, "plain", REUSED, "last use: default reads"),
        (wait_for_the_tail, "plain", OVERWAITED, "behind the work of stage/feature lane"),
        (one_event_recorded_again, "plain", OVERWAITED, "behind the work of stage/feature lane"),
        (wait_when_launched, "plain", OVERWAITED, "behind the work of copy lane"),
        (mark_before_the_last_write, "plain", UNREADY, "default reads result"),
        (mark_before_the_last_write, "no stages", UNREADY, "copy lane writes"),
        (labels_on_a_stream_of_their_own, "plain", UNREADY, "default reads labels"),
        (labels_copied_after_the_mark, "plain", UNREADY, "default reads labels"),
        (no_wait_between_lanes, "plain", UNREADY, "stage/transform lane reads images"),
        (no_join_of_branches, "branches", UNREADY, "default reads result"),
        (intermediates_not_kept, "plain", REUSED, "last use: stage/transform lane reads images"),
        (intermediates_dropped_without_waiting, "plain", REUSED, "last use: stage/transform lane reads images"),
        (intermediates_dropped_before_waiting_on_the_stage, "plain", REUSED, "copy lane writes images"),
    ],
)
def test_a_broken_protocol_is_caught(mutate, name, rule, words):
    history, _ = run(SCENARIOS[name], mutate)
    assert any(violation.rule == rule and words in violation.text for violation in history.violations), history.report()


def test_a_host_that_waits_is_caught():
    history, stats = run(SCENARIOS["plain"], host_wait)
    assert history.syncs > stats.held_back


@pytest.mark.parametrize("name", ["plain", "no stages", "left early", "interleaved", "sources kept"])
def test_recording_on_the_consumer_is_ordered_too(name):
    # The other protocol for reuse, and the only one for memory that is not ours: the checker must not call it a race.
    history, _ = run(SCENARIOS[name], record_on_the_consumer)
    assert not history.violations, history.report()


class Resident(torch.Tensor):
    """A tensor that was on the device before the loader saw it."""

    device = torch.device("cuda", 0)

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


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("announced", [True, False])
def test_weights_change_in_order_within_update_and_only_there(cuda, monkeypatch, announced, branches):
    script_arrivals(monkeypatch, [True])
    weight = cuda.new("weight", batch=-1)

    class Weighted(nn.Module):
        def forward(self, *values):
            cuda.read(weight)
            return kernel(cuda, *values)

    stage = FeatureStage({"a": Weighted(), "b": Weighted()} if branches else Weighted(), capture="never")
    streamed = StreamedLoader(Source(cuda, 12), [stage], device="cuda")
    for received in streamed:
        cuda.read(*batch.leaves(received))
        with stage.update() if announced else nullcontext():
            cuda.write(weight)
    rules = {violation.rule for violation in cuda.history.violations}
    assert rules == (set() if announced else {OVERWRITTEN}), cuda.history.report()


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


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_what_was_launched_ahead_is_not_in_the_state(cuda, monkeypatch, depth):
    class Stateful(Source):
        def state_dict(self):
            raise AssertionError("its batches bring it along")

        def load_state_dict(self, state):
            pass

    class Dated(ListFeed):
        pulled = 0

        def _get(self, block):
            found = super()._get(block)
            self.pulled += 1
            found.state = self.pulled
            return found

    monkeypatch.setattr(supply, "open_feed", lambda source, current_stream, *_: Dated(source, iter(source), current_stream))
    streamed = StreamedLoader(Stateful(cuda, 6), device="cuda", depth=depth)
    for number, _ in enumerate(streamed, start=1):
        (feed,) = streamed._feeds
        assert feed.pulled >= min(number + depth, 7)
        state = streamed.state_dict()
        assert (state["source"], state["batch"], state["ended"]) == (number, number, False)
    state = streamed.state_dict()
    assert (state["source"], state["batch"], state["ended"]) == (7, 6, True)


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


class Encoding(UserDict):
    """A mapping that is moved by its own ``to``, in place."""

    def to(self, device, non_blocking=False):
        self.data = {key: value.to(device) for key, value in self.items()}
        return self


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


def most_ahead(cuda, streamed, epochs=1):
    """The most batches that were launched and not known to be done with, over a training run."""
    history, ends, most = cuda.history, [], 0
    for received in itertools.chain.from_iterable(itertools.repeat(streamed, epochs)):
        cuda.read(*received)
        ends.append(cuda.Event())
        ends[-1].record()
        launched = sum(line.startswith("alloc images") for line in history.log)
        most = max(most, launched - sum(end.query() for end in ends))
    return most


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_the_host_is_held_back_a_bounded_number_of_batches_ahead(cuda, monkeypatch, depth):
    script_arrivals(monkeypatch, [True])
    streamed = StreamedLoader(Source(cuda, 20), device="cuda", depth=depth)
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


def test_a_batch_in_flight_is_not_held_up_by_a_slow_loader(cuda):
    asked, answer = threading.Event(), threading.Event()

    def source():
        yield cuda.host_batch()
        yield cuda.host_batch()
        asked.set()
        assert answer.wait(10), "next() waited for the loader"
        yield cuda.host_batch()

    iterator = iter(StreamedLoader(source(), device="cuda"))
    next(iterator)
    assert asked.wait(10)
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


def exhaust(streamed):
    list(streamed)


def leave(streamed):
    for _ in streamed:
        break


def drop(streamed):
    iterator = iter(streamed)
    next(iterator)
    del iterator


def interrupt(streamed):
    with suppress(KeyboardInterrupt):
        for _ in streamed:
            raise KeyboardInterrupt


def fail(streamed):
    def fail_here(images):
        raise ZeroDivisionError

    streamed.stages = [fail_here]
    with pytest.raises(ZeroDivisionError):
        next(iter(streamed))


@pytest.mark.parametrize("end", [exhaust, leave, drop, interrupt, fail])
def test_the_thread_ends_with_the_iterator(cuda, end):
    before = set(threading.enumerate())
    streamed = StreamedLoader(Source(cuda, 8), device="cuda")
    end(streamed)
    assert set(threading.enumerate()) <= before
    streamed.stages = []
    assert len(list(streamed)) == 8  # and can be iterated again


def test_the_thread_ends_with_close(cuda):
    before = set(threading.enumerate())
    streamed = StreamedLoader(Source(cuda, 8), device="cuda")
    iterator = iter(streamed)
    next(iterator)
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["gpuaug-feed"]
    streamed.close()
    assert set(threading.enumerate()) <= before


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
