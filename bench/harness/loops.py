"""Training steps, and training loops that suites compare."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bench.data import loaders
from gpuaug import StreamedLoader, step_first
from gpuaug.benchkit.windows import Variant

Prepare = Callable[[Tensor], Tensor]

FIRST = ", step first"
"""End of the name of a row that is measured inside ``gpuaug.step_first``."""


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast: bfloat16 on a GPU. ``None`` on a CPU, since many CPUs emulate it a hundred times slower."""
    return torch.bfloat16 if device.type == "cuda" else None


class Trainer:
    """Training step of ``model``: forward, cross-entropy, backward, SGD. Does not synchronise the host.

    Args:
        model: Model, on the device.
        autocast: Data type of autocast in the forward pass. ``None``: no autocast.
    """

    def __init__(self, model: nn.Module, *, autocast: torch.dtype | None) -> None:
        self.model = model
        self.autocast = autocast
        self.device_type = next(model.parameters()).device.type
        # A small learning rate: random labels must not lead to NaN, with which a GPU needs less power and is faster.
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device_type, self.autocast, enabled=self.autocast is not None):
            loss = nn.functional.cross_entropy(self.model(inputs), labels.long())
        loss.backward()
        self.optimizer.step()
        return loss


class DenoiserTrainer:
    """Training step of a denoiser: noise, forward, mean squared error, backward, AdamW. Does not synchronise the host."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda")

    def __call__(self, latents: Tensor, states: Tensor) -> Tensor:
        latents = latents.float()
        noise = torch.randn_like(latents)
        times = torch.rand(len(latents), device=self.device)
        noise_share = times[:, None, None, None]
        dtype = autocast_dtype(self.device)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            predicted = self.model((1 - noise_share) * latents + noise_share * noise, times, states)
        loss = nn.functional.mse_loss(predicted.float(), noise)
        loss.backward()
        self.optimizer.step()
        return loss


def loop(batches: Iterable, step: Callable[..., object]) -> Callable[[], Iterator[int]]:
    """Return the ``steps`` of a ``Variant``, which call ``step(images, labels)`` for each batch."""

    def steps() -> Iterator[int]:
        for images, labels in batches:
            step(images, labels)
            yield len(labels)

    return steps


def settled_loop(batches: StreamedLoader, step: Callable[..., object], count: int) -> Callable[[], Iterator[int]]:
    """Return the ``steps`` of a ``Variant``, which begin after ``count`` successive batches came in slots of the ring.

    A batch that is larger than all before it comes without a slot, and then larger slots are created. A slot is page-locked
    when it is first read. With batches of hundreds of megabytes both take longer than a window. If batches keep coming without
    slots, the steps begin after ``4 * count`` batches.
    """

    def steps() -> Iterator[int]:
        stats = batches.stats()
        warm_batches = slot_batches = other_batches = 0
        for images, labels in batches:
            step(images, labels)
            if slot_batches < count and warm_batches < 4 * count:
                warm_batches += 1
                slot_batches = slot_batches + 1 if stats.other_batches == other_batches else 0
                other_batches = stats.other_batches
                continue
            yield len(labels)

    return steps


def streamed_row(
    name: str, loader: DataLoader, stage: object, step: Callable[..., object], options: Namespace, stack: ExitStack
) -> Variant:
    """Return a row of gpuaug: a loop over ``loader`` in a ``StreamedLoader``, which ``stack`` closes."""
    batches = StreamedLoader(loader, [stage], device=options.device, depth=loaders.DEPTH)
    stack.callback(batches.close)
    return Variant(name, loop(batches, step), loaders.queue_length(loader))


def with_step_first(variant: Variant) -> list[Variant]:
    """Return ``variant``, and a variant that continues the same loop inside ``gpuaug.step_first``, with the same loader."""
    shared = replace(variant, steps=cache(variant.steps), notes=dict)
    return [shared, replace(shared, name=variant.name + FIRST, context=step_first)]


class Serial:
    """Batches of a loop without overlap: copy, ``prepare`` and training one after another, on one stream."""

    def __init__(self, loader: Iterable, device: torch.device, prepare: Prepare) -> None:
        self.loader = loader
        self.device = device
        self.prepare = prepare

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self.loader:
            images = images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            with torch.no_grad():
                images = self.prepare(images)
            yield images, labels


def frozen(module: nn.Module, device: torch.device, memory_format: torch.memory_format | None = None) -> nn.Module:
    """Move ``module`` to ``device``, in evaluation mode and without gradients."""
    module = module.eval().requires_grad_(False).to(device)
    return module if memory_format is None else module.to(memory_format=memory_format)


def under_autocast(encoder: nn.Module, device: torch.device) -> Prepare:
    """Return a function that calls ``encoder`` under autocast, as a handwritten training loop does."""
    dtype = autocast_dtype(device)

    def encode(images: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            return encoder(images)

    return encode


def top1_percent(model: nn.Module, val_tensors: tuple[Tensor, Tensor], dtype: torch.dtype | None) -> float:
    """Return the percentage of images that ``model`` classifies correctly. ``val_tensors``: (images, labels)."""
    images, labels = val_tensors
    with torch.inference_mode(), torch.autocast(images.device.type, dtype, enabled=dtype is not None):
        predictions = torch.cat([model(chunk).argmax(1) for chunk in images.split(256)])
    return 100 * (predictions == labels).float().mean().item()
