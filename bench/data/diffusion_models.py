"""Networks of a latent diffusion step, of the shapes of Stable Diffusion XL: two frozen encoders, and a denoiser to train."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class VaeEncoder(nn.Module):
    """Encoder of images, uint8 or float, to mean and log variance of latents (B, 4, H / 8, W / 8)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        channels = [width, width, 2 * width, 4 * width, 4 * width]
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for level, (channels_in, channels_out) in enumerate(pairwise(channels)):
            layers += [_Residual(channels_in, channels_out), _Residual(channels_out, channels_out)]
            layers += [nn.Conv2d(channels_out, channels_out, 3, stride=2, padding=1)] if level < 3 else []
        top = channels[-1]
        layers += [_Residual(top, top), _Attention(top, heads=1), _Residual(top, top), nn.GroupNorm(32, top), nn.SiLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(top, 8, 3, padding=1))

    def encode(self, images: Tensor) -> dict[str, Tensor]:
        images = images if images.is_floating_point() else images.float() / 127.5 - 1
        mean, log_variance = self.layers(images).chunk(2, dim=1)
        return {"mean": mean, "log_variance": log_variance}


def sample_latents(encoded: dict[str, Tensor]) -> Tensor:
    """Draw latents from the distributions of ``VaeEncoder.encode``."""
    mean = encoded["mean"]
    return mean + (encoded["log_variance"].clamp(-30, 20) / 2).exp() * torch.randn_like(mean)


class TextEncoder(nn.Module):
    """Encoder of token ids (B, 77) to states (B, 77, ``width``), of the shape of CLIP-L's text encoder."""

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
    """U-Net that predicts the noise in latents (B, 4, H, W), given the states of a text; transformers at two inner levels."""

    def __init__(self, width: int = 256, context: int = 768, layers: int = 14) -> None:
        super().__init__()
        inner = 2 * width
        bottom = 4 * width
        self.project_in = nn.Conv2d(4, width, 3, padding=1)
        self.embed_times = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.outer_blocks = nn.Sequential(_Residual(width, width), _Residual(width, width))
        self.down_inner = nn.Sequential(nn.Conv2d(width, inner, 3, stride=2, padding=1), _Residual(inner, inner))
        self.inner_blocks = nn.ModuleList(_Block(inner, inner, context) for _ in range(2))
        self.down_bottom = nn.Sequential(nn.Conv2d(inner, bottom, 3, stride=2, padding=1), _Residual(bottom, bottom))
        self.bottom_blocks = nn.ModuleList(_Block(bottom, bottom, context) for _ in range(layers))
        self.up_inner = nn.Sequential(_Residual(bottom, bottom), nn.Conv2d(bottom, inner, 3, padding=1))
        self.inner_up_blocks = nn.ModuleList(_Block(inner, inner, context) for _ in range(2))
        self.up_outer = nn.Sequential(_Residual(inner, inner), nn.Conv2d(inner, width, 3, padding=1))
        self.project_out = nn.Sequential(
            _Residual(width, width), nn.GroupNorm(min(32, width), width), nn.SiLU(), nn.Conv2d(width, 4, 3, padding=1)
        )

    def forward(self, latents: Tensor, times: Tensor, states: Tensor) -> Tensor:
        outer = self.outer_blocks(self.project_in(latents) + self.embed_times(times[:, None])[:, :, None, None])
        inner = _attend(self.down_inner(outer), self.inner_blocks, states)
        bottom = _attend(self.down_bottom(inner), self.bottom_blocks, states)
        inner = _attend(inner + F.interpolate(self.up_inner(bottom), scale_factor=2), self.inner_up_blocks, states)
        return self.project_out(outer + F.interpolate(self.up_outer(inner), scale_factor=2))


class _Residual(nn.Module):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.GroupNorm(min(32, channels_in), channels_in), nn.SiLU(), nn.Conv2d(channels_in, channels_out, 3, padding=1)),
            *(
                nn.GroupNorm(min(32, channels_out), channels_out),
                nn.SiLU(),
                nn.Conv2d(channels_out, channels_out, 3, padding=1),
            ),
        )
        self.shortcut = nn.Identity() if channels_in == channels_out else nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.layers(x)


class _MultiHeadAttention(nn.Module):
    """Multi-head attention from ``width`` channels to ``context`` channels."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(context, width)
        self.value = nn.Linear(context, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        query, key, value = (
            projected.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for projected in (self.query(x), self.key(context), self.value(context))
        )
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class _Attention(nn.Module):
    """Self-attention among the pixels of feature maps."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(min(32, width), width)
        self.heads = _MultiHeadAttention(width, width, heads)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        return x + self.heads(pixels, pixels).transpose(1, 2).reshape(x.shape)


class _Block(nn.Module):
    """Transformer layer: self-attention, cross-attention to a text with ``context`` channels unless ``None``, and an MLP."""

    def __init__(self, width: int, inner: int, context: int | None) -> None:
        super().__init__()
        heads = max(1, width // 64)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.self_attention = _MultiHeadAttention(width, width, heads)
        self.cross_attention = _MultiHeadAttention(width, context, heads) if context is not None else None
        self.mlp = nn.Sequential(nn.Linear(width, 4 * inner), nn.GELU(), nn.Linear(4 * inner, width))

    def forward(self, x: Tensor, states: Tensor | None) -> Tensor:
        normalised = self.norms[0](x)
        x = x + self.self_attention(normalised, normalised)
        if self.cross_attention is not None:
            x = x + self.cross_attention(self.norms[1](x), states)
        return x + self.mlp(self.norms[2](x))


def _attend(features: Tensor, blocks: nn.ModuleList, states: Tensor) -> Tensor:
    pixels = features.flatten(2).transpose(1, 2)
    for block in blocks:
        pixels = block(pixels, states)
    return pixels.transpose(1, 2).reshape(features.shape)
