"""Two independent frozen encoders as parallel branches, as one module, and one after the other.

    python -m bench run branches

The encoders are ResNet-18 and ResNet-34 without their last layers, with random weights, bfloat16 autocast and channels_last. An
MLP is trained on the features of both. Batches of 224 x 224 float images are on the card already. Rows:

serial             one encoder after the other in the loop
one module         a FeatureStage of a module that runs both: one lane, one graph
branches           a FeatureStage of a dict of encoders: a lane and a graph per encoder
branches, eager    the same without graphs
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import gpuaug
from bench.data import loaders, models
from bench.harness import flags, measurement
from bench.harness.loops import Serial, Trainer, autocast_dtype, frozen, loop, under_autocast
from gpuaug.benchkit.windows import Variant


class AllEncoders(nn.Module):
    """Module that calls all encoders with the same images, one after the other."""

    def __init__(self, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(encoders)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {name: encoder(images) for name, encoder in self.encoders.items()}


class Head(nn.Module):
    """MLP on the concatenated features of all encoders."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = models.Mlp(512 + 512, 1000)

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        return self.mlp(torch.cat(list(features.values()), dim=1))


def variants(options: Namespace, batch_size: int, stack: ExitStack) -> list[Variant]:
    device = options.device
    encoders = {name: frozen(models.trunk(name)[0], device, torch.channels_last) for name in ("resnet18", "resnet34")}
    all_encoders = AllEncoders(encoders)
    train = Trainer(Head().to(device), autocast=autocast_dtype(device))
    batches = loaders.repeat_batches(loaders.float_batches(options, batch_size))
    stage_settings: dict[str, tuple[Any, str]] = {
        "one module": (all_encoders, "auto"),
        "branches": (encoders, "auto"),
        "branches, eager": (encoders, "never"),
    }
    rows = [Variant("serial", loop(Serial(batches, device, under_autocast(all_encoders, device)), train))]
    for name, (encoder, capture) in stage_settings.items():
        stage = gpuaug.FeatureStage(
            encoder, autocast=autocast_dtype(device), memory_format=torch.channels_last, capture=capture
        )
        streamed = gpuaug.StreamedLoader(batches, [stage], device=device, depth=loaders.DEPTH)
        stack.callback(streamed.close)
        rows.append(Variant(name, loop(streamed, train), discard=loaders.DEPTH + 2))
    return rows


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = flags.parse(flags.parser("branches", __doc__, batch="8,32,128", size=224), argv)
    return measurement.measure(
        "branches",
        options,
        [({"batch_size": size}, partial(variants, options, size)) for size in options.batch],
        baseline="serial",
        ours=("one module", "branches", "branches, eager"),
    )
