"""torchvision's RandAugment, TrivialAugmentWide, AutoAugment and AugMix, with independent picks per sample.

A *policy* picks some of its *choices* at random. A choice runs one *operation* or several in sequence. An operation is an
augmentation with a *magnitude*, such as an angle. torchvision divides the range of each magnitude into *bins*. Policies are
*lowered*: the operations run as ops in fused passes. In a *round*, each sample picks one choice; RandAugment has several
rounds. Layer k consists of the k-th operation of each choice, so that a sample runs at most one operation of a layer per round.
A *sample* is an image or a clip.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torchvision.transforms import v2

from gpuaug.core.settings import initial_settings
from gpuaug.fusion.ops.base import Array, OpDraws, Size
from gpuaug.fusion.ops.mix import ChainMix
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp, Units
from gpuaug.fusion.ops.torchvision.operations import OPERATIONS, Adjustment
from gpuaug.fusion.pixels import IMAGE_DTYPES
from gpuaug.fusion.policies.picking import Choice, Picking, Policy

Operation = tuple[str, float, int | None]
"""Operation of a policy, as in ``v2.AutoAugment``: (name, probability, bin).

The operation runs with this probability for a sample that picked its choice. The bin, an index, determines the magnitude of all
samples; ``None`` to draw a bin per sample.
"""


class TorchvisionPolicy(TorchvisionOp, Policy):
    """Op of one of torchvision's policies.

    Args:
        name: Name of the transform in its container.
        transform: Transform of the user.
        units: dtype whose value range the transform's settings refer to.

    Support: fused for bytes of one or three channels, an error for bytes of other numbers of channels; for other types run
    by torchvision, except that floats are fused if no operation is Posterize, as in the policy of SVHN; operations are
    picked per sample, with torchvision's magnitudes, and only the passes of the picked operations process the sample.
    """

    lowers = (v2.RandAugment, v2.TrivialAugmentWide, v2.AutoAugment)
    pick = "sample"

    def _read(self, transform: Any) -> None:
        self.count = max(0, int(transform.num_ops)) if isinstance(transform, v2.RandAugment) else 1
        self._bins = 10 if isinstance(transform, v2.AutoAugment | v2.AugMix) else transform.num_magnitude_bins
        """Number of bins into which the range of a magnitude is divided."""
        self._drawn_bins = slice(None)
        """Bins from which magnitudes are drawn."""
        self.choices = tuple(_choice(operations, transform, self.units) for operations in _operations_of_choices(transform))

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        bins = (bin_ for choice in self.choices for *_, bin_ in choice.operations if bin_ is not None)
        # As in torchvision, a negative index counts from the last bin.
        if any(not -self._bins <= bin_ < self._bins for bin_ in bins):
            return "the magnitude of an operation is not one of its bins"
        ops = (op for op in self.ops if isinstance(op, TorchvisionOp))
        return next((reason for op in ops if (reason := op.unsupported()) is not None), None)

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Pick choices, and draw the magnitudes of their operations.

        Returns:
            ``"apply_mask"`` and ``"layers"``, as in the docstrings of ``Policy`` and ``Picking``.
        """
        return self.draw_picks(sampler, size, self.draw_apply_mask(sampler, size.batch), self.count)

    def draw_picks(self, sampler: Sampler, size: Size, applies: Array, counts: Any) -> OpDraws:
        """Draw for the samples of the mask ``applies``, (B,) bool.

        ``counts``: number of rounds whose picks run for a sample, (B,), or one number for all samples; at most ``count``.
        """
        # Index of the picked choice per round and sample, (count, B). A sample may pick a choice twice.
        picks = (sampler.uniform(self.count) * len(self.choices)).astype(np.int64)
        layers = [
            self._draw_layer(op_index, picks_of_round, applies & (round_index < counts), sampler.uniform(3), size)
            for round_index, picks_of_round in enumerate(picks)
            for op_index in range(self.layer_count)
        ]
        return {"apply_mask": applies, "layers": tuple(layers)}

    def _draw_layer(self, op_index: int, picks: Array, applies: Array, numbers: Array, size: Size) -> dict[int, OpDraws]:
        """Return the draws of the operations of one layer in one round, by index of the choice.

        Args:
            op_index: Index of the operations of the layer in their choices.
            picks: Index of the choice that each sample picked, (B,).
            applies: Mask of the samples that run the pick, (B,) bool.
            numbers: Uniform numbers in [0, 1), (3, B), for: whether the operation runs, its bin, and its sign.
            size: Size of the images.
        """
        magnitudes, has_magnitude, is_signed = self._magnitudes(op_index, size.height, size.width)
        # A sample runs at most one operation of a layer, so all operations of the layer use the same uniform numbers.
        run_numbers, bin_numbers, sign_numbers = numbers
        magnitude = magnitudes[picks, (bin_numbers * magnitudes.shape[1]).astype(np.int64)]
        magnitude = np.where(is_signed[picks] & (sign_numbers < 0.5), -magnitude, magnitude)
        layer: dict[int, OpDraws] = {}
        for choice_index, op in self.layer(op_index).items():
            p = self.choices[choice_index].operations[op_index][1]
            draws: OpDraws = {"magnitude": magnitude} if has_magnitude[choice_index] else {}
            if isinstance(op, Adjustment):
                draws["adjustment"] = op.adjustment
            mask = applies & (picks == choice_index)
            layer[choice_index] = {**draws, "apply_mask": mask & (run_numbers < p) if p < 1 else mask}
        return layer

    @functools.lru_cache(256)  # noqa: B019
    def _magnitudes(self, op_index: int, height: int, width: int) -> tuple[Array, Array, Array]:
        """Return the magnitudes of the operations of layer ``op_index``, for images of ``height`` x ``width`` pixels.

        Cached: a draw of RandAugment for 64 images takes 49 µs with the cache, and 76 µs without.

        Returns:
            Magnitudes of the bins that can be drawn, from torchvision's table, (choices, bins) float64; whether the operation
            of each choice has a magnitude, (choices,) bool; and whether the sign of the magnitude is random, (choices,) bool.
        """
        space = _augmentation_space(self.module)
        magnitudes_of_choices: list[Any] = [0.0] * len(self.choices)
        has_magnitude, is_signed = np.zeros((2, len(self.choices)), bool)
        for choice_index in self.layer(op_index):
            name, _, bin_ = self.choices[choice_index].operations[op_index]
            magnitudes_for, is_signed[choice_index] = space[name]
            with initial_settings():  # torchvision creates tensors without device and dtype
                magnitudes = magnitudes_for(self._bins, height, width)
            if magnitudes is not None:
                has_magnitude[choice_index] = True
                magnitudes_of_choices[choice_index] = magnitudes.double().numpy()[self._drawn_bins if bin_ is None else [bin_]]
        # Choices without a magnitude, or with a fixed bin, have one value, which broadcasting repeats for all bins. zeros(1)
        # adds an axis of bins if no choice has one, and [:-1] drops the result of zeros(1).
        return np.stack(np.broadcast_arrays(*magnitudes_of_choices, np.zeros(1))[:-1]), has_magnitude, is_signed

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """Calls of torchvision's functions that do what the policy does for ``sample``, in order."""
        calls: list[Call] = []
        for layer_index, layer in enumerate(draws["layers"]):  # of all rounds; ``self.layer`` takes the index within a round
            for choice_index, op_draws in layer.items():
                op = self.layer(layer_index)[choice_index]
                assert isinstance(op, TorchvisionOp)
                calls += op.calls(op_draws, sample, size) if op_draws["apply_mask"][sample] else []
        return calls


class _Chain(TorchvisionPolicy):
    """Op of a *chain* of ``v2.AugMix``, a sequence of ``chain_depth`` operations; of 1 to 3 if the setting is not positive."""

    def _read(self, transform: Any) -> None:
        super()._read(transform)
        self._draws_depth = not transform.chain_depth > 0
        self.count = 3 if self._draws_depth else int(transform.chain_depth)
        self._bins = transform._PARAMETER_MAX
        self._drawn_bins = slice(int(transform.severity))

    def draw_applied(self, sampler: Sampler, size: Size, applies: Array) -> OpDraws:
        """Draw the operations of the chain for the samples of the mask ``applies``, (B,) bool."""
        depths = 1 + (sampler.uniform() * self.count).astype(np.int64) if self._draws_depth else self.count
        return self.draw_picks(sampler, size, applies, depths)


class AugMix(TorchvisionOp, Picking, ChainMix):
    """Op of ``v2.AugMix``: a weighted mean of the image and of the results of chains.

    Unlike in a policy, a sample runs all choices: each is one chain.

    Support: fused for bytes of one or three channels, an error for bytes of other numbers of channels and for masks, boxes and
    keypoints; for other types run by torchvision; chains, operations and weights are drawn per sample, and the chains run in
    the same passes, followed by a mix that PyTorch computes for the whole batch.
    """

    lowers = (v2.AugMix,)
    pick = "sample"
    unfused_dtypes = tuple(IMAGE_DTYPES - {torch.uint8})

    def _read(self, transform: Any) -> None:
        names = [f"chain_{index}" for index in range(int(transform.mixture_width))]
        self.chains: tuple[_Chain, ...] = tuple(_Chain(name, transform, self.units) for name in names)
        self.choices = tuple(Choice(chain.name, (chain,)) for chain in self.chains)
        self._alpha = float(transform.alpha)

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        transform: Any = self.module
        if not (self.chains and 0 < self._alpha < math.inf and 1 <= transform.severity <= transform._PARAMETER_MAX):
            return "mixture_width, alpha or severity is out of range"
        return super().unsupported() or self.chains[0].unsupported()

    def unsupported_size(self, size: Size) -> str | None:
        """Reason why an operation cannot be fused for images of ``size``, or ``None``."""
        return self.chains[0].unsupported_size(size)

    def per_channel(self, channels: int) -> dict[str, Any]:
        """Settings of the operations that have one value, or one per channel, by name."""
        return {name: value for op in self.ops for name, value in op.per_channel(channels).items()}

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the weights of the image and of the chains, and the operations of the chains.

        Returns:
            ``"apply_mask"``; ``"weights"``, (B, 1 + chains), the first for the image; and ``"layers"`` with one layer, the
            draws of each chain by its index.
        """
        applies = self.draw_apply_mask(sampler, size.batch)
        image_weight = sampler.beta(self._alpha)
        weights = np.stack((image_weight, *(1 - image_weight) * sampler.dirichlet(self._alpha, len(self.chains))))
        layer = {index: chain.draw_applied(sampler, size, applies) for index, chain in enumerate(self.chains)}
        weights = np.where(applies, weights, np.eye(len(weights), 1, dtype=np.float32))
        return {"apply_mask": applies, "weights": weights.T, "layers": (layer,)}

    def numbers(self, draws: OpDraws, sample: int) -> dict[str, float]:
        """Weights of one sample: ``weights_0`` of the image, ``weights_1`` of the first chain, and so on."""
        return {f"weights_{index}": float(weight) for index, weight in enumerate(draws["weights"][sample])}

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """One call of ``augmix``, which torchvision lacks, with the calls of each chain and the weights of image and chains."""
        chains = [chain.calls(draws["layers"][0][index], sample, size) for index, chain in enumerate(self.chains)]
        return [("augmix", {"chains": chains, "weights": draws["weights"][sample].tolist()})]

    def describe(self) -> str:
        """Short description for ``explain()``."""
        return f"weighted mean of the image and of {len(self.chains)} chains"


def _operations_of_choices(policy: Any) -> list[Sequence[Operation]]:
    """Return the operations of each choice of a policy, in the order in which they run."""
    if isinstance(policy, v2.AutoAugment):
        return list(policy._policies)
    bin_ = policy.magnitude if isinstance(policy, v2.RandAugment) else None
    return [[(name, 1.0, bin_)] for name in _augmentation_space(policy)]


def _augmentation_space(policy: Any) -> Any:
    """Return torchvision's table of operations: (function that returns the magnitudes of the bins, whether the sign is random).

    The keys are the names of the operations.
    """
    is_partial = isinstance(policy, v2.AugMix) and not policy.all_ops
    return policy._PARTIAL_AUGMENTATION_SPACE if is_partial else policy._AUGMENTATION_SPACE


def _choice(operations: Sequence[Operation], policy: nn.Module, units: Units) -> Choice:
    """Create a choice with an op for each operation except the identity."""
    operations = [operation for operation in operations if operation[0] != "Identity"]
    names = [name for name, _, _ in operations]
    return Choice(", ".join(names), tuple(OPERATIONS[name](name, policy, units) for name in names), tuple(operations))
