"""``Mosaic``, ``MixUpBoxes`` and ``CopyPaste``: the classes against references, and pipelines against the classes."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches.samples import samples_of, stacked, target_of
from support.comparison.values import assert_values
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug import CopyPaste, MixUpBoxes, Mosaic
from gpuaug.core import batch as batches
from gpuaug.core.packed_targets import pack_targets, unpack_targets

KEYS = ["input", "targets"]


def collated(samples):
    """Batch as ``collate_ragged`` returns it; tensors for floats, which it does not accept."""
    return gpuaug.collate_ragged(samples) if samples[0]["image"][0].dtype is torch.uint8 else stacked(samples)


def eager(transforms, sample, draws):
    """Result of the modules of a pipeline for one sample."""
    images, targets = sample["image"], sample["target"]
    for transform in transforms:
        images, targets = transform(images, targets, draws=draws)
    return images, targets


def assert_targets(target, expected):
    assert target.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert target[name].dtype == value.dtype
            atol = 1e-3 if value.is_floating_point() else 0
            assert_values(target[name].float(), value.float(), atol=atol)
        else:
            assert target[name] == value


PIPELINES = {
    "mosaic": lambda p: [Mosaic(64, p=p)],
    "odd mosaic": lambda p: [Mosaic(37, fill=3, p=p)],
    "mixup": lambda p: [MixUpBoxes(p=p, alpha=0.8)],
    "mosaic, mixup": lambda p: [Mosaic(48, p=p), MixUpBoxes(p=p)],
    "mixup, mosaic": lambda p: [MixUpBoxes(p=p), Mosaic(48, p=p)],
    "paste": lambda p: [CopyPaste(p=p)],
    "mosaic, paste, mixup": lambda p: [Mosaic(48, p=p), CopyPaste(p=p), MixUpBoxes(p=p)],
    "paste, mosaic": lambda p: [CopyPaste(p=p), Mosaic(48, p=p)],
    "mixup, mixup": lambda p: [MixUpBoxes(p=p), MixUpBoxes(p=p, alpha=1)],
}


def count_of(transforms):
    return int(np.prod([4 if isinstance(transform, Mosaic) else 2 for transform in transforms]))


@pytest.mark.every(4)
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("p", [0.6, 0, 1])
@pytest.mark.parametrize("form", [torch.uint8, torch.float32])
def test_fused_equals_the_modules(name, p, form):
    transforms = PIPELINES[name](p)
    has_one_size = form is not torch.uint8
    samples = samples_of(len(name), 4, count_of(transforms), dtype=form, one_size=has_one_size)
    batch = collated(samples)
    resize = [] if has_one_size or "mosaic" in name else [v2.Resize((40, 40))]
    augment = gpuaug.fuse(v2.Compose([*transforms, v2.RandomVerticalFlip(0.0), *resize]), ragged=bool(resize))
    shape = batch["image"][0] if isinstance(batch["image"][0], gpuaug.Ragged) else batch["image"][0].shape
    draws = augment.draw(shape, seed=7, dtype=form)
    before = copy.deepcopy(batch["target"])
    images, targets = augment(batch["image"], batch["target"], data_keys=KEYS, draws=draws)
    for sample in range(len(samples)):
        image, expected = eager(transforms, samples[sample], draws.of(sample))
        if resize:
            canvas = tuple(image.shape[1:])
            plain = gpuaug.fuse(resize[0], ragged=True)
            (image,), (expected,) = plain(gpuaug.collate_ragged([image]), [expected], data_keys=KEYS)
            assert canvas == tuple(samples[sample]["image"][0].shape[1:])
        atol = 1 if form is torch.uint8 else 2 / 255
        assert_values(images[sample].float(), image.float(), atol=atol)
        assert_targets(targets[sample], expected)
    for sample in range(len(samples)):  # the inputs are not changed
        for given_target, source in zip(batch["target"][sample], before[sample], strict=True):
            assert given_target.keys() == source.keys()


@pytest.mark.parametrize("name", PIPELINES)
def test_torchvisions_functions_repeat_what_follows_the_modules(name):
    """``Draws.as_torchvision`` has the calls for the combined image."""
    transforms = PIPELINES[name](0.6)
    samples = samples_of(len(name), 3, count_of(transforms))
    batch = collated(samples)
    geometry = [v2.RandomAffine(10, (0.1, 0.1), (0.7, 1.3), fill=9), v2.Resize((40, 36)), v2.RandomHorizontalFlip()]
    augment = gpuaug.fuse([*transforms, *geometry, v2.ColorJitter(0.4)], ragged=True)
    draws = augment.draw(batch["image"][0], seed=3)
    images = augment(batch["image"], batch["target"], data_keys=KEYS, draws=draws)[0]
    for index, (sample, calls) in enumerate(zip(samples, draws.as_torchvision(), strict=True)):
        expected, _ = eager(transforms, sample, draws.of(index))
        for function, arguments in calls:
            expected = getattr(v2.functional, function)(expected, **arguments)
        # A combined image may differ by a level, and the jitter and the nearest pixels of the affine map amplify that.
        assert_values(images[index].float(), expected.float(), atol=4, share=0.02)


def reference_mosaic(images, targets, size, centre, fill):
    """Mosaic of one sample, tile by tile, with torch's resize."""
    canvas = torch.full((3, size, size), float(fill))
    all_boxes, valid, all_masks = [], [], []
    y, x = centre
    for index, (image, record) in enumerate(zip(images, targets, strict=True)):
        height, width = image.shape[1:]
        half, longest = size // 2, max(height, width)
        new_height, new_width = (max((2 * side * half + longest) // (2 * longest), 1) for side in (height, width))
        top = y if index >= 2 else y - new_height
        left = x if index % 2 else x - new_width
        resized = torch.nn.functional.interpolate(image[None].float(), (new_height, new_width), mode="bilinear")[0].round()
        rows, columns = (
            (2 * torch.arange(new) + 1) * side // (2 * new) for side, new in ((height, new_height), (width, new_width))
        )
        masks = record["masks"][:, rows[:, None], columns].float()
        whole = torch.full((3 + len(masks), 3 * size, 3 * size), -1.0)
        whole[:3, size + top : size + top + new_height, size + left : size + left + new_width] = resized
        whole[3:, size + top : size + top + new_height, size + left : size + left + new_width] = masks
        seen = whole[:, size : 2 * size, size : 2 * size]
        canvas = torch.where(seen[:3] >= 0, seen[:3], canvas)
        all_masks.append(seen[3:] > 0)
        boxes = record["boxes"].clone().double()
        boxes = boxes * torch.tensor([new_width / width, new_height / height] * 2) + torch.tensor([left, top] * 2)
        clipped = boxes.clamp(0, size)
        areas, old = ((b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1]) for b in (clipped, boxes))
        lengths = clipped[:, 2:] - clipped[:, :2]
        valid.append((areas >= 0.1 * old) & (lengths >= 1).all(1))
        all_boxes.append(clipped)
    return canvas, torch.cat(all_boxes), torch.cat(valid), torch.cat(all_masks)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(8, 70))
def test_mosaic_is_the_mosaic_of_the_recipes(seed, size):
    (sample,) = samples_of(seed, 1, 4, keypoints=False)
    augment = gpuaug.fuse(Mosaic(size, fill=11))
    draws = augment.draw((1, 3, size, size), seed=seed)
    numbers = draws.of(0)["Mosaic"]
    centre = int(numbers["y"]), int(numbers["x"])
    assert all(size / 4 - 1 <= number < 3 * size / 4 for number in centre)
    image, boxes, valid, masks = reference_mosaic(sample["image"], sample["target"], size, centre, 11)
    result, found = Mosaic(size, fill=11)(sample["image"], sample["target"], draws=draws.of(0))
    assert_values(result.float(), image, atol=1)
    assert_values(found["boxes"], boxes.float(), atol=1e-3)
    assert_values(found["masks"].int(), masks.int())
    assert found["valid"].tolist() == valid.tolist()
    assert found["labels"].tolist() == [label for record in sample["target"] for label in record["labels"].tolist()]
    assert found["names"] == [name for record in sample["target"] for name in record["names"]]
    assert found["image_id"] == sample["target"][0]["image_id"]


def test_mixup_blends_and_weighs():
    images = [torch.full((3, 20, 40), 100, dtype=torch.uint8), torch.full((3, 30, 30), 200, dtype=torch.uint8)]
    targets = [{"boxes": torch.tensor([[1.0, 2, 30, 18]])}, {"boxes": torch.tensor([[0.0, 0, 30, 30], [3, 6, 9, 12]])}]
    image, record = MixUpBoxes(fill=0)(images, targets, draws={"MixUpBoxes": {"applies": 1, "weight": 0.25}})
    # The second image is resized to 20x20, and has 10 columns of fill on each side.
    expected = torch.full((3, 20, 40), 25.0)
    expected[:, :, 10:30] = 175
    assert_values(image.float(), expected)
    assert_values(record["boxes"], torch.tensor([[1.0, 2, 30, 18], [10, 0, 30, 20], [12, 4, 16, 8]]), atol=1e-4)
    assert record["weight"].tolist() == [0.25, 0.75, 0.75]


def test_draws_have_the_distributions_of_the_recipes():
    from scipy import stats

    augment = gpuaug.fuse([Mosaic(640), MixUpBoxes(alpha=3.0)])
    draws = augment.draw((4000, 3, 640, 640), seed=1)
    numbers = [draws.of(sample) for sample in range(4000)]
    for name in ("y_0", "x_0", "y_1", "x_1"):
        centres = np.array([number["Mosaic_0"][name] for number in numbers])
        assert stats.kstest((centres + 0.5) / 640, stats.uniform(0.25, 0.5).cdf).pvalue > 1e-3
    weights = [number["MixUpBoxes_1"]["weight"] for number in numbers]
    assert stats.kstest(weights, stats.beta(3, 3).cdf).pvalue > 1e-3


@pytest.mark.parametrize("data_keys", [KEYS, ["input", "tv_tensors"], None], ids=str)
def test_pipelines_without_combination_take_the_first_images(data_keys):
    """Also without data keys, as a stage without ``on`` calls a pipeline, for torchvision's tensors."""
    samples = samples_of(3, 3, 4, masks=None, keypoints=False, one_size=True)
    if data_keys != KEYS:
        for image, record in ((sample["image"][0], record) for sample in samples for record in sample["target"]):
            canvas_size = tuple(image.shape[1:])
            record["boxes"] = tv_tensors.BoundingBoxes(record["boxes"], format="XYXY", canvas_size=canvas_size)
    batch = collated(samples)
    augment = gpuaug.fuse([v2.Resize((24, 24)), v2.RandomHorizontalFlip()], ragged=True)
    draws = augment.draw(batch["image"][0], seed=1)
    images, targets = augment(batch["image"], batch["target"], data_keys=data_keys, draws=draws)
    first = gpuaug.collate_ragged([(sample["image"][0], sample["target"][0]) for sample in samples])
    expected, its_targets = augment(*first, data_keys=data_keys, draws=draws)
    assert_values(images, expected)
    for record, its_record in zip(targets, its_targets, strict=True):
        assert_targets(record, its_record)


def test_tensors_of_torchvision_beside_several_images_belong_to_the_first():
    images = [torch.randint(0, 256, (2, 3, 8, 9), dtype=torch.uint8) for _ in range(4)]
    masks = [tv_tensors.Mask(torch.arange(72).view(1, 8, 9) + number) for number in range(2)]
    for container in (masks, tuple(masks), {"map": tv_tensors.Mask(torch.cat(masks))}, [{"map": mask} for mask in masks]):
        flipped, result = gpuaug.fuse(v2.RandomHorizontalFlip(1.0))(images, container)
        assert_values(flipped, images[0].flip(-1))
        leaves = batches.leaves(result)
        assert_values(torch.cat([leaf.view(-1, 8, 9) for leaf in leaves]), torch.cat(masks).as_subclass(torch.Tensor).flip(-1))


def test_boxes_of_torchvision_have_the_new_canvas():
    samples = samples_of(5, 2, 4, masks=None, keypoints=False)
    for sample in samples:
        for image, record in zip(sample["image"], sample["target"], strict=True):
            record["boxes"] = tv_tensors.BoundingBoxes(record["boxes"], format="XYXY", canvas_size=tuple(image.shape[1:]))
    augment = gpuaug.fuse([Mosaic(40)])
    _, targets = augment(*collated(samples).values(), data_keys=KEYS)
    assert all(record["boxes"].canvas_size == (40, 40) for record in targets)


@pytest.mark.parametrize("name", ["mosaic, paste, mixup", "mixup"])
def test_packed_target_dicts_give_the_same(name):
    transforms = PIPELINES[name](0.6)
    images, targets = stacked(samples_of(8, 3, count_of(transforms), one_size=True)).values()
    packed = pack_targets({"target": targets}, lambda shape, dtype: None)["target"]
    augment = gpuaug.fuse([*transforms, v2.RandomHorizontalFlip()])
    draws = augment.draw(images[0].shape, seed=3)
    _, expected = augment(images, targets, data_keys=KEYS, draws=draws)
    _, result = augment(images, packed, data_keys=KEYS, draws=draws)
    for record, other in zip(result.unpacked(), expected, strict=True):
        assert_targets(record, other)


def test_other_targets_of_several_images_are_packed_and_unpacked_alike():
    first, second, third = (sample["target"] for sample in samples_of(8, 3, 4))
    batch = {"lists": [first, second[:1]], "list": third, "label": 1}
    packed = pack_targets(copy.deepcopy(batch), lambda shape, dtype: None)
    assert {name: type(value).__name__ for name, value in packed.items()} == {
        "lists": "PackedTargets",
        "list": "PackedTargets",
        "label": "int",
    }
    for records, others in zip(unpack_targets(packed)["lists"], batch["lists"], strict=True):
        for record, other in zip(records, others, strict=True):
            assert_targets(record, other)


@pytest.mark.parametrize("batch", [0, 1])
def test_small_batches(batch):
    images = [torch.zeros(batch, 3, 20, 30, dtype=torch.uint8) for _ in range(4)]
    targets = [[{"boxes": torch.zeros(0, 4)} for _ in range(4)] for _ in range(batch)]
    result, its_targets = gpuaug.fuse(Mosaic(32))(images, targets, data_keys=KEYS)
    assert result.shape == (batch, 3, 32, 32)
    assert len(its_targets) == batch


class Photos(torch.utils.data.Dataset):
    """Four encoded images per sample."""

    def __init__(self, files, targets):
        self.files, self.targets = files, targets

    def __len__(self):
        return 12

    def __getitem__(self, index):
        chosen = [(5 * index + 3 * number) % len(self.files) for number in range(4)]
        return {"image": [self.files[i] for i in chosen], "target": [self.targets[i] for i in chosen]}


class Pairs(Photos):
    """Eight encoded images per sample, for two mosaics."""

    def __getitem__(self, index):
        first, second = super().__getitem__(index), super().__getitem__(index + 1)
        return {name: first[name] + second[name] for name in first}


@pytest.fixture(scope="module")
def photos():
    import io

    from PIL import Image

    random = np.random.default_rng(1)
    files, targets = [], []
    for _ in range(7):
        height, width = random.integers(40, 200, 2).tolist()
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
        files.append(file.getvalue())
        targets.append(target_of(random, height, width))
    return Photos(files, targets)


def loader_of(photos, *transforms):
    files = torch.utils.data.DataLoader(photos, 3, collate_fn=gpuaug.collate_encoded)
    augment = gpuaug.fuse(v2.Compose([*transforms, v2.RandomHorizontalFlip()]))
    stage = gpuaug.TransformStage(augment, on={"image": "input", "target": "targets"})
    return gpuaug.StreamedLoader(files, [gpuaug.DecodeStage(), stage], device="cpu", seed=5)


def assert_batches(batches, expected):
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert_values(batch["image"], other["image"])
        for record, its_record in zip(batch["target"], other["target"], strict=True):
            assert_targets(record, its_record)


@pytest.mark.parametrize("transforms", [[Mosaic(64, p=0.7)], [Mosaic(64, p=0.7), MixUpBoxes(p=0.7)]], ids=["one", "two"])
def test_windows_give_the_pixels_of_whole_images(photos, transforms, monkeypatch):
    samples = photos if len(transforms) == 1 else Pairs(photos.files, photos.targets)
    batches = list(loader_of(samples, *transforms))
    monkeypatch.setattr(gpuaug.Fused, "windows_read", lambda self, shapes, image=0: None)
    assert_batches(batches, list(loader_of(samples, *transforms)))
    assert batches[0]["image"].shape == (3, 3, 64, 64)


def test_windows_are_the_visible_parts(photos):
    from gpuaug.core.ragged import Shapes

    sizes = np.array([(100, 200)] * 50)
    areas = []
    for image in range(4):
        torch.manual_seed(2)
        windows = gpuaug.fuse(Mosaic(64)).windows_read(Shapes(sizes, 3, "hwc"), image)
        assert (windows.table[:, :2] >= 0).all()
        assert (windows.table[:, :2] + windows.table[:, 2:] <= sizes).all()
        areas.append(windows.table[:, 2:].prod(1).mean() / sizes[0].prod())
    assert all(0.3 < area < 0.99 for area in areas)
    torch.manual_seed(2)
    windows = gpuaug.fuse(Mosaic(64, p=0)).windows_read(Shapes(sizes, 3, "hwc"), 1)
    assert (windows.table[:, 2:] == 1).all()


def test_resumed_loaders_continue(photos):
    transforms = Mosaic(64, p=0.7), MixUpBoxes(p=0.5)
    pairs = Pairs(photos.files, photos.targets)
    expected = list(loader_of(pairs, *transforms))
    loader = loader_of(pairs, *transforms)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    resumed = loader_of(pairs, *transforms)
    resumed.load_state_dict(state)
    assert_batches(list(resumed), expected[1:])


def test_mosaic_ends_at_an_epoch(photos):
    files = torch.utils.data.DataLoader(photos, 4, collate_fn=gpuaug.collate_encoded)
    on = {"image": "input", "target": "targets"}
    first = gpuaug.TransformStage(gpuaug.fuse([Mosaic(64)]), on=on)
    then = gpuaug.TransformStage(gpuaug.fuse(v2.Resize((64, 64)), ragged=True), on=on)
    loader = gpuaug.StreamedLoader(files, [gpuaug.DecodeStage(), gpuaug.until(1, first, then)], device="cpu")
    with_mosaic, without = list(loader), list(loader)
    for batch, position in zip(without, range(0, 12, 4), strict=True):
        expected = [len(photos[position + index]["target"][0]["boxes"]) for index in range(4)]
        assert [len(record["boxes"]) for record in batch["target"]] == expected
    assert with_mosaic[0]["image"].shape == without[0]["image"].shape


def test_explained():
    explanation = gpuaug.fuse(v2.Compose([Mosaic(64), MixUpBoxes(), v2.RandomHorizontalFlip()])).explain((8, 3, 50, 40))
    assert [line.modules for line in explanation.lines] == [("Mosaic_0",), ("MixUpBoxes_1",), ("RandomHorizontalFlip_2",)]
    assert explanation.launches == 4
    assert "mosaic of 4 images" in str(explanation)


def reference_paste(images, targets, chosen):
    """Copy-paste of one sample of images of one size."""
    first, second = targets
    pasted = second["masks"][chosen]
    cover = pasted.any(0)
    image = torch.where(cover, images[1], images[0])
    masks = torch.cat((first["masks"] & ~cover, second["masks"] & chosen[:, None, None]))
    before = torch.cat((first["masks"], second["masks"])).sum((1, 2))
    boxes, valid = [], []
    for mask, count in zip(masks, before, strict=True):
        y, x = torch.nonzero(mask, as_tuple=True)
        box = [x.min(), y.min(), x.max() + 1, y.max() + 1] if len(y) and len(y) >= 0.1 * count else [0] * 4
        boxes.append(torch.tensor(box))
        valid.append(len(y) > 0 and bool(len(y) >= 0.1 * count))
    return image, masks, boxes, valid


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2**24 - 1))
def test_copy_paste_is_that_of_the_recipe(seed, number):
    (sample,) = samples_of(seed, 1, 2, one_size=True, keypoints=False)
    draws = {"CopyPaste": {"applies": 1.0, "seed": float(number)}}
    image, record = CopyPaste()(sample["image"], sample["target"], draws=draws)
    count = len(sample["target"][0]["boxes"])
    chosen = record["masks"][count:].flatten(1).any(1)  # masks of random pixels are never empty
    expected, masks, boxes, valid = reference_paste(sample["image"], sample["target"], chosen)
    assert_values(image, expected)
    assert_values(record["masks"].int(), masks.int())
    assert record["valid"].tolist() == valid
    if boxes:
        assert_values(record["boxes"], torch.stack(boxes).float())


def test_objects_are_pasted_with_probability_one_half():
    count = 200
    masks = torch.eye(count, dtype=torch.bool)[:, None]
    images, targets = [torch.zeros(1, 1, count)] * 2, [{"masks": masks[:0]}, {"masks": masks}]
    draws = [{"CopyPaste": {"applies": 1, "seed": seed}} for seed in range(20)]
    counts = [int(CopyPaste()(images, targets, draws=each)[1]["masks"].sum()) for each in draws]
    assert 0.48 < sum(counts) / (20 * count) < 0.52
    assert all(70 < each < 130 for each in counts)
