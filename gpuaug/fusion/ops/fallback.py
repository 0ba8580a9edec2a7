"""What is left to Kornia: a module that runs as it is, in its place, with draws that are keyed like all others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from kornia import augmentation as K
from kornia.augmentation.container.params import ParamItem
from torch import nn

from gpuaug.core.errors import add_note
from gpuaug.core.rng import Generators
from gpuaug.core.settings import initial_settings
from gpuaug.fusion.ops.base import Op, OpDraws, Size
from gpuaug.fusion.ops.sampler import Sampler


class EagerOp:
    """A module that is not lowered.

    Args:
        name: Its name in its container.
        module: The user's module, called as it is.
        reason: Why it is not lowered, in words for the user.
        lowered: The op that it would be for other images or settings, which knows the size of what comes out.
    """

    def __init__(self, name: str, module: nn.Module, reason: str, lowered: Op | None = None) -> None:
        self.name = name
        self.module = module
        self.reason = reason
        self.lowered = lowered
        # Kornia's container knows how each of its modules treats masks, boxes and keypoints. It is kept out of the module
        # tree, and without features it keeps no output alive.
        with initial_settings():
            self._container = K.AugmentationSequential(cast(Any, module), transformation_matrix_mode="skip")
        self._container.disable_features = True
        self.child_name = next(name for name, _ in self._container.named_children())

    @property
    def moves_nothing(self) -> bool:
        """Whether the module is known to leave masks, boxes and keypoints alone: it changes colours, and says no more."""
        base = K.IntensityAugmentationBase2D
        handlers = ("apply_transform_mask", "apply_transform_box", "apply_transform_keypoint")
        return isinstance(self.module, base) and all(
            getattr(type(self.module), name) is getattr(base, name) for name in handlers
        )

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Kornia's own parameters, drawn under a seed from ``sampler``, and a seed for modules that draw when they run."""
        key = sampler.key()
        shape = torch.Size((size.batch, size.channels, size.height, size.width))
        with self._named_in_errors(), Generators(torch.device("cpu")).keyed(key), initial_settings():
            return {"params": self._container.forward_parameters(shape), "key": key}

    def out(self, size: Size, drawn: OpDraws) -> Size:
        """The size of what comes out, as far as the parameters tell."""
        item: ParamItem = drawn["params"][0]
        if not isinstance(item.data, dict) or not bool((item.data["batch_prob"] > 0.5).all()):
            return size
        if self.lowered is not None:
            return self.lowered.out(size)
        if "output_size" in item.data and len(item.data["output_size"]):
            height, width = item.data["output_size"][0].tolist()
            return size.to(int(height), int(width))
        return size

    def run(self, values: list[Any], keys: list[str], drawn: OpDraws, device: torch.device) -> list[Any]:
        """The module on images (float32) and what follows them."""
        with self._named_in_errors(), Generators(device).keyed(drawn["key"]), initial_settings(), torch.no_grad():
            done = self._container(*values, params=drawn["params"], data_keys=keys)
        return list(done) if isinstance(done, list | tuple) else [done]

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            add_note(error, f"gpuaug: raised by Kornia in {self.name}, which is left to it: {self.reason}.")
            raise
