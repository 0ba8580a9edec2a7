"""Ragged batches, antialiasing and views on a real device: the kernels make what torch makes on the host."""

import kornia.augmentation as K
import pytest
import torch
from support.batches.ragged import images_of, pack
from support.comparison import device_crops, readers
from support.comparison.executors import FLIPPED
from support.comparison.replay import photographs
from support.comparison.values import assert_values
from support.gpu.launches import synchronisation_is_error

import gpuaug

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
FORMS = [(torch.float32, torch.contiguous_format), (torch.bfloat16, torch.channels_last)]


def disagreement(modules, images, dtype, memory_format, **options):
    """Kernels against torch, both on the device, in units of what a type can tell apart."""
    expected, got = readers.through_both(modules, images, dtype, memory_format, **options)
    assert got.shape == expected.shape
    assert got.is_contiguous(memory_format=memory_format)
    off = (got.float() - expected.float()).abs().flatten() / (2e-5 if dtype == torch.float32 else 1e-2)
    returns_to_bytes = any(type(module).__module__.startswith("torchvision.") for module in modules)
    return off.quantile(1 - FLIPPED).item() if returns_to_bytes else off.max().item()


@pytest.mark.parametrize("form", FORMS, ids=["float32", "bfloat16, channels last"])
@pytest.mark.parametrize("layout", ["chw", "hwc"])
@pytest.mark.parametrize("name", readers.RAGGED)
def test_ragged_kernels_equal_torch(name, layout, form):
    modules, sizes, options = readers.RAGGED[name]
    assert disagreement(modules, pack(images_of(sizes), layout).to(CUDA), *form, **options) < 1


@pytest.mark.parametrize("form", FORMS, ids=["float32", "bfloat16, channels last"])
@pytest.mark.parametrize("name", readers.SAME)
def test_views_and_antialias_kernels_equal_torch(name, form):
    modules, options = readers.SAME[name]
    assert disagreement(modules, readers.DENSE.to(CUDA), *form, **options) < 1


@pytest.mark.parametrize("layout", ["chw", "hwc"])
@pytest.mark.parametrize("antialias", [False, True])
def test_ragged_kernels_on_large_images_equal_torch(layout, antialias):
    """Sizes from the lists above are small; here many blocks make an image, and what is compiled in has to be right."""
    sizes = [(300 + 61 * index % 401, 300 + 89 * index % 401) for index in range(24)]
    batch = pack(images_of(sizes), layout)
    modules = [K.RandomResizedCrop((224, 224)), K.RandomHorizontalFlip(), K.ColorJitter(0.4, 0.4, 0.4, 0.1)]
    options = {"antialias": antialias, "views": 2}
    assert disagreement(modules, batch.to(CUDA), torch.float32, torch.contiguous_format, **options) < 5


@pytest.mark.parametrize("follow", [False, True], ids=["images", "and points and masks"])
@pytest.mark.parametrize("name", device_crops.CROPS)
def test_crops_kernel_equals_host_draws(name, follow):
    sizes = device_crops.some_sizes(4000)
    assert not device_crops.disagreement(device_crops.CROPS[name], sizes, CUDA, points=follow, masks=follow)


def test_device_crop_tables_asked_for_twice_are_not_overwritten():
    assert not device_crops.fault_of_shared_tables(CUDA)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("name", device_crops.SKIPPED)
def test_samples_skipped_by_a_crop_are_unchanged_bit_for_bit(name, dtype):
    assert not device_crops.fault_of_skipped_crops(name, dtype, CUDA)


def test_ragged_calls_equal_draw_on_any_stream():
    augment = gpuaug.fuse([K.RandomResizedCrop((24, 20)), K.RandomHorizontalFlip()], ragged=True, views=2)
    batches = [pack(images_of([(30 + 7 * index, 90 - 5 * k) for k in range(6)])).to(CUDA) for index in range(5)]
    points = torch.rand(6, 3, 2, device=CUDA) * 30
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    def calls(*, replay):
        torch.manual_seed(0)
        for index in range(60):
            batch, follow = batches[index % 5], index % 4 == 3
            given = (batch, points) if follow else (batch,)
            draws = augment.draw(batch) if replay else None
            if not replay:
                torch.cuda._sleep(3 * 10**7)  # rows that this stream has sent are late for any other
            with torch.cuda.stream(side if index % 3 else torch.cuda.current_stream()):
                made = augment(*given, data_keys=["input", "keypoints"][: 1 + follow], draws=draws)
            yield made if follow else [made]

    got, expected = list(calls(replay=False)), list(calls(replay=True))
    torch.cuda.synchronize()
    for one, other in zip(got, expected, strict=True):
        assert_values(one[0], other[0])
        torch.testing.assert_close(one[1:], other[1:], atol=1e-4, rtol=1e-6)
    assert not torch.equal(got[0][0], got[5][0])


def test_ragged_batches_in_a_loader_do_not_synchronise():
    batches = [(pack(images_of(readers.SIZES)).pin_memory(), torch.arange(3).pin_memory()) for _ in range(8)]
    augment = gpuaug.fuse([K.RandomResizedCrop((24, 24)), K.RandomHorizontalFlip()], ragged=True, views=2)

    def run(depth):
        loader = gpuaug.StreamedLoader(batches, [gpuaug.TransformStage(augment)], seed=0, depth=depth)
        return [images for images, _ in loader]

    reference = run(0)
    torch.cuda.synchronize()
    with synchronisation_is_error():
        streamed = run(2)
    for one, other in zip(streamed, reference, strict=True):
        assert_values(one, other)
    assert not torch.equal(streamed[0], streamed[1])


def test_kernels_read_nothing_behind_the_last_ragged_image():
    """One image, alone in its own allocation: nothing may be read behind it."""
    image = photographs(1, 3, 1, 33)[0]
    for layout in ("chw", "hwc"):
        augment = gpuaug.fuse(K.RandomResizedCrop((8, 8)), ragged=True)
        batch = pack([image], layout)
        draws = augment.draw(batch, seed=0)
        torch.testing.assert_close(augment(batch.to(CUDA), draws=draws).cpu(), augment(batch, draws=draws), atol=1e-5, rtol=0)
