"""A latent diffusion step after two frozen encoders, which compute latents and text states in stages or in the loop.

    python -m bench run latents

Networks of the shapes of Stable Diffusion XL, with random weights: the encoder of a VAE (34 M parameters), CLIP-L's text
encoder (123 M), and a denoiser of 300 M parameters that is trained with AdamW. Page-locked uint8 images and token ids, bfloat16
autocast. Rows:

serial                 copy, encode the images, encode the texts, train, on one stream
encoders alone         copy and encode, without CUDA graphs: a ceiling for rows that are not captured
training alone         ceiling: the step on latents and states that were encoded before
captured, in line      two FeatureStages, depth=0
feature stages         two FeatureStages, in parallel and ahead of the step
feature stages, eager  the same with capture="never"

``--profile`` also prints the report of ``gpuaug.profile`` for the row *feature stages*: whether the step is bound by launches,
whether it overlaps with the encoders, and how much their graphs save.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gpuaug
from bench.data import diffusion_models as models
from bench.data import loaders
from bench.harness import flags, measurement
from bench.harness.console import console
from bench.harness.loops import DenoiserTrainer, autocast_dtype, frozen, loop, under_autocast
from gpuaug.benchkit.windows import Variant

Encode = Callable[[Tensor], Tensor]
TOKENS = 77
"""Number of tokens of a text."""


class Serial:
    """Batches of a loop without overlap: copy images and token ids, and encode both, one after another on one stream."""

    def __init__(self, batches: Iterable, device: torch.device, encode_images: Encode, encode_texts: Encode) -> None:
        self.batches = batches
        self.device = device
        self.encode_images = encode_images
        self.encode_texts = encode_texts

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, ids in self.batches:
            images = images.to(self.device, non_blocking=True)
            ids = ids.to(self.device, non_blocking=True)
            with torch.no_grad():
                features = self.encode_images(images), self.encode_texts(ids)
            yield features


def variants(options: Namespace, batch_size: int, stack: ExitStack) -> list[Variant]:
    device = options.device
    torch.manual_seed(0)
    vae = frozen(models.VaeEncoder(options.width), device, torch.channels_last)
    text = frozen(models.TextEncoder(6 * options.width, options.layers), device)
    denoiser = models.Denoiser(2 * options.width, 6 * options.width, options.layers + 2).to(device)
    train = DenoiserTrainer(denoiser, device)
    host_batches = [
        (
            torch.randint(256, (batch_size, 3, options.size, options.size), dtype=torch.uint8),
            torch.randint(49408, (batch_size, TOKENS)),
        )
        for _ in range(4)
    ]
    if device.type == "cuda":
        host_batches = [(images.pin_memory(), ids.pin_memory()) for images, ids in host_batches]
    batches = loaders.repeat_batches(host_batches)

    def encode_images(images: Tensor) -> Tensor:
        return models.sample_latents(vae.encode(images))

    def encode_texts(ids: Tensor) -> Tensor:
        return text(ids)["last_hidden_state"]

    serial = Serial(batches, device, under_autocast(encode_images, device), under_autocast(encode_texts, device))
    encoded_batches = [
        (latents.clone(), states.clone())
        for latents, states in Serial(host_batches, device, serial.encode_images, serial.encode_texts)
    ]

    def stages(capture: str) -> list[gpuaug.FeatureStage]:
        arguments: dict[str, Any] = {"autocast": autocast_dtype(device), "capture": capture}
        memory_format = torch.channels_last
        return [
            gpuaug.FeatureStage(vae.encode, output=models.sample_latents, memory_format=memory_format, name="vae", **arguments),
            gpuaug.FeatureStage(text, on=1, output="last_hidden_state", name="text", **arguments),
        ]

    def gpuaug_row(name: str, capture: str, depth: int) -> Variant:
        streamed = gpuaug.StreamedLoader(batches, stages(capture), device=device, depth=depth)
        stack.callback(streamed.close)
        return Variant(name, loop(streamed, train), discard=loaders.DEPTH + 2)

    if options.profile:
        with gpuaug.StreamedLoader(batches, stages("auto"), device=device) as streamed:
            report = gpuaug.profile(streamed, lambda batch: train(*batch), rounds=options.repeats, show=False)
        console.print(f"\nlatents, batch size {batch_size}", report, sep="\n")
    return [
        Variant("serial", loop(serial, train)),
        Variant("encoders alone", loop(serial, lambda *_: None)),
        Variant("training alone", loop(loaders.repeat_batches(encoded_batches), train)),
        gpuaug_row("captured, in line", "auto", 0),
        gpuaug_row("feature stages, eager", "never", loaders.DEPTH),
        gpuaug_row("feature stages", "auto", loaders.DEPTH),
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("latents", __doc__, batch="1,2,8", size=512)
    parser.add_argument("--width", type=int, default=128, help="channels of the VAE's first level (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="layers of the text encoder (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="also print gpuaug.profile of the feature stages")
    options = flags.parse(parser, argv)
    return measurement.measure(
        "latents",
        options,
        [({"batch_size": size}, partial(variants, options, size)) for size in options.batch],
        baseline="serial",
        ours=("feature stages", "feature stages, eager", "captured, in line"),
        ceilings=("encoders alone", "training alone"),
    )
