"""Kernels on pixels that are no numbers: samples that are skipped keep every bit, and others are what torch makes of them."""

from unittest import mock

import numpy as np
import torch
from support.comparison.replay import photographs
from support.comparison.values import difference
from support.ops.skipped import ANTIALIASED, MOVING, SIZE, SKIPPING, fault, strewn

import gpuaug
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.triton import backend

KERNELS = mock.patch.object(dispatch, "run", backend.run)
NO_NUMBERS = (torch.nan, torch.inf, -torch.inf)


def disagreement(make, **options):
    """How the kernels' output differs from torch's, NaN and infinities included, or an empty string."""
    images = strewn(photographs(2, 3, *SIZE, dtype=torch.float32), NO_NUMBERS, 0.02)
    augment = gpuaug.fuse(make(), **options)
    draws = next(draws for seed in range(99) if any(map((draws := augment.draw(images.shape, seed=seed)).of, range(2))))
    expected = augment(images, draws=draws)
    with KERNELS:
        got = augment(images, draws=draws)
    return difference(got, expected, atol=2e-5, rtol=1e-5, equal_nan=True, draws=draws)


def failures(*, every):
    """Names of the ops whose kernels change a sample that they skip, and how, or differ from torch."""
    few = {} if every else {"batch": 3, "calls": 1}
    for antialias, ops in ((False, SKIPPING if every else MOVING), (True, ANTIALIASED)):
        for name, make in ops.items():
            with np.errstate(all="ignore"):
                with KERNELS:
                    text = fault(make, antialias=antialias, **few)
                if text:
                    yield f"{name}: {text}"
                if (antialias or name in MOVING) and (text := disagreement(make, antialias=antialias)):
                    yield f"{name}: {text}"
