"""Definition of a stage: it differs where one argument does, and not from process to process or from run to run."""

import inspect
from contextlib import suppress
from functools import partial, partialmethod
from itertools import cycle

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from PIL import Image
from support.comparison.replay import photographs
from support.ops.other_arguments import (
    FLIPS,
    KORNIA,
    OTHERS,
    TORCHVISION,
    WITHOUT_EFFECT,
    all_defined,
    containers,
    defined,
    made,
    other_values,
)
from support.process import processes
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug

EVERY = [*KORNIA, *TORCHVISION, *OTHERS]


def named(value):
    return f"{value.__module__.partition('.')[0]}.{value.__name__}" if isinstance(value, type) else value


@pytest.mark.parametrize("kind", EVERY, ids=named)
def test_another_argument_makes_another_definition(kind):
    """Each argument alone, and within one of the containers in turn."""
    wraps = containers(kind)
    before = {container: defined(wrap(made(kind))) for container, wrap in wraps.items()}
    for (name, value), container in zip(other_values(kind).items(), cycle(wraps)):
        for where in {"alone", container}:
            definition = defined(wraps[where](made(kind, **{name: value})))
            assert (definition != before[where]) is ((kind.__name__, name) not in WITHOUT_EFFECT), (name, where)


HALF = [pytest.param(kind, id=named(kind), marks=[pytest.mark.slow] * (number % 2)) for number, kind in enumerate(EVERY)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", HALF)
def test_definition_is_the_same_anew_and_after_a_run(kind):
    ran = 0
    for container, wrap in containers(kind).items():
        pipeline = wrap(made(kind))
        before = defined(pipeline)
        assert before == defined(wrap(made(kind))), container
        if container != "alone" and kind not in (K.RandomAffine, v2.ColorJitter):
            continue
        for run in (gpuaug.fuse, lambda module: module):
            with torch.random.fork_rng(), suppress(gpuaug.GpuAugError, TypeError, ValueError, NotImplementedError):
                augment = run(pipeline)
                of_stage = defined(augment)
                augment(*ARGUMENTS.get(kind, (photographs(),)))
                ran += 1
                assert defined(augment) == of_stage, container
            assert defined(pipeline) == before, container
    assert ran, "in no container did it run"


ARGUMENTS = {
    **{kind: (photographs()[None],) for kind in (K.VideoSequential, v2.UniformTemporalSubsample)},
    **{kind: (photographs(dtype=torch.float32), torch.arange(3)) for kind in (v2.MixUp, v2.CutMix)},
    v2.Normalize: (photographs(dtype=torch.float32),),
    v2.LinearTransformation: (torch.rand(2, 3, 4, 4),),
    v2.RandomIoUCrop: (
        tv_tensors.Image(photographs()[0]),
        tv_tensors.BoundingBoxes(torch.tensor([[4, 4, 20, 20]]), format="XYXY", canvas_size=tuple(photographs().shape[-2:])),
    ),
    v2.SanitizeBoundingBoxes: (
        {"boxes": tv_tensors.BoundingBoxes(torch.zeros(1, 4), format="XYXY", canvas_size=(8, 8)), "labels": torch.ones(1)},
    ),
}
"""Arguments of a call, where they are not images alone."""


ANOTHER_PROCESS = """
from support.ops import other_arguments
print(hash("a string"))
print(other_arguments.all_defined())
"""


def test_definition_is_the_same_in_another_process():
    done = processes.run_script(ANOTHER_PROCESS)
    hashed, definitions = done.stdout.splitlines()
    assert int(hashed) != hash("a string"), "the order of sets is another there"
    assert definitions == str(all_defined())


class Scaled(nn.Module):
    def __init__(self, by=1.0, kernel=None):
        super().__init__()
        self._by, self.calls = by, 0
        self.register_buffer("kernel", kernel)

    def forward(self, images):
        self.calls += 1
        return images * self._by


class Preset:
    def __init__(self, size, *, crop=True):
        self.transforms = v2.Compose([v2.Resize(size), v2.CenterCrop(size) if crop else v2.Identity()])
        self.size, self.crop, self.last = size, crop, None

    def __call__(self, images):
        self.last = images
        return self.transforms(images)


def closed_over(by, names=()):
    def scaled(images, least=0.0):
        return (images * by).clamp(least) if names else images

    return scaled


DIFFERENT = {
    "a module of the user's": (Scaled, {"by": 2.0}),
    "its buffer": (lambda at=1: Scaled(kernel=torch.full((9, 9), at)), {"at": 2}),
    "an object": (lambda size=8, **crop: Preset(size, **crop), {"size": 9}),
    "a keyword of an object": (lambda crop=True: Preset(8, crop=crop), {"crop": False}),
    "what a function closes over": (lambda by=1.0: closed_over(by), {"by": 2.0}),
    "what partial binds": (lambda by=1.0: partial(torch.mul, other=by), {"by": 2.0}),
    "an array": (lambda at=0: partial(torch.mul, other=np.full(3, at)), {"at": 1}),
    "a large tensor": (lambda at=0: partial(torch.mul, other=torch.full((64, 64), at)), {"at": 1}),
    "the shape of a tensor": (lambda shape=(2, 50): partial(torch.mul, other=torch.zeros(shape)), {"shape": (50, 2)}),
    "an item of a dict": (lambda at=0: [v2.Pad(2, fill={tv_tensors.Image: at, "others": 1})], {"at": 1}),
    "the order of a list": (lambda turn=1: FLIPS[::turn], {"turn": -1}),
    "the children of a module": (lambda kind=nn.ReLU: nn.Sequential(Scaled(), kind()), {"kind": nn.Identity}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_functions_and_objects_of_the_users_are_told_apart_by_their_arguments(what):
    make, other = DIFFERENT[what]
    assert defined(make()) == defined(make())
    assert defined(make(**other)) != defined(make())


class Holder:
    def __init__(self, value):
        self.value = value

    def __call__(self, images):
        return images


class Raising:
    def __init__(self, value=None):
        pass

    def __repr__(self):
        raise RuntimeError("no repr")


class WithoutSignature:
    __init__ = partialmethod(lambda self, value=None: None)


class Addressed:
    def __init__(self, *names):
        self.text = names[0]

    def __repr__(self):
        return f"<{self.text} at 0x{id(self):X}>"


class Sized(np.ndarray):
    """A subclass of an array."""


COMPARED = {
    "strings": lambda text="dog": np.array(["cat", text]),
    "many strings": lambda text="dog": np.array([text] * 99),
    "objects": lambda item=1: np.array([item, None, "a"], object),
    "records": lambda count=1: np.array([(count, 2.0)], [("count", "i4"), ("size", "f8")]),
    "records of objects": lambda item=1: np.array([(item, 2.0)], [("item", "O"), ("size", "f8")]),
    "big-endian": lambda start=0: np.arange(start, start + 20, dtype=">f4"),
    "longdouble": lambda start=0: np.arange(start, start + 20, dtype=np.longdouble) / 3,
    "times": lambda day="01": np.array([f"2020-01-{day}"] * 20, "M8[D]"),
    "a subclass": lambda start=0: np.arange(start, start + 20).view(Sized),
    "reversed": lambda start=0: np.arange(start, start + 20)[::-1],
    "float16": lambda start=0: np.arange(start, start + 20, dtype=np.float16),
    "bfloat16": lambda start=0: torch.arange(start, start + 20, dtype=torch.bfloat16),
    "conjugate": lambda start=0: torch.arange(start, start + 20).to(torch.complex64).conj(),
    "imaginary": lambda start=0: (torch.arange(start, start + 20) * 1j).conj().imag,
    "quantized": lambda start=0: torch.quantize_per_tensor(torch.arange(start, start + 20.0), 0.5, 0, torch.quint8),
    "sparse": lambda size=20: torch.eye(size).to_sparse(),
    "compressed rows": lambda size=20: torch.eye(size).to_sparse_csr(),
    "meta": lambda size=20: torch.zeros(size, device="meta"),
    "the size of an image": lambda size=(2, 3): Image.new("L", size),
    "an object with an address of upper-case digits": lambda name="a": Addressed(name),
}
"""Values of an attribute. The argument is part of the definition."""
OTHER = {"text": "owl", "item": 2, "count": 2, "start": 1, "day": "02", "size": 21, "name": "b"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", COMPARED)
def test_attributes_of_any_type_are_compared(what):
    make = COMPARED[what]
    (name,) = inspect.signature(make).parameters
    other = (3, 2) if what == "the size of an image" else OTHER[name]
    first, same = Holder(make()), Holder(make())
    assert defined(first) == defined(same)
    assert defined(Holder(make(**{name: other}))) != defined(first)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [Raising, WithoutSignature, lambda: torch.nested.nested_tensor([torch.zeros(2)])])
def test_values_that_cannot_be_described_have_the_name_of_their_class(make):
    value = make()
    assert f"Holder(value={type(value).__qualname__})" in defined(Holder(value))


@pytest.mark.parametrize("made", [Scaled(), Preset(8), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3)])
def test_what_a_run_changes_and_weights_are_no_part_of_a_definition(made):
    before = defined(made)
    made(torch.rand(2, 3, 8, 8))
    if isinstance(made, nn.Conv2d):
        nn.init.zeros_(made.weight)
    assert defined(made) == before


def test_dtype_of_draws_is_no_part_of_a_definition():
    pipeline = K.AugmentationSequential(K.RandomAffine(10.0), K.ColorJitter(0.1), K.RandomGaussianBlur((3, 3), (0.1, 2.0)))
    before = defined(pipeline)
    assert defined(pipeline.to(torch.float64)) == before


def test_object_within_itself_has_a_definition():
    inner = Preset(8)
    inner.size = inner
    assert defined(inner).count("Preset") == 1
