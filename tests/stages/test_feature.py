import re
from functools import partial

import pytest
import torch
from torch import nn

from gpuaug import ArgumentError, DeviceError, FeatureStage, StreamedLoader
from gpuaug.stages.cuda_graph import why_not_capturable


def frozen(module):
    return module.requires_grad_(False)


def linear(weight):
    """A frozen encoder that multiplies by ``weight``."""
    module = frozen(nn.Linear(1, 1, bias=False))
    module.weight.fill_(weight)
    return module


def features(stage, *batches, **options):
    return list(StreamedLoader(batches or [torch.ones(2, 1)], [stage], device="cpu", **options))


class Spy(nn.Module):
    """Keeps what its forward sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append((x, self.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return x


def test_stage_sets_and_keeps_eval_mode():
    encoder = nn.Sequential(nn.Dropout(0.5), linear(2))
    model = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(1, 1)})
    stage = FeatureStage(encoder)
    assert not encoder[0].training
    loader = StreamedLoader([torch.ones(64, 1)] * 2, [stage], device="cpu")
    model.train()
    for encoded in loader:
        assert encoded.eq(2).all(), "dropout was at work"
        assert not encoder[0].training
        assert model["head"].training, "the mode of the rest is the user's"
        model.train()


def test_module_dict_of_encoders():
    stage = FeatureStage(nn.ModuleDict({"twice": linear(2), "thrice": linear(3)}), on="image", into="features")
    (batch,) = features(stage, {"image": torch.ones(1, 1)})
    assert {key: value.item() for key, value in batch["features"].items()} == {"twice": 2, "thrice": 3}
    assert batch["image"].item() == 1


class Doubling:
    def forward(self, images):
        return 2 * images


@pytest.mark.parametrize("base", [nn.ModuleDict, nn.Sequential, nn.ModuleList])
def test_a_container_with_a_forward_is_one_encoder(base):
    class Own(Doubling, base):
        pass

    for encoder in (Own(), partial(Own()), {"one": Own()}, nn.ModuleDict({"one": Own()})):
        (encoded,) = features(FeatureStage(encoder))
        assert (encoded["one"] if isinstance(encoded, dict) else encoded).eq(2).all()


def exported(module):
    return torch.export.export(module, (torch.ones(3, 1),)).module()


FIXED_MODES = {
    "exported": exported,
    "within a module": lambda module: nn.Sequential(nn.Dropout(), exported(module), nn.Dropout()),
    "scripted": torch.jit.script,
    "frozen": lambda module: nn.Sequential(nn.Dropout(), torch.jit.freeze(torch.jit.script(module))),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("form", FIXED_MODES)
def test_modules_without_a_mode_are_encoders(form):
    encoder = FIXED_MODES[form](nn.Sequential(linear(2), nn.Dropout()).eval())
    stage = FeatureStage(encoder)
    for encoded in features(stage, torch.ones(3, 1), torch.ones(3, 1)):
        assert encoded.eq(2).all()


def test_stochastic_encoders_are_keyed_by_position_and_branch():
    class Noise(nn.Module):
        def forward(self, x):
            return torch.rand(4)

    batches = [torch.zeros(1)] * 2
    stage = FeatureStage({"a": Noise(), "b": Noise()})
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, again = features(stage, *batches, seed=1), features(stage, *batches, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(x[branch], y[branch]) for x, y in zip(first, again, strict=True) for branch in "ab")
    assert not torch.equal(first[0]["a"], first[0]["b"])
    assert not torch.equal(first[0]["a"], first[1]["a"])


def test_one_feature_stage_in_two_loaders():
    stage = FeatureStage(linear(2))
    train = StreamedLoader([torch.full((1, 1), float(i)) for i in range(4)], [stage], device="cpu")
    valid = StreamedLoader([torch.full((1, 1), 10.0 * i) for i in range(4)], [stage], device="cpu")
    pairs = [(x.item(), y.item()) for x, y in zip(train, valid, strict=True)]
    assert pairs == [(0, 0), (2, 20), (4, 40), (6, 60)]


# Precision and layout


def test_autocast_argument_is_used():
    spy = Spy()
    encoder = nn.Sequential(spy, frozen(nn.Linear(4, 2)))
    assert features(FeatureStage(encoder), torch.ones(1, 4))[0].dtype is torch.float32
    assert features(FeatureStage(encoder, autocast=torch.bfloat16), torch.ones(1, 4))[0].dtype is torch.bfloat16
    assert [seen[3] for seen in spy.seen] == [False, True]
    assert not torch.is_autocast_enabled("cpu")


def test_memory_format_of_weights_and_images():
    spy = Spy()
    convolution = frozen(nn.Conv2d(3, 4, 3))
    stage = FeatureStage(nn.Sequential(spy, convolution), memory_format=torch.channels_last)
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
    (encoded,) = features(stage, torch.rand(2, 3, 8, 8))
    assert spy.seen[0][0].is_contiguous(memory_format=torch.channels_last)
    assert encoded.is_contiguous(memory_format=torch.channels_last)


def test_memory_format_ignores_other_inputs():
    class Second(nn.Module):
        def forward(self, x, size):
            return x, size

    batch = (torch.ones(2, 3), 5)
    (result,) = features(FeatureStage(Second(), on=(0, 1), memory_format=torch.channels_last), batch)
    assert result[0].stride() == batch[0].stride()
    assert result[1] == 5


# Weights that change


@pytest.mark.parametrize("assign", [False, True])
def test_update_may_load_state_dict(assign):
    stage = FeatureStage(linear(2))
    loader = StreamedLoader([torch.ones(1, 1)], [stage], device="cpu")
    assert [x.item() for x in loader] == [2]
    with stage.update():
        stage.encoder.load_state_dict(linear(7).state_dict(), assign=assign)
    assert [x.item() for x in loader] == [7]


def test_update_restores_eval_mode():
    stage = FeatureStage(nn.Sequential(nn.Dropout(), linear(2)))
    with stage.update():
        stage.encoder.train()
    assert not stage.encoder.training


# What cannot be used


class WithHead(nn.Module):
    """An encoder as a method, and a head that is trained."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.head = nn.Linear(2, 1)

    def encode(self, x):
        return self.trunk(x)

    def forward(self, x):
        return self.head(self.encode(x))


ENCODERS = {
    "module": lambda model: model,
    "method": lambda model: model.encode,
    "partial": lambda model: partial(model),
    "partial of a method": lambda model: partial(partial(model.encode)),
    "mapping": lambda model: {"good": nn.Identity(), "bad": model},
    "mapping of methods": lambda model: {"bad": partial(model.encode)},
    "ModuleDict": lambda model: nn.ModuleDict({"bad": model}),
}


@pytest.mark.parametrize("form", ENCODERS)
def test_what_the_error_about_trainable_parameters_advises_works(form):
    model = WithHead()
    model.trunk.requires_grad_(False)
    encoder = ENCODERS[form](model)
    with pytest.raises(ArgumentError, match=r"got 2 that do: head\.weight, head\.bias\. Freeze all ") as caught:
        FeatureStage(encoder)
    (code,) = re.findall(r"with (encoder\S*\.requires_grad_\(False\))\. If", str(caught.value))
    assert "such as a head's, pass an nn.Module of the other parts as the encoder." in str(caught.value)
    eval(code, {"encoder": encoder})
    loader = StreamedLoader([torch.rand(3, 2)], [FeatureStage(encoder)], device="cpu")
    assert len(list(loader)) == 1
    model.head.requires_grad_(True)
    (features,) = StreamedLoader([torch.rand(3, 2)], [FeatureStage(model.trunk)], device="cpu")
    model.head(features).sum().backward()
    assert model.head.weight.grad is not None


@pytest.mark.parametrize("form", ENCODERS)
def test_what_the_error_about_the_device_advises_works(form):
    model = WithHead().requires_grad_(False)
    encoder = ENCODERS[form](model)
    model.register_buffer("table", torch.empty(2, device="meta"))
    with pytest.raises(DeviceError) as caught:
        StreamedLoader([], [FeatureStage(encoder)], device="cpu")
    (code,) = re.findall(r"Move the encoder with (encoder.*)\.$", str(caught.value))
    model.table = torch.empty(2)  # PyTorch cannot move a meta tensor
    eval(code, {"encoder": encoder})
    StreamedLoader([], [FeatureStage(encoder)], device="cpu")


def test_the_error_about_many_trainable_parameters_lists_some():
    with pytest.raises(ArgumentError, match=r"got 20 that do: 0.weight, .*, 3.bias, …\. "):
        FeatureStage(nn.Sequential(*(nn.Linear(1, 1) for _ in range(10))))


@pytest.mark.parametrize(
    ("encoder", "which", "key"),
    [
        (frozen(nn.Linear(1, 1, device="meta")), "encoder", "weight"),
        ({"near": linear(1), "far": frozen(nn.Linear(1, 1, device="meta"))}, "encoder 'far'", "weight"),
        (frozen(nn.BatchNorm1d(1, affine=False, device="meta")), "encoder", "running_mean"),
    ],
)
def test_encoder_on_another_device_is_refused(encoder, which, key):
    with pytest.raises(DeviceError) as caught:
        StreamedLoader([], [FeatureStage(encoder)], device="cpu")
    assert f"The {which} must be on the loader's device, cpu, got {key} on meta" in str(caught.value)


def test_cpu_device_with_index():
    (encoded,) = StreamedLoader([torch.ones(1, 1)], [FeatureStage(linear(2))], device="cpu:0")
    assert encoded.item() == 2


# What can be told of an encoder without running it


def test_compiled_encoder_is_not_captured():
    compiled = "it is compiled, and may run from its own CUDA graphs"
    assert why_not_capturable(torch.compile(linear(1))) == compiled
    in_place = linear(1)
    in_place.compile()
    assert why_not_capturable(nn.Sequential(in_place)) == compiled
