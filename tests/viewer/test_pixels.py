"""How the values of images become pixels: normalising undone, ranges, channels, sizes."""

import warnings

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support.profiler.viewer import MEAN, STD, channels_first, check, notes, of, pixels

import gpuaug
from gpuaug.core.ragged import Ragged, Shapes


@pytest.mark.parametrize("normalize", ["kornia", "fused", "within", "twice", "undone"])
def test_normalize_is_undone(normalize):
    norm, other = K.Normalize(MEAN, STD), K.Normalize(torch.tensor(0.5), torch.tensor([0.2, 0.3, 0.4]))
    source = torch.rand(2, 3, 6, 6)
    stages = {
        "kornia": [norm],
        "fused": [gpuaug.fuse([K.RandomInvert(p=0.0), norm]), lambda images: images],
        "within": [torch.nn.Sequential(K.ImageSequential(torch.nn.Identity(), norm), torch.nn.Identity())],
        "twice": [norm, other],
        "undone": [norm, K.Denormalize(MEAN, STD)],
    }[normalize]
    figure = gpuaug.show(of(source, *stages))
    got = torch.stack([channels_first(each) for each in pixels(figure)[2:]])
    assert torch.allclose(got, source, atol=1e-6)
    assert all("stretched" not in note for note in notes(figure))


@pytest.mark.parametrize("values", [lambda x: 100 + 10000 * x, lambda x: x * 255, lambda x: x - 40])
def test_values_out_of_range_are_stretched_after_normalize_is_undone(values):
    source = values(torch.rand(2, 3, 6, 6))
    norm = K.Normalize(source.mean((0, 2, 3)), source.std((0, 2, 3)))
    figure = gpuaug.show(of(source, norm))
    shown = [channels_first(each) for each in pixels(figure)]
    for before, after in zip(shown[:2], shown[2:], strict=True):
        assert torch.allclose(before, after, atol=1e-4)
        assert after.min() < 0.2 < 0.8 < after.max()


def test_normalize_in_a_random_container_is_not_undone():
    for container in (K.ImageSequential, K.AugmentationSequential):
        figure = gpuaug.show(of(torch.rand(2, 3, 6, 6), container(K.Normalize(MEAN, STD), random_apply=1)))
        assert "6x6, stretched" in notes(figure)


def test_normalize_with_a_probability_is_not_undone():
    figure = gpuaug.show(of(torch.rand(2, 3, 6, 6), gpuaug.fuse(K.Normalize(MEAN, STD, p=0.5), dtype=torch.float16)))
    assert "6x6, stretched" in notes(figure)


def test_values_out_of_range_are_stretched():
    source = torch.linspace(-2, 5, 3 * 100).reshape(1, 3, 10, 10)
    figure = gpuaug.show(of(source))
    (got,) = pixels(figure)
    low, high = np.quantile(source.numpy(), [0.005, 0.995])
    assert torch.allclose(channels_first(got), ((source[0] - low) / (high - low)).clamp(0, 1), atol=1e-5)
    assert notes(figure) == ["10x10, stretched"]
    # A little beyond the range is rounding, and no number is no pixel.
    kept = torch.full((1, 3, 4, 4), 1.002)
    kept[0, 0, 0, 0] = torch.nan
    figure = gpuaug.show(of(kept))
    assert notes(figure) == ["4x4"]
    assert pixels(figure)[0].flatten().tolist() == [0.0] + [1.0] * 47
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (7.0, torch.nan):
            assert pixels(gpuaug.show(of(torch.full((1, 3, 4, 4), value))))[0].unique().tolist() == [0.0]


def test_one_two_and_six_channels():
    grey, two, six = torch.rand(2, 1, 6, 6), torch.rand(2, 2, 6, 6), torch.randint(0, 256, (2, 6, 6, 6), dtype=torch.uint8)
    figure = gpuaug.show(of(grey))
    assert torch.equal(torch.stack(pixels(figure)), grey[:, 0])
    assert {axes.images[0].get_cmap().name for axes in figure.axes} == {"gray"}
    assert {axes.images[0].get_clim() for axes in figure.axes} == {(0.0, 1.0)}
    figure = gpuaug.show(of(two))
    assert torch.equal(torch.stack(pixels(figure)), two[:, 0])
    assert notes(figure) == ["6x6, channel 1 of 2"]
    figure = gpuaug.show(of(six), n=1)
    assert torch.equal(channels_first(pixels(figure)[0]), six[0, :3] / 255)
    assert notes(figure) == ["6x6, channels 1 to 3 of 6"]


def packed(sizes):
    """Images of sizes of their own, and the same in one buffer."""
    images = [torch.randint(0, 256, (3, height, width), dtype=torch.uint8) for height, width in sizes]
    data = torch.cat([image.permute(1, 2, 0).flatten() for image in images])
    starts = np.cumsum([0, *(3 * height * width for height, width in sizes)])[:-1]
    places = torch.tensor([[start, *size] for start, size in zip(starts, sizes, strict=True)])
    return images, Ragged(data, places, Shapes(np.array(sizes), 3, "hwc"))


@pytest.mark.parametrize("kind", ["ragged", "list"])
def test_ragged_images_keep_their_sizes(kind):
    sizes = [(10, 20), (30, 10), (16, 16)]
    images, ragged = packed(sizes)

    def same(batch):
        return torch.stack([image[:, :8, :8] for image in batch])

    figure = gpuaug.show(of((ragged if kind == "ragged" else images, torch.arange(3)), same))
    check(figure, [image / 255 for image in images], [image[:, :8, :8] / 255 for image in images])
    assert notes(figure) == ["20x10", "10x30", "16x16", "8x8"]
    figure.draw_without_rendering()
    for axes, (height, width) in zip(figure.axes, sizes, strict=False):
        across, down = axes.get_window_extent().size
        assert down / across == pytest.approx(height / width)
