"""One of several mixes, picked for the batch or for each sample: a container of MixUp and CutMix with ``random_apply``."""

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
    """A container that runs one of its mixes. Rows of all mixes have one layout, so that it is one op for every pick.

    Args:
        name: Name of the container.
        module: The container.
        mixes: Its mixes, by name.
        pick: ``"batch"``: one mix for the whole batch; ``"sample"``: one for each sample.
        weights: Relative frequency of each mix.
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
        """Nothing: the settings are those of the ops."""

    @property
    def keepdim(self) -> bool:
        """True if a single image, (C, H, W), comes out as one for every pick, as in Kornia."""
        return all(mix.keepdim for _, mix in self.mixes)

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Pick mixes and draw for them: ``"parts"``, each (index of the mix, its draws, samples; ``None`` for all)."""
        if self._pick == "batch":
            index = int(self._picked(sampler.integer(0, 2**53) / 2**53))
            return {"parts": ((index, self.mixes[index][1].draw(sampler, size), None),)}
        picked = self._picked(sampler.uniform())
        parts = [(index, mix.draw(sampler, size), picked == index) for index, (_, mix) in enumerate(self.mixes)]
        # All mixes share one permutation, so that each image is the partner of exactly one other.
        partner = parts[0][1]["partner"]
        return {"parts": tuple((index, {**drawn, "partner": partner}, where) for index, drawn, where in parts)}

    def _picked(self, numbers: Any) -> Any:
        """Indices of the mixes that uniform numbers in [0, 1) pick, by the weights."""
        return np.searchsorted(self._ends, numbers, side="right")

    def draw_lam(self, sampler: Sampler, size: Size) -> OpDraws:
        """Not used: ``draw`` draws for the mixes."""
        return {}

    def rows(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The row of the mix that each sample picked."""
        for index, own, where in drawn["parts"]:
            mix = self.mixes[index][1]
            if where is None:
                mix.rows(own, size, out)
                continue
            rows = np.empty_like(out)
            mix.rows(own, size, rows)
            out[where] = rows[where]

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Not used: ``rows`` writes the rows of the mixes."""

    def params(self, drawn: OpDraws, size: Size) -> Any:
        """The draws in the form that the container takes as ``params=``.

        Raises:
            ArgumentError: If each sample picked its own.
        """
        if self._pick == "sample":
            raise no_form_in_kornia(self.name)
        ((index, own, _),) = drawn["parts"]
        name, mix = self.mixes[index]
        return [ParamItem(name, mix.params(own, size))]

    def describe(self) -> str:
        """A few words for ``explain()``."""
        return f"for each {self._pick} {' or '.join(mix.describe() for _, mix in self.mixes)}"
