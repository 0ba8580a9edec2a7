"""Image processors of transformers as one module, without transformers: stand-ins have the settings, plain torch the result."""

import functools
import io
import math
import pickle
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
import torch
from support.batches.ragged import cut, images_of, pack
from support.comparison.values import assert_values
from support.files.encoded_files import png
from support.files.images import noise
from support.processors.stand_ins import NAMES, SETTINGS, expected, siglip2_grid, stand_in
from torch.utils.data import DataLoader

import gpuaug

QWEN = "Qwen2VLImageProcessor"
SIZES = [(28, 28), (37, 152), (200, 61), (56, 84), (90, 95), (13, 400)]
NATIVE = {"image_grid_thw": 3, "spatial_shapes": 2, "image_sizes": 2}
"""Names of grids in the results, and the numbers per image."""
read = gpuaug.collate_encoded


@pytest.fixture
def make(monkeypatch):
    return functools.partial(stand_in, monkeypatch=monkeypatch)


def fused(processor, **options):
    return gpuaug.fuse(processor, ragged=True, **options)


def file(image, kind="PNG", orientation=1):
    packed, exif = io.BytesIO(), PIL.Image.Exif()
    exif[274] = orientation
    image.save(packed, kind, exif=exif)
    return packed.getvalue()


def picture(height, width, mode="RGB", seed=0):
    return PIL.Image.fromarray(noise(seed, height, width, 4), "RGBA").convert(mode)


def assert_result(got, wanted, **tolerance):
    assert got._fields == tuple(wanted)
    for name, value in wanted.items():
        assert_values(getattr(got, name), value, about=name, **(tolerance if name == "pixel_values" else {}))


@pytest.mark.parametrize("layout", ["chw", "hwc"])
@pytest.mark.parametrize("name", NAMES)
def test_results_are_the_processor_s(name, layout, make):
    processor, images = make(name), images_of(SIZES)
    assert_result(fused(processor)(pack(images, layout)), expected(processor, images), atol=5e-6)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (QWEN, {"patch_size": 16, "merge_size": 1, "temporal_patch_size": 1}),
        (QWEN, {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28}}),
        (QWEN, {"rescale_factor": 1 / 127.5, "image_mean": (1.0, 1.0, 1.0), "image_std": (1.0, 1.0, 1.0)}),
        ("Siglip2ImageProcessor", {"patch_size": 14, "max_num_patches": 1}),
        ("Siglip2ImageProcessor", {"max_num_patches": 100, "resample": 3}),
        ("CLIPImageProcessor", {"size": {"height": 20, "width": 90}}),
        ("CLIPImageProcessor", {"size": {"shortest_edge": 33}, "crop_size": {"height": 41, "width": 20}}),
        ("PixtralImageProcessor", {"size": {"longest_edge": 31}, "patch_size": {"height": 14, "width": 14}}),
        ("PixtralImageProcessor", {"do_pad": None}),  # no such setting, in transformers before 5.24
    ],
)
def test_settings_are_read_from_the_object(name, settings, make):
    processor, images = make(name, **settings), images_of(SIZES)
    assert_result(fused(processor)(pack(images)), expected(processor, images), atol=5e-6)


@pytest.mark.parametrize("rescales", [True, False])
def test_bytes_are_rescaled_or_normalized_alone(rescales, make):
    images = images_of([(32, 48)])
    got = fused(make("ViTImageProcessor", do_rescale=rescales, do_normalize=not rescales))(pack(images)).pixel_values
    mean, std = (torch.tensor(getattr(make("ViTImageProcessor"), key))[:, None, None] for key in ("image_mean", "image_std"))
    assert_values(got, images[0][None] * (1 / 255) if rescales else (images[0][None] - mean) / std, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pixels_are_rounded_to_half_precision_at_the_end(dtype, make):
    batch = pack(images_of(SIZES))
    full, half = fused(make(QWEN))(batch), fused(make(QWEN), dtype=dtype)(batch)
    assert_values(half.pixel_values, full.pixel_values.to(dtype))
    assert_values(half.image_grid_thw, full.image_grid_thw)


@pytest.mark.parametrize("name", NAMES)
def test_grids_of_headers_are_those_of_the_pixels(name, make):
    images = [
        picture(40, 90),
        picture(91, 33, "L"),
        picture(64, 30, "RGBA"),
        picture(33, 77).convert("P"),
    ]
    files = [file(image) for image in images] + [file(picture(40, 90), "JPEG", turn) for turn in range(1, 9)]
    pixels, encoded = fused(make(name)), read(files)
    decoded = gpuaug.DecodeStage()(encoded, device="cpu")
    grids, result = pixels.grids(encoded), pixels(decoded)
    assert grids.dtype == torch.int64
    assert_values(grids, pixels.grids(decoded))
    for field, count in NATIVE.items():
        if field in result._fields:
            assert_values(grids, getattr(result, field))
            assert grids.shape == (len(files), count)
    wanted = [torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1) for image in images]
    assert_result(pixels(pack(wanted)), expected(make(name), wanted), atol=5e-6)
    for got, image in zip(decoded, wanted, strict=False):
        assert_values(got, image)


@pytest.mark.parametrize(
    ("patch", "most", "between"),
    [(16, 21, [(2744, 4573), (4308, 4305)]), (14, 256, []), (16, 1024, []), (32, 1, [(9_000, 9_001)])],
)
def test_grids_of_siglip2_equal_the_bisection_for_all_sizes(patch, most, between, make):
    """``between``: sizes for which not all scales of the last interval of the bisection give the same grid."""
    random = np.random.default_rng(patch)
    wide = random.integers(1, 26, (400, 2)) * random.permuted(np.tile([1, 200], (400, 1)), axis=1)
    whole = random.integers(1, 40, (400, 2)) * patch  # of whole patches
    sizes = [*between, *np.concatenate([random.integers(1, 5_000, (400, 2)), wide, whole]).tolist()]
    pixels = fused(make("Siglip2ImageProcessor", patch_size=patch, max_num_patches=most))
    wanted = [siglip2_grid(sides, patch, most) for sides in sizes]
    assert_values(pixels.grids(read([png(*sides) for sides in sizes])), torch.tensor(wanted))


COUNTS = [0, 2, 1, 0, 0, 3]


class Chats(torch.utils.data.Dataset):
    """Samples with lists of images of unequal length."""

    def __len__(self):
        return len(COUNTS)

    def __getitem__(self, index):
        images = [file(picture(30 + 9 * index, 40 + 20 * number, seed=index)) for number in range(COUNTS[index])]
        return {"id": index, "images": images}


def with_placeholders(pixels, samples):
    batch = read(samples, flatten="images")
    return batch | {"placeholders": pixels.grids(batch["images"])}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 3])
def test_lists_of_images_are_flattened_in_sample_order(size, workers, device, make):
    pixels = fused(make(QWEN))
    stages = [gpuaug.DecodeStage(), gpuaug.TransformStage(pixels, on="images", into=("pixel_values", "image_grid_thw"))]
    loader = DataLoader(Chats(), size, collate_fn=functools.partial(with_placeholders, pixels), num_workers=workers)
    for number, batch in enumerate(gpuaug.StreamedLoader(loader, stages, device=device)):
        samples = [Chats()[index] for index in range(number * size, (number + 1) * size)]
        files = [packed for sample in samples for packed in sample["images"]]
        images = [torch.from_numpy(np.array(PIL.Image.open(io.BytesIO(packed)))).permute(2, 0, 1) for packed in files]
        assert batch["images_counts"].tolist() == [len(sample["images"]) for sample in samples]
        assert_values(batch["image_grid_thw"], batch["placeholders"])
        assert batch["pixel_values"].shape == (int(batch["image_grid_thw"].prod(1).sum()), 3 * 2 * 14 * 14)
        if images:
            wanted = expected(make(QWEN), images)["pixel_values"]
            assert_values(batch["pixel_values"].cpu(), wanted, atol=5e-6, share=0.001)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_images_without_pixels_are_refused(name, size, make):
    with pytest.raises(gpuaug.ArgumentError, match=rf"got height {size[0]} and width {size[1]} of image 1\."):
        fused(make(name))(pack([torch.zeros(3, *each, dtype=torch.uint8) for each in ((8, 8), size)]))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_images_has_results_of_length_0(name, make):
    pixels = fused(make(name))
    nothing = read([{"images": []}], flatten="images")["images"]
    result = pixels(gpuaug.DecodeStage()(nothing, device="cpu"))
    some = pixels(pack(images_of(SIZES)))
    assert len(pixels.grids(nothing)) == 0
    for got, other in zip(result, some, strict=True):
        assert len(got) == 0
        assert (got.ndim, got.dtype) == (other.ndim, other.dtype)


def test_lists_in_tuples_have_their_counts_at_the_end():
    images, labels, counts = read([([file(picture(9, 9))] * 2, 7), ([], 8)], flatten=0)
    assert (len(images), labels.tolist(), counts.tolist()) == (2, [7, 8], [2, 0])


@pytest.mark.parametrize(
    ("samples", "flatten", "words"),
    [
        ([{"images": []}], "image", "flatten must be a key or index of the samples, got 'image'. They have 'images'"),
        (
            [{"images": []}, {"images": None}],
            "images",
            "must be a list of images with flatten='images', got NoneType in sample 1",
        ),
        ([[3]], 1, "flatten must be a key or index of the samples, got 1"),
        ([{"images": [], "images_counts": 3}], "images", "must not have a member 'images_counts' with flatten='images'"),
    ],
)
def test_wrong_members_to_flatten_are_named(samples, flatten, words):
    with pytest.raises((gpuaug.ArgumentError, gpuaug.ArgumentTypeError), match=words):
        read(samples, flatten=flatten)


def test_other_processors_are_refused_by_name_with_the_list(make):
    with pytest.raises(gpuaug.ArgumentTypeError, match=r"one of Qwen2VLImageProcessor, .* got DeiTImageProcessor"):
        fused(make("DeiTImageProcessor"))


def test_a_subclass_is_refused(make):
    processor = make(QWEN)
    processor.__class__ = type("MyImageProcessor", (type(processor),), {"__module__": type(processor).__module__})
    with pytest.raises(gpuaug.ArgumentTypeError, match="got MyImageProcessor"):
        fused(processor)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (QWEN, {"do_resize": False}),
        (QWEN, {"do_pad": True}),
        (QWEN, {"resample": 0}),
        (QWEN, {"size": {"height": 3, "width": 4}}),
        (QWEN, {"do_rescale": False, "do_normalize": False}),
        ("ViTImageProcessor", {"size": {"shortest_edge": 32}}),
        ("DINOv3ViTImageProcessor", {"do_rescale": False}),
        ("PixtralImageProcessor", {"do_pad": False}),
        ("PixtralImageProcessor", {"do_center_crop": True}),
    ],
)
def test_settings_that_are_not_supported_are_named(name, settings, make):
    with pytest.raises(gpuaug.ArgumentError, match=rf"({'|'.join(settings)}) of {name} must be .* Call the processor itself"):
        fused(make(name, **settings))


@pytest.mark.parametrize(
    ("name", "settings", "meaning"),
    [
        (QWEN, {"min_pixels": 28 * 28 * 8}, {"size": {"shortest_edge": 28 * 28 * 8, "longest_edge": 28 * 28 * 20}}),
        (QWEN, {"max_pixels": 28.0**2 * 9}, {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 9}}),
        ("ViTImageProcessor", {"size": 32}, {"size": {"height": 32, "width": 32}}),
        ("ViTImageProcessor", {"size": (32, 48)}, {}),
        ("SiglipImageProcessor", {"size": [32, 48]}, {}),
        ("CLIPImageProcessor", {"size": 40, "default_to_square": False}, {}),
        ("CLIPImageProcessor", {"size": 40, "default_to_square": True}, {"size": {"height": 40, "width": 40}}),
        ("CLIPImageProcessor", {"crop_size": 36, "default_to_square": False}, {"crop_size": {"height": 36, "width": 36}}),
        ("CLIPImageProcessor", {"crop_size": [36, 52]}, {}),
        ("PixtralImageProcessor", {"patch_size": 16}, {}),
        ("PixtralImageProcessor", {"patch_size": (16, 16)}, {}),
    ],
)
def test_sizes_in_every_form_of_transformers(name, settings, meaning, make):
    assert fused(make(name, **settings)).definition[0].family == fused(make(name, **meaning)).definition[0].family


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("SiglipImageProcessor", {"size": 32, "default_to_square": False}, "size .* must be height and width, got 32"),
        ("ViTImageProcessor", {"size": "x"}, "size .* must be height and width, got 'x'"),
        ("PixtralImageProcessor", {"patch_size": 16.0}, "patch_size .* must be height and width, got 16.0"),
        ("ViTImageProcessor", {"resample": [3]}, r"resample .* must be bilinear or bicubic, got \[3\]"),
        (
            "ViTImageProcessor",
            {"do_normalize": False, "rescale_factor": 1},
            "rescale_factor .* must be a float if do_n",
        ),
        ("ViTImageProcessor", {"image_std": [0.5, 0, 0.5]}, r"image_std .* must be other than 0, got \[0.5, 0, 0.5\]"),
    ],
)
def test_values_that_transformers_reads_differently_or_refuses_are_refused(name, settings, text, make):
    with pytest.raises(gpuaug.ArgumentError, match=text):
        fused(make(name, **settings))


@pytest.mark.parametrize(
    ("wrap", "way_out"),
    [
        (lambda processor: SimpleNamespace(image_processor=processor), "Pass processor.image_processor."),
        (type, "Pass an object: ViTImageProcessor()."),
        (lambda processor: type("ViTImageProcessorPil", (type(processor),), {})(), "Load the processor as ViTImageProcessor."),
    ],
)
def test_what_is_passed_in_place_of_a_processor_is_told_apart(wrap, way_out, make):
    processor = make("ViTImageProcessor")
    for name in ("image_mean", "do_resize"):
        setattr(type(processor), name, getattr(processor, name))
    with pytest.raises(gpuaug.ArgumentTypeError, match="An image processor must be one of ") as told:
        fused(wrap(processor))
    assert str(told.value).endswith(way_out)
    accepted = fused(getattr(wrap(processor), "image_processor", processor))
    assert accepted.definition[0].family == fused(processor).definition[0].family


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_the_settings_is_checked(name, make):
    numbers = {
        "rescale_factor": (0, None, "a", [0.1]),
        **dict.fromkeys(("image_mean", "image_std"), (None, "a", [1] * 2, [1] * 4)),
    }
    counts = (0, -1, 2.5, math.nan, math.inf, "a", [2], {"height": "a", "width": 2})
    whole_numbers = {key: value for key, value in SETTINGS[name].items() if isinstance(value, int) and key != "resample"}
    wrong = [(key, value) for key, values in numbers.items() for value in values]
    wrong += [(key, value) for key, right in whole_numbers.items() if right is not True for value in (*counts, None)]
    for key, sides in SETTINGS[name].items():
        if isinstance(sides, dict):
            wrong += [(key, sides | {side: value}) for side in sides for value in counts]
    for key, value in wrong:
        with pytest.raises((gpuaug.ArgumentError, gpuaug.ArgumentTypeError), match=rf"{key} of {name} must be "):
            fused(make(name, **{key: value}))


@pytest.mark.parametrize("options", [{}, {"ragged": True, "views": 2}, {"ragged": True, "dtype": torch.uint8}])
def test_a_processor_needs_ragged_images_and_takes_no_other_option(options, make):
    with pytest.raises(gpuaug.ArgumentError, match="An image processor must be fused with ragged=True"):
        gpuaug.fuse(make(QWEN), **options)


@pytest.mark.parametrize("name", NAMES)
def test_a_version_that_was_not_tested_is_compared(name, make):
    fused(make(name, version="9.1"))

    def other(processor, images):
        return expected(processor, [image.flip(2) for image in images])

    with pytest.raises(gpuaug.ArgumentError, match=f"transformers must be 5.24.0 or .*, got 9.1, whose {name} returns others"):
        fused(make(name, version="9.1", call=other))


def test_a_version_with_other_names_is_refused(make):
    def other(processor, images):
        return {("grid" if key == "image_grid_thw" else key): value for key, value in expected(processor, images).items()}

    with pytest.raises(gpuaug.ArgumentError, match="transformers must be"):
        fused(make(QWEN, version="9.1", call=other))


def test_images_that_cannot_be_processed_are_refused(make):
    pixels = fused(make(QWEN))
    with pytest.raises(gpuaug.ArgumentError, match=r"aspect ratio of at most 200, got height 1 and width 201 of image 1"):
        pixels(pack(images_of([(8, 8), (1, 201)])))
    with pytest.raises(gpuaug.ArgumentError, match="got height 9 and width 990 of image 0"):
        fused(make("PixtralImageProcessor"))(pack(images_of([(9, 990)])))
    whole = pack(images_of([(40, 50), (30, 60)]), "hwc")
    with pytest.raises(gpuaug.ArgumentError, match="images must be whole images, got windows of Ragged"):
        pixels(cut(whole, np.array([[3, 4, 20, 30], [0, 0, 30, 60]])))
    clips = gpuaug.collate_ragged([torch.zeros(2, 3, 8, 8, dtype=torch.uint8)])
    for call in (pixels, pixels.grids):
        for images in (pack(images_of([(8, 8)], channels=1)), clips):
            with pytest.raises(gpuaug.ArgumentError, match="images of 3 channels of uint8, and no clips, got"):
                call(images)
    with pytest.raises(gpuaug.ArgumentTypeError, match=r"images must be a gpuaug.Ragged, got Tensor"):
        pixels(torch.zeros(1, 3, 8, 8))
    with pytest.raises(gpuaug.ArgumentTypeError, match=r"images must be the result of gpuaug.collate_encoded"):
        pixels.grids([b""])
    with pytest.raises(gpuaug.DecodeError, match="The size of image 1 cannot be read, because of its header"):
        pixels.grids(read([file(picture(8, 8)), b"nothing"]))


def test_modules_go_to_workers_without_their_processor(make):
    pixels = pickle.loads(pickle.dumps(fused(make(QWEN), dtype=torch.bfloat16)))
    batch = pack(images_of(SIZES))
    assert_values(pixels(batch).pixel_values, fused(make(QWEN), dtype=torch.bfloat16)(batch).pixel_values)
    assert "Qwen2VLImageProcessor, torch.bfloat16" in repr(pixels)


def test_states_of_loaders_tell_settings_apart(make):
    def loader(**settings):
        batches = [pack(images_of(SIZES))] * 2
        return gpuaug.StreamedLoader(batches, [fused(make(QWEN, **settings))], device="cpu")

    before = loader()
    next(iter(before))
    state = before.state_dict()
    loader().load_state_dict(state)
    with pytest.raises(gpuaug.ArgumentError):
        loader(merge_size=1).load_state_dict(state)


def test_batches_of_similar_size_have_buffers_of_one_size(make):
    """So that the allocator reuses them: batches of random sizes would otherwise fragment its memory."""
    pixels, random = fused(make(QWEN)), np.random.default_rng(0)
    lengths, storages = set(), set()
    for _ in range(100):
        values = pixels(pack(images_of([tuple(random.integers(28, 150, 2)) for _ in range(4)]))).pixel_values
        lengths.add(len(values))
        storages.add(values.untyped_storage().nbytes())
    assert len(storages) <= 2 + math.log(max(lengths) / min(lengths), 1.125) < len(lengths)
