"""Three uses of ``gpuaug``, each as loops to compare: training a classifier, a head on a frozen encoder, augmentation alone.

A *variant* is one of the compared loops. In every *round* each variant runs for one timed window.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

import gpuaug
from gpuaug.benchkit import loops
from gpuaug.benchkit.loops import Setup
from gpuaug.benchkit.windows import Variant
from gpuaug.core.devices import plain_torch_reason

_GPUAUG_PREFIXES = ("StreamedLoader", "gpuaug.")
"""Beginnings of the names of variants that use gpuaug."""

_STEP_ALONE = "step alone, batch resident"
"""Name of the variant whose steps all use one batch, which is on the device: an upper limit of the rate of any loader."""

_RATIO_TOLERANCE = 0.03
"""Tolerance for the difference between two ratios of a variant's rate to the baseline's.

The first ratio is the median of the ratios of the rounds. The second is the ratio of the median rates over all rounds. They are
equal if the speed of the machine is constant. If they differ by more than the tolerance, ``verdict`` says that it has changed.
"""


@dataclass(frozen=True)
class Use:
    """Variants that are measured in the same rounds."""

    case: str
    """Title of the use, in the table and as ``case`` of each result row."""
    baseline: str
    """Name of the variant to which ratios refer."""
    variants: list[Variant]


def three_uses(setup: Setup) -> list[Use]:
    """Return the uses that ``gpuaug bench`` measures, in the order of its table."""
    return [classifier(setup), frozen_encoder(setup), augmentation(setup)]


def classifier(setup: Setup) -> Use:
    """Compare training of a classifier on photographs, augmented in workers, in the loop, or in a ``StreamedLoader``."""

    def in_workers() -> Iterator[int]:
        step = loops.classifier_step(setup)
        for batch in loops.batches(setup, loops.cpu_augmentation(setup)):
            images, labels = loops.to_device(setup, batch)
            step(images, labels)
            yield len(labels)

    def serial() -> Iterator[int]:
        step, augment = loops.classifier_step(setup), loops.kornia_augmentation(setup)
        for batch in loops.batches(setup, loops.to_uint8_images(setup)):
            images, labels = loops.to_device(setup, batch)
            step(augment(images), labels)
            yield len(labels)

    def streamed(augmentation: Callable[[Setup], Callable[[Tensor], Tensor]]) -> Iterator[int]:
        step = loops.classifier_step(setup)
        yield from _streamed(
            setup, loops.batches(setup, loops.to_uint8_images(setup)), step, [gpuaug.TransformStage(augmentation(setup))]
        )

    def from_files() -> Iterator[int]:
        augment = loops.fused_augmentation(setup, ragged=True)
        stages = [gpuaug.DecodeStage(), gpuaug.TransformStage(augment)]
        yield from _streamed(setup, loops.encoded_batches(setup), loops.classifier_step(setup), stages)

    def resident() -> Iterator[int]:
        step = loops.classifier_step(setup)
        images, labels = _resident_batch(setup)
        images = loops.kornia_augmentation(setup)(images)
        while True:
            step(images, labels)
            yield len(labels)

    return Use(
        f"train {setup.model}",
        "Kornia in the loop (serial)",
        [
            Variant("CPU augmentation in workers", in_workers, setup.discard),
            Variant("Kornia in the loop (serial)", serial, setup.discard),
            Variant("StreamedLoader", partial(streamed, loops.kornia_augmentation), setup.discard),
            Variant("StreamedLoader, fused", partial(streamed, loops.fused_augmentation), setup.discard),
            Variant("StreamedLoader, from files", from_files, setup.discard),
            Variant(_STEP_ALONE, resident),
        ],
    )


def frozen_encoder(setup: Setup) -> Use:
    """Compare training of a head on a frozen encoder, which is called in the loop or is a ``FeatureStage``."""

    def serial() -> Iterator[int]:
        encoder, dim = loops.frozen_encoder(setup)
        step = loops.head_step(setup, dim)
        augment = loops.kornia_augmentation(setup)
        for batch in loops.batches(setup, loops.to_uint8_images(setup)):
            images, labels = loops.to_device(setup, batch)
            images = augment(images).contiguous(memory_format=setup.memory_format)
            with torch.no_grad(), setup.autocast():
                features = encoder(images)
            step(features, labels)
            yield len(labels)

    def streamed() -> Iterator[int]:
        encoder, dim = loops.frozen_encoder(setup)
        stages: list[gpuaug.Stage] = [
            gpuaug.TransformStage(loops.kornia_augmentation(setup)),
            gpuaug.FeatureStage(
                encoder,
                autocast=torch.bfloat16 if setup.half else None,
                memory_format=setup.memory_format if setup.half else None,
            ),
        ]
        yield from _streamed(setup, loops.batches(setup, loops.to_uint8_images(setup)), loops.head_step(setup, dim), stages)

    return Use(
        f"train a head on frozen {setup.model}",
        "encoder in the loop (serial)",
        [
            Variant("encoder in the loop (serial)", serial, setup.discard),
            Variant("StreamedLoader, FeatureStage", streamed, setup.discard),
        ],
    )


def augmentation(setup: Setup) -> Use:
    """Compare augmentation alone, of a batch that is on the device. For another variant, add an entry to ``augmenters``."""
    augmenters: dict[str, Callable[[Setup], Callable[[Tensor], Tensor]]] = {
        "Kornia, eager": loops.kornia_augmentation,
        "gpuaug.fuse": loops.fused_augmentation,
    }

    def steps(build: Callable[[Setup], Callable[[Tensor], Tensor]]) -> Iterator[int]:
        augment = build(setup)
        images, _ = _resident_batch(setup)
        while True:
            augment(images)
            yield len(images)

    return Use("augment alone", "Kornia, eager", [Variant(name, partial(steps, build)) for name, build in augmenters.items()])


def verdict(rows: Sequence[dict[str, Any]], device: torch.device) -> Iterator[str]:
    """Yield sentences about the rows: a comparison of the fastest loops with and without gpuaug, and advice.

    Args:
        rows: Result rows: dicts as ``summarise`` returns them, with the title of the use as ``case``.
        device: Device of the measurement.
    """
    if (reason := plain_torch_reason(device)) is not None:
        yield reason
    cases = [[row for row in rows if row["case"] == case] for case in dict.fromkeys(row["case"] for row in rows)]
    for case in cases:
        yield from _comparison(case)
    if any(_speed_changed(case) for case in cases):
        yield (
            "This machine's speed changed from round to round. If a ratio differs from the ratio of the two rates, use the "
            "ratio in the table: it was computed within rounds."
        )
    if device.type != "cuda":
        yield (
            f"On {device.type} stages run on the processor that trains, so nothing overlaps. The gain of a "
            "StreamedLoader can only be measured on a CUDA device."
        )
    yield "To find what limits the rate of your own loop, run: gpuaug profile train.py:make."


def _comparison(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence about one use, if the use has rows with gpuaug and rows without gpuaug."""
    with_gpuaug = [row for row in rows if row["name"].startswith(_GPUAUG_PREFIXES)]
    without_gpuaug = [row for row in rows if row not in with_gpuaug and row["name"] != _STEP_ALONE]
    if not (with_gpuaug and without_gpuaug):
        return
    best_with, best_without = (max(group, key=lambda row: float(row["ratio"])) for group in (with_gpuaug, without_gpuaug))
    ratios = _within_rounds(best_with, best_without)
    ratio, lowest, highest = median(ratios), min(ratios), max(ratios)
    spread = f"{len(ratios)} rounds: {lowest:.2f} to {highest:.2f}" if len(ratios) > 1 else "a single round"
    if lowest <= 1 <= highest:
        sentence = (
            f"{best_with['name']!r} and {best_without['name']!r} differ by less than their spread: {ratio:.2f}x ({spread})."
        )
    else:
        sentence = (
            f"{best_with['name']!r} is {'faster' if lowest > 1 else 'slower'} than {best_without['name']!r}: {ratio:.2f}x "
            f"({spread})."
        )
    ceiling = next((row for row in rows if row["name"] == _STEP_ALONE), None)
    if ceiling is not None:
        ceiling_ratios = _within_rounds(best_with, ceiling)
        below = max(ceiling_ratios) < 1
        relation = f"reaches {median(ceiling_ratios):.0%} of" if below else "differs by less than the spread of the rounds from"
        sentence += f" {best_with['name']!r} {relation} the rate of the step without a loader."
    yield f"{best_with['case']}: {sentence}"


def _speed_changed(rows: Sequence[dict[str, Any]]) -> bool:
    """Return whether the two ratios of a row differ by more than ``_RATIO_TOLERANCE``. ``rows``: all rows of one use."""
    baseline = next((row for row in rows if row.get("ratio_low") == row.get("ratio_high") == 1), None)
    return baseline is not None and any(
        abs(row["ratio"] - row["steps_per_s"] / baseline["steps_per_s"]) > _RATIO_TOLERANCE for row in rows
    )


def _within_rounds(row: dict[str, Any], reference_row: dict[str, Any]) -> list[float]:
    """Return the rate of ``row`` divided by the rate of ``reference_row``, per round."""
    return [rate / reference for rate, reference in zip(row["rounds"], reference_row["rounds"], strict=True)]


def _streamed(
    setup: Setup, batches: Any, step: Callable[[Tensor, Tensor], None], stages: Sequence[gpuaug.Stage]
) -> Iterator[int]:
    """Train on the batches of a ``StreamedLoader``. Yield the number of images after each step."""
    loader = gpuaug.StreamedLoader(batches, stages, device=setup.device, seed=0)
    try:
        for inputs, labels in loader:
            step(inputs, labels)
            yield len(labels)
    finally:
        loader.close()


def _resident_batch(setup: Setup) -> tuple[Tensor, Tensor]:
    """Return one batch of images and labels on the device."""
    dataset = loops.images_with(setup, loops.to_uint8_images(setup))
    # Samples from the whole dataset, because neighbours have the same class.
    samples = [dataset[index * len(dataset) // setup.batch_size % len(dataset)] for index in range(setup.batch_size)]
    images = torch.stack([image for image, _ in samples])
    labels = torch.tensor([label for _, label in samples], device="cpu")
    return loops.to_device(setup, (images, labels))
