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


def test_boxes_and_small_images_are_an_error():
    boxes = [{"boxes": torch.tensor([[1.0, 2.0, 9.0, 8.0]])}] * 2
    with pytest.raises(gpuaug.ArgumentError, match="where ElasticTransform moves pixels by a field"):
        gpuaug.fuse(v2.ElasticTransform(60.0, 1.5))(photographs(2), boxes, data_keys=["input", "targets"])
    with pytest.warns(gpuaug.GpuAugWarning, match="blurs over 20 pixels"), pytest.raises(RuntimeError, match="Padding size"):
        gpuaug.fuse(v2.ElasticTransform())(photographs(2, 3, 20, 40))
