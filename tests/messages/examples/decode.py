"""Advice about encoded images."""

import io
import pathlib
import re
import tempfile
import warnings

import torch
from PIL import Image
from support.files.encoded import encoded
from support.files.encoded_files import png
from support.messages.registry import example, untried
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

import gpuaug

FILES = [encoded(16, 16), encoded(16, 16, seed=1)]


def decoded(batch, **options):
    (got,) = gpuaug.StreamedLoader([batch], [gpuaug.DecodeStage(**options)], device="cpu")
    return got


@example("Return gpuaug.read_encoded(path) from the dataset")
def paths_as_text(told):
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/image.jpg"
        pathlib.Path(path).write_bytes(FILES[0])
        with told:
            gpuaug.collate_encoded([(path, 1)])
        images, _ = gpuaug.collate_encoded([(gpuaug.read_encoded(path), 1)])
    assert images.file(0).tobytes() == FILES[0]


@example("Return the bytes of an image file")
def bytes_in_a_wrapper(told):
    with told:
        gpuaug.collate_encoded([(b"length 1234:" + FILES[0], 1)])
    images, _ = gpuaug.collate_encoded([(FILES[0], 1)])
    assert images.file(0).tobytes() == FILES[0]


@example("cannot be read, because of its header")
def size_of_a_damaged_file(told):
    with tempfile.TemporaryDirectory() as folder:
        paths = [pathlib.Path(folder) / name for name in ("damaged.jpg", "whole.jpg")]
        for path, data in zip(paths, (FILES[0][:9], FILES[0]), strict=True):
            path.write_bytes(data)
        with told:
            gpuaug.read_encoded(paths[0]).height  # noqa: B018
        assert [gpuaug.read_encoded(path).height for path in paths[1:]] == [16]


@example("For decoded images use gpuaug.collate_ragged")
def decoded_images(told):
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)
    with told:
        gpuaug.collate_encoded([(image, 1)])
    assert len(gpuaug.collate_ragged([(image, 1)])[0]) == 1


@example("An ImageFolder returns such images with loader=gpuaug.read_encoded")
def labels_alone(told):
    with told:
        gpuaug.collate_encoded([(1, 2)])
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "class").mkdir()
        (pathlib.Path(folder) / "class" / "image.jpg").write_bytes(FILES[0])
        images, labels = gpuaug.collate_encoded([ImageFolder(folder, loader=gpuaug.read_encoded)[0]])
    assert images.file(0).tobytes() == FILES[0]
    assert labels.tolist() == [0]


@example("If the dataset has the bytes of the file, return them")
def bytes_as_a_path(told):
    with told:
        gpuaug.read_encoded(FILES)
    assert gpuaug.collate_encoded([(FILES[0], 1)])[0].file(0).tobytes() == FILES[0]


@example("Pass a member of a batch that gpuaug.collate_encoded returned")
def file_for_a_decode_stage(told):
    with told:
        gpuaug.DecodeStage()(FILES[0])
    assert len(gpuaug.DecodeStage()(gpuaug.collate_encoded(FILES))) == 2


@example("on must name encoded images in the batch")
def batch_without_files(told):
    with told:
        decoded(torch.zeros(2, 3, 8, 8))
    loader = DataLoader(FILES, batch_size=2, collate_fn=gpuaug.collate_encoded)
    (got,) = gpuaug.StreamedLoader(loader, [gpuaug.DecodeStage()], device="cpu")
    assert len(got) == 2
    assert len(list(gpuaug.StreamedLoader([torch.zeros(2, 3, 8, 8)], device="cpu"))) == 1


@example("or pass on_error='replace' to the DecodeStage")
def damaged_file(told):
    damaged = [FILES[0], FILES[1][:100]]
    with told:
        decoded(gpuaug.collate_encoded(damaged))
    assert len(decoded(gpuaug.collate_encoded(FILES))) == 2
    got = decoded(gpuaug.collate_encoded(damaged), on_error="replace")
    assert torch.equal(got[0], got[1])


@example("the entry for the sample in")
def samples_or_fields(told):
    def replaced(members):
        return decoded({"image": gpuaug.collate_encoded([FILES[0], FILES[1][:100]]), **members}, on_error="replace")

    labels = [torch.tensor([1, 2]), torch.tensor([3, 4])]  # of two samples with two objects each, or two fields
    with told:
        replaced({"labels": labels})
    members = {
        "tensor": torch.stack(labels),
        "array": torch.stack(labels).numpy(),
        "samples": [{"labels": label} for label in labels],
        "fields": dict(enumerate(labels)),
    }
    batch = replaced(members)
    assert batch["tensor"].tolist() == batch["array"].tolist() == [[1, 2], [1, 2]]
    assert [sample["labels"].tolist() for sample in batch["samples"]] == [[1, 2], [1, 2]]
    assert [field.tolist() for field in batch["fields"].values()] == [[1, 1], [3, 3]]


@example("on_error='replace' needs at least one sample per batch that can be decoded")
def damaged_files_alone(told):
    with told:
        decoded(gpuaug.collate_encoded([FILES[1][:100]]), on_error="replace")
    assert len(decoded(gpuaug.collate_encoded(FILES), on_error="replace")) == 2


@example("Return one file per sample in each member, or pass on_error='raise'")
def two_files_per_sample_in_one_member(told):
    batch = {"images": gpuaug.collate_encoded([FILES[0], FILES[1][:100]]), "views": gpuaug.collate_encoded(FILES * 2)}
    stage = gpuaug.DecodeStage(on_error="replace")
    with told:
        next(iter(gpuaug.StreamedLoader([batch], [stage], device="cpu")))
    batch["views"] = gpuaug.collate_encoded(FILES)
    made = next(iter(gpuaug.StreamedLoader([batch], [stage], device="cpu")))
    assert torch.equal(made["views"][0], made["views"][1])


@example("Lower max_bytes or max_pixels of the DecodeStage")
def image_larger_than_memory(told):
    files = gpuaug.collate_encoded([png(2**31 - 1, 2**20), FILES[0]])
    with told:
        gpuaug.DecodeStage(max_pixels=2**62, max_bytes=2**62, on_error="replace")(files, "cpu")
    for limit in ({"max_bytes": 2**30}, {"max_pixels": 2**30}):
        options = {"max_pixels": 2**62, "max_bytes": 2**62, **limit}
        assert len(gpuaug.DecodeStage(**options, on_error="replace")(files, "cpu")) == 2


@example("backend must be 'auto', or name a decoder that can be used here")
def engines_without_a_gpu(told):
    with told:
        decoded(gpuaug.collate_encoded(FILES), backend="engines")
    assert len(decoded(gpuaug.collate_encoded(FILES))) == 2


@example("min_side must be left out with scale='auto'")
def a_scale_and_a_least_side(told):
    with told:
        gpuaug.DecodeStage(scale="auto", min_side=8)
    for options in ({"scale": "auto"}, {"min_side": 8}):
        assert len(decoded(gpuaug.collate_encoded(FILES), **options)) == 2


@example("must be left out with channels='labels'")
def averages_of_labels(told):
    for option in ({"min_side": 8}, {"scale": "auto"}):
        with told:
            gpuaug.DecodeStage(channels="labels", **option)
    grey = gpuaug.collate_encoded([encoded(16, 16, "PNG", mode="L")])
    assert decoded(grey, channels="labels").shapes.channels == 1


@example("Class indices are lost in")
def palette_as_shades_of_grey(told):
    palette, file = Image.new("P", (16, 16), 2), io.BytesIO()
    palette.putpalette([0, 0, 0, 9, 9, 9, 200, 200, 200])
    palette.save(file, "PNG")
    batch = gpuaug.collate_encoded([{"image": FILES[0], "mask": file.getvalue()}])

    def loaded(*stages):
        (got,) = gpuaug.StreamedLoader([batch], stages, device="cpu")
        return got

    with told:
        loaded(gpuaug.DecodeStage())
    stage = re.search(r"gpuaug\.DecodeStage\(.*\)", told.last)[0]
    assert stage == "gpuaug.DecodeStage(on='mask', channels='labels')"
    assert loaded(eval(stage), gpuaug.DecodeStage())["mask"][0].unique().tolist() == [2]


@example("may not match the images, because EXIF turns")
def boxes_of_the_image_as_stored(told):
    samples = [(encoded(16, 16, orientation=3), {"boxes": torch.ones(1, 4)})]
    batch = gpuaug.collate_encoded(samples)
    with told:
        decoded(batch)
    decoded(batch, exif=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*may not match the images")
        decoded(batch)


untried("needs a GPU", "Images are not decoded while a model trains", "The CPU decodes images, which may be too slow")
untried("needs a GPU; see tests/protocol/test_decoding.py", "Copies of decoded images make the decoder wait")
