"""Encoders and batches for the tests of CUDA graphs."""

import torch
from torch import nn


def frozen(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers).cuda().requires_grad_(False)


def conv_encoder():
    return frozen(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3, stride=2))


def host_batches(count=8, size=32, last=None):
    torch.manual_seed(1)
    sizes = [8] * (count - 1) + [last or 8]
    return [torch.rand(batch, 3, size, size).pin_memory() for batch in sizes]


def graphs_of(loader):
    bound_stages = loader._shared.device_setup.bound_stages
    return [len(branch.runner) for by_epoch in bound_stages for branch in by_epoch[0]._branches.values()]
