"""RandAugment, TrivialAugment and AutoAugment: their picks and magnitudes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from kornia.augmentation import auto
from kornia.augmentation.auto.operations import ops as operations
from kornia.augmentation.auto.operations.policy import PolicySequential
from torch import nn

from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size, host_tensor
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.policies.choice import Child, Choice, Member, Pick

POLICIES: tuple[type[nn.Module], ...] = (auto.RandAugment, auto.TrivialAugment, auto.AutoAugment)
OPERATIONS: frozenset[type[nn.Module]] = frozenset(getattr(operations, name) for name in operations.__all__)
"""Kornia's wrappers of one augmentation and its magnitude, by exact type."""


class Policy(Choice):
    """A policy of Kornia's."""

    def __init__(self, name: str, module: nn.Module, children: Sequence[Child], pick: Pick) -> None:
        super().__init__(name, module, children, pick)
        self._sets: dict[Any, Array] = {}

    @property
    def count(self) -> int:
        """Number of children that are picked."""
        return int(getattr(self.module, "n", 1))

    def picks(self, sampler: Sampler) -> list[int]:
        """Indices of distinct children, uniformly."""
        numbers = np.array([self.number(sampler) for _ in self.children])
        return [int(index) for index in numbers.argsort()[: self.count]]

    def picks_of_samples(self, sampler: Sampler) -> Array:
        """Indices of distinct children, uniformly, for each sample."""
        return sampler.uniform(len(self.children)).argsort(axis=0)[: self.count]

    def draw_member(self, child: int, position: int, sampler: Sampler, size: Size) -> OpDraws:
        """The draws of the augmentation, with the magnitude drawn by the policy."""
        member = self.children[child].members[position]
        assert isinstance(member.op, Op)
        drawn = member.op.draw(sampler, size)
        operation = member.operation
        factor = operation._factor_name
        if factor is None:
            return drawn
        rand = isinstance(self.module, auto.RandAugment)
        values = self._set(operation, size) if rand else self._moved(operation, drawn[factor])
        if operation.symmetric_megnitude:
            values = np.where(sampler.uniform() > 0.5, values, -values)
        drawn[factor] = values if len(values) == size.batch else np.repeat(values, size.batch)
        return drawn

    def _moved(self, operation: Any, values: Array) -> Array:
        """The drawn or the operation's fixed magnitude, mapped by the operation's function."""
        own = operation.magnitude
        made = torch.from_numpy(values) if own is None else own.detach().expand(len(values))
        return _mapped(operation, made)

    def _set(self, operation: Any, size: Size) -> Array:
        """RandAugment's magnitude of an operation, (1,)."""
        key = operation, self.module.m, size.width, size.height
        found = self._sets.get(key)
        if found is None:
            # In the order of Kornia's float32 operations, so that the numbers are the same.
            share = host_tensor([self.module.m / 30], np.float32)  # type: ignore[operator]
            low, high = operation.magnitude_range
            share = 1 - share if operation._factor_name == "bits_factor" else share
            magnitude = share * float(high - low) + low
            side = {"translate_x": size.width, "translate_y": size.height}.get(operation._factor_name, 1)
            if len(self._sets) > 256:
                self._sets.clear()
            found = self._sets[key] = _mapped(operation, magnitude * side)
        return found

    @property
    def _longest(self) -> int:
        return max(len(child.members) for child in self.children)

    @property
    def most(self) -> int:
        """Largest number of operations in the picked children."""
        return self.count * self._longest

    @property
    def how_many(self) -> str:
        """The number of picks, in words."""
        return "one" if self.most == 1 else str(self.most) if self._longest == 1 else f"up to {self.most}"


def lower_policy(name: str, module: nn.Module, lowered: dict[type[nn.Module], type[Op]], pick: Pick) -> Policy | str:
    """Lower a policy, or return the reason why it is left to Kornia."""
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


def _mapped(operation: Any, values: torch.Tensor) -> Array:
    """Magnitudes mapped by the operation's function, without their sign."""
    change = operation._magnitude_fn
    made: Array = (change.fn if operation.symmetric_megnitude else change)(values).float().numpy()
    return made


def _member(name: str, operation: Any, lowered: dict[type[nn.Module], type[Op]]) -> Member | str:
    if type(operation) not in OPERATIONS:
        return "none of Kornia's operations, and may do anything"
    inner = operation.op
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in (*vars(inner).values(), operation._magnitude)):
        return "on the GPU; leave the pipeline on the CPU, where it draws"
    kind = lowered.get(type(inner))
    if kind is None:
        return f"made of {type(inner).__name__}, which has no lowering"
    reason = kind.unsupported_module(inner)
    return f"left to Kornia by its {reason}" if reason else Member(name, kind(name, inner), operation)
