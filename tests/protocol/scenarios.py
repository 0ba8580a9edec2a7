"""Randomised orders of use for the double of the stream layer, and a loader over it."""

import itertools
import threading
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from support.gpu.stream_double import Buffer, FakeCuda, FakeStream
from torch import nn

from gpuaug import FeatureStage, StreamedLoader, TransformStage, step_first
from gpuaug.core import batch, devices, rng, streams
from gpuaug.feed import feed
from gpuaug.feed.mailbox import Pulled
from gpuaug.feed.prefetch import FeedIterator, make_pull
from gpuaug.feed.wrapped_loader import begin_after
from gpuaug.stages import cuda_graph, feature, graph_memory


@dataclass(frozen=True)
class Step:
    """One turn of the training loop."""

    iterator: int = 0
    """Which of two open iterators the batch comes from."""
    stream: int = 0
    """The stream that is current: the default one, or one of two others."""
    first: bool = False
    """Whether the turn is taken inside of ``step_first``."""
    keep: bool = False
    """Whether the batch outlives the step. Kept ones are read again in every later step, on the stream of that step."""
    forget: bool = False
    """Whether what was kept is dropped at the end of the step."""
    leave: bool = False
    """Whether the iterator is left after the step."""
    stages: tuple[str, ...] | None = None
    """What the loader's stages are replaced with before the step."""
    renew: bool = False
    """Whether the loader is dropped before the step, with its iterators, and another takes its place."""


@dataclass(frozen=True)
class Scenario:
    stages: tuple[str, ...] = ("augment", "encode")
    steps: tuple[Step, ...] = (Step(),) * 12
    depth: int = 2
    batches: int = 5
    shapes: int = 1
    """Shapes that batches have in turns."""
    there: tuple[bool, ...] = (True,)
    """Whether the loader has a batch when it is asked without waiting, over and over."""


BRANCHES = ("images beside", "labels encoded")
STRUCTURED = ("latents", "text")
KINDS = (
    "augment",
    "beside",
    "both",
    "branches",
    "captured",
    "captured branches",
    "encode",
    "flaky",
    "in place",
    "whole",
    *BRANCHES,
    *STRUCTURED,
)
BESIDE = ("augment", *BRANCHES)
BUCKETS = {"stages": ("augment", *STRUCTURED), "batches": 7, "shapes": 2}
SWITCHING = tuple(Step(stream=number % 3, keep=number % 4 == 0, forget=number % 4 == 3) for number in range(14))
FIRST = tuple(replace(step, first=number % 5 != 0) for number, step in enumerate(SWITCHING))
INTERLEAVED = tuple(Step(iterator=number % 2) for number in range(14))
HANDED_DOWN = (Step(stream=1, keep=True), Step(stream=1), Step(renew=True, forget=True), Step(), Step(renew=True))

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
    "step first": Scenario(steps=FIRST, batches=9),
    "step first, captured": Scenario(stages=("augment", "captured"), steps=FIRST, batches=9),
    "another stream": Scenario(steps=(Step(stream=1),) * 12),
    "interleaved": Scenario(steps=INTERLEAVED),
    "left early": Scenario(steps=(Step(), Step(keep=True, leave=True)) * 6),
    "new stages": Scenario(steps=(Step(), Step(), Step(leave=True), Step(stages=("both", "encode")), *[Step()] * 6)),
    "new loaders": Scenario(steps=HANDED_DOWN * 8),
    "error": Scenario(stages=("augment", "flaky", "encode"), steps=(Step(),) * 14),
    "long chain": Scenario(stages=("augment", "both", "whole", "encode")),
    "sources kept": Scenario(stages=("augment", "beside", "beside")),
    "in place": Scenario(stages=("in place", "beside", "in place")),
    "branches": Scenario(stages=("augment", "branches")),
    "branches first": Scenario(stages=("branches", "augment")),
    "captured": Scenario(stages=("augment", "captured")),
    "captured, depth 0": Scenario(stages=("augment", "captured"), depth=0, steps=(Step(keep=True),) * 8),
    "captured first": Scenario(stages=("captured", "augment")),
    "captured branches": Scenario(stages=("augment", "captured branches")),
    "stages beside one another": Scenario(stages=BESIDE),
    "stages beside one another, depth 0": Scenario(stages=BESIDE, depth=0, steps=(Step(keep=True),) * 8),
    "stages beside one another, then one": Scenario(
        stages=(*BESIDE, "labels encoded", "in place", "encode"), steps=SWITCHING, batches=9
    ),
    "stages beside one another, and an error": Scenario(stages=(*BESIDE, "flaky"), steps=(Step(),) * 14),
    "structured results": Scenario(**BUCKETS),
    "structured results, depth 0": Scenario(**BUCKETS, depth=0, steps=(Step(keep=True),) * 16),
    "structured results, depth 1": Scenario(**BUCKETS, depth=1, steps=SWITCHING),
    "structured results, depth 5": Scenario(**BUCKETS, depth=5, steps=(Step(keep=True), Step(forget=True)) * 9),
    "structured results, interleaved": Scenario(**BUCKETS, steps=INTERLEAVED),
    "structured results, slow loader": Scenario(**BUCKETS, there=(True, False, False), steps=SWITCHING),
    "structured results, left early": Scenario(**BUCKETS, steps=(Step(), Step(keep=True), Step(leave=True)) * 6),
    "structured results, then one": Scenario(stages=(*STRUCTURED, "text", "in place", "encode"), shapes=3, batches=9),
    "structured results, and an error": Scenario(stages=(*STRUCTURED, "flaky"), shapes=2, steps=(Step(),) * 14),
    "one module in two stages": Scenario(stages=("augment", "shared", "shared")),
    "captured by new loaders": Scenario(stages=("captured",), steps=HANDED_DOWN * 4),
    "structured results by new loaders": Scenario(**BUCKETS, steps=HANDED_DOWN * 4),
}


class FakeTorch:
    """Stands for ``torch`` where graphs are captured: its tensors are buffers of the double."""

    Tensor = Buffer

    def __init__(self, cuda):
        self.cuda = cuda

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty_like(self, value):
        return value.like("static")


def install(patch, **options):
    """Put a double in the place of the stream layer."""
    cuda = FakeCuda(**options)
    for module in (devices, streams):
        patch.setattr(module, "cuda", cuda)
    patch.setattr(streams, "_CudaEvent", cuda.Event)
    patch.setattr(streams, "_switch_to", lambda stream: partial(cuda.set_stream, stream))
    patch.setattr(streams, "current_device", cuda.current_device)
    patch.setattr(streams, "current_stream", lambda gpu: cuda.current_stream().cuda_stream)
    patch.setattr(streams, "_idle", defaultdict(list))
    patch.setattr(streams, "_step_lanes", threading.local())
    patch.setattr(streams, "resolve", lambda device: devices.with_index(torch.device(device or "cuda")))
    patch.setattr(rng, "device_generator", lambda device: None)
    patch.setattr(feed, "unsupported_reason", lambda: "the double has no page-locked memory")
    patch.setattr(cuda_graph, "torch", FakeTorch(cuda))
    patch.setattr(cuda_graph, "_OUTPUT_TYPES", (Buffer,))
    patch.setattr(graph_memory, "torch", FakeTorch(cuda))
    patch.setattr(graph_memory.Pool, "is_deleted_pool_cached", False)
    patch.setattr(feature, "default_max_bytes", lambda device: 1 << 30)
    return cuda


def name_lanes(cuda, loader):
    device_setup = loader._shared.device_setup
    assert len(device_setup.bound_stages) == len(loader.stages), "without them there are not all lanes"
    for name, lane in device_setup.lanes._lanes.items():
        lane.stream.name = f"{name} lane"


class Source:
    """A loader of ``length`` host batches, each in the form that ``form`` gives to images and labels."""

    def __init__(self, cuda, length, form=tuple):
        self._cuda = cuda
        self._length = length
        self._form = form

    def __iter__(self):
        return (self._form(self._cuda.host_batch()) for _ in range(self._length))


def read_with(patch, feed_type):
    """Let loaders be read by iterators of this subclass of ``FeedIterator``, on the training thread."""

    def open_feed_iterator(source, current_stream, *_):
        iterator, read_state = begin_after(source)
        return feed_type(source, iterator, make_pull(iterator, read_state, current_stream), read_state(None))

    patch.setattr(feed, "open_feed_iterator", open_feed_iterator)


def script_arrivals(patch, there):
    """Let a script say whether a batch is there when it is asked for, not the timing of threads."""
    script = itertools.cycle(there)

    class ScriptedFeedIterator(FeedIterator):
        def _get(self, block):
            if not (block or next(script)):
                return None
            try:
                return super()._get(block)
            except Exception as error:
                return Pulled(error=error, ended=True)

    read_with(patch, ScriptedFeedIterator)


def kernel(cuda, *values):
    """Read all of ``values`` into a temporary, and that into a result."""
    inputs = batch.leaves(values)
    cuda.read(*inputs)
    temporary = cuda.new("temporary", inputs[0].batch)
    cuda.read(temporary, *inputs)
    return cuda.new("result", inputs[0].batch)


class Caching(nn.Module):
    """An encoder that keeps what its first call makes, as tables of positions are kept. One for two stages."""

    def __init__(self, cuda):
        super().__init__()
        self._cuda = cuda
        self._cache = None

    def forward(self, *values):
        if self._cache is None:
            self._cache = self._cuda.new("cache", 0)
        self._cuda.read(self._cache)
        return kernel(self._cuda, *values)


class Encoder(nn.Module):
    def __init__(self, cuda, pair=False):
        super().__init__()
        self._cuda = cuda
        self._pair = pair

    def forward(self, *values, **named):
        result = kernel(self._cuda, *values, *named.values())
        return (result, named) if self._pair else result


@dataclass
class Encoded:
    first: object
    rest: object


class Structured(nn.Module):
    """An encoder that is called by a method and by keyword, and gives a dataclass of kernels' results."""

    def __init__(self, cuda):
        super().__init__()
        self._cuda = cuda

    def encode(self, *, values):
        first = kernel(self._cuda, values)
        return Encoded(first, {"second": (kernel(self._cuda, first), [first]), "input": values})


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
        case "captured":
            return FeatureStage(Encoder(cuda))
        case "captured branches":
            return FeatureStage({"a": Encoder(cuda), "b": Encoder(cuda)})
        case "images beside":
            return FeatureStage(Encoder(cuda), on=0, into=2)
        case "labels encoded":
            return FeatureStage(Encoder(cuda, pair=True), on={1: "labels"}, into=1, output=0)
        case "latents":
            return FeatureStage(Structured(cuda).encode, on={0: "values"}, into=2)
        case "text":
            return FeatureStage(Structured(cuda).encode, on={1: "values"}, into=1, output=lambda encoded: encoded.rest)
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
        self._cuda = cuda
        self._scenario = scenario
        cuda.shape_of = lambda batch: (batch % scenario.shapes,)
        self.stats = []
        self._renew()
        self._streams = [cuda.default, FakeStream(cuda, "second"), FakeStream(cuda, "third")]
        self._kept = []
        for step in scenario.steps:
            self._take(step)

    @staticmethod
    def _make(cuda, kinds):
        shared = Caching(cuda)
        members = iter((0, 1))
        return [
            FeatureStage(shared, on=next(members), capture="never") if kind == "shared" else make_stage(cuda, kind)
            for kind in kinds
        ]

    @property
    def held_back(self):
        return sum(stats.held_back for stats in self.stats)

    def _renew(self):
        self._iterators, self.loader = {}, None  # the old one goes first: what it had is for the new one
        source, stages = Source(self._cuda, self._scenario.batches), self._make(self._cuda, self._scenario.stages)
        self.loader = StreamedLoader(source, stages, device="cuda", depth=self._scenario.depth)
        self.stats.append(self.loader.stats())

    def _take(self, step):
        if step.renew:
            self._renew()
        if step.stages is not None:
            self.loader.stages = self._make(self._cuda, step.stages)
        name_lanes(self._cuda, self.loader)
        with self._cuda.stream(self._streams[step.stream]), step_first() if step.first else nullcontext():
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
        self._cuda.history.receive(stream, buffers[0].batch, [buffer.key for buffer in buffers])
        event = self._cuda.Event()
        event.record(stream)
        self._cuda.read(*buffers, *buffers)
        if step.keep:
            self._kept.append((received, event))
        for kept, handed_over in self._kept:
            handed_over.wait(stream)  # who reads on another stream than the batch was handed over on orders that
            self._cuda.read(*batch.leaves(kept))
        if step.forget:
            self._kept.clear()


def run(scenario, mutate=None):
    """Run the real loader through ``scenario``: the history, and the training loop."""
    with pytest.MonkeyPatch.context() as patch:
        cuda = install(patch)
        script_arrivals(patch, scenario.there)
        if mutate is not None:
            mutate(patch, cuda)
        loop = TrainingLoop(cuda, scenario)
        loop.loader.close()
    return cuda.history, loop


STEPS = st.builds(
    Step,
    iterator=st.sampled_from([0, 0, 0, 1]),
    stream=st.sampled_from([0, 0, 0, 1, 2]),
    first=st.booleans(),
    keep=st.booleans(),
    forget=st.booleans(),
    leave=st.sampled_from([False, False, False, True]),
    stages=st.none() | st.none() | st.lists(st.sampled_from(KINDS), max_size=3).map(tuple),
    renew=st.sampled_from([False, False, False, False, True]),
)
ANY_SCENARIO = st.builds(
    Scenario,
    stages=st.lists(st.sampled_from(KINDS), max_size=3).map(tuple),
    # What a broken order damages shows when memory is used again, so every scenario ends with a few plain steps.
    steps=st.lists(STEPS, max_size=16).map(lambda steps: (*steps, *[Step()] * 4)),
    depth=st.sampled_from([0, 1, 2, 5]),
    batches=st.integers(0, 7),
    shapes=st.sampled_from([1, 1, 2, 3]),
    there=st.lists(st.booleans(), min_size=1, max_size=5).map(tuple),
)
