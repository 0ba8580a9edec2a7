"""Encoders that run from CUDA graphs: equal to eager ones, and harmless to the user's generators, graphs and memory."""

import gc
import sys
import warnings

import pytest
import torch
from support import internals
from support.comparison.values import assert_values
from support.gpu.cuda_encoders import conv_encoder, frozen, graphs_of, host_batches
from torch import nn

import gpuaug
from gpuaug import FeatureStage, StreamedLoader
from gpuaug.stages.graph_memory import Pool

pytestmark = pytest.mark.gpu


def test_graph_key_holds_dtype_strides_and_autocast():
    encoder, image = conv_encoder(), torch.rand(4, 3, 16, 16)
    last = image.to(memory_format=torch.channels_last)
    loader = StreamedLoader([image.pin_memory()] * 3 + [last.pin_memory()] * 3, [FeatureStage(encoder)])
    want = encoder.eval()(image.cuda())
    for got in loader:
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
    assert graphs_of(loader) == [2]
    with torch.autocast("cuda", torch.bfloat16):
        assert {got.dtype for got in loader} == {torch.bfloat16}
    assert {got.dtype for got in loader} == {torch.float32}


@pytest.mark.parametrize("memory_format", [None, torch.channels_last])
def test_autocast_and_memory_format(memory_format):
    batches = host_batches()
    stage = FeatureStage(conv_encoder(), autocast=torch.bfloat16, memory_format=memory_format)
    want = [batch.clone() for batch in StreamedLoader(batches, [stage], depth=0)]
    for got, expected in zip(StreamedLoader(batches, [stage], depth=2), want, strict=True):
        assert got.dtype is torch.bfloat16
        assert_values(got, expected)
        assert not got.requires_grad


class Noisy(nn.Module):
    """A stochastic encoder, as the sampling half of a variational autoencoder is."""

    def forward(self, images):
        return images + torch.randn_like(images) + nn.functional.dropout(images, 0.5, training=True)


def test_stochastic_encoders_draw_from_the_position_alone():
    batches = host_batches()
    want = [b.clone() for b in StreamedLoader(batches, [FeatureStage(Noisy())], depth=0, seed=5)]
    eager = [b.clone() for b in StreamedLoader(batches, [FeatureStage(Noisy(), capture="never")], depth=0, seed=5)]
    torch.manual_seed(0)
    expected_user = torch.rand(3, device="cuda")
    torch.manual_seed(0)
    got = list(StreamedLoader(batches, [FeatureStage(Noisy())], depth=2, seed=5))
    assert_values(torch.rand(3, device="cuda"), expected_user)
    for a, b, c in zip(got, want, eager, strict=True):
        assert_values(a, b)
        torch.testing.assert_close(a, c)
    differences = {round((b - image.cuda()).double().sum().item(), 3) for b, image in zip(got, batches, strict=True)}
    assert len(differences) == len(batches)


class Syncs(nn.Module):
    def forward(self, images):
        return images * (1.0 if images.sum().item() > 0 else 2.0)


class Crosses(nn.Module):
    def forward(self, images):
        return images + torch.ones(images.shape[-1]).to(images.device, non_blocking=True)


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_forward_hook(lambda *args: None)

    def forward(self, images):
        return images * 2


@pytest.mark.parametrize(
    ("encoder", "reason"),
    [(Syncs(), "makes the host wait"), (Crosses(), "copies a tensor from cpu to cuda:0"), (Hooked(), "forward hooks")],
)
def test_encoders_that_cannot_be_captured_run_eager(encoder, reason):
    batches = host_batches()
    loader = StreamedLoader(batches, [FeatureStage(encoder)])
    with pytest.warns(gpuaug.GpuAugWarning, match=reason) as caught:
        got = list(loader)
    assert len(caught) == 1
    assert graphs_of(loader) == [0]
    for a, batch in zip(got, batches, strict=True):
        torch.testing.assert_close(a, encoder(batch.cuda()))


class FailsInCapture(nn.Module):
    """Passes the inspection, then does in the capture what none allows."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, images):
        noisy = images + torch.rand_like(images)
        if torch.cuda.is_current_stream_capturing():
            if self.how == "python":
                raise ValueError("planted")
            if self.how == "memory":
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
        return noisy


@pytest.mark.parametrize("how", ["python", "driver", "memory"])
def test_failed_capture_restores_stream_generator_and_allocator(how):
    batches = host_batches(count=12)
    want = [b.clone() for b in StreamedLoader(batches, [FeatureStage(FailsInCapture(how), capture="never")], seed=2)]
    current = torch.cuda.current_stream()
    loader = StreamedLoader(batches, [FeatureStage(FailsInCapture(how))], seed=2)
    with pytest.warns(gpuaug.GpuAugWarning, match="capture failed") as caught:
        got = list(loader)
    assert len(caught) == 1
    for a, b in zip(got, want, strict=True):
        assert_values(a, b)
    assert torch.cuda.current_stream() == current
    # The user's own dropout, eager and captured, still draws.
    dropped = nn.functional.dropout(torch.ones(1000, device="cuda"), 0.5)
    assert 300 < (dropped == 0).sum().item() < 700
    static = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = nn.functional.dropout(static, 0.5)
    graph.replay()
    first = result.clone()
    graph.replay()
    assert not torch.equal(first, result)
    # The allocator still takes back blocks that record_stream was called on, and page-locked ones.
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(4):
        block = torch.empty(1 << 24, device="cuda")
        block.record_stream(side)
        del block
        torch.cuda.synchronize()
        torch.empty(1, device="cuda")
    torch.cuda.synchronize()
    torch.empty(1 << 24, device="cuda")
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    assert torch.cuda.memory_reserved() < before + 3 * (1 << 26)
    for _ in range(3):
        torch.empty(1 << 20, pin_memory=True).cuda(non_blocking=True)
    torch.cuda.synchronize()


def test_one_captured_stage_in_two_loaders():
    stage, batches = FeatureStage(conv_encoder()), host_batches()
    want = [b.clone() for b in StreamedLoader(batches, [stage], depth=0)]
    train, val = StreamedLoader(batches, [stage]), StreamedLoader(batches, [stage])
    for _ in range(2):
        for a, b, c in zip(train, val, want, strict=True):
            assert_values(a, c)
            assert_values(b, c)
    assert graphs_of(train) == graphs_of(val) == [1]


def test_branches_have_their_own_lanes_and_graphs():
    encoders = {"small": conv_encoder(), "noisy": Noisy()}
    batches = host_batches()
    want = list(StreamedLoader(batches, [FeatureStage(encoders)], depth=0, seed=3))
    loader = StreamedLoader(batches, [FeatureStage(encoders)], depth=2, seed=3)
    for got, expected in zip(loader, want, strict=True):
        assert got.keys() == {"small", "noisy"}
        for name, features in got.items():
            assert_values(features, expected[name])
    assert graphs_of(loader) == [1, 1]
    assert len({branch.lane.stream.cuda_stream for branch in internals.branches(loader).values()}) == 2


def test_capture_beside_a_live_pin_thread():
    dataset = torch.utils.data.TensorDataset(torch.rand(400, 3, 32, 32))
    encoder = conv_encoder()
    for _ in range(5):
        loader = torch.utils.data.DataLoader(dataset, batch_size=(8 * 5), num_workers=2, pin_memory=True)
        streamed = StreamedLoader(loader, [FeatureStage(encoder)])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = torch.cat([features for (features,) in streamed])
        torch.testing.assert_close(got, encoder(dataset.tensors[0].cuda()), atol=1e-3, rtol=1e-3)
        assert graphs_of(streamed) == [1]


def test_close_releases_graph_memory():
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        loader = StreamedLoader(host_batches(size=256), [FeatureStage(conv_encoder())])
        list(loader)
        del loader
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (32 << 20)


def test_reading_the_bytes_of_a_pool_drops_no_reference_to_its_handle():
    while torch.cuda.graph_pool_handle()[1] <= 256:  # smaller integers are never deleted
        pass
    pool, graph, ones = Pool(), torch.cuda.CUDAGraph(), torch.ones(1 << 22, device="cuda")
    with torch.cuda.graph(graph, pool=pool.handle):
        twos = ones * 2
    before = sys.getrefcount(pool.handle[1])
    sizes = [pool.num_bytes for _ in range(3)]
    after = sys.getrefcount(pool.handle[1])
    assert after == before
    assert sizes == [twos.nbytes] * 3


# Updates


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
