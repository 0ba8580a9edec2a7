"""What ``fuse`` refuses or warns of: torchvision's transforms, and modules that are left to Kornia."""

import copy
import pickle
import re
import warnings

import kornia.augmentation as K
import pytest
import torch
from kornia.augmentation import auto
from support import internals
from support.comparison.replay import overriding, photographs
from torch import nn
from torchvision import transforms as v1
from torchvision.models.video import R3D_18_Weights
from torchvision.transforms import _presets, v2

import gpuaug
from gpuaug.fusion.lower.refusals import UNSUPPORTED, UNSUPPORTED_TIMM


class EachByItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.crop = v2.RandomCrop(8)

    def forward(self, images):
        return torch.stack([self.crop(image) for image in images])


class Preset:
    transforms = v2.Compose([v2.RandomHorizontalFlip()])

    def __call__(self, image):
        return self.transforms(image)


def of_timm(name):
    """A transform with a name and a module of timm's, which is not needed for it."""
    return type(name, (), {"__module__": "timm.data.transforms", "__call__": lambda self, image: image})()


class Processor:
    image_mean = (0.5, 0.5, 0.5)
    do_resize = True

    def __call__(self, image):
        return image


REFUSED = {
    "an image processor in a list": ([v2.RandomHorizontalFlip(), Processor()], "got the image processor Processor. Pass"),
    "an image processor in a Compose": (
        v2.Compose([Processor()]),
        "got the image processor Processor. Pass the processor alone",
    ),
    "in a container that picks": (
        K.ImageSequential(K.RandomInvert(p=1.0), v2.RandomResizedCrop(8), random_apply=1),
        "ImageSequential must hold Kornia's modules",
    ),
    "in another container of Kornia's": (
        [K.PatchSequential(v2.RandomResizedCrop(8), patchwise_apply=False)],
        "PatchSequential must hold Kornia's modules",
    ),
    "subclass of a mix": (
        overriding(v2.MixUp)(num_classes=3),
        "OwnMixUp, a subclass of MixUp that overrides check_inputs. It mixes the images of a batch. Give it a stage",
    ),
    "mix or flip": (
        v2.RandomChoice([v2.MixUp(), v2.RandomHorizontalFlip()]),
        "only mixes, got MixUp_0, RandomHorizontalFlip_1",
    ),
    "two mixes": (v2.RandomApply([v2.MixUp(), v2.CutMix()]), "only mixes, got MixUp_0, CutMix_1"),
    "several images by chance": (
        v2.RandomApply([v2.Compose([v2.TenCrop(4)])]),
        "RandomApply must hold transforms that make one image of one, got TenCrop",
    ),
    "several images twice": ([v2.FiveCrop(9), v2.TenCrop(4)], "got FiveCrop_0 and TenCrop_1. Fuse one of them only"),
    "of keypoints": (v2.ClampKeyPoints(), "ClampKeyPoints. It is for keypoints"),
    "what comes with weights of a model of videos": (
        R3D_18_Weights.DEFAULT.transforms(),
        "VideoClassification. It is for videos",
    ),
    "in a long order": (
        v2.RandomOrder([*[v2.RandomInvert()] * 4, v2.ScaleJitter((8, 8))]),
        "as ScaleJitter_4 draws a size per image, got its random order needs 25 ops, more than 24. Keep RandomOrder in",
    ),
    "drawn sizes by nearest pixels": (v2.RandomShortestSize(8, interpolation=0), "got interpolation='nearest'"),
    "no size to draw": (v2.RandomResize(8, 8), "got max_size is not larger than min_size"),
    "no size to choose": (v2.RandomShortestSize([]), "got min_size is empty"),
    "no tensor": (v1.ToPILImage(), "ToPILImage. gpuaug.fuse takes tensors"),
    "of v1": (v1.Compose([v1.Lambda(torch.clone)]), "got Lambda of v1. Write v2.Lambda("),
    "of timm": (v1.Compose([of_timm("RandAugment")]), "Write v2.RandAugment("),
    "of timm, by chance": (v2.RandomApply([of_timm("AugMixAugment")]), "timm's AugMixAugment. Write v2.AugMix("),
    "Kornia's by chance": (v2.RandomApply([K.RandomInvert(p=1.0)]), "must hold torchvision's transforms, got RandomInvert_0"),
    "no transform": ([3], "got int. Pass a list"),
    "a preset": (Preset(), "got Preset. Pass the transforms that it calls: its attribute transforms"),
}


@pytest.mark.parametrize(("pipeline", "words"), REFUSED.values(), ids=REFUSED)
def test_pipeline_is_refused_with_what_to_do(pipeline, words):
    with pytest.raises(gpuaug.ArgumentTypeError, match=re.escape(words)):
        gpuaug.fuse(pipeline)


def test_user_modules_may_hold_torchvision_transforms():
    with pytest.warns(gpuaug.GpuAugWarning, match="EachByItself"):
        augment = gpuaug.fuse(EachByItself())
    assert internals.program(augment).ops[0].reason == "not one of Kornia's modules"


@pytest.mark.parametrize("name", [*UNSUPPORTED, *re.findall(r"v2\.(\w+)\(", " ".join(UNSUPPORTED_TIMM.values()))])
def test_names_of_torchvision_are_there(name):
    if name == "SanitizeKeyPoints" and not hasattr(v2, name):
        pytest.skip("torchvision 0.23 has none yet")
    assert hasattr(v2, name) or hasattr(_presets, name)


KORNIAS = "{} is not fused, because gpuaug.fuse does not lower it: {}. Kornia runs it, with tens of launches per batch, "


def told(action):
    """The texts of the warnings that ``action`` gives, and what it returns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = action()
    assert all(each.category is gpuaug.GpuAugWarning for each in caught)
    return made, [str(each.message) for each in caught]


def test_fuse_warns_once_of_each_module_left_to_kornia():
    modules = [K.RandomHorizontalFlip(), K.RandomThinPlateSpline(), K.Resize((8, 8), antialias=True)]
    augment, said = told(lambda: gpuaug.fuse(modules))
    spline, resize = said
    assert spline.startswith(KORNIAS.format("RandomThinPlateSpline_1", "no lowering for this type"))
    assert resize.startswith(KORNIAS.format("Resize_2", "antialias=True, which in Kornia is a blur"))
    assert told(lambda: [augment(photographs()) for _ in range(2)])[1] == []


def test_fallback_warning_points_at_the_call_of_fuse():
    with pytest.warns(gpuaug.GpuAugWarning) as caught:
        gpuaug.fuse(K.RandomThinPlateSpline())
    assert caught[0].filename == __file__


def test_fallback_warning_of_a_user_module():
    class Halved(nn.Module):
        def forward(self, images):
            return images * 0.5

    _, said = told(lambda: gpuaug.fuse([K.RandomInvert(p=1.0), Halved()]))
    (text,) = said
    assert text.startswith(
        "Halved_1 is not fused, because gpuaug.fuse does not lower it: not one of Kornia's modules. It runs once for the whole "
        "batch, so"
    )


def test_policies_of_kornia_have_no_fallback_warning():
    for policy in (auto.TrivialAugment(), auto.RandAugment(2, 10), auto.AutoAugment()):
        assert told(lambda policy=policy: gpuaug.fuse(policy))[1] == []


def cropping():
    return gpuaug.fuse([K.RandomHorizontalFlip(), K.RandomCrop((20, 20))])


def test_fallback_warning_of_an_unsupported_size_comes_with_its_first_batch():
    augment = cropping()
    fitting, small, smaller = (photographs(2, 3, height, 32) for height in (32, 16, 12))
    assert told(lambda: augment(fitting))[1] == []
    explained, said = told(lambda: augment.explain(small.shape))
    assert "left to Kornia: crops 20x20 out of 16x32" in str(explained)
    assert said == []
    text = KORNIAS.format("RandomCrop_1", "crops 20x20 out of 16x32, which Kornia resizes")
    (said,) = told(lambda: augment(small))[1]
    assert said.startswith(text)
    assert told(lambda: [augment(images) for images in (small, smaller, fitting, small)])[1] == []


def test_copies_of_a_fused_module_do_not_repeat_its_warnings():
    augment, said = told(lambda: gpuaug.fuse([K.RandomThinPlateSpline(), K.RandomCrop((20, 20))]))
    assert len(said) == 1
    small = photographs(2, 3, 16, 32)
    assert len(told(lambda: pickle.loads(pickle.dumps(augment))(small))[1]) == 1
    assert len(told(lambda: augment(small))[1]) == 1
    for copied in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
        assert told(lambda copied=copied: copied(augment)(small))[1] == []


def test_fallback_warning_is_repeated_for_another_pipeline():
    assert [len(told(lambda: cropping()(photographs(2, 3, 16, 32)))[1]) for _ in range(2)] == [1, 1]


def test_lowered_pipeline_has_no_fallback_warning():
    augment, said = told(lambda: gpuaug.fuse([K.RandomResizedCrop((8, 8)), K.ColorJitter(0.4), K.Normalize(0.5, 0.5)], views=2))
    assert said == told(lambda: augment(photographs()))[1] == []


VOLUME_MODULES = {
    name: kind
    for name, kind in vars(K).items()
    if isinstance(kind, type) and kind.__module__.startswith("kornia.augmentation._3d.")
}
VOLUME_SETTINGS = {
    "CenterCrop3D": (2,),
    "RandomAffine3D": (20.0,),
    "RandomCrop3D": ((2, 4, 4),),
    "RandomMotionBlur3D": (3, 10.0, 0.5),
    "RandomRotation3D": (20.0,),
}
CONTAINERS_OF_VOLUMES = {
    "alone": lambda module: module,
    "list": lambda module: [K.RandomInvert(p=1.0), module],
    "container": K.AugmentationSequential,
    "inner": lambda module: K.AugmentationSequential(K.ImageSequential(module)),
    "picked": lambda module: K.ImageSequential(module, K.RandomInvert(p=1.0), random_apply=1),
    "clips": K.VideoSequential,
    "patches": lambda module: K.PatchSequential(module, grid_size=(1, 1), patchwise_apply=False),
}


@pytest.mark.parametrize("container", CONTAINERS_OF_VOLUMES)
@pytest.mark.filterwarnings("ignore")
def test_modules_for_volumes_are_refused(container):
    assert len(VOLUME_MODULES) >= 10
    for name, cls in VOLUME_MODULES.items():
        if "Base" in name:
            continue
        for kind in (cls, type(f"Own{name}", (cls,), {})):
            with pytest.raises(gpuaug.ArgumentTypeError, match=f"got {kind.__name__}, which is for volumes"):
                gpuaug.fuse(CONTAINERS_OF_VOLUMES[container](kind(*VOLUME_SETTINGS.get(name, ()))))


class TwiceAsBright(K.AugmentationSequential):
    def forward(self, *inputs, **options):
        return 2 * super().forward(*inputs, **options)


def hooked(container):
    container.register_forward_hook(lambda module, inputs, output: 2 * output)
    return container


def replaced(container):
    container.forward = lambda images: 2 * images
    return container


OWN_FORWARD = {
    "subclass": lambda: TwiceAsBright(K.RandomInvert(p=1.0)),
    "hook": lambda: hooked(K.AugmentationSequential(K.RandomInvert(p=1.0))),
    "hook of images": lambda: hooked(K.ImageSequential(K.RandomInvert(p=1.0))),
    "hook of patches": lambda: hooked(K.PatchSequential(K.RandomInvert(p=1.0), grid_size=(2, 2), patchwise_apply=False)),
    "attribute": lambda: replaced(K.AugmentationSequential(K.RandomInvert(p=1.0))),
}


@pytest.mark.parametrize("make", OWN_FORWARD.values(), ids=OWN_FORWARD)
@pytest.mark.parametrize("around", [lambda x: x, lambda x: [x], nn.Sequential], ids=["alone", "list", "nn.Sequential"])
def test_containers_whose_forward_would_not_be_called_are_refused(make, around):
    with pytest.raises(gpuaug.ArgumentTypeError, match="Kornia's own forward and without hooks"):
        gpuaug.fuse(around(make()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", OWN_FORWARD.values(), ids=OWN_FORWARD)
def test_containers_inside_a_container_are_run_as_kornia_runs_them(make):
    images = torch.rand(2, 3, 8, 8)
    container = K.AugmentationSequential(K.RandomHorizontalFlip(p=0.0), make())
    torch.testing.assert_close(gpuaug.fuse(container)(images), container(images))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (v2.RandomErasing, {"p": 1.0, "scale": (0.5, 0.2)}),
        (v2.RandomErasing, {"p": 1.0, "ratio": (3.0, 0.2)}),
        (v2.RandomResizedCrop, {"size": 8, "scale": [0.9, 0.2]}),
        (v2.RandomResizedCrop, {"size": 8, "ratio": (3.0, 0.2)}),
        (v2.RandomRotation, {"degrees": (10, -10)}),
        (v2.RandomAffine, {"degrees": (10, -10)}),
        (v2.RandomAffine, {"degrees": 0, "scale": (1.5, 0.5)}),
        (v2.RandomAffine, {"degrees": 0, "shear": (5, -5)}),
        (v2.RandomAffine, {"degrees": 0, "shear": (-5, 5, 5, -5)}),
    ],
)
def test_ranges_that_torchvision_cannot_draw_from_are_refused(kind, settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision warns of some
        transform = kind(**settings)
    with pytest.raises(RuntimeError, match="uniform_ expects"):
        transform(torch.zeros(3, 16, 20))
    name = list(settings)[-1]
    swapped = {name: [number for low, high in zip(*[iter(settings[name])] * 2, strict=True) for number in sorted((low, high))]}
    with pytest.raises(gpuaug.ArgumentError, match=rf"{name} of .* must have the smaller number of a range first"):
        gpuaug.fuse(transform)
    assert gpuaug.fuse(kind(**settings | swapped))(torch.zeros(2, 3, 16, 20)).shape[:2] == (2, 3)
