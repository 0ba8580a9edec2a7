"""What an encoder may be called with and give: eager, and as from a graph."""

import gc
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pytest
import torch
from support import internals
from support.comparison.values import assert_values
from support.gpu.encoder_cases import ModelOutput
from support.gpu.host_graphs import install, on_lanes
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torchvision import models

from gpuaug import ArgumentError, FeatureStage, GpuAugWarning, SelectionError, StreamedLoader
from gpuaug.core import batch as batches
from gpuaug.stages import cuda_graph


@pytest.fixture(autouse=True)
def forms(monkeypatch):
    return install(monkeypatch)


class Pair(NamedTuple):
    tokens: torch.Tensor
    pooled: torch.Tensor


@dataclass
class Record:
    tokens: torch.Tensor
    pooled: torch.Tensor
    more: object = None


class Gaussian:
    """The distribution of a variational autoencoder: no container, and its tensors are hidden."""

    def __init__(self, mean):
        self.mean = mean

    def sample(self):
        return self.mean + torch.randn_like(self.mean)


FORMS = {
    "tensor": lambda x: x * 2,
    "tuple": lambda x: (x * 2, x.sum(1)),
    "list": lambda x: [x * 2, [x + 1]],
    "named tuple": lambda x: Pair(x * 2, x.sum(1)),
    "dict": lambda x: {"tokens": x * 2, "size": x.shape[-1], "none": None},
    "dataclass": lambda x: Record(x * 2, x.sum(1), (x + 1, {"deep": x - 1})),
    "model output": lambda x: ModelOutput(last_hidden_state=x * 2, hidden_states=(x, x * 3), attentions=None),
    "nested": lambda x: ModelOutput(text=ModelOutput(pooler_output=x.mean(1)), pair=Pair(x * 2, x[:, 0])),
    "the input itself": lambda x: x,
    "views of the input": lambda x: (x[:, :2], x.flatten(), x.t()),
    "one tensor twice": lambda x: {"a": (y := x * 2), "b": (y, y[:, :1])},
}


class Encoder(nn.Module):
    """Gives what ``form`` makes of the input."""

    def __init__(self, form=None):
        super().__init__()
        self.form = form or FORMS["tensor"]
        self.scale = nn.Parameter(torch.tensor(3.0), requires_grad=False)

    def forward(self, x):
        return self.form(x * 1 if self.form not in (FORMS["the input itself"], FORMS["views of the input"]) else x)

    def encode(self, x, *, mask=None, offset=0.0):
        x = x * self.scale + offset
        return x if mask is None else x * mask


INPUTS = [
    torch.rand(size, 6, generator=torch.Generator().manual_seed(size + index)) for index, size in enumerate((4, 4, 2, 4, 2))
]


def same(one, other):
    assert type(one) is type(other)
    for a, b in zip(batches.leaves(one), batches.leaves(other), strict=True):
        assert_values(a, b) if isinstance(a, torch.Tensor) else None
        assert isinstance(a, torch.Tensor) or a == b


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("form", FORMS)
def test_results_of_any_form_equal_the_encoders_own(form, depth, forms):
    encoder = Encoder(FORMS[form])
    loader = on_lanes(INPUTS, FeatureStage(encoder), depth=depth)
    for _ in range(2):
        forms.clear()
        kept = list(loader)
        for got, batch in zip(kept, INPUTS, strict=True):
            same(got, FORMS[form](batch))
            addresses = {leaf.untyped_storage().data_ptr() for leaf in batches.tensors(got)}
            assert batch.untyped_storage().data_ptr() not in addresses, "a result shares memory with its input"
        assert [size for form, size in forms if form == "replayed"] == [4, 4, 2]
        own = [{leaf.untyped_storage().data_ptr() for leaf in batches.tensors(got)} for got in kept]
        assert sum(map(len, own)) == len(set().union(*own)), "two batches share memory"


def test_one_tensor_in_two_places_is_copied_once():
    loader = on_lanes([torch.rand(2, 6)] * 2, FeatureStage(Encoder(FORMS["one tensor twice"])))
    for got in loader:
        assert got["a"] is got["b"][0]


def test_output_may_be_a_function_of_the_result_whose_draws_are_keyed(forms):
    stage = FeatureStage(
        Encoder(lambda x: ModelOutput(latent_dist=Gaussian(x))), output=lambda result: result.latent_dist.sample()
    )
    batches = [torch.zeros(3, 6)] * 4
    captured, again = (list(on_lanes(batches, stage, seed=1, depth=depth)) for depth in (2, 0))
    eager = list(StreamedLoader(batches, [stage], seed=1, device="cpu"))
    assert ("replayed", 3) in forms
    for a, b, c in zip(captured, again, eager, strict=True):
        assert_values(a, b)
        assert_values(a, c)
    assert len({float(each.sum()) for each in eager}) == 4
    assert not torch.equal(next(iter(on_lanes(batches, stage, seed=2))), eager[0])


@pytest.mark.parametrize("output", ["missing", 7, "shape.0"])
@pytest.mark.parametrize("form", ["dict", "dataclass", "tuple", "tensor"])
def test_output_that_is_not_there_is_refused(form, output):
    if (form, output) == ("tensor", 7):
        return  # a tensor has indices, too
    with pytest.raises(SelectionError, match="output must name a part of the encoder's result"):
        list(on_lanes([torch.rand(2, 6)], FeatureStage(Encoder(FORMS[form]), output=output)))


@pytest.mark.parametrize(("output", "expected"), [("maps.0", 0), ("maps.pool", 1), ("pair.1", 3), ("maps.2.1", 5)])
def test_digits_in_a_dotted_path_are_a_key_of_a_mapping_or_an_index(output, expected):
    def form(x):
        return {"maps": {"0": x, "pool": x + 1, "2": [x, x + 5]}, "pair": (x + 2, x + 3)}

    stage = FeatureStage(Encoder(form), output=output)
    assert_values(next(iter(on_lanes([torch.zeros(2, 6)], stage))), torch.full((2, 6), float(expected)))


ATTRIBUTES = {
    "tensor": ["mean", "shape", "T", "real", "data", "dtype", "grad", "__class__"],
    "dict": ["keys", "items"],
    "model output": ["to_tuple", "keys"],
    "dataclass": ["__init__", "__class__", "__eq__"],
    "named tuple": ["count", "index", "_asdict", "_replace"],
    "tuple": ["count"],
    "list": ["append"],
    "hidden": ["sample"],
}


@pytest.mark.parametrize("where", ["CPU", "lanes"])
@pytest.mark.parametrize(("form", "output"), [(form, output) for form in ATTRIBUTES for output in ATTRIBUTES[form]])
def test_output_that_names_an_attribute_of_a_tensor_or_a_method_is_refused(form, output, where):
    stage = FeatureStage(Encoder(FORMS.get(form, lambda x: Gaussian(x))), output=output)
    loader = on_lanes(INPUTS, stage) if where == "lanes" else StreamedLoader(INPUTS, [stage], device="cpu")
    with pytest.raises(SelectionError, match="output must name a part of the encoder's result") as caught:
        list(loader)
    if (form, output) in [("tensor", "mean"), ("hidden", "sample")]:
        assert str(caught.value).endswith(f"To call a method, write output=lambda result: result.{output}().")


def test_hidden_tensors_are_not_captured_and_the_warning_says_what_to_select(forms):
    loader = on_lanes([torch.rand(2, 6)] * 3, FeatureStage(Encoder(lambda x: ModelOutput(latent_dist=Gaussian(x)))))
    with pytest.warns(GpuAugWarning, match=r"returns a Gaussian, .* \(output= selects some\)"):
        assert len(list(loader)) == 3
    assert forms == []


def test_a_graph_is_for_strides_and_switches_of_arithmetic_too(forms):
    image = torch.rand(2, 3, 4, 4)
    other = image.to(memory_format=torch.channels_last)
    loader = on_lanes([image, other, image, other], FeatureStage(Encoder(FORMS["dict"])))
    list(loader)
    assert [form for form, _ in forms] == ["captured", "replayed"] * 2
    with torch.backends.cudnn.flags(deterministic=True):
        list(loader)
    assert [form for form, _ in forms][4:] == ["captured", "replayed"] * 2


@pytest.mark.parametrize("two", ["stages", "branches"])
def test_each_encoder_runs_eager_first_although_another_has_the_same_module(two, forms):
    encoder = Encoder(FORMS["dict"])
    stages = [FeatureStage({"a": encoder, "b": encoder}, on=0, into=0)]
    if two == "stages":
        stages = [FeatureStage(encoder, on=index, into=index, name=str(index)) for index in range(2)]
    loader = on_lanes([(INPUTS[0], INPUTS[1])] * 3, *stages, depth=0)
    for number, _ in enumerate(loader):
        assert [form for form, _ in forms].count("replayed") == 2 * number


def test_autocast_of_a_stage_keeps_no_casts_of_weights():
    seen = []
    encoder = Encoder(lambda x: seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled())) or (x,))
    list(on_lanes(INPUTS, FeatureStage(encoder, autocast=torch.bfloat16)))
    assert set(seen) == {(True, False)}
    assert torch.is_autocast_cache_enabled()


# Calls


def test_a_mapping_in_on_passes_members_by_keyword(forms):
    data = [{"mask": torch.tensor([[0.0], [1.0]]), "image": torch.rand(2, 6)} for _ in range(3)]
    stage = FeatureStage(Encoder().encode, on={"mask": "mask", "image": "x"}, into="features")
    for got, batch in zip(on_lanes(data, stage), data, strict=True):
        assert_values(got["features"], batch["image"] * 3 * batch["mask"])
    assert [form for form, _ in forms] == ["captured", "replayed", "replayed"]


@pytest.mark.parametrize(
    ("encoder", "want", "name"),
    [
        (Encoder(), lambda x: x * 2, "Encoder"),
        (Encoder().encode, lambda x: x * 3, "Encoder.encode"),
        (partial(Encoder().encode, offset=1.0), lambda x: x * 3 + 1, "Encoder.encode"),
        (partial(partial(Encoder().encode, offset=9.0), offset=1.0), lambda x: x * 3 + 1, "Encoder.encode"),
        (partial(Encoder()), lambda x: x * 2, "Encoder"),
        (nn.ModuleList([Encoder()])[0].encode, lambda x: x * 3, "Encoder.encode"),
    ],
)
def test_encoder_may_be_a_method_or_have_fixed_arguments(encoder, want, name, forms):
    stage = FeatureStage(encoder)
    assert repr(stage) == f"FeatureStage({name})"
    assert isinstance(stage.branches[None], Encoder)
    for got, batch in zip(on_lanes(INPUTS, stage), INPUTS, strict=True):
        assert_values(got, want(batch))
    assert len(forms) == 5  # two captured, three replayed


def test_weights_and_mode_of_a_methods_module_are_the_stages(forms):
    class Method(Encoder):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def encode(self, x):
            return self.drop(x * self.scale)

    encoder = Method()
    stage = FeatureStage(encoder.encode)
    loader = on_lanes([torch.ones(2, 6)] * 4, stage, depth=0)
    found = []
    for got in loader:
        found.append(got.unique().tolist())
        encoder.train()
        with stage.update():
            encoder.scale.data = encoder.scale.data + 1
    assert found == [[3], [4], [5], [6]]
    encoder.scale.requires_grad_(True)
    with pytest.raises(ArgumentError, match=r"must not require grad, got 1 that do: scale\."):
        FeatureStage(encoder.encode)


def test_mapping_of_methods_gives_a_mapping_of_outputs():
    stage = FeatureStage({"two": Encoder(FORMS["tuple"]), "three": partial(Encoder(FORMS["tuple"]).forward)}, output=1)
    for got, batch in zip(on_lanes(INPUTS, stage), INPUTS, strict=True):
        assert_values(got["two"], batch.sum(1))
        assert_values(got["three"], batch.sum(1))


def test_other_inputs_than_tensors_are_part_of_what_a_graph_is_for(forms):
    data = [
        (torch.rand(2, 6), None, 1.0),
        (torch.rand(2, 6), None, 2.0),
        (torch.rand(2, 6), None, 1.0),
        (torch.rand(2, 6), [], 1.0),
    ]
    stage = FeatureStage(lambda_encoder().encode, on={0: "x", 1: "mask", 2: "offset"}, into=0)
    for got, batch in zip(on_lanes(data, stage), data, strict=True):
        assert_values(got[0], batch[0] * 3 + batch[2])
    assert [form for form, _ in forms] == ["captured", "replayed"]  # the third batch alone: an empty list is no constant


def lambda_encoder():
    class Lenient(Encoder):
        def encode(self, x, *, mask=None, offset=0.0):
            return super().encode(x, mask=mask or None, offset=offset)

    return Lenient()


def test_a_trunk_of_torchvisions(forms):
    torch.manual_seed(0)
    trunk = models.shufflenet_v2_x0_5(weights=None).requires_grad_(False)
    trunk.fc = nn.Identity()
    data = [torch.rand(2, 3, 32, 32 + 32 * (index % 2)) for index in range(4)]
    got = list(on_lanes(data, FeatureStage(trunk, memory_format=torch.channels_last)))
    for features, images in zip(got, data, strict=True):
        torch.testing.assert_close(features, trunk(images))
    assert [form for form, _ in forms].count("replayed") == 2


def test_graphs_that_are_captured_ahead_draw_nothing_of_the_users(forms):
    stage = FeatureStage(Encoder(lambda x: x + torch.rand_like(x)))
    data = [torch.zeros(2, 6)] * 3
    want = list(on_lanes(data, stage, seed=1))
    before = torch.get_rng_state()
    stage.capture([(2, 6)])
    loader = on_lanes(data, stage, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(loader, want, strict=True):
        assert_values(a, b)


def test_a_graph_keeps_tables_that_another_shape_replaces():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = {"of": torch.zeros(0)}

        def forward(self, x):
            if len(self.table["of"]) < x.shape[1]:
                self.table = {"of": torch.arange(float(x.shape[1]))}
            return x + self.table["of"][: x.shape[1]]

    data = [torch.rand(2, length) for length in (6, 6, 9, 6, 6)]
    stage = FeatureStage(Positions())
    replaced = []
    loader = on_lanes(data, stage, depth=0)
    for got, batch in zip(loader, data, strict=True):
        assert_values(got, batch + torch.arange(float(batch.shape[1])))
        replaced.append(weakref.ref(stage.encoder.table["of"]))
        gc.collect()
    assert len(replaced[1]()) == 6
    assert len(replaced[-1]()) == 9


@pytest.mark.parametrize(
    ("form", "kept"),
    [
        (lambda x: x * 2, 2),
        (lambda x: (x * 2)[:, :1], 2),
        (lambda x: ((y := x * 2), y, y[0]), 2),
        (lambda x: (x * 2, x * 3), 3),
        (lambda x: x[:1], 2),
        (lambda x: (x * 2).to_sparse(), 1),
    ],
)
def test_bytes_that_a_graph_keeps_are_those_of_whole_tensors(form, kept):
    loader = on_lanes([INPUTS[0]], FeatureStage(Encoder(form)))
    list(loader)
    (need,) = internals.runner(loader)._needs.values()
    assert need.io_bytes == kept * INPUTS[0].nbytes


# Host waits and hooks


class ReadsMask(nn.Module):
    """Reads its input on the host, but not in a capture, as transformers' text encoders read their masks."""

    def __init__(self, in_captures=False):
        super().__init__()
        self.in_captures = in_captures
        self.waits = []
        self.paths = []

    def forward(self, x):
        waits = self.in_captures or not torch.cuda.is_current_stream_capturing()
        self.paths.append("waits" if waits else "as captured")
        if waits:
            self.waits.append("model.py:7")
        return x * 2 if waits else x + x


@pytest.fixture
def reads_mask(monkeypatch):
    encoder = ReadsMask()

    @contextmanager
    def host_waits():
        encoder.waits = []
        yield encoder.waits

    monkeypatch.setattr(cuda_graph, "host_waits", host_waits)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return encoder


def test_an_encoder_that_waits_for_the_host_but_not_in_a_capture_is_captured(reads_mask, forms):
    loader = on_lanes(INPUTS, FeatureStage(reads_mask))
    for got, batch in zip(loader, INPUTS, strict=True):
        assert_values(got, batch * 2)
    assert [form for form, _ in forms].count("replayed") == 3
    assert reads_mask.paths[:2] == ["waits", "as captured"]
    assert not torch.cuda.is_current_stream_capturing()
    assert loader.stats().eager == 2, "a run to look is no batch"


@pytest.mark.parametrize("method", ["__enter__", "__exit__"])
def test_an_interrupt_while_an_encoder_is_inspected_leaves_no_dispatch_mode_active(monkeypatch, method):
    def interrupted(mode, *exc):
        if method == "__enter__":
            TorchDispatchMode.__enter__(mode)
        raise KeyboardInterrupt

    monkeypatch.setattr(cuda_graph._Observer, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(on_lanes(INPUTS, FeatureStage(nn.Identity())))
    assert _get_current_dispatch_mode() is None


def test_an_encoder_that_waits_for_the_host_in_a_capture_too_is_not_captured(reads_mask, forms):
    reads_mask.in_captures = True
    with pytest.warns(GpuAugWarning, match=r"makes the host wait for the device \(model.py:7\)"):
        list(on_lanes(INPUTS, FeatureStage(reads_mask)))
    assert forms == []


def test_hooks_that_come_between_epochs_end_the_captures(forms):
    encoder = Encoder()
    loader = on_lanes([torch.rand(2, 6)] * 3, FeatureStage(encoder))
    list(loader)
    assert len(forms) == 3
    encoder.register_forward_hook(lambda *_: None)
    with pytest.warns(GpuAugWarning, match="it has forward hooks"):
        list(loader)
    assert len(forms) == 3


def test_hooks_of_weight_norms_are_a_part_of_forward(forms):
    with pytest.warns(FutureWarning):
        encoder = nn.utils.weight_norm(nn.Linear(6, 2))
    data = [torch.rand(2, 6)] * 3
    for got, batch in zip(on_lanes(data, FeatureStage(encoder.requires_grad_(False))), data, strict=True):
        assert_values(got, encoder(batch))
    assert len(forms) == 3


def test_hooks_of_all_modules_end_captures(forms):
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.warns(GpuAugWarning, match="all modules have forward hooks"):
            list(on_lanes([torch.rand(2, 6)] * 3, FeatureStage(Encoder())))
    finally:
        handle.remove()
    assert forms == []
