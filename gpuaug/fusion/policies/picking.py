"""Modules that pick among others, and policies: modules whose picks are fixed parts of a plan.

A policy picks for each sample, or once for a batch. Either way its plan holds the same ops: for each pick and each position in
the units that are picked, one op per kind (``OneOf`` for pointwise ops, ``AnyAffine`` for affine warps), whose apply mask is
True for the samples that picked an op of this kind. So one plan serves all picks, and few kernels are compiled.
"""

import copy
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Literal, NamedTuple

import numpy as np

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.base import Array, Op, OpDraws, PointOp, Size
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.filters import AutoContrast, Equalize, EqualizeOrContrast
from gpuaug.fusion.ops.geometry import GatherOp, WarpOp
from gpuaug.fusion.policies.one_of import AnyAffine, OneOf

Pick = Literal["batch", "sample"]


@dataclass(frozen=True, slots=True)
class Member:
    """A module that may be picked."""

    name: str
    op: Op | EagerOp
    operation: Any = None
    """Kornia's wrapper with its magnitude, or torchvision's ``Magnitude``; ``None`` in a container."""


@dataclass(frozen=True, slots=True)
class Child:
    """The unit that is picked: one module, or several that run one after the other."""

    name: str
    members: tuple[Member, ...]
    is_container: bool


class Entry(NamedTuple):
    """The draws of one member, for the samples in ``where``, (B,) bool; ``None``: all."""

    child: int
    position: int
    drawn: OpDraws
    size: Size
    where: Array | None

    @property
    def apply_mask(self) -> Array:
        """Mask of the samples that the member runs for, bool, (B,)."""
        apply_mask: Array = self.drawn["apply_mask"]
        return apply_mask if self.where is None else apply_mask & self.where


class Picking(Op):
    """A module that picks among its children. Its draws hold ``"layers"``, tuples of entries, run one after the other."""

    children: tuple[Child, ...]

    def _read(self, module: Any) -> None:
        """Nothing: the settings are those of the ops."""

    @property
    def ops(self) -> tuple[Op | EagerOp, ...]:
        """All ops that can be picked."""
        return tuple(member.op for child in self.children for member in child.members)

    @property
    def keepdim(self) -> bool:
        """True if a single image, (C, H, W), comes out as one for every pick."""
        return all(op.keepdim for op in self.ops)


_TAKES_PARTS = OneOf | AnyAffine | EqualizeOrContrast
"""Ops with draws ``"parts"``, which may be empty. Any other op of a policy takes the draws of one type of op."""


class Policy(Picking):
    """A policy. A subclass sets ``children`` and ``count``, and draws one layer for each pick and position, in this order.

    A layer has entries for the children with a member at its position; children that no sample picked may have none, but for
    those in ``always_drawn``. ``"apply_mask"`` holds the samples that the policy applies to.
    """

    count: int
    """Number of picks."""

    @property
    def positions(self) -> range:
        """Positions in the longest child."""
        return range(max((len(child.members) for child in self.children), default=0))

    @cached_property
    def _layers(self) -> list[list[tuple[Op, list[int]]]]:
        # Not in the constructor: copies of ops are made here, and a later step of lowering may change the ops.
        return [self._layer(position) for _ in range(self.count) for position in self.positions]

    def _layer(self, position: int) -> list[tuple[Op, list[int]]]:
        """An op for each kind of op at one position of the children, and the indices of the children of that kind."""
        kinds: dict[Any, list[int]] = {}
        for index, child in enumerate(self.children):
            if position < len(child.members):
                kinds.setdefault(_kind(self.op(index, position)), []).append(index)
        layer = [(self._part([self.op(index, position) for index in which]), which) for which in kinds.values()]
        # A sample runs one op of a layer, so their order is free: an op that joins the pass before it goes first.
        return sorted(layer, key=lambda item: _rank(item[0]))

    def _part(self, ops: list[Op]) -> Op:
        """One op for all ops of a kind."""
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
        part.p = 0.5  # with p below 1 its apply mask is read
        return part

    @cached_property
    def always_drawn(self) -> list[set[int]]:
        """By position, the children whose draws a part needs, whether or not a sample picked them."""
        layers = (self._layers[position] for position in self.positions)
        return [{which[0] for op, which in layer if not isinstance(op, _TAKES_PARTS)} for layer in layers]

    def op(self, child: int, position: int) -> Op:
        """The op of one member."""
        op = self.children[child].members[position].op
        assert isinstance(op, Op)
        return op

    @property
    def parts(self) -> tuple[Op, ...]:
        """The ops of all layers, in order."""
        return tuple(op for layer in self._layers for op, _ in layer)

    def of_parts(self, drawn: OpDraws) -> dict[Op, OpDraws]:
        """The draws of each of its parts."""
        draws: dict[Op, OpDraws] = {}
        for parts, layer in zip(self._layers, drawn["layers"], strict=True):
            by_child = {entry.child: entry for entry in layer}
            for part, which in parts:
                entries = [by_child[index] for index in which if index in by_child]
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
        """Why an op that can be picked cannot be lowered for images of this size, or ``None``."""
        ops = (op for op in self.ops if isinstance(op, Op))
        return next((f"{reason} ({op.describe()})" for op in ops if (reason := op.unsupported_size(size)) is not None), None)


def _kind(op: Op) -> tuple[Any, ...]:
    """Key of the ops of a layer that one op can stand for."""
    if isinstance(op, Equalize | AutoContrast):
        return (EqualizeOrContrast,)
    if OneOf.takes(op):
        return (OneOf,)
    return (AnyAffine, op.edge, op.nearest) if AnyAffine.takes(op) else (type(op),)


def _rank(op: Op) -> int:
    """Rank of an op in its layer: pointwise ops, flips, warps, an op that needs a mean and joins a warp's pass, filters."""
    if isinstance(op, PointOp):
        return 3 if op.needs_mean else 0
    return 2 if isinstance(op, WarpOp) else 1 if isinstance(op, GatherOp) else 4


def _merged(entries: list[Entry], masks: list[Array]) -> OpDraws:
    """Draws of ops of one type, each sample's from the entry whose mask holds it."""
    merged = dict(entries[0].drawn)
    for entry, mask in zip(entries[1:], masks[1:], strict=True):
        for name, values in entry.drawn.items():
            if name != "apply_mask" and values is not merged[name]:
                merged[name] = np.where(mask, values, merged[name])
    return merged


def no_form_in_kornia(name: str) -> ArgumentError:
    """The error if Kornia's form is asked of draws that were picked for each sample."""
    return ArgumentError(
        f"pick must be 'batch' for draws to have Kornia's form, got 'sample': {name} of Kornia picks once for all "
        "samples. Fuse with pick='batch' to compare the two."
    )
