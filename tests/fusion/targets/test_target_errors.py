"""Target dicts that are refused, each by the number of its sample, and what cannot go along with them."""

import itertools

import kornia.augmentation as K
import pytest
import torch
from kornia.geometry.boxes import Boxes
from kornia.geometry.keypoints import Keypoints
from support.comparison.replay import left_to_kornia, photographs
from support.targets.detection import records_of

import gpuaug

tv_tensors = pytest.importorskip("torchvision.tv_tensors")

KEYS = ["input", "targets"]


def replaced(**keys):
    records = records_of(3)
    records[2] |= keys
    return records


class Moves(torch.nn.Module):
    """Somebody's module, which may do anything."""

    def forward(self, images):
        return images.flip(3)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (torch.zeros(3, 4), gpuaug.ArgumentTypeError, "targets must be a list of one dict for each image, got Tensor. If b"),
        (
            {"boxes": 1},
            gpuaug.ArgumentTypeError,
            "targets must be a list of one dict for each image, got dict. If boxes are",
        ),
        (records_of(2), gpuaug.ArgumentError, "targets must hold one dict for each of the 3 images, got 2. Pass one dict"),
        ([*records_of(2), 7], gpuaug.ArgumentTypeError, "targets of sample 2 must be a dict, got int. Put all annotations"),
        (
            replaced(boxes=[1]),
            gpuaug.ArgumentTypeError,
            "boxes of sample 2 must be a tensor, got list. Convert it: torch.as",
        ),
        (
            replaced(boxes=torch.zeros(4)),
            gpuaug.ArgumentError,
            r"boxes of sample 2 must be \(n, 4\), got \(4,\). For an image",
        ),
        (replaced(boxes=torch.zeros(1, 5)), gpuaug.ArgumentError, r"boxes of sample 2 must be \(n, 4\), got \(1, 5\). For"),
        (
            replaced(bbox=torch.zeros(1, 4)),
            gpuaug.ArgumentError,
            "targets of sample 2 must hold boxes or bbox, got both. Leave",
        ),
        (
            replaced(boxes=torch.zeros(1, 4, device="meta")),
            gpuaug.DeviceError,
            "boxes of sample 2 must be on cpu, where the images are, got meta. Move it to that device.",
        ),
        (
            replaced(boxes=torch.zeros(2, 4), valid=torch.ones(3, dtype=torch.bool)),
            gpuaug.ArgumentError,
            r"valid of sample 2 must be one bool for each of its 2 boxes, got torch.bool \(3,\). Leave valid out.",
        ),
        (
            replaced(boxes=torch.zeros(2, 4), valid=[True, True]),
            gpuaug.ArgumentError,
            "valid of sample 2 must be one bool for each of its 2 boxes, got list. Leave",
        ),
        (
            replaced(boxes=torch.zeros(2, 4), valid=torch.ones(2, dtype=torch.bool, device="meta")),
            gpuaug.DeviceError,
            "valid of sample 2 must be on cpu, got meta. Move it to that device.",
        ),
        (
            replaced(keypoints=torch.zeros(2, 3, 2)),
            gpuaug.ArgumentError,
            r"keypoints of sample 2 must be \(n, K, 3\), as in the samples before, got \(2, 3, 2\). For an image "
            r"without keypoints, pass torch.zeros\(0, K, 3\).",
        ),
        (
            [{"keypoints": torch.zeros(3)}, {}, {}],
            gpuaug.ArgumentError,
            r"keypoints of sample 0 must be \(n, K, 2\) or \(n, K, 3\), got \(3,\). For",
        ),
        (
            replaced(masks=torch.zeros(2, 32, 40)),
            gpuaug.ArgumentError,
            r"masks of sample 2 must have the size of their image, 32x48, got \(2, 32, 40\). Resize the masks to that size.",
        ),
        (
            replaced(masks=torch.zeros(48)),
            gpuaug.ArgumentError,
            r"masks of sample 2 must be \(n, H, W\) or \(H, W\), got \(48,\)",
        ),
        (
            replaced(masks="a"),
            gpuaug.ArgumentTypeError,
            "masks of sample 2 must be a tensor, got str. Stack the masks of one image",
        ),
        (
            replaced(masks=torch.zeros(2, 32, 48)),
            gpuaug.ArgumentTypeError,
            "masks of sample 2 must be torch.uint8, as in sample 0, got torch.float32. Convert all masks of a batch",
        ),
        (
            replaced(masks=torch.zeros(2, 32, 48, device="meta", dtype=torch.uint8)),
            gpuaug.DeviceError,
            "masks of sample 2 must be on cpu, where the images are, got meta. Move the masks to that device.",
        ),
        (
            replaced(boxes=tv_tensors.BoundingBoxes(torch.zeros(1, 5), format="CXCYWHR", canvas_size=(32, 48))),
            gpuaug.ArgumentError,
            r"boxes of sample 2 must be axis-aligned, got CXCYWHR. Pass the boxes around",
        ),
        (
            replaced(boxes=tv_tensors.BoundingBoxes(torch.zeros(1, 4), format="XYWH", canvas_size=(32, 48))),
            gpuaug.ArgumentError,
            "boxes of sample 2 must have the box format of sample 0, got xywh. Convert all boxes to one format",
        ),
    ],
)
def test_bad_targets_are_refused_by_sample_index(value, error, text):
    with pytest.raises(error, match=text):
        gpuaug.fuse(K.RandomHorizontalFlip())(photographs(3), value, data_keys=KEYS)


@pytest.mark.parametrize("pair", list(itertools.product([torch.zeros(1, 4), [[1, 2, 3, 4]], "a"], repeat=2)))
def test_boxes_under_two_keys_are_refused_whatever_their_type(pair):
    boxes, bbox = pair
    records = [*records_of(2), {"boxes": boxes, "bbox": bbox}]
    with pytest.raises(gpuaug.ArgumentError, match="targets of sample 2 must hold boxes or bbox, got both"):
        gpuaug.fuse(K.RandomHorizontalFlip())(photographs(3), records, data_keys=KEYS)


@pytest.mark.parametrize("module", [K.RandomHorizontalFlip(p=1.0), K.RandomAffine(20.0, p=1.0)], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize(("key", "annotation"), [("bbox", Boxes), ("keypoints", Keypoints)])
def test_tensors_of_kornias_boxes_and_keypoints_follow_as_in_kornia(key, annotation, module):
    values = torch.rand(2, 3, 2) * 20 + 4
    value = Keypoints(values) if key == "keypoints" else Boxes.from_tensor(torch.cat((values, values + 5), -1), mode="xyxy")
    pipeline = K.AugmentationSequential(module, data_keys=["input", key])
    augment = gpuaug.fuse(pipeline)
    with pytest.raises(
        gpuaug.ArgumentTypeError, match=f"{key} must be a tensor, got {annotation.__name__}. Pass its attribute"
    ):
        augment(photographs(2), value)
    draws = augment.draw(photographs(2).shape, seed=1)
    expected = pipeline(photographs(2).float() / 255, annotation(value.data.clone()), params=draws.as_kornia())[1]
    got = augment(photographs(2), value.data, data_keys=["input", key], draws=draws)[1]
    expected = expected.data if key == "keypoints" else expected.to_tensor("vertices_plus")  # upright, as of tensors
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("value", [records_of(3), [torch.ones(32, 48)] * 3], ids=["targets", "mask"])
@pytest.mark.parametrize(
    ("module", "name"),
    [
        (K.RandomThinPlateSpline(p=1.0), "RandomThinPlateSpline_1"),
        (Moves(), "Moves_1"),
        (K.RandomCrop((64, 64)), "RandomCrop_1"),
    ],
)
@left_to_kornia
def test_modules_that_kornia_runs_and_may_move_pixels_are_refused(module, name, value):
    key = "targets" if isinstance(value[0], dict) else "mask"
    text = f"{name} must be fused, .* so that {key} can be transformed with the images, got a module that Kornia runs"
    with pytest.raises(gpuaug.ArgumentError, match=text):
        gpuaug.fuse([K.RandomHorizontalFlip(), module])(photographs(3), value, data_keys=["input", key])
