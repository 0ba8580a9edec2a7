"""``FeatureCache``: from epoch V on, each sample has the row of epoch e mod V of a loader without a cache, bit for bit."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import kornia.augmentation as K
import pytest
import safetensors.torch
import torch
from support.cache.cached_loaders import (
    COUNT,
    Files,
    as_dict,
    assert_equal,
    augmentation,
    encoder,
    epochs_of,
    loader,
    rows_of,
    stages,
    write_images,
)
from support.process import processes, waiting
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, IterableDataset, Subset
from torchvision.transforms import v2

import gpuaug
from gpuaug import ArgumentError, FeatureCache, GpuAugError, GpuAugWarning, cli
from gpuaug.cache import recorder
from gpuaug.core import batch as batches
from gpuaug.core.errors import IteratorEndedError
from gpuaug.core.packed_targets import pack_targets
from gpuaug.core.streams import Lanes
from gpuaug.stages.copy import Copier

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def paths(tmp_path):
    return write_images(tmp_path / "images")


def spoil(paths):
    """Overwrite files without a change of size and time: a file that is opened cannot be decoded."""
    for path in paths:
        status = os.stat(path)
        with open(path, "r+b") as file:
            file.write(bytes(status.st_size))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


class Sample(NamedTuple):
    image: object
    label: int


class Stream(IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return (self.dataset[index] for index in range(len(self.dataset)))


def contents(path, index):
    with open(path, "rb") as file:
        return {"image": file.read(), "label": index}


FORMS = {
    "dicts": (as_dict, {"on": "image"}),
    "tuples": (lambda path, index: (gpuaug.read_encoded(path), index), {"on": 0, "into": 2}),
    "tuples whose images are replaced": (lambda path, index: (gpuaug.read_encoded(path), index), {"on": 0, "into": ...}),
    "named tuples": (lambda path, index: Sample(gpuaug.read_encoded(path), index), {"on": "image", "into": ...}),
    "bytes": (contents, {"on": "image"}),
    "Hugging Face": (
        lambda path, index: {"image": {"bytes": None, "path": path}, "label": index},
        {"on": "image"},
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", FORMS)
def test_later_epochs_have_the_rows_of_recorded_epochs(form, workers, device, paths, tmp_path):
    if workers and form not in ("dicts", "tuples"):
        pytest.skip("one form of each kind of container is enough with workers")
    sample, options = FORMS[form]
    functions = {
        "dicts": {},
        "bytes": {},
        "Hugging Face": {},
        "tuples": {"value": lambda batch: batch[2], "label": lambda batch: batch[1]},
        "named tuples": {"value": lambda batch: batch.image, "label": lambda batch: batch.label},
    }.get(form, {"value": lambda batch: batch[0], "label": lambda batch: batch[1]})
    dataset = Files(paths, sample)
    several = {"num_workers": workers, "persistent_workers": workers > 0}
    expected = epochs_of(loader(dataset, stages(None, **options, capture="never"), device=device, **several), 2, **functions)
    cache = FeatureCache(tmp_path / "cache", views=2)
    streamed = loader(cache.wrap(dataset), stages(cache, **options, capture="never"), device=device, **several)
    recorded = epochs_of(streamed, 2, **functions)
    if form != "bytes":
        spoil(paths)
    read = epochs_of(streamed, 3, **functions)
    for epoch, rows in enumerate([*recorded, *read]):
        assert_equal(rows, expected[epoch % 2])
    stats = streamed.stats()
    assert (stats.rows_encoded, stats.rows_read, stats.rows_written, stats.rows_dropped) == (2 * COUNT, 3 * COUNT, 2 * COUNT, 0)
    assert streamed.stats().eager + stats.replayed == 2 * -(-COUNT // 4)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_schedule_are_of_the_stage_of_the_epoch(device, paths, tmp_path):
    other = gpuaug.fuse(K.AugmentationSequential(K.RandomCrop((12, 12))), ragged=True)
    dataset = Files(paths, as_dict)
    both = [
        epochs_of(loader(dataset, stages(None, transform=transform, capture="never"), device=device), 5)
        for transform in (augmentation(), other)
    ]
    cache = FeatureCache(tmp_path / "cache", views=2)
    first, augment, encode = stages(cache, capture="never")
    changing = gpuaug.until(3, augment, gpuaug.TransformStage(other, on="image"))
    streamed = loader(cache.wrap(dataset), [first, changing, encode], device=device)
    epochs = epochs_of(streamed, 3)
    with pytest.warns(GpuAugWarning, match="begins anew, because its rows were made with other"):
        epochs += epochs_of(streamed, 3)
    for rows, (stage, epoch) in zip(epochs, [(0, 0), (0, 1), (0, 0), (1, 3), (1, 4), (1, 3)], strict=True):
        assert_equal(rows, both[stage][epoch])
    assert (streamed.stats().rows_encoded, streamed.stats().rows_read) == (4 * COUNT, 2 * COUNT)


@pytest.mark.parametrize("device", DEVICES)
def test_a_file_that_changed_is_encoded_again_at_its_place(device, paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache", views=2)
    dataset = Files(paths, as_dict)
    wrapped = cache.wrap(dataset)
    recorded = epochs_of(loader(wrapped, stages(cache, capture="never"), device=device), 2)
    changed = {3, 11}
    for index in changed:
        os.utime(paths[index], ns=(1, index))
    streamed = loader(wrapped, stages(cache, capture="never"), device=device)
    streamed.set_epoch(2)
    read = rows_of(streamed)
    reference = loader(dataset, stages(None, capture="never"), device=device)
    reference.set_epoch(2)
    fresh = rows_of(reference)
    assert_equal(read, {label: fresh[label] if label in changed else recorded[0][label] for label in range(COUNT)})
    streamed.set_epoch(4)
    assert_equal(rows_of(streamed), read)
    assert streamed.stats().rows_encoded == len(changed)


def damage(data):
    """Yield (name, damaged copy of a file)."""
    yield "truncated", data[: len(data) // 2]
    yield "empty", b""
    yield "zeros", bytes(len(data))
    for place in range(9, len(data), len(data) // 13):
        flipped = bytearray(data)
        flipped[place] ^= 16
        yield f"bit at {place}", bytes(flipped)


def test_damaged_shards_are_encoded_again(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    wrapped = cache.wrap(Files(paths, as_dict))
    [recorded] = epochs_of(loader(wrapped, stages(cache)), 1)
    [shard] = (tmp_path / "cache").glob("*/view-0/*.safetensors")
    data = shard.read_bytes()
    for name, damaged in damage(data):
        for later in shard.parent.glob("*.safetensors"):
            later.unlink()
        shard.write_bytes(damaged)
        streamed = loader(wrapped, stages(cache))
        rows = [rows_of(streamed)]  # epoch 0 again
        streamed.set_epoch(0)
        rows.append(rows_of(streamed))
        for read in rows:
            assert_equal(read, recorded)
        assert streamed.stats().rows_encoded <= COUNT, name
        assert streamed.stats().rows_encoded > 0 or name.startswith("bit"), name


def other_function(images):
    return images * 2


class Doubled(nn.Module):
    def forward(self, images):
        return images * 2


def scaled_by(factor):
    return lambda images: images * factor


KEYS = {
    "weights": lambda: {"module": encoder(1)},
    "buffers": lambda: {"module": nn.Sequential(nn.BatchNorm2d(3), encoder()).requires_grad_(False)},
    "output": lambda: {"output": lambda features: features[:, :2]},
    "autocast": lambda: {"autocast": torch.bfloat16},
    "size": lambda: {"transform": gpuaug.fuse(K.AugmentationSequential(K.RandomResizedCrop((16, 17))), ragged=True)},
    "probability": lambda: {
        "transform": gpuaug.fuse(
            K.AugmentationSequential(K.RandomResizedCrop((16, 16)), K.RandomHorizontalFlip(p=0.4)), ragged=True
        )
    },
    "closure 2": lambda: {
        "transform": gpuaug.fuse(K.AugmentationSequential(K.CenterCrop((16, 16))), ragged=True),
        "extra": scaled_by(2),
    },
    "closure 3": lambda: {
        "transform": gpuaug.fuse(K.AugmentationSequential(K.CenterCrop((16, 16))), ragged=True),
        "extra": scaled_by(3),
    },
    "function": lambda: {
        "transform": gpuaug.fuse(K.AugmentationSequential(K.CenterCrop((16, 16))), ragged=True),
        "extra": other_function,
    },
    "module": lambda: {
        "transform": gpuaug.fuse(K.AugmentationSequential(K.CenterCrop((16, 16))), ragged=True),
        "extra": Doubled(),
    },
}


def test_rows_of_other_stages_are_not_read(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    dataset = Files(paths[:4], as_dict)

    def encoded(seed=3, extra=None, **options):
        made = stages(cache, **options)
        if extra is not None:
            made.insert(2, gpuaug.TransformStage(extra, on="image", name="extra"))
        streamed = loader(cache.wrap(dataset), made, seed=seed)
        rows_of(streamed)
        return streamed.stats().rows_encoded

    assert encoded() == 4
    assert encoded() == 0
    with pytest.warns(GpuAugWarning, match="begins anew, because its rows were made with other seed"):
        assert encoded(seed=4) == 4
    for name, options in KEYS.items():
        with pytest.warns(GpuAugWarning, match="begins anew"):
            assert encoded(**options()) == 4, name
        assert encoded(**options()) == 0, name
    assert len(list((tmp_path / "cache").iterdir())) == 2 + len(KEYS)


def test_weights_that_change_between_epochs(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    module = encoder()
    streamed = loader(cache.wrap(Files(paths, as_dict)), stages(cache, module=module))
    rows_of(streamed)
    with torch.no_grad():
        module[0].weight[0, 0, 0, 0] += 1e-3
    with pytest.warns(GpuAugWarning, match="other weights"):
        rows_of(streamed)
    assert streamed.stats().rows_encoded == 2 * COUNT
    with pytest.raises(ArgumentError, match="Change the weights between two epochs"), streamed.stages[-1].update():
        pass


def boxes_and_index(path, index):
    boxes = torch.tensor([[1.0, 2, 9, 12], [3, 4, 20, 18]][: index % 3])
    return {"image": gpuaug.read_encoded(path), "label": index, "target": {"boxes": boxes.reshape(-1, 4), "id": index}}


def test_targets_that_moved_with_the_image_are_stored(paths, tmp_path):
    pipeline = K.AugmentationSequential(
        K.RandomHorizontalFlip(), K.RandomCrop((16, 16), pad_if_needed=True), data_keys=["input", "bbox_xyxy"]
    )
    flip = gpuaug.fuse(pipeline, ragged=True)
    dataset = Files(paths, boxes_and_index)

    def targets(cache, wrapped, epochs):
        made = [
            gpuaug.DecodeStage(),
            gpuaug.TransformStage(flip, on={"image": "input", "target": "targets"}),
            gpuaug.TransformStage(gpuaug.sanitize, on="target"),
            gpuaug.TransformStage(lambda images: images.float(), on="image"),
            gpuaug.FeatureStage(encoder(), on="image", into="latents", cache=cache),
        ]
        streamed = loader(wrapped, made)
        return [
            {int(label): target for batch in streamed for label, target in zip(batch["label"], batch["target"], strict=True)}
            for _ in range(epochs)
        ]

    cache = FeatureCache(tmp_path / "cache", views=2)
    expected = targets(None, dataset, 2)
    got = targets(cache, cache.wrap(dataset), 3)
    os.utime(paths[5], ns=(1, 1))
    got += targets(cache, cache.wrap(dataset), 1)  # epoch 0, with one missing row
    for epoch, samples in enumerate(got):
        for label, target in samples.items():
            view = epoch % 2 if epoch < 3 else 0
            assert target["id"] == label
            torch.testing.assert_close(target["boxes"], expected[view][label]["boxes"], rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_members_that_no_stage_writes_are_those_of_the_epoch(device, paths, tmp_path):
    epoch = [0]

    def sample(path, index):
        targets = {"scores": torch.full((index % 3, 2), float(epoch[0]))}
        return {**as_dict(path, index), "target": targets, "epoch": epoch[0], "caption": f"caption {epoch[0]}"}

    cache = FeatureCache(tmp_path / "cache")
    streamed = loader(cache.wrap(Files(paths, sample)), stages(cache), device=device)
    for epoch[0] in range(3):
        if epoch[0] == 2:
            os.utime(paths[4], ns=(1, 1))  # one batch has a missing row
        for batch in streamed:
            assert batch["epoch"].unique().tolist() == [epoch[0]]
            assert set(batch["caption"]) == {f"caption {epoch[0]}"}
            for label, target in zip(batch["label"].tolist(), batch["target"], strict=True):
                assert target["scores"].tolist() == [[epoch[0]] * 2] * (label % 3)


def test_a_run_that_was_killed_continues(paths, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import sys
            import time
            from support.cache.cached_loaders import *
            from gpuaug.cache import recorder
            recorder.SHARD_BYTES = 1
            cache = gpuaug.FeatureCache(sys.argv[1])
            paths = sorted(map(str, Path(sys.argv[2]).glob("*.png")))
            for number, batch in enumerate(loader(cache.wrap(Files(paths, as_dict)), stages(cache))):
                time.sleep(60 if number == int(sys.argv[3]) else 0)
        """)
    )
    folder = tmp_path / "cache"
    command = [sys.executable, str(script), str(folder), str(tmp_path / "images")]
    process = subprocess.Popen([*command, "3"], env=processes.variables())
    waiting.until(lambda: list(folder.glob("*/view-0/*.safetensors")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    cache = FeatureCache(folder)
    dataset = Files(paths, as_dict)
    streamed = loader(cache.wrap(dataset), stages(cache))
    assert_equal(epochs_of(streamed, 1)[0], epochs_of(loader(dataset, stages(None)), 1)[0])
    assert 0 < streamed.stats().rows_read < COUNT


@pytest.mark.parametrize("epoch", [0, 1, 2, 3])
def test_resume_within_an_epoch(epoch, paths, tmp_path):
    dataset = Files(paths, as_dict)
    cache = FeatureCache(tmp_path / "cache", views=2)

    def make():
        return loader(cache.wrap(dataset), stages(cache))

    whole = [[batch["latents"] for batch in streamed] for streamed in [make()] for _ in range(4)]
    FeatureCache(tmp_path / "cache")
    for shard in (tmp_path / "cache").glob("*/*/*.safetensors"):
        shard.unlink()
    streamed = make()
    for _ in range(epoch):
        rows_of(streamed)
    iterator = iter(streamed)
    for _ in range(3):
        next(iterator)
    state = streamed.state_dict()
    iterator.close()
    resumed = make()
    resumed.load_state_dict(state)
    for batch, expected in zip(resumed, whole[epoch][3:], strict=True):
        torch.testing.assert_close(batch["latents"], expected, rtol=0, atol=0)


def test_a_replaced_sample_has_its_own_row_or_none(paths, tmp_path):
    broken = {2, 9}
    for index in broken:
        with open(paths[index], "r+b") as file:
            file.seek(60)
            file.write(bytes(40))
    cache = FeatureCache(tmp_path / "cache")
    dataset = Files(paths, as_dict)

    def latents(cache, wrapped):
        made = stages(cache)
        made[0] = gpuaug.DecodeStage(on_error="replace")
        return loader(wrapped, made)

    recording = latents(cache, cache.wrap(dataset))
    list(recording)
    reading = latents(cache, cache.wrap(dataset))
    expected = {}
    for batch in latents(None, dataset):
        for label, row in zip(batch["label"].tolist(), batch["latents"], strict=True):
            expected.setdefault(label, []).append(row)
    for batch in reading:
        for label, row in zip(batch["label"].tolist(), batch["latents"], strict=True):
            assert any(torch.equal(row, other) for other in expected[label])
    assert reading.stats().rows_encoded == len(broken)


def test_data_sets_in_data_sets(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    dataset = ConcatDataset(
        [Subset(cache.wrap(Files(paths, as_dict)), range(9)), cache.wrap(Stream(Files(paths, as_dict)))][:1]
    )
    streamed = loader(dataset, stages(cache))
    epochs_of(streamed, 2)
    assert streamed.stats().rows_read == 9
    stream = FeatureCache(tmp_path / "stream")
    streamed = loader(stream.wrap(Stream(Files(paths, as_dict))), stages(stream), shuffle=None, generator=None)
    first, second = epochs_of(streamed, 2)
    assert_equal(second, first)
    assert streamed.stats().rows_read == COUNT


def test_named_samples(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")

    def once(path, index):
        return {"image": open(path, "rb").read(), "label": index, "id": f"sample {index}"}

    wrapped = cache.wrap(Files(paths, once), key="id")
    first, second = epochs_of(loader(wrapped, stages(cache)), 2)
    assert_equal(second, first)
    [shard] = (tmp_path / "cache").glob("*/view-0/*.safetensors")
    tensors = safetensors.torch.load_file(shard)
    ends = tensors["row.name_end"].tolist()
    text = tensors["row.name"].numpy().tobytes()
    names = [text[begin:end].decode() for begin, end in zip([0, *ends], ends, strict=False)]
    labels = [int(name.removeprefix("sample ")) for name in names]
    assert_equal(dict(zip(labels, tensors["latents"], strict=True)), first)


def test_ranks_write_their_rows_and_read_all(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    dataset = Files(paths, as_dict)
    for rank in range(2):
        rows_of(loader(cache.wrap(Subset(dataset, range(rank, COUNT, 2))), stages(cache)))
    streamed = loader(cache.wrap(dataset), stages(cache))
    assert len(rows_of(streamed)) == COUNT
    assert streamed.stats().rows_read == COUNT


def test_features_of_several_dtypes_and_parts(paths, tmp_path):
    class Several(nn.Module):
        def forward(self, images):
            mean = images.mean((2, 3))
            return {"half": mean.bfloat16(), "byte": (mean * 255).byte(), "scalar": mean[:, 0], "flag": mean > 0.5}

    cache = FeatureCache(tmp_path / "cache")

    def values(batch):
        parts = batch["latents"].values()
        return [torch.cat([part[index].double().reshape(-1) for part in parts]) for index in range(len(batch["label"]))]

    streamed = loader(cache.wrap(Files(paths, as_dict)), stages(cache, module=Several()))
    first, second = epochs_of(streamed, 2, value=values)
    assert_equal(second, first)
    assert [part.dtype for part in next(iter(streamed))["latents"].values()] == [
        torch.bfloat16,
        torch.uint8,
        torch.float32,
        torch.bool,
    ]


def test_errors_name_the_way_out(paths, tmp_path, monkeypatch):
    cache = FeatureCache(tmp_path / "cache")
    dataset = Files(paths, as_dict)
    with pytest.raises(ArgumentError, match=r"Make the DataLoader of cache\.wrap"):
        next(iter(loader(dataset, stages(cache))))
    with pytest.raises(ArgumentError, match="put the other encoder before it"):
        next(iter(loader(cache.wrap(dataset), [*stages(cache), *stages(cache)[2:]])))
    with pytest.raises(ArgumentError, match="must have an encoded image"):
        cache.wrap([{"label": 3}])[0]
    as_batch = gpuaug.TransformStage(lambda images: torch.stack([image.float() for image in images]), on="image")
    made = [gpuaug.DecodeStage(), as_batch, *stages(cache, module=nn.Identity())[2:]]

    def read(batch_indices):
        files = DataLoader(cache.wrap(dataset), batch_sampler=batch_indices, collate_fn=gpuaug.collate_encoded)
        return list(gpuaug.StreamedLoader(files, made, device="cpu"))

    read([[0, 5], [1, 6]])
    assert len(read([[0, 5], [6, 1]])) == 2
    with pytest.raises(ArgumentError, match="Batch images of one size together"):
        read([[0, 1]])


@pytest.mark.parametrize(
    ("number", "way_out"),
    [
        (errno.ENOSPC, "Free space, or use fewer views. The rows that were written remain valid"),
        (errno.EROFS, "Make the folder writable, or use another folder"),
        (errno.EIO, "Check the disk, or use another folder"),
    ],
)
@pytest.mark.parametrize("place", ["write", "write_key"])
def test_a_disk_that_fails(place, number, way_out, paths, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    cache = FeatureCache(tmp_path / "cache")
    streamed = loader(cache.wrap(Files(paths, as_dict)), stages(cache))
    with monkeypatch.context() as patched:
        patched.setattr(*((recorder, "write") if place == "write" else (Path, "write_text")), fail)
        with pytest.raises(GpuAugError, match=way_out):
            rows_of(streamed)
    assert len(rows_of(streamed)) == COUNT


def test_members_that_cannot_be_stored(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    made = stages(cache)
    made.insert(2, gpuaug.TransformStage(lambda images: images.sum(), on="image", into="sum"))
    with pytest.raises(gpuaug.ArgumentTypeError, match="Put the stage that writes it behind the encoder"):
        rows_of(loader(cache.wrap(Files(paths, as_dict)), made))


class Output(OrderedDict):
    """Result of an encoder, as ``ModelOutput`` of Transformers."""


class Result(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, images):
        return self.function(images.mean((2, 3)))


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(
    "result",
    [
        lambda mean: Output(pooled=mean),
        lambda mean: (mean, mean),
        lambda mean: {1: mean},
        lambda mean: {"a": mean[0]},
        lambda mean: torch.complex(mean, mean).to(torch.complex128),
    ],
    ids=["class of mappings", "tuple", "keys", "shape", "complex128"],
)
def test_results_that_cannot_be_stored(result, bare, paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    sample = (lambda path, index: gpuaug.read_encoded(path)) if bare else as_dict
    made = stages(cache, module=Result(result), capture="never", **({"on": ..., "into": ...} if bare else {}))
    with pytest.raises((ArgumentError, gpuaug.ArgumentTypeError), match=r"Members|Names of members"):
        list(loader(cache.wrap(Files(paths, sample)), made))


def several(mean):
    return {"a": mean, "b.c": 2 * mean, "d[]": 3 * mean, "e::f": 4 * mean}


NAMES = ["observation.latents", "x[", "shapes", "features.shapes", " "]
"""Names of members of any type."""


@pytest.mark.parametrize("name", [*NAMES, "x[]", "x:", "[]"])
@pytest.mark.parametrize("function", [lambda mean: mean, several], ids=["tensor", "mapping"])
def test_names_of_members(name, function, paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    made = stages(cache, into=name, module=Result(function))
    streamed = loader(cache.wrap(Files(paths, as_dict)), made, shuffle=None, generator=None)
    if function is several and name not in NAMES:
        with pytest.raises(ArgumentError, match="must be text without '::'"):
            list(streamed)
        return
    first, second = whole_epochs(streamed, 2)
    os.utime(paths[1], ns=(1, 1))
    streamed.set_epoch(0)
    for recorded, *others in zip(first, second, list(streamed), strict=True):
        for batch in others:
            torch.testing.assert_close(batch[name], recorded[name], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["row.id", "row.latents", "a::b", "::"])
def test_names_that_are_refused(name, paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    with pytest.raises(ArgumentError, match="must be text without '::'"):
        list(loader(cache.wrap(Files(paths, as_dict)), stages(cache, into=name)))


def test_images_as_batches_with_a_mapping_as_result(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    dataset = cache.wrap(Files(paths, lambda path, index: gpuaug.read_encoded(path)))
    made = stages(cache, on=..., into=..., module=Result(lambda mean: {"a": mean, "b": 2 * mean}))
    streamed = loader(dataset, made, shuffle=None, generator=None)
    first, second = whole_epochs(streamed, 2)
    os.utime(paths[1], ns=(1, 1))
    streamed.set_epoch(0)
    for recorded, *others in zip(first, second, list(streamed), strict=True):
        for batch in others:
            assert_equal(batch, recorded)


class Question(nn.Module):
    def forward(self, questions):
        return questions * 10


def test_members_on_which_rows_depend(paths, tmp_path):
    """Each image occurs twice, with two questions."""

    def sample(path, index):
        return {**as_dict(paths[index // 2], index), "question": torch.full((3,), float(index)), "id": index}

    def made(cache, on):
        asked = gpuaug.TransformStage(lambda batch: {**batch, "latents": batch["question"] * 10}, on=None)
        text = gpuaug.FeatureStage(Question(), on="question", into="states", name="text")
        return [gpuaug.DecodeStage(), text if on else asked, *stages(cache)[1:]]

    dataset = Files(paths, sample)
    for on in (None, "question"):
        cache = FeatureCache(tmp_path / f"cache {on}")
        with pytest.raises(ArgumentError, match=r"got \[.*'question'.*name each sample with cache\.wrap\(dataset, key=…\)"):
            list(loader(cache.wrap(dataset), made(cache, on)))
    streamed = loader(cache.wrap(dataset, key="id"), made(cache, on))
    for _ in range(2):
        for batch in streamed:
            assert batch["states"].tolist() == (batch["question"] * 10).tolist()
    assert streamed.stats().rows_read == COUNT


@pytest.mark.parametrize("form", ["dicts", "tuples"])
def test_stages_behind_that_read_images(form, paths, tmp_path):
    sample, options = FORMS[form]
    cache = FeatureCache(tmp_path / "cache")
    made = [*stages(cache, **options), gpuaug.TransformStage(lambda images: images, on=options["on"], name="behind")]
    with pytest.raises(ArgumentError, match=r"in stage 'behind'\. Put the stage before the encoder"):
        list(loader(cache.wrap(Files(paths, sample)), made))


def test_loaders_without_a_decode_stage(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    with pytest.raises(gpuaug.ArgumentTypeError, match="DecodeStage"):
        list(loader(cache.wrap(Files(paths, as_dict)), stages(cache)[2:]))


def test_a_stage_before_the_encoder_that_returns_no_container(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    images = gpuaug.TransformStage(lambda batch: batch["image"], on=None)
    made = [gpuaug.DecodeStage(), images, *stages(cache, on=..., into=...)[1:]]
    with pytest.raises(gpuaug.ArgumentTypeError, match="Stages before the cache must return a batch with members, got"):
        list(loader(cache.wrap(Files(paths, as_dict)), made))


def test_the_row_of_the_earliest_epoch_is_read(paths, tmp_path):
    """Rank 0 begins epoch 1 before the rows of rank 1 are written."""
    dataset = Files(paths, as_dict)

    def rank(number, cache):
        sampler = DistributedSampler(dataset, 2, number, seed=1)
        source = dataset if cache is None else cache.wrap(dataset)
        files = DataLoader(source, 4, sampler=sampler, collate_fn=gpuaug.collate_encoded)
        return gpuaug.StreamedLoader(files, stages(cache), device="cpu", seed=3, rank=number)

    expected = rows_of(rank(0, None)) | rows_of(rank(1, None))
    cache = FeatureCache(tmp_path / "cache")
    first, second = rank(0, cache), rank(1, cache)
    rows_of(first)
    slow = iter(second)
    next(slow)
    first.set_epoch(1)
    rows_of(first)
    assert first.stats().rows_encoded > COUNT // 2
    list(slow)
    read = {}
    for streamed in (first, second):
        streamed.set_epoch(2)
        read |= rows_of(streamed)
    assert_equal(read, expected)


def test_a_disk_that_is_too_slow(paths, tmp_path, monkeypatch):
    written = threading.Event()
    write = recorder.write
    monkeypatch.setattr(recorder, "write", lambda *arguments: written.wait(60) and write(*arguments))
    monkeypatch.setattr(recorder, "SHARD_BYTES", 1)
    monkeypatch.setattr(recorder, "MAX_WAITING_BYTES", 300)  # one batch has 256 bytes
    cache = FeatureCache(tmp_path / "cache")
    streamed = loader(cache.wrap(Files(paths, as_dict)), stages(cache))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in streamed:
            if streamed.stats().rows_dropped:
                written.set()
    assert [str(warning.message).partition(",")[0] for warning in caught] == ["Rows of the feature cache are not written"]
    stats = streamed.stats()
    assert stats.rows_dropped > 0
    assert stats.rows_written + stats.rows_dropped == COUNT


def test_the_size_is_logged_and_printed(paths, tmp_path, caplog):
    caplog.set_level("INFO", "gpuaug")
    cache = FeatureCache(tmp_path / "cache", views=2)
    rows_of(loader(cache.wrap(Files(paths, as_dict)), stages(cache)))
    assert "The feature cache in" in caplog.text
    assert f"view 0: {COUNT} rows" in str(cache)
    assert cache.key in str(cache)


@pytest.mark.slow
def test_measurements_neither_read_nor_record(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    streamed = loader(cache.wrap(Files(paths, as_dict)), stages(cache))
    assert len(rows_of(streamed)) == COUNT
    report = gpuaug.profile(streamed, lambda batch: batch["latents"], batches=10, rounds=2, show=False)
    assert {part.name: part.has_cache for part in report.parts}["stage/feature"]
    gpuaug.show(streamed)
    assert (streamed.stats().rows_read, streamed.stats().rows_written) == (0, COUNT)
    assert len(rows_of(streamed)) == COUNT
    assert streamed.stats().rows_read == COUNT


def test_command_fills_a_cache(paths, tmp_path, monkeypatch, capsys):
    script = tmp_path / "train_features.py"
    script.write_text(
        textwrap.dedent(f"""
            from support.cache.cached_loaders import *

            cache = gpuaug.FeatureCache({str(tmp_path / "cache")!r}, views=2)

            def make():
                return loader(cache.wrap(Files({paths!r}, as_dict)), stages(cache)), None

            def plain():
                return loader(Files({paths!r}, as_dict), stages(None))
        """)
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["encode", f"{script}:make"]) == 0
    printed = capsys.readouterr()
    assert f"view 1: {COUNT} rows" in printed.out
    assert "view 2 of 2, batch 6" in printed.err
    with pytest.raises(SystemExit):
        cli.main(["encode", f"{script}:plain"])
    assert "must return a StreamedLoader with a feature cache" in capsys.readouterr().err


def whole_epochs(streamed, count):
    """Return the batches of epochs."""
    with streamed:
        return [list(streamed) for _ in range(count)]


class Masked(nn.Module):
    def forward(self, images, masks):
        return (images * masks).mean((2, 3))


def resized(images):
    return torch.stack([nn.functional.interpolate(image[None].float(), (16, 16))[0] for image in images])


def half_masks(path, index):
    mask = torch.zeros(1, 16, 16)
    mask[..., :8] = index + 1
    return {**as_dict(path, index), "mask": mask}


def test_members_that_a_later_stage_reads_are_stored(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    made = [
        gpuaug.DecodeStage(),
        gpuaug.TransformStage(resized, on="image"),
        gpuaug.TransformStage(lambda images, masks: (images.flip(-1), masks.flip(-1)), on=("image", "mask")),
        gpuaug.TransformStage(lambda labels: labels.add_(100), on="label", name="in place"),
        gpuaug.FeatureStage(Masked(), on=("image", "mask"), into="latents", cache=cache),
    ]
    streamed = loader(cache.wrap(Files(paths, half_masks)), made, shuffle=None, generator=None)
    first, second = whole_epochs(streamed, 2)
    os.utime(paths[2], ns=(1, 1))
    streamed.set_epoch(0)
    third = list(streamed)
    assert streamed.stats().rows_encoded == COUNT + 1
    for recorded, *others in zip(first, second, third, strict=True):
        for batch in others:
            assert_equal({name: batch[name] for name in batch}, {name: recorded[name] for name in batch})
            assert {"mask", "label", "latents"} <= batch.keys()
    assert "image" not in second[0]


def copy_packed(copier, batch, copy=Copier.copy):
    """Copy a batch with packed target dicts, as to a GPU: the number of boxes after a removal is then known later."""
    copied = copy(copier, pack_targets(batch, lambda shape, dtype: None))
    copied.packed = True
    return copied


def test_batches_are_not_packed_with_their_columns(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(Copier, "copy", copy_packed)
    more = {f"state {number}": torch.zeros(3) for number in range(8)}
    cache = FeatureCache(tmp_path / "cache")
    made = [gpuaug.DecodeStage(on="image"), *stages(cache)[1:]]
    streamed = loader(cache.wrap(Files(paths, lambda path, index: {**as_dict(path, index), **more})), made)
    first, second = epochs_of(streamed, 2)
    assert_equal(second, first)


def test_boxes_that_a_stage_removed_are_not_recorded(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(Copier, "copy", copy_packed)
    pipeline = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop((8, 8))])

    def sample(path, index):
        boxes = torch.tensor([[0.0, 0, 3, 3], [3, 4, 20, 18], [1, 1, 12, 12]][: index % 4]).reshape(-1, 4)
        return {**as_dict(path, index), "target": {"boxes": boxes, "labels": torch.arange(len(boxes))}}

    def targets(cache, dataset, epochs):
        made = [
            gpuaug.DecodeStage(on="image"),
            gpuaug.TransformStage(gpuaug.fuse(pipeline, ragged=True), on={"image": "input", "target": "targets"}),
            gpuaug.TransformStage(gpuaug.sanitize, on="target"),
            gpuaug.TransformStage(lambda images: images.float(), on="image"),
            gpuaug.FeatureStage(encoder(), on="image", into="latents", cache=cache),
        ]
        streamed = loader(dataset, made)
        return [
            {
                int(label): torch.cat([target["boxes"], target["labels"][:, None]], 1)
                for batch in streamed
                for label, target in zip(batch["label"], batch["target"], strict=True)
            }
            for _ in range(epochs)
        ]

    cache = FeatureCache(tmp_path / "cache")
    dataset = Files(paths, sample)
    [expected] = targets(None, dataset, 1)
    assert 0 < sum(map(len, expected.values())) < sum(index % 4 for index in range(COUNT))
    for rows in targets(cache, cache.wrap(dataset), 2):
        assert_equal(rows, expected)


@pytest.mark.parametrize("epoch", [0, 2])
def test_an_iterator_whose_data_set_has_a_newer_one(epoch, paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache", views=2)
    wrapped = cache.wrap(Files(paths, as_dict))
    streamed = loader(wrapped, stages(cache), batch=2)
    for _ in range(epoch):
        rows_of(streamed)
    iterator = iter(streamed)
    next(iterator)
    other = loader(wrapped, stages(cache), batch=2)
    other.set_epoch(epoch)
    assert len(rows_of(other)) == COUNT
    next(iterator)  # the same view
    other.set_epoch(epoch + 1)
    assert len(rows_of(other)) == COUNT
    with pytest.raises(IteratorEndedError, match=r"Call cache\.wrap\(dataset\) once for each loader"):
        list(iterator)
    reference = loader(Files(paths, as_dict), stages(None), batch=2)
    other.set_epoch(0)
    assert_equal(rows_of(other), rows_of(reference))


def test_memory_is_reused_in_the_order_of_a_loader_without_a_cache(paths, tmp_path, monkeypatch):
    """Each batch retires its tensors once, with the columns of rows that a lane has read."""
    retired = []
    monkeypatch.setattr(Lanes, "retire", lambda lanes, values, event: retired.append(batches.leaves(values)))
    cache = FeatureCache(tmp_path / "cache")
    dataset = Files(paths, as_dict)
    rows_of(loader(dataset, stages(None)))
    counts = [len(retired)]
    streamed = loader(cache.wrap(dataset), stages(cache))
    rows_of(streamed)
    counts.append(len(retired) - sum(counts))
    for path in paths[::4]:
        os.utime(path, ns=(1, 1))
    list(streamed)
    counts.append(len(retired) - sum(counts))
    assert counts[0] == counts[1] == -(-COUNT // 4) >= counts[2] > 0
    for leaves in retired[-counts[2] :]:
        assert sum(isinstance(leaf, torch.Tensor) and leaf.shape[1:] == (4, 2, 2) for leaf in leaves) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_recorded_before_later_stages_change_them(device, paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    made = [*stages(cache), gpuaug.TransformStage(lambda latents: latents.mul_(2), on="latents")]
    first, second = epochs_of(loader(cache.wrap(Files(paths, as_dict)), made, device=device), 2)
    assert_equal(second, first)


@pytest.mark.parametrize("place", ["write", "_in_ordinary_memory"])
@pytest.mark.parametrize("end", ["break", "error"])
def test_an_error_of_an_epoch_that_was_left_is_raised_at_the_next(end, place, paths, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "no space") if place == "write" else MemoryError("no memory")

    cache = FeatureCache(tmp_path / "cache")
    streamed = loader(cache.wrap(Files(paths, as_dict)), stages(cache))
    expected = GpuAugError if place == "write" else MemoryError
    with monkeypatch.context() as patched:
        patched.setattr(recorder, place, fail)
        with suppress(ZeroDivisionError):
            for _ in streamed:
                if end == "break":
                    break
                raise ZeroDivisionError
        with pytest.raises(expected):
            next(iter(streamed))
    assert len(rows_of(streamed)) == COUNT


def test_an_error_of_the_writing_thread_is_raised(paths, tmp_path, monkeypatch):
    def fail(record):
        raise MemoryError("no memory")

    monkeypatch.setattr(recorder, "_in_ordinary_memory", fail)
    cache = FeatureCache(tmp_path / "cache")
    streamed = loader(cache.wrap(Files(paths, as_dict)), stages(cache))
    with pytest.raises(MemoryError):
        rows_of(streamed)
