"""Target dicts taken by column: packed or not they give the same, in as many launches whatever their number."""

import kornia.augmentation as K
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.feed.ring_equality import assert_same
from support.gpu.launches import Launches
from support.targets.target_records import HEIGHT, RECORDS, WIDTH, records
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug.core import packed_targets
from gpuaug.core.packed_targets import pack_targets, settle_targets, unpack_targets
from gpuaug.core.targets import PackedTargets

PIPELINES = {
    "Kornia's": K.AugmentationSequential(K.RandomHorizontalFlip(), K.RandomCrop((6, 7))),
    "torchvision's": v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop((6, 7)), v2.SanitizeBoundingBoxes(min_size=2)]),
    "ending in pure tensors": v2.Compose([v2.RandomHorizontalFlip(), v2.ConvertBoundingBoxFormat("CXCYWH"), v2.ToPureTensor()]),
}


def tv_tensors_boxes(boxes):
    return tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(HEIGHT, WIDTH))


@pytest.fixture(scope="module")
def _any_number_is_packed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_targets, "MIN_PACKED_TENSORS", 1)
        yield


def packed(given_records):
    """The dicts as a stage gets them from the copy lane: packed, or as they are if they cannot be packed."""
    return pack_targets([given_records], lambda shape, dtype: None)[0]


def outcome(call):
    """What a call returns, or the text of its error."""
    try:
        return call()
    except gpuaug.GpuAugError as error:
        return str(error)


def through(augment, given_records, keys):
    is_packed = type(given_records) is PackedTargets
    count = len(given_records.layout.records if is_packed else given_records)
    images = torch.arange(count * 3 * HEIGHT * WIDTH).view(-1, 3, HEIGHT, WIDTH) % 256
    options = {"data_keys": ["input", keys]}
    _, made = augment(images.to(torch.uint8), given_records, draws=augment.draw(images.shape, seed=3), **options)
    return made


@pytest.mark.usefixtures("_any_number_is_packed")
@pytest.mark.parametrize("keys", ["targets", "tv_tensors"])
@pytest.mark.parametrize("name", PIPELINES)
@settings(max_examples=10)
@given(given_records=RECORDS | records(keys=["boxes", "labels", "masks"]), masks_apart=st.booleans())
def test_packed_dicts_give_what_the_dicts_give(name, keys, given_records, masks_apart):
    augment = gpuaug.fuse(PIPELINES[name])
    sent = pack_targets([given_records], lambda shape, dtype: None, any_mask_size=not masks_apart)[0]
    got, want = (outcome(lambda each=each: through(augment, each, keys)) for each in (sent, given_records))
    assert_same(unpack_targets(got), want)


@pytest.mark.usefixtures("_any_number_is_packed")
@pytest.mark.parametrize("per_box", [None, ["boxes", "labels", "masks", "keypoints", "area", "names", "others"]])
@settings(max_examples=20)
@given(given_records=RECORDS | records(keys=["boxes", "valid"]))
def test_sanitize_of_packed_dicts_equals_sanitize_of_dicts(per_box, given_records):
    got = outcome(lambda: settle_targets(gpuaug.sanitize(packed(given_records), per_box=per_box)))
    assert_same(unpack_targets(got), outcome(lambda: gpuaug.sanitize(given_records, per_box=per_box)))


@pytest.mark.usefixtures("_any_number_is_packed")
@pytest.mark.parametrize("keys", ["targets", "tv_tensors"])
@pytest.mark.parametrize("masks", [False, True])
def test_common_dicts_stay_packed(keys, masks):
    given_records = [
        {
            "boxes": tv_tensors_boxes(torch.ones(n, 4)),
            "labels": torch.arange(n),
            "image_id": n,
            "keypoints": torch.ones(n, 5, 3),
        }
        | ({"masks": tv_tensors.Mask(torch.ones(n, HEIGHT, WIDTH))} if masks else {})
        for n in (2, 0, 3)
    ]
    for record in given_records if keys == "tv_tensors" else ():
        del record["keypoints"]  # plain tensors, which do not follow by their type
    made = through(gpuaug.fuse(PIPELINES["torchvision's"]), packed(given_records), keys)
    assert type(made) is PackedTargets
    assert type(gpuaug.sanitize(made)) is PackedTargets


class Mine(torch.Tensor):
    """A type of the user's."""


def test_types_of_the_user_stay_where_types_of_torchvision_go():
    given_records = [{"boxes": torch.ones(n, 4).as_subclass(Mine)} for n in (2, 1)]
    made = through(gpuaug.fuse(PIPELINES["ending in pure tensors"]), given_records, "targets")
    assert [type(record["boxes"]) for record in made] == [Mine, Mine]


@pytest.mark.usefixtures("_any_number_is_packed")
@pytest.mark.parametrize("is_packed", [False, True])
def test_tensors_of_torchvision_inside_of_values_end_as_plain_tensors(is_packed):
    given_records = [{"boxes": torch.ones(n, 4), "crops": [tv_tensors.Image(torch.zeros(3, 2, 2))]} for n in (2, 1)]
    sent = packed(given_records) if is_packed else given_records
    made = through(gpuaug.fuse(PIPELINES["ending in pure tensors"]), sent, "targets")
    assert (type(made) is PackedTargets) == is_packed
    assert [type(record["crops"][0]) for record in unpack_targets(made)] == [torch.Tensor] * 2


def launches(batch, kind):
    records_made = []
    for sample in range(batch):
        n = 1 + sample % 3
        records_made.append(
            {
                "boxes": kind(torch.tensor([[1.0, 1.0, 5.0, 6.0]]).repeat(n, 1)),
                "labels": torch.arange(n),
                "masks": torch.ones(n, HEIGHT, WIDTH),
                "keypoints": torch.ones(n, 50, 3),
            }
        )
    augment = gpuaug.fuse(PIPELINES["torchvision's"])
    images = torch.zeros(batch, 3, HEIGHT, WIDTH, dtype=torch.uint8)
    draws = augment.draw(images.shape, seed=0)
    with Launches() as counted:
        _, made = augment(images, records_made, data_keys=["input", "targets"], draws=draws)
        planes = torch.ones(sum(len(record["labels"]) for record in made), 40, 50)
        for record, part in zip(made, planes.split([len(record["labels"]) for record in made]), strict=True):
            record["masks"] = part
        gpuaug.sanitize(made)
    return counted.names


@pytest.mark.parametrize("kind", [torch.Tensor.clone, tv_tensors_boxes], ids=["plain", "typed"])
def test_number_of_launches_is_the_same_for_any_number_of_dicts(kind):
    few, many = launches(3, kind), launches(30, kind)
    assert few == many
    assert few.count("index_select") <= 8
