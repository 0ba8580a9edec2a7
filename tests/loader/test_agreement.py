"""A state names the stages it is of, and another pipeline is refused with the argument that differs."""

from functools import partial

import kornia.augmentation as K
import pytest
import torch
from support.checkpoints import saved
from torch import nn

from gpuaug import ArgumentError, DecodeStage, FeatureStage, GpuAugWarning, StreamedLoader, TransformStage, fuse
from gpuaug.loader.agreement import definition

STRICT = "To go on with other batches, pass strict=False to load_state_dict."


def brighter(images, by=0.1):
    return images + by


class Brighter:
    def __call__(self, images):
        return images + 0.1


class Shown(Brighter):
    def __repr__(self):
        return f"Shown(held={object.__repr__(self)})"


def pipeline(p=0.5, **options):
    return K.AugmentationSequential(K.RandomHorizontalFlip(p=p), K.RandomVerticalFlip(p=0.3), **options)


def encoder(width=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(12, width)).requires_grad_(False)


DEFINITIONS = {
    "a function": (lambda: brighter, "transform=brighter"),
    "a method": (lambda: Brighter().__call__, "transform=Brighter.__call__"),
    "an object": (Brighter, "transform=Brighter"),
    "an object that shows another": (Shown, f"transform=Shown(held=<{__name__}.Shown object>)"),
    "a partial function": (lambda: partial(brighter, by=0.2), "transform=partial(brighter, by=0.2)"),
    "a module": (lambda: nn.Linear(2, 3), "transform=Linear(in_features=2, out_features=3, bias=True)"),
    "other members": (lambda: TransformStage(brighter, on=("a", "b"), name="x"), "on=('a', 'b'), transform=brighter"),
    "a decoder": (
        lambda: DecodeStage(min_side=64, backend="cpu"),
        "on_error='raise', options=Options(channels=3, min_side=64, exif=True, max_pixels=178956970)",
    ),
}


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_definition_is_of_arguments_alone(kind):
    make, text = DEFINITIONS[kind]
    given = make()
    assert definition(TransformStage(given) if callable(given) and not isinstance(given, DecodeStage) else given) == text


DIFFERENT = {
    "a probability": (fuse(pipeline()), fuse(pipeline(0.8)), "RandomHorizontalFlip(p=0.5", "RandomHorizontalFlip(p=0.8"),
    "which apply": (fuse(pipeline()), fuse(pipeline(random_apply=1)), "'random_apply': False", "'random_apply': (1, 2)"),
    "an option": (fuse(pipeline()), fuse(pipeline(), views=2), "views=1", "views=2"),
    "a bare pipeline": (pipeline(), pipeline(0.8), "RandomHorizontalFlip(p=0.5", "RandomHorizontalFlip(p=0.8"),
    "an encoder": (FeatureStage(encoder()), FeatureStage(encoder(4)), "out_features=3", "out_features=4"),
    "a line more": (nn.Sequential(nn.Flatten()), nn.Sequential(nn.Flatten(), nn.Flatten()), ")", "(1): Flatten"),
    "far down": (
        nn.Sequential(*(nn.Identity() for _ in range(200))),
        nn.Sequential(*(nn.Identity() for _ in range(201))),
        "…",
        "…",
    ),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_other_stage_is_refused_by_what_differs(kind):
    then, now, before, after = DIFFERENT[kind]
    state = saved(StreamedLoader([torch.zeros(2, 3, 4, 4)], [then], device="cpu", seed=1).state_dict())
    assert len(repr(state)) < 3000
    loader = StreamedLoader([torch.zeros(2, 3, 4, 4)], [now], device="cpu", seed=1)
    with pytest.raises(ArgumentError) as raised:
        loader.load_state_dict(state)
    (name,) = loader.state_dict()["stages"]
    text = str(raised.value)
    assert text.startswith(f"Stage {name!r} must be ")
    assert text.endswith(f". Give the stage of then. {STRICT}")
    was, got = text.removesuffix(f". Give the stage of then. {STRICT}").split(", as in the state, got ")
    assert before in was
    assert after in got
    with pytest.warns(GpuAugWarning, match=f"Stage {name!r} must be "):
        loader.load_state_dict(state, strict=False)


def test_same_stages_are_taken_after_they_ran():
    def loader():
        stages = [fuse(pipeline()), TransformStage(pipeline(), name="bare"), FeatureStage(encoder())]
        return StreamedLoader([torch.rand(2, 3, 2, 2)] * 2, stages, device="cpu", seed=1)

    ran = loader()
    next(iter(ran))
    resumed = loader()
    resumed.load_state_dict(saved(ran.state_dict()))
    assert len(list(resumed)) == 1


@pytest.mark.parametrize(("names", "others"), [("ab", "ba"), ("ab", "a"), ("", "a")])
def test_other_names_of_stages_are_refused(names, others):
    def loader(names):
        return StreamedLoader([torch.zeros(2)], [TransformStage(brighter, name=name) for name in names], device="cpu", seed=1)

    with pytest.raises(ArgumentError) as raised:
        loader(others).load_state_dict(loader(names).state_dict())
    assert str(raised.value) == (
        f"The names of stages must be {', '.join(names) or 'none'}, as in the state, got {', '.join(others)}. "
        f"Their draws are keyed by name: give the stages of then. {STRICT}"
    )
