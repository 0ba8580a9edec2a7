"""Advice about encoded images."""

import io
import pathlib
import re
import tempfile
import warnings

import torch
from PIL import Image
from support.files.encoded import encoded
from support.messages.registry import example
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


@example("more than max_replaced=… of the DecodeStage allows")
def many_damaged_files(told):
    batch = gpuaug.collate_encoded([FILES[0], FILES[1][:100]])

    def loader(max_replaced):
        stage = gpuaug.DecodeStage(on_error="replace", max_replaced=max_replaced)
        return gpuaug.StreamedLoader([batch] * 510, [stage], device="cpu")

    stopped = loader(0.4)
    with told:
        list(stopped)
    assert "sample 1 of batch 498 of epoch 0" in stopped.stats().replaced_files
    larger = loader(0.5)
    larger.load_state_dict(stopped.state_dict())
    assert len(list(larger)) == 11


@example("max_replaced must be left out without on_error='replace'")
def limit_without_replacement(told):
    with told:
        gpuaug.DecodeStage(max_replaced=1)
    assert gpuaug.DecodeStage(on_error="replace", max_replaced=1).max_replaced == 1
    assert gpuaug.DecodeStage().on_error == "raise"


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


@example("backend must be 'auto', or name a decoder that can be used here")
def engines_without_a_gpu(told):
    with told:
        decoded(gpuaug.collate_encoded(FILES), backend="engines")
    assert len(decoded(gpuaug.collate_encoded(FILES))) == 2


@example("Return PIL.Image.open(path) unchanged from the dataset, or for decoded images use gpuaug.collate_ragged")
def decoded_file_of_pil(told):
    def opened():
        return Image.open(io.BytesIO(FILES[0]))

    image = opened()
    image.load()
    with told:
        gpuaug.collate_encoded([(image, 1)])
    images, _ = gpuaug.collate_encoded([(opened(), 1)])
    assert images.file(0).tobytes() == FILES[0]
    assert len(gpuaug.collate_ragged([(image, 1)])[0]) == 1
