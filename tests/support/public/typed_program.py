"""A user's program with types on every name, which mypy reads as strictly as the package itself, and a test runs."""

from collections.abc import Callable
from functools import partial
from typing import Any, assert_type

import kornia.augmentation as K
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gpuaug


def augmentation() -> gpuaug.Fused:
    pipeline = K.AugmentationSequential(K.RandomHorizontalFlip(), K.Normalize(0.5, 0.25))
    return gpuaug.fuse(pipeline, dtype=torch.float32, memory_format=torch.channels_last, pick="batch")


def crops() -> gpuaug.Fused:
    return gpuaug.fuse([gpuaug.PadIfSmaller(8, fill=(1, 2, 3)), gpuaug.FixedSizeCrop((8, 6))])


def brightness(images: Tensor) -> Tensor:
    return images.mean((1, 2, 3))


def stages(encoder: nn.Module) -> list[gpuaug.Stage | Callable[[Tensor], Tensor]]:
    measured = gpuaug.TransformStage(brightness, on=0, into=2, name="brightness")
    both = gpuaug.FeatureStage({"whole": encoder, "method": partial(encoder.forward)}, output=Tensor.float, graph_bytes=1 << 30)
    both.capture([(2, 3, 8, 8), torch.empty(2, 3, 8, 8, device="meta")])
    assert_type(both.branches, dict[str | None, nn.Module])
    return [augmentation(), measured, gpuaug.FeatureStage(encoder, autocast=torch.bfloat16, capture="never")]


@gpuaug.step_first("cpu")
def train(loader: gpuaug.StreamedLoader, step: Callable[[Any], None], epochs: int) -> gpuaug.Stats:
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            step(batch)
    return loader.stats()


def main() -> gpuaug.Stats:
    dataset = TensorDataset(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.arange(4))
    encoder = nn.Conv2d(3, 4, 3).requires_grad_(False)
    with gpuaug.StreamedLoader(DataLoader(dataset, batch_size=2), stages(encoder), device="cpu", depth=2, seed=0) as loader:
        with gpuaug.step_first(loader.device):
            stats = train(loader, lambda batch: None, epochs=2)
        assert_type(loader.device, torch.device)
        assert_type(len(loader), int)
    assert_type(stats.batches, int)
    fused = augmentation()
    assert_type(fused.draw((2, 3, 8, 8)).views, tuple[gpuaug.Draws, ...])
    assert_type(fused.explain().launches, int | None)
    return stats


def bound(loader: gpuaug.StreamedLoader) -> str:
    report = gpuaug.profile(loader, lambda batch: None, show=False)
    assert_type(report.overlap_efficiency, float | None)
    gpuaug.show(loader).savefig("samples.png")
    return report.verdict[0]
