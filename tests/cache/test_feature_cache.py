"""``FeatureCache``: from epoch V on, each sample has the row of epoch e mod V of a loader without a cache, bit for bit."""

import os
import shutil
import sys
import textwrap

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support.cache.cached_loaders import (
    COUNT,
    DEVICES,
    FORMS,
    Files,
    as_dict,
    assert_equal,
    augmentation,
    encoder,
    epochs_of,
    loader,
    rows_of,
    stages,
)
from support.comparison.values import assert_values
from support.video import videos
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset

import gpuaug
from gpuaug import ArgumentError, FeatureCache, GpuAugWarning, cli
from gpuaug.cache.dataset import view_folder
from gpuaug.cache.key import write_key
from gpuaug.cache.shards import SUFFIX, RowBlock, write_file
from gpuaug.core.errors import IteratorEndedError


def spoil(paths):
    """Overwrite files without a change of size and time: a file that is opened cannot be decoded."""
    for path in paths:
        status = os.stat(path)
        with open(path, "r+b") as file:
            file.write(bytes(status.st_size))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


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


def test_a_replaced_sample_with_a_row_is_encoded_as_its_replacement(paths, tmp_path):
    """A row is missing, so the batch is encoded again, and a file is damaged without another size or time."""
    cache = FeatureCache(tmp_path / "cache")
    made = stages(cache, transform=gpuaug.fuse(K.AugmentationSequential(K.Resize((16, 16))), ragged=True))
    made[0] = gpuaug.DecodeStage(on_error="replace")
    streamed = loader(cache.wrap(Files(paths[:8], as_dict)), made, batch=8)
    [recorded] = epochs_of(streamed, 1)
    status = os.stat(paths[5])
    with open(paths[5], "r+b") as file:
        file.write(bytes(40))
    os.utime(paths[5], ns=(status.st_atime_ns, status.st_mtime_ns))
    os.utime(paths[0], ns=(1, 1))
    [batch] = streamed
    labels = batch["label"].tolist()
    assert sorted(set(labels)) == [0, 1, 2, 3, 4, 6, 7]
    for label, row in zip(labels, batch["latents"], strict=True):
        assert_values(row, recorded[label], atol=1e-6)


@pytest.mark.parametrize("into", ["latents", "target"])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_replaced_clip_behind_the_encoder_replaces_the_row(missing, into, paths, tmp_path):
    """The rows were recorded when all clips could be decoded."""
    videos_of = [tmp_path / f"{index}.mp4" for index in range(8)]
    for path in videos_of:
        shutil.copy(videos.video(), path)

    def sample(path, index):
        target = {"boxes": torch.full((index % 3, 4), float(index))}
        return {**as_dict(path, index), "clip": gpuaug.read_clip(videos_of[index], [0]), "target": target}

    cache = FeatureCache(tmp_path / "cache")
    _, *others = stages(cache)
    moved = gpuaug.TransformStage(lambda targets: [{"boxes": 2 * target["boxes"]} for target in targets], on="target")
    decode = gpuaug.DecodeStage(on="clip", on_error="replace", max_replaced=1, name="clips")
    made = [gpuaug.DecodeStage(on="image"), moved, *others, decode]
    streamed = loader(cache.wrap(Files(paths[:8], sample), key="label"), made)
    [recorded] = epochs_of(streamed, 1)
    videos_of[5].write_bytes(b"no video")
    for path in paths[:missing]:
        os.utime(path, ns=(1, 1))
    batches = list(streamed)
    labels = [label for batch in batches for label in batch["label"].tolist()]
    assert sorted(set(labels)) == [0, 1, 2, 3, 4, 6, 7]
    assert streamed.stats().rows_encoded == 8 + missing
    for batch in batches:
        values = batch[into] if into == "latents" else [target["boxes"] for target in batch["target"]]
        for label, value in zip(batch["label"].tolist(), values, strict=True):
            if into == "target":
                assert_values(value, torch.full((label % 3, 4), 2.0 * label))
            elif not missing or (label >= missing and labels.count(label) == 1):  # otherwise perhaps encoded again
                assert_values(value, recorded[label])


def test_ranks_write_their_rows_and_read_all(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    dataset = Files(paths, as_dict)
    for rank in range(2):
        rows_of(loader(cache.wrap(Subset(dataset, range(rank, COUNT, 2))), stages(cache)))
    streamed = loader(cache.wrap(dataset), stages(cache))
    assert len(rows_of(streamed)) == COUNT
    assert streamed.stats().rows_read == COUNT


def test_rows_of_different_shapes_are_refused(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    dataset = Files(paths, as_dict)
    as_batch = gpuaug.TransformStage(lambda images: torch.stack([image.float() for image in images]), on="image")
    made = [gpuaug.DecodeStage(), as_batch, *stages(cache, module=nn.Identity())[2:]]

    def read(batch_indices):
        files = DataLoader(cache.wrap(dataset), batch_sampler=batch_indices, collate_fn=gpuaug.collate_encoded)
        return list(gpuaug.StreamedLoader(files, made, device="cpu"))

    read([[0, 5], [1, 6]])
    assert len(read([[0, 5], [6, 1]])) == 2
    with pytest.raises(ArgumentError, match="Batch images of one size together"):
        read([[0, 1]])


def test_loaders_without_a_decode_stage(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    with pytest.raises(gpuaug.ArgumentTypeError, match="DecodeStage"):
        list(loader(cache.wrap(Files(paths, as_dict)), stages(cache)[2:]))


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


def test_the_size_is_logged_and_printed(paths, tmp_path, caplog):
    caplog.set_level("INFO", "gpuaug")
    cache = FeatureCache(tmp_path / "cache", views=2)
    rows_of(loader(cache.wrap(Files(paths, as_dict)), stages(cache)))
    assert "The feature cache in" in caplog.text
    assert f"view 0: {COUNT} rows" in str(cache)
    assert cache.key in str(cache)


def test_rows_of_an_earlier_release_are_counted(tmp_path):
    folder = view_folder(tmp_path, "0" * 16, 0)
    write_key(folder.parent, {})
    rows = RowBlock(folder, 0, np.zeros((1, 5), np.int64), ["a.jpg"], (), {"latents": torch.ones(1, 2)}, {})
    write_file(folder / f"000001-0-0{SUFFIX}", rows.shard_content())
    assert "view 0: 1 rows" in str(FeatureCache(tmp_path))


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
    assert "must return a StreamedLoader with a feature cache, got a StreamedLoader without one" in capsys.readouterr().err


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
