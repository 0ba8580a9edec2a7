"""Base classes of the ops of modules that pick some of their *children* at random, and of *policies* such as RandAugment.

A child is one module, or several modules that run in sequence, its *members*. A *plan* is the list of passes, that is, kernels
that read and write all images, for images of one size. A *fallback module* has no op: its library runs it.

A policy picks per sample or per batch. Its plan is the same for all picks, so that few kernels are compiled. For each pick and
each position in a child, the plan holds one op that can run any pointwise op (``OneOf``), one that can run any affine warp
(``AnyAffine``), and so on. The apply mask of such an op is True for the samples that picked one of the ops that it can run.
"""

import copy
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from kornia.augmentation.container.params import ParamItem

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.base import Array, ChannelOp, Op, OpDraws, PointOp, Size
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.filters import AutoContrast, Equalize, EqualizeOrContrast
from gpuaug.fusion.ops.geometry import GatherOp, WarpOp
from gpuaug.fusion.policies.one_of import AnyAffine, OneOf

Pick = Literal["batch", "sample"]
"""Whether all samples of a batch share the picks, or each sample picks separately."""


@dataclass(frozen=True, slots=True)
class Member:
    """One module of a ``Child``, and its op."""

    name: str
    op: Op | EagerOp
    operation: Any = None
    """In a policy: Kornia's wrapper of the augmentation, or the ``PolicyOperation`` of ``policies/torchvision.py``."""


@dataclass(frozen=True, slots=True)
class Child:
    """What can be picked: one module, or several modules that run in sequence."""

    name: str
    members: tuple[Member, ...]
    is_container: bool
    """True if the child is a container of the user's pipeline."""


class Entry(NamedTuple):
    """Draws of one member of a child."""

    child: int
    """Index of the child."""
    position: int
    """Index of the member in the child."""
    draws: OpDraws
    size: Size
    """Size of the input images of the member."""
    mask: Array | None
    """Mask of the samples that picked the child, (B,) bool; ``None`` for all samples."""

    @property
    def apply_mask(self) -> Array:
        """Mask of the samples that the member is applied to, (B,) bool."""
        apply_mask: Array = self.draws["apply_mask"]
        return apply_mask if self.mask is None else apply_mask & self.mask


class Picking(Op):
    """Base class of the ops of modules that pick. Draws hold ``"layers"``, tuples of ``Entry``, in the order of execution."""

    children: tuple[Child, ...]

    def _read(self, module: Any) -> None:
        """Do nothing, because the ops of the children read their settings."""

    @property
    def ops(self) -> tuple[Op | EagerOp, ...]:
        """Ops or fallback modules of all members of all children."""
        return tuple(member.op for child in self.children for member in child.members)

    @property
    def keepdim(self) -> bool:
        """True if all ops return a single image (C, H, W) without a batch dimension."""
        return all(op.keepdim for op in self.ops)


_OPS_WITH_PARTS = OneOf | AnyAffine | EqualizeOrContrast
"""Classes of ops that run one of several ops. The draws of these ops are in ``"parts"`` (``OpDraws``)."""


class Policy(Picking):
    """Base class of the ops of policies. A subclass sets ``children`` and ``count``, and draws the layers.

    There is one layer for each pick and each position in a child, ordered by pick, then by position. A layer holds one
    ``Entry`` for each child that has a member at the position. The entry of a child that no sample picked may be left out,
    unless the child is in ``always_drawn``. ``"apply_mask"`` is True for the samples that the policy is applied to.
    """

    count: int
    """Number of picks per sample."""

    @property
    def positions(self) -> range:
        """Indices of the members of the child with the most members."""
        return range(max((len(child.members) for child in self.children), default=0))

    @cached_property
    def _layers(self) -> list[list[tuple[Op, list[int]]]]:
        """Ops of the plan, per layer: (op, indices of the children whose members the op runs)."""
        # Computed on first use, because ops are copied here, and may still be changed after the constructor returns.
        return [self._layer(position) for _ in range(self.count) for position in self.positions]

    def _layer(self, position: int) -> list[tuple[Op, list[int]]]:
        """Ops of one layer: (op, indices of the children whose members at ``position`` the op runs)."""
        groups: dict[Any, list[int]] = {}
        for index, child in enumerate(self.children):
            if position < len(child.members):
                groups.setdefault(_group_key(self.op(index, position)), []).append(index)
        layer = [(self._group_op([self.op(index, position) for index in group]), group) for group in groups.values()]
        # A sample runs one op of a layer, so the ops may be in any order. Ops that can join the preceding pass come first.
        return sorted(layer, key=lambda item: _rank(item[0]))

    def _group_op(self, ops: list[Op]) -> Op:
        """One op that can run any of ``ops``, which have the same ``_group_key``."""
        first = ops[0]
        equalize = next((op for op in ops if isinstance(op, Equalize)), None)
        contrast = next((op for op in ops if isinstance(op, AutoContrast)), None)
        if equalize is not None and contrast is not None:
            return EqualizeOrContrast(self.name, (equalize, contrast))
        if OneOf.accepts(first):
            return OneOf(self.name, [op for op in self.ops if OneOf.accepts(op)])
        if AnyAffine.accepts(first):
            return AnyAffine(self.name, first)
        op = copy.copy(first)
        op.name = self.name
        op.p = 0.5  # below 1, so that the apply mask is read: a sample may have picked no op of the group
        return op

    @cached_property
    def always_drawn(self) -> list[set[int]]:
        """Indices of the children whose entries are always needed, per position in a child.

        A plan op that runs ops of one class without ``"parts"`` needs draws of the class, even if no sample picked it.
        """
        layers = (self._layers[position] for position in self.positions)
        return [{group[0] for op, group in layer if not isinstance(op, _OPS_WITH_PARTS)} for layer in layers]

    def op(self, child: int, position: int) -> Op:
        """Op of the member at ``position`` of child ``child``."""
        op = self.children[child].members[position].op
        assert isinstance(op, Op)
        return op

    @property
    def plan_ops(self) -> tuple[Op, ...]:
        """Ops of all layers, in order, which run in the passes for this op."""
        return tuple(op for layer in self._layers for op, _ in layer)

    def draws_by_op(self, draws: OpDraws) -> dict[Op, OpDraws]:
        """Draws of each op in ``plan_ops``."""
        draws_by_plan_op: dict[Op, OpDraws] = {}
        for ops_of_layer, layer in zip(self._layers, draws["layers"], strict=True):
            by_child = {entry.child: entry for entry in layer}
            for plan_op, group in ops_of_layer:
                entries = [by_child[index] for index in group if index in by_child]
                masks = [entry.apply_mask for entry in entries]
                if isinstance(plan_op, _OPS_WITH_PARTS):
                    pairs = zip(entries, masks, strict=True)
                    draws_by_plan_op[plan_op] = {
                        "parts": [(self.op(entry.child, entry.position), entry.draws, mask) for entry, mask in pairs]
                    }
                else:
                    draws_by_plan_op[plan_op] = _merged_draws(entries, masks)
                draws_by_plan_op[plan_op]["apply_mask"] = reduce(np.logical_or, masks, np.zeros_like(draws["apply_mask"]))
        return draws_by_plan_op

    def unsupported_size(self, size: Size) -> str | None:
        """Reason why an op of a child cannot be fused for images of ``size``, or ``None``."""
        ops = (op for op in self.ops if isinstance(op, Op))
        return next((f"{reason} ({op.describe()})" for op in ops if (reason := unsupported_pick(op, size)) is not None), None)


def unsupported_pick(op: Op, size: Size) -> str | None:
    """Reason why ``op`` cannot be picked within a fused pass for images of ``size``, or ``None``."""
    begins_pass = ChannelOp.begins_pass(op, size.channels)
    return op.unsupported_size(size) or (f"needs a separate pass for {size.channels} channels" if begins_pass else None)


def _group_key(op: Op) -> tuple[Any, ...]:
    """Key of ``op`` in its layer. One op of the plan runs all ops of a layer that have the same key."""
    if isinstance(op, Equalize | AutoContrast):
        return (EqualizeOrContrast,)
    if OneOf.accepts(op):
        return (OneOf,)
    return (AnyAffine, op.edge, op.nearest) if AnyAffine.accepts(op) else (type(op),)


def _rank(op: Op) -> int:
    """Sort key of an op in its layer.

    Order: pointwise ops, flips, warps, pointwise ops that need the mean of the image, filters. Pointwise ops that need the mean
    join the pass of a warp.
    """
    if isinstance(op, PointOp):
        return 3 if op.needs_mean else 0
    return 2 if isinstance(op, WarpOp) else 1 if isinstance(op, GatherOp) else 4


def _merged_draws(entries: list[Entry], masks: list[Array]) -> OpDraws:
    """Draws that have, for each sample, the values of the entry whose mask is True. All entries are of ops of one class."""
    merged = dict(entries[0].draws)
    for entry, mask in zip(entries[1:], masks[1:], strict=True):
        for name, values in entry.draws.items():
            if name != "apply_mask" and values is not merged[name]:
                merged[name] = np.where(mask, values, merged[name])
    return merged


_NOT_PER_FRAME = ("order", "forward_input_shape", "image_shape", "gaussian_noise")
"""Parameters of Kornia that have one value per clip, not one per frame."""

_BATCH_INDICES = ("mixup_pairs", "mix_pairs", "batch_idx")
"""Parameters of Kornia that are indices into the batch."""


def for_frames(params: Any, size: Size) -> Any:
    """Return parameters in Kornia's format, repeated per frame of clips as in ``VideoSequential``.

    Args:
        params: Parameters per clip. Those of a module that Kornia runs are per frame already, and must not be passed.
        size: Size of the clips; images are not repeated.
    """
    if not size.frames:
        return params
    if isinstance(params, list):
        return [ParamItem(item.name, for_frames(item.data, size)) for item in params]
    if not isinstance(params, dict):
        return params
    result = {}
    for name, value in params.items():
        axis = 1 if name in ("crop_src", "mix_pairs") else 0
        repeated = value if name in _NOT_PER_FRAME else value.repeat_interleave(size.frames, axis)
        if name in _BATCH_INDICES:
            frame = torch.arange(size.frames, device="cpu").repeat(size.batch)
            repeated = repeated * size.frames + (frame[:, None] if name == "batch_idx" else frame)
        result[name] = repeated
    return result


def kornia_params_error(name: str) -> ArgumentError:
    """Error for a conversion to Kornia's ``params=`` with ``pick="sample"``, which Kornia does not support."""
    return ArgumentError(
        f"pick must be 'batch' for as_kornia(), got 'sample': Kornia's {name} picks once for all "
        "samples. Fuse with pick='batch' to compare the results."
    )
