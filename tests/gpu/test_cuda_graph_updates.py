"""Weights updated between batches that CUDA graphs encode."""

import gc

import pytest
import torch
from support.comparison.values import assert_values
from support.gpu.cuda_encoders import frozen, graphs_of, host_batches
from torch import nn

from gpuaug import FeatureStage, StreamedLoader

pytestmark = pytest.mark.gpu


def test_weights_updated_in_place():
    encoder = frozen(nn.Conv2d(3, 4, 3))
    stage = FeatureStage(encoder)
    loader = StreamedLoader(host_batches(count=20), [stage], depth=1)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    with stage.update():
        torch.cuda._sleep(20_000_000)
        encoder[0].weight.zero_()
        encoder[0].bias.fill_(7.0)
    next(iterator)  # was on its way
    for _ in range(5):
        assert next(iterator).unique().tolist() == [7.0]
    assert graphs_of(loader) == [1]


def test_weights_updated_to_new_storage_are_captured_again():
    encoder = frozen(nn.Conv2d(3, 4, 3))
    stage = FeatureStage(encoder)
    loader = StreamedLoader(host_batches(count=20), [stage], depth=1)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    with stage.update():
        state = {"0.weight": torch.zeros_like(encoder[0].weight), "0.bias": torch.full_like(encoder[0].bias, 7.0)}
        encoder.load_state_dict(state, assign=True)
        encoder.requires_grad_(False)
        del state
    next(iterator)
    gc.collect()
    torch.cuda.empty_cache()
    for _ in range(5):
        assert next(iterator).unique().tolist() == [7.0]
    assert graphs_of(loader) == [1]


def test_update_waits_for_batches_in_flight():
    encoder = frozen(nn.Conv2d(3, 4, 3))
    stage = FeatureStage(encoder, capture="never")
    batches = host_batches(count=6)
    want = [encoder(batch.cuda()) for batch in batches[:3]]
    loader = StreamedLoader(batches, [lambda x: (torch.cuda._sleep(20_000_000), x)[1], stage], depth=2)
    iterator = iter(loader)
    got = [next(iterator)]
    with stage.update():
        encoder[0].weight.zero_()
    got += [next(iterator), next(iterator)]
    for a, b in zip(got, want, strict=True):
        assert_values(a, b)
