"""Rows of suites with a frozen encoder, on batches that are on the card already."""

from argparse import Namespace
from contextlib import ExitStack
from typing import Any

import torch

import gpuaug
from bench.data import loaders
from bench.harness.loops import Serial, Trainer, autocast_dtype, loop
from gpuaug.benchkit.windows import Variant

OURS = ("feature stage", "feature stage, eager", "captured, in line")
CEILINGS = ("encoder alone", "training alone")


def resident_variants(
    encoder: torch.nn.Module,
    encode: Any,
    train: Trainer,
    batches: list[Any],
    options: Namespace,
    stack: ExitStack,
    memory_format: torch.memory_format | None = None,
) -> list[Variant]:
    """Return rows that train a head on a frozen encoder, which runs in the loop or in a ``FeatureStage``.

    Args:
        encoder: Frozen encoder on the device.
        encode: Function that calls ``encoder`` as a handwritten loop does.
        train: Training step of the head.
        batches: Batches (images, labels) on the card.
        options: Options of the suite.
        stack: Closes the loaders.
        memory_format: Memory format of the images for the encoder.
    """
    device = options.device
    repeated_batches = loaders.repeat_batches(batches)
    with torch.no_grad():
        encoded_batches = loaders.repeat_batches([(encode(images), labels) for images, labels in batches])
    variants = [
        Variant("serial", loop(Serial(repeated_batches, device, encode), train)),
        Variant("encoder alone", loop(Serial(repeated_batches, device, encode), lambda *_: None)),
        Variant("training alone", loop(encoded_batches, train)),
    ]
    stage_settings = {
        "captured, in line": ("auto", 0),
        "feature stage, eager": ("never", loaders.DEPTH),
        "feature stage": ("auto", loaders.DEPTH),
    }
    for name, (capture, depth) in stage_settings.items():
        stage = gpuaug.FeatureStage(encoder, autocast=autocast_dtype(device), memory_format=memory_format, capture=capture)
        streamed = gpuaug.StreamedLoader(repeated_batches, [stage], device=device, depth=depth)
        stack.callback(streamed.close)
        variants.append(Variant(name, loop(streamed, train), discard=loaders.DEPTH + 2))
    return variants
