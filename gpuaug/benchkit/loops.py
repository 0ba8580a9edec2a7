"""Common parts of the compared training loops: datasets, augmentation, models and steps."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

import kornia.augmentation as K
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler
from torchvision.transforms import InterpolationMode, v2

import gpuaug
from gpuaug.core.machine import allowed_cores

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation per channel of the images of ImageNet, for the normalization."""

_JITTER = (0.4, 0.4, 0.4, 0.1)
"""Arguments of ``ColorJitter``: brightness, contrast, saturation and hue."""

_PREFETCH = 2
"""``prefetch_factor`` of the DataLoaders: PyTorch's default. ``Setup.discard`` depends on it."""


@dataclass(frozen=True)
class Setup:
    """Common settings of all loops in a run.

    Args:
        device: Device of the training step.
        images: Dataset, an ``ImageFolder``. Each loop uses a copy of the dataset with the transform of the loop.
        batch_size: Images per step.
        workers: Worker processes of each DataLoader.
        source_px: Side of the square uint8 images that the device loops receive.
        crop_px: Side of the square images that the model receives.
        model: A torchvision classifier, without weights.
        half: Whether to run the model in bfloat16 autocast and the memory format ``torch.channels_last``.
    """

    device: torch.device
    images: Any
    batch_size: int
    workers: int
    source_px: int
    crop_px: int
    model: str
    half: bool

    @property
    def pin_memory(self) -> bool:
        """Whether the DataLoaders page-lock batches."""
        return self.device.type == "cuda"

    @property
    def memory_format(self) -> torch.memory_format:
        """Memory format of the model and its input images."""
        return torch.channels_last if self.half else torch.contiguous_format

    @property
    def discard(self) -> int:
        """Number of steps to discard at the start of a timed window: twice the length of the workers' queue, plus 2.

        The first half uses up the batches that were queued during other loops' windows. During the second half, the workers of
        other loops fill their queues.
        """
        return 2 * max(1, self.workers) * _PREFETCH + 2

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast context of the model and the encoder."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.half else nullcontext()

    def settings(self) -> dict[str, Any]:
        """Return the settings for a result file, with the number of images instead of the dataset."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        del settings["device"]
        counts = {"images": len(self.images), "classes": len(self.images.classes)}
        return settings | counts | {"pin_memory": self.pin_memory}


def setup_for(device: torch.device, images: Any, *, batch_size: int | None, workers: int | None) -> Setup:
    """Return the setup for a benchmark of a few minutes: ResNet-50 at 224 px on a GPU, ResNet-18 at 64 px on a CPU."""
    is_gpu = device.type in ("cuda", "xpu")
    cores = allowed_cores()
    return Setup(
        device=device,
        images=images,
        batch_size=batch_size or (64 if is_gpu else 16),
        workers=workers if workers is not None else max(1, min(12, cores * 3 // 4) if is_gpu else min(4, cores // 2)),
        source_px=256 if is_gpu else 96,
        crop_px=224 if is_gpu else 64,
        model="resnet50" if is_gpu else "resnet18",
        half=is_gpu,
    )


@contextmanager
def reserved_cores(setup: Setup) -> Iterator[None]:
    """Context manager that reserves cores for the workers when training on a CPU, by reducing torch's threads.

    With as many torch threads as cores, each parallel region of a step waits for the end of a worker's time slice: on two
    cores, one of them busy, a step took 1.6 s instead of 0.1 s.
    """
    saved_threads = torch.get_num_threads()
    if setup.device.type == "cpu":
        torch.set_num_threads(max(1, min(saved_threads, allowed_cores() - setup.workers)))
    try:
        yield
    finally:
        torch.set_num_threads(saved_threads)


def to_uint8_images(setup: Setup) -> Any:
    """Return the transform in the workers of loops that augment on the device: resize and crop to a square uint8 tensor."""
    side = setup.source_px
    return v2.Compose([v2.PILToTensor(), v2.Resize(side, antialias=True), v2.CenterCrop(side)])


def cpu_augmentation(setup: Setup) -> Any:
    """Return the augmentation in the workers: from a decoded image to a normalised float32 crop."""
    return v2.Compose(
        [
            v2.PILToTensor(),
            v2.RandomResizedCrop(setup.crop_px, interpolation=InterpolationMode.BILINEAR, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(*_JITTER),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(_MEAN, _STD),
        ]
    )


def kornia_augmentation(setup: Setup) -> Callable[[Tensor], Tensor]:
    """Return the augmentation on the device by Kornia, from uint8 images to normalised float32 images."""
    pipeline = _pipeline(setup).to(setup.device)

    def augment(images: Tensor) -> Tensor:
        augmented: Tensor = pipeline(images.float() / 255)
        return augmented

    return augment


def fused_augmentation(setup: Setup, *, ragged: bool = False) -> Callable[[Tensor], Tensor]:
    """Return the augmentation on the device by ``gpuaug.fuse``, to normalised images of the model's dtype and memory format.

    Args:
        setup: Settings of the run.
        ragged: Whether the input is whole images of any size. The larger crops of whole images are resized with antialiasing.
    """
    dtype = torch.bfloat16 if setup.half else torch.float32
    layout = setup.memory_format
    return gpuaug.fuse(_pipeline(setup), dtype=dtype, memory_format=layout, ragged=ragged, antialias=ragged)


def _pipeline(setup: Setup) -> Any:
    """Return the augmentation of the loops on the device, as a pipeline of Kornia for floats in [0, 1]."""
    return K.AugmentationSequential(
        K.RandomResizedCrop((setup.crop_px, setup.crop_px)),
        K.RandomHorizontalFlip(),
        K.ColorJitter(*_JITTER),
        K.Normalize(torch.tensor(_MEAN, device="cpu"), torch.tensor(_STD, device="cpu")),
    )


def images_with(setup: Setup, transform: Any) -> Any:
    """Return a copy of the dataset with another transform, without listing the folder again."""
    images = copy(setup.images)
    images.transform = transform
    return images


def batches(setup: Setup, transform: Any) -> DataLoader[Any]:
    """Return a loader of endless batches, in the same order for every loop.

    With epochs, the workers' queues would be empty at the end of an epoch, which would slow down only some windows.
    """
    return _endless(setup, images_with(setup, transform))


def encoded_batches(setup: Setup) -> DataLoader[Any]:
    """Return a loader of endless batches of the same files, not decoded, for a ``DecodeStage``."""
    files = images_with(setup, None)
    files.loader = gpuaug.read_encoded  # function with which an ``ImageFolder`` reads a file
    return _endless(setup, files, gpuaug.collate_encoded)


def _endless(setup: Setup, dataset: Any, collate: Callable[[Any], Any] | None = None) -> DataLoader[Any]:
    """Return a loader of 10⁹ samples, drawn with replacement in the same order in every run."""
    endless_sampler = RandomSampler(dataset, replacement=True, num_samples=10**9, generator=torch.Generator().manual_seed(0))
    return DataLoader(
        dataset,
        batch_size=setup.batch_size,
        sampler=endless_sampler,
        num_workers=setup.workers,
        collate_fn=collate,
        pin_memory=setup.pin_memory,
        persistent_workers=setup.workers > 0,
        prefetch_factor=_PREFETCH if setup.workers else None,
    )


def to_device(setup: Setup, batch: Any) -> tuple[Tensor, Tensor]:
    """Copy a batch to the device, as a loop without a ``StreamedLoader`` does."""
    images, labels = batch
    return images.to(setup.device, non_blocking=True), labels.to(setup.device, non_blocking=True)


def classifier_step(setup: Setup) -> Callable[[Tensor, Tensor], None]:
    """Return the training step of the classifier on normalised images."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(setup.model, weights=None, num_classes=len(setup.images.classes))
    return _step(setup, model.to(setup.device, memory_format=setup.memory_format))


def head_step(setup: Setup, features: int) -> Callable[[Tensor, Tensor], None]:
    """Return the training step of a two-layer head on an encoder's output of ``features`` numbers per image."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(features, 1024), nn.GELU(), nn.Linear(1024, len(setup.images.classes)))
    return _step(setup, head.to(setup.device))


def frozen_encoder(setup: Setup) -> tuple[nn.Module, int]:
    """Return (frozen classifier without its last layer, number of output features)."""
    torch.manual_seed(0)
    encoder: Any = torchvision.models.get_model(setup.model, weights=None)
    features = int(encoder.fc.in_features)
    encoder.fc = nn.Identity()
    encoder = encoder.eval().requires_grad_(False)
    return encoder.to(setup.device, memory_format=setup.memory_format), features


def _step(setup: Setup, model: nn.Module) -> Callable[[Tensor, Tensor], None]:
    """Return the training step of a model: cross entropy and SGD, on inputs and labels on the device."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(inputs: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        if inputs.ndim == 4:  # images, not features
            inputs = inputs.contiguous(memory_format=setup.memory_format)
        with setup.autocast():
            loss = F.cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step
