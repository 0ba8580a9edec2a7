"""Test cases of the classes of Kornia that are lowered: one ``Case`` per class, in one file of ``cases/`` per family of ops."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from support.ops.random_steps import ROUNDING

from gpuaug.fusion.lower.kornia import LOWERED
from gpuaug.fusion.ops.base import ChannelOp, PointOp
from gpuaug.fusion.ops.filters import NeighbourhoodOp, SharpnessOp
from gpuaug.fusion.ops.geometry import GatherOp

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

Settings = dict[str, dict[str, Any]]
"""Arguments of the constructor without ``p``, by the name of the tests that use them."""


@dataclass(frozen=True, eq=False)
class Case:
    """Arguments and tolerances with which the tests run one class."""

    kind: type
    parameters: str
    """Parameters of its constructor, in order: those that were compared with the op."""

    settings: Settings
    """Settings whose draws are compared with Kornia's, and whose pixels are if the op is pointwise.

    The first settings also serve the tests that take one module per class: of skipped samples, compilation, ``alone``.
    """

    steps: Callable[[type], st.SearchStrategy]
    """Its part in random pipelines, made by ``random_steps.steps``."""

    more_pixels: Settings = field(default_factory=dict)
    """Settings whose pixels alone are compared."""

    more_draws: Settings = field(default_factory=dict)
    """Settings whose draws alone are compared."""

    drawn: bool = True
    """Whether the draws are compared number by number. False if it draws the apply mask alone, or has a test of its own."""

    exact: bool = False
    """Whether Kornia, the torch executor and the kernels give the same bits."""

    jumps: bool = False
    """Whether 0.1 % of the pixels may be off, at a threshold. Leave it out unless a test fails without it."""

    atol: float = ROUNDING
    """Largest difference from Kornia's pixels, for values in [0, 1]."""

    alone: bool = True
    """Whether the kernels are compared with torch on the op alone. False if a pipeline of ``pipelines.py`` has it."""

    @property
    def pointwise(self):
        return issubclass(LOWERED[self.kind], PointOp)

    @property
    def moves(self):
        """Whether it moves pixels or looks at their neighbours."""
        return issubclass(LOWERED[self.kind], GatherOp | NeighbourhoodOp | SharpnessOp)

    @property
    def rgb(self):
        """Whether it is compared on images of three channels only, because it does not take any number of channels."""
        kind = LOWERED[self.kind]
        return bool(kind.channel_counts) or (getattr(kind, "rgb_only", False) and not issubclass(kind, ChannelOp))

    @property
    def name(self):
        """Name of the first settings."""
        return next(iter(self.settings))

    @property
    def first_settings(self):
        return self.settings[self.name]

    def first(self, **options):
        """The module under the first settings."""
        return self.kind(**{**self.first_settings, **options})
