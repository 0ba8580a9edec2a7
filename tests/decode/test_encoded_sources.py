"""Encoded images out of the datasets that people have: folders, WebDataset, Hugging Face's and torchvision's."""

import json
import multiprocessing
import pickle
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from support.files.encoded import by_pil, encoded, mixed_files
from support.files.encoded_files import jpeg
from torch.utils.data import DataLoader
from torchvision.datasets import CocoDetection, ImageFolder, VOCDetection, wrap_dataset_for_transforms_v2
from torchvision.transforms import v2

import gpuaug

FILES = [jpeg(10 + seed, 20, seed=seed) for seed in range(6)]
LABELS = [0, 0, 0, 1, 1, 1]
MIXED = mixed_files()


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
        # Other methods need what is pickled below, and take seconds.
        pytest.param(method, marks=() if method == "fork" else pytest.mark.slow)
        for method in multiprocessing.get_all_start_methods()
    ],
)
def test_image_folder(method, folder):
    root, names = folder
    dataset = ImageFolder(root, loader=gpuaug.read_encoded)
    options = {"batch_size": 4, "num_workers": 1, "multiprocessing_context": method}
    dataset, collate = pickle.loads(pickle.dumps((dataset, gpuaug.collate_encoded)))
    assert_holds(list(DataLoader(dataset, collate_fn=collate, **options)), names)


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


@pytest.mark.parametrize("index", range(len(MIXED)))
def test_file_has_the_sides_of_its_upright_image(tmp_path, index):
    data = MIXED[index]
    path = tmp_path / "photo"
    path.write_bytes(data)
    found = gpuaug.read_encoded(path)
    assert (found.height, found.width) == by_pil(data).shape[:2]


def test_file_that_has_no_sides_is_an_error(tmp_path):
    path = tmp_path / "text.jpg"
    path.write_bytes(b"no image")
    with pytest.raises(
        gpuaug.DecodeError,
        match=r"The size of .*text\.jpg cannot be read, because of its header: .*Leave it out of the dataset",
    ):
        gpuaug.read_encoded(path).height  # noqa: B018
    with pytest.raises(FileNotFoundError):
        gpuaug.read_encoded(tmp_path / "missing.jpg").width  # noqa: B018


class CocoFiles(CocoDetection):
    def _load_image(self, id):  # noqa: A002
        return gpuaug.read_encoded(f"{self.root}/{self.coco.loadImgs(id)[0]['file_name']}")


class VocFiles(VOCDetection):
    def __getitem__(self, index):
        return gpuaug.read_encoded(self.images[index]), self.parse_voc_xml(ElementTree.parse(self.annotations[index]).getroot())


def coco(root):
    """COCO's files for two photographs, one of them turned, with a box and a polygon in each."""
    sides = {"a.jpg": (30, 48), "b.jpg": (40, 24)}
    (root / "a.jpg").write_bytes(encoded(48, 30))
    (root / "b.jpg").write_bytes(encoded(40, 24, orientation=6))
    images = [{"id": number, "file_name": name, "height": h, "width": w} for number, (name, (h, w)) in enumerate(sides.items())]
    shape = {"bbox": [2, 3, 10, 12], "area": 120, "iscrowd": 0, "segmentation": [[2, 3, 12, 3, 12, 15, 2, 15]]}
    objects = [{"id": number + 1, "image_id": number, "category_id": 1 + number, **shape} for number in range(2)]
    text = json.dumps(
        {"images": images, "annotations": objects, "categories": [{"id": 1, "name": "x"}, {"id": 2, "name": "y"}]}
    )
    (root / "boxes.json").write_text(text)
    return CocoFiles(root, root / "boxes.json")


def voc(root):
    """PASCAL VOC's folders for a photograph with one box."""
    base = root / "VOCdevkit" / "VOC2012"
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (base / name).mkdir(parents=True)
    (base / "JPEGImages/a.jpg").write_bytes(encoded(48, 30))
    (base / "ImageSets/Main/train.txt").write_text("a\n")
    box = "<bndbox><xmin>2</xmin><ymin>3</ymin><xmax>12</xmax><ymax>15</ymax></bndbox>"
    text = f"<annotation><object><name>cat</name>{box}</object></annotation>"
    (base / "Annotations/a.xml").write_text(text)
    return VocFiles(root, image_set="train")


@pytest.mark.parametrize(("dataset", "keys"), [(coco, ("boxes", "labels", "masks")), (voc, ("boxes", "labels"))])
def test_datasets_wrapped_by_torchvision(tmp_path, dataset, keys):
    wrapped = wrap_dataset_for_transforms_v2(dataset(tmp_path), target_keys=keys)
    augment = gpuaug.fuse([v2.RandomHorizontalFlip(1.0), v2.Resize((60, 48), antialias=False)], ragged=True)
    stage = gpuaug.TransformStage(augment, on={0: "input", 1: "targets"})
    batches = DataLoader(wrapped, batch_size=2, collate_fn=gpuaug.collate_encoded)
    ((images, targets),) = gpuaug.StreamedLoader(batches, [gpuaug.DecodeStage(backend="cpu"), stage], device="cpu")
    assert images.shape == (len(wrapped), 3, 60, 48)
    for index, target in enumerate(targets):
        height, width = by_pil(Path(wrapped[index][0].path).read_bytes()).shape[:2]
        scale = torch.tensor([48 / width, 60 / height] * 2)
        torch.testing.assert_close(
            target["boxes"].as_subclass(torch.Tensor)[0], torch.tensor([width - 12.0, 3, width - 2, 15]) * scale
        )
        assert set(target) == {*keys, "valid"}
        if "masks" in keys:
            left, top, right, bottom = target["boxes"][0].round().int().tolist()
            inside = target["masks"][0, top + 2 : bottom - 2, left + 2 : right - 2]
            assert inside.all()
            assert target["masks"][0].sum() < 1.3 * (right - left) * (bottom - top)
