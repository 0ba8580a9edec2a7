"""The loader on a real device: equal to the reference whatever is delayed, dropped or overwritten."""

import dataclasses
import gc
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import gpuaug
from gpuaug import FeatureStage, StreamedLoader, TransformStage
from gpuaug.core import streams

pytestmark = pytest.mark.gpu

CYCLES = 20_000_000  # about 10 ms at the clock of a data-centre card: long against every launch in these tests


def host_batches(count=12, size=64, pin=True):
    generator = torch.Generator().manual_seed(0)
    batches = []
    for index in range(count):
        images = torch.randint(0, 256, (8, 3, size, size), dtype=torch.uint8, generator=generator)
        labels = torch.arange(8) + 8 * index
        batches.append((images.pin_memory() if pin else images, labels.pin_memory() if pin else labels))
    return batches


def augment(images):
    """Draws from the device's and the host's generators, and keeps nothing of its intermediates."""
    noisy = images.float() / 255 + torch.rand(images.shape, device=images.device) * torch.rand(1).item()
    return torch.roll(noisy, 1, dims=-1) * 2


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Conv2d(16, 4, 3, stride=2)
        )

    def forward(self, images):
        if not torch.cuda.is_current_stream_capturing():
            poison()
        return self.layers(images)


@pytest.fixture
def encoder():
    return Encoder().cuda().requires_grad_(False)


def checksum(batch):
    images, labels = batch
    return images.double().sum().item(), labels.sum().item()


def poison():
    """Overwrite what the allocator holds free for the current stream with a value that no result may contain."""
    junk = [torch.full((1 << shift,), float("nan"), device="cuda") for shift in range(6, 22)]
    del junk


def poisoning(function):
    """Call ``function`` after all the memory that its lane may now write has been written."""

    def call(*args):
        poison()
        return function(*args)

    return call


def reference(batches, stages, **kwargs):
    return [tuple(t.clone() for t in batch) for batch in StreamedLoader(batches, stages, depth=0, seed=1, **kwargs)]


def stages_for(encoder):
    return [TransformStage(poisoning(augment)), FeatureStage(encoder)]


def assert_same(got, want):
    assert len(got) == len(want)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        for left, right in zip(a, b, strict=True):
            assert torch.equal(left, right), f"batch {index}"


@pytest.mark.parametrize("depth", [1, 2, 5, 20])
def test_every_depth_gives_the_same_bits_kept_for_an_epoch(encoder, depth):
    batches = host_batches()
    want = reference(batches, stages_for(encoder))
    loader = StreamedLoader(batches, stages_for(encoder), depth=depth, seed=1)
    assert_same(list(loader), want)


@pytest.mark.parametrize("slow", ["copy", "stage/transform", "stage/feature", "consumer"])
def test_delayed_lanes_dropped_references_and_poisoned_memory(encoder, slow, monkeypatch):
    batches = host_batches()
    want = [checksum(b) for b in reference(batches, stages_for(encoder))]
    loader = StreamedLoader(batches, stages_for(encoder), depth=2, seed=1)
    lanes = loader._shared.lanes
    gate = lanes.wait_for_consumers

    def delayed(consumer, mark):
        gate(consumer, mark)
        with torch.cuda.stream(lanes.lane(slow).stream):
            torch.cuda._sleep(CYCLES)

    if slow != "consumer":
        monkeypatch.setattr(lanes, "wait_for_consumers", delayed)
    monkeypatch.setattr(loader._shared.copier, "copy", poisoning(loader._shared.copier.copy))
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
        with torch.cuda.stream(loader._shared.lanes.lane(slow).stream):
            torch.cuda._sleep(CYCLES)
    assert_same(got, want)


def test_a_slow_consumer_reads_what_it_was_given_though_the_lanes_go_on(encoder):
    """Without the reverse wait the lanes would write the next batches over what the delayed consumer has yet to read."""
    batches = host_batches(count=20)
    want = [checksum(b) for b in reference(batches, stages_for(encoder))]
    got = []
    for images, labels in StreamedLoader(batches, stages_for(encoder), depth=2, seed=1):
        torch.cuda._sleep(CYCLES)
        got.append((images.double().sum(), labels.sum()))
        del images, labels
    assert [(a.item(), b.item()) for a, b in got] == want


@pytest.mark.parametrize("broken", ["wait_for_consumers", "hand_over", "reclaim"])
def test_the_race_tests_can_fail(encoder, broken, monkeypatch):
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
    transform = loader._shared.lanes.lane("stage/transform")
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


def test_handed_over_on_one_stream_and_dropped_under_another(encoder):
    batches = host_batches(count=20)
    want = [checksum(b) for b in reference(batches, stages_for(encoder))]
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    got, iterator = [], iter(StreamedLoader(batches, stages_for(encoder), depth=2, seed=1))
    for index in range(len(batches)):
        with torch.cuda.stream((one, two)[index % 2]):
            images, labels = next(iterator)
            torch.cuda._sleep(CYCLES)
            got.append((images.double().sum(), labels.sum()))
        with torch.cuda.stream((two, one)[index % 2]):
            del images, labels
    torch.cuda.synchronize()
    assert [(a.item(), b.item()) for a, b in got] == want


def test_two_interleaved_iterators(encoder):
    batches = host_batches()
    loader = StreamedLoader(batches, stages_for(encoder), depth=2, seed=1)
    want = [list(loader), list(loader)]
    loader = StreamedLoader(batches, stages_for(encoder), depth=2, seed=1)
    one, two = iter(loader), iter(loader)
    got = [[next(one)], [next(two)]]
    for first, second in zip(one, two, strict=True):
        got[0].append(first)
        got[1].append(second)
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)


def test_steady_state_does_not_synchronise_the_host(encoder):
    batches = host_batches(count=40)
    loader = StreamedLoader(batches, stages_for(encoder), depth=2, seed=1)
    waits = Counter()
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)  # captures, and allocates what it needs
    synchronize = torch.cuda.Event.synchronize

    def counted(event):
        waits["synchronize"] += 1
        synchronize(event)

    torch.cuda.synchronize()
    held_back = loader.stats().held_back
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda.Event.synchronize = counted
    try:
        for _ in iterator:
            torch.cuda._sleep(CYCLES // 10)
    finally:
        torch.cuda.Event.synchronize = synchronize
        torch.cuda.set_sync_debug_mode(mode)
    assert waits["synchronize"] == loader.stats().held_back - held_back > 0


def test_the_host_stays_a_bounded_number_of_batches_ahead():
    loader = StreamedLoader(host_batches(count=30), depth=2)
    marks = []
    for _ in loader:
        torch.cuda._sleep(CYCLES)
        event = torch.cuda.Event()
        event.record()
        marks.append(event)
        assert sum(not mark.query() for mark in marks) <= loader.depth + 3
    assert loader.stats().held_back > 10


def test_reserved_memory_is_flat_from_the_second_epoch_to_the_fortieth(encoder):
    batches = host_batches(count=5, size=128)
    loader = StreamedLoader(batches, stages_for(encoder), depth=2, seed=1)
    reserved = []
    for _ in range(40):
        for images, _ in loader:
            images.sum()
        del images, _
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert set(reserved[1:]) == {reserved[1]}


def test_pageable_batches_warn_once_and_arrive_whole():
    batches = host_batches(pin=False)
    with pytest.warns(gpuaug.GpuAugWarning, match="must be page-locked .* Pass pin_memory=True") as caught:
        got = list(StreamedLoader(batches))
    assert len(caught) == 1
    assert_same([tuple(t.cpu() for t in batch) for batch in got], batches)


def test_many_small_leaves_travel_in_one_copy():
    leaves = {f"leaf{i}": torch.arange(i + 1, dtype=torch.float32) for i in range(12)}
    loader = StreamedLoader([leaves, leaves])
    next(iter(loader))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        got = list(loader)
        torch.cuda.synchronize()
    copies = sum(event.count for event in profile.key_averages() if "HtoD" in event.key)
    assert copies == 2
    for batch in got:
        assert {name: leaf.tolist() for name, leaf in batch.items()} == {name: leaf.tolist() for name, leaf in leaves.items()}


def test_resident_batches_are_ordered_after_the_stream_they_were_made_on():
    def source():
        side = torch.cuda.Stream()
        for value in range(6):
            with torch.cuda.stream(side):
                torch.cuda._sleep(CYCLES)
                made = torch.full((1 << 20,), float(value), device="cuda")
                yield made

    got = [batch.sum() for batch in StreamedLoader(source(), [lambda x: x * 2], depth=2)]
    assert [total.item() for total in got] == [2.0 * value * (1 << 20) for value in range(6)]


def test_resident_batches_come_back_unharmed_when_cycled():
    resident = [torch.full((1 << 20,), float(value), device="cuda") for value in range(4)]
    loader = StreamedLoader(resident, [TransformStage(lambda x: x * 2)], depth=2)
    for _ in range(3):
        totals = [batch.sum() for batch in loader]
        assert [total.item() for total in totals] == [2.0 * value * (1 << 20) for value in range(4)]


@pytest.mark.multigpu
def test_a_leaf_on_another_gpu_is_refused_at_its_batch():
    batches = [torch.zeros(2, device="cuda:0"), torch.zeros(2, device="cuda:1")]
    iterator = iter(StreamedLoader(batches, device="cuda:0"))
    next(iterator)
    with pytest.raises(gpuaug.DeviceError, match="must be on the CPU or on cuda:0, got a tensor on cuda:1"):
        next(iterator)


def test_the_users_generators_are_as_if_the_stage_had_not_run(encoder):
    torch.manual_seed(3)
    want = torch.rand(4), torch.rand(4, device="cuda")
    torch.manual_seed(3)
    list(StreamedLoader(host_batches(), stages_for(encoder), seed=1))
    assert torch.equal(torch.rand(4), want[0])
    assert torch.equal(torch.rand(4, device="cuda"), want[1])


def test_every_container_and_object_arrives_on_the_device():
    @dataclasses.dataclass
    class Sample:
        image: torch.Tensor
        name: str

    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    batch = {"sample": Sample(torch.ones(2), "a"), "packed": packed, "list": [torch.zeros(1), 3]}
    got = next(iter(StreamedLoader([batch])))
    assert got["sample"].image.is_cuda
    assert got["sample"].name == "a"
    assert got["packed"].data.is_cuda
    assert not got["packed"].batch_sizes.is_cuda
    assert got["list"][0].is_cuda
    assert got["list"][1] == 3


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_batches_than_depth(encoder, count):
    batches = host_batches(count=count)
    assert_same(list(StreamedLoader(batches, stages_for(encoder), depth=5, seed=1)), reference(batches, stages_for(encoder)))


def test_leaving_early_and_failing_leave_the_device_usable(encoder):
    def fails_late(images):
        if images[0, 0, 0, 0] == marker:
            raise ValueError("planted")
        return images.float()

    batches = host_batches()
    marker = batches[5][0][0, 0, 0, 0].item()
    for index in range(5):
        batches[index][0][0, 0, 0, 0] = (marker + 1) % 256
    loader = StreamedLoader(batches, [fails_late], depth=2)
    for _ in range(3):
        for _batch in loader:
            break
        seen = []
        with pytest.raises(ValueError, match="planted") as caught:
            seen.extend(loader)
        assert len(seen) == 5
        assert any("stage 'transform', at batch 5" in note for note in caught.value.__notes__)
    gc.collect()
    torch.cuda.synchronize()


def test_workers_with_a_live_pin_thread():
    dataset = TensorDataset(torch.arange(400.0).view(100, 4), torch.arange(100))
    loader = StreamedLoader(DataLoader(dataset, batch_size=8, num_workers=2, pin_memory=True), [lambda x: x + 1])
    for _ in range(2):
        got = [(x.cpu(), y.cpu()) for x, y in loader]
        assert torch.equal(torch.cat([x for x, _ in got]), dataset.tensors[0] + 1)
        assert torch.equal(torch.cat([y for _, y in got]), dataset.tensors[1])


def test_a_graph_captured_by_the_user_survives_the_feed_thread():
    def endless():
        while True:
            yield torch.randn(64, 64)

    iterator = iter(StreamedLoader(endless(), depth=2))
    next(iterator)
    static, graph = torch.zeros(64, 64, device="cuda"), torch.cuda.CUDAGraph()
    for _ in range(5):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # the mode in which other threads' calls can break a capture
            result = static * 2
        next(iterator)
        static.fill_(3.0)
        graph.replay()
        assert result.sum().item() == 6.0 * 64 * 64
    iterator.close()


def test_sanitizer_finds_no_unordered_access(tmp_path):
    """One epoch under PyTorch's CUDA sanitizer, in a process of its own: it cannot be switched off again."""
    import subprocess
    import sys
    import textwrap

    script = tmp_path / "epoch.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, gpuaug
            import torch.cuda._sanitizer as csan
            csan.enable_cuda_sanitizer()
            batches = [(torch.randn(8, 3, 64, 64).pin_memory(), torch.arange(8).pin_memory()) for _ in range(8)]
            encoder = torch.nn.Conv2d(3, 4, 3).cuda().requires_grad_(False)
            stages = [lambda x: x * 2 + torch.rand(x.shape, device="cuda"), gpuaug.FeatureStage(encoder, capture="never")]
            for features, labels in gpuaug.StreamedLoader(batches, stages, depth=2):
                (features.sum() + labels.sum()).item()
            print("done")
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
    assert "CSAN" not in done.stderr, done.stderr


class Collecting(Dataset):
    """Samples of a worker that collects garbage."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        gc.collect()
        return torch.full((3, 4, 4), index, dtype=torch.uint8)


@pytest.mark.parametrize("feed", ["auto", "plain"])
def test_workers_do_not_free_the_events_that_are_garbage_here(feed):
    loader = StreamedLoader(DataLoader(Collecting(), batch_size=2, num_workers=2), feed=feed)
    gc.disable()
    try:
        event = torch.cuda.Event()
        event.record()
        ring = [event]
        ring.append(ring)
        del event, ring
        seen = [int(sample[0, 0, 0]) for batch in loader for sample in batch]
    finally:
        gc.enable()
    assert seen == list(range(8))
