"""Files as they are in a batch, in every form of sample, and through the ring."""

import copy
import io
import os
import pickle
import struct
import sys
from io import FileIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from support import internals
from support.batches.sample_forms import FORMS, Pair
from support.feed.ring_equality import assert_ring_is_plain, assert_same
from support.files.encoded_files import encoded, jpeg, oriented
from support.files.held_bytes import HELD
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug import ArgumentError, ArgumentTypeError, Encoded, collate_encoded, read_encoded
from gpuaug.core.encoded import Format
from gpuaug.decode import file_bytes
from gpuaug.decode.encoded_input import are_encoded
from gpuaug.decode.headers import UNKNOWN_FORMAT, parse
from gpuaug.feed import ring
from gpuaug.feed.collate_members import allocating_with
from gpuaug.feed.ring_memory import reads_for_feed

FILES = [jpeg(40, 30), encoded("PNG", 20, 10), oriented(6, seed=1), encoded("WEBP", seed=2), jpeg(64, 64, quality=97)]


def assert_holds(batch, files, names=None, problems=None):
    """``batch`` is ``files``, each as it was."""
    assert type(batch) is Encoded
    assert len(batch) == len(files)
    assert (batch.data.dtype, batch.data.ndim) == (torch.uint8, 1)
    assert batch.headers.problems == (problems or {})
    assert batch.headers.names == (names or [""] * len(files))
    end = 0
    for index, (file, row) in enumerate(zip(files, batch.headers.table, strict=True)):
        assert batch.file(index).tobytes() == file
        assert row["start"] % 64 == 0
        assert row["start"] >= end
        assert row["length"] == len(file)
        assert not batch.data[end : int(row["start"])].any()
        end = int(row["start"] + row["length"])
        if index not in (problems or {}):
            assert row.tolist()[2:] == parse(file)[:-1]
        else:
            assert row["format"] == Format.UNREADABLE
    assert len(batch.data) >= end + 64
    assert not batch.data[end:].any()


@pytest.fixture
def paths(tmp_path):
    found = [tmp_path / f"{index}.image" for index in range(len(FILES))]
    for path, file in zip(found, FILES, strict=True):
        path.write_bytes(file)
    return found


@pytest.mark.parametrize("hold", HELD.values(), ids=HELD.keys())
def test_files_in_memory_are_packed(hold):
    held = [hold(file) for file in FILES]
    assert_holds(collate_encoded(held), FILES)
    images, labels = collate_encoded([(file, index) for index, file in enumerate(held)])
    assert_holds(images, FILES)
    assert torch.equal(labels, torch.arange(len(FILES)))


READ = {
    "read_encoded": lambda path: read_encoded(str(path)),
    "read_encoded of a path of pathlib": read_encoded,
    "path of pathlib": lambda path: path,
    "row": lambda path: {"bytes": None, "path": str(path)},
}


@pytest.mark.parametrize("give", READ.values(), ids=READ.keys())
def test_files_on_disk_are_packed(give, paths):
    given, names = [give(path) for path in paths], [str(path) for path in paths]
    assert_holds(collate_encoded(given), FILES, names)
    images, labels = collate_encoded([(file, index) for index, file in enumerate(given)])
    assert_holds(images, FILES, names)
    assert torch.equal(labels, torch.arange(len(FILES)))


def test_text_is_a_path_where_it_is_the_sample(paths):
    names = [str(path) for path in paths]
    assert_holds(collate_encoded(names), FILES, names)
    images, text = collate_encoded(list(zip(paths, names, strict=True)))
    assert_holds(images, FILES, names)
    assert text == names


def test_row_with_bytes_keeps_its_path_as_name():
    rows = [{"bytes": file, "path": f"{index}.jpg"} for index, file in enumerate(FILES)]
    assert_holds(collate_encoded(rows), FILES, [row["path"] for row in rows])
    neither = {"bytes": None, "path": None}
    assert collate_encoded([*rows, neither]).headers.problems == {len(rows): "it is empty"}


@pytest.mark.parametrize(("make", "read"), FORMS.values(), ids=FORMS.keys())
def test_sample_containers(make, read):
    got, labels, right = read(collate_encoded([make(file, label) for label, file in enumerate(FILES)]))
    assert_holds(got, FILES)
    assert torch.equal(labels, torch.arange(len(FILES)))
    assert right


def test_every_image_member_is_packed(paths):
    other = FILES[::-1]
    batch = collate_encoded([{"a": a, "b": b, "views": [a, b]} for a, b in zip(FILES, paths, strict=True)])
    assert_holds(batch["a"], FILES)
    assert_holds(batch["b"], FILES, [str(path) for path in paths])
    views, labels = collate_encoded([((a, b), 7) for a, b in zip(FILES, other, strict=True)])
    assert_holds(views[0], FILES)
    assert_holds(views[1], other)
    assert labels.tolist() == [7] * len(FILES)


def test_other_members_are_collated_as_by_collate_ragged():
    rest = [{"label": i, "name": f"number {i}", "vector": torch.arange(4) * i, "bits": torch.ones(4).byte()} for i in range(3)]
    targets = [{"boxes": torch.ones(i, 4)} for i in range(3)]
    samples = [{"image": FILES[i], "target": targets[i], **rest[i], "views": [1, 2], "class": b"3"} for i in range(3)]
    batch = collate_encoded(samples)
    assert_holds(batch.pop("image"), FILES[:3])
    got = batch.pop("target")
    assert all(a is b for a, b in zip(got, targets, strict=True))
    assert batch.pop("class") == [b"3"] * 3
    assert [views.tolist() for views in batch.pop("views")] == [[1] * 3, [2] * 3]
    assert repr(batch) == repr(default_collate(rest))


LABELS = {
    "bytes": lambda text: text,
    "array": lambda text: np.array(list(text), np.uint8),
    "tensor": lambda text: torch.frombuffer(bytearray(text), dtype=torch.uint8),
}


@pytest.mark.parametrize("hold", LABELS.values(), ids=LABELS.keys())
def test_bytes_are_images_if_any_begin_like_one(hold):
    """A batch of one class and one image, of which the first is broken."""
    images, labels = collate_encoded([(hold(b"3"), hold(b"3")), (hold(FILES[0]), hold(b"4"))])
    assert_holds(images, [b"3", FILES[0]], problems={0: UNKNOWN_FORMAT})
    assert type(labels) is not Encoded
    assert len(labels) == 2


BEGINNINGS = {
    **{kind: encoded(kind, mode="P" if kind == "GIF" else "RGB") for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")},
    "TIFF, big end first": b"MM\0*\0\0\0\x08\0\0",
    "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n",
    "JPEG 2000 without a box": b"\xff\x4f\xff\x51\0\x2f",
    "AVIF": b"\0\0\0\x20ftypavif\0\0\0\0",
    **{f"HEIF {brand}": b"\0\0\0\x20ftyp%s\0\0\0\0" % brand.encode() for brand in ("heic", "heix", "heim", "hevc", "mif1")},
}


def test_every_bmp_of_pil_is_an_image():
    beginnings = {size: b"BM" + bytes(12) + size.to_bytes(4, "little") + bytes(size) for size in range(256)}
    factory, _ = Image.OPEN["BMP"]
    read_by_pil = []
    for size, data in beginnings.items():
        try:
            factory(io.BytesIO(data), "")
        except OSError as error:
            if "Unsupported BMP header type" in str(error):
                continue
        except (SyntaxError, struct.error):
            pass
        read_by_pil.append(size)
    assert [size for size, data in beginnings.items() if are_encoded([data], "[0]")] == read_by_pil


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("data", BEGINNINGS.values(), ids=BEGINNINGS.keys())
def test_beginning_of_an_image_file(data):
    assert type(collate_encoded([(data, 0)])[0]) is Encoded


OTHER_BEGINNINGS = (b"\0\0\0\x20ftypisom\0\0\0\0", b"RIFF\0\0\0\0WAVEfmt ", b"3", b"\xff\xd8", b"", b"BMW", b"BM" + bytes(30))


@pytest.mark.parametrize("data", OTHER_BEGINNINGS)
def test_beginning_of_other_files(data):
    with pytest.raises(ArgumentTypeError, match=r"got bytes that begin with b'.*' in sample 0"):
        collate_encoded([(data, 0)])


def test_problems_name_images_that_cannot_be_read(tmp_path, paths):
    cut = tmp_path / "cut.jpg"
    cut.write_bytes(FILES[0][:-100])
    empty = tmp_path / "empty.jpg"
    empty.write_bytes(b"")
    given = [paths[0], tmp_path / "missing.jpg", cut, tmp_path, empty, Path("a\0b"), paths[1]]
    files = [FILES[0], b"", FILES[0][:-100], b"", b"", b"", FILES[1]]
    problems = {
        1: "[Errno 2] No such file or directory",
        2: "it ends before its end marker",
        3: "[Errno 21] Is a directory",
        4: "it is empty",
        5: "stat: embedded null" if sys.version_info >= (3, 13) else "embedded null",
    }
    batch = collate_encoded([(read_encoded(path), 0) for path in given])[0]
    table = batch.headers.table
    assert table["length"].tolist() == [len(file) for file in files]
    assert [batch.file(index).tobytes() for index in range(len(files))] == files
    assert batch.headers.problems.keys() == problems.keys()
    assert all(batch.headers.problems[index].startswith(text) for index, text in problems.items())
    assert (table["format"] == Format.UNREADABLE).nonzero()[0].tolist() == list(problems)
    assert batch.headers.names == [str(path) for path in given]


def test_a_file_larger_than_any_image_is_not_read(tmp_path, paths, monkeypatch):
    huge = tmp_path / "huge.jpg"
    huge.write_bytes(FILES[0])
    os.truncate(huge, 2**40)  # it takes no room on the disk, and more memory than there is
    batch, _ = collate_encoded([(paths[0], 0), (huge, 1)])
    assert batch.headers.problems == {1: f"its {2**40} bytes exceed the limit of {2**30} bytes"}
    assert batch.file(0).tobytes() == FILES[0]
    monkeypatch.setattr("gpuaug.decode.file_bytes.MAX_FILE_BYTES", len(FILES[0]))
    batch, _ = collate_encoded([(FILES[0], 0), (FILES[0] + b"\0", 1)])
    assert batch.headers.problems == {1: f"its {len(FILES[0]) + 1} bytes exceed the limit of {len(FILES[0])} bytes"}


def test_problems_are_in_the_order_of_the_images(tmp_path):
    """Errors name the first."""
    assert [*collate_encoded([b"no image", tmp_path / "missing.jpg", b""]).headers.problems] == [0, 1, 2]


def with_other_sizes(samples, sizes, monkeypatch):
    """The batch, if files had these sizes, by their path, when they were asked for."""
    asked = os.stat

    def stat(path):
        return SimpleNamespace(st_size=sizes.get(str(path), asked(path).st_size))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        return collate_encoded(samples)


@pytest.mark.parametrize("change", [-200, -1, 1, 63, 64, 200])
def test_file_whose_size_changes_is_a_problem_of_its_own(change, paths, monkeypatch):
    sizes = {str(paths[2]): len(FILES[2]) - change}
    batch, _ = with_other_sizes([(path, 0) for path in paths], sizes, monkeypatch)
    assert batch.headers.problems == {2: "its size has changed while it was read"}
    assert [batch.file(index).tobytes() for index in (0, 1, 3, 4)] == [FILES[index] for index in (0, 1, 3, 4)]
    assert batch.headers.table[2]["length"] == 0


def test_file_that_is_read_in_parts(paths, monkeypatch):
    class InParts(FileIO):
        def readinto(self, buffer):
            return super().readinto(buffer[:100])

    monkeypatch.setattr(file_bytes, "FileIO", InParts)
    assert_holds(collate_encoded(paths), FILES, [str(path) for path in paths])


def test_files_behind_the_second_gigabyte(paths, monkeypatch):
    # Memory that nobody writes to is not taken.
    monkeypatch.setattr("gpuaug.decode.file_bytes.MAX_FILE_BYTES", 2**32)
    batch = with_other_sizes(paths, {str(paths[0]): 3 * 2**30}, monkeypatch)
    assert batch.headers.problems == {0: "its size has changed while it was read"}
    assert batch.headers.table["start"][1:].min() > 3 * 2**30
    assert [batch.file(index).tobytes() for index in range(1, 5)] == FILES[1:]
    assert len(batch.data) > 3 * 2**30


TEXT = (
    "Encoded images must be gpuaug.read_encoded(path), a path of pathlib, PIL.Image.open(path), the bytes of a file or a dict "
    "of 'bytes' and 'path', "
)
REFUSED = {
    "a path behind a number": ([{"y": 1, "x": "a.jpg"}], r"got str in sample 0 at \['x'\]. Return gpuaug.read_encoded"),
    "a decoded tensor": (
        [torch.ones(3, 4, 4)],
        r"got Tensor in sample 0. For decoded images use gpuaug.collate_ragged.",
    ),
    "nothing later": ([Pair(FILES[0], 1), Pair(None, 1)], r"got NoneType in sample 1 at .image. An ImageFolder returns"),
    "a path later": ([(Path("a"), 1), ("a", 1)], r"got str in sample 1 at \[0\]. Return gpuaug.read_encoded"),
    "a dict of others": ([({"bytes": 3, "path": "a"}, 1)], r"got dict in sample 0 at \[0\]. An ImageFolder returns"),
    "on another device": ([torch.ones(4, dtype=torch.uint8, device="meta")], "got Tensor in sample 0. An ImageFolder"),
}


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF", "JPEG2000", "AVIF", "MPO"])
@pytest.mark.parametrize("in_memory", [False, True])
def test_file_that_pil_has_opened(form, in_memory, tmp_path):
    first, second = Image.new("RGB", (40, 30), (250, 9, 90)), Image.new("RGB", (40, 30), (5, 99, 200))
    pages = {"save_all": True, "append_images": [second]} if form in ("WEBP", "GIF", "TIFF", "AVIF", "MPO") else {}
    path = tmp_path / "image"
    first.save(path, form, **pages)
    content = path.read_bytes()

    def opened():
        return Image.open(io.BytesIO(content) if in_memory else path)

    image = opened()
    packed, labels = collate_encoded([(image, 3), (content, 4)])
    assert [packed.file(index).tobytes() for index in range(2)] == [content] * 2
    assert packed.headers.names == ["" if in_memory else str(path), ""]
    assert labels.tolist() == [3, 4]
    assert np.array_equal(np.asarray(image), np.asarray(opened())), "PIL still decodes the image"
    got = next(iter(gpuaug.StreamedLoader([packed], [gpuaug.DecodeStage(backend="cpu")], device="cpu")))
    assert all(torch.equal(pixels, torch.from_numpy(np.array(opened().convert("RGB"))).permute(2, 0, 1)) for pixels in got)

    def sought(image):
        image.seek(1)

    read = "that is decoded or closed"
    changes = [(read, lambda image: image.load()), (read, lambda image: image.close())]
    changes += [(f"on another page|{read}", sought)] if pages else []
    changes += [("after draft", lambda image: image.draft("L", (10, 10)))] if form in ("JPEG", "MPO") else []
    for text, change in changes:
        change(image := opened())
        way_out = (
            r"Return PIL\.Image\.open\(path\) unchanged from the dataset, or for decoded images use gpuaug\.collate_ragged\."
        )
        with pytest.raises(ArgumentTypeError, match=rf"ImageFile ({text}).* in sample 0 at \[0\]\. {way_out}$"):
            collate_encoded([(image, 3)])


@pytest.mark.parametrize(("samples", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_samples(samples, text):
    with pytest.raises(ArgumentTypeError) as caught:
        collate_encoded(samples)
    assert str(caught.value).startswith(TEXT)
    assert caught.match(text)


def test_samples_of_other_forms_are_refused():
    with pytest.raises(ArgumentError, match=r"the first, 0, 1, got 0, 1, 2 in sample 1\. Return samples with the same members"):
        collate_encoded([(FILES[0], 1), (FILES[0], 1, 2)])
    with pytest.raises(ArgumentError, match=r"A batch must have a sample, got none"):
        collate_encoded([])


def test_read_encoded_is_a_path_and_can_be_pickled():
    handle = read_encoded(Path("photos") / "cat.jpg")
    assert os.fspath(handle) == handle.path == pickle.loads(pickle.dumps(handle)).path == os.path.join("photos", "cat.jpg")
    assert repr(handle) == f"EncodedFile({handle.path!r})"
    for value in (3, b"\xff\xd8\xff", None):
        text = rf"The path of an image must be a str or a path of pathlib, got {type(value).__name__}\. If the dataset has"
        with pytest.raises(ArgumentTypeError, match=text):
            read_encoded(value)


TRANSFORMS = {
    "flip": v2.RandomHorizontalFlip(1.0),
    "compose": v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]),
    "random apply": v2.RandomApply([v2.RandomRotation(10)], p=1.0),
    "choice": v2.RandomChoice([v2.RandomCrop(4)]),
    "identity": v2.Identity(),
    "lambda": v2.Lambda(lambda value: value),
    "resize": v2.Resize(4),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_v2_transforms_refuse_files_that_are_not_read(transform):
    file = read_encoded("cat.jpg")
    boxes = tv_tensors.BoundingBoxes([[0, 0, 4, 4]], format="XYXY", canvas_size=(8, 8))
    target = {"boxes": boxes, "labels": torch.tensor([1])}
    for sample in ((file, target), ({"image": file, **target},), (file, boxes, 3)):
        with pytest.raises(ArgumentTypeError, match="stages"):
            transform(*sample)
    assert file.path == "cat.jpg"


def test_encoded_is_pickled_and_pinned(monkeypatch):
    batch, _ = collate_encoded([(file, 1) for file in FILES])
    assert_holds(pickle.loads(pickle.dumps(batch)), FILES)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self.clone())
    pinned, _ = pin_memory([batch, torch.ones(1)])
    assert_holds(pinned, FILES)
    assert pinned.data.data_ptr() != batch.data.data_ptr()


def test_files_are_packed_into_a_slot_without_copy():
    want = collate_encoded(FILES)
    own = ring.Ring(1, 2, 1 << 20)
    own.make_room(want)
    writer = own.memory.take_slot(0)
    with allocating_with(writer.allocate):
        batch = collate_encoded(FILES)
    assert [tensor.data_ptr() for tensor, _ in internals.tensors(writer).values()] == [batch.data.data_ptr()]
    token = reads_for_feed.set(True)
    got = pickle.loads(pickle.dumps(writer.describe(batch)))
    reads_for_feed.reset(token)
    assert_same(got, want)
    batch.data[0] = 77
    assert got.data[0] == 77
    del got
    own.close()


class Photos(Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, index):
        return {"image": jpeg(20 + index, 30, seed=index), "label": index, "target": {"boxes": torch.ones(index % 4, 4)}}


@pytest.mark.parametrize("workers", [0, 2])
def test_encoded_batches_through_slots_match_plain_feed(workers):
    got, _ = assert_ring_is_plain(lambda: DataLoader(Photos(), batch_size=4, num_workers=workers, collate_fn=collate_encoded))
    files = [Photos()[index]["image"] for index in range(30)]
    for number, batch in enumerate(got[0]):
        assert_holds(batch["image"], files[4 * number : 4 * number + 4])


LEFT_IN_A_DATASET = {
    **{
        name: getattr(v1, name)(*arguments)
        for name, arguments in {
            "ToTensor": (),
            "PILToTensor": (),
            "Resize": (8,),
            "CenterCrop": (8,),
            "RandomResizedCrop": (8,),
            "RandomHorizontalFlip": (1.0,),
            "ColorJitter": (0.4,),
            "Grayscale": (3,),
            "Normalize": ([0.5], [0.5]),
            "RandomRotation": (10,),
            "RandAugment": (),
            "GaussianBlur": (3,),
        }.items()
    },
    "Compose": v1.Compose([v1.RandomHorizontalFlip(0.0), v1.ToTensor()]),
    "v2": v2.RandomResizedCrop(8),
    "convert": lambda image: image.convert("RGB"),
    "size": lambda image: image.size,
    "array": np.asarray,
    "PIL": lambda image: image.resize((8, 8)),
}


@pytest.mark.parametrize("name", LEFT_IN_A_DATASET)
def test_transforms_left_in_a_dataset_say_where_they_belong(name):
    with pytest.raises((TypeError, AttributeError)) as raised:
        LEFT_IN_A_DATASET[name](read_encoded("image.jpg"))
    assert "Pass the transforms to the loader: stages=[gpuaug.DecodeStage(), gpuaug.fuse(" in str(raised.value)


@pytest.mark.parametrize(
    "name", ["dtype", "shape", "ndim", "device", "size", "mode", "to", "float", "cuda", "convert", "unbind"]
)
def test_attributes_of_encoded_batches_say_that_they_are_not_decoded(name):
    batch = collate_encoded([FILES[0]])
    for value in (batch, pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}', because .*Put gpuaug.DecodeStage\(\) into stages"):
            getattr(value, name)
        assert not hasattr(value, name)


def test_a_function_of_encoded_images_names_the_missing_stage():
    def last_error(stage):
        with pytest.raises(TypeError) as raised:
            list(gpuaug.StreamedLoader([collate_encoded([FILES[0]])], [stage], device="cpu"))
        return " ".join([str(raised.value), *raised.value.__notes__])

    encoder = torch.nn.Conv2d(3, 4, 3).requires_grad_(False)
    stages = (lambda images: images / 255, encoder, v2.Resize(8), v1.Resize(8), gpuaug.FeatureStage(encoder))
    for stage in stages:
        assert "gpuaug.DecodeStage()" in last_error(stage)
