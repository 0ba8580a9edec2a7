"""Image processors on a GPU: the kernel against torch, its launches, and the memory of batches whose length differs."""

import numpy as np
import pytest
import torch
from support.batches.ragged import images_of, pack
from support.comparison.values import assert_values
from support.gpu.launches import kernels_of
from support.processors.comparison import beyond_thresholds
from support.processors.stand_ins import NAMES, read_stand_in, stand_in

import gpuaug
from gpuaug.core.ragged import Ragged, Shapes
from gpuaug.fusion.backends import dispatch, patches

pytestmark = pytest.mark.gpu

SIZES = [(28, 28), (480, 640), (3000, 4000), (1200, 37), (900, 901), (33, 3300)]
QWEN_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
STEPS, WARM_STEPS = 2000, 500


def random_sizes(count, seed):
    random = np.random.default_rng(seed)
    return [tuple(random.integers(28, 1600, 2).tolist()) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["hwc", "chw"])
@pytest.mark.parametrize("name", NAMES)
def test_kernel_equals_torch_beyond_rounding_thresholds(name, layout, dtype):
    large = {"size": QWEN_SIZE} if name.startswith("Qwen") else {"size": {"longest_edge": 1024}}
    settings = large if name.startswith(("Qwen", "Pixtral")) else {}
    family, resampling = read_stand_in(name, **settings)[1:]
    batch = pack(images_of([*SIZES, *random_sizes(6, 0)]), layout)
    arrangement = family.arrangement(batch.shapes.sizes)
    got = dispatch.write_patches(batch.to("cuda"), arrangement, resampling, dtype)[0].cpu()
    # On the CPU: on CUDA, torch shrinks by a factor of at most about 60.
    wanted, *_ = patches.write_patches(batch, arrangement, resampling, dtype)
    assert beyond_thresholds(got, wanted, batch, arrangement, resampling) == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_one_launch_without_a_wait(name, monkeypatch):
    pixels = gpuaug.fuse(stand_in(name, monkeypatch), ragged=True)
    batch = pack(images_of([(480, 640), (300, 200)])).to("cuda")
    pixels(batch)
    names = [kernel for kernel in kernels_of(lambda: pixels(batch)) if "FillFunctor" not in kernel]
    assert names == ["patches_kernel"]


def test_memory_stays_flat_over_batches_of_random_length(monkeypatch):
    pixels = gpuaug.fuse(stand_in("Qwen2VLImageProcessor", monkeypatch, size=QWEN_SIZE), ragged=True)
    data = torch.zeros(200_000_000, dtype=torch.uint8)

    def batches():
        for step in range(STEPS):
            sizes = np.array(random_sizes(4, step))
            ends = sizes.prod(1).cumsum() * 3
            places = torch.from_numpy(np.column_stack([np.concatenate([[0], ends[:-1]]), sizes]))
            yield {"images": Ragged(data[: ends[-1]], places, Shapes(sizes, 3, "hwc"))}

    stage = gpuaug.TransformStage(pixels, on="images", into=("pixel_values", "image_grid_thw"))
    reserved = 0
    for step, batch in enumerate(gpuaug.StreamedLoader(batches(), [stage], device="cuda")):
        batch["pixel_values"].sum()
        if step == WARM_STEPS:
            reserved = torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() <= 1.05 * reserved


def test_results_are_those_of_a_cpu(monkeypatch):
    """In a loader, with grids on the card."""
    pixels = gpuaug.fuse(stand_in("Siglip2ImageProcessor", monkeypatch), ragged=True)
    batch = pack(images_of([(480, 640), (300, 200)])).pin_memory()
    (got,) = gpuaug.StreamedLoader([batch], [pixels], device="cuda")
    wanted = pixels(batch)
    assert got._fields == wanted._fields
    for name, value in wanted._asdict().items():
        tolerance = {"atol": 0.04, "share": 0.001} if name == "pixel_values" else {}
        assert_values(getattr(got, name).cpu(), value, about=name, **tolerance)
