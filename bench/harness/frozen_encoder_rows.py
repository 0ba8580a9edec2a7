"""The rows of every suite with a frozen encoder whose batches are on the card before it starts."""

from argparse import Namespace
from contextlib import ExitStack
from typing import Any

import torch

import gpuaug
from bench.data import loaders
from bench.harness.loops import Serial, Trainer, half, loop
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
    """A frozen encoder before a trained head, over batches on the card: by hand, and as a feature stage."""
    device = options.device
    cycled = loaders.cycle(batches)
    with torch.no_grad():
        encoded = loaders.cycle([(encode(images), labels) for images, labels in batches])
    variants = [
        Variant("serial", loop(Serial(cycled, device, encode), train)),
        Variant("encoder alone", loop(Serial(cycled, device, encode), lambda *_: None)),
        Variant("training alone", loop(encoded, train)),
    ]
    forms = {
        "captured, in line": ("auto", 0),
        "feature stage, eager": ("never", loaders.DEPTH),
        "feature stage": ("auto", loaders.DEPTH),
    }
    for name, (capture, depth) in forms.items():
        stage = gpuaug.FeatureStage(encoder, autocast=half(device), memory_format=memory_format, capture=capture)
        streamed = gpuaug.StreamedLoader(cycled, [stage], device=device, depth=depth)
        stack.callback(streamed.close)
        variants.append(Variant(name, loop(streamed, train), discard=loaders.DEPTH + 2))
    return variants
