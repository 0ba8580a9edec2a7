"""Boxes and keypoints under the geometry, against Kornia on the same draws."""

import kornia.augmentation as K
import pytest
import torch
from support.batches.pairwise import sweep
from support.comparison.replay import left_to_kornia, photographs
from support.gpu.launches import Launches
from support.targets import detection
from support.targets.detection import annotations

import gpuaug
from gpuaug.fusion.ops.boxes import KORNIA_FORMATS, BoxMapping, map_boxes

KEYS = list(KORNIA_FORMATS)

PIPELINES = {
    **detection.PIPELINES,
    "a module of Kornia's that moves pixels between": lambda p: [
        K.RandomRotation(30.0, p=p),
        K.RandomAffine(20.0, (0.1, 0.1), resample="bicubic", p=p),
        K.RandomRotation(30.0, p=p),
    ],
}


def followed(modules, images, key, values, seed=0):
    """(what Kornia makes of boxes or points, what fuse makes of them) on the same draws."""
    pipeline = K.AugmentationSequential(*modules, data_keys=["input", key])
    augment = gpuaug.fuse(pipeline)
    shape = images.shape if images.ndim == 4 else (1, *images.shape)
    draws = augment.draw(shape, seed=seed)
    _, expected = pipeline(images.float() / 255, values, params=draws.as_kornia())
    _, got = augment(images, values, draws=draws)
    return expected, got


def assert_alike(expected, got, tolerance=1e-3):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=1e-6)


@pytest.mark.parametrize(("name", "key", "p"), sweep(PIPELINES, KEYS, [0.5, 0.0, 1.0]))
@left_to_kornia
def test_boxes_and_keypoints_equal_kornia(name, key, p):
    for seed in range(3 if p == 0.5 else 1):
        assert_alike(*followed(PIPELINES[name](p), photographs(5), key, annotations(key, seed=seed), seed))


@pytest.mark.parametrize(
    ("name", "key", "dtype"),
    sweep(
        ["resized crop", "rotation", "colour alone"],
        KEYS,
        [torch.int64, torch.int32, torch.float64, torch.float16, torch.bfloat16],
    ),
    ids=str,
)
def test_box_dtypes_are_those_of_kornia(name, key, dtype):
    values = annotations(key).clamp(min=1).to(dtype)
    # Half precision is rounded once here, and with every module there.
    tolerance = {torch.float16: 0.07, torch.bfloat16: 0.6}.get(dtype, 1e-3)
    assert_alike(*followed(PIPELINES[name](0.5), photographs(5), key, values), tolerance)


@pytest.mark.parametrize(
    ("key", "shape", "dtype"), sweep(KEYS, [(5, 0), (0, 3), (0, 0), (1, 1)], [torch.float32, torch.int64]), ids=str
)
def test_boxes_of_empty_batches_and_of_images_without_boxes(key, shape, dtype):
    batch, count = shape
    values = annotations(key, batch, count).clamp(min=1).to(dtype)
    for name in ("rotation", "resized crop"):
        assert_alike(*followed(PIPELINES[name](0.5), photographs(batch), key, values))


@pytest.mark.parametrize("single", [False, True], ids=["a batch of one", "one image"])
@pytest.mark.parametrize("key", KEYS)
def test_boxes_of_one_image_without_a_batch_axis(key, single):
    images, values = photographs(1), annotations(key, 1)
    if single:
        images = images[0]
    expected, got = followed(PIPELINES["two warps"](1.0), images, key, values[0])
    assert got.ndim == values.ndim - 1
    assert_alike(expected, got)
    assert_alike(*followed(PIPELINES["two warps"](1.0), images, key, values))


@pytest.mark.parametrize("key", ["bbox_xywh", "bbox_xyxy"])
def test_empty_boxes_are_moved_without_a_synchronisation(key):
    values = torch.tensor([8.0, 6.0, 0.0, 0.0] if key == "bbox_xywh" else [8.0, 6.0, 7.0, 5.0]).expand(2, 1, 4)
    with pytest.raises(ValueError, match="negative widths or 0"):
        followed(PIPELINES["flips"](1.0), photographs(2), key, values)
    _, got = gpuaug.fuse(K.RandomHorizontalFlip(p=1.0))(photographs(2), values, data_keys=["input", key])
    assert got.isfinite().all()


def test_several_data_keys_share_one_draw_and_keep_their_order():
    images = photographs(5)
    values = [annotations(key) for key in KEYS]
    keys = ["bbox", "input", "bbox_xyxy", "bbox_xywh", "class", "keypoints"]
    inputs = [values[0], images, values[1], values[2], torch.arange(5), values[3]]
    pipeline = K.AugmentationSequential(*PIPELINES["perspective"](0.5), data_keys=None)
    augment = gpuaug.fuse(pipeline)
    draws = augment.draw(images.shape, seed=1)
    got = augment(*inputs, data_keys=keys, draws=draws)
    inputs[1] = images.float() / 255
    expected = pipeline(*inputs, data_keys=keys, params=draws.as_kornia())
    assert got[4] is inputs[4]
    for index in (0, 2, 3, 5):
        assert_alike(expected[index], got[index])


@pytest.mark.parametrize(
    ("key", "shape", "text"),
    [
        ("bbox", (2, 3, 4), r"bbox must be \(B, N, 4, 2\), got \(2, 3, 4\). Pad the samples to one N."),
        ("bbox_xyxy", (2, 3, 5), r"bbox_xyxy must be \(B, N, 4\), got \(2, 3, 5\). Pad"),
        ("bbox_xywh", (3, 4), r"bbox_xywh must be \(B, N, 4\), got \(3, 4\). Pad"),
        ("keypoints", (2, 2), r"keypoints must be \(B, N, 2\), got \(2, 2\). Pad"),
        ("keypoints", (3, 5, 2), r"keypoints must hold one entry for each of the 2 images, got \(3, 5, 2\). Pass one entry"),
    ],
)
def test_bad_box_shapes_are_refused(key, shape, text):
    with pytest.raises(gpuaug.ArgumentError, match=text):
        gpuaug.fuse(K.RandomInvert())(photographs(2), torch.zeros(shape), data_keys=["input", key])


@pytest.mark.parametrize(("key", "most"), [("bbox", 5), ("bbox_xyxy", 6), ("bbox_xywh", 10), ("keypoints", 3)])
def test_map_boxes_takes_few_launches_and_no_synchronisation(key, most):
    values, way = (
        annotations(key),
        BoxMapping(KORNIA_FORMATS[key], KORNIA_FORMATS[key], torch.eye(3).repeat(5, 1, 1), (1, 1), (32, 48)),
    )
    with Launches() as launches:
        map_boxes(values, None, way, values.dtype)
    assert len(launches.names) <= most, launches.names
