"""How far ahead a loader works, and what ``depth="auto"`` makes of its own measurements.

Time is that of the double's device, which tests turn: nothing here depends on how fast the machine is.
"""

import itertools
import threading
from dataclasses import replace

import kornia.augmentation as K
import pytest
import torch
from double import HostBuffer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_protocol import ANY_SCENARIO, SCENARIOS, Encoder, Source, Step, install, kernel, run, script_arrivals
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import gpuaug
from gpuaug import ArgumentError, ArgumentTypeError, FeatureStage, StreamedLoader, TransformStage, depth
from gpuaug.depth import AHEAD, COUNT, ROUNDS, SETTLE, WARM, may_communicate
from gpuaug.flight import Flight
from gpuaug.stages import Stage
from gpuaug.streams import Pace

TURNS = [AHEAD if number % 4 in (0, 3) else 0 for number in range(2 * ROUNDS)]
"""How the windows of a measurement are run."""
ALL = WARM + 2 * ROUNDS * (SETTLE + COUNT)
"""How many batches are asked for until everything has been measured, within one epoch."""

MEASURING = "'auto' (still measuring)"


@pytest.fixture
def cuda(monkeypatch):
    """A device that keeps up, and a loader that has a batch whenever it is asked."""
    cuda = install(monkeypatch, keeps_up=True)
    script_arrivals(monkeypatch, [True])
    return cuda


def auto(cuda, batches, *stages):
    return StreamedLoader(Source(cuda, batches), stages, device="cuda", depth="auto")


def augment(cuda):
    return lambda images: kernel(cuda, images)


def decided(loader):
    """What ``repr`` says of the depth."""
    return repr(loader).partition("depth=")[2].partition(", feed=")[0]


class Training:
    """A training loop on a device whose steps take as long as the depth in use says, once the loop has settled.

    Before that, and in the first steps of all, they take a hundred times as long: whoever counts one of these finds out.
    """

    def __init__(self, cuda, loader, streamed_ms, in_line_ms):
        self.loader, self.depths = loader, []
        self._cuda, self._ms = cuda, {AHEAD: streamed_ms, 0: in_line_ms}
        self._warming = WARM + SETTLE - 1

    def epoch(self, most=None):
        """Take an epoch's batches, and return their numbers, in the order in which they were launched."""
        numbers, settling = [], SETTLE - 1
        for images, labels in itertools.islice(self.loader, most):
            self._cuda.history.receive(self._cuda.default, images.batch)
            self._cuda.read(images, labels)
            numbers.append(images.batch)
            now = self.loader.stats().depth
            if len(numbers) > 1 and now != self.depths[-1]:
                settling = SETTLE
            self.depths.append(now)
            self._cuda.now_ms += self._ms[now] * (100 if settling > 0 or self._warming > 0 else 1)
            settling, self._warming = settling - 1, self._warming - 1
        return numbers


def measured(cuda, streamed_ms, in_line_ms):
    training = Training(cuda, auto(cuda, ALL + 10), streamed_ms, in_line_ms)
    training.epoch()
    return training


# What it decides


@pytest.mark.parametrize(
    ("streamed_ms", "in_line_ms", "chosen"),
    [(8, 10, AHEAD), (10, 8, 0), (10, 10, AHEAD), (10, 9.95, AHEAD), (10, 10.04, AHEAD), (10, 9.81, AHEAD), (10, 9.79, 0)],
)
def test_the_faster_way_is_kept_and_streaming_where_there_is_no_telling(cuda, streamed_ms, in_line_ms, chosen):
    training = measured(cuda, streamed_ms, in_line_ms)
    loader = training.loader
    assert loader._depth.streamed_ms == pytest.approx([streamed_ms] * ROUNDS)
    assert loader._depth.in_line_ms == pytest.approx([in_line_ms] * ROUNDS)
    way = "streamed" if chosen else "in line"
    assert decided(loader) == f"'auto' ({way}: {in_line_ms:.3g} ms a batch in line, {streamed_ms:.3g} streamed)"
    assert loader.depth == "auto"
    assert loader.stats().depth == chosen
    assert training.depths[-1] == chosen
    training.depths.clear()
    training.epoch()
    assert set(training.depths) == {chosen}, "for good"
    assert not cuda.history.violations, cuda.history.report()


def test_windows_take_turns_and_streaming_comes_first(cuda):
    training = measured(cuda, 10, 8)
    runs = [(now, len(list(batches))) for now, batches in itertools.groupby(training.depths)]
    window = SETTLE + COUNT
    # A window ends with the mark before the batch that follows it. Behind the last it goes on as it was, until it decides.
    depths = [AHEAD] * (WARM - 1) + [TURNS[number] for number in range(2 * ROUNDS) for _ in range(window)] + [TURNS[-1]]
    expected = [(now, len(list(batches))) for now, batches in itertools.groupby(depths)]
    assert TURNS[:4] == [AHEAD, 0, 0, AHEAD]
    assert runs == [*expected, (0, 10)]


@pytest.mark.parametrize("period", [2, 4])
def test_what_comes_back_every_few_batches_falls_on_both_ways_alike(cuda, period):
    training = Training(cuda, auto(cuda, ALL + 10), 10, 10)
    for number, _ in enumerate(training.loader):
        cuda.now_ms += 30 if number % period == 0 else 10
    found = training.loader._depth
    assert sum(found.streamed_ms) == pytest.approx(sum(found.in_line_ms))
    assert decided(training.loader).startswith("'auto' (streamed: ")


@pytest.mark.parametrize("growth", [0.999, 1.001])
def test_what_drifts_falls_on_both_ways_alike(cuda, growth):
    training = Training(cuda, auto(cuda, ALL + 10), 10, 10)
    for number, _ in enumerate(training.loader):
        cuda.now_ms += 10 * growth**number
    found = training.loader._depth
    assert sum(found.streamed_ms) == pytest.approx(sum(found.in_line_ms), rel=1e-3)
    assert decided(training.loader).startswith("'auto' (streamed: ")


@pytest.mark.parametrize("slow", range(2 * ROUNDS))
def test_one_window_that_something_held_up_keeps_streaming_or_says_nothing(cuda, slow):
    training = Training(cuda, auto(cuda, ALL + 10), 10, 8)
    held_up = WARM + slow * (SETTLE + COUNT) + SETTLE + COUNT // 2
    batches = iter(training.loader)
    for number, _ in enumerate(batches, start=1):
        now = training.loader.stats().depth
        cuda.now_ms += 5000 if number == held_up else training._ms[now]
    streamed = TURNS[slow] == AHEAD
    found = training.loader._depth.streamed_ms if streamed else training.loader._depth.in_line_ms
    assert [window > 100 for window in found] == [number == slow for number, now in enumerate(TURNS) if now == TURNS[slow]]
    way = "in line" if streamed else "streamed"
    assert decided(training.loader) == f"'auto' ({way}: 8 ms a batch in line, 10 streamed)"


def test_only_marks_of_the_measurement_tell_the_time(cuda, monkeypatch):
    timed, real = [], cuda.Event

    def event(**options):
        timed.append(options["enable_timing"])
        return real(**options)

    monkeypatch.setattr(cuda, "Event", event)
    training = measured(cuda, 8, 10)
    assert sum(timed) == ALL + 1, "one for each batch, and that by which it decided"
    timed.clear()
    training.epoch()
    assert timed
    assert not any(timed)


# When it decides


@pytest.mark.parametrize(("streamed_ms", "in_line_ms"), [(8, 10), (10, 8)])
def test_the_host_waits_no_more_often_than_streaming_would(monkeypatch, streamed_ms, in_line_ms):
    waited = {}
    for setting in (2, "auto"):
        cuda = install(monkeypatch)
        script_arrivals(monkeypatch, [True])
        loader = StreamedLoader(Source(cuda, ALL + 30), [augment(cuda)], device="cuda", depth=setting)
        training = Training(cuda, loader, streamed_ms, in_line_ms)
        assert training.epoch() == list(range(ALL + 30))
        assert cuda.history.syncs == loader.stats().held_back, "for the bound on its run-ahead, and for nothing else"
        assert not cuda.history.violations, cuda.history.report()
        waited[setting] = cuda.history.syncs
    assert set(training.depths) == {0, AHEAD}
    assert "still" not in decided(loader)
    assert waited["auto"] <= waited[2]


def test_it_does_not_decide_before_the_device_has_passed_the_marks(cuda, monkeypatch):
    cuda.keeps_up = False
    monkeypatch.setattr(Pace, "keep", lambda self, mark, ahead: None)
    training = Training(cuda, auto(cuda, ALL + 30), 10, 8)
    batches = iter(training.loader)
    for number, _ in enumerate(batches, start=1):
        cuda.now_ms += training._ms[training.loader.stats().depth]
        if number <= ALL + 10:
            assert decided(training.loader) == MEASURING
        cuda.keeps_up = number >= ALL + 10
    assert decided(training.loader).startswith("'auto' (in line: 8 ms")
    assert cuda.history.syncs == 0


def test_nothing_is_decided_while_a_window_is_to_come(cuda):
    training = Training(cuda, auto(cuda, ALL - 1), 10, 8)
    training.epoch()
    assert training.loader._depth.in_line_ms == []
    assert decided(training.loader) == MEASURING
    training.epoch(most=2)
    assert decided(training.loader).startswith("'auto' (in line: 8 ms")


# Epochs


@pytest.mark.parametrize("most", [None, 33], ids=["to the end", "left by break"])
def test_windows_that_an_epoch_cuts_short_are_begun_anew(cuda, most):
    training = Training(cuda, auto(cuda, 40), 10, 8)
    left, warming = 2 * ROUNDS, WARM
    while left > 0:
        assert decided(training.loader) == MEASURING
        numbers = training.epoch(most)
        assert numbers == list(range(numbers[0], numbers[0] + (most or 40)))
        asked = most or 41  # the end is found by asking too
        left, warming = left - (asked - warming) // (SETTLE + COUNT), 0
    assert training.loader._depth.streamed_ms == pytest.approx([10] * ROUNDS)
    assert training.loader._depth.in_line_ms == pytest.approx([8] * ROUNDS)
    assert decided(training.loader) == "'auto' (in line: 8 ms a batch in line, 10 streamed)"
    assert not cuda.history.violations, cuda.history.report()


def test_epochs_shorter_than_a_window_are_streamed(cuda):
    training = Training(cuda, auto(cuda, 5), 10, 8)
    for epoch in range(40):
        assert training.epoch() == list(range(5 * epoch, 5 * epoch + 5))
    assert decided(training.loader) == MEASURING
    assert set(training.depths) == {AHEAD}
    assert not cuda.history.violations, cuda.history.report()


def test_two_iterators_at_once_are_not_measured(cuda):
    loader = auto(cuda, ALL + 10)
    received = [[], []]
    for pair in zip(loader, loader, strict=True):
        for numbers, (images, _) in zip(received, pair, strict=True):
            cuda.read(images)
            numbers.append(images.batch)
        cuda.now_ms += 1
    assert all(numbers == sorted(numbers) for numbers in received)
    assert sorted(received[0] + received[1]) == list(range(2 * (ALL + 10)))
    assert decided(loader) == MEASURING
    assert loader.stats().depth == AHEAD
    assert not cuda.history.violations, cuda.history.report()
    training = Training(cuda, loader, 10, 8)
    training._warming = 0
    training.epoch()
    assert loader._depth.streamed_ms == pytest.approx([10] * ROUNDS)
    assert decided(loader).startswith("'auto' (in line: 8 ms"), "one by itself is"


def test_an_iterator_that_is_left_while_it_is_measured_is_let_go_of(monkeypatch):
    loader = auto(install(monkeypatch), 8)
    before = set(threading.enumerate())
    batches = iter(loader)
    next(batches)
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["gpuaug-feed"]
    del batches
    assert set(threading.enumerate()) <= before
    assert len(list(loader)) == 8


# What the user says


@pytest.mark.parametrize("change", ["depth", "stages"])
def test_a_new_depth_and_new_stages_are_measured_anew(cuda, change):
    training = measured(cuda, 8, 10)
    loader = training.loader
    assert decided(loader) == "'auto' (streamed: 10 ms a batch in line, 8 streamed)"
    if change == "depth":
        loader.depth = "auto"
    else:
        loader.stages = [augment(cuda)]
    assert (loader.depth, decided(loader)) == ("auto", MEASURING)
    again = Training(cuda, loader, 10, 8)
    again.epoch()
    assert decided(loader) == "'auto' (in line: 8 ms a batch in line, 10 streamed)"
    loader.depth = "auto"
    next(iter(loader))
    assert loader.stats().depth == AHEAD, "what was in line is streamed until it has been measured"


def test_a_number_takes_the_place_of_measuring_and_stays(cuda):
    loader = auto(cuda, 8)
    next(iter(loader))
    loader.depth = 3
    assert (loader.depth, decided(loader)) == (3, "3")
    loader.stages = [augment(cuda)]
    assert loader.depth == 3
    ready = [loader.stats().ready for _ in loader]
    assert ready == [3, 3, 3, 3, 3, 2, 1, 0]
    assert loader.stats().depth == 3


WAY_OUT = "Use 0 for the in-line reference, 2 to overlap, 'auto' to have the faster."


@pytest.mark.parametrize(
    ("given", "kind", "rule"),
    [
        ("Auto", ArgumentTypeError, "a whole number"),
        ("2", ArgumentTypeError, "a whole number"),
        (None, ArgumentTypeError, "a whole number"),
        (1.5, ArgumentTypeError, "a whole number"),
        (-1, ArgumentError, "0 or more"),
    ],
)
def test_anything_else_is_refused_and_changes_nothing(given, kind, rule):
    loader = StreamedLoader([torch.zeros(1)], device="cpu", depth="auto")
    list(loader)
    before = decided(loader)
    with pytest.raises(kind) as caught:
        loader.depth = given
    assert str(caught.value) == f"depth must be {rule}, got {given!r}. {WAY_OUT}"
    assert (loader.depth, decided(loader)) == ("auto", before)
    with pytest.raises(kind):
        StreamedLoader([], device="cpu", depth=given)


# A device without lanes


def test_on_a_cpu_there_is_nothing_to_choose():
    loader = StreamedLoader(list(torch.arange(ALL + 10)), [lambda x: x + 1], device="cpu", depth="auto")
    assert decided(loader) == MEASURING
    for _ in range(2):
        assert [batch.item() for batch in loader] == list(range(1, ALL + 11))
    assert decided(loader) == "'auto' (a cpu runs everything in line)"
    assert loader._depth.now == AHEAD
    assert loader._depth.streamed_ms == []


class OnLanes:
    """Lanes of a CPU that say that they are a GPU's, so that the loader works ahead on them."""

    in_line = False

    def __init__(self, lanes):
        self._lanes = lanes

    def __getattr__(self, name):
        return getattr(self._lanes, name)


def small_windows(patch, rounds=6):
    """Let the way change every other batch."""
    for name, value in {"WARM": 1, "SETTLE": 1, "COUNT": 1, "ROUNDS": rounds}.items():
        patch.setattr(depth, name, value)


@pytest.mark.parametrize("leave_at", [None, 9])
def test_batches_are_those_of_the_reference_bit_for_bit(monkeypatch, leave_at):
    small_windows(monkeypatch, rounds=20)
    stages = [
        lambda x: x[torch.randperm(len(x))] + torch.rand_like(x),
        TransformStage(lambda x: x * torch.randn(()), name="scale"),
        FeatureStage(nn.Linear(3, 2).requires_grad_(False)),
    ]
    source = list(torch.rand(20, 4, 3))
    reference, loader = (StreamedLoader(source, stages, device="cpu", depth=d, seed=3) for d in (0, "auto"))
    loader._machinery.lanes = OnLanes(loader._machinery.lanes)
    used, ready = [], []
    for _ in range(3):
        for ours, theirs in itertools.islice(zip(loader, reference, strict=True), leave_at):
            assert torch.equal(ours, theirs)
            used.append(loader.stats().depth)
            ready.append(loader.stats().ready)
            torch.rand(3)  # the user's own draws
    assert [now for now, _ in itertools.groupby(used)][:5] == [AHEAD, 0, AHEAD, 0, AHEAD]
    assert set(ready) == {0, 1, 2}


# What is ordered while the way changes


BURSTS = tuple(Step(iterator=number // 5 % 2, stream=number // 3 % 3, keep=number % 4 == 0) for number in range(40))
CHANGING = {
    **{name: replace(scenario, depth="auto") for name, scenario in SCENARIOS.items()},
    "long": replace(SCENARIOS["plain"], depth="auto", batches=40, steps=(Step(),) * 45),
    "bursts": replace(SCENARIOS["plain"], depth="auto", batches=20, steps=BURSTS),
    "left often": replace(SCENARIOS["plain"], depth="auto", batches=9, steps=(*[Step()] * 4, Step(keep=True, leave=True)) * 8),
}


@pytest.mark.parametrize("keeps_up", [False, True])
@pytest.mark.parametrize("name", CHANGING)
def test_nothing_is_unordered_while_it_is_measured(name, keeps_up):
    used = []

    def mutate(patch, cuda):
        cuda.keeps_up = keeps_up
        small_windows(patch)
        real = Flight.hand_over

        def hand_over(self, consumer):
            used.append(self._depth.now)
            return real(self, consumer)

        patch.setattr(Flight, "hand_over", hand_over)

    history, stats = run(CHANGING[name], mutate)
    assert not history.violations, history.report()
    assert history.syncs == stats.held_back
    if name in ("long", "bursts", "left often"):
        assert len(list(itertools.groupby(used))) > 6, used


class Scripted:
    """Changes with every batch, as a script says."""

    def __init__(self, script):
        self._script = itertools.cycle(script)
        self.now = 0

    def mark(self, consumer, iterator):
        self.now = next(self._script)
        return consumer.mark()


@settings(max_examples=60)
@given(ANY_SCENARIO, st.lists(st.sampled_from([0, 1, 2, 5]), min_size=2, max_size=7))
def test_nothing_is_unordered_however_the_depth_changes(scenario, script):
    history, stats = run(scenario, lambda patch, cuda: patch.setattr(depth, "Fixed", lambda _: Scripted(script)))
    assert not history.violations, history.report()
    assert history.syncs == stats.held_back


@pytest.mark.parametrize("script", [[2, 0], [5, 0, 0, 1], [0, 0, 0, 2, 2, 2], [3, 2, 1, 0]])
def test_batches_are_complete_and_in_order_however_the_depth_changes(cuda, script):
    loader = auto(cuda, 23)
    loader._depth = Scripted(script)
    for epoch in range(2):
        assert [images.batch for images, _ in loader] == list(range(23 * epoch, 23 * epoch + 23))


def test_batches_that_are_ready_are_handed_over_before_another_is_launched_in_line(cuda):
    loader = auto(cuda, 8)
    loader._depth = Scripted([2, 2, 0, 0, 0, 2, 2, 2, 2])
    launched, ready = [], []
    for _ in loader:
        launched.append(sum(line.startswith("alloc images") for line in cuda.history.log))
        ready.append(loader.stats().ready)
    assert launched == [3, 4, 4, 4, 5, 8, 8, 8]
    assert ready == [2, 2, 1, 0, 0, 2, 1, 0]


# Several ranks


class Own(Stage):
    kind = "own"

    def bind(self, name, lanes):
        raise NotImplementedError


def bare(kind):
    """A module of a kind that can be made only where there are several processes."""
    module = object.__new__(kind)
    nn.Module.__init__(module)
    return module


def frozen(*modules):
    return nn.Sequential(nn.Linear(2, 2), *modules).requires_grad_(False)


class FullyShardedDataParallel(nn.Module):
    """Goes by the name of torch's own, which is not imported to be found."""


class Sharded(FSDPModule, nn.Linear):
    """As ``fully_shard`` makes of a module."""


SILENT = {
    "nothing": list,
    "a module": lambda: [nn.Conv2d(3, 3, 3)],
    "BatchNorm": lambda: [frozen(nn.BatchNorm2d(3))],
    "an encoder": lambda: [FeatureStage(frozen())],
    "a mapping": lambda: [FeatureStage({"a": frozen(), "b": frozen(nn.ReLU())})],
    "DataParallel": lambda: [FeatureStage(bare(nn.DataParallel))],
    "a stage of a module": lambda: [TransformStage(nn.ReLU(), name="named")],
    "fused": lambda: [gpuaug.fuse(K.AugmentationSequential(K.RandomHorizontalFlip()))],
}
TALKING = {
    "a function": lambda: [lambda x: x],
    "a stage of a function": lambda: [TransformStage(len, name="named")],
    "a method": lambda: [frozen().forward],
    "a stage of one's own": lambda: [Own(on=..., into=..., name=None)],
    "SyncBatchNorm": lambda: [FeatureStage(frozen(nn.Sequential(nn.SyncBatchNorm(2))))],
    "SyncBatchNorm in a transform": lambda: [TransformStage(frozen(nn.SyncBatchNorm(2)))],
    "DistributedDataParallel": lambda: [FeatureStage(frozen(bare(DistributedDataParallel)))],
    "in a mapping": lambda: [FeatureStage({"a": frozen(), "b": frozen(nn.SyncBatchNorm(2))})],
    "FullyShardedDataParallel": lambda: [FeatureStage(frozen(bare(FullyShardedDataParallel)))],
    "fully_shard": lambda: [FeatureStage(frozen(bare(Sharded)))],
    "the last of several": lambda: [nn.ReLU(), FeatureStage(frozen()), lambda x: x],
}


def as_given(stages):
    return [stage if isinstance(stage, Stage) else TransformStage(stage) for stage in stages]


@pytest.mark.parametrize("name", SILENT)
def test_stages_that_hold_no_collective_do_not_communicate(name):
    assert may_communicate(as_given(SILENT[name]())) is False


@pytest.mark.parametrize("name", TALKING)
def test_what_holds_a_collective_or_cannot_be_looked_into_may_communicate(name):
    assert may_communicate(as_given(TALKING[name]())) is True


def test_ranks_are_those_of_torch_distributed():
    assert depth.ranks() == 1
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    try:
        assert depth.ranks() == 3
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("communicates", [False, True])
def test_a_rank_does_not_decide_for_itself_where_stages_may_wait_for_others(cuda, monkeypatch, ranks, communicates):
    monkeypatch.setattr(depth, "ranks", lambda: ranks)
    stage = augment(cuda) if communicates else FeatureStage(Encoder(cuda), capture="never")
    training = Training(cuda, auto(cuda, ALL + 10, stage), 10, 8)
    training.epoch()
    if ranks > 1 and communicates:
        assert decided(training.loader) == "'auto' (streamed on all ranks, because stages may wait for those of others)"
        assert set(training.depths) == {AHEAD}
        training.loader.stages = []
        Training(cuda, training.loader, 10, 8).epoch()
    assert decided(training.loader) == "'auto' (in line: 8 ms a batch in line, 10 streamed)"


def test_ranks_that_come_up_while_it_is_measured_end_that(cuda, monkeypatch):
    training = Training(cuda, auto(cuda, 40, augment(cuda)), 10, 8)
    training.epoch(WARM + SETTLE + COUNT)
    assert training.loader.stats().depth == 0
    monkeypatch.setattr(depth, "ranks", lambda: 2)
    training.depths.clear()
    training.epoch()
    assert "on all ranks" in decided(training.loader)
    assert set(training.depths) == {AHEAD}


# Counters


def ready(cuda, **options):
    loader = StreamedLoader(Source(cuda, 5), device="cuda", **options)
    assert (loader.stats().depth, loader.stats().ready) == (0, 0)
    found = [loader.stats().ready for _ in loader]
    return found, loader.stats().depth


@pytest.mark.parametrize(
    ("given", "expected"), [(0, [0] * 5), (1, [1, 1, 1, 1, 0]), (2, [2, 2, 2, 1, 0]), ("auto", [2, 2, 2, 1, 0])]
)
def test_what_was_ready_behind_a_batch_is_counted(cuda, given, expected):
    assert ready(cuda, depth=given) == (expected, AHEAD if given == "auto" else given)


def test_nothing_is_ready_behind_a_batch_of_a_slow_loader(cuda, monkeypatch):
    script_arrivals(monkeypatch, [False])
    assert ready(cuda, depth=2) == ([0] * 5, 2)


def test_nothing_is_ready_on_a_cpu():
    loader = StreamedLoader(torch.arange(4), device="cpu", depth=2)
    assert [loader.stats().ready for _ in loader] == [0] * 4


# The double's clock


def test_the_doubles_events_tell_the_time_as_the_devices_do(cuda):
    cuda.keeps_up = False
    first, last, silent = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True), cuda.Event()
    for event in (first, last, silent):
        cuda.write(HostBuffer(cuda, "x", []).to("cuda"))
        event.record()
        cuda.now_ms += 3
    with pytest.raises(RuntimeError, match="not ready"):
        first.elapsed_time(last)
    silent.synchronize()
    assert first.elapsed_time(last) == 3
    with pytest.raises(ValueError, match="enable_timing"):
        first.elapsed_time(silent)


def test_the_run_ahead_is_bounded_by_the_depth_in_use_when_that_becomes_less():
    class Counted:
        def __init__(self, number):
            self.number = number

        def query(self):
            return False

        def synchronize(self):
            waited.append(self.number)

    waited, pace = [], Pace()
    for number in range(5):
        pace.keep(Counted(number), ahead=4)
    pace.keep(Counted(5), ahead=1)
    pace.keep(Counted(6), ahead=1)
    assert waited == [0, 4, 5]
