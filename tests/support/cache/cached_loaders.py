"""Loaders with a feature cache over files in a folder, and the rows that an epoch gives per sample."""

from pathlib import Path
from typing import NamedTuple

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import gpuaug

COUNT = 22

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def write_images(folder: Path, count: int = COUNT) -> list[str]:
    """Write PNG files of noise, and return their paths."""
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(7)
    paths = [str(folder / f"{index:03}.png") for index in range(count)]
    for index, path in enumerate(paths):
        Image.fromarray(generator.integers(0, 256, (20 + index % 5, 24, 3), np.uint8)).save(path)
    return paths


class Files(Dataset):
    """Map-style data set: ``sample`` makes the sample of (path, index)."""

    def __init__(self, paths, sample):
        self.paths, self.sample = paths, sample

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.sample(self.paths[index], index)


def as_dict(path, index):
    return {"image": gpuaug.read_encoded(path), "label": index}


def encoder(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2)).requires_grad_(False)


def augmentation() -> gpuaug.Fused:
    return gpuaug.fuse(K.AugmentationSequential(K.RandomResizedCrop((16, 16)), K.RandomHorizontalFlip()), ragged=True)


def stages(cache, *, on="image", module=None, into="latents", transform=None, **options):
    module = encoder() if module is None else module
    return [
        gpuaug.DecodeStage(),
        gpuaug.TransformStage(augmentation() if transform is None else transform, on=on),
        gpuaug.FeatureStage(module, on=on, into=into, cache=cache, **options),
    ]


def loader(dataset, loader_stages, *, batch=4, device="cpu", seed=3, depth=2, **options):
    """Return a loader that shuffles. Two loaders of the same arguments have the same batches."""
    options = {"shuffle": True, "generator": torch.Generator().manual_seed(1), **options}
    files = DataLoader(dataset, batch, collate_fn=gpuaug.collate_encoded, **options)
    if device != "cpu":
        for stage in loader_stages:
            if isinstance(stage, gpuaug.FeatureStage):
                stage.encoder.to(device)
    return gpuaug.StreamedLoader(files, loader_stages, device=device, seed=seed, depth=depth)


def rows_of(batches, value=lambda batch: batch["latents"], label=lambda batch: batch["label"]):
    """Return label → value of each sample of the batches."""
    return {
        int(number): row.cpu() for batch in batches for number, row in zip(label(batch).tolist(), value(batch), strict=True)
    }


def epochs_of(streamed, count, **functions):
    with streamed:
        return [rows_of(streamed, **functions) for _ in range(count)]


def assert_equal(rows, expected):
    assert rows.keys() == expected.keys()
    for label, row in rows.items():
        torch.testing.assert_close(
            row, expected[label], rtol=0, atol=0, msg=lambda text, label=label: f"sample {label}: {text}"
        )


class Sample(NamedTuple):
    image: object
    label: int


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


def whole_epochs(streamed, count):
    """Return the batches of epochs."""
    with streamed:
        return [list(streamed) for _ in range(count)]
