"""Decoding of windows: batches equal those of whole images bit for bit, and whole images are decoded where more is read."""

from collections import namedtuple
from contextlib import nullcontext

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from kornia.constants import DataKey
from support.comparison.values import assert_values
from support.files import nvjpeg_double
from support.files.decode_devices import on_each_device
from support.files.encoded import by_pil, encoded, mixed_files, psnr_db
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug import ArgumentError, DecodeStage, GpuAugWarning, StreamedLoader, TransformStage, collate_encoded, fuse
from gpuaug.core.encoded import Format
from gpuaug.core.ragged import Shapes
from gpuaug.decode import decoder, layout
from gpuaug.stages.base import BoundStage, _BoundTransform

FILES = [file for file in mixed_files() if min(by_pil(file).shape[:2]) > 12] * 2
CROP = (K.RandomResizedCrop((16, 20), scale=(0.1, 0.5)), K.RandomHorizontalFlip())
PIPELINES = {
    "Kornia's crop": lambda: K.AugmentationSequential(*CROP, K.ColorJitter(0.2, 0.2, 0.2, 0.1)),
    "torchvision's crop": lambda: v2.Compose([v2.RandomResizedCrop(16, antialias=True), v2.ToDtype(torch.float32, scale=True)]),
    "RandomCrop": lambda: v2.RandomCrop(16, padding=3, pad_if_needed=True),
    "CenterCrop": lambda: v2.CenterCrop(14),
    "a fallback behind": lambda: K.AugmentationSequential(*CROP, K.RandomMedianBlur(7, p=1.0)),
}


@pytest.fixture
def asked(monkeypatch):
    """Windows that stages gave, in order."""
    windows = _BoundTransform.windows
    given = []

    def noted(stage, *arguments, **keywords):
        given.append(windows(stage, *arguments, **keywords))
        return given[-1]

    monkeypatch.setattr(_BoundTransform, "windows", noted)
    return given


def whole_images(monkeypatch):
    monkeypatch.setattr(_BoundTransform, "windows", BoundStage.windows)


def batches(device, stages, *, files=FILES, members=None, **options):
    """What a loader yields, and the number of pixels that it left out."""
    labels = torch.arange(len(files))
    found = []
    with StreamedLoader(members or [[collate_encoded(files), labels]] * 2, stages, device=device, seed=3, **options) as loader:
        found += [[member.clone() if isinstance(member, torch.Tensor) else member for member in batch] for batch in loader]
        return found, loader.stats().undecoded_pixels


def assert_equal(one, other):
    for first, second in zip(one, other, strict=True):
        for a, b in zip(first, second, strict=True):
            assert_values(a, b)


@on_each_device
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_batches_are_those_of_whole_images(device, pipeline, monkeypatch):
    monkeypatch.setattr(decoder, "POISON", 0xAA)
    left = pytest.warns(GpuAugWarning, match="is not fused") if "fallback" in pipeline else nullcontext()
    with left:
        stages = [DecodeStage(), fuse(PIPELINES[pipeline](), ragged=True)]
    made, undecoded = batches(device, stages)
    whole_images(monkeypatch)
    expected, none = batches(device, stages)
    assert_equal(made, expected)
    assert undecoded > none == 0


@on_each_device
@pytest.mark.parametrize(("options", "views"), [({"channels": 1}, 3), ({"min_side": 16}, 1), ({"exif": False}, 3)])
def test_options_of_stages_do_not_change_what_a_window_holds(device, options, views, monkeypatch):
    stages = [DecodeStage(**options), fuse(K.AugmentationSequential(*CROP), ragged=True, views=views)]
    made, undecoded = batches(device, stages)
    whole_images(monkeypatch)
    assert_equal(made, batches(device, stages)[0])
    assert undecoded > 0


@pytest.mark.filterwarnings("ignore:The copy of a batch does not overlap")  # masks are not page-locked
@pytest.mark.filterwarnings("ignore:.*may not match the images")  # images of all orientations
@on_each_device
def test_targets_follow_as_they_do_whole_images(device, monkeypatch):
    generator = torch.Generator("cpu").manual_seed(0)
    sizes = [by_pil(file).shape[:2] for file in FILES]
    boxes = [torch.tensor([[1.0, 2.0, 9.0, 11.0]]).repeat(2, 1) + index % 3 for index in range(len(FILES))]
    targets = [
        {
            "boxes": tv_tensors.BoundingBoxes(each, format="XYXY", canvas_size=size),
            "masks": tv_tensors.Mask(torch.randint(0, 2, (2, *size), generator=generator, dtype=torch.uint8)),
            "labels": torch.arange(2),
        }
        for each, size in zip(boxes, sizes, strict=True)
    ]
    members = [[collate_encoded(FILES), targets]]
    pipeline = v2.Compose([v2.RandomResizedCrop(24, scale=(0.1, 0.6)), v2.RandomHorizontalFlip()])
    stages = [DecodeStage(), fuse(pipeline, ragged=True)]
    (((images, found),), undecoded) = batches(device, stages, members=members)
    whole_images(monkeypatch)
    (((expected, wanted),), _) = batches(device, stages, members=members)
    assert_values(images, expected)
    for one, other in zip(found, wanted, strict=True):
        for name in one:
            assert_values(one[name], other[name], about=name)
            assert type(one[name]) is type(other[name])
    assert undecoded > 0


@on_each_device
def test_a_bad_image_is_replaced_with_the_window_of_the_other_images_size(device, monkeypatch):
    cut = [FILES[0][:200] + b"\xff\xd9", FILES[1][: len(FILES[1]) // 2] + b"\xff\xd9"]
    files = [FILES[0], b"no image", encoded(64, 40, "PNG"), *cut]
    stages = [DecodeStage(on_error="replace"), fuse(K.AugmentationSequential(*CROP), ragged=True)]
    made, undecoded = batches(device, stages, files=files)
    whole_images(monkeypatch)
    assert_equal(made, batches(device, stages, files=files)[0])
    assert undecoded > 0


Item = namedtuple("Item", "images other")
AUGMENT = fuse(K.AugmentationSequential(*CROP), ragged=True)
READS_MORE = {
    "a stage before": ([TransformStage(lambda images: images, on=0), AUGMENT], list),
    "a stage before that is given the whole batch": ([TransformStage(lambda batch: batch, on=None), AUGMENT], list),
    "a stage that keeps its input": ([TransformStage(AUGMENT, into=2)], list),
    "no fused stage": ([TransformStage(lambda images: torch.stack([image[:, :9, :9] for image in images]))], list),
    "a function around the fused pipeline": ([TransformStage(lambda images: AUGMENT(images))], list),
    "a stage that reads what another adds": (
        [
            TransformStage(lambda label: label, on=1, into=2),
            TransformStage(lambda images, label: images, on=(0, 2), into=0),
            AUGMENT,
        ],
        list,
    ),
    "one member in two places": ([TransformStage(AUGMENT, on="images")], lambda batch: {"images": batch[0], "same": batch[0]}),
    "no crop first": ([fuse(K.AugmentationSequential(K.Resize((20, 20)), K.RandomCrop((8, 8))), ragged=True)], list),
}


@pytest.mark.parametrize("case", READS_MORE)
def test_whole_images_are_decoded_where_more_than_a_window_is_read(case, asked):
    stages, form = READS_MORE[case]
    members = [form((collate_encoded(FILES), torch.arange(len(FILES))))]
    with StreamedLoader(members, [DecodeStage(), *stages], device="cpu") as loader:
        for _ in loader:
            pass
    assert loader.stats().undecoded_pixels == 0
    assert not any(windows is not None for windows in asked)


READS_A_WINDOW = {
    "a tensor alone": ([AUGMENT], lambda batch: batch[0]),
    "a mapping": ([TransformStage(AUGMENT, on="image")], lambda batch: {"image": batch[0], "label": batch[1]}),
    "a record": ([TransformStage(AUGMENT, on="images")], lambda batch: Item(*batch)),
    "data keys": ([TransformStage(AUGMENT, on={0: "input"})], list),
    "data keys in upper case": ([TransformStage(AUGMENT, on={0: "IMAGE"})], list),
    "data keys of Kornia": ([TransformStage(AUGMENT, on={0: DataKey.INPUT})], list),
    "stages behind": ([AUGMENT, TransformStage(lambda images: images + 1), TransformStage(lambda batch: batch, on=None)], list),
    "a stage before on another member": ([TransformStage(lambda labels: labels + 1, on=1), AUGMENT], list),
    "the decoder last": ([AUGMENT, DecodeStage()], list),
}


@pytest.mark.parametrize("case", READS_A_WINDOW)
def test_windows_are_decoded_where_one_stage_alone_reads_the_images(case):
    stages, form = READS_A_WINDOW[case]
    decode = [] if isinstance(stages[-1], DecodeStage) else [DecodeStage()]
    members = [form((collate_encoded(FILES), torch.arange(len(FILES))))]
    with StreamedLoader(members, [*decode, *stages], device="cpu") as loader:
        for _ in loader:
            pass
    sizes = np.array([by_pil(file).shape[:2] for file in FILES])
    assert 0.2 * sizes.prod(1).sum() < loader.stats().undecoded_pixels < sizes.prod(1).sum()


@on_each_device
def test_two_members_have_windows_of_their_own(device, monkeypatch):
    members = [[collate_encoded(FILES), collate_encoded(FILES[::-1])]]
    stages = [DecodeStage(), TransformStage(AUGMENT, on=0), TransformStage(AUGMENT, on=1)]
    made, undecoded = batches(device, stages, members=members)
    whole_images(monkeypatch)
    assert_equal(made, batches(device, stages, members=members)[0])
    assert undecoded > 0


def test_a_picture_shows_whole_images():
    loader = StreamedLoader([[collate_encoded(FILES), torch.arange(len(FILES))]], [DecodeStage(), AUGMENT], device="cpu")
    gpuaug.show(loader)
    assert loader.stats().undecoded_pixels == 0


LARGE = [encoded(120 + 60 * number, 400 - 30 * number, seed=number, quality=95, orientation=1 + number) for number in range(8)]
LARGE += [encoded(500, 300, "PNG"), encoded(300, 500, progressive=True), encoded(90, 500, mode="L"), encoded(30, 40)]
LARGE += FILES[:3]


def scaled(device, monkeypatch, pipeline, members=None, **options):
    """(batches, layouts) of a loader that decodes at the smallest scale."""
    layouts, made = [], layout.Layout.__init__

    def noted(self, *arguments, **keywords):
        made(self, *arguments, **keywords)
        layouts.append(self)

    monkeypatch.setattr(layout.Layout, "__init__", noted)
    stages = [DecodeStage(scale="auto"), fuse(pipeline, ragged=True, **options)]
    return batches(device, stages, files=LARGE, members=members)[0], layouts


@pytest.mark.parametrize("on_card", [False, True])
@pytest.mark.parametrize("crop", [K.RandomResizedCrop((24, 20)), v2.RandomResizedCrop(20, scale=(0.1, 1.0))])
def test_windows_are_decoded_at_the_smallest_scale_that_keeps_the_size_of_the_result(on_card, crop, monkeypatch):
    if on_card:
        nvjpeg_double.use(monkeypatch)
    made, layouts = scaled("cpu", monkeypatch, crop)
    out = np.array(made[0][0].shape[2:])
    scales = set()
    for each in layouts:
        for info, window, sides in zip(each.infos, each.windows, each.shapes.sizes, strict=True):
            jpeg = info.format in (Format.JPEG, Format.PROGRESSIVE_JPEG, Format.OTHER_JPEG)
            assert tuple(sides) == tuple(-(-side // info.scale) for side in upright(info))
            if info.scale > 1:
                scales.add(info.scale)
                assert jpeg
                assert (window[2:] >= out).all()
            elif jpeg and not on_card:
                assert (window[2:] < 2 * out + 2).any()  # sides are rounded anew at another scale
    assert scales == (set() if on_card else {2, 4, 8})


def upright(info):
    sides = (info.height, info.width)
    return sides[::-1] if info.orientation > 4 else sides


def test_pixels_at_a_smaller_scale_are_close_to_those_of_the_whole_image(monkeypatch):
    pipeline = v2.RandomResizedCrop(20, scale=(0.9, 1.0), ratio=(1.0, 1.0))
    made, layouts = scaled("cpu", monkeypatch, pipeline)
    expected, _ = batches("cpu", [DecodeStage(), fuse(pipeline, ragged=True)], files=LARGE)
    shrunk = layouts[0].scales > 1
    assert shrunk.sum() > 5
    assert psnr_db(made[0][0][shrunk].numpy(), expected[0][0][shrunk].numpy()) > 23


@pytest.mark.filterwarnings("ignore:.*may not match the images")
@pytest.mark.parametrize("case", ["boxes beside the images", "views"])
def test_a_smaller_scale_is_for_images_alone(case, monkeypatch):
    boxes = [{"boxes": torch.tensor([[1.0, 2.0, 9.0, 11.0]])} for _ in LARGE]
    pipeline = v2.RandomResizedCrop(20)
    options = {"views": 2} if case == "views" else {}
    members = None if options else [[collate_encoded(LARGE), boxes]]
    if members:
        keys = {0: "input", 1: "targets"}
        stages = [DecodeStage(scale="auto"), TransformStage(fuse(pipeline, ragged=True), on=keys)]
        made, _ = batches("cpu", stages, members=members)
        expected, _ = batches("cpu", [DecodeStage(), stages[1]], members=members)
        assert_values(made[0][0], expected[0][0])
    else:
        made, layouts = scaled("cpu", monkeypatch, pipeline, **options)
        assert all((each.scales == 1).all() for each in layouts)


@pytest.mark.parametrize("crop", [K.RandomResizedCrop((7, 9), scale=(0.05, 1.0)), v2.RandomResizedCrop(8, scale=(0.05, 1.0))])
def test_windows_at_a_smaller_scale_are_those_of_the_whole_image(crop):
    """Many sizes: a window that is drawn again at the smaller size may be another candidate, elsewhere in the image."""
    random = np.random.default_rng(0)
    full = random.integers(60, 500, (4000, 2))
    scales = 2 ** random.integers(0, 4, 4000)[:, None]
    sizes = -(-full // scales)
    fused = fuse(crop, ragged=True)
    torch.manual_seed(0)
    whole = fused.windows_read(Shapes(full, 3, "hwc")).table
    torch.manual_seed(0)
    small = fused.windows_read(Shapes(sizes, 3, "hwc", full_sizes=full)).table
    assert (np.abs(small - whole / scales) <= 1.0).all()
    assert (small[:, 2:] >= whole[:, 2:] // scales).all(), "smaller than the size of the result"
    assert (small[:, :2] + small[:, 2:] <= sizes).all()


def test_a_scale_and_a_least_side_exclude_each_other():
    with pytest.raises(ArgumentError, match=r"min_side must be left out with scale='auto', got 40"):
        DecodeStage(scale="auto", min_side=40)
    with pytest.raises(ArgumentError, match="scale must be"):
        DecodeStage(scale=2)


@pytest.mark.parametrize("damaged", [(), (1,), (0, 3)])
def test_decoding_parameters_of_the_engines_are_used_again(damaged, monkeypatch):
    """Also after a call that fails, whose files are decoded again in smaller calls."""
    doubles = []

    class Engines(nvjpeg_double.BatchDecoder):
        def __init__(self, device):
            super().__init__(device)
            doubles.append(self)

    nvjpeg_double.use(monkeypatch, Engines)
    files = [encoded(40 + number, 30, seed=number) for number in range(4)]
    for index in damaged:
        table = files[index].find(b"\xff\xc4")
        files[index] = files[index][: table + 5] + b"\xff" * 16 + files[index][table + 21 :]  # too many Huffman codes
    stages = [DecodeStage(on_error="replace", max_replaced=1), fuse(v2.RandomResizedCrop(16, scale=(0.1, 0.5)), ragged=True)]
    made, undecoded = batches("cpu", stages, files=files)
    assert len(made) == 2
    assert undecoded > 0
    assert [double.windows for double in doubles] == [{}]
