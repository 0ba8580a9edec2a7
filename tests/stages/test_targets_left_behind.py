"""Warnings about targets that a transform leaves behind: every transform of the libraries, in every wrapper."""

import functools
import itertools
import re
import warnings

import numpy as np
import PIL.Image
import pytest
import torch
from contract.sources import streamed
from kornia import augmentation as K
from kornia.geometry import transform as geometry
from support.comparison.values import assert_values
from support.ops.library_transforms import colour_transforms, geometric_transforms
from torch import nn
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.models import ResNet18_Weights
from torchvision.transforms import v2

import gpuaug
from gpuaug import FixedSizeCrop, GpuAugError, GpuAugWarning, TransformStage, fuse
from gpuaug.core import batch as batches
from gpuaug.core.streams import Lanes

pytestmark = pytest.mark.filterwarnings("ignore::gpuaug.GpuAugWarning")

IMAGES = torch.rand(2, 3, 8, 8)
MAPS = torch.zeros(2, 8, 8, dtype=torch.int64)
FLIP = K.RandomHorizontalFlip(p=1.0)


def target():
    return {"boxes": torch.tensor([[1.0, 1, 4, 4]]), "masks": torch.ones(1, 8, 8), "labels": torch.tensor([1])}


WRAPPERS = {
    "plain": lambda transform: transform,
    "partial": functools.partial,
    "partial of a partial": lambda transform: functools.partial(functools.partial(transform)),
    "forward": lambda transform: getattr(transform, "forward", transform),
    "__call__": lambda transform: transform.__call__,
    "partial of a method": lambda transform: functools.partial(transform.__call__),
    "nn.Sequential": lambda transform: nn.Sequential(transform) if isinstance(transform, nn.Module) else transform,
}
FORMS = {"tensor": MAPS, "boxes": torch.rand(2, 7, 4), "dict": {"masks": MAPS}, "list of dicts": [target(), target()]}
GEOMETRIC = geometric_transforms()
COLOURS = colour_transforms()
NOT_ON_BATCHES = ("AugMix", "RandomIoUCrop")
REFUSED = (
    *("ElasticTransform", "FiveCrop", "RandomFisheye", "RandomResize", "RandomShortestSize", "RandomThinPlateSpline"),
    *("RandomZoomOut", "ScaleJitter", "TenCrop"),
)
"""Transforms that ``gpuaug.fuse`` refuses with masks, or unless a transform to one size follows. So are layers of Kornia."""

SURE = "torchvision.transforms.v2._geometry: RandomHorizontalFlip"
SIZING = ("RandomIoUCrop", "RandomResize", "RandomShortestSize", "RandomZoomOut", "ScaleJitter")


def warned(batch, stage):
    """Warnings of gpuaug about one batch, without the warning of transforms that draw once per batch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in streamed([batch], stage, depth=0):
            pass
    texts = [str(warning.message) for warning in caught if warning.category is GpuAugWarning]
    return [text for text in texts if "draws once" not in text and "is not fused" not in text]


def check(transform, batch, **options):
    """Warnings of gpuaug at the first batch of a stage, which reads the batch, but does not run the transform."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bound_stage = TransformStage(transform, **options).bind("transform", Lanes(torch.device("cpu")))
        caught.clear()
        bound_stage.read(batch)
    return [str(warning.message) for warning in caught]


def fused_or_none(transform):
    """The fused pipeline of a transform, followed by a resize if it makes images of several sizes; ``None`` if refused."""
    resized = v2.Compose([transform, v2.Resize((4, 4))]) if type(transform).__name__ in SIZING else transform
    try:
        return fuse(resized)
    except GpuAugError:
        return None


def with_wrapper(transforms):
    """Parameters: each name, with one of the wrappers in turn."""
    return list(zip(transforms, itertools.cycle(WRAPPERS), strict=False))


@pytest.mark.parametrize(("name", "wrapper"), [*with_wrapper(GEOMETRIC), *((SURE, wrapper) for wrapper in WRAPPERS)])
def test_transform_that_moves_pixels_warns_of_targets(name, wrapper):
    transform, class_name = GEOMETRIC[name], name.split(": ")[1]
    unfused = None if class_name in NOT_ON_BATCHES else transform
    fused = None if class_name == "RandomIoUCrop" else fused_or_none(transform)
    for bare in (source for source in (unfused, fused) if source is not None):
        for source in (bare, WRAPPERS[wrapper](bare)):
            for form in FORMS.values():
                [text] = check(source, (IMAGES, form))
                assert "no longer match the images" in text
            assert not check(source, (IMAGES, torch.arange(2))), "a batch without targets"


@pytest.mark.parametrize(("name", "wrapper"), with_wrapper(COLOURS))
def test_transform_that_moves_no_pixels_does_not_warn(name, wrapper):
    for bare in (source for source in (COLOURS[name], fused_or_none(COLOURS[name])) if source is not None):
        for source in (bare, WRAPPERS[wrapper](bare)):
            for form in FORMS.values():
                assert not check(source, (IMAGES, form))


def run_line(text, transform, batch):
    """Run the stage that a warning says to pass; return the batch."""
    line = re.search(r"Pass (gpuaug\.TransformStage\(.*?\}\))\.", text)
    (result,) = streamed([batch], eval(line[1], {"transform": transform, "gpuaug": gpuaug}))
    return result


@pytest.mark.parametrize(("name", "wrapper"), with_wrapper(GEOMETRIC))
def test_line_to_type_works_for_every_transform_or_raises_an_error(name, wrapper):
    if type(GEOMETRIC[name]).__name__ in NOT_ON_BATCHES:
        return
    worked = []
    dtypes = (torch.float32,) if name.startswith("kornia.") else (torch.float32, torch.uint8)  # Kornia takes floats
    for dtype, transform in itertools.product(dtypes, (GEOMETRIC[name], WRAPPERS[wrapper](GEOMETRIC[name]))):
        images = v2.functional.to_dtype(IMAGES, dtype, scale=True)
        [text] = warned((images, MAPS), transform)
        try:
            images, masks = run_line(text, transform, (images, MAPS))
        except (AssertionError, RuntimeError, GpuAugError):  # Kornia asserts
            continue
        assert masks.shape[-2:] == images.shape[-2:]
        worked.append(dtype)
    is_refused = type(GEOMETRIC[name]).__name__ in REFUSED or name.startswith("kornia.geometry")
    assert worked or is_refused, "gpuaug.fuse transforms masks with it"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("on", "keys"), [((0, 1), ["image", "mask"]), ((0,), ["input"])])
def test_line_to_type_names_the_members_of_a_tuple_one_by_one(on, keys, fused):
    transform = K.AugmentationSequential(K.RandomHorizontalFlip(p=1.0), data_keys=keys)
    transform = fuse(transform) if fused else transform
    boxes = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]] * 2)
    maps = torch.rand(2, 1, 8, 8)
    batch = (IMAGES, maps, boxes)
    [text] = check(transform, batch, on=on)
    images, masks, flipped_boxes = run_line(text, transform, batch)
    assert_values(images, IMAGES.flip(-1))
    assert_values(masks, maps.flip(-1))
    assert not torch.equal(flipped_boxes, boxes)


BOX, POINTS = [1.0, 2.0, 3.0, 4.0], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
MAP = MAPS[0].tolist()
NUMBERS = {
    "boxes per image": {"bbox": [[BOX, BOX], [BOX]]},
    "first image without boxes": {"boxes": [[], [BOX]]},
    "rows": [{"objects": {"bbox": [BOX], "category": [1]}}, {"objects": {"bbox": [], "category": []}}],
    "tuples": {"boxes": ((tuple(BOX),), (tuple(BOX),))},
    "whole numbers": {"bbox": [[[1, 2, 3, 4]], [[1, 2, 3, 4]]]},
    "numbers of NumPy": {"bbox": [[list(np.array(BOX, np.float32))]] * 2},
    "arrays per image": {"bbox": [np.array([BOX]), np.array([BOX, BOX])]},
    "arrays per box": {"bbox": [[np.array(BOX)], [np.array(BOX)]]},
    "tensors per image": {"bbox": [torch.tensor([BOX]), torch.tensor([BOX, BOX])]},
    "tensors per box": {"bbox": [[torch.tensor(BOX)], [torch.tensor(BOX)]]},
    "default_collate": {"objects": {"bbox": [[torch.tensor([number] * 2) for number in BOX]]}},
    "keypoints": {"keypoints": [[POINTS], [POINTS]]},
    "keypoints in COCO's format": {"keypoints": [[[1, 2, 2, 3, 4, 2, 5, 6, 0]], [[1, 2, 2, 3, 4, 2, 5, 6, 0]]]},
    "mask": {"mask": [MAP, MAP]},
    "masks per image": {"masks": [[MAP, MAP], [MAP]]},
    "run lengths": [{"masks": [{"size": [8, 8], "counts": "0"}]}] * 2,
}
NO_TARGETS = {
    "labels": {"labels": [[1, 2, 3, 4], [1, 2, 3, 4]]},
    "text": {"boxes": ["a", "b"]},
    "other lengths": {"boxes": [[1, 2, 3], [1, 2]]},
    "a mask of patches": {"mask": [[[0, 1], [1, 0]]] * 2},
    "empty": {"bbox": [[], []]},
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("transform", [FLIP, fuse(FLIP)], ids=["a module", "a fused pipeline"])
def test_numbers_in_lists_under_the_key_of_a_target_warn(transform, name):
    (text,) = check(transform, (IMAGES, NUMBERS[name]))
    assert "no longer match the images" in text
    assert "In collate_fn, convert" in text or "Pass gpuaug.TransformStage" in text


@pytest.mark.parametrize("name", NO_TARGETS)
def test_other_lists_do_not_warn(name):
    assert check(FLIP, (IMAGES, NO_TARGETS[name])) == []


OTHER_MOVING = {
    "a function of torchvision": functools.partial(v2.functional.resize, size=[4, 4]),
    "a function of torchvision v1": v1.functional.hflip,
    "a function of Kornia": geometry.hflip,
    "a preset": ResNet18_Weights.DEFAULT.transforms(crop_size=4, resize_size=8),
    "a function in a list": v2.Compose([functools.partial(v2.functional.resize, size=[4, 4])]),
    "a method in a list": v2.Compose([v2.CenterCrop(4).forward]),
}


@pytest.mark.parametrize("transform", OTHER_MOVING.values(), ids=OTHER_MOVING)
def test_functions_and_presets_that_move_pixels_warn(transform):
    [text] = warned((IMAGES, MAPS), transform)
    assert "masks no longer match the images" in text
    if isinstance(transform, nn.Module) and not isinstance(transform, v2.Compose):
        assert run_line(text, transform, (IMAGES, MAPS))[1].shape == (2, 4, 4)


def test_fused_modules_of_other_libraries_warn_by_their_ops():
    [text] = warned((IMAGES, MAPS), fuse(FixedSizeCrop((4, 4))))
    assert "because FixedSizeCrop transforms the images without them" in text
    assert run_line(text, fuse(FixedSizeCrop((4, 4))), (IMAGES, MAPS))[1].shape == (2, 4, 4)


# Fused pipelines in other modules

RAMP = torch.arange(8).expand(2, 8, 8).contiguous()
SURE_FLIP = fuse(v2.RandomHorizontalFlip(1.0))


@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name != "nn.Sequential"])
def test_wrapped_fused_pipelines_transform_members_by_type(wrapper):
    batch = (IMAGES, tv_tensors.Mask(RAMP))
    assert not warned(batch, WRAPPERS[wrapper](SURE_FLIP))
    ((images, masks),) = streamed([batch], WRAPPERS[wrapper](SURE_FLIP))
    assert torch.equal(images, IMAGES.flip(-1))
    assert torch.equal(masks, RAMP.flip(-1))


def test_partial_with_data_keys_also_transforms_members_by_type():
    stage = TransformStage(functools.partial(SURE_FLIP, data_keys=["input", "mask"]), on=(0, 2))
    ((_, typed, plain),) = streamed([(IMAGES, tv_tensors.Mask(RAMP), RAMP)], stage)
    assert torch.equal(typed, RAMP.flip(-1))
    assert torch.equal(plain, RAMP.flip(-1))


# Plain tensors beside torchvision's


def mixed_targets():
    boxes = tv_tensors.BoundingBoxes([[1.0, 1, 5, 5]], format="XYXY", canvas_size=(8, 8))
    return {"boxes": boxes, "masks": RAMP[:1].clone(), "keypoints": torch.tensor([[[1.0, 2.0]]]), "labels": torch.ones(1)}


def test_plain_tensors_beside_torchvisions_in_one_member_are_told_of():
    batch = (IMAGES, [mixed_targets(), mixed_targets()])
    for stage in (SURE_FLIP, TransformStage(SURE_FLIP, on={0: "input", 1: "tv_tensors"}), TransformStage(SURE_FLIP, on=(0, 1))):
        [text] = warned(batch, stage)
        assert text.startswith("masks, keypoints no longer match the images"), text
    _, targets = run_line(warned(batch, SURE_FLIP)[0], SURE_FLIP, batch)
    assert torch.equal(targets[0]["masks"], RAMP[:1].flip(-1))
    assert targets[0]["boxes"].tolist() == [[3, 1, 7, 5]]
    assert targets[0]["keypoints"][0, 0, 0] != 1


BOXES = torch.tensor([[1.0, 1, 5, 5]])
UNKNOWN_KEYS = {
    **{f"a mask under {key}": {key: RAMP[0].clone()} for key in ("mask", "seg", "instances")},
    **{f"boxes under {key}": {key: BOXES.clone()} for key in ("box", "bboxes", "ignore_boxes")},
    "an array": {"mask": RAMP[0].numpy().copy()},
    "a PIL image": {"mask": PIL.Image.fromarray(RAMP[0].byte().numpy())},
    "boxes within another dict": {"objects": {"bbox": BOXES.clone()}},
}
"""Annotations that a fused pipeline does not transform with the data key ``targets``."""


def typed(value):
    """The value, with torchvision's tensors in place of others."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor) and value.shape[-1] == 4:
        return tv_tensors.BoundingBoxes(value, format="XYXY", canvas_size=(8, 8))
    return tv_tensors.Mask(value)


SEVERAL = {
    "images of a mosaic": ([IMAGES] * 4, 4, fuse([gpuaug.Mosaic(8), v2.CenterCrop(4)])),
    "the first of several images": ([IMAGES] * 2, 2, SURE_FLIP),
    "frames of a clip": (torch.rand(2, 3, 3, 8, 8), 3, SURE_FLIP),
}
"""(images of two samples, number of target dicts per sample, pipeline)."""


@pytest.mark.parametrize(("images", "count", "augment"), SEVERAL.values(), ids=SEVERAL)
def test_lists_of_target_dicts_per_sample_get_their_data_key(images, count, augment):
    records = [[{"boxes": BOXES.clone(), "masks": RAMP[:1].clone()} for _ in range(count)] for _ in range(2)]
    [text] = warned((images, records), augment)
    assert text.startswith("boxes, masks no longer match the images"), text
    _, targets = run_line(text, augment, (images, records))
    record = targets[0][0] if isinstance(targets[0], list) else targets[0]
    assert "valid" in record, "the dicts are transformed"


@pytest.mark.parametrize("extra", UNKNOWN_KEYS.values(), ids=UNKNOWN_KEYS)
def test_unknown_keys_of_target_dicts_are_told_of(extra):
    stage = TransformStage(SURE_FLIP, on={0: "input", 1: "targets"})
    [text] = warned((IMAGES, [target() | extra] * 2), stage)
    (key,) = extra
    inner = "bbox" if key == "objects" else key
    assert f"convert {inner!r} in 1 to tv_tensors" in text
    converted = [target() | typed(extra)] * 2
    assert not warned((IMAGES, converted), stage)
    ((_, got),) = streamed([(IMAGES, converted)], stage)
    flipped = batches.leaves(got[0][key])[0].squeeze(0)  # (1, H, W) of a PIL image
    assert flipped.tolist() == ([3, 1, 7, 5] if flipped.shape[-1] == 4 else RAMP[0].flip(-1).tolist())


def test_other_values_of_target_dicts_are_not_told_of():
    values = {"labels": torch.rand(3, 4), "class_scores": torch.rand(3, 4), "area": torch.rand(3), "size": torch.tensor([8, 8])}
    assert not warned((IMAGES, [target() | values] * 2), TransformStage(SURE_FLIP, on={0: "input", 1: "targets"}))


def test_second_plain_tensor_of_a_torchvision_transform_is_told_of():
    [text] = warned((IMAGES, RAMP), TransformStage(v2.CenterCrop(4), on=(0, 1)))
    assert "masks no longer match" in text


class FlipOfPairs(v2.RandomHorizontalFlip):
    """A user's class, which flips masks, too."""

    def forward(self, images, masks):
        return images.flip(-1), masks.flip(-1)


def test_transforms_of_the_user_for_pairs_are_not_told_of():
    assert not warned((IMAGES, RAMP), TransformStage(FlipOfPairs(), on=(0, 1)))


ONLY_TYPED = {"boxes": mixed_targets()["boxes"], "masks": tv_tensors.Mask(RAMP[:1]), "labels": torch.ones(1)}


@pytest.mark.parametrize("targets", [[ONLY_TYPED, ONLY_TYPED], {"map": tv_tensors.Mask(RAMP), "names": ["a", "b"]}])
def test_containers_of_torchvisions_tensors_alone_are_not_told_of(targets):
    assert not warned((IMAGES, targets), SURE_FLIP)


def test_line_for_an_intended_mismatch_disables_the_warning():
    [text] = warned((IMAGES, RAMP), SURE_FLIP)
    line = re.search(r"disable this warning with (warnings\.filterwarnings\(.*?\))", text)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(line)
        list(streamed([(IMAGES, RAMP)], SURE_FLIP))
