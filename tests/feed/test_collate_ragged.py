"""Whatever images a dataset gives, each is in the batch as it is by itself, and what cannot be is refused by its sample."""

import datetime
import io
from collections import OrderedDict, UserDict
from dataclasses import make_dataclass
from functools import partial

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batches.sample_forms import FORMS, Pair, Record
from support.files.images import noise, pil, png
from torch.utils.data import DataLoader, default_collate
from torchvision import tv_tensors
from torchvision.io import decode_image
from torchvision.transforms.functional import pil_to_tensor

import gpuaug
from gpuaug import ArgumentError, Ragged, StreamedLoader, TransformStage, collate_encoded, collate_ragged
from gpuaug.feed.collate_members import allocating_with

PIL_MODES = ["RGB", "L", "1", "P", "RGBA", "LA", "PA", "CMYK", "YCbCr", "HSV", "RGBX"]


KINDS = {
    **{f"PIL {mode}": partial(pil, mode=mode) for mode in PIL_MODES},
    "file": lambda seed, h, w: PIL.Image.open(io.BytesIO(png(pil(seed, h, w)).numpy().tobytes())),
    "array": lambda seed, h, w: noise(seed, h, w, 3),
    "turned array": lambda seed, h, w: noise(seed, h, w, 3)[::-1, :, ::-1],
    "part of an array": lambda seed, h, w: noise(seed, h + 3, w + 2, 4)[2:-1, 1:-1, :3],
    "grey array": lambda seed, h, w: noise(seed, h, w),
    "array (H, W, 1)": lambda seed, h, w: noise(seed, h, w, 1),
    "array (H, W, 4)": lambda seed, h, w: noise(seed, h, w, 4),
    "tensor": lambda seed, h, w: torch.from_numpy(noise(seed, 3, h, w)),
    "strided tensor": lambda seed, h, w: torch.from_numpy(noise(seed, h, w, 3)).permute(2, 0, 1),
    "part of a tensor": lambda seed, h, w: torch.from_numpy(noise(seed, 3, h + 3, w + 2))[:, 2:-1, 1:-1],
    "grey tensor": lambda seed, h, w: torch.from_numpy(noise(seed, 1, h, w)),
    "tensor with alpha": lambda seed, h, w: torch.from_numpy(noise(seed, 4, h, w)),
    "decoded": lambda seed, h, w: decode_image(png(pil(seed, h, w))),
    "decoded with alpha": lambda seed, h, w: decode_image(png(pil(seed, h, w, "LA"))),
    "tv_tensor": lambda seed, h, w: tv_tensors.Image(noise(seed, 3, h, w)),
}
COLOURED = [
    *("PIL RGB", "file", "array", "turned array", "part of an array"),
    *("tensor", "strided tensor", "part of a tensor", "decoded", "tv_tensor"),
]
GREY = ["PIL L", "grey array", "array (H, W, 1)", "grey tensor"]


def alone(image, mode):
    """What an image is by itself: (C, h, w), by PIL and torchvision."""
    if isinstance(image, torch.Tensor):
        planes = image.as_subclass(torch.Tensor)
        image = planes.permute(1, 2, 0).numpy()
    if isinstance(image, np.ndarray):
        if image.ndim == 3 and image.shape[2] <= 2:
            image = image[..., 0]
        image = PIL.Image.fromarray(np.ascontiguousarray(image))
    return pil_to_tensor(image.convert(mode))


def assert_holds(batch, images, mode):
    """``batch`` is ``images``, by what its index gives and by what a kernel reads."""
    assert type(batch) is Ragged
    assert len(batch) == len(images)
    assert (batch.data.dtype, batch.data.ndim, batch.places.dtype) == (torch.uint8, 1, torch.int64)
    channels = {"RGB": 3, "L": 1}[mode]
    end = 0
    for got, (start, height, width), image in zip(batch, batch.places.tolist(), images, strict=True):
        want = alone(image, mode)
        assert torch.equal(got, want)
        assert (start, height, width) == (end, *want.shape[1:])
        end = start + want.numel()
        flat = batch.data[start:end]
        if batch.shapes.layout == "hwc":
            assert torch.equal(flat.view(height, width, channels), want.permute(1, 2, 0))
        else:
            assert torch.equal(flat.view(channels, height, width), want)
    assert end == batch.data.numel()
    assert batch.shapes.channels == channels
    assert batch.shapes.sizes.tolist() == batch.places[:, 1:].tolist()
    assert batch.shapes.sizes.dtype == np.int64
    assert batch.shapes.layout == ("chw" if isinstance(images[0], torch.Tensor) else "hwc")


def drawn(kinds):
    one = st.tuples(st.sampled_from(kinds), st.integers(0, 99), st.integers(1, 9), st.integers(1, 9))
    return st.lists(one.map(lambda what: KINDS[what[0]](*what[1:])), min_size=1, max_size=6)


@pytest.mark.parametrize(("kinds", "mode", "channels"), [(COLOURED, "RGB", 3), (GREY, "L", 1)], ids=["RGB", "grey"])
@given(st.data())
def test_any_mix_of_images_is_packed_bit_for_bit(kinds, mode, channels, data):
    images = data.draw(drawn(kinds))
    assert_holds(collate_ragged(images, channels=channels), images, mode)


@given(drawn(list(KINDS)), st.sampled_from(["RGB", "L"]))
def test_any_mix_of_pil_images_is_converted(images, mode):
    assert_holds(collate_ragged(images, convert=True, channels={"RGB": 3, "L": 1}[mode]), images, mode)


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_images_with_other_channels_are_converted_or_refused(kind, mode, channels):
    native = {3: COLOURED, 1: GREY}[channels]
    images = [KINDS[native[0]](0, 2, 3), KINDS[kind](1, 4, 5)]
    assert_holds(collate_ragged(images, convert=True, channels=channels), images, mode)
    if kind in native:
        assert_holds(collate_ragged(images, channels=channels), images, mode)
        return
    name = {3: "RGB", 1: "grey"}[channels]
    text = f"^Images must be {name}, got .* in sample 1. Return image.convert.'{mode}'. from the dataset, or .*convert=True"
    with pytest.raises(ArgumentError, match=text):
        collate_ragged(images, channels=channels)


@pytest.mark.parametrize(("make", "read"), FORMS.values(), ids=FORMS.keys())
def test_sample_containers(make, read):
    images = [pil(0, 2, 3), pil(1, 4, 5), pil(2, 1, 1)]
    got, labels, right = read(collate_ragged([make(image, label) for label, image in enumerate(images)]))
    assert_holds(got, images, "RGB")
    assert torch.equal(labels, torch.arange(3))
    assert right


def test_later_samples_may_have_more_keys():
    batch = collate_ragged([{"x": FINE}, {"y": 1, "x": FINE}])
    assert list(batch) == ["x"]
    assert_holds(batch["x"], [FINE, FINE], "RGB")


def test_every_image_member_is_packed():
    first, second = [pil(0, 2, 3), pil(1, 4, 5)], [torch.ones(3, 2, 2, dtype=torch.uint8), noise(3, 5, 5, 3)]
    batch = collate_ragged([{"a": a, "b": b, "views": [a, b]} for a, b in zip(first, second, strict=True)])
    assert_holds(batch["a"], first, "RGB")
    assert_holds(batch["b"], second, "RGB")
    assert (batch["a"].shapes.layout, batch["b"].shapes.layout) == ("hwc", "chw")
    views, labels = collate_ragged([((a, b), 7) for a, b in zip(first, second, strict=True)])
    assert_holds(views[0], first, "RGB")
    assert_holds(views[1], second, "RGB")
    assert labels.tolist() == [7, 7]


def test_other_members_go_through_default_collate():
    rest = [
        {
            "label": i,
            "weight": i / 7,
            "name": f"number {i}",
            "vector": torch.arange(4) * i,
            "array": np.full(2, i),
            "pair": (i, "a"),
        }
        for i in range(3)
    ]
    batch = collate_ragged([{"image": pil(i, 2, 3), **sample, "meta": {"id": i, "of": "x"}} for i, sample in enumerate(rest)])
    want = default_collate(rest)
    del batch["image"]
    assert batch.pop("meta") == [{"id": i, "of": "x"} for i in range(3)], "a dict is of its image, whatever is in it"
    assert list(batch) == list(want)
    for name in want:
        assert repr(batch[name]) == repr(want[name])


TARGETS = {
    "dicts of tensors": [
        {"boxes": torch.ones(2, 4), "labels": torch.ones(2)},
        {"boxes": torch.ones(1, 4), "labels": torch.ones(1)},
    ],
    "of one size": [{"boxes": torch.ones(1, 4)}, {"boxes": torch.ones(1, 4)}],
    "arrays": [{"boxes": np.ones((2, 4)), "id": 0}, {"boxes": np.ones((1, 4)), "id": 1}],
    "masks": [{"masks": torch.ones(2, 5, 5, dtype=torch.uint8)}, {"masks": torch.ones(1, 4, 4, dtype=torch.uint8)}],
    "annotations": [[{"bbox": [1.0, 2.0]}, {"bbox": [3.0]}], []],
    "none at all": [[], []],
    "none in one": [[1, 2], []],
    "lists of tensors": [[torch.ones(2), torch.ones(3)], [torch.ones(1)]],
    "mappings within": [{"id": 1, "annotations": [{"bbox": [1.0]}]}, {"id": 2, "annotations": []}],
    "a dataclass": [Record(1, torch.ones(2)), Record(2, torch.ones(3))],
}


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS.keys())
def test_targets_stay_lists(targets):
    _, got, labels = collate_ragged([(pil(i, 2 + i, 3), target, i) for i, target in enumerate(targets)])
    assert type(got) is list
    assert len(got) == len(targets)
    assert all(a is b for a, b in zip(got, targets, strict=True))
    assert labels.tolist() == [0, 1]


@pytest.mark.parametrize("sizes", [[(4, 5), (4, 5)], [(2, 3), (4, 5)]], ids=["of one size", "of two"])
def test_tensors_of_torchvisions_that_follow_images_stay_a_list_of_their_type(sizes):
    frames = [{"format": "XYXY", "canvas_size": size} for size in sizes]
    samples = [
        (
            pil(0, *size),
            tv_tensors.Mask(torch.full((3, *size), 1, dtype=torch.uint8)),
            tv_tensors.BoundingBoxes(torch.ones(1, 4), **frame),
        )
        for size, frame in zip(sizes, frames, strict=True)
    ]
    images, *others = collate_ragged(samples)
    assert type(images) is Ragged
    for member, listed in enumerate(others, 1):
        assert type(listed) is list
        assert all(one is sample[member] for one, sample in zip(listed, samples, strict=True))


FINE = pil(0, 2, 3)


def test_samples_are_not_changed():
    image, array, tensor = pil(0, 2, 3, "P"), noise(1, 4, 5, 4), torch.from_numpy(noise(2, 1, 3, 3))
    before = image.copy(), array.copy(), tensor.clone()
    batch = collate_ragged([image, array, tensor], convert=True)
    batch.data.zero_()
    assert image == before[0]
    assert (array == before[1]).all()
    assert torch.equal(tensor, before[2])


@pytest.mark.parametrize("feed", ["plain", "ring"])
@pytest.mark.parametrize("form", ["alone", "first of a tuple", "in a dict"])
def test_stage_receives_ragged(form, feed):
    wrap = {"alone": lambda x: x, "first of a tuple": lambda x: (x, 5), "in a dict": lambda x: {"x": x}}[form]
    on = {"on": "x"} if form == "in a dict" else {}
    seen = []

    def transform(images):
        seen.append(images)
        return torch.stack([image.float().mean() for image in images])

    images = [pil(i, 2 + i, 3) for i in range(4)]
    dataset = [wrap(image) for image in images]
    loader = DataLoader(dataset, batch_size=2, collate_fn=collate_ragged)
    batches = list(StreamedLoader(loader, [TransformStage(transform, **on)], device="cpu", feed=feed))
    assert [type(batch) for batch in seen] == [Ragged, Ragged]
    results = [batch if form == "alone" else batch["x"] if form == "in a dict" else batch[0] for batch in batches]
    want = torch.stack([alone(image, "RGB").float().mean() for image in images])
    assert torch.equal(torch.cat(results), want)


def test_ragged_sizes_on_host_log_nothing(caplog):
    with caplog.at_level("INFO", logger="gpuaug"):
        ((images, names),) = StreamedLoader([(collate_ragged([FINE]), ["a"])], device="cpu")
    assert type(images) is Ragged
    assert names == ["a"]
    said = [record.getMessage() for record in caplog.records if "stay on the host" in record.getMessage()]
    assert said == ["These leaves of a batch stay on the host, unchanged: [1][0] (str)"]


@pytest.mark.parametrize("collate", [collate_ragged, collate_encoded])
def test_mappings_and_dataclasses_stay_lists_whatever_they_hold(collate):
    image = png(pil(0, 3, 4)).numpy().tobytes() if collate is collate_encoded else pil(0, 3, 4)
    values = [1, 0.5, True, None, "text", b"bytes", np.int64(3), torch.ones(2), [1, 2], [], {"a": 1}, datetime.date(2000, 1, 1)]
    forms = [
        dict,
        OrderedDict,
        UserDict,
        *(
            lambda members, options=options: make_dataclass("Info", members, **options)(**members)
            for options in ({}, {"frozen": True}, {"slots": True})
        ),
    ]
    for form in forms:
        for contents in ({}, *({"a": value, "b": other} for value in values for other in values[:5])):
            target = form(contents)
            for member in (target, [target, target]):
                assert collate([(image, member)])[1][0] is member
                assert collate([{"image": image, "target": member}])["target"][0] is member


def test_target_form_does_not_depend_on_values():
    """As torchvision has it for images without annotations: nothing but their number."""
    empty, full = {"image_id": 3}, {"image_id": 4, "boxes": torch.ones(1, 4)}
    for targets in ([empty, full], [empty, empty], [empty]):
        assert collate_ragged([(pil(i, 3, 4), target) for i, target in enumerate(targets)])[1] == targets


# Refusals


CLIP = np.zeros((2, 4, 4, 3), np.uint8)
LARGE = np.broadcast_to(np.zeros(1, np.uint8), (16384, 16384, 3))
"""Three quarters of 2**30 pixels' values, in one byte."""
REFUSED = {
    "floating member": (
        [(torch.rand(3, 4, 4), 1)],
        r"Images must be uint8, got torch.float32 in sample 0 at \[0\]. Remove",
    ),
    "floating later": (
        [{"x": FINE}, {"x": np.zeros((2, 2, 3), np.float32)}],
        r"Images must be uint8, got float32 in sample 1 at \[.x.\]. Remove",
    ),
    "nothing later": (
        [Pair(FINE, 1), Pair(None, 1)],
        r"got NoneType in sample 1 at .image. Decode the image",
    ),
    "an empty sample": ([()], r"got tuple in sample 0. Decode the image"),
    "five dimensions": (
        [(np.zeros((1, 1, 4, 4, 3), np.uint8),)],
        r"Images must be .*, and clips .*, got an array of shape \(1, 1, 4, 4, 3\) in sample 0 at \[0\]",
    ),
    "a clip behind an image": (
        [(FINE,), (CLIP,)],
        r"an image in all samples or a clip in all samples, got an array of shape \(2, 4, 4, 3\) in sample 1 at \[0\]. Return",
    ),
    "a number behind a clip": ([CLIP, 3], r"got int in sample 1. Decode the image"),
    "a floating clip": ([torch.rand(2, 3, 4, 4)], r"must be uint8, got torch.float32 in sample 0. Remove"),
    "a clip without channels": ([CLIP, CLIP[..., :0]], r"1 to 4 channels, .* of shape \(4, 4, 0\) in sample 1"),
    "channels first in an array": (
        [FINE, np.zeros((3, 48, 64), np.uint8)],
        r"1 to 4 channels, .* \(3, 48, 64\) in sample 1",
    ),
    "no channels": ([np.zeros((4, 4, 0), np.uint8)], r"1 to 4 channels, .* \(4, 4, 0\) in sample 0"),
    "no pixels": (
        [FINE, np.zeros((0, 4, 3), np.uint8)],
        r"Images must have pixels, got an array of shape \(0, 4, 3\) in sample 1. Leave the image out of the dataset.",
    ),
    "too long": (
        [FINE, np.zeros((1, 2**24, 3), np.uint8)],
        r"sides of fewer than 2\*\*24 pixels, got 1x16777216 in sample 1. Split the image in the dataset",
    ),
    "too large together": (
        [(LARGE, 0), (LARGE, 1), (LARGE, 2), (LARGE, 3)],
        r"The images of a batch must have fewer than 2\*\*31 values, got 2415919104 up to sample 2 at \[0\]\. "
        r"Lower batch_size, or downsample large images in the dataset\.",
    ),
    "another length": (
        [(FINE, 1), (FINE, 1), (FINE, 1, 2)],
        r"the first, 0, 1, got 0, 1, 2 in sample 2. Return",
    ),
    "another form": ([(FINE, 1), 5], r"the first, 0, 1, got int in sample 1. Return"),
    "other views": ([([FINE, FINE], 1), ([FINE], 1)], r"the first, 0, 1, got 0 in sample 1 at \[0\]. Return"),
}


@pytest.mark.parametrize(("samples", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_invalid_samples_are_refused_with_sample_index(samples, text):
    for convert in (False, True):
        with pytest.raises(gpuaug.GpuAugError, match=text):
            collate_ragged(samples, convert=convert)


class AskedForMemory(Exception):
    pass


def ask(shape, dtype):
    raise AskedForMemory(*shape)


def test_batch_of_2_31_values_is_refused():
    one = LARGE[:1, :1, :1]
    fits = [np.broadcast_to(one, (2**24 - 1, 128, 1)), np.broadcast_to(one, (127, 1, 1))]
    with allocating_with(ask):
        with pytest.raises(AskedForMemory, match="2147483647"):  # which two gigabytes are too much of, for a test
            collate_ragged(fits, channels=1)
        with pytest.raises(ArgumentError, match=r"fewer than 2\*\*31 values, got 2147483648 up to sample 2"):
            collate_ragged([*fits, one], channels=1)


def test_truncated_image_error_names_sample():
    whole = png(pil(0, 40, 40)).numpy().tobytes()
    broken = PIL.Image.open(io.BytesIO(whole[: len(whole) // 2]))
    with pytest.raises(OSError, match="truncated") as caught:
        collate_ragged([(FINE, 1), (broken, 2)])
    assert caught.value.__notes__ == ["gpuaug: raised by PIL for the image in sample 1 at [0]."]


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([None, 3], "values that are not numbers or tensors into a dict"),
        ([[1, 2], [3]], "values that differ in size from sample to sample into a dict"),
    ],
)
def test_default_collate_error_has_fitting_way_out(members, said):
    with pytest.raises((TypeError, RuntimeError)) as caught:
        collate_ragged([(pil(0, 3, 4), member) for member in members])
    assert said in caught.value.__notes__[0]
