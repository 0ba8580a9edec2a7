"""torchvision's RandAugment, TrivialAugmentWide and AutoAugment, with independent picks per sample.

A *policy* picks some of its *children* at random, each of which runs one operation or several in sequence. An *operation* is
an augmentation with a *magnitude*, such as an angle. torchvision divides the range of each magnitude into *bins*. Policies are
*lowered*: the operations run as ops in fused passes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from torchvision.transforms import v2

from gpuaug.core.settings import initial_settings
from gpuaug.fusion.ops.base import Array, OpDraws, Size
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp, Units
from gpuaug.fusion.ops.torchvision.operations import OPERATIONS, Adjustment
from gpuaug.fusion.policies.picking import Child, Entry, Member, Policy

_CACHE_SIZE = 256
"""Maximum number of cached tables of magnitudes."""


@dataclass(frozen=True, slots=True)
class PolicyOperation:
    """Operation of a policy, and the setting for its magnitude."""

    name: str
    """Name of the operation in torchvision."""
    bins: int
    """Number of bins of the magnitude."""
    bin: int | None
    """Index of the bin of all samples; ``None`` to draw a bin per sample."""
    p: float = 1.0
    """Probability that a sample that picked the operation runs it."""


class TorchvisionPolicy(TorchvisionOp, Policy):
    """Op of one of torchvision's policies.

    Args:
        name: Name of the transform in its container.
        transform: Transform of the user.
        units: dtype whose value range the transform's settings refer to.
    """

    def __init__(self, name: str, transform: nn.Module, units: Units) -> None:
        super().__init__(name, transform, units)
        self.children = tuple(_child(operations, transform, units) for operations in _operations_of_children(transform))
        self.count = max(0, int(transform.num_ops)) if isinstance(transform, v2.RandAugment) else 1  # type: ignore[call-overload]
        self._magnitudes: dict[Any, _Magnitudes] = {}
        """Cache of ``_magnitudes_at``. A draw of RandAugment for 64 images takes 49 µs with the cache, and 76 µs without."""

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        operations: Iterator[PolicyOperation] = (member.operation for child in self.children for member in child.members)
        if any(operation.bin is not None and not -operation.bins <= operation.bin < operation.bins for operation in operations):
            return "the magnitude of an operation is not one of its bins"
        ops = (op for op in self.ops if isinstance(op, TorchvisionOp))
        return next((reason for op in ops if (reason := op.unsupported()) is not None), None)

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Pick children, and draw the magnitudes of their operations.

        Returns:
            ``"layers"``, as ``Policy`` describes.
        """
        applies = self.draw_apply_mask(sampler, size.batch)
        # Indices of children, (picks, B). A sample may pick a child twice.
        picks = (sampler.uniform(self.count) * len(self.children)).astype(np.int64)
        layers = (self._entries(row, position, applies, sampler, size) for row in picks for position in self.positions)
        return {"apply_mask": applies, "layers": tuple(layers)}

    def _entries(self, picks: Array, position: int, applies: Array, sampler: Sampler, size: Size) -> tuple[Entry, ...]:
        """Return one layer: per child, the draws of its operation at ``position``, and the mask of the samples that run it.

        Args:
            picks: Index of the child that each sample picked, (B,).
            position: Index of the operation in the child.
            applies: Mask of the samples that the policy is applied to, (B,) bool.
            sampler: Source of random numbers.
            size: Size of the images.
        """
        uniform_p, *uniforms = sampler.uniform(3)
        layer = []
        magnitudes = self._magnitudes_at(position, size)
        values = magnitudes.select(picks, *uniforms)
        for index, child in enumerate(self.children):
            if position < len(child.members):
                member = child.members[position]
                mask = applies & (picks == index)
                if member.operation.p < 1:
                    mask &= uniform_p < member.operation.p
                draws: OpDraws = {"magnitude": values} if magnitudes.has_magnitude[index] else {}
                if isinstance(member.op, Adjustment):
                    draws["adjustment"] = member.op.adjustment
                layer.append(Entry(index, position, {**draws, "apply_mask": mask}, size, mask))
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
        """Return (magnitudes of an operation from torchvision's table, whether the sign is random).

        The magnitudes are those of the bins that can be drawn, (bins,) float64; ``None`` for an operation without a magnitude.
        """
        if member is None:
            return None, False
        operation: PolicyOperation = member.operation
        magnitudes_of, signed = self.module._AUGMENTATION_SPACE[operation.name]  # type: ignore[union-attr, index]
        with initial_settings():
            magnitudes = magnitudes_of(operation.bins, size.height, size.width)
        if magnitudes is None:
            return None, signed
        table: Array = magnitudes.double().numpy()
        return table if operation.bin is None else table[[operation.bin]], signed

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """Functional calls of the operations that run for ``sample``, in order."""
        calls: list[Call] = []
        for entry in (entry for layer in draws["layers"] for entry in layer if entry.mask[sample]):
            op = self.op(entry.child, entry.position)
            assert isinstance(op, TorchvisionOp)
            calls += op.calls(entry.draws, sample, entry.size)
        return calls


class _Magnitudes:
    """Magnitudes of all operations of one layer, from which a sample draws the magnitude of the operation that it picked.

    Args:
        tables: Result of ``TorchvisionPolicy._table`` for each child.
    """

    def __init__(self, tables: Sequence[tuple[Array | None, bool]]) -> None:
        self.has_magnitude = [table is not None for table, _ in tables]
        self._signed = np.array([signed for _, signed in tables])
        bins = max((len(table) for table, _ in tables if table is not None), default=1)
        self._values = np.zeros((len(tables), bins))
        for values, (table, _) in zip(self._values, tables, strict=True):
            values[:] = 0 if table is None else table

    def select(self, picks: Array, bins: Array, signs: Array) -> Array:
        """Return the signed magnitude of each sample, (B,) float64.

        Args:
            picks: Index of the picked child, (B,).
            bins: Uniform numbers in [0, 1) that select the bin, (B,).
            signs: Uniform numbers in [0, 1) that select the sign, (B,).
        """
        count = self._values.shape[1]
        values = self._values.take(picks * count + (bins * count).astype(np.int64))
        return np.where(self._signed.take(picks) & (signs < 0.5), -values, values)


def _operations_of_children(policy: Any) -> list[tuple[PolicyOperation, ...]]:
    """Operations of each child of a policy, in the order in which they run."""
    if isinstance(policy, v2.AutoAugment):
        return [tuple(PolicyOperation(name, 10, index, p) for name, p, index in pair) for pair in policy._policies]
    bins = policy.num_magnitude_bins
    index = policy.magnitude if isinstance(policy, v2.RandAugment) else None
    return [(PolicyOperation(name, bins, index),) for name in policy._AUGMENTATION_SPACE]


def _child(operations: tuple[PolicyOperation, ...], policy: nn.Module, units: Units) -> Child:
    """Create a child with an op for each operation except the identity."""
    members = [
        Member(operation.name, OPERATIONS[operation.name](operation.name, policy, units), operation)
        for operation in operations
        if operation.name != "Identity"
    ]
    return Child(", ".join(operation.name for operation in operations), tuple(members), is_container=False)


LOWERED: dict[type[nn.Module], type[TorchvisionOp]] = dict.fromkeys(
    (v2.RandAugment, v2.TrivialAugmentWide, v2.AutoAugment), TorchvisionPolicy
)
