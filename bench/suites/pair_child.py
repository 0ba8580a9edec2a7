"""Child process of ``python -m bench pair``: runs windows of rows with the first gpuaug on ``PYTHONPATH``.

It answers requests from standard input, one line of JSON each. It imports only modules of ``bench`` that use public names of
gpuaug, since the modules of the other checkout may differ.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models as torchvision_models
from torchvision.datasets import ImageFolder

import gpuaug
from bench.data import loaders, models, pipelines, random_images, scenes

TRAINING_BATCH = DETECTION_BATCH = 32
_WARM_STEPS, _COUNTED_STEPS = 4, 8


def augment(case: str, options: Namespace, _stack: ExitStack) -> Iterator[int]:
    """Call a fused pipeline on a batch on the device."""
    side = min(224, options.size)
    bfloat16 = {"dtype": torch.bfloat16, "memory_format": torch.channels_last}
    pipeline, output_format = {
        "seed": (lambda: pipelines.heavy_kornia(options.size, cropping="slice"), {}),
        "cls": (lambda: pipelines.classification_kornia(side, cropping="slice"), bfloat16),
        "ssl": (lambda: pipelines.contrastive_kornia(side, cropping="slice"), bfloat16),
        "randaugment": (lambda: pipelines.randaugment_kornia(cropping="slice"), bfloat16),
        "torchvision's cls": (lambda: pipelines.classification_torchvision(side), bfloat16),
        "torchvision's randaugment": (pipelines.randaugment_torchvision, bfloat16),
    }[case]
    call = gpuaug.fuse(pipeline(), **output_format)
    images = torch.randint(256, (options.batch, 3, options.size, options.size), dtype=torch.uint8, device=options.device)
    while True:
        call(images)
        yield options.batch


def ragged(case: str, options: Namespace, _stack: ExitStack) -> Iterator[int]:
    """Crop a ragged batch on the device."""
    side = min(224, options.size)
    pool = random_images.RaggedImages((options.size * 300 // 256, options.size * 700 // 256), count=options.batch)
    batch = gpuaug.collate_ragged(pool.images[: options.batch]).to(options.device)
    pipeline = pipelines.classification_kornia(side, cropping="slice")
    output_format = {"dtype": torch.bfloat16, "memory_format": torch.channels_last}
    call = gpuaug.fuse(pipeline, ragged=True, antialias=case == "antialiased", **output_format)
    while True:
        call(batch)
        yield options.batch


def feeds(_case: str, options: Namespace, stack: ExitStack) -> Iterator[int]:
    """Transfer batches of images in memory from workers to the device."""
    data = random_images.RepeatedRandomImages(options.size)
    loader = stack.enter_context(
        gpuaug.StreamedLoader(
            loaders.endless(data, options.batch, options, pin=False),
            device=options.device,
            feed="auto" if options.device.type == "cuda" else "ring",
        )
    )
    for batch in loader:
        yield len(batch[0])


def files(_case: str, options: Namespace, stack: ExitStack) -> Iterator[int]:
    """Read files in workers, and decode, crop and augment the images."""
    data = ImageFolder(options.files, loader=gpuaug.read_encoded)
    loader = loaders.endless(data, options.batch, options, collate=gpuaug.collate_encoded, pin=False)
    pipeline = pipelines.classification_kornia(min(224, options.size), cropping="slice")
    output_format = {"dtype": torch.bfloat16, "memory_format": torch.channels_last}
    stages = [gpuaug.DecodeStage(), gpuaug.fuse(pipeline, ragged=True, antialias=True, **output_format)]
    for images, _ in stack.enter_context(gpuaug.StreamedLoader(loader, stages, device=options.device)):
        yield len(images)


def detection(case: str, options: Namespace, stack: ExitStack) -> Iterator[int]:
    """Crop images with boxes and masks of about seven objects per image, on the device, or from workers by a loader."""
    batch_size = min(DETECTION_BATCH, options.batch)
    data = scenes.Scenes(options.size * 5 // 2, ("boxes", "labels", "masks"), count=batch_size)
    call = gpuaug.fuse(pipelines.classification_kornia(2 * options.size, cropping="slice"), ragged=True)
    if case == "workers":
        loader = loaders.endless(data, batch_size, options, collate=gpuaug.collate_ragged, pin=False)
        stage = gpuaug.TransformStage(call, on={0: "input", 1: "targets"})
        for images, _ in stack.enter_context(gpuaug.StreamedLoader(loader, [stage], device=options.device)):
            yield len(images)
    images = gpuaug.collate_ragged([image for image, _ in data.items]).to(options.device)
    targets = [{key: value.to(options.device) for key, value in target.items()} for _, target in data.items]
    while True:
        call(images, targets, data_keys=["input", "targets"])
        yield batch_size


def classifier(_case: str, options: Namespace, stack: ExitStack) -> Iterator[int]:
    """Train the published classifier on batches of a loader with a fused stage."""
    data = random_images.RandomImages(options.size)
    stage = gpuaug.fuse(pipelines.heavy_kornia(options.size, cropping="slice"))
    loader = loaders.endless(data, TRAINING_BATCH, options, pin=False)
    step = training_step(models.Classifier(random_images.CLASSES, 16), options.device, autocast=False)
    for images, labels in stack.enter_context(gpuaug.StreamedLoader(loader, [stage], device=options.device)):
        step(images, labels)
        yield len(labels)


def encoder_decoder(_case: str, options: Namespace, stack: ExitStack) -> Iterator[int]:
    """Train the published decoder on features of a frozen encoder, which a loader's stage computes."""
    data = random_images.RandomImages(options.size, labels="pixel")
    loader = loaders.endless(data, min(TRAINING_BATCH, options.batch), options)
    encoder = models.Encoder().requires_grad_(False).to(options.device)
    stage = gpuaug.FeatureStage(encoder, autocast=torch.bfloat16 if options.device.type == "cuda" else None)
    step = training_step(models.Decoder(random_images.CLASSES), options.device)
    for features, labels in stack.enter_context(gpuaug.StreamedLoader(loader, [stage], device=options.device)):
        step(features, labels)
        yield len(labels)


def launch_bound(case: str, options: Namespace, stack: ExitStack) -> Iterator[int]:
    """Train a ResNet-18, bound by launches, on the same images in every step, with a loader with or without a fused stage."""
    side = min(224, options.size)
    device = options.device
    fused = gpuaug.fuse(pipelines.classification_kornia(side, cropping="slice"), dtype=torch.bfloat16)
    loader = loaders.endless(random_images.RepeatedRandomImages(options.size), TRAINING_BATCH, options, pin=False)
    stages = [fused] if case == "fused" else []
    streamed = stack.enter_context(gpuaug.StreamedLoader(loader, stages, device=device))
    step = training_step(torchvision_models.resnet18().to(memory_format=torch.channels_last), device)
    images = torch.randn(TRAINING_BATCH, 3, side, side, device=device).contiguous(memory_format=torch.channels_last)
    for _, labels in streamed:
        step(images, labels)
        yield len(labels)


def training_step(model: nn.Module, device: torch.device, *, autocast: bool = True) -> Callable[[Tensor, Tensor], None]:
    """Return a training step of ``model``, which is moved to ``device``: cross-entropy and SGD, on a GPU under autocast."""
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step(inputs: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast and device.type == "cuda"):
            loss = nn.functional.cross_entropy(model(inputs), labels.long())
        loss.backward()
        optimizer.step()

    return step


ROWS: dict[str, tuple[Callable[[str, Namespace, ExitStack], Iterator[int]], str, bool]] = {
    "augment, seed": (augment, "seed", False),
    "augment, cls": (augment, "cls", False),
    "augment, ssl": (augment, "ssl", False),
    "augment, randaugment": (augment, "randaugment", False),
    "augment, torchvision's cls": (augment, "torchvision's cls", False),
    "augment, torchvision's randaugment": (augment, "torchvision's randaugment", False),
    "ragged": (ragged, "", False),
    "ragged, antialiased": (ragged, "antialiased", False),
    "detection": (detection, "", False),
    "detection, workers": (detection, "workers", True),
    "feeds": (feeds, "", True),
    "files": (files, "", True),
    "classifier": (classifier, "", True),
    "encoder-decoder": (encoder_decoder, "", True),
    "launch-bound": (launch_bound, "", True),
    "launch-bound, fused": (launch_bound, "fused", True),
}
"""Name of a row: (function that yields images per step, case, whether batches queue up between windows)."""


class Row:
    """A row whose loop is running."""

    def __init__(self, name: str, options: Namespace, stack: ExitStack) -> None:
        make, case, queues = ROWS[name]
        self._steps = make(case, options, stack)
        self._device = options.device
        self._discard = queues * (2 * options.workers + loaders.DEPTH + 4)
        for _ in range(_WARM_STEPS + self._discard):
            next(self._steps)

    def window(self, seconds: float) -> float:
        """Run the loop for ``seconds``, and return the images per second."""
        for _ in range(self._discard):
            next(self._steps)
        images = 0
        self._synchronize()
        start = perf_counter()
        while perf_counter() < start + seconds:
            images += next(self._steps)
        self._synchronize()
        return images / (perf_counter() - start)

    def count(self) -> dict[str, float]:
        """Return the numbers of kernels and allocations per step, including those of the training step. Empty on a CPU."""
        if self._device.type != "cuda":
            return {}
        from torch.profiler import ProfilerActivity, profile

        def allocated() -> int:
            return int(torch.cuda.memory_stats()["allocation.all.allocated"])

        before = allocated()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            for _ in range(_COUNTED_STEPS):
                next(self._steps)
            self._synchronize()
        device_events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        kernels = [event for event in device_events if not event.name.startswith(("Mem", "gpuaug/"))]
        return {"kernels": len(kernels) / _COUNTED_STEPS, "allocations": (allocated() - before) / _COUNTED_STEPS}

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=torch.device)
    for name in ("rows", "files"):
        parser.add_argument(f"--{name}")
    for name in ("workers", "size", "batch"):
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args()
    names = options.rows.split(";") if options.rows else list(ROWS)
    if not set(names) <= set(ROWS):
        raise SystemExit(f"--rows must be among {'; '.join(ROWS)}, got {options.rows}. Leave it out to measure all of them.")
    rows: dict[str, Row] = {}
    with ExitStack() as stack:
        answer([[name for name in names if ROWS[name][2] == queues] for queues in (False, True)])
        for line in sys.stdin:
            request: dict[str, Any] = json.loads(line)
            name = request["row"]
            if name not in rows:
                rows[name] = Row(name, options, stack)
            answer(rows[name].count() if request.get("count") else rows[name].window(request["seconds"]))


def answer(value: Any) -> None:
    print(json.dumps({"answer": value}), flush=True)


if __name__ == "__main__":
    main()
