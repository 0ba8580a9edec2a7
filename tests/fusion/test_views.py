"""Several draws over one batch: each view is what a call for one view makes of the same draws."""

import re
from collections import namedtuple

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support import internals
from support.batches.ragged import images_of, pack
from support.comparison.replay import left_to_kornia, photographs
from support.comparison.torchvision_replay import replayed
from support.comparison.values import assert_values
from torchvision.transforms import v2

import gpuaug

MODULES = {
    "crops": lambda: [K.RandomResizedCrop((12, 12)), K.RandomHorizontalFlip()],
    "a contrastive pipeline": lambda: [
        K.RandomResizedCrop((12, 12), scale=(0.3, 1.0)),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.4, 0.4, 0.2, 0.1, p=0.8),
        K.RandomGrayscale(p=0.2),
        K.RandomGaussianBlur((5, 5), (0.1, 2.0), p=0.5),
        K.Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.2)),
    ],
    "a policy": lambda: [K.RandomHorizontalFlip(), K.auto.RandAugment(n=2, m=8)],
}


def container(name):
    return K.AugmentationSequential(*MODULES[name]())


def test_first_view_equals_a_single_view():
    images = photographs(3, 3, 20, 24)
    one, two = (gpuaug.fuse(container("crops"), views=views).draw(images.shape, seed=3) for views in (1, 2))
    assert_values(*(gpuaug.fuse(container("crops"))(images, draws=draws.views[0]) for draws in (one, two)))


def test_views_of_different_seeds_differ():
    augment = gpuaug.fuse(K.RandomCrop((4, 4)), views=4)
    drawn = [internals.drawn(view)[0] for seed in range(8) for view in augment.draw((64, 3, 100, 100), seed=seed).views]
    assert len({(each["x"].tobytes(), each["y"].tobytes()) for each in drawn}) == 32


def test_views_share_each_launch():
    images = photographs(2, 3, 20, 24)
    one, eight = (gpuaug.fuse(container("a contrastive pipeline"), views=views).explain(images.shape) for views in (1, 8))
    assert one.launches == eight.launches <= 6
    assert eight.lines[0].written_bytes == 8 * one.lines[0].written_bytes


def test_explain_counts_views_that_run_one_by_one():
    one, three = (gpuaug.fuse(K.RandomMixUpV2(), views=views).explain((2, 3, 20, 24)) for views in (1, 3))
    assert three.launches == 3 * one.launches


def test_views_of_cutmix_labels_keep_kornia_axes():
    augment = gpuaug.fuse(K.RandomCutMixV2(), views=2)
    _, labels = augment(photographs(3, 3, 20, 24), torch.arange(3), data_keys=["input", "class"])
    assert labels.shape == (1, 6, 3)


@pytest.mark.parametrize("name", ["crops", "a policy"])
@left_to_kornia
def test_views_of_masks_keypoints_and_labels(name):
    images, labels = photographs(3, 3, 20, 24), torch.tensor([7, 8, 9])
    masks, points = photographs(3, 1, 20, 24, seed=2), torch.rand(3, 4, 2) * 10
    augment, single = (gpuaug.fuse(container(name), views=views) for views in (2, 1))
    keys = ["input", "mask", "keypoints", "class"]
    draws = augment.draw(images.shape, seed=1)
    got = augment(images, masks, points, labels, data_keys=keys, draws=draws)
    expected = [single(images, masks, points, labels, data_keys=keys, draws=view) for view in draws.views]
    assert got[3].tolist() == [7, 8, 9, 7, 8, 9]
    for index, value in enumerate(got):
        assert_values(value, torch.cat([one[index] for one in expected]))


@left_to_kornia
def test_views_of_a_single_image():
    image, mask, boxes = (
        torch.rand(3, 16, 16),
        torch.rand(1, 16, 16),
        torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 5.0, 6.0]]),
    )
    one_plan, apart = (
        [K.RandomHorizontalFlip(keepdim=True)],
        [K.RandomHorizontalFlip(keepdim=True), K.RandomMedianBlur(7, keepdim=True)],
    )
    for modules in (one_plan, apart):
        assert gpuaug.fuse(modules, views=2)(image).shape == (2, 3, 16, 16)
    made = gpuaug.fuse(one_plan, views=2)(image, mask, data_keys=["input", "mask"])
    assert [tuple(each.shape) for each in made] == [(2, 3, 16, 16), (2, 1, 16, 16)]
    _, moved = gpuaug.fuse(one_plan, views=2)(image[None], boxes, data_keys=["input", "bbox_xyxy"])
    assert moved.shape == (2, 2, 4)


def test_views_keep_label_shapes_and_mask_tuples():
    augment, images = gpuaug.fuse([K.RandomHorizontalFlip()], views=2), torch.rand(4, 3, 8, 8)
    labels, masks = torch.rand(4, 5, 7), tuple(torch.ones(2, 8, 8) for _ in range(4))
    _, labels, masks = augment(images, labels, masks, data_keys=["input", "class", "mask"])
    assert labels.shape == (8, 5, 7)
    assert (type(masks), len(masks)) == (tuple, 8)


LABELS = {
    "array": np.array([7, 8, 9]),
    "array of strings": np.array(["a", "b", "c"]),
    "rows": np.eye(3),
    "tensor": torch.tensor([7, 8, 9]),
    "list": [7, 8, 9],
    "tuple": ("a", "b", "c"),
}
NO_LABELS = {
    "none": None,
    "number": 3,
    "string": "abc",
    "dict": {"a": [1, 2, 3]},
    "named tuple": namedtuple("Labels", "one two three")(7, 8, 9),
    "scalar tensor": torch.tensor(3),
    "scalar array": np.array(3),
}


@pytest.mark.parametrize("name", [*LABELS, *NO_LABELS])
def test_views_of_labels_of_every_type(name):
    one, two = (gpuaug.fuse([K.RandomHorizontalFlip()], views=views) for views in (1, 2))
    labels, images, keys = (LABELS | NO_LABELS)[name], torch.rand(3, 3, 8, 8), ["input", "class"]
    assert one(images, labels, data_keys=keys)[1] is labels
    if name in NO_LABELS:
        with pytest.raises(
            gpuaug.ArgumentTypeError, match="class must be a tensor, array, list or tuple with one entry for each"
        ):
            two(images, labels, data_keys=keys)
        return
    got = two(images, labels, data_keys=keys)[1]
    assert type(got) is type(labels)
    assert list(map(str, got)) == list(map(str, labels)) * 2
    for count in (2, 4):  # labels of a view would belong to images of another
        with pytest.raises(gpuaug.ArgumentError, match=f"class must have one entry for each of the {count} images, got 3"):
            two(torch.rand(count, 3, 8, 8), labels, data_keys=keys)


@pytest.mark.parametrize("depth", [0, 2])
def test_views_of_global_and_local_crops(depth):
    """Two stages over one source, which stays for whoever comes after."""
    batches = [(photographs(2, 3, 40, 40, seed=seed), torch.tensor([seed])) for seed in range(4)]
    stages = [
        gpuaug.TransformStage(gpuaug.fuse(K.RandomResizedCrop((24, 24), scale=(0.4, 1.0)), views=2), into=2, name="global"),
        gpuaug.TransformStage(gpuaug.fuse(K.RandomResizedCrop((10, 10), scale=(0.05, 0.4)), views=8), into=3, name="local"),
    ]
    seen = list(gpuaug.StreamedLoader(batches, stages, device="cpu", seed=0, depth=depth))
    reference = list(gpuaug.StreamedLoader(batches, stages, device="cpu", seed=0, depth=0))
    for (images, _), batch, expected in zip(batches, seen, reference, strict=True):
        assert_values(batch[0], images)
        assert [tuple(part.shape) for part in batch[2:]] == [(4, 3, 24, 24), (16, 3, 10, 10)]
        for one, other in zip(batch[2:], expected[2:], strict=True):
            assert_values(one, other)


def raises(text):
    return pytest.raises(gpuaug.ArgumentError, match=re.escape(text))


def test_repr_of_draws_has_their_views():
    draws = gpuaug.fuse(K.CenterCrop(8), views=2).draw((1, 3, 16, 16))
    assert repr(draws) == "Draws(shape=(1, 3, 16, 16), modules=1, views=2)"


BY_CHANCE = {
    "crop": lambda: [K.RandomCrop((8, 8), p=0.5)],
    "resized crop": lambda: [K.RandomHorizontalFlip(), K.RandomResizedCrop((8, 8), p=0.5)],
    "left to Kornia": lambda: [K.RandomMedianBlur(7), K.RandomCrop((8, 8), cropping_mode="resample", p=0.5)],
}


@pytest.mark.parametrize("name", BY_CHANCE)
@left_to_kornia
def test_views_that_may_differ_in_size_are_refused(name):
    modules = BY_CHANCE[name]()
    crop = f"{type(modules[-1]).__name__}_{len(modules) - 1}"
    text = f"all views one size, got {crop} with p=0.5, which changes only some images from 12x14 to 8x8. Give it p=1.0, or"
    augment, images = gpuaug.fuse(modules, views=2), photographs(2, 3, 12, 14)
    for seed in range(4):
        torch.manual_seed(seed)
        with raises(f"pipeline must give {text} resize before it: K.Resize((8, 8))."):
            augment(images)
        with raises(f"pipeline must give {text}"):
            augment.draw(images.shape, seed=seed)
    assert augment(images[..., :8, :8]).shape == (4, 3, 8, 8)
    with raises("which changes only some images from 12x14 to 8x8. Give it p=1.0, or resize before it: K.Resize((8, 8))."):
        gpuaug.fuse([K.Resize((12, 14)), *modules], views=2)
    gpuaug.fuse([K.Resize((8, 8)), *modules], views=2)
    gpuaug.fuse([K.Resize((12, 14)), *modules])
    assert gpuaug.fuse([K.CenterCrop(8, p=0.0)], views=2)(images).shape == (4, 3, 12, 14)


CROPS = {
    "five": v2.FiveCrop((9, 12)),
    "ten": v2.TenCrop((12, 9)),
    "ten, flipped up and down": v2.TenCrop((9, 11), vertical_flip=True),
    "of the whole image": v2.TenCrop((20, 25)),
}


@pytest.mark.parametrize("name", CROPS)
def test_crops_of_corners_and_centre_are_views(name):
    images, flip, crops = photographs(3, 3, 20, 25), v2.RandomHorizontalFlip(1.0), CROPS[name]
    expected = torch.cat(crops(flip(images)))
    assert_values(gpuaug.fuse([flip, crops])(images), expected)
    augment = gpuaug.fuse([flip, crops], views=len(crops(images)))
    draws = augment.draw(images.shape, seed=1, dtype=images.dtype)
    assert_values(augment(images, draws=draws), expected)
    views = [replayed(view, images) for view in draws.views]
    assert_values(torch.cat(views), expected)


@pytest.mark.parametrize("behind", [[], [v2.RandomCrop(5)]], ids=["alone", "a crop behind"])
def test_crops_of_images_of_different_sizes_are_views(behind):
    images = images_of([(37, 52), (64, 40)])
    augment = gpuaug.fuse([v2.TenCrop((20, 30)), *behind], ragged=True)
    for seed in range(4):  # tables of later calls are computed ahead
        torch.manual_seed(seed)
        made = augment(pack(images))
        torch.manual_seed(seed)
        draws = augment.draw(pack(images), seed=None)
        assert_values(made, torch.cat([replayed(view, images) for view in draws.views]))


def test_boxes_follow_each_crop():
    images = torch.zeros(1, 1, 20, 24, dtype=torch.uint8)
    images[..., 2:13, 1:9] = 1
    boxes = [{"boxes": torch.tensor([[1.0, 2.0, 9.0, 13.0]])}]
    made, targets = gpuaug.fuse(v2.TenCrop((10, 12)))(images, boxes, data_keys=["input", "targets"])
    for crop, target in zip(made, targets, strict=True):
        rows, columns = (crop[0] > 0).nonzero(as_tuple=True)
        assert target["valid"].tolist() == [bool(len(rows))]
        if len(rows):
            assert target["boxes"].tolist() == [[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]]


def test_views_of_crops_are_as_many_as_the_crops():
    with pytest.raises(gpuaug.ArgumentError, match=re.escape("views must be 5 with FiveCrop, got 2. Leave it out.")):
        gpuaug.fuse(v2.FiveCrop(9), views=2)
