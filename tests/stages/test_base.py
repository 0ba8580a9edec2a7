import functools

import kornia.augmentation as K
import pytest
import torch
from torch import nn
from torchvision.transforms import v2

from gpuaug import ArgumentTypeError, DeviceError, FeatureStage, StreamedLoader, TransformStage
from gpuaug.core.streams import Lanes
from gpuaug.stages.base import as_stages, bind_all

INTEGERS = "The transform received {} images, as the wrapped loader yields them."


def streamed(batch, *stages):
    (result,) = StreamedLoader([batch], stages, device="cpu")
    return result


def names(*stages):
    return [by_epoch[0].name for by_epoch in bind_all(as_stages(stages), Lanes(torch.device("cpu")))]


def test_transform_module_is_not_moved_compiled_or_switched():
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


def test_results_of_a_module_do_not_require_grad():
    module = nn.Linear(1, 1)
    for transform in (module, module.forward, functools.partial(module), nn.Sequential(module)):
        assert not streamed(torch.zeros(1, 1), transform).requires_grad
    assert streamed(torch.zeros(1, 1), lambda x: module(x)).requires_grad


def test_unnamed_stages_are_numbered_by_kind():
    encoder = nn.Identity()
    assert names(len, len, FeatureStage(encoder), len, FeatureStage(encoder)) == [
        "transform",
        "transform_2",
        "feature",
        "transform_3",
        "feature_2",
    ]


def test_given_stage_names_are_kept_and_unique():
    assert names(len, TransformStage(len, name="transform"), len, TransformStage(len, name="transform_3")) == [
        "transform_2",
        "transform",
        "transform_4",
        "transform_3",
    ]


def test_one_unnamed_stage_may_be_used_twice():
    stage = TransformStage(lambda x: x * 2)
    assert streamed(torch.ones(1), stage, stage).item() == 4


@pytest.mark.parametrize("given", [[len], (len,), []])
def test_stages_may_be_any_sequence(given):
    assert [stage.transform for stage in as_stages(given)] == list(given)


def test_stage_repr():
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
def test_kornia_error_for_integer_images_gets_note(transform):
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    pipeline = K.AugmentationSequential(transform)
    with pytest.raises(Exception) as plain:  # noqa: PT011
        pipeline(images)
    kind, notes = notes_of(pipeline, images)
    assert kind is plain.type
    assert notes[0].startswith(INTEGERS.format("uint8"))
    assert notes[1:] == ["gpuaug: raised in stage 'transform', at batch 0 of epoch 0."]


def test_code_in_integer_image_note_works():
    transform = K.AugmentationSequential(K.Normalize(0.5, 0.5))
    images = torch.full((2, 3, 8, 8), 255, dtype=torch.uint8)
    assert streamed(images, TransformStage(lambda images: transform(images.float() / 255))).eq(1).all()


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64"])
@pytest.mark.parametrize("transform", [nn.Conv2d(3, 4, 3), torch.mean, v2.Normalize([0.5], [0.5])])
def test_integer_image_note_for_dtype_errors(transform, dtype):
    note = notes_of(transform, torch.zeros(2, 3, 8, 8, dtype=getattr(torch, dtype)))[1][0]
    assert note.startswith(INTEGERS.format(dtype))
    assert ("images.float() / 255" in note) == (dtype == "uint8")


def test_the_note_stands_where_any_value_is_an_integer_image():
    def second(number, images):
        return torch.mean(images[0])

    (note, *_) = notes_of(second, torch.zeros(1), [torch.zeros(3, 2, 2, dtype=torch.uint8)], on=(0, 1))[1]
    assert note.startswith(INTEGERS.format("uint8"))


def fail(kind, *text):
    def transform(*values):
        raise kind(*text)

    return transform


OTHER_ERRORS = {
    "the transform's own": fail(ValueError, "expected images of 224 pixels"),
    "an assertion": fail(AssertionError),
    "gpuaug's own type error": fail(ArgumentTypeError, "images must be float, got torch.uint8. Scale them."),
    "gpuaug's own device error": fail(DeviceError, "images must be on the CPU, got 'Byte'. Move them."),
    "out of memory": fail(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …"),
    "an index": lambda images: images[9],
}


@pytest.mark.parametrize("name", OTHER_ERRORS)
def test_no_integer_image_note_for_other_errors(name):
    raised, *more = notes_of(OTHER_ERRORS[name], torch.zeros(2, 3, 8, 8, dtype=torch.uint8))[1]
    assert raised == "gpuaug: raised in stage 'transform', at batch 0 of epoch 0."
    assert bool(more) == (name == "out of memory")  # which has a note of what to lower


@pytest.mark.parametrize(
    "value",
    [torch.zeros(2, 3, 4, 4), torch.zeros(3, 3, dtype=torch.uint8), torch.zeros(1, 1, 1, dtype=torch.complex64), "text"],
)
def test_no_integer_image_note_without_integer_images(value):
    notes = notes_of(fail(RuntimeError, "not implemented for 'Byte'"), value)[1]
    assert notes == ["gpuaug: raised in stage 'transform', at batch 0 of epoch 0."]
