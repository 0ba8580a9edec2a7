"""Data sets of ``FeatureCache.wrap``: they are read, named and resumed as the data set of the user."""

import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from support.cache.cached_loaders import COUNT, Files, as_dict, assert_equal, epochs_of, loader, rows_of, stages, write_images
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

import gpuaug
from gpuaug import ArgumentError, ArgumentTypeError, FeatureCache


class Stream(IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return (self.dataset[index] for index in range(len(self.dataset)))


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


class WithEpoch(Files):
    """Data set whose labels depend on its epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return {**super().__getitem__(index), "epoch": self.epoch}


def test_epochs_of_a_wrapped_data_set(paths, tmp_path):
    """They are read, set and resumed as without a cache."""
    cache = FeatureCache(tmp_path / "cache")
    results = []
    for wrap, used_cache in ((lambda dataset: dataset, None), (cache.wrap, cache)):
        dataset = WithEpoch(paths[:4], as_dict)
        streamed = loader(wrap(dataset), stages(used_cache))
        dataset.set_epoch(5)
        epochs = [batch["epoch"].tolist() for batch in streamed]
        state = streamed.state_dict()
        resumed = loader(wrap(WithEpoch(paths[:4], as_dict)), stages(used_cache))
        resumed.load_state_dict(state)
        epochs += [batch["epoch"].tolist() for batch in resumed]
        results.append((state["epoch"], epochs, resumed.state_dict()["source"]["epochs"]))
    assert results[0] == results[1]
    assert results[0][0] == 5


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_a_wrapped_stream_of_hugging_face_resumes(is_shuffled, paths, tmp_path):
    """In later epochs, too, although such a stream begins each epoch at the state that it has loaded."""
    import datasets  # takes a second

    samples = [{"image": {"bytes": None, "path": path}, "label": index} for index, path in enumerate(paths)]
    table = datasets.Dataset.from_list(samples).cast_column("image", datasets.Image(decode=False))
    cache = FeatureCache(tmp_path / "cache")

    def stream():
        dataset = table.to_iterable_dataset()
        dataset = cache.wrap(dataset.shuffle(seed=3, buffer_size=8) if is_shuffled else dataset)
        files = StatefulDataLoader(dataset, 4, collate_fn=gpuaug.collate_encoded)
        return gpuaug.StreamedLoader(files, stages(cache), device="cpu", seed=3)

    def labels(batches):
        return [batch["label"].tolist() for batch in batches]

    whole = stream()
    iterator = iter(whole)
    next(iterator)
    state = whole.state_dict()
    expected = [labels(iterator), labels(whole), labels(whole)]
    resumed = stream()
    resumed.load_state_dict(state)
    assert [labels(resumed) for _ in range(3)] == expected


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


def test_arrays_that_name_samples_are_compared_by_all_values(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    content = Path(paths[0]).read_bytes()

    def sample(path, index):
        return {"image": content, "label": index, "id": np.eye(1, 5000, 2500 + index)}

    first, second = epochs_of(loader(cache.wrap(Files(paths, sample), key="id"), stages(cache)), 2)
    assert_equal(second, first)
    assert f" {COUNT} rows" in str(cache)


def test_relative_paths_are_of_the_current_folder(tmp_path, monkeypatch):
    cache_folder, rows = tmp_path / "cache", []
    for number in range(2):
        folder = tmp_path / f"{number}"
        names = [os.path.basename(path) for path in write_images(folder)]
        for name in names:
            image = Image.open(folder / name).point(lambda value, number=number: value // (number + 1))
            image.save(folder / name.replace("png", "bmp"))  # of one size
            os.utime(folder / name.replace("png", "bmp"), (1, 1))
        monkeypatch.chdir(folder)
        cache = FeatureCache(os.path.relpath(cache_folder))
        streamed = loader(cache.wrap(Files([name.replace("png", "bmp") for name in names], as_dict)), stages(cache))
        rows.append(rows_of(streamed))
        monkeypatch.chdir(tmp_path)
        assert streamed.stats().rows_encoded == COUNT
        assert f" {COUNT * (number + 1)} rows" in str(cache)
    assert any(not torch.equal(rows[0][label], rows[1][label]) for label in rows[0])


@pytest.mark.parametrize("key", ["id", 2])
@pytest.mark.parametrize("as_sample", [dict, lambda members: tuple(members.values())])
def test_a_key_that_samples_lack_is_refused(paths, tmp_path, key, as_sample):
    dataset = Files(paths, lambda path, index: as_sample({"image": gpuaug.read_encoded(path), "label": index}))
    wrapped = FeatureCache(tmp_path / "cache").wrap(dataset, key=key)
    with pytest.raises(ArgumentError, match=f"key must name a member of each sample, got {key!r}"):
        wrapped[0]


def test_a_loader_is_not_wrapped(paths, tmp_path):
    files = DataLoader(Files(paths, as_dict), collate_fn=gpuaug.collate_encoded)
    with pytest.raises(ArgumentTypeError, match="Pass the data set, not its loader"):
        FeatureCache(tmp_path / "cache").wrap(files)
