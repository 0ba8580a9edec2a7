"""torchvision's RandAugment, TrivialAugmentWide and AutoAugment: each sample picks for itself, as in a dataset."""

from collections.abc import Iterator
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
from gpuaug.fusion.policies.choice import Child, Choice, Entry, Member

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


class TorchvisionPolicy(TorchvisionOp, Choice):
    """A policy of torchvision's.

    Args:
        name: The transform's name in its container.
        transform: The user's transform.
        units: Units of its input images.
    """

    def __init__(self, name: str, transform: nn.Module, units: Units) -> None:
        Choice.__init__(self, name, transform, [_child(each, transform, units) for each in _picks(transform)], "sample")
        self.units = units
        self._tables: dict[Any, Array | None] = {}

    def unsupported(self) -> str | None:
        """Why the transform is left to torchvision, or ``None``."""
        reasons = (op.unsupported() for op in self.ops if isinstance(op, TorchvisionOp))
        return next((reason for reason in reasons if reason is not None), None)

    def unsupported_size(self, size: Size) -> str | None:
        """All operations may be picked."""
        reasons = (op.unsupported_size(size) for op in self.ops if isinstance(op, TorchvisionOp))
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def most(self) -> int:
        """The number of picks times the largest number of operations in one."""
        return int(getattr(self.module, "num_ops", 1)) * max(len(child.members) for child in self.children)

    @property
    def how_many(self) -> str:
        """The number of picks, in words."""
        return "one" if self.most == 1 else f"up to {self.most}" if type(self.module) is v2.AutoAugment else str(self.most)

    def picks(self, sampler: Sampler) -> list[int]:
        """Not used: each sample picks."""
        raise NotImplementedError

    def picks_of_samples(self, sampler: Sampler) -> Array:
        """Indices of children, (picks, B), uniformly with repetition."""
        shares = sampler.uniform(int(getattr(self.module, "num_ops", 1)))
        picks: Array = (shares * len(self.children)).astype(np.int64)
        return picks

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Pick operations and draw magnitudes: ``"layers"``, tuples of entries, run one after the other."""
        applies = self.draw_apply_mask(sampler, size.batch)
        layers: list[tuple[Entry, ...]] = []
        for picks in self.picks_of_samples(sampler):
            layers += self._layers_of(picks, applies, sampler, size)
        return {"apply_mask": applies, "layers": tuple(layers), "end": size}

    def _layers_of(self, picks: Array, applies: Array, sampler: Sampler, size: Size) -> Iterator[tuple[Entry, ...]]:
        """Layers of one pick of every sample, one operation after the other."""
        picked = [(index, picks == index) for index in np.unique(picks).tolist()]
        for position in range(max(len(child.members) for child in self.children)):
            numbers = sampler.uniform(3)
            layer = []
            for index, where in picked:
                if position < len(self.children[index].members):
                    member = self.children[index].members[position]
                    mask = applies & where & (numbers[0] < member.operation.p)
                    drawn = {**self._magnitudes(member, numbers[1:], size), "apply_mask": mask}
                    layer.append(Entry(index, position, drawn, size, mask))
            yield tuple(layer)

    def _magnitudes(self, member: Member, numbers: Array, size: Size) -> OpDraws:
        """A magnitude of the operation for every sample, from two uniform numbers: bin and sign."""
        magnitude: Magnitude = member.operation
        table, signed = self._table(magnitude, size)
        if table is None:
            return {}
        if magnitude.bin is None:
            values = table[(numbers[0] * len(table)).astype(np.int64)]
        else:
            values = np.full(size.batch, table[magnitude.bin])
        if signed:
            values = np.where(numbers[1] < 0.5, -values, values)
        return member.op.drawn(values) if isinstance(member.op, Adjust) else {"magnitude": values}

    def _table(self, magnitude: Magnitude, size: Size) -> tuple[Array | None, bool]:
        """Magnitudes of an operation in torchvision's table, (bins,) float64 from float32; True if their sign is random."""
        made, signed = self.module._AUGMENTATION_SPACE[magnitude.operation]  # type: ignore[union-attr, index]
        key = magnitude.operation, magnitude.bins, size.height, size.width
        if key not in self._tables:
            if len(self._tables) >= _MOST_KEPT:
                self._tables.clear()
            with initial_settings():
                found = made(magnitude.bins, size.height, size.width)
            self._tables[key] = None if found is None else found.double().numpy()
        return self._tables[key], signed

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The operations that a sample picked, in order."""
        made: list[Call] = []
        for entry in (entry for layer in drawn["layers"] for entry in layer if entry.apply_mask[sample]):
            op = self._op(entry)
            assert isinstance(op, TorchvisionOp)
            made += op.calls(entry.drawn, sample, entry.size)
        return made


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
