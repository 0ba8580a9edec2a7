"""Detection targets on a GPU: as on a CPU, and without a synchronisation."""

import kornia.augmentation as K
import pytest
import torch
from support.batches.ragged import images_of, pack
from support.comparison import box_windows
from support.comparison.executors import FLIPPED
from support.comparison.replay import left_to_kornia, photographs
from support.comparison.values import assert_values
from support.gpu.launches import kernels_of, synchronisation_is_error
from support.targets.detection import PIPELINES, annotations, masks, records_of
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.triton import boxes as kernels_boxes
from gpuaug.fusion.backends.triton import mask

pytestmark = pytest.mark.gpu

KEYS = ["input", "targets"]


def on_gpu(records):
    return [
        {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in each.items()} for each in records
    ]


@pytest.mark.parametrize("form", ["xyxy", "xywh", "cxcywh", "cxcywh_share"])
@pytest.mark.parametrize("name", PIPELINES)
@left_to_kornia
def test_target_dicts_equal_the_cpu(name, form):
    augment, images, records = gpuaug.fuse(PIPELINES[name](0.5), boxes=form), photographs(5), records_of()
    if form == "cxcywh_share":
        records = [{**record, "boxes": record["boxes"] / 48} for record in records]
    draws = augment.draw(images.shape, seed=2)
    _, expected = augment(images, records, data_keys=KEYS, draws=draws)
    _, got = augment(images.cuda(), on_gpu(records), data_keys=KEYS, draws=draws)
    for record, other in zip(got, expected, strict=True):
        assert record["boxes"].is_cuda
        for key in ("boxes", "keypoints"):
            torch.testing.assert_close(record[key].cpu(), other[key], atol=1e-3, rtol=1e-5)
        assert_values(record["valid"].cpu(), other["valid"])
        assert (record["masks"].cpu() != other["masks"]).float().sum() <= 0.01 * other["masks"].numel()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64], ids=str)
def test_ragged_masks_equal_the_cpu(dtype):
    sizes = [(30, 41), (52, 23), (40, 40), (17, 60), (33, 33)]
    augment = gpuaug.fuse([K.RandomResizedCrop((20, 24)), K.RandomHorizontalFlip(), K.RandomErasing(p=0.5)], ragged=True)
    batch = pack(images_of(sizes))
    records = [
        {"boxes": torch.tensor([[1.0, 1, 15, 15]] * count).view(-1, 4), "masks": masks(count, *sides, dtype=dtype, seed=count)}
        for count, sides in zip([0, 2, 1, 4, 3], sizes, strict=True)
    ]
    draws = augment.draw(batch, seed=2)
    _, expected = augment(batch, records, data_keys=KEYS, draws=draws)
    apart = on_gpu(records)
    # One is not contiguous: what is made of it must not be written to before it is read.
    apart[3]["masks"] = apart[3]["masks"].transpose(1, 2).contiguous().transpose(1, 2)
    on_card = batch.to("cuda")
    augment(on_card, apart, data_keys=KEYS, draws=draws)
    torch.cuda._sleep(10**8)
    _, got = augment(on_card, apart, data_keys=KEYS, draws=draws)
    torch.full((10**6,), 7, dtype=torch.uint8, device="cuda")
    for record, other in zip(got, expected, strict=True):
        assert record["masks"].dtype is dtype
        assert record["masks"].shape == other["masks"].shape
        assert (record["masks"].cpu() != other["masks"]).float().sum() <= 0.01 * other["masks"].numel()
        assert_values(record["valid"].cpu(), other["valid"])
    assert all(record["masks"].any() for record in got[1:])


@pytest.mark.parametrize("sizes", [[(9, 14), (12, 8)], [(9, 14)] * 2], ids=["several", "one"])
def test_more_masks_than_a_grid_axis(sizes):
    augment = gpuaug.fuse([K.RandomResizedCrop((6, 6)), K.RandomHorizontalFlip()], ragged=True)
    pixels = images_of(sizes)
    images = pack(pixels) if sizes[0] != sizes[1] else torch.stack(pixels)
    some = [masks(3, *sides, dtype=torch.uint8, seed=seed) for seed, sides in enumerate(sizes)]
    many = [{"masks": mask.cuda().repeat(20_000, 1, 1)} for mask in some]
    draws = augment.draw(images if isinstance(images, gpuaug.Ragged) else images.shape, seed=2)
    images = images.to("cuda")
    _, expected = augment(images, [{"masks": mask.cuda()} for mask in some], data_keys=KEYS, draws=draws)
    _, got = augment(images, many, data_keys=KEYS, draws=draws)
    for record, other in zip(got, expected, strict=True):
        assert_values(record["masks"], other["masks"].repeat(20_000, 1, 1))
        assert record["masks"].any()


@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize("key", ["bbox", "bbox_xyxy", "bbox_xywh", "keypoints"])
def test_padded_boxes_equal_the_cpu(key, valid):
    if valid and key == "keypoints":
        pytest.skip("only boxes are clipped")
    augment, inputs, keys = gpuaug.fuse(PIPELINES["two warps"](0.8)), [photographs(5), annotations(key)], ["input", key]
    if valid:
        inputs, keys = [*inputs, torch.arange(20).view(5, 4) % 3 > 0], [*keys, "valid"]
    draws = augment.draw(inputs[0].shape, seed=2)
    expected = augment(*inputs, data_keys=keys, draws=draws)
    got = augment(*[value.cuda() for value in inputs], data_keys=keys, draws=draws)
    torch.testing.assert_close(got[1].cpu(), expected[1], atol=1e-3, rtol=1e-5)
    if valid:
        assert_values(got[2].cpu(), expected[2])


CROP_BY_BOXES = [v2.RandomZoomOut(0.25, (1.0, 2.0)), v2.RandomIoUCrop(), v2.Resize((40, 50)), v2.RandomHorizontalFlip()]


def test_crops_by_boxes_equal_the_cpu():
    augment, images, records = gpuaug.fuse(CROP_BY_BOXES, dtype=torch.float32), photographs(12), records_of(12)
    for record in records:
        record["boxes"] = record["boxes"].round()
    draws = augment.draw(images.shape, seed=2)
    expected, targets = augment(images, records, data_keys=KEYS, draws=draws)
    got, others = augment(images.cuda(), on_gpu(records), data_keys=KEYS, draws=draws)
    assert_values(got.cpu(), expected, atol=1e-4, share=FLIPPED)
    for record, other in zip(others, targets, strict=True):
        torch.testing.assert_close(record["boxes"].cpu(), other["boxes"], atol=1e-3, rtol=1e-5)
        assert_values(record["valid"].cpu(), other["valid"])
        assert (record["masks"].cpu() != other["masks"]).float().sum() <= 0.01 * other["masks"].numel()


@pytest.mark.parametrize("name", box_windows.TRANSFORMS)
def test_windows_equal_the_cpu(name):
    assert not box_windows.difference(name, dispatch.box_windows, torch.device("cuda"), samples=2000)


def test_windows_are_chosen_in_one_launch():
    augment, inputs = gpuaug.fuse(CROP_BY_BOXES), (photographs(12).cuda(), on_gpu(records_of(12)))
    augment(*inputs, data_keys=KEYS)
    kernels = kernels_of(lambda: augment(*inputs, data_keys=KEYS))
    assert kernels.count("box_windows_kernel") == 1
    # torch's operations choose the windows in 80 launches, besides the launches of all else.
    assert len(kernels) < 60, kernels


@pytest.mark.parametrize(
    "modules", [[*PIPELINES["DETR"](0.5), K.RandomErasing(p=0.5)], CROP_BY_BOXES], ids=["DETR", "crop by boxes"]
)
def test_call_with_targets_does_not_synchronise_and_compiles_once(modules):
    augment = gpuaug.fuse(modules)
    batches = [(photographs(5, seed=seed).cuda(), on_gpu(records_of(seed=seed))) for seed in range(4)]
    augment(*batches[0], data_keys=KEYS)
    compiled = compilations()
    torch.cuda.synchronize()
    torch.cuda._sleep(2 * 10**9)
    started = torch.cuda.Event()
    started.record()
    with synchronisation_is_error():
        for images, records in batches[1:]:
            augment(images, records, data_keys=KEYS)
    assert not started.query()
    torch.cuda.synchronize()
    assert compilations() == compiled


class Annotated(Dataset):
    """Images of one size, with torchvision's boxes and masks."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        n = index % 4
        boxes = torch.tensor([[1.0, 2, 20, 30]]).repeat(n, 1) + index % 7
        target = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(40, 50)),
            "masks": tv_tensors.Mask(masks(n, 40, 50, seed=index)),
            "labels": torch.arange(n),
            "image_id": index,
        }
        return photographs(1, 3, 40, 50)[0], target


def collated(samples):
    return torch.stack([image for image, _ in samples]), tuple(target for _, target in samples)


@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_target_dicts_equal_the_cpu(workers):
    augment = gpuaug.fuse(v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop((30, 30)), v2.SanitizeBoundingBoxes()]))

    def streamed(device, **options):
        loader = DataLoader(Annotated(), 6, collate_fn=collated, **options)
        with gpuaug.StreamedLoader(loader, [augment], device=device, seed=3) as batches:
            return list(batches)

    got, want = streamed("cuda", num_workers=workers), streamed("cpu")
    for (images, records), (_, others) in zip(got, want, strict=True):
        assert images.is_cuda
        assert type(records) is tuple
        for record, other in zip(records, others, strict=True):
            assert type(record) is dict
            assert list(record) == list(other)
            for key, value in record.items():
                assert type(value) is type(other[key])
                if key != "image_id":
                    assert_values(value.cpu(), other[key], atol=1e-3 if key == "boxes" else 0)
            assert record["boxes"].canvas_size == (30, 30)
            assert record["image_id"] == other["image_id"]
        kept, others = gpuaug.sanitize(records), gpuaug.sanitize(others)
        assert [record["labels"].tolist() for record in kept] == [record["labels"].tolist() for record in others]
        assert [record["masks"].shape for record in kept] == [record["masks"].shape for record in others]


@pytest.mark.parametrize("depth", [0, 2])
def test_stage_that_drops_boxes_waits_for_the_device(depth):
    pipeline = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop((30, 30)), v2.SanitizeBoundingBoxes()])
    augment = gpuaug.TransformStage(gpuaug.fuse(pipeline), name="augment")
    drop = gpuaug.TransformStage(gpuaug.sanitize, on=1)

    def late(images):
        torch.cuda._sleep(10**8)
        return images

    def streamed(stages, depth):
        loader = DataLoader(Annotated(), 8, collate_fn=collated, num_workers=2)
        with gpuaug.StreamedLoader(loader, stages, device="cuda", seed=3, depth=depth) as batches:
            for images, records in batches:
                yield images, records
                torch.full((10**6,), 7.0, device="cuda")

    kept = 0
    wanted = streamed([augment], 0)
    for (_, records), (_, others) in zip(streamed([late, augment, drop], depth), wanted, strict=True):
        assert type(records) is tuple
        for record, other in zip(records, gpuaug.sanitize(others), strict=True):
            assert list(record) == list(other)
            assert type(record["boxes"]) is tv_tensors.BoundingBoxes
            for key in ("boxes", "labels", "masks", "valid"):
                assert_values(record[key], other[key])
            kept += len(record["labels"])
    assert 0 < kept < sum(index % 4 for index in range(24))


def test_nan_boxes_equal_the_cpu():
    boxes = torch.tensor([[torch.nan, 5, 9, 9], [5, 5, torch.inf, 9], [5, 5, 9, torch.nan], [9, 5, 5, 9], [5, 5, 20, 20]])
    augment, images = gpuaug.fuse(PIPELINES["rotation"](1.0)), photographs(2)
    draws = augment.draw(images.shape, seed=0)
    records = [{"boxes": boxes}, {"boxes": boxes.flip(0)}]
    _, expected = augment(images, records, data_keys=KEYS, draws=draws)
    _, got = augment(images.cuda(), on_gpu(records), data_keys=KEYS, draws=draws)
    for record, other in zip(got, expected, strict=True):
        torch.testing.assert_close(record["boxes"].cpu(), other["boxes"], atol=1e-3, rtol=0, equal_nan=True)
        assert_values(record["valid"].cpu(), other["valid"])


def compilations():
    kernels = (kernels_boxes.box_kernel, mask.mask_kernel)
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())
