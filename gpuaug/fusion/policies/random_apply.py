"""Kornia's containers with ``random_apply``, which draw for each batch how many modules run, which, and in which order.

A picked module may change the size of the images, run more than once, or be run by Kornia. A batch therefore runs as a
sequence of ``PickedOp``, one per op of the picked modules. All pointwise ops run as ``OneOf``, one op that runs any of them, so
that the number of compiled kernels does not grow with the number of combinations.

A *plan* is a list of passes, that is, kernels that read and write all images. A *fallback module* has no op: Kornia runs it.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from kornia.augmentation import MixAugmentationBaseV2
from kornia.augmentation.container.params import ParamItem
from torch import nn

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.base import Op, OpDraws, Size
from gpuaug.fusion.ops.fallback import EagerKornia, EagerOp
from gpuaug.fusion.ops.mix import MixOp
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.policies.one_mix import OneMix
from gpuaug.fusion.policies.one_of import OneOf
from gpuaug.fusion.policies.picking import Child, Entry, Pick, Picking, for_frames, unsupported_pick

_MAX_ONE_OFS = 4
"""Maximum number of ``OneOf`` ops in one kernel. Each of them adds the code of all pointwise ops to the kernel."""


class PickedOp(NamedTuple):
    """One picked op and its draws for a batch."""

    op: Op | EagerOp
    draws: OpDraws
    starts_plan: bool
    """True if the op begins a new plan, so that its kernel does not depend on the preceding ops.

    The number of kernels then grows with the number of ops, not with the number of orders. False for a ``OneOf``, which joins
    the preceding pass.
    """


class RandomApply(Picking):
    """Op of a container with ``random_apply``, which runs some of its modules in a random order."""

    draws_one_batch_at_a_time = True

    def __init__(self, name: str, module: nn.Module, children: Sequence[Child]) -> None:
        super().__init__(name, module)
        self.children = tuple(children)
        self._pointwise_ops = [op for op in self.ops if OneOf.accepts(op)]
        self._ops_by_key: dict[Any, Op] = {}
        """Ops of plans, by (key of the module, number of ops with this key that precede in the batch)."""
        self._fallbacks: dict[Any, EagerKornia] = {}
        """Fallback modules for images of an unsupported size, by (index of the child, index of the module in the child)."""

    @property
    def _counts(self) -> tuple[int, int]:
        """(smallest, largest) number of picked modules."""
        low, end = self.module.random_apply  # type: ignore[misc]
        return int(low), int(end) - 1  # type: ignore[has-type]

    def picks(self, sampler: Sampler) -> list[int]:
        """Draw the indices of the picked children, weighted by ``random_apply_weights``.

        As in Kornia, a child can be picked twice if more children are picked than the sum of the weights, or than there are
        nonzero weights.
        """
        low, high = self._counts
        weights: Any = self.module.random_apply_weights
        count = low + min(int(_number(sampler) * (high - low + 1)), high - low)
        total = weights.sum().item()
        if total == 0 or count == 0:
            return []
        rates = weights.detach().double().numpy()
        if count > total or count > np.count_nonzero(rates):
            ends = rates.cumsum() / rates.sum()
            return [int(np.searchsorted(ends, _number(sampler), side="right")) for _ in range(count)]
        # Without replacement: each child gets an exponentially distributed time, with its weight as rate. The children with the
        # smallest times are picked.
        numbers = np.array([_number(sampler) for _ in rates])
        with np.errstate(divide="ignore", invalid="ignore"):
            times = np.where(rates > 0, -np.log1p(-numbers) / rates, np.inf)
        return [int(index) for index in times.argsort()[:count]]

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Pick children, and draw the parameters of their modules.

        Returns:
            ``"layers"``, tuples of one ``Entry``, in the order in which the modules run; ``"picks"``, indices of the picked
            children; and ``"end"``, the output ``Size``.
        """
        layers = []
        picks = self.picks(sampler)
        for child in picks:
            for position in range(len(self.children[child].members)):
                op = self._op_or_fallback(child, position, size)
                draws = op.draw(sampler, size)
                layers.append((Entry(child, position, draws, size, None),))
                size = op.out_drawn(draws, size)
        return {"layers": tuple(layers), "picks": tuple(picks), "end": size}

    def out_drawn(self, draws: OpDraws, size: Size) -> Size:
        """Output size for these draws."""
        end: Size = draws["end"]
        return end

    def _op_or_fallback(self, child: int, position: int, size: Size) -> Op | EagerOp:
        """Op of a member for images of ``size``, or its fallback module if the op does not support the size."""
        op = self.children[child].members[position].op
        reason = None if isinstance(op, EagerOp) else unsupported_pick(op, size)
        if isinstance(op, EagerOp) or reason is None:
            return op
        if (child, position) not in self._fallbacks:
            self._fallbacks[child, position] = EagerKornia(op.name, op.module, reason, op)
        return self._fallbacks[child, position]

    def picked_ops(self, draws: OpDraws) -> list[PickedOp]:
        """Picked ops of a batch, in order. Ops that change neither an image nor the size are left out."""
        picked_ops: list[PickedOp] = []
        occurrences: Counter[Any] = Counter()
        for (entry,) in draws["layers"]:
            op = self._op_or_fallback(entry.child, entry.position, entry.size)
            key = "pointwise" if OneOf.accepts(op) else (entry.child, entry.position)
            if isinstance(op, EagerOp):
                picked_ops.append(PickedOp(op, entry.draws, starts_plan=True))
            elif entry.apply_mask.any() or op.out(entry.size) != entry.size:
                picked_ops.append(self._picked_op(op, entry.draws, key, occurrences[key]))
                occurrences[key] += 1
        return picked_ops

    def _picked_op(self, op: Op, draws: OpDraws, key: Any, occurrence: int) -> PickedOp:
        """Op of a plan that runs ``op``, and its draws.

        Args:
            op: Op of the picked module.
            draws: Draws of ``op``.
            key: Key of the module; all pointwise ops have the same key.
            occurrence: Number of ops with this key that precede in the batch.
        """
        is_pointwise = OneOf.accepts(op)
        if (key, occurrence) not in self._ops_by_key:
            # A plan tells ops apart by identity, so an op that is picked again is copied.
            self._ops_by_key[key, occurrence] = OneOf(self.name, self._pointwise_ops) if is_pointwise else copy.copy(op)
        op_draws = {"apply_mask": draws["apply_mask"], "parts": [(op, draws, None)]} if is_pointwise else draws
        starts_plan = not is_pointwise or occurrence % _MAX_ONE_OFS == 0 < occurrence
        return PickedOp(self._ops_by_key[key, occurrence], op_draws, starts_plan)

    def params(self, draws: OpDraws, size: Size) -> Any:
        """Draws in the format of the container's ``params=`` argument, repeated per frame of clips."""
        layers = iter(draws["layers"])

        def param_item(child: Child) -> ParamItem:
            items = [ParamItem(member.name, self._data(*next(layers))) for member in child.members]
            return ParamItem(child.name, items if child.is_container else items[0].data)

        return [param_item(self.children[index]) for index in draws["picks"]]

    def _data(self, entry: Entry) -> Any:
        """Draws of one member in the format of Kornia's ``params=``."""
        op = self._op_or_fallback(entry.child, entry.position, entry.size)
        if isinstance(op, EagerOp):
            return entry.draws["params"][0].data
        return for_frames(op.params(entry.draws, entry.size), entry.size)

    def describe(self) -> str:
        """Short description for ``explain()``: number of picks, and ops that can be picked."""
        low, high = self._counts
        count = f"{high}" if low == high else f"{low} to {high}"
        return f"for each batch {count} of {', '.join(dict.fromkeys(map(_description, self.ops)))}"

    def fallbacks(self, size: Size) -> list[str]:
        """Descriptions of the modules that Kornia runs for images of ``size``, without duplicates."""
        return list(
            dict.fromkeys(
                _description(op) for op in self.ops if isinstance(op, EagerOp) or unsupported_pick(op, size) is not None
            )
        )

    def always_fallbacks(self) -> tuple[EagerOp, ...]:
        """Fallback modules: modules that Kornia runs for images of any size."""
        return tuple(op for op in self.ops if isinstance(op, EagerOp))

    def most_launches(self, size: Size) -> int | None:
        """Largest number of kernel launches per batch; ``None`` if Kornia may run a module."""
        if self.fallbacks(size):
            return None
        members = self._counts[1] * max(len(child.members) for child in self.children)
        return members * max((op.launches for op in self.ops if isinstance(op, Op)), default=0)


def _number(sampler: Sampler) -> float:
    """One uniform number in [0, 1) for the whole batch, which may be empty."""
    return sampler.integer(0, 2**53) / 2**53


def _description(op: Op | EagerOp) -> str:
    """Short description of an op, or name of a fallback module."""
    return op.name if isinstance(op, EagerOp) else op.describe()


def lower_random_apply(name: str, module: Any, children: Sequence[Child], pick: Pick) -> RandomApply | OneMix | str:
    """Create the op of a container with ``random_apply``, or return the reason why Kornia runs the container.

    Raises:
        ArgumentError: If ``pick="sample"`` and a child is not a mix.
    """
    mixes = _mixes(children)
    if pick == "sample" and not mixes:
        raise ArgumentError(
            "pick must be 'batch' for a container with random_apply over modules other than mixes, got 'sample': samples "
            f"with different orders of modules cannot share a pass. Leave pick out, or replace random_apply of {name} by a "
            "probability p of each module."
        )
    weights: torch.Tensor = module.random_apply_weights
    if not children:
        return "it is empty"
    if weights.is_cuda:
        return "random_apply_weights are on the GPU; keep the pipeline on the CPU, where gpuaug draws its random parameters"
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        return "random_apply_weights are negative or not finite"
    ops = [member.op for child in children for member in child.members]
    if any(isinstance(op, Picking | OneMix) for op in ops):
        return "random_apply over modules that pick modules themselves"
    if mixes:
        return _one_mix(name, module, mixes, pick)
    if any(isinstance(op.module, MixAugmentationBaseV2) for op in ops):
        return "random_apply over a mix beside other modules, which Kornia inserts by special rules"
    return RandomApply(name, module, children)


def _mixes(children: Sequence[Child]) -> list[tuple[str, MixOp]]:
    """(name, op) of the mixes of a container; empty if it holds any other module."""
    mixes = []
    for child in children:
        op = child.members[0].op if child.members else None
        if child.is_container or not isinstance(op, MixOp) or isinstance(op, OneMix):
            return []
        mixes.append((child.name, op))
    return mixes


def _one_mix(name: str, module: Any, mixes: Sequence[tuple[str, MixOp]], pick: Pick) -> OneMix | str:
    """Create the op of a container of mixes, or return the reason why Kornia runs the container."""
    # Kornia runs exactly one mix, also if random_apply picks several. If random_apply may pick none, Kornia never runs a mix.
    if module.random_apply[0] == 0:
        return "random_apply of zero or more mixes"
    if not module.random_apply_weights.any():
        return "random_apply_weights are all 0"
    return OneMix(name, module, mixes, pick, module.random_apply_weights.tolist())
