"""Kornia's RandAugment, TrivialAugment and AutoAugment: picks and magnitudes."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from kornia.augmentation import auto
from kornia.augmentation.auto.operations import ops as operations
from kornia.augmentation.auto.operations.policy import PolicySequential
from kornia.augmentation.container.params import ParamItem
from torch import nn

from gpuaug.core.errors import ArgumentError
from gpuaug.core.settings import initial_settings
from gpuaug.core.torchvision_types import class_of, difference, nearest_class
from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size, host_tensor
from gpuaug.fusion.ops.sampler import GivenUniforms, Sampler, always, foreign_generator
from gpuaug.fusion.policies.picking import Child, Entry, Member, Pick, Policy, no_form_in_kornia

POLICIES: tuple[type[nn.Module], ...] = (auto.RandAugment, auto.TrivialAugment, auto.AutoAugment)
OPERATIONS: frozenset[type[nn.Module]] = frozenset(getattr(operations, name) for name in operations.__all__)
"""Kornia's wrapper classes, each of which holds one augmentation and its magnitude."""

_CACHE_SIZE = 256
"""Largest number of cached magnitudes."""


class KorniaPolicy(Policy):
    """Kornia's RandAugment, TrivialAugment or AutoAugment. Picks are without replacement.

    Args:
        name: Name of the policy in its container.
        module: Policy of the user.
        children: Sub-policies of ``module``.
        pick: ``"batch"`` to share the picks among all samples of a batch; ``"sample"`` to pick per sample.
    """

    def __init__(self, name: str, module: nn.Module, children: Sequence[Child], pick: Pick) -> None:
        super().__init__(name, module)
        self.children = tuple(children)
        self.count = int(module.n) if isinstance(module, auto.RandAugment) else 1
        self._pick = pick
        self._wrappers = [member.operation for child in children for member in child.members]
        self._numbers = max((_numbers_drawn(op) for op in self.ops if isinstance(op, Op)), default=0)
        self._magnitudes: dict[Any, Array] = {}

    @property
    def read_at_draw(self) -> tuple[Any, ...]:
        """Magnitude setting of RandAugment, or the fixed magnitude of every operation."""
        if isinstance(self.module, auto.RandAugment):
            return (self.module.m,)
        return tuple(_fixed_magnitude(wrapper) for wrapper in self._wrappers)

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Pick children and draw for them: ``"layers"``; with ``pick="batch"`` also ``"picks"``, (picks, batches)."""
        drawn: OpDraws = {"apply_mask": always(size.batch)}
        if self._pick == "batch":
            picks = drawn["picks"] = sampler.permutation(len(self.children)).T[: self.count]
            picks_of_samples = np.repeat(picks, sampler.each, axis=1)
        else:
            picks = picks_of_samples = _distinct(len(self.children), sampler.uniform(self.count))
        layers = []
        for row, row_of_samples in zip(picks, picks_of_samples, strict=True):
            picked = np.flatnonzero(np.bincount(row, minlength=len(self.children)))
            for position in self.positions:
                # A sample runs only one operation of a layer, so all operations share the same uniform numbers.
                numbers = sampler.uniform(1 + self._numbers)
                children = sorted(self.always_drawn[position].union(picked.tolist()))
                drawn_for = [index for index in children if position < len(self.children[index].members)]
                layers.append(tuple(self._entry(index, position, numbers, size, row_of_samples) for index in drawn_for))
        return {**drawn, "layers": tuple(layers)}

    def _entry(self, index: int, position: int, numbers: Array, size: Size, picks: Array) -> Entry:
        """Entry of one operation.

        Args:
            index: Index of the child.
            position: Position of the operation in the child.
            numbers: Uniform numbers, (1 + n, B): the sign of the magnitude, then the parameters of the op.
            size: Size of the input images.
            picks: Index of the picked child per sample, (B,).
        """
        wrapper = self.children[index].members[position].operation
        drawn = self.op(index, position).draw(GivenUniforms(numbers[1:]), size)
        factor = wrapper._factor_name
        if factor is not None:
            values = self._magnitude(wrapper, size)
            if values is None:
                values = _mapped(wrapper, torch.from_numpy(drawn[factor]))
            drawn[factor] = np.where((numbers[0] <= 0.5) & wrapper.symmetric_megnitude, -values, values)
        return Entry(index, position, drawn, size, picks == index)

    def _magnitude(self, wrapper: Any, size: Size) -> Array | None:
        """Magnitude shared by all samples of an operation, (1,) float32; ``None`` if it is drawn per sample."""
        rand = isinstance(self.module, auto.RandAugment)
        setting: Any = self.module.m if rand else _fixed_magnitude(wrapper)
        if setting is None:
            return None
        key = wrapper, setting, size.height, size.width
        if key not in self._magnitudes:
            if len(self._magnitudes) >= _CACHE_SIZE:
                self._magnitudes.clear()
            values = _rand_augment_magnitude(wrapper, setting, size) if rand else wrapper.magnitude.detach()
            self._magnitudes[key] = _mapped(wrapper, values)
        return self._magnitudes[key]

    def unsupported_size(self, size: Size) -> str | None:
        """Reason why an operation cannot be fused for images of ``size``, or ``None``.

        Raises:
            ArgumentError: If an operation cannot be fused and ``pick="sample"``, which Kornia does not support.
        """
        reason = super().unsupported_size(size)
        if reason is not None and self._pick == "sample":
            shape = "x".join(map(str, (size.channels, size.height, size.width)))
            raise ArgumentError(
                f"images must suit all operations of {self.name} with pick='sample', got images of {shape}: {reason}. "
                f"Leave that operation out: {type(self.module).__name__}(…, policy=[…])."
            )
        return reason

    def params(self, drawn: OpDraws, size: Size) -> Any:
        """Draws in the form of the ``params=`` argument of Kornia's module.

        Raises:
            ArgumentError: If ``pick="sample"``.
        """
        if self._pick == "sample":
            raise no_form_in_kornia(self.name)
        layers = iter(drawn["layers"])
        items = []
        for index in drawn["picks"][:, 0]:
            entries = [entry for _ in self.positions for entry in next(layers) if entry.child == index]
            child = self.children[index]
            data = [self.op(index, entry.position).params(entry.drawn, entry.size) for entry in entries]
            names = [member.name for member in child.members]
            items.append(ParamItem(child.name, [ParamItem(*item) for item in zip(names, data, strict=True)]))
        return items


def lower_policy(name: str, module: nn.Module, lowered: dict[type[nn.Module], type[Op]], pick: Pick) -> KorniaPolicy | str:
    """Lower a policy, or return the reason why Kornia runs it."""
    children = []
    for child_name, child in module.named_children():
        if class_of(child, (PolicySequential,)) is None:
            return f"{child_name} is {difference(child, PolicySequential)}"
        members = []
        for operation_name, operation in child.named_children():
            member = _member(operation_name, operation, lowered)
            if isinstance(member, str):
                return f"{operation_name} in {child_name} is {member}"
            members.append(member)
        children.append(Child(child_name, tuple(members), is_container=True))
    return KorniaPolicy(name, module, children, pick)


def _member(name: str, operation: Any, lowered: dict[type[nn.Module], type[Op]]) -> Member | str:
    wrapper = nearest_class(operation, OPERATIONS)
    if wrapper is None:
        return "not an operation of Kornia"
    changed = difference(operation, wrapper)
    if changed is not None:
        return changed
    function = operation._magnitude_fn
    if not getattr(function, "fn", function).__module__.startswith("kornia."):
        return "one with a function of magnitudes that is not Kornia's"
    inner = operation.op
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in (*vars(inner).values(), operation._magnitude)):
        return "on the GPU; leave the pipeline on the CPU, where it draws"
    augmentation = _augmentation(wrapper)
    if class_of(inner, (augmentation,)) is None or foreign_generator(inner, augmentation) is not None:
        return f"made of {type(inner).__name__}, which is not Kornia's augmentation for it"
    if operation.op.same_on_batch or operation.op.p_batch < 1:
        return "set to same_on_batch=True or p_batch below 1"
    op = lowered[augmentation]
    reason = op.unsupported_module(inner)
    return f"left to Kornia by its {reason}" if reason else Member(name, op(name, inner), operation)


@functools.cache
def _augmentation(wrapper: type) -> type[nn.Module]:
    """Type of the augmentation that a wrapper class creates."""
    with initial_settings():
        inner: Any = wrapper().op
    return type(inner)


def _numbers_drawn(op: Op) -> int:
    """Number of uniform numbers that an op draws per sample."""
    sampler = Sampler((0,), 1, apart=True)
    op.draw(sampler, Size(1, 3, 8, 8))
    return sampler.used


def _distinct(children: int, numbers: Array) -> Array:
    """Indices of distinct children per sample, (picks, B) int64, from uniform numbers in [0, 1) of the same shape."""
    picks = np.empty(numbers.shape, dtype=np.int64)
    for count, row in enumerate(numbers):
        # Index among the remaining children. Each earlier pick shifts the indices from its own on by one.
        pick = (row * (children - count)).astype(np.int64)
        for taken in np.sort(picks[:count], axis=0):
            pick += pick >= taken
        picks[count] = pick
    return picks


def _fixed_magnitude(wrapper: Any) -> Any:
    """Fixed magnitude of an operation, or ``None``. The user may set it at any time."""
    magnitude = wrapper._magnitude
    return None if magnitude is None else magnitude.item()


def _rand_augment_magnitude(wrapper: Any, m: float, size: Size) -> torch.Tensor:
    """Magnitude of an operation under RandAugment with setting ``m``, (1,) float32."""
    # Same order of float32 operations as in Kornia, for equal results.
    share = host_tensor([m / 30], np.float32)
    low, high = wrapper.magnitude_range
    share = 1 - share if wrapper._factor_name == "bits_factor" else share
    side = {"translate_x": size.width, "translate_y": size.height}.get(wrapper._factor_name, 1)
    magnitude: torch.Tensor = (share * float(high - low) + low) * side
    return magnitude


def _mapped(wrapper: Any, values: torch.Tensor) -> Array:
    """Magnitudes mapped by the operation's magnitude function, before a random sign."""
    function = wrapper._magnitude_fn
    mapped: Array = (function.fn if wrapper.symmetric_megnitude else function)(values).float().numpy()
    return mapped
