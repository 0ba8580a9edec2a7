"""Frozen encoders as people have them: methods, inputs by keyword, structured results, and batches of several shapes.

Each of ``CASES`` makes two encoders of different members of a batch, which run beside one another. Images come in two buckets,
texts in two lengths, and neither follows the other.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import nn

from gpuaug import FeatureStage
from gpuaug.core import batch as batches

SHAPES = ["wide", "tall", "wide", "wide", "tall", "partial", "tall", "odd", "wide"]
"""Of each batch the shape of its images: two buckets, a partial batch, and a size that never comes again."""
IMAGES = {"wide": (4, 3, 8, 12), "tall": (4, 3, 12, 8), "partial": (2, 3, 8, 12), "odd": (4, 3, 8, 8)}


class ModelOutput(OrderedDict):
    """A mapping with attributes, as the outputs of models of transformers and diffusers are."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


@dataclass
class Encoded:
    mean: torch.Tensor
    spread: torch.Tensor
    more: object = None


def sampled(encoded):
    mean, spread = encoded.latent_dist.mean, encoded.latent_dist.spread
    return mean + spread * torch.randn_like(spread), encoded.last_hidden_state


def as_dict(module, mean, spread):
    return {"states": (mean, {"pooled": spread[:, 0], "none": None}), "size": mean.shape[1]}


def model_output(module, mean, spread):
    return ModelOutput(last_hidden_state=mean, latent_dist=Encoded(mean, spread), hidden_states=(mean, spread))


def with_memory_of_the_module(module, mean, spread):
    module.result["states"] = mean
    return {**module.result, "same": module.result, "weights": (module.scale, module.table[1:]), "spread": spread}


CASES = {
    "tuple, by index": (lambda module, mean, spread: (mean, [spread, mean[:1]]), 1),
    "dict, by key": (as_dict, "states"),
    "dataclass, by attribute": (lambda module, *parts: Encoded(*parts, more={"twice": (parts[0], 4)}), "more"),
    "model output": (model_output, None),
    "model output, drawn from": (model_output, sampled),
    "dict, with memory of the module": (with_memory_of_the_module, None),
}
"""For each case the function that makes the result, and what the stages select from it."""


class Vae(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.form = result
        self.weight = nn.Parameter(torch.rand(3 * 4 * 4, 8))
        self.drop = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.table = torch.arange(4.0)
        self.result = {}
        self.fails_at = None

    def encode(self, images):
        if self.fails_at == images.shape:
            raise ZeroDivisionError("planted")
        # Neither pixel_unshuffle nor a matrix product, which start threads.
        patches = images.unflatten(3, (-1, 4)).unflatten(2, (-1, 4)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        states = (patches[..., None] * self.weight).sum(2)
        mean, spread = self.drop(states * self.scale).chunk(2, 2)
        return self.form(self, mean, spread)


class Text(Vae):
    def __init__(self, result):
        super().__init__(result)
        self.tokens = nn.Embedding(50, 8)

    def forward(self, input_ids, attention_mask):
        states = self.drop(self.tokens(input_ids) * self.scale) * attention_mask[..., None]
        return self.form(self, *states.chunk(2, 2))


def encoders(case, device="cpu"):
    """The two encoders, with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        modules = [kind(CASES[case][0]).requires_grad_(False).to(device) for kind in (Vae, Text)]
    for module in modules:
        module.table = module.table.to(device)
    return modules


def stages(case, modules=None, **options):
    """A stage for each encoder. ``options`` are those of the first."""
    vae, text = modules or encoders(case)
    output = CASES[case][1]
    names = {"mask": "attention_mask", "ids": "input_ids"}
    return [
        FeatureStage(vae.encode, on={"image": "images"}, into="latents", output=output, name="vae", **options),
        FeatureStage(text, on=names, into="text", output=output, name="text"),
    ]


def source(shapes=SHAPES, scale=1):
    """Batches of images, token ids, a mask and a number. ``scale`` multiplies the sides of images."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for number, shape in enumerate(shapes):
        length, channels, height, width = IMAGES[shape]
        images = torch.rand(length, channels, height * scale, width * scale, generator=draw)
        ids = torch.randint(50, (length, 5 + 2 * (number % 3 == 2)), generator=draw)
        made.append({"image": images, "ids": ids, "mask": ids % 2, "number": number})
    return made


def by_hand(case, batch, modules=None):
    """What the encoders give for a batch without a loader: latents and text."""
    vae, text = (module.eval() for module in modules or encoders(case))
    output = CASES[case][1]
    results = [vae.encode(batch["image"]), text(batch["ids"], batch["mask"])]
    if isinstance(output, str):
        return [result[output] if isinstance(result, dict) else getattr(result, output) for result in results]
    return results if output is None else [output(result) if callable(output) else result[output] for result in results]


def tensors(batch):
    """Copies of the tensors of a batch."""
    return [tensor.clone() for tensor in batches.tensors(batch)]
