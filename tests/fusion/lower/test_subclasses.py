"""Subclasses of lowered classes: those that override no method are lowered as their base, all others are left and named."""

import copy
import inspect
import pickle
import types

import kornia.augmentation as K
import pytest
import torch
from kornia.augmentation import auto
from kornia.augmentation import random_generator as rg
from kornia.augmentation.auto.operations import ops as operations
from support.batches.ragged import images_of, pack
from support.comparison.replay import assert_replays, overriding, photographs
from support.comparison.torchvision_replay import assert_replays as assert_torchvision_replays
from support.comparison.values import assert_values
from support.ops.other_arguments import TORCHVISION, made, other_values
from torch import nn
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms._presets import ImageClassification

import gpuaug
from gpuaug.core import torchvision_types
from gpuaug.fusion.lower import kornia, torchvision
from gpuaug.fusion.lower.image_types import ImageTypes
from gpuaug.fusion.lower.pipeline import lower
from gpuaug.fusion.lower.tree import leaves
from gpuaug.fusion.normalization import normalized_by

TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
left = pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")

OF_KORNIA = [*kornia.LOWERED, *kornia.POLICIES, *kornia.CONTAINERS]
OF_V2 = sorted(
    (kind for kind in torchvision.LOWERED_CLASSES if kind.__module__.startswith("torchvision.transforms.v2")), key=str
)
OF_V1 = {
    v1.ColorJitter: (0.4,), v1.Compose: ([v1.RandomInvert()],), v1.Normalize: ([0.5], [0.5]),
    v1.RandomApply: ([v1.RandomInvert()],),
    v1.RandomChoice: ([v1.RandomInvert(), v1.RandomVerticalFlip()],), v1.RandomErasing: (),
    v1.RandomOrder: ([v1.RandomInvert(), v1.RandomVerticalFlip()],), v1.RandomResizedCrop: (8,), v1.ToTensor: (),
    ImageClassification: (),
}  # fmt: skip
SETTINGS = {v2.ToDtype: {"scale": True}, v2.Grayscale: {"num_output_channels": 3}}


def instance(kind, made_as=None):
    if kind in OF_V1:
        given = {"crop_size": 8, "resize_size": 9} if kind is ImageClassification else {}
        return (made_as or kind)(*OF_V1[kind], **given)
    return made(kind, made_as, **SETTINGS.get(kind, {}))


def subclass(kind, **attributes):
    """A subclass with a constructor, which accepts what that of the base does, and these attributes."""

    def __init__(self, *args, **kwargs):
        kind.__init__(self, *args, **kwargs)

    return type("Own", (kind,), {"__init__": __init__, **attributes})


def pipeline(module):
    """A pipeline with a module, behind which all images have one size."""
    if isinstance(module, nn.Module) and torchvision_types.torchvision_class(module) is None:
        return [module]
    if isinstance(module, v2.SanitizeBoundingBoxes):
        return [v2.RandomHorizontalFlip(), module]
    if isinstance(module, v2.LinearTransformation):  # of images of 48 numbers
        return [TO_FLOAT, v2.Resize((4, 4)), module]
    rest = v2.Resize((8, 8)) if isinstance(module, v2.RandomIoUCrop) else v2.RandomCrop(8, pad_if_needed=True)
    if isinstance(module, v2.ToDtype | v2.ToTensor | v1.ToTensor | v2.ConvertImageDtype | ImageClassification):
        return [module, rest]
    takes_floats = isinstance(module, v2.Normalize | v1.Normalize | v2.MixUp | v2.CutMix)
    return [TO_FLOAT, module, rest] if takes_floats else [module, rest, TO_FLOAT]


def outcome(module):
    images = photographs(4, height=16, width=24)
    augment = gpuaug.fuse(pipeline(module))
    torch.manual_seed(3)
    if isinstance(module, v2.MixUp | v2.CutMix):
        return augment, augment(images, torch.arange(4), data_keys=["input", "class"])
    if isinstance(module, v2.RandomIoUCrop):
        targets = [{"boxes": torch.tensor([[2.0, 3.0, 20.0, 12.0]]), "labels": torch.ones(1)} for _ in range(4)]
        return augment, augment(images, targets, data_keys=["input", "targets"])[:1]
    takes_clips = isinstance(module, K.VideoSequential | v2.UniformTemporalSubsample)
    return augment, [augment(images[:, None] if takes_clips else images)]


ATTRIBUTES = {name for kind in [*OF_KORNIA, *OF_V2, *OF_V1] for name in vars(instance(kind))} - set(vars(nn.Module()))
"""Names of the attributes of all modules."""


@pytest.mark.parametrize("kind", [*OF_KORNIA, *OF_V2, *OF_V1], ids=lambda kind: f"{kind.__module__[:6]} {kind.__name__}")
@pytest.mark.every(3)
def test_a_subclass_that_overrides_nothing_is_fused_as_its_base(kind):
    module = instance(kind, subclass(kind))
    for name in ATTRIBUTES:
        if not hasattr(module, name):  # of another class, and nothing to this one
            setattr(module, name, object())
    _, wanted = outcome(instance(kind))
    augment, got = outcome(module)
    assert "left to" not in repr(augment)
    assert type(got) is type(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert_values(one, other)


@pytest.mark.parametrize("kind", [v1.Compose, v2.RandomInvert, K.RandomInvert], ids=lambda kind: kind.__module__)
def test_a_subclass_is_fused_as_its_base_after_both_were_copied(kind):
    """``copy`` adds an attribute to the class of what it copies."""
    modules = [([v2.RandomInvert()],) if kind is v1.Compose else () for _ in range(2)]
    modules = [class_(*given) for class_, given in zip((kind, subclass(kind)), modules, strict=True)]
    for _ in range(2):
        assert "left to" not in repr(gpuaug.fuse(copy.deepcopy(modules)))


def overrides(kind):
    """Each attribute that a class of the library's defines, and another value for it."""
    for name in sorted(
        {name for base in kind.__mro__ if base not in (object, nn.Module, nn.Sequential) for name in vars(base)}
    ):
        value = inspect.getattr_static(kind, name)
        # Every subclass in v2 is given the get_params of v1 anew.
        if name in torchvision_types.IGNORED_OVERRIDES or (name == "get_params" and issubclass(kind, v2.Transform)):
            continue
        if isinstance(value, property):
            value = property(value.fget, value.fset)
        elif isinstance(value, types.FunctionType):
            value = lambda self, *args, **kwargs: None  # noqa: E731
        elif isinstance(value, staticmethod | classmethod):
            value = type(value)(lambda *args, **kwargs: None)
        else:
            value = (object(),)
        yield name, value


@left
@pytest.mark.parametrize("kind", [*OF_KORNIA, *OF_V2, *OF_V1], ids=lambda kind: f"{kind.__module__[:6]} {kind.__name__}")
def test_a_subclass_that_overrides_a_method_is_left_and_the_method_is_named(kind):
    """Each class with all attributes of its own, and with a fourth of those that it inherits."""
    module, first = instance(kind), [*OF_KORNIA, *OF_V2, *OF_V1].index(kind)
    own_or_fourth = (each for turn, each in enumerate(overrides(kind), first) if each[0] in vars(kind) or turn % 4 == 0)
    for name, value in own_or_fourth:
        module.__class__ = type("Own", (kind,), {name: value})
        reason = f"a subclass of {kind.__name__} that overrides {name}"
        try:
            tree = lower(pipeline(module), ImageTypes(torch.uint8))
            reasons = [leaf.op.reason for leaf in leaves(tree) if hasattr(leaf.op, "reason")]
        except gpuaug.ArgumentTypeError as error:  # a module that cannot be left
            reasons = [reason] if reason in str(error) else [str(error)]
        assert reasons == [reason]


def blur_of(library):
    """DINOv2's GaussianBlur, of v1, and DINOv3's, of v2: dinov2/data/transforms.py, facebookresearch/dinov2 at 05c66df."""

    class GaussianBlur(library.RandomApply):
        def __init__(self, *, p=0.5, radius_min=0.1, radius_max=2.0):
            super().__init__(transforms=[library.GaussianBlur(kernel_size=9, sigma=(radius_min, radius_max))], p=1 - p)

    return GaussianBlur


@pytest.mark.parametrize("library", [v1, v2], ids=["v1", "v2"])
def test_a_container_around_a_blur_is_a_pass_that_replays(library):
    made = [v2.RandomResizedCrop((24, 32)), blur_of(library)(p=0.4), TO_FLOAT]
    got = assert_torchvision_replays(v2.Compose([TO_FLOAT, *made[:2]]), photographs(8), atol=5e-5)
    assert gpuaug.fuse(made).explain((8, 3, 32, 48)).launches == 2
    assert got.shape == (8, 3, 24, 32)


@pytest.mark.parametrize("kind", [K.LongestMaxSize, K.SmallestMaxSize])
@pytest.mark.parametrize("size", [(32, 48), (48, 32), (30, 30)])
def test_the_resizes_of_one_side_replay(kind, size):
    assert_replays(K.AugmentationSequential(kind(20), K.PadTo((40, 40))), photographs(3, 3, *size), atol=5e-5)


@pytest.mark.parametrize("kind", [K.LongestMaxSize, K.SmallestMaxSize])
def test_the_resizes_of_one_side_take_images_of_every_size(kind):
    images = images_of()
    sides = (96, 96)
    wanted = torch.cat([K.PadTo(sides)(kind(30)(image[None].float() / 255)) for image in images])
    assert_values(gpuaug.fuse([kind(30), K.PadTo(sides)], ragged=True)(pack(images)), wanted, atol=5e-5)


class Mixin:
    """Calls itself in the place of what it is mixed into."""

    def forward(self, *inputs):
        return inputs[0]


class Extended(v2.RandomInvert):
    """Methods, properties and settings under names of its own."""

    chance = 0.5

    def shown(self):
        return f"{self.p}"

    @property
    def doubled(self):
        return 2 * self.p

    def extra_repr(self):
        return "p, and more"


class Halved(v2.RandomInvert):
    @property
    def p(self):
        return self._chance / 2

    @p.setter
    def p(self, chance):
        self._chance = chance


class Reading(v2.RandomInvert):
    def __getattribute__(self, name):
        return super().__getattribute__(name)


class Decorated(K.RandomInvert):
    """Claims to be what it wraps, as Kornia's copies of forward are."""

    def forward(self, images, params=None, **kwargs):
        return 1 - super().forward(images, params, **kwargs)

    forward.__wrapped__ = K.RandomInvert.forward


class Named(K.RandomContrast):
    """Draws under other names than its base."""

    def __init__(self):
        super().__init__()
        self._param_generator = rg.PlainUniformGenerator((torch.tensor([0.5, 1.5]), "factor", None, None))


class Gauss(rg.PlainUniformGenerator):
    def forward(self, batch_shape, same_on_batch=False):
        return {name: torch.randn(batch_shape[0]) for name in ("contrast_factor",)}


class Bare(v2.RandomCrop):
    def __init__(self):
        nn.Module.__init__(self)


class Alone(v2.RandomCrop):
    """A constructor and a method that need nothing of the base's."""

    def __init__(self):
        nn.Module.__init__(self)

    def forward(self, image):
        return image


class Thresholds(operations.Solarize):
    """Kornia's operation with a function of the user's own."""

    def __init__(self):
        super().__init__()
        self._magnitude_fn = lambda magnitudes: magnitudes * torch.rand(1)


def changed(module, **attributes):
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def hooked(module):
    module.register_forward_hook(lambda *_: None)
    return module


def with_thresholds():
    policy = auto.TrivialAugment([[("solarize", 0.0, 1.0)]])
    policy[0][0] = Thresholds()
    return policy


INVERT = "RandomInvert"
CHANGED = {
    "mixed in": (lambda: type("Own", (Mixin, v2.RandomInvert), {})(), f"a subclass of {INVERT} that overrides forward"),
    "between its bases": (
        lambda: type("Own", (v2.RandomInvert, type("Between", (v2.Transform,), {"check_inputs": print})), {})(),
        f"a subclass of {INVERT} that overrides check_inputs",
    ),
    "a property": (Halved, f"a subclass of {INVERT} that overrides p"),
    "a type": (lambda: type("Own", (v2.RandomInvert,), {"_transformed_types": ()})(), "overrides _transformed_types"),
    "a claim": (Decorated, f"a subclass of {INVERT} that overrides forward"),
    "reads": (Reading, f"a subclass of {INVERT} that overrides __getattribute__"),
    "an instance": (lambda: changed(v2.RandomInvert(), forward=print), "its forward is replaced"),
    "an instance of Kornia's": (lambda: changed(K.RandomInvert(), apply_transform=print), "its apply_transform is replaced"),
    "an instance of v1": (lambda: changed(v1.RandomInvert(), forward=print), "its forward is replaced"),
    "a hook": (lambda: hooked(v2.RandomInvert()), "it has forward hooks"),
    "a hook of a container": (lambda: hooked(v2.RandomApply([v2.RandomInvert()])), "it has forward hooks"),
    "a hook in Kornia": (lambda: hooked(K.RandomInvert()), "it has forward hooks"),
    "a generator": (
        lambda: changed(K.RandomContrast(), _param_generator=Gauss((torch.ones(2), "contrast_factor", None, None))),
        "its _param_generator, Gauss, is not the generator of RandomContrast",
    ),
    "a generator of another class": (
        lambda: changed(K.RandomAffine(10.0), _param_generator=rg.ResizeGenerator((8, 8))),
        "its _param_generator, ResizeGenerator, is not the generator of RandomAffine",
    ),
    "a generator of none": (
        lambda: changed(K.RandomInvert(), _param_generator=rg.ResizeGenerator((8, 8))),
        "its _param_generator, ResizeGenerator, is not the generator of RandomInvert",
    ),
    "other names": (Named, "a subclass of RandomContrast with other attributes: 'contrast_factor'"),
    "no attributes": (Bare, "a subclass of RandomCrop with other attributes: 'Bare' object has no attribute '_fill'"),
    "a value of another form": (
        lambda: changed(v2.RandomResizedCrop(8), size=4),
        "RandomResizedCrop with other attributes: cannot unpack non-iterable int object",
    ),
    "too few values": (
        lambda: changed(v2.RandomCrop(8), size=[4]),
        "RandomCrop with other attributes: not enough values to unpack (expected 2, got 1)",
    ),
    "an operation that torchvision's do not have": (
        lambda: changed(v2.TrivialAugmentWide(), _AUGMENTATION_SPACE={"Blur": (lambda *_: None, False)}),
        "TrivialAugmentWide with other attributes: 'Blur'",
    ),
    "another type, in Kornia": (
        lambda: changed(K.RandomInvert(), p=None),
        "RandomInvert with other attributes: float() argument",
    ),
    "needs no attributes": (Alone, "a subclass of RandomCrop that overrides forward"),
    "a policy": (with_thresholds, "is an operation whose magnitude function is not Kornia's"),
}


@left
@pytest.mark.parametrize("name", CHANGED)
def test_a_module_that_may_do_otherwise_than_its_class_is_left(name):
    make, reason = CHANGED[name]
    found = [leaf.op.reason for leaf in leaves(lower([make()], ImageTypes(torch.uint8))) if hasattr(leaf.op, "reason")]
    assert len(found) == 1
    assert reason in found[0]


MODIFICATIONS = {
    "forward hook": lambda module: module.register_forward_hook(lambda *_: torch.full((2, 3, 8, 8), 7.0)),
    "pre-hook": lambda module: module.register_forward_pre_hook(lambda *_: torch.full((2, 3, 8, 8), 7.0)),
    "forward": lambda module: changed(module, forward=lambda _: torch.full((2, 3, 8, 8), 7.0)),
}
AROUND = {
    "nothing": lambda module: module,
    "a list": lambda module: [v2.RandomInvert(0.0), module],
    "nn.Sequential": lambda module: nn.Sequential(v2.RandomInvert(0.0), module),
    "Compose": lambda module: v2.Compose([v2.RandomInvert(0.0), module]),
    "RandomApply": lambda module: v2.RandomApply([module], p=1.0),
    "RandomChoice": lambda module: v2.RandomChoice([module]),
    "Kornia": lambda module: K.AugmentationSequential(K.RandomInvert(p=0.0), module),
}


@left
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("modification", MODIFICATIONS)
def test_a_modified_sequential_is_called_as_it_is(modification, around):
    for child in (v2.RandomHorizontalFlip(0.0), K.RandomHorizontalFlip(p=0.0)):
        sequential = nn.Sequential(child)
        MODIFICATIONS[modification](sequential)
        assert gpuaug.fuse(AROUND[around](sequential))(torch.rand(2, 3, 8, 8)).eq(7).all()


def test_names_of_its_own_are_a_subclass_s_affair():
    assert "left to" not in repr(gpuaug.fuse([Extended()]))
    assert_torchvision_replays(Extended(0.5), photographs(16))


def test_the_attributes_of_a_subclass_count_when_it_is_fused():
    class Later(K.RandomAffine):
        def __init__(self):
            super().__init__(10.0)
            self.p = 0.25
            self._param_generator = rg.AffineGenerator((40.0, 40.0), None, None, None)

    draws = gpuaug.fuse(Later()).draw((400, 3, 8, 8), seed=0).as_kornia()
    assert bool((draws["angle"] == 40).all())
    assert 0.15 < float(draws["batch_prob"].mean()) < 0.35


SET_LATER = {
    **{kind: other_values(kind) for kind in TORCHVISION if kind is not v2.RandomIoUCrop},
    v2.AutoAugment: {"policy": v2.AutoAugmentPolicy.SVHN, "fill": 1},
    v2.CenterCrop: {"size": 4},
    v2.GaussianBlur: {"kernel_size": 5, "sigma": (0.5, 1.0)},
    v2.MixUp: {"alpha": 0.4},
    v2.CutMix: {"alpha": 0.4},
}
"""Values that a program sets on a transform of each class, by the name of the argument of the constructor."""


def by_both(module):
    """(images by torchvision, images by fuse), for fixed seeds; ``None`` where torchvision raises an error."""
    images, is_mix = photographs(6, height=16, width=24), isinstance(module, v2.MixUp | v2.CutMix)
    if is_mix or isinstance(module, v2.Normalize):
        images = images / 255
    if isinstance(module, v2.UniformTemporalSubsample):
        images = images[:, None].repeat(1, 4, 1, 1, 1)
    torch.manual_seed(0)
    try:
        theirs = list(module(images, torch.eye(6))[0] if is_mix else map(module, images))
    except (AssertionError, TypeError, ValueError):
        return None
    if isinstance(theirs[0], tuple):  # one view per element
        theirs = [crop for crops in zip(*theirs, strict=True) for crop in crops]
    draws_size = (not is_mix and torchvision.LOWERED[type(module)].draws_size) or getattr(module, "expand", False)
    augment = gpuaug.fuse([module, v2.Resize((16, 24))] if draws_size else module)
    draws = augment.draw(images.shape, seed=0, dtype=images.dtype)
    if is_mix:
        return theirs, list(augment(images, torch.eye(6), data_keys=["input", "class"], draws=draws)[0])
    return theirs, list(augment(images, draws=draws))


def alike(images, others):
    return all(one.shape == other.shape and torch.equal(one, other) for one, other in zip(images, others, strict=True))


@left
@pytest.mark.parametrize("kind", SET_LATER, ids=lambda kind: kind.__name__)
@pytest.mark.every(3)
def test_attributes_that_are_set_later_have_the_effect_that_they_have_in_torchvision(kind):
    """Arguments of the constructor, and what the constructor derives from them: some transforms read one, some the other."""
    others = {"padding": 5} if kind is v2.RandomCrop else SETTINGS.get(kind, {})
    given = {"num_classes": None} if kind in torchvision.MIXES else others
    before, derived = made(kind, **given), set()
    old = by_both(before)
    for name, value in SET_LATER[kind].items():
        value = 200 if name == "fill" and value else value
        after = made(kind, **{**given, name: value})
        private = {key: own for key, own in vars(after).items() if key[0] == "_" and key not in vars(nn.Module())}
        private = {key: own for key, own in private.items() if pickle.dumps(own) != pickle.dumps(getattr(before, key))}
        derived |= private.keys()
        new = by_both(after)
        for change in ({name: value}, *({key: own} for key, own in private.items())):
            results = by_both(changed(made(kind, **given), **change))
            if old is None or new is None or results is None or alike(old[0], new[0]):
                continue
            is_read = alike(results[0], new[0])
            assert is_read or alike(results[0], old[0])
            assert alike(results[1], (new if is_read else old)[1]), change
    constant = {*vars(nn.Module()), "_labels_getter", "_PARAMETER_MAX"}
    assert derived == {key for key in vars(before) if key[0] == "_" and key not in constant}


@pytest.mark.parametrize("library", ["torchvision", "Kornia"])
def test_the_normalisation_of_a_subclass_is_known_if_it_overrides_nothing(library):
    kind, method = (v2.Normalize, "transform") if library == "torchvision" else (K.Normalize, "apply_transform")
    compose = v2.Compose if library == "torchvision" else lambda modules: K.ImageSequential(*modules)
    mean, std = normalized_by([compose([subclass(kind)([0.5] * 3, [0.25] * 3)])])
    assert (mean.unique().item(), std.unique().item()) == (0.5, 0.25)
    assert normalized_by([compose([overriding(kind, method)([0.5] * 3, [0.25] * 3)])]) is None
    assert normalized_by([overriding(v2.Compose, "forward")([v2.Normalize([0.5], [0.25])])]) is None


def test_resize_whose_constructor_keeps_a_number_is_that_of_the_shorter_side():
    class Own(v2.Resize):
        def __init__(self, size):
            super().__init__(size)
            self.size = size

    images = photographs(2)
    assert_values(gpuaug.fuse(Own(20))(images), gpuaug.fuse(v2.Resize(20))(images))
