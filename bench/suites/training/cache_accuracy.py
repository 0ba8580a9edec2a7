"""Accuracy of a head that is trained on features with few views per image, and on features that are computed in every epoch.

    python -m bench run cache_accuracy

Handwritten digits of scikit-learn (1,797 images of 8 x 8 pixels, enlarged four times). A small encoder is trained on the digits
0 to 4 and frozen. A head of two layers is trained on its features of the digits 5 to 9: ``--images`` images, random resized
crops and rotations, the rest of the images for validation. For every seed all rows have the same images, in the same order, and
the head the same weights.

fresh        the encoder in the loop: other crops and rotations in every epoch
views=V      a feature cache: epoch e has the crops and rotations of epoch e mod V
"""

import tempfile
from argparse import Namespace
from collections.abc import Sequence
from statistics import fmean
from time import perf_counter
from typing import Any

import kornia.augmentation as K
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

import gpuaug
from bench.harness import flags, measurement
from bench.harness.console import console, print_rows
from bench.harness.loops import top1_percent
from gpuaug.benchkit.environment import environment

SIZE, WIDTH = 32, 64
VIEWS = {"fresh": 0, "views=8": 8, "views=4": 4, "views=1": 1}
COLUMNS = ("name", "top1_percent", "top1_low_percent", "top1_high_percent")


def digits() -> tuple[Tensor, Tensor]:
    """Return the images (N, 3, 32, 32) uint8 and labels (N,) of scikit-learn's digits."""
    from sklearn.datasets import load_digits  # not a package of an extra

    loaded = load_digits()
    images = torch.from_numpy(loaded.images * 255 / 16).byte()
    enlarged = images.repeat_interleave(4, 1).repeat_interleave(4, 2)
    return enlarged[:, None].expand(-1, 3, -1, -1), torch.from_numpy(loaded.target)


def train_encoder(images: Tensor, labels: Tensor, steps: int) -> nn.Module:
    """Train an encoder with a linear classifier, and return the frozen encoder. ``images``: float32 in [0, 1]."""
    encoder = nn.Sequential(
        *(nn.Conv2d(3, WIDTH // 2, 3, 2, 1), nn.ReLU(), nn.Conv2d(WIDTH // 2, WIDTH, 3, 2, 1), nn.ReLU()),
        *(nn.Conv2d(WIDTH, WIDTH, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
    ).to(images.device)
    classifier = nn.Linear(4 * WIDTH, 5, device=images.device)
    optimizer = torch.optim.Adam([*encoder.parameters(), *classifier.parameters()], lr=2e-3)
    for _ in range(steps):
        index = torch.randint(len(images), (64,), device=images.device)
        loss = nn.functional.cross_entropy(classifier(encoder(images[index])), labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return encoder.requires_grad_(False).eval()


def train_head(
    encoder: nn.Module,
    samples: list[tuple[bytes, int]],
    validation: tuple[Tensor, Tensor],
    views: int,
    seed: int,
    options: Namespace,
) -> float:
    """Train a head, and return its top-1 accuracy in percent.

    Args:
        encoder: Frozen encoder.
        samples: (bytes of an image file, label) of each training image.
        validation: (images, labels), on the device.
        views: Views of the feature cache; 0 without a cache.
        seed: Seed of the order, of the augmentation and of the head.
        options: Options of the suite.
    """
    augment = gpuaug.fuse(
        K.AugmentationSequential(K.RandomResizedCrop((SIZE, SIZE), scale=(0.4, 1.0)), K.RandomRotation(25.0, p=1.0)),
        ragged=True,
    )
    torch.manual_seed(seed)
    head = nn.Sequential(nn.Linear(4 * WIDTH, 128), nn.ReLU(), nn.Linear(128, 5)).to(options.device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3)
    with tempfile.TemporaryDirectory() as folder:
        cache = gpuaug.FeatureCache(folder, views=views) if views else None
        files = DataLoader(
            cache.wrap(samples) if cache else samples,
            options.batch[0],
            sampler=RandomSampler(samples, generator=torch.Generator().manual_seed(seed)),
            collate_fn=gpuaug.collate_encoded,
        )
        stages = [gpuaug.DecodeStage(), augment, gpuaug.FeatureStage(encoder, cache=cache)]
        with gpuaug.StreamedLoader(files, stages, device=options.device, seed=seed) as loader:
            for _ in range(options.epochs):
                for features, labels in loader:
                    loss = nn.functional.cross_entropy(head(features), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
    images, labels = validation
    return top1_percent(nn.Sequential(encoder, head).eval(), (images, labels), None)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("cache_accuracy", __doc__, batch="50", size=SIZE, repeats=10, spare=2)
    parser.add_argument("--images", type=int, default=100, help="number of training images (default: %(default)s)")
    parser.add_argument("--epochs", type=int, help="epochs of each training (default: 96; with --quick 2)")
    options = flags.parse(parser, argv)
    options.epochs = options.epochs or (2 if options.quick else 96)
    machine = environment(options.device)
    start = perf_counter()
    images, labels = digits()
    known = labels < 5
    floats = images.to(options.device) / 255
    runs: dict[str, list[float]] = {name: [] for name in VIEWS}
    times_s: dict[str, list[float]] = {name: [] for name in VIEWS}
    for seed in range(options.repeats):
        torch.manual_seed(seed)
        encoder = train_encoder(floats[known], labels[known].to(options.device), 10 if options.quick else 300)
        others = torch.nonzero(~known).flatten()[torch.randperm(int((~known).sum()))]
        samples = [(encoded(images[index]), int(labels[index]) - 5) for index in others[: options.images]]
        validated = others[options.images :]
        validation = floats[validated], (labels[validated] - 5).to(options.device)
        for name, views in VIEWS.items():
            begin_s = perf_counter()
            runs[name].append(train_head(encoder, samples, validation, views, seed, options))
            times_s[name].append(perf_counter() - begin_s)
            console.print(f"cache_accuracy: seed {seed}, {name}: {runs[name][-1]:.1f} %")
    rows = [
        {
            "name": name,
            "batch_size": options.batch[0],
            "top1_percent": fmean(top1),
            "top1_low_percent": min(top1),
            "top1_high_percent": max(top1),
            "top1_seeds": top1,
            "wall_s": fmean(times_s[name]),
        }
        for name, top1 in runs.items()
    ]
    print_rows([{key: row[key] for key in COLUMNS} for row in rows], "cache_accuracy: top-1 over the seeds")
    settings = {
        "baseline": "fresh",
        "ours": [name for name in VIEWS if name != "fresh"],
        "ceilings": [],
        "columns": COLUMNS,
        "images": "digits 5 to 9 of scikit-learn",
        "train_images": options.images,
        "val_images": len(labels) - int(known.sum()) - options.images,
        "classes": 5,
    }
    return measurement.finish("cache_accuracy", options, rows, settings, machine, start)


def encoded(image: Tensor) -> bytes:
    """Return a PNG file of an image (3, H, W) uint8."""
    with tempfile.SpooledTemporaryFile() as file:
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "PNG")
        file.seek(0)
        return file.read()
