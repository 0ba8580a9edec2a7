"""Advice about stages: what they are given of a batch, and where they put it."""

import torch
from support.messages.registry import example
from support.messages.values import IMAGES, LABELS, run
from torch import nn
from torchvision.transforms import v2

import gpuaug


def stage(transform=torch.negative, **options):
    return gpuaug.TransformStage(transform, **options)


@example("Return a tuple in that order, or pass into=")
def one_value_for_two(told):
    def added(one, other):
        return one + other

    with told:
        run((LABELS, LABELS), stage(added, on=(0, 1)))
    assert torch.equal(run((LABELS, LABELS), stage(lambda one, other: (-one, other), on=(0, 1)))[0], -LABELS)
    assert torch.equal(run((LABELS, LABELS), stage(added, on=(0, 1), into=2))[2], 2 * LABELS)


@example("transform must have an argument data_keys if on is a mapping")
def function_without_data_keys(told):
    with told:
        run((LABELS,), stage(lambda labels: -labels, on={0: "class"}))
    assert torch.equal(run((LABELS,), stage(on=0))[0], -LABELS)
    with told:
        run((LABELS, LABELS), stage(lambda one, other: (-one, other), on={0: "class", 1: "class"}))
    assert torch.equal(run((LABELS, LABELS), stage(lambda one, other: (-one, other), on=(0, 1)))[0], -LABELS)


@example("Pass on=None for batches that may be empty")
def member_of_an_empty_list(told):
    with told:
        run([], stage())
    assert run([], stage(lambda batch: batch, on=None)) == []


@example("stages must be a sequence of stages")
def stage_without_a_list(told):
    with told:
        gpuaug.StreamedLoader([LABELS], torch.negative, device="cpu")
    (got,) = gpuaug.StreamedLoader([LABELS], stages=[torch.negative], device="cpu")
    assert torch.equal(got, -LABELS)


@example("The names of stages must differ")
def name_twice(told):
    with told:
        run(LABELS, stage(name="one"), stage(name="one"))
    assert torch.equal(run(LABELS, stage(name="one"), stage(name="two")), LABELS)


@example("The stages of a schedule must have one name")
def names_that_change(told):
    with told:
        gpuaug.until(1, stage(name="one"), stage())
    assert torch.equal(run(LABELS, gpuaug.until(1, stage(name="one"), stage(name="one"))), -LABELS)


@example("Pass gpuaug.fuse(…), which draws for each image")
def transform_that_draws_once(told):
    transform, images = v2.RandomCrop(4), torch.arange(64).view(1, 1, 8, 8).expand(16, 3, 8, 8).to(torch.uint8)
    with told:
        stage(transform)
    got = run(images, gpuaug.fuse(transform))
    assert not all(torch.equal(each, got[0]) for each in got)
    once = run(images, lambda images: transform(images))
    assert all(torch.equal(each, once[0]) for each in once)


@example("Put gpuaug.fuse(…, ragged=True), which makes")
def ragged_batch_for_a_function(told):
    packed, transform = gpuaug.collate_ragged([IMAGES[0], IMAGES[1, :, :5]]), torch.negative
    with told:
        run(packed, transform)
    fused = gpuaug.fuse(v2.Resize((4, 4)), ragged=True)
    assert run(packed, fused, transform).shape == (2, 3, 4, 4)


@example("A container of tensors must be of a type that can be rebuilt")
def container_that_cannot_be_rebuilt(told):
    class Pair(tuple):
        def __new__(cls, one, other):
            return tuple.__new__(cls, (one, other))

    with told:
        run(Pair(IMAGES, LABELS), stage())
    assert torch.equal(run((LABELS, IMAGES), stage())[0], -LABELS)

    class Moved(Pair):
        def to(self, device):
            return Moved(*(each.to(device) for each in self))

    assert isinstance(run(Moved(IMAGES, LABELS)), Moved)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, features):
        return self.linear(features)


FEATURES = torch.ones(2, 3)


@example("Write autocast=torch.bfloat16")
def autocast_of_integers(told):
    encoder = Encoder().requires_grad_(False)
    with told:
        gpuaug.FeatureStage(encoder, autocast=torch.int8)
    assert run(FEATURES, gpuaug.FeatureStage(encoder, autocast=torch.bfloat16)).dtype is torch.bfloat16


@example("The keys of encoder must be names")
def encoders_without_names(told):
    encoder = nn.Identity()
    for key in (None, 1):
        with told:
            gpuaug.FeatureStage({key: encoder, "b": encoder})
    assert run(FEATURES, gpuaug.FeatureStage({"name": encoder, "b": encoder})).keys() == {"name", "b"}


@example("output must name a part of the encoder's result")
def output_that_is_not_there(told):
    with told:
        run(FEATURES, gpuaug.FeatureStage(nn.Identity(), output="last_hidden_state"))
    with told:
        run(FEATURES, gpuaug.FeatureStage(nn.Identity(), output="relu"))
    assert torch.equal(run(FEATURES, gpuaug.FeatureStage(nn.Identity(), output=lambda result: result.relu())), FEATURES.relu())
    assert torch.equal(run(FEATURES, gpuaug.FeatureStage(nn.Identity())), FEATURES)
