"""Encoders with structured results, methods, keyword inputs and buckets of shapes, from CUDA graphs on a real device."""

import warnings
from collections import OrderedDict

import pytest
import torch
from support import internals
from support.comparison.values import assert_values
from support.gpu import encoder_cases
from support.gpu.cuda_encoders import conv_encoder, graphs_of
from support.gpu.cuda_loops import CYCLES, poison
from support.gpu.encoder_cases import CASES
from torch import nn

import gpuaug
from gpuaug import FeatureStage, StreamedLoader
from gpuaug.core import batch as batches
from gpuaug.stages.graph_memory import Pool, total_bytes

pytestmark = pytest.mark.gpu

MB = 1 << 20


class Vae(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, 8, 4, stride=4))

    def encode(self, images):
        mean, logvar = self.layers(images).chunk(2, dim=1)
        return OrderedDict(mean=mean, std=(logvar / 2).exp())


class Text(nn.Module):
    """Reads its mask on the host, but not in a capture, as transformers does."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(50, 16)

    def forward(self, input_ids, attention_mask):
        states = self.tokens(input_ids)
        if torch.cuda.is_current_stream_capturing() or not attention_mask.all():
            states = states * attention_mask[..., None]
        return {"states": (states, {"pooled": states[:, 0]}), "size": states.shape[-1], "none": None}


def sampled(encoded):
    return encoded["mean"] + encoded["std"] * torch.randn_like(encoded["std"])


def source(count=14):
    """Two buckets, a size of their own now and then, and a partial batch."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for index in range(count):
        size = (2 if index == count - 1 else 4, 3, *((48, 32), (32, 48), (32, 32))[2 if index == 5 else index % 2])
        ids = torch.randint(50, (size[0], 8 + 8 * (index % 2)), generator=draw)
        batch = {"image": torch.rand(size, generator=draw), "ids": ids, "mask": torch.ones_like(ids)}
        made.append({name: value.pin_memory() for name, value in batch.items()})
    return made


def modules():
    torch.manual_seed(0)
    return [module.cuda().requires_grad_(False) for module in (Vae(), Text())]


def stages(vae, text, **options):
    names = {"ids": "input_ids", "mask": "attention_mask"}
    return [
        FeatureStage(vae.encode, on="image", into="latents", output=sampled, name="vae", **options),
        FeatureStage(text, on=names, into="text", name="text", **options),
    ]


def tensors(batch):
    return [tensor.clone() for tensor in batches.tensors(batch)]


def pinned(scale):
    return [batches.map_leaves(pin, batch) for batch in encoder_cases.source(scale=scale)]


def pin(leaf):
    return leaf.pin_memory() if isinstance(leaf, torch.Tensor) else leaf


def loader_of(case, depth, *, scale=8, **options):
    made = encoder_cases.stages(case, encoder_cases.encoders(case, "cuda:0"), **options)
    return StreamedLoader(pinned(scale), made, device="cuda:0", depth=depth, seed=4)


def assert_same(got, want):
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        for a, b in zip(one, other, strict=True):
            assert_values(a, b, about=f"batch {number}")


@pytest.mark.parametrize("case", CASES)
def test_results_of_every_form_equal_the_reference_at_every_depth(case):
    reference = loader_of(case, 0)
    want = [[tensors(batch) for batch in reference] for _ in range(2)]
    for depth in (1, 2, 5, 50):
        loader = loader_of(case, depth)
        kept = [list(loader) for _ in range(2)]
        for got, expected in zip(kept, want, strict=True):
            assert_same([tensors(batch) for batch in got], expected)
        ours, theirs = loader.stats(), reference.stats()
        assert (ours.captured, ours.replayed, ours.eager) == (theirs.captured, theirs.replayed, theirs.eager)


@pytest.mark.parametrize("case", [case for case, (_, output) in CASES.items() if not callable(output)])
def test_results_of_every_form_are_those_of_the_encoders(case):
    modules = encoder_cases.encoders(case, "cuda:0")
    for batch in loader_of(case, 2):
        want = encoder_cases.by_hand(case, batch, modules)
        for got, result in zip((batch["latents"], batch["text"]), want, strict=True):
            assert type(got) is type(result)
            for a, b in zip(batches.tensors(got), batches.tensors(result), strict=True):
                assert type(a) is torch.Tensor
                torch.testing.assert_close(a, b.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("slow", ["copy", "stage/vae", "stage/text"])
def test_lanes_of_branches_that_are_delayed_change_nothing(slow):
    case = "model output, drawn from"
    want = [tensors(batch) for batch in loader_of(case, 0)]
    loader = loader_of(case, 3)
    got = []
    for batch in loader:
        got.append(tensors(batch))
        # The reference is dropped while the kernels that read it are queued, and free memory is overwritten.
        del batch
        poison()
        with torch.cuda.stream(internals.shared(loader).lanes.lane(slow).stream):
            torch.cuda._sleep(CYCLES)
    assert_same(got, want)


@pytest.mark.parametrize("case", ["model output, drawn from", "dict, with memory of the module"])
@pytest.mark.parametrize("depth", [0, 2])
def test_reserved_memory_is_flat_over_epochs_of_buckets(case, depth):
    loader = loader_of(case, depth, scale=32)
    reserved = []
    for _ in range(40):
        for batch in loader:
            sum(tensor.sum() for tensor in batches.tensors(batch))
        del batch
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert set(reserved[1:]) == {reserved[1]}
    assert loader.stats().captured == 4, "two buckets of images, and two lengths of texts"
    assert graphs_of(loader) == [2, 2]


def test_graphs_captured_ahead_are_those_that_are_replayed_and_draw_nothing_of_the_users():
    data, (vae, text) = source(), modules()
    want = [tensors(batch) for batch in StreamedLoader(data, stages(vae, text), depth=0, seed=4)]
    images, words = stages(vae, text)
    images.capture([(4, 3, 48, 32)])
    loader = StreamedLoader(data, [images, words], seed=4, device="cuda:0")
    before = torch.cuda.get_rng_state()
    images.capture([(4, 3, 32, 48), (4, 3, 48, 32)])
    words.capture([[torch.empty(4, length, dtype=torch.int64, device="meta")] * 2 for length in (8, 16)])
    assert_values(torch.cuda.get_rng_state(), before)
    assert graphs_of(loader) == [2, 2]
    for got, expected in zip(loader, want, strict=True):
        for a, b in zip(tensors(got), expected, strict=True):
            assert_values(a, b)
    assert loader.stats().captured == 4
    assert graphs_of(loader) == [2, 2]


def test_bytes_of_graphs_are_those_of_the_device_and_shared(monkeypatch):
    monkeypatch.setattr(Pool, "is_deleted_pool_cached", False)  # or the first capture would empty the cache
    encoder = Vae(width=64).cuda().requires_grad_(False)
    shapes = [(8, 3, 256, 256), (8, 3, 192, 256), (8, 3, 256, 192), (4, 3, 256, 256)]
    data = [torch.rand(shape).pin_memory() for shape in shapes]
    stage = FeatureStage(encoder.encode)
    loader = StreamedLoader(data, [stage], device="cuda:0")
    list(loader)  # eager, which fills the allocator's cache
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    found = []
    for shape in shapes:
        stage.capture([shape])
        found.append(loader.stats().graph_bytes)
        inputs = sum(image.nbytes for image in data[: len(found)])
        assert abs(torch.cuda.memory_reserved() - reserved - (found[-1] - inputs)) <= inputs + 32 * MB
    runner = internals.runner(loader)
    needs = [graph.need for graph in internals.graphs(runner).values()]
    activations = 8 * 64 * 256 * 256 * 4
    assert needs[0].peak_bytes >= 2 * activations
    assert found[0] >= 2 * activations
    assert found[0] <= total_bytes(needs[:1]) + 64 * MB
    assert found[-1] <= total_bytes(needs) + 64 * MB
    assert found[-1] <= 1.3 * found[0], "smaller graphs use the memory of the largest"


@pytest.mark.parametrize("depth", [0, 2])
def test_shapes_without_room_run_eager_and_nothing_grows(depth):
    encoder = conv_encoder()
    torch.manual_seed(0)
    data = [torch.rand(2, 3, 16 + 2 * (index % 9), 16).pin_memory() for index in range(40)]
    loader = StreamedLoader(data, [FeatureStage(encoder)])
    want = [batch.clone() for batch in loader]
    assert graphs_of(loader) == [9]
    needs = list(internals.runner(loader)._needs.values())
    bounded = StreamedLoader(data, [FeatureStage(encoder, graph_bytes=total_bytes(needs[:4]))], depth=depth)
    with pytest.warns(gpuaug.GpuAugWarning, match="exceeds the limit for all graphs") as caught:
        list(bounded)
    assert len(caught) == 1
    torch.cuda.synchronize()
    reserved = []
    for _ in range(4):
        for got, expected in zip(bounded, want, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert 1 <= graphs_of(bounded)[0] < 9
    assert len(set(reserved[1:])) == 1
    assert bounded.stats().captured == graphs_of(bounded)[0], "no graph was captured twice"


def test_stages_of_other_members_run_beside_one_another():
    class Sleeps(nn.Module):
        def forward(self, x):
            torch.cuda._sleep(2_000_000_000)
            return x + 1

    class Adds(nn.Module):
        def forward(self, x):
            return x + 2

    data = [tuple(torch.zeros(4).pin_memory() for _ in range(3))] * 2
    encoders = (Sleeps(), Adds(), Adds())
    made = [FeatureStage(module, on=index, capture="never", name=str(index)) for index, module in enumerate(encoders)]
    # Without batches ahead, stages share the loop's stream.
    loader = StreamedLoader(data * 3, made, depth=1, device="cuda:0")
    received = iter(loader)
    next(received)  # at the first batch they run one after another
    torch.cuda.synchronize()
    got = next(received)
    slow, fast, _ = (by_epoch[0].lane for by_epoch in internals.shared(loader).device_setup.bound_stages)
    slow_done, fast_done = slow.record_event(), fast.record_event()
    fast_done.synchronize()
    assert not slow_done.query(), "the second stage waited for the first"
    assert [member.unique().item() for member in got] == [1, 2, 2], "the loop waits for all"


def test_hidden_states_that_hooks_note_and_views_are_copied_out():
    class Views(nn.Module):
        def forward(self, x):
            y = x * 2
            return {"twice": (y, y), "part": y[:, :2], "turned": y.t(), "wide": y[:1].expand(4, -1), "input": x}

    data = [torch.rand(4, 6).pin_memory() for _ in range(5)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = list(StreamedLoader(data, [FeatureStage(Views())]))
    for got, batch in zip(kept, data, strict=True):
        twice = batch.cuda() * 2
        assert got["twice"][0] is got["twice"][1]
        assert_values(got["twice"][0], twice)
        assert_values(got["part"], twice[:, :2])
        assert_values(got["turned"], twice.t())
        assert_values(got["wide"], twice[:1].expand(4, -1))
        assert_values(got["input"], batch.cuda())
