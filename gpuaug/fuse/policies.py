"""RandAugment, TrivialAugment and AutoAugment: what they pick, and with which magnitudes."""

from typing import Any

import numpy as np
import torch
from kornia import augmentation as K
from kornia.augmentation import auto
from kornia.augmentation.auto.operations import ops as operations
from kornia.augmentation.auto.operations.policy import PolicySequential
from torch import nn

from gpuaug.fuse.choices import Child, Choice, Member, Pick
from gpuaug.fuse.draws import Source
from gpuaug.fuse.ops import Array, Drawn, Op, Size

POLICIES: tuple[type[nn.Module], ...] = (auto.RandAugment, auto.TrivialAugment, auto.AutoAugment)
OPERATIONS: frozenset[type[nn.Module]] = frozenset(getattr(operations, name) for name in operations.__all__)
"""Kornia's wrappers of one augmentation and its magnitude, by exact type."""

_LEFT = {K.RandomEqualize: "equalize", K.RandomAutoContrast: "auto contrast"}


class Gate(Op):
    """A policy's augmentation that is not lowered, and draws nothing but its gate."""

    def refuses(self, size: Size) -> str | None:
        """Always."""
        return "no lowering for this type"

    def describe(self) -> str:
        """In a few words."""
        return _LEFT[type(self.module)]


class Policy(Choice):
    """A policy of Kornia's."""

    @property
    def count(self) -> int:
        """How many children are picked."""
        return int(getattr(self.module, "n", 1))

    def picks(self, source: Source) -> list[int]:
        """Different ones, all with the same chance."""
        numbers = np.array([float(np.ravel(source.number())[0]) for _ in self.children])
        return [int(index) for index in numbers.argsort()[: self.count]]

    def picks_of_samples(self, source: Source) -> Array:
        """The same for each sample."""
        return source.uniform(len(self.children)).argsort(axis=0)[: self.count]

    def draw_member(self, child: int, position: int, source: Source, size: Size) -> Drawn:
        """The augmentation's own draws, with the policy's magnitude in its place."""
        member = self.children[child].members[position]
        assert isinstance(member.op, Op)
        drawn = member.op.draw(source, size)
        operation = member.operation
        factor = operation._factor_name
        if factor is None:
            return drawn
        values = torch.from_numpy(np.array(drawn[factor], dtype=np.float32))
        magnitude = self._magnitude(operation, size)
        if magnitude is not None:
            values = torch.zeros_like(values) + magnitude
        change: Any = operation._magnitude_fn
        if operation.symmetric_megnitude:
            sign = np.where(source.uniform() > 0.5, np.float32(1), np.float32(-1))
            values = change.fn(values) * torch.from_numpy(sign)
        else:
            values = change(values)
        drawn[factor] = values.float().numpy()
        return drawn

    def _magnitude(self, operation: Any, size: Size) -> torch.Tensor | None:
        if not isinstance(self.module, auto.RandAugment):
            own: torch.Tensor | None = operation.magnitude
            return None if own is None else own.detach()
        if operation.magnitude_range is None:
            return None
        # In the order of Kornia's float32 operations, so that the numbers are the same.
        share = torch.tensor([self.module.m / 30])
        low, high = operation.magnitude_range
        share = 1 - share if operation._factor_name == "bits_factor" else share
        magnitude: torch.Tensor = share * float(high - low) + low
        side = {"translate_x": size.width, "translate_y": size.height}.get(operation._factor_name)
        return magnitude if side is None else magnitude * side

    @property
    def _longest(self) -> int:
        return max(len(child.members) for child in self.children)

    @property
    def most(self) -> int:
        """All operations of the longest children."""
        return self.count * self._longest

    @property
    def how_many(self) -> str:
        """A number."""
        return "one" if self.most == 1 else str(self.most) if self._longest == 1 else f"up to {self.most}"


def lower_policy(name: str, module: nn.Module, lowered: dict[type[nn.Module], type[Op]], pick: Pick) -> Policy | str:
    """The choice that a policy is, or why it is left to Kornia."""
    children = []
    for child_name, child in module.named_children():
        if type(child) is not PolicySequential:
            return f"{child_name} is a subclass of PolicySequential, which may do anything"
        members = []
        for operation_name, operation in child.named_children():
            found = _member(operation_name, operation, lowered)
            if isinstance(found, str):
                return f"{operation_name} in {child_name} is {found}"
            members.append(found)
        children.append(Child(child_name, tuple(members), is_container=True))
    return Policy(name, module, children, pick)


def _member(name: str, operation: Any, lowered: dict[type[nn.Module], type[Op]]) -> Member | str:
    if type(operation) not in OPERATIONS:
        return "none of Kornia's operations, and may do anything"
    inner = operation.op
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in (*vars(inner).values(), operation._magnitude)):
        return "on the GPU; leave the pipeline on the CPU, where it draws"
    if type(inner) in _LEFT:
        return Member(name, Gate(name, inner), operation)
    kind = lowered.get(type(inner))
    if kind is None:
        return f"made of {type(inner).__name__}, which has no lowering"
    cannot = getattr(kind, "cannot", None)
    reason = cannot(inner) if cannot is not None else None
    return f"left to Kornia by its {reason}" if reason else Member(name, kind(name, inner), operation)
