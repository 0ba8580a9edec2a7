"""The same draws through Kornia and through fuse."""

import functools

import pytest
import torch
from support.comparison.values import assert_values

import gpuaug
from gpuaug.fusion.pixels import LARGEST, converted

left_to_kornia = pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")
"""For tests that leave a module to Kornia on purpose, of which fuse warns."""


def photographs(batch=3, channels=3, height=32, width=48, dtype=torch.uint8, seed=0):
    """Images with smooth parts, edges and noise, so that a wrong pixel shows."""
    return _photographs(batch, channels, height, width, dtype, seed).clone()


@functools.lru_cache(64)
def _photographs(batch, channels, height, width, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.linspace(0, 3, height)[:, None]
    x = torch.linspace(0, 5, width)[None, :]
    phase = torch.rand(batch, channels, 1, 1, generator=generator) * 6
    smooth = 0.5 + 0.3 * torch.sin(x + phase) * torch.cos(y - phase)
    images = (smooth + 0.2 * torch.rand(batch, channels, height, width, generator=generator)).clamp(0, 1)
    return converted(images, dtype)


def overriding(kind, method="check_inputs"):
    """A subclass of a library's class that overrides a method by what does the same, and so is not lowered."""
    return type(
        f"Own{kind.__name__}", (kind,), {method: lambda self, *args, **options: getattr(kind, method)(self, *args, **options)}
    )


def as_kornia_takes_them(images):
    return images.float() / LARGEST.get(images.dtype, 1)


def by_kornia(pipeline, images, draws):
    return pipeline(as_kornia_takes_them(images), params=draws.as_kornia())


def both(pipeline, images, seed=0, *, by=by_kornia, **options):
    """(what the library makes of the draws, what fuse makes of them). ``by``: what replays draws in the library."""
    augment = gpuaug.fuse(pipeline, **options)
    draws = augment.draw(images.shape, seed=seed, dtype=images.dtype)
    return by(pipeline, images, draws), augment(images, draws=draws)


def assert_replays(pipeline, images, seed=0, *, by=by_kornia, atol=0.0, share=0.0, equal_nan=False, **options):
    """Assert that fuse makes of the draws of ``seed`` what the library makes of them, and return what fuse makes."""
    __tracebackhide__ = True
    augment = gpuaug.fuse(pipeline, **options)
    draws = augment.draw(images.shape, seed=seed, dtype=images.dtype)
    expected, got = by(pipeline, images, draws), augment(images, draws=draws)
    assert_values(got, expected, atol=atol, share=share, equal_nan=equal_nan, draws=draws)
    return got
