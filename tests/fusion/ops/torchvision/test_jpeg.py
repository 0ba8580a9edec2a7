"""The loss of JPEG files of every quality and size, against libjpeg-turbo's, which torchvision calls."""

import itertools

import pytest
import torch
from support.batches.ragged import images_of, pack
from support.comparison.replay import photographs
from support.comparison.torchvision_replay import assert_replays, replayed
from support.comparison.values import assert_values
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

import gpuaug
from gpuaug.fusion.backends import torch_backend
from gpuaug.fusion.ops.torchvision.jpeg import JPEG


@pytest.fixture
def as_on_gpu(monkeypatch):
    """The arithmetic of a GPU, on a CPU too, where gpuaug calls torchvision's function otherwise."""
    monkeypatch.setattr(JPEG, "apply_on_cpu", JPEG.apply)


def noise(*shape, levels=256):
    """Random bytes of ``levels`` values from 0 to 255, whose coefficients are large."""
    values = torch.randint(0, levels, shape, generator=torch.Generator().manual_seed(sum(shape)))
    return (values * (255 // (levels - 1))).to(torch.uint8)


CONTENTS = {
    "photographs": lambda channels: photographs(4, channels, 35, 50),
    "noise": lambda channels: noise(4, channels, 24, 33),
    "black and white": lambda channels: noise(4, channels, 24, 33, levels=2),
}


@pytest.mark.parametrize("quality", range(1, 101))
@pytest.mark.every(9)
def test_images_of_every_quality_equal_torchvisions_bit_for_bit(quality, as_on_gpu):
    for content, channels in itertools.product(CONTENTS, (1, 3)):
        images = CONTENTS[content](channels)
        expected = torch.stack([functional.jpeg(image, quality) for image in images])
        assert_values(gpuaug.fuse(v2.JPEG(quality))(images), expected, about=content)


SIDES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 18, 31, 32, 33, 34)


@pytest.mark.parametrize(("height", "width"), list(itertools.product(SIDES, SIDES)))
@pytest.mark.every(7)
def test_images_of_every_size_equal_torchvisions_bit_for_bit(height, width, as_on_gpu):
    for channels in (1, 3):
        assert_replays(v2.JPEG((20, 100)), noise(3, channels, height, width))
        assert_replays(v2.JPEG((20, 100)), photographs(3, channels, height, width))


@pytest.mark.parametrize("name", ["astronaut", "chelsea", "coffee"])
def test_photographs_equal_torchvisions_bit_for_bit(name, as_on_gpu):
    data = pytest.importorskip("skimage.data")
    photograph = torch.from_numpy(getattr(data, name)()).permute(2, 0, 1)
    assert_replays(v2.JPEG((1, 100)), photograph.expand(8, -1, -1, -1))


def test_frames_of_a_clip_have_one_quality():
    videos = tv_tensors.Video(photographs(6).unflatten(0, (2, 3)))
    augment = gpuaug.fuse(v2.JPEG((1, 60)))
    draws = augment.draw(videos.shape, seed=1, dtype=torch.uint8)
    assert_values(augment(videos, draws=draws).as_subclass(torch.Tensor), replayed(draws, videos.as_subclass(torch.Tensor)))


def test_views_and_images_of_different_sizes_equal_torchvision():
    images = images_of([(37, 52), (64, 40)])
    augment = gpuaug.fuse([v2.CenterCrop((24, 30)), v2.JPEG((1, 60))], ragged=True, views=2)
    draws = augment.draw(pack(images), seed=1)
    expected = torch.cat([replayed(view, images) for view in draws.views])
    assert_values(augment(pack(images), draws=draws), expected)


def test_large_batches_are_processed_in_parts(monkeypatch, as_on_gpu):
    images, augment = photographs(7), gpuaug.fuse(v2.JPEG((1, 60)))
    draws = augment.draw(images.shape, seed=1, dtype=images.dtype)
    expected = augment(images, draws=draws)
    parts = []
    monkeypatch.setattr(torch_backend, "MOST_VALUES", 2 * images[0].numel())
    apply = JPEG.apply_on_cpu
    monkeypatch.setattr(JPEG, "apply_on_cpu", lambda op, *part: parts.append(len(part[0])) or apply(op, *part))
    assert_values(augment(images, draws=draws), expected)
    assert parts == [2, 2, 2, 1]


def test_masks_and_boxes_stay():
    images, masks = photographs(2), photographs(2, 1)
    boxes = [{"boxes": torch.tensor([[1.0, 2.0, 9.0, 8.0]])}] * 2
    made, same, targets = gpuaug.fuse(v2.JPEG(5))(images, masks, boxes, data_keys=["input", "mask", "targets"])
    assert not torch.equal(made, images)
    assert_values(same, masks)
    assert_values(targets[0]["boxes"], boxes[0]["boxes"])


def test_floats_are_torchvisions_error():
    with pytest.raises(RuntimeError, match="Input tensor dtype should be uint8"), pytest.warns(gpuaug.GpuAugWarning):
        gpuaug.fuse(v2.JPEG(50))(photographs(2, dtype=torch.float32))


def test_other_numbers_of_channels_are_an_error():
    with pytest.raises(gpuaug.ArgumentError, match="images must have 1 or 3 channels for JPEG, got 4"):
        gpuaug.fuse(v2.JPEG(50))(photographs(2, 4))
