"""What a user is told whose transform does not fit the batches."""

import re
import warnings
from collections import namedtuple

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from contract.sources import failure, streamed
from kornia.constants import DataKey
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug import ArgumentTypeError, GpuAugWarning, TransformStage, collate_ragged, fuse

Pair = namedtuple("Pair", "one other")
IMAGES = torch.rand(2, 3, 8, 8)
FLIP = K.RandomHorizontalFlip(p=1.0)


SIZES = collate_ragged([torch.zeros(3, 5, 6, dtype=torch.uint8), torch.zeros(3, 7, 6, dtype=torch.uint8)])


def target():
    return {"boxes": torch.tensor([[1.0, 1, 4, 4]]), "masks": torch.ones(1, 8, 8), "labels": torch.tensor([1])}


def told(batch, *stages):
    """What is said of the first two batches of two epochs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = streamed([batch] * 2, *stages)
        for _ in range(2):
            list(loader)
    return [str(warning.message) for warning in caught if warning.category is GpuAugWarning]


MAPS = torch.zeros(2, 8, 8, dtype=torch.int64)
LOOK_LIKE_TARGETS = {
    "label maps": (MAPS, "mask"),
    "label maps with an axis of channels": (MAPS[:, None], "mask"),
    "one-hot maps": (torch.zeros(2, 5, 8, 8), "mask"),
    "bool maps": (MAPS.bool(), "mask"),
    "depth": (torch.rand(2, 1, 8, 8), "mask"),
    "a list of maps": (list(MAPS), "mask"),
    "a list of instance masks": ([torch.zeros(n, 8, 8) for n in (3, 0)], "mask"),
    "padded boxes": (torch.rand(2, 7, 4), "bbox_xyxy"),
    "target dicts": ((target(), target()), "targets"),
    "a list of boxes": ([torch.rand(n, 4) for n in (3, 0)], None),
    "dicts under other keys": ([{"seg": MAPS[0]}, {"seg": MAPS[1]}], None),
    "boxes in dicts under other keys": (({"objects": torch.rand(3, 4)}, {"objects": torch.rand(0, 4)}), None),
    "a dict of maps": ({"semantic": MAPS}, None),
    "arrays": ([np.zeros((8, 8)), np.zeros((8, 8))], None),
    "boxes in arrays": ([{"objects": np.zeros((3, 4))}, {"objects": np.zeros((0, 4))}], None),
    "a list in a dict": ({"semantic": [MAPS[0], MAPS[1]]}, None),
}


@pytest.mark.parametrize("place", ["tuple", "list", "labels", "record"])
@pytest.mark.parametrize(("value", "key"), LOOK_LIKE_TARGETS.values(), ids=LOOK_LIKE_TARGETS)
def test_what_looks_like_a_target_is_told_of(value, key, place):
    batch = {"tuple": (IMAGES, value), "list": [value, IMAGES], "labels": {"pixel_values": IMAGES, "labels": value}}
    batch["record"] = Pair(IMAGES, value)
    on = {"tuple": ..., "list": 1, "labels": "pixel_values", "record": "one"}[place]
    [text] = told(batch[place], TransformStage(fuse(FLIP), on=on))
    assert "no longer match the images" in text
    assert ("tv_tensors" in text) == (key is None)
    if key is not None:
        image, other = {"tuple": (0, 1), "list": (1, 0), "labels": ("pixel_values", "labels"), "record": ("one", "other")}[
            place
        ]
        wanted = {image: "input", other: key}
        assert f"Pass gpuaug.TransformStage(transform, on={wanted})." in text
        assert not told(batch[place], TransformStage(fuse(FLIP), on=wanted)), "the line is wrong"


def test_tensors_of_torchvisions_types_beside_bare_transforms_are_told_of():
    [text] = told((IMAGES, tv_tensors.Mask(MAPS)), FLIP)
    assert "Pass gpuaug.fuse(transform)" in text


def test_targets_beside_images_of_different_sizes_are_told_of():
    resize = fuse(K.Resize((4, 4)), ragged=True)
    [text] = told((SIZES, [torch.zeros(5, 6), torch.zeros(7, 6)]), resize)
    assert "on={0: 'input', 1: 'mask'}" in text


def test_line_to_type_keeps_the_members_of_the_stage():
    batch = {"image": IMAGES, "mask": torch.ones(2, 1, 8, 8), "keypoints": torch.rand(2, 5, 2)}
    on, wanted = {"image": "input", "mask": "mask"}, {"image": "input", "mask": "mask", "keypoints": "keypoints"}
    [text] = told(batch, TransformStage(fuse(FLIP), on=on))
    assert f"Pass gpuaug.TransformStage(transform, on={wanted})." in text
    assert not told(batch, TransformStage(fuse(FLIP), on=wanted)), "the line is wrong"


def test_images_that_another_stage_works_on_are_no_targets():
    pair = (IMAGES, torch.rand(2, 3, 8, 8))
    assert told(pair, TransformStage(fuse(FLIP)), TransformStage(fuse(FLIP), on=1)) == []
    assert told(pair, TransformStage(fuse(FLIP)), TransformStage(fuse(FLIP), on={1: "input"})) == []
    assert told((IMAGES, torch.arange(2)), TransformStage(torch.clone, into=2), TransformStage(fuse(FLIP))) == []
    for key in ("image", "INPUT", DataKey.IMAGE):
        assert told(pair, TransformStage(fuse(FLIP)), TransformStage(fuse(FLIP), on={-1: key})) == []
    assert told((IMAGES, MAPS), TransformStage(fuse(FLIP)), TransformStage(lambda images: images[:, 0], into=-1)) == []
    assert len(told(pair, TransformStage(fuse(FLIP)), TransformStage(fuse(FLIP), on={0: "input", 1: "mask"}))) == 1
    assert len(told(pair, TransformStage(fuse(FLIP)), TransformStage(lambda one, other: (one, other), on=(0, 1)))) == 1


MIXES = {
    "fused": (fuse(K.RandomMixUpV2(p=1.0)), "RandomMixUpV2"),
    "Kornia": (K.RandomCutMixV2(p=1.0), "RandomCutMixV2"),
    "left to Kornia": (lambda: fuse(K.RandomMosaic((8, 8), p=1.0)), "RandomMosaic"),
    "patches": (K.RandomJigsaw((2, 2), p=1.0), "RandomJigsaw"),
    "fused torchvision": (fuse(v2.CutMix(num_classes=4)), "CutMix"),
    "with a flip": (fuse([FLIP, K.RandomMixUpV2(p=1.0)]), "RandomMixUpV2"),
}


@pytest.mark.parametrize(("transform", "name"), MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("targets", [[target(), target()], MAPS, torch.rand(2, 7, 4)], ids=["dicts", "maps", "boxes"])
@pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")
def test_targets_that_a_mix_leaves_behind_are_told_of(transform, name, targets):
    transform = transform if hasattr(transform, "modules") else transform()
    [text] = [text for text in told((IMAGES, targets), transform) if "no longer match" in text]
    assert f"because {name} mixes the images only" in text


PAIR = (IMAGES, [target(), target()])
RIGHT = {
    "handed over": (PAIR, TransformStage(fuse(FLIP), on={0: "input", 1: "targets"})),
    "colours alone": (PAIR, K.AugmentationSequential(K.ColorJitter(0.2), K.Normalize(torch.zeros(3), torch.ones(3)))),
    "a function, as the text says": (PAIR, lambda images: FLIP(images)),
    "the source is kept": (PAIR, TransformStage(FLIP, into=2)),
    "the whole batch": (PAIR, TransformStage(v2.Resize(4), on=None)),
    "labels": ((IMAGES, torch.arange(2)), FLIP),
    "boxes of one number each": ((IMAGES, torch.rand(2, 4)), FLIP),
    "features": ((IMAGES, torch.rand(2, 16, 5), [torch.rand(3, 5), torch.rand(1, 5)]), FLIP),
    "maps of another size": ((IMAGES, torch.zeros(2, 5, 5)), FLIP),
    "soft labels as many as rows": ((torch.rand(8, 3, 8, 8), torch.rand(8, 8)), FLIP),
    "a list of no images": ((IMAGES, [torch.zeros(8, 8)] * 3), FLIP),
    "a mask of patches": ({"image": IMAGES, "mask": torch.ones(2, 16)}, TransformStage(FLIP, on="image")),
    "a tensor": (IMAGES, FLIP),
}


@pytest.mark.parametrize(("batch", "stage"), RIGHT.values(), ids=RIGHT)
def test_batches_without_targets_left_behind_are_not_told_of(batch, stage):
    assert told(batch, stage) == []


# Images of different sizes


@pytest.mark.parametrize(
    "transform", [K.Resize((4, 4)), K.AugmentationSequential(K.Resize(4)), v2.Resize(4), v2.Compose([v2.Resize(4)])]
)
def test_transforms_of_libraries_refuse_images_of_different_sizes(transform):
    loader = streamed([SIZES] * 2, transform)
    for _ in range(2):
        arrived, error = failure(loader)
        assert not arrived
        assert type(error) is ArgumentTypeError
        assert f"which the batch has, got {type(transform).__name__}, which takes a tensor" in str(error)
    assert next(iter(streamed([SIZES], fuse(K.Resize((4, 4)), ragged=True)))).shape == (2, 3, 4, 4)


def test_first_module_of_a_sequence_refuses_images_of_different_sizes():
    with pytest.raises(ArgumentTypeError, match=r"got Resize, which takes a tensor \(B, C, H, W\)"):
        list(streamed([SIZES], nn.Sequential(v2.Resize(4))))


NOTE = "The transform received a gpuaug.Ragged, images of different sizes. Put gpuaug.fuse(…, ragged=True)"


@pytest.mark.parametrize("transform", [nn.Conv2d(3, 1, 1), lambda images: images / 255])
def test_errors_about_images_of_different_sizes_say_what_to_do(transform):
    _, error = failure(streamed([SIZES], transform))
    assert any(re.match(re.escape(NOTE), note) for note in error.__notes__)


def test_transforms_that_take_images_of_different_sizes_are_called():
    assert [len(batch) for batch in streamed([SIZES], lambda images: list(images))] == [2]


# Labels that a mix leaves behind

LABELS = torch.arange(2)


def _container(*modules, **options):
    return K.AugmentationSequential(*modules, **options)


class OwnMix(K.RandomMixUpV2):
    def apply_transform(self, *arguments):
        return super().apply_transform(*arguments)


MIX_UP, TWO_RECTANGLES = K.RandomMixUpV2(), K.RandomCutMixV2(num_mix=2, use_correct_lambda=True)
ANY_MIXING = {
    "a mix": MIX_UP,
    "in a container": [_container(MIX_UP, K.RandomInvert())],
    "in torch's container": nn.Sequential(K.RandomInvert(), MIX_UP),
    "one of the mixes": _container(MIX_UP, K.RandomCutMixV2(use_correct_lambda=True), random_apply=1),
    "beside a choice": _container(_container(K.RandomInvert(), random_apply=1), MIX_UP),
    "mixes or none": _container(MIX_UP, random_apply=(0, 1)),
    "beside another module": _container(MIX_UP, K.RandomInvert(), random_apply=2),
    "nested": [_container(_container(MIX_UP, K.RandomInvert(), random_apply=1))],
    "two rectangles": TWO_RECTANGLES,
    "two rectangles in a container": _container(TWO_RECTANGLES, random_apply=1),
    "a class of the user": OwnMix(),
    "in patches": K.PatchSequential(K.RandomInvert(), MIX_UP, random_apply=True, grid_size=(2, 2)),
}

MIXED = ("a mix", "in a container", "in torch's container", "one of the mixes", "beside a choice")
"""Names of the pipelines whose labels ``gpuaug.fuse`` can mix."""


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", ANY_MIXING)
@pytest.mark.filterwarnings("ignore:.*is not fused")
def test_a_line_about_labels_mixes_them_or_raises_an_error(name, is_fused):
    images = torch.rand(2, 3, 8, 8)
    transform = ANY_MIXING[name]
    if isinstance(transform, list) and not is_fused:
        transform = nn.Sequential(*transform)
    transform = fuse(transform) if is_fused else transform
    text = next(text for text in told((images, LABELS), transform) if text.startswith("labels no longer"))
    line = re.search(r"Pass (gpuaug\.TransformStage\(.*?\}\))\.", text)
    stage = eval(line[1], {"gpuaug": gpuaug, "transform": transform})
    batches = gpuaug.StreamedLoader([(images, LABELS)], [stage], device="cpu")
    if name in MIXED:
        ((_, labels),) = batches
        assert labels.shape[-2:] == (2, 3)
    else:
        with pytest.raises(gpuaug.ArgumentError, match=r"can be mixed.*outside of other containers"):
            list(batches)


@pytest.mark.parametrize("frames", [(), (3,)])
def test_labels_and_boxes_beside_ragged_images_and_clips_are_told(frames):
    ragged = collate_ragged(
        [torch.zeros(*frames, 3, 5, 6, dtype=torch.uint8), torch.zeros(*frames, 3, 7, 6, dtype=torch.uint8)]
    )
    (text,) = told((ragged, LABELS), fuse([K.Resize((4, 4)), K.RandomMixUpV2()], ragged=True))
    assert text.startswith("labels no longer match the images, because RandomMixUpV2 receives the images only")
    (text,) = told((ragged, torch.zeros(2, 5, 4)), fuse([FLIP, K.Resize((4, 4))], ragged=True))
    assert text.startswith("boxes no longer match the images"), text


MIX = fuse(K.RandomMixUpV2())
UNMIXED = {
    "handed over": (
        {"image": IMAGES, "id": LABELS, "label": LABELS + 1},
        TransformStage(MIX, on={"image": "input", "label": "class"}),
    ),
    "handed over in order": ((IMAGES, LABELS), TransformStage(v2.MixUp(num_classes=3), on=(0, 1))),
    "no labels": ((IMAGES, torch.ones(3), ["a", "b"]), MIX),
    "no mix": ((IMAGES, LABELS), fuse(K.RandomGrayscale())),
    "patches of one image": ((IMAGES, LABELS), K.RandomJigsaw(grid=(2, 2))),
    "a function, as the text says": ((IMAGES, LABELS), lambda images: MIX(images)),
    "the source is kept": ((IMAGES, LABELS), TransformStage(MIX, into=2)),
}


@pytest.mark.parametrize(("batch", "stage"), UNMIXED.values(), ids=UNMIXED)
def test_batches_whose_labels_follow_are_not_told_of(batch, stage):
    assert told(batch, stage) == []


# Images of another form than fuse takes

FORMS = {
    "channels last": ((2, 8, 9, 3), 8, "images.movedim(-1, 1)"),
    "channels last, with alpha": ((2, 8, 9, 4), 8, "images.movedim(-1, 1)"),
    "grey, channels last": ((2, 8, 9, 1), 8, "images.movedim(-1, 1)"),
    "one image, channels last": ((8, 9, 3), 8, "images.movedim(-1, 0)"),
    "clips, channels last": ((2, 3, 8, 9, 3), 8, "images.movedim(-1, 2)"),
    "no channels": ((6, 8, 9), 6, "images[:, None]"),
}


@pytest.mark.parametrize(("shape", "channels", "way_out"), FORMS.values(), ids=FORMS)
def test_images_that_seem_to_have_other_channels_are_told_of(shape, channels, way_out):
    images = torch.zeros(shape, dtype=torch.uint8)
    (text,) = told(images, fuse(FLIP))
    assert text.startswith(f"Images of shape {shape} are read with {channels} channels")
    assert f"put lambda images: {way_out} before" in text
    assert not told(images, eval(f"lambda images: {way_out}"), fuse(FLIP)), "the line is wrong"
    if shape[-1] != 9:  # a transform of torchvision may be for masks without channels
        assert told(images, v2.CenterCrop(2)) == [text]
    line = re.search(r"disable this warning with (warnings\.filterwarnings\(.*?\))", text)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(line)
        list(streamed([images], fuse(FLIP)))


@pytest.mark.parametrize("shape", [(2, 3, 8, 9), (2, 4, 8, 3), (3, 8, 9), (2, 8, 9), (2, 13, 8, 8), (2, 13, 4, 3)])
def test_images_of_few_channels_are_not_told_of(shape):
    assert told(torch.zeros(shape), fuse(FLIP)) == []
    assert told(torch.zeros(shape), v2.CenterCrop(2)) == []


def test_masks_and_boxes_are_not_taken_for_images_without_channels():
    batch = {"boxes": torch.zeros(6, 2, 4), "mask": torch.zeros(6, 8, 8), "image": torch.zeros(6, 3, 8, 8)}
    on = {"boxes": "bbox_xyxy", "mask": "mask", "image": "input"}
    assert told(batch, TransformStage(fuse(FLIP), on=on)) == []
