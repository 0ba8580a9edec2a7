"""Encoded images out of the datasets that people have: folders, WebDataset and Hugging Face's."""

import multiprocessing

import pytest
import torch
from support.encoded_files import jpeg
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

import gpuaug

FILES = [jpeg(10 + seed, 20, seed=seed) for seed in range(6)]
LABELS = [0, 0, 0, 1, 1, 1]


def assert_holds(batches, names=None):
    """Batches of images and labels: of all files, in order."""
    found = [images.file(index).tobytes() for images, _ in batches for index in range(len(images))]
    assert found == FILES
    assert torch.cat([torch.as_tensor(labels) for _, labels in batches]).tolist() == LABELS
    assert [images.headers.problems for images, _ in batches] == [{}] * len(batches)
    if names is not None:
        assert [name for images, _ in batches for name in images.headers.names] == names


@pytest.fixture
def folder(tmp_path):
    """A folder for each class, and the paths of its images, in order."""
    paths = [tmp_path / f"class {label}" / f"{index}.jpg" for index, label in enumerate(LABELS)]
    for path, data in zip(paths, FILES, strict=True):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return tmp_path, [str(path) for path in paths]


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=pytest.mark.slow if method == "forkserver" else ())  # to a worker it is what spawn is
        for method in multiprocessing.get_all_start_methods()
    ],
)
def test_image_folder(method, folder):
    root, names = folder
    dataset = ImageFolder(root, loader=gpuaug.read_encoded)
    options = {"batch_size": 4, "num_workers": 1, "multiprocessing_context": method}
    assert_holds(list(DataLoader(dataset, collate_fn=gpuaug.collate_encoded, **options)), names)


def test_webdataset(tmp_path):
    import webdataset

    with webdataset.TarWriter(str(tmp_path / "photos.tar")) as tar:
        for index, (data, label) in enumerate(zip(FILES, LABELS, strict=True)):
            tar.write({"__key__": f"{index:03}", "jpg": data, "cls": str(label).encode()})
    samples = webdataset.WebDataset(str(tmp_path / "photos.tar"), shardshuffle=False)

    def batches(dataset):
        return list(DataLoader(dataset, batch_size=3, collate_fn=gpuaug.collate_encoded))

    assert_holds([(images, [int(label) for label in labels]) for images, labels in batches(samples.to_tuple("jpg", "cls"))])
    whole = batches(samples)
    assert_holds([(batch["jpg"], [int(label) for label in batch["cls"]]) for batch in whole])
    assert [key for batch in whole for key in batch["__key__"]] == [f"{index:03}" for index in range(6)]


@pytest.mark.parametrize("streaming", [False, True], ids=["", "streaming"])
@pytest.mark.parametrize("held", [True, False], ids=["bytes", "paths"])
def test_hugging_face(held, streaming, folder):
    from datasets import Dataset, Image

    _, names = folder
    images = [{"bytes": data if held else None, "path": name} for data, name in zip(FILES, names, strict=True)]
    dataset = Dataset.from_dict({"image": images, "label": LABELS}).cast_column("image", Image(decode=False))
    assert dataset[0]["image"] == images[0]
    dataset = dataset.to_iterable_dataset() if streaming else dataset
    batches = list(DataLoader(dataset, batch_size=4, collate_fn=gpuaug.collate_encoded))
    assert_holds([(batch["image"], batch["label"]) for batch in batches], names)
