"""torchvision's RandAugment, TrivialAugmentWide and AutoAugment: each sample picks for itself, as in a dataset."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from torchvision.transforms import v2

from gpuaug.core.settings import initial_settings
from gpuaug.fusion.ops.base import Array, Op, OpDraws, PointOp, Size
from gpuaug.fusion.ops.filters import AutoContrast, Equalize, EqualizeOrContrast
from gpuaug.fusion.ops.geometry import WarpOp
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp, Units
from gpuaug.fusion.ops.torchvision.operations import OPERATIONS, Adjust
from gpuaug.fusion.policies.choice import POINT, Child, Entry, Member, Picking, any_applies, kind_of
from gpuaug.fusion.policies.one_of import AnyAffine, OneOf

_MOST_KEPT = 256
_SHARED = {"magnitude", "apply_mask"}
"""Draws that operations of one kind have in common or make anew, and so do not merge."""


@dataclass(frozen=True, slots=True)
class Magnitude:
    """Magnitude of an operation: a bin of the table that torchvision makes for images of one size."""

    operation: str
    bins: int
    bin: int | None
    """Index of the bin; ``None``: each sample draws it."""
    p: float = 1.0
    """Probability that the operation runs once picked."""


class TorchvisionPolicy(TorchvisionOp, Picking):
    """A policy of torchvision's, as a sequence of ops: for each pick one of every kind, for the samples that picked it.

    Args:
        name: The transform's name in its container.
        transform: The user's transform.
        units: Units of its input images.
    """

    def __init__(self, name: str, transform: nn.Module, units: Units) -> None:
        super().__init__(name, transform, units)
        self.children = tuple(_child(each, transform, units) for each in _picks(transform))
        self._count = int(getattr(transform, "num_ops", 1))
        self._positions = range(max(len(child.members) for child in self.children))
        self._layers = [self._layer(position) for _ in range(self._count) for position in self._positions]
        self._magnitudes: dict[Any, _Magnitudes] = {}

    def _layer(self, position: int) -> list[tuple[Op, list[int]]]:
        """An op for each kind of operation at one position of the children, and the children that have one of that kind."""
        kinds: dict[Any, list[int]] = {}
        alike: dict[Any, list[TorchvisionOp]] = {}
        for index, child in enumerate(self.children):
            if position < len(child.members):
                op = _op(child.members[position])
                kinds.setdefault(_kind(op), []).append(index)
                alike.setdefault(_kind(op), []).append(op)
        # A sample runs one op of a layer, so their order is free: one that joins the pass before it goes first.
        ordered = sorted(kinds, key=lambda kind: _place(alike[kind][0]))
        return [(self._standing_for(alike[kind]), kinds[kind]) for kind in ordered]

    def _standing_for(self, alike: list[TorchvisionOp]) -> Op:
        """One op for all of a kind."""
        op = alike[0]
        equalize = next((each for each in alike if isinstance(each, Equalize)), None)
        contrast = next((each for each in alike if isinstance(each, AutoContrast)), None)
        if equalize is not None and contrast is not None:
            return EqualizeOrContrast(self.name, (equalize, contrast))
        if kind_of(op) == POINT:
            return OneOf(self.name, [each for each in self._ops if isinstance(each, PointOp) and OneOf.takes(each)])
        if isinstance(op, WarpOp):
            return AnyAffine(self.name, op)
        made = copy.copy(op)
        made.name, made.p = self.name, 0.5  # with p below 1 its apply mask is read
        return made

    @property
    def parts(self) -> tuple[Op, ...]:
        """The ops of all layers, in order."""
        return tuple(op for layer in self._layers for op, _ in layer)

    def of_parts(self, drawn: OpDraws) -> dict[Op, OpDraws]:
        """The draws of each of its parts."""
        made: dict[Op, OpDraws] = {}
        for ops, entries in zip(self._layers, drawn["layers"], strict=True):
            of_child = {entry.child: entry for entry in entries}
            for op, which in ops:
                each = [of_child[index] for index in which]
                own: OpDraws = {"parts": [(self._op(entry), entry.drawn, entry.where) for entry in each]}
                if not isinstance(op, OneOf | AnyAffine | EqualizeOrContrast):
                    own = dict(each[0].drawn)
                    for entry in each[1:]:
                        own |= {name: np.where(entry.where, entry.drawn[name], own[name]) for name in own.keys() - _SHARED}
                made[op] = {**own, "apply_mask": any_applies(each)}
        return made

    def _op(self, entry: Entry) -> TorchvisionOp:
        return _op(self.children[entry.child].members[entry.position])

    @property
    def _ops(self) -> Iterator[TorchvisionOp]:
        return (_op(member) for child in self.children for member in child.members)

    def unsupported(self) -> str | None:
        """Why the transform is left to torchvision, or ``None``."""
        return next((reason for op in self._ops if (reason := op.unsupported()) is not None), None)

    def unsupported_size(self, size: Size) -> str | None:
        """All operations may be picked."""
        return next((reason for op in self._ops if (reason := op.unsupported_size(size)) is not None), None)

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Pick operations and draw magnitudes: ``"layers"``, tuples of entries, run one after the other."""
        applies = self.draw_apply_mask(sampler, size.batch)
        # One of the children for each pick, uniformly with repetition.
        picks = (sampler.uniform(self._count) * len(self.children)).astype(np.int64)
        layers = (self._entries(row, position, applies, sampler, size) for row in picks for position in self._positions)
        return {"apply_mask": applies, "layers": tuple(layers)}

    def _entries(self, picks: Array, position: int, applies: Array, sampler: Sampler, size: Size) -> tuple[Entry, ...]:
        """One operation of every child, for the samples that picked it and that it runs for."""
        (chance, *numbers), layer = sampler.uniform(3), []
        magnitudes = self._magnitudes_at(position, size)
        values = magnitudes.of(picks, *numbers)
        for index, child in enumerate(self.children):
            if position < len(child.members):
                member = child.members[position]
                mask = applies & (picks == index)
                if member.operation.p < 1:
                    mask &= chance < member.operation.p
                drawn: OpDraws = {"magnitude": values} if magnitudes.given[index] else {}
                if isinstance(member.op, Adjust):
                    drawn["adjustment"] = member.op.adjustment
                layer.append(Entry(index, position, {**drawn, "apply_mask": mask}, size, mask))
        return tuple(layer)

    def _magnitudes_at(self, position: int, size: Size) -> "_Magnitudes":
        """The magnitudes of the operations at one position of the children, for images of one size."""
        key = position, size.height, size.width
        if key not in self._magnitudes:
            if len(self._magnitudes) >= _MOST_KEPT:
                self._magnitudes.clear()
            members = [child.members[position] if position < len(child.members) else None for child in self.children]
            self._magnitudes[key] = _Magnitudes([self._table(member, size) for member in members])
        return self._magnitudes[key]

    def _table(self, member: Member | None, size: Size) -> tuple[Array | None, bool]:
        """Magnitudes of an operation in torchvision's table, (bins,) float64 from float32; True if their sign is random."""
        if member is None:
            return None, False
        magnitude: Magnitude = member.operation
        made, signed = self.module._AUGMENTATION_SPACE[magnitude.operation]  # type: ignore[union-attr, index]
        with initial_settings():
            found = made(magnitude.bins, size.height, size.width)
        if found is None:
            return None, signed
        table: Array = found.double().numpy()
        return table if magnitude.bin is None else table[magnitude.bin : magnitude.bin + 1], signed

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The operations that a sample picked, in order."""
        picked = (entry for layer in drawn["layers"] for entry in layer if entry.where[sample])
        return [call for entry in picked for call in self._op(entry).calls(entry.drawn, sample, entry.size)]


class _Magnitudes:
    """Magnitudes of the operations that a sample can pick.

    Args:
        tables: For each operation (magnitudes, whether their sign is random). Magnitudes are (bins,) float64, or ``None``.
    """

    def __init__(self, tables: Sequence[tuple[Array | None, bool]]) -> None:
        self.given = [table is not None for table, _ in tables]
        self._signed = np.array([signed for _, signed in tables])
        bins = max((len(table) for table, _ in tables if table is not None), default=1)
        self._values = np.zeros((len(tables), bins))
        for values, (table, _) in zip(self._values, tables, strict=True):
            values[:] = 0 if table is None else table

    def of(self, picks: Array, bins: Array, signs: Array) -> Array:
        """The magnitude of the operation that each sample picked, (B,) float64, from uniform numbers for its bin and sign."""
        count = self._values.shape[1]
        values = self._values.take(picks * count + (bins * count).astype(np.int64))
        return np.where(self._signed.take(picks) & (signs < 0.5), -values, values)


def _op(member: Member) -> TorchvisionOp:
    assert isinstance(member.op, TorchvisionOp)
    return member.op


def _kind(op: TorchvisionOp) -> Any:
    """What is the same for ops of a layer that one op can stand for."""
    return EqualizeOrContrast if isinstance(op, Equalize | AutoContrast) else kind_of(op)


def _place(op: TorchvisionOp) -> int:
    """Place of an op in its layer: pointwise ones, then warps, then one that needs a mean and joins a warp's pass."""
    return 0 if kind_of(op) == POINT else 1 if isinstance(op, WarpOp) else 2 if isinstance(op, PointOp) else 3


def _picks(policy: Any) -> list[tuple[Magnitude, ...]]:
    """The units that are picked: operations with their magnitudes, that run one after the other."""
    if type(policy) is v2.AutoAugment:
        return [tuple(Magnitude(name, 10, index, p) for name, p, index in pair) for pair in policy._policies]
    bins, index = policy.num_magnitude_bins, getattr(policy, "magnitude", None)
    return [(Magnitude(name, bins, index),) for name in policy._AUGMENTATION_SPACE]


def _child(magnitudes: tuple[Magnitude, ...], policy: nn.Module, units: Units) -> Child:
    names = [each.operation for each in magnitudes]
    members = [
        Member(each.operation, OPERATIONS[each.operation](each.operation, policy, units), each)
        for each in magnitudes
        if each.operation != "Identity"
    ]
    return Child(", ".join(names), tuple(members), is_container=False)


LOWERED: dict[type[nn.Module], type[TorchvisionOp]] = dict.fromkeys(
    (v2.RandAugment, v2.TrivialAugmentWide, v2.AutoAugment), TorchvisionPolicy
)
