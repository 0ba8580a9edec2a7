"""Base classes of ops for modules that pick some of their *choices* at random, such as *policies* (RandAugment).

A *sample* is an image or a clip. A choice is a list of ops that run in sequence. A *round* picks one choice per sample, or one
per batch; RandAugment has several rounds, whose choices run one after the other. Layer k consists of the k-th op of each
choice, so that a sample runs at most one op of a layer per round. A *pass* is one reading and writing of all images.

The passes of a policy are the same for all picks, so that few kernels are compiled. In place of the policy, its *plan ops* run
in the passes: for each round and each layer, one op that can run any pointwise op (``OneOf``), one that can run any affine warp
(``AnyAffine``), and so on. The *apply mask* of a plan op, (B,) bool, is True for the samples that picked one of the ops that
the plan op can run.
"""

import copy
from functools import cached_property, reduce
from typing import Any, Literal, NamedTuple

import numpy as np

from gpuaug.fusion.ops.base import ChannelOp, Op, OpDraws, PointOp, Size
from gpuaug.fusion.ops.filters import AutoContrast, Equalize, EqualizeOrContrast
from gpuaug.fusion.ops.geometry import GatherOp, WarpOp
from gpuaug.fusion.policies.one_of import AnyAffine, OneOf

Pick = Literal["batch", "sample"]
"""Whether all samples of a batch share the picked choices, or choices are picked per sample."""


class Choice(NamedTuple):
    """One alternative from which a policy picks: a list of ops."""

    name: str
    ops: tuple[Op, ...]
    """Ops that run in sequence."""
    operations: tuple[Any, ...] = ()
    """Source of each op: Kornia's wrapper of an augmentation, or an ``Operation`` of ``policies/torchvision.py``."""


class Picking(Op):
    """Base class of ops that pick. The op runs in a pass itself, unless it is a ``Policy``.

    The ``OpDraws`` hold ``"layers"``: one dict per round and layer, in the order of execution, which maps the index of a choice
    to the ``OpDraws`` of its op in the layer. The op's ``"apply_mask"`` is False for the samples that did not pick the choice.
    A choice that no sample picked may be absent.
    """

    choices: tuple[Choice, ...]
    pick: Pick

    def _read_common(self, module: Any) -> None:
        """Do nothing, because the ops of the choices read their settings."""

    @property
    def ops(self) -> tuple[Op, ...]:
        """Ops of all choices. If an op picks, too, its ``ops`` take its place."""
        return tuple(part for choice in self.choices for op in choice.ops for part in op.ops)

    @property
    def layer_count(self) -> int:
        """Number of layers per round: number of ops of the longest choice."""
        return max((len(choice.ops) for choice in self.choices), default=0)

    def layer(self, layer_index: int) -> dict[int, Op]:
        """Ops of a layer, by index of the choice. ``layer_index``: index in ``"layers"``, which counts through all rounds."""
        op_index = layer_index % self.layer_count
        return {choice_index: ops[op_index] for choice_index, (_, ops, _) in enumerate(self.choices) if op_index < len(ops)}

    def numbers(self, draws: OpDraws, sample: int) -> dict[str, float]:
        """Drawn numbers of one sample, without the numbers of the picked ops. By default there are none."""
        return {}

    @property
    def keepdim(self) -> bool:
        """True if all ops return a single image (C, H, W) without a batch dimension."""
        return all(op.keepdim for op in self.ops)


_OPS_WITH_PARTS = OneOf | AnyAffine | EqualizeOrContrast
"""Classes of ops that run one of several ops. The draws of these ops are in ``"parts"`` (``OpDraws``)."""


class Policy(Picking):
    """Base class of the ops of policies, whose ``plan_ops`` run in the passes in their place.

    A subclass sets ``choices`` and ``count``, and draws ``"layers"`` in ``draw``, at least for the choices in ``always_drawn``.
    ``"apply_mask"`` is True for the samples that the policy is applied to.
    """

    count: int
    """Number of rounds: of choices that a sample picks."""

    @cached_property
    def _plan_layers(self) -> list[list[tuple[Op, list[int]]]]:
        """Per round and layer, (plan op, indices of the choices whose ops it runs) of each plan op."""
        # Computed on first use, because ops are copied here, and may still be changed after the constructor returns.
        return [self._plan_layer(layer_index) for layer_index in range(self.count * self.layer_count)]

    def _plan_layer(self, layer_index: int) -> list[tuple[Op, list[int]]]:
        """(plan op, indices of the choices whose ops it runs) of each plan op for one layer of one round."""
        groups: dict[Any, dict[int, Op]] = {}
        for choice_index, op in self.layer(layer_index).items():
            groups.setdefault(_group_key(op), {})[choice_index] = op
        plan_layer = [(self._group_op([*group.values()]), [*group]) for group in groups.values()]
        # A sample runs at most one op of a layer, so the order is free. Ops that can join the preceding pass come first.
        return sorted(plan_layer, key=lambda op_and_choices: _rank(op_and_choices[0]))

    def _group_op(self, ops: list[Op]) -> Op:
        """Create the plan op that can run any of ``ops``, which have the same ``_group_key``."""
        first = ops[0]
        equalize = next((op for op in ops if isinstance(op, Equalize)), None)
        contrast = next((op for op in ops if isinstance(op, AutoContrast)), None)
        op: Op
        if equalize is not None and contrast is not None:
            op = EqualizeOrContrast(self.name, (equalize, contrast))
        elif OneOf.accepts(first):
            # With the pointwise ops of all layers, so that one kernel serves all layers.
            op = OneOf(self.name, [op for op in self.ops if OneOf.accepts(op)])
        elif AnyAffine.accepts(first):
            op = AnyAffine(self.name, first)
        else:
            op = copy.copy(first)
            op.name = self.name
        op.p = 0.5  # below 1, so that the apply mask is read: a sample may have picked no op of the group
        return op

    @cached_property
    def always_drawn(self) -> list[set[int]]:
        """Per round and layer, indices of the choices whose draws are needed even if no sample picked them.

        One choice per plan op, whose columns of the parameter table cannot be computed without the draws of at least one op.
        """
        return [{group[0] for _, group in plan_layer} for plan_layer in self._plan_layers]

    @property
    def plan_ops(self) -> tuple[Op, ...]:
        """Ops, in order, that run in the passes in place of this op."""
        return tuple(op for plan_layer in self._plan_layers for op, _ in plan_layer)

    def draws_by_op(self, draws: OpDraws) -> dict[Op, OpDraws]:
        """Draws of each op in ``plan_ops``."""
        draws_by_plan_op: dict[Op, OpDraws] = {}
        for layer_index, (plan_layer, layer_draws) in enumerate(zip(self._plan_layers, draws["layers"], strict=True)):
            ops = self.layer(layer_index)
            for plan_op, choice_indices in plan_layer:
                drawn = [(ops[index], layer_draws[index]) for index in choice_indices if index in layer_draws]
                op_draws = (
                    {"parts": drawn} if isinstance(plan_op, _OPS_WITH_PARTS) else _merged_draws([part for _, part in drawn])
                )
                masks = [part["apply_mask"] for _, part in drawn]
                draws_by_plan_op[plan_op] = {**op_draws, "apply_mask": reduce(np.logical_or, masks)}
        return draws_by_plan_op

    def unsupported_size(self, size: Size) -> str | None:
        """Reason why an op of a choice cannot be fused for images of ``size``, such as that it begins a pass; or ``None``."""
        for op in self.ops:
            begins_pass = ChannelOp.begins_pass(op, size)
            reason = op.unsupported_size(size) or (f"needs a separate pass for {size.channels} channels" if begins_pass else "")
            if reason:
                return f"{reason} ({op.describe()})"
        return None


def _group_key(op: Op) -> tuple[Any, ...]:
    """Key by which the ops of a layer are grouped. One plan op runs all ops of a group."""
    if isinstance(op, Equalize | AutoContrast):
        return (EqualizeOrContrast,)
    if OneOf.accepts(op):
        return (OneOf,)
    return (AnyAffine, op.edge, op.nearest) if AnyAffine.accepts(op) else (type(op),)


def _rank(op: Op) -> int:
    """Sort key of a plan op in its layer.

    Order: pointwise ops, flips, warps, pointwise ops that need the mean grey of the image, filters. Pointwise ops that need the
    mean can join the pass of a warp.
    """
    if isinstance(op, PointOp):
        return 3 if op.needs_mean else 0
    return 2 if isinstance(op, WarpOp) else 1 if isinstance(op, GatherOp) else 4


def _merged_draws(draws_of_ops: list[OpDraws]) -> OpDraws:
    """Merge the draws of several ops of one class: each sample gets the values of the op whose apply mask is True for it."""
    merged = dict(draws_of_ops[0])
    for op_draws in draws_of_ops[1:]:
        for name, values in op_draws.items():
            if values is not merged[name]:  # ops of a layer may share an array
                merged[name] = np.where(op_draws["apply_mask"], values, merged[name])
    return merged
