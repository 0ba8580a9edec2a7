"""Features of a frozen encoder: encoded in the loop, recorded in a feature cache, read from it, and resident on the device.

    python -m bench run cache

JPEG files of 300 to 700 pixels, random resized crops and flips. Cases:

probe            a linear probe on the class token of a ViT-L/16 at 224 pixels
latents          mean and log variance of the VAE of Stable Diffusion XL at 512 pixels, without a step
latents, train   the same before the step of a denoiser of 300 M parameters

Rows:

encoding         the encoder in a FeatureStage, from a CUDA graph
recording        the same with ``cache=``: each row is copied to the host and written
cached           a later epoch: workers read rows
.npy             a DataLoader of one .npy file per row, with page-locked memory
MDS              the same of shards of MosaicML Streaming, if the package is installed
resident         ceiling: the step on features that stay on the device

The files of rows are in the page cache.
"""

import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import kornia.augmentation as K
import numpy as np
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import gpuaug
from bench.data import diffusion_models as models
from bench.data import encoded_images, loaders
from bench.harness import flags, measurement
from bench.harness.loops import DenoiserTrainer, Trainer, autocast_dtype, frozen, loop
from gpuaug.benchkit.windows import Variant

BATCHES = {"probe": 256, "latents": 64, "latents, train": 8}


class Files(Dataset[dict[str, Any]]):
    """Samples of image files."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": gpuaug.read_encoded(self.paths[index]), "label": index % 1000}


class Arrays(Dataset[dict[str, Any]]):
    """Samples of one .npy file each, with the bytes of a bfloat16 tensor."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"features": torch.from_numpy(np.load(self.paths[index])).view(torch.bfloat16), "label": index % 1000}


class Shards(Dataset[dict[str, Any]]):
    """Samples of shards of MosaicML Streaming, with the bytes of a bfloat16 tensor.

    Args:
        folder: Folder to write the shards into.
        rows: Rows to write, as arrays of int16.
    """

    def __init__(self, folder: Path, rows: Sequence[np.ndarray]) -> None:
        import streaming

        with streaming.MDSWriter(out=str(folder), columns={"features": "ndarray:int16", "label": "int"}) as writer:
            for index, row in enumerate(rows):
                writer.write({"features": row, "label": index % 1000})
        self.dataset = streaming.LocalDataset(str(folder))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.dataset[int(index)]
        return {"features": torch.from_numpy(sample["features"].copy()).view(torch.bfloat16), "label": sample["label"]}


class Case(NamedTuple):
    """Encoder and step of a case."""

    encoder: Any
    size: int
    step: Callable[[Tensor, Tensor], object]


class ClassToken(nn.Module):
    """Class token of a vision transformer of torchvision, in bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        model.heads = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).bfloat16()


class Moments(nn.Module):
    """Mean and log variance of ``VaeEncoder``, one tensor in bfloat16."""

    def __init__(self, vae: models.VaeEncoder) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, images: Tensor) -> Tensor:
        encoded = self.vae.encode(images * 2 - 1)
        return torch.cat([encoded["mean"], encoded["log_variance"]], 1).bfloat16()


def make_case(name: str, device: torch.device, options: Namespace) -> Case:
    """Return the models of a case, with random weights."""
    if name == "probe":
        vit = torchvision.models.vit_b_16() if options.quick else torchvision.models.vit_l_16()
        head = nn.Linear(vit.hidden_dim, 1000).to(device)
        trainer = Trainer(head, autocast=autocast_dtype(device))
        return Case(frozen(ClassToken(vit), device), 224, lambda features, labels: trainer(features.float(), labels))
    vae = frozen(Moments(models.VaeEncoder(options.width)), device, torch.channels_last)
    if name == "latents":
        return Case(vae, options.size, lambda moments, _: moments.float().mean())
    train = DenoiserTrainer(models.Denoiser(2 * options.width, 6 * options.width, 14).to(device), device)
    states = torch.zeros(BATCHES[name], 77, 6 * options.width, device=device)

    def step(moments: Tensor, _: Tensor) -> object:
        mean, log_variance = moments.chunk(2, 1)
        return train(models.sample_latents({"mean": mean, "log_variance": log_variance}), states[: len(mean)])

    return Case(vae, options.size, step)


def members(batches: Iterable[Any], device: torch.device | None = None) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield (features, labels) of batches, on ``device`` if it is passed."""
    for batch in batches:
        features, labels = batch["features"], batch["label"]
        yield (
            (features, labels)
            if device is None
            else (features.to(device, non_blocking=True), labels.to(device, non_blocking=True))
        )


class Repeated:
    """Iterable of ``members``, which begins anew in each window."""

    def __init__(self, batches: Iterable[Any], device: torch.device | None = None) -> None:
        self.batches, self.device = batches, device

    def __iter__(self) -> Any:
        return iter(members(self.batches, self.device))


def variants(options: Namespace, name: str, stack: ExitStack) -> list[Variant]:
    device = options.device
    case = make_case(name, device, options)
    batch_size = min(BATCHES[name], options.count)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    paths = sorted(map(str, encoded_images.make("small", count=options.count).glob("*/*")))
    augment = gpuaug.fuse(
        K.AugmentationSequential(K.RandomResizedCrop((case.size, case.size)), K.RandomHorizontalFlip()), ragged=True
    )

    def streamed(dataset: Any, cache: gpuaug.FeatureCache | None, *, endless: bool = True) -> gpuaug.StreamedLoader:
        stages = [
            gpuaug.DecodeStage(on="image"),
            gpuaug.TransformStage(augment, on="image"),
            gpuaug.FeatureStage(case.encoder, on="image", into="features", autocast=autocast_dtype(device), cache=cache),
        ]
        if endless:
            files = loaders.endless(dataset, batch_size, options, collate=gpuaug.collate_encoded, pin=False)
        else:
            files = DataLoader(dataset, batch_size, num_workers=options.workers, collate_fn=gpuaug.collate_encoded)
        return stack.enter_context(gpuaug.StreamedLoader(files, stages, device=device, seed=0))

    cache = gpuaug.FeatureCache(folder / "cached")
    wrapped = cache.wrap(Files(paths))
    filling = streamed(wrapped, cache, endless=False)
    resident = []
    arrays = []
    for batch in filling:
        resident.append((batch["features"].clone(), batch["label"].clone()))
        for features in batch["features"].cpu():
            arrays.append(folder / f"{len(arrays)}.npy")
            np.save(arrays[-1], features.view(torch.int16).numpy())
    filling.close()
    peers = {".npy": Arrays(arrays)}
    if find_spec("streaming"):
        peers["MDS"] = Shards(folder / "mds", [np.load(path) for path in arrays])
    reading = streamed(wrapped, cache)
    reading.set_epoch(1)
    recorded = gpuaug.FeatureCache(folder / "recorded")
    recording = streamed(recorded.wrap(Files(paths)), recorded)
    readers = {name: loaders.endless(dataset, batch_size, options) for name, dataset in peers.items()}
    depth = loaders.DEPTH + 2
    row_bytes = resident[0][0][0].nbytes

    def notes(loader: gpuaug.StreamedLoader) -> dict[str, Any]:
        stats = loader.stats()
        return {"row_bytes": row_bytes, "rows_read": stats.rows_read, "rows_encoded": stats.rows_encoded,
                "rows_dropped": stats.rows_dropped}  # fmt: skip

    return [
        Variant("encoding", loop(Repeated(streamed(Files(paths), None)), case.step), depth),
        Variant("recording", loop(Repeated(recording), case.step), depth, partial(notes, recording)),
        Variant("cached", loop(Repeated(reading), case.step), 4 * options.workers, partial(notes, reading)),
        *(
            Variant(name, loop(Repeated(reader, device), case.step), loaders.queue_length(reader))
            for name, reader in readers.items()
        ),
        Variant("resident", loop(loaders.repeat_batches(resident[:4]), case.step)),
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("cache", __doc__, batch="0", size=512, seconds=1.0, repeats=3)
    parser.add_argument("--cases", default=";".join(BATCHES), help="separated by semicolons (default: %(default)s)")
    parser.add_argument("--count", type=int, default=2048, help="number of files (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="channels of the VAE's first level (default: %(default)s)")
    options = flags.parse(parser, argv)
    return measurement.measure(
        "cache",
        options,
        [({"case": name, "batch_size": BATCHES[name]}, partial(variants, options, name)) for name in options.cases.split(";")],
        baseline="encoding",
        ours=("encoding", "recording", "cached"),
        ceilings=("resident",),
    )
