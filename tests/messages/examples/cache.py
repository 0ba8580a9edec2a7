"""Advice about feature caches."""

import tempfile
from pathlib import Path

import torch
from PIL import Image
from support.messages.registry import example
from support.video import videos
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader

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


@example("If the data set consists of several, wrap all of them, or wrap the whole")
def data_sets_of_which_one_is_wrapped(told):
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    parts = [[{"image": gpuaug.read_encoded(path)}] for path in photographs()]
    with told:
        first(cache, ConcatDataset([cache.wrap(parts[0]), parts[1]]))
    for dataset in (ConcatDataset([cache.wrap(part) for part in parts]), cache.wrap(ConcatDataset(parts))):
        assert first(cache, dataset, collate_fn=gpuaug.collate_encoded)["features"].shape == (2, 48)


@example("Pass cache= to the FeatureStage, or make the DataLoader of the data set itself")
def wrapped_data_set_without_a_cache(told):
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    dataset = [{"image": gpuaug.read_encoded(path)} for path in photographs()]
    with told:
        first(None, cache.wrap(dataset))
    assert first(cache, cache.wrap(dataset))["features"].shape == (2, 48)
    assert first(None, dataset)["features"].shape == (2, 48)


@example("Return gpuaug.read_encoded(path), or the bytes of a file, from the data set")
def sample_without_an_image(told):
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    paths = photographs()
    with told:
        first(cache, cache.wrap([{"image": path} for path in paths]))
    assert first(cache, cache.wrap([{"image": gpuaug.read_encoded(path)} for path in paths]))["features"].shape == (2, 48)


@example("Leave it out, and samples are identified by their images")
def key_that_samples_lack(told):
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    dataset = [{"image": gpuaug.read_encoded(path)} for path in photographs()]
    with told:
        first(cache, cache.wrap(dataset, key="id"))
    assert first(cache, cache.wrap(dataset))["features"].shape == (2, 48)


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


CROPS = gpuaug.TransformStage(lambda images: torch.stack([image.float() for image in images]), on="image")


def samples():
    """Samples with an image, a tensor of text and a number."""
    return [
        {"image": gpuaug.read_encoded(path), "text": torch.ones(3), "id": index} for index, path in enumerate(photographs())
    ]


def encode(cache, module=ENCODER, **options):
    return gpuaug.FeatureStage(module, cache=cache, **{"on": "image", "into": "features", **options})


def first_of(wrapped, *stages):
    """First batch of a loader with ``stages`` behind the decoder."""
    files = DataLoader(wrapped, batch_size=2, collate_fn=gpuaug.collate_encoded)
    return next(iter(gpuaug.StreamedLoader(files, [gpuaug.DecodeStage(), CROPS, *stages], device="cpu")))


@example("name each sample with cache.wrap(dataset, key=…), pass on= the members that the stage needs")
def stages_that_read_other_members(told):
    text = gpuaug.TransformStage(lambda texts: texts * 2, on="text", into="states")
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    with told:
        first_of(cache.wrap(samples()), text, encode(cache))
    assert "features" in first_of(cache.wrap(samples(), key="id"), text, encode(cache))
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    assert "states" in first_of(cache.wrap(samples()), encode(cache), text)


@example("Pass on= the images to a DecodeStage before the encoder, and put a DecodeStage for the clips after it")
def clips_with_a_cache(told):
    dataset = [{**sample, "clip": gpuaug.read_clip(videos.video(), [0, 3])} for sample in samples()]
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    with told:
        first_of(cache.wrap(dataset), encode(cache))
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    files = DataLoader(cache.wrap(dataset), batch_size=2, collate_fn=gpuaug.collate_encoded)
    decode, decode_clips = gpuaug.DecodeStage(on="image"), gpuaug.DecodeStage(on="clip", name="clips")
    loader = gpuaug.StreamedLoader(files, [decode, CROPS, encode(cache), decode_clips], device="cpu")
    for _ in range(2):
        [batch] = loader
        assert batch["clip"].shape == (2, 2, 3, 48, 64)
    assert loader.stats().rows_read == 2


@example("pass into= another member there")
def stages_behind_that_read_images(told):
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    with told:
        first_of(cache.wrap(samples()), encode(cache), gpuaug.TransformStage(torch.mean, on="image", into="mean"))
    means = gpuaug.TransformStage(lambda images: images.mean((1, 2, 3)), on="image", into="mean")
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    assert first_of(cache.wrap(samples()), means, encode(cache))["mean"].shape == (2,)


class Pair(nn.Module):
    """Encoder whose result has a text."""

    def forward(self, images):
        return images.mean((2, 3)), "text"


@example("Put the stage that writes it after the encoder, or choose a tensor of an encoder's result with output=")
def results_that_cannot_be_stored(told):
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    with told:
        first_of(cache.wrap(samples()), encode(cache, Pair()))
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    assert first_of(cache.wrap(samples()), encode(cache, Pair(), output=0))["features"].shape == (2, 3)


@example("Write them to another member, with into=")
def names_of_members_that_cannot_be_stored(told):
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    with told:
        first_of(cache.wrap(samples()), encode(cache, into="a::b"))
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    assert first_of(cache.wrap(samples()), encode(cache, into="b"))["b"].shape == (2, 48)


@example("Call cache.wrap(dataset) once for each loader")
def iterators_that_share_a_data_set(told):
    cache = gpuaug.FeatureCache(tempfile.mkdtemp(), views=2)

    def loader(wrapped, epoch):
        files = DataLoader(wrapped, batch_size=1, collate_fn=gpuaug.collate_encoded)
        streamed = gpuaug.StreamedLoader(files, [gpuaug.DecodeStage(), CROPS, encode(cache)], device="cpu", depth=0)
        streamed.set_epoch(epoch)
        return streamed

    shared = cache.wrap(samples())
    older = iter(loader(shared, 0))
    next(older)
    next(iter(loader(shared, 1)))
    with told:
        next(older)
    older = iter(loader(cache.wrap(samples()), 0))
    next(iter(loader(cache.wrap(samples()), 1)))
    assert len(list(older)) == 2


@example("Leave out flatten=, or pass the data set without cache.wrap")
def lists_of_images_with_a_cache(told):
    cache = gpuaug.FeatureCache(tempfile.mkdtemp())
    lists = [{"image": list(map(gpuaug.read_encoded, photographs()))}]
    with told:
        gpuaug.collate_encoded(cache.wrap(lists).__getitems__([0]), flatten="image")
    assert len(gpuaug.collate_encoded(lists, flatten="image")["image"]) == 2
    assert len(gpuaug.collate_encoded(cache.wrap(lists).__getitems__([0]))["image"]) == 2
