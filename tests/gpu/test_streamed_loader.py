"""The loader on a real device: equal to the reference whatever is delayed, dropped or overwritten."""

import gc
from itertools import islice

import pytest
import torch
from support.comparison.values import assert_values
from support.gpu.cuda_loops import Encoder, assert_same, host_batches, reference, stages_for
from torch.utils.data import DataLoader, Dataset

import gpuaug
from gpuaug import StreamedLoader, TransformStage

pytestmark = pytest.mark.gpu


@pytest.fixture
def encoder():
    return Encoder().cuda().requires_grad_(False)


@pytest.mark.parametrize("depth", [1, 2, 5, 20])
def test_every_depth_gives_the_same_batches(encoder, depth):
    batches = host_batches()
    want = reference(batches, stages_for(encoder))
    loader = StreamedLoader(batches, stages_for(encoder), depth=depth, seed=1)
    assert_same(list(loader), want)


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


def test_reserved_memory_is_flat_over_epochs(encoder):
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


def test_reserved_memory_is_flat_over_loaders(encoder):
    batches, kept, reserved = host_batches(count=5, size=128), [], []
    trained_on = [torch.cuda.current_stream(), torch.cuda.Stream()]
    want = reference(batches, stages_for(encoder))
    for number in range(60):  # of three lanes each: PyTorch has 32 streams
        with torch.cuda.stream(trained_on[number % 2]):
            loader = StreamedLoader(batches, stages_for(encoder), depth=2, seed=1)
            got = [tuple(t.clone() for t in batch) for batch in islice(loader, 3 + number % 3)]
            kept = [next(iter(loader))]  # until the next loader has kept one
            del loader
            trained_on[number % 2].synchronize()
            assert_same(got, want[: len(got)])
        reserved.append(torch.cuda.memory_reserved())
    del kept
    # Each loader captures a graph, whose memory pool takes two megabytes at least.
    assert max(reserved[-12:]) <= max(reserved[:12]) + (16 << 20)


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_device_memory_is_within_its_formula(depth, growing):
    mega = 1 << 20  # where the allocator rounds to 512 bytes
    sizes = [(4 + index // 2 if growing else 12) * mega for index in range(16)]
    batches = [torch.zeros(size, dtype=torch.uint8).pin_memory() for size in sizes]
    loader = StreamedLoader(batches, [TransformStage(lambda images: images.half())], depth=depth)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for images in loader:
        torch.cuda._sleep(1_000_000)
        del images
    torch.cuda.synchronize()
    batch, result = max(sizes), 2 * max(sizes)
    most = (depth + 2) * result + 2 * batch
    assert result < torch.cuda.max_memory_allocated() - before <= most + mega


@pytest.mark.parametrize("depth", [0, 2])
def test_device_memory_of_growing_ragged_batches_is_within_its_formula(depth):
    sides = [256 + 32 * index for index in range(12)]
    batches = [gpuaug.collate_ragged([torch.zeros(3, side, 300, dtype=torch.uint8)] * 8) for side in sides]
    loader = StreamedLoader(iter(batches), depth=depth)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for ragged in loader:
        assert len(ragged) == 8
    del ragged
    torch.cuda.synchronize()
    most = (depth + 2) * 8 * 3 * sides[-1] * 300
    assert torch.cuda.max_memory_allocated() - before <= most + (1 << 20)


def test_pageable_batches_warn_once():
    batches = host_batches(pin=False)
    with pytest.warns(gpuaug.GpuAugWarning, match="not page-locked. Pass pin_memory=True") as caught:
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


@pytest.mark.multigpu
def test_device_is_the_current_one_at_the_first_batch():
    encoder = torch.nn.Linear(4, 2).to("cuda:1").requires_grad_(False)
    stages = [lambda x: x + torch.rand_like(x), gpuaug.FeatureStage(encoder)]
    loader, want = (StreamedLoader([torch.zeros(3, 4)] * 6, stages[:1], device=d, seed=1) for d in (None, "cuda:1"))
    want.stages = stages
    with torch.cuda.device(1):
        loader.stages = stages
        next(iter(loader))
    assert loader.device == torch.device("cuda:1")
    for ours, theirs in zip(loader, (want.set_epoch(1), want)[1], strict=True):
        assert ours.device == torch.device("cuda:1")
        assert_values(ours, theirs)


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
def test_forked_workers_do_not_free_cuda_events_of_the_parent(feed):
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
