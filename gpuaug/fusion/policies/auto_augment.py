"""Kornia's RandAugment, TrivialAugment and AutoAugment: picks and magnitudes.

A *policy* picks some of its *children* at random, each of which runs one operation or several in sequence. An *operation* is
an augmentation with a *magnitude*, such as an angle. Policies are *lowered*: the operations run as ops in fused passes.
"""

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
from gpuaug.fusion.ops.kornia_private import foreign_generator
from gpuaug.fusion.ops.sampler import ArraySampler, Sampler, all_true
from gpuaug.fusion.policies.picking import Child, Entry, Member, Pick, Policy, kornia_params_error

POLICIES: tuple[type[nn.Module], ...] = (auto.RandAugment, auto.TrivialAugment, auto.AutoAugment)
"""Kornia's classes of policies."""
OPERATIONS: frozenset[type[nn.Module]] = frozenset(getattr(operations, name) for name in operations.__all__)
"""Kornia's wrapper classes of operations. A wrapper holds one augmentation and its magnitude."""

_CACHE_SIZE = 256
"""Maximum number of cached magnitudes."""


class KorniaPolicy(Policy):
    """Op of one of Kornia's policies. A sample picks children without replacement.

    Args:
        name: Name of the policy in its container.
        module: Policy of the user.
        children: Children of ``module``, with the ops of their operations.
        pick: ``"batch"`` to share the picks among all samples of a batch; ``"sample"`` to pick per sample.
    """

    def __init__(self, name: str, module: nn.Module, children: Sequence[Child], pick: Pick) -> None:
        super().__init__(name, module)
        self.children = tuple(children)
        self.count = int(module.n) if isinstance(module, auto.RandAugment) else 1
        self._pick = pick
        self._wrappers = [member.operation for child in children for member in child.members]
        self._numbers_per_op = max((_numbers_drawn(op) for op in self.ops if isinstance(op, Op)), default=0)
        """Largest number of uniform numbers that an op draws per sample."""
        self._magnitudes: dict[Any, Array] = {}
        """Cache of ``_magnitude``."""

    @property
    def settings_of_draw(self) -> tuple[Any, ...]:
        """Magnitude setting of RandAugment, or the fixed magnitude of every operation."""
        if isinstance(self.module, auto.RandAugment):
            return (self.module.m,)
        return tuple(_fixed_magnitude(wrapper) for wrapper in self._wrappers)

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Pick children, and draw the parameters of their operations.

        Returns:
            ``"layers"``, as ``Policy`` describes; with ``pick="batch"`` also ``"picks"``, child indices, (picks, batches).
        """
        draws: OpDraws = {"apply_mask": all_true(size.batch)}
        if self._pick == "batch":
            picks = draws["picks"] = sampler.permutation(len(self.children)).T[: self.count]
            picks_of_samples = np.repeat(picks, sampler.samples_per_batch, axis=1)
        else:
            picks = picks_of_samples = _distinct_picks(len(self.children), sampler.uniform(self.count))
        layers = []
        for row, row_of_samples in zip(picks, picks_of_samples, strict=True):
            picked_children = np.flatnonzero(np.bincount(row, minlength=len(self.children)))
            for position in self.positions:
                # A sample runs one operation of a layer, so all operations of the layer use the same uniform numbers.
                numbers = sampler.uniform(1 + self._numbers_per_op)
                children = sorted(self.always_drawn[position].union(picked_children.tolist()))
                present = [index for index in children if position < len(self.children[index].members)]
                layers.append(tuple(self._entry(index, position, numbers, size, row_of_samples) for index in present))
        return {**draws, "layers": tuple(layers)}

    def _entry(self, index: int, position: int, numbers: Array, size: Size, picks: Array) -> Entry:
        """Return the draws of one operation, and the mask of the samples that picked it.

        Args:
            index: Index of the child.
            position: Index of the operation in the child.
            numbers: Uniform numbers, (1 + n, B): one for the sign of the magnitude, then n for the parameters of the op.
            size: Size of the input images.
            picks: Index of the picked child per sample, (B,).
        """
        wrapper = self.children[index].members[position].operation
        draws = self.op(index, position).draw(ArraySampler(numbers[1:]), size)
        factor = wrapper._factor_name
        if factor is not None:
            values = self._magnitude(wrapper, size)
            if values is None:
                values = _parameters_for(wrapper, torch.from_numpy(draws[factor]))
            draws[factor] = np.where((numbers[0] <= 0.5) & wrapper.symmetric_megnitude, -values, values)
        return Entry(index, position, draws, size, picks == index)

    def _magnitude(self, wrapper: Any, size: Size) -> Array | None:
        """Return the magnitude that all samples share, (1,) float32; ``None`` if the op draws a magnitude per sample."""
        is_rand_augment = isinstance(self.module, auto.RandAugment)
        setting: Any = self.module.m if is_rand_augment else _fixed_magnitude(wrapper)
        if setting is None:
            return None
        key = wrapper, setting, size.height, size.width
        if key not in self._magnitudes:
            if len(self._magnitudes) >= _CACHE_SIZE:
                self._magnitudes.clear()
            values = _rand_augment_magnitude(wrapper, setting, size) if is_rand_augment else wrapper.magnitude.detach()
            self._magnitudes[key] = _parameters_for(wrapper, values)
        return self._magnitudes[key]

    def unsupported_size(self, size: Size) -> str | None:
        """Reason why an operation cannot be fused for images of ``size``, or ``None``.

        Raises:
            ArgumentError: If an operation cannot be fused and ``pick="sample"``, because Kornia cannot pick per sample.
        """
        reason = super().unsupported_size(size)
        if reason is not None and self._pick == "sample":
            shape = "x".join(map(str, (size.channels, size.height, size.width)))
            raise ArgumentError(
                f"images must suit all operations of {self.name} with pick='sample', got images of {shape}: {reason}. "
                f"Leave that operation out: {type(self.module).__name__}(…, policy=[…])."
            )
        return reason

    def params(self, draws: OpDraws, size: Size) -> Any:
        """Draws in the format of the ``params=`` argument of Kornia's module.

        Raises:
            ArgumentError: If ``pick="sample"``.
        """
        if self._pick == "sample":
            raise kornia_params_error(self.name)
        layers = iter(draws["layers"])
        items = []
        for index in draws["picks"][:, 0]:
            entries = [entry for _ in self.positions for entry in next(layers) if entry.child == index]
            child = self.children[index]
            data = [self.op(index, entry.position).params(entry.draws, entry.size) for entry in entries]
            names = [member.name for member in child.members]
            items.append(ParamItem(child.name, [ParamItem(*item) for item in zip(names, data, strict=True)]))
        return items


def lower_policy(name: str, module: nn.Module, lowered: dict[type[nn.Module], type[Op]], pick: Pick) -> KorniaPolicy | str:
    """Create the op of a policy, or return the reason why Kornia runs the policy.

    Args:
        name: Name of the policy in its container.
        module: Policy of the user.
        lowered: Class of the op for each class of Kornia's augmentations.
        pick: ``"batch"`` to share the picks among all samples of a batch; ``"sample"`` to pick per sample.
    """
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
    """Create the op of one operation, or return the reason why Kornia runs the policy, without the name of the operation."""
    wrapper = nearest_class(operation, OPERATIONS)
    if wrapper is None:
        return "not an operation of Kornia"
    reason = difference(operation, wrapper)
    if reason is not None:
        return reason
    function = operation._magnitude_fn
    if not getattr(function, "fn", function).__module__.startswith("kornia."):
        return "an operation whose magnitude function is not Kornia's"
    inner = operation.op
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in (*vars(inner).values(), operation._magnitude)):
        return "on the GPU; keep the pipeline on the CPU, where gpuaug draws its random parameters"
    augmentation = _augmentation(wrapper)
    if class_of(inner, (augmentation,)) is None or foreign_generator(inner, augmentation) is not None:
        return f"made of {type(inner).__name__}, which is not Kornia's augmentation for this operation"
    if operation.op.same_on_batch or operation.op.p_batch < 1:
        return "set to same_on_batch=True or p_batch below 1"
    op = lowered[augmentation]
    reason = op.unsupported_module(inner)
    return f"not lowered: {reason}" if reason else Member(name, op(name, inner), operation)


@functools.cache
def _augmentation(wrapper: type) -> type[nn.Module]:
    """Class of the augmentation that a wrapper class creates."""
    with initial_settings():
        inner: Any = wrapper().op
    return type(inner)


def _numbers_drawn(op: Op) -> int:
    """Number of uniform numbers that an op draws per sample."""
    sampler = Sampler((0,), 1, separate_generators=True)
    op.draw(sampler, Size(1, 3, 8, 8))
    return sampler.columns_drawn


def _distinct_picks(children: int, numbers: Array) -> Array:
    """Pick children without replacement: indices, (picks, B) int64, from uniform numbers in [0, 1) of the same shape.

    ``children``: number of children.
    """
    picks = np.empty(numbers.shape, dtype=np.int64)
    for count, row in enumerate(numbers):
        # First an index among the remaining children. Each earlier pick that is not above the index then increases it by 1.
        pick = (row * (children - count)).astype(np.int64)
        for earlier_pick in np.sort(picks[:count], axis=0):
            pick += pick >= earlier_pick
        picks[count] = pick
    return picks


def _fixed_magnitude(wrapper: Any) -> Any:
    """Magnitude that the user has set for an operation, or ``None``. The user may change it between two calls."""
    magnitude = wrapper._magnitude
    return None if magnitude is None else magnitude.item()


def _rand_augment_magnitude(wrapper: Any, m: float, size: Size) -> torch.Tensor:
    """Magnitude of an operation under RandAugment with setting ``m``, (1,) float32."""
    # The same float32 operations in the same order as in Kornia, for equal results.
    fraction = host_tensor([m / 30], np.float32)
    low, high = wrapper.magnitude_range
    fraction = 1 - fraction if wrapper._factor_name == "bits_factor" else fraction
    side = {"translate_x": size.width, "translate_y": size.height}.get(wrapper._factor_name, 1)
    magnitude: torch.Tensor = (fraction * float(high - low) + low) * side
    return magnitude


def _parameters_for(wrapper: Any, values: torch.Tensor) -> Array:
    """Convert magnitudes to parameters of the augmentation, without the random sign, by the operation's magnitude function."""
    function = wrapper._magnitude_fn
    parameters: Array = (function.fn if wrapper.symmetric_megnitude else function)(values).float().numpy()
    return parameters
