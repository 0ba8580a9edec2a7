"""Fields of ``v2.ElasticTransform``: their distribution, and masks that follow."""

import numpy as np
import pytest
import torch
from support.comparison.replay import photographs
from support.comparison.statistics import apart
from support.comparison.torchvision_replay import replayed
from support.comparison.values import assert_values
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

import gpuaug


def displacements(draws):
    """Displacements of all samples, (B, H, W, 2)."""
    return torch.cat([arguments["displacement"] for ((_, arguments),) in draws.as_torchvision()])


@pytest.mark.parametrize("sigma", [(0.0, 0.0), (1.1, 1.1), (0.7, 1.2)], ids=str)
def test_displacements_have_torchvisions_distribution(sigma):
    transform = v2.ElasticTransform((30.0, 90.0), list(sigma))
    image = torch.empty(3, 12, 17)
    torch.manual_seed(0)
    theirs = torch.cat([transform.make_params([image])["displacement"] for _ in range(600)])
    ours = displacements(gpuaug.fuse(transform).draw((600, *image.shape), seed=1))
    for y, x in ((0, 0), (5, 8), (11, 3)):
        for axis in (0, 1):
            one, other = (each[:, y, x, axis].double().numpy() for each in (theirs, ours))
            assert apart(one, other) < 1
            assert apart(one, other * 2) > 1
            neighbours = [(each[:, y, x, axis] - each[:, 6, 9, axis]).double().numpy() for each in (theirs, ours)]
            assert apart(*neighbours) < 1
    both = np.corrcoef(ours[..., 0].flatten(), ours[..., 1].flatten())[0, 1]
    assert abs(both) < 0.05


def test_samples_views_and_batches_have_different_fields():
    augment = gpuaug.fuse(v2.ElasticTransform(30.0, 1.0), views=2)
    fields = torch.cat([displacements(view) for seed in range(3) for view in augment.draw((4, 3, 12, 16), seed=seed).views])
    assert len(fields.unique(dim=0)) == 24


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32], ids=str)
def test_masks_follow_with_the_nearest_pixel(dtype):
    images, masks = photographs(6), (photographs(6, 1) // 30).to(dtype)
    transform = v2.ElasticTransform(60.0, 1.5, fill={tv_tensors.Mask: 7, "others": 99})
    augment = gpuaug.fuse([v2.RandomHorizontalFlip(), v2.RandomApply([transform], p=0.6)])
    draws = augment.draw(images.shape, seed=0, dtype=images.dtype)
    made, moved = augment(images, masks, data_keys=["input", "mask"], draws=draws)
    assert_values(made, replayed(draws, images), atol=1)
    for mask, got, calls in zip(masks, moved, draws.as_torchvision(), strict=True):
        expected = tv_tensors.Mask(mask)
        for name, arguments in calls:
            fill = {"fill": 7} if name == "elastic" else {}
            expected = getattr(functional, name)(expected, **{**arguments, **fill})
        assert_values(got, expected.as_subclass(torch.Tensor))


def test_frames_of_a_clip_have_one_field():
    videos = tv_tensors.Video(photographs(6).unflatten(0, (2, 3)))
    augment = gpuaug.fuse(v2.ElasticTransform(60.0, 1.5))
    draws = augment.draw(videos.shape, seed=1, dtype=torch.uint8)
    expected = replayed(draws, videos.as_subclass(torch.Tensor))
    assert_values(augment(videos, draws=draws).as_subclass(torch.Tensor), expected, atol=1)


def followed(value, calls):
    """What torchvision makes of boxes or keypoints of one image."""
    for name, arguments in calls:
        value = value if name == "invert" else getattr(functional, name)(value, **arguments)
    return value.as_subclass(torch.Tensor)


PIPELINES = {
    "alone": [v2.ElasticTransform(60.0, 1.5)],
    "between others": [
        v2.RandomHorizontalFlip(),
        v2.RandomInvert(),
        v2.RandomApply([v2.ElasticTransform((90.0, 30.0), 1.5)], p=0.6),
        v2.RandomVerticalFlip(),
        v2.Resize((30, 60)),
    ],
    "twice": [v2.ElasticTransform(40.0, 1.0), v2.ElasticTransform(60.0, 1.5)],
}


@pytest.mark.parametrize("boxes", ["xyxy", "xywh", "cxcywh"])
@pytest.mark.parametrize("name", PIPELINES)
def test_boxes_and_keypoints_move_as_in_torchvision(name, boxes):
    images, size = photographs(4), (32, 48)
    generator = torch.Generator().manual_seed(0)
    starts = torch.rand(4, 5, 2, generator=generator) * torch.tensor([30.0, 20.0]) + 4
    sides = torch.rand(4, 5, 2, generator=generator) * 8 + 2
    corners = torch.cat((starts, starts + sides), 2)
    given = [functional.convert_bounding_box_format(each, old_format="XYXY", new_format=boxes.upper()) for each in corners]
    targets = [{"boxes": box, "keypoints": start} for box, start in zip(given, starts, strict=True)]
    augment = gpuaug.fuse(PIPELINES[name], boxes=boxes)
    draws = augment.draw(images.shape, seed=0, dtype=images.dtype)
    alone = augment(images, draws=draws)  # in one plan, which is not that of images with boxes
    made, results = augment(images, targets, data_keys=["input", "targets"], draws=draws)
    assert_values(made, replayed(draws, images), atol=1, share=0.001)
    assert_values(alone, made, atol=1, share=0.001)
    for target, result, calls in zip(targets, results, draws.as_torchvision(), strict=True):
        typed = tv_tensors.BoundingBoxes(target["boxes"], format=boxes.upper(), canvas_size=size)
        assert_values(result["boxes"], followed(typed, calls), atol=1e-3)
        if hasattr(tv_tensors, "KeyPoints") and name != "between others":  # torchvision flips keypoints by another convention
            points = tv_tensors.KeyPoints(target["keypoints"], canvas_size=size)
            assert_values(result["keypoints"], followed(points, calls), atol=1e-3)


def test_boxes_of_kornia_move_with_their_pixels():
    images = torch.zeros(6, 1, 48, 64, dtype=torch.uint8)
    images[:, :, 12:30, 20:47] = 255
    boxes = torch.tensor([[[20.0, 12.0, 46.0, 29.0]]]).repeat(6, 1, 1)
    augment = gpuaug.fuse([v2.RandomHorizontalFlip(), v2.ElasticTransform(80.0, 6.0)])
    made, moved = augment(images, boxes, data_keys=["input", "bbox_xyxy"])
    for image, ((box,),) in zip(made, zip(moved, strict=True), strict=True):
        rows, columns = (image[0] > 0.5).nonzero(as_tuple=True)
        around = [columns.min(), rows.min(), columns.max(), rows.max()]
        assert_values(box, torch.stack(around).float(), atol=2.0)


def test_images_that_are_smaller_than_the_blur_are_torchvisions_error():
    with pytest.warns(gpuaug.GpuAugWarning, match="blurs over 20 pixels"), pytest.raises(RuntimeError, match="Padding size"):
        gpuaug.fuse(v2.ElasticTransform())(photographs(2, 3, 20, 40))
