"""Target dicts that are refused, each by the number of its sample, and what cannot go along with them."""

import itertools
import random
import re
from types import SimpleNamespace

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from kornia.geometry.boxes import Boxes
from kornia.geometry.keypoints import Keypoints
from support.comparison.replay import photographs
from support.targets.detection import records_of

import gpuaug
from gpuaug.fusion.forms.data_keys import check_input, check_same_size
from gpuaug.fusion.ops.base import Size

tv_tensors = pytest.importorskip("torchvision.tv_tensors")

KEYS = ["input", "targets"]


def replaced(**keys):
    records = records_of(3)
    records[2] |= keys
    return records


BOXES_OF_TWO = {"boxes": torch.zeros(2, 4)}
BAD = [
    (torch.zeros(3, 4), "targets must be a list of one dict for each image, got Tensor. If b"),
    ({"boxes": 1}, "targets must be a list of one dict for each image, got dict. If boxes are"),
    (records_of(2), "targets must hold one dict for each of the 3 images, got 2. Pass one dict"),
    ([*records_of(2), 7], "targets of sample 2 must be a dict, got int. Put all annotations"),
    (replaced(boxes=torch.zeros(1, 5)), "boxes of sample 2 must be (n, 4), got (1, 5). For"),
    (
        replaced(boxes=torch.zeros(1, 4, device="meta")),
        "boxes of sample 2 must be on cpu, where the images are, got meta. Move it to that device.",
    ),
    (
        replaced(**BOXES_OF_TWO, valid=torch.ones(3, dtype=torch.bool)),
        "valid of sample 2 must be one bool for each of its 2 boxes, got torch.bool (3,). Leave valid out",
    ),
    (
        replaced(**BOXES_OF_TWO, valid=[True, True]),
        "valid of sample 2 must be one bool for each of its 2 boxes, got list. Leave",
    ),
    (
        replaced(**BOXES_OF_TWO, valid=torch.ones(2, dtype=torch.bool, device="meta")),
        "valid of sample 2 must be on cpu, where the images are, got meta. Move it to that device.",
    ),
    (
        replaced(keypoints=torch.zeros(2, 3, 2)),
        "keypoints of sample 2 must be (n, K, 3), as in the samples before, got (2, 3, 2).",
    ),
    ([{"keypoints": torch.zeros(3)}, {}, {}], "keypoints of sample 0 must be (n, K, 2) or (n, K, 3), got (3,). For"),
    (
        replaced(masks=torch.zeros(2, 32, 40)),
        "masks of sample 2 must have the size of their image, 32x48, got (2, 32, 40). Resize",
    ),
    (replaced(masks="a"), "masks of sample 2 must be a tensor, got str. Return a tensor"),
    (
        replaced(masks=torch.zeros(2, 32, 48)),
        "masks of sample 2 must be torch.uint8, as masks of sample 0, got torch.float32. Convert all masks of a batch",
    ),
    (
        replaced(masks=torch.zeros(2, 32, 48, device="meta", dtype=torch.uint8)),
        "masks of sample 2 must be on cpu, where the images are, got meta. Move it to that device.",
    ),
    (
        replaced(boxes=tv_tensors.BoundingBoxes(torch.zeros(1, 4), format="XYWH", canvas_size=(32, 48))),
        "boxes of sample 2 must have the format of boxes of sample 0, got xywh. Convert all boxes to one format",
    ),
]


@pytest.mark.parametrize(("value", "text"), BAD, ids=[text for _, text in BAD])
def test_bad_targets_are_refused_by_sample_index(value, text):
    with pytest.raises(gpuaug.GpuAugError, match=re.escape(text)):
        gpuaug.fuse(K.RandomHorizontalFlip())(photographs(3), value, data_keys=KEYS)


@pytest.mark.parametrize("pair", list(itertools.product([torch.zeros(1, 4), [[1, 2, 3, 4]], "a"], repeat=2)))
def test_boxes_under_two_keys_are_refused_whatever_their_type(pair):
    boxes, bbox = pair
    records = [*records_of(2), {"boxes": boxes, "bbox": bbox}]
    with pytest.raises(gpuaug.ArgumentError, match="targets of sample 2 must hold boxes or bbox, got both"):
        gpuaug.fuse(K.RandomHorizontalFlip())(photographs(3), records, data_keys=KEYS)


@pytest.mark.parametrize("key", ["input", "mask", "bbox", "bbox_xyxy", "bbox_xywh", "keypoints", "valid"])
def test_inputs_that_are_no_tensors_get_advice_that_fits_their_type(key):
    """An attribute ``data`` alone says nothing: of packed values it is a flat tensor."""
    pixels = torch.zeros(3, 1, 4, 5, dtype=torch.uint8)
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(3, 4), torch.zeros(2, 4)])
    ragged = [gpuaug.collate_ragged(list(pixels), channels=1), gpuaug.collate_ragged([pixels, pixels, pixels], channels=1)]
    kornia = [Boxes.from_tensor(torch.rand(3, 2, 4), mode="xywh"), Keypoints(torch.rand(3, 2, 2))]
    others = [None, 3, "a", np.zeros((3, 4)), [[1.0, 2.0]], [[1.0], [2.0, 3.0]], (None,), packed, SimpleNamespace(data=pixels)]
    for value in [*ragged, *kornia, *others]:
        if (key == "input" and isinstance(value, gpuaug.Ragged)) or (
            key in ("input", "mask") and isinstance(value, list | tuple)
        ):
            continue
        with pytest.raises(gpuaug.ArgumentTypeError) as raised:
            check_input(key, value)
        text = str(raised.value)
        assert text.startswith(f"{key} must be a tensor, got {type(value).__name__}. ")
        if key == "input":
            continue
        assert ("attribute data" in text) == any(value is each for each in kornia)
        assert ("list(masks)" in text) == (key == "mask" and value is ragged[0])
        assert ("Name images 'input'" in text) == (key != "mask" and any(value is each for each in ragged))
        if "as_tensor" in text:
            torch.as_tensor(value)


@pytest.mark.parametrize("key", ["mask", "bbox", "bbox_xyxy", "bbox_xywh", "keypoints", "valid", "class", None])
@pytest.mark.parametrize("are_listed", [True, False], ids=["one per image", "of the batch"])
def test_target_dicts_with_another_data_key_get_the_advice_to_name_them(key, are_listed):
    record = {"boxes": torch.zeros(2, 4), "masks": torch.zeros(2, 32, 48)}
    keys = None if key is None else ["input", key]
    with pytest.raises(gpuaug.GpuAugError, match="'targets'"):
        gpuaug.fuse(K.RandomHorizontalFlip())(photographs(2), [record] * 2 if are_listed else record, data_keys=keys)


WRONG_IN_A_DICT = {
    "boxes": torch.zeros(1, 5),
    "masks": torch.zeros(1, 3, 3),
    "keypoints": torch.zeros(1, 4, 4),
    "boxes of another canvas": tv_tensors.BoundingBoxes(torch.zeros(1, 4), format="XYXY", canvas_size=(3, 3)),
    "rotated boxes": tv_tensors.BoundingBoxes(torch.zeros(1, 5), format="XYWHR", canvas_size=(8, 9)),
    "an array": np.zeros((1, 4)),
    "an array of masks": np.zeros((1, 8, 9)),
}


@pytest.mark.parametrize("several", ["image", "frame"])
@pytest.mark.parametrize("name", WRONG_IN_A_DICT)
def test_errors_name_the_image_or_frame_of_the_sample(name, several):
    key = next((key for key in ("masks", "keypoints") if key in name), "boxes")
    clean = {"boxes": torch.zeros(1, 4), "masks": torch.zeros(1, 8, 9), "keypoints": torch.zeros(1, 2, 2)}
    records = [[dict(clean) for _ in range(4)] for _ in range(3)]
    records[1][2][key] = WRONG_IN_A_DICT[name]
    images = [torch.rand(3, 3, 8, 9) for _ in range(4)] if several == "image" else torch.rand(3, 4, 3, 8, 9)
    augment = gpuaug.fuse(gpuaug.Mosaic(16) if several == "image" else K.RandomHorizontalFlip())
    with pytest.raises(gpuaug.GpuAugError, match=f"{key} of {several} 2 of sample 1 must"):
        augment(images, records, data_keys=KEYS)


def test_labels_of_any_other_type_are_not_taken_for_targets():
    for labels in (["a", "b"], {"coarse": [1, 2], "fine": torch.ones(2)}, [{"name": "a"}, {}], torch.ones(1, 2, 3), None):
        assert gpuaug.fuse(K.RandomHorizontalFlip())(photographs(2), labels, data_keys=["input", "class"])[1] is labels


def test_the_error_about_sizes_names_two_sizes():
    rng = random.Random(0)

    def drawn_size():
        batch = rng.choice([2, 3])
        height, width = (rng.choice([4, 5, np.array(rng.choices([4, 5], k=batch))]) for _ in range(2))
        return Size(batch, rng.choice([1, 3]), height, width, rng.choice([0, 0, 2]))

    for _ in range(200):
        sizes = [drawn_size(), drawn_size()]
        if sizes[0] == sizes[1]:
            check_same_size(*sizes)
            continue
        with pytest.raises(gpuaug.ArgumentError) as raised:
            check_same_size(*sizes)
        expected, received = re.search(r"the first input, (.*), got (.*)\. Use", str(raised.value)).groups()
        assert expected.partition(" in sample")[0] != received
        if " in sample " in expected:
            sample = int(expected.partition(" in sample ")[2])
            first, other = (size.sample(sample) for size in sizes)
            assert expected.startswith(f"{first.height}x{first.width} ")
            assert received == f"{other.height}x{other.width}"
