"""The contract for encoders with several inputs and structured results, on buckets of shapes, from graphs and eager."""

import gc
from collections import OrderedDict

import pytest
import torch
from contract.sources import DEPTHS
from support.comparison.values import assert_values
from support.gpu.host_graphs import install, on_lanes
from torch import nn

from gpuaug import FeatureStage
from gpuaug.core import batch as batches

SIZES = [(4, 8, 12), (4, 12, 8), (4, 8, 12), (4, 8, 12), (4, 12, 8), (2, 8, 12), (4, 12, 8), (4, 6, 6), (4, 8, 12)]
"""Of each batch its length and the height and width of its images: two buckets, a partial batch, and one of a kind."""


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.fails_at = None

    def encode(self, images):
        if self.fails_at == images.shape[-2:]:
            raise ZeroDivisionError("planted")
        return OrderedDict(mean=images.mean(1) * self.scale, std=images.std(1))


class Text(nn.Module):
    def forward(self, input_ids, attention_mask):
        states = input_ids[..., None] * attention_mask[..., None].float()
        return {"states": (states, {"pooled": states[:, 0]}), "noise": torch.rand(len(input_ids))}


def sampled(encoded):
    return encoded["mean"] + encoded["std"] * torch.randn_like(encoded["std"]), encoded["mean"]


def source():
    draw = torch.Generator().manual_seed(0)
    for number, (length, height, width) in enumerate(SIZES):
        ids = torch.arange(length * 5).view(length, 5) + number
        yield {"image": torch.rand(length, 3, height, width, generator=draw), "ids": ids, "mask": ids % 2, "number": number}


def stages(vae, graph_bytes):
    text = {"ids": "input_ids", "mask": "attention_mask"}
    return [
        FeatureStage(vae.encode, on="image", into="latents", output=sampled, name="vae", graph_bytes=graph_bytes),
        FeatureStage(Text(), on=text, into="text", name="text"),
    ]


@pytest.fixture(autouse=True)
def forms(monkeypatch):
    return install(monkeypatch)


def streamed(depth, *, vae=None, graph_bytes=None, **options):
    return on_lanes(list(source()), *stages(vae or Vae(), graph_bytes), depth=depth, seed=5, **options)


def leaves(batch):
    return [leaf.clone() for leaf in batches.tensors(batch)]


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a, b, strict=True):
            assert_values(x, y)


@pytest.mark.filterwarnings("ignore:Some shapes of stage 'vae' run without CUDA graphs")
@pytest.mark.parametrize("graph_bytes", [None, 0, 13000])
@pytest.mark.parametrize("depth", DEPTHS)
def test_batches_are_complete_equal_to_the_reference_and_of_the_same_form(depth, graph_bytes, forms):
    reference, loader = streamed(0, graph_bytes=graph_bytes), streamed(depth, graph_bytes=graph_bytes)
    for leave_at in (2, len(SIZES), len(SIZES)):
        given = []
        for each in (reference, loader):
            forms.clear()
            got = []
            for batch in each:
                got.append(leaves(batch))
                assert batch["number"] == len(got) - 1
                if len(got) == leave_at:
                    break
            replayed = [form for form in forms if form[0] == "replayed"]
            given.append((got, replayed))
        assert_same(given[0][0], given[1][0])
        if leave_at == len(SIZES):
            assert given[0][1] == given[1][1]
            assert len(given[0][1]) == {None: 12, 0: 7, 13000: 10}[graph_bytes]


@pytest.mark.parametrize("depth", DEPTHS)
def test_batches_that_are_kept_do_not_change(depth):
    loader = streamed(depth)
    kept = []
    copies = []
    for batch in loader:
        kept.append(batch)
        copies.append(leaves(batch))
    list(loader)
    assert_same([leaves(batch) for batch in kept], copies)


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_error_arrives_at_its_batch_after_the_others(depth):
    vae = Vae()
    loader = streamed(depth, vae=vae)
    vae.fails_at = (6, 6)
    for _ in range(2):
        numbers = []
        with pytest.raises(ZeroDivisionError, match="planted") as caught:
            numbers.extend(batch["number"] for batch in loader)
        assert len(numbers) in (0, 7), "a list that fails keeps nothing"
        assert "stage 'vae', at batch 7" in caught.value.__notes__[0]
    vae.fails_at = None
    assert len(list(loader)) == len(SIZES)


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_users_generator_is_as_if_no_stage_had_run(depth):
    torch.manual_seed(3)
    want = torch.rand(len(SIZES))
    torch.manual_seed(3)
    got = torch.stack([torch.rand(()) for _ in streamed(depth)])
    assert_values(got, want)


@pytest.mark.parametrize("depth", DEPTHS)
def test_resume_is_exact(depth):
    whole = [leaves(batch) for batch in streamed(depth)]
    for stop in (1, 4, 8):
        loader = streamed(depth)
        iterator = iter(loader)
        for _ in range(stop):
            next(iterator)
        resumed = streamed(depth)
        resumed.load_state_dict(loader.state_dict())
        assert_same([leaves(batch) for batch in resumed], whole[stop:])


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("depth", [0, 2])
def test_update_changes_the_encoder_of_its_stage_alone(depth, moved, forms):
    vae = Vae()
    loader = streamed(depth, vae=vae)
    stage = loader.stages[0]
    list(loader)
    before = len(forms)
    with stage.update():
        if moved:
            vae.scale.data = torch.tensor(6.0)
        else:
            vae.scale.fill_(6.0)
    for batch, host in zip(loader, source(), strict=True):
        torch.testing.assert_close(batch["latents"][1], host["image"].mean(1) * 6)
    captured = [form for form, _ in forms[before:]].count("captured")
    assert captured == (2 if moved else 0), "the graphs of the other stage stay"


def test_graphs_go_with_their_loader():
    loader = streamed(2)
    list(loader)
    stage = loader.stages[0]
    assert len(stage._running) == 1
    del loader
    gc.collect()
    assert len(stage._running) == 0
