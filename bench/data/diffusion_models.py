"""Networks of a latent diffusion step, shaped as Stable Diffusion XL's: two frozen encoders, and a denoiser to be trained."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class VaeEncoder(nn.Module):
    """Images, uint8 or float, to the mean and logarithm of the variance of latents at an eighth of the side."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        channels = [width, width, 2 * width, 4 * width, 4 * width]
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for level, (before, after) in enumerate(pairwise(channels)):
            layers += [_Residual(before, after), _Residual(after, after)]
            layers += [nn.Conv2d(after, after, 3, stride=2, padding=1)] if level < 3 else []
        last = channels[-1]
        layers += [_Residual(last, last), _Attention(last, heads=1), _Residual(last, last), nn.GroupNorm(32, last), nn.SiLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(last, 8, 3, padding=1))

    def encode(self, images: Tensor) -> dict[str, Tensor]:
        images = images if images.is_floating_point() else images.float() / 127.5 - 1
        mean, log_variance = self.layers(images).chunk(2, dim=1)
        return {"mean": mean, "log_variance": log_variance}


def sampled(encoded: dict[str, Tensor]) -> Tensor:
    """Latents drawn from what ``VaeEncoder.encode`` gives."""
    mean = encoded["mean"]
    return mean + (encoded["log_variance"].clamp(-30, 20) / 2).exp() * torch.randn_like(mean)


class TextEncoder(nn.Module):
    """Token ids (B, 77) to states (B, 77, ``width``), as CLIP-L's text tower."""

    def __init__(self, width: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(49408, width)
        self.layers = nn.ModuleList(_Block(width, width, context=None) for _ in range(layers))

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        states = self.tokens(input_ids)
        for layer in self.layers:
            states = layer(states, None)
        return {"last_hidden_state": states, "pooler_output": states[:, 0]}


class Denoiser(nn.Module):
    """Noisy latents (B, 4, H, W) and a text's states to the noise: a U-Net with transformers at its two inner levels."""

    def __init__(self, width: int = 256, context: int = 768, layers: int = 14) -> None:
        super().__init__()
        inner = 2 * width
        last = 4 * width
        self.into = nn.Conv2d(4, width, 3, padding=1)
        self.times = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.first = nn.Sequential(_Residual(width, width), _Residual(width, width))
        self.to_inner = nn.Sequential(nn.Conv2d(width, inner, 3, stride=2, padding=1), _Residual(inner, inner))
        self.inner = nn.ModuleList(_Block(inner, inner, context) for _ in range(2))
        self.to_last = nn.Sequential(nn.Conv2d(inner, last, 3, stride=2, padding=1), _Residual(last, last))
        self.last = nn.ModuleList(_Block(last, last, context) for _ in range(layers))
        self.from_last = nn.Sequential(_Residual(last, last), nn.Conv2d(last, inner, 3, padding=1))
        self.back = nn.ModuleList(_Block(inner, inner, context) for _ in range(2))
        self.from_inner = nn.Sequential(_Residual(inner, inner), nn.Conv2d(inner, width, 3, padding=1))
        self.out = nn.Sequential(
            _Residual(width, width), nn.GroupNorm(min(32, width), width), nn.SiLU(), nn.Conv2d(width, 4, 3, padding=1)
        )

    def forward(self, latents: Tensor, times: Tensor, states: Tensor) -> Tensor:
        first = self.first(self.into(latents) + self.times(times[:, None])[:, :, None, None])
        inner = _attended(self.to_inner(first), self.inner, states)
        last = _attended(self.to_last(inner), self.last, states)
        inner = _attended(inner + F.interpolate(self.from_last(last), scale_factor=2), self.back, states)
        return self.out(first + F.interpolate(self.from_inner(inner), scale_factor=2))


class _Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.GroupNorm(min(32, before), before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1)),
            *(nn.GroupNorm(min(32, after), after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1)),
        )
        self.short = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.short(x) + self.layers(x)


class _Heads(nn.Module):
    """Attention of ``width`` channels to ``context`` channels."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(context, width)
        self.value = nn.Linear(context, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(x), self.key(context), self.value(context))
        )
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class _Attention(nn.Module):
    """Attention among the pixels of feature maps."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(min(32, width), width)
        self.heads = _Heads(width, width, heads)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        return x + self.heads(pixels, pixels).transpose(1, 2).reshape(x.shape)


class _Block(nn.Module):
    """A transformer's layer: attention to itself, to a text if it has ``context`` channels, and an MLP."""

    def __init__(self, width: int, inner: int, context: int | None) -> None:
        super().__init__()
        heads = max(1, width // 64)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.itself = _Heads(width, width, heads)
        self.text = _Heads(width, context, heads) if context is not None else None
        self.mlp = nn.Sequential(nn.Linear(width, 4 * inner), nn.GELU(), nn.Linear(4 * inner, width))

    def forward(self, x: Tensor, states: Tensor | None) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.itself(normed, normed)
        if self.text is not None:
            x = x + self.text(self.norms[1](x), states)
        return x + self.mlp(self.norms[2](x))


def _attended(features: Tensor, blocks: nn.ModuleList, states: Tensor) -> Tensor:
    pixels = features.flatten(2).transpose(1, 2)
    for block in blocks:
        pixels = block(pixels, states)
    return pixels.transpose(1, 2).reshape(features.shape)
