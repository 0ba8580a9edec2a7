"""``depth="auto"`` on a real device: it decides without the host waiting, and no batch shows that it did."""

import pytest
import torch
from support.values import assert_values
from torch import nn

from gpuaug import FeatureStage, StreamedLoader, TransformStage
from gpuaug.loader import depth

pytestmark = pytest.mark.gpu

ENOUGH = depth.WARM + 2 * depth.ROUNDS * (depth.SETTLE + depth.COUNT) + 40


def made(count=ENOUGH, **settings):
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.rand(8, 3, 64, 64, generator=generator).pin_memory(), torch.arange(8).pin_memory()) for _ in range(20)]
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3)).cuda().requires_grad_(False)
    noisy = TransformStage(lambda images: images + torch.rand_like(images), name="noisy")
    cycle = [batches[index % len(batches)] for index in range(count)]
    return StreamedLoader(cycle, [noisy, FeatureStage(encoder, name="encode")], seed=3, **settings)


def trained(loader):
    """What comes out of a loop with a step of a millisecond or so, which keeps no batch."""
    weight = torch.rand(1024, 1024, device="cuda")
    sums = []
    for features, labels in loader:
        sums.append(features.double().sum() + labels.sum())
        for _ in range(12):
            weight @ weight
    torch.cuda.synchronize()
    return torch.stack(sums)


@pytest.mark.parametrize("slower", [0, depth.AHEAD], ids=["in line slower", "streamed slower"])
def test_batches_equal_depth_0_whatever_the_tuner_decides(monkeypatch, slower):
    real = depth.ms_between
    # What a device takes cannot be planted, but what is read off it can: the decision, not the loop, is forced. The events are
    # read all the same, which fails where they have not been passed.
    order = [depth.AHEAD if number % 4 in (0, 3) else 0 for number in range(2 * depth.ROUNDS)]
    monkeypatch.setattr(depth, "ms_between", lambda first, last: 0 * real(first, last) + (2 if order.pop(0) == slower else 1))
    loader = made(depth="auto")
    found = trained(loader)
    assert_values(found, trained(made(depth=0)))
    assert loader.stats().depth == (depth.AHEAD if slower == 0 else 0)
    assert f"depth='auto' ({'streamed' if slower == 0 else 'in line'}: " in repr(loader)


def test_tuner_does_not_synchronise():
    loader = made(depth="auto")
    iterator = iter(loader)
    for _ in range(6):  # captures synchronise
        next(iterator)
    before = loader.stats().held_back
    torch.cuda.set_sync_debug_mode("error")
    try:
        for features, _labels in iterator:
            features.add_(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert "a batch in line" in repr(loader)
    assert loader.stats().held_back >= before
