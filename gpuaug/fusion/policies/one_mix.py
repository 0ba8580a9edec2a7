"""Containers that run one of their mixes (MixUp, CutMix): Kornia's with ``random_apply``, and torchvision's ``RandomChoice``.

A *sample* is an image or a clip. The *partner* is the sample of the batch that a sample is mixed with. A *row* holds the
parameters of one sample for the kernel. Each mix is one of the container's *choices*. Class attributes without a comment are
explained in ``ops/base.py``.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
from kornia.augmentation.container.params import ParamItem
from torch import nn

from gpuaug.fusion.ops.base import Array, OpDraws, Size
from gpuaug.fusion.ops.mix import LABEL_WEIGHT, MixOp, merged_num_classes
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.policies.picking import Choice, Pick, Picking


class OneMix(MixOp, Picking):
    """Op of a container that runs one of its mixes. All mixes have the same columns and kernel, so one op can run any of them.

    Args:
        name: Name of the container.
        module: Container of the user.
        mixes: Ops of the mixes.
        pick: ``"batch"`` to pick one mix per batch; ``"sample"`` to pick one mix per sample.
        weights: Relative frequency of each mix.
    """

    stores_coordinates = True

    def __init__(self, name: str, module: nn.Module, mixes: Sequence[MixOp], pick: Pick, weights: Sequence[float]) -> None:
        super().__init__(name, module)
        self.mixes = tuple(mixes)
        self.choices = tuple(Choice(mix.name, (mix,)) for mix in mixes)
        self.pick = pick
        self.num_classes = merged_num_classes(None, mixes)
        ends = np.cumsum(weights, dtype=np.float64)
        self._ends: Array = ends / ends[-1]
        """Upper ends of the bins of [0, 1), one bin per mix. A uniform number picks the mix whose bin contains it."""

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Pick mixes, and draw their parameters.

        Returns:
            ``"layers"`` with one entry, a dict of the ``OpDraws`` of each picked mix by its index; and ``"apply_mask"`` and
            ``"partner"``, as for a single mix.
        """
        numbers = (sampler if self.pick == "sample" else sampler.shared_by_samples()).uniform()
        picks = np.searchsorted(self._ends, numbers, side="right")
        # [0]: an empty batch has no picks, but its draws need the entries of one mix.
        layer = {index: self.mixes[index].draw(sampler, size) for index in np.unique(picks).tolist() or [0]}
        # All mixes share one permutation, so that every image is the partner of exactly one image.
        partner = next(iter(layer.values()))["partner"]
        for index, mix_draws in layer.items():
            mix_draws.update(partner=partner, apply_mask=mix_draws["apply_mask"] & (picks == index))
        apply_mask = reduce(np.logical_or, [mix_draws["apply_mask"] for mix_draws in layer.values()])
        return {"layers": (layer,), "partner": partner, "apply_mask": apply_mask}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the columns from ``LABEL_WEIGHT`` on, as the picked mix does; ``MixOp.write_rows`` writes the other columns."""
        for index, mix_draws in draws["layers"][0].items():
            rows = np.zeros_like(out)
            self.mixes[index].write(mix_draws, size, rows)
            out[mix_draws["apply_mask"], LABEL_WEIGHT:] = rows[mix_draws["apply_mask"], LABEL_WEIGHT:]

    def params(self, draws: OpDraws, size: Size) -> Any:
        """Draws in the format of the container's ``params=`` argument. Only for ``pick="batch"``, with one picked mix."""
        ((index, mix_draws),) = draws["layers"][0].items()
        return [ParamItem(self.mixes[index].name, self.mixes[index].params(mix_draws, size))]

    def describe(self) -> str:
        """Short description for ``explain()``."""
        return f"for each {self.pick} {' or '.join(mix.describe() for mix in self.mixes)}"
