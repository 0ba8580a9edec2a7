"""Containers of mixes (MixUp, CutMix) with ``random_apply``: one mix is picked per batch or per sample."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from kornia.augmentation.container.params import ParamItem
from torch import nn

from gpuaug.fusion.ops.base import Array, OpDraws, Size
from gpuaug.fusion.ops.mix import MixOp, classes_of
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.policies.picking import Pick, no_form_in_kornia


class OneMix(MixOp):
    """Container that runs one of its mixes. The rows of all mixes have the same layout, so one op serves every pick.

    Args:
        name: Name of the container.
        module: Container of the user.
        mixes: (name, op) of every mix.
        pick: ``"batch"`` to pick one mix per batch; ``"sample"`` to pick one mix per sample.
        weights: Relative frequency of every mix.
    """

    counts_pixels = True

    def __init__(
        self, name: str, module: nn.Module, mixes: Sequence[tuple[str, MixOp]], pick: Pick, weights: Sequence[float]
    ) -> None:
        super().__init__(name, module)
        self.mixes = tuple(mixes)
        self._pick = pick
        self.num_classes = classes_of(None, (mix for _, mix in mixes))
        ends = np.cumsum(weights, dtype=np.float64)
        self._ends: Array = ends / ends[-1]

    def _read(self, module: Any) -> None:
        """Do nothing: settings are read by the ops of the mixes."""

    @property
    def keepdim(self) -> bool:
        """True if all mixes return a single image (C, H, W) without a batch dimension, as in Kornia."""
        return all(mix.keepdim for _, mix in self.mixes)

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Pick mixes and draw for them: ``"parts"``, tuples (index of the mix, its draws, mask of its samples or ``None``)."""
        if self._pick == "batch":
            index = int(self._picked(sampler.integer(0, 2**53) / 2**53))
            return {"parts": ((index, self.mixes[index][1].draw(sampler, size), None),)}
        picked = self._picked(sampler.uniform())
        parts = [(index, mix.draw(sampler, size), picked == index) for index, (_, mix) in enumerate(self.mixes)]
        # All mixes share one permutation, so that every image is the partner of exactly one image.
        partner = parts[0][1]["partner"]
        return {"parts": tuple((index, {**drawn, "partner": partner}, where) for index, drawn, where in parts)}

    def _picked(self, numbers: Any) -> Any:
        """Indices of mixes, drawn by weight from uniform numbers in [0, 1)."""
        return np.searchsorted(self._ends, numbers, side="right")

    def draw_lam(self, sampler: Sampler, size: Size) -> OpDraws:
        """Return no draws: ``draw`` draws for the mixes."""
        return {}

    def rows(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Write the row of the picked mix per sample."""
        for index, mix_drawn, where in drawn["parts"]:
            mix = self.mixes[index][1]
            if where is None:
                mix.rows(mix_drawn, size, out)
                continue
            rows = np.empty_like(out)
            mix.rows(mix_drawn, size, rows)
            out[where] = rows[where]

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Do nothing: ``rows`` writes the rows of the mixes."""

    def params(self, drawn: OpDraws, size: Size) -> Any:
        """Draws in the form of the container's ``params=`` argument.

        Raises:
            ArgumentError: If ``pick="sample"``.
        """
        if self._pick == "sample":
            raise no_form_in_kornia(self.name)
        ((index, mix_drawn, _),) = drawn["parts"]
        name, mix = self.mixes[index]
        return [ParamItem(name, mix.params(mix_drawn, size))]

    def describe(self) -> str:
        """Short description for ``explain()``."""
        return f"for each {self._pick} {' or '.join(mix.describe() for _, mix in self.mixes)}"
