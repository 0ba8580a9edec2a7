"""Trials of ``python -m bench chaos``: loaders with random delays and one planted fault."""

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

SIDE_PX = 8
MAX_DELAY_CYCLES = 400_000
"""GPU clock cycles of the longest delay, about 0.2 ms: much longer than the work on a batch."""

_DELAYS = random.Random()
"""Generator of the delays. With Python's global generator, a delayed encoder would count as one that draws random numbers."""

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

    def __str__(self) -> str:
        settings = {key: value for key, value in vars(self).items() if key not in ("draw", "seed", "number", "device")}
        return ", ".join(f"{key} {value}" for key, value in settings.items())

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
        return {"images": _encode_png(image) if trial.encoded else image, "index": index, "sum": checksum(image)}


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

    def forward(self, views: Tensor) -> Tensor:
        self._trial.stall()
        return views.unfold(-1, 2, 1).sum(-1) * 0.5


def undelayed_loader(samples: Samples) -> DataLoader[Any]:
    """Return a ``DataLoader`` without worker processes."""
    trial = samples.trial
    return DataLoader(samples, trial.batch_size, collate_fn=gpuaug.collate_encoded if trial.encoded else None)


def source(trial: Trial, samples: Samples) -> Any:
    """Return the loader that the ``StreamedLoader`` under test wraps."""
    if trial.source == "list":
        return [batch | {"stalled": StallingLeaf(trial)} for batch in undelayed_loader(samples)]
    if trial.source == "generator":
        return GeneratedBatches(samples)
    loader_type: Any = DataLoader
    if trial.source == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader as loader_type
    collate = gpuaug.collate_encoded if trial.encoded else None
    return loader_type(samples, trial.batch_size, num_workers=trial.workers, collate_fn=collate)


def stages(trial: Trial, raises: bool) -> list[gpuaug.TransformStage | gpuaug.FeatureStage | gpuaug.DecodeStage]:
    """Return the stages of a trial. ``raises``: the first stage raises at batch ``trial.fault_batch``."""
    calls = iter(range(10_000))

    def augment(images: Any) -> Tensor:
        trial.pause("stages")
        if next(calls) == trial.fault_batch and raises:
            raise PlantedError
        trial.stall()
        values = (images.data if isinstance(images, gpuaug.Ragged) else images).float()
        return values.to(torch.int32).float() + torch.randint(0, 8, values.shape, device=values.device).float()

    stage_list: list[Any] = [gpuaug.DecodeStage(on="images", backend="cpu")] if trial.encoded else []
    if trial.stages:
        stage_list.append(gpuaug.TransformStage(augment, on="images", into="views", name="augment"))
    if "encode" in trial.stages:
        stage_list.append(gpuaug.FeatureStage(Encoder(trial), on="views", into="features", name="encode"))
    return stage_list


def loader(trial: Trial, samples: Samples, *, raises: bool = False) -> gpuaug.StreamedLoader:
    """Return the ``StreamedLoader`` under test, at the epoch of the trial."""
    options = {"depth": trial.depth, "feed": trial.feed, "seed": trial.seed, "device": trial.device}
    streamed = gpuaug.StreamedLoader(source(trial, samples), stages(trial, raises), **options)
    streamed.set_epoch(trial.epoch)
    return streamed


def reference(trial: Trial, epoch: int) -> list[dict[str, Any]]:
    """Return the batches of an epoch with ``depth=0``, without delays and without workers, on the host."""
    delayed = trial.delayed
    trial.delayed = dict.fromkeys(trial.delayed, False)
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
    """Copy the tensors of a batch to the host."""
    tensors = {name: value.data if isinstance(value, gpuaug.Ragged) else value for name, value in batch.items()}
    return {name: value.cpu().clone() for name, value in tensors.items() if name != "stalled"}
