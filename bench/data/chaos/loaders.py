"""Trials of ``python -m bench chaos``: loaders with random delays and one planted fault."""

import io
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import gpuaug
from bench.data.chaos import files

SIDE_PX = 8
MAX_DELAY_CYCLES = 400_000
"""GPU clock cycles of the longest delay, about 0.2 ms: much longer than the work on a batch."""

_DELAYS = random.Random()
"""Generator of the delays. With Python's global generator, a delayed encoder would count as one that draws random numbers."""

FORMS = ("images", "images", "files", "clips", "processor", "structured", "cache")
"""What a batch holds, and the stages for it: images or encoded images in memory; JPEG files; clips of a video file; files for
an image processor of a vision-language model; images for an encoder that returns a dict; files with a feature cache."""

FAULTS = ("none", "break", "close", "dataset", "stage", "kill", "resume", "interleaved")


class PlantedError(Exception):
    """The planted error of a dataset or a stage."""


@dataclass
class Trial:
    """Settings of one trial, drawn from the seed of the run and the number of the trial."""

    seed: int
    number: int
    device: torch.device
    draw: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.draw = draw = random.Random(f"{self.seed}/{self.number}")
        self.fault = draw.choice(FAULTS)
        sources = {"kill": ["workers"], "resume": ["stateful"], "dataset": ["generator", "workers"]}
        default_sources = ["list", "list", "generator", "generator", "generator", "workers"]
        self.source = draw.choice(sources.get(self.fault, default_sources))
        self.workers = draw.randint(1, 2) if self.source == "workers" else draw.choice([0, 0, 0, 1, 2])
        self.encoded = draw.random() < 0.25
        self.count, self.batch_size = draw.randint(4, 24), draw.randint(1, 3)
        self.batches = -(-self.count // self.batch_size)
        self.fault_batch = draw.randrange(self.batches)
        """Index of the batch with the fault."""
        self.stages = draw.choice([("augment",), ("augment",), ("encode",), ("augment", "encode"), ()])
        if self.fault == "stage":
            self.stages = ("augment", "encode")
        self.depth = draw.choice([0, 1, 2, 2, 3, 6])
        self.feed = draw.choice(["auto", "ring", "plain"]) if self.source in ("generator", "workers") else "auto"
        self.epoch = draw.randrange(5)
        self.delayed = {name: draw.random() < 0.5 for name in ("samples", "stages", "decoding", "loop", "lanes")}
        self.form = draw.choice(FORMS)
        self.second_loader = draw.random() < 0.25 and self.fault != "kill"
        """Whether the training loop also reads another loader, one batch at each step.

        Not with a killed worker: torch raises its error at any line of the loop, such as between the two loaders.
        """
        self.views = draw.choice([0, 1, 2])
        """Number of epochs whose features a cache records."""
        if self.form == "cache" and self.fault in ("stage", "interleaved"):  # the cache has stages of its own, and one reader
            self.form = "processor"
        if self.form == "cache":
            self.views = max(self.views, 1)
            self.is_recorded = draw.random() < 0.6
            """Whether a feature cache has the rows of all views when the trial begins. Otherwise the trial records them."""
            self.epoch = self.epoch if self.is_recorded else self.epoch % self.views
            self.source = "stateful" if self.source == "stateful" else "workers"
        self.encoded |= self.form in ("files", "clips", "processor", "cache")

    def __str__(self) -> str:
        settings = {key: value for key, value in vars(self).items() if key not in ("draw", "seed", "number", "device")}
        return ", ".join(f"{key} {value}" for key, value in settings.items())

    @property
    def has_exact_pixels(self) -> bool:
        """Whether pixels are stored without loss, so that a checksum of the host is that of the delivered images."""
        return self.form in ("images", "structured")

    def pause(self, actor: str, max_ms: float = 1.0) -> None:
        """Delay the calling thread at random, if delays of ``actor`` are enabled. ``actor`` is a key of ``delayed``."""
        if self.delayed[actor] and _DELAYS.random() < 0.3:
            time.sleep(_DELAYS.random() * max_ms / 1e3)

    def stall(self) -> None:
        """Delay the current stream at random, if delays of lanes are enabled."""
        if self.delayed["lanes"] and self.device.type == "cuda" and _DELAYS.random() < 0.4:
            torch.cuda._sleep(_DELAYS.randrange(MAX_DELAY_CYCLES))


class Samples(Dataset[dict[str, Any]]):
    """Samples whose content is seeded by the trial and the index of the sample."""

    def __init__(self, trial: Trial, fault: str | None = None) -> None:
        self.trial, self.fault = trial, fault

    def __len__(self) -> int:
        return self.trial.count

    def image(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.trial.number + index)
        return torch.randint(0, 256, (3, SIDE_PX, SIDE_PX), dtype=torch.uint8, generator=generator)

    def __getitem__(self, index: int) -> dict[str, Any]:
        trial = self.trial
        if self.fault is not None and index // trial.batch_size == trial.fault_batch:
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise PlantedError
        trial.pause("samples")
        image = self.image(index)
        return {"images": self._stored(image, index), "index": index, "sum": checksum(image)}

    def _stored(self, image: Tensor, index: int) -> Any:
        trial = self.trial
        if trial.form == "clips":
            return gpuaug.read_clip(files.video_file(), [index % 3, 4, 5 + index % 3])
        if not trial.has_exact_pixels:
            return gpuaug.read_encoded(files.jpeg_file(1000 * trial.number + index))
        return _encode_png(image) if trial.encoded else image


def checksum(image: Tensor) -> int:
    """Return the sum of the pixels, weighted by position, which changes with any pixel and if two pixels are swapped."""
    return int((image.long().flatten() * torch.arange(1, image.numel() + 1)).sum())


def _encode_png(image: Tensor) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "PNG")
    return file.getvalue()


class GeneratedBatches:
    """Iterable of batches without length and without worker processes."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(undelayed_loader(self.samples))


class StallingLeaf:
    """Member of a batch that delays the copy lane: loaders call its ``to``, as for a tensor."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    def to(self, device: torch.device, non_blocking: bool = False) -> "StallingLeaf":
        self._trial.stall()
        return self


class Encoder(nn.Module):
    """Encoder that averages neighbouring values, exactly in float32, so that eager and captured results are equal."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self._trial = trial

    def forward(self, views: Tensor) -> Any:
        self._trial.stall()
        means = views.unfold(-1, 2, 1).sum(-1) * 0.5
        return {"means": means, "others": (means + 1, {"twice": means * 2})} if self._trial.form == "structured" else means


class Stacked(nn.Module):
    """Images of one size as a tensor (B, 3, H, W) with noise. Like ``Means``, it may be a stage before a feature cache."""

    def forward(self, images: gpuaug.Ragged) -> Tensor:
        values = images.data.view(-1, *files.FILE_PX, 3).permute(0, 3, 1, 2).float()
        return values + torch.randint(0, 8, values.shape, device=values.device)


class Means(nn.Module):
    """Encoder that averages neighbouring values."""

    def forward(self, views: Tensor) -> Tensor:
        if views.is_cuda and _DELAYS.random() < 0.4:
            torch.cuda._sleep(_DELAYS.randrange(MAX_DELAY_CYCLES))
        return views.unfold(-1, 2, 1).sum(-1) * 0.5


def undelayed_loader(samples: Samples) -> DataLoader[Any]:
    """Return a ``DataLoader`` without worker processes."""
    trial = samples.trial
    return DataLoader(samples, trial.batch_size, collate_fn=gpuaug.collate_encoded if trial.encoded else None)


def source(trial: Trial, samples: Any) -> Any:
    """Return the loader that the ``StreamedLoader`` under test wraps."""
    if trial.source == "list":
        return [batch | {"stalled": StallingLeaf(trial)} for batch in undelayed_loader(samples)]
    if trial.source == "generator":
        return GeneratedBatches(samples)
    loader_type: Any = DataLoader
    if trial.source == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader as loader_type
    collate = gpuaug.collate_encoded if trial.encoded else None
    # A spawned worker imports torch for seconds, and would write its files into a folder of its own. A process of the pool is
    # itself spawned, and then Python spawns by default.
    context = "fork" if trial.workers else None
    return loader_type(
        samples, trial.batch_size, num_workers=trial.workers, collate_fn=collate, multiprocessing_context=context
    )


def stages(
    trial: Trial, raises: bool, cache: gpuaug.FeatureCache | None = None
) -> list[gpuaug.TransformStage | gpuaug.FeatureStage | gpuaug.DecodeStage]:
    """Return the stages of a trial.

    Args:
        trial: The trial.
        raises: Whether the first stage raises at batch ``trial.fault_batch``.
        cache: Cache of the features, if ``trial.form`` has one.
    """
    calls = iter(range(10_000))

    def augment(images: Any) -> Tensor:
        trial.pause("stages")
        if next(calls) == trial.fault_batch and raises:
            raise PlantedError
        trial.stall()
        values = (images.data if isinstance(images, gpuaug.Ragged) else images).float()
        return values.to(torch.int32).float() + torch.randint(0, 8, values.shape, device=values.device).float()

    backend = "cpu" if trial.has_exact_pixels else "auto"
    stage_list: list[Any] = [gpuaug.DecodeStage(on="images", backend=backend, threads=2)] if trial.encoded else []
    if trial.form == "cache":
        stage_list.append(gpuaug.TransformStage(Stacked(), on="images"))
        return [*stage_list, gpuaug.FeatureStage(Means(), on="images", into="features", cache=cache)]
    images = "images"
    if trial.form == "processor":
        images = "pixels"
        stage_list.append(
            gpuaug.TransformStage(gpuaug.fuse(files.ViTImageProcessor(), ragged=True), on="images", into=(images,))
        )
    if trial.stages:
        stage_list.append(gpuaug.TransformStage(augment, on=images, into="views", name="augment"))
    if "encode" in trial.stages:
        stage_list.append(gpuaug.FeatureStage(Encoder(trial), on="views", into="features", name="encode"))
    return stage_list


def loader(
    trial: Trial, samples: Samples, *, raises: bool = False, cache: gpuaug.FeatureCache | None = None
) -> gpuaug.StreamedLoader:
    """Return the ``StreamedLoader`` under test, at the epoch of the trial."""
    options = {"depth": trial.depth, "feed": trial.feed, "seed": trial.seed, "device": trial.device}
    dataset = samples if cache is None else cache.wrap(samples)
    streamed = gpuaug.StreamedLoader(source(trial, dataset), stages(trial, raises, cache), **options)
    streamed.set_epoch(trial.epoch)
    return streamed


def reference(trial: Trial, epoch: int) -> list[dict[str, Any]]:
    """Return the batches of an epoch with ``depth=0``, without delays and without workers, on the host."""
    delayed = trial.delayed
    trial.delayed = dict.fromkeys(trial.delayed, False)
    if trial.form == "cache":
        epoch %= trial.views
    try:
        streamed = gpuaug.StreamedLoader(
            list(undelayed_loader(Samples(trial))),
            stages(trial, False),
            depth=0,
            feed="plain",
            seed=trial.seed,
            device=trial.device,
        )
        streamed.set_epoch(epoch)
        return [on_host(batch) for batch in streamed]
    finally:
        trial.delayed = delayed


def on_host(batch: dict[str, Any]) -> dict[str, Any]:
    """Copy the tensors of a batch to the host. Tensors in containers get the path of their container as a prefix."""
    return {name: value.cpu().clone() for name, value in _tensors("", batch)}


def _tensors(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, gpuaug.Ragged):
        value = value.data
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict | tuple):
        for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(f"{path}.{key}".lstrip("."), inside)


def feature_cache(trial: Trial, stack: ExitStack) -> gpuaug.FeatureCache:
    """Return a cache in a temporary folder, which has the rows of all views if ``trial.is_recorded``."""
    cache = gpuaug.FeatureCache(stack.enter_context(tempfile.TemporaryDirectory()), views=trial.views)
    if trial.is_recorded:
        with loader(trial, Samples(trial), cache=cache) as recording:
            for view in range(trial.views):
                recording.set_epoch(view)
                for _ in recording:
                    pass
    return cache
