"""Kornia's containers of mixes (MixUp, CutMix) with ``random_apply``, which pick one mix per batch or per sample.

A *row* holds the parameters of one sample for the kernel. The *partner* is the sample that a sample is mixed with.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from kornia.augmentation.container.params import ParamItem
from torch import nn

from gpuaug.fusion.ops.base import Array, OpDraws, Size
from gpuaug.fusion.ops.mix import MixOp, merged_num_classes
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.policies.picking import Pick, kornia_params_error


class OneMix(MixOp):
    """Op of a container that runs one of its mixes. All mixes have the same columns and kernel, so one op can run any of them.

    Args:
        name: Name of the container.
        module: Container of the user.
        mixes: (name, op) of every mix.
        pick: ``"batch"`` to pick one mix per batch; ``"sample"`` to pick one mix per sample.
        weights: Relative frequency of each mix.
    """

    stores_coordinates = True

    def __init__(
        self, name: str, module: nn.Module, mixes: Sequence[tuple[str, MixOp]], pick: Pick, weights: Sequence[float]
    ) -> None:
        super().__init__(name, module)
        self.mixes = tuple(mixes)
        self._pick = pick
        self.num_classes = merged_num_classes(None, (mix for _, mix in mixes))
        ends = np.cumsum(weights, dtype=np.float64)
        self._ends: Array = ends / ends[-1]
        """Upper ends of the bins in [0, 1], one per mix. A uniform number picks the mix of its bin."""

    def _read(self, module: Any) -> None:
        """Do nothing, because the ops of the mixes read the settings."""

    @property
    def keepdim(self) -> bool:
        """True if all mixes return a single image (C, H, W) without a batch dimension, as in Kornia."""
        return all(mix.keepdim for _, mix in self.mixes)

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Pick mixes, and draw their parameters.

        Returns:
            ``"parts"``, tuples (index of the mix, its draws, mask of the samples that picked it, or ``None`` for all).
        """
        if self._pick == "batch":
            index = int(self._mix_index(sampler.integer(0, 2**53) / 2**53))
            return {"parts": ((index, self.mixes[index][1].draw(sampler, size), None),)}
        picks = self._mix_index(sampler.uniform())
        parts = [(index, mix.draw(sampler, size), picks == index) for index, (_, mix) in enumerate(self.mixes)]
        # All mixes share one permutation, so that every image is the partner of exactly one image.
        partner = parts[0][1]["partner"]
        return {"parts": tuple((index, {**draws, "partner": partner}, mask) for index, draws, mask in parts)}

    def _mix_index(self, numbers: Any) -> Any:
        """Indices of the mixes that uniform numbers in [0, 1) pick."""
        return np.searchsorted(self._ends, numbers, side="right")

    def draw_weights(self, sampler: Sampler, size: Size) -> OpDraws:
        """Return no draws, because ``draw`` draws the parameters of the mixes."""
        return {}

    def rows(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the rows of all samples, each by the mix that the sample picked."""
        for index, mix_draws, mask in draws["parts"]:
            mix = self.mixes[index][1]
            if mask is None:
                mix.rows(mix_draws, size, out)
                continue
            rows = np.empty_like(out)
            mix.rows(mix_draws, size, rows)
            out[mask] = rows[mask]

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Do nothing, because ``rows`` writes all columns."""

    def params(self, draws: OpDraws, size: Size) -> Any:
        """Draws in the format of the container's ``params=`` argument.

        Raises:
            ArgumentError: If ``pick="sample"``.
        """
        if self._pick == "sample":
            raise kornia_params_error(self.name)
        ((index, mix_draws, _),) = draws["parts"]
        name, mix = self.mixes[index]
        return [ParamItem(name, mix.params(mix_draws, size))]

    def describe(self) -> str:
        """Short description for ``explain()``."""
        return f"for each {self._pick} {' or '.join(mix.describe() for _, mix in self.mixes)}"
