"""Image processors of transformers against the classes themselves, in float32 arithmetic as on CUDA."""

import functools

import numpy as np
import pytest
import torch
from support.batches.ragged import images_of, pack
from support.comparison.values import assert_values
from torchvision.transforms.v2.functional import _geometry

import gpuaug
from gpuaug.core.ragged import Ragged, Shapes

pytestmark = pytest.mark.frameworks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHARE = 0.001
"""Largest share of values that may differ by a level, because they are close to a rounding threshold."""

PROCESSORS = {
    "Qwen2VL": [
        {},
        {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}},
        {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 262144}},  # as Qwen3-VL
        {"merge_size": 3, "temporal_patch_size": 1, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    ],
    "Siglip2": [{}, {"max_num_patches": 1024}, {"patch_size": 14, "max_num_patches": 63, "resample": 3}],
    "Siglip": [{}, {"size": {"height": 384, "width": 384}, "resample": 2}],
    "CLIP": [
        {},
        {"size": {"shortest_edge": 100}, "crop_size": {"height": 141, "width": 120}},
        {"do_center_crop": False, "size": {"height": 99, "width": 80}},
    ],
    "ViT": [{}, {"do_normalize": False}, {"do_rescale": False}],
    "DINOv3ViT": [{}, {"do_normalize": False, "resample": 3}],
    "Pixtral": [{}, {"patch_size": 14, "size": {"longest_edge": 500}}],
}
CASES = [(name, settings) for name, several in PROCESSORS.items() for settings in several]


@pytest.fixture
def transformers(monkeypatch):
    """transformers, with torchvision's resize of bytes on a CPU computed as on CUDA: it rounds to bytes between both axes."""
    module = pytest.importorskip("transformers")
    monkeypatch.setattr(_geometry, "_do_native_uint8_resize_on_cpu", lambda interpolation: False)
    return module


def random_sizes(count, seed, largest=900):
    """Sizes from 28 pixels on, of which some are 200 times as long as wide."""
    random = np.random.default_rng(seed)
    sizes = np.exp(random.uniform(np.log(28), np.log(largest), (count, 2))).astype(int)
    sizes[-1] = (28, 28 * int(random.integers(20, 201)))
    return [tuple(size[:: random.choice([1, -1])]) for size in sizes.tolist()]


def assert_equal(processor, images, layout, device):
    pixels = gpuaug.fuse(processor, ragged=True)
    batch = pack(images, layout).to(device)
    got = pixels(batch)
    wanted = processor([image.to(device) for image in images], return_tensors="pt")
    assert list(wanted) == list(got._fields)
    levels = pixels.definition[0].resampling.levels
    level = (levels[:, 1:] - levels[:, :-1]).max().item() * 1.001
    rounds = pixels.definition[0].resampling.rounds
    for name, value in wanted.items():
        result = getattr(got, name).to(value.device)
        if name != "pixel_values":
            assert_values(result, value, about=name)
            continue
        assert_values(result, value, atol=level if rounds else 2e-5, about=name)
        if rounds:
            assert_values(result, value, atol=1e-6, share=SHARE, about=name)
    grids = pixels.grids(batch)
    for name in ("image_grid_thw", "spatial_shapes", "image_sizes"):
        if name in wanted:
            assert_values(grids, wanted[name].cpu())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_results_are_the_processor_s(name, settings, seed, device, transformers):
    processor = getattr(transformers, f"{name}ImageProcessor")(**settings)
    assert_equal(processor, images_of(random_sizes(5, seed)), ["chw", "hwc"][seed], device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["Qwen2VL", "Siglip2", "Pixtral"])
def test_large_images_are_the_processor_s(name, device, transformers):
    processor = getattr(transformers, f"{name}ImageProcessor")()
    assert_equal(processor, images_of([(3000, 4000), (1201, 1999)]), "hwc", device)


@pytest.mark.parametrize("name", ["Qwen2VL", "Siglip2", "Siglip", "CLIP", "ViT", "DINOv3ViT", "Pixtral"])
def test_grids_are_the_processor_s_for_all_sizes(name, transformers):
    """Of 3,000 random sizes up to 4,000 pixels and aspect ratios up to 200, in its own arithmetic, without pixels."""
    processor = getattr(transformers, f"{name}ImageProcessor")()
    pixels = gpuaug.fuse(processor, ragged=True)
    sizes = random_sizes(3000, 7, largest=4000)
    grids = pixels.grids(Ragged(torch.empty(0), torch.empty(0), Shapes(np.array(sizes), 3, "hwc")))
    if name == "Qwen2VL":
        count = functools.partial(processor.get_number_of_image_patches, images_kwargs={})
        assert grids.prod(1).tolist() == [count(*size) for size in sizes]
    elif name == "Siglip2":
        from transformers.models.siglip2.image_processing_siglip2 import get_image_size_for_max_num_patches

        wanted = [get_image_size_for_max_num_patches(*size, processor.patch_size, processor.max_num_patches) for size in sizes]
        assert (grids * processor.patch_size).tolist() == [list(size) for size in wanted]
    elif name == "Pixtral":
        from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size

        wanted = [get_resize_output_image_size(torch.empty(3, *size), (1024, 1024), (16, 16)) for size in sizes]
        assert grids.tolist() == [list(size) for size in wanted]
    else:
        assert grids.unique(dim=0).shape == (1, 2)


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_version_that_was_not_tested_is_accepted_if_it_is_equal(name, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers, "__version__", "99.0")
    for settings in PROCESSORS[name]:
        gpuaug.fuse(getattr(transformers, f"{name}ImageProcessor")(**settings), ragged=True)
