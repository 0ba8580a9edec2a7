"""Kornia's RandAugment, TrivialAugment and AutoAugment: picks and magnitudes.

A *policy* picks one or several of its *choices* at random. A choice runs one *operation* or several in sequence. An operation
is an augmentation with a *magnitude*, such as an angle, in a *wrapper* of Kornia. Policies are *lowered*: the operations run as
ops in fused passes. In a *round*, each sample picks one choice; RandAugment has several rounds. Layer k consists of the k-th
operation of each choice, so that a sample runs at most one operation of a layer per round. A *sample* is an image or a clip.
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
from gpuaug.fusion.ops.sampler import ArraySampler, Sampler
from gpuaug.fusion.policies.picking import Choice, Pick, Policy

POLICIES: tuple[type[nn.Module], ...] = (auto.RandAugment, auto.TrivialAugment, auto.AutoAugment)
"""Kornia's classes of policies."""
OPERATIONS: frozenset[type[nn.Module]] = frozenset(getattr(operations, name) for name in operations.__all__)
"""Kornia's wrapper classes of operations. A wrapper holds one augmentation and its magnitude."""


class KorniaPolicy(Policy):
    """Op of one of Kornia's policies. A sample picks choices without replacement.

    Args:
        name: Name of the policy in its container.
        module: Policy of the user.
        choices: Choices of ``module``, with the ops of their operations.
        pick: ``"batch"`` to share the picks among all samples of a batch; ``"sample"`` to pick per sample.
    """

    def __init__(self, name: str, module: nn.Module, choices: Sequence[Choice], pick: Pick) -> None:
        super().__init__(name, module)
        self.choices = tuple(choices)
        self.count = int(module.n) if isinstance(module, auto.RandAugment) else 1
        self.pick = pick
        self._numbers_per_op = max(map(_numbers_drawn, self.ops), default=0)
        """Largest number of uniform numbers per sample that any op draws."""

    @property
    def settings_of_draw(self) -> tuple[Any, ...]:  # type: ignore[override]
        """Magnitude setting of RandAugment; of other policies, the user's magnitude per operation, ``None`` if it is drawn."""
        if isinstance(self.module, auto.RandAugment):
            return (self.module.m,)
        return tuple(_fixed_magnitude(wrapper) for choice in self.choices for wrapper in choice.operations)

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Pick choices, and draw the parameters of their operations.

        Returns:
            ``"apply_mask"``, which is True for all samples; ``"layers"``, as ``Picking`` describes; and with ``pick="batch"``
            also ``"picks"``, (rounds, batches), the indices of the picked choices.
        """
        draws: OpDraws = {"apply_mask": np.ones(size.batch, dtype=bool)}
        repeats = 1
        if self.pick == "batch":
            picks = draws["picks"] = sampler.permutation(len(self.choices)).T[: self.count]
            repeats = sampler.samples_per_batch
        else:
            picks = sampler.uniform(len(self.choices)).argsort(0)[: self.count]
        layers = []
        for layer_index in range(self.count * self.layer_count):
            round_index, op_index = divmod(layer_index, self.layer_count)
            # A sample runs at most one operation of a layer, so all operations of the layer use the same uniform numbers.
            numbers = sampler.uniform(1 + self._numbers_per_op)
            drawn_choices = self.always_drawn[layer_index].union(np.flatnonzero(np.bincount(picks[round_index])).tolist())
            picks_of_samples = np.repeat(picks[round_index], repeats)
            layers.append(
                {
                    index: self._draw_op(op, self.choices[index].operations[op_index], numbers, size, picks_of_samples == index)
                    for index, op in self.layer(layer_index).items()
                    if index in drawn_choices
                }
            )
        return {**draws, "layers": tuple(layers)}

    def _draw_op(self, op: Op, wrapper: Any, numbers: Array, size: Size, mask: Array) -> OpDraws:
        """Return the draws of one operation.

        Args:
            op: Op of the operation.
            wrapper: Kornia's wrapper of the augmentation.
            numbers: Uniform numbers in [0, 1), (1 + n, B): one for the sign of the magnitude, then n for the op.
            size: Size of the input images.
            mask: Mask of the samples that picked the operation, (B,) bool.
        """
        draws = op.draw(ArraySampler(numbers[1:]), size)
        factor = wrapper._factor_name  # name of the drawn parameter that the magnitude sets; ``None`` without a magnitude
        if factor is not None:
            values = self._magnitude(wrapper, size)
            if values is None:
                values = _parameters_for(wrapper, torch.from_numpy(draws[factor]))
            draws[factor] = np.where((numbers[0] <= 0.5) & wrapper.symmetric_megnitude, -values, values)
        return {**draws, "apply_mask": draws["apply_mask"] & mask}

    def _magnitude(self, wrapper: Any, size: Size) -> Array | None:
        """Return the parameter for the magnitude of all samples, (1,) float32; ``None`` if a magnitude is drawn per sample."""
        if isinstance(self.module, auto.RandAugment):
            return _rand_augment_magnitude(wrapper, self.module.m, size.height, size.width)
        return None if _fixed_magnitude(wrapper) is None else _parameters_for(wrapper, wrapper.magnitude.detach())

    def unsupported_size(self, size: Size) -> str | None:
        """Reason why an operation cannot be fused for images of ``size``, or ``None``.

        Raises:
            ArgumentError: If an operation cannot be fused and ``pick="sample"``, because Kornia cannot pick per sample.
        """
        reason = super().unsupported_size(size)
        if reason is not None and self.pick == "sample":
            shape = "x".join(map(str, (size.channels, size.height, size.width)))
            raise ArgumentError(
                f"images must suit all operations of {self.name} with pick='sample', got images of {shape}: {reason}. "
                f"Leave that operation out: {type(self.module).__name__}(…, policy=[…])."
            )
        return reason

    def params(self, draws: OpDraws, size: Size) -> Any:
        """Draws in the format of the ``params=`` argument of Kornia's module. Only for ``pick="batch"``."""
        items = []
        for round_index, index in enumerate(draws["picks"][:, 0]):
            choice = self.choices[index]
            layers = draws["layers"][round_index * self.layer_count :]
            data = [ParamItem(op.name, op.params(layer[index], size)) for op, layer in zip(choice.ops, layers, strict=False)]
            items.append(ParamItem(choice.name, data))
        return items


def lower_policy(name: str, module: nn.Module, lowered: dict[type[nn.Module], type[Op]], pick: Pick) -> KorniaPolicy | str:
    """Create the op of a policy, or return the reason why Kornia runs the policy.

    Args:
        name: Name of the policy in its container.
        module: Policy of the user.
        lowered: Class of the op by class of Kornia's augmentation.
        pick: ``"batch"`` to share the picks among all samples of a batch; ``"sample"`` to pick per sample.
    """
    choices = []
    for choice_name, choice in module.named_children():
        if class_of(choice, (PolicySequential,)) is None:
            return f"{choice_name} is {difference(choice, PolicySequential)}"
        ops = []
        for operation_name, operation in choice.named_children():
            op = _op(operation_name, operation, lowered)
            if isinstance(op, str):
                return f"{operation_name} in {choice_name} is {op}"
            ops.append(op)
        choices.append(Choice(choice_name, tuple(ops), tuple(choice.children())))
    return KorniaPolicy(name, module, choices, pick)


def _op(name: str, operation: Any, lowered: dict[type[nn.Module], type[Op]]) -> Op | str:
    """Create the op of one operation, or return the reason why Kornia runs the policy.

    ``lowered``: class of the op by class of Kornia's augmentation. The reason completes the sentence "<operation> is …".
    """
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
    op = lowered[augmentation](name, inner)
    reason = op.unsupported()
    return f"not lowered: {reason}" if reason else op


@functools.cache
def _augmentation(wrapper: type) -> type[nn.Module]:
    """Return the class of the augmentation that a wrapper of class ``wrapper`` holds."""
    with initial_settings():
        inner: Any = wrapper().op
    return type(inner)


def _numbers_drawn(op: Op) -> int:
    """Return the number of uniform numbers that an op draws per sample, counted in a draw for an image."""
    sampler = Sampler((0,), 1, separate_generators=True)
    op.draw(sampler, Size(1, 3, 8, 8))
    return sampler.columns_drawn


def _fixed_magnitude(wrapper: Any) -> Any:
    """Return the magnitude that the user has set for an operation, or ``None``. It may change between two calls."""
    magnitude = wrapper._magnitude
    return None if magnitude is None else magnitude.item()


@functools.lru_cache(256)
def _rand_augment_magnitude(wrapper: Any, m: float, height: int, width: int) -> Array:
    """Return the parameter of an operation of a RandAugment with setting ``m``, before the random sign, (1,) float32."""
    # The same float32 operations in the same order as in Kornia, for equal results.
    fraction = host_tensor([m / 30], np.float32)
    low, high = wrapper.magnitude_range
    fraction = 1 - fraction if wrapper._factor_name == "bits_factor" else fraction
    side = {"translate_x": width, "translate_y": height}.get(wrapper._factor_name, 1)
    return _parameters_for(wrapper, (fraction * float(high - low) + low) * side)


def _parameters_for(wrapper: Any, values: torch.Tensor) -> Array:
    """Convert magnitudes, before the random sign, to parameters of the augmentation, by the wrapper's magnitude function."""
    function = wrapper._magnitude_fn
    parameters: Array = (function.fn if wrapper.symmetric_megnitude else function)(values).float().numpy()
    return parameters
