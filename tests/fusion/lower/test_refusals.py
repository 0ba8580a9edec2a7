"""What ``fuse`` refuses or warns of: torchvision's transforms, and modules that are left to Kornia."""

import copy
import inspect
import pickle
import re
import warnings

import kornia.augmentation as K
import pytest
import torch
from kornia.augmentation import auto
from support.replay import photographs
from torch import nn
from torchvision import transforms as v1
from torchvision.transforms import v2

import gpuaug
from gpuaug.fusion.lower.refusals import COUNTERPARTS, NOT_NEEDED

ONCE = ", which draws once for the whole batch"
OWN_STAGE = "in the dataset, or in a stage of its own, gpuaug.TransformStage(transform)"
KNOWING = f"{OWN_STAGE}, knowing that it draws once for the whole batch."
UINT8 = "gpuaug.fuse takes uint8 tensors and scales them to [0, 1]."
CROP = f"got torchvision's RandomResizedCrop{ONCE}. Write K.RandomResizedCrop(…) instead."
NORMALIZE = "got torchvision's Normalize. Write K.Normalize(…) instead."


class Flip(v2.Transform):
    def transform(self, inpt, params):
        return inpt.flip(-1)


class EachByItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.crop = v2.RandomCrop(8)

    def forward(self, images):
        return torch.stack([self.crop(image) for image in images])


REFUSED = {
    "alone": (v2.RandomResizedCrop(8), CROP),
    "of v1": (v1.RandomResizedCrop(8), CROP),
    "in a list": ([K.RandomInvert(), v2.RandomResizedCrop(8)], CROP),
    "in a sequential": (nn.Sequential(K.RandomInvert(), v2.RandomResizedCrop(8)), CROP),
    "in a container": (K.AugmentationSequential(K.RandomInvert(), v2.RandomResizedCrop(8)), CROP),
    "in a container in a list": ([K.ImageSequential(K.ImageSequential(v2.RandomResizedCrop(8)))], CROP),
    "in a container that picks": (K.ImageSequential(K.RandomInvert(), v2.RandomResizedCrop(8), random_apply=1), CROP),
    "in another container of Kornia's": (K.PatchSequential(v2.RandomResizedCrop(8), patchwise_apply=False), CROP),
    "not random": (v2.Normalize([0.5], [0.5]), NORMALIZE),
    "of v1, not random": (v1.Normalize([0.5], [0.5]), NORMALIZE),
    "certain here, and not by Kornia's default": (
        v2.RandomAffine(3),
        f"RandomAffine{ONCE}. Write K.RandomAffine(…, p=1.0) instead.",
    ),
    "its own chance": (v2.RandomErasing(p=0.2), f"RandomErasing{ONCE}. Write K.RandomErasing(…, p=0.2) instead."),
    "mix": (v2.MixUp(num_classes=3), "got torchvision's MixUp. Write K.RandomMixUpV2(…) instead."),
    "policy": (v2.TrivialAugmentWide(), f"TrivialAugmentWide{ONCE}. Write K.auto.TrivialAugment(…) instead."),
    "a chance of one": (
        v2.RandomApply([v2.ColorJitter(0.4)], 0.8),
        f"RandomApply{ONCE}. Write K.ColorJitter(…, p=0.8) instead.",
    ),
    "a chance of a chance": (v1.RandomApply([v1.RandomInvert(0.6)], 0.2), f"{ONCE}. Write K.RandomInvert(…, p=0.12) instead."),
    "a chance of several in one": (v2.RandomApply([v2.Compose([v2.Resize(4)])], 0.2), f"{ONCE}. Keep RandomApply {KNOWING}"),
    "a chance of several": (
        v2.RandomApply([v2.ColorJitter(0.4), v2.RandomCrop(8)], 0.8),
        f"RandomApply{ONCE}. Keep RandomApply {KNOWING}",
    ),
    "choice": (
        v2.RandomChoice([v2.RandomInvert(), v2.RandomPosterize(4)]),
        f"RandomChoice{ONCE}. Write K.AugmentationSequential(K.RandomInvert(…), K.RandomPosterize(…), random_apply=1) instead.",
    ),
    "choice by weight": (
        v2.RandomChoice([v2.CenterCrop(4), v2.Resize(4)], p=[3, 1]),
        "K.AugmentationSequential(K.CenterCrop(…), K.Resize(…), random_apply=1, random_apply_weights=[…]) instead.",
    ),
    "order": (
        v1.RandomOrder([v1.RandomInvert(), v1.CenterCrop(4)]),
        f"RandomOrder{ONCE}. Write K.AugmentationSequential(K.RandomInvert(…), K.CenterCrop(…), random_apply=True) instead.",
    ),
    "not needed": (
        v2.ToDtype(torch.float32, scale=True),
        f"got torchvision's ToDtype. Leave out ToDtype: {UINT8}",
    ),
    "without a counterpart": (
        v2.Pad(3),
        f"got torchvision's Pad. Keep Pad {OWN_STAGE}.",
    ),
    "a subclass": (
        Flip(),
        f"got torchvision's Flip. Keep Flip {OWN_STAGE}.",
    ),
    "everything": (
        v2.Compose(
            [
                v2.ToImage(),
                v2.RandomResizedCrop(8),
                v2.RandomApply(nn.ModuleList([v2.GaussianBlur(3)]), p=0.5),
                v2.ToDtype(torch.float32, scale=True),
                v2.ScaleJitter((8, 8)),
                v2.Normalize([0.5], [0.5]),
                len,
            ]
        ),
        f"got torchvision's Compose{ONCE}. Write K.AugmentationSequential(K.RandomResizedCrop(…), K.RandomGaussianBlur(…), "
        f"K.Normalize(…)) instead. Leave out ToImage, ToDtype: {UINT8} Keep ScaleJitter, len {KNOWING}",
    ),
    "of v1, everything": (
        v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor()]),
        f"got torchvision's Compose{ONCE}. Write K.RandomHorizontalFlip(…) instead. Leave out ToTensor: {UINT8}",
    ),
}


@pytest.mark.parametrize(("pipeline", "text"), REFUSED.values(), ids=REFUSED)
def test_torchvision_transforms_are_refused_with_their_kornia_counterpart(pipeline, text):
    with pytest.raises(gpuaug.ArgumentTypeError, match=f"^pipeline must be made of Kornia's modules, .*{re.escape(text)}$"):
        gpuaug.fuse(pipeline)


def test_user_modules_may_hold_torchvision_transforms():
    with pytest.warns(gpuaug.GpuAugWarning, match="EachByItself"):
        augment = gpuaug.fuse(EachByItself())
    assert augment._ops[0].reason == "not one of Kornia's modules"


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_a_counterpart_is_there_and_takes_its_chance(name):
    made = K
    for part in COUNTERPARTS[name].split("."):
        made = getattr(made, part)
    assert hasattr(v2, name)
    assert not ("p" in inspect.signature(getattr(v2, name)).parameters and "p" not in inspect.signature(made).parameters)


def test_what_is_not_needed_is_torchvisions():
    assert all(hasattr(v2, name) for name in NOT_NEEDED)


KORNIAS = (
    "pipeline must hold modules that gpuaug.fuse lowers to run in few launches, got {}, which is left to Kornia: {}. Kornia "
    "takes tens of launches a batch for it, on the training thread, and the passes are split there: print(augment.explain()) "
    "shows it. Replace it, or that setting of it, by what docs/fuse.md lists, or ignore gpuaug.GpuAugWarning where it is meant."
)


def told(action):
    """The texts of the warnings that ``action`` gives, and what it returns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = action()
    assert all(each.category is gpuaug.GpuAugWarning for each in caught)
    return made, [str(each.message) for each in caught]


def test_fuse_warns_once_of_each_module_left_to_kornia():
    modules = [K.RandomHorizontalFlip(), K.RandomMedianBlur(), K.Resize((8, 8), antialias=True)]
    augment, said = told(lambda: gpuaug.fuse(modules))
    assert said == [
        KORNIAS.format("RandomMedianBlur_1", "no lowering for this type"),
        KORNIAS.format("Resize_2", "antialias=True, which in Kornia is a blur"),
    ]
    assert told(lambda: [augment(photographs()) for _ in range(2)])[1] == []


def test_fallback_warning_points_at_the_call_of_fuse():
    with pytest.warns(gpuaug.GpuAugWarning) as caught:
        gpuaug.fuse(K.RandomMedianBlur())
    assert caught[0].filename == __file__


def test_fallback_warning_of_a_user_module():
    class Halved(nn.Module):
        def forward(self, images):
            return images * 0.5

    _, said = told(lambda: gpuaug.fuse([K.RandomInvert(), Halved()]))
    assert said == [
        "pipeline must hold modules that gpuaug.fuse lowers to run in few launches, got Halved_1, which runs as it is, in its "
        "place: not one of Kornia's modules. It adds its own launches, on the training thread, and the passes are split there: "
        "print(augment.explain()) shows it. Replace it, or that setting of it, by what docs/fuse.md lists, or ignore "
        "gpuaug.GpuAugWarning where it is meant."
    ]


def test_policies_of_kornia_have_no_fallback_warning():
    for policy in (auto.TrivialAugment(), auto.RandAugment(2, 10), auto.AutoAugment()):
        assert told(lambda policy=policy: gpuaug.fuse(policy))[1] == []


def test_fallback_warning_of_random_apply_names_its_modules():
    made = K.ImageSequential(K.RandomInvert(), K.RandomMedianBlur(), K.RandomClahe(), random_apply=1)
    augment, said = told(lambda: gpuaug.fuse([K.RandomInvert(), made]))
    assert said == [
        "pipeline must hold modules that gpuaug.fuse lowers to run in few launches, got ImageSequential_1, which may pick "
        "modules that are not: RandomMedianBlur_1 (no lowering for this type), RandomClahe_2 (no lowering for this type). "
        "Kornia takes tens of launches a batch for each, when it is picked, on the training thread, and the passes are split "
        "there: print(augment.explain()) shows it. Leave them out of what it picks from, or ignore gpuaug.GpuAugWarning where "
        "it is meant."
    ]
    # Enough for each to be picked.
    assert told(lambda: [augment(photographs(1, 3, 32, 32)) for _ in range(60)])[1] == []


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
    assert told(lambda: augment(small))[1] == [text]
    assert told(lambda: [augment(images) for images in (small, smaller, fitting, small)])[1] == []


def test_copies_of_a_fused_module_do_not_repeat_its_warnings():
    augment, said = told(lambda: gpuaug.fuse([K.RandomMedianBlur(), K.RandomCrop((20, 20))]))
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
