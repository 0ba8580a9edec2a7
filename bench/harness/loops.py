"""Training steps, and the loops around them that the suites compare."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bench.data import loaders
from gpuaug import StreamedLoader
from gpuaug.benchkit.windows import Variant

Prepare = Callable[[Tensor], Tensor]


def half(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast: bfloat16, or ``None`` on a CPU, since many CPUs emulate it at a hundredth of the speed."""
    return torch.bfloat16 if device.type == "cuda" else None


class Trainer:
    """One training step of ``model``: forward, cross-entropy, backward, SGD. Never synchronises the host.

    Args:
        model: Already on the device.
        autocast: Data type of the forward pass, or ``None`` for float32.
    """

    def __init__(self, model: nn.Module, *, autocast: torch.dtype | None) -> None:
        self.model = model
        self.autocast = autocast
        self.device_type = next(model.parameters()).device.type
        # A small rate: hundreds of steps on random labels must not end in NaN, which a GPU multiplies with less power.
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device_type, self.autocast, enabled=self.autocast is not None):
            loss = nn.functional.cross_entropy(self.model(inputs), labels.long())
        loss.backward()
        self.optimizer.step()
        return loss


def loop(batches: Iterable, step: Callable[..., object]) -> Callable[[], Iterator[int]]:
    """The steps of a ``Variant``: ``step(images, labels)`` for each batch."""

    def steps() -> Iterator[int]:
        for images, labels in batches:
            step(images, labels)
            yield len(labels)

    return steps


def settled(batches: StreamedLoader, step: Callable[..., object], count: int) -> Callable[[], Iterator[int]]:
    """The steps of a ``Variant`` over a loader with workers, beginning after ``count`` successive batches came in slots.

    A batch larger than all before it comes without a slot, and slots are then made anew; a slot is page-locked when it is
    first read. With batches of hundreds of megabytes both take longer than a window. If batches keep coming without slots, the
    steps begin after ``4 * count`` batches.
    """

    def steps() -> Iterator[int]:
        stats = batches.stats()
        taken = since = others = 0
        for images, labels in batches:
            step(images, labels)
            if since < count and taken < 4 * count:
                taken += 1
                since = since + 1 if stats.other_batches == others else 0
                others = stats.other_batches
                continue
            yield len(labels)

    return steps


def streamed(
    name: str, loader: DataLoader, stage: object, step: Callable[..., object], options: Namespace, stack: ExitStack
) -> Variant:
    """A row of gpuaug: the loop over ``loader`` in a ``StreamedLoader``, which ``stack`` closes."""
    batches = StreamedLoader(loader, [stage], device=options.device, depth=loaders.DEPTH)
    stack.callback(batches.close)
    return Variant(name, loop(batches, step), loaders.queued(loader))


class Serial:
    """The usual loop: copy, prepare and train one after another, on one stream."""

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
    """``module`` on ``device`` as an encoder that is never trained."""
    module = module.eval().requires_grad_(False).to(device)
    return module if memory_format is None else module.to(memory_format=memory_format)


def under_autocast(encoder: nn.Module, device: torch.device) -> Prepare:
    """A function that calls ``encoder`` under autocast, as a handwritten training loop does."""
    dtype = half(device)

    def encode(images: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            return encoder(images)

    return encode
