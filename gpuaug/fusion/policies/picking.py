"""Base classes of modules that pick among child modules, and of policies, whose plan is the same for all picks.

A policy picks per sample or per batch. In both cases its plan holds the same ops: for each pick and each position in a child,
one op per group of ops (``OneOf`` for pointwise ops, ``AnyAffine`` for affine warps), whose apply mask is True for the samples
that picked an op of the group. One plan thus serves all picks, and few kernels are compiled.
"""

import copy
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Literal, NamedTuple

import numpy as np

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.base import Array, ChannelOp, Op, OpDraws, PointOp, Size
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.filters import AutoContrast, Equalize, EqualizeOrContrast
from gpuaug.fusion.ops.geometry import GatherOp, WarpOp
from gpuaug.fusion.policies.one_of import AnyAffine, OneOf

Pick = Literal["batch", "sample"]


@dataclass(frozen=True, slots=True)
class Member:
    """Module that may be picked, alone or as a part of a ``Child``."""

    name: str
    op: Op | EagerOp
    operation: Any = None
    """Kornia's wrapper, or the ``Magnitude`` of a torchvision policy; ``None`` in a container with ``random_apply``."""


@dataclass(frozen=True, slots=True)
class Child:
    """Unit of a pick: one module, or several modules that run in sequence."""

    name: str
    members: tuple[Member, ...]
    is_container: bool


class Entry(NamedTuple):
    """Draws of one member, for the samples where ``where``, (B,) bool, is True; ``None`` for all samples."""

    child: int
    position: int
    drawn: OpDraws
    size: Size
    where: Array | None

    @property
    def apply_mask(self) -> Array:
        """Mask of the samples that the member is applied to, (B,) bool."""
        apply_mask: Array = self.drawn["apply_mask"]
        return apply_mask if self.where is None else apply_mask & self.where


class Picking(Op):
    """Module that picks among its children. Its draws hold ``"layers"``, tuples of ``Entry``, in order."""

    children: tuple[Child, ...]

    def _read(self, module: Any) -> None:
        """Do nothing: settings are read by the ops of the children."""

    @property
    def ops(self) -> tuple[Op | EagerOp, ...]:
        """Ops of all members of all children."""
        return tuple(member.op for child in self.children for member in child.members)

    @property
    def keepdim(self) -> bool:
        """True if all ops return a single image (C, H, W) without a batch dimension."""
        return all(op.keepdim for op in self.ops)


_TAKES_PARTS = OneOf | AnyAffine | EqualizeOrContrast
"""Ops whose draws hold ``"parts"``, which may be empty. Other ops of a policy have the draws of a single type of op."""


class Policy(Picking):
    """Base class of policies. A subclass sets ``children`` and ``count``, and draws one layer per pick and position.

    Layers are ordered by pick, then by position. A layer has one ``Entry`` per child with a member at its position. The entry
    of a child that no sample picked may be omitted, unless the child is in ``always_drawn``. ``"apply_mask"`` is True for the
    samples that the policy is applied to.
    """

    count: int
    """Number of picks per sample."""

    @property
    def positions(self) -> range:
        """Range over the members of the longest child."""
        return range(max((len(child.members) for child in self.children), default=0))

    @cached_property
    def _layers(self) -> list[list[tuple[Op, list[int]]]]:
        # Computed on first use, because it copies ops, which may still be changed after the constructor returns.
        return [self._layer(position) for _ in range(self.count) for position in self.positions]

    def _layer(self, position: int) -> list[tuple[Op, list[int]]]:
        """(op, indices of its children) for every group of ops at one position of the children."""
        groups: dict[Any, list[int]] = {}
        for index, child in enumerate(self.children):
            if position < len(child.members):
                groups.setdefault(_group_key(self.op(index, position)), []).append(index)
        layer = [(self._part([self.op(index, position) for index in group]), group) for group in groups.values()]
        # A sample runs one op of a layer, so the order is free. Ops that join the preceding pass come first.
        return sorted(layer, key=lambda item: _rank(item[0]))

    def _part(self, ops: list[Op]) -> Op:
        """One op that can run any op of a group."""
        first = ops[0]
        equalize = next((op for op in ops if isinstance(op, Equalize)), None)
        contrast = next((op for op in ops if isinstance(op, AutoContrast)), None)
        if equalize is not None and contrast is not None:
            return EqualizeOrContrast(self.name, (equalize, contrast))
        if OneOf.takes(first):
            return OneOf(self.name, [op for op in self.ops if OneOf.takes(op)])
        if AnyAffine.takes(first):
            return AnyAffine(self.name, first)
        part = copy.copy(first)
        part.name = self.name
        part.p = 0.5  # below 1, so that the apply mask is read
        return part

    @cached_property
    def always_drawn(self) -> list[set[int]]:
        """Per position, indices of the children that must be drawn for even if no sample picked them."""
        layers = (self._layers[position] for position in self.positions)
        return [{group[0] for op, group in layer if not isinstance(op, _TAKES_PARTS)} for layer in layers]

    def op(self, child: int, position: int) -> Op:
        """Op of the member at ``position`` of child ``child``."""
        op = self.children[child].members[position].op
        assert isinstance(op, Op)
        return op

    @property
    def parts(self) -> tuple[Op, ...]:
        """Ops of all layers, in order."""
        return tuple(op for layer in self._layers for op, _ in layer)

    def of_parts(self, drawn: OpDraws) -> dict[Op, OpDraws]:
        """Draws per op of ``parts``."""
        draws: dict[Op, OpDraws] = {}
        for parts, layer in zip(self._layers, drawn["layers"], strict=True):
            by_child = {entry.child: entry for entry in layer}
            for part, group in parts:
                entries = [by_child[index] for index in group if index in by_child]
                masks = [entry.apply_mask for entry in entries]
                if isinstance(part, _TAKES_PARTS):
                    pairs = zip(entries, masks, strict=True)
                    ops = [(self.op(entry.child, entry.position), entry.drawn, mask) for entry, mask in pairs]
                    draws[part] = {"parts": ops}
                else:
                    draws[part] = _merged(entries, masks)
                draws[part]["apply_mask"] = reduce(np.logical_or, masks, np.zeros_like(drawn["apply_mask"]))
        return draws

    def unsupported_size(self, size: Size) -> str | None:
        """Reason why an op of a child cannot be fused for images of ``size``, or ``None``."""
        ops = (op for op in self.ops if isinstance(op, Op))
        return next((f"{reason} ({op.describe()})" for op in ops if (reason := why_not_picked(op, size)) is not None), None)


def why_not_picked(op: Op, size: Size) -> str | None:
    """Reason why ``op`` cannot be picked within a fused pass for images of ``size``, or ``None``."""
    begins_pass = ChannelOp.begins_pass(op, size.channels)
    return op.unsupported_size(size) or (f"needs a separate pass for {size.channels} channels" if begins_pass else None)


def _group_key(op: Op) -> tuple[Any, ...]:
    """Key of the group of ``op``. One op runs all ops of a layer with the same key."""
    if isinstance(op, Equalize | AutoContrast):
        return (EqualizeOrContrast,)
    if OneOf.takes(op):
        return (OneOf,)
    return (AnyAffine, op.edge, op.nearest) if AnyAffine.takes(op) else (type(op),)


def _rank(op: Op) -> int:
    """Sort key of an op in its layer.

    Order: pointwise ops, flips, warps, pointwise ops that need the mean (they join the pass of a warp), filters.
    """
    if isinstance(op, PointOp):
        return 3 if op.needs_mean else 0
    return 2 if isinstance(op, WarpOp) else 1 if isinstance(op, GatherOp) else 4


def _merged(entries: list[Entry], masks: list[Array]) -> OpDraws:
    """Draws merged from entries of one type of op. A sample's draws come from the entry whose mask is True for it."""
    merged = dict(entries[0].drawn)
    for entry, mask in zip(entries[1:], masks[1:], strict=True):
        for name, values in entry.drawn.items():
            if name != "apply_mask" and values is not merged[name]:
                merged[name] = np.where(mask, values, merged[name])
    return merged


def no_form_in_kornia(name: str) -> ArgumentError:
    """Error for a request of Kornia's ``params=`` with ``pick="sample"``."""
    return ArgumentError(
        f"pick must be 'batch' for as_kornia(), got 'sample': {name} of Kornia picks once for all "
        "samples. Fuse with pick='batch' to compare the two."
    )
