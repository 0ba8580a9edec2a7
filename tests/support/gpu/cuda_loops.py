"""Batches, stages and checks of loops on a GPU whose lanes are delayed and whose free memory is overwritten."""

import torch
from support.comparison.values import assert_values

from gpuaug import FeatureStage, StreamedLoader, TransformStage

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
            assert_values(left, right, about=f"batch {index}")
