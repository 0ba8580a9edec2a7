"""Containers with ``random_apply``: the number, choice and order of the modules that run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from kornia.augmentation import MixAugmentationBaseV2

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.mix import MixOp
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.policies.choice import Child, Choice, Pick
from gpuaug.fusion.policies.one_mix import OneMix


class RandomApply(Choice):
    """A container that runs some of its modules, in a random order."""

    @property
    def _counts(self) -> tuple[int, int]:
        """Smallest and largest number of picks."""
        low, end = self.module.random_apply  # type: ignore[misc]
        return int(low), int(end) - 1  # type: ignore[has-type]

    def picks(self, sampler: Sampler) -> list[int]:
        """A drawn number of children, by weight; with repetition if it exceeds the weights' sum, or the weights above 0."""
        low, high = self._counts
        weights: Any = self.module.random_apply_weights
        count = low + min(int(self.number(sampler) * (high - low + 1)), high - low)
        total = weights.sum().item()
        if total == 0 or count == 0:
            return []
        shares = weights.double().numpy()
        if count > total or count > np.count_nonzero(shares):
            ends = shares.cumsum() / shares.sum()
            return [int(np.searchsorted(ends, self.number(sampler), side="right")) for _ in range(count)]
        # Weighted drawing without replacement: the order of exponential random times with these rates.
        numbers = np.array([self.number(sampler) for _ in shares])
        with np.errstate(divide="ignore", invalid="ignore"):
            times = np.where(shares > 0, -np.log1p(-numbers) / shares, np.inf)
        return [int(index) for index in times.argsort()[:count]]

    @property
    def most(self) -> int:
        """Largest number of members in the picked children."""
        return self._counts[1] * max(len(child.members) for child in self.children)

    @property
    def how_many(self) -> str:
        """The number of picks, or its range, in words."""
        low, high = self._counts
        return f"{high}" if low == high else f"{low} to {high}"


def lower_random_apply(name: str, module: Any, children: Sequence[Child], pick: Pick) -> RandomApply | OneMix | str:
    """Lower a container with ``random_apply``, or return the reason why it is left to Kornia.

    Raises:
        ArgumentError: If each sample is to pick for itself, among what is not all mixes.
    """
    mixes = _mixes(children)
    if pick == "sample" and not mixes:
        raise ArgumentError(
            "pick must be 'batch' where a container has random_apply over more than mixes, got 'sample': samples that ran "
            f"modules in different orders would share no pass. Leave pick out, or give the modules of {name} a p each instead "
            "of random_apply."
        )
    weights: torch.Tensor = module.random_apply_weights
    if not children:
        return "there is nothing in it"
    if weights.is_cuda:
        return "random_apply_weights are on the GPU; leave the pipeline on the CPU, where it draws"
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        return "random_apply_weights are not what Kornia takes"
    ops = [member.op for child in children for member in child.members]
    if any(isinstance(op, Choice | OneMix) for op in ops):
        return "random_apply over modules that pick again"
    if mixes:
        return _one_mix(name, module, mixes, pick)
    if any(isinstance(op.module, MixAugmentationBaseV2) for op in ops):
        return "random_apply over a mix beside other modules, which Kornia puts in by rules of its own"
    return RandomApply(name, module, children, pick)


def _mixes(children: Sequence[Child]) -> list[tuple[str, MixOp]]:
    """The mixes of a container, by name; empty if it holds other modules."""
    mixes = []
    for child in children:
        op = child.members[0].op if child.members else None
        if child.is_container or not isinstance(op, MixOp) or isinstance(op, OneMix):
            return []
        mixes.append((child.name, op))
    return mixes


def _one_mix(name: str, module: Any, mixes: Sequence[tuple[str, MixOp]], pick: Pick) -> OneMix | str:
    # Kornia runs one mix of a container for any number of picks, and none if the number may be 0.
    if module.random_apply[0] == 0:
        return "random_apply of none or more over mixes"
    if not module.random_apply_weights.any():
        return "random_apply_weights are all 0"
    return OneMix(name, module, mixes, pick, module.random_apply_weights.tolist())
