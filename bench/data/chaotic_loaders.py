"""Loaders with random delays and one planted fault: the trials of ``python -m bench chaos``."""

import io
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import gpuaug

SIDE = 8
CYCLES = 400_000
"""Cycles of the longest delay on a GPU, about 0.2 ms: much longer than the work on a batch."""

_DELAYS = random.Random()
"""Generator of the delays. Python's global generator would make an encoder that is delayed look as if it drew numbers."""

FAULTS = ("none", "break", "close", "dataset", "stage", "kill", "resume", "interleaved")


class PlantedError(Exception):
    """The error of a dataset or a stage."""


@dataclass
class Trial:
    """The settings of one trial, all drawn from the run's seed and the trial's number."""

    seed: int
    number: int
    device: torch.device
    draw: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.draw = draw = random.Random(f"{self.seed}/{self.number}")
        self.fault = draw.choice(FAULTS)
        sources = {"kill": ["workers"], "resume": ["stateful"], "dataset": ["generator", "workers"]}
        usual = ["list", "list", "generator", "generator", "generator", "workers"]
        self.source = draw.choice(sources.get(self.fault, usual))
        self.workers = draw.randint(1, 2) if self.source == "workers" else draw.choice([0, 0, 0, 1, 2])
        self.encoded = draw.random() < 0.25
        self.count, self.batch_size = draw.randint(4, 24), draw.randint(1, 3)
        self.batches = -(-self.count // self.batch_size)
        self.at = draw.randrange(self.batches)
        """Index of the batch at which the fault happens."""
        self.stages = draw.choice([("augment",), ("augment",), ("encode",), ("augment", "encode"), ()])
        if self.fault == "stage":
            self.stages = ("augment", "encode")
        self.depth = draw.choice([0, 1, 2, 2, 3, 6])
        self.feed = draw.choice(["auto", "ring", "plain"]) if self.source in ("generator", "workers") else "auto"
        self.epoch = draw.randrange(5)
        self.delayed = {name: draw.random() < 0.5 for name in ("samples", "stages", "decoding", "loop", "lanes")}

    def __str__(self) -> str:
        shown = {key: value for key, value in vars(self).items() if key not in ("draw", "seed", "number", "device")}
        return ", ".join(f"{key} {value}" for key, value in shown.items())

    def pause(self, what: str, most_ms: float = 1.0) -> None:
        """Delay the calling thread at random."""
        if self.delayed[what] and _DELAYS.random() < 0.3:
            time.sleep(_DELAYS.random() * most_ms / 1e3)

    def stall(self) -> None:
        """Delay the current stream at random."""
        if self.delayed["lanes"] and self.device.type == "cuda" and _DELAYS.random() < 0.4:
            torch.cuda._sleep(_DELAYS.randrange(CYCLES))


class Samples(Dataset[dict[str, Any]]):
    """Samples whose content is seeded by the trial and their index."""

    def __init__(self, trial: Trial, fault: str | None = None) -> None:
        self.trial, self.fault = trial, fault

    def __len__(self) -> int:
        return self.trial.count

    def image(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.trial.number + index)
        return torch.randint(0, 256, (3, SIDE, SIDE), dtype=torch.uint8, generator=generator)

    def __getitem__(self, index: int) -> dict[str, Any]:
        trial = self.trial
        if self.fault is not None and index // trial.batch_size == trial.at:
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise PlantedError
        trial.pause("samples")
        image = self.image(index)
        return {"images": _file(image) if trial.encoded else image, "index": index, "sum": checksum(image)}


def checksum(image: Tensor) -> int:
    """A position-weighted sum: it changes with any pixel, and when two pixels are swapped."""
    return int((image.long().flatten() * torch.arange(1, image.numel() + 1)).sum())


def _file(image: Tensor) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "PNG")
    return file.getvalue()


class Generated:
    """Batches that a generator makes."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(plain(self.samples))


class Stalled:
    """A leaf that delays the copy lane: loaders move it by its ``to``, like a tensor."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    def to(self, device: torch.device, non_blocking: bool = False) -> "Stalled":
        self._trial.stall()
        return self


class Encoder(nn.Module):
    """Means of neighbouring values, exact in float32, so that eager and captured results are equal."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self._trial = trial

    def forward(self, views: Tensor) -> Tensor:
        self._trial.stall()
        return views.unfold(-1, 2, 1).sum(-1) * 0.5


def plain(samples: Samples) -> DataLoader[Any]:
    """Batches without worker processes."""
    trial = samples.trial
    return DataLoader(samples, trial.batch_size, collate_fn=gpuaug.collate_encoded if trial.encoded else None)


def source(trial: Trial, samples: Samples) -> Any:
    """The loader that the loader under test wraps."""
    if trial.source == "list":
        return [batch | {"stalled": Stalled(trial)} for batch in plain(samples)]
    if trial.source == "generator":
        return Generated(samples)
    kind: Any = DataLoader
    if trial.source == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader as kind
    made = gpuaug.collate_encoded if trial.encoded else None
    return kind(samples, trial.batch_size, num_workers=trial.workers, collate_fn=made)


def stages(trial: Trial, failing: bool) -> list[gpuaug.TransformStage | gpuaug.FeatureStage | gpuaug.DecodeStage]:
    """The stages of a trial. A ``failing`` one raises at the trial's batch."""
    calls = iter(range(10_000))

    def augment(images: Any) -> Tensor:
        trial.pause("stages")
        if next(calls) == trial.at and failing:
            raise PlantedError
        trial.stall()
        values = (images.data if isinstance(images, gpuaug.Ragged) else images).float()
        return values.to(torch.int32).float() + torch.randint(0, 8, values.shape, device=values.device).float()

    made: list[Any] = [gpuaug.DecodeStage(on="images", backend="cpu")] if trial.encoded else []
    if trial.stages:
        made.append(gpuaug.TransformStage(augment, on="images", into="views", name="augment"))
    if "encode" in trial.stages:
        made.append(gpuaug.FeatureStage(Encoder(trial), on="views", into="features", name="encode"))
    return made


def loader(trial: Trial, samples: Samples, *, failing: bool = False) -> gpuaug.StreamedLoader:
    """The loader under test, at the trial's epoch."""
    options = {"depth": trial.depth, "feed": trial.feed, "seed": trial.seed, "device": trial.device}
    made = gpuaug.StreamedLoader(source(trial, samples), stages(trial, failing), **options)
    made.set_epoch(trial.epoch)
    return made


def reference(trial: Trial, epoch: int) -> list[dict[str, Any]]:
    """An epoch's batches with ``depth=0``, without delays and without workers."""
    usual = trial.delayed
    trial.delayed = dict.fromkeys(trial.delayed, False)
    try:
        made = gpuaug.StreamedLoader(
            list(plain(Samples(trial))), stages(trial, False), depth=0, feed="plain", seed=trial.seed, device=trial.device
        )
        made.set_epoch(epoch)
        return [on_host(batch) for batch in made]
    finally:
        trial.delayed = usual


def on_host(batch: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a batch, on the host."""
    found = {name: value.data if isinstance(value, gpuaug.Ragged) else value for name, value in batch.items()}
    return {name: value.cpu().clone() for name, value in found.items() if name != "stalled"}
