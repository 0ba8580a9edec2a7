"""torchvision's RandAugment, TrivialAugmentWide and AutoAugment: each sample picks for itself, as in a dataset."""

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

_MOST_KEPT = 256


@dataclass(frozen=True, slots=True)
class Magnitude:
    """Magnitude of an operation: a bin of the table that torchvision makes for images of one size."""

    operation: str
    bins: int
    bin: int | None
    """Index of the bin; ``None``: each sample draws it."""
    p: float = 1.0
    """Probability that the operation runs once picked."""


class TorchvisionPolicy(TorchvisionOp, Policy):
    """A policy of torchvision's. Each sample picks its operations.

    Args:
        name: The transform's name in its container.
        transform: The user's transform.
        units: Units of its input images.
    """

    def __init__(self, name: str, transform: nn.Module, units: Units) -> None:
        super().__init__(name, transform, units)
        self.children = tuple(_child(each, transform, units) for each in _picks(transform))
        self.count = int(transform.num_ops) if isinstance(transform, v2.RandAugment) else 1  # type: ignore[call-overload]
        self._magnitudes: dict[Any, _Magnitudes] = {}
        """Magnitudes by position and image size. A RandAugment takes 49 µs of the host for a batch of 64, and 76 µs without."""

    def unsupported(self) -> str | None:
        """Why the transform is left to torchvision, or ``None``."""
        ops = (op for op in self.ops if isinstance(op, TorchvisionOp))
        return next((reason for op in ops if (reason := op.unsupported()) is not None), None)

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Pick operations and draw magnitudes: ``"layers"``, tuples of entries, run one after the other."""
        applies = self.draw_apply_mask(sampler, size.batch)
        # One of the children for each pick, uniformly with repetition.
        picks = (sampler.uniform(self.count) * len(self.children)).astype(np.int64)
        layers = (self._entries(row, position, applies, sampler, size) for row in picks for position in self.positions)
        return {"apply_mask": applies, "layers": tuple(layers)}

    def _entries(self, picks: Array, position: int, applies: Array, sampler: Sampler, size: Size) -> tuple[Entry, ...]:
        """One operation of every child, for the samples that picked it and that it runs for."""
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
        calls: list[Call] = []
        for entry in (entry for layer in drawn["layers"] for entry in layer if entry.where[sample]):
            op = self.op(entry.child, entry.position)
            assert isinstance(op, TorchvisionOp)
            calls += op.calls(entry.drawn, sample, entry.size)
        return calls


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


def _picks(policy: Any) -> list[tuple[Magnitude, ...]]:
    """The units that are picked: operations with their magnitudes, that run one after the other."""
    if isinstance(policy, v2.AutoAugment):
        return [tuple(Magnitude(name, 10, index, p) for name, p, index in pair) for pair in policy._policies]
    bins = policy.num_magnitude_bins
    index = policy.magnitude if isinstance(policy, v2.RandAugment) else None
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
