"""Encoders that are not as they should be: each gives what it gives in order, or an error, or a warning."""

import random
from collections import UserDict
from functools import partial

import numpy as np
import pytest
import torch
from support import internals
from support.comparison.values import assert_values
from support.gpu.encoder_cases import ModelOutput
from support.gpu.host_graphs import install, on_lanes
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from gpuaug import ArgumentError, ArgumentTypeError, FeatureStage, GpuAugWarning, StreamedLoader, TransformStage
from gpuaug.core import batch as batches
from gpuaug.stages import cuda_graph
from gpuaug.stages.encoders import value_tensors

COUNT = 4
DATA = [torch.rand(2, 6, generator=torch.Generator().manual_seed(number)) for number in range(COUNT)]


@pytest.fixture(autouse=True)
def forms(monkeypatch):
    return install(monkeypatch)


class Encoder(nn.Module):
    """Gives a structured result from what ``function`` makes of itself and its input."""

    def __init__(self, function, forward=None):
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.tensor([2.0]), requires_grad=False)
        self.weight = nn.Parameter(torch.rand(2, 6), requires_grad=False)
        self.register_buffer("positions", torch.arange(12.0).view(2, 6))
        self.drop = nn.Dropout(0.5)
        self.tables = {"cosines": (torch.ones(3, 6),)}
        self.workspace = torch.zeros(2, 6)
        self.noted = {}

    def forward(self, x, fixed=None):
        return ModelOutput(states=({"value": self.function(self, x)}, 7), fixed=fixed)

    def encode(self, x, fixed=None):
        return self(x, fixed)


CALLS = {
    "module": lambda encoder: encoder,
    "method": lambda encoder: encoder.encode,
    "partial": lambda encoder: partial(encoder.encode, fixed=None),
}
CALLED = pytest.mark.parametrize("called", CALLS)
DEVICES = {
    "CPU": lambda stage, data, **options: StreamedLoader(data, [stage], device="cpu", **options),
    "lanes": lambda stage, data, **options: on_lanes(data, stage, **options),
    "lanes, in order": lambda stage, data, **options: on_lanes(data, stage, depth=0, **options),
}
WHERE = pytest.mark.parametrize("where", DEVICES)


def loader_of(encoder, called, where="lanes", data=DATA, **options):
    return DEVICES[where](FeatureStage(CALLS[called](encoder), **options), data, seed=1)


def value(result):
    return result["states"][0]["value"]


# Mode


@WHERE
@CALLED
def test_a_submodule_that_is_put_into_training_mode_at_any_time_is_in_evaluation_mode(called, where):
    encoder = Encoder(lambda self, x: self.drop(x * self.scale))
    loader = loader_of(encoder, called, where)
    encoder.drop.train()
    for epoch in range(2):
        for got, batch in zip(loader, DATA, strict=True):
            assert_values(value(got), batch * 2, about=f"epoch {epoch}")
            encoder.drop.train()


@pytest.mark.parametrize("module", [nn.Linear(1, 1), nn.Linear(1, 1).forward, partial(nn.Linear(1, 1))])
def test_modules_that_no_stage_would_look_after_are_refused(module):
    encoder = Encoder(lambda self, x: x)
    with pytest.raises(ArgumentTypeError, match="output must be a key, an index or a function"):
        FeatureStage(encoder.encode, output=module)
    for fixed in (module, {"a": [module]}):
        with pytest.raises(ArgumentTypeError, match="Fixed arguments of an encoder must not be modules, got Linear"):
            FeatureStage({"a": partial(partial(encoder.encode, fixed=fixed))})


# Gradients


@CALLED
def test_parameters_that_require_grad_are_refused_when_a_loader_is_made_and_after_an_update(called):
    encoder = Encoder(lambda self, x: x)
    stage = FeatureStage(CALLS[called](encoder))
    encoder.scale.requires_grad_(True)
    with pytest.raises(ArgumentError, match=r"must not require grad, got 1 that do: scale\."):
        StreamedLoader([], [stage], device="cpu")
    with pytest.raises(ArgumentError, match=r"must not require grad, got 1 that do: scale\."), stage.update():
        pass


def with_grad(self, x):
    with torch.enable_grad():
        return x.detach().requires_grad_() * self.scale


def marking(self, x):
    return x.requires_grad_() * 2


RESULTS = {
    "made under enable_grad": with_grad,
    "made in inference mode": lambda self, x: torch.inference_mode()(lambda x: x * self.scale)(x),
    "the input": lambda self, x: x,
    "a part of the input": lambda self, x: (x[:1], {"turned": x.t()}),
    "a weight": lambda self, x: self.weight,
    "a part of a weight": lambda self, x: [self.weight[:, :2].t()],
    "a weight without its graph": lambda self, x: self.weight.detach(),
    "a buffer": lambda self, x: self.positions[: len(x)],
    "a table": lambda self, x: self.tables["cosines"][0][: len(x)],
    "a fixed argument": None,
    "a tensor that is written each time": lambda self, x: torch.mul(x, 2, out=self.workspace),
}


@WHERE
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("result", RESULTS)
def test_results_carry_no_gradient_and_share_memory_with_nothing(result, requires_grad, where):
    encoder = Encoder(RESULTS[result] or (lambda self, x: x * 2))
    call = encoder.encode
    fixed = torch.rand(2, 6)
    if RESULTS[result] is None:
        call = partial(call, fixed={"a": fixed})
    data = [batch.clone().requires_grad_(requires_grad) for batch in DATA]
    with torch.no_grad():
        want = [[tensor.clone() for tensor in batches.tensors(call(batch))] for batch in data]
    kept = list(DEVICES[where](FeatureStage(call), data, seed=1))
    memory = [*data, *encoder.parameters(), *encoder.buffers(), *encoder.tables["cosines"], encoder.workspace, fixed]
    addresses = {tensor.untyped_storage().data_ptr() for tensor in memory}
    for got, expected in zip(kept, want, strict=True):
        found = list(batches.tensors(got))
        for tensor, other in zip(found, expected, strict=True):
            assert type(tensor) is torch.Tensor
            assert_values(tensor, other)
            assert not tensor.requires_grad
            assert not tensor.is_inference(), "a head could not be trained on it"
        own = {tensor.untyped_storage().data_ptr() for tensor in found}
        assert not own & addresses
        addresses |= own


@WHERE
def test_tensors_that_require_grad_do_not_tie_batches_together(where):
    encoder = Encoder(lambda self, x: x * 2)
    data = [batch.clone().requires_grad_() for batch in DATA]
    loader = loader_of(encoder, "method", where, data)
    list(loader)
    runner = internals.runner(loader)
    graphs = internals.graphs(runner).values() if runner is not None else []
    assert not any(tensor.requires_grad for graph in graphs for tensor in batches.tensors(graph.inputs))


class Unreadable(UserDict):
    def __getitem__(self, key):
        raise LookupError("a value that must be given")


@WHERE
def test_attributes_that_cannot_be_read_or_hold_themselves_are_no_tables(where):
    encoder = Encoder(lambda self, x: self.late)
    encoder.settings = Unreadable(a=1)
    encoder.cycle = [encoder.settings]
    encoder.cycle.append(encoder.cycle)
    encoder.late = torch.ones(2, 6)
    kept = list(loader_of(encoder, "method", where))
    assert len({value(got).data_ptr() for got in [*kept, {"states": [{"value": encoder.late}]}]}) == COUNT + 1


# Tensors that are not dense

NOT_DENSE = {
    "nested": lambda x: torch.nested.as_nested_tensor([x[0], x[1, :3]]),
    "jagged": lambda x: torch.nested.as_nested_tensor([x[0], x[1, :3]], layout=torch.jagged),
    "COO": lambda x: x.to_sparse(),
    "CSR": lambda x: x.to_sparse_csr(),
    "BSC": lambda x: x.to_sparse_bsc((1, 2)),
    "masked": lambda x: torch.masked.masked_tensor(x, x > 0.5),
    "wrapped": lambda x: TwoTensor(x, x.clone()),
}
SPARSE = {"COO", "CSR", "BSC"}
PROTOTYPES = "ignore:The PyTorch API of (nested|Masked)"
RUNS_EAGER = "ignore:The kernels of stage 'feature' are launched one by one"


def not_dense(kind):
    return [NOT_DENSE[kind](batch.clone()) for batch in DATA]


def numbers(tensor):
    """The values of a tensor of any layout, as a list."""
    if isinstance(tensor, TwoTensor):
        return tensor.a.tolist(), tensor.b.tolist()
    if tensor.is_nested:
        return [part.tolist() for part in tensor.unbind()]
    return tensor.get_data().tolist() if isinstance(tensor, torch.masked.MaskedTensor) else tensor.to_dense().tolist()


@pytest.mark.filterwarnings(PROTOTYPES, RUNS_EAGER, "ignore:Sparse .* support is in beta")
@pytest.mark.parametrize("where", ["CPU", "lanes, in order"])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_tensors_that_are_not_dense_are_inputs_and_results(kind, inference, where):
    functions = {
        "input": lambda self, x: x,
        "other input": lambda self, x: x * 2,
        "result": lambda self, x: NOT_DENSE[kind](x * 1),
        "buffer": lambda self, x: self.held,
        "attribute": lambda self, x: self.holder[0],
    }
    for name, function in functions.items():
        encoder = Encoder(function)
        if name == "buffer":
            encoder.register_buffer("held", not_dense(kind)[0])
        encoder.holder = not_dense(kind)[:1]
        data = not_dense(kind) if "input" in name else [batch.clone() for batch in DATA]
        want = [numbers(function(encoder, batch)) for batch in data]
        sources = [*map(numbers, data), *(numbers(held) for held in encoder.holder)]
        # On a GPU, the conversion to a sparse tensor waits for the device, so there is no graph.
        capture = "never" if name == "result" and kind in SPARSE else "auto"
        loader = loader_of(encoder, "method", where, data, capture=capture)
        with torch.inference_mode(inference):
            for epoch in range(2):
                for got, expected in zip(loader, want, strict=True):
                    assert numbers(value(got)) == expected, f"{name}, epoch {epoch}"
                    if kind != "masked":
                        for part in value_tensors(value(got)):
                            part.add_(1)
        assert [*map(numbers, data), *(numbers(held) for held in encoder.holder)] == sources, name


# Containers


def noting(self, x):
    self.noted["value"] = x * 2
    return self.noted


@WHERE
@CALLED
def test_a_container_that_the_encoder_keeps_is_another_in_each_batch(called, where):
    encoder = Encoder(noting)
    kept = list(loader_of(encoder, called, where))
    assert len({id(value(got)) for got in kept}) == COUNT
    for got, batch in zip(kept, DATA, strict=True):
        assert value(got) is not encoder.noted
        assert_values(value(got)["value"], batch * 2)


def test_a_container_that_the_encoder_keeps_is_that_of_its_shape():
    data = [torch.rand(length, 6) for length in (2, 3, 2, 3, 2, 3)]
    for got, batch in zip(loader_of(Encoder(noting), "method", data=data), data, strict=True):
        assert_values(value(got)["value"], batch * 2)


# Random operations


HOST_DRAWS = {"Python": lambda self, x: x + random.random(), "NumPy": lambda self, x: x + float(np.random.rand())}


@pytest.mark.filterwarnings("ignore:The kernels of stage 'feature' are launched one by one")
@WHERE
@pytest.mark.parametrize("library", HOST_DRAWS)
def test_draws_on_the_host_are_keyed_and_are_not_captured(library, where, forms):
    before = random.getstate(), np.random.get_state()[1].tolist()
    found = [[value(got) for got in loader_of(Encoder(HOST_DRAWS[library]), "method", each)] for each in (where, "CPU")]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    offsets = set()
    for one, other, batch in zip(*found, DATA, strict=True):
        assert_values(one, other)
        offsets.add(round((one - batch).mean().item(), 4))
    assert len(offsets) == COUNT
    assert forms == []


@pytest.mark.parametrize("library", HOST_DRAWS)
def test_draws_on_the_host_are_warned_of(library):
    with pytest.warns(GpuAugWarning, match="its forward draws random numbers on the host, which a replay would repeat"):
        list(loader_of(Encoder(HOST_DRAWS[library]), "method"))


def test_draws_of_torch_on_the_host_count_as_such(monkeypatch):
    monkeypatch.undo()  # on a card torch's generator of the host is not the device's
    before = cuda_graph.host_states()
    assert cuda_graph.host_states() == before
    torch.rand(1)
    assert cuda_graph.host_states() != before


# Hooks


@CALLED
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("which", ["drop", ""])
def test_hooks_of_any_module_are_called_for_every_batch_and_warned_of(called, kind, which, forms):
    encoder = Encoder(lambda self, x: self.drop(x))
    calls = []
    getattr(encoder.get_submodule(which), kind)(lambda *_: calls.append(1))
    with pytest.warns(GpuAugWarning, match=f"it has forward hooks .on {which or 'the encoder itself'}.") as caught:
        list(loader_of(encoder, called))
    assert len(caught) == 1
    assert len(calls) == COUNT
    assert forms == []


# Writing to the input


WRITES = {
    "adds in place": lambda self, x: x.add_(1),
    "writes to a view": lambda self, x: x.t()[0].zero_(),
    "writes with out=": lambda self, x: torch.mul(x, 2, out=x),
    "relu of functional": lambda self, x: nn.functional.relu(x, inplace=True),
    "marks it as one that requires grad": marking,
}


@WHERE
@pytest.mark.parametrize("write", WRITES)
def test_an_encoder_that_writes_to_its_input_is_refused_wherever_it_does_so(write, where):
    data = [batch.clone() for batch in DATA]
    match = "encoder must not write to its input, which other stages may read, got Encoder"
    with pytest.raises(ArgumentError, match=match) as caught:
        list(loader_of(Encoder(WRITES[write]), "method", where, data, output="states"))
    assert caught.value.__notes__ == ["gpuaug: raised in stage 'feature', at batch 0 of epoch 0."]
    copying = Encoder(lambda self, x: WRITES[write](self, x.clone()))
    assert len(list(loader_of(copying, "method", where, [batch.clone() for batch in DATA]))) == COUNT


def sometimes(self, x):
    return x.zero_() if (x < 0).all() else x * 2


@WHERE
@pytest.mark.parametrize("inference", ["the loop", "the source"])
@pytest.mark.parametrize("write", [*WRITES, "sometimes"])
def test_an_encoder_that_writes_to_its_input_changes_no_inference_tensors(write, inference, where):
    function = WRITES.get(write, sometimes)
    tensors = [batch - 0.5 for batch in DATA] + [-batch for batch in DATA]
    with torch.inference_mode(inference == "the source"):
        data = [(tensor.clone(), [tensor.clone()]) for tensor in tensors]
    copied = TransformStage(lambda image, more: (image.clone(), [more[0].clone()]), on=(0, 1))
    encoders = {"image": Encoder(function), "list": Encoder(lambda self, x: function(self, x[0]))}
    for index, encoder in enumerate(encoders.values()):
        stages = [*[copied] * (inference == "the loop"), FeatureStage(encoder, on=index, into=2)]
        loader = on_lanes(data, *stages) if "lanes" in where else StreamedLoader(data, stages, device="cpu")
        with torch.inference_mode(inference == "the loop"):
            for got, tensor in zip(loader, tensors, strict=True):
                assert_values(value(got[2]), function(encoder, tensor.clone()))
                assert_values(got[0], tensor)
                assert_values(got[1][0], tensor)
    for (image, more), tensor in zip(data, tensors, strict=True):
        assert_values(image, tensor)
        assert_values(more[0], tensor)
