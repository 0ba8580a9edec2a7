"""Members of batches of any form: found by their type, and with samples that take another one's place."""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torchvision import tv_tensors

from gpuaug import collate_encoded, collate_ragged
from gpuaug.core.errors import DecodeError
from gpuaug.core.packed_targets import pack_targets
from gpuaug.decode.members import map_instances, with_samples_from

Pair = namedtuple("Pair", "images, labels")


class Images:
    """Stands for images that have been decoded."""


@dataclass(frozen=True)
class Record:
    images: object
    labels: object = None


def replaced(batch, sources=(0, 0, 2), *, are_fields=True):
    return with_samples_from(np.array(sources), batch, Images, are_fields=are_fields)


DECODED, LABELS = Images(), torch.tensor([5, 6, 7])


@pytest.mark.parametrize("form", [lambda *both: list(both), lambda *both: both, Pair, Record])
def test_labels_are_replaced_in_every_container(form):
    got = replaced(form(DECODED, LABELS))
    assert type(got) is type(form(None, None))
    images, labels = (got.images, got.labels) if isinstance(got, Record) else got
    assert images is DECODED
    assert labels.tolist() == [5, 5, 7]


def test_members_of_mappings_are_replaced_by_what_they_are():
    batch = {
        "images": DECODED,
        "array": np.arange(6).reshape(3, 2),
        "names": ["a", "b", "c"],
        "sizes": ((1, 2), (3, 4), (5, 6)),
        "targets": [{"boxes": torch.zeros(count, 4)} for count in range(3)],
        "of the batch": torch.arange(2),
        "scalar": torch.tensor(3),
        "text": "abc",
        "empty": [],
        "set": {1, 2, 3},
    }
    got = replaced(batch)
    assert got["array"].tolist() == [[0, 1], [0, 1], [4, 5]]
    assert got["names"] == ["a", "a", "c"]
    assert got["sizes"] == ((1, 2), (1, 2), (5, 6))
    assert [len(target["boxes"]) for target in got["targets"]] == [0, 0, 2]
    for name in ("of the batch", "scalar", "text", "empty", "set"):
        assert got[name] is batch[name]
    assert batch["names"] == ["a", "b", "c"], "the batch that was given is as it was"


def test_packed_target_dicts_are_replaced():
    records = [{"boxes": torch.full((count, 4), float(count)), "image_id": count} for count in range(9)]
    packed = pack_targets([DECODED, tuple(records)], lambda shape, dtype: None)
    got = replaced(packed, (0, 1, 1, 3, 4, 5, 6, 7, 8))[1]
    assert type(got) is tuple
    assert [(record["boxes"].tolist(), record["image_id"]) for record in got] == [
        ([[float(count)] * 4] * count, count) for count in (0, 1, 1, 3, 4, 5, 6, 7, 8)
    ]


def test_two_members_of_a_batch_of_two_are_not_its_samples():
    labels = torch.tensor([5, 6])
    for batch in ([DECODED, labels], (DECODED, labels), [DECODED, [labels, labels]]):
        got = replaced(batch, (1, 1))
        assert got[0] is DECODED
        inside = got[1] if isinstance(got[1], list) else [got[1]]
        assert [member.tolist() for member in inside] == [[6, 6]] * len(inside)


@pytest.mark.parametrize("count", range(2, 6))
def test_members_that_collate_encoded_returns_are_replaced_in_every_batch_size(count):
    """Also in batches with as many samples as a tuple of a sample has fields."""
    samples = [
        {
            "image": b"\xff\xd8\xff" + bytes([number]),
            "label": number,
            "name": f"name {number}",
            "pair": (number, f"text {number}"),
            "texts": (f"a{number}", f"b{number}", f"c{number}"),
            "numbers": [number, number + 0.5],
            "target": {"boxes": torch.full((count, 4), float(number)), "names": [str(number)] * count},
            "boxes and name": (torch.full((count,), number), f"name {number}"),
            "tensors": (torch.full((count, 4), number), torch.full((count,), number)),
            "named": Pair(torch.full((count, 4), number), torch.full((count,), number)),
            "typed": tv_tensors.BoundingBoxes(torch.full((count, 4), number), format="XYXY", canvas_size=(9, 9)),
        }
        for number in range(count)
    ]
    sources = [0, *range(count - 1)]
    batch = {**collate_encoded(samples), "image": DECODED}
    expected = collate_encoded([samples[source] for source in sources])
    got = replaced(batch, sources)
    assert repr({**got, "image": None}) == repr({**expected, "image": None})


def test_an_error_is_raised_where_samples_and_fields_cannot_be_distinguished():
    two = torch.tensor([5, 6])
    packed = torch.nn.utils.rnn.pack_sequence([two, two])
    nested = torch.nested.nested_tensor([two, two], layout=torch.jagged)
    for member in ([two, two], [["a", "b"], ["c", "d"]], [[two, two], [two, two]], packed, nested, range(2)):
        with pytest.raises(DecodeError, match="Sample 0 cannot be replaced, because the entry for the sample in a"):
            replaced({"images": DECODED, "member": member}, (1, 1), are_fields=False)
    # Lists of dicts, dicts of fields and tensors, which the message proposes; fields of several types are no samples.
    batch = {"targets": [{"labels": two}, {"labels": two + 2}], "fields": {"a": two}, "several": [two, ("a", "b")]}
    got = replaced({"images": DECODED, **batch}, (1, 1), are_fields=False)
    assert [target["labels"].tolist() for target in got["targets"]] == [[7, 8], [7, 8]]
    assert got["fields"]["a"].tolist() == [6, 6]
    assert (got["several"][0].tolist(), got["several"][1]) == ([6, 6], ("b", "b"))


@pytest.mark.parametrize("frames", [0, 3])
@pytest.mark.parametrize("layout", ["hwc", "chw"])
def test_images_that_are_not_encoded_are_replaced(frames, layout):
    shapes = [(count + 1, count + 4) for count in range(3)]
    size = (frames, 3) if frames else (3,)
    images = [torch.randint(0, 256, (*size, *shape), dtype=torch.uint8) for shape in shapes]
    if layout == "hwc":
        images = [np.ascontiguousarray(image.movedim(-3, -1).numpy()) for image in images]
    sources = (1, 1, 0)
    got = replaced([DECODED, collate_ragged(images)], sources)[1]
    expected = collate_ragged([images[source] for source in sources])
    assert repr(got) == repr(expected)
    assert got.data.equal(expected.data)
    assert got.places.equal(expected.places)
    assert (got.shapes.sizes == expected.shapes.sizes).all()


def test_views_of_as_many_as_there_are_samples_stay_in_place():
    views = [Images(), Images(), Images()]
    got = replaced({"views": views, "names": ["a", "b", "c"]})
    assert [one is other for one, other in zip(got["views"], views, strict=True)] == [True] * 3
    assert got["names"] == ["a", "a", "c"]


def test_instances_are_found_in_every_container():
    found = Images()
    for batch in (found, [found, 1], (1, found), {"a": {"b": found}}, Pair(found, 1), Record(found), [[(found,)]]):
        seen = []
        map_instances(lambda each, seen=seen: seen.append(each) or each, Images, batch)
        assert seen == [found]


def test_a_batch_in_which_nothing_changes_is_handed_on():
    batch = {"a": [Images(), 1], "b": (2, 3)}
    assert map_instances(lambda each: each, Images, batch) is batch


def test_an_instance_is_exchanged_and_all_else_kept():
    other, kept = object(), [1, 2]
    got = map_instances(lambda _: other, Images, {"a": Pair(Images(), kept), "b": kept})
    assert got == {"a": Pair(other, kept), "b": kept}
    assert got["b"] is kept


def test_mappings_of_any_type_are_looked_into():
    batch = UserDict(images=DECODED, inner={"labels": LABELS})
    got = replaced(batch)
    assert (type(got), got["images"], got["inner"]["labels"].tolist()) == (UserDict, DECODED, [5, 5, 7])
    found = map_instances(lambda each: "found", Images, batch)
    assert (type(found), found["images"]) == (UserDict, "found")
    assert batch["images"] is DECODED
