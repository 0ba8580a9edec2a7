"""torchvision's tensors in any container follow the images as in torchvision's own transforms."""

import itertools
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.comparison.replay import photographs
from support.comparison.values import assert_values
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug.core import batch as batches

SIDES = (32, 48)
IMAGES = photographs(3)
# Each has one outcome, so that torchvision's own call on a sample says what is right.
FIXED = {
    "flip": lambda: v2.RandomHorizontalFlip(1.0),
    "crop": lambda: v2.CenterCrop((20, 30)),
    "pad, resize": lambda: v2.Compose([v2.Pad(3, fill={tv_tensors.Mask: 7, "others": 0}), v2.Resize((40, 40))]),
    "colour": lambda: v2.RandomInvert(1.0),
}
Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    first: Any
    second: Any


def tensor(kind, count, seed, canvas=SIDES):
    numbers = torch.Generator().manual_seed(seed)
    if kind == "mask":
        return tv_tensors.Mask(torch.randint(0, 9, (count, *canvas), generator=numbers))
    if kind == "label map":
        return tv_tensors.Mask(torch.randint(0, 9, canvas, generator=numbers))
    if kind == "keypoints":
        return tv_tensors.KeyPoints(torch.rand(count, 2, 2, generator=numbers) * 20, canvas_size=canvas)
    first = torch.rand(count, 2, generator=numbers) * 12 + 8  # so that no crop above leaves a box out
    return tv_tensors.BoundingBoxes(torch.cat((first, first + 9), 1), format="XYXY", canvas_size=canvas)


def wrapped(kind, one, other):
    return {"dict": {"a": one, "b": other}, "tuple": (one, other), "named": Pair(one, other), "record": Record(one, other)}[
        kind
    ]


KINDS = st.sampled_from(["mask", "label map", "keypoints", "boxes", "text"])
CONTAINERS = st.sampled_from(["dict", "tuple", "named", "record"])
ANNOTATION = st.recursive(KINDS, lambda inner: st.tuples(CONTAINERS, inner, inner), max_leaves=5)


def build(form, sample):
    """The annotation of one image in a form: the name of a kind, or (container, form, form)."""
    seeds = iter(range(100 * sample, 100 * sample + 100))

    def made(form):
        if isinstance(form, tuple):
            return wrapped(form[0], made(form[1]), made(form[2]))
        return "text" if form == "text" else tensor(form, sample, next(seeds))

    return made(form)


def right(transform, sample, value):
    """The tensors within a value after torchvision's own call on an image and that value."""
    leaves = [leaf for leaf in batches.leaves(value) if isinstance(leaf, torch.Tensor)]
    made = transform(tv_tensors.Image(IMAGES[sample]), *leaves)[1:] if leaves else ()
    return list(made)


def assert_same(got, wanted, *, flipped=False):
    """Compare a result with torchvision's tensors, in order: masks in each value, boxes and keypoints to 1e-4 of a pixel."""
    leaves = [leaf for leaf in batches.leaves(got) if isinstance(leaf, tv_tensors.TVTensor)]
    assert len(leaves) == len(wanted)
    for leaf, other in zip(leaves, wanted, strict=True):
        assert type(leaf) is type(other)
        if isinstance(leaf, tv_tensors.Mask):
            assert_values(leaf, other)
        else:
            # torchvision flips keypoints one pixel further to the left than the image.
            further = torch.tensor([1.0, 0.0] if flipped and isinstance(leaf, tv_tensors.KeyPoints) else [0.0])
            assert leaf.canvas_size == other.canvas_size
            torch.testing.assert_close(
                leaf.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor) + further, atol=1e-4, rtol=0
            )


@given(form=ANNOTATION, name=st.sampled_from(sorted(FIXED)), outer=st.sampled_from(["list", "tuple", "in a dict"]))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_annotations_of_each_image_follow_it_in_any_container(form, name, outer):
    values = [build(form, sample) for sample in range(3)]
    given_values = {"list": values, "tuple": tuple(values), "in a dict": {"deep": [0, 1], "inner": values}}[outer]
    _, got = gpuaug.fuse(FIXED[name]())(IMAGES, given_values, data_keys=["input", "tv_tensors"])
    assert type(got) is type(given_values)
    got = got["inner"] if outer == "in a dict" else got
    for sample, (made, value) in enumerate(zip(got, values, strict=True)):
        assert type(made) is type(value)
        assert_same(made, right(FIXED[name](), sample, value), flipped=name == "flip")


def test_tensors_of_all_images_follow():
    maps = tv_tensors.Mask(torch.randint(0, 9, (3, *SIDES)))
    boxes, points = tensor("boxes", 3, 0), tv_tensors.KeyPoints(torch.rand(3, 5, 2) * 20, canvas_size=SIDES)
    channels = tv_tensors.Mask(torch.rand(3, 2, *SIDES))
    value = {"maps": maps, "deep": {"boxes": boxes, "points": points}, "channels": channels, "rest": torch.arange(3)}
    _, got = gpuaug.fuse(FIXED["crop"]())(IMAGES, value)
    for sample in range(3):
        one = [maps[sample], boxes[sample][None], points[sample], channels[sample]]
        kinds = [tv_tensors.wrap(each, like=like) for each, like in zip(one, (maps, boxes, points, maps), strict=True)]
        made = [got["maps"][sample], got["deep"]["boxes"][sample][None], got["deep"]["points"][sample], got["channels"][sample]]
        wanted = [each.as_subclass(torch.Tensor) for each in right(FIXED["crop"](), sample, kinds)]
        torch.testing.assert_close([each.as_subclass(torch.Tensor) for each in made], wanted, atol=1e-4, rtol=0)
    assert [type(each) for each in (got["maps"], got["deep"]["boxes"])] == [tv_tensors.Mask, tv_tensors.BoundingBoxes]
    assert got["deep"]["boxes"].canvas_size == got["deep"]["points"].canvas_size == (20, 30)
    assert got["rest"] is value["rest"]


@pytest.mark.parametrize("images", [IMAGES[0], IMAGES[:1]], ids=["one image", "a batch of one"])
def test_tensors_of_the_only_image_follow(images):
    value = {"boxes": tensor("boxes", 4, 0), "masks": tensor("mask", 4, 1), "map": tensor("label map", 0, 2)}
    _, got = gpuaug.fuse(FIXED["crop"]())(images, value)
    assert_same({key: got[key] for key in value}, right(FIXED["crop"](), 0, value))
    assert got["valid"].tolist() == [True] * 4


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_dicts_of_all_images_have_one_form_for_every_number_of_images(count, views):
    rows = torch.tensor([[0, 0, 4, 4], [20, 12, 28, 20], [20, 12, 28, 20]])[:count]
    boxes = tv_tensors.BoundingBoxes(rows, format="XYXY", canvas_size=SIDES)
    crop = gpuaug.fuse(FIXED["crop"](), views=views)
    for given_valid in (None, torch.tensor([True, True, False])[:count]):
        value = {"b": boxes, "name": 1} | ({} if given_valid is None else {"valid": given_valid})
        _, got = crop(IMAGES[:count], value)
        valid = torch.tensor([False, True, given_valid is None])[:count]
        assert list(got) == ["b", "name", "valid"] if given_valid is None else list(got) == list(value)
        assert got["valid"].tolist() == valid.tolist() * views
        assert len(got["b"]) == count * views
    with pytest.raises(gpuaug.ArgumentError, match="valid of sample 0 must be one bool for each"):
        crop(IMAGES[:count], {"b": boxes, "valid": torch.ones(count + 1, dtype=torch.bool)})


def test_valid_goes_from_call_to_call_and_drops_what_is_gone():
    boxes = [[[0, 0, 4, 4], [20, 12, 28, 20]], [[20, 12, 28, 20]], [[0, 0, 4, 4]]]
    values = [
        {"objects": tv_tensors.BoundingBoxes(each, format="XYXY", canvas_size=SIDES), "labels": torch.arange(len(each))}
        for each in boxes
    ]
    _, cropped = gpuaug.fuse(FIXED["crop"]())(IMAGES, values)
    assert [each["valid"].tolist() for each in cropped] == [[False, True], [True], [False]]
    _, again = gpuaug.fuse(FIXED["flip"]())(IMAGES[..., 6:26, 9:39], cropped)
    assert [each["valid"].tolist() for each in again] == [[False, True], [True], [False]]
    kept = gpuaug.sanitize(again)
    assert [(len(each["objects"]), each["labels"].tolist()) for each in kept] == [(1, [1]), (1, [0]), (0, [])]


def test_valid_is_of_the_boxes_that_come_first():
    gone, stays = [0, 0, 4, 4], [20, 12, 28, 20]
    two = [tv_tensors.BoundingBoxes([gone, stays], format="XYXY", canvas_size=SIDES) for _ in range(3)]
    three = [tv_tensors.BoundingBoxes([stays, gone, stays], format="XYXY", canvas_size=SIDES) for _ in range(3)]
    crop = gpuaug.fuse(FIXED["crop"]())
    valid = torch.tensor([True, True])
    _, got = crop(IMAGES, [{"a": a, "b": b, "valid": valid} for a, b in zip(two, three, strict=True)])
    assert [record["valid"].tolist() for record in got] == [[False, True]] * 3
    _, got = crop(IMAGES, [{"a": a, "valid": ~valid} for a in two])
    assert [record["valid"].tolist() for record in got] == [[False, False]] * 3
    named = [{"extra": b, "boxes": a.as_subclass(torch.Tensor)} for a, b in zip(two, three, strict=True)]
    _, got = crop(IMAGES, named, data_keys=["input", "targets"])
    assert [record["valid"].tolist() for record in got] == [[False, True]] * 3
    assert [len(record["extra"]) for record in got] == [3] * 3
    for names, expected in (("ab", [False, True]), ("ba", [True, False, True])):
        _, got = crop(IMAGES[:1], {name: {"a": two, "b": three}[name][0] for name in names})
        assert got["valid"].tolist() == expected


@pytest.mark.parametrize("is_pure", [False, True])
def test_views_repeat_the_annotations_of_each_image(is_pure):
    value = {
        "map": tv_tensors.Mask(torch.randint(0, 9, (3, *SIDES))),
        "objects": [tensor("boxes", n, n) for n in (1, 0, 2)],
        "name": 5,
        "labels": [1, 2, 3],
    }
    augment = gpuaug.fuse([v2.RandomHorizontalFlip(), v2.RandomCrop(16), *([v2.ToPureTensor()] if is_pure else [])], views=2)
    draws = augment.draw(IMAGES.shape, seed=0)
    images, got = augment(IMAGES, value, draws=draws)
    pictures, masks = augment(IMAGES, value["map"], data_keys=["input", "mask"], draws=draws)
    assert_values(images, pictures)
    assert_values(got["map"], masks)
    assert [len(each) for each in got["objects"]] == [1, 0, 2, 1, 0, 2]
    types = {type(tensor) for tensor in batches.tensors(got)}
    assert types == ({torch.Tensor} if is_pure else {tv_tensors.Mask, tv_tensors.BoundingBoxes})
    assert got["name"] == 5
    assert got["labels"] == [1, 2, 3]
    records = [{"objects": boxes, "label": label} for boxes, label in zip(value["objects"], value["labels"], strict=True)]
    assert [record["label"] for record in augment(IMAGES, records)[1]] == [1, 2, 3, 1, 2, 3]


def test_annotations_follow_images_of_different_sizes():
    sizes = [(20, 31), (17, 40), (25, 25)]
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in sizes]
    values = [{"m": tensor("label map", 0, n, size), "b": tensor("boxes", n, n, size)} for n, size in enumerate(sizes)]
    transform = v2.CenterCrop((12, 14))
    _, got = gpuaug.fuse(transform, ragged=True)(gpuaug.collate_ragged(images), values)
    for image, value, made in zip(images, values, got, strict=True):
        wanted = transform(tv_tensors.Image(image), value["m"])[1]
        assert_values(made["m"], wanted)
        assert made["b"].canvas_size == (12, 14)


def test_crop_by_boxes_looks_at_boxes_of_any_key():
    augment = gpuaug.fuse([v2.RandomIoUCrop(), v2.Resize((24, 24))])
    values = [{"objects": tensor("boxes", n, n), "map": tensor("label map", 0, n)} for n in (1, 2, 2)]
    values = [{**value, "other map": value["map"]} for value in values]
    draws = augment.draw(IMAGES.shape, seed=3)
    _, got = augment(IMAGES, values, draws=draws)
    named = [{"boxes": value["objects"]} for value in values]
    _, wanted = augment(IMAGES, named, data_keys=["input", "targets"], draws=draws)
    for made, other in zip(got, wanted, strict=True):
        assert_values(made["objects"], other["boxes"])
        assert made["map"].shape == (24, 24)


def test_crop_by_boxes_looks_at_one_set_of_boxes():
    augment = gpuaug.fuse([v2.RandomIoUCrop(), v2.Resize((24, 24))])
    one, other = tensor("boxes", 1, 0), tensor("boxes", 1, 1)
    two_sets = {
        "one and other": ("tv_tensors", [{"one": one, "other": other}] * 3),
        "boxes and second": ("targets", [{"boxes": one, "second": other}] * 3),
        "boxes and deep.second": ("targets", [{"boxes": one.as_subclass(torch.Tensor), "deep": {"second": other}}] * 3),
    }
    for names, (key, value) in two_sets.items():
        with pytest.raises(
            gpuaug.ArgumentError, match=f"one set of boxes for RandomIoUCrop_0, .* got {names}. Leave all but one"
        ):
            augment(IMAGES, value, data_keys=["input", key])
        first = [{names.split()[0]: one}] * 3
        assert augment(IMAGES, first, data_keys=["input", key])[0].shape == (3, 3, 24, 24)
    with pytest.raises(gpuaug.ArgumentError, match=r"got \['input', 'tv_tensors'\]. Pass target dicts with the images"):
        augment(IMAGES, {"map": MASK})


# Positions in a batch


MASK = tv_tensors.Mask(torch.randint(0, 9, (3, *SIDES)))
Batch = namedtuple("Batch", "image target")
IN_A_BATCH = {
    "tuple": ((IMAGES, MASK), ..., lambda batch: batch[1]),
    "list, index": ([MASK, IMAGES], 1, lambda batch: batch[0]),
    "index from the end": ((MASK, IMAGES), -1, lambda batch: batch[0]),
    "dict": ({"image": IMAGES, "any key": MASK}, "image", lambda batch: batch["any key"]),
    "named tuple": (Batch(IMAGES, MASK), "image", lambda batch: batch.target),
    "record": (Record(IMAGES, {"deep": MASK}), "first", lambda batch: batch.second["deep"]),
    "list of images' maps": ((IMAGES, list(map(tv_tensors.Mask, MASK))), ..., lambda batch: torch.stack(batch[1])),
    "target dicts": (
        (IMAGES, [{"seg": tv_tensors.Mask(m)} for m in MASK]),
        ...,
        lambda b: torch.stack([d["seg"] for d in b[1]]),
    ),
    "beside a declared mask": (
        {"x": IMAGES, "m": MASK.as_subclass(torch.Tensor), "typed": MASK},
        {"x": "input", "m": "mask"},
        lambda batch: batch["typed"],
    ),
    "beside labels": ((IMAGES, torch.arange(3), MASK), {0: "input", 1: "class"}, lambda batch: batch[2]),
}


@pytest.mark.parametrize(("batch", "on", "found"), IN_A_BATCH.values(), ids=IN_A_BATCH)
@pytest.mark.parametrize(("device", "depth"), [("cpu", 0), ("cpu", 2), pytest.param("cuda", 2, marks=pytest.mark.gpu)])
@pytest.mark.filterwarnings("ignore:The copy of a batch")  # from memory that is not page-locked
def test_stages_hand_over_what_their_type_declares(batch, on, found, device, depth):
    augment = gpuaug.fuse(v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop((20, 30))]))
    stage = gpuaug.TransformStage(augment, on=on, name="augment")
    declared = gpuaug.TransformStage(augment, on={0: "input", 1: "mask"}, name="augment")
    plain = (IMAGES, MASK.as_subclass(torch.Tensor))
    wanted = list(gpuaug.StreamedLoader([plain] * 2, [declared], device="cpu", seed=4, depth=0))
    got = list(gpuaug.StreamedLoader([batch] * 2, [stage], device=device, seed=4, depth=depth))
    for made, (_, masks) in zip(got, wanted, strict=True):
        assert type(made) is type(batch)
        assert_values(torch.as_tensor(found(made)).as_subclass(torch.Tensor).cpu(), masks)


def test_stages_that_keep_their_source_leave_targets_with_it():
    stage = gpuaug.TransformStage(gpuaug.fuse(v2.CenterCrop(8)), into=2)
    _, mask, cropped = next(iter(gpuaug.StreamedLoader([(IMAGES, MASK)], [stage], device="cpu")))
    assert_values(mask, MASK)
    assert cropped.shape == (3, 3, 8, 8)


# Refusals


REFUSED = {
    "list of another length": ({"masks": [tensor("mask", 1, 0)] * 2}, gpuaug.ArgumentError, "one element"),
    "boxes of no image": (
        tensor("boxes", 5, 0),
        gpuaug.ArgumentError,
        r"BoundingBoxes must hold one entry for each of the 3 images, got \(5, 4\). Pass a list of one tensor per image.",
    ),
    "boxes of another canvas": ([tensor("boxes", 1, 0, (64, 96))] * 3, gpuaug.ArgumentError, "canvas_size"),
    "keypoints of another canvas": ([tensor("keypoints", 1, 0, (48, 32))] * 3, gpuaug.ArgumentError, "canvas_size"),
    "map of another size": (tv_tensors.Mask(torch.zeros(3, 8, 8)), gpuaug.ArgumentError, "size"),
}


@pytest.mark.parametrize(("value", "error", "keyword"), REFUSED.values(), ids=REFUSED)
def test_tensors_that_do_not_fit_the_images_are_refused(value, error, keyword):
    with pytest.raises(error, match=keyword):
        gpuaug.fuse(FIXED["flip"]())(IMAGES, value, data_keys=["input", "tv_tensors"])


def lists_of(count):
    """Boxes, keypoints, masks and labels of each image."""
    return [[tensor(kind, n + 1, n) for n in range(count)] for kind in ("boxes", "keypoints", "mask")] + [list(range(count))]


def of_all_images(count):
    """Annotations of all images, by name: each has the images along its first axis, or in a list."""
    maps = [tv_tensors.Mask(torch.full((count, *SIDES), number)) for number in range(2)]
    boxes, points, masks, numbers = lists_of(count)
    labels = torch.arange(count)
    return {
        "map": maps[0],
        "depth": maps[1],
        "boxes": boxes,
        "points": points,
        "masks": masks,
        "labels": labels,
        "names": numbers,
    }


PAIRS = [pair for pair in itertools.permutations(of_all_images(2), 2) if {*pair} & {"map", "depth", "boxes", "points", "masks"}]


@pytest.mark.parametrize(
    ("container", "pair"),
    # A list of two masks holds the masks of each image.
    [(cls, pair) for cls in (list, tuple) for pair in PAIRS if cls is tuple or {*pair} != {"map", "depth"}],
)
def test_annotations_of_all_images_in_a_list_of_two_are_refused_for_two_images(container, pair):
    values = {name: of_all_images(2)[name] for name in pair}
    flip = gpuaug.fuse(FIXED["flip"]())
    with pytest.raises(gpuaug.ArgumentError, match="must hold annotations of one image in each"):
        flip(IMAGES[:2], container(values.values()), data_keys=["input", "tv_tensors"])
    _, got = flip(IMAGES[:2], values, data_keys=["input", "tv_tensors"])
    assert list(got) == list(values)


PER_IMAGE = {
    "masks": [tensor("mask", n, n) for n in (1, 2)],
    "as many masks as images": [tensor("mask", 2, n) for n in range(2)],
    "masks and an image without": [tensor("mask", 2, 2), None],
    "label maps": [tensor("label map", 0, n) for n in range(2)],
    "boxes": [tensor("boxes", 2, n) for n in range(2)],
    "boxes and a plain empty tensor": [tensor("boxes", 2, 0), torch.zeros(0, 4)],
    "lists": [[], [tensor("boxes", 2, 0)]],
    "tuples": [("a", tensor("boxes", 1, 0)), (5, tensor("boxes", 2, 0))],
    "mappings": [{"a": tensor("boxes", 1, 0)}, {"b": 3}],
    "dicts of as many masks as images": [{"masks": tensor("mask", 2, n)} for n in range(2)],
}


@pytest.mark.parametrize("value", PER_IMAGE.values(), ids=PER_IMAGE)
def test_annotations_of_each_of_two_images_follow_their_image(value):
    augment = gpuaug.fuse([v2.RandomHorizontalFlip(), v2.RandomCrop(16)])
    draws = augment.draw((2, 3, *SIDES), seed=5)
    _, got = augment(IMAGES[:2], value, data_keys=["input", "tv_tensors"], draws=draws)
    _, expected = augment(IMAGES[:2], [{"its": one} for one in value], data_keys=["input", "targets"], draws=draws)
    for one, other in zip(got, expected, strict=True):
        leaves = [
            [leaf for leaf in batches.leaves(each) if isinstance(leaf, tv_tensors.TVTensor)] for each in (one, other["its"])
        ]
        for leaf, right_leaf in zip(*leaves, strict=True):
            assert_values(leaf, right_leaf)


@pytest.mark.parametrize("key", ["bbox_xyxy", "keypoints"])
def test_canvas_is_compared_under_data_keys_of_kornia_too(key):
    value = tensor("boxes", 1, 0) if key == "bbox_xyxy" else tv_tensors.KeyPoints(torch.ones(1, 4, 2), canvas_size=SIDES)
    gpuaug.fuse(FIXED["flip"]())(IMAGES[:1], value, data_keys=["input", key])
    with pytest.raises(gpuaug.ArgumentError, match="canvas_size"):
        gpuaug.fuse(FIXED["flip"]())(IMAGES[:1, :, :16], value, data_keys=["input", key])


def test_videos_that_are_not_selected_stay_as_they_are():
    """As images do: another stage may take them."""
    batch = {"images": IMAGES, "video": tv_tensors.Video(torch.rand(3, 4, 3, *SIDES))}
    stage = gpuaug.TransformStage(gpuaug.fuse(v2.RandomCrop(4)), on="images")
    made = next(iter(gpuaug.StreamedLoader([batch], [stage], device="cpu")))
    assert_values(made["video"], batch["video"])


@pytest.mark.parametrize("shape", [(3, *SIDES), (3, 1, *SIDES)])
@pytest.mark.parametrize("key", ["class", "label"])
def test_label_maps_are_no_labels(shape, key):
    with pytest.raises(gpuaug.ArgumentError, match="mask"):
        gpuaug.fuse(FIXED["flip"]())(IMAGES, torch.zeros(shape, dtype=torch.int64), data_keys=["input", key])


def test_mixes_refuse_masks_and_boxes_as_in_torchvision():
    for mix in (v2.MixUp(num_classes=4), v2.CutMix(num_classes=4)):
        with pytest.raises(ValueError, match="does not support"):
            mix(IMAGES / 255, torch.arange(3), {"mask": MASK})
        with pytest.raises(gpuaug.ArgumentError, match="must be among input, class with "):
            gpuaug.fuse(mix)(IMAGES / 255, torch.arange(3), {"mask": MASK}, data_keys=["input", "class", "tv_tensors"])


def test_format_of_typed_boxes_beside_plain_ones_is_converted():
    corners = torch.tensor([[1.0, 2.0, 5.0, 8.0]])
    typed = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(10, 12))
    augment = gpuaug.fuse([v2.RandomHorizontalFlip(0.0), v2.ConvertBoundingBoxFormat("CXCYWH")])
    images = torch.zeros(2, 3, 10, 12, dtype=torch.uint8)
    _, (plain, converted) = augment(images, [{"boxes": corners}, {"boxes": typed}], data_keys=["input", "targets"])
    assert type(plain["boxes"]) is torch.Tensor
    assert converted["boxes"].format is tv_tensors.BoundingBoxFormat.CXCYWH
    assert_values(converted["boxes"].as_subclass(torch.Tensor), plain["boxes"])
