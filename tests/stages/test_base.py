import functools

import kornia.augmentation as K
import pytest
import torch
from torch import nn

from gpuaug import ArgumentError, ArgumentTypeError, FeatureStage, StreamedLoader, TransformStage
from gpuaug.core.streams import Lanes
from gpuaug.stages.base import as_stages, bind_all

INTEGERS = (
    "The transform was given uint8 images, as they were loaded. If it wants floating images in [0, 1], as Kornia does, "
    "scale them first: TransformStage(lambda images: transform(images.float() / 255))."
)


def streamed(batch, *stages):
    (result,) = StreamedLoader([batch], stages, device="cpu")
    return result


def names(*stages):
    return [bound.name for bound in bind_all(as_stages(stages), Lanes(torch.device("cpu")))]


def test_a_bare_callable_is_wrapped_and_run_as_it_is():
    class Add(nn.Module):
        def forward(self, x):
            return x + 1

    def add(x, amount):
        return x + amount

    for transform in (Add(), functools.partial(add, amount=1), lambda x: x + 1, torch.nn.Sequential(Add())):
        assert streamed(torch.zeros(1), transform).item() == 1


def test_stages_run_in_order():
    assert streamed(torch.ones(1), lambda x: x + 1, TransformStage(lambda x: x * 10), lambda x: x - 1).item() == 19


def test_a_transform_is_neither_moved_nor_compiled_nor_put_into_another_mode():
    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, device="meta", dtype=torch.float64))

        def forward(self, x):
            return x * (2 if self.training else 3)

    spy = Spy()
    assert streamed(torch.ones(1), spy).item() == 2
    assert streamed(torch.ones(1), spy.eval()).item() == 3
    assert not spy.training
    assert spy.weight.is_meta
    assert spy.weight.requires_grad


def test_a_transform_may_build_an_autograd_graph():
    scale = torch.ones(1, requires_grad=True)
    streamed(torch.full((1,), 3.0), lambda x: x * scale).backward()
    assert scale.grad.item() == 3


def test_unnamed_stages_are_numbered_by_kind():
    encoder = nn.Identity()
    assert names(len, len, FeatureStage(encoder), len, FeatureStage(encoder)) == [
        "transform",
        "transform_2",
        "feature",
        "transform_3",
        "feature_2",
    ]


def test_given_names_are_kept_and_never_given_again():
    assert names(len, TransformStage(len, name="transform"), len, TransformStage(len, name="transform_3")) == [
        "transform_2",
        "transform",
        "transform_4",
        "transform_3",
    ]


def test_one_unnamed_stage_may_stand_in_two_places():
    stage = TransformStage(lambda x: x * 2)
    assert streamed(torch.ones(1), stage, stage).item() == 4


@pytest.mark.parametrize("given", [[len], (len,), []])
def test_stages_come_in_a_sequence(given):
    assert [stage.transform for stage in as_stages(given)] == list(given)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (len, "builtin_function_or_method"),
        (TransformStage(len), "TransformStage"),
        (nn.Sequential(nn.Identity()), "Sequential"),
        (K.ImageSequential(K.RandomHorizontalFlip()), "ImageSequential"),
        ("flip", "str"),
        (None, "NoneType"),
        ({len}, "set"),
        ((stage for stage in [len]), "generator"),
    ],
)
def test_anything_else_than_a_sequence_is_refused(given, kind):
    with pytest.raises(ArgumentTypeError) as caught:
        StreamedLoader([], given, device="cpu")
    assert str(caught.value) == f"stages must be a sequence of stages, got {kind}. Put it into a list: stages=[…]."


def test_two_stages_of_one_name_are_refused():
    with pytest.raises(ArgumentError) as caught:
        StreamedLoader([], [TransformStage(len, name="a"), FeatureStage(nn.Identity(), name="a")], device="cpu")
    assert str(caught.value) == (
        "The names of stages must differ, got 'a' twice. Their draws are keyed by name: give each its own."
    )


@pytest.mark.parametrize("name", ["", 3, ("a",)])
@pytest.mark.parametrize(("kind", "default"), [(TransformStage, "transform"), (FeatureStage, "feature")])
def test_a_name_is_a_non_empty_string(kind, default, name):
    with pytest.raises(ArgumentError) as caught:
        kind(nn.Identity(), name=name)
    assert str(caught.value) == f"name must be a non-empty string, got {name!r}. Leave it out for {default!r}."


@pytest.mark.parametrize("given", [None, 3, "flip"])
def test_what_cannot_be_called_is_refused(given):
    with pytest.raises(ArgumentTypeError) as caught:
        StreamedLoader([], [given], device="cpu")
    assert str(caught.value) == (
        f"transform must be a callable or nn.Module, got {type(given).__name__}. "
        "Wrap what you want to be done in a function of the tensors."
    )


def test_a_class_in_place_of_an_instance_is_refused():
    with pytest.raises(ArgumentTypeError) as caught:
        TransformStage(K.RandomHorizontalFlip)
    assert str(caught.value) == (
        "transform must be an instance, got the class RandomHorizontalFlip. Call it first: RandomHorizontalFlip(…)."
    )


def test_a_stage_says_what_it_does():
    def brighten(x):
        return x

    assert repr(TransformStage(brighten)) == "TransformStage(brighten)"
    assert repr(TransformStage(K.RandomHorizontalFlip())) == "TransformStage(RandomHorizontalFlip)"
    assert repr(FeatureStage({"a": nn.Identity(), "b": nn.Linear(1, 1).requires_grad_(False)})) == (
        "FeatureStage(Identity, Linear)"
    )


# Images as they were loaded, given to a transform that wants floats


def notes_of(transform, *values, on=...):
    with pytest.raises(Exception) as caught:  # noqa: PT011  any type: it is the transform's own
        streamed(values, TransformStage(transform, on=on))
    return type(caught.value), caught.value.__notes__


@pytest.mark.parametrize(
    "transform", [K.RandomGaussianBlur((3, 3), (1.0, 2.0), p=1.0), K.Normalize(0.5, 0.5), K.ColorJitter(0.4, p=1.0)]
)
def test_kornia_s_refusal_of_integer_images_keeps_its_type_and_says_what_to_type(transform):
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    pipeline = K.AugmentationSequential(transform)
    with pytest.raises(Exception) as plain:  # noqa: PT011
        pipeline(images)
    kind, notes = notes_of(pipeline, images)
    assert kind is plain.type
    assert notes == [INTEGERS, "gpuaug: raised in stage 'transform', at batch 0 of epoch 0."]


def test_what_the_note_says_to_type_works():
    transform = K.AugmentationSequential(K.Normalize(0.5, 0.5))
    images = torch.full((2, 3, 8, 8), 255, dtype=torch.uint8)
    assert streamed(images, TransformStage(lambda images: transform(images.float() / 255))).eq(1).all()


def fail(*values):
    raise LookupError("its own")


def test_the_note_stands_where_any_value_is_an_integer_image():
    kind, notes = notes_of(fail, torch.zeros(1), [torch.zeros(3, 2, 2, dtype=torch.int16)], on=(0, 1))
    assert kind is LookupError
    assert notes[0] == INTEGERS.replace("uint8", "int16")


@pytest.mark.parametrize(
    "value",
    [torch.zeros(2, 3, 4, 4), torch.zeros(3, 3, dtype=torch.uint8), torch.zeros(1, 1, 1, dtype=torch.complex64), "text"],
)
def test_no_note_stands_where_images_are_not_to_blame(value):
    assert notes_of(fail, value)[1] == ["gpuaug: raised in stage 'transform', at batch 0 of epoch 0."]
