"""Images of different sizes: each as Kornia makes it by itself, from the same draws."""

import random
import re

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches.clips import FRAMES, clips, clips_of
from support.batches.ragged import SIZES, copies, images_of, pack, targets_of
from support.comparison.values import assert_values
from support.ops.pipelines import by_the_batch
from support.ops.skipped import half_the_samples
from torch.utils.data import DataLoader
from torchvision.transforms import v2

import gpuaug
from gpuaug.core.ragged import Ragged, Shapes
from gpuaug.fusion.table import rows as table_rows

EXACT = {
    "centre": lambda: [K.CenterCrop((21, 30))],
    "crop": lambda: [K.RandomCrop((20, 25))],
    "crop, padded": lambda: [K.RandomCrop((30, 32), padding=(3, 5, 2, 7))],
    "crop, padded if needed": lambda: [K.RandomCrop((60, 60), pad_if_needed=True, fill=0.25)],
    "crop, reflected": lambda: [K.RandomCrop((30, 32), padding=7, padding_mode="reflect")],
    "pad": lambda: [K.PadTo((100, 125), pad_value=0.5)],
    "flips, crop, flip": lambda: [
        K.RandomHorizontalFlip(),
        K.RandomVerticalFlip(),
        K.RandomCrop((20, 20)),
        K.RandomHorizontalFlip(),
    ],
    "erased": lambda: [K.CenterCrop(24), K.RandomErasing(p=1.0)],
}

CLOSE = {
    "resized crop": lambda: [K.RandomResizedCrop((24, 28))],
    "resized crop, squares": lambda: [K.RandomResizedCrop((24, 28), align_corners=False)],
    "resized crop, nearest": lambda: [K.RandomResizedCrop((24, 28), resample="nearest")],
    "resized crop, narrow": lambda: [K.RandomResizedCrop((16, 20), scale=(0.9, 1.0), ratio=(3.0, 4.0))],
    "resize": lambda: [K.Resize((20, 31))],
    "short side and centre": lambda: [K.Resize(32), K.CenterCrop(28)],
    "long side and pad": lambda: [K.Resize(30, side="long"), K.PadTo((30, 30))],
    "flip, pad, resize": lambda: [K.RandomHorizontalFlip(), K.PadTo((100, 125)), K.Resize((32, 32))],
    "rotate and crop": lambda: [K.RandomRotation(30.0, p=0.7), K.CenterCrop(24)],
    "affine and crop": lambda: [
        K.RandomAffine(20.0, translate=(0.2, 0.1), scale=(0.8, 1.2), shear=10.0),
        K.RandomCrop((24, 24)),
    ],
    "perspective and crop": lambda: [K.RandomPerspective(0.4, p=1.0), K.RandomCrop((24, 24))],
    "crop and CLAHE": lambda: [K.RandomCrop((20, 25)), K.RandomClahe((1.0, 9.0), grid_size=(3, 4))],
    "a classifier's": lambda: [
        K.RandomResizedCrop((24, 24)),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.4, 0.4, 0.4, 0.1),
        K.RandomGaussianBlur((5, 5), (0.1, 2.0), p=0.5),
        K.Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.2)),
    ],
}


def container(modules):
    return K.AugmentationSequential(*modules)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=6),
    channels=st.sampled_from([1, 3]),
    layout=st.sampled_from(["chw", "hwc"]),
    seed=st.integers(0, 2**62),
)
@settings(max_examples=10, deadline=None, derandomize=True)
def test_ragged_images_of_any_size_equal_each_alone(sizes, channels, layout, seed):
    images = images_of(sizes, channels)
    pipeline = container([K.RandomHorizontalFlip(), K.RandomResizedCrop((9, 11)), K.RandomVerticalFlip()])
    augment, batch = gpuaug.fuse(pipeline, ragged=True), pack(images, layout)
    together = augment(batch, draws=augment.draw(batch, seed=seed))
    single = gpuaug.fuse(pipeline)
    for index, image in enumerate(images):
        dense = copies(image, len(images))
        assert_values(together[index], single(dense, draws=single.draw(dense.shape, seed=seed))[index])


AHEAD = {
    "a classifier's": CLOSE["a classifier's"],
    "misses": lambda: [K.RandomResizedCrop((16, 20), scale=(0.6, 1.6)), K.RandomErasing(ratio=(0.2, 1.5), p=0.9)],
    "a flip before misses": lambda: [K.RandomHorizontalFlip(), K.RandomResizedCrop((16, 20), scale=(0.6, 1.6))],
    "two crops": lambda: [
        K.RandomResizedCrop((30, 30), scale=(0.6, 1.6)),
        K.RandomInvert(),
        K.RandomResizedCrop((16, 16), scale=(0.6, 1.6)),
    ],
    "same": lambda: [K.RandomHorizontalFlip(same_on_batch=True), K.RandomResizedCrop((16, 16), same_on_batch=True)],
    "moved before and after": lambda: [
        K.RandomPerspective(0.4),
        K.RandomCrop((30, 30)),
        K.RandomGrayscale(),
        K.RandomVerticalFlip(),
        K.RandomGaussianBlur((3, 3), (0.5, 2.0)),
        K.RandomRotation(20.0),
    ],
    "drawn sizes": lambda: [
        v2.RandomZoomOut(),
        v2.RandomResize(20, 60, antialias=False),
        v2.RandomCrop((30, 30), pad_if_needed=True),
        K.RandomGrayscale(),
        v2.ScaleJitter((20, 20), (0.5, 1.5), antialias=False),
        v2.RandomCrop((16, 16), pad_if_needed=True),
    ],
    "policies": lambda: [v2.RandomResizedCrop((16, 20)), v2.RandAugment(), v2.AutoAugment(), v2.ToDtype(torch.float32, True)],
    "Kornia's policies": lambda: [
        K.RandomCrop((16, 20)),
        K.auto.TrivialAugment([[("shear_x", -0.3, 0.3)], [("translate_y", -0.4, 0.4)]]),
        K.auto.TrivialAugment([[("posterize", 4.0, 8.0)], [("rotate", -30.0, 30.0)]]),
    ],
    "noise": lambda: [K.RandomCrop((20, 20)), K.RandomGaussianNoise()],
    "whole batches": lambda: [by_the_batch(K.RandomAffine(9.0, p=0.7)), K.RandomCrop((24, 24))],
}


PIPELINES = {
    **EXACT,
    **CLOSE,
    **AHEAD,
    "antialiased": lambda: [v2.RandomResizedCrop((12, 14))],
    "gates": lambda: [
        v2.RandomApply([v2.RandomHorizontalFlip(1.0), v2.RandomVerticalFlip(1.0)], p=0.5),
        v2.RandomResizedCrop(16),
        v2.RandomApply([v2.ColorJitter(0.4, 0.4), v2.RandomInvert(1.0)], p=0.5),
    ],
    "light": lambda: [
        K.RandomResizedCrop((12, 14)),
        K.RandomGaussianIllumination((0.3, 0.5), p=0.8),
        K.RandomLinearIllumination(0.4, p=0.8),
        K.RandomLinearCornerIllumination(0.4, p=0.8),
    ],
    "colours first": lambda: [v2.RandomInvert(), v2.RandomHorizontalFlip(), v2.RandomResizedCrop(12)],
    "turned first": lambda: [K.RandomRotation(30.0), K.RandomInvert(), K.RandomResizedCrop((12, 14))],
    "skipped crop": lambda: [K.Resize((20, 24)), half_the_samples(K.RandomResizedCrop((20, 24)))],
    "skipped crop, padded": lambda: [K.RandomResizedCrop((20, 24)), by_the_batch(K.RandomCrop((20, 24), padding=4))],
}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.every(2)
def test_each_image_of_a_ragged_batch_equals_a_batch_of_it_alone(name):
    """Images and clips with their targets. Every pipeline has a layout, a type and a number of views and frames of its own."""
    choices = random.Random(name)
    views, frames = choices.choice([1, 2]), 1 if name == "noise" else choices.choice([1, 1, 2])
    layout, dtype = choices.choice(["chw", "hwc"]), choices.choice([torch.uint8, torch.uint8, torch.uint16, torch.int16])
    dtype = torch.uint8 if name in ("policies", "Kornia's policies", "colours first") else dtype
    sizes = SIZES[: 5 if frames == 1 else 3]
    images = images_of([size for size in sizes for _ in range(frames)], dtype=dtype)
    targets, keys = targets_of(images[::frames]), ["input", "targets"]
    augment, single = (gpuaug.fuse(PIPELINES[name](), ragged=ragged, views=views) for ragged in (True, False))

    def batch_from(first):
        """The batch, turned so that another image comes first."""
        batch = pack(images[first * frames :] + images[: first * frames], layout)
        return Ragged(batch.data, batch.places, Shapes(batch.shapes.sizes, 3, layout, frames=frames * (frames > 1)))

    batch = batch_from(0)
    draws = augment.draw(batch, seed=5, dtype=dtype)
    got, records = augment(batch, targets, data_keys=keys, draws=draws)
    for index in range(len(sizes)):
        video = torch.stack(images[index * frames : (index + 1) * frames])
        dense = copies(video if frames > 1 else video[0], len(sizes))
        draws = single.draw(dense.shape, seed=5, dtype=dtype)
        alone, expected = single(dense, [targets[index]] * len(sizes), data_keys=keys, draws=draws)
        for sample in range(index, len(got), len(sizes)):
            assert_values(got[sample], alone[sample], atol=1e-6 if got.is_floating_point() else 0)
            assert list(records[sample]) == [*targets[index], "valid"]
            for key, value in expected[sample].items():
                assert_values(records[sample][key], value, about=key)
    # Numbers are drawn ahead, before the sizes are known that they turn into draws with.
    turns = [batch_from(number % 3) for number in range(5)]
    torch.manual_seed(0)
    results = [augment(turn, data_keys=["input"]) for turn in turns]
    torch.manual_seed(0)
    for turn, made in zip(turns, results, strict=True):
        assert_values(augment(turn, draws=augment.draw(turn, dtype=dtype)), made)


def test_ragged_draws_are_prefetched_for_many_batches():
    augment, batch = gpuaug.fuse(container(CLOSE["resized crop"]()), ragged=True), pack(images_of([(9, 8), (7, 9)]))
    sources = []

    class Counted(table_rows.Sampler):
        def __init__(self, keys, *args, **options):
            sources.append(len(keys))
            super().__init__(keys, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_rows, "Sampler", Counted)
        for _ in range(150):
            augment(batch)
    assert sources == [1, 2, 4, 8, 16, 32, 64, 64]


@pytest.mark.parametrize("modules", [[K.RandomResizedCrop((24, 24))], [K.RandomHorizontalFlip(), K.CenterCrop(24)]])
def test_ragged_batch_without_images(modules):
    shapes = Shapes(np.empty((0, 2), dtype=np.int64), 3, "hwc")
    none = Ragged(torch.empty(0, dtype=torch.uint8), torch.empty(0, 3, dtype=torch.int64), shapes)
    augment = gpuaug.fuse(modules, ragged=True, views=2)
    for _ in range(4):
        assert augment(none).shape == (0, 3, 24, 24)


def test_explain_counts_the_bytes_of_the_last_ragged_batch():
    augment = gpuaug.fuse([K.RandomResizedCrop((24, 24)), K.RandomInvert()], ragged=True)
    assert str(augment.explain()).startswith("images (256, 3, any, any), uint8\n")
    assert augment.explain().lines[0].read_bytes is None, "nobody knows yet"
    assert len(augment.explain().notes) == 1, "that windows of images are decoded"
    augment(pack(images_of()))
    (line,) = augment.explain().lines
    assert augment.explain(pack(images_of())).lines == (line,)
    assert (line.launches, line.read_bytes, line.written_bytes) == (2, sum(h * w * 3 for h, w in SIZES), 5 * 3 * 24 * 24 * 4)


@pytest.mark.parametrize(
    ("modules", "options", "launches"),
    [
        ([K.RandomResizedCrop((24, 24))], {"views": 2}, 2),
        ([K.RandomResizedCrop((24, 24)), K.ColorJitter(0.4, 0.4, 0.4)], {}, 3),
        # What the host has to draw for each batch, it sends along with everything else.
        ([K.CenterCrop(8)], {}, 1),
        ([K.RandomResizedCrop((24, 24), same_on_batch=True)], {}, 1),
        ([K.RandomHorizontalFlip(), K.RandomResizedCrop((24, 24))], {}, 1),
        ([K.RandomResizedCrop((24, 24)), K.RandomGaussianNoise()], {}, 1),
    ],
)
def test_explain_counts_the_crops_launch(modules, options, launches):
    assert gpuaug.fuse(modules, ragged=True, **options).explain().launches == launches


def test_ragged_batches_from_workers_reach_the_stage():
    samples = images_of()
    loader = DataLoader(samples, batch_size=2, num_workers=1, collate_fn=pack)
    augment = gpuaug.fuse(K.CenterCrop(20), ragged=True)
    got = torch.cat(list(gpuaug.StreamedLoader(loader, [gpuaug.TransformStage(augment, on=None)], device="cpu")))
    assert_values(got, torch.cat([gpuaug.fuse(K.CenterCrop(20))(image[None]) for image in samples]))


def test_conversions_to_rgb_leave_rgb_images_as_they_are_and_repeat_grey():
    def to_rgb(image):
        if image.mode != "RGB":
            image = image.convert("RGB")
        return image

    images = images_of([(40, 52), (64, 40)])
    crop = v2.RandomResizedCrop((16, 20))
    expected = gpuaug.fuse(crop, ragged=True)
    for first in (v2.RGB(), v2.Lambda(lambda image: image.convert("RGB")), to_rgb):
        augment = gpuaug.fuse(v2.Compose([first, crop]), ragged=True)
        assert augment.explain().launches == 1
        results = []
        for each in (expected, augment):
            torch.manual_seed(0)
            results.append((each(pack(images)), each.windows_read(pack(images).shapes)))
        assert_values(results[1][0], results[0][0])
        assert (results[0][1].table == results[1][1].table).all()
        grey = images_of([(40, 52), (64, 40)], 1)
        for pipeline in ([first, crop], [crop, first]):
            torch.manual_seed(0)
            one_channel = expected(pack(grey))
            torch.manual_seed(0)
            assert_values(gpuaug.fuse(v2.Compose(pipeline), ragged=True)(pack(grey)), one_channel.expand(-1, 3, -1, -1))


# Clips


def test_a_ragged_pipeline_takes_images_and_clips_of_one_size():
    """As a stage that decodes gives them where all have one."""
    videos = clips(2, FRAMES, 3, 20, 24).permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    ragged, dense = (gpuaug.fuse(v2.RandomResizedCrop(12), ragged=each) for each in (True, False))
    for given_images in (videos, videos[:, 0]):
        draws = dense.draw(given_images.shape, seed=0)
        assert_values(ragged(given_images, draws=draws), dense(given_images, draws=draws))


@settings(max_examples=8)
@given(data=st.data())
def test_dicts_of_the_frames_of_ragged_clips_equal_one_dict_per_clip(data):
    frames = data.draw(st.integers(2, 4))
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4))
    counts = data.draw(st.lists(st.integers(0, 3), min_size=len(sizes) * frames, max_size=len(sizes) * frames))
    batch = gpuaug.collate_ragged([(torch.randint(256, (frames, 3, *size), dtype=torch.uint8),) for size in sizes])[0]
    per_frame = [
        {
            "boxes": torch.rand(count, 4) * 20,
            "labels": torch.randint(9, (count,)),
            "masks": torch.randint(0, 2, (count, *sizes[index // frames]), dtype=torch.uint8),
            "keypoints": torch.rand(count, 2, 2) * 30,
        }
        for index, count in enumerate(counts)
    ]
    clips = [per_frame[start : start + frames] for start in range(0, len(per_frame), frames)]
    per_clip = [{key: torch.cat([record[key] for record in clip]) for key in clip[0]} for clip in clips]
    augment = gpuaug.fuse([v2.RandomHorizontalFlip(), v2.RandomResizedCrop(12), v2.RandomRotation(20)], ragged=True)
    draws = augment.draw(batch, seed=0)
    _, of_clips = augment(batch, per_clip, data_keys=["input", "targets"], draws=draws)
    _, of_frames = augment(batch, clips, data_keys=["input", "targets"], draws=draws)
    for clip, whole in zip(of_frames, of_clips, strict=True):
        assert len(clip) == frames
        for key, value in whole.items():
            assert_values(torch.cat([record[key] for record in clip]), value)


def test_boxes_as_shares_of_ragged_clips():
    batch = clips_of("hwc")
    shares = torch.tensor([[0.5, 0.5, 0.4, 0.2]])
    augment = gpuaug.fuse(v2.Resize((12, 16)), ragged=True, boxes="cxcywh_share")
    _, got = augment(batch, [{"boxes": shares + index / 50} for index in range(3)], data_keys=["input", "targets"])
    for index, record in enumerate(got):
        assert_values(record["boxes"], shares + index / 50, atol=1e-6)


def test_windows_that_are_read_are_those_of_the_clips():
    batch = clips_of("hwc")
    augment = gpuaug.fuse([v2.RandomResizedCrop(12)], ragged=True)
    windows = augment.windows_read(batch.shapes)
    assert windows.table.shape == (3 * FRAMES, 4)
    assert (windows.table.reshape(3, FRAMES, 4) == windows.table.reshape(3, FRAMES, 4)[:, :1]).all()
    assert len({tuple(row) for row in windows.table.tolist()}) == 3


def test_ragged_clips_are_shown():
    batch = clips_of("hwc")
    loader = gpuaug.StreamedLoader([(batch, torch.arange(3))], [gpuaug.fuse(v2.Resize((12, 14)), ragged=True)], device="cpu")
    figure = gpuaug.show(loader, n=2)
    assert len(figure.axes) == 4


# Refusals


def raises(text):
    return pytest.raises(gpuaug.ArgumentError, match=re.escape(text))


NOT_SIZED = {
    "as its end": (
        [K.RandomHorizontalFlip()],
        "pipeline must give images one size with ragged=True, got RandomHorizontalFlip_0 at the end.",
    ),
    "of one side": ([K.Resize(32)], "pipeline must give images one size with ragged=True, got Resize_0 at the end."),
    "blur first": (
        [K.RandomInvert(), K.RandomGaussianBlur((3, 3), (0.1, 2.0)), K.CenterCrop(8)],
        "one size with ragged=True, got RandomGaussianBlur_1: it reads other pixels of an image, or their coordinates. Put",
    ),
    "levels first": (
        [K.RandomEqualize(), K.CenterCrop(8)],
        "got RandomEqualize_0: it reads other pixels of an image, or their",
    ),
    "erasing first": ([K.RandomErasing(), K.CenterCrop(8)], "got RandomErasing_0: it reads other pixels of an image, or their"),
    "mix first": ([K.RandomMixUpV2(), K.CenterCrop(8)], "got RandomMixUpV2_0: it reads other pixels of an image, or their"),
    "kornia first": (
        [K.RandomThinPlateSpline(), K.CenterCrop(8)],
        "one size with ragged=True, got RandomThinPlateSpline_0: no lowering for this type. Put",
    ),
}


@pytest.mark.parametrize("name", NOT_SIZED)
def test_pipelines_with_ragged_output_are_refused(name):
    modules, text = NOT_SIZED[name]
    with pytest.raises(gpuaug.ArgumentError, match=re.escape(text)) as caught:
        gpuaug.fuse(K.AugmentationSequential(*modules), ragged=True)
    assert "such as RandomResizedCrop((224, 224))" in str(caught.value)


CROP = "v2.RandomCrop((224, 224), pad_if_needed=True)"
NOT_SIZED_AGAIN = {
    "as its end": (
        [v2.RandomShortestSize([8, 12]), v2.RandomHorizontalFlip()],
        "pipeline must give images one size after RandomShortestSize_0, got RandomHorizontalFlip_1 at the end. Put a "
        f"transform to one size after it, such as {CROP}, or keep RandomShortestSize_0 in the dataset.",
    ),
    "blur first": (
        [v2.CenterCrop(20), v2.ScaleJitter((8, 8)), v2.GaussianBlur(3), v2.RandomCrop(8, pad_if_needed=True)],
        "one size after ScaleJitter_1, got GaussianBlur_2: it reads other pixels of an image, or their coordinates. Put a",
    ),
    "left to torchvision": (
        [v2.RandomZoomOut(), v2.Lambda(torch.clone), v2.CenterCrop(8)],
        "after RandomZoomOut_0, got Lambda_1: no lowering for this type. Put a transform to one size",
    ),
}


@pytest.mark.parametrize("name", NOT_SIZED_AGAIN)
@pytest.mark.filterwarnings("ignore::gpuaug.GpuAugWarning")
def test_pipelines_that_draw_sizes_and_keep_them_are_refused(name):
    modules, text = NOT_SIZED_AGAIN[name]
    for options in ({}, {"ragged": True}):
        with raises(text):
            gpuaug.fuse(modules, **options)


TOO_SMALL = {
    "crop": (
        [v2.ScaleJitter((40, 40), (0.7, 2.0)), v2.RandomCrop(24)],
        "images must fit RandomCrop_1, got 36x48{}, which crops 24x24 out of 21x28. Pad or resize before it.",
    ),
    "reflection": (
        [v2.RandomShortestSize([20], 20), v2.RandomCrop(30, pad_if_needed=True, padding_mode="reflect")],
        "images must fit RandomCrop_1, got 36x48{}, which pads by reflection by a whole side or more. Pad or resize before it.",
    ),
    "skipped": (
        [v2.RandomApply([v2.RandomShortestSize([80])]), v2.RandomCrop(45)],
        "images must fit RandomCrop_1, got 36x48{}, which crops 45x45 out of 36x48. Pad or resize before it.",
    ),
    "not turned": (
        [v2.RandomRotation(45, expand=True), v2.RandomCrop(45)],
        "images must fit RandomCrop_1, got 36x48{}, which crops 45x45 out of 36x48. Pad or resize before it.",
    ),
    "turn skipped": (
        [v2.RandomApply([v2.RandomRotation((40, 50), expand=True)]), v2.RandomCrop(45)],
        "images must fit RandomCrop_1, got 36x48{}, which crops 45x45 out of 36x48. Pad or resize before it.",
    ),
    "no pixels": (
        [v2.ScaleJitter((40, 40), (0.03, 2.0)), v2.RandomCrop(24, pad_if_needed=True)],
        "images must fit ScaleJitter_0, got 36x48{}, which comes out without pixels. Pad or resize before it.",
    ),
}


@pytest.mark.parametrize("name", TOO_SMALL)
def test_images_that_may_be_drawn_too_small_are_refused_whatever_is_drawn(name):
    modules, text = TOO_SMALL[name]
    with raises(text.format("")):
        gpuaug.fuse(modules)(torch.zeros(0, 3, 36, 48))
    with raises(text.format(" at 1 of the batch")):
        gpuaug.fuse(modules, ragged=True).draw(pack(images_of([(48, 48), (36, 48)])))


def test_ragged_image_without_pixels_is_refused():
    batch = pack([torch.zeros(3, 4, 5, dtype=torch.uint8), torch.zeros(3, 0, 7, dtype=torch.uint8)])
    with raises("images must have pixels, got (0, 7) at 1 of the batch. Leave the image out."):
        gpuaug.fuse(K.CenterCrop(2), ragged=True)(batch)


def test_ragged_batch_must_be_uint8():
    batch = pack(images_of())
    floats = Ragged(batch.data.float(), batch.places, batch.shapes)
    with pytest.raises(
        gpuaug.ArgumentTypeError, match=r"images must be uint8, uint16 or int16 in a ragged batch, got torch.float32\. Create"
    ):
        gpuaug.fuse(K.CenterCrop(2), ragged=True)(floats)


def test_ragged_batch_shorter_than_its_shapes_is_refused():
    batch = pack(images_of())
    short = Ragged(batch.data[:-1], batch.places, batch.shapes)
    text = "A ragged batch must agree with its shapes, 44034 elements of 5 images, got {} and places {} of torch.{}. Create"
    with raises(text.format(44033, "(5, 3)", "int64")):
        gpuaug.fuse(K.CenterCrop(2), ragged=True)(short)
    with raises(text.format(44034, "(4, 3)", "int64")):
        gpuaug.fuse(K.CenterCrop(2), ragged=True)(Ragged(batch.data, batch.places[1:], batch.shapes))
    with raises(text.format(44034, "(5, 3)", "float32")):
        gpuaug.fuse(K.CenterCrop(2), ragged=True)(Ragged(batch.data, batch.places.float(), batch.shapes))
