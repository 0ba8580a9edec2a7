"""Nothing is unordered in any scenario, and the checker finds every way in which the protocol may be broken."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from protocol.scenarios import ANY_SCENARIO, SCENARIOS, Encoded, run
from support.gpu.stream_double import Buffer, FakeGraph, HostBuffer
from support.gpu.stream_history import CHANGED, OVERWAITED, OVERWRITTEN, REUSED, UNREADY

from gpuaug.core import batch
from gpuaug.core.streams import Lane, Lanes
from gpuaug.loader.branches import Branches
from gpuaug.loader.iterator import PipelinedIterator
from gpuaug.stages import cuda_graph
from gpuaug.stages.cuda_graph import GraphRunner
from gpuaug.stages.feature import _BoundFeature


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_unordered(name):
    history, loop = run(SCENARIOS[name])
    assert not history.violations, history.report()
    assert history.syncs == loop.held_back  # the host waits for the bound on its run-ahead, and for nothing else


@settings(deadline=None, max_examples=30)
@given(ANY_SCENARIO)
def test_nothing_is_unordered_in_any_scenario(scenario):
    history, loop = run(scenario)
    assert not history.violations, history.report()
    assert history.syncs == loop.held_back


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
        self.copy.wait(Lane("default", cuda.default).record_event())

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
    real = PipelinedIterator.pop

    def pop(self, consumer):
        handed_over = real(self, consumer)
        for buffer in batch.leaves(handed_over):
            buffer.record_stream(stream_of(buffer, consumer))
        return handed_over

    patch.setattr(PipelinedIterator, "pop", pop)
    patch.setattr(Lanes, "wait_for_consumers", lambda self, consumer, mark: None)


def record_on_the_producer(patch, cuda):
    record_instead(patch, lambda buffer, consumer: buffer.stream)


def record_on_the_consumer(patch, cuda):
    record_instead(patch, lambda buffer, consumer: consumer.stream)


def wait_for_the_tail(patch, cuda):
    real = Lanes.hand_over

    def hand_over(self, ready, consumer):
        last = list(self._lanes.values())[-1]
        real(self, last.record_event(), consumer)

    patch.setattr(Lanes, "hand_over", hand_over)


def one_event_recorded_again(patch, cuda):
    events = {}

    def record_event(self, *, timed=False):
        event = events.setdefault(self.stream, cuda.Event())
        event.record(self.stream)
        return event

    patch.setattr(Lane, "record_event", record_event)


def wait_when_launched(patch, cuda):
    real = PipelinedIterator._launch

    def launch(self, pulled):
        real(self, pulled)
        Lane("consumer", cuda.default).wait(self.launched_batches[-1].ready)

    patch.setattr(PipelinedIterator, "_launch", launch)


def mark_before_the_last_write(patch, cuda):
    make_current, record_event, early = Lane.make_current, Lane.record_event, {}

    def make_current_from(self):
        early[self.name] = record_event(self)
        make_current(self)

    def record_event_from(self, *, timed=False):
        return early.pop(self.name, None) or record_event(self, timed=timed)

    patch.setattr(Lane, "make_current", make_current_from)
    patch.setattr(Lane, "record_event", record_event_from)


def labels_on_a_stream_of_their_own(patch, cuda):
    real, other = HostBuffer.to, cuda.Stream()

    def to(self, device, non_blocking=False):
        with cuda.stream(other if self.name == "labels" else cuda.current_stream()):
            return real(self, device, non_blocking)

    patch.setattr(HostBuffer, "to", to)


def labels_copied_after_the_mark(patch, cuda):
    real = PipelinedIterator.pop

    def pop(self, consumer):
        images, labels = real(self, consumer)
        with cuda.stream(self._lanes.copy.stream):
            cuda.write(labels)
        return images, labels

    patch.setattr(PipelinedIterator, "pop", pop)


def no_wait_between_lanes(patch, cuda):
    real = Lane.wait
    patch.setattr(Lane, "wait", lambda self, mark: None if self.name.startswith("stage") else real(self, mark))


def no_join_of_branches(patch, cuda):
    def run_without(self, values, ready, position, memory):
        for branch in self._branches.values():
            branch.lane.wait(ready)
        return {name: branch.run(values, position, memory) for name, branch in self._branches.items()}

    patch.setattr(_BoundFeature, "run", run_without)


def no_join_of_stages_beside_one_another(patch, cuda):
    patch.setattr(Branches, "join", lambda self, lane, new_event=False: lane.record_event())


def stages_beside_one_another_whatever_they_read(patch, cuda):
    patch.setattr(Branches, "_were_present_at_start", lambda self, values: True)


def first_batch_beside_one_another(patch, cuda):
    real = Branches.__init__
    patch.setattr(Branches, "__init__", lambda self, ready, concurrent: real(self, ready, concurrent=True))


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


def consumers_of_the_former_loader_forgotten(patch, cuda):
    real = Lanes.__init__

    def made(self, device):
        real(self, device)
        self._consumers.clear()

    patch.setattr(Lanes, "__init__", made)


def outputs_not_cloned(patch, cuda):
    patch.setattr(Buffer, "clone", lambda self: self)


def nested_outputs_not_cloned(patch, cuda):
    class Outermost:
        cached_by_id = staticmethod(batch.cached_by_id)
        leaves = staticmethod(batch.leaves)
        tensors = staticmethod(batch.tensors)

        @staticmethod
        def map_leaves(function, value):
            return replace(value, first=function(value.first)) if isinstance(value, Encoded) else value

    patch.setattr(cuda_graph, "batches", Outermost)


def outputs_cloned_by_the_consumer(patch, cuda):
    on_stream(patch, Buffer, "clone", cuda, lambda: cuda.default)


def outputs_cloned_before_the_replay(patch, cuda):
    real, waiting = FakeGraph.replay, []

    def clone(self):
        cuda.read(self)
        while waiting:
            waiting.pop()()
        return cuda.new("clone", self.batch)

    patch.setattr(FakeGraph, "replay", lambda self: waiting.append(lambda: real(self)))
    patch.setattr(Buffer, "clone", clone)


def replayed_on_another_stream(patch, cuda):
    other = cuda.Stream()
    on_stream(patch, FakeGraph, "replay", cuda, lambda: other)


def inputs_written_on_the_copy_lane(patch, cuda):
    copy_lanes = []
    real = Lanes.__init__

    def made(self, device):
        real(self, device)
        copy_lanes.append(self.copy.stream)

    patch.setattr(Lanes, "__init__", made)
    on_stream(patch, Buffer, "copy_", cuda, lambda: copy_lanes[-1])


def inputs_not_written(patch, cuda):
    patch.setattr(Buffer, "copy_", lambda self, source: None)


def graphs_shared_by_lanes(patch, cuda):
    real, shared = GraphRunner.__init__, {}

    def made(self, *args):
        real(self, *args)
        self._graphs = shared.setdefault("graphs", self._graphs)

    patch.setattr(GraphRunner, "__init__", made)


def on_stream(patch, owner, name, cuda, stream):
    """Queue what ``name`` launches on a stream of its own, ordered after nothing and before nothing."""
    real = getattr(owner, name)

    def moved(self, *args):
        with cuda.stream(stream()):
            return real(self, *args)

    patch.setattr(owner, name, moved)


def host_wait(patch, cuda):
    real = Lanes.hand_over

    def hand_over(self, ready, consumer):
        ready.synchronize()
        real(self, ready, consumer)

    patch.setattr(Lanes, "hand_over", hand_over)


@pytest.mark.parametrize(
    ("mutate", "name", "rule", "words"),
    [
        (no_consumer_wait, "plain", UNREADY, "default reads clone"),
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
        (mark_before_the_last_write, "plain", UNREADY, "default reads clone"),
        (mark_before_the_last_write, "no stages", UNREADY, "copy lane writes"),
        (labels_on_a_stream_of_their_own, "plain", UNREADY, "default reads labels"),
        (labels_copied_after_the_mark, "plain", UNREADY, "default reads labels"),
        (no_wait_between_lanes, "plain", UNREADY, "stage/transform lane reads images"),
        (no_join_of_branches, "branches", UNREADY, "default reads clone"),
        (no_join_of_stages_beside_one_another, "stages beside one another", UNREADY, "default reads clone"),
        (stages_beside_one_another_whatever_they_read, "stages beside one another, then one", UNREADY, "reads clone"),
        (first_batch_beside_one_another, "one module in two stages", UNREADY, "reads cache"),
        (intermediates_not_kept, "plain", REUSED, "last use: stage/transform lane reads images"),
        (intermediates_dropped_without_waiting, "plain", REUSED, "last use: stage/transform lane reads images"),
        (intermediates_dropped_before_waiting_on_the_stage, "plain", REUSED, "copy lane writes images"),
        (consumers_of_the_former_loader_forgotten, "new loaders", REUSED, "last use: second reads"),
        (outputs_not_cloned, "captured", UNREADY, "default reads result"),
        (outputs_not_cloned, "captured, depth 0", CHANGED, "stage/feature lane writes result"),
        (outputs_not_cloned, "structured results", UNREADY, "default reads result"),
        (outputs_not_cloned, "structured results, depth 0", CHANGED, "stage/feature lane writes result"),
        (nested_outputs_not_cloned, "structured results, depth 0", CHANGED, "stage/feature lane writes result"),
        (no_consumer_wait, "structured results", UNREADY, "default reads clone"),
        (no_reverse_wait, "structured results", REUSED, "last use: default reads"),
        (wait_for_the_tail, "structured results", OVERWAITED, "behind the work of stage/feature_2 lane"),
        (no_join_of_stages_beside_one_another, "structured results", UNREADY, "default reads clone"),
        (stages_beside_one_another_whatever_they_read, "structured results, then one", UNREADY, "reads clone"),
        (inputs_not_written, "structured results", UNREADY, "stage/feature lane reads static"),
        (outputs_cloned_by_the_consumer, "captured", UNREADY, "default reads result"),
        (outputs_cloned_before_the_replay, "captured", UNREADY, "stage/feature lane reads result"),
        (replayed_on_another_stream, "captured", UNREADY, "stage/feature lane reads result"),
        (replayed_on_another_stream, "captured", OVERWRITTEN, "stage/feature lane writes static"),
        (inputs_written_on_the_copy_lane, "captured", OVERWRITTEN, "copy lane writes static"),
        (inputs_written_on_the_copy_lane, "captured", UNREADY, "stage/feature lane reads static"),
        (inputs_not_written, "captured", UNREADY, "stage/feature lane reads static"),
        (graphs_shared_by_lanes, "captured branches", OVERWRITTEN, "stage/feature/b lane writes static"),
    ],
)
def test_a_broken_protocol_is_caught(mutate, name, rule, words):
    history, _ = run(SCENARIOS[name], mutate)
    assert any(violation.rule == rule and words in violation.text for violation in history.violations), history.report()


def test_a_host_that_waits_is_caught():
    history, loop = run(SCENARIOS["plain"], host_wait)
    assert history.syncs > loop.held_back


@pytest.mark.parametrize("name", ["plain", "no stages", "left early", "interleaved", "sources kept"])
def test_recording_on_the_consumer_is_ordered_too(name):
    # The other protocol for reuse, and the only one for memory that is not ours: the checker must not call it a race.
    history, _ = run(SCENARIOS[name], record_on_the_consumer)
    assert not history.violations, history.report()
