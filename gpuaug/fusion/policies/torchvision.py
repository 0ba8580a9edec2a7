"""torchvision's RandAugment, TrivialAugmentWide and AutoAugment, with independent picks per sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from torchvision.transforms import v2

from gpuaug.core.settings import initial_settings
from gpuaug.fusion.ops.base import Array, OpDraws, Size
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp, Units
from gpuaug.fusion.ops.torchvision.operations import OPERATIONS, Adjust
from gpuaug.fusion.policies.picking import Child, Entry, Member, Policy

_CACHE_SIZE = 256
"""Largest number of cached ``_Magnitudes``."""


@dataclass(frozen=True, slots=True)
class Magnitude:
    """Magnitude of an operation: one bin of torchvision's table of magnitudes for images of one size."""

    operation: str
    bins: int
    """Number of bins of the table."""
    bin: int | None
    """Index of the bin; ``None`` to draw a bin per sample."""
    p: float = 1.0
    """Probability that the operation runs for a sample that picked it."""


class TorchvisionPolicy(TorchvisionOp, Policy):
    """``v2.RandAugment``, ``v2.TrivialAugmentWide`` or ``v2.AutoAugment``. Every sample picks operations independently.

    Args:
        name: Name of the transform in its container.
        transform: Transform of the user.
        units: dtype whose value range the transform's settings refer to.
    """

    def __init__(self, name: str, transform: nn.Module, units: Units) -> None:
        super().__init__(name, transform, units)
        self.children = tuple(_child(magnitudes, transform, units) for magnitudes in _picks(transform))
        self.count = int(transform.num_ops) if isinstance(transform, v2.RandAugment) else 1  # type: ignore[call-overload]
        self._magnitudes: dict[Any, _Magnitudes] = {}
        """Cache, keyed by (position, height, width). With it the draws of a RandAugment for 64 images take 49 µs, not 76 µs."""

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        ops = (op for op in self.ops if isinstance(op, TorchvisionOp))
        return next((reason for op in ops if (reason := op.unsupported()) is not None), None)

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Pick operations and draw their magnitudes: ``"layers"``, one tuple of entries per pick and position, in order."""
        applies = self.draw_apply_mask(sampler, size.batch)
        # (picks, B) indices of children, uniform and with replacement.
        picks = (sampler.uniform(self.count) * len(self.children)).astype(np.int64)
        layers = (self._entries(row, position, applies, sampler, size) for row in picks for position in self.positions)
        return {"apply_mask": applies, "layers": tuple(layers)}

    def _entries(self, picks: Array, position: int, applies: Array, sampler: Sampler, size: Size) -> tuple[Entry, ...]:
        """Entries of one layer: per child its operation at ``position``, masked to the samples that run it."""
        chance, *numbers = sampler.uniform(3)
        layer = []
        magnitudes = self._magnitudes_at(position, size)
        values = magnitudes.of(picks, *numbers)
        for index, child in enumerate(self.children):
            if position < len(child.members):
                member = child.members[position]
                mask = applies & (picks == index)
                if member.operation.p < 1:
                    mask &= chance < member.operation.p
                drawn: OpDraws = {"magnitude": values} if magnitudes.has_magnitude[index] else {}
                if isinstance(member.op, Adjust):
                    drawn["adjustment"] = member.op.adjustment
                layer.append(Entry(index, position, {**drawn, "apply_mask": mask}, size, mask))
        return tuple(layer)

    def _magnitudes_at(self, position: int, size: Size) -> "_Magnitudes":
        """Magnitudes of the children's operations at ``position``, for images of ``size``."""
        key = position, size.height, size.width
        if key not in self._magnitudes:
            if len(self._magnitudes) >= _CACHE_SIZE:
                self._magnitudes.clear()
            members = [child.members[position] if position < len(child.members) else None for child in self.children]
            self._magnitudes[key] = _Magnitudes([self._table(member, size) for member in members])
        return self._magnitudes[key]

    def _table(self, member: Member | None, size: Size) -> tuple[Array | None, bool]:
        """(magnitudes, whether their sign is random) of an operation in torchvision's table.

        Magnitudes are (bins,) float64, converted from float32, or ``None`` for an operation without a magnitude.
        """
        if member is None:
            return None, False
        magnitude: Magnitude = member.operation
        magnitudes_of, signed = self.module._AUGMENTATION_SPACE[magnitude.operation]  # type: ignore[union-attr, index]
        with initial_settings():
            magnitudes = magnitudes_of(magnitude.bins, size.height, size.width)
        if magnitudes is None:
            return None, signed
        table: Array = magnitudes.double().numpy()
        return table if magnitude.bin is None else table[magnitude.bin : magnitude.bin + 1], signed

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """Functional calls of the operations that run for ``sample``, in order."""
        calls: list[Call] = []
        for entry in (entry for layer in drawn["layers"] for entry in layer if entry.where[sample]):
            op = self.op(entry.child, entry.position)
            assert isinstance(op, TorchvisionOp)
            calls += op.calls(entry.drawn, sample, entry.size)
        return calls


class _Magnitudes:
    """Magnitudes of the operations that a sample can pick at one position.

    Args:
        tables: Per child (magnitudes, whether their sign is random). Magnitudes are (bins,) float64, or ``None``.
    """

    def __init__(self, tables: Sequence[tuple[Array | None, bool]]) -> None:
        self.has_magnitude = [table is not None for table, _ in tables]
        self._signed = np.array([signed for _, signed in tables])
        bins = max((len(table) for table, _ in tables if table is not None), default=1)
        self._values = np.zeros((len(tables), bins))
        for values, (table, _) in zip(self._values, tables, strict=True):
            values[:] = 0 if table is None else table

    def of(self, picks: Array, bins: Array, signs: Array) -> Array:
        """Magnitude per sample, (B,) float64.

        Args:
            picks: Index of the picked child, (B,).
            bins: Uniform numbers in [0, 1) that select the bin, (B,).
            signs: Uniform numbers in [0, 1) that select the sign, (B,).
        """
        count = self._values.shape[1]
        values = self._values.take(picks * count + (bins * count).astype(np.int64))
        return np.where(self._signed.take(picks) & (signs < 0.5), -values, values)


def _picks(policy: Any) -> list[tuple[Magnitude, ...]]:
    """Units that a policy picks from: tuples of operations that run in sequence, with their magnitudes."""
    if isinstance(policy, v2.AutoAugment):
        return [tuple(Magnitude(name, 10, index, p) for name, p, index in pair) for pair in policy._policies]
    bins = policy.num_magnitude_bins
    index = policy.magnitude if isinstance(policy, v2.RandAugment) else None
    return [(Magnitude(name, bins, index),) for name in policy._AUGMENTATION_SPACE]


def _child(magnitudes: tuple[Magnitude, ...], policy: nn.Module, units: Units) -> Child:
    names = [magnitude.operation for magnitude in magnitudes]
    members = [
        Member(magnitude.operation, OPERATIONS[magnitude.operation](magnitude.operation, policy, units), magnitude)
        for magnitude in magnitudes
        if magnitude.operation != "Identity"
    ]
    return Child(", ".join(names), tuple(members), is_container=False)


LOWERED: dict[type[nn.Module], type[TorchvisionOp]] = dict.fromkeys(
    (v2.RandAugment, v2.TrivialAugmentWide, v2.AutoAugment), TorchvisionPolicy
)
