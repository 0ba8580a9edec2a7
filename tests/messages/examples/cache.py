"""Advice about feature caches."""

import tempfile
from pathlib import Path

import torch
from PIL import Image
from support.messages.registry import example
from torch import nn
from torch.utils.data import DataLoader

import gpuaug

ENCODER = nn.Flatten()


def photographs():
    """Paths of two images."""
    folder = Path(tempfile.mkdtemp())
    paths = [str(folder / f"{number}.png") for number in range(2)]
    for path in paths:
        Image.new("RGB", (4, 4)).save(path)
    return paths


def first(cache, dataset, collate_fn=gpuaug.collate_encoded, **options):
    """First batch of a loader with a cache."""
    files = DataLoader(dataset, batch_size=2, collate_fn=collate_fn)
    crops = gpuaug.TransformStage(lambda images: torch.stack([image.float() for image in images]), on="image")
    stages = [gpuaug.DecodeStage(), crops, gpuaug.FeatureStage(ENCODER, on="image", into="features", cache=cache, **options)]
    return next(iter(gpuaug.StreamedLoader(files, stages, device="cpu")))


@example("Make the DataLoader of cache.wrap(dataset)")
def data_set_that_is_not_wrapped(told):
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    dataset = [{"image": gpuaug.read_encoded(path)} for path in photographs()]
    with told:
        first(cache, dataset)
    assert first(cache, cache.wrap(dataset))["features"].shape == (2, 48)


@example("Pass collate_fn=gpuaug.collate_encoded to the DataLoader, and return images as members of the samples")
def batch_without_images(told):
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    dataset = [{"image": gpuaug.read_encoded(path)} for path in photographs()]
    with told:
        first(cache, cache.wrap(dataset), collate_fn=lambda samples: {"image": [sample["image"].path for sample in samples]})
    assert first(cache, cache.wrap(dataset), collate_fn=gpuaug.collate_encoded)["features"].shape == (2, 48)


@example("Return gpuaug.read_encoded(path), or the bytes of a file, from the data set")
def sample_without_an_image(told):
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    paths = photographs()
    with told:
        first(cache, cache.wrap([{"image": path} for path in paths]))
    assert first(cache, cache.wrap([{"image": gpuaug.read_encoded(path)} for path in paths]))["features"].shape == (2, 48)


@example("put the other encoder before it, without cache=")
def two_caches(told):
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    dataset = [{"image": gpuaug.read_encoded(path)} for path in photographs()]

    def loader(**options):
        files = DataLoader(cache.wrap(dataset), batch_size=2, collate_fn=gpuaug.collate_encoded)
        crops = gpuaug.TransformStage(lambda images: torch.stack([image.float() for image in images]), on="image")
        first = gpuaug.FeatureStage(ENCODER, on="image", into="first", **options)
        second = gpuaug.FeatureStage(ENCODER, on="image", into="second", cache=cache)
        return gpuaug.StreamedLoader(files, [gpuaug.DecodeStage(), crops, first, second], device="cpu")

    with told:
        next(iter(loader(cache=cache)))
    assert next(iter(loader())).keys() == {"image", "first", "second"}
