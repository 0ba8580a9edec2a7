"""Batches of any nesting, with leaves of any kind, arrive complete, in order and bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batches.nested_batches import ANY_BATCH
from support.feed.ring_equality import assert_same
from support.public.fuzzing import cases

import gpuaug
from gpuaug.core import batch as batches

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:The copy of a batch does not overlap:gpuaug.GpuAugWarning"),
]


def arrived(given_batches, device, depth, feed):
    stage = gpuaug.TransformStage(lambda batch: batch, on=None)
    with gpuaug.StreamedLoader(iter(given_batches), [stage], depth=depth, device=device, feed=feed) as loader:
        return list(loader)


@cases(50)
@given(st.lists(ANY_BATCH, max_size=4), st.integers(0, 3), st.sampled_from(["plain", "ring"]))
def test_any_batch_arrives(given_batches, depth, feed):
    assert_same(arrived(given_batches, "cpu", depth, feed), given_batches)


def on_host(leaf):
    return leaf.cpu() if isinstance(leaf, torch.Tensor | torch.nn.utils.rnn.PackedSequence) else leaf


@pytest.mark.gpu
@cases(100)
@given(st.lists(ANY_BATCH, max_size=4), st.integers(0, 3), st.sampled_from(["plain", "ring"]))
def test_any_batch_arrives_on_a_gpu(given_batches, depth, feed):
    assert_same(batches.map_leaves(on_host, arrived(given_batches, "cuda", depth, feed)), given_batches)
